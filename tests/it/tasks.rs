//! The tasks of a client, as docs/footprint.md has them.

use std::{ops::RangeInclusive, time::Duration};

use lockkit_testbed::eventually;
use tokio::runtime::Handle;

use crate::{
    connections::{connections, ports},
    swaps::Deployments,
};

const PAGE: &str = include_str!("../../docs/footprint.md");

/// For each scheme: the beginning of its row on the page, and the tasks of a client that holds, at least and at most.
const DOCUMENTED: [(&str, &str, RangeInclusive<usize>); 9] = [
    ("memory", "| `memory:`, `file:` | 1 |", 1..=1),
    ("file", "| `memory:`, `file:` | 1 |", 1..=1),
    ("redis", "| `redis:` | 3 |", 3..=3),
    // With three masters.
    ("redlock", "| `redlock:` | 3 and 1 for each master |", 6..=6),
    ("zk", "| `zk:` | 3 |", 3..=3),
    ("etcd", "| `etcd:` | 6 or 7 |", 6..=7),
    ("mysql", "| `mysql:` | 3 |", 3..=3),
    ("mysql?mode=lease", "| `mysql:`, `mode=lease` | 2 |", 2..=2),
    ("postgres", "| `postgres:` | 2 |", 2..=2),
];

#[test]
fn each_row_of_the_page_is_counted() {
    let (_, section) = PAGE.split_once("\n## Tasks and threads\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let is_counted = DOCUMENTED.iter().any(|(_, known, _)| row.starts_with(known));
        assert!(is_counted, "nothing counts this: {row}");
    }
    for (scheme, row, _) in DOCUMENTED {
        let is_there = section.lines().any(|line| line.starts_with(row));
        assert!(is_there, "the page does not have this of {scheme}: {row}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_as_many_tasks_as_documented() {
    const LOCKS: usize = 5;
    /// Others, such as one that connects, come and go.
    const LOOKS: usize = 50;
    let Some(deployments) = tokio::task::block_in_place(Deployments::start) else {
        return;
    };
    for (scheme, _, own) in DOCUMENTED {
        let (kind, mode) = scheme.split_once('?').unwrap_or((scheme, ""));
        let is_meant = |url: &&String| url.starts_with(&format!("{kind}:")) && url.ends_with(mode);
        let url = deployments.urls.iter().find(is_meant).unwrap();
        // Each connection of MySQL has one more task.
        let ports = if kind == "mysql" { ports(url) } else { Vec::new() };
        let between = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{between}namespace=tasks");
        let there_are = async |what: &str, clients: usize, of_the_test: usize| {
            let expected = own.start() * clients..=own.end() * clients;
            let (mut seen, mut in_a_row) = (None, 0);
            let what = format!("{scheme}: {what}, {expected:?} tasks");
            eventually(&what, async || {
                let others = of_the_test + connections(&ports);
                let counted = Handle::current().metrics().num_alive_tasks().checked_sub(others);
                if seen != Some(counted) {
                    println!("{what}: {counted:?}");
                    seen = Some(counted);
                }
                let is_right = counted.is_some_and(|counted| expected.contains(&counted));
                in_a_row = if is_right { in_a_row + 1 } else { 0 };
                in_a_row == LOOKS
            })
            .await;
        };

        there_are("before", 0, 0).await;
        let client = lockkit::connect(&url).await.unwrap();
        let mut held = Vec::new();
        for n in 0..LOCKS {
            held.push(client.lock(format!("held {n}")).unwrap().acquire().await.unwrap());
        }
        there_are("holding", 1, 0).await;
        let other = lockkit::connect(&url).await.unwrap();
        let its_own = other.lock("its own").unwrap().acquire().await.unwrap();
        let mut waiting = Vec::new();
        for guard in &held {
            let lock = other.lock(guard.name()).unwrap();
            waiting.push(tokio::spawn(async move { lock.acquire().await }));
        }
        there_are("waiting", 2, LOCKS).await;
        held.clear();
        for waiter in waiting {
            waiter.await.unwrap().unwrap().release().await.unwrap();
        }
        its_own.release().await.unwrap();
        for client in [client, other] {
            client.close(Duration::from_secs(5)).await.unwrap();
        }
        there_are("closed", 0, 0).await;
    }
}
