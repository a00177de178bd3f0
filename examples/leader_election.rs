//! Three nodes, of which one leads at a time. When a leader steps down, or its node is shut down under it, the next one
//! takes over.
//!
//! `cargo run --example leader_election [URL]`. Default: `memory:`. Each node has a client of its own, as if it were a
//! process of its own.

use std::{
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockkit::{AcquireOptions, FenceGate, FencingToken, LockClient};
use tokio::sync::Notify;

/// The number of entries that a leader writes before it steps down.
const TERM: usize = 3;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let journal = Arc::new(Journal::default());
    let clients = [
        lockkit::connect(&url).await?,
        lockkit::connect(&url).await?,
        lockkit::connect(&url).await?,
    ];
    let [ada, ben, cleo] = &clients;

    let busy = Arc::new(Notify::new());
    let nodes = [
        tokio::spawn(stand("ada", ada.clone(), journal.clone(), lead_a_term)),
        tokio::spawn(stand("cleo", cleo.clone(), journal.clone(), lead_a_term)),
    ];
    let tireless = {
        let busy = busy.clone();
        tokio::spawn(stand(
            "ben",
            ben.clone(),
            journal.clone(),
            async move |journal, name, token| {
                lead_a_term(journal.clone(), name, token).await?;
                busy.notify_one();
                // Leads for ever, unless its node is shut down.
                std::future::pending().await
            },
        ))
    };

    busy.notified().await;
    println!("ben's node is shut down");
    ben.close(Duration::from_secs(5)).await?;
    let ending = tireless.await??;
    assert!(matches!(ending, Ending::Lost), "{ending:?}");
    for node in nodes {
        let ending = node.await??;
        assert!(matches!(ending, Ending::SteppedDown), "{ending:?}");
    }

    let entries = journal
        .entries
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    assert_eq!(entries.len(), 3 * TERM, "each has led: {entries:?}");
    assert!(
        entries.is_sorted_by_key(|(token, _)| *token),
        "one after the other: {entries:?}"
    );
    println!("{} entries, written by one leader after the other", entries.len());
    Ok(())
}

#[derive(Debug)]
enum Ending {
    SteppedDown,
    Lost,
}

/// Waits to be elected, then leads until the work is done or the lock is lost.
async fn stand<F, Fut>(name: &'static str, node: LockClient, journal: Arc<Journal>, lead: F) -> Result<Ending>
where
    F: FnOnce(Arc<Journal>, &'static str, FencingToken) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    let lock = node
        .lock("leader")?
        .with_options(AcquireOptions::new().label(name));
    let guard = lock.acquire().await?;
    println!("{name} leads with {:?}", guard.token());
    match guard.run(lead(journal, name, guard.token())).await {
        Ok(done) => {
            done?;
            println!("{name} steps down");
            guard.release().await?;
            Ok(Ending::SteppedDown)
        }
        Err(lost) => {
            println!("{name} leads no more: {lost}");
            Ok(Ending::Lost)
        }
    }
}

async fn lead_a_term(journal: Arc<Journal>, name: &'static str, token: FencingToken) -> Result<()> {
    for _ in 0..TERM {
        journal.write(token, name)?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// The resource that only the leader may write. It refuses the entries of a leader that has been superseded.
#[derive(Debug, Default)]
struct Journal {
    gate: FenceGate,
    entries: Mutex<Vec<(FencingToken, &'static str)>>,
}

impl Journal {
    fn write(&self, token: FencingToken, who: &'static str) -> Result<()> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        self.gate.admit(token)?;
        entries.push((token, who));
        Ok(())
    }
}
