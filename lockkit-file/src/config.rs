//! The options of the file backend.

use std::{path::PathBuf, time::Duration};

use lockkit_core::{Error, Result, spi::BackendInfo};

use crate::layout::Layout;

lockkit_core::spi::config! {
    /// The directory and the options of a [`FileBackend`](crate::FileBackend).
    ///
    /// ```
    /// use lockkit_file::FileConfig;
    ///
    /// let mut config = FileConfig::new("/var/lib/app/locks");
    /// config.namespace = "billing".into();
    /// ```
    pub struct FileConfig {
        /// The directory. If it is missing, it is created for its owner alone, and so are the files: run all processes
        /// under one account. It has to be on a local file system. Choose one that a boot does not empty: the tokens are
        /// in it.
        pub dir: PathBuf,
        /// Separates applications that share the directory: a directory in it, or none if empty. Of `[A-Za-z0-9._-]`.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The interval at which a waiter retries although nothing woke it. Default: 10 s with inotify, 25 ms without.
        pub poll: Option<Duration> = None,
    }
}

impl FileConfig {
    pub(crate) fn check(&self) -> Result<()> {
        BackendInfo::check_namespace(&self.namespace, Layout::MAX_NAMESPACE)?;
        if self.poll.is_some_and(|poll| poll < Duration::from_millis(1)) {
            return Err(Error::invalid_option("poll", "it is shorter than 1 ms"));
        }
        Ok(())
    }
}
