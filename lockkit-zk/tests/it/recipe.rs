//! The layout on the server, other clients of it, and the order of grants.

use std::{fmt::Display, net::Ipv4Addr, time::Duration};

use futures_util::future::join_all;
use lockkit_conformance::Traces;
use lockkit_core::{
    AcquireOptions, Error, LockClient, LockName, LossReason, Revocation,
    spi::{Backend as _, ClaimRequest, Mode as SpiMode, OwnerId, chain},
};
use lockkit_testbed::{Mode, Proxy, eventually, hangs_up, own_address, zookeeper::ZkServer};
use lockkit_zk::{Access, Digest, Nodes, Parents, ZkBackend};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use crate::server::{
    self, children, connect, contend, contender, dir, lock, no_zookeeper, raw, shared, soon, takes_its_turn,
    unique, waiter,
};

const GUID: &str = "_c_0b1fdd6a-8b6c-4d0e-9f43-1f0f6d0b7c11";

fn sequence(node: &str) -> i64 {
    node[node.len() - 10..].parse().unwrap()
}

/// Returns the next holder by the rule of Curator's `InterProcessMutex`: the first by what follows `lock-`, or by the whole
/// name where there is no `lock-`.
fn first_by_curators_rule(children: &[String]) -> Option<&String> {
    children.iter().min_by_key(|child| {
        child
            .rfind("lock-")
            .map_or(child.as_str(), |at| &child[at + "lock-".len()..])
    })
}

#[tokio::test]
async fn the_token_is_the_transaction_that_made_the_node() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("token"), raw(shared().addr()).await);
    let client = connect(shared().addr()).await;
    let options = AcquireOptions::new().label("billing@host-7");
    for lock in [
        lock(&client, &name).with_options(options.clone()),
        lock(&client, &name).shared().with_options(options),
    ] {
        let guard = lock.acquire().await.unwrap();
        let [node] = &children(&raw, &name).await[..] else {
            panic!("one node expected");
        };
        let marker = if guard.name() == lock.name() && node.contains("__READ__") {
            "-__READ__-lock-"
        } else {
            "-lock-"
        };
        assert!(
            node.starts_with("_c_") && node[39..].starts_with(marker),
            "{node}"
        );
        let (data, stat) = raw.get_data(&format!("{}/{node}", dir(&name))).await.unwrap();
        assert_eq!(u64::try_from(stat.czxid).unwrap(), guard.token().get());
        assert_ne!(stat.ephemeral_owner, 0);
        assert_eq!(data, b"billing@host-7");
        guard.release().await.unwrap();
        assert_eq!(children(&raw, &name).await, [""; 0]);
    }
}

#[tokio::test]
async fn curators_mutex_and_ours_exclude_each_other() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("curator"), raw(shared().addr()).await);
    let client = connect(shared().addr()).await;
    let (writer, reader) = (lock(&client, &name), lock(&client, &name).shared());

    // Theirs comes first.
    let theirs = contender(&raw, &dir(&name), &format!("{GUID}-lock-")).await;
    assert!(writer.try_acquire().await.unwrap().is_none());
    assert!(reader.try_acquire().await.unwrap().is_none());
    let state = client.inspect(&name).await.unwrap();
    assert_eq!(state.holders[0].label.as_deref(), Some("10.0.0.7"), "{state:?}");
    assert_eq!(state.holders[0].left, None, "nobody knows");
    let waiting = waiter(&writer);
    contend(&raw, &name, 2).await;
    raw.delete(&theirs, None).await.unwrap();
    let (guard, _) = soon("the other client released", waiting).await.unwrap();

    // Ours comes first, exclusive and shared.
    let theirs = contender(&raw, &dir(&name), &format!("{GUID}-lock-")).await;
    assert!(!theirs.ends_with(first_by_curators_rule(&children(&raw, &name).await).unwrap()));
    guard.release().await.unwrap();
    assert!(theirs.ends_with(first_by_curators_rule(&children(&raw, &name).await).unwrap()));
    raw.delete(&theirs, None).await.unwrap();
    let guard = reader.acquire().await.unwrap();
    let theirs = contender(&raw, &dir(&name), &format!("{GUID}-lock-")).await;
    assert!(!theirs.ends_with(first_by_curators_rule(&children(&raw, &name).await).unwrap()));
    guard.release().await.unwrap();
    assert!(theirs.ends_with(first_by_curators_rule(&children(&raw, &name).await).unwrap()));
}

