use std::io;

use super::RedisServer;

/// A cluster of three masters without replicas, each with a third of the slots.
///
/// The nodes can be paused, killed and started one by one. A node counts as down 2 s after it fell silent.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

/// The slots of each node.
const SLOTS: [(&str, &str); 3] = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];

impl RedisCluster {
    /// Starts the nodes and waits until each of them says that the cluster is complete.
    ///
    /// # Errors
    /// If it is not within two minutes.
    pub fn start() -> io::Result<Self> {
        let nodes = (0..SLOTS.len())
            .map(|_| {
                RedisServer::builder()
                    .cluster_node()
                    .directive("cluster-node-timeout", &["2000"])
                    .start()
            })
            .collect::<io::Result<Vec<_>>>()?;
        for (n, (node, (from, to))) in nodes.iter().zip(SLOTS).enumerate() {
            // Each an epoch of its own, so that they need not fight it out.
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(n + 1).to_string()])?;
            node.cli(&["CLUSTER", "ADDSLOTSRANGE", from, to])?;
        }
        for node in &nodes[1..] {
            let bus = nodes[0].cli(&["CONFIG", "GET", "cluster-port"])?;
            let bus = bus.lines().last().unwrap_or_default().to_owned();
            let (ip, port) = (
                nodes[0].addr().ip().to_string(),
                nodes[0].addr().port().to_string(),
            );
            node.cli(&["CLUSTER", "MEET", &ip, &port, &bus])?;
        }
        let cluster = Self { nodes };
        cluster.wait_complete()?;
        Ok(cluster)
    }

    /// The nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The node that has `key`.
    ///
    /// # Errors
    /// If none says so: it is down, or the cluster is.
    pub fn node_of(&self, key: &str) -> io::Result<&RedisServer> {
        // The others answer that it has moved.
        let has = |node: &&RedisServer| node.cli(&["EXISTS", key]).is_ok();
        self.nodes
            .iter()
            .find(has)
            .ok_or_else(|| io::Error::other(format!("no node has the slot of {key}")))
    }

    /// Waits until each node says that the cluster is complete, after one was away.
    ///
    /// # Errors
    /// If it is not within two minutes.
    pub fn wait_complete(&self) -> io::Result<()> {
        for node in &self.nodes {
            node.wait_ready(|| {
                let info = node.cli(&["CLUSTER", "INFO"])?;
                let all = ["cluster_state:ok", "cluster_slots_ok:16384", "cluster_size:3"];
                match all.iter().find(|line| !info.lines().any(|l| l == **line)) {
                    None => Ok(()),
                    Some(line) => Err(io::Error::other(format!("the cluster is not {line}"))),
                }
            })?;
        }
        Ok(())
    }
}
