//! The options of the Redis backend, and its URL.

use std::{path::PathBuf, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, Result,
    spi::{BackendInfo, Secrets, ServerUrl, check_certificates, check_duration, redacted_url, servers},
};
use percent_encoding::percent_decode_str;

lockkit_core::spi::config! {
    /// The Redis server to use, and the options for it.
    ///
    /// ```
    /// use lockkit_redis::RedisConfig;
    ///
    /// let mut config = RedisConfig::new("redis://locker:secret@127.0.0.1:6379/2");
    /// config.namespace = "billing".into();
    /// assert!(!format!("{config:?}").contains("secret"));
    /// ```
    pub struct RedisConfig {
        /// `redis://[user[:password]@]host[:port][/db]`, or `rediss://` for TLS, which needs the cargo feature `tls`. User
        /// and password are percent-encoded. Default port: 6379, default database: 0. With [`sentinel`](Self::sentinel), a list of
        /// sentinels separated by commas, whose default port is 26379.
        ///
        /// `redis+unix://[user[:password]@]/path/of/the/socket` for a Unix socket. The path is percent-encoded, too.
        pub url: ServerUrl,
        /// Separates applications that share a database. Characters: `[A-Za-z0-9._-]`. May be empty.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The number of replicas that must acknowledge a grant, and each renewal, before it counts. Default: 0.
        ///
        /// This narrows the window in which a fail-over loses a lock that is held. It cannot close it: Redis replicates
        /// asynchronously, and the replica that is promoted need not be one that acknowledged.
        pub replicas: u32 = 0,
        /// The longest time to wait for the replicas. Default: 1 s.
        pub replicas_timeout: Duration = Duration::from_secs(1),
        /// The name of the master, if the URL lists sentinels.
        pub sentinel: Option<String> = None,
        /// The number of the database, for `redis+unix://`, whose path is the socket's. Default: 0.
        pub db: Option<u32> = None,
        /// A file of PEM certificates to trust instead of the system's, for `rediss://`.
        pub ca: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for a server that asks for one. Needs
        /// [`key`](Self::key) and `rediss://`.
        pub cert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`cert`](Self::cert).
        pub key: Option<PathBuf> = None,
    }
}

impl RedisConfig {
    /// Checks the URL and the options, without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`].
    pub fn validate(&self) -> Result<()> {
        self.address().map(drop)
    }

    pub(crate) fn address(&self) -> Result<Address> {
        BackendInfo::check_namespace(&self.namespace, usize::MAX)?;
        let limits = Duration::from_millis(1)..=AcquireOptions::MAX_DURATION;
        check_duration("replicas_timeout", self.replicas_timeout, limits)?;
        if self.sentinel.as_deref() == Some("") {
            return Err(Error::invalid_option(
                "sentinel",
                "it is empty; give the name that the sentinels have for the master",
            ));
        }
        let mut address = Address::parse(&self.url, self.sentinel.is_some())?;
        match self.db {
            Some(_) if !address.is_socket() => {
                return Err(Error::invalid_option(
                    "db",
                    "it is for a Unix socket alone; write redis://host/2 for the database 2",
                ));
            }
            Some(db) => address.db = db.into(),
            None => {}
        }
        check_certificates(address.tls, "rediss://", [&self.ca, &self.cert, &self.key])?;
        Ok(address)
    }
}

/// A parsed URL.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) tls: bool,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) secrets: Secrets,
    /// The server, or its sentinels. A socket is its path, with the port 0.
    pub(crate) hosts: Vec<(String, u16)>,
    pub(crate) db: i64,
}

