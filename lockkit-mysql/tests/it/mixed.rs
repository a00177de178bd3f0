//! Random holds of many ttls, by clients that cancel, in sessions that are used again and that an operator kills. The test
//! checks what the holders believe: a new holder asks all others whether they still hold.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Error, HoldView, LockClient, LockGuard};
use lockkit_testbed::mysql::Flavour;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    instrument::WithSubscriber,
    span::{Attributes, Id, Record},
};

use crate::{
    servers::{Admin, MODES, client, for_each_flavour, private},
    tokens::seed,
};

for_each_flavour! {
    leases_cancels_and_kills_at_random
}

const LASTS: Duration = Duration::from_secs(8);
/// On a machine that is busy with other things it lasts for longer.
const LASTS_AT_MOST: Duration = Duration::from_mins(1);
const GRANTS: usize = 40;
const KILLS: usize = 20;
const NAMES: usize = 3;
const CLIENTS: usize = 3;
const TASKS: usize = 4;
const HANDOFFS: u32 = 8;
/// The longest time on a busy machine until a renewal tells that the session was killed.
const TELLING: Duration = Duration::from_secs(2);
/// In seconds.
const TTLS: [u64; 4] = [1, 2, 5, 60];

/// Polls `future` so many times at most, each time that it was woken, and drops it.
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
    holds: HashMap<String, Vec<Seat>>,
    highest: HashMap<String, u64>,
    killed: HashMap<u64, Stopwatch>,
    granted: usize,
    /// After a kill: grants beside a holder, and holds that were passed on with a token below a known
    /// one.
    excused: [usize; 2],
    violations: Vec<String>,
}

/// A hold, as its holder believes in it.
struct Seat {
    token: u64,
    ttl: u64,
    held: HoldView,
}

/// The session in which each token was granted, as the backend reports: by name and first token.
#[derive(Clone, Default)]
struct Granted(Arc<Mutex<BTreeMap<(String, u64), Grant>>>);

#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    first: u64,
    /// The last token with which the hold can be passed on.
    last: u64,
    session: u64,
}

impl Granted {
    fn of(&self, name: &str, token: u64) -> Option<Grant> {
        let granted = self.0.lock().unwrap();
        let ((of, _), grant) = granted.range(..=(name.to_owned(), token)).next_back()?;
        (of == name && token <= grant.last).then_some(*grant)
    }
}

impl Subscriber for Granted {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.fields().field("session").is_some()
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Fields { name, grant } = fields;
        self.0.lock().unwrap().insert((name, grant.first), grant);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Fields {
    name: String,
    grant: Grant,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "first" => self.grant.first = value,
            "last" => self.grant.last = value,
            "session" => self.grant.session = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "lock" {
            // Escaped, and in quotes.
            format!("{value:?}").trim_matches('"').clone_into(&mut self.name);
        }
    }
}

impl Seen {
    /// Notes what this grant contradicts. One excuse is valid: the session with the lower token was killed, and
    /// its client may not know that yet. Until then it may even pass the hold on.
    fn grant(&mut self, name: &str, before: u64, granted: &Granted, (guard, ttl): (&LockGuard, u64)) {
        let token = guard.token().get();
        self.granted += 1;
        let excuse = |seen: &Self, token, ttl| {
            let grant = granted.of(name, token);
            let killed = grant.and_then(|grant| seen.killed.get(&grant.session));
            let ago = killed.map(|killed| killed.elapsed());
            let what = format!("{token} (ttl {ttl} s) is of {grant:?}, killed {ago:?} ago");
            match (grant, ago) {
                (Some(grant), Some(ago)) if ago < Duration::from_secs(ttl) / 3 + TELLING => Ok(grant),
                _ => Err(what),
            }
        };
        if token <= before {
            match excuse(self, token, ttl) {
                // A grant by the server has a token above all earlier ones.
                Ok(grant) if token > grant.first => self.excused[1] += 1,
                why => self
                    .violations
                    .push(format!("{name}: after {before} was known: {why:?}")),
            }
        }
        let mut holds = self.holds.remove(name).unwrap_or_default();
        for other in &holds {
            // Its own check latches an expired lease.
            if !other.held.is_held() || !guard.is_held() {
                continue;
            }
            let (lower, ttl) = (other.token, other.ttl).min((token, ttl));
            match excuse(self, lower, ttl) {
                Ok(_) => self.excused[0] += 1,
                Err(why) => self.violations.push(format!(
                    "{name}: {token} was granted beside {}: {why}",
                    other.token
                )),
            }
        }
        let held = guard.view();
        holds.push(Seat { token, ttl, held });
        self.holds.insert(name.to_owned(), holds);
        let highest = self.highest.entry(name.to_owned()).or_default();
        *highest = token.max(*highest);
    }

    fn end(&mut self, name: &str, token: u64) {
        if let Some(holds) = self.holds.get_mut(name) {
            holds.retain(|seat| seat.token != token);
        }
    }
}

async fn leases_cancels_and_kills_at_random(flavour: Flavour) {
    let seed = seed();
    for mode in MODES {
        let server = private(flavour, &[]);
        let view = Arc::new(Mutex::new(Seen::default()));
        let granted = Granted::default();
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for who in 0..CLIENTS {
            let client = client(server.addr(), mode).await;
            for task in 0..TASKS {
                let rng = fastrand::Rng::with_seed(seed.wrapping_add((who * 100 + task) as u64));
                let work = work(client.clone(), view.clone(), granted.clone(), (rng, stop.clone()));
                tasks.spawn(work.with_subscriber(granted.clone()));
            }
        }
        let mut admin = Admin::of(&server).await;
        let mut rng = fastrand::Rng::with_seed(seed);
        let began = Instant::now();
        let is_enough = || {
            let view = view.lock().unwrap();
            view.granted > GRANTS && view.killed.len() > KILLS
        };
        while began.elapsed() < LASTS || (!is_enough() && began.elapsed() < LASTS_AT_MOST) {
            sleep(Duration::from_millis(rng.u64(5..30))).await;
            if rng.u8(..5) == 0 {
                // Any session: of a hold, a wait, an idle one, a control connection, the disconnect watch.
                let ids = admin.sessions().await;
                if let Some(id) = rng.choice(&ids) {
                    let killed = Stopwatch::start();
                    view.lock().unwrap().killed.entry(*id).or_insert(killed);
                    let _ = admin.try_run(&format!("KILL {id}")).await;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        timeout(Duration::from_secs(40), tasks.join_all())
            .await
            .expect("everyone gets the lock in the end");
        assert!(is_enough(), "a vacuous pass");
        let view = view.lock().unwrap();
        eprintln!(
            "{flavour:?} {mode:?}: {} grants, {:?} of sessions that had been killed, {} kills",
            view.granted,
            view.excused,
            view.killed.len()
        );
        assert!(view.violations.is_empty(), "{:#?}", view.violations);
    }
}

async fn work(
    client: LockClient,
    seen: Arc<Mutex<Seen>>,
    sessions: Granted,
    (mut rng, stop): (fastrand::Rng, Arc<AtomicBool>),
) {
    while !stop.load(Ordering::Relaxed) {
        let ttl = TTLS[rng.usize(..TTLS.len())];
        let name = format!("mixed/{}", rng.usize(..NAMES));
        let options = AcquireOptions::new()
            .ttl(Duration::from_secs(ttl))
            .local_handoffs(rng.u32(..=HANDOFFS));
        let lock = client.lock(&name).unwrap().with_options(options);
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
        seen.lock()
            .unwrap()
            .grant(&name, before, &sessions, (&guard, ttl));
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
