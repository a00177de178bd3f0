//! From a URL to a client.

use std::{io, iter};

use lockkit_core::{
    BoxError, Error, LockClient, MemoryBackend, Result,
    spi::{chain, redacted_url},
};

use crate::{LockConfig, url::Url};

/// Connects to the lock server that `url` names, with the options in its parameters.
///
/// | URL | backend | cargo feature |
/// |---|---|---|
/// | `memory:` | one space in this process, for tests and single-process programs | |
/// | `file:///var/lib/app/locks` | files in a directory of this host, on Unix | `file` (default) |
/// | `redis://user:pass@host:6379/0`, `rediss://…`, `redis+unix:///run/redis.sock` | one Redis master | `redis`, and `tls` for `rediss:` |
/// | `redlock://user:pass@a:6379,b:6379,c:6379` | a majority of independent Redis masters | `redis`, and `tls` for `?tls=true` |
/// | `zk://user:pass@zk1:2181,zk2:2181/chroot` | a ZooKeeper ensemble | `zk`, and `tls` for `?tls=verify` |
/// | `mysql://user:pass@host:3306/database` | MySQL or MariaDB | `mysql`, and `tls` for `?tls=verify` |
/// | `etcd://user:pass@etcd1:2379,etcd2:2379/prefix` | an etcd cluster | `etcd`, and `tls` for `?tls=verify` |
/// | `postgres://user:pass@host:5432/database`, `postgresql://…` | PostgreSQL | `postgres`, and `tls` for `?sslmode=verify-full` |
///
/// Every URL takes the parameters `ttl`, `wait`, `op_timeout`, `connect_timeout`, `namespace`, `label` and
/// `local_handoffs`, which [`LockConfig`] describes. `file:` URLs also take the fields of
/// [`FileSection`](crate::FileSection), `redis:` URLs those of [`RedisSection`](crate::RedisSection), `redlock:` URLs those
/// of [`RedlockSection`](crate::RedlockSection), `zk:` URLs those of [`ZkSection`](crate::ZkSection), `mysql:` URLs those
/// of [`MysqlSection`](crate::MysqlSection), `etcd:` URLs those of [`EtcdSection`](crate::EtcdSection), and `postgres:` URLs those of [`PostgresSection`](crate::PostgresSection). Durations are written `500ms`, `30s` or `1m 30s` (a space in a URL is `%20`).
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
    LockConfig::new(url).connect().await
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
        // The futures of all backends are large, and a caller's future would contain the largest.
        let opened = tokio::time::timeout(within, Box::pin(target.open(&config))).await;
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
            let socket = match backend {
                "mysql" => config.mysql.socket.as_ref(),
                "postgres" => config.postgres.socket.as_ref(),
                _ => None,
            };
            if let Some(socket) = socket {
                at = format!("{at}, socket {}", socket.display());
            }
            let source: BoxError = match advice(&*source, is_encrypted(backend, config)) {
                // The paths of the file backend are no servers.
                Some(advice) if backend != "file" => {
                    let words = chain(&*source);
                    format!("{at}: {words} ({advice})").into()
                }
                _ => Unreachable { at, source }.into(),
            };
            if transient {
                Error::transient(backend, operation, source)
            } else {
                Error::permanent(backend, operation, source)
            }
        }
        other => other,
    }
}

/// Returns whether the connection has to be encrypted.
fn is_encrypted(backend: &str, config: &LockConfig) -> bool {
    let mode = match backend {
        "redlock" => return config.redlock.tls == Some(true),
        "zookeeper" => &config.zk.tls,
        "mysql" => &config.mysql.tls,
        "etcd" => &config.etcd.tls,
        "postgres" => &config.postgres.sslmode,
        _ => {
            let scheme = config.url.split(':').next().unwrap_or_default();
            return scheme.eq_ignore_ascii_case("rediss");
        }
    };
    mode.as_deref()
        .is_some_and(|mode| !matches!(mode, "off" | "disable" | "prefer"))
}

