//! The Redis backend passes the conformance suite.

use std::sync::LazyLock;

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing};
use lockkit_core::{LockClient, Result};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::redis::{self, RedisServer};

const PASSWORD: &str = "open-sesame";

mod redis_server {
    lockkit_conformance::tests!(super::Server);
}

/// One server for all cases; it ends with the test program.
static SERVER: LazyLock<RedisServer> =
    LazyLock::new(|| RedisServer::builder().password(PASSWORD).start().unwrap());

#[derive(Debug)]
struct Server;

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<LockClient> {
        self.connect(SERVER.url()).await
    }

    fn missing(&self) -> Option<Missing> {
        redis::missing().map(|reason| Missing {
            backend: "redis".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(SERVER.url().to_owned())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        Ok(LockClient::new(
            RedisBackend::connect(RedisConfig::new(url)).await?,
        ))
    }

    fn secret(&self) -> Option<String> {
        Some(PASSWORD.to_owned())
    }
}
