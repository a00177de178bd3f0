//! A backend takes the place of another under something that checks tokens, from each to each.

use std::{fmt, sync::Arc, time::Duration};

use lockkit::{
    Error, FenceGate, FencingToken, LockClient, MemoryBackend,
    mysql::{
        self,
        sqlx::{
            AssertSqlSafe, ConnectOptions,
            mysql::{MySqlConnectOptions, MySqlConnection},
            raw_sql,
        },
    },
    postgres::{
        self,
        tokio_postgres::{self, NoTls},
    },
};
use lockkit_testbed::{
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self as pg, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

/// Fenced writes before a swap, and as many after it.
const WRITES: i64 = 100;

/// The table of the application.
const TABLE: &str = "account";

/// A deployment of each backend.
pub(crate) struct Deployments {
    pub(crate) urls: Vec<String>,
    _servers: (
        Vec<RedisServer>,
        ZkServer,
        MySql,
        PgServer,
        EtcdServer,
        tempfile::TempDir,
    ),
}

impl Deployments {
    pub(crate) fn start() -> Option<Self> {
        if skipped("redis", redis::missing())
            || skipped("zk", zookeeper::missing())
            || skipped("mysql", MySql::missing(Flavour::MariaDb))
            || skipped("postgres", pg::missing())
            || skipped("etcd", etcd::missing())
        {
            return None;
        }
        let redis: Vec<_> = (0..4).map(|_| RedisServer::plain().unwrap()).collect();
        let zk = ZkServer::plain().unwrap();
        let mysql = MySql::start(Flavour::MariaDb, &[]).unwrap();
        let postgres = PgServer::plain().unwrap();
        let etcd = EtcdServer::plain().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let masters: Vec<_> = redis[1..]
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        let urls = vec![
            "memory:".to_owned(),
            format!("file://{}", dir.path().display()),
            redis[0].url().to_owned(),
            format!("redlock://{}", masters.join(",")),
            format!("zk://{}", zk.addr()),
            mysql.url(),
            format!("{}?mode=lease", mysql.url()),
            postgres.url(),
            etcd.url(),
        ];
        Some(Self {
            urls,
            _servers: (redis, zk, mysql, postgres, etcd, dir),
        })
    }
}

/// Tokens of other pairs are in other namespaces, as far as a backend keeps those apart.
async fn client(url: &str, namespace: &str) -> LockClient {
    if url == "memory:" {
        return LockClient::new(MemoryBackend::new());
    }
    let between = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{between}namespace={namespace}");
    lockkit::connect(&url).await.unwrap()
}

/// One row of the application in each kind of database, which both refuse a superseded writer.
struct Row {
    key: String,
    in_mysql: (mysql::FencedTable, MySqlConnection),
    in_postgres: (postgres::FencedTable, tokio_postgres::Client),
}

impl Row {
    /// Makes the tables.
    async fn create_tables(urls: &[String]) {
        let columns = |token| {
            format!(
                "CREATE TABLE {TABLE} (id VARCHAR(99) PRIMARY KEY, writes BIGINT NOT NULL, last_token {token} NOT NULL DEFAULT 0)"
            )
        };
        let mut row = Self::connect(urls, "").await;
        let create = AssertSqlSafe(columns("BIGINT UNSIGNED"));
        raw_sql(create).execute(&mut row.in_mysql.1).await.unwrap();
        row.in_postgres.1.batch_execute(&columns("bigint")).await.unwrap();
    }

    async fn connect(urls: &[String], key: &str) -> Self {
        let url = |scheme| urls.iter().find(|url| url.starts_with(scheme)).unwrap();
        let options: MySqlConnectOptions = url("mysql:").parse().unwrap();
        let (client, connection) = tokio_postgres::connect(url("postgres:"), NoTls).await.unwrap();
        tokio::spawn(connection);
        Self {
            key: key.to_owned(),
            in_mysql: (
                mysql::FencedTable::new(TABLE, "id", "last_token"),
                options.connect().await.unwrap(),
            ),
            in_postgres: (postgres::FencedTable::new(TABLE, "id", "last_token"), client),
        }
    }

    /// Writes to both, unless a higher token has: that one is returned then.
    async fn write(&mut self, token: FencingToken, writes: i64) -> Result<(), FencingToken> {
        let (table, connection) = &mut self.in_mysql;
        let write = table.insert_or_update(connection, self.key.as_str(), token, |set| {
            set.push("writes = ").push_bind_unseparated(writes);
        });
        let in_mysql = match write.await {
            Ok(()) => Ok(()),
            Err(mysql::FencedError::Stale { highest, .. }) => Err(highest),
            Err(error) => panic!("{}: {error}", self.key),
        };
        let (table, database) = &self.in_postgres;
        let write = table
            .insert_or_update(database, &self.key, token, &["writes"], &[&writes])
            .await;
        let in_postgres = match write {
            Ok(()) => Ok(()),
            Err(postgres::FencedError::Stale { highest, .. }) => Err(highest),
            Err(error) => panic!("{}: {error}", self.key),
        };
        assert_eq!(
            in_mysql, in_postgres,
            "{}: the tables differ about {token}",
            self.key
        );
        in_mysql
    }

    /// Has both begin at 0, as docs/choosing.md does where tokens cannot be raised.
    async fn begin_at_zero(&mut self) {
        let update = format!("UPDATE {TABLE} SET last_token = 0 WHERE id = '{}'", self.key);
        let in_mysql = raw_sql(AssertSqlSafe(update.clone()));
        in_mysql.execute(&mut self.in_mysql.1).await.unwrap();
        self.in_postgres.1.batch_execute(&update).await.unwrap();
    }

    /// Writes under the lock, each time as another holder. Returns the first token and the last.
    async fn write_under(&mut self, client: &LockClient, what: &str) -> [FencingToken; 2] {
        let lock = client.lock("account").unwrap();
        let mut tokens = [FencingToken::new(0); 2];
        for write in 1..=WRITES {
            let guard = lock.acquire().await.unwrap();
            tokens[1] = guard.token();
            if write == 1 {
                tokens[0] = guard.token();
            }
            if let Err(highest) = self.write(guard.token(), write).await {
                panic!(
                    "{what}, write {write}: {} is refused, since {highest} has written",
                    guard.token()
                );
            }
            guard.release().await.unwrap();
        }
        tokens
    }
}

/// A step between the two backends, by the table of docs/choosing.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Raised,
    RowsBeginAtZero,
    Nothing,
}

