//! Each target under schedules that are always the same; the tools of torture, each shown to break what is not protected; and
//! the program. New schedules are the program's: `scripts/soak` runs it.

mod arguments;
mod faults;
mod tools;

use std::sync::Arc;

use lockkit_conformance::{
    helper::{self, Launch},
    torture::{Schedule, Target, Torture},
};
use lockkit_testbed::skipped;

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

/// The epoch of one seed, with these faults alone; without any, with those that did not come later.
fn torture(name: &str, seed: u64, faults: &[&str]) {
    let Some(target) = target(name) else {
        return;
    };
    let mut torture = Torture::new(target).expect("a client").helpers(launch());
    if !faults.is_empty() {
        let faults: Vec<_> = faults.iter().copied().map(str::to_owned).collect();
        torture = torture.only(&faults).expect("faults of the target");
    }
    let schedule = Schedule::generate(seed, &torture.shape().without_later());
    let verdict = torture.epoch(&schedule).expect("a machine that goes on");
    assert!(
        verdict.findings.is_empty(),
        "{name}: seed {seed}: {:?}\n{}\n{schedule}",
        verdict.findings,
        verdict.log
    );
}

macro_rules! recorded {
    ($($name:ident: $target:literal, $seed:literal $(, $fault:literal)*;)*) => {
        $(#[test]
        fn $name() {
            torture($target, $seed, &[$($fault),*]);
        })*
    };
}

// Schedules of a few seconds, chosen for their faults and for being short. scripts/soak has new ones.
recorded! {
    memory: "memory", 45_029_985;
    memory_again: "memory", 15;
    file: "file", 491_267_397;
    files_that_go_beside_processes_that_stop: "file", 24;
    files_on_a_full_disk: "file", 1, "directory", "full";
    redis_without_its_keys: "redis", 5;
    redis_empty_after_a_restart: "redis", 46;
    valkey_without_its_keys: "valkey", 19;
    sentinels_that_fail_over: "redis-sentinel", 675;
    sentinels_whose_master_stands_still: "redis-sentinel", 1975;
    redis_whose_memory_is_full: "redis", 2, "memory";
    redis_whose_disk_is_full: "redis", 2, "disk";
    redlock_of_masters_that_forget: "redlock", 24;
    redlock_of_masters_that_are_emptied: "redlock", 25;
    redlock_of_three_whose_requests_stand: "redlock3", 19;
    zookeeper_with_other_settings: "zk", 24;
    zookeeper_with_connections_reset: "zk", 46;
    zookeeper_without_its_sessions: "zk-readwrite", 5;
    ensemble_that_restarts: "zk3", 25;
    ensemble_in_pieces: "zk3", 24;
    mariadb_beside_processes_that_stop: "mariadb", 16;
    mariadb_whose_role_changes: "mariadb", 32;
    mysql_that_is_late: "mysql", 19;
    mariadb_leases_at_a_successor: "mariadb-lease", 46;
    mysql_leases_at_a_successor: "mysql-lease", 7;
    postgres_at_its_standby: "postgres", 46;
    postgres_by_another_clock: "postgres", 5;
    postgres_whose_role_has_settings: "postgres", 1, "settings";
    etcd_that_restarts: "etcd", 24;
    etcd_without_its_leases: "etcd", 25;
    cluster_in_pieces: "etcd3", 24;
    cluster_with_a_member_cut_off: "etcd3", 25;
}
