//! The layout on disk: the directory, the files of each name, and how they are opened.

use std::{
    ffi::OsStr,
    fmt,
    fs::{File, Metadata},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use lockkit_core::{LockKind, LockName};
use rustix::{
    fs::{
        Access, AtFlags, CWD, Dir, Gid, Mode, OFlags, Uid, fchown, fstat, mkdirat, openat, renameat, unlinkat,
    },
    io::{Errno, retry_on_intr},
    process::geteuid,
};
use sha2::{Digest, Sha256};

use crate::{
    boot::BootId,
    error::{FileError, Result},
    flock::Flock,
    queue::Queue,
};

/// The longest encoded name, in bytes. A longer one is hashed. The rest of the 255 bytes is for the suffix.
const MAX_ENCODED: usize = 200;

/// The beginning of a hashed name.
const HASHED: &str = "%h";

/// How a directory is opened that is only gone through. On Linux, it need not be readable.
#[cfg(target_os = "linux")]
const THROUGH: OFlags = OFlags::PATH;
#[cfg(not(target_os = "linux"))]
const THROUGH: OFlags = OFlags::RDONLY;

/// The directory that holds the files of one namespace.
#[derive(Debug)]
pub(crate) struct Layout {
    root: PathBuf,
    namespace: Option<String>,
    boot: Option<BootId>,
}

impl Layout {
    /// The longest namespace: escaped, each of its bytes may take three.
    pub(crate) const MAX_NAMESPACE: usize = 80;

    /// Finds the directory, and checks what is there. Creates nothing. `namespace` must have passed the config's check.
    pub(crate) fn open(dir: &Path, namespace: &str) -> Result<Self> {
        Self::open_in(BootId::current(), dir, namespace)
    }

    /// Opens it in a given boot of the host.
    pub(crate) fn open_in(boot: Option<BootId>, dir: &Path, namespace: &str) -> Result<Self> {
        // The system would follow a symbolic link before a trailing slash or dot.
        let dir: PathBuf = dir
            .components()
            .filter(|part| *part != Component::CurDir)
            .collect();
        let dir = if dir.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            dir
        };
        check_dir(&dir)?;
        let layout = Self {
            root: canonical(&dir)?,
            namespace: (!namespace.is_empty()).then(|| escape(namespace.as_bytes(), |c, _| is_plain(c))),
            boot,
        };
        let dir = layout.dir();
        if check_dir(&dir)? {
            rustix::fs::access(&dir, Access::READ_OK | Access::EXEC_OK)
                .map_err(|errno| FileError::io("read the directory", &dir)(errno.into()))?;
        }
        Ok(layout)
    }

    /// Creates missing directories, and checks that this process may write there.
    pub(crate) fn prepare(&self) -> Result<()> {
        self.ensure()?;
        let dir = self.dir();
        rustix::fs::access(&dir, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK)
            .map_err(|errno| FileError::io("read and write the directory", &dir)(errno.into()))
    }

    /// Returns the directory, or the namespace's in it, if others may write there, as far as its owner and its mode tell.
    pub(crate) fn open_to_others(&self) -> Option<PathBuf> {
        let me = geteuid();
        let is_open = |dir: &PathBuf| {
            dir.symlink_metadata().is_ok_and(|it| {
                // Root comes to those of others on purpose.
                let is_strangers = !me.is_root() && it.uid() != 0 && it.uid() != me.as_raw();
                is_strangers || it.mode() & 0o002 != 0
            })
        };
        [self.root.clone(), self.dir()].into_iter().find(is_open)
    }

    /// Returns the canonical directory, as a URL.
    pub(crate) fn url(&self) -> String {
        let path = escape(self.root.as_os_str().as_bytes(), |c, _| {
            is_plain(c) || c.is_ascii_uppercase() || matches!(c, b'/' | b'.' | b'~')
        });
        format!("file://{path}")
    }

    /// Returns the files of `name`.
    pub(crate) fn files(self: &Arc<Self>, name: &LockName, kind: LockKind) -> Files {
        Files {
            layout: Arc::clone(self),
            stem: encode(name.as_str()),
            kind,
        }
    }

    /// Returns the files of the name whose main file has this name, if it is one, and if the lock's name may begin with `prefix`.
    pub(crate) fn files_of(self: &Arc<Self>, main: &OsStr, prefix: &str) -> Option<Files> {
        let main = main.to_str()?;
        let (stem, kind) = match main.strip_suffix(".lock") {
            Some(stem) => (stem, LockKind::Lock),
            None => (main.strip_suffix(".sem")?, LockKind::Semaphore),
        };
        // Byte by byte, so that the beginning of a name leads to that of its file. A hash tells nothing.
        let may_be_meant = stem.starts_with(HASHED) || stem.starts_with(&escape_name(prefix));
        may_be_meant.then(|| Files {
            layout: Arc::clone(self),
            stem: stem.to_owned(),
            kind,
        })
    }

    /// Returns the boot in which tokens are minted.
    pub(crate) fn boot(&self) -> Option<BootId> {
        self.boot
    }

    /// Makes a new file's directory entry survive a crash of the host.
    pub(crate) fn sync(&self) -> Result<()> {
        let dir = self.dir();
        File::from(open_dir(&dir, OFlags::RDONLY)?)
            .sync_all()
            .map_err(FileError::io("sync the directory", &dir))
    }

    /// Returns the directory and all above it. If one is moved, others no longer find the files.
    pub(crate) fn ancestors(&self) -> Vec<PathBuf> {
        self.dir().ancestors().map(Path::to_owned).collect()
    }

    pub(crate) fn dir(&self) -> PathBuf {
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

/// The files of one name. They have suffixes, one for each purpose, and a namespace's directory has no dot: none
/// collide.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    layout: Arc<Layout>,
    stem: String,
    kind: LockKind,
}

impl Files {
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn kind(&self) -> LockKind {
        self.kind
    }

    /// Returns whether these are the files of `name`.
    pub(crate) fn are_of(&self, name: &LockName) -> bool {
        self.stem == encode(name.as_str())
    }

    /// The main file: it has the token counter, and waiters watch it. A lock's main file is also what is locked.
    pub(crate) fn main(&self) -> PathBuf {
        self.path(match self.kind {
            LockKind::Lock => "lock",
            LockKind::Semaphore => "sem",
        })
    }

    /// The floors of the counter, as they are on disk.
    pub(crate) fn ceiling(&self) -> PathBuf {
        self.path(&format!("{}ceiling", self.prefix()))
    }

    /// The ledger, locked for moments: shared by attempts that a probe must not mislead, exclusively around probes.
    fn ledger(&self) -> PathBuf {
        self.path(&format!("{}ledger", self.prefix()))
    }

    /// The queue of the waiters.
    pub(crate) fn queue(&self) -> Queue {
        Queue::new(self.path(&format!("{}queue", self.prefix())))
    }

    /// The directory of the shared holders' notes.
    pub(crate) fn readers(&self) -> PathBuf {
        self.path("readers")
    }

    /// The directory of a semaphore's permits.
    pub(crate) fn permits(&self) -> PathBuf {
        self.path("permits")
    }

    /// One permit of a semaphore.
    pub(crate) fn permit(&self, index: u32) -> PathBuf {
        self.permits().join(index.to_string())
    }

    /// The mark of a hold whose holder is asked to give it up, by the first of its tokens. It says so by being there.
    pub(crate) fn revocation(&self, token: u64) -> PathBuf {
        self.path(&format!("{token}.{}revoke", self.prefix()))
    }

    /// The lock of one lane of the counter, held for moments by its writer.
    fn lane(&self, lane: u64) -> PathBuf {
        self.path(&format!("{lane}.{}lane", self.prefix()))
    }

    /// Returns what a waiter watches: first what shows a release, then what must not be replaced.
    pub(crate) fn watched(&self) -> Vec<PathBuf> {
        match self.kind {
            LockKind::Lock => vec![self.main()],
            LockKind::Semaphore => vec![self.permits(), self.main()],
        }
    }

    /// Opens a file for reading, so that closing it wakes nobody. Creates it, and its directory, if missing.
    pub(crate) fn open_or_create(&self, path: &Path) -> Result<(File, Inode)> {
        if let Some(opened) = none_if_missing(create(path))? {
            return Ok(opened);
        }
        self.ensure()?;
        create(path)
    }

    /// Opens a file for writing, so that closing it wakes its watchers. Creates it, and its directory, if missing.
    pub(crate) fn open_or_create_writable(&self, path: &Path) -> Result<(File, Inode)> {
        for _ in 0..2 {
            if let Some(opened) = create_writable(path)? {
                return Ok(opened);
            }
            self.ensure()?;
        }
        Err(FileError::Replaced {
            path: path.to_owned(),
        })
    }

    fn ensure(&self) -> Result<()> {
        self.layout.ensure()?;
        if self.kind == LockKind::Semaphore {
            ensure_dir(&self.permits())?;
        }
        Ok(())
    }

    /// Creates the directory of the shared holders' notes, unless it is there.
    pub(crate) fn ensure_readers(&self) -> Result<PathBuf> {
        let dir = self.readers();
        ensure_dir(&dir)?;
        Ok(dir)
    }

    /// Locks the ledger exclusively, for moments only. `None` if somebody has deleted it, and it cannot be created anew. Then a probe does
    /// without: an attempt that it misleads creates the ledger, and tries once more.
    pub(crate) fn lock_ledger(&self) -> Result<Option<Flock>> {
        let path = self.ledger();
        match self.lock_soon(&path, Flock::exclusive) {
            Err(FileError::Io { .. }) => match open(&path)? {
                None => Ok(None),
                // An attempt has created it just now.
                Some(_) => self.lock_soon(&path, Flock::exclusive).map(Some),
            },
            locked => locked.map(Some),
        }
    }

    /// Locks the ledger shared: nobody probes meanwhile. Creates it if it is missing.
    pub(crate) fn share_ledger(&self) -> Result<Flock> {
        self.lock_soon(&self.ledger(), Flock::shared)
    }

    /// Locks a semaphore's size exclusively, to change it.
    pub(crate) fn lock_size(&self) -> Result<Flock> {
        self.lock_soon(&self.main(), Flock::exclusive)
    }

    /// Locks a semaphore's size shared: nobody changes it meanwhile.
    pub(crate) fn share_size(&self) -> Result<Flock> {
        self.lock_soon(&self.main(), Flock::shared)
    }

    /// Locks a free lane, and returns its number.
    pub(crate) fn lock_lane(&self, lanes: u64) -> Result<(u64, Flock)> {
        Flock::poll(&self.lane(0), || {
            for lane in 0..lanes {
                if let Some(lock) = self.lock_at(&self.lane(lane), Flock::exclusive)? {
                    return Ok(Some((lane, lock)));
                }
            }
            Ok(None)
        })
    }

    fn lock_soon(
        &self,
        path: &Path,
        lock: impl Fn(&Arc<File>, &Path) -> Result<Option<Flock>>,
    ) -> Result<Flock> {
        Flock::poll(path, || self.lock_at(path, &lock))
    }

    /// Locks the file at `path`; `None` if it is locked or was just replaced.
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

    fn prefix(&self) -> &'static str {
        match self.kind {
            LockKind::Lock => "",
            LockKind::Semaphore => "sem",
        }
    }

    fn path(&self, suffix: &str) -> PathBuf {
        self.layout.dir().join(format!("{}.{suffix}", self.stem))
    }
}

