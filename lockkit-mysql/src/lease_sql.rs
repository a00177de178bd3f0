//! The statements of leases. Each is a transaction of its own.

use std::time::Duration;

use lockkit_core::{
    AcquireOptions, Result,
    spi::{ClaimRequest, OwnerId},
};
use sha2::{Digest, Sha256};

use crate::{
    connection::Reply,
    control::{Epoch, TIMER_LOCK},
    layout::{Key, Range, hexadecimal, literal, literal_or_null},
    random,
    row_sql::{CLOCK, RAISED, RAISED_AT_ONCE, READ_ONLY},
    server::Flavour,
};

/// The server's clock in µs since 1970, at the beginning of the statement.
const NOW: &str = CLOCK;

/// True if the server takes writes once the row is locked, for which the statement may have to wait. `LENGTH` has it evaluated
/// that late.
const IS_WRITABLE: &str = "IF(LENGTH(name), CAST(@@global.read_only AS CHAR) IN ('0', 'OFF'), 0)";

const NOBODY: &str = "x'00000000000000000000000000000000'";

/// The longest wait for the queue lock, in seconds. Then the waiter tries the lock itself.
pub(crate) const QUEUES_FOR: u32 = 2;

/// The longest sleep of the head of the queue, in seconds.
pub(crate) const SLEEPS_FOR: u32 = 1;

/// The pauses in which a wake-up waits for the head of the queue to fall asleep, in seconds. Together they are shorter than a
/// release waits for it.
const WAKES_AFTER: [f64; 4] = [0.001, 0.005, 0.02, 0.1];

/// The statements of one claim.
///
/// Waiters of a name use three locks of the server itself (`GET_LOCK`). They queue for the *queue lock*. Its holder is the head of the
/// queue. The head has the *sleep lock* while it sleeps, and on its way there, so that a release finds whom to wake. It has the
/// *asleep lock* only in the statement that sleeps, so that no other statement is interrupted.
#[derive(Debug)]
pub(crate) struct LeaseSql {
    key: Key,
    owner_id: u128,
    owner: String,
    queue_lock: String,
    sleep_lock: String,
    asleep_lock: String,
    flavour: Flavour,
    label: String,
    full_name: String,
    micros: u128,
    tokens: u32,
}

impl LeaseSql {
    pub(crate) fn new(key: &Key, locks: &ServerLocks, flavour: Flavour, request: &ClaimRequest) -> Self {
        let owner_id = request.owner.get();
        Self {
            key: key.clone(),
            owner_id,
            owner: literal(&owner_id.to_be_bytes()),
            queue_lock: locks.queue(key),
            sleep_lock: locks.sleep(key),
            asleep_lock: locks.asleep(key),
            flavour,
            label: literal_or_null(request.label.as_deref()),
            full_name: literal_or_null(key.full_name(&request.name)),
            micros: request.ttl.as_micros(),
            tokens: request.tokens.get(),
        }
    }

    pub(crate) fn set_ttl(&mut self, ttl: Duration) {
        self.micros = ttl.as_micros();
    }

    pub(crate) fn owner(&self) -> OwnerId {
        OwnerId::new(self.owner_id)
    }

    /// Becomes another owner. A request of the former owner that comes late, from a connection that was given up, does nothing to
    /// a hold of this one.
    pub(crate) fn change_owner(&mut self) {
        self.owner_id = self.owner_id.wrapping_add(1);
        self.owner = literal(&self.owner_id.to_be_bytes());
    }

