//! Crowded directories: clients do without the list where they can, and nobody is granted too early for that.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use futures_util::future::join_all;
use lockkit_core::{AcquireOptions, Error, Lock, LockClient, LossReason};
use lockkit_testbed::{Mode, Proxy, eventually, zookeeper::ZkServer};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use crate::server::{
    self, children, connect, contend, contender, dir, expects_several, in_order, lock, no_zookeeper, raw,
    shared, soon, takes_its_turn, unique, unless_still, waiter,
};

/// More contenders than make a crowd.
const MANY: usize = 80;
/// Fewer bytes than the list of so many, and more than all other replies.
const SHORT: u64 = 2_500;
const GUID: &str = "_c_0b1fdd6a-8b6c-4d0e-9f43-";

/// Nodes of another client, before or behind ours.
struct Foreign {
    raw: Client,
    name: String,
    paths: Vec<String>,
}

impl Foreign {
    /// Makes so many contenders in a directory of their own.
    async fn new(server: &ZkServer, test: &str) -> Self {
        let mut foreign = Self {
            raw: raw(server.addr()).await,
            name: unique(test),
            paths: Vec::new(),
        };
        foreign.come("a").await;
        foreign
    }

    async fn come(&mut self, mark: &str) {
        let dir = dir(&self.name);
        let prefixes: Vec<_> = (0..MANY).map(|i| format!("{GUID}{mark}{i:011}-lock-")).collect();
        let made = prefixes.iter().map(|prefix| contender(&self.raw, &dir, prefix));
        self.paths.extend(join_all(made).await);
    }

    /// Deletes the first of them.
    async fn go(&mut self) {
        let gone = self.paths.drain(..MANY);
        let gone: Vec<_> = gone.collect();
        for deleted in join_all(gone.iter().map(|path| self.raw.delete(path, None))).await {
            deleted.unwrap();
        }
    }

    fn lock(&self, client: &LockClient) -> Lock {
        lock(client, &self.name)
    }

    /// Waits until there are theirs and so many of ours.
    async fn contend(&self, ours: usize) {
        contend(&self.raw, &self.name, self.paths.len() + ours).await;
    }

    /// Returns the node that came last.
    async fn last(&self) -> String {
        let mut nodes = children(&self.raw, &self.name).await;
        nodes.sort_unstable_by(|a, b| a[a.len() - 10..].cmp(&b[b.len() - 10..]));
        format!("{}/{}", dir(&self.name), nodes.pop().unwrap())
    }
}

async fn watch(server: &ZkServer, watches: usize) {
    eventually(&format!("{watches} watches are set"), async || {
        server::watches(server) == watches
    })
    .await;
}

#[tokio::test]
async fn who_comes_and_who_is_next_is_told_without_a_list() {
    if no_zookeeper() {
        return;
    }
    unless_still(told_without_a_list).await;
}

async fn told_without_a_list() -> Result<(), String> {
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (before, after) = (connect(server.addr()).await, connect(proxy.addr()).await);
    let mut foreign = Foreign::new(&server, "brief").await;
    let told = || proxy.counts().replies.bytes;
    for round in 0..3 {
        let first = waiter(&foreign.lock(&before));
        foreign.contend(1).await;
        watch(&server, 1).await;
        let listed = told();
        let second = waiter(&foreign.lock(&after));
        foreign.contend(2).await;
        watch(&server, 2).await;
        let coming = told() - listed;
        // A client does not know of a crowd before it has been there.
        if (coming > SHORT) != (round == 0) {
            return Err(format!("{coming} bytes to come, in round {round}"));
        }
        foreign.come("b").await;
        foreign.go().await;
        let (first, _) = soon("whoever was before it has gone", first).await.unwrap();
        // The holder watches its own node, and the next one watches the holder's.
        watch(&server, 2).await;
        let waited = told();
        first.release().await.unwrap();
        let (second, _) = soon("it is next", second).await.unwrap();
        let waking = told() - waited;
        if waking > SHORT {
            return Err(format!("{waking} bytes to be granted, in round {round}"));
        }
        second.release().await.unwrap();
        watch(&server, 0).await;
    }
    Ok(())
}

#[tokio::test]
async fn who_gives_up_or_dies_lets_nobody_in() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let mut foreign = Foreign::new(&server, "gives-up").await;
    let (before, after) = (connect(server.addr()).await, connect(server.addr()).await);
    for dies in [false, true] {
        let first = waiter(&foreign.lock(&before));
        foreign.contend(1).await;
        let node = foreign.last().await;
        let second = waiter(&foreign.lock(&after));
        foreign.contend(2).await;
        watch(&server, 2).await;
        if dies {
            let stat = foreign.raw.check_stat(&node).await.unwrap().unwrap();
            assert!(server.end_session(stat.ephemeral_owner).unwrap());
        }
        first.abort();
        foreign.contend(1).await;
        // Now the second watches one of theirs.
        watch(&server, 1).await;
        // The number of watches may be the same for a moment before it has looked. After that nothing is to happen.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!second.is_finished(), "it was let in beside {MANY} before it");
        foreign.come("c").await;
        foreign.go().await;
        let (second, _) = soon("all before it have gone", second).await.unwrap();
        second.release().await.unwrap();
    }
}

