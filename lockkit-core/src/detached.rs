//! A hold on its way from one client to another.

use std::{
    fmt::{self, Write as _},
    num::NonZeroU32,
    time::Duration,
};

use crate::{
    AcquireOptions, Error, FencingToken, LockGuard, LockName, Result,
    spi::{Mode, OwnerId},
};

/// A hold that goes on at the server without a guard. [`LockGuard::detach`] returns it, and
/// [`LockClient::adopt`](crate::LockClient::adopt) makes a guard of it again, in this process or in another.
///
/// Nobody renews it. Unless it is adopted before, it ends with its lease, a [`ttl`](Self::ttl) after it was detached. Dropping it
/// does nothing at the server.
///
/// **It is a secret:** whoever has it can take the hold. [`encode`](Self::encode) is the way out of the process, and with the
/// feature `serde` so are both of serde's traits, in the same form. `Debug` leaves out the secret part.
#[must_use = "nobody renews the hold: it ends with its lease unless it is adopted"]
pub struct DetachedHold {
    pub(crate) name: LockName,
    pub(crate) mode: Mode,
    pub(crate) owner: OwnerId,
    pub(crate) token: FencingToken,
    pub(crate) ttl: Duration,
    /// What was left of its `hold_at_least` when it was detached. In whole milliseconds.
    pub(crate) least: Option<Duration>,
    /// The owner as which this value asks to adopt the hold. Kept, so that to ask again after a reply was lost is not to compete.
    pub(crate) successor: Option<OwnerId>,
    pub(crate) is_adopted: bool,
}

/// The version of the text, and of what has to be done with it.
const VERSION: &str = "1";
/// That of a hold which nobody else gets for some time, even if it is released before. Whoever does not know of that must not adopt it.
const VERSION_WITH_LEAST: &str = "2";

impl DetachedHold {
    pub(crate) fn new(
        name: LockName,
        mode: Mode,
        owner: OwnerId,
        token: FencingToken,
        ttl: Duration,
        least: Option<Duration>,
    ) -> Self {
        Self {
            name,
            mode,
            owner,
            token,
            ttl,
            least,
            successor: None,
            is_adopted: false,
        }
    }

    /// Returns the lock's name.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Returns the mode in which it is held.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the fencing token of the hold, which stays the same when it is adopted.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Returns the ttl of the hold: its lease when it was detached, and each lease once it is adopted.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Returns it as a line of text, for a queue, a header or an argument: **a secret**, in a form that stays readable for later
    /// versions. The text is ASCII if the name is. A text that is cut off anywhere is no other hold's, but an error.
    ///
    /// ```
    /// use lockkit_core::{DetachedHold, LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let detached = LockClient::new(MemoryBackend::new()).lock("job")?.acquire().await?.detach().await?;
    /// let text = detached.encode();
    /// assert_eq!(DetachedHold::decode(&text)?.token(), detached.token());
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn encode(&self) -> String {
        let Self {
            name,
            mode,
            owner,
            token,
            ttl,
            least,
            ..
        } = self;
        let mut text = match least {
            None => format!("{VERSION}:"),
            Some(least) => format!("{VERSION_WITH_LEAST}:{}:", least.as_millis()),
        };
        let _ = match mode {
            Mode::Exclusive => text.write_char('x'),
            Mode::Shared => text.write_char('s'),
            Mode::Permits(permits) => write!(text, "p{permits}"),
        };
        let name = escaped(name.as_str());
        let _ = write!(text, ":{}:{token}:{owner}:{}:{name}", ttl.as_millis(), name.len());
        text
    }

