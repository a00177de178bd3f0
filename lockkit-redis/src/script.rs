//! The scripts, each one atomic step of the protocol at the server.

use std::sync::OnceLock;

use redis::Cmd;

macro_rules! script {
    ($($part:literal),*) => {
        Script::new(concat!($(include_str!(concat!("lua/", $part, ".lua"))),*))
    };
}

pub(crate) static ACQUIRE: Script = script!("acquire_fast", "common", "acquire");
/// Tries, shared mode and permits.
pub(crate) static ACQUIRE_IN_FULL: Script = script!("common", "acquire");
pub(crate) static RENEW: Script = script!("renew_fast", "common", "renew");
pub(crate) static RELEASE: Script = script!("release_fast", "common", "release");
pub(crate) static REVOKE: Script = script!("common", "revoke");
pub(crate) static INSPECT: Script = script!("common", "inspect");
pub(crate) static FLOOR: Script = script!("floor");

/// What a connection makes known to its server before it is used.
pub(crate) static ALL: [&Script; 7] = [
    &ACQUIRE,
    &ACQUIRE_IN_FULL,
    &RENEW,
    &RELEASE,
    &REVOKE,
    &INSPECT,
    &FLOOR,
];

/// A Lua script of one lock.
///
/// Scripts name but one key, the lock's; the others are derived from it at the server, and only on the paths that
/// need them. Each key that is passed costs the server about as much as reading it.
#[derive(Debug)]
pub(crate) struct Script {
    source: &'static str,
    /// Its digest, once a server has said it.
    digest: OnceLock<String>,
}

impl Script {
    const fn new(source: &'static str) -> Self {
        Self {
            source,
            digest: OnceLock::new(),
        }
    }

    pub(crate) fn load(&self) -> Cmd {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(self.source);
        load
    }

    pub(crate) fn loaded_as(&self, digest: String) {
        let _ = self.digest.set(digest);
    }

    /// The call by digest, or with the whole script for a server that may not know it.
    pub(crate) fn call(&self, key: &[u8], arguments: &[&[u8]], by_digest: bool) -> Cmd {
        let digest = self.digest.get().filter(|_| by_digest);
        let mut call = redis::cmd(if digest.is_some() { "EVALSHA" } else { "EVAL" });
        call.arg(digest.map_or(self.source, String::as_str));
        if key.is_empty() {
            call.arg(0);
        } else {
            call.arg(1).arg(key);
        }
        for argument in arguments {
            call.arg(*argument);
        }
        call
    }
}
