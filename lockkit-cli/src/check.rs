//! `lockkit check`: the conformance suite on the user's own server.

use std::{error::Error, fmt, num::NonZeroUsize, thread, time::Duration};

use async_trait::async_trait;
use lockkit::{LockClient, LockConfig};
use lockkit_conformance::{
    Case, Harness, Suite, Verdict,
    helper::{self, Launch},
};

use crate::{
    args::Check,
    failure::{FAILED, Failure, chain},
    inspect::print,
    server,
};

/// The hidden subcommand that helper processes are.
pub(crate) const HELPER: &str = "__helper";

/// Cases mostly wait, so that a few run side by side; more would slow down those that measure time.
const MOST_JOBS: usize = 4;

/// Blocks, for each case has a runtime of its own. Answers with the exit status.
pub(crate) fn check(args: &Check) -> Result<u8, Failure> {
    let server = Server::reach(server::url(args.server.url.as_deref())?)?;
    let helpers = Launch::this_program([HELPER]).map_err(|e| Failure::because("cannot start helpers", &e))?;
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

/// What [`HELPER`] does.
pub(crate) fn help() -> Result<u8, Failure> {
    helper::main(|url| async move { lockkit::connect(&url).await })
        .map(|()| 0)
        .map_err(|error| Failure::new(FAILED, chain(error.as_ref() as &dyn Error)))
}

fn print_case(case: &Case, verdict: &Verdict, took: Duration) {
    let name = case.name;
    print(&match verdict {
        Verdict::Passed => format!("ok      {name} ({} ms)", took.as_millis()),
        Verdict::Gated(why) => format!("gated   {name}: {why}"),
        Verdict::Failed(why) => format!("FAILED  {why}"),
    });
}

/// The server at a URL.
struct Server {
    config: LockConfig,
    url: String,
}

/// As its config, which leaves out the credentials.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

impl Server {
    /// One that does not answer is one failure, rather than one per case.
    fn reach(url: String) -> Result<Self, Failure> {
        let config = LockConfig::from_url(&url)?;
        crate::on_this_thread(async {
            config.connect().await?.close(Duration::from_secs(5)).await?;
            Ok(0)
        })?;
        Ok(Self { config, url })
    }
}

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> lockkit::Result<LockClient> {
        self.config.connect().await
    }

    fn url(&self) -> Option<String> {
        // No other process reaches the memory of this one.
        (self.config.url != "memory:").then(|| self.url.clone())
    }

    async fn connect(&self, url: &str) -> lockkit::Result<LockClient> {
        lockkit::connect(url).await
    }
}
