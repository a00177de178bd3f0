//! The keys on the servers.
//!
//! ```text
//! <ns>/<name>/<lease>.<owner>.<n>                     an exclusive contender; its value is its label
//! <ns>/<name>/<lease>.<owner>.<n>.r                   a shared one
//! <ns>/%semaphores/<name>/<lease>.<owner>.<n>.<size>  one for a permit
//! <ns>/%gone/<owner>.<n>                              an entry that shall never be made
//! <ns>/%fence                                         what is added to revisions to make tokens of them, once tokens were raised
//! <ns>/<name>/…                                       a foreign client's, exclusive
//! ```

use std::sync::Arc;

use lockkit_core::{
    AcquireOptions, LockKind, LockName,
    spi::{
        Mode, OwnerId,
        queue::{Contender, Role, component, name_in},
    },
};

use crate::wire::KeyValue;

/// No lock's keys begin with a `%` that is no escape.
const SEMAPHORES: &str = "%semaphores/";
const GONE: &str = "%gone/";
const FENCE: &str = "%fence";
/// The first bytes of the value of a key whose holder is asked to give up its hold.
const ASKED: &[u8] = b"\0asked\0";

/// The keys that a client uses.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Prefix and namespace. Empty, or with a slash at the end.
    root: Arc<str>,
}

impl Layout {
    pub(crate) fn new(prefix: &str, namespace: &str) -> Self {
        let mut root = String::new();
        for part in [prefix, &component(namespace)] {
            if !part.is_empty() {
                root.push_str(part);
                root.push('/');
            }
        }
        Self { root: root.into() }
    }

    /// Returns the prefix of all keys.
    pub(crate) fn root(&self) -> &str {
        &self.root
    }

    /// Returns the prefix of the keys of those who contend for `name`.
    pub(crate) fn queue(&self, name: &LockName, kind: LockKind) -> String {
        format!("{}{}/", self.locks(kind), component(name.as_str()))
    }

    /// Returns the prefix of the [prefixes](Self::queue) of all names of this kind. Other keys begin with it, too.
    pub(crate) fn locks(&self, kind: LockKind) -> String {
        match kind {
            LockKind::Lock => self.root.to_string(),
            LockKind::Semaphore => format!("{}{SEMAPHORES}", self.root),
        }
    }

    /// Returns the name that a key of this kind is for, and the prefix of that name's keys; `None` if it is something else's.
    pub(crate) fn name(&self, key: &[u8], kind: LockKind) -> Option<(LockName, String)> {
        let rest = key.strip_prefix(self.locks(kind).as_bytes())?;
        // What is behind that may be a foreign client's, and any bytes.
        let end = rest.iter().position(|byte| *byte == b'/')?;
        let name = name_in(std::str::from_utf8(&rest[..end]).ok()?)?;
        let queue = self.queue(&name, kind);
        key.starts_with(queue.as_bytes()).then_some((name, queue))
    }

    /// Returns the key that says that the `n`th entry of this owner shall never be made.
    pub(crate) fn gone(&self, owner: OwnerId, n: u32) -> String {
        format!("{}{GONE}{owner}.{n}", self.root)
    }

    /// Returns the key of what is added to revisions to make tokens of them.
    pub(crate) fn fence(&self) -> String {
        format!("{}{FENCE}", self.root)
    }

    /// Returns a key to read that a client with rights to the locks has the right to. What it holds does not matter.
    pub(crate) fn probe(&self) -> String {
        format!("{}{GONE}", self.root)
    }
}

/// Returns the key of the `n`th entry of this owner. No other request of anyone has this key.
pub(crate) fn entry(queue: &str, lease: i64, owner: OwnerId, n: u32, mode: Mode) -> String {
    let key = format!("{queue}{lease:x}.{owner}.{n}");
    match mode {
        Mode::Exclusive => key,
        Mode::Shared => format!("{key}.r"),
        Mode::Permits(permits) => format!("{key}.{permits}"),
    }
}

/// Returns the contender whose key this is; `None` in a semaphore's queue, if it is no lockkit's.
pub(crate) fn contender<'a>(queue: &str, kind: LockKind, kv: &'a KeyValue) -> Option<Contender<&'a [u8]>> {
    let entry = kv.key.get(queue.len()..)?;
    let role = match kind {
        LockKind::Lock => match last_part(entry) {
            Some("r") => Role::Reader,
            // Also a foreign client's.
            _ => Role::Writer,
        },
        LockKind::Semaphore => Role::Permit(last_part(entry)?.parse().ok()?),
    };
    Some(Contender::new(&kv.key, kv.create_revision, role))
}

