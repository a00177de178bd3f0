//! The command line.

#![expect(
    clippy::doc_markdown,
    reason = "the comments are the help that users see on their terminals"
)]

use std::{ffi::OsString, time::Duration};

use clap::{Args, Parser, Subcommand};

/// Run commands under a distributed lock, and look after lock servers.
///
/// The lock server is named by `--url`, else by the environment variable `LOCKKIT_URL`, else it is the directory
/// `lockkit` in `$XDG_STATE_HOME` (`~/.local/state` if that is unset), which keeps the processes of one user on one
/// host apart. Durations are written 500ms, 30s, 1m. When lockkit itself fails, it exits with status 125.
#[derive(Debug, Parser)]
#[command(name = "lockkit", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Inspect(Inspect),
    List(List),
    Break(Break),
    Fence(Fence),
    Check(Check),
    Bench(Bench),
    Completions(Completions),
    Man(Man),
    /// Becomes the command that `run` runs, tied to the life of its parent.
    #[command(name = crate::exec::SUBCOMMAND, hide = true)]
    Exec(Exec),
    /// Holds locks as another process, for `check` and `bench`.
    #[command(name = crate::helper_server::HELPER, hide = true)]
    Helper,
}

/// Run a command while holding a lock.
///
/// The command gets LOCKKIT_NAME and LOCKKIT_TOKEN, the fencing token, in its environment. Signals are passed on to
/// it, and the lock is released as soon as it exits.
///
/// Exit status: the command's own (128 + n if signal n ended it); 123 if the lock was lost, in which case the command
/// is killed; 124 if the lock was not granted in time; 125 if lockkit failed; 126 if the command cannot be executed;
/// 127 if it cannot be found.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) server: Server,
    /// For how long the lock outlives lockkit if it dies or is cut off [default: 30s, or the URL's]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,
    /// Stop the command, with status 123, if it still runs when the lock has been held for this long and its lease has
    /// ended after that [default: never, or the URL's]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the lock taken for this long from the grant on, also if the command is done before
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) at_least: Option<Duration>,
    /// Give up, with status 124, if the lock is not granted within this time [default: wait for ever]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) wait: Option<Duration>,
    /// Give up at once, with status 124, if the lock is taken
    #[arg(long = "try", conflicts_with = "wait")]
    pub(crate) try_once: bool,
    /// Hold the lock together with other shared holders; it excludes exclusive ones
    #[arg(long, conflicts_with = "permits")]
    pub(crate) shared: bool,
    /// Hold one of N permits of the semaphore NAME instead of a lock
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// Keep the command in lockkit's process group, as at a terminal, so that it may use the terminal whenever lockkit
    /// may
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Withhold the URL, which may have a password, from the command: LOCKKIT_URL is empty in its environment
    #[arg(long)]
    pub(crate) no_inherit_url: bool,
    /// The holder, as shown to those who inspect the lock [default: user@host:pid]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// The lock, by another spelling of NAME: for a name that begins with `-`
    #[arg(
        long = "name",
        value_name = "NAME",
        allow_hyphen_values = true,
        conflicts_with = "name"
    )]
    named: Option<String>,
    /// The lock
    #[arg(required_unless_present = "named")]
    name: Option<String>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

impl Run {
    /// Returns the name of the lock: one of its two spellings is always there.
    pub(crate) fn name(&self) -> &str {
        let name = self.name.as_ref().or(self.named.as_ref());
        name.map_or("", String::as_str)
    }
}

/// Show who holds a lock.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Show the permits of the semaphore NAME instead of the lock
    #[arg(long)]
    pub(crate) permits: bool,
    /// Print one JSON object: name, kind, holders (token, label, left_ms, since), waiters
    #[arg(long)]
    pub(crate) json: bool,
    /// The lock
    pub(crate) name: String,
}

/// List the locks and semaphores that somebody holds.
///
/// Takes part in no contest. Prints them as it finds them, in no certain order, and each once.
#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Print one JSON object per line: name, kind, holders (token, label, left_ms, since), waiters
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw a table on the terminal, anew every second, until Ctrl-C
    #[arg(long, conflicts_with = "json")]
    pub(crate) watch: bool,
    /// The beginning of the names to list; no character is a wildcard [default: all names]
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

