//! Where things are on disk: the directory, the file of each name, and how they are opened.

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use lockkit_core::{LockKind, LockName};
use rustix::fs::{Access, OFlags};
use sha2::{Digest, Sha256};

use crate::{
    fault::{Fault, Inode, Result},
    flock::Flock,
    life::Life,
    queue::Queue,
};

/// The longest encoded name. What is longer is hashed; the rest of the 255 bytes is for the suffix.
const MAX_ENCODED: usize = 200;

/// The directory that holds the files of one namespace.
#[derive(Debug)]
pub(crate) struct Space {
    root: PathBuf,
    namespace: Option<String>,
    life: Option<Life>,
}

impl Space {
    /// The longest namespace: escaped, each of its bytes may take three.
    pub(crate) const MAX_NAMESPACE: usize = 80;

    /// Makes the directories that are missing and checks those that are there. `namespace` is already known to be of
    /// the right alphabet.
    pub(crate) fn open(dir: &Path, namespace: &str) -> Result<Self> {
        Self::open_in(Life::present(), dir, namespace)
    }

    /// Opens it in that life of the host.
    pub(crate) fn open_in(life: Option<Life>, dir: &Path, namespace: &str) -> Result<Self> {
        // A trailing slash or dot would make the system look through a symbolic link.
        let dir: PathBuf = dir
            .components()
            .filter(|part| *part != Component::CurDir)
            .collect();
        let dir = if dir.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            dir
        };
        ensure_dir(&dir)?;
        let space = Self {
            root: dir.canonicalize().map_err(Fault::io("find", &dir))?,
            namespace: (!namespace.is_empty()).then(|| escape(namespace.as_bytes(), |c, _| is_plain(c))),
            life,
        };
        space.ensure()?;
        let dir = space.dir();
        rustix::fs::access(&dir, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK)
            .map_err(|errno| Fault::io("read and write the directory", &dir)(errno.into()))?;
        Ok(space)
    }

    /// The canonical directory, as a URL.
    pub(crate) fn url(&self) -> String {
        let path = escape(self.root.as_os_str().as_bytes(), |c, _| {
            is_plain(c) || c.is_ascii_uppercase() || matches!(c, b'/' | b'.' | b'~')
        });
        format!("file://{path}")
    }

    /// The files of `name`.
    pub(crate) fn files(self: &Arc<Self>, name: &LockName, kind: LockKind) -> Files {
        Files {
            space: Arc::clone(self),
            stem: encode(name.as_str()),
            kind,
        }
    }

    /// The life of the host that tokens are given out in.
    pub(crate) fn life(&self) -> Option<Life> {
        self.life
    }

    /// Makes a new file's directory entry survive a crash of the machine.
    pub(crate) fn sync(&self) -> Result<()> {
        let dir = self.dir();
        File::open(&dir)
            .and_then(|open| open.sync_all())
            .map_err(Fault::io("sync the directory", &dir))
    }

    /// The directory and all above it: whichever is moved, its files are no longer where others look for them.
    pub(crate) fn way(&self) -> Vec<PathBuf> {
        self.dir().ancestors().map(Path::to_owned).collect()
    }

    fn dir(&self) -> PathBuf {
        match &self.namespace {
            Some(namespace) => self.root.join(namespace),
            None => self.root.clone(),
        }
    }

    fn ensure(&self) -> Result<()> {
        ensure_dir(&self.root)?;
        if self.namespace.is_some() {
            ensure_dir(&self.dir())?;
        }
        Ok(())
    }
}

/// The files of one name. Suffixes tell kinds apart, and a namespace's directory has no dot, so none can collide.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    space: Arc<Space>,
    stem: String,
    kind: LockKind,
}

impl Files {
    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    /// Has the token counter, and is what waiters watch. For a lock it is also the one that is locked.
    pub(crate) fn main(&self) -> PathBuf {
        self.path(match self.kind {
            LockKind::Lock => "lock",
            LockKind::Semaphore => "sem",
        })
    }