/// Returns the fourth and last part of an entry of lockkit's, if it has four.
fn last_part(entry: &[u8]) -> Option<&str> {
    let mut parts = std::str::from_utf8(entry).ok()?.split('.');
    let last = parts.nth(3);
    last.filter(|_| parts.next().is_none())
}

/// Returns the lease that a key of lockkit's has lost, and that its client counts with; `None` if it has lost none, or that is not known.
///
/// Its name has the lease that it was made with. It has been written to once since, and that has taken it off its lease: so its client has not
/// made it go over to another one before, and does not count with another one.
pub(crate) fn lost_lease(queue: &str, kv: &KeyValue) -> Option<i64> {
    if kv.lease != 0 || kv.version != 2 {
        return None;
    }
    let entry = std::str::from_utf8(kv.key.get(queue.len()..)?).ok()?;
    let mut parts = entry.split('.');
    let (lease, owner, _number) = (parts.next()?, parts.next()?, parts.next()?);
    // A mode or a size may follow.
    let is_ours = owner.len() == 32 && parts.nth(1).is_none();
    i64::from_str_radix(lease, 16)
        .ok()
        .filter(|lease| is_ours && *lease > 0)
}

/// Returns the value of a holder's key that asks its holder to give up the hold. The label stays in it.
pub(crate) fn asked_back(kv: &KeyValue) -> Vec<u8> {
    [ASKED, &kv.value].concat()
}

/// Returns whether the holder whose key this is was asked to give up its hold. A key that nobody has written to has its holder's label,
/// which may be anything.
pub(crate) fn is_asked_back(kv: &KeyValue) -> bool {
    kv.version > 1 && kv.value.starts_with(ASKED)
}

/// Returns whether a label reads as the request to its holder to give up the hold, once its key was written to for another reason.
pub(crate) fn reads_as_asked(label: &str) -> bool {
    label.as_bytes().starts_with(ASKED)
}

/// Returns the label of the holder whose key this is. A foreign client's value may be of any length: of that, as much as a label has.
pub(crate) fn label(kv: &KeyValue) -> Option<String> {
    let value = if is_asked_back(kv) {
        &kv.value[ASKED.len()..]
    } else {
        &kv.value
    };
    let label = std::str::from_utf8(value).ok()?;
    let label = &label[..label.floor_char_boundary(AcquireOptions::MAX_LABEL_BYTES)];
    (!label.is_empty()).then(|| label.to_owned())
}

/// Returns the first key and the end of the range of all keys that begin with this prefix.
pub(crate) fn prefix(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    (prefix.into(), after(prefix.as_bytes()))
}

