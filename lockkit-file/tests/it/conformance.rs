//! The file backend passes the conformance suite.

use async_trait::async_trait;
use lockkit_conformance::Harness;
use lockkit_core::{LockClient, Result};
use lockkit_file::{FileBackend, FileConfig};
use tempfile::TempDir;

lockkit_conformance::tests!(Files(TempDir::new().unwrap()));

#[derive(Debug)]
struct Files(TempDir);

#[async_trait]
impl Harness for Files {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(
            FileBackend::open(FileConfig::new(self.0.path())).await?,
        ))
    }

    fn url(&self) -> Option<String> {
        self.0.path().to_str().map(str::to_owned)
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        Ok(LockClient::new(FileBackend::open(FileConfig::new(url)).await?))
    }

    /// There is nothing but the files to take a hold away with; each case has a directory to itself.
    async fn break_hold(&self, _: &str) -> Result<()> {
        for entry in std::fs::read_dir(self.0.path().join("lockkit")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|kind| kind == "lock") {
                std::fs::remove_file(path).unwrap();
            }
        }
        Ok(())
    }
}
