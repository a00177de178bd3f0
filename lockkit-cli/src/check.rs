//! `lockkit check`: the conformance suite on the user's own server.

use std::{num::NonZeroUsize, thread, time::Duration};

use lockkit_conformance::{Case, Suite, Verdict};

use crate::{
    args::Check,
    failure::{FAILED, Failure},
    helped::{self, Server},
    inspect::print,
    server,
};

/// Cases mostly wait, so that a few run side by side; more would slow down those that measure time.
const MOST_JOBS: usize = 4;

/// Blocks, for each case has a runtime of its own. Answers with the exit status.
pub(crate) fn check(args: &Check) -> Result<u8, Failure> {
    let server = Server::reach(server::url(args.server.url.as_deref())?)?;
    let helpers = helped::launch()?;
    let only = args.only.as_deref().unwrap_or_default();
    let jobs = thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(MOST_JOBS);
    let report = Suite::new(server)
        .helpers(helpers)
        .run(jobs, |case| case.name.contains(only), print_case);
    print(&report.to_string());
    if report.verdicts.is_empty() {
        return Err(Failure::new(FAILED, format!("no case has `{only}` in its name")));
    }
    Ok(u8::from(!report.is_ok()))
}

fn print_case(case: &Case, verdict: &Verdict, took: Duration) {
    let name = case.name;
    print(&match verdict {
        Verdict::Passed => format!("ok      {name} ({} ms)", took.as_millis()),
        Verdict::Gated(why) => format!("gated   {name}: {why}"),
        Verdict::Failed(why) => format!("FAILED  {why}"),
    });
}