/// Returns the first key after all that begin with these bytes. In UTF-8 no byte is the last there is. Without a prefix, that is the
/// word for no end.
pub(crate) fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    match end.last_mut() {
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;

    fn name(name: &str) -> LockName {
        LockName::new(name).unwrap()
    }

    fn role(queue: &str, kind: LockKind, key: &str) -> Option<Role> {
        let kv = KeyValue {
            key: key.into(),
            create_revision: 7,
            ..KeyValue::default()
        };
        contender(queue, kind, &kv).map(|contender| contender.role)
    }

    #[test]
    fn what_is_written_is_read() {
        let layout = Layout::new("", "ns");
        let two = NonZeroU32::new(2).unwrap();
        for (mode, expected) in [
            (Mode::Exclusive, Role::Writer),
            (Mode::Shared, Role::Reader),
            (Mode::Permits(two), Role::Permit(two)),
        ] {
            let queue = layout.queue(&name("a.b"), mode.kind());
            let key = entry(&queue, 0x0a1b, OwnerId::new(9), 3, mode);
            assert_eq!(role(&queue, mode.kind(), &key), Some(expected), "{key}");
        }
    }

    /// A key that may have gone over to another lease may have a holder who counts with that.
    #[test]
    fn only_a_lease_that_its_client_counts_with_is_known_as_lost() {
        let ours = entry("ns/a/", 0x0a1b, OwnerId::new(9), 3, Mode::Shared);
        let lost = |key: &str, version, lease| {
            let kv = KeyValue {
                key: key.into(),
                version,
                lease,
                ..KeyValue::default()
            };
            lost_lease("ns/a/", &kv)
        };
        assert_eq!(lost(&ours, 2, 0), Some(0x0a1b));
        assert_eq!(lost(&ours[..ours.len() - 2], 2, 0), Some(0x0a1b));
        for (version, lease) in [(1, 0), (3, 0), (2, 0x0a1b), (2, 7)] {
            assert_eq!(lost(&ours, version, lease), None, "{version}, {lease}");
        }
        for foreign in ["694d7f", "1.2.3", "", "0.00000000000000000000000000000009.1"] {
            assert_eq!(lost(&format!("ns/a/{foreign}"), 2, 0), None, "{foreign}");
        }
        assert_eq!(lost(&format!("{ours}.1"), 2, 0), None);
    }

    #[test]
    fn a_foreign_key_is_exclusive_and_no_permit() {
        let layout = Layout::new("", "ns");
        for foreign in ["694d7f", "", "a.b.c.r.r", "x/y", "1.2.3"] {
            let key = format!("ns/a/{foreign}");
            assert_eq!(role("ns/a/", LockKind::Lock, &key), Some(Role::Writer), "{key}");
            let queue = layout.queue(&name("a"), LockKind::Semaphore);
            assert_eq!(
                role(&queue, LockKind::Semaphore, &format!("{queue}{foreign}")),
                None
            );
        }
    }

    #[test]
    fn a_foreign_value_is_cut_to_the_length_of_a_label() {
        let shown = |value: &[u8], version| {
            let kv = KeyValue {
                value: value.into(),
                version,
                ..KeyValue::default()
            };
            label(&kv)
        };
        let most = AcquireOptions::MAX_LABEL_BYTES;
        let own = "a".repeat(most);
        assert_eq!(shown(own.as_bytes(), 1), Some(own.clone()));
        assert_eq!(shown(&[ASKED, own.as_bytes()].concat(), 2), Some(own.clone()));
        let foreign = format!("a{}", "é".repeat(most));
        assert_eq!(
            shown(foreign.as_bytes(), 1),
            Some(format!("a{}", "é".repeat(most / 2 - 1)))
        );
        assert_eq!(shown(b"", 1), None);
    }

    #[test]
    fn keys_are_as_documented() {
        let layout = Layout::new("services", "billing");
        assert_eq!(
            layout.queue(&name("orders/42"), LockKind::Lock),
            "services/billing/orders%2F42/"
        );
        assert_eq!(
            layout.queue(&name("n"), LockKind::Semaphore),
            "services/billing/%semaphores/n/"
        );
        let owner = OwnerId::new(0xff);
        let gone = "services/billing/%gone/000000000000000000000000000000ff.2";
        assert_eq!(layout.gone(owner, 2), gone);
        assert_eq!(Layout::new("", "").queue(&name("n"), LockKind::Lock), "n/");
        assert_eq!(prefix("a/"), (b"a/".to_vec(), b"a0".to_vec()));
        assert_eq!(prefix(""), (Vec::new(), vec![0]));
    }

    #[test]
    fn what_is_no_lock_has_no_name() {
        let layout = Layout::new("", "ns");
        for other in [
            "ns/%gone/1.2",
            "ns/%semaphores/a/1",
            "ns/a",
            "other/a/1",
            "ns/%2f/1",
        ] {
            assert_eq!(layout.name(other.as_bytes(), LockKind::Lock), None, "{other}");
        }
        for lock in [&b"ns/a%2Fb/1.2.3"[..], b"ns/a%2Fb/", b"ns/a%2Fb/\xff/"] {
            let found = layout.name(lock, LockKind::Lock);
            assert_eq!(found, Some((name("a/b"), "ns/a%2Fb/".to_owned())), "{lock:?}");
        }
    }

    proptest! {
        /// `etcdctl lock a` waits for whatever begins with `a/`.
        #[test]
        fn no_queue_is_within_another(a in "\\PC{1,20}", b in "\\PC{1,20}") {
            let layout = Layout::new("", "ns");
            let queue = |text: &str| layout.queue(&name(text), LockKind::Lock);
            prop_assert_eq!(a == b, queue(&a).starts_with(&queue(&b)));
            let key = format!("{}1.2.3", queue(&a));
            let found = layout.name(key.as_bytes(), LockKind::Lock);
            prop_assert_eq!(found, Some((name(&a), queue(&a))));
        }
    }
}
