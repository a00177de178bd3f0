//! The server's address, and the options.

use std::path::PathBuf;

pub use lockkit_core::spi::Tls;
use lockkit_core::{
    Error, Result,
    spi::{BackendInfo, ServerUrl, Unencrypted, redacted_url, server, words},
};
use percent_encoding::percent_decode_str;
use sqlx::{
    ConnectOptions,
    mysql::{MySqlConnectOptions, MySqlSslMode},
};
use url::Url;

use crate::{relay::Route, tls::Encryption};

lockkit_core::spi::config! {
    /// The address of a server, and the options for it.
    ///
    /// ```
    /// use lockkit_mysql::{Mode, MySqlConfig};
    ///
    /// let mut config = MySqlConfig::new("mysql://app:s3cret@db.example/app");
    /// config.mode = Mode::Lease;
    /// assert!(!format!("{config:?}").contains("s3cret"));
    /// ```
    ///
    /// Its `Debug` form leaves out user and password.
    pub struct MySqlConfig {
        /// `mysql://[user[:password]@]host[:port]/database`. User and password are percent-encoded. By default, the user is `root`
        /// and the port 3306. The lock tables are in the database (schema).
        pub url: ServerUrl,
        /// The Unix socket to use instead of the URL's host and port.
        pub socket: Option<PathBuf> = None,
        /// A prefix of each row's name, which keeps apart applications that share the database. Of `[A-Za-z0-9._-]`, 64 bytes at most.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The way in which locks are held. Default: [`Mode::ForUpdate`].
        pub mode: Mode = Mode::ForUpdate,
        /// The one who creates the tables. Default: [`Schema::Auto`].
        pub schema: Schema = Schema::Auto,
        /// Encryption, and trust in the server's certificate. Without it, a server that asks for the password itself does not get it.
        /// Default: [`Tls::Off`].
        pub tls: Tls = Tls::Off,
        /// The servers that get the password though nothing proves which they are. Default: [`PublicKey::Local`].
        pub public_key: PublicKey = PublicKey::Local,
        /// A file of certificates (PEM) to trust instead of the system's. Needs [`Tls::Verify`].
        pub ca: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for accounts that need one. Needs
        /// [`key`](Self::key), and [`tls`](Self::tls) other than [`Tls::Off`].
        pub cert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`cert`](Self::cert).
        pub key: Option<PathBuf> = None,
        /// The most connections for locks at once, from 1 to 100,000; 100 by default; at least 2 with [`Mode::Lease`].
        ///
        /// With [`Mode::ForUpdate`], each held lock and each name that is waited for needs one. With [`Mode::Lease`], each name that is
        /// waited for, and each request while it is under way. Idle connections count, too.
        ///
        /// A client has one more connection, which holds no lock. With [`Mode::ForUpdate`] it also has one that notices when the server
        /// is gone, from the first hold on, and one for inspections, from the first inspection on.
        pub max_connections: u32 = 100,
    }
}

/// The way in which locks are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// A row lock, `SELECT … FOR UPDATE`, in a session of its own. As safe as the row lock itself, fast, and free the moment its
    /// process dies. A held lock costs a connection, with an open transaction.
    #[default]
    ForUpdate,
    /// Owner and expiry in a row, changed by single statements on the server's clock. For holds of hours, and for many locks: a
    /// held lock costs no connection and no transaction. Exclusive locks only.
    Lease,
}

/// The one who creates the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schema {
    /// The first acquisition creates missing tables.
    #[default]
    Auto,
    /// You create them, with the statements of [`ddl`](crate::ddl). The account needs no right to create tables. If one is missing,
    /// the error has the statements.
    Manual,
}

/// The servers that get the password though no certificate proves which they are. `caching_sha2_password`, the default of MySQL 8, needs it if
/// the server does not remember the account's last login, and `sha256_password` for each login.
///
/// Without TLS it is encrypted with a public key that comes from the server, and nothing proves that it is the server's: anyone on the way can
/// send another one, and read the password. With [`Tls::Unverified`] anyone on the way can be the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PublicKey {
    /// Those of this host: at a loopback address or a Unix socket.
    #[default]
    Local,
    /// All. For a network that is trusted.
    Always,
    /// None.
    Never,
}

