//! Judges whether what happened in an epoch was allowed.
//!
//! A hold *certainly* lasted from its grant to the last moment at which its holder saw it held; only that convicts. A
//! hold *possibly* lasted from its grant until the server must have let go of it; only where nobody possibly held is a
//! lock free.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use lockkit_core::spi::Mode;

mod asking;
mod election;
mod listing;
mod passing;
mod sizes;
mod together;

use super::{
    ClientPlan, Fate, Fault, Schedule, Told,
    play::OP_TIMEOUT,
    record::{AskBack, Asked, Fared, Finding, Law, Listed, Loss, Over, Record, Sight},
};
use crate::history::Nanos;

/// A fault that happened.
#[derive(Clone, Debug)]
pub(super) struct Struck {
    /// The fault that excuses; `None` for processes of clients, which excuses nothing.
    pub(super) fault: Option<Fault>,
    pub(super) from: Nanos,
    pub(super) to: Nanos,
}

/// A time for which a process of clients did not run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    pub(super) process: u32,
    pub(super) from: Nanos,
    /// `None` if it was killed.
    pub(super) to: Option<Nanos>,
}

/// All that is known of an epoch.
#[derive(Clone, Debug, Default)]
pub(super) struct Story {
    pub(super) schedule: Schedule,
    pub(super) records: Vec<Record>,
    pub(super) struck: Vec<Struck>,
    /// Holds that were ended from outside: of which lock, and when.
    pub(super) breaks: Vec<(String, Nanos, Nanos)>,
    pub(super) asks: Vec<AskBack>,
    pub(super) sights: Vec<Sight>,
    pub(super) lists: Vec<Listed>,
    pub(super) pauses: Vec<Pause>,
    /// The times at which clients met their fates, or were closed.
    pub(super) gone: HashMap<u32, Vec<Nanos>>,
    pub(super) bounds: Bounds,
    /// The time for which the machine stood still.
    pub(super) stood_still: Duration,
    /// The wall clock at its moment 0, in µs since 1970.
    pub(super) clock: u64,
}

/// The backend's promises in time.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a promise of its own")]
pub(super) struct Bounds {
    /// By the ttl in ms: how long a dead holder, and a dead waiter, may keep the name.
    pub(super) dead: BTreeMap<u64, (Duration, Duration)>,
    pub(super) fallback_poll: Duration,
    pub(super) fifo: bool,
    /// A hold has a lease.
    pub(super) lease: bool,
    /// Of several who adopt a hold at once, none may get it.
    pub(super) splits: bool,
    /// A hold is on lists some time after its grant.
    pub(super) shows_late: bool,
}

impl Bounds {
    fn dead_holder(&self, ttl: u64) -> Nanos {
        self.dead.get(&ttl).map_or(0, |(holder, _)| nanos(*holder))
    }

    fn dead_waiter(&self, ttl: u64) -> Nanos {
        self.dead.get(&ttl).map_or(0, |(_, waiter)| nanos(*waiter))
    }
}

/// The highest tokens of each name, from one epoch to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Highest(HashMap<String, Tokens>);

#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    exclusive: u64,
    other: u64,
}

/// The time within which the worker releases what was dropped.
const LINGER: Duration = Duration::from_secs(2);
/// The time that a free lock may wait for its next holder, beyond the fallback poll.
const IDLE: Duration = Duration::from_secs(3);
/// The time after which a waiter is surely in the queue, if nothing is wrong and its client is heard meanwhile: on a
/// busy machine a request takes its time to get there. One that is not heard may have to ask again, after `OP_TIMEOUT`.
const QUEUED: Duration = Duration::from_secs(1);
/// Two returns of acquisitions that are further apart are in the order of the grants.
const APART: Duration = Duration::from_millis(100);
/// The time that a waiter may take to be back in line after its way has healed. What is free meanwhile goes to others.
/// It tries to connect ever more seldom, up to once in 1.25 s, if its way is gone for so long.
const BACK: Duration = Duration::from_millis(500);
const RETRIED: Duration = Duration::from_millis(1_250);
/// An operator's revocation: the holder is told with its next renewal.
pub(super) const REVOKED: Told = Told::AtRenewal(Duration::from_secs(2));
/// The most findings that are told of one epoch.
const MOST_FINDINGS: usize = 5;

fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

fn millis(ttl: u64) -> Duration {
    Duration::from_millis(ttl)
}

/// Judges an epoch, and remembers its tokens for the next.
pub(super) fn judge(story: &Story, highest: &mut Highest) -> Vec<Finding> {
    let settled = passing::settled(story);
    let mut by_lock = BTreeMap::<&str, Vec<&Record>>::new();
    for record in &story.records {
        let detached = settled.get(&record.acquisition.who);
        let detached = detached.filter(|_| record.over == Over::Detached);
        let of_lock = by_lock.entry(&record.acquisition.lock).or_default();
        of_lock.push(detached.unwrap_or(record));
    }
    let (mut findings, mut refusals) = (Vec::new(), together::Refusals::default());
    for (lock, mut records) in by_lock {
        records.sort_by_key(|record| (record.acquisition.granted, record.acquisition.asked));
        let court = Court { story, records };
        let before = findings.len();
        court.exclusion(&mut findings);
        court.tokens(highest.0.entry(lock.to_owned()).or_default(), &mut findings);
        if findings.len() == before {
            // It follows from either.
            court.fencing(&mut findings);
        }
        court.adoptions(&mut findings);
        court.asking(&mut findings);
        court.lengths(&mut findings);
        court.lists(&mut findings);
        court.waiting(&mut findings);
        court.sizes(&mut findings);
        court.order(&mut findings);
        refusals.hear(&court);
    }
    refusals.judge(&mut findings);
    election::elections(story, &mut findings);
    failures(story, &mut findings);
    findings.sort_by_key(|finding| finding.law);
    findings.truncate(MOST_FINDINGS);
    findings
}

