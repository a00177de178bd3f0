//! A schedule that fails, made shorter.

use std::time::{Duration, Instant};

use super::Schedule;

/// Leaves out faults, clients, tasks and steps for as long as `fails` says that what is left still does, and there is time.
pub(super) fn shorten(
    schedule: &Schedule,
    limit: Duration,
    mut fails: impl FnMut(&Schedule) -> bool,
) -> Schedule {
    let deadline = Instant::now() + limit;
    let mut best = schedule.clone();
    loop {
        let before = best.clone();
        for part in [
            Piece::Strike,
            Piece::Client,
            Piece::Task,
            Piece::Fate,
            Piece::Step,
            Piece::Times,
            Piece::Extras,
        ] {
            let mut size = part.count(&best).div_ceil(2);
            while size > 0 {
                let mut from = 0;
                while from < part.count(&best) {
                    if Instant::now() >= deadline {
                        return best;
                    }
                    let candidate = part.without(&best, from, from + size);
                    if candidate != best && fails(&candidate) {
                        best = candidate;
                    } else {
                        from += size;
                    }
                }
                size /= 2;
            }
        }
        if best == before {
            return best;
        }
    }
}

#[derive(Clone, Copy)]
enum Piece {
    Strike,
    Client,
    Task,
    Fate,
    Step,
    /// A step that is done more than once.
    Times,
    /// A hold that has another length than its ttl and its plan say, or becomes another.
    Extras,
}

impl Piece {
    fn count(self, schedule: &Schedule) -> usize {
        match self {
            Self::Strike => schedule.strikes.len(),
            Self::Client | Self::Fate => schedule.clients.len(),
            Self::Task => schedule.tasks.len(),
            Self::Step | Self::Times | Self::Extras => {
                schedule.tasks.iter().map(|task| task.steps.len()).sum()
            }
        }
    }

    /// The schedule without those from `from` up to `to`.
    fn without(self, schedule: &Schedule, from: usize, to: usize) -> Schedule {
        let mut less = schedule.clone();
        let to = to.min(self.count(schedule));
        match self {
            Self::Strike => drop(less.strikes.drain(from..to)),
            Self::Client => {
                let gone: Vec<_> = less.clients.drain(from..to).map(|client| client.id).collect();
                less.tasks.retain(|task| !gone.contains(&task.client));
            }
            Self::Task => drop(less.tasks.drain(from..to)),
            Self::Fate => less.clients[from..to]
                .iter_mut()
                .for_each(|client| client.fate = None),
            Self::Step => {
                let mut index = 0;
                for task in &mut less.tasks {
                    task.steps.retain(|_| {
                        index += 1;
                        !(from..to).contains(&(index - 1))
                    });
                }
            }
            Self::Times => {
                let steps = less.tasks.iter_mut().flat_map(|task| &mut task.steps);
                steps.skip(from).take(to - from).for_each(|step| step.times = 1);
            }
            Self::Extras => {
                let steps = less.tasks.iter_mut().flat_map(|task| &mut task.steps);
                steps.skip(from).take(to - from).for_each(|step| {
                    (step.max_hold, step.retime, step.stays) = (None, None, 0);
                    step.downgrade = None;
                });
            }
        }
        less
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torture::{Ask, Shape};

    #[test]
    fn a_planted_failure_is_all_that_is_left() {
        let mut has = lockkit_core::Capabilities::default();
        has.shared = true;
        let planted = |schedule: &Schedule| {
            let steps = || schedule.tasks.iter().flat_map(|task| &task.steps);
            steps().any(|step| step.ask == Ask::Twice) && steps().any(|step| step.ask == Ask::Inspect)
        };
        let mut schedules = (0..).map(|seed| Schedule::generate(seed, &Shape::new(has)));
        let schedule = schedules
            .find(|schedule| schedule.tasks.len() > 5 && planted(schedule))
            .expect("one");
        let mut runs = 0;
        let short = shorten(&schedule, Duration::from_secs(60), |candidate| {
            runs += 1;
            planted(candidate)
        });
        let steps: usize = short.tasks.iter().map(|task| task.steps.len()).sum();
        assert!(
            planted(&short) && steps == 2 && runs < 2_000,
            "{steps} steps after {runs} runs:\n{short}"
        );
        let again: Schedule = short.to_string().parse().expect("a schedule");
        assert_eq!(again, short);
    }

    #[test]
    fn no_time_leaves_it_as_it_is() {
        let schedule = Schedule::generate(1, &Shape::new(lockkit_core::Capabilities::default()));
        assert_eq!(shorten(&schedule, Duration::ZERO, |_| true), schedule);
    }
}