    /// Takes the lock if it is free, or is this owner's already. While somebody is the head of the queue, a free lock is only the
    /// head's. The first token comes with the statement's acknowledgement. There is one statement, unless the session has queued.
    pub(crate) fn take(&self, has_queued: bool) -> String {
        let Self {
            key,
            owner,
            queue_lock,
            sleep_lock,
            asleep_lock,
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
             AND IFNULL(IS_USED_LOCK({queue_lock})=CONNECTION_ID(), TRUE)) AND {IS_WRITABLE}"
        );
        if has_queued {
            // The statement that slept may have been interrupted before it released the locks. The queue lock goes last: it wakes the
            // next head, which does not sleep if one of the others is still taken, and asks again.
            format!(
                "{take}; SELECT RELEASE_LOCK({asleep_lock}), IF(ROW_COUNT()=1, RELEASE_LOCK({sleep_lock}), NULL), \
                 IF(ROW_COUNT()=1, RELEASE_LOCK({queue_lock}), NULL)"
            )
        } else {
            take
        }
    }

    /// Reads why a statement has changed no row: the row's [`RowState`] in numbers, `NULL` if there is none; the session that has
    /// the sleep lock; the token of the hold that was last asked back; whether the server is read-only.
    pub(crate) fn state(&self) -> String {
        let Self {
            key,
            owner,
            queue_lock,
            sleep_lock,
            ..
        } = self;
        let key = key.as_sql();
        format!(
            "SELECT (SELECT CASE WHEN owner={owner} AND token<>0 AND expires>{NOW} THEN 1 \
             WHEN expires<={NOW} AND IFNULL(IS_USED_LOCK({queue_lock})=CONNECTION_ID(), TRUE) THEN 2 ELSE 0 END \
             FROM lockkit_lease WHERE name={key}), \
             NULLIF(IS_USED_LOCK({sleep_lock}), CONNECTION_ID()), \
             (SELECT asked FROM lockkit_lease WHERE name={key}), {READ_ONLY}"
        )
    }

    /// An expression: `as_head` if the session has the queue lock, else `otherwise`.
    pub(crate) fn if_head(&self, as_head: u32, otherwise: u32) -> String {
        let queue_lock = &self.queue_lock;
        format!("IF(IS_USED_LOCK({queue_lock})=CONNECTION_ID(), {as_head}, {otherwise})")
    }

    pub(crate) fn make(&self) -> String {
        // It reads what tokens were raised above, and keeps that from being raised until the row is there to be raised, too.
        format!(
            "INSERT IGNORE INTO lockkit_lease (name, owner, expires, token, latest) VALUES ({RAISED}, {NOBODY}, 0, 0, 0); \
             INSERT IGNORE INTO lockkit_lease (name, owner, expires, token, latest, full_name) \
             SELECT {}, {NOBODY}, 0, 0, GREATEST({CLOCK}, latest), {} FROM lockkit_lease WHERE name={RAISED} LOCK IN SHARE MODE",
            self.key.as_sql(),
            self.full_name
        )
    }

    /// Queues for the queue lock. With it, sleeps while the lock is taken.
    ///
    /// The head reads the row and takes the sleep lock while it keeps the row from being changed. So a release either finds the
    /// sleep lock taken, and wakes the head, or the head sees that the lock is free. That takes a transaction: a statement by
    /// itself lets go of a row that it has found by its key before it evaluates its columns.
    ///
    /// A `KILL QUERY` between two statements of a request makes the server leave out the rest of them, and their results, for which
    /// the client then waits. So the sleep comes last, and a session is interrupted only once it has the asleep lock, which that
    /// statement takes first.
    pub(crate) fn wait(&self, epoch: &Epoch) -> String {
        let Self {
            key,
            owner,
            queue_lock,
            sleep_lock,
            asleep_lock,
            flavour,
            ..
        } = self;
        let (queue, key) = (queue(queue_lock), key.as_sql());
        let sleep = sleep(sleep_lock, asleep_lock, *flavour);
        let timer = match flavour {
            Flavour::MariaDb => format!("SET @lockkit_timer='{TIMER_LOCK}{}'; ", epoch.session),
            Flavour::MySql => String::new(),
        };
        format!(
            "{timer}{queue}; START TRANSACTION; \
             SELECT IF(owner={owner} OR expires<={NOW} OR IFNULL(IS_USED_LOCK({queue_lock})<>CONNECTION_ID(), TRUE), \
             0, {} * LEAST({SLEEPS_FOR}, (expires-{NOW})/1000000)) \
             INTO @lockkit_sleep FROM lockkit_lease WHERE name={key} LOCK IN SHARE MODE; COMMIT; {sleep}",
            acquire(sleep_lock, 0)
        )
    }

    /// Prolongs the lease of the hold of this token, unless its holder was asked to give it up.
    pub(crate) fn renew(&self, token: u64) -> String {
        let Self {
            key, owner, micros, ..
        } = self;
        format!(
            "UPDATE lockkit_lease SET expires={NOW}+{micros}, token=GREATEST(token,{token}) WHERE name={} AND owner={owner} \
             AND asked<>{token} AND expires>{NOW} AND token<>0 AND {IS_WRITABLE}",
            key.as_sql()
        )
    }

    /// Makes this owner that of the hold of this token, unless its holder was asked to give it up. It is this owner's already if the
    /// acknowledgement of an earlier request was lost. Such a request may come late, and does not shorten the lease.
    pub(crate) fn adopt(&self, from: OwnerId, token: u64) -> String {
        let Self {
            owner, label, micros, ..
        } = self;
        // Each request changes the row, so that the acknowledgement says that it was found.
        format!(
            "UPDATE lockkit_lease SET owner={owner}, expires=GREATEST(expires+1, {NOW}+{micros}), label={label} \
             WHERE {} AND asked<>{token} AND {IS_WRITABLE}",
            self.to_adopt(from, token)
        )
    }

    /// Reads why a statement has adopted nothing: 1 if there is such a hold, 2 if its holder was asked to give it up, else `NULL`;
    /// whether the server is read-only.
    pub(crate) fn adoptable(&self, from: OwnerId, token: u64) -> String {
        format!(
            "SELECT (SELECT IF(asked={token}, 2, 1) FROM lockkit_lease WHERE {}), {READ_ONLY}",
            self.to_adopt(from, token)
        )
    }

    fn to_adopt(&self, from: OwnerId, token: u64) -> String {
        let (key, owner) = (self.key.as_sql(), &self.owner);
        let from = literal(&from.get().to_be_bytes());
        format!("name={key} AND owner IN ({owner}, {from}) AND token={token} AND token<>0 AND expires>{NOW}")
    }

    pub(crate) fn release(&self) -> String {
        free(&self.key, &self.sleep_lock, &format!("owner={}", self.owner))
    }

    /// Ends the sleep of a session, see [`wake`].
    pub(crate) fn wake(&self, sleeper: u64) -> String {
        wake(&self.sleep_lock, &self.asleep_lock, sleeper)
    }
}