/// An error where nothing is wrong.
fn failures(story: &Story, findings: &mut Vec<Finding>) {
    if !story.schedule.is_harmless() || !story.pauses.is_empty() || !story.breaks.is_empty() {
        return;
    }
    let unmolested = |record: &&Record| {
        let plan = story
            .schedule
            .clients
            .iter()
            .find(|plan| plan.id == record.client);
        let gone = story.gone.get(&record.client).and_then(|at| at.iter().min());
        plan.is_some_and(|plan| plan.fate.is_none())
            && gone.is_none_or(|gone| record.acquisition.asked < *gone)
    };
    let failed = story.records.iter().filter(unmolested).find(|record| {
        // A hold whose lease is not renewed ends with it.
        let failed = !record.error.is_empty() && !record.lenient && record.acquisition.lost.is_none();
        failed && record.fared != Fared::OtherSize && !had_too_little_time(record)
    });
    if let Some(record) = failed
        && story.stood_still < Duration::from_millis(100)
        && !forgot(story, record)
    {
        let detail = format!("{}: {}", describe(record), record.error);
        findings.push(Finding::new(Law::Failure, detail));
    }
}

/// A server has `OP_TIMEOUT` for its answer, also on a busy machine. Who waits for less may have none.
fn had_too_little_time(record: &Record) -> bool {
    let waited = record.answered().saturating_sub(record.acquisition.asked);
    record.fared == Fared::Failed
        && waited < nanos(OP_TIMEOUT)
        && record.error.ends_with("no answer in time from the server")
}

/// A client that forgot a guard is closed for it, at the end.
fn forgot(story: &Story, record: &Record) -> bool {
    let of_client = |other: &&Record| other.client == record.client && other.over == Over::Not;
    story
        .records
        .iter()
        .filter(of_client)
        .any(|other| other.acquisition.granted.is_some())
}

fn describe(record: &Record) -> String {
    let a = &record.acquisition;
    let at = |moment: Option<Nanos>| moment.map_or_else(|| "-".to_owned(), |at| format!("{}", at / 1_000));
    format!(
        "{} on {} ({:?}, client {} in process {}, ttl {} ms, token {}, asked at {} µs, granted {}, seen to hold until {}, lost {}, \
         over {}, given up {}, {:?}{})",
        a.who,
        a.lock,
        a.mode,
        record.client,
        record.process,
        record.ttl,
        record.token(),
        a.asked / 1_000,
        at(a.granted.map(|(at, _)| at)),
        at(a.until),
        at(a.lost),
        at(a.released),
        at(a.gave_up),
        record.fared,
        additions(record),
    )
}

/// The parts of a record's description that few records have.
fn additions(record: &Record) -> String {
    let ttl = (record.ttl_now != record.ttl).then(|| format!(", ttl now {} ms", record.ttl_now));
    let max_hold = record
        .max_hold
        .map(|max_hold| format!(", max_hold {max_hold} ms"));
    let loss = (record.loss != Loss::Not).then(|| format!(", lost as {:?}", record.loss));
    let at = |what: &str, moment: Option<Nanos>| moment.map(|at| format!(", {what} {}", at / 1_000));
    let kept = at("kept until", record.kept);
    let downgraded = at("downgraded at", record.downgraded);
    let shared = at("shared at", record.shared);
    let detached = at("detached until", record.detached);
    let adopts = record.adopts.map(|from| format!(", adopts that of {from}"));
    let (place, of) = record.place;
    let place = (of > 1).then(|| format!(", {} of {of}", place + 1));
    let all = [
        ttl, max_hold, loss, kept, downgraded, shared, detached, adopts, place,
    ];
    all.into_iter().flatten().collect()
}

fn is_exclusive(record: &Record) -> bool {
    match record.acquisition.mode {
        Mode::Exclusive => true,
        Mode::Shared => false,
        Mode::Permits(size) => size.get() == 1,
    }
}

/// Returns the number of permits, if it is of a semaphore.
fn permits(record: &Record) -> Option<i64> {
    match record.acquisition.mode {
        Mode::Permits(size) => Some(size.get().into()),
        _ => None,
    }
}

/// The time after its end for which a holder may believe that it holds, keep a hold that it was asked for, or have it detached, since it
/// is told nothing more.
fn told_after(record: &Record, told: Told) -> Nanos {
    let ttl = millis(record.ttl);
    let told = nanos(told.after(ttl));
    if record.kept.is_some() || record.detached.is_some() {
        told.saturating_add(nanos(ttl))
    } else {
        told
    }
}

fn conflict(one: &Record, other: &Record) -> bool {
    is_exclusive(one) || is_exclusive(other) || differ_in_size(one, other)
}