/// A pair that was swapped.
struct Swapped {
    from: String,
    to: String,
    step: Step,
    last_before: FencingToken,
    first_after: FencingToken,
    is_late_refused: bool,
}

impl fmt::Display for Swapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = match self.step {
            Step::Raised => "raised",
            Step::RowsBeginAtZero => "rows begin at 0",
            Step::Nothing => "nothing to do",
        };
        let late = if self.is_late_refused {
            "refused"
        } else {
            "NOT refused"
        };
        let (from, to, before, after) = (
            &self.from,
            &self.to,
            self.last_before.get(),
            self.first_after.get(),
        );
        write!(
            f,
            "{from:<11} {to:<11} {step:<15} {before:>20} {after:>20}  late write {late}"
        )
    }
}

/// The name of a backend as the table has it.
fn short(url: &str) -> String {
    let scheme = url.split(':').next().unwrap_or_default();
    let mode = if url.contains("mode=lease") { " lease" } else { "" };
    format!("{scheme}{mode}")
}

/// What docs/choosing.md says about this pair.
fn documented(from: &str, to: &str) -> Step {
    match (from, to) {
        ("zk" | "etcd", "redlock" | "file") => Step::Nothing,
        (_, "redlock" | "file") | ("postgres", "redis") => Step::RowsBeginAtZero,
        _ => Step::Raised,
    }
}

async fn swap(urls: &[String], from: usize, to: usize) -> Swapped {
    let (from_url, to_url) = (&urls[from], &urls[to]);
    let what = format!("from {} to {}", short(from_url), short(to_url));
    let namespace = format!("from-{from}-to-{to}");
    let (old, new) = (
        client(from_url, &namespace).await,
        client(to_url, &namespace).await,
    );
    let mut row = Row::connect(urls, &namespace).await;

    let [_, last_before] = row.write_under(&old, &what).await;
    // This holder was superseded, and writes late.
    let late = last_before;
    let guard = old.lock("account").unwrap().acquire().await.unwrap();
    let last_before = guard.token();
    row.write(last_before, WRITES).await.unwrap();
    assert_eq!(
        row.write(late, -1).await,
        Err(last_before),
        "{what}: before the swap"
    );
    guard.release().await.unwrap();

    // Step 1: nobody holds any more. Step 2: the highest token.
    let held = old.list("").unwrap().next().await;
    assert!(held.is_none(), "{what}: {held:?}");
    let fence = match old.fence().await {
        Ok(fence) => fence,
        Err(Error::Unsupported { .. }) => last_before,
        Err(error) => panic!("{what}: {error}"),
    };
    assert!(
        fence >= last_before,
        "{what}: the fence is {fence}, and {last_before} was granted"
    );
    // Step 3.
    let step = match new.raise_fence(fence).await {
        Ok(raised) => {
            assert!(
                raised >= fence,
                "{what}: raised to {raised}, and the fence was {fence}"
            );
            Step::Raised
        }
        Err(Error::Unsupported { .. } | Error::InvalidOptions { .. }) => {
            let step = documented(&short(from_url), &short(to_url));
            if step == Step::RowsBeginAtZero {
                row.begin_at_zero().await;
            }
            step
        }
        Err(error) => panic!("{what}: {error}"),
    };
    // Step 4.
    let [first_after, last_after] = row.write_under(&new, &what).await;
    let written = row.write(last_before, -1).await;
    let is_late_refused = written == Err(last_after);
    assert!(
        is_late_refused || written.is_ok() && last_before > last_after && step == Step::RowsBeginAtZero,
        "{what}: {last_before} wrote late, after {last_after}: {written:?}"
    );
    for client in [old, new] {
        client.close(Duration::from_secs(10)).await.unwrap();
    }
    Swapped {
        from: short(from_url),
        to: short(to_url),
        step,
        last_before,
        first_after,
        is_late_refused,
    }
}

