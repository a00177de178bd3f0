//! A claim that holds by an advisory lock, in a session of its own.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, LockKind, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal},
};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::types::FromSql;

use crate::{
    NAME,
    backend::{Shared, check_ttl, require_runtime},
    connection::{Parameter, Query, Reply},
    control::Control,
    error::{Failure, code, failed},
    layout::{self, Keys},
    schema::TOKENS_PER_GRANT,
    session::{REPLY_TIMEOUT, Session, SessionId},
    sql,
};

/// A wait that is shorter is over before anybody asks whether the server has it wait. To ask costs more than a try.
const SHORT_WAIT: Duration = Duration::from_millis(50);

/// The head of a semaphore's queue looks at the permits so often.
const LOOKS: Duration = Duration::from_millis(20);

/// The time after which a hold that is known to be lost is told of at the latest, whether or not it is known why.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct PostgresClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    keys: Keys,
    /// The keys of the permits; empty for a lock.
    permits: Arc<[i64]>,
    /// The lease as the server keeps it: the session's `idle_session_timeout`, in ms.
    lease: u32,
    stage: Stage,
    /// The beginning of the attempt under way, or of the last one.
    began: Instant,
    /// A time before the latest request was sent whose reply proves that the session lives.
    sent: Instant,
    /// The time of the grant.
    granted: Instant,
    shown: Shown,
    /// True if the session may have a row that shows a hold, as it is or as it was.
    has_row: bool,
    /// True while a cancel may be under way, which must not meet another claim's statement.
    is_interrupting: bool,
}

#[derive(Debug, Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "claims are boxed, and nearly always active"
)]
enum Stage {
    #[default]
    Idle,
    /// A dropped future leaves the request under way as it is, and the next call goes on from there.
    Active(Session, Activity),
    /// The connection was given up. The session is to be ended.
    Ending { session: SessionId, had: Had },
}

/// The holds of a session whose connection was given up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Had {
    /// No hold that anybody knows of.
    Nothing,
    /// A hold, which ends with the session.
    Hold,
    /// A hold that an earlier request of this claim may have ended with its session. That there is no such session says nothing of it.
    MayBeOver,
    /// A hold that had ended before. That there still is such a session means nothing: it may be about to end.
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum Activity {
    /// Tries the lock, or a permit.
    Trying,
    /// Waits in the server's queue.
    Waiting,
    /// Waits to be the head of a semaphore's queue.
    Queueing,
    /// Is the head of a semaphore's queue, and looks for a permit.
    Looking,
    /// Is the head, and has found no permit. Looks again when [`LOOKS`] is over, by this host's clock: a pause at the server would last for
    /// as long as its wall clock was set back.
    Pausing,
    /// Says how many permits a semaphore has.
    Making,
    /// Changes the number of permits of a semaphore that nobody uses.
    Resizing {
        size: i32,
    },
    /// Has the lock or a permit, and proves that the session lives.
    Proving {
        hold: Hold,
        sent: Instant,
    },
    Holding(Hold),
    /// Unlocks.
    Releasing,
    /// Unlocks all that the session may have. An error or a withdrawal tells nothing of what it has: locks outlive both.
    Cleaning {
        held: bool,
    },
}

/// The lock or permit that a session has, and its tokens.
#[derive(Clone, Copy, Debug)]
struct Hold {
    key: i64,
    /// The token in use.
    token: u64,
    last: u64,
}

/// The next activity of a claim that has a reply, whose request was started.
enum Next {
    Goes(Activity),
    /// The request may take long. [`notified`](Claim::notified) returns when its reply is there.
    Waits(Activity),
    /// Nothing is asked for a while. [`notified`](Claim::notified) returns when that is over.
    Pauses,
    Taken,
    Holds(Hold),
}

/// The hold as inspections see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Not,
    AsItIs,
    /// Shown with the token of the hold that passed it on, or with another ttl.
    Outdated,
    /// Somebody had locked the table. The next renewal tries again.
    Later,
    /// The server does not let it be shown. The hold is as good as any.
    Never,
}

/// The outcome of a step of an attempt.
enum Step {
    Again,
    Taken,
    Granted(Hold),
}

