//! The file backend at its contract: what the driver would see.

use std::{
    ffi::OsStr,
    fs,
    future::{Future, poll_fn},
    io::{BufRead, BufReader},
    num::NonZeroU32,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    pin::pin,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use lockkit_conformance::machine::Stopwatch;
use lockkit_core::{
    AcquireOptions, Error, FencingToken, LockClient, LockKind, LockName, LossReason,
    spi::{Backend, Claim, ClaimRequest, Grant, Mode, OwnerId, Renewal, chain},
};
use lockkit_file::{FileBackend, FileConfig};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;

const TTL: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(1);
const TRY: Duration = Duration::ZERO;
/// Far beyond what any step takes, and far below the fallback poll of [`open`].
const LIMIT: Duration = Duration::from_secs(20);

/// A backend whose waiters cannot fall back on polling within the test.
async fn open(dir: &Path) -> FileBackend {
    let mut config = FileConfig::new(dir);
    config.poll = Some(Duration::from_secs(3_600));
    FileBackend::open(config).await.unwrap()
}

async fn refusal(dir: impl Into<PathBuf>) -> Error {
    FileBackend::open(FileConfig::new(dir)).await.unwrap_err()
}

fn name(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

fn request(lock: &str, mode: Mode) -> ClaimRequest {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).unwrap();
    ClaimRequest::new(name(lock), mode, TTL, OwnerId::new(u128::from_le_bytes(bits)))
}

async fn claim(backend: &FileBackend, lock: &str, mode: Mode) -> Box<dyn Claim> {
    backend.claim(&request(lock, mode)).await.unwrap()
}

fn permits(count: u32) -> Mode {
    Mode::Permits(NonZeroU32::new(count).unwrap())
}

/// Grants or fails the test, as the driver would wait but without its fallback poll.
async fn granted(claim: &mut Box<dyn Claim>) -> Grant {
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

/// Waits until `condition` holds.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

/// Polls on a thread that has no runtime, as another executor would.
fn outside<F: Future + Send>(future: F) -> F::Output
where
    F::Output: Send,
{
    std::thread::scope(|scope| {
        let polling = scope.spawn(|| {
            let mut future = pin!(future);
            let mut cx = Context::from_waker(Waker::noop());
            loop {
                if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                    return output;
                }
                std::thread::yield_now();
            }
        });
        polling.join().expect("no panic outside of a runtime")
    })
}

/// The tickets of those who wait for `n`.
fn tickets(dir: &Path) -> Vec<PathBuf> {
    let queue = dir.join("lockkit/n.queue");
    if queue.exists() { files(&queue) } else { Vec::new() }
}

/// The number of times that a waiter looks by itself, until it does no more.
async fn looks(waiter: &mut Box<dyn Claim>) -> u32 {
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

/// The files in `dir` and below.
fn files(dir: &Path) -> Vec<PathBuf> {
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

/// A child that is killed when the test is over, however that ends.
struct Killed(Child);

impl Killed {
    /// Returns when it has stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        waitpid(Some(Pid::from_child(&self.0)), WaitOptions::UNTRACED).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn kill(&mut self) {
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

/// A child of a child, killed once, when the test is over at the latest.
struct Orphan(Option<Pid>);

impl Orphan {
    fn kill(&mut self) {
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

const ROLE: &str = "LOCKKIT_FILE_TEST_ROLE";
const DIR: &str = "LOCKKIT_FILE_TEST_DIR";

/// This test binary again, in one of the roles of [`other_process`], once it has printed a line that begins with
/// `ready`. Returns the rest of that line.
fn other(role: &str, dir: &Path) -> (Killed, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "file::other_process", "--nocapture"])
        .envs([(ROLE, OsStr::new(role)), (DIR, dir.as_os_str())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let child = Killed(child);
    let said = lines.find_map(|line| Some(line.unwrap().split_once("ready")?.1.trim().to_owned()));
    let said = said.expect("the other process ended early");
    // Whatever it says later must not fail.
    std::thread::spawn(move || lines.for_each(drop));
    (child, said)
}

#[test]
fn outside_of_a_runtime_everything_is_an_error() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let dir = TempDir::new().unwrap();
    let backend = runtime.block_on(open(dir.path()));
    let client = runtime.block_on(async { LockClient::new(backend) });
    let lock = client.lock("a").unwrap();
    assert!(outside(lock.acquire()).is_err());
    assert!(outside(lock.try_acquire()).is_err());
    assert!(outside(lock.shared().acquire()).is_err());
    assert!(outside(client.semaphore("a", 1).unwrap().acquire()).is_err());
    assert!(outside(client.inspect("a")).is_err());
}

/// Not a test of its own: what [`other`] runs. Without a role there is nothing to do.
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

#[tokio::test]
async fn one_holds_and_the_tokens_rise() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let (mut first, mut second) = (
        claim(&a, "n", Mode::Exclusive).await,
        claim(&b, "n", Mode::Exclusive).await,
    );
    let mut last = 0;
    for _ in 0..10 {
        let grant = first.attempt(TRY).await.unwrap().unwrap();
        assert!(*grant.tokens.start() > last, "{grant:?} after {last}");
        last = *grant.tokens.end();
        assert_eq!(second.attempt(TRY).await.unwrap(), None);
        assert!(matches!(first.renew().await.unwrap(), Renewal::Held(lease) if lease.length.is_none()));
        first.release().await.unwrap();
        first.release().await.unwrap();
        std::mem::swap(&mut first, &mut second);
    }
}

#[tokio::test]
async fn as_many_tokens_are_reserved_as_are_asked_for() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut request = request("n", Mode::Exclusive);
    request.tokens = NonZeroU32::new(33).unwrap();
    let mut claim = backend.claim(&request).await.unwrap();
    let first = claim.attempt(TRY).await.unwrap().unwrap().tokens;
    assert_eq!(first.clone().count(), 33);
    claim.release().await.unwrap();
    let second = claim.attempt(TRY).await.unwrap().unwrap().tokens;
    assert_eq!(*second.start(), *first.end() + 1);
}

#[tokio::test]
async fn names_kinds_and_namespaces_are_apart() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut config = FileConfig::new(dir.path());
    config.namespace = String::new();
    let elsewhere = FileBackend::open(config).await.unwrap();
    let names = [
        "n", "N", "/", "\0", "..", ".", "%2e", "n.lock", "é", "e\u{301}", "🔒",
    ];
    let long = ["a".repeat(1_024), "b".repeat(1_024), "A".repeat(1_024)];
    let mut held = Vec::new();
    for name in names.into_iter().chain(long.iter().map(String::as_str)) {
        for backend in [&backend, &elsewhere] {
            for mode in [Mode::Exclusive, permits(1)] {
                let mut claim = claim(backend, name, mode).await;
                assert!(claim.attempt(TRY).await.unwrap().is_some(), "{name:?} {mode:?}");
                held.push(claim);
            }
        }
    }
    let mut again = claim(&backend, &long[0], Mode::Exclusive).await;
    assert_eq!(
        again.attempt(TRY).await.unwrap(),
        None,
        "a long name still excludes itself"
    );
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_release_wakes_a_waiter() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    assert!(b.info().capabilities.notified);
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        let holds = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let mut holder = claim(&a, "n", holds).await;
        granted(&mut holder).await;
        let mut waiter = claim(&b, "n", mode).await;
        // There is nothing left but to be told.
        looks(&mut waiter).await;
        let ((), woken) = tokio::join!(
            async {
                holder.release().await.unwrap();
            },
            granted(&mut waiter)
        );
        assert!(*woken.tokens.start() > 0);
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn an_event_is_remembered_until_the_next_attempt() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let (mut holder, mut waiter) = (
        claim(&backend, "n", Mode::Exclusive).await,
        claim(&backend, "n", Mode::Exclusive).await,
    );
    granted(&mut holder).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    holder.release().await.unwrap();
    for _ in 0..10 {
        tokio::time::timeout(LIMIT, waiter.notified()).await.unwrap();
    }
    assert!(waiter.attempt(PATIENCE).await.unwrap().is_some());
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_looks_again_soon_after_an_event_and_then_no_more() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    let lock = dir.path().join("lockkit/n.lock");
    for _ in 0..2 {
        let looks = looks(&mut waiter).await;
        assert!((10..16).contains(&looks), "{looks}");
        // Whoever else wakes it, for minutes.
        for _ in 0..100 {
            assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
        }
        // As when a killed holder's descriptor is closed before its lock is gone.
        drop(fs::File::options().write(true).open(&lock).unwrap());
    }
}

#[tokio::test]
async fn a_killed_holder_lets_the_waiter_in_and_is_not_shown() {
    for (role, mode, kind) in [
        ("hold", Mode::Exclusive, LockKind::Lock),
        ("share", Mode::Exclusive, LockKind::Lock),
        ("permit", permits(1), LockKind::Semaphore),
    ] {
        let dir = TempDir::new().unwrap();
        let (mut process, _) = other(role, dir.path());
        let backend = open(dir.path()).await;
        let mut waiter = claim(&backend, "n", mode).await;
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None, "{role}");
        assert_eq!(
            backend.inspect(&name("n"), kind).await.unwrap().holders.len(),
            1,
            "{role}"
        );
        let ((), grant) = tokio::join!(async { process.kill() }, granted(&mut waiter));
        let holders = backend.inspect(&name("n"), kind).await.unwrap().holders;
        assert_eq!(holders.len(), 1, "{role}: only the new one");
        assert_eq!(holders[0].token.get(), *grant.tokens.start());
        waiter.release().await.unwrap();
        assert!(
            backend.inspect(&name("n"), kind).await.unwrap().is_free(),
            "{role}"
        );
        let left: Vec<_> = files(dir.path())
            .into_iter()
            .filter(|path| {
                path.parent()
                    .unwrap()
                    .extension()
                    .is_some_and(|kind| kind == "readers")
            })
            .collect();
        assert!(left.is_empty(), "a killed reader's file is removed: {left:?}");
    }
}

#[tokio::test]
async fn a_killed_holder_that_nobody_follows_is_not_shown() {
    let dir = TempDir::new().unwrap();
    let (mut process, _) = other("hold", dir.path());
    let backend = open(dir.path()).await;
    assert!(
        !backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    process.kill();
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
}

#[tokio::test]
async fn a_release_frees_the_lock_although_a_child_has_the_descriptor() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut holder = claim(&a, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let descriptor = holder.descriptor().unwrap();
    let mut child = Killed(
        Command::new("sleep")
            .arg("600")
            .stdin(descriptor)
            .spawn()
            .unwrap(),
    );
    let mut waiter = claim(&b, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    holder.release().await.unwrap();
    assert!(holder.descriptor().is_none());
    granted(&mut waiter).await;
    assert!(child.0.try_wait().unwrap().is_none(), "the child still runs");
}

#[tokio::test]
async fn a_child_keeps_the_lock_of_its_killed_parent() {
    for (role, mode) in [
        ("hold with a child", Mode::Exclusive),
        ("share with a child", Mode::Exclusive),
        ("permit with a child", permits(1)),
    ] {
        let dir = TempDir::new().unwrap();
        let (mut process, child) = other(role, dir.path());
        let mut child = Orphan(Pid::from_raw(child.parse().unwrap()));
        process.kill();
        let backend = open(dir.path()).await;
        let mut waiter = claim(&backend, "n", mode).await;
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
        assert!(!backend.inspect(&name("n"), mode.kind()).await.unwrap().is_free());
        if cfg!(target_os = "linux") {
            // There is nothing left but to be told.
            looks(&mut waiter).await;
        }
        child.kill();
        let wait = tokio::time::timeout(LIMIT, granted(&mut waiter));
        assert!(wait.await.is_ok(), "{role}: told of the child's end");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn whatever_of_the_files_is_moved_the_holder_is_told() {
    for (mode, what) in [
        (Mode::Exclusive, "at/locks/lockkit/n.lock"),
        (Mode::Exclusive, "at/locks/lockkit"),
        (Mode::Shared, "at/locks"),
        (Mode::Exclusive, "at"),
        (permits(1), "at/locks/lockkit/n.permits/0"),
        (permits(1), "at/locks/lockkit/n.permits"),
        (permits(1), "at/locks/lockkit/n.sem"),
        (permits(1), "at/locks"),
    ] {
        for (deleted, watched) in [(false, false), (false, true), (true, false), (true, true)] {
            let dir = TempDir::new().unwrap();
            let locks = dir.path().join("at/locks");
            let (a, b) = (open(&locks).await, open(&locks).await);
            let mut holder = claim(&a, "n", mode).await;
            granted(&mut holder).await;
            let rival = if mode == Mode::Shared {
                Mode::Exclusive
            } else {
                mode
            };
            let mut waiter = claim(&b, "n", rival).await;
            assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
            if watched {
                assert!(polled(1, holder.notified()).await.is_none());
            }
            let what = dir.path().join(what);
            if !deleted {
                fs::rename(&what, dir.path().join("moved")).unwrap();
            } else if what.is_dir() {
                fs::remove_dir_all(&what).unwrap();
            } else {
                fs::remove_file(&what).unwrap();
            }
            let what = format!(
                "{mode:?}: {}, deleted: {deleted}, watched: {watched}",
                what.display()
            );
            let told = tokio::time::timeout(LIMIT, holder.notified()).await;
            assert!(told.is_ok(), "nobody told the holder: {what}");
            assert_eq!(
                holder.renew().await.unwrap(),
                Renewal::Lost(LossReason::Revoked),
                "{what}"
            );
            if what.contains("n.sem") {
                // The permit is still there.
                assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None, "{what}");
                holder.release().await.unwrap_err();
            }
            granted(&mut waiter).await;
            drop(holder);
            assert!(
                matches!(waiter.renew().await.unwrap(), Renewal::Held(_)),
                "{what}"
            );
        }
    }
}

#[tokio::test]
async fn a_directory_that_is_moved_again_is_told_again() {
    let dir = TempDir::new().unwrap();
    let locks = dir.path().join("locks");
    let backend = open(&locks).await;
    for round in 0..3 {
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        granted(&mut holder).await;
        assert!(polled(1, holder.notified()).await.is_none());
        fs::rename(&locks, dir.path().join(round.to_string())).unwrap();
        if cfg!(target_os = "linux") {
            let told = tokio::time::timeout(LIMIT, holder.notified()).await;
            assert!(told.is_ok(), "nobody told the holder in round {round}");
        }
        assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
    }
}

/// Others come and go, and each tells the holder.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_busy_semaphore_makes_no_holder_deaf() {
    let dir = TempDir::new().unwrap();
    let semaphore = |backend| LockClient::new(backend).semaphore("n", 2).unwrap();
    let guard = semaphore(open(dir.path()).await).acquire().await.unwrap();
    let slot = dir.path().join("lockkit/n.permits/0");
    let other = slot.with_file_name("1");
    let held = if slot.exists() { slot } else { other };
    let touched = held.clone();
    let busy = move || {
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            drop(fs::File::options().write(true).open(&touched).unwrap());
        }
    };
    tokio::task::spawn_blocking(busy).await.unwrap();
    fs::remove_file(held).unwrap();
    let told = tokio::time::timeout(Duration::from_secs(3), guard.lost()).await;
    assert_eq!(told, Ok(LossReason::Revoked), "its next check is seconds away");
}

/// It has no lease to end by.
#[tokio::test]
async fn a_hold_ends_with_its_runtime_although_its_guard_is_kept() {
    let dir = TempDir::new().unwrap();
    let first = tokio::runtime::Runtime::new().unwrap();
    let at = dir.path().to_owned();
    let acquired = first.spawn(async move {
        let guard = LockClient::new(open(&at).await)
            .lock("n")
            .unwrap()
            .acquire()
            .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        guard.unwrap()
    });
    let guard = acquired.await.unwrap();
    first.shutdown_background();
    assert_eq!(guard.lost().await, LossReason::Disconnected);
    let mut next = claim(&open(dir.path()).await, "n", Mode::Exclusive).await;
    granted(&mut next).await;
    drop(guard);
    assert!(matches!(next.renew().await.unwrap(), Renewal::Held(_)));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_waiter_moves_on_to_the_permits_that_are_there_now() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut holder = claim(&a, "n", permits(1)).await;
    granted(&mut holder).await;
    let mut waiter = claim(&b, "n", permits(1)).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    looks(&mut waiter).await;
    let slots = dir.path().join("lockkit/n.permits");
    fs::rename(&slots, dir.path().join("moved")).unwrap();
    let mut next = claim(&a, "n", permits(1)).await;
    granted(&mut next).await;
    assert!(looks(&mut waiter).await > 0, "nobody told the waiter of the move");
    next.release().await.unwrap();
    let told = tokio::time::timeout(LIMIT, waiter.notified()).await;
    assert!(told.is_ok(), "nobody told the waiter");
    granted(&mut waiter).await;
    let quiet = Duration::from_secs(1);
    while tokio::time::timeout(quiet, waiter.notified()).await.is_ok() {
        assert!(matches!(waiter.renew().await.unwrap(), Renewal::Held(_)));
    }
    fs::remove_file(slots.join("0")).unwrap();
    let told = tokio::time::timeout(LIMIT, waiter.notified()).await;
    assert!(told.is_ok(), "nobody told the holder");
    assert_eq!(waiter.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
}

/// It was polled while nobody held the lock, and then it was forgotten.
#[tokio::test]
async fn a_grant_that_nobody_takes_lapses() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (
        LockClient::new(open(dir.path()).await),
        LockClient::new(open(dir.path()).await),
    );
    // The first grant of a name waits for the disk.
    for (name, wait) in [("a", LIMIT), ("b", 2 * LIMIT)] {
        let options = AcquireOptions::new().ttl(Duration::from_millis(300));
        let (one, two) = (one.lock(name).unwrap(), two.lock(name).unwrap());
        let (one, two) = (one.with_options(options.clone()), two.with_options(options));
        let mut forgotten = Box::pin(one.acquire_timeout(wait));
        assert!(polled(1, &mut forgotten).await.is_none());
        // It is granted by then.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let guard = two.acquire_timeout(LIMIT).await.unwrap();
        guard.release().await.unwrap();
        let guard = forgotten.await.unwrap();
        assert!(guard.is_held());
        assert!(two.try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_deleted_file_is_a_lost_hold_and_tokens_rise() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
        let mut holder = claim(&a, "n", mode).await;
        let before = granted(&mut holder).await;
        for file in files(dir.path()) {
            fs::remove_file(file).unwrap();
        }
        if cfg!(target_os = "linux") {
            tokio::time::timeout(LIMIT, holder.notified())
                .await
                .expect("told of the deletion");
        }
        assert_eq!(
            holder.renew().await.unwrap(),
            Renewal::Lost(LossReason::Revoked),
            "{mode:?}"
        );
        let mut next = claim(&b, "n", mode).await;
        let after = next.attempt(TRY).await.unwrap().expect("a new file is free");
        assert!(after.tokens.start() > before.tokens.end(), "{before:?} {after:?}");
        let error = holder.release().await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::Revoked,
                    ..
                }
            ),
            "{error}"
        );
        holder.release().await.unwrap();
        assert!(
            matches!(next.renew().await.unwrap(), Renewal::Held(_)),
            "harmless to the next holder"
        );
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_moves_on_to_the_file_that_replaced_a_deleted_one() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    fs::remove_dir_all(dir.path().join("lockkit")).unwrap();
    granted(&mut waiter).await;
    assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
}

#[tokio::test]
async fn symbolic_links_and_other_things_in_the_way_are_refused() {
    let dir = TempDir::new().unwrap();
    let real = dir.path().join("real");
    fs::create_dir(&real).unwrap();
    let link = dir.path().join("link");
    symlink(&real, &link).unwrap();
    for path in [
        link.clone(),
        link.join("."),
        PathBuf::from(format!("{}/", link.display())),
    ] {
        let error = chain(&refusal(&path).await);
        assert!(error.contains("link is a symbolic link"), "{error}");
    }
    symlink(dir.path(), real.join("lockkit")).unwrap();
    let error = chain(&refusal(&real).await);
    assert!(error.contains("lockkit is a symbolic link"), "{error}");
    fs::remove_file(real.join("lockkit")).unwrap();

    let backend = open(&real).await;
    let target = dir.path().join("target");
    fs::write(&target, "precious").unwrap();
    symlink(&target, real.join("lockkit/linked.lock")).unwrap();
    let error = claim(&backend, "linked", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(
        chain(&error).contains("linked.lock is a symbolic link"),
        "{}",
        chain(&error)
    );
    assert!(!error.is_transient());
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");

    fs::create_dir(real.join("lockkit/dir.lock")).unwrap();
    let error = claim(&backend, "dir", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(chain(&error).contains("dir.lock"), "{}", chain(&error));

    fs::write(real.join("lockkit/foreign.lock"), "not ours").unwrap();
    let error = claim(&backend, "foreign", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(
        chain(&error).contains("foreign.lock is damaged"),
        "{}",
        chain(&error)
    );
    assert_eq!(
        fs::read_to_string(real.join("lockkit/foreign.lock")).unwrap(),
        "not ours"
    );
}

#[tokio::test]
async fn bad_directories_and_namespaces_are_one_clear_error() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = refusal(&file).await;
    assert!(
        chain(&error).contains("file is a file, not a directory"),
        "{}",
        chain(&error)
    );
    let error = refusal(file.join("below")).await;
    assert!(
        chain(&error).contains(file.join("below").to_str().unwrap()),
        "{}",
        chain(&error)
    );
    for namespace in ["a/b", "a b", "é", "a:b", &"x".repeat(81)] {
        let mut config = FileConfig::new(dir.path());
        config.namespace = namespace.to_owned();
        let error = FileBackend::open(config).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidOptions {
                    option: "namespace",
                    ..
                }
            ),
            "{namespace}: {error}"
        );
    }
    for namespace in [".", "..", "CON", "A"] {
        let mut config = FileConfig::new(dir.path().join("sub"));
        config.namespace = namespace.to_owned();
        let backend = FileBackend::open(config).await.unwrap();
        granted(&mut claim(&backend, "n", Mode::Exclusive).await).await;
    }
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        2,
        "nothing beside the directory"
    );
    assert_eq!(fs::read_dir(dir.path().join("sub")).unwrap().count(), 4);
}

