//! The backend: one client of several masters.

use std::{collections::HashMap, fmt, future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Mode},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    config::RedisConfig,
    connect::Connector,
    connection::{Connection, Inbox, Supervisor, reason},
    connection_io::ConnectionIo,
    error::unexpected,
    layout,
    redlock::{
        NAME, RedlockConfig,
        claim::{RedlockClaim, tally},
        guard::{self, Guard},
        masters::{Answer, Failures, Kind as Asked, Master, Masters, Requests, require_runtime},
        quorum::{Outcome, QuorumCount, Rules},
    },
    script,
};

/// A waiter is told when the lock is free, and asks when the lease before it runs out. This is for what neither covers: a
/// client that was told and died.
const FALLBACK_POLL: Duration = Duration::from_secs(1);

/// Locks on a majority of independent Redis masters.
///
/// A lock is held by whoever has it at more than half of the masters, so it outlives the loss of any minority of them
/// without a pause. Grants, renewals and releases go to all masters at once and are over when a majority has answered.
/// Each grant has a fencing token that a majority has raised its counter to, in the same step in which it granted.
///
/// What it cannot do: keep exclusion when the clocks of a majority jump, or when a majority loses its data; permits; the
/// order of waiters. `docs/guarantees.md` has the table, and `docs/redlock.md` the protocol.
pub struct RedlockBackend {
    masters: Arc<Masters>,
    server: Arc<str>,
    max_ttl: Duration,
    durable: bool,
}

impl RedlockBackend {
    /// Connects to the masters. Connections are watched and replaced by a task for each on the current runtime, which is
    /// the one that the client then lives on. A minority of the masters may be down.
    ///
    /// ```no_run
    /// # async fn example() -> lockkit_core::Result<()> {
    /// use lockkit_core::LockClient;
    /// use lockkit_redis::{RedlockBackend, RedlockConfig};
    ///
    /// let config = RedlockConfig::new("redlock://redis-a,redis-b,redis-c,redis-d,redis-e");
    /// let client = LockClient::new(RedlockBackend::connect(config).await?);
    /// # let _ = client;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`] for a config that cannot be, or that
    /// differs from what other clients of these masters have; [`Error::Backend`] if a majority does not answer, or one
    /// that does cannot be used: it is a replica, it is older than Redis 6, it refuses the user, it is another of the
    /// masters.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connections.
    pub async fn connect(config: RedlockConfig) -> Result<Self> {
        let each = config.masters()?;
        let server = RedlockConfig::server(&each)?;
        require_runtime("connect")?;
        let rules = Rules::of(each.len(), config.master_timeout);
        let guard = Arc::new(Guard::new(each.len(), config.max_ttl, config.durable));
        let inbox = Inbox {
            client: format!("{:x}-{:016x}", std::process::id(), fastrand::u64(..)).into(),
            wakeups: Arc::default(),
            master: None,
        };
        let masters = open(&each, rules, &guard, &inbox).await?;
        let masters = Arc::new(Masters::new(
            masters,
            rules,
            guard.clone(),
            inbox,
            &config.namespace,
        ));
        look_at_all(&guard, &masters, false).await?;
        // What is the same before and after the same moment was all there at that moment: then none had a vote, and who
        // lets them in from now on does so only if none has been emptied since.
        if let Some(quarantines) = guard.blank() {
            look_at_all(&guard, &masters, false).await?;
            if guard.blank() == Some(quarantines) {
                look_at_all(&guard, &masters, true).await?;
            }
        }
        let watch = tokio::spawn(guard::watch(guard, Arc::downgrade(&masters)));
        let _ = masters.watch.set(watch.abort_handle());
        Ok(Self {
            masters,
            server: server.into(),
            max_ttl: config.max_ttl,
            durable: config.durable,
        })
    }
}

