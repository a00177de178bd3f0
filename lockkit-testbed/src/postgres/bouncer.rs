use std::{
    env,
    ffi::OsString,
    fs, io,
    net::{SocketAddr, TcpStream},
};

use super::{PgServer, unprivileged};
use crate::{Port, Process, process::START_UP};

/// A private PgBouncer before a [`PgServer`], for its role and its superuser.
///
/// Its dropping ends it, and so does the end of the test process.
#[derive(Debug)]
pub struct PgBouncer {
    process: Process,
    port: Port,
}

/// The time for which a client of [`PgBouncer`] has a session of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// As long as it is connected.
    Session,
    /// For one transaction.
    Transaction,
}

/// The program that the environment variable `LOCKKIT_PGBOUNCER` names, or else `pgbouncer`.
pub(super) fn program() -> OsString {
    env::var_os("LOCKKIT_PGBOUNCER").unwrap_or_else(|| {
        let usual = "/usr/sbin/pgbouncer";
        if fs::exists(usual).unwrap_or(false) {
            usual.into()
        } else {
            "pgbouncer".into()
        }
    })
}

impl PgBouncer {
    /// Starts one before the server at `upstream`, with further lines of its configuration, such as
    /// `ignore_startup_parameters = options`.
    ///
    /// # Errors
    /// If it is not installed, or does not come up.
    pub fn start(upstream: SocketAddr, mode: PoolMode, lines: &[&str]) -> io::Result<Self> {
        let port = Port::reserve()?;
        let process = Process::new("pgbouncer", |directory| {
            let mut command = unprivileged(program());
            command.arg(directory.join(CONFIGURATION));
            command
        })?;
        let users = process.directory().join("users");
        let known = [PgServer::USER, PgServer::SUPERUSER];
        let known = known.map(|user| format!("\"{user}\" \"{}\"\n", PgServer::PASSWORD));
        fs::write(&users, known.concat())?;
        let mode = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
        };
        let configuration = format!(
            "[databases]\n\
             * = host={} port={}\n\
             [pgbouncer]\n\
             listen_addr = 127.0.0.1\n\
             listen_port = {}\n\
             unix_socket_dir =\n\
             auth_type = scram-sha-256\n\
             auth_file = {}\n\
             pool_mode = {mode}\n\
             {}\n",
            upstream.ip(),
            upstream.port(),
            port.number(),
            users.display(),
            lines.join("\n"),
        );
        fs::write(process.directory().join(CONFIGURATION), configuration)?;
        let bouncer = Self { process, port };
        bouncer.process.start()?;
        bouncer
            .process
            .wait_ready(START_UP, || TcpStream::connect(bouncer.addr()).map(drop))?;
        Ok(bouncer)
    }

    /// Its process, to be paused or killed.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the address at which it listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Its URL with the server's role and database.
    pub fn url(&self) -> String {
        PgServer::url_at(self.addr())
    }
}

const CONFIGURATION: &str = "pgbouncer.ini";