/// Reads the last token that was ever reserved, or the clock if that is ahead. Rows that came back from a backup say nothing about the
/// tokens since, which began at the clock.
pub(crate) fn fence() -> String {
    format!("SELECT GREATEST(COALESCE(MAX(latest), 0), {CLOCK}) FROM lockkit_lease")
}

/// Has all tokens of claims that begin later be above this one: those of rows that are made later, and then those of all rows. Each statement
/// is repeated until it finds fewer than [`RAISED_AT_ONCE`] rows.
pub(crate) fn raise_fence(above: u64) -> Vec<String> {
    vec![
        format!(
            "INSERT INTO lockkit_lease (name, owner, expires, token, latest) VALUES ({RAISED}, {NOBODY}, 0, 0, {above}) \
             ON DUPLICATE KEY UPDATE latest=GREATEST(latest, {above})"
        ),
        format!(
            "UPDATE lockkit_lease SET latest={above} WHERE latest<{above} ORDER BY name LIMIT {RAISED_AT_ONCE}"
        ),
    ]
}

/// Returns the statements that ask the holder with this token to give up its hold, and then read what is left of the lease, in µs. A
/// hold that was passed on within its client has one of the tokens from the one in the row to the last reserved one.
pub(crate) fn ask_back(key: &Key, token: u64) -> String {
    let key = key.as_sql();
    // The last reserved one may have been raised since.
    let most = AcquireOptions::MAX_LOCAL_HANDOFFS;
    let is_it = format!(
        "name={key} AND token<>0 AND token<={token} AND token+{most}>={token} AND latest>={token} AND expires>{NOW}"
    );
    format!(
        "UPDATE lockkit_lease SET asked={token} WHERE {is_it} AND {IS_WRITABLE}; \
         SELECT CAST(expires-{NOW} AS UNSIGNED) FROM lockkit_lease WHERE {is_it} AND asked={token}"
    )
}

