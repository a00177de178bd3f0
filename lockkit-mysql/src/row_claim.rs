//! A claim that holds by a row lock, in a session of its own.

use std::{ops::RangeInclusive, pin::pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::{Either, select};
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal, require_runtime},
};
use sqlx::mysql::MySqlRow;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    NAME,
    backend::Shared,
    connection::{Reply, column},
    control::{AbandonedSession, Control, KillOutcome},
    error::{self, code},
    row_sql::{self, RowSql},
    server,
    session::{REPLY_TIMEOUT, Session},
    tokens::Mapping,
};

/// The time for which an attempt waits for a row before it asks whether the server has it wait. Most holds that are worth such
/// a wait are shorter.
const WAITS_UNASKED: Duration = Duration::from_millis(50);

/// The beginning of the server's state of a session that waits for a table, or for all of them. A wait for a row has no such
/// state, on either flavour.
pub(crate) const WAITS_FOR_A_TABLE: &str = "Waiting for ";

#[derive(Debug)]
pub(crate) struct RowClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    sql: RowSql,
    /// The lease as the server keeps it: the session's `wait_timeout`.
    seconds: u32,
    stage: Stage,
    /// The beginning of the attempt under way, or of the last one.
    began: Instant,
    /// A time before the latest request was sent whose reply proves that the session lives.
    sent: Instant,
    shown: Shown,
    /// True if the latest reply within the hold was no error, so that its transaction is there.
    is_intact: bool,
    /// True if this claim has just made the rows. If they are missing then, somebody deletes them.
    has_made: bool,
    /// Changes when connections break.
    breaks: watch::Receiver<u64>,
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
    /// The connection was given up. The session is to be killed.
    Ending { session: AbandonedSession, had: Had },
}

/// The holds of a session whose connection was given up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Had {
    /// No hold that anybody knows of.
    Nothing,
    /// A hold, which ends with the session.
    Hold,
    /// A hold that had ended before. A session whose connection has ended is there for a moment yet, and another may have its lock
    /// by then: that it could be killed means nothing.
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum Activity {
    /// Tries to lock the row. Checks first that the row is there if `checks_rows`.
    Trying { checks_rows: bool },
    /// Leaves the transaction of a try that found the row locked or missing.
    Leaving,
    /// Waits for the row. The server has not said yet that there is one and that anybody has it.
    Queueing,
    /// Waits for the row, which somebody has.
    Waiting,
    /// Waits a moment before the next try of a permit.
    Pausing,
    /// Makes the rows.
    Making { repair: bool },
    /// Locks all free permits of a semaphore of another size, to change the size.
    Resizing { size: u32, wanted: u32 },
    /// Asks whether a semaphore of another size is in use.
    Refusing { size: u32, wanted: u32, sent: Instant },
    /// Has the row and a ticket. Reserves tokens for it.
    Reserving { ticket: u64, mapping: Mapping },
    /// Has the row and tokens. Proves that it still has the row.
    Proving { token: u64, last: u64, sent: Instant },
    /// Holds, with the tokens from this one to the last.
    Holding { token: u64, last: u64 },
    /// Rolls the transaction back.
    RollingBack { held: bool },
}

/// The hold as inspections see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Not,
    AsItIs,
    /// Shown with the token of the hold that passed it on, or with another ttl.
    Outdated,
}

/// The outcome of a step of an attempt.
enum Step {
    Again,
    Taken,
    Granted(RangeInclusive<u64>),
}

/// The state of a wait for the row.
enum Wait {
    /// The reply is here.
    Over,
    /// The server has the session wait.
    GoesOn,
    /// The server has the session wait for a table, or has not heard of it yet.
    Unknown,
    /// The server knows nothing of it. The connection is dead.
    Dead,
}

