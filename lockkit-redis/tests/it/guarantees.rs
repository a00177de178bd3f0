//! The rows of `docs/guarantees.md` for one Redis master, those that fail among them. What crashes, cuts and lost
//! replies come to is in `faults`.

use std::{
    fs::{self, File},
    num::NonZeroU32,
    path::PathBuf,
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use lockkit_conformance::{Traces, stall::Stopwatch};
use lockkit_core::{
    AcquireOptions, FenceGate, FencingToken, Lock, LockClient, LockGuard, LockName, LossReason,
    spi::{Backend, ClaimRequest, Mode as LockMode, OwnerId},
};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{
    Clock, Mode, Port, Proxy, eventually,
    redis::{Fsync, RedisServer},
};

use crate::common::{
    AT_ONCE, LONG, MS, Peer, SECOND, client, client_behind_proxy, connect, granted, keys, lock, no_server,
    nothing_is_left, take, until, url_of, waiter, waiters, within,
};

/// A second holder of lock `a` is let in by `client` while the first believes to hold it, which is what must not be;
/// whether a resource that checks tokens then takes the rightful holder's write and refuses the other's.
async fn overlaps(held: &LockGuard, client: &LockClient) -> bool {
    let resource = FenceGate::new();
    resource.admit(held.token()).unwrap();
    let second = granted(LONG, "the second", waiter(&lock(client, "a", LONG))).await;
    let lost = [held, &second].map(|guard| guard.lost().reason());
    assert_eq!(lost, [None; 2], "there is no overlap to show");
    let fenced = resource.admit(second.token()).is_ok() && resource.admit(held.token()).is_err();
    second.release().await.unwrap();
    fenced
}

/// A hold whose next renewal is a third of its lease away.
async fn fresh(lock: &Lock) -> LockGuard {
    let held = lock.acquire().await.unwrap();
    held.renew().await.unwrap();
    held
}

/// The machine's clock stands still while it is asleep, or its process is stopped: it goes on as a zombie until it
/// looks. Only the token keeps its writes out.
#[tokio::test]
async fn a_client_paused_past_its_lease_is_a_zombie_and_is_fenced() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let resource = directory.path().join("resource");
    let mut peer = Peer::start(server.url()).await;
    let token = peer.hold(SECOND, "a").await;
    peer.send(&format!("write slot {}", resource.display()));
    assert_eq!(peer.reply().await, "written");
    peer.process.stop().unwrap();

    let client = client(server.url()).await;
    let next = granted(
        5 * SECOND,
        "when the lease is over",
        waiter(&lock(&client, "a", LONG)),
    )
    .await;
    assert!(next.token().get() > token);
    let mut other = Peer::start(server.url()).await;
    next.release().await.unwrap();
    other.hold(LONG, "a").await;
    other.send(&format!("write slot {}", resource.display()));
    assert_eq!(other.reply().await, "written");

    peer.process.resume().unwrap();
    peer.send(&format!("write slot {}", resource.display()));
    assert_eq!(peer.reply().await, "refused");
    peer.send("check slot");
    assert_eq!(peer.reply().await, "lost");
}

/// ✘ exclusion. Tokens go on above the server's clock, as long as that is ahead of the counter that was lost.
#[tokio::test]
async fn a_server_that_lost_its_data_grants_again_with_higher_tokens() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    // Its holder finds out when it is connected again.
    proxy.set(Mode::Blackhole);
    server.restart_empty().unwrap();
    let other = self::client(server.url()).await;
    assert!(overlaps(&held, &other).await, "tokens went back");
    proxy.set(Mode::Pass);
    within(LONG, "told", held.lost()).await;
}

/// Tokens are reserved for local hand-offs, and none if nobody waits.
#[tokio::test]
async fn locks_that_nobody_contends_for_keep_the_counter_at_the_clock() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let options = AcquireOptions::new().local_handoffs(AcquireOptions::MAX_LOCAL_HANDOFFS);
    let many = client.lock("a").unwrap().with_options(options);
    for _ in 0..200 {
        take(&many).await;
    }
    let counter: u64 = server
        .cli(&["GET", "lockkit:lockkit#fence"])
        .unwrap()
        .parse()
        .unwrap();
    let time = server.cli(&["TIME"]).unwrap();
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    let ahead = Duration::from_micros(counter.saturating_sub(seconds * 1_000_000));
    assert!(ahead < 2 * SECOND, "{ahead:?} ahead of the clock");
}

