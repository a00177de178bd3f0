//! At a terminal, which is a pseudo-terminal here.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    process::Command,
};

use rustix::{
    fs::OFlags,
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};

use crate::tool::{Running, Site, gone, group, outcome};

/// A terminal, and a shell that has it as its controlling one.
struct Terminal {
    /// The keyboard.
    keys: File,
    shell: Running,
}

impl Terminal {
    /// `script` in the foreground of a new terminal, with `lockkit run` as the function `run`. What it prints goes to a
    /// pipe, and so do its complaints.
    fn with(site: &Site, script: &str) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let terminal = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NOCTTY.bits().cast_signed())
            .open(name.to_str().unwrap());
        let lockkit = env!("CARGO_BIN_EXE_lockkit");
        let mut shell = Command::new("setsid");
        shell
            // The tests may have been started with signals ignored, which a shell cannot undo.
            .args(["--ctty", "env", "--default-signal=HUP,INT,QUIT", "sh", "-c"])
            .arg(format!("run() {{ {lockkit} run \"$@\"; }}; {script}"))
            .env("LOCKKIT_URL", &site.url)
            .stdin(terminal.unwrap());
        Self {
            keys: File::from(keys),
            shell: Running::spawn(&mut shell),
        }
    }
}

/// `mysql -p`, `ssh` and `sudo` ask for a password so, in a pipeline.
#[test]
fn a_command_that_reads_no_terminal_may_ask_on_it() {
    let site = Site::new();
    let ask = r#"read data; echo "$data"; read answer </dev/tty; echo "$answer""#;
    // One that is stopped would never say so.
    let end = "(sleep 20; kill -KILL 0) >/dev/null 2>&1 &";
    let mut terminal = Terminal::with(&site, &format!("{end} echo piped | run job -- sh -c '{ask}'"));
    assert_eq!(terminal.shell.line(), "piped");
    terminal.keys.write_all(b"typed\n").unwrap();
    assert_eq!(terminal.shell.line(), "typed");
    assert_eq!(terminal.shell.end().0.code(), Some(0));
}

/// A group of its own would be in the terminal's background, and stopped when it reads.
#[test]
fn in_the_foreground_the_command_shares_lockkits_group() {
    let site = Site::new();
    let script = "exec 2>/dev/null; trap \"echo got INT\" INT; trap \"exit 5\" TERM; echo $PPID; echo $$; while :; do sleep 0.01; done";
    let mut terminal = Terminal::with(&site, &format!("run job -- sh -c '{script}'"));
    let shell = &mut terminal.shell;
    let [lockkit, command] = [(); 2].map(|()| shell.line().parse().unwrap());
    assert_eq!(group(command), group(lockkit));
    // The terminal sends this one to the whole group, so lockkit must not; and the next one it must.
    crate::tool::signal_to(lockkit, Signal::INT);
    crate::tool::signal_to(lockkit, Signal::TERM);
    assert_eq!(shell.line(), "", "there is no `got INT`");
    assert_eq!(terminal.shell.end().0.code(), Some(5));
}

#[test]
fn in_the_background_the_command_has_a_group_of_its_own() {
    let site = Site::new();
    let tell = "echo $PPID; echo $$; exec sleep 60";
    for (option, shared) in [("", false), ("--foreground", true)] {
        // With jobs under control, each has a group, and this one is not the terminal's.
        let script = format!("set -m; run {option} job -- sh -c '{tell}' & wait");
        let mut terminal = Terminal::with(&site, &script);
        let shell = &mut terminal.shell;
        let [lockkit, command] = [(); 2].map(|()| shell.line().parse().unwrap());
        assert_eq!(group(command) == group(lockkit), shared, "{option}");
        assert_eq!(group(command) == command, !shared, "{option}");
        crate::tool::signal_to(lockkit, Signal::TERM);
        gone(command);
    }
}

/// By hand, it reaches lockkit alone, and the command goes on.
#[test]
fn at_a_terminal_a_stop_of_lockkit_alone_stops_nothing() {
    let site = Site::new();
    let script = "exec 2>/dev/null; trap \"echo USR1\" USR1; trap \"exit 5\" TERM; echo $PPID; while :; do sleep 0.01; done";
    let mut terminal = Terminal::with(&site, &format!("run job -- sh -c '{script}'"));
    let lockkit = terminal.shell.line().parse().unwrap();
    crate::tool::signal_to(lockkit, Signal::TSTP);
    crate::tool::is_not_stopped_soon(lockkit);
    crate::tool::signal_to(lockkit, Signal::USR1);
    assert_eq!(terminal.shell.line(), "USR1", "lockkit goes on and passes it on");
    crate::tool::signal_to(lockkit, Signal::TERM);
    assert_eq!(terminal.shell.end().0.code(), Some(5));
}

/// Who writes to such a terminal from its background is stopped, and would not watch over the lock any more.
#[test]
fn a_terminal_that_stops_writers_does_not_stop_lockkit() {
    let site = Site::new();
    let tell = "echo $PPID; exec sleep 60";
    let script = format!(
        "stty tostop </dev/tty; set -m; run job -- sh -c '{tell}' 2>/dev/tty & wait $!; echo $?; read line"
    );
    let mut terminal = Terminal::with(&site, &script);
    let lockkit: i32 = terminal.shell.line().parse().unwrap();
    for file in site.lock_files() {
        std::fs::remove_file(file).unwrap();
    }
    crate::tool::eventually("lockkit ends, or is stopped", || {
        let state = crate::tool::state(lockkit);
        assert_ne!(state, Some('T'), "lockkit is stopped");
        state.is_none_or(|state| state == 'Z').then_some(())
    });
    assert_eq!(terminal.shell.line(), "123");
}

#[test]
fn ctrl_c_reaches_the_command_once() {
    let site = Site::new();
    let script = "exec 2>/dev/null; trap \"echo got INT\" INT; trap \"exit 5\" TERM; echo $PPID; while :; do sleep 0.01; done";
    let mut terminal = Terminal::with(&site, &format!("trap : INT; run job -- sh -c '{script}'"));
    let lockkit = terminal.shell.line().parse().unwrap();
    terminal.keys.write_all(&[3]).unwrap();
    assert_eq!(terminal.shell.line(), "got INT");
    crate::tool::signal_to(lockkit, Signal::TERM);
    assert_eq!(terminal.shell.line(), "", "it came once");
    assert_eq!(terminal.shell.end().0.code(), Some(5));
}

/// Nothing that the command has started goes on without the lock, although it shares lockkit's group.
#[test]
fn in_the_foreground_too_a_lost_lock_ends_all_of_the_command() {
    let site = Site::new();
    let script = "trap \"\" TERM; echo up; sleep 60 & echo $!; wait; wait";
    // The end of the shell would end everything.
    let mut terminal = Terminal::with(&site, &format!("run job -- sh -c '{script}'; echo $?; read line"));
    assert_eq!(terminal.shell.line(), "up");
    let started = terminal.shell.line().parse().unwrap();
    for file in site.lock_files() {
        std::fs::remove_file(file).unwrap();
    }
    assert_eq!(terminal.shell.line(), "123");
    gone(started);
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 0);
}
