//! `spi::Backend` on a majority of masters.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::{FutureExt as _, StreamExt as _, future::join_all, stream::FuturesUnordered};
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{
        Backend, BackendInfo, Claim, ClaimRequest, Lease, Lister, Mode, Secrets, Unencrypted, require_runtime,
    },
};
use redis::Value;
use tokio::time::{Instant, timeout_at};

use crate::{
    config::RedisConfig,
    connect::Connector,
    connection::{Connection, Inbox, Supervisor, reason},
    connection_io::ConnectionIo,
    layout,
    redlock::{
        NAME, RedlockConfig,
        claim::{RedlockClaim, count_reports},
        list::RedlockLister,
        masters::{Failures, Master, Masters, Replies, RequestKind, Requests, Response},
        quorum::{Outcome, QuorumCount, Rules},
        restart_quarantine::{self, RestartQuarantine},
    },
    script,
};

/// The least ttl: with a shorter one, the timers and replies of a machine that is not idle use the lease up.
const LEAST_TTL: Duration = Duration::from_millis(50);

/// Wake-ups and the end of the lease before make a waiter ask. This poll is for the rest: a client that was woken and died.
const FALLBACK_POLL: Duration = Duration::from_secs(1);

/// Locks on a majority of independent Redis masters.
///
/// The holder has the lock at more than half of the masters. So the lock survives the loss of any minority of them, without
/// a pause. Grants, renewals and releases go to all masters at once and return when a majority has decided. Each grant has a
/// fencing token: a majority has raised its counter to it, in the step in which it granted the lock.
///
/// It has no semaphores and does not order waiters. It does not keep exclusion when the clocks of a majority jump or a
/// majority loses its data. `docs/guarantees.md` has the table, and `docs/redlock.md` the protocol.
pub struct RedlockBackend {
    masters: Arc<Masters>,
    server: Arc<str>,
    secrets: Secrets,
    max_ttl: Duration,
    durable: bool,
}

