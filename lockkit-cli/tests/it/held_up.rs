//! Surroundings that hold lockkit up, or keep it busy: its command ends in time all the same.

use std::{
    fs,
    io::{self, PipeReader, PipeWriter, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::{
    Lateness, Mode, Proxy,
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};
use rustix::{
    fs::{OFlags, fcntl_setfl},
    process::Signal,
};

use crate::tool::{Running, Site, catches, eventually, gone, lockkit, outcome};

const TTL: Duration = Duration::from_secs(4);
/// For a busy machine.
const MUCH: Duration = Duration::from_secs(2);
/// What each of a silent server's replies is waited for: far longer than what does not wait for one takes.
const OP_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns that, and what the load of this machine, of which a flood is a part, costs on top.
fn much(beside: &Lateness) -> Duration {
    MUCH + 5 * beside.most()
}

fn server() -> Option<RedisServer> {
    if skipped("redis", redis::missing()) {
        return None;
    }
    Some(RedisServer::plain().expect("a Redis server"))
}

/// A pipe that takes no more: that of a logger that hangs, or of a terminal after Ctrl-S.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = io::pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    fcntl_setfl(&writer, OFlags::empty()).unwrap();
    (reader, writer)
}

/// A command that stays until it is killed.
fn stubborn(url: &str) -> Command {
    under_lease(
        url,
        "trap '' TERM; echo up; echo $$; while :; do sleep 0.05; done 2>/dev/null",
    )
}

/// A command that ends when it is told to.
fn willing(url: &str) -> Command {
    under_lease(url, "echo up; echo $$; exec sleep 600")
}

fn under_lease(url: &str, script: &str) -> Command {
    let ttl = format!("{}s", TTL.as_secs());
    lockkit(&[
        "run", "--url", url, "--ttl", &ttl, "job", "--", "sh", "-c", script,
    ])
}

#[test]
fn a_stderr_that_nobody_reads_spares_no_command() {
    let Some(server) = server() else { return };
    let mut holder = Running::complaining_to(full_pipe(), &mut stubborn(server.url()));
    assert_eq!(holder.line(), "up");
    let command = holder.line().parse().unwrap();
    server.kill().unwrap();
    let (watch, beside) = (Stopwatch::start(), Lateness::watch());
    let status = holder.status();
    let (took, allowed) = (watch.elapsed(), TTL + much(&beside));
    assert_eq!(status.code(), Some(123));
    assert!(took < allowed, "{took:?}, at most {allowed:?}");
    gone(command);
}

/// It is lockkit that says so, and neither waits for a reader nor ends with one.
#[test]
fn a_command_that_cannot_run_is_127_whoever_reads() {
    let site = Site::new();
    let closed = io::pipe().unwrap().1;
    let (_unread, full) = full_pipe();
    for (what, stderr) in [("closed", closed), ("full", full)] {
        let mut run = site.lockkit(&["run", "job", "--", "./missing"]);
        let (unused, _) = io::pipe().unwrap();
        let mut run = Running::complaining_to((unused, stderr), &mut run);
        assert_eq!(run.status().code(), Some(127), "a stderr that is {what}");
    }
}

/// The most memory that lockkit has at any time, in bytes, whatever a server sends: twice what a rogue on one connection may make it take,
/// since here it is several.
const MOST_MEMORY: u64 = 128 * 1024 * 1024;
/// One flood at a time is load enough for the tests beside it.
static ALONE: Mutex<()> = Mutex::new(());

/// Passes everything on, and floods each client once it is told to. What the server says is drowned then. Closes all once it is dropped.
struct Flooding {
    address: SocketAddr,
    stages: Arc<Stages>,
}

#[derive(Default)]
struct Stages {
    is_told: AtomicBool,
    has_begun: AtomicBool,
    is_over: AtomicBool,
}

impl Flooding {
    fn start(upstream: SocketAddr, message: &[u8]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stages = Arc::<Stages>::default();
        let flooding = Self {
            address,
            stages: stages.clone(),
        };
        // It fits into the buffers of a connection, whoever reads.
        let flood = message.repeat(64 * 1024 / message.len());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (stages, flood) = (stages.clone(), flood.clone());
                thread::spawn(move || play(client, upstream, &stages, &flood));
            }
        });
        flooding
    }

    /// Begins, and waits until it has.
    fn begin(&self) {
        self.stages.is_told.store(true, Ordering::Relaxed);
        eventually("it floods", || {
            self.stages.has_begun.load(Ordering::Relaxed).then_some(())
        });
    }
}

