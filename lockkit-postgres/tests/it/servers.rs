//! The servers that the tests share.

use std::{io, net::SocketAddr, time::Duration};

use lockkit_core::{
    AcquireOptions, Lock, LockClient, LockGuard, LockName, Result,
    spi::{self, ClaimRequest, OwnerId},
};
use lockkit_postgres::{PostgresBackend, PostgresConfig};
use lockkit_testbed::{
    Shared, eventually,
    postgres::{self, PgServer, PgSession},
    skipped,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{Instant, timeout},
};

/// Runs a test on a runtime of its own, if there is a server.
pub(crate) fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(test());
}

/// Generates the tests of a module: one for each function.
macro_rules! tests {
    ($($name:ident)*) => {
        mod on_a_server {
            $(
                #[test]
                fn $name() {
                    $crate::servers::run(super::$name);
                }
            )*
        }
    };
}
pub(crate) use tests;

/// A server that no test harms.
pub(crate) fn shared() -> &'static PgServer {
    static SERVER: Shared<PgServer> = Shared::new(|| private(&[]));
    &SERVER
}

/// A server of a test's own.
pub(crate) fn private(settings: &[(&str, &str)]) -> PgServer {
    let mut builder = PgServer::builder();
    for (name, value) in settings {
        builder = builder.setting(name, value);
    }
    builder.start().expect("the server starts")
}

/// A request as the driver makes it, of an owner that no other test uses.
pub(crate) fn request(name: &str, mode: spi::Mode) -> ClaimRequest {
    let owner = OwnerId::new(fastrand::u128(..));
    ClaimRequest::new(
        LockName::new(name).expect("a name"),
        mode,
        Duration::from_secs(30),
        owner,
    )
}

/// A name that no other test uses.
pub(crate) fn name(of: &str) -> String {
    format!("{of}/{:016x}", fastrand::u64(..))
}

/// The configuration for a server that is reached at `addr`.
pub(crate) fn config(addr: SocketAddr) -> PostgresConfig {
    PostgresConfig::new(PgServer::url_at(addr))
}

pub(crate) async fn connect(config: PostgresConfig) -> Result<LockClient> {
    Ok(LockClient::new(PostgresBackend::connect(config).await?))
}

/// A client of the server at `addr`.
pub(crate) async fn client(addr: SocketAddr) -> LockClient {
    connect(config(addr)).await.unwrap()
}

/// Acquires and releases.
pub(crate) async fn cycle(client: &LockClient, name: &str) {
    let guard = client.lock(name).unwrap().acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// A lock with this ttl and short time-outs.
pub(crate) fn brief(client: &LockClient, name: &str, ttl: Duration) -> Lock {
    let options = AcquireOptions::new().ttl(ttl).op_timeout(Duration::from_secs(1));
    client.lock(name).unwrap().with_options(options)
}

/// Returns once one client waits for the lock.
pub(crate) async fn waits(observer: &LockClient, name: &str) {
    eventually("one waits", async || {
        observer.inspect(name).await.unwrap().waiters == Some(1)
    })
    .await;
}

/// The number of names with this prefix on a list.
pub(crate) async fn listed(client: &LockClient, prefix: &str) -> Result<usize> {
    let (mut list, mut listed) = (client.list(prefix).unwrap(), 0);
    while let Some(lock) = list.next().await {
        lock?;
        listed += 1;
    }
    Ok(listed)
}

/// A lock's key, as SQL.
pub(crate) fn key(name: &str) -> String {
    format!("('x' || left(encode(sha256(convert_to('lockkit:{name}', 'UTF8')), 'hex'), 16))::bit(64)::bigint")
}

/// A session of another program.
pub(crate) fn session(server: &PgServer) -> PgSession {
    server.session().expect("a session")
}

/// A task that wants a lock.
pub(crate) struct Waiter(JoinHandle<(Result<LockGuard>, Instant)>);

impl Waiter {
    pub(crate) fn of(lock: Lock) -> Self {
        Self(tokio::spawn(
            async move { (lock.acquire().await, Instant::now()) },
        ))
    }

    /// Returns the guard and the time of the grant, within a minute.
    pub(crate) async fn granted(self) -> (LockGuard, Instant) {
        let waited = timeout(Duration::from_mins(1), self.0).await;
        let (granted, at) = waited.expect("a grant").expect("no panic");
        (granted.expect("a grant"), at)
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    pub(crate) fn abort(&self) {
        self.0.abort();
    }
}

/// A proxy that changes what clients send: instead of `what` the server gets `instead`, which is as long.
pub(crate) async fn relay(
    upstream: SocketAddr,
    what: &'static str,
    instead: &'static str,
) -> io::Result<SocketAddr> {
    assert_eq!(what.len(), instead.len(), "the messages keep their lengths");
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = TcpStream::connect(upstream).await?.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
                let mut buffer = vec![0; 64 * 1024];
                loop {
                    let length = from_client.read(&mut buffer).await?;
                    if length == 0 {
                        return Ok::<_, io::Error>(());
                    }
                    let request = &mut buffer[..length];
                    let mut from = 0;
                    while let Some(at) = request[from..]
                        .windows(what.len())
                        .position(|part| part == what.as_bytes())
                    {
                        from += at + what.len();
                        request[from - what.len()..from].copy_from_slice(instead.as_bytes());
                    }
                    to_server.write_all(request).await?;
                }
            });
        }
    });
    Ok(addr)
}
