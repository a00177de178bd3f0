//! A claim that holds by owner and expiry in a row, on the server's clock.
//!
//! Every change is one statement that commits itself, and between them a holder needs no connection. Nobody polls while
//! all goes well: whoever waits queues for a turnstile, a lock of the server's own (`GET_LOCK`), and the one who has it
//! has the server sleep until the lease would be over, with a bell at hand, another such lock, by which a release finds
//! the sleeper that it interrupts. A lock that is free while somebody has the turnstile is that one's to take.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, Holder, LockKind, LockName, LockState, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Renewal},
};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, timeout};

use crate::{
    NAME, Shared,
    control::{GivenUp, NIGHT, Term},
    fault::{self, code},
    key::{Key, hexadecimal, literal},
    require_runtime,
    server::{self, Flavour},
    session::{REPLY_TAKES, Session},
    sql::{CLOCK, READ_ONLY},
    wire::{Reply, column},
};

/// The server's clock, in microseconds since 1970, as of the beginning of a statement.
const NOW: &str = CLOCK;
/// True if the server takes writes once the row is locked, which it may have to wait for: the name's length has it ask so late.
const IS_WRITABLE: &str = "IF(LENGTH(name), CAST(@@global.read_only AS CHAR) IN ('0', 'OFF'), 0)";
const NOBODY: &str = "x'00000000000000000000000000000000'";
/// How long a waiter queues for the turnstile before it looks for itself, in seconds.
const QUEUES_FOR: u32 = 2;
/// How long the next in line sleeps at most, in seconds.
const SLEEPS_FOR: u32 = 1;
/// How long the server bears the silence of a session that may have the turnstile and neither queues nor sleeps, in
/// seconds: as long as a lock that is free can be kept for somebody who went dead.
const TURNS_WITHIN: u32 = 2;
/// The longest time from the death of whoever was next in line until that one is passed over: it queues, sleeps, and is
/// silent.
pub(crate) const PASSED_OVER_WITHIN: Duration =
    Duration::from_secs((QUEUES_FOR + SLEEPS_FOR + TURNS_WITHIN) as u64);
/// How long a session that has been woken may take to say so before it is killed. A second blow while MariaDB deals with
/// the first can keep both, and with them the turnstile, for two seconds.
const ANSWERS_WITHIN: Duration = Duration::from_millis(10);
/// The time that a release waits for the answer that the next in line was woken.
const WAKES_WITHIN: Duration = Duration::from_millis(200);
/// How long the server bears the silence of a session that is kept for the next request, in seconds.
pub(crate) const SECONDS: u32 = 60;

#[derive(Debug)]
pub(crate) struct LeaseClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    sql: Sql,
    session: Option<Session>,
    stage: Stage,
    /// Before the latest request was sent that may have taken or renewed the lock, and was answered.
    sent: Instant,
    /// Whether the server may have something of this owner's.
    is_known: bool,
    /// Whether the session may have the turnstile.
    has_queued: bool,
    /// A session that has been given up while it waited for the lock, or tried to take it, and has to be ended.
    doomed: Option<GivenUp>,
    /// The session that had the bell when this claim let go of the lock.
    sleeper: Option<u64>,
    /// Whether the latest request was sent more than once, so that its answer may be that to a repetition.
    was_repeated: bool,
    /// The token that the hold has now.
    token: u64,
    /// The one that the row has, which may be that of a hold that it has been passed on from.
    shown: u64,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Out,
    /// It queues for the turnstile, or sleeps as the next in line.
    Waiting,
    /// It holds, and needs no session.
    Holding,
    /// It lets go: of a hold, or of what an attempt may have taken.
    LettingGo {
        held: bool,
        /// True if an earlier request may have freed the lock.
        repeats: bool,
    },
}