/// Those of a minute outrun the clock, by which tokens go on otherwise.
#[tokio::test]
async fn tokens_that_are_reserved_are_given_to_nobody_else() {
    const OF_A_MINUTE: u32 = 60_000_000;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let config = RedisConfig::new(server.url());
    let backend = RedisBackend::connect(config).await.unwrap();
    let mut last = 0;
    for (owner, tokens) in [(1, OF_A_MINUTE), (2, 1), (3, 1), (4, OF_A_MINUTE), (5, 1)] {
        let name = LockName::new(format!("{owner}")).unwrap();
        let mut request = ClaimRequest::new(name, LockMode::Exclusive, LONG, OwnerId::new(owner));
        request.tokens = NonZeroU32::new(tokens).unwrap();
        request.locally_contended = true;
        let mut claim = backend.claim(&request).await.unwrap();
        let grant = claim.attempt(Duration::ZERO).await.unwrap().unwrap();
        assert!(*grant.tokens.start() > last, "{:?} after {last}", grant.tokens);
        last = *grant.tokens.end();
        claim.release().await.unwrap();
    }
}

/// ✘ fencing: more tokens than microseconds of the clock had been given out when the counter was lost.
#[tokio::test]
async fn tokens_go_back_if_a_lost_counter_was_ahead_of_the_clock() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    // With two clients each waiter is passed the lock by the server, with tokens for many who do not come.
    let (client, other) = (client(server.url()).await, self::client(server.url()).await);
    let options = AcquireOptions::new().local_handoffs(AcquireOptions::MAX_LOCAL_HANDOFFS);
    let many = |client: &LockClient| client.lock("a").unwrap().with_options(options.clone());
    let (one, two) = (many(&client), many(&other));
    let resource = FenceGate::new();
    let started = std::time::Instant::now();
    let mut reserved = Duration::ZERO;
    let mut held = one.acquire().await.unwrap();
    for next in [&two, &one].into_iter().cycle() {
        if reserved > started.elapsed() + 20 * SECOND {
            break;
        }
        resource.admit(held.token()).unwrap();
        let waiting = waiter(next);
        waiters(&server, "a", 1).await;
        held.release().await.unwrap();
        held = granted(LONG, "passed on", waiting).await;
        // A token is worth a microsecond of the clock.
        reserved += Duration::from_micros(u64::from(AcquireOptions::MAX_LOCAL_HANDOFFS) + 1);
    }
    drop(held);
    server.restart_empty().unwrap();
    let guard = granted(LONG, "connected again", waiter(&lock(&client, "a", LONG))).await;
    assert!(
        resource.admit(guard.token()).is_err(),
        "a rightful holder is refused"
    );
}

/// A crash of the machine, with `appendfsync everysec`: what was written in the last second is gone. ✘ exclusion, and
/// no different from the loss of all data.
#[tokio::test]
async fn appendfsync_everysec_loses_the_last_second_in_a_crash() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .append_only(Fsync::EverySec)
        .start()
        .unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let file = append_only_file(&server);
    // While the disk is busy, the server keeps what it is to write for two seconds.
    let write = async || {
        until(LONG, "written", async || {
            let state = server.cli(&["INFO", "persistence"]).unwrap();
            state.lines().any(|line| line.trim() == "aof_buffer_length:0")
        })
        .await;
        fs::metadata(&file).unwrap().len()
    };
    take(&lock(&client, "b", LONG)).await;
    let synced = write().await;
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    proxy.set(Mode::Blackhole);
    write().await;
    server.kill().unwrap();
    // Cuts off the part that the system had not written to the disk when the machine crashed.
    let written = fs::metadata(&file).unwrap().len();
    assert!(written > synced, "{written}");
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(synced)
        .unwrap();
    server.start().unwrap();
    assert!(!keys(&server).is_empty(), "the rest is there");
    let other = self::client(server.url()).await;
    assert!(overlaps(&held, &other).await, "tokens went back");
}

