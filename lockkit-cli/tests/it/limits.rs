//! The system's limits.

use std::{collections::HashSet, fs, process::Command};

use lockkit_testbed::skipped;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, getuid, prlimit};

use crate::tool::{Running, Site, lockkit, outcome};

/// A shell that runs `lockkit run OPTIONS job -- COMMAND` within a limit.
fn limited(site: &Site, limit: &str, run: &str) -> Command {
    let lockkit = env!("CARGO_BIN_EXE_lockkit");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("ulimit {limit}; exec {lockkit} run {run}")])
        .env("LOCKKIT_URL", &site.url);
    shell
}

#[test]
fn a_limit_on_file_sizes_is_an_error_and_no_death() {
    let site = Site::new();
    let (status, output, complaint) = outcome(&mut limited(&site, "-f 0", "job -- true"));
    assert_eq!((status, output.as_str()), (125, ""), "{complaint}");
    assert!(
        complaint.starts_with("lockkit: file: acquire failed"),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
}

#[test]
fn too_few_descriptors_are_an_error_and_no_panic() {
    let site = Site::new();
    for limit in 3..24 {
        let few = format!("-n {limit}");
        let (status, output, complaint) = outcome(&mut limited(&site, &few, "--try job -- echo up"));
        // Below that the shell or the loader may not even begin.
        let said = complaint.lines().count();
        assert!(
            (status == 0 && output == "up\n" && said == 0) || (said == 1 && output.is_empty()),
            "{limit}: {status}, {output}, {complaint}"
        );
        assert!(!complaint.contains("panicked"), "{limit}: {complaint}");
    }
}

#[test]
fn variables_of_the_runtime_are_no_panic() {
    let site = Site::new();
    for (variable, value) in [("TOKIO_WORKER_THREADS", "0"), ("RUST_MIN_STACK", "1")] {
        let mut run = site.lockkit(&["run", "job", "--", "echo", "up"]);
        let (status, output, complaint) = outcome(run.env(variable, value));
        assert_eq!((status, output.as_str()), (0, "up\n"), "{variable}: {complaint}");
    }
    let mut bench = site.lockkit(&["bench", "--quick", "--only", "uncontended"]);
    let (status, _, complaint) = outcome(bench.env("TOKIO_WORKER_THREADS", "0"));
    assert_eq!(status, 0, "{complaint}");
}

/// The system's superuser has no limit, so it is somebody without any other process.
#[test]
fn too_few_threads_are_an_error_and_no_panic() {
    for limit in 1..8 {
        let mut command = Command::new(if getuid().is_root() { "setpriv" } else { "env" });
        if getuid().is_root() {
            command.args(["--reuid=61234", "--regid=61234", "--clear-groups"]);
        }
        command
            .args(["timeout", "10", "prlimit", &format!("--nproc={limit}")])
            .args([
                env!("CARGO_BIN_EXE_lockkit"),
                "run",
                "--url=memory:",
                "--try",
                "job",
                "--",
                "echo",
                "up",
            ]);
        let (status, output, complaint) = outcome(&mut command);
        // Below that the tools before it do not begin.
        let said = complaint.lines().count();
        assert!(
            (status == 0 && output == "up\n" && said == 0)
                || (status != 124 && said == 1 && output.is_empty()),
            "{limit}: {status}, {output}, {complaint}"
        );
        assert!(!complaint.contains("panicked"), "{limit}: {complaint}");
    }
}

/// It has all that it takes to wait, and nothing to open the lock's file with.
#[test]
fn who_waits_for_a_descriptor_says_so() {
    let site = Site::new();
    assert_eq!(outcome(&mut site.run(&[], "exit 0")).0, 0);
    let at_its_limit = |limit: &i32| {
        let few = format!("-S -n {limit}");
        let (status, output, complaint) = outcome(&mut limited(&site, &few, "--wait 300ms job -- echo up"));
        assert_eq!(
            complaint.is_empty(),
            status == 0,
            "{limit}: {status}, {complaint}"
        );
        assert_eq!(output.is_empty(), status != 0, "{limit}: {status}, {output}");
        complaint.contains("the last attempt failed")
    };
    let limit = (3..60).find(at_its_limit).expect("such a limit");
    let mut waiter = Running::spawn(&mut limited(
        &site,
        &format!("-S -n {limit}"),
        "--wait 20s job -- echo up",
    ));
    let warning = waiter.complaint();
    assert!(warning.contains("Too many open files"), "{warning}");
    assert!(
        warning
            .starts_with("lockkit: the attempt failed; trying again: file: acquire failed for lock `job`: ")
            && warning.contains("Too many open files"),
        "{warning}"
    );
    let pid = Pid::from_raw(waiter.pid());
    prlimit(pid, Resource::Nofile, getrlimit(Resource::Nofile)).unwrap();
    assert_eq!(waiter.line(), "up");
    let (status, more) = waiter.end();
    assert_eq!((status.code(), more.as_str()), (Some(0), ""), "it was said once");
}

/// Who handles TERM, lockkit asks with a descriptor that it has kept for that.
#[test]
fn a_handlers_last_work_is_spared_without_a_descriptor_left() {
    let site = Site::new();
    let handler = "$SIG{TERM} = sub { $SIG{TERM} = 'DEFAULT'; fork and exit 5; exec 'sh', '-c', 'sleep 0.3; echo done' }; \
                   $| = 1; print qq(up\\n); sleep 60";
    fs::write(site.path("handler"), handler).unwrap();
    for _ in 0..10 {
        let mut holder = site.running(&["--foreground"], "exec perl handler");
        let entries = fs::read_dir(format!("/proc/{}/fd", holder.pid())).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let open: HashSet<u64> = names.map(|name| name.parse().unwrap()).collect();
        let full = Rlimit {
            current: (0..=u64::MAX).find(|descriptor| !open.contains(descriptor)),
            ..getrlimit(Resource::Nofile)
        };
        prlimit(Pid::from_raw(holder.pid()), Resource::Nofile, full).unwrap();
        holder.signal(Signal::TERM);
        assert_eq!(holder.line(), "done");
        assert_eq!(holder.end().0.code(), Some(5));
    }
}

/// `sudo` often keeps the user's home.
#[test]
fn root_bars_no_user_from_a_name() {
    const USER: u32 = 61_234;
    let is_root = getuid().is_root();
    if skipped("root", (!is_root).then(|| "this is not root".to_owned())) {
        return;
    }
    // Where that user may go.
    let home = tempfile::tempdir_in("/tmp").unwrap();
    std::os::unix::fs::chown(home.path(), Some(USER), Some(USER)).unwrap();
    let url = format!("file://{}/.local/state/lockkit", home.path().display());
    let kinds: [&[&str]; 3] = [&[], &["--shared"], &["--permits", "2"]];
    for kind in kinds {
        let run = [&["run", "--try", "--url", &url], kind, &["job", "--", "true"]].concat();
        assert_eq!(
            outcome(&mut lockkit(&run)),
            (0, String::new(), String::new()),
            "root, {kind:?}"
        );
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid=61234",
            "--regid=61234",
            "--clear-groups",
            env!("CARGO_BIN_EXE_lockkit"),
        ]);
        let users = outcome(command.args(&run));
        assert_eq!(users, (0, String::new(), String::new()), "the user, {kind:?}");
    }
}
