//! Options of the Redlock backend.

use std::{collections::HashMap, fmt, path::PathBuf, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, Result,
    spi::{BackendInfo, redacted_url},
};

use crate::config::RedisConfig;

/// Configuration of [`RedlockBackend`](crate::RedlockBackend).
///
/// ```
/// use std::time::Duration;
/// use lockkit_redis::RedlockConfig;
///
/// let mut config = RedlockConfig::new("redlock://:secret@redis-a,:secret@redis-b,:secret@redis-c");
/// config.max_ttl = Duration::from_secs(30);
/// assert!(!format!("{config:?}").contains("secret"));
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedlockConfig {
    /// `redlock://[user[:password]@]host[:port][/db],…`: an odd number of masters, at least three, each with its own
    /// credentials and database. User and password are percent-encoded. Default port: 6379. Default database: 0.
    pub url: String,
    /// Separates applications that share the masters. Consists of `[A-Za-z0-9._-]`, and may be empty.
    pub namespace: String,
    /// The longest `ttl` of any client of these masters. Default: 60 s.
    ///
    /// A master that may have lost its grants has no vote for this time. The masters store it, and refuse clients that have
    /// another one.
    pub max_ttl: Duration,
    /// Trusts the masters to lose nothing that they acknowledged, so that one votes at once after a restart. Connecting
    /// fails unless each has `appendonly yes`, `appendfsync always` and `no-appendfsync-on-rewrite no`. Default: `false`.
    pub durable: bool,
    /// The time that a master has to reply before the others decide without it. Default: 100 ms.
    pub master_timeout: Duration,
    /// Connects over TLS, which needs the cargo feature `tls`. Default: `false`.
    pub tls: bool,
    /// A file of PEM certificates that replace the system's. Needs [`tls`](Self::tls).
    pub ca: Option<PathBuf>,
}

impl RedlockConfig {
    /// Returns the defaults for the masters at `url`. The URL is checked by [`validate`](Self::validate) and when connecting.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            namespace: BackendInfo::DEFAULT_NAMESPACE.to_owned(),
            max_ttl: Duration::from_secs(60),
            durable: false,
            master_timeout: Duration::from_millis(100),
            tls: false,
            ca: None,
        }
    }

    /// Checks the config without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`].
    pub fn validate(&self) -> Result<()> {
        self.masters().map(drop)
    }

    /// Returns the config of each master as if it were the only one.
    pub(super) fn masters(&self) -> Result<Vec<RedisConfig>> {
        between("max_ttl", self.max_ttl, AcquireOptions::MAX_DURATION)?;
        between("master_timeout", self.master_timeout, Duration::from_secs(60))?;
        if self.ca.is_some() && !self.tls {
            return Err(Error::invalid_option(
                "ca",
                "without `tls` there are no certificates",
            ));
        }
        if self.tls && cfg!(not(feature = "tls")) {
            return Err(Error::feature_disabled("redlock", "tls"));
        }
        let invalid = |reason: String| Error::invalid_url(redacted_url(&self.url), reason);
        let Some((scheme, list)) = self.url.split_once("://") else {
            return Err(invalid("it does not begin with redlock://".to_owned()));
        };
        if !scheme.eq_ignore_ascii_case("redlock") {
            return Err(invalid("it does not begin with redlock://".to_owned()));
        }
        let scheme = if self.tls { "rediss" } else { "redis" };
        let mut masters = Vec::new();
        let mut seen = HashMap::new();
        for (n, master) in list.split(',').enumerate() {
            let mut config = RedisConfig::new(format!("{scheme}://{master}"));
            config.namespace.clone_from(&self.namespace);
            config.ca.clone_from(&self.ca);
            let address = match config.address() {
                // The error names this URL instead of the master's.
                Err(Error::InvalidUrl { reason, .. }) => {
                    return Err(invalid(format!("master {}: {reason}", n + 1)));
                }
                address => address?,
            };
            // Masters are named by their numbers: a password that is not percent-encoded may look like a host.
            if let Some(first) = seen.insert(address.name(), n) {
                return Err(invalid(format!(
                    "masters {} and {} are the same server, which has one vote whatever the database",
                    first + 1,
                    n + 1
                )));
            }
            masters.push(config);
        }
        match masters.len() {
            1 => Err(invalid(
                "one master has no majority: use redis:// for it".to_owned(),
            )),
            even if even % 2 == 0 => Err(invalid(format!(
                "it names {even} masters, which tolerate no more failures than {}: use an odd number",
                even - 1
            ))),
            _ => Ok(masters),
        }
    }

    /// Returns the canonical name of the deployment, without credentials.
    pub(super) fn server(masters: &[RedisConfig]) -> Result<String> {
        let mut names = Vec::new();
        for master in masters {
            let address = master.address()?;
            names.push(format!("{}/{}", address.name(), address.db));
        }
        names.sort();
        Ok(format!("redlock://{}", names.join(",")))
    }
}

fn between(option: &'static str, value: Duration, max: Duration) -> Result<()> {
    if (Duration::from_millis(1)..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid_option(
        option,
        format!("{value:?} is not between 1ms and {max:?}"),
    ))
}

impl fmt::Debug for RedlockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            namespace,
            max_ttl,
            durable,
            master_timeout,
            tls,
            ca,
        } = self;
        f.debug_struct("RedlockConfig")
            .field("url", &redacted_url(url))
            .field("namespace", namespace)
            .field("max_ttl", max_ttl)
            .field("durable", durable)
            .field("master_timeout", master_timeout)
            .field("tls", tls)
            .field("ca", ca)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        let error = RedlockConfig::new(url).validate().unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(!text.contains("sesame"), "{text}");
        text
    }

    #[test]
    fn each_master_has_an_address_of_its_own() {
        let config = RedlockConfig::new("redlock://u:p@B:7000/2,:s%2Cx@a,[::1]:1");
        let masters = config.masters().unwrap();
        let addresses: Vec<_> = masters.iter().map(|master| master.address().unwrap()).collect();
        let logins: Vec<_> = addresses
            .iter()
            .map(|address| (address.username.as_deref(), address.password.as_deref()))
            .collect();
        assert_eq!(
            logins,
            [(Some("u"), Some("p")), (None, Some("s,x")), (None, None)]
        );
        assert_eq!(
            RedlockConfig::server(&masters).unwrap(),
            "redlock://[::1]:1/0,a:6379/0,b:7000/2"
        );
    }

    #[test]
    fn other_than_an_odd_number_of_masters_is_refused() {
        assert!(refusal("redlock://a").contains("redis://"));
        assert!(refusal("redlock://a,b").contains("it names 2 masters"));
        assert!(refusal("redlock://a,b,c,d").contains("no more failures than 3"));
        assert!(refusal("redlock://a,b,A:6379").contains("masters 1 and 3"));
        assert!(refusal("redlock://a/1,b,a/2").contains("masters 1 and 3"));
        assert!(refusal("redlock://a,,c").contains("master 2"));
        assert!(refusal("redlock://u:sesame@a,u:sesame@b:x,u:sesame@c").contains("master 2"));
        assert!(refusal("redlock://u:ses?ame@a,b,c").contains("parameters"));
        assert!(refusal("redis://a,b,c").contains("redlock://"));
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let mut config = RedlockConfig::new("redlock://a,b,c");
        config.master_timeout = Duration::ZERO;
        assert!(
            config
                .validate()
                .unwrap_err()
                .to_string()
                .contains("master_timeout")
        );
        config.master_timeout = Duration::from_millis(100);
        config.ca = Some("/x".into());
        assert!(config.validate().unwrap_err().to_string().contains("`ca`"));
    }
}
