//! Servers that are not there, or whose names nobody knows.

use std::{
    path::PathBuf,
    process::Command,
    sync::LazyLock,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::tool::{Running, catches, eventually, lockkit, outcome};

/// Far less than the look-up of a name takes here, and enough for a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// A library that takes a minute to look up a name, as a resolver does whose server is silent.
static SLOW: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let (source, library) = (dir.path().join("slow.c"), dir.path().join("slow.so"));
    let code = "#include <netdb.h>\n#include <unistd.h>\n\
        int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)\n\
        { sleep(60); return EAI_AGAIN; }\n";
    std::fs::write(&source, code).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.unwrap().success());
    (dir, library)
});

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
