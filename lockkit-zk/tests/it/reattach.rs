//! Sessions that are attached again: to servers that grant another timeout, with many watches, to a deposed leader.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::atomic::{AtomicUsize, Ordering},
    task::Poll,
    time::{Duration, Instant},
};

use futures_util::{
    StreamExt,
    stream::{self, FuturesUnordered},
};
use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Error, LockClient, LockGuard, LossReason};
use lockkit_testbed::{
    Mode, Proxy, eventually,
    zookeeper::{ZkEnsemble, ZkServer},
};
use tokio::task::JoinHandle;
use zookeeper_client::{Acls, Client, CreateMode, Error as ZkError};

use crate::server::{
    self, LEISURE, children, contend, dir, expects_several, lock, no_zookeeper, raw, soon, unique,
    unless_still, waiter, watcher,
};

/// Makes two clients that ask for this session timeout, one of them behind a proxy.
async fn pair(proxy: &Proxy, server: &ZkServer, timeout: Duration, tick: Duration) -> [LockClient; 2] {
    let mut clients = Vec::new();
    for addr in [proxy.addr(), server.addr()] {
        let mut config = server::config(addr);
        (config.session_timeout, config.tick_time) = (timeout, tick);
        clients.push(server::patiently(config).await);
    }
    clients.try_into().expect("two")
}

/// Waits for a connection after the one `before`, and a reply on it.
async fn is_back(proxy: &Proxy, before: u64) {
    eventually("connected again", async || proxy.counts().connections > before).await;
    let heard = proxy.counts().replies.bytes;
    eventually("answered again", async || proxy.counts().replies.bytes > heard).await;
}

/// Cuts the holder off in silence. It has to be told before the next is granted.
async fn told_first(proxy: &Proxy, ours: &[LockGuard], next: JoinHandle<(LockGuard, Instant)>) {
    let told: Vec<_> = ours.iter().map(watcher).collect();
    let cut = Instant::now();
    proxy.set(Mode::Blackhole);
    let (next, granted) = soon("the next is granted", next).await.unwrap();
    for told in told {
        let (_, told) = soon("each holder is told", told).await.unwrap();
        assert!(
            told < granted,
            "told {:?} after the cut, the next granted {:?} after it",
            told - cut,
            granted - cut
        );
    }
    assert!(
        ours.iter()
            .all(|guard| next.token() > guard.token() && !guard.is_held())
    );
}

/// Checks that nothing is lost a second later, when the leader counts with the shorter timeout alone.
async fn goes_on(ours: &LockGuard, next: &JoinHandle<(LockGuard, Instant)>) -> Result<(), String> {
    let back = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let granted = next.is_finished();
    if ours.is_held() {
        assert!(!granted, "PROMISE BROKEN: two hold it");
        return Ok(());
    }
    let reason = ours.lost().reason();
    Err(format!(
        "lost, as seen {:?} after it was back: {reason:?}; the next is granted: {granted}",
        back.elapsed()
    ))
}

/// Restarts the server of a long session's holder with other settings, then cuts the holder off.
async fn comes_back_with(first: &[&str], then: &str, timeout: Duration) -> Result<(), String> {
    let mut builder = ZkServer::builder();
    for line in first {
        builder = builder.directive(*line);
    }
    let server = builder.start().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let [ours, theirs] = pair(&proxy, &server, timeout, LEISURE).await;
    let name = unique("granted-less");
    let renewed = lock(&ours, &name).acquire().await.unwrap();
    // Nobody renews this one. A shorter lease counts all the same.
    let left = AcquireOptions::new().ttl(Duration::from_secs(60)).renew(false);
    let left = ours.lock(unique("left")).unwrap().with_options(left);
    let left = left.acquire().await.unwrap();
    let next = waiter(&lock(&theirs, &name));
    contend(&raw(server.addr()).await, &name, 2).await;
    let before = proxy.counts().connections;
    // The server that is asked to attach the session replies. What a silent one may have granted is another test's matter.
    proxy.set(Mode::Refuse);
    server.stop().unwrap();
    server.reconfigure(then).unwrap();
    server.start().unwrap();
    proxy.set(Mode::Pass);
    is_back(&proxy, before).await;
    goes_on(&renewed, &next).await?;
    told_first(&proxy, &[renewed, left], next).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_granted_less_is_told_in_time() {
    if no_zookeeper() {
        return;
    }
    let minute = Duration::from_secs(60);
    unless_still(async || comes_back_with(&["tickTime=1000"], "maxSessionTimeout=5000", minute).await).await;
}

/// Begins a renewal by hand, and does not go on with it.
async fn forgotten_renewal(guard: &LockGuard) -> Pin<Box<dyn Future<Output = Result<(), Error>> + '_>> {
    // A renewal that begins just when more has been proven is done at once.
    loop {
        let mut renewal = Box::pin(guard.renew());
        if poll_fn(|context| Poll::Ready(renewal.as_mut().poll(context).is_pending())).await {
            return renewal;
        }
    }
}

