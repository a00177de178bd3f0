//! What a lock is called, and what tells two locks apart.

use std::{fmt, sync::Arc};

use crate::{Error, Result};

/// The name of a lock: any non-empty UTF-8 text of at most 1,024 bytes, case-sensitive and byte-exact.
///
/// Once you hold a `LockName` it is good; each backend encodes it injectively into whatever its server allows.
/// Cloning is cheap.
///
/// ```
/// use lockkit_core::LockName;
///
/// let name = LockName::new("orders/42")?;
/// assert_eq!(name.as_str(), "orders/42");
/// assert!(LockName::new("").is_err());
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes of UTF-8.
    pub const MAX_BYTES: usize = 1_024;

    /// Takes `name` as it is: no trimming, no case folding, no Unicode normalisation.
    ///
    /// # Errors
    /// [`Error::InvalidName`] if it is empty or longer than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        let reason = match name.len() {
            0 => "it is empty",
            n if n > Self::MAX_BYTES => "it is longer than 1,024 bytes",
            _ => return Ok(Self(name.into())),
        };
        Err(Error::InvalidName {
            name: abbreviated(name),
            reason,
        })
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// An error message quotes the start of an over-long name, not a megabyte of it.
fn abbreviated(name: &str) -> String {
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl AsRef<str> for LockName {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl std::str::FromStr for LockName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

/// The two things that one name can stand for. They live apart: a semaphore never excludes a lock of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A lock, with its exclusive and its shared mode.
    Lock,
    /// A semaphore, with a number of permits.
    Semaphore,
}

/// What makes two locks the same lock: server, namespace, kind and name.
///
/// The order is total and the same in every process, which is what lets [`acquire_all`](crate::acquire_all) take
/// locks without deadlock. It holds no credentials.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockId(Arc<Parts>);

#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Parts {
    server: Arc<str>,
    namespace: Arc<str>,
    kind: Kind,
    name: LockName,
}

impl LockId {
    /// Puts an identity together. `server` is the server's address as its backend canonicalises it, without
    /// credentials.
    pub fn new(server: Arc<str>, namespace: Arc<str>, kind: Kind, name: LockName) -> Self {
        Self(Arc::new(Parts {
            server,
            namespace,
            kind,
            name,
        }))
    }

    /// The server, without credentials, such as `file:///var/lib/app/locks`.
    pub fn server(&self) -> &str {
        &self.0.server
    }

    /// The namespace, which may be empty.
    pub fn namespace(&self) -> &str {
        &self.0.namespace
    }

    /// Whether it is a lock or a semaphore.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The name within the namespace.
    pub fn name(&self) -> &LockName {
        &self.0.name
    }
}

impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parts {
            server,
            namespace,
            kind,
            name,
        } = &*self.0;
        let kind = match kind {
            Kind::Lock => "lock",
            Kind::Semaphore => "semaphore",
        };
        write!(f, "{kind} `{namespace}:{name}` on {server}")
    }
}

impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_byte_exact_and_bounded() {
        for good in [
            "/", "\0", "{}", "\n", "*", "%", ".", "..", "é", "e\u{301}", "🔒", " ",
        ] {
            assert_eq!(LockName::new(good).unwrap().as_str(), good);
        }
        assert!(LockName::new("x".repeat(1_024)).is_ok());
        let err = LockName::new("x".repeat(1_025)).unwrap_err();
        assert!(matches!(err, Error::InvalidName { .. }), "{err}");
        assert!(
            err.to_string().len() < 300,
            "the message quotes it in part: {err}"
        );
        assert_ne!(LockName::new("Job").unwrap(), LockName::new("job").unwrap());
    }

    #[test]
    fn ids_order_by_server_first_and_name_last() {
        let id = |server: &str, kind, name| {
            LockId::new(server.into(), "ns".into(), kind, LockName::new(name).unwrap())
        };
        let mut ids = [
            id("b", Kind::Lock, "a"),
            id("a", Kind::Semaphore, "a"),
            id("a", Kind::Lock, "b"),
            id("a", Kind::Lock, "a"),
        ];
        ids.sort();
        let shown: Vec<_> = ids.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "lock `ns:a` on a",
                "lock `ns:b` on a",
                "semaphore `ns:a` on a",
                "lock `ns:a` on b"
            ]
        );
    }
}
