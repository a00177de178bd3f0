//! The configuration of a client.

use std::{path::PathBuf, str::FromStr, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, Result,
    spi::{BackendInfo, ServerUrl, check_duration},
};

use crate::{
    connect::Target,
    options::{Options, section, table},
    url::Url,
};

table! {
    /// A lock server and the options to use it with: the part of an application's config file that is about locks.
    ///
    /// With the feature `serde` it is `Deserialize`. Durations are written `"500ms"`, `"30s"` or `"1m 30s"`. An unknown key and a
    /// bad value are errors that name the key. Apart from the tables of the backends, each key is also a parameter of the
    /// URL. **A key that is set here wins over the parameter.** They are validated together, when it
    /// [connects](Self::connect).
    ///
    /// ```
    /// # #[cfg(feature = "serde")] {
    /// # use std::time::Duration;
    /// let config: lockkit::LockConfig = toml::from_str(
    ///     r#"
    ///     url = "file:///var/lib/app/locks"   # or redis://…, zk://…, postgres://…: nothing else changes
    ///     ttl = "10s"
    ///     namespace = "billing"
    ///
    ///     [file]
    ///     poll = "25ms"
    ///     "#,
    /// )?;
    /// assert_eq!(config.ttl, Some(Duration::from_secs(10)));
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// In plain Rust:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkit::Result<()> {
    /// use std::time::Duration;
    /// use lockkit::LockConfig;
    ///
    /// let client = LockConfig::new("memory:").ttl(Duration::from_secs(10)).label("billing@host-7").connect().await?;
    /// # let _ = client;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Its `Debug` form leaves out the credentials in the URL.
    #[must_use]
    pub struct LockConfig {
        /// The server, as [`connect`](crate::connect) takes it.
        pub url: ServerUrl,
    }
    options {
        /// The time for which a hold outlives its last renewal, 10 ms to a year. Default: 30 s.
        pub ttl: Duration,
        /// The time to wait for a lock that is taken. Default: for ever.
        pub wait: Duration,
        /// The time after which a hold is not renewed any more, for tasks that hang; from the ttl to a year. Default: never.
        pub max_hold: Duration,
        /// The time after which one exchange with the server counts as failed. Default: 5 s.
        pub op_timeout: Duration,
        /// The time that [`connect`](Self::connect) may take. Default: 5 s.
        pub connect_timeout: Duration,
        /// A prefix that keeps applications apart that share a server: any of `A-Z a-z 0-9 . _ -`. Default: `lockkit`. May be empty.
        pub namespace: String,
        /// A name for the holder, for anyone who inspects the lock; at most 256 bytes.
        pub label: String,
        /// The number of times in a row that a release may pass an exclusive hold to the next waiter of this client, before
        /// the lock goes back to the server; at most 65,535. Default: 32, or 0 on a backend whose order is strict.
        pub local_handoffs: u32,
    }
    sections {
        /// The options of the file backend. Ignored while the URL names another backend.
        pub file: FileSection,
        /// The options of the Redis backend. Ignored while the URL names another backend.
        pub redis: RedisSection,
        /// The options of Redlock. Ignored while the URL names another backend.
        pub redlock: RedlockSection,
        /// The options of the ZooKeeper backend. Ignored while the URL names another backend.
        pub zk: ZkSection,
        /// The options of the MySQL backend. Ignored while the URL names another backend.
        pub mysql: MysqlSection,
        /// The options of the etcd backend. Ignored while the URL names another backend.
        pub etcd: EtcdSection,
        /// The options of the PostgreSQL backend. Ignored while the URL names another backend.
        pub postgres: PostgresSection,
    }
}

section! {
    /// The part of a [`LockConfig`] for the file backend.
    pub struct FileSection for lockkit_file::FileConfig, if all(feature = "file", unix) {
        /// The interval at which a waiter looks again although nothing woke it, 1 ms to a minute. Default: 10 s with inotify
        /// (Linux), else 25 ms.
        pub poll: Duration,
    }
}

