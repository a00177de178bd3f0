//! A backend over a map that its clients share, with every mode, a queue with hints, tokens, leases, lists and adoption. It was written after
//! "Adding a backend" of CONTRIBUTING.md. Where it asks whether it [`is`](Desk::is) broken, it does what [`Break`] says.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fmt, mem,
    num::NonZeroU32,
    ops::Bound,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::Harness;
use lockkit_core::{
    Error, FencingToken, Holder, ListedLock, LockClient, LockKind, LockName, LockState, LossReason, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Lister, Mode, OwnerId, Renewal},
};
use tokio::{
    sync::Notify,
    task::yield_now,
    time::{Instant, sleep},
};

use crate::breaks::Break;

const NAME: &str = "desk";

/// The time in which a waiter has to ask again once it is its turn.
const FOLLOWS_WITHIN: Duration = Duration::from_millis(500);

/// The locks of a page of a list.
const PAGE: usize = 16;

/// The server, as one client sees it.
#[derive(Clone)]
pub(crate) struct Desk {
    breaks: Arc<[Break]>,
    drawers: Arc<Mutex<BTreeMap<Key, Drawer>>>,
    /// The number of clients so far, and of this one.
    clients: Arc<AtomicU64>,
    client: u64,
}

type Key = (LockKind, String);

/// A lock or a semaphore.
struct Drawer {
    name: LockName,
    kind: LockKind,
    /// The size that the semaphore is in use with.
    size: Option<NonZeroU32>,
    holds: Vec<Hold>,
    queue: VecDeque<Place>,
    /// All grants so far: the next token is their number.
    grants: Vec<(u64, Mode, Instant)>,
}

#[derive(Clone)]
struct Hold {
    owner: OwnerId,
    client: u64,
    mode: Mode,
    token: u64,
    until: Instant,
    label: Option<String>,
    hint: Arc<Notify>,
}

/// A place in the queue.
struct Place {
    owner: OwnerId,
    client: u64,
    mode: Mode,
    hint: Arc<Notify>,
    /// The time since which it could have been granted the lock.
    turn: Option<Instant>,
    /// Its waiter has gone.
    is_left: bool,
}

#[derive(Debug)]
struct DeskClaim {
    desk: Desk,
    request: ClaimRequest,
    hint: Arc<Notify>,
    /// It was granted the lock, and has not released it since.
    is_granted: bool,
}

impl Desk {
    pub(crate) fn with(breaks: &[Break]) -> Self {
        Self {
            breaks: breaks.into(),
            drawers: Arc::default(),
            clients: Arc::default(),
            client: 0,
        }
    }

    fn is(&self, flaw: Break) -> bool {
        self.breaks.contains(&flaw)
    }

    /// Sends a request, and awaits its reply.
    async fn ask<T>(
        &self,
        name: &LockName,
        kind: LockKind,
        act: impl FnOnce(&mut Drawer, Instant) -> T,
    ) -> T {
        yield_now().await;
        let reply = self.at_the_server(name, kind, act);
        yield_now().await;
        reply
    }

    fn at_the_server<T>(
        &self,
        name: &LockName,
        kind: LockKind,
        act: impl FnOnce(&mut Drawer, Instant) -> T,
    ) -> T {
        let mut drawers = self.drawers.lock().unwrap();
        let drawer = drawers.entry(self.key(name, kind)).or_insert_with(|| Drawer {
            name: name.clone(),
            kind,
            size: None,
            holds: Vec::new(),
            queue: VecDeque::new(),
            grants: Vec::new(),
        });
        let now = Instant::now();
        drawer.holds.retain(|hold| !self.is_over(hold, now));
        act(drawer, now)
    }

    fn key(&self, name: &LockName, kind: LockKind) -> Key {
        let mut key = name.as_str().to_owned();
        for (flaw, from, to) in [
            (Break::DoubleSlashesAreOne, "//", "/"),
            (Break::BackslashesAreSlashes, "\\", "/"),
            (Break::PercentsAreDecoded, "%2F", "/"),
            (Break::AccentsAreComposed, "e\u{301}", "é"),
        ] {
            if self.is(flaw) {
                key = key.replace(from, to);
            }
        }
        if self.is(Break::SlashesAreTrimmed) {
            key.clone().trim_matches('/').clone_into(&mut key);
        }
        if self.is(Break::NamesEndAtNul) {
            key.truncate(key.find('\0').unwrap_or(key.len()));
        }
        if kind == LockKind::Lock || self.is(Break::KindsAreOne) {
            return (LockKind::Lock, key);
        }
        if self.is(Break::SemaphoresFoldCase) {
            key = key.to_lowercase();
        }
        if self.is(Break::SemaphoresAreOtherLocks) {
            return (LockKind::Lock, key + "#permits");
        }
        (kind, key)
    }

