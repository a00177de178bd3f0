//! A soak under a schedule of faults: clients behind proxies of their own contend while the server crashes and comes
//! back, stops and goes on, and their connections are reset or lose replies. The history has every property.

use std::time::Duration;

use lockkit_conformance::history::{Limits, Sight, now};
use lockkit_core::LockKind;
use lockkit_testbed::{
    Mode as Fault, Proxy,
    redis::{Fsync, RedisServer},
};

use crate::{
    common::{MS, SECOND, client_behind_proxy, no_server, nothing_is_left},
    workers::{TTL, Workers},
};

const CLIENTS: usize = 4;
const WORKERS: usize = 3;
/// Acquisitions, 50 a second on a machine that has nothing else to do.
const LEAST: usize = 2_000;
const NAMES: [&str; 2] = ["a", "b"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soak_under_faults_has_no_overlap_and_no_token_goes_back() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .append_only(Fsync::Always)
        // Keeps the file short: the server comes back as fast in the end as in the beginning.
        .directive("auto-aof-rewrite-min-size", &["1mb"])
        .start()
        .unwrap();
    let mut workers = Workers::new(&NAMES);
    let (mut clients, mut proxies) = (Vec::new(), Vec::new());
    for _ in 0..CLIENTS {
        let (client, proxy) = client_behind_proxy(&server).await;
        workers.add(&client, WORKERS);
        clients.push(client);
        proxies.push(proxy);
    }
    let calm = Duration::from_millis(1_600);
    workers
        .disturb(calm, LEAST, async |rng| fault(&server, &proxies, rng).await)
        .await;
    let mut history = workers.history().await;
    nothing_is_left(&server, "after the soak").await;
    for name in NAMES {
        let at = now();
        let state = clients[0].inspect(name).await.unwrap();
        history.sights.push(Sight {
            lock: name.to_owned(),
            kind: LockKind::Lock,
            at,
            holders: state.holders.iter().map(|holder| holder.token.get()).collect(),
            waiters: state.waiters,
        });
    }

    let mut limits = Limits::default();
    // The longest fault, then finding out and connecting again, a lease, and what those behind the head allow for.
    limits.idle = 3 * SECOND + 8 * SECOND + TTL + 6 * SECOND;
    limits.detection = TTL + SECOND;
    limits.linger = Duration::ZERO;
    let summary = workers.check(&history, &limits, LEAST);
    assert!(summary.contended * 2 > summary.granted, "{summary:?}");
    assert_eq!(summary.quiet_sights, NAMES.len());
}

/// One fault, from its beginning to its end; what it was.
async fn fault(server: &RedisServer, proxies: &[Proxy], rng: &mut fastrand::Rng) -> &'static str {
    let proxy = &proxies[rng.usize(..proxies.len())];
    match rng.u8(..4) {
        0 => {
            server.kill().unwrap();
            tokio::time::sleep(MS * rng.u32(..300)).await;
            server.start().unwrap();
            "killed"
        }
        1 => {
            server.pause().unwrap();
            // Now and then for longer than a lease.
            let longest = if rng.u8(..4) == 0 { 2_500 } else { 500 };
            tokio::time::sleep(MS * rng.u32(..longest)).await;
            server.resume().unwrap();
            "stopped"
        }
        2 => {
            for _ in 0..rng.u32(1..10) {
                proxy.reset();
                tokio::time::sleep(MS * rng.u32(..50)).await;
            }
            "reset"
        }
        _ => {
            proxy.set(Fault::DropReplies);
            tokio::time::sleep(MS * rng.u32(..600)).await;
            proxy.set(Fault::Pass);
            "replies lost"
        }
    }
}