#[tokio::test]
async fn curators_read_write_lock_and_ours_exclude_each_other() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("curator-rw"), raw(shared().addr()).await);
    let mut config = server::config(shared().addr());
    config.nodes = Nodes::ReadWrite;
    let client = server::patiently(config).await;
    let (writer, reader) = (lock(&client, &name), lock(&client, &name).shared());

    let their_read = contender(&raw, &dir(&name), &format!("{GUID}-__READ__")).await;
    assert!(writer.try_acquire().await.unwrap().is_none());
    let ours = reader
        .try_acquire()
        .await
        .unwrap()
        .expect("readers are in together");
    let their_write = contender(&raw, &dir(&name), &format!("{GUID}-__WRIT__")).await;
    assert!(reader.try_acquire().await.unwrap().is_none(), "a writer waits");
    raw.delete(&their_read, None).await.unwrap();
    ours.release().await.unwrap();
    assert!(writer.try_acquire().await.unwrap().is_none(), "it is theirs now");
    raw.delete(&their_write, None).await.unwrap();
    let ours = writer.try_acquire().await.unwrap().expect("it is free");
    let node = &children(&raw, &name).await[0];
    assert!(node[39..].starts_with("-__WRIT__"), "{node}");
    ours.release().await.unwrap();
}

#[tokio::test]
async fn kazoos_lock_is_waited_for() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("kazoo"), raw(shared().addr()).await);
    let writer = lock(&connect(shared().addr()).await, &name);
    let theirs = contender(&raw, &dir(&name), "5d41402abc4b2a76b9719d911017c592__lock__").await;
    assert!(writer.try_acquire().await.unwrap().is_none());
    raw.delete(&theirs, None).await.unwrap();
    assert!(writer.try_acquire().await.unwrap().is_some());
}

/// Curator's `Revoker` writes so, to ask a holder to make way.
#[tokio::test]
async fn a_node_that_somebody_writes_to_is_waited_for() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("written"), raw(shared().addr()).await);
    let ours = lock(&connect(shared().addr()).await, &name);
    let theirs = contender(&raw, &dir(&name), &format!("{GUID}-lock-")).await;
    let waits = tokio::spawn(async move { ours.acquire_timeout(Duration::from_secs(1)).await });
    contend(&raw, &name, 2).await;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        raw.set_data(&theirs, b"__REVOKE__", None).await.unwrap();
    }
    let waited = soon("it gives up", waits).await.unwrap();
    assert!(matches!(waited, Err(Error::Timeout { .. })), "{waited:?}");
}

#[tokio::test]
async fn a_holder_heeds_curators_revoker() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("revoker"), raw(shared().addr()).await);
    let client = connect(shared().addr()).await;
    let guard = lock(&client, &name).acquire().await.unwrap();
    let [node] = &children(&raw, &name).await[..] else {
        panic!("one node expected");
    };
    let path = format!("{}/{node}", dir(&name));
    raw.set_data(&path, b"something else", None).await.unwrap();
    guard.renew().await.unwrap();
    assert!(guard.is_held());
    raw.set_data(&path, b"__REVOKE__", None).await.unwrap();
    assert_eq!(soon("it is told", guard.lost()).await, LossReason::Asked);
    let state = client.inspect(&name).await.unwrap();
    assert_eq!((state.holders.len(), &state.holders[0].label), (1, &None));
    drop(guard);
    let next = soon("it makes way", lock(&client, &name).acquire())
        .await
        .unwrap();
    next.release().await.unwrap();
}

/// The server counts no lease: the holder's client ends the hold, as it does for a user who has let go.
#[tokio::test]
async fn the_end_of_a_lease_looks_like_a_confirmation() {
    if no_zookeeper() {
        return;
    }
    let (name, operator) = (unique("stays"), connect(shared().addr()).await);
    let client = server::brief_client(shared().addr()).await;
    let guard = lock(&client, &name).acquire().await.unwrap();
    let said = operator
        .revoke(&name, guard.token(), Duration::from_secs(20))
        .await;
    assert_eq!(said.unwrap(), Revocation::Confirmed);
    assert_eq!(guard.lost().await, LossReason::Asked);
    assert!(guard.valid_until().unwrap() <= tokio::time::Instant::now());
}