    fn is_over(&self, hold: &Hold, now: Instant) -> bool {
        let never_ends = match hold.mode {
            Mode::Exclusive => self.is(Break::WritersLeaseNeverEnds),
            Mode::Shared => self.is(Break::ReadersLeaseNeverEnds),
            Mode::Permits(_) => false,
        };
        hold.until <= now && !never_ends
    }

    /// Returns whether a client may hold it in this mode beside those who do.
    fn admits(&self, drawer: &Drawer, mode: Mode, client: u64, now: Instant) -> bool {
        let is_mine = |hold: &Hold| hold.client == client;
        let mut holds = drawer.holds.iter();
        match mode {
            Mode::Exclusive if self.is(Break::ReadersFirst) && drawer.was_granted(Mode::Shared, now) => false,
            Mode::Exclusive => holds.all(|hold| match hold.mode {
                Mode::Shared => {
                    self.is(Break::WriterBesideReaders)
                        || self.is(Break::WriterBesideItsOwnReaders) && is_mine(hold)
                }
                _ => {
                    self.is(Break::WriterBesideWriter)
                        || self.is(Break::WriterBesideItsOwnWriter) && is_mine(hold)
                }
            }),
            Mode::Shared if self.is(Break::WritersFirst) && drawer.was_granted(Mode::Exclusive, now) => false,
            Mode::Shared => holds.all(|hold| match hold.mode {
                Mode::Shared => {
                    !(self.is(Break::OneReader) || self.is(Break::OneReaderAClient) && is_mine(hold))
                }
                _ => {
                    self.is(Break::ReaderBesideWriter)
                        || self.is(Break::ReaderBesideItsOwnWriter) && is_mine(hold)
                }
            }),
            Mode::Permits(size) => {
                let is_second = self.is(Break::OnePermitAClient) && drawer.holds.iter().any(is_mine);
                let in_use = if self.is(Break::PermitsCountByClient) {
                    holds.map(|hold| hold.client).collect::<HashSet<_>>().len()
                } else {
                    drawer.holds.len()
                };
                let (extra, missing) = (self.is(Break::OnePermitMore), self.is(Break::OnePermitFewer));
                !is_second && in_use + usize::from(missing) < size.get() as usize + usize::from(extra)
            }
        }
    }

