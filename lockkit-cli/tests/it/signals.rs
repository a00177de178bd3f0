//! Signals, and exit statuses.

use std::{fs, os::unix::fs::PermissionsExt, process::Command, time::Duration};

use lockkit_testbed::skipped;
use rustix::process::{Signal, getuid};

use crate::tool::{IN_A_GROUP, Running, Site, in_this_process, outcome};

#[test]
fn the_exit_status_is_the_commands() {
    let site = Site::new();
    for (script, status) in [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
    ] {
        let (code, _, complaint) = outcome(&mut site.run(&[], script));
        assert_eq!((code, complaint.as_str()), (status, ""), "{script}");
    }
}

#[test]
fn commands_that_cannot_run_are_126_and_127_as_in_the_shell() {
    let site = Site::new();
    fs::write(site.path("data"), "no program").unwrap();
    fs::set_permissions(site.path("data"), fs::Permissions::from_mode(0o644)).unwrap();
    for (command, status) in [
        ("./data", 126),
        ("/", 126),
        ("./missing", 127),
        ("no-such-command-anywhere", 127),
    ] {
        let (code, output, complaint) = outcome(&mut site.lockkit(&["run", "job", "--", command]));
        assert_eq!((code, output.as_str()), (status, ""), "{command}: {complaint}");
        let expected = format!("lockkit: cannot run {command}: ");
        assert!(
            complaint.starts_with(&expected) && complaint.lines().count() == 1,
            "{complaint}"
        );
    }
}

#[test]
fn term_reaches_the_command_and_then_the_lock_is_free() {
    let site = Site::new();
    let script = "exec 2>/dev/null; trap 'echo got TERM; exit 7' TERM; echo up; while :; do sleep 0.01; done";
    let mut holder = site.running(&[], script);
    holder.signal(Signal::TERM);
    assert_eq!(holder.line(), "got TERM");
    let (status, complaint) = holder.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(7), ""));
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 0);
}

#[test]
fn every_signal_that_ends_a_process_is_passed_on() {
    let site = Site::new();
    for signal in [
        Signal::HUP,
        Signal::INT,
        Signal::QUIT,
        Signal::TERM,
        Signal::USR1,
        Signal::USR2,
        Signal::ALARM,
    ] {
        let holder = site.running(&[], "ulimit -c 0; echo up; exec sleep 60");
        holder.signal(signal);
        // A signal that these tests were started with ignored stays so.
        let ended_by = if crate::tool::ignored(signal) {
            Signal::TERM
        } else {
            signal
        };
        if ended_by != signal {
            holder.signal(ended_by);
        }
        let (status, complaint) = holder.end();
        let expected = Some(128 + ended_by.as_raw());
        assert_eq!((status.code(), complaint.as_str()), (expected, ""), "{signal:?}");
    }
}

#[test]
fn what_the_command_starts_gets_the_signals_too() {
    let site = Site::new();
    let mut holder = site.running(&[], "sleep 60 & echo up; echo $!; wait");
    let grandchild = holder.line().parse().unwrap();
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
    crate::tool::gone(grandchild);
}

/// TERM and stops reach what has a process group of its own. The others are for whoever made that group.
#[test]
fn a_process_group_of_its_own_is_ended_and_stopped_too() {
    let site = Site::new();
    // Not `sleep` alone: a shell waits for its next command to begin, and does not stop while that is stopped before.
    let waits = "while :; do sleep 60 & wait; done";
    let worker = format!("trap 'echo got USR1' USR1; trap 'echo got TERM; exit 0' TERM; echo $$; {waits}");
    let script = format!(
        "exec 2>/dev/null; trap 'echo USR1' USR1; trap 'exit 5' TERM; echo up; {IN_A_GROUP} sh -c \"{}\" & {waits}",
        worker.replace('$', "\\$")
    );
    let mut holder = site.running(&[], &script);
    let worker = holder.line().parse().unwrap();
    holder.signal(Signal::TSTP);
    for wanted in [true, false] {
        crate::tool::eventually("both are stopped, or go on", || {
            let is_stopped = |pid| crate::tool::state(pid) == Some('T');
            [worker, holder.pid()]
                .into_iter()
                .all(|pid| is_stopped(pid) == wanted)
                .then_some(())
        });
        holder.signal(Signal::CONT);
    }
    holder.signal(Signal::USR1);
    assert_eq!(holder.line(), "USR1");
    holder.signal(Signal::TERM);
    assert_eq!(holder.line(), "got TERM", "and not USR1 before");
    assert_eq!(holder.end().0.code(), Some(5));
}

