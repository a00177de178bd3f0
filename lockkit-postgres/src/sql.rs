//! The statements.

/// The row of `lockkit.epoch` that says that the sequence is above all that was granted before this start of the server.
///
/// A server that was stopped in order has the row from before, and nothing in it says that a copy of it has granted meanwhile. So its
/// start is a part of the row.
macro_rules! this_epoch {
    () => {
        "server = (SELECT system_identifier # (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint FROM pg_control_system()) \
         AND database = (SELECT oid::bigint FROM pg_database WHERE datname = current_database()) \
         AND sequence = pg_relation_filenode('lockkit.token')::bigint"
    };
}
pub(crate) use this_epoch;

/// Draws a token after the lock is had: `CASE` forces that order. `NULL` means taken.
pub(crate) const TRY: &str = "SELECT CASE WHEN pg_try_advisory_lock($1) THEN nextval('lockkit.token') END";
pub(crate) const TRY_SHARED: &str =
    "SELECT CASE WHEN pg_try_advisory_lock_shared($1) THEN nextval('lockkit.token') END";

/// Waits in the server's queue, however long, since the session's `lock_timeout` is for tables. The results of these functions are never
/// `NULL`.
pub(crate) const WAIT: &str = "\
    SELECT CASE WHEN set_config('lock_timeout', '0', true) IS NULL THEN 0 \
    ELSE CASE WHEN pg_advisory_lock($1) IS NULL THEN 0 ELSE nextval('lockkit.token') END END";
pub(crate) const WAIT_SHARED: &str = "\
    SELECT CASE WHEN set_config('lock_timeout', '0', true) IS NULL THEN 0 \
    ELSE CASE WHEN pg_advisory_lock_shared($1) IS NULL THEN 0 ELSE nextval('lockkit.token') END END";

/// False if it was not held.
pub(crate) const UNLOCK: &str = "SELECT pg_advisory_unlock($1)";
pub(crate) const UNLOCK_SHARED: &str = "SELECT pg_advisory_unlock_shared($1)";

/// Leaves nothing locked, whatever the session has locked.
pub(crate) const UNLOCK_ALL: &str = "SELECT pg_advisory_unlock_all()";

/// A session that replies has its locks: nobody else can unlock them.
pub(crate) const PROVE: &str = "SELECT pg_backend_pid()";

/// Sets the lease, and what depends on it. The connection of a peer that acknowledges nothing must not end earlier.
pub(crate) const SET_LEASE: &str = "\
    SELECT set_config('idle_session_timeout', $1, false), set_config('tcp_user_timeout', $2, false), \
    set_config('lock_timeout', $3, false)";

/// Shows a hold to inspections: the keys of the lock and of its queue, the token, the lease in ms, the namespace, the name, whether it
/// is a semaphore's, the label, and the ms since the grant.
pub(crate) const SHOW: &str = "\
    INSERT INTO lockkit.holder (pid, key, queue, token, lease, namespace, name, semaphore, label, since) \
    VALUES (pg_backend_pid(), $1, $2, $3, $4, $5, $6, $7 = 1, $8, now() - $9 * interval '1 millisecond') \
    ON CONFLICT (pid) DO UPDATE SET key = excluded.key, queue = excluded.queue, token = excluded.token, \
    lease = excluded.lease, namespace = excluded.namespace, name = excluded.name, semaphore = excluded.semaphore, \
    label = excluded.label, since = excluded.since";
pub(crate) const SHOW_CHANGED: &str =
    "UPDATE lockkit.holder SET token = $1, lease = $2 WHERE pid = pg_backend_pid()";

/// Locks a free permit of a semaphore of this size, and draws a token after that; says which size it has. With another size, no permit is
/// tried. The order of permits is that of their keys in the array: a `WHERE` with `ORDER BY` would lock them all.
pub(crate) const TRY_PERMIT: &str = "\
    SELECT free.permit, CASE WHEN free.permit IS NOT NULL THEN nextval('lockkit.token') END, size.permits \
    FROM (SELECT (SELECT permits FROM lockkit.semaphore WHERE key = $2) AS permits) size LEFT JOIN LATERAL ( \
    SELECT k.permit FROM unnest($1::bigint[]) WITH ORDINALITY AS k(key, permit) \
    WHERE CASE WHEN size.permits = $3 THEN pg_try_advisory_lock(k.key) ELSE false END LIMIT 1) free ON true";
/// The same for the head of the queue, which leaves it with the permit.
pub(crate) const TRY_PERMIT_AT_HEAD: &str = "\
    SELECT free.permit, CASE WHEN free.permit IS NOT NULL THEN nextval('lockkit.token') END, size.permits, \
    CASE WHEN free.permit IS NOT NULL THEN pg_advisory_unlock($2) END \
    FROM (SELECT (SELECT permits FROM lockkit.semaphore WHERE key = $2) AS permits) size LEFT JOIN LATERAL ( \
    SELECT k.permit FROM unnest($1::bigint[]) WITH ORDINALITY AS k(key, permit) \
    WHERE CASE WHEN size.permits = $3 THEN pg_try_advisory_lock(k.key) ELSE false END LIMIT 1) free ON true";