    /// Returns whether those who ask in this mode go before those who wait.
    fn goes_first(&self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => self.is(Break::WritersFirst),
            Mode::Shared => self.is(Break::ReadersFirst) || self.is(Break::ReadersPassWriters),
            Mode::Permits(_) => false,
        }
    }

    /// Gives the first who waits a hint, once it can be granted the lock. Call it after any change.
    fn wake_first(&self, drawer: &mut Drawer, now: Instant) {
        let Some(first) = drawer.queue.front() else { return };
        let is_turn = self.admits(drawer, first.mode, first.client, now);
        if is_turn && let Some(gone) = drawer.queue.pop_front_if(|first| first.is_left) {
            drawer.holds.push(Hold {
                owner: gone.owner,
                client: gone.client,
                mode: gone.mode,
                token: 0,
                until: now + Duration::from_secs(60),
                label: None,
                hint: gone.hint,
            });
            return;
        }
        let Some(first) = drawer.queue.front_mut() else {
            return;
        };
        if !is_turn {
            first.turn = None;
        } else if first.turn.is_none() {
            first.turn = Some(now);
            first.hint.notify_one();
        }
    }

    /// Takes the place of those who do not ask though it is their turn. A future that nobody polls must not block the queue.
    fn pass_over_sleepers(&self, drawer: &mut Drawer, asking: OwnerId, now: Instant) {
        // A lease that has just ended changed something, too.
        self.wake_first(drawer, now);
        let is_asleep = |first: &mut Place| {
            first.owner != asking && first.turn.is_some_and(|turn| now - turn > FOLLOWS_WITHIN)
        };
        while !self.is(Break::SleepersAreWaitedFor) && drawer.queue.pop_front_if(is_asleep).is_some() {
            self.wake_first(drawer, now);
        }
    }

    /// Returns the end of a lease that is asked for now.
    fn end(&self, request: &ClaimRequest, now: Instant, is_renewal: bool) -> Instant {
        let ttl = request.ttl;
        now + match request.mode {
            _ if is_renewal && self.is(Break::RenewalIsForEver) => ttl * 1_000,
            _ if is_renewal && self.is(Break::RenewalIsShort) => ttl / 8,
            Mode::Permits(_) if self.is(Break::PermitsLeaseIsHalf) => ttl / 2,
            _ => ttl,
        }
    }

    /// Returns the token of the last grant.
    fn token(&self, drawer: &Drawer, mode: Mode) -> u64 {
        let last = drawer.grants.len() as u64;
        let grants = drawer.grants.iter();
        match mode {
            _ if self.is(Break::TokensStay) => 1,
            _ if self.is(Break::TokensFall) => 1_000_000 - last,
            _ if self.is(Break::TokensBeginAtZero) => last - 1,
            _ if self.is(Break::TokensByClient) => {
                grants.filter(|(client, ..)| *client == self.client).count() as u64
            }
            _ if self.is(Break::TokensByMode) => grants.filter(|(_, other, _)| *other == mode).count() as u64,
            Mode::Shared if self.is(Break::ReadersHaveNoToken) => 0,
            Mode::Shared if self.is(Break::ReadersShareAToken) => {
                let mut readers = drawer.holds.iter().filter(|hold| hold.mode == Mode::Shared);
                readers.next().map_or(last, |reader| reader.token)
            }
            Mode::Permits(_) if self.is(Break::PermitsShareAToken) => 1,
            Mode::Permits(_) if self.is(Break::PermitsTokensFall) => 1_000_000 - last,
            _ => last,
        }
    }

    fn shown(&self, drawer: &Drawer) -> LockState {
        let now = Instant::now();
        let is_shown = |hold: &&Hold| {
            let is_hidden = match hold.mode {
                Mode::Exclusive => false,
                Mode::Shared => self.is(Break::ReadersAreHidden),
                Mode::Permits(_) => self.is(Break::PermitsAreHidden),
            };
            !self.is_over(hold, now) && !is_hidden
        };
        let holders = drawer.holds.iter().filter(is_shown).map(|hold| {
            let is_alone = hold.mode == Mode::Exclusive;
            let mut left = hold.until.saturating_duration_since(now);
            if !is_alone && self.is(Break::MoreIsShownThanIsLeft) {
                left *= 2;
            }
            let is_unknown = hold.mode == Mode::Shared && self.is(Break::ReadersTokensAreHidden);
            let token = if is_unknown { 0 } else { hold.token };
            let label = hold.label.clone();
            let label = label.filter(|_| is_alone || !self.is(Break::OnlyWritersHaveLabels));
            Holder::new(FencingToken::new(token), label, Some(left))
        });
        let mut holders: Vec<_> = holders.collect();
        if self.is(Break::HolderIsShownTwice) {
            holders.extend(holders.first().cloned());
        }
        let waiters = if self.is(Break::WaitersAreNotCounted) {
            0
        } else if self.is(Break::HoldersAreWaiters) {
            drawer.queue.len() + drawer.holds.len()
        } else {
            drawer.queue.len()
        };
        LockState::new(holders, Some(waiters))
    }

    /// Checks the size that a claim has of its semaphore. Returns `false` if it has to wait for another size.
    fn check_size(&self, drawer: &mut Drawer, mode: Mode) -> Result<bool> {
        let Mode::Permits(size) = mode else {
            return Ok(true);
        };
        let is_unused = drawer.holds.is_empty() && drawer.queue.is_empty();
        let known = drawer
            .size
            .filter(|_| !is_unused || self.is(Break::SizeIsForEver));
        let known = known.unwrap_or(size);
        drawer.size = Some(known);
        if known == size || self.is(Break::AnySizeWillDo) {
            return Ok(true);
        }
        if self.is(Break::OtherSizesWait) {
            return Ok(false);
        }
        let reason = if self.is(Break::SizeIsNotNamed) {
            "it is in use with another size".to_owned()
        } else {
            format!("it is in use with {known} permits")
        };
        Err(Error::invalid_option("permits", reason))
    }
}

