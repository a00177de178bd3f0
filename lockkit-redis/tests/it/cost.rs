//! How many requests things take.

use futures_util::{FutureExt, future::join_all};
use lockkit_core::{AcquireOptions, DistributedLock};
use lockkit_testbed::redis::{Monitor, RedisServer};

use crate::common::{
    LONG, SECOND, client, client_behind_proxy, granted, lock, no_server, nothing_is_left, take, until,
    waiter, waiters,
};

/// What clients have asked for, and with which script; what a script does is part of that. Without the pings by which
/// a client may look after its connection.
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
        // What each of them is; on a busy machine it may be held for long enough for one more renewal.
        let mut seen = Vec::new();
        for _ in 0..5 {
            let monitor = server.monitor().unwrap();
            let guard = lock.acquire().await.unwrap();
            let acquisition = requests(&monitor);
            guard.renew().await.unwrap();
            let renewal = requests(&monitor).split_off(acquisition.len());
            guard.release().await.unwrap();
            let all = requests(&monitor);
            seen.push((acquisition, renewal, all.last().cloned()));
            assert!((all.len() - seen[0].0.len()) <= 4, "{all:?}");
        }
        let least = seen
            .iter()
            .min_by_key(|(acquisition, renewal, _)| (renewal.len(), acquisition.len()));
        let (acquisition, renewal, release) = least.unwrap();
        let acquisition: Vec<_> = acquisition.iter().map(String::as_str).collect();
        // Three commands in one write, on a busy machine between the script that raises the counter and a look at the clock;
        // or one script.
        let raised = acquisition.strip_suffix(&["TIME"]).unwrap_or(&acquisition);
        let scripts = raised.strip_suffix(&["SET", "INCRBY", "GET"]);
        assert!(scripts.unwrap_or(&acquisition).len() <= 1, "{seen:?}");
        assert_eq!(renewal.len(), 1, "{seen:?}");
        assert!(release.as_ref() != Some(&renewal[0]), "{seen:?}");

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
async fn a_thousand_sleeping_waiters_cost_the_server_less_than_50_commands_a_second() {
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
        let keys = server.cli(&["KEYS", "lockkit#queue:*"]).unwrap();
        keys.lines().count() == names.len()
    })
    .await;
    // What is still under way from their arrival does not count; what comes in as much time as two heartbeats does.
    tokio::time::sleep(SECOND).await;
    let before = server.command_count().unwrap();
    tokio::time::sleep(7 * SECOND).await;
    let commands = server.command_count().unwrap() - before;
    eprintln!("{commands} commands in 7 s");
    assert!(commands >= 2, "no heartbeat");
    assert!(commands < 7 * 50, "{commands} commands in 7 s");
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

/// To queue, to take up what was passed, and to pass it on. The winner alone is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_passed_among_16_clients_takes_three_requests_each_time() {
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
    // A script, or the INCRBY of an attempt without one; of heartbeats there is neither.
    let requests = requests(&monitor).into_iter();
    let requests = requests.filter(|request| !["SET", "GET", "ZRANGE"].contains(&request.as_str()));
    let (locks, requests) = (16 * ROUNDS, requests.count() as u64);
    eprintln!("{requests} requests, {calls} calls and {told} pushes for {locks} locks");
    // 27 calls out of scripts, and the requests themselves.
    assert!(calls <= 33 * locks, "{calls} calls for {locks} locks");
    assert!(told * 20 <= 21 * locks, "{told} pushes for {locks} locks");
    assert!(requests >= 2 * locks, "they were counted");
    // A hand-off that comes while its waiter is just asking takes one more.
    assert!(
        requests * 20 <= 3 * 21 * locks,
        "{requests} requests for {locks} locks"
    );
    nothing_is_left(&server, "released").await;
}

/// Among two clients it is free now and then, and one would ask in vain to have it at once.
#[tokio::test]
async fn a_lock_that_was_contended_a_moment_ago_takes_no_try() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let (one, two) = (lock(&one, "a", LONG), lock(&two, "a", LONG));
    let tries = async || {
        let monitor = server.monitor().unwrap();
        let held = two.acquire().await.unwrap();
        let asked = requests(&monitor);
        held.release().await.unwrap();
        asked.iter().filter(|request| *request == "INCRBY").count()
    };
    // On a busy machine the moment may be over.
    for round in 1.. {
        let held = one.acquire().await.unwrap();
        let waiting = waiter(&two);
        waiters(&server, "a", 1).await;
        held.release().await.unwrap();
        let held = granted(LONG, "it waited", waiting).await;
        held.release().await.unwrap();
        if tries().await == 0 {
            break;
        }
        assert!(round < 10, "always a try");
    }
    until(LONG, "a try again", async || tries().await == 1).await;
    nothing_is_left(&server, "released").await;
}

/// The waiters of one client are one at the server, and most hand-offs between them are nobody's business.
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
    // By a script, where somebody has waited lately.
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
