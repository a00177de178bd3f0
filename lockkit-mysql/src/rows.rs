//! A claim that holds by a row lock, in a session of its own.

use std::{ops::RangeInclusive, pin::pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::{Either, select};
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal},
};
use sqlx::mysql::MySqlRow;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    NAME, Shared,
    control::{GivenUp, Killed},
    fault::{self, code},
    require_runtime, server,
    session::{REPLY_TAKES, Session},
    sql::{self, Sql},
    tokens::Mapping,
    wire::column,
};

/// For how long an attempt waits at once before it asks whether it waits. Most holds that are worth that are shorter.
const WAITS_UNASKED: Duration = Duration::from_millis(50);

/// The beginning of what a statement is at that waits for a table, or for all of them, as both flavours say it. They say
/// nothing like it of one that waits for a row.
const WAITS_FOR_ELSE: &str = "Waiting for ";

#[derive(Debug)]
pub(crate) struct RowClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    sql: Sql,
    /// The lease, as the server keeps it: how long it bears the session's silence.
    seconds: u32,
    session: Option<Session>,
    stage: Stage,
    /// Before the latest request was sent whose answer proves that the session lives.
    sent: Instant,
    shown: Shown,
    /// Whether the latest answer within the hold says that its transaction is there: it was no error.
    is_intact: bool,
    /// Whether the rows have just been made: what is missing then was deleted.
    has_made: bool,
    /// Rung when connections break.
    alarm: watch::Receiver<u64>,
}

/// What the session is at. Each step is taken up where it was left, whenever the future that took it was dropped.
#[derive(Debug)]
enum Stage {
    /// There is none, or it has been given back.
    Out,
    /// It tries to lock the row. Whether it looks first if the row is there.
    Trying { looks: bool },
    /// It found the row locked, or missing, and leaves its transaction.
    Leaving,
    /// It was sent to wait for the row, and the server has not said that anybody has it.
    Queueing,
    /// It waits for the row.
    Waiting,
    /// It waits a moment before the next look for a permit.
    Pausing,
    /// It makes the rows.
    Making { repair: bool },
    /// It has the row, and looked at the counter. There is no token yet.
    Locked { look: u64, mapping: Mapping },
    /// It has the row, and these tokens.
    Holding { first: u64, last: u64 },
    /// It is being rolled back.
    RollingBack { held: bool },
    /// It is to be ended by force.
    Ending { session: GivenUp, held: bool },
}

/// How the hold is shown to those who look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Not,
    AsItIs,
    /// With the token of a hold that it has been passed on from.
    Outdated,
}

/// What a step of an attempt came to.
enum Step {
    Again,
    Taken,
    Granted,
}

