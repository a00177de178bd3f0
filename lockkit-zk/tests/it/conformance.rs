//! The conformance suite, once for each layout of the nodes.

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing};
use lockkit_core::{LockClient, Result};
use lockkit_testbed::zookeeper;
use lockkit_zk::{Digest, Nodes, Parents, ZkConfig};

use crate::server;

/// The clients' configuration.
#[derive(Clone, Copy, Debug)]
enum Variant {
    Mutex,
    /// A user, access for the creator alone, a path that is missing at first, and persistent directories.
    ReadWrite,
    Simple,
}

#[derive(Debug)]
struct Zk(Variant);

const PASSWORD: &str = "correct-horse-battery";

impl Zk {
    fn config(&self, addr: &str) -> ZkConfig {
        match self.0 {
            Variant::Mutex => server::brief(addr),
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
        }
    }
}

#[async_trait]
impl Harness for Zk {
    async fn client(&self) -> Result<LockClient> {
        Ok(server::patiently(self.config(&server::shared().addr().to_string())).await)
    }

    fn missing(&self) -> Option<Missing> {
        zookeeper::missing().map(|reason| Missing {
            backend: "zk".to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(server::shared().addr().to_string())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        server::client(self.config(url)).await
    }

    fn secret(&self) -> Option<String> {
        matches!(self.0, Variant::ReadWrite).then(|| PASSWORD.to_owned())
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
