//! The conformance suite, once for each layout of the nodes.

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_testbed::{Proxy, zookeeper};
use lockkit_zk::{Digest, Nodes, Parents, ZkConfig};

use crate::server;

/// The clients' configuration.
#[derive(Clone, Copy, Debug)]
enum Variant {
    Mutex,
    /// A user, access for the creator alone, a path that is missing at first, and persistent directories.
    ReadWrite,
    Simple,
    /// A user, over TLS, at a server that asks for a certificate.
    #[cfg(feature = "tls")]
    Secured,
}

#[derive(Debug)]
struct Zk(Variant);

const PASSWORD: &str = "correct-horse-battery";

impl Zk {
    fn config(&self, addr: &str) -> ZkConfig {
        match self.0 {
            Variant::Mutex => {
                let mut config = server::brief(addr);
                // It raises tokens. Elsewhere they are the transactions themselves.
                config.namespace = "conformance".into();
                config
            }
            Variant::ReadWrite => {
                let mut config = server::brief(format!("{addr}/conformance/rw"));
                config.nodes = Nodes::ReadWrite;
                config.parents = Parents::Persistent;
                config.auth = Some(Digest::new("tester", PASSWORD));
                config
            }
            Variant::Simple => {
                let mut config = server::brief(addr);
                config.namespace = "simple".into();
                config.nodes = Nodes::Simple;
                config
            }
            #[cfg(feature = "tls")]
            Variant::Secured => secured::config(addr),
        }
    }
}

impl Zk {
    /// Returns what [`config`](Self::config) makes a configuration of, in this process and in others.
    fn address(&self) -> String {
        match self.0 {
            #[cfg(feature = "tls")]
            Variant::Secured => secured::address(),
            _ => server::shared().addr().to_string(),
        }
    }
}

#[async_trait]
impl Harness for Zk {
    async fn client(&self) -> Result<LockClient> {
        Ok(server::only_connected(self.config(&self.address())).await)
    }

    fn missing(&self) -> Option<Missing> {
        zookeeper::missing().map(|reason| Missing {
            backend: "zk".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(self.address())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        #[cfg(feature = "tls")]
        if let Variant::Secured = self.0 {
            // The first handshakes of a server that has just come up take seconds.
            return Ok(server::only_connected(self.config(url)).await);
        }
        server::client(self.config(url)).await
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let address = self.address();
        // Behind it may be files.
        let addr = address.split('|').next().unwrap_or_default();
        let proxy = Proxy::start(addr.parse().expect("an address")).expect("a proxy");
        let address = address.replacen(addr, &proxy.addr().to_string(), 1);
        let client = server::only_connected(self.config(&address)).await;
        let way = Way::new(move |outage| proxy.set_outage(outage.map(Outage::is_silent)));
        Ok(Some((client, way)))
    }

    fn secret(&self) -> Option<String> {
        self.config("a").auth.map(|_| PASSWORD.to_owned())
    }
}

mod mutex {
    use super::{Variant, Zk};

    lockkit_conformance::tests!(Zk(Variant::Mutex));
}

mod read_write {
    use super::{Variant, Zk};

    lockkit_conformance::tests!(Zk(Variant::ReadWrite));
}

mod simple {
    use super::{Variant, Zk};

    lockkit_conformance::tests!(Zk(Variant::Simple));
}

#[cfg(feature = "tls")]
mod secured {
    use std::sync::{Arc, LazyLock};

    use lockkit_testbed::{Certificates, Shared, zookeeper::ZkServer};
    use lockkit_zk::{Digest, Tls, ZkConfig};

    use super::{PASSWORD, Variant, Zk};
    use crate::server;

    lockkit_conformance::tests!(Zk(Variant::Secured));

    static CERTIFICATES: LazyLock<Arc<Certificates>> =
        LazyLock::new(|| Arc::new(Certificates::generate().expect("certificates")));
    static SERVER: Shared<ZkServer> = Shared::new(|| {
        let builder = ZkServer::builder().tls(&CERTIFICATES);
        let server = builder.directive("ssl.clientAuth=need").start();
        server.expect("a ZooKeeper server")
    });

    /// Returns the address and the files: another process has no certificates of its own.
    pub(super) fn address() -> String {
        let addr = SERVER.secure_addr().expect("a port for TLS").to_string();
        let files = [
            CERTIFICATES.authority(),
            CERTIFICATES.client(),
            CERTIFICATES.client_key(),
        ];
        let files = files.map(|path| path.to_str().expect("a path in UTF-8").to_owned());
        format!("{addr}|{}", files.join("|"))
    }

    pub(super) fn config(address: &str) -> ZkConfig {
        let mut parts = address.split('|');
        let mut config = server::brief(parts.next().unwrap_or_default());
        config.auth = Some(Digest::new("tester", PASSWORD));
        config.tls = Tls::Verify;
        let mut file = || parts.next().map(Into::into);
        (config.ca, config.cert, config.key) = (file(), file(), file());
        config
    }
}
