//! What it costs to wait for a file lock, by the kernel's own accounts.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

const PROCESSES: usize = 100;

/// A process that waits for the lock. It is killed and reaped on drop.
struct Waiter {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Waiter {
    fn spawn(url: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_waiter"))
            .arg(url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), word);
    }

    /// How long it has been on a processor, in hundredths of a second: the unit of `/proc` on Linux.
    fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_hundred_waiting_processes_use_less_than_two_hundredths_of_a_core() {
    let _processors = crate::PROCESSORS.lock();
    crate::current_thread().block_on(a_hundred_waiting_processes());
}

async fn a_hundred_waiting_processes() {
    const SECONDS: u64 = 10;
    let dir = std::env::temp_dir().join(format!("lockkit-waiting-{}", std::process::id()));
    let url = format!("file://{}", dir.display());
    let guard = lockkit::connect(&url)
        .await
        .unwrap()
        .lock("name")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let mut waiters: Vec<_> = (0..PROCESSES).map(|_| Waiter::spawn(&url)).collect();
    for waiter in &mut waiters {
        waiter.expect("waiting");
    }
    let ticks = |waiters: &[Waiter]| waiters.iter().map(Waiter::ticks).sum::<u64>();
    // What their start takes is no part of it; on a busy machine it goes on after they have asked for the lock.
    let mut before = ticks(&waiters);
    let mut rest = false;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = ticks(&waiters);
        rest = std::mem::replace(&mut before, now) == now;
        if rest {
            break;
        }
    }
    assert!(rest, "they never come to rest");
    tokio::time::sleep(Duration::from_secs(SECONDS)).await;
    let used = ticks(&waiters) - before;
    println!("{used} hundredths of a second of processor time in {SECONDS} s for {PROCESSES} processes");
    assert!(used < 2 * SECONDS, "{used} hundredths of a second in {SECONDS} s");
    guard.release().await.unwrap();
    for waiter in &mut waiters {
        waiter.expect("granted");
    }
    drop(waiters);
    std::fs::remove_dir_all(dir).unwrap();
}
