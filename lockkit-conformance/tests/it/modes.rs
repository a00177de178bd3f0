//! The memory backend with a layer above it that gets the modes wrong: what the plain backend has none of.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::{Harness, Missing, Suite, Verdict, cases};
use lockkit_core::{
    LockClient, LockKind, LockName, LockState, MemoryBackend, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Mode, Renewal},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    ReadersExcludeEachOther,
    WritersComeInWithReaders,
    OnePermitTooMany,
    OnePermitTooFew,
    SizesLiveApart,
    SemaphoreIsTheLock,
    /// Who gives up takes the next hint along.
    HintsWhoGaveUp,
    NoServer,
}

#[derive(Clone, Debug)]
struct Layer {
    inner: MemoryBackend,
    fault: Fault,
    /// The next hint is lost.
    loses_hint: Arc<AtomicBool>,
}

#[async_trait]
impl Backend for Layer {
    fn info(&self) -> BackendInfo {
        let mut info = self.inner.info();
        if self.fault == Fault::HintsWhoGaveUp {
            info.fallback_poll = Duration::from_millis(500);
        }
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let mut request = request.clone();
        request.mode = match (self.fault, request.mode) {
            (Fault::ReadersExcludeEachOther, Mode::Shared)
            | (Fault::SemaphoreIsTheLock, Mode::Permits(_)) => Mode::Exclusive,
            (Fault::WritersComeInWithReaders, Mode::Exclusive) => Mode::Shared,
            (Fault::OnePermitTooMany, Mode::Permits(size)) => Mode::Permits(size.saturating_add(1)),
            (Fault::OnePermitTooFew, Mode::Permits(size)) => Mode::Permits(fewer(size)),
            (Fault::SizesLiveApart, Mode::Permits(size)) => {
                request.name = LockName::new(format!("{}/{size}", request.name))?;
                request.mode
            }
            (_, mode) => mode,
        };
        let claim = self.inner.claim(&request).await?;
        if self.fault != Fault::HintsWhoGaveUp {
            return Ok(claim);
        }
        Ok(Box::new(Hinted {
            claim,
            is_granted: false,
            loses_hint: self.loses_hint.clone(),
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.inner.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Hinted {
    claim: Box<dyn Claim>,
    is_granted: bool,
    loses_hint: Arc<AtomicBool>,
}

#[async_trait]
impl Claim for Hinted {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        let grant = self.claim.attempt(patience).await?;
        self.is_granted = grant.is_some();
        Ok(grant)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.claim.renew().await
    }

    async fn release(&mut self) -> Result<()> {
        if !self.is_granted {
            self.loses_hint.store(true, Ordering::SeqCst);
        }
        self.claim.release().await
    }

    async fn notified(&mut self) {
        loop {
            self.claim.notified().await;
            if !self.loses_hint.swap(false, Ordering::SeqCst) {
                return;
            }
        }
    }
}

fn fewer(size: std::num::NonZeroU32) -> std::num::NonZeroU32 {
    std::num::NonZeroU32::new(size.get() - 1).unwrap_or(size)
}

#[async_trait]
impl Harness for Layer {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.clone()))
    }

    fn missing(&self) -> Option<Missing> {
        let (backend, reason) = ("layer".to_owned(), "it was never built".to_owned());
        (self.fault == Fault::NoServer).then_some(Missing { backend, reason })
    }
}

fn verdict(fault: Fault, case: &str) -> Verdict {
    let layer = Layer {
        inner: MemoryBackend::new(),
        fault,
        loses_hint: Arc::default(),
    };
    let case = cases().iter().find(|known| known.name == case).unwrap();
    Suite::new(layer).run_case(case)
}

#[test]
fn each_fault_is_caught() {
    for (fault, case) in [
        (Fault::ReadersExcludeEachOther, "many_readers_or_one_writer"),
        (Fault::WritersComeInWithReaders, "many_readers_or_one_writer"),
        (Fault::WritersComeInWithReaders, "readers_and_writers_contend"),
        (Fault::OnePermitTooMany, "never_more_than_the_size"),
        (Fault::OnePermitTooFew, "never_more_than_the_size"),
        (Fault::OnePermitTooMany, "drained_permits_come_back"),
        (Fault::OnePermitTooMany, "several_permits_or_none"),
        (Fault::SizesLiveApart, "two_sizes_are_an_error"),
        (Fault::SemaphoreIsTheLock, "apart_from_the_lock"),
        (Fault::HintsWhoGaveUp, "hinted_when_one_ahead_gives_up"),
    ] {
        let found = verdict(fault, case);
        assert!(
            matches!(found, Verdict::Failed(_)),
            "{case} does not notice {fault:?}: {found:?}"
        );
    }
}

#[test]
fn without_a_fault_the_same_cases_pass() {
    for case in [
        "many_readers_or_one_writer",
        "never_more_than_the_size",
        "several_permits_or_none",
        "who_wants_several_never_locks_up",
        "two_sizes_are_an_error",
        "apart_from_the_lock",
        "hinted_when_one_ahead_gives_up",
    ] {
        assert_eq!(verdict(Fault::None, case), Verdict::Passed, "{case}");
    }
}

#[test]
fn a_missing_server_is_said_and_fails_where_it_is_required() {
    let why = match (
        verdict(Fault::NoServer, "second_try_is_none"),
        std::env::var("LOCKKIT_REQUIRE").as_deref(),
    ) {
        (Verdict::Failed(why), Ok("all" | "layer")) | (Verdict::Skipped(why), _) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(why, "no server for layer: it was never built");
}
