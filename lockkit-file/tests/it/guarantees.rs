//! The rows of `docs/guarantees.md` on the file backend that nothing else shows, those that fail among them.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use lockkit_core::{AcquireOptions, FenceGate, LockClient};
use lockkit_file::{FileBackend, FileConfig};
use rustix::process::{Pid, Signal, kill_process};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

async fn open(dir: &Path) -> FileBackend {
    let mut config = FileConfig::new(dir);
    config.namespace = String::new();
    FileBackend::open(config).await.unwrap()
}

#[tokio::test]
async fn waiters_are_granted_in_order() {
    let dir = tempfile::tempdir().unwrap();
    lockkit_conformance::grants_in_order(&open(dir.path()).await)
        .await
        .unwrap();
}

/// ✘: a new counter starts at the clock, which the old one had overtaken; a clock that was set back does the same.
#[tokio::test]
async fn deleting_the_files_takes_back_a_counter_ahead_of_the_clock() {
    let dir = tempfile::tempdir().unwrap();
    let client = LockClient::new(open(dir.path()).await);
    let options = AcquireOptions::new().local_handoffs(AcquireOptions::MAX_LOCAL_HANDOFFS);
    let lock = client.lock("a").unwrap().with_options(options);
    let resource = FenceGate::new();
    let started = std::time::Instant::now();
    let mut reserved = Duration::ZERO;
    while reserved < started.elapsed() + 10 * SECOND {
        let guard = lock.acquire().await.unwrap();
        resource.admit(guard.token()).unwrap();
        guard.release().await.unwrap();
        // A token is worth a microsecond of the clock.
        reserved += Duration::from_micros(u64::from(AcquireOptions::MAX_LOCAL_HANDOFFS) + 1);
    }
    for file in ["a.lock", "a.ceiling"] {
        fs::remove_file(dir.path().join(file)).unwrap();
    }
    let guard = lock.acquire().await.unwrap();
    assert!(
        resource.admit(guard.token()).is_err(),
        "a rightful holder is refused"
    );
}

/// A holder in another process, killed at the end of the test, however the test ends.
struct Holder(Child);

impl Holder {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "guarantees::holder_process", "--nocapture"])
            .env("LOCKKIT_GUARANTEES_DIR", dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let holder = Self(child);
        let held = output.lines().any(|line| line.unwrap().ends_with("holding"));
        assert!(held, "the other process holds");
        holder
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process of a [`Holder`], which runs it: no test of its own.
#[tokio::test]
async fn holder_process() {
    let Some(dir) = std::env::var_os("LOCKKIT_GUARANTEES_DIR") else {
        return;
    };
    let client = LockClient::new(open(Path::new(&dir)).await);
    let options = AcquireOptions::new().ttl(50 * MS);
    let _guard = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
    println!("holding");
    std::future::pending::<()>().await;
}

/// ✘ in A, which is why there is none in ME: the process holds the lock for as long as it is there.
#[tokio::test]
async fn a_stopped_holder_keeps_the_lock_until_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Holder::start(dir.path());
    holder.signal(Signal::STOP);
    let client = LockClient::new(open(dir.path()).await);
    let lock = client.lock("a").unwrap();
    // Several times its ttl.
    let mut late = lock.acquire_timeout(300 * MS).await;
    for _ in 0..50 {
        // A busy machine may not say in time that it is taken.
        if late
            .as_ref()
            .is_err_and(|err| err.is_transient() && !err.is_timeout())
        {
            late = lock.acquire_timeout(300 * MS).await;
        }
    }
    assert!(
        late.as_ref().is_err_and(lockkit_core::Error::is_timeout),
        "{late:?}"
    );
    holder.signal(Signal::KILL);
    lock.acquire_timeout(20 * SECOND)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}
