//! Beside the ZooKeeper backend.

use std::time::Duration;

use lockkit::{BoxError, spi::Mode};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};
use zookeeper_client::{Acls, Client as Session, CreateMode, LockOptions, LockPrefix};

use super::{exclusive_alone, uncontended_alone};

const EVERYONE: Acls<'static> = Acls::anyone_all();

async fn session(addr: &str) -> Result<Session, BoxError> {
    // As long as the holds that are left behind by a process that dies.
    let connector = Session::connector().with_session_timeout(Duration::from_secs(4));
    Ok(connector.connect(addr).await?)
}

/// The recipe that comes with `zookeeper-client`, laid out as Curator's. No fencing token; a release that nobody awaits.
#[derive(Clone, Debug)]
pub struct Curator {
    /// The server.
    pub addr: String,
}

impl Subject for Curator {
    type Client = CuratorClient;

    async fn client(&self) -> Result<CuratorClient, BoxError> {
        Ok(CuratorClient(session(&self.addr).await?))
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Waiters(_) => None,
            other => exclusive_alone(other),
        })
    }
}

/// A session.
#[derive(Clone)]
pub struct CuratorClient(Session);

impl Client for CuratorClient {
    type Contender = CuratorLock;

    async fn contender(&self, name: &str, _: Mode) -> Result<CuratorLock, BoxError> {
        Ok(CuratorLock {
            session: self.0.clone(),
            dir: format!("/crate/{}", name.replace('/', "-")),
        })
    }
}

/// A directory.
#[derive(Clone)]
pub struct CuratorLock {
    session: Session,
    dir: String,
}

impl Contender for CuratorLock {
    /// The node's path.
    type Held = String;

    async fn acquire(&mut self) -> Result<String, BoxError> {
        let prefix = LockPrefix::new_curator(&self.dir, "lock-")?;
        let parents = CreateMode::Persistent.with_acls(EVERYONE);
        let options = LockOptions::new(EVERYONE).with_ancestor_options(parents)?;
        let lock = self.session.lock(prefix, b"", options).await?;
        let path = lock.lock_path().to_owned();
        // It would be deleted in the background, and nobody could tell when.
        std::mem::forget(lock);
        Ok(path)
    }

    async fn release(&mut self, path: String) -> Result<(), BoxError> {
        Ok(self.session.delete(&path, None).await?)
    }
}

/// The least that can be done: a node is made and deleted.
#[derive(Clone, Debug)]
pub struct EphemeralNode {
    /// The server.
    pub addr: String,
}

impl Subject for EphemeralNode {
    type Client = EphemeralClient;

    async fn client(&self) -> Result<EphemeralClient, BoxError> {
        Ok(EphemeralClient(session(&self.addr).await?))
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(uncontended_alone(scenario))
    }
}

/// A session.
#[derive(Clone)]
pub struct EphemeralClient(Session);

impl Client for EphemeralClient {
    type Contender = EphemeralPath;

    async fn contender(&self, name: &str, _: Mode) -> Result<EphemeralPath, BoxError> {
        Ok(EphemeralPath {
            session: self.0.clone(),
            path: format!("/raw-{}", name.replace('/', "-")),
        })
    }
}

/// A path.
pub struct EphemeralPath {
    session: Session,
    path: String,
}

impl Contender for EphemeralPath {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let options = CreateMode::Ephemeral.with_acls(EVERYONE);
        self.session.create(&self.path, b"", &options).await?;
        Ok(())
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        Ok(self.session.delete(&self.path, None).await?)
    }
}
