//! Counts requests and calls at the server.

use futures_util::{FutureExt, future::join_all};
use lockkit_core::{AcquireOptions, DistributedLock};
use lockkit_testbed::redis::{Monitor, RedisServer};

use crate::common::{
    LONG, SECOND, client, client_behind_proxy, granted, held_and_waited_for, lock, no_server,
    nothing_is_left, take, waiter,
};

/// Returns the requests of clients: a command, or the digest of a script. Leaves out what scripts do, and pings, with which a
/// client may check its connection.
pub(crate) fn requests(monitor: &Monitor) -> Vec<String> {
    let lines = monitor.lines().unwrap();
    let asked = lines.iter().filter(|line| !line.contains(" lua] "));
    let command = asked.map(|line| {
        let mut words = line.split('"').skip(1).step_by(2);
        match words.next() {
            Some("EVALSHA") => words.next().unwrap_or_default().to_owned(),
            command => command.unwrap_or_default().to_owned(),
        }
    });
    command.filter(|command| command != "PING").collect()
}

#[tokio::test]
async fn an_acquisition_a_renewal_and_a_release_are_one_request_each() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let locks = [
        client.lock("a").unwrap(),
        client.lock("a").unwrap().shared(),
        client.semaphore("a", 2).unwrap(),
    ];
    for lock in locks {
        // The requests of each step. On a busy machine one more renewal may be due.
        let mut seen = Vec::new();
        for _ in 0..5 {
            let monitor = server.monitor().unwrap();
            let guard = lock.acquire().await.unwrap();
            let acquisition = requests(&monitor);
            guard.renew().await.unwrap();
            let renewal = requests(&monitor).split_off(acquisition.len());
            guard.release().await.unwrap();
            let release = requests(&monitor).split_off(acquisition.len() + renewal.len());
            seen.push([acquisition, renewal, release]);
        }
        let least = seen
            .iter()
            .min_by_key(|seen| seen.iter().map(Vec::len).sum::<usize>());
        let least = least.unwrap();
        assert!(least.iter().all(|requests| requests.len() == 1), "{seen:?}");
        assert!(least[0] != least[1] && least[1] != least[2], "{seen:?}");

        let round_trips = || {
            let counts = proxy.counts();
            (counts.requests.chunks, counts.replies.chunks)
        };
        let mut least = (u64::MAX, u64::MAX);
        for _ in 0..5 {
            let before = round_trips();
            take(&lock).await;
            let after = round_trips();
            least = least.min((after.0 - before.0, after.1 - before.1));
        }
        assert_eq!(least, (2, 2), "chunks to the server and back");
    }
    nothing_is_left(&server, "released").await;
}

/// One heartbeat for all of them, and nothing else for as long as the leases before them last.
#[tokio::test]
async fn a_thousand_waiters_cost_less_than_50_commands_a_second() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let names: Vec<_> = (0..1_000).map(|n| format!("sleeper/{n}")).collect();
    let locks: Vec<_> = names.iter().map(|name| lock(&holder, name, 20 * LONG)).collect();
    let held: Vec<_> = join_all(locks.iter().map(DistributedLock::acquire)).await;
    let held: Vec<_> = held.into_iter().map(Result::unwrap).collect();
    let waiting: Vec<_> = names
        .iter()
        .map(|name| waiter(&lock(&other, name, 20 * LONG)))
        .collect();
    lockkit_testbed::eventually("all in their queues", async || {
        let keys = server.cli(&["KEYS", "lockkit:lockkit#queue:*"]).unwrap();
        keys.lines().count() == names.len()
    })
    .await;
    // Requests from their arrival do not count, however long they take. Those in the time of two heartbeats do.
    lockkit_testbed::eventually("a second in which nobody arrives", async || {
        let before = server.command_count().unwrap();
        tokio::time::sleep(SECOND).await;
        server.command_count().unwrap() - before < 50
    })
    .await;
    let (before, began) = (server.command_count().unwrap(), std::time::Instant::now());
    let mut commands = 0;
    lockkit_testbed::eventually("two heartbeats in seven seconds or more", async || {
        tokio::time::sleep(SECOND).await;
        commands = server.command_count().unwrap() - before;
        commands >= 2 && began.elapsed() >= 7 * SECOND
    })
    .await;
    let took = began.elapsed();
    eprintln!("{commands} commands in {took:?}");
    assert!(commands < 50 * took.as_secs(), "{commands} commands in {took:?}");
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    // Awake they are at once.
    for guard in held {
        guard.release().await.unwrap();
    }
    for waiting in waiting {
        let guard = waiting.await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    nothing_is_left(&server, "released").await;
}

