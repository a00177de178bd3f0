//! Backends with one fault each: a named case catches it.

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use lockkit_conformance::{Suite, Verdict, cases, helper::Launch};

use crate::{
    plain::{Fault, Plain},
    shelf::{Mutant, Shelf},
};

/// Runs one case against the fault, and returns what it says is wrong.
fn caught(fault: Fault, case: &str) -> String {
    let case = cases().iter().find(|known| known.name == case).unwrap();
    let helpers = ["--exact", "plain::passes::helper_process", "--nocapture"];
    let suite = Suite::new(Plain::with(fault)).helpers(Launch::this_program(helpers).unwrap());
    match suite.run_case(case) {
        Verdict::Failed(why) => why,
        other => panic!("{} does not notice {fault:?}: {other:?}", case.name),
    }
}

macro_rules! caught {
    ($($name:ident: $fault:ident by $($case:ident),+;)*) => {
        $(
            #[test]
            fn $name() {
                $(
                    let why = caught(Fault::$fault, stringify!($case));
                    assert!(why.contains(stringify!($case)) && why.contains("LOCKKIT_SEED="), "{why}");
                )+
            }
        )*
    };
}

caught! {
    granting_twice: GrantsTwice by second_try_is_none, counter_is_never_two, clients_contend;
    repeating_tokens: RepeatsTokens by reacquired_after_release, clients_contend;
    forgetting_to_release: ForgetsToRelease by reacquired_after_release, reacquired_after_drop;
    an_error_as_a_grant: ErrorIsAGrant by counter_is_never_two, clients_contend;
    taken_as_an_error: TakenIsAnError by short_timeout_is_prompt;
    folding_case: FoldsCase by byte_exact_and_injective;
    releasing_for_others: ReleasesForOthers by nothing_is_left_behind;
    reviving_lost_holds: RevivesLostHolds by told_when_broken;
    renewing_for_others: RenewsForOthers by late_renewal_takes_nothing;
    hiding_the_label: HidesTheLabel by inspection_shows_the_holder;
    claiming_to_be_fifo: ClaimsToBeFifo by grants_follow_the_queue;
    denying_its_lease: ClaimsNoLease by hold_without_lease_stays;
    claiming_wake_ups: ClaimsWakeUps by waiter_is_notified;
    never_renewing: NeverRenews by renewal_keeps_the_hold;
    keeping_its_ttl: KeepsItsTtl by ttl_of_a_live_hold;
    leaking_its_secret: LeaksItsSecret by secrets_stay_secret;
    tracing_its_secret: TracesItsSecret by secrets_stay_secret;
    electing_two_leaders: GrantsTwice by one_leads_at_a_time;
    hiding_who_leads: HidesTheLabel by observers_see_each_change_once;
    repeating_tokens_of_leaders: RepeatsTokens by observers_see_each_change_once, killed_leaders_are_followed;
    granting_twice_between_processes: GrantsTwice by second_process_excludes;
    repeating_tokens_between_processes: RepeatsTokens by tokens_survive_crashes, paused_holder_is_told_and_fenced;
    outliving_its_holder: OutlivesItsHolder by killed_holder_lets_a_waiter_in, exit_without_release;
    forgetting_to_release_in_a_process: ForgetsToRelease by second_process_excludes;
}

#[test]
fn a_good_backend_is_not_caught() {
    let wanted = [
        "second_try_is_none",
        "reacquired_after_release",
        "byte_exact_and_injective",
        "told_when_broken",
    ];
    let suite = Suite::new(Plain::default()).seed(7);
    let report = suite.run(2, |case| wanted.contains(&case.name), |_, _, _| {});
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.to_string(), "4 passed, 0 failed, 0 skipped");
}