/// The identity of a file system object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            number: metadata.ino(),
        }
    }
}

impl fmt::Debug for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device, self.number)
    }
}

/// Opens an existing file for reading.
pub(crate) fn open(path: &Path) -> Result<Option<File>> {
    let opened = none_if_missing(open_regular(path, OFlags::RDONLY))?;
    Ok(opened.map(|(file, _)| file))
}

/// Opens an existing file for reading by its name in a directory that is being read.
pub(crate) fn open_entry(entries: &Dir, name: &str, path: &Path) -> Result<Option<(File, Inode)>> {
    let dir = entries
        .fd()
        .map_err(|errno| FileError::io("open", path)(errno.into()))?;
    none_if_missing(open_at(dir, OsStr::new(name), path, OFlags::RDONLY))
}

/// Opens an existing file for writing. Closing it wakes its watchers.
pub(crate) fn open_writable(path: &Path) -> Result<Option<(File, Inode)>> {
    none_if_missing(open_regular(path, OFlags::RDWR))
}

/// Opens a file for writing, and creates it if missing; `None` if its directory is missing.
pub(crate) fn create_writable(path: &Path) -> Result<Option<(File, Inode)>> {
    none_if_missing(open_regular(path, OFlags::RDWR | OFlags::CREATE))
}

/// Removes a file.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let (dir, name) = parent(path)?;
    unlinkat(&dir, name, AtFlags::empty()).map_err(|errno| FileError::io("remove", path)(errno.into()))
}