impl LeaseClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest) -> Self {
        let key = Key::new(&shared.namespace, request.mode.kind(), &request.name);
        Self {
            sql: Sql::new(&key, &shared, &request),
            shared,
            request,
            session: None,
            stage: Stage::Out,
            sent: Instant::now(),
            is_known: false,
            has_queued: false,
            doomed: None,
            sleeper: None,
            was_repeated: false,
            token: 0,
            shown: 0,
        }
    }

    /// One request, over the session at hand or another. The owner makes each of them harmless if it is made twice.
    async fn ask(&mut self, operation: &'static str, request: String) -> Result<Reply> {
        self.was_repeated = false;
        loop {
            let session = match &mut self.session {
                Some(session) => session,
                none => {
                    self.has_queued = false;
                    none.insert(self.shared.sessions.borrow(operation, SECONDS).await?)
                }
            };
            let sent = Instant::now();
            if self.has_queued {
                // Not for longer than who waits is to keep the turnstile, and as any other once it has let go of that.
                let after = self.sql.bears_after_a_wait();
                // Should the wait have been interrupted in its transaction.
                let request = format!("ROLLBACK; {request}");
                session.send_and_set(TURNS_WITHIN, request, &after).await;
            } else {
                session.send(SECONDS, request.clone()).await;
            }
            match session.answer().await {
                Ok(mut reply) => {
                    if self.has_queued {
                        reply.drop_first();
                    }
                    self.sent = sent;
                    session.is_proven = true;
                    return Ok(reply);
                }
                // Meant for a sleep that was over by then. What was done by then is done again.
                Err(error) if fault::number(&error) == Some(code::QUERY_INTERRUPTED) => {
                    self.was_repeated = true;
                    let seconds = if self.has_queued { TURNS_WITHIN } else { SECONDS };
                    if session.ask(seconds, "ROLLBACK".to_owned()).await.is_err() {
                        self.session = None;
                    }
                }
                Err(error) => {
                    let is_stale = fault::ends_the_session(&error) && !session.is_proven;
                    if fault::number(&error).is_none() {
                        // The server may not know that the connection has ended, and answer to nobody.
                        self.leave();
                    }
                    self.session = None;
                    if !is_stale {
                        return Err(fault::error(operation, error));
                    }
                    // It had been kept for too long. The others have been, too.
                    self.shared.sessions.forget();
                    self.was_repeated = true;
                    self.end_the_doomed(operation).await?;
                }
            }
        }
    }

    /// Looks why a statement has found no row to change.
    ///
    /// # Errors
    /// If the server is read-only by now. Nothing is changed there, also if the account may.
    async fn look(&mut self, operation: &'static str) -> Result<Look> {
        let reply = self.ask(operation, self.sql.look()).await?;
        if server::says_read_only(&reply) {
            self.session = None;
            self.shared.sessions.forget();
            return Err(server::read_only("read_only"));
        }
        let row = reply.row(0).ok_or(sqlx::Error::RowNotFound);
        let look = row.and_then(|row| {
            let found: Option<u64> = column(row, 0)?;
            Ok(Look {
                is_there: found.is_some(),
                is_ours: found == Some(1),
                is_free: found == Some(2),
                sleeper: column(row, 1)?,
            })
        });
        look.map_err(|error| fault::error(operation, error))
    }

    /// Waits for what a dropped future has left under way. If that takes too long, the connection may be dead.
    async fn settle_or_leave(&mut self) {
        let Some(session) = &mut self.session else { return };
        if session.settle_within(REPLY_TAKES).await {
            return;
        }
        // They may be as dead.
        self.shared.sessions.forget();
        self.leave();
    }

    /// Leaves the session for another. What comes late is harmless, but for an attempt, which is to be ended.
    fn leave(&mut self) {
        let session = self.session.take();
        if matches!(self.stage, Stage::Out) && self.is_known {
            self.doomed = session.map(Session::give_up);
        }
    }

    async fn end_the_doomed(&mut self, operation: &'static str) -> Result<()> {
        if let Some(doomed) = &self.doomed {
            self.shared
                .sessions
                .control
                .end_given_up(operation, doomed)
                .await?;
            self.doomed = None;
        }
        Ok(())
    }

    /// The session is idle and without a transaction.
    async fn give_back(&mut self) {
        if let Some(session) = self.session.take() {
            if self.has_queued {
                session.quit().await;
            } else {
                self.shared.sessions.keep(session).await;
            }
        }
    }

    /// Ends the sleep of whoever had the bell. Without it, that one wakes by itself a little later, so nobody waits for a `KILL`
    /// that waits itself: MariaDB may try for two seconds to reach a session that is about to wake.
    async fn wake(&mut self) {
        // Once: it may be at something else by the next time.
        if let (Some(sleeper), Some(session)) = (self.sleeper.take(), &mut self.session) {
            let seconds = if self.has_queued { TURNS_WITHIN } else { SECONDS };
            let woken = session.ask(seconds, wake(&self.sql.bell, sleeper));
            match timeout(WAKES_WITHIN, woken).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(%error, "the next in line was not woken"),
                Err(_) => self.session = None,
            }
        }
    }

    /// What waiting came to; `false` if it goes on.
    async fn has_waited(&mut self) -> Result<bool> {
        let Some(session) = &mut self.session else {
            self.stage = Stage::Out;
            return Ok(true);
        };
        if !session.is_settled().await {
            if self.shared.still_waits(session.id, &session.term).await? {
                return Ok(false);
            }
            if !session.is_settled().await {
                self.give_up_waiting();
                return Err(Error::transient(
                    NAME,
                    "acquire",
                    "the connection that waited for the lock went dead",
                ));
            }
        }
        match session.answer().await {
            Ok(_) => {}
            // So it was woken.
            Err(error) if fault::number(&error) == Some(code::QUERY_INTERRUPTED) => {}
            Err(_) => self.session = None,
        }
        self.stage = Stage::Out;
        Ok(true)
    }

    fn give_up_waiting(&mut self) {
        self.stage = Stage::Out;
        self.doomed = self.session.take().map(Session::give_up);
    }

    fn lease(&self) -> Lease {
        let ttl = self.request.ttl;
        // An allowance for the drift of the server's clock.
        let length = ttl.saturating_sub(ttl / 100 + Duration::from_millis(2));
        Lease {
            since: self.sent,
            length: Some(length),
        }
    }

    fn why_lost(&self) -> LossReason {
        let over = self.lease().end().is_some_and(|end| Instant::now() >= end);
        if over {
            LossReason::Expired
        } else {
            LossReason::Revoked
        }
    }
}

