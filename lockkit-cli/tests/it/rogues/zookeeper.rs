//! ZooKeeper. A real server answers, up to the moment from which a rogue does.

use std::{fs, io, net::SocketAddr};

use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::{
    Plays, Rogue, Wire, skipped,
    zookeeper::{self, ZkServer},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinSet,
};

use super::{LONGEST_LINE, MOST_LINES, TIMEOUTS, Within, judged, run};
use crate::tool::{PATIENCE, lockkit};

use Plays::{Last, Once};

/// The bytes of a reply before its body: a number, a transaction and an error.
const HEADER: usize = 4 + 8 + 4;
/// The cases that run at once. Most of their time, they wait.
const AT_ONCE: usize = 4;

/// What a rogue makes of the reply that it has from the server.
type Forges = fn(&[u8]) -> Vec<u8>;

#[derive(Clone, Copy)]
enum Instead {
    /// Of the session.
    Session,
    /// Of this reply to a request, counted from 1.
    Reply(usize, Forges),
}

use Instead::{Reply, Session};

struct Case {
    name: String,
    instead: Instead,
    plays: Plays,
}

fn packet(body: &[u8]) -> Vec<u8> {
    [&u32::try_from(body.len()).unwrap().to_be_bytes()[..], body].concat()
}

fn session(version: i32, timeout: i32, password: i32) -> Vec<u8> {
    let mut body = [version, timeout].map(i32::to_be_bytes).concat();
    body.extend(7_i64.to_be_bytes());
    body.extend(password.to_be_bytes());
    body.extend([9; 16]);
    body.push(0);
    packet(&body)
}

fn sessions() -> Vec<(&'static str, Plays)> {
    vec![
        ("closes at once", Last(vec![])),
        ("is silent", Once(vec![])),
        ("speaks HTTP", Last(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec())),
        ("speaks SSH", Once(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec())),
        ("speaks Redis", Last(b"-ERR unknown command\r\n".to_vec())),
        ("speaks TLS", Last(vec![0x15, 3, 1, 0, 2, 2, 70])),
        ("a length below nothing", Last(vec![0xff; 64])),
        ("an empty session", Last(packet(&[]))),
        (
            "empty sessions without end",
            Plays::Endless(vec![], vec![0; 64_000]),
        ),
        ("half a session", Last(session(0, 10_000, 16)[..20].to_vec())),
        (
            "half a session, and silence",
            Once(session(0, 10_000, 16)[..20].to_vec()),
        ),
        ("a session of another version", Once(session(9, 10_000, 16))),
        ("a timeout below nothing", Once(session(0, -1, 16))),
        ("a timeout of nothing", Once(session(0, 0, 16))),
        ("a timeout without end", Once(session(0, i32::MAX, 16))),
        ("a session without a password", Once(session(0, 10_000, 0))),
        (
            "a password longer than its packet",
            Last(session(0, 10_000, i32::MAX)),
        ),
    ]
}

fn with_error(reply: &[u8], error: i32) -> Vec<u8> {
    packet(&[&reply[..HEADER - 4], &error.to_be_bytes()].concat())
}

fn with_body(reply: &[u8], body: &[u8]) -> Vec<u8> {
    packet(&[&reply[..HEADER - 4], &0_i32.to_be_bytes()[..], body].concat())
}

fn replies() -> Vec<(&'static str, Forges)> {
    vec![
        ("half a reply", |reply| packet(reply)[..HEADER].to_vec()),
        ("a reply shorter than its header", |reply| packet(&reply[..3])),
        ("a reply to nothing", |reply| {
            packet(&[&99_i32.to_be_bytes()[..], &reply[4..]].concat())
        }),
        ("the reply twice", |reply| packet(reply).repeat(2)),
        ("an event that is none", |reply| {
            packet(&[&(-1_i32).to_be_bytes()[..], &reply[4..HEADER], &[0xff; 9]].concat())
        }),
        ("no body", |reply| with_body(reply, &[])),
        ("half the body", |reply| {
            with_body(reply, &reply[HEADER..HEADER + (reply.len() - HEADER) / 2])
        }),
        ("a longer body", |reply| {
            with_body(reply, &[&reply[HEADER..], &[0; 100]].concat())
        }),
        ("a body of zeros", |reply| {
            with_body(reply, &vec![0; reply.len() - HEADER])
        }),
        ("a body of ones", |reply| {
            with_body(reply, &vec![0xff; reply.len() - HEADER])
        }),
        ("text that is none", |reply| {
            with_body(reply, &[0, 0, 0, 2, 0xff, 0xfe, 0, 0, 0, 0])
        }),
        ("an error that nobody knows", |reply| with_error(reply, -7_777)),
        ("an error above nothing", |reply| with_error(reply, i32::MAX)),
        ("the end of the session", |reply| with_error(reply, -112)),
        ("failed authentication", |reply| with_error(reply, -115)),
        ("no rights", |reply| with_error(reply, -102)),
        ("no such node", |reply| with_error(reply, -101)),
        ("such a node", |reply| with_error(reply, -110)),
    ]
}

