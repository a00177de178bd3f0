//! One acquisition's request, with every default filled in.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    AcquireOptions, Error, Result,
    driver::{core::Core, lock_queue::LockQueue, timing},
    spi::Mode,
};

/// The lock that an acquisition asks for, and the options that apply.
pub(crate) struct AcquireRequest {
    pub(crate) queue: Arc<LockQueue>,
    pub(crate) ttl: Duration,
    pub(crate) wait: Option<Duration>,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    /// In a box, since few have one.
    pub(crate) hold_at_least: Option<Box<Duration>>,
    pub(crate) op_timeout: Duration,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) local_handoffs: u32,
    /// The age from which the worker keeps the hold alive.
    pub(crate) adopt_after: Duration,
}

impl AcquireRequest {
    /// Checks `options` and fills in the defaults.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`], or [`Error::Unsupported`] for a mode that the backend does not have.
    pub(crate) fn new(queue: &Arc<LockQueue>, options: &AcquireOptions) -> Result<Self> {
        let info = &queue.core.info;
        let can = &info.capabilities;
        let missing = match queue.mode {
            Mode::Shared if !can.shared => Some("shared mode"),
            Mode::Permits(_) if !can.permits => Some("semaphores"),
            _ => None,
        };
        if let Some(missing) = missing {
            let instead = info.instead.unwrap_or("use another backend");
            return Err(Error::unsupported(info.name, format!("{missing}; {instead}")));
        }
        queue.core.check(options)?;
        let handoffs_by_default = if can.local_handoffs {
            AcquireOptions::DEFAULT_LOCAL_HANDOFFS
        } else {
            0
        };
        let ttl = options.ttl.unwrap_or(AcquireOptions::DEFAULT_TTL);
        queue.core.check_ttl(ttl)?;
        if options.renew == Some(false) && options.hold_at_least.is_some_and(|least| least > ttl) {
            let reason = "it is longer than the ttl, for which a hold lasts that is not renewed";
            return Err(Error::invalid_option("hold_at_least", reason));
        }
        AcquireOptions::check_max_hold(options.max_hold, ttl)?;
        Ok(Self {
            queue: queue.clone(),
            ttl,
            adopt_after: timing::adopt_after(ttl),
            wait: options.wait,
            renew: options.renew.unwrap_or(true),
            max_hold: options.max_hold,
            hold_at_least: options.hold_at_least.map(Box::new),
            op_timeout: options.op_timeout.unwrap_or(AcquireOptions::DEFAULT_OP_TIMEOUT),
            label: options.label.clone(),
            local_handoffs: options.local_handoffs.unwrap_or(handoffs_by_default),
        })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.queue.core
    }

    /// Returns the same request for another queue, of the same lock in another mode.
    pub(crate) fn in_queue(&self, queue: Arc<LockQueue>) -> Self {
        Self {
            queue,
            label: self.label.clone(),
            hold_at_least: self.hold_at_least.clone(),
            ..*self
        }
    }

    /// Says that it is one attempt, without waiting.
    pub(crate) fn is_try(&self) -> bool {
        self.wait == Some(Duration::ZERO)
    }

    /// Says that a hold which was granted for this request may be passed to a waiter with `other`. The server knows the ttl
    /// and the label, so these have to be the same.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || (self.ttl == other.ttl && self.label == other.label)
    }
}

impl fmt::Debug for AcquireRequest {
    /// Leaves out the queue, whose waiters have requests themselves.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireRequest")
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}
