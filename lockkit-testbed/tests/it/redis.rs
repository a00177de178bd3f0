use std::{
    io::{self, Read, Write},
    net::TcpStream,
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use lockkit_testbed::{
    Certificates, Clock, Mode, Proxy, Shared,
    redis::{self, Fsync, RedisCluster, RedisSentinels, RedisServer},
    skipped,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

use crate::until::until;

fn no_redis() -> bool {
    skipped("redis", redis::missing())
}

#[track_caller]
fn assert_answers(server: &RedisServer, command: &[&str], answer: &str) {
    assert_eq!(server.cli(command).unwrap(), answer);
}

#[test]
fn it_answers_as_the_command_line_does() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    assert_eq!(server.url(), format!("redis://{}", server.addr()));
    assert_answers(&server, &["SET", "ключ {}\r\n", "a\r\nb"], "OK");
    assert_answers(&server, &["GET", "ключ {}\r\n"], "a\r\nb");
    assert_answers(&server, &["GET", "nothing"], "(nil)");
    assert_answers(&server, &["INCRBY", "n", "41"], "41");
    assert_answers(
        &server,
        &["EVAL", "return {1, {'a', false}, 'b'}", "0"],
        "1\na\n(nil)\nb",
    );
    let error = server.cli(&["INCR", "ключ {}\r\n"]).unwrap_err().to_string();
    assert!(error.contains("not an integer"), "{error}");
}

#[test]
fn one_server_may_serve_many_tests() {
    static SHARED: Shared<RedisServer> = Shared::new(|| RedisServer::plain().unwrap());

    if no_redis() {
        return;
    }
    let users: Vec<_> = (0..8)
        .map(|_| thread::spawn(|| SHARED.cli(&["INCR", "users"]).unwrap()))
        .collect();
    for user in users {
        user.join().unwrap();
    }
    assert_answers(&SHARED, &["GET", "users"], "8");
}

#[test]
fn a_configuration_it_does_not_know_shows_in_the_error() {
    if no_redis() {
        return;
    }
    let error = RedisServer::builder()
        .directive("no-such-thing", &["\"1\""])
        .start();
    let error = error.unwrap_err().to_string();
    assert!(error.contains(r#"no-such-thing "\"1\"""#), "{error}");
}

#[test]
fn restarts_keep_the_data_and_the_port() {
    if no_redis() {
        return;
    }
    let plain = RedisServer::plain().unwrap();
    let append_only = RedisServer::builder()
        .append_only(Fsync::EverySec)
        .start()
        .unwrap();
    for server in [plain, append_only] {
        let (addr, pid) = (server.addr(), server.pid());
        server.cli(&["SET", "key", "value"]).unwrap();
        server.restart().unwrap();
        assert_answers(&server, &["GET", "key"], "value");
        assert_eq!(server.addr(), addr);
        assert_ne!(server.pid(), pid);

        server.restart_empty().unwrap();
        assert_answers(&server, &["GET", "key"], "(nil)");
    }
}

#[test]
fn a_crash_loses_what_was_not_appended() {
    if no_redis() {
        return;
    }
    let plain = RedisServer::plain().unwrap();
    plain.cli(&["SET", "key", "old"]).unwrap();
    // The data that it saved for the restart must not come back.
    plain.restart().unwrap();
    plain.kill().unwrap();
    assert!(plain.cli(&["PING"]).is_err());
    assert_eq!(plain.pid(), None);
    plain.start().unwrap();
    assert_answers(&plain, &["GET", "key"], "(nil)");

    let always = RedisServer::builder().append_only(Fsync::Always).start().unwrap();
    assert_answers(&always, &["CONFIG", "GET", "appendfsync"], "appendfsync\nalways");
    always.cli(&["SET", "key", "value"]).unwrap();
    always.kill().unwrap();
    always.start().unwrap();
    assert_answers(&always, &["GET", "key"], "value");
    always.stop().unwrap();
    always.start().unwrap();
    assert_answers(&always, &["GET", "key"], "value");
}

#[test]
fn paused_it_does_not_answer() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    server.pause().unwrap();
    let mut client = TcpStream::connect(server.addr()).unwrap();
    client.write_all(b"PING\r\n").unwrap();
    client.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    client.read_exact(&mut [0; 7]).unwrap_err();
    server.resume().unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = [0; 7];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
}

#[test]
fn a_replica_follows_and_can_be_promoted() {
    if no_redis() {
        return;
    }
    let master = RedisServer::builder().password("secret").start().unwrap();
    master.cli(&["SET", "before", "1"]).unwrap();
    let replica = RedisServer::builder()
        .password("secret")
        .replica_of(master.addr())
        .start()
        .unwrap();
    assert_answers(&replica, &["GET", "before"], "1");
    master.cli(&["SET", "after", "2"]).unwrap();
    until("it follows", || replica.cli(&["GET", "after"]).unwrap() == "2");

    master.pause().unwrap();
    replica.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    assert_answers(&replica, &["SET", "after", "3"], "OK");
    master.resume().unwrap();
    assert_answers(&master, &["GET", "after"], "2");
}

#[test]
fn a_replica_may_be_behind() {
    if no_redis() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    // So that there is something to copy at the start.
    master.cli(&["SET", "early", "value"]).unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    assert_answers(&replica, &["EXISTS", "early"], "1");
    replica.pause().unwrap();
    assert_eq!(
        raw(&master, "SET key value\r\nWAIT 1 100"),
        "+OK\r\n:0\r\n+OK\r\n"
    );
    replica.resume().unwrap();
    until("it catches up", || {
        replica.cli(&["EXISTS", "key"]).unwrap() == "1"
    });

    // A replica that is started again has only what its master gives it.
    replica.kill().unwrap();
    master.kill().unwrap();
    replica.start().unwrap();
    assert_answers(&replica, &["DBSIZE"], "0");
}

/// Everything that the server at `addr` answers to `request` within its time.
fn raw(server: &RedisServer, request: &str) -> String {
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream
        .write_all(format!("{request}\r\nQUIT\r\n").as_bytes())
        .unwrap();
    let mut answer = Vec::new();
    // A server that expects TLS resets the connection.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn passwords_are_asked_for_and_stay_secret() {
    if no_redis() {
        return;
    }
    let server = RedisServer::builder().password(r#"p@ss "w\rd"#).start().unwrap();
    assert_eq!(
        server.url(),
        format!("redis://:p%40ss%20%22w%5Crd@{}", server.addr())
    );
    assert!(raw(&server, "PING").starts_with("-NOAUTH"));
    assert!(raw(&server, r#"AUTH "p@ss \"w\\rd""#).starts_with("+OK"));
    assert_answers(&server, &["PING"], "PONG");

    let builder =
        RedisServer::builder()
            .password("hush-1")
            .user("worker", "hush-2", "~lock:* &* +@all -@dangerous");
    assert!(!format!("{builder:?}").contains("hush"));
    let server = builder.start().unwrap();
    assert_eq!(server.url(), format!("redis://worker:hush%2D2@{}", server.addr()));
    assert!(raw(&server, "AUTH worker wrong").starts_with("-WRONGPASS"));
    let session = raw(
        &server,
        "AUTH worker hush-2\r\nSET lock:a 1\r\nSET other 1\r\nFLUSHALL",
    );
    let answers: Vec<_> = session
        .lines()
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    assert_eq!(answers, ["+OK", "+OK", "-NOPERM", "-NOPERM", "+OK"]);
    assert!(!format!("{server:?}").contains("hush"));
}

/// The answer to PING of the server at `addr` of `server`, over TLS and trusting `authority` alone.
fn ping_over_tls(
    server: &RedisServer,
    authority: &Path,
    client: Option<&Certificates>,
) -> io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(authority).unwrap())
        .unwrap();
    let config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
    let config = match client {
        None => config.with_no_client_auth(),
        Some(certificates) => {
            let certificate = CertificateDer::from_pem_file(certificates.client()).unwrap();
            let key = PrivateKeyDer::from_pem_file(certificates.client_key()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let name = server.addr().ip().into();
    let session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(session, TcpStream::connect(server.addr())?);
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn tls_has_a_certificate_that_only_its_authority_vouches_for() {
    if no_redis() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let stranger = Certificates::generate().unwrap();
    let server = RedisServer::builder().tls(&certificates).start().unwrap();
    assert_eq!(server.url(), format!("rediss://{}", server.addr()));
    for _ in 0..2 {
        let pong = ping_over_tls(&server, &certificates.authority(), None).unwrap();
        assert_eq!(pong, "+PONG\r\n");
        let error = ping_over_tls(&server, &stranger.authority(), None).unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
        assert_eq!(raw(&server, "PING"), "");
        assert_answers(&server, &["PING"], "PONG");
        server.restart().unwrap();
    }
}

#[test]
fn tls_may_ask_for_a_client_s_certificate() {
    if no_redis() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let stranger = Certificates::generate().unwrap();
    let server = RedisServer::builder()
        .tls(&certificates)
        .directive("tls-auth-clients", &["yes"])
        .start()
        .unwrap();
    let ping = |client| ping_over_tls(&server, &certificates.authority(), client);
    assert_eq!(ping(Some(&*certificates)).unwrap(), "+PONG\r\n");
    ping(None).unwrap_err();
    ping(Some(&stranger)).unwrap_err();
}

#[test]
fn full_memory_evicts_by_its_policy() {
    if no_redis() {
        return;
    }
    let server = RedisServer::builder()
        .max_memory(8 << 20, "volatile-lru")
        .start()
        .unwrap();
    server.cli(&["SET", "kept", "1"]).unwrap();
    server.cli(&["SET", "evicted", "1", "EX", "1000"]).unwrap();
    let value = "x".repeat(1 << 20);
    for n in 0.. {
        let set = server.cli(&["SET", &format!("filler-{n}"), &value]);
        if server.cli(&["EXISTS", "evicted"]).unwrap() == "0" {
            break;
        }
        set.unwrap();
    }
    assert_answers(&server, &["GET", "kept"], "1");
}

#[test]
fn command_counts_are_exact() {
    if no_redis() {
        return;
    }
    let server = RedisServer::builder().password("secret").start().unwrap();
    let (before, sum) = (server.command_counts().unwrap(), server.command_count().unwrap());
    assert_eq!(before.values().sum::<u64>(), sum);
    for _ in 0..3 {
        server.cli(&["GET", "key"]).unwrap();
    }
    server
        .cli(&[
            "EVAL",
            "redis.call('SET', KEYS[1], 1) return redis.call('GET', KEYS[1])",
            "1",
            "key",
        ])
        .unwrap();
    let after = server.command_counts().unwrap();
    let more = |name: &str| after.get(name).unwrap_or(&0) - before.get(name).unwrap_or(&0);
    assert_eq!([more("get"), more("set"), more("eval")], [4, 1, 1]);
    assert_eq!(server.command_count().unwrap() - sum, 6);
    let times = server.command_times().unwrap();
    assert_eq!(times.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    assert!(times["eval"] >= times["set"], "{times:?}");
}

#[test]
fn a_monitor_has_seen_every_command_in_order() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    server.cli(&["SET", "before", "1"]).unwrap();
    let monitor = server.monitor().unwrap();
    assert_eq!(monitor.lines().unwrap(), Vec::<String>::new());
    for n in 0..50 {
        server.cli(&["SET", &format!("key-{n}"), "1"]).unwrap();
        assert_eq!(monitor.lines().unwrap().len(), n + 1);
    }
    server
        .cli(&["EVAL", "return redis.call('GET', 'inside')", "0"])
        .unwrap();
    let lines = monitor.lines().unwrap();
    assert!(lines[49].ends_with(r#""SET" "key-49" "1""#), "{}", lines[49]);
    assert!(lines[51].ends_with(r#"lua] "GET" "inside""#), "{}", lines[51]);

    server.kill().unwrap();
    assert!(monitor.lines().is_err());
    server.start().unwrap();
    assert!(monitor.lines().is_err(), "it does not record the new process");
}

#[test]
fn its_clock_can_be_set() {
    if no_redis() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    server.cli(&["SET", "key", "value", "PX", "30000"]).unwrap();
    clock.back(Duration::from_secs(60)).unwrap();
    let ttl: i64 = server.cli(&["PTTL", "key"]).unwrap().parse().unwrap();
    assert!((80_000..=90_000).contains(&ttl), "{ttl}");
    clock.forward(Duration::from_secs(60)).unwrap();
    assert_answers(&server, &["EXISTS", "key"], "1");
    clock.forward(Duration::from_secs(60)).unwrap();
    assert_answers(&server, &["EXISTS", "key"], "0");

    let seconds = |server: &RedisServer| -> i64 {
        let time = server.cli(&["TIME"]).unwrap();
        time.lines().next().unwrap().parse().unwrap()
    };
    let untouched = RedisServer::plain().unwrap();
    let ahead = seconds(&server) - seconds(&untouched);
    assert!((59..=60).contains(&ahead), "{ahead}");
    server.restart().unwrap();
    let ahead = seconds(&server) - seconds(&untouched);
    assert!((59..=60).contains(&ahead), "{ahead}");
}

#[test]
fn a_proxy_stands_before_it() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut client = TcpStream::connect(proxy.addr()).unwrap();
    proxy.set(Mode::DropReplies);
    client.write_all(b"SET key value\r\n").unwrap();
    until("the command is executed", || {
        server.cli(&["EXISTS", "key"]).unwrap() == "1"
    });
    until("its reply is lost", || proxy.counts().lost.chunks == 1);
    proxy.set(Mode::Pass);
    assert!(client.read(&mut [0]).is_err());
}

#[test]
fn sentinels_replace_a_dead_master() {
    if no_redis() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let [first, second] = group.servers();
    assert_eq!(group.master().unwrap().addr(), first.addr());
    assert_eq!(group.sentinels().len(), 3);

    first.kill().unwrap();
    until("the replica is promoted", || {
        group.master().is_ok_and(|master| master.addr() == second.addr())
    });
    until("it takes writes", || second.cli(&["SET", "key", "1"]).is_ok());

    first.start().unwrap();
    until("the old master follows the new one", || {
        first.cli(&["GET", "key"]).is_ok_and(|value| value == "1")
    });
    assert!(
        first
            .cli(&["SET", "key", "2"])
            .unwrap_err()
            .to_string()
            .contains("READONLY")
    );
}

#[test]
fn sentinels_replace_a_master_on_request() {
    if no_redis() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let [first, second] = group.servers();
    group.fail_over().unwrap();
    assert_eq!(group.master().unwrap().addr(), second.addr());
    until("the old master is a replica", || role(first) == "slave");
    // It is the Sentinels that a quorum is of.
    group.sentinels()[0].kill().unwrap();
    assert_eq!(group.master().unwrap().addr(), second.addr());
    group.sentinels()[0].start().unwrap();
    assert_eq!(group.master().unwrap().addr(), second.addr());
}

#[test]
fn a_fail_over_that_was_given_up_is_asked_for_again() {
    if no_redis() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let [_, second] = group.servers();
    let asked = || {
        let ask = ["SENTINEL", "MASTER", RedisSentinels::MASTER_NAME];
        let master = group.sentinels()[0].cli(&ask);
        master.is_ok_and(|master| master.contains("failover_in_progress"))
    };
    thread::scope(|scope| {
        let failing_over = scope.spawn(|| group.fail_over());
        until("it is asked", asked);
        // It cannot be promoted in time.
        second.pause().unwrap();
        until("it is given up", || !asked());
        second.resume().unwrap();
        failing_over.join().unwrap().unwrap();
    });
    assert_eq!(group.master().unwrap().addr(), second.addr());
}

/// Stops it as a shared machine does that is not given its processors for a while.
#[test]
fn sentinels_are_soon_back_when_the_machine_stood_still() {
    if no_redis() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let [first, second] = group.servers();
    let all = || group.servers().iter().chain(group.sentinels());
    let stand_still = || {
        let alive = || all().filter(|one| one.pid().is_some());
        alive().for_each(|one| one.pause().unwrap());
        // They notice from 2 s on.
        thread::sleep(Duration::from_millis(2500));
        alive().for_each(|one| one.resume().unwrap());
    };

    // While they are at it.
    let ask = ["SENTINEL", "FAILOVER", RedisSentinels::MASTER_NAME];
    group.sentinels()[0].cli(&ask).unwrap();
    stand_still();
    if group.master().unwrap().addr() == first.addr() {
        group.fail_over().unwrap();
    }
    assert_eq!(group.master().unwrap().addr(), second.addr());
    until("all know their places", || {
        role(first) == "slave" && role(second) == "master"
    });

    // When they are to find out by themselves.
    until("the old master follows the new one", || {
        let info = first.cli(&["INFO", "replication"]);
        info.is_ok_and(|info| info.contains("master_link_status:up"))
    });
    second.kill().unwrap();
    stand_still();
    until("the first is the master again", || {
        group.master().is_ok_and(|master| master.addr() == first.addr()) && role(first) == "master"
    });
}

/// A server that is demoted hangs up on a client that asks at that moment.
fn role(server: &RedisServer) -> String {
    let role = server.cli(&["ROLE"]).unwrap_or_default();
    role.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_cluster_has_each_key_on_one_node() {
    if no_redis() {
        return;
    }
    let cluster = RedisCluster::start().unwrap();
    let mut used = [0; 3];
    for n in 0..60 {
        let key = format!("key-{n}");
        let node = cluster.node_of(&key).unwrap();
        node.cli(&["SET", &key, "1"]).unwrap();
        let index = cluster
            .nodes()
            .iter()
            .position(|one| one.addr() == node.addr())
            .unwrap();
        used[index] += 1;
        let other = &cluster.nodes()[(index + 1) % 3];
        let moved = other.cli(&["GET", &key]).unwrap_err().to_string();
        assert!(
            moved.starts_with("MOVED") && moved.ends_with(&node.addr().to_string()),
            "{moved}"
        );
    }
    assert!(used.iter().all(|keys| *keys > 0), "{used:?}");

    let lost = cluster.node_of("key-0").unwrap();
    lost.restart_empty().unwrap();
    cluster.wait_complete().unwrap();
    assert_answers(cluster.node_of("key-0").unwrap(), &["GET", "key-0"], "(nil)");
    assert_eq!(cluster.node_of("key-0").unwrap().addr(), lost.addr());

    lost.kill().unwrap();
    let rest: Vec<_> = cluster
        .nodes()
        .iter()
        .filter(|node| node.addr() != lost.addr())
        .collect();
    until("the others miss it", || {
        rest.iter().all(|node| {
            node.cli(&["CLUSTER", "INFO"])
                .unwrap()
                .contains("cluster_state:fail")
        })
    });
    lost.start().unwrap();
    cluster.wait_complete().unwrap();
}
