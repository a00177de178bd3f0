//! A lock that is lost takes its command with it.

use std::{
    fs,
    os::unix::fs::chown,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::{missing_python, skipped};
use rustix::process::{Signal, geteuid};

use crate::tool::{
    IN_A_GROUP, Running, Site, eventually, gone, group, has_ended, lockkit, outcome, session, signal_to,
    state,
};

#[test]
fn a_deleted_lock_file_is_a_lost_lock() {
    let site = Site::new();
    let mut holder = site.running(
        &[],
        "trap '' TERM; echo up; echo $$; sleep 60 & echo $!; wait; wait",
    );
    let [command, grandchild] = [(); 2].map(|()| holder.line().parse().unwrap());
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    assert!(
        complaint.starts_with("lockkit: lock `job` was lost: "),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    gone(command);
    gone(grandchild);
    assert_eq!(
        outcome(&mut site.run(&["--try"], "exit 0")).0,
        0,
        "the name is good again"
    );
}

/// A set-user-ID program that has become another user may be killed by nobody but that one and root.
#[test]
fn a_command_of_another_user_does_not_keep_lockkit() {
    const LOCKKITS: [&str; 4] = ["setpriv", "--reuid=61234", "--regid=61234", "--clear-groups"];
    const OTHERS: [&str; 3] = ["--reuid=61235", "--regid=61235", "--clear-groups"];

    let is_root = geteuid().is_root();
    if skipped("root", (!is_root).then(|| "this is not root".to_owned())) {
        return;
    }
    let site = Site::open_to_all();
    chown(site.path(""), Some(61234), Some(61234)).unwrap();
    let become_other = site.path("setpriv");
    let mut install = Command::new("sh");
    install.args(["-c", "install -m 4755 \"$(command -v setpriv)\" setpriv"]);
    assert_eq!(outcome(install.current_dir(site.path(""))).0, 0);
    let other = |lockkit: &[&str], script: &str| {
        let mut command = Command::new(LOCKKITS[0]);
        command
            .args(&LOCKKITS[1..])
            .args(lockkit)
            .arg(&become_other)
            .args(OTHERS)
            .args(["sh", "-c", script])
            .env("LOCKKIT_URL", &site.url)
            .stdin(Stdio::null());
        command
    };
    let can = outcome(&mut other(&[], "exit 0")).0 == 0;
    if skipped(
        "set-user-ID",
        (!can).then(|| "the system heeds no set-user-ID here".to_owned()),
    ) {
        return;
    }
    let lockkit = [env!("CARGO_BIN_EXE_lockkit"), "run", "job", "--"];
    let script = "echo up; echo $$; exec sleep 60 >/dev/null 2>&1";
    let mut holder = Running::spawn(&mut other(&lockkit, script));
    assert_eq!(holder.line(), "up");
    let command = holder.line().parse().unwrap();
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    // Why comes first, and not after the wait.
    let why = holder.complaint();
    assert!(why.starts_with("lockkit: lock `job` was lost: "), "{why}");
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    assert!(
        complaint.contains("was killed and is still there") && complaint.lines().count() == 1,
        "{complaint}"
    );
    assert!(state(command).is_some_and(|state| state != 'Z'));
    signal_to(command, Signal::KILL);
    gone(command);
}

/// A process may go to any group of its session.
#[test]
fn a_command_that_joins_lockkits_group_ends_with_the_lock() {
    let site = Site::new();
    let script = "exec perl -e '$| = 1; setpgrp(0, getpgrp(getppid())); $SIG{TERM} = sub { exit 7 }; \
        my $child = fork() // die; if (!$child) { sleep 60; exit } print \"up\\n$$\\n$child\\n\"; sleep 60'";
    let begin = || {
        let mut holder = site.running(&[], script);
        let family = [(); 2].map(|()| holder.line().parse::<i32>().unwrap());
        for process in family {
            assert_eq!(group(process), group(holder.pid()));
        }
        (holder, family)
    };
    let (holder, family) = begin();
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(7));
    family.into_iter().for_each(gone);

    let (holder, family) = begin();
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    family.into_iter().for_each(gone);
}

/// As `timeout` does, which may be the command itself, and a shell that controls jobs.
#[test]
fn what_has_a_process_group_of_its_own_ends_with_the_lock() {
    let site = Site::new();
    let stubborn = "trap '' TERM; echo up; echo $$; sleep 60 & echo $!; wait; wait";
    let within = format!(
        "{IN_A_GROUP} sh -c \"{}\" & wait; wait",
        stubborn.replace('$', "\\$")
    );
    let commands: [&[&str]; 4] = [
        &["--foreground", "job", "--", "timeout", "60", "sh", "-c", stubborn],
        &["--foreground", "job", "--", "sh", "-c", &within],
        &["job", "--", "sh", "-c", &within],
        // A session, too.
        &["--foreground", "job", "--", "setsid", "sh", "-c", stubborn],
    ];
    for command in commands {
        let mut holder = Running::spawn(&mut site.lockkit(&[&["run"], command].concat()));
        assert_eq!(holder.line(), "up");
        let family = [(); 2].map(|()| holder.line().parse::<i32>().unwrap());
        for process in family {
            assert_ne!(group(process), group(holder.pid()));
        }
        for file in site.lock_files() {
            fs::remove_file(file).unwrap();
        }
        let status = holder.status();
        for process in family {
            has_ended(process, &format!("when lockkit had ended: {command:?}"));
        }
        assert_eq!(status.code(), Some(123), "{command:?}");
    }
}

/// Each of them begins the next one and ends, sooner than a signal to it alone could come. They end by themselves with the test's files.
#[test]
fn a_relay_in_a_group_of_its_own_ends_with_the_lock() {
    let site = Site::new();
    let relay = "setpgrp 0, 0; $SIG{TERM} = 'IGNORE'; open $log, '>>', 'log'; \
                 while (-e 'relay') { exit if fork; syswrite $log, '.' }";
    fs::write(site.path("relay"), relay).unwrap();
    let mut holder = site.running(&[], "perl relay >/dev/null 2>&1 & echo up; exec sleep 60");
    let written = || fs::metadata(site.path("log")).map_or(0, |log| log.len());
    eventually("they begin each other", || (written() > 20).then_some(()));
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    assert_eq!(holder.status().code(), Some(123));
    let before = written();
    // That nothing happens is the condition.
    thread::sleep(Duration::from_millis(150));
    assert_eq!(written(), before, "something goes on");
}

/// There this process's own id is that of another one. What begins the command is found nevertheless, also where CHLD is ignored.
#[test]
fn with_a_foreign_proc_it_is_not_known_what_is_left() {
    let unshared = ["-p", "-f", "-r", "--kill-child"];
    let ignoring = ["env", "--ignore-signal=CHLD"];
    let tried = Command::new("unshare")
        .args(unshared)
        .args(ignoring)
        .arg("true")
        .stderr(Stdio::null())
        .status();
    let missing = (!tried.is_ok_and(|status| status.success()))
        .then(|| "unshare cannot make a PID namespace, or env has no --ignore-signal".to_owned());
    if skipped("unshare", missing) {
        return;
    }
    let site = Site::new();
    let ways: [&[&str]; 2] = [&[], &ignoring];
    for way in ways {
        let run = site.run(&[], "trap '' TERM; echo up; sleep 60; sleep 60");
        let mut within = Command::new("unshare");
        within
            .args(unshared)
            .args(way)
            .arg(run.get_program())
            .args(run.get_args())
            .env("LOCKKIT_URL", &site.url)
            .stdin(Stdio::null());
        let mut holder = Running::spawn(&mut within);
        assert_eq!(holder.line(), "up", "{way:?}");
        for file in site.lock_files() {
            fs::remove_file(file).unwrap();
        }
        let (status, complaint) = holder.end();
        assert_eq!(status.code(), Some(123), "{way:?}: {complaint}");
        assert!(
            complaint.contains("it is not known whether all"),
            "{way:?}: {complaint}"
        );
    }
}

/// The inner one is killed, and has no time to end what its command has started.
#[test]
fn what_runs_under_a_lockkit_within_ends_with_the_lock() {
    let site = Site::new();
    let inner = env!("CARGO_BIN_EXE_lockkit");
    let script = format!(
        "exec {inner} run inner -- sh -c 'trap \"\" TERM; echo up; echo $$; sleep 60 & echo $!; wait; wait'"
    );
    let mut holder = site.running(&[], &script);
    let family = [(); 2].map(|()| holder.line().parse::<i32>().unwrap());
    let of_outer = |file: &PathBuf| !file.to_string_lossy().contains("inner");
    for file in site.lock_files().into_iter().filter(of_outer) {
        fs::remove_file(file).unwrap();
    }
    let status = holder.status();
    for process in family {
        has_ended(process, "when lockkit had ended");
    }
    assert_eq!(status.code(), Some(123));
}

/// The system shows such a process as one that has ended and is not reaped.
#[test]
fn a_process_whose_first_thread_has_ended_ends_with_the_lock() {
    const WORKER: &str = "
import ctypes, os, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print('up', os.getpid(), sep='\\n', flush=True)
ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)
";
    if skipped("python3", missing_python("ctypes")) {
        return;
    }
    let site = Site::new();
    fs::write(site.path("worker.py"), WORKER).unwrap();
    let script = format!("{IN_A_GROUP} python3 worker.py & wait; wait");
    let mut holder = site.running(&[], &script);
    let worker: i32 = holder.line().parse().unwrap();
    eventually("its first thread has ended", || {
        (state(worker) == Some('Z')).then_some(())
    });
    let threads = || fs::read_dir(format!("/proc/{worker}/task")).map_or(0, Iterator::count);
    assert!(threads() > 1, "and the other goes on");
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    let status = holder.status();
    assert!(threads() <= 1, "it goes on when lockkit has ended");
    assert_eq!(status.code(), Some(123));
}

