//! How locks are laid out on the server. Documented, stable, and shared with other clients on purpose: an exclusive
//! lock is a plain string at `<namespace>:<name>`, set with `NX PX` and deleted after a comparison.

use std::fmt::Write as _;

use lockkit_core::{
    FencingToken, Holder, Kind, LockName,
    spi::{ClaimRequest, Mode, OwnerId},
};
use std::time::Duration;

/// Keys of our own, which are not locks, begin with this.
const OWN: &str = "lockkit#";

/// The key of a lock or semaphore.
pub(crate) fn key(namespace: &str, name: &LockName, kind: Kind) -> Vec<u8> {
    let name = name.as_str();
    let lock = if namespace.is_empty() {
        // Kept apart from our own keys; a name that looks as if it had been is kept apart from those.
        let escape = name.trim_start_matches('%').starts_with(OWN);
        format!("{}{name}", if escape { "%" } else { "" })
    } else {
        format!("{namespace}:{name}")
    };
    match kind {
        Kind::Semaphore => format!("{OWN}semaphore:{{{lock}}}").into_bytes(),
        Kind::Lock => lock.into_bytes(),
    }
}

/// The channel of a client's wake-ups, and the key that says that it is alive.
pub(crate) fn client(id: &str) -> String {
    format!("{OWN}client:{id}")
}

/// The mode as the scripts spell it.
pub(crate) fn mode(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "x".to_owned(),
        Mode::Shared => "s".to_owned(),
        Mode::Permits(permits) => format!("p{permits}"),
    }
}

/// What a holder is recorded as: `lockkit:<owner> <tokens> <first token> <client> <label>`. The server fills in the
/// token; whoever asks passes the text with `%.0f` in its place.
#[derive(Debug)]
pub(crate) struct Record {
    text: String,
    /// Where in it the token begins.
    token_at: usize,
}

impl Record {
    const TOKEN: &str = "%.0f";

    pub(crate) fn new(request: &ClaimRequest, client: &str) -> Self {
        let mut text = String::with_capacity(96 + request.label.as_deref().map_or(0, str::len));
        let ClaimRequest { owner, tokens, .. } = request;
        let _ = write!(text, "lockkit:{owner} {tokens} ");
        let token_at = text.len();
        let _ = write!(text, "{} {client} ", Self::TOKEN);
        for c in request.label.as_deref().unwrap_or_default().chars() {
            text.push(c);
            if c == '%' {
                text.push(c);
            }
        }
        Self { text, token_at }
    }

    /// With a place for the token.
    pub(crate) fn template(&self) -> &str {
        &self.text
    }

    /// As it stands at the server after a grant of blocks that begin with `token`.
    pub(crate) fn with_token(&self, token: u64) -> String {
        let (before, after) = self.text.split_at(self.token_at);
        let after = after[Self::TOKEN.len()..].replace("%%", "%");
        format!("{before}{token}{after}")
    }

    /// What stands for an owner whose tokens are not known.
    pub(crate) fn of(owner: OwnerId) -> String {
        format!("lockkit:{owner} ")
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

    fn text(namespace: &str, lock: &str, kind: Kind) -> String {
        String::from_utf8(key(namespace, &name(lock), kind)).unwrap()
    }

    #[test]
    fn keys_are_what_is_documented() {
        assert_eq!(text("lockkit", "orders/42", Kind::Lock), "lockkit:orders/42");
        assert_eq!(text("", "orders/42", Kind::Lock), "orders/42");
        assert_eq!(text("a", "lockkit#fence", Kind::Lock), "a:lockkit#fence");
        assert_eq!(text("a", "gpu", Kind::Semaphore), "lockkit#semaphore:{a:gpu}");
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
            let key = text("", lock, Kind::Lock);
            assert!(!key.starts_with(OWN), "{key}");
            assert!(seen.insert(key), "{lock}");
        }
    }

    #[test]
    fn a_record_is_read_back_whatever_the_label() {
        for label in ["", "host-7", "100 % of %.0f %s", "line\nbreak  two", "ü\0"] {
            let mut request = ClaimRequest::new(
                name("n"),
                Mode::Exclusive,
                Duration::from_secs(1),
                OwnerId::new(7),
            );
            request.label = Some(label.into());
            let record = Record::new(&request, "client");
            let value = record.with_token(41);
            let shown = holder(record_in(&value).unwrap(), None).unwrap();
            assert_eq!(shown.token.get(), 41);
            assert_eq!(shown.label.unwrap_or_default(), label);
        }
        assert!(holder("foreign 1 2 3 4", None).is_none());
    }
}
