//! Faults of the connection between a client and its server, and of the server.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{
    AcquireOptions, Error, LockName, LossReason,
    spi::{Backend as _, ClaimRequest, Mode as SpiMode, OwnerId},
};
use lockkit_testbed::{Clock, Lateness, Mode, Proxy, eventually, zookeeper::ZkServer};
use lockkit_zk::{Nodes, ZkBackend, ZkConfig};
use zookeeper_client::{Acls, CreateMode};

use crate::server::{
    self, TIMEOUT, children, connect, contend, contender, dir, expects_several, lock, no_zookeeper, raw,
    shared, soon, takes_its_turn, unique, unless_still, waiter, watcher,
};

/// A client behind a proxy, and one that is connected directly.
struct Pair {
    proxy: Proxy,
    ours: lockkit_core::LockClient,
    theirs: lockkit_core::LockClient,
    raw: zookeeper_client::Client,
    name: String,
}

impl Pair {
    async fn new(test: &str) -> Self {
        Self::of(test, server::config).await
    }

    /// Makes a pair whose client behind the proxy has a session that expires when it is cut off.
    async fn brief(test: &str) -> Self {
        Self::of(test, server::brief).await
    }

    async fn of(test: &str, config: fn(SocketAddr) -> ZkConfig) -> Self {
        let proxy = Proxy::start(shared().addr()).unwrap();
        let raw = raw(shared().addr()).await;
        let name = unique(test);
        // A server deletes an empty container. Clients make another one when they are told that it is missing, and here they
        // are often told nothing. So this is no container.
        let directory = CreateMode::Persistent.with_acls(Acls::anyone_all());
        raw.mkdir(&dir(&name), &directory).await.unwrap();
        Self {
            ours: server::patiently(config(proxy.addr())).await,
            theirs: connect(shared().addr()).await,
            raw,
            name,
            proxy,
        }
    }

    fn lock(&self) -> lockkit_core::Lock {
        lock(&self.ours, &self.name)
    }

    fn other(&self) -> lockkit_core::Lock {
        lock(&self.theirs, &self.name)
    }
}

