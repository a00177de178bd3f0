//! The layout on the servers, other clients of it, and the order of grants.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{AcquireOptions, Error, LockClient, spi::chain};
use lockkit_testbed::{Mode, Proxy, etcd::EtcdServer, eventually};

use crate::server::{
    block, connect, contend, keys, lock, no_etcd, queue, shared, soon, takes_its_turn, unique, waiter,
    with_ttl,
};

/// Long enough for a mistaken grant to show.
const MOMENT: Duration = Duration::from_millis(300);

/// Returns the revision that made the only key of this queue.
fn create_revision(server: &EtcdServer, name: &str) -> u64 {
    let json = server.ctl(&["get", "--prefix", &queue(name), "-w=json"]).unwrap();
    let (_, rest) = json.split_once("\"create_revision\":").expect("a key");
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_is_the_revision_that_made_the_key() {
    if no_etcd() {
        return;
    }
    // Others raise tokens at the shared one.
    let server = EtcdServer::plain().unwrap();
    let (name, client) = (unique("token"), connect(&server.url()).await);
    let before = lock(&client, &name).acquire().await.unwrap();
    // Queued before the release: the revision of the grant is a later one.
    let waiting = waiter(&lock(&client, &name).shared());
    block(|| server.ctl(&["put", "elsewhere", "x"])).unwrap();
    contend(&server, &name, 2).await;
    before.release().await.unwrap();
    let (guard, _) = soon("it is its turn", waiting).await.unwrap();
    let made = block(|| create_revision(&server, &name));
    assert_eq!(guard.token().get(), made);
    assert!(block(|| server.revision()).unwrap() > made);
    let key = block(|| keys(&server, &name)).remove(0);
    assert!(key.ends_with(".0.r"), "{key}");
    guard.release().await.unwrap();
    contend(&server, &name, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_lock_and_ours_exclude_each_other() {
    if no_etcd() {
        return;
    }
    let (name, client) = (unique("etcdctl"), connect(&shared().url()).await);
    let path = format!("lockkit/{name}");
    let ttl = Duration::from_secs(20);
    for lock in [lock(&client, &name), lock(&client, &name).shared()] {
        let guard = soon("the lock is free", lock.acquire()).await.unwrap();
        let mut theirs = shared().lock(&path, ttl).unwrap();
        assert!(block(|| theirs.is_silent_for(MOMENT)), "etcdctl has it beside us");
        contend(shared(), &name, 2).await;
        let token = guard.token();
        guard.release().await.unwrap();
        let key = block(|| theirs.hear()).unwrap();
        assert!(key.starts_with(&queue(&name)), "{key}");
        // The other way round.
        assert!(lock.try_acquire().await.unwrap().is_none());
        assert_eq!(block(|| keys(shared(), &name)), [key], "a try leaves nothing");
        let state = lock.inspect().await.unwrap();
        let holder = state.holders.first().expect("etcdctl holds");
        assert!(holder.token > token && holder.left.is_some());
        let waiting = waiter(&lock);
        contend(shared(), &name, 2).await;
        tokio::time::sleep(MOMENT).await;
        assert!(!waiting.is_finished(), "we have it beside etcdctl");
        block(|| theirs.end()).unwrap();
        let (guard, _) = soon("etcdctl has released it", waiting).await.unwrap();
        assert!(guard.token() > holder.token);
        guard.release().await.unwrap();
    }
}

/// `etcdctl lock a` waits for whatever begins with `a/`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_and_one_below_it_are_two_locks() {
    if no_etcd() {
        return;
    }
    let (name, client) = (unique("below"), connect(&shared().url()).await);
    let below = lock(&client, &format!("{name}/b")).acquire().await.unwrap();
    let above = lock(&client, &name).try_acquire().await.unwrap();
    above.expect("nobody has it").release().await.unwrap();
    let mut theirs = shared()
        .lock(&format!("lockkit/{name}"), Duration::from_secs(20))
        .unwrap();
    block(|| theirs.hear()).expect("nobody has it");
    block(|| theirs.end()).unwrap();
    below.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_granted_in_the_order_of_their_keys() {
    if no_etcd() {
        return;
    }
    let name = unique("order");
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(connect(&shared().url()).await);
    }
    // At another client: within one, the next would not be at the server yet.
    let first = connect(&shared().url()).await;
    let first = lock(&first, &name).acquire().await.unwrap();
    let mut waiting = Vec::new();
    for i in 0..40 {
        waiting.push(waiter(&lock(&clients[i % 4], &name)));
        if i < 4 {
            contend(shared(), &name, i + 2).await;
        }
    }
    let mut last = first.token();
    first.release().await.unwrap();
    let mut granted = Vec::new();
    for waiting in waiting {
        granted.push(tokio::spawn(async move {
            let (guard, at) = soon("each has its turn", waiting).await.unwrap();
            let token = guard.token();
            guard.release().await.unwrap();
            (at, token)
        }));
    }
    let mut order = Vec::new();
    for granted in granted {
        order.push(granted.await.unwrap());
    }
    order.sort_unstable();
    for (_, token) in order {
        assert!(token > last, "{token:?} was granted after {last:?}");
        last = token;
    }
    contend(shared(), &name, 0).await;
}

/// The number of times that each of a crowd is granted.
const CYCLES: u32 = 25;

/// With names of keys that come back, waiters hang here until their leases end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_on_one_name_all_get_on() {
    if no_etcd() {
        return;
    }
    let name = unique("crowd");
    let (inside, last) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let lock = lock(&connect(&shared().url()).await, &name);
        let (inside, last) = (inside.clone(), last.clone());
        tasks.push(tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            for _ in 0..CYCLES {
                let began = Instant::now();
                let guard = lock.acquire().await.unwrap();
                longest = longest.max(began.elapsed());
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                let token = guard.token().get();
                assert!(last.swap(token, Ordering::SeqCst) < token, "a token went back");
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
            longest
        }));
    }
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    for task in tasks {
        let done = tokio::time::timeout(Duration::from_mins(3), task).await;
        longest = longest.max(done.expect("none hangs").unwrap());
    }
    let each = began.elapsed() / (16 * CYCLES);
    eprintln!("16 on one name: {each:?} a lock, longest wait {longest:?}");
    // Who is found by the fallback poll alone waits for almost five seconds, and after that for its turn, as everybody does.
    let most = Duration::from_secs(3) + 3 * 16 * each;
    assert!(
        longest < most,
        "{longest:?}, at most {most:?}, at {each:?} a lock"
    );
}