words!(PublicKey, "public_key": "local" = Local, "always" = Always, "never" = Never);
words!(Mode, "mode": "for_update" = ForUpdate, "lease" = Lease);
words!(Schema, "schema": "auto" = Auto, "manual" = Manual);

impl MySqlConfig {
    /// The longest namespace, in bytes.
    pub const MAX_NAMESPACE: usize = 64;

    /// Checks the address and the options, without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`] or [`Error::InvalidOptions`] for the first that is not valid.
    pub fn validate(&self) -> Result<()> {
        self.target().map(drop)
    }

    pub(crate) fn target(&self) -> Result<Target> {
        BackendInfo::check_namespace(&self.namespace, Self::MAX_NAMESPACE)?;
        if !(1..=100_000).contains(&self.max_connections) {
            return Err(Error::invalid_option(
                "max_connections",
                "it is not between 1 and 100,000",
            ));
        }
        if self.mode == Mode::Lease && self.max_connections < 2 {
            return Err(Error::invalid_option(
                "max_connections",
                "mode=lease needs two at least: one to wait, and one to renew holds meanwhile",
            ));
        }
        self.tls
            .check(cfg!(feature = "tls"), [&self.ca, &self.cert, &self.key])?;
        let target = Target::parse(&self.url)?;
        if target.user.is_empty() {
            return Err(Error::invalid_url(
                redacted_url(&self.url),
                "it has a password and no user",
            ));
        }
        Ok(target)
    }

    pub(crate) fn connect_options(target: &Target) -> MySqlConnectOptions {
        let mut options = MySqlConnectOptions::new()
            .username(&target.user)
            .database(&target.database)
            // A route has TLS itself.
            .ssl_mode(MySqlSslMode::Disabled)
            // A statement per mode, which locks a row.
            .statement_cache_capacity(4)
            .disable_statement_logging();
        if let Some(password) = &target.password {
            options = options.password(password);
        }
        options
    }

    /// Returns the way to the server.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option of TLS whose file cannot be used.
    pub(crate) fn route(&self, target: &Target) -> Result<Route> {
        Ok(Route {
            host: target.host.clone(),
            port: target.port,
            socket: self.socket.clone(),
            has_password: target.password.is_some(),
            public_key: self.public_key,
            encryption: Encryption::new(self)?,
            unencrypted: Unencrypted::default(),
        })
    }

    /// Returns the server and database without credentials. Two clients share locks if they have the same.
    pub(crate) fn server(&self, target: &Target) -> String {
        let Target {
            host, port, database, ..
        } = target;
        let at = match &self.socket {
            Some(socket) => socket.display().to_string(),
            None if host.contains(':') => format!("[{host}]:{port}"),
            None => format!("{host}:{port}"),
        };
        match self.mode {
            Mode::ForUpdate => format!("mysql://{at}/{database}"),
            // Leases are in another table, so they are other locks.
            Mode::Lease => format!("mysql://{at}/{database}?mode=lease"),
        }
    }
}

/// The parts of the URL.
pub(crate) struct Target {
    host: String,
    port: u16,
    user: String,
    pub(crate) password: Option<String>,
    pub(crate) database: String,
}

impl Target {
    const DEFAULT_PORT: u16 = 3306;

