//! The configuration: the servers, and how nodes are made on them.

use std::{fmt, path::PathBuf, time::Duration};

pub use lockkit_core::spi::Tls;
use lockkit_core::{
    Error, Result,
    spi::{BackendInfo, ServerUrl, servers, words},
};

use crate::lease::TICKS_PER_TIMEOUT;

lockkit_core::spi::config! {
    /// The servers of an ensemble, and how nodes are made on them.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockkit_zk::{Nodes, ZkConfig};
    ///
    /// let mut config = ZkConfig::new("zk1:2181,zk2:2181,zk3:2181/services");
    /// config.namespace = "billing".into();
    /// config.session_timeout = Duration::from_secs(12);
    /// config.nodes = Nodes::ReadWrite;
    /// ```
    ///
    /// The `Debug` form leaves out the password.
    pub struct ZkConfig {
        /// The servers, `host:port` separated by commas, and optionally the path of a directory for all nodes:
        /// `zk1:2181,zk2:2181/services`. The port defaults to 2181. A missing directory is made.
        pub servers: ServerUrl,
        /// The directory between that path and the locks, which keeps applications that share the ensemble apart. Consists of
        /// `[A-Za-z0-9._-]`. There is none if it is empty.
        pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
        /// The user to authenticate as. Default: nobody. Without [`tls`](Self#structfield.tls), the password crosses the network in
        /// the clear.
        pub auth: Option<Digest> = None,
        /// Encryption, and trust in the servers' certificates. It is the same for all [`servers`](Self#structfield.servers), whose
        /// ports have to be their `secureClientPort`s. Default: [`Tls::Off`].
        pub tls: Tls = Tls::Off,
        /// A file of PEM certificates to trust instead of the system's. Needs [`Tls::Verify`].
        pub ca: Option<PathBuf> = None,
        /// A file with this client's certificate and those of its issuers (PEM), for servers that ask for one. Needs
        /// [`key`](Self#structfield.key).
        pub cert: Option<PathBuf> = None,
        /// A file with the private key (PEM) of the certificate in [`cert`](Self#structfield.cert).
        pub key: Option<PathBuf> = None,
        /// The clients that may touch the nodes. Default: their creator alone with [`auth`](Self#structfield.auth), else everyone.
        pub access: Option<Access> = None,
        /// The layout of the nodes, which decides which other clients share the locks. Default: [`Nodes::Mutex`].
        pub nodes: Nodes = Nodes::Mutex,
        /// The session timeout to ask for: how long the ensemble keeps this client's holds after it last heard of the client. At
        /// least five [ticks](Self#structfield.tick_time). The server may have other limits (2 to 20 ticks unless configured
        /// otherwise), and what it grants counts. Default: 30 s.
        pub session_timeout: Duration = Self::DEFAULT_SESSION_TIMEOUT,
        /// The servers' `tickTime`, or more. Leases are counted with it: with a figure below the servers', leases could outlast
        /// their sessions. Default: 2 s, which is ZooKeeper's.
        pub tick_time: Duration = Self::DEFAULT_TICK_TIME,
        /// The fate of the directories of locks that nobody uses. Default: the server removes them.
        pub parents: Parents = Parents::Container,
    }
}

/// A user and a password, for the scheme `digest`.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Digest {
    /// The user.
    pub user: String,
    /// The password.
    pub password: String,
}

/// The clients that may touch a client's nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// Everyone (`world:anyone`).
    Everyone,
    /// The user that this client authenticates as (`auth`).
    Creator,
}

/// The layout of a lock's nodes. All clients of a lock have to agree on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Nodes {
    /// Contenders queue as `_c_<uuid>-lock-<number>`, as in Curator's `InterProcessMutex`. Shared ones queue as
    /// `_c_<uuid>-__READ__-lock-<number>`, and Curator's mutex queues behind those.
    #[default]
    Mutex,
    /// Contenders queue as `_c_<uuid>-__WRIT__<number>` and `_c_<uuid>-__READ__<number>`, as in Curator's
    /// `InterProcessReadWriteLock`.
    ReadWrite,
    /// The lock is one ephemeral node: the client that makes it holds the lock, and all others watch it. There is no order,
    /// and each release wakes everyone. Exclusive mode only. Use it only to share locks with clients that do so.
    Simple,
}

/// The fate of the directories of locks that nobody uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Parents {
    /// The server removes them (container nodes; ZooKeeper 3.5.3 and newer).
    #[default]
    Container,
    /// They stay.
    Persistent,
}