#[tokio::test]
async fn what_is_made_is_for_its_owner_alone() {
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("made/here");
    let backend = open(&dir).await;
    granted(&mut claim(&backend, "n", Mode::Shared).await).await;
    granted(&mut claim(&backend, "n", permits(2)).await).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for path in [&dir, &dir.join("lockkit"), &dir.join("lockkit/n.readers")] {
        assert_eq!(mode(path), 0o700, "{}", path.display());
    }
    for path in files(&dir) {
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    let real = dir.canonicalize().unwrap();
    let server = format!("file://{}", real.display());
    assert!(
        backend.info().server.eq_ignore_ascii_case(&server),
        "{} {server}",
        backend.info().server
    );

    let there = parent.path().join("there");
    fs::create_dir(&there).unwrap();
    fs::set_permissions(&there, fs::Permissions::from_mode(0o750)).unwrap();
    open(&there).await;
    assert_eq!(mode(&there), 0o750, "what was there is left as it was");
}

/// A small file system of its own, for those who may mount one.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path, options: &str) -> Option<Self> {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(at)
            .output();
        mount
            .is_ok_and(|done| done.status.success())
            .then(|| Self(at.to_owned()))
    }

    fn again(&self, options: &str) {
        let done = Command::new("mount")
            .args(["-o", options])
            .arg(&self.0)
            .status()
            .unwrap();
        assert!(done.success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// ✘: nobody is told of a mount, so that the holder finds out when it next looks.
#[tokio::test]
async fn a_mount_over_the_directory_is_found_at_the_next_check() {
    let dir = TempDir::new().unwrap();
    let before = open(dir.path()).await;
    let mut holder = claim(&before, "n", Mode::Exclusive).await;
    let held = granted(&mut holder).await;
    let Some(_mounted) = Mounted::new(dir.path(), "size=64k") else {
        println!("not shown, for want of the right to mount");
        return;
    };
    let after = open(dir.path()).await;
    let mut next = claim(&after, "n", Mode::Exclusive).await;
    assert!(granted(&mut next).await.tokens.start() > held.tokens.end());
    assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
    assert!(matches!(next.renew().await.unwrap(), Renewal::Held(_)));
}

#[tokio::test]
async fn a_read_only_directory_is_one_clear_error() {
    let dir = TempDir::new().unwrap();
    // Who is root may write anywhere but on a read-only file system.
    let _mounted = if rustix::process::getuid().is_root() {
        let Some(mounted) = Mounted::new(dir.path(), "size=64k") else {
            let error = refusal("/proc/lockkit").await;
            println!("root without the right to mount: tried /proc in place of a read-only file system");
            assert!(chain(&error).contains("/proc/lockkit"), "{}", chain(&error));
            return;
        };
        open(dir.path()).await;
        mounted.again("remount,ro");
        Some(mounted)
    } else {
        open(dir.path()).await;
        for path in [dir.path().join("lockkit"), dir.path().to_owned()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o500)).unwrap();
        }
        None
    };
    let error = refusal(dir.path()).await;
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).ok();
    assert!(!error.is_transient());
    assert!(
        chain(&error).contains(dir.path().to_str().unwrap()),
        "{}",
        chain(&error)
    );
}