/// Returns whether they give two sizes of one semaphore: then they exclude each other, and one may be refused for as long as the other is
/// there at all.
fn differ_in_size(one: &Record, other: &Record) -> bool {
    permits(one) != permits(other)
}

/// One lock, or semaphore. Records are in the order of their grants.
struct Court<'a> {
    story: &'a Story,
    records: Vec<&'a Record>,
}

impl Court<'_> {
    fn exclusion(&self, findings: &mut Vec<Finding>) {
        let mut inside = Vec::<&Record>::new();
        for new in &self.records {
            let Some((from, _)) = new.sure() else {
                continue;
            };
            inside.retain(|old| old.had().is_some_and(|(_, to)| to >= from));
            // Who is excused makes room for one, and excuses nobody else.
            let mut others = inside.iter().copied().filter(|old| !self.excused(old, new));
            let guilty = match new.acquisition.mode {
                Mode::Permits(size) => {
                    let others: Vec<_> = others.collect();
                    let of_another = others.iter().find(|old| differ_in_size(old, new));
                    of_another.or(others.get(size.get() as usize - 1)).copied()
                }
                // From the moment at which it asks for that, a holder may be one of several.
                _ => others.find(|old| {
                    let shares = old.downgraded.is_some_and(|at| at <= from);
                    is_exclusive(new) || is_exclusive(old) && !shares
                }),
            };
            if let Some(old) = guilty {
                let (law, why) = if old.sure().is_some_and(|(_, to)| to >= from) {
                    (Law::Exclusion, "was in")
                } else if old.over == Over::Detached {
                    (Law::Detached, "was detached and not over")
                } else {
                    (Law::Asked, "was asked for it and had not let go")
                };
                let detail = format!("{} {why} when {} was let in", describe(old), describe(new));
                findings.push(Finding::new(law, detail));
                return;
            }
            inside.push(new);
        }
    }

    /// Says whether a fault is why both hold, and one of them could not know yet: `old`, which was dropped, or `new`,
    /// which had been granted before it and was dropped before it heard of that.
    fn excused(&self, old: &Record, new: &Record) -> bool {
        let (Some((began, _)), Some((from, believed))) = (old.had(), new.sure()) else {
            return true;
        };
        let is_late = |(since, to): (Nanos, Nanos), told: Told| {
            let told = nanos(told.after(millis(new.ttl)));
            new.token() < old.token()
                && new.acquisition.asked <= to
                && began >= since
                && believed <= to.saturating_add(told)
        };
        let by_fault = |struck: &Struck| {
            let span = (struck.from, struck.to);
            struck.fault.and_then(|fault| fault.overlap).is_some_and(|told| {
                let told = self.told(struck, told);
                (Self::untold(old, new, span, told) && self.befalls(struck, old, from))
                    || (is_late(span, told) && self.befalls(struck, new, from))
            })
        };
        let by_break = |(lock, since, to): &(String, Nanos, Nanos)| {
            let span = (*since, *to);
            *lock == old.acquisition.lock && (Self::untold(old, new, span, REVOKED) || is_late(span, REVOKED))
        };
        self.story.struck.iter().any(by_fault) || self.story.breaks.iter().any(by_break)
    }

    /// Says whether what happened befell this hold too, so that another may have been let in by `then`: it is not so if
    /// the hold had something to spare.
    fn befalls(&self, struck: &Struck, hold: &Record, then: Nanos) -> bool {
        let Some(young) = struck.fault.and_then(|fault| fault.bare) else {
            return true;
        };
        let granted = hold.answered();
        let young = nanos(young + self.story.stood_still);
        // Its release is confirmed when a majority knows of it, and reaches the others a little later.
        let over = |other: &Record| {
            let end = other.acquisition.released.or(other.acquisition.until);
            end.unwrap_or_default()
                .saturating_add(young)
                .max(other.answered())
        };
        let contends = |other: &&&Record| {
            !std::ptr::eq(**other, hold)
                && other.acquisition.asked <= granted
                && over(other) >= hold.acquisition.asked
        };
        let is_bare_for = |other: &Record| {
            let alive = self.pause_before(other, granted).is_none();
            let gone = self.gone_or_dead(other) <= granted.saturating_add(young);
            if alive && !gone {
                young
            } else {
                young.max(nanos(millis(other.ttl)))
            }
        };
        let contended = self.records.iter().filter(contends);
        let bare = contended.map(|other| is_bare_for(other)).max();
        bare.is_some_and(|bare| then <= granted.saturating_add(bare)) || self.is_beside(struck)
    }

    /// Says whether something else was the matter at the same time.
    fn is_beside(&self, struck: &Struck) -> bool {
        self.story.struck.iter().any(|other| {
            other.fault.is_some_and(|fault| {
                fault.bare.is_none()
                    && other.from <= struck.to
                    && other.to.saturating_add(nanos(fault.recovery)) >= struck.from
            })
        })
    }

    /// The time within which a holder is told what happened. A renewal that some do not answer tells nothing where
    /// those who do are too few.
    fn told(&self, struck: &Struck, told: Told) -> Told {
        let is_of_few = struck.fault.is_some_and(|fault| fault.bare.is_some());
        if is_of_few && self.is_beside(struck) {
            return told.unanswered();
        }
        told
    }

    /// Says whether `old` believed no longer than it may after what happened, and `new` came in then.
    fn untold(old: &Record, new: &Record, (since, to): (Nanos, Nanos), told: Told) -> bool {
        let (Some((began, believed)), Some((from, _))) = (old.had(), new.sure()) else {
            return false;
        };
        let told = told_after(old, told);
        // The answer to what was granted before may come after, by less than the lease.
        let granted = began
            .saturating_sub(nanos(millis(old.ttl)))
            .max(old.acquisition.asked);
        granted <= to && from >= since && believed <= to.saturating_add(told)
    }

    /// Returns whether a change that lasts is why each has a hold that is good where it has it.
    fn in_two_places(&self, old: &Record, new: &Record) -> bool {
        let mut struck = self.story.struck.iter();
        struck.any(|struck| {
            let told = struck.fault.filter(|fault| fault.lasting);
            let told = told.and_then(|fault| fault.overlap);
            told.is_some_and(|told| Self::untold(old, new, (struck.from, struck.to), told))
        })
    }

    /// Returns whether the server may have dropped the hold before its holder heard of the grant, which then comes
    /// late.
    fn dropped_on_the_way(&self, record: &Record) -> bool {
        let (asked, granted) = (record.acquisition.asked, record.answered());
        let on_the_way = |from: Nanos, to: Nanos, told: Told| {
            let told = nanos(told.after(millis(record.ttl)));
            asked <= to && granted >= from && granted <= to.saturating_add(told)
        };
        let faults = self.story.struck.iter();
        let faults = faults.filter(|struck| self.befalls(struck, record, granted));
        let mut faults = faults.filter_map(|struck| Some((struck.from, struck.to, struck.fault?.overlap?)));
        let mut breaks = self
            .story
            .breaks
            .iter()
            .filter(|(lock, ..)| *lock == record.acquisition.lock);
        faults.any(|(from, to, told)| on_the_way(from, to, told))
            || breaks.any(|(_, from, to)| on_the_way(*from, *to, REVOKED))
    }

    /// Says whether somebody ended the hold from outside before it was released.
    fn is_broken(&self, record: &Record) -> bool {
        let a = &record.acquisition;
        self.story.breaks.iter().any(|(lock, from, to)| {
            *lock == a.lock && *to >= a.asked && a.released.is_some_and(|released| *from <= released)
        })
    }

    /// Says whether the hold was passed on to a waiter of its client, so that its server was not asked at its release.
    fn is_passed_on(&self, record: &Record) -> bool {
        self.records.iter().any(|other| {
            (other.process, other.client) == (record.process, record.client)
                && other.acquisition.lock == record.acquisition.lock
                && other.token() == record.token() + 1
        })
    }

    /// The moments at which counters of tokens began anew.
    fn restarts(&self) -> impl Iterator<Item = Nanos> {
        let struck = self.story.struck.iter();
        let restarts = struck.filter(|struck| struck.fault.is_some_and(|fault| fault.restarts));
        restarts.map(|struck| struck.from)
    }

    /// The wall clock then, in µs since 1970, which is where a counter begins.
    fn clock(&self, at: Nanos) -> u64 {
        self.story.clock.saturating_add(at / 1_000)
    }

    /// Says whether the token is of a counter that had begun anew. One above it had outrun the clock before.
    fn is_restarted(&self, record: &Record) -> bool {
        let granted = record.answered();
        self.restarts()
            .any(|at| granted >= at && record.token() > self.clock(at))
    }

    fn tokens(&self, carried: &mut Tokens, findings: &mut Vec<Finding>) {
        let mut given = HashMap::<u64, &Record>::new();
        let mut ends = Vec::<(Nanos, &Record)>::new();
        let mut guilty = None;
        for new in &self.records {
            let Some((_, token)) = new.acquisition.granted else {
                continue;
            };
            let old = given.insert(token, new).filter(|_| new.adopts.is_none());
            if let Some(old) = old.filter(|_| !self.is_restarted(new)) {
                guilty = guilty.or(Some(format!(
                    "{} and {} have one token",
                    describe(old),
                    describe(new)
                )));
            }
            let Some((from, to)) = new.alone() else {
                continue;
            };
            // Those that had certainly ended.
            ends.retain(|(end, old)| {
                let over = *end < from;
                if over {
                    let highest = if is_exclusive(old) {
                        &mut carried.exclusive
                    } else {
                        &mut carried.other
                    };
                    *highest = old.token().max(*highest);
                }
                !over
            });
            let other = if is_exclusive(new) { carried.other } else { 0 };
            let highest = carried.exclusive.max(other);
            // An adopted hold has the token that it had.
            let is_below = token < highest || token == highest && new.adopts.is_none();
            if is_below && !self.dropped_on_the_way(new) && !self.is_restarted(new) {
                let detail = format!(
                    "{} has a token that is not above {highest}, of a hold before it",
                    describe(new)
                );
                guilty = guilty.or(Some(detail));
            }
            ends.push((to, new));
        }
        for (_, old) in ends {
            let highest = if is_exclusive(old) {
                &mut carried.exclusive
            } else {
                &mut carried.other
            };
            *highest = old.token().max(*highest);
        }
        if let Some(restarted) = self.restarts().min() {
            // Tokens ahead of the clock are forgotten, but for those given out since.
            let later = self
                .records
                .iter()
                .filter(|record| record.answered() >= restarted);
            let most = later.map(|record| record.token()).max().unwrap_or_default();
            let most = most.max(self.clock(restarted));
            carried.exclusive = carried.exclusive.min(most);
            carried.other = carried.other.min(most);
        }
        findings.extend(guilty.map(|detail| Finding::new(Law::Tokens, detail)));
    }

    /// A resource that compares tokens refuses a writer with a lower one. It must not refuse one whose release was
    /// confirmed: that hold was good to its end. So a client that had a higher token by then, lost or not, had it too
    /// early.
    fn fencing(&self, findings: &mut Vec<Finding>) {
        // In the order of their grants, each with the highest token that the resource may have seen by then.
        let mut seen = Vec::<(Nanos, &Record)>::new();
        for record in self.records.iter().filter(|record| is_exclusive(record)) {
            if let Some((from, _)) = record.sure() {
                let before = seen.last().map(|(_, highest)| *highest);
                let highest = before.filter(|highest| highest.token() >= record.token());
                seen.push((from, highest.unwrap_or(record)));
            }
        }
        let good = |record: &&&Record| {
            record.over == Over::Released
                && is_exclusive(record)
                && !self.is_restarted(record)
                && !(self.is_broken(record) && self.is_passed_on(record))
        };
        for rightful in self.records.iter().filter(good) {
            let Some((_, wrote)) = rightful.alone() else {
                continue;
            };
            let before = seen.partition_point(|(from, _)| *from < wrote);
            let highest = before.checked_sub(1).map(|last| seen[last].1);
            let higher = highest.filter(|highest| highest.token() > rightful.token());
            let dropped = |higher: &&Record| self.is_passed_on(rightful) && self.excused(rightful, higher);
            let higher = higher.filter(|higher| !dropped(higher) && !self.in_two_places(rightful, higher));
            if let Some(other) = higher {
                let detail = format!(
                    "the resource refuses {}, since {} came before, and only one of them can have held",
                    describe(rightful),
                    describe(other)
                );
                findings.push(Finding::new(Law::Fencing, detail));
                return;
            }
        }
    }

    /// Nobody waits for a lock that is free, and no try is told that such a lock is taken.
    fn waiting(&self, findings: &mut Vec<Finding>) {
        let idle = nanos(IDLE + self.story.stood_still);
        let polled = idle.saturating_add(nanos(self.story.bounds.fallback_poll * 3 / 2));
        for record in &self.records {
            let a = &record.acquisition;
            let end = record.answered();
            // Of several permits, the first speaks for all.
            let is_first = permits(record).is_some() && record.place.0 == 0;
            let free = match (record.asked, record.fared) {
                // It may have to look again by itself.
                (Asked::Waited, Fared::Granted | Fared::Taken | Fared::Dropped) => {
                    self.was_left(record, (a.asked, end), polled)
                }
                (Asked::Together, Fared::Granted | Fared::Taken) if is_first => {
                    self.was_left(record, (a.asked, end), polled)
                }
                (Asked::Tried, Fared::Taken) => self.was_free(record),
                (Asked::TriedTogether, Fared::Taken) if is_first => self.was_free(record),
                _ => continue,
            };
            if let Some((from, to)) = free {
                let (law, what) = match record.asked {
                    Asked::Tried | Asked::TriedTogether => (Law::Answer, "was told that it is taken"),
                    _ => (Law::Liveness, "waited"),
                };
                let detail = format!(
                    "{} {what}, and nobody can have had it from {} to {} µs, for {} ms",
                    describe(record),
                    from / 1_000,
                    to / 1_000,
                    (to - from) / 1_000_000
                );
                findings.push(Finding::new(law, detail));
                return;
            }
        }
    }

    /// Nobody had it when it was told that it is taken. It is answered at any moment until the end, so that at none it may have been
    /// taken.
    fn was_free(&self, record: &Record) -> Option<(Nanos, Nanos)> {
        let end = record.answered();
        let idle = nanos(IDLE + self.story.stood_still);
        let from = record.acquisition.asked.saturating_sub(idle);
        self.was_left(record, (from, end), end.saturating_sub(from + 1))
    }

    /// The lock was free within the window for longer than `allowed`.
    fn was_left(&self, record: &Record, window: (Nanos, Nanos), allowed: Nanos) -> Option<(Nanos, Nanos)> {
        if window.1.saturating_sub(window.0) <= allowed || self.is_disturbed(record, window) {
            return None;
        }
        self.free_for(record, window, allowed)
    }

    /// Its process or client did not go on all the time.
    fn is_disturbed(&self, record: &Record, (from, to): (Nanos, Nanos)) -> bool {
        let paused = |pause: &Pause| {
            pause.process == record.process && pause.from <= to && pause.to.is_none_or(|end| end >= from)
        };
        let gone = self.story.gone.get(&record.client).into_iter().flatten();
        self.story.pauses.iter().any(paused) || gone.into_iter().any(|at| *at >= from && *at <= to)
    }

    /// A time of more than `allowed` in which nobody possibly kept `waiter` out.
    fn free_for(
        &self,
        waiter: &Record,
        (from, to): (Nanos, Nanos),
        allowed: Nanos,
    ) -> Option<(Nanos, Nanos)> {
        let size = permits(waiter).unwrap_or(1);
        let wants = i64::from(waiter.place.1);
        let is_free = |taken: i64| taken + wants <= size;
        let mut moments = Vec::new();
        let mut busy = |since: Nanos, until: Nanos, weight: i64| {
            if since < until && since < to && until > from {
                moments.push((since.max(from), weight));
                moments.push((until.min(to), -weight));
            }
        };
        for struck in &self.story.struck {
            let recovery = struck.fault.map_or(Duration::ZERO, |fault| fault.recovery);
            if struck.fault.is_some() {
                busy(struck.from, struck.to.saturating_add(nanos(recovery)), size);
            }
        }
        for (_, since, until) in &self.story.breaks {
            busy(*since, until.saturating_add(nanos(LINGER)), size);
        }
        for other in &self.records {
            let itself = other.acquisition.who == waiter.acquisition.who && other.process == waiter.process;
            if itself {
                continue;
            }
            if conflict(waiter, other) || size > 1 {
                let (since, until) = self.possibly(other);
                let shared = other.shared.filter(|_| !is_exclusive(waiter));
                let shared = shared.map_or(Nanos::MAX, |at| at.saturating_add(nanos(LINGER)));
                let weight = if differ_in_size(waiter, other) { size } else { 1 };
                busy(since, until.min(shared), weight);
            }
            if wants > 1 && other.place.1 > 1 {
                let (since, until) = self.collects(other);
                busy(since, until, size);
            }
            // A try goes before nobody who waits.
            let goes_before = match waiter.asked {
                Asked::Tried | Asked::TriedTogether => conflict(waiter, other) || size > 1,
                _ => differ_in_size(waiter, other) || !is_exclusive(waiter) && is_exclusive(other),
            };
            if goes_before || other.asked == Asked::Unpolled || other.asked == Asked::Cancelled {
                for (since, until) in self.waits(other) {
                    busy(since, until, size);
                }
            }
        }
        moments.sort_unstable();
        let (mut taken, mut free_since) = (0, from);
        for (moment, weight) in moments.into_iter().chain([(to, size)]) {
            if is_free(taken) && moment.saturating_sub(free_since) > allowed {
                return Some((free_since, moment));
            }
            taken += weight;
            if is_free(taken) {
                free_since = free_since.max(moment);
            }
            if !is_free(taken) {
                free_since = Nanos::MAX;
            } else if free_since == Nanos::MAX {
                free_since = moment;
            }
        }
        None
    }

    /// From when to when the server may have given the lock to it.
    fn possibly(&self, record: &Record) -> (Nanos, Nanos) {
        let a = &record.acquisition;
        let dead = self.story.bounds.dead_holder(record.ttl_now);
        let linger = nanos(LINGER);
        let unsure = |at: Nanos| {
            if self.may_have_failed(record, at.saturating_add(linger)) {
                dead
            } else {
                0
            }
        };
        let died = self.died(record);
        // What belongs to several may be held from the first request on, and what is adopted goes on.
        let is_early = matches!(
            record.asked,
            Asked::Together | Asked::TriedTogether | Asked::Adopts
        );
        match a.granted {
            Some((granted, _)) => {
                let until = match (record.over, a.released) {
                    (Over::Released, Some(at)) => at,
                    (Over::Dropped, Some(at)) => at.saturating_add(linger + unsure(at)),
                    (Over::Detached, Some(at)) => {
                        let heir = self.passed_to_heir(record);
                        heir.unwrap_or(at.saturating_add(dead)).saturating_add(linger)
                    }
                    _ if self.let_go(record).is_some() => {
                        let at = self.let_go(record).unwrap_or(Nanos::MAX);
                        at.saturating_add(linger + unsure(at))
                    }
                    // Its guard may have been kept for longer.
                    (_, Some(at)) => a.lost.unwrap_or(at).saturating_add(linger + dead),
                    // Forgotten, or its process was killed.
                    (_, None) => self.gone_or_dead(record).saturating_add(linger + dead),
                };
                let since = granted.saturating_sub(nanos(APART));
                (if is_early { a.asked } else { since }, until)
            }
            // A dead process may have been granted what it could not tell of any more.
            None if a.gave_up.is_none() => {
                (a.asked, died.unwrap_or(Nanos::MAX).saturating_add(dead + linger))
            }
            // The hold is not its own. If it had no answer, it may be.
            None if record.asked == Asked::Adopts => {
                let at = a.gave_up.unwrap_or(Nanos::MAX);
                let until = at.saturating_add(linger + dead);
                (
                    a.asked,
                    if record.fared == Fared::Taken {
                        a.asked
                    } else {
                        until
                    },
                )
            }
            None => {
                let at = a.gave_up.unwrap_or(Nanos::MAX);
                let since = self.pause_before(record, at).unwrap_or(at);
                (
                    if is_early {
                        a.asked
                    } else {
                        since.saturating_sub(linger)
                    },
                    at.saturating_add(linger + unsure(at)),
                )
            }
        }
    }

    /// Returns whether something kept its client from giving back by `until` what it had, or may have had.
    fn may_have_failed(&self, record: &Record, until: Nanos) -> bool {
        let story = self.story;
        let asked = record.acquisition.asked;
        let lost_runtime =
            |plan: &ClientPlan| plan.id == record.client && matches!(plan.fate, Some((_, Fate::Runtime)));
        let gone = story.gone.get(&record.client).into_iter().flatten();
        let meanwhile = |struck: &Struck| {
            let recovery = struck.fault.map_or(Duration::ZERO, |fault| fault.recovery);
            struck.from <= until && struck.to.saturating_add(nanos(recovery)) >= asked
        };
        story.struck.iter().any(meanwhile)
            || self.pauses_of(record, until).next().is_some()
            || (gone.into_iter().any(|at| *at >= asked && *at <= until)
                && story.schedule.clients.iter().any(lost_runtime))
    }

    /// Returns the spans in which it may have stood before others without having the lock.
    fn waits(&self, record: &Record) -> Vec<(Nanos, Nanos)> {
        let (asked, answered) = (record.acquisition.asked, record.answered());
        let linger = nanos(LINGER);
        let dead = self.story.bounds.dead_waiter(record.ttl).saturating_add(linger);
        let mut pauses: Vec<_> = self.pauses_of(record, answered).collect();
        pauses.sort_unstable();
        let mut waits = Vec::with_capacity(1);
        let mut since = asked;
        for (from, to) in pauses {
            // One that stands still, or is dead, keeps nobody out for longer than its bound; one that goes on is back.
            let until = answered.min(from.saturating_add(dead));
            waits.push((since, until.saturating_add(linger)));
            since = to;
        }
        waits.push((since, answered.saturating_add(linger)));
        waits
    }

    /// Returns the spans in which its process did not run while it was under way.
    fn pauses_of(&self, record: &Record, until: Nanos) -> impl Iterator<Item = (Nanos, Nanos)> {
        let (process, asked) = (record.process, record.acquisition.asked);
        let pauses = self.story.pauses.iter();
        let pauses = pauses.filter(move |pause| pause.process == process);
        let pauses = pauses.map(move |pause| (pause.from.max(asked), pause.to.unwrap_or(Nanos::MAX)));
        pauses.filter(move |(from, to)| *from <= until && *to >= asked)
    }

    /// Returns when its process stopped running for the last time, while it was under way.
    fn pause_before(&self, record: &Record, until: Nanos) -> Option<Nanos> {
        self.pauses_of(record, until).map(|(from, _)| from).max()
    }

    fn died(&self, record: &Record) -> Option<Nanos> {
        let pauses = self.story.pauses.iter();
        let mut deaths = pauses.filter(|pause| pause.process == record.process && pause.to.is_none());
        deaths.next().map(|death| death.from)
    }

    fn gone_or_dead(&self, record: &Record) -> Nanos {
        let since = record.acquisition.asked;
        let gone = self.story.gone.get(&record.client).into_iter().flatten();
        let gone = gone.copied().filter(|at| *at >= since).min();
        self.died(record).or(gone).unwrap_or(Nanos::MAX)
    }

    /// Waiters get a lock in the order in which they came to wait, where that is promised and can be told.
    fn order(&self, findings: &mut Vec<Finding>) {
        let story = self.story;
        let handing_on = self
            .records
            .iter()
            .any(|record| record.handoffs.is_some_and(|n| n > 0));
        let default = self.records.iter().any(|record| record.handoffs.is_none());
        let mixed = handing_on || (default && self.records.iter().any(|record| record.handoffs.is_some()));
        let disordered = story.struck.iter().any(|struck| {
            let lasted = Duration::from_nanos(struck.to.saturating_sub(struck.from));
            struck.fault.is_some_and(|fault| fault.order <= lasted)
        });
        // Who gives another size is refused, and keeps no place.
        let sizes = self
            .records
            .windows(2)
            .any(|pair| differ_in_size(pair[0], pair[1]));
        if !story.bounds.fifo || mixed || sizes || disordered || !story.breaks.is_empty() {
            return;
        }
        // Records are in the order of their grants, those without one before all others.
        let from = |moment: Nanos| {
            let before = |record: &&Record| {
                record
                    .acquisition
                    .granted
                    .is_none_or(|(granted, _)| granted < moment)
            };
            self.records.partition_point(before)
        };
        let heard = Heard::of(&story.records);
        for first in &self.records {
            let Some(queued) = self.queued(first, &heard).filter(|_| self.waits_alone(first)) else {
                continue;
            };
            let until = first.answered().saturating_sub(nanos(APART + story.stood_still));
            let passed = self.records.get(from(queued)..from(until)).unwrap_or_default();
            let overtaker = passed.iter().find(|next| {
                next.acquisition.asked > queued
                    && conflict(first, next)
                    && !self.somebody_is_away((next.answered(), next.answered()))
                    && self.waits_alone(next)
            });
            if let Some(overtaker) = overtaker {
                let detail = format!("{} was granted before {}", describe(overtaker), describe(first));
                findings.push(Finding::new(Law::Order, detail));
                return;
            }
        }
    }

    /// Returns whether somebody who waits may have been off the line then, and have been passed over without losing its
    /// place.
    fn somebody_is_away(&self, (from, to): (Nanos, Nanos)) -> bool {
        let mut struck = self.story.struck.iter();
        struck.any(|struck| {
            let lasted = Duration::from_nanos(struck.to.saturating_sub(struck.from));
            let back = nanos(BACK + RETRIED.min(2 * lasted) + self.story.stood_still);
            struck.from <= to && struck.to.saturating_add(back) >= from
        })
    }

    /// Returns the time at which it surely stood in the queue.
    fn queued(&self, record: &Record, heard: &Heard) -> Option<Nanos> {
        let a = &record.acquisition;
        let soon = a.asked.saturating_add(nanos(QUEUED + self.story.stood_still));
        let late = heard
            .after(record, a.asked)
            .max(soon)
            .min(soon.saturating_add(nanos(OP_TIMEOUT)));
        // Where something strikes before that. An attempt may be two requests, the second of which goes out when the first is
        // answered: so it had gone when its client, which had an answer since, asked again.
        let once = heard.after(record, a.queued.unwrap_or(a.asked));
        let early = heard.after(record, once).saturating_add(nanos(APART));
        let struck = |struck: &Struck| struck.from <= late && struck.to >= a.asked;
        let sure = if self.story.struck.iter().any(struck) {
            Some(early).filter(|early| !self.somebody_is_away((a.asked, *early)))
        } else {
            Some(late)
        };
        let waits = record.asked == Asked::Waited && !record.lenient;
        sure.filter(|sure| waits && *sure < record.answered())
    }

    /// Returns whether it waits, and no other of its client is there for that lock at the time, in whose queue it would
    /// stand.
    fn waits_alone(&self, record: &Record) -> bool {
        let a = &record.acquisition;
        let until = record.answered();
        let end_of = |other: &Record| {
            let ends = [other.acquisition.released, other.acquisition.gave_up]
                .into_iter()
                .flatten()
                .max();
            // A confirmed release is over.
            let linger = if other.over == Over::Released {
                0
            } else {
                nanos(LINGER)
            };
            ends.unwrap_or(Nanos::MAX).saturating_add(linger)
        };
        let gone = self.story.gone.get(&record.client).into_iter().flatten();
        let anew = gone.copied().filter(|at| *at <= a.asked).max();
        let beside = |other: &&Record| {
            let b = &other.acquisition;
            // Its client was another, if it has connected anew since.
            let before = anew.is_some_and(|at| b.asked < at);
            // One that is refused at once was in no queue.
            let refused = other.asked == Asked::Tried && b.granted.is_none();
            b.who != a.who
                && other.client == record.client
                && !before
                && !refused
                && b.asked <= until
                && end_of(other) >= a.asked
        };
        let ends = record.fared == Fared::Granted || record.fared == Fared::Taken;
        record.asked == Asked::Waited
            && ends
            && !record.lenient
            && !self.is_disturbed(record, (a.asked, until))
            && !self.records.iter().copied().any(|other| beside(&other))
    }
}

