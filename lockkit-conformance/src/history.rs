//! The history of a lock, recorded by several processes of one machine, and the check that it was allowed.
//!
//! A hold is the half-open interval from the moment at which acquiring it returned to the first of: its release was
//! called, its loss could be seen, its local deadline passed, its process died, the server was made to drop it. Over
//! these intervals [`History::check`] decides seven [`Property`]s by interval sweeps, in O(n log n).

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    str::FromStr,
    time::Duration,
};

use lockkit_core::{LockKind, spi::Mode};

/// A moment in nanoseconds of the machine's monotonic clock: the same for all processes of one machine since its
/// start, unlike `Instant`, which says nothing outside its process.
pub type Nanos = u64;

/// The present moment.
#[cfg(unix)]
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}

/// The present moment. Here it can be compared within one process only.
#[cfg(not(unix))]
pub fn now() -> Nanos {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    nanos(START.elapsed())
}

/// The moment that `instant` stands for.
pub fn at(instant: tokio::time::Instant) -> Nanos {
    let (here, there) = (tokio::time::Instant::now(), now());
    match instant.checked_duration_since(here) {
        Some(ahead) => there.saturating_add(nanos(ahead)),
        None => there.saturating_sub(nanos(here - instant)),
    }
}

fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// One attempt to acquire a lock, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Acquisition {
    /// The lock's name.
    pub lock: String,
    /// The mode that was asked for.
    pub mode: Mode,
    /// The asker; any number that tells the askers apart.
    pub who: u64,
    /// The time of the request.
    pub asked: Nanos,
    /// The time at which it was known to stand in the queue, where that is known.
    pub queued: Option<Nanos>,
    /// The time at which the asker gave up: timed out, was told "taken", or dropped its future.
    pub gave_up: Option<Nanos>,
    /// The time at which acquiring returned, and the fencing token.
    pub granted: Option<(Nanos, u64)>,
    /// The local deadline of the lease, as it was last seen.
    pub until: Option<Nanos>,
    /// The time at which release was called, or the guard dropped.
    pub released: Option<Nanos>,
    /// The time from which the holder could see the loss.
    pub lost: Option<Nanos>,
    /// The time at which the server was made to drop the hold.
    pub broken: Option<Nanos>,
    /// The time at which the holder's process died.
    pub died: Option<Nanos>,
}

impl Acquisition {
    /// A request made at `asked`, nothing having come of it yet.
    pub fn asked(lock: impl Into<String>, mode: Mode, who: u64, asked: Nanos) -> Self {
        Self {
            lock: lock.into(),
            mode,
            who,
            asked,
            queued: None,
            gave_up: None,
            granted: None,
            until: None,
            released: None,
            lost: None,
            broken: None,
            died: None,
        }
    }

    /// Returns when the hold began and ended; `None` if it was never granted or was over when acquiring returned.
    pub fn held(&self) -> Option<(Nanos, Nanos)> {
        let (from, _) = self.granted?;
        let ends = [self.until, self.released, self.lost, self.broken, self.died];
        let to = ends.into_iter().flatten().min().unwrap_or(Nanos::MAX);
        (from < to).then_some((from, to))
    }

    fn token(&self) -> u64 {
        self.granted.map_or(0, |(_, token)| token)
    }

    /// Returns whether holds of these modes exclude each other, seen from a lock or semaphore of one name.
    fn conflicts(&self, other: &Self) -> bool {
        self.is_exclusive() || other.is_exclusive()
    }

    fn is_exclusive(&self) -> bool {
        match self.mode {
            Mode::Exclusive => true,
            Mode::Shared => false,
            Mode::Permits(n) => n.get() == 1,
        }
    }
}

/// One write to a resource that checks fencing tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The lock that protects the resource.
    pub lock: String,
    /// The writer.
    pub who: u64,
    /// The token that it came with.
    pub token: u64,
    /// The time, in the order of the resource itself.
    pub at: Nanos,
    /// True if the resource took it.
    pub admitted: bool,
}

/// The result of an inspection of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The lock's name.
    pub lock: String,
    /// A lock or a semaphore.
    pub kind: LockKind,
    /// The time at which it was asked for.
    pub at: Nanos,
    /// The tokens of the holders.
    pub holders: Vec<u64>,
    /// The number of waiters, where the server knows.
    pub waiters: Option<usize>,
}

