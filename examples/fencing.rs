//! A holder is paused past its lease and then writes without a look. The resource refuses the write by its token.
//!
//! `cargo run --example fencing [URL]`, with a backend that has leases. Default: `memory:`.

use std::{
    error::Error,
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use lockkit::{AcquireOptions, FenceGate, FencingToken, LockClient, StaleToken};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let account = Account {
        balance: Mutex::new(100),
        gate: FenceGate::new(),
    };
    let (holds, is_held) = mpsc::channel();
    let (resume, resumed) = mpsc::channel();

    // Each has a thread, a runtime and a client of its own, as if the other were in another process.
    let (refusal, token) = thread::scope(|scope| {
        let paused = scope.spawn(|| on_a_runtime(withdraw_after_a_pause(&url, &account, holds, resumed)));
        let other = scope.spawn(|| on_a_runtime(deposit(&url, &account, is_held, resume)));
        (paused.join(), other.join())
    });
    let token = token.map_err(|_| "the other holder panicked")??;
    let refusal = refusal.map_err(|_| "the paused holder panicked")??;
    println!("the paused holder's write was refused: {refusal}");
    assert_eq!(refusal.highest, token);
    let balance = account.balance.into_inner()?;
    println!("the balance is {balance}");
    assert_eq!(balance, 150, "the deposit stands");
    Ok(())
}

/// The resource that the lock protects. It refuses the writes of a holder that has been superseded.
struct Account {
    balance: Mutex<i64>,
    gate: FenceGate,
}

impl Account {
    fn balance(&self) -> i64 {
        *self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, balance: i64, token: FencingToken) -> Result<(), StaleToken> {
        // The check and the write are one step, or a stale write could slip in between.
        let mut current = self.balance.lock().unwrap_or_else(PoisonError::into_inner);
        self.gate.admit(token)?;
        *current = balance;
        Ok(())
    }
}

/// Reads the balance, is paused, and writes without checking that the lock is still held.
async fn withdraw_after_a_pause(
    url: &str,
    account: &Account,
    holds: mpsc::Sender<()>,
    resumed: mpsc::Receiver<()>,
) -> Result<StaleToken> {
    let client = connect(url).await?;
    let guard = client.lock("account/7")?.acquire().await?;
    let balance = account.balance();
    println!("one reads {balance} with {:?}, and is paused", guard.token());
    holds.send(())?;

    // Blocks the whole runtime, renewal included, like a stopped process or a suspended machine.
    resumed.recv()?;
    let written = account.set(balance - 30, guard.token());
    assert!(
        guard.check().is_err_and(|err| err.is_lost()),
        "it would have been told, had it asked"
    );
    written.err().ok_or_else(|| "a stale write went through".into())
}

/// Waits until the lease of the other has run out, and writes.
async fn deposit(
    url: &str,
    account: &Account,
    is_held: mpsc::Receiver<()>,
    resume: mpsc::Sender<()>,
) -> Result<FencingToken> {
    let client = connect(url).await?;
    is_held.recv()?;
    let guard = client.lock("account/7")?.acquire().await?;
    let token = guard.token();
    account.set(account.balance() + 50, token)?;
    println!("the other writes {} with {token:?}", account.balance());
    resume.send(())?;
    guard.release().await?;
    Ok(token)
}

async fn connect(url: &str) -> Result<LockClient> {
    let client = lockkit::connect(url).await?;
    if !client.capabilities().lease {
        // Without a lease no holder goes stale: one that is paused keeps the lock.
        return Err(format!("holds of the {} backend have no lease", client.info().name).into());
    }
    Ok(client.with_defaults(AcquireOptions::new().ttl(Duration::from_millis(200)))?)
}

fn on_a_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}
