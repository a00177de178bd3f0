//! The memory backend passes the conformance suite.

use std::time::Duration;

use async_trait::async_trait;
use lockkit_conformance::{Harness, Outage, Way};
use lockkit_core::{LockClient, MemoryBackend, Result, memory::FaultPoint};

lockkit_conformance::tests!(Memory::default());

#[derive(Debug, Default)]
struct Memory(MemoryBackend);

#[async_trait]
impl Harness for Memory {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let backend = self.0.clone();
        let way = Way::new(move |outage| {
            let is = |wanted| outage == Some(wanted);
            let failures = if is(Outage::Refused) { u32::MAX } else { 0 };
            backend.fail_next(FaultPoint::Attempt, failures);
            let late = if is(Outage::Silent) { 60 } else { 0 };
            backend.delay(FaultPoint::Attempt, Duration::from_secs(late));
        });
        Ok(Some((self.client().await?, way)))
    }
}
