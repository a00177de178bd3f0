//! Leases and keys that end behind a client's back.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{AcquireOptions, Error, LockClient, LossReason, Revocation, spi::chain};
use lockkit_etcd::EtcdBackend;
use lockkit_testbed::{Lateness, Mode, Proxy, etcd::EtcdServer, eventually};

use crate::{
    gate::{Gate, stops_watches},
    server::{
        ELECTION, block, config, connect, contend, keys, lock, no_etcd, patiently, queue, rounds, shared,
        soon, takes_its_turn, unique, waiter, watcher, with_ttl,
    },
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_deleted_from_outside_is_told_and_the_next_goes_on() {
    if no_etcd() {
        return;
    }
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let mut took = Vec::new();
    for round in 0..8 {
        let name = unique("deleted");
        let guard = lock(&ours, &name).acquire().await.unwrap();
        let told = watcher(&guard);
        let next = waiter(&lock(&theirs, &name));
        contend(shared(), &name, 2).await;
        // One hold is watched by then, and one is not.
        tokio::time::sleep(Duration::from_millis([0, 50][round % 2])).await;
        let holder = lock(&theirs, &name).inspect().await.unwrap().holders.remove(0);
        let began = Instant::now();
        assert!(theirs.revoke_by_force(&name, holder.token).await.unwrap());
        let (reason, at) = soon("the holder is told", told).await.unwrap();
        assert_eq!(reason, LossReason::Revoked);
        took.push(at.saturating_duration_since(began));
        let (next, _) = soon("the next is granted", next).await.unwrap();
        assert!(next.token() > guard.token());
        assert!(guard.release().await.is_err_and(|error| error.is_lost()));
        assert!(next.is_held(), "a late release is harmless");
        next.release().await.unwrap();
    }
    took.sort_unstable();
    eprintln!("key deleted from outside: told after {took:?}");
    assert!(took[4] < Duration::from_millis(500), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_lease_ends_all_its_holds_and_is_replaced() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let client = connect(&server.url()).await;
    let mut guards = Vec::new();
    for index in 0..5 {
        let lock = lock(&client, &format!("many-{index}"));
        guards.push(lock.acquire().await.unwrap());
    }
    let leases = block(|| server.leases()).unwrap();
    let [lease] = &leases[..] else {
        panic!("one lease for all: {leases:?}");
    };
    block(|| server.revoke(lease)).unwrap();
    // The next beat is seconds away.
    let again = lock(&client, "many-0").try_acquire().await.unwrap();
    let again = again.expect("its key is gone");
    for guard in &guards {
        soon("each is told", guard.lost()).await;
    }
    assert!(again.token() > guards[4].token());
    again.release().await.unwrap();
}

/// All leases share the connection. One that has too little time for it must not cut it for the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lease_cuts_nobody_off_a_slow_server() {
    if no_etcd() {
        return;
    }
    // A reply that takes a second, as none does here, cuts it off: no wonder on a machine that does not run.
    for tries_left in (0..3).rev() {
        let (watch, beside) = (Stopwatch::start(), Lateness::watch());
        let more = connections_beside_a_short_lease().await;
        let (stood_still, late) = (watch.stood_still(), beside.most());
        if more > 0 && tries_left > 0 && (!stood_still.is_zero() || late > Duration::from_millis(50)) {
            eprintln!("again, since the machine was {late:?} late and stood still for {stood_still:?}");
            continue;
        }
        assert_eq!(more, 0, "connected anew");
        return;
    }
}

/// Returns how often a client connects anew to a server that is too slow for one of its leases.
async fn connections_beside_a_short_lease() -> u64 {
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(&shared().url_at(proxy.addr())).await;
    let short = with_ttl(&client, &unique("short"), Duration::from_secs(1));
    let hold = short.acquire().await.unwrap();
    let long = lock(&client, &unique("long"));
    long.acquire().await.unwrap().release().await.unwrap();
    // A beat takes two round trips, more than the lease.
    let way = Duration::from_millis(300);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let before = proxy.counts().connections;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        long.acquire().await.unwrap().release().await.unwrap();
    }
    assert!(!hold.is_held(), "a vacuous pass: its beats were in time");
    proxy.counts().connections - before
}

