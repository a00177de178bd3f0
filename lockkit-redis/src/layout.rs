//! How locks are laid out on the server. Documented, stable, and shared with other clients on purpose: an exclusive
//! lock is a plain string at `<namespace>:<name>`, set with `NX PX` and deleted after a comparison.

use std::{borrow::Cow, fmt::Write as _, time::Duration};

use lockkit_core::{
    FencingToken, Holder, LockKind, LockName,
    spi::{ClaimRequest, Mode, OwnerId},
};

/// A key that is never there.
pub(crate) const NOWHERE: &[u8] = b"lockkit#nowhere";

/// Keys of our own, which are not locks, begin with this.
const OWN: &str = "lockkit#";

/// The key of a lock or semaphore.
pub(crate) fn key(namespace: &str, name: &LockName, kind: LockKind) -> Vec<u8> {
    let name = name.as_str();
    let lock = if namespace.is_empty() {
        // Kept apart from our own keys; a name that looks as if it had been is kept apart from those.
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

/// A name for a client, with the process in it: after a fork, both sides draw the same numbers. The dot says to the scripts
/// that it looks by itself which of its waiters have become the first in their queue, and the `t` that these take up what
/// they are passed with its token.
pub(crate) fn new_client(takes_up: bool) -> String {
    let takes_up = if takes_up { "t" } else { "" };
    format!("{:x}.{:016x}{takes_up}", std::process::id(), fastrand::u64(..))
}

/// The key of those who wait for a lock.
pub(crate) fn queue(lock: &[u8]) -> Vec<u8> {
    [b"lockkit#queue:{", lock, b"}"].concat()
}

/// The channel of a client's wake-ups, and the key that says that it is alive.
pub(crate) fn client(id: &str) -> String {
    format!("{OWN}client:{id}")
}

/// The mode as the scripts spell it.
pub(crate) fn mode(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Exclusive => "x".into(),
        Mode::Shared => "s".into(),
        Mode::Permits(permits) => format!("p{permits}").into(),
    }
}

/// Where the server fills in the token.
const TOKEN: &str = "%d";

/// What a holder is recorded as: `lockkit:<owner> <tokens> <first token> <client> <label>`. Whoever asks passes it
/// with `%d` in the place of the token, which the server fills in.
#[derive(Debug)]
pub(crate) struct Record {
    /// With `%d` for the token.
    text: String,
    /// Where in it that is.
    token_at: usize,
    /// The label has a `%` of its own.
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

    /// With a place for the token.
    pub(crate) fn template(&self) -> Cow<'_, str> {
        if !self.escapes {
            return (&self.text).into();
        }
        let (before, after) = self.around_token();
        format!("{before}{TOKEN}{}", after.replace('%', "%%")).into()
    }

    /// As it stands at the server with this token. No token is 0, which stands for one that is not known.
    pub(crate) fn with_token(&self, token: u64) -> String {
        let (before, after) = self.around_token();
        format!("{before}{token}{after}")
    }

    fn around_token(&self) -> (&str, &str) {
        let (before, token) = self.text.split_at(self.token_at);
        (before, &token[TOKEN.len()..])
    }

    /// What stands for an owner whose claim is gone.
    pub(crate) fn of(owner: OwnerId) -> String {
        format!("lockkit:{owner} ")
    }
}

/// As it is displayed. Every acquisition needs it, and the formatter would take ten times as long.
fn push_hex(text: &mut String, owner: OwnerId) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in owner.get().to_be_bytes() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(DIGITS[usize::from(digit)]));
        }
    }
}

/// A holder as it is recorded, without the prefix; `None` if it is no record of ours.
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

/// The record in the value of an exclusive lock.
pub(crate) fn record_in(value: &str) -> Option<&str> {
    value
        .strip_prefix("lockkit:")
        .or_else(|| value.strip_prefix("lockkit+"))
}

/// Whether a value says that shared holders or permits are in.
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
    fn no_name_is_one_of_our_own_keys_and_no_two_are_one() {
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
