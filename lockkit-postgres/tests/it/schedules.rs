//! Schedules in which a connection stops at a bad moment, or somebody else changes what a claim relies on.

use std::{
    collections::HashSet,
    future::Future as _,
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{
    AcquireOptions, Error, Lock, LockClient, LockGuard,
    spi::{self, Backend as _},
};
use lockkit_postgres::PostgresBackend;
use lockkit_testbed::{eventually, postgres::PgServer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};

use crate::servers::{Waiter, client, config, cycle, key, name, private, request, tests, waits};

tests! {
    a_terminated_holder_is_told_past_a_dead_control_connection
    a_waiter_takes_its_grant_past_a_dead_control_connection
    a_semaphore_made_anew_leaves_nobody_in_its_queue
    a_hold_that_is_not_shown_any_more_leaves_no_row
    a_loss_that_a_dropped_future_found_is_no_release
    a_session_ended_without_a_reply_is_no_loss
    a_reply_lost_with_its_idle_connection_leaves_no_lock
    a_grant_lost_with_the_second_wait_leaves_no_lock
    a_semaphore_of_the_size_asked_for_is_no_error
    waiters_keep_their_order_without_track_activities
    a_revocation_hits_no_other_lock
    a_cancel_that_comes_late_costs_nobody_a_turn
    a_loss_that_a_dropped_renewal_found_is_told
    a_loss_that_a_dropped_renewal_found_is_not_passed_on
    a_loss_found_within_a_short_op_timeout_is_told
    an_inspection_that_is_not_polled_stops_no_other
    dead_idle_connections_are_left_together
}

/// A proxy that can stop single connections, numbered in the order of their arrival from 0 on.
#[derive(Clone)]
struct Gate {
    addr: SocketAddr,
    frozen: Arc<Mutex<HashSet<usize>>>,
    /// Those whose client is cut off with the next reply, and the server is not.
    cut: Arc<Mutex<HashSet<usize>>>,
    count: Arc<Mutex<usize>>,
    latency: Arc<Mutex<Duration>>,
}

impl Gate {
    async fn start(upstream: SocketAddr, latency: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gate = Self {
            addr: listener.local_addr().unwrap(),
            frozen: Arc::default(),
            cut: Arc::default(),
            count: Arc::default(),
            latency: Arc::new(Mutex::new(latency)),
        };
        let this = gate.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let number = {
                    let mut count = this.count.lock().unwrap();
                    *count += 1;
                    *count - 1
                };
                let (mut from_client, mut to_client) = client.into_split();
                let Ok(server) = TcpStream::connect(upstream).await else {
                    continue;
                };
                server.set_nodelay(true).unwrap();
                let (mut from_server, mut to_server) = server.into_split();
                let gate = this.clone();
                tokio::spawn(async move {
                    let mut buffer = vec![0; 64 * 1024];
                    loop {
                        let length = from_client.read(&mut buffer).await.unwrap_or(0);
                        if length == 0 {
                            if gate.cut.lock().unwrap().contains(&number) {
                                std::mem::forget(to_server);
                            }
                            return;
                        }
                        gate.pass(number).await;
                        if to_server.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
                let gate = this.clone();
                tokio::spawn(async move {
                    let mut buffer = vec![0; 64 * 1024];
                    loop {
                        let length = from_server.read(&mut buffer).await.unwrap_or(0);
                        if length == 0 {
                            gate.pass(number).await;
                            return;
                        }
                        gate.pass(number).await;
                        if gate.cut.lock().unwrap().contains(&number) {
                            drop(to_client);
                            std::mem::forget(from_server);
                            return;
                        }
                        if to_client.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        gate
    }

    async fn pass(&self, number: usize) {
        let latency = *self.latency.lock().unwrap();
        sleep(latency).await;
        while self.frozen.lock().unwrap().contains(&number) {
            sleep(Duration::from_millis(2)).await;
        }
    }

    fn freeze(&self, number: usize) {
        self.frozen.lock().unwrap().insert(number);
    }

    fn thaw(&self, number: usize) {
        self.frozen.lock().unwrap().remove(&number);
    }
}

/// What waits for a connection that is dead does not get on within it: a connection counts as dead after 5 s.
const UNANSWERED: Duration = Duration::from_secs(4);

/// A client whose first acquisition has made the tables, which takes a connection more.
async fn first(server: &PgServer) -> LockClient {
    let client = client(server.addr()).await;
    cycle(&client, "first").await;
    client
}

fn terminate(server: &PgServer, name: &str) {
    let end = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype='advisory' AND granted AND \
         (classid::bigint << 32 | objid::bigint) = {}",
        key(name)
    );
    assert_eq!(server.sql(&end).unwrap(), "t");
}

fn locks(server: &PgServer) -> String {
    server
        .sql("SELECT count(*) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks WHERE locktype='advisory'")
        .unwrap()
}

async fn a_terminated_holder_is_told_past_a_dead_control_connection() {
    let server = private(&[]);
    let other = first(&server).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let client = client(gate.addr).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    sleep(Duration::from_millis(300)).await;
    // As a firewall does that forgets connections which are silent for some minutes.
    gate.freeze(0);
    terminate(&server, "a");
    let began = Stopwatch::start();
    let next = other.lock("a").unwrap().acquire().await.unwrap();
    eprintln!("the next holds after {:?}", began.elapsed());
    let told = timeout(Duration::from_secs(40), guard.lost()).await;
    let took = began.elapsed();
    eprintln!("the holder is told {told:?} after {took:?}");
    next.check().unwrap();
    assert!(took < UNANSWERED, "told after {took:?}");
}

async fn a_waiter_takes_its_grant_past_a_dead_control_connection() {
    let server = private(&[]);
    let other = client(server.addr()).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let client = client(gate.addr).await;
    let guard = other.lock("a").unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(client.lock("a").unwrap());
    waits(&other, "a").await;
    gate.freeze(0);
    // Its look whether the server still has it wait is under way.
    sleep(Duration::from_millis(2_500)).await;
    let began = Stopwatch::start();
    guard.release().await.unwrap();
    let (_granted, _) = waiter.granted().await;
    let took = began.elapsed();
    eprintln!("granted after {took:?}");
    assert!(took < UNANSWERED, "granted after {took:?}");
}

/// The future that has found the loss, and asks for its reason, is dropped. The session, or what is left of it, may still be there.
async fn a_loss_that_a_dropped_future_found_is_no_release() {
    let server = private(&[]);
    let other = first(&server).await;
    for renews in [true, false] {
        let gate = Gate::start(server.addr(), Duration::ZERO).await;
        let backend = PostgresBackend::connect(config(gate.addr)).await.unwrap();
        let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
        assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
        gate.freeze(0);
        terminate(&server, "a");
        let next = other.lock("a").unwrap().acquire().await.unwrap();
        let soon = Duration::from_millis(100);
        let finds = if renews {
            timeout(soon, claim.renew()).await.is_ok()
        } else {
            timeout(soon, claim.release()).await.is_ok()
        };
        assert!(!finds, "it asks for the reason");
        gate.thaw(0);
        let released = claim.release().await;
        assert!(
            released.as_ref().is_err_and(Error::is_lost),
            "{renews}: {released:?}"
        );
        next.release().await.unwrap();
    }
}

/// The connection of a hold is dead, so that its session is ended over another. If the reply to that is lost, it may have been there.
async fn a_session_ended_without_a_reply_is_no_loss() {
    let server = private(&[]);
    let _first = first(&server).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let backend = PostgresBackend::connect(config(gate.addr)).await.unwrap();
    let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
    assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
    let connections = *gate.count.lock().unwrap();
    (1..connections).for_each(|number| gate.freeze(number));
    let dropped = timeout(Duration::from_millis(100), claim.release()).await;
    assert!(dropped.is_err(), "nobody replies");
    let mut observer = server.session().unwrap();
    // So that there is time to cut a reply off which is on its way.
    *gate.latency.lock().unwrap() = Duration::from_secs(1);
    let cut = async {
        let held = "SELECT count(*) FROM pg_locks WHERE locktype='advisory'";
        while observer.sql(held).unwrap() != "0" {
            sleep(Duration::from_millis(1)).await;
        }
        gate.cut.lock().unwrap().insert(0);
    };
    let (released, ()) = tokio::join!(claim.release(), cut);
    assert!(
        released.as_ref().is_err_and(Error::is_transient),
        "nobody can tell: {released:?}"
    );
    *gate.latency.lock().unwrap() = Duration::ZERO;
    claim.release().await.unwrap();
}

/// Somebody empties the table of semaphores while one waits.
async fn a_semaphore_made_anew_leaves_nobody_in_its_queue() {
    let server = private(&[]);
    let (first, second) = (client(server.addr()).await, client(server.addr()).await);
    let held = first.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(second.semaphore("s", 1).unwrap());
    eventually("it looks", async || {
        first.inspect_semaphore("s").await.unwrap().waiters == Some(1)
    })
    .await;
    server.sql("TRUNCATE lockkit.semaphore").unwrap();
    sleep(Duration::from_millis(300)).await;
    held.release().await.unwrap();
    let (granted, _) = waiter.granted().await;
    sleep(Duration::from_millis(100)).await;
    eprintln!("with one permit held: {} locks", locks(&server));
    granted.release().await.unwrap();
    eventually("no locks are left", async || locks(&server) == "0|0").await;
    // Somebody holds, and another waits for it.
    let held = first.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(first.semaphore("s", 1).unwrap());
    sleep(Duration::from_millis(500)).await;
    let began = Stopwatch::start();
    held.release().await.unwrap();
    let (_granted, _) = waiter.granted().await;
    let took = began.elapsed();
    // Who looks by itself does so after 20 s.
    assert!(took < Duration::from_secs(15), "granted after {took:?}");
}

async fn a_hold_that_is_not_shown_any_more_leaves_no_row() {
    let server = private(&[]);
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let old = guard.token();
    assert_eq!(other.inspect("a").await.unwrap().holders[0].token, old);
    server
        .sql("REVOKE UPDATE ON lockkit.holder FROM lockkit")
        .unwrap();
    // Its row cannot be changed.
    guard.set_ttl(Duration::from_secs(20)).await.unwrap();
    guard.release().await.unwrap();
    let next = lock.acquire().await.unwrap();
    sleep(Duration::from_millis(300)).await;
    let shown = other.inspect("a").await.unwrap();
    eprintln!(
        "the first had {old:?}, the next has {:?}; shown: {:?}",
        next.token(),
        shown.holders
    );
    // The next hold does not show which token it has.
    let ended = other.revoke_by_force("a", old).await;
    sleep(Duration::from_millis(300)).await;
    eprintln!(
        "ended by the token of the earlier hold: {ended:?}; the next: {:?}",
        next.check()
    );
    assert!(ended.as_ref().is_err_and(Error::is_transient) && next.check().is_ok());
}

/// The reply to an attempt in an idle session is lost with the connection, of which the server hears nothing.
async fn a_reply_lost_with_its_idle_connection_leaves_no_lock() {
    let server = private(&[]);
    drop(first(&server).await);
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let client = client(gate.addr).await;
    cycle(&client, "a").await;
    assert_eq!(*gate.count.lock().unwrap(), 2, "control, and the session");
    gate.cut.lock().unwrap().insert(1);
    let began = Stopwatch::start();
    let tried = client.lock("a").unwrap().try_acquire().await;
    eprintln!("a try: {tried:?}; {} locks", locks(&server));
    drop(tried);
    let guard = client
        .lock("a")
        .unwrap()
        .acquire_timeout(Duration::from_secs(40))
        .await;
    eprintln!("acquired: {:?} after {:?}", guard.is_ok(), began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
}

/// A session that has waited before waits again without a try.
async fn a_grant_lost_with_the_second_wait_leaves_no_lock() {
    let server = private(&[]);
    let other = client(server.addr()).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let client = client(gate.addr).await;
    let held = other.lock("a").unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(client.lock("a").unwrap());
    waits(&other, "a").await;
    held.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
    assert_eq!(*gate.count.lock().unwrap(), 2, "control, and the session");
    gate.cut.lock().unwrap().insert(1);
    let began = Stopwatch::start();
    let guard = client
        .lock("a")
        .unwrap()
        .acquire_timeout(Duration::from_secs(40))
        .await
        .unwrap();
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    guard.release().await.unwrap();
    assert_eq!(locks(&server), "0|0", "locks are left");
}

async fn a_semaphore_of_the_size_asked_for_is_no_error() {
    let server = private(&[]);
    let near = client(server.addr()).await;
    let gate = Gate::start(server.addr(), Duration::from_millis(25)).await;
    let far = client(gate.addr).await;
    for after in (0..400).step_by(25) {
        let name = name("s");
        near.semaphore(&name, 3)
            .unwrap()
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let slow = far.semaphore(&name, 2).unwrap();
        let slow = tokio::spawn(async move { slow.acquire().await });
        sleep(Duration::from_millis(after)).await;
        let quick = near.semaphore(&name, 2).unwrap().acquire().await;
        let slow = slow.await.unwrap();
        eprintln!(
            "{after} ms: near {:?}, far {:?}",
            quick.as_ref().err(),
            slow.as_ref().err()
        );
        // Two permits, and two who want one.
        if let Err(error) = slow.map(drop).and(quick.map(drop)) {
            panic!("{after} ms: {error}");
        }
    }
}

async fn waiters_keep_their_order_without_track_activities() {
    for setting in ["off"] {
        let server = private(&[("track_activities", setting)]);
        let clients = [
            client(server.addr()).await,
            client(server.addr()).await,
            client(server.addr()).await,
        ];
        let mut overtaken = 0;
        for _ in 0..3 {
            let guard = clients[0].lock("a").unwrap().acquire().await.unwrap();
            let first = Waiter::of(clients[1].lock("a").unwrap());
            sleep(Duration::from_millis(700)).await;
            let second = Waiter::of(clients[2].lock("a").unwrap());
            sleep(Duration::from_millis(2_400)).await;
            guard.release().await.unwrap();
            let first = tokio::spawn(async move {
                let (guard, at) = first.granted().await;
                guard.release().await.unwrap();
                at
            });
            let second = tokio::spawn(async move {
                let (guard, at) = second.granted().await;
                guard.release().await.unwrap();
                at
            });
            overtaken += u32::from(first.await.unwrap() > second.await.unwrap());
        }
        eprintln!("track_activities={setting}: {overtaken} of 3 were overtaken");
        assert_eq!(overtaken, 0, "track_activities={setting}");
    }
}

/// `LOCKKIT_SEED` replays its pauses.
async fn a_revocation_hits_no_other_lock() {
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!("replay with LOCKKIT_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let server = private(&[("max_locks_per_transaction", "256")]);
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let mut many = server.session().unwrap();
    // Another program's locks, so that a look at all takes some ms.
    many.sql("SELECT count(pg_advisory_lock(7, g)) FROM generate_series(1, 12000) g")
        .unwrap();
    let (mut hit, mut ended, mut rounds) = (0, 0, 0);
    let until = Instant::now() + Duration::from_secs(15);
    while Instant::now() < until {
        rounds += 1;
        let guard = client.lock("a").unwrap().acquire().await.unwrap();
        let token = guard.token();
        sleep(Duration::from_millis(15)).await;
        let operator = other.clone();
        let revoked = tokio::spawn(async move { operator.revoke_by_force("a", token).await.unwrap() });
        sleep(Duration::from_micros(rng.u64(..120_000))).await;
        let released = guard.release().await;
        let bystander = client.lock("b").unwrap().acquire().await.unwrap();
        let revoked = revoked.await.unwrap();
        ended += u32::from(revoked);
        sleep(Duration::from_millis(20)).await;
        if bystander.check().is_err() {
            hit += 1;
            eprintln!(
                "round {rounds}: released {released:?}, revoked {revoked}, the other lock: {:?}",
                bystander.check()
            );
        }
        drop(bystander);
    }
    eprintln!("{rounds} rounds, {ended} ended, {hit} bystanders hit");
    assert_eq!(hit, 0);
}

/// A withdrawal is dropped while its cancel is on the way, and its session goes to another claim.
async fn a_cancel_that_comes_late_costs_nobody_a_turn() {
    let server = private(&[]);
    let (holder, other) = (client(server.addr()).await, client(server.addr()).await);
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let backend = PostgresBackend::connect(config(gate.addr)).await.unwrap();
    let x = holder.lock("x").unwrap().acquire().await.unwrap();
    let y = holder.lock("y").unwrap().acquire().await.unwrap();
    let mut first = backend.claim(&request("x", spi::Mode::Exclusive)).await.unwrap();
    assert!(first.attempt(Duration::from_secs(1)).await.unwrap().is_none());
    gate.freeze(0);
    assert!(
        timeout(Duration::from_millis(200), first.release())
            .await
            .is_err()
    );
    x.release().await.unwrap();
    sleep(Duration::from_millis(100)).await;
    first.release().await.unwrap();
    let mut second = backend.claim(&request("y", spi::Mode::Exclusive)).await.unwrap();
    assert!(second.attempt(Duration::from_secs(1)).await.unwrap().is_none());
    waits(&holder, "y").await;
    let behind = Waiter::of(other.lock("y").unwrap());
    eventually("both wait", async || {
        holder.inspect("y").await.unwrap().waiters == Some(2)
    })
    .await;
    gate.thaw(0);
    let (sender, granted) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        loop {
            if second.attempt(Duration::from_secs(1)).await.unwrap().is_some() {
                let _ = sender.send(Instant::now());
                sleep(Duration::from_millis(200)).await;
                return second.release().await.unwrap();
            }
            let _ = timeout(Duration::from_secs(2), second.notified()).await;
        }
    });
    sleep(Duration::from_millis(500)).await;
    y.release().await.unwrap();
    let behind = tokio::spawn(async move {
        let (guard, at) = behind.granted().await;
        sleep(Duration::from_millis(200)).await;
        guard.release().await.unwrap();
        at
    });
    let (first, second) = (granted.await.unwrap(), behind.await.unwrap());
    assert!(
        first < second,
        "the one who came later was granted {:?} before",
        first - second
    );
}

/// A lock whose next renewal, which would tell a loss, too, is minutes away.
fn lasting(client: &LockClient) -> Lock {
    let options = AcquireOptions::new().ttl(Duration::from_mins(10));
    client.lock("a").unwrap().with_options(options)
}

/// A client whose control connection and only session stand still, its hold, whose session was ended, and the next holder.
async fn superseded(server: &PgServer) -> (Gate, LockClient, LockGuard, LockGuard) {
    let theirs = first(server).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let ours = client(gate.addr).await;
    let guard = lasting(&ours).acquire().await.unwrap();
    // It is shown, and its session idle.
    sleep(Duration::from_millis(300)).await;
    let connections = *gate.count.lock().unwrap();
    (0..connections).for_each(|number| gate.freeze(number));
    terminate(server, "a");
    let next = theirs.lock("a").unwrap().acquire().await.unwrap();
    (gate, ours, guard, next)
}

/// Has a renewal by hand find out that the session has ended, and drops it while it asks the control connection for the reason.
async fn renew_and_drop(gate: &Gate, guard: &LockGuard) {
    let session = async {
        sleep(Duration::from_millis(100)).await;
        let connections = *gate.count.lock().unwrap();
        (1..connections).for_each(|number| gate.thaw(number));
        std::future::pending::<()>().await;
    };
    let renewing = async {
        tokio::select! {
            renewed = guard.renew() => renewed,
            () = session => Ok(()),
        }
    };
    let renewed = timeout(Duration::from_millis(300), renewing).await;
    assert!(renewed.is_err(), "it was not dropped: {renewed:?}");
    gate.thaw(0);
}

async fn a_loss_that_a_dropped_renewal_found_is_told() {
    let server = private(&[]);
    let (gate, _client, guard, next) = superseded(&server).await;
    renew_and_drop(&gate, &guard).await;
    let told = timeout(Duration::from_mins(1), guard.lost()).await;
    assert!(told.is_ok(), "not told, while another holds");
    next.release().await.unwrap();
}

async fn a_loss_that_a_dropped_renewal_found_is_not_passed_on() {
    let server = private(&[]);
    let (gate, client, guard, next) = superseded(&server).await;
    let heir = Waiter::of(client.lock("a").unwrap());
    renew_and_drop(&gate, &guard).await;
    let released = guard.release().await;
    assert!(
        released.as_ref().is_err_and(Error::is_lost),
        "a lost hold: {released:?}"
    );
    sleep(Duration::from_millis(300)).await;
    assert!(!heir.is_finished(), "PROMISE BROKEN: two hold");
    next.release().await.unwrap();
    heir.granted().await.0.release().await.unwrap();
}

/// The client's own renewal ends before the reason is known.
async fn a_loss_found_within_a_short_op_timeout_is_told() {
    let server = private(&[]);
    let _first = first(&server).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let ours = client(gate.addr).await;
    let options = AcquireOptions::new()
        .ttl(Duration::from_mins(10))
        .op_timeout(Duration::from_millis(200));
    let guard = ours.lock("a").unwrap().acquire_with(&options).await.unwrap();
    sleep(Duration::from_millis(300)).await;
    gate.freeze(0);
    terminate(&server, "a");
    let told = timeout(Duration::from_mins(1), guard.lost()).await;
    assert!(told.is_ok(), "not told");
}

/// All inspections of a client share a connection, which one that is neither polled nor dropped is not to keep.
async fn an_inspection_that_is_not_polled_stops_no_other() {
    let server = private(&[]);
    // No reply is there before it is asked for again.
    let gate = Gate::start(server.addr(), Duration::from_millis(20)).await;
    let client = client(gate.addr).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    for _ in 0..2 {
        let mut forgotten = pin!(client.inspect("a"));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(forgotten.as_mut().poll(&mut cx), Poll::Pending));
        let seen = client.inspect("a").await.unwrap();
        assert_eq!(seen.holders.len(), 1);
    }
    guard.release().await.unwrap();
}

/// A firewall forgets them, and the control connection goes on.
async fn dead_idle_connections_are_left_together() {
    const MANY: usize = 16;
    let server = private(&[]);
    let theirs = client(server.addr()).await;
    let gate = Gate::start(server.addr(), Duration::ZERO).await;
    let ours = client(gate.addr).await;
    // A session that has waited for a name waits for it again without a try.
    let mut guards = Vec::new();
    for _ in 0..MANY {
        let held = theirs.lock("a").unwrap().acquire().await.unwrap();
        let waiter = Waiter::of(ours.lock("a").unwrap());
        waits(&theirs, "a").await;
        held.release().await.unwrap();
        waiter.granted().await.0.release().await.unwrap();
        // The next one needs a session of its own.
        let other = guards.len().to_string();
        guards.push(ours.lock(&other).unwrap().acquire().await.unwrap());
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
    let connections = *gate.count.lock().unwrap();
    (1..connections).for_each(|number| gate.freeze(number));
    let began = Stopwatch::start();
    let granted = timeout(Duration::from_mins(3), ours.lock("a").unwrap().acquire()).await;
    let after = began.elapsed();
    drop(granted.unwrap().unwrap());
    assert!(
        after < Duration::from_secs(15),
        "{connections} connections; granted after {after:?}, and nobody holds"
    );
}