#[tokio::test]
async fn no_room_for_the_token_is_an_error_and_no_hold() {
    let dir = TempDir::new().unwrap();
    // A limit of no bytes per file fails where a full disk does, and needs no privilege.
    let done = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 0; exec \"$0\" --exact file::other_process --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .envs([(ROLE, OsStr::new("full")), (DIR, dir.path().as_os_str())])
        .stderr(Stdio::inherit())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(
        said.contains("cannot write to") && said.contains("n.lock"),
        "{said}"
    );
    let backend = open(dir.path()).await;
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    granted(&mut claim(&backend, "n", Mode::Exclusive).await).await;
}

#[tokio::test]
async fn a_full_disk_is_an_error_and_no_hold() {
    let dir = TempDir::new().unwrap();
    let Some(_mounted) = Mounted::new(dir.path(), "size=64k") else {
        println!("cannot mount: left to no_room_for_the_token_is_an_error_and_no_hold");
        return;
    };
    let backend = open(dir.path()).await;
    let filler = dir.path().join("filler");
    for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
        assert!(fs::write(&filler, vec![1; 1 << 20]).is_err(), "the disk is full");
        let mut denied = claim(&backend, "n", mode).await;
        let error = denied.attempt(PATIENCE).await.unwrap_err();
        assert!(!error.is_transient());
        assert!(chain(&error).contains("o space left"), "{}", chain(&error));
        let kind = mode.kind();
        assert!(backend.inspect(&name("n"), kind).await.unwrap().is_free());
        fs::remove_file(&filler).unwrap();
        let mut next = claim(&backend, "n", mode).await;
        assert!(
            next.attempt(TRY).await.unwrap().is_some(),
            "the one that failed holds nothing"
        );
        next.release().await.unwrap();
        denied.release().await.unwrap();
        for file in files(dir.path()) {
            fs::remove_file(file).unwrap();
        }
    }
}

