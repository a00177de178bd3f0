use std::{
    fs, io,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use lockkit_testbed::Process;

use crate::until::until;

const LIMIT: Duration = Duration::from_secs(20);

/// A process that counts up a number in the file `n`, once every few milliseconds.
fn counter() -> Process {
    shell("i=0; while :; do i=$((i + 1)); echo $i >n.new; mv n.new n; sleep 0.005; done")
}

fn shell(script: &str) -> Process {
    Process::new("shell", |_| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    })
    .unwrap()
}

fn count(process: &Process) -> io::Result<u32> {
    let text = fs::read_to_string(process.directory().join("n"))?;
    text.trim().parse().map_err(io::Error::other)
}

fn beyond(process: &Process, n: u32) {
    process
        .wait_ready(LIMIT, || match count(process)? {
            now if now > n => Ok(()),
            now => Err(io::Error::other(format!("{now} is not beyond {n}"))),
        })
        .unwrap();
}

/// Returns whether there is such a process that is not just waiting to be reaped.
fn exists(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let state = stat.rsplit(") ").next().unwrap_or_default();
        !state.starts_with(['Z', 'X'])
    })
}

#[test]
fn paused_it_does_nothing_and_resumed_it_goes_on() {
    let process = counter();
    process.start().unwrap();
    beyond(&process, 1);
    for _ in 0..2 {
        process.pause().unwrap();
    }
    let before = count(&process).unwrap();
    // Time enough to count up some twenty times.
    thread::sleep(Duration::from_millis(100));
    assert_eq!(count(&process).unwrap(), before);
    assert!(process.is_running().unwrap());
    process.resume().unwrap();
    beyond(&process, before);
}

#[test]
fn it_starts_again_in_the_same_directory() {
    let process = shell("echo life >>lives; exec sleep 1000");
    let lives = || fs::read_to_string(process.directory().join("lives")).unwrap_or_default();
    for n in 1..4 {
        process.start().unwrap();
        let pid = process.pid().unwrap();
        until("it lives", || lives().lines().count() == n);
        assert!(process.start().is_err(), "it runs already");
        let status = process.kill().unwrap().unwrap();
        assert!(!status.success());
        assert!(!exists(pid));
        assert_eq!(process.pid(), None);
    }
    assert!(process.kill().unwrap().is_none());
    assert!(process.pause().is_err());
}

#[test]
fn stop_lets_it_clean_up_even_when_it_was_paused() {
    let process = shell("trap 'echo bye; exit 7' TERM; echo ready >n; while :; do sleep 0.01; done");
    process.start().unwrap();
    until("it is ready", || process.directory().join("n").exists());
    process.pause().unwrap();
    assert_eq!(process.stop().unwrap().unwrap().code(), Some(7));
    assert!(process.log_tail().contains("bye"));
    assert!(process.stop().unwrap().is_none());
}

#[test]
fn a_failed_start_shows_what_was_printed() {
    let process = shell("echo on standard output; echo on standard error >&2; exit 3");
    process.start().unwrap();
    let error = process
        .wait_ready(LIMIT, || Err(io::Error::other("nobody answers")))
        .unwrap_err()
        .to_string();
    for part in [
        "it has ended",
        "nobody answers",
        "on standard output",
        "on standard error",
    ] {
        assert!(error.contains(part), "{error}");
    }

    let process = Process::new("nothing", |_| Command::new("no-such-program")).unwrap();
    process.start().unwrap();
    let error = process.wait_ready(LIMIT, || Err(io::Error::other("nobody answers")));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no-such-program") && error.contains("not found"),
        "{error}"
    );
}

#[test]
fn a_start_that_takes_too_long_shows_what_was_printed() {
    let process = shell("seq 100000; exec sleep 1000");
    process.start().unwrap();
    until("it has printed", || process.log_tail().ends_with("100000\n"));
    let error = process
        .wait_ready(Duration::from_millis(20), || {
            Err(io::Error::other("nobody answers"))
        })
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("not within 20ms") && error.contains("\n99999\n"),
        "{error}"
    );
    assert!(error.len() < 5000);
}

#[test]
fn its_environment_is_passed_on() {
    let process = Process::new("env", |directory| {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo "$A in $PWD at $1""#, "sh"])
            .arg(directory);
        command.env("A", "a value").env_remove("HOME");
        command
    })
    .unwrap();
    process.start().unwrap();
    let directory = process.directory().display();
    let expected = format!("a value in {directory} at {directory}\n");
    until("it has printed", || process.log_tail() == expected);
}

#[test]
fn dropped_it_is_gone_and_so_is_its_directory() {
    let process = counter();
    process.start().unwrap();
    beyond(&process, 0);
    let (pid, directory) = (process.pid().unwrap(), process.directory().to_owned());
    drop(process);
    assert!(!exists(pid));
    assert!(!directory.exists());
}

#[test]
fn a_panic_takes_it_along() {
    let process = counter();
    process.start().unwrap();
    let pid = process.pid().unwrap();
    thread::spawn(move || {
        let _held = process;
        std::panic::resume_unwind(Box::new("on purpose"));
    })
    .join()
    .unwrap_err();
    assert!(!exists(pid));
}

#[test]
fn it_outlives_the_thread_that_started_it() {
    let process = counter();
    let process = thread::spawn(move || {
        process.start().unwrap();
        process
    })
    .join()
    .unwrap();
    beyond(&process, 3);
}

/// Started again by the tests below, as a process that ends without dropping what it started.
#[test]
fn helper_that_leaves_a_process_behind() {
    let Ok(end) = std::env::var("LOCKKIT_TESTBED_HELPER") else {
        return;
    };
    let process = Box::leak(Box::new(counter()));
    process.start().unwrap();
    beyond(process, 0);
    println!(
        "helper {} {}",
        process.pid().unwrap(),
        process.directory().display()
    );
    match end.as_str() {
        "exits" => std::process::exit(0),
        "aborts" => std::process::abort(),
        _ => thread::sleep(LIMIT * 10),
    }
}

fn nothing_is_left_when_the_helper(end: &str) {
    let mut helper = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "process::helper_that_leaves_a_process_behind",
            "--nocapture",
        ])
        .env("LOCKKIT_TESTBED_HELPER", end)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let line = BufReader::new(helper.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .find_map(|line| line.split_once("helper ").map(|(_, rest)| rest.to_owned()))
        .unwrap();
    let (pid, directory) = line.split_once(' ').unwrap();
    let pid = pid.parse().unwrap();
    if end == "is killed" {
        assert!(exists(pid) && Path::new(directory).exists());
        helper.kill().unwrap();
    }
    helper.wait().unwrap();
    until("its process is gone", || !exists(pid));
    until("its directory is gone", || {
        !Path::new(directory).parent().unwrap().exists()
    });
}

#[test]
fn nothing_is_left_of_a_test_process_that_exits() {
    nothing_is_left_when_the_helper("exits");
}

#[test]
fn nothing_is_left_of_a_test_process_that_aborts() {
    nothing_is_left_when_the_helper("aborts");
}

#[test]
fn nothing_is_left_of_a_test_process_that_is_killed() {
    nothing_is_left_when_the_helper("is killed");
}
