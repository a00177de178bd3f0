//! A claim that holds by owner and expiry in a row, on the server's clock.
//!
//! One statement makes each change, and commits itself. Between them a holder needs no connection. Waiters do not poll while all
//! goes well: they queue at the server, and the head of the queue sleeps there until a release wakes it or the lease would expire.
//! A free lock with a queue goes to the head. See [`LeaseSql`].

use std::{num::NonZeroU32, ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, OwnerId, Renewal, require_runtime},
};
use tokio::time::{Instant, timeout};

use crate::{
    NAME,
    backend::Shared,
    connection::{Reply, column},
    control::AbandonedSession,
    error::{self, During, code},
    layout::Key,
    lease_sql::{LeaseSql, QUEUES_FOR, SLEEPS_FOR, ServerLocks, sleeper},
    row_claim::WAITS_FOR_A_TABLE,
    server,
    session::{REPLY_TIMEOUT, Session},
};

/// The `wait_timeout`, in seconds, of a session that is between its statements and may be the head of the queue. If its client has
/// died, a free lock is kept for it for so long.
const HEAD_TIMEOUT: u32 = 2;

/// The longest time from the death of the head of the queue until it is passed over: it queues, sleeps, and is silent.
pub(crate) const DEAD_HEAD_BOUND: Duration =
    Duration::from_secs((QUEUES_FOR + SLEEPS_FOR + HEAD_TIMEOUT) as u64);

/// The time that a release gives its own waiting session, which may have just been woken, before it kills that. MariaDB may need two
/// seconds for a session that is interrupted twice, and the queue lock is taken meanwhile.
const WOKEN_WITHIN: Duration = Duration::from_millis(10);

/// The longest time that a release waits until it has woken the head of the queue.
const WAKES_WITHIN: Duration = Duration::from_millis(200);

/// The `wait_timeout` of any other session, in seconds.
pub(crate) const WAIT_TIMEOUT: u32 = 60;

#[derive(Debug)]
pub(crate) struct LeaseClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    sql: LeaseSql,
    session: Option<Session>,
    stage: Stage,
    /// A time before the latest request was sent that was replied to and may have taken or renewed the lock.
    sent: Instant,
    /// The end of the lease that was proven last.
    until: Option<Instant>,
    /// The shortest ttl that its hold has asked for.
    shortest_ttl: Duration,
    /// The shortest ttl that a renewal may ask for which comes late, over a connection that was given up.
    late_ttl: Option<Duration>,
    /// True if the row may be this owner's.
    may_own: bool,
    /// True if the session may have the queue lock.
    has_queued: bool,
    /// A session that was given up while it waited for the lock, or tried to take it. It is to be killed.
    abandoned: Option<AbandonedSession>,
    /// The session that had the sleep lock when this claim released the lock.
    sleeper: Option<u64>,
    /// True if the server may have run the latest request, and what came of it was not read: it was sent more than once, so that the reply
    /// may be to the second, or it has none.
    may_have_run: bool,
    /// The token of the hold.
    token: u64,
    /// The token in the row, which may be that of the hold that passed it on.
    shown: u64,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Idle,
    /// Queues at the server, or sleeps as the head of the queue.
    Waiting,
    /// Holds. Needs no session.
    Holding,
    /// Releases a hold, or what an attempt may have taken.
    Releasing {
        held: bool,
        /// True if an earlier request may have freed the lock.
        repeats: bool,
        /// True if the latest request was to free it.
        asks: bool,
    },
}

/// The state of a row that a statement has not changed.
#[derive(Debug)]
enum RowState {
    /// There is none.
    Missing,
    /// This owner has it. The server was read-only a moment ago.
    Own,
    /// This owner could have it. The server was read-only a moment ago.
    Free,
    /// Another owner has it.
    Taken,
}

