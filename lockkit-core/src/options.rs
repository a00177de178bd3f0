//! The options of an acquisition.

use std::{sync::Arc, time::Duration};

use crate::{Error, Result};

/// Options of an acquisition. Every field is unset at first. The first of these that sets a field counts: the call, the
/// [`Lock`](crate::Lock)'s own options, the client's options, the default.
///
/// Values are checked when they are used: `acquire*` returns [`Error::InvalidOptions`] before it sends anything.
///
/// ```
/// use std::time::Duration;
/// use lockkit_core::AcquireOptions;
///
/// let options = AcquireOptions::new()
///     .ttl(Duration::from_secs(10))
///     .wait(Duration::from_secs(2))
///     .label("billing@host-7");
/// assert_eq!(options.ttl, Some(Duration::from_secs(10)));
/// assert_eq!(options.renew, None);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct AcquireOptions {
    /// The time for which a hold outlives the last word from its holder. Default: [`DEFAULT_TTL`](Self::DEFAULT_TTL), 30 s.
    pub ttl: Option<Duration>,
    /// The time to wait for a lock that is taken. Unset: for ever. Zero: one attempt.
    pub wait: Option<Duration>,
    /// Renews the lease in the background while the guard lives. Default: yes.
    pub renew: Option<bool>,
    /// The time from the grant after which a hold is not renewed any more, for tasks that hang. The hold then ends with its lease,
    /// up to a ttl later, as [`LossReason::MaxHold`](crate::LossReason::MaxHold). Unset: it is renewed for as long as its guard
    /// lives.
    ///
    /// [`renewal_failing`](crate::LockGuard::renewal_failing) resolves when this time is over. A hold without a lease ends a ttl
    /// after that: the client tells its holder, and then releases it. A hold that is passed on within the client begins its own
    /// time. The time for which the machine is suspended counts, where the operating system tells it (Linux).
    pub max_hold: Option<Duration>,
    /// The time from the grant for which nobody else gets the lock, even if it is released before: for jobs that are done once by
    /// several hosts, which begin at almost the same time. A release before that leaves the hold to a lease of the rest, without this
    /// process. It is not passed on within the client, either. Unset: a release frees the lock.
    /// [`release_early`](crate::LockGuard::release_early) frees it in any case.
    ///
    /// Closing the client leaves it taken, too. If the process dies or the hold is lost otherwise, it ends with its lease, as any does,
    /// which may be earlier. Whoever [breaks](crate::LockClient::revoke_by_force) the lock ends it. Where the hold is
    /// [detached](crate::LockGuard::detach), what is left of the time goes along, and counts on from the adoption. Elections have none.
    /// [`Error::Unsupported`] where a hold ends with a session, a transaction or a process
    /// ([`capabilities().detach`](crate::Capabilities::detach) is false).
    pub hold_at_least: Option<Duration>,
    /// The time after which one exchange with the server counts as failed. Default:
    /// [`DEFAULT_OP_TIMEOUT`](Self::DEFAULT_OP_TIMEOUT), 5 s.
    pub op_timeout: Option<Duration>,
    /// A description of the holder, shown to those who inspect the lock. At most 256 bytes.
    pub label: Option<Arc<str>>,
    /// The number of times in a row that a release may pass an exclusive hold to the next waiter of this client, before the
    /// lock goes back to the server. Default: [`DEFAULT_LOCAL_HANDOFFS`](Self::DEFAULT_LOCAL_HANDOFFS), 32, or 0 on a
    /// backend whose order across processes is strict. The smallest value among the holders in that row counts, the next
    /// one's included.
    pub local_handoffs: Option<u32>,
}

impl AcquireOptions {
    /// The ttl where none is set.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);
    /// The bound on one exchange with the server where none is set.
    pub const DEFAULT_OP_TIMEOUT: Duration = Duration::from_secs(5);
    /// The number of local hand-offs in a row where none is set.
    pub const DEFAULT_LOCAL_HANDOFFS: u32 = 32;
    /// The shortest ttl. Below it, timers and scheduling use the lease up.
    pub const MIN_TTL: Duration = Duration::from_millis(10);
    /// The longest ttl and the longest wait: a year.
    pub const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    /// The longest label, in bytes.
    pub const MAX_LABEL_BYTES: usize = 256;
    /// The most local hand-offs in a row: a grant reserves a token for each.
    pub const MAX_LOCAL_HANDOFFS: u32 = 65_535;

