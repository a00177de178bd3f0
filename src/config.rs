//! The configuration of a client.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, Result,
    spi::{BackendInfo, redacted_url},
};

use crate::{connect::Target, url::Url};

/// A lock server and the options to use it with: the part of an application's config file that is about locks.
///
/// With the feature `serde` it is `Deserialize`. Durations are written `"500ms"`, `"30s"` or `"1m 30s"`. An unknown key and a
/// bad value are errors that name the key. Apart from the tables of the backends, each key is also a parameter of the
/// URL. **A key that is set here wins over the parameter.**
///
/// ```
/// # #[cfg(feature = "serde")] {
/// # use std::time::Duration;
/// let config: lockkit::LockConfig = toml::from_str(
///     r#"
///     url = "file:///var/lib/app/locks"   # or redis://…, zk://…, mysql://…: nothing else changes
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
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
#[must_use]
pub struct LockConfig {
    /// The server, as [`connect`](crate::connect) takes it.
    pub url: String,
    /// The time for which a hold outlives its last renewal, 10 ms to a year. Default: 30 s.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::ttl"))]
    pub ttl: Option<Duration>,
    /// The time to wait for a lock that is taken. Default: for ever.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::wait"))]
    pub wait: Option<Duration>,
    /// The time after which one exchange with the server counts as failed. Default: 5 s.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::op_timeout"))]
    pub op_timeout: Option<Duration>,
    /// The time that [`connect`](Self::connect) may take. Default: 5 s.
    #[cfg_attr(
        feature = "serde",
        serde(default, deserialize_with = "named::connect_timeout")
    )]
    pub connect_timeout: Option<Duration>,
    /// A prefix that keeps applications apart that share a server: any of `A-Z a-z 0-9 . _ -`. Default: `lockkit`. May be empty.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::namespace"))]
    pub namespace: Option<String>,
    /// A name for the holder, for anyone who inspects the lock; at most 256 bytes.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::label"))]
    pub label: Option<String>,
    /// The number of times in a row that a release may pass an exclusive hold to the next waiter of this client, before
    /// the lock goes back to the server; at most 65,535. Default: 32, or 0 on a backend whose order is strict.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::local_handoffs"))]
    pub local_handoffs: Option<u32>,
    /// The options of the file backend. Ignored while the URL names another backend.
    #[cfg_attr(feature = "serde", serde(default))]
    pub file: FileSection,
    /// The options of the Redis backend. Ignored while the URL names another backend.
    #[cfg_attr(feature = "serde", serde(default))]
    pub redis: RedisSection,
    /// The options of Redlock. Ignored while the URL names another backend.
    #[cfg_attr(feature = "serde", serde(default))]
    pub redlock: RedlockSection,
    /// The options of the ZooKeeper backend. Ignored while the URL names another backend.
    #[cfg_attr(feature = "serde", serde(default))]
    pub zk: ZkSection,
    /// The options of the MySQL backend. Ignored while the URL names another backend.
    #[cfg_attr(feature = "serde", serde(default))]
    pub mysql: MysqlSection,
}

/// The part of a [`LockConfig`] for the file backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct FileSection {
    /// The interval at which a waiter looks again although nothing woke it, 1 ms to a minute. Default: 10 s with inotify
    /// (Linux), else 25 ms.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::poll"))]
    pub poll: Option<Duration>,
}

/// The part of a [`LockConfig`] for the Redis backend. Each key is also a parameter of `redis:` URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct RedisSection {
    /// The name of the master, where the URL names sentinels, separated by commas, rather than the server.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::sentinel"))]
    pub sentinel: Option<String>,
    /// The number of replicas that must have acknowledged a grant before it counts. It narrows the window in which a
    /// fail-over loses a lock, and does not close it. Default: 0.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::replicas"))]
    pub replicas: Option<u32>,
    /// The time to wait for these replicas. Default: 1 s.
    #[cfg_attr(
        feature = "serde",
        serde(default, deserialize_with = "named::replicas_timeout")
    )]
    pub replicas_timeout: Option<Duration>,
    /// A file of PEM certificates to trust instead of the system's, for `rediss:`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::ca"))]
    pub ca: Option<PathBuf>,
}

/// The part of a [`LockConfig`] for Redlock. Each key is also a parameter of `redlock:` URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct RedlockSection {
    /// The longest `ttl` that any client of these masters asks for, and the time for which a restarted master has no
    /// vote. All clients have to agree on it. Default: 60 s.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::max_ttl"))]
    pub max_ttl: Option<Duration>,
    /// States that the masters lose nothing that they have acknowledged, so that a restarted one votes at once. The
    /// client verifies `appendonly yes` and `appendfsync always`. Default: `false`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::durable"))]
    pub durable: Option<bool>,
    /// The time after which the other masters decide without a silent one, 1 ms to a minute. Default: 100 ms.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::master_timeout"))]
    pub master_timeout: Option<Duration>,
    /// Connects to the masters over TLS, which needs the feature `tls`. Default: `false`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::over_tls"))]
    pub tls: Option<bool>,
    /// A file of PEM certificates to trust instead of the system's, with `tls`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::ca"))]
    pub ca: Option<PathBuf>,
}

