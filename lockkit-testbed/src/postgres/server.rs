use std::{
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::process::Signal;

use super::{PgSession, processes, programs, unprivileged, version};
use crate::{Certificates, Clock, Port, Process, process::START_UP, template};

/// A private PostgreSQL server on a port of its own, which it keeps over restarts, with a database and a role. Its data
/// stay on disk, and are flushed as a production server's are.
///
/// An initialised data directory is kept beside the build, so that a start costs a copy of it and the server's own
/// start: some tenths of a second. So all servers but standbys begin with the same data, their system identifier included.
///
/// Its dropping ends it, and so does the end of the test process. Everything here blocks until it is done, and gives up
/// on a server that does not answer for 20 s.
#[derive(Debug)]
pub struct PgServer {
    process: Process,
    port: Port,
    _clock: Option<Clock>,
}

/// The options of a [`PgServer`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct PgBuilder {
    settings: Vec<(String, String)>,
    access: Vec<String>,
    certificates: Option<Arc<Certificates>>,
    clock: Option<Clock>,
}

impl PgBuilder {
    /// A setting of `postgresql.conf`, such as `wal_writer_delay` and `10s`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A line of `pg_hba.conf` that goes before all others, such as `hostnossl all all all reject`. Several keep their order.
    pub fn access(mut self, line: &str) -> Self {
        self.access.push(line.to_owned());
        self
    }