/// The suite's verdict on a mutant.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    /// This case finds it.
    By(&'static str),
    /// No case does, and why.
    Not(&'static str),
}

use Found::{By, Not};

/// A small backend over a map, broken in one way after the other.
const TABLE: &[(Mutant, Found)] = &[
    (Mutant::Sound, Not("nothing is wrong with it")),
    (Mutant::GrantsTwice, By("second_try_is_none")),
    (
        Mutant::GrantsBeforeTheEnd,
        By("unrenewed_lease_lapses_first_here"),
    ),
    (Mutant::GrantsWhatIsAsked, By("asked_holder_is_waited_for")),
    (Mutant::TakenIsAnError, By("short_timeout_is_prompt")),
    (Mutant::OutageIsTaken, By("outage_is_never_taken")),
    (Mutant::LosesItsGrant, By("lost_grant_is_found_again")),
    (
        Mutant::FindsWithNewTokens,
        Not("nobody has seen the first token, and the second is higher, as on Redlock"),
    ),
    (Mutant::FindsWithoutExtending, By("found_grant_is_proven_anew")),
    (Mutant::ClockAfterAttempt, By("lease_counts_from_the_request")),
    (Mutant::ServerKeepsHalf, By("unrenewed_lease_lapses_first_here")),
    (Mutant::LeaseIsTwice, By("unrenewed_lease_lapses_first_here")),
    (Mutant::WaitsWithoutPatience, By("second_try_is_none")),
    (Mutant::RepeatsTokens, By("reacquired_after_release")),
    (Mutant::ForgetsTokensOfTheFree, By("reacquired_after_release")),
    (Mutant::ForgetsTokensOfTheExpired, By("expired_hold_is_not_shown")),
    (Mutant::BlocksOverlap, By("clients_contend")),
    (Mutant::OneTokenTooMany, By("released_claim_goes_on")),
    (Mutant::NewNamesForgetTheRaise, By("raised_tokens_are_above")),
    (Mutant::UsedNamesForgetTheRaise, By("raised_tokens_are_above")),
    (Mutant::RaisesLower, By("raised_tokens_are_above")),
    (Mutant::RenewsForOthers, By("late_renewal_takes_nothing")),
    (Mutant::RenewsNothing, By("renewal_keeps_the_hold")),
    (Mutant::HeldWhateverIsThere, By("told_when_broken")),
    (Mutant::RevivesTheBroken, By("told_when_broken")),
    (
        Mutant::RevivesTheExpired,
        Not("nobody was granted the lock in between, so no promise is broken"),
    ),
    (Mutant::LostIsAnError, By("late_renewal_takes_nothing")),
    (Mutant::ClockAfterRenewal, By("lease_counts_from_the_request")),
    (Mutant::RenewsTheAsked, By("asked_holder_that_stays_expires")),
    (Mutant::AskedIsLost, By("asked_holder_is_waited_for")),
    (Mutant::KeepsItsTtl, By("ttl_of_a_live_hold")),
    (Mutant::ShortensOnlyHere, By("ttl_of_a_live_hold")),
    (Mutant::ForgetsToRelease, By("reacquired_after_release")),
    (Mutant::ReleasesForOthers, By("late_renewal_takes_nothing")),
    (Mutant::ReleasesWhatWasSeen, By("dropped_after_each_poll")),
    (Mutant::OkThoughGone, By("late_release_is_lost")),
    (Mutant::OkWhileItsLeaseLasts, By("lost_hold_is_not_released")),
    (Mutant::SecondReleaseIsLost, By("released_claim_goes_on")),
    (Mutant::EndsWithItsRelease, By("released_claim_goes_on")),
    (Mutant::HidesTheLabel, By("inspection_shows_the_holder")),
    (Mutant::HidesTheHolder, By("inspection_shows_the_holder")),
    (Mutant::ShowsTheExpired, By("expired_hold_is_not_shown")),
    (Mutant::ShowsTheLastToken, By("inspection_shows_the_holder")),
    (Mutant::ShowsMoreThanIsLeft, By("inspection_shows_the_holder")),
    (
        Mutant::ShowsLocksAsSemaphores,
        Not("it has no semaphores, so nobody looks at one"),
    ),
    (Mutant::ProlongsWhatItShows, By("expired_hold_is_not_shown")),
    (Mutant::ForceIgnoresTheToken, By("revoked_by_token")),
    (
        Mutant::ForceDoesNothing,
        By("saboteur_breaks_an_unprotected_hold"),
    ),
    (Mutant::ForceDenies, By("revoked_by_token")),
    (Mutant::AskingIgnoresTheToken, By("asked_by_token")),
    (Mutant::AskingDoesNothing, By("asked_holder_is_waited_for")),
    (Mutant::AdoptsAndLeavesTheOwner, By("detached_hold_is_adopted")),
    (
        Mutant::AdoptsWhateverTheToken,
        Not("an owner has one hold, so no message has its owner with another token"),
    ),
    (Mutant::AdoptsTheAsked, By("asked_while_detached")),
    (Mutant::AdoptsWithoutExtending, By("adopted_hold_is_proven_anew")),
    (Mutant::OneHoldAClient, By("set_is_all_or_nothing")),
    (Mutant::TakenEndsTheRest, By("set_is_all_or_nothing")),
    (Mutant::LosesReleasesAtOnce, By("set_is_all_or_nothing")),
    (Mutant::FoldsCase, By("byte_exact_and_injective")),
    (Mutant::CutsLongNames, By("byte_exact_and_injective")),
    (Mutant::TrimsNames, By("byte_exact_and_injective")),
    (Mutant::ClaimsToBeFifo, By("grants_follow_the_queue")),
    (Mutant::ClaimsWakeUps, By("waiter_is_notified")),
    (Mutant::ClaimsShared, By("many_readers_or_one_writer")),
    (
        Mutant::HintsAllTheTime,
        Not("a hint may be spurious: the driver bounds what it costs"),
    ),
];

/// Returns what is wrong with each row, of which it takes a few `at_once`, since most of them wait for leases.
pub(crate) fn wrong_rows<Row: Sync>(
    at_once: usize,
    rows: &[Row],
    wrong_row: impl Fn(&Row) -> Option<String> + Sync,
) -> Vec<String> {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = wrong_row(row);
                    wrong.lock().unwrap().extend(found);
                }
            });
        }
    });
    wrong.into_inner().unwrap()
}

