//! Deployments to torture: private servers, what may befall them, and what that excuses.
//!
//! The machine that makes schedules, plays them and judges them is `lockkit_conformance::torture`; docs/torture.md says
//! what it varies and what it judges. [`command`] does the same for `lockkit run`.

pub mod command;
mod deployment;
pub mod embedded;
pub mod etcd;
pub mod mysql;
pub mod postgres;
pub mod redis;
pub mod redlock;
pub mod sentinels;
mod wires;
pub mod zookeeper;

pub use deployment::{Blow, Deployment, Harm, Servers};

use std::{error::Error, io, sync::Arc};

use lockkit_conformance::torture::Target;
use lockkit_testbed::{etcd as etcds, mysql::Flavour, postgres as pg, redis as servers, zookeeper as zk};

/// The names of all targets.
pub const TARGETS: [&str; 17] = [
    "memory",
    "file",
    "redis",
    "valkey",
    "redis-sentinel",
    "redlock",
    "redlock3",
    "zk",
    "zk3",
    "mariadb",
    "mysql",
    "mariadb-lease",
    "mysql-lease",
    "zk-readwrite",
    "postgres",
    "etcd",
    "etcd3",
];

/// Returns what a target needs, as `LOCKKIT_REQUIRE` calls it, and why it is not here, if it is not.
pub fn missing(target: &str) -> (&'static str, Option<String>) {
    let mysql = lockkit_testbed::mysql::MySql::missing;
    match target {
        "redis" | "redis-sentinel" | "redlock" | "redlock3" => ("redis", servers::missing()),
        "valkey" => ("valkey", servers::missing_valkey()),
        "zk" | "zk3" | "zk-readwrite" => ("zk", zk::missing()),
        "mariadb" | "mariadb-lease" => ("mysql", mysql(Flavour::MariaDb)),
        "mysql" | "mysql-lease" => ("mysql-server", mysql(Flavour::MySql)),
        "postgres" => ("postgres", pg::missing()),
        "etcd" | "etcd3" => ("etcd", etcds::missing()),
        _ => ("memory", None),
    }
}

/// Starts the servers of a target.
///
/// # Errors
/// If there is no such target, or its servers do not come up.
pub fn start(target: &str) -> Result<Arc<dyn Target>, Box<dyn Error + Send + Sync>> {
    fn of(servers: impl Servers) -> io::Result<Arc<dyn Target>> {
        Ok(Arc::new(Deployment::of(servers)?))
    }
    Ok(match target {
        "memory" => Arc::new(embedded::Memory::default()),
        "file" => Arc::new(embedded::Files::new()?),
        "redis" => of(redis::Redis::start(servers::program())?)?,
        "valkey" => of(redis::Redis::start(servers::valkey())?)?,
        "redis-sentinel" => of(sentinels::Sentinels::start()?)?,
        "redlock" => of(redlock::Redlock::start(5)?)?,
        "redlock3" => of(redlock::Redlock::start(3)?)?,
        "zk" => of(zookeeper::Single::start("mutex")?)?,
        "zk-readwrite" => of(zookeeper::Single::start("readwrite")?)?,
        "zk3" => of(zookeeper::Ensemble::start()?)?,
        "mariadb" => of(mysql::Database::start(Flavour::MariaDb, false)?)?,
        "mysql" => of(mysql::Database::start(Flavour::MySql, false)?)?,
        "mariadb-lease" => of(mysql::Database::start(Flavour::MariaDb, true)?)?,
        "mysql-lease" => of(mysql::Database::start(Flavour::MySql, true)?)?,
        "postgres" => of(postgres::Database::start()?)?,
        "etcd" => of(etcd::Single::start()?)?,
        "etcd3" => of(etcd::Cluster::start()?)?,
        _ => {
            let known = TARGETS.join(", ");
            return Err(io::Error::other(format!("there is no target {target:?}; there are {known}")).into());
        }
    })
}