/// The part of a [`LockConfig`] for the ZooKeeper backend. Each key is also a parameter of `zk:` URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct ZkSection {
    /// The layout of a lock's nodes, on which all of its clients have to agree: `mutex` as Curator's
    /// `InterProcessMutex`, `readwrite` as its `InterProcessReadWriteLock`, `simple` for one node that everyone watches.
    /// Default: `mutex`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::nodes"))]
    pub nodes: Option<String>,
    /// The time for which the server keeps what this client holds after it last heard from it, at least five ticks. The
    /// server may have narrower limits. Default: the `ttl`, or five ticks if that is longer.
    #[cfg_attr(
        feature = "serde",
        serde(default, deserialize_with = "named::session_timeout")
    )]
    pub session_timeout: Option<Duration>,
    /// The servers' `tickTime`, or more. Default: 2 s.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::tick_time"))]
    pub tick_time: Option<Duration>,
    /// The right to touch the nodes that are created: `everyone`, or `creator` for the user in the URL alone. Default: `creator`
    /// if there is a user.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::access"))]
    pub access: Option<String>,
    /// The fate of the directories of locks that nobody uses: with `container` the server removes them, with `persistent`
    /// they stay. Default: `container`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::parents"))]
    pub parents: Option<String>,
}

/// The part of a [`LockConfig`] for the MySQL backend. Each key is also a parameter of `mysql:` URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct MysqlSection {
    /// The way to hold a lock: `for_update`, by a row lock and a connection of its own, or `lease`, by owner and expiry in a
    /// row, which has neither shared mode nor semaphores. Default: `for_update`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::mode"))]
    pub mode: Option<String>,
    /// The creator of the tables: `auto`, the backend, or `manual`, you. Default: `auto`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::schema"))]
    pub schema: Option<String>,
    /// `off`, `unverified` (encrypted, the server proves nothing) or `verify` (encrypted, and the certificate has to be trusted
    /// and for that host). All but `off` need the feature `tls`. Default: `off`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::tls"))]
    pub tls: Option<String>,
    /// A file of PEM certificates to trust instead of the system's, with `tls = "verify"`.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::ca"))]
    pub ca: Option<PathBuf>,
    /// The Unix socket to use instead of the URL's host and port.
    #[cfg_attr(feature = "serde", serde(default, deserialize_with = "named::socket"))]
    pub socket: Option<PathBuf>,
    /// The most connections at once for locks that are held or waited for, besides one or two that the client has for
    /// itself. Default: 100.
    #[cfg_attr(
        feature = "serde",
        serde(default, deserialize_with = "named::max_connections")
    )]
    pub max_connections: Option<u32>,
}

impl LockConfig {
    /// The bound on connecting where none is asked for.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Every option that all backends have, as key and URL parameter.
    const COMMON: [&str; 7] = [
        "ttl",
        "wait",
        "op_timeout",
        "connect_timeout",
        "namespace",
        "label",
        "local_handoffs",
    ];