impl LeaseClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, locks: &ServerLocks) -> Self {
        let key = Key::new(&shared.namespace, request.mode.kind(), &request.name);
        Self {
            sql: LeaseSql::new(&key, locks, shared.server.flavour, &request),
            shared,
            shortest_ttl: request.ttl,
            request,
            session: None,
            stage: Stage::Idle,
            sent: Instant::now(),
            until: None,
            late_ttl: None,
            may_own: false,
            has_queued: false,
            abandoned: None,
            sleeper: None,
            may_have_run: false,
            token: 0,
            shown: 0,
        }
    }

    /// Runs a request, over the session at hand or another. The owner in it makes it harmless to run twice.
    async fn query(&mut self, operation: &'static str, request: String) -> Result<Reply> {
        let mut was_repeated = false;
        self.may_have_run = false;
        loop {
            let session = match &mut self.session {
                Some(session) => session,
                none => {
                    self.has_queued = false;
                    none.insert(self.shared.sessions.borrow(operation, WAIT_TIMEOUT).await?)
                }
            };
            let sent = Instant::now();
            if self.has_queued {
                // Once it has released the queue lock, it is a session like any other.
                let after = self.sql.if_head(HEAD_TIMEOUT, WAIT_TIMEOUT);
                // The wait may have been interrupted in its transaction.
                session.send_and_set(HEAD_TIMEOUT, &format!("ROLLBACK; {request}"), &after);
            } else {
                session.send(WAIT_TIMEOUT, request.clone());
            }
            self.may_have_run = true;
            session.receive().await;
            match session.take_reply() {
                Ok(mut reply) => {
                    if self.has_queued {
                        reply.drop_first();
                    }
                    self.sent = sent;
                    self.may_have_run = was_repeated;
                    session.is_proven = true;
                    return Ok(reply);
                }
                // The interruption was meant for a sleep that was over. The request may have done part of its work.
                Err(error) if error::number(&error) == Some(code::QUERY_INTERRUPTED) => {
                    was_repeated = true;
                    let wait_timeout = self.wait_timeout();
                    if let Some(session) = &mut self.session
                        && session.query(wait_timeout, "ROLLBACK".to_owned()).await.is_err()
                    {
                        self.session = None;
                    }
                }
                Err(error) => {
                    let ended_idle = session.ended_idle(&error);
                    // A statement that the server has refused has done nothing. Others may have stood before it.
                    self.may_have_run = was_repeated || self.has_queued || !error::is_refusal(&error);
                    if error::number(&error).is_none() {
                        // The server may not know that the connection has ended, and may still run the request.
                        self.may_renew_late();
                        self.leave();
                    }
                    self.session = None;
                    if !ended_idle {
                        return Err(error::failed(operation, error));
                    }
                    // The other idle ones may have ended as well.
                    self.shared.sessions.discard_idle();
                    was_repeated = self.may_have_run;
                    self.kill_abandoned(operation).await?;
                }
            }
        }
    }

    /// Returns the `wait_timeout` of the session at hand.
    fn wait_timeout(&self) -> u32 {
        if self.has_queued {
            HEAD_TIMEOUT
        } else {
            WAIT_TIMEOUT
        }
    }

    /// Returns why a statement has changed no row, the session that has the sleep lock, and the token of the hold that was last asked
    /// back.
    ///
    /// # Errors
    /// If the server is read-only by now. Nothing is changed there, even if the account may.
    async fn row_state(&mut self, operation: &'static str) -> Result<(RowState, Option<u64>, Option<u64>)> {
        let reply = self.query(operation, self.sql.state()).await?;
        self.refuse_read_only(operation, &reply)?;
        let row = reply.row(0).ok_or(sqlx::Error::RowNotFound).during(operation)?;
        let state: Option<u64> = column(row, 0).during(operation)?;
        let state = match state {
            None => RowState::Missing,
            Some(1) => RowState::Own,
            Some(2) => RowState::Free,
            Some(0) => RowState::Taken,
            Some(other) => return Err(no_answer(operation, other)),
        };
        let (sleeper, asked) = (column(row, 1), column(row, 2));
        Ok((state, sleeper.during(operation)?, asked.during(operation)?))
    }

    /// Checks what the last row of a reply says of the server. From one that is read-only, this claim borrows no session any more.
    fn refuse_read_only(&mut self, operation: &'static str, reply: &Reply) -> Result<()> {
        if server::says_read_only(reply) {
            self.session = None;
            self.shared.sessions.discard_idle();
            return Err(server::read_only(operation, "read_only"));
        }
        Ok(())
    }

    /// Waits for the reply to a request of a dropped future. If that takes too long, the connection may be dead, and is given
    /// up.
    async fn receive_or_abandon(&mut self) {
        let Some(session) = &mut self.session else { return };
        if !session.receive_within(REPLY_TIMEOUT).await {
            // The idle ones may be as dead.
            self.shared.sessions.discard_idle();
            self.may_renew_late();
            self.leave();
        }
    }

    /// Notes that a renewal may run later, and shorten a lease that is longer than its own by then.
    fn may_renew_late(&mut self) {
        if matches!(self.stage, Stage::Holding) {
            self.late_ttl = Some(self.shortest_ttl);
        }
    }

    /// Leaves the session for another. A request that comes late is harmless, unless it is an attempt: that is killed.
    fn leave(&mut self) {
        let session = self.session.take();
        if matches!(self.stage, Stage::Idle) && self.may_own {
            self.abandoned = session.map(Session::abandon);
        }
    }

    async fn kill_abandoned(&mut self, operation: &'static str) -> Result<()> {
        if let Some(session) = &self.abandoned {
            let control = &self.shared.sessions.control;
            control.kill_abandoned(operation, session).await?;
            self.abandoned = None;
        }
        Ok(())
    }

    /// Puts the session, which has no transaction, among the idle ones. One that has queued is closed.
    async fn put_back(&mut self) {
        if let Some(session) = self.session.take() {
            if self.has_queued {
                session.quit().await;
            } else {
                self.shared.sessions.put(session).await;
            }
        }
    }

    /// Ends the sleep of the head of the queue. Without this it wakes by itself a little later. So nobody waits for long: MariaDB
    /// may try for two seconds to reach a session that is about to wake.
    async fn wake(&mut self) {
        let wait_timeout = self.wait_timeout();
        // Once: the session may do something else by the next time.
        if let (Some(sleeper), Some(session)) = (self.sleeper.take(), &mut self.session) {
            let woken = session.query(wait_timeout, self.sql.wake(sleeper));
            match timeout(WAKES_WITHIN, woken).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    let error = self.shared.secrets.chain(&error);
                    tracing::debug!(error, "the next in line was not woken");
                }
                Err(_) => self.session = None,
            }
        }
    }

    /// Ends a wait that is over. Returns false if it goes on.
    async fn has_waited(&mut self) -> Result<bool> {
        let Some(session) = &mut self.session else {
            self.stage = Stage::Idle;
            return Ok(true);
        };
        if !session.has_reply() {
            let state = self.shared.statement_state(session.id, &session.epoch).await?;
            match state {
                Some(state) if state.starts_with(WAITS_FOR_A_TABLE) => {
                    let what =
                        "the wait for the lock waits for its table, so that nobody knows who has the lock";
                    return Err(Error::transient(NAME, "acquire", what));
                }
                Some(_) => return Ok(false),
                None => {}
            }
            if !session.was_replied_to().await {
                self.abandon_wait();
                return Err(error::waiter_went_dead());
            }
        }
        match session.take_reply() {
            Ok(_) => {}
            // It was woken.
            Err(error) if error::number(&error) == Some(code::QUERY_INTERRUPTED) => {}
            Err(_) => self.session = None,
        }
        self.stage = Stage::Idle;
        Ok(true)
    }

    fn abandon_wait(&mut self) {
        self.stage = Stage::Idle;
        self.abandoned = self.session.take().map(Session::abandon);
    }

    fn lease(&mut self) -> Lease {
        let lease = Lease::of_ttl(self.sent, self.provable_ttl());
        self.until = lease.end();
        lease
    }

    /// Returns the ttl that a reply proves. A renewal that may run later may shorten it.
    fn provable_ttl(&self) -> Duration {
        self.late_ttl
            .map_or(self.request.ttl, |late| late.min(self.request.ttl))
    }

    fn why_lost(&self) -> LossReason {
        let is_over = self.until.is_some_and(|end| Instant::now() >= end);
        if is_over {
            LossReason::Expired
        } else {
            LossReason::Revoked
        }
    }

    /// Attempts to take the lock, or to wait for it.
    async fn take(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if matches!(self.stage, Stage::Waiting) && !self.has_waited().await? {
            return Ok(None);
        }
        if matches!(self.stage, Stage::Releasing { .. }) {
            // It would release what this attempt takes.
            match self.release().await {
                Err(error) if !error.is_lost() => return Err(error),
                _ => {}
            }
        }
        self.receive_or_abandon().await;
        self.kill_abandoned("acquire").await?;
        loop {
            self.may_own = true;
            let reply = self.query("acquire", self.sql.take(self.has_queued)).await?;
            if reply.affected(0) == 1 {
                let first = reply.last_insert_id(0);
                let tokens = tokens_from(first, self.request.tokens)?;
                self.stage = Stage::Holding;
                (self.token, self.shown) = (first, first);
                self.has_queued = false;
                self.put_back().await;
                return Ok(Some(Grant::new(tokens, self.lease())));
            }
            match self.row_state("acquire").await?.0 {
                RowState::Missing => {
                    self.query("acquire", self.sql.make()).await?;
                }
                RowState::Own | RowState::Free => {}
                RowState::Taken => break,
            }
        }
        if patience.is_zero() {
            self.may_own = false;
            self.put_back().await;
        } else if let Some(session) = &mut self.session {
            self.shared.sessions.admit_waiter(session)?;
            self.has_queued = true;
            self.stage = Stage::Waiting;
            let wait = self.sql.wait(&session.epoch);
            session.send(HEAD_TIMEOUT, wait);
            // Sends it.
            session.has_reply();
        }
        Ok(None)
    }
}

