//! The servers that the tests share.

use std::{
    io,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Lock, LockClient, LockGuard, LockName, Result,
    spi::{self, ClaimRequest, OwnerId},
};
use lockkit_mysql::{
    Mode, MySqlBackend, MySqlConfig,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions, Connection, Row,
        mysql::{MySqlConnectOptions, MySqlConnection, MySqlSslMode},
    },
};
use lockkit_testbed::{
    Shared, eventually,
    mysql::{Flavour, MySql},
    skipped, soon,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

pub(crate) const MODES: [Mode; 2] = [Mode::ForUpdate, Mode::Lease];

/// Generates the tests of a module: each function once per flavour.
macro_rules! for_each_flavour {
    ($($name:ident)*) => {$(
        mod $name {
            use lockkit_testbed::mysql::Flavour;

            #[test]
            fn mariadb() {
                $crate::servers::run(Flavour::MariaDb, super::$name);
            }

            #[test]
            fn mysql() {
                $crate::servers::run(Flavour::MySql, super::$name);
            }
        }
    )*};
}
pub(crate) use for_each_flavour;

/// The longest time for one test, on the busiest machine.
const LONGEST: Duration = Duration::from_mins(5);

/// The longest time in which the runtime of a test ends.
const ENDS_WITHIN: Duration = Duration::from_mins(1);

/// The longest time for which the server's master account waits for an answer.
const ANSWERS_WITHIN: Duration = Duration::from_mins(3);

/// Runs a test on a runtime of its own, if there is a server of this flavour. One that hangs fails, and stops no other.
pub(crate) fn run<F: Future<Output = ()>>(flavour: Flavour, test: impl FnOnce(Flavour) -> F) {
    let backend = match flavour {
        Flavour::MariaDb => "mysql",
        Flavour::MySql => "mysql-server",
    };
    if skipped(backend, MySql::missing(flavour)) {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let test = async { timeout(LONGEST, test(flavour)).await };
    let done = catch_unwind(AssertUnwindSafe(|| runtime.block_on(test)));
    let ending = Instant::now();
    // Dropped, it would wait for a thread that hangs for ever.
    runtime.shutdown_timeout(ENDS_WITHIN);
    match done {
        Ok(done) => assert!(done.is_ok(), "it hangs: it is not over after {LONGEST:?}"),
        Err(panic) => resume_unwind(panic),
    }
    assert!(ending.elapsed() < ENDS_WITHIN, "a thread of its runtime hangs");
}

/// A server that no test harms.
pub(crate) fn shared(flavour: Flavour) -> &'static MySql {
    static MARIADB: Shared<MySql> = Shared::new(|| start(Flavour::MariaDb));
    static MYSQL: Shared<MySql> = Shared::new(|| start(Flavour::MySql));
    match flavour {
        Flavour::MariaDb => &MARIADB,
        Flavour::MySql => &MYSQL,
    }
}

/// A server of a test's own.
pub(crate) fn private(flavour: Flavour, options: &[&str]) -> MySql {
    MySql::start(flavour, options).expect("the server starts")
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

/// The server's master account.
pub(crate) struct Admin {
    connection: MySqlConnection,
    options: MySqlConnectOptions,
}

impl Admin {
    pub(crate) async fn of(server: &MySql) -> Self {
        Self::login(server.addr(), "root", "")
            .await
            .expect("root may connect")
    }

    pub(crate) async fn login(addr: SocketAddr, user: &str, password: &str) -> sqlx::Result<Self> {
        Self::connect(options(addr, user, password).database(MySql::DATABASE)).await
    }

    /// An account that may use no database.
    pub(crate) async fn stranger(addr: SocketAddr, user: &str, password: &str) -> sqlx::Result<Self> {
        Self::connect(options(addr, user, password)).await
    }

    async fn connect(options: MySqlConnectOptions) -> sqlx::Result<Self> {
        let connection = options.connect().await?;
        Ok(Self { connection, options })
    }

    /// Runs one or more statements, and returns the rows as text.
    pub(crate) async fn try_run(&mut self, sql: &str) -> sqlx::Result<Vec<Vec<String>>> {
        let Ok(answer) = timeout(ANSWERS_WITHIN, rows(&mut self.connection, sql)).await else {
            // It may wait for another session for a day.
            let sessions = timeout(ENDS_WITHIN, processes(self.options.clone())).await;
            panic!("no answer within {ANSWERS_WITHIN:?}: {sql}; the sessions are {sessions:?}");
        };
        answer
    }

    pub(crate) async fn run(&mut self, sql: &str) -> Vec<Vec<String>> {
        self.try_run(sql)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The one value that a query has.
    pub(crate) async fn value(&mut self, sql: &str) -> String {
        self.run(sql).await.swap_remove(0).swap_remove(0)
    }

    /// Returns a number that the server counts for itself.
    pub(crate) async fn status(&mut self, variable: &str) -> u64 {
        let rows = self.run(&format!("SHOW GLOBAL STATUS LIKE '{variable}'")).await;
        rows[0][1].parse().expect("a number")
    }

    /// The ids of the sessions of the locks' account.
    pub(crate) async fn sessions(&mut self) -> Vec<u64> {
        let rows = self
            .run(&format!(
                "SELECT ID FROM information_schema.PROCESSLIST WHERE USER='{}' ORDER BY ID",
                MySql::USER
            ))
            .await;
        rows.iter().map(|row| row[0].parse().expect("a number")).collect()
    }

    /// The ids of the sessions that are in a transaction.
    pub(crate) async fn transactions(&mut self) -> Vec<String> {
        // InnoDB caches the result for a tenth of a second.
        sleep(Duration::from_millis(120)).await;
        let sql =
            "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id<>0";
        let rows = self.run(sql).await;
        rows.into_iter().map(|mut row| row.swap_remove(0)).collect()
    }

    /// Returns how often something has happened that the storage engine counts.
    pub(crate) async fn counted(&mut self, what: &str) -> u64 {
        self.run(&format!("SET GLOBAL innodb_monitor_enable='{what}'"))
            .await;
        let count = format!("SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME='{what}'");
        self.value(&count).await.parse().expect("a number")
    }

    pub(crate) async fn close(self) {
        let _ = self.connection.close().await;
    }
}

/// Runs one or more statements, and returns the rows as text.
async fn rows(connection: &mut MySqlConnection, sql: &str) -> sqlx::Result<Vec<Vec<String>>> {
    let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await?;
    let text = |row: &sqlx::mysql::MySqlRow, index| {
        let bytes: Option<Vec<u8>> = row.try_get_unchecked(index)?;
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    };
    rows.iter()
        .map(|row| (0..row.len()).map(|index| text(row, index)).collect())
        .collect()
}

/// Returns what all sessions are at, as a new one sees it.
async fn processes(options: MySqlConnectOptions) -> sqlx::Result<Vec<Vec<String>>> {
    let mut connection = options.connect().await?;
    rows(&mut connection, "SHOW FULL PROCESSLIST").await
}

fn options(addr: SocketAddr, user: &str, password: &str) -> MySqlConnectOptions {
    let options = MySqlConnectOptions::new()
        .host(&addr.ip().to_string())
        .port(addr.port())
        .username(user)
        .ssl_mode(MySqlSslMode::Disabled);
    if password.is_empty() {
        options
    } else {
        options.password(password)
    }
}

/// A name's row, as SQL.
pub(crate) fn row(name: &str) -> String {
    format!("'lockkit:{name}'")
}

fn start(flavour: Flavour) -> MySql {
    MySql::start(flavour, &[]).expect("the server starts")
}

/// The configuration for a server that is reached at `addr`.
pub(crate) fn config(addr: SocketAddr) -> MySqlConfig {
    MySqlConfig::new(MySql::url_at(addr))
}

pub(crate) async fn connect(config: MySqlConfig) -> Result<LockClient> {
    Ok(LockClient::new(MySqlBackend::connect(config).await?))
}

/// A client of the server at `addr`, in this mode.
pub(crate) async fn client(addr: SocketAddr, mode: Mode) -> LockClient {
    let mut config = config(addr);
    config.mode = mode;
    connect(config).await.unwrap()
}

/// Acquires and releases.
pub(crate) async fn cycle(client: &LockClient, name: &str) {
    let guard = client.lock(name).unwrap().acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// Returns once one client waits for the lock.
pub(crate) async fn waits(observer: &LockClient, name: &str) {
    eventually("one waits", async || {
        observer.inspect(name).await.unwrap().waiters == Some(1)
    })
    .await;
}

/// The names on a list.
pub(crate) async fn listed(client: &LockClient) -> Result<Vec<String>> {
    let mut list = client.list("").unwrap();
    let mut names = Vec::new();
    while let Some(lock) = list.next().await {
        names.push(lock?.name.as_str().to_owned());
    }
    Ok(names)
}

/// Returns the session that runs a statement with this beginning, once there is one.
pub(crate) async fn session_at(admin: &mut Admin, statement: &str) -> String {
    let question = format!(
        "SELECT ID FROM information_schema.PROCESSLIST WHERE USER='{}' AND INFO LIKE '{statement}%'",
        MySql::USER
    );
    let mut found = Vec::new();
    eventually("a session is at it", async || {
        found = admin.run(&question).await;
        !found.is_empty()
    })
    .await;
    found.swap_remove(0).swap_remove(0)
}

/// The beginning of the statement in which the head of a lease's queue sleeps, as a pattern.
pub(crate) const ASLEEP: &str = "SELECT IF(IF(IS_USED_LOCK(_lockkit-asleep:";

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

/// A proxy that changes requests: instead of `what` the server gets `instead`.
pub(crate) async fn relay(
    upstream: SocketAddr,
    what: &'static str,
    instead: &'static str,
) -> io::Result<SocketAddr> {
    relay_times(usize::MAX, upstream, what, instead).await
}

/// A proxy that changes only the first such request.
pub(crate) async fn relay_once(
    upstream: SocketAddr,
    what: &'static str,
    instead: &'static str,
) -> io::Result<SocketAddr> {
    relay_times(1, upstream, what, instead).await
}

async fn relay_times(
    times: usize,
    upstream: SocketAddr,
    what: &'static str,
    instead: &'static str,
) -> io::Result<SocketAddr> {
    let left = Arc::new(AtomicUsize::new(times));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let left = left.clone();
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
                    let mut request = buffer[..length].to_vec();
                    if let Some(at) = request
                        .windows(what.len())
                        .position(|part| part == what.as_bytes())
                        && left
                            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                            .is_ok()
                    {
                        request.splice(at..at + what.len(), instead.bytes());
                        if what.len() != instead.len() {
                            // A request is one packet. Its header begins with the length of the rest.
                            let rest = (request.len() - 4).to_le_bytes();
                            request[..3].copy_from_slice(&rest[..3]);
                        }
                    }
                    to_server.write_all(&request).await?;
                }
            });
        }
    });
    Ok(addr)
}

