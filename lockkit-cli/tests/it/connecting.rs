//! Servers that are not there, or whose names nobody knows.

use std::{
    path::PathBuf,
    process::Command,
    sync::LazyLock,
    time::{Duration, Instant},
};

use lockkit_testbed::{
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::tool::{Running, catches, eventually, lockkit, outcome};

/// Far less than the look-up of a name takes here, and enough for the busiest machine.
const SOON: Duration = Duration::from_secs(30);

/// A library that takes ten minutes to look up a name, as a resolver does whose server is silent.
static SLOW: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| resolver("sleep(600); return EAI_AGAIN;"));

/// A library that looks up names by this code.
fn resolver(body: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (source, library) = (dir.path().join("resolver.c"), dir.path().join("resolver.so"));
    let code = format!(
        "#include <netdb.h>\n#include <unistd.h>\n\
        int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)\n\
        {{ {body} }}\n"
    );
    std::fs::write(&source, code).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.unwrap().success());
    (dir, library)
}

fn slowly(arguments: &[&str]) -> Command {
    let mut command = lockkit(arguments);
    command.env("LD_PRELOAD", &SLOW.1);
    command
}

#[test]
fn a_slow_look_up_of_a_name_ends_with_the_wait() {
    let ways: [&[&str]; 4] = [
        &[
            "run",
            "--url",
            "redis://h.invalid",
            "--wait",
            "1s",
            "job",
            "--",
            "true",
        ],
        &[
            "run",
            "--url",
            "mysql://u:canary@h.invalid/app?connect_timeout=1s",
            "--try",
            "job",
            "--",
            "true",
        ],
        &["inspect", "--url", "zk://h.invalid?connect_timeout=1s", "job"],
        &["check", "--url", "redis://h.invalid?connect_timeout=1s"],
    ];
    for arguments in ways {
        let began = Instant::now();
        let (status, output, complaint) = outcome(&mut slowly(arguments));
        assert!(began.elapsed() < SOON, "{arguments:?}: {:?}", began.elapsed());
        assert_eq!((status, output.as_str()), (125, ""), "{complaint}");
        assert!(
            complaint.contains("h.invalid")
                && complaint.contains("no answer within the connect_timeout of 1s"),
            "{complaint}"
        );
    }
}

#[test]
fn term_ends_a_slow_look_up_of_a_name() {
    let run = [
        "run",
        "--url",
        "redis://h.invalid?connect_timeout=50s",
        "job",
        "--",
        "true",
    ];
    let waiter = Running::spawn(&mut slowly(&run));
    eventually("it listens", || catches(waiter.pid(), Signal::TERM).then_some(()));
    let began = Instant::now();
    waiter.signal(Signal::TERM);
    let (status, complaint) = waiter.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(143), ""));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

/// The server it waits for is there, and says nothing.
#[test]
fn the_wait_bounds_a_server_that_does_not_answer() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    for scheme in ["redis", "zk", "mysql"] {
        let path = if scheme == "mysql" { "/app" } else { "" };
        let url = format!("{scheme}://{address}{path}");
        let began = Instant::now();
        let run = ["run", "--url", &url, "--wait", "1s", "job", "--", "true"];
        let (status, _, complaint) = outcome(&mut lockkit(&run));
        assert!(began.elapsed() < SOON, "{scheme}: {:?}", began.elapsed());
        assert_eq!(status, 125, "{complaint}");
        assert!(complaint.contains(&address.to_string()), "{complaint}");
    }
}

#[test]
fn a_connection_that_is_refused_names_the_address() {
    for (url, address) in [
        ("redis://user:canary@127.0.0.1:1", "redis://***@127.0.0.1:1"),
        (
            "redis://user:canary@127.0.0.1:1?sentinel=main",
            "redis://***@127.0.0.1:1",
        ),
        (
            "mysql://user:canary@127.0.0.1:1/app",
            "mysql://***@127.0.0.1:1/app",
        ),
        ("mysql://user:canary@h/app?socket=/no/socket", "/no/socket"),
        ("zk://user:canary@127.0.0.1:1", "zk://***@127.0.0.1:1"),
        (
            "redlock://user:canary@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
            "redlock://***@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
        ),
        ("file:///dev/null/locks", "/dev/null/locks"),
    ] {
        for command in ["inspect", "check"] {
            let mut arguments = vec![command, "--url", url];
            if command == "inspect" {
                arguments.push("job");
            }
            let (status, output, complaint) = outcome(&mut lockkit(&arguments));
            assert_eq!((status, output.as_str()), (125, ""), "{complaint}");
            assert!(complaint.contains(address), "{complaint}");
            assert!(!complaint.contains("canary"), "{complaint}");
            assert_eq!(complaint.lines().count(), 1, "{complaint}");
        }
    }
}

/// `lockkit run OPTIONS job -- echo up`.
fn up(url: &str, options: &[&str]) -> Command {
    let run = ["run", "--url", url];
    lockkit(&[&run, options, &["job", "--", "echo", "up"]].concat())
}

