//! Fencing tokens over kills and crashes of the host.
//!
//! Processes are killed at random. Now and then all of them are: the files are cut back to what was synced, and the
//! next boot begins. Prints its seed; `LOCKKIT_SEED=<seed>` sets it.

use std::{
    fs::{self, File},
    io::Write,
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use lockkit_core::{
    LockKind, LockName,
    spi::{ClaimRequest, Mode, OwnerId},
};
use tempfile::TempDir;

use crate::{
    blocking_claim::{BlockingClaim, ClaimSpec},
    boot::BootId,
    layout::Layout,
};

const DIR: &str = "LOCKKIT_FILE_CRASH_DIR";
const BOOT: &str = "LOCKKIT_FILE_CRASH_BOOT";
const SECTOR: usize = 512;

/// A host's directories: its files, the synced part of them, and a list of the grants.
struct Host(PathBuf);

impl Host {
    fn files(&self) -> PathBuf {
        self.0.join("files")
    }

    fn disk(&self) -> PathBuf {
        self.0.join("disk")
    }

    /// A line for each grant, written while it was held: whether it was exclusive, its first and its last token.
    fn grants(&self) -> PathBuf {
        self.0.join("grants")
    }

    fn count(&self) -> usize {
        fs::read_to_string(self.grants()).map_or(0, |grants| grants.lines().count())
    }
}

/// Syncs the file to the disk of this process's host, if that may crash. Returns whether it does.
pub(crate) fn sync_to_disk(file: &File, path: &Path) -> bool {
    let Some(dir) = std::env::var_os(DIR) else {
        return false;
    };
    let disk = Host(dir.into()).disk();
    // One at a time, so that the last sync has all that was written before.
    let turn = File::create(disk.join("turn")).unwrap();
    turn.lock().unwrap();
    let now = disk.join("now");
    fs::write(&now, read_all(file)).unwrap();
    fs::rename(now, disk.join(path.file_name().unwrap())).unwrap();
    true
}

fn read_all(file: &File) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Runs in a process of its own.
#[test]
fn holder() {
    let (Some(dir), Ok(number)) = (std::env::var_os(DIR), std::env::var(BOOT)) else {
        return;
    };
    let host = Host(dir.into());
    let boot = BootId::from_bytes([number.parse().unwrap(); BootId::BYTES]);
    let layout = Arc::new(Layout::open_in(boot, &host.files(), "").unwrap());
    let mut grants = File::options()
        .append(true)
        .create(true)
        .open(host.grants())
        .unwrap();
    let mut rng = Rng::new();
    loop {
        let name = LockName::new("n").unwrap();
        let mode = if rng.bool() { Mode::Shared } else { Mode::Exclusive };
        let mut request = ClaimRequest::new(
            name.clone(),
            mode,
            Duration::from_secs(30),
            OwnerId::new(rng.u128(..)),
        );
        request.tokens = NonZeroU32::new(rng.u32(1..9_000)).unwrap();
        let mut state = BlockingClaim::new(Arc::new(ClaimSpec {
            request,
            files: layout.files(&name, LockKind::Lock),
            watcher: None,
            poll: Duration::from_secs(1),
            pace: Arc::default(),
        }));
        state.attempt(false, Instant::now().into()).unwrap();
        let Some(hold) = &state.hold else { continue };
        let grant = format!(
            "{} {} {}\n",
            mode == Mode::Exclusive,
            hold.grant.tokens.start(),
            hold.grant.tokens.end()
        );
        grants.write_all(grant.as_bytes()).unwrap();
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(host: &Host, boot: u8) -> Killed {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash_tests::holder", "--nocapture"])
        .env(DIR, &host.0)
        .env(BOOT, boot.to_string())
        .stdout(Stdio::null())
        .spawn();
    Killed(child.unwrap())
}

/// Cuts the files back: of the unsynced sectors some are there, some are not, and some of the main file are torn.
fn crash(host: &Host, rng: &mut Rng) {
    for entry in fs::read_dir(host.files()).unwrap() {
        let path = entry.unwrap().path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else {
            continue;
        };
        let written = fs::read(&path).unwrap();
        let mut left = fs::read(host.disk().join(name)).unwrap_or_default();
        left.resize(written.len(), 0);
        for (left, written) in left.chunks_mut(SECTOR).zip(written.chunks(SECTOR)) {
            let kept = match rng.u8(0..4) {
                0 => 0,
                1 | 2 if name == "n.lock" => written.len().min(rng.usize(1..128)),
                _ => written.len(),
            };
            left[..kept].copy_from_slice(&written[..kept]);
        }
        fs::write(&path, &left).unwrap();
        fs::write(host.disk().join(name), &left).unwrap();
    }
}

#[test]
fn tokens_rise_over_kills_and_crashes_of_the_host() {
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("LOCKKIT_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let dir = TempDir::new().unwrap();
    let host = Host(dir.path().to_owned());
    fs::create_dir(host.disk()).unwrap();
    let mut boots_end_at = Vec::new();
    for boot in 1..9 {
        let mut holders: Vec<_> = (0..3).map(|_| start(&host, boot)).collect();
        for _ in 0..rng.u8(2..5) {
            let enough = host.count() + rng.usize(5..60);
            let began = Instant::now();
            while host.count() < enough {
                assert!(began.elapsed() < Duration::from_secs(60), "nobody is granted");
                thread::sleep(Duration::from_millis(1));
            }
            let killed = rng.usize(0..holders.len());
            holders[killed] = start(&host, boot);
        }
        drop(holders);
        boots_end_at.push(host.count());
        crash(&host, &mut rng);
    }
    let grants = fs::read_to_string(host.grants()).unwrap();
    let (mut highest, mut exclusive) = (0, 0);
    let mut before = 0;
    for (at, line) in grants.lines().enumerate() {
        if boots_end_at.contains(&at) {
            before = highest;
        }
        let fields: Vec<_> = line.split(' ').collect();
        let [alone, first, last] = fields[..] else {
            panic!("{line:?}")
        };
        let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
        let above = if alone == "true" {
            highest
        } else {
            exclusive.max(before)
        };
        assert!(
            first > above,
            "grant {at}: {first} after {above}, boots end at {boots_end_at:?}"
        );
        highest = highest.max(last);
        if alone == "true" {
            exclusive = last;
        }
    }
}
