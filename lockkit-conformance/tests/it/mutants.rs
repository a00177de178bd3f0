//! Backends with one fault each: a named case catches it.

use lockkit_conformance::{Suite, Verdict, cases, helper::Launch};

use crate::plain::{Fault, Plain};

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