/// The bounds against which the properties are checked.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// The time for which nobody may hold a lock with waiters: the lease, the back-off, and an allowance.
    pub idle: Duration,
    /// The moment at which the last fault had healed: `idle` counts from then on.
    pub healed: Nanos,
    /// The time within which a holder is told that the server dropped its hold.
    pub detection: Duration,
    /// The time for which one who has given up or released may leave something on the server.
    pub linger: Duration,
    /// True if grants keep the order of the queue.
    pub fifo: bool,
}

impl Default for Limits {
    /// One second for everything, and no order of grants.
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(1),
            healed: 0,
            detection: Duration::from_secs(1),
            linger: Duration::from_secs(1),
            fifo: false,
        }
    }
}

/// A property that a history must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Property {
    /// P1: conflicting holds of a name are disjoint, and no more permits are held than there are.
    Exclusion,
    /// P2: tokens of conflicting holds strictly increase in the order of acquisition, and none repeats, also among
    /// holds that were over when they were granted.
    Tokens,
    /// P3: a resource that refuses a token below the highest seen never takes interleaved writes.
    Fencing,
    /// P4: a lock that someone waits for is not left idle, and nobody waits for ever.
    Liveness,
    /// P5: grants keep the order of the queue.
    Fifo,
    /// P6: nothing is left on the server by those who have given up or released.
    Residue,
    /// P7: a loss is told, and before another can be granted.
    Notice,
}

impl Property {
    /// Returns whether a violation is one of a promise whatever the machine did: no second look makes it undone.
    fn is_promise(self) -> bool {
        match self {
            Self::Exclusion | Self::Tokens | Self::Fencing | Self::Residue => true,
            Self::Liveness | Self::Fifo | Self::Notice => false,
        }
    }
}

/// The words before a promise that was broken, for whoever runs a failed test again: this one needs no second look.
pub(crate) const BROKEN: &str = "PROMISE BROKEN: ";

/// A violation of a property by a history.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The property that does not hold.
    pub property: Property,
    /// On which lock.
    pub lock: String,
    /// A log of who did what when.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.property.is_promise() { BROKEN } else { "" };
        write!(
            f,
            "{mark}{:?} violated on lock {:?}: {}",
            self.property, self.lock, self.detail
        )
    }
}

impl std::error::Error for Violation {}

/// The amount that a history that passed has shown, for guards against a vacuous pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Acquisitions that were granted.
    pub granted: usize,
    /// The granted ones that had to wait for another's hold to end.
    pub contended: usize,
    /// Requests that were given up.
    pub given_up: usize,
    /// Inspections made while nobody held or waited.
    pub quiet_sights: usize,
}

/// Everything that was recorded, in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Attempts to acquire.
    pub acquisitions: Vec<Acquisition>,
    /// Writes to fenced resources.
    pub writes: Vec<Write>,
    /// Inspections.
    pub sights: Vec<Sight>,
}

impl History {
    /// Checks every property on every lock.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check(&self, limits: &Limits) -> Result<Summary, Violation> {
        let mut summary = Summary::default();
        for ((_, lock), mut acquisitions) in by_lock(&self.acquisitions) {
            acquisitions.sort_by_key(|a| (a.granted, a.asked));
            let found = exclusion(&acquisitions)
                .and_then(|contended| tokens(&acquisitions).map(|()| contended))
                .and_then(|contended| liveness(&acquisitions, limits).map(|()| contended))
                .and_then(|contended| notice(&acquisitions, limits).map(|()| contended))
                .and_then(|contended| {
                    if limits.fifo {
                        fifo(&acquisitions)?;
                    }
                    Ok(contended)
                });
            summary.contended += found.map_err(|found| found.on(lock))?;
            summary.granted += acquisitions.iter().filter(|a| a.granted.is_some()).count();
            summary.given_up += acquisitions.iter().filter(|a| a.gave_up.is_some()).count();
        }
        self.fencing()?;
        summary.quiet_sights = self.residue(limits)?;
        Ok(summary)
    }

    /// Adds what `line`, the [`Display`](fmt::Display) form of an [`Acquisition`] of another process, says.
    ///
    /// # Errors
    /// The line, if it is none.
    pub fn absorb(&mut self, line: &str) -> Result<(), String> {
        self.acquisitions.push(line.parse()?);
        Ok(())
    }

    fn fencing(&self) -> Result<(), Violation> {
        let mut writes: Vec<_> = self.writes.iter().filter(|w| w.admitted).collect();
        writes.sort_by(|a, b| (&a.lock, a.at).cmp(&(&b.lock, b.at)));
        for pair in writes.windows(2) {
            let [before, after] = [pair[0], pair[1]];
            if before.lock != after.lock {
                continue;
            }
            let repeated = before.token == after.token && before.who != after.who;
            if after.token < before.token || repeated {
                let detail = format!(
                    "the resource took {}'s write with token {} at {} after {}'s with token {}",
                    after.who, after.token, after.at, before.who, before.token
                );
                return Err(Found(Property::Fencing, detail).on(&after.lock));
            }
        }
        Ok(())
    }

    /// Looks at the inspections made while nobody held, waited or had only just stopped to; returns their number.
    fn residue(&self, limits: &Limits) -> Result<usize, Violation> {
        let mut quiet = 0;
        for sight in &self.sights {
            let since = sight.at.saturating_sub(nanos(limits.linger));
            let busy = self
                .acquisitions
                .iter()
                .filter(|a| a.lock == sight.lock && a.mode.kind() == sight.kind && a.asked <= sight.at)
                .any(|a| involved_until(a) > since);
            if busy {
                continue;
            }
            quiet += 1;
            if !sight.holders.is_empty() || sight.waiters.is_some_and(|n| n > 0) {
                let detail = format!(
                    "at {} nobody held or waited, but the server shows holders {:?} and waiters {:?}",
                    sight.at, sight.holders, sight.waiters
                );
                return Err(Found(Property::Residue, detail).on(&sight.lock));
            }
        }
        Ok(quiet)
    }
}