/// A script begins it, such as what keeps its log, and then becomes lockkit.
#[test]
fn what_was_there_before_the_command_outlives_the_lock() {
    let site = Site::new();
    let lockkit = env!("CARGO_BIN_EXE_lockkit");
    let within = "trap 'echo TERM' TERM; echo up; while :; do sleep 0.01; done";
    let script = format!("sleep 60 >/dev/null 2>&1 & echo $!; exec {lockkit} run job -- sh -c \"{within}\"");
    let mut run = Command::new("sh");
    run.args(["-c", &script]).env("LOCKKIT_URL", &site.url);
    let mut holder = Running::spawn(run.stdin(Stdio::null()));
    let before = holder.line().parse().unwrap();
    assert_eq!(holder.line(), "up");
    holder.signal(Signal::TERM);
    assert_eq!(holder.line(), "TERM");
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    assert_eq!(holder.status().code(), Some(123));
    assert!(state(before).is_some_and(|state| state != 'Z'), "it has ended");
    signal_to(before, Signal::KILL);
}

/// As daemons do.
#[test]
fn what_has_a_session_of_its_own_outlives_the_lock() {
    let site = Site::new();
    let mut holder = site.running(&[], "setsid sleep 60 >/dev/null 2>&1 & echo up; echo $!; wait");
    let daemon = holder.line().parse().unwrap();
    eventually("it has a session", || (session(daemon) == daemon).then_some(()));
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    assert!(state(daemon).is_some_and(|state| state != 'Z'), "it has ended");
    signal_to(daemon, Signal::KILL);
}

