//! The conformance suite.

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing};
use lockkit_core::{LockClient, Result};
use lockkit_postgres::PostgresConfig;
use lockkit_testbed::postgres::{self, PgServer};

use crate::servers::{connect, shared};

#[derive(Debug)]
struct Server;

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<LockClient> {
        self.connect(&shared().url()).await
    }

    fn missing(&self) -> Option<Missing> {
        postgres::missing().map(|reason| Missing {
            backend: "postgres".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(shared().url())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        connect(PostgresConfig::new(url)).await
    }

    fn secret(&self) -> Option<String> {
        Some(PgServer::PASSWORD.to_owned())
    }
}

lockkit_conformance::tests!(Server);
