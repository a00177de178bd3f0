//! A client's connection that is cut, loses replies, or goes on for ever in silence.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{AcquireOptions, Error, Lock, LockGuard, LossReason, spi::chain};
use lockkit_testbed::{Mode, Proxy, etcd::EtcdServer, eventually};
use tokio::task::JoinHandle;

use crate::server::{
    ELECTION, block, connect, contend, keys, lock, no_etcd, rounds, shared, soon, takes_its_turn, unique,
    waiter, watcher, with_ttl,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cut_off_is_told_before_the_next_is_granted() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::builder().election_timeout(ELECTION).start().unwrap();
    for mode in [Mode::Blackhole, Mode::DropReplies, Mode::HalfOpen, Mode::Refuse] {
        let name = unique("cut");
        let proxy = Proxy::start(server.addr()).unwrap();
        let ours = connect(&server.url_at(proxy.addr())).await;
        let theirs = connect(&server.url()).await;
        let guard = with_ttl(&ours, &name, Duration::from_secs(2))
            .acquire()
            .await
            .unwrap();
        let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
        contend(&server, &name, 2).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..1_000))).await;
        proxy.set(mode);
        proxy.reset();
        let (reason, told) = soon("the holder is told", told).await.unwrap();
        assert_eq!(reason, LossReason::Expired, "{mode:?}");
        let (next, granted) = soon("the next is granted", next).await.unwrap();
        assert!(
            told < granted,
            "told {:?} too late under {mode:?}",
            told - granted
        );
        next.release().await.unwrap();
    }
}

