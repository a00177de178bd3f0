//! The lease of a session: until when it is proven to be alive. Pure: time comes in as an argument.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// The least number of ticks that a session lasts.
pub(crate) const TICKS_PER_TIMEOUT: u32 = 5;
/// The least number of heartbeats per session timeout.
const HEARTBEATS_PER_TIMEOUT: u32 = 10;
/// The longest interval of heartbeats, so that a renewal by hand need not wait for long.
const LONGEST_INTERVAL: Duration = Duration::from_millis(2_500);

/// The proof that a session is alive, by its acknowledged writes.
///
/// A write that the quorum has acknowledged proves that the session was alive when it was processed, and no more: the leader
/// counts a session's time from when it was last *told* of it. If the client's server is not the leader, it passes on whom it
/// has heard of with its reply to each of the leader's pings, which are half a tick apart. All messages between a server and
/// the leader are in order. Take three writes *a*, *b* and *c* on one connection, where *b* was sent three quarters of a tick
/// or more after *a* was acknowledged, and *c* after *b* was acknowledged:
///
/// - the leader sent a ping in the half tick before it acknowledged *b*, so after the server had heard *a*;
/// - the server replied to that ping before it passed on the acknowledgement of *b*, and so before it passed on *c*;
/// - and the leader had that reply, which tells of *a*, before it processed *c*.
///
/// Once *c* is acknowledged, the session lives for a timeout from when *a* was sent. That holds however late each of them is,
/// and if the way back to the leader is cut. A ping may be a quarter of a tick late. What delays the leader's own clock by more
/// delays also what the leader ends. A tick is taken off for the rest, and a hundredth for clocks that drift.
///
/// An attachment tells the leader itself, so that one write after it is enough. It also changes the timeout to what that server
/// grants. After a change of leaders the timeout is what was granted first. So the proof counts with the smallest timeout that
/// there was. While it is not known what a server has granted, that is the smallest that any server may grant.
#[derive(Clone, Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    tick: Duration,
    /// The connection that the writes were acknowledged on.
    connection_id: u64,
    /// The time of the request that attached the session by this connection.
    attached: Instant,
    /// The times at which each write was sent and acknowledged, the oldest first.
    writes: VecDeque<(Instant, Instant)>,
    end: Instant,
    /// The time at which the ensemble was last heard.
    heard: Instant,
    /// Before then, a timeout that is not known may have come into force after what the leader was told.
    doubtful: Instant,
}

impl Proof {
    /// The proof of a session that a request sent at `sent` has opened: the leader itself counts from then.
    pub(crate) fn opened(timeout: Duration, tick: Duration, connection_id: u64, sent: Instant) -> Self {
        let mut proof = Self {
            timeout,
            tick,
            connection_id,
            attached: sent,
            writes: VecDeque::new(),
            end: sent,
            heard: sent,
            doubtful: sent,
        };
        proof.end = proof.lives_on_from(sent, timeout);
        proof
    }

    /// Notes that a server that was asked at `sent` to attach the session is silent. It may have attached it.
    pub(crate) fn unanswered(&mut self, sent: Instant, now: Instant) {
        self.end = self.end.min(self.lives_on_from(sent, self.least()));
        // A server passes on what it was told with the next ping, and then no more.
        self.doubtful = self.doubtful.max(now + self.tick);
    }

    /// Returns after how long a server that was asked counts as silent: half of what may be left by then.
    pub(crate) fn doubts_after(&self) -> Duration {
        self.least().saturating_sub(self.margin(self.least())) / 2
    }

    /// Notes that the session was attached with this timeout, by a request sent at `sent`.
    pub(crate) fn attached(&mut self, connection_id: u64, timeout: Duration, sent: Instant) {
        if timeout < self.timeout {
            self.timeout = timeout;
            self.end = self.end.min(self.lives_on_from(sent, timeout));
        }
        self.connection_id = connection_id;
        self.attached = sent;
        self.writes.clear();
    }

    /// Notes that a first write on this connection was acknowledged: no deposed leader has attached the session.
    pub(crate) fn confirmed(&mut self) {
        self.heard = self.heard.max(self.attached);
        self.proves(self.attached);
    }

