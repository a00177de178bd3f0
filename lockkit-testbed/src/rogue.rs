//! Servers that answer what no server answers, without end, or a byte at a time.

use std::{
    fs, io,
    net::SocketAddr,
    panic,
    sync::{
        Arc, Once,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};

/// The most bytes that a client takes from a rogue, with all that the system keeps in between.
const MOST_TAKEN: usize = 32 * 1024 * 1024;
/// The most memory that a case may cost, in bytes.
const MOST_KEPT: u64 = 64 * 1024 * 1024;
/// The pause after each byte of [`Plays::Trickle`].
const DRIP: Duration = Duration::from_millis(100);

/// A connection, with TLS or without.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// The conduct of a rogue once it stops behaving.
#[derive(Clone, Debug)]
pub enum Plays {
    /// Sends this, and is silent.
    Once(Vec<u8>),
    /// Sends this, and closes the connection.
    Last(Vec<u8>),
    /// Sends the first, and then the second without end.
    Endless(Vec<u8>, Vec<u8>),
    /// Sends this without end, one byte each 100 ms.
    Trickle(Vec<u8>),
}

/// A server that behaves at first, and then plays. It ends when this is dropped.
#[derive(Debug)]
pub struct Rogue {
    addr: SocketAddr,
    sent: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Rogue {
    /// Starts one on the current runtime. `behaves` takes each connection up to the moment from which it plays.
    ///
    /// # Errors
    /// If there is no port.
    pub async fn start<F>(
        plays: Plays,
        behaves: impl Fn(TcpStream) -> F + Send + Sync + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = io::Result<Box<dyn Wire>>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let (sent, plays) = (Arc::new(AtomicUsize::new(0)), Arc::new(plays));
        let count = sent.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (begun, plays, count) = (behaves(client), plays.clone(), count.clone());
                tokio::spawn(async move { play(begun.await?, &plays, &count).await });
            }
        });
        Ok(Self { addr, sent, task })
    }

    /// Returns its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Runs a client of it, which ends with the text of its error. Returns that text, or what is wrong with the end: it panics, succeeds,
    /// takes longer than `limit`, or takes more than any reply is worth, in bytes or in memory.
    ///
    /// # Errors
    /// What is wrong.
    pub async fn judge<T: Send + 'static>(
        &self,
        limit: Duration,
        client: impl Future<Output = Result<T, String>> + Send + 'static,
    ) -> Result<String, String> {
        let before = begin_peak();
        let outcome = tokio::spawn(timeout(limit, client)).await;
        let kept = before
            .zip(memory("VmHWM:"))
            .map(|(before, peak)| peak.saturating_sub(before));
        let sent = self.sent.load(Ordering::Relaxed);
        let text = match outcome {
            Err(panic) => return Err(panic.to_string()),
            Ok(Err(_)) => return Err(format!("no end within {limit:?}")),
            Ok(Ok(Ok(_))) => return Err("it succeeded".to_owned()),
            Ok(Ok(Err(text))) => text,
        };
        match kept {
            _ if text.trim().is_empty() => Err("an error without a text".to_owned()),
            _ if sent > MOST_TAKEN => Err(format!("it took {sent} bytes: {text}")),
            Some(kept) if kept > MOST_KEPT => Err(format!("it cost {kept} bytes of memory: {text}")),
            _ => Ok(text),
        }
    }
}

impl Drop for Rogue {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn play(mut client: Box<dyn Wire>, plays: &Plays, sent: &AtomicUsize) -> io::Result<()> {
    let sends = async |client: &mut Box<dyn Wire>, bytes: &[u8]| {
        client.write_all(bytes).await?;
        client.flush().await?;
        sent.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok::<_, io::Error>(())
    };
    match plays {
        Plays::Once(bytes) => {
            sends(&mut client, bytes).await?;
            let mut ignored = [0; 1024];
            while client.read(&mut ignored).await? > 0 {}
        }
        Plays::Last(bytes) => {
            sends(&mut client, bytes).await?;
            client.shutdown().await?;
        }
        Plays::Endless(first, again) => {
            sends(&mut client, first).await?;
            loop {
                sends(&mut client, again).await?;
            }
        }
        Plays::Trickle(bytes) => {
            for byte in bytes.iter().cycle() {
                sends(&mut client, &[*byte]).await?;
                sleep(DRIP).await;
            }
        }
    }
    Ok(())
}

/// Begins to look for the most memory of this process, and returns what it has now, in bytes; `None` on other systems than Linux.
fn begin_peak() -> Option<u64> {
    static FIRST_PANIC: Once = Once::new();
    // A panic that is caught may print a backtrace, and the first one reads the names of all functions, which stay in memory.
    FIRST_PANIC.call_once(|| {
        let _ = panic::catch_unwind(|| panic!("expected: its backtrace is to cost nothing later"));
    });
    fs::write("/proc/self/clear_refs", "5").ok()?;
    memory("VmRSS:")
}

fn memory(which: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(which))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes * 1024)
}