impl Drop for Flooding {
    fn drop(&mut self) {
        self.stages.is_over.store(true, Ordering::Relaxed);
    }
}

fn play(mut client: TcpStream, upstream: SocketAddr, stages: &Stages, flood: &[u8]) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream)?;
    server.set_read_timeout(Some(Duration::from_millis(10)))?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        let copied = io::copy(&mut requests, &mut to_server);
        // A session whose client has gone is one that has ended.
        let _ = to_server.shutdown(Shutdown::Both);
        copied
    });
    let mut replies = vec![0; 64 * 1024];
    while !stages.is_told.load(Ordering::Relaxed) {
        match server.read(&mut replies) {
            Ok(0) => return client.shutdown(Shutdown::Both),
            Ok(count) => client.write_all(&replies[..count])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    server.set_read_timeout(None)?;
    thread::spawn(move || io::copy(&mut server, &mut io::sink()));
    while !stages.is_over.load(Ordering::Relaxed) {
        client.write_all(flood)?;
        stages.has_begun.store(true, Ordering::Relaxed);
    }
    client.shutdown(Shutdown::Both)
}

/// A server at this address, whose URL is made of the address at which it is reached, and what it may say when nobody has asked. All of its
/// connections say nothing else any more once the command is under way.
fn a_flood_spares_no_command(upstream: SocketAddr, url_at: impl Fn(SocketAddr) -> String, message: &[u8]) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let floods = |what: &str, most: Duration, signal: Option<Signal>, command: &dyn Fn(&str) -> Command| {
        let flooding = Flooding::start(upstream, message);
        let url = url_at(flooding.address);
        let mut holder = Running::spawn(&mut command(&url));
        assert_eq!(holder.line(), "up", "{url}");
        let command = holder.line().parse().unwrap();
        let (watch, beside) = (Stopwatch::start(), Lateness::watch());
        flooding.begin();
        if let Some(signal) = signal {
            holder.signal(signal);
        }
        gone(command);
        let (took, memory) = (watch.elapsed(), memory(holder.pid()));
        let allowed = most + 5 * beside.most();
        drop(flooding);
        assert!(took < allowed, "{url}, {what}: {took:?}, at most {allowed:?}");
        assert!(
            memory.is_none_or(|memory| memory < MOST_MEMORY),
            "{url}, {what}: {memory:?} bytes of memory"
        );
        // It may try to release for a while.
        let status = holder.status().code();
        // What ends the connection is a loss, which may come before the signal.
        let is_right = status == Some(123) || signal.is_some() && status == Some(143);
        assert!(is_right, "{url}, {what}: {status:?}");
    };
    floods("the end of the lease", TTL, None, &stubborn);
    floods("TERM", MUCH, Some(Signal::TERM), &willing);
}

/// Returns the most memory that a process has had, in bytes, if it is still there.
fn memory(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes * 1024)
}

#[test]
fn a_redis_that_floods_spares_no_command() {
    let Some(server) = server() else { return };
    let push = b">2\r\n$1\r\na\r\n$1\r\nb\r\n";
    a_flood_spares_no_command(server.addr(), |address| format!("redis://{address}"), push);
}

#[test]
fn a_zookeeper_that_floods_spares_no_command() {
    let Some(server) = crate::zookeeper::server(400) else {
        return;
    };
    // An event, without a transaction or an error: the data of a node have changed, in a session that is connected.
    let mut event = [-1, -1, -1, 0, 3, 3, 2].map(i32::to_be_bytes).concat();
    event.extend(b"/a");
    let message = [&u32::try_from(event.len()).unwrap().to_be_bytes()[..], &event].concat();
    // A hold lasts for as long as its session.
    let url_at = |address| {
        format!(
            "zk://{address}?session_timeout={}s&tick_time=400ms",
            TTL.as_secs()
        )
    };
    a_flood_spares_no_command(server.addr(), url_at, &message);
}