/// A request that is held back.
pub(crate) struct HeldBack {
    came: oneshot::Receiver<()>,
    deliver: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
}

impl HeldBack {
    /// Returns once it is under way, within a minute.
    pub(crate) async fn came(&mut self) {
        let came = soon("it comes", &mut self.came).await;
        came.expect("it comes");
    }

    /// Delivers it. The result is notified once its client has gone and the server has run it.
    pub(crate) fn deliver(self) -> oneshot::Receiver<()> {
        self.deliver.send(()).expect("it is still held back");
        self.done
    }

    /// Ends the client's connection instead. The server hears nothing of it.
    pub(crate) fn cut_off(self) {
        drop(self.deliver);
    }
}

/// A proxy that holds back the first request with `what` in it, also if its client goes away meanwhile.
pub(crate) async fn hold_back(
    upstream: SocketAddr,
    what: &'static str,
) -> io::Result<(SocketAddr, HeldBack)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let (has_come, came) = oneshot::channel();
    let (deliver, delivery) = oneshot::channel();
    let (is_done, done) = oneshot::channel();
    let held = HeldBack { came, deliver, done };
    let first = Arc::new(Mutex::new(Some((has_come, delivery, is_done))));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let first = first.clone();
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = TcpStream::connect(upstream).await?.into_split();
                let replies = tokio::spawn(async move {
                    let mut buffer = vec![0; 64 * 1024];
                    while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                        // The client may have gone.
                        let _ = to_client.write_all(&buffer[..length]).await;
                    }
                });
                let (mut buffer, mut done) = (vec![0; 64 * 1024], None);
                while let Ok(length @ 1..) = from_client.read(&mut buffer).await {
                    let request = &buffer[..length];
                    let has_it = request.windows(what.len()).any(|part| part == what.as_bytes());
                    let held = first.lock().unwrap().take_if(|_| has_it);
                    if let Some((has_come, delivery, is_done)) = held {
                        let _ = has_come.send(());
                        if delivery.await.is_err() {
                            replies.abort();
                            drop(from_client);
                            return std::future::pending().await;
                        }
                        done = Some(is_done);
                    }
                    to_server.write_all(request).await?;
                }
                to_server.shutdown().await?;
                let _ = replies.await;
                let _ = done.map(|done| done.send(()));
                Ok::<_, io::Error>(())
            });
        }
    });
    Ok((addr, held))
}