/// Anybody may choose that label. It asks for nothing.
#[tokio::test]
async fn a_label_that_reads_like_a_request_is_none() {
    if no_zookeeper() {
        return;
    }
    let (name, client) = (unique("label"), connect(shared().addr()).await);
    let options = AcquireOptions::new().label("__REVOKE__");
    let labelled = lock(&client, &name).with_options(options);
    let guard = labelled.acquire().await.unwrap();
    let renewed = guard.renew().await;
    assert!(renewed.is_ok() && guard.is_held(), "{renewed:?}");
    let state = client.inspect(&name).await.unwrap();
    assert_eq!(state.holders[0].label.as_deref(), Some("__REVOKE__"));
    let asked = client.revoke(&name, guard.token(), Duration::ZERO).await;
    assert!(matches!(asked, Ok(Revocation::StillHeld { .. })), "{asked:?}");
    assert_eq!(soon("it is told", guard.lost()).await, LossReason::Asked);
    drop(guard);
}

#[tokio::test]
async fn other_nodes_in_the_directory_are_nobody() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("junk"), raw(shared().addr()).await);
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    raw.mkdir(&format!("{}/config", dir(&name)), &persistent)
        .await
        .unwrap();
    let client = connect(shared().addr()).await;
    let guard = lock(&client, &name).acquire().await.unwrap();
    let state = client.inspect(&name).await.unwrap();
    assert_eq!((state.holders.len(), state.waiters), (1, Some(0)));
    guard.release().await.unwrap();
}

/// The claim was given up and begins anew, before its session has deleted what it had.
#[tokio::test]
async fn a_try_is_not_kept_out_by_its_own_earlier_node() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("earlier"), raw(shared().addr()).await);
    let backend = ZkBackend::connect(server::config(shared().addr())).await.unwrap();
    let ttl = Duration::from_secs(60);
    let request = ClaimRequest::new(
        LockName::new(&name).unwrap(),
        SpiMode::Exclusive,
        ttl,
        OwnerId::new(7),
    );
    let mut claim = backend.claim(&request).await.unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    claim.release().await.unwrap();
    // The name of the node that it had.
    contender(&raw, &dir(&name), "_c_00000000-0000-0000-0000-000000000007-lock-").await;
    let granted = claim.attempt(Duration::ZERO).await.unwrap();
    granted.expect("nobody else is there");
    assert_eq!(children(&raw, &name).await.len(), 1);
    claim.release().await.unwrap();
    backend.close().await.unwrap();
}

/// Returns a client of a namespace of its own, and the directory of that, which is there already.
async fn in_own_namespace(raw: &Client, test: &str, addrs: impl Display) -> (LockClient, String) {
    let mut config = server::config(addrs);
    config.namespace = unique(test);
    let root = format!("/{}", config.namespace);
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    raw.mkdir(&root, &options).await.unwrap();
    (server::only_connected(config).await, root)
}

/// It is made by whoever locks first.
#[tokio::test]
async fn looking_makes_no_node() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let mut config = server::config(shared().addr());
    config.namespace = unique("untouched");
    let root = format!("/{}", config.namespace);
    let is_there = async |path: &str| raw.check_stat(path).await.unwrap().is_some();
    let client = server::only_connected(config).await;
    assert!(client.inspect("n").await.unwrap().is_free());
    assert!(client.list("").unwrap().next().await.is_none());
    let fence = client.fence().await.unwrap();
    // Longer than from one heartbeat to the next.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(!is_there(&root).await, "looking and living on write nothing");
    let guard = lock(&client, "n").acquire().await.unwrap();
    assert!(guard.token() > fence);
    assert!(is_there(&format!("{root}/%sessions")).await && is_there(&format!("{root}/n")).await);
    assert!(client.fence().await.unwrap() >= guard.token());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn who_may_only_read_can_look() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let mut config = server::config(shared().addr());
    config.namespace = unique("readable");
    let root = format!("/{}", config.namespace);
    let holder = server::patiently(config.clone()).await;
    let guard = lock(&holder, "job").acquire().await.unwrap();
    let acl = [Acl::new(Permission::READ, AuthId::anyone())];
    for dir in [&root, &format!("{root}/job"), &format!("{root}/%sessions")] {
        raw.set_acl(dir, &acl, None).await.unwrap();
    }
    let looker = server::only_connected(config).await;
    let state = looker.inspect("job").await.unwrap();
    assert_eq!(state.holders[0].token, guard.token());
    let found = looker.list("").unwrap().next().await.unwrap().unwrap();
    assert_eq!(found.name.as_str(), "job");
    assert!(looker.fence().await.unwrap() >= guard.token());
    let refused = lock(&looker, "other").try_acquire().await.unwrap_err();
    let said = chain(&refused);
    assert!(
        !refused.is_transient() && said.contains(&format!("{root}/%sessions")),
        "{said}"
    );
    assert!(guard.is_held());
}

