//! The command line's syntax, and the messages about mistakes in it.

use std::{fs, os::unix::fs::symlink};

use crate::tool::{Site, lockkit, outcome};

/// One line on standard error, with every part in it, and status 125.
fn complains(arguments: &[&str], parts: &[&str]) {
    let (status, output, complaint) = outcome(&mut lockkit(arguments));
    assert_eq!((status, output.as_str()), (125, ""), "{arguments:?}: {complaint}");
    assert!(complaint.starts_with("lockkit: "), "{arguments:?}: {complaint}");
    assert_eq!(complaint.lines().count(), 1, "{arguments:?}: {complaint}");
    for part in parts {
        assert!(complaint.contains(part), "{arguments:?}: {part} in {complaint}");
    }
}

#[test]
fn bad_command_lines_get_one_line() {
    complains(&[], &["run", "inspect", "--help"]);
    complains(&["rnu"], &["'rnu'"]);
    complains(&["run"], &["<NAME>", "<COMMAND>"]);
    complains(&["run", "job"], &["<COMMAND>"]);
    complains(&["run", "job", "true"], &["'true'"]);
    complains(&["run", "--tll", "1s", "job", "--", "true"], &["--tll"]);
    complains(
        &["run", "--ttl", "30", "job", "--", "true"],
        &["'30'", "--ttl", "500ms"],
    );
    complains(
        &["run", "--wait", "1s", "--try", "job", "--", "true"],
        &["--wait", "--try"],
    );
    complains(
        &["run", "--shared", "--permits", "2", "job", "--", "true"],
        &["--shared", "--permits"],
    );
    complains(
        &["run", "--permits", "0", "job", "--", "true"],
        &["--permits", "0"],
    );
    complains(&["break", "job"], &["--token"]);
    complains(&["break", "job", "--token", "x"], &["'x'", "--token"]);
    complains(&["completions", "cmd"], &["'cmd'"]);
    complains(&["list", "--watch", "--json"], &["--watch", "--json"]);
    complains(&["list", "a", "b"], &["'b'"]);
    complains(
        &["list", "--url", "memory:", &"x".repeat(1_025)],
        &["1,024 bytes"],
    );
    complains(&["man", "rnu"], &["`rnu`"]);
    complains(&["man", "__helper"], &["`__helper`"]);
}

#[test]
fn a_name_may_begin_with_a_dash() {
    let site = Site::new();
    for name in ["-x", "--try", "--wait=1s"] {
        let script = "echo \"$LOCKKIT_NAME\"; lockkit inspect -- \"$LOCKKIT_NAME\"";
        let script = script.replace("lockkit ", concat!(env!("CARGO_BIN_EXE_lockkit"), " "));
        let both = ["--name".to_owned(), name.to_owned()];
        for spelling in [&both[..], &[format!("--name={name}")]] {
            let spelling: Vec<_> = spelling.iter().map(String::as_str).collect();
            let run = [&["run"], &spelling[..], &["--", "sh", "-c", &script]].concat();
            let (status, output, complaint) = outcome(&mut site.lockkit(&run));
            assert_eq!((status, complaint.as_str()), (0, ""), "{spelling:?}: {output}");
            assert!(output.starts_with(&format!("{name}\n{name}: held")), "{output}");
        }
    }
    // A misspelt option is no name.
    complains(&["run", "-x", "--", "true"], &["'-x'"]);
    complains(&["run", "--name", "a", "b", "--", "true"], &["--name", "NAME"]);
    complains(&["run", "--name", "a"], &["<COMMAND>"]);
}

#[test]
fn a_torture_that_cannot_be_gets_one_line() {
    let torture = |options: &[&str], parts: &[&str]| {
        complains(&[&["check", "--url", "memory:"], options].concat(), parts);
    };
    torture(&["--for", "a while"], &["'a while'", "--for"]);
    torture(&["--for", "0s"], &["'0s'", "--for"]);
    torture(&["--for", "1s", "--seed", "x"], &["'x'", "--seed"]);
    torture(&["--for", "1s", "--seed=-1"], &["'-1'", "--seed"]);
    torture(&["--seed", "1"], &["--for"]);
    torture(&["--for", "1s", "--only", "second_"], &["--for", "--only"]);
    // It does nothing to the server.
    torture(&["--for", "1s", "--faults", "cut"], &["--faults"]);
}