/// The answers of the server to each client. What it had asked before was there then: requests of a client are in
/// order.
#[derive(Debug, Default)]
struct Heard(HashMap<(u32, u32), Vec<(Nanos, Nanos)>>);

impl Heard {
    /// By tries, which nobody else answers: for each client when it asked, and the first answer to that or to a later
    /// one.
    fn of(records: &[Record]) -> Self {
        let mut heard = HashMap::<_, Vec<_>>::new();
        let tried = |record: &&Record| {
            record.asked == Asked::Tried && matches!(record.fared, Fared::Granted | Fared::Taken)
        };
        for record in records.iter().filter(tried) {
            let answers = heard.entry((record.process, record.client)).or_default();
            answers.push((record.acquisition.asked, record.answered()));
        }
        for answers in heard.values_mut() {
            answers.sort_unstable();
            let mut first = Nanos::MAX;
            for (_, answered) in answers.iter_mut().rev() {
                first = first.min(*answered);
                *answered = first;
            }
        }
        Self(heard)
    }

    /// The first answer that the client of `record` had to what it asked after `moment`.
    fn after(&self, record: &Record, moment: Nanos) -> Nanos {
        let answers = self.0.get(&(record.process, record.client));
        let answers = answers.map_or(&[][..], Vec::as_slice);
        let later = answers.partition_point(|(asked, _)| *asked <= moment);
        answers.get(later).map_or(Nanos::MAX, |(_, answered)| *answered)
    }
}

