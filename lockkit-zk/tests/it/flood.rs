//! A server that sends without end, or too much. Its client has a single thread, which does all else in time.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use lockkit_core::spi::chain;
use lockkit_testbed::{Lateness, zookeeper::ZkServer};

use crate::server::{brief_client, lock, no_zookeeper, unique};

/// For a program that was not optimized. What the flood itself costs the machine comes on top.
const MUCH: Duration = Duration::from_secs(1);
/// Far longer than a lease.
const LONGEST: Duration = Duration::from_secs(30);

/// Passes everything on, and sends nothing but this once it is told to.
fn flooding(upstream: SocketAddr, flood: Vec<u8>) -> (SocketAddr, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let told = Arc::new(AtomicBool::new(false));
    let is_told = told.clone();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (is_told, flood) = (is_told.clone(), flood.clone());
            thread::spawn(move || play(client, upstream, &is_told, &flood));
        }
    });
    (addr, told)
}

fn play(mut client: TcpStream, upstream: SocketAddr, is_told: &AtomicBool, flood: &[u8]) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream)?;
    server.set_read_timeout(Some(Duration::from_millis(10)))?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || io::copy(&mut requests, &mut to_server));
    let mut replies = vec![0; 64 * 1024];
    while !is_told.load(Ordering::Relaxed) {
        match server.read(&mut replies) {
            Ok(0) => return Ok(()),
            Ok(count) => client.write_all(&replies[..count])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    server.set_read_timeout(None)?;
    thread::spawn(move || io::copy(&mut server, &mut io::sink()));
    loop {
        client.write_all(flood)?;
    }
}

/// Returns how late the runtime let another task go on at most, until the hold of a client was lost.
async fn latest(addr: SocketAddr, told: &AtomicBool) -> Duration {
    let client = brief_client(addr).await;
    let guard = lock(&client, &unique("flood")).acquire().await.unwrap();
    told.store(true, Ordering::Relaxed);
    let mut lost = guard.lost();
    let mut late = Duration::ZERO;
    loop {
        let pause = Duration::from_millis(20);
        let due = Instant::now() + pause;
        tokio::select! {
            _ = &mut lost => return late,
            () = tokio::time::sleep(pause) => late = late.max(due.elapsed()),
        }
    }
}

#[test]
fn a_server_that_floods_leaves_others_their_turn() {
    if no_zookeeper() {
        return;
    }
    // An event, without a transaction or an error: the data of a node that nobody watches have changed, in a session that is connected.
    let mut event = [30, -1, -1, -1, 0, 3, 3, 2].map(i32::to_be_bytes).concat();
    event.extend(b"/a");
    let endless = vec![0x7f];
    for message in [event, endless] {
        let server = ZkServer::plain().unwrap();
        let flood = message.repeat(64 * 1024 / message.len());
        let (addr, told) = flooding(server.addr(), flood);
        let beside = Lateness::watch();
        let (done, outcome) = mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let _ = done.send(runtime.unwrap().block_on(latest(addr, &told)));
        });
        let late = outcome.recv_timeout(LONGEST).expect("its runtime goes on");
        let allowed = MUCH + 3 * beside.most();
        assert!(late < allowed, "{late:?}, and allowed are {allowed:?}");
    }
}

/// The number of the request for the names of a directory.
const LIST: [u8; 4] = 8_i32.to_be_bytes();

/// Passes everything on but requests for lists, and answers those at great length.
fn list_at_length(mut client: TcpStream, upstream: SocketAddr) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream)?;
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || io::copy(&mut from_server, &mut to_client));
    loop {
        let mut length = [0; 4];
        client.read_exact(&mut length)?;
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        client.read_exact(&mut body)?;
        if body.get(4..8) == Some(&LIST) {
            let long = (9_u32 << 20).to_be_bytes();
            client.write_all(&[&long[..], &body[..4], &[0; 12]].concat())?;
        } else {
            server.write_all(&[&length[..], &body].concat())?;
        }
    }
}

/// Else whoever lists is told each time that a connection was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_is_too_long_says_so() {
    if no_zookeeper() {
        return;
    }
    let server = tokio::task::block_in_place(ZkServer::plain).unwrap();
    let (listener, upstream) = (TcpListener::bind("127.0.0.1:0").unwrap(), server.addr());
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            thread::spawn(move || list_at_length(client, upstream));
        }
    });
    let client = brief_client(addr).await;
    let listed = client.list("").unwrap().next().await;
    let error = listed.expect("it does not end").expect_err("it is too long");
    let text = chain(&error);
    assert!(text.contains("8 MiB") && text.contains("directory"), "{text}");
}
