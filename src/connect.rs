//! From a URL to a client.

use std::io;

use lockkit_core::{BoxError, Error, LockClient, MemoryBackend, Result, spi::redacted_url};

use crate::{LockConfig, url::Url};

/// Connects to the lock server that `url` names, with the options in its parameters.
///
/// | URL | backend | cargo feature |
/// |---|---|---|
/// | `memory:` | one space in this process, for tests and single-process programs | |
/// | `file:///var/lib/app/locks` | files in a directory of this host, on Unix | `file` (default) |
/// | `redis://user:pass@host:6379/0`, `rediss://…` | one Redis master | `redis`, and `tls` for `rediss:` |
/// | `redlock://user:pass@a:6379,b:6379,c:6379` | a majority of independent Redis masters | `redis`, and `tls` for `?tls=true` |
/// | `zk://user:pass@zk1:2181,zk2:2181/chroot` | a ZooKeeper ensemble | `zk` |
/// | `mysql://user:pass@host:3306/database` | MySQL or MariaDB | `mysql`, and `tls` for `?tls=verify` |
///
/// Every URL takes the parameters `ttl`, `wait`, `op_timeout`, `connect_timeout`, `namespace`, `label` and
/// `local_handoffs`, which [`LockConfig`] describes. `file:` URLs also take the fields of
/// [`FileSection`](crate::FileSection), `redis:` URLs those of [`RedisSection`](crate::RedisSection), `redlock:` URLs those
/// of [`RedlockSection`](crate::RedlockSection), `zk:` URLs those of [`ZkSection`](crate::ZkSection), and `mysql:` URLs those
/// of [`MysqlSection`](crate::MysqlSection). Durations are written `500ms`, `30s` or `1m 30s` (a space in a URL is `%20`).
///
/// Make one client per process and server, and clone it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkit::Result<()> {
/// let client = lockkit::connect("memory:?namespace=billing&ttl=10s").await?;
/// let guard = client.lock("orders/42")?.acquire().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// - [`Error::InvalidUrl`] or [`Error::InvalidOptions`] names the part or parameter that is wrong.
/// - [`Error::UnknownScheme`] lists the known schemes.
/// - [`Error::FeatureDisabled`] names the cargo feature to enable.
/// - [`Error::Backend`] if the server cannot be used, or does not reply within the `connect_timeout` (5 s).
///
/// No error contains credentials of the URL.
///
/// # Cancel safety
/// Dropping the future gives up the connection. Nothing is held.
pub async fn connect(url: &str) -> Result<LockClient> {
    LockConfig::from_url(url)?.connect().await
}

impl LockConfig {
    /// Connects to the server that [`url`](Self#structfield.url) names, with these options as the client's defaults.
    ///
    /// # Errors
    /// Those of [`connect`].
    ///
    /// # Cancel safety
    /// Dropping the future gives up the connection. Nothing is held.
    pub async fn connect(&self) -> Result<LockClient> {
        let config = self.resolved()?;
        let target = Target::of(&Url::parse(&config.url)?)?;
        let within = config.connect_timeout.unwrap_or(Self::DEFAULT_CONNECT_TIMEOUT);
        let backend = target.backend();
        let opened = tokio::time::timeout(within, target.open(&config)).await;
        let opened = opened.unwrap_or_else(|_| {
            let reason = format!("no answer within the connect_timeout of {within:?}");
            let cause = io::Error::new(io::ErrorKind::TimedOut, reason);
            Err(Error::transient(backend, "connect", cause))
        });
        let client = opened.map_err(|error| unreachable(error, &config))?;
        client.with_defaults(config.acquire_options())
    }
}

/// The address that could not be reached. Few causes name it.
#[derive(Debug, thiserror::Error)]
#[error("{at}")]
struct Unreachable {
    /// Without credentials.
    at: String,
    source: BoxError,
}