impl RedlockBackend {
    /// Connects to the masters, of which a minority may be down. A task for each master watches and replaces its connection.
    /// The tasks, and so the client, live on the current runtime.
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
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`] if the config is invalid, or if other
    /// clients of these masters have another `max_ttl`. [`Error::Backend`] if no majority replies, or if a master cannot be
    /// used: it is a replica, it is older than Redis 6, it refuses the user, or it is the same server as another master.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connections.
    pub async fn connect(config: RedlockConfig) -> Result<Self> {
        let each = config.masters()?;
        let server = RedlockConfig::server(&each)?;
        let addresses = each
            .iter()
            .map(RedisConfig::address)
            .collect::<Result<Vec<_>>>()?;
        let secrets = Secrets::of_passwords(addresses.iter().filter_map(|address| address.password.as_ref()));
        require_runtime(NAME, "connect")?;
        let rules = Rules::of(each.len(), config.master_timeout);
        let quarantine = Arc::new(RestartQuarantine::new(
            each.len(),
            layout::marker(&config.namespace),
            config.max_ttl,
            config.durable,
        ));
        let inbox = Inbox {
            client: layout::new_client(&config.namespace, false).into(),
            wakeups: Arc::default(),
            announcements: Arc::default(),
            master: None,
        };
        let connection_io = ConnectionIo::start();
        let masters = open(&each, rules, &quarantine, &inbox, &connection_io).await?;
        let masters = Arc::new(Masters::new(
            masters,
            rules,
            quarantine.clone(),
            inbox,
            connection_io,
            &config.namespace,
        ));
        let check_all = async |is_new| {
            let checked = check_all(&quarantine, &masters, is_new).await;
            checked.map_err(|error| secrets.blanked(error))
        };
        check_all(false).await?;
        // If all masters are in the same quarantines before and after a moment, none had a vote at that moment: the
        // deployment is new. A quarantine is ended by its beginning, so a master that is emptied later stays in its next one.
        if let Some(quarantines) = quarantine.blank_masters() {
            check_all(false).await?;
            if quarantine.blank_masters() == Some(quarantines) {
                check_all(true).await?;
            }
        }
        let watch = tokio::spawn(restart_quarantine::watch(quarantine, Arc::downgrade(&masters)));
        let _ = masters.watch.set(watch.abort_handle());
        Ok(Self {
            masters,
            server: server.into(),
            secrets,
            max_ttl: config.max_ttl,
            durable: config.durable,
        })
    }
}

#[cfg(test)]
impl RedlockBackend {
    pub(super) fn masters(&self) -> &Arc<Masters> {
        &self.masters
    }
}

/// Finds out which masters have a vote, and gives them one if the deployment `is_new`.
///
/// # Errors
/// A master that has another `max_ttl`. Other failures are tried again later.
async fn check_all(quarantine: &RestartQuarantine, masters: &Masters, is_new: bool) -> Result<()> {
    let checks = (0..masters.all.len()).map(|master| quarantine.check(masters, master, is_new));
    for (master, outcome) in join_all(checks).await.into_iter().enumerate() {
        let server = &masters.all[master].name;
        match outcome {
            Err(err @ Error::InvalidOptions { .. }) => return Err(unusable(server, &err)),
            // It has no vote until the next check.
            Err(err) => {
                tracing::debug!(backend = NAME, %server, error = %err, "cannot tell whether it votes");
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Connects to all masters at once. Those out of reach are tried again in the background.
async fn open(
    each: &[RedisConfig],
    rules: Rules,
    quarantine: &Arc<RestartQuarantine>,
    inbox: &Inbox,
    connection_io: &ConnectionIo,
) -> Result<Vec<Master>> {
    let mut keepers = Vec::new();
    let unencrypted = Unencrypted::default();
    for (n, config) in each.iter().enumerate() {
        let dialler = Connector::new(config)?.voter(quarantine, n, connection_io, &unencrypted);
        let inbox = Inbox {
            master: Some((n, rules.quorum)),
            ..inbox.clone()
        };
        keepers.push(Supervisor::new(dialler, Some(inbox)));
    }
    let dialled = dial_all(&mut keepers, rules, quarantine).await;
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

/// Dials all masters at once, and returns what came of each. Once a quorum is connected, and some master was in use before,
/// the others get no longer than a round.
async fn dial_all(
    keepers: &mut [Supervisor],
    rules: Rules,
    quarantine: &RestartQuarantine,
) -> Vec<Result<Connection>> {
    let not_yet = || {
        Err(Error::transient(
            NAME,
            "connect",
            "it is still being connected to",
        ))
    };
    let mut outcomes: Vec<_> = keepers.iter().map(|_| not_yet()).collect();
    let dial = |(master, keeper): (usize, _)| async move { (master, Supervisor::connect(keeper).await) };
    let mut dialling: FuturesUnordered<_> = keepers.iter_mut().enumerate().map(dial).collect();
    let (mut reached, mut deadline) = (0, None);
    loop {
        let dialled = match deadline {
            None => dialling.next().await,
            Some(deadline) => timeout_at(deadline, dialling.next()).await.unwrap_or(None),
        };
        let Some((master, outcome)) = dialled else {
            return outcomes;
        };
        reached += usize::from(outcome.is_ok());
        outcomes[master] = outcome;
        if reached >= rules.quorum && quarantine.is_known_deployment() {
            deadline.get_or_insert_with(|| Instant::now() + rules.patience);
        }
    }
}

/// Returns the error of a master that is up but cannot be used. The operator learns it now, and not when others are down.
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
        info.secrets = self.secrets.clone();
        info.fallback_poll = FALLBACK_POLL;
        info.least_ttl = LEAST_TTL;
        let mut capabilities = Capabilities::default();
        capabilities.shared = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.downgrade = true;
        capabilities.revoke = true;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.detach = true;
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
        check_ttl(request.ttl, self.max_ttl)?;
        let claim = RedlockClaim::new(self.masters.clone(), request, self.max_ttl)?;
        Ok(Box::new(claim))
    }

    /// Returns the holders that a majority agrees on, and the longest queue of any master.
    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        require_runtime(NAME, "inspect")?;
        if kind == LockKind::Semaphore {
            return Err(permits());
        }
        let key = layout::key(&self.masters.namespace, name, kind)?;
        report(&self.masters, &key, "inspect").await
    }

    /// Lists the locks that a majority agrees on. There are no semaphores to be listed.
    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        layout::check(&self.masters.namespace, prefix)?;
        Ok(Box::new(RedlockLister::new(self.masters.clone(), prefix)))
    }

    /// Marks the hold at every master within reach. Once a majority has the mark, no renewal reaches a majority.
    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        require_runtime(NAME, "revoke")?;
        if kind == LockKind::Semaphore {
            return Err(permits());
        }
        let masters = &self.masters;
        let key = layout::key(&masters.namespace, name, kind)?;
        let quorum = masters.rules.quorum;
        let asked = ask_holder(masters, &key, token).await?;
        if asked.lease(quorum).is_some() || asked.lefts.is_empty() {
            return Ok(asked.lease(quorum));
        }
        // A minority has been marked, and a majority has no such hold: a vote that came to nothing, or a hold whose holder was told by
        // the first mark, and let go before the request had come to the others.
        let again = ask_holder(masters, &key, token).await?;
        Ok(if again.lefts.is_empty() {
            asked.longest_lease()
        } else {
            again.lease(quorum)
        })
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        require_runtime(NAME, "revoke")?;
        if kind == LockKind::Semaphore {
            return Err(permits());
        }
        let masters = &self.masters;
        let key = layout::key(&masters.namespace, name, kind)?;
        let place = masters.for_others.take().await;
        // It waits for all masters, so that it is ended at each one within reach.
        let mut count = QuorumCount::of_renewal(masters.rules, masters.now());
        let mut requests = Requests::new(masters, "revoke");
        requests.ask_all(RequestKind::Report, |marker| {
            let mut call = script::REDLOCK_REVOKE.call(&key);
            call.arg(token.get()).arg(marker);
            call
        });
        let counted = count_reports(masters, place, &mut requests, &mut count, "revoke", None).await;
        match counted.outcome {
            Outcome::Held { .. } => Ok(true),
            Outcome::Lost => Ok(false),
            _ => Err(masters.no_quorum("revoke", &counted.failures)),
        }
    }

    async fn close(&self) -> Result<()> {
        if let Some(watch) = self.masters.watch.get() {
            watch.abort();
        }
        // Also if this future is dropped while it waits for replies.
        let _close = CloseOnDrop(&self.masters);
        self.masters.drain_stragglers().await;
        Ok(())
    }
}

/// The masters' replies to a request to give up a hold. They have a majority that has the hold, or one that does not.
struct AskedBack {
    since: Instant,
    /// The rest of the lease where it was marked, in ms, the longest first.
    lefts: Vec<u64>,
}

impl AskedBack {
    /// Returns the lease of the hold, unless a majority does not have it. The hold has a majority for as long as its mark has one.
    fn lease(&self, quorum: usize) -> Option<Lease> {
        self.nth_lease(quorum - 1)
    }

    fn longest_lease(&self) -> Option<Lease> {
        self.nth_lease(0)
    }

    fn nth_lease(&self, n: usize) -> Option<Lease> {
        let length = Duration::from_millis(*self.lefts.get(n)?);
        Some(Lease::new(self.since, Some(length)))
    }
}

/// Marks the hold that has `token` at every master within reach, which tells its holder.
///
/// # Errors
/// [`Error::Backend`] if no majority has the hold, and none has no such hold.
async fn ask_holder(masters: &Arc<Masters>, key: &[u8], token: FencingToken) -> Result<AskedBack> {
    let _place = masters.for_others.take().await;
    let since = Instant::now();
    let deadline = since + masters.rules.patience;
    let mut requests = Requests::new(masters, "revoke");
    requests.ask_all(RequestKind::Report, |marker| {
        let mut call = script::REDLOCK_ASK_BACK.call(key);
        call.arg(token.get()).arg(marker);
        call
    });
    let mut replies = Replies::new(masters, "revoke", masters.rules.patience);
    let (mut lefts, mut others) = (Vec::new(), 0);
    while let Some(Response { master, reply, .. }) = requests.next(deadline).await {
        match replies.read(master, reply, |reply| match reply {
            Value::Int(left @ -2..) => Some(*left),
            _ => None,
        }) {
            // It may have lost the hold, which may go on at the others.
            Some(-2) => {
                masters.quarantine.abstained(master);
                let why = masters.quarantine.why_no_vote(master);
                replies.failures.note_reason(master, why);
            }
            Some(left) => match u64::try_from(left) {
                Ok(left) => lefts.push(left),
                Err(_) => others += 1,
            },
            None => {}
        }
    }
    lefts.sort_unstable_by(|a, b| b.cmp(a));
    if lefts.len().max(others) < masters.rules.quorum {
        let failures = replies.failures(masters, Duration::ZERO);
        return Err(masters.no_quorum("revoke", &failures));
    }
    Ok(AskedBack { since, lefts })
}

/// Returns the holders of the lock with this key that a majority agrees on, and the longest queue of any master. If there is none, but
/// somebody might have a majority together with masters that did not reply, or may have lost a hold, nobody can tell whether the lock is
/// free: an error.
pub(super) async fn report(masters: &Arc<Masters>, key: &[u8], operation: &'static str) -> Result<LockState> {
    let _place = masters.for_others.take().await;
    let deadline = Instant::now() + masters.rules.patience;
    let mut requests = Requests::new(masters, operation);
    requests.ask_all(RequestKind::Report, |marker| {
        let mut call = script::REDLOCK_INSPECT.call(key);
        call.arg(marker);
        call
    });
    let mut replies = Replies::new(masters, operation, masters.rules.patience);
    let mut views = MasterViews::default();
    let mut known = 0;
    while let Some(Response { master, reply, .. }) = requests.next(deadline).await {
        let seen = replies.read(master, reply, |reply| match reply {
            Value::Int(-1) => Some(false),
            reply => views.add(reply).map(|()| true),
        });
        known += usize::from(seen == Some(true));
        if seen == Some(false) {
            masters.quarantine.abstained(master);
            let why = masters.quarantine.why_no_vote(master);
            replies.failures.note_reason(master, why);
        }
    }
    let quorum = masters.rules.quorum;
    let may_be_held = views.most() > 0 && views.most() + masters.all.len() - known >= quorum;
    let state = views.agreed(quorum);
    if known < quorum || (state.is_free() && may_be_held) {
        let failures = replies.failures(masters, Duration::ZERO);
        return Err(masters.no_quorum(operation, &failures));
    }
    Ok(state)
}

/// Returns whether a master has a vote. One without may have lost holds.
pub(super) async fn has_vote(masters: &Masters, master: usize, operation: &'static str) -> Result<bool> {
    let link = &masters.all[master].link;
    let live = link.current(operation)?;
    let nobodys = layout::own(&masters.namespace, "nowhere");
    let mut look = script::REDLOCK_INSPECT.call(nobodys.as_bytes());
    look.arg(live.server().marker());
    Ok(link.run_on(&live, operation, look).await? != Value::Int(-1))
}

/// Closes the connections when it is dropped.
struct CloseOnDrop<'a>(&'a Masters);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        for master in &self.0.all {
            // Without an inbox, `close` sends nothing, so it does not wait.
            let _ = master.link.close(None).now_or_never();
        }
    }
}

/// Checks that a ttl is no longer than these masters can keep.
pub(super) fn check_ttl(ttl: Duration, longest: Duration) -> Result<()> {
    if ttl > longest {
        return Err(Error::invalid_option(
            "ttl",
            format!(
                "{ttl:?} is longer than these masters' `max_ttl` of {longest:?}, for which a restarted one keeps out of votes; ask for less"
            ),
        ));
    }
    Ok(())
}

fn permits() -> Error {
    Error::unsupported(
        NAME,
        "semaphores: a majority of masters that admit n holders each admits more than n of them together; use \
         redis:// on one master, or zk://",
    )
}

/// The masters' reports on one lock.
#[derive(Default)]
struct MasterViews {
    /// By owner, or by value for foreign clients: the hold as each master reports it.
    holders: HashMap<String, Vec<Holder>>,
    waiters: usize,
}

impl MasterViews {
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

    /// Returns the most masters that one holder has.
    fn most(&self) -> usize {
        self.holders.values().map(Vec::len).max().unwrap_or_default()
    }

    /// Returns the holders with a majority, each with the time that it keeps one.
    fn agreed(self, quorum: usize) -> LockState {
        let mut holders: Vec<_> = self
            .holders
            .into_values()
            .filter_map(|mut seen| {
                seen.sort_by_key(|holder| std::cmp::Reverse(holder.left));
                let left = seen.get(quorum - 1)?.left;
                // Masters that did not confirm its tokens report older ones.
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
