//! `lockkit check`: the conformance suite on the user's own server.

use std::{
    hash::{BuildHasher, RandomState},
    num::NonZeroUsize,
    sync::Arc,
    thread,
    time::Duration,
};

use lockkit_conformance::{
    Case, Suite, Verdict,
    torture::{Bare, Effort, Torture},
};

use crate::{
    args::Check,
    failure::{FAILED, Failure},
    helper_server::{self, Server},
    inspect::print,
    server,
};

/// Cases mostly wait, so that a few run side by side; more would slow down those that measure time.
const MOST_JOBS: usize = 4;

/// Blocks, for each case has a runtime of its own. Answers with the exit status.
pub(crate) fn check(args: &Check) -> Result<u8, Failure> {
    let server = Server::reach(server::url(args.server.url.as_deref())?)?;
    let helpers = helper_server::launch()?;
    if let Some(time) = args.time {
        let seed = args.seed.unwrap_or_else(random);
        let torture = Torture::new(Arc::new(Bare(Arc::new(server))));
        let torture = torture.map_err(|error| Failure::because("cannot reach the server", &error))?;
        return torment(torture.helpers(helpers), time, seed);
    }
    let only = args.only.as_deref().unwrap_or_default();
    let jobs = thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(MOST_JOBS);
    let report = Suite::new(server)
        .helpers(helpers)
        .run(jobs, |case| case.name.contains(only), print_case);
    print(&report.to_string())?;
    if report.verdicts.is_empty() {
        return Err(Failure::of_arguments(
            FAILED,
            &format!("no case has `{only}` in its name"),
        ));
    }
    Ok(u8::from(!report.is_ok()))
}

/// Random schedules for `time`. The processes of clients are stopped and killed; nothing is done to the server.
fn torment(mut torture: Torture, time: Duration, seed: u64) -> Result<u8, Failure> {
    print(&format!("seed {seed}"))?;
    let report = torture.run(seed, Effort::new(time), |schedule, verdict| {
        let outcome = if verdict.findings.is_empty() {
            "ok    "
        } else {
            "FAILED"
        };
        // What comes at the end says whether it could be written.
        let _ = print(&format!(
            "{outcome}  seed {}: {} grants",
            schedule.seed, verdict.granted
        ));
    });
    let report = report.map_err(|error| Failure::because("the torture cannot go on", &error))?;
    for failure in &report.failures {
        for finding in &failure.findings {
            print(&format!("FAILED  {finding}"))?;
        }
        print(&format!("the schedule, shortened:\n{}", failure.schedule))?;
    }
    print(&report.to_string())?;
    Ok(u8::from(!report.failures.is_empty()))
}

/// A seed that is small enough to be written down.
fn random() -> u64 {
    RandomState::new().hash_one(0) % 1_000_000_000
}

fn print_case(case: &Case, verdict: &Verdict, took: Duration) {
    let name = case.name;
    // The count at the end says whether it could be written.
    let _ = print(&match verdict {
        Verdict::Passed => format!("ok      {name} ({} ms)", took.as_millis()),
        Verdict::Skipped(why) => format!("skipped {name}: {why}"),
        Verdict::Failed(why) => format!("FAILED  {why}"),
    });
}
