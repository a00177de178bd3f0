//! A backend as a third party would write it: one map, no queue, no shared mode, no wake-ups.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::Harness;
use lockkit_core::{
    FencingToken, Holder, Kind, LockClient, LockName, LockState, LossReason, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Mode, OwnerId, Renewal},
};
use tokio::time::Instant;

mod passes {
    lockkit_conformance::tests!(super::Plain::default());
}

/// What is wrong with it, if anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    #[default]
    None,
    GrantsTwice,
    RepeatsTokens,
    ForgetsToRelease,
    ErrorIsAGrant,
    TakenIsAnError,
    FoldsCase,
    ReleasesForOthers,
    RevivesLostHolds,
    HidesTheLabel,
    ClaimsToBeFifo,
    ClaimsNoLease,
    ClaimsWakeUps,
    NeverRenews,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Plain {
    pub(crate) fault: Fault,
    locks: Arc<Mutex<HashMap<String, Entry>>>,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    last_token: u64,
    holder: Option<(OwnerId, u64, Instant, Option<Arc<str>>)>,
}

impl Entry {
    fn current(&mut self) -> Option<OwnerId> {
        self.holder.take_if(|(_, _, until, _)| *until <= Instant::now());
        self.holder.as_ref().map(|(owner, ..)| *owner)
    }
}

#[derive(Debug)]
struct PlainClaim {
    backend: Plain,
    request: ClaimRequest,
}

impl Plain {
    pub(crate) fn with(fault: Fault) -> Self {
        Self {
            fault,
            ..Self::default()
        }
    }

    fn entry<T>(&self, name: &LockName, act: impl FnOnce(&mut Entry) -> T) -> T {
        let key = match self.fault {
            Fault::FoldsCase => name.as_str().to_lowercase(),
            _ => name.as_str().to_owned(),
        };
        act(self
            .locks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_default())
    }
}

#[async_trait]
impl Backend for Plain {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new("plain", "plain:");
        info.fallback_poll = Duration::from_millis(5);
        info.capabilities.lease = self.fault != Fault::ClaimsNoLease;
        info.capabilities.revoke = true;
        info.capabilities.local_handoffs = true;
        info.capabilities.fifo = self.fault == Fault::ClaimsToBeFifo;
        if self.fault == Fault::ClaimsWakeUps {
            info.capabilities.notified = true;
            info.fallback_poll = Duration::from_secs(1);
        }
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if request.mode != Mode::Exclusive {
            return Err(lockkit_core::Error::unsupported(
                "plain",
                "any mode but the exclusive one",
            ));
        }
        let (backend, request) = (self.clone(), request.clone());
        Ok(Box::new(PlainClaim { backend, request }))
    }

    async fn inspect(&self, name: &LockName, kind: Kind) -> Result<LockState> {
        let shows_label = self.fault != Fault::HidesTheLabel;
        let holder = self.entry(name, |entry| entry.current().and(entry.holder.clone()));
        let holders = holder
            .filter(|_| kind == Kind::Lock)
            .map(|(_, token, until, label)| {
                let label = label.filter(|_| shows_label).map(|label| label.to_string());
                Holder::new(FencingToken::new(token), label, Some(until - Instant::now()))
            });
        Ok(LockState::new(holders.into_iter().collect(), None))
    }

    async fn revoke(&self, name: &LockName, _: Kind, token: u64) -> Result<bool> {
        Ok(self.entry(name, |entry| {
            entry.holder.take_if(|(_, held, ..)| *held == token).is_some()
        }))
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Claim for PlainClaim {
    async fn attempt(&mut self, _: Duration) -> Result<Option<Grant>> {
        let (request, fault) = (&self.request, self.backend.fault);
        let since = Instant::now();
        let block = u64::from(request.tokens.get());
        let granted = self.backend.entry(&request.name, |entry| {
            if entry.current().is_some_and(|holder| holder != request.owner) && fault != Fault::GrantsTwice {
                return None;
            }
            let first = entry.last_token + 1;
            if fault != Fault::RepeatsTokens {
                entry.last_token += block;
            }
            entry.holder = Some((request.owner, first, since + request.ttl, request.label.clone()));
            Some(first..=first + block - 1)
        });
        let unanswered = || lockkit_core::Error::transient("plain", "acquire", "no answer");
        let tokens = match (granted, fault) {
            (Some(tokens), _) => tokens,
            (None, Fault::ErrorIsAGrant) if fastrand::u8(..8) == 0 => u64::MAX - 1..=u64::MAX - 1,
            (None, Fault::TakenIsAnError) => return Err(unanswered()),
            (None, _) => return Ok(None),
        };
        let length = (fault != Fault::ClaimsNoLease).then_some(request.ttl);
        Ok(Some(Grant {
            tokens,
            lease: Lease { since, length },
        }))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let (request, fault) = (&self.request, self.backend.fault);
        let since = Instant::now();
        let extends = !matches!(fault, Fault::NeverRenews | Fault::ClaimsNoLease);
        let renewed = self.backend.entry(&request.name, |entry| {
            let is_mine = entry.current() == Some(request.owner);
            if let (true, Some((_, _, until, _))) = (is_mine && extends, &mut entry.holder) {
                *until = since + request.ttl;
            }
            is_mine || fault == Fault::RevivesLostHolds
        });
        let length = (fault != Fault::ClaimsNoLease).then_some(request.ttl);
        Ok(if renewed {
            Renewal::Held(Lease { since, length })
        } else {
            Renewal::Lost(LossReason::Revoked)
        })
    }

    async fn release(&mut self) -> Result<()> {
        let (owner, fault) = (self.request.owner, self.backend.fault);
        self.backend.entry(&self.request.name, |entry| {
            let is_mine = entry.current() == Some(owner) || fault == Fault::ReleasesForOthers;
            if is_mine && fault != Fault::ForgetsToRelease {
                entry.holder = None;
            }
        });
        Ok(())
    }

    async fn notified(&mut self) {
        std::future::pending().await
    }
}

#[async_trait]
impl Harness for Plain {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.clone()))
    }
}
