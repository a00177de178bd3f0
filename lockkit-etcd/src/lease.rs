//! The lease of a session: until when it is proven to last. Pure: time comes in as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// The longest lease, and so the longest ttl. Leases of more than five minutes are written down with what is left of them, which members
/// count in different ways after an election.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(300);
/// The least number of beats per lease.
const BEATS_PER_LEASE: u32 = 5;
/// The longest time between two beats, so that a member that is silent is left soon.
const LONGEST_BEAT: Duration = Duration::from_millis(2_500);
/// The least and the most time that a member has to answer a beat in.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(3);

/// The proof that a lease lasts.
///
/// An answer to a keepalive proves nothing alone: renewals do not go through consensus, and a leader that is stuck or deposed goes on
/// answering. Take a keepalive whose answer has the term *t*, and a linearizable read that was sent after that and whose answer has the
/// term *t*, too. The member that renewed had applied an entry of *t* before, so that *t* had a leader. The read was answered after a
/// quorum had confirmed its leader, after the renewal, and not of an earlier term. So the leader of *t* led then, nobody of a later term
/// did, and whoever renewed was that leader. From then on the lease lasts for its ttl from the renewal, also over elections, which only
/// prolong it. So it lasts for its ttl from when the keepalive was sent.
///
/// The grant of a lease goes through consensus, and is its own proof. A hundredth is taken off for clocks that drift.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proof {
    /// The time at which the last request that is proven was sent.
    sent: Instant,
    /// The time that the machine had slept by then.
    asleep: Duration,
    /// The time at which that was answered.
    heard: Sent,
    length: Duration,
}

/// A moment at which a request is sent, or answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) at: Instant,
    /// The time that the machine has slept by then.
    pub(crate) asleep: Duration,
}

impl Proof {
    /// A lease of so many seconds, by a request that was sent then, and answered.
    pub(crate) fn new(sent: Sent, heard: Sent, ttl: u64) -> Self {
        let length = Duration::from_secs(ttl);
        Self {
            sent: sent.at,
            asleep: sent.asleep,
            heard,
            length: length.mul_f64(0.99),
        }
    }

    /// A lease that was granted for this time, by a renewal that says that it lasts for so many seconds. What is more than was granted is
    /// not relied on: no server would say so, and no outage would ever end such a hold.
    pub(crate) fn renewed(sent: Sent, heard: Sent, ttl: u64, granted: Duration) -> Self {
        Self::new(sent, heard, ttl.min(granted.as_secs()))
    }

    /// Returns until when it lasts at least, if the machine has slept for so long by now.
    pub(crate) fn end(&self, asleep: Duration) -> Instant {
        let slept = asleep.saturating_sub(self.asleep);
        let end = self.sent + self.length;
        end.checked_sub(slept).unwrap_or(self.sent)
    }

    /// Returns whether it is as new as proofs are: one of the last two beats brought it.
    pub(crate) fn is_current(&self, now: Sent, ttl: Duration) -> bool {
        let slept = now.asleep.saturating_sub(self.heard.asleep);
        now.at.saturating_duration_since(self.heard.at) + slept <= 2 * beat(ttl)
    }

    /// The later of both counts. A keepalive that was overtaken shortens nothing.
    pub(crate) fn or_later(self, other: Self) -> Self {
        if other.sent + other.length > self.sent + self.length {
            other
        } else {
            self
        }
    }
}

/// Returns the time between two beats of a lease.
pub(crate) fn beat(ttl: Duration) -> Duration {
    (ttl / BEATS_PER_LEASE).min(LONGEST_BEAT)
}

/// The time that a session waits for the answers to a beat before it gives up a member that says nothing at all.
///
/// A second for most, so that a lease outlives one election right after another: who passed a renewal on to a leader that is gone does
/// not answer it. A member that is slow is waited for: one that was given up and came back as slow as before would never serve anybody.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience(Duration);

impl Patience {
    /// For a server whose last answers took so long.
    pub(crate) fn new(took: Duration) -> Self {
        Self::of(2 * took)
    }

    pub(crate) fn length(self) -> Duration {
        self.0
    }

    /// A member was given up that had never answered. The next one gets more time: it may be as slow.
    pub(crate) fn after_silence(self) -> Self {
        Self::of(2 * self.0)
    }

    fn of(length: Duration) -> Self {
        Self(length.clamp(LEAST_PATIENCE, MOST_PATIENCE))
    }
}