#[test]
fn bad_values_get_one_line() {
    let run = |options: &[&str], name: &str, parts: &[&str]| {
        complains(
            &[&["run", "--url", "memory:"], options, &[name, "--", "true"]].concat(),
            parts,
        );
    };
    run(&[], "", &["lock name", "empty"]);
    run(&[], &"x".repeat(1_025), &["lock name", "1,024 bytes"]);
    run(&["--ttl", "1ms"], "job", &["`ttl`", "10ms"]);
    run(&["--ttl", "2y"], "job", &["`ttl`", "year"]);
    run(
        &["--max-hold", "10s"],
        "job",
        &["`max_hold`", "10s", "ttl of 30s"],
    );
    run(&["--label", &"x".repeat(257)], "job", &["`label`", "256"]);
}

/// The URL alone would be refused.
#[test]
fn options_win_over_the_url_before_that_is_checked() {
    let run = |url: &str, option: [&str; 2]| {
        let [option, value] = option;
        outcome(&mut lockkit(&[
            "run", "--url", url, option, value, "job", "--", "true",
        ]))
    };
    for (url, option) in [
        ("memory:?ttl=20s&max_hold=10s", ["--ttl", "5s"]),
        ("memory:?ttl=20s&max_hold=10s", ["--max-hold", "1m"]),
        ("memory:?ttl=0s", ["--ttl", "5s"]),
    ] {
        let (status, _, complaint) = run(url, option);
        assert_eq!(status, 0, "{url} {option:?}: {complaint}");
    }
    let (status, _, complaint) = run("memory:?max_hold=10s", ["--ttl", "20s"]);
    assert_eq!(status, 125, "{complaint}");
    assert!(complaint.contains("max_hold"), "{complaint}");
}

#[test]
fn bad_servers_get_one_line_without_the_password() {
    for (url, part) in [
        ("nonsense", "scheme"),
        ("consul://user:canary@host", "file"),
        ("mysql://user:canary@host", "/database"),
        ("postgres://user:canary@host", "/database"),
        ("postgresql://user:canary@127.0.0.1:1/app", "connect failed"),
        ("mysql://user:canary@127.0.0.1:1/app", "connect failed"),
        (
            "redlock://user:canary@127.0.0.1:1,127.0.0.1:2",
            "it names 2 masters",
        ),
        (
            "redlock://user:canary@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
            "connect failed",
        ),
        // Without TLS, a line before it would warn of the password.
        ("zk://user:canary@127.0.0.1:1?tls=unverified", "connect failed"),
        ("etcd://user:canary@127.0.0.1:1?tls=unverified", "connect failed"),
        ("redis://user:canary@127.0.0.1:1", "connect failed"),
        ("memory:?tll=1s", "`tll`"),
        ("memory:?ttl=x", "`ttl`"),
        ("file:relative", "file:///"),
        ("file://user:canary@host/dir", "three slashes"),
        ("file:///dev/null/locks", "file"),
    ] {
        for arguments in [
            &["run", "--try", "--url", url, "job", "--", "true"][..],
            &["inspect", "--url", url, "job"],
            &["list", "--url", url],
            &["break", "--url", url, "job", "--token", "1"],
            &["check", "--url", url],
            &["check", "--for", "1s", "--seed", "1", "--url", url],
            &["bench", "--quick", "--url", url],
        ] {
            complains(arguments, &[part]);
            let (_, _, complaint) = outcome(&mut lockkit(arguments));
            assert!(!complaint.contains("canary"), "{complaint}");
        }
    }
}