/// A member that is given up for being late comes back as late as before, and would never serve anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_always_slow_serves_short_leases() {
    if no_etcd() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(&shared().url_at(proxy.addr())).await;
    // A beat takes two round trips, twice the time between two of them, and more than a silent member gets at first.
    let way = Duration::from_millis(270);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let ttl = Duration::from_secs(3);
    let holds = with_ttl(&client, &unique("slow"), ttl);
    let hold = soon("granted", holds.acquire()).await.unwrap();
    let before = proxy.counts().connections;
    tokio::time::sleep(3 * ttl).await;
    assert!(hold.is_held(), "{:?}", hold.check());
    let many = proxy.counts().connections - before;
    assert!(many <= 2, "connected anew {many} times");
    hold.release().await.unwrap();
}

/// Its reads are answered, so that others on its connection are served, and its renewals are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_answers_no_keepalive_is_left() {
    if no_etcd() {
        return;
    }
    outlives_a_gate(&["LeaseKeepAlive"], Duration::from_secs(6)).await;
}

/// A hold is renewed only if it would hear of the loss of its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_answers_no_watch_is_left() {
    if no_etcd() {
        return;
    }
    outlives_a_gate(&["Watch"], Duration::from_secs(3)).await;
}

/// Holds on while the member that the client is connected to does not answer these methods, and another one does.
async fn outlives_a_gate(methods: &'static [&'static str], ttl: Duration) {
    let gate = Gate::start(shared().addr(), methods).await;
    let other = Proxy::start(shared().addr()).unwrap();
    let servers = format!("etcd://{},{}", gate.addr, other.addr());
    let client = connect(&servers).await;
    other.set(Mode::Refuse);
    other.reset();
    let before = other.counts().connections;
    gate.shut();
    let guard = with_ttl(&client, &unique("gate"), ttl).acquire().await.unwrap();
    other.set(Mode::Pass);
    let busy = lock(&client, &unique("busy"));
    let began = Instant::now();
    while began.elapsed() < 2 * ttl {
        // Another's requests show that the member is not silent. One may be under way when it is given up.
        if let Ok(Some(guard)) = busy.try_acquire().await {
            let _ = guard.release().await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(guard.is_held(), "{:?}", guard.check());
    assert!(
        other.counts().connections > before,
        "a vacuous pass: it needed no other member"
    );
    guard.release().await.unwrap();
}

/// Its renewals are answered, and nothing else that it asks for is: it holds nothing any more, and nobody may have to wait for its process to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_never_proven_is_given_up() {
    if no_etcd() {
        return;
    }
    let (name, ttl) = (unique("unproven"), Duration::from_secs(8));
    let gate = Gate::start(shared().addr(), &["Range", "Txn"]).await;
    let ours = connect(&format!("etcd://{}", gate.addr)).await;
    let theirs = connect(&shared().url()).await;
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
    contend(shared(), &name, 2).await;
    gate.shut();
    let (_, told) = soon("the holder is told", told).await.unwrap();
    let (next, granted) = soon("the next is granted", next).await.unwrap();
    assert!(told < granted, "told {:?} too late", told - granted);
    next.release().await.unwrap();
}

/// It is told now, and not when those before it go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiters_key_deleted_from_outside_queues_anew() {
    if no_etcd() {
        return;
    }
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let name = unique("evicted");
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let first = block(|| keys(shared(), &name)).remove(0);
    let waiting = waiter(&lock(&ours, &name));
    contend(shared(), &name, 2).await;
    let all = block(|| keys(shared(), &name));
    let own = all.into_iter().find(|key| *key != first).unwrap();
    // The look at the keys takes a process, three times at least until it shows.
    let control = Stopwatch::start();
    block(|| keys(shared(), &name));
    let most = Duration::from_secs(3) + 3 * control.elapsed();
    let began = Stopwatch::start();
    assert!(block(|| shared().delete(&own)).unwrap());
    let again = async || {
        let now = keys(shared(), &name);
        now.len() == 2 && now.contains(&first) && !now.contains(&own)
    };
    eventually("it queues anew", again).await;
    let took = began.elapsed();
    assert!(
        took < most,
        "the fallback poll has found it: after {took:?}, at most {most:?}"
    );
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    takes_its_turn("granted", waiting).await;
}