    /// Also accepts TLS, with the server's certificate among `certificates`, and trusts their authority. A client needs no
    /// certificate; to ask for one, add the [`access`](Self::access) `hostssl all all all scram-sha-256 clientcert=verify-ca`.
    pub fn tls(mut self, certificates: &Arc<Certificates>) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// Runs by `clock`, which the test can set forward and back.
    pub fn clock(mut self, clock: &Clock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Starts the server and waits until it lets clients in.
    ///
    /// # Errors
    /// If it is not installed, or does not come up within a minute.
    pub fn start(self) -> io::Result<PgServer> {
        let template = template::kept(&format!("postgresql-{}-2", version()?), initialise)?;
        self.start_on(|data| template::copy(unprivileged("cp"), &template, data))
    }

    /// Starts a standby that follows `primary`, and waits until it lets clients in. Until it is
    /// [promoted](PgServer::promote), it only reads.
    ///
    /// It begins with the primary's settings.
    ///
    /// # Errors
    /// As [`start`](Self::start), or if the primary's data cannot be copied.
    pub fn standby_of(self, primary: &PgServer) -> io::Result<PgServer> {
        let program = programs()?.join("pg_basebackup");
        self.start_on(|data| {
            let mut backup = unprivileged(program);
            backup
                .arg("--host")
                .arg(primary.directory())
                .args(["--port", &primary.port.number().to_string()])
                .args(["--username", PgServer::SUPERUSER])
                .arg("--pgdata")
                .arg(data)
                .args(["--write-recovery-conf", "--wal-method=stream"])
                .args(["--checkpoint=fast", "--no-sync"]);
            template::printed(&mut backup).map(drop)
        })
    }

    fn start_on(self, make_data: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<PgServer> {
        let program = programs()?.join("postgres");
        let port = Port::reserve()?;
        let process = Process::new("postgres", |directory| {
            let mut command = unprivileged(program);
            command
                .arg("-D")
                .arg(directory.join(DATA))
                .args(["-c", "listen_addresses=127.0.0.1"])
                .args(["-c", &format!("port={}", port.number())])
                .arg("-c")
                .arg(format!("unix_socket_directories={}", directory.display()));
            if let Some(clock) = &self.clock {
                clock.apply(&mut command);
            }
            command
        })?;
        let data = process.directory().join(DATA);
        make_data(&data)?;
        if let Some(certificates) = &self.certificates {
            serve_tls(&data, certificates)?;
        }
        fs::write(data.join("pg_hba.conf"), access(&self.access))?;
        let server = PgServer {
            process,
            port,
            _clock: self.clock,
        };
        for (name, value) in &self.settings {
            server.configure(name, value)?;
        }
        server.start()?;
        Ok(server)
    }
}

const DATA: &str = "data";

/// An empty data directory with the role and the database, and settings for many small servers at once.
fn initialise(data: &Path) -> io::Result<()> {
    let programs = programs()?;
    let mut initdb = unprivileged(programs.join("initdb"));
    initdb
        .arg("-D")
        .arg(data)
        .args(["-U", PgServer::SUPERUSER, "-A", "trust"])
        .args(["--locale=C", "--encoding=UTF8", "--wal-segsize=1", "--no-sync"]);
    template::printed(&mut initdb)?;
    let mut config = fs::File::options()
        .append(true)
        .open(data.join("postgresql.conf"))?;
    config.write_all(SETTINGS.as_bytes())?;

    let (user, database) = (PgServer::USER, PgServer::DATABASE);
    let statements = format!(
        "CREATE ROLE {user} LOGIN PASSWORD '{VERIFIER}';\n\
         ALTER ROLE {superuser} PASSWORD '{VERIFIER}';\n\
         CREATE DATABASE {database} OWNER {user};\n",
        superuser = PgServer::SUPERUSER
    );
    let input = data.join("statements");
    fs::write(&input, statements)?;
    // By itself, without a port.
    let mut alone = unprivileged(programs.join("postgres"));
    alone
        .args(["--single", "-D"])
        .arg(data)
        .args(["-c", "exit_on_error=on", "postgres"])
        .stdin(fs::File::open(&input)?);
    template::printed(&mut alone)?;
    fs::remove_file(input)
}

/// What the server keeps of the [`PASSWORD`](PgServer::PASSWORD): with one iteration, where it would have made 4,096. They take a client
/// a tenth of a second that was compiled without optimisation, for each connection, and it may have dozens.
const VERIFIER: &str = "SCRAM-SHA-256$1:bG9ja2tpdC10ZXN0YmVkIQ==\
    $+9H8AzAk89JEEXpQENrj0gRIytIlBl7bFnjxOyMtK88=:X7lBecbz1+8bJF51zYwj5QFs4Lpz4v6oYSqCWmzBI+w=";

/// What lies in shared memory goes with the directory if the server is killed.
const SETTINGS: &str = "
max_connections = 500
shared_buffers = 16MB
max_wal_size = 64MB
min_wal_size = 8MB
dynamic_shared_memory_type = mmap
log_timezone = UTC
timezone = UTC
";

/// Those who are let in: the superuser at the socket without more ado, everybody everywhere with a password.
fn access(first: &[String]) -> String {
    let superuser = PgServer::SUPERUSER;
    let mut lines = first.to_vec();
    lines.extend([
        format!("local all {superuser} trust"),
        format!("local replication {superuser} trust"),
        "local all all scram-sha-256".to_owned(),
        "host all all 127.0.0.1/32 scram-sha-256".to_owned(),
        String::new(),
    ]);
    lines.join("\n")
}

/// The key is in the server's own hands, and nobody else may read it: it insists on that.
fn serve_tls(data: &Path, certificates: &Certificates) -> io::Result<()> {
    let key = data.join("server.key");
    fs::copy(certificates.server(), data.join("server.crt"))?;
    fs::copy(certificates.authority(), data.join("root.crt"))?;
    fs::copy(certificates.server_key(), &key)?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    for (name, value) in [
        ("ssl", "on"),
        ("ssl_cert_file", "server.crt"),
        ("ssl_key_file", "server.key"),
        ("ssl_ca_file", "root.crt"),
    ] {
        append(data, name, value)?;
    }
    Ok(())
}

/// Adds a line to the configuration, which overrides those before.
fn append(data: &Path, name: &str, value: &str) -> io::Result<()> {
    let mut config = fs::File::options()
        .append(true)
        .open(data.join("postgresql.conf"))?;
    writeln!(config, "{name} = '{}'", value.replace('\'', "''"))
}

impl PgServer {
    /// The database that is there.
    pub const DATABASE: &str = "lockkit";
    /// The role that owns it, and may do nothing else.
    pub const USER: &str = "lockkit";
    /// Its password, and that of the superuser.
    pub const PASSWORD: &str = "hush-4711-canary";
    /// The superuser.
    pub const SUPERUSER: &str = "postgres";

    /// A server with nothing special about it.
    ///
    /// # Errors
    /// As [`PgBuilder::start`].
    pub fn plain() -> io::Result<Self> {
        Self::builder().start()
    }

    /// A server to be.
    pub fn builder() -> PgBuilder {
        PgBuilder::default()
    }

    /// Returns the address at which it listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Its URL with the role and the database.
    pub fn url(&self) -> String {
        Self::url_at(self.addr())
    }

    /// Returns the URL of a server that is reached at `addr`, through a proxy.
    pub fn url_at(addr: SocketAddr) -> String {
        let (user, password, database) = (Self::USER, Self::PASSWORD, Self::DATABASE);
        format!("postgres://{user}:{password}@{addr}/{database}")
    }

    /// Its URL by way of its Unix socket.
    pub fn socket_url(&self) -> String {
        let (user, password, database) = (Self::USER, Self::PASSWORD, Self::DATABASE);
        let directory = self.directory().display().to_string();
        let host = utf8_percent_encode(&directory, NON_ALPHANUMERIC);
        format!(
            "postgres://{user}:{password}@{host}:{}/{database}",
            self.port.number()
        )
    }

    /// The directory of its Unix socket.
    pub fn directory(&self) -> &Path {
        self.process.directory()
    }

    /// The process id of the postmaster, `None` if it does not run.
    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    /// Runs SQL as [`PgSession::sql`] does, as the superuser, in the [`DATABASE`](Self::DATABASE).
    ///
    /// # Errors
    /// The server's own error, or that it cannot be reached or does not answer within 20 s.
    pub fn sql(&self, statement: &str) -> io::Result<String> {
        self.session()?.sql(statement)
    }

    /// A session of the superuser in the [`DATABASE`](Self::DATABASE).
    ///
    /// # Errors
    /// As [`sql`](Self::sql).
    pub fn session(&self) -> io::Result<PgSession> {
        self.session_in(Self::DATABASE)
    }

    /// A session of the superuser in another database.
    ///
    /// # Errors
    /// As [`sql`](Self::sql).
    pub fn session_in(&self, database: &str) -> io::Result<PgSession> {
        PgSession::open(&self.socket(), Self::SUPERUSER, database)
    }

    /// A session of a role in a database. A line of [`access`](PgBuilder::access) has to let it in: `local all NAME trust`.
    ///
    /// # Errors
    /// As [`sql`](Self::sql).
    pub fn session_as(&self, role: &str, database: &str) -> io::Result<PgSession> {
        PgSession::open(&self.socket(), role, database)
    }

    /// Changes a setting of `postgresql.conf`, from [`reload`](Self::reload) or the next start on, as the setting has it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn configure(&self, name: &str, value: &str) -> io::Result<()> {
        append(&self.data(), name, value)
    }

    /// Has the server read its settings again, and waits until it has.
    ///
    /// # Errors
    /// As [`sql`](Self::sql).
    pub fn reload(&self) -> io::Result<()> {
        let mut session = self.session()?;
        let loaded = session.sql("SELECT pg_conf_load_time()")?;
        session.sql("SELECT pg_reload_conf()")?;
        wait("the server does not read its settings", || {
            Ok(session.sql("SELECT pg_conf_load_time()")? != loaded)
        })
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), with its data, and waits until it lets
    /// clients in.
    ///
    /// # Errors
    /// If it runs, or does not come up within a minute.
    pub fn start(&self) -> io::Result<()> {
        // The system may still be about to take the memory from processes that have ended.
        const LET_GO: Duration = Duration::from_secs(10);

        let began = Instant::now();
        loop {
            self.process.start()?;
            match self.wait_ready() {
                Err(error)
                    if error.to_string().contains("pre-existing shared memory block")
                        && began.elapsed() < LET_GO =>
                {
                    thread::sleep(Duration::from_millis(20));
                }
                ready => return ready,
            }
        }
    }

    /// Waits until it lets clients in, after it has lost a process.
    ///
    /// # Errors
    /// If it does not within a minute.
    pub fn wait_ready(&self) -> io::Result<()> {
        self.process.wait_ready(START_UP, || self.session().map(drop))
    }

    /// Ends it in order, and all sessions with it.
    ///
    /// # Errors
    /// If it does not end within 30 s.
    pub fn stop(&self) -> io::Result<()> {
        self.resume_if_paused()?;
        // SIGTERM would wait for all clients to go.
        self.process.stop_by(Signal::INT).map(drop)
    }

    /// Stops it in order and starts it again.
    ///
    /// # Errors
    /// As [`stop`](Self::stop) and [`start`](Self::start).
    pub fn restart(&self) -> io::Result<()> {
        self.stop()?;
        self.start()
    }

    /// Kills all its processes (SIGKILL), as the end of the machine would, and waits for their ends. What it has written and
    /// not flushed is kept, as the system has it.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&self) -> io::Result<()> {
        let Some(pid) = self.pid() else {
            return Ok(());
        };
        // It can have no more children then.
        self.process.pause()?;
        let children = processes::children(pid)?;
        // It does not reap them while it is paused. Later their ids may be those of others, also of threads of this process.
        processes::signal(&children, Signal::KILL)?;
        processes::wait_ended(&children)?;
        self.process.kill()?;
        // What they say of a process that is gone may be true of another one by now.
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
        let mut lock = self.socket().into_os_string();
        lock.push(".lock");
        let _ = fs::remove_file(lock);
        Ok(())
    }

