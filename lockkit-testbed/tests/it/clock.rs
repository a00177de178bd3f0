use std::{
    fs,
    io::Read as _,
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lockkit_testbed::Clock;
use tempfile::TempDir;

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
    let program = Program::new();
    let clock = Clock::new().unwrap();
    for forward in [0, 3600] {
        clock.forward(Duration::from_secs(forward)).unwrap();
        for way in WAYS {
            let (waiter, began) = program.waits(&clock, way, SHORT);
            waiter.ends();
            assert!(began.elapsed() >= SHORT, "{way} ahead by {forward} s");
        }
    }
}

#[test]
fn a_step_forward_ends_a_wait_whose_time_has_come() {
    let program = Program::new();
    let clock = Clock::new().unwrap();
    for way in WAYS {
        let (waiter, began) = program.waits(&clock, way, LONG);
        // Not far enough.
        clock.forward(LONG / 2).unwrap();
        clock.forward(LONG / 2).unwrap();
        waiter.ends();
        assert!(began.elapsed() < LONG / 2, "{way} took {:?}", began.elapsed());
    }
}

#[test]
fn a_step_back_prolongs_a_wait() {
    const BACK: Duration = Duration::from_secs(1);

    let program = Program::new();
    let clock = Clock::new().unwrap();
    for way in WAYS {
        let (waiter, began) = program.waits(&clock, way, BACK);
        clock.back(BACK).unwrap();
        waiter.ends();
        assert!(began.elapsed() >= 2 * BACK, "{way} took {:?}", began.elapsed());
    }
}

/// The ways to name the clock: as that of the condition, or for one wait.
const WAYS: [&str; 2] = ["own", "named"];
const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_mins(2);

#[test]
fn a_monotonic_wait_knows_no_step() {
    let program = Program::new();
    let clock = Clock::new().unwrap();
    let (waiter, began) = program.waits(&clock, "monotonic", SHORT * 5);
    clock.forward(LONG).unwrap();
    waiter.ends();
    assert!(began.elapsed() >= SHORT * 5, "it took {:?}", began.elapsed());
}

/// A program that waits until a moment by its own clock.
struct Program {
    directory: TempDir,
}

/// It, while it waits.
struct Waiter(Child);

impl Program {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("wait.c");
        fs::write(&source, WAIT).unwrap();
        let compiled = Command::new("cc")
            .arg("-pthread")
            .arg("-o")
            .args([&directory.path().join("wait"), &source])
            .status();
        assert!(compiled.unwrap().success());
        Self { directory }
    }

    /// Begins a wait of this length. Returns when it stands in it, with a moment before that.
    fn waits(&self, clock: &Clock, way: &str, length: Duration) -> (Waiter, Instant) {
        let mut command = Command::new(self.directory.path().join("wait"));
        clock.apply(&mut command);
        let began = Instant::now();
        let millis = length.as_millis().to_string();
        let mut child = command
            .args([way, &millis])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0; 1];
        child.stdout.take().unwrap().read_exact(&mut said).unwrap();
        (Waiter(child), began)
    }
}

impl Waiter {
    #[track_caller]
    fn ends(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

/// Waits, says so, and looks at the end whether the time has come by its own clock. It ends by a signal if that takes a minute.
const WAIT: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* The mutex is free once the other thread waits. */
static void *say_that_it_waits(void *nothing) {
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
    return write(1, ".", 1) == 1 ? nothing : &mutex;
}

int main(int count, char **args) {
    int is_monotonic = count == 3 && strcmp(args[1], "monotonic") == 0;
    int is_named = count == 3 && strcmp(args[1], "named") == 0;
    clockid_t clock = is_monotonic ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    pthread_t other;
    pthread_condattr_t kind;
    pthread_cond_t condition;
    struct timespec until, now;
    int waited = 0;
    alarm(60);
    pthread_condattr_init(&kind);
    pthread_condattr_setclock(&kind, is_named ? CLOCK_MONOTONIC : clock);
    pthread_cond_init(&condition, &kind);
    clock_gettime(clock, &until);
    long millis = until.tv_nsec / 1000000 + atol(args[2]);
    until.tv_sec += millis / 1000;
    until.tv_nsec = until.tv_nsec % 1000000 + millis % 1000 * 1000000;
    pthread_mutex_lock(&mutex);
    if (pthread_create(&other, NULL, say_that_it_waits, NULL) != 0)
        return 2;
    while (waited == 0) {
#ifdef __GLIBC__
        if (is_named) {
            waited = pthread_cond_clockwait(&condition, &mutex, clock, &until);
            continue;
        }
#endif
        waited = pthread_cond_timedwait(&condition, &mutex, &until);
    }
    clock_gettime(clock, &now);
    int is_over = now.tv_sec > until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec >= until.tv_nsec);
    return waited == ETIMEDOUT && is_over ? 0 : 1;
}
"#;