impl Drawer {
    /// Returns whether it was granted in this mode within the last second.
    fn was_granted(&self, mode: Mode, now: Instant) -> bool {
        let mut last = self.grants.iter().rev();
        last.find(|(_, other, _)| *other == mode)
            .is_some_and(|(_, _, at)| now - *at < Duration::from_secs(1))
    }

    fn hold_of(&mut self, owner: OwnerId) -> Option<&mut Hold> {
        self.holds.iter_mut().find(|hold| hold.owner == owner)
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Desk").field(&self.breaks).finish()
    }
}

#[async_trait]
impl Backend for Desk {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, "desk:");
        info.fallback_poll = Duration::from_millis(500);
        let can = &mut info.capabilities;
        can.fifo = true;
        can.shared = true;
        can.permits = true;
        can.notified = true;
        can.downgrade = true;
        can.detach = true;
        can.lease = !self.is(Break::LeaseIsDenied);
        can.revoke_by_force = !self.is(Break::ForceIsDenied);
        can.list = !self.is(Break::ListIsDenied);
        can.revoke = self.is(Break::AskingIsClaimed);
        can.raise_fence = self.is(Break::RaisingIsClaimed);
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(DeskClaim {
            desk: self.clone(),
            request: request.clone(),
            hint: Arc::default(),
            is_granted: false,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let look = |drawer: &mut Drawer, _| (self.shown(drawer), drawer.grants.is_empty());
        let (mut state, is_unknown) = self.ask(name, kind, look).await;
        if is_unknown && self.is(Break::UnknownNameIsAnError) {
            return Err(Error::permanent(NAME, "inspect", "it has no such lock"));
        }
        if self.is(Break::SemaphoresAreShownAsLocks) && kind == LockKind::Lock {
            let (beside, _) = self.ask(name, LockKind::Semaphore, look).await;
            state.holders.extend(beside.holders);
        }
        Ok(state)
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        if kind == LockKind::Semaphore && self.is(Break::ForceSparesPermits) {
            return Ok(true);
        }
        let end = |drawer: &mut Drawer, now| {
            let is_hit = |hold: &Hold| {
                let is_reader = hold.mode == Mode::Shared;
                hold.token == token.get() || is_reader && self.is(Break::ForceEndsAllReaders)
            };
            let (ended, others): (Vec<_>, Vec<_>) =
                mem::take(&mut drawer.holds).into_iter().partition(is_hit);
            drawer.holds = others;
            for hold in &ended {
                hold.hint.notify_one();
            }
            if !self.is(Break::ForceWakesNobody) {
                self.wake_first(drawer, now);
            }
            !ended.is_empty()
        };
        Ok(self.ask(name, kind, end).await)
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(DeskLister {
            desk: self.clone(),
            prefix: prefix.to_owned(),
            last: None,
            is_over: false,
        }))
    }

    async fn close(&self) -> Result<()> {
        if self.is(Break::ClosingIsAnError) {
            return Err(Error::permanent(NAME, "close", "it does not close"));
        }
        if self.is(Break::ClosingEndsOthersHolds) {
            for drawer in self.drawers.lock().unwrap().values_mut() {
                if drawer.grants.iter().any(|(client, ..)| *client == self.client) {
                    drawer.holds.clear();
                }
            }
        }
        Ok(())
    }
}

struct DeskLister {
    desk: Desk,
    prefix: String,
    last: Option<Key>,
    is_over: bool,
}

impl DeskLister {
    fn is_listed(&self, drawer: &Drawer) -> bool {
        let (desk, name, prefix) = (&self.desk, drawer.name.as_str(), self.prefix.as_str());
        let is_meant = if desk.is(Break::PrefixFoldsCase) {
            name.to_lowercase().starts_with(&prefix.to_lowercase())
        } else if desk.is(Break::PrefixIsAnywhere) {
            name.contains(prefix)
        } else {
            name.starts_with(prefix)
        };
        let is_forgotten = name.len() > 255 && desk.is(Break::LongNamesAreNotListed)
            || drawer.kind == LockKind::Semaphore && desk.is(Break::SemaphoresAreNotListed);
        let is_held = !desk.shown(drawer).is_free() || desk.is(Break::FreeLocksAreListed);
        is_meant && is_held && !is_forgotten
    }
}

