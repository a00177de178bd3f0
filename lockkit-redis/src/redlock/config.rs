//! Options of the Redlock backend.

use std::{collections::HashMap, path::PathBuf, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, Result,
    spi::{BackendInfo, ServerUrl, check_certificates, check_duration, redacted_url},
};

use crate::config::RedisConfig;

lockkit_core::spi::config! {
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
    pub struct RedlockConfig {
        /// `redlock://[user[:password]@]host[:port][/db],…`: an odd number of masters, at least three, each with its own
        /// credentials and database. User and password are percent-encoded. Default port: 6379. Default database: 0.
        pub url: ServerUrl,
        /// Separates applications that share the masters. Consists of `[A-Za-z0-9._-]`, and may be empty.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The longest `ttl` of any client of these masters. Default: 60 s.
        ///
        /// A master that may have lost its grants has no vote for this time. The masters store it, and refuse clients that have
        /// another one.
        pub max_ttl: Duration = Duration::from_secs(60),
        /// Trusts the masters to lose nothing that they acknowledged, so that one votes at once after a restart. Connecting
        /// fails unless each has `appendonly yes`, `appendfsync always` and `no-appendfsync-on-rewrite no`. Default: `false`.
        pub durable: bool = false,
        /// The time that a master has to reply before the others decide without it. Default: 100 ms.
        pub master_timeout: Duration = Duration::from_millis(100),
        /// Connects over TLS, which needs the cargo feature `tls`. Default: `false`.
        pub tls: bool = false,
        /// A file of PEM certificates that replace the system's. Needs [`tls`](Self::tls).
        pub ca: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for masters that ask for one. Needs
        /// [`key`](Self::key) and [`tls`](Self::tls).
        pub cert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`cert`](Self::cert).
        pub key: Option<PathBuf> = None,
    }
}

impl RedlockConfig {
    /// Checks the config without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`].
    pub fn validate(&self) -> Result<()> {
        self.masters().map(drop)
    }

    /// Returns the config of each master as if it were the only one.
    pub(super) fn masters(&self) -> Result<Vec<RedisConfig>> {
        let millisecond = Duration::from_millis(1);
        check_duration(
            "max_ttl",
            self.max_ttl,
            millisecond..=AcquireOptions::MAX_DURATION,
        )?;
        check_duration(
            "master_timeout",
            self.master_timeout,
            millisecond..=Duration::from_secs(60),
        )?;
        check_certificates(self.tls, "`tls`", [&self.ca, &self.cert, &self.key])?;
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
            let mut config = RedisConfig::new(format!("{scheme}://{}", master.trim()));
            config.namespace.clone_from(&self.namespace);
            config.ca.clone_from(&self.ca);
            config.cert.clone_from(&self.cert);
            config.key.clone_from(&self.key);
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
                    "masters {} and {} are the same server, which has one vote whatever the database; name another \
                     server in place of one",
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
