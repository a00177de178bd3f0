use std::{
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_testbed::Clock;

/// The difference between `date`'s clock and ours, in seconds: it lies somewhere in between.
fn ahead(clock: &Clock) -> (f64, f64) {
    let now = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64()
    };
    let mut date = Command::new("date");
    date.arg("+%s.%N");
    clock.apply(&mut date);
    let before = now();
    let output = date.output().unwrap();
    let after = now();
    let printed: f64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    (printed - after, printed - before)
}

#[track_caller]
fn assert_ahead(clock: &Clock, seconds: f64) {
    let (least, most) = ahead(clock);
    assert!(
        least - 0.000_01 <= seconds && seconds <= most + 0.000_01,
        "{seconds} s are not between {least} s and {most} s"
    );
}

#[test]
fn a_clock_goes_forward_and_back_and_right_again() {
    let clock = Clock::new().unwrap();
    assert_ahead(&clock, 0.0);
    clock.forward(Duration::from_secs(3600)).unwrap();
    assert_ahead(&clock, 3600.0);
    clock.back(Duration::from_millis(7_200_500)).unwrap();
    assert_ahead(&clock, -3600.5);
    clock.reset().unwrap();
    assert_ahead(&clock, 0.0);
}

#[test]
fn clocks_are_independent() {
    let (one, other) = (Clock::new().unwrap(), Clock::new().unwrap());
    one.forward(Duration::from_secs(60)).unwrap();
    assert_ahead(&one, 60.0);
    assert_ahead(&other, 0.0);
    assert_ahead(&one.clone(), 60.0);
}