    /// Returns a config with this URL and nothing else set. [`connect`](Self::connect) reads the URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ..Self::default()
        }
    }

    /// Reads `url` at once and moves its parameters to the fields they belong to.
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
        let parsed = Url::parse(url)?;
        let target = Target::of(&parsed)?;
        let own = target.own_parameters();
        let mut config = Self::new(parsed.without_parameters());
        for (key, value) in parsed.parameters()? {
            if !Self::COMMON.contains(&key) && !own.contains(&key) {
                let known: Vec<_> = Self::COMMON.iter().chain(own).copied().collect();
                let key = key.escape_debug();
                return Err(parsed.invalid(format!(
                    "unknown parameter `{key}`; known are {}",
                    known.join(", ")
                )));
            }
            config
                .set(target.backend(), key, &value)
                .map_err(|reason| parsed.invalid(format!("parameter `{key}`: {reason}")))?;
        }
        config.validate()?;
        Ok(config)
    }

    fn set(&mut self, backend: &str, key: &str, value: &str) -> Result<(), String> {
        match key {
            "ttl" => self.ttl = Some(duration(value)?),
            "wait" => self.wait = Some(duration(value)?),
            "op_timeout" => self.op_timeout = Some(duration(value)?),
            "connect_timeout" => self.connect_timeout = Some(duration(value)?),
            "namespace" => self.namespace = Some(value.to_owned()),
            "label" => self.label = Some(value.to_owned()),
            "local_handoffs" => self.local_handoffs = Some(count(value)?),
            "poll" => self.file.poll = Some(duration(value)?),
            "sentinel" => self.redis.sentinel = Some(value.to_owned()),
            "replicas" => self.redis.replicas = Some(count(value)?),
            "replicas_timeout" => self.redis.replicas_timeout = Some(duration(value)?),
            "max_ttl" => self.redlock.max_ttl = Some(duration(value)?),
            "durable" => self.redlock.durable = Some(flag(value)?),
            "master_timeout" => self.redlock.master_timeout = Some(duration(value)?),
            "tls" if backend == "redlock" => self.redlock.tls = Some(flag(value)?),
            "ca" if backend == "redlock" => self.redlock.ca = Some(value.into()),
            "ca" if backend == "mysql" => self.mysql.ca = Some(value.into()),
            "ca" => self.redis.ca = Some(value.into()),
            "nodes" => self.zk.nodes = Some(value.to_owned()),
            "session_timeout" => self.zk.session_timeout = Some(duration(value)?),
            "tick_time" => self.zk.tick_time = Some(duration(value)?),
            "access" => self.zk.access = Some(value.to_owned()),
            "parents" => self.zk.parents = Some(value.to_owned()),
            "mode" => self.mysql.mode = Some(value.to_owned()),
            "schema" => self.mysql.schema = Some(value.to_owned()),
            "tls" => self.mysql.tls = Some(value.to_owned()),
            "socket" => self.mysql.socket = Some(value.into()),
            "max_connections" => self.mysql.max_connections = Some(count(value)?),
            _ => return Err("it is unknown".to_owned()),
        }
        Ok(())
    }

    /// Returns this config with the URL's parameters in the fields that are unset.
    pub(crate) fn resolved(&self) -> Result<Self> {
        let of_url = Self::from_url(&self.url)?;
        let config = Self {
            url: of_url.url,
            ttl: self.ttl.or(of_url.ttl),
            wait: self.wait.or(of_url.wait),
            op_timeout: self.op_timeout.or(of_url.op_timeout),
            connect_timeout: self.connect_timeout.or(of_url.connect_timeout),
            namespace: self.namespace.clone().or(of_url.namespace),
            label: self.label.clone().or(of_url.label),
            local_handoffs: self.local_handoffs.or(of_url.local_handoffs),
            file: FileSection {
                poll: self.file.poll.or(of_url.file.poll),
            },
            redis: RedisSection {
                sentinel: self.redis.sentinel.clone().or(of_url.redis.sentinel),
                replicas: self.redis.replicas.or(of_url.redis.replicas),
                replicas_timeout: self.redis.replicas_timeout.or(of_url.redis.replicas_timeout),
                ca: self.redis.ca.clone().or(of_url.redis.ca),
            },
            redlock: RedlockSection {
                max_ttl: self.redlock.max_ttl.or(of_url.redlock.max_ttl),
                durable: self.redlock.durable.or(of_url.redlock.durable),
                master_timeout: self.redlock.master_timeout.or(of_url.redlock.master_timeout),
                tls: self.redlock.tls.or(of_url.redlock.tls),
                ca: self.redlock.ca.clone().or(of_url.redlock.ca),
            },
            zk: ZkSection {
                nodes: self.zk.nodes.clone().or(of_url.zk.nodes),
                session_timeout: self.zk.session_timeout.or(of_url.zk.session_timeout),
                tick_time: self.zk.tick_time.or(of_url.zk.tick_time),
                access: self.zk.access.clone().or(of_url.zk.access),
                parents: self.zk.parents.clone().or(of_url.zk.parents),
            },
            mysql: MysqlSection {
                mode: self.mysql.mode.clone().or(of_url.mysql.mode),
                schema: self.mysql.schema.clone().or(of_url.mysql.schema),
                tls: self.mysql.tls.clone().or(of_url.mysql.tls),
                ca: self.mysql.ca.clone().or(of_url.mysql.ca),
                socket: self.mysql.socket.clone().or(of_url.mysql.socket),
                max_connections: self.mysql.max_connections.or(of_url.mysql.max_connections),
            },
        };
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<()> {
        self.acquire_options().validate()?;
        if let Some(timeout) = self.connect_timeout {
            between("connect_timeout", timeout, AcquireOptions::MAX_DURATION)?;
        }
        if let Some(poll) = self.file.poll {
            between("poll", poll, Duration::from_secs(60))?;
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        match &self.namespace {
            Some(namespace) if !namespace.chars().all(allowed) => Err(Error::invalid_option(
                "namespace",
                format!("{namespace:?} has characters other than A-Z a-z 0-9 . _ -"),
            )),
            _ => Target::of(&Url::parse(&self.url)?)?.validate(self),
        }
    }

    /// Returns the client's defaults for options that neither the call nor the lock sets.
    pub(crate) fn acquire_options(&self) -> AcquireOptions {
        let mut options = AcquireOptions::new();
        options.ttl = self.ttl;
        options.wait = self.wait;
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

    /// Sets [`ttl`](#structfield.ttl).
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets [`wait`](#structfield.wait).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets [`op_timeout`](#structfield.op_timeout).
    pub fn op_timeout(mut self, op_timeout: Duration) -> Self {
        self.op_timeout = Some(op_timeout);
        self
    }

    /// Sets [`connect_timeout`](#structfield.connect_timeout).
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = Some(connect_timeout);
        self
    }

    /// Sets [`namespace`](#structfield.namespace).
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Sets [`label`](#structfield.label).
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets [`local_handoffs`](#structfield.local_handoffs).
    pub fn local_handoffs(mut self, times: u32) -> Self {
        self.local_handoffs = Some(times);
        self
    }
}

impl FromStr for LockConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}

impl fmt::Debug for LockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            ttl,
            wait,
            op_timeout,
            connect_timeout,
            namespace,
            label,
            local_handoffs,
            file,
            redis,
            redlock,
            zk,
            mysql,
        } = self;
        f.debug_struct("LockConfig")
            .field("url", &redacted_url(url))
            .field("ttl", ttl)
            .field("wait", wait)
            .field("op_timeout", op_timeout)
            .field("connect_timeout", connect_timeout)
            .field("namespace", namespace)
            .field("label", label)
            .field("local_handoffs", local_handoffs)
            .field("file", file)
            .field("redis", redis)
            .field("redlock", redlock)
            .field("zk", zk)
            .field("mysql", mysql)
            .finish()
    }
}