    /// Makes options with nothing set.
    pub const fn new() -> Self {
        Self {
            ttl: None,
            wait: None,
            renew: None,
            max_hold: None,
            hold_at_least: None,
            op_timeout: None,
            label: None,
            local_handoffs: None,
        }
    }

    /// Sets [`ttl`](#structfield.ttl), from 10 ms to a year.
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets [`wait`](#structfield.wait), at most a year. Leave it unset to wait for ever.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets [`renew`](#structfield.renew).
    pub const fn renew(mut self, renew: bool) -> Self {
        self.renew = Some(renew);
        self
    }

    /// Sets [`max_hold`](#structfield.max_hold), from the ttl to a year.
    pub const fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Sets [`hold_at_least`](#structfield.hold_at_least), from 10 ms to a year, and at most the `max_hold`.
    pub const fn hold_at_least(mut self, hold_at_least: Duration) -> Self {
        self.hold_at_least = Some(hold_at_least);
        self
    }

    /// Sets [`op_timeout`](#structfield.op_timeout), at least 1 ms.
    pub const fn op_timeout(mut self, op_timeout: Duration) -> Self {
        self.op_timeout = Some(op_timeout);
        self
    }

    /// Sets [`label`](#structfield.label).
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets [`local_handoffs`](#structfield.local_handoffs), at most 65,535.
    pub const fn local_handoffs(mut self, times: u32) -> Self {
        self.local_handoffs = Some(times);
        self
    }

    /// Returns these options, with what is unset taken from `defaults`.
    pub fn or(&self, defaults: &Self) -> Self {
        Self {
            ttl: self.ttl.or(defaults.ttl),
            wait: self.wait.or(defaults.wait),
            renew: self.renew.or(defaults.renew),
            max_hold: self.max_hold.or(defaults.max_hold),
            hold_at_least: self.hold_at_least.or(defaults.hold_at_least),
            op_timeout: self.op_timeout.or(defaults.op_timeout),
            label: self.label.as_ref().or(defaults.label.as_ref()).cloned(),
            local_handoffs: self.local_handoffs.or(defaults.local_handoffs),
        }
    }

    /// Checks every value that is set.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] with the option and its bound.
    pub fn validate(&self) -> Result<()> {
        if let Some(ttl) = self.ttl {
            within("ttl", ttl, Self::MIN_TTL)?;
        }
        if let Some(wait) = self.wait {
            within("wait", wait, Duration::ZERO)?;
        }
        if let Some(max_hold) = self.max_hold {
            within("max_hold", max_hold, Self::MIN_TTL)?;
        }
        if let Some(ttl) = self.ttl {
            Self::check_max_hold(self.max_hold, ttl)?;
        }
        if let Some(least) = self.hold_at_least {
            within("hold_at_least", least, Self::MIN_TTL)?;
            if let Some(most) = self.max_hold.filter(|most| *most < least) {
                let reason = format!("{least:?} is longer than the max_hold of {most:?}");
                return Err(Error::invalid_option("hold_at_least", reason));
            }
        }
        if let Some(op_timeout) = self.op_timeout {
            within("op_timeout", op_timeout, Duration::from_millis(1))?;
        }
        if self
            .label
            .as_ref()
            .is_some_and(|l| l.len() > Self::MAX_LABEL_BYTES)
        {
            return Err(Error::invalid_option("label", "it is longer than 256 bytes"));
        }
        if self.local_handoffs.is_some_and(|n| n > Self::MAX_LOCAL_HANDOFFS) {
            return Err(Error::invalid_option("local_handoffs", "it is above 65,535"));
        }
        Ok(())
    }

    /// Checks that a `max_hold` leaves a hold the lease that it begins with.
    pub(crate) fn check_max_hold(max_hold: Option<Duration>, ttl: Duration) -> Result<()> {
        match max_hold {
            Some(max_hold) if max_hold < ttl => Err(Error::invalid_option(
                "max_hold",
                format!(
                    "{max_hold:?} is shorter than the ttl of {ttl:?}, for which a hold lasts without any renewal: ask for a \
                     shorter ttl, too"
                ),
            )),
            _ => Ok(()),
        }
    }
}

fn within(option: &'static str, value: Duration, min: Duration) -> Result<()> {
    let max = AcquireOptions::MAX_DURATION;
    if value < min {
        return Err(Error::invalid_option(
            option,
            format!("{value:?} is below {min:?}"),
        ));
    }
    if value > max {
        let hint = if option == "wait" {
            "; leave it unset to wait for ever"
        } else {
            ""
        };
        return Err(Error::invalid_option(option, format!("it is above a year{hint}")));
    }
    Ok(())
}
