//! The command's failures: one line on standard error, and a status.

use std::{
    error::Error,
    io::{self, Write},
    sync::OnceLock,
};

use clap::error::ErrorKind;
use lockkit::spi::chain;

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
    let voice = Voice::new(io::stderr()).map_err(|error| Failure::because("cannot start", &error))?;
    // Where there is one already, it does.
    let _ = VOICE.set(voice);
    Ok(())
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
        let text = error.to_string();
        let wrong: Vec<&str> = text
            .split("\n\n")
            .next()
            .unwrap_or_default()
            .trim_start_matches("error: ")
            .split_whitespace()
            .collect();
        Err(Self::new(
            FAILED,
            format!("{} (see lockkit --help)", wrong.join(" ")),
        ))
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