/// Not that a connection was lost, or that no answer came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_why_it_cannot_renew() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::builder().start().unwrap();
    let client = connect(&server.url()).await;
    let guard = with_ttl(&client, "a", Duration::from_secs(40))
        .acquire()
        .await
        .unwrap();
    block(|| server.kill()).unwrap();
    // The first may have been under way.
    let _ = guard.renew().await;
    // A connection of the last moment may end otherwise.
    let refused = async {
        loop {
            let text = chain(&guard.renew().await.unwrap_err());
            assert!(!text.contains("a watch was confirmed"), "{text}");
            if text.contains("Connection refused") {
                break;
            }
        }
    };
    soon("the reason", refused).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_wait_keeps_its_place() {
    if no_etcd() {
        return;
    }
    let name = unique("wait");
    let proxy = Proxy::start(shared().addr()).unwrap();
    let ours = connect(&shared().url_at(proxy.addr())).await;
    let theirs = connect(&shared().url()).await;
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&ours, &name));
    contend(shared(), &name, 2).await;
    let before = block(|| keys(shared(), &name));
    for _ in 0..5 {
        proxy.reset();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(block(|| keys(shared(), &name)), before);
    // What goes while it is away is seen when it is back.
    proxy.set(Mode::Refuse);
    proxy.reset();
    guard.release().await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished());
    proxy.set(Mode::Pass);
    takes_its_turn("its turn", waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_that_timed_out_is_not_granted_later() {
    if no_etcd() {
        return;
    }
    let name = unique("timeout");
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let error = lock(&ours, &name)
        .acquire_timeout(Duration::from_millis(200))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    // The waiter leaves.
    contend(shared(), &name, 1).await;
    guard.release().await.unwrap();
    let next = lock(&theirs, &name).try_acquire().await.unwrap();
    next.expect("free at once").release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_an_error_and_never_taken() {
    if no_etcd() {
        return;
    }
    let name = unique("outage");
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(&shared().url_at(proxy.addr())).await;
    let ours = lock(&client, &name);
    ours.acquire().await.unwrap().release().await.unwrap();
    for mode in [Mode::Refuse, Mode::Blackhole] {
        proxy.set(mode);
        proxy.reset();
        let options = lockkit_core::AcquireOptions::new().op_timeout(Duration::from_secs(1));
        let tried = soon("an answer", ours.clone().with_options(options).try_acquire()).await;
        assert!(tried.as_ref().is_err_and(Error::is_transient), "{tried:?}");
        proxy.set(Mode::Pass);
        proxy.reset();
        let guard = soon("back", ours.acquire()).await.unwrap();
        guard.release().await.unwrap();
    }
    contend(shared(), &name, 0).await;
}

/// The database is full: nothing new can be locked, and what is held is held on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_database_keeps_holds_and_refuses_new_ones() {
    if no_etcd() {
        return;
    }
    let builder = EtcdServer::builder().option("--quota-backend-bytes=3000000");
    let server = block(|| builder.start()).unwrap();
    let (client, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let (name, ttl) = (unique("full"), Duration::from_secs(5));
    let guard = with_ttl(&client, &name, ttl).acquire().await.unwrap();
    let waiting = waiter(&with_ttl(&theirs, &name, ttl));
    contend(&server, &name, 2).await;
    let filler = "x".repeat(100_000);
    block(|| {
        let full = (0..200).find_map(|i| server.ctl(&["put", &format!("filler-{i}"), &filler]).err());
        full.expect("it is full in the end");
    });
    let is_told = |error: Error| {
        let text = lockkit_core::spi::chain(&error);
        assert!(error.is_transient() && text.contains("NOSPACE"), "{text}");
    };
    let new = with_ttl(&client, &unique("new"), ttl);
    is_told(new.try_acquire().await.unwrap_err());
    is_told(new.acquire_timeout(Duration::from_secs(1)).await.unwrap_err());
    // One that has no lease yet.
    let other = connect(&server.url()).await;
    is_told(lock(&other, new.name().as_str()).try_acquire().await.unwrap_err());
    tokio::time::sleep(ttl + Duration::from_secs(2)).await;
    assert!(guard.is_held(), "{:?}", guard.check());
    assert!(!waiting.is_finished(), "granted beside the holder");
    guard.release().await.unwrap();
    let (next, _) = soon("a waiter needs no room", waiting).await.unwrap();
    tokio::time::sleep(ttl + Duration::from_secs(2)).await;
    assert!(next.is_held(), "{:?}", next.check());
    // There is room again.
    block(|| {
        server.ctl(&["del", "--prefix", "filler-"]).unwrap();
        server.compact().unwrap();
        server.ctl(&["defrag"]).unwrap();
        server.ctl(&["alarm", "disarm"]).unwrap();
    });
    for client in [&client, &other] {
        let new = with_ttl(client, &unique("room"), ttl);
        soon("there is room", new.acquire())
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    assert!(next.is_held(), "{:?}", next.check());
    next.release().await.unwrap();
    contend(&server, &name, 0).await;
    contend(&server, new.name().as_str(), 0).await;
}

/// What contenders have noted.
#[derive(Debug, Default)]
struct Notes {
    highest: AtomicU64,
    granted: AtomicU64,
    went_back: AtomicU64,
    inside: AtomicU64,
}

impl Notes {
    /// Acquires and releases for ever, and notes what it sees.
    async fn contend(&self, ours: Lock, rests: bool) {
        loop {
            // Whatever the fault, it goes on until it is granted.
            let guard = ours.acquire().await.unwrap();
            let token = guard.token().get();
            if self.highest.fetch_max(token, Ordering::SeqCst) > token {
                self.went_back.fetch_add(1, Ordering::SeqCst);
            }
            let beside = self.inside.fetch_add(1, Ordering::SeqCst);
            if rests {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..5))).await;
            }
            // A hold that was lost meanwhile shows now.
            let is_held = guard.is_held();
            self.inside.fetch_sub(1, Ordering::SeqCst);
            if is_held {
                assert_eq!(beside, 0, "two are inside");
                self.granted.fetch_add(1, Ordering::SeqCst);
            }
            let _ = guard.release().await;
        }
    }
}

/// Does something to a connection, or to the server.
async fn fault(random: &mut fastrand::Rng, proxy: &Proxy, server: &EtcdServer) {
    let way = Duration::from_millis(30);
    match random.u8(..8) {
        0 => proxy.reset(),
        1 => proxy.set(Mode::Blackhole),
        2 => proxy.set(Mode::DropReplies),
        3 => proxy.set(Mode::HalfOpen),
        4 => proxy.set(Mode::Delay {
            requests: way,
            replies: way,
        }),
        5 => {
            block(|| server.pause()).unwrap();
            tokio::time::sleep(Duration::from_millis(random.u64(0..3_000))).await;
            block(|| server.resume()).unwrap();
        }
        6 => block(|| {
            server.kill().unwrap();
            server.start().unwrap();
        }),
        _ => {
            proxy.set(Mode::Refuse);
            proxy.reset();
        }
    }
}