#[tokio::test]
async fn a_name_that_hashes_like_another_is_told_apart() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let [one, other] = ["a".repeat(1_000), "b".repeat(1_000)];
    for (name, mode) in [(&one, Mode::Exclusive), (&one, permits(1))] {
        let mut claim = claim(&backend, name, mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
    }
    let taken = files(dir.path());
    for mode in [Mode::Exclusive, permits(1)] {
        let mut claim = claim(&backend, &other, mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
    }
    let extension = |path: &PathBuf| path.extension().map(OsStr::to_owned);
    for path in files(dir.path()) {
        if !taken.contains(&path) && extension(&path).is_some() {
            let forged = taken
                .iter()
                .find(|old| extension(old) == extension(&path))
                .unwrap();
            fs::copy(forged, path).unwrap();
        }
    }
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        let error = claim(&backend, &other, mode)
            .await
            .attempt(TRY)
            .await
            .unwrap_err();
        assert!(!error.is_transient());
        assert!(chain(&error).contains("belongs to the lock"), "{}", chain(&error));
        let error = backend.inspect(&name(&other), mode.kind()).await.unwrap_err();
        assert!(chain(&error).contains("belongs to the lock"), "{}", chain(&error));
    }
}

/// The outcome, or `None` once it has been polled `polls` times without one.
async fn polled<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => {
            left -= 1;
            if left == 0 {
                Poll::Ready(None)
            } else {
                Poll::Pending
            }
        }
    })
    .await
}

