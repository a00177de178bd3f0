//! Jobs that several hosts begin at almost the same time.

use std::{fs, process::Stdio, thread::sleep, time::Duration};

use lockkit_testbed::{
    redis::{self, RedisServer},
    skipped,
};

use crate::tool::{Running, Site, outcome};

#[test]
fn a_job_is_done_once_by_hosts_that_begin_apart() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut site = Site::new();
    site.url = server.url().to_owned();
    for night in 0..4 {
        let report = site.path(&format!("report-{night}"));
        let script = format!("echo done >> {}", report.display());
        let host = |options: &[&str]| {
            let job = format!("night-{night}");
            let run = [&["run"], options, &[&job, "--", "sh", "-c", &script]].concat();
            site.lockkit(&run)
        };
        let mut hosts = Vec::new();
        for late in [0, 100, 700] {
            sleep(Duration::from_millis(late));
            hosts.push(Running::spawn(
                host(&["--try", "--ttl", "1s", "--at-least", "4s"]).stdin(Stdio::null()),
            ));
        }
        let mut statuses: Vec<_> = hosts.into_iter().map(|host| host.end().0.code()).collect();
        statuses.sort_unstable();
        assert_eq!(statuses, [Some(0), Some(124), Some(124)], "night {night}");
        assert_eq!(fs::read_to_string(&report).unwrap(), "done\n", "night {night}");
        assert_eq!(
            outcome(&mut host(&["--wait", "20s"])).0,
            0,
            "free when that time is over"
        );
    }
}

#[test]
fn where_holds_end_with_a_process_it_is_an_error() {
    let site = Site::new();
    let (status, _, complaint) = outcome(&mut site.run(&["--at-least", "1m"], "exit 0"));
    assert_eq!(status, 125);
    assert!(complaint.contains("hold_at_least"), "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
}