fn append_only_file(server: &RedisServer) -> PathBuf {
    let value = |name: &str| {
        let answer = server.cli(&["CONFIG", "GET", name]).unwrap();
        answer.lines().last().unwrap().to_owned()
    };
    let directory = PathBuf::from(value("dir")).join(value("appenddirname"));
    let files = fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut increments = files.filter(|path| path.to_string_lossy().contains(".incr."));
    increments.next().expect("an append-only file")
}

/// `appendfsync always`: nothing that was answered is lost, neither holds nor tokens.
#[tokio::test]
async fn appendfsync_always_keeps_holds_and_tokens_in_a_crash() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder().append_only(Fsync::Always).start().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let mut highest = 0;
    for name in ["a", "b", "c"] {
        let held = lock(&client, name, LONG).acquire().await.unwrap();
        let counter = server.cli(&["GET", "lockkit:lockkit#fence"]).unwrap();
        assert!(held.token().get() > highest);
        highest = held.token().get();
        proxy.set(Mode::Blackhole);
        server.kill().unwrap();
        server.start().unwrap();
        assert_eq!(server.cli(&["GET", "lockkit:lockkit#fence"]).unwrap(), counter);
        let other = self::client(server.url()).await;
        assert!(lock(&other, name, LONG).try_acquire().await.unwrap().is_none());
        proxy.set(Mode::Pass);
        until(LONG, "connected again", async || {
            held.check().unwrap();
            held.renew().await.is_ok()
        })
        .await;
        held.release().await.unwrap();
    }
}

/// ✘ exclusion: replication is asynchronous.
#[tokio::test]
async fn a_replica_promoted_without_the_hold_grants_it_again() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let stream = Proxy::start(master.addr()).unwrap();
    let replica = RedisServer::builder().replica_of(stream.addr()).start().unwrap();
    let (client, proxy) = client_behind_proxy(&master).await;
    stream.set(Mode::HalfOpen);
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    proxy.set(Mode::Blackhole);
    master.kill().unwrap();
    replica.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    assert_eq!(replica.cli(&["EXISTS", "lockkit:a"]).unwrap(), "0");
    let other = self::client(replica.url()).await;
    assert!(overlaps(&held, &other).await, "tokens went back");
    is_told_when_led_to(&replica, &proxy, &held).await;
}

/// The holder whose client goes through `proxy` is told by the new master.
async fn is_told_when_led_to(master: &RedisServer, proxy: &Proxy, held: &LockGuard) {
    proxy.set_upstream(master.addr());
    proxy.set(Mode::Pass);
    proxy.reset();
    assert_eq!(within(LONG, "told", held.lost()).await, LossReason::Revoked);
}

/// ✘ fencing: the new master's counter is what it was told, and not below its own clock, which is an hour behind.
#[tokio::test]
async fn a_replica_promoted_with_a_slow_clock_takes_tokens_back() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let stream = Proxy::start(master.addr()).unwrap();
    let clock = Clock::new().unwrap();
    clock.back(3600 * SECOND).unwrap();
    let replica = RedisServer::builder().replica_of(stream.addr()).clock(&clock);
    let replica = replica.start().unwrap();
    let (client, proxy) = client_behind_proxy(&master).await;
    stream.set(Mode::HalfOpen);
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    proxy.set(Mode::Blackhole);
    master.kill().unwrap();
    replica.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let other = self::client(replica.url()).await;
    assert!(!overlaps(&held, &other).await, "tokens went on");
}