fn involved_until(a: &Acquisition) -> Nanos {
    match a.granted {
        Some((at, _)) => a.held().map_or(at, |(_, to)| to),
        None => a.gave_up.unwrap_or(Nanos::MAX),
    }
}

type ByLock<'a> = HashMap<(LockKind, &'a str), Vec<&'a Acquisition>>;

fn by_lock(acquisitions: &[Acquisition]) -> ByLock<'_> {
    let mut locks = ByLock::new();
    for a in acquisitions {
        locks.entry((a.mode.kind(), a.lock.as_str())).or_default().push(a);
    }
    locks
}

/// A violation whose lock is still to be named.
struct Found(Property, String);

impl Found {
    fn on(self, lock: &str) -> Violation {
        Violation {
            property: self.0,
            lock: lock.to_owned(),
            detail: self.1,
        }
    }
}

fn describe(a: &Acquisition) -> String {
    let held = match a.held() {
        Some((from, Nanos::MAX)) => format!("held from {from} on"),
        Some((from, to)) => format!("held from {from} to {to}"),
        None => "over when it was granted".to_owned(),
    };
    format!(
        "{} ({:?}, token {}, asked at {}, {held})",
        a.who,
        a.mode,
        a.token(),
        a.asked
    )
}

/// P1. Returns how many holds began after a wait that another hold was responsible for.
fn exclusion(by_grant: &[&Acquisition]) -> Result<usize, Found> {
    let mut edges = Vec::with_capacity(by_grant.len() * 2);
    for (index, a) in by_grant.iter().enumerate() {
        if let Some((from, to)) = a.held() {
            edges.push((to, false, index));
            edges.push((from, true, index));
        }
    }
    edges.sort_unstable();
    let (mut active, mut contended, mut last_end) = (Vec::<usize>::new(), 0, 0);
    for (moment, begins, index) in edges {
        if !begins {
            active.retain(|&other| other != index);
            last_end = moment;
            continue;
        }
        let new = by_grant[index];
        let excluded = match new.mode {
            Mode::Permits(n) => {
                let most = active
                    .iter()
                    .map(|&other| by_grant[other].mode)
                    .filter_map(|mode| {
                        if let Mode::Permits(n) = mode {
                            Some(n)
                        } else {
                            None
                        }
                    })
                    .fold(n, std::cmp::Ord::min);
                active.first().filter(|_| active.len() >= most.get() as usize)
            }
            _ => active.iter().find(|&&other| new.conflicts(by_grant[other])),
        };
        if let Some(&other) = excluded {
            let detail = format!("{} overlaps {}", describe(new), describe(by_grant[other]));
            return Err(Found(Property::Exclusion, detail));
        }
        contended += usize::from(new.asked < last_end);
        active.push(index);
    }
    Ok(contended)
}

