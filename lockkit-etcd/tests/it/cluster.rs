//! Three members, of which some are stuck, or have lost touch with the others without knowing.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Error, FencingToken, LockClient, LossReason, spi::chain};
use lockkit_testbed::{
    Mode, Proxy, Shared,
    etcd::{EtcdBuilder, EtcdCluster, EtcdServer},
    eventually,
};
use tokio::{
    sync::{Mutex, MutexGuard},
    task::JoinHandle,
};

use crate::server::{
    block, client, config, connect, contend, keys, lock, no_etcd, rounds, soon, takes_its_turn, unique,
    waiter, watcher, with_ttl,
};

/// The lease of tests in which it ends.
const TTL: Duration = Duration::from_secs(3);

/// Serialises the tests: each cuts connections that the others need.
static CLUSTER: Shared<Mutex<EtcdCluster>> =
    Shared::new(|| Mutex::new(EtcdCluster::start().expect("three etcd servers")));

/// Returns the cluster, also if an earlier test has failed with a member down, paused or cut off. Else those after it would wait for ever.
async fn cluster() -> MutexGuard<'static, EtcdCluster> {
    let cluster = CLUSTER.lock().await;
    block(|| cluster.heal()).unwrap();
    cluster
}

/// Something that happens to a member to which a holder is connected.
enum Fault {
    CutOff,
    Paused,
}

/// Returns the time between the loss of a hold and the next grant, after this has happened to the member that the holder is connected
/// to, and to no other.
async fn told_before(cluster: &EtcdCluster, fault: &Fault, member: usize, idle: Duration) -> Duration {
    let (name, safe) = (unique("cut"), (member + 1) % 3);
    let theirs = connect(&cluster.member(safe).url()).await;
    let ours = connect(&cluster.member(member).url()).await;
    let guard = with_ttl(&ours, &name, TTL).acquire().await.unwrap();
    let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
    contend(cluster.member(safe), &name, 2).await;
    tokio::time::sleep(idle).await;
    match fault {
        Fault::CutOff => cluster.cut(member),
        Fault::Paused => block(|| cluster.member(member).pause()).unwrap(),
    }
    let (reason, told) = soon("the holder is told", told).await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    let (next, granted) = soon("the next is granted", next).await.unwrap();
    assert!(next.token() > guard.token());
    assert!(
        told < granted,
        "told {:?} after the next was granted, after {idle:?}",
        told - granted
    );
    match fault {
        Fault::CutOff => block(|| cluster.mend()).unwrap(),
        Fault::Paused => block(|| cluster.member(member).resume()).unwrap(),
    }
    next.release().await.unwrap();
    assert!(guard.release().await.is_err_and(|error| error.is_lost()));
    granted - told
}