/// It would stay when its client is gone, and bar the name for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_put_without_its_lease_gets_it_back() {
    if no_etcd() {
        return;
    }
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let name = unique("orphan");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(shared(), &name, 2).await;
    let on_leases = || {
        let json = shared().ctl(&["get", "--prefix", &queue(&name), "-w=json"]);
        json.unwrap().matches("\"lease\":").count()
    };
    assert_eq!(block(on_leases), 2);
    for _ in 0..3 {
        for key in block(|| keys(shared(), &name)) {
            block(|| shared().ctl(&["put", &key, "mine"])).unwrap();
        }
        eventually("each is on its lease", async || on_leases() == 2).await;
        assert!(guard.is_held() && !waiting.is_finished());
    }
    guard.release().await.unwrap();
    takes_its_turn("the next", waiting).await;
    contend(shared(), &name, 0).await;
}

/// Makes the key of a contender that is killed as soon as somebody has written to its key. Returns the lease that it had.
fn orphan(name: &str) -> String {
    let granted = shared().ctl(&["lease", "grant", "600"]).unwrap();
    let lease = granted.split_whitespace().nth(1).expect("its id").to_owned();
    let key = format!("{}{lease}.{}.0", queue(name), "a".repeat(32));
    let on_lease = format!("--lease={lease}");
    shared().ctl(&["put", &key, "theirs", &on_lease]).unwrap();
    shared().ctl(&["put", &key, "mine"]).unwrap();
    lease
}

/// Its client puts it back, unless that is gone: then nobody was left to end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_without_its_lease_ends_with_that_all_the_same() {
    if no_etcd() {
        return;
    }
    let client = connect(&shared().url()).await;
    // The lease may have a client.
    let name = unique("alive");
    let lease = block(|| orphan(&name));
    let tried = soon("a try", lock(&client, &name).try_acquire()).await;
    assert!(tried.unwrap().is_none(), "its client may hold");
    block(|| shared().revoke(&lease)).unwrap();
    contend(shared(), &name, 0).await;
    for waits in [false, true] {
        let name = unique("gone");
        let lease = block(|| orphan(&name));
        block(|| shared().revoke(&lease)).unwrap();
        assert_eq!(block(|| keys(shared(), &name)).len(), 1, "it stays");
        if waits {
            takes_its_turn("nobody holds", waiter(&lock(&client, &name))).await;
        } else {
            let tried = soon("a try", lock(&client, &name).try_acquire()).await;
            let guard = tried.unwrap().expect("nobody holds");
            guard.release().await.unwrap();
        }
        contend(shared(), &name, 0).await;
    }
}

/// The request itself is a write, after which nobody can tell which lease its client counts with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_without_its_lease_gets_it_back_when_it_is_asked_for() {
    if no_etcd() {
        return;
    }
    let client = connect(&shared().url()).await;
    for has_lease in [true, false] {
        let name = unique("asked");
        let lease = block(|| orphan(&name));
        let token = client.inspect(&name).await.unwrap().holders[0].token;
        if !has_lease {
            block(|| shared().revoke(&lease)).unwrap();
        }
        let asked = soon("a request", client.revoke(&name, token, Duration::ZERO)).await;
        let asked = asked.unwrap();
        if has_lease {
            let counts = matches!(asked, Revocation::StillHeld { left: Some(_) });
            assert!(counts, "its client may hold: {asked:?}");
            block(|| shared().revoke(&lease)).unwrap();
        } else {
            assert_eq!(asked, Revocation::NotHeld);
        }
        contend(shared(), &name, 0).await;
    }
}

/// A waiter must not be granted if its own key went together with the last of those before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_without_its_key_is_not_granted_its_turn() {
    if no_etcd() {
        return;
    }
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    for round in 0..rounds(20) {
        let name = unique("together");
        let guard = lock(&theirs, &name).acquire().await.unwrap();
        let waiting = waiter(&lock(&ours, &name));
        contend(shared(), &name, 2).await;
        // In one revision.
        block(|| shared().ctl(&["del", "--prefix", &queue(&name)])).unwrap();
        let (next, _) = soon("granted", waiting).await.unwrap();
        if next.is_held() {
            // Either it queued anew, or it is told at once.
            let told = next.lost();
            let has_key = async || !keys(shared(), &name).is_empty();
            if !has_key().await {
                soon(&format!("it is told, in round {round}"), told).await;
            }
        }
        soon("the holder is told", guard.lost()).await;
        let _ = next.release().await;
    }
}

