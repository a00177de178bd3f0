//! One contender for one lock.

use std::{
    fmt,
    num::NonZeroU32,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    backend::{HANDOFF_TTL, Shared},
    connection::ALIVE_FOR,
    error::{NAME, unexpected},
    layout::{self, Record},
    script::{self, Call},
    wakeup::Wakeup,
};

/// Those behind the head are told when they become it. This is by how much later they ask than it, if that was lost, or if
/// it has died.
pub(crate) const FOLLOWER_DELAY: Duration = Duration::from_secs(5);

pub(crate) struct RedisClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    key: Vec<u8>,
    record: Record,
    /// How many tokens to reserve from when the lock is known to be contended.
    most_tokens: NonZeroU32,
    /// Where pushes for it arrive, from when it first may get one.
    wakeup: Option<Arc<Wakeup>>,
    queued: bool,
    /// It may have a place in the queue at the server, for it has been asking for one.
    may_be_queued: bool,
    /// Until when it was last known to hold.
    held_until: Option<Instant>,
    /// The token of its hold, while it holds.
    token: Option<u64>,
    /// The one that the server has been told.
    token_published: Option<u64>,
    /// Since it was last renewed, or tried to be, its token has changed, or it was passed a lease that is short.
    renew_soon: bool,
    /// When it was asked for, if it was had at once and has not been renewed since.
    granted_at_once: Option<Instant>,
}

/// The answer to an attempt.
enum Answer {
    /// The first token, and how many.
    Granted(u64, NonZeroU32),
    Taken {
        /// In the queue.
        position: Option<u64>,
        /// Of the lease of whoever holds it.
        left: Option<Duration>,
        foreign: bool,
    },
    /// The semaphore has this many.
    OtherPermits(String),
}