fn cases() -> Vec<Case> {
    let sessions = sessions().into_iter().map(|(name, plays)| Case {
        name: name.to_owned(),
        instead: Session,
        plays,
    });
    // Among the first few are those of each kind of request of an attempt.
    let replies = replies().into_iter().flat_map(|(name, forges)| {
        [1, 2, 4].map(|at| Case {
            name: format!("reply {at}: {name}"),
            instead: Reply(at, forges),
            plays: Once(vec![]),
        })
    });
    sessions.chain(replies).collect()
}

async fn receive(from: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
    let length = from.read_u32().await?;
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body).await?;
    Ok(body)
}

/// Passes on what the server says up to this moment, and returns what the rogue says then.
async fn pass_on(
    from_server: &mut OwnedReadHalf,
    to_client: &mut OwnedWriteHalf,
    instead: Instead,
) -> io::Result<Vec<u8>> {
    let greeting = receive(from_server).await?;
    let Reply(at, forges) = instead else {
        return Ok(Vec::new());
    };
    to_client.write_all(&packet(&greeting)).await?;
    let mut count = 0;
    loop {
        let reply = receive(from_server).await?;
        // Events and the replies to pings have numbers below 0.
        if i32::from_be_bytes(reply[..4].try_into().unwrap()) > 0 {
            count += 1;
            if count == at {
                return Ok(forges(&reply));
            }
        }
        to_client.write_all(&packet(&reply)).await?;
    }
}

async fn behave(client: TcpStream, server: SocketAddr, instead: Instead) -> io::Result<Box<dyn Wire>> {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = TcpStream::connect(server).await?.into_split();
    let forged = tokio::select! {
        forged = pass_on(&mut from_server, &mut to_client, instead) => forged?,
        Err(error) = copy(&mut from_client, &mut to_server) => return Err(error),
    };
    to_client.write_all(&forged).await?;
    let client = from_client.reunite(to_client).map_err(io::Error::other)?;
    Ok(Box::new(client))
}

/// Returns what is wrong with the end of a command. It may have the lock from the server, in spite of the rogue.
async fn fault(case: Case, server: SocketAddr) -> Option<String> {
    let (name, instead) = (case.name, case.instead);
    let rogue = Rogue::start(case.plays, move |client| behave(client, server, instead));
    let rogue = rogue.await.unwrap();
    let directory = TempDir::new().unwrap();
    let ran = directory.path().join("ran");
    let url = format!(
        "zk://{}/{}?{TIMEOUTS}",
        rogue.addr(),
        name.replace([' ', ',', ':'], "-")
    );
    let mut client = lockkit(&[
        "run",
        "--try",
        "--url",
        &url,
        "job",
        "--",
        "touch",
        ran.to_str().unwrap(),
    ]);
    let clock = Stopwatch::start();
    let ended = match rogue.judge(PATIENCE, &mut client).await {
        Ok(ended) => ended,
        Err(fault) => return Some(format!("{name}: {fault}")),
    };
    let (took, said) = (clock.elapsed(), ended.complaint.trim_end());
    println!(
        "{name}: {took:?}, {:?}, {:?} bytes: {said}",
        ended.status.code(),
        ended.memory
    );
    let has_run = fs::exists(&ran).unwrap();
    let is_fine = match ended.status.code() {
        Some(0) => has_run,
        // The lease may have been lost meanwhile.
        Some(123) => true,
        Some(124 | 125) => !has_run && !said.is_empty(),
        _ => false,
    };
    let is_in_lines = said.lines().count() <= MOST_LINES
        && said.lines().all(|line| {
            line.starts_with("lockkit: ")
                && !line.chars().any(char::is_control)
                && line.chars().count() <= LONGEST_LINE
        });
    let in_time = took <= Within::Trying.limit();
    (!is_fine || !is_in_lines || !in_time)
        .then(|| format!("{name}: {took:?}, {}, ran: {has_run}: {said}", ended.status))
}

#[test]
fn no_rogue_of_zookeeper_gets_more_than_an_error() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    let server = ZkServer::plain().unwrap();
    run(async {
        let (mut pending, mut running, mut faults) = (cases().into_iter(), JoinSet::new(), Vec::new());
        loop {
            let free = AT_ONCE - running.len();
            for case in pending.by_ref().take(free) {
                running.spawn(fault(case, server.addr()));
            }
            match running.join_next().await {
                Some(fault) => faults.extend(fault.unwrap()),
                None => break,
            }
        }
        judged(&faults);
    });
}