/// Somebody has written what lockkit never does where tokens are raised.
#[tokio::test]
async fn a_hold_without_a_token_is_an_error_and_not_free() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let (client, root) = in_own_namespace(&raw, "tokenless", shared().addr()).await;
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let base = u64::MAX.to_string();
    raw.create(&format!("{root}/%fence"), base.as_bytes(), &options)
        .await
        .unwrap();
    contender(&raw, &format!("{root}/job"), &format!("{GUID}-lock-")).await;
    let errors = [
        client.inspect("job").await.unwrap_err(),
        client
            .list("")
            .unwrap()
            .next()
            .await
            .expect("it is held")
            .unwrap_err(),
    ];
    for error in errors {
        let said = chain(&error);
        assert!(
            !error.is_transient() && said.contains("no tokens are left"),
            "{said}"
        );
    }
}

#[tokio::test]
async fn a_list_names_what_may_not_be_read() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let (client, root) = in_own_namespace(&raw, "unreadable", shared().addr()).await;
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let secret = format!("{root}/secret");
    raw.create(&secret, b"", &options).await.unwrap();
    let acl = [Acl::new(Permission::CREATE, AuthId::anyone())];
    raw.set_acl(&secret, &acl, None).await.unwrap();
    let error = client
        .list("")
        .unwrap()
        .next()
        .await
        .expect("not as if it were free")
        .unwrap_err();
    let said = chain(&error);
    assert!(!error.is_transient() && said.contains(&secret), "{said}");
}

/// Nobody has it throughout. The one beside it is shown.
#[tokio::test]
async fn a_lock_that_is_passed_on_and_on_ends_no_list() {
    const WAY: Duration = Duration::from_millis(50);

    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let proxy = Proxy::start(shared().addr()).unwrap();
    let (client, root) = in_own_namespace(&raw, "busy", proxy.addr()).await;
    let steady = lock(&client, "steady").acquire().await.unwrap();
    let busy = format!("{root}/busy");
    let passing = tokio::spawn(async move {
        let mut before = contender(&raw, &busy, &format!("{GUID}-lock-")).await;
        loop {
            let next = contender(&raw, &busy, &format!("{GUID}-lock-")).await;
            raw.delete(&before, None).await.unwrap();
            before = next;
            tokio::time::sleep(WAY / 10).await;
        }
    });
    // Whoever is listed has gone long before its node is read.
    proxy.set(Mode::Delay {
        requests: WAY,
        replies: WAY,
    });
    let mut list = client.list("").unwrap();
    let mut names = Vec::new();
    while let Some(found) = soon("a page", list.next()).await {
        names.push(found.unwrap().name.as_str().to_owned());
    }
    assert!(names.contains(&"steady".to_owned()), "{names:?}");
    assert!(!passing.is_finished(), "nobody was in the way");
    passing.abort();
    proxy.set(Mode::Pass);
    steady.release().await.unwrap();
}