/// The predecessor says that it held. That is not enough without an own node.
#[tokio::test]
async fn a_waiter_in_a_crowd_without_its_node_is_not_granted() {
    if no_zookeeper() {
        return;
    }
    let mut foreign = Foreign::new(shared(), "lost-place").await;
    let (before, after) = (connect(shared().addr()).await, connect(shared().addr()).await);
    for _ in 0..10 {
        let first = waiter(&foreign.lock(&before));
        foreign.contend(1).await;
        let second = waiter(&foreign.lock(&after));
        foreign.contend(2).await;
        let node = foreign.last().await;
        foreign.come("e").await;
        foreign.go().await;
        let (first, _) = soon("whoever was before it has gone", first).await.unwrap();
        foreign.raw.delete(&node, None).await.unwrap();
        first.release().await.unwrap();
        // The second may be just about to look.
        foreign.contend(1).await;
        assert!(!second.is_finished(), "it was let in before {MANY} others");
        foreign.come("f").await;
        foreign.go().await;
        let (second, _) = soon("whoever was before it has gone", second).await.unwrap();
        second.release().await.unwrap();
    }
}

#[tokio::test]
async fn who_expects_several_finds_nobody_and_no_directory() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("gone"), raw(shared().addr()).await);
    let ours = lock(&connect(shared().addr()).await, &name);
    for directory in [true, false] {
        expects_several(&raw, &ours, &name).await;
        if !directory {
            eventually("the directory is gone", async || {
                raw.check_stat(&dir(&name)).await.unwrap().is_none()
            })
            .await;
        }
        let held = soon("nobody is there", ours.acquire()).await.unwrap();
        let paths = in_order(&raw, &name).await;
        let stat = raw.check_stat(&paths[0]).await.unwrap().unwrap();
        assert_eq!(u64::try_from(stat.czxid).unwrap(), held.token().get());
        assert_eq!(paths.len(), 1);
        held.release().await.unwrap();
    }
}

/// Only a client that is alone can be told so without the list.
#[tokio::test]
async fn who_expects_several_and_may_not_list_finds_nobody() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("unlisted"), raw(shared().addr()).await);
    let ours = lock(&connect(shared().addr()).await, &name);
    let everyone = Acls::anyone_all();
    raw.mkdir(&dir(&name), &CreateMode::Persistent.with_acls(everyone))
        .await
        .unwrap();
    expects_several(&raw, &ours, &name).await;
    let rights = Permission::CREATE | Permission::WRITE | Permission::DELETE;
    let acl = [Acl::new(rights, AuthId::anyone())];
    raw.set_acl(&dir(&name), &acl, None).await.unwrap();
    for _ in 0..2 {
        let held = soon("nobody is there", ours.acquire()).await.unwrap();
        let others = raw.check_stat(&dir(&name)).await.unwrap().unwrap().num_children - 1;
        assert_eq!(others, 0);
        held.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_writer_waits_for_all_readers() {
    if no_zookeeper() {
        return;
    }
    let mut foreign = Foreign::new(shared(), "readers").await;
    let client = connect(shared().addr()).await;
    let mut readers = Vec::new();
    for come in 1..=2 {
        readers.push(waiter(&foreign.lock(&connect(shared().addr()).await).shared()));
        foreign.contend(come).await;
    }
    let writer = waiter(&foreign.lock(&client));
    foreign.contend(3).await;
    foreign.go().await;
    let mut held = Vec::new();
    for reader in readers {
        held.push(soon("readers share", reader).await.unwrap().0);
    }
    // This is the reader that the writer watches.
    held.pop().unwrap().release().await.unwrap();
    foreign.contend(2).await;
    // The writer has looked by then, and nothing else is to happen.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!writer.is_finished(), "it was let in beside a reader");
    held.pop().unwrap().release().await.unwrap();
    let (writer, _) = soon("no reader is left", writer).await.unwrap();
    let reader = waiter(&foreign.lock(&connect(shared().addr()).await).shared());
    foreign.contend(2).await;
    writer.release().await.unwrap();
    takes_its_turn("no writer is left", reader).await;
}

#[tokio::test]
async fn releases_are_told_as_they_turn_out() {
    if no_zookeeper() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(proxy.addr()).await;
    let mut foreign = Foreign::new(shared(), "outcomes").await;
    let quick = AcquireOptions::new()
        .op_timeout(Duration::from_millis(200))
        .ttl(Duration::from_secs(60));
    // Each was in a crowd when it came, and a waiter for another client.
    let mut held = async || {
        let waiting = waiter(&foreign.lock(&client).with_options(quick.clone()));
        foreign.contend(1).await;
        let node = foreign.last().await;
        foreign.come("d").await;
        foreign.go().await;
        let (guard, _) = soon("it is granted", waiting).await.unwrap();
        (guard, node)
    };
    let raw = raw(shared().addr()).await;
    let is_there = async |path: &str| raw.check_stat(path).await.unwrap();

    let (guard, node) = held().await;
    let session = is_there(&node).await.unwrap().ephemeral_owner;
    let says = format!("/lockkit/%sessions/{session:016x}");
    raw.delete(&says, None).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(is_there(&node).await, None, "it can be released without a word");
    eventually("it is made again", async || is_there(&says).await.is_some()).await;

    let (guard, node) = held().await;
    raw.delete(&node, None).await.unwrap();
    let error = guard.release().await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::Revoked,
                ..
            }
        ),
        "{error:?}"
    );

    let (guard, node) = held().await;
    proxy.set(Mode::DropReplies);
    let outcome = guard.release().await;
    assert!(
        outcome.is_err_and(|error| error.is_transient()),
        "nobody has confirmed it"
    );
    assert_eq!(is_there(&node).await, None);
    proxy.set(Mode::Pass);

    let (guard, node) = held().await;
    guard.release().await.unwrap();
    assert_eq!(is_there(&node).await, None);
}

