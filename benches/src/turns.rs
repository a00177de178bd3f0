//! Whole cycles, timed one by one, of contestants that take turns: medians, where a mean would not tell.

use std::time::{Duration, Instant};

use lockkit_conformance::measure::Contender;
use tokio::runtime::Runtime;

/// Whoever takes a lock and gives it back. Clones want the same lock.
pub trait Cycle: Clone + Send + 'static {
    /// Does so once.
    fn cycle(&mut self) -> impl Future<Output = ()> + Send;
}

/// Takes the lock and gives it back.
///
/// # Panics
/// If either fails, which ends the benchmark.
pub async fn take<C: Contender>(contender: &mut C) {
    let held = contender.acquire().await.expect("granted");
    contender.release(held).await.expect("released");
}

/// Prints the median of each of several rounds of so many cycles, in which the contestants took turns, and of the ratios
/// to the first of them.
///
/// # Panics
/// If a cycle does.
pub fn medians<C: Cycle>(
    runtime: &Runtime,
    title: &str,
    rounds: usize,
    cycles: usize,
    contestants: &[(&str, C)],
) {
    let mut medians = vec![Vec::new(); contestants.len()];
    for _ in 0..rounds {
        for ((_, contestant), medians) in contestants.iter().zip(&mut medians) {
            let mut contestant = contestant.clone();
            let task = runtime.spawn(async move {
                let mut times = Vec::new();
                for _ in 0..cycles {
                    let started = Instant::now();
                    contestant.cycle().await;
                    times.push(started.elapsed());
                }
                median(times)
            });
            medians.push(runtime.block_on(task).expect("no panic"));
        }
    }
    println!("\n{title}: medians of {rounds} rounds in turns");
    let first = medians[0].clone();
    for ((name, _), medians) in contestants.iter().zip(medians) {
        let mut ratios: Vec<f64> = medians
            .iter()
            .zip(&first)
            .map(|(own, first)| own.as_secs_f64() / first.as_secs_f64())
            .collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "  {name:22} p50 {:>9.1?}   {:.2} × {}",
            median(medians),
            ratios[ratios.len() / 2],
            contestants[0].0
        );
    }
}

/// The one in the middle.
///
/// # Panics
/// If there is none.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