/// The lock call of the server says *granted* there, for a key that is not there any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_lease_has_ended_queues_anew() {
    if no_etcd() {
        return;
    }
    let ttl = Duration::from_secs(2);
    let server = EtcdServer::builder().election_timeout(ELECTION).start().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let ours = connect(&server.url_at(proxy.addr())).await;
    let theirs = connect(&server.url()).await;
    let name = unique("ended");
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let waiting = waiter(&with_ttl(&ours, &name, ttl));
    contend(&server, &name, 2).await;
    proxy.set(Mode::Blackhole);
    contend(&server, &name, 1).await;
    let held = guard.token();
    // Its predecessor goes while it is away, and somebody else comes.
    guard.release().await.unwrap();
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    proxy.set(Mode::Pass);
    contend(&server, &name, 2).await;
    assert!(
        !waiting.is_finished() && guard.is_held(),
        "granted beside the holder"
    );
    assert!(guard.token() > held);
    guard.release().await.unwrap();
    let (next, _) = soon("it is its turn", waiting).await.unwrap();
    assert_eq!(
        block(|| keys(&server, &name)).len(),
        1,
        "what is granted has a key"
    );
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_away_for_longer_than_the_lease_loses_it_here() {
    if no_etcd() {
        return;
    }
    let ttl = Duration::from_secs(2);
    let server = EtcdServer::builder().election_timeout(ELECTION).start().unwrap();
    let client = connect(&server.url()).await;
    let name = unique("away");
    let guard = with_ttl(&client, &name, ttl).acquire().await.unwrap();
    let waiting = waiter(&lock(&connect(&server.url()).await, &name));
    contend(&server, &name, 2).await;
    let until = guard.valid_until().unwrap();
    block(|| server.pause()).unwrap();
    let (reason, at) = soon("told by its own clock", watcher(&guard)).await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    assert!(at <= until.into_std() + ttl, "the lease was renewed by nobody");
    block(|| server.resume()).unwrap();
    takes_its_turn("the next", waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_loses_no_hold_and_no_place() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::builder().fsync().start().unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let name = unique("restart");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&server, &name, 2).await;
    let before = block(|| keys(&server, &name));
    let until = guard.valid_until().unwrap();
    block(|| server.kill()).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    block(|| server.start()).unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    assert!(guard.is_held() && !waiting.is_finished());
    assert_eq!(block(|| keys(&server, &name)), before, "each has its place");
    let token = guard.token();
    guard.release().await.unwrap();
    let (next, _) = soon("the next", waiting).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

/// The servers know neither the lease nor the keys any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_its_data_loses_holds_and_goes_on() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let name = unique("empty");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&server, &name, 2).await;
    block(|| server.start_empty()).unwrap();
    soon("the holder is told", guard.lost()).await;
    takes_its_turn("the waiter queues anew", waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compaction_takes_no_watch_away() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let name = unique("compacted");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&server, &name, 2).await;
    for round in 0..5 {
        block(|| {
            server.ctl(&["put", "busy", &round.to_string()]).unwrap();
            server.compact().unwrap();
        });
    }
    assert!(guard.is_held() && !waiting.is_finished());
    let control = Stopwatch::start();
    guard.release().await.unwrap();
    let (released, began) = (control.elapsed(), Stopwatch::start());
    let (next, _) = soon("the next", waiting).await.unwrap();
    let (took, most) = (began.elapsed(), Duration::from_secs(3) + 3 * released);
    assert!(
        took < most,
        "the fallback poll has found it: after {took:?}, at most {most:?}"
    );
    next.release().await.unwrap();
}

/// The events of the time in between are compacted away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compaction_during_an_interruption_loses_no_turn() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (ours, theirs) = (
        connect(&server.url_at(proxy.addr())).await,
        connect(&server.url()).await,
    );
    let (name, held) = (unique("compacted"), unique("held"));
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let kept = lock(&ours, &held).acquire().await.unwrap();
    let waiting = waiter(&lock(&ours, &name));
    contend(&server, &name, 2).await;
    proxy.set(Mode::Refuse);
    proxy.reset();
    guard.release().await.unwrap();
    block(|| server.compact()).unwrap();
    let until = kept.valid_until().unwrap();
    proxy.set(Mode::Pass);
    takes_its_turn("its turn", waiting).await;
    eventually("the hold is proven anew", async || {
        kept.valid_until().unwrap() > until
    })
    .await;
    kept.release().await.unwrap();
}