/// P2. The order of two holds is certain if both were in force, since they are disjoint then, or if one was granted
/// before the other was asked for.
fn tokens(by_grant: &[&Acquisition]) -> Result<(), Found> {
    let mut tokens: Vec<_> = by_grant.iter().filter(|a| a.granted.is_some()).collect();
    tokens.sort_by_key(|a| a.token());
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0].token() == pair[1].token()) {
        let detail = format!(
            "{} and {} have the same token",
            describe(pair[0]),
            describe(pair[1])
        );
        return Err(Found(Property::Tokens, detail));
    }
    let mut moments = Vec::with_capacity(by_grant.len() * 2);
    for (index, a) in by_grant.iter().enumerate() {
        if let Some((granted, _)) = a.granted {
            // At the same moment a grant does not come before a request.
            moments.push((a.asked, false, index));
            moments.push((granted, true, index));
        }
    }
    moments.sort_unstable();
    let (mut any, mut in_force) = (Highest::default(), Highest::default());
    let mut floors: Vec<Option<&Acquisition>> = vec![None; by_grant.len()];
    for (_, is_grant, index) in moments {
        let a = by_grant[index];
        if !is_grant {
            floors[index] = any.conflicting(a);
            continue;
        }
        let is_held = a.held().is_some();
        let floor = [floors[index], in_force.conflicting(a).filter(|_| is_held)];
        if let Some(earlier) = floor
            .into_iter()
            .flatten()
            .find(|earlier| earlier.token() >= a.token())
        {
            let detail = format!("{} came after {}", describe(a), describe(earlier));
            return Err(Found(Property::Tokens, detail));
        }
        any.see(a);
        if is_held {
            in_force.see(a);
        }
    }
    Ok(())
}

/// The acquisitions with the highest tokens so far.
#[derive(Default)]
struct Highest<'a> {
    exclusive: Option<&'a Acquisition>,
    other: Option<&'a Acquisition>,
}

impl<'a> Highest<'a> {
    fn see(&mut self, a: &'a Acquisition) {
        let slot = if a.is_exclusive() {
            &mut self.exclusive
        } else {
            &mut self.other
        };
        if slot.is_none_or(|highest| highest.token() < a.token()) {
            *slot = Some(a);
        }
    }

    fn conflicting(&self, a: &Acquisition) -> Option<&'a Acquisition> {
        let other = self.other.filter(|_| a.is_exclusive());
        [self.exclusive, other]
            .into_iter()
            .flatten()
            .max_by_key(|a| a.token())
    }
}

/// P4.
fn liveness(acquisitions: &[&Acquisition], limits: &Limits) -> Result<(), Found> {
    // The order in which things of one moment count: ends, then grants and gives-up, then requests.
    const END: u8 = 0;
    const GRANT: u8 = 1;
    const GIVE_UP: u8 = 2;
    const REQUEST: u8 = 3;
    let mut moments = Vec::with_capacity(acquisitions.len() * 3);
    for (index, a) in acquisitions.iter().enumerate() {
        moments.push((a.asked, REQUEST, index));
        match (a.granted, a.gave_up) {
            (Some((granted, _)), _) => moments.push((granted, GRANT, index)),
            (None, Some(gave_up)) => moments.push((gave_up, GIVE_UP, index)),
            (None, None) => {
                let detail = format!("{} asked at {} and was never answered", a.who, a.asked);
                return Err(Found(Property::Liveness, detail));
            }
        }
        if let Some((_, to)) = a.held() {
            moments.push((to, END, index));
        }
    }
    moments.sort_unstable();
    let (mut waiting, mut holding, mut idle_since) = (0_i64, 0_i64, None::<Nanos>);
    for (moment, what, index) in moments {
        match what {
            REQUEST => waiting += 1,
            GIVE_UP => waiting -= 1,
            GRANT => {
                waiting -= 1;
                holding += i64::from(acquisitions[index].held().is_some());
                let idle = moment.saturating_sub(idle_since.take().unwrap_or(moment).max(limits.healed));
                if idle > nanos(limits.idle) {
                    let a = describe(acquisitions[index]);
                    let detail = format!(
                        "{a} was granted after the lock had been idle for {} ms",
                        idle / 1_000_000
                    );
                    return Err(Found(Property::Liveness, detail));
                }
            }
            _ => holding -= 1,
        }
        idle_since = if waiting > 0 && holding == 0 {
            idle_since.or(Some(moment))
        } else {
            None
        };
    }
    Ok(())
}