    /// Kills the process of one session (SIGKILL), as the system does when memory runs out. The server ends all other
    /// sessions then, and recovers by itself; [`wait_ready`](Self::wait_ready) waits for it.
    ///
    /// # Errors
    /// If this is no process of this server.
    pub fn kill_process(&self, pid: u32) -> io::Result<()> {
        let postmaster = self
            .pid()
            .ok_or_else(|| io::Error::other("the server does not run"))?;
        if !processes::children(postmaster)?.contains(&pid) {
            return Err(io::Error::other(format!("{pid} is no process of the server")));
        }
        processes::signal(&[pid], Signal::KILL)?;
        processes::wait_ended(&[pid])
    }

    /// Pauses all its processes (SIGSTOP): none does anything until it is resumed. The system still accepts connections for it.
    ///
    /// # Errors
    /// If it does not run, or does not stop.
    pub fn pause(&self) -> io::Result<()> {
        self.process.pause()?;
        let children = self.children()?;
        processes::signal(&children, Signal::STOP)?;
        processes::wait_stopped(&children)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If it does not run.
    pub fn resume(&self) -> io::Result<()> {
        processes::signal(&self.children()?, Signal::CONT)?;
        self.process.resume()
    }

    /// The ids of all its processes, the postmaster's first.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let mut processes: Vec<_> = self.pid().into_iter().collect();
        processes.extend(self.children()?);
        Ok(processes)
    }