/// A file that will be removed. Its directory is open already, if that could be opened: by then the process may have no descriptor left.
#[derive(Debug)]
pub(crate) struct Removal {
    path: PathBuf,
    dir: Option<OwnedFd>,
}

impl Removal {
    pub(crate) fn of(path: PathBuf) -> Self {
        let dir = parent(&path).ok().map(|(dir, _)| dir);
        Self { path, dir }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn remove(&self) -> Result<()> {
        let (Some(dir), Some(name)) = (&self.dir, self.path.file_name()) else {
            return remove(&self.path);
        };
        unlinkat(dir, name, AtFlags::empty())
            .map_err(|errno| FileError::io("remove", &self.path)(errno.into()))
    }
}

/// Renames a file within its directory. Returns `false` if it is missing.
pub(crate) fn rename(path: &Path, new: &str) -> Result<bool> {
    let renamed = parent(path).and_then(|(dir, old)| {
        renameat(&dir, old, &dir, new).map_err(|errno| FileError::io("rename", path)(errno.into()))
    });
    Ok(none_if_missing(renamed)?.is_some())
}

/// Opens a directory for its entries, among which are `.` and `..`; `None` if it is missing.
pub(crate) fn entries(dir: &Path) -> Result<Option<Dir>> {
    let read = open_dir(dir, OFlags::RDONLY).and_then(|opened| {
        Dir::new(opened).map_err(|errno| FileError::io("read the directory", dir)(errno.into()))
    });
    none_if_missing(read)
}

/// Returns whether a part of a file's name is an owner. No file without one is removed as a dead process's.
pub(crate) fn is_owner(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether `path` still leads to `inode`.
pub(crate) fn is_at(path: &Path, inode: Inode) -> Result<bool> {
    Ok(inode_at(path)? == Some(inode))
}

/// Returns the inode that `path` leads to.
pub(crate) fn inode_at(path: &Path) -> Result<Option<Inode>> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(Inode::of(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::io("look at", path)(error)),
    }
}

fn create(path: &Path) -> Result<(File, Inode)> {
    open_regular(path, OFlags::RDONLY | OFlags::CREATE)
}

fn none_if_missing<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Err(FileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Opens the directory of a file, and returns it with the file's name in it. Then nobody can put a symbolic link between the two.
fn parent(path: &Path) -> Result<(OwnedFd, &OsStr)> {
    match (path.parent(), path.file_name()) {
        (Some(dir), Some(name)) => Ok((open_dir(dir, THROUGH)?, name)),
        _ => Err(FileError::io("open", path)(io::ErrorKind::InvalidInput.into())),
    }
}

/// Opens a directory, but none that a symbolic link in its place leads to.
fn open_dir(dir: &Path, how: OFlags) -> Result<OwnedFd> {
    let flags = how | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| openat(CWD, dir, flags, Mode::empty())).map_err(|errno| {
        if dir.is_symlink() {
            return wrong_type(dir, "a symbolic link", "a directory");
        }
        FileError::io("open the directory", dir)(errno.into())
    })
}

fn open_regular(path: &Path, flags: OFlags) -> Result<(File, Inode)> {
    let (dir, name) = parent(path)?;
    open_at(dir.as_fd(), name, path, flags)
}

/// Opens the file of this name in a directory. The path is for errors.
fn open_at(dir: BorrowedFd<'_>, name: &OsStr, path: &Path, flags: OFlags) -> Result<(File, Inode)> {
    // NONBLOCK: opening a FIFO of that name must not hang.
    let safe = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = retry_on_intr(|| openat(dir, name, flags | safe, mode));
    let file = opened.map(File::from).map_err(|errno| {
        if path.is_symlink() {
            return wrong_type(path, "a symbolic link", "a file");
        }
        FileError::io("open", path)(errno.into())
    })?;
    let metadata = file.metadata().map_err(FileError::io("look at", path))?;
    if !metadata.is_file() {
        return Err(wrong_type(path, "something else", "a regular file"));
    }
    // One that this may just have created, and nobody else's.
    let is_new = metadata.len() == 0 && metadata.nlink() == 1 && metadata.uid() == 0;
    if flags.contains(OFlags::CREATE)
        && is_new
        && let Some((user, group)) = heir(dir)
    {
        fchown(&file, Some(user), Some(group))
            .map_err(|error| FileError::io("give its directory's owner", path)(error.into()))?;
    }
    Ok((file, Inode::of(&metadata)))
}

/// Returns the owner that something of root's in a directory of somebody else should have. Root's would bar that user from the lock: whoever
/// runs a command once by `sudo` often has the home of a user.
fn heir(dir: impl AsFd) -> Option<(Uid, Gid)> {
    if !geteuid().is_root() {
        return None;
    }
    let dir = fstat(dir).ok()?;
    let owner = (Uid::from_raw(dir.st_uid), Gid::from_raw(dir.st_gid));
    (!owner.0.is_root()).then_some(owner)
}

/// Creates a directory for its owner alone, unless it is there.
pub(crate) fn ensure_dir(dir: &Path) -> Result<()> {
    if !check_dir(dir)? {
        create_dirs(dir)?;
        if !check_dir(dir)? {
            return Err(FileError::io("create the directory", dir)(
                io::ErrorKind::NotFound.into(),
            ));
        }
    }
    Ok(())
}

/// Returns whether a directory is there.
///
/// # Errors
/// If something else is.
fn check_dir(dir: &Path) -> Result<bool> {
    let metadata = match dir.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(FileError::io("look at", dir))?,
    };
    if metadata.is_symlink() {
        return Err(wrong_type(dir, "a symbolic link", "a directory"));
    }
    if !metadata.is_dir() {
        return Err(wrong_type(dir, "a file", "a directory"));
    }
    Ok(true)
}

