//! The conformance suite, on one server and on three.

use std::time::Duration;

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_testbed::{
    Proxy,
    etcd::{self, EtcdServer},
};

use crate::server;

/// The servers.
#[derive(Clone, Copy, Debug)]
enum Variant {
    One,
    Three,
    /// One that asks for a password, and lets the user at nothing but its namespace.
    WithUser,
}

#[derive(Debug)]
struct Etcd(Variant);

impl Etcd {
    fn address(&self) -> String {
        match self.0 {
            Variant::One => server::shared().url(),
            Variant::Three => server::shared_cluster().url(),
            Variant::WithUser => with_user::url(),
        }
    }
}

#[async_trait]
impl Harness for Etcd {
    async fn client(&self) -> Result<LockClient> {
        Ok(server::connect(&self.address()).await)
    }

    fn missing(&self) -> Option<Missing> {
        etcd::missing().map(|reason| Missing {
            backend: "etcd".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(self.address())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        server::client(server::config(url)).await
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let url = self.address();
        let hosts = url.rsplit(['/', '@']).next().unwrap_or_default();
        let proxies: Vec<_> = hosts
            .split(',')
            .map(|host| Proxy::start(host.parse().expect("an address")).expect("a proxy"))
            .collect();
        let ways: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        let client = server::connect(&url.replace(hosts, &ways.join(","))).await;
        let way = Way::new(move |outage| {
            for proxy in &proxies {
                proxy.set_outage(outage.map(Outage::is_silent));
            }
        });
        Ok(Some((client, way)))
    }

    fn ttl(&self) -> Duration {
        match self.0 {
            // Half of it is the least that these servers grant.
            Variant::Three => Duration::from_secs(4),
            Variant::One | Variant::WithUser => Duration::from_secs(2),
        }
    }

    fn secret(&self) -> Option<String> {
        matches!(self.0, Variant::WithUser).then(|| EtcdServer::PASSWORD.to_owned())
    }
}

mod one {
    use super::{Etcd, Variant};

    lockkit_conformance::tests!(Etcd(Variant::One));
}

mod three {
    use super::{Etcd, Variant};

    lockkit_conformance::tests!(Etcd(Variant::Three));
}

mod with_user {

    use lockkit_testbed::{Shared, etcd::EtcdServer};

    use super::{Etcd, Variant};
    use crate::server::ELECTION;

    lockkit_conformance::tests!(Etcd(Variant::WithUser));

    static SERVER: Shared<EtcdServer> = Shared::new(|| {
        let server = EtcdServer::builder()
            .election_timeout(ELECTION)
            .authorise("lockkit/");
        server.start().expect("an etcd server with users")
    });

    pub(super) fn url() -> String {
        SERVER.url()
    }
}
