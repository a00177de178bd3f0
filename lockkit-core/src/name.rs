//! The names and the identities of locks.

use std::{fmt, sync::Arc};

use crate::{Error, Result};

/// The name of a lock: any non-empty UTF-8 text of at most 1,024 bytes, case-sensitive and byte-exact.
///
/// A `LockName` is always valid. Each backend encodes it injectively into what its server allows. Cloning is cheap.
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
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "String", into = "String")
)]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes of UTF-8.
    pub const MAX_BYTES: usize = 1_024;

    /// The beginning of the names of the locks that elections are held with. No other lock has such a name.
    pub(crate) const OF_ELECTIONS: &str = "lockkit#election:";

    /// The beginning of the names of the locks by which one at a time collects several permits of a semaphore. No other lock has such a
    /// name.
    pub(crate) const OF_COLLECTORS: &str = "lockkit#permits:";

    /// Checks `name`, and takes it as it is: no trimming, no case folding, no Unicode normalisation.
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
        Err(Self::refused(name, reason))
    }

    /// Returns the error for a name that is refused for this reason.
    pub(crate) fn refused(name: &str, reason: &'static str) -> Error {
        Error::InvalidName {
            name: abbreviated(name),
            reason,
        }
    }

    /// Checks the beginning of a name, which may be empty.
    pub(crate) fn check_prefix(prefix: &str) -> Result<()> {
        if prefix.is_empty() {
            return Ok(());
        }
        Self::new(prefix).map(drop)
    }

    /// Returns whether an election is held with the lock of this name.
    pub(crate) fn is_of_election(&self) -> bool {
        self.0.starts_with(Self::OF_ELECTIONS)
    }

    /// Returns whether one who holds the lock of this name collects permits.
    pub(crate) fn is_of_collector(&self) -> bool {
        self.0.starts_with(Self::OF_COLLECTORS)
    }

    /// Returns the name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the start of an over-long name, for an error message.
fn abbreviated(name: &str) -> String {
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

/// Shows the name as it was given. It may have several lines: for a log, use [`LockId`], errors and `{:?}`, which escape it.
impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Text from outside, escaped for a line of a log: line ends, control sequences of a terminal, and backslashes.
pub(crate) struct Shown<'a>(pub(crate) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_escaped(f, self.0, &['\'', '"'])
    }
}

/// Text that may be escaped in part, as one line of a log. What is escaped stays as it is.
pub(crate) struct OneLine<'a>(pub(crate) &'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_escaped(f, self.0, &['\'', '"', '\\'])
    }
}

/// Escapes all but these characters that `escape_debug` would.
fn write_escaped(f: &mut fmt::Formatter<'_>, text: &str, kept: &[char]) -> fmt::Result {
    for part in text.split_inclusive(kept) {
        let plain = part.trim_end_matches(kept);
        write!(f, "{}{}", plain.escape_debug(), &part[plain.len()..])?;
    }
    Ok(())
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

impl TryFrom<String> for LockName {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

impl From<LockName> for String {
    fn from(name: LockName) -> Self {
        name.as_str().to_owned()
    }
}

/// The kind of thing that a name stands for. A semaphore never excludes the lock of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum LockKind {
    /// A lock, with its exclusive and its shared mode.
    Lock,
    /// A semaphore, with a number of permits.
    Semaphore,
}

/// The identity of a lock: server, namespace, kind and name. It holds no credentials.
///
/// Its order is total and the same in every process. A server that goes by two addresses has two identities, so two ids may be of one
/// lock: [`acquire_all`](crate::acquire_all) allows for that.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockId(Arc<Parts>);

#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Parts {
    server: Arc<str>,
    namespace: Arc<str>,
    kind: LockKind,
    name: LockName,
}

impl LockId {
    /// Makes an identity. `server` is the server's address as its backend canonicalises it, without credentials.
    pub fn new(server: Arc<str>, namespace: Arc<str>, kind: LockKind, name: LockName) -> Self {
        Self(Arc::new(Parts {
            server,
            namespace,
            kind,
            name,
        }))
    }

    /// Returns the server, without credentials, such as `file:///var/lib/app/locks`.
    pub fn server(&self) -> &str {
        &self.0.server
    }

    /// Returns the namespace, which may be empty.
    pub fn namespace(&self) -> &str {
        &self.0.namespace
    }

    /// Returns its kind: a lock or a semaphore.
    pub fn kind(&self) -> LockKind {
        self.0.kind
    }

    /// Returns the name within the namespace.
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
            LockKind::Lock => "lock",
            LockKind::Semaphore => "semaphore",
        };
        let (namespace, name, server) = (Shown(namespace), Shown(name.as_str()), Shown(server));
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
    fn shown_text_is_one_line_and_commands_no_terminal() {
        for (name, shown) in [
            ("a\nERROR: b\r", "a\\nERROR: b\\r"),
            ("\u{1b}[2J\u{7}\0", "\\u{1b}[2J\\u{7}\\0"),
            ("\u{202e}drow", "\\u{202e}drow"),
            ("a\u{2028}b", "a\\u{2028}b"),
            ("C:\\x", "C:\\\\x"),
            (
                "it's \"all\" `good`, é e\u{301} नि 🔒",
                "it's \"all\" `good`, é e\u{301} नि 🔒",
            ),
        ] {
            assert_eq!(Shown(name).to_string(), shown);
            let lock = LockName::new(name).unwrap();
            let id = LockId::new(name.into(), name.into(), LockKind::Lock, lock.clone());
            let timeout = Error::Timeout {
                backend: "memory",
                name: lock.clone(),
                waited: std::time::Duration::ZERO,
            };
            for text in [
                id.to_string(),
                format!("{id:?}"),
                timeout.to_string(),
                Error::lost("memory", lock.clone(), crate::LossReason::Expired).to_string(),
                Error::transient("memory", "acquire", "x")
                    .for_lock(&lock)
                    .to_string(),
                Error::invalid_option("permits", format!("`{name}` is in use")).to_string(),
                Error::invalid_url(name, name).to_string(),
                Error::unsupported("memory", name).to_string(),
                Error::unknown_scheme(name, "memory").to_string(),
                Error::feature_disabled(name, "redis").to_string(),
                crate::spi::chain(&Error::permanent("memory", "acquire", "x").for_lock(&lock)),
            ] {
                assert!(
                    text.contains(shown) || text.contains(&shown.replace('"', "\\\"")),
                    "{text:?}"
                );
                assert!(
                    !text.contains(|c: char| c.is_control() || "\u{202e}\u{2028}".contains(c)),
                    "{text:?}"
                );
            }
        }
    }

    /// A server quotes what it was sent.
    #[test]
    fn a_chain_is_one_line_whatever_a_server_says() {
        let name = "a\nERROR: b\u{1b}[2J";
        let said = format!("Duplicate entry '{name}' in C:\\x");
        let error = Error::transient("memory", "acquire", said).for_lock(&LockName::new(name).unwrap());
        assert_eq!(
            crate::spi::chain(&error),
            "memory: acquire failed for lock `a\\nERROR: b\\u{1b}[2J`: \
             Duplicate entry 'a\\nERROR: b\\u{1b}[2J' in C:\\x"
        );
    }

    #[test]
    fn ids_order_by_server_first_and_name_last() {
        let id = |server: &str, kind, name| {
            LockId::new(server.into(), "ns".into(), kind, LockName::new(name).unwrap())
        };
        let mut ids = [
            id("b", LockKind::Lock, "a"),
            id("a", LockKind::Semaphore, "a"),
            id("a", LockKind::Lock, "b"),
            id("a", LockKind::Lock, "a"),
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
