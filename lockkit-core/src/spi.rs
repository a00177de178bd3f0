//! The contract that a backend implements.
//!
//! A backend speaks to its server and nothing else. It does not sleep, retry, spawn a task per hold, or log policy:
//! the one driver in this crate owns queueing, deadlines, jitter, renewal, loss, hand-off, cancellation and release.
//!
//! Rules for every [`Claim`]:
//!
//! - Any of its futures may be dropped at any await, and every method stays legal afterwards.
//! - An attempt whose outcome is not known is repeated on the *same* claim: same owner, same place in the queue.
//! - `Ok(None)` means taken. Anything that is not an answer is an `Err`.
//! - They may be polled outside of a Tokio runtime, by some other executor: an `Err` then, never a panic.
//! - Dropping a claim without [`release`](Claim::release) may happen when a runtime goes away; the lease, the session
//!   or the end of the connection is the backstop then.

use std::{fmt, num::NonZeroU32, ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::watch, time::Instant};

use crate::{Capabilities, Error, FencingToken, LockKind, LockName, LockState, LossReason, Result};

/// How a claim wants to hold its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other shared holders; excludes exclusive ones.
    Shared,
    /// One of this many permits of the semaphore of that name.
    Permits(NonZeroU32),
}

impl Mode {
    /// Whether this is a mode of a lock or of a semaphore.
    pub fn kind(self) -> LockKind {
        match self {
            Self::Exclusive | Self::Shared => LockKind::Lock,
            Self::Permits(_) => LockKind::Semaphore,
        }
    }
}

/// For how long a hold is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// A moment before the request that proves it was sent.
    pub since: Instant,
    /// How long it lasts from then, the backend's allowance for clock drift already taken off. `None` means that the
    /// hold is bound to a process or connection and has no end of its own.
    pub length: Option<Duration>,
}

impl Lease {
    /// When it ends, unless that is beyond what the clock can count to.
    pub fn end(&self) -> Option<Instant> {
        self.length.and_then(|length| self.since.checked_add(length))
    }
}

/// Until when a session proves its holds at most, or why it has ended. Whoever has a receiver of it is to be woken when that
/// becomes earlier, and need not be when it becomes later.
pub type SessionProof = watch::Receiver<std::result::Result<Instant, LossReason>>;

/// For how long this machine has been suspended since it was booted, where the operating system tells (Linux), else zero.
///
/// Of a lease the driver takes off what is slept after [`since`](Lease::since). A backend that knows what proves a lease from
/// before the request that tells of it takes off by itself what was slept in between. A difference of less than a
/// millisecond is two clocks' not being read in the same instant.
pub fn asleep() -> Duration {
    crate::driver::moment::asleep()
}

/// A successful attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Fencing tokens: the first is this hold's, the others are for local hand-offs. They are above every token of an
    /// earlier conflicting hold, and no one else is ever given them. At least one; no more than were
    /// [asked for](ClaimRequest::tokens).
    pub tokens: RangeInclusive<u64>,
    /// For how long the hold is proven.
    pub lease: Lease,
}

/// The answer to a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Still held, and proven anew.
    Held(Lease),
    /// The server says that the hold is gone.
    Lost(LossReason),
}

/// 128 random bits from the operating system that say whose claim it is. There is one per claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerId(u128);

impl OwnerId {
    /// Wraps 128 bits.
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits.
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({self})")
    }
}

/// What is claimed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// The lock.
    pub name: LockName,
    /// How it is to be held.
    pub mode: Mode,
    /// The lease that is asked for.
    pub ttl: Duration,
    /// Whose claim it is.
    pub owner: OwnerId,
    /// Who is asking, for whoever inspects the lock.
    pub label: Option<Arc<str>>,
    /// How many fencing tokens a grant should reserve.
    pub tokens: NonZeroU32,
    /// Others of this client wait behind the claim, or have waited since the one before it was opened: it is likely that
    /// they will be passed the hold. A backend to which reserving tokens is dear need not do so otherwise.
    pub locally_contended: bool,
    /// The hold will be renewed, and as soon as its claim [hints](Claim::notified) at it: so it may begin with a lease that
    /// is shorter than the ttl.
    pub renews: bool,
}

impl ClaimRequest {
    /// A request for one token, without a label, with nobody behind it and nobody to renew it.
    pub fn new(name: LockName, mode: Mode, ttl: Duration, owner: OwnerId) -> Self {
        Self {
            name,
            mode,
            ttl,
            owner,
            label: None,
            tokens: NonZeroU32::MIN,
            locally_contended: false,
            renews: false,
        }
    }
}

