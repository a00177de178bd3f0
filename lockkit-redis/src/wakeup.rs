//! Wake-ups: routes pushes of the server to claims, and tells claims when to ask although no push came.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::spi::{Mutex, OwnerId};
use tokio::{sync::Notify, time::Instant};

/// The last token that there can be. The scripts count as far as Lua can tell numbers apart.
pub(crate) const LAST_TOKEN: u64 = (1 << 53) - 1;

/// The time for which a release may have been confirmed by a master that was replaced: its clients hear of that within about a second, and
/// connect to the new one within two more.
const RELEASED_LATELY: Duration = Duration::from_secs(5);

/// The wake-ups of all claims of one client.
#[derive(Debug, Default)]
pub(crate) struct Wakeups {
    /// The client takes a hand-off from the push.
    takes_hand_offs: bool,
    /// The highest token that the client has had. One that is drawn later is higher.
    highest_token: AtomicU64,
    by_owner: Mutex<HashMap<u128, Arc<Wakeup>>>,
    /// Owners of dropped claims that the server may still have in a queue, each with the key of its lock.
    abandoned: Mutex<HashMap<u128, Vec<u8>>>,
    /// Owners of claims that are gone whose release a master under Sentinel has lately confirmed, each with the key of its lock: the master
    /// may have been replaced already.
    released: Mutex<VecDeque<(Instant, OwnerId, Vec<u8>)>>,
    /// The number of claims that are in a queue at the server.
    waiting: Arc<AtomicUsize>,
}

/// The wake-up of one claim.
#[derive(Debug, Default)]
pub(crate) struct Wakeup {
    /// The key of its lock. What is said of another one is not meant for it.
    lock: Vec<u8>,
    changed: Notify,
    state: Mutex<State>,
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct State {
    woken: bool,
    /// The server has the claim in a queue, so its client sends heartbeats.
    waits: bool,
    /// The time at which the claim asks although nothing woke it.
    ask_at: Option<Instant>,
    /// Set while the claim waits, and is not the first in the queue.
    follows: Option<Follows>,
    /// The masters, of several, that told the claim that the lock is free. Set while it listens.
    free_at: Option<Vec<usize>>,
    /// The hold that a push brought since the claim asked last.
    hand_off: Option<HandOff>,
}

/// A place in a queue behind others. The server tells the claim when it becomes the first. Exception: after a hand-off whose lease
/// lasts for a heartbeat or longer it does not, so the supervisor looks at each heartbeat, too.
#[derive(Debug)]
pub(crate) struct Follows {
    /// The key of the lock.
    pub(crate) lock: Vec<u8>,
    /// A foreign client holds the lock.
    pub(crate) foreign: bool,
}

/// A hold that a push brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandOff {
    /// The first token.
    pub(crate) token: u64,
    pub(crate) origin: PushOrigin,
}

/// Proves that a push is not too old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PushOrigin {
    /// The number of the connection that it came on.
    pub(crate) connection: u64,
    /// The time at which the last request was sent there that was answered before the push.
    pub(crate) since: Instant,
}

impl Wakeups {
    /// Makes those of a client of the one master, which takes a hand-off from the push, or does not.
    pub(crate) fn new(takes_hand_offs: bool) -> Self {
        Self {
            takes_hand_offs,
            ..Self::default()
        }
    }