/// A renewal by hand that nobody polls keeps no holder from being told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shorter_session_is_told_behind_a_forgotten_renewal() {
    if no_zookeeper() {
        return;
    }
    unless_still(shorter_behind_a_forgotten_renewal).await;
}

async fn shorter_behind_a_forgotten_renewal() -> Result<(), String> {
    let server = ZkServer::builder().directive("tickTime=1000").start().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let minute = Duration::from_secs(60);
    let [ours, theirs] = pair(&proxy, &server, minute, LEISURE).await;
    let name = unique("forgotten");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let next = waiter(&lock(&theirs, &name));
    contend(&raw(server.addr()).await, &name, 2).await;
    let renewal = forgotten_renewal(&guard).await;
    let before = proxy.counts().connections;
    proxy.set(Mode::Refuse);
    server.stop().unwrap();
    server.reconfigure("maxSessionTimeout=5000").unwrap();
    server.start().unwrap();
    proxy.set(Mode::Pass);
    is_back(&proxy, before).await;
    goes_on(&guard, &next).await?;
    told_first(&proxy, std::slice::from_ref(&guard), next).await;
    let lost = soon("and so is who renews", renewal).await.unwrap_err();
    assert!(lost.is_lost(), "{lost}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_session_is_told_behind_a_forgotten_renewal() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let mut config = server::config(server.addr());
    config.session_timeout = Duration::from_secs(60);
    let (raw, ours) = (raw(server.addr()).await, server::patiently(config).await);
    let sessions = raw.list_children("/lockkit/%sessions").await.unwrap();
    let guard = lock(&ours, &unique("ended")).acquire().await.unwrap();
    let renewal = forgotten_renewal(&guard).await;
    let id = i64::from_str_radix(&sessions[0], 16).unwrap();
    tokio::task::block_in_place(|| server.end_session(id)).unwrap();
    // This is long before its lease ends.
    assert_eq!(soon("told", guard.lost()).await, LossReason::Expired);
    drop(renewal);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_on_servers_that_tick_faster_is_told_in_time() {
    if no_zookeeper() {
        return;
    }
    // Twenty ticks are granted: 20 s, and then 5 s, which is the least that a client takes.
    let first = ["tickTime=1000", "maxSessionTimeout=-1"];
    let asked = Duration::from_secs(20);
    unless_still(async || comes_back_with(&first, "tickTime=250", asked).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_told_in_time_after_a_rolling_restart() {
    if no_zookeeper() {
        return;
    }
    unless_still(restarts_one_by_one).await;
}

async fn restarts_one_by_one() -> Result<(), String> {
    let ensemble = ZkEnsemble::start().unwrap();
    let proxy = Proxy::start(ensemble.member(0).addr()).unwrap();
    let asked = Duration::from_secs(60);
    let [ours, theirs] = pair(&proxy, ensemble.member(1), asked, LEISURE).await;
    let name = unique("rolling");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let before = proxy.counts().connections;
    proxy.set(Mode::Refuse);
    for index in [2, 1, 0] {
        let member = ensemble.member(index);
        member.stop().unwrap();
        member.reconfigure("maxSessionTimeout=5000").unwrap();
        member.start().unwrap();
        ensemble.leader().unwrap();
    }
    proxy.set(Mode::Pass);
    is_back(&proxy, before).await;
    let next = waiter(&lock(&theirs, &name));
    contend(&raw(ensemble.member(2).addr()).await, &name, 2).await;
    goes_on(&guard, &next).await?;
    told_first(&proxy, &[guard], next).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_thousand_holds_outlive_a_reset() {
    const MANY: usize = 3_000;
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let ours = server::connect(proxy.addr()).await;
    let run = unique("a-name-that-is-longer-than-that-of-most-locks");
    let guards: Vec<_> = stream::iter(0..MANY)
        .map(|i| {
            let lock = lock(&ours, &format!("{run}-{i}"));
            async move { lock.acquire().await.unwrap() }
        })
        .buffer_unordered(64)
        .collect()
        .await;
    let all_watched = async || server.figure("zk_watch_count").unwrap() >= MANY as u64;
    eventually("all holds are watched", all_watched).await;
    let cut = tokio::time::Instant::now();
    proxy.reset();
    // This is longer than the session.
    let until = cut + Duration::from_secs(12);
    eventually("all holds are proven again, or lost", async || {
        let proven = |guard: &LockGuard| guard.valid_until().is_none_or(|end| end > until);
        guards.iter().all(|guard| !guard.is_held() || proven(guard))
    })
    .await;
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    assert_eq!(held, MANY, "held after one reset");
    eventually("all holds are watched again", all_watched).await;
    let raw = raw(server.addr()).await;
    let (guard, name) = (&guards[MANY / 2], guards[MANY / 2].name().to_string());
    let node = children(&raw, &name).await.remove(0);
    raw.delete(&format!("{}/{node}", dir(&name)), None).await.unwrap();
    assert_eq!(soon("it is told", guard.lost()).await, LossReason::Revoked);
}

/// Waiters of one client keep their places over a reset, and are notified as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_keep_their_places_over_a_reset() {
    const MANY: usize = 200;
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (ours, theirs) = (
        server::connect(proxy.addr()).await,
        server::connect(server.addr()).await,
    );
    let (name, raw) = (unique("places"), raw(server.addr()).await);
    let names: Vec<_> = (0..MANY).map(|i| format!("{name}-{i}")).collect();
    let mut held = Vec::new();
    for name in &names {
        held.push(lock(&theirs, name).acquire().await.unwrap());
    }
    let waiting: Vec<_> = names.iter().map(|name| waiter(&lock(&ours, name))).collect();
    for name in &names {
        contend(&raw, name, 2).await;
    }
    let before: Vec<_> = places(&raw, &names).await;
    let connections = proxy.counts().connections;
    proxy.reset();
    is_back(&proxy, connections).await;
    // A waiter whose turn came while it was disconnected is told, too.
    for guard in held {
        guard.release().await.unwrap();
    }
    let mut guards = Vec::new();
    for waiting in waiting {
        guards.push(soon("granted", waiting).await.unwrap().0);
    }
    for (now, before) in places(&raw, &names).await.iter().zip(before) {
        assert!(
            now.len() == 1 && before.contains(&now[0]),
            "{now:?} of {before:?}"
        );
    }
}

async fn places(raw: &Client, names: &[String]) -> Vec<Vec<String>> {
    let mut places = Vec::new();
    for name in names {
        places.push(children(raw, name).await);
    }
    places
}

/// A new leader makes a node, the reply is lost, and a deposed leader that does not know it yet is asked about the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deposed_leader_hides_no_node() {
    if no_zookeeper() {
        return;
    }
    for several in [false, true] {
        hidden_by_a_deposed_leader(several).await;
    }
}

async fn hidden_by_a_deposed_leader(several: bool) {
    let ensemble = ZkEnsemble::start().unwrap();
    for member in ensemble.members() {
        // For so many ticks a leader that is cut off does not know it.
        member.stop().unwrap();
        member.reconfigure("syncLimit=300").unwrap();
        member.start().unwrap();
    }
    let old = ensemble.leader().unwrap();
    let (a, b) = ((old + 1) % 3, (old + 2) % 3);
    let name = unique("orphan");
    let directory = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let early = raw(ensemble.member(old).addr()).await;
    early.mkdir(&dir(&name), &directory).await.unwrap();
    let proxy = Proxy::start(ensemble.member(a).addr()).unwrap();
    let mut config = server::config(proxy.addr());
    config.session_timeout = Duration::from_secs(40);
    let ours = server::patiently(config).await;
    if several {
        expects_several(&early, &lock(&ours, &name), &name).await;
    }
    ensemble.cut(old);
    proxy.set(Mode::Refuse);
    proxy.reset();
    for member in [a, b] {
        ensemble.member(member).kill().unwrap();
    }
    std::thread::scope(|scope| {
        for member in [a, b] {
            let ensemble = &ensemble;
            scope.spawn(move || ensemble.member(member).start().unwrap());
        }
    });
    ensemble.new_leader(old).unwrap();
    let raw = raw(ensemble.member(a).addr()).await;
    let before = proxy.counts().connections;
    let slow = Duration::from_millis(600);
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: slow,
    });
    eventually("attached again", async || proxy.counts().connections > before).await;
    let waiting = waiter(&lock(&ours, &name));
    eventually("made", async || children(&raw, &name).await.len() == 1).await;
    proxy.set(Mode::DropReplies);
    proxy.set_upstream(ensemble.member(old).addr());
    proxy.reset();
    proxy.set(Mode::Pass);
    eventually("the old leader is asked", async || {
        proxy.counts().connections > before + 1
    })
    .await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let says = ensemble.member(old).word("srvr").unwrap();
    assert!(says.contains("Mode: leader"), "a vacuous pass: it knows");
    proxy.set_upstream(ensemble.member(a).addr());
    proxy.reset();
    let (guard, _) = soon("nobody but itself is before it", waiting).await.unwrap();
    guard.release().await.unwrap();
    eventually("nothing is left", async || children(&raw, &name).await.is_empty()).await;
}

/// A deposed leader does not end a session that its successor has opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deposed_leader_ends_no_session() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ZkEnsemble::start().unwrap();
    for member in ensemble.members() {
        member.stop().unwrap();
        member.reconfigure("syncLimit=300").unwrap();
        member.start().unwrap();
    }
    let old = ensemble.leader().unwrap();
    let (a, b) = ((old + 1) % 3, (old + 2) % 3);
    ensemble.cut(old);
    for member in [a, b] {
        ensemble.member(member).kill().unwrap();
    }
    std::thread::scope(|scope| {
        for member in [a, b] {
            let ensemble = &ensemble;
            scope.spawn(move || ensemble.member(member).start().unwrap());
        }
    });
    ensemble.new_leader(old).unwrap();
    let proxies = [a, old].map(|member| Proxy::start(ensemble.member(member).addr()).unwrap());
    let [proxy, to_old] = &proxies;
    to_old.set(Mode::Refuse);
    let addrs = format!("{},{}", proxy.addr(), to_old.addr());
    let ours = server::patiently(server::config(addrs)).await;
    let guard = lock(&ours, &unique("younger")).acquire().await.unwrap();
    let asked = to_old.counts().connections;
    to_old.set(Mode::Pass);
    while guard.is_held() && to_old.counts().connections == asked {
        proxy.reset();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let says = ensemble.member(old).word("srvr").unwrap();
    assert!(says.contains("Mode: leader"), "a vacuous pass: it knows");
    let until = tokio::time::Instant::now() + Duration::from_secs(10);
    eventually("proven again, or lost", async || {
        !guard.is_held() || guard.valid_until().is_some_and(|end| end > until)
    })
    .await;
    assert!(guard.is_held(), "lost {:?}", guard.lost().reason());
}

/// The bound for a dead holder follows what the server has granted, whatever was asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_is_followed_within_the_bound() {
    if no_zookeeper() {
        return;
    }
    for (tick, least, asked) in [(100, 200, 2_000), (500, 6_000, 2_500), (2_000, 4_000, 10_000)] {
        let server = ZkServer::builder()
            .directive(format!("tickTime={tick}"))
            .directive(format!("minSessionTimeout={least}"))
            .start()
            .unwrap();
        let proxy = Proxy::start(server.addr()).unwrap();
        let (asked, tick) = (Duration::from_millis(asked), Duration::from_millis(tick));
        let [ours, theirs] = pair(&proxy, &server, asked, tick).await;
        let name = unique("dead");
        let guard = lock(&ours, &name).acquire().await.unwrap();
        let next = waiter(&lock(&theirs, &name));
        contend(&raw(server.addr()).await, &name, 2).await;
        let bound = ours.dead_holder_bound(Duration::from_secs(60));
        let (cut, watch) = (Instant::now(), Stopwatch::start());
        proxy.set(Mode::Blackhole);
        let (_, granted) = soon("the next is granted", next).await.unwrap();
        let took = granted - cut;
        assert!(!guard.is_held());
        assert!(
            took <= bound + watch.stood_still(),
            "ticks of {tick:?}: {took:?} after the cut, bound {bound:?}"
        );
        let granted = asked.max(Duration::from_millis(least));
        assert!(
            took + tick * 2 > granted && bound <= granted + tick * 2,
            "{took:?}, {bound:?}"
        );
    }
}

