//! A namespace is a border for users whose roles end at it.

use std::time::Duration;

use lockkit_core::{FencingToken, LockClient};
use lockkit_etcd::Credentials;
use lockkit_testbed::{etcd::EtcdServer, eventually};

use crate::server::{block, config, connect, lock, no_etcd, patiently, soon, takes_its_turn, waiter};

const OURS: &str = "ours";
const THEIRS: &str = "theirs";
const PASSWORD: &str = "open-sesame";

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    /// The documentation says so.
    Done,
}

use Outcome::{Done, Refused};

/// The attempts of a user with `etcdctl`. `KEY` stands for each key of others, `LEASE` for the lease of their holder.
const ATTEMPTS: &[(Outcome, &[&str])] = &[
    (Refused, &["get", "KEY"]),
    (Refused, &["get", "--consistency=s", "KEY"]),
    (Refused, &["get", "--prefix", "theirs/"]),
    (Refused, &["get", "--from-key", ""]),
    (Refused, &["get", "--keys-only", "ours/", "theirs0"]),
    (Refused, &["put", "KEY", "x"]),
    (Refused, &["put", "--ignore-value", "KEY"]),
    (Refused, &["put", "--lease=LEASE", "theirs/a/0.x", "x"]),
    (Refused, &["put", "theirs/a/0.0.0", "x"]),
    (Refused, &["put", "theirs/%fence", "x"]),
    (Refused, &["del", "KEY"]),
    (Refused, &["del", "--prefix", "theirs/"]),
    (Refused, &["del", "--from-key", ""]),
    // With a command, so that it ends if it is granted.
    (Refused, &["lock", "theirs/free", "true"]),
    (Refused, &["lease", "revoke", "LEASE"]),
    (Refused, &["user", "grant-role", OURS, THEIRS]),
    (
        Refused,
        &[
            "role",
            "grant-permission",
            "--prefix",
            OURS,
            "readwrite",
            "theirs/",
        ],
    ),
    (Refused, &["user", "delete", THEIRS]),
    (Refused, &["auth", "disable"]),
    // What etcd lets every user do. None of it ends or shows a hold. Kept alive, a lease lasts, also that of the dead.
    (Done, &["lease", "list"]),
    (Done, &["lease", "keep-alive", "--once", "LEASE"]),
];

fn etcdctl(server: &EtcdServer, user: &str, arguments: &[String]) -> Result<String, String> {
    let output = server
        .ctl_command()
        .args(["--dial-timeout=20s", "--command-timeout=20s"])
        .arg(format!("--user={user}:{PASSWORD}"))
        .args(arguments)
        .output()
        .unwrap();
    let said = |bytes| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(said(&output.stdout))
    } else {
        Err(said(&output.stderr))
    }
}

/// Returns what is wrong with the outcome of an attempt.
fn wrong(server: &EtcdServer, expected: Outcome, arguments: &[String]) -> Option<String> {
    let outcome = etcdctl(server, OURS, arguments);
    let is_as_expected = match (&outcome, expected) {
        (Err(said), Refused) => said.contains("permission denied"),
        (Ok(_), Done) => true,
        _ => false,
    };
    (!is_as_expected).then(|| format!("{arguments:?}: expected {expected:?}, got {outcome:?}"))
}

async fn client(server: &EtcdServer, user: &str) -> LockClient {
    let mut config = config(&server.addr().to_string());
    config.auth = Some(Credentials::new(user, PASSWORD));
    config.namespace = user.into();
    patiently(config).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_reaches_no_other_namespace() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().authorise("lockkit/").start()).unwrap();
    drop(connect(&server.url()).await);
    let ctl = |arguments: &[&str]| block(|| server.ctl(arguments)).unwrap();
    for user in [OURS, THEIRS] {
        ctl(&["user", "add", &format!("{user}:{PASSWORD}")]);
        ctl(&["role", "add", user]);
        let prefix = format!("{user}/");
        ctl(&["role", "grant-permission", "--prefix", user, "readwrite", &prefix]);
        ctl(&["user", "grant-role", user, user]);
    }
    let ours = client(&server, OURS).await;
    let (one, two) = (client(&server, THEIRS).await, client(&server, THEIRS).await);
    // Everything that there can be: a lock that is waited for, shared holds, permits, one that is asked for, raised tokens.
    let fence = one.fence().await.unwrap();
    one.raise_fence(FencingToken::new(fence.get() + 1_000))
        .await
        .unwrap();
    let held = lock(&one, "a").acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a"));
    let shared = lock(&one, "shared").shared().acquire().await.unwrap();
    let permit = one.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let asked = lock(&one, "asked").acquire().await.unwrap();
    let _ = two
        .revoke("asked", asked.token(), Duration::from_millis(10))
        .await
        .unwrap();
    eventually("one waits", async || {
        two.inspect("a").await.is_ok_and(|state| state.waiters == Some(1))
    })
    .await;
    let own = lock(&ours, "a").acquire().await.unwrap();

    let theirs = block(|| server.keys("theirs/")).unwrap();
    for what in ["theirs/a/", "theirs/%fence", "theirs/%semaphores/"] {
        assert!(theirs.iter().any(|key| key.starts_with(what)), "{theirs:?}");
    }
    let lease = theirs
        .iter()
        .find_map(|key| key.strip_prefix("theirs/shared/")?.split('.').next())
        .expect("the lease in a key")
        .to_owned();
    let mut faults = Vec::new();
    for (expected, words) in ATTEMPTS {
        let keys = if words.contains(&"KEY") {
            &theirs[..]
        } else {
            &theirs[..1]
        };
        for key in keys {
            let replaced = |word: &&str| word.replace("KEY", key).replace("LEASE", &lease);
            let arguments: Vec<_> = words.iter().map(replaced).collect();
            faults.extend(block(|| wrong(&server, *expected, &arguments)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));

    assert_eq!(
        block(|| server.keys("theirs/")).unwrap(),
        theirs,
        "nothing has changed"
    );
    assert!(held.is_held() && shared.is_held() && permit.is_held());
    held.release().await.unwrap();
    takes_its_turn("it kept its place", waiting).await;
    for guard in [shared, permit, own] {
        soon("released", guard.release()).await.unwrap();
    }
}