/// What has a process group of its own does not get such a signal, and so it does not go on for it.
#[test]
fn a_suspended_job_goes_on_to_end_and_for_nothing_else() {
    let site = Site::new();
    let script = format!(
        "exec 2>/dev/null; ulimit -c 0; trap 'echo heard' HUP INT QUIT ALRM USR1; echo up; {IN_A_GROUP} sleep 60 >/dev/null & echo $!; \
         while :; do sleep 0.01; done"
    );
    let mut holder = site.running(&[], &script);
    let job = holder.line().parse().unwrap();
    crate::tool::eventually("it has a group", || {
        (crate::tool::group(job) == job).then_some(())
    });
    crate::tool::signal_to(job, Signal::STOP);
    crate::tool::eventually("it is suspended", || {
        (crate::tool::state(job) == Some('T')).then_some(())
    });
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::ALARM] {
        if crate::tool::ignored(signal) {
            continue;
        }
        holder.signal(signal);
        assert_eq!(holder.line(), "heard", "{signal:?}");
        // What follows the first signal was sent before the second is passed on.
        holder.signal(Signal::USR1);
        assert_eq!(holder.line(), "heard", "USR1");
        assert_eq!(crate::tool::state(job), Some('T'), "{signal:?}");
    }
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
    crate::tool::gone(job);
}

/// Whoever is within has this program's name, and passes nothing on.
#[test]
fn what_is_below_another_lockkit_is_not_continued_from_above() {
    let site = Site::new();
    let within = r#"$| = 1; my $below = fork() // die; if (!$below) { setpgrp(0, 0); sleep 60 while 1 }
        $SIG{CONT} = sub { print "CONT\n" }; print "up\n$below\n"; sleep 60 while 1"#;
    let script = format!("cp \"$(command -v perl)\" lockkit && exec ./lockkit -e '{within}'");
    let mut holder = site.running(&[], &script);
    let below = holder.line().parse().unwrap();
    holder.signal(Signal::TSTP);
    crate::tool::eventually("all are stopped", || {
        let states = [below, holder.pid()].map(crate::tool::state);
        states.iter().all(|state| *state == Some('T')).then_some(())
    });
    // Of the first one, all has been sent when the second is passed on.
    for _ in 0..2 {
        holder.signal(Signal::CONT);
        assert_eq!(holder.line(), "CONT");
    }
    let state = crate::tool::state(below);
    crate::tool::signal_to(below, Signal::KILL);
    assert_eq!(state, Some('T'));
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
}

#[test]
fn a_lockkit_within_continues_its_command_while_it_has_the_lock() {
    for (url, goes_on) in [("", true), ("--url memory: --ttl 3s", false)] {
        let site = Site::new();
        // Not a shell: it waits for its next command to begin, and does not stop while that is stopped before.
        let works = r#"$| = 1; open $log, ">>", "log"; print "up\n$$\n";
            while (1) { syswrite $log, "."; select undef, undef, undef, 0.01 }"#;
        let inner = env!("CARGO_BIN_EXE_lockkit");
        let script = format!("exec {inner} run {url} inner -- perl -e '{works}'");
        let mut holder = site.running(&[], &script);
        let command = holder.line().parse().unwrap();
        let written = || fs::metadata(site.path("log")).map_or(0, |log| log.len());
        crate::tool::eventually("it works", || (written() > 0).then_some(()));
        holder.signal(Signal::TSTP);
        crate::tool::eventually("all are stopped", || {
            let states = [command, holder.pid()].map(crate::tool::state);
            states.iter().all(|state| *state == Some('T')).then_some(())
        });
        if !goes_on {
            // The passing of the lease is the condition.
            std::thread::sleep(Duration::from_millis(3_200));
        }
        let before = written();
        holder.signal(Signal::CONT);
        if goes_on {
            crate::tool::eventually("it goes on", || (written() > before).then_some(()));
            holder.signal(Signal::TERM);
            assert_eq!(holder.end().0.code(), Some(143));
        } else {
            assert_eq!(holder.end().0.code(), Some(123));
            assert_eq!(written(), before, "it went on without the lock");
        }
    }
}

