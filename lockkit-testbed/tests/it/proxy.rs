use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use lockkit_testbed::{Counts, Mode, Proxy, Traffic, eventually};

use crate::{echo::Echo, until::until};

/// Long enough for anything on loopback to have arrived if it were to arrive.
const A_WHILE: Duration = Duration::from_millis(150);

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn send(stream: &mut TcpStream, bytes: &str) {
    stream.write_all(bytes.as_bytes()).unwrap();
}

#[track_caller]
fn expect(stream: &mut TcpStream, bytes: &str) {
    let mut buffer = vec![0; bytes.len()];
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(String::from_utf8(buffer).unwrap(), bytes);
}

#[track_caller]
fn round_trip(stream: &mut TcpStream, bytes: &str) {
    send(stream, bytes);
    expect(stream, bytes);
}

#[track_caller]
fn expect_nothing(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(A_WHILE)).unwrap();
    let error = stream.read_exact(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
}

#[track_caller]
fn expect_reset(stream: &mut TcpStream) {
    let error = stream.read_exact(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

/// A server, a proxy before it, and a client that has been served through it.
fn served() -> (Echo, Proxy, TcpStream) {
    let server = Echo::start();
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut client = connect(&proxy);
    round_trip(&mut client, "a");
    (server, proxy, client)
}

#[test]
fn pass_hands_on_bytes_and_ends_both_ways() {
    let (server, proxy, mut client) = served();
    assert_eq!(proxy.mode(), Mode::Pass);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "the end comes back");
    until("the server sees an orderly end", || server.seen().ended == 1);

    let mut client = connect(&proxy);
    send(&mut client, "Q");
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "an end that the server began");
    assert_eq!(server.seen().reset, 0);
}

#[test]
fn pass_hands_on_much_at_once() {
    let (server, proxy, client) = served();
    let sent: Vec<u8> = (0..8_000_000_u32)
        .map(|n| n.to_le_bytes()[n as usize % 3] % 64)
        .collect();
    let mut writer = client.try_clone().unwrap();
    let copy = sent.clone();
    let writing = thread::spawn(move || {
        writer.write_all(&copy).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    (&client).read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
    assert_eq!(proxy.counts().replies.bytes, 1 + sent.len() as u64);
    assert_eq!(server.seen().reset, 0);
}

#[test]
fn pass_hands_on_what_follows_an_end_the_other_way() {
    let (server, _proxy, mut client) = served();
    // The server ends its direction on 'H' and goes on reading.
    send(&mut client, "H");
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    client.write_all(&vec![b'x'; 6_000_000]).unwrap();
    drop(client);
    until("the rest arrives in order", || server.seen().ended == 1);
    assert_eq!(server.seen().bytes.len(), 2 + 6_000_000);
}

#[test]
fn counts_tell_round_trips() {
    let (_server, proxy, mut client) = served();
    let mut second = connect(&proxy);
    for _ in 0..9 {
        round_trip(&mut client, "four");
    }
    round_trip(&mut second, "x");
    let traffic = Traffic {
        bytes: 1 + 9 * 4 + 1,
        chunks: 11,
    };
    assert_eq!(
        proxy.counts(),
        Counts {
            connections: 2,
            requests: traffic,
            replies: traffic,
            round_trips: 11,
            lost: Traffic::default(),
        }
    );
}

#[test]
fn what_is_sent_at_once_is_one_round_trip() {
    let (_server, proxy, mut client) = served();
    let mut second = connect(&proxy);
    let way = Duration::from_millis(200);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let before = proxy.counts().round_trips;
    for round in 1..=3 {
        send(&mut client, "b");
        send(&mut second, "c");
        until("all requests arrive", || {
            proxy.counts().requests.bytes == 1 + round * 3 - 1
        });
        send(&mut client, "d");
        expect(&mut second, "c");
        expect(&mut client, "b");
        expect(&mut client, "d");
        // The third was sent before any reply had come back.
        assert_eq!(proxy.counts().round_trips - before, round, "{:?}", proxy.counts());
    }
    send(&mut client, "e");
    expect(&mut client, "e");
    send(&mut client, "f");
    expect(&mut client, "f");
    assert_eq!(proxy.counts().round_trips - before, 5);
}

#[test]
fn beside_one_that_waits_another_makes_round_trips() {
    let (_server, proxy, mut client) = served();
    let mut waiter = connect(&proxy);
    let way = Duration::from_millis(5);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    send(&mut waiter, "W");
    until("it waits", || proxy.counts().requests.bytes == 2);
    thread::sleep(2 * way);
    let before = proxy.counts().round_trips;
    round_trip(&mut client, "b");
    assert_eq!(proxy.counts().round_trips - before, 1);
}

#[test]
fn dropped_replies_are_lost_and_their_requests_are_not() {
    let (server, proxy, mut client) = served();
    let mut idle = connect(&proxy);
    round_trip(&mut idle, "i");

    proxy.set(Mode::DropReplies);
    send(&mut client, "b");
    until("the request arrives", || server.seen().bytes == b"aib");
    until("its reply is lost", || {
        proxy.counts().lost == Traffic { bytes: 1, chunks: 1 }
    });
    expect_nothing(&mut client);

    let mut new = connect(&proxy);
    send(&mut new, "c");
    until("a new connection's request arrives", || {
        server.seen().bytes == b"aibc"
    });
    expect_nothing(&mut new);

    proxy.set(Mode::Pass);
    expect_reset(&mut client);
    expect_reset(&mut new);
    round_trip(&mut idle, "j");
    round_trip(&mut connect(&proxy), "d");
}

#[test]
fn the_end_of_a_connection_is_a_reply_too() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::DropReplies);
    send(&mut client, "Q");
    until("the server has ended it", || server.seen().bytes == b"aQ");
    expect_nothing(&mut client);
    // The server is gone and resets what it is sent, of which the client is told nothing either.
    for _ in 0..3 {
        send(&mut client, "b");
        expect_nothing(&mut client);
    }
    proxy.set(Mode::Pass);
    expect_reset(&mut client);
}

