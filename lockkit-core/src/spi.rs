//! The contract that a backend implements.
//!
//! A backend speaks to its server and nothing else. It does not sleep, retry, spawn a task per hold, or log policy:
//! the one driver in this crate owns queueing, deadlines, jitter, renewal, loss, hand-off, cancellation and release.
//!
//! Rules for every [`Claim`]:
//!
//! - Any of its futures may be dropped at any await. Every method stays legal afterwards.
//! - An attempt whose outcome is not known is repeated on the *same* claim: same owner, same position in the queue.
//! - `Ok(None)` means taken. Without the server's word, return an `Err`.
//! - Outside of a Tokio runtime, under another executor, return an `Err`; never panic.
//! - Types that may get more fields are made with `new`. A [`Mode`] and a [`LockKind`] have no others: a backend has to decide about
//!   each.
//! - A claim may be dropped without [`release`](Claim::release) when a runtime goes away. Its lease, its session or the end of
//!   its connection then ends the hold.

mod config;
pub mod fence;
pub mod fenced;
pub mod queue;
pub mod resumable;
mod secrets;
mod servers;
#[cfg(feature = "tls")]
pub mod tls;
mod unencrypted;

use std::{fmt, net::Ipv6Addr, num::NonZeroU32, ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::watch, time::Instant};

pub use self::{
    config::{ServerUrl, Tls, check_certificates, check_duration},
    secrets::{Secrets, shortened},
    servers::{ServerAddress, server, servers},
    unencrypted::Unencrypted,
};
#[doc(inline)]
pub use crate::{__config as config, __words as words};
use crate::{
    AcquireOptions, Capabilities, Error, FencingToken, ListedLock, LockKind, LockName, LockState, LossReason,
    Result, name::OneLine,
};
pub use crate::{suspension::asleep, sync::Mutex};

/// The mode in which a claim holds its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other shared holders, without an exclusive one.
    Shared,
    /// With one of this many permits of the semaphore of that name.
    Permits(NonZeroU32),
}

impl Mode {
    /// Returns the kind of thing that has this mode: a lock or a semaphore.
    pub fn kind(self) -> LockKind {
        match self {
            Self::Exclusive | Self::Shared => LockKind::Lock,
            Self::Permits(_) => LockKind::Semaphore,
        }
    }
}

/// The time for which a hold is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// A moment before the request that proves it was sent.
    pub since: Instant,
    /// Its length from then, without the backend's allowance for clock drift. `None` means that the hold is bound to a process
    /// or connection and has no end of its own.
    pub length: Option<Duration>,
}

impl Lease {
    /// Makes a lease of this `length`, in which the backend has allowed for clock drift, from a moment before its request was sent.
    pub const fn new(since: Instant, length: Option<Duration>) -> Self {
        Self { since, length }
    }

    /// Makes the lease that a ttl is worth which the server counts: with an allowance of a hundredth for the drift between its clock and
    /// this one, and of two milliseconds for what either rounds.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockkit_core::{Instant, spi::Lease};
    ///
    /// let lease = Lease::of_ttl(Instant::now(), Duration::from_secs(10));
    /// assert_eq!(lease.length, Some(Duration::from_millis(9_898)));
    /// ```
    pub fn of_ttl(since: Instant, ttl: Duration) -> Self {
        Self::new(
            since,
            Some(ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))),
        )
    }

    /// Returns its end, unless that is beyond what the clock can count to.
    pub fn end(&self) -> Option<Instant> {
        self.length.and_then(|length| self.since.checked_add(length))
    }
}

/// The time until which a session proves its holds at most, or the reason of its end. Wake the receivers when that time becomes
/// earlier. There is no need to when it becomes later.
pub type SessionProof = watch::Receiver<std::result::Result<Instant, LossReason>>;

/// A successful attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// Fencing tokens: the first is this hold's, the others are for local hand-offs. They are above every token of an
    /// earlier conflicting hold, and no one else ever gets them. At least one, and no more than were
    /// [asked for](ClaimRequest::tokens).
    pub tokens: RangeInclusive<u64>,
    /// The time for which the hold is proven.
    pub lease: Lease,
}

