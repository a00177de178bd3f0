//! Beside the Redis backend.

use std::{sync::Arc, time::Duration};

use lockkit::{BoxError, spi::Mode};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};
use redis::{
    AsyncConnectionConfig, IntoConnectionInfo, ProtocolVersion, aio::MultiplexedConnection,
    io::tcp::TcpSettings,
};
use rslock::LockManager;

use super::{exclusive_alone, uncontended_alone};

/// The ttl: that of the holds that a dying process leaves behind.
const TTL: Duration = Duration::from_secs(4);
const DELETE_IF_MINE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";
const MINE: &str = "0123456789abcdef0123456789abcdef";

/// A connection with the settings that lockkit has.
async fn connect(url: &str) -> Result<MultiplexedConnection, BoxError> {
    let info = url.into_connection_info()?;
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let info = info
        .set_redis_settings(settings)
        .set_tcp_settings(TcpSettings::default().set_nodelay(true));
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    let client = redis::Client::open(info)?;
    Ok(client
        .get_multiplexed_async_connection_with_config(&config)
        .await?)
}

/// The least that can be done, on such a connection: `SET NX PX`, and a script that
/// deletes. No queue, no wake-up, no fencing token, no renewal, no notice of loss.
#[derive(Clone, Debug)]
pub struct SetNx {
    /// The server.
    pub url: String,
}

impl Subject for SetNx {
    type Client = SetNxClient;

    async fn client(&self) -> Result<SetNxClient, BoxError> {
        let mut connection = connect(&self.url).await?;
        let digest: String = redis::cmd("SCRIPT")
            .arg("LOAD")
            .arg(DELETE_IF_MINE)
            .query_async(&mut connection)
            .await?;
        Ok(SetNxClient {
            connection,
            digest: digest.into(),
        })
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::BusyTry => None,
            other => uncontended_alone(other),
        })
    }
}

/// A connection, and the script's digest.
#[derive(Clone)]
pub struct SetNxClient {
    connection: MultiplexedConnection,
    digest: Arc<str>,
}

impl Client for SetNxClient {
    type Contender = SetNxKey;

    async fn contender(&self, name: &str, _: Mode) -> Result<SetNxKey, BoxError> {
        Ok(SetNxKey {
            client: self.clone(),
            key: format!("raw:{name}"),
        })
    }
}

/// A key.
#[derive(Clone)]
pub struct SetNxKey {
    client: SetNxClient,
    key: String,
}

impl Contender for SetNxKey {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let taken = self.try_acquire().await?;
        taken.ok_or_else(|| "it was taken".into())
    }

    async fn try_acquire(&mut self) -> Result<Option<()>, BoxError> {
        let set: Option<String> = redis::cmd("SET")
            .arg(&self.key)
            .arg(MINE)
            .arg("NX")
            .arg("PX")
            .arg(30_000)
            .query_async(&mut self.client.connection)
            .await?;
        Ok(set.map(drop))
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        let deleted: i64 = redis::cmd("EVALSHA")
            .arg(&*self.client.digest)
            .arg(1)
            .arg(&self.key)
            .arg(MINE)
            .query_async(&mut self.client.connection)
            .await?;
        (deleted == 1).then_some(()).ok_or_else(|| "it was lost".into())
    }
}

/// The least that hands a lock from one client to another who waits: a list with one token in it, which `BLPOP` takes
/// and `LPUSH` gives back. No fencing token, no lease: what a client has taken that dies is gone for ever.
#[derive(Clone, Debug)]
pub struct TokenRing {
    /// The server.
    pub url: String,
}

impl Subject for TokenRing {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Permits => None,
            Scenario::Recovery => Some("what a dead client has taken is gone for ever".to_owned()),
            other => exclusive_alone(other),
        })
    }
}

impl Client for TokenRing {
    type Contender = PoppedToken;

    async fn contender(&self, name: &str, mode: Mode) -> Result<PoppedToken, BoxError> {
        let mut connection = connect(&self.url).await?;
        let tokens = match mode {
            Mode::Permits(permits) => permits.get(),
            _ => 1,
        };
        let key = format!("tokens:{name}");
        // The first one, in any process, puts them there.
        let mut put = redis::cmd("EVAL");
        put.arg(PUT_TOKENS)
            .arg(2)
            .arg(&key)
            .arg(format!("{key}:put"))
            .arg(tokens)
            .exec_async(&mut connection)
            .await?;
        Ok(PoppedToken { connection, key })
    }
}

const PUT_TOKENS: &str = "if redis.call('SETNX', KEYS[2], 1) == 1 then for token = 1, ARGV[1] do redis.call('LPUSH', KEYS[1], token) end end";

/// A list, in a connection that waits for nobody else.
pub struct PoppedToken {
    connection: MultiplexedConnection,
    key: String,
}

impl Contender for PoppedToken {
    type Held = String;

    async fn acquire(&mut self) -> Result<String, BoxError> {
        let mut pop = redis::cmd("BLPOP");
        let pop = pop.arg(&self.key).arg(0);
        let (_, token): (String, String) = pop.query_async(&mut self.connection).await?;
        Ok(token)
    }

    async fn release(&mut self, token: String) -> Result<(), BoxError> {
        let mut push = redis::cmd("LPUSH");
        let push = push.arg(&self.key).arg(token);
        push.exec_async(&mut self.connection).await?;
        Ok(())
    }
}

/// The crate `rslock`: Redlock by polling, on one server or on several.
#[derive(Clone, Debug)]
pub struct Rslock {
    /// The servers.
    pub urls: Vec<String>,
}

impl Subject for Rslock {
    type Client = RslockClient;

    async fn client(&self) -> Result<RslockClient, BoxError> {
        Ok(RslockClient(LockManager::new(self.urls.clone())))
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(exclusive_alone(scenario))
    }
}

/// Its manager, with connections of its own.
#[derive(Clone)]
pub struct RslockClient(LockManager);

impl Client for RslockClient {
    type Contender = RslockKey;

    async fn contender(&self, name: &str, _: Mode) -> Result<RslockKey, BoxError> {
        Ok(RslockKey {
            manager: self.0.clone(),
            key: format!("rslock:{name}"),
        })
    }
}

/// A key.
#[derive(Clone)]
pub struct RslockKey {
    manager: LockManager,
    key: String,
}

impl Contender for RslockKey {
    type Held = rslock::Lock;

    async fn acquire(&mut self) -> Result<rslock::Lock, BoxError> {
        loop {
            // It gives up after three tries, unless it is told otherwise.
            if let Ok(lock) = self.manager.lock(self.key.as_bytes(), TTL).await {
                return Ok(lock);
            }
        }
    }

    async fn release(&mut self, held: rslock::Lock) -> Result<(), BoxError> {
        self.manager.unlock(&held).await;
        Ok(())
    }
}
