//! For how long the session is known to live. Pure: time comes in as an argument.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// How many ticks a session lasts, at least.
pub(crate) const TICKS_PER_TIMEOUT: u32 = 5;
/// How many times per session timeout the session is proven, at least.
const BEATS_PER_TIMEOUT: u32 = 10;
/// How far apart the proofs of a long session are, so that whoever renews by hand need not wait for long.
const LONGEST_BEAT: Duration = Duration::from_millis(2_500);

/// What the acknowledged writes of a session prove.
///
/// A write that the quorum has acknowledged proves that the session lived when it was processed, and no more: the
/// leader counts a session's time from when it was last *told* of it. The server that a client is connected to, if it is
/// not the leader, passes on whom it has heard of with its answer to each of the leader's pings, which are half a tick
/// apart. All that a server and the leader say to each other is in order. So of three writes *a*, *b* and *c* on one
/// connection, where *b* was sent three quarters of a tick after *a* was acknowledged, or later, and *c* after *b* was
/// acknowledged:
///
/// - the leader sent a ping in the half tick before it acknowledged *b*, so after the server had heard *a*;
/// - the server answered that ping before it passed on that *b* is acknowledged, and so before it passed on *c*;
/// - and the leader had that answer, which tells of *a*, before it processed *c*.
///
/// Once *c* is acknowledged, the session lives for a timeout from when *a* was sent. It is the same however late each of
/// them is, or if the way back to the leader is cut. A ping may be a quarter of a tick late; what makes the leader's own
/// clock later than that delays what it ends, too. A tick is taken off for the rest, and a hundredth for clocks that drift.
///
/// An attachment tells the leader itself, so that one write after it is enough. It also changes the timeout, to what
/// that server grants; after a change of leaders, it is what was granted first. What counts is the smallest there was. While
/// it is not known what a server has granted, it is the smallest that any may grant.
#[derive(Clone, Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    tick: Duration,
    /// The connection that the writes were acknowledged on.
    connection: u64,
    /// When the session was attached by it.
    attached: Instant,
    /// When they were sent and acknowledged, the oldest first.
    writes: VecDeque<(Instant, Instant)>,
    end: Instant,
    /// What the leader was told before then may have been followed by a timeout that is not known.
    doubtful: Instant,
}

impl Proof {
    /// A session that a request sent at `sent` has opened: the leader itself has counted from then.
    pub(crate) fn opened(timeout: Duration, tick: Duration, connection: u64, sent: Instant) -> Self {
        let mut proof = Self {
            timeout,
            tick,
            connection,
            attached: sent,
            writes: VecDeque::new(),
            end: sent,
            doubtful: sent,
        };
        proof.end = proof.lives_on_from(sent, timeout);
        proof
    }

    /// A server that was asked at `sent` to attach the session has not answered yet, and may have done it.
    pub(crate) fn unanswered(&mut self, sent: Instant, now: Instant) {
        self.end = self.end.min(self.lives_on_from(sent, self.least()));
        // What a server was told it passes on with the next ping, and then no more.
        self.doubtful = self.doubtful.max(now + self.tick);
    }

    /// How long after it was asked a server counts as one that has not answered: half of what may be left by then.
    pub(crate) fn doubts_after(&self) -> Duration {
        self.least().saturating_sub(self.margin(self.least())) / 2
    }

    /// It has been attached, by a request sent at `sent`, with this timeout.
    pub(crate) fn attached(&mut self, connection: u64, timeout: Duration, sent: Instant) {
        if timeout < self.timeout {
            self.timeout = timeout;
            self.end = self.end.min(self.lives_on_from(sent, timeout));
        }
        self.connection = connection;
        self.attached = sent;
        self.writes.clear();
    }

    /// A first write on this connection was acknowledged: it was no deposed leader that attached the session.
    pub(crate) fn confirmed(&mut self) {
        self.proves(self.attached);
    }

