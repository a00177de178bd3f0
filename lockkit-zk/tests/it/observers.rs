//! Observers of elections are woken by the server's watches, over each connection anew.

use std::time::Duration;

use lockkit_conformance::stall;
use lockkit_core::Observer;
use lockkit_testbed::Proxy;
use lockkit_zk::Nodes;

use crate::server::{self, no_zookeeper, shared};

/// Below the ten seconds after which an observer looks by itself, with room for a busy machine.
const WOKEN: Duration = Duration::from_secs(2);

/// From a cut until a look over a new connection, with room for a busy machine.
const RECOVERED: Duration = Duration::from_secs(7);

/// Returns the token of the leader that is seen within `limit`; `None` for nobody.
async fn next(limit: Duration, observer: &mut Observer) -> Option<u64> {
    let seen = stall::timeout(limit, async {
        loop {
            match observer.next().await {
                Ok(leader) => return leader.map(|leader| leader.token.get()),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    });
    seen.await
        .unwrap_or_else(|_| panic!("nothing is seen within {limit:?}"))
}

async fn woken(nodes: Nodes, namespace: &str) {
    let proxy = Proxy::start(shared().addr()).unwrap();
    let config = |addr: std::net::SocketAddr| {
        let mut config = server::config(addr);
        config.namespace = namespace.into();
        config.nodes = nodes;
        config
    };
    let watching = server::patiently(config(proxy.addr())).await;
    let leading = server::patiently(config(shared().addr())).await;
    let candidate = leading.election("n").unwrap().candidate("ada").unwrap();
    let mut observer = watching.election("n").unwrap().observe();
    // The election's directory is not there.
    assert_eq!(next(RECOVERED, &mut observer).await, None);
    for round in 0..3 {
        let leadership = candidate.campaign().await.unwrap();
        assert_eq!(next(WOKEN, &mut observer).await, Some(leadership.token().get()));
        if round == 1 {
            proxy.reset();
        }
        leadership.resign().await.unwrap();
        let limit = if round == 1 { RECOVERED } else { WOKEN };
        assert_eq!(next(limit, &mut observer).await, None);
    }
}

#[tokio::test]
async fn observers_are_woken_by_the_directory() {
    if !no_zookeeper() {
        woken(Nodes::Mutex, "observed").await;
    }
}

#[tokio::test]
async fn observers_are_woken_by_the_one_node() {
    if !no_zookeeper() {
        woken(Nodes::Simple, "observed-simple").await;
    }
}
