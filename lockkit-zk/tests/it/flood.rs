//! A server that sends without end. Its client has a single thread, which does all else in time.

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
