//! Lists of thousands of locks that are held, as the bench `listing` measures them with 100,000.

use std::process::Command;

use lockkit_benches::listing;
use lockkit_testbed::{
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

const HELD: usize = 5_000;

/// Far less than 5,000 locks take in any form, and more than a page.
const MEMORY: u64 = 6 * 1_024;

/// No test: a process that lists, if it is told to.
#[test]
fn lister_process() {
    if let Some(url) = listing::told() {
        listing::serve(&url).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_on_redis_are_listed_in_little_memory() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    are_listed(server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_on_zookeeper_are_listed_in_little_memory() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    let server = ZkServer::plain().unwrap();
    are_listed(&format!("zk://{}", server.addr())).await;
}

async fn are_listed(url: &str) {
    let mut lister = Command::new(std::env::current_exe().unwrap());
    lister.args(["--exact", "listing::lister_process", "--nocapture"]);
    // Each list is checked to show each lock once.
    let listing = listing::measure(url, HELD, lister).await.unwrap();
    println!("{url}: {listing}");
    let (before, peak) = listing.memory;
    assert!(peak - before < MEMORY, "{listing}");
}
