//! Bad histories, each of which has to be found, beside the good ones that they differ from in one thing.

use std::num::NonZeroU32;

use lockkit_history_judge::History;

use super::*;
use crate::{
    history::Acquisition,
    stall::Stopwatch,
    torture::{ClientPlan, Strike, record::Said},
};

const SECOND: Nanos = 1_000_000_000;

fn story(records: Vec<Record>) -> Story {
    let dead = [(1_000, (Duration::from_secs(2), Duration::from_secs(2)))];
    let client = |id| ClientPlan {
        id,
        process: 0,
        fate: None,
    };
    let mut story = Story {
        records,
        ..Story::default()
    };
    story.schedule.clients = (0..10).map(client).collect();
    story.bounds = Bounds {
        dead: dead.into(),
        fallback_poll: Duration::from_secs(1),
        fifo: true,
        lease: true,
        splits: false,
        shows_late: false,
    };
    story
}

/// A hold of client `who` in seconds: asked for, granted, given back.
fn hold(who: u32, mode: Mode, asked: f64, granted: f64, released: f64, token: u64) -> Record {
    let mut acquisition = Acquisition::asked("a", mode, u64::from(who), at(asked));
    acquisition.granted = Some((at(granted), token));
    acquisition.until = Some(at(released) - 1);
    acquisition.released = Some(at(released));
    Record {
        process: 0,
        client: who,
        ttl: 1_000,
        handoffs: Some(0),
        asked: Asked::Waited,
        fared: Fared::Granted,
        over: Over::Released,
        lenient: false,
        ttl_now: 1_000,
        renew: true,
        max_hold: None,
        loss: Loss::Not,
        kept: None,
        downgraded: None,
        shared: None,
        detached: None,
        adopts: None,
        place: (0, 1),
        acquisition,
        error: String::new(),
    }
}

fn refused(who: u32, asked: Asked, from: f64, to: f64) -> Record {
    let mut record = hold(who, Mode::Exclusive, from, to, to, 0);
    record.acquisition.granted = None;
    record.acquisition.until = None;
    record.acquisition.released = None;
    record.acquisition.gave_up = Some(at(to));
    (record.asked, record.fared, record.over) = (asked, Fared::Taken, Over::Not);
    record
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and positive"
)]
fn at(seconds: f64) -> Nanos {
    // Times before the beginning must fit.
    ((seconds + 100.0) * 1e9) as Nanos
}

fn found(story: &Story) -> Vec<Law> {
    let findings = judge(story, &mut Highest::default());
    // The second judge does not know what a hold has to spare.
    let is_bare = |struck: &Struck| struck.fault.is_some_and(|fault| fault.bare.is_some());
    if !story.struck.iter().any(is_bare) {
        assert_eq!(second_opinion(story, &findings), None);
    }
    findings.into_iter().map(|finding| finding.law).collect()
}

/// What a judge that has the text alone says, unless it comes to the same result.
fn second_opinion(story: &Story, findings: &[Finding]) -> Option<String> {
    let text = story.chronicle(findings);
    let history: History = text.parse().unwrap_or_else(|error| panic!("{error}"));
    let mut verdicts = lockkit_history_judge::judge(&history).into_iter();
    let differs = verdicts.find(|verdict| !verdict.agrees())?;
    Some(format!("{differs:?}\nbut {findings:?}\n{text}"))
}

fn struck(fault: Fault, from: f64, to: f64) -> Struck {
    Struck {
        fault: Some(fault),
        from: at(from),
        to: at(to),
    }
}

const X: Mode = Mode::Exclusive;

#[test]
fn a_good_history_is_acquitted() {
    let records = vec![
        hold(0, X, 0.0, 0.0, 1.0, 1),
        hold(1, Mode::Shared, 0.1, 1.01, 2.0, 2),
        hold(2, Mode::Shared, 0.2, 1.01, 3.0, 3),
        hold(3, X, 1.5, 3.01, 4.0, 5),
        refused(4, Asked::Tried, 3.5, 3.6),
    ];
    assert_eq!(found(&story(records)), []);
}

#[test]
fn two_inside_are_found_and_excused_until_told() {
    let records = || vec![hold(0, X, 0.0, 0.0, 1.0, 1), hold(1, X, 0.1, 0.9, 2.0, 2)];
    assert_eq!(found(&story(records())), [Law::Exclusion]);
    let mut readers = records();
    readers[1].acquisition.mode = Mode::Shared;
    assert_eq!(found(&story(readers)), [Law::Exclusion]);

    // A third of a second after the fault at the latest.
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    let mut excused = story(records());
    excused.records[0].over = Over::Lost;
    excused.struck = vec![struck(fault, 0.8, 0.8)];
    assert_eq!(found(&excused), []);
    excused.struck = vec![struck(fault, 0.5, 0.5)];
    assert_eq!(found(&excused), [Law::Exclusion], "it ought to have been told");
    excused.struck = vec![struck(fault, 0.95, 0.95)];
    assert_eq!(found(&excused), [Law::Exclusion], "the fault came after");
    excused.struck = vec![struck(Fault::new("pause"), 0.8, 0.8)];
    assert_eq!(found(&excused), [Law::Exclusion], "this fault excuses nothing");
    excused.breaks = vec![("a".to_owned(), at(0.85), at(0.86))];
    assert_eq!(found(&excused), []);
    excused.breaks = vec![("b".to_owned(), at(0.85), at(0.86))];
    assert_eq!(found(&excused), [Law::Exclusion], "of another lock");

    // The one that returns later was granted first, and dropped before it returned.
    let mut late = story(records());
    late.records[0].acquisition.granted = Some((at(0.5), 2));
    late.records[1].acquisition.granted = Some((at(0.9), 1));
    late.records[1].acquisition.until = Some(at(0.95));
    late.records[1].over = Over::Lost;
    assert_eq!(found(&late), [Law::Exclusion]);
    late.struck = vec![struck(fault, 0.45, 0.7)];
    assert_eq!(found(&late), []);
    late.struck = vec![struck(fault, 0.45, 0.48)];
    assert_eq!(found(&late), [Law::Exclusion], "it ought to have been told");
    late.struck = vec![struck(fault, 0.55, 0.6)];
    assert_eq!(found(&late), [Law::Exclusion], "the other was in before");
    let slow = Fault::new("slow").excuses_overlap(Told::Within(Duration::from_secs(1)));
    late.struck = vec![struck(slow, 0.45, 0.48)];
    assert_eq!(found(&late), []);
    late.records[0].acquisition.granted = Some((at(0.5), 1));
    late.records[1].acquisition.granted = Some((at(0.9), 2));
    late.records[0].acquisition.asked = at(0.49);
    assert_eq!(found(&late)[0], Law::Exclusion, "it was granted later");
}

#[test]
fn a_grant_is_excused_by_what_happened_on_its_way() {
    let fault = Fault::new("clock").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    let mut late = story(vec![hold(0, X, 0.0, 1.6, 1.8, 1), hold(1, X, 1.0, 1.7, 2.0, 2)]);
    assert_eq!(found(&late), [Law::Exclusion]);
    late.records[0].over = Over::Lost;
    late.struck = vec![struck(fault, 1.5, 1.5)];
    assert_eq!(found(&late), [], "the answer came after it");
    late.struck = vec![struck(fault, 0.5, 0.5)];
    assert_eq!(
        found(&late),
        [Law::Exclusion],
        "no answer takes longer than a lease"
    );
    late.struck = vec![struck(fault, 1.5, 1.5)];
    late.records[0].acquisition.asked = at(1.55);
    assert_eq!(found(&late), [Law::Exclusion], "it was asked for after it");
}