/// A repeated delete would take the next key of the same name, if there were one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_repeated_after_a_lost_reply_spares_the_next_hold() {
    if no_etcd() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(&shared().url_at(proxy.addr())).await;
    let name = unique("again");
    let ours = with_ttl(&client, &name, Duration::from_secs(10));
    for _ in 0..3 {
        let guard = ours.acquire().await.unwrap();
        proxy.set(Mode::DropReplies);
        let releasing = tokio::spawn(guard.release());
        contend(shared(), &name, 0).await;
        proxy.set(Mode::Pass);
        let next = soon("free again", ours.acquire()).await.unwrap();
        // By now the first release is repeated.
        let _ = soon("an answer", releasing).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(next.is_held());
        assert_eq!(block(|| keys(shared(), &name)).len(), 1, "the second hold lives");
        next.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_or_dropped_client_leaves_no_lease() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    for closes in [true, false] {
        let client = patiently(config(&server.url())).await;
        let guard = lock(&client, "last").acquire().await.unwrap();
        assert_eq!(block(|| server.leases()).unwrap().len(), 1);
        if closes {
            // It revokes its lease, and with it all that is left.
            drop(guard);
            client.close(Duration::from_secs(20)).await.unwrap();
            assert_eq!(block(|| server.leases()).unwrap().len(), 0);
            let error = lock(&client, "last").acquire().await.unwrap_err();
            assert!(matches!(error, lockkit_core::Error::Closed), "{error}");
        } else {
            guard.release().await.unwrap();
            drop(client);
            eventually("its lease is revoked", async || {
                server.leases().unwrap().is_empty()
            })
            .await;
        }
    }
}

/// The server is well, and the next beat is further away than `op_timeout`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_by_hand_needs_no_beat() {
    if no_etcd() {
        return;
    }
    let client = connect(&shared().url()).await;
    let options = AcquireOptions::new()
        .ttl(Duration::from_secs(30))
        .op_timeout(Duration::from_millis(500));
    let lock = client.lock(unique("by-hand")).unwrap();
    let guard = lock.acquire_with(&options).await.unwrap();
    let mut failed = Vec::new();
    for _ in 0..6 {
        if let Err(error) = guard.renew().await {
            failed.push(error.to_string());
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// A member answers all requests, and tells nothing any more. Its clients go on to another one, and look.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_tells_nothing_any_more_is_left() {
    if no_etcd() {
        return;
    }
    let (addr, stopped) = stops_watches(shared().addr()).await;
    let other = Proxy::start(shared().addr()).unwrap();
    let ours = connect(&format!("etcd://{addr},{}", other.addr())).await;
    other.set(Mode::Refuse);
    other.reset();
    let theirs = connect(&shared().url()).await;
    let (name, ttl) = (unique("silent"), Duration::from_secs(4));
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    // From now on it is watched.
    tokio::time::sleep(Duration::from_millis(300)).await;
    stopped.store(true, Ordering::SeqCst);
    other.set(Mode::Pass);
    assert!(theirs.revoke_by_force(&name, guard.token()).await.unwrap());
    let next = soon("the next", with_ttl(&theirs, &name, ttl).acquire())
        .await
        .unwrap();
    let told = timeout(ttl, guard.lost()).await;
    assert_eq!(told.ok(), Some(LossReason::Revoked), "two have held for a lease");
    next.release().await.unwrap();
}

/// A backend that was connected on a runtime which has ended, for a client on another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_outlives_its_runtime_says_so() {
    if no_etcd() {
        return;
    }
    let url = shared().url();
    let backend = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let backend = runtime.block_on(EtcdBackend::connect(config(&url))).unwrap();
        drop(runtime);
        backend
    });
    let client = LockClient::new(backend.join().unwrap());
    let tried = soon("a try", client.lock("a").unwrap().try_acquire()).await;
    let waited = soon("who waits", client.lock("a").unwrap().acquire()).await;
    for answer in [tried.map(drop), waited.map(drop)] {
        let error = answer.unwrap_err();
        assert!(
            matches!(error, Error::Backend { transient: false, .. }),
            "{}",
            chain(&error)
        );
    }
}
