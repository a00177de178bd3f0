use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

/// A file system in memory of limited size, mounted at a directory. It goes with the value.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Mounted {
    /// Mounts one with these options, such as `size=64k`. `None` if this user may mount nothing.
    pub fn new(at: &Path, options: &str) -> Option<Self> {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(at)
            .output();
        mount
            .is_ok_and(|done| done.status.success())
            .then(|| Self(at.to_owned()))
    }

    /// Mounts it again, with other options.
    ///
    /// # Errors
    /// If that is refused.
    pub fn again(&self, options: &str) -> io::Result<()> {
        let done = Command::new("mount")
            .args(["-o", options])
            .arg(&self.0)
            .status()?;
        if done.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("mount -o {options}: {done}")))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