#[async_trait]
impl Claim for LeaseClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime("acquire")?;
        if matches!(self.stage, Stage::Waiting) && !self.has_waited().await? {
            return Ok(None);
        }
        if matches!(self.stage, Stage::LettingGo { .. }) {
            // What is taken from here on is not for that release.
            match self.release().await {
                Err(error) if !error.is_lost() => return Err(error),
                _ => {}
            }
        }
        self.settle_or_leave().await;
        self.end_the_doomed("acquire").await?;
        loop {
            self.is_known = true;
            let reply = self.ask("acquire", self.sql.take(self.has_queued)).await?;
            if reply.affected(0) == 1 {
                let first = reply.last_insert_id(0);
                self.stage = Stage::Holding;
                (self.token, self.shown) = (first, first);
                self.has_queued = false;
                self.give_back().await;
                return Ok(Some(Grant {
                    tokens: first..=first + u64::from(self.request.tokens.get()) - 1,
                    lease: self.lease(),
                }));
            }
            let look = self.look("acquire").await?;
            if !look.is_there {
                self.ask("acquire", self.sql.make()).await?;
            }
            if !look.is_there || look.is_ours || look.is_free {
                continue;
            }
            if patience.is_zero() {
                self.is_known = false;
                self.give_back().await;
            } else if let Some(session) = &mut self.session {
                self.shared.sessions.wait_in(session)?;
                self.has_queued = true;
                self.stage = Stage::Waiting;
                let wait = self.sql.wait(&session.term);
                session.send(TURNS_WITHIN, wait).await;
                // The first poll sends it.
                session.is_settled().await;
            }
            return Ok(None);
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime("renew")?;
        self.settle_or_leave().await;
        let reason = self.why_lost();
        self.shown = self.token;
        let renewal = loop {
            let reply = self.ask("renew", self.sql.renew(self.token)).await?;
            if reply.affected(0) == 1 {
                break Renewal::Held(self.lease());
            }
            if !self.look("renew").await?.is_ours {
                break Renewal::Lost(reason);
            }
        };
        self.give_back().await;
        Ok(renewal)
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime("release")?;
        if matches!(self.stage, Stage::Waiting) {
            let is_over = match &mut self.session {
                Some(session) => timeout(ANSWERS_WITHIN, session.settle()).await.is_ok(),
                None => true,
            };
            if is_over {
                self.has_waited().await?;
            } else {
                self.give_up_waiting();
            }
        }
        self.settle_or_leave().await;
        self.end_the_doomed("release").await?;
        if self.is_known {
            let (held, mut repeats) = match self.stage {
                Stage::LettingGo { held, repeats } => (held, repeats),
                stage => (matches!(stage, Stage::Holding), false),
            };
            let reason = self.why_lost();
            let (is_lost, sleeper) = loop {
                self.stage = Stage::LettingGo { held, repeats: true };
                let reply = self.ask("release", self.sql.release()).await?;
                if reply.affected(0) == 1 {
                    break (false, sleeper(&reply));
                }
                // An earlier one that was not answered may have freed the lock, and has woken nobody. This one has not.
                repeats |= self.was_repeated;
                self.stage = Stage::LettingGo { held, repeats };
                let look = self.look("release").await?;
                if !look.is_ours {
                    break (held && !repeats, look.sleeper.filter(|_| held && repeats));
                }
            };
            self.stage = Stage::Out;
            self.is_known = false;
            self.sql.be_another();
            if is_lost {
                self.give_back().await;
                return Err(Error::lost(NAME, self.request.name.clone(), reason));
            }
            self.sleeper = sleeper;
        }
        self.wake().await;
        self.give_back().await;
        Ok(())
    }

    async fn notified(&mut self) {
        if let (Stage::Waiting, Some(session)) = (self.stage, &mut self.session) {
            return session.settle().await;
        }
        if matches!(self.stage, Stage::Holding) && self.shown != self.token {
            // A renewal says whose it is now.
            return;
        }
        std::future::pending::<()>().await;
    }

    fn passed_on(&mut self, token: FencingToken) {
        self.token = token.get();
    }
}