impl RowClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, sql: Sql) -> Self {
        let seconds = seconds(request.ttl);
        Self {
            alarm: shared.sessions.alarm.listen(),
            shared,
            request,
            sql,
            seconds,
            session: None,
            stage: Stage::Out,
            sent: Instant::now(),
            shown: Shown::Not,
            is_intact: false,
            has_made: false,
        }
    }

    /// Waits for what a dropped attempt has left under way. If that takes too long, the connection may be dead, and is left
    /// for another. A wait is looked after in its own way, and a rollback too.
    async fn settle_or_leave(&mut self) {
        if matches!(
            self.stage,
            Stage::Queueing | Stage::Waiting | Stage::RollingBack { .. }
        ) {
            return;
        }
        let Some(session) = &mut self.session else { return };
        if !session.settle_within(REPLY_TAKES).await {
            self.end(false);
            // They may be as dead.
            self.shared.sessions.forget();
        }
    }

    /// One step towards the lock.
    async fn step(&mut self, patience: Duration) -> Result<Step> {
        match &self.stage {
            Stage::Out => self.enter(patience).await,
            Stage::Trying { looks } => {
                let looks = *looks;
                self.tried(looks, patience).await
            }
            Stage::Leaving => self.left(patience).await,
            Stage::Queueing => self.queued(patience).await,
            Stage::Waiting => self.waited().await,
            Stage::Pausing => self.paused(patience).await,
            Stage::Making { repair } => {
                let repair = *repair;
                self.made(repair).await
            }
            &Stage::Locked { look, mapping } => self.number(look, mapping).await,
            Stage::Holding { .. } => {
                // An earlier grant that nobody saw.
                Ok(if self.prove().await? {
                    Step::Granted
                } else {
                    Step::Again
                })
            }
            Stage::RollingBack { .. } | Stage::Ending { .. } => match self.withdraw().await {
                Err(error) if !error.is_lost() => Err(error),
                _ => Ok(Step::Again),
            },
        }
    }

    async fn enter(&mut self, patience: Duration) -> Result<Step> {
        self.session = Some(self.shared.sessions.get("acquire", self.seconds).await?);
        let is_likely_taken = self.shared.names.was_taken(self.sql.key());
        if is_likely_taken && !patience.is_zero() && !self.sql.is_permit() {
            // Without a try that would be in vain.
            self.wait(Stage::Queueing).await?;
        } else {
            self.try_to_lock().await;
        }
        Ok(Step::Again)
    }

    /// Sends the try. What is answered to it is for the next step.
    async fn try_to_lock(&mut self) {
        let looks = !self.shared.names.knows(self.sql.key());
        let seconds = self.seconds;
        let Some(session) = &mut self.session else { return };
        let lock = self.sql.lock_or_skip();
        self.sent = Instant::now();
        if session.prepares && session.bears(seconds) && !looks {
            session.execute(lock, self.sql.key().as_bytes()).await;
        } else {
            let mut request = self.sql.named(lock);
            if looks {
                request = format!("{}; {request}", self.sql.exists());
            }
            session.send(seconds, request).await;
        }
        self.stage = Stage::Trying { looks };
    }

    async fn tried(&mut self, looks: bool, patience: Duration) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let reply = match session.answer().await {
            Ok(reply) => reply,
            Err(error) if fault::ends_the_session(&error) && !session.is_proven => {
                // It had been kept for too long. The others have been, too.
                self.shared.sessions.forget();
                return self.start_over();
            }
            Err(error) => match fault::number(&error) {
                // There may be no more of them for all clients together. As text it always works.
                Some(code::MAX_PREPARED_STMT_COUNT_REACHED | code::NEED_REPREPARE) if session.prepares => {
                    session.prepares = false;
                    self.try_to_lock().await;
                    return Ok(Step::Again);
                }
                _ => return self.failed(error),
            },
        };
        session.is_proven = true;
        if let Some(row) = reply.last().first() {
            return self.locked(row).await;
        }
        if looks && reply.rows(0).is_empty() {
            // The counter was there, and they are not: somebody deleted them.
            let repair = std::mem::take(&mut self.has_made);
            return self.make(repair).await;
        }
        if patience.is_zero() || self.sql.is_permit() {
            return self.leave().await;
        }
        self.shared.names.take(self.sql.key());
        self.wait(Stage::Waiting).await
    }

    /// Waits a moment for the row, and asks then whether the server has the session wait: that it is taken is for the
    /// server to say.
    async fn queued(&mut self, patience: Duration) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        if !session.settle_within(patience.min(WAITS_UNASKED)).await {
            let taken = self.still_waits().await?;
            if let Step::Taken = taken {
                self.shared.names.take(self.sql.key());
                self.stage = Stage::Waiting;
            }
            return Ok(taken);
        }
        if session.failure().is_some_and(fault::ends_the_session) && !session.is_proven {
            // It had been kept for too long. The others have been, too.
            self.shared.sessions.forget();
            return self.start_over();
        }
        session.is_proven = true;
        self.waited().await
    }

    /// Has the server wait. Returns once that is under way; its end is what [`notified`](Claim::notified) waits for.
    async fn wait(&mut self, stage: Stage) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let request = match stage {
            Stage::Pausing => self.sql.pause_and_try(),
            _ => self.sql.wait(),
        };
        self.sent = Instant::now();
        session.send(self.seconds, request).await;
        self.stage = stage;
        // The first poll sends it.
        session.is_settled().await;
        Ok(Step::Taken)
    }

    /// A row came back, so that it is locked.
    async fn locked(&mut self, row: &MySqlRow) -> Result<Step> {
        if server::is_read_only(row) {
            return Err(self.demoted());
        }
        self.has_made = false;
        let (look, mapping, size) = match self.looked(row) {
            Ok(looked) => looked,
            Err(error) => return self.failed(error),
        };
        if let Mode::Permits(wanted) = self.request.mode
            && wanted.get() != size
        {
            return self.resize(size, wanted.get()).await;
        }
        match mapping {
            Some(mapping) => self.stage = Stage::Locked { look, mapping },
            // A foreign client has made the row, and knows nothing of tokens.
            None => return self.make(false).await,
        }
        Ok(Step::Again)
    }

    /// What a row says that came back: the look at the counter, the mapping, and the size of a semaphore.
    fn looked(&self, row: &MySqlRow) -> sqlx::Result<(u64, Option<Mapping>, u32)> {
        let mapping: Option<String> = column(row, 1)?;
        let mapping = mapping.map(|mapping| mapping.parse()).transpose();
        let mapping = mapping.map_err(sqlx::Error::Decode)?;
        let size = if self.sql.is_permit() { column(row, 2)? } else { 0 };
        Ok((column(row, 0)?, mapping, size))
    }

    /// The semaphore has another size. If nobody uses it, it gets the new one.
    async fn resize(&mut self, size: u32, wanted: u32) -> Result<Step> {
        // Not taken up again if it is dropped: trying again leads here.
        self.stage = Stage::Making { repair: true };
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let free = match session.ask(self.seconds, self.sql.lock_all()).await {
            Ok(reply) => reply.last().len(),
            Err(error) => return self.failed(error),
        };
        if free == size as usize {
            if let Err(error) = session.ask(self.seconds, self.sql.resize(wanted)).await {
                return self.failed(error);
            }
            self.try_to_lock().await;
            return Ok(Step::Again);
        }
        self.leave().await
    }

    /// Leaves the transaction, in which a look whether the rows are there comes first: a session that is kept has none open.
    async fn leave(&mut self) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let leave = format!("{}; ROLLBACK", self.sql.exists());
        session.send(self.seconds, leave).await;
        self.stage = Stage::Leaving;
        Ok(Step::Again)
    }

    async fn left(&mut self, patience: Duration) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let reply = match session.answer().await {
            Ok(reply) => reply,
            Err(error) => return self.failed(error),
        };
        let Some(row) = reply.row(0) else {
            // Known, and gone.
            return self.make(true).await;
        };
        if let Mode::Permits(wanted) = self.request.mode {
            let size: u32 = match column(row, 0) {
                Ok(size) => size,
                Err(error) => return self.failed(error),
            };
            if size != wanted.get() {
                return self.refuse(size, wanted.get()).await;
            }
            if !patience.is_zero() {
                return self.wait(Stage::Pausing).await;
            }
        }
        self.give_back().await;
        Ok(Step::Taken)
    }

    /// The semaphore has another size, and some of its permits are locked: whoever holds one shows itself before, and who does
    /// not is trying, perhaps to change the size as well.
    async fn refuse(&mut self, size: u32, wanted: u32) -> Result<Step> {
        // Not taken up again if it is dropped: trying again leads here.
        self.stage = Stage::Making { repair: true };
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let is_held = match session.ask(self.seconds, self.sql.is_held()).await {
            // Whoever holds may have changed the size before.
            Ok(reply) => {
                let now = reply.row(3).map(|row| column::<u32>(row, 0));
                reply.row(1).is_some() && matches!(now, Some(Ok(now)) if now == size)
            }
            Err(error) => return self.failed(error),
        };
        self.give_back().await;
        let name = &self.request.name;
        Err(if is_held {
            let why = format!("semaphore `{name}` is in use with {size} permits, not {wanted}");
            Error::invalid_option("permits", why)
        } else {
            let why = format!("semaphore `{name}` has {size} permits, not {wanted}, and others are at it");
            Error::transient(NAME, "acquire", why)
        })
    }

    async fn waited(&mut self) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        if !session.is_settled().await {
            return self.still_waits().await;
        }
        match session.answer().await {
            Ok(reply) => match reply.last().first() {
                Some(row) => self.locked(row).await,
                None => self.make(true).await,
            },
            Err(error) => match fault::number(&error) {
                // It waited for as long as a statement may, was chosen to end a deadlock, or was interrupted by an
                // operator. The transaction has locked nothing.
                Some(code::LOCK_WAIT_TIMEOUT | code::DEADLOCK | code::QUERY_INTERRUPTED) => {
                    self.try_to_lock().await;
                    Ok(Step::Again)
                }
                _ => self.failed(error),
            },
        }
    }

    /// Asks whether the server still has the waiting session: of a connection that went dead nothing is ever heard.
    async fn still_waits(&mut self) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let stage = self.shared.stage(session.id, &session.term).await?;
        let is_queueing = matches!(self.stage, Stage::Queueing);
        if let Some(stage) = &stage
            && !(is_queueing && stage.starts_with(WAITS_FOR_ELSE))
        {
            return Ok(Step::Taken);
        }
        if session.is_settled().await {
            // The answer was on its way.
            return Ok(Step::Again);
        }
        // The request may be on its way yet. If it has come and waits for a table, it shows in time if the row is taken.
        if stage.is_some() || is_queueing && self.sent.elapsed() < REPLY_TAKES {
            let _ = timeout(WAITS_UNASKED, session.settle()).await;
            return Ok(Step::Again);
        }
        self.end(false);
        Err(Error::transient(
            NAME,
            "acquire",
            "the connection that waited for the lock went dead",
        ))
    }

    async fn paused(&mut self, patience: Duration) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        let reply = match session.answer().await {
            Ok(reply) => reply,
            Err(error) => return self.failed(error),
        };
        if let Some(row) = reply.last().first() {
            return self.locked(row).await;
        }
        let size = reply.before_last().first().map(|row| column::<u32>(row, 0));
        match (self.request.mode, size) {
            (Mode::Permits(wanted), Some(Ok(size))) if size == wanted.get() && !patience.is_zero() => {
                self.wait(Stage::Pausing).await
            }
            // It says why not, or makes the rows.
            _ => self.leave().await,
        }
    }

    async fn make(&mut self, repair: bool) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        session.send(self.seconds, self.sql.create(repair)).await;
        self.stage = Stage::Making { repair };
        Ok(Step::Again)
    }

    async fn made(&mut self, repair: bool) -> Result<Step> {
        let Some(session) = &mut self.session else {
            return self.start_over();
        };
        match session.answer().await {
            Ok(_) => {
                self.has_made = true;
                self.try_to_lock().await;
            }
            Err(error) => match fault::number(&error) {
                // Beaten to it. It begins with a rollback.
                Some(code::LOCK_WAIT_TIMEOUT | code::DEADLOCK) => return self.make(repair).await,
                _ => return self.failed(error),
            },
        }
        Ok(Step::Again)
    }

    /// Takes the tokens that the look stands for, or has a mapping made by which another look stands for some.
    async fn number(&mut self, look: u64, mapping: Mapping) -> Result<Step> {
        let Some(session) = &self.session else {
            return self.start_over();
        };
        let count = u64::from(self.request.tokens.get());
        let Some(first) = mapping.first(look, session.life, count) else {
            return self.reserve(look, mapping).await;
        };
        if self.request.mode == Mode::Exclusive {
            if self.sent.elapsed() > self.length() / 3 && !self.prove().await? {
                return Ok(Step::Again);
            }
            // Whoever reads late that it has the row may have lost it since.
            while !self.shared.names.grant(self.sql.key(), self.sent) {
                if !self.prove().await? {
                    return Ok(Step::Again);
                }
            }
        } else {
            // How many hold together is to be seen at once. It proves the hold as well.
            if !self.show(first).await? {
                return Ok(Step::Again);
            }
            self.shared.names.share(self.sql.key());
        }
        let last = first + count - 1;
        self.stage = Stage::Holding { first, last };
        self.is_intact = true;
        if let Some(session) = &self.session {
            tracing::trace!(lock = %self.request.name, session = session.id, first, last, "granted in a session");
            self.shared.sessions.watch(&session.term);
        }
        Ok(Step::Granted)
    }

    /// Reserves a block, and has its tokens mapped: durable before anybody can see them. The row stays locked meanwhile, and the
    /// first of those tokens are this claim's, however many looks there were since. Nobody else is given them, whether the
    /// mapping is this one or one that is higher.
    async fn reserve(&mut self, look: u64, old: Mapping) -> Result<Step> {
        let Some(session) = &self.session else {
            return self.start_over();
        };
        // One with a higher number is of this life as well. Whoever knows that number is to go on by the new mapping.
        let (life, term) = (session.life.max(old.life), session.term.clone());
        let (size, step) = old.next(life, u64::from(self.request.tokens.get()));
        let control = &self.shared.sessions.control;
        let reserve = self.sql.reserve(old.last, size, life, look, step);
        let reply = match control.ask_in("acquire", reserve, &term).await {
            Ok(Some(reply)) => reply,
            Ok(None) => {
                // The control connection may be with another server by now, or with this one in another life.
                self.end(false);
                return Ok(Step::Again);
            }
            Err(error) => {
                // What keeps the block from being reserved may wait for this transaction.
                let _ = self.withdraw().await;
                return Err(error);
            }
        };
        let last: Option<u64> = reply.last().first().and_then(|row| column(row, 0).ok());
        let Some(last) = last.filter(|last| *last >= size) else {
            // Somebody deleted the row of the counter, or of the mapping.
            return self.make(false).await;
        };
        // If this session had ended, somebody else might have had the row since, with lower tokens.
        if self.prove().await? {
            let mapping = Mapping {
                life,
                base: last - size + 1,
                since: look,
                last,
                step,
            };
            self.stage = Stage::Locked { look, mapping };
        }
        Ok(Step::Again)
    }

    /// Proves that the session lives, and with it the lock. `false` if it is dead.
    async fn prove(&mut self) -> Result<bool> {
        let Some(session) = &mut self.session else {
            self.stage = Stage::Out;
            return Ok(false);
        };
        let sent = Instant::now();
        match session.ask(self.seconds, sql::proof()).await {
            Ok(reply) => {
                if server::says_read_only(&reply) {
                    return Err(self.demoted());
                }
                self.sent = sent;
                Ok(true)
            }
            Err(error) if fault::ends_the_session(&error) => {
                self.end(false);
                Ok(false)
            }
            Err(error) => self.failed(error).map(|_| false),
        }
    }

    /// Shows the hold, which proves it as well. Whether the session lives.
    async fn show(&mut self, token: u64) -> Result<bool> {
        let Some(session) = &mut self.session else {
            self.stage = Stage::Out;
            return Ok(false);
        };
        let sent = Instant::now();
        let show = self.sql.show(session.id, token, self.seconds, &self.request);
        match session.ask(self.seconds, show).await {
            Ok(reply) => {
                if server::says_read_only(&reply) {
                    return Err(self.demoted());
                }
                self.sent = sent;
                self.shown = Shown::AsItIs;
                Ok(true)
            }
            Err(error) if fault::ends_the_session(&error) => {
                self.end(false);
                Ok(false)
            }
            Err(error) => self.failed(error).map(|_| false),
        }
    }

    fn grant(&self) -> Option<Grant> {
        match self.stage {
            Stage::Holding { first, last } => Some(Grant {
                tokens: RangeInclusive::new(first, last),
                lease: self.lease(),
            }),
            _ => None,
        }
    }

    fn lease(&self) -> Lease {
        Lease {
            since: self.sent,
            length: Some(self.length()),
        }
    }

    /// What is left of the lease after an allowance for the server's clock.
    fn length(&self) -> Duration {
        let kept = Duration::from_secs(self.seconds.into());
        self.request
            .ttl
            .min(kept.mul_f64(0.99).saturating_sub(Duration::from_millis(20)))
    }

    /// Without a session, everything begins anew.
    #[expect(clippy::unnecessary_wraps, reason = "it is how a step ends")]
    fn start_over(&mut self) -> Result<Step> {
        self.session = None;
        self.stage = Stage::Out;
        Ok(Step::Again)
    }

    /// Something went wrong that this session does not get over.
    fn failed(&mut self, error: sqlx::Error) -> Result<Step> {
        if fault::ends_the_session(&error) {
            self.shared.sessions.alarm.raise();
        }
        self.end(false);
        Err(fault::error("acquire", error))
    }

    /// The server has become read-only: another is the primary by now, or will be soon, and knows nothing of this one's locks.
    fn demoted(&mut self) -> Error {
        self.end(false);
        let sessions = &self.shared.sessions;
        sessions.forget();
        // Whatever else is held there is as good as lost.
        sessions.alarm.raise();
        server::read_only("read_only")
    }

    /// Closes the connection, and notes that the session may have to be ended: a server does not notice that a client
    /// has gone while its statement waits.
    fn end(&mut self, held: bool) {
        self.stage = match self.session.take() {
            Some(session) => Stage::Ending {
                session: session.give_up(),
                held,
            },
            None => Stage::Out,
        };
        self.shown = Shown::Not;
    }

    /// The connection of a hold broke: whether the server ended the session, and still serves others, or not.
    async fn why_it_ended(&mut self) -> LossReason {
        let Stage::Ending { session, .. } = &self.stage else {
            return LossReason::Disconnected;
        };
        let control = &self.shared.sessions.control;
        match control.kill("renew", session.id, &session.term).await {
            Ok(Killed::Before) => LossReason::Revoked,
            _ => LossReason::Disconnected,
        }
    }

    /// The session is idle and its transaction is over.
    async fn give_back(&mut self) {
        self.stage = Stage::Out;
        self.shown = Shown::Not;
        if let Some(session) = self.session.take() {
            self.shared.sessions.keep(session).await;
        }
    }

    /// Leaves nothing of the claim at the server.
    async fn withdraw(&mut self) -> Result<()> {
        let held = matches!(
            self.stage,
            Stage::Holding { .. } | Stage::RollingBack { held: true }
        );
        match (&self.stage, &mut self.session) {
            (Stage::Ending { .. }, _) => {}
            (Stage::Out, _) | (_, None) => {
                self.stage = Stage::Out;
                return Ok(());
            }
            // What waits for a lock would wait on. Interrupted, its session can be kept.
            (Stage::Queueing | Stage::Waiting, Some(session)) if session.is_running() => {
                let control = &self.shared.sessions.control;
                let interrupted = control.interrupt("release", session.id, &session.term).await;
                let is_over = matches!(interrupted, Ok(Killed::Now))
                    && timeout(REPLY_TAKES, session.settle()).await.is_ok();
                if is_over {
                    session.send(self.seconds, "ROLLBACK".to_owned()).await;
                    self.stage = Stage::RollingBack { held: false };
                } else {
                    self.end(false);
                }
            }
            (stage, Some(session)) => {
                if !session.settle_within(REPLY_TAKES).await {
                    // The connection may be dead. The transaction ends with the session, over another.
                    self.end(held);
                } else if !matches!(stage, Stage::RollingBack { .. }) {
                    // What showed the hold may have ended its transaction, and not the session. Nothing else can.
                    let is_intact = self.is_intact && session.failure().is_none();
                    let request = if held && self.shown != Shown::Not && !is_intact {
                        sql::LET_GO
                    } else {
                        "ROLLBACK"
                    };
                    session.send(self.seconds, request.to_owned()).await;
                    self.stage = Stage::RollingBack { held };
                }
            }
        }
        let mut was_gone = None;
        if let Stage::RollingBack { held } = self.stage {
            let Some(session) = &mut self.session else {
                self.stage = Stage::Out;
                return Ok(());
            };
            match session.answer().await {
                Ok(_) => {
                    self.give_back().await;
                    return Ok(());
                }
                Err(error) => {
                    // A session whose connection has ended is there for a moment yet, and another may have its lock by then: that it
                    // could be ended says nothing.
                    was_gone = match fault::number(&error) {
                        Some(code::NO_SUCH_SAVEPOINT | code::CONNECTION_KILLED | code::SESSION_KILLED) => {
                            Some(LossReason::Revoked)
                        }
                        _ => fault::ends_the_session(&error).then_some(LossReason::Disconnected),
                    };
                    self.end(held);
                }
            }
        }
        let Stage::Ending { session, held } = &self.stage else {
            return Ok(());
        };
        let held = *held;
        let control = &self.shared.sessions.control;
        let mut killed = control.kill("release", session.id, &session.term).await?;
        if killed == Killed::Unknown {
            // It may be that no server is to be reached, and a connection that is closed ends its session by itself, but not while that
            // waits.
            let ended = timeout(REPLY_TAKES, control.end_given_up("release", session)).await;
            killed = ended.map_or(killed, |ended| ended.unwrap_or(killed));
        }
        self.stage = Stage::Out;
        match was_gone {
            _ if !held => Ok(()),
            Some(reason) => Err(self.lost(reason)),
            None if killed != Killed::Now => Err(self.lost(LossReason::Disconnected)),
            None => Ok(()),
        }
    }

    fn lost(&self, reason: LossReason) -> Error {
        Error::lost(NAME, self.request.name.clone(), reason)
    }
}