/// From no time at all to more than a lease.
fn idle(round: usize) -> Duration {
    match round % 3 {
        0 => Duration::ZERO,
        // This may be anywhere between two beats.
        1 => Duration::from_millis(fastrand::u64(100..1_000)),
        _ => TTL + Duration::from_millis(300),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_cut_off_leader_is_told_before_next_grant() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let mut margins = Vec::new();
    for round in 0..rounds(3).min(20) {
        let leader = block(|| cluster.leader()).unwrap();
        margins.push(told_before(&cluster, &Fault::CutOff, leader, idle(round)).await);
    }
    margins.sort_unstable();
    eprintln!("leader cut off: told before the next grant by {margins:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_cut_off_follower_is_told_before_next_grant() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let mut margins = Vec::new();
    for round in 0..rounds(2).min(20) {
        let follower = (block(|| cluster.leader()).unwrap() + 1) % 3;
        margins.push(told_before(&cluster, &Fault::CutOff, follower, idle(round)).await);
    }
    margins.sort_unstable();
    eprintln!("follower cut off: told before the next grant by {margins:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_paused_leader_is_told_before_next_grant() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let mut margins = Vec::new();
    for round in 0..rounds(2).min(20) {
        let leader = block(|| cluster.leader()).unwrap();
        margins.push(told_before(&cluster, &Fault::Paused, leader, idle(round)).await);
        eventually("it is back", async || {
            block(|| cluster.member(leader).healthy()).is_ok()
        })
        .await;
    }
    margins.sort_unstable();
    eprintln!("leader paused: told before the next grant by {margins:?}");
}

/// It has not heard of the raise, and answers as soon as it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_lags_behind_grants_above_a_raise() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    for round in 0..rounds(3) {
        let lagging = (block(|| cluster.leader()).unwrap() + 1) % 3;
        let theirs = connect(&cluster.member((lagging + 1) % 3).url()).await;
        let ours = connect(&cluster.member(lagging).url()).await;
        let name = unique("lagging");
        let lock = lock(&ours, &name);
        let before = lock.acquire().await.unwrap();
        let token = before.token();
        before.release().await.unwrap();
        cluster.cut(lagging);
        let above = FencingToken::new(theirs.fence().await.unwrap().get() + 1_000);
        soon("the others are a majority", theirs.raise_fence(above))
            .await
            .unwrap();
        let waiting = waiter(&lock);
        // It has asked, or asks the member that has just been told.
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        block(|| cluster.mend()).unwrap();
        let (guard, _) = soon("it is back", waiting).await.unwrap();
        assert!(
            guard.token() > above && guard.token() > token,
            "{} was granted after tokens were raised above {above}",
            guard.token()
        );
        guard.release().await.unwrap();
    }
}

/// A leader that wakes up after a few seconds still believes that it leads, and answers keepalives that were queued at it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_wakes_up_deposed_renews_nothing() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    for _ in 0..rounds(2).min(20) {
        let name = unique("deposed");
        let leader = block(|| cluster.leader()).unwrap();
        let safe = (leader + 1) % 3;
        let theirs = connect(&cluster.member(safe).url()).await;
        let ours = connect(&cluster.member(leader).url()).await;
        let guard = with_ttl(&ours, &name, Duration::from_secs(6))
            .acquire()
            .await
            .unwrap();
        let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
        contend(cluster.member(safe), &name, 2).await;
        block(|| cluster.member(leader).pause()).unwrap();
        tokio::time::sleep(Duration::from_millis(4_300)).await;
        block(|| cluster.member(leader).resume()).unwrap();
        // From now on it hears of nothing that the client has to say.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..200))).await;
        cluster.cut(leader);
        let (_, told) = soon("the holder is told", told).await.unwrap();
        let (next, granted) = patient("the next is granted", next).await.unwrap();
        assert!(
            told < granted,
            "told {:?} after the next was granted",
            told - granted
        );
        block(|| cluster.mend()).unwrap();
        next.release().await.unwrap();
    }
}

/// There is no `strace` for the test, which is skipped.
fn no_strace() -> bool {
    let strace = Command::new("strace")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    let missing = strace.err();
    let missing = missing.map(|error| format!("{error}; on Debian or Ubuntu: apt-get install strace"));
    lockkit_testbed::skipped("strace", missing)
}

/// A leader that is stuck in `fdatasync` for 18 s, while it goes on to answer keepalives. Dropping it ends the delay.
struct Stuck {
    strace: Child,
    writes: JoinHandle<()>,
}

