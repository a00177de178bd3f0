//! Servers that answer what no server answers, without end, or a byte at a time.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    net::SocketAddr,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf, split},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// The most bytes that a client takes from a rogue, with all that the system keeps in between.
const MOST_TAKEN: usize = 64 * 1024 * 1024;
/// The most memory that a client of a rogue has at any time, in bytes, with its program.
const MOST_KEPT: u64 = 64 * 1024 * 1024;
/// The most bytes of a client that are kept to be looked through.
const MOST_HEARD: usize = 1024 * 1024;
/// The pause after each byte of [`Plays::Trickle`].
const DRIP: Duration = Duration::from_millis(100);
/// The time between two looks at the memory of a client.
const LOOK_EVERY: Duration = Duration::from_millis(1);

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
    /// Sends the first, and the second again each time that the client has sent something.
    Answers(Vec<u8>, Vec<u8>),
    /// Sends this without end, one byte each 100 ms.
    Trickle(Vec<u8>),
}

/// A server that behaves at first, and then plays. It ends when this is dropped.
#[derive(Debug)]
pub struct Rogue {
    addr: SocketAddr,
    sent: Arc<AtomicUsize>,
    heard: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

/// The end of a client to which a rogue has played.
#[derive(Debug)]
pub struct Ended {
    /// The status of its process.
    pub status: ExitStatus,
    /// Its output, as text.
    pub output: String,
    /// What it has said on standard error, as text.
    pub complaint: String,
    /// The most memory that it had at any time, in bytes; `None` on other systems than Linux.
    pub memory: Option<u64>,
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
        let (sent, heard) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<_>>::default());
        let (plays, count, record) = (Arc::new(plays), sent.clone(), heard.clone());
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (begun, plays) = (behaves(client), plays.clone());
                let (count, record) = (count.clone(), record.clone());
                tokio::spawn(async move { play(begun.await?, &plays, &count, record).await });
            }
        });
        Ok(Self {
            addr,
            sent,
            heard,
            task,
        })
    }

    /// Returns its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns what its clients have sent since it plays, one after the other.
    pub fn heard(&self) -> Vec<u8> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs a client of it as a process of its own, whose memory is its own, too. Returns how it ended, or what is wrong with the end: a
    /// signal has ended it, or it takes longer than `limit`, or more than any reply is worth, in bytes or in memory.
    ///
    /// # Errors
    /// What is wrong.
    pub async fn judge(&self, limit: Duration, client: &mut Command) -> Result<Ended, String> {
        let ended = run(limit, client).await.map_err(|error| error.to_string())?;
        let Some(ended) = ended else {
            return Err(format!("no end within {limit:?}"));
        };
        let said = format!("{}{}", ended.output, ended.complaint);
        let sent = self.sent.load(Ordering::Relaxed);
        match ended.memory {
            _ if ended.status.code().is_none() => Err(format!("{}: {said}", ended.status)),
            _ if sent > MOST_TAKEN => Err(format!("it took {sent} bytes: {said}")),
            Some(memory) if memory > MOST_KEPT => Err(format!("it had {memory} bytes of memory: {said}")),
            _ => Ok(ended),
        }
    }
}

impl Drop for Rogue {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A process that does not outlive its judge.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a client, and returns how it ended; `None` if it has not within `limit`.
async fn run(limit: Duration, client: &mut Command) -> io::Result<Option<Ended>> {
    // Files, so that it never waits for somebody to read.
    let (output, complaint) = (tempfile::tempfile()?, tempfile::tempfile()?);
    client
        // The names for a backtrace take more memory than a client may have.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(complaint.try_clone()?);
    let (mut process, began) = (Client(client.spawn()?), Instant::now());
    let mut memory = None;
    loop {
        memory = memory.max(peak(process.0.id()));
        if let Some(status) = process.0.try_wait()? {
            return Ok(Some(Ended {
                status,
                output: text(output)?,
                complaint: text(complaint)?,
                memory,
            }));
        }
        if began.elapsed() > limit {
            return Ok(None);
        }
        sleep(LOOK_EVERY).await;
    }
}

fn text(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the most memory that a process has had, in bytes; `None` once it has ended, and on other systems than Linux.
fn peak(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes * 1024)
}

type Received = watch::Receiver<usize>;

async fn play(
    client: Box<dyn Wire>,
    plays: &Plays,
    sent: &AtomicUsize,
    record: Arc<Mutex<Vec<u8>>>,
) -> io::Result<()> {
    let (from_client, mut to_client) = split(client);
    let (received, mut requests) = watch::channel(0);
    let hearing = tokio::spawn(hear(from_client, record, received));
    let played = play_to(&mut to_client, plays, sent, &mut requests).await;
    if played.is_ok() && !matches!(plays, Plays::Last(_)) {
        let _ = hearing.await;
    }
    played
}

async fn play_to(
    client: &mut WriteHalf<Box<dyn Wire>>,
    plays: &Plays,
    sent: &AtomicUsize,
    requests: &mut Received,
) -> io::Result<()> {
    let sends = async |client: &mut WriteHalf<Box<dyn Wire>>, bytes: &[u8]| {
        client.write_all(bytes).await?;
        client.flush().await?;
        sent.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok::<_, io::Error>(())
    };
    match plays {
        Plays::Once(bytes) => sends(client, bytes).await,
        Plays::Last(bytes) => {
            sends(client, bytes).await?;
            client.shutdown().await
        }
        Plays::Endless(first, again) => {
            sends(client, first).await?;
            loop {
                sends(client, again).await?;
            }
        }
        Plays::Answers(first, again) => {
            sends(client, first).await?;
            while requests.changed().await.is_ok() {
                sends(client, again).await?;
            }
            Ok(())
        }
        Plays::Trickle(bytes) => {
            for byte in bytes.iter().cycle() {
                sends(client, &[*byte]).await?;
                sleep(DRIP).await;
            }
            Ok(())
        }
    }
}

/// Keeps what a client sends, until it closes the connection, and tells of it.
async fn hear(
    mut client: ReadHalf<Box<dyn Wire>>,
    record: Arc<Mutex<Vec<u8>>>,
    received: watch::Sender<usize>,
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(length @ 1..) = client.read(&mut buffer).await {
        let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST_HEARD.saturating_sub(record.len());
        record.extend_from_slice(&buffer[..length.min(room)]);
        drop(record);
        received.send_modify(|count| *count += length);
    }
}
