//! Beside the etcd backend.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures_util::stream;
use http::uri::PathAndQuery;
use lockkit::{BoxError, spi::Mode};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};
use prost::Message;
use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};
use tonic::{
    Request,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{exclusive_alone, uncontended_alone};

/// The ttl in seconds, that of the holds that are left behind by a process that dies.
const TTL: i64 = 4;
const BEAT: Duration = Duration::from_secs(1);

/// The messages of etcd's API that are said here.
mod wire {
    use prost::Message;

    #[derive(Clone, Message)]
    pub(super) struct LeaseGrant {
        #[prost(int64, tag = "1")]
        pub(super) ttl: i64,
    }

    #[derive(Clone, Message)]
    pub(super) struct Lease {
        #[prost(int64, tag = "2")]
        pub(super) id: i64,
    }

    #[derive(Clone, Message)]
    pub(super) struct KeepAlive {
        #[prost(int64, tag = "1")]
        pub(super) id: i64,
    }

    #[derive(Clone, Message)]
    pub(super) struct Put {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) key: Vec<u8>,
        #[prost(int64, tag = "3")]
        pub(super) lease: i64,
    }

    /// A key to delete, or to unlock.
    #[derive(Clone, Message)]
    pub(super) struct Key {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) key: Vec<u8>,
    }

    #[derive(Clone, Message)]
    pub(super) struct Deleted {
        #[prost(int64, tag = "2")]
        pub(super) keys: i64,
    }

    #[derive(Clone, Message)]
    pub(super) struct Lock {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) name: Vec<u8>,
        #[prost(int64, tag = "2")]
        pub(super) lease: i64,
    }

    #[derive(Clone, Message)]
    pub(super) struct Locked {
        #[prost(bytes = "vec", tag = "2")]
        pub(super) key: Vec<u8>,
    }

    #[derive(Clone, Copy, Message)]
    pub(super) struct Nothing {}
}

/// A connection.
#[derive(Clone, Debug)]
struct Connection(Grpc<Channel>);

impl Connection {
    async fn open(addr: SocketAddr) -> Result<Self, BoxError> {
        let channel = Endpoint::from_shared(format!("http://{addr}"))?.connect().await?;
        Ok(Self(Grpc::new(channel)))
    }

    async fn ask<Q, A>(&mut self, path: &'static str, request: Q) -> Result<A, BoxError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.0.ready().await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        Ok(self
            .0
            .unary(Request::new(request), path, codec)
            .await?
            .into_inner())
    }

    async fn keep_alive(&mut self, id: i64) -> Result<(), BoxError> {
        self.0.ready().await?;
        let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
        let codec = ProstCodec::<wire::KeepAlive, wire::Lease>::default();
        let once = Request::new(stream::iter([wire::KeepAlive { id }]));
        let mut answers = self.0.streaming(once, path, codec).await?.into_inner();
        answers.message().await?;
        Ok(())
    }

    /// A lease that is renewed until the value goes.
    async fn lease(&mut self) -> Result<Lease, BoxError> {
        let granted: wire::Lease = self
            .ask("/etcdserverpb.Lease/LeaseGrant", wire::LeaseGrant { ttl: TTL })
            .await?;
        let mut connection = self.clone();
        let beat = tokio::spawn(async move {
            let mut beat = interval(BEAT);
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                beat.tick().await;
                if connection.keep_alive(granted.id).await.is_err() {
                    return;
                }
            }
        });
        Ok(Lease { id: granted.id, beat })
    }
}

/// A lease, and what renews it.
#[derive(Debug)]
struct Lease {
    id: i64,
    beat: JoinHandle<()>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.beat.abort();
    }
}

/// The least that can be done: a key with a lease is put and deleted.
#[derive(Clone, Debug)]
pub struct PutKey {
    /// The server.
    pub addr: SocketAddr,
}

impl Subject for PutKey {
    type Client = PutKeyClient;

    async fn client(&self) -> Result<PutKeyClient, BoxError> {
        let mut connection = Connection::open(self.addr).await?;
        let lease = connection.lease().await?.into();
        Ok(PutKeyClient { connection, lease })
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::BusyTry => None,
            other => uncontended_alone(other),
        })
    }
}

/// A connection and a lease.
#[derive(Clone, Debug)]
pub struct PutKeyClient {
    connection: Connection,
    lease: Arc<Lease>,
}

impl Client for PutKeyClient {
    type Contender = LeasedKey;

    async fn contender(&self, name: &str, _: Mode) -> Result<LeasedKey, BoxError> {
        Ok(LeasedKey {
            client: self.clone(),
            key: format!("raw/{name}").into_bytes(),
        })
    }
}

/// A key.
#[derive(Debug)]
pub struct LeasedKey {
    client: PutKeyClient,
    key: Vec<u8>,
}

impl Contender for LeasedKey {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let put = wire::Put {
            key: self.key.clone(),
            lease: self.client.lease.id,
        };
        let connection = &mut self.client.connection;
        let wire::Nothing {} = connection.ask("/etcdserverpb.KV/Put", put).await?;
        Ok(())
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        let key = wire::Key {
            key: self.key.clone(),
        };
        let connection = &mut self.client.connection;
        let deleted: wire::Deleted = connection.ask("/etcdserverpb.KV/DeleteRange", key).await?;
        (deleted.keys == 1)
            .then_some(())
            .ok_or_else(|| "it was lost".into())
    }

    /// A put, whoever has put before: a try may have to write, and so costs no less.
    async fn try_acquire(&mut self) -> Result<Option<()>, BoxError> {
        self.acquire().await?;
        Ok(None)
    }
}

/// The server's own lock, which clients of many languages use: the requests `Lock` and `Unlock`, with a lease for each contender, since
/// one lease has one place in a queue. Nobody is told of a loss.
#[derive(Clone, Debug)]
pub struct LockRequest {
    /// The server.
    pub addr: SocketAddr,
}

impl Subject for LockRequest {
    type Client = LockRequestClient;

    async fn client(&self) -> Result<LockRequestClient, BoxError> {
        Ok(LockRequestClient(Connection::open(self.addr).await?))
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Waiters(_) => None,
            other => exclusive_alone(other),
        })
    }
}

/// A connection.
#[derive(Clone, Debug)]
pub struct LockRequestClient(Connection);

impl Client for LockRequestClient {
    type Contender = LockedName;

    async fn contender(&self, name: &str, _: Mode) -> Result<LockedName, BoxError> {
        let mut connection = self.0.clone();
        Ok(LockedName {
            lease: connection.lease().await?,
            connection,
            name: format!("rpc/{name}").into_bytes(),
        })
    }
}

/// A name, and a lease to lock it with.
#[derive(Debug)]
pub struct LockedName {
    connection: Connection,
    lease: Lease,
    name: Vec<u8>,
}

impl Contender for LockedName {
    /// The key.
    type Held = Vec<u8>;

    async fn acquire(&mut self) -> Result<Vec<u8>, BoxError> {
        let lock = wire::Lock {
            name: self.name.clone(),
            lease: self.lease.id,
        };
        let locked: wire::Locked = self.connection.ask("/v3lockpb.Lock/Lock", lock).await?;
        Ok(locked.key)
    }

    async fn release(&mut self, key: Vec<u8>) -> Result<(), BoxError> {
        let key = wire::Key { key };
        let wire::Nothing {} = self.connection.ask("/v3lockpb.Lock/Unlock", key).await?;
        Ok(())
    }
}