impl Grant {
    /// Makes a grant with these tokens, of which there is at least one, for as long as `lease` proves it.
    pub const fn new(tokens: RangeInclusive<u64>, lease: Lease) -> Self {
        Self { tokens, lease }
    }
}

/// The result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// Still held, and proven anew.
    Held(Lease),
    /// Still held by what was proven before this call, which the server has not confirmed since. That may end before or after the
    /// lease that was granted last. The driver counts with it from now on, and calls [`renew`](Claim::renew) again at once.
    Unconfirmed(Lease),
    /// The server says that the hold is gone.
    Lost(LossReason),
    /// Still held, and not proven anew: its holder was [asked](Backend::revoke) to give it up. The driver tells its user, and calls
    /// [`release`](Claim::release) once that has let go.
    Asked,
}

/// The identity of a claim's owner: 128 random bits from the operating system, new for each claim.
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

/// A claim on a lock: its name, its mode, its owner, and what a grant should bring.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// The lock's name.
    pub name: LockName,
    /// The mode in which to hold it.
    pub mode: Mode,
    /// The lease that is asked for.
    pub ttl: Duration,
    /// The claim's owner.
    pub owner: OwnerId,
    /// A description of the holder, shown to those who inspect the lock.
    pub label: Option<Arc<str>>,
    /// The number of fencing tokens that a grant should reserve.
    pub tokens: NonZeroU32,
    /// A guess that the hold will be passed on within this client: others of it wait now, or have waited since the claim before
    /// this one was opened. If it is false, a backend need not reserve tokens where that is expensive.
    pub locally_contended: bool,
    /// The hold will be renewed, and at once when its claim [hints](Claim::notified). So it may begin with a lease that is
    /// shorter than the ttl.
    pub renews: bool,
}

impl ClaimRequest {
    /// A request for one token, without a label, not locally contended and not renewed.
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

/// The description of a backend, for its driver.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendInfo {
    /// Its name, for errors and metrics: `redis`.
    pub name: &'static str,
    /// Its server's address, canonical and without credentials: part of each [`LockId`](crate::LockId).
    pub server: Arc<str>,
    /// The namespace that keeps applications on one server apart.
    pub namespace: Arc<str>,
    /// Its capabilities.
    pub capabilities: Capabilities,
    /// Advice for the error about a mode that it does not have, such as `use mode=for_update`. `None` if only another backend
    /// helps.
    pub instead: Option<&'static str>,
    /// The longest time after which a waiter asks again although nothing woke it. The driver takes off up to a quarter, so that
    /// waiters drift apart.
    pub fallback_poll: Duration,
    /// The longest time that an [`attempt`](Claim::attempt) should block at the server.
    pub max_patience: Duration,
    /// The shortest ttl that the driver takes, where holds have a lease: with a shorter one, a hold is lost between two renewals though
    /// nothing is wrong. Not below [`AcquireOptions::MIN_TTL`](crate::AcquireOptions::MIN_TTL), the default.
    pub least_ttl: Duration,
    /// Its leases stand still while this machine is suspended, since only this machine's monotonic clock counts them. By default
    /// they do not: a server elsewhere goes on counting, and so does the driver where the operating system allows (Linux).
    pub leases_stand_still: bool,
    /// A [`release`](Claim::release) is done when it is polled for the first time, without I/O, also outside of a runtime: its server is
    /// this process. So a guard that is dropped is released there and then, by one poll. A release that waits all the same is dropped, and
    /// called again in the background. By default all are released in the background.
    pub releases_at_once: bool,
    /// The secrets that the driver blanks in the backend's errors, since its servers know them. By default none.
    pub secrets: Secrets,
}

impl BackendInfo {
    /// The namespace of clients that ask for none.
    pub const DEFAULT_NAMESPACE: &'static str = "lockkit";

