//! Other Redlock clients on the same masters and key: they and lockkit exclude each other.

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::LazyLock,
};

use lockkit_testbed::{eventually, redis::RedisServer, skipped};
use tempfile::TempDir;

use super::world::World;
use crate::common::{LONG, granted, lock, no_server, waiter};

const KEY: &str = "lockkit:a";

/// node-redlock, from npm.
static NODE_REDLOCK: LazyLock<Result<TempDir, String>> = LazyLock::new(|| {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node");
    for file in ["package.json", "package-lock.json", "peer.js"] {
        fs::copy(source.join(file), directory.path().join(file)).map_err(|error| error.to_string())?;
    }
    let installed = Command::new("npm")
        .args(["ci", "--no-audit", "--no-fund"])
        .current_dir(directory.path())
        .output()
        .map_err(|error| format!("npm cannot be run: {error}"))?;
    if installed.status.success() {
        return Ok(directory);
    }
    let mut reason = "npm could not install node-redlock".to_owned();
    let _ = write!(reason, ": {}", String::from_utf8_lossy(&installed.stderr));
    Err(reason)
});

struct Node {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Node {
    fn start(directory: &Path, world: &World) -> Self {
        let ports = world
            .masters
            .iter()
            .map(|master| master.addr().port().to_string());
        let mut process = Command::new("node")
            .arg(directory.join("peer.js"))
            .args(ports)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self {
            process,
            commands,
            answers,
        }
    }

    fn says(&mut self, command: &str) -> String {
        writeln!(self.commands, "{command}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn node_redlock_and_ours_exclude_each_other() {
    if no_server() || skipped("node", NODE_REDLOCK.as_ref().err().cloned()) {
        return;
    }
    let world = World::five();
    let mut theirs = Node::start(NODE_REDLOCK.as_ref().unwrap().path(), &world);
    let client = world.client().await;
    let ours = lock(&client, "a", LONG);
    for shared in [false, true, false] {
        let ours = if shared { ours.shared() } else { ours.clone() };
        let held = ours.acquire().await.unwrap();
        assert_eq!(theirs.says(&format!("acquire {KEY} 30000")), "refused");
        // A failed attempt of theirs gives back its own keys, and no more.
        held.renew().await.unwrap();
        held.release().await.unwrap();
        world.nothing_is_left("before theirs").await;

        assert_eq!(theirs.says(&format!("acquire {KEY} 30000")), "granted");
        assert!(ours.try_acquire().await.unwrap().is_none());
        let state = client.inspect("a").await.unwrap();
        assert_eq!(state.holders.len(), 1, "{state:?}");
        assert_eq!(state.holders[0].token.get(), 0, "they have no tokens");
        let waiting = waiter(&ours);
        world.waiters("a", 1).await;
        assert!(!waiting.is_finished());
        assert_eq!(theirs.says("release"), "released");
        granted(LONG, "after the foreign release", waiting)
            .await
            .release()
            .await
            .unwrap();
        world.nothing_is_left("after ours").await;
    }
}

/// Does by hand what every Redlock client does.
#[tokio::test]
async fn a_plain_key_at_a_majority_excludes_ours() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let ours = lock(&client, "a", LONG);
    let set = |master: &RedisServer| master.cli(&["SET", KEY, "theirs", "NX", "PX", "60000"]).unwrap();
    let held = ours.acquire().await.unwrap();
    eventually("held by all", async || world.holding("a") == 5).await;
    assert!(world.masters.iter().all(|master| set(master) == "(nil)"));
    held.release().await.unwrap();
    world.nothing_is_left("released").await;

    for (n, master) in world.masters.iter().enumerate() {
        assert_eq!(set(master), "OK");
        let granted = ours.try_acquire().await.unwrap();
        assert_eq!(granted.is_some(), n < 2, "{} have another holder", n + 1);
        if let Some(held) = granted {
            held.release().await.unwrap();
        }
        assert_eq!(master.cli(&["GET", KEY]).unwrap(), "theirs", "never touched");
        eventually("given back", async || world.holding("a") == n + 1).await;
    }
}