#[tokio::test]
async fn a_node_whose_making_was_not_confirmed_is_found_again() {
    if no_zookeeper() {
        return;
    }
    let pair = Pair::new("unconfirmed").await;
    for round in 0..20 {
        if round % 2 == 1 {
            expects_several(&pair.raw, &pair.lock(), &pair.name).await;
        }
        pair.proxy.set(Mode::DropReplies);
        let waiting = waiter(&pair.lock());
        contend(&pair.raw, &pair.name, 1).await;
        let node = children(&pair.raw, &pair.name).await.remove(0);
        pair.proxy.set(Mode::Pass);
        let (guard, _) = soon("it reconnects", waiting).await.unwrap();
        assert_eq!(
            children(&pair.raw, &pair.name).await,
            std::slice::from_ref(&node),
            "it is the same node"
        );
        let stat = pair
            .raw
            .check_stat(&format!("{}/{node}", dir(&pair.name)))
            .await
            .unwrap();
        assert_eq!(u64::try_from(stat.unwrap().czxid).unwrap(), guard.token().get());
        assert!(pair.other().try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
}

/// The session deletes the claim's earlier node and spares the one that the claim has made since.
#[tokio::test]
async fn a_node_made_again_with_nodes_simple_has_another_mark() {
    if no_zookeeper() {
        return;
    }
    let (proxy, raw) = (Proxy::start(shared().addr()).unwrap(), raw(shared().addr()).await);
    let mut config = server::config(proxy.addr());
    (config.nodes, config.namespace) = (Nodes::Simple, unique("marks"));
    let path = format!("/{}/n", config.namespace);
    let ours = server::patiently(config).await;
    proxy.set(Mode::DropReplies);
    let waiting = waiter(&lock(&ours, "n"));
    eventually("it is made", async || {
        raw.check_stat(&path).await.unwrap().is_some()
    })
    .await;
    let (first, _) = raw.get_data(&path).await.unwrap();
    raw.delete(&path, None).await.unwrap();
    proxy.set(Mode::Pass);
    let (guard, _) = soon("it is made again", waiting).await.unwrap();
    let (second, _) = raw.get_data(&path).await.unwrap();
    assert_ne!(first, second);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_try_whose_reply_is_lost_is_an_error_and_leaves_nothing() {
    if no_zookeeper() {
        return;
    }
    for several in [false, true] {
        try_without_a_reply(several).await;
    }
}

async fn try_without_a_reply(several: bool) {
    let pair = Pair::new("try").await;
    let quick = AcquireOptions::new().op_timeout(Duration::from_millis(200));
    if several {
        expects_several(&pair.raw, &pair.lock(), &pair.name).await;
    }
    pair.proxy.set(Mode::DropReplies);
    let error = pair
        .lock()
        .with_options(quick.clone())
        .try_acquire()
        .await
        .unwrap_err();
    assert!(error.is_transient() && !error.is_timeout(), "{error:?}");
    pair.proxy.set(Mode::Pass);
    contend(&pair.raw, &pair.name, 0).await;

    // While the connection is down, nobody can tell whether it is taken.
    pair.proxy.set(Mode::Refuse);
    pair.proxy.reset();
    let error = pair.lock().with_options(quick).try_acquire().await.unwrap_err();
    assert!(error.is_transient() && !error.is_timeout(), "{error:?}");
    pair.proxy.set(Mode::Pass);
    let guard = soon("the connection is back", pair.lock().acquire())
        .await
        .unwrap();
    guard.release().await.unwrap();
    contend(&pair.raw, &pair.name, 0).await;
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_releases_once() {
    if no_zookeeper() {
        return;
    }
    let pair = Pair::new("release").await;
    let options = AcquireOptions::new().op_timeout(Duration::from_millis(200));
    let guard = pair.lock().with_options(options).acquire().await.unwrap();
    pair.proxy.set(Mode::DropReplies);
    let outcome = guard.release().await;
    assert!(
        outcome.is_err_and(|error| error.is_transient()),
        "nobody has confirmed it"
    );
    let held = soon("it was released all the same", pair.other().acquire())
        .await
        .unwrap();
    pair.proxy.set(Mode::Pass);
    // Requests that are still repeated harm no later holder.
    let waiting = waiter(&pair.lock());
    contend(&pair.raw, &pair.name, 2).await;
    assert!(held.is_held() && !waiting.is_finished());
    held.release().await.unwrap();
    takes_its_turn("ours again", waiting).await;
}

/// The node goes while the release waits for a connection, and has asked the server for nothing.
#[tokio::test]
async fn a_release_that_finds_no_node_is_a_loss() {
    if no_zookeeper() {
        return;
    }
    let minute = Duration::from_secs(60);
    let (name, raw) = (unique("no-node"), raw(shared().addr()).await);
    let proxy = Proxy::start(shared().addr()).unwrap();
    let mut config = server::config(proxy.addr());
    config.session_timeout = minute;
    let backend = ZkBackend::connect(config).await.unwrap();
    let request = ClaimRequest::new(
        LockName::new(&name).unwrap(),
        SpiMode::Exclusive,
        minute,
        OwnerId::new(7),
    );
    let mut claim = backend.claim(&request).await.unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    let connections = proxy.counts().connections;
    proxy.set(Mode::Blackhole);
    proxy.reset();
    eventually("it has lost its connection", async || {
        proxy.counts().connections > connections
    })
    .await;
    let released = tokio::time::timeout(Duration::from_millis(100), claim.release()).await;
    assert!(released.is_err(), "there is no connection");
    let node = children(&raw, &name).await.remove(0);
    raw.delete(&format!("{}/{node}", dir(&name)), None).await.unwrap();
    proxy.set(Mode::Pass);
    let released = loop {
        match soon("it is back", claim.release()).await {
            Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(10)).await,
            released => break released,
        }
    };
    assert!(released.as_ref().is_err_and(Error::is_lost), "{released:?}");
    backend.close().await.unwrap();
}

#[tokio::test]
async fn released_while_cut_off_and_gone_once_the_session_is_back() {
    if no_zookeeper() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    let mut config = server::config(proxy.addr());
    // This is longer than the driver tries to confirm a release.
    config.session_timeout = Duration::from_secs(20);
    let client = server::patiently(config).await;
    let (name, raw) = (unique("cut"), raw(shared().addr()).await);
    let options = AcquireOptions::new()
        .ttl(Duration::from_millis(300))
        .op_timeout(Duration::from_millis(100));
    let ours = client.lock(&name).unwrap().with_options(options);
    for mode in [Mode::Refuse, Mode::HalfOpen] {
        let guard = soon("it is connected", ours.acquire()).await.unwrap();
        // Replies are lost, or requests are, and the client cannot tell.
        proxy.set(mode);
        if mode == Mode::Refuse {
            proxy.reset();
        }
        drop(guard);
        // The driver gives the release up after the ttl and op_timeout.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            children(&raw, &name).await.len(),
            1,
            "nobody could have told the server"
        );
        proxy.set(Mode::Pass);
        contend(&raw, &name, 0).await;
    }
    soon("ours again", ours.acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn an_interrupted_wait_keeps_its_place() {
    if no_zookeeper() {
        return;
    }
    let pair = Pair::new("suspended").await;
    let held = pair.other().acquire().await.unwrap();
    let waiting = waiter(&pair.lock());
    contend(&pair.raw, &pair.name, 2).await;
    let nodes = children(&pair.raw, &pair.name).await;
    for _ in 0..5 {
        pair.proxy.reset();
        pair.ours.inspect(&pair.name).await.ok();
    }
    assert_eq!(children(&pair.raw, &pair.name).await.len(), 2);
    // It is released while its client cannot hear of it.
    pair.proxy.set(Mode::Refuse);
    pair.proxy.reset();
    held.release().await.unwrap();
    pair.proxy.set(Mode::Pass);
    let (guard, _) = soon("it hears of it", waiting).await.unwrap();
    let node = children(&pair.raw, &pair.name).await.remove(0);
    assert!(nodes.contains(&node), "{node} is none of {nodes:?}");
    guard.release().await.unwrap();
}

/// An attempt that goes on while the servers are away does not stand still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_patient_waiter_keeps_its_place_over_an_outage() {
    if no_zookeeper() {
        return;
    }
    let (proxy, raw) = (Proxy::start(shared().addr()).unwrap(), raw(shared().addr()).await);
    let (name, theirs) = (unique("patient"), connect(shared().addr()).await);
    let mut config = server::config(proxy.addr());
    config.session_timeout = Duration::from_secs(60);
    let ours = server::patiently(config).await;
    let options = AcquireOptions::new()
        .ttl(Duration::from_secs(1))
        .op_timeout(Duration::from_secs(60));
    let held = lock(&theirs, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&ours, &name).with_options(options));
    contend(&raw, &name, 2).await;
    let nodes = children(&raw, &name).await;
    proxy.set(Mode::Refuse);
    proxy.reset();
    // It looks after its place after 5 s, and may stand still for 10 s.
    tokio::time::sleep(Duration::from_secs(17)).await;
    proxy.set(Mode::Pass);
    eventually("it is connected again", async || {
        ours.inspect(&name).await.is_ok()
    })
    .await;
    // One of the next heartbeats would take its node away.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(children(&raw, &name).await.len(), 2);
    held.release().await.unwrap();
    let (guard, _) = soon("it is its turn", waiting).await.unwrap();
    let node = children(&raw, &name).await.remove(0);
    assert!(nodes.contains(&node), "{node} is none of {nodes:?}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn predecessor_gone_before_its_watch_is_not_waited_for() {
    const LATE: Duration = Duration::from_millis(300);

    if no_zookeeper() {
        return;
    }
    let pair = Pair::new("vanished").await;
    let theirs = contender(&pair.raw, &dir(&pair.name), "_c_theirs-lock-").await;
    pair.proxy.set(Mode::Delay {
        requests: LATE,
        replies: Duration::ZERO,
    });
    let waiting = waiter(&pair.lock());
    contend(&pair.raw, &pair.name, 2).await;
    // The reply to its list takes a while, and its watch follows as much later.
    tokio::time::sleep(LATE * 3 / 2).await;
    pair.raw.delete(&theirs, None).await.unwrap();
    let (deleted, beside) = (Stopwatch::start(), Lateness::watch());
    let (guard, _) = soon("it looks again", waiting).await.unwrap();
    let (took, most) = (deleted.elapsed(), LATE * 10 + 3 * beside.most());
    assert!(
        took < most,
        "it waited for its fallback poll: {took:?}, at most {most:?}"
    );
    pair.proxy.set(Mode::Pass);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contenders_that_keep_losing_their_connection_get_on() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("storm"), raw(shared().addr()).await);
    let stop = Arc::new(AtomicUsize::new(0));
    let (inside, entered) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let (mut tasks, mut proxies) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let proxy = Proxy::start(shared().addr()).unwrap();
        let lock = lock(&connect(proxy.addr()).await, &name);
        proxies.push(proxy);
        let (stop, inside, entered) = (stop.clone(), inside.clone(), entered.clone());
        tasks.push(tokio::spawn(async move {
            while stop.load(Ordering::Relaxed) == 0 {
                let guard = lock.acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                tokio::time::sleep(Duration::from_millis(3)).await;
                let held = guard.is_held();
                inside.fetch_sub(1, Ordering::SeqCst);
                entered.fetch_add(usize::from(held), Ordering::Relaxed);
                let _ = guard.release().await;
            }
        }));
    }
    let began = Stopwatch::start();
    // Where a connection takes longer to be made, the pauses grow until one gets on.
    while began.elapsed() < Duration::from_secs(3)
        || entered.load(Ordering::Relaxed) < 20 && began.elapsed() < Duration::from_mins(1)
    {
        let longest = 25 + 10 * began.elapsed().as_secs().saturating_sub(3);
        for proxy in &proxies {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..longest))).await;
            proxy.reset();
        }
    }
    let during = entered.load(Ordering::Relaxed);
    stop.store(1, Ordering::Relaxed);
    for task in tasks {
        soon("all end", task).await.unwrap();
    }
    assert!(during >= 20, "only {during} were in during the storm");
    contend(&raw, &name, 0).await;
}

