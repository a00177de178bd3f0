//! Private MariaDB and MySQL servers.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{Clock, Port, Process, process::START_UP, template};

/// MariaDB or MySQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavour {
    /// `mariadbd`, from the path.
    MariaDb,
    /// The program that the environment variable `LOCKKIT_MYSQLD` names, since few systems package MySQL itself.
    MySql,
}

/// A server of one's own on 127.0.0.1, with a database and an account.
///
/// An initialised data directory is kept beside the build, so that a start costs a copy of it and the server's own
/// start: some tenths of a second.
#[derive(Debug)]
pub struct MySql {
    process: Process,
    port: Port,
}

impl MySql {
    /// The database that is there.
    pub const DATABASE: &str = "lockkit";
    /// The account that may do anything in it, and `PROCESS`.
    pub const USER: &str = "lockkit";
    /// Its password.
    pub const PASSWORD: &str = "hush-4711-canary";

    /// Returns why there can be no such server here, if that is so.
    pub fn missing(flavour: Flavour) -> Option<String> {
        program(flavour).err().map(|error| error.to_string())
    }

    /// Starts a server with further options, such as `--max-connections=20`.
    ///
    /// # Errors
    /// If it is not installed, or does not come up.
    pub fn start(flavour: Flavour, options: &[&str]) -> io::Result<Self> {
        Self::start_by(None, flavour, options)
    }

    /// Starts a server by a clock that can be set.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_by(clock: Option<&Clock>, flavour: Flavour, options: &[&str]) -> io::Result<Self> {
        let program = program(flavour)?;
        let template = data_of(flavour, &program)?;
        let port = Port::reserve()?;
        let mut copied = Ok(());
        let process = Process::new("mysql", |directory| {
            let data = directory.join("data");
            let init = directory.join(AT_START);
            // Of its own, since a server that starts removes what others have left, or so it takes it.
            let temporary = directory.join("tmp");
            copied = template::copy(Command::new("cp"), &template, &data)
                .and_then(|()| fs::write(&init, setup()))
                .and_then(|()| fs::create_dir(&temporary));
            let mut command = Command::new(&program);
            command
                .arg("--no-defaults")
                .args(as_whom())
                .arg(option("datadir", &data))
                .arg(option("tmpdir", &temporary))
                .arg(option("init-file", &init))
                .arg(option("socket", directory.join("socket")))
                .arg(option("pid-file", directory.join("pid")))
                .arg("--bind-address=127.0.0.1")
                .arg(format!("--port={}", port.number()))
                .args(sizes())
                .arg(log_size(flavour))
                .args(options);
            if flavour == Flavour::MySql {
                command.args(["--mysqlx=0", "--secure-file-priv=NULL"]);
            }
            if let Some(clock) = clock {
                clock.apply(&mut command);
            }
            command
        })?;
        copied?;
        let server = Self { process, port };
        server.start_again()?;
        Ok(server)
    }

    /// Starts it again after it has been killed or stopped, on the same port and data.
    ///
    /// # Errors
    /// If it runs, or does not come up.
    pub fn start_again(&self) -> io::Result<()> {
        self.process.start()?;
        self.process.wait_ready(START_UP, || greets(self.addr()))
    }

    /// Has it run these statements at each start from the next one on, before anybody can connect.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn at_start(&self, statements: &[&str]) -> io::Result<()> {
        let mut all = setup();
        for statement in statements {
            all = all + statement + ";\n";
        }
        fs::write(self.process.directory().join(AT_START), all)
    }

    /// Its process, to be paused or killed.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the address at which it listens.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Its URL with the account and the database.
    pub fn url(&self) -> String {
        Self::url_at(self.addr())
    }

    /// Returns the URL of a server that is reached at `addr`, through a proxy.
    pub fn url_at(addr: SocketAddr) -> String {
        format!(
            "mysql://{}:{}@{addr}/{}",
            Self::USER,
            Self::PASSWORD,
            Self::DATABASE
        )
    }
}

/// The file of what it runs at each start.
const AT_START: &str = "init.sql";

/// Run at each start, before anybody can connect.
fn setup() -> String {
    let (user, password, database) = (MySql::USER, MySql::PASSWORD, MySql::DATABASE);
    format!(
        "CREATE DATABASE IF NOT EXISTS {database};\n\
         CREATE USER IF NOT EXISTS '{user}'@'%' IDENTIFIED BY '{password}';\n\
         GRANT ALL ON {database}.* TO '{user}'@'%';\n\
         GRANT PROCESS ON *.* TO '{user}'@'%';\n"
    )
}

/// Small, since many may run at once.
fn sizes() -> [&'static str; 3] {
    [
        "--innodb-buffer-pool-size=64M",
        "--max-connections=1000",
        "--performance-schema=OFF",
    ]
}

/// As the template has it: a server that starts with another size writes its log anew, a hundred megabytes of it by default.
fn log_size(flavour: Flavour) -> &'static str {
    match flavour {
        Flavour::MariaDb => "--innodb-log-file-size=16M",
        Flavour::MySql => "--innodb-redo-log-capacity=16M",
    }
}

fn as_whom() -> Option<&'static str> {
    rustix::process::getuid().is_root().then_some("--user=root")
}

fn option(name: &str, path: impl AsRef<Path>) -> OsString {
    let mut option = OsString::from(format!("--{name}="));
    option.push(path.as_ref());
    option
}

/// A server that is ready sends the first word.
fn greets(addr: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting)?;
    match greeting[4] {
        10 => Ok(()),
        other => Err(io::Error::other(format!("it greets with {other:#x}"))),
    }
}

fn program(flavour: Flavour) -> io::Result<PathBuf> {
    let found = match flavour {
        Flavour::MariaDb => ["mariadbd", "/usr/sbin/mariadbd"]
            .map(PathBuf::from)
            .into_iter()
            .find(|it| version(it).is_ok()),
        Flavour::MySql => std::env::var_os("LOCKKIT_MYSQLD").map(PathBuf::from),
    };
    found.ok_or_else(|| {
        io::Error::other(match flavour {
            Flavour::MariaDb => "there is no `mariadbd`; install the package mariadb-server",
            Flavour::MySql => "the environment variable LOCKKIT_MYSQLD names no server program of MySQL",
        })
    })
}

fn version(program: &Path) -> io::Result<String> {
    let output = Command::new(program)
        .args(["--no-defaults", "--version"])
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A data directory as an installation makes it. Made once per version.
fn data_of(flavour: Flavour, program: &Path) -> io::Result<PathBuf> {
    let version: String = version(program)?
        .split_once("Ver ")
        .map_or("", |(_, version)| version)
        .chars()
        .take_while(|c| !c.is_whitespace())
        .filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c))
        .collect();
    let name = format!("{flavour:?}-{version}").to_lowercase();
    template::kept(&name, |data| initialise(flavour, program, data))
}

fn initialise(flavour: Flavour, program: &Path, data: &Path) -> io::Result<()> {
    let mut install = match flavour {
        Flavour::MariaDb => {
            let mut install = Command::new("mariadb-install-db");
            install.args([
                "--no-defaults",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ]);
            install
        }
        Flavour::MySql => {
            let mut install = Command::new(program);
            install.args(["--no-defaults", "--initialize-insecure"]);
            install
        }
    };
    install
        .args(as_whom())
        .arg(option("datadir", data))
        .arg(log_size(flavour));
    template::printed(&mut install)?;
    // MySQL wants each server to have an id of its own.
    let _ = fs::remove_file(data.join("auto.cnf"));
    Ok(())
}
