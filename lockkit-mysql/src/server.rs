//! Checks which server it is, and whether its locks can be relied on.

use std::collections::HashMap;

use lockkit_core::{Error, FencingDurability, Result};
use sqlx::{Row, mysql::MySqlRow};

use crate::{
    Mode, NAME,
    connection::{Reply, column},
    error::During,
};

/// Reads the settings that [`Server::check`] needs.
pub(crate) const SETTINGS: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'read_only', \
    'super_read_only', 'innodb_read_only', 'innodb_flush_log_at_trx_commit', 'wsrep_on', 'wsrep_provider', \
    'group_replication_group_name', 'group_replication_single_primary_mode', 'thread_handling', 'version_compile_os')";

/// True if the server is read-only, by the last column of a row, which is [`READ_ONLY`](crate::row_sql::READ_ONLY).
pub(crate) fn is_read_only(row: &MySqlRow) -> bool {
    let last = row.len().saturating_sub(1);
    // A server without a readable value is not relied on.
    column::<u8>(row, last).map_or(true, |is_on| is_on != 0)
}

/// True if the server is read-only, by the last row of a request.
pub(crate) fn says_read_only(reply: &Reply) -> bool {
    reply.last().last().is_none_or(is_read_only)
}

/// Returns the error for a read-only server. Whoever connects has been led to a replica, and is told for good. One that was connected, to a
/// primary, may find the next one in its place, or the same one again.
pub(crate) fn read_only(operation: &'static str, setting: &str) -> Error {
    let what = format!("a server with {setting}=ON, a replica perhaps; connect to the primary");
    if operation == CONNECT {
        Error::unsupported(NAME, what)
    } else {
        Error::transient(NAME, operation, what)
    }
}

/// The operation of a client that connects for the first time.
pub(crate) const CONNECT: &str = "connect";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    MariaDb,
    MySql,
}

/// A server whose locks can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) flavour: Flavour,
    pub(crate) fencing: FencingDurability,
}

impl Server {
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn read(operation: &'static str, reply: &Reply, mode: Mode) -> Result<Self> {
        let mut variables = HashMap::new();
        for row in reply.last() {
            let text = |index| column::<String>(row, index).during(operation);
            variables.insert(text(0)?.to_ascii_lowercase(), text(1)?);
        }
        Self::check(operation, &variables, mode)
    }

    /// # Errors
    /// [`Error::Unsupported`] for a server whose locks do not exclude each other. [`read_only`] for one that takes no writes.
    fn check(operation: &'static str, variables: &HashMap<String, String>, mode: Mode) -> Result<Self> {
        let value = |name: &str| variables.get(name).map_or("", String::as_str);
        let is_on =
            |name: &str| !matches!(value(name).to_ascii_uppercase().as_str(), "" | "0" | "OFF" | "NO");
        let refuse = |what: String| Err(Error::unsupported(NAME, what));

        let version = value("version");
        let flavour = if version.to_ascii_lowercase().contains("mariadb") {
            Flavour::MariaDb
        } else {
            Flavour::MySql
        };
        let (oldest, name) = match flavour {
            Flavour::MariaDb => ((10, 6), "MariaDB 10.6"),
            Flavour::MySql => ((8, 0), "MySQL 8.0"),
        };
        if number(version) < oldest {
            return refuse(format!(
                "server version {version}, which cannot skip locked rows; {name} is the first that can"
            ));
        }
        if is_on("wsrep_on") && !matches!(value("wsrep_provider"), "" | "none") {
            return refuse(
                "a Galera cluster: its row locks are local to a node, so that two nodes would grant one lock; use a \
                 single server, or another backend"
                    .to_owned(),
            );
        }
        if !value("group_replication_group_name").is_empty()
            && !is_on("group_replication_single_primary_mode")
        {
            return refuse(
                "group replication with several primaries: row locks are local to a member, so that two members would \
                 grant one lock; use single-primary mode"
                    .to_owned(),
            );
        }
        // On Windows the pool is the operating system's, with timers of its own.
        if mode == Mode::ForUpdate
            && value("thread_handling") == "pool-of-threads"
            && !value("version_compile_os").starts_with("Win")
        {
            return refuse(
                "a server with thread_handling=pool-of-threads, which after it stood still ends sessions before their \
                 wait_timeout is over, so that a lock would be another's before its holder is told; use mode=lease, or a \
                 server with one-thread-per-connection"
                    .to_owned(),
            );
        }
        if let Some(why) = ["read_only", "super_read_only", "innodb_read_only"]
            .into_iter()
            .find(|name| is_on(name))
        {
            return Err(read_only(operation, why));
        }
        let fencing = if value("innodb_flush_log_at_trx_commit") == "1" {
            FencingDurability::Durable
        } else {
            tracing::warn!(
                "innodb_flush_log_at_trx_commit is not 1: after a crash of the server, fencing tokens may go back"
            );
            FencingDurability::Process
        };
        Ok(Self { flavour, fencing })
    }
}