fn wrong_row(&(mutant, found): &(Mutant, Found)) -> Option<String> {
    let suite = Suite::new(Shelf::with(mutant));
    match found {
        By(name) => {
            let case = cases().iter().find(|case| case.name == name)?;
            let verdict = suite.run_case(case);
            let is_found = matches!(&verdict, Verdict::Failed(why) if why.contains(name));
            (!is_found).then(|| format!("{name} does not notice {mutant:?}: {verdict:?}"))
        }
        Not(why) => {
            let report = suite.run(24, |_| true, |_, _, _| {});
            (!report.is_ok()).then(|| format!("{mutant:?} is found, although \"{why}\": {report:?}"))
        }
    }
}

#[test]
fn each_mutant_has_its_row() {
    let rows: HashSet<_> = TABLE.iter().map(|(mutant, _)| mutant).collect();
    assert_eq!(rows.len(), TABLE.len());
    let known = |name: &str| cases().iter().any(|case| case.name == name);
    let unknown = TABLE
        .iter()
        .find(|(_, found)| matches!(found, By(name) if !known(name)));
    assert!(unknown.is_none(), "{unknown:?}");
}

#[test]
fn mutants_are_found() {
    let rows = TABLE.iter().copied();
    let found: Vec<_> = rows.filter(|(_, found)| matches!(found, By(_))).collect();
    let wrong = wrong_rows(8, &found, wrong_row);
    assert!(found.len() > 40 && wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_no_case_can_see_is_not_found() {
    let rows = TABLE.iter().copied();
    let unseen: Vec<_> = rows.filter(|(_, found)| matches!(found, Not(_))).collect();
    // Each takes the whole suite.
    let wrong = wrong_rows(2, &unseen, wrong_row);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