#[test]
fn delay_holds_each_way_for_its_time() {
    let (server, proxy, mut client) = served();
    let requests = Duration::from_millis(120);
    let replies = Duration::from_millis(80);
    proxy.set(Mode::Delay { requests, replies });
    let began = Instant::now();
    send(&mut client, "b");
    until("the request arrives", || server.seen().bytes == b"ab");
    assert!(began.elapsed() >= requests);
    expect(&mut client, "b");
    assert!(began.elapsed() >= requests + replies);

    // A longer way, not a narrower one: what is sent at once arrives at once.
    proxy.set(Mode::Delay {
        requests: Duration::from_millis(20),
        replies: Duration::from_secs(3600),
    });
    for _ in 0..20 {
        send(&mut client, "c");
        thread::sleep(Duration::from_millis(1));
    }
    // Before the first reply is back.
    until("all have arrived", || {
        server.seen().bytes == [&b"ab"[..], &[b'c'; 20]].concat()
    });
    proxy.set(Mode::Pass);
    expect(&mut client, &"c".repeat(20));

    proxy.set(Mode::Delay {
        requests: Duration::from_secs(3600),
        replies,
    });
    send(&mut client, "d");
    proxy.set(Mode::Pass);
    expect(&mut client, "d");
}

/// The least of many counts, since a busy machine only adds to it.
#[test]
fn a_delay_of_half_a_millisecond_is_no_longer() {
    let (_server, proxy, mut client) = served();
    let way = Duration::from_micros(500);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let least = (0..200).map(|_| {
        let began = Instant::now();
        round_trip(&mut client, "b");
        began.elapsed()
    });
    let least = least.min().unwrap();
    assert!(least >= 2 * way, "{least:?}");
    assert!(least < 3 * way, "{least:?}");
}

