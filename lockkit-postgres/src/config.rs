//! The server's address, and the options.

use std::{fmt, path::PathBuf};

use lockkit_core::{
    Error, Result,
    spi::{BackendInfo, ServerUrl, redacted_url, server, words},
};
use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use url::Url;

/// The name that sessions go by.
pub(crate) const APPLICATION_NAME: &str = "lockkit";

lockkit_core::spi::config! {
    /// The address of a server, and the options for it.
    ///
    /// ```
    /// use lockkit_postgres::{PostgresConfig, SslMode};
    ///
    /// let mut config = PostgresConfig::new("postgres://app:s3cret@db.example/locks");
    /// config.sslmode = SslMode::VerifyFull;
    /// assert!(!format!("{config:?}").contains("s3cret"));
    /// ```
    ///
    /// Its `Debug` form leaves out user and password.
    pub struct PostgresConfig {
        /// `postgres://[user[:password]@]host[:port]/database`, or `postgresql://…`. User, password and database are percent-encoded. By
        /// default, the user is `postgres` and the port 5432. A host that is a path, percent-encoded, is the directory of a Unix socket:
        /// `postgres://app@%2Frun%2Fpostgresql/locks`.
        ///
        /// Locks of different databases do not exclude each other.
        pub url: ServerUrl,
        /// The directory of the Unix socket to use instead of the URL's host. Its name has the URL's port. It is not encrypted: an `sslmode`
        /// that asks for more than [`SslMode::Prefer`] is refused.
        pub socket: Option<PathBuf> = None,
        /// A part of each key, which keeps apart applications that share the database. Of `[A-Za-z0-9._-]`, 64 bytes at most.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The one who creates the schema. Default: [`Schema::Auto`].
        pub schema: Schema = Schema::Auto,
        /// Encryption, and trust in the server's certificate. A Unix socket is not encrypted. Default: [`SslMode::Disable`].
        pub sslmode: SslMode = SslMode::Disable,
        /// A file of certificates (PEM) to trust instead of the system's. Needs [`SslMode::VerifyFull`], [`SslMode::VerifyCa`], or
        /// [`SslMode::Require`], which then is as `VerifyCa`.
        pub sslrootcert: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for roles that need one. Needs
        /// [`sslkey`](Self::sslkey).
        pub sslcert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`sslcert`](Self::sslcert).
        pub sslkey: Option<PathBuf> = None,
        /// The most connections for locks at once, from 1 to 10,000; 50 by default. Each held lock and each name that is waited for needs
        /// one. Idle connections count, too.
        ///
        /// A client has one more connection, which holds no lock, and one for inspections, from the first inspection on. All clients
        /// together have the server's `max_connections`, 100 by default.
        pub max_connections: u32 = 50,
    }
}

/// The one who creates the schema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schema {
    /// The backend creates what is missing with the first acquisition.
    #[default]
    Auto,
    /// You create it, with the statements of [`ddl`](crate::ddl). The role needs no right to create a schema. If something is missing,
    /// the error has the statements.
    Manual,
}

/// Encryption, and trust in the server's certificate, as libpq spells them. All but `Disable` need the cargo feature `tls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SslMode {
    /// No encryption. It is the default here; libpq's is `prefer`.
    #[default]
    Disable,
    /// Encryption without a check of the certificate if the server has it, and none otherwise. No protection against an active
    /// attacker.
    Prefer,
    /// Encryption without a check of the certificate. No protection against an active attacker.
    Require,
    /// Encryption with a certificate that a trusted authority has issued, for whatever host. Needs an `sslrootcert`.
    VerifyCa,
    /// Encryption with a certificate that a trusted authority has issued for this host.
    VerifyFull,
}

words!(Schema, "schema": "auto" = Auto, "manual" = Manual);
words!(SslMode, "sslmode": "disable" = Disable, "prefer" = Prefer, "require" = Require, "verify-ca" = VerifyCa, "verify-full" = VerifyFull);

impl fmt::Display for SslMode {
    /// Writes the value as in a URL.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disable => "disable",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        })
    }
}