/// The state of a lock of which a statement has found no row to change.
#[derive(Debug)]
struct Look {
    /// True if the lock has a row.
    is_there: bool,
    /// True if this owner has it. Until just now the server took no writes.
    is_ours: bool,
    /// True if this owner could have it.
    is_free: bool,
    /// The session that has the bell.
    sleeper: Option<u64>,
}

/// The statements of one claim. Each statement is a transaction of its own.
#[derive(Debug)]
struct Sql {
    key: Key,
    id: u128,
    owner: String,
    turnstile: String,
    bell: String,
    flavour: Flavour,
    label: String,
    micros: u128,
    tokens: u32,
}

impl Sql {
    fn new(key: &Key, shared: &Shared, request: &ClaimRequest) -> Self {
        let id = request.owner.get();
        Self {
            key: key.clone(),
            id,
            owner: literal(&id.to_be_bytes()),
            turnstile: turnstile(&shared.database, key),
            bell: bell(&shared.database, key),
            flavour: shared.server.flavour,
            label: request
                .label
                .as_ref()
                .map_or_else(|| "NULL".to_owned(), |label| literal(label.as_bytes())),
            micros: request.ttl.as_micros(),
            tokens: request.tokens.get(),
        }
    }

    /// Goes on as another owner. Whatever the first one has said may come late, from a connection that was given up, and
    /// does nothing to what this one takes.
    fn be_another(&mut self) {
        self.id = self.id.wrapping_add(1);
        self.owner = literal(&self.id.to_be_bytes());
    }

    /// Takes the lock if it is free, kept for this owner, or this owner's already. The first token comes with the acknowledgement
    /// of the statement, which is the only one, and the only write, unless its session has queued.
    fn take(&self, has_queued: bool) -> String {
        let Self {
            key,
            owner,
            turnstile,
            bell,
            label,
            micros,
            tokens,
            ..
        } = self;
        let key = key.as_sql();
        // In the order of writing: each assignment sees those before it.
        let set = format!(
            "token=LAST_INSERT_ID(latest+1), latest=latest+{tokens}, owner={owner}, expires={NOW}+{micros}, label={label}"
        );
        let take = format!(
            "UPDATE lockkit_lease SET {set} WHERE name={key} AND (owner={owner} OR expires<={NOW} \
             AND IFNULL(IS_USED_LOCK({turnstile})=CONNECTION_ID(), TRUE)) AND {IS_WRITABLE}"
        );
        if has_queued {
            format!(
                "{take}; SELECT IF(ROW_COUNT()=1, RELEASE_LOCK({bell}), NULL), \
                 IF(ROW_COUNT()=1, RELEASE_LOCK({turnstile}), NULL)"
            )
        } else {
            take
        }
    }