/// A fresh lease is not nearly over, also that of a short session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_lease_of_a_short_session_is_long() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::builder().directive("tickTime=800").start().unwrap();
    let mut config = server::config(server.addr());
    (config.session_timeout, config.tick_time) = (Duration::from_secs(4), Duration::from_millis(800));
    let ours = server::patiently(config).await;
    let name = unique("fresh");
    let mut left = Vec::new();
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let guard = lock(&ours, &name).acquire().await.unwrap();
        left.push(guard.valid_until().unwrap() - tokio::time::Instant::now());
        guard.release().await.unwrap();
    }
    left.sort_unstable();
    // A machine that stands still for a moment shortens some of them.
    assert!(left[50] > Duration::from_millis(1_400), "{left:?}");
}

/// The order in which the servers are asked makes no difference.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_silent_servers_of_three_delay_nobody_for_long() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let silent = [
        Proxy::start(server.addr()).unwrap(),
        Proxy::start(server.addr()).unwrap(),
    ];
    for proxy in &silent {
        proxy.set(Mode::Blackhole);
    }
    let addrs = format!("{},{},{}", silent[0].addr(), server.addr(), silent[1].addr());
    for _ in 0..6 {
        let mut config = server::config(&addrs);
        config.session_timeout = Duration::from_secs(30);
        let began = Stopwatch::start();
        server::patiently(config).await;
        let took = began.elapsed();
        assert!(took < AcquireOptions::DEFAULT_OP_TIMEOUT, "{took:?}");
    }
}

