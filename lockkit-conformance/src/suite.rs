//! The list of cases, and how they are run.

use std::{
    fmt,
    io::Write as _,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{Capabilities, LockClient, spi::chain};
use tokio::{runtime, time::timeout};

use crate::{
    Harness,
    case_run::{CaseRun, LIMIT, MOST_DEATHS, Outcome, Stop},
    cases::{
        asking, basic, claims, contention, detaching, downgrade, election, fence, listing, loss, names,
        permits, processes, sets, shared, waiting,
    },
    helper::Launch,
    history::BROKEN,
    stall::Stopwatch,
};

/// The most runs of a case.
const ATTEMPTS: usize = 3;

/// A pause of the machine that may be why a case failed: what is prompt takes a second, of which most is left over.
const PAUSE: Duration = Duration::from_millis(200);

/// One requirement on a backend.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// Its name, which is also that of the generated `#[test]`.
    pub name: &'static str,
    /// The requirement, in a line.
    pub doc: &'static str,
    needs: &'static [Need],
    run: Run,
}

type Run = for<'a> fn(&'a CaseRun) -> Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Case({})", self.name)
    }
}

/// A condition on the backend for a case to apply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Fifo,
    Shared,
    NoShared,
    Downgrade,
    NoDowngrade,
    Permits,
    NoPermits,
    Lease,
    NoLease,
    Notified,
    Revoke,
    NoRevoke,
    RevokeByForce,
    NoRevokeByForce,
    List,
    NoList,
    Detach,
    NoDetach,
    RaiseFence,
    NoRaiseFence,
    NoLocalHandoffs,
    Processes,
    Secret,
}

impl Need {
    /// Returns why the case does not apply, if it does not.
    fn unmet(self, has: Capabilities, suite: &Suite) -> Option<&'static str> {
        let (met, otherwise) = match self {
            Self::Fifo => (has.fifo, "it does not promise the order of the queue"),
            Self::Shared => (has.shared, "it has no shared mode"),
            Self::NoShared => (!has.shared, "it has a shared mode"),
            Self::Downgrade => (has.downgrade, "it cannot make an exclusive hold a shared one"),
            Self::NoDowngrade => (!has.downgrade, "it can make an exclusive hold a shared one"),
            Self::Permits => (has.permits, "it has no semaphores"),
            Self::NoPermits => (!has.permits, "it has semaphores"),
            Self::Lease => (has.lease, "its holds have no lease"),
            Self::NoLease => (!has.lease, "its holds have a lease"),
            Self::Notified => (has.notified, "its waiters poll"),
            Self::Revoke => (has.revoke, "it cannot ask another's holder"),
            Self::NoRevoke => (!has.revoke, "it can ask another's holder"),
            Self::RevokeByForce => (has.revoke_by_force, "it cannot end another's hold"),
            Self::NoRevokeByForce => (!has.revoke_by_force, "it can end another's hold"),
            Self::List => (has.list, "it cannot list what is held"),
            Self::NoList => (!has.list, "it can list what is held"),
            Self::Detach => (has.detach, "its holds cannot be detached"),
            Self::NoDetach => (!has.detach, "its holds can be detached"),
            Self::RaiseFence => (has.raise_fence, "its tokens cannot be raised"),
            Self::NoRaiseFence => (!has.raise_fence, "its tokens can be raised"),
            Self::NoLocalHandoffs => (!has.local_handoffs, "it passes holds on within a client"),
            Self::Processes => (
                suite.launch.is_some() && suite.harness.url().is_some(),
                "no helper process can reach it",
            ),
            Self::Secret => (
                suite.harness.secret().is_some(),
                "its configuration has no secret",
            ),
        };
        (!met).then_some(otherwise)
    }
}

