//! A lock server as `check` and `bench` use it: with helper processes, which are this program once more.

use std::{error::Error, fmt};

use async_trait::async_trait;
use lockkit::{
    LockClient, LockConfig,
    spi::{BackendInfo, chain},
};
use lockkit_conformance::{
    Harness,
    helper::{self, Launch},
};

use crate::{
    failure::{FAILED, Failure},
    inspect::CLOSE_WITHIN,
};

/// The hidden subcommand that helper processes are.
pub(crate) const HELPER: &str = "__helper";

/// Returns the way to start helper processes.
pub(crate) fn launch() -> Result<Launch, Failure> {
    Launch::this_program([HELPER]).map_err(|error| Failure::because("cannot start helpers", &error))
}

/// Runs as a helper process: the work of [`HELPER`].
pub(crate) fn help() -> Result<u8, Failure> {
    helper::main(|url| async move { lockkit::connect(&url).await })
        .map(|()| 0)
        .map_err(|error| Failure::new(FAILED, chain(error.as_ref() as &dyn Error)))
}

/// The server at a URL, for this process and its helpers.
pub(crate) struct Server {
    config: LockConfig,
    url: String,
    /// Describes the backend, without credentials.
    pub(crate) info: BackendInfo,
}

/// Shows its config, which leaves out the credentials.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

impl Server {
    /// One that does not answer is one failure, rather than one per case.
    pub(crate) fn reach(url: String) -> Result<Self, Failure> {
        let config = LockConfig::from_url(&url)?;
        let info = crate::on_this_thread(async {
            let client = config.connect().await?;
            client.close(CLOSE_WITHIN).await?;
            Ok(client.info().clone())
        })?;
        Ok(Self { config, url, info })
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
