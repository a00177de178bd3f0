//! On ZooKeeper, where a server's session decides how long a lease is.

use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::zookeeper::{self, ZkServer};

use crate::tool::{Running, lockkit, outcome};

/// A server with ZooKeeper's own defaults for this tick, or no test.
pub(crate) fn server(tick: u64) -> Option<ZkServer> {
    if lockkit_testbed::skipped("zk", zookeeper::missing()) {
        return None;
    }
    let server = ZkServer::builder()
        .directive(format!("tickTime={tick}"))
        .directive(format!("minSessionTimeout={}", 2 * tick))
        .directive(format!("maxSessionTimeout={}", 20 * tick))
        .start();
    Some(server.expect("a ZooKeeper server"))
}

/// Their leases are shorter than their ttl, and healthy with less than a quarter of them left.
#[test]
fn healthy_commands_run_to_their_end() {
    let (Some(usual), Some(quick)) = (server(2_000), server(800)) else {
        return;
    };
    let (usual, quick) = (format!("zk://{}", usual.addr()), format!("zk://{}", quick.addr()));
    let runs: Vec<_> = [
        (format!("{usual}?ttl=8s"), "job-8"),
        (format!("{usual}?ttl=10s"), "job-10"),
        (format!("{usual}?ttl=12s"), "job-12"),
        (format!("{quick}?session_timeout=4s&tick_time=800ms"), "job-4"),
    ]
    .map(|(url, name)| {
        let run = Running::spawn(&mut lockkit(&["run", "--url", &url, name, "--", "sleep", "12"]));
        (name, run)
    })
    .into();
    for (name, run) in runs {
        let (status, complaint) = run.end();
        assert_eq!((status.code(), complaint.as_str()), (Some(0), ""), "{name}");
    }
}

/// It has less than `op_timeout` for it, by a machine that runs meanwhile: one that stands still takes the command's time.
#[test]
fn a_command_is_told_before_a_silent_server_ends_it() {
    let Some(server) = server(400) else { return };
    let url = format!("zk://{}?session_timeout=6s&tick_time=400ms", server.addr());
    // The shell hears of it while it waits, however long it takes to start another program.
    let script = "exec 2>/dev/null; trap 'echo told; exit 0' TERM; echo up; sleep 60 & wait";
    for tries_left in (0..3).rev() {
        let mut run = Running::spawn(&mut lockkit(&[
            "run", "--url", &url, "job", "--", "sh", "-c", script,
        ]));
        assert_eq!(run.line(), "up");
        let watch = Stopwatch::start();
        server.pause().unwrap();
        let told = run.line();
        let (status, complaint) = run.end();
        server.resume().unwrap();
        let stood_still = watch.stood_still();
        if told.is_empty() && !stood_still.is_zero() && tries_left > 0 {
            eprintln!("again, since the machine stood still for {stood_still:?}: {complaint}");
            continue;
        }
        assert_eq!(
            told, "told",
            "{complaint}, and the machine stood still for {stood_still:?}"
        );
        assert_eq!(status.code(), Some(123), "{complaint}");
        assert!(complaint.contains("could not be renewed"), "{complaint}");
        return;
    }
}

#[test]
fn who_inspects_or_breaks_leaves_no_session() {
    let Some(server) = server(2_000) else { return };
    let url = format!("zk://{}", server.addr());
    for _ in 0..2 {
        assert_eq!(outcome(&mut lockkit(&["inspect", "--url", &url, "job"])).0, 0);
        assert_eq!(
            outcome(&mut lockkit(&["break", "--url", &url, "job", "--token", "1"])).0,
            1
        );
    }
    assert_eq!(server.figure("zk_global_sessions").unwrap(), 0);
}
