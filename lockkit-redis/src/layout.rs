//! The layout on the server, documented and stable. Other clients share it: an exclusive lock is a plain string at
//! `<namespace>:<name>`, set with `NX PX` and deleted after a comparison.

use std::{
    borrow::Cow,
    fmt::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{
    Error, FencingToken, Holder, LockKind, LockName, Result,
    spi::{ClaimRequest, Mode, OwnerId},
};

/// The beginning of what is lockkit's own in a namespace, and no lock.
const OWN: &str = "lockkit#";

/// Returns the beginning of all keys and channels that belong to the lock with this key: the namespace and its colon. So a user whose
/// rights end there reaches no other namespace. The scripts do the same.
fn prefix(key: &str) -> &str {
    let is_part = |char: char| char.is_ascii_alphanumeric() || "._-".contains(char);
    match key.split_once(':') {
        Some((namespace, _)) if !namespace.is_empty() && namespace.chars().all(is_part) => {
            &key[..=namespace.len()]
        }
        _ => "",
    }
}

/// Returns a key or channel of lockkit's own in a namespace.
pub(crate) fn own(namespace: &str, what: &str) -> String {
    let colon = if namespace.is_empty() { "" } else { ":" };
    [namespace, colon, OWN, what].concat()
}

/// Returns one that belongs to the lock with this key.
fn own_of(lock: &[u8], what: &str) -> Vec<u8> {
    let end = lock
        .iter()
        .position(|byte| *byte == b':')
        .map_or(0, |colon| colon + 1);
    let before = std::str::from_utf8(&lock[..end]).map_or("", prefix);
    [before, OWN, what].concat().into_bytes()
}

/// Returns a key that is never there.
pub(crate) fn nowhere(namespace: &str) -> String {
    own(namespace, "nowhere")
}

/// Returns the key of the marker of one of several masters.
pub(crate) fn marker(namespace: &str) -> String {
    own(namespace, "redlock")
}

fn qualified(namespace: &str, name: &str) -> String {
    if namespace.is_empty() {
        name.to_owned()
    } else {
        [namespace, ":", name].concat()
    }
}

/// Returns whether a name, or the beginning of one, would be taken for one of our own keys, or for an escaped name.
fn is_escaped(rest: &str) -> bool {
    rest.trim_start_matches('%').starts_with(OWN)
}

/// Checks that a name, or the beginning of one, has no key of another namespace. Each has counters of its own, and with several masters
/// a quarantine and a longest ttl.
///
/// # Errors
/// [`Error::InvalidOptions`] for `a:b` in the empty namespace, which would be `b` in the namespace `a`.
pub(crate) fn check(namespace: &str, name: &str) -> Result<()> {
    if namespace.is_empty() && !prefix(name).is_empty() {
        let reason = "a name such as `a:b` is refused without a namespace, since it is the lock `b` of the namespace `a`: set that \
                      namespace and leave it out of the name";
        return Err(Error::invalid_option("namespace", reason));
    }
    Ok(())
}

/// The key of a lock or semaphore.
///
/// # Errors
/// As [`check`].
pub(crate) fn key(namespace: &str, name: &LockName, kind: LockKind) -> Result<Vec<u8>> {
    check(namespace, name.as_str())?;
    let full = qualified(namespace, name.as_str());
    let (prefix, rest) = full.split_at(prefix(&full).len());
    let lock = [prefix, if is_escaped(rest) { "%" } else { "" }, rest].concat();
    Ok(match kind {
        LockKind::Semaphore => format!("{prefix}{OWN}semaphore:{{{lock}}}").into_bytes(),
        LockKind::Lock => lock.into_bytes(),
    })
}

/// Draws a name for a client: the channel of its wake-ups, and the key that is there while it is alive. The process id is in it,
/// since both sides of a fork draw the same numbers. The `t` tells the scripts that the client takes a hand-off from the push, which
/// then names the token.
pub(crate) fn new_client(namespace: &str, takes_hand_offs: bool) -> String {
    let suffix = if takes_hand_offs { "t" } else { "" };
    let name = format!(
        "client:{:x}.{:016x}{suffix}",
        std::process::id(),
        fastrand::u64(..)
    );
    own(namespace, &name)
}

/// The key of the counter of tokens by which the lock with this key goes, where there is one master.
pub(crate) fn fence(lock: &[u8]) -> Vec<u8> {
    own_of(lock, "fence")
}

/// The key of a lock's queue.
pub(crate) fn queue(lock: &[u8]) -> Vec<u8> {
    [&own_of(lock, "queue:{"), lock, b"}"].concat()
}

/// The channel on which clients announce that they have taken or given up this lock.
pub(crate) fn watch_channel(lock: &[u8]) -> Vec<u8> {
    [&own_of(lock, "client:watch:"), lock].concat()
}

/// Spells the mode as the scripts do.
pub(crate) fn mode(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Exclusive => "x".into(),
        Mode::Shared => "s".into(),
        Mode::Permits(permits) => format!("p{permits}").into(),
    }
}