/// What the driver needs to know of a backend.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendInfo {
    /// Its name, for errors and metrics: `redis`.
    pub name: &'static str,
    /// The server it speaks to, canonical and without credentials: part of each [`LockId`](crate::LockId).
    pub server: Arc<str>,
    /// The namespace that keeps applications on one server apart.
    pub namespace: Arc<str>,
    /// What it can do.
    pub capabilities: Capabilities,
    /// What to do for a mode that it does not have, for the error: `use mode=for_update`. `None` if there is nothing but
    /// another backend.
    pub instead: Option<&'static str>,
    /// After how long, at most, a waiter asks again although nothing woke it. The driver takes off up to a quarter of it, so
    /// that waiters drift apart.
    pub fallback_poll: Duration,
    /// The longest time that an [`attempt`](Claim::attempt) should block at the server.
    pub max_patience: Duration,
    /// Whether its leases stand still with this machine while that is suspended, since they are counted by this machine's
    /// monotonic clock and nothing else. By default they do not: a server elsewhere goes on counting, and so does the
    /// driver, where the operating system tells it (Linux).
    pub leases_stand_still: bool,
}

impl BackendInfo {
    /// The namespace of clients that ask for none.
    pub const DEFAULT_NAMESPACE: &'static str = "lockkit";

    /// A backend with no capabilities, the default namespace, a fallback poll of 1 s, a patience of 1 s, and leases that do
    /// not stand still.
    pub fn new(name: &'static str, server: impl Into<Arc<str>>) -> Self {
        Self {
            name,
            server: server.into(),
            namespace: Self::DEFAULT_NAMESPACE.into(),
            capabilities: Capabilities::default(),
            instead: None,
            fallback_poll: Duration::from_secs(1),
            max_patience: Duration::from_secs(1),
            leases_stand_still: false,
        }
    }
}

/// A server that can grant locks.
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// What the driver needs to know. Asked once, when the client is made.
    fn info(&self) -> BackendInfo;

    /// The longest time for which a dead holder keeps its name: from its death until a waiter can be granted, on a healthy
    /// server. `ttl` is what the holder asked for. A backend that counts by something else than the `ttl`, such as a
    /// session, overrides this.
    ///
    /// By default the `ttl` and a [`fallback_poll`](BackendInfo::fallback_poll), or the poll alone if a hold has no lease.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        let info = self.info();
        let lease = if info.capabilities.lease {
            ttl
        } else {
            Duration::ZERO
        };
        lease.saturating_add(info.fallback_poll)
    }

    /// Opens a claim. Nothing is held or queued yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a mode it does not have, [`Error::InvalidOptions`] for an option it cannot keep
    /// (both without I/O), [`Error::Backend`] if it cannot reach its server.
    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>>;

    /// Who holds `name`. It takes no part in the contest: nobody is refused or delayed by it.
    ///
    /// # Errors
    /// [`Error::Backend`] if the server cannot tell.
    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState>;

    /// Ends the hold of `name` that has `token`, whoever has it. `false` if there is none. Its holder is told
    /// [`LossReason::Revoked`] within the backend's detection bound.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a hold cannot be ended from outside, [`Error::Backend`] if the server cannot tell.
    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let _ = (name, kind, token);
        Err(Error::unsupported(
            self.info().name,
            "ending another holder's hold; end the holder instead",
        ))
    }

    /// Ends connections, after every claim has been released or given up. Idempotent: closing a client again calls it
    /// again.
    ///
    /// # Errors
    /// [`Error::Backend`] if something may be left on the server.
    async fn close(&self) -> Result<()>;
}

