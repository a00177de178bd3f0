//! Servers that can be relied on, and what a new session has to be.

use lockkit_core::{Error, FencingDurability};
use tokio_postgres::Row;

use crate::{
    NAME,
    connection::{Options, Query, Wire},
    error::{Failure, code},
    sql,
};

/// The first version with `idle_session_timeout` and `client_connection_check_interval`.
const FIRST_VERSION: &str = "14";

/// A session as the server has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backend {
    pub(crate) process: i32,
    /// The time of its start in µs since 1970. Together with the process it means this session and no other.
    pub(crate) started: i64,
    /// The failures that tokens survive.
    pub(crate) fencing: FencingDurability,
}

/// Connects, with this lease from the beginning, and checks that the session can be relied on. A lease of 0 is none.
///
/// # Errors
/// [`Failure::Refused`] says why a server, or what stands before it, cannot be relied on.
pub(crate) async fn open(options: &Options, lease: u32) -> Result<(Wire, Backend), Failure> {
    let (mut wire, said) = Wire::open(options, &settings(lease))
        .await
        .map_err(refused_at_login)?;
    let reply = wire.run(vec![Query::once(sql::CHECK, Vec::new())]).await?;
    let row = reply
        .first()
        .and_then(|rows| rows.first())
        .ok_or(Failure::Ended)?;
    let backend = check(row, said, lease)?;
    Ok((wire, backend))
}

/// The settings of a session. They win over those of its role and its database. A connection that keeps no time may end a session
/// neither before its lease nor much later. With this `search_path`, each name in a statement is the server's own, and none that a role or
/// another session has made: neither a function nor an operator, and no temporary table.
fn settings(lease: u32) -> String {
    format!(
        "-c search_path=pg_catalog,pg_temp -c idle_session_timeout={lease} -c tcp_user_timeout={} -c tcp_keepalives_idle=10 \
         -c tcp_keepalives_interval=5 -c tcp_keepalives_count=100 -c client_connection_check_interval=1000 -c statement_timeout=0 \
         -c lock_timeout={} -c idle_in_transaction_session_timeout=0 -c synchronous_commit=on \
         -c default_transaction_isolation=read\\ committed",
        user_timeout(lease),
        lock_timeout(lease)
    )
}

/// Returns the time in ms for which a session's connection may have data that nobody acknowledges: longer than its lease.
pub(crate) fn user_timeout(lease: u32) -> u32 {
    match lease {
        0 => 30_000,
        lease => lease.saturating_add(1_000).min(i32::MAX.unsigned_abs()),
    }
}

/// Returns the time in ms for which a statement waits for somebody who has locked a table: a small part of the lease, since a renewal
/// may be behind it. Statements that wait for a lock of lockkit's own set none.
pub(crate) fn lock_timeout(lease: u32) -> u32 {
    match lease {
        0 => 1_000,
        lease => (lease / 10).clamp(10, 1_000),
    }
}

fn check(row: &Row, said: i32, lease: u32) -> Result<Backend, Failure> {
    let process: i32 = row.try_get(0)?;
    let kept: i64 = row.try_get(2)?;
    if said != process || kept != i64::from(lease) {
        let what = if said == process {
            format!("its idle_session_timeout was set to {lease} ms and is {kept} ms")
        } else {
            format!("it says that it is process {said} and is process {process}")
        };
        return Err(pooler(&what));
    }
    if row.try_get(3)? {
        return Err(refused(
            "a server in recovery, such as a standby: the primary would grant the same locks to others; connect to the primary",
        ));
    }
    if row.try_get(4)? {
        return Err(refused(
            "sessions that are read-only (default_transaction_read_only=on), since no fencing token can be drawn in them; connect to \
             the primary, or change the setting of the role or database",
        ));
    }
    Ok(Backend {
        process,
        started: row.try_get(1)?,
        fencing: if row.try_get(5)? {
            FencingDurability::Durable
        } else {
            FencingDurability::Process
        },
    })
}

fn refused_at_login(failure: Failure) -> Failure {
    let Some(error) = failure.database() else {
        return failure;
    };
    match error.code().code() {
        code::PROTOCOL_VIOLATION => pooler(error.message()),
        code::UNDEFINED_OBJECT if error.message().contains("parameter") => refused(&format!(
            "a server before PostgreSQL {FIRST_VERSION}, which has no lease for an idle session ({})",
            error.message()
        )),
        _ => failure,
    }
}

fn pooler(why: &str) -> Failure {
    refused(&format!(
        "a pooler, such as PgBouncer, which may give a session to another client while it has a lock ({why}); connect to the server \
         directly"
    ))
}

fn refused(what: &str) -> Failure {
    Failure::Refused(Box::new(Error::unsupported(NAME, what)))
}