section! {
    /// The part of a [`LockConfig`] for the Redis backend. Each key is also a parameter of `redis:` URLs.
    pub struct RedisSection for lockkit_redis::RedisConfig, if feature = "redis" {
        /// The name of the master, where the URL names sentinels, separated by commas, rather than the server.
        pub sentinel: String,
        /// The number of replicas that must have acknowledged a grant before it counts. It narrows the window in which a
        /// fail-over loses a lock, and does not close it. Default: 0.
        pub replicas: u32,
        /// The time to wait for these replicas. Default: 1 s.
        pub replicas_timeout: Duration,
        /// The number of the database, for `redis+unix:`, whose path is the socket's. Default: 0.
        pub db: u32,
        /// A file of PEM certificates to trust instead of the system's, for `rediss:`.
        pub ca: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs `key` and `rediss:`.
        pub cert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `cert`.
        pub key: PathBuf,
    }
}

section! {
    /// The part of a [`LockConfig`] for Redlock. Each key is also a parameter of `redlock:` URLs.
    pub struct RedlockSection for lockkit_redis::RedlockConfig, if feature = "redis" {
        /// The longest `ttl` that any client of these masters asks for, and the time for which a restarted master has no
        /// vote. All clients have to agree on it. Default: 60 s.
        pub max_ttl: Duration,
        /// States that the masters lose nothing that they have acknowledged, so that a restarted one votes at once. The
        /// client verifies `appendonly yes` and `appendfsync always`. Default: `false`.
        pub durable: bool,
        /// The time after which the other masters decide without a silent one, 1 ms to a minute. Default: 100 ms.
        pub master_timeout: Duration,
        /// Connects to the masters over TLS, which needs the feature `tls`. Default: `false`.
        pub tls: bool,
        /// A file of PEM certificates to trust instead of the system's, with `tls`.
        pub ca: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs `key` and `tls`.
        pub cert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `cert`.
        pub key: PathBuf,
    }
}

section! {
    /// The part of a [`LockConfig`] for the ZooKeeper backend. Each key is also a parameter of `zk:` URLs.
    pub struct ZkSection for lockkit_zk::ZkConfig, if feature = "zk" {
        /// The layout of a lock's nodes, on which all of its clients have to agree: `mutex` as Curator's
        /// `InterProcessMutex`, `readwrite` as its `InterProcessReadWriteLock`, `simple` for one node that everyone watches.
        /// Default: `mutex`.
        pub nodes: String,
        /// The time for which the server keeps what this client holds after it last heard from it, at least five ticks. The
        /// server may have narrower limits. Default: the `ttl`, or five ticks if that is longer.
        pub session_timeout: Duration,
        /// The servers' `tickTime`, or more. Default: 2 s.
        pub tick_time: Duration,
        /// `off`, `unverified` (encrypted, the servers prove nothing) or `verify` (encrypted, and the certificates have to be
        /// trusted and for the hosts). It is the same for all servers. All but `off` need the feature `tls`. Default: `off`.
        pub tls: String,
        /// A file of PEM certificates to trust instead of the system's, with `tls = "verify"`.
        pub ca: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs `key` and `tls`.
        pub cert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `cert`.
        pub key: PathBuf,
        /// The right to touch the nodes that are created: `everyone`, or `creator` for the user in the URL alone. Default: `creator`
        /// if there is a user.
        pub access: String,
        /// The fate of the directories of locks that nobody uses: with `container` the server removes them, with `persistent`
        /// they stay. Default: `container`.
        pub parents: String,
    }
}