/// Returns the canonical path of a directory, also of one that is still to be created.
fn canonical(dir: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(dir).map_err(FileError::io("find", dir))?;
    for there in absolute.ancestors() {
        match there.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => {
                let found = found.map_err(FileError::io("find", dir))?;
                let missing = absolute.strip_prefix(there).unwrap_or(Path::new(""));
                // To join nothing would end it in a slash.
                return Ok(found.join(missing).components().collect());
            }
        }
    }
    Ok(absolute)
}

/// Creates a directory and those that it is in, each for its owner alone.
fn create_dirs(dir: &Path) -> Result<()> {
    let is_missing = |at: &&Path| !at.as_os_str().is_empty() && at.symlink_metadata().is_err();
    let mut missing: Vec<_> = dir.ancestors().take_while(is_missing).collect();
    // `..` is there with what is before it.
    missing.retain(|at| at.file_name().is_some());
    while let Some(next) = missing.pop() {
        let (parent, name) = parent(next)?;
        match mkdirat(&parent, name, Mode::RWXU) {
            Err(Errno::EXIST) => continue,
            created => created.map_err(|errno| FileError::io("create the directory", dir)(errno.into()))?,
        }
        if let Some((user, group)) = heir(&parent) {
            give_new_dir(&parent, name, user, group)
                .map_err(|errno| FileError::io("give its directory's owner", next)(errno.into()))?;
        }
    }
    Ok(())
}

