//! Three processes, of which one leads at a time. The first leader is killed, the second resigns, and the third leads. The
//! process that started them observes who leads.
//!
//! `cargo run --example leader_election [URL]`, with a backend that several processes can reach. Default: files in a directory
//! of its own.

use std::{
    collections::HashMap,
    env,
    error::Error,
    io::Read as _,
    ops::ControlFlow,
    process::{Child, Command, Stdio},
    time::Duration,
};

use lockkit::{Election, LockClient};
use tokio::sync::oneshot;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Set for a node, which is a process of its own: its name, and the URL.
const NODE: &str = "LEADER_ELECTION_NODE";
const URL: &str = "LEADER_ELECTION_URL";

#[tokio::main]
async fn main() -> Result<()> {
    if let Ok(name) = env::var(NODE) {
        return node(&name).await;
    }
    let directory = env::temp_dir().join(format!("lockkit-leader-election-{}", std::process::id()));
    let url = env::args().nth(1);
    let ended = observe(&url.unwrap_or_else(|| format!("file://{}", directory.display()))).await;
    // Not there if a URL was given.
    let _ = std::fs::remove_dir_all(directory);
    ended
}

/// Leads whenever it can, until its standard input ends.
async fn node(name: &str) -> Result<()> {
    let (client, election) = join(&env::var(URL)?).await?;
    let candidate = election.candidate(name)?;
    let leading = candidate.lead(|held| async move {
        println!("{name} leads, with {:?}", held.token());
        // The work of a leader, for ever. It is stopped if the leadership is lost; each write of it carries the token.
        std::future::pending::<ControlFlow<()>>().await
    });
    let (end, ended) = oneshot::channel();
    std::thread::spawn(move || end.send(std::io::stdin().read(&mut [0])));
    tokio::select! {
        refused = leading => refused?,
        _ = ended => {}
    }
    println!("{name} resigns");
    Ok(client.close(Duration::from_secs(5)).await?)
}

/// Starts the nodes, ends each leader as it is elected, and sees who follows.
async fn observe(url: &str) -> Result<()> {
    let (client, election) = join(url).await?;
    let mut nodes = HashMap::new();
    for name in ["ada", "ben", "cleo"] {
        nodes.insert(name.to_owned(), Node::start(name, url)?);
    }
    let mut observer = election.observe();
    let mut tokens = Vec::new();
    while !nodes.is_empty() {
        let Some(leader) = observer.next().await? else {
            println!("nobody leads");
            continue;
        };
        println!("{} is seen to lead, with {:?}", leader.id, leader.token);
        tokens.push(leader.token);
        let mut node = nodes.remove(&leader.id).ok_or("a stranger leads")?;
        if tokens.len() == 1 {
            println!("{} is killed", leader.id);
            node.0.kill()?;
        }
        // To the end of its input. A process that was killed has ended already.
        drop(node.0.stdin.take());
        node.0.wait()?;
    }
    assert!(
        tokens.is_sorted() && tokens.len() == 3,
        "one after the other: {tokens:?}"
    );
    Ok(client.close(Duration::from_secs(5)).await?)
}

async fn join(url: &str) -> Result<(LockClient, Election)> {
    let client = lockkit::connect(url).await?;
    // As long as others have to wait if the leader is killed, where the backend's holds have a lease.
    let election = client.election("leader")?.with_ttl(Duration::from_secs(2));
    Ok((client, election))
}

/// The process of a node, which ends with this one.
struct Node(Child);

impl Node {
    fn start(name: &str, url: &str) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        // Not as an argument, which others can read: a URL may have a password.
        command.env(NODE, name).env(URL, url).stdin(Stdio::piped());
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}