impl Address {
    fn parse(url: &str, sentinels: bool) -> Result<Self> {
        let invalid = |reason: &str| Err(Error::invalid_url(redacted_url(url), reason));
        let Some((scheme, rest)) = url.split_once("://") else {
            return invalid("it does not begin with redis://, rediss:// or redis+unix://");
        };
        let (tls, is_socket) = match scheme.to_ascii_lowercase().as_str() {
            "redis" => (false, false),
            "rediss" => (true, false),
            "redis+unix" => (false, true),
            _ => return invalid("it does not begin with redis://, rediss:// or redis+unix://"),
        };
        if tls && cfg!(not(feature = "tls")) {
            return Err(Error::feature_disabled("rediss", "tls"));
        }
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        if !parameters.is_empty() || rest.contains('#') {
            return invalid("it has parameters or a fragment, which this address cannot have");
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let db = match path {
            _ if is_socket => 0,
            "" => 0,
            db => match db.parse::<u16>() {
                Ok(db) => i64::from(db),
                Err(_) => {
                    return invalid(
                        "what comes after the host is not the number of a database, as in redis://host/2",
                    );
                }
            },
        };
        let (userinfo, hosts) = match authority.rsplit_once('@') {
            Some((userinfo, hosts)) => (Some(userinfo), hosts),
            None => (None, authority),
        };
        let (username, password) = match userinfo.map(|info| info.split_once(':').unwrap_or((info, ""))) {
            None => (None, None),
            Some((user, password)) => {
                let (Ok(user), Ok(password)) = (
                    percent_decode_str(user).decode_utf8(),
                    percent_decode_str(password).decode_utf8(),
                ) else {
                    return invalid("user or password is not UTF-8 when decoded");
                };
                let given = |text: std::borrow::Cow<'_, str>| (!text.is_empty()).then(|| text.into_owned());
                let (user, password) = (given(user), given(password));
                // A user without a password logs in as that user, never as the default one.
                let password = password.or_else(|| user.as_ref().map(|_| String::new()));
                (user, password)
            }
        };
        if is_socket {
            if sentinels {
                return invalid("sentinels are reached by hosts, not by a Unix socket");
            }
            let path = percent_decode_str(path).decode_utf8();
            let Ok(path) = path.map(|path| format!("/{path}")) else {
                return invalid("the path of the socket is not UTF-8 when decoded");
            };
            if !hosts.is_empty() || path.ends_with('/') || path.contains('\0') {
                return invalid(
                    "a Unix socket is a path without a host; three slashes make it absolute, as in \
                     redis+unix:///run/redis/redis.sock",
                );
            }
            return Ok(Self {
                tls,
                secrets: Secrets::of_passwords(&password),
                username,
                password,
                hosts: vec![(path, 0)],
                db,
            });
        }
        let Ok(hosts) = percent_decode_str(hosts).decode_utf8() else {
            return invalid("a host is not UTF-8 when decoded");
        };
        let parsed = match servers(&hosts, if sentinels { 26_379 } else { 6_379 }) {
            Ok(servers) => servers
                .into_iter()
                .map(|it| (it.host, it.port))
                .collect::<Vec<_>>(),
            Err(reason) => return invalid(&format!("{reason}; write redis://host:6379")),
        };
        if parsed.len() > 1 && !sentinels {
            return invalid(
                "it names several servers; several sentinels need the option `sentinel` with the master's name, \
                 independent masters are redlock://",
            );
        }
        Ok(Self {
            tls,
            secrets: Secrets::of_passwords(&password),
            username,
            password,
            hosts: parsed,
            db,
        })
    }

    /// Returns `true` for a Unix socket.
    pub(crate) fn is_socket(&self) -> bool {
        self.hosts.first().is_some_and(|(host, _)| is_path(host))
    }

    /// Returns host and port of the (first) server.
    pub(crate) fn name(&self) -> String {
        self.hosts
            .first()
            .map_or_else(String::new, |(host, port)| shown(host, *port))
    }

    /// Returns the server's identity: canonical, and without credentials.
    pub(crate) fn server(&self, sentinel: Option<&str>) -> String {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let mut hosts: Vec<_> = self.hosts.iter().map(|(host, port)| shown(host, *port)).collect();
        hosts.sort();
        let db = self.db;
        match sentinel {
            None if self.is_socket() => format!("redis+unix://{}?db={db}", hosts.join(",")),
            None => format!("{scheme}://{}/{db}", hosts.join(",")),
            Some(master) => format!("{scheme}://{}/{db}?sentinel={master}", hosts.join(",")),
        }
    }
}

/// Returns `true` for what is in the place of a host if a Unix socket is meant.
pub(crate) fn is_path(host: &str) -> bool {
    host.starts_with('/')
}

pub(crate) fn shown(host: &str, port: u16) -> String {
    if is_path(host) {
        host.to_owned()
    } else if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{}:{port}", host.to_ascii_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(url: &str) -> Address {
        Address::parse(url, false).unwrap()
    }

