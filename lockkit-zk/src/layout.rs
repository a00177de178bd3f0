//! The paths on the server, and the names of nodes.

use std::{cmp::Ordering, fmt::Write as _, num::NonZeroU32};

use lockkit_core::{LockKind, LockName, spi::Mode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use uuid::Uuid;

use crate::Nodes;

/// The characters that a path component escapes.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');

/// No lock's directory has a name that begins with a `%` that is no escape.
const SEMAPHORES: &str = "%semaphores";
const SESSIONS: &str = "%sessions";

/// The sequence number from which on a directory counts as used up. The number is a signed 32-bit counter of the server's. At
/// its end it stands still or turns negative. What is left before is room for those that come at once.
const LAST_SEQUENCE: i64 = (1 << 31) - (1 << 20);

/// The paths that a client uses.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Chroot and namespace, without a slash at the end.
    root: String,
}

impl Layout {
    pub(crate) fn new(chroot: &str, namespace: &str) -> Self {
        let mut root = chroot.trim_end_matches('/').to_owned();
        if !namespace.is_empty() {
            root = format!("{root}/{}", component(namespace));
        }
        Self { root }
    }

    /// Returns the directory in which the contenders for `name` queue; with [`Nodes::Simple`], the one node.
    pub(crate) fn lock_path(&self, name: &LockName, kind: LockKind) -> String {
        let name = component(name.as_str());
        match kind {
            LockKind::Lock => format!("{}/{name}", self.root),
            LockKind::Semaphore => format!("{}/{SEMAPHORES}/{name}", self.root),
        }
    }

    /// Returns the node that the session of this id writes to, to prove that it is alive.
    pub(crate) fn heartbeat_path(&self, id: i64) -> String {
        format!("{}/{SESSIONS}/{id:016x}", self.root)
    }
}

/// Encodes `text` as one component of a path. Every byte of a name that ZooKeeper reserves is escaped.
fn component(text: &str) -> String {
    if matches!(text, "." | ".." | "zookeeper") {
        return text.bytes().fold(String::new(), |mut encoded, byte| {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
            encoded
        });
    }
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Returns the directory that a path is in.
pub(crate) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Returns the last component of a path.
pub(crate) fn basename(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// Returns the part of a node's name between its GUID and its sequence number.
pub(crate) fn marker(mode: Mode, nodes: Nodes) -> String {
    match (mode, nodes) {
        (Mode::Exclusive, Nodes::ReadWrite) => "__WRIT__".to_owned(),
        (Mode::Shared, Nodes::ReadWrite) => "__READ__".to_owned(),
        (Mode::Exclusive, _) => "lock-".to_owned(),
        // Curator's mutex sorts by what follows `lock-`, so that it queues behind this one too.
        (Mode::Shared, _) => "__READ__-lock-".to_owned(),
        (Mode::Permits(permits), _) => format!("permit-{permits}-"),
    }
}

/// A claim's node, which may be there or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NodeRef {
    /// The node at this path.
    At(String),
    /// The node with this path and some sequence number behind it.
    Prefix(String),
    /// The node at this path, if its data begin with this mark. Others make nodes at the same path.
    Marked { path: String, mark: String },
}

impl NodeRef {
    /// Returns how the node's data begin; empty if the path alone tells.
    pub(crate) fn mark(&self) -> &str {
        match self {
            Self::At(_) | Self::Prefix(_) => "",
            Self::Marked { mark, .. } => mark,
        }
    }
}

/// The bit of a GUID from which on it tells the number of the node. The GUID is the owner's otherwise.
const NUMBER_BIT: u32 = 96;

/// Returns the GUID of the `which`th node that this owner asks for, from 0 on.
pub(crate) fn guid(owner: u128, which: u32) -> Uuid {
    Uuid::from_u128(owner ^ (u128::from(which) << NUMBER_BIT))
}

/// Returns a node that this owner made before `own` and believed not to be there. `own` is the last of the `asked` nodes that
/// the owner has asked for.
pub(crate) fn earlier_node<'a>(
    children: &'a [String],
    own: &str,
    owner: u128,
    asked: u32,
) -> Option<&'a String> {
    let is_owners = |child: &str| {
        let guid = child.strip_prefix("_c_").and_then(|rest| rest.get(..36));
        let guid = guid.and_then(|guid| Uuid::try_parse(guid).ok());
        guid.is_some_and(|guid| {
            (guid.as_u128() ^ owner) >> NUMBER_BIT < u128::from(asked)
                && (guid.as_u128() ^ owner) << (128 - NUMBER_BIT) == 0
        })
    };
    if asked < 2 {
        return None;
    }
    children.iter().find(|child| *child != own && is_owners(child))
}