    fn parse(text: &str) -> Result<Self> {
        let invalid = |reason: &str| Error::invalid_url(redacted_url(text), reason);
        let url = Url::parse(text).map_err(|error| invalid(&error.to_string()))?;
        if url.scheme() != "mysql" {
            return Err(invalid("it does not begin with mysql://"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(invalid(
                "it has parameters or a fragment, which this address cannot have; write a `?` or `#` in a password \
                 as %3F or %23",
            ));
        }
        if url.path().contains('@') {
            // Most likely a password with a `/` in it, whose user would be taken for the host, and the rest of it for the database's name.
            return Err(invalid(
                "there is an `@` in the path; write a `/` in a password as %2F, an `@` in a database's name as %40",
            ));
        }
        let decoded = |part: &str, what: &str| match percent_decode_str(part).decode_utf8() {
            Ok(decoded) => Ok(decoded.into_owned()),
            Err(_) => Err(invalid(&format!("{what} is not UTF-8 when decoded"))),
        };
        let host = decoded(url.host_str().unwrap_or_default(), "the host")?;
        let database = decoded(url.path().trim_start_matches('/'), "the database")?;
        if host.is_empty() || database.is_empty() || database.contains('/') {
            return Err(invalid(
                "it is not of the form mysql://user:password@host:port/database",
            ));
        }
        let at = match url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host,
        };
        let address = server(&at, Self::DEFAULT_PORT).map_err(|reason| invalid(&reason))?;
        let user = decoded(url.username(), "the user")?;
        let password = url
            .password()
            .map(|password| decoded(password, "the password"))
            .transpose()?;
        Ok(Self {
            host: address.host,
            port: address.port,
            user: if user.is_empty() && password.is_none() {
                "root".to_owned()
            } else {
                user
            },
            password,
            database,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_parsed() {
        let target = Target::parse("mysql://locker:p%40ss%2Fword@Db.example:7000/app").unwrap();
        assert_eq!(target.user, "locker");
        assert_eq!(target.password.as_deref(), Some("p@ss/word"));
        assert_eq!((target.host.as_str(), target.port), ("db.example", 7000));
        assert_eq!(target.database, "app");
        let target = Target::parse("mysql://[::1]/a%20b").unwrap();
        assert_eq!((target.user.as_str(), target.password), ("root", None));
        assert_eq!((target.host.as_str(), target.port), ("::1", 3306));
        assert_eq!(target.database, "a b");
        let config = MySqlConfig::new("mysql://u:p@[::1]/a");
        let server = config.server(&config.target().unwrap());
        assert_eq!(server, "mysql://[::1]:3306/a");
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_secrets() {
        for url in [
            "postgres://host/db",
            "host",
            "mysql://",
            "mysql://host",
            "mysql://host/",
            "mysql:///db",
            "mysql://host/a/b",
            "mysql://host:x/db",
            "mysql://:sesame@host/db",
            "mysql://u:sesame@host/db?x=sesame",
            "mysql://u:sesame#@host/db",
            "mysql://u:sesame%FF@host/db",
            "mysql://u:sesame@host,other/db",
            "mysql://u:sesame@host,/db",
            // The user is no host, with a port or none, and the rest of the password no database.
            "mysql://u:/sesame@host",
            "mysql://u:7000/sesame@host",
        ] {
            let err = MySqlConfig::new(url).validate().unwrap_err();
            assert!(!format!("{err} {err:?}").contains("sesame"), "{err:?}");
        }
    }

    #[test]
    fn an_invalid_option_is_named() {
        let refused = |change: fn(&mut MySqlConfig)| {
            let mut config = MySqlConfig::new("mysql://host/db");
            config.validate().unwrap();
            change(&mut config);
            match config.validate().unwrap_err() {
                Error::InvalidOptions { option, .. } => option,
                other => panic!("{other}"),
            }
        };
        assert_eq!(refused(|config| config.namespace = "a:b".into()), "namespace");
        assert_eq!(refused(|config| config.namespace = "a".repeat(65)), "namespace");
        assert_eq!(refused(|config| config.max_connections = 0), "max_connections");
        assert_eq!(
            refused(|config| (config.mode, config.max_connections) = (Mode::Lease, 1)),
            "max_connections"
        );
        assert_eq!(refused(|config| config.ca = Some("ca.pem".into())), "ca");
        #[cfg(not(feature = "tls"))]
        assert_eq!(refused(|config| config.tls = Tls::Verify), "tls");
    }
}
