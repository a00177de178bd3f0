//! Helpers of the tests of this program.

use std::{
    io::{BufRead, BufReader, Write as _},
    process::{ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_conformance::{process::Process, stall};
use lockkit_core::{AcquireOptions, Error, Lock, LockClient, LockGuard, Result, spi::chain};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{
    Proxy, eventually,
    redis::{self, Monitor, RedisServer},
    skipped,
};
use tokio::{sync::mpsc, task::JoinHandle};

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// Longer than anything takes on the busiest machine. Tighter bounds are said where they are.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// A hand-off by push or by a head that polls, with room for a busy machine: far below any time after which a waiter asks
/// by itself, of which that of a lock that was passed on and is not taken up is the shortest, with 3 s.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(900);

/// From the end of a fault until a client is connected again, at the latest: a ping that is not answered, a dial that
/// hangs, and the longest pause between two of them, with room for a busy machine.
pub(crate) const RECOVERED: Duration = Duration::from_secs(8);

/// There is no `redis-server` here, and that is allowed.
pub(crate) fn no_server() -> bool {
    skipped("redis", redis::missing())
}

/// There is no server with a compare-and-delete of its own here, and that is allowed.
pub(crate) fn no_valkey() -> bool {
    skipped("valkey", redis::missing_valkey())
}

/// A client of its own.
pub(crate) async fn connect(config: RedisConfig) -> Result<LockClient> {
    // It is large, and many tests have several.
    let backend = Box::pin(RedisBackend::connect(config)).await?;
    Ok(LockClient::new(backend))
}

/// A client of a server that answers, at once or when the machine lets it.
pub(crate) async fn client(url: &str) -> LockClient {
    let watch = stall::Stopwatch::start();
    loop {
        match connect(RedisConfig::new(url)).await {
            Err(error) if error.is_transient() && watch.elapsed() < LONG => tokio::time::sleep(5 * MS).await,
            outcome => return outcome.unwrap(),
        }
    }
}

/// A client whose connections go through a proxy of its own.
pub(crate) async fn client_behind_proxy(server: &RedisServer) -> (LockClient, Proxy) {
    let proxy = Proxy::start(server.addr()).unwrap();
    (client(&url_of(&proxy)).await, proxy)
}

pub(crate) fn url_of(proxy: &Proxy) -> String {
    format!("redis://{}", proxy.addr())
}

/// The lock of this name with leases of `ttl`, in the order of the queue.
pub(crate) fn lock(client: &LockClient, name: &str, ttl: Duration) -> Lock {
    let options = AcquireOptions::new().ttl(ttl).local_handoffs(0);
    client.lock(name).unwrap().with_options(options)
}

/// Waits for `lock` in a task.
pub(crate) fn waiter(lock: &Lock) -> JoinHandle<Result<LockGuard>> {
    let lock = lock.clone();
    tokio::spawn(async move { lock.acquire().await })
}

/// Returns a hold of `a`, and a waiter for it, each of a client of its own. The server is monitored since before the waiter came.
pub(crate) async fn held_and_waited_for(
    server: &RedisServer,
) -> (LockGuard, Monitor, JoinHandle<Result<LockGuard>>) {
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let monitor = server.monitor().unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(server, "a", 1).await;
    (held, monitor, waiting)
}

/// Returns the outcome of a future, which has to come within `limit`.
pub(crate) async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    let outcome = stall::timeout(limit, future).await;
    outcome.unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
}

/// Waits until `condition` holds, which has to be within `limit`.
pub(crate) async fn until(limit: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    within(limit, what, async {
        while !condition().await {
            tokio::time::sleep(5 * MS).await;
        }
    })
    .await;
}

/// Waits until the background has renewed it.
pub(crate) async fn renewed(guard: &LockGuard) {
    let before = guard.valid_until();
    until(LONG, "renewed", async || guard.valid_until() > before).await;
}

/// Takes it and gives it back.
pub(crate) async fn take(lock: &Lock) {
    lock.acquire().await.unwrap().release().await.unwrap();
}

/// The grant that a waiter gets within `limit`.
pub(crate) async fn granted(limit: Duration, what: &str, waiter: JoinHandle<Result<LockGuard>>) -> LockGuard {
    within(limit, what, waiter).await.unwrap().unwrap()
}

/// Waits until so many wait for the lock at the server.
pub(crate) async fn waiters(server: &RedisServer, name: &str, count: usize) {
    let queue = format!("lockkit:lockkit#queue:{{lockkit:{name}}}");
    let what = format!("{count} in {queue}");
    let count = count.to_string();
    eventually(&what, async || {
        server.cli(&["ZCARD", &queue]).is_ok_and(|now| now == count)
    })
    .await;
}

/// Waits until so many clients have sent a heartbeat, which keeps their waiters' places while they reconnect.
pub(crate) async fn heartbeats(server: &RedisServer, count: usize) {
    eventually(&format!("{count} heartbeats"), async || {
        let alive = server.cli(&["KEYS", "lockkit:lockkit#client:*"]);
        alive.is_ok_and(|alive| alive.lines().count() >= count)
    })
    .await;
}

/// Counts the clients that can be woken.
pub(crate) fn subscribers(server: &RedisServer) -> usize {
    let channels = server
        .cli(&["PUBSUB", "CHANNELS", "lockkit:lockkit#client:*"])
        .unwrap();
    channels.lines().count()
}

/// Counts the requests so far that are a script, or a release without one.
pub(crate) fn requests_executed(server: &RedisServer) -> u64 {
    let counts = server.command_counts().unwrap();
    let requests = ["evalsha", "eval", "delifeq", "delex"];
    requests.iter().filter_map(|command| counts.get(*command)).sum()
}

/// Returns every key, sorted.
pub(crate) fn keys(server: &RedisServer) -> Vec<String> {
    let keys = server.cli(&["KEYS", "*"]).unwrap();
    let mut keys: Vec<_> = keys.lines().map(str::to_owned).collect();
    keys.sort();
    keys
}

/// Returns `false` for a key that is there when nobody holds or waits: the counter of fencing tokens, and for some seconds the
/// heartbeat of clients that waited.
pub(crate) fn is_residue(key: &str) -> bool {
    let own = key.strip_prefix("lockkit:").unwrap_or(key);
    own != "lockkit#fence" && !own.starts_with("lockkit#client:")
}

/// Waits until the server has no keys but those that are always there.
pub(crate) async fn nothing_is_left(server: &RedisServer, case: &str) {
    let deadline = std::time::Instant::now() + LONG;
    loop {
        let left: Vec<_> = keys(server).into_iter().filter(|key| is_residue(key)).collect();
        if left.is_empty() {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{case}: left behind: {left:?}"
        );
        tokio::time::sleep(5 * MS).await;
    }
}

/// Asserts that holders are alone, one after the other, with tokens that rise.
#[derive(Clone, Default)]
pub(crate) struct Alone(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    now: u32,
    last: u64,
    entered: usize,
}

impl Alone {
    /// Is inside for a moment in which others get to run.
    pub(crate) async fn enter(&self, guard: &LockGuard) {
        {
            let mut inside = self.0.lock().unwrap();
            inside.now += 1;
            assert_eq!(inside.now, 1, "PROMISE BROKEN: an overlap");
            assert!(guard.token().get() > inside.last, "tokens went back");
            inside.last = guard.token().get();
            inside.entered += 1;
        }
        tokio::task::yield_now().await;
        self.0.lock().unwrap().now -= 1;
    }

    /// Counts how often somebody was inside.
    pub(crate) fn entered(&self) -> usize {
        self.0.lock().unwrap().entered
    }
}

/// An error with its causes, and how it is debugged: everything that a log might show.
pub(crate) fn shown(error: &Error) -> String {
    format!("{} {error:?}", chain(error))
}

/// Another process with a client of its own: the conformance suite's helper.
pub(crate) struct Peer {
    pub(crate) process: Process,
    commands: ChildStdin,
    answers: mpsc::UnboundedReceiver<String>,
}

impl Peer {
    pub(crate) async fn start(url: &str) -> Self {
        const MARK: &str = "lockkit-helper: ";

        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "conformance::redis_server::helper_process"])
            .args(["--nocapture", "--test-threads=1"])
            .env("LOCKKIT_CONFORMANCE_HELPER", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command).unwrap();
        let commands = process.child().stdin.take().unwrap();
        let output = process.child().stdout.take().unwrap();
        let (sender, answers) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                if let Some(at) = line.find(MARK) {
                    let _ = sender.send(line[at + MARK.len()..].to_owned());
                }
            }
        });
        let mut peer = Self {
            process,
            commands,
            answers,
        };
        assert_eq!(peer.reply().await, "ready");
        peer
    }

    /// Gives a command without waiting for its answer.
    pub(crate) fn send(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
        self.commands.flush().unwrap();
    }

    pub(crate) async fn reply(&mut self) -> String {
        let reply = within(LONG, "an answer of a peer", self.answers.recv()).await;
        reply.expect("a peer ended instead of answering")
    }

    /// Has it acquire, and returns the token.
    pub(crate) async fn hold(&mut self, ttl: Duration, name: &str) -> u64 {
        self.send(&format!("acquire slot exclusive {} {name}", ttl.as_millis()));
        self.granted().await
    }

    /// The token of the grant that it answers with.
    pub(crate) async fn granted(&mut self) -> u64 {
        let answer = self.reply().await;
        let mut words = answer.split(' ');
        assert_eq!(words.next(), Some("granted"), "{answer}");
        words.next().unwrap().parse().unwrap()
    }
}