async fn clients(many: usize) -> Vec<LockClient> {
    join_all((0..many).map(|_| connect(shared().addr()))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_waiters_are_granted_in_order_of_numbers() {
    const WAITERS: usize = 200;

    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("order"), raw(shared().addr()).await);
    let holder = lock(&connect(shared().addr()).await, &name)
        .acquire()
        .await
        .unwrap();
    let mut waiters = Vec::new();
    for client in clients(WAITERS).await {
        let lock = lock(&client, &name);
        waiters.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            let (token, granted) = (guard.token().get(), std::time::Instant::now());
            guard.release().await.unwrap();
            (granted, token)
        }));
    }
    contend(&raw, &name, WAITERS + 1).await;
    let mut queue = children(&raw, &name).await;
    queue.sort_unstable_by_key(|node| sequence(node));
    let paths: Vec<_> = queue
        .iter()
        .map(|node| format!("{}/{node}", dir(&name)))
        .collect();
    let stats = join_all(paths.iter().map(|path| raw.check_stat(path))).await;
    let by_number: Vec<_> = stats
        .into_iter()
        .map(|stat| u64::try_from(stat.unwrap().unwrap().czxid).unwrap())
        .collect();
    assert!(by_number.is_sorted());
    assert_eq!(by_number[0], holder.token().get());
    holder.release().await.unwrap();
    let mut grants: Vec<_> = soon("all are granted", join_all(waiters))
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    grants.sort_unstable();
    let by_grant: Vec<_> = grants.into_iter().map(|(_, token)| token).collect();
    assert_eq!(by_grant, by_number[1..]);
}

#[tokio::test]
async fn a_release_wakes_one_waiter_and_no_other() {
    const WAITERS: usize = 10;

    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (name, raw) = (unique("one"), raw(server.addr()).await);
    let mut config = server::config(server.addr());
    // Heartbeats are 2.5 s apart.
    config.session_timeout = Duration::from_secs(60);
    let holder = server::patiently(config.clone()).await;
    let mut held = lock(&holder, &name).acquire().await.unwrap();
    let mut proxies = Vec::new();
    let mut waiters = Vec::new();
    for waiting in 0..WAITERS {
        let proxy = Proxy::start(server.addr()).unwrap();
        config.servers = proxy.addr().to_string().into();
        let client = server::patiently(config.clone()).await;
        waiters.push(waiter(&lock(&client, &name)));
        contend(&raw, &name, waiting + 2).await;
        proxies.push(proxy);
    }
    let mut told = Vec::new();
    let mut packets = Vec::new();
    for waiter in waiters {
        // Each watches one before it. The holder watches its own node from some milliseconds after the grant on. A waiter
        // that saw nobody but the first holder watches its own node as well.
        eventually("all watch", async || {
            let watches = 1 + WAITERS - told.len() + usize::from(told.is_empty());
            server::watches(&server) == watches
        })
        .await;
        let before: Vec<_> = proxies
            .iter()
            .map(|proxy| proxy.counts().replies.chunks)
            .collect();
        let sent = server.figure("zk_packets_sent").unwrap();
        held.release().await.unwrap();
        (held, _) = soon("the next is granted", waiter).await.unwrap();
        packets.push(server.figure("zk_packets_sent").unwrap() - sent);
        let after = proxies.iter().map(|proxy| proxy.counts().replies.chunks);
        // The client that released may be behind a proxy too, and gets a reply.
        let woken = after
            .zip(before)
            .skip(told.len())
            .filter(|(after, before)| after > before);
        told.push(woken.count());
    }
    held.release().await.unwrap();
    // A heartbeat may have come in between, now and then.
    let mut sorted = told.clone();
    sorted.sort_unstable();
    assert_eq!(
        sorted[WAITERS / 2],
        1,
        "so many waiters were told something, by release: {told:?}"
    );
    // The releaser and the next each get some packets. Nobody else gets any, however many wait.
    let (many, few) = packets.split_at_mut(WAITERS / 2);
    many.sort_unstable();
    few.sort_unstable();
    assert!(
        many[many.len() / 2] <= few[few.len() / 2] + 2,
        "packets that the server sent, by release: {many:?} with many waiters, {few:?} with few"
    );
    eventually("no watch is left", async || server::watches(&server) == 0).await;
}