/// ✘ exclusion, although the new master has the hold: its lease ends by the new master's clock, which is a minute ahead.
#[tokio::test]
async fn a_replica_promoted_with_a_fast_clock_frees_what_is_held() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let clock = Clock::new().unwrap();
    clock.forward(60 * SECOND).unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).clock(&clock);
    let replica = replica.start().unwrap();
    let (client, proxy) = client_behind_proxy(&master).await;
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    proxy.set(Mode::Blackhole);
    master.cli(&["SET", "probe", "there"]).unwrap();
    until(LONG, "the replica has it all", async || {
        replica.cli(&["GET", "probe"]).unwrap() == "there"
    })
    .await;
    master.kill().unwrap();
    replica.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let other = self::client(replica.url()).await;
    assert!(overlaps(&held, &other).await, "tokens went back");
    is_told_when_led_to(&replica, &proxy, &held).await;
}

/// A snapshot that is older than the last tokens does so, and a replica that was behind. What comes next is granted by the clock.
#[tokio::test]
async fn the_fence_is_past_what_the_counter_has_forgotten() {
    const COUNTER: &str = "lockkit:lockkit#fence";

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let lock = lock(&client, "a", LONG);
    take(&lock).await;
    let before = server.cli(&["GET", COUNTER]).unwrap();
    let guard = lock.acquire().await.unwrap();
    let last = guard.token();
    guard.release().await.unwrap();
    server.cli(&["SET", COUNTER, &before]).unwrap();
    let fence = client.fence().await.unwrap();
    assert!(fence >= last, "{fence}, and {last} was granted");
    let next = lock.acquire().await.unwrap().token();
    assert!(next > fence, "{next}, and the fence was {fence}");
}

/// Roles are changed back, and for a moment both are masters. What the one grants then is not known to the other, whose
/// counter is that of a moment before.
#[tokio::test]
async fn tokens_go_on_where_two_masters_grant_in_turn() {
    if no_server() {
        return;
    }
    let (one, two) = (RedisServer::plain().unwrap(), RedisServer::plain().unwrap());
    let (ip, port) = (two.addr().ip().to_string(), two.addr().port().to_string());
    let counter = |server: &RedisServer| server.cli(&["GET", "lockkit:lockkit#fence"]).unwrap();
    let (client, other) = (client(one.url()).await, self::client(two.url()).await);
    let (mine, theirs) = (lock(&client, "a", LONG), lock(&other, "a", LONG));
    take(&mine).await;
    for _ in 0..5 {
        one.cli(&["REPLICAOF", &ip, &port]).unwrap();
        eventually("it is a replica", async || {
            let state = one.cli(&["INFO", "replication"]).unwrap();
            state.contains("master_link_status:up")
        })
        .await;
        // Its last grant but one has reached the replica, some milliseconds ago.
        take(&theirs).await;
        while counter(&one) != counter(&two) {
            take(&theirs).await;
        }
        one.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
        let before = theirs.acquire().await.unwrap();
        let held = mine.acquire().await.unwrap();
        assert!(
            held.token() > before.token(),
            "{} and {}",
            before.token(),
            held.token()
        );
        before.release().await.unwrap();
        held.release().await.unwrap();
    }
}

/// Roles are changed by hand, and back again, and connections stand. Neither server has what the other one granted.
#[tokio::test]
async fn tokens_go_on_when_a_master_was_a_replica_for_a_while() {
    if no_server() {
        return;
    }
    let one = RedisServer::plain().unwrap();
    let stream = Proxy::start(one.addr()).unwrap();
    let two = RedisServer::builder().replica_of(stream.addr()).start().unwrap();
    let nowhere = Port::reserve().unwrap().addr();
    let (ip, port) = (nowhere.ip().to_string(), nowhere.port().to_string());
    let demote = |server: &RedisServer| server.cli(&["REPLICAOF", &ip, &port]).unwrap();
    let promote = |server: &RedisServer| server.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let connections = |server: &RedisServer| {
        let ids = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).unwrap();
        let ids = ids.lines().filter_map(|line| line.split(' ').next());
        ids.map(str::to_owned).collect::<Vec<_>>()
    };
    let (exclusive, shared) = (client(one.url()).await, client(one.url()).await);
    let locks = [lock(&exclusive, "a", LONG), lock(&shared, "a", LONG).shared()];
    let resource = FenceGate::new();
    for lock in &locks {
        let held = lock.acquire().await.unwrap();
        resource.admit(held.token()).unwrap();
        held.release().await.unwrap();
    }
    stream.set(Mode::HalfOpen);
    let stood = connections(&one);
    for mine in &locks {
        demote(&one);
        promote(&two);
        // The clock goes on, and what another client holds meanwhile has a token of that time.
        tokio::time::sleep(50 * MS).await;
        let other = client(two.url()).await;
        for _ in 0..2 {
            let held = lock(&other, "a", LONG).acquire().await.unwrap();
            resource.admit(held.token()).unwrap();
            held.release().await.unwrap();
        }
        demote(&two);
        promote(&one);
        let held = mine.acquire().await.unwrap();
        let admitted = resource.admit(held.token());
        admitted.unwrap_or_else(|error| panic!("a rightful holder is refused: {error}"));
        held.release().await.unwrap();
    }
    assert_eq!(connections(&one), stood, "it was connected all the while");
}

