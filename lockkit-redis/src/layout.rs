//! The layout on the server, documented and stable. Other clients share it: an exclusive lock is a plain string at
//! `<namespace>:<name>`, set with `NX PX` and deleted after a comparison.

use std::{borrow::Cow, fmt::Write as _, time::Duration};

use lockkit_core::{
    FencingToken, Holder, LockKind, LockName,
    spi::{ClaimRequest, Mode, OwnerId},
};

/// A key that is never there.
pub(crate) const NOWHERE: &[u8] = b"lockkit#nowhere";

/// The prefix of lockkit's own keys, which are not locks.
const OWN: &str = "lockkit#";

/// The key of a lock or semaphore.
pub(crate) fn key(namespace: &str, name: &LockName, kind: LockKind) -> Vec<u8> {
    let name = name.as_str();
    let lock = if namespace.is_empty() {
        // A name that looks like one of our own keys is escaped, and so is one that looks like an escaped name.
        let escape = name.trim_start_matches('%').starts_with(OWN);
        [if escape { "%" } else { "" }, name].concat()
    } else {
        [namespace, ":", name].concat()
    };
    match kind {
        LockKind::Semaphore => format!("{OWN}semaphore:{{{lock}}}").into_bytes(),
        LockKind::Lock => lock.into_bytes(),
    }
}

/// Draws a name for a client. The process id is in it, since both sides of a fork draw the same numbers. The `t` tells the
/// scripts that the client takes a hand-off from the push, which then names the token.
pub(crate) fn new_client(takes_hand_offs: bool) -> String {
    let suffix = if takes_hand_offs { "t" } else { "" };
    format!("{:x}.{:016x}{suffix}", std::process::id(), fastrand::u64(..))
}

/// The key of a lock's queue.
pub(crate) fn queue(lock: &[u8]) -> Vec<u8> {
    [b"lockkit#queue:{", lock, b"}"].concat()
}

/// The channel of a client's wake-ups, and the key that is there while the client is alive.
pub(crate) fn client(id: &str) -> String {
    format!("{OWN}client:{id}")
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
    /// With `%d` for the token.
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
    Some(Holder::new(FencingToken::new(token), label, left))
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
        String::from_utf8(key(namespace, &name(lock), kind)).unwrap()
    }

    #[test]
    fn keys_are_what_is_documented() {
        assert_eq!(text("lockkit", "orders/42", LockKind::Lock), "lockkit:orders/42");
        assert_eq!(text("", "orders/42", LockKind::Lock), "orders/42");
        assert_eq!(text("a", "lockkit#fence", LockKind::Lock), "a:lockkit#fence");
        assert_eq!(text("a", "gpu", LockKind::Semaphore), "lockkit#semaphore:{a:gpu}");
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