    /// Checks a namespace: at most `max_bytes` of `A-Z a-z 0-9 . _ -`. It may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] says what is wrong with it.
    pub fn check_namespace(namespace: &str, max_bytes: usize) -> Result<()> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if !namespace.chars().all(allowed) {
            let reason = format!("{namespace:?} has characters other than A-Z a-z 0-9 . _ -");
            return Err(Error::invalid_option("namespace", reason));
        }
        if namespace.len() > max_bytes {
            let reason = format!("it is longer than {max_bytes} bytes");
            return Err(Error::invalid_option("namespace", reason));
        }
        Ok(())
    }

    /// Describes a backend with no capabilities, the default namespace, a fallback poll of 1 s, a patience of 1 s, the least
    /// ttl that there is, leases that do not stand still, and releases in the background.
    pub fn new(name: &'static str, server: impl Into<Arc<str>>) -> Self {
        Self {
            name,
            server: server.into(),
            namespace: Self::DEFAULT_NAMESPACE.into(),
            capabilities: Capabilities::default(),
            instead: None,
            fallback_poll: Duration::from_secs(1),
            max_patience: Duration::from_secs(1),
            least_ttl: AcquireOptions::MIN_TTL,
            leases_stand_still: false,
            releases_at_once: false,
            secrets: Secrets::default(),
        }
    }
}