/// The placeholder that the server replaces by the token.
const TOKEN: &str = "%d";

/// The record of a hold: `lockkit:<owner> <tokens> <first token> <client> <label>`. A request passes it with a `%d` for the token,
/// which the server fills in.
#[derive(Debug)]
pub(crate) struct Record {
    /// The text, with `%d` for the token.
    text: String,
    /// The position of the placeholder.
    token_at: usize,
    /// The label has a `%`.
    escapes: bool,
}

impl Record {
    pub(crate) fn new(request: &ClaimRequest, client: &str) -> Self {
        let label = request.label.as_deref().unwrap_or_default();
        let mut text = String::with_capacity(64 + client.len() + label.len());
        text.push_str("lockkit:");
        push_hex(&mut text, request.owner);
        let _ = write!(text, " {} ", request.tokens);
        let token_at = text.len();
        for part in [TOKEN, " ", client, " ", label] {
            text.push_str(part);
        }
        Self {
            text,
            token_at,
            escapes: label.contains('%'),
        }
    }

    /// Returns the record with `%d` for the token.
    pub(crate) fn template(&self) -> Cow<'_, str> {
        if !self.escapes {
            return (&self.text).into();
        }
        let (before, after) = self.around_token();
        format!("{before}{TOKEN}{}", after.replace('%', "%%")).into()
    }

    /// Returns the record as the server has it with this token. 0, which is no token, stands for an unknown one.
    pub(crate) fn with_token(&self, token: u64) -> String {
        let (before, after) = self.around_token();
        format!("{before}{token}{after}")
    }

    fn around_token(&self) -> (&str, &str) {
        let (before, token) = self.text.split_at(self.token_at);
        (before, &token[TOKEN.len()..])
    }

    /// Returns the beginning of an owner's record, which is enough to release what its claim left.
    pub(crate) fn of(owner: OwnerId) -> String {
        format!("lockkit:{owner} ")
    }
}

/// Writes an owner as `Display` does, in a tenth of the time. Every acquisition needs it.
fn push_hex(text: &mut String, owner: OwnerId) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in owner.get().to_be_bytes() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(DIGITS[usize::from(digit)]));
        }
    }
}

/// Parses a record without its prefix. `None` if it is not lockkit's.
pub(crate) fn holder(text: &str, left: Option<Duration>) -> Option<Holder> {
    let mut parts = text.splitn(5, ' ');
    let owner = parts.next()?;
    if owner.len() != 32 || !owner.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let token = parts.nth(1)?.parse().ok()?;
    let label = parts.nth(1)?;
    let label = (!label.is_empty()).then(|| label.to_owned());
    Some(Holder::new(FencingToken::new(token), label, left).since(since(token)))
}

/// Returns when a token was drawn: it begins at the clock, in µs since 1970. A counter that is ahead of the clock does not tell.
fn since(token: u64) -> Option<SystemTime> {
    let drawn = UNIX_EPOCH.checked_add(Duration::from_micros(token))?;
    (drawn <= SystemTime::now()).then_some(drawn)
}