/// Finds out which masters have a vote.
///
/// # Errors
/// If clients with another longest ttl have been there. What else fails is tried again later.
async fn look_at_all(guard: &Guard, masters: &Masters, are_new: bool) -> Result<()> {
    let looks = (0..masters.all.len()).map(|master| guard.look(masters, master, are_new));
    for (master, looked) in join(looks).await.into_iter().enumerate() {
        let server = &masters.all[master].name;
        match looked {
            Err(err @ Error::InvalidOptions { .. }) => return Err(unusable(server, &err)),
            // It is without a vote until the next look.
            Err(err) => {
                tracing::debug!(backend = NAME, %server, error = %err, "cannot tell whether it votes");
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Connects to the masters, all at once. Those that cannot be reached are tried again in the background.
async fn open(each: &[RedisConfig], rules: Rules, guard: &Arc<Guard>, inbox: &Inbox) -> Result<Vec<Master>> {
    let drivers = ConnectionIo::start();
    let mut keepers = Vec::new();
    for (n, config) in each.iter().enumerate() {
        let dialler = Connector::new(config)?.voter(guard, n, &drivers);
        let inbox = Inbox {
            master: Some((n, rules.quorum)),
            ..inbox.clone()
        };
        keepers.push(Supervisor::new(dialler, Some(inbox)));
    }
    let dialled = dial_all(&mut keepers, rules, guard).await;
    let mut failures = Failures::default();
    let names: Vec<_> = each
        .iter()
        .map(|config| config.address().map(|address| address.name()))
        .collect::<Result<_>>()?;
    for (n, outcome) in dialled.iter().enumerate() {
        match outcome {
            Err(err) if !err.is_transient() => return Err(unusable(&names[n], err)),
            Err(err) => failures.note(n, err),
            Ok(_) => {}
        }
        if let Ok(live) = outcome {
            warn_of_eviction(&names[n], &live.server().eviction);
        }
    }
    let reached = dialled.iter().filter(|outcome| outcome.is_ok()).count();
    if reached < rules.quorum {
        return Err(failures.to_error("connect", &names, rules));
    }
    let keepers = keepers.into_iter().zip(dialled).zip(names);
    Ok(keepers
        .map(|((keeper, first), name)| Master::new(keeper.start(first), name))
        .collect())
}

/// What came of dialling each. Once there is a quorum, and it is one that has been here before, the others get no more
/// than another round's time.
async fn dial_all(keepers: &mut [Supervisor], rules: Rules, guard: &Guard) -> Vec<Result<Connection>> {
    let mut dialling: Vec<_> = keepers
        .iter_mut()
        .map(|keeper| Some(Box::pin(keeper.connect())))
        .collect();
    let mut outcomes: Vec<Option<Result<Connection>>> = dialling.iter().map(|_| None).collect();
    let mut grace: Option<Pin<Box<tokio::time::Sleep>>> = None;
    poll_fn(|cx| {
        for (dial, outcome) in dialling.iter_mut().zip(&mut outcomes) {
            if let Some(future) = dial
                && let Poll::Ready(dialled) = future.as_mut().poll(cx)
            {
                *outcome = Some(dialled);
                *dial = None;
            }
        }
        if outcomes.iter().all(Option::is_some) {
            return Poll::Ready(());
        }
        let reached = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Some(Ok(_))))
            .count();
        if reached < rules.quorum || !guard.is_known() {
            return Poll::Pending;
        }
        grace
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(rules.patience)))
            .as_mut()
            .poll(cx)
    })
    .await;
    drop(dialling);
    outcomes
        .into_iter()
        .map(|outcome| {
            outcome.unwrap_or_else(|| {
                Err(Error::transient(
                    NAME,
                    "connect",
                    "it is still being connected to",
                ))
            })
        })
        .collect()
}

/// What each of `futures` comes to, running together.
async fn join<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(done) = future.as_mut().poll(cx)
            {
                *output = Some(done);
            }
        }
        if outputs.iter().all(Option::is_some) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

/// A master is there, and no good. That is for the operator to know now, and not when others are down.
fn unusable(name: &str, err: &Error) -> Error {
    match err {
        Error::InvalidOptions { option, reason, .. } => {
            Error::invalid_option(option, format!("{name}: {reason}"))
        }
        Error::Unsupported { what, .. } => Error::unsupported(NAME, format!("{name}: {what}")),
        err => Error::permanent(NAME, "connect", format!("{name}: {}", reason(err))),
    }
}

fn warn_of_eviction(server: &str, policy: &str) {
    if !policy.is_empty() && policy != "noeviction" {
        tracing::warn!(
            backend = NAME,
            server,
            maxmemory_policy = policy,
            "the server may evict locks that are held when its memory runs out; set maxmemory-policy noeviction"
        );
    }
}