impl PostgresClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest) -> Self {
        let keys = Keys::new(&shared.namespace, request.mode.kind(), &request.name);
        let permits = match request.mode {
            Mode::Permits(_) => keys.held(layout::permits(request.mode)),
            _ => Arc::new([]),
        };
        Self {
            lease: milliseconds(request.ttl),
            shared,
            request,
            keys,
            permits,
            stage: Stage::Idle,
            began: Instant::now(),
            sent: Instant::now(),
            granted: Instant::now(),
            shown: Shown::Not,
            has_row: false,
            is_interrupting: false,
        }
    }

    /// Waits for the reply to a request of a dropped future. If that takes too long, the connection may be dead, and is given
    /// up. Waits in a queue last as long as they last.
    async fn receive_or_abandon(&mut self) {
        let Stage::Active(session, activity) = &mut self.stage else {
            return;
        };
        if !matches!(activity, Activity::Waiting | Activity::Queueing)
            && !session.receive_within(REPLY_TIMEOUT).await
        {
            self.abandon_stage(Had::Nothing);
            // The idle ones may be as dead.
            self.shared.sessions.discard_idle();
        }
    }

    /// Takes one step towards the lock: waits for what is under way, and decides by its result.
    async fn step(&mut self, patience: Duration) -> Result<Step> {
        match &mut self.stage {
            Stage::Idle => {
                let session = self.shared.sessions.get("acquire", self.lease).await?;
                return Ok(self.try_to_lock(session, patience));
            }
            Stage::Ending { .. } | Stage::Active(_, Activity::Releasing | Activity::Cleaning { .. }) => {
                return match self.withdraw().await {
                    Err(error) if !error.is_lost() => Err(error),
                    _ => Ok(Step::Again),
                };
            }
            Stage::Active(_, Activity::Pausing) => {
                self.look_again();
                return Ok(Step::Again);
            }
            Stage::Active(session, Activity::Waiting | Activity::Queueing) => {
                if !session.receive_within(SHORT_WAIT.min(patience)).await {
                    // Only the server knows that the lock is taken, and of a dead connection nothing is ever heard.
                    let id = session.id;
                    let waits = tokio::select! {
                        biased;
                        // The other connection may be dead, and the grant is not to wait for it.
                        () = session.receive() => None,
                        waits = self.shared.sessions.control.has_wait("acquire", id) => Some(waits?),
                    };
                    match waits {
                        None => {}
                        Some(true) => {
                            session.is_proven = true;
                            return Ok(Step::Taken);
                        }
                        Some(false) => {
                            self.abandon_stage(Had::Nothing);
                            // The idle ones may be as dead.
                            self.shared.sessions.discard_idle();
                            return Err(Error::transient(
                                NAME,
                                "acquire",
                                "the connection that waited for the lock went dead",
                            ));
                        }
                    }
                }
            }
            Stage::Active(session, _) => session.receive().await,
        }
        // Nothing is awaited from here to the next stage, but for a session that is put back.
        let Stage::Active(mut session, activity) = std::mem::take(&mut self.stage) else {
            return Ok(Step::Again);
        };
        if let Activity::Holding(hold) = activity {
            // The grant of an attempt whose result nobody read.
            let proving = self.prove(&mut session, hold);
            self.stage = Stage::Active(session, proving);
            return Ok(Step::Again);
        }
        let reply = match session.take_reply() {
            Ok(reply) => reply,
            Err(failure) => return self.failed(session, activity, failure),
        };
        session.is_proven = true;
        match self.decide(&mut session, activity, &reply, patience) {
            Ok(Next::Goes(activity)) => {
                self.stage = Stage::Active(session, activity);
                Ok(Step::Again)
            }
            Ok(Next::Waits(activity)) => {
                // Sends the request.
                session.has_reply();
                self.stage = Stage::Active(session, activity);
                Ok(Step::Taken)
            }
            Ok(Next::Pauses) => {
                self.stage = Stage::Active(session, Activity::Pausing);
                Ok(Step::Taken)
            }
            Ok(Next::Taken) => {
                self.shared.sessions.put(session).await;
                Ok(Step::Taken)
            }
            Ok(Next::Holds(hold)) => {
                tracing::trace!(lock = ?self.request.name, session = session.id.process, ?hold, "granted in a session");
                self.stage = Stage::Active(session, Activity::Holding(hold));
                Ok(Step::Granted(hold))
            }
            Err(refusal) => {
                // It may have locked something on the way.
                self.clean(session, false);
                Err(refusal)
            }
        }
    }

    fn try_to_lock(&mut self, mut session: Session, patience: Duration) -> Step {
        self.sent = Instant::now();
        // Most likely a try would be in vain again, and a request more.
        let waits = !patience.is_zero() && session.waited_for == Some(self.keys.queue);
        let (queries, activity) = match self.request.mode {
            Mode::Permits(_) => (self.look(sql::TRY_PERMIT), Activity::Trying),
            mode if waits => (vec![self.on_queue(wait_in(mode))], Activity::Waiting),
            Mode::Exclusive => (vec![self.on_queue(sql::TRY)], Activity::Trying),
            Mode::Shared => (vec![self.on_queue(sql::TRY_SHARED)], Activity::Trying),
        };
        session.send(self.lease, queries);
        self.stage = Stage::Active(session, activity);
        Step::Again
    }

    /// Returns a statement about the key on which waiters queue.
    fn on_queue(&self, statement: &'static str) -> Query {
        Query::prepared(statement, vec![Parameter::Bigint(self.keys.queue)])
    }

    /// Returns a look for a free permit. The size is read after it: while a permit is held, nobody changes it.
    fn look(&self, statement: &'static str) -> Vec<Query> {
        let parameters = vec![
            Parameter::Bigints(self.permits.clone()),
            Parameter::Bigint(self.keys.queue),
            Parameter::Int(self.size()),
        ];
        vec![Query::prepared(statement, parameters), self.on_queue(sql::SIZE)]
    }

    /// Returns the size of the semaphore that is asked for. The backend has bounded it.
    fn size(&self) -> i32 {
        i32::try_from(layout::permits(self.request.mode)).unwrap_or(i32::MAX)
    }

    /// Decides by the reply to what was under way. Starts the next request, if there is one.
    fn decide(
        &mut self,
        session: &mut Session,
        activity: Activity,
        reply: &Reply,
        patience: Duration,
    ) -> Result<Next> {
        match (activity, self.request.mode) {
            (Activity::Trying, Mode::Exclusive | Mode::Shared) => {
                if reply.first().is_none_or(Vec::is_empty) {
                    // Taken is what the server says, and not what it leaves out.
                    return Err(unexpected());
                }
                if let Some(token) = value::<i64>(reply, 0, 0)? {
                    return self.locked(session, self.keys.queue, token);
                }
                if patience.is_zero() {
                    return Ok(Next::Taken);
                }
                self.sent = Instant::now();
                session.waited_for = Some(self.keys.queue);
                session.send(self.lease, vec![self.on_queue(wait_in(self.request.mode))]);
                Ok(Next::Waits(Activity::Waiting))
            }
            (Activity::Waiting, _) => {
                let token = value::<i64>(reply, 0, 0)?.ok_or_else(unexpected)?;
                self.locked(session, self.keys.queue, token)
            }
            (Activity::Trying | Activity::Looking, Mode::Permits(_)) => {
                self.looked(session, activity, reply, patience)
            }
            (Activity::Queueing, _) => {
                session.send(self.lease, self.look(sql::TRY_PERMIT_AT_HEAD));
                self.sent = Instant::now();
                Ok(Next::Goes(Activity::Looking))
            }
            (Activity::Making, _) => {
                // It may be the head of the queue, if somebody has emptied the table since it began to wait.
                session.send(self.lease, vec![Query::prepared(sql::UNLOCK_ALL, Vec::new())]);
                Ok(Next::Goes(Activity::Cleaning { held: false }))
            }
            (Activity::Resizing { size }, _) => {
                let is_alone: Option<bool> = value(reply, 0, 0)?;
                let is_resized = value::<bool>(reply, 0, 1)? == Some(true);
                let (name, wanted) = (&self.request.name, self.size());
                let why = format!("semaphore `{name}` is in use with {size} permits, not {wanted}");
                if is_resized || value::<i32>(reply, 1, 0)? != Some(size) {
                    // Changed here, or by another since it was read.
                    session.send(self.lease, vec![Query::prepared(sql::UNLOCK_ALL, Vec::new())]);
                    Ok(Next::Goes(Activity::Cleaning { held: false }))
                } else if is_alone == Some(true) {
                    Err(Error::invalid_option(
                        "permits",
                        format!("{why}; ask for the same number everywhere"),
                    ))
                } else {
                    Err(Error::transient(
                        NAME,
                        "acquire",
                        format!("{why}, and others change that"),
                    ))
                }
            }
            (Activity::Proving { hold, sent }, _) => {
                if value::<i32>(reply, 0, 0)? != Some(session.id.process) {
                    return Err(another_session());
                }
                // It may prove what was so at the time of an attempt that was dropped.
                if sent < self.began {
                    return Ok(Next::Goes(self.prove(session, hold)));
                }
                self.sent = sent;
                Ok(Next::Holds(hold))
            }
            _ => Err(unexpected()),
        }
    }

    fn looked(
        &mut self,
        session: &mut Session,
        activity: Activity,
        reply: &Reply,
        patience: Duration,
    ) -> Result<Next> {
        if reply.first().is_none_or(Vec::is_empty) {
            // A look has a row, whatever it has found.
            return Err(unexpected());
        }
        let Some(size) = value::<i32>(reply, 1, 0)? else {
            let parameters = vec![Parameter::Bigint(self.keys.queue), Parameter::Int(self.size())];
            session.send(self.lease, vec![Query::prepared(sql::MAKE_SEMAPHORE, parameters)]);
            return Ok(Next::Goes(Activity::Making));
        };
        if size != self.size() {
            let current = u32::try_from(size).unwrap_or(0);
            let parameters = vec![
                Parameter::Bigint(self.keys.queue),
                Parameter::Int(self.size()),
                Parameter::Int(size),
                Parameter::Bigints(self.keys.held(current)),
                Parameter::Bigint(self.keys.size()),
            ];
            session.send(
                self.lease,
                vec![Query::once(sql::RESIZE, parameters), self.on_queue(sql::SIZE)],
            );
            return Ok(Next::Goes(Activity::Resizing { size }));
        }
        if let (Some(permit), Some(token)) = (value::<i64>(reply, 0, 0)?, value::<i64>(reply, 0, 1)?) {
            let key = nth(&self.permits, permit).ok_or_else(unexpected)?;
            return self.locked(session, key, token);
        }
        if value::<i32>(reply, 0, 2)? != Some(size) {
            // It has this size since, and no permit was tried.
            let statement = match activity {
                Activity::Trying => sql::TRY_PERMIT,
                _ => sql::TRY_PERMIT_AT_HEAD,
            };
            self.sent = Instant::now();
            session.send(self.lease, self.look(statement));
            return Ok(Next::Goes(activity));
        }
        match activity {
            Activity::Trying if patience.is_zero() => Ok(Next::Taken),
            Activity::Trying => {
                session.send(self.lease, vec![self.on_queue(sql::WAIT_FOR_HEAD)]);
                Ok(Next::Waits(Activity::Queueing))
            }
            _ => Ok(Next::Pauses),
        }
    }

    /// Looks for a permit once more, as the head of the queue.
    fn look_again(&mut self) {
        let queries = self.look(sql::TRY_PERMIT_AT_HEAD);
        if let Stage::Active(session, activity) = &mut self.stage {
            self.sent = Instant::now();
            session.send(self.lease, queries);
            *activity = Activity::Looking;
        }
    }

    /// Has this key, with this first token. A reply that is read late may be about a lock that was lost since.
    /// # Errors
    /// If the server has drawn no token that later ones can be above.
    fn locked(&mut self, session: &mut Session, key: i64, token: i64) -> Result<Next> {
        let tokens = self.request.tokens.get().min(TOKENS_PER_GRANT);
        let last = token.checked_add(i64::from(tokens) - 1);
        let (1.., Some(last)) = (token, last) else {
            let why =
                format!("the server has drawn {token} from the sequence lockkit.token, which is no token");
            return Err(Error::permanent(NAME, "acquire", why));
        };
        let hold = Hold {
            key,
            token: token.unsigned_abs(),
            last: last.unsigned_abs(),
        };
        self.granted = Instant::now();
        if self.sent.elapsed() > self.length() / 3 {
            return Ok(Next::Goes(self.prove(session, hold)));
        }
        Ok(Next::Holds(hold))
    }

    /// Has the session prove that it lives, and with it the lock.
    fn prove(&self, session: &mut Session, hold: Hold) -> Activity {
        let sent = Instant::now();
        session.send(self.lease, vec![Query::prepared(sql::PROVE, Vec::new())]);
        Activity::Proving { hold, sent }
    }

    fn grant(&self, hold: Hold) -> Grant {
        Grant::new(hold.token..=hold.last, Lease::new(self.sent, Some(self.length())))
    }

    /// The lease, less an allowance for the server's clock.
    fn length(&self) -> Duration {
        let kept = Duration::from_millis(self.lease.into());
        kept.mul_f64(0.99).saturating_sub(Duration::from_millis(20))
    }

    /// Goes on after a request that has failed.
    fn failed(&mut self, session: Session, activity: Activity, failure: Failure) -> Result<Step> {
        if session.ended_idle(&failure) {
            // The other idle ones may have ended as well.
            self.shared.sessions.discard_idle();
            if failure.database().is_none() {
                // The server has not said that it ended the session, which may have the lock.
                self.abandon(session, Had::Nothing);
            }
            return Ok(Step::Again);
        }
        if failure.ends_the_session() {
            self.abandon(session, Had::Nothing);
            if matches!(activity, Activity::Proving { .. }) {
                // What it had is lost, and is asked for anew.
                return Ok(Step::Again);
            }
            return Err(failed("acquire", failure));
        }
        self.clean(session, false);
        if failure.is_interruption() {
            // An operator has cancelled the wait, or it was chosen to end a deadlock.
            return Ok(Step::Again);
        }
        Err(failed("acquire", failure))
    }

    /// Unlocks all that the session may have.
    fn clean(&mut self, mut session: Session, held: bool) {
        session.send(self.lease, vec![Query::prepared(sql::UNLOCK_ALL, Vec::new())]);
        // Sends it, since this claim may not be asked again.
        session.has_reply();
        self.stage = Stage::Active(session, Activity::Cleaning { held });
    }

    /// Closes the connection, and has the session ended: it may have the lock, or wait for it.
    fn abandon(&mut self, session: Session, had: Had) {
        let id = session.id;
        drop(session);
        self.stage = Stage::Ending { session: id, had };
        self.shown = Shown::Not;
        self.has_row = false;
        self.is_interrupting = false;
    }

    fn abandon_stage(&mut self, had: Had) {
        match std::mem::take(&mut self.stage) {
            Stage::Active(session, _) => self.abandon(session, had),
            stage => self.stage = stage,
        }
    }

    /// Puts a session that has nothing among the idle ones, unless it may show what it had, or may be met by a late cancel.
    async fn put_back(&mut self, session: Session, is_unfit: bool) {
        self.shown = Shown::Not;
        self.has_row = false;
        self.is_interrupting = false;
        if is_unfit {
            session.quit().await;
        } else {
            self.shared.sessions.put(session).await;
        }
    }

    /// Leaves nothing of the claim at the server.
    async fn withdraw(&mut self) -> Result<()> {
        // A request of this call has the caller's time. One of a future that was dropped has had it.
        let mut is_ours = false;
        loop {
            let (session, activity) = match &mut self.stage {
                Stage::Idle => return Ok(()),
                Stage::Ending { .. } => return self.end(None).await,
                Stage::Active(session, activity) => (session, activity),
            };
            let held = match activity {
                Activity::Holding(_) | Activity::Releasing => true,
                Activity::Cleaning { held } => *held,
                _ => false,
            };
            let is_over = match activity {
                // The wait would go on. Interrupted, its session can be kept.
                Activity::Waiting | Activity::Queueing if !session.has_reply() => {
                    let control = &self.shared.sessions.control;
                    // Of a future that is dropped here, nobody knows when the server gets its cancel.
                    self.is_interrupting = true;
                    let interrupted = timeout(REPLY_TIMEOUT, interrupt(control, session)).await;
                    self.is_interrupting &= !matches!(interrupted, Ok(Ok(())));
                    !self.is_interrupting
                }
                _ if is_ours => {
                    session.receive().await;
                    true
                }
                _ => session.receive_within(REPLY_TIMEOUT).await,
            };
            if !is_over {
                // The connection may be dead. The session is ended over another.
                self.abandon_stage(if held { Had::Hold } else { Had::Nothing });
                continue;
            }
            match activity {
                Activity::Holding(Hold { key, .. })
                    if session.failure().is_none_or(|it| !it.ends_the_session()) =>
                {
                    let unlock = match self.request.mode {
                        Mode::Shared => sql::UNLOCK_SHARED,
                        _ => sql::UNLOCK,
                    };
                    let mut queries = vec![Query::prepared(unlock, vec![Parameter::Bigint(*key)])];
                    // Behind it, since the next holder waits for the lock and not for the row.
                    if self.has_row {
                        queries.push(Query::prepared(sql::HIDE, Vec::new()).optional());
                    }
                    session.send(self.lease, queries);
                    *activity = Activity::Releasing;
                    is_ours = true;
                    continue;
                }
                Activity::Holding(_) | Activity::Releasing | Activity::Cleaning { .. } => {}
                _ => {
                    session.send(self.lease, vec![Query::prepared(sql::UNLOCK_ALL, Vec::new())]);
                    *activity = Activity::Cleaning { held: false };
                    is_ours = true;
                    continue;
                }
            }
            let Stage::Active(mut session, activity) = std::mem::take(&mut self.stage) else {
                return Ok(());
            };
            match session.take_reply() {
                Ok(reply) => return self.unlocked(session, activity, &reply).await,
                Err(failure) if failure.ends_the_session() => {
                    self.abandon(session, if held { Had::Lost } else { Had::Nothing });
                    let reason = self.reason(&failure).await;
                    return self.end(Some(reason)).await;
                }
                // An operator may have cancelled it. Whether it was carried out is not known.
                Err(_) => {
                    self.clean(session, held);
                    is_ours = true;
                }
            }
        }
    }

    /// Decides by the reply to an unlock.
    async fn unlocked(&mut self, session: Session, activity: Activity, reply: &Reply) -> Result<()> {
        let is_clean = matches!(activity, Activity::Cleaning { .. });
        let was_held = match value::<bool>(reply, 0, 0) {
            _ if is_clean => true,
            Ok(was_held) => was_held == Some(true),
            Err(error) => {
                // Nobody can tell. The next call ends the session.
                self.abandon(session, Had::Hold);
                return Err(error);
            }
        };
        if !was_held {
            // Nobody else can unlock in this session, so it was another one that replied. If this future is dropped, the next one tells.
            self.abandon(session, Had::Lost);
            return self.end(Some(LossReason::Revoked)).await;
        }
        // Behind the unlock, there is a reply if the row is gone.
        let is_shown = self.has_row && (is_clean || reply.len() < 2);
        self.put_back(session, is_shown || self.is_interrupting).await;
        Ok(())
    }

    /// Ends the session whose connection was given up.
    ///
    /// # Errors
    /// [`Error::Lost`] if a hold had ended before, for this reason if that is known.
    async fn end(&mut self, reason: Option<LossReason>) -> Result<()> {
        let Stage::Ending { session, had } = self.stage else {
            return Ok(());
        };
        // Of one that only waited, its next attempt ends what is left.
        let operation = if had == Had::Nothing { "acquire" } else { "release" };
        let control = &self.shared.sessions.control;
        control.refresh(operation).await?;
        if had == Had::Hold {
            // From here on its reply may be lost, or its future dropped.
            self.stage = Stage::Ending {
                session,
                had: Had::MayBeOver,
            };
        }
        let was_there = control.terminate(operation, session).await?;
        self.stage = Stage::Idle;
        match had {
            // The last one holds no more. Whoever asked before this was told that nobody could tell.
            Had::Nothing | Had::MayBeOver => Ok(()),
            Had::Hold if was_there => Ok(()),
            Had::Hold | Had::Lost => Err(self.lost(reason.unwrap_or(LossReason::Disconnected))),
        }
    }

    /// Returns why the session of a hold has ended: its lease was over, an operator ended it at a server that goes on, or anything
    /// else.
    async fn reason(&mut self, failure: &Failure) -> LossReason {
        match failure.code() {
            code::IDLE_SESSION_TIMEOUT => LossReason::Expired,
            // The holder is told after that, and not later because the other connection is dead.
            code::ADMIN_SHUTDOWN
                if timeout(REASON_TIMEOUT, self.shared.sessions.control.is_still_there())
                    .await
                    .unwrap_or(false) =>
            {
                LossReason::Revoked
            }
            _ => LossReason::Disconnected,
        }
    }

    fn lost(&self, reason: LossReason) -> Error {
        Error::lost(NAME, self.request.name.clone(), reason)
    }

    /// Writes the label in ASCII, if it has a character that the database's encoding does not have.
    fn translates_label(&mut self, failure: &Failure) -> bool {
        let label = self.request.label.as_ref().filter(|label| !label.is_ascii());
        let Some(label) = label.filter(|_| failure.code() == code::UNTRANSLATABLE_CHARACTER) else {
            return false;
        };
        let mut translated = String::new();
        for character in label.chars() {
            if character.is_ascii() {
                translated.push(character);
            } else {
                translated.extend(character.escape_unicode());
            }
        }
        self.request.label = Some(translated.into());
        true
    }

    /// Returns the statement that shows the hold as it is now; `None` if it is shown so.
    fn show(&self, hold: Hold) -> Option<Query> {
        let token = Parameter::Bigint(hold.token.cast_signed());
        let lease = Parameter::Int(self.lease.cast_signed());
        match self.shown {
            Shown::AsItIs | Shown::Never => None,
            Shown::Outdated => Some(Query::prepared(sql::SHOW_CHANGED, vec![token, lease])),
            Shown::Not | Shown::Later => {
                let ago = i64::try_from(self.granted.elapsed().as_millis()).unwrap_or(0);
                let parameters = vec![
                    Parameter::Bigint(hold.key),
                    Parameter::Bigint(self.keys.queue),
                    token,
                    lease,
                    Parameter::Text(Some(self.shared.namespace.clone())),
                    Parameter::Bytes(self.request.name.as_str().as_bytes().to_vec()),
                    Parameter::Int(i32::from(self.request.mode.kind() == LockKind::Semaphore)),
                    Parameter::Text(self.request.label.clone()),
                    Parameter::Bigint(ago),
                ];
                Some(Query::prepared(sql::SHOW, parameters))
            }
        }
    }
}