fn between(option: &'static str, value: Duration, max: Duration) -> Result<()> {
    let min = Duration::from_millis(1);
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let max = humantime::format_duration(max);
    Err(Error::invalid_option(
        option,
        format!("{value:?} is not between 1ms and {max}"),
    ))
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{text:?} is not a duration such as 30s or 500ms ({error})"))
}

fn flag(text: &str) -> Result<bool, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is neither `true` nor `false`"))
}

fn count(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|error| format!("{text:?} is not a whole number ({error})"))
}

/// Reads each option with serde. Not every format's errors say where they happened, so these name the key themselves.
#[cfg(feature = "serde")]
mod named {
    use std::{fmt::Display, path::PathBuf, time::Duration};

    use serde::{Deserialize, Deserializer, de::Error};

    macro_rules! durations {
        ($($key:ident)*) => {$(
            pub(super) fn $key<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
                let text = text(stringify!($key), value)?;
                super::duration(&text).map(Some).map_err(|reason| wrong(stringify!($key), reason))
            }
        )*};
    }

    macro_rules! texts {
        ($($key:ident)*) => {$(
            pub(super) fn $key<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
                text(stringify!($key), value).map(Some)
            }
        )*};
    }

    macro_rules! counts {
        ($($key:ident)*) => {$(
            pub(super) fn $key<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u32>, D::Error> {
                u32::deserialize(value).map(Some).map_err(|error| wrong(stringify!($key), error))
            }
        )*};
    }

    macro_rules! paths {
        ($($key:ident)*) => {$(
            pub(super) fn $key<'de, D: Deserializer<'de>>(value: D) -> Result<Option<PathBuf>, D::Error> {
                text(stringify!($key), value).map(|path| Some(path.into()))
            }
        )*};
    }

    macro_rules! flags {
        ($($function:ident $key:literal)*) => {$(
            pub(super) fn $function<'de, D: Deserializer<'de>>(value: D) -> Result<Option<bool>, D::Error> {
                bool::deserialize(value).map(Some).map_err(|error| wrong($key, error))
            }
        )*};
    }

    durations!(ttl wait op_timeout connect_timeout poll replicas_timeout max_ttl master_timeout session_timeout tick_time);
    texts!(namespace label sentinel nodes access parents mode schema tls);
    counts!(local_handoffs replicas max_connections);
    paths!(ca socket);
    flags!(durable "durable" over_tls "tls");

    fn text<'de, D: Deserializer<'de>>(key: &str, value: D) -> Result<String, D::Error> {
        String::deserialize(value).map_err(|error| wrong(key, error))
    }

    fn wrong<E: Error>(key: &str, reason: impl Display) -> E {
        E::custom(format_args!("`{key}`: {reason}"))
    }
}
