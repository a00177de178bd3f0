//! Every target under random schedules for the time in the environment variable `LOCKKIT_TORTURE`; without it, some under one
//! that is always the same. And the tools of torture, each shown to break what is not protected.

mod arguments;
mod tools;

use std::{sync::Arc, time::Duration};

use lockkit_conformance::{
    helper::{self, Launch},
    torture::{Effort, Target, Torture},
};
use lockkit_testbed::skipped;

/// The first seed and for how long to go on: one epoch, if it is that of a schedule that is always the same. `None` if there
/// is none of that target.
fn effort(fixed: Option<u64>) -> Option<(u64, Duration)> {
    let time = std::env::var("LOCKKIT_TORTURE").unwrap_or_default();
    if time.is_empty() {
        return fixed.map(|seed| (seed, Duration::from_millis(1)));
    }
    let time = humantime::parse_duration(&time).expect("LOCKKIT_TORTURE is a time, such as 30s");
    Some((fastrand::u64(..1_000_000_000), time))
}

/// The target, unless it is to be skipped for want of its servers.
fn target(name: &str) -> Option<Arc<dyn Target>> {
    let (needs, missing) = lockkit_torture::missing(name);
    if skipped(needs, missing) {
        return None;
    }
    Some(lockkit_torture::start(name).expect("the servers start"))
}

/// Other processes are this test program once more.
#[test]
fn helper_process() {
    if helper::is_helper() {
        helper::main(|route| async move { lockkit::connect(&route).await }).expect("a helper");
    }
}

fn launch() -> Launch {
    let arguments = ["--exact", "helper_process", "--nocapture", "--test-threads=1"];
    Launch::this_program(arguments).expect("this program")
}

fn torture(name: &str, fixed: Option<u64>) {
    let Some((seed, time)) = effort(fixed) else {
        eprintln!("skipped: {name}: say in LOCKKIT_TORTURE for how long, such as 30s");
        return;
    };
    let Some(target) = target(name) else {
        return;
    };
    println!("{name}: seed {seed}");
    let mut torture = Torture::new(target).expect("a client").helpers(launch());
    let report = torture
        .run(seed, Effort::new(time), |_, _| {})
        .expect("a machine that goes on");
    println!("{name}: {report}");
    assert!(report.granted > 0, "{name}: a vacuous pass");
    if let Some(failure) = report.failures.first() {
        let findings: Vec<_> = failure.findings.iter().map(ToString::to_string).collect();
        panic!(
            "{name}: of seed {seed}, the schedule {}\n{}\nshortened:\n{}",
            failure.schedule.seed,
            findings.join("\n"),
            failure.schedule
        );
    }
}

macro_rules! targets {
    ($($test:ident: $target:literal $fixed:expr;)*) => {
        $(
            #[test]
            fn $test() {
                torture($target, $fixed);
            }
        )*

        #[test]
        fn every_target_has_its_test() {
            assert_eq!(lockkit_torture::TARGETS, [$($target),*]);
        }
    };
}

targets! {
    memory: "memory" Some(45_029_985);
    file: "file" Some(491_267_397);
    redis: "redis" None;
    valkey: "valkey" None;
    redlock_of_five: "redlock" None;
    redlock_of_three: "redlock3" None;
    zookeeper: "zk" Some(606_423_011);
    ensemble: "zk3" None;
    mariadb: "mariadb" None;
    mysql: "mysql" None;
    mariadb_lease: "mariadb-lease" None;
    mysql_lease: "mysql-lease" None;
    zookeeper_readwrite: "zk-readwrite" None;
}