#[test]
fn two_inside_are_excused_where_the_older_had_nothing_to_spare() {
    let told = Told::AtRenewal(Duration::ZERO);
    let delete = Fault::new("delete").excuses_overlap_of_bare(told, Duration::from_millis(50));
    let overlap = |granted: f64| {
        let mut records = vec![
            hold(0, X, 1.0, 1.1, 1.4, 1),
            hold(1, X, 1.05, granted, 2.0, 2),
            // Which has something to spare.
            hold(2, X, 3.0, 3.0, 3.1, 3),
        ];
        records[0].over = Over::Lost;
        let mut story = story(records);
        story.struck = vec![struck(delete, 1.09, 1.3)];
        story
    };
    assert_eq!(found(&overlap(1.12)), [], "just won from another");
    assert_eq!(found(&overlap(1.2)), [Law::Exclusion], "repaired by then");
    let mut alone = overlap(1.12);
    alone.records[1].acquisition.asked = at(1.11);
    assert_eq!(found(&alone), [Law::Exclusion], "nobody contended for it");
    for record in &mut alone.records {
        record.acquisition.granted = record.acquisition.granted.map(|(at, token)| (at, token + 1));
    }
    alone.records.insert(0, hold(4, X, 0.5, 0.5, 0.97, 1));
    assert_eq!(found(&alone), [], "a release was on its way to some");
    alone.records[0] = hold(4, X, 0.5, 0.5, 0.9, 1);
    assert_eq!(found(&alone), [Law::Exclusion], "all knew of the release");
    let mut late = overlap(1.12);
    late.records[0].acquisition.until = Some(at(1.9));
    late.records[0].acquisition.released = Some(at(1.9));
    assert_eq!(found(&late), [Law::Exclusion], "it ought to have been told");
    let mut beside = overlap(1.2);
    beside.struck.push(struck(Fault::new("pause"), 1.0, 1.15));
    assert_eq!(found(&beside), [], "one of the others stood still");
    // Its renewals tell it nothing.
    beside.records[0].acquisition.until = Some(at(1.9));
    beside.records[0].acquisition.released = Some(at(1.9));
    assert_eq!(found(&beside), [], "its lease was not over");
    beside.records[0].acquisition.until = Some(at(2.5));
    beside.records[0].acquisition.released = Some(at(2.5));
    assert_eq!(found(&beside), [Law::Exclusion], "its lease was over");
    let mut beside = overlap(1.2);
    beside.struck.push(struck(Fault::new("pause"), 1.4, 1.5));
    assert_eq!(found(&beside), [Law::Exclusion], "it stood still later");
    // One that died with what it had taken.
    let mut dead = overlap(1.2);
    let mut contender = refused(3, Asked::Waited, 1.0, 1.1);
    (contender.process, contender.fared) = (1, Fared::Pending);
    contender.acquisition.gave_up = None;
    dead.records.push(contender);
    assert_eq!(found(&dead), [Law::Exclusion], "it lives, and gave way");
    dead.pauses = vec![Pause {
        process: 1,
        from: at(1.08),
        to: None,
    }];
    assert_eq!(found(&dead), []);
}

#[test]
fn more_permits_than_there_are_are_found() {
    let two = Mode::Permits(NonZeroU32::new(2).unwrap());
    let mut records = vec![hold(0, two, 0.0, 0.0, 1.0, 1), hold(1, two, 0.0, 0.1, 1.0, 2)];
    assert_eq!(found(&story(records.clone())), []);
    records.push(hold(2, two, 0.47, 0.5, 1.0, 3));
    assert_eq!(found(&story(records.clone())), [Law::Exclusion]);
    let fault = Fault::new("empty").excuses_overlap(Told::Within(Duration::from_millis(600)));
    let mut excused = story(records);
    // The second does not know yet, and makes room for one.
    excused.struck = vec![struck(fault, 0.45, 0.45)];
    excused.records[0].acquisition.until = Some(at(3.0));
    excused.records[0].over = Over::Lost;
    assert_eq!(found(&excused), []);
    excused.records.push(hold(3, two, 0.5, 0.6, 1.0, 4));
    assert_eq!(found(&excused), [Law::Exclusion], "and not for two");
}

fn of(size: u32) -> Mode {
    Mode::Permits(NonZeroU32::new(size).unwrap())
}

#[test]
fn two_sizes_at_once_are_found() {
    let beside = |size| {
        vec![
            hold(0, of(5), 0.0, 0.0, 1.0, 1),
            hold(1, of(size), 0.0, 0.1, 1.0, 2),
        ]
    };
    assert_eq!(found(&story(beside(5))), []);
    assert_eq!(found(&story(beside(3))), [Law::Exclusion]);
    assert_eq!(found(&story(beside(1))), [Law::Exclusion]);
    let after = vec![hold(0, of(5), 0.0, 0.0, 1.0, 1), hold(1, of(3), 0.0, 1.1, 2.0, 2)];
    assert_eq!(found(&story(after)), [], "the size changed when nobody held");
    let fault = Fault::new("empty").excuses_overlap(Told::Within(Duration::from_secs(2)));
    let mut excused = story(beside(3));
    excused.records[0].over = Over::Lost;
    excused.struck = vec![struck(fault, 0.05, 0.05)];
    assert_eq!(found(&excused), []);
}

#[test]
fn who_is_refused_a_size_that_nobody_gave_is_found() {
    let told = |size: u32, asked: f64| {
        let mut record = refused(1, Asked::Tried, asked, asked + 0.1);
        (record.acquisition.mode, record.fared) = (of(3), Fared::OtherSize);
        "another size".clone_into(&mut record.error);
        story(vec![hold(0, of(size), 0.0, 0.0, 1.0, 1), record])
    };
    assert_eq!(found(&told(5, 0.5)), [], "another holds");
    assert_eq!(found(&told(5, 4.9)), [], "it may look as if one did");
    assert_eq!(found(&told(5, 5.1)), [Law::Answer]);
    assert_eq!(found(&told(3, 0.5)), [Law::Answer], "of the same size");
    let mut struck_by = told(5, 5.1);
    struck_by.struck = vec![struck(Fault::new("pause"), 5.0, 5.05)];
    assert_eq!(found(&struck_by), []);
}

#[test]
fn who_waits_beside_another_size_is_kept_out_by_it() {
    let beside = |size: u32| {
        let mut waits = refused(1, Asked::Waited, 0.0, 20.0);
        waits.acquisition.mode = of(3);
        story(vec![hold(0, of(size), 0.0, 0.0, 20.0, 1), waits])
    };
    assert_eq!(found(&beside(5)), []);
    assert_eq!(found(&beside(3)), [Law::Liveness], "two of three were free");
}

