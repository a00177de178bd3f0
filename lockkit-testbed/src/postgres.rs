//! PostgreSQL servers: single ones, standbys, and PgBouncer before them.
//!
//! ```no_run
//! use lockkit_testbed::postgres::PgServer;
//!
//! # fn main() -> std::io::Result<()> {
//! let server = PgServer::plain()?;
//! assert_eq!(server.sql("SELECT pg_try_advisory_lock(7)")?, "t");
//! server.kill()?;
//! server.start()?;
//! # Ok(())
//! # }
//! ```

use std::{
    env,
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::Command,
};

use crate::template::printed;

mod bouncer;
mod processes;
mod server;
mod session;

pub use bouncer::{PgBouncer, PoolMode};
pub use server::{PgBuilder, PgServer};
pub use session::PgSession;

/// The directory of the programs, `postgres` and `initdb` among them: what the environment variable
/// `LOCKKIT_POSTGRES_BIN` names, or else that of the newest version that Debian's packages have installed.
///
/// # Errors
/// If there is none.
pub fn programs() -> io::Result<PathBuf> {
    if let Some(named) = env::var_os("LOCKKIT_POSTGRES_BIN") {
        return Ok(named.into());
    }
    let versions = Path::new("/usr/lib/postgresql").read_dir().into_iter().flatten();
    let versions = versions.filter_map(|version| {
        let version = version.ok()?.path();
        let number: u32 = version.file_name()?.to_str()?.parse().ok()?;
        version.join("bin/initdb").exists().then_some((number, version))
    });
    versions.max().map(|(_, version)| version.join("bin")).ok_or_else(|| {
        io::Error::other(
            "there is no PostgreSQL in /usr/lib/postgresql; on Debian or Ubuntu: apt-get install postgresql; elsewhere set \
             LOCKKIT_POSTGRES_BIN to the directory of its programs",
        )
    })
}

/// Returns why there are no PostgreSQL servers on this machine, and what to do; `None` if there are.
pub fn missing() -> Option<String> {
    version().err().map(|error| error.to_string())
}

/// Returns why there is no PgBouncer on this machine, and what to do; `None` if there is.
pub fn missing_bouncer() -> Option<String> {
    let error = printed(Command::new(bouncer::program()).arg("--version")).err()?;
    Some(format!("{error}; on Debian or Ubuntu: apt-get install pgbouncer"))
}

fn version() -> io::Result<String> {
    let printed = printed(Command::new(programs()?.join("postgres")).arg("--version"))?;
    // `postgres (PostgreSQL) 15.18 (Debian …)`
    let version = printed.split_whitespace().nth(2).unwrap_or_default();
    Ok(version.to_owned())
}

/// `program`, run by somebody who is not root, since PostgreSQL and PgBouncer refuse to be run by root. They may still read and
/// write everything, so that it does not matter whose the directories are, nor the path to them; and end with the test process.
fn unprivileged(program: impl Into<OsString>) -> Command {
    // `nobody`
    const USER: u32 = 65_534;

    let program = program.into();
    if !rustix::process::getuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={USER}"))
        .arg(format!("--regid={USER}"))
        .args([
            "--clear-groups",
            "--inh-caps=-all,+dac_override",
            "--ambient-caps=-all,+dac_override",
            "--pdeathsig=KILL",
            "--",
        ])
        .arg(program);
    command
}
