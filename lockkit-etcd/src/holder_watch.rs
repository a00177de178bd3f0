//! A watch on who holds a lock, for those who observe it.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{
    LockKind,
    spi::{HolderWatch, queue::holders},
};

use crate::{
    backend::Shared,
    error::Result,
    layout::{contender, prefix},
    watch::Watch,
};

/// One who watches who holds a lock: through a watch of all its keys, which tells of each that comes or goes.
pub(crate) struct EtcdWatch {
    shared: Arc<Shared>,
    queue: String,
    kind: LockKind,
    /// The holders' keys when the watch was set last.
    holders: Vec<Vec<u8>>,
    armed: Option<Watch>,
}

impl EtcdWatch {
    /// Sets the watch.
    ///
    /// # Errors
    /// If the servers cannot be asked.
    pub(crate) async fn begin(shared: Arc<Shared>, queue: String, kind: LockKind) -> Result<Self> {
        let mut watch = Self {
            shared,
            queue,
            kind,
            holders: Vec::new(),
            armed: None,
        };
        watch.arm().await?;
        Ok(watch)
    }

    /// Sets the watch. Returns `true` if the holders are others than when it was set last.
    async fn arm(&mut self) -> Result<bool> {
        let watch = self.shared.watcher.range(prefix(&self.queue));
        watch.confirmed().await?;
        let seen = self.shared.read_queue(&self.queue).await?;
        let contenders = seen.iter().filter_map(|kv| contender(&self.queue, self.kind, kv));
        let (holders, _) = holders(&contenders.collect::<Vec<_>>(), self.kind);
        let holders: Vec<_> = holders.into_iter().map(<[u8]>::to_vec).collect();
        self.armed = Some(watch);
        let is_changed = holders != self.holders;
        self.holders = holders;
        Ok(is_changed)
    }
}

#[async_trait]
impl HolderWatch for EtcdWatch {
    async fn changed(&mut self) {
        loop {
            if let Some(watch) = &self.armed {
                watch.event().await;
                // What comes before the watch is set again shows then, by the holders.
                self.armed = None;
            }
            match self.arm().await {
                Ok(true) => return,
                // Somebody has come or gone who waited.
                Ok(false) => {}
                // The driver looks from time to time, and asks again then.
                Err(error) => {
                    tracing::debug!(%error, "cannot watch a lock");
                    return std::future::pending().await;
                }
            }
        }
    }
}

impl fmt::Debug for EtcdWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdWatch")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