#[tokio::test]
async fn an_attempt_dropped_at_any_poll_leaves_nothing_locked() {
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        let dir = TempDir::new().unwrap();
        let (a, b) = (open(dir.path()).await, open(dir.path()).await);
        let rival = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let mut dropped = 0;
        for polls in 1..10 {
            for patience in [TRY, PATIENCE] {
                let mut cancelled = claim(&a, "n", mode).await;
                let outcome = polled(polls, cancelled.attempt(patience)).await;
                dropped += usize::from(outcome.is_none());
                cancelled.release().await.unwrap();
                let mut next = claim(&b, "n", rival).await;
                assert!(
                    next.attempt(TRY).await.unwrap().is_some(),
                    "{mode:?} at poll {polls}"
                );
                next.release().await.unwrap();

                // A name of its own, since nobody waits for its worker.
                let own = format!("{polls}-{patience:?}");
                let mut abandoned = claim(&a, &own, mode).await;
                let mut other = claim(&b, &own, rival).await;
                polled(polls, abandoned.attempt(patience)).await;
                drop(abandoned);
                until("freed", async || other.attempt(TRY).await.unwrap().is_some()).await;

                let mut resumed = claim(&a, "n", mode).await;
                polled(polls, resumed.attempt(patience)).await;
                assert!(
                    resumed.attempt(patience).await.unwrap().is_some(),
                    "goes on with the same claim"
                );
                polled(polls, resumed.renew()).await;
                polled(polls, resumed.release()).await;
                resumed.release().await.unwrap();
                assert!(
                    next.attempt(TRY).await.unwrap().is_some(),
                    "{mode:?} at poll {polls}"
                );
                next.release().await.unwrap();
            }
        }
        assert!(dropped > 0, "some attempts really were dropped");
    }
}

/// Three other processes that wait, in this order, for what `holder` has.
async fn three_wait(dir: &Path, holder: &mut Box<dyn Claim>) -> Vec<Killed> {
    granted(holder).await;
    (0..3).map(|_| other("wait", dir).0).collect()
}

async fn ended(waiter: &mut Killed) {
    until("a waiter is granted", async || {
        waiter.0.try_wait().unwrap().is_some()
    })
    .await;
    assert!(waiter.0.wait().unwrap().success());
}

