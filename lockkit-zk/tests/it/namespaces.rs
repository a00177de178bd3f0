//! Directories that an administrator has given to a user each are a border between them.

use lockkit_core::{FencingToken, LockClient};
use lockkit_testbed::eventually;
use lockkit_zk::Digest;
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Error as ZkError, Permission};

use crate::server::{self, lock, no_zookeeper, raw, shared, soon, takes_its_turn, unique, waiter};

const OURS: &str = "ours";
const THEIRS: &str = "theirs";
const PASSWORD: &str = "open-sesame";

/// The attempts of a user at each node of others.
#[derive(Clone, Copy, Debug)]
enum Attempt {
    Read,
    List,
    ListAndWatch,
    ReadAcl,
    Write,
    WriteTogether,
    Delete,
    DeleteTogether,
    Create,
    CreateSequential,
    CreateContainer,
    CreateTogether,
    SetAcl,
    Look,
    LookAndWatch,
}

/// The outcome of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    /// The documentation says so.
    Done,
}

use Outcome::{Done, Refused};

const ATTEMPTS: &[(Attempt, Outcome)] = &[
    (Attempt::Read, Refused),
    (Attempt::List, Refused),
    (Attempt::ListAndWatch, Refused),
    (Attempt::ReadAcl, Refused),
    (Attempt::Write, Refused),
    (Attempt::WriteTogether, Refused),
    (Attempt::Delete, Refused),
    (Attempt::DeleteTogether, Refused),
    (Attempt::Create, Refused),
    (Attempt::CreateSequential, Refused),
    (Attempt::CreateContainer, Refused),
    (Attempt::CreateTogether, Refused),
    (Attempt::SetAcl, Refused),
    (Attempt::Look, Done),
    (Attempt::LookAndWatch, Done),
];

async fn attempt(client: &Client, what: Attempt, path: &str) -> Result<(), ZkError> {
    let everyone = Acls::anyone_all();
    let child = format!("{path}/intruder");
    let create = async |mode: CreateMode| {
        client
            .create(&child, b"x", &mode.with_acls(everyone))
            .await
            .map(drop)
    };
    let together = |error: zookeeper_client::MultiWriteError| match error {
        zookeeper_client::MultiWriteError::OperationFailed { source, .. } => source,
        other @ zookeeper_client::MultiWriteError::RequestFailed { .. } => panic!("{other}"),
    };
    let mut multi = client.new_multi_writer();
    match what {
        Attempt::Read => client.get_data(path).await.map(drop),
        Attempt::List => client.list_children(path).await.map(drop),
        Attempt::ListAndWatch => client.list_and_watch_children(path).await.map(drop),
        Attempt::ReadAcl => client.get_acl(path).await.map(drop),
        Attempt::Write => client.set_data(path, b"x", None).await.map(drop),
        Attempt::WriteTogether => {
            multi.add_set_data(path, b"x", None)?;
            multi.commit().await.map(drop).map_err(together)
        }
        Attempt::Delete => client.delete(path, None).await,
        Attempt::DeleteTogether => {
            multi.add_delete(path, None)?;
            multi.commit().await.map(drop).map_err(together)
        }
        Attempt::Create => create(CreateMode::Persistent).await,
        Attempt::CreateSequential => create(CreateMode::PersistentSequential).await,
        Attempt::CreateContainer => create(CreateMode::Container).await,
        Attempt::CreateTogether => {
            multi.add_create(&child, b"x", &CreateMode::Persistent.with_acls(everyone))?;
            multi.commit().await.map(drop).map_err(together)
        }
        Attempt::SetAcl => {
            let acl = [Acl::new(Permission::ALL, AuthId::anyone())];
            client.set_acl(path, &acl, None).await.map(drop)
        }
        Attempt::Look => client.check_stat(path).await.map(drop),
        Attempt::LookAndWatch => client.check_and_watch_stat(path).await.map(drop),
    }
}

