//! Servers that answer what no server answers: each answer of a table, in the place of each of some replies.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::AcquireOptions;
use lockkit_redis::RedisConfig;
use lockkit_testbed::redis::RedisServer;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::common::{LONG, SECOND, connect, no_server, shown, within};

const PASSWORD: &str = "canary";
/// The most bytes that a client takes from a rogue, with all that the system keeps in between.
const MOST_TAKEN: usize = 32 * 1024 * 1024;
/// The time that an acquisition has.
const PATIENCE: Duration = Duration::from_secs(2);

/// The words of a request, in the place of whose reply a rogue sends its own.
const REQUESTS: [&str; 6] = ["HELLO", "INFO", "SUBSCRIBE", "LOAD", "DELIFEQ", "EVALSHA"];

/// The rogue's conduct after its answer.
#[derive(Clone)]
enum Then {
    IsSilent,
    Closes,
    Repeats(Vec<u8>),
}

use Then::{Closes, IsSilent, Repeats};

type Answer = (&'static str, Vec<u8>, Then);

/// Values of every type, and what is none.
fn values() -> Vec<Answer> {
    let silent = |name, bytes: &[u8]| (name, bytes.to_vec(), IsSilent);
    vec![
        silent("OK", b"+OK\r\n"),
        silent("a reply to something else", b"+PONG\r\n"),
        silent("an integer", b":7\r\n"),
        silent("a negative integer", b":-7\r\n"),
        silent("an integer beyond all", b":9223372036854775808\r\n"),
        silent("an integer of letters", b":seven\r\n"),
        silent("nil", b"$-1\r\n"),
        silent("a string of negative length", b"$-5\r\n"),
        silent("an empty array", b"*0\r\n"),
        silent("no array", b"*-1\r\n"),
        silent("an array of a negative length", b"*-7\r\n"),
        silent("an array in an array", b"*1\r\n*1\r\n*1\r\n$-1\r\n"),
        silent("a map", b"%1\r\n+a\r\n+b\r\n"),
        silent("a map of a negative length", b"%-1\r\n"),
        silent("an attribute before nothing", b"|1\r\n+a\r\n+b\r\n"),
        silent("a text of no kind", b"=3\r\ntxt\r\n"),
        silent("a text of a negative length", b"=-1\r\n"),
        silent("a long number", b"(340282366920938463463374607431768211456\r\n"),
        silent("no number", b",nan\r\n"),
        silent("neither true nor false", b"#x\r\n"),
        silent("a set", b"~1\r\n:1\r\n"),
        silent("a long error", b"!5\r\nERR a\r\n"),
        silent("an empty error", b"-\r\n"),
        silent("an error that is no text", b"-\xff\xfe \xff\r\n"),
        silent(
            "it is loading",
            b"-LOADING Redis is loading the dataset in memory\r\n",
        ),
        silent("it has moved", b"-MOVED 1 127.0.0.1:1\r\n"),
        silent("a push", b">2\r\n$1\r\na\r\n$1\r\nb\r\n"),
        silent("an empty push", b">0\r\n"),
        silent("a push of no kind", b">2\r\n:1\r\n:2\r\n"),
        silent("an empty line", b"\r\n"),
        silent("an unknown type", b"?\r\n"),
        silent("zeros", &[0; 64]),
        silent("HTTP", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
        silent("TLS", &[0x15, 3, 1, 0, 2, 2, 70]),
    ]
}

/// Answers that are too large, or have no end, or break off.
fn lengths() -> Vec<Answer> {
    let endless = |name, bytes: &[u8], again: Vec<u8>| (name, bytes.to_vec(), Repeats(again));
    let zeros = vec![0; 64 * 1024];
    let deep = b"*1\r\n".repeat(10_000);
    vec![
        ("nothing", vec![], IsSilent),
        ("the end", vec![], Closes),
        ("half a string", b"$70\r\nlockkit".to_vec(), IsSilent),
        ("half a string and the end", b"$70\r\nlockkit".to_vec(), Closes),
        ("half a line and the end", b"-ERR".to_vec(), Closes),
        ("half a map", b"%2\r\n+a\r\n".to_vec(), IsSilent),
        (
            "a string beyond all",
            b"$9223372036854775807\r\n".to_vec(),
            IsSilent,
        ),
        (
            "an array beyond all",
            b"*9223372036854775807\r\n".to_vec(),
            IsSilent,
        ),
        (
            "an attribute beyond all",
            b"|9223372036854775807\r\n".to_vec(),
            IsSilent,
        ),
        ("arrays 10,000 deep", deep, IsSilent),
        endless("a string of 512 MiB", b"$536870912\r\n", zeros.clone()),
        endless("a line without end", b"+", vec![b'a'; 64 * 1024]),
        endless(
            "an array without end",
            b"*2147483647\r\n",
            b"$4096\r\n"
                .iter()
                .copied()
                .chain(vec![b'a'; 4096])
                .chain(*b"\r\n")
                .collect(),
        ),
        endless("pushes without end", b"", b">1\r\n$1\r\na\r\n".repeat(1_000)),
        endless("replies without end", b"", b"+OK\r\n".repeat(1_000)),
    ]
}

/// Passes everything on up to the first such request. Counts what it has sent instead of a reply.
async fn rogue(server: SocketAddr, request: &'static str, answer: Answer) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let sent = Arc::<AtomicUsize>::default();
    let counts = sent.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (counts, answer) = (counts.clone(), answer.clone());
            tokio::spawn(async move { play(client, server, request, answer, &counts).await });
        }
    });
    (addr, sent)
}