/// One contender for one name, from its first attempt to its release. Only the driver calls these methods.
#[async_trait]
pub trait Claim: fmt::Debug + Send + 'static {
    /// Tries to be granted.
    ///
    /// `patience` says how long the caller is willing to wait for the answer "taken" to change. Zero: answer at once
    /// and stay out of any queue. Above zero: keep a place in the queue, if there is one, and block at the server for
    /// up to `patience`, if it can; a backend that cannot block answers at once.
    ///
    /// A grant that was pushed, or that came after blocking, has its lease from the last request that was sent before
    /// it, and was answered before it if it was pushed. If that leaves less than half of the ttl, the backend proves it
    /// again before it returns; or, if the hold [will be renewed](ClaimRequest::renews) and a second is left, it
    /// [hints](Self::notified) at once that there is more to be had.
    ///
    /// # Errors
    /// [`Error::Backend`] if the outcome is not known or the server refuses.
    ///
    /// # Cancel safety
    /// May be dropped at any await. The next call, or `release`, goes on from whatever the server made of it.
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>>;

    /// Proves the hold anew.
    ///
    /// # Errors
    /// An `Err` means unknown, not lost.
    ///
    /// # Cancel safety
    /// May be dropped at any await.
    async fn renew(&mut self) -> Result<Renewal>;

    /// Gives up the hold, the place in the queue, and whatever an attempt of unknown outcome may have taken.
    /// Idempotent, and harmless to a later holder.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold turned out to be gone before; [`Error::Backend`] if it is not known whether it is
    /// released, in which case the driver tries again.
    ///
    /// # Cancel safety
    /// May be dropped at any await; the driver calls it again.
    async fn release(&mut self) -> Result<()>;

    /// Resolves when it is worth while to attempt (while waiting) or to renew (while holding) now. A hint: it may be
    /// spurious, and a fallback poll makes a lost one harmless.
    ///
    /// # Cancel safety
    /// Remembers events that came since the last `attempt` or `renew` began, so that dropping it loses none.
    async fn notified(&mut self);

    /// The proof of the session that the hold which was granted ends with, where one session proves many. The driver heeds
    /// it besides the lease, and also while the claim is lent to a renewal that nobody polls.
    fn session(&self) -> Option<SessionProof> {
        None
    }

    /// The hold has been passed to another waiter of this client, without a word to the server, and has this one of the
    /// [tokens](Grant::tokens) from now on. For a backend that says at the server which token is in use; it does no I/O
    /// here, and may resolve [`notified`](Self::notified) to be renewed.
    fn passed_on(&mut self, token: FencingToken) {
        let _ = token;
    }

    /// A duplicate of the operating system's handle that keeps the hold alive, where there is one, so that it can be
    /// passed on to a child process.
    #[cfg(unix)]
    fn descriptor(&self) -> Option<std::os::fd::OwnedFd> {
        None
    }
}

/// An error and what caused it, in one line. Some causes say again what stands above them, which is left out.
///
/// ```
/// use std::io::{Error, ErrorKind};
///
/// use lockkit_core::spi::chain;
///
/// let cause = Error::new(ErrorKind::ConnectionRefused, "nobody listens");
/// let error = lockkit_core::Error::transient("redis", "connect", cause);
/// assert_eq!(chain(&error), format!("{error}: nobody listens"));
/// ```
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}

/// A URL as it may be shown: without user, password and parameters. For errors about it, and for `Debug`.
///
/// It leans towards hiding: a password that should have been percent-encoded and was not may hold any of `/?#@`, so
/// everything up to the last `@` goes; and with a `?` before that one, which may be a parameter's, what follows goes too.
///
/// ```
/// use lockkit_core::spi::redacted_url;
///
/// assert_eq!(redacted_url("redis://app:s3cret@cache:6379/2?x=y"), "redis://***@cache:6379/2");
/// assert_eq!(redacted_url("app:s3cret@cache"), "***@cache");
/// assert_eq!(redacted_url("redis://cache/2?x=s3@cret"), "redis://***");
/// assert_eq!(redacted_url("file:///var/lock/a@b"), "file:///var/lock/a@b");
/// ```
pub fn redacted_url(url: &str) -> String {
    let plain = |text: &str| text.split(['?', '#']).next().unwrap_or_default().to_owned();
    // Without a slash behind its colon, a scheme may as well be a user.
    let (scheme, rest) = match url.split_once(":/") {
        Some((scheme, rest))
            if scheme
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) =>
        {
            (scheme, rest)
        }
        _ => ("", url),
    };
    let is_local_path =
        scheme.eq_ignore_ascii_case("file") && (!rest.starts_with('/') || rest.starts_with("//"));
    let Some(at) = url.rfind('@').filter(|_| !is_local_path) else {
        return plain(url);
    };
    let host = if url[..at].contains('?') {
        String::new()
    } else {
        plain(&url[at..])
    };
    match (scheme, rest.starts_with('/')) {
        ("", _) => format!("***{host}"),
        (_, true) => format!("{scheme}://***{host}"),
        (_, false) => format!("{scheme}:***{host}"),
    }
}
