//! The peers of lockkit: the least that can be done on each server, and other libraries.

mod etcd;
mod file;
mod memory;
mod mysql;
mod postgres;
mod redis;
mod zookeeper;

use std::{fmt, path::PathBuf};

use lockkit::BoxError;
use lockkit_conformance::{helper, measure::Scenario};

pub use self::{
    etcd::{LeasedKey, LockRequest, LockRequestClient, LockedName, PutKey, PutKeyClient},
    file::{DistributedFileLock, Flock, LockedFile},
    memory::TokioSync,
    mysql::{ForUpdate, GetLock},
    postgres::{AdvisoryLock, Form, LockedKey},
    redis::{PoppedToken, Rslock, RslockKey, SetNx, SetNxClient, SetNxKey, TokenRing},
    zookeeper::{Curator, CuratorLock, EphemeralNode},
};

/// Most have no shared mode and no semaphores, or other ones, and none renews what it holds.
fn exclusive_alone(scenario: Scenario) -> Option<String> {
    match scenario {
        Scenario::Shared(_) | Scenario::Permits => Some("it is measured in exclusive mode alone".to_owned()),
        Scenario::Held(_) | Scenario::Silence => Some("it renews nothing".to_owned()),
        Scenario::Waiters(_) => Some("each would need a connection".to_owned()),
        Scenario::BusyTry | Scenario::Withdrawal => {
            Some("it is measured in waits that end with a grant".to_owned())
        }
        _ => None,
    }
}

/// Declines every scenario but the uncontended ones, for a peer that cannot wait.
fn uncontended_alone(scenario: Scenario) -> Option<String> {
    let fits = matches!(scenario, Scenario::Uncontended | Scenario::OwnNames(_));
    (!fits).then(|| "it cannot wait".to_owned())
}

/// A peer of lockkit, in the form in which the processes that contend by it are told of it.
pub enum Peer {
    /// `SET NX` by hand.
    SetNx(SetNx),
    /// An ephemeral node by hand.
    EphemeralNode(EphemeralNode),
    /// `flock` by hand.
    Flock(Flock),
    /// `BLPOP` by hand.
    TokenRing(TokenRing),
    /// A row lock by hand.
    ForUpdate(ForUpdate),
    /// An advisory lock by hand.
    AdvisoryLock(AdvisoryLock),
    /// A key with a lease by hand.
    PutKey(PutKey),
    /// The server's own lock.
    LockRequest(LockRequest),
    /// `distributed-lock`.
    DistributedLock(DistributedFileLock),
    /// `rslock`.
    Rslock(Rslock),
    /// The recipe of `zookeeper-client`.
    Curator(Curator),
    /// `GET_LOCK`.
    GetLock(GetLock),
}

/// Writes what [`Peer::serve`] reads: which peer it is, and where.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetNx(it) => write!(f, "set-nx {}", it.url),
            Self::EphemeralNode(it) => write!(f, "ephemeral-node {}", it.addr),
            Self::Flock(it) => write!(f, "flock {}", it.dir.display()),
            Self::TokenRing(it) => write!(f, "token-ring {}", it.url),
            Self::ForUpdate(it) => write!(f, "for-update {}", it.url),
            Self::AdvisoryLock(it) => match it.form {
                Form::Text => write!(f, "advisory-text {}", it.url),
                Form::Prepared => write!(f, "advisory-prepared {}", it.url),
            },
            Self::PutKey(it) => write!(f, "put-key {}", it.addr),
            Self::LockRequest(it) => write!(f, "lock-request {}", it.addr),
            Self::DistributedLock(it) => write!(f, "distributed-lock {}", it.dir.display()),
            Self::Rslock(it) => write!(f, "rslock {}", it.urls.join(",")),
            Self::Curator(it) => write!(f, "curator {}", it.addr),
            Self::GetLock(it) => write!(f, "get-lock {}", it.url),
        }
    }
}

impl Peer {
    /// Serves as a helper process of this one, or of lockkit if `told` is none's name but a URL.
    ///
    /// # Errors
    /// If this process was not started as a helper, or has no runtime.
    pub fn serve(told: &str) -> Result<(), BoxError> {
        let at = |at: &str| at.to_owned();
        match told.split_once(' ') {
            Some(("set-nx", url)) => helper::rival(SetNx { url: at(url) }),
            Some(("ephemeral-node", addr)) => helper::rival(EphemeralNode { addr: at(addr) }),
            Some(("flock", dir)) => helper::rival(Flock {
                dir: PathBuf::from(dir),
            }),
            Some(("token-ring", url)) => helper::rival(TokenRing { url: at(url) }),
            Some(("for-update", url)) => helper::rival(ForUpdate { url: at(url) }),
            Some(("advisory-text", url)) => helper::rival(AdvisoryLock {
                url: at(url),
                form: Form::Text,
            }),
            Some(("advisory-prepared", url)) => helper::rival(AdvisoryLock {
                url: at(url),
                form: Form::Prepared,
            }),
            Some(("put-key", addr)) => helper::rival(PutKey { addr: addr.parse()? }),
            Some(("lock-request", addr)) => helper::rival(LockRequest { addr: addr.parse()? }),
            Some(("distributed-lock", dir)) => helper::rival(DistributedFileLock {
                dir: PathBuf::from(dir),
            }),
            Some(("rslock", urls)) => helper::rival(Rslock {
                urls: urls.split(',').map(at).collect(),
            }),
            Some(("curator", addr)) => helper::rival(Curator { addr: at(addr) }),
            Some(("get-lock", url)) => helper::rival(GetLock { url: at(url) }),
            _ => helper::main(|url| async move { lockkit::connect(&url).await }),
        }
    }
}