/// ✘ exclusion: leases end by the server's wall clock.
#[tokio::test]
async fn a_clock_set_forward_frees_locks_that_are_held() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    for shared in [false, true] {
        let first = lock(&one, "a", LONG);
        let first = if shared { first.shared() } else { first };
        let held = fresh(&first).await;
        assert!(lock(&two, "a", LONG).try_acquire().await.unwrap().is_none());
        server.cli(&["SET", "probe", "", "PX", "30000"]).unwrap();
        clock.forward(60 * SECOND).unwrap();
        // Valkey goes by the time that it read some milliseconds ago, and has a waiter wait for the lease until then.
        until(LONG, "it goes by its clock", async || {
            server.cli(&["EXISTS", "probe"]).unwrap() == "0"
        })
        .await;
        assert!(overlaps(&held, &two).await, "tokens went back");
        // It is told at its next renewal.
        assert!(held.renew().await.unwrap_err().is_lost());
    }
}

/// ✘ availability: what a dead holder left lasts for as much longer as the clock went back. Exclusion stays.
#[tokio::test]
async fn a_clock_set_back_keeps_the_lock_of_a_dead_holder() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    let client = client(server.url()).await;
    let mut peer = Peer::start(server.url()).await;
    let token = peer.hold(SECOND, "a").await;
    peer.process.kill().unwrap();
    clock.back(60 * SECOND).unwrap();
    let waiting = waiter(&lock(&client, "a", LONG));
    // Three times the lease, and the server counts none of it.
    tokio::time::sleep(3 * SECOND).await;
    assert!(!waiting.is_finished(), "there is nothing to show");
    let left: u64 = server.cli(&["PTTL", "lockkit:a"]).unwrap().parse().unwrap();
    assert!(left > 50_000, "{left} ms");
    clock.reset().unwrap();
    waiting.abort();
    // It asks when it was told that the lease would be over, or when it is made to.
    let guard = granted(
        LONG,
        "the clock is right again",
        waiter(&lock(&client, "a", LONG)),
    )
    .await;
    assert!(guard.token().get() > token);
    guard.release().await.unwrap();
}