/// Returns a pattern for `SCAN` that all keys match which are locks of this kind with this prefix. Some others may match, too.
pub(crate) fn pattern(namespace: &str, begin: &str, kind: LockKind) -> Vec<u8> {
    let full = qualified(namespace, begin);
    let (prefix, rest) = full.split_at(prefix(&full).len());
    // A name that begins so may have another beginning as a key.
    let may_be_escaped = is_escaped(rest) || OWN.starts_with(rest.trim_start_matches('%'));
    let lock = if may_be_escaped { prefix } else { &full };
    let mut pattern = Vec::with_capacity(full.len() + 32);
    let literal = match kind {
        LockKind::Lock => lock.to_owned(),
        LockKind::Semaphore => format!("{prefix}{OWN}semaphore:{{{lock}"),
    };
    for byte in literal.bytes() {
        if b"*?[]\\".contains(&byte) {
            pattern.push(b'\\');
        }
        pattern.push(byte);
    }
    pattern.push(b'*');
    pattern
}

/// Returns the name of the lock or semaphore with this key; `None` if the key is something else.
pub(crate) fn name(namespace: &str, found: &[u8], kind: LockKind) -> Option<LockName> {
    let text = std::str::from_utf8(found).ok()?;
    let lock = match kind {
        LockKind::Lock => text,
        LockKind::Semaphore => text[prefix(text).len()..]
            .strip_prefix(OWN)?
            .strip_prefix("semaphore:{")?
            .strip_suffix('}')?,
    };
    let (prefix, rest) = lock.split_at(prefix(lock).len());
    let named = |rest: &str| {
        let full = [prefix, rest].concat();
        let name = if namespace.is_empty() {
            full.as_str()
        } else {
            full.strip_prefix(namespace)?.strip_prefix(':')?
        };
        let is_its = |name: &LockName| key(namespace, name, kind).is_ok_and(|key| key == found);
        LockName::new(name).ok().filter(is_its)
    };
    rest.strip_prefix('%').and_then(named).or_else(|| named(rest))
}

/// Returns the record in the value of an exclusive lock.
pub(crate) fn record_in(value: &str) -> Option<&str> {
    value
        .strip_prefix("lockkit:")
        .or_else(|| value.strip_prefix("lockkit+"))
}