    /// Has the ceilings of the counter, which are on disk.
    pub(crate) fn ceiling(&self) -> PathBuf {
        self.path(match self.kind {
            LockKind::Lock => "ceiling",
            LockKind::Semaphore => "semceiling",
        })
    }

    /// Locked for moments: together by those whom a probe must not mislead, and alone around probes.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.path(match self.kind {
            LockKind::Lock => "ledger",
            LockKind::Semaphore => "semledger",
        })
    }

    /// Has a ticket for each that waits.
    pub(crate) fn queue(&self) -> Queue {
        Queue::new(self.path(match self.kind {
            LockKind::Lock => "queue",
            LockKind::Semaphore => "semqueue",
        }))
    }

    /// Has a file for each shared holder.
    pub(crate) fn readers(&self) -> PathBuf {
        self.path("readers")
    }

    /// Has a file for each permit of a semaphore.
    pub(crate) fn permits(&self) -> PathBuf {
        self.path("permits")
    }

    /// One of a semaphore's permits.
    pub(crate) fn permit(&self, index: u32) -> PathBuf {
        self.permits().join(index.to_string())
    }

    /// Locked for moments by whoever writes in that lane of the counter.
    pub(crate) fn lane(&self, lane: u64) -> PathBuf {
        self.path(&match self.kind {
            LockKind::Lock => format!("{lane}.lane"),
            LockKind::Semaphore => format!("{lane}.semlane"),
        })
    }

    /// The file or directory that tells of a release, and what else must not be replaced.
    pub(crate) fn watched(&self) -> Vec<PathBuf> {
        match self.kind {
            LockKind::Lock => vec![self.main()],
            LockKind::Semaphore => vec![self.permits(), self.main()],
        }
    }

    /// Opens for reading, so that closing it again wakes nobody; makes it, and its directory, if missing.
    pub(crate) fn open_or_create(&self, path: &Path) -> Result<(File, Inode)> {
        if let Some(opened) = if_there(create(path))? {
            return Ok(opened);
        }
        self.ensure()?;
        create(path)
    }

    /// Opens for writing, so that closing it again wakes whoever watches the file; makes it, and its directory, if missing.
    pub(crate) fn open_or_create_writable(&self, path: &Path) -> Result<(File, Inode)> {
        for _ in 0..2 {
            if let Some(opened) = create_writable(path)? {
                return Ok(opened);
            }
            self.ensure()?;
        }
        Err(Fault::Replaced {
            path: path.to_owned(),
        })
    }

    fn ensure(&self) -> Result<()> {
        self.space.ensure()?;
        if self.kind == LockKind::Semaphore {
            ensure_dir(&self.permits())?;
        }
        Ok(())
    }

    /// Makes the directory of the shared holders.
    pub(crate) fn ensure_readers(&self) -> Result<PathBuf> {
        let dir = self.readers();
        ensure_dir(&dir)?;
        Ok(dir)
    }

    /// Locks the ledger alone, for moments only.
    pub(crate) fn lock_ledger(&self) -> Result<Flock> {
        let path = self.ledger();
        Flock::briefly(&path, || self.lock_at(&path, Flock::exclusive))
    }

    /// Locks the ledger together with others: for so long nobody probes.
    pub(crate) fn share_ledger(&self) -> Result<Flock> {
        let path = self.ledger();
        Flock::briefly(&path, || self.lock_at(&path, Flock::shared))
    }

    /// Locks a semaphore's size alone, to change it.
    pub(crate) fn lock_size(&self) -> Result<Flock> {
        let path = self.main();
        Flock::briefly(&path, || self.lock_at(&path, Flock::exclusive))
    }

    /// Locks a semaphore's size together with others: for so long nobody changes it.
    pub(crate) fn share_size(&self) -> Result<Flock> {
        let path = self.main();
        Flock::briefly(&path, || self.lock_at(&path, Flock::shared))
    }

    /// Locks a lane that nobody writes in.
    pub(crate) fn lock_lane(&self, lanes: u64) -> Result<(u64, Flock)> {
        Flock::briefly(&self.lane(0), || {
            for lane in 0..lanes {
                if let Some(lock) = self.lock_at(&self.lane(lane), Flock::exclusive)? {
                    return Ok(Some((lane, lock)));
                }
            }
            Ok(None)
        })
    }

    /// Locks the file that `path` leads to, if that can be done at once.
    fn lock_at(
        &self,
        path: &Path,
        lock: impl Fn(&Arc<File>, &Path) -> Result<Option<Flock>>,
    ) -> Result<Option<Flock>> {
        let (file, inode) = self.open_or_create(path)?;
        match lock(&Arc::new(file), path)? {
            Some(locked) if is_at(path, inode)? => Ok(Some(locked)),
            _ => Ok(None),
        }
    }

    fn path(&self, suffix: &str) -> PathBuf {
        self.space.dir().join(format!("{}.{suffix}", self.stem))
    }
}