    /// Notes that a write on this connection, sent at `sent`, was acknowledged at `acknowledged`.
    pub(crate) fn acknowledged(&mut self, connection_id: u64, sent: Instant, acknowledged: Instant) {
        if connection_id != self.connection_id {
            return;
        }
        self.heard = self.heard.max(acknowledged);
        let apart = self.tick * 3 / 4;
        // This write is *c* and the one before it *b*: the leader is known to have been told of what is far enough before *b*.
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

    /// Notes that the machine was suspended for so long, while the clock stood still: what was sent before was sent so much
    /// earlier.
    pub(crate) fn slept(&mut self, slept: Duration) {
        let sent = self.writes.iter_mut().map(|(sent, _)| sent);
        for at in sent.chain([&mut self.end, &mut self.attached, &mut self.heard]) {
            *at = at.checked_sub(slept).unwrap_or(*at);
        }
    }

    /// Returns until when the server cannot have ended the session by itself.
    pub(crate) fn end(&self) -> Instant {
        self.end
    }

    /// Returns whether it is as new as proofs are: of the last two heartbeats, one was acknowledged.
    pub(crate) fn is_current(&self, now: Instant) -> bool {
        now <= self.heard + 2 * self.heartbeat_interval()
    }

    /// Returns the interval of the writes. It is shorter while a shorter timeout counts, so that they prove more before that is
    /// over.
    pub(crate) fn heartbeat_interval(&self) -> Duration {
        let doubtful = self.end < self.lives_on_from(self.doubtful, self.least());
        let timeout = if doubtful { self.least() } else { self.timeout };
        (timeout / HEARTBEATS_PER_TIMEOUT).min(LONGEST_INTERVAL)
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

    /// Returns the least that a server grants.
    fn least(&self) -> Duration {
        self.timeout.min(self.tick * TICKS_PER_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// A session with a timeout of a second on servers that tick every 100 ms.
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
        // That is 75 ms after the first. It takes one more.
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
        // This was sent before the sleep and acknowledged after it.
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
        // The smaller one stays in force: the next leader may count with it.
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
    fn heartbeats_are_a_tenth_apart_and_not_too_far() {
        let interval =
            |timeout, tick| Proof::opened(MS(timeout), MS(tick), 1, Instant::now()).heartbeat_interval();
        assert_eq!(interval(1_000, 100), MS(100));
        assert_eq!(interval(10_000, 2_000), MS(1_000));
        assert_eq!(interval(40_000, 2_000), MS(2_500));
    }

    #[test]
    fn heartbeats_are_closer_while_a_timeout_is_not_known() {
        let mut clock = Clock::new();
        let (sent, given_up, again) = (clock.at(100), clock.at(200), clock.at(210));
        clock.1.unanswered(sent, given_up);
        assert_eq!(clock.1.heartbeat_interval(), MS(50));
        clock.1.attached(1, MS(1_000), again);
        clock.1.confirmed();
        assert_eq!((clock.end(), clock.1.heartbeat_interval()), (210 + 395, MS(50)));
        for sent in [260, 310, 360, 410] {
            clock.write(sent, sent + 1);
            assert_eq!(clock.1.heartbeat_interval(), MS(50));
        }
        // What was sent at 310 is past all doubt.
        clock.write(460, 461);
        assert_eq!((clock.end(), clock.1.heartbeat_interval()), (310 + 890, MS(100)));
    }

    /// A client, the follower that it is connected to, and their leader. The ways between them keep the order, and are slow
    /// now and then, in one direction or the other.
    struct Ensemble {
        random: fastrand::Rng,
        now: u64,
        events: BTreeMap<(u64, u64), Event>,
        /// The arrival of the last message on each way.
        ways: [u64; 4],
        /// The follower has heard of the session since it last said so.
        heard: bool,
        /// The time at which the leader was last told.
        told: u64,
    }

    #[derive(Clone, Copy)]
    enum Event {
        Ping,
        PingAtFollower,
        ReplyAtLeader { heard: bool },
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

        /// Handles the next event. At the end of a write, returns when it was sent and when the leader had last been told by the
        /// time it processed the write.
        fn step(&mut self, interval: u64) -> Option<(u64, u64)> {
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
                    self.message(TO_LEADER, Event::ReplyAtLeader { heard });
                }
                Event::ReplyAtLeader { heard: true } => self.told = now,
                Event::ReplyAtLeader { heard: false } => {}
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
                    self.later(interval, Event::Write);
                    return Some((sent, told));
                }
            }
            None
        }
    }

    #[test]
    fn no_lease_outlasts_what_the_leader_was_told() {
        let first =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        for seed in (0..300).map(|n| first.wrapping_add(n)) {
            let mut random = fastrand::Rng::with_seed(seed);
            let timeout = random.u64(5 * TICK..15 * TICK);
            let start = Instant::now();
            let mut proof = Proof::opened(MS(timeout), MS(TICK), 1, start);
            let interval = u64::try_from(proof.heartbeat_interval().as_millis()).unwrap();
            let mut ensemble = Ensemble {
                random,
                now: 0,
                events: BTreeMap::new(),
                ways: [0; 4],
                heard: false,
                told: 0,
            };
            ensemble.later(7, Event::Ping);
            ensemble.later(interval, Event::Write);
            for _ in 0..1_000 {
                let Some((sent, told)) = ensemble.step(interval) else {
                    continue;
                };
                proof.acknowledged(1, start + MS(sent), start + MS(ensemble.now));
                // This might be the last that the leader hears of the session.
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
