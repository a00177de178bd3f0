//! The torture tested: its schedules, its judge, its shrinker.

use lockkit_conformance::torture::{Fault, KILL, STOP, Schedule, Shape};
use lockkit_core::Capabilities;

fn shape() -> Shape {
    let mut has = Capabilities::default();
    (has.shared, has.permits, has.revoke, has.local_handoffs) = (true, true, true, true);
    let mut shape = Shape::new(has);
    shape.processes = 3;
    shape.faults = vec![Fault::new("reset").places(2), Fault::new("flush").weight(2)];
    shape
}

#[test]
fn a_seed_gives_one_schedule_and_its_text_gives_it_back() {
    for seed in 0..200 {
        let schedule = Schedule::generate(seed, &shape());
        assert_eq!(schedule, Schedule::generate(seed, &shape()));
        let read: Schedule = schedule.to_string().parse().unwrap();
        assert_eq!(read, schedule, "seed {seed}");
    }
}

#[test]
fn schedules_vary_everything() {
    let mut text = String::new();
    for seed in 0..300 {
        text.push_str(&Schedule::generate(seed, &shape()).to_string());
    }
    let words = [
        "exclusive",
        "shared",
        "permit",
        " wait ",
        "within:",
        " try ",
        "cancel-after:",
        "cancel-polls:",
        "unpolled:",
        "all:",
        "twice",
        "inspect",
        "revoke",
        " drop",
        " forget",
        "half-release",
        " close ",
        " runtime ",
        " anew ",
        " 1000 ",
        STOP,
        KILL,
        "reset 1",
        "flush 0",
        "size 5",
    ];
    for word in words {
        assert!(text.contains(word), "no schedule has {word:?}");
    }
}

#[test]
fn a_file_that_is_no_schedule_is_one_clear_error() {
    let error = |text: &str| text.parse::<Schedule>().unwrap_err();
    assert!(error("").contains("no schedule"));
    let text = Schedule::generate(1, &shape()).to_string();
    assert!(error(&format!("{text}strike now reset 0 1\n")).contains("strike now reset"));
    assert!(error(&format!("{text}task 99 4711\n")).contains("client 4711"));
    assert!(error(&text.replace("span", "spam")).contains("line 3"));
}
