//! Holds of many leases by clients that cancel, in sessions that are used again and that an operator ends, at random. What
//! is checked is what holders themselves believe: whoever is granted a lock asks all others whether they still hold it.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use lockkit_core::{AcquireOptions, Error, Held, LockClient, LockGuard};
use lockkit_mysql::Mode;
use lockkit_testbed::mysql::Flavour;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    servers::{Admin, MODES, client, for_each_flavour, private},
    tokens::seed,
};

for_each_flavour! {
    leases_cancels_and_kills_at_random
}

const LASTS: Duration = Duration::from_secs(8);
const NAMES: usize = 3;
const CLIENTS: usize = 3;
const TASKS: usize = 4;
const HANDOFFS: u32 = 8;
/// Within this the holder of a session that was ended is told of it, mostly: its watch may have been ended as well.
const TOLD: Duration = Duration::from_secs(2);
/// In seconds.
const TTLS: [u64; 4] = [1, 2, 5, 60];

/// Polls `future` so often at most, each time when there is something to poll it for, and drops it.
pub(crate) async fn polled<F: Future>(times: u32, future: F) -> Option<F::Output> {
    let (mut future, mut left) = (pin!(future), times);
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// The view from outside.
#[derive(Default)]
struct Seen {
    holds: HashMap<String, Vec<(u64, Instant, Held)>>,
    highest: HashMap<String, u64>,
    /// The session that was seen to hold, by the first of its tokens: it may have passed on the hold with a later one.
    sessions: BTreeMap<u64, u64>,
    killed: HashMap<u64, Instant>,
    granted: usize,
    excused: usize,
    violations: Vec<String>,
}

impl Seen {
    fn grant(&mut self, name: &str, (asked, before): (Instant, u64), guard: &LockGuard, ttl: u64) {
        let token = guard.token().get();
        self.granted += 1;
        // A session that has been ended may pass on what it held, until that is told: with tokens that were superseded.
        if token <= before && !self.was_killed(token, asked - TOLD) {
            self.violations.push(format!(
                "{name}: token {token} was granted after {before} was known"
            ));
        }
        let mut holds = self.holds.remove(name).unwrap_or_default();
        for (other, since, held) in &holds {
            // A look at itself latches what has expired.
            if !held.is_held() || !guard.is_held() {
                continue;
            }
            // Whoever has the lower token has been superseded, and may not have heard of it yet.
            let (lower, since) = if *other < token {
                (*other, *since)
            } else {
                (token, asked)
            };
            if self.was_killed(lower, since) {
                self.excused += 1;
            } else {
                self.violations.push(format!(
                    "{name}: {token} (ttl {ttl} s) was granted beside {other}, which is held in session {:?}",
                    self.sessions.get(other)
                ));
            }
        }
        holds.push((token, asked, guard.held()));
        self.holds.insert(name.to_owned(), holds);
        let highest = self.highest.entry(name.to_owned()).or_default();
        *highest = token.max(*highest);
    }

    /// True if the session of a hold that was asked for at that time has been ended, or may have been: one that has not been
    /// seen yet may be in the session of another token of its block, or in one that nobody saw.
    fn was_killed(&self, token: u64, asked: Instant) -> bool {
        let is_killed = |session: &u64| self.killed.contains_key(session);
        if let Some(session) = self.sessions.get(&token) {
            return is_killed(session);
        }
        let block = token.saturating_sub(u64::from(HANDOFFS))..token;
        self.sessions.range(block).any(|(_, session)| is_killed(session))
            || self.killed.values().any(|at| *at >= asked)
    }

    fn end(&mut self, name: &str, token: u64) {
        if let Some(holds) = self.holds.get_mut(name) {
            holds.retain(|(other, ..)| *other != token);
        }
    }
}

async fn leases_cancels_and_kills_at_random(flavour: Flavour) {
    let seed = seed();
    for mode in MODES {
        let server = private(flavour, &[]);
        let view = Arc::new(Mutex::new(Seen::default()));
        let until = Instant::now() + LASTS;
        let mut tasks = JoinSet::new();
        for who in 0..CLIENTS {
            let client = client(server.addr(), mode).await;
            for task in 0..TASKS {
                let rng = fastrand::Rng::with_seed(seed.wrapping_add((who * 100 + task) as u64));
                tasks.spawn(work(client.clone(), view.clone(), rng, until));
            }
        }
        let mut admin = Admin::of(&server).await;
        let mut rng = fastrand::Rng::with_seed(seed);
        while Instant::now() < until {
            sleep(Duration::from_millis(rng.u64(5..30))).await;
            if mode == Mode::ForUpdate {
                look_at_sessions(&mut admin, &view).await;
            }
            if rng.u8(..5) == 0 {
                // Whatever it is at, or for: a hold, a wait, the next acquisition, tokens, breaks.
                let ids = admin.sessions().await;
                if let Some(id) = rng.choice(&ids) {
                    view.lock().unwrap().killed.insert(*id, Instant::now());
                    let _ = admin.try_run(&format!("KILL {id}")).await;
                }
            }
        }
        timeout(Duration::from_secs(40), tasks.join_all())
            .await
            .expect("everyone gets the lock in the end");
        let view = view.lock().unwrap();
        eprintln!(
            "{flavour:?} {mode:?}: {} grants, {} beside a holder whose session had been killed, {} kills",
            view.granted,
            view.excused,
            view.killed.len()
        );
        assert!(view.violations.is_empty(), "{:#?}", view.violations);
        assert!(view.granted > 40 && view.killed.len() > 20, "a vacuous pass");
    }
}

/// Notes the sessions of the holds that are shown.
async fn look_at_sessions(admin: &mut Admin, seen: &Mutex<Seen>) {
    let shown = admin
        .run(
            "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
             SELECT token, connection FROM lockkit_holder",
        )
        .await;
    let mut seen = seen.lock().unwrap();
    for row in shown {
        seen.sessions
            .insert(row[0].parse().unwrap(), row[1].parse().unwrap());
    }
}

async fn work(client: LockClient, seen: Arc<Mutex<Seen>>, mut rng: fastrand::Rng, until: Instant) {
    while Instant::now() < until {
        let ttl = TTLS[rng.usize(..TTLS.len())];
        let name = format!("mixed/{}", rng.usize(..NAMES));
        let options = AcquireOptions::new()
            .ttl(Duration::from_secs(ttl))
            .local_handoffs(rng.u32(..=HANDOFFS));
        let lock = client.lock(&name).unwrap().with_options(options);
        let asked = Instant::now();
        let before = seen.lock().unwrap().highest.get(&name).copied().unwrap_or(0);
        let granted = match rng.u8(..10) {
            0..4 => polled(rng.u32(1..8), lock.acquire()).await.transpose(),
            4..6 => lock.try_acquire().await,
            _ => {
                let wait = Duration::from_millis(rng.u64(1..3_000));
                lock.acquire_timeout(wait).await.map(Some)
            }
        };
        let guard = match granted {
            Ok(Some(guard)) => guard,
            Ok(None) | Err(Error::Lost { .. }) => continue,
            Err(error) if error.is_timeout() || error.is_transient() => continue,
            Err(error) => panic!("{error:?}"),
        };
        let token = guard.token().get();
        seen.lock().unwrap().grant(&name, (asked, before), &guard, ttl);
        let works = match rng.u8(..20) {
            // Long enough for a shorter lease to be over.
            0 => 2_600,
            1..6 => rng.u64(20..200),
            _ => rng.u64(0..8),
        };
        let _ = timeout(Duration::from_millis(works), guard.lost()).await;
        seen.lock().unwrap().end(&name, token);
        if rng.bool() {
            let _ = polled(rng.u32(1..6), guard.release()).await;
        } else {
            drop(guard);
        }
    }
}
