//! Jobs that several hosts begin at almost the same time.

use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use lockkit_testbed::{
    Clock,
    mysql::{Flavour, MySql},
    redis::{self, RedisServer},
    skipped,
};

use rustix::process::Signal;

use crate::tool::{Running, Site, eventually, lockkit, outcome};

/// The nights on each kind of server. For more of them, say how many in `LOCKKIT_NIGHTS`.
const NIGHTS: usize = 4;
const AT_ONCE: usize = 4;
const HOUR: Duration = Duration::from_secs(3_600);

#[test]
fn a_job_is_done_once_by_redis() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    nights("redis", server.url());
}

#[test]
fn a_job_is_done_once_by_redlock() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let masters = [(); 3].map(|()| RedisServer::plain().unwrap());
    let hosts = masters.each_ref().map(|master| master.addr().to_string());
    nights(
        "redlock",
        &format!("redlock://{}?max_ttl=7s&ttl=5s", hosts.join(",")),
    );
}

#[test]
fn a_job_is_done_once_by_leases_of_mysql() {
    if skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
    nights("mysql", &format!("{}?mode=lease", server.url()));
}

/// Three hosts begin a job each night, one after the other. Their clocks are hours apart.
fn nights(what: &str, url: &str) {
    let mut site = Site::new();
    url.clone_into(&mut site.url);
    // Redlock's masters have no vote at first, since they may have been emptied.
    let first = outcome(&mut site.run(&["--wait", "60s"], "exit 0"));
    assert_eq!(first.0, 0, "{first:?}");
    let clocks = [(); 3].map(|()| Clock::new().unwrap());
    clocks[1].forward(HOUR).unwrap();
    clocks[2].back(HOUR).unwrap();
    let nights = env::var("LOCKKIT_NIGHTS").map_or(NIGHTS, |nights| nights.parse().unwrap());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(number) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|next| *next < nights)
                {
                    night(&site, &clocks, number);
                }
            });
        }
    });
    println!("{what}: {nights} nights, each job done once");
}

fn night(site: &Site, clocks: &[Clock; 3], number: usize) {
    let report = site.path(&format!("report-{number}"));
    let script = format!("date +%H >> {}", report.display());
    let job = format!("night-{number}");
    let host = |options: &[&str]| -> Command {
        site.lockkit(&[&["run"], options, &[&job, "--", "sh", "-c", &script]].concat())
    };
    let mut hosts = Vec::new();
    // Each night another one is the first.
    // The last one begins after the ttl.
    for (place, late) in [0, 100, 1_600].into_iter().enumerate() {
        thread::sleep(Duration::from_millis(late));
        let mut host = host(&["--try", "--ttl", "1s", "--at-least", "6s"]);
        clocks[(number + place) % clocks.len()].apply(&mut host);
        hosts.push(Running::spawn(host.stdin(Stdio::null())));
    }
    let (mut statuses, said): (Vec<_>, Vec<_>) = hosts
        .into_iter()
        .map(Running::end)
        .map(|(status, said)| (status.code(), said))
        .unzip();
    statuses.sort_unstable();
    assert_eq!(
        statuses,
        [Some(0), Some(124), Some(124)],
        "night {number}: {said:?}"
    );
    assert_eq!(
        fs::read_to_string(&report).unwrap().lines().count(),
        1,
        "night {number}"
    );
    let next = outcome(&mut host(&["--wait", "20s"]));
    assert_eq!(next.0, 0, "free when that time is over: {next:?}");
}

#[test]
fn where_holds_end_with_a_process_it_is_an_error() {
    let site = Site::new();
    let (status, _, complaint) = outcome(&mut site.run(&["--at-least", "1m"], "exit 0"));
    assert_eq!(status, 125);
    assert!(complaint.contains("hold_at_least"), "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
}

/// Nobody has done it, so that another host may, at once.
#[test]
fn a_job_that_cannot_be_executed_frees_its_name() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut site = Site::new();
    site.url = server.url().to_owned();
    fs::write(site.path("no-program"), "").unwrap();
    let job = |command: &[&str]| {
        let run = ["run", "--try", "--at-least", "10m", "job", "--"];
        outcome(&mut site.lockkit(&[&run[..], command].concat()))
    };
    assert_eq!(job(&["./no-program"]).0, 126);
    assert_eq!(job(&["no-such-program"]).0, 127);
    // The same status is the job's own if it has run.
    assert_eq!(job(&["sh", "-c", "exit 127"]).0, 127);
    assert_eq!(job(&["true"]).0, 124);
}

/// The job is a program of any name, and what it inherits is as without lockkit's own pipes.
#[cfg(target_os = "linux")]
#[test]
fn a_job_of_any_name_keeps_its_lock_and_gets_no_pipe() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut site = Site::new();
    site.url = server.url().to_owned();
    let program = site.path("lockkit-not-run");
    std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
    let job = |command: &[&str]| {
        let run = ["run", "--try", "--at-least", "10m", "job", "--"];
        outcome(&mut site.lockkit(&[&run[..], command].concat()))
    };
    let show = "for fd in /proc/$$/fd/*; do case $(readlink $fd) in pipe:*) echo ${fd##*/};; esac; done";
    let without = outcome(Command::new("sh").args(["-c", show]));
    let (status, output, complaint) = job(&["./lockkit-not-run", "-c", show]);
    assert_eq!((status, output), (0, without.1), "{complaint}");
    assert_eq!(job(&["true"]).0, 124, "the name stays taken");
}