/// A watch from a past revision is told up to 100 ms late, and later still on a server with much to tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_sleeper_is_woken_at_once_beside_writers() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let name = unique("handoff");
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let is_over = Arc::new(AtomicBool::new(false));
    let writer = {
        let (busy, is_over) = (lock(&ours, &unique("busy")), is_over.clone());
        tokio::spawn(async move {
            while !is_over.load(Ordering::SeqCst) {
                busy.acquire().await.unwrap().release().await.unwrap();
            }
        })
    };
    let (mut took, mut releases) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let guard = lock(&ours, &name).acquire().await.unwrap();
        let waiting = waiter(&lock(&theirs, &name));
        contend(&server, &name, 2).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
        let began = Instant::now();
        guard.release().await.unwrap();
        releases.push(began.elapsed());
        let (guard, at) = soon("it is its turn", waiting).await.unwrap();
        took.push(at.saturating_duration_since(began));
        guard.release().await.unwrap();
    }
    is_over.store(true, Ordering::SeqCst);
    writer.await.unwrap();
    took.sort_unstable();
    releases.sort_unstable();
    eprintln!("hand-off to a sleeper: {took:?}, releases: {releases:?}");
    // What is late is so by 100 ms. A release alone takes as long as this server and this machine need for one change.
    let most = Duration::from_millis(50) + 3 * releases[5];
    assert!(took[5] < most, "{took:?}, at most {most:?}");
}

/// Returns the number of messages that clients have sent to this method of a server.
fn messages(server: &EtcdServer, service: &str, method: &str, kind: &str) -> f64 {
    let labels =
        format!("grpc_method=\"{method}\",grpc_service=\"etcdserverpb.{service}\",grpc_type=\"{kind}\"");
    let figure = server.figure(&format!("grpc_server_msg_received_total{{{labels}}}"));
    figure.expect("each message is counted")
}