#[tokio::test]
async fn sequence_numbers_run_out_and_the_directory_is_begun_anew() {
    const LAST: i32 = i32::MAX - (1 << 20);

    if no_zookeeper() {
        return;
    }
    let server = ZkServer::builder().used("/locks", LAST - 2).start().unwrap();
    let mut config = server::config(server.addr());
    config.namespace = String::new();
    let (client, other) = (
        server::patiently(config.clone()).await,
        server::patiently(config).await,
    );
    let raw = raw(server.addr()).await;
    let (ours, others) = (lock(&client, "locks"), lock(&other, "locks"));
    let number = async || {
        let nodes = raw.list_children("/locks").await.unwrap();
        sequence(nodes.iter().find(|node| node.starts_with("_c_")).unwrap())
    };
    let mut tokens = Vec::new();
    for expected in [LAST - 2, LAST - 1, LAST] {
        let guard = ours.acquire().await.unwrap();
        assert_eq!(number().await, i64::from(expected));
        tokens.push(guard.token());
        guard.release().await.unwrap();
    }
    // The numbers are used up. While somebody holds, newcomers are refused.
    let theirs = contender(&raw, "/locks", &format!("{GUID}-lock-")).await;
    let error = others.try_acquire().await.map(|guard| guard.is_some());
    assert!(matches!(error, Ok(false)), "it is taken: {error:?}");
    let error = others
        .acquire_timeout(Duration::from_millis(300))
        .await
        .unwrap_err();
    let told = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(
        !error.is_timeout() && told.contains("/locks has (nearly) run out"),
        "{told}"
    );
    let waiting = waiter(&others);
    raw.delete(&theirs, None).await.unwrap();
    let (guard, _) = soon("the directory is begun anew", waiting).await.unwrap();
    assert!(number().await < 10, "{} is no new directory's", number().await);
    tokens.push(guard.token());
    guard.release().await.unwrap();
    let guard = ours.acquire().await.unwrap();
    tokens.push(guard.token());
    assert!(tokens.is_sorted(), "{tokens:?}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn numbers_at_their_very_end_let_nobody_in_twice() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::builder().used("/locks", i32::MAX - 1).start().unwrap();
    let mut config = server::config(server.addr());
    config.namespace = String::new();
    let mut tasks = Vec::new();
    let inside = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    for _ in 0..6 {
        let client = server::patiently(config.clone()).await;
        let (lock, inside) = (lock(&client, "locks"), inside.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..5 {
                let guard = lock.acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                tokio::time::sleep(Duration::from_millis(1)).await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        }));
    }
    for task in soon("all have been in", join_all(tasks)).await {
        task.unwrap();
    }
}

#[tokio::test]
async fn tokens_rise_across_a_reaped_directory() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("reaped"), raw(shared().addr()).await);
    let lock = lock(&connect(shared().addr()).await, &name);
    let mut last = 0;
    for _ in 0..2 {
        let guard = lock.acquire().await.unwrap();
        assert!(guard.token().get() > last);
        last = guard.token().get();
        assert_eq!(sequence(&children(&raw, &name).await[0]), 0);
        guard.release().await.unwrap();
        eventually("the server removes the directory", async || {
            raw.check_stat(&dir(&name)).await.unwrap().is_none()
        })
        .await;
    }
}

#[tokio::test]
async fn persistent_directories_stay() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("stays"), raw(shared().addr()).await);
    let mut config = server::config(shared().addr());
    config.namespace = unique("persistent");
    config.parents = Parents::Persistent;
    let namespace = config.namespace.clone();
    let client = server::patiently(config).await;
    lock(&client, &name)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(700)).await;
    let dir = format!("/{namespace}/{name}");
    assert!(raw.check_stat(&dir).await.unwrap().is_some(), "{dir}");
}

#[tokio::test]
async fn a_directory_that_may_not_be_written_is_good_enough() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("readonly"), raw(shared().addr()).await);
    let rights = Permission::CREATE | Permission::READ | Permission::DELETE;
    let acl = [Acl::new(rights, AuthId::anyone())];
    let parents = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let _ = raw.mkdir("/lockkit", &parents).await;
    // A server deletes an empty container, so this is none.
    let options = CreateMode::Persistent.with_acls(Acls::new(&acl));
    raw.create(&dir(&name), b"theirs", &options).await.unwrap();
    let (ours, theirs) = (connect(shared().addr()).await, connect(shared().addr()).await);
    let guard = lock(&ours, &name).acquire().await.unwrap();
    assert!(lock(&theirs, &name).try_acquire().await.unwrap().is_none());
    let stat = raw.check_stat(&format!("{}/{}", dir(&name), children(&raw, &name).await[0]));
    assert_eq!(
        u64::try_from(stat.await.unwrap().unwrap().czxid).unwrap(),
        guard.token().get()
    );
    guard.release().await.unwrap();
    assert_eq!(raw.get_data(&dir(&name)).await.unwrap().0, b"theirs");
}