/// Each of five begins 40 others within a fifth of a second. What is begun between a look at them and the TERM to whoever begins it would go
/// on for two seconds.
#[test]
fn what_is_begun_while_all_is_told_to_end_is_told_too() {
    let relay = "setpgrp 0, 0; $SIG{CHLD} = 'IGNORE'; open $log, '>>', 'log'; for (1 .. 5) { next if fork; \
                 for (1 .. 40) { if (!fork) { for (1 .. 40) { syswrite $log, '.'; select undef, undef, undef, 0.05 } exit } \
                 select undef, undef, undef, 0.005 } sleep 60; exit } sleep 60";
    for _ in 0..3 {
        let site = Site::new();
        fs::write(site.path("relay"), relay).unwrap();
        let holder = site.running(&[], "perl relay >/dev/null 2>&1 & echo up; exec sleep 60");
        let written = || fs::metadata(site.path("log")).map_or(0, |log| log.len());
        crate::tool::eventually("they begin others", || (written() > 20).then_some(()));
        holder.signal(Signal::TERM);
        assert_eq!(holder.end().0.code(), Some(143));
        // What was under way has been written then.
        std::thread::sleep(Duration::from_millis(50));
        let before = written();
        // That nothing happens is the condition.
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(written(), before, "something goes on");
    }
}

/// The system cuts a long name, also within a letter.
#[test]
fn a_process_whose_name_is_no_text_is_told_too() {
    let site = Site::new();
    let named = "setpgrp 0, 0; $0 = qq(\\xff); $| = 1; print qq($$\\n); sleep 60";
    fs::write(site.path("named"), named).unwrap();
    let mut holder = site.running(&[], "echo up; perl named & exec sleep 60");
    let pid = holder.line().parse().unwrap();
    holder.signal(Signal::TERM);
    assert_eq!(holder.status().code(), Some(143));
    crate::tool::gone(pid);
}

/// In lockkit's group, as in the foreground of a terminal, each process is sent TERM by itself.
#[test]
fn what_is_begun_upon_term_is_left_to_do_its_work() {
    let site = Site::new();
    for _ in 0..5 {
        let script =
            "trap 'sh -c \"sleep 0.2; echo done\"; exit 5' TERM; sleep 60 >/dev/null & echo up; wait";
        let mut holder = site.running(&["--foreground"], script);
        holder.signal(Signal::TERM);
        assert_eq!(holder.line(), "done");
        assert_eq!(holder.end().0.code(), Some(5));
    }
}

/// Its handler has ended when lockkit looks.
#[test]
fn what_a_handler_of_term_leaves_behind_does_its_work() {
    let site = Site::new();
    let handler = "$SIG{TERM} = sub { $SIG{TERM} = 'DEFAULT'; fork and exit 5; exec 'sh', '-c', 'sleep 0.3; echo done' }; \
                   $| = 1; print qq(up\\n); sleep 60";
    fs::write(site.path("handler"), handler).unwrap();
    for _ in 0..10 {
        let mut holder = site.running(&["--foreground"], "exec perl handler");
        holder.signal(Signal::TERM);
        assert_eq!(holder.line(), "done");
        assert_eq!(holder.end().0.code(), Some(5));
    }
}