impl RowClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, sql: RowSql) -> Self {
        let seconds = seconds(request.ttl);
        Self {
            breaks: shared.sessions.disconnect_watch.subscribe(),
            shared,
            request,
            sql,
            seconds,
            stage: Stage::Idle,
            began: Instant::now(),
            sent: Instant::now(),
            shown: Shown::Not,
            is_intact: false,
            has_made: false,
        }
    }

    /// Waits for the reply to a request of a dropped future. If that takes too long, the connection may be dead, and is given
    /// up. Waits for the row and rollbacks have limits of their own.
    async fn receive_or_abandon(&mut self) {
        let Stage::Active(session, activity) = &mut self.stage else {
            return;
        };
        if !matches!(
            activity,
            Activity::Queueing | Activity::Waiting | Activity::RollingBack { .. }
        ) && !session.receive_within(REPLY_TIMEOUT).await
        {
            self.abandon_stage(Had::Nothing);
            // The idle ones may be as dead.
            self.shared.sessions.discard_idle();
        }
    }

    /// Takes one step towards the lock: waits for what is under way, and decides by its result.
    async fn step(&mut self, patience: Duration) -> Result<Step> {
        let mut reserved = Ok(None);
        match &mut self.stage {
            Stage::Idle => return self.enter(patience).await,
            Stage::Ending { .. } | Stage::Active(_, Activity::RollingBack { .. }) => {
                return match self.withdraw().await {
                    Err(error) if !error.is_lost() => Err(error),
                    _ => Ok(Step::Again),
                };
            }
            Stage::Active(session, activity @ (Activity::Queueing | Activity::Waiting)) => {
                let is_queueing = matches!(activity, Activity::Queueing);
                match wait_in_queue(&self.shared, session, is_queueing, self.sent, patience).await? {
                    Wait::Over => {}
                    Wait::GoesOn => {
                        if is_queueing {
                            self.shared.names.note_taken(self.sql.key());
                            *activity = Activity::Waiting;
                        }
                        return Ok(Step::Taken);
                    }
                    Wait::Unknown => return Ok(Step::Again),
                    Wait::Dead => {
                        self.abandon_stage(Had::Nothing);
                        return Err(error::waiter_went_dead());
                    }
                }
            }
            Stage::Active(session, Activity::Reserving { ticket, mapping }) => {
                let count = self.request.tokens.get().into();
                let control = &self.shared.sessions.control;
                reserved = reserve(control, &self.sql, session, (*ticket, *mapping), count).await;
            }
            Stage::Active(session, _) => session.receive().await,
        }
        // Nothing is awaited from here to the next stage.
        match std::mem::take(&mut self.stage) {
            Stage::Active(session, activity) => match activity {
                Activity::Trying { checks_rows } => self.tried(session, checks_rows, patience),
                Activity::Leaving => self.left(session, patience).await,
                Activity::Queueing => self.waited(session, true),
                Activity::Waiting => self.waited(session, false),
                Activity::Pausing => self.paused(session, patience),
                Activity::Making { repair } => self.made(session, repair),
                Activity::Resizing { size, wanted } => self.resized(session, size, wanted),
                Activity::Refusing { sent, .. } if sent < self.began => Ok(self.try_to_lock(session)),
                Activity::Refusing { size, wanted, .. } => self.refused(session, size, wanted).await,
                Activity::Reserving { .. } => self.reserved(session, reserved).await,
                Activity::Proving { token, last, sent } => self.proved(session, token, last, sent),
                // The grant of an attempt whose result nobody read.
                Activity::Holding { token, last } => Ok(self.prove(session, token, last)),
                Activity::RollingBack { .. } => Ok(self.begin(session, activity)),
            },
            stage => {
                self.stage = stage;
                Ok(Step::Again)
            }
        }
    }

    /// Goes on with an activity whose request, if any, was started.
    fn begin(&mut self, session: Session, activity: Activity) -> Step {
        self.stage = Stage::Active(session, activity);
        Step::Again
    }

    async fn enter(&mut self, patience: Duration) -> Result<Step> {
        let sessions = &self.shared.sessions;
        let session = sessions.get_in_life("acquire", self.seconds).await?;
        let is_likely_taken = self.shared.names.was_taken(self.sql.key());
        if is_likely_taken && !patience.is_zero() && !self.sql.is_permit() {
            // A try would be in vain.
            self.wait(session, Activity::Queueing, self.sql.wait());
            return Ok(Step::Again);
        }
        Ok(self.try_to_lock(session))
    }

    fn try_to_lock(&mut self, mut session: Session) -> Step {
        let checks_rows = !self.shared.names.has_rows(self.sql.key());
        let lock = self.sql.lock_or_skip();
        self.sent = Instant::now();
        if session.prepares && session.has_timeout(self.seconds) && !checks_rows {
            session.execute(lock, self.sql.key().as_bytes());
        } else {
            let mut request = self.sql.named(lock);
            if checks_rows {
                request = format!("{}; {request}", self.sql.exists());
            }
            session.send(self.seconds, request);
        }
        self.begin(session, Activity::Trying { checks_rows })
    }

    fn tried(&mut self, mut session: Session, checks_rows: bool, patience: Duration) -> Result<Step> {
        let reply = match session.take_reply() {
            Ok(reply) => reply,
            Err(error) if session.ended_idle(&error) => return Ok(self.start_over()),
            Err(error) => match error::number(&error) {
                // The limit is one of all clients together. As text the statement always works.
                Some(code::MAX_PREPARED_STMT_COUNT_REACHED | code::NEED_REPREPARE) if session.prepares => {
                    session.prepares = false;
                    return Ok(self.try_to_lock(session));
                }
                _ => return Err(self.failed(session, error)),
            },
        };
        session.is_proven = true;
        if let Some(row) = reply.last().first() {
            return self.locked(session, row);
        }
        if checks_rows && reply.rows(0).is_empty() {
            // If this claim has just made them, the counter was there and they were not: somebody deleted them.
            let repair = std::mem::take(&mut self.has_made);
            return Ok(self.make(session, repair));
        }
        if patience.is_zero() || self.sql.is_permit() {
            return Ok(self.leave(session));
        }
        self.shared.names.note_taken(self.sql.key());
        if checks_rows {
            return Ok(self.wait(session, Activity::Waiting, self.sql.wait()));
        }
        // The row is locked, or somebody has deleted it.
        self.wait(session, Activity::Queueing, self.sql.wait());
        Ok(Step::Again)
    }

    /// Has the server wait. [`notified`](Claim::notified) returns when the wait ends.
    fn wait(&mut self, mut session: Session, activity: Activity, request: String) -> Step {
        self.sent = Instant::now();
        session.send(self.seconds, request);
        // Sends it.
        session.has_reply();
        self.stage = Stage::Active(session, activity);
        Step::Taken
    }

    fn waited(&mut self, mut session: Session, is_queueing: bool) -> Result<Step> {
        let reply = session.take_reply();
        if let Err(error) = &reply
            && is_queueing
            && session.ended_idle(error)
        {
            return Ok(self.start_over());
        }
        session.is_proven = true;
        match reply {
            Ok(reply) => match reply.last().first() {
                Some(row) => self.locked(session, row),
                None => Ok(self.make(session, true)),
            },
            Err(error) => match error::number(&error) {
                // The wait was too long for the server, ended a deadlock, or was interrupted by an operator. The transaction has
                // locked nothing.
                Some(code::LOCK_WAIT_TIMEOUT | code::DEADLOCK | code::QUERY_INTERRUPTED) => {
                    Ok(self.try_to_lock(session))
                }
                _ => Err(self.failed(session, error)),
            },
        }
    }

    /// Leaves the transaction, after it has checked that the rows are there: an idle session has none open.
    fn leave(&mut self, mut session: Session) -> Step {
        session.send(self.seconds, format!("{}; ROLLBACK", self.sql.exists()));
        self.begin(session, Activity::Leaving)
    }

    async fn left(&mut self, session: Session, patience: Duration) -> Result<Step> {
        let (mut session, reply) = self.take_reply(session)?;
        let Some(row) = reply.row(0) else {
            // The name was used before, so they were deleted.
            return Ok(self.make(session, true));
        };
        if let Mode::Permits(wanted) = self.request.mode {
            let size: u32 = match column(row, 0) {
                Ok(size) => size,
                Err(error) => return Err(self.failed(session, error)),
            };
            let wanted = wanted.get();
            if size != wanted {
                session.send(self.seconds, self.sql.is_held());
                let sent = Instant::now();
                return Ok(self.begin(session, Activity::Refusing { size, wanted, sent }));
            }
            if !patience.is_zero() {
                return Ok(self.wait(session, Activity::Pausing, self.sql.pause_and_try()));
            }
        }
        self.put_back(session).await;
        Ok(Step::Taken)
    }

    fn paused(&mut self, session: Session, patience: Duration) -> Result<Step> {
        let (session, reply) = self.take_reply(session)?;
        if let Some(row) = reply.last().first() {
            return self.locked(session, row);
        }
        let size = reply.before_last().first().map(|row| column::<u32>(row, 0));
        Ok(match (self.request.mode, size) {
            (Mode::Permits(wanted), Some(Ok(size))) if size == wanted.get() && !patience.is_zero() => {
                self.wait(session, Activity::Pausing, self.sql.pause_and_try())
            }
            // It finds out why not, or makes the rows.
            _ => self.leave(session),
        })
    }

    fn make(&mut self, mut session: Session, repair: bool) -> Step {
        session.send(self.seconds, self.sql.create(repair));
        self.begin(session, Activity::Making { repair })
    }

    fn made(&mut self, mut session: Session, repair: bool) -> Result<Step> {
        match session.take_reply() {
            Ok(_) => {
                self.has_made = true;
                Ok(self.try_to_lock(session))
            }
            Err(error) => match error::number(&error) {
                // Another session makes them. The request begins with a rollback.
                Some(code::LOCK_WAIT_TIMEOUT | code::DEADLOCK) => Ok(self.make(session, repair)),
                _ => Err(self.failed(session, error)),
            },
        }
    }

    /// Decides on a row that was returned, and so is locked.
    fn locked(&mut self, mut session: Session, row: &MySqlRow) -> Result<Step> {
        if server::is_read_only(row) {
            return Err(self.demoted(session));
        }
        self.has_made = false;
        let (ticket, mapping, size) = match self.read(row) {
            Ok(read) => read,
            Err(error) => return Err(self.failed(session, error)),
        };
        if let Mode::Permits(wanted) = self.request.mode
            && wanted.get() != size
        {
            let wanted = wanted.get();
            session.send(self.seconds, self.sql.lock_all());
            return Ok(self.begin(session, Activity::Resizing { size, wanted }));
        }
        let Some(mapping) = mapping else {
            // A client without lockkit has made the row, and no mapping.
            return Ok(self.make(session, false));
        };
        let count = self.request.tokens.get().into();
        let Some(token) = mapping.first(ticket, session.life, count) else {
            return Ok(self.begin(session, Activity::Reserving { ticket, mapping }));
        };
        // A reply that is read late may be about a row that was lost since.
        let is_recent = self.sent.elapsed() <= self.length() / 3;
        if self.request.mode == Mode::Exclusive
            && is_recent
            && self.shared.names.note_grant(self.sql.key(), self.sent)
        {
            return Ok(self.hold(session, token, self.last(token)));
        }
        Ok(self.prove(session, token, self.last(token)))
    }

    /// Reads the ticket, the mapping, and the size of a semaphore.
    fn read(&self, row: &MySqlRow) -> sqlx::Result<(u64, Option<Mapping>, u32)> {
        let mapping: Option<String> = column(row, 1)?;
        let mapping = mapping.map(|mapping| mapping.parse()).transpose();
        let mapping = mapping.map_err(sqlx::Error::Decode)?;
        let size = if self.sql.is_permit() { column(row, 2)? } else { 0 };
        Ok((column(row, 0)?, mapping, size))
    }

    /// Changes the size of a semaphore that nobody uses: all of its permits are locked here.
    fn resized(&mut self, session: Session, size: u32, wanted: u32) -> Result<Step> {
        let (mut session, reply) = self.take_reply(session)?;
        if reply.last().len() != size as usize {
            return Ok(self.leave(session));
        }
        session.send(self.seconds, self.sql.resize(wanted));
        Ok(self.begin(session, Activity::Making { repair: true }))
    }

    /// Refuses a semaphore of another size, some of whose permits are locked. Who holds one is shown before. Who is not shown is
    /// trying, perhaps to change the size as well.
    async fn refused(&mut self, session: Session, size: u32, wanted: u32) -> Result<Step> {
        let (session, reply) = self.take_reply(session)?;
        // The holder may have changed the size before.
        let now = reply.row(3).map(|row| column::<u32>(row, 0));
        let is_held = reply.row(1).is_some() && matches!(now, Some(Ok(now)) if now == size);
        self.put_back(session).await;
        let name = &self.request.name;
        Err(if is_held {
            let why = format!("semaphore `{name}` is in use with {size} permits, not {wanted}");
            Error::invalid_option("permits", why)
        } else {
            let why = format!("semaphore {name:?} has {size} permits, not {wanted}, and others are at it");
            Error::transient(NAME, "acquire", why)
        })
    }

    /// Takes the first tokens of a block that was reserved. They are this claim's alone, even if other sessions have drawn tickets
    /// since, or have stored a mapping with higher tokens meanwhile.
    async fn reserved(&mut self, session: Session, last: Result<Option<Reserved>>) -> Result<Step> {
        match last {
            // The session proves itself. If it had ended, another might have held since, with lower tokens.
            Ok(Some(Reserved::From(token))) => Ok(self.prove(session, token, self.last(token))),
            // Somebody deleted the row of the counter, or of the mapping.
            Ok(Some(Reserved::Nothing)) => Ok(self.make(session, false)),
            // The control connection may be with another server by now, or with this one in another life.
            Ok(None) => {
                self.abandon(session, Had::Nothing);
                Ok(Step::Again)
            }
            Err(error) => {
                // The reservation may wait for something that this transaction has locked.
                self.begin(session, Activity::Leaving);
                let _ = self.withdraw().await;
                Err(error)
            }
        }
    }

    /// Has the session prove that it lives, and with it the lock. A hold that has others beside it is shown, which proves it as
    /// well: how many hold together is to be visible at once.
    fn prove(&mut self, mut session: Session, token: u64, last: u64) -> Step {
        let request = if self.request.mode == Mode::Exclusive {
            row_sql::proof()
        } else {
            self.sql.show(session.id, token, self.seconds, &self.request)
        };
        let sent = Instant::now();
        session.send(self.seconds, request);
        self.begin(session, Activity::Proving { token, last, sent })
    }

    fn proved(&mut self, mut session: Session, token: u64, last: u64, sent: Instant) -> Result<Step> {
        match session.take_reply() {
            Ok(reply) if server::says_read_only(&reply) => return Err(self.demoted(session)),
            // It proves what was so at the time of an attempt that was dropped.
            Ok(_) if sent < self.began => return Ok(self.prove(session, token, last)),
            Ok(_) => self.sent = sent,
            Err(error) if error::ends_the_session(&error) => {
                self.abandon(session, Had::Nothing);
                return Ok(Step::Again);
            }
            Err(error) => return Err(self.failed(session, error)),
        }
        if self.request.mode != Mode::Exclusive {
            self.shown = Shown::AsItIs;
            self.shared.names.note_shared_grant(self.sql.key());
        } else if !self.shared.names.note_grant(self.sql.key(), sent) {
            return Ok(self.prove(session, token, last));
        }
        Ok(self.hold(session, token, last))
    }

    fn hold(&mut self, session: Session, token: u64, last: u64) -> Step {
        tracing::trace!(lock = ?self.request.name, session = session.id, first = token, last, "granted in a session");
        self.shared.sessions.watch(&session.epoch);
        self.is_intact = true;
        self.stage = Stage::Active(session, Activity::Holding { token, last });
        Step::Granted(token..=last)
    }

    /// Returns the last token of a grant with this first one.
    fn last(&self, first: u64) -> u64 {
        first + u64::from(self.request.tokens.get()) - 1
    }

    fn lease(&self) -> Lease {
        Lease::new(self.sent, Some(self.length()))
    }

    /// The lease, less an allowance for the server's clock.
    fn length(&self) -> Duration {
        let kept = Duration::from_secs(self.seconds.into());
        self.request
            .ttl
            .min(kept.mul_f64(0.99).saturating_sub(Duration::from_millis(20)))
    }

    /// Begins anew: the session had ended while it was idle.
    fn start_over(&mut self) -> Step {
        // The other idle ones may have ended as well.
        self.shared.sessions.discard_idle();
        Step::Again
    }

    /// Takes the reply that a session has received, or gives the session up.
    fn take_reply(&mut self, mut session: Session) -> Result<(Session, Reply)> {
        match session.take_reply() {
            Ok(reply) => Ok((session, reply)),
            Err(error) => Err(self.failed(session, error)),
        }
    }

    /// Gives up a session after an error that it does not survive.
    fn failed(&mut self, session: Session, error: sqlx::Error) -> Error {
        if error::ends_the_session(&error) {
            self.shared.sessions.disconnect_watch.notify();
        }
        self.abandon(session, Had::Nothing);
        error::failed("acquire", error)
    }

    /// Gives up a session of a server that has become read-only. Another one is the primary by now, or will be soon, and knows
    /// nothing of this one's locks.
    fn demoted(&mut self, session: Session) -> Error {
        self.abandon(session, Had::Nothing);
        let sessions = &self.shared.sessions;
        sessions.discard_idle();
        // The other holds there are as good as lost.
        sessions.disconnect_watch.notify();
        server::read_only("acquire", "read_only")
    }

    /// Closes the connection, and has the session killed: a server does not notice that a client is gone while its statement
    /// waits.
    fn abandon(&mut self, session: Session, had: Had) {
        let session = session.abandon();
        self.stage = Stage::Ending { session, had };
        self.shown = Shown::Not;
    }

    fn abandon_stage(&mut self, had: Had) {
        match std::mem::take(&mut self.stage) {
            Stage::Active(session, _) => self.abandon(session, had),
            stage => self.stage = stage,
        }
    }

    /// Puts a session without a transaction among the idle ones.
    async fn put_back(&mut self, session: Session) {
        self.shown = Shown::Not;
        self.shared.sessions.put(session).await;
    }

    /// Leaves nothing of the claim at the server.
    async fn withdraw(&mut self) -> Result<()> {
        let held = match &self.stage {
            Stage::Active(_, Activity::Holding { .. }) => true,
            Stage::Active(_, Activity::RollingBack { held }) => *held,
            _ => false,
        };
        let had = if held { Had::Hold } else { Had::Nothing };
        if let Stage::Active(session, activity) = &mut self.stage {
            let is_over = match activity {
                // A wait for a lock would go on. Interrupted, its session can be kept.
                Activity::Queueing | Activity::Waiting if session.is_running() => {
                    let control = &self.shared.sessions.control;
                    let interrupted = control.interrupt("acquire", session.id, &session.epoch).await;
                    matches!(interrupted, Ok(KillOutcome::Killed))
                        && timeout(REPLY_TIMEOUT, session.receive()).await.is_ok()
                }
                _ => session.receive_within(REPLY_TIMEOUT).await,
            };
            if !is_over {
                // The connection may be dead. The transaction ends with the session, which is killed over another.
                self.abandon_stage(had);
            } else if !matches!(activity, Activity::RollingBack { .. }) {
                // Showing the hold may have failed and ended its transaction, but not the session. Nothing else can.
                let is_intact = self.is_intact && session.failure().is_none();
                let request = if held && self.shown != Shown::Not && !is_intact {
                    row_sql::ROLLBACK_IF_INTACT
                } else {
                    "ROLLBACK"
                };
                session.send(self.seconds, request.to_owned());
                *activity = Activity::RollingBack { held };
            }
        }
        if let Stage::Active(session, _) = &mut self.stage {
            session.receive().await;
        }
        let lost = match std::mem::take(&mut self.stage) {
            Stage::Idle => return Ok(()),
            Stage::Active(mut session, _) => match session.take_reply() {
                Ok(_) => {
                    self.put_back(session).await;
                    return Ok(());
                }
                Err(error) => {
                    let lost = match error::number(&error) {
                        Some(code::NO_SUCH_SAVEPOINT | code::CONNECTION_KILLED | code::SESSION_KILLED) => {
                            Some(LossReason::Revoked)
                        }
                        _ => error::ends_the_session(&error).then_some(LossReason::Disconnected),
                    };
                    self.abandon(session, if held && lost.is_some() { Had::Lost } else { had });
                    lost
                }
            },
            ending @ Stage::Ending { .. } => {
                self.stage = ending;
                None
            }
        };
        self.end(lost).await
    }

    /// Kills the session whose connection was given up.
    ///
    /// # Errors
    /// [`Error::Lost`] if a hold had ended before, for this reason if that is known. Any other error if the session is not known to have
    /// ended. The next call goes on from here.
    async fn end(&mut self, reason: Option<LossReason>) -> Result<()> {
        let Stage::Ending { session, had } = &self.stage else {
            return Ok(());
        };
        let had = *had;
        // Of one that only waited, its next attempt ends what is left.
        let operation = if had == Had::Nothing { "acquire" } else { "release" };
        let ending = self.shared.sessions.control.kill_abandoned(operation, session);
        let killed = if had == Had::Lost {
            // That is to be told, whether there is a server to reach or not. A closed connection ends its session by itself, unless that
            // waits.
            let _ = timeout(REPLY_TIMEOUT, ending).await;
            KillOutcome::Unknown
        } else {
            ending.await?
        };
        self.stage = Stage::Idle;
        match had {
            Had::Nothing => Ok(()),
            Had::Hold if killed == KillOutcome::Killed => Ok(()),
            Had::Hold | Had::Lost => Err(self.lost(reason.unwrap_or(LossReason::Disconnected))),
        }
    }

    /// Returns why the connection of a hold broke: an operator ended the session at a server that goes on, or anything else.
    async fn why_it_ended(&mut self) -> LossReason {
        let Stage::Ending { session, .. } = &self.stage else {
            return LossReason::Disconnected;
        };
        let control = &self.shared.sessions.control;
        match control.kill("renew", session.id, &session.epoch).await {
            Ok(KillOutcome::NotFound) => LossReason::Revoked,
            _ => LossReason::Disconnected,
        }
    }

    fn lost(&self, reason: LossReason) -> Error {
        Error::lost(NAME, self.request.name.clone(), reason)
    }
}