    /// Reads what [`encode`](Self::encode) has written. Does no I/O: whether the hold is still there is known once it is adopted.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for any other text. The error does not repeat it.
    pub fn decode(text: &str) -> Result<Self> {
        Self::read(text).map_err(|fault| Error::invalid_option("detached_hold", fault))
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        const CUT_OFF: &str = "it is cut off";

        let (least, text) = match text.split_once(':') {
            Some((VERSION, rest)) => (None, rest),
            Some((VERSION_WITH_LEAST, rest)) => {
                let (least, rest) = rest.split_once(':').ok_or(CUT_OFF)?;
                let least = least.parse().map(Duration::from_millis);
                (Some(least.map_err(|_| "its least time is no number")?), rest)
            }
            _ => return Err("it is no detached hold, or that of a later version"),
        };
        let mut parts = text.splitn(6, ':');
        let mut part = || parts.next().ok_or(CUT_OFF);
        let (mode, ttl, token, owner, length, name) = (part()?, part()?, part()?, part()?, part()?, part()?);
        let mode = match mode.split_at_checked(1) {
            Some(("x", "")) => Some(Mode::Exclusive),
            Some(("s", "")) => Some(Mode::Shared),
            Some(("p", permits)) => permits.parse::<NonZeroU32>().ok().map(Mode::Permits),
            _ => None,
        };
        let mode = mode.ok_or("its mode is none")?;
        let ttl = ttl
            .parse()
            .map(Duration::from_millis)
            .map_err(|_| "its ttl is no number")?;
        let mut options = AcquireOptions::new().ttl(ttl);
        options.hold_at_least = least;
        if options.validate().is_err() {
            return Err("its ttl or its least time is out of range");
        }
        let token = token.parse().map_err(|_| "its token is no number")?;
        let owner =
            Some(owner).filter(|owner| owner.len() == 32 && owner.bytes().all(|b| b.is_ascii_hexdigit()));
        let owner = owner.and_then(|owner| u128::from_str_radix(owner, 16).ok());
        let owner = owner.ok_or("its owner is none")?;
        // The beginning of a name is a name, too.
        if length != name.len().to_string() {
            return Err("its name is cut off, or something follows it");
        }
        let name = unescaped(name).ok_or("its name is not escaped as it should be")?;
        let name = LockName::new(name).map_err(|_| "its name is empty or too long")?;
        Ok(Self::new(
            name,
            mode,
            OwnerId::new(owner),
            FencingToken::new(token),
            ttl,
            least,
        ))
    }
}

/// Escapes what a header may not have, such as the ends of lines.
fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        if c.is_control() || c == '%' {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                let _ = write!(text, "%{byte:02x}");
            }
        } else {
            text.push(c);
        }
    }
    text
}

fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        if *byte == b'%' {
            let (digits, after) = after.split_at_checked(2)?;
            let digits = std::str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// Leaves out the owner, which is a secret.
impl fmt::Debug for DetachedHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedHold")
            .field("name", &self.name)
            .field("mode", &self.mode)
            .field("token", &self.token)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for DetachedHold {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.encode())
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for DetachedHold {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::decode(&text).map_err(serde::de::Error::custom)
    }
}

/// The error of [`LockGuard::detach`], with the guard: it goes on as it was.
///
/// `?` turns it into an [`Error`], and drops the guard, which releases.
#[non_exhaustive]
pub struct DetachError<G = LockGuard> {
    /// The error. After [`Error::Lost`] nothing is held. After any other, the guard holds and is renewed as before.
    pub error: Error,
    /// The guard.
    pub guard: G,
}

impl<G> DetachError<G> {
    pub(crate) fn new(error: Error, guard: G) -> Self {
        Self { error, guard }
    }
}

impl<G> From<DetachError<G>> for Error {
    fn from(error: DetachError<G>) -> Self {
        error.error
    }
}