#[test]
fn an_etcd_that_floods_spares_no_command() {
    if skipped("etcd", etcd::missing()) {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    // A ping, settings that change nothing, and a frame of a kind that nobody knows.
    let frame = |kind: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, 0, 0, 0, 0, 0][..], payload].concat()
    };
    let message = [frame(6, &[7; 8]), frame(4, &[]), frame(0x20, &[7; 8])].concat();
    a_flood_spares_no_command(server.addr(), |address| server.url_at(address), &message);
}

#[test]
fn a_postgres_that_floods_spares_no_command() {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::plain().unwrap();
    // A notification, a notice, and a parameter of the session.
    let says = |kind: u8, body: &[u8]| {
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        [&[kind][..], &length, body].concat()
    };
    let message = [
        says(b'A', b"\0\0\0\x01a\0b\0"),
        says(b'N', b"SNOTICE\0C00000\0Mlook here\0\0"),
        says(b'S', b"TimeZone\0UTC\0"),
    ];
    a_flood_spares_no_command(server.addr(), PgServer::url_at, &message.concat());
}

/// Its server says nothing of itself. As the reply to a request, each of these packets is a count of columns first, then a column, and then
/// a row.
fn a_mysql_that_floods_spares_no_command(flavour: Flavour, mode: &str) {
    let backend = match flavour {
        Flavour::MariaDb => "mysql",
        Flavour::MySql => "mysql-server",
    };
    if skipped(backend, MySql::missing(flavour)) {
        return;
    }
    let server = MySql::start(flavour, &[]).unwrap();
    let url_at = |address| format!("{}?mode={mode}", MySql::url_at(address));
    let mut message = vec![0_u8, 0, 0, 1];
    // A catalog, three texts that are empty, an alias and a name; then the charset, the length, the type, flags and decimals.
    message.extend(b"\x03def\0\0\0\x01a\0\x0c\x3f\0\x14\0\0\0\x08\0\0\0\0\0");
    message[0] = u8::try_from(message.len() - 4).unwrap();
    a_flood_spares_no_command(server.addr(), url_at, &message);
}

#[test]
fn a_mysql_that_floods_spares_no_command_under_row_locks() {
    a_mysql_that_floods_spares_no_command(Flavour::MySql, "for_update");
}

#[test]
fn a_mysql_that_floods_spares_no_command_under_leases() {
    a_mysql_that_floods_spares_no_command(Flavour::MySql, "lease");
}

#[test]
fn a_mariadb_that_floods_spares_no_command_under_row_locks() {
    a_mysql_that_floods_spares_no_command(Flavour::MariaDb, "for_update");
}

#[test]
fn a_mariadb_that_floods_spares_no_command_under_leases() {
    a_mysql_that_floods_spares_no_command(Flavour::MariaDb, "lease");
}

/// Nothing that lockkit has to say or to leave behind is worth that the caller waits for a server that is not there.
#[test]
fn the_last_word_does_not_wait_for_a_silent_server() {
    let Some(server) = server() else { return };
    let url = format!("{}?op_timeout={}s", server.url(), OP_TIMEOUT.as_secs());
    let mut holder = Running::spawn(&mut lockkit(&[
        "run",
        "--url",
        &url,
        "job",
        "--",
        "sh",
        "-c",
        "echo up; sleep 60",
    ]));
    assert_eq!(holder.line(), "up");
    let waiting = |options: &[&str]| {
        let arguments = [&["run", "--url", &url][..], options, &["job", "--", "true"]].concat();
        Running::spawn(&mut lockkit(&arguments))
    };
    let mut patient = waiting(&[]);
    eventually("it waits", || {
        let shown = outcome(&mut lockkit(&["inspect", "--url", &url, "job"])).1;
        shown.contains("1 waiting").then_some(())
    });
    let mut impatient = waiting(&["--wait", "2s"]);
    eventually("it waits too", || {
        let shown = outcome(&mut lockkit(&["inspect", "--url", &url, "job"])).1;
        shown.contains("2 waiting").then_some(())
    });
    server.pause().unwrap();
    let watch = Stopwatch::start();
    // Nobody knows any more that it is taken, unless the server has said so in the last second.
    assert!([Some(124), Some(125)].contains(&impatient.status().code()));
    let took = watch.elapsed();
    assert!(took < OP_TIMEOUT, "--wait 2s took {took:?}");

    let watch = Stopwatch::start();
    patient.signal(Signal::TERM);
    assert_eq!(patient.status().code(), Some(143));
    let took = watch.elapsed();
    assert!(took < OP_TIMEOUT, "TERM took {took:?}");

    let (watch, beside) = (Stopwatch::start(), Lateness::watch());
    holder.signal(Signal::TERM);
    assert_eq!(holder.status().code(), Some(143));
    let (took, allowed) = (watch.elapsed(), OP_TIMEOUT + much(&beside));
    server.resume().unwrap();
    assert!(
        took < allowed,
        "an unanswered release took {took:?}, at most {allowed:?}"
    );
}

