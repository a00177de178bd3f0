//! One contender for one lock: a script of the server for each method of `Claim`.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, OwnerId, Renewal},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    backend::{HANDOFF_TTL, Shared},
    connection::ALIVE_FOR,
    error::{NAME, unexpected},
    layout::{self, Record},
    script::{self, Call},
    wakeup::{Follows, LAST_TOKEN, Wakeup},
};

/// The time by which the others ask later than the head of the queue. They are told when they become the head; this covers a
/// push that was lost, and a head that died.
pub(crate) const FOLLOWER_DELAY: Duration = Duration::from_secs(5);

#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own about what the server may have"
)]
pub(crate) struct RedisClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    key: Vec<u8>,
    record: Record,
    /// The number of tokens to reserve if the lock turns out to be contended.
    most_tokens: NonZeroU32,
    /// Receives pushes. There from the first request on that one may come for.
    wakeup: Option<Arc<Wakeup>>,
    /// The server may have it in the queue, since it has asked to wait.
    may_be_queued: bool,
    /// The end of its last known lease.
    held_until: Option<Instant>,
    /// The token of its hold, while it holds.
    token: Option<u64>,
    /// The token that the server shows for the hold. It lags behind `token` after a hand-off within the client.
    token_published: Option<u64>,
    /// A renewal is due at once: it publishes the token, or prolongs a lease that a hand-off made short.
    renew_soon: bool,
    /// The time of its request, if that was granted at once and the hold has not been renewed since.
    granted_at_once: Option<Instant>,
    /// It has made its exclusive hold a shared one. A server that lost that is told by the next renewal.
    is_downgraded: bool,
    /// The server has confirmed a release since the last request for a hold. A claim that was refused goes on with the same owner.
    was_released: bool,
    /// The shortest ttl that its hold has asked for.
    shortest_ttl: Duration,
}

/// The server's reply to a request for the lock.
enum Reply {
    Granted {
        first: u64,
        tokens: NonZeroU32,
    },
    Taken {
        /// In the queue, from 0 on.
        position: Option<u64>,
        /// The rest of the holder's lease.
        left: Option<Duration>,
        /// A foreign client holds the lock.
        foreign: bool,
    },
    /// The semaphore has this many permits.
    OtherPermits(String),
}

/// A hold that too few replicas have.
struct LackOfReplicas {
    reason: String,
    /// The connection that waits for replicas leads to the lock's server.
    same_server: bool,
}