#[test]
fn tokens_that_go_back_or_repeat_are_found() {
    let records = |token| vec![hold(0, X, 0.0, 0.0, 1.0, 7), hold(1, X, 0.1, 1.1, 2.0, token)];
    assert_eq!(found(&story(records(8))), []);
    assert_eq!(found(&story(records(6))), [Law::Tokens]);
    assert_eq!(found(&story(records(7))), [Law::Tokens]);
    let mut excused = story(records(6));
    excused.struck = vec![struck(Fault::new("lost").restarts_tokens(), 1.0, 1.0)];
    assert_eq!(found(&excused), [Law::Tokens], "it is not the clock's");
    // The first had outrun the clock by a second and more.
    let clock = |seconds: f64| at(seconds) / 1_000;
    excused.records[0].acquisition.granted = Some((at(0.0), clock(2.5)));
    excused.records[1].acquisition.granted = Some((at(1.1), clock(1.05)));
    assert_eq!(found(&excused), []);
    let mut highest = Highest::default();
    judge(&excused, &mut highest);
    let later = vec![hold(2, X, 2.1, 2.1, 2.2, clock(2.1))];
    assert_eq!(
        judge(&story(later), &mut highest).len(),
        0,
        "nor does it count later"
    );
    excused.struck[0].from = at(1.2);
    assert_eq!(found(&excused), [Law::Tokens], "it was granted before");

    let mut dropped = story(records(6));
    dropped.records[1].over = Over::Lost;
    dropped.breaks = vec![("a".to_owned(), at(0.9), at(0.9))];
    assert_eq!(
        found(&dropped),
        [],
        "its grant was on the way when its hold was ended"
    );
    dropped.records[1].over = Over::Released;
    assert_eq!(
        found(&dropped),
        [Law::Fencing],
        "which its release must have said"
    );
    // It was passed on to a waiter of its client, and no server asked.
    let mut passed_on = dropped.clone();
    passed_on.records.push(hold(1, X, 0.5, 2.1, 2.2, 7));
    passed_on.records[2].over = Over::Lost;
    passed_on.records[0].acquisition.granted = Some((at(0.0), 8));
    assert_eq!(found(&passed_on), []);
    passed_on.records[2].client = 2;
    assert_eq!(found(&passed_on), [Law::Fencing], "to a waiter of another client");
    dropped.breaks = vec![("a".to_owned(), at(1.2), at(1.2))];
    assert_eq!(found(&dropped), [Law::Tokens]);

    // From one epoch to the next.
    let mut highest = Highest::default();
    assert_eq!(judge(&story(records(8)), &mut highest), []);
    let next = judge(&story(vec![hold(2, X, 9.0, 9.0, 9.5, 8)]), &mut highest);
    assert_eq!(next[0].law, Law::Tokens);
}

#[test]
fn a_zombies_higher_token_is_found() {
    let mut zombie = hold(0, X, 0.0, 0.5, 1.0, 9);
    (zombie.over, zombie.acquisition.lost) = (Over::Lost, Some(at(1.0)));
    let mut excused = story(vec![hold(1, X, 0.1, 0.4, 2.0, 8), zombie]);
    let fault = Fault::new("session").excuses_overlap(Told::Within(Duration::from_secs(3)));
    excused.struck = vec![struck(fault, 0.3, 0.6)];
    assert_eq!(found(&excused), [Law::Fencing]);
    excused.struck = vec![struck(fault.lasting(), 0.3, 0.6)];
    assert_eq!(found(&excused), [], "each is right where it is");
    excused.struck = vec![struck(fault, 0.3, 0.6)];
    excused.records[1].over = Over::Released;
    assert_eq!(
        found(&excused),
        [Law::Fencing],
        "both releases were confirmed, and only one of them held"
    );
    excused.records[0].over = Over::Lost;
    assert_eq!(found(&excused), [], "the older one was told");
    excused.records[0].over = Over::Released;
    excused.records[1].over = Over::Lost;
    excused.records[1].acquisition.granted = Some((at(0.5), 7));
    assert_eq!(found(&excused), []);
}

/// A release that passes a hold on asks no server, and so does not say that the server had dropped it.
#[test]
fn a_dropped_hold_that_was_passed_on_was_not_confirmed() {
    let dropped = hold(1, X, 0.1, 0.1, 1.0, 8);
    let mut heir = hold(1, X, 0.2, 1.0, 1.1, 9);
    heir.over = Over::Lost;
    let mut passed_on = story(vec![dropped, hold(0, X, 0.0, 0.5, 2.0, 10), heir]);
    let fault = Fault::new("reset").excuses_overlap(Told::Within(Duration::from_secs(3)));
    passed_on.struck = vec![struck(fault, 0.3, 0.6)];
    assert_eq!(found(&passed_on), []);
    passed_on.records[2].client = 2;
    assert_eq!(found(&passed_on), [Law::Fencing], "to a waiter of another client");
    passed_on.records[2].client = 1;
    passed_on.struck.clear();
    assert_eq!(found(&passed_on), [Law::Exclusion], "there was no fault");
}

#[test]
fn a_lock_left_free_under_a_waiter_is_found() {
    let records = |granted| {
        vec![
            hold(0, X, 0.0, 0.0, 1.0, 1),
            hold(1, X, 0.5, granted, granted + 1.0, 2),
        ]
    };
    assert_eq!(
        found(&story(records(5.0))),
        [],
        "within the fallback poll and three seconds"
    );
    assert_eq!(found(&story(records(7.0))), [Law::Liveness]);
    let mut dead = story(records(7.0));
    dead.records[0].over = Over::Lost;
    assert_eq!(found(&dead), [], "the server may not have known");
    let mut late = story(records(7.0));
    late.struck = vec![struck(Fault::new("pause"), 3.0, 4.0)];
    assert_eq!(
        found(&late),
        [],
        "nobody could be granted anything until six seconds"
    );
    let mut stopped = story(records(7.0));
    stopped.pauses = vec![Pause {
        process: 0,
        from: at(1.0),
        to: Some(at(6.0)),
    }];
    assert_eq!(found(&stopped), [], "the waiter itself stood still");
}

#[test]
fn a_dead_writer_in_the_way_of_readers_is_found() {
    let mut writer = refused(1, Asked::Waited, 1.0, 1.5);
    (writer.process, writer.fared) = (1, Fared::Pending);
    writer.acquisition.gave_up = None;
    let mut reader = hold(2, Mode::Shared, 2.0, 20.0, 20.1, 3);
    let readers = hold(0, Mode::Shared, 0.0, 0.0, 19.9, 1);
    let mut story = story(vec![readers, writer, reader.clone()]);
    story.schedule.strikes.push(Strike {
        at: 0,
        fault: super::super::KILL.to_owned(),
        place: 1,
        lasts: 1,
    });
    story.pauses = vec![Pause {
        process: 1,
        from: at(1.5),
        to: None,
    }];
    assert_eq!(found(&story), [Law::Liveness]);
    reader.acquisition.granted = Some((at(7.0), 3));
    story.records[2] = reader;
    assert_eq!(found(&story), []);
}

#[test]
fn an_answer_that_cannot_be_is_found() {
    let records = |from| {
        vec![
            hold(0, X, 0.0, 0.0, 1.0, 1),
            refused(1, Asked::Tried, from, from + 0.01),
        ]
    };
    assert_eq!(found(&story(records(3.5))), []);
    assert_eq!(found(&story(records(5.0))), [Law::Answer]);
    let mut polled = story(records(5.0));
    polled.bounds.fallback_poll = Duration::from_mins(1);
    assert_eq!(
        found(&polled),
        [Law::Answer],
        "whoever tries does not wait for a poll"
    );
    let mut behind = story(records(5.0));
    behind.records.push(refused(2, Asked::Waited, 0.5, 5.5));
    assert_eq!(found(&behind), [], "somebody waits, and may look again by itself");
    let mut slow = story(records(5.0));
    slow.records[1].acquisition.gave_up = Some(at(6.0));
    slow.records.push(hold(2, X, 5.5, 5.8, 6.0, 2));
    assert_eq!(
        found(&slow),
        [],
        "it was taken when the answer was given, perhaps"
    );
    slow.records[2] = hold(2, X, 6.2, 6.2, 6.3, 2);
    assert_eq!(found(&slow), [Law::Answer]);
}