/// A server that takes connections and says nothing may have granted less. That doubt ends before the lease that it would leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_outlives_that_a_silent_server_is_asked() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (silent, other) = (
        Proxy::start(server.addr()).unwrap(),
        Proxy::start(server.addr()).unwrap(),
    );
    silent.set(Mode::Refuse);
    let mut config = server::config(format!("{},{}", silent.addr(), other.addr()));
    (config.session_timeout, config.tick_time) = (Duration::from_secs(30), Duration::from_secs(1));
    let ours = server::patiently(config).await;
    let guard = lock(&ours, &unique("silent")).acquire().await.unwrap();
    let asked = silent.counts().connections;
    silent.set(Mode::Blackhole);
    other.set(Mode::Refuse);
    other.reset();
    eventually("the silent one is asked", async || {
        silent.counts().connections > asked
    })
    .await;
    other.set(Mode::Pass);
    let left = || guard.valid_until().map(|end| end - tokio::time::Instant::now());
    eventually("it is told that less may be left, or lost", async || {
        !guard.is_held() || left() < Some(Duration::from_secs(5))
    })
    .await;
    eventually("it is proven again, or lost", async || {
        !guard.is_held() || left() > Some(Duration::from_secs(15))
    })
    .await;
    assert!(guard.is_held(), "attached again within its lease, and lost");
}