impl RedisClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: &ClaimRequest) -> Result<Self> {
        // The counter must not outrun the clock. So a lock that nobody contends for, which may be taken tens of thousands of
        // times a second, reserves one token. The server says when the lock is contended.
        let most_tokens = request.tokens;
        let mut request = request.clone();
        if !request.locally_contended {
            request.tokens = NonZeroU32::MIN;
        }
        Ok(Self {
            key: layout::key(&shared.namespace, &request.name, request.mode.kind())?,
            record: Record::new(&request, &shared.inbox.client),
            most_tokens,
            shortest_ttl: request.ttl,
            request,
            shared,
            wakeup: None,
            may_be_queued: false,
            held_until: None,
            token: None,
            token_published: None,
            renew_soon: false,
            granted_at_once: None,
            is_downgraded: false,
            was_released: false,
        })
    }

    fn wakeup(&mut self) -> &Arc<Wakeup> {
        let Self {
            shared,
            request,
            key,
            wakeup,
            ..
        } = self;
        wakeup.get_or_insert_with(|| shared.inbox.wakeups.add(request.owner, key))
    }

    /// Returns the lease that a reply to a request sent at `since` proves. A request that may come late may shorten it.
    fn lease(&self, since: Instant) -> Lease {
        let mut ttl = Duration::from_millis(self.ttl_ms());
        let second = self.shared.replicas.iter().map(|(connection, ..)| connection);
        if second
            .chain([&self.shared.connection])
            .any(|connection| connection.may_have_late_requests())
        {
            ttl = ttl.min(self.shortest_ttl);
        }
        Lease::of_ttl(since, ttl)
    }

    /// Returns the ttl as the server counts it.
    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.request.ttl.as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the value that the server has for the hold, as far as this client knows.
    fn value(&self) -> String {
        self.record.with_token(self.token_published.unwrap_or_default())
    }

    /// Returns the hold that a push has brought, if the lease is long enough and the driver renews it soon.
    ///
    /// The lease counts from when the last request was sent that was answered before the push. The server handed the lock off
    /// after that reply, since a connection keeps their order. A push of an earlier connection proves nothing: this claim may
    /// have asked again on the present one.
    fn grant_from_push(&mut self) -> Option<Grant> {
        /// Leaves time for the first renewal.
        const ENOUGH: Duration = Duration::from_secs(1);

        let hand_off = self.wakeup.as_ref()?.take_hand_off()?;
        // Nothing is handed to a claim that has not asked to wait.
        if !self.may_be_queued || !self.request.renews || self.shared.replicas.is_some() {
            return None;
        }
        let ttl = Duration::from_millis(self.ttl_ms()).min(HANDOFF_TTL);
        let lease = Lease::of_ttl(hand_off.origin.since, ttl);
        let left = lease.end()?.saturating_duration_since(Instant::now());
        if left < ENOUGH || self.shared.connection.number() != Some(hand_off.origin.connection) {
            return None;
        }
        let grant = self
            .begin_hold("acquire", hand_off.token, self.most_tokens, lease)
            .ok()?;
        self.renew_soon = true;
        Some(grant)
    }

    async fn ask(&mut self, waits: bool) -> Result<Reply> {
        // A request that is not sent leaves nothing at the server.
        let connection = self.shared.connection.current("acquire")?;
        self.was_released = false;
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
        let reply = self
            .shared
            .connection
            .run_on(&connection, "acquire", call)
            .await?;
        match &reply {
            Value::Int(token) if *token > 0 => {
                self.may_be_queued = false;
                self.granted_at_once = Some(since);
                Ok(Reply::Granted {
                    first: token.unsigned_abs(),
                    tokens: self.request.tokens,
                })
            }
            Value::Array(parts) => match &**parts {
                [Value::Int(first), Value::Int(tokens)] if *first > 0 => {
                    let tokens = u32::try_from(*tokens).ok().and_then(NonZeroU32::new);
                    Ok(Reply::Granted {
                        first: first.unsigned_abs(),
                        tokens: tokens.ok_or_else(|| unexpected("acquire", &reply))?,
                    })
                }
                [Value::Int(position), Value::Int(left), Value::Int(foreign)] => Ok(Reply::Taken {
                    position: u64::try_from(*position).ok(),
                    left: u64::try_from(*left).ok().map(Duration::from_millis),
                    foreign: *foreign == 1,
                }),
                _ => Err(unexpected("acquire", &reply)),
            },
            Value::BulkString(permits) => {
                Ok(Reply::OtherPermits(String::from_utf8_lossy(permits).into_owned()))
            }
            _ => Err(unexpected("acquire", &reply)),
        }
    }

    /// Releases a short hold that was granted at once, by the server's own command. Most likely nobody has come since, and no
    /// script is needed. Returns `false` if one is: somebody waits, the hold is gone, or the server has no such command.
    async fn delete_short_hold(&self) -> Result<bool> {
        /// A longer hold is likely to have waiters. In vain, the command only makes them wait longer.
        const SHORT: Duration = Duration::from_millis(5);

        if self.granted_at_once.is_none_or(|sent| sent.elapsed() > SHORT) {
            return Ok(false);
        }
        let value = self.value();
        self.shared.connection.delete("release", &self.key, &value).await
    }

    /// Releases by the script. Returns `true` if the lock was held.
    async fn run_release(&self) -> Result<bool> {
        let mut call = script::RELEASE.call(&self.key);
        call.arg(self.value());
        match self.shared.connection.run("release", call).await? {
            Value::Int(held) => Ok(held == 1),
            reply => Err(unexpected("release", &reply)),
        }
    }

    fn renewal(&self) -> Call {
        let script = if self.is_downgraded {
            &script::DOWNGRADE
        } else {
            &script::RENEW
        };
        let mut call = script.call(&self.key);
        call.arg(self.record.with_token(self.token.unwrap_or_default()))
            .arg(self.ttl_ms());
        call
    }

    /// Begins a hold with what the server or a push has said.
    ///
    /// # Errors
    /// If those cannot be fencing tokens.
    fn begin_hold(
        &mut self,
        operation: &'static str,
        first: u64,
        tokens: NonZeroU32,
        lease: Lease,
    ) -> Result<Grant> {
        let last = first.checked_add(u64::from(tokens.get()) - 1);
        let Some(last) = last.filter(|last| (1..=LAST_TOKEN).contains(last)) else {
            let reason = format!(
                "the server granted {tokens} tokens from {first} on, and there are none above {LAST_TOKEN}"
            );
            return Err(Error::permanent(NAME, operation, reason));
        };
        self.was_released = false;
        self.shared.inbox.wakeups.saw(last);
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
        Ok(Grant::new(first..=last, lease))
    }

    /// Waits until the grant has reached as many replicas as the config asks for. Gives the lock up if it does not.
    async fn replicate(&mut self) -> Result<()> {
        let Some(lack) = self.lacks_replicas("acquire").await? else {
            return Ok(());
        };
        let released = self.release().await;
        self.find_the_server_again(&lack);
        match released {
            // A lease that ended before the replicas had it was nobody's hold.
            Err(error) if !error.is_lost() => Err(error),
            _ => Err(Error::transient(NAME, "acquire", lack.reason)),
        }
    }

    /// Waits until the hold has reached as many replicas as the config asks for. Returns why it has not.
    async fn lacks_replicas(&self, operation: &'static str) -> Result<Option<LackOfReplicas>> {
        if self.shared.replicas.is_none() {
            return Ok(None);
        }
        Ok(match self.renew_replicated(operation).await? {
            Ok(Value::Int(1)) => None,
            Ok(_) => Some(LackOfReplicas {
                reason: "the hold was gone before replicas acknowledged it".to_owned(),
                same_server: true,
            }),
            Err(lack) => Some(lack),
        })
    }

    /// Renews, and waits until that has reached as many replicas as the config asks for. Returns the reply, or why it has not. All
    /// renewals go over one connection, so that the last one counts.
    async fn renew_replicated(
        &self,
        operation: &'static str,
    ) -> Result<std::result::Result<Value, LackOfReplicas>> {
        let Some((connection, replicas, within)) = &self.shared.replicas else {
            let reply = self.shared.connection.run(operation, self.renewal()).await?;
            return Ok(Ok(reply));
        };
        let same_server = self.shared.connection.is_same_server(operation, connection)?;
        let reason = if same_server {
            let (reply, reached) = connection
                .run_replicated(operation, self.renewal(), (*replicas, *within), |reply| {
                    *reply == Value::Int(1)
                })
                .await?;
            if reply != Value::Int(1) || reached >= i64::from(*replicas) {
                return Ok(Ok(reply));
            }
            format!("{reached} of {replicas} replicas acknowledged the hold within {within:?}")
        } else {
            "the connection that waits for replicas leads to another server than the lock's".to_owned()
        };
        Ok(Err(LackOfReplicas { reason, same_server }))
    }

    /// Has both connections made anew if they lead to two servers. Only the sentinels, or the URL, can say which one is right. If
    /// replicas do not follow, they may follow another master.
    fn find_the_server_again(&self, lack: &LackOfReplicas) {
        if let Some(sentinels) = &self.shared.sentinels {
            sentinels.doubt();
        }
        if let Some((connection, ..)) = self.shared.replicas.as_ref().filter(|_| !lack.same_server) {
            self.shared.connection.replace();
            connection.replace();
        }
    }

    /// Returns after how long to ask again if nothing wakes the claim: when the lease before it ends.
    fn asks_again_in(position: Option<u64>, left: Option<Duration>, foreign: bool) -> Duration {
        /// Foreign clients wake nobody.
        const FOREIGN: Duration = Duration::from_millis(50);
        /// A dead head that would not fit keeps out those behind it who would. One of them has to ask once it no longer
        /// counts as alive.
        const WATCH: Duration = ALIVE_FOR.saturating_add(Duration::from_secs(1));

        if foreign {
            // The others only look whether the head has died.
            return if position == Some(0) {
                FOREIGN.mul_f64(1.0 + fastrand::f64())
            } else {
                FOLLOWER_DELAY
            };
        }
        let left = left.unwrap_or(FOLLOWER_DELAY) + Duration::from_millis(1);
        match position {
            Some(0) => left,
            // A long queue must not ask all the time.
            Some(position) => {
                let watch = WATCH.saturating_mul(u32::try_from(position).unwrap_or(u32::MAX));
                (left + FOLLOWER_DELAY).min(watch)
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
        match self.ask(waits).await? {
            Reply::Granted { first, tokens } => {
                let grant = self.begin_hold("acquire", first, tokens, self.lease(since))?;
                self.replicate().await?;
                Ok(Some(grant))
            }
            Reply::Taken {
                position,
                left,
                foreign,
            } => {
                if waits {
                    let follows = position.is_some_and(|position| position > 0).then(|| Follows {
                        lock: self.key.clone(),
                        foreign,
                    });
                    let after = Self::asks_again_in(position, left, foreign);
                    self.wakeup().wait(follows, after);
                }
                Ok(None)
            }
            Reply::OtherPermits(others) => {
                let Mode::Permits(permits) = self.request.mode else {
                    let reason = "the lock's key holds a semaphore";
                    return Err(Error::permanent(NAME, "acquire", reason));
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
        // Not repeated at once if it fails: the driver says when.
        self.renew_soon = false;
        self.granted_at_once = None;
        let since = Instant::now();
        let reply = match self.renew_replicated("renew").await? {
            Ok(reply) => reply,
            // The hold goes on to the end of the last lease that they have.
            Err(lack) => {
                self.find_the_server_again(&lack);
                return Err(Error::transient(NAME, "renew", lack.reason));
            }
        };
        match reply {
            Value::Int(1) => {
                self.token_published = self.token;
                let lease = self.lease(since);
                self.held_until = lease.end();
                Ok(Renewal::Held(lease))
            }
            Value::Int(0) => Ok(Renewal::Lost(self.loss())),
            Value::Int(2) => Ok(Renewal::Asked),
            other => Err(unexpected("renew", &other)),
        }
    }

    /// An earlier request does not come late: a new connection has the server end the old one, or the [lease](Self::lease) tells.
    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        self.request.ttl = ttl;
        let asked_for = self.token.map_or(ttl, |_| self.shortest_ttl);
        self.shortest_ttl = asked_for.min(ttl);
        Ok(self.lease(Instant::now()).length)
    }

    async fn downgrade(&mut self) -> Result<Lease> {
        let mut request = self.request.clone();
        request.mode = Mode::Shared;
        request.tokens = NonZeroU32::MIN;
        let record = Record::new(&request, &self.shared.inbox.client);
        let mut call = script::DOWNGRADE.call(&self.key);
        call.arg(record.with_token(self.token.unwrap_or_default()))
            .arg(self.ttl_ms());
        // The value at the server may be another one from now on.
        self.granted_at_once = None;
        self.renew_soon = false;
        let since = Instant::now();
        let reply = self.shared.connection.run("downgrade", call).await?;
        let lost = |reason| Err(Error::lost(NAME, self.request.name.clone(), reason));
        match reply {
            Value::Int(1) => {}
            Value::Int(0) => return lost(self.loss()),
            Value::Int(2) => return lost(LossReason::Asked),
            other => return Err(unexpected("downgrade", &other)),
        }
        (self.request, self.record) = (request, record);
        self.is_downgraded = true;
        self.token_published = self.token;
        let mut lease = self.lease(since);
        if let (Some(_), Some(held_until)) = (&self.shared.replicas, self.held_until) {
            // The replicas have not acknowledged this yet. The next renewal has them do so.
            let proven = held_until.saturating_duration_since(since);
            lease.length = lease.length.map(|length| length.min(proven));
        }
        self.held_until = lease.end();
        Ok(lease)
    }

    /// It is not in the queue any more. So the client must not have it leave that when it is dropped, which would release the hold.
    fn detach(&mut self) -> Option<OwnerId> {
        self.may_be_queued = false;
        Some(self.request.owner)
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        self.was_released = false;
        // From now on, it hears of the end of its hold.
        self.wakeup().begin();
        let mut call = script::ADOPT.call(&self.key);
        call.arg(self.record.with_token(token.get()))
            .arg(from.to_string())
            .arg(self.ttl_ms())
            .arg(&*layout::mode(self.request.mode));
        let since = Instant::now();
        match self.shared.connection.run("adopt", call).await? {
            Value::Int(1) => {}
            Value::Int(0) => return Ok(Some(Renewal::Lost(LossReason::Gone))),
            Value::Int(2) => return Ok(Some(Renewal::Asked)),
            other => return Err(unexpected("adopt", &other)),
        }
        let lease = self.lease(since);
        self.begin_hold("adopt", token.get(), NonZeroU32::MIN, lease)?;
        // What a replica does not know of is the former owner's there, for anybody to adopt.
        if let Some(lack) = self.lacks_replicas("adopt").await? {
            self.find_the_server_again(&lack);
            return Err(Error::transient(NAME, "adopt", lack.reason));
        }
        Ok(Some(Renewal::Held(lease)))
    }

    async fn release(&mut self) -> Result<()> {
        let held = self.delete_short_hold().await? || self.run_release().await?;
        if let Some(wakeup) = &self.wakeup {
            wakeup.stop();
        }
        self.may_be_queued = false;
        self.was_released = true;
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
        let (wakeups, owner) = (&self.shared.inbox.wakeups, self.request.owner);
        if self.may_be_queued {
            wakeups.abandon(owner, std::mem::take(&mut self.key));
        } else if self.was_released && self.shared.sentinels.is_some() {
            wakeups.released(owner, std::mem::take(&mut self.key));
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