impl RedisClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: &ClaimRequest) -> Self {
        // The counter must not run ahead of the clock: a lock that nobody contends for, which may be taken tens of thousands
        // of times a second, takes one token. That it is contended for at the server is found out.
        let most_tokens = request.tokens;
        let mut request = request.clone();
        if !request.locally_contended {
            request.tokens = NonZeroU32::MIN;
        }
        Self {
            key: layout::key(&shared.namespace, &request.name, request.mode.kind()),
            record: Record::new(&request, &shared.inbox.client),
            most_tokens,
            request,
            shared,
            wakeup: None,
            queued: false,
            may_be_queued: false,
            held_until: None,
            token: None,
            token_published: None,
            renew_soon: false,
            granted_at_once: None,
        }
    }

    fn wakeup(&mut self) -> &Arc<Wakeup> {
        let Self {
            shared,
            request,
            wakeup,
            ..
        } = self;
        wakeup.get_or_insert_with(|| shared.inbox.wakeups.add(request.owner))
    }

    /// The lease that a reply to a request sent at `since` proves.
    fn lease(&self, since: Instant) -> Lease {
        Self::lease_of(Duration::from_millis(self.ttl_ms()), since)
    }

    /// All of it on the server's clock, less what two clocks may drift apart meanwhile.
    fn lease_of(ttl: Duration, since: Instant) -> Lease {
        Lease {
            since,
            length: Some(ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))),
        }
    }

    /// As the server counts it.
    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.request.ttl.as_millis()).unwrap_or(u64::MAX)
    }

    /// What the server knows the hold by, as far as this client knows.
    fn value(&self) -> String {
        self.record.with_token(self.token_published.unwrap_or_default())
    }

    fn set_queued(&mut self, queued: bool) {
        if self.queued != queued {
            self.queued = queued;
            let count = self.shared.inbox.wakeups.queued();
            if queued {
                count.fetch_add(1, Ordering::Relaxed);
            } else {
                count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// What it was passed, if that can be used as it is: enough is left of its lease, and the driver renews it soon.
    ///
    /// The lease counts from when the last request was sent that was answered before the push. The server has passed it on
    /// later than it answered that, since one connection keeps their order. What came on the connection before says nothing
    /// any more: this claim may have asked again on the one there is now.
    fn grant_from_push(&mut self) -> Option<Grant> {
        /// For its first renewal.
        const ENOUGH: Duration = Duration::from_secs(1);

        let passed = self.wakeup.as_ref()?.take_push()?;
        if !self.request.renews || self.shared.replicas.is_some() {
            return None;
        }
        let ttl = Duration::from_millis(self.ttl_ms()).min(HANDOFF_TTL);
        let lease = Self::lease_of(ttl, passed.heard.since);
        let left = lease.end()?.saturating_duration_since(Instant::now());
        if left < ENOUGH || self.shared.link.number() != Some(passed.heard.on) {
            return None;
        }
        let grant = self.begin_hold(passed.token, self.most_tokens, lease);
        self.renew_soon = true;
        Some(grant)
    }

    async fn request_lock(&mut self, waits: bool) -> Result<Answer> {
        // What is not sent leaves nothing.
        let live = self.shared.link.current("acquire")?;
        let alone = self.request.mode == Mode::Exclusive && !self.may_be_queued;
        self.may_be_queued |= waits;
        self.wakeup().begin();
        let mut call = script::ACQUIRE.call(&self.key);
        call.arg(&*self.record.template())
            .arg(self.request.tokens.get())
            .arg(self.ttl_ms())
            .arg(&*layout::mode(self.request.mode))
            .arg(self.most_tokens.get())
            .arg(if waits { "wait" } else { "try" });
        if alone {
            call.arg("alone");
        }
        let since = Instant::now();
        let reply = self.shared.link.run_on(&live, "acquire", call).await?;
        match &reply {
            Value::Int(token) if *token > 0 => {
                self.may_be_queued = false;
                self.granted_at_once = Some(since);
                Ok(Answer::Granted(token.unsigned_abs(), self.request.tokens))
            }
            Value::Array(parts) => match &**parts {
                [Value::Int(first), Value::Int(tokens)] if *first > 0 => {
                    let tokens = u32::try_from(*tokens).ok().and_then(NonZeroU32::new);
                    let tokens = tokens.ok_or_else(|| unexpected("acquire", &reply))?;
                    Ok(Answer::Granted(first.unsigned_abs(), tokens))
                }
                [Value::Int(position), Value::Int(left), Value::Int(foreign)] => Ok(Answer::Taken {
                    position: u64::try_from(*position).ok(),
                    left: u64::try_from(*left).ok().map(Duration::from_millis),
                    foreign: *foreign == 1,
                }),
                _ => Err(unexpected("acquire", &reply)),
            },
            Value::BulkString(permits) => Ok(Answer::OtherPermits(
                String::from_utf8_lossy(permits).into_owned(),
            )),
            _ => Err(unexpected("acquire", &reply)),
        }
    }

    /// Gives up a short hold that was had at once: most likely, nobody has come since, and the server can do without a
    /// script. `false` if that is not enough: somebody waits, it is gone, or the server has no such command.
    async fn delete_short_hold(&self) -> Result<bool> {
        /// For one that lasts, to look for waiters is worth what it costs: asked for in vain, this makes them wait longer.
        const SHORT: Duration = Duration::from_millis(5);

        if self
            .granted_at_once
            .is_none_or(|asked_at| asked_at.elapsed() > SHORT)
        {
            return Ok(false);
        }
        self.shared.link.delete("release", &self.key, &self.value()).await
    }

    /// Whether it was held.
    async fn run_release(&self) -> Result<bool> {
        let mut call = script::RELEASE.call(&self.key);
        call.arg(self.value());
        match self.shared.link.run("release", call).await? {
            Value::Int(held) => Ok(held == 1),
            reply => Err(unexpected("release", &reply)),
        }
    }

    fn renewal(&self) -> Call {
        let mut call = script::RENEW.call(&self.key);
        call.arg(self.record.with_token(self.token.unwrap_or_default()))
            .arg(self.ttl_ms());
        call
    }

    async fn granted(&mut self, first: u64, tokens: NonZeroU32, since: Instant) -> Result<Option<Grant>> {
        let grant = self.begin_hold(first, tokens, self.lease(since));
        self.replicate().await?;
        Ok(Some(grant))
    }

    /// From now on.
    fn begin_hold(&mut self, first: u64, tokens: NonZeroU32, lease: Lease) -> Grant {
        self.set_queued(false);
        if self.request.tokens != tokens {
            self.request.tokens = tokens;
            self.record = Record::new(&self.request, &self.shared.inbox.client);
        }
        if let Some(wakeup) = &self.wakeup {
            wakeup.stop();
        }
        self.held_until = lease.end();
        self.token = Some(first);
        self.token_published = Some(first);
        self.renew_soon = false;
        Grant {
            tokens: first..=first + u64::from(tokens.get()) - 1,
            lease,
        }
    }

    /// Has the grant reach as many replicas as were asked for. It is given up otherwise.
    async fn replicate(&mut self) -> Result<()> {
        let Some((link, replicas, within)) = &self.shared.replicas else {
            return Ok(());
        };
        let (link, replicas, within) = (link.clone(), *replicas, *within);
        let together = self.shared.link.leads_where("acquire", &link)?;
        let reason = if together {
            let (held, reached) = link
                .run_replicated("acquire", self.renewal(), replicas, within)
                .await?;
            if held == Value::Int(1) && reached >= i64::from(replicas) {
                return Ok(());
            }
            format!("{reached} of {replicas} replicas acknowledged the grant within {within:?}")
        } else {
            "the connection that waits for replicas leads to another server than the lock's".to_owned()
        };
        let released = self.release().await;
        if !together {
            // Which of them is right is for whoever names the master to say.
            self.shared.link.make_anew();
            link.make_anew();
        }
        match released {
            // A lease that was over before the replicas were was never a hold of anybody's.
            Err(error) if !error.is_lost() => Err(error),
            _ => Err(Error::transient(NAME, "acquire", reason)),
        }
    }

    /// How long to wait before it asks again although nothing woke it: when the lease before it has run out.
    fn asks_again_in(position: Option<u64>, left: Option<Duration>, foreign: bool) -> Duration {
        /// Foreign clients wake nobody.
        const FOREIGN: Duration = Duration::from_millis(50);
        /// A head that is dead, and would not fit, keeps those behind it waiting who would: until one of them asks when
        /// it is not believed any more.
        const WATCH: Duration = ALIVE_FOR.saturating_add(Duration::from_secs(1));

        if foreign {
            // Those behind do so for when the head has died.
            return if position == Some(0) {
                FOREIGN.mul_f64(1.0 + fastrand::f64())
            } else {
                FOLLOWER_DELAY
            };
        }
        let left = left.unwrap_or(FOLLOWER_DELAY) + Duration::from_millis(1);
        match position {
            Some(0) => left,
            // However many there are, they are not to ask all the time.
            Some(position) => {
                (left + FOLLOWER_DELAY).min(WATCH.saturating_mul(u32::try_from(position).unwrap_or(u32::MAX)))
            }
            None => left + FOLLOWER_DELAY,
        }
    }

    fn loss(&self) -> LossReason {
        if self.held_until.is_some_and(|end| end > Instant::now()) {
            LossReason::Revoked
        } else {
            LossReason::Expired
        }
    }
}

#[async_trait]
impl Claim for RedisClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if let Some(grant) = self.grant_from_push() {
            return Ok(Some(grant));
        }
        let waits = !patience.is_zero();
        let since = Instant::now();
        match self.request_lock(waits).await? {
            Answer::Granted(first, tokens) => self.granted(first, tokens, since).await,
            Answer::Taken {
                position,
                left,
                foreign,
            } => {
                if waits {
                    self.set_queued(true);
                    let after = Self::asks_again_in(position, left, foreign);
                    let key = self.key.clone();
                    let own = self.wakeup();
                    own.ask_in(after);
                    if position.is_some_and(|position| position > 0) {
                        own.waits_behind(&key, foreign);
                    }
                }
                Ok(None)
            }
            Answer::OtherPermits(others) => {
                let Mode::Permits(permits) = self.request.mode else {
                    return Err(Error::permanent(
                        NAME,
                        "acquire",
                        "the lock's key holds a semaphore",
                    ));
                };
                let name = &self.request.name;
                Err(Error::invalid_option(
                    "permits",
                    format!("semaphore `{name}` is in use with {others} permits, not {permits}"),
                ))
            }
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.wakeup().begin();
        // Also if it fails: what is to be done then is not to try again at once.
        self.renew_soon = false;
        self.granted_at_once = None;
        let since = Instant::now();
        let reply = self.shared.link.run("renew", self.renewal()).await?;
        match reply {
            Value::Int(1) => {
                self.token_published = self.token;
                let lease = self.lease(since);
                self.held_until = lease.end();
                Ok(Renewal::Held(lease))
            }
            Value::Int(0) => Ok(Renewal::Lost(self.loss())),
            other => Err(unexpected("renew", &other)),
        }
    }

    async fn release(&mut self) -> Result<()> {
        let held = self.delete_short_hold().await? || self.run_release().await?;
        self.set_queued(false);
        self.may_be_queued = false;
        let loss = self.loss();
        let was_held = self.token.take().is_some();
        self.token_published = None;
        self.renew_soon = false;
        self.granted_at_once = None;
        self.held_until = None;
        if was_held && !held {
            return Err(Error::lost(NAME, self.request.name.clone(), loss));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        if self.renew_soon {
            // It is held for long enough to be looked at: a renewal tells the server its token, and prolongs its lease.
            return;
        }
        self.wakeup().clone().notified().await;
    }

    fn passed_on(&mut self, token: FencingToken) {
        self.token = Some(token.get());
        self.renew_soon = true;
    }
}

impl Drop for RedisClaim {
    fn drop(&mut self) {
        self.set_queued(false);
        let (wakeups, owner) = (&self.shared.inbox.wakeups, self.request.owner);
        if self.may_be_queued {
            wakeups.leave_behind(owner, std::mem::take(&mut self.key));
        }
        if self.wakeup.is_some() {
            wakeups.remove(owner);
        }
    }
}

impl fmt::Debug for RedisClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisClaim")
            .field("name", &self.request.name)
            .field("mode", &self.request.mode)
            .finish_non_exhaustive()
    }
}