/// Returns what to look at if a server cannot be reached. What its backend says of another failure has advice of its own. Whoever wants
/// the connection encrypted is not told to look at that: somebody may be in the way who wishes that it were not.
fn advice(error: &(dyn std::error::Error + 'static), is_encrypted: bool) -> Option<&'static str> {
    use io::ErrorKind as Kind;

    let cause = iter::successors(Some(error), |error| error.source())
        .find_map(|error| error.downcast_ref::<io::Error>().map(io::Error::kind));
    let words = chain(error);
    // What several servers say has come together as text.
    let says = |some: &[&str]| {
        cause.is_none_or(|kind| kind == Kind::Other)
            && !words.contains("tls=verify")
            && some.iter().any(|part| words.contains(part))
    };
    if words.contains("while TLS began") {
        return None;
    }
    if words.contains("failed to lookup address") {
        return Some("check the host in the URL");
    }
    if cause == Some(Kind::ConnectionRefused) || says(&["Connection refused"]) {
        return Some("is the server running, and is this its port?");
    }
    if cause == Some(Kind::NotFound) {
        return Some("is this its socket?");
    }
    if cause == Some(Kind::TimedOut) || says(&["does not answer within"]) {
        return Some(if is_encrypted {
            "does the server run, and is this its port for TLS?"
        } else {
            "does the server run, is this its port, and is TLS on at both ends or at neither?"
        });
    }
    let broke = matches!(
        cause,
        Some(
            Kind::ConnectionReset
                | Kind::ConnectionAborted
                | Kind::BrokenPipe
                | Kind::UnexpectedEof
                | Kind::InvalidData
        )
    );
    (broke || says(&["reset by peer", "broken pipe"])).then_some(if is_encrypted {
        "is this the server's port for TLS?"
    } else {
        "is this the server's port, and is TLS on at both ends or at neither?"
    })
}

/// The backend that a URL names, with its config.
pub(crate) enum Target {
    Memory,
    #[cfg(all(feature = "file", unix))]
    File(lockkit_file::FileConfig),
    #[cfg(feature = "redis")]
    Redis(lockkit_redis::RedisConfig),
    #[cfg(feature = "redis")]
    Redlock(lockkit_redis::RedlockConfig),
    #[cfg(feature = "zk")]
    Zk(Box<lockkit_zk::ZkConfig>),
    #[cfg(feature = "mysql")]
    Mysql(lockkit_mysql::MySqlConfig),
    #[cfg(feature = "etcd")]
    Etcd(Box<lockkit_etcd::EtcdConfig>),
    #[cfg(feature = "postgres")]
    Postgres(lockkit_postgres::PostgresConfig),
}

impl Target {
    const KNOWN: &str =
        "memory, file, redis, rediss, redis+unix, redlock, zk, mysql, etcd, postgres, postgresql";

    /// Returns the backend with this address, and without options.
    ///
    /// # Errors
    /// For a scheme that no backend has, one whose backend is not in this build, and an address it cannot be.
    pub(crate) fn of(url: &Url<'_>) -> Result<Self> {
        match url.scheme.as_str() {
            "memory" => memory(url),
            #[cfg(all(feature = "file", unix))]
            "file" => Ok(Self::File(lockkit_file::FileConfig::new(directory(url)?))),
            #[cfg(all(feature = "file", not(unix)))]
            "file" => Err(Error::unsupported(
                "file",
                "this system; the file backend needs a Unix",
            )),
            #[cfg(not(feature = "file"))]
            "file" => Err(Error::feature_disabled("file", "file")),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" => Ok(Self::Redis(lockkit_redis::RedisConfig::new(
                url.without_parameters(),
            ))),
            #[cfg(feature = "redis")]
            "redlock" => Ok(Self::Redlock(lockkit_redis::RedlockConfig::new(
                url.without_parameters(),
            ))),
            #[cfg(not(feature = "redis"))]
            scheme @ ("redis" | "rediss" | "redis+unix" | "redlock") => {
                let lacks_tls = scheme == "rediss" && cfg!(not(feature = "tls"));
                let missing = if lacks_tls { "redis,tls" } else { "redis" };
                Err(Error::feature_disabled(scheme, missing))
            }
            #[cfg(feature = "zk")]
            "zk" => {
                let (servers, auth) = members(url, "zk://zk1:2181,zk2:2181/services")?;
                let mut zk = lockkit_zk::ZkConfig::new(servers);
                zk.auth = auth.map(|(user, password)| lockkit_zk::Digest::new(user, password));
                Ok(Self::Zk(Box::new(zk)))
            }
            #[cfg(not(feature = "zk"))]
            "zk" => Err(Error::feature_disabled("zk", "zk")),
            #[cfg(feature = "mysql")]
            "mysql" => Ok(Self::Mysql(lockkit_mysql::MySqlConfig::new(
                url.without_parameters(),
            ))),
            #[cfg(not(feature = "mysql"))]
            "mysql" => Err(Error::feature_disabled("mysql", "mysql")),
            #[cfg(feature = "etcd")]
            "etcd" => {
                let (servers, auth) = members(url, "etcd://etcd1:2379,etcd2:2379/services")?;
                let mut etcd = lockkit_etcd::EtcdConfig::new(servers);
                etcd.auth = auth.map(|(user, password)| lockkit_etcd::Credentials::new(user, password));
                Ok(Self::Etcd(Box::new(etcd)))
            }
            #[cfg(not(feature = "etcd"))]
            "etcd" => Err(Error::feature_disabled("etcd", "etcd")),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Ok(Self::Postgres(lockkit_postgres::PostgresConfig::new(
                url.without_parameters(),
            ))),
            #[cfg(not(feature = "postgres"))]
            scheme @ ("postgres" | "postgresql") => Err(Error::feature_disabled(scheme, "postgres")),
            "pg" => {
                Err(url.invalid("PostgreSQL is `postgres:`, as in postgres://user:password@host/database"))
            }
            scheme => Err(Error::unknown_scheme(scheme, Self::KNOWN)),
        }
    }

    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            #[cfg(all(feature = "file", unix))]
            Self::File(_) => "file",
            #[cfg(feature = "redis")]
            Self::Redis(_) => "redis",
            #[cfg(feature = "redis")]
            Self::Redlock(_) => "redlock",
            #[cfg(feature = "zk")]
            Self::Zk(_) => "zookeeper",
            #[cfg(feature = "mysql")]
            Self::Mysql(_) => "mysql",
            #[cfg(feature = "etcd")]
            Self::Etcd(_) => "etcd",
            #[cfg(feature = "postgres")]
            Self::Postgres(_) => "postgres",
        }
    }

    /// Returns the backend with the options of `config`.
    #[cfg_attr(
        not(any(
            all(feature = "file", unix),
            feature = "redis",
            feature = "zk",
            feature = "mysql",
            feature = "etcd",
            feature = "postgres"
        )),
        expect(clippy::unnecessary_wraps, reason = "memory takes anything")
    )]
    fn with_options(mut self, config: &LockConfig) -> Result<Self> {
        let namespace = config.namespace_or_default();
        match &mut self {
            Self::Memory => _ = namespace,
            #[cfg(all(feature = "file", unix))]
            Self::File(file) => config.file.apply(file, namespace)?,
            #[cfg(feature = "redis")]
            Self::Redis(redis) => config.redis.apply(redis, namespace)?,
            #[cfg(feature = "redis")]
            Self::Redlock(redlock) => config.redlock.apply(redlock, namespace)?,
            #[cfg(feature = "zk")]
            Self::Zk(zk) => {
                config.zk.apply(zk, namespace)?;
                if config.zk.session_timeout.is_none() {
                    // The time by which a hold outlives its holder.
                    let ttl = config.ttl.unwrap_or(zk.session_timeout);
                    zk.session_timeout = ttl
                        .max(lockkit_zk::ZkConfig::min_session_timeout(zk.tick_time))
                        .min(lockkit_zk::ZkConfig::MAX_SESSION_TIMEOUT);
                }
            }
            #[cfg(feature = "mysql")]
            Self::Mysql(mysql) => config.mysql.apply(mysql, namespace)?,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => config.etcd.apply(etcd, namespace)?,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => config.postgres.apply(postgres, namespace)?,
        }
        Ok(self)
    }

    /// Checks that the backend can be opened with this config, as far as that is possible without I/O.
    pub(crate) fn validate(self, config: &LockConfig) -> Result<()> {
        match self.with_options(config)? {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => redis.validate(),
            #[cfg(feature = "redis")]
            Self::Redlock(redlock) => redlock.validate(),
            #[cfg(feature = "zk")]
            Self::Zk(zk) => zk.validate(),
            #[cfg(feature = "mysql")]
            Self::Mysql(mysql) => mysql.validate(),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.validate(),
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.validate(),
            _ => Ok(()),
        }
    }

    #[cfg_attr(
        not(any(
            all(feature = "file", unix),
            feature = "redis",
            feature = "zk",
            feature = "mysql",
            feature = "etcd",
            feature = "postgres"
        )),
        expect(clippy::unused_async, reason = "only memory is opened without I/O")
    )]
    async fn open(self, config: &LockConfig) -> Result<LockClient> {
        Ok(match self.with_options(config)? {
            Self::Memory => LockClient::new(MemoryBackend::shared(config.namespace_or_default())),
            #[cfg(all(feature = "file", unix))]
            Self::File(file) => LockClient::new(lockkit_file::FileBackend::open(file).await?),
            #[cfg(feature = "redis")]
            Self::Redis(redis) => LockClient::new(lockkit_redis::RedisBackend::connect(redis).await?),
            #[cfg(feature = "redis")]
            Self::Redlock(redlock) => LockClient::new(lockkit_redis::RedlockBackend::connect(redlock).await?),
            #[cfg(feature = "zk")]
            Self::Zk(zk) => LockClient::new(lockkit_zk::ZkBackend::connect(*zk).await?),
            #[cfg(feature = "mysql")]
            Self::Mysql(mysql) => LockClient::new(lockkit_mysql::MySqlBackend::connect(mysql).await?),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => LockClient::new(lockkit_etcd::EtcdBackend::connect(*etcd).await?),
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => {
                LockClient::new(lockkit_postgres::PostgresBackend::connect(postgres).await?)
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

/// Returns the servers that a URL lists, with what follows them, and the user and the password. `example` shows such a URL.
#[cfg(any(feature = "zk", feature = "etcd"))]
fn members(url: &Url<'_>, example: &str) -> Result<(String, Option<(String, String)>)> {
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
        return Err(url.invalid(format!("it names no server, as in {example}")));
    }
    let auth = match user.map(|user| user.split_once(':')) {
        None => None,
        Some(Some((user, password))) => Some((decoded(user, "user")?, decoded(password, "password")?)),
        Some(None) => {
            let scheme = &url.scheme;
            return Err(url.invalid(format!("a user needs a password: {scheme}://user:password@host")));
        }
    };
    let hosts = decoded(hosts, "list of servers")?;
    if hosts.contains('/') {
        return Err(url.invalid("there is a `/` in its list of servers"));
    }
    Ok((format!("{hosts}{}", decoded(url.path, "path")?), auth))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_tls_is_not_asked_whether_it_is_on() {
        let silent = io::Error::new(io::ErrorKind::TimedOut, "no answer within 1s");
        let broken = io::Error::new(io::ErrorKind::ConnectionReset, "reset by peer");
        let mut config = LockConfig::new("rediss://host");
        config.redlock.tls = Some(true);
        config.etcd.tls = Some("verify".to_owned());
        config.zk.tls = Some("off".to_owned());
        config.postgres.sslmode = Some("prefer".to_owned());
        for (backend, expected) in [
            ("redis", true),
            ("redlock", true),
            ("etcd", true),
            ("mysql", false),
            ("zookeeper", false),
            ("postgres", false),
        ] {
            let is_encrypted = is_encrypted(backend, &config);
            assert_eq!(is_encrypted, expected, "{backend}");
            for error in [&silent, &broken] {
                let asked = advice(error, is_encrypted).unwrap();
                assert_eq!(asked.contains("is TLS on"), !expected, "{backend}: {asked}");
            }
        }
    }
}