fn unreachable(error: Error, config: &LockConfig) -> Error {
    match error {
        Error::Backend {
            backend,
            operation: operation @ "connect",
            transient,
            source,
            ..
        } => {
            let mut at = redacted_url(&config.url);
            if let ("mysql", Some(socket)) = (backend, &config.mysql.socket) {
                at = format!("{at}, socket {}", socket.display());
            }
            let source = Unreachable { at, source };
            if transient {
                Error::transient(backend, operation, source)
            } else {
                Error::permanent(backend, operation, source)
            }
        }
        other => other,
    }
}

/// The backend and the server that a URL names.
pub(crate) enum Target {
    Memory,
    #[cfg(all(feature = "file", unix))]
    File {
        dir: std::path::PathBuf,
    },
    #[cfg(feature = "redis")]
    Redis {
        url: String,
    },
    #[cfg(feature = "redis")]
    Redlock {
        url: String,
    },
    #[cfg(feature = "zk")]
    Zk {
        servers: String,
        auth: Option<lockkit_zk::Digest>,
    },
    #[cfg(feature = "mysql")]
    Mysql {
        url: String,
    },
}

impl Target {
    const KNOWN: &str = "memory, file, redis, rediss, redlock, zk, mysql";

    /// # Errors
    /// For a scheme that no backend has, one whose backend is not in this build, and an address it cannot be.
    pub(crate) fn of(url: &Url<'_>) -> Result<Self> {
        match url.scheme.as_str() {
            "memory" => memory(url),
            #[cfg(all(feature = "file", unix))]
            "file" => Ok(Self::File { dir: directory(url)? }),
            #[cfg(all(feature = "file", not(unix)))]
            "file" => Err(Error::unsupported(
                "file",
                "this system; the file backend needs a Unix",
            )),
            #[cfg(not(feature = "file"))]
            "file" => Err(Error::feature_disabled("file", "file")),
            #[cfg(feature = "redis")]
            "redis" | "rediss" => Ok(Self::Redis {
                url: url.without_parameters().to_owned(),
            }),
            #[cfg(feature = "redis")]
            "redlock" => Ok(Self::Redlock {
                url: url.without_parameters().to_owned(),
            }),
            #[cfg(not(feature = "redis"))]
            scheme @ ("redis" | "rediss" | "redlock") => Err(Error::feature_disabled(scheme, "redis")),
            #[cfg(feature = "zk")]
            "zk" => ensemble(url),
            #[cfg(not(feature = "zk"))]
            "zk" => Err(Error::feature_disabled("zk", "zk")),
            #[cfg(feature = "mysql")]
            "mysql" => Ok(Self::Mysql {
                url: url.without_parameters().to_owned(),
            }),
            #[cfg(not(feature = "mysql"))]
            "mysql" => Err(Error::feature_disabled("mysql", "mysql")),
            scheme => Err(Error::unknown_scheme(scheme, Self::KNOWN)),
        }
    }

    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            #[cfg(all(feature = "file", unix))]
            Self::File { .. } => "file",
            #[cfg(feature = "redis")]
            Self::Redis { .. } => "redis",
            #[cfg(feature = "redis")]
            Self::Redlock { .. } => "redlock",
            #[cfg(feature = "zk")]
            Self::Zk { .. } => "zookeeper",
            #[cfg(feature = "mysql")]
            Self::Mysql { .. } => "mysql",
        }
    }

    /// Checks that the backend can be opened with this config, as far as that is possible without I/O.
    #[cfg_attr(
        not(any(feature = "redis", feature = "zk", feature = "mysql")),
        expect(
            clippy::unnecessary_wraps,
            reason = "the backends that are built in take anything"
        )
    )]
    pub(crate) fn validate(&self, config: &LockConfig) -> Result<()> {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis { url } => redis(url, config).validate()?,
            #[cfg(feature = "redis")]
            Self::Redlock { url } => redlock(url, config).validate()?,
            #[cfg(feature = "zk")]
            Self::Zk { servers, auth } => zookeeper(servers, auth.as_ref(), config)?.validate()?,
            #[cfg(feature = "mysql")]
            Self::Mysql { url } => mysql(url, config)?.validate()?,
            _ => _ = config,
        }
        Ok(())
    }

    #[cfg_attr(
        not(any(
            all(feature = "file", unix),
            feature = "redis",
            feature = "zk",
            feature = "mysql"
        )),
        expect(clippy::unused_async, reason = "only memory is opened without I/O")
    )]
    async fn open(self, config: &LockConfig) -> Result<LockClient> {
        let namespace = config.namespace_or_default();
        Ok(match self {
            Self::Memory => LockClient::new(MemoryBackend::shared(namespace)),
            #[cfg(all(feature = "file", unix))]
            Self::File { dir } => {
                let mut file = lockkit_file::FileConfig::new(dir);
                namespace.clone_into(&mut file.namespace);
                file.poll = config.file.poll;
                LockClient::new(lockkit_file::FileBackend::open(file).await?)
            }
            #[cfg(feature = "redis")]
            Self::Redis { url } => {
                LockClient::new(lockkit_redis::RedisBackend::connect(redis(&url, config)).await?)
            }
            #[cfg(feature = "redis")]
            Self::Redlock { url } => {
                LockClient::new(lockkit_redis::RedlockBackend::connect(redlock(&url, config)).await?)
            }
            #[cfg(feature = "zk")]
            Self::Zk { servers, auth } => {
                let config = zookeeper(&servers, auth.as_ref(), config)?;
                LockClient::new(lockkit_zk::ZkBackend::connect(config).await?)
            }
            #[cfg(feature = "mysql")]
            Self::Mysql { url } => {
                LockClient::new(lockkit_mysql::MySqlBackend::connect(mysql(&url, config)?).await?)
            }
        })
    }
}