fn is_waiting(waiter: &mut Killed) -> bool {
    waiter.0.try_wait().unwrap().is_none()
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_killed_waiter_is_in_nobodys_way() {
    for killed in 0..3 {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        waiters[killed].0.kill().unwrap();
        waiters[killed].0.wait().unwrap();
        waiters.remove(killed);
        let watch = Stopwatch::start();
        holder.release().await.unwrap();
        for mut waiter in waiters {
            ended(&mut waiter).await;
        }
        let took = watch.elapsed();
        assert!(
            took < Duration::from_millis(1_500),
            "it is not waited for: {took:?}"
        );
        granted(&mut holder).await;
        assert_eq!(tickets(dir.path()), Vec::<PathBuf>::new(), "{killed}");
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_is_told_when_the_one_before_it_leaves() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let mut quickest = LIMIT;
    for _ in 0..5 {
        let mut before = claim(&backend, "n", Mode::Exclusive).await;
        let mut behind = claim(&backend, "n", Mode::Exclusive).await;
        assert_eq!(before.attempt(PATIENCE).await.unwrap(), None);
        assert_eq!(behind.attempt(PATIENCE).await.unwrap(), None);
        let watch = Stopwatch::start();
        before.release().await.unwrap();
        behind.notified().await;
        quickest = quickest.min(watch.elapsed());
        behind.release().await.unwrap();
    }
    // Without a word it looks after a second.
    assert!(quickest < Duration::from_millis(500), "{quickest:?}");
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_stopped_waiter_is_passed_over_after_two_seconds() {
    for stopped in [&[0][..], &[1], &[0, 1]] {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        for stopped in stopped {
            waiters[*stopped].stop();
        }
        let watch = Stopwatch::start();
        holder.release().await.unwrap();
        let mut last = waiters.pop().unwrap();
        ended(&mut last).await;
        let took = watch.elapsed();
        assert!(took < Duration::from_secs(5), "{stopped:?}: {took:?}");
        if stopped.len() == 2 {
            assert!(took > Duration::from_millis(500), "not before: {took:?}");
        }
        // They have lost their places, and are granted all the same.
        for (at, mut waiter) in waiters.into_iter().enumerate() {
            if stopped.contains(&at) {
                assert!(is_waiting(&mut waiter));
                waiter.signal(Signal::CONT);
            }
            ended(&mut waiter).await;
        }
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_out_of_descriptors_is_passed_over() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let (mut first, _) = other("wait with a client", dir.path());
    until("it waits", async || tickets(dir.path()).len() == 1).await;
    let mut second = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(second.attempt(PATIENCE).await.unwrap(), None);
    let limit = |current| {
        let process = Some(Pid::from_child(&first.0));
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let limit = Rlimit { current, maximum };
        prlimit(process, Resource::Nofile, limit).unwrap().current
    };
    let usual = limit(Some(3));
    let watch = Stopwatch::start();
    holder.release().await.unwrap();
    granted(&mut second).await;
    let took = watch.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    limit(usual);
    second.release().await.unwrap();
    ended(&mut first).await;
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_stopped_holder_keeps_the_order_of_those_who_wait() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let (mut stopped, _) = other("hold", dir.path());
    let mut first = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(first.attempt(PATIENCE).await.unwrap(), None);
    let (mut second, _) = other("wait", dir.path());
    stopped.stop();
    // For longer than a ticket counts whose waiter shows no life.
    let waited = tokio::time::timeout(Duration::from_secs(5), async {
        loop {
            first.notified().await;
            assert_eq!(first.attempt(PATIENCE).await.unwrap(), None);
        }
    });
    waited.await.unwrap_err();
    stopped.0.kill().unwrap();
    granted(&mut first).await;
    assert!(is_waiting(&mut second));
    first.release().await.unwrap();
    ended(&mut second).await;
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn waiters_that_go_at_any_time_leave_no_ticket_and_no_gap() {
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("LOCKKIT_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..60 {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mode = [Mode::Exclusive, permits(1), Mode::Shared][round % 3];
        let holds = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let mut holder = claim(&backend, "n", holds).await;
        granted(&mut holder).await;
        let mut waiters = Vec::new();
        for _ in 0..6 {
            let mut waiter = claim(&backend, "n", mode).await;
            polled(rng.usize(1..8), waiter.attempt(PATIENCE)).await;
            waiters.push(waiter);
        }
        let mut released = rng.bool();
        for _ in 0..rng.usize(1..6) {
            if rng.u8(..3) == 0 && !released {
                holder.release().await.unwrap();
                released = true;
            }
            let mut going = waiters.remove(rng.usize(..waiters.len()));
            match rng.u8(..4) {
                0 => drop(going),
                1 => {
                    polled(rng.usize(1..4), going.release()).await;
                    going.release().await.unwrap();
                }
                2 => {
                    polled(rng.usize(1..4), going.notified()).await;
                    drop(going);
                }
                _ => {
                    polled(rng.usize(1..8), going.attempt(PATIENCE)).await;
                    going.release().await.unwrap();
                }
            }
        }
        holder.release().await.unwrap();
        // All who are left at once, as they would wait.
        let left = waiters.into_iter().map(|mut waiter| async move {
            granted(&mut waiter).await;
            waiter.release().await.unwrap();
        });
        futures_util::future::join_all(left).await;
        let queue = if mode == permits(1) { "semqueue" } else { "queue" };
        let queue = dir.path().join(format!("lockkit/n.{queue}"));
        until(&format!("seed {seed}, round {round}: no ticket"), async || {
            files(&queue).is_empty()
        })
        .await;
    }
}

#[tokio::test]
async fn tickets_that_were_left_behind_are_removed() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let queue = dir.path().join("lockkit/n.queue");
    for mode in [Mode::Exclusive, Mode::Shared] {
        for patience in [PATIENCE, TRY] {
            fs::create_dir_all(&queue).unwrap();
            let hex = "0".repeat(32);
            for number in [1_u64, 7, u64::MAX - 1] {
                fs::write(queue.join(format!("{number:020}.{hex}")), "").unwrap();
            }
            fs::write(queue.join("notes"), "").unwrap();
            let mut claim = claim(&backend, "n", mode).await;
            let granted = claim.attempt(patience).await.unwrap();
            assert!(granted.is_some(), "{mode:?} {patience:?}");
            claim.release().await.unwrap();
            if patience == PATIENCE || mode == Mode::Shared {
                assert_eq!(tickets(dir.path()), [queue.join("notes")]);
            }
        }
    }
    fs::remove_dir_all(&queue).unwrap();
    symlink("/", &queue).unwrap();
    let mut refused = claim(&backend, "n", Mode::Exclusive).await;
    let error = refused.attempt(PATIENCE).await.unwrap_err();
    assert!(chain(&error).contains("n.queue"), "{}", chain(&error));
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_queue_that_is_taken_away_is_joined_anew() {
    for moved in [false, true] {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        let queue = dir.path().join("lockkit/n.queue");
        if moved {
            fs::rename(&queue, dir.path().join("moved")).unwrap();
        } else {
            fs::remove_dir_all(&queue).unwrap();
        }
        until("all have joined", async || tickets(dir.path()).len() == 3).await;
        holder.release().await.unwrap();
        for waiter in &mut waiters {
            ended(waiter).await;
        }
    }
}

/// Versions before this one know of no tickets: they lock the file whenever it is free.
#[tokio::test]
#[cfg(target_os = "linux")]
async fn an_older_version_excludes_and_may_overtake() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    let lock = dir.path().join("lockkit/n.lock");
    let older = || fs::File::options().write(true).open(&lock).unwrap();
    let file = older();
    file.try_lock().unwrap_err();
    holder.release().await.unwrap();
    file.try_lock().expect("it overtakes who waits");
    for patience in [PATIENCE, TRY] {
        assert_eq!(waiter.attempt(patience).await.unwrap(), None);
        assert_eq!(holder.attempt(patience).await.unwrap(), None);
    }
    holder.release().await.unwrap();
    looks(&mut waiter).await;
    drop(file);
    granted(&mut waiter).await;
    // One that waits is told as it always was.
    let mut inotify = inotify::Inotify::init().unwrap();
    inotify
        .watches()
        .add(&lock, inotify::WatchMask::CLOSE_WRITE)
        .unwrap();
    waiter.release().await.unwrap();
    assert!(inotify.read_events(&mut [0; 4_096]).unwrap().next().is_some());
    older().try_lock().unwrap();
}

#[tokio::test]
async fn a_waiting_writer_stops_new_readers_until_it_is_gone() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut inside = claim(&a, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let mut beside = claim(&b, "n", Mode::Shared).await;
    granted(&mut beside).await;

    let mut writer = claim(&a, "n", Mode::Exclusive).await;
    assert_eq!(writer.attempt(TRY).await.unwrap(), None);
    let mut reader = claim(&b, "n", Mode::Shared).await;
    assert!(
        reader.attempt(TRY).await.unwrap().is_some(),
        "a mere try stops nobody"
    );
    reader.release().await.unwrap();

    assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
    assert_eq!(reader.attempt(TRY).await.unwrap(), None, "stopped");
    assert_eq!(reader.attempt(PATIENCE).await.unwrap(), None, "stopped");
    writer.release().await.unwrap();
    granted(&mut reader).await;

    assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
    let mut late = claim(&b, "n", Mode::Shared).await;
    assert_eq!(late.attempt(PATIENCE).await.unwrap(), None, "stopped again");
    for mut holder in [inside, beside, reader] {
        assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
        holder.release().await.unwrap();
    }
    granted(&mut writer).await;
    assert_eq!(late.attempt(PATIENCE).await.unwrap(), None, "the writer is in");
    writer.release().await.unwrap();
    granted(&mut late).await;
}

#[tokio::test]
async fn a_writer_that_waits_and_is_stopped_does_not_keep_a_free_lock_from_readers() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut inside = claim(&backend, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let mut stopped = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(stopped.attempt(PATIENCE).await.unwrap(), None);
    inside.release().await.unwrap();
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    until("the reader gets past", async || {
        reader.attempt(PATIENCE).await.unwrap().is_some()
    })
    .await;
}

#[tokio::test]
async fn a_stopped_writer_keeps_no_reader_out_though_one_is_inside() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut inside = claim(&backend, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let (writer, _) = other("wait", dir.path());
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    assert_eq!(reader.attempt(TRY).await.unwrap(), None, "it waits");
    writer.stop();
    // One that waits, with nothing to wake it.
    granted(&mut reader).await;
    reader.release().await.unwrap();
    // Tries, with a reader inside and without.
    assert!(reader.attempt(TRY).await.unwrap().is_some());
    reader.release().await.unwrap();
    inside.release().await.unwrap();
    assert!(reader.attempt(TRY).await.unwrap().is_some());
    // Continued, it has its place again.
    writer.signal(Signal::CONT);
    let mut late = claim(&backend, "n", Mode::Shared).await;
    until("readers stay out", async || {
        late.release().await.unwrap();
        late.attempt(TRY).await.unwrap().is_none()
    })
    .await;
    reader.release().await.unwrap();
    let mut writer = writer;
    writer.0.wait().unwrap();
}

#[tokio::test]
async fn a_stopped_writer_leaves_its_place_to_the_next() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut inside = claim(&backend, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let (stopped, _) = other("wait", dir.path());
    stopped.stop();
    let mut next = claim(&backend, "n", Mode::Shared).await;
    granted(&mut next).await;
    let (mut writer, _) = other("wait", dir.path());
    // There is always a reader inside, as long as new ones get in.
    until("the writer gets in", async || {
        if next.attempt(TRY).await.unwrap().is_some() {
            std::mem::swap(&mut inside, &mut next);
            next.release().await.unwrap();
            false
        } else {
            inside.release().await.unwrap();
            writer.0.wait().unwrap().success()
        }
    })
    .await;
}

#[tokio::test]
async fn the_clock_takes_a_waiters_place_only_until_it_looks() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut inside = claim(&backend, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let mut writer = claim(&backend, "n", Mode::Exclusive).await;
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    let hour = Duration::from_secs(3_600);
    for set in [SystemTime::now() - hour, SystemTime::now() + hour] {
        assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
        assert_eq!(reader.attempt(TRY).await.unwrap(), None);
        let ticket = fs::File::open(tickets(dir.path()).remove(0)).unwrap();
        ticket.set_modified(set).unwrap();
        assert!(reader.attempt(TRY).await.unwrap().is_some(), "{set:?}");
        reader.release().await.unwrap();
        // It shows that it lives without anything to wake it.
        tokio::time::timeout(LIMIT, writer.notified()).await.unwrap();
    }
}

#[tokio::test]
async fn who_is_stopped_while_it_looks_for_a_permit_is_in_nobodys_way() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut held = Vec::new();
    for _ in 0..300 {
        let mut claim = claim(&backend, "n", permits(300)).await;
        assert!(claim.attempt(TRY).await.unwrap().is_some());
        held.push(claim);
    }
    let (looking, _) = other("look for one of 300", dir.path());
    for stop in 0..30 {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..6_000))).await;
        looking.stop();
        let mut one = held.swap_remove(fastrand::usize(..held.len()));
        one.release().await.unwrap();
        let again = one.attempt(TRY).await;
        assert!(matches!(again, Ok(Some(_))), "stop {stop}: {again:?}");
        held.push(one);
        looking.signal(Signal::CONT);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_of_a_semaphore_never_mix() {
    let dir = TempDir::new().unwrap();
    let inside = Arc::new(Mutex::new(Vec::<u32>::new()));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let backend = open(dir.path()).await;
        let inside = Arc::clone(&inside);
        tasks.push(tokio::spawn(async move {
            let mut grants = 0;
            for _ in 0..150 {
                let size = [1, 2, 3, 5][fastrand::usize(..4)];
                let mut claim = claim(&backend, "n", permits(size)).await;
                match claim.attempt(TRY).await {
                    Ok(None) | Err(Error::InvalidOptions { .. }) => {}
                    Ok(Some(_)) => {
                        grants += 1;
                        {
                            let mut held = inside.lock().unwrap();
                            held.push(size);
                            let fits = held.len() <= size as usize && held.iter().all(|other| *other == size);
                            assert!(fits, "sizes of those who hold: {held:?}");
                        }
                        tokio::task::yield_now().await;
                        let mut held = inside.lock().unwrap();
                        let at = held.iter().position(|other| *other == size).unwrap();
                        held.remove(at);
                    }
                    Err(error) => panic!("{}", chain(&error)),
                }
                claim.release().await.unwrap();
            }
            grants
        }));
    }
    let mut grants = 0;
    for task in tasks {
        grants += task.await.unwrap();
    }
    assert!(grants > 50, "{grants}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_readers_nor_writers_starve() {
    let dir = TempDir::new().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (readers_in, writer_in) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut rounds = Vec::new();
    let mut tasks = Vec::new();
    for mode in [Mode::Exclusive, Mode::Exclusive, Mode::Shared, Mode::Shared] {
        let backend = open(dir.path()).await;
        let done = Arc::new(AtomicUsize::new(0));
        rounds.push(Arc::clone(&done));
        let (stop, readers_in, writer_in) = (stop.clone(), readers_in.clone(), writer_in.clone());
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let mut claim = claim(&backend, "n", mode).await;
                granted(&mut claim).await;
                if mode == Mode::Exclusive {
                    assert!(!writer_in.swap(true, Ordering::SeqCst), "two writers");
                    assert_eq!(readers_in.load(Ordering::SeqCst), 0, "a writer among readers");
                    tokio::task::yield_now().await;
                    writer_in.store(false, Ordering::SeqCst);
                } else {
                    readers_in.fetch_add(1, Ordering::SeqCst);
                    assert!(!writer_in.load(Ordering::SeqCst), "a reader beside a writer");
                    tokio::task::yield_now().await;
                    readers_in.fetch_sub(1, Ordering::SeqCst);
                }
                claim.release().await.unwrap();
                done.fetch_add(1, Ordering::SeqCst);
            }
        }));
    }
    until("each got in ten times", async || {
        rounds.iter().all(|done| done.load(Ordering::SeqCst) >= 10)
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_all_given_and_never_exceeded() {
    let dir = TempDir::new().unwrap();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..10 {
        let backend = open(dir.path()).await;
        let (inside, most) = (inside.clone(), most.clone());
        tasks.push(tokio::spawn(async move {
            let mut tokens = Vec::new();
            for _ in 0..25 {
                let mut claim = claim(&backend, "n", permits(3)).await;
                tokens.push(*granted(&mut claim).await.tokens.start());
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                claim.release().await.unwrap();
            }
            tokens
        }));
    }
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.extend(task.await.unwrap());
    }
    assert!(most.load(Ordering::SeqCst) <= 3);
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 250, "no token twice");

    let backend = open(dir.path()).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut claim = claim(&backend, "n", permits(3)).await;
        assert!(claim.attempt(TRY).await.unwrap().is_some());
        held.push(claim);
    }
    let mut fourth = claim(&backend, "n", permits(3)).await;
    assert_eq!(fourth.attempt(TRY).await.unwrap(), None);
    assert_eq!(
        backend
            .inspect(&name("n"), LockKind::Semaphore)
            .await
            .unwrap()
            .holders
            .len(),
        3
    );
}

