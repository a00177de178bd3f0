//! Fencing tokens, and the gate by which a resource checks them.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// A number that grows with every acquisition of a name. A resource can tell a stale holder from the current one by it.
///
/// Tokens strictly increase in the order of acquisition over *conflicting* holds of a name, across holders, processes
/// and crashes, as far as the backend's row of the guarantee table says. Tokens of simultaneous holders (shared mode, permits)
/// are unique, and not ordered among themselves. Tokens are not consecutive.
///
/// The idea is described in Martin Kleppmann, *How to do distributed locking* (2016), and as "sequencers" in Burrows,
/// *The Chubby lock service* (OSDI 2006), section 2.4.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(transparent)
)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Wraps a number that a backend minted or a resource stored.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the number, to be stored and compared.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the number as SQL's `BIGINT` has it. `None` if it is above `i64::MAX`: no other number may take its place, since
    /// tokens are compared.
    ///
    /// ```
    /// use lockkit_core::FencingToken;
    ///
    /// assert_eq!(FencingToken::new(34).as_i64(), Some(34));
    /// assert_eq!(FencingToken::new(u64::MAX).as_i64(), None);
    /// ```
    pub const fn as_i64(self) -> Option<i64> {
        if self.0 <= i64::MAX.unsigned_abs() {
            Some(self.0.cast_signed())
        } else {
            None
        }
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FencingToken({})", self.0)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

/// A gate that refuses tokens below the highest one it has seen: the check of a fenced resource before each write.
///
/// Use it for a resource that this process alone writes: another process has another gate. A resource elsewhere does the same in its own way, such as a column
/// `last_token` in the protected row, updated `WHERE last_token <= $token`. The gate only decides. The resource must serialise
/// the write with that decision, for instance under its own mutex.
///
/// ```
/// use lockkit_core::{FenceGate, FencingToken};
///
/// let gate = FenceGate::new();
/// assert!(gate.admit(FencingToken::new(34)).is_ok());
/// assert!(gate.admit(FencingToken::new(34)).is_ok(), "the same holder writes again");
/// let stale = gate.admit(FencingToken::new(33)).unwrap_err();
/// assert_eq!(stale.highest, FencingToken::new(34));
/// ```
#[derive(Debug, Default)]
pub struct FenceGate {
    highest: AtomicU64,
}

impl FenceGate {
    /// Makes a gate that has seen nothing, and admits any first token.
    pub const fn new() -> Self {
        Self::resume(FencingToken::new(0))
    }

    /// Makes a gate that goes on from the highest token stored with the resource.
    pub const fn resume(highest: FencingToken) -> Self {
        Self {
            highest: AtomicU64::new(highest.get()),
        }
    }

    /// Admits `token` and remembers it, unless a higher one has been admitted.
    ///
    /// # Errors
    /// [`StaleToken`] if a higher token has been admitted: another holder was granted since.
    pub fn admit(&self, token: FencingToken) -> Result<(), StaleToken> {
        let before = self.highest.fetch_max(token.get(), Ordering::SeqCst);
        if before > token.get() {
            return Err(StaleToken {
                token,
                highest: FencingToken::new(before),
            });
        }
        Ok(())
    }

    /// Returns the highest token admitted, to be stored with the resource.
    pub fn highest(&self) -> FencingToken {
        FencingToken::new(self.highest.load(Ordering::SeqCst))
    }
}

/// The error of a refused write: its token is below one that the resource has already seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "fencing token {token} is stale: {highest} has been seen; the lock has had another holder since, or another backend (after a \
     change of the backend, raise its tokens: `lockkit fence raise --above {highest}`)"
)]
#[non_exhaustive]
pub struct StaleToken {
    /// The token that was refused.
    pub token: FencingToken,
    /// The highest token seen.
    pub highest: FencingToken,
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_token_fits_into_a_bigint_or_says_so() {
        let most = i64::MAX.unsigned_abs();
        for (token, fits) in [
            (0, Some(0)),
            (34, Some(34)),
            (most, Some(i64::MAX)),
            (most + 1, None),
            (u64::MAX, None),
        ] {
            assert_eq!(FencingToken::new(token).as_i64(), fits, "{token}");
        }
    }
}