fn memory(url: &Url<'_>) -> Result<Target> {
    if url.authority.is_empty() && url.path.is_empty() {
        return Ok(Target::Memory);
    }
    Err(url.invalid(
        "the memory backend has no address: write `memory:`, and keep applications apart with `memory:?namespace=…`",
    ))
}

#[cfg(feature = "redis")]
fn redis(url: &str, config: &LockConfig) -> lockkit_redis::RedisConfig {
    let section = &config.redis;
    let mut redis = lockkit_redis::RedisConfig::new(url);
    config.namespace_or_default().clone_into(&mut redis.namespace);
    redis.sentinel.clone_from(&section.sentinel);
    redis.replicas = section.replicas.unwrap_or(redis.replicas);
    redis.replicas_timeout = section.replicas_timeout.unwrap_or(redis.replicas_timeout);
    redis.ca.clone_from(&section.ca);
    redis
}

#[cfg(feature = "redis")]
fn redlock(url: &str, config: &LockConfig) -> lockkit_redis::RedlockConfig {
    let section = &config.redlock;
    let mut redlock = lockkit_redis::RedlockConfig::new(url);
    config.namespace_or_default().clone_into(&mut redlock.namespace);
    redlock.max_ttl = section.max_ttl.unwrap_or(redlock.max_ttl);
    redlock.durable = section.durable.unwrap_or(redlock.durable);
    redlock.master_timeout = section.master_timeout.unwrap_or(redlock.master_timeout);
    redlock.tls = section.tls.unwrap_or(redlock.tls);
    redlock.ca.clone_from(&section.ca);
    redlock
}