impl PostgresConfig {
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
        if !(1..=10_000).contains(&self.max_connections) {
            return Err(Error::invalid_option(
                "max_connections",
                "it is not between 1 and 10,000",
            ));
        }
        if self.sslmode != SslMode::Disable && !cfg!(feature = "tls") {
            return Err(Error::invalid_option(
                "sslmode",
                "encrypted connections need the cargo feature `tls`, which this build does not have",
            ));
        }
        let has_authorities = self.sslrootcert.is_some();
        let (cert, key) = (self.sslcert.is_some(), self.sslkey.is_some());
        let refused = match (self.sslmode, cert, key) {
            (SslMode::Disable | SslMode::Prefer, ..) if has_authorities => Some((
                "sslrootcert",
                "it has no effect without sslmode=require, verify-ca or verify-full",
            )),
            (SslMode::VerifyCa, ..) if !has_authorities => Some((
                "sslrootcert",
                "sslmode=verify-ca needs an authority of your own, since anybody has a certificate of a public one; name its file, or \
                 use verify-full",
            )),
            (SslMode::Disable, true, _) => Some(("sslcert", "it has no effect with sslmode=disable")),
            (SslMode::Disable, _, true) => Some(("sslkey", "it has no effect with sslmode=disable")),
            (_, true, false) => Some((
                "sslcert",
                "a certificate needs its private key; give that as `sslkey`",
            )),
            (_, false, true) => Some((
                "sslkey",
                "a private key needs its certificate; give that as `sslcert`",
            )),
            _ => None,
        };
        if let Some((option, reason)) = refused {
            return Err(Error::invalid_option(option, reason));
        }
        Target::parse(self)
    }

    /// Returns the mode with which the server's certificate is checked: with an authority, libpq checks it also where it need not.
    pub(crate) fn effective_sslmode(&self) -> SslMode {
        match self.sslmode {
            SslMode::Require if self.sslrootcert.is_some() => SslMode::VerifyCa,
            mode => mode,
        }
    }
}

/// The place at which a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(String, u16),
    Socket(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Socket(path) => path.display().fmt(f),
        }
    }
}

/// The parts of the URL.
pub(crate) struct Target {
    pub(crate) address: Address,
    pub(crate) database: String,
    user: String,
    pub(crate) password: Option<String>,
}

impl Target {
    const DEFAULT_PORT: u16 = 5432;

