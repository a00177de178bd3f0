//! Several holds at once, all or none.

use fastrand::Rng;

use crate::torture::{
    Ask, End, HoldAs, Schedule, Step,
    schedule::{choice, log_uniform},
};

impl Schedule {
    /// Adds those who take a lock and the next ones if all of them are free.
    pub(super) fn add_sets(&mut self, rng: &mut Rng) {
        let is_lock = |step: &&Step| matches!(step.hold_as, HoldAs::Exclusive | HoldAs::Shared);
        let targets: Vec<_> = self.steps().filter(is_lock).copied().collect();
        if rng.u8(0..3) > 0 || targets.is_empty() {
            return;
        }
        for _ in 0..rng.u32(1..=2) {
            let (client, target) = (choice(rng, &self.clients).id, choice(rng, &targets));
            let steps = self.set(rng, &target, |_| Ask::AllNow);
            self.add_task(client, steps);
        }
    }

    /// Adds those who want several permits at once.
    pub(super) fn add_several(&mut self, rng: &mut Rng) {
        let several = |step: &&Step| {
            step.hold_as == HoldAs::Permit && self.sizes.get(step.name as usize).is_some_and(|size| *size > 1)
        };
        let targets: Vec<_> = self.steps().filter(several).copied().collect();
        if rng.u8(0..4) == 0 || targets.is_empty() {
            return;
        }
        let target = choice(rng, &targets);
        let size = self.sizes[target.name as usize];
        for _ in 0..rng.u32(1..=4) {
            let client = choice(rng, &self.clients).id;
            let steps = self.set(rng, &target, |rng| {
                let permits = rng.u32(2..=size);
                match rng.u8(0..6) {
                    0..3 => Ask::Many(permits, None),
                    3 => Ask::Many(permits, Some(log_uniform(rng, 10, 4_000))),
                    _ => Ask::ManyNow(permits),
                }
            });
            self.add_task(client, steps);
        }
    }

    pub(super) fn set(&self, rng: &mut Rng, target: &Step, ask: impl Fn(&mut Rng) -> Ask) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..self.span / 4);
        while at < self.span && steps.len() < 60 {
            let ask = ask(rng);
            let mut step = target.plainly(at, ask, log_uniform(rng, 1, 300));
            step.end = match rng.u8(0..10) {
                0..7 => End::Release,
                7..9 => End::Drop,
                _ => End::HalfRelease,
            };
            at += step.hold + log_uniform(rng, 5, self.span / 6);
            steps.push(step);
        }
        steps
    }
}
