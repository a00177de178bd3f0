use std::{
    fs,
    process::Command,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
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

/// A program works out by its own clock when a wait is over, and the kernel knows another.
#[test]
fn a_wait_lasts_as_long_by_a_clock_that_is_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let [source, program] = ["wait.c", "wait"].map(|name| directory.path().join(name));
    fs::write(&source, WAIT).unwrap();
    let compiled = Command::new("cc")
        .arg("-pthread")
        .arg("-o")
        .args([&program, &source])
        .status();
    assert!(compiled.unwrap().success());
    let clock = Clock::new().unwrap();
    for forward in [0, 3600] {
        clock.forward(Duration::from_secs(forward)).unwrap();
        let mut command = Command::new(&program);
        clock.apply(&mut command);
        let began = Instant::now();
        assert!(command.status().unwrap().success(), "ahead by {forward} s");
        assert!(began.elapsed() >= Duration::from_millis(100));
    }
}

/// Waits for a tenth of a second. It ends by a signal if that takes a minute.
const WAIT: &str = r"
#include <pthread.h>
#include <time.h>
#include <unistd.h>

int main(void) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    struct timespec until;
    int waited = 0;
    alarm(60);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&mutex);
    while (waited == 0)
        waited = pthread_cond_timedwait(&condition, &mutex, &until);
    return 0;
}
";