/// Ask a holder to give up its hold, and wait until it has.
///
/// The holder is told, and its hold is not renewed any more. Nobody else is granted the lock before the holder has let go of it, or
/// its lease is over.
///
/// Exit status: 0 if the hold has ended; 1 if nobody holds the lock with that token; 124 if it is still held after --wait, and
/// stays asked for; 125 if lockkit failed, and cannot tell.
#[derive(Debug, Args)]
pub(crate) struct Break {
    #[command(flatten)]
    pub(crate) server: Server,
    /// The fencing token of the hold to end, as `lockkit inspect` shows it
    #[arg(long, value_name = "N")]
    pub(crate) token: u64,
    /// For how long to wait for the end of the hold
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    pub(crate) wait: Duration,
    /// End the hold at once, by force: another may be granted the lock before the holder knows
    #[arg(long, conflicts_with = "wait")]
    pub(crate) force: bool,
    /// End the hold of a permit of the semaphore NAME instead
    #[arg(long)]
    pub(crate) permits: bool,
    /// The lock
    pub(crate) name: String,
}

/// Show or raise the fencing tokens, to have a lock server take another's place.
///
/// What checks tokens remembers the highest that it has seen, and refuses lower ones for good. So before another lock server
/// takes the place of one whose tokens were higher, raise its tokens above them.
#[derive(Debug, Args)]
pub(crate) struct Fence {
    #[command(subcommand)]
    pub(crate) what: FenceCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FenceCommand {
    /// Print the highest token that a hold may have had so far
    Show(FenceShow),
    Raise(FenceRaise),
}

#[derive(Debug, Args)]
pub(crate) struct FenceShow {
    #[command(flatten)]
    pub(crate) server: Server,
}

/// Have every later hold get a token above N, and print what tokens are above then: N, or more.
///
/// Stop what locks before: a hold from before keeps its token, also where it is passed on. If higher tokens are in use
/// already, they stay. A number so high that too few would be left is refused, with status 125.
#[derive(Debug, Args)]
pub(crate) struct FenceRaise {
    #[command(flatten)]
    pub(crate) server: Server,
    /// The highest token that was seen: by `lockkit fence show` on the other lock server, or by what checks tokens
    #[arg(long, value_name = "N")]
    pub(crate) above: u64,
}

/// Run the conformance suite against your own lock server.
///
/// It uses names of its own and starts helper processes. Exits with status 1 if a case fails.
#[derive(Debug, Args)]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Run only the cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// Instead, torture the server for so long: random schedules over everything that a client can do, and a judge
    #[arg(long = "for", value_name = "TIME", value_parser = some_time, conflicts_with = "only")]
    pub(crate) time: Option<Duration>,
    /// The seed of the first schedule of `--for` [default: a random one]
    #[arg(long, value_name = "N", requires = "time")]
    pub(crate) seed: Option<u64>,
}

/// Compare lock servers, side by side.
///
/// Measures latency, throughput, contention, hand-off, shared mode, semaphores, locks that are kept and the recovery
/// from a holder's death. The servers take turns, round by round. It uses names of its own, starts helper processes,
/// and takes a minute or two per server. Exits with status 1 if a measurement failed.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// A lock server; give the option once for each server to compare [default: as for the other commands]
    #[arg(long = "url", value_name = "URL")]
    pub(crate) urls: Vec<String>,
    /// Fewer and shorter rounds, for a first impression
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure only the scenarios whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// Print one JSON array, with an object per scenario and server, and every figure of every round
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print a completion script for a shell.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page.
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// A subcommand, for its own page
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Server {
    /// The lock server [default: $LOCKKIT_URL, else file:// and the directory lockkit in your state directory]
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// The process whose death is to end the command.
    pub(crate) parent: i32,
    /// The parent's descriptor to write to if the command cannot be executed.
    pub(crate) tell: i32,
    /// Writes there, too, that the command begins.
    #[arg(long)]
    pub(crate) begins: bool,
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

/// One in which nothing is tried would pass.
fn some_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("in no time nothing is tried".to_owned()),
        time => Ok(time),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it as 30s, 500ms or 1m"))
}