/// Starts a proxy to the server at `to` that makes it one without multi-reads: it refuses them as unknown and closes the
/// connection. Returns its address, and a counter of such requests.
fn without_multi_reads(to: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, asked) = (listener.local_addr().unwrap(), Arc::<AtomicU64>::default());
    let count = asked.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let (answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let out = Arc::new(Mutex::new(client.try_clone().unwrap()));
            let (replies, count) = (out.clone(), count.clone());
            thread::spawn(move || {
                let _ = pass(answers, &mut |reply| {
                    replies.lock().unwrap().write_all(reply).is_ok()
                });
                let _ = back.flush();
                let _ = back.shutdown(Shutdown::Both);
            });
            thread::spawn(move || {
                let mut to = server.try_clone().unwrap();
                let _ = pass(client, &mut |request| {
                    // In the request that opens a session, these bytes are a part of the highest transaction seen.
                    if request.get(8..12) != Some(&MULTI_READ.to_be_bytes()) {
                        return to.write_all(request).is_ok();
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    let mut reply = [0; 20];
                    reply[..4].copy_from_slice(&16_u32.to_be_bytes());
                    reply[4..8].copy_from_slice(&request[4..8]);
                    reply[16..].copy_from_slice(&UNIMPLEMENTED.to_be_bytes());
                    let mut out = out.lock().unwrap();
                    let _ = out.write_all(&reply);
                    let _ = out.shutdown(Shutdown::Write);
                    false
                });
                let _ = server.shutdown(Shutdown::Both);
            });
        }
    });
    (addr, asked)
}

const MULTI_READ: i32 = 22;
const UNIMPLEMENTED: i32 = -6;

/// Hands over one packet after the other, with its length, for as long as that goes on.
fn pass(mut from: TcpStream, on: &mut dyn FnMut(&[u8]) -> bool) -> std::io::Result<()> {
    loop {
        let mut packet = vec![0; 4];
        from.read_exact(&mut packet)?;
        let mut rest = vec![0; u32::from_be_bytes([packet[0], packet[1], packet[2], packet[3]]) as usize];
        from.read_exact(&mut rest)?;
        packet.append(&mut rest);
        if !on(&packet) {
            return Ok(());
        }
    }
}

#[tokio::test]
async fn a_server_without_multi_reads_is_asked_for_one_once() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (addr, asked) = without_multi_reads(server.addr());
    let (before, after) = (connect(server.addr()).await, connect(addr).await);
    let mut foreign = Foreign::new(&server, "old").await;
    for _ in 0..3 {
        let first = waiter(&foreign.lock(&before));
        foreign.contend(1).await;
        let second = waiter(&foreign.lock(&after));
        foreign.contend(2).await;
        watch(&server, 2).await;
        foreign.come("g").await;
        foreign.go().await;
        takes_its_turn("whoever was before it has gone", first).await;
        takes_its_turn("it is next", second).await;
        watch(&server, 0).await;
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1, "each costs a connection");
}