/// A contender in a directory, by the name of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contender<'a> {
    pub(crate) name: &'a str,
    pub(crate) sequence: i64,
    pub(crate) role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Writer,
    Reader,
    Permit(NonZeroU32),
}

impl<'a> Contender<'a> {
    /// Parses a node's name; `None` if it is no contender of lockkit's, Curator's or kazoo's.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &name[stem.len()..];
        if digits.len() < 10 {
            return None;
        }
        // A counter that ran over is written with a sign.
        let negative = stem
            .strip_suffix('-')
            .and_then(|stem| Some((role(stem)?, format!("-{digits}"))));
        let (role, number) = match negative {
            Some((role, number)) => (role, number.parse().ok()?),
            None => (role(stem)?, digits.parse().ok()?),
        };
        Some(Self {
            name,
            sequence: number,
            role,
        })
    }

    pub(crate) fn kind(&self) -> LockKind {
        match self.role {
            Role::Writer | Role::Reader => LockKind::Lock,
            Role::Permit(_) => LockKind::Semaphore,
        }
    }

    /// Compares by number. Equal numbers, from a counter that stands still, are compared by name.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        (self.sequence, self.name).cmp(&(other.sequence, other.name))
    }
}

fn role(stem: &str) -> Option<Role> {
    if stem.ends_with("__READ__") || stem.ends_with("__READ__-lock-") || stem.ends_with("__rlock__") {
        return Some(Role::Reader);
    }
    if stem.ends_with("lock-") || stem.ends_with("__WRIT__") || stem.ends_with("__lock__") {
        return Some(Role::Writer);
    }
    let (_, permits) = stem.strip_suffix('-')?.rsplit_once("-permit-")?;
    permits.parse().ok().map(Role::Permit)
}

/// Returns the number of the contender at this path.
pub(crate) fn sequence(path: &str) -> Option<i64> {
    Contender::parse(basename(path)).map(|contender| contender.sequence)
}

