//! Processes that share files are stopped at random, and killed. A failure prints the seed; `LOCKKIT_SEED=<seed>`
//! runs that seed again, and `LOCKKIT_STOPS` sets the number of stops.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use fastrand::Rng;
use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{Lock, LockClient};
use lockkit_file::{FileBackend, FileConfig};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;

const PERMITS: u32 = 3;
/// The others continue within this time of a stop: a stopped waiter keeps its turn for two seconds.
const LIMIT: Duration = Duration::from_secs(20);

const ROLE: &str = "LOCKKIT_FILE_STOPS_ROLE";
const DIR: &str = "LOCKKIT_FILE_STOPS_DIR";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Writer,
    Reader,
    Permit,
    Trier,
    Inspector,
}

const ROLES: [Role; 5] = [
    Role::Writer,
    Role::Reader,
    Role::Permit,
    Role::Trier,
    Role::Inspector,
];

/// The players. The inspector is never stopped.
const CAST: [Role; 10] = [
    Role::Writer,
    Role::Writer,
    Role::Reader,
    Role::Reader,
    Role::Permit,
    Role::Permit,
    Role::Permit,
    Role::Permit,
    Role::Trier,
    Role::Inspector,
];

/// A process that repeats a role.
struct Player {
    role: Role,
    child: Child,
    /// The number of completed rounds.
    rounds: Arc<AtomicU64>,
    /// It saw another inside that must not be.
    broken: Arc<AtomicBool>,
}

impl Player {
    fn start(role: Role, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stops::player", "--nocapture"])
            .env(ROLE, format!("{role:?}"))
            .env(DIR, dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (rounds, broken) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let player = Self {
            role,
            child,
            rounds: Arc::clone(&rounds),
            broken: Arc::clone(&broken),
        };
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if line.ends_with("done") {
                    rounds.fetch_add(1, Ordering::SeqCst);
                } else if line.contains("broken") {
                    println!("{role:?}: {line}");
                    broken.store(true, Ordering::SeqCst);
                }
            }
        });
        player
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns when it has stopped.
    fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap();
    }

    fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
    }

    /// Returns the files that it has locked, as the system shows them.
    fn locks(&self) -> Vec<Locked> {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let mut locks = Vec::new();
        for entry in fs::read_dir(proc.join("fd")).unwrap() {
            let entry = entry.unwrap();
            let Ok(info) = fs::read_to_string(proc.join("fdinfo").join(entry.file_name())) else {
                continue;
            };
            if !info.lines().any(|line| line.starts_with("lock:")) {
                continue;
            }
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            locks.push(Locked {
                path: fs::read_link(entry.path()).unwrap_or_default(),
                probe: u32::from_str_radix(flags.trim(), 8).unwrap() % 4 == 0,
            });
        }
        locks
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug)]
struct Locked {
    path: PathBuf,
    /// Locked read-only: it is about to hold, or is about to unlock it again.
    probe: bool,
}

async fn lock_of(role: Role, dir: &Path) -> (LockClient, Lock) {
    let mut config = FileConfig::new(dir);
    config.namespace = String::new();
    // No waiter polls.
    config.poll = Some(Duration::from_secs(3_600));
    let client = LockClient::new(FileBackend::open(config).await.unwrap());
    let lock = match role {
        Role::Permit => client.semaphore("n", PERMITS),
        Role::Reader => client.lock("n").map(|lock| lock.shared()),
        _ => client.lock("n"),
    };
    (client, lock.unwrap())
}

/// The process of a [`Player`], which runs it: no test of its own.
#[tokio::test]
async fn player() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let role = ROLES
        .into_iter()
        .find(|known| format!("{known:?}") == role)
        .unwrap();
    let dir = PathBuf::from(std::env::var_os(DIR).unwrap());
    let (client, lock) = lock_of(role, &dir).await;
    let board = Board(dir.join("board"));
    loop {
        match role {
            Role::Inspector => {
                // It is there to disturb the others. It may fail, as a try that is stopped keeps it waiting.
                let _ = lock.inspect().await;
                let _ = client.inspect_semaphore("n").await;
                tokio::time::sleep(Duration::from_millis(5)).await;
                continue;
            }
            Role::Trier => match lock.try_acquire().await {
                Ok(None) => {}
                Ok(Some(guard)) => {
                    board.use_it(role, guard.token().get()).await;
                    guard.release().await.unwrap();
                }
                Err(error) => println!("broken: a try failed: {}", lockkit_core::spi::chain(&error)),
            },
            _ => {
                let guard = lock.acquire().await.unwrap();
                board.use_it(role, guard.token().get()).await;
                guard.release().await.unwrap();
            }
        }
        println!("done");
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..3_000))).await;
    }
}

/// The holders' traces, for the other holders to see. They do not depend on the locks, but on names that exist once.
struct Board(PathBuf);