/// Waits until this session is the head of a semaphore's queue.
pub(crate) const WAIT_FOR_HEAD: &str = "\
    SELECT CASE WHEN set_config('lock_timeout', '0', true) IS NULL THEN 0 \
    ELSE CASE WHEN pg_advisory_lock($1) IS NULL THEN 0 ELSE 1 END END";
pub(crate) const SIZE: &str = "SELECT permits FROM lockkit.semaphore WHERE key = $1";
pub(crate) const MAKE_SEMAPHORE: &str =
    "INSERT INTO lockkit.semaphore (key, permits) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING";
/// Changes the size of a semaphore if nobody else does, and all of its permits are free, which are locked for that. Says whether nobody else
/// does, and whether it was changed. Of two at once, one may touch the permits: neither is to find them in use by the other.
pub(crate) const RESIZE: &str = "\
    WITH right_to AS MATERIALIZED (SELECT pg_try_advisory_lock($5) AS resize), \
    locked AS MATERIALIZED ( \
    SELECT count(*) FILTER (WHERE pg_try_advisory_lock(k.key)) AS permits \
    FROM right_to, unnest($4::bigint[]) AS k(key) WHERE right_to.resize), \
    resized AS (UPDATE lockkit.semaphore SET permits = $2 WHERE key = $1 AND permits = $3 \
    AND (SELECT permits FROM locked) = $3 RETURNING 1) \
    SELECT right_to.resize, EXISTS (SELECT FROM resized) FROM right_to";

/// Interrupts the statement of one session, and has a row if that was at one: a session that has not read its request yet would not
/// notice. With `track_activities=off` the server does not say, and it may be ignored. No other process that has its id by now is hit.
pub(crate) const CANCEL: &str = "\
    SELECT pg_cancel_backend(pid) FROM pg_stat_get_activity($1) \
    WHERE (extract(epoch FROM backend_start) * 1000000)::bigint = $2 AND state IN ('active', 'disabled')";
/// Ends one session.
pub(crate) const TERMINATE: &str = "\
    SELECT pg_terminate_backend(pid) FROM pg_stat_get_activity($1) \
    WHERE (extract(epoch FROM backend_start) * 1000000)::bigint = $2";
/// Has a row while the process is at a statement: true if that waits for an advisory lock. With
/// `track_activities=off` only the wait for the next statement is told.
pub(crate) const DOES_IT_WAIT: &str = "\
    SELECT coalesce(wait_event = 'advisory', false) FROM pg_stat_get_activity($1) \
    WHERE (extract(epoch FROM backend_start) * 1000000)::bigint = $2 AND state IN ('active', 'disabled') \
    AND wait_event IS DISTINCT FROM 'ClientRead'";
pub(crate) const IS_THERE: &str = "SELECT 1";

/// The holders and waiters of these keys.
pub(crate) const INSPECT: &str = "\
    SELECT k.key, l.granted, h.token, h.label, h.lease, \
    (extract(epoch FROM h.since) * 1000000)::bigint, \
    (CASE WHEN a.state = 'idle' THEN extract(epoch FROM clock_timestamp() - a.state_change) * 1000 END)::bigint, \
    a.application_name \
    FROM unnest($1::bigint[]) AS k(key) JOIN pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 1 \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
    AND (l.classid::bigint << 32 | l.objid::bigint) = k.key \
    LEFT JOIN lockkit.holder h ON h.pid = l.pid AND h.key = k.key AND l.granted \
    LEFT JOIN LATERAL pg_stat_get_activity(l.pid) a ON l.granted \
    ORDER BY h.token";
/// The same where no table is.
pub(crate) const INSPECT_WITHOUT_TABLES: &str = "\
    SELECT k.key, l.granted, NULL::bigint, NULL::text, NULL::int, NULL::bigint, NULL::bigint, a.application_name \
    FROM unnest($1::bigint[]) AS k(key) JOIN pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 1 \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
    AND (l.classid::bigint << 32 | l.objid::bigint) = k.key \
    LEFT JOIN LATERAL pg_stat_get_activity(l.pid) a ON l.granted";