/// P5.
fn fifo(acquisitions: &[&Acquisition]) -> Result<(), Found> {
    let mut moments = Vec::with_capacity(acquisitions.len() * 2);
    for (index, a) in acquisitions.iter().enumerate() {
        if let Some(queued) = a.queued {
            moments.push((queued, true, index));
        }
        if let Some(left) = a.granted.map(|(granted, _)| granted).or(a.gave_up) {
            moments.push((left, false, index));
        }
    }
    moments.sort_unstable();
    let mut queue = BTreeSet::new();
    for (_, joins, index) in moments {
        let a = acquisitions[index];
        if joins {
            queue.insert((a.queued, index));
            continue;
        }
        queue.remove(&(a.queued, index));
        let Some(&(Some(queued), head)) = queue.first() else {
            continue;
        };
        if a.granted.is_some() && queued < a.asked {
            let first = acquisitions[head];
            let detail = format!(
                "{} overtook {}, in the queue since {queued}",
                describe(a),
                first.who
            );
            return Err(Found(Property::Fifo, detail));
        }
    }
    Ok(())
}

/// P7.
fn notice(by_grant: &[&Acquisition], limits: &Limits) -> Result<(), Found> {
    let (mut next_exclusive, mut next) = (None::<Nanos>, None::<Nanos>);
    for a in by_grant.iter().rev() {
        let Some((granted, _)) = a.granted else {
            continue;
        };
        let successor = if a.is_exclusive() { next } else { next_exclusive };
        // One that was over when it was granted may have been first at the server.
        if a.held().is_some() {
            next = Some(granted);
            next_exclusive = next.filter(|_| a.is_exclusive()).or(next_exclusive);
        }
        let late = match (a.broken, a.lost) {
            _ if a.died.is_some() => None,
            (Some(broken), Some(lost)) => (lost > broken.saturating_add(nanos(limits.detection)))
                .then(|| format!("told of its loss at {lost}, but the server dropped it at {broken}")),
            // What was granted after the break may have been granted anew.
            (Some(broken), None) if broken <= granted => None,
            (Some(broken), None) => {
                let released = a
                    .released
                    .is_some_and(|at| at <= broken.saturating_add(nanos(limits.detection)));
                (!released).then(|| format!("never told that the server dropped it at {broken}"))
            }
            (None, lost) => {
                let seen = [a.released, lost, a.until].into_iter().flatten().min();
                let never = a.released.is_none() && lost.is_none();
                successor
                    .filter(|&successor| never || seen.is_none_or(|seen| seen > successor))
                    .map(|successor| format!("told at {lost:?}, but another was granted at {successor}"))
            }
        };
        if let Some(late) = late {
            return Err(Found(Property::Notice, format!("{} was {late}", describe(a))));
        }
    }
    Ok(())
}

/// One line of text, for a pipe between processes.
impl fmt::Display for Acquisition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.lock.bytes() {
            write!(f, "{byte:02x}")?;
        }
        match self.mode {
            Mode::Exclusive => f.write_str(" exclusive")?,
            Mode::Shared => f.write_str(" shared")?,
            Mode::Permits(n) => write!(f, " {n}")?,
        }
        write!(f, " {} {}", self.who, self.asked)?;
        let (granted, token) = self.granted.unzip();
        let moments = [
            self.queued,
            self.gave_up,
            granted,
            token,
            self.until,
            self.released,
            self.lost,
            self.broken,
            self.died,
        ];
        for moment in moments {
            match moment {
                Some(moment) => write!(f, " {moment}")?,
                None => f.write_str(" -")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Acquisition {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        parse(line).ok_or_else(|| format!("not a record of an acquisition: {line:?}"))
    }
}

fn parse(line: &str) -> Option<Acquisition> {
    let mut fields = line.split(' ');
    let lock = fields.next()?;
    let bytes: Option<Vec<u8>> = (0..lock.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(lock.get(at..at + 2)?, 16).ok())
        .collect();
    let mode = match fields.next()? {
        "exclusive" => Mode::Exclusive,
        "shared" => Mode::Shared,
        permits => Mode::Permits(permits.parse().ok()?),
    };
    let who = fields.next()?.parse().ok()?;
    let asked = fields.next()?.parse().ok()?;
    let mut moments = [None; 9];
    for moment in &mut moments {
        *moment = match fields.next()? {
            "-" => None,
            number => Some(number.parse().ok()?),
        };
    }
    let [
        queued,
        gave_up,
        granted,
        token,
        until,
        released,
        lost,
        broken,
        died,
    ] = moments;
    fields.next().is_none().then_some(Acquisition {
        lock: String::from_utf8(bytes?).ok()?,
        mode,
        who,
        asked,
        queued,
        gave_up,
        granted: granted.zip(token),
        until,
        released,
        lost,
        broken,
        died,
    })
}
