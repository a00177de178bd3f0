//! Rows of an application that refuse a superseded holder: their columns, and the reasons why one was not written. The statements are the
//! database's.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::FencingToken;

/// The reason why a row was not written. `E` is the error of the database's client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError<E> {
    /// A higher token has written the row: the lock has had another holder since, or the higher token is from another backend, with which
    /// this one's cannot be compared. Stop.
    #[error(
        "fencing token {token} is stale: {highest} has written the row; the lock has had another holder since, or another backend \
         (after a change of the backend, raise its tokens: `lockkit fence raise --above {highest}`)"
    )]
    #[non_exhaustive]
    Stale {
        /// The token that was refused.
        token: FencingToken,
        /// The highest token that has written the row.
        highest: FencingToken,
    },
    /// The row has another version than the caller has read. Read it again.
    #[error("the row has version {found}, not {expected}: it was changed after it was read")]
    #[non_exhaustive]
    Changed {
        /// The version that was read.
        expected: i64,
        /// The row's version.
        found: i64,
    },
    /// There is no row with this key.
    #[error("there is no row with this key")]
    Missing,
    /// The column of tokens cannot tell a higher token from a lower one, or cannot keep this one.
    #[error("{column} is {found}, which cannot keep a token; make it {fitting}")]
    #[non_exhaustive]
    Unfit {
        /// The column.
        column: String,
        /// The type, or value, that it has or would have.
        found: String,
        /// The type that it should have.
        fitting: &'static str,
    },
    /// The database failed. If the connection broke, the row may have been written.
    #[error("the row was not written")]
    Database(#[from] E),
}

/// The columns of a table that make its rows refuse lower tokens. Clones share what was found out about them, and comparisons ignore it.
#[derive(Clone)]
pub struct FencedColumns {
    /// The table, as SQL.
    pub table: String,
    /// The column of its unique key, as SQL.
    pub key: String,
    /// The column of the token of the last writer, as SQL.
    pub token: String,
    fitting: &'static str,
    is_fit: Arc<AtomicBool>,
}

impl FencedColumns {
    /// Describes a table: its name, perhaps with dots; the columns of its key and of its token; how the database quotes a name; and the
    /// type that the token's column should have.
    pub fn new(
        table: &str,
        key: &str,
        token: &str,
        quoted: impl Fn(&str) -> String,
        fitting: &'static str,
    ) -> Self {
        Self {
            table: table.split('.').map(&quoted).collect::<Vec<_>>().join("."),
            key: quoted(key),
            token: quoted(token),
            fitting,
            is_fit: Arc::default(),
        }
    }

    /// Returns `true` once the token's column is known to have a fitting type.
    pub fn is_fit(&self) -> bool {
        self.is_fit.load(Ordering::Relaxed)
    }

    /// Notes that the token's column has a fitting type.
    pub fn set_fit(&self) {
        self.is_fit.store(true, Ordering::Relaxed);
    }

    /// Returns the error of a token's column that is, or has, this.
    pub fn unfit<E>(&self, found: impl Into<String>) -> FencedError<E> {
        FencedError::Unfit {
            column: format!("{}.{}", self.table, self.token),
            found: found.into(),
            fitting: self.fitting,
        }
    }

    /// Returns why no row was written, by the token and the version that the row of the key has now, if there is one.
    pub fn refused<E>(
        &self,
        token: FencingToken,
        expected: Option<i64>,
        found: Option<(Option<u64>, i64)>,
    ) -> FencedError<E> {
        match (found, expected) {
            (Some((None, _)), _) => self.unfit("NULL"),
            (Some((Some(highest), _)), _) if highest > token.get() => FencedError::Stale {
                token,
                highest: FencingToken::new(highest),
            },
            (Some((_, found)), Some(expected)) => FencedError::Changed { expected, found },
            // If it is there now, it was inserted in between.
            _ => FencedError::Missing,
        }
    }
}

impl PartialEq for FencedColumns {
    fn eq(&self, other: &Self) -> bool {
        (&self.table, &self.key, &self.token) == (&other.table, &other.key, &other.token)
    }
}

impl Eq for FencedColumns {}

impl fmt::Debug for FencedColumns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedColumns")
            .field("table", &self.table)
            .field("key", &self.key)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}