/// A server that can grant locks.
///
/// Implement it, and [`Claim`], to add a backend. Often a backend wraps another, here to count its claims:
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
///
/// use lockkit_core::{
///     LockClient, LockKind, LockName, LockState, MemoryBackend, Result, async_trait,
///     spi::{Backend, BackendInfo, Claim, ClaimRequest},
/// };
///
/// #[derive(Debug)]
/// struct Counting {
///     inner: MemoryBackend,
///     claims: Arc<AtomicUsize>,
/// }
///
/// #[async_trait]
/// impl Backend for Counting {
///     fn info(&self) -> BackendInfo {
///         self.inner.info()
///     }
///
///     async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
///         self.claims.fetch_add(1, Ordering::Relaxed);
///         self.inner.claim(request).await
///     }
///
///     async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
///         self.inner.inspect(name, kind).await
///     }
///
///     async fn close(&self) -> Result<()> {
///         self.inner.close().await
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let claims = Arc::new(AtomicUsize::new(0));
/// let backend = Counting { inner: MemoryBackend::new(), claims: claims.clone() };
/// let client = LockClient::new(backend);
/// client.lock("job")?.acquire().await?.release().await?;
/// assert_eq!(claims.load(Ordering::Relaxed), 1);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Describes the backend to the driver, which calls it once, when the client is made.
    fn info(&self) -> BackendInfo;

    /// Returns the longest time from a holder's death until a waiter can be granted the lock, on a healthy server. `ttl` is what
    /// the holder asked for. Override it if something else than the `ttl` counts, such as a session.
    ///
    /// By default the `ttl` plus a [`fallback_poll`](BackendInfo::fallback_poll), or the poll alone if holds have no lease.
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
    /// [`Error::Unsupported`] for a mode that it does not have, [`Error::InvalidOptions`] for a value that it cannot keep
    /// (both without I/O), [`Error::Backend`] if it cannot reach its server.
    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>>;

    /// Returns the holders and waiters of `name`. Refuses and delays nobody.
    ///
    /// # Errors
    /// [`Error::Backend`] if the server cannot tell.
    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState>;

    /// Asks the holder of `name` that has `token` to give up its hold, also another client's. Does not wait for that. Returns what is
    /// left of the hold's lease; `None` if no hold has that token.
    ///
    /// Marks the hold at the server. From then on a [renewal](Claim::renew) does not prolong it, and returns [`Renewal::Asked`]. It
    /// ends with its holder's [`release`](Claim::release), or with its lease; nobody is granted what it holds before. If the server
    /// can tell the holder, its claim's [`notified`](Claim::notified) resolves. A renewal finds the mark otherwise.
    ///
    /// The mark is on the hold of this token. A hold that was [passed on](Claim::passed_on) has a later one, and is not hit where
    /// the server knows the token in use. Otherwise each token that was reserved with the first one stands for the present hold.
    ///
    /// Idempotent: the driver asks again and again until the hold has ended. So a mark that is lost with the server's memory, or
    /// that a repeated [`attempt`](Claim::attempt) ignores, is set anew.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a holder cannot be asked, [`Error::Backend`] if the server cannot tell.
    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let _ = (name, kind, token);
        Err(Error::unsupported(
            self.info().name,
            "asking another holder to give up its hold; end the hold by force, or end the holder",
        ))
    }

    /// Begins to watch who holds `name`, for those who observe it. Takes part in no contest. Returns `None`, the default, if the
    /// server tells nobody of changes: then the driver looks from time to time.
    ///
    /// # Errors
    /// [`Error::Backend`] if the server cannot be asked. The driver asks again later.
    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        let _ = (name, kind);
        Ok(None)
    }

    /// Wakes those who [watch](Self::watch) `name` at other clients, after this client's grant or release. Does nothing by default:
    /// where the server itself tells of changes, and where nobody can be told.
    ///
    /// # Errors
    /// [`Error::Backend`] if they may not have been told. Nobody relies on it.
    async fn announce(&self, name: &LockName, kind: LockKind) -> Result<()> {
        let _ = (name, kind);
        Ok(())
    }

    /// Begins a listing of the locks and semaphores of this namespace that somebody holds and whose names begin with `prefix`,
    /// byte by byte: no character of it is a wildcard. An empty prefix stands for all. Sends nothing yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where names cannot be listed.
    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        let _ = prefix;
        Err(Error::unsupported(
            self.info().name,
            "listing what is held; inspect locks by their names",
        ))
    }

    /// Ends the hold of `name` that has `token`, also another client's. Returns `false` if there is none. Its holder loses it as
    /// [`LossReason::Revoked`], within the time that the backend needs to notice, and others may be granted it before.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a hold cannot be ended from outside, [`Error::Backend`] if the server cannot tell.
    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let _ = (name, kind, token);
        Err(Error::unsupported(
            self.info().name,
            "ending another holder's hold; end the holder instead",
        ))
    }

    /// Returns the highest token that a hold of this namespace may have had so far. It may be the highest of the whole server. Does not
    /// count tokens of other backends that write to the same resources.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where tokens cannot be raised, [`Error::Backend`] if the server cannot tell.
    async fn fence(&self) -> Result<FencingToken> {
        let feature = "showing its highest token; take the highest that is remembered by what checks them";
        Err(Error::unsupported(self.info().name, feature))
    }

    /// Raises the tokens of this namespace, or of the whole server: a claim whose first [`attempt`](Claim::attempt) begins after this has
    /// returned gets tokens above `above`, whichever client it is of. A hold or a place in the queue from before may keep its tokens.
    /// Returns the [fence](Self::fence) from then on: `above`, or more if what is there is higher, which stays. Of two that raise at once,
    /// the higher one wins: compare and write in one step of the server.
    ///
    /// Once it has returned, it is as durable as the tokens are, and nobody goes on with what he has kept of the fence before: neither a
    /// block of tokens that outlasts a hold, nor a copy of a counter. Idempotent.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a token that is so high that too few are left above it: see [`fence::check`].
    /// [`Error::Unsupported`] where tokens cannot be raised. [`Error::Backend`] if the server cannot tell: they may be raised or not.
    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        let _ = above;
        let feature =
            "raising its tokens; have what checks them begin at 0 instead, while nobody holds a lock";
        Err(Error::unsupported(self.info().name, feature))
    }

    /// Ends the connections, after every claim has been released or given up. Idempotent: closing a client a second time calls
    /// it a second time.
    ///
    /// # Errors
    /// [`Error::Backend`] if something may be left on the server.
    async fn close(&self) -> Result<()>;
}

