//! Clients that disagree about the size of a semaphore. They came when seeds had been recorded, and have a stream of their own.

use fastrand::Rng;

use crate::torture::{
    Ask, HoldAs, Schedule,
    schedule::{choice, log_uniform, shuffled},
};

/// The difference of that stream's seed from the schedule's.
const STREAM: u64 = 0x7369_7a65_735f_3f21;

impl Schedule {
    /// Adds clients that give another size of a semaphore than the others do, each the same one throughout.
    pub(in crate::torture::schedule) fn add_sizes(&mut self) {
        let rng = &mut Rng::with_seed(self.seed ^ STREAM);
        let takes = self
            .steps()
            .filter(|step| step.hold_as == HoldAs::Permit && step.has_guard());
        let targets: Vec<_> = takes.copied().collect();
        if rng.bool() || targets.is_empty() {
            return;
        }
        let target = choice(rng, &targets);
        let known = self.sizes[target.name as usize];
        let others: Vec<u32> = [1, 2, 3, 5].into_iter().filter(|size| *size != known).collect();
        let mut clients = shuffled(rng, self);
        clients.truncate(rng.usize(1..=3));
        for client in clients {
            let size = choice(rng, &others);
            let mut steps = self.set(rng, &target, |rng| match rng.u8(0..8) {
                0..2 => Ask::Wait,
                2 => Ask::Within(log_uniform(rng, 10, 2_000)),
                3 => Ask::CancelPolls(rng.u32(1..8)),
                4 if size > 1 => Ask::Many(rng.u32(2..=size), None),
                _ => Ask::Try,
            });
            for step in &mut steps {
                step.size = Some(size);
            }
            self.add_task(client, steps);
        }
    }
}