#[async_trait]
impl Lister for DeskLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        yield_now().await;
        if self.is_over {
            return Ok(None);
        }
        let after = match &self.last {
            Some(last) if self.desk.is(Break::PagesOverlap) => Bound::Included(last),
            Some(last) => Bound::Excluded(last),
            None => Bound::Unbounded,
        };
        let skipped = usize::from(self.last.is_some() && self.desk.is(Break::PagesHaveGaps));
        let page: Vec<_> = {
            let drawers = self.desk.drawers.lock().unwrap();
            let rest = drawers.range::<Key, _>((after, Bound::<&Key>::Unbounded));
            let listed = rest.filter(|(_, drawer)| self.is_listed(drawer));
            let page = listed.skip(skipped).take(PAGE).map(|(key, drawer)| {
                let state = self.desk.shown(drawer);
                let lock = ListedLock::new(drawer.name.clone(), drawer.kind, state);
                (key.clone(), lock)
            });
            page.collect()
        };
        self.is_over = page.len() < PAGE;
        if let Some((last, _)) = page.last() {
            self.last = Some(last.clone());
        }
        Ok(Some(page.into_iter().map(|(_, lock)| lock).collect()))
    }
}

/// What the server does for a claim.
impl DeskClaim {
    fn kind(&self) -> LockKind {
        self.request.mode.kind()
    }

    fn hold(&self, drawer: &Drawer, now: Instant) -> Hold {
        Hold {
            owner: self.request.owner,
            client: self.desk.client,
            mode: self.request.mode,
            token: self.desk.token(drawer, self.request.mode),
            until: self.desk.end(&self.request, now, false),
            label: self.request.label.as_ref().map(ToString::to_string),
            hint: self.hint.clone(),
        }
    }

    fn granted(&self, drawer: &mut Drawer, patience: Duration, now: Instant) -> Result<Option<u64>> {
        let (desk, owner, mode) = (&self.desk, self.request.owner, self.request.mode);
        let client = desk.client;
        if !desk.check_size(drawer, mode)? {
            return Ok(None);
        }
        let is_new = mode.kind() == LockKind::Semaphore && desk.is(Break::RepeatTakesAnotherPermit);
        if let Some(mine) = drawer.hold_of(owner).filter(|_| !is_new) {
            mine.until = desk.end(&self.request, now, false);
            return Ok(Some(mine.token));
        }
        desk.pass_over_sleepers(drawer, owner, now);
        let is_next = drawer.queue.front().is_none_or(|first| first.owner == owner);
        if (is_next || desk.goes_first(mode)) && desk.admits(drawer, mode, client, now) {
            drawer.queue.retain(|place| place.owner != owner);
            drawer.grants.push((client, mode, now));
            let hold = self.hold(drawer, now);
            let token = hold.token;
            drawer.holds.push(hold);
            desk.wake_first(drawer, now);
            return Ok(Some(token));
        }
        let waits = !patience.is_zero() || desk.is(Break::TriesJoinTheQueue);
        if waits && drawer.queue.iter().all(|place| place.owner != owner) {
            let behind = match drawer.queue.len() {
                _ if desk.is(Break::LastComesFirst) => 0,
                waiters if desk.is(Break::LastComesSecond) => waiters.min(1),
                waiters => waiters,
            };
            let place = Place {
                owner,
                client,
                mode,
                hint: self.hint.clone(),
                turn: None,
                is_left: false,
            };
            drawer.queue.insert(behind, place);
        }
        Ok(None)
    }