impl<G> fmt::Display for DetachError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<G> fmt::Debug for DetachError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachError")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<G> std::error::Error for DetachError<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its message is that of the error.
        self.error.source()
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    fn detached(name: &str, mode: Mode) -> DetachedHold {
        DetachedHold::new(
            LockName::new(name).unwrap(),
            mode,
            OwnerId::new(0xfeed_0000_0000_0000_0000_0000_0000_0001),
            FencingToken::new(34),
            Duration::from_secs(30),
            None,
        )
    }

    /// Messages on their way may be from the version before.
    #[test]
    fn a_detached_hold_is_written_as_it_always_was() {
        let permits = Mode::Permits(NonZeroU32::new(3).unwrap());
        for (name, mode, text) in [
            (
                "a:b/c d",
                Mode::Exclusive,
                "1:x:30000:34:feed0000000000000000000000000001:7:a:b/c d",
            ),
            (
                "é%\n",
                Mode::Shared,
                "1:s:30000:34:feed0000000000000000000000000001:8:é%25%0a",
            ),
            (
                "\u{85}",
                permits,
                "1:p3:30000:34:feed0000000000000000000000000001:6:%c2%85",
            ),
        ] {
            let written = detached(name, mode);
            assert_eq!(written.encode(), text);
            let read = DetachedHold::decode(text).unwrap();
            assert_eq!((read.name().as_str(), read.mode()), (name, mode));
            assert_eq!((read.token(), read.ttl()), (written.token(), written.ttl()));
            assert_eq!(read.owner, written.owner);
        }
    }

    #[test]
    fn the_least_time_goes_along() {
        let mut written = detached("job", Mode::Exclusive);
        written.least = Some(Duration::from_secs(60));
        let text = written.encode();
        assert_eq!(text, "2:60000:x:30000:34:feed0000000000000000000000000001:3:job");
        let read = DetachedHold::decode(&text).unwrap();
        assert_eq!((read.least, read.ttl()), (written.least, written.ttl()));
        for (end, _) in text.char_indices() {
            assert!(DetachedHold::decode(&text[..end]).is_err(), "{end} bytes of it");
        }
        assert!(
            DetachedHold::decode("1:x:30000:34:feed0000000000000000000000000001:3:job")
                .unwrap()
                .least
                .is_none()
        );
    }

    #[test]
    fn any_other_text_is_refused_and_not_repeated() {
        let secret = "feed0000000000000000000000000001";
        for text in [
            String::new(),
            "3:x:30000:34:feed0000000000000000000000000001:1:a".to_owned(),
            format!("2:x:30000:34:{secret}:1:a"),
            format!("2:9:x:30000:34:{secret}:1:a"),
            format!("2:99999999999999:x:30000:34:{secret}:1:a"),
            format!("1:x:30000:34:{secret}"),
            format!("1:y:30000:34:{secret}:1:a"),
            format!("1::30000:34:{secret}:1:a"),
            format!("1:é:30000:34:{secret}:1:a"),
            format!("1:p0:30000:34:{secret}:1:a"),
            format!("1:x:9:34:{secret}:1:a"),
            format!("1:x:99999999999999:34:{secret}:1:a"),
            format!("1:x:30000:-1:{secret}:1:a"),
            format!("1:x:30000:34:+{}:1:a", &secret[1..]),
            format!("1:x:30000:34:{}:1:a", &secret[1..]),
            format!("1:x:30000:34:{secret}:0:"),
            format!("1:x:30000:34:{secret}:2:%4"),
            format!("1:x:30000:34:{secret}:3:%ff"),
            format!(
                "1:x:30000:34:{secret}:1025:{}",
                "x".repeat(LockName::MAX_BYTES + 1)
            ),
            format!("1:x:30000:34:{secret}:a"),
            format!("1:x:30000:34:{secret}:01:a"),
            format!("1:x:30000:34:{secret}:1:a\n"),
        ] {
            let err = DetachedHold::decode(&text).unwrap_err();
            assert!(matches!(err, Error::InvalidOptions { .. }), "{text}");
            assert!(!format!("{err} {err:?}").contains("feed"), "{err}");
        }
    }

    /// The beginning of one lock's name may be the name of another.
    #[test]
    fn a_text_that_is_cut_off_anywhere_is_refused() {
        let text = detached("jobs:17/é%\n2", Mode::Exclusive).encode();
        assert!(DetachedHold::decode(&text).is_ok());
        for (end, _) in text.char_indices() {
            let read = DetachedHold::decode(&text[..end]).map(|read| read.name().to_string());
            assert!(read.is_err(), "{} of {} bytes name {read:?}", end, text.len());
        }
    }

    #[test]
    fn a_secret_is_not_debugged() {
        let shown = format!("{:?}", detached("job", Mode::Exclusive));
        assert!(shown.contains("job") && shown.contains("34"), "{shown}");
        assert!(
            !shown.contains("feed") && !shown.contains(&0xfeed_u32.to_string()),
            "{shown}"
        );
    }
}