/// A claim on one name, from its first attempt to its release. Only the driver calls these methods, one at a time.
///
/// The driver's use of a claim, in short:
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_core::{
///     LockName, MemoryBackend,
///     spi::{Backend, ClaimRequest, Mode, OwnerId, Renewal},
/// };
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let ttl = Duration::from_secs(30);
/// let name = LockName::new("job")?;
/// let request = ClaimRequest::new(name, Mode::Exclusive, ttl, OwnerId::new(7));
/// let mut claim = MemoryBackend::new().claim(&request).await?;
///
/// let grant = claim.attempt(Duration::from_secs(1)).await?.expect("nobody else is here");
/// assert_eq!(grant.lease.length, Some(ttl));
/// let renewal = claim.renew().await?;
/// assert!(matches!(renewal, Renewal::Held(lease) if lease.since >= grant.lease.since));
/// claim.release().await?;
/// claim.release().await?; // a second time does nothing
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[async_trait]
pub trait Claim: fmt::Debug + Send + 'static {
    /// Asks for the lock. Returns `None` if it is taken.
    ///
    /// With zero `patience`, return at once and stay out of any queue. Above zero, join the queue if there is one, and block at
    /// the server for up to `patience` if it can block; otherwise return at once.
    ///
    /// The lease counts from before the request that proves it. For a grant that came after blocking, that is the last request
    /// sent before the grant. For a pushed grant, which the server sends without being asked at that moment, it is the last
    /// request that was sent and had its reply before the push. If that leaves less than half of the ttl, prove the hold again
    /// before returning. Exception: if the hold [will be renewed](ClaimRequest::renews) and at least a second is left, return the
    /// grant as it is, and have [`notified`](Self::notified) resolve at once, so that the driver renews it.
    ///
    /// # Errors
    /// [`Error::Backend`] if the outcome is not known or the server refuses.
    ///
    /// # Cancel safety
    /// May be dropped at any await. The next call, or `release`, goes on from what the server made of it.
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>>;

    /// Proves the hold anew, by what the server says now: for the ttl, or for as long as a session is ever proven. Never brings a lost
    /// hold back, and never prolongs one that was [asked back](Backend::revoke).
    ///
    /// # Errors
    /// An `Err` means unknown, not lost.
    ///
    /// # Cancel safety
    /// May be dropped at any await.
    async fn renew(&mut self) -> Result<Renewal>;

    /// Changes the ttl that its requests ask for from now on. The driver [renews](Self::renew) the hold next; do no I/O here. Returns
    /// the length of the lease that the least of these requests leaves the hold, without the allowance for clock drift: the driver
    /// counts with it before it sends the first one. Returns `None`, the default, where a hold has no lease.
    ///
    /// An earlier request may come late, and ask for less. If the server would do it, no lease of this claim may be longer than
    /// that from now on. So the driver takes a lease that is shorter than [`Lease::of_ttl`] of this ttl for one that may be cut short, and
    /// repeats the release that is to leave it behind.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a ttl that it cannot keep. Then the old one goes on.
    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        let _ = ttl;
        Ok(None)
    }

    /// Turns an exclusive hold into a shared one, in one step of the server: at no moment is it neither. Lets in the waiters that may
    /// share the lock with it, up to the first in the queue that may not, and wakes them. Proves the hold anew. The token in use stays.
    /// Everyone who waits by now has or will get a higher one: mind this where a waiter has its token before its grant.
    ///
    /// Never brings a lost hold back. Idempotent: the driver repeats it for as long as its outcome is not known. Afterwards the
    /// claim [renews](Self::renew) and [releases](Self::release) the shared hold.
    ///
    /// # Errors
    /// [`Error::Unsupported`], the default, where this cannot be done, and nothing has changed. [`Error::Lost`] if the hold is gone;
    /// with [`LossReason::Asked`] if its holder was [asked](Backend::revoke) to give it up. Any other error means unknown.
    ///
    /// # Cancel safety
    /// May be dropped at any await. Every method but [`attempt`](Self::attempt) stays legal, whatever the server has made of it.
    async fn downgrade(&mut self) -> Result<Lease> {
        Err(Error::unsupported("backend", NO_DOWNGRADE))
    }

    /// Gives up the hold, leaves the queue, and takes back what an attempt of unknown outcome may have got.
    /// Idempotent, and harmless to a later holder.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold turned out to be gone before. [`Error::Backend`] if it is not known whether it is
    /// released: the driver then tries again.
    ///
    /// # Cancel safety
    /// May be dropped at any await; the driver calls it again.
    async fn release(&mut self) -> Result<()>;

    /// Resolves when it is worth while to attempt (while waiting) or to renew (while holding) now. This is a hint: it may be
    /// spurious, and a fallback poll covers a lost one.
    ///
    /// # Cancel safety
    /// Remembers events that came since the last `attempt` or `renew` began, so that dropping it loses none.
    async fn notified(&mut self);

    /// Returns the proof of the session that the granted hold ends with, where one session proves many holds. The driver
    /// observes it beside the lease, also while a renewal that nobody polls has the claim.
    fn session(&self) -> Option<SessionProof> {
        None
    }

    /// Notes a hand-off: the hold has another user in this client and this one of its [tokens](Grant::tokens) from now on. The
    /// server has not been told. A backend that shows the token in use at the server may resolve
    /// [`notified`](Self::notified), to be renewed. Do no I/O here.
    fn passed_on(&mut self, token: FencingToken) {
        let _ = token;
    }

    /// Returns the owner under whose name the server has the hold, which is about to go on without this claim. From now on, dropping
    /// this claim leaves the hold as it is; a [`release`](Self::release) still ends it. Returns `None`, the default, where no other
    /// client can adopt a hold. Do no I/O here: the driver has just [renewed](Self::renew) the hold.
    fn detach(&mut self) -> Option<OwnerId> {
        None
    }

    /// Takes over the hold of the owner `from` that has this token, which was [detached](Self::detach): proves it anew, as
    /// [`renew`](Self::renew) does, and in the same step makes this claim's owner its owner. From then on nothing that `from` asks for
    /// has any effect. The hold has this one token. Its lease does not become shorter. Returns [`Renewal::Held`]; [`Renewal::Lost`] if
    /// the server has no such hold; [`Renewal::Asked`], and changes nothing, if it was [asked](Backend::revoke) back. Returns `None`,
    /// the default, where a hold cannot be adopted.
    ///
    /// Idempotent: a hold that is this owner's already is proven anew. The driver calls it on a new claim, which it drops if this fails,
    /// without a release; and may then call it on another one with the same owner.
    ///
    /// # Errors
    /// An `Err` means unknown.
    ///
    /// # Cancel safety
    /// May be dropped at any await. The claim is then dropped as well.
    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        let _ = (from, token);
        Ok(None)
    }

    /// Returns a duplicate of the operating system's handle that keeps the hold alive, where there is one. It can be passed on
    /// to a child process.
    #[cfg(unix)]
    fn descriptor(&self) -> Option<std::os::fd::OwnedFd> {
        None
    }
}

