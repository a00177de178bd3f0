//! Announcements: a client that has taken or given up a lock tells those who watch it.

use std::{collections::HashMap, fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{
    Result,
    spi::{HolderWatch, Mutex},
};
use tokio::sync::watch;

use crate::{connection::ManagedConnection, error::failed};

/// Those of one client who watch locks, by the channels that these are announced on.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    by_channel: Mutex<HashMap<Vec<u8>, watch::Sender<()>>>,
}

impl Announcements {
    /// Tells those who watch the lock of this channel.
    pub(crate) fn deliver(&self, channel: &[u8]) {
        if let Some(watched) = self.by_channel.lock().get(channel) {
            watched.send_replace(());
        }
    }

    /// Tells all. A new connection may have missed any announcement, and has to subscribe anew.
    pub(crate) fn tell_all(&self) {
        for watched in self.by_channel.lock().values() {
            watched.send_replace(());
        }
    }

    fn listen(&self, channel: &[u8]) -> watch::Receiver<()> {
        let mut map = self.by_channel.lock();
        map.retain(|_, watched| watched.receiver_count() > 0);
        map.entry(channel.to_vec()).or_default().subscribe()
    }
}

/// One who watches a lock.
///
/// The connection stays subscribed after the watch has ended, for as long as it lasts itself: dropping a watch does no I/O. A
/// second watch of the lock subscribes again, which changes nothing at the server.
pub(crate) struct RedisWatch {
    connection: Arc<ManagedConnection>,
    channel: Vec<u8>,
    told: watch::Receiver<()>,
    /// The number of the connection that is subscribed.
    subscribed: Option<u64>,
}

impl RedisWatch {
    /// Subscribes.
    ///
    /// # Errors
    /// If there is no connection, or the server refuses.
    pub(crate) async fn begin(
        connection: &Arc<ManagedConnection>,
        announcements: &Announcements,
        channel: Vec<u8>,
    ) -> Result<Self> {
        let mut watch = Self {
            connection: connection.clone(),
            told: announcements.listen(&channel),
            channel,
            subscribed: None,
        };
        watch.subscribe().await?;
        Ok(watch)
    }

    /// Subscribes on the connection that there is now. Returns `false` if it has been done there.
    async fn subscribe(&mut self) -> Result<bool> {
        const OPERATION: &str = "watch";

        let current = self.connection.current(OPERATION)?;
        if self.subscribed == Some(current.number()) {
            return Ok(false);
        }
        let subscribed = current.subscribe(&self.channel).await;
        subscribed.map_err(|error| failed(OPERATION, error))?;
        self.subscribed = Some(current.number());
        Ok(true)
    }
}

#[async_trait]
impl HolderWatch for RedisWatch {
    async fn changed(&mut self) {
        loop {
            match self.subscribe().await {
                // Nobody knows what was announced before.
                Ok(true) => return,
                Ok(false) => {
                    // The sender is there for as long as somebody receives.
                    if self.told.changed().await.is_err() {
                        return std::future::pending().await;
                    }
                    let number = self.connection.number();
                    if number.is_some() && number == self.subscribed {
                        return;
                    }
                }
                // All are told once there is a connection again.
                Err(_) => {
                    if self.told.changed().await.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }
    }
}

impl fmt::Debug for RedisWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisWatch")
            .field("channel", &String::from_utf8_lossy(&self.channel))
            .field("subscribed", &self.subscribed)
            .finish_non_exhaustive()
    }
}