/// Asks the server whether it has the session wait, after a moment if it `is_queueing`: only the server knows that the name is taken, and of a
/// dead connection nothing is ever heard. The server may not have heard yet of a request that was just sent.
async fn wait_in_queue(
    shared: &Shared,
    session: &mut Session,
    is_queueing: bool,
    sent: Instant,
    patience: Duration,
) -> Result<Wait> {
    let is_over = if is_queueing {
        session.receive_within(patience.min(WAITS_UNASKED)).await
    } else {
        session.has_reply()
    };
    if is_over {
        return Ok(Wait::Over);
    }
    let state = shared.statement_state(session.id, &session.epoch).await?;
    if let Some(state) = &state
        && !state.starts_with(WAITS_FOR_A_TABLE)
    {
        return Ok(Wait::GoesOn);
    }
    if session.has_reply() {
        return Ok(Wait::Over);
    }
    // A request that waits for a table shows later whether the row is taken.
    if state.is_some() || sent.elapsed() < REPLY_TIMEOUT {
        let _ = timeout(WAITS_UNASKED, session.receive()).await;
        return Ok(Wait::Unknown);
    }
    let is_alive = session.was_replied_to().await;
    Ok(if is_alive { Wait::Over } else { Wait::Dead })
}

/// A reservation that was replied to.
enum Reserved {
    /// A block that begins with this token.
    From(u64),
    /// None: a row is missing.
    Nothing,
}