/// One to queue, and one to hand off. Only the new holder is told, and the push is its grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_passed_among_16_clients_takes_two_requests_each_time() {
    const ROUNDS: u64 = 60;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let clients = join_all((0..16).map(|_| client(server.url()))).await;
    let monitor = server.monitor().unwrap();
    let rounds = clients.iter().map(|client| {
        let lock = lock(client, "a", LONG);
        tokio::spawn(async move {
            for _ in 0..ROUNDS {
                take(&lock).await;
            }
        })
    });
    for rounds in join_all(rounds).await {
        rounds.unwrap();
    }
    let counts = server.command_counts().unwrap();
    let (told, calls) = (counts["publish"], counts.values().sum::<u64>());
    let requests = requests(&monitor).into_iter();
    // Heartbeats are none.
    let requests = requests.filter(|request| !["SET", "ZRANGE", "PTTL"].contains(&request.as_str()));
    let (locks, requests) = (16 * ROUNDS, requests.count() as u64);
    eprintln!("{requests} requests, {calls} calls and {told} pushes for {locks} locks");
    // 16 calls out of scripts, and the requests themselves.
    assert!(calls <= 20 * locks, "{calls} calls for {locks} locks");
    assert!(told * 20 <= 21 * locks, "{told} pushes for {locks} locks");
    assert!(requests >= 2 * locks, "they were counted");
    // A hand-off that comes while its waiter is just asking takes one more, and so does a hold that lasts for some time.
    assert!(
        requests * 20 <= 2 * 22 * locks,
        "{requests} requests for {locks} locks"
    );
    nothing_is_left(&server, "released").await;
}

/// No renewal comes before it is due, and no second request.
#[tokio::test]
async fn a_hold_that_does_some_work_takes_two_requests() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let lock = lock(&client, "a", LONG);
    let monitor = server.monitor().unwrap();
    let held = lock.acquire().await.unwrap();
    // The value has its token from the first moment.
    let token = held.token().to_string();
    let value = server.cli(&["GET", "lockkit:a"]).unwrap();
    assert_eq!(value.split(' ').nth(2), Some(&*token), "{value}");
    tokio::time::sleep(SECOND / 10).await;
    held.release().await.unwrap();
    let requests = requests(&monitor);
    let requests: Vec<_> = requests.iter().filter(|request| *request != "GET").collect();
    assert_eq!(requests.len(), 2, "{requests:?}");
    nothing_is_left(&server, "released").await;
}

/// The first request finds the lock taken, and joins the queue.
#[tokio::test]
async fn a_lock_that_is_taken_is_queued_for_with_one_request() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (held, monitor, waiting) = held_and_waited_for(&server).await;
    let lines = monitor.lines().unwrap();
    // A waiter is counted by a client of its own.
    let asked = lines
        .iter()
        .filter(|line| line.contains("\"lockkit:a\"") && line.contains("\"wait\""));
    assert_eq!(asked.count(), 1, "{lines:?}");
    let draws = lines
        .iter()
        .filter(|line| line.contains("\"SET\" \"lockkit:lockkit#fence\""));
    assert_eq!(draws.count(), 0, "no token is spent on it: {lines:?}");
    held.release().await.unwrap();
    let held = granted(LONG, "it waited", waiting).await;
    held.release().await.unwrap();
    nothing_is_left(&server, "released").await;
}

/// The waiters of one client are one at the server, which hears of few hand-offs between them.
#[tokio::test]
async fn hand_offs_within_a_client_take_no_requests() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let options = AcquireOptions::new().local_handoffs(99);
    let lock = client.lock("a").unwrap().with_options(options);
    // A lock for which nobody has waited yet reserves no tokens for others.
    let held = lock.acquire().await.unwrap();
    assert!(lock.acquire().now_or_never().is_none());
    held.release().await.unwrap();
    let monitor = server.monitor().unwrap();
    let held = lock.acquire().await.unwrap();
    let acquisition = requests(&monitor).len();
    let mut renewal = String::new();
    lockkit_testbed::eventually("the hold is renewed", async || {
        // A script's name has forty digits.
        let script = requests(&monitor)
            .into_iter()
            .skip(acquisition)
            .rfind(|request| request.len() == 40);
        renewal = script.unwrap_or_default();
        !renewal.is_empty()
    })
    .await;
    drop(monitor);
    let waiting: Vec<_> = (0..90)
        .map(|_| {
            let lock = lock.clone();
            let mut acquiring = Box::pin(async move { lock.acquire().await });
            // In line from its first poll on.
            assert!(acquiring.as_mut().now_or_never().is_none());
            tokio::spawn(acquiring)
        })
        .collect();
    let monitor = server.monitor().unwrap();
    held.release().await.unwrap();
    for waiting in waiting {
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    let requests = requests(&monitor);
    // A hold that lasts for some milliseconds is renewed, on a busy machine one of these, too.
    let others: Vec<_> = requests.iter().filter(|request| **request != renewal).collect();
    assert_eq!(others.len(), 1, "the last release: {requests:?}");
    nothing_is_left(&server, "released").await;
}