#[test]
fn a_url_with_a_password_is_no_name() {
    for url in [
        "redis://user:canary@host",
        "ZK://user:canary@host/app",
        "mysql://app:canary",
        "\"redis://user:canary@host\"",
        " 'redis://user:canary@host' ",
        "LOCKKIT_URL=redis://user:canary@host",
        "url: redis://user:canary@host",
    ] {
        for arguments in [
            &["run", url, "--", "true"][..],
            &["run", "--name", url, "--", "true"],
            &["inspect", url],
            &["list", url],
            &["break", url, "--token", "1"],
        ] {
            let arguments = [&arguments[..1], &["--url", "memory:"], &arguments[1..]].concat();
            complains(&arguments, &["--url", "LOCKKIT_URL"]);
            let (_, _, complaint) = outcome(&mut lockkit(&arguments));
            assert!(!complaint.contains("canary"), "{complaint}");
        }
    }
    // What is no server's may be locked by its URL, and a server without a password, too.
    for name in [
        "user://alice@example.com",
        "redis://cache:6379/2",
        "a b://alice:x@host",
        "https://x:y@z/?a",
    ] {
        let (status, _, complaint) = outcome(&mut lockkit(&["run", "--url", "memory:", name, "--", "true"]));
        assert_eq!(status, 0, "{name}: {complaint}");
    }
}

#[test]
fn a_mistake_with_a_url_is_told_without_its_password() {
    for url in [
        "redis://app:canary@127.0.0.1:1",
        "redis://app:see my  canary@127.0.0.1:1",
        "redis://app:canary",
        "\"redis://app:canary@127.0.0.1:1\"",
    ] {
        let wait = format!("--wait={url}");
        for arguments in [
            &["check", url][..],
            &["bench", url],
            &["list", "a", url],
            &["run", "job", url],
            &["run", "--ttl", url, "job", "--", "true"],
            &["run", &wait, "job", "--", "true"],
            &["run", "--permits", url, "job", "--", "true"],
            &["break", "job", "--token", url],
            &["check", "--url", "memory:", "--for", url],
            &["check", "--url", "memory:", "--only", url],
            &["bench", "--url", "memory:", "--only", url],
            &[url],
            &["fence", url],
            &["completions", url],
            &["man", url],
            &["help", url],
        ] {
            let (status, _, complaint) = outcome(&mut lockkit(arguments));
            assert_eq!(status, 125, "{arguments:?}: {complaint}");
            let is_hidden = complaint.contains("redis://***") && !complaint.contains("canary");
            assert!(
                is_hidden && complaint.contains("LOCKKIT_URL"),
                "{arguments:?}: {complaint}"
            );
        }
        let (status, _, complaint) = outcome(&mut lockkit(&["run", "--url", "memory:", "job", "--", url]));
        assert_eq!(status, 127, "{complaint}");
        assert!(
            complaint.contains("cannot run") && !complaint.contains("canary"),
            "{complaint}"
        );
    }
}

#[test]
fn a_url_without_its_scheme_is_told_without_its_password() {
    for url in [
        "app:canary@127.0.0.1:1",
        "redis:app:canary@127.0.0.1:1",
        "redis:/app:canary@127.0.0.1:1",
        "'app:canary@127.0.0.1:1'",
    ] {
        let wait = format!("--wait={url}");
        for arguments in [
            &["list", "a", url][..],
            &["run", "job", url],
            &["run", &wait, "job", "--", "true"],
            &["bench", "--url", "memory:", "--only", url],
            &[url],
            &["man", url],
        ] {
            complains(arguments, &["***@127.0.0.1:1", "LOCKKIT_URL"]);
            let (_, _, complaint) = outcome(&mut lockkit(arguments));
            assert!(!complaint.contains("canary"), "{arguments:?}: {complaint}");
        }
    }
    // An address has none.
    complains(&["man", "me@host:1"], &["`me@host:1`"]);
}

#[test]
fn directories_that_cannot_be_used_get_one_line_with_the_path() {
    let site = Site::new();
    fs::write(site.path("file"), "").unwrap();
    fs::create_dir(site.path("dir")).unwrap();
    symlink(site.path("dir"), site.path("link")).unwrap();
    let under = |name: &str| site.path(name).to_str().unwrap().to_owned();
    for (dir, failed) in [
        (under("file"), "file: connect failed"),
        (under("file/dir"), "file: connect failed"),
        (under("link"), "file: connect failed"),
        // Where nobody may write, not even root.
        ("/proc/lockkit".to_owned(), "file: acquire failed"),
    ] {
        let url = format!("file://{dir}");
        complains(&["run", "--url", &url, "job", "--", "true"], &[failed, &dir]);
    }
}