/// The directory has (nearly) no sequence numbers left.
pub(crate) fn is_used_up(sequence: i64) -> bool {
    !(0..LAST_SEQUENCE).contains(&sequence)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(name: &str) -> Option<(i64, Role)> {
        Contender::parse(name).map(|contender| (contender.sequence, contender.role))
    }

    #[test]
    fn each_layout_is_read() {
        let three = NonZeroU32::new(3).unwrap();
        let guid = "_c_0b1fdd6a-8b6c-4d0e-9f43-1f0f6d0b7c11";
        for (name, expected) in [
            (format!("{guid}-lock-0000000007"), Some((7, Role::Writer))),
            (
                format!("{guid}-__READ__-lock-0000000008"),
                Some((8, Role::Reader)),
            ),
            (format!("{guid}-__WRIT__0000000009"), Some((9, Role::Writer))),
            (format!("{guid}-__READ__0000000010"), Some((10, Role::Reader))),
            (
                format!("{guid}-permit-3-0000000011"),
                Some((11, Role::Permit(three))),
            ),
            (
                "0123456789abcdef__lock__0000000012".to_owned(),
                Some((12, Role::Writer)),
            ),
            (
                "0123456789abcdef__rlock__0000000013".to_owned(),
                Some((13, Role::Reader)),
            ),
            (
                format!("{guid}-lock--2147483648"),
                Some((-2_147_483_648, Role::Writer)),
            ),
            (
                format!("{guid}-__WRIT__-2147483648"),
                Some((-2_147_483_648, Role::Writer)),
            ),
            (
                format!("{guid}-lock-2147483647"),
                Some((2_147_483_647, Role::Writer)),
            ),
            (format!("{guid}-lease-0000000001"), None),
            (format!("{guid}-lock-000001"), None),
            (format!("{guid}-permit-0-0000000011"), None),
            ("orders".to_owned(), None),
            ("0000000001".to_owned(), None),
        ] {
            assert_eq!(parsed(&name), expected, "{name}");
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let two = NonZeroU32::new(2).unwrap();
        for (mode, nodes, role) in [
            (Mode::Exclusive, Nodes::Mutex, Role::Writer),
            (Mode::Shared, Nodes::Mutex, Role::Reader),
            (Mode::Permits(two), Nodes::Mutex, Role::Permit(two)),
            (Mode::Exclusive, Nodes::ReadWrite, Role::Writer),
            (Mode::Shared, Nodes::ReadWrite, Role::Reader),
            (Mode::Permits(two), Nodes::ReadWrite, Role::Permit(two)),
        ] {
            let name = format!("_c_guid-{}{:010}", marker(mode, nodes), 42);
            assert_eq!(parsed(&name), Some((42, role)), "{name}");
        }
    }

    #[test]
    fn reserved_names_are_escaped_and_nothing_else_becomes_one() {
        let layout = Layout::new("/chroot/", "");
        let path = |name: &str| layout.lock_path(&LockName::new(name).unwrap(), LockKind::Lock);
        assert_eq!(path("."), "/chroot/%2E");
        assert_eq!(path(".."), "/chroot/%2E%2E");
        assert_eq!(path("zookeeper"), "/chroot/%7A%6F%6F%6B%65%65%70%65%72");
        assert_eq!(path("orders/42"), "/chroot/orders%2F42");
        assert_eq!(path("%2E"), "/chroot/%252E");
        assert_eq!(path("é\0"), "/chroot/%C3%A9%00");
        assert_eq!(
            Layout::new("", "zookeeper").lock_path(&LockName::new("n").unwrap(), LockKind::Semaphore),
            "/%7A%6F%6F%6B%65%65%70%65%72/%semaphores/n"
        );
        assert_eq!(
            Layout::new("", "").heartbeat_path(0x10),
            "/%sessions/0000000000000010"
        );
    }

    #[test]
    fn the_end_of_the_numbers_is_seen_before_it_comes() {
        assert!(!is_used_up(0));
        assert!(!is_used_up(LAST_SEQUENCE - 1));
        assert!(is_used_up(LAST_SEQUENCE));
        assert!(is_used_up(i64::from(i32::MAX)));
        assert!(is_used_up(i64::from(i32::MIN)), "it ran over");
    }

    #[test]
    fn an_earlier_node_is_told_from_others() {
        let owner = u128::MAX / 3;
        let named = |which: u32, number: u32| format!("_c_{}-lock-{number:010}", guid(owner, which));
        let of_another = format!("_c_{}-lock-0000000001", Uuid::from_u128(owner ^ 1));
        let children = vec![
            of_another,
            "junk".to_owned(),
            named(0, 3),
            named(1, 4),
            named(2, 5),
        ];
        let found = |own: u32, number, asked| earlier_node(&children, &named(own, number), owner, asked);
        assert_eq!(found(1, 4, 2), Some(&named(0, 3)));
        assert_eq!(found(0, 3, 1), None, "the others were asked for by nobody");
        assert_eq!(earlier_node(&children[..4], &named(0, 3), owner, 1), None);
        assert_eq!(earlier_node(&children[3..4], &named(1, 4), owner, 2), None);
    }

    proptest! {
        #[test]
        fn names_are_encoded_injectively(a in "\\PC{1,20}", b in "\\PC{1,20}") {
            let layout = Layout::new("", "ns");
            let path = |name: &str| layout.lock_path(&LockName::new(name).unwrap(), LockKind::Lock);
            prop_assert_eq!(a == b, path(&a) == path(&b));
            prop_assert!(!path(&a).contains("/%s"), "{} is where semaphores and sessions are", path(&a));
            prop_assert_eq!(path(&a).matches('/').count(), 2);
        }
    }
}