async fn play(
    mut client: TcpStream,
    server: SocketAddr,
    request: &str,
    (_, bytes, then): Answer,
    sent: &AtomicUsize,
) -> std::io::Result<()> {
    let mut server = TcpStream::connect(server).await?;
    let (mut requests, mut replies) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        tokio::select! {
            read = client.read(&mut requests) => {
                let asked = &requests[..read?];
                if asked.is_empty() {
                    return Ok(());
                }
                if asked.windows(request.len()).any(|word| word == request.as_bytes()) {
                    break;
                }
                server.write_all(asked).await?;
            }
            read = server.read(&mut replies) => client.write_all(&replies[..read?]).await?,
        }
    }
    client.write_all(&bytes).await?;
    match then {
        Closes => {}
        IsSilent => while client.read(&mut requests).await? > 0 {},
        Repeats(again) => loop {
            client.write_all(&again).await?;
            sent.fetch_add(again.len(), Ordering::Relaxed);
        },
    }
    Ok(())
}

/// Returns what is wrong with the end of this case.
async fn fault(server: SocketAddr, request: &'static str, answer: Answer) -> Option<String> {
    let name = format!("{} instead of the reply to {request}", answer.0);
    let (addr, sent) = rogue(server, request, answer).await;
    let asking = tokio::spawn(async move {
        let client = connect(RedisConfig::new(format!("redis://:{PASSWORD}@{addr}"))).await?;
        let options = AcquireOptions::new().ttl(5 * SECOND);
        let lock = client.lock("a")?.with_options(options);
        lock.acquire_timeout(PATIENCE)
            .await
            .map(|held| format!("{held:?}"))
    });
    let outcome = within(LONG, &name, asking).await;
    let fault = match outcome {
        Err(panic) => format!("{panic}"),
        Ok(Ok(held)) => format!("PROMISE BROKEN: {held}"),
        Ok(Err(error)) => {
            let (text, sent) = (shown(&error), sent.load(Ordering::Relaxed));
            println!("{name}: {error}, {sent}");
            match () {
                () if text.contains(PASSWORD) => format!("it shows the password: {text}"),
                () if sent > MOST_TAKEN => format!("it took {sent} bytes"),
                () => return None,
            }
        }
    };
    Some(format!("{name}: {fault}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_reply_is_taken_from_a_rogue() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder().password(PASSWORD).start().unwrap();
    let mut faults = Vec::new();
    for request in REQUESTS {
        let mut cases = JoinSet::new();
        let answers = values().into_iter().chain(lengths());
        // With an integer a server does grant a lock.
        for answer in answers.filter(|(name, ..)| (request, *name) != ("EVALSHA", "an integer")) {
            let addr = server.addr();
            cases.spawn(async move { fault(addr, request, answer).await });
        }
        faults.extend(cases.join_all().await.into_iter().flatten());
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