impl Board {
    async fn use_it(&self, role: Role, token: u64) {
        let (kind, others): (_, &[&str]) = match role {
            Role::Reader => ("reader", &["writer"]),
            Role::Permit => ("permit", &[]),
            _ => ("writer", &["reader", "writer"]),
        };
        let mine = self.0.join(format!("{kind}-{}", std::process::id()));
        fs::write(&mine, token.to_string()).unwrap();
        for _ in 0..2 {
            let mut inside = self.inside();
            inside.retain(|(path, _)| *path != mine);
            for (path, other) in &inside {
                if others.contains(&other.as_str()) {
                    println!("broken: {kind} with {} inside", path.display());
                }
            }
            let permits = inside.iter().filter(|(_, other)| other == "permit").count();
            if role == Role::Permit && permits >= PERMITS as usize {
                println!("broken: {permits} permits before this one");
            }
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..1_500))).await;
        }
        if kind == "writer" {
            let path = self.0.join("token");
            let last = fs::read_to_string(&path).map_or(0, |last| last.parse().unwrap());
            if token <= last {
                println!("broken: token {token} after {last}");
            }
            // Atomically, also if it is killed.
            let new = self.0.join("token.new");
            fs::write(&new, token.to_string()).unwrap();
            fs::rename(new, path).unwrap();
        } else if kind == "reader" {
            let last = fs::read_to_string(self.0.join("token")).map_or(0, |last| last.parse().unwrap());
            if token <= last {
                println!("broken: a reader's token {token} after {last}");
            }
        }
        fs::remove_file(mine).unwrap();
    }

    /// Returns the live holders.
    fn inside(&self) -> Vec<(PathBuf, String)> {
        let mut inside = Vec::new();
        for entry in fs::read_dir(&self.0).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let Some((kind, pid)) = name.split_once('-') else {
                continue;
            };
            if lives(pid) {
                inside.push((path.clone(), kind.to_owned()));
            } else {
                let _ = fs::remove_file(&path);
            }
        }
        inside
    }
}

/// Returns whether the process is there and is not about to end: a killed process unlocks its files before it is
/// gone.
fn lives(pid: &str) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
        return false;
    };
    let killed = |field: &str| {
        let pending = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .unwrap_or("0");
        u64::from_str_radix(pending.trim(), 16).unwrap() & 1 << 8 != 0
    };
    let ends = ["State:\tZ", "State:\tX"]
        .iter()
        .any(|state| status.contains(state));
    // Without files, it is about to end.
    let files = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    !ends && !killed("SigPnd:") && !killed("ShdPnd:") && files > 0
}

/// Returns whether `other` must continue while a stopped process has these locks.
fn continues(other: Role, locks: &[Locked]) -> bool {
    let held = locks.iter().find(|lock| lock.path.ends_with("n.lock"));
    match other {
        Role::Inspector => false,
        // The others need one permit less, and a try returns in any case.
        Role::Permit | Role::Trier => true,
        // New readers wait for the writer that waits for a stopped reader.
        Role::Writer | Role::Reader => held.is_none(),
    }
}

#[test]
fn a_process_stopped_anywhere_blocks_only_what_it_may() {
    let number = |name| Some(std::env::var(name).ok()?.parse().unwrap());
    let seed = number("LOCKKIT_SEED").unwrap_or_else(|| fastrand::u64(..));
    let stops: u64 = number("LOCKKIT_STOPS").unwrap_or(40);
    let mut rng = Rng::with_seed(seed);
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("board")).unwrap();
    let mut players: Vec<_> = CAST
        .into_iter()
        .map(|role| Player::start(role, dir.path()))
        .collect();
    wait_for(&players, &[true; CAST.len()], &format!("seed {seed}: at first"));
    let (mut inside, mut outside, mut killed) = (0, 0, 0);
    for stop in 0..stops {
        thread::sleep(Duration::from_micros(rng.u64(..20_000)));
        let at = rng.usize(..CAST.len() - 1);
        let victim = &players[at];
        victim.stop();
        let locks = victim.locks();
        let holds = |lock: &Locked| {
            lock.path.ends_with("n.lock") || lock.path.starts_with(dir.path().join("n.permits"))
        };
        if locks.iter().any(holds) {
            inside += 1;
        } else {
            outside += 1;
        }
        let expected: Vec<_> = players
            .iter()
            .enumerate()
            .map(|(other, player)| other != at && continues(player.role, &locks))
            .collect();
        let what = format!(
            "seed {seed}: stop {stop}: a {:?} that is stopped with {locks:?}",
            victim.role
        );
        wait_for(&players, &expected, &what);
        // Not within a probe: the end of that lock wakes nobody, until the next look.
        if rng.u8(..4) == 0 && !locks.iter().any(|lock| holds(lock) && lock.probe) {
            let role = victim.role;
            players[at] = Player::start(role, dir.path());
            killed += 1;
        } else {
            victim.resume();
        }
        let broken = players.iter().any(|player| player.broken.load(Ordering::SeqCst));
        assert!(!broken, "seed {seed}: stop {stop}");
    }
    println!("seed {seed}: stopped {inside} inside, {outside} outside; killed {killed}");
    wait_for(&players, &[true; CAST.len()], &format!("seed {seed}: at last"));
}

/// Waits until all that are expected to continue have done so.
fn wait_for(players: &[Player], expected: &[bool], what: &str) {
    let before: Vec<_> = players
        .iter()
        .map(|player| player.rounds.load(Ordering::SeqCst))
        .collect();
    let watch = Stopwatch::start();
    loop {
        let stuck: Vec<_> = players
            .iter()
            .zip(&before)
            .zip(expected)
            .filter(|((player, before), expected)| {
                // The first round may have been under way before.
                **expected
                    && player.role != Role::Inspector
                    && player.rounds.load(Ordering::SeqCst) < *before + 2
            })
            .map(|((player, _), _)| player)
            .collect();
        if stuck.is_empty() {
            return;
        }
        if watch.elapsed() > LIMIT {
            let stuck: Vec<_> = stuck.iter().map(|player| (player.role, player.locks())).collect();
            panic!("{what}: these do not continue: {stuck:?}");
        }
        thread::sleep(Duration::from_millis(2));
    }
}