/// Reserves a block and maps it to tickets from `ticket` on: durable before anybody can see its tokens. The row stays locked
/// meanwhile. Returns `None` if the control connection has ended since the session began.
async fn reserve(
    control: &Control,
    sql: &RowSql,
    session: &mut Session,
    (ticket, mapping): (u64, Mapping),
    count: u64,
) -> Result<Option<Reserved>> {
    // A mapping with a higher number is of this life as well. The next one keeps that number, for clients that know it.
    let life = session.life.max(mapping.life);
    let (size, step) = mapping.next(life, count);
    let reserve = sql.reserve(mapping.last, size, life, ticket, step);
    let reply = control.query_in("acquire", reserve, &session.epoch).await?;
    Ok(reply.map(|reply| {
        let last: Option<u64> = reply.last().first().and_then(|row| column(row, 0).ok());
        match last.and_then(|last| last.checked_sub(size)) {
            Some(before) => Reserved::From(before + 1),
            None => Reserved::Nothing,
        }
    }))
}

#[async_trait]
impl Claim for RowClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime(NAME, "acquire")?;
        self.began = Instant::now();
        self.breaks.mark_unchanged();
        self.receive_or_abandon().await;
        loop {
            let step = self.step(patience).await;
            let step = match step {
                Ok(step) => step,
                Err(error) => return Err(self.shared.mended(error).await),
            };
            match step {
                Step::Again => {}
                Step::Taken => return Ok(None),
                Step::Granted(tokens) => {
                    let lease = self.lease();
                    return Ok(Some(Grant::new(tokens, lease)));
                }
            }
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime(NAME, "renew")?;
        self.breaks.mark_unchanged();
        let Stage::Active(session, Activity::Holding { token, .. }) = &mut self.stage else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        self.shared.sessions.watch(&session.epoch);
        // The hold may have been shown, without success.
        session.receive().await;
        let mut failure = match session.failure() {
            Some(_) => session.take_reply().err(),
            None => None,
        };
        let mut may_fail = failure.is_some() || self.shown != Shown::AsItIs;
        // A session that replies may have lost the lock: its transaction may have been rolled back to end a deadlock, or a proxy
        // may go on with another session.
        let mut request = match self.shown {
            Shown::AsItIs => row_sql::still_holds(),
            Shown::Outdated => self.sql.show_changed(session.id, *token, self.seconds),
            Shown::Not => self.sql.show(session.id, *token, self.seconds, &self.request),
        };
        let reason = loop {
            let sent = Instant::now();
            let reply = match failure.take() {
                Some(error) => Err(error),
                None => {
                    self.shown = Shown::AsItIs;
                    session.query(self.seconds, std::mem::take(&mut request)).await
                }
            };
            self.is_intact = reply.is_ok();
            match reply {
                Ok(reply) if server::says_read_only(&reply) => {
                    // Another server is the primary by now, or will be soon, and knows nothing of this hold.
                    self.shared.sessions.discard_idle();
                    break Some(LossReason::Revoked);
                }
                Ok(_) => {
                    self.sent = sent;
                    // After a change of the ttl. A server that shortens it does not say so.
                    if let Some(kept) = session.shorter_timeout(self.seconds) {
                        self.seconds = kept;
                        self.shown = Shown::Outdated;
                    }
                    return Ok(Renewal::Held(self.lease()));
                }
                Err(error) => match error::number(&error) {
                    Some(code::CLIENT_INTERACTION_TIMEOUT) => break Some(LossReason::Expired),
                    Some(
                        code::CONNECTION_KILLED
                        | code::SESSION_KILLED
                        | code::DEADLOCK
                        | code::NO_SUCH_SAVEPOINT
                        | code::OPTION_PREVENTS_STATEMENT
                        | code::READ_ONLY_MODE
                        | code::INNODB_READ_ONLY,
                    ) => break Some(LossReason::Revoked),
                    _ if error::ends_the_session(&error) => break None,
                    _ if std::mem::take(&mut may_fail) => {
                        // Inspections do not see the hold. Otherwise it is as good as any.
                        let error = self.shared.secrets.chain(&error);
                        tracing::warn!(lock = ?self.request.name, error, "a hold cannot be shown to inspections");
                        request = row_sql::still_holds();
                    }
                    _ => return Err(error::failed("renew", error)),
                },
            }
        };
        // A release after this future was dropped is to know it, too.
        self.abandon_stage(Had::Lost);
        let reason = match reason {
            Some(reason) => reason,
            None => self.why_it_ended().await,
        };
        Ok(Renewal::Lost(reason))
    }

    /// The session has one connection, which keeps the order of requests. Its next request sets the time that the server waits for
    /// it, and finds out whether that is a shorter one.
    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        self.request.ttl = ttl;
        self.seconds = seconds(ttl);
        if self.shown == Shown::AsItIs {
            self.shown = Shown::Outdated;
        }
        Ok(Some(self.length()))
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime(NAME, "release")?;
        self.withdraw().await
    }

    async fn notified(&mut self) {
        let (session, activity) = match &mut self.stage {
            Stage::Active(session, activity) => (session, activity),
            // A renewal that was dropped has found it out, and the next one tells.
            Stage::Ending { had: Had::Lost, .. } => return,
            _ => return std::future::pending().await,
        };
        match activity {
            Activity::Queueing | Activity::Waiting | Activity::Pausing => session.receive().await,
            // A renewal shows its token.
            Activity::Holding { .. } if self.shown == Shown::Outdated => {}
            Activity::Holding { token, .. } => {
                if self.shown == Shown::Not {
                    let show = self.sql.show(session.id, *token, self.seconds, &self.request);
                    session.send(self.seconds, show);
                    self.shown = Shown::AsItIs;
                }
                let has_broken = {
                    let (shown, broken) = (pin!(session.receive()), pin!(self.breaks.changed()));
                    matches!(select(shown, broken).await, Either::Right(_))
                };
                // A hold that could not be shown may have ended with the attempt to.
                if !has_broken && session.failure().is_none() {
                    // An error means that no break can be heard of any more.
                    let _ = self.breaks.changed().await;
                }
            }
            _ => std::future::pending().await,
        }
    }

    fn passed_on(&mut self, token: FencingToken) {
        if let Stage::Active(_, Activity::Holding { token: first, .. }) = &mut self.stage {
            *first = token.get();
            if self.shown == Shown::AsItIs {
                self.shown = Shown::Outdated;
            }
        }
    }
}

/// Returns the ttl in the whole seconds that a server counts in.
pub(crate) fn seconds(ttl: Duration) -> u32 {
    let whole = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    u32::try_from(whole.max(1)).unwrap_or(u32::MAX)
}