    /// Notes a token that the client has had.
    pub(crate) fn saw(&self, token: u64) {
        self.highest_token.fetch_max(token, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, owner: OwnerId, lock: &[u8]) -> Arc<Wakeup> {
        let new = || {
            Arc::new(Wakeup {
                lock: lock.to_vec(),
                waiting: self.waiting.clone(),
                ..Wakeup::default()
            })
        };
        self.by_owner
            .lock()
            .entry(owner.get())
            .or_insert_with(new)
            .clone()
    }

    /// Returns the wake-up of the owner's claim for this lock.
    fn get(&self, owner: OwnerId, lock: &[u8]) -> Option<Arc<Wakeup>> {
        let map = self.by_owner.lock();
        map.get(&owner.get())
            .filter(|wakeup| wakeup.lock == lock)
            .cloned()
    }

    /// Returns whether the client may have been handed a hold with this token just now.
    fn is_new(&self, token: u64) -> bool {
        self.takes_hand_offs && (self.highest_token.load(Ordering::Relaxed) + 1..=LAST_TOKEN).contains(&token)
    }

    pub(crate) fn remove(&self, owner: OwnerId) {
        let removed = self.by_owner.lock().remove(&owner.get());
        if let Some(wakeup) = removed {
            wakeup.set_waits(&mut wakeup.state.lock(), false);
        }
    }

    /// Notes that a claim was dropped that may be in this lock's queue. The client's heartbeat would keep its place there.
    pub(crate) fn abandon(&self, owner: OwnerId, lock: Vec<u8>) {
        /// A server that refuses requests for days must not fill the client's memory.
        const MOST: usize = 10_000;

        let mut abandoned = self.abandoned.lock();
        if abandoned.len() < MOST {
            abandoned.insert(owner.get(), lock);
        }
    }

    /// Returns the dropped claims that the server has not been told of.
    pub(crate) fn all_abandoned(&self) -> Vec<(OwnerId, Vec<u8>)> {
        let abandoned = self.abandoned.lock();
        let pairs = abandoned.iter();
        pairs
            .map(|(owner, lock)| (OwnerId::new(*owner), lock.clone()))
            .collect()
    }

    /// Notes that a master has confirmed the last release of a claim that is gone.
    pub(crate) fn released(&self, owner: OwnerId, lock: Vec<u8>) {
        /// The most that are kept.
        const MOST: usize = 10_000;

        let now = Instant::now();
        let mut released = self.released.lock();
        while released.len() == MOST
            || released
                .front()
                .is_some_and(|(at, ..)| now.saturating_duration_since(*at) > RELEASED_LATELY)
        {
            released.pop_front();
        }
        released.push_back((now, owner, lock));
    }

    /// Returns what was released within [`RELEASED_LATELY`].
    pub(crate) fn lately_released(&self) -> Vec<(OwnerId, Vec<u8>)> {
        let now = Instant::now();
        let released = self.released.lock();
        let lately = |at: &Instant| now.saturating_duration_since(*at) <= RELEASED_LATELY;
        let released = released.iter().filter(|(at, ..)| lately(at));
        released.map(|(_, owner, lock)| (*owner, lock.clone())).collect()
    }

    /// Notes that the server has been told of a dropped claim.
    pub(crate) fn forget_abandoned(&self, owner: OwnerId) {
        self.abandoned.lock().remove(&owner.get());
    }

    /// Returns whether any claim is in a queue at the server.
    pub(crate) fn any_waits(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Delivers a push of the one master: `<owner> <ms>[:<token>] <lock>`.
    ///
    /// Zero `ms`: the lock was handed off to the owner, with this token if there is one; or its hold was ended. Otherwise the
    /// owner is now the first in the queue, and the lease before it lasts for `ms`.
    ///
    /// A token that cannot be that of a new hold is not believed: the claim asks instead.
    ///
    /// Returns owner and lock if the claim is gone and was handed something that has to be released.
    pub(crate) fn push<'a>(
        &self,
        message: &'a [u8],
        origin: Option<PushOrigin>,
    ) -> Option<(OwnerId, &'a [u8])> {
        let (owner, what, lock) = parse(message)?;
        let (ms, token) = what.split_once(':').unwrap_or((what, ""));
        let ms: u64 = ms.parse().ok()?;
        match self.get(owner, lock) {
            Some(wakeup) if ms == 0 => {
                let token = token.parse().ok().filter(|token| self.is_new(*token));
                let hand_off = token.zip(origin).map(|(token, origin)| HandOff { token, origin });
                wakeup.state.lock().hand_off = hand_off;
                wakeup.wake();
            }
            Some(wakeup) => wakeup.ask_in(Duration::from_millis(ms)),
            None => {
                let is_its = |abandoned: &Vec<u8>| abandoned == lock;
                let was_handed = ms == 0 && self.abandoned.lock().get(&owner.get()).is_some_and(is_its);
                return was_handed.then_some((owner, lock));
            }
        }
        None
    }

    /// Delivers a push of one of several masters: `<owner> <what> <lock>`.
    ///
    /// `1`: the lock is free there and kept for the owner, which asks once `majority` masters have said so. `0`: the owner's
    /// hold was ended there.
    pub(crate) fn hint(&self, master: usize, majority: usize, message: &[u8]) {
        let Some((owner, what, lock)) = parse(message) else {
            return;
        };
        let Some(wakeup) = self.get(owner, lock) else {
            return;
        };
        match what {
            "0" => wakeup.wake(),
            "1" => wakeup.is_free_at(master, majority),
            _ => {}
        }
    }

    /// Returns the claims that wait behind others, each with the key of its lock.
    pub(crate) fn followers(&self) -> Vec<(OwnerId, Arc<Wakeup>, Vec<u8>)> {
        let map = self.by_owner.lock();
        let followers = map.iter().filter_map(|(owner, wakeup)| {
            let lock = wakeup.state.lock().follows.as_ref()?.lock.clone();
            Some((OwnerId::new(*owner), wakeup.clone(), lock))
        });
        followers.collect()
    }

    /// Wakes all claims. A new connection may have missed any push.
    pub(crate) fn wake_all(&self) {
        let wakeups: Vec<_> = self.by_owner.lock().values().cloned().collect();
        for wakeup in wakeups {
            wakeup.wake();
        }
    }
}

/// Splits a push into the owner, what is said to it, and the key of the lock.
fn parse(message: &[u8]) -> Option<(OwnerId, &str, &[u8])> {
    let mut parts = message.splitn(3, |b| *b == b' ');
    let owner = std::str::from_utf8(parts.next()?).ok()?;
    let owner = OwnerId::new(u128::from_str_radix(owner, 16).ok()?);
    let what = std::str::from_utf8(parts.next()?).ok()?;
    Some((owner, what, parts.next()?))
}

impl Wakeup {
    fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_one();
    }