#[test]
fn who_lost_its_runtime_excuses_only_what_it_had() {
    let mut dropped = hold(0, X, 0.0, 0.0, 1.0, 1);
    dropped.over = Over::Dropped;
    let tried = refused(1, Asked::Tried, 6.5, 6.6);
    let mut story = story(vec![dropped, tried]);
    story.bounds.dead = [(1_000, (Duration::from_secs(5), Duration::from_secs(2)))].into();
    assert_eq!(found(&story), [Law::Answer], "the worker has released it");
    let gone = |story: &mut Story, client: usize, moment: f64| {
        for plan in &mut story.schedule.clients {
            plan.fate = None;
        }
        story.schedule.clients[client].fate = Some((0, Fate::Runtime));
        story.gone = [(story.schedule.clients[client].id, vec![at(moment)])].into();
    };
    gone(&mut story, 0, 1.5);
    assert_eq!(found(&story), [], "its lease ends it");
    gone(&mut story, 0, 4.0);
    assert_eq!(found(&story), [Law::Answer], "that was later");
    gone(&mut story, 2, 1.5);
    assert_eq!(found(&story), [Law::Answer], "that was another client");
    story.gone.clear();
    let away = |from: f64, to: f64| Pause {
        process: 0,
        from: at(from),
        to: Some(at(to)),
    };
    story.records[1].process = 1;
    story.pauses = vec![away(1.1, 1.2)];
    assert_eq!(found(&story), []);
    story.records[0].process = 2;
    assert_eq!(found(&story), [Law::Answer], "that was another process");
}

#[test]
fn a_try_behind_a_stopped_writer_is_found() {
    let mut writer = hold(1, X, 1.0, 29.1, 29.2, 2);
    writer.process = 1;
    let mut reader = refused(2, Asked::Tried, 20.0, 20.01);
    reader.acquisition.mode = Mode::Shared;
    let mut story = story(vec![hold(0, Mode::Shared, 0.0, 0.0, 3.0, 1), writer, reader]);
    story.schedule.strikes.push(Strike {
        at: 0,
        fault: super::super::STOP.to_owned(),
        place: 1,
        lasts: 1,
    });
    story.pauses = vec![Pause {
        process: 1,
        from: at(1.5),
        to: Some(at(29.0)),
    }];
    assert_eq!(found(&story), [Law::Answer]);
    story.pauses[0].from = at(14.0);
    assert_eq!(
        found(&story),
        [],
        "its place is its own until it is known to be dead"
    );
    story.pauses[0].from = at(1.5);
    story.pauses[0].to = Some(at(19.9));
    assert_eq!(found(&story), [], "the writer went on, and waits again");
    story.pauses.push(Pause {
        process: 1,
        from: at(3.0),
        to: None,
    });
    assert_eq!(found(&story), [Law::Answer], "it was killed meanwhile");
}

#[test]
fn who_overtakes_is_found() {
    let try_of = |who, asked, answered, token| {
        let mut tried = hold(who, X, asked, answered, answered, token);
        tried.acquisition.lock = "b".to_owned();
        tried.acquisition.who += 100;
        tried.asked = Asked::Tried;
        tried
    };
    let records = |second| {
        vec![
            hold(0, X, 0.0, 0.0, 4.0, 1),
            hold(1, X, 0.5, 5.0, 5.5, 3),
            hold(2, X, second, 4.1, 4.9, 2),
            try_of(1, 0.6, 0.7, 1),
        ]
    };
    assert_eq!(found(&story(records(1.8))), [Law::Order]);
    let mut unheard = story(records(1.8));
    unheard.records.truncate(3);
    assert_eq!(
        found(&unheard),
        [],
        "its request may be under way for two seconds more"
    );
    unheard.records.push(try_of(1, 0.6, 1.9, 2));
    assert_eq!(found(&unheard), [], "it was heard of when the other had asked");
    unheard.records.push(try_of(1, 0.4, 0.6, 1));
    assert_eq!(found(&unheard), [], "that was before it asked");
    unheard.records = records(3.6);
    unheard.records.truncate(3);
    assert_eq!(found(&unheard), [Law::Order], "it has asked again by then");
    assert_eq!(found(&story(records(0.4))), []);
    assert_eq!(
        found(&story(records(1.4))),
        [],
        "it may have come to the queue first"
    );
    let mut handing_on = story(records(1.8));
    handing_on.records[0].handoffs = Some(32);
    assert_eq!(found(&handing_on), [], "hand-offs within a client come first");
    let mut excused = story(records(1.8));
    excused.struck = vec![struck(Fault::new("cut"), 2.2, 2.3)];
    assert_eq!(found(&excused), []);
    let reset = Fault::new("reset").keeps_order();
    excused.struck = vec![struck(reset, 1.6, 1.7)];
    assert_eq!(found(&excused), [Law::Order]);
    excused.struck = vec![struck(reset, 3.7, 3.8)];
    assert_eq!(found(&excused), [], "it was passed over while it was away");
    excused.struck = vec![struck(reset, 1.6, 2.9)];
    assert_eq!(found(&excused), [], "it had not tried to connect again");
    let short = |until| reset.keeps_order_until(Duration::from_millis(until));
    excused.struck = vec![struck(short(110), 1.6, 1.7)];
    assert_eq!(found(&excused), [Law::Order]);
    excused.struck = vec![struck(short(90), 1.6, 1.7)];
    assert_eq!(found(&excused), [], "it lasted for too long");
    let mut anew = story(records(1.8));
    let mut closed = refused(1, Asked::Waited, 0.0, 0.4);
    closed.fared = Fared::Failed;
    closed.acquisition.who = 11;
    anew.records.push(closed);
    assert_eq!(found(&anew), [], "one that just gave up may still be in line");
    anew.gone.insert(1, vec![at(0.4)]);
    assert_eq!(found(&anew), [Law::Order], "its client is another one");
    let mut still = story(records(1.8));
    still.stood_still = Duration::from_millis(200);
    assert_eq!(found(&still), [Law::Order], "it was in the queue all the same");
    still.stood_still = Duration::from_millis(400);
    assert_eq!(found(&still), [], "it may have come to the queue too late");
    let mut unpromised = story(records(1.8));
    unpromised.bounds.fifo = false;
    assert_eq!(found(&unpromised), []);
}

#[test]
fn who_was_cut_off_when_it_had_just_come_is_in_line() {
    let try_of = |asked, answered, token| {
        let mut tried = hold(1, X, asked, answered, answered, token);
        tried.acquisition.lock = "b".to_owned();
        tried.acquisition.who += 100 + token;
        tried.asked = Asked::Tried;
        tried
    };
    let reset = Fault::new("reset").keeps_order();
    // Its way is gone when the lock is handed on, and is back for a second when it is handed on again.
    let cut_off = || {
        let mut story = story(vec![
            hold(0, X, 0.0, 0.0, 1.0, 1),
            hold(1, X, 0.5, 4.0, 4.1, 4),
            hold(2, X, 0.6, 1.0, 3.0, 2),
            hold(3, X, 0.9, 3.0, 3.9, 3),
            try_of(0.51, 0.53, 1),
            try_of(0.54, 0.56, 2),
        ]);
        story.struck = vec![struck(reset, 0.8, 1.3)];
        story
    };
    assert_eq!(found(&cut_off()), [Law::Order]);
    let mut once = cut_off();
    once.records.pop();
    assert_eq!(found(&once), [], "its second request may not have gone out");
    let mut late = cut_off();
    late.records[5] = try_of(0.54, 0.72, 2);
    assert_eq!(
        found(&late),
        [],
        "it may have been cut off just before it was there"
    );
    late.records[5] = try_of(0.52, 0.56, 2);
    assert_eq!(found(&late), [], "that was asked before the first answer");
    let mut first = cut_off();
    first.records[3].acquisition.asked = at(0.65);
    assert_eq!(found(&first), [], "the other may have been there first");
    let mut back = cut_off();
    back.struck.push(struck(reset, 0.1, 0.2));
    assert_eq!(found(&back), [], "it may not have been back in time to ask");
    let mut polled = cut_off();
    polled.records[1].acquisition.queued = Some(at(0.52));
    assert_eq!(
        found(&polled),
        [],
        "it had not asked when the first answer was asked for"
    );
}