#[async_trait]
impl Claim for PostgresClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime("acquire")?;
        self.began = Instant::now();
        self.receive_or_abandon().await;
        loop {
            match self.step(patience).await? {
                Step::Again => {}
                Step::Taken => return Ok(None),
                Step::Granted(hold) => return Ok(Some(self.grant(hold))),
            }
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime("renew")?;
        let Stage::Active(_, Activity::Holding(hold)) = self.stage else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let mut show = self.show(hold);
        let Stage::Active(session, _) = &mut self.stage else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let process = session.id.process;
        // The hold may have been shown, without success.
        session.receive().await;
        let mut failure = match session.failure() {
            Some(_) => session.take_reply().err(),
            None => None,
        };
        let failure = loop {
            let is_shown = show.is_some();
            let sent = Instant::now();
            let outcome = match failure.take() {
                Some(failure) => Err(failure),
                None => {
                    // To show it alone would not say which session has replied.
                    let prove = Query::prepared(sql::PROVE, Vec::new());
                    let queries = show.take().into_iter().chain([prove]).collect();
                    if is_shown {
                        self.shown = Shown::AsItIs;
                        self.has_row = true;
                    }
                    let Stage::Active(session, _) = &mut self.stage else {
                        break Failure::Ended;
                    };
                    session.run(self.lease, queries).await
                }
            };
            match outcome {
                Ok(reply) => {
                    if value::<i32>(&reply, usize::from(is_shown), 0)? != Some(process) {
                        break Failure::Ended;
                    }
                    self.sent = sent;
                    return Ok(Renewal::Held(Lease::new(sent, Some(self.length()))));
                }
                Err(failure) if failure.ends_the_session() => break failure,
                // The hold goes on without.
                Err(failure) if failure.code() == code::LOCK_NOT_AVAILABLE => {
                    self.shown = Shown::Later;
                    show = None;
                }
                // An operator has cancelled it.
                Err(failure) if self.shown == Shown::Never || failure.is_interruption() => {
                    self.shown = Shown::Not;
                    return Err(failed("renew", failure));
                }
                Err(failure) if self.translates_label(&failure) => {
                    self.shown = Shown::Not;
                    show = self.show(hold);
                }
                Err(failure) => {
                    // Inspections do not see the hold. Otherwise it is as good as any.
                    let error = self.shared.secrets.chain(&failure);
                    tracing::warn!(lock = ?self.request.name, error, "a hold cannot be shown to inspections");
                    self.shown = Shown::Never;
                    show = None;
                }
            }
        };
        // A release after this future was dropped is to know it, too.
        self.abandon_stage(Had::Lost);
        Ok(Renewal::Lost(self.reason(&failure).await))
    }

    /// The session has one connection, which keeps the order of requests. Its next request sets the time that the server waits for it.
    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        check_ttl(ttl)?;
        self.request.ttl = ttl;
        self.lease = milliseconds(ttl);
        if self.shown == Shown::AsItIs {
            self.shown = Shown::Outdated;
        }
        Ok(Some(self.length()))
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime("release")?;
        self.withdraw().await
    }

    async fn notified(&mut self) {
        let show = match &self.stage {
            Stage::Active(_, Activity::Holding(hold)) if self.shown == Shown::Not => self.show(*hold),
            _ => None,
        };
        let (session, activity) = match &mut self.stage {
            Stage::Active(session, activity) => (session, activity),
            // A renewal that was dropped has found it out, and the next one tells.
            Stage::Ending { had: Had::Lost, .. } => return,
            _ => return std::future::pending().await,
        };
        match activity {
            Activity::Waiting | Activity::Queueing | Activity::Looking => session.receive().await,
            Activity::Pausing => sleep_until(self.sent + LOOKS).await,
            // A renewal shows its token.
            Activity::Holding(_) if self.shown == Shown::Outdated => {}
            Activity::Holding(_) => {
                if let Some(show) = show {
                    session.send(self.lease, vec![show]);
                    self.shown = Shown::AsItIs;
                    self.has_row = true;
                }
                session.receive().await;
                // The renewal finds out why it failed. From then on, the server tells of the session's end by itself.
                if session.failure().is_none() {
                    session.ended().await;
                }
            }
            _ => std::future::pending().await,
        }
    }

    fn passed_on(&mut self, token: FencingToken) {
        if let Stage::Active(_, Activity::Holding(hold)) = &mut self.stage {
            hold.token = token.get();
            if self.shown == Shown::AsItIs {
                self.shown = Shown::Outdated;
            }
        }
    }
}

