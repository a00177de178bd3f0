//! Redlock passes the conformance suite.

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_testbed::{Proxy, Shared, redis};

use super::world::{self, World};
use crate::common::LONG;

const PASSWORD: &str = "open-sesame";

mod five_masters {
    lockkit_conformance::tests!(super::Masters);
}

/// Five masters for all cases. They end with the test program.
static MASTERS: Shared<World> = Shared::new(|| World::built(5, |builder| builder.password(PASSWORD)));

#[derive(Debug)]
struct Masters;

#[async_trait]
impl Harness for Masters {
    async fn client(&self) -> Result<LockClient> {
        self.connect(&MASTERS.url()).await
    }

    fn missing(&self) -> Option<Missing> {
        redis::missing().map(|reason| Missing {
            backend: "redis".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(MASTERS.url())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        let mut config = world::config(url);
        // All masters reply, even if a busy machine delays them.
        config.master_timeout = LONG;
        world::connect(config).await
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let mut url = MASTERS.url();
        let proxies: Vec<_> = MASTERS
            .masters
            .iter()
            .map(|master| {
                let proxy = Proxy::start(master.addr()).unwrap();
                url = url.replace(&master.addr().to_string(), &proxy.addr().to_string());
                proxy
            })
            .collect();
        let client = self.connect(&url).await?;
        let way = Way::new(move |outage| {
            for proxy in &proxies {
                proxy.set_outage(outage.map(Outage::is_silent));
            }
        });
        Ok(Some((client, way)))
    }

    fn secret(&self) -> Option<String> {
        Some(PASSWORD.to_owned())
    }
}
