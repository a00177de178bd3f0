//! Handmade schedules, for faults that random ones hardly ever show.

use std::time::Duration;

use lockkit_redis::redlock_quorum::{
    Attempt, AttemptConfig, Beginning, Outcome, QuorumCount, Report, Rules, Step, Vote,
};

use crate::{
    master::{Answer, Bid, Claim, Master, Micros, Mode, Request},
    mutant::Mutant,
};

const TTL: Micros = 160_000;
const PATIENCE: Duration = Duration::from_millis(100);

fn masters(mutant: Option<Mutant>) -> Vec<Master> {
    let mut masters = vec![
        Master {
            life: 1,
            quarantines: true,
            mutant,
            ..Master::default()
        };
        5
    ];
    masters.iter_mut().for_each(Master::mark);
    masters
}

fn at(time: Micros) -> Duration {
    Duration::from_micros(time)
}

/// An attempt that proposes this one token.
fn begin(rules: Rules, began: Micros, token: u64) -> Attempt {
    let began = at(began);
    let config = AttemptConfig {
        rules,
        began: Beginning::new(began, token),
        ttl: at(TTL),
        tokens: 1,
        retry_until: began,
    };
    Attempt::begin(config, began, 0)
}

fn vote(owner: u32, first: u64) -> Request {
    Request::Vote(Bid {
        claim: Claim { owner, round: 1 },
        mode: Mode::Exclusive,
        ttl: TTL,
        tokens: first..=first,
    })
}

fn voted(answer: Answer) -> Vote {
    match answer {
        Answer::Vote(vote) => vote,
        answer => panic!("{answer:?} is no vote"),
    }
}

fn reported(answer: Answer) -> Report {
    match answer {
        Answer::Report(report) => report,
        answer => panic!("{answer:?} is no report"),
    }
}

/// Returns whether two clients hold at once in this schedule.
///
/// The first holds at masters 0, 1 and 2. The other has the votes of 3 and 4, and its request to 2 is late. Master 3 loses its
/// data, and with it that vote. A repair of the first one's, under way meanwhile, reaches it. The first one's renewal reaches
/// all masters but 2. Its lease ends at 2, and there the other's vote arrives.
fn overlaps(mutant: Option<Mutant>) -> bool {
    let rules = Rules::of(5, PATIENCE);
    let mut masters = masters(mutant);
    let (one, tokens) = (Claim { owner: 1, round: 1 }, 1..=1);
    let mut attempt = begin(rules, 0, 1);
    let steps: Vec<Step> = (0..3)
        .map(|master| attempt.voted(at(0), master, voted(masters[master].answer(0, &vote(1, 1)))))
        .collect();
    assert_eq!(steps[2], Step::Won(1..=1));

    // The other begins when the rest of the first one's lease at 2 is shorter than a round may take.
    let began = 90_000;
    let mut other = begin(rules, began, 2);
    for master in [3, 4] {
        let granted = voted(masters[master].answer(began, &vote(2, 2)));
        assert_eq!(granted, Vote::Granted);
        assert_eq!(other.voted(at(began), master, granted), Step::Wait);
    }

    masters[3].data = crate::master::Data::default();
    masters[3].life += 1;
    let bid = Bid {
        claim: one,
        mode: Mode::Exclusive,
        ttl: TTL,
        tokens,
    };
    masters[3].answer(began + 1, &Request::Repair(bid.clone()));

    let renewed = began + 2;
    let mut count = QuorumCount::of_renewal(rules, at(renewed));
    let renewal = Request::Renew(bid);
    for master in [0, 1, 3, 4] {
        let report = reported(masters[master].answer(renewed, &renewal));
        count.reported(master, report);
    }
    let still = matches!(count.tick(count.deadline()), Outcome::Held { .. });

    let late = TTL + 1;
    assert!(at(late) < other.deadline());
    let answer = voted(masters[2].answer(late, &vote(2, 2)));
    assert_eq!(answer, Vote::Granted);
    let won = matches!(other.voted(at(late), 2, answer), Step::Won(_));
    still && won
}

#[test]
fn a_master_without_a_vote_is_not_repaired() {
    assert!(!overlaps(None));
    assert!(overlaps(Some(Mutant::RepairsUnmarked)));
}

/// An owner has a shared key of a round that it lost, and now holds exclusively. Others may share that key, so it does not
/// count for the exclusive hold.
#[test]
fn a_renewal_does_not_count_a_hold_in_the_other_mode() {
    let mut master = masters(None).swap_remove(0);
    for owner in [1, 2] {
        let bid = Bid {
            claim: Claim { owner, round: 1 },
            mode: Mode::Shared,
            ttl: TTL,
            tokens: 1..=1,
        };
        let granted = voted(master.answer(0, &Request::Vote(bid)));
        assert!(matches!(granted, Vote::Granted | Vote::Behind(_)), "{granted:?}");
    }
    let renewal = Request::Renew(Bid {
        claim: Claim { owner: 1, round: 2 },
        mode: Mode::Exclusive,
        ttl: TTL,
        tokens: 2..=2,
    });
    assert_eq!(reported(master.answer(1, &renewal)), Report::Other);
}
