//! The masters of a test, and clients of them.

use std::{collections::BTreeSet, sync::Arc};

use lockkit_core::{LockClient, Result};
use lockkit_redis::{RedlockBackend, RedlockConfig};
use lockkit_testbed::{
    Proxy, eventually,
    redis::{RedisBuilder, RedisServer},
};

use crate::common::{LONG, MS, SECOND};

/// Masters, each on its own port.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) masters: Vec<RedisServer>,
}

impl World {
    pub(crate) fn of(count: usize) -> Self {
        Self::built(count, |builder| builder)
    }

    pub(crate) fn built(count: usize, build: impl Fn(RedisBuilder) -> RedisBuilder) -> Self {
        let masters = (0..count).map(|_| build(RedisServer::builder()).start().unwrap());
        Self {
            masters: masters.collect(),
        }
    }

    pub(crate) fn five() -> Self {
        Self::of(5)
    }

    pub(crate) fn url(&self) -> String {
        url(self.masters.iter().map(RedisServer::url))
    }

    pub(crate) fn config(&self) -> RedlockConfig {
        config(&self.url())
    }

    pub(crate) async fn client(&self) -> LockClient {
        connect(self.config()).await.unwrap()
    }

    /// Connects a client through its own proxies, one for each master.
    pub(crate) async fn client_behind_proxies(&self) -> (LockClient, Arc<Vec<Proxy>>) {
        let (config, proxies) = self.behind_proxies();
        (connect(config).await.unwrap(), proxies)
    }

    /// Returns a config for new proxies, one for each master, and the proxies.
    pub(crate) fn behind_proxies(&self) -> (RedlockConfig, Arc<Vec<Proxy>>) {
        let proxies: Vec<_> = self
            .masters
            .iter()
            .map(|master| Proxy::start(master.addr()).unwrap())
            .collect();
        let urls: Vec<_> = proxies
            .iter()
            .map(|proxy| format!("redis://{}", proxy.addr()))
            .collect();
        let url = url(urls.iter().map(String::as_str));
        (config(&url), Arc::new(proxies))
    }

    /// Returns the keys of each master, except for those that are always there.
    pub(crate) fn left(&self) -> Vec<BTreeSet<String>> {
        self.masters.iter().map(left_at).collect()
    }

    /// Waits until nobody holds or waits at any master that runs.
    pub(crate) async fn nothing_is_left(&self, case: &str) {
        let deadline = std::time::Instant::now() + LONG;
        loop {
            let left = self.left();
            if left.iter().all(BTreeSet::is_empty) {
                return;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "{case}: left behind: {left:?}"
            );
            tokio::time::sleep(5 * MS).await;
        }
    }

    /// Returns the number of masters with a key of lock `name`.
    pub(crate) fn holding(&self, name: &str) -> usize {
        let key = format!("lockkit:{name}");
        let there = |master: &&RedisServer| master.cli(&["EXISTS", &key]).is_ok_and(|there| there == "1");
        self.masters.iter().filter(there).count()
    }

    /// Waits until this many masters vote, by their own markers.
    pub(crate) async fn voting(&self, count: usize) {
        eventually(&format!("{count} masters with a vote"), async || {
            self.masters.iter().filter(|master| votes(master)).count() == count
        })
        .await;
    }

    /// Waits until a majority of the masters lists `count` waiters.
    pub(crate) async fn waiters(&self, name: &str, count: usize) {
        let keys = ["writers", "readers"].map(|list| format!("lockkit:lockkit#{list}:{{lockkit:{name}}}"));
        let waiting = |master: &RedisServer| {
            keys.iter()
                .filter_map(|key| master.cli(&["ZCARD", key]).ok()?.parse::<usize>().ok())
                .sum::<usize>()
        };
        eventually(&format!("{count} waiting for {name}"), async || {
            self.masters
                .iter()
                .filter(|master| waiting(master) >= count)
                .count()
                > self.masters.len() / 2
        })
        .await;
    }
}

/// Returns whether the master's marker names its process.
pub(crate) fn votes(master: &RedisServer) -> bool {
    let (Ok(marker), Ok(info)) = (
        master.cli(&["GET", "lockkit:lockkit#redlock"]),
        master.cli(&["INFO", "server"]),
    ) else {
        return false;
    };
    let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
    run_id.is_some_and(|run_id| marker.starts_with(run_id))
}

pub(crate) fn left_at(master: &RedisServer) -> BTreeSet<String> {
    let Ok(keys) = master.cli(&["KEYS", "*"]) else {
        return BTreeSet::new();
    };
    keys.lines()
        .filter(|key| {
            !key.is_empty() && *key != "lockkit:lockkit#redlock" && !key.starts_with("lockkit:lockkit#fence:")
        })
        .map(str::to_owned)
        .collect()
}

pub(crate) fn url<'a>(masters: impl Iterator<Item = &'a str>) -> String {
    let masters: Vec<_> = masters
        .map(|master| master.split_once("://").map_or(master, |(_, rest)| rest))
        .collect();
    format!("redlock://{}", masters.join(","))
}

/// Lets masters take long, for tests in which none is silent: then only the machine is slow.
pub(crate) fn config(url: &str) -> RedlockConfig {
    let mut config = RedlockConfig::new(url);
    config.master_timeout = 2 * SECOND;
    config
}

pub(crate) async fn connect(config: RedlockConfig) -> Result<LockClient> {
    Ok(LockClient::new(RedlockBackend::connect(config).await?))
}
