//! A contender for a lock. Its attempt is in [`queue`](crate::queue).

use std::{future::pending, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, ClaimRequest, Grant, Renewal},
};

use crate::{
    NAME,
    backend::Shared,
    error::{Failure, Result},
    lease::seconds,
    own_key::OwnKey,
};

/// A contender.
#[derive(Debug)]
pub(crate) struct EtcdClaim {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: ClaimRequest,
    /// The prefix of the keys of those who contend for the lock.
    pub(crate) queue: String,
    /// The number of keys that the claim has asked for. Each has another name.
    pub(crate) asked: u32,
    pub(crate) own: Option<OwnKey>,
}

impl EtcdClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, queue: String) -> Self {
        Self {
            shared,
            request,
            queue,
            asked: 0,
            own: None,
        }
    }

    async fn try_once(&mut self, waits: bool) -> Result<Option<Grant>> {
        // A key whose lease has ended is no key, nor is one that has gone or was taken away.
        let is_lost =
            |own: &mut OwnKey| own.session.ended().is_some() || own.is_gone() || !own.abandon_watch.attempt();
        if self.own.as_mut().is_some_and(is_lost) {
            self.clear();
        }
        // Else its deletion could come when it is granted.
        if self.own.as_ref().is_some_and(OwnKey::is_leaving) {
            self.leave().await?;
        }
        self.queue_up(waits).await
    }

    async fn renew_once(&mut self) -> Result<Renewal> {
        let ttl = self.request.ttl;
        let Some(own) = &mut self.own else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        if !own.has_lease_for(ttl) {
            let session = match self.shared.session(ttl).await {
                Err(failure @ Failure::ShortLease { .. }) => {
                    // As if it had been refused at once: the hold goes on with the lease that it has.
                    self.request.ttl = own.session.ttl();
                    return Err(failure);
                }
                session => session?,
            };
            own.change_lease(session).await?;
        }
        own.renew(ttl).await
    }

    /// Deletes the key, if there is or may be one. Returns why it was lost, if it was held and turned out to be gone.
    pub(crate) async fn leave(&mut self) -> Result<Option<LossReason>> {
        let lost = match &mut self.own {
            Some(own) => own.delete().await?,
            None => None,
        };
        self.clear();
        Ok(lost)
    }

    /// Forgets the key: it is not there, or no longer.
    pub(crate) fn clear(&mut self) {
        if let Some(own) = self.own.take() {
            own.clear();
        }
    }

    /// Returns the failure of an attempt that has looked too often.
    pub(crate) fn unstable(&self) -> Failure {
        Failure::Unstable(self.request.name.clone())
    }
}

#[async_trait]
impl Claim for EtcdClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let granted = self.try_once(!patience.is_zero()).await;
        granted.map_err(|failure| self.shared.error("acquire", failure))
    }

    async fn renew(&mut self) -> lockkit_core::Result<Renewal> {
        let renewed = self.renew_once().await;
        renewed.map_err(|failure| self.shared.error("renew", failure))
    }

    /// The next renewal has the hold go on with another lease. From then on it lasts for half of that one at least.
    fn set_ttl(&mut self, ttl: Duration) -> lockkit_core::Result<Option<Duration>> {
        crate::backend::check_ttl(ttl)?;
        self.request.ttl = ttl;
        let Some(own) = &mut self.own else {
            return Ok(Some(ttl));
        };
        own.forget_lease();
        let least = if own.has_lease_for(ttl) {
            ttl
        } else {
            Duration::from_secs(seconds(ttl)) / 2
        };
        Ok(Some(ttl.min(least)))
    }

    async fn release(&mut self) -> lockkit_core::Result<()> {
        let left = self.leave().await;
        match left.map_err(|failure| self.shared.error("release", failure))? {
            None => Ok(()),
            Some(reason) => Err(Error::lost(NAME, self.request.name.clone(), reason)),
        }
    }

    async fn notified(&mut self) {
        match &mut self.own {
            Some(own) => own.notified().await,
            None => pending().await,
        }
    }
}