/// The missing feature where an exclusive hold cannot become a shared one.
pub(crate) const NO_DOWNGRADE: &str =
    "an exclusive hold that becomes a shared one; release it, then acquire the lock in shared mode";

/// A listing that is under way. Only the driver calls it, for one page after the other.
///
/// It refuses and delays nobody: it takes part in no contest and writes nothing, and a page is small enough for the server to
/// serve others beside it. Its memory does not grow with the number of locks, except perhaps for their names. It shows every lock
/// once that is held from the first page to the last. It may show one that is held for a part of that time.
#[async_trait]
pub trait Lister: Send + 'static {
    /// Returns the next page, which may be empty. Returns `None` after the last one. No lock on it is free.
    ///
    /// # Errors
    /// [`Error::Backend`] if the server cannot tell. The listing is over then.
    ///
    /// # Cancel safety
    /// If the future is dropped, the listing is over.
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>>;
}

/// One who watches who holds a lock. Made by [`Backend::watch`]. Dropping it ends the watch; do no I/O there.
#[async_trait]
pub trait HolderWatch: fmt::Debug + Send + 'static {
    /// Resolves when the holder may have changed since it resolved last, or since the watch began. This is a hint: it may be
    /// spurious, and it may be lost with a connection. The end of a lease need not be told. While it cannot tell, it stays
    /// pending; the driver drops it and looks by itself from time to time.
    ///
    /// # Cancel safety
    /// Remembers what came meanwhile, so that dropping it loses nothing.
    async fn changed(&mut self);
}

