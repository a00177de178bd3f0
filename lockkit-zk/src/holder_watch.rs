//! A watch on who holds a lock, for those who observe it.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{LockKind, spi::HolderWatch};

use crate::{
    Nodes,
    backend::Shared,
    error::{Result, contained},
    session::{Session, Watched},
    turn,
    watch::Watch,
};

/// One who watches who holds a lock: through the server's watch on its directory, which tells of each node that comes or goes.
pub(crate) struct ZkWatch {
    shared: Arc<Shared>,
    path: String,
    kind: LockKind,
    /// The holders' nodes when the watch was set last.
    holders: Vec<String>,
    /// The server's watch, and the session that it belongs to: watches end with it.
    armed: Option<(Watch, Arc<Session>)>,
}

impl ZkWatch {
    /// Sets the watch.
    ///
    /// # Errors
    /// If there is no session, or the server cannot be asked.
    pub(crate) async fn begin(shared: Arc<Shared>, path: String, kind: LockKind) -> Result<Self> {
        let mut watch = Self {
            shared,
            path,
            kind,
            holders: Vec::new(),
            armed: None,
        };
        watch.arm().await?;
        Ok(watch)
    }

    /// Sets the watch. Returns `true` if the holders are others than when it was set last.
    async fn arm(&mut self) -> Result<bool> {
        let session = self.shared.session().await?;
        // With one node, it is that node that comes and goes.
        let watched = match self.shared.nodes() {
            Nodes::Simple => session.watch_node(&self.path).await?,
            Nodes::Mutex | Nodes::ReadWrite => session.watch_children(&self.path).await?,
        };
        let Watched { found, watch } = watched;
        let holders = match self.shared.nodes() {
            Nodes::Simple => found,
            Nodes::Mutex | Nodes::ReadWrite => {
                let (holders, _) = turn::holders(&found, self.kind);
                holders.into_iter().map(str::to_owned).collect()
            }
        };
        self.armed = Some((watch, session));
        let is_changed = holders != self.holders;
        self.holders = holders;
        Ok(is_changed)
    }
}

#[async_trait]
impl HolderWatch for ZkWatch {
    async fn changed(&mut self) {
        loop {
            if let Some((watch, _)) = &mut self.armed {
                watch.event().await;
                // What comes before the watch is set again shows then, by the holders.
                self.armed = None;
            }
            match contained(self.arm()).await {
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

impl fmt::Debug for ZkWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkWatch")
            .field("path", &self.path)
            .field("holders", &self.holders)
            .finish_non_exhaustive()
    }
}
