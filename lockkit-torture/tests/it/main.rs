//! Every target under torture for a time from the environment variable `LOCKKIT_TORTURE`, by default two seconds, with a
//! new seed each time; and the tools of torture, each shown to break what is not protected.

mod arguments;
mod tools;

use std::{sync::Arc, time::Duration};

use lockkit_conformance::{
    helper::{self, Launch},
    torture::{Effort, Target, Torture},
};
use lockkit_testbed::skipped;

fn time() -> Duration {
    let time = std::env::var("LOCKKIT_TORTURE").unwrap_or_default();
    if time.is_empty() {
        return Duration::from_secs(2);
    }
    humantime::parse_duration(&time).expect("LOCKKIT_TORTURE is a time, such as 30s")
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

fn torture(name: &str) {
    let Some(target) = target(name) else {
        return;
    };
    let seed = fastrand::u64(..1_000_000_000);
    println!("{name}: seed {seed}");
    let mut torture = Torture::new(target).expect("a client").helpers(launch());
    let report = torture
        .run(seed, Effort::new(time()), |_, _| {})
        .expect("a machine that goes on");
    println!("{name}: {report}");
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
    ($($test:ident: $target:literal;)*) => {
        $(
            #[test]
            fn $test() {
                torture($target);
            }
        )*

        #[test]
        fn every_target_has_its_test() {
            assert_eq!(lockkit_torture::TARGETS, [$($target),*]);
        }
    };
}

targets! {
    memory: "memory";
    file: "file";
    redis: "redis";
    valkey: "valkey";
    redlock_of_five: "redlock";
    redlock_of_three: "redlock3";
    zookeeper: "zk";
    ensemble: "zk3";
    mariadb: "mariadb";
    mysql: "mysql";
    mariadb_lease: "mariadb-lease";
    mysql_lease: "mysql-lease";
    zookeeper_readwrite: "zk-readwrite";
}