#[async_trait]
impl Claim for RowClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime("acquire")?;
        self.alarm.mark_unchanged();
        self.settle_or_leave().await;
        loop {
            match self.step(patience).await? {
                Step::Again => {}
                Step::Taken => return Ok(None),
                Step::Granted => return Ok(self.grant()),
            }
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime("renew")?;
        self.alarm.mark_unchanged();
        let (&Stage::Holding { first, .. }, Some(session)) = (&self.stage, &mut self.session) else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        self.shared.sessions.watch(&session.term);
        // What came of showing the hold, if that failed and nobody has read it.
        session.settle().await;
        let mut failure = match session.failure() {
            Some(_) => session.answer().await.err(),
            None => None,
        };
        let mut may_fail = failure.is_some() || self.shown != Shown::AsItIs;
        // That the session answers does not mean that it still has the lock: its transaction may have been rolled back, to
        // end a deadlock, or something in between may have gone on with another session.
        let mut request = match self.shown {
            Shown::AsItIs => sql::still_holds(),
            Shown::Outdated => self.sql.show_passed_on(session.id, first),
            Shown::Not => self.sql.show(session.id, first, self.seconds, &self.request),
        };
        let reason = loop {
            let sent = Instant::now();
            let answer = if let Some(error) = failure.take() {
                Err(error)
            } else {
                session.send(self.seconds, std::mem::take(&mut request)).await;
                self.shown = Shown::AsItIs;
                session.answer().await
            };
            self.is_intact = answer.is_ok();
            match answer {
                Ok(reply) if server::says_read_only(&reply) => {
                    // Another is the primary by now, or will be soon, and knows nothing of this hold.
                    self.shared.sessions.forget();
                    break Some(LossReason::Revoked);
                }
                Ok(_) => {
                    self.sent = sent;
                    return Ok(Renewal::Held(self.lease()));
                }
                Err(error) => match fault::number(&error) {
                    Some(code::CLIENT_INTERACTION_TIMEOUT) => break Some(LossReason::Expired),
                    Some(
                        code::CONNECTION_KILLED
                        | code::SESSION_KILLED
                        | code::DEADLOCK
                        | code::NO_SUCH_SAVEPOINT
                        | code::OPTION_PREVENTS_STATEMENT
                        | code::READ_ONLY_MODE,
                    ) => break Some(LossReason::Revoked),
                    _ if fault::ends_the_session(&error) => break None,
                    _ if std::mem::take(&mut may_fail) => {
                        not_shown(&self.request, &error);
                        request = sql::still_holds();
                    }
                    _ => return Err(fault::error("renew", error)),
                },
            }
        };
        self.end(false);
        let reason = match reason {
            Some(reason) => reason,
            None => self.why_it_ended().await,
        };
        Ok(Renewal::Lost(reason))
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime("release")?;
        self.withdraw().await
    }

    async fn notified(&mut self) {
        let Some(session) = &mut self.session else {
            return std::future::pending().await;
        };
        match self.stage {
            Stage::Queueing | Stage::Waiting | Stage::Pausing => session.settle().await,
            // A renewal says whose it is now.
            Stage::Holding { .. } if self.shown == Shown::Outdated => {}
            Stage::Holding { first, .. } => {
                if self.shown == Shown::Not {
                    let show = self.sql.show(session.id, first, self.seconds, &self.request);
                    session.send(self.seconds, show).await;
                    self.shown = Shown::AsItIs;
                }
                let is_rung = {
                    let (shown, rung) = (pin!(session.settle()), pin!(self.alarm.changed()));
                    matches!(select(shown, rung).await, Either::Right(_))
                };
                // A hold that could not be shown may have ended with the attempt to.
                if !is_rung && session.failure().is_none() {
                    // An error means that there is no one left to ring.
                    let _ = self.alarm.changed().await;
                }
            }
            _ => std::future::pending().await,
        }
    }

    fn passed_on(&mut self, token: FencingToken) {
        if let Stage::Holding { first, .. } = &mut self.stage {
            *first = token.get();
            if self.shown == Shown::AsItIs {
                self.shown = Shown::Outdated;
            }
        }
    }
}

/// An inspection does not see the hold, which is none the worse for it.
fn not_shown(request: &ClaimRequest, error: &sqlx::Error) {
    tracing::warn!(lock = %request.name, %error, "a hold cannot be shown to inspections");
}

/// The whole seconds that a server counts in.
pub(crate) fn seconds(ttl: Duration) -> u32 {
    let whole = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    u32::try_from(whole.max(1)).unwrap_or(u32::MAX)
}