/// Calls a macro with every case: module, name, what it needs, and what is required.
///
/// The one list: the tests that [`tests!`](crate::tests) generates and [`cases`] both come from here.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_each_case {
    ([$($callback:tt)*] $($argument:tt)*) => { $($callback)* ! { $($argument)*
        basic::second_try_is_none [] "not re-entrant: while the lock is held, a try of its own client is None too";
        basic::other_names_are_independent [] "holding one name keeps nobody from another";
        basic::reacquired_after_release [] "a released lock is granted again, with a higher token";
        basic::reacquired_after_drop [] "a guard dropped without release gives the lock back";
        basic::release_dropped_midway [] "a release future dropped after its first poll still releases";
        basic::late_release_harms_nobody [] "releasing or dropping a guard that was lost frees nobody's lock";
        basic::bad_options_are_refused [] "zero and absurd durations, long labels and the like are InvalidOptions";
        basic::inspection_shows_the_holder [] "an inspection shows label and token of the holder, and then that it is free";
        basic::unpolled_inspection_stops_nobody [] "an inspection that is neither polled nor dropped delays no other, and no grant";
        basic::dropped_outside_a_runtime [] "a guard dropped on a plain thread releases, and does not panic";
        basic::dropped_during_shutdown [] "a guard dropped by a runtime's shutdown does not panic, and the lock comes back";
        basic::client_outlives_its_runtime [] "when a client's runtime has ended, it says so at once, whatever it is asked";
        basic::closed_client_refuses [] "close releases what is held, tells holders and waiters, and refuses more";
        names::byte_exact_and_injective [] "names with odd characters, of 1,024 bytes, or alike but for case are all different locks";
        names::bad_names_are_refused [] "empty and over-long names are InvalidName";
        names::names_forge_no_line [] "a name with line ends and control sequences shows escaped in every error and trace";
        names::secrets_stay_secret [Secret] "the configuration's secret shows in no Debug output, error or trace";
        waiting::short_timeout_is_prompt [] "a time-out of 200 ms returns in under 500 ms, and says that the lock is taken";
        waiting::outage_is_never_taken [] "a wait or a try whose server is away at its end is an error; the server's word that it is taken is a time-out";
        waiting::cancelled_wait_is_prompt [] "a blocked wait is cancelled in under a second";
        waiting::counter_is_never_two [] "100 handles of 10 clients on one name: never two inside";
        waiting::nothing_is_left_behind [] "1,000 tries, time-outs and cancelled waits leave nothing on the server";
        waiting::dropped_after_each_poll [] "an acquire future dropped after its 1st, 2nd, … nth poll leaves nothing behind";
        waiting::untaken_grant_lapses [] "a grant whose future is never polled again lapses";
        waiting::flood_is_bounded [] "1,000 waiters of one client are one waiter at the server, and all get an answer";
        waiting::grants_follow_the_queue [Fifo] "without local hand-offs, grants keep the order of the queue across clients";
        waiting::waiter_is_notified [Notified] "a waiter is woken by the release, not by its fallback poll";
        waiting::hinted_when_one_ahead_gives_up [Notified] "a waiter of each mode is granted without a poll when one that waits before it gives up";
        waiting::strict_order_refuses_handoffs [NoLocalHandoffs] "local hand-offs are InvalidOptions where the order is strict";
        loss::saboteur_breaks_an_unprotected_hold [] "the tool that breaks holds breaks one: another client is granted";
        loss::told_when_broken [] "a holder whose hold the server dropped is told, for good, also late subscribers";
        loss::not_told_by_release [] "a release is an end and no loss";
        loss::lost_hold_is_not_released [] "the release of a hold that the server has dropped is no release, whether its holder was told or not";
        loss::watched_guard_can_be_dropped [] "a guard can be dropped while its loss is awaited";
        loss::running_work_is_stopped [] "work under guard.run stops with Lost when the hold is lost";
        asking::asked_holder_is_waited_for [Revoke] "a holder that is asked to give up its hold is told, and nobody is granted before it lets go";
        asking::asked_holder_that_stays_expires [Revoke, Lease] "a holder that was asked and does not let go ends with its lease, renewed or not";
        asking::asked_by_token [Revoke] "asking hits the hold of that token and no other, also with several askers and waiters";
        asking::asked_heir [Revoke] "a holder is asked by its own token also where the hold was passed on to it within its client";
        asking::asked_shared_holder [Revoke, Shared] "one of two shared holders is asked, and the other is not";
        asking::asked_permit [Revoke, Permits] "the holder of one permit of two is asked, and the other is not";
        asking::asked_releasing_holder [Revoke] "a request to give up a hold that its holder releases at the same time disturbs nobody";
        asking::asked_rounds [Revoke] "round after round, the next is granted only after the holder that was asked has let go";
        asking::asking_is_unsupported [NoRevoke] "asking a holder is Unsupported where that cannot be, and changes nothing";
        claims::late_renewal_takes_nothing [] "a hold that was broken, and is another's by now, does not come back with a renewal";
        claims::late_release_is_lost [] "a release of a hold that the server has dropped says Lost, and ends nobody else's";
        claims::released_claim_goes_on [] "a claim is released twice, and granted again, with a higher token";
        claims::lost_grant_is_found_again [] "an attempt whose reply was lost is repeated, and finds its grant, with no lower token";
        claims::found_grant_is_proven_anew [Lease] "a grant that a repeated attempt finds is kept for as long as its lease says";
        claims::lease_counts_from_the_request [Lease] "a lease counts from before its request, however late the reply is";
        claims::expired_hold_is_not_shown [Lease] "a hold that nobody renews or releases is not shown once its lease is over, and the next token is higher";
        claims::adopted_hold_is_proven_anew [Detach, Lease] "a hold that is adopted is kept for as long as its lease says";
        loss::revoked_by_token [RevokeByForce] "revoking by force ends the hold of that token and no other";
        loss::force_is_unsupported [NoRevokeByForce] "revoking by force is Unsupported where a hold cannot be ended from outside";
        loss::unrenewed_lease_lapses_first_here [Lease] "without renewal a hold lapses, and its holder knows before another is granted";
        loss::renewal_keeps_the_hold [Lease] "a renewed hold outlives its lease, and its deadline advances";
        loss::renewed_by_hand [Lease] "renew extends a hold whose background renewal is off";
        loss::hold_without_lease_stays [NoLease] "a hold without a lease has no deadline and outlasts the ttl";
        loss::max_hold_ends_a_hold [] "a task that hangs keeps a lock for max_hold and a ttl at most, and is told before another is granted";
        loss::ttl_of_a_live_hold [Lease] "set_ttl gives a live hold a shorter and a longer lease, here and at the server";
        loss::ttl_below_the_least_is_refused [Lease] "a ttl below the least of the backend is InvalidOptions, which names the least, also for a live hold";
        loss::ttl_change_dropped_midway [Lease] "a set_ttl dropped after any poll leaves no lease here that is longer than the server's";
        loss::ttl_without_a_lease_is_unsupported [NoLease] "set_ttl is Unsupported where a hold has no lease";
        detaching::detached_hold_is_adopted [Detach] "a hold that is detached goes on for whoever adopts it, once, with the same token";
        detaching::adopted_once [Detach] "of several clients that adopt one hold at once, no two get it";
        detaching::detached_hold_expires [Detach] "a hold that nobody adopts ends with its lease, and not before, and cannot be adopted then";
        detaching::detached_holds_lose_nothing [Detach] "a hold goes through many clients, and nobody is granted it on the way";
        detaching::detach_dropped_midway [Detach] "a detach future dropped after any poll releases the lock";
        detaching::adoption_dropped_midway [Detach] "an adopt future dropped after any poll, and called again, adopts the hold";
        detaching::asked_while_detached [Detach, Revoke] "a hold that is asked back while it is detached is not adopted";
        detaching::shared_hold_is_adopted [Detach, Shared] "one of two shared holds is detached and adopted, beside the other";
        detaching::permit_is_adopted [Detach, Permits] "one of two permits is detached and adopted, beside the other";
        detaching::killed_process_has_detached [Detach, Processes] "a process detaches, is killed, and another goes on: nobody is granted in between";
        detaching::released_hold_stays [Detach] "a hold with hold_at_least that is released or dropped before keeps others out until then";
        detaching::adopted_hold_stays [Detach] "a hold with hold_at_least that another client adopts, and releases or drops, keeps others out until then";
        detaching::least_times_beside_other_ttls [Detach] "holds of one client with short and long ttls are kept for their hold_at_least, below and above each ttl";
        detaching::least_time_outlives_a_dropped_downgrade [Detach, Downgrade] "a downgrade of a hold with hold_at_least, dropped after its 1st, 2nd, … nth poll, leaves others out until then";
        detaching::killed_process_keeps_least_time [Detach, Processes] "a hold with hold_at_least outlives the process that released it, and one that was not released ends with its lease";
        detaching::detaching_is_unsupported [NoDetach] "detaching, adopting and hold_at_least are Unsupported where a hold ends with its session or process";
        fence::raised_tokens_are_above [RaiseFence] "once tokens are raised, every grant of every client has a higher one, and what is lower or absurd changes nothing";
        fence::raised_by_several_at_once [RaiseFence] "of several that raise tokens at once the highest wins";
        fence::raises_race_acquisitions [RaiseFence] "while tokens are raised again and again, those of a lock never fall, and none is granted below a raise that was over";
        fence::raising_spares_what_is_held [RaiseFence] "a hold from before keeps its token, and is shown, asked and released as before";
        fence::raising_is_unsupported [NoRaiseFence] "raising tokens is Unsupported where that cannot be, and changes nothing";
        listing::held_locks_are_listed [List] "a list shows each held lock and semaphore once, with holders and waiters, and no other";
        listing::list_prefix_is_literal [List] "a list shows the names that begin with its prefix, whatever the characters and the length";
        listing::lists_refuse_nobody [List] "lists of several pages show all that is held throughout, and no try is refused meanwhile";
        listing::list_is_unsupported [NoList] "list is Unsupported where names cannot be listed";
        shared::many_readers_or_one_writer [Shared] "shared holders are in together, and exclude an exclusive one and it them";
        shared::waiting_writer_goes_before_new_readers [Shared] "a waiting writer is granted although readers keep coming";
        shared::readers_do_not_starve [Shared] "a waiting reader is granted although writers keep coming";
        shared::readers_and_writers_contend [Shared] "a random history of readers and writers has every property";
        shared::shared_is_unsupported [NoShared] "shared mode is Unsupported where there is none";
        downgrade::downgraded_holder_reads_with_others [Downgrade] "a downgrade ends the exclusive hold, keeps token and lock, and lets readers in";
        downgrade::nobody_writes_in_a_downgrade [Downgrade] "no writer that waits is granted between an exclusive hold and the shared one it becomes";
        downgrade::downgrade_overtakes_no_writer [Downgrade, Fifo] "readers behind a writer that waits stay behind it after a downgrade";
        downgrade::downgrade_dropped_midway [Downgrade] "a downgrade dropped after its 1st, 2nd, … nth poll leaves the lock free";
        downgrade::downgrade_revives_no_lost_hold [Downgrade] "a downgrade of a hold that the server has dropped is Lost, and gets nothing back";
        downgrade::downgrade_is_unsupported [NoDowngrade] "a downgrade is Unsupported where it cannot be, and the hold stays exclusive";
        permits::never_more_than_the_size [Permits] "10 tasks × 25 rounds reach 3 permits and never exceed them";
        permits::drained_permits_come_back [Permits] "all permits taken, released, and taken again";
        permits::several_permits_or_none [Permits] "several permits at once are all or none, and a try in vain leaves none";
        permits::who_wants_several_never_locks_up [Permits] "4 clients that want 3 of 4 permits, or one, again and again all get theirs";
        permits::two_sizes_are_an_error [Permits] "using one semaphore with two sizes is a clear error";
        permits::apart_from_the_lock [Permits] "a semaphore and a lock of one name do not exclude each other";
        permits::semaphores_are_unsupported [NoPermits] "semaphores are Unsupported where there are none";
        permits::killed_holder_returns_its_permit [Permits, Processes] "the permit of a process that is killed comes back";
        sets::set_is_all_or_nothing [] "a set of locks of which one is taken is not granted, and keeps nothing; one that is granted has all of them";
        sets::set_tokens_rise [] "each token of a set is above those that its name had before, in sets and by itself";
        sets::set_is_told_of_a_loss [] "a set that loses one lock is told, also while it waits for another, and keeps nothing";
        sets::set_has_each_lock_once [] "a set with one lock twice is InvalidOptions; by two addresses of its server, it is taken";
        sets::sets_in_opposite_orders_never_lock_up [] "4 clients that want two of three locks, in opposite orders, again and again all get theirs";
        sets::set_dropped_midway [] "a set dropped after its 1st, 2nd, … nth poll, or while it waits, leaves nothing behind";
        sets::set_members_of_every_mode [] "a set has shared locks and permits where there are such, and is Unsupported and keeps nothing otherwise";
        sets::set_outage_is_never_taken [] "a try for a set of which one server is away is an error, and keeps nothing";
        processes::second_process_excludes [Processes] "another process holds: a try is None, and granted after its release";
        processes::exit_without_release [Processes] "a process that exits without release leaves the lock free";
        processes::killed_holder_lets_a_waiter_in [Processes] "a holder is killed: a waiter that was blocked wins within the bound";
        processes::paused_holder_is_told_and_fenced [Processes, Lease] "a holder stopped past its lease is told Lost, and its stale write is refused";
        processes::tokens_survive_crashes [Processes] "tokens rise across processes and the crashes of their holders";
        election::one_leads_at_a_time [] "a second candidate is denied, waits, and leads once the leader resigns or is dropped";
        election::observers_see_each_change_once [] "observers see who leads, with token, and each change once and in order";
        election::leading_ends_with_a_loss [] "work that leads is stopped by a loss, and begun again with a higher token";
        election::asked_leaders_are_followed [Revoke] "a leader that is asked leads until it lets go, and observers see it and the next once";
        election::elections_are_apart_from_locks [] "an election and a lock of one name are two; the name of an election's lock is refused";
        election::killed_leaders_are_followed [Processes] "three processes, the leader killed again and again: one leads at a time, and all see who";
        contention::clients_contend [] "a random history of tries, time-outs, cancels, drops and holds has every property";
        contention::processes_contend [Processes] "the same with several processes";
    } };
}

