//! The start of a process in given surroundings.

use std::{
    ffi::{OsStr, OsString},
    fs::{File, OpenOptions},
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::OpenOptionsExt, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::{
    fs::{OFlags, fcntl_setfl},
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};

use super::schedule::{Session, Stream, Surroundings};

/// A process, and what keeps its surroundings as they are.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) child: Child,
    said: Option<mpsc::Receiver<String>>,
    _unread: Vec<PipeReader>,
    _keys: Option<OwnedFd>,
}

impl Started {
    /// Returns what it has said, where somebody reads that. To be called when it has ended.
    pub(super) fn said(&self) -> Option<String> {
        // What it has left behind may have the pipe open for longer.
        self.said.as_ref()?.recv_timeout(Duration::from_secs(20)).ok()
    }
}

/// Starts `program`.
pub(super) fn start(
    around: &Surroundings,
    program: &OsStr,
    arguments: &[OsString],
    environment: &[(&str, OsString)],
) -> io::Result<Started> {
    let mut unread = Vec::new();
    let terminal = match around.session {
        Session::Terminal => Some(terminal()?),
        Session::Group | Session::Bare => None,
    };
    let mut command = match around.session {
        Session::Group => {
            let mut command = Command::new("bash");
            command.process_group(0);
            command
        }
        Session::Bare => after("setsid", &["bash"]),
        // Its standard input becomes the terminal that it has.
        Session::Terminal => after("setsid", &["--ctty", "bash"]),
    };
    command.arg("-c").arg(script(around)).arg("bash");
    command.arg("env").arg("--default-signal");
    for (option, signals) in [
        ("--ignore-signal", &around.ignored),
        ("--block-signal", &around.blocked),
    ] {
        if !signals.is_empty() {
            command.arg(format!("{option}={}", numbers(signals)));
        }
    }
    command.arg(program).args(arguments);
    for (name, value) in environment {
        command.env(name, value);
    }
    let open = terminal.as_ref().map(|(_, terminal)| terminal);
    command.stdin(match open {
        Some(terminal) => terminal.try_clone()?.into(),
        None => Stdio::null(),
    });
    command.stdout(output(around.stdout, open, &mut unread)?.unwrap_or_else(Stdio::null));
    let mut said = None;
    let stderr = match output(around.stderr, open, &mut unread)? {
        Some(stderr) => stderr,
        None => {
            let (reader, writer) = io::pipe()?;
            said = Some(listen(reader));
            writer.into()
        }
    };
    let child = command.stderr(stderr).spawn()?;
    Ok(Started {
        child,
        said,
        _unread: unread,
        _keys: terminal.map(|(keys, _)| keys),
    })
}

fn after(first: &str, then: &[&str]) -> Command {
    let mut command = Command::new(first);
    command.args(then);
    command
}

/// What the shell does before it becomes the program.
fn script(around: &Surroundings) -> OsString {
    let mut script = String::from("ulimit -c 0; ");
    if around.stdin == Stream::Closed {
        script += "exec 0<&-; ";
    }
    if around.stdout == Stream::Closed {
        script += "exec 1>&-; ";
    }
    // The shell might have something to say until here.
    if let Some(descriptors) = around.descriptors {
        script.push_str("ulimit -n ");
        script.push_str(&descriptors.to_string());
        script.push_str("; ");
    }
    script += if around.stderr == Stream::Closed {
        "exec \"$@\" 2>&-"
    } else {
        "exec \"$@\""
    };
    OsStr::from_bytes(script.as_bytes()).to_owned()
}

fn numbers(signals: &[Signal]) -> String {
    let numbers: Vec<_> = signals.iter().map(|signal| signal.as_raw().to_string()).collect();
    numbers.join(",")
}

/// `None` if it is to be plain.
fn output(
    stream: Stream,
    terminal: Option<&File>,
    unread: &mut Vec<PipeReader>,
) -> io::Result<Option<Stdio>> {
    Ok(Some(match (stream, terminal) {
        (Stream::Plain | Stream::Closed, _) | (Stream::Terminal, None) => return Ok(None),
        (Stream::Terminal, Some(terminal)) => terminal.try_clone()?.into(),
        (Stream::Full, _) => {
            let (reader, writer) = full_pipe()?;
            unread.push(reader);
            writer.into()
        }
        (Stream::Broken, _) => io::pipe()?.1.into(),
        (Stream::NoSpace, _) => OpenOptions::new().write(true).open("/dev/full")?.into(),
    }))
}

/// A pipe that takes no more: that of a logger that hangs, or of a terminal after Ctrl-S.
fn full_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, mut writer) = io::pipe()?;
    fcntl_setfl(&writer, OFlags::NONBLOCK)?;
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    fcntl_setfl(&writer, OFlags::empty())?;
    Ok((reader, writer))
}

/// A pseudo-terminal that nobody types on or looks at.
fn terminal() -> io::Result<(OwnedFd, File)> {
    let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&keys)?;
    unlockpt(&keys)?;
    let name = ptsname(&keys, Vec::new())?;
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NOCTTY.bits().cast_signed())
        .open(OsStr::from_bytes(name.to_bytes()))?;
    Ok((keys, terminal))
}

/// Reads until the last writer has gone, and returns the way to what was read.
fn listen(mut reader: PipeReader) -> mpsc::Receiver<String> {
    let (tell, said) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = reader.read_to_end(&mut bytes);
        let _ = tell.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    said
}