    /// The write that was sent on this connection at `sent` was acknowledged at `acknowledged`.
    pub(crate) fn acknowledged(&mut self, connection: u64, sent: Instant, acknowledged: Instant) {
        if connection != self.connection {
            return;
        }
        let apart = self.tick * 3 / 4;
        // The last one but this: everything that the leader was told before it is known to have been told.
        if let Some(&(between, _)) = self.writes.back() {
            let told = |write: &&(Instant, Instant)| write.1 + apart <= between;
            let many = self.writes.iter().take_while(told).count();
            if let Some(&(told, _)) = many.checked_sub(1).and_then(|last| self.writes.get(last)) {
                self.proves(told);
                self.writes.drain(..many);
            }
        }
        self.writes.push_back((sent, acknowledged));
    }

    /// The machine was suspended for so long, and the clock stood still: what was sent before was sent so much earlier.
    pub(crate) fn slept(&mut self, slept: Duration) {
        let sent = self.writes.iter_mut().map(|(sent, _)| sent);
        for at in sent.chain([&mut self.end, &mut self.attached]) {
            *at = at.checked_sub(slept).unwrap_or(*at);
        }
    }

    /// Until when the server cannot have ended the session by itself.
    pub(crate) fn end(&self) -> Instant {
        self.end
    }

    /// The session timeout that it counts with.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How far apart the writes are: closer while less is proven than the timeout, which is not to end before they prove more.
    pub(crate) fn beat(&self) -> Duration {
        let doubtful = self.end < self.lives_on_from(self.doubtful, self.least());
        let timeout = if doubtful { self.least() } else { self.timeout };
        (timeout / BEATS_PER_TIMEOUT).min(LONGEST_BEAT)
    }

    fn proves(&mut self, told: Instant) {
        let timeout = if told < self.doubtful {
            self.least()
        } else {
            self.timeout
        };
        self.end = self.end.max(self.lives_on_from(told, timeout));
    }

    fn lives_on_from(&self, told: Instant, timeout: Duration) -> Instant {
        told + timeout.saturating_sub(self.margin(timeout))
    }

    fn margin(&self, timeout: Duration) -> Duration {
        self.tick + timeout / 100
    }

