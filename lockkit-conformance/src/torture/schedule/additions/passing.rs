//! Holds that become others: exclusive ones that are made shared, and those that are detached and adopted.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::WAITED_FOR;
use crate::torture::{
    Ask, End, HoldAs, Schedule, Shape, Step,
    schedule::{choice, log_uniform},
};

/// The most holds of an epoch that are detached: each that nobody adopts keeps its name for a ttl.
const DETACHED: usize = 16;

impl Schedule {
    /// Has exclusive holds made shared ones, with readers who want to be let in. Where that is not possible, they are told so.
    pub(super) fn add_downgrades(&mut self, rng: &mut Rng, shape: &Shape) {
        let can = shape.capabilities.shared && shape.capabilities.downgrade;
        if rng.u8(0..if can { 2 } else { 8 }) > 0 {
            return;
        }
        let mut targets = Vec::new();
        for step in self.tasks.iter_mut().flat_map(|task| &mut task.steps) {
            let is_one = step.hold_as == HoldAs::Exclusive && step.has_guard();
            if is_one && rng.u8(0..5) == 0 {
                let polls = (rng.u8(0..8) == 0).then(|| rng.u32(1..4));
                step.downgrade = Some((rng.u64(0..=step.hold / 2), polls));
                if step.hold >= 20 {
                    targets.push(*step);
                }
            }
        }
        if !can || targets.is_empty() {
            return;
        }
        for _ in 0..rng.u32(1..=3) {
            let (client, target) = (choice(rng, &self.clients).id, choice(rng, &targets));
            let mut steps = Vec::new();
            let mut at = rng.u64(0..self.span / 4);
            while at < self.span && steps.len() < 60 {
                let ask = match rng.u8(0..4) {
                    0 => Ask::Within(log_uniform(rng, 10, 2_000)),
                    1 => Ask::Try,
                    _ => Ask::Wait,
                };
                let hold_as = HoldAs::Shared;
                let hold = log_uniform(rng, 1, 200);
                let step = target.plainly(at, ask, hold);
                steps.push(Step { hold_as, ..step });
                at += hold + log_uniform(rng, 5, self.span / 6);
            }
            self.add_task(client, steps);
        }
    }

    /// Has holds detached, and others adopt them, more than one at a time now and then. Where that is not possible, they are told so.
    pub(super) fn add_adoptions(&mut self, rng: &mut Rng, shape: &Shape) {
        let can = shape.capabilities.detach;
        if rng.u8(0..if can { 2 } else { 8 }) > 0 {
            return;
        }
        let may = |step: &Step| {
            let has_lock = step.hold_as != HoldAs::Leader && step.has_guard();
            has_lock && step.max_hold.is_none() && step.ttl <= WAITED_FOR && step.end != End::Forget
        };
        let thing = |step: &Step| (step.hold_as == HoldAs::Permit, step.name);
        let things: BTreeSet<_> = self.steps().filter(|step| may(step)).map(thing).collect();
        let things: Vec<_> = things.into_iter().collect();
        if things.is_empty() {
            return;
        }
        for _ in 0..rng.u32(1..=2) {
            let one = choice(rng, &things);
            let mut steps: Vec<_> = self.tasks.iter_mut().flat_map(|task| &mut task.steps).collect();
            steps.retain(|step| may(step) && step.times == 1 && thing(step) == one);
            rng.shuffle(&mut steps);
            let Some(target) = steps.first().map(|step| **step) else {
                continue;
            };
            for step in steps.into_iter().take(rng.usize(1..=DETACHED / 2)) {
                step.end = if rng.u8(0..10) == 0 {
                    End::HalfDetach
                } else {
                    End::Detach
                };
            }
            for _ in 0..choice(rng, &[1, 1, 2, 3]) {
                let client = choice(rng, &self.clients).id;
                let steps = self.adopter(rng, &target);
                self.add_task(client, steps);
            }
        }
    }

    fn adopter(&self, rng: &mut Rng, target: &Step) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..self.span / 4);
        while at < self.span && steps.len() < 40 {
            let polls = (rng.u8(0..6) == 0).then(|| rng.u32(1..5));
            let within = log_uniform(rng, 100, self.span / 2);
            let mut step = target.plainly(at, Ask::Adopt(within, polls), log_uniform(rng, 1, 600));
            step.end = match rng.u8(0..10) {
                0..6 => End::Release,
                6..8 => End::Drop,
                8 => End::HalfRelease,
                _ => End::Detach,
            };
            at += step.hold + rng.u64(0..300);
            steps.push(step);
        }
        steps
    }
}

impl Step {
    /// Another step about what this one is about, that releases what it holds.
    pub(super) fn plainly(self, at: u64, ask: Ask, hold: u64) -> Self {
        Self {
            at,
            ask,
            hold,
            renew: true,
            end: End::Release,
            times: 1,
            max_hold: None,
            retime: None,
            stays: 0,
            downgrade: None,
            ..self
        }
    }
}