/// Returns the statements by which an operator frees the lock that is held with this token, and wakes a session.
pub(crate) fn revoke(locks: &ServerLocks, key: &Key, token: u64) -> (String, impl Fn(u64) -> String + use<>) {
    let (sleep_lock, asleep_lock) = (locks.sleep(key), locks.asleep(key));
    let free = free(key, &sleep_lock, &format!("token={token}"));
    (free, move |sleeper| wake(&sleep_lock, &asleep_lock, sleeper))
}

/// Returns the holder, and the number of statements that wait.
pub(crate) fn holder(locks: &ServerLocks, key: &Key, flavour: Flavour) -> String {
    let [queue, sleep] = waits(locks, key, flavour).map(|wait| literal(wait.as_bytes()));
    format!(
        "SELECT token, label, CAST(expires-{NOW} AS UNSIGNED) FROM lockkit_lease \
         WHERE name={} AND token<>0 AND expires>{NOW}; \
         SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE CAST(INFO AS BINARY) IN ({queue}, {sleep})",
        key.as_sql()
    )
}

/// Returns the statements of those who wait for a name.
pub(crate) fn waits(locks: &ServerLocks, key: &Key, flavour: Flavour) -> [String; 2] {
    let queue = queue(&locks.queue(key));
    let sleep = sleep(&locks.sleep(key), &locks.asleep(key), flavour);
    [queue, sleep]
}

/// Returns the holders of the next `names` names of a range, in the order of the names: name, full name, token, label, and what is
/// left of the lease. Locks nothing.
pub(crate) fn page(range: &Range, names: usize) -> String {
    let range = range.as_sql();
    format!(
        "SELECT name, full_name, token, label, CAST(expires-{NOW} AS UNSIGNED) FROM lockkit_lease \
         WHERE {range} AND token<>0 AND expires>{NOW} ORDER BY name LIMIT {names}"
    )
}

/// Frees the lock. The acknowledgement says which session has the sleep lock, see [`sleeper`].
fn free(key: &Key, sleep_lock: &str, whose: &str) -> String {
    format!(
        "UPDATE lockkit_lease SET token=0*LAST_INSERT_ID(IFNULL(NULLIF(IS_USED_LOCK({sleep_lock}), CONNECTION_ID()), 0)), \
         label=NULL, owner={NOBODY}, expires=0 WHERE name={} AND {whose} AND {IS_WRITABLE} AND expires>{NOW}",
        key.as_sql()
    )
}

/// Returns the session that had the sleep lock when the lock was freed. It is woken only if the lock was freed: otherwise the row
/// could be changed meanwhile, and its `KILL QUERY` could come before that session sleeps.
pub(crate) fn sleeper(reply: &Reply) -> Option<u64> {
    Some(reply.last_insert_id(0)).filter(|sleeper| *sleeper != 0)
}

/// Returns the statement that ends the sleep of a session.
///
/// It waits a moment for a session that has the sleep lock and does not sleep yet: one that was held up between two statements. One
/// that is held up for longer sleeps on until its sleep ends by itself. Fails if the session has not the sleep lock any more: its
/// sleep has ended by itself, and a `KILL QUERY` might hit any other request, of which the server would leave out results.
fn wake(sleep_lock: &str, asleep_lock: &str, sleeper: u64) -> String {
    let woken = WAKES_AFTER
        .iter()
        .rev()
        .fold("NULL".to_owned(), |otherwise, pause| {
            format!(
                "IF(IS_USED_LOCK({sleep_lock})={sleeper}, \
             IF(SLEEP({pause})=0 AND IS_USED_LOCK({asleep_lock})={sleeper}, {sleeper}, {otherwise}), NULL)"
            )
        });
    format!("KILL QUERY IF(IS_USED_LOCK({asleep_lock})={sleeper}, {sleeper}, {woken})")
}

