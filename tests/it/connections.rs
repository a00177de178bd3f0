//! The connections that a client keeps, as docs/choosing.md has them.

use std::{collections::HashSet, fs, ops::RangeInclusive, time::Duration};

use lockkit_testbed::eventually;

use crate::swaps::Deployments;

/// For each scheme: the connections of a client itself, at least and at most; those for each lock that it holds; and for each name that it
/// waits for.
const DOCUMENTED: [(&str, RangeInclusive<usize>, usize, usize); 7] = [
    ("redis", 1..=1, 0, 0),
    ("redlock", 3..=3, 0, 0),
    ("zk", 1..=1, 0, 0),
    ("mysql", 1..=2, 1, 1),
    ("mysql?mode=lease", 1..=2, 0, 1),
    ("postgres", 1..=2, 1, 1),
    ("etcd", 1..=1, 0, 0),
];

/// Counts the connections of this process to these ports.
pub(crate) fn connections(ports: &[u16]) -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = links.filter_map(|link| fs::read_link(link.path()).ok());
    let own: HashSet<String> = targets.map(|target| target.display().to_string()).collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .map(|table| fs::read_to_string(table).unwrap_or_default());
    let is_meant = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, _, remote, "01", ..] = fields[..] else {
            return false;
        };
        let port = remote
            .rsplit(':')
            .next()
            .and_then(|port| u16::from_str_radix(port, 16).ok());
        port.is_some_and(|port| ports.contains(&port)) && own.contains(&format!("socket:[{}]", fields[9]))
    };
    tables
        .iter()
        .flat_map(|table| table.lines())
        .filter(is_meant)
        .count()
}

pub(crate) fn ports(url: &str) -> Vec<u16> {
    let authority = url.split("//").nth(1).unwrap().split(['/', '?']).next().unwrap();
    let hosts = authority.rsplit('@').next().unwrap();
    hosts
        .split(',')
        .map(|host| host.rsplit(':').next().unwrap().parse().unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_as_many_connections_as_documented() {
    const LOCKS: usize = 5;
    let Some(deployments) = tokio::task::block_in_place(Deployments::start) else {
        return;
    };
    for (scheme, own, per_held, per_waited) in DOCUMENTED {
        let (kind, mode) = scheme.split_once('?').unwrap_or((scheme, ""));
        let is_meant = |url: &&String| url.starts_with(&format!("{kind}:")) && url.ends_with(mode);
        let url = deployments.urls.iter().find(is_meant).unwrap();
        let ports = ports(url);
        let between = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{between}namespace=connections");
        // One that is being made or closed counts for a moment.
        let are = async |what: &str, expected: RangeInclusive<usize>| {
            let what = format!("{scheme}: {what}, {expected:?} connections");
            eventually(&what, async || expected.contains(&connections(&ports))).await;
        };
        let plus = |more: usize, clients: usize| own.start() * clients + more..=own.end() * clients + more;

        are("before", 0..=0).await;
        let client = lockkit::connect(&url).await.unwrap();
        are("connected", plus(0, 1)).await;
        let mut held = Vec::new();
        for n in 0..LOCKS {
            held.push(client.lock(format!("held {n}")).unwrap().acquire().await.unwrap());
        }
        are("holding", plus(LOCKS * per_held, 1)).await;
        let other = lockkit::connect(&url).await.unwrap();
        let mut waiting = Vec::new();
        for guard in &held {
            let lock = other.lock(guard.name()).unwrap();
            waiting.push(tokio::spawn(async move { lock.acquire().await }));
        }
        are("waiting", plus(LOCKS * (per_held + per_waited), 2)).await;
        held.clear();
        for waiter in waiting {
            waiter.await.unwrap().unwrap().release().await.unwrap();
        }
        for client in [client, other] {
            client.close(Duration::from_secs(5)).await.unwrap();
        }
        are("closed", 0..=0).await;
    }
}