#[tokio::test]
async fn two_sizes_of_a_semaphore_are_an_error_while_one_is_held() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut two = claim(&a, "n", permits(2)).await;
    granted(&mut two).await;
    let mut three = claim(&b, "n", permits(3)).await;
    for patience in [TRY, PATIENCE] {
        let error = three.attempt(patience).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidOptions {
                    option: "permits",
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("has 2 permits, not 3"), "{error}");
    }
    two.release().await.unwrap();
    granted(&mut three).await;
    assert!(two.attempt(TRY).await.is_err());
    let too_many = b.claim(&request("n", permits(10_001))).await.unwrap_err();
    assert!(
        matches!(
            too_many,
            Error::InvalidOptions {
                option: "permits",
                ..
            }
        ),
        "{too_many}"
    );
}

#[tokio::test]
async fn inspection_shows_labels_and_tokens_of_all_holders() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    assert_eq!(files(dir.path()), Vec::<PathBuf>::new(), "looking makes no files");
    for (mode, count) in [(Mode::Exclusive, 1), (Mode::Shared, 3), (permits(3), 3)] {
        let (mut held, mut expected) = (Vec::new(), Vec::new());
        for label in ["a", "b", "c"].into_iter().take(count) {
            let mut request = request("n", mode);
            request.label = Some(label.into());
            let mut claim = backend.claim(&request).await.unwrap();
            expected.push((Some(label.to_owned()), *granted(&mut claim).await.tokens.start()));
            held.push(claim);
        }
        let state = backend.inspect(&name("n"), mode.kind()).await.unwrap();
        let shown: Vec<_> = state
            .holders
            .iter()
            .map(|h| (h.label.clone(), h.token.get()))
            .collect();
        assert_eq!(shown, expected);
        assert!(state.waiters.is_none() && state.holders.iter().all(|holder| holder.left.is_none()));

        let token = expected[0].1;
        let error = backend
            .revoke(&name("n"), mode.kind(), FencingToken::new(token))
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains(&format!("end process {}", std::process::id())),
            "{error}"
        );
        assert!(
            !backend
                .revoke(&name("n"), mode.kind(), FencingToken::new(1))
                .await
                .unwrap(),
            "nobody has that token"
        );
        for mut claim in held {
            claim.release().await.unwrap();
        }
        assert!(backend.inspect(&name("n"), mode.kind()).await.unwrap().is_free());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inspection_makes_no_attempt_fail() {
    let dir = TempDir::new().unwrap();
    let backend = Arc::new(open(dir.path()).await);
    let stop = Arc::new(AtomicBool::new(false));
    let looked = Arc::new(AtomicUsize::new(0));
    let inspector = tokio::spawn({
        let (backend, stop, looked) = (backend.clone(), stop.clone(), looked.clone());
        async move {
            while !stop.load(Ordering::SeqCst) {
                for kind in [LockKind::Lock, LockKind::Semaphore] {
                    backend.inspect(&name("n"), kind).await.unwrap();
                }
                looked.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let mut round = 0;
    while round < 300 || looked.load(Ordering::SeqCst) < 300 {
        for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
            let mut claim = claim(&backend, "n", mode).await;
            assert!(
                claim.attempt(TRY).await.unwrap().is_some(),
                "{mode:?} in round {round}"
            );
            claim.release().await.unwrap();
        }
        round += 1;
    }
    stop.store(true, Ordering::SeqCst);
    inspector.await.unwrap();
}

#[tokio::test]
async fn a_try_is_not_told_taken_because_of_a_probe() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut claim = claim(&backend, "n", mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
        // As an inspection does: it probes while it has the ledger.
        let locked = |suffix: &str| {
            let path = dir.path().join("lockkit/n").with_extension(suffix);
            let file = fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            let file = file.unwrap();
            file.try_lock().unwrap();
            file
        };
        let (ledger, probe) = (locked("ledger"), locked("lock"));
        let mut attempt = claim.attempt(TRY);
        let early = tokio::time::timeout(Duration::from_millis(100), &mut attempt).await;
        assert!(
            early.is_err(),
            "it cannot tell while there may be a probe: {early:?}"
        );
        // Not by closing: another test may be between fork and exec of a child.
        probe.unlock().unwrap();
        ledger.unlock().unwrap();
        assert!(attempt.await.unwrap().is_some(), "{mode:?}");
        claim.release().await.unwrap();
    }
}

#[tokio::test]
async fn an_inspection_probes_with_the_ledger_in_hand() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut claim = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut claim).await;
    let ledger = fs::File::create(dir.path().join("lockkit/n.ledger")).unwrap();
    ledger.try_lock().unwrap();
    let lock = name("n");
    let mut inspection = pin!(backend.inspect(&lock, LockKind::Lock));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut inspection).await;
    assert!(early.is_err(), "{early:?}");
    ledger.unlock().unwrap();
    assert!(!inspection.await.unwrap().is_free());
}