    /// Asks for the state of the row, `NULL` if there is none; who has the bell, and whether the server is read-only.
    fn look(&self) -> String {
        let Self {
            key,
            owner,
            turnstile,
            bell,
            ..
        } = self;
        let key = key.as_sql();
        format!(
            "SELECT (SELECT CASE WHEN owner={owner} AND token<>0 AND expires>{NOW} THEN 1 \
             WHEN expires<={NOW} AND IFNULL(IS_USED_LOCK({turnstile})=CONNECTION_ID(), TRUE) THEN 2 ELSE 0 END \
             FROM lockkit_lease WHERE name={key}), \
             NULLIF(IS_USED_LOCK({bell}), CONNECTION_ID()), {READ_ONLY}"
        )
    }

    /// The seconds of silence that the server is to bear of a session that has queued: few if it still has the turnstile.
    fn bears_after_a_wait(&self) -> String {
        let turnstile = &self.turnstile;
        format!("IF(IS_USED_LOCK({turnstile})=CONNECTION_ID(), {TURNS_WITHIN}, {SECONDS})")
    }

    fn make(&self) -> String {
        format!(
            "INSERT IGNORE INTO lockkit_lease (name, owner, expires, token, latest) VALUES ({}, {NOBODY}, 0, 0, {CLOCK})",
            self.key.as_sql()
        )
    }

    /// Queues for the turnstile; through it, sleeps while the lock is taken.
    ///
    /// It looks, and takes the bell, while it keeps the row from being changed: in a transaction, since the server lets go of a row
    /// that it has found by its key before it works out what to answer, if the statement is all there is. So whoever releases either finds the bell
    /// taken, and wakes it, or is seen to have released. Nobody is woken who is not about to sleep: after a `KILL QUERY`
    /// that comes between two statements of a request, the server leaves out the rest of them, and its answers. For the same
    /// reason the sleep is the last.
    fn wait(&self, term: &Term) -> String {
        let Self {
            key,
            owner,
            turnstile,
            bell,
            flavour,
            ..
        } = self;
        let (queue, key, sleep) = (queue(turnstile), key.as_sql(), sleep(bell, *flavour));
        let night = match flavour {
            Flavour::MariaDb => format!("SET @lockkit_night='{NIGHT}{}'; ", term.session),
            Flavour::MySql => String::new(),
        };
        format!(
            "{night}{queue}; START TRANSACTION; \
             SELECT IF(owner={owner} OR expires<={NOW} OR IFNULL(IS_USED_LOCK({turnstile})<>CONNECTION_ID(), TRUE), \
             0, {} * LEAST({SLEEPS_FOR}, (expires-{NOW})/1000000)) \
             INTO @lockkit_sleep FROM lockkit_lease WHERE name={key} LOCK IN SHARE MODE; COMMIT; {sleep}",
            have(bell, 0)
        )
    }

    fn renew(&self, token: u64) -> String {
        let Self {
            key, owner, micros, ..
        } = self;
        format!(
            "UPDATE lockkit_lease SET expires={NOW}+{micros}, token=GREATEST(token,{token}) WHERE name={} AND owner={owner} \
             AND expires>{NOW} AND token<>0 AND {IS_WRITABLE}",
            key.as_sql()
        )
    }

    fn release(&self) -> String {
        let whose = format!("owner={} AND {IS_WRITABLE}", self.owner);
        let_go(&self.key, &self.bell, &whose)
    }
}

/// Frees the lock. Who has the bell comes with the acknowledgement.
fn let_go(key: &Key, bell: &str, whose: &str) -> String {
    format!(
        "UPDATE lockkit_lease SET token=0*LAST_INSERT_ID(IFNULL(NULLIF(IS_USED_LOCK({bell}), CONNECTION_ID()), 0)), \
         label=NULL, owner={NOBODY}, expires=0 WHERE name={} AND {whose} AND expires>{NOW}",
        key.as_sql()
    )
}

/// The session that has the bell, by the answer to [`let_go`]. To be woken only if the lock was freed: otherwise the row was not kept from
/// being changed meanwhile, so that its `KILL QUERY` could come before that session sleeps.
fn sleeper(reply: &Reply) -> Option<u64> {
    Some(reply.last_insert_id(0)).filter(|sleeper| *sleeper != 0)
}

/// Ends the sleep of the session that had the bell, if it still has that. Fails if it has not: its sleep has ended by itself, and it
/// may be at anything by now, of which a `KILL QUERY` might have the server leave out the answers.
fn wake(bell: &str, sleeper: u64) -> String {
    format!("KILL QUERY IF(IS_USED_LOCK({bell})={sleeper}, {sleeper}, NULL)")
}