#[tokio::test]
async fn what_is_made_is_its_creators_alone() {
    if no_zookeeper() {
        return;
    }
    let name = unique("private");
    let mut config = server::config(shared().addr());
    config.namespace = unique("creator");
    config.auth = Some(Digest::new("me", "secret"));
    let client = server::patiently(config.clone()).await;
    let guard = lock(&client, &name).acquire().await.unwrap();
    let namespace = config.namespace.clone();
    let raw = raw(shared().addr()).await;
    let denied = raw.list_children(&format!("/{namespace}/{name}")).await;
    assert_eq!(denied, Err(zookeeper_client::Error::NoAuth));
    config.auth = Some(Digest::new("me", "wrong-one"));
    let stranger = server::client(config).await.unwrap();
    let error = lock(&stranger, "another").acquire().await.unwrap_err();
    assert!(
        matches!(error, Error::Backend { .. }) && !error.is_transient(),
        "{error:?}"
    );
    assert!(!format!("{error:?} {error}").contains("wrong-one"));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_reader_waits_behind_a_queued_writer_also_of_its_own_client() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("downgrade"), raw(shared().addr()).await);
    let (ours, theirs) = (connect(shared().addr()).await, connect(shared().addr()).await);
    let held = lock(&ours, &name).acquire().await.unwrap();
    let writer = waiter(&lock(&theirs, &name));
    contend(&raw, &name, 2).await;
    let reader = waiter(&lock(&ours, &name).shared());
    contend(&raw, &name, 3).await;
    held.release().await.unwrap();
    let (written, _) = soon("the writer was first", writer).await.unwrap();
    assert!(!reader.is_finished(), "a reader came past a writer");
    written.release().await.unwrap();
    let (read, _) = soon("the reader is next", reader).await.unwrap();
    // A reader does not wait for later writers.
    let later = waiter(&lock(&theirs, &name));
    contend(&raw, &name, 2).await;
    assert!(read.is_held() && !later.is_finished());
    read.release().await.unwrap();
    takes_its_turn("the later writer", later).await;
}

#[tokio::test]
async fn options_that_cannot_be_kept_are_refused() {
    if no_zookeeper() {
        return;
    }
    let refused = |outcome: lockkit_core::Result<LockClient>, named: &str| match outcome {
        Err(Error::InvalidOptions { option, .. }) => assert_eq!(option, named),
        other => panic!("expected `{named}` to be refused, got {other:?}"),
    };
    // The server grants a minute at most.
    let mut config = server::config(shared().addr());
    config.session_timeout = Duration::from_secs(500);
    config.tick_time = Duration::from_secs(13);
    refused(server::client(config.clone()).await, "session_timeout");
    config.session_timeout = Duration::from_secs(1);
    refused(server::client(config).await, "session_timeout");
    let client = connect(shared().addr()).await;
    let many = client.semaphore("many", 1_001).unwrap().try_acquire().await;
    assert!(
        matches!(
            many,
            Err(Error::InvalidOptions {
                option: "permits",
                ..
            })
        ),
        "{many:?}"
    );
}

/// Shows that the rule as written above keeps a foreign mutex out.
#[test]
fn curators_rule_sorts_by_what_follows_lock() {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let all = list(&["_c_b-lock-0000000002", "_c_z-__READ__-lock-0000000001"]);
    assert_eq!(first_by_curators_rule(&all), Some(&all[1]));
    let all = list(&["_c_b-lock-0000000002", "_c_z-__READ__0000000001"]);
    assert_eq!(
        first_by_curators_rule(&all),
        Some(&all[0]),
        "its name sorts behind all numbers"
    );
}