/// A runtime that is shut down under many holds ends quietly.
#[test]
fn a_runtime_that_ends_under_a_thousand_holds_is_quiet() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    if no_zookeeper() {
        return;
    }
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let at = info.location().map(|at| at.file().to_owned()).unwrap_or_default();
        if at.contains("zookeeper-client") || at.contains("lockkit-zk/src") {
            PANICS.fetch_add(1, Ordering::SeqCst);
        }
        hook(info);
    }));
    let server = ZkServer::plain().unwrap();
    for dropped_within in [true, false] {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let guards: Vec<LockGuard> = runtime.block_on(async {
            let ours = server::connect(server.addr()).await;
            let run = unique("quiet");
            let guards = stream::iter(0..1_000)
                .map(|i| {
                    let lock = lock(&ours, &format!("{run}-{i}"));
                    async move { lock.acquire().await.unwrap() }
                })
                .buffer_unordered(64)
                .collect()
                .await;
            eventually("all holds are watched", async || {
                server.figure("zk_watch_count").unwrap() >= 1_000
            })
            .await;
            // This is what happens at the end of `main`.
            if dropped_within { Vec::new() } else { guards }
        });
        drop(runtime);
        assert!(guards.iter().all(|guard| !guard.is_held()));
    }
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "panics");
}

