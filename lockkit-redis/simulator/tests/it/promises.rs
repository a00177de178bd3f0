use lockkit_redlock_simulator::{Config, campaign};

/// Per configuration.
const SCHEDULES: u64 = 20_000;

#[test]
fn every_configuration_keeps_its_promises() {
    for config in Config::ALL {
        let summary = campaign(config, None, 0..SCHEDULES);
        for finding in &summary.findings {
            assert!(
                finding.is_as_promised(),
                "{}, promised {:?}: {finding}; replay it with `redlock-sim replay --config {} --seed …`",
                config.name,
                finding.promise,
                config.name,
            );
        }
    }
}
