//! The conformance suite, for each flavour of server and each mode.

use std::net::SocketAddr;

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Outage, Way};
use lockkit_core::{LockClient, Result};
use lockkit_mysql::{Mode, MySqlConfig};
use lockkit_testbed::{
    Proxy,
    mysql::{Flavour, MySql},
};

use crate::servers::{config, connect, shared};

#[derive(Debug)]
struct Server {
    flavour: Flavour,
    mode: Mode,
}

impl Server {
    fn config(&self, addr: SocketAddr) -> MySqlConfig {
        let mut config = config(addr);
        config.mode = self.mode;
        config
    }
}

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<LockClient> {
        connect(self.config(shared(self.flavour).addr())).await
    }

    fn missing(&self) -> Option<Missing> {
        MySql::missing(self.flavour).map(|reason| Missing {
            backend: match self.flavour {
                Flavour::MariaDb => "mysql",
                // Not available everywhere, so it has a name of its own in `LOCKKIT_REQUIRE`.
                Flavour::MySql => "mysql-server",
            }
            .to_owned(),
            reason,
        })
    }

    fn url(&self) -> Option<String> {
        Some(shared(self.flavour).addr().to_string())
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        connect(self.config(url.parse().expect("an address"))).await
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let proxy = Proxy::start(shared(self.flavour).addr()).expect("a proxy");
        let client = connect(self.config(proxy.addr())).await?;
        let way = Way::new(move |outage| proxy.set_outage(outage.map(Outage::is_silent)));
        Ok(Some((client, way)))
    }

    fn secret(&self) -> Option<String> {
        Some(MySql::PASSWORD.to_owned())
    }
}

mod mariadb {
    use super::*;

    lockkit_conformance::tests!(Server {
        flavour: Flavour::MariaDb,
        mode: Mode::ForUpdate
    });
}

mod mysql {
    use super::*;

    lockkit_conformance::tests!(Server {
        flavour: Flavour::MySql,
        mode: Mode::ForUpdate
    });
}

mod mariadb_lease {
    use super::*;

    lockkit_conformance::tests!(Server {
        flavour: Flavour::MariaDb,
        mode: Mode::Lease
    });
}

mod mysql_lease {
    use super::*;

    lockkit_conformance::tests!(Server {
        flavour: Flavour::MySql,
        mode: Mode::Lease
    });
}