/// The memory backend is the one here with a lease.
#[test]
fn a_lease_that_expired_while_lockkit_stood_still_is_lost() {
    let script = "trap '' TERM; echo up; echo $$; exec sleep 60";
    let mut run = lockkit(&[
        "run", "--url", "memory:", "--ttl", "3s", "job", "--", "sh", "-c", script,
    ]);
    let mut holder = Running::spawn(&mut run);
    assert_eq!(holder.line(), "up");
    let command = holder.line().parse().unwrap();
    holder.signal(Signal::STOP);
    // Not waiting for a condition: the passing of the lease is the condition.
    thread::sleep(Duration::from_millis(3_200));
    holder.signal(Signal::CONT);
    let (status, complaint) = holder.end();
    assert_eq!(status.code(), Some(123), "{complaint}");
    assert!(
        complaint.contains("lost") || complaint.contains("could not be renewed"),
        "{complaint}"
    );
    gone(command);
}

#[test]
fn a_renewed_lease_does_not_end_the_command() {
    let run = &[
        "run",
        "--url",
        "memory:",
        "--ttl",
        "6s",
        "job",
        "--",
        "sh",
        "-c",
        "sleep 8; echo done",
    ];
    let (status, output, complaint) = outcome(&mut lockkit(run));
    assert_eq!((status, output.as_str(), complaint.as_str()), (0, "done\n", ""));
}

/// With a lease that is not renewed any more, and where the command has the lock's file open and nothing ever expires.
#[test]
fn a_command_that_hangs_is_stopped_after_max_hold() {
    let site = Site::new();
    thread::scope(|scope| {
        for url in ["memory:", &*site.url] {
            scope.spawn(move || a_command_that_hangs_is_stopped_at(url));
        }
    });
}

/// It has a second between TERM and KILL, of a machine that runs meanwhile.
fn a_command_that_hangs_is_stopped_at(url: &str) {
    // The shell hears of it while it waits, however long it takes to start another program.
    let script = "exec 2>/dev/null; trap 'echo told; exit 0' TERM; echo up; sleep 60 & wait";
    for tries_left in (0..3).rev() {
        let (began, watch) = (Instant::now(), Stopwatch::start());
        let mut run = lockkit(&[
            "run",
            "--url",
            url,
            "--ttl",
            "8s",
            "--max-hold",
            "9s",
            "job",
            "--",
            "sh",
            "-c",
            script,
        ]);
        let (status, output, complaint) = outcome(&mut run);
        let (took, stood_still) = (began.elapsed(), watch.stood_still());
        if output == "up\n" && !stood_still.is_zero() && tries_left > 0 {
            eprintln!("again, since the machine stood still for {stood_still:?}: {complaint}");
            continue;
        }
        assert_eq!(
            (status, output.as_str()),
            (123, "up\ntold\n"),
            "{url}: {complaint}, and the machine stood still for {stood_still:?}"
        );
        // The shell may say that what it had started was terminated.
        assert_eq!(
            complaint.lines().last(),
            Some(
                "lockkit: lock `job` was held for its max_hold of 9s, so its command was stopped before the lease ran out"
            ),
            "{url}"
        );
        assert!(took > Duration::from_secs(9), "{url}: {took:?}");
        let (status, ..) = outcome(&mut lockkit(&["run", "--url", url, "--try", "job", "--", "true"]));
        assert_eq!(status, 0, "{url}: it is free again");
        return;
    }
}