/// A watch of its key would take three more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_hold_costs_two_requests() {
    if no_etcd() {
        return;
    }
    let server = block(EtcdServer::plain).unwrap();
    let lock = lock(&connect(&server.url()).await, &unique("cost"));
    lock.acquire().await.unwrap().release().await.unwrap();
    let kv = |method| block(|| messages(&server, "KV", method, "unary"));
    let watches = || block(|| messages(&server, "Watch", "Watch", "bidi_stream"));
    let (began, before) = (
        Instant::now(),
        (kv("Txn"), kv("DeleteRange"), kv("Range"), watches()),
    );
    let (mut short, mut long) = (0, 0);
    // Where an acquisition alone takes too long for it, few are short, and the others show nothing.
    while short < 20 && short + long < 500 {
        let granted = Instant::now();
        let guard = lock.acquire().await.unwrap();
        // The driver has it in its care by then.
        tokio::time::sleep(Duration::from_millis(8)).await;
        // As long as it may have been held for at most.
        let held = granted.elapsed();
        guard.release().await.unwrap();
        *if held < Duration::from_millis(15) {
            &mut short
        } else {
            &mut long
        } += 1;
    }
    if short < 20 {
        eprintln!("only {short} holds were short, and {long} were not");
    }
    let cycles = f64::from(short + long);
    for (method, before) in [("Txn", before.0), ("DeleteRange", before.1)] {
        let each = (kv(method) - before) / cycles;
        assert!((0.99..1.01).contains(&each), "{each} × {method} a cycle");
    }
    let beats = (began.elapsed().as_secs_f64() / 2.5).ceil() + 1.0;
    let more = kv("Range") - before.2 + watches() - before.3;
    assert!(
        more <= f64::from(3 * long) + beats,
        "{more} more for {short} short holds and {long} others"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_try_leaves_no_key() {
    if no_etcd() {
        return;
    }
    let name = unique("try");
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let guard = lock(&ours, &name).acquire().await.unwrap();
    for lock in [lock(&theirs, &name), lock(&theirs, &name).shared()] {
        for _ in 0..10 {
            assert!(lock.try_acquire().await.unwrap().is_none());
        }
    }
    assert_eq!(block(|| keys(shared(), &name)).len(), 1);
    guard.release().await.unwrap();
    assert_eq!(block(|| keys(shared(), &name)).len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_waits_behind_a_queued_writer() {
    if no_etcd() {
        return;
    }
    let name = unique("behind");
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let reader = lock(&ours, &name).shared().acquire().await.unwrap();
    let beside = lock(&theirs, &name).shared().acquire().await.unwrap();
    let writer = waiter(&lock(&ours, &name));
    contend(shared(), &name, 3).await;
    let late = waiter(&lock(&theirs, &name).shared());
    contend(shared(), &name, 4).await;
    reader.release().await.unwrap();
    tokio::time::sleep(MOMENT).await;
    assert!(!writer.is_finished() && !late.is_finished());
    beside.release().await.unwrap();
    let (writer, _) = soon("the writer's turn", writer).await.unwrap();
    tokio::time::sleep(MOMENT).await;
    assert!(!late.is_finished());
    writer.release().await.unwrap();
    takes_its_turn("the reader's turn", late).await;
}

/// What other programs write behind the name need be no text, and keeps others out all the same.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_shows_what_any_key_holds() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

    if no_etcd() {
        return;
    }
    let (name, client) = (unique("bytes"), connect(&shared().url()).await);
    let key = [queue(&name).as_bytes(), b"\xff"].concat();
    let ctl = |command: &str, rest: &[&str]| {
        let mut ctl = shared().ctl_command();
        ctl.arg(command).arg(OsStr::from_bytes(&key)).args(rest);
        assert!(block(|| ctl.status()).unwrap().success());
    };
    ctl("put", &["x"]);
    assert!(lock(&client, &name).try_acquire().await.unwrap().is_none());
    let listed = client.list(&name).unwrap().next().await;
    let listed = listed.expect("it is held").unwrap();
    assert_eq!(listed.name.as_str(), name);
    assert_eq!(listed.state.holders.len(), 1);
    ctl("del", &[]);
}

/// Its pages are not of one revision, and what is listed from the second one on is not what the first one was of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_outlives_a_compaction_and_not_an_emptied_server() {
    // More than a page.
    const MANY: usize = 300;
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let client = connect(&server.url()).await;
    let mut guards = Vec::new();
    for i in 0..MANY {
        guards.push(lock(&client, &format!("many-{i}")).acquire().await.unwrap());
    }
    let mut list = client.list("").unwrap();
    let mut names = vec![list.next().await.expect("they are held").unwrap().name];
    block(|| {
        server.ctl(&["put", "busy", "x"]).unwrap();
        server.compact().unwrap();
    });
    while let Some(listed) = list.next().await {
        names.push(listed.unwrap().name);
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), MANY);

    let mut list = client.list("").unwrap();
    list.next().await.expect("they are held").unwrap();
    block(|| server.start_empty()).unwrap();
    eventually("it is connected again", async || {
        client.inspect("a").await.is_ok()
    })
    .await;
    let error = loop {
        match list.next().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("the half of it passes for all"),
        }
    };
    let text = chain(&error);
    assert!(text.contains("other data"), "{text}");
}

