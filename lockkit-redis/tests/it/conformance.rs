//! The Redis backend passes the conformance suite.

use std::{ffi::OsString, time::Duration};

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{
    Proxy, Shared,
    redis::{self, RedisServer},
};

const PASSWORD: &str = "open-sesame";

mod redis_server {
    lockkit_conformance::tests!(super::Server::Redis);
}

mod valkey_server {
    lockkit_conformance::tests!(super::Server::Valkey);
}

/// One server of each for all cases; it ends with the test program.
static REDIS: Shared<RedisServer> = Shared::new(|| start(redis::program()));
static VALKEY: Shared<RedisServer> = Shared::new(|| start(redis::valkey()));

fn start(program: OsString) -> RedisServer {
    let server = RedisServer::builder().program(program).password(PASSWORD);
    server.start().unwrap()
}

#[derive(Debug)]
enum Server {
    Redis,
    Valkey,
}

impl Server {
    fn url(&self) -> &str {
        match self {
            Self::Redis => REDIS.url(),
            Self::Valkey => VALKEY.url(),
        }
    }
}

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<LockClient> {
        self.connect(Self::url(self)).await
    }

    fn missing(&self) -> Option<Missing> {
        let (backend, reason) = match self {
            Self::Redis => ("redis", redis::missing()),
            Self::Valkey => ("valkey", redis::missing_valkey()),
        };
        reason.map(|reason| Missing {
            backend: backend.to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(Self::url(self).to_owned())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        Ok(LockClient::new(
            RedisBackend::connect(RedisConfig::new(url)).await?,
        ))
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let addr = match self {
            Self::Redis => REDIS.addr(),
            Self::Valkey => VALKEY.addr(),
        };
        let proxy = Proxy::start(addr).unwrap();
        let url = Self::url(self).replace(&addr.to_string(), &proxy.addr().to_string());
        let client = self.connect(&url).await?;
        let way = Way::new(move |outage| proxy.set_outage(outage.map(Outage::is_silent)));
        Ok(Some((client, way)))
    }

    /// No other waiter dies with a holder here.
    fn freed_after_death(&self, _: &LockClient) -> Duration {
        self.ttl() + Duration::from_secs(1)
    }

    fn secret(&self) -> Option<String> {
        Some(PASSWORD.to_owned())
    }
}
