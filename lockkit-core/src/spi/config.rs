//! Parts that the configs of the backends share.

use std::{
    fmt,
    ops::{Deref, RangeInclusive},
    path::PathBuf,
    time::Duration,
};

use super::redacted_url;
use crate::{AcquireOptions, Error, Result};

/// The address of a server, with its credentials. Derefs to all of it. Its `Debug` form leaves out user, password and
/// parameters, as [`redacted_url`] does.
///
/// ```
/// use lockkit_core::spi::ServerUrl;
///
/// let url = ServerUrl::from("redis://app:s3cret@cache:6379/2");
/// assert_eq!(&*url, "redis://app:s3cret@cache:6379/2");
/// assert_eq!(format!("{url:?}"), r#""redis://***@cache:6379/2""#);
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ServerUrl(String);

impl<T: Into<String>> From<T> for ServerUrl {
    fn from(url: T) -> Self {
        Self(url.into())
    }
}

impl Deref for ServerUrl {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl PartialEq<&str> for ServerUrl {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        redacted_url(self).fmt(f)
    }
}

/// Encryption, and trust in the server's certificate. All but `Off` need the cargo feature `tls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tls {
    /// No encryption. Everything can be read on its way; with ZooKeeper, that includes the password.
    #[default]
    Off,
    /// Encryption without a check of the certificate. No protection against an active attacker.
    Unverified,
    /// Encryption with a certificate that a trusted authority has issued for this host name.
    Verify,
}

crate::spi::words!(Tls, "tls": "off" = Off, "unverified" = Unverified, "verify" = Verify);

impl Tls {
    /// Checks the options `tls`, `ca`, `cert` and `key` of a config, and reads no file. `is_built` is `cfg!(feature = "tls")` in
    /// the backend's crate.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for an option that this build cannot keep, that would have no effect, or lacks another one.
    pub fn check(self, is_built: bool, [ca, cert, key]: [&Option<PathBuf>; 3]) -> Result<()> {
        if self != Self::Off && !is_built {
            let reason = "encrypted connections need the cargo feature `tls`, which this build does not have";
            return Err(Error::invalid_option("tls", reason));
        }
        if ca.is_some() && self != Self::Verify {
            return Err(Error::invalid_option("ca", "it has no effect without tls=verify"));
        }
        check_certificates(self != Self::Off, "`tls`", [ca, cert, key])
    }
}

/// Checks the options `ca`, `cert` and `key` of a config, and reads no file. They need a connection that is encrypted, which
/// `switch` makes it.
///
/// # Errors
/// [`Error::InvalidOptions`] for an option that would have no effect, and for a certificate without its key or a key without its
/// certificate.
pub fn check_certificates(
    is_encrypted: bool,
    switch: &str,
    [ca, cert, key]: [&Option<PathBuf>; 3],
) -> Result<()> {
    if !is_encrypted {
        let mut files = [("ca", ca), ("cert", cert), ("key", key)].into_iter();
        return match files.find(|(_, path)| path.is_some()) {
            Some((option, _)) => Err(Error::invalid_option(
                option,
                format!("it has no effect without {switch}"),
            )),
            None => Ok(()),
        };
    }
    match (cert, key) {
        (Some(_), None) => Err(Error::invalid_option(
            "cert",
            "a certificate needs its private key; give that as `key`",
        )),
        (None, Some(_)) => Err(Error::invalid_option(
            "key",
            "a private key needs its certificate; give that as `cert`",
        )),
        _ => Ok(()),
    }
}

/// Checks that an option is within its limits.
///
/// # Errors
/// [`Error::InvalidOptions`] says what they are.
pub fn check_duration(option: &'static str, value: Duration, limits: RangeInclusive<Duration>) -> Result<()> {
    if limits.contains(&value) {
        return Ok(());
    }
    let (least, most) = limits.into_inner();
    let most = if most == AcquireOptions::MAX_DURATION {
        "a year".to_owned()
    } else {
        format!("{most:?}")
    };
    let reason = format!("{value:?} is not between {least:?} and {most}");
    Err(Error::invalid_option(option, reason))
}