#[cfg(feature = "zk")]
fn ensemble(url: &Url<'_>) -> Result<Target> {
    let decoded = |text: &str, what: &str| match percent_encoding::percent_decode_str(text).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => Err(url.invalid(format!("the {what} is not UTF-8"))),
    };
    if url.path.contains('@') {
        // Most likely a password with a `/` in it. Reading on would quote parts of it as a host.
        return Err(url.invalid(
            "there is an `@` in the path; write a `/` in a password as %2F, an `@` in a path as %40",
        ));
    }
    let (user, hosts) = match url.authority.rsplit_once('@') {
        Some((user, hosts)) => (Some(user), hosts),
        None => (None, url.authority),
    };
    if hosts.is_empty() {
        return Err(url.invalid("it names no server, as in zk://zk1:2181,zk2:2181/services"));
    }
    let auth = match user.map(|user| user.split_once(':')) {
        None => None,
        Some(Some((user, password))) => Some(lockkit_zk::Digest::new(
            decoded(user, "user")?,
            decoded(password, "password")?,
        )),
        Some(None) => return Err(url.invalid("a user needs a password: zk://user:password@host")),
    };
    let servers = format!("{hosts}{}", decoded(url.path, "path")?);
    Ok(Target::Zk { servers, auth })
}

#[cfg(feature = "zk")]
fn zookeeper(
    servers: &str,
    auth: Option<&lockkit_zk::Digest>,
    config: &LockConfig,
) -> Result<lockkit_zk::ZkConfig> {
    use lockkit_zk::ZkConfig;

    let section = &config.zk;
    let mut zk = ZkConfig::new(servers);
    config.namespace_or_default().clone_into(&mut zk.namespace);
    zk.auth = auth.cloned();
    zk.access = section.access.as_deref().map(str::parse).transpose()?;
    if let Some(nodes) = &section.nodes {
        zk.nodes = nodes.parse()?;
    }
    if let Some(parents) = &section.parents {
        zk.parents = parents.parse()?;
    }
    zk.tick_time = section.tick_time.unwrap_or(zk.tick_time);
    zk.session_timeout = section.session_timeout.unwrap_or_else(|| {
        // What a hold outlives its holder by.
        let ttl = config.ttl.unwrap_or(zk.session_timeout);
        ttl.max(ZkConfig::min_session_timeout(zk.tick_time))
            .min(ZkConfig::MAX_SESSION_TIMEOUT)
    });
    Ok(zk)
}

#[cfg(feature = "mysql")]
fn mysql(url: &str, config: &LockConfig) -> Result<lockkit_mysql::MySqlConfig> {
    fn word<T: std::str::FromStr<Err = String> + Default>(
        option: &'static str,
        word: Option<&String>,
    ) -> Result<T> {
        word.map_or_else(
            || Ok(T::default()),
            |word| {
                word.parse()
                    .map_err(|reason: String| Error::invalid_option(option, reason))
            },
        )
    }
    let section = &config.mysql;
    let mut mysql = lockkit_mysql::MySqlConfig::new(url);
    config.namespace_or_default().clone_into(&mut mysql.namespace);
    mysql.mode = word("mode", section.mode.as_ref())?;
    mysql.schema = word("schema", section.schema.as_ref())?;
    mysql.tls = word("tls", section.tls.as_ref())?;
    mysql.ca.clone_from(&section.ca);
    mysql.socket.clone_from(&section.socket);
    mysql.max_connections = section.max_connections.unwrap_or(mysql.max_connections);
    Ok(mysql)
}

#[cfg(all(feature = "file", unix))]
fn directory(url: &Url<'_>) -> Result<std::path::PathBuf> {
    use std::os::unix::ffi::OsStringExt;

    if !url.authority.is_empty() {
        return Err(url.invalid(
            "a file URL names a directory of this host and has no host part; three slashes make an absolute path: \
             file:///var/lib/app/locks",
        ));
    }
    if !url.path.starts_with('/') {
        return Err(url.invalid("the directory has to be absolute, as in file:///var/lib/app/locks"));
    }
    let bytes: Vec<u8> = percent_encoding::percent_decode_str(url.path).collect();
    if bytes.contains(&0) {
        return Err(url.invalid("a directory cannot have a NUL byte (%00) in its name"));
    }
    // On Unix a path is any bytes, not only UTF-8.
    Ok(std::ffi::OsString::from_vec(bytes).into())
}