/// A caller that asks again and again, each time for a little while only, gets a session in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_opening_goes_on_without_its_caller() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (raw, ours) = (raw(server.addr()).await, server::connect(proxy.addr()).await);
    let sessions = raw.list_children("/lockkit/%sessions").await.unwrap();
    let name = unique("opening");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let id = i64::from_str_radix(&sessions[0], 16).unwrap();
    tokio::task::block_in_place(|| server.end_session(id)).unwrap();
    soon("told", guard.lost()).await;
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_millis(300),
    });
    let before = server.sessions().unwrap();
    // One that has locked nothing has no node.
    let is_another = || server.sessions().unwrap().iter().any(|id| !before.contains(id));
    let hasty = AcquireOptions::new().op_timeout(Duration::from_millis(100));
    let hasty = lock(&ours, &name).with_options(hasty);
    assert!(hasty.try_acquire().await.unwrap_err().is_transient());
    eventually("there is another session", async || is_another()).await;
    proxy.set(Mode::Pass);
    ours.close(Duration::from_secs(10)).await.unwrap();
    eventually("and it is closed", async || !is_another()).await;
}

/// A request that is neither polled nor dropped keeps no other of its client from a session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_opening_that_somebody_forgot_is_everyones() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (raw, ours) = (raw(server.addr()).await, server::connect(proxy.addr()).await);
    let sessions = raw.list_children("/lockkit/%sessions").await.unwrap();
    let guard = lock(&ours, &unique("forgotten")).acquire().await.unwrap();
    let id = i64::from_str_radix(&sessions[0], 16).unwrap();
    tokio::task::block_in_place(|| server.end_session(id)).unwrap();
    soon("told", guard.lost()).await;
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_millis(100),
    });
    let forgotten = ours.inspect("anything");
    let mut forgotten = pin!(forgotten);
    let done = poll_fn(|context| Poll::Ready(forgotten.as_mut().poll(context).is_ready())).await;
    assert!(!done);
    let guard = lock(&ours, &unique("other")).try_acquire().await;
    let guard = guard.expect("there is a session").expect("it is free");
    guard.release().await.unwrap();
    soon("it has waited for nothing else", forgotten).await.unwrap();
}

/// A request that is neither polled nor dropped does not keep the session of a client that is closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_somebody_forgot_keeps_no_session() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (raw, ours) = (raw(server.addr()).await, server::connect(server.addr()).await);
    let sessions = async || raw.list_children("/lockkit/%sessions").await.unwrap_or_default();
    assert_eq!(sessions().await.len(), 1);
    let forgotten = ours.inspect("anything");
    let mut forgotten = pin!(forgotten);
    let done = poll_fn(|context| Poll::Ready(forgotten.as_mut().poll(context).is_ready())).await;
    assert!(!done);
    let closed = soon("closed", ours.close(Duration::from_secs(8))).await;
    assert!(closed.is_ok(), "{closed:?}");
    eventually("its session has ended", async || sessions().await.is_empty()).await;
    assert!(forgotten.await.is_err());
}

/// The error of an opening is for those who had asked by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_opening_that_failed_is_nobody_elses_error() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (raw, ours) = (raw(server.addr()).await, server::connect(proxy.addr()).await);
    let sessions = raw.list_children("/lockkit/%sessions").await.unwrap();
    let name = unique("failed");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let id = i64::from_str_radix(&sessions[0], 16).unwrap();
    tokio::task::block_in_place(|| server.end_session(id)).unwrap();
    soon("told", guard.lost()).await;
    // Nobody waits for the outcome of this one, which comes soon.
    proxy.set(Mode::Refuse);
    let again = lock(&ours, &name);
    // It may be there by the time it is first asked for.
    eventually("there is one that nobody waits for", async || {
        let mut acquire = Box::pin(again.try_acquire());
        poll_fn(|context| Poll::Ready(acquire.as_mut().poll(context).is_pending())).await
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    proxy.set(Mode::Pass);
    let guard = again.try_acquire().await.expect("the servers are there again");
    guard.expect("it is free").release().await.unwrap();
}

/// A busy server that refuses reads leaves no hold unwatched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_a_busy_server_refuses_is_set_again() {
    if no_zookeeper() {
        return;
    }
    unless_still(told_by_a_busy_server).await;
}