/// Succeeds within a Tokio runtime. Outside of one, sockets and timers would panic.
///
/// # Errors
/// [`Error::Backend`] outside of a Tokio runtime.
pub fn require_runtime(backend: &'static str, operation: &'static str) -> Result<()> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(Error::permanent(
            backend,
            operation,
            "this must be awaited within a Tokio runtime",
        ));
    }
    Ok(())
}

/// Returns an error and its causes in one line. Leaves out a cause that only repeats the text before it. Escapes line ends and
/// control characters, also those that a server has quoted.
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
    let mut text = OneLine(&error.to_string()).to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = OneLine(&error.to_string()).to_string();
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}

/// Returns a URL as it may be shown, in errors and in `Debug`: without user, password and parameters.
///
/// It hides rather too much. A password that is not percent-encoded may hold any of `/?#@`, so everything up to the last `@`
/// goes. After a `?`, that `@` may be part of a parameter: then what follows it goes too. Where the `@` was forgotten or encoded, a
/// password stands in the place of a port, or before the host: all that follows the scheme goes, unless it can be nothing but hosts with their
/// ports.
///
/// ```
/// use lockkit_core::spi::redacted_url;
///
/// assert_eq!(redacted_url("redis://app:s3cret@cache:6379/2?x=y"), "redis://***@cache:6379/2");
/// assert_eq!(redacted_url("app:s3cret@cache"), "***@cache");
/// assert_eq!(redacted_url("redis://cache/2?x=s3@cret"), "redis://***");
/// assert_eq!(redacted_url("redis://app:s3cret"), "redis://***");
/// assert_eq!(redacted_url("redis://app:s3cret%40cache:6379"), "redis://***");
/// assert_eq!(redacted_url("app:/s3cret"), "***");
/// assert_eq!(redacted_url("redis://[::1]:6379,cache:6379/2"), "redis://[::1]:6379,cache:6379/2");
/// assert_eq!(redacted_url("file:///var/lock/a@b"), "file:///var/lock/a@b");
/// ```
pub fn redacted_url(url: &str) -> String {
    let plain = |text: &str| text.split(['?', '#']).next().unwrap_or_default().to_owned();
    // Without a slash behind its colon, a scheme may as well be a user name.
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
    if is_local_path
        || url
            .get(..5)
            .is_some_and(|start| start.eq_ignore_ascii_case("file:"))
            && !url.contains('@')
    {
        return plain(url);
    }
    let Some(at) = url.rfind('@') else {
        let hosts = rest.strip_prefix('/').unwrap_or(rest);
        // With one slash it may be a user and a password, and is no address.
        let is_address = scheme.is_empty() || rest.starts_with('/');
        return match scheme {
            _ if is_address && are_hosts(hosts) => plain(url),
            scheme if is_address && !scheme.is_empty() => format!("{scheme}://***"),
            _ => "***".to_owned(),
        };
    };
    let host = if url[..at].contains('?') || !are_hosts(&url[at + 1..]) {
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

/// True if what follows a scheme has hosts with their ports in the place where they belong, and nothing that could be a password.
fn are_hosts(rest: &str) -> bool {
    let is_host = |host: &str| {
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, port),
            _ => (host, ""),
        };
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let is_address = address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
        (is_address || !name.contains([':', '[', ']']))
            && !name.contains('%')
            && (port.is_empty() || port.parse::<u16>().is_ok())
    };
    let hosts = rest.split(['/', '?', '#']).next().unwrap_or_default();
    !rest.contains("%40") && hosts.split(',').all(is_host)
}
