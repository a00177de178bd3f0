//! What it costs to wait for a file lock, by the kernel's own accounts.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use nix::{time::clock_getcpuclockid, unistd::Pid};

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

    /// How long it has been on a processor, all its threads together and to the nanosecond. `/proc` tells it in
    /// hundredths of a second only: processes that are alike then step from one to the next together, and a second of
    /// processor time appears that nobody has used.
    fn processor_time(&self) -> Duration {
        let clock = clock_getcpuclockid(Pid::from_raw(self.child.id().try_into().unwrap())).unwrap();
        clock.now().unwrap().into()
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
    const STRETCH: Duration = Duration::from_secs(20);
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
    let processor_time = || waiters.iter().map(Waiter::processor_time).sum::<Duration>();
    // Their start takes more, and for a second they look often. The least counts: a busy machine can only add to it.
    let mut least = Duration::MAX;
    for _ in 0..3 {
        let before = processor_time();
        tokio::time::sleep(STRETCH).await;
        let used = processor_time().checked_sub(before).unwrap();
        println!("{used:?} of processor time in {STRETCH:?} for {PROCESSES} processes");
        least = least.min(used);
        if least < STRETCH / 50 {
            break;
        }
    }
    assert!(least < STRETCH / 50, "{least:?} in {STRETCH:?}");
    guard.release().await.unwrap();
    for waiter in &mut waiters {
        waiter.expect("granted");
    }
    drop(waiters);
    std::fs::remove_dir_all(dir).unwrap();
}
