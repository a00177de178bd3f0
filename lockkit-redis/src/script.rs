//! The Lua scripts. Each is one atomic step of the protocol at the server.

use std::sync::OnceLock;

use redis::{Arg, Cmd, RedisResult, ToRedisArgs, aio::MultiplexedConnection};

/// A script of these parts, after the head that all have.
macro_rules! script {
    ($($part:literal),*) => {
        Script::new(concat!(include_str!("lua/head.lua"), $(include_str!(concat!("lua/", $part, ".lua"))),*))
    };
}

pub(crate) static ACQUIRE: Script = script!(
    "read_key",
    "draw_tokens",
    "acquire_fast",
    "layout",
    "queue_up",
    "common",
    "acquire"
);
pub(crate) static RENEW: Script = script!(
    "renew_fast",
    "layout",
    "renew_waited_for",
    "draw_tokens",
    "common",
    "own_hold",
    "renew"
);
pub(crate) static DOWNGRADE: Script = script!(
    "read_key",
    "draw_tokens",
    "layout",
    "common",
    "own_hold",
    "downgrade"
);
pub(crate) static ADOPT: Script = script!("read_key", "draw_tokens", "layout", "common", "adopt");
pub(crate) static RELEASE: Script = script!(
    "read_key",
    "release_fast",
    "draw_tokens",
    "layout",
    "hand_over",
    "common",
    "release"
);
pub(crate) static REVOKE: Script = script!(
    "read_key",
    "draw_tokens",
    "layout",
    "common",
    "find_hold",
    "revoke"
);
pub(crate) static ASK_BACK: Script = script!(
    "read_key",
    "draw_tokens",
    "layout",
    "common",
    "find_hold",
    "ask_back"
);
pub(crate) static INSPECT: Script = script!("read_key", "draw_tokens", "layout", "common", "inspect");
pub(crate) static RAISE_FENCE: Script = script!("draw_tokens", "raise_fence");

/// The scripts that a connection to the only master loads before it is used.
pub(crate) static ALL: [&Script; 9] = [
    &ACQUIRE,
    &RENEW,
    &DOWNGRADE,
    &ADOPT,
    &RELEASE,
    &REVOKE,
    &ASK_BACK,
    &INSPECT,
    &RAISE_FENCE,
];

pub(crate) static REDLOCK_VOTE: Script = script!(
    "redlock_head",
    "redlock_tokens",
    "redlock_vote_fast",
    "redlock_layout",
    "redlock_vote_taken",
    "redlock_common",
    "redlock_vote"
);
pub(crate) static REDLOCK_CONFIRM: Script = script!("redlock_head", "redlock_tokens", "redlock_confirm");
pub(crate) static REDLOCK_RENEW: Script = script!(
    "redlock_head",
    "redlock_tokens",
    "redlock_renew_fast",
    "redlock_layout",
    "redlock_common",
    "redlock_renew"
);
pub(crate) static REDLOCK_DOWNGRADE: Script = script!(
    "redlock_head",
    "redlock_tokens",
    "redlock_layout",
    "redlock_common",
    "redlock_downgrade"
);
pub(crate) static REDLOCK_ADOPT: Script = script!(
    "redlock_head",
    "redlock_tokens",
    "redlock_layout",
    "redlock_common",
    "redlock_adopt"
);
pub(crate) static REDLOCK_RELEASE: Script = script!(
    "redlock_head",
    "redlock_release_fast",
    "redlock_layout",
    "redlock_release_next",
    "redlock_common",
    "redlock_release"
);
pub(crate) static REDLOCK_REVOKE: Script = script!(
    "redlock_head",
    "redlock_layout",
    "redlock_common",
    "redlock_find_hold",
    "redlock_revoke"
);
pub(crate) static REDLOCK_ASK_BACK: Script = script!(
    "redlock_head",
    "redlock_layout",
    "redlock_common",
    "redlock_find_hold",
    "redlock_ask_back"
);
pub(crate) static REDLOCK_INSPECT: Script = script!(
    "redlock_head",
    "redlock_layout",
    "redlock_common",
    "redlock_inspect"
);
pub(crate) static REDLOCK_MARKER: Script = script!("redlock_marker");