/// A lock of the empty namespace may have a namespace's name.
#[tokio::test]
async fn a_directory_is_no_simple_lock_and_says_so() {
    if no_zookeeper() {
        return;
    }
    let mut config = server::config(shared().addr());
    config.namespace = unique("namespace");
    let others = server::patiently(config.clone()).await;
    let guard = others.lock("n").unwrap().acquire().await.unwrap();
    guard.release().await.unwrap();
    let name = std::mem::take(&mut config.namespace);
    config.nodes = Nodes::Simple;
    let ours = server::patiently(config).await;
    for error in [
        soon("refused", ours.lock(&name).unwrap().try_acquire())
            .await
            .unwrap_err(),
        soon("refused", ours.lock(&name).unwrap().acquire())
            .await
            .unwrap_err(),
    ] {
        assert!(!error.is_transient(), "{error:?}");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert!(
            source.is_some_and(|source| source.contains("is a directory")),
            "{error:?}"
        );
    }
    let inspected = ours.lock(&name).unwrap().inspect().await.unwrap();
    assert!(inspected.is_free(), "{inspected:?}");
}

#[tokio::test]
async fn directories_that_others_may_change_are_warned_about_once() {
    if no_zookeeper() {
        return;
    }
    let mine = Client::connector()
        .with_auth("digest", b"me:canary")
        .connect(&shared().addr().to_string())
        .await
        .unwrap();
    let (anyone, other) = (AuthId::anyone(), AuthId::new("digest", "other:x"));
    let me = AuthId::new("digest", "me:QDi1OoWHa1RzOuea/KDdGdW8wsY=");
    let by = |who: &AuthId, may| Acl::new(may, who.clone());
    let writes = Permission::CREATE | Permission::DELETE;
    for (acl, access, is_open) in [
        (None, Access::Creator, false),
        (Some(vec![by(&anyone, Permission::ALL)]), Access::Creator, true),
        (Some(vec![by(&anyone, Permission::ALL)]), Access::Everyone, false),
        (
            Some(vec![by(&anyone, Permission::CREATE), by(&me, Permission::ALL)]),
            Access::Creator,
            true,
        ),
        (
            Some(vec![by(&anyone, Permission::READ), by(&me, Permission::ALL)]),
            Access::Creator,
            false,
        ),
        (
            Some(vec![by(&other, writes), by(&me, Permission::ALL)]),
            Access::Creator,
            true,
        ),
    ] {
        for at in ["chroot", "namespace"] {
            let (chroot, namespace) = (format!("/{}", unique("chroot")), unique("open"));
            let path = match at {
                "chroot" => chroot.clone(),
                _ => format!("{chroot}/{namespace}"),
            };
            if let Some(acl) = &acl {
                if at != "chroot" {
                    let parent = CreateMode::Persistent.with_acls(Acls::creator_all());
                    mine.create(&chroot, b"", &parent).await.unwrap();
                }
                let options = CreateMode::Persistent.with_acls(Acls::new(acl));
                mine.create(&path, b"", &options).await.unwrap();
            }
            let mut config = server::config(format!("{}{chroot}", shared().addr()));
            config.namespace = namespace;
            config.auth = Some(Digest::new("me", "canary"));
            config.access = Some(access);
            let traces = Traces::default();
            let _recording = tracing::subscriber::set_default(traces.clone());
            let client = server::patiently(config).await;
            let guard = lock(&client, "a").acquire().await.unwrap();
            guard.release().await.unwrap();
            let text = traces.text();
            let warnings: Vec<_> = text
                .lines()
                .filter(|line| line.contains("others may create"))
                .collect();
            assert_eq!(
                warnings.len(),
                usize::from(is_open),
                "{at} {acl:?} {access:?}: {text}"
            );
            assert!(!is_open || warnings[0].contains(&path), "{text}");
        }
    }
}

/// What goes to an address of this machine's own stays on it, too, but that is not known.
#[tokio::test]
async fn a_password_beyond_this_host_is_warned_about_once() {
    for (at, expected) in [(Some(Ipv4Addr::LOCALHOST.into()), 0), (own_address(), 1)] {
        let Some(at) = at else { continue };
        let addr = hangs_up(at).unwrap();
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        let mut config = server::config(addr);
        config.auth = Some(Digest::new("me", "canary"));
        server::client(config).await.unwrap_err();
        let text = traces.text();
        assert_eq!(
            text.matches("is not encrypted").count(),
            expected,
            "{addr}: {text}"
        );
        assert!(!text.contains("canary"), "{text}");
    }
}