/// Where a wait of three seconds has to be over, one of a second, and one that a signal ends: 0.4 s are promised after each, and a tenth is
/// for the process's own beginning and end.
const WAIT_BAR: Duration = Duration::from_millis(3_500);
const CONNECT_BAR: Duration = Duration::from_millis(1_500);
const SIGNAL_BAR: Duration = Duration::from_millis(500);
/// The attempts that a busy machine may make void.
const TRIES: u32 = 6;

/// Measures how long it takes to `end` what was begun, beside a process that sleeps for nearly as long. If both are late, that is void.
fn in_time<T>(what: &str, bar: Duration, begin: impl Fn() -> T, end: impl Fn(T), after: impl Fn()) {
    for _ in 0..TRIES {
        let under_way = begin();
        let sleep = thread::spawn(move || {
            let length = bar.saturating_sub(Duration::from_millis(100));
            let clock = Instant::now();
            let slept = Command::new("sleep")
                .arg(length.as_secs_f64().to_string())
                .status();
            assert!(slept.unwrap().success());
            clock.elapsed().saturating_sub(length)
        });
        let clock = Instant::now();
        end(under_way);
        let took = clock.elapsed();
        after();
        let late = sleep.join().unwrap();
        if took < bar {
            return;
        }
        assert!(
            late > Duration::from_millis(20),
            "{what}: {took:?}, where a sleep was {late:?} late; at most {bar:?}"
        );
        eprintln!("again, since a sleep was {late:?} late, too: {what} took {took:?}");
    }
    panic!("{what}: this machine was too busy each time");
}

/// A server, or several, at this URL, which `stall` and `go_on`.
fn nobody_waits_longer_for_a_stalled(url: &str, stall: impl Fn(), go_on: impl Fn()) {
    let run = |options: &[&str], name: &str, command: &[&str]| {
        let run = ["run", "--url", url];
        Running::spawn(&mut lockkit(&[&run, options, &[name, "--"], command].concat()))
    };
    let ends = |mut run: Running, statuses: &[i32]| {
        let (status, said) = (run.status().code(), run.complaint());
        assert!(
            statuses.iter().any(|it| Some(*it) == status),
            "{url}: {status:?}, {said}"
        );
    };
    // Each time a name of its own, since a waiter that could not say good-bye is counted for a while.
    let names = AtomicU32::new(0);
    let held = || {
        let name = format!("job-{}", names.fetch_add(1, Ordering::Relaxed));
        let mut holder = run(&["--ttl", "1m"], &name, &["sh", "-c", "echo up; exec sleep 600"]);
        assert_eq!(holder.line(), "up");
        (name, holder)
    };
    let is_in_queue = |name: &str| {
        eventually("it waits", || {
            let shown = outcome(&mut lockkit(&["inspect", "--url", url, name])).1;
            shown.contains("1 waiting").then_some(())
        });
    };
    in_time(
        &format!("{url}, in the queue"),
        WAIT_BAR,
        held,
        |(name, _holder)| {
            let waiter = run(&["--wait", "3s"], &name, &["true"]);
            is_in_queue(&name);
            stall();
            // Nobody knows any more that it is taken, unless the server has said so in the last second.
            ends(waiter, &[124, 125]);
        },
        &go_on,
    );
    in_time(
        &format!("{url}, from connecting on"),
        CONNECT_BAR,
        &stall,
        |()| ends(run(&["--wait", "1s"], "job", &["true"]), &[125]),
        &go_on,
    );
    let begin = || {
        let (name, holder) = held();
        let waiter = run(&[], &name, &["true"]);
        is_in_queue(&name);
        stall();
        (waiter, holder)
    };
    let end = |(waiter, _holder): (Running, Running)| {
        waiter.signal(Signal::TERM);
        ends(waiter, &[143]);
    };
    in_time(
        &format!("{url}, TERM in the queue"),
        SIGNAL_BAR,
        begin,
        end,
        &go_on,
    );
    let begin = || {
        stall();
        let waiter = run(&[], "job", &["true"]);
        eventually("it listens", || catches(waiter.pid(), Signal::TERM).then_some(()));
        waiter
    };
    let end = |waiter: Running| {
        waiter.signal(Signal::TERM);
        ends(waiter, &[143]);
    };
    in_time(
        &format!("{url}, TERM while it connects"),
        SIGNAL_BAR,
        begin,
        end,
        &go_on,
    );
}

