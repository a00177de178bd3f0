//! The paths on the server, and the names of nodes.

use std::fmt::Write as _;

use lockkit_core::{
    LockKind, LockName,
    spi::{
        Mode,
        queue::{self, Contender, Role},
    },
};
use uuid::Uuid;
use zookeeper_client::Stat;

use crate::Nodes;

/// No lock's directory has a name that begins with a `%` that is no escape.
const SEMAPHORES: &str = "%semaphores";
const SESSIONS: &str = "%sessions";
const FENCE: &str = "%fence";

/// The sequence number from which on a directory counts as used up. The number is a signed 32-bit counter of the server's. At
/// its end it stands still or turns negative. What is left before is room for those that come at once.
const LAST_SEQUENCE: i64 = (1 << 31) - (1 << 20);

/// The data of a holder's node whose holder is asked to give up its hold. Curator's `Revoker` writes the same.
pub(crate) const REVOKE: &[u8] = b"__REVOKE__";

/// Returns whether the holder of the node with these data is asked to give up its hold. A node that nobody has written to has its
/// holder's label, which may be anything.
pub(crate) fn is_revoked(data: &[u8], stat: &Stat) -> bool {
    data == REVOKE && stat.version != 0
}

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

    /// Returns the directory that has the [paths](Self::lock_path) of all names of this kind. It has others, too.
    pub(crate) fn locks_path(&self, kind: LockKind) -> String {
        match kind {
            LockKind::Lock if self.root.is_empty() => "/".to_owned(),
            LockKind::Lock => self.root.clone(),
            LockKind::Semaphore => format!("{}/{SEMAPHORES}", self.root),
        }
    }

    /// Returns the directories that the nodes of this client are in, from the top on. `/` is among them only if the locks are right there:
    /// on most servers everyone may write to it.
    pub(crate) fn directories(&self) -> Vec<String> {
        let root = &self.root;
        let above = root
            .match_indices('/')
            .skip(1)
            .map(|(end, _)| root[..end].to_owned());
        let own = [
            self.locks_path(LockKind::Lock),
            self.locks_path(LockKind::Semaphore),
            format!("{root}/{SESSIONS}"),
        ];
        above.chain(own).collect()
    }

    /// Returns the name whose path ends in this component; `None` if it is something else's.
    pub(crate) fn name(&self, found: &str, kind: LockKind) -> Option<LockName> {
        let name = queue::name_in(found)?;
        (basename(&self.lock_path(&name, kind)) == found).then_some(name)
    }

    /// Returns the node of what is added to transactions to make tokens of them, once tokens were raised.
    pub(crate) fn fence_path(&self) -> String {
        format!("{}/{FENCE}", self.root)
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
    queue::component(text)
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

/// The text before the token in the name of a shared node that has taken the place of an exclusive one.
const TOKEN: &str = "-token-";

/// Returns the path of the shared node that takes the place of the exclusive one at `path`, which the transaction `czxid` has made.
pub(crate) fn shared_in_place_of(path: &str, guid: Uuid, czxid: i64, nodes: Nodes) -> String {
    let stem = path.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = &path[stem.len()..];
    let marker = marker(Mode::Shared, nodes);
    format!("{}/_c_{guid}{TOKEN}{czxid}-{marker}{number}", parent(path))
}

/// Returns the transaction whose token the hold has whose node in a queue is at this path and was made by this transaction.
pub(crate) fn made_by(path: &str, czxid: i64) -> i64 {
    let kept = basename(path).split_once(TOKEN).and_then(|(_, rest)| {
        let (token, _) = rest.split_once('-')?;
        token.parse().ok()
    });
    kept.unwrap_or(czxid)
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
    if asked < 2 {
        return None;
    }
    let mut children = children.iter();
    children.find(|child| *child != own && is_owners(child, owner, asked))
}

/// Returns whether a node is one of the `asked` nodes that this owner has asked for.
pub(crate) fn is_owners(child: &str, owner: u128, asked: u32) -> bool {
    let guid = child.strip_prefix("_c_").and_then(|rest| rest.get(..36));
    let guid = guid.and_then(|guid| Uuid::try_parse(guid).ok());
    guid.is_some_and(|guid| {
        (guid.as_u128() ^ owner) >> NUMBER_BIT < u128::from(asked)
            && (guid.as_u128() ^ owner) << (128 - NUMBER_BIT) == 0
    })
}

/// Parses a node's name; `None` if it is no contender of lockkit's, Curator's or kazoo's.
pub(crate) fn contender(name: &str) -> Option<Contender<&str>> {
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
    Some(Contender::new(name, number, role))
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

/// Returns whether the node at this path is of an exclusive hold, or waits for one.
pub(crate) fn is_writers(path: &str) -> bool {
    contender(basename(path)).is_some_and(|contender| contender.role == Role::Writer)
}

/// Returns the number of the contender at this path.
pub(crate) fn sequence(path: &str) -> Option<i64> {
    contender(basename(path)).map(|contender| contender.order)
}

/// The directory has (nearly) no sequence numbers left.
pub(crate) fn is_used_up(sequence: i64) -> bool {
    !(0..LAST_SEQUENCE).contains(&sequence)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;

    fn parsed(name: &str) -> Option<(i64, Role)> {
        contender(name).map(|contender| (contender.order, contender.role))
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
    fn a_downgraded_node_has_the_number_and_token_it_had() {
        for nodes in [Nodes::Mutex, Nodes::ReadWrite] {
            let writer = format!("/ns/a/_c_guid-{}0000000042", marker(Mode::Exclusive, nodes));
            assert_eq!(made_by(&writer, 77), 77);
            let reader = shared_in_place_of(&writer, guid(1, 1), 77, nodes);
            assert_eq!(parsed(basename(&reader)), Some((42, Role::Reader)), "{reader}");
            assert_eq!(parent(&reader), "/ns/a");
            assert_eq!(made_by(&reader, 99), 77, "{reader}");
        }
        assert_eq!(made_by("/a/_c_guid-token-x-__READ__0000000001", 5), 5);
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
    fn what_is_no_lock_has_no_name() {
        let layout = Layout::new("", "");
        for other in ["%semaphores", "%sessions", "zookeeper", "%2f", "a%", "%FF", ""] {
            assert_eq!(layout.name(other, LockKind::Lock), None, "{other}");
        }
        assert_eq!(layout.locks_path(LockKind::Lock), "/");
        assert_eq!(layout.locks_path(LockKind::Semaphore), "/%semaphores");
        assert_eq!(Layout::new("/c", "ns").locks_path(LockKind::Lock), "/c/ns");
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
            let name = layout.name(basename(&path(&a)), LockKind::Lock);
            prop_assert_eq!(name, LockName::new(&a).ok());
        }
    }
}
