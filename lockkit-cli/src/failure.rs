//! The command's failures: one line on standard error, and a status.

use std::{
    cmp::Reverse,
    env,
    error::Error,
    io::{self, Write},
    sync::OnceLock,
    thread,
    time::Duration,
};

use clap::error::ErrorKind;
use lockkit::spi::{chain, redacted_url};
use rustix::{
    process::getpgrp,
    termios::{LocalModes, Termios, tcgetattr, tcgetpgrp},
};

use crate::{inspect, voice::Voice};

/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 123;
/// The lock was not granted in time.
pub(crate) const NOT_GRANTED: u8 = 124;
/// `lockkit` itself failed.
pub(crate) const FAILED: u8 = 125;
/// The command was found and could not be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// Speaks for those who must not wait for a reader of standard error.
static VOICE: OnceLock<Voice> = OnceLock::new();

/// From now on, nobody who says something waits for it to be read.
pub(crate) fn say_without_waiting() -> Result<(), Failure> {
    let voice = Voice::new(Polite(io::stderr())).map_err(|error| Failure::because("cannot start", &error))?;
    // Where there is one already, it does.
    let _ = VOICE.set(voice);
    Ok(())
}

/// Waits with each line while this process is in the background of a terminal that stops those who write to it from there (`stty tostop`).
/// Whoever watches over a lock is not to be stopped for a warning.
struct Polite(io::Stderr);

/// The pause between looks at the terminal.
const LOOK: Duration = Duration::from_millis(100);

impl Polite {
    /// Returns whether to write now would stop this process.
    fn would_stop(&self) -> bool {
        let front = tcgetpgrp(&self.0);
        let stops = |terminal: Termios| terminal.local_modes.contains(LocalModes::TOSTOP);
        front.is_ok_and(|front| front != getpgrp()) && tcgetattr(&self.0).is_ok_and(stops)
    }
}

impl Write for Polite {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        while self.would_stop() {
            thread::sleep(LOOK);
        }
        self.0.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Gives a reader of standard error a moment to take what was said.
pub(crate) fn have_said() {
    if let Some(voice) = VOICE.get() {
        voice.finish();
    }
}

/// A message, and the status to exit with.
#[derive(Debug)]
pub(crate) struct Failure {
    status: u8,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: u8, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// `what` failed, and why.
    pub(crate) fn because(what: &str, error: &dyn Error) -> Self {
        Self::new(FAILED, format!("{what}: {}", chain(error)))
    }

    /// A message that repeats something of this process's arguments. What they have of a URL is redacted, since a server's URL in the
    /// wrong place may have a password.
    pub(crate) fn of_arguments(status: u8, message: &str) -> Self {
        let shown = without_urls(message);
        let advice = advice(shown != message);
        Self::new(status, format!("{shown}{advice}"))
    }

    /// A command line that makes no sense, or one that asked for help, which is printed here.
    pub(crate) fn from_usage(error: &clap::Error) -> Result<u8, Self> {
        if !error.use_stderr() {
            inspect::was_written(error.print())?;
            return Ok(0);
        }
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return Err(Self::new(
                FAILED,
                "what is to be done? run, inspect, break, … (see lockkit --help)",
            ));
        }
        // Its own form has the usage in paragraphs below; the first one says what is wrong.
        let said = error.to_string();
        let text = without_urls(&said);
        let advice = advice(text != said);
        let wrong: Vec<&str> = text
            .split("\n\n")
            .next()
            .unwrap_or_default()
            .trim_start_matches("error: ")
            .split_whitespace()
            .collect();
        Err(Self::new(
            FAILED,
            format!("{}{advice} (see lockkit --help)", wrong.join(" ")),
        ))
    }

    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Says it on standard error, and answers with the status to exit with.
    pub(crate) fn report(self) -> u8 {
        say(&self.message);
        self.status
    }
}

impl From<lockkit::Error> for Failure {
    fn from(error: lockkit::Error) -> Self {
        let status = if error.is_timeout() {
            NOT_GRANTED
        } else if error.is_lost() {
            LOST
        } else {
            FAILED
        };
        Self::new(status, chain(&error))
    }
}

/// Returns the message with the URLs of this process's arguments as they may be shown. A URL goes from its scheme to the end of its
/// argument, whatever a password in it has.
fn without_urls(message: &str) -> String {
    let arguments = env::args_os().skip(1);
    let mut urls: Vec<String> = arguments
        .filter_map(|argument| url_in(&argument.to_string_lossy()).map(str::to_owned))
        .collect();
    // One may begin with another.
    urls.sort_by_key(|url| Reverse(url.len()));
    urls.iter().fold(message.to_owned(), |shown, url| {
        shown.replace(url.as_str(), &redacted_url(url))
    })
}

/// The URL in an argument, perhaps behind an option or in quotes. Also what has lost its scheme, or a slash of it: a user and a password,
/// and a host.
pub(crate) fn url_in(argument: &str) -> Option<&str> {
    let begin = if let Some((before, _)) = argument.split_once("://") {
        before
            .trim_end_matches(|c: char| c.is_ascii_alphanumeric() || "+-.".contains(c))
            .len()
    } else {
        let (user, _) = argument.rsplit_once('@')?;
        if !user.contains(':') {
            return None;
        }
        // Behind the option.
        let option = argument.starts_with('-').then(|| argument.find('='));
        option.flatten().map_or(0, |equals| equals + 1)
    };
    Some(argument.get(begin..)?.trim_matches(is_around))
}

/// What to do with a URL that has been hidden.
fn advice(is_hidden: bool) -> &'static str {
    if is_hidden {
        "; give the URL of a server as --url, or in LOCKKIT_URL"
    } else {
        ""
    }
}

/// Returns whether it may be around a URL, and is no part of it.
fn is_around(c: char) -> bool {
    c.is_whitespace() || "'\"`".contains(c)
}

/// `run` got as far as its command, and no further.
pub(crate) fn cannot_start(error: &dyn Error) -> Failure {
    Failure::because("cannot start the command", error)
}

/// Returns whether a terminal draws it as it reads, and nothing else.
pub(crate) fn is_plain(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_graphic() || c == ' ';
    }
    // Behind a letter, where an accent is no reason.
    let behind_a_letter = String::from_iter(['a', c]);
    behind_a_letter.escape_debug().count() == 2
}

/// One line on standard error. Where nobody reads that, there is nobody to tell.
pub(crate) fn say(message: &str) {
    let mut line = String::from("lockkit: ");
    for c in message.chars() {
        // A lock's name may hold anything, also what would break the line or drive the terminal.
        if is_plain(c) {
            line.push(c);
        } else {
            line.extend(c.escape_default());
        }
    }
    line.push('\n');
    match VOICE.get() {
        Some(voice) => voice.say(line),
        None => _ = io::stderr().write_all(line.as_bytes()),
    }
}