    fn set_waits(&self, state: &mut State, waits: bool) {
        match (std::mem::replace(&mut state.waits, waits), waits) {
            (false, true) => _ = self.waiting.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.waiting.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Forgets what has been heard so far. The request that follows deals with it.
    pub(crate) fn begin(&self) {
        let mut state = self.state.lock();
        *state = State {
            waits: state.waits,
            free_at: state.free_at.take(),
            ..State::default()
        };
    }

    /// Has the claim ask after this time at the latest. An earlier time stays: a push may be handled before the reply that
    /// the server sent before it, and knows better.
    pub(crate) fn ask_in(&self, after: Duration) {
        /// A server may name any number of milliseconds, also one that no clock can count.
        const LONGEST: Duration = Duration::from_secs(24 * 3600);

        let at = Instant::now() + after.min(LONGEST);
        let mut state = self.state.lock();
        state.ask_at = Some(state.ask_at.map_or(at, |before| before.min(at)));
        drop(state);
        self.changed.notify_one();
    }

    /// Notes that the server has the claim in a queue, behind others or as the head. It asks after this time at the latest.
    pub(crate) fn wait(&self, follows: Option<Follows>, after: Duration) {
        let mut state = self.state.lock();
        self.set_waits(&mut state, true);
        state.follows = follows;
        drop(state);
        self.ask_in(after);
    }

    /// Notes that the claim has become the first in the queue. It asks now, to learn for how long the lease before it still lasts.
    pub(crate) fn became_first(&self) {
        let followed = self.state.lock().follows.take();
        if followed.is_some() {
            self.wake();
        }
    }

    /// Has a claim that still waits behind others ask after this time at the latest. How long a foreign hold lasts says
    /// nothing.
    pub(crate) fn still_follows(&self, after: Duration) {
        let asks = matches!(&self.state.lock().follows, Some(follows) if !follows.foreign);
        if asks {
            self.ask_in(after);
        }
    }

    /// Notes that the claim does not wait any more.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        self.set_waits(&mut state, false);
        *state = State {
            woken: state.woken,
            ..State::default()
        };
    }

    /// Takes the hold that a push brought since the claim asked last. A repeated push counts once.
    pub(crate) fn take_hand_off(&self) -> Option<HandOff> {
        self.state.lock().hand_off.take()
    }

    /// Counts from now on the masters, of several, at which the lock is free.
    pub(crate) fn listen(&self) {
        self.state.lock().free_at = Some(Vec::new());
    }

    /// Notes that the lock is free at this master.
    ///
    /// With a majority the claim asks at once. With fewer it asks a moment later: at once, it might overtake the release on
    /// its way to the others; and a minority may be all that it ever hears of.
    fn is_free_at(&self, master: usize, majority: usize) {
        const SOON: Duration = Duration::from_millis(1);
        let mut state = self.state.lock();
        let Some(masters) = &mut state.free_at else { return };
        if !masters.contains(&master) {
            masters.push(master);
        }
        let enough = masters.len() >= majority;
        drop(state);
        if enough {
            self.wake();
        } else {
            self.ask_in(SOON);
        }
    }

    /// Resolves when the claim has been woken, or is due to ask.
    pub(crate) async fn notified(&self) {
        loop {
            let ask_at = {
                let mut state = self.state.lock();
                if std::mem::take(&mut state.woken) {
                    return;
                }
                state.ask_at
            };
            let Some(ask_at) = ask_at else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(ask_at) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    /// The supervisor asks this at each tick, and a client may have many claims.
    #[tokio::test]
    async fn that_somebody_waits_is_known_without_a_look_at_each_claim() {
        let wakeups = Wakeups::default();
        let [one, two] = [7, 8].map(OwnerId::new);
        let [waits, also_waits] = [one, two].map(|owner| wakeups.add(owner, b"n"));
        assert!(!wakeups.any_waits());
        for wakeup in [&waits, &also_waits, &waits] {
            wakeup.wait(None, Duration::from_secs(1));
        }
        waits.begin();
        for wakeup in [&waits, &waits] {
            assert!(wakeups.any_waits());
            wakeup.stop();
        }
        thread::scope(|scope| {
            let wakeups = &wakeups;
            let claims = wakeups.by_owner.lock();
            let (told, telling) = mpsc::channel();
            scope.spawn(move || told.send(wakeups.any_waits()));
            let waits = telling.recv_timeout(Duration::from_mins(1));
            drop(claims);
            assert_eq!(waits, Ok(true), "it looks at the claims");
        });
        wakeups.remove(two);
        assert!(!wakeups.any_waits(), "the claim is gone");
        also_waits.stop();
        waits.wait(None, Duration::from_secs(1));
        assert!(wakeups.any_waits());
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_that_overtakes_the_reply_before_it_is_not_forgotten() {
        let wakeups = Wakeups::default();
        let owner = OwnerId::new(7);
        let wakeup = wakeups.add(owner, b"n");
        wakeup.begin();
        // The server sent the reply, "25 s left", before this.
        assert!(wakeups.push(format!("{owner} 3000 n").as_bytes(), None).is_none());
        wakeup.ask_in(Duration::from_secs(25));
        let asked = Instant::now();
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_secs(), 3);
        wakeup.begin();
        wakeup.ask_in(Duration::from_secs(25));
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_secs(), 28, "what was heard before is over");
    }

    #[tokio::test(start_paused = true)]
    async fn a_majority_of_hints_wakes_at_once_and_fewer_soon() {
        let wakeups = Wakeups::default();
        let owner = OwnerId::new(7);
        let wakeup = wakeups.add(owner, b"n");
        let free = format!("{owner} 1 n");
        let tell = |master| wakeups.hint(master, 3, free.as_bytes());
        let asked = Instant::now();
        let is_woken = || wakeup.state.lock().woken;
        tell(0);
        assert!(wakeup.state.lock().ask_at.is_none(), "it does not wait");
        wakeup.begin();
        wakeup.listen();
        for master in [0, 1, 1, 0] {
            tell(master);
            assert!(!is_woken(), "by two masters");
        }
        tell(4);
        wakeup.notified().await;
        assert_eq!(asked.elapsed(), Duration::ZERO);

        wakeup.begin();
        wakeup.listen();
        tell(0);
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_millis(), 1);

        wakeup.stop();
        (0..5).for_each(tell);
        assert!(!is_woken() && wakeup.state.lock().ask_at.is_none(), "it holds");
        wakeups.hint(0, 3, format!("{owner} 0 n").as_bytes());
        assert!(is_woken(), "its hold was ended");
    }

    #[tokio::test]
    async fn no_push_is_believed_that_cannot_be_a_hand_off() {
        let owner = OwnerId::new(7);
        let origin = PushOrigin {
            connection: 1,
            since: Instant::now(),
        };
        let handed = |takes_hand_offs, said: &str| {
            let wakeups = Wakeups::new(takes_hand_offs);
            let wakeup = wakeups.add(owner, b"a:n");
            wakeups.saw(41);
            assert!(wakeups.push(said.as_bytes(), Some(origin)).is_none());
            let woken = wakeup.state.lock().woken;
            (woken, wakeup.take_hand_off().map(|hand_off| hand_off.token))
        };
        assert_eq!(handed(true, &format!("{owner} 0:42 a:n")), (true, Some(42)));
        assert_eq!(
            handed(true, &format!("{owner} 0:{LAST_TOKEN} a:n")),
            (true, Some(LAST_TOKEN))
        );
        assert_eq!(handed(false, &format!("{owner} 0:42 a:n")), (true, None));
        for token in [
            "0",
            "40",
            "41",
            "9007199254740992",
            "18446744073709551615",
            "x",
            "-1",
        ] {
            assert_eq!(
                handed(true, &format!("{owner} 0:{token} a:n")),
                (true, None),
                "{token}"
            );
        }
        for lock in ["b:n", "a:", "a:n ", ""] {
            assert_eq!(
                handed(true, &format!("{owner} 0:42 {lock}")),
                (false, None),
                "{lock}"
            );
        }

        // Nor is anything released that no claim of the client asked for.
        let wakeups = Wakeups::new(true);
        let gone = format!("{owner} 0:42 a:n");
        assert!(wakeups.push(gone.as_bytes(), Some(origin)).is_none());
        wakeups.abandon(owner, b"a:n".to_vec());
        assert!(wakeups.push(gone.as_bytes(), Some(origin)).is_some());
        let other = format!("{owner} 0:42 b:n");
        assert!(wakeups.push(other.as_bytes(), Some(origin)).is_none());
        // A time that no clock can count.
        let wakeup = wakeups.add(owner, b"a:n");
        let far = format!("{owner} {} a:n", u64::MAX);
        assert!(wakeups.push(far.as_bytes(), None).is_none());
        assert!(wakeup.state.lock().ask_at.is_some());
    }
}