/// Five of them begin another one every 30 ms, each of which works for a third of a second. A stop that looks once leaves out what they begin
/// in the milliseconds that the look takes: every second stop or so, and there are ten.
#[test]
fn what_is_begun_while_all_is_stopped_stops_too() {
    let site = Site::new();
    let relay = "setpgrp 0, 0; $SIG{CHLD} = 'IGNORE'; open $log, '>>', 'log'; for (1 .. 5) { next if fork; \
                 for (1 .. 2000) { if (!fork) { for (1 .. 10) { syswrite $log, '.'; select undef, undef, undef, 0.03 } exit } \
                 select undef, undef, undef, 0.03 } exit } sleep 600";
    fs::write(site.path("relay"), relay).unwrap();
    let script = "perl relay >/dev/null 2>&1 & echo up; exec sleep 600";
    let mut holder = site.running(&[], script);
    let written = || fs::metadata(site.path("log")).map_or(0, |log| log.len());
    crate::tool::eventually("all of them work", || (written() > 300).then_some(()));
    for _ in 0..10 {
        holder.signal(Signal::TSTP);
        crate::tool::eventually("lockkit is stopped", || {
            (crate::tool::state(holder.pid()) == Some('T')).then_some(())
        });
        let before = written();
        // That nothing happens is the condition.
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(written(), before, "something goes on");
        holder.signal(Signal::CONT);
        crate::tool::eventually("all of them go on", || (written() > before).then_some(()));
    }
    for file in site.lock_files() {
        fs::remove_file(file).unwrap();
    }
    assert_eq!(holder.status().code(), Some(123));
}

#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let site = Site::new();
    let lockkit = env!("CARGO_BIN_EXE_lockkit");
    let script = format!("trap '' HUP; exec {lockkit} run job -- sh -c 'echo up; read line; echo done'");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &script])
        .env("LOCKKIT_URL", &site.url)
        .stdin(std::process::Stdio::piped());
    let mut holder = Running::spawn(&mut shell);
    assert_eq!(holder.line(), "up");
    holder.signal(Signal::HUP);
    // A second signal cannot overtake the first, so the first has been dealt with once this one has.
    holder.close_input();
    assert_eq!(holder.line(), "done");
    assert_eq!(holder.end().0.code(), Some(0));
}