/// It watches more keys than a transaction of the servers may read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_for_one_of_200_permits_is_granted() {
    if no_etcd() {
        return;
    }
    let name = unique("permits");
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let options = AcquireOptions::new()
        .ttl(Duration::from_secs(60))
        .wait(Duration::from_secs(60));
    let permit = |client: &LockClient| {
        let permit = client.semaphore(&name, 200).unwrap();
        permit.with_options(options.clone())
    };
    let mut held = Vec::new();
    for _ in 0..200 {
        held.push(permit(&ours).acquire().await.unwrap());
    }
    assert!(permit(&theirs).try_acquire().await.unwrap().is_none());
    let waiting = waiter(&permit(&theirs));
    let all = format!("lockkit/%semaphores/{name}/");
    eventually("it waits", async || shared().keys(&all).unwrap().len() == 201).await;
    tokio::time::sleep(MOMENT).await;
    assert!(
        !waiting.is_finished(),
        "there are 201 permits, or none is waited for"
    );
    held.remove(77).release().await.unwrap();
    takes_its_turn("a permit is free", waiting).await;
    for guard in held {
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_ttl_is_another_lease() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let (name, client) = (unique("ttl"), connect(&server.url()).await);
    let guard = lock(&client, &name).acquire().await.unwrap();
    let token = guard.token();
    for seconds in [4, 60, 4] {
        let ttl = Duration::from_secs(seconds);
        guard.set_ttl(ttl).await.unwrap();
        let state = lock(&client, &name).inspect().await.unwrap();
        let left = state.holders[0].left.unwrap();
        assert!(left <= ttl && left > ttl / 3, "{left:?} of {ttl:?}");
        assert!(guard.lease_length().unwrap() <= ttl);
        assert_eq!(state.holders[0].token, token);
    }
    // One for each ttl, however many holds there are.
    let more = lock(&client, &unique("more")).acquire().await.unwrap();
    assert_eq!(block(|| server.leases()).unwrap().len(), 3);
    // It goes on with the lease that it has now.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    more.release().await.unwrap();
    contend(&server, &name, 0).await;
}

/// Whoever asks a holder for its lock writes to the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_written_to_goes_on_with_another_lease() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (name, client) = (unique("written"), connect(&server.url_at(proxy.addr())).await);
    let guard = lock(&client, &name).acquire().await.unwrap();
    let key = keys(&server, &name).remove(0);
    // Between the look at the key and the change there is time for a write.
    proxy.set(Mode::Delay {
        requests: Duration::from_millis(10),
        replies: Duration::from_millis(10),
    });
    let (is_over, written) = (AtomicBool::new(false), AtomicUsize::new(0));
    block(|| {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let put = ["put", &key, "--ignore-value", "--ignore-lease"];
                    server.ctl(&put).unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(40));
                }
            });
            let changed = tokio::runtime::Handle::current().block_on(async {
                while written.load(Ordering::Relaxed) <= 10 {
                    for seconds in [4, 60, 5, 61, 6, 62, 7, 63, 8, 64] {
                        guard.set_ttl(Duration::from_secs(seconds)).await?;
                    }
                }
                Ok::<(), Error>(())
            });
            is_over.store(true, Ordering::Relaxed);
            changed.unwrap();
            writer.join().unwrap();
        });
    });
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_that_cannot_be_kept_are_refused() {
    if no_etcd() {
        return;
    }
    let refused = |error: Error, option: &str, reason: &str| {
        let text = error.to_string();
        assert!(
            matches!(error, Error::InvalidOptions { option: found, .. } if found == option),
            "{text}"
        );
        assert!(text.contains(reason), "{text}");
    };
    let server = EtcdServer::plain().unwrap();
    let (name, client) = (unique("refused"), connect(&server.url()).await);
    let long = with_ttl(&client, &name, Duration::from_secs(301));
    refused(long.acquire().await.unwrap_err(), "ttl", "300s");
    let short = with_ttl(&client, &name, Duration::from_secs(1));
    refused(short.acquire().await.unwrap_err(), "ttl", "2 s or more");
    // The lease that was too long is not left behind.
    assert_eq!(block(|| server.leases()).unwrap().len(), 0);
    let many = client.semaphore(&name, 1_001).unwrap();
    refused(many.acquire().await.unwrap_err(), "permits", "1000");
    let handoffs = AcquireOptions::new().local_handoffs(4);
    let lock = lock(&client, &name);
    refused(
        lock.acquire_with(&handoffs).await.unwrap_err(),
        "local_handoffs",
        "order",
    );
    let guard = lock.acquire().await.unwrap();
    refused(
        guard.set_ttl(Duration::from_secs(301)).await.unwrap_err(),
        "ttl",
        "300s",
    );
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// Another ttl for the hold would put its key anew, with the label, and that would read as the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_asks_for_no_hold() {
    if no_etcd() {
        return;
    }
    let client = connect(&shared().url()).await;
    let labelled = async |label: &str| {
        let options = AcquireOptions::new().label(label);
        client.lock(unique("label")).unwrap().acquire_with(&options).await
    };
    for label in ["\0asked\0", "\0asked\0by nobody"] {
        let refused = labelled(label).await;
        assert!(
            matches!(refused, Err(Error::InvalidOptions { option: "label", .. })),
            "{refused:?}"
        );
    }
    let guard = labelled("asked").await.unwrap();
    guard.set_ttl(Duration::from_secs(60)).await.unwrap();
    guard.check().unwrap();
    guard.release().await.unwrap();
}