    fn renewed(&self, drawer: &mut Drawer, now: Instant) -> bool {
        let (desk, mode) = (&self.desk, self.request.mode);
        let until = desk.end(&self.request, now, true);
        if let Some(mine) = drawer.hold_of(self.request.owner) {
            mine.until = until;
            mine.token += u64::from(desk.is(Break::RenewalTakesANewToken));
            if desk.is(Break::RenewalProlongsAll) {
                for hold in &mut drawer.holds {
                    hold.until = hold.until.max(until);
                }
            }
            return true;
        }
        if desk.is(Break::RenewalComesBack) {
            let hold = self.hold(drawer, now);
            drawer.holds.push(hold);
            return true;
        }
        if desk.is(Break::RenewalIsAnothers)
            && let Some(hold) = drawer.holds.first_mut()
        {
            hold.until = until;
            return true;
        }
        match mode {
            Mode::Exclusive => desk.is(Break::WriterIsNeverTold),
            Mode::Shared => desk.is(Break::ReaderIsNeverTold),
            Mode::Permits(_) => false,
        }
    }

    /// Takes its owner out of everything. Returns `true` if it was a holder.
    fn left(&self, drawer: &mut Drawer, was_granted: bool, now: Instant) -> bool {
        let (desk, owner, mode) = (&self.desk, self.request.owner, self.request.mode);
        let holds = &mut drawer.holds;
        let before = holds.len();
        let ends_first = was_granted
            && match mode {
                Mode::Exclusive => desk.is(Break::ReleaseEndsAnothersHold),
                Mode::Shared => desk.is(Break::ReleaseEndsTheFirstReader),
                Mode::Permits(_) => desk.is(Break::ReleaseEndsTheFirstPermit),
            };
        match mode {
            _ if ends_first => drop(holds.drain(..before.min(1))),
            Mode::Shared if was_granted && desk.is(Break::ReleaseEndsAllReaders) => holds.clear(),
            Mode::Permits(_) if desk.is(Break::ReleaseKeepsThePermit) => {}
            _ if !was_granted && desk.is(Break::LeavingEndsTheHold) => holds.clear(),
            _ => holds.retain(|hold| hold.owner != owner),
        }
        let keeps_permit = desk.is(Break::ReleaseKeepsThePermit) && was_granted;
        let was_held = holds.len() < before || keeps_permit;
        let leaves = !desk.is(Break::LeavingKeepsThePlace);
        drawer.queue.retain_mut(|place| {
            place.is_left |= place.owner == owner && desk.is(Break::LeavingIsGrantedLater);
            place.owner != owner || place.is_left || !leaves
        });
        if !desk.is(Break::ReleaseWakesNobody) {
            desk.wake_first(drawer, now);
        }
        was_held
    }

    fn downgraded(&self, drawer: &mut Drawer, now: Instant) -> bool {
        let desk = &self.desk;
        if drawer.hold_of(self.request.owner).is_none() && desk.is(Break::DowngradeComesBack) {
            let hold = self.hold(drawer, now);
            drawer.holds.push(hold);
        }
        let Some(mine) = drawer.hold_of(self.request.owner) else {
            return false;
        };
        mine.until = now + self.request.ttl;
        mine.token += u64::from(desk.is(Break::DowngradeTakesANewToken));
        if !desk.is(Break::DowngradeDoesNothing) {
            mine.mode = Mode::Shared;
        }
        if !desk.is(Break::DowngradeWakesNobody) {
            desk.wake_first(drawer, now);
        }
        true
    }

    /// Releases the hold, and takes it back as a shared one.
    async fn downgrade_with_a_gap(&self) {
        let (name, kind, owner) = (&self.request.name, self.kind(), self.request.owner);
        let taken = self.desk.ask(name, kind, |drawer, now| {
            let mine = drawer.hold_of(owner).cloned();
            drawer.holds.retain(|hold| hold.owner != owner);
            self.desk.wake_first(drawer, now);
            mine
        });
        let taken = taken.await;
        sleep(Duration::from_millis(20)).await;
        self.desk
            .ask(name, kind, |drawer, _| drawer.holds.extend(taken))
            .await;
    }

