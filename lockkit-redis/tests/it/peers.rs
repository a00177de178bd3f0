//! redis-py's lock on the same key, as it is.

use std::{process::Command, time::Duration};

use lockkit_testbed::{Peer, missing_python, redis::RedisServer, skipped};

use crate::common::{AT_ONCE, LONG, client, granted, lock, no_server, nothing_is_left, waiter};

const KEY: &str = "lockkit:a";

fn redis_py(server: &RedisServer) -> Peer {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/peers/redis_lock.py");
    let mut python = Command::new("python3");
    python.args([program, server.url()]);
    Peer::start(&python).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_of_redis_pys_and_ours_exclude_each_other() {
    if no_server() || skipped("redis-py", missing_python("redis")) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut theirs = redis_py(&server);
    let client = client(server.url()).await;
    let exclusive = lock(&client, "a", LONG);
    for ours in [exclusive.clone(), exclusive.shared()] {
        assert_eq!(theirs.ask(&format!("try {KEY}")).unwrap(), "held");
        assert!(ours.try_acquire().await.unwrap().is_none(), "theirs is respected");
        let waiting = waiter(&ours);
        assert_eq!(theirs.ask("release").unwrap(), "released");
        let guard = granted(AT_ONCE, "theirs is over", waiting).await;
        assert_eq!(
            theirs.ask(&format!("try {KEY}")).unwrap(),
            "taken",
            "ours is respected"
        );
        theirs.tell(&format!("acquire {KEY}")).unwrap();
        assert!(
            theirs.is_silent_for(Duration::from_millis(200)),
            "granted beside ours"
        );
        guard.release().await.unwrap();
        assert_eq!(theirs.hear().unwrap(), "held");
        assert_eq!(theirs.ask("release").unwrap(), "released");
    }
    nothing_is_left(&server, "after redis-py").await;
}