/// Returns whether a value names a group: shared holders, or holders of permits.
pub(crate) fn is_group(value: &str) -> bool {
    value.starts_with(OWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> LockName {
        LockName::new(text).unwrap()
    }

    fn text(namespace: &str, lock: &str, kind: LockKind) -> String {
        String::from_utf8(key(namespace, &name(lock), kind).unwrap()).unwrap()
    }

    #[test]
    fn keys_are_what_is_documented() {
        assert_eq!(text("lockkit", "orders/42", LockKind::Lock), "lockkit:orders/42");
        assert_eq!(text("", "orders/42", LockKind::Lock), "orders/42");
        assert_eq!(text("a", "lockkit#fence", LockKind::Lock), "a:%lockkit#fence");
        assert_eq!(
            text("a", "gpu", LockKind::Semaphore),
            "a:lockkit#semaphore:{a:gpu}"
        );
        assert_eq!(text("", "gpu", LockKind::Semaphore), "lockkit#semaphore:{gpu}");
        assert_eq!(queue(b"a:n"), b"a:lockkit#queue:{a:n}");
        assert_eq!(queue(b"n"), b"lockkit#queue:{n}");
        assert_eq!(watch_channel(b"a:n"), b"a:lockkit#client:watch:a:n");
        assert!(new_client("a", true).starts_with("a:lockkit#client:"));
        assert_eq!(marker(""), "lockkit#redlock");
    }

    /// Else there would be two ways to one lock, with a counter each, and with several masters a quarantine each.
    #[test]
    fn no_two_namespaces_share_a_key() {
        for kind in [LockKind::Lock, LockKind::Semaphore] {
            for lock in ["b", "lockkit#fence", "%lockkit#", "b:c"] {
                assert!(key("a", &name(lock), kind).is_ok());
                let refused = key("", &name(&format!("a:{lock}")), kind).unwrap_err();
                assert!(refused.to_string().contains("namespace"), "{refused}");
            }
            for lock in [":a", "é:b", "a b:c", "lockkit#election:jobs", "{a:b}"] {
                assert!(key("", &name(lock), kind).is_ok(), "{lock}");
            }
        }
    }

    #[test]
    fn all_of_a_namespace_begins_with_it() {
        let lock = key("a.b-c_9", &name("x:y"), LockKind::Lock).unwrap();
        let semaphore = key("a.b-c_9", &name("lockkit#"), LockKind::Semaphore).unwrap();
        for lock in [lock, semaphore] {
            for own in [queue(&lock), watch_channel(&lock), lock] {
                assert!(own.starts_with(b"a.b-c_9:"), "{own:?}");
            }
        }
    }

    #[test]
    fn no_name_is_an_own_key_and_no_two_share_one() {
        let mut seen = std::collections::HashSet::new();
        for lock in [
            "lockkit#fence",
            "%lockkit#fence",
            "%%lockkit#fence",
            "%",
            "%lock",
            "lockkit",
        ] {
            let key = text("", lock, LockKind::Lock);
            assert!(!key.starts_with(OWN), "{key}");
            assert!(seen.insert(key), "{lock}");
        }
    }

    #[test]
    fn every_key_leads_back_to_its_name_and_matches_its_pattern() {
        let names = [
            "a",
            "a*?[]\\^-b",
            "é",
            "%",
            "lockkit#a",
            "%lockkit#a",
            "%%lockkit#a",
            "lockkit#semaphore:{a}",
            "}",
            "a:b",
            "a:lockkit#b",
            "a:%lockkit#b",
            ":a",
            "é:lockkit#b",
        ];
        for (namespace, kind) in [
            ("ns", LockKind::Lock),
            ("ns", LockKind::Semaphore),
            ("", LockKind::Lock),
            ("", LockKind::Semaphore),
        ] {
            for text in names {
                let lock = name(text);
                let Ok(found) = key(namespace, &lock, kind) else {
                    assert!(namespace.is_empty() && text.starts_with("a:"), "{text}");
                    let theirs = key("a", &name(&text[2..]), kind).unwrap();
                    assert_eq!(super::name(namespace, &theirs, kind), None, "{text}");
                    continue;
                };
                assert_eq!(
                    super::name(namespace, &found, kind),
                    Some(lock),
                    "{namespace} {text}"
                );
                for (end, _) in text.char_indices() {
                    let pattern = pattern(namespace, &text[..end], kind);
                    assert!(
                        matches(&pattern, &found),
                        "{namespace} {kind:?} {text} {end}: {pattern:?}"
                    );
                }
            }
            for other in [
                &b"lockkit#fence"[..],
                b"other:a",
                b"\xff",
                b"ns:",
                b"ns:lockkit#fence",
                b"ns:lockkit#queue:{ns:a}",
                b"",
            ] {
                let kept = super::name(namespace, other, kind);
                let is_theirs = namespace.is_empty()
                    && kind == LockKind::Lock
                    && !other.windows(8).any(|part| part == OWN.as_bytes());
                assert!(
                    kept.is_none() || is_theirs,
                    "{namespace} {kind:?} {other:?}: {kept:?}"
                );
            }
        }
        assert_eq!(pattern("ns", "a*[", LockKind::Lock), b"ns:a\\*\\[*");
    }

    /// A pattern whose only wildcard is the last character.
    fn matches(pattern: &[u8], key: &[u8]) -> bool {
        let mut literal = Vec::new();
        let mut escaped = false;
        for byte in &pattern[..pattern.len() - 1] {
            escaped = !escaped && *byte == b'\\';
            if !escaped {
                literal.push(*byte);
            }
        }
        key.starts_with(&literal)
    }

    #[test]
    fn a_record_is_read_back_whatever_the_label() {
        for label in ["", "host-7", "100 % of %d %s", "line\nbreak  two", "ü\0"] {
            let mut request = ClaimRequest::new(
                name("n"),
                Mode::Exclusive,
                Duration::from_secs(1),
                OwnerId::new(0xf0e1 << 64),
            );
            request.label = Some(label.into());
            let record = Record::new(&request, "client");
            let value = record.with_token(41);
            assert!(value.starts_with(&Record::of(request.owner)));
            assert_eq!(
                record.template().replacen("%d", "41", 1).replace("%%", "%"),
                value
            );
            let shown = holder(record_in(&value).unwrap(), None).unwrap();
            assert_eq!(shown.token.get(), 41);
            assert_eq!(shown.label.unwrap_or_default(), label);
        }
        assert!(holder("foreign 1 2 3 4", None).is_none());
    }
}