/// Under `env` with these options, which signals the command ignores.
#[cfg(target_os = "linux")]
fn ignored_under(env: &str) -> u64 {
    let site = Site::new();
    let mut command = Command::new("env");
    command
        .args(["--default-signal", env, env!("CARGO_BIN_EXE_lockkit")])
        .args(["run", "job", "--", "grep", "SigIgn:", "/proc/self/status"])
        .env("LOCKKIT_URL", &site.url);
    let (status, shown, complaint) = outcome(&mut command);
    assert_eq!((status, complaint.as_str()), (0, ""), "{env}");
    let mask = shown.trim_start_matches("SigIgn:").trim();
    u64::from_str_radix(mask, 16).unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn what_the_caller_ignores_is_ignored_but_for_pipe() {
    let bit = |signal: Signal| 1 << (signal.as_raw() - 1);
    for (name, signal, stays) in [
        ("CHLD", Signal::CHILD, true),
        ("TTOU", Signal::TTOU, true),
        ("USR1", Signal::USR1, true),
        ("PIPE", Signal::PIPE, false),
    ] {
        let ignored = ignored_under(&format!("--ignore-signal={name}"));
        assert_eq!(ignored & bit(signal) != 0, stays, "{name}: {ignored:x}");
    }
}

/// Nothing tells lockkit of the end of its command then.
#[cfg(target_os = "linux")]
#[test]
fn a_caller_that_has_blocked_chld_gets_the_status_too() {
    let site = Site::new();
    let mut command = Command::new("env");
    command
        .args(["--block-signal=CHLD", env!("CARGO_BIN_EXE_lockkit")])
        .args(["run", "job", "--", "sh", "-c", "exit 3"])
        .env("LOCKKIT_URL", &site.url);
    assert_eq!(Running::spawn(&mut command).status().code(), Some(3));
}

#[test]
fn stopping_and_continuing_takes_the_command_along() {
    let site = Site::new();
    let mut holder = site.running(&[], "echo up; echo $$; exec sleep 60");
    let command = holder.line().parse().unwrap();
    let both = |wanted: char| {
        crate::tool::eventually("both are in the state", || {
            let states = [command, holder.pid()].map(crate::tool::state);
            states.iter().all(|state| *state == Some(wanted)).then_some(())
        });
    };
    for stop in [Signal::TSTP, Signal::TTOU, Signal::TTIN] {
        both('S');
        holder.signal(stop);
        both('T');
        holder.signal(Signal::CONT);
    }
    both('S');
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
}

/// While lockkit stands still, the lease may end, and the next command begin. So it does not while its command goes on.
#[test]
fn lockkit_stops_only_once_its_command_is_stopped() {
    let site = Site::new();
    let hears = "exec 2>/dev/null; trap 'echo USR1' USR1; echo up; while :; do sleep 0.01; done";
    let goes_on = |mut holder: Running, what: &str| {
        holder.signal(Signal::TSTP);
        crate::tool::is_not_stopped_soon(holder.pid());
        holder.signal(Signal::USR1);
        assert_eq!(holder.line(), "USR1", "{what}: lockkit goes on and passes it on");
    };
    goes_on(
        site.running(&[], &format!("trap '' TSTP; {hears}")),
        "it ignores TSTP",
    );
    // The system stops nobody in a process group that nobody of the session could continue.
    let mut orphan = Command::new("setsid");
    orphan
        .arg(env!("CARGO_BIN_EXE_lockkit"))
        .args(["run", "--foreground", "job", "--", "sh", "-c", hears])
        .env("LOCKKIT_URL", &site.url);
    let mut orphan = Running::spawn(&mut orphan);
    assert_eq!(orphan.line(), "up");
    goes_on(orphan, "it is in an orphaned group");
}

#[test]
fn what_the_command_has_started_stops_with_it() {
    let site = Site::new();
    let script = "(trap '' TSTP; exec sleep 60) & echo up; echo $!; wait";
    let mut holder = site.running(&[], script);
    let grandchild = holder.line().parse().unwrap();
    holder.signal(Signal::TSTP);
    for wanted in ['T', 'S'] {
        crate::tool::eventually("both are in the state", || {
            let states = [grandchild, holder.pid()].map(crate::tool::state);
            states.iter().all(|state| *state == Some(wanted)).then_some(())
        });
        holder.signal(Signal::CONT);
    }
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
}

/// The second signal may come before the first one has been dealt with.
#[test]
fn a_stop_that_is_taken_back_at_once_stops_nothing() {
    let site = Site::new();
    let count = site.path("count");
    let script = format!(
        "n=0; trap 'n=$((n+1)); echo $n >{}' USR1; echo up; while :; do sleep 0.002; done 2>/dev/null",
        count.display()
    );
    let holder = site.running(&[], &script);
    for n in 1..=100 {
        holder.signal(Signal::TSTP);
        std::thread::sleep(Duration::from_micros(n * 37 % 400));
        holder.signal(Signal::CONT);
        // Else it may be dealt with before them.
        std::thread::sleep(Duration::from_millis(3));
        holder.signal(Signal::USR1);
        crate::tool::eventually("lockkit and its command go on", || {
            let heard = fs::read_to_string(&count).unwrap_or_default();
            (heard.trim() == n.to_string()).then_some(())
        });
    }
}

/// It hears of the signal only once it goes on.
#[test]
fn a_command_that_is_stopped_is_made_to_go_on_to_end() {
    let site = Site::new();
    let script = "exec 2>/dev/null; trap 'exit 7' TERM; echo up; echo $$; while :; do sleep 0.01; done";
    let mut holder = site.running(&[], script);
    let command = holder.line().parse().unwrap();
    crate::tool::signal_to(command, Signal::STOP);
    crate::tool::eventually("it is stopped", || {
        (crate::tool::state(command) == Some('T')).then_some(())
    });
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(7));
}

/// It may be process 1 of a container, or a child of one that reaps nobody.
#[test]
fn what_the_command_leaves_behind_is_reaped() {
    let site = Site::new();
    let mut holder = site.running(
        &[],
        "echo up; sh -c 'sh -c \"echo \\$\\$; exec sleep 60\" &'; exec sleep 60",
    );
    let orphan = holder.line().parse().unwrap();
    crate::tool::eventually("it is adopted", || {
        (crate::tool::parent(orphan) == Some(holder.pid())).then_some(())
    });
    crate::tool::signal_to(orphan, Signal::KILL);
    crate::tool::eventually("nothing is left of it", || {
        crate::tool::state(orphan).is_none().then_some(())
    });
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().0.code(), Some(143));
}

