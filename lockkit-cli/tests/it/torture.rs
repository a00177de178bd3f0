//! Recorded schedules of the torture of `lockkit run`. New ones are those of `lockkit-torture command`.

use std::{env, ffi::OsString, process::Command, sync::Mutex, thread, time::Instant};

use lockkit_torture::command::{Programs, Schedule, Verdict, play, witness};
use rustix::process::Signal;

use crate::tool::{Running, eventually, state};

/// A command under the lock is this test program once more.
#[test]
fn witness_process() {
    if witness::is_witness() {
        let status = witness::main().expect("a witness");
        std::process::exit(status.into());
    }
}

/// What libtest says of itself goes nowhere. Not every shell leaves CHLD as it is.
fn witness() -> Vec<OsString> {
    const QUIETLY: &str =
        "exec \"$0\" --exact torture::witness_process --nocapture --test-threads=1 >/dev/null 2>&1";
    let program = env::current_exe().expect("this program");
    let mut witness = ["bash", "-c", QUIETLY].map(OsString::from).to_vec();
    witness.push(program.into());
    witness
}

/// Plays the schedules of these seeds side by side, without what came to the target after they were chosen.
fn played(target: &str, lockkit: Option<&str>, seeds: &[u64]) -> Option<Vec<Verdict>> {
    let (needs, missing) = lockkit_torture::missing(target);
    if lockkit_testbed::skipped(needs, missing) {
        return None;
    }
    let programs = Programs {
        lockkit: lockkit.map(Into::into),
        witness: witness(),
    };
    let verdicts = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for seed in seeds {
            scope.spawn(|| {
                let target = lockkit_torture::start(target).expect("the servers start");
                let schedule = Schedule::without_later(*seed, &*target);
                let verdict = play(&*target, &programs, &schedule).expect("a machine that goes on");
                verdicts.lock().expect("no panic").push(verdict);
            });
        }
    });
    verdicts.into_inner().ok()
}

fn torture(target: &str, seeds: &[u64]) {
    let began = Instant::now();
    let lockkit = Some(env!("CARGO_BIN_EXE_lockkit"));
    let Some(verdicts) = played(target, lockkit, seeds) else {
        return;
    };
    for Verdict { findings, log, .. } in &verdicts {
        assert!(findings.is_empty(), "{target}: {findings:?}\n{log}");
    }
    let commands: usize = verdicts.iter().map(|verdict| verdict.begun).sum();
    assert!(commands >= seeds.len(), "{target}: {commands} commands");
    println!("{target}: {commands} commands in {:?}", began.elapsed());
}

#[test]
fn files_under_recorded_schedules() {
    torture("file", &FILE);
}

#[test]
fn redis_under_recorded_schedules() {
    torture("redis", &REDIS);
}

/// Chosen for what each of them has found.
const FILE: [u64; 5] = [2, 6, 35, 37, 670];
const REDIS: [u64; 6] = [2, 5, 28, 52, 98, 114];

/// Without a lock, the same commands are seen at one time. Something in this process's group is stopped meanwhile, as other tests stop
/// lockkit: whoever joined that group from another one would have all of it sent HUP by its end.
#[test]
fn commands_without_a_lock_are_convicted() {
    let stopped = Running::spawn(Command::new("sleep").arg("60"));
    stopped.signal(Signal::STOP);
    eventually("it is stopped", || {
        (state(stopped.pid()) == Some('T')).then_some(())
    });
    let verdicts = played("file", None, &[2, 3, 4]).expect("files are everywhere");
    let convicted = |verdict: &&Verdict| verdict.findings.iter().any(|law| law.starts_with("exclusion"));
    let count = verdicts.iter().filter(convicted).count();
    assert!(count > 0, "{verdicts:?}");
}
