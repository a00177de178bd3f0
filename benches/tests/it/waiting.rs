//! The cost of waiting for a file lock, by the kernel's own accounts.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use lockkit_benches::processor::{processor_time, wake_ups};

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
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_hundred_waiting_processes_wake_thrice_a_second_at_most() {
    let _processors = crate::PROCESSORS.lock();
    crate::current_thread().block_on(a_hundred_waiting_processes());
}

async fn a_hundred_waiting_processes() {
    const STRETCH: Duration = Duration::from_secs(20);
    const MOST: u64 = 3 * STRETCH.as_secs() * PROCESSES as u64;
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
    let ids = || waiters.iter().map(|waiter| waiter.child.id());
    let woken = || ids().map(|id| wake_ups(id).unwrap()).sum::<u64>();
    let took = || ids().map(|id| processor_time(id).unwrap()).sum::<Duration>();
    // Their start takes more. The least counts.
    let mut least = u64::MAX;
    for _ in 0..3 {
        let before = (woken(), took());
        tokio::time::sleep(STRETCH).await;
        let woken = woken() - before.0;
        let took = took().checked_sub(before.1).unwrap();
        println!("{woken} wake-ups and {took:?} of processor time in {STRETCH:?} for {PROCESSES} processes");
        least = least.min(woken);
        if least <= MOST {
            break;
        }
    }
    assert!(least <= MOST, "{least} wake-ups in {STRETCH:?}");
    guard.release().await.unwrap();
    for waiter in &mut waiters {
        waiter.expect("granted");
    }
    drop(waiters);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_processor_time_of_a_busy_process_is_told() {
    let mut idle = Command::new("sleep").arg("60").spawn().unwrap();
    let busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
    let mut busy = busy.unwrap();
    let began = Instant::now();
    while processor_time(busy.id()).unwrap() < Duration::from_millis(50) {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "it has not worked for 50 ms"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = began.elapsed();
    let worked = processor_time(busy.id()).unwrap();
    assert!(
        worked <= began.elapsed() + Duration::from_millis(1),
        "{worked:?} in {took:?} by one thread"
    );
    let slept = processor_time(idle.id()).unwrap();
    assert!(slept < Duration::from_millis(50), "{slept:?} by who sleeps");
    for child in [&mut busy, &mut idle] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    processor_time(busy.id()).expect_err("it is gone");
}

#[test]
fn the_wake_ups_of_a_process_are_told() {
    // A process for each wait, so that its parent is woken by the end of each.
    let mut waits = Command::new("sh")
        .args([
            "-c",
            "for i in 1 2 3 4 5 6 7 8; do sleep 0.01; done; echo; read last",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(waits.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    let woken = wake_ups(waits.id()).unwrap();
    assert!((8..1_000).contains(&woken), "{woken}");
    waits.kill().unwrap();
    waits.wait().unwrap();
    wake_ups(waits.id()).expect_err("it is gone");
}