#[test]
fn a_signal_ends_the_wait_for_the_lock() {
    let site = Site::new();
    let _holder = site.running(&[], "echo up; exec sleep 60");
    let waiter = Running::spawn(&mut site.run(&[], "echo ran"));
    // It begins to listen before it waits; a signal before that would end it the plain way.
    crate::tool::eventually("it listens", || {
        crate::tool::catches(waiter.pid(), Signal::TERM).then_some(())
    });
    waiter.signal(Signal::TERM);
    let (status, complaint) = waiter.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(143), ""));
}

#[test]
fn kill_9_ends_the_command_and_lets_a_waiter_in_within_100_ms() {
    let site = Site::new();
    in_this_process(async {
        let lock = lockkit::connect(&site.url).await.unwrap().lock("job").unwrap();
        let mut best = Duration::MAX;
        // The clock of a busy machine is allowed bad moments.
        for _ in 0..20 {
            let mut holder = site.running(&[], "echo up; echo $$; exec sleep 60");
            let command = holder.line().parse().unwrap();
            let mut waiting = std::pin::pin!(lock.acquire());
            let blocked = tokio::time::timeout(Duration::from_millis(50), waiting.as_mut()).await;
            assert!(blocked.is_err(), "it is held");
            let killed_at = std::time::Instant::now();
            holder.signal(Signal::KILL);
            let guard = tokio::time::timeout(crate::tool::PATIENCE, waiting)
                .await
                .unwrap()
                .unwrap();
            best = best.min(killed_at.elapsed());
            guard.release().await.unwrap();
            crate::tool::gone(command);
            if best < Duration::from_millis(100) {
                return;
            }
        }
        panic!("{best:?}");
    });
}

/// The other half of the promise: as long as something of the command is there, so is the lock.
#[test]
fn after_kill_9_the_lock_stays_until_all_of_the_command_is_gone() {
    let site = Site::new();
    let mut holder = site.running(&[], "sleep 60 & echo up; echo $$; echo $!; wait");
    let [command, grandchild] = [(); 2].map(|()| holder.line().parse().unwrap());
    holder.signal(Signal::KILL);
    crate::tool::gone(command);
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 124);
    crate::tool::signal_to(grandchild, Signal::KILL);
    crate::tool::gone(grandchild);
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 0);
}

/// The kernel forgets whose death it is to tell a process of, when that changes its user. The lock's file it keeps.
#[test]
fn after_kill_9_a_command_of_another_user_goes_on() {
    let is_root = getuid().is_root();
    if skipped("root", (!is_root).then(|| "this is not root".to_owned())) {
        return;
    }
    let site = Site::new();
    let run = [
        "run",
        "job",
        "--",
        "setpriv",
        "--reuid=61234",
        "--regid=61234",
        "--clear-groups",
    ];
    let script = "echo up; echo $$; exec sleep 60 >/dev/null 2>&1";
    let mut holder = Running::spawn(&mut site.lockkit(&[&run[..], &["sh", "-c", script]].concat()));
    assert_eq!(holder.line(), "up");
    let command = holder.line().parse().unwrap();
    let lockkit = holder.pid();
    holder.signal(Signal::KILL);
    crate::tool::gone(lockkit);
    // Whatever was to happen to it at that has happened.
    assert!(crate::tool::state(command).is_some_and(|state| state != 'Z'));
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 124);
    crate::tool::signal_to(command, Signal::KILL);
    crate::tool::gone(command);
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 0);
}

#[test]
fn away_from_a_terminal_the_command_has_a_group_of_its_own() {
    let site = Site::new();
    let mut holder = site.running(&[], "echo up; echo $$; exec sleep 60");
    let command = holder.line().parse().unwrap();
    assert_eq!(crate::tool::group(command), command);
}
