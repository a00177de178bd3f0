//! The algorithm with one mistake at a time, each of which shows.

use lockkit_redlock_simulator::{Config, Mutant, Promise, campaign};

const SCHEDULES: u64 = 20_000;

/// Asserts that the mutant shows this fault in this configuration, in which the algorithm never shows it.
#[track_caller]
fn catches(config: &str, mutant: Mutant, fault: &str) {
    let config = Config::named(config).expect("a configuration of this name");
    // In steps, since most mutants show soon.
    for step in 0..20 {
        let seeds = step * SCHEDULES / 20..(step + 1) * SCHEDULES / 20;
        let findings = campaign(config, Some(mutant), seeds).findings;
        let finding = findings
            .iter()
            .find(|finding| finding.what == fault)
            .expect("a fault of this name");
        assert_eq!(finding.promise, Promise::Never);
        if finding.schedules > 0 {
            return;
        }
    }
    panic!("{mutant:?} survives {SCHEDULES} schedules of {}", config.name);
}

#[test]
fn two_of_five_are_no_quorum() {
    catches("base", Mutant::TwoOfFive, "overlapping holds");
}

#[test]
fn a_lease_does_not_count_from_the_win() {
    catches("late", Mutant::LeaseFromTheWin, "overlapping holds");
}

#[test]
fn clocks_do_not_run_alike() {
    catches("drift", Mutant::NoDriftAllowance, "overlapping holds");
}

#[test]
fn a_release_is_its_owners() {
    catches("base", Mutant::ReleasesAnyone, "overlapping holds");
}

#[test]
fn tokens_need_a_majority() {
    catches("coarse", Mutant::ConfirmsAlone, "duplicate tokens");
    catches("wild-clocks", Mutant::ConfirmsAlone, "tokens reversed");
}

#[test]
fn tokens_that_a_counter_has_passed_are_not_confirmed() {
    catches("coarse", Mutant::ConfirmsAnything, "duplicate tokens");
}

#[test]
fn a_repaired_master_does_not_count_before_the_next_renewal() {
    catches("deleted", Mutant::RepairCounts, "revived holds");
}

#[test]
fn a_repair_carries_the_tokens() {
    catches("spared", Mutant::RepairForgetsTokens, "tokens out of order");
}

#[test]
fn a_vote_for_an_earlier_round_is_void() {
    catches("connections", Mutant::OldVotesCount, "overlapping holds");
    catches("late", Mutant::OldVotesCount, "duplicate tokens");
}

#[test]
fn a_vote_raises_the_counter() {
    catches("wild-clocks", Mutant::VoteRaisesNothing, "duplicate tokens");
}

#[test]
fn a_quarantine_begins_anew_with_each_loss() {
    catches("flushed", Mutant::QuarantineGoesOn, "overlapping holds");
}

/// Before that, a hold may have a bare majority.
#[test]
fn a_hold_is_repaired_before_its_lease_is_due() {
    let config = Config::named("minority").expect("a configuration of this name");
    let overlaps = |mutant| campaign(config, mutant, 0..SCHEDULES).findings[0].schedules;
    let (soon, late) = (overlaps(None), overlaps(Some(Mutant::RepairsLate)));
    assert!(
        soon > 0 && soon * 4 < late,
        "{soon} if it is repaired soon, else {late}"
    );
}

/// On a connection requests are in order, so that rounds cannot be confused.
#[test]
fn a_round_is_told_from_the_others_unless_requests_are_in_order() {
    catches("base", Mutant::RoundsLookAlike, "overlapping holds");
    for config in ["connections", "vanishing", "kept-quarantine"] {
        let config = Config::named(config).expect("a configuration of this name");
        let summary = campaign(config, Some(Mutant::RoundsLookAlike), 0..SCHEDULES / 4);
        for finding in summary.findings {
            assert!(finding.is_as_promised(), "{}: {finding}", config.name);
        }
    }
}

#[test]
fn the_highest_of_the_masters_numbers_is_no_token() {
    catches("base", Mutant::NaiveTokens, "duplicate tokens");
}