#[async_trait]
impl Backend for RedlockBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.server.clone());
        info.namespace = self.masters.namespace.clone();
        info.fallback_poll = FALLBACK_POLL;
        let mut capabilities = Capabilities::default();
        capabilities.shared = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.revoke = true;
        capabilities.fencing = if self.durable {
            FencingDurability::Durable
        } else {
            FencingDurability::Process
        };
        info.capabilities = capabilities;
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if let Mode::Permits(_) = request.mode {
            return Err(permits());
        }
        if request.ttl > self.max_ttl {
            let (ttl, longest) = (request.ttl, self.max_ttl);
            return Err(Error::invalid_option(
                "ttl",
                format!(
                    "{ttl:?} is longer than these masters' `max_ttl` of {longest:?}, for which a restarted one keeps \
                     out of votes"
                ),
            ));
        }
        Ok(Box::new(RedlockClaim::new(self.masters.clone(), request)))
    }

    /// What a majority agrees on, and the longest line of waiters that any master has.
    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        require_runtime("inspect")?;
        if kind == LockKind::Semaphore {
            return Err(permits());
        }
        let masters = &self.masters;
        let key = layout::key(&masters.namespace, name, kind);
        let deadline = Instant::now() + masters.rules.patience;
        let mut requests = Requests::new(masters, "inspect");
        requests.ask_all(Asked::Report, |_| script::REDLOCK_INSPECT.call(&key));
        let mut failures = Failures::default();
        let mut answered = vec![false; masters.all.len()];
        let mut views = Views::default();
        while let Some(Answer { master, reply, .. }) = requests.next(deadline).await {
            match reply.and_then(|reply| views.add(&reply).ok_or_else(|| unexpected("inspect", &reply))) {
                Ok(()) => answered[master] = true,
                Err(err) => failures.note(master, &err),
            }
        }
        if answered.iter().filter(|answered| **answered).count() < masters.rules.quorum {
            failures.late(&answered, masters.rules.patience);
            return Err(masters.undecided("inspect", &failures));
        }
        Ok(views.agreed(masters.rules.quorum))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        require_runtime("revoke")?;
        if kind == LockKind::Semaphore {
            return Err(permits());
        }
        let masters = &self.masters;
        let key = layout::key(&masters.namespace, name, kind);
        // All are to have ended it, as far as they can be reached.
        let mut count = QuorumCount::of_renewal(masters.rules, masters.now());
        let mut requests = Requests::new(masters, "revoke");
        requests.ask_all(Asked::Report, |_| {
            let mut call = script::REDLOCK_REVOKE.call(&key);
            call.arg(token.get());
            call
        });
        match tally(masters, &mut requests, &mut count, "revoke", None).await {
            (Outcome::Held { .. }, _) => Ok(true),
            (Outcome::Lost, _) => Ok(false),
            (_, failures) => Err(masters.undecided("revoke", &failures)),
        }
    }

    async fn close(&self) -> Result<()> {
        if let Some(watch) = self.masters.watch.get() {
            watch.abort();
        }
        // Also if whoever closes does not wait for answers.
        let _ending = Ending(&self.masters);
        self.masters.settle().await;
        Ok(())
    }
}

/// Ends the connections when it is dropped.
struct Ending<'a>(&'a Masters);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        for master in &self.0.all {
            // Without an inbox there is nothing to be said before, and so nothing to wait for.
            let _ = master.link.close(None).now_or_never();
        }
    }
}

fn permits() -> Error {
    Error::unsupported(
        NAME,
        "semaphores: a majority of masters that admit n holders each admits more than n of them together; use \
         redis:// on one master, or zk://",
    )
}

/// What the masters say of a lock.
#[derive(Default)]
struct Views {
    /// By what tells one holder from another.
    holders: HashMap<String, Vec<Holder>>,
    waiters: usize,
}

impl Views {
    fn add(&mut self, reply: &Value) -> Option<()> {
        let Value::Array(parts) = reply else { return None };
        let [Value::Int(waiters), value, Value::Int(left), entries @ ..] = &**parts else {
            return None;
        };
        self.waiters = self.waiters.max(usize::try_from(*waiters).ok()?);
        let Value::BulkString(value) = value else {
            return Some(());
        };
        let value = String::from_utf8_lossy(value);
        if !layout::is_group(&value) {
            self.see(&value, *left);
        }
        for entry in entries.chunks(2) {
            let [Value::Int(left), Value::BulkString(value)] = entry else {
                return None;
            };
            self.see(&String::from_utf8_lossy(value), *left);
        }
        Some(())
    }

    fn see(&mut self, value: &str, left: i64) {
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        let record = layout::record_in(value);
        let holder = record.and_then(|record| layout::holder(record, left));
        let (who, holder) = match (record, holder) {
            (Some(record), Some(holder)) => (record.split(' ').next().unwrap_or_default(), holder),
            // A foreign client's hold has no token.
            _ => (value, Holder::new(FencingToken::new(0), None, left)),
        };
        self.holders.entry(who.to_owned()).or_default().push(holder);
    }

    /// Whoever holds at a majority, for as long as it does.
    fn agreed(self, quorum: usize) -> LockState {
        let mut holders: Vec<_> = self
            .holders
            .into_values()
            .filter_map(|mut seen| {
                seen.sort_by_key(|holder| std::cmp::Reverse(holder.left));
                let left = seen.get(quorum - 1)?.left;
                // One that was outrun at first has older tokens where it was not confirmed.
                let mut holder = seen.into_iter().max_by_key(|holder| holder.token)?;
                holder.left = left;
                Some(holder)
            })
            .collect();
        holders.sort_by_key(|holder| holder.token);
        LockState::new(holders, Some(self.waiters))
    }
}

impl fmt::Debug for RedlockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockBackend")
            .field("server", &self.server)
            .field("namespace", &self.masters.namespace)
            .finish_non_exhaustive()
    }
}