/// Nobody reads what they print.
#[test]
fn a_closed_pipe_is_no_panic() {
    for arguments in [
        &["completions", "bash"][..],
        &["--help"],
        &["inspect", "--url", "memory:", "job"],
        &["list", "--url", "memory:"],
        &["man"],
    ] {
        let (read, write) = std::io::pipe().unwrap();
        drop(read);
        let ended = lockkit(arguments).stdout(write).output().unwrap();
        assert_eq!(
            (ended.status.code(), ended.stderr.as_slice()),
            (Some(0), &b""[..]),
            "{arguments:?}"
        );
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for arguments in [
        &["completions", "bash"][..],
        &["--help"],
        &["inspect", "--url", "memory:", "job"],
        &["inspect", "--url", "memory:", "--json", "job"],
        &["fence", "show", "--url", "memory:"],
        &["man"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = lockkit(arguments).stdout(full).output().unwrap();
        let complaint = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(125), "{arguments:?}: {complaint}");
        assert!(
            complaint.starts_with("lockkit: cannot write") && complaint.lines().count() == 1,
            "{arguments:?}: {complaint}"
        );
    }
}

#[test]
fn a_name_that_would_break_the_line_does_not() {
    let site = Site::new();
    let mut hold = site.lockkit(&["run", "a\nb\x1b[2J", "--", "sh", "-c", "echo up; exec sleep 60"]);
    let mut holder = crate::tool::Running::spawn(&mut hold);
    assert_eq!(holder.line(), "up");
    let (status, _, complaint) = outcome(&mut site.lockkit(&["run", "--try", "a\nb\x1b[2J", "--", "true"]));
    assert_eq!(status, 124);
    assert_eq!(complaint, "lockkit: lock `a\\nb\\u{1b}[2J` is taken\n");
}

#[test]
fn help_and_version_are_no_failures() {
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["run", "--help"],
        &["help", "check"],
    ] {
        let (status, output, complaint) = outcome(&mut lockkit(arguments));
        assert_eq!((status, complaint.as_str()), (0, ""), "{arguments:?}");
        assert!(output.contains("lockkit"), "{output}");
        assert!(!output.contains("__"), "hidden subcommands stay hidden: {output}");
    }
    let (_, help, _) = outcome(lockkit(&["run", "--help"]).env("LOCKKIT_URL", "redis://user:canary@host"));
    assert!(!help.contains("canary"), "{help}");
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (status, script, complaint) = outcome(&mut lockkit(&["completions", shell]));
        assert_eq!(status, 0, "{complaint}");
        for word in ["lockkit", "inspect", "permits"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

/// Returns the page as it is read, without escapes.
fn manual(arguments: &[&str]) -> String {
    let (status, page, complaint) = outcome(&mut lockkit(&[&["man"], arguments].concat()));
    assert_eq!((status, complaint.as_str()), (0, ""), "{arguments:?}");
    page.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
}

#[test]
fn every_command_has_a_manual_page() {
    let (_, help, _) = outcome(&mut lockkit(&["--help"]));
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let commands: Vec<_> = commands
        .lines()
        .map_while(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .filter(|command| *command != "help")
        .collect();
    assert!(commands.contains(&"run") && commands.contains(&"list"), "{help}");
    let whole = manual(&[]);
    assert!(whole.contains(".TH lockkit 1"), "{whole}");
    assert!(!whole.contains("__"), "hidden subcommands stay hidden: {whole}");
    for command in commands {
        assert!(
            whole.contains(&format!("lockkit-{command}(1)")),
            "{command}: {whole}"
        );
        let page = manual(&[command]);
        assert!(page.contains(&format!(".TH lockkit-{command} 1")), "{page}");
        assert!(page.contains(&format!("lockkit {command}")), "{page}");
    }
    let raise = manual(&["fence", "raise"]);
    assert!(
        raise.contains("lockkit fence raise") && raise.contains("--above"),
        "{raise}"
    );
    let run = manual(&["run"]);
    assert!(run.contains("--ttl") && run.contains("Exit status"), "{run}");
}

#[test]
fn only_run_starts_the_hidden_ones() {
    complains(&["__helper"], &["conformance"]);
    if cfg!(target_os = "linux") {
        complains(&["__exec", "1", "1", "--", "echo", "orphan"], &["died"]);
    }
}