/// Returns the statement that waits for a lock in this mode.
fn wait_in(mode: Mode) -> &'static str {
    match mode {
        Mode::Shared => sql::WAIT_SHARED,
        _ => sql::WAIT,
    }
}

/// Interrupts a wait, and receives its reply: that it was interrupted, or that it was over before.
async fn interrupt(control: &Control, session: &mut Session) -> Result<()> {
    // A cancel over another connection may overtake the request, and would be ignored.
    while !control.cancel("acquire", session.id).await? {
        if session.has_reply() {
            return Ok(());
        }
    }
    session.receive().await;
    Ok(())
}

/// Returns the ttl in the whole milliseconds that a server counts in, up to the longest that it can count.
fn milliseconds(ttl: Duration) -> u32 {
    let whole = ttl.as_micros().div_ceil(1_000).max(1);
    u32::try_from(whole)
        .unwrap_or(u32::MAX)
        .min(i32::MAX.unsigned_abs())
}

/// Reads a column of the first row of a statement; `None` for `NULL`, and where there is no row.
fn value<T: for<'a> FromSql<'a>>(reply: &Reply, statement: usize, column: usize) -> Result<Option<T>> {
    let Some(row) = reply.get(statement).and_then(|rows| rows.first()) else {
        return Ok(None);
    };
    row.try_get(column)
        .map_err(|error| failed("acquire", error.into()))
}

/// Returns the key of this permit, the first being 1.
fn nth(permits: &[i64], permit: i64) -> Option<i64> {
    let index = usize::try_from(permit.checked_sub(1)?).ok()?;
    permits.get(index).copied()
}

fn unexpected() -> Error {
    Error::permanent(NAME, "acquire", "the server's reply is not one to this request")
}

fn another_session() -> Error {
    Error::permanent(
        NAME,
        "acquire",
        "another session has replied: there is a pooler between; connect to the server directly",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_that_there_is_not_has_no_key() {
        let permits = [7, 8];
        assert_eq!((nth(&permits, 1), nth(&permits, 2)), (Some(7), Some(8)));
        for permit in [i64::MIN, -1, 0, 3, i64::MAX] {
            assert_eq!(nth(&permits, permit), None, "{permit}");
        }
    }
}
