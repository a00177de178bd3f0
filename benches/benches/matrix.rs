//! Every scenario on every backend, beside the least that can be done on the same server and beside other libraries.
//!
//! `cargo bench -p lockkit-benches --bench matrix [-- --quick] [TEXT…]` starts private servers of whatever is installed
//! and says what it goes without. A TEXT picks the backends or the scenarios with it in their names; `network` picks what
//! is measured over a network with a round trip of 1 ms, which a run without a TEXT does at its end. The contestants take
//! turns in short rounds, all of them in each, which a harness that measures one after the other could not do.
//! A run of everything is kept for the report: `cargo run -p lockkit-benches --bin report`.

use std::time::Instant;

use lockkit_benches::{
    peers::Peer,
    results::{self, Machine, Results, table},
    servers::{BACKENDS, Comparison, FAR},
};
use lockkit_conformance::{
    helper::{self, Launch},
    measure::{Contestant, Effort, Outcome, Row, Scenario, contest},
};

/// The text that picks the network.
const NETWORK: &str = "network";

/// The rows of these scenarios, which are also printed.
async fn play(
    contestants: &mut [Contestant],
    scenarios: &[Scenario],
    effort: &Effort,
    began: Instant,
) -> Vec<Row> {
    let mut current = None;
    let rows = contest(contestants, scenarios, effort, |progress| {
        if current.replace(progress.scenario) != Some(progress.scenario) {
            let percent = progress.done * 100 / progress.total;
            println!(
                "{:>4} s  {percent:>2} %  {}",
                began.elapsed().as_secs(),
                progress.scenario.title()
            );
        }
    })
    .await;
    for scenario in scenarios {
        let of_it = rows.iter().filter(|row| row.scenario == *scenario);
        println!("\n{}", table(*scenario, of_it));
    }
    rows
}

fn main() {
    if let Ok(told) = helper::url() {
        Peer::serve(&told).expect("served");
        return;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let texts: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let over_the_network = texts.contains(&NETWORK);
    let (backends, names): (Vec<&str>, Vec<&str>) = texts
        .iter()
        .copied()
        .filter(|text| *text != NETWORK)
        .partition(|text| BACKENDS.iter().any(|backend| backend.contains(text)));
    let picked =
        |texts: &[&str], name: &str| texts.is_empty() || texts.iter().any(|text| name.contains(text));
    let chosen = |all: &[Scenario]| -> Vec<_> {
        let all = all.iter().copied();
        all.filter(|scenario| picked(&names, &scenario.to_string()))
            .collect()
    };
    let near = if over_the_network {
        Vec::new()
    } else {
        chosen(&Scenario::ALL)
    };
    let far = if over_the_network || texts.is_empty() {
        chosen(&FAR)
    } else {
        Vec::new()
    };

    let began = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let results = runtime.block_on(async {
        let launch = Launch::this_program([""; 0]).expect("this program");
        let mut comparison = Comparison::start(launch, |backend| picked(&backends, backend)).await;
        for skipped in &comparison.skipped {
            println!("skipped: {}: {}", skipped.backend, skipped.why);
        }
        let effort = if quick { Effort::QUICK } else { Effort::FULL };
        let rows = play(&mut comparison.contestants, &near, &effort, began).await;
        let there = Effort {
            passes: effort.passes.min(2),
            ..effort
        };
        if !far.is_empty() {
            println!("\nover a network with a round trip of 1 ms");
        }
        let far = play(&mut comparison.far, &far, &there, began).await;
        let mut versions = results::versions();
        versions.append(&mut comparison.versions);
        Results {
            date: results::now(),
            quick,
            seconds: began.elapsed().as_secs(),
            machine: Machine::here(),
            versions,
            skipped: std::mem::take(&mut comparison.skipped),
            rows,
            far,
        }
    });
    println!("{} s in all", results.seconds);
    if texts.is_empty() {
        let path = Results::default_path();
        results.write(&path).expect("written");
        println!("kept in {}", path.display());
    }
    let failed = results
        .rows
        .iter()
        .chain(&results.far)
        .filter(|row| matches!(row.outcome, Outcome::Failed(_)));
    let failed = failed.count();
    assert!(failed == 0, "{failed} of the measurements above have failed");
}