    /// What a server grants at least.
    fn least(&self) -> Duration {
        self.timeout.min(self.tick * TICKS_PER_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// A session of a second on servers that tick every 100 ms.
    struct Clock(Instant, Proof);

    impl Clock {
        fn new() -> Self {
            let start = Instant::now();
            Self(start, Proof::opened(MS(1_000), MS(100), 1, start))
        }

        fn at(&self, ms: u64) -> Instant {
            self.0 + MS(ms)
        }

        fn write(&mut self, sent: u64, acknowledged: u64) {
            let (sent, acknowledged) = (self.at(sent), self.at(acknowledged));
            self.1.acknowledged(1, sent, acknowledged);
        }

        fn end(&self) -> u64 {
            u64::try_from((self.1.end() - self.0).as_millis()).unwrap()
        }
    }

    #[test]
    fn a_write_counts_after_two_more_the_first_of_them_later() {
        let mut clock = Clock::new();
        assert_eq!(clock.end(), 890);
        for sent in [100, 200] {
            clock.write(sent, sent + 1);
            assert_eq!(clock.end(), 890);
        }
        clock.write(300, 301);
        assert_eq!(clock.end(), 100 + 890);
        clock.write(400, 401);
        assert_eq!(clock.end(), 200 + 890);
    }

    #[test]
    fn writes_that_are_close_together_prove_no_more() {
        let mut clock = Clock::new();
        for sent in 100..170 {
            clock.write(sent, sent);
        }
        assert_eq!(clock.end(), 890);
        // 75 ms after the first; it takes one more.
        clock.write(175, 175);
        assert_eq!(clock.end(), 890);
        clock.write(176, 176);
        assert_eq!(clock.end(), 100 + 890);
    }

    #[test]
    fn a_write_acknowledged_late_counts_late() {
        let mut clock = Clock::new();
        clock.write(100, 200);
        clock.write(200, 210);
        clock.write(300, 310);
        // The leader may have been told of the first only after it had acknowledged the second.
        assert_eq!(clock.end(), 890);
        clock.write(400, 410);
        assert_eq!(clock.end(), 200 + 890);
    }

    #[test]
    fn what_was_sent_before_the_machine_slept_was_sent_earlier() {
        let mut clock = Clock::new();
        for sent in [100, 200, 300] {
            clock.write(sent, sent + 1);
        }
        assert_eq!(clock.end(), 100 + 890);
        clock.1.slept(MS(500));
        assert_eq!(clock.end(), 490);
        // Written before, acknowledged thereafter.
        clock.write(0, 401);
        assert_eq!(clock.end(), 490);
        for (sent, end) in [(500, 490), (600, 890), (700, 1_390)] {
            clock.write(sent, sent + 1);
            assert_eq!(clock.end(), end, "{sent}");
        }
    }

    #[test]
    fn another_connection_begins_anew() {
        let mut clock = Clock::new();
        clock.write(100, 101);
        clock.write(200, 201);
        let sent = clock.at(250);
        clock.1.attached(2, MS(1_000), sent);
        clock.write(300, 301);
        assert_eq!(clock.end(), 890);
        clock.1.confirmed();
        assert_eq!(clock.end(), 250 + 890);
    }

    #[test]
    fn the_smallest_timeout_counts_from_when_it_may_be_in_force() {
        let mut clock = Clock::new();
        let sent = clock.at(100);
        clock.1.attached(2, MS(600), sent);
        assert_eq!(clock.end(), 100 + 494);
        clock.1.confirmed();
        assert_eq!(clock.end(), 100 + 494);
        // It stays so: the next leader may count with it.
        let sent = clock.at(300);
        clock.1.attached(3, MS(1_000), sent);
        clock.1.confirmed();
        assert_eq!(clock.end(), 300 + 494);
    }

    #[test]
    fn a_timeout_that_was_not_told_is_the_smallest_for_a_while() {
        let mut clock = Clock::new();
        let (sent, given_up) = (clock.at(100), clock.at(200));
        clock.1.unanswered(sent, given_up);
        // Five ticks.
        assert_eq!(clock.end(), 100 + 395);
        let sent = clock.at(250);
        clock.1.attached(2, MS(1_000), sent);
        clock.1.confirmed();
        assert_eq!(clock.end(), 250 + 395);
        let sent = clock.at(300);
        clock.1.attached(3, MS(1_000), sent);
        clock.1.confirmed();
        assert_eq!(clock.end(), 300 + 890);
    }

    #[test]
    fn beats_are_a_tenth_apart_and_not_too_far() {
        let beat = |timeout, tick| Proof::opened(MS(timeout), MS(tick), 1, Instant::now()).beat();
        assert_eq!(beat(1_000, 100), MS(100));
        assert_eq!(beat(10_000, 2_000), MS(1_000));
        assert_eq!(beat(40_000, 2_000), MS(2_500));
    }

    #[test]
    fn beats_are_closer_while_a_timeout_is_not_known() {
        let mut clock = Clock::new();
        let (sent, given_up, again) = (clock.at(100), clock.at(200), clock.at(210));
        clock.1.unanswered(sent, given_up);
        assert_eq!(clock.1.beat(), MS(50));
        clock.1.attached(1, MS(1_000), again);
        clock.1.confirmed();
        assert_eq!((clock.end(), clock.1.beat()), (210 + 395, MS(50)));
        for sent in [260, 310, 360, 410] {
            clock.write(sent, sent + 1);
            assert_eq!(clock.1.beat(), MS(50));
        }
        // What was sent at 310 is past all doubt.
        clock.write(460, 461);
        assert_eq!((clock.end(), clock.1.beat()), (310 + 890, MS(100)));
    }

    /// A client, the follower that it is connected to, and their leader; the ways between them are slow now and then, in
    /// one direction or the other, and in order.
    struct Ensemble {
        random: fastrand::Rng,
        now: u64,
        events: BTreeMap<(u64, u64), Event>,
        /// When the last message arrives on each way.
        ways: [u64; 4],
        /// The follower has heard of the session since it last said so.
        heard: bool,
        /// When the leader was last told.
        told: u64,
    }

    #[derive(Clone, Copy)]
    enum Event {
        Ping,
        PingAtFollower,
        AnswerAtLeader { heard: bool },
        Write,
        WriteAtFollower { sent: u64 },
        WriteAtLeader { sent: u64 },
        AcknowledgedAtFollower { sent: u64, told: u64 },
        AcknowledgedAtClient { sent: u64, told: u64 },
    }

    const TICK: u64 = 100;
    const TO_FOLLOWER: usize = 0;
    const TO_LEADER: usize = 1;
    const FROM_LEADER: usize = 2;
    const FROM_FOLLOWER: usize = 3;

    impl Ensemble {
        fn later(&mut self, after: u64, event: Event) {
            let order = self.random.u64(..);
            self.events.insert((self.now + after, order), event);
        }

        fn message(&mut self, way: usize, event: Event) {
            let slow = if self.random.u8(..8) == 0 { 4 * TICK } else { 3 };
            let at = (self.now + self.random.u64(..=slow)).max(self.ways[way] + 1);
            self.ways[way] = at;
            self.later(at - self.now, event);
        }

        /// Whatever happens next; if it is the end of a write, when it was sent and what the leader knew when it processed it.
        fn step(&mut self, beat: u64) -> Option<(u64, u64)> {
            let ((now, _), event) = self.events.pop_first().unwrap();
            self.now = now;
            match event {
                Event::Ping => {
                    self.message(FROM_LEADER, Event::PingAtFollower);
                    let late = self.random.u64(..=TICK / 4);
                    self.later(TICK / 2 + late, Event::Ping);
                }
                Event::PingAtFollower => {
                    let heard = std::mem::take(&mut self.heard);
                    self.message(TO_LEADER, Event::AnswerAtLeader { heard });
                }
                Event::AnswerAtLeader { heard: true } => self.told = now,
                Event::AnswerAtLeader { heard: false } => {}
                Event::Write => self.message(TO_FOLLOWER, Event::WriteAtFollower { sent: now }),
                Event::WriteAtFollower { sent } => {
                    self.heard = true;
                    self.message(TO_LEADER, Event::WriteAtLeader { sent });
                }
                Event::WriteAtLeader { sent } => {
                    let told = self.told;
                    self.message(FROM_LEADER, Event::AcknowledgedAtFollower { sent, told });
                }
                Event::AcknowledgedAtFollower { sent, told } => {
                    self.message(FROM_FOLLOWER, Event::AcknowledgedAtClient { sent, told });
                }
                Event::AcknowledgedAtClient { sent, told } => {
                    self.later(beat, Event::Write);
                    return Some((sent, told));
                }
            }
            None
        }
    }

    #[test]
    fn no_lease_outlasts_what_the_leader_was_told() {
        let seeds = std::iter::repeat_with(|| fastrand::u64(..)).take(300);
        for seed in seeds {
            let mut random = fastrand::Rng::with_seed(seed);
            let timeout = random.u64(5 * TICK..15 * TICK);
            let start = Instant::now();
            let mut proof = Proof::opened(MS(timeout), MS(TICK), 1, start);
            let beat = u64::try_from(proof.beat().as_millis()).unwrap();
            let mut ensemble = Ensemble {
                random,
                now: 0,
                events: BTreeMap::new(),
                ways: [0; 4],
                heard: false,
                told: 0,
            };
            ensemble.later(7, Event::Ping);
            ensemble.later(beat, Event::Write);
            for _ in 0..1_000 {
                let Some((sent, told)) = ensemble.step(beat) else {
                    continue;
                };
                proof.acknowledged(1, start + MS(sent), start + MS(ensemble.now));
                // Were this the last that the leader hears of the session.
                let lives_until = proof.lives_on_from(start + MS(told), MS(timeout));
                assert!(
                    proof.end() <= lives_until,
                    "seed {seed}: at {} it counts {:?} too long",
                    ensemble.now,
                    proof.end() - lives_until
                );
            }
        }
    }
}