impl Story {
    /// Returns whether somebody never gave up a guard.
    pub(super) fn forgot_anything(&self) -> bool {
        let forgotten = |record: &Record| record.over == Over::Not && record.acquisition.granted.is_some();
        self.records.iter().any(forgotten)
    }

    /// A log of who did what when.
    pub(super) fn log(&self) -> String {
        let mut lines: Vec<_> = self
            .records
            .iter()
            .map(|record| {
                (
                    record.acquisition.asked,
                    format!("{} {}", describe(record), record.error),
                )
            })
            .collect();
        for Struck { fault, from, to } in &self.struck {
            let name = fault.map_or("?", |fault| fault.name);
            lines.push((
                *from,
                format!("FAULT {name} from {} to {}", from / 1_000, to / 1_000),
            ));
        }
        for pause in &self.pauses {
            lines.push((pause.from, format!("FAULT {pause:?}")));
        }
        for (lock, from, to) in &self.breaks {
            lines.push((
                *from,
                format!("BREAK of {lock} from {} to {}", from / 1_000, to / 1_000),
            ));
        }
        for asked in &self.asks {
            lines.push((asked.from, format!("{asked:?}")));
        }
        for sight in &self.sights {
            lines.push((sight.seen, format!("{sight:?}")));
        }
        for listed in &self.lists {
            lines.push((listed.from, format!("{listed:?}")));
        }
        for (client, at) in &self.gone {
            lines.push((
                at.first().copied().unwrap_or_default(),
                format!("GONE client {client}: {at:?}"),
            ));
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line + "\n").collect()
    }
}

#[cfg(test)]
mod tests;