#[test]
fn a_delay_is_the_same_for_many_at_once() {
    const CLIENTS: u32 = 20;
    const TRIPS: u32 = 20;
    let (_server, proxy, _client) = served();
    let way = Duration::from_millis(5);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let by_as_many = |clients: u32| {
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| {
                    let mut client = connect(&proxy);
                    for _ in 0..TRIPS {
                        round_trip(&mut client, "b");
                    }
                });
            }
        });
        began.elapsed()
    };
    let alone = by_as_many(1);
    let took = by_as_many(CLIENTS);
    assert!(
        alone >= TRIPS * 2 * way && took >= TRIPS * 2 * way,
        "{alone:?}, {took:?}"
    );
    // One after the other, they would take twenty times as long as one.
    assert!(took < alone * CLIENTS * 3 / 4, "{took:?}, and {alone:?} for one");
}

#[test]
fn a_delayed_end_comes_after_what_was_sent_before_it() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::Delay {
        requests: Duration::from_millis(50),
        replies: Duration::from_millis(50),
    });
    let began = Instant::now();
    send(&mut client, "b");
    client.shutdown(Shutdown::Write).unwrap();
    expect(&mut client, "b");
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert!(began.elapsed() >= Duration::from_millis(100));
    assert_eq!(server.seen().ended, 1);
}

#[test]
fn a_blackhole_holds_everything_back_and_delivers_it_late() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::Blackhole);
    send(&mut client, "b");
    let mut new = connect(&proxy);
    send(&mut new, "c");
    expect_nothing(&mut client);
    expect_nothing(&mut new);
    assert_eq!(server.seen().bytes, b"a");
    assert_eq!(server.seen().connections, 1);

    proxy.set(Mode::Pass);
    expect(&mut client, "b");
    expect(&mut new, "c");
    assert_eq!(proxy.counts().connections, 2);
}

#[test]
fn a_blackhole_holds_back_replies_and_the_end_of_a_connection() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_secs(3600),
    });
    send(&mut client, "b");
    until("the request arrives", || server.seen().bytes == b"ab");
    proxy.set(Mode::Blackhole);
    expect_nothing(&mut client);

    let other = connect(&proxy);
    drop(client);
    drop(other);
    thread::sleep(A_WHILE);
    let seen = server.seen();
    assert_eq!(
        (seen.ended, seen.reset),
        (0, 0),
        "the server is not told that its client is gone"
    );

    proxy.set(Mode::Pass);
    until("now it is", || {
        let seen = server.seen();
        seen.ended + seen.reset == seen.connections
    });
}

#[test]
fn half_open_ends_the_servers_side_alone() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::HalfOpen);
    until("the server's side ends", || server.seen().reset == 1);
    send(&mut client, "b");
    until("what is sent is lost", || {
        proxy.counts().lost == Traffic { bytes: 1, chunks: 1 }
    });
    expect_nothing(&mut client);

    let mut new = connect(&proxy);
    send(&mut new, "c");
    expect_nothing(&mut new);
    assert_eq!(
        server.seen().connections,
        1,
        "a new connection does not reach the server"
    );

    proxy.set(Mode::Pass);
    round_trip(&mut connect(&proxy), "d");
    send(&mut client, "e");
    expect_nothing(&mut client);
    expect_nothing(&mut new);
    assert_eq!(server.seen().bytes, b"ad");

    proxy.reset();
    expect_reset(&mut client);
    expect_reset(&mut new);
}

#[test]
fn reset_hits_those_there_are_and_none_that_follow() {
    let (server, proxy, mut client) = served();
    proxy.reset();
    expect_reset(&mut client);
    until("the server is told", || server.seen().reset == 1);
    round_trip(&mut connect(&proxy), "b");

    proxy.set(Mode::Blackhole);
    let mut hanging = connect(&proxy);
    until("it is accepted", || proxy.counts().connections == 3);
    proxy.reset();
    expect_reset(&mut hanging);
    assert_eq!(proxy.mode(), Mode::Blackhole);
}

