//! The algorithm as it is.

use lockkit_redlock_simulator::{Config, Crash, Summary, campaign, run, trace};

/// Schedules per configuration, or `LOCKKIT_SCHEDULES`.
fn schedules() -> u64 {
    std::env::var("LOCKKIT_SCHEDULES").map_or(2_000, |schedules| schedules.parse().unwrap())
}

#[test]
fn every_configuration_keeps_its_promises() {
    for config in Config::ALL {
        let summary = campaign(config, None, 0..schedules());
        for finding in &summary.findings {
            assert!(
                finding.is_as_promised(),
                "{}, promised {:?}: {finding}; replay it with `redlock-sim replay --config {} --seed …`",
                config.name,
                finding.promise,
                config.name,
            );
        }
        assert_not_vacuous(config, &summary);
    }
}

/// Asserts that clients acquire and that faults hit: otherwise promises are kept for nothing.
fn assert_not_vacuous(config: &Config, summary: &Summary) {
    let (name, tally) = (config.name, &summary.tally);
    let enough = |what, number: u64, per_hundred: u64| {
        assert!(
            number * 100 >= summary.schedules * per_hundred,
            "{name}: only {number} {what} in {} schedules",
            summary.schedules
        );
    };
    enough("acquisitions", tally.acquired, 800);
    enough("votes for somebody else", tally.taken, 300);
    enough("writes of those who had lost it", tally.refused, 2);
    enough("holds that outlasted their lease", tally.cut_short, 2);
    let features = &config.features;
    if features.renewal && !config.swarm {
        enough("renewals", tally.renewed, 150);
    }
    if features.stops {
        enough("faults", tally.strikes, 900);
        enough("faults while somebody held", tally.hits, 300);
    }
    if features.stops && features.crash != Some(Crash::Lost) {
        enough("rounds without enough answers", tally.undecided, 200);
    }
}

#[test]
fn a_seed_says_it_all() {
    for config in Config::ALL {
        for seed in 0..50 {
            let (again, story) = trace(config, None, seed);
            let report = run(config, None, seed);
            assert_eq!(
                (report.faults, report.tally),
                (again.faults, again.tally),
                "{} {seed}",
                config.name
            );
            assert!(story.contains("HOLDS"), "{} {seed}", config.name);
        }
    }
}