section! {
    /// The part of a [`LockConfig`] for the MySQL backend. Each key is also a parameter of `mysql:` URLs.
    pub struct MysqlSection for lockkit_mysql::MySqlConfig, if feature = "mysql" {
        /// The way to hold a lock: `for_update`, by a row lock and a connection of its own, or `lease`, by owner and expiry in a
        /// row, which has neither shared mode nor semaphores. Default: `for_update`.
        pub mode: String,
        /// The creator of the tables: `auto`, the backend, or `manual`, you. Default: `auto`.
        pub schema: String,
        /// `off`, `unverified` (encrypted, the server proves nothing) or `verify` (encrypted, and the certificate has to be trusted
        /// and for that host). All but `off` need the feature `tls`. Default: `off`.
        pub tls: String,
        /// The servers whose public key encrypts the password without TLS: `local`, those of this host, `always`, all, or `never`,
        /// none. Default: `local`.
        pub public_key: String,
        /// A file of PEM certificates to trust instead of the system's, with `tls = "verify"`.
        pub ca: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs `key` and `tls`.
        pub cert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `cert`.
        pub key: PathBuf,
        /// The Unix socket to use instead of the URL's host and port.
        pub socket: PathBuf,
        /// The most connections at once for locks that are held or waited for, besides one or two that the client has for
        /// itself. Default: 100.
        pub max_connections: u32,
    }
}

section! {
    /// The part of a [`LockConfig`] for the etcd backend. Each key is also a parameter of `etcd:` URLs.
    pub struct EtcdSection for lockkit_etcd::EtcdConfig, if feature = "etcd" {
        /// `off`, `unverified` (encrypted, the servers prove nothing) or `verify` (encrypted, and the certificates have to be
        /// trusted and for the hosts). It is the same for all servers. All but `off` need the feature `tls`. Default: `off`.
        pub tls: String,
        /// A file of PEM certificates to trust instead of the system's, with `tls = "verify"`.
        pub ca: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs `key` and `tls`.
        pub cert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `cert`.
        pub key: PathBuf,
    }
}

section! {
    /// The part of a [`LockConfig`] for the PostgreSQL backend. Each key is also a parameter of `postgres:` URLs.
    pub struct PostgresSection for lockkit_postgres::PostgresConfig, if feature = "postgres" {
        /// The creator of the schema `lockkit`: `auto`, the backend, or `manual`, you. Default: `auto`.
        pub schema: String,
        /// `disable`, `prefer` (encrypted if the server is), `require` (encrypted, the server proves nothing), `verify-ca` (encrypted,
        /// and the certificate has to be trusted) or `verify-full` (and be for that host). All but `disable` need the feature `tls`.
        /// Default: `disable`.
        pub sslmode: String,
        /// A file of PEM certificates to trust instead of the system's, with `sslmode` as `verify-ca`, `verify-full` or `require`, which
        /// then is as `verify-ca`.
        pub sslrootcert: PathBuf,
        /// A file with this client's certificate and those of its issuers (PEM), for roles that need one. Needs `sslkey`.
        pub sslcert: PathBuf,
        /// A file with the private key (PEM) of the certificate in `sslcert`.
        pub sslkey: PathBuf,
        /// The directory of the Unix socket to use instead of the URL's host.
        pub socket: PathBuf,
        /// The most connections at once for locks that are held or waited for, besides one or two that the client has for
        /// itself. Default: 50.
        pub max_connections: u32,
    }
}

/// Makes a method for each option, which sets it.
macro_rules! setters {
    ($($key:ident: $type:ty,)*) => {$(
        #[doc = concat!("Sets [`", stringify!($key), "`](#structfield.", stringify!($key), ").")]
        pub fn $key(mut self, $key: $type) -> Self {
            self.$key = Some($key.into());
            self
        }
    )*};
}

impl LockConfig {
    /// The bound on connecting where none is asked for.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Returns a config with this URL and nothing else set. [`connect`](Self::connect) reads the URL.
    pub fn new(url: impl Into<ServerUrl>) -> Self {
        Self {
            url: url.into(),
            ..Self::default()
        }
    }

    /// Reads and validates `url` at once, and moves its parameters to the fields they belong to.
    ///
    /// If the URL is good only with options that are set later, use [`new`](Self::new), which leaves that to
    /// [`resolved`](Self::resolved) or [`connect`](Self::connect).
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockkit::LockConfig;
    ///
    /// let config = LockConfig::from_url("memory:?ttl=10s&label=host%207")?;
    /// assert_eq!(config.url, "memory:");
    /// assert_eq!(config.ttl, Some(Duration::from_secs(10)));
    /// assert_eq!(config.label.as_deref(), Some("host 7"));
    /// # Ok::<(), lockkit::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`connect`](crate::connect) that need no I/O.
    pub fn from_url(url: &str) -> Result<Self> {
        let config = Self::read(url)?;
        config.validate()?;
        Ok(config)
    }