/// Opens an existing file for reading.
pub(crate) fn open(path: &Path) -> Result<Option<File>> {
    let opened = if_there(regular(OpenOptions::new().read(true), 0, path))?;
    Ok(opened.map(|(file, _)| file))
}

/// Opens an existing file for writing. Closing it wakes whoever watches the file.
pub(crate) fn open_writable(path: &Path) -> Result<Option<(File, Inode)>> {
    if_there(regular(OpenOptions::new().read(true).write(true), 0, path))
}

/// Opens a file for writing that is made if it is missing; `None` if its directory is missing.
pub(crate) fn create_writable(path: &Path) -> Result<Option<(File, Inode)>> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).mode(0o600);
    if_there(regular(options, 0, path))
}

/// The inode of an open file.
pub(crate) fn inode(file: &File, path: &Path) -> Result<Inode> {
    let metadata = file.metadata().map_err(Fault::io("look at", path))?;
    Ok(Inode::of(&metadata))
}

/// Whether `path` still leads to that inode.
pub(crate) fn is_at(path: &Path, inode: Inode) -> Result<bool> {
    Ok(inode_at(path)? == Some(inode))
}

/// The inode that `path` leads to.
pub(crate) fn inode_at(path: &Path) -> Result<Option<Inode>> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(Inode::of(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Fault::io("look at", path)(error)),
    }
}

fn create(path: &Path) -> Result<(File, Inode)> {
    // Opened read-only, which std does not offer together with creating.
    let create = OFlags::CREATE.bits().cast_signed();
    regular(OpenOptions::new().read(true).mode(0o600), create, path)
}

fn if_there<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Err(Fault::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn regular(options: &mut OpenOptions, flags: i32, path: &Path) -> Result<(File, Inode)> {
    // NONBLOCK: opening a FIFO that lies in the way must not hang.
    let safe = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = options.custom_flags(flags | safe).open(path).map_err(|error| {
        if path.is_symlink() {
            return not_ours(path, "a symbolic link", "a file");
        }
        Fault::io("open", path)(error)
    })?;
    let metadata = file.metadata().map_err(Fault::io("look at", path))?;
    if !metadata.is_file() {
        return Err(not_ours(path, "something else", "a regular file"));
    }
    Ok((file, Inode::of(&metadata)))
}

/// Makes a directory for its owner alone, unless it is there.
pub(crate) fn ensure_dir(dir: &Path) -> Result<()> {
    let metadata = match dir.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(Fault::io("create the directory", dir))?;
            dir.symlink_metadata()
        }
        other => other,
    }
    .map_err(Fault::io("look at", dir))?;
    if metadata.is_symlink() {
        return Err(not_ours(dir, "a symbolic link", "a directory"));
    }
    if !metadata.is_dir() {
        return Err(not_ours(dir, "a file", "a directory"));
    }
    Ok(())
}

