//! Some targets under a schedule that is always the same; the tools of torture, each shown to break what is not protected; and
//! the program. Random schedules are the program's: `scripts/test` runs it.

mod arguments;
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

/// The epoch of one seed.
fn torture(name: &str, seed: u64) {
    let Some(target) = target(name) else {
        return;
    };
    let mut torture = Torture::new(target).expect("a client").helpers(launch());
    let schedule = Schedule::generate(seed, &torture.shape());
    let verdict = torture.epoch(&schedule).expect("a machine that goes on");
    assert!(
        verdict.findings.is_empty(),
        "{name}: seed {seed}: {:?}\n{}\n{schedule}",
        verdict.findings,
        verdict.log
    );
}

#[test]
fn memory() {
    torture("memory", 45_029_985);
}

#[test]
fn file() {
    torture("file", 491_267_397);
}