    fn parse(config: &PostgresConfig) -> Result<Self> {
        let text = &config.url;
        let invalid = |reason: &str| Error::invalid_url(redacted_url(text), reason);
        let url = Url::parse(text).map_err(|error| invalid(&error.to_string()))?;
        if !["postgres", "postgresql"].contains(&url.scheme()) {
            return Err(invalid("it does not begin with postgres:// or postgresql://"));
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
        if host.is_empty() && config.socket.is_none() || database.is_empty() || database.contains('\0') {
            return Err(invalid(
                "it is not of the form postgres://user:password@host:port/database",
            ));
        }
        let user = decoded(url.username(), "the user")?;
        let password = url
            .password()
            .map(|password| decoded(password, "the password"))
            .transpose()?;
        if user.is_empty() && password.is_some() {
            return Err(invalid("it has a password and no user"));
        }
        if [Some(&user), password.as_ref()]
            .into_iter()
            .flatten()
            .any(|it| it.contains('\0'))
        {
            return Err(invalid("a user or password cannot have a NUL byte (%00)"));
        }
        let port = url.port().unwrap_or(Self::DEFAULT_PORT);
        let directory = config
            .socket
            .clone()
            .or_else(|| host.starts_with('/').then(|| PathBuf::from(&host)));
        let address = match directory {
            Some(_) if !matches!(config.sslmode, SslMode::Disable | SslMode::Prefer) => {
                let reason = "a Unix socket is not encrypted, so that its server proves nothing; leave it out, and see that only the \
                              server can write to the socket's directory";
                return Err(Error::invalid_option("sslmode", reason));
            }
            Some(directory) => Address::Socket(directory.join(format!(".s.PGSQL.{port}"))),
            None => {
                let address = server(&format!("{host}:{port}"), port).map_err(|reason| invalid(&reason))?;
                Address::Tcp(address.host, address.port)
            }
        };
        Ok(Self {
            address,
            database,
            user: if user.is_empty() {
                "postgres".to_owned()
            } else {
                user
            },
            password,
        })
    }

    /// Returns user, password and database, as the client library takes them.
    pub(crate) fn login(&self) -> Config {
        let mut login = Config::new();
        login
            .user(&self.user)
            .dbname(&self.database)
            .application_name(APPLICATION_NAME)
            // Connections are encrypted here, if at all.
            .ssl_mode(tokio_postgres::config::SslMode::Disable);
        if let Some(password) = &self.password {
            login.password(password);
        }
        login
    }

    /// Returns the server and database without credentials. Two clients share locks if they have the same.
    pub(crate) fn server(&self) -> String {
        format!("postgres://{}/{}", self.address, self.database)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut PostgresConfig);

    fn target(url: &str) -> Target {
        PostgresConfig::new(url).target().unwrap()
    }

    #[test]
    fn a_url_is_parsed() {
        let parsed = target("postgres://locker:p%40ss%2Fword@Db.example:7000/app");
        assert_eq!(
            (parsed.user.as_str(), parsed.password.as_deref()),
            ("locker", Some("p@ss/word"))
        );
        assert_eq!(parsed.address, Address::Tcp("db.example".to_owned(), 7_000));
        assert_eq!(parsed.database, "app");
        let parsed = target("postgresql://[::1]/a%20b");
        assert_eq!(
            (parsed.user.as_str(), parsed.password.as_deref()),
            ("postgres", None)
        );
        assert_eq!(parsed.server(), "postgres://[::1]:5432/a b");
        let parsed = target("postgres://u:p@%2Frun%2Fpostgresql:7000/app");
        assert_eq!(parsed.server(), "postgres:///run/postgresql/.s.PGSQL.7000/app");
        let mut config = PostgresConfig::new("postgres:///app");
        assert!(config.validate().is_err());
        config.socket = Some("/tmp".into());
        assert_eq!(
            config.target().unwrap().server(),
            "postgres:///tmp/.s.PGSQL.5432/app"
        );
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_secrets() {
        for url in [
            "mysql://host/db",
            "host",
            "postgres://",
            "postgres://host",
            "postgres://host/",
            "postgres:///db",
            "postgres://host:x/db",
            "postgres://:sesame@host/db",
            "postgres://u:sesame@host/db?x=sesame",
            "postgres://u:sesame#@host/db",
            "postgres://u:sesame%FF@host/db",
            "postgres://u:sesame%00@host/db",
            "postgres://u:sesame@host,other/db",
            "postgres://u:sesame@host,/db",
            // The user is no host, with a port or none, and the rest of the password no database.
            "postgres://u:/sesame@host/db",
            "postgres://u:7000/sesame@host/db",
        ] {
            let err = PostgresConfig::new(url).validate().unwrap_err();
            assert!(!format!("{err} {err:?}").contains("sesame"), "{err:?}");
            assert!(matches!(err, Error::InvalidUrl { .. }), "{url}: {err:?}");
        }
    }

    #[test]
    fn options_that_cannot_be_kept_are_refused() {
        let valid = PostgresConfig::new("postgres://host/db");
        assert!(valid.validate().is_ok());
        let changes: [(&str, Change); 11] = [
            ("namespace", |config| config.namespace = "a:b".to_owned()),
            ("max_connections", |config| config.max_connections = 0),
            ("max_connections", |config| config.max_connections = 10_001),
            ("sslrootcert", |config| {
                config.sslmode = SslMode::Disable;
                config.sslrootcert = Some("ca.pem".into());
            }),
            ("sslcert", |config| {
                config.sslmode = SslMode::Disable;
                config.sslcert = Some("cert.pem".into());
            }),
            ("sslkey", |config| {
                config.sslmode = SslMode::Disable;
                config.sslkey = Some("cert.key".into());
            }),
            (
                if cfg!(feature = "tls") {
                    "sslcert"
                } else {
                    "sslmode"
                },
                |config| {
                    config.sslmode = SslMode::Require;
                    config.sslcert = Some("cert.pem".into());
                },
            ),
            (
                if cfg!(feature = "tls") {
                    "sslkey"
                } else {
                    "sslmode"
                },
                |config| {
                    config.sslmode = SslMode::VerifyFull;
                    config.sslkey = Some("cert.key".into());
                },
            ),
            (
                if cfg!(feature = "tls") {
                    "sslrootcert"
                } else {
                    "sslmode"
                },
                |config| config.sslmode = SslMode::VerifyCa,
            ),
            // Nobody proves anything at a socket.
            ("sslmode", |config| {
                config.sslmode = SslMode::VerifyFull;
                config.socket = Some("/run/postgresql".into());
            }),
            ("sslmode", |config| {
                config.sslmode = SslMode::Require;
                config.url = "postgres://u:p@%2Frun%2Fpostgresql/app".into();
            }),
        ];
        for (named, change) in changes {
            let mut config = valid.clone();
            change(&mut config);
            match config.validate() {
                Err(Error::InvalidOptions { option, .. }) => assert_eq!(option, named),
                other => panic!("{named}: {other:?}"),
            }
        }
    }

    #[test]
    fn modes_are_spelled_as_libpq_does() {
        for mode in ["disable", "prefer", "require", "verify-ca", "verify-full"] {
            assert_eq!(mode.parse::<SslMode>().unwrap().to_string(), mode);
        }
        assert!(
            "allow"
                .parse::<SslMode>()
                .unwrap_err()
                .to_string()
                .contains("verify-full")
        );
        let mut config = PostgresConfig::new("postgres://host/db");
        config.sslmode = SslMode::Require;
        assert_eq!(config.effective_sslmode(), SslMode::Require);
        config.sslrootcert = Some("ca.pem".into());
        assert_eq!(config.effective_sslmode(), SslMode::VerifyCa);
    }
}
