//! The [`Desk`] broken in one way after the other, with the case that finds each, or the reason why none does.

use lockkit_conformance::{Suite, Verdict, cases};

use crate::{
    desk::Desk,
    mutants::{Found, wrong_rows},
};

/// A way to break the desk, what is wrong then, and what the suite says to it.
type Row = (Break, &'static str, Found);

macro_rules! breaks {
    ($($name:ident $what:literal $found:ident $by:literal;)*) => {
        /// A way in which the desk is broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Break {
            $(#[doc = $what] $name,)*
        }

        const TABLE: &[Row] = &[$((Break::$name, $what, Found::$found($by)),)*];
    };
}

breaks! {
    // Two holders.
    WriterBesideWriter "a writer is granted beside a writer" By "second_try_is_none";
    WriterBesideItsOwnWriter "a writer is granted beside a writer of its client" By "second_try_is_none";
    WriterBesideReaders "a writer is granted beside readers" By "many_readers_or_one_writer";
    WriterBesideItsOwnReaders "a writer is granted beside readers of its client"
        Not "wherever a writer tries, another client reads, too";
    ReaderBesideWriter "a reader is granted beside a writer" By "many_readers_or_one_writer";
    ReaderBesideItsOwnWriter "a reader is granted beside a writer of its client" By "many_readers_or_one_writer";
    OneReader "a reader keeps other readers out" By "many_readers_or_one_writer";
    OneReaderAClient "a reader keeps other readers of its client out" By "many_readers_or_one_writer";
    KindsAreOne "the semaphore of a name is the lock of that name" By "apart_from_the_lock";

    // Permits.
    OnePermitMore "there is one permit more than the size says" By "drained_permits_come_back";
    OnePermitFewer "there is one permit fewer than the size says" By "apart_from_the_lock";
    OnePermitAClient "a client gets one permit and no more" By "drained_permits_come_back";
    PermitsCountByClient "all permits of a client count as one" By "drained_permits_come_back";
    RepeatTakesAnotherPermit "an attempt that is repeated takes a second permit"
        Not "the attempts that are repeated, and find their grant, are for locks";
    ReleaseKeepsThePermit "a permit that is released stays taken" By "drained_permits_come_back";
    ReleaseEndsTheFirstPermit "a release ends the oldest permit, whoever has it"
        Not "permits are counted after a release; which are left is not looked at";
    AnySizeWillDo "nobody looks at the size" By "two_sizes_are_an_error";
    SizeIsNotNamed "the error of another size does not name the one that is in use" By "two_sizes_are_an_error";
    OtherSizesWait "another size is told that the semaphore is taken" By "two_sizes_are_an_error";
    SizeIsForEver "the first size is the only one for ever"
        Not "no case uses a semaphore with another size once it is free";

    // Tokens.
    TokensStay "the token is always the same" By "reacquired_after_release";
    TokensFall "each token is below the one before" By "reacquired_after_release";
    TokensBeginAtZero "the first token is 0" By "observers_see_each_change_once";
    TokensByClient "each client has a counter of its own" By "reacquired_after_release";
    TokensByMode "each mode has a counter of its own" By "many_readers_or_one_writer";
    ReadersHaveNoToken "the token of every reader is 0" By "readers_and_writers_contend";
    ReadersShareAToken "readers that meet have the same token" By "readers_and_writers_contend";
    PermitsShareAToken "the token of every permit is the same" By "drained_permits_come_back";
    PermitsTokensFall "the token of each permit is below the one before"
        Not "tokens of permits have to differ; of a semaphore of one permit, no two are compared";
    RenewalTakesANewToken "a renewal raises the token at the server" By "detached_hold_is_adopted";

    // Leases.
    WritersLeaseNeverEnds "a writer that is not renewed stays" By "detached_hold_expires";
    ReadersLeaseNeverEnds "a reader that is not renewed stays" By "least_time_outlives_a_dropped_downgrade";
    PermitsLeaseIsHalf "a permit ends when half of its lease is over"
        Not "the leases of permits outlast their cases";
    RenewalIsForEver "a renewal prolongs the hold by far more than its ttl" By "ttl_of_a_live_hold";
    RenewalIsShort "a renewal prolongs the hold by an eighth of its ttl" By "renewed_by_hand";
    RenewalIsAnothers "a renewal of one who has lost it prolongs another's hold" By "late_renewal_takes_nothing";
    RenewalProlongsAll "a renewal prolongs the other readers and permits of the name, too"
        Not "no reader and no permit dies beside one that is renewed";
    RenewalComesBack "a renewal brings back a hold that has ended, beside its successor" By "late_renewal_takes_nothing";
    WriterIsNeverTold "a writer whose hold was ended is told that it holds" By "told_when_broken";
    ReaderIsNeverTold "a reader whose hold was ended is told that it holds"
        Not "no case ends a reader's hold";

    // Releases.
    ReleaseEndsAnothersHold "a release of one who has lost it ends another's hold" By "late_release_is_lost";
    ReleaseEndsAllReaders "a reader that leaves ends all readers" By "many_readers_or_one_writer";
    ReleaseEndsTheFirstReader "a release ends the oldest reader, whoever that is" By "downgraded_holder_reads_with_others";
    ReleaseSaysNothing "a release of a hold that was lost is Ok" By "late_release_is_lost";
    ReleaseWakesNobody "a release gives no hint" By "waiter_is_notified";
    LeavingEndsTheHold "a waiter that gives up ends the hold that it waited for" By "nothing_is_left_behind";
    LeavingKeepsThePlace "a waiter that gives up stays in the queue" By "cancelled_wait_is_prompt";
    LeavingIsGrantedLater "a waiter that has given up is granted the lock when it is free" By "cancelled_wait_is_prompt";

    // Waiting.
    LastComesFirst "who comes last is granted first" By "grants_follow_the_queue";
    LastComesSecond "who comes last is granted after the first that waits" By "grants_follow_the_queue";
    TriesJoinTheQueue "a try leaves a place in the queue" By "nothing_is_left_behind";
    SleepersAreWaitedFor "a waiter that does not ask in its turn keeps all others waiting" By "untaken_grant_lapses";
    PatienceHasNoEnd "an attempt that is refused does not come back" By "short_timeout_is_prompt";
    ReadersPassWriters "readers pass a writer that waits" By "downgrade_overtakes_no_writer";
    ReadersFirst "a writer waits until there was no reader for a second" By "waiting_writer_goes_before_new_readers";
    WritersFirst "a reader waits until there was no writer for a second" By "readers_do_not_starve";

    // What is shown.
    ReadersAreHidden "an inspection shows no readers" By "many_readers_or_one_writer";
    PermitsAreHidden "an inspection shows no permits" By "drained_permits_come_back";
    ReadersTokensAreHidden "an inspection shows readers with the token 0" By "shared_hold_is_adopted";
    HolderIsShownTwice "an inspection shows a holder twice" By "inspection_shows_the_holder";
    SemaphoresAreShownAsLocks "an inspection of a lock shows the semaphore, too" By "apart_from_the_lock";
    MoreIsShownThanIsLeft "more is shown of the lease of readers and permits than is left" By "held_locks_are_listed";
    OnlyWritersHaveLabels "the labels of readers and permits are lost"
        Not "only labels of exclusive holders are looked at";
    UnknownNameIsAnError "an inspection of what nobody has used is an error" By "inspection_shows_the_holder";
    WaitersAreNotCounted "an inspection shows that nobody waits" By "grants_follow_the_queue";
    HoldersAreWaiters "holders are counted with the waiters" By "held_locks_are_listed";

    // Lists.
    SemaphoresAreNotListed "a list leaves out semaphores" By "held_locks_are_listed";
    FreeLocksAreListed "a list shows what was held before" By "held_locks_are_listed";
    PagesOverlap "each page begins with the last lock of the page before" By "lists_refuse_nobody";
    PagesHaveGaps "a lock between two pages is left out" By "lists_refuse_nobody";
    LongNamesAreNotListed "a list leaves out names above 255 bytes" By "list_prefix_is_literal";
    PrefixFoldsCase "the case of a prefix does not count" By "list_prefix_is_literal";
    PrefixIsAnywhere "a list shows the names that have the prefix anywhere"
        Not "all names begin with that of their run, and so do the prefixes";

    // Names.
    SlashesAreTrimmed "slashes at either end of a name do not count" By "byte_exact_and_injective";
    DoubleSlashesAreOne "two slashes are one" By "byte_exact_and_injective";
    BackslashesAreSlashes "a backslash is a slash" By "byte_exact_and_injective";
    PercentsAreDecoded "%2F is a slash" By "byte_exact_and_injective";
    AccentsAreComposed "names are the same in Unicode's composed form" By "byte_exact_and_injective";
    NamesEndAtNul "a name ends before its first NUL"
        Not "the one name with a NUL has it at its end, and the rest is no other's name";
    SemaphoresFoldCase "the case of a semaphore's name does not count"
        Not "odd names are those of locks";
    SemaphoresAreOtherLocks "the semaphore `a` is the lock `a#permits`"
        Not "nobody can guess the name";

    // By force, and at the end.
    ForceEndsAllReaders "to end one reader by force ends all"
        Not "no case ends a reader's hold";
    ForceSparesPermits "to end a permit by force does nothing, and says that it did"
        Not "no case ends a permit by force";
    ForceWakesNobody "to end a hold by force gives waiters no hint"
        Not "a waiter asks again in any case";
    ClosingEndsOthersHolds "a client that is closed ends whoever holds what it has held"
        Not "when a client is closed, nobody else holds what it has held";
    ClosingIsAnError "closing a client is an error" By "closed_client_refuses";

    // From one to another.
    HoldEndsWithItsClaim "a claim that is dropped ends its hold, also once it is detached" By "detached_hold_is_adopted";
    AnyTokenIsAdopted "whoever knows the token adopts the hold, from whomever" By "detached_hold_is_adopted";
    ReadersAreNotAdopted "the hold of a reader is not adopted" By "shared_hold_is_adopted";
    AdoptedReaderIsAWriter "a reader that is adopted keeps other readers out"
        Not "nobody tries to read beside it";
    AdoptedPermitIsAnother "a permit that is adopted is taken a second time" By "permit_is_adopted";
    DowngradeHasAGap "a downgrade is a release, and a grant 20 ms later" By "nobody_writes_in_a_downgrade";
    DowngradeDoesNothing "a downgrade leaves the hold exclusive" By "downgraded_holder_reads_with_others";
    DowngradeTakesANewToken "a downgrade raises the token at the server" By "downgraded_holder_reads_with_others";
    DowngradeComesBack "a downgrade brings back a hold that has ended" By "downgrade_revives_no_lost_hold";
    DowngradeWakesNobody "a downgrade gives waiting readers no hint"
        Not "they ask again in any case";
    DowngradeCountsFromItsReply "the lease of a downgrade counts from when its reply has come"
        Not "only grants and renewals have their replies come late";

    // What it says that it can do.
    LeaseIsDenied "it has leases, and says that it has none" By "hold_without_lease_stays";
    ForceIsDenied "it ends holds by force, and says that it cannot" By "force_is_unsupported";
    ListIsDenied "it lists, and says that it cannot" By "list_is_unsupported";
    AskingIsClaimed "it says that it can ask a holder, and cannot" By "asked_holder_is_waited_for";
    RaisingIsClaimed "it says that it can raise tokens, and cannot" By "raised_tokens_are_above";
}

/// Returns what fails of the whole suite for a desk that is broken so, with the reasons.
fn seen(breaks: &[Break]) -> Vec<String> {
    let report = Suite::new(Desk::with(breaks)).run(16, |_| true, |_, _, _| {});
    let none_applies = report.verdicts.iter().all(|(_, v)| *v != Verdict::Passed);
    let failed = report
        .verdicts
        .into_iter()
        .filter_map(|(_, verdict)| match verdict {
            Verdict::Failed(why) => Some(why),
            Verdict::Passed | Verdict::Skipped(_) => None,
        });
    failed
        .chain(none_applies.then(|| "no case applies".to_owned()))
        .collect()
}

fn not_found((flaw, what, found): &Row) -> Option<String> {
    let Found::By(name) = found else { return None };
    let Some(case) = cases().iter().find(|case| case.name == *name) else {
        return Some(format!("there is no case {name}"));
    };
    match Suite::new(Desk::with(&[*flaw])).run_case(case) {
        Verdict::Failed(why) if why.contains(*name) => None,
        other => Some(format!(
            "{flaw:?}, {what}: {name} does not notice it: {other:?}. Of all cases, these do: {:?}",
            seen(&[*flaw])
        )),
    }
}

#[test]
fn the_intact_desk_passes() {
    let failed = seen(&[]);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn each_break_is_found_by_its_case() {
    let by_a_case = |(_, _, found): &&Row| matches!(found, Found::By(_));
    assert!(TABLE.iter().filter(by_a_case).count() > 70);
    // Most of them wait. A case takes ten seconds to say that something never comes.
    let wrong = wrong_rows(24, TABLE, not_found);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// All at once, since each takes the whole suite: they have nothing to do with each other. A row that fails here has found its case.
#[test]
fn no_case_sees_the_other_breaks() {
    let rows = TABLE
        .iter()
        .filter(|(_, _, found)| matches!(found, Found::Not(_)));
    let unseen: Vec<_> = rows.map(|(flaw, ..)| *flaw).collect();
    let found = seen(&unseen);
    if found.is_empty() {
        return;
    }
    // Which is it?
    let single = wrong_rows(4, &unseen, |flaw| Some(format!("{flaw:?}: {:?}", seen(&[*flaw]))));
    panic!(
        "together they are found by {found:?}; one by one:\n{}",
        single.join("\n")
    );
}