/// Lost as asked for, and its guard kept for a while.
fn asked_for(mut hold: Record, lost: f64, kept: f64) -> Record {
    hold.acquisition.until = Some(at(lost) - 1);
    hold.acquisition.lost = Some(at(lost));
    (hold.over, hold.loss, hold.kept) = (Over::Lost, Loss::Asked, Some(at(kept)));
    hold
}

fn ask_for(token: u64, from: f64, to: f64, said: Said) -> AskBack {
    AskBack {
        lock: "a".to_owned(),
        token,
        from: at(from),
        to: at(to),
        said,
    }
}

#[test]
fn who_is_let_in_before_the_other_let_go_is_found() {
    let asked = |granted: f64| {
        let first = asked_for(hold(0, X, 0.0, 0.0, 1.0, 1), 0.5, 0.9);
        let mut story = story(vec![first, hold(1, X, 0.1, granted, granted + 1.0, 2)]);
        story.asks = vec![ask_for(1, 0.3, 0.4, Said::Still)];
        story
    };
    assert_eq!(found(&asked(0.95)), []);
    assert_eq!(found(&asked(0.8)), [Law::Asked]);
    assert_eq!(found(&asked(0.4)), [Law::Exclusion], "it still held then");
    let mut excused = asked(0.8);
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    excused.struck = vec![struck(fault, 0.7, 0.7)];
    assert_eq!(found(&excused), []);
    excused.struck = vec![struck(fault, 0.85, 0.85)];
    assert_eq!(found(&excused), [Law::Asked], "the fault came after");

    // Within the fallback poll and three seconds, from two seconds after its guard was dropped.
    assert_eq!(found(&asked(7.4)), []);
    assert_eq!(found(&asked(7.6)), [Law::Liveness]);
    let mut stays = asked(7.6);
    stays.records[0].acquisition.released = Some(at(30.0));
    assert_eq!(found(&stays), [], "it has the lease that it had");
    stays.records[1].acquisition.granted = Some((at(9.1), 2));
    assert_eq!(found(&stays), [Law::Liveness], "and no other");
    stays.bounds.lease = false;
    assert_eq!(found(&stays), [], "it has none");
}

#[test]
fn who_was_asked_and_not_told_is_found() {
    let asked = |until: f64| {
        let mut story = story(vec![hold(0, X, 0.0, 0.0, until, 1)]);
        story.asks = vec![ask_for(1, 0.3, 0.4, Said::Still)];
        story
    };
    assert_eq!(found(&asked(2.6)), []);
    assert_eq!(found(&asked(2.8)), [Law::Asked]);
    let mut other = asked(2.8);
    other.asks[0].token = 2;
    assert_eq!(found(&other), [], "another was asked");
    other.asks = vec![ask_for(1, 0.3, 0.4, Said::Nothing)];
    assert_eq!(found(&other), [], "perhaps nobody was");
    let mut struck_then = asked(2.8);
    struck_then.struck = vec![struck(Fault::new("cut"), 1.0, 1.5)];
    assert_eq!(found(&struck_then), []);
    let mut unrenewed = asked(2.8);
    unrenewed.records[0].renew = false;
    assert_eq!(found(&unrenewed), [], "it looks when its lease is over");
    let mut told = story(vec![asked_for(hold(0, X, 0.0, 0.0, 1.0, 1), 0.5, 0.9)]);
    assert_eq!(found(&told), [Law::Asked], "nobody had asked");
    told.asks = vec![ask_for(1, 0.6, 0.7, Said::Still)];
    assert_eq!(found(&told), [Law::Asked], "nobody had asked then");
}

#[test]
fn an_end_that_was_confirmed_too_early_is_found() {
    let told = |said, record: Record| {
        let mut story = story(vec![record]);
        story.asks = vec![ask_for(1, 0.3, 0.6, said)];
        story
    };
    let held = |until| hold(0, X, 0.0, 0.0, until, 1);
    assert_eq!(found(&told(Said::Ended, held(0.6))), []);
    assert_eq!(found(&told(Said::Ended, held(0.7))), [Law::Asked]);
    assert_eq!(found(&told(Said::NotHeld, held(0.7))), [Law::Asked]);
    let kept = asked_for(held(1.0), 0.5, 0.9);
    assert_eq!(found(&told(Said::Ended, kept)), [Law::Asked], "it had its guard");
    let late = hold(0, X, 0.0, 0.4, 0.7, 1);
    assert_eq!(found(&told(Said::NotHeld, late)), [], "it was granted meanwhile");
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    let mut excused = told(Said::Ended, held(0.7));
    excused.struck = vec![struck(fault, 0.5, 0.5)];
    assert_eq!(found(&excused), []);
    excused.struck = vec![struck(Fault::new("cut"), 0.5, 0.5)];
    assert_eq!(found(&excused), [Law::Asked], "that fault ends no hold");
    excused.struck.clear();
    excused.breaks = vec![("a".to_owned(), at(0.5), at(0.5))];
    assert_eq!(found(&excused), []);
}

#[test]
fn a_hold_that_outlasts_its_max_hold_is_found() {
    let limited = |until: f64, loss| {
        let mut record = hold(0, X, 0.0, 0.0, 9.0, 1);
        record.acquisition.until = Some(at(until));
        record.acquisition.lost = Some(at(until) + 1);
        (record.max_hold, record.over, record.loss) = (Some(1_000), Over::Lost, loss);
        story(vec![record, hold(1, X, 0.1, 3.0, 4.0, 2)])
    };
    assert_eq!(found(&limited(2.0, Loss::MaxHold)), []);
    assert_eq!(found(&limited(2.2, Loss::MaxHold)), [Law::Length]);
    assert_eq!(
        found(&limited(1.5, Loss::Expired)),
        [Law::Length],
        "it did not say so"
    );
    assert_eq!(
        found(&limited(0.9, Loss::Expired)),
        [],
        "its lease was over before that"
    );
    assert_eq!(found(&limited(1.5, Loss::Other)), [], "that comes before");
    let mut longer = limited(2.2, Loss::MaxHold);
    longer.records[0].ttl = 1_500;
    assert_eq!(found(&longer), [], "its lease had become longer");
    // Its guard is kept, and the lock is free all the same.
    let mut next = limited(2.0, Loss::MaxHold);
    next.records[1] = hold(1, X, 0.1, 8.6, 9.0, 2);
    assert_eq!(found(&next), [Law::Liveness]);
    next.records[1] = hold(1, X, 0.1, 8.4, 9.0, 2);
    assert_eq!(found(&next), []);
}

#[test]
fn the_ttl_of_a_dead_holder_is_the_last_one() {
    let mut dead = hold(0, X, 0.0, 0.0, 1.0, 1);
    (dead.process, dead.ttl, dead.over) = (1, 9_000, Over::Not);
    dead.acquisition.released = None;
    let mut story = story(vec![dead, hold(2, X, 0.1, 11.0, 11.1, 2)]);
    story
        .bounds
        .dead
        .insert(9_000, (Duration::from_secs(10), Duration::from_secs(10)));
    story.pauses = vec![Pause {
        process: 1,
        from: at(1.0),
        to: None,
    }];
    assert_eq!(found(&story), [Law::Liveness], "its server goes by a second");
    story.records[0].ttl_now = 9_000;
    assert_eq!(found(&story), []);
}

fn sight(token: u64, leader: u64, looked: f64) -> Sight {
    Sight {
        lock: "a".to_owned(),
        observer: 77,
        looked: at(looked),
        seen: at(looked + 0.01),
        token,
        leader,
    }
}

