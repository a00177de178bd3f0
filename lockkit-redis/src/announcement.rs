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

    /// Returns whether anybody watches the lock of this channel.
    pub(crate) fn is_watched(&self, channel: &[u8]) -> bool {
        let map = self.by_channel.lock();
        map.get(channel)
            .is_some_and(|watched| watched.receiver_count() > 0)
    }

    fn listen(&self, channel: &[u8]) -> watch::Receiver<()> {
        let mut map = self.by_channel.lock();
        map.retain(|_, watched| watched.receiver_count() > 0);
        map.entry(channel.to_vec()).or_default().subscribe()
    }
}

/// One who watches a lock.
///
/// A second watch of the lock subscribes again, which changes nothing at the server.
pub(crate) struct RedisWatch {
    /// It is dropped before `subscription`: a watch that has ended does not count any more when it is asked who else is there.
    told: watch::Receiver<()>,
    subscription: Subscription,
    /// The number of the connection that is subscribed.
    subscribed: Option<u64>,
}

/// The part of a watch in the subscription to its channel. Its drop does no I/O: the connection's supervisor unsubscribes, unless others
/// watch the lock.
struct Subscription {
    connection: Arc<ManagedConnection>,
    channel: Vec<u8>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.connection.leave(std::mem::take(&mut self.channel));
    }
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
        // From now on, whatever this future comes to, the drop of the watch leaves the channel.
        let mut watch = Self {
            told: announcements.listen(&channel),
            subscription: Subscription {
                connection: connection.clone(),
                channel,
            },
            subscribed: None,
        };
        watch.subscribe().await?;
        Ok(watch)
    }

    /// Subscribes on the connection that there is now. Returns `false` if it has been done there.
    async fn subscribe(&mut self) -> Result<bool> {
        const OPERATION: &str = "watch";

        let Subscription { connection, channel } = &self.subscription;
        let current = connection.current(OPERATION)?;
        if self.subscribed == Some(current.number()) {
            return Ok(false);
        }
        let subscribed = current.subscribe(channel).await;
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
                    let number = self.subscription.connection.number();
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
            .field("channel", &String::from_utf8_lossy(&self.subscription.channel))
            .field("subscribed", &self.subscribed)
            .finish_non_exhaustive()
    }
}