/// What the server's own locks are called: the one that waiters queue for.
fn turnstile(database: &str, key: &Key) -> String {
    server_lock("lockkit", database, key)
}

/// The one that the next in line has while it sleeps.
fn bell(database: &str, key: &Key) -> String {
    server_lock("lockkit-bell", database, key)
}

/// Such names are not of any database, and may be 64 characters long.
fn server_lock(what: &str, database: &str, key: &Key) -> String {
    let digest = hexadecimal(&Sha256::digest(format!("{database}/{}", key.as_sql())));
    format!("'{what}:{}'", &digest[..48])
}

/// 1 if the session has this lock of the server's own, after so many seconds at most. To have it twice is to have to let
/// go of it twice.
fn have(lock: &str, seconds: u32) -> String {
    format!("IF(IS_USED_LOCK({lock})=CONNECTION_ID(), 1, GET_LOCK({lock}, {seconds}))")
}

fn queue(turnstile: &str) -> String {
    format!("SELECT {}", have(turnstile, QUEUES_FOR))
}

/// Sleeps, with the bell at hand.
///
/// On MariaDB it waits for a lock that is never given up. All its `SLEEP`s share one mutex, which a `KILL QUERY` only tries
/// for, and if another sleeper comes or goes just then, whoever is to be woken wakes with that mutex and stands still, and
/// all others with it, until the `KILL` has given up after two seconds. Should the one who has the lock be gone, it sleeps
/// nevertheless.
fn sleep(bell: &str, flavour: Flavour) -> String {
    let sleep = match flavour {
        Flavour::MariaDb => {
            "IF(GET_LOCK(@lockkit_night, @lockkit_sleep), \
             RELEASE_LOCK(@lockkit_night)+SLEEP(@lockkit_sleep), 0)"
        }
        Flavour::MySql => "SLEEP(@lockkit_sleep)",
    };
    format!("SELECT {sleep}, RELEASE_LOCK({bell})")
}

impl Shared {
    pub(crate) async fn look_at_lease(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let key = Key::new(&self.namespace, kind, name);
        let sql = key.as_sql();
        let queue = queue(&turnstile(&self.database, &key));
        let sleep = sleep(&bell(&self.database, &key), self.server.flavour);
        let look = format!(
            "SELECT token, label, CAST(expires-{NOW} AS UNSIGNED) FROM lockkit_lease \
             WHERE name={sql} AND token<>0 AND expires>{NOW}; \
             SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE CAST(INFO AS BINARY) IN ({}, {})",
            literal(queue.as_bytes()),
            literal(sleep.as_bytes())
        );
        let during = |error| fault::error("inspect", error);
        let reply = self.sessions.control.ask("inspect", look).await?;
        let mut holders = Vec::new();
        for row in reply.rows(0) {
            let label: Option<Vec<u8>> = column(row, 1).map_err(during)?;
            holders.push(Holder::new(
                FencingToken::new(column(row, 0).map_err(during)?),
                label.map(|label| String::from_utf8_lossy(&label).into_owned()),
                Some(Duration::from_micros(column(row, 2).map_err(during)?)),
            ));
        }
        let waiters: u64 = reply.row(1).map_or(Ok(0), |row| column(row, 0)).map_err(during)?;
        Ok(LockState::new(holders, usize::try_from(waiters).ok()))
    }

    pub(crate) async fn revoke_lease(&self, name: &LockName, kind: LockKind, token: u64) -> Result<bool> {
        let key = Key::new(&self.namespace, kind, name);
        let control = &self.sessions.control;
        let bell = bell(&self.database, &key);
        // The connection may turn out to have ended, and be replaced by this. What ends the hold is not to be said twice: the
        // answer to the second time would be that there is none.
        control.ask("revoke", "DO 0".to_owned()).await?;
        let request = let_go(&key, &bell, &format!("token={token} AND {IS_WRITABLE}"));
        let reply = control.ask_once("revoke", request).await?;
        let frees = reply.affected(0) == 1;
        if !frees && server::says_read_only(&control.ask("revoke", format!("SELECT {READ_ONLY}")).await?) {
            return Err(server::read_only("read_only"));
        }
        if let Some(sleeper) = sleeper(&reply).filter(|_| frees) {
            // Without it, the sleeper wakes by itself a little later.
            let _ = control.kill_by("revoke", wake(&bell, sleeper)).await;
        }
        Ok(frees)
    }
}