/// Says that something else is in the way.
pub(crate) fn not_ours(path: &Path, found: &'static str, wanted: &'static str) -> Fault {
    Fault::NotOurs {
        path: path.to_owned(),
        found,
        wanted,
    }
}

/// A file name for `name`, different for each, also where the file system folds case or normalises Unicode.
///
/// A hashed name begins with `%h`, which no escaped one does: `h` is not a hexadecimal digit.
fn encode(name: &str) -> String {
    let plain = escape(name.as_bytes(), |c, at| is_plain(c) || (c == b'.' && at > 0));
    if plain.len() <= MAX_ENCODED {
        return plain;
    }
    let mut hashed = String::from("%h");
    for byte in Sha256::digest(name.as_bytes()) {
        push_hex(&mut hashed, byte);
    }
    hashed
}

fn is_plain(c: u8) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, b'_' | b'-')
}

fn escape(bytes: &[u8], keep: impl Fn(u8, usize) -> bool) -> String {
    let mut escaped = String::with_capacity(bytes.len());
    for (at, &byte) in bytes.iter().enumerate() {
        if keep(byte, at) {
            escaped.push(char::from(byte));
        } else {
            escaped.push('%');
            push_hex(&mut escaped, byte);
        }
    }
    escaped
}

fn push_hex(text: &mut String, byte: u8) {
    for digit in [byte >> 4, byte & 0xf] {
        text.extend(char::from_digit(u32::from(digit), 16));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// What a file system that folds case sees.
    fn folded(name: &str) -> String {
        encode(name).to_lowercase()
    }

    proptest! {
        #[test]
        fn different_names_never_share_a_file(names in prop::collection::vec("[aA.%/hé\\x00]{1,4}|.{1,400}|%h[0-9a-f]{64}", 2..40)) {
            let mut seen = HashMap::new();
            for name in names {
                let before = seen.insert(folded(&name), name.clone());
                prop_assert!(before.as_ref().is_none_or(|before| *before == name), "{before:?} and {name:?}");
            }
        }

        #[test]
        fn an_encoded_name_is_a_good_file_name(name in "(?s).{1,1024}") {
            let encoded = encode(&name);
            prop_assert!(encoded.len() <= MAX_ENCODED);
            prop_assert!(!encoded.starts_with('.'));
            let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-%".contains(c);
            prop_assert!(encoded.chars().all(good), "{}", encoded);
        }
    }

    #[test]
    fn encoding_is_stable() {
        for (name, encoded) in [
            ("orders", "orders"),
            ("orders/42", "orders%2f42"),
            ("Orders", "%4frders"),
            ("..", "%2e."),
            ("a.lock", "a.lock"),
            ("%h", "%25h"),
            ("é", "%c3%a9"),
        ] {
            assert_eq!(encode(name), encoded);
        }
        let longest = "a".repeat(MAX_ENCODED);
        assert_eq!(encode(&longest), longest);
        let hashed = encode(&format!("{longest}a"));
        assert!(hashed.starts_with("%h") && hashed.len() == 66, "{hashed}");
        assert_ne!(encode(&hashed), hashed);
    }

    #[test]
    fn the_longest_file_name_fits() {
        let dir = tempfile::TempDir::new().unwrap();
        let space = Arc::new(Space::open(dir.path(), &"A".repeat(Space::MAX_NAMESPACE)).unwrap());
        let name = LockName::new("a".repeat(MAX_ENCODED)).unwrap();
        let files = space.files(&name, LockKind::Semaphore);
        let longest = files.permit(u32::MAX);
        files.open_or_create(&longest).unwrap();
        let longest = files.lane(u64::from(u32::MAX));
        assert!(longest.file_name().unwrap().len() <= 255);
        files.open_or_create(&longest).unwrap();
    }
}