macro_rules! list {
    ($($module:ident :: $name:ident [$($need:ident),*] $doc:literal;)*) => {
        &[$(Case {
            name: stringify!($name),
            doc: $doc,
            needs: &[$(Need::$need),*],
            run: |run| Box::pin($module::$name(run)),
        }),*]
    };
}

/// Every case of the suite.
pub fn cases() -> &'static [Case] {
    CASES
}

static CASES: &[Case] = __for_each_case!([list]);

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The backend does what is required.
    Passed,
    /// The case does not apply, and why.
    Skipped(String),
    /// The backend does not do what is required: what was expected and what happened.
    Failed(String),
}

/// The suite, to be run against one backend.
#[derive(Clone, Debug)]
pub struct Suite {
    harness: Arc<dyn Harness>,
    launch: Option<Launch>,
    seed: Option<u64>,
}

impl Suite {
    /// The suite for the backend that `harness` reaches, without helper processes.
    pub fn new(harness: impl Harness) -> Self {
        Self {
            harness: Arc::new(harness),
            launch: None,
            seed: None,
        }
    }

    /// Says how helper processes are started. Without it the cases with several processes are skipped.
    #[must_use]
    pub fn helpers(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Replays the random choices of a run. Without it they come from the environment variable `LOCKKIT_SEED`, else
    /// they differ each time.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Runs one case on a runtime of its own, blocking the caller's thread.
    ///
    /// A case that fails says little if the [machine](crate::stall) stood still meanwhile, for then leases lapse and
    /// bounds are missed. It runs again, three times in all at most, and stderr has why. Not so when conflicting holds
    /// overlap in the case's history, tokens go back or a secret shows, since no pause explains that.
    pub fn run_case(&self, case: &Case) -> Verdict {
        if let Some(missing) = self.harness.missing() {
            let why = format!("no server for {}: {}", missing.backend, missing.reason);
            return if required(&missing.backend) {
                Verdict::Failed(why)
            } else {
                Verdict::Skipped(why)
            };
        }
        let mut attempts = 1;
        loop {
            let watch = Stopwatch::start();
            match self.attempt(case) {
                Ok(()) => return Verdict::Passed,
                Err(Stop::Skipped(why)) => return Verdict::Skipped(why),
                Err(Stop::Failed(why)) if attempts < ATTEMPTS && watch.stood_still() >= PAUSE => {
                    attempts += 1;
                    let paused = watch.stood_still();
                    say(&format!(
                        "again, since the machine stood still for {paused:?}: {why}"
                    ));
                }
                Err(Stop::Failed(why)) => return Verdict::Failed(why),
                Err(Stop::Broken(why)) if why.contains(BROKEN) => return Verdict::Failed(why),
                Err(Stop::Broken(why)) => return Verdict::Failed(format!("{BROKEN}{why}")),
            }
        }
    }

    /// On a thread of its own, so that this may be called from within a runtime.
    fn attempt(&self, case: &Case) -> Outcome {
        let outcome = std::thread::scope(|scope| scope.spawn(|| self.on_a_runtime(case)).join());
        outcome.unwrap_or_else(|panic| Err(Stop::Failed(format!("panicked: {}", panic_text(&*panic)))))
    }

    /// Runs every case that `wanted` picks, `jobs` at a time, blocking the caller's thread, and calls `each` as they
    /// end. Returns the cases and how they ended, in the order of [`cases`].
    pub fn run(
        &self,
        jobs: usize,
        wanted: impl Fn(&Case) -> bool,
        each: impl Fn(&Case, &Verdict, Duration) + Sync,
    ) -> Report {
        let picked: Vec<_> = cases().iter().filter(|case| wanted(case)).collect();
        let next = AtomicUsize::new(0);
        let worker = || {
            let mut done = Vec::new();
            while let Some((index, case)) = {
                let index = next.fetch_add(1, Ordering::Relaxed);
                picked.get(index).map(|case| (index, *case))
            } {
                let began = Instant::now();
                let verdict = self.run_case(case);
                each(case, &verdict, began.elapsed());
                done.push((index, *case, verdict));
            }
            done
        };
        let mut done: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap_or_default())
                .collect()
        });
        done.sort_by_key(|(index, ..)| *index);
        Report {
            verdicts: done
                .into_iter()
                .map(|(_, case, verdict)| (case, verdict))
                .collect(),
        }
    }

    fn on_a_runtime(&self, case: &Case) -> Outcome {
        let built = runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        let runtime = match built {
            Ok(runtime) => runtime,
            Err(error) => return Err(Stop::Failed(format!("no runtime: {error}"))),
        };
        let seed = self
            .seed
            .or_else(seed_of_the_environment)
            .unwrap_or_else(|| fastrand::u64(..));
        let outcome = runtime.block_on(self.within_limit(*case, seed));
        runtime.shutdown_timeout(Duration::from_secs(1));
        let (backend, name) = (self.harness.as_ref(), case.name);
        let whole = |failure| {
            format!(
                "{name}: {failure}\n  required: {}\n  harness: {backend:?}\n  replay with LOCKKIT_SEED={seed}",
                case.doc
            )
        };
        outcome.map_err(|stop| stop.map_failure(whole))
    }

    async fn within_limit(&self, case: Case, seed: u64) -> Outcome {
        let late = |limit| Stop::Failed(format!("did not end within {limit:?}"));
        let probe = timeout(LIMIT, self.harness.client()).await;
        let probe = probe
            .map_err(|_| late(LIMIT))?
            .map_err(|error| Stop::Failed(format!("no client: {}", chain(&error))))?;
        // On top of what a case does comes what it waits for.
        let deaths = election::rounds().max(MOST_DEATHS);
        let limit = LIMIT * deaths.div_ceil(10)
            + self.harness.freed_after_death(&probe) * deaths
            + asking::time_for_more_rounds(self.harness.ttl());
        let suite = self.clone();
        let task = tokio::spawn(async move { suite.case(&case, seed, probe).await });
        let ended = timeout(limit, task).await.map_err(|_| late(limit))?;
        ended.unwrap_or_else(|join| {
            Err(Stop::Failed(match join.try_into_panic() {
                Ok(panic) => format!("panicked: {}", panic_text(&*panic)),
                Err(join) => join.to_string(),
            }))
        })
    }

    async fn case(&self, case: &Case, seed: u64, probe: LockClient) -> Outcome {
        if let Some(why) = case
            .needs
            .iter()
            .find_map(|need| need.unmet(probe.capabilities(), self))
        {
            return Err(Stop::Skipped(why.to_owned()));
        }
        let run = CaseRun {
            harness: self.harness.clone(),
            launch: self.launch.clone(),
            case: case.name,
            seed,
            run: fastrand::Rng::new().u64(..),
        };
        (case.run)(&run).await
    }
}