#[tokio::test]
async fn a_ledger_that_stays_locked_is_cannot_tell_and_not_taken() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut holder = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let ledger = fs::File::create(dir.path().join("lockkit/n.ledger")).unwrap();
    ledger.try_lock().unwrap();
    let mut denied = claim(&backend, "n", Mode::Shared).await;
    let error = denied.attempt(TRY).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(chain(&error).contains("n.ledger"), "{}", chain(&error));
    holder.release().await.unwrap();
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut next = claim(&backend, "n", mode).await;
        let grant = next.attempt(TRY).await.unwrap();
        assert!(
            grant.is_some(),
            "a free lock is granted without the ledger: {mode:?}"
        );
        next.release().await.unwrap();
    }
    ledger.unlock().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_take_turns_on_an_unprotected_counter() {
    let dir = TempDir::new().unwrap();
    let counter = dir.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let client = LockClient::new(FileBackend::open(FileConfig::new(dir.path())).await.unwrap());
        for _ in 0..2 {
            let (client, counter) = (client.clone(), counter.clone());
            tasks.push(tokio::spawn(async move {
                let lock = client.lock("n").unwrap();
                let mut tokens = Vec::new();
                for _ in 0..25 {
                    let guard = lock.acquire().await.unwrap();
                    let seen: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
                    tokio::task::yield_now().await;
                    fs::write(&counter, (seen + 1).to_string()).unwrap();
                    tokens.push(guard.token());
                    guard.release().await.unwrap();
                }
                assert!(tokens.is_sorted_by(|a, b| a < b));
                tokens
            }));
        }
    }
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.extend(tokio::time::timeout(LIMIT, task).await.unwrap().unwrap());
    }
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 200, "no token twice");
    assert_eq!(fs::read_to_string(&counter).unwrap(), "200");
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn an_inspection_wakes_who_was_refused_because_of_it() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    granted(&mut waiter).await;
    waiter.release().await.unwrap();
    let probe = fs::File::open(dir.path().join("lockkit/n.lock")).unwrap();
    probe.try_lock().unwrap();
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    while tokio::time::timeout(Duration::from_millis(200), waiter.notified())
        .await
        .is_ok()
    {
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    }
    probe.unlock().unwrap();
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    tokio::time::timeout(LIMIT, waiter.notified())
        .await
        .expect("told in time");
    granted(&mut waiter).await;
}
