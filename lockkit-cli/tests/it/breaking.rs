//! A holder that is asked to give up its lock, or loses it by force.

use std::{
    fs,
    time::{Duration, Instant},
};

use lockkit_testbed::redis::{self, RedisServer};

use crate::tool::{Running, Site, gone, group, has_ended, outcome};

/// A holder that says its token and then does what the script says.
fn holder(site: &Site, script: &str) -> (Running, String) {
    let mut holder = site.running(&[], &format!("echo up; echo $LOCKKIT_TOKEN; {script}"));
    let token = holder.line();
    (holder, token)
}

#[test]
fn a_command_that_is_asked_for_ends_in_its_own_time() {
    let site = Site::new();
    let script = "trap 'sleep 0.5; echo done; exit 0' TERM; echo ready; while :; do sleep 0.01; done";
    let (mut holder, token) = holder(&site, script);
    assert_eq!(holder.line(), "ready");
    let began = Instant::now();
    let (status, said, complaint) = outcome(&mut site.lockkit(&["break", "job", "--token", &token]));
    assert_eq!((status, &*said, &*complaint), (0, "", ""));
    assert!(
        began.elapsed() >= Duration::from_millis(500),
        "the lock was free while the command was at work"
    );
    assert_eq!(holder.line(), "done");
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    // Behind what the shell says of its own child.
    assert!(
        complaint.ends_with("lockkit: lock `job` was lost: its holder was asked to give it up\n"),
        "{complaint}"
    );
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 0);
}

/// It has a process group of its own, and outlives the script by itself.
#[test]
fn what_runs_below_timeout_ends_before_the_lock_is_free() {
    let site = Site::new();
    let worker = "trap 'sleep 0.5; exit 0' TERM; echo $$; while :; do sleep 0.01; done";
    let script = format!("timeout 60 sh -c \"{}\"; true", worker.replace('$', "\\$"));
    let (mut holder, token) = holder(&site, &script);
    let worker = holder.line().parse().unwrap();
    assert_ne!(group(worker), group(holder.pid()));
    let (status, said, complaint) = outcome(&mut site.lockkit(&["break", "job", "--token", &token]));
    has_ended(worker, "when the lock was free");
    assert_eq!((status, &*said, &*complaint), (0, "", ""));
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
}

#[test]
fn a_command_that_stays_keeps_the_lock() {
    let site = Site::new();
    let script = "trap 'echo told' TERM; echo ready; while :; do sleep 0.01; done";
    let (mut holder, token) = holder(&site, script);
    assert_eq!(holder.line(), "ready");
    let breaking = ["break", "job", "--wait", "300ms", "--token", &token];
    let (status, _, complaint) = outcome(&mut site.lockkit(&breaking));
    assert_eq!(status, 124, "{complaint}");
    assert_eq!(
        complaint,
        "lockkit: `job` is asked for, and still held: only its holder can end that\n"
    );
    assert_eq!(holder.line(), "told");
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 124, "it is taken");
    let other: u64 = token.parse::<u64>().unwrap() + 1_000_000;
    let (status, _, complaint) = outcome(&mut site.lockkit(&["break", "job", "--token", &other.to_string()]));
    assert_eq!(status, 1, "{complaint}");
    assert!(complaint.contains("nobody holds `job`"), "{complaint}");
    let pid = holder.pid();
    drop(holder);
    gone(pid);
}

/// Its hold has no lease, so there is no end to wait for when it is asked for, and one as soon as its `max_hold` is over.
#[test]
fn a_command_that_stays_is_killed_after_max_hold() {
    let site = Site::new();
    let script = "trap 'echo told' TERM; echo up; echo $LOCKKIT_TOKEN; echo $$; while :; do sleep 0.01; done";
    let mut holder = site.running(&["--ttl", "2s", "--max-hold", "2s"], script);
    let (token, command) = (holder.line(), holder.line());
    let breaking = ["break", "job", "--wait", "100ms", "--token", &token];
    assert_eq!(outcome(&mut site.lockkit(&breaking)).0, 124);
    assert_eq!(holder.line(), "told");
    // Granted only when the first command is gone.
    let next = format!("kill -0 {command} 2>/dev/null && echo both; echo alone");
    let (status, said, complaint) = outcome(&mut site.run(&["--wait", "20s"], &next));
    assert_eq!((status, &*said), (0, "alone\n"), "{complaint}");
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
}

/// It was asked, stays, and then its hold is ended by others. The next may be granted the lock from then on.
fn stays_until_its_hold_is_ended(site: &Site, options: &[&str], end: impl FnOnce(&str)) {
    let script = "trap 'echo told' TERM; echo up; echo $LOCKKIT_TOKEN; echo $$; while :; do sleep 0.01; done";
    let mut holder = site.running(options, script);
    let (token, command) = (holder.line(), holder.line().parse().unwrap());
    let breaking = ["break", "job", "--wait", "100ms", "--token", &token];
    assert_eq!(outcome(&mut site.lockkit(&breaking)).0, 124);
    assert_eq!(holder.line(), "told");
    end(&token);
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    gone(command);
    let (status, _, complaint) = outcome(&mut site.run(&["--try"], "exit 0"));
    assert_eq!(status, 0, "{complaint}");
}

#[test]
fn a_command_that_stays_is_killed_when_its_hold_is_forced() {
    if lockkit_testbed::skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut site = Site::new();
    site.url = server.url().to_owned();
    stays_until_its_hold_is_ended(&site, &["--ttl", "5m"], |token| {
        let forced = ["break", "job", "--force", "--token", token];
        let (status, _, complaint) = outcome(&mut site.lockkit(&forced));
        assert_eq!(status, 0, "{complaint}");
    });
}

#[test]
fn a_command_that_stays_is_killed_when_its_file_is_deleted() {
    let site = Site::new();
    stays_until_its_hold_is_ended(&site, &[], |_| {
        for file in site.lock_files() {
            fs::remove_file(file).unwrap();
        }
    });
}

#[test]
fn force_says_where_it_cannot_be_used() {
    let site = Site::new();
    let (_holder, token) = holder(&site, "while :; do sleep 0.01; done");
    let forced = ["break", "job", "--force", "--token", &token];
    let (status, _, complaint) = outcome(&mut site.lockkit(&forced));
    assert_eq!(status, 125);
    assert!(complaint.contains("end process"), "{complaint}");
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 124, "it is taken");
    let both = ["break", "job", "--force", "--wait", "1s", "--token", &token];
    let (status, _, complaint) = outcome(&mut site.lockkit(&both));
    assert_eq!(status, 125);
    assert!(
        complaint.contains("--force") && complaint.contains("--wait"),
        "{complaint}"
    );
}