/// Contenders on connections that are cut, slowed down and silenced in turn, and a server that is killed and paused.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_soak_under_faults_lets_nobody_in_twice() {
    if no_etcd() {
        return;
    }
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!("LOCKKIT_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let server = block(|| EtcdServer::builder().election_timeout(ELECTION).fsync().start()).unwrap();
    let (name, notes) = (unique("soak"), Arc::new(Notes::default()));
    let mut proxies = Vec::new();
    let mut tasks = Vec::new();
    for i in 0..6 {
        let proxy = Proxy::start(server.addr()).unwrap();
        let client = connect(&server.url_at(proxy.addr())).await;
        proxies.push(proxy);
        let ours = with_ttl(&client, &name, Duration::from_secs(2));
        let notes = notes.clone();
        tasks.push(tokio::spawn(async move { notes.contend(ours, i % 2 == 0).await }));
    }
    let all_go_on = |tasks: &[JoinHandle<()>]| tasks.iter().all(|task| !task.is_finished());
    let (began, faults) = (Instant::now(), rounds(25));
    for _ in 0..faults {
        let which = random.usize(..proxies.len());
        fault(&mut random, &proxies[which], &server).await;
        tokio::time::sleep(Duration::from_millis(random.u64(0..800))).await;
        if random.bool() {
            for proxy in &proxies {
                proxy.set(Mode::Pass);
            }
        }
        assert!(all_go_on(&tasks), "a contender failed, seed {seed}");
    }
    for proxy in &proxies {
        proxy.set(Mode::Pass);
        proxy.reset();
    }
    let so_far = notes.granted.load(Ordering::SeqCst);
    eventually(&format!("they get on, seed {seed}"), async || {
        notes.granted.load(Ordering::SeqCst) > so_far + 50
    })
    .await;
    assert!(all_go_on(&tasks), "a contender failed, seed {seed}");
    for task in tasks {
        task.abort();
        let _ = task.await;
    }
    eprintln!("{notes:?} under {faults} faults in {:?}", began.elapsed());
    assert_eq!(
        notes.went_back.load(Ordering::SeqCst),
        0,
        "tokens went back, seed {seed}"
    );
    contend(&server, &name, 0).await;
}

/// A hold of so many seconds that is renewed by hand alone, and its way to the server.
async fn held_by_hand(ttl: u64) -> (LockGuard, Proxy) {
    let proxy = Proxy::start(shared().addr()).unwrap();
    let ours = connect(&shared().url_at(proxy.addr())).await;
    let options = AcquireOptions::new()
        .ttl(Duration::from_secs(ttl))
        .renew(false)
        .op_timeout(Duration::from_millis(300));
    let held = lock(&ours, &unique("confirmed")).with_options(options);
    (held.acquire().await.unwrap(), proxy)
}

/// Renews until the hold is over. Nothing that was proven before the silence confirms a renewal.
async fn nothing_confirms(held: &LockGuard, silent: Instant) {
    while held.is_held() {
        let renewed = held.renew().await.is_ok();
        assert!(!renewed, "renewed after {:?} of silence", silent.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What was proven before the silence counts, though the server says nothing of the key any more.
async fn what_was_proven_counts(mode: Mode) {
    let (held, proxy) = held_by_hand(8).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    proxy.set(mode);
    if mode == Mode::Refuse {
        proxy.reset();
    }
    let silent = Instant::now();
    // The last beats before are news for a while.
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    held.check().unwrap();
    nothing_confirms(&held, silent).await;
    let after = silent.elapsed();
    assert!(
        after > Duration::from_millis(5_500),
        "it ended after {after:?}, {mode:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_by_hand_says_what_a_server_has_confirmed() {
    if no_etcd() {
        return;
    }
    let while_it_is_waited_for = async {
        let (held, proxy) = held_by_hand(2).await;
        tokio::time::sleep(Duration::from_millis(900)).await;
        proxy.set(Mode::Blackhole);
        let silent = Instant::now();
        tokio::time::sleep(Duration::from_millis(820)).await;
        nothing_confirms(&held, silent).await;
    };
    tokio::join!(
        while_it_is_waited_for,
        what_was_proven_counts(Mode::Blackhole),
        what_was_proven_counts(Mode::Refuse),
    );
}
