//! The parts of a schedule that came to it later. They are drawn from a stream of their own, so that the rest of a seed stays what it
//! was.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::{Ask, End, HoldAs, Millis, Schedule, Shape, Step, TaskPlan, choice, log_uniform, shuffled};

mod passing;
mod sizes;
mod together;

/// The difference of that stream's seed from the schedule's.
const STREAM: u64 = 0x6164_6465_645f_6c61;
/// The longest ttl that somebody has to wait for whose holder keeps its guard.
const WAITED_FOR: Millis = 3_000;

impl Schedule {
    pub(super) fn add(&mut self, shape: &Shape) {
        let rng = &mut Rng::with_seed(self.seed ^ STREAM);
        self.add_lengths(rng, shape);
        self.add_asks(rng, shape);
        self.add_elections(rng);
        self.add_lists(rng);
        self.add_downgrades(rng, shape);
        self.add_adoptions(rng, shape);
        self.add_sets(rng);
        self.add_several(rng);
    }

    fn steps(&self) -> impl Iterator<Item = &Step> {
        self.tasks.iter().flat_map(|task| &task.steps)
    }

    fn add_task(&mut self, client: u32, steps: Vec<Step>) {
        let id = self
            .tasks
            .iter()
            .map(|task| task.id + 1)
            .max()
            .unwrap_or_default();
        self.tasks.push(TaskPlan { id, client, steps });
    }

    /// Has holds change their ttl, hang beyond a `max_hold`, and stay when they are lost.
    fn add_lengths(&mut self, rng: &mut Rng, shape: &Shape) {
        // No ttl is longer than those that there are, which is what an epoch has to wait for.
        let ttls: BTreeSet<_> = self.steps().map(|step| step.ttl).collect();
        let ttls: Vec<_> = ttls.into_iter().collect();
        let (hangs, stays) = (rng.u8(0..2) == 0, rng.bool());
        for step in self.tasks.iter_mut().flat_map(|task| &mut task.steps) {
            if !step.has_guard() {
                continue;
            }
            if hangs && step.hold >= 100 && step.ttl <= WAITED_FOR && rng.u8(0..10) == 0 {
                let max_hold = step.ttl + log_uniform(rng, 1, step.ttl);
                step.max_hold = Some(max_hold);
                step.hold = step.hold.max(max_hold + step.ttl * 3 / 2);
            }
            if step.hold >= 2 && rng.u8(0..6) == 0 {
                let most = step.max_hold.unwrap_or(Millis::MAX);
                let mut other = choice(rng, &ttls);
                if other == step.ttl {
                    other = (step.ttl / 2).max(shape.min_ttl);
                }
                step.retime = (other <= most).then(|| (log_uniform(rng, 1, step.hold), other));
            }
            if stays && step.end != End::Forget {
                step.stays = match rng.u8(0..12) {
                    0..4 => log_uniform(rng, 1, 400),
                    // For longer than its lease.
                    4 if step.ttl <= WAITED_FOR => step.ttl + rng.u64(500..1_500),
                    _ => 0,
                };
            }
        }
    }

    /// Adds operators who ask holders for what they hold. Where nobody can be asked, they are told so.
    fn add_asks(&mut self, rng: &mut Rng, shape: &Shape) {
        let often = if shape.capabilities.revoke { 2 } else { 6 };
        let targets: Vec<Step> = self.steps().filter(|step| step.times == 1).copied().collect();
        if rng.u8(0..often) > 0 || targets.is_empty() {
            return;
        }
        for _ in 0..rng.u32(1..=2) {
            let client = choice(rng, &self.clients).id;
            let mut steps = Vec::new();
            let mut at = rng.u64(0..self.span / 2);
            while at < self.span && steps.len() < 60 {
                let target = choice(rng, &targets);
                let within = if rng.u8(0..4) == 0 {
                    0
                } else {
                    log_uniform(rng, 1, 2_500)
                };
                let hold_as = match target.hold_as {
                    HoldAs::Permit => HoldAs::Permit,
                    _ => HoldAs::Exclusive,
                };
                steps.push(Step {
                    at,
                    hold_as,
                    ask: Ask::AskBack(within),
                    hold: 0,
                    end: End::Release,
                    max_hold: None,
                    retime: None,
                    stays: 0,
                    downgrade: None,
                    ..target
                });
                at += log_uniform(rng, 5, self.span / 4);
            }
            self.add_task(client, steps);
        }
    }

    /// Adds elections: candidates, each by one task, and observers.
    fn add_elections(&mut self, rng: &mut Rng) {
        let ttls = self.steps().map(|step| step.ttl).filter(|ttl| *ttl <= WAITED_FOR);
        let ttls: BTreeSet<_> = ttls.collect();
        let ttls: Vec<_> = ttls.into_iter().collect();
        if rng.u8(0..3) > 0 || ttls.is_empty() {
            return;
        }
        for number in 0..rng.u32(1..=2) {
            let mut candidates = shuffled(rng, self);
            candidates.truncate(rng.usize(2..=5));
            for client in candidates {
                let steps = self.candidate(rng, number, &ttls);
                self.add_task(client, steps);
            }
            for _ in 0..rng.u32(1..=3) {
                let client = choice(rng, &self.clients).id;
                let at = rng.u64(0..self.span / 3);
                let mut step = Self::of_election(at, number, choice(rng, &ttls), Ask::Observe);
                step.hold = rng.u64(self.span / 4..self.span);
                self.add_task(client, vec![step]);
            }
        }
    }

    fn candidate(&self, rng: &mut Rng, number: u32, ttls: &[Millis]) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..self.span / 4);
        while at < self.span && steps.len() < 100 {
            let ask = match rng.u8(0..20) {
                0..12 => Ask::Wait,
                12..16 => Ask::Try,
                16..18 => Ask::CancelAfter(log_uniform(rng, 1, 1_000)),
                _ => Ask::CancelPolls(rng.u32(1..8)),
            };
            let mut step = Self::of_election(at, number, choice(rng, ttls), ask);
            step.hold = log_uniform(rng, 5, self.span / 3);
            step.end = match rng.u8(0..10) {
                0..6 => End::Release,
                6..9 => End::Drop,
                _ => End::HalfRelease,
            };
            at += step.hold + rng.u64(0..300);
            steps.push(step);
        }
        steps
    }

    /// Adds those who list what is held.
    fn add_lists(&mut self, rng: &mut Rng) {
        if rng.u8(0..3) > 0 {
            return;
        }
        let leads = self.steps().any(|step| step.hold_as == HoldAs::Leader);
        let Some(ttl) = self.steps().map(|step| step.ttl).next() else {
            return;
        };
        for _ in 0..rng.u32(1..=2) {
            let client = choice(rng, &self.clients).id;
            let mut steps = Vec::new();
            let mut at = rng.u64(0..self.span / 4);
            while at < self.span && steps.len() < 60 {
                let mut step = Self::of_election(at, 0, ttl, Ask::List);
                if !leads || rng.u8(0..4) > 0 {
                    step.hold_as = HoldAs::Exclusive;
                }
                steps.push(step);
                at += log_uniform(rng, 2, self.span / 4);
            }
            self.add_task(client, steps);
        }
    }

    fn of_election(at: Millis, number: u32, ttl: Millis, ask: Ask) -> Step {
        Step {
            at,
            name: number,
            hold_as: HoldAs::Leader,
            ttl,
            handoffs: Some(0),
            renew: true,
            label: true,
            ask,
            hold: 0,
            end: End::Release,
            times: 1,
            max_hold: None,
            retime: None,
            stays: 0,
            downgrade: None,
            size: None,
        }
    }
}