/// Returns after how long a beat is given up with its member, also one that serves others.
pub(crate) fn longest_wait(ttl: Duration) -> Duration {
    (ttl / 2).max(MOST_PATIENCE)
}

/// Returns how long a member may take to show that it still tells of watches: longer for longer leases, which have the time.
pub(crate) fn watch_wait(ttl: Duration, patience: Patience) -> Duration {
    (ttl / 3).min(MOST_PATIENCE).max(patience.length())
}

/// Returns the pause after a beat that failed.
pub(crate) fn pause(ttl: Duration) -> Duration {
    beat(ttl) / 4
}

/// Returns the whole seconds of a lease for this ttl.
pub(crate) fn seconds(ttl: Duration) -> u64 {
    (ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_counts_from_the_request_and_less_than_the_ttl() {
        let at = Instant::now();
        let sent = Sent {
            at,
            asleep: SECOND * 7,
        };
        let proof = Proof::new(sent, sent, 10);
        assert_eq!(proof.end(SECOND * 7) - at, Duration::from_millis(9_900));
        assert_eq!(
            proof.end(SECOND * 9) - at,
            Duration::from_millis(7_900),
            "it slept"
        );
        assert!(proof.end(SECOND * 100_000) <= at);
    }

    #[test]
    fn a_renewal_proves_no_more_than_was_granted() {
        let sent = Sent {
            at: Instant::now(),
            asleep: Duration::ZERO,
        };
        for (ttl, proven) in [
            (5, 4_950),
            (10, 9_900),
            (11, 9_900),
            (i64::MAX.unsigned_abs(), 9_900),
        ] {
            let proof = Proof::renewed(sent, sent, ttl, SECOND * 10);
            let left = proof.end(Duration::ZERO) - sent.at;
            assert_eq!(left, Duration::from_millis(proven), "{ttl} s");
        }
    }

    #[test]
    fn an_earlier_proof_shortens_nothing() {
        let at = Instant::now();
        let proof = |later: u32| {
            let sent = Sent {
                at: at + SECOND * later,
                asleep: Duration::ZERO,
            };
            Proof::new(sent, sent, 10)
        };
        for (a, b) in [(0, 3), (3, 0)] {
            let end = proof(a).or_later(proof(b)).end(Duration::ZERO);
            assert_eq!(end, proof(3).end(Duration::ZERO));
        }
    }

    /// However long the answer took, and what is slept counts.
    #[test]
    fn a_proof_is_current_for_two_beats_from_its_answer() {
        let sent = Sent {
            at: Instant::now(),
            asleep: SECOND,
        };
        let after = |seconds: u32, slept: u32| Sent {
            at: sent.at + SECOND * seconds,
            asleep: sent.asleep + SECOND * slept,
        };
        let proof = Proof::new(sent, after(3, 0), 10);
        for (seconds, slept, is_current) in [(3, 0, true), (7, 0, true), (8, 0, false), (4, 4, false)] {
            let current = proof.is_current(after(seconds, slept), SECOND * 10);
            assert_eq!(current, is_current, "{seconds} s and {slept} s asleep");
        }
    }

    #[test]
    fn a_silent_member_is_given_up_in_time_for_another() {
        for ttl in 2..=300 {
            let ttl = SECOND * ttl;
            let given_up = beat(ttl) + Patience::new(Duration::ZERO).length();
            let again = pause(ttl) + LEAST_PATIENCE / 4;
            assert!(given_up + again < ttl * 99 / 100, "{ttl:?}");
            if ttl >= SECOND * 4 {
                assert!(given_up <= ttl / 2, "{ttl:?}");
            }
        }
    }

    #[test]
    fn a_slow_member_is_waited_for() {
        let patience = Patience::new(Duration::from_millis(20));
        assert_eq!(patience.length(), LEAST_PATIENCE);
        let longer = patience.after_silence();
        assert_eq!(longer.length(), 2 * LEAST_PATIENCE);
        assert_eq!(longer.after_silence().length(), MOST_PATIENCE);
        let known = Patience::new(Duration::from_millis(700));
        assert_eq!(
            known.length(),
            Duration::from_millis(1_400),
            "it is as slow the next time"
        );
    }

    #[test]
    fn a_ttl_is_rounded_up_to_seconds() {
        assert_eq!(seconds(Duration::from_millis(1)), 1);
        assert_eq!(seconds(SECOND), 1);
        assert_eq!(seconds(Duration::from_millis(1_001)), 2);
    }
}