    #[test]
    fn a_url_is_parsed() {
        let a = address("redis://locker:p%40ss%2Fword@Redis.example:7000/3");
        assert_eq!(a.username.as_deref(), Some("locker"));
        assert_eq!(a.password.as_deref(), Some("p@ss/word"));
        assert_eq!(a.hosts, [("redis.example".to_owned(), 7000)]);
        assert_eq!(a.server(None), "redis://redis.example:7000/3");
        let a = address("redis://locker@host");
        assert_eq!(
            (a.username.as_deref(), a.password.as_deref()),
            (Some("locker"), Some(""))
        );
        let a = address("redis://:secret@[::1]");
        assert_eq!((a.username, a.password.as_deref()), (None, Some("secret")));
        assert_eq!(a.hosts, [("::1".to_owned(), 6379)]);
        assert_eq!(
            address("redis://127.0.0.1").server(None),
            "redis://127.0.0.1:6379/0"
        );
    }

    #[test]
    fn a_socket_is_a_path() {
        let a = address("redis+unix://locker:p%40ss@/run/r%20s/redis.sock");
        assert_eq!(a.hosts, [("/run/r s/redis.sock".to_owned(), 0)]);
        assert_eq!(
            (a.username.as_deref(), a.password.as_deref()),
            (Some("locker"), Some("p@ss"))
        );
        assert_eq!(a.server(None), "redis+unix:///run/r s/redis.sock?db=0");
        let mut config = RedisConfig::new("redis+unix:///run/redis.sock");
        config.db = Some(3);
        assert_eq!(config.address().unwrap().db, 3);
        config.sentinel = Some("main".into());
        assert!(config.validate().is_err());
        for bad in [
            "redis+unix://host/run/redis.sock",
            "redis+unix://",
            "redis+unix:///",
            "redis+unix:///run/",
            "redis+unix:///run/%00",
            "redis+unix:///run/%ff",
        ] {
            assert!(RedisConfig::new(bad).validate().is_err(), "{bad}");
        }
        let mut config = RedisConfig::new("redis://host");
        config.db = Some(3);
        assert!(config.validate().unwrap_err().to_string().contains("`db`"));
    }

    #[test]
    fn sentinels_are_a_list() {
        let a = Address::parse("redis://s2:5000,s1", true).unwrap();
        assert_eq!(a.server(Some("main")), "redis://s1:26379,s2:5000/0?sentinel=main");
        assert!(Address::parse("redis://a,b", false).is_err());
    }

    #[test]
    fn invalid_urls_are_refused_without_telling_secrets() {
        for url in [
            "http://host",
            "host",
            "redis://",
            "redis://host:x",
            "redis://host:0",
            "redis://host/x",
            "redis://host/-1",
            "redis://u:sesame@host/1?x=sesame",
            "redis://u:sesame@",
            "redis://[::1",
            "redis://u:sesame%FF@host",
            "redis://host?password=open@sesame",
            "redis://u:se?same@host:x",
        ] {
            let err = Address::parse(url, false)
                .err()
                .unwrap_or_else(|| panic!("{url} was taken"));
            assert!(!format!("{err} {err:?}").contains("sesame"), "{err:?}");
        }
        #[cfg(not(feature = "tls"))]
        assert!(matches!(
            Address::parse("rediss://host", false),
            Err(Error::FeatureDisabled { .. })
        ));
    }
}
