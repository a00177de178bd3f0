//! A holder or waiter in another process, to be killed and stopped.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{ChildStdout, Command, Stdio},
    time::Duration,
};

use lockkit_conformance::process::Process;
use lockkit_core::AcquireOptions;
use lockkit_mysql::Mode;
use lockkit_testbed::mysql::Flavour;

use crate::servers::{client, name, run, shared};

const ORDER: &str = "LOCKKIT_MYSQL_CHILD";
const MARK: &str = "lockkit-child: ";

/// A process that holds a lock until it ends.
pub(crate) struct Child {
    pub(crate) process: Process,
    pub(crate) token: u64,
}

impl Child {
    /// Returns once it holds.
    pub(crate) fn hold(addr: SocketAddr, name: &str, ttl: Duration) -> Self {
        let (process, output) = Self::start(addr, Mode::ForUpdate, name, ttl);
        let token = output
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(MARK)?.1.parse().ok())
            .expect("the child holds");
        Self { process, token }
    }

    /// Returns before it asks for the lock. Without its output it would end.
    pub(crate) fn start(
        addr: SocketAddr,
        mode: Mode,
        name: &str,
        ttl: Duration,
    ) -> (Process, BufReader<ChildStdout>) {
        let mode = u8::from(mode == Mode::Lease);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child::holds", "--nocapture", "--test-threads=1"])
            .env(ORDER, format!("{addr} {mode} {} {name}", ttl.as_millis()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command).unwrap();
        let output = BufReader::new(process.child().stdout.take().unwrap());
        (process, output)
    }
}

/// Has a child hold. The child runs this, too, and holds.
#[test]
fn holds() {
    let Ok(order) = std::env::var(ORDER) else {
        return run(Flavour::MariaDb, |flavour| async move {
            let (addr, name) = (shared(flavour).addr(), name("child"));
            let mut child = Child::hold(addr, &name, Duration::from_secs(30));
            let lock = client(addr, Mode::ForUpdate).await.lock(&name).unwrap();
            assert!(lock.try_acquire().await.unwrap().is_none());
            child.process.kill().unwrap();
            assert!(lock.acquire().await.unwrap().token().get() > child.token);
        });
    };
    let mut words = order.splitn(4, ' ');
    let addr = words.next().and_then(|addr| addr.parse().ok()).unwrap();
    let mode = match words.next() {
        Some("1") => Mode::Lease,
        _ => Mode::ForUpdate,
    };
    let ttl = words.next().and_then(|ttl| ttl.parse().ok()).unwrap();
    let name = words.next().unwrap().to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let options = AcquireOptions::new().ttl(Duration::from_millis(ttl));
        let client = client(addr, mode).await;
        let guard = client.lock(&name).unwrap().acquire_with(&options).await.unwrap();
        println!("{MARK}{}", guard.token().get());
        // Ends with its parent process.
        let end = tokio::task::spawn_blocking(|| std::io::stdin().lines().count());
        let _ = end.await;
        std::process::exit(0);
    });
}