/// Reads major and minor of `10.11.14-MariaDB-…`, or of `5.5.5-10.6.1-MariaDB`, as old replication set-ups have it.
fn number(version: &str) -> (u32, u32) {
    let version = version.strip_prefix("5.5.5-").unwrap_or(version);
    let mut parts = version
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(variables: &[(&str, &str)]) -> Result<Server> {
        checked_for(Mode::ForUpdate, variables)
    }

    fn checked_for(mode: Mode, variables: &[(&str, &str)]) -> Result<Server> {
        let owned = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Server::check(CONNECT, &owned.collect(), mode)
    }

    const MARIADB: (&str, &str) = ("version", "10.11.14-MariaDB-0+deb12u2");
    const MYSQL: (&str, &str) = ("version", "9.7.4");

    #[test]
    fn plain_primaries_are_accepted() {
        let flush = ("innodb_flush_log_at_trx_commit", "1");
        let maria = checked(&[MARIADB, flush, ("wsrep_on", "OFF"), ("read_only", "OFF")]).unwrap();
        assert_eq!(maria.flavour, Flavour::MariaDb);
        assert_eq!(maria.fencing, FencingDurability::Durable);
        let mysql = checked(&[
            MYSQL,
            ("innodb_flush_log_at_trx_commit", "2"),
            ("super_read_only", "OFF"),
        ])
        .unwrap();
        assert_eq!(mysql.flavour, Flavour::MySql);
        assert_eq!(mysql.fencing, FencingDurability::Process);
        assert!(checked(&[("version", "5.5.5-10.6.1-MariaDB-log"), flush]).is_ok());
        assert!(checked(&[MARIADB, flush, ("wsrep_on", "ON"), ("wsrep_provider", "none")]).is_ok());
        let single = [
            ("group_replication_group_name", "a"),
            ("group_replication_single_primary_mode", "ON"),
        ];
        assert!(checked(&[MYSQL, single[0], single[1]]).is_ok());
        let pool = [MARIADB, ("thread_handling", "pool-of-threads")];
        assert!(checked_for(Mode::Lease, &pool).is_ok());
        assert!(checked(&[pool[0], pool[1], ("version_compile_os", "Win64")]).is_ok());
    }

    #[test]
    fn an_unsafe_server_is_refused_with_its_reason() {
        let refused: [(&[(&str, &str)], &str); 8] = [
            (&[("version", "10.5.9-MariaDB")], "10.6"),
            (&[("version", "5.7.44-log")], "8.0"),
            (
                &[
                    MARIADB,
                    ("wsrep_on", "ON"),
                    ("wsrep_provider", "/usr/lib/galera/libgalera_smm.so"),
                ],
                "Galera",
            ),
            (
                &[
                    MYSQL,
                    ("group_replication_group_name", "x"),
                    ("group_replication_single_primary_mode", "OFF"),
                ],
                "several primaries",
            ),
            (&[MARIADB, ("read_only", "ON")], "read_only"),
            (&[MYSQL, ("super_read_only", "ON")], "super_read_only"),
            (&[MARIADB, ("read_only", "NO_LOCK_NO_ADMIN")], "read_only"),
            (&[MARIADB, ("thread_handling", "pool-of-threads")], "mode=lease"),
        ];
        for (variables, word) in refused {
            match checked(variables) {
                Err(Error::Unsupported { what, .. }) => assert!(what.contains(word), "{what}"),
                other => panic!("{variables:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_server_that_became_read_only_may_change_back() {
        let demoted = HashMap::from(
            [("version", "9.7.4"), ("super_read_only", "ON")]
                .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        let error = Server::check("acquire", &demoted, Mode::ForUpdate).unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        let galera = HashMap::from(
            [("version", "8.4.0"), ("wsrep_on", "ON"), ("wsrep_provider", "x")]
                .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        let error = Server::check("acquire", &galera, Mode::ForUpdate).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    }
}