/// The moment at which a client is cut off, after its last grant.
#[derive(Clone, Copy, Debug)]
enum Moment {
    After(Duration),
    /// It is cut off between a request of its session and the reply, after it was idle for so long.
    InARequest(Duration),
}

impl Moment {
    const ALL: [Self; 6] = [
        Self::After(Duration::ZERO),
        Self::After(TIMEOUT.checked_div(4).expect("four")),
        Self::After(TIMEOUT.checked_div(2).expect("two")),
        Self::After(TIMEOUT.saturating_mul(3)),
        Self::InARequest(Duration::ZERO),
        Self::InARequest(TIMEOUT.saturating_mul(2)),
    ];

    async fn comes(self, proxy: &Proxy) {
        match self {
            Self::After(idle) => tokio::time::sleep(idle).await,
            Self::InARequest(idle) => {
                tokio::time::sleep(idle).await;
                proxy.set(Mode::Delay {
                    requests: Duration::ZERO,
                    replies: TIMEOUT / 20,
                });
                let before = proxy.counts().requests.bytes;
                while proxy.counts().requests.bytes == before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
    }
}

/// Cuts a client off that has several holds. Each has to be told before the next is granted. Returns how long before.
async fn told_before_the_next_grant(mode: Mode, moment: Moment) -> Result<Duration, String> {
    let pair = Pair::brief("partition").await;
    let mut holds = Vec::new();
    for ttl in [1, 3, 60] {
        let name = format!("{}-{ttl}", pair.name);
        let options = AcquireOptions::new().ttl(Duration::from_secs(ttl));
        let ours = lock(&pair.ours, &name).with_options(options);
        let guard = Arc::new(soon("there is a hold", ours.acquire()).await.unwrap());
        let (held, theirs) = (guard.clone(), lock(&pair.theirs, &name));
        let next = tokio::spawn(async move {
            let next = theirs.acquire().await.expect("granted in the end");
            (held.is_held(), next, Instant::now())
        });
        holds.push((ours, watcher(&guard), guard, next));
    }
    moment.comes(&pair.proxy).await;
    pair.proxy.set(mode);
    if mode == Mode::Refuse {
        pair.proxy.reset();
    }
    let (mut margin, mut left) = (Duration::MAX, Vec::new());
    for (ours, told, guard, next) in holds {
        let (reason, told) = soon("the holder is told", told).await.unwrap();
        assert_eq!(reason, LossReason::Expired);
        assert!(!guard.is_held());
        let (both, next, granted) = soon("the next is granted", next).await.unwrap();
        assert!(
            !both,
            "PROMISE BROKEN: two hold {}, cut off {moment:?} by {mode:?}",
            ours.name()
        );
        assert!(next.token() > guard.token());
        if told >= granted {
            return Err(format!("told {:?} after the next was granted", told - granted));
        }
        margin = margin.min(granted - told);
        left.push((ours, guard, next));
    }
    // Connected again, it works as before.
    pair.proxy.set(Mode::Pass);
    pair.proxy.reset();
    for (ours, guard, next) in left {
        let again = waiter(&ours);
        contend(&pair.raw, ours.name().as_str(), 2).await;
        next.release().await.unwrap();
        let (again, _) = soon("ours again", again).await.unwrap();
        assert!(!guard.is_held(), "what was lost stays lost");
        let guard = Arc::into_inner(guard).expect("nobody else looks at it");
        assert!(guard.release().await.is_err_and(|error| error.is_lost()));
        let _ = again.release().await;
    }
    Ok(margin)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cut_off_is_told_before_the_next_is_granted() {
    if no_zookeeper() {
        return;
    }
    for round in 0..server::rounds(1).min(5) {
        for mode in [Mode::Blackhole, Mode::HalfOpen, Mode::Refuse] {
            let cut =
                async |moment| unless_still(async || told_before_the_next_grant(mode, moment).await).await;
            let margins = futures_util::future::join_all(Moment::ALL.map(cut)).await;
            eprintln!("{round}, {mode:?}: told before the next grant by {margins:?}");
        }
    }
}

/// A client that has just opened its session has the longest lease that there is: the servers have heard nothing of it since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_lease_ends_before_the_next_is_granted() {
    if no_zookeeper() {
        return;
    }
    for nodes in [Nodes::Mutex, Nodes::Simple] {
        let mut config = server::config(shared().addr());
        config.nodes = nodes;
        let theirs = server::patiently(config.clone()).await;
        let proxy = Proxy::start(shared().addr()).unwrap();
        config.servers = proxy.addr().to_string().into();
        (config.session_timeout, config.tick_time) = (Duration::from_secs(6), ZkServer::TICK);
        let ours = server::patiently(config).await;
        let name = unique("first");
        let guard = lock(&ours, &name).acquire().await.unwrap();
        proxy.set(Mode::Blackhole);
        let end = guard.valid_until().unwrap().into_std();
        // On a busy machine it is told late. The next is granted later still.
        let (next, granted) = soon("the next is granted", waiter(&lock(&theirs, &name)))
            .await
            .unwrap();
        let early = end.saturating_duration_since(granted);
        assert!(
            early.is_zero(),
            "{nodes:?}: granted {early:?} before the lease ended"
        );
        assert!(next.token() > guard.token() && !guard.is_held());
    }
}

/// Its replies are lost, and its requests arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whose_replies_are_lost_is_told_and_keeps_others_waiting() {
    if no_zookeeper() {
        return;
    }
    let mut tries = 0;
    loop {
        let pair = Pair::brief("unheard").await;
        let guard = pair.lock().acquire().await.unwrap();
        let next = waiter(&pair.other());
        contend(&pair.raw, &pair.name, 2).await;
        pair.proxy.set(Mode::DropReplies);
        let reason = soon("the holder is told", guard.lost()).await;
        assert!(reason == LossReason::Expired && !guard.is_held());
        // By then a session that the servers do not hear of has ended.
        tokio::time::sleep(TIMEOUT * 3 / 2).await;
        let kept_waiting = !next.is_finished();
        pair.proxy.set(Mode::Pass);
        takes_its_turn("what was lost is given back", next).await;
        if kept_waiting {
            return;
        }
        // On a busy machine it asks for its session too seldom, or releases over the connection that it lost.
        tries += 1;
        assert!(tries < 10, "its session has ended after all");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dying_sessions_node_is_never_adopted() {
    if no_zookeeper() {
        return;
    }
    for several in [false, true] {
        dies_with_its_node(several).await;
    }
}

async fn dies_with_its_node(several: bool) {
    let pair = Pair::brief("dying").await;
    if several {
        expects_several(&pair.raw, &pair.lock(), &pair.name).await;
    }
    pair.other().acquire().await.unwrap().release().await.unwrap();
    pair.proxy.set(Mode::DropReplies);
    let waiting = waiter(&pair.lock());
    contend(&pair.raw, &pair.name, 1).await;
    let node = children(&pair.raw, &pair.name).await.remove(0);
    pair.proxy.set(Mode::Blackhole);
    // The session ends on both sides, first on the server's.
    contend(&pair.raw, &pair.name, 0).await;
    pair.proxy.set(Mode::Pass);
    pair.proxy.reset();
    let (guard, _) = soon("granted in a new session", waiting).await.unwrap();
    let nodes = children(&pair.raw, &pair.name).await;
    assert_ne!(nodes, [node]);
    assert_eq!(nodes.len(), 1);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_loses_no_hold_and_no_place() {
    if no_zookeeper() {
        return;
    }
    unless_still(killed_and_back).await;
}

async fn killed_and_back() -> Result<(), String> {
    let server = ZkServer::builder().fsync().start().unwrap();
    let mut config = server::config(server.addr());
    // On a busy machine it takes seconds to come up, and says nothing for a part of them. With five ticks in the timeout, that is
    // no doubt about what it grants.
    (config.session_timeout, config.tick_time) = (Duration::from_secs(40), Duration::from_secs(8));
    let (ours, theirs) = (
        server::patiently(config.clone()).await,
        server::patiently(config).await,
    );
    // While idle.
    server.kill().unwrap();
    server.start().unwrap();
    let name = unique("killed");
    let held = soon("idle clients reconnect", lock(&ours, &name).acquire())
        .await
        .unwrap();
    let mut others = Vec::new();
    for ttl in [15, 30] {
        let options = AcquireOptions::new().ttl(Duration::from_secs(ttl));
        let other = lock(&ours, &unique("beside")).with_options(options);
        others.push(other.acquire().await.unwrap());
    }
    let waiting = waiter(&lock(&theirs, &name));
    eventually("the other waits", async || {
        ours.inspect(&name)
            .await
            .is_ok_and(|state| state.waiters == Some(1))
    })
    .await;
    // While held and waited on.
    let before = held.valid_until().unwrap();
    server.kill().unwrap();
    server.start().unwrap();
    eventually("the hold is proven anew, or lost", async || {
        !held.is_held() || held.valid_until().unwrap() > before
    })
    .await;
    for held in others.iter().chain([&held]) {
        if !held.is_held() {
            return Err(format!("lost: {:?}", held.lost().reason()));
        }
    }
    assert!(!waiting.is_finished());
    let token = held.token();
    soon("released", held.release()).await.unwrap();
    let (next, _) = soon("the next", waiting).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
    Ok(())
}

/// It takes connections before it says anything, and may have granted the least for all that its clients know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_slow_to_speak_leaves_five_ticks() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let mut behind = Vec::new();
    for tick in [1, 8] {
        let proxy = Proxy::start(server.addr()).unwrap();
        let mut config = server::config(proxy.addr());
        (config.session_timeout, config.tick_time) = (Duration::from_secs(40), Duration::from_secs(tick));
        let client = server::patiently(config).await;
        let guard = lock(&client, &unique("slow")).acquire().await.unwrap();
        behind.push((proxy, client, guard));
    }
    for (proxy, ..) in &behind {
        proxy.set(Mode::Blackhole);
        proxy.reset();
    }
    let [(_, _, doubted), (_, _, kept)] = &behind[..] else {
        panic!("two clients");
    };
    let left = kept.valid_until().unwrap();
    assert_eq!(
        soon("it counts with the least", doubted.lost()).await,
        LossReason::Expired
    );
    assert!(
        kept.is_held() && kept.valid_until().unwrap() >= left,
        "{:?}",
        kept.check()
    );
    for (proxy, ..) in &behind {
        proxy.set(Mode::Pass);
    }
    eventually("it is proven anew, or lost", async || {
        !kept.is_held() || kept.valid_until().unwrap() > left
    })
    .await;
    kept.check().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_loses_holds_and_nothing_else() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (ours, theirs) = (
        server::brief_client(server.addr()).await,
        server::brief_client(server.addr()).await,
    );
    let name = unique("paused");
    let mut holds = Vec::new();
    for ttl in [60, 3, 1] {
        let name = format!("{name}-{ttl}");
        let options = AcquireOptions::new().ttl(Duration::from_secs(ttl));
        let held = lock(&ours, &name).with_options(options).acquire().await.unwrap();
        holds.push((watcher(&held), waiter(&lock(&theirs, &name)), held));
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.pause().unwrap();
    let mut waiting = Vec::new();
    for (told, next, held) in holds {
        let (reason, told) = soon("the holder is told", told).await.unwrap();
        assert!(reason == LossReason::Expired && !held.is_held());
        waiting.push((told, next));
    }
    let name = format!("{name}-60");
    let quick = AcquireOptions::new().op_timeout(Duration::from_millis(200));
    let tried = lock(&ours, &name).with_options(quick).try_acquire().await;
    assert!(tried.is_err_and(|error| error.is_transient()), "it cannot tell");
    server.resume().unwrap();
    for (told, next) in waiting {
        let (next, granted) = soon("the next is granted", next).await.unwrap();
        assert!(told < granted);
        next.release().await.unwrap();
    }
    let again = soon("ours again", lock(&ours, &name).acquire()).await.unwrap();
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_clock_jumps_keeps_holds() {
    if no_zookeeper() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = ZkServer::builder().clock(&clock).start().unwrap();
    let (ours, theirs) = (connect(server.addr()).await, connect(server.addr()).await);
    let raw = raw(server.addr()).await;
    let name = unique("clock");
    let held = lock(&ours, &name).acquire().await.unwrap();
    let made = async || {
        let stat = raw
            .create(
                "/clock",
                b"",
                &CreateMode::Ephemeral.with_acls(Acls::anyone_all()),
            )
            .await
            .unwrap()
            .0;
        raw.delete("/clock", None).await.unwrap();
        stat.ctime
    };
    let before = made().await;
    let hour = Duration::from_secs(3_600);
    clock.forward(hour).unwrap();
    let after = made().await;
    assert!(
        after - before >= 3_600_000,
        "a vacuous pass: {before}, then {after}"
    );
    assert!(lock(&theirs, &name).try_acquire().await.unwrap().is_none());
    clock.back(hour * 2).unwrap();
    let until = held.valid_until().unwrap();
    eventually("the hold is proven anew", async || {
        held.valid_until().unwrap() > until
    })
    .await;
    assert!(lock(&theirs, &name).try_acquire().await.unwrap().is_none());
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_closed_client_fails_at_once_and_leaves_nothing() {
    if no_zookeeper() {
        return;
    }
    let pair = Pair::new("closed").await;
    pair.other().acquire().await.unwrap().release().await.unwrap();
    // It is closed while it does not know whether its node was made.
    pair.proxy.set(Mode::DropReplies);
    let waiting = tokio::spawn({
        let lock = pair.lock();
        async move { lock.acquire().await }
    });
    contend(&pair.raw, &pair.name, 1).await;
    let closing = pair.ours.clone();
    let closing = tokio::spawn(async move { closing.close(Duration::from_secs(20)).await });
    assert!(matches!(
        soon("it is told", waiting).await.unwrap(),
        Err(Error::Closed)
    ));
    pair.proxy.set(Mode::Pass);
    soon("closed", closing).await.unwrap().unwrap();
    contend(&pair.raw, &pair.name, 0).await;
    assert!(matches!(pair.lock().acquire().await, Err(Error::Closed)));
    assert!(matches!(pair.ours.inspect(&pair.name).await, Err(Error::Closed)));
    pair.ours.close(Duration::from_secs(5)).await.unwrap();
}

/// Checks that a renewal by hand succeeds only with what a server has confirmed, once it has been silent for two heartbeats.
async fn only_what_is_confirmed(options: AcquireOptions, silence: impl FnOnce(&Proxy)) {
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = server::connect(proxy.addr()).await;
    let options = options.op_timeout(Duration::from_millis(300));
    let held = lock(&client, &unique("confirmed")).with_options(options);
    let held = held.acquire().await.unwrap();
    // Heartbeats prove more than the hold was granted.
    tokio::time::sleep(Duration::from_secs(4)).await;
    silence(&proxy);
    let (silent, beside) = (Stopwatch::start(), Lateness::watch());
    while held.is_held() {
        let before = held.valid_until().unwrap();
        if held.renew().await.is_ok() {
            let silence = silent.elapsed();
            let after = held.valid_until().unwrap();
            let longer = after.saturating_duration_since(before);
            let most = Duration::from_secs(3) + 3 * beside.most();
            assert!(
                after > before && silence < most,
                "renewed after {silence:?} of silence, to last {longer:?} longer"
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_by_hand_says_what_a_server_has_confirmed() {
    if no_zookeeper() {
        return;
    }
    let by_hand = AcquireOptions::new().renew(false);
    tokio::join!(
        // A server that is asked to attach the session, and is silent, may have granted less.
        only_what_is_confirmed(AcquireOptions::new(), |proxy| {
            proxy.set(Mode::Blackhole);
            proxy.reset();
        }),
        // More was proven than was granted, before the silence.
        only_what_is_confirmed(by_hand, |proxy| proxy.set(Mode::Blackhole)),
    );
}