/// The way to a server at the other end of the world and back is part of the 0.4 s after a wait, and its last word counts.
#[test]
fn a_wait_far_away_ends_with_the_servers_word() {
    let Some(server) = server() else { return };
    let far = Proxy::start(server.addr()).unwrap();
    let half = Duration::from_millis(110);
    far.set(Mode::Delay {
        requests: half,
        replies: half,
    });
    let script = ["sh", "-c", "echo up; exec sleep 600"];
    let held = [
        &["run", "--url", server.url(), "--ttl", "1m", "job", "--"],
        &script[..],
    ]
    .concat();
    let mut holder = Running::spawn(&mut lockkit(&held));
    assert_eq!(holder.line(), "up");
    let url = format!("redis://{}", far.addr());
    let mut ends = Vec::new();
    // A busy machine adds to the way.
    while ends.len() < TRIES as usize {
        let waited = outcome(&mut lockkit(&[
            "run", "--url", &url, "--wait", "4s", "job", "--", "true",
        ]));
        if waited.0 == 124 {
            return;
        }
        ends.push(waited);
    }
    panic!("the server is there, and says that the lock is taken: {ends:?}");
}

#[test]
fn nobody_waits_longer_for_a_stalled_redis() {
    let Some(server) = server() else { return };
    let (stall, go_on) = (|| server.pause().unwrap(), || server.resume().unwrap());
    nobody_waits_longer_for_a_stalled(server.url(), stall, go_on);
}

#[test]
fn nobody_waits_longer_for_stalled_masters_of_redlock() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let servers = [(); 3].map(|()| RedisServer::plain().unwrap());
    let hosts: Vec<_> = servers.iter().map(|server| server.addr().to_string()).collect();
    let all = |each: fn(&RedisServer) -> io::Result<()>| servers.iter().for_each(|it| each(it).unwrap());
    let url = format!("redlock://{}", hosts.join(","));
    nobody_waits_longer_for_a_stalled(&url, || all(RedisServer::pause), || all(RedisServer::resume));
}

#[test]
fn nobody_waits_longer_for_a_stalled_zookeeper() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (stall, go_on) = (|| server.pause().unwrap(), || server.resume().unwrap());
    nobody_waits_longer_for_a_stalled(&format!("zk://{}", server.addr()), stall, go_on);
}

#[test]
fn nobody_waits_longer_for_a_stalled_etcd() {
    if skipped("etcd", etcd::missing()) {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let (stall, go_on) = (|| server.pause().unwrap(), || server.resume().unwrap());
    nobody_waits_longer_for_a_stalled(&server.url(), stall, go_on);
}

#[test]
fn nobody_waits_longer_for_a_stalled_postgres() {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::plain().unwrap();
    let (stall, go_on) = (|| server.pause().unwrap(), || server.resume().unwrap());
    nobody_waits_longer_for_a_stalled(&server.url(), stall, go_on);
}

fn nobody_waits_longer_for_a_stalled_mysql(mode: &str) {
    if skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
    let process = server.process();
    let (stall, go_on) = (|| process.pause().unwrap(), || process.resume().unwrap());
    nobody_waits_longer_for_a_stalled(&format!("{}?mode={mode}", server.url()), stall, go_on);
}

#[test]
fn nobody_waits_longer_for_stalled_row_locks_of_mysql() {
    nobody_waits_longer_for_a_stalled_mysql("for_update");
}

#[test]
fn nobody_waits_longer_for_stalled_leases_of_mysql() {
    nobody_waits_longer_for_a_stalled_mysql("lease");
}