/// A server that is there only once somebody waits for it, as after a reboot of both.
fn comes_later<S>(server: &S, url: &str, kill: impl FnOnce(&S), start: impl FnOnce(&S)) {
    kill(server);
    let (status, _, complaint) = outcome(&mut up(url, &["--try"]));
    assert_eq!((status, complaint.lines().count()), (125, 1), "{complaint}");
    let (status, _, complaint) = outcome(&mut up(url, &["--wait", "200ms"]));
    assert_eq!(status, 125, "{complaint}");
    let mut patient = Running::spawn(&mut up(url, &["--wait", "1m"]));
    let mut unbounded = Running::spawn(&mut up(url, &[]));
    for waiter in [&mut patient, &mut unbounded] {
        let complaint = waiter.complaint();
        assert!(
            complaint.starts_with("lockkit: cannot connect; trying again: "),
            "{complaint}"
        );
    }
    start(server);
    for mut waiter in [patient, unbounded] {
        assert_eq!(waiter.line(), "up");
        assert_eq!(waiter.end().0.code(), Some(0));
    }
}

#[test]
fn redis_may_come_later() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let url = server.url().to_owned();
    comes_later(&server, &url, |it| it.kill().unwrap(), |it| it.start().unwrap());
}

#[test]
fn two_redlock_masters_of_three_may_come_later() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let servers = [(); 3].map(|()| RedisServer::plain().unwrap());
    let hosts: Vec<_> = servers.iter().map(|server| server.addr().to_string()).collect();
    // Its shortest quarantine, since the masters come back empty.
    let url = format!("redlock://{}?max_ttl=1s&ttl=1s", hosts.join(","));
    comes_later(
        &servers,
        &url,
        |them| them[1..].iter().for_each(|it| it.kill().unwrap()),
        |them| them[1..].iter().for_each(|it| it.start().unwrap()),
    );
}

#[test]
fn mysql_may_come_later() {
    if skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
    let url = server.url();
    comes_later(
        &server,
        &url,
        |it| _ = it.process().kill().unwrap(),
        |it| it.start_again().unwrap(),
    );
}

#[test]
fn postgres_may_come_later() {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::plain().unwrap();
    let url = server.url();
    comes_later(&server, &url, |it| it.kill().unwrap(), |it| it.start().unwrap());
}

#[test]
fn zookeeper_may_come_later() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let url = format!("zk://{}", server.addr());
    comes_later(&server, &url, |it| it.kill().unwrap(), |it| it.start().unwrap());
}

#[test]
fn etcd_may_come_later() {
    if skipped("etcd", etcd::missing()) {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let url = server.url();
    comes_later(&server, &url, |it| it.kill().unwrap(), |it| it.start().unwrap());
}

/// Each reason is said once, in the order in which they come, and the last one to end the wait is the error.
#[test]
fn what_keeps_a_server_from_its_work_may_pass() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let set = |words: &[&str]| assert_eq!(server.cli(words).unwrap(), "OK", "{words:?}");
    set(&["REPLICAOF", "127.0.0.1", "1"]);
    let mut waiter = Running::spawn(&mut up(server.url(), &["--wait", "1m"]));
    let reason = waiter.complaint();
    assert!(reason.contains("is a replica"), "{reason}");
    server.kill().unwrap();
    let reason = waiter.complaint();
    assert!(reason.contains("refused") || reason.contains("reset"), "{reason}");
    server.start().unwrap();
    assert_eq!(waiter.line(), "up");
    assert_eq!(waiter.end().0.code(), Some(0));
}

#[test]
fn what_does_not_pass_ends_a_run_at_once() {
    if skipped("redis", redis::missing()) || skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = RedisServer::builder()
        .password("open-sesame")
        .user("nobody", "open-sesame", "~* &* +@all -info")
        .start()
        .unwrap();
    let database = MySql::start(Flavour::MariaDb, &[]).unwrap();
    let at = |user: &str| format!("redis://{user}:open-sesame@{}", server.addr());
    for (url, cause) in [
        (format!("redis://:wrong@{}", server.addr()), "WRONGPASS"),
        (at("nobody"), "NOPERM"),
        (format!("mysql://nobody:wrong@{}/app", database.addr()), "1045"),
        (format!("{}?namespace=%20", at("default")), "namespace"),
    ] {
        let (status, output, complaint) = outcome(&mut up(&url, &[]));
        assert_eq!((status, output.as_str()), (125, ""), "{complaint}");
        assert!(
            complaint.contains(cause) && complaint.lines().count() == 1,
            "{complaint}"
        );
    }
}

/// A resolver that knows the answer: there is no such host.
#[test]
fn a_host_that_nobody_knows_ends_a_run_at_once() {
    let (_dir, library) = resolver("return EAI_NONAME;");
    for scheme in ["redis", "mysql", "postgres", "etcd"] {
        let path = if ["mysql", "postgres"].contains(&scheme) {
            "/app"
        } else {
            ""
        };
        let mut run = up(&format!("{scheme}://h.invalid{path}"), &[]);
        let (status, _, complaint) = outcome(run.env("LD_PRELOAD", &library));
        assert_eq!((status, complaint.lines().count()), (125, 1), "{complaint}");
        assert!(complaint.contains("Name or service not known"), "{complaint}");
    }
}