/// Reads the secret of the table, of which the names of the server's own locks are made.
pub(crate) const READ_SECRET: &str = "SELECT owner FROM lockkit_lease WHERE name=x''";

/// Returns the statements that give the table its secret, unless another client does first, and then read it. It is in a row without
/// a name, which is no lock's. If somebody deletes that, newcomers are not in one queue with those who read it before: then a release
/// may not wake the next in line, who looks once a second.
pub(crate) fn make_secret(operation: &'static str) -> Result<String> {
    let secret = literal(&random::<16>(operation)?);
    Ok(format!(
        "INSERT IGNORE INTO lockkit_lease (name, owner, expires, token, latest) VALUES (x'', {secret}, 0, 0, 0); {READ_SECRET}"
    ))
}

/// The names of the server's own locks. Any account of the server may take any of them, and whoever has the queue lock of a name keeps
/// that from all others. So a name cannot be computed without what only those can read who may use the table.
#[derive(Debug, Default)]
pub(crate) struct ServerLocks {
    secret: String,
    database: String,
}

impl ServerLocks {
    pub(crate) fn new(secret: &[u8], database: &str) -> Self {
        Self {
            secret: hexadecimal(secret),
            database: database.to_owned(),
        }
    }

    fn queue(&self, key: &Key) -> String {
        self.name("lockkit", key)
    }

    fn sleep(&self, key: &Key) -> String {
        self.name("lockkit-sleep", key)
    }

    fn asleep(&self, key: &Key) -> String {
        self.name("lockkit-asleep", key)
    }

    /// Returns the name of a server lock. It is valid for the whole server, where a copy of the database may be too, and has 64
    /// characters at most.
    fn name(&self, prefix: &str, key: &Key) -> String {
        let Self { secret, database } = self;
        let digest = hexadecimal(&Sha256::digest(format!("{secret}/{database}/{}", key.as_sql())));
        format!("'{prefix}:{}'", &digest[..48])
    }
}

/// An expression: 1 once the session has this server lock, within so many seconds. It never has it twice, since it would have to
/// release it twice.
fn acquire(server_lock: &str, seconds: u32) -> String {
    format!("IF(IS_USED_LOCK({server_lock})=CONNECTION_ID(), 1, GET_LOCK({server_lock}, {seconds}))")
}

fn queue(queue_lock: &str) -> String {
    format!("SELECT {}", acquire(queue_lock, QUEUES_FOR))
}

/// Sleeps with the asleep lock, and then releases that and the sleep lock.
///
/// On MariaDB the session waits for the timer lock, which nobody ever releases. A `SLEEP` would do, but all of them share one mutex.
/// A `KILL QUERY` only tries for that. If another sleeper comes or goes at that moment, the woken session has the mutex and stands
/// still, and all sleepers with it, until the `KILL` gives up after two seconds. If the control connection that has the timer lock
/// has ended, the session sleeps after all.
fn sleep(sleep_lock: &str, asleep_lock: &str, flavour: Flavour) -> String {
    let sleep = match flavour {
        Flavour::MariaDb => {
            "IF(GET_LOCK(@lockkit_timer, @lockkit_sleep), \
             RELEASE_LOCK(@lockkit_timer)+SLEEP(@lockkit_sleep), 0)"
        }
        Flavour::MySql => "SLEEP(@lockkit_sleep)",
    };
    let is_asleep = acquire(asleep_lock, 0);
    format!("SELECT IF({is_asleep}, {sleep}, 0), RELEASE_LOCK({asleep_lock}), RELEASE_LOCK({sleep_lock})")
}