/// Connects without lockkit as this user.
async fn user(name: &str) -> Client {
    Client::connector()
        .with_auth("digest", format!("{name}:{PASSWORD}").as_bytes())
        .connect(&shared().addr().to_string())
        .await
        .unwrap()
}

/// Returns this node and all below it.
async fn tree(client: &Client, top: &str) -> Vec<String> {
    let mut found = vec![top.to_owned()];
    let mut next = 0;
    while let Some(path) = found.get(next).cloned() {
        next += 1;
        // A container that is empty may go at any time.
        let children = client.list_children(&path).await.unwrap_or_default();
        found.extend(children.into_iter().map(|child| format!("{path}/{child}")));
    }
    found.sort();
    found
}

async fn client(user: &str, directory: &str) -> LockClient {
    let mut config = server::config(format!("{}{directory}", shared().addr()));
    config.auth = Some(Digest::new(user, PASSWORD));
    server::patiently(config).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_reaches_nothing_in_anothers_directory() {
    if no_zookeeper() {
        return;
    }
    let root = raw(shared().addr()).await;
    let (mine, yours) = (user(OURS).await, user(THEIRS).await);
    let [our_directory, their_directory] = [OURS, THEIRS].map(|name| format!("/{}", unique(name)));
    // As the page on the backend says: made for one user alone, with a node in it that stays.
    for (client, directory) in [(&mine, &our_directory), (&yours, &their_directory)] {
        let alone = CreateMode::Persistent.with_acls(Acls::creator_all());
        client.create(directory, b"", &alone).await.unwrap();
        client
            .create(&format!("{directory}/stays"), b"", &alone)
            .await
            .unwrap();
    }
    let ours = client(OURS, &our_directory).await;
    let (one, two) = (
        client(THEIRS, &their_directory).await,
        client(THEIRS, &their_directory).await,
    );
    // Everything that there can be: raised tokens, a lock that is waited for, shared holds, permits, one that is asked for.
    let fence = one.fence().await.unwrap();
    one.raise_fence(FencingToken::new(fence.get() + 1_000))
        .await
        .unwrap();
    let held = lock(&one, "a").acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a"));
    let shared_hold = lock(&one, "shared").shared().acquire().await.unwrap();
    let permit = one.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let own = lock(&ours, "a").acquire().await.unwrap();
    eventually("one waits", async || {
        two.inspect("a").await.is_ok_and(|state| state.waiters == Some(1))
    })
    .await;

    // By a container of its own, a client makes sure that the servers have such. They go by themselves.
    eventually("what a client tries first has gone", async || {
        let theirs = tree(&yours, &their_directory).await;
        !theirs.iter().any(|path| path.contains("/first-"))
    })
    .await;
    let theirs = tree(&yours, &their_directory).await;
    assert!(theirs.len() > 8, "{theirs:?}");
    let mut faults = Vec::new();
    for path in &theirs {
        for (what, expected) in ATTEMPTS {
            let outcome = attempt(&mine, *what, path).await;
            let is_as_expected = match (&outcome, expected) {
                // No ephemeral node has children, whoever asks.
                (Err(ZkError::NoAuth | ZkError::NoChildrenForEphemerals), Refused) | (Ok(()), Done) => true,
                // The top directory `/` is everyone's: it takes the node that stays.
                (Err(ZkError::NotEmpty), Refused) => *path == their_directory,
                _ => false,
            };
            if !is_as_expected {
                faults.push(format!("{what:?} {path}: expected {expected:?}, got {outcome:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // Nor does somebody without a name.
    for path in &theirs {
        assert_eq!(
            root.get_data(path).await.map(drop),
            Err(ZkError::NoAuth),
            "{path}"
        );
    }

    assert_eq!(
        tree(&yours, &their_directory).await,
        theirs,
        "nothing has changed"
    );
    assert!(held.is_held() && shared_hold.is_held() && permit.is_held());
    held.release().await.unwrap();
    takes_its_turn("it kept its place", waiting).await;
    for guard in [shared_hold, permit, own] {
        soon("released", guard.release()).await.unwrap();
    }
}