fn end_of_sights(when: f64) -> Sight {
    let (token, leader) = Sight::END;
    sight(token, leader, when)
}

#[test]
fn what_an_observer_sees_wrong_is_found() {
    let records = || vec![hold(0, X, 0.0, 0.0, 2.0, 1), hold(1, X, 0.5, 2.1, 9.0, 2)];
    let seen = |sights: &[Sight]| {
        let mut story = story(records());
        story.sights = sights.to_vec();
        story
    };
    let good = [
        sight(1, 0, 0.1),
        sight(0, 0, 2.05),
        sight(2, 1, 2.2),
        end_of_sights(8.0),
    ];
    assert_eq!(found(&seen(&good)), []);
    let wrong = |sights: &[Sight], why: &str| assert_eq!(found(&seen(sights)), [Law::Election], "{why}");
    wrong(&[sight(2, 1, 2.2), sight(1, 0, 2.3)], "a token goes back");
    wrong(
        &[sight(2, 1, 2.2), sight(0, 0, 9.1), sight(1, 0, 9.2)],
        "and later",
    );
    wrong(&[sight(2, 1, 2.2), sight(2, 1, 2.3)], "one is there twice");
    wrong(&[sight(0, 0, 2.02), sight(0, 0, 2.03)], "nobody is there twice");
    wrong(&[sight(5, 5, 2.2)], "it never asked");
    wrong(&[sight(2, 1, 0.4)], "it had not asked");
    wrong(&[sight(3, 1, 2.2)], "it has another token");
    wrong(&[sight(1, 0, 3.1)], "it had resigned");
    wrong(&[sight(0, 0, 4.0)], "somebody led");
    wrong(&[sight(1, 0, 0.1), end_of_sights(8.0)], "it led for six seconds");
    assert_eq!(
        found(&seen(&[sight(1, 0, 0.1), end_of_sights(7.0)])),
        [],
        "for less than five"
    );
    let mut excused = seen(&[sight(1, 0, 3.1), sight(3, 1, 4.0)]);
    excused.struck = vec![struck(Fault::new("empty"), 0.2, 0.2)];
    assert_eq!(found(&excused), [], "the server lost what it had");
    excused.sights = vec![sight(2, 1, 2.2), sight(1, 0, 2.3)];
    assert_eq!(found(&excused), [Law::Election], "that is never shown");
}

#[test]
fn a_hold_that_is_left_out_of_a_list_is_found() {
    let listed = |from: f64, names: &[&str]| {
        let mut story = story(vec![hold(0, X, 0.0, 0.0, 1.0, 1)]);
        story.lists = vec![Listed {
            from: at(from),
            to: at(from + 0.2),
            of_elections: false,
            names: names.iter().map(ToString::to_string).collect(),
        }];
        story
    };
    assert_eq!(found(&listed(0.3, &["a", "b"])), []);
    assert_eq!(found(&listed(0.3, &["b"])), [Law::List]);
    assert_eq!(found(&listed(0.9, &[])), [], "it ended meanwhile");
    assert_eq!(found(&listed(-0.1, &[])), [], "it began meanwhile");
    let mut elections = listed(0.3, &[]);
    elections.lists[0].of_elections = true;
    assert_eq!(found(&elections), [], "that was asked for others");
    let mut excused = listed(0.3, &[]);
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    excused.struck = vec![struck(fault, 0.4, 0.4)];
    assert_eq!(found(&excused), []);
    excused.struck = vec![struck(fault, 0.6, 0.6)];
    assert_eq!(found(&excused), [Law::List], "the fault came after");
    excused.struck = vec![struck(Fault::new("cut"), 0.4, 0.4)];
    assert_eq!(found(&excused), [Law::List], "that fault ends no hold");
}

/// Made a shared one after a second, and held for `released`.
fn downgraded(released: f64, token: u64) -> Record {
    let mut record = hold(0, X, 0.0, 0.0, released, token);
    (record.downgraded, record.shared) = (Some(at(1.0)), Some(at(1.1)));
    record
}

#[test]
fn a_downgraded_hold_is_one_whose_mode_changes() {
    let beside = |mode, granted: f64, token| {
        found(&story(vec![
            downgraded(3.0, 5),
            hold(1, mode, 0.5, granted, 2.0, token),
        ]))
    };
    assert_eq!(beside(Mode::Shared, 1.2, 6), []);
    assert_eq!(
        beside(Mode::Shared, 1.05, 6),
        [],
        "it may have been let in before the answer"
    );
    assert_eq!(
        beside(Mode::Shared, 0.9, 6),
        [Law::Exclusion],
        "it was alone then"
    );
    assert_eq!(beside(X, 1.05, 6), [Law::Exclusion], "in between");
    assert_eq!(beside(X, 1.5, 6), [Law::Exclusion]);
    assert_eq!(beside(Mode::Shared, 1.2, 4), [Law::Tokens], "it came later");

    // Those who wait to read do not wait for its end: two seconds, the fallback poll and three seconds.
    let waits = |mode, granted: f64| {
        let waiter = hold(1, mode, 0.5, granted, granted + 1.0, 6);
        story(vec![downgraded(9.0, 5), waiter])
    };
    assert_eq!(found(&waits(Mode::Shared, 7.5)), []);
    assert_eq!(found(&waits(Mode::Shared, 7.7)), [Law::Liveness]);
    let mut unknown = waits(Mode::Shared, 7.7);
    unknown.records[0].shared = None;
    assert_eq!(found(&unknown), [], "no answer had come");
    assert_eq!(found(&waits(X, 9.1)), [], "a writer does");
    let mut writer = waits(Mode::Shared, 7.7);
    writer.records.push(hold(2, X, 0.4, 9.1, 9.2, 7));
    assert_eq!(found(&writer), [], "a writer is before it");
}

/// Detached after a second, with a lease of another one.
fn detached() -> Record {
    let mut record = hold(0, X, 0.0, 0.0, 1.0, 1);
    (record.over, record.detached) = (Over::Detached, Some(at(2.0)));
    record
}

/// The adoption of that hold.
fn heir(who: u32, asked: f64, granted: f64, released: f64) -> Record {
    let mut heir = hold(who, X, asked, granted, released, 1);
    (heir.asked, heir.adopts) = (Asked::Adopts, Some(0));
    heir
}

#[test]
fn who_is_let_in_before_a_detached_hold_is_over_is_found() {
    let next = |granted: f64| hold(1, X, 0.1, granted, granted + 0.01, 2);
    assert_eq!(found(&story(vec![detached(), next(2.01)])), []);
    assert_eq!(found(&story(vec![detached(), next(1.5)])), [Law::Detached]);
    assert_eq!(found(&story(vec![detached(), next(0.9)])), [Law::Exclusion]);
    let adopted = |granted: f64| story(vec![detached(), heir(2, 1.2, 1.8, 4.0), next(granted)]);
    assert_eq!(found(&adopted(4.01)), []);
    assert_eq!(
        found(&adopted(1.6)),
        [Law::Tokens, Law::Detached],
        "and the heir has a token that was superseded"
    );
    assert_eq!(found(&adopted(3.0)), [Law::Exclusion], "the heir had it");
    let mut lost = story(vec![detached(), next(1.5)]);
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    lost.struck = vec![struck(fault, 1.2, 1.2)];
    assert_eq!(found(&lost), []);
    lost.struck = vec![struck(Fault::new("cut"), 1.2, 1.2)];
    assert_eq!(found(&lost), [Law::Detached], "that fault ends no hold");
    lost.struck.clear();
    lost.asks = vec![ask_for(1, 1.2, 1.3, Said::Still)];
    assert_eq!(found(&lost), [], "it was asked for");
    // Two who adopt it may each have a part of the servers.
    let mut adopters = story(vec![detached(), next(1.5)]);
    adopters.bounds.splits = true;
    for (who, asked) in [(2, 1.2), (3, 1.3)] {
        let mut late = refused(who, Asked::Adopts, asked, 1.4);
        late.adopts = Some(0);
        adopters.records.push(late);
    }
    assert_eq!(found(&adopters), []);
    adopters.bounds.splits = false;
    assert_eq!(found(&adopters), [Law::Detached; 2], "there is one server");
    adopters.bounds.splits = true;
    adopters.records[3].acquisition.asked = at(1.6);
    adopters.records[3].acquisition.gave_up = Some(at(1.7));
    assert_eq!(found(&adopters), [Law::Detached; 2], "one alone cannot");
}

