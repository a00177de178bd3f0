//! The memory backend passes the conformance suite.

use async_trait::async_trait;
use lockkit_conformance::Harness;
use lockkit_core::{LockClient, MemoryBackend, Result};

lockkit_conformance::tests!(Memory::default());

#[derive(Debug, Default)]
struct Memory(MemoryBackend);

#[async_trait]
impl Harness for Memory {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }
}