/// Declares the config of a backend: the address of its server, and its options with their defaults.
///
/// Makes the struct and `new`, which takes the address. `Debug` is derived: give an address or an option that has a secret a type
/// that hides it, such as [`ServerUrl`].
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_core::spi::{BackendInfo, ServerUrl};
///
/// lockkit_core::spi::config! {
///     /// The server to use, and the options for it.
///     pub struct ToyConfig {
///         /// `toy://host`.
///         pub url: ServerUrl,
///         /// Keeps applications apart.
///         pub namespace: String = BackendInfo::DEFAULT_NAMESPACE.into(),
///         /// The time to wait for a copy. Default: 1 s.
///         pub patience: Duration = Duration::from_secs(1),
///     }
/// }
///
/// let config = ToyConfig::new("toy://app:s3cret@host");
/// assert_eq!(config.patience, Duration::from_secs(1));
/// assert!(!format!("{config:?}").contains("s3cret"));
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! __config {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $(#[$address_doc:meta])*
            pub $address:ident: $address_type:ty,
            $($(#[$doc:meta])* pub $option:ident: $type:ty = $default:expr,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $(#[$address_doc])*
            pub $address: $address_type,
            $($(#[$doc])* pub $option: $type,)*
        }

        impl $name {
            /// Returns a config with this address and the defaults. The address is checked when the client connects.
            pub fn new($address: impl Into<$address_type>) -> Self {
                Self {
                    $address: $address.into(),
                    $($option: $default,)*
                }
            }
        }
    };
}

/// Implements `FromStr` for an enum that is the value of an option: a word for each variant, as in a URL.
///
/// ```
/// use lockkit_core::spi::words;
///
/// #[derive(Debug, PartialEq)]
/// enum Schema {
///     Auto,
///     Manual,
/// }
///
/// words!(Schema, "schema": "auto" = Auto, "manual" = Manual);
///
/// assert_eq!("manual".parse::<Schema>()?, Schema::Manual);
/// let error = "none".parse::<Schema>().unwrap_err();
/// assert!(error.to_string().contains("auto, manual"));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! __words {
    ($kind:ident, $option:literal: $($word:literal = $variant:ident),+) => {
        impl ::std::str::FromStr for $kind {
            type Err = $crate::Error;

            /// Reads the word for it, as in a URL.
            fn from_str(word: &str) -> ::std::result::Result<Self, Self::Err> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let known = [$($word),+].join(", ");
                        Err($crate::Error::invalid_option($option, format!("{word:?} is not one of {known}")))
                    }
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_password_is_not_shown() {
        for url in [
            "redis://app:s3same",
            "redis://s3same%40cache:6379",
            "redis://app:s3same%40cache:6379/2",
            "redis://app%3As3same%40cache",
            "redis://app%3As3same",
            "redis://app:4711/s3same%40cache",
            "redis://app:x@s3same%40cache:6379",
            "redis://cache:6379,app:s3same",
            "redis://app:x@cache,other:s3same",
            "redis://app:s3same:6379",
            "redis:app:s3same",
            "redis:/app:s3same",
            "mysql://app:s3same/db",
            "mysql:/app:s3same/db",
            "app:/s3same",
            "app:/s3same/db",
            "[app:s3same]",
            "redis://[app:s3same]",
            "redis://[app:s3same]:6379/2",
            "redis://app:x@[u:s3same]",
            "redis://[s3same",
            "zk://app:s3same",
            "zk://app:s3same/a?tls=off",
            "app:s3same",
            "app:s3same/db",
            "redis://app:99999999?x=s3same",
        ] {
            let shown = format!("{:?}", ServerUrl::from(url));
            assert!(
                !shown.contains("s3same") && !shown.contains("999") && shown.contains("***"),
                "{url}: {shown}"
            );
        }
        for url in [
            "redis://cache",
            "redis://cache:6379,[::1],[::1]:6380,10.0.0.1:1/2",
            "mysql://db.example:3306/a%20b",
            "memory:",
            "file:///var/lock/a@b:c%40d",
            "file:locks/a:b",
            "cache:6379",
        ] {
            assert_eq!(format!("{:?}", ServerUrl::from(url)), format!("{url:?}"));
        }
    }

    #[test]
    fn certificates_need_tls_and_each_other() {
        let file = Some(PathBuf::from("/x.pem"));
        let refused = |tls: Tls, is_built, files: [bool; 3]| {
            let files = files.map(|is_given| is_given.then(|| PathBuf::from("/x.pem")));
            match tls.check(is_built, files.each_ref()) {
                Ok(()) => "nothing",
                Err(Error::InvalidOptions { option, .. }) => option,
                Err(other) => panic!("{other:?}"),
            }
        };
        let all = [true; 3];
        assert_eq!(refused(Tls::Off, false, [false; 3]), "nothing");
        assert_eq!(refused(Tls::Off, true, all), "ca");
        assert_eq!(refused(Tls::Off, true, [false, true, true]), "cert");
        assert_eq!(refused(Tls::Off, true, [false, false, true]), "key");
        for tls in [Tls::Unverified, Tls::Verify] {
            assert_eq!(refused(tls, false, [false; 3]), "tls");
            assert_eq!(refused(tls, true, [false, true, true]), "nothing");
            assert_eq!(refused(tls, true, [false, true, false]), "cert");
            assert_eq!(refused(tls, true, [false, false, true]), "key");
        }
        assert_eq!(refused(Tls::Unverified, true, all), "ca");
        assert_eq!(refused(Tls::Verify, true, all), "nothing");
        let error = check_certificates(false, "rediss://", [&file, &None, &None]).unwrap_err();
        assert!(error.to_string().contains("without rediss://"), "{error}");
    }

    #[test]
    fn a_duration_is_within_its_limits() {
        let limits = || Duration::from_millis(1)..=AcquireOptions::MAX_DURATION;
        for fits in [Duration::from_millis(1), AcquireOptions::MAX_DURATION] {
            check_duration("poll", fits, limits()).unwrap();
        }
        for beyond in [Duration::from_micros(999), Duration::MAX] {
            let error = check_duration("poll", beyond, limits()).unwrap_err().to_string();
            assert!(
                error.contains("poll") && error.contains("between 1ms and a year"),
                "{error}"
            );
        }
    }
}
