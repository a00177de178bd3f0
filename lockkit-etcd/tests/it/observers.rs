//! Observers of elections are woken by the server's watches, over each connection anew.

use std::time::Duration;

use lockkit_conformance::stall::{self, Stopwatch};
use lockkit_core::Observer;
use lockkit_testbed::Proxy;

use crate::server::{connect, no_etcd, shared, unique};

/// Above the ten seconds after which an observer looks by itself, with room for a busy machine.
const SEEN: Duration = Duration::from_secs(15);

/// Below the three quarters of a second that an observer rests at least which nobody wakes.
const WOKEN: Duration = Duration::from_millis(500);

/// Returns the token of the leader that is seen, `None` for nobody, and how long that took.
async fn next(observer: &mut Observer) -> (Option<u64>, Duration) {
    let watch = Stopwatch::start();
    let seen = stall::timeout(SEEN, async {
        loop {
            match observer.next().await {
                Ok(leader) => return leader.map(|leader| leader.token.get()),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    });
    let seen = seen
        .await
        .unwrap_or_else(|_| panic!("nothing is seen within {SEEN:?}"));
    (seen, watch.elapsed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observers_are_woken_by_a_watch() {
    if no_etcd() {
        return;
    }
    let (name, proxy) = (unique("observed"), Proxy::start(shared().addr()).unwrap());
    let watching = connect(&shared().url_at(proxy.addr())).await;
    let leading = connect(&shared().url()).await;
    let candidate = leading.election(&name).unwrap().candidate("ada").unwrap();
    let mut observer = watching.election(&name).unwrap().observe();
    assert_eq!(next(&mut observer).await.0, None);
    for connection in 0..2 {
        let mut took = Vec::new();
        for _ in 0..4 {
            let leadership = candidate.campaign().await.unwrap();
            let (leader, after) = next(&mut observer).await;
            assert_eq!(leader, Some(leadership.token().get()));
            took.push(after);
            leadership.resign().await.unwrap();
            let (leader, after) = next(&mut observer).await;
            assert_eq!(leader, None);
            took.push(after);
        }
        eprintln!("connection {connection}: changes are seen after {took:?}");
        assert!(took.iter().min().copied() < Some(WOKEN), "{took:?}");
        // What it sees next, it may have to look for by itself.
        proxy.reset();
    }
}