    fn resume_if_paused(&self) -> io::Result<()> {
        if self.pid().is_some() {
            self.resume()
        } else {
            Ok(())
        }
    }

    fn children(&self) -> io::Result<Vec<u32>> {
        self.pid().map_or(Ok(Vec::new()), processes::children)
    }

    /// Waits until this standby has replayed all that `primary` has written by now.
    ///
    /// # Errors
    /// As [`sql`](Self::sql), or if it does not within a minute.
    pub fn wait_caught_up(&self, primary: &Self) -> io::Result<()> {
        let written = primary.sql("SELECT pg_current_wal_lsn()")?;
        let mut session = self.session()?;
        wait("the standby does not catch up", || {
            let caught_up = session.sql(&format!("SELECT pg_last_wal_replay_lsn() >= '{written}'"))?;
            Ok(caught_up == "t")
        })
    }

    /// Has this standby lag: it looks for its primary where nobody listens, until it is [promoted](Self::promote).
    ///
    /// # Errors
    /// As [`sql`](Self::sql), or if it still receives something after a minute.
    pub fn lag(&self) -> io::Result<()> {
        let mut session = self.session()?;
        // The port 1 is nobody's.
        session.sql("ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port=1'")?;
        session.sql("SELECT pg_reload_conf()")?;
        wait("the standby still follows", || {
            Ok(session.sql("SELECT count(*) FROM pg_stat_wal_receiver")? == "0")
        })
    }

    /// Makes this standby a primary, and waits until it is.
    ///
    /// # Errors
    /// As [`sql`](Self::sql), or if it is none, or does not become one within a minute.
    pub fn promote(&self) -> io::Result<()> {
        let mut session = self.session()?;
        session.sql("SELECT pg_promote(false)")?;
        wait("the standby does not become a primary", || {
            Ok(session.sql("SELECT pg_is_in_recovery()")? == "f")
        })
    }

    fn data(&self) -> PathBuf {
        self.directory().join(DATA)
    }

    fn socket(&self) -> PathBuf {
        self.directory().join(format!(".s.PGSQL.{}", self.port.number()))
    }
}

impl Drop for PgServer {
    fn drop(&mut self) {
        // At once, but with its own word to its processes, and without leaving anything in shared memory. What is left of them
        // is killed.
        let asked = self
            .resume_if_paused()
            .and_then(|()| self.process.stop_by(Signal::QUIT));
        if asked.is_err() {
            let _ = self.kill();
        }
    }
}

fn wait(what: &str, mut done: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let deadline = Instant::now() + START_UP;
    while !done()? {
        if Instant::now() >= deadline {
            return Err(io::Error::other(what.to_owned()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
