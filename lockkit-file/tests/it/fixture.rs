//! Backends and claims on a test's directory, and other processes that share it.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use lockkit_core::{
    LockClient, LockName,
    spi::{Backend, Claim, ClaimRequest, Grant, Mode, OwnerId, chain},
};
use lockkit_file::{FileBackend, FileConfig};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const TTL: Duration = Duration::from_secs(30);
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
pub(crate) const TRY: Duration = Duration::ZERO;
/// Far longer than any step takes, and far shorter than the fallback poll of [`open`].
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Opens a backend whose waiters do not poll within the test.
pub(crate) async fn open(dir: &Path) -> FileBackend {
    let mut config = FileConfig::new(dir);
    config.poll = Some(Duration::from_secs(3_600));
    FileBackend::open(config).await.unwrap()
}

pub(crate) fn name(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

pub(crate) fn request(lock: &str, mode: Mode) -> ClaimRequest {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).unwrap();
    ClaimRequest::new(name(lock), mode, TTL, OwnerId::new(u128::from_le_bytes(bits)))
}

pub(crate) async fn claim(backend: &FileBackend, lock: &str, mode: Mode) -> Box<dyn Claim> {
    backend.claim(&request(lock, mode)).await.unwrap()
}

pub(crate) fn permits(count: u32) -> Mode {
    Mode::Permits(NonZeroU32::new(count).unwrap())
}

/// Waits for the grant as the driver would, but without its fallback poll.
pub(crate) async fn granted(claim: &mut Box<dyn Claim>) -> Grant {
    let wait = async {
        loop {
            if let Some(grant) = claim.attempt(PATIENCE).await.unwrap() {
                return grant;
            }
            claim.notified().await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("granted in time")
}

/// Returns a backend in `dir`, and a claim of it that holds `n` in this mode.
pub(crate) async fn held(dir: &Path, mode: Mode) -> (FileBackend, Box<dyn Claim>) {
    let backend = open(dir).await;
    let mut holder = claim(&backend, "n", mode).await;
    granted(&mut holder).await;
    (backend, holder)
}

/// Returns a backend in `dir`, and two of its claims on `n`: one that holds it in this mode, and one that waits for it.
pub(crate) async fn held_and_waited_for(dir: &Path, mode: Mode) -> (FileBackend, [Box<dyn Claim>; 2]) {
    let (backend, holder) = held(dir, mode).await;
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    (backend, [holder, waiter])
}

/// Returns the tickets of those who wait for `n`.
pub(crate) fn tickets(dir: &Path) -> Vec<PathBuf> {
    let queue = dir.join("lockkit/n.queue");
    if queue.exists() { files(&queue) } else { Vec::new() }
}

/// Counts how often a waiter retries by itself, until it stops.
pub(crate) async fn looks(waiter: &mut Box<dyn Claim>) -> u32 {
    let mut looks = 0;
    while looks < 16
        && tokio::time::timeout(Duration::from_secs(2), waiter.notified())
            .await
            .is_ok()
    {
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
        looks += 1;
    }
    looks
}

/// Returns the files in `dir` and below.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A child that is killed at the end of the test, however the test ends.
pub(crate) struct Killed(pub(crate) Child);

impl Killed {
    /// Returns when it has stopped.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        waitpid(Some(Pid::from_child(&self.0)), WaitOptions::UNTRACED).unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child of a child, killed once, at the latest at the end of the test.
pub(crate) struct Orphan(pub(crate) Option<Pid>);

impl Orphan {
    pub(crate) fn kill(&mut self) {
        if let Some(process) = self.0.take() {
            kill_process(process, Signal::KILL).unwrap();
        }
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) const ROLE: &str = "LOCKKIT_FILE_TEST_ROLE";
pub(crate) const DIR: &str = "LOCKKIT_FILE_TEST_DIR";

/// Starts this test binary again, in one of the roles of [`other_process`], and waits for its line `ready …`. Returns
/// the rest of that line.
pub(crate) fn other(role: &str, dir: &Path) -> (Killed, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fixture::other_process", "--nocapture"])
        .envs([(ROLE, OsStr::new(role)), (DIR, dir.as_os_str())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let child = Killed(child);
    let said = lines.find_map(|line| Some(line.unwrap().split_once("ready")?.1.trim().to_owned()));
    let said = said.expect("the other process ended early");
    // Its later output must not fail.
    std::thread::spawn(move || lines.for_each(drop));
    (child, said)
}

/// The other process, which [`other`] runs: no test of its own. Without a role, it does nothing.
#[tokio::test]
async fn other_process() {
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let backend = open(Path::new(&std::env::var_os(DIR).unwrap())).await;
    let mode = match role.to_str().unwrap() {
        "share" | "share with a child" => Mode::Shared,
        "permit" | "permit with a child" => permits(1),
        "look for one of 300" => permits(300),
        _ => Mode::Exclusive,
    };
    let mut claim = claim(&backend, "n", mode).await;
    if role == "wait" {
        assert_eq!(claim.attempt(PATIENCE).await.unwrap(), None);
        println!("ready");
        granted(&mut claim).await;
        return;
    }
    if role == "wait with a client" {
        println!("ready");
        let client = LockClient::new(backend);
        let guard = client.lock("n").unwrap().acquire().await.unwrap();
        guard.release().await.unwrap();
        return;
    }
    if role == "look for one of 300" {
        println!("ready");
        while claim.attempt(PATIENCE).await.unwrap().is_none() {}
        return;
    }
    if role == "full" {
        let error = claim.attempt(TRY).await.unwrap_err();
        println!("ready {}", chain(&error));
        return;
    }
    granted(&mut claim).await;
    #[cfg(target_os = "linux")]
    if role == "give up without descriptors" {
        use lockkit_core::spi::Renewal;
        use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

        println!("ready");
        while claim.renew().await.unwrap() != Renewal::Asked {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let current = Some(3);
        prlimit(None, Resource::Nofile, Rlimit { current, maximum }).unwrap();
        claim.release().await.unwrap();
        return;
    }
    let mut child = String::new();
    if role.to_str().unwrap().ends_with("with a child") {
        let descriptor = claim.descriptor().unwrap();
        let spawned = Command::new("sleep")
            .arg("600")
            .stdin(descriptor)
            .stdout(Stdio::null())
            .spawn();
        child = spawned.unwrap().id().to_string();
    }
    println!("ready {child}");
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()))
        .await
        .unwrap()
        .unwrap();
}
