//! Servers that answer what no server answers, each answer of a table. No ZooKeeper is needed.

use std::{io, net::SocketAddr, time::Duration};

use lockkit_conformance::stall;
use lockkit_core::spi::chain;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::server;

/// Longer than two rounds of attempts on a busy machine.
const LONGEST: Duration = Duration::from_secs(30);
const OK: i32 = 0;
/// The number of each ping.
const PING: i32 = -2;

/// What a rogue sends in the place of its answer to a request for a session, or to the first request of a session.
#[derive(Clone)]
enum Answer {
    /// These bytes in place of the session. Then it closes the connection.
    Session(Vec<u8>),
    /// A reply to that request, with this error and body. Then it is silent.
    Reply(i32, Vec<u8>),
    /// These bytes in place of a reply. Then it closes the connection.
    Bytes(Vec<u8>),
}

use Answer::{Bytes, Reply, Session};

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

/// Returns a text with this length in front, and then a node's state.
fn made(length: i32, text: &[u8]) -> Vec<u8> {
    [&length.to_be_bytes()[..], text, &[0; 68]].concat()
}

fn reply(xid: i32, error: i32, body: &[u8]) -> Vec<u8> {
    let header = [&xid.to_be_bytes()[..], &1_i64.to_be_bytes(), &error.to_be_bytes()].concat();
    packet(&[&header, body].concat())
}

fn answers() -> Vec<(&'static str, Answer)> {
    vec![
        ("closes at once", Session(vec![])),
        (
            "speaks HTTP",
            Session(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ),
        ("speaks TLS", Session(vec![0x15, 3, 1, 0, 2, 2, 70])),
        ("a length below nothing", Session(vec![0xff; 64])),
        ("an empty session", Session(packet(&[]))),
        ("half a session", Session(session(0, 10_000, 16)[..20].to_vec())),
        ("a session of another version", Session(session(9, 10_000, 16))),
        ("a timeout below nothing", Session(session(0, -1, 16))),
        ("a session without a password", Session(session(0, 10_000, 0))),
        (
            "a password longer than its packet",
            Session(session(0, 10_000, i32::MAX)),
        ),
        ("closes instead of a reply", Bytes(vec![])),
        ("half a reply", Bytes(vec![0, 0, 0, 60, 0])),
        ("a reply shorter than its header", Bytes(packet(&[0; 3]))),
        ("a reply to nothing", Bytes(reply(99, OK, &[]))),
        ("an event that is none", Bytes(reply(-1, OK, &[0xff; 9]))),
        ("a path without a length", Reply(OK, vec![])),
        ("an empty path", Reply(OK, made(0, b""))),
        ("no path", Reply(OK, made(-1, b""))),
        ("a path longer than its packet", Reply(OK, made(i32::MAX, b"/a"))),
        ("a path that is no text", Reply(OK, made(2, &[0xff, 0xfe]))),
        (
            "a path without a state",
            Reply(OK, [&2_i32.to_be_bytes()[..], b"/a"].concat()),
        ),
        ("an error that nobody knows", Reply(-7_777, vec![])),
        ("an error above nothing", Reply(i32::MAX, vec![])),
        ("no rights", Reply(-102, vec![])),
    ]
}

async fn receive(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = client.read_u32().await?;
    let mut body = vec![0; length as usize];
    client.read_exact(&mut body).await?;
    Ok(body)
}

async fn play(mut client: TcpStream, answer: Answer) -> io::Result<()> {
    receive(&mut client).await?;
    if let Session(bytes) = answer {
        return client.write_all(&bytes).await;
    }
    client.write_all(&session(0, 10_000, 16)).await?;
    let xid = loop {
        let request = receive(&mut client).await?;
        let xid = i32::from_be_bytes(request[..4].try_into().unwrap());
        if xid != PING {
            break xid;
        }
        client.write_all(&reply(PING, OK, &[])).await?;
    };
    match answer {
        Reply(error, body) => client.write_all(&reply(xid, error, &body)).await?,
        Session(bytes) | Bytes(bytes) => return client.write_all(&bytes).await,
    }
    while receive(&mut client).await.is_ok() {}
    Ok(())
}

async fn rogue(answer: Answer) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(play(client, answer.clone()));
        }
    });
    addr
}

/// Returns what is wrong with the end of this case.
async fn fault(name: &str, answer: Answer) -> Option<String> {
    let addr = rogue(answer).await;
    let connecting = tokio::spawn(server::client(server::config(addr)));
    let text = match stall::timeout(LONGEST, connecting).await {
        Err(_) => return Some(format!("{name}: no end within {LONGEST:?}")),
        Ok(Err(panic)) => return Some(format!("{name}: {panic}")),
        Ok(Ok(Ok(_))) => return Some(format!("{name}: connected")),
        Ok(Ok(Err(error))) => chain(&error),
    };
    println!("{name}: {text}");
    let blames = text.contains("runtime");
    blames.then(|| format!("{name}: {text}"))
}

#[tokio::test]
async fn no_answer_is_taken_from_a_rogue() {
    let mut cases = JoinSet::new();
    for (name, answer) in answers() {
        cases.spawn(fault(name, answer));
    }
    let faults: Vec<_> = cases.join_all().await.into_iter().flatten().collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
