//! Other languages' clients on the same paths: Curator's recipes and kazoo's, as they are.

use std::{
    path::Path,
    process::Command,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use lockkit_core::{Lock, LockGuard};
use lockkit_testbed::{Peer, missing_python, skipped};
use lockkit_zk::Nodes;
use tempfile::TempDir;
use zookeeper_client::Client;

use crate::server::{
    self, children, connect, contend, dir, lock, no_zookeeper, raw, shared, soon, unique, waiter,
};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/peers");
const JARS: [&str; 6] = [
    "curator-recipes",
    "curator-framework",
    "curator-client",
    "guava",
    "zookeeper",
    "slf4j-nop",
];
/// The time that a waiter is given for a grant that it must not get.
const A_WHILE: Duration = Duration::from_millis(300);

fn jar(name: &str) -> String {
    format!("/usr/share/java/{name}.jar")
}

fn missing_curator() -> Option<String> {
    let install = "on Debian or Ubuntu: apt-get install libcurator-recipes-java ecj";
    let missing = JARS
        .iter()
        .map(|name| jar(name))
        .find(|jar| !Path::new(jar).exists());
    let missing = missing.or_else(|| (!Path::new("/usr/bin/ecj").exists()).then(|| "ecj".to_owned()))?;
    Some(format!("{missing} is not there; {install}"))
}

/// A process with Curator in it, which is compiled once.
fn curator() -> Peer {
    static CLASSES: LazyLock<Mutex<TempDir>> = LazyLock::new(|| {
        let classes = TempDir::new().unwrap();
        let done = Command::new("ecj")
            .args(["-11", "-proc:none", "-classpath", &JARS.map(jar).join(":"), "-d"])
            .arg(classes.path())
            .arg(format!("{SOURCES}/CuratorLock.java"))
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Mutex::new(classes)
    });
    let classes = CLASSES.lock().unwrap();
    let path = format!("{}:{}", classes.path().display(), JARS.map(jar).join(":"));
    let mut java = Command::new("java");
    java.args([
        "-Xmx64m",
        "-XX:TieredStopAtLevel=1",
        "-classpath",
        &path,
        "CuratorLock",
    ])
    .arg(shared().addr().to_string());
    Peer::start(&java).unwrap()
}

fn kazoo() -> Peer {
    let mut python = Command::new("python3");
    python
        .arg(format!("{SOURCES}/kazoo_lock.py"))
        .arg(shared().addr().to_string());
    Peer::start(&python).unwrap()
}

/// The commands by which a peer acquires and tries, and the path that it contends for.
struct Theirs<'a> {
    peer: Peer,
    verb: &'a str,
    name: &'a str,
}

impl Theirs<'_> {
    fn acquire(&mut self) {
        let what = format!("{}acquire {}", self.verb, dir(self.name));
        self.peer.tell(&what).unwrap();
    }

    fn tries(&mut self) -> bool {
        let what = format!("{}try {}", self.verb, dir(self.name));
        self.peer.ask(&what).unwrap() == "held"
    }

    fn is_granted(&self) {
        assert_eq!(self.peer.hear().unwrap(), "held");
    }

    fn release(&mut self) {
        assert_eq!(self.peer.ask("release").unwrap(), "released");
    }
}

/// Shows that a lock of ours and one of theirs exclude each other and are handed over, in both directions.
async fn exclude_each_other(raw: &Client, ours: &Lock, theirs: &mut Theirs<'_>) {
    let name = theirs.name.to_owned();
    assert!(theirs.tries());
    assert!(ours.try_acquire().await.unwrap().is_none(), "theirs is respected");
    let waiting = waiter(ours);
    contend(raw, &name, 2).await;
    theirs.release();
    let (guard, _): (LockGuard, _) = soon("theirs is over", waiting).await.unwrap();
    assert!(!theirs.tries(), "ours is respected");
    theirs.acquire();
    contend(raw, &name, 2).await;
    assert!(theirs.peer.is_silent_for(A_WHILE), "granted beside ours");
    guard.release().await.unwrap();
    theirs.is_granted();
    theirs.release();
    assert_eq!(children(raw, &name).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mutex_of_curators_and_ours_exclude_each_other() {
    if no_zookeeper() || skipped("curator", missing_curator()) {
        return;
    }
    let (name, raw) = (unique("live-curator"), raw(shared().addr()).await);
    let client = connect(shared().addr()).await;
    let mut theirs = Theirs {
        peer: curator(),
        verb: "mutex ",
        name: &name,
    };
    exclude_each_other(&raw, &lock(&client, &name), &mut theirs).await;
    exclude_each_other(&raw, &lock(&client, &name).shared(), &mut theirs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_write_lock_of_curators_and_ours_exclude_each_other() {
    if no_zookeeper() || skipped("curator", missing_curator()) {
        return;
    }
    let (name, raw) = (unique("live-rw"), raw(shared().addr()).await);
    let mut config = server::config(shared().addr());
    config.nodes = Nodes::ReadWrite;
    let client = server::patiently(config).await;
    let (writer, reader) = (lock(&client, &name), lock(&client, &name).shared());
    let mut theirs = Theirs {
        peer: curator(),
        verb: "write ",
        name: &name,
    };
    exclude_each_other(&raw, &writer, &mut theirs).await;
    exclude_each_other(&raw, &reader, &mut theirs).await;
    theirs.verb = "read ";
    exclude_each_other(&raw, &writer, &mut theirs).await;
    assert!(theirs.tries());
    let together = reader
        .try_acquire()
        .await
        .unwrap()
        .expect("readers are in together");
    theirs.release();
    together.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_of_kazoos_and_ours_exclude_each_other() {
    if no_zookeeper() || skipped("kazoo", missing_python("kazoo")) {
        return;
    }
    let (name, raw) = (unique("live-kazoo"), raw(shared().addr()).await);
    let client = connect(shared().addr()).await;
    let mut theirs = Theirs {
        peer: kazoo(),
        verb: "",
        name: &name,
    };
    exclude_each_other(&raw, &lock(&client, &name), &mut theirs).await;
    exclude_each_other(&raw, &lock(&client, &name).shared(), &mut theirs).await;
}