/// Fenced writes on either side of a swap, in real tables, by the steps of docs/choosing.md. None is refused wrongly, and a superseded holder
/// that writes late is refused, unless the rows had to begin at 0 under lower tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_go_on_after_a_swap_from_each_to_each() {
    let Some(deployments) = tokio::task::block_in_place(Deployments::start) else {
        return;
    };
    let urls: Arc<[String]> = deployments.urls.clone().into();
    Row::create_tables(&urls).await;
    let mut swapped = Vec::new();
    for from in 0..urls.len() {
        // Those from PostgreSQL come late: its tokens raise MySQL's, for all pairs, above what Redis can be raised to.
        let pairs = (0..urls.len()).filter(|to| *to != from).map(|to| {
            let urls = urls.clone();
            tokio::spawn(async move { swap(&urls, from, to).await })
        });
        for pair in pairs.collect::<Vec<_>>() {
            swapped.push(pair.await.unwrap());
        }
    }
    for pair in &swapped {
        println!("{pair}");
        assert_eq!(pair.step, documented(&pair.from, &pair.to), "{pair}");
        assert!(
            pair.step == Step::RowsBeginAtZero || pair.is_late_refused,
            "{pair}"
        );
    }
    assert_eq!(swapped.len(), urls.len() * (urls.len() - 1));
}

/// Writes under the lock, and returns the last token.
async fn write(client: &LockClient, gate: &FenceGate, what: &str) -> FencingToken {
    let lock = client.lock("account").unwrap();
    let mut last = FencingToken::new(0);
    for write in 0..WRITES {
        let guard = lock.acquire().await.unwrap();
        last = guard.token();
        gate.admit(last)
            .unwrap_or_else(|stale| panic!("{what}, write {write}: {stale}"));
        guard.release().await.unwrap();
    }
    last
}

/// What happens without it.
#[tokio::test]
async fn a_swap_to_lower_tokens_is_refused_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let old = client(&format!("file://{}", dir.path().display()), "a").await;
    let new = client("memory:", "a").await;
    let gate = FenceGate::new();
    let highest = write(&old, &gate, "before").await;
    let guard = new.lock("account").unwrap().acquire().await.unwrap();
    let stale = gate.admit(guard.token()).unwrap_err().to_string();
    assert!(
        stale.contains(&format!("lockkit fence raise --above {highest}")),
        "{stale}"
    );
    guard.release().await.unwrap();
    new.raise_fence(highest).await.unwrap();
    write(&new, &gate, "after").await;
}

/// It is said once, when the application starts, and not by each acquisition.
#[tokio::test(flavor = "multi_thread")]
async fn defaults_that_a_backend_cannot_keep_fail_to_connect() {
    let Some(deployments) = Deployments::start() else {
        return;
    };
    let mut refused = Vec::new();
    for url in &deployments.urls {
        for (option, value) in [("local_handoffs", "32"), ("ttl", "9ms"), ("max_hold", "29s")] {
            let between = if url.contains('?') { '&' } else { '?' };
            let connected = lockkit::connect(&format!("{url}{between}{option}={value}")).await;
            let scheme = url.split(':').next().unwrap();
            match connected {
                Ok(client) => {
                    let granted = client.lock("defaults").unwrap().try_acquire().await.unwrap();
                    granted.unwrap().release().await.unwrap();
                }
                Err(Error::InvalidOptions { option: named, .. }) => {
                    assert_eq!(named, option, "{url}");
                    refused.push((option, scheme));
                }
                Err(error) => panic!("{url}, {option}={value}: {error}"),
            }
        }
    }
    refused.retain(|(option, _)| *option == "local_handoffs");
    assert_eq!(refused, [("local_handoffs", "zk"), ("local_handoffs", "etcd")]);
}