/// The scripts that a connection to a Redlock master loads.
pub(crate) static REDLOCK: [&Script; 10] = [
    &REDLOCK_VOTE,
    &REDLOCK_CONFIRM,
    &REDLOCK_RENEW,
    &REDLOCK_DOWNGRADE,
    &REDLOCK_ADOPT,
    &REDLOCK_RELEASE,
    &REDLOCK_REVOKE,
    &REDLOCK_ASK_BACK,
    &REDLOCK_INSPECT,
    &REDLOCK_MARKER,
];

/// Loads scripts into a server, in one round trip.
pub(crate) async fn load(scripts: &[&Script], connection: &mut MultiplexedConnection) -> RedisResult<()> {
    let mut load = redis::pipe();
    for script in scripts {
        load.add_command(script.load());
    }
    // Not by its reply: all servers share the scripts, and one may say anything. What it minds, it minds of each: that is told once.
    let replies = connection.send_packed_commands(&load, 0, scripts.len()).await?;
    let refused = replies.into_iter().find_map(|reply| reply.extract_error().err());
    refused.map_or(Ok(()), Err)
}

/// Returns the commands in a line of the script with this digest, the first line being 1: `PTTL, PEXPIRE`. And whether they are for
/// the counter of the namespace's tokens, and nothing else.
pub(crate) fn commands(digest: &str, line: usize) -> Option<(String, bool)> {
    let script = ALL
        .iter()
        .chain(&REDLOCK)
        .find(|script| script.digest() == digest)?;
    let line = script.source.lines().nth(line.checked_sub(1)?)?;
    let commands: Vec<_> = line
        .split("call('")
        .skip(1)
        .filter_map(|rest| rest.split('\'').next())
        .collect();
    let is_for_counter =
        commands.len() == line.matches("', fence").count() + line.matches("', OWN .. 'fence'").count();
    (!commands.is_empty()).then(|| (commands.join(", "), is_for_counter))
}

/// A Lua script of one lock, or of a master's marker.
///
/// A script names one key. It derives the others where it needs them: each key that is passed costs the server about
/// as much as reading it.
#[derive(Debug)]
pub(crate) struct Script {
    source: &'static str,
    digest: OnceLock<String>,
}

impl Script {
    const fn new(source: &'static str) -> Self {
        Self {
            source,
            digest: OnceLock::new(),
        }
    }

    /// Returns the name that every server gives it.
    fn digest(&self) -> &str {
        self.digest
            .get_or_init(|| redis::Script::new(self.source).get_hash().to_owned())
    }

    fn load(&self) -> Cmd {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(self.source);
        load
    }

    /// Returns a call on one key, still without its arguments.
    pub(crate) fn call(&'static self, key: &[u8]) -> Call {
        let mut command = Cmd::with_capacity(12, 256);
        command.arg("EVALSHA").arg(self.digest());
        command.arg(1).arg(key);
        Call {
            script: self,
            command,
        }
    }
}

/// A call of a script.
pub(crate) struct Call {
    script: &'static Script,
    pub(crate) command: Cmd,
}

impl Call {
    pub(crate) fn arg(&mut self, argument: impl ToRedisArgs) -> &mut Self {
        self.command.arg(argument);
        self
    }

    /// Returns the key that it names.
    pub(crate) fn key(&self) -> Option<&[u8]> {
        self.command
            .args_iter()
            .nth(3)
            .and_then(|argument| match argument {
                Arg::Simple(key) => Some(key),
                _ => None,
            })
    }

    /// Returns this call with the whole script, for a server that does not know it.
    pub(crate) fn in_full(&self) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(self.script.source);
        for argument in self.command.args_iter().skip(2) {
            if let Arg::Simple(argument) = argument {
                command.arg(argument);
            }
        }
        command
    }

    pub(crate) fn into_full(self) -> Self {
        Self {
            command: self.in_full(),
            ..self
        }
    }
}