/// Gives a user what root has just created, but nothing that somebody has put in its place.
fn give_new_dir(parent: &OwnedFd, name: &OsStr, user: Uid, group: Gid) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(parent, name, flags, Mode::empty())?;
    if fstat(&made)?.st_uid == 0 {
        fchown(&made, Some(user), Some(group))?;
    }
    Ok(())
}

/// Returns the error for a path that leads to something else.
fn wrong_type(path: &Path, found: &'static str, wanted: &'static str) -> FileError {
    FileError::WrongType {
        path: path.to_owned(),
        found,
        wanted,
    }
}

/// Returns the file name for `name`. No two names share one, also where the file system folds case or normalises
/// Unicode.
///
/// A hashed name begins with `%h`. No escaped one does, as `h` is no hexadecimal digit.
fn encode(name: &str) -> String {
    let plain = escape_name(name);
    if plain.len() <= MAX_ENCODED {
        return plain;
    }
    let mut hashed = String::from(HASHED);
    for byte in Sha256::digest(name.as_bytes()) {
        push_hex(&mut hashed, byte);
    }
    hashed
}

fn escape_name(name: &str) -> String {
    escape(name.as_bytes(), |c, at| is_plain(c) || (c == b'.' && at > 0))
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

    /// The name as a file system that folds case sees it.
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
        let layout = Arc::new(Layout::open(dir.path(), &"A".repeat(Layout::MAX_NAMESPACE)).unwrap());
        let name = LockName::new("a".repeat(MAX_ENCODED)).unwrap();
        let files = layout.files(&name, LockKind::Semaphore);
        let longest = files.permit(u32::MAX);
        files.open_or_create(&longest).unwrap();
        let longest = files.lane(u64::from(u32::MAX));
        assert!(longest.file_name().unwrap().len() <= 255);
        files.open_or_create(&longest).unwrap();
    }
}