impl ZkConfig {
    /// The default of [`session_timeout`](Self#structfield.session_timeout).
    pub const DEFAULT_SESSION_TIMEOUT: Duration = Duration::from_secs(30);
    /// The default of [`tick_time`](Self#structfield.tick_time), which is ZooKeeper's own.
    pub const DEFAULT_TICK_TIME: Duration = Duration::from_secs(2);
    /// The longest [`session_timeout`](Self#structfield.session_timeout).
    pub const MAX_SESSION_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

    /// Returns the shortest session timeout at this [`tick_time`](Self#structfield.tick_time).
    pub const fn min_session_timeout(tick_time: Duration) -> Duration {
        tick_time.saturating_mul(TICKS_PER_TIMEOUT)
    }

    /// Checks the values, without I/O.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option that cannot be kept.
    pub fn validate(&self) -> Result<()> {
        self.check().map(drop)
    }

    pub(crate) fn check(&self) -> Result<Address> {
        BackendInfo::check_namespace(&self.namespace, usize::MAX)?;
        if self.tick_time < Duration::from_millis(1) {
            return Err(Error::invalid_option("tick_time", "it is shorter than 1 ms"));
        }
        check_session_timeout(self.session_timeout, self.tick_time, "asked for")
            .map_err(|reason| Error::invalid_option("session_timeout", reason))?;
        if self.session_timeout > Self::MAX_SESSION_TIMEOUT {
            return Err(Error::invalid_option(
                "session_timeout",
                "it is longer than a day; ask for less",
            ));
        }
        if self.access == Some(Access::Creator) && self.auth.is_none() {
            let reason = "`creator` needs a user and a password; give them, or use `everyone`";
            return Err(Error::invalid_option("access", reason));
        }
        if let Some(Digest { user, .. }) = &self.auth
            && (user.is_empty() || user.contains(':'))
        {
            return Err(Error::invalid_option("user", "it is empty or has a colon in it"));
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
        for host in address.hosts.split(',') {
            lockkit_core::spi::tls::server_name(host)
                .map_err(|reason| Error::invalid_option("servers", reason))?;
        }
        #[cfg(not(feature = "tls"))]
        let _ = address;
        Ok(())
    }

    pub(crate) fn access(&self) -> Access {
        match (self.access, &self.auth) {
            (Some(access), _) => access,
            (None, Some(_)) => Access::Creator,
            (None, None) => Access::Everyone,
        }
    }
}

/// Refuses a timeout that leaves no lease. `origin` says where it comes from, for the error.
pub(crate) fn check_session_timeout(
    timeout: Duration,
    tick: Duration,
    origin: &str,
) -> std::result::Result<(), String> {
    let least = ZkConfig::min_session_timeout(tick);
    if timeout >= least {
        return Ok(());
    }
    Err(format!(
        "{timeout:?}, as {origin}, is less than {TICKS_PER_TIMEOUT} ticks of {tick:?}; ask for {least:?} or more, or \
         configure servers and `tick_time` for shorter ticks"
    ))
}

/// The servers' address, in one way of writing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// `host:port`, separated by commas.
    pub(crate) hosts: String,
    /// Empty or a path, without a slash at the end.
    pub(crate) chroot: String,
}

impl Address {
    const DEFAULT_PORT: u16 = 2181;

    fn parse(text: &str) -> std::result::Result<Self, String> {
        let (hosts, chroot) = text.split_at(text.find('/').unwrap_or(text.len()));
        let chroot = chroot.strip_suffix('/').unwrap_or(chroot);
        for part in chroot.split('/').skip(1) {
            if part.is_empty() || matches!(part, "." | "..") || part.chars().any(char::is_control) {
                return Err(format!("{chroot:?} is not a path of nodes"));
            }
        }
        let known = servers(hosts, Self::DEFAULT_PORT)?;
        let mut known: Vec<_> = known.iter().map(ToString::to_string).collect();
        // The order means nothing: clients begin with any server.
        known.sort_unstable();
        Ok(Self {
            hosts: known.join(","),
            chroot: chroot.to_owned(),
        })
    }
}

words!(Nodes, "nodes": "mutex" = Mutex, "readwrite" = ReadWrite, "simple" = Simple);
words!(Access, "access": "everyone" = Everyone, "creator" = Creator);
words!(Parents, "parents": "container" = Container, "persistent" = Persistent);