/// The sessions of lockkit's clients that have locked something and do not show it, but for heads of queues; their start; and the time of
/// the last change of each, while it is not at a statement. Of a session of another role, neither time is told.
pub(crate) const NOT_SHOWN: &str = "\
    WITH locks AS MATERIALIZED ( \
    SELECT pid, classid::bigint << 32 | objid::bigint AS key FROM pg_locks \
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) \
    SELECT a.pid, (extract(epoch FROM a.backend_start) * 1000000)::bigint, \
    CASE WHEN a.state = 'idle' THEN (extract(epoch FROM a.state_change) * 1000000)::bigint END \
    FROM pg_stat_get_activity(NULL) a WHERE a.application_name = 'lockkit' \
    AND EXISTS (SELECT FROM locks l WHERE l.pid = a.pid \
    AND NOT EXISTS (SELECT FROM lockkit.semaphore s WHERE s.key = l.key) \
    AND NOT EXISTS (SELECT FROM lockkit.holder h WHERE h.pid = l.pid AND h.key = l.key))";

/// Ends the session that holds one of these keys with this token. A session that has unlocked deletes the row, and has to wait for the
/// lock of it: it cannot have another lock before it ends.
pub(crate) const TERMINATE_HOLDER: &str = "\
    WITH found AS MATERIALIZED ( \
    SELECT l.pid FROM lockkit.holder h JOIN pg_locks l ON l.pid = h.pid \
    WHERE h.key = ANY($1::bigint[]) AND h.token = $2 AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
    AND (l.classid::bigint << 32 | l.objid::bigint) = h.key FOR UPDATE OF h) \
    SELECT pg_terminate_backend(pid) FROM found";

/// A page of what is held: of this namespace and kind, behind this name, with this prefix.
pub(crate) const PAGE: &str = "\
    WITH locks AS MATERIALIZED ( \
    SELECT pid, granted, classid::bigint << 32 | objid::bigint AS key FROM pg_locks \
    WHERE locktype = 'advisory' AND objsubid = 1 \
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())), \
    held AS MATERIALIZED (SELECT h.* FROM lockkit.holder h JOIN locks l ON l.pid = h.pid AND l.key = h.key AND l.granted \
    WHERE h.namespace = $1 AND h.semaphore = ($2::int = 1) AND h.name > $3 AND substring(h.name FOR $4::int) = $5), \
    page AS (SELECT DISTINCT name FROM held ORDER BY name LIMIT $6::int) \
    SELECT held.name, held.token, held.label, held.lease, (extract(epoch FROM held.since) * 1000000)::bigint, \
    (CASE WHEN a.state = 'idle' THEN extract(epoch FROM clock_timestamp() - a.state_change) * 1000 END)::bigint, \
    (SELECT count(*) FROM locks w WHERE w.key = held.queue AND (held.semaphore OR NOT w.granted)) \
    FROM page JOIN held USING (name) LEFT JOIN LATERAL pg_stat_get_activity(held.pid) a ON true \
    ORDER BY held.name, held.token";

/// The settings of the server that a session has to know.
pub(crate) const CHECK: &str = "\
    SELECT pg_backend_pid(), (extract(epoch FROM a.backend_start) * 1000000)::bigint, \
    (SELECT setting::bigint FROM pg_settings WHERE name = 'idle_session_timeout'), \
    pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'on', \
    CASE WHEN current_setting('server_version_num')::int >= 170000 \
    THEN set_config('transaction_timeout', '0', false) END \
    FROM pg_stat_get_activity(pg_backend_pid()) a";
/// The last token that was ever granted, or may have been, and whether this role may see it. In an epoch that nobody has begun, what the
/// sequence says is not all: as the one who begins it, this goes by the clock.
pub(crate) const FENCE: &str = concat!(
    "SELECT CASE WHEN EXISTS (SELECT FROM lockkit.epoch WHERE ",
    this_epoch!(),
    ") THEN coalesce(token.last + 1023, 0) ELSE greatest(coalesce(token.last, 0) + 1024 * 1000000::bigint, \
     (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000) END, \
     has_sequence_privilege('lockkit.token', 'USAGE, SELECT') \
     FROM (SELECT pg_sequence_last_value('lockkit.token'::regclass) AS last) token"
);
/// The same where no sequence is: one that was dropped had given none beyond the clock.
pub(crate) const FENCE_OF_NONE: &str =
    "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000, true";
/// Has a row unless the server has started, has crashed or was promoted, or the sequence was made anew, as a restored dump does, since a
/// session last made one.
pub(crate) const IS_SAME_LIFE: &str = concat!("SELECT 1 FROM lockkit.epoch WHERE ", this_epoch!());
/// Removes what this session, or an earlier process of the same id, has shown.
pub(crate) const HIDE: &str = "DELETE FROM lockkit.holder WHERE pid = pg_backend_pid()";
/// Removes what sessions have shown that are gone.
pub(crate) const SWEEP: &str = "\
    DELETE FROM lockkit.holder h WHERE NOT EXISTS (SELECT FROM pg_stat_get_activity(NULL) a WHERE a.pid = h.pid)";