#[test]
fn a_reset_by_one_side_reaches_the_other() {
    let (server, proxy, client) = served();
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    until("the server is told", || server.seen().reset == 1);

    let mut client = connect(&proxy);
    // The echo server ends the connection on 'Q' with bytes unread, which resets it.
    send(&mut client, &format!("Q{}", "x".repeat(100_000)));
    expect_reset(&mut client);
}

#[test]
fn refuse_refuses_new_connections_and_leaves_the_others() {
    let (_server, proxy, mut client) = served();
    proxy.set(Mode::Refuse);
    let refused = TcpStream::connect(proxy.addr()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    round_trip(&mut client, "b");
    proxy.set(Mode::Pass);
    round_trip(&mut connect(&proxy), "c");
    round_trip(&mut client, "d");
}

/// A process that was forked while it listened has its socket, too, for some time.
#[test]
fn it_listens_again_when_nobody_else_does() {
    let (_server, proxy, _client) = served();
    proxy.set(Mode::Refuse);
    let forked = TcpListener::bind(proxy.addr()).unwrap();
    let runs_its_program = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        drop(forked);
    });
    proxy.set(Mode::Pass);
    runs_its_program.join().unwrap();
    round_trip(&mut connect(&proxy), "b");
}

#[test]
fn a_connection_to_no_server_is_reset() {
    let nowhere: SocketAddr = lockkit_testbed::Port::reserve().unwrap().addr();
    let proxy = Proxy::start(nowhere).unwrap();
    expect_reset(&mut connect(&proxy));
}

#[test]
fn the_upstream_can_change() {
    let (first, proxy, mut client) = served();
    let second = Echo::start();
    proxy.set_upstream(second.addr());
    round_trip(&mut client, "b");
    round_trip(&mut connect(&proxy), "c");
    assert_eq!(
        (first.seen().bytes, second.seen().bytes),
        (b"ab".to_vec(), b"c".to_vec())
    );
}

#[test]
fn dropping_it_resets_its_connections() {
    let (_server, proxy, mut client) = served();
    let addr = proxy.addr();
    drop(proxy);
    expect_reset(&mut client);
    assert_eq!(
        TcpStream::connect(addr).unwrap_err().kind(),
        io::ErrorKind::ConnectionRefused
    );
}

#[test]
fn no_byte_passes_once_a_mode_is_set() {
    let (_server, proxy, client) = served();
    let mut writer = client.try_clone().unwrap();
    let stream = thread::spawn(move || while writer.write_all(&[b'x'; 700]).is_ok() {});
    let mut reader = client;
    thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
    for _ in 0..50 {
        proxy.set(Mode::Blackhole);
        let before = proxy.counts();
        // Time enough for many to pass.
        thread::sleep(Duration::from_millis(2));
        assert_eq!(proxy.counts(), before);
        proxy.set(Mode::Pass);
        until("it flows again", || {
            proxy.counts().replies.bytes > before.replies.bytes
        });
    }
    drop(proxy);
    stream.join().unwrap();
}

#[tokio::test]
async fn it_goes_on_while_the_test_blocks_its_runtime() {
    let (server, proxy, mut client) = served();
    proxy.set(Mode::DropReplies);
    send(&mut client, "b");
    eventually("the request arrives", async || server.seen().bytes == b"ab").await;
    proxy.set(Mode::Pass);
    round_trip(&mut connect(&proxy), "c");
    drop(proxy);
}

#[test]
fn replies_trickle_and_requests_do_not() {
    let (_server, proxy, mut client) = served();
    proxy.set(Mode::Trickle);
    let began = Instant::now();
    send(&mut client, "bcde");
    until("the request is there", || proxy.counts().requests.bytes == 5);
    assert!(
        began.elapsed() < Duration::from_millis(250),
        "requests pass at once"
    );
    expect(&mut client, "bcde");
    assert!(
        began.elapsed() >= Duration::from_millis(300),
        "{:?}",
        began.elapsed()
    );
    proxy.set(Mode::Pass);
    round_trip(&mut client, "f");
}