    fn adopted(&self, drawer: &mut Drawer, from: OwnerId, token: FencingToken, now: Instant) -> bool {
        let (desk, owner, mode) = (&self.desk, self.request.owner, self.request.mode);
        if mode == Mode::Shared && desk.is(Break::ReadersAreNotAdopted) {
            return false;
        }
        let is_it = |hold: &&mut Hold| {
            let is_theirs = hold.owner == from || hold.owner == owner || desk.is(Break::AnyTokenIsAdopted);
            is_theirs && hold.token == token.get() && hold.mode == mode
        };
        let Some(hold) = drawer.holds.iter_mut().find(is_it) else {
            return false;
        };
        let former = hold.clone();
        hold.owner = owner;
        hold.client = desk.client;
        hold.until = hold.until.max(now + self.request.ttl);
        hold.label = self.request.label.as_ref().map(ToString::to_string);
        hold.hint = self.hint.clone();
        if mode == Mode::Shared && desk.is(Break::AdoptedReaderIsAWriter) {
            hold.mode = Mode::Exclusive;
        }
        if mode.kind() == LockKind::Semaphore && desk.is(Break::AdoptedPermitIsAnother) {
            drawer.holds.push(former);
        }
        true
    }
}

#[async_trait]
impl Claim for DeskClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        let sent = Instant::now();
        let act = |drawer: &mut Drawer, now| self.granted(drawer, patience, now);
        let granted = self.desk.ask(&self.request.name, self.kind(), act).await?;
        let Some(token) = granted else {
            if !patience.is_zero() && self.desk.is(Break::PatienceHasNoEnd) {
                std::future::pending::<()>().await;
            }
            return Ok(None);
        };
        self.is_granted = true;
        let lease = Lease::new(sent, Some(self.request.ttl));
        Ok(Some(Grant::new(token..=token, lease)))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let sent = Instant::now();
        let act = |drawer: &mut Drawer, now| self.renewed(drawer, now);
        let is_held = self.desk.ask(&self.request.name, self.kind(), act).await;
        Ok(if is_held {
            Renewal::Held(Lease::new(sent, Some(self.request.ttl)))
        } else {
            Renewal::Lost(LossReason::Revoked)
        })
    }

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        self.request.ttl = ttl;
        Ok(Some(ttl))
    }

    async fn downgrade(&mut self) -> Result<Lease> {
        let sent = Instant::now();
        if self.desk.is(Break::DowngradeHasAGap) {
            self.downgrade_with_a_gap().await;
        }
        let act = |drawer: &mut Drawer, now| self.downgraded(drawer, now);
        if !self.desk.ask(&self.request.name, self.kind(), act).await {
            return Err(Error::lost(NAME, self.request.name.clone(), LossReason::Revoked));
        }
        self.request.mode = Mode::Shared;
        let replied = Instant::now();
        let since = if self.desk.is(Break::DowngradeCountsFromItsReply) {
            replied
        } else {
            sent
        };
        Ok(Lease::new(since, Some(self.request.ttl)))
    }

    async fn release(&mut self) -> Result<()> {
        let was_granted = mem::take(&mut self.is_granted);
        let act = |drawer: &mut Drawer, now| self.left(drawer, was_granted, now);
        let was_held = self.desk.ask(&self.request.name, self.kind(), act).await;
        if was_granted && !was_held && !self.desk.is(Break::ReleaseSaysNothing) {
            return Err(Error::lost(NAME, self.request.name.clone(), LossReason::Gone));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        self.hint.notified().await;
    }

    fn detach(&mut self) -> Option<OwnerId> {
        Some(self.request.owner)
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        let sent = Instant::now();
        let act = |drawer: &mut Drawer, now| self.adopted(drawer, from, token, now);
        self.is_granted = self.desk.ask(&self.request.name, self.kind(), act).await;
        Ok(Some(if self.is_granted {
            Renewal::Held(Lease::new(sent, Some(self.request.ttl)))
        } else {
            Renewal::Lost(LossReason::Gone)
        }))
    }
}

impl Drop for DeskClaim {
    fn drop(&mut self) {
        if self.desk.is(Break::HoldEndsWithItsClaim) {
            let owner = self.request.owner;
            let end = |drawer: &mut Drawer, _| drawer.holds.retain(|hold| hold.owner != owner);
            self.desk.at_the_server(&self.request.name, self.kind(), end);
        }
    }
}

#[async_trait]
impl Harness for Desk {
    async fn client(&self) -> Result<LockClient> {
        let client = self.clients.fetch_add(1, Ordering::Relaxed);
        Ok(LockClient::new(Self {
            client,
            ..self.clone()
        }))
    }
}
