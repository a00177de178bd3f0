//! The effects of a machine that stands still: each of these tests stops the process that it runs in, which is one of
//! its own.

use std::{
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_conformance::{
    Harness, Suite, Verdict, cases,
    stall::{Stopwatch, timeout},
};
use lockkit_core::{Error, LockClient, MemoryBackend, Result};

use crate::plain::{Fault, Plain};

const MARK: &str = "LOCKKIT_CONFORMANCE_APART";

/// Runs `body`, the rest of `test`, in a process of its own. What that printed is returned here, and nothing there.
fn apart(test: &str, body: impl FnOnce()) -> Option<String> {
    if std::env::var_os(MARK).is_some() {
        body();
        return None;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("stall::{test}"), "--nocapture"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let printed = [child.stdout, child.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(child.status.success(), "{}", printed.concat());
    assert!(printed[0].contains("1 passed"), "{}", printed.concat());
    Some(printed.concat())
}

/// Stops this process for half a second.
fn stand_still() {
    let script = "kill -STOP $PPID; sleep 0.5; kill -CONT $PPID";
    assert!(
        Command::new("sh")
            .args(["-c", script])
            .status()
            .unwrap()
            .success()
    );
}

const MOST_OF_IT: Duration = Duration::from_millis(400);

#[test]
fn a_stopwatch_stands_still_too() {
    apart("a_stopwatch_stands_still_too", || {
        let (watch, began) = (Stopwatch::start(), Instant::now());
        stand_still();
        let took = began.elapsed();
        let stood_still = watch.stood_still();
        assert!(
            took > stood_still && stood_still > MOST_OF_IT,
            "{stood_still:?} of {took:?}"
        );
        assert!(watch.elapsed() + MOST_OF_IT < began.elapsed());
        // It is left out once, also when the threads that look have seen it.
        let ran = watch.elapsed();
        let deadline = Instant::now() + Duration::from_secs(20);
        while watch.elapsed() <= ran {
            assert!(Instant::now() < deadline, "it goes on");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(Stopwatch::start().stood_still() < stood_still);
    });
}

#[test]
fn a_limit_is_one_of_running() {
    apart("a_limit_is_one_of_running", || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let limit = Duration::from_millis(300);
        let work = async {
            stand_still();
            tokio::task::yield_now().await;
        };
        runtime.block_on(timeout(limit, work)).unwrap();
        let began = Instant::now();
        let late = runtime.block_on(timeout(limit, std::future::pending::<()>()));
        assert!(late.is_err() && began.elapsed() >= limit);
    });
}

/// Its first clients cannot be made; how often, and whether the machine stands still then.
#[derive(Clone, Debug)]
struct Unlucky {
    inner: MemoryBackend,
    failures: Arc<Mutex<usize>>,
    stands_still: bool,
}

#[async_trait]
impl Harness for Unlucky {
    async fn client(&self) -> Result<LockClient> {
        let mut failures = self.failures.lock().unwrap();
        if *failures == 0 {
            return Ok(LockClient::new(self.inner.clone()));
        }
        *failures -= 1;
        if self.stands_still {
            stand_still();
        }
        Err(Error::Closed)
    }
}

fn verdict(failures: usize, stands_still: bool) -> (Verdict, usize) {
    let harness = Unlucky {
        inner: MemoryBackend::default(),
        failures: Arc::new(Mutex::new(failures)),
        stands_still,
    };
    let case = cases()
        .iter()
        .find(|case| case.name == "second_try_is_none")
        .unwrap();
    let verdict = Suite::new(harness.clone()).run_case(case);
    let left = *harness.failures.lock().unwrap();
    (verdict, left)
}

#[test]
fn a_case_that_failed_meanwhile_runs_again() {
    let printed = apart("a_case_that_failed_meanwhile_runs_again", || {
        assert_eq!(verdict(1, true), (Verdict::Passed, 0));
        assert_eq!(verdict(2, true), (Verdict::Passed, 0));
        let (never, left) = verdict(9, true);
        assert!(
            matches!(never, Verdict::Failed(_)) && left == 6,
            "{never:?}, {left}"
        );
    });
    assert!(printed.is_none_or(|printed| printed.contains("again, since")));
}

/// A backend that repeats its tokens, on a machine that stands still.
#[derive(Debug)]
struct Repeating(Plain);

#[async_trait]
impl Harness for Repeating {
    async fn client(&self) -> Result<LockClient> {
        stand_still();
        self.0.client().await
    }
}

#[test]
fn conflicting_holds_and_repeated_tokens_are_not_excused() {
    let printed = apart("conflicting_holds_and_repeated_tokens_are_not_excused", || {
        let case = cases()
            .iter()
            .find(|case| case.name == "clients_contend")
            .unwrap();
        match Suite::new(Repeating(Plain::with(Fault::RepeatsTokens))).run_case(case) {
            Verdict::Failed(why) => assert!(why.contains("Tokens violated"), "{why}"),
            other => panic!("{other:?}"),
        }
    });
    assert!(printed.is_none_or(|printed| !printed.contains("again, since")));
}

#[test]
fn a_case_that_failed_while_it_ran_does_not() {
    apart("a_case_that_failed_while_it_ran_does_not", || {
        // Unless it stands still by itself in this very moment, which it does not do three times.
        let left: Vec<_> = (0..3).map(|_| verdict(9, false).1).collect();
        assert!(left.contains(&8), "{left:?}");
        assert_eq!(verdict(0, false), (Verdict::Passed, 0));
    });
}