#[test]
fn a_name_is_not_kept_for_longer_than_a_server_allows() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let masters = [(); 3].map(|()| RedisServer::plain().unwrap());
    let [one, two, three] = masters.each_ref().map(RedisServer::addr);
    let url = format!("redlock://{one},{two},{three}?max_ttl=30s&ttl=10s");
    let run = [
        "run",
        "--url",
        &url,
        "--try",
        "--at-least",
        "31s",
        "job",
        "--",
        "true",
    ];
    let (status, shown, complaint) = outcome(&mut lockkit(&run));
    assert_eq!((status, &*shown), (125, ""), "{complaint}");
    let said = "lockkit: invalid option `hold_at_least`: 31s is longer than a lease can be\n";
    assert_eq!(complaint, said);
}

/// Runs lockkit as a program with rights of its own may be installed: its users can run it and nothing else. The system keeps what such a
/// process has from its children.
#[cfg(target_os = "linux")]
#[test]
fn a_user_who_may_not_read_lockkit_can_run_it() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    // The way to a test's own directory is not open to all.
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let program = place.path().join("lockkit");
    fs::copy(env!("CARGO_BIN_EXE_lockkit"), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o111)).unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let run = |options: &[&str], command: &[&str]| {
        let arguments = [&["run", "--try"], options, &["--"], command].concat();
        let mut run = Command::new(&program);
        // What is on the way of another's PATH, not each user may look into.
        let open_to_all = [("LOCKKIT_URL", server.url()), ("PATH", "/usr/bin:/bin")];
        run.args(&arguments).envs(open_to_all).current_dir("/");
        if rustix::process::geteuid().is_root() {
            const SOMEBODY: u32 = 65_534;
            run.uid(SOMEBODY).gid(SOMEBODY);
        }
        outcome(run.stdin(Stdio::null()))
    };
    assert_eq!(run(&["lock"], &["true"]).0, 0);
    assert_eq!(run(&["lock"], &["sh", "-c", "exit 7"]).0, 7);
    let (status, _, complaint) = run(&["lock"], &["no-such-program"]);
    assert_eq!(status, 127, "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    let job = ["--at-least", "10m", "job"];
    assert_eq!(run(&job, &["true"]), (0, String::new(), String::new()));
    assert_eq!(run(&job, &["true"]).0, 124, "the name stays taken");
}

/// TERM comes with the grant, or before the process that becomes the job has done so. It is held up where it would.
#[cfg(target_os = "linux")]
#[test]
fn a_job_that_is_ended_before_it_begins_frees_its_name() {
    let ignores = Command::new("/usr/bin/env")
        .args(["--ignore-signal=CHLD", "true"])
        .stderr(Stdio::null())
        .status();
    let missing = (!ignores.is_ok_and(|status| status.success()))
        .then(|| "/usr/bin/env has no --ignore-signal, which that of GNU has".to_owned());
    if skipped("env", missing) || skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut site = Site::new();
    site.url = server.url().to_owned();
    // The release may still be on its way when lockkit ends.
    let is_free = |site: &Site| assert_eq!(outcome(&mut site.run(&["--wait", "10s"], "exit 0")).0, 0);
    let held_up = site.path("held-up");
    let env = "case $* in *__exec*) touch held-up; exec sleep 600;; esac; exec /usr/bin/env \"$@\"";
    fs::write(site.path("env"), format!("#!/bin/sh\n{env}\n")).unwrap();
    fs::set_permissions(site.path("env"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", site.path("").display(), env::var("PATH").unwrap());
    let job = |how: &[&str]| {
        let run = site.run(&[how, &["--at-least", "10m"]].concat(), "touch done");
        let mut ignoring = Command::new("/usr/bin/env");
        ignoring
            .arg("--ignore-signal=CHLD")
            .arg(run.get_program())
            .args(run.get_args())
            .envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .env("PATH", &path)
            .current_dir(site.path(""))
            .stdin(Stdio::null());
        Running::spawn(&mut ignoring)
    };
    let ended = |job: Running| {
        let (status, said) = job.end();
        assert_eq!(status.code(), Some(143), "{said}");
        assert!(!site.path("done").exists(), "it was done");
        is_free(&site);
    };
    for _ in 0..8 {
        let mut before = site.running(&[], "echo up; read line; exit 0");
        let waiting = job(&[]);
        eventually("it waits", || {
            let state = outcome(&mut site.lockkit(&["inspect", "job"])).1;
            state.contains("1 waiting").then_some(())
        });
        waiting.signal(Signal::STOP);
        before.close_input();
        assert!(before.end().0.success());
        waiting.signal(Signal::TERM);
        waiting.signal(Signal::CONT);
        ended(waiting);
    }
    let _ = fs::remove_file(&held_up);
    let begun = job(&["--try"]);
    eventually("it is about to begin", || held_up.exists().then_some(()));
    begun.signal(Signal::TERM);
    ended(begun);
}