#[test]
fn a_wrong_adoption_is_found() {
    let adopted = story(vec![detached(), heir(2, 1.2, 1.3, 4.0)]);
    assert_eq!(found(&adopted), []);
    let mut twice = adopted.clone();
    twice.records.push(heir(3, 1.2, 4.1, 4.2));
    assert_eq!(found(&twice), [Law::Detached]);
    twice.records[2].adopts = Some(2);
    twice.records[1].over = Over::Detached;
    assert_eq!(found(&twice), [], "the heir had detached it, too");

    let refused_at = |asked: f64| {
        let mut late = refused(2, Asked::Adopts, asked, asked + 0.1);
        late.adopts = Some(0);
        story(vec![detached(), late])
    };
    assert_eq!(found(&refused_at(1.2)), [Law::Detached]);
    assert_eq!(found(&refused_at(1.95)), [], "too late");
    let mut excused = refused_at(1.2);
    excused.records.push(heir(3, 1.25, 1.4, 2.0));
    assert_eq!(found(&excused), [], "another had asked for it, too");
    excused.records[2].acquisition.asked = at(1.35);
    assert_eq!(found(&excused), [Law::Detached], "that was later");
    let mut both = refused_at(1.2);
    both.records.push(both.records[1].clone());
    both.records[2].acquisition.who = 3;
    assert_eq!(found(&both), [Law::Detached], "one of them gets it");
    both.bounds.splits = true;
    assert_eq!(found(&both), [], "or none");
    let mut excused = refused_at(1.2);
    excused.asks = vec![ask_for(1, 1.1, 1.15, Said::Still)];
    assert_eq!(found(&excused), [], "its holder was asked for it");
    excused.asks[0].said = Said::NotHeld;
    assert_eq!(
        found(&excused),
        [Law::Asked, Law::Detached],
        "which was not held, they say"
    );
    excused.asks.clear();
    excused.breaks = vec![("a".to_owned(), at(1.1), at(1.15))];
    assert_eq!(found(&excused), []);
    excused.breaks.clear();
    let fault = Fault::new("empty").excuses_overlap(Told::AtRenewal(Duration::ZERO));
    excused.struck = vec![struck(fault, 1.1, 1.1)];
    assert_eq!(found(&excused), []);
    excused.struck = vec![struck(Fault::new("cut"), 1.1, 1.1)];
    assert_eq!(found(&excused), [Law::Detached], "that fault ends no hold");

    let mut asked = adopted;
    asked.asks = vec![ask_for(1, 1.1, 1.15, Said::Still)];
    asked.records[1].acquisition.until = Some(at(1.5));
    assert_eq!(found(&asked), [Law::Detached], "it had been asked for");
    asked.asks = vec![ask_for(1, 1.1, 1.25, Said::Still)];
    assert_eq!(found(&asked), [], "at the same time");
}

#[test]
fn who_waits_for_a_detached_hold_that_is_over_is_found() {
    // Its lease, as long as a dead holder's, and two seconds; then the fallback poll and three seconds.
    let waiter = |granted: f64| hold(1, X, 0.5, granted, granted + 0.1, 2);
    assert_eq!(found(&story(vec![detached(), waiter(9.4)])), []);
    assert_eq!(found(&story(vec![detached(), waiter(9.6)])), [Law::Liveness]);
    let adopted = |granted| story(vec![detached(), heir(2, 1.2, 1.3, 4.0), waiter(granted)]);
    assert_eq!(found(&adopted(8.4)), []);
    assert_eq!(found(&adopted(8.6)), [Law::Liveness]);
    let mut unanswered = story(vec![
        detached(),
        refused(2, Asked::Adopts, 1.9, 2.9),
        waiter(11.3),
    ]);
    (unanswered.records[1].fared, unanswered.records[1].adopts) = (Fared::Failed, Some(0));
    assert_eq!(found(&unanswered), [], "it may have it for another lease");
    unanswered.records[1].fared = Fared::Taken;
    assert_eq!(found(&unanswered)[0], Law::Liveness, "it does not");
}

/// A hold of several of three permits.
fn several(who: u32, asked: f64, granted: f64, released: f64, tokens: std::ops::Range<u64>) -> Vec<Record> {
    let three = Mode::Permits(NonZeroU32::new(3).unwrap());
    let number = u32::try_from(tokens.end - tokens.start).unwrap();
    let permit = |(place, token)| {
        let mut record = hold(who, three, asked, granted, released, token);
        (record.asked, record.place) = (Asked::Together, (place, number));
        record
    };
    (0..).zip(tokens).map(permit).collect()
}

#[test]
fn several_permits_count_as_many() {
    let one = || several(0, 0.0, 0.0, 20.0, 1..2);
    let beside = |mut others: Vec<Record>| {
        others.extend(one());
        found(&story(others))
    };
    assert_eq!(beside(several(1, 0.1, 0.2, 1.0, 2..4)), []);
    assert_eq!(beside(several(1, 0.1, 0.2, 1.0, 2..5)), [Law::Exclusion]);
    assert_eq!(beside(several(1, 1.0, 5.4, 6.0, 2..4)), []);
    assert_eq!(
        beside(several(1, 1.0, 5.6, 6.0, 2..4)),
        [Law::Liveness],
        "two were free"
    );
    assert_eq!(beside(several(1, 1.0, 20.1, 21.0, 2..5)), [], "three were not");
    let mut behind = several(1, 1.0, 5.6, 6.0, 2..4);
    behind.extend(several(2, 0.9, 5.5, 5.6, 4..6));
    assert_eq!(beside(behind), [], "another collected its own");

    let told = |number: u64, asked: f64| {
        let mut records = several(1, asked, asked, asked, 2..2 + number);
        for record in &mut records {
            (record.asked, record.fared, record.over) = (Asked::TriedTogether, Fared::Taken, Over::Not);
            record.acquisition.gave_up = Some(at(asked + 0.01));
            record.acquisition.granted = None;
            (record.acquisition.until, record.acquisition.released) = (None, None);
        }
        records
    };
    assert_eq!(beside(told(2, 5.0)), [Law::Answer]);
    assert_eq!(beside(told(3, 5.0)), []);
    // Whoever collects may have some of them from the first request on.
    let mut collecting = told(2, 5.0);
    collecting.extend(several(2, 0.9, 6.0, 6.1, 7..9));
    assert_eq!(beside(collecting), []);
}

#[test]
fn who_is_refused_several_that_are_all_free_is_found() {
    let tried = |lock: &str| {
        let mut record = refused(1, Asked::TriedTogether, 5.0, 5.01);
        record.acquisition.lock = lock.to_owned();
        record
    };
    let records = || vec![hold(0, X, 0.0, 0.0, 1.0, 1), tried("a"), tried("b")];
    assert_eq!(found(&story(records())), [Law::Answer]);
    let mut taken = story(records());
    taken.records[0] = hold(0, X, 0.0, 0.0, 6.0, 1);
    assert_eq!(found(&taken), [], "one of them was taken");
    let mut waiting = story(records());
    waiting.records.push(hold(2, X, 1.5, 6.0, 6.1, 2));
    waiting.records[3].asked = Asked::Together;
    assert_eq!(found(&waiting), [], "another had it while it waited for more");
}