impl Digest {
    /// Makes credentials of this user and password.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            user: user.into(),
            password: password.into(),
        }
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digest")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(servers: &str) -> std::result::Result<(String, String), String> {
        Address::parse(servers).map(|address| (address.hosts, address.chroot))
    }

    #[test]
    fn servers_have_one_way_of_being_written() {
        let ok = |hosts: &str, chroot: &str| Ok((hosts.to_owned(), chroot.to_owned()));
        assert_eq!(address("ZK1"), ok("zk1:2181", ""));
        assert_eq!(address("b:1,a:2/"), ok("a:2,b:1", ""));
        assert_eq!(address("a:2, b:2/x/y/"), ok("a:2,b:2", "/x/y"));
        assert_eq!(address("[::1]:99,[::1]"), ok("[::1]:2181,[::1]:99", ""));
        for bad in [
            "", "a:2,", "a:2,a:2", "a:b", "a:0", "a b:1", "::1", "a:1//x", "a:1/../x", "a:1/x\0", "[]:1",
        ] {
            assert!(address(bad).is_err(), "{bad:?} gave {:?}", address(bad));
        }
    }

    #[test]
    fn what_cannot_be_kept_is_refused() {
        let checked = |set: &dyn Fn(&mut ZkConfig)| {
            let mut config = ZkConfig::new("a:1");
            set(&mut config);
            config.check()
        };
        let refused = |option: &str, set: &dyn Fn(&mut ZkConfig)| match checked(set) {
            Err(Error::InvalidOptions { option: named, .. }) => assert_eq!(named, option),
            other => panic!("expected `{option}` to be refused, got {other:?}"),
        };
        let too_short = Duration::from_millis(9_999);
        assert!(checked(&|_| {}).is_ok());
        refused("namespace", &|config| config.namespace = "a/b".into());
        refused("servers", &|config| config.servers = "a:b".into());
        refused("tick_time", &|config| config.tick_time = Duration::ZERO);
        refused("session_timeout", &|config| config.session_timeout = too_short);
        refused("session_timeout", &|config| {
            config.session_timeout = Duration::MAX;
        });
        refused("access", &|config| config.access = Some(Access::Creator));
        refused("user", &|config| config.auth = Some(Digest::new("a:b", "c")));
        for option in ["ca", "cert", "key"] {
            refused(option, &|config| set_file(config, option));
        }
        #[cfg(not(feature = "tls"))]
        refused("tls", &|config| config.tls = Tls::Unverified);
    }

    fn set_file(config: &mut ZkConfig, option: &str) {
        let file = match option {
            "ca" => &mut config.ca,
            "cert" => &mut config.cert,
            _ => &mut config.key,
        };
        *file = Some("/some/file.pem".into());
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_has_what_it_needs_or_is_refused() {
        let refused = |tls, servers: &str, files: &[&str]| {
            let mut config = ZkConfig::new(servers);
            config.tls = tls;
            for file in files {
                set_file(&mut config, file);
            }
            match config.check() {
                Ok(_) => "nothing",
                Err(Error::InvalidOptions { option, .. }) => option,
                Err(other) => panic!("{other:?}"),
            }
        };
        for tls in [Tls::Verify, Tls::Unverified] {
            assert_eq!(refused(tls, "a:1,[::1]:2,10.0.0.1,x_y.example", &[]), "nothing");
            assert_eq!(refused(tls, "a:1", &["cert", "key"]), "nothing");
            assert_eq!(refused(tls, "a:1", &["cert"]), "cert");
            assert_eq!(refused(tls, "a:1", &["key"]), "key");
            // No certificate can be for these.
            for host in ["a..b", "-", "a%b", "[fe80::1%eth0]", "1.2.3", "ä"] {
                assert_eq!(refused(tls, &format!("b,{host}:1"), &[]), "servers", "{host}");
            }
        }
        assert_eq!(refused(Tls::Verify, "a:1", &["ca"]), "nothing");
        assert_eq!(refused(Tls::Unverified, "a:1", &["ca"]), "ca");
    }

    #[test]
    fn layouts_have_names() {
        assert_eq!("readwrite".parse::<Nodes>().unwrap(), Nodes::ReadWrite);
        assert_eq!("unverified".parse::<Tls>().unwrap(), Tls::Unverified);
        assert_eq!("creator".parse::<Access>().unwrap(), Access::Creator);
        assert_eq!("persistent".parse::<Parents>().unwrap(), Parents::Persistent);
        let error = "Simple".parse::<Nodes>().unwrap_err().to_string();
        assert!(
            error.contains("nodes") && error.contains("mutex, readwrite, simple"),
            "{error}"
        );
    }

    #[test]
    fn debug_has_no_password() {
        let mut config = ZkConfig::new("me:hidden@a:1");
        config.auth = Some(Digest::new("me", "hidden"));
        let shown = format!("{config:?} {config:#?} {:?}", config.check());
        assert!(!shown.contains("hidden"), "{shown}");
    }
}
