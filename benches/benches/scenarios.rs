//! The scenarios of the matrix by criterion: a group for each, and in it a function for each backend and whatever it is
//! measured beside.
//!
//! `cargo bench -p lockkit-benches --bench scenarios [-- TEXT]` starts private servers of whatever is installed. A TEXT, a
//! regular expression, picks by names such as `clients-16/redis lockkit`; if it has a backend's name in it, no servers of
//! others are started. `--save-baseline`, `--baseline` and the report in `target/criterion` are criterion's own. One is
//! measured after the other: what the matrix tells in turns is not to be told from here. What takes seconds for one figure
//! (`held-*`, `waiters-*`, `recovery`, `silence`) is the matrix's alone.

use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use lockkit_benches::{
    peers::Peer,
    servers::{BACKENDS, Comparison},
};
use lockkit_conformance::{
    helper::{self, Launch},
    measure::{Contestant, Effort, Figure, Scenario, Trial},
};
use tokio::runtime::Runtime;

const EFFORT: Effort = Effort {
    hand_offs: 1,
    ..Effort::QUICK
};
const SAMPLES: usize = 10;

fn main() {
    if let Ok(told) = helper::url() {
        Peer::serve(&told).expect("served");
        return;
    }
    let mut criterion = Criterion::default()
        .sample_size(SAMPLES)
        .nresamples(10_000)
        // Each sample takes as long as a round, however many locks it is asked for.
        .warm_up_time(Duration::from_millis(1))
        .measurement_time(Duration::from_secs(10))
        .configure_from_args();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let launch = Launch::this_program([""; 0]).expect("this program");
    let texts = filters(std::env::args().skip(1));
    let named: Vec<_> = texts
        .iter()
        .flat_map(|text| text.split(|it: char| !it.is_alphanumeric()))
        .filter(|word| BACKENDS.contains(word))
        .collect();
    let wanted = |backend: &str| named.is_empty() || named.contains(&backend);
    let mut comparison = runtime.block_on(Comparison::start(launch, wanted));
    for skipped in &comparison.skipped {
        println!("skipped: {}: {}", skipped.backend, skipped.why);
    }
    let scenarios = Scenario::ALL.into_iter().filter(|scenario| {
        !matches!(
            scenario,
            Scenario::Held(_) | Scenario::Waiters(_) | Scenario::Recovery | Scenario::Silence
        )
    });
    for scenario in scenarios {
        measure(&mut criterion, &runtime, scenario, &mut comparison.contestants);
    }
    criterion.final_summary();
}

/// The texts that pick, without options and what belongs to them.
fn filters(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut texts = Vec::new();
    let mut value_follows = false;
    for argument in arguments {
        let is_value = std::mem::take(&mut value_follows);
        match argument.strip_prefix("--") {
            // Those of criterion's that have no value.
            Some(
                "bench" | "test" | "list" | "discard-baseline" | "noplot" | "exact" | "verbose" | "quiet"
                | "quick",
            ) => {}
            Some(option) => value_follows = !option.contains('='),
            None if is_value || argument.starts_with('-') => {}
            None => texts.push(argument),
        }
    }
    texts
}

fn measure(criterion: &mut Criterion, runtime: &Runtime, scenario: Scenario, contestants: &mut [Contestant]) {
    let mut group = criterion.benchmark_group(scenario.to_string());
    group
        .sampling_mode(SamplingMode::Flat)
        .throughput(Throughput::Elements(1));
    for (index, contestant) in contestants.iter_mut().enumerate() {
        if runtime
            .block_on(contestant.declines(scenario))
            .expect("an answer")
            .is_some()
        {
            continue;
        }
        let name = format!("{} {}", contestant.backend(), contestant.name());
        // Not before it is known to be picked.
        let mut contestant = Some(contestant);
        let mut trial: Option<Trial<'_>> = None;
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|locks| {
                runtime.block_on(async {
                    if let Some(contestant) = contestant.take() {
                        let begun = contestant.trial(scenario, index, &EFFORT).await;
                        trial = Some(begun.expect("prepared"));
                    }
                    let trial = trial.as_mut().expect("begun");
                    per_lock(trial).await.mul_f64(lossy(locks))
                })
            });
        });
        if let Some(trial) = trial {
            runtime.block_on(trial.end()).expect("nothing is left");
        }
    }
    group.finish();
}

/// The time of one lock: where many are at it, of all the time; else as long as one waits.
async fn per_lock(trial: &mut Trial<'_>) -> Duration {
    // A stretch may end before the first of many is through.
    for _ in 0..20 {
        let sample = trial.round().await.expect("measured");
        let seconds = match (sample.get(&Figure::Rate), sample.get(&Figure::P50)) {
            (Some(rate), _) => 1.0 / rate,
            (None, Some(micros)) => micros / 1e6,
            (None, None) => continue,
        };
        if seconds.is_finite() && seconds > 0.0 {
            return Duration::from_secs_f64(seconds);
        }
    }
    panic!("there were no locks in 20 rounds");
}

#[expect(clippy::cast_precision_loss, reason = "counts of iterations far below 2^52")]
fn lossy(count: u64) -> f64 {
    count as f64
}
