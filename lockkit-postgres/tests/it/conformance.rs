//! The conformance suite.

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_postgres::PostgresConfig;
use lockkit_testbed::{
    Proxy,
    postgres::{self, PgServer},
};

use crate::servers::{config, connect, shared};

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

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let proxy = Proxy::start(shared().addr()).expect("a proxy");
        let client = connect(config(proxy.addr())).await?;
        let way = Way::new(move |outage| proxy.set_outage(outage.map(Outage::is_silent)));
        Ok(Some((client, way)))
    }

    fn secret(&self) -> Option<String> {
        Some(PgServer::PASSWORD.to_owned())
    }
}

lockkit_conformance::tests!(Server);