/// The results of a run's cases.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The cases, in the order of [`cases`].
    pub verdicts: Vec<(Case, Verdict)>,
}

impl Report {
    /// Returns whether no case failed, and at least one passed.
    pub fn is_ok(&self) -> bool {
        let failed = self.verdicts.iter().any(|(_, v)| matches!(v, Verdict::Failed(_)));
        !failed && self.verdicts.iter().any(|(_, v)| *v == Verdict::Passed)
    }
}

/// One line in total, for the end of a listing.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for (_, verdict) in &self.verdicts {
            match verdict {
                Verdict::Passed => passed += 1,
                Verdict::Skipped(_) => skipped += 1,
                Verdict::Failed(_) => failed += 1,
            }
        }
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs a generated `#[test]`: panics if the case fails, and says on stderr if it is skipped.
#[doc(hidden)]
#[track_caller]
pub fn run_test(harness: impl Harness, module: &str, name: &str) {
    let Some(case) = cases().iter().find(|case| case.name == name) else {
        panic!("there is no case `{name}`");
    };
    let suite = Suite::new(harness).helpers(Launch::test_of(module));
    match suite.run_case(case) {
        Verdict::Passed => {}
        Verdict::Failed(why) => panic!("{why}"),
        Verdict::Skipped(why) => say(&format!("skipped: {module}::{name}: {why}")),
    }
}

/// Past libtest's capture, which hides what a test that passes prints.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn required(backend: &str) -> bool {
    is_in(&std::env::var("LOCKKIT_REQUIRE").unwrap_or_default(), backend)
}

fn is_in(list: &str, backend: &str) -> bool {
    list.split(',')
        .map(str::trim)
        .any(|name| name == backend || name == "all")
}

fn seed_of_the_environment() -> Option<u64> {
    std::env::var("LOCKKIT_SEED").ok()?.trim().parse().ok()
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("with something other than a message")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_required_backend_is_named_or_all_are() {
        assert!(is_in("redis", "redis") && is_in("zk, redis", "redis") && is_in("all", "redis"));
        assert!(!is_in("", "redis") && !is_in("redis2,xredis", "redis"));
    }

    #[test]
    fn every_case_has_its_own_name_and_a_line_about_it() {
        let names: HashSet<_> = cases().iter().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().len());
        assert!(
            cases()
                .iter()
                .all(|case| case.doc.len() >= 20 && !case.doc.ends_with('.'))
        );
    }
}
