//! For how long the session is known to live. Pure: time comes in as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// How many times per session timeout the session is proven, at least.
pub(crate) const BEATS_PER_TIMEOUT: u32 = 5;
/// How far apart the proofs of a long session are, so that whoever renews by hand need not wait for long.
const LONGEST_BEAT: Duration = Duration::from_millis(2_500);

/// What the acknowledged writes of a session prove.
///
/// A write that the quorum has acknowledged proves that the session lived when it was processed, and no more: the
/// leader counts a session's time from when it was last *told* of it. The server that a client is connected to passes on
/// whom it has heard of with each of its pings, which are half a tick apart and in order with the writes. Two beats, so
/// at least two ticks, before the last acknowledged write there was another one. The leader has been told of it by now,
/// and lets the session live for a timeout from then on. A tick is taken off for what is rounded, and a hundredth for
/// clocks that drift.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    tick: Duration,
    /// When the last acknowledged write was sent, and the one before it.
    last: Instant,
    before: Instant,
    end: Instant,
}

impl Proof {
    /// A session that a request sent at `sent` has opened: the leader itself has counted from then.
    pub(crate) fn opened(timeout: Duration, tick: Duration, sent: Instant) -> Self {
        let mut proof = Self {
            timeout,
            tick,
            last: sent,
            before: sent,
            end: sent,
        };
        proof.end = proof.lives_on_from(sent);
        proof
    }

    /// The write that was sent at `sent`, a beat after the one before it or later, is acknowledged.
    pub(crate) fn acknowledged(&mut self, sent: Instant) {
        self.end = self.end.max(self.lives_on_from(self.before));
        self.before = self.last;
        self.last = sent;
    }

    /// Until when the server cannot have ended the session by itself.
    pub(crate) fn end(&self) -> Instant {
        self.end
    }

    /// How far apart the writes are.
    pub(crate) fn beat(&self) -> Duration {
        (self.timeout / BEATS_PER_TIMEOUT).min(LONGEST_BEAT.max(self.tick))
    }

    fn lives_on_from(&self, told: Instant) -> Instant {
        told + self.timeout.saturating_sub(self.tick + self.timeout / 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_lease_counts_from_two_beats_before_the_last_one() {
        let start = Instant::now();
        let mut proof = Proof::opened(MS(1_000), MS(100), start);
        assert_eq!(proof.end(), start + MS(890));
        for sent in [200, 400] {
            proof.acknowledged(start + MS(sent));
            assert_eq!(proof.end(), start + MS(890));
        }
        proof.acknowledged(start + MS(600));
        assert_eq!(proof.end(), start + MS(200 + 890));
        proof.acknowledged(start + MS(800));
        assert_eq!(proof.end(), start + MS(400 + 890));
    }

    #[test]
    fn a_late_write_revives_the_lease_two_beats_later() {
        let start = Instant::now();
        let mut proof = Proof::opened(MS(1_000), MS(100), start);
        for sent in [900, 1_100] {
            proof.acknowledged(start + MS(sent));
            assert_eq!(proof.end(), start + MS(890));
        }
        proof.acknowledged(start + MS(1_300));
        assert_eq!(proof.end(), start + MS(900 + 890));
    }

    #[test]
    fn beats_are_a_tick_apart_or_more_and_not_too_far() {
        let beat = |timeout, tick| Proof::opened(MS(timeout), MS(tick), Instant::now()).beat();
        assert_eq!(beat(1_000, 100), MS(200));
        assert_eq!(beat(10_000, 2_000), MS(2_000));
        assert_eq!(beat(30_000, 2_000), MS(2_500));
        assert_eq!(beat(40_000, 5_000), MS(5_000));
    }
}
