//! Times and pauses as pure functions, and the bound on a future.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    task::Poll,
    time::Duration,
};

use tokio::time::Instant;

use crate::{Result, driver::moment::Proof, spi::require_runtime};

/// The instant from which a renewal without a reply counts as failing: an eighth of the lease before its end. It may still
/// succeed. Where a server session decides, a lease with less than a quarter left may be healthy.
pub(crate) fn renewal_overdue(end: Instant, length: Option<Duration>) -> Instant {
    length
        .and_then(|length| end.checked_sub(length / 8))
        .unwrap_or(end)
}

/// The pause before a failed renewal is tried again. There is time for several before the lease ends.
pub(crate) fn renewal_retry(lease: &Proof, ttl: Duration) -> Duration {
    jittered(lease.length.unwrap_or(ttl) / 10).clamp(Duration::from_millis(1), Duration::from_secs(5))
}

/// The age from which the worker keeps a hold alive: old enough that it never sees a short one, and young against the time to
/// the first renewal.
pub(crate) fn adopt_after(ttl: Duration) -> Duration {
    Duration::from_millis(5).min(ttl / 10)
}

/// The time at which the worker adopts whichever hold a claim has, if all its holds were too short for [`adopt_after`]: nobody
/// else would notice that the claim is lost. A tenth of a second after `since`, the claim's grant or its last adoption; less for a
/// ttl below 50 ms.
pub(crate) fn adopt_at_last(since: Instant, adopt_after: Duration) -> Instant {
    since + 20 * adopt_after
}

/// Returns between three and five quarters of `period`, so that clients which were started together drift apart.
pub(crate) fn jittered(period: Duration) -> Duration {
    period.mul_f64(0.75 + fastrand::f64() / 2.0)
}

/// Returns between three quarters and all of `period`, for a pause whose length others rely on.
pub(crate) fn jittered_down(period: Duration) -> Duration {
    period.mul_f64(0.75 + fastrand::f64() / 4.0)
}

/// Pauses between failures: doubling from 10 ms to a second, jittered.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    pub(crate) fn next(&mut self) -> Duration {
        let pause = Duration::from_millis(10 << self.failures.min(7)).min(Duration::from_secs(1));
        self.failures = self.failures.saturating_add(1);
        jittered(pause)
    }

    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Keeps hints that come at once, again and again, from becoming a busy loop: after a few of them it is time for a rest.
#[derive(Debug, Default)]
pub(crate) struct HintBudget {
    at_once: u32,
}

impl HintBudget {
    const MOST: u32 = 16;
    const AT_ONCE: Duration = Duration::from_millis(1);
    /// The time for which a waiter rests. A lock that others keep taking for less than a millisecond hints as often, and a waiter
    /// that rests for longer has no chance against them. A hint that comes in the meantime is there afterwards.
    const REST: Duration = Duration::from_millis(10);
    /// The time for which a holder rests. A hint may say that its hold is gone, and then another may hold meanwhile.
    pub(crate) const HOLDERS_REST: Duration = Duration::from_millis(100);

    /// The pause after which a waiter asks again without a hint.
    pub(crate) fn pause(&self, fallback_poll: Duration) -> Duration {
        jittered_down(if self.listens() {
            fallback_poll
        } else {
            fallback_poll.min(Self::REST)
        })
    }

    /// Returns `true` while hints are listened to.
    pub(crate) fn listens(&self) -> bool {
        self.at_once < Self::MOST
    }

    /// Notes a hint that came after this long.
    pub(crate) fn hinted(&mut self, after: Duration) {
        self.at_once = if after < Self::AT_ONCE {
            self.at_once + 1
        } else {
            0
        };
    }

    /// Notes that the pause without hints is over.
    pub(crate) fn rested(&mut self) {
        self.at_once = 0;
    }
}

/// Runs `future` until `limit()`; `None` if it was not done by then. A future that is ready at once costs no clock, no
/// timer and no more than its own state. What it takes to wait is made only when it has to wait.
///
/// # Errors
/// As [`require_runtime`], if it has to wait.
pub(crate) async fn within<F: Future + Unpin>(
    backend: &'static str,
    operation: &'static str,
    mut future: F,
    limit: impl FnOnce() -> Instant,
) -> Result<Option<F::Output>> {
    if let Poll::Ready(output) = poll_once(&mut future).await {
        return Ok(Some(output));
    }
    require_runtime(backend, operation)?;
    let limit = limit();
    let waiting = async move {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = tokio::time::sleep_until(limit) => None,
        }
    };
    Ok(Box::pin(waiting).await)
}

/// Polls `future` once, with the waker of the running task.
pub(crate) async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
}

/// Lets others run once, on any executor. Tokio's own needs a worker thread that is not held up.
pub(crate) async fn pause_once() {
    let mut has_paused = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_paused, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_is_overdue_an_eighth_before_the_end() {
        let ms = Duration::from_millis;
        let end = Instant::now() + ms(29_998);
        assert_eq!(renewal_overdue(end, Some(ms(30_000))), end - ms(3_750));
        assert_eq!(renewal_overdue(end, None), end);
    }

    #[test]
    fn pauses_grow_to_a_second_and_no_further() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..50).map(|_| backoff.next()).collect();
        assert!(pauses[0] < Duration::from_millis(13), "{pauses:?}");
        assert!(pauses[49] > Duration::from_millis(740), "{pauses:?}");
        assert!(
            pauses.iter().all(|p| *p <= Duration::from_millis(1_250)),
            "{pauses:?}"
        );
        backoff.reset();
        assert!(backoff.next() < Duration::from_millis(13));
    }

    #[test]
    fn a_storm_of_hints_is_not_followed_for_ever() {
        let mut hints = HintBudget::default();
        let followed = (0..100).take_while(|_| {
            hints.hinted(Duration::ZERO);
            hints.listens()
        });
        assert_eq!(followed.count(), 15);
        let poll = Duration::from_secs(30);
        assert!(hints.pause(poll) < Duration::from_millis(13), "a rest is short");
        assert!(hints.pause(Duration::from_millis(1)) < Duration::from_millis(2));
        hints.rested();
        assert!(hints.listens());
        let pauses: Vec<_> = (0..1_000).map(|_| hints.pause(poll)).collect();
        let shortest = Duration::from_secs(20);
        assert!(pauses.iter().all(|pause| (shortest..=poll).contains(pause)));
        for _ in 0..100 {
            hints.hinted(Duration::from_millis(5));
        }
        assert!(hints.listens(), "hints at a sane pace are always followed");
    }
}