/// A client passes its lock on without the server. The next holder has a token of its own.
#[tokio::test]
async fn a_hold_is_broken_by_its_own_token_and_no_other() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, operator) = (client(server.url()).await, client(server.url()).await);
    let mine = holder.lock("a").unwrap();
    // The first hold that is waited for is not passed on.
    let first = mine.acquire().await.unwrap();
    assert!(mine.acquire().now_or_never().is_none());
    first.release().await.unwrap();
    for published in [true, false] {
        let before = mine.acquire().await.unwrap();
        let waiting = waiter(&mine);
        eventually("known to the operator", async || {
            let state = operator.inspect("a").await.unwrap();
            state.holders.iter().any(|holder| holder.token == before.token())
        })
        .await;
        let drawn = server.cli(&["GET", "lockkit:lockkit#fence"]).unwrap();
        let over = before.token();
        before.release().await.unwrap();
        let heir = granted(AT_ONCE, "passed on", waiting).await;
        assert_eq!(server.cli(&["GET", "lockkit:lockkit#fence"]).unwrap(), drawn);
        if published {
            eventually("the heir has published its token", async || {
                let state = operator.inspect("a").await.unwrap();
                state.holders.iter().any(|holder| holder.token == heir.token())
            })
            .await;
            assert!(
                !operator.revoke_by_force("a", over).await.unwrap(),
                "that hold is over"
            );
            heir.renew().await.unwrap();
        }
        assert!(operator.revoke_by_force("a", heir.token()).await.unwrap());
        let reason = within(AT_ONCE, "told", heir.lost()).await;
        assert_eq!(reason, LossReason::Revoked);
        drop(heir);
        // Somebody has waited since, so that tokens are reserved the next time.
        let other = mine.acquire().await.unwrap();
        assert!(mine.acquire().now_or_never().is_none());
        other.release().await.unwrap();
    }
    nothing_is_left(&server, "after breaks").await;

    // A client that stands still publishes no more tokens. Its hold can be ended by any that it reserved.
    let record = format!("lockkit:{:032x} 33 1795258041843810 x label", 7);
    server.cli(&["SET", "lockkit:a", &record, "PX", "60000"]).unwrap();
    for (token, found) in [(1_795_258_041_843_843, false), (1_795_258_041_843_842, true)] {
        let token = FencingToken::new(token);
        assert_eq!(
            operator.revoke_by_force("a", token).await.unwrap(),
            found,
            "{token}"
        );
    }
}

/// Its looks are further apart than the time that the holder has. So that begins when the first of them is answered.
#[tokio::test]
async fn a_break_from_far_away_waits_for_the_holders_word() {
    const FAR: Duration = Duration::from_millis(300);
    const TOKEN: u64 = 1_795_258_041_843_810;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (operator, proxy) = client_behind_proxy(&server).await;
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: FAR,
    });
    let publish = |token: u64| {
        let record = format!("lockkit:{:032x} 33 {token} x label", 7);
        server.cli(&["SET", "lockkit:a", &record, "PX", "60000"]).unwrap();
    };
    let broken = FencingToken::new(TOKEN + 1);
    let mut found = Vec::new();
    // A busy machine may let the second look wait for too long.
    for _ in 0..3 {
        publish(TOKEN);
        let monitor = server.monitor().unwrap();
        let breaking = operator.revoke_by_force("a", broken);
        let publishing = async {
            eventually("it has looked twice", async || {
                let lines = monitor.lines().unwrap();
                let looks = lines
                    .iter()
                    .filter(|line| line.contains("EVALSHA") && line.contains(&broken.to_string()));
                looks.count() == 2
            })
            .await;
            publish(TOKEN + 2);
        };
        let (outcome, ()) = tokio::join!(breaking, publishing);
        found.push(outcome.unwrap());
        if found.last() == Some(&false) {
            let state = operator.inspect("a").await.unwrap();
            let tokens: Vec<_> = state.holders.iter().map(|holder| holder.token.get()).collect();
            assert_eq!(tokens, [TOKEN + 2], "that hold goes on");
            return;
        }
    }
    panic!("it ended whatever hold there was: {found:?}");
}