async fn told_by_a_busy_server() -> Result<(), String> {
    const MANY: usize = 60;
    let server = ZkServer::plain().unwrap();
    let mut config = server::config(server.addr());
    // The server is silent while it comes up, and may have granted five ticks by then. It refuses heartbeats, too.
    (config.session_timeout, config.tick_time) = (Duration::from_secs(30), Duration::from_secs(5));
    let ours = server::patiently(config).await;
    let (run, mut guards) = (unique("busy"), Vec::new());
    for i in 0..MANY {
        guards.push(lock(&ours, &format!("{run}-{i}")).acquire().await.unwrap());
    }
    // The server handles one request at a time, and none that has waited for a millisecond.
    server.kill().unwrap();
    server.reconfigure("request_throttle_max_requests=1").unwrap();
    server.reconfigure("throttled_op_wait_time=1").unwrap();
    server.start().unwrap();
    let refused = async || server.figure("zk_throttled_ops").unwrap();
    eventually("it has refused some", async || refused().await > 0).await;
    let raw = raw(server.addr()).await;
    for guard in &guards {
        let dir = dir(guard.name().as_str());
        eventually("the node is deleted", async || {
            let children = match raw.list_children(&dir).await {
                Err(ZkError::NoNode) => Vec::new(),
                Err(_) => return false,
                Ok(children) => children,
            };
            for node in &children {
                raw.delete(&format!("{dir}/{node}"), None).await.ok();
            }
            children.is_empty()
        })
        .await;
    }
    // With each heartbeat all of those that are left ask again, and the server may refuse all but one of them.
    let mut untold: FuturesUnordered<_> = guards.iter().map(LockGuard::lost).collect();
    loop {
        let told = MANY - untold.len();
        match soon(&format!("the next is told, after {told}"), untold.next()).await {
            None => return Ok(()),
            Some(LossReason::Revoked) => {}
            Some(reason) => return Err(format!("{reason:?} after {told} were told")),
        }
    }
}

/// A client that is closed while it is disconnected ends its session as soon as it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_closed_while_away_comes_back_for_its_session() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let raw = raw(server.addr()).await;
    let sessions = async || raw.list_children("/lockkit/%sessions").await.unwrap_or_default();
    for _ in 0..8 {
        let proxy = Proxy::start(server.addr()).unwrap();
        let mut config = server::config(proxy.addr());
        config.session_timeout = Duration::from_secs(60);
        let ours = server::patiently(config).await;
        assert_eq!(sessions().await.len(), 1);
        proxy.set(Mode::Refuse);
        proxy.reset();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let closing = tokio::spawn(async move { ours.close(Duration::from_secs(15)).await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        proxy.set(Mode::Pass);
        soon("closed", closing).await.unwrap().unwrap();
        eventually("its session has ended", async || sessions().await.is_empty()).await;
    }
}

/// A client whose connection is dead, known or not, or dies with the last request on it, ends its session over another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_closed_on_a_dead_connection_ends_its_session() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let raw = raw(server.addr()).await;
    let sessions = async || raw.list_children("/lockkit/%sessions").await.unwrap_or_default();
    for mode in [Mode::HalfOpen, Mode::Blackhole] {
        let proxy = Proxy::start(server.addr()).unwrap();
        let mut config = server::config(proxy.addr());
        config.session_timeout = Duration::from_secs(60);
        let ours = server::patiently(config).await;
        assert_eq!(sessions().await.len(), 1);
        proxy.set(mode);
        let closing = tokio::spawn(async move { ours.close(Duration::from_secs(15)).await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        if mode == Mode::Blackhole {
            // The proxy does not deliver what it held back.
            proxy.reset();
        }
        proxy.set(Mode::Pass);
        soon("closed", closing).await.unwrap().unwrap();
        eventually("its session has ended", async || sessions().await.is_empty()).await;
    }
}
