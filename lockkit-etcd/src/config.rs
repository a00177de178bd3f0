//! The configuration: the servers, and how to reach them.

use std::{fmt, path::PathBuf};

pub use lockkit_core::spi::Tls;
use lockkit_core::{
    Error, Result,
    spi::{BackendInfo, ServerUrl, servers},
};

lockkit_core::spi::config! {
    /// The servers of a cluster, and how to reach them.
    ///
    /// ```
    /// use lockkit_etcd::{Credentials, EtcdConfig};
    ///
    /// let mut config = EtcdConfig::new("etcd1:2379,etcd2:2379,etcd3:2379/services");
    /// config.namespace = "billing".into();
    /// config.auth = Some(Credentials::new("billing", "s3cret"));
    /// ```
    ///
    /// The `Debug` form leaves out the password.
    pub struct EtcdConfig {
        /// The members, `host:port` separated by commas, and optionally a prefix for all keys: `etcd1:2379,etcd2:2379/services`. The port
        /// defaults to 2379. The slash before the prefix is no part of the keys.
        pub servers: ServerUrl,
        /// The part of the keys between that prefix and the locks, which keeps applications that share the cluster apart. Consists of
        /// `[A-Za-z0-9._-]`. There is none if it is empty.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The user to authenticate as. Default: nobody. Without [`tls`](Self#structfield.tls), the password crosses the network in the
        /// clear.
        pub auth: Option<Credentials> = None,
        /// Encryption, and trust in the servers' certificates. Default: [`Tls::Off`].
        pub tls: Tls = Tls::Off,
        /// A file of PEM certificates to trust instead of the system's. Needs [`Tls::Verify`].
        pub ca: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs
        /// [`key`](Self#structfield.key).
        pub cert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`cert`](Self#structfield.cert).
        pub key: Option<PathBuf> = None,
    }
}

/// A user and a password.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Credentials {
    /// The user.
    pub user: String,
    /// The password.
    pub password: String,
}

impl EtcdConfig {
    /// Checks the values, without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option that cannot be kept.
    pub fn validate(&self) -> Result<()> {
        self.check().map(drop)
    }

    pub(crate) fn check(&self) -> Result<Address> {
        BackendInfo::check_namespace(&self.namespace, usize::MAX)?;
        if let Some(Credentials { user, .. }) = &self.auth
            && user.is_empty()
        {
            return Err(Error::invalid_option("user", "it is empty"));
        }
        let address =
            Address::parse(&self.servers).map_err(|reason| Error::invalid_option("servers", reason))?;
        self.check_tls(&address)?;
        Ok(address)
    }

    fn check_tls(&self, address: &Address) -> Result<()> {
        self.tls
            .check(cfg!(feature = "tls"), [&self.ca, &self.cert, &self.key])?;
        if self.tls == Tls::Off {
            return Ok(());
        }
        #[cfg(feature = "tls")]
        for host in &address.hosts {
            lockkit_core::spi::tls::server_name(host)
                .map_err(|reason| Error::invalid_option("servers", reason))?;
        }
        #[cfg(not(feature = "tls"))]
        let _ = address;
        Ok(())
    }
}

/// The servers' address, in one way of writing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Each a `host:port`.
    pub(crate) hosts: Vec<String>,
    /// Without a slash at the end.
    pub(crate) prefix: String,
}

impl Address {
    const DEFAULT_PORT: u16 = 2379;

    fn parse(text: &str) -> std::result::Result<Self, String> {
        let (hosts, prefix) = text.split_once('/').unwrap_or((text, ""));
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        if prefix.chars().any(char::is_control) {
            return Err(format!("{prefix:?} has control characters"));
        }
        let hosts = servers(hosts, Self::DEFAULT_PORT)?;
        let mut hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
        // The order means nothing: clients begin with any member.
        hosts.sort_unstable();
        Ok(Self {
            hosts,
            prefix: prefix.to_owned(),
        })
    }

    /// Returns the address as a URL.
    pub(crate) fn url(&self) -> String {
        let slash = if self.prefix.is_empty() { "" } else { "/" };
        format!("etcd://{}{slash}{}", self.hosts.join(","), self.prefix)
    }
}

impl Credentials {
    /// Makes credentials of this user and password.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            user: user.into(),
            password: password.into(),
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(servers: &str) -> std::result::Result<(String, String), String> {
        Address::parse(servers).map(|address| (address.hosts.join(","), address.prefix))
    }

    #[test]
    fn servers_have_one_way_of_being_written() {
        let ok = |hosts: &str, prefix: &str| Ok((hosts.to_owned(), prefix.to_owned()));
        assert_eq!(address("ETCD1"), ok("etcd1:2379", ""));
        assert_eq!(address("b:1,a:2/"), ok("a:2,b:1", ""));
        assert_eq!(address("a:2, b:2/x/y/"), ok("a:2,b:2", "x/y"));
        assert_eq!(address("a:2//x"), ok("a:2", "/x"));
        assert_eq!(address("[::1]:99,[::1]"), ok("[::1]:2379,[::1]:99", ""));
        for bad in [
            "", "a:2,", "a:2,a:2", "a:b", "a:0", "a b:1", "::1", "a:1/x\0", "[]:1",
        ] {
            assert!(address(bad).is_err(), "{bad:?} gave {:?}", address(bad));
        }
        let parsed = Address::parse("b,a/x").unwrap();
        assert_eq!(parsed.url(), "etcd://a:2379,b:2379/x");
    }

    #[test]
    fn secrets_show_nowhere() {
        let mut config = EtcdConfig::new("user:s3cret@host:2379");
        config.auth = Some(Credentials::new("app", "s3cret"));
        let shown = format!("{config:?} {}", config.validate().unwrap_err());
        assert!(shown.contains("app") && !shown.contains("s3cret"), "{shown}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn what_has_no_effect_is_refused() {
        let refused = |change: fn(&mut EtcdConfig)| {
            let mut config = EtcdConfig::new("host");
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(refused(|config| config.ca = Some("ca".into())).contains("`ca`"));
        assert!(
            refused(|config| (config.tls, config.ca) = (Tls::Unverified, Some("ca".into()))).contains("`ca`")
        );
        assert!(
            refused(|config| (config.tls, config.cert) = (Tls::Verify, Some("c".into()))).contains("`cert`")
        );
        assert!(
            refused(|config| (config.tls, config.key) = (Tls::Verify, Some("k".into()))).contains("`key`")
        );
    }
}