/// The server has said of a row what none says.
fn no_answer(operation: &'static str, said: u64) -> Error {
    let why = format!("the server has said {said} of the state of a row, which is no answer");
    Error::permanent(NAME, operation, why)
}

/// Returns the tokens of a grant whose first one is this.
///
/// # Errors
/// If that is no token that others can be above. Its release frees what was taken.
fn tokens_from(first: u64, count: NonZeroU32) -> Result<RangeInclusive<u64>> {
    let last = first.checked_add(u64::from(count.get()) - 1);
    match (first, last) {
        (1.., Some(last)) => Ok(first..=last),
        _ => {
            let why =
                format!("the server has drawn {first} from `latest` in lockkit_lease, which is no token");
            Err(Error::permanent(NAME, "acquire", why))
        }
    }
}

#[async_trait]
impl Claim for LeaseClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime(NAME, "acquire")?;
        match self.take(patience).await {
            Ok(grant) => Ok(grant),
            Err(error) => Err(self.shared.mended(error).await),
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime(NAME, "renew")?;
        self.receive_or_abandon().await;
        let reason = self.why_lost();
        self.shown = self.token;
        let renewal = loop {
            let reply = self.query("renew", self.sql.renew(self.token)).await?;
            if reply.affected(0) == 1 {
                break Renewal::Held(self.lease());
            }
            match self.row_state("renew").await? {
                (RowState::Own, _, asked) if asked == Some(self.token) => break Renewal::Asked,
                (RowState::Own, ..) => {}
                _ => break Renewal::Lost(reason),
            }
        };
        self.put_back().await;
        Ok(renewal)
    }

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        self.request.ttl = ttl;
        self.shortest_ttl = match self.stage {
            Stage::Holding => self.shortest_ttl.min(ttl),
            _ => ttl,
        };
        self.sql.set_ttl(ttl);
        Ok(Lease::of_ttl(Instant::now(), self.provable_ttl()).length)
    }

    fn detach(&mut self) -> Option<OwnerId> {
        Some(self.sql.owner())
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        require_runtime(NAME, "adopt")?;
        let token = token.get();
        let renewal = loop {
            let reply = self.query("adopt", self.sql.adopt(from, token)).await?;
            if reply.affected(0) == 1 {
                self.stage = Stage::Holding;
                self.may_own = true;
                (self.token, self.shown) = (token, token);
                break Renewal::Held(self.lease());
            }
            let reply = self.query("adopt", self.sql.adoptable(from, token)).await?;
            self.refuse_read_only("adopt", &reply)?;
            let row = reply.row(0).ok_or(sqlx::Error::RowNotFound).during("adopt")?;
            match column::<Option<u64>>(row, 0).during("adopt")? {
                // The server was read-only a moment ago.
                Some(1) => {}
                Some(2) => break Renewal::Asked,
                Some(other) => return Err(no_answer("adopt", other)),
                None => break Renewal::Lost(LossReason::Gone),
            }
        };
        self.put_back().await;
        Ok(Some(renewal))
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime(NAME, "release")?;
        if matches!(self.stage, Stage::Waiting) {
            let is_over = match &mut self.session {
                Some(session) => timeout(WOKEN_WITHIN, session.receive()).await.is_ok(),
                None => true,
            };
            if is_over {
                self.has_waited().await?;
            } else {
                self.abandon_wait();
            }
        }
        self.receive_or_abandon().await;
        self.kill_abandoned("release").await?;
        if self.may_own {
            let (held, mut repeats) = match self.stage {
                Stage::Releasing { held, repeats, asks } => (held, repeats || asks && self.may_have_run),
                stage => (matches!(stage, Stage::Holding), false),
            };
            let reason = self.why_lost();
            let (is_lost, sleeper) = loop {
                self.stage = Stage::Releasing {
                    held,
                    repeats,
                    asks: true,
                };
                let reply = match self.query("release", self.sql.release()).await {
                    // With the table went what was held.
                    Err(error) if error::lacks_a_table(&error) => break (held, None),
                    reply => reply?,
                };
                if reply.affected(0) == 1 {
                    break (false, sleeper(&reply));
                }
                // An earlier request without a reply may have freed the lock, and has woken nobody. This one has not freed it.
                repeats |= self.may_have_run;
                self.stage = Stage::Releasing {
                    held,
                    repeats,
                    asks: false,
                };
                let (state, sleeper, _) = self.row_state("release").await?;
                match state {
                    RowState::Own => {}
                    // A release leaves the row: somebody has deleted it.
                    RowState::Missing => break (held, None),
                    RowState::Free | RowState::Taken => {
                        break (held && !repeats, sleeper.filter(|_| held && repeats));
                    }
                }
            };
            self.stage = Stage::Idle;
            self.may_own = false;
            self.sql.change_owner();
            if is_lost {
                self.put_back().await;
                return Err(Error::lost(NAME, self.request.name.clone(), reason));
            }
            self.sleeper = sleeper;
        }
        self.wake().await;
        self.put_back().await;
        Ok(())
    }

    async fn notified(&mut self) {
        if let (Stage::Waiting, Some(session)) = (self.stage, &mut self.session) {
            return session.receive().await;
        }
        if matches!(self.stage, Stage::Holding) && self.shown != self.token {
            // A renewal writes its token into the row.
            return;
        }
        std::future::pending::<()>().await;
    }

    fn passed_on(&mut self, token: FencingToken) {
        self.token = token.get();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_token_is_no_grant() {
        let count = NonZeroU32::new(32).unwrap();
        assert_eq!(tokens_from(1, count).unwrap(), 1..=32);
        assert_eq!(
            tokens_from(u64::MAX - 31, count).unwrap(),
            u64::MAX - 31..=u64::MAX
        );
        for first in [0, u64::MAX - 30, u64::MAX] {
            assert!(tokens_from(first, count).is_err(), "{first}");
        }
    }
}