/// Renewals go out on two connections with `replicas`, and one may come long after it was given up.
#[tokio::test]
async fn a_late_renewal_writes_no_older_token() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    held.renew().await.unwrap();
    let monitor = server.monitor().unwrap();
    held.renew().await.unwrap();
    let lines = monitor.lines().unwrap();
    let renewal = lines.iter().find(|line| line.contains(r#""EVALSHA""#)).unwrap();
    let words: Vec<_> = renewal.split('"').skip(1).step_by(2).collect();
    let (token, older) = (held.token().to_string(), (held.token().get() - 1).to_string());
    let late: Vec<_> = words.iter().map(|word| word.replace(&token, &older)).collect();
    let late: Vec<_> = late.iter().map(String::as_str).collect();
    assert!(late != words, "{words:?}");
    assert_eq!(server.cli(&late).unwrap(), "1", "it renews");
    let record = server.cli(&["GET", "lockkit:a"]).unwrap();
    assert!(record.contains(&token), "{record} and not {token}");
    assert!(client.revoke_by_force("a", held.token()).await.unwrap());
    within(AT_ONCE, "told", held.lost()).await;
}

/// ✘ exclusion until the holder is told, which is at its next renewal, a third of the lease away at most.
#[tokio::test]
async fn a_key_that_an_admin_deletes_is_told_with_the_next_renewal() {
    if no_server() {
        return;
    }
    let ttl = 3 * SECOND;
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    for shared in [false, true] {
        let first = lock(&one, "a", ttl);
        let first = if shared { first.shared() } else { first };
        let held = fresh(&first).await;
        server.cli(&["DEL", "lockkit:a"]).unwrap();
        let deleted = Stopwatch::start();
        assert!(overlaps(&held, &two).await, "tokens went back");
        let reason = within(LONG, "told", held.lost()).await;
        assert_eq!(reason, LossReason::Revoked);
        assert!(deleted.elapsed() < ttl / 3 + SECOND, "{:?}", deleted.elapsed());
        assert!(held.release().await.unwrap_err().is_lost());
    }
    nothing_is_left(&server, "after a deletion").await;
}

/// ✘ exclusion. The client warned of it when it connected.
#[tokio::test]
async fn a_server_that_evicts_drops_a_hold_and_is_warned_about() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .max_memory(3 << 20, "volatile-lru")
        .start()
        .unwrap();
    let traces = Traces::default();
    let recording = tracing::subscriber::set_default(traces.clone());
    let client = client(server.url()).await;
    drop(recording);
    let text = traces.text();
    let warning = text.lines().find(|line| line.starts_with("WARN"));
    let warning = warning.unwrap_or_else(|| panic!("no warning: {text}"));
    assert!(
        warning.contains("evict") && warning.contains("volatile-lru"),
        "{warning}"
    );

    let held = fresh(&lock(&client, "a", LONG)).await;
    // Others fill it with keys that have no end.
    let value = "x".repeat(64 << 10);
    for n in 0.. {
        if server.cli(&["EXISTS", "lockkit:a"]).unwrap() == "0" {
            break;
        }
        assert!(n < 100, "there is nothing to show");
        let _ = server.cli(&["SET", &format!("cache:{n}"), &value]);
    }
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    let other = self::client(server.url()).await;
    overlaps(&held, &other).await;
    assert!(held.renew().await.unwrap_err().is_lost());
}

#[tokio::test]
async fn a_server_that_does_not_evict_is_not_warned_about() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let traces = Traces::default();
    let recording = tracing::subscriber::set_default(traces.clone());
    let client = client(server.url()).await;
    drop(recording);
    drop(client);
    assert!(!traces.text().contains("WARN"), "{}", traces.text());
}

/// Cut off from the server, nobody who waits is granted anything, and nobody who holds thinks so for longer than its
/// lease.
#[tokio::test]
async fn clients_that_are_all_cut_off_hold_nothing_after_a_lease() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let clients = join_all((0..4).map(|_| connect(RedisConfig::new(url_of(&proxy))))).await;
    let clients: Vec<_> = clients.into_iter().map(Result::unwrap).collect();
    let mut held = Vec::new();
    for (n, client) in clients.iter().enumerate() {
        held.push(lock(client, &n.to_string(), SECOND).acquire().await.unwrap());
    }
    let waiting = waiter(&lock(&clients[0], "1", LONG));
    proxy.set(Mode::Blackhole);
    for guard in &held {
        let until = guard.valid_until().unwrap();
        assert_eq!(
            within(2 * SECOND, "told", guard.lost()).await,
            LossReason::Expired
        );
        assert!(guard.valid_until().unwrap() <= until, "renewed by nobody");
    }
    assert!(!waiting.is_finished(), "granted by nobody");
    proxy.set(Mode::Pass);
    eventually("connected again", async || clients[3].inspect("3").await.is_ok()).await;
    granted(LONG, "the waiter", waiting)
        .await
        .release()
        .await
        .unwrap();
}