    /// Reads `url` without validating what it says: another part of the config may have the rest of it, or win over it.
    fn read(url: &str) -> Result<Self> {
        let parsed = Url::parse(url)?;
        let target = Target::of(&parsed)?;
        let mut config = Self::new(parsed.without_parameters());
        for (key, value) in parsed.parameters()? {
            let is_known = config
                .set(key, &value)
                .or_else(|| config.section(target.backend())?.set(key, &value));
            let Some(taken) = is_known else {
                let own = config.section(target.backend()).map_or(&[][..], |own| own.keys());
                let known: Vec<_> = config.keys().iter().chain(own).copied().collect();
                let key = key.escape_debug();
                return Err(parsed.invalid(format!(
                    "unknown parameter `{key}`; known are {}",
                    known.join(", ")
                )));
            };
            taken.map_err(|reason| parsed.invalid(format!("parameter `{key}`: {reason}")))?;
        }
        Ok(config)
    }

    /// Returns the options that only this backend has.
    fn section(&mut self, backend: &str) -> Option<&mut dyn Options> {
        match backend {
            "file" => Some(&mut self.file),
            "redis" => Some(&mut self.redis),
            "redlock" => Some(&mut self.redlock),
            "zookeeper" => Some(&mut self.zk),
            "mysql" => Some(&mut self.mysql),
            "etcd" => Some(&mut self.etcd),
            "postgres" => Some(&mut self.postgres),
            _ => None,
        }
    }

    /// Returns this config with the URL's parameters in the fields that are unset, validated as a whole: what
    /// [`connect`](Self::connect) goes by.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockkit::LockConfig;
    ///
    /// let config = LockConfig::new("memory:?ttl=10s&wait=3s").ttl(Duration::from_secs(20)).resolved()?;
    /// assert_eq!(config.ttl, Some(Duration::from_secs(20)));
    /// assert_eq!(config.wait, Some(Duration::from_secs(3)));
    /// # Ok::<(), lockkit::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`connect`](crate::connect) that need no I/O.
    pub fn resolved(&self) -> Result<Self> {
        let mut config = Self::read(&self.url)?;
        config.override_with(self);
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<()> {
        let mut options = self.acquire_options();
        options.ttl.get_or_insert(AcquireOptions::DEFAULT_TTL);
        options.validate()?;
        let millisecond = Duration::from_millis(1);
        if let Some(timeout) = self.connect_timeout {
            check_duration(
                "connect_timeout",
                timeout,
                millisecond..=AcquireOptions::MAX_DURATION,
            )?;
        }
        BackendInfo::check_namespace(self.namespace_or_default(), usize::MAX)?;
        let target = Target::of(&Url::parse(&self.url)?)?;
        if let Some(poll) = self.file.poll.filter(|_| target.backend() == "file") {
            check_duration("poll", poll, millisecond..=Duration::from_secs(60))?;
        }
        target.validate(self)
    }

    /// Returns the client's defaults for options that neither the call nor the lock sets.
    pub(crate) fn acquire_options(&self) -> AcquireOptions {
        let mut options = AcquireOptions::new();
        options.ttl = self.ttl;
        options.wait = self.wait;
        options.max_hold = self.max_hold;
        options.op_timeout = self.op_timeout;
        options.label = self.label.as_deref().map(Into::into);
        options.local_handoffs = self.local_handoffs;
        options
    }

    pub(crate) fn namespace_or_default(&self) -> &str {
        self.namespace
            .as_deref()
            .unwrap_or(BackendInfo::DEFAULT_NAMESPACE)
    }

    setters! {
        ttl: Duration,
        wait: Duration,
        max_hold: Duration,
        op_timeout: Duration,
        connect_timeout: Duration,
        namespace: impl Into<String>,
        label: impl Into<String>,
        local_handoffs: u32,
    }
}

impl FromStr for LockConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}