#[test]
fn a_hold_that_could_not_be_shown_is_excused() {
    let listed = |fault: (f64, f64), from: f64| {
        let mut story = story(vec![hold(0, X, 0.0, 0.0, 9.0, 1)]);
        story.bounds.shows_late = true;
        story.lists = vec![Listed {
            from: at(from),
            to: at(from + 0.2),
            of_elections: false,
            names: Vec::new(),
        }];
        story.struck = vec![struck(Fault::new("requests"), fault.0, fault.1)];
        story
    };
    assert_eq!(found(&listed((0.1, 4.0), 3.0)), []);
    assert_eq!(
        found(&listed((0.1, 1.0), 3.0)),
        [Law::List],
        "it was over long before"
    );
    assert_eq!(
        found(&listed((2.0, 4.0), 3.0)),
        [Law::List],
        "it was shown by then"
    );
    let mut shown = listed((0.1, 4.0), 3.0);
    shown.bounds.shows_late = false;
    assert_eq!(found(&shown), [Law::List], "the grant itself shows it");
    let mut paused = listed((9.0, 9.0), 3.0);
    assert_eq!(found(&paused), [Law::List]);
    paused.pauses.push(Pause {
        process: 0,
        from: at(0.1),
        to: Some(at(4.0)),
    });
    assert_eq!(found(&paused), []);
}

#[test]
fn a_failure_of_a_healthy_server_is_found() {
    let mut record = refused(0, Asked::Tried, 0.0, 0.1);
    (record.fared, record.error) = (Fared::Failed, "no answer".to_owned());
    let mut story = story(vec![record]);
    assert_eq!(found(&story), [Law::Failure]);
    story.records[0].error = "the last attempt failed: no answer in time from the server".to_owned();
    assert_eq!(found(&story), [], "it had a tenth of a second");
    story.records[0].acquisition.gave_up = Some(at(2.1));
    assert_eq!(found(&story), [Law::Failure], "it had its time");
    story.schedule.strikes.push(Strike {
        at: 0,
        fault: "pause".to_owned(),
        place: 0,
        lasts: 1,
    });
    assert_eq!(found(&story), []);
}

#[test]
fn a_record_survives_the_pipe() {
    use crate::torture::record::{Finding, Note};
    let mut record = hold(3, Mode::Shared, 0.0, 1.0, 2.0, 9);
    record.error = "taken | or not".to_owned();
    (record.ttl_now, record.renew, record.max_hold) = (7, false, Some(8));
    (record.loss, record.kept) = (Loss::Expired, Some(9));
    (record.downgraded, record.shared, record.place) = (Some(10), Some(11), (2, 3));
    let mut heir = hold(4, X, 0.0, 1.0, 2.0, 9);
    (heir.asked, heir.adopts) = (Asked::Adopts, Some(3_000_001));
    (heir.over, heir.detached) = (Over::Detached, Some(12));
    let notes = [
        Note::Record(Box::new(record)),
        Note::Record(Box::new(heir)),
        Note::Finding(Finding::new(Law::Hang, "two words")),
        Note::Gone {
            client: 1,
            at: SECOND,
        },
        Note::Break {
            lock: "a b".to_owned(),
            from: 1,
            to: 2,
        },
        Note::AskBack(ask_for(7, 0.0, 1.0, Said::Still)),
        Note::Saw(sight(1, 2, 3.0)),
        Note::Saw(end_of_sights(4.0)),
        Note::Listed(Listed {
            from: 1,
            to: 2,
            of_elections: true,
            names: vec!["a".to_owned(), "b".to_owned()],
        }),
        Note::Listed(Listed {
            from: 1,
            to: 2,
            of_elections: false,
            names: Vec::new(),
        }),
    ];
    for note in notes {
        assert_eq!(note.to_string().parse(), Ok(note));
    }
    assert!("record 1 2".parse::<Note>().is_err());
}

#[test]
fn a_hundred_thousand_grants_are_judged_one_by_one() {
    let judged = |many: u32| {
        let records = (0..many).map(|n| {
            let from = f64::from(n) / 1_000.0;
            hold(n % 10, X, from, from, from + 0.0005, u64::from(n) + 1)
        });
        let story = story(records.collect());
        let began = Stopwatch::start();
        assert_eq!(found(&story), []);
        began.elapsed()
    };
    let control = (0..3).map(|_| judged(10_000)).max().unwrap();
    let took = judged(100_000);
    // Ten times as many: to compare each with each other takes a hundred times as long.
    assert!(
        took < 30 * control,
        "{took:?}, and {control:?} for a tenth of them"
    );
}

/// Up to eight holds, mostly in good order, beside a fault now and then.
fn random_story(rng: &mut fastrand::Rng) -> Story {
    let count = rng.u64(2..9);
    let mut tokens: Vec<u64> = (1..=count).collect();
    if rng.u8(..4) == 0 {
        let (a, b) = (rng.usize(..tokens.len()), rng.usize(..tokens.len()));
        tokens.swap(a, b);
    }
    if rng.u8(..16) == 0 {
        tokens[0] = tokens[1];
    }
    let permits = (rng.u8(..4) == 0).then(|| Mode::Permits(NonZeroU32::new(rng.u32(1..4)).unwrap()));
    let (mut end, mut records) = (0.0, Vec::new());
    for (token, who) in tokens.into_iter().zip(0..) {
        let mut some = || f64::from(rng.u8(..8)) / 20.0;
        let (wait, pause, long) = (some(), some(), some());
        let early = if rng.u8(..6) == 0 {
            f64::from(rng.u8(..8)) / 15.0
        } else {
            0.0
        };
        // Each moment is of one.
        let granted = f64::max(0.0, end + pause - early) + 0.01 + f64::from(who) / 1e4;
        let released = granted + long + 0.03;
        end = released;
        let shared = if rng.u8(..3) == 0 { Mode::Shared } else { X };
        let mut record = hold(
            who,
            permits.unwrap_or(shared),
            granted - wait - 0.005,
            granted,
            released,
            token,
        );
        if rng.bool() {
            record.over = Over::Lost;
        }
        records.push(record);
    }
    let mut story = story(records);
    if rng.u8(..3) == 0 {
        let told = match rng.u8(..3) {
            0 => Told::Within(Duration::from_millis(300)),
            1 => Told::AtRenewal(Duration::ZERO),
            _ => Told::AtLeaseEnd(Duration::ZERO),
        };
        let from = f64::from(rng.u32(..100)) / 100.0 * end;
        story.struck = vec![struck(Fault::new("end").excuses_overlap(told), from, from + 0.05)];
    }
    story
}

#[test]
fn a_judge_that_has_the_text_alone_agrees() {
    let seed = std::env::var("LOCKKIT_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut results = BTreeMap::<Vec<Law>, usize>::new();
    for round in 0..2_000 {
        let story = random_story(&mut rng);
        let findings = judge(&story, &mut Highest::default());
        let differs = second_opinion(&story, &findings);
        assert_eq!(differs, None, "round {round}, LOCKKIT_SEED={seed}");
        let laws = findings.iter().map(|finding| finding.law);
        *results
            .entry(laws.filter(|law| *law <= Law::Tokens).collect())
            .or_default() += 1;
    }
    for laws in [&[][..], &[Law::Exclusion], &[Law::Tokens]] {
        assert!(
            results.get(laws).is_some_and(|times| *times >= 50),
            "{laws:?}: {results:?}, LOCKKIT_SEED={seed}"
        );
    }
}