impl Stuck {
    /// `theirs` is a client of another member, which goes on writing: without a write nothing is synced, and nothing is noticed.
    fn begin(leader: &EtcdServer, theirs: &LockClient) -> Self {
        let strace = Command::new("strace")
            .args(["-f", "-p", &leader.pid().unwrap().to_string(), "-o", "/dev/null"])
            .args([
                "-e",
                "trace=fdatasync",
                "-e",
                "inject=fdatasync:delay_enter=18000000",
            ])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let busy = lock(theirs, &unique("busy"));
        let writes = tokio::spawn(async move {
            loop {
                if let Ok(guard) = busy.acquire().await {
                    drop(guard);
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Self { strace, writes }
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.writes.abort();
        let _ = self.strace.kill();
        let _ = self.strace.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_leader_with_stuck_disk_is_told_in_time() {
    if no_etcd() || no_strace() {
        return;
    }
    let cluster = block(|| EtcdCluster::start_with(EtcdServer::builder().fsync())).unwrap();
    let (name, leader) = (unique("stuck"), block(|| cluster.leader()).unwrap());
    let safe = (leader + 1) % 3;
    let theirs = connect(&cluster.member(safe).url()).await;
    let ours = connect(&cluster.member(leader).url()).await;
    let guard = with_ttl(&ours, &name, Duration::from_secs(6))
        .acquire()
        .await
        .unwrap();
    let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
    contend(cluster.member(safe), &name, 2).await;
    let stuck = Stuck::begin(cluster.member(leader), &theirs);
    let (_, told) = patient("the holder is told", told).await.unwrap();
    let (next, granted) = patient("the next is granted", next).await.unwrap();
    drop(stuck);
    assert!(
        told < granted,
        "told {:?} after the next was granted",
        told - granted
    );
    eprintln!(
        "leader's disk stuck: told {:?} before the next was granted",
        granted - told
    );
    drop(next);
}

/// Before 3.4.31 and 3.5.13 the old leader may end a lease that its successor has renewed. Nobody can know that before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_leader_may_end_holds_elsewhere_and_they_are_told() {
    if no_etcd() || no_strace() {
        return;
    }
    let cluster = block(|| EtcdCluster::start_with(EtcdServer::builder().fsync())).unwrap();
    let (name, leader) = (unique("elsewhere"), block(|| cluster.leader()).unwrap());
    let safe = (leader + 1) % 3;
    let theirs = connect(&cluster.member(safe).url()).await;
    let ours = connect(&cluster.member((leader + 2) % 3).url()).await;
    let guard = with_ttl(&ours, &name, Duration::from_secs(6))
        .acquire()
        .await
        .unwrap();
    let (told, next) = (watcher(&guard), waiter(&lock(&theirs, &name)));
    contend(cluster.member(safe), &name, 2).await;
    let stuck = Stuck::begin(cluster.member(leader), &theirs);
    tokio::time::sleep(Duration::from_secs(25)).await;
    drop(stuck);
    if next.is_finished() {
        let (next, granted) = next.await.unwrap();
        let (reason, told) = soon("the holder is told", told).await.unwrap();
        let late = told.saturating_duration_since(granted);
        eprintln!("a stuck leader has ended the lease: told as {reason:?}, {late:?} after the next grant");
        // With its next renewal, which comes within a third of the ttl, and takes no longer than that.
        assert!(late < Duration::from_secs(4), "told after {late:?}");
        assert!(next.token() > guard.token());
        drop(next);
    } else {
        // It may end the lease only now.
        match guard.release().await {
            Ok(())
            | Err(Error::Lost {
                reason: LossReason::Revoked,
                ..
            }) => {}
            Err(error) => panic!("lost for nothing: {error}"),
        }
        takes_its_turn("the next", next).await;
    }
}

/// Awaits what may take longer than an election and several leases.
async fn patient<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(Duration::from_secs(60), work).await;
    done.unwrap_or_else(|_| panic!("not within a minute: {what}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_and_a_wait_outlive_their_leader() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let name = unique("leader");
    let (ours, theirs) = (connect(&cluster.url()).await, connect(&cluster.url()).await);
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let next = waiter(&lock(&theirs, &name));
    contend(cluster.member(0), &name, 2).await;
    let leader = block(|| cluster.leader()).unwrap();
    let until = guard.valid_until().unwrap();
    let killed = Instant::now();
    block(|| cluster.member(leader).kill()).unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    eprintln!("leader killed: proven anew after {:?}", killed.elapsed());
    assert!(guard.is_held() && !next.is_finished());
    let token = guard.token();
    soon("released", guard.release()).await.unwrap();
    let (next, _) = soon("the next", next).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
    block(|| cluster.member(leader).start()).unwrap();
}

/// It takes no more requests, and keeps its connections for as long as somebody watches, up to seven seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_shuts_down_is_left_at_once() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let member = (block(|| cluster.leader()).unwrap() + 1) % 3;
    let others = Proxy::start(cluster.member((member + 1) % 3).addr()).unwrap();
    let servers = cluster.url_at(&[cluster.member(member).addr(), others.addr()]);
    let (client, name) = (connect(&servers).await, unique("shuts-down"));
    others.set(Mode::Refuse);
    others.reset();
    // Its first beat is 2.5 s later, and it is watched.
    let guard = lock(&client, &name).acquire().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    others.set(Mode::Pass);
    let shut_down = block(|| {
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| cluster.member(member).stop());
            // It has heard.
            std::thread::sleep(Duration::from_millis(300));
            let watch = Stopwatch::start();
            let runtime = tokio::runtime::Handle::current();
            let other = lock(&client, &unique("other"));
            let held = runtime.block_on(soon("elsewhere", other.acquire())).unwrap();
            let took = watch.elapsed();
            runtime.block_on(held.release()).unwrap();
            stopped.join().unwrap().unwrap();
            took
        })
    });
    // The next beat is later.
    assert!(
        shut_down < Duration::from_millis(1_500),
        "granted after {shut_down:?}"
    );
    guard.release().await.unwrap();
    block(|| cluster.member(member).start()).unwrap();
}

/// Its client goes on to another member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_outlives_the_cut_of_any_member() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let (ours, theirs) = (connect(&cluster.url()).await, connect(&cluster.url()).await);
    let name = unique("any");
    let ttl = Duration::from_secs(10);
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let patient = AcquireOptions::new().ttl(ttl).wait(12 * ttl);
    let next = waiter(&theirs.lock(&name).unwrap().with_options(patient));
    contend(cluster.member(0), &name, 2).await;
    let before = block(|| keys(cluster.member(0), &name));
    for member in 0..3 {
        cluster.cut(member);
        tokio::time::sleep(ttl + Duration::from_secs(2)).await;
        assert!(
            guard.is_held(),
            "lost when member {member} was cut off: {:?}",
            guard.check()
        );
        assert!(!next.is_finished());
        block(|| cluster.mend()).unwrap();
        // The one that comes back has had them elect anew. The next fault may find half of the lease used up by that.
        let until = guard.valid_until().unwrap();
        eventually("the hold is proven anew", async || {
            guard.valid_until().unwrap() > until
        })
        .await;
    }
    assert_eq!(
        block(|| keys(cluster.member(0), &name)),
        before,
        "each has its place"
    );
    guard.release().await.unwrap();
    takes_its_turn("the next", next).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_away_for_less_than_the_lease_loses_nothing() {
    if no_etcd() {
        return;
    }
    let cluster = cluster().await;
    let client = connect(&cluster.url()).await;
    let name = unique("majority");
    let guard = lock(&client, &name).acquire().await.unwrap();
    let until = guard.valid_until().unwrap();
    for member in [0, 1] {
        block(|| cluster.member(member).kill()).unwrap();
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let error = lock(&client, &unique("other")).try_acquire().await;
    assert!(error.is_err(), "without a majority nobody can tell: {error:?}");
    assert!(guard.is_held());
    for member in [0, 1] {
        // The first one comes up with the second.
        let _ = block(|| cluster.member(member).start());
    }
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_and_holds_outlive_a_member_that_is_replaced() {
    if no_etcd() {
        return;
    }
    let cluster = block(EtcdCluster::start).unwrap();
    let (ours, theirs) = (connect(&cluster.url()).await, connect(&cluster.url()).await);
    let name = unique("replaced");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let next = waiter(&lock(&theirs, &name));
    contend(cluster.member(0), &name, 2).await;
    block(|| cluster.replace(1)).unwrap();
    let until = guard.valid_until().unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    assert!(guard.is_held() && !next.is_finished());
    guard.release().await.unwrap();
    takes_its_turn("the next", next).await;
}

/// It serves nobody until it has caught up and was promoted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_learner_among_the_hosts_is_passed_over() {
    if no_etcd() {
        return;
    }
    // It authenticates nobody, either.
    for options in [EtcdServer::builder(), EtcdServer::builder().authorise("lockkit/")] {
        passes_over_a_learner(options).await;
    }
}

async fn passes_over_a_learner(options: EtcdBuilder) {
    let cluster = block(|| EtcdCluster::start_with(options)).unwrap();
    block(|| cluster.replace_by_learner(1)).unwrap();
    let [voter, learner] = [0, 1].map(|member| cluster.member(member).addr());
    // They begin with one of the two by chance.
    for number in 0..12 {
        let url = cluster.url_at(&[voter, learner]);
        let ours = client(config(&url)).await;
        let ours = ours.unwrap_or_else(|error| panic!("client {number}: {error}"));
        let granted = lock(&ours, &unique("learner")).try_acquire().await;
        let guard = granted.unwrap_or_else(|error| panic!("client {number}: {error}"));
        guard.expect("nobody has it").release().await.unwrap();
    }
    let url = cluster.url_at(&[learner]);
    let alone = match client(config(&url)).await {
        Ok(ours) => lock(&ours, &unique("learner")).try_acquire().await.map(drop),
        Err(error) => Err(error),
    };
    let error = alone.unwrap_err();
    assert!(error.is_transient(), "it may be promoted: {error:?}");
    assert!(chain(&error).contains("is a learner"), "{}", chain(&error));
}

/// Three members, each behind a proxy of its own, and the URL of the proxies.
fn behind_proxies(cluster: &EtcdCluster) -> (Vec<Proxy>, String) {
    let members = cluster.addrs().into_iter();
    let proxies: Vec<_> = members.map(|member| Proxy::start(member).unwrap()).collect();
    let url = cluster.url_at(&proxies.iter().map(Proxy::addr).collect::<Vec<_>>());
    (proxies, url)
}

/// Takes a member away for good. A bare server by itself takes its place, as on a host that was set up anew. The majority goes on.
fn replace_by(bare: &EtcdServer, cluster: &EtcdCluster, proxies: &[Proxy]) {
    cluster.member(2).kill().unwrap();
    proxies[2].set_upstream(bare.addr());
    proxies[2].reset();
}

/// New clients come to it as often as to the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bare_member_beside_a_majority_grants_nothing() {
    if no_etcd() {
        return;
    }
    let (cluster, bare) = (
        block(EtcdCluster::start).unwrap(),
        block(EtcdServer::plain).unwrap(),
    );
    let (proxies, url) = behind_proxies(&cluster);
    let (ours, name) = (connect(&url).await, unique("bare"));
    let guard = lock(&ours, &name).acquire().await.unwrap();
    block(|| replace_by(&bare, &cluster, &proxies));
    let before = proxies[2].counts().connections;
    for client in 0..12 {
        let theirs = lock(&connect(&url).await, &name);
        eventually("it is told that it is taken", async || {
            match theirs.try_acquire().await {
                Ok(granted) => {
                    assert!(
                        granted.is_none(),
                        "client {client} is granted what is held: {granted:?}"
                    );
                    true
                }
                // The majority may have to elect a leader.
                Err(error) => {
                    assert!(error.is_transient(), "{error}");
                    false
                }
            }
        })
        .await;
    }
    assert!(
        proxies[2].counts().connections > before,
        "a vacuous pass: no client came to it"
    );
    guard.release().await.unwrap();
}

/// It comes to the bare member as well, which knows nothing of its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_comes_to_a_bare_member_goes_on() {
    if no_etcd() {
        return;
    }
    let (cluster, bare) = (
        block(EtcdCluster::start).unwrap(),
        block(EtcdServer::plain).unwrap(),
    );
    let (proxies, url) = behind_proxies(&cluster);
    let client = connect(&url).await;
    let guard = lock(&client, &unique("moves")).acquire().await.unwrap();
    block(|| replace_by(&bare, &cluster, &proxies));
    let before = proxies[2].counts().connections;
    // Each time it goes on to the next of the three.
    for _ in 0..6 {
        let until = guard.valid_until().unwrap();
        proxies.iter().for_each(Proxy::reset);
        eventually("the hold is proven anew", async || {
            guard.valid_until().expect("it is held") > until
        })
        .await;
    }
    assert!(
        proxies[2].counts().connections > before,
        "a vacuous pass: it did not come there"
    );
    guard.release().await.unwrap();
}
