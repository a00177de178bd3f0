//! Rows that refuse whoever has been superseded.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use lockkit_core::FencingToken;
use sqlx::{
    AssertSqlSafe, Column, Encode, MySql, QueryBuilder, Row, Type, TypeInfo, mysql::MySqlConnection,
    query_builder::Separated,
};

/// A table of yours whose rows remember the highest fencing token that has written them, and refuse a lower one.
///
/// A lock keeps others out for as long as its holder looks at it. It cannot stop a holder that is paused just before a
/// write and goes on when somebody else holds; the row can. Token and values are compared and written by one statement,
/// so that nothing falls in between. The table may be in any database, also in another than the locks.
///
/// ```no_run
/// # use lockkit_core::LockGuard;
/// use lockkit_mysql::{FencedError, FencedTable, sqlx::mysql::MySqlConnection};
///
/// # async fn pay(database: &mut MySqlConnection, guard: &LockGuard) -> Result<(), FencedError> {
/// // CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, last_token BIGINT UNSIGNED NOT NULL DEFAULT 0)
/// let accounts = FencedTable::new("account", "id", "last_token");
/// let update = accounts.update(database, 7_i64, guard.token(), |set| {
///     set.push("balance = balance - ").push_bind_unseparated(100_i64);
/// });
/// match update.await {
///     Err(FencedError::Stale { highest, .. }) => panic!("stop: {highest} has been here"),
///     done => done,
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FencedTable {
    table: String,
    key: String,
    token: String,
    is_fit: Found,
}

/// A mark that the column was found to keep tokens. Clones share it, and it makes no table another one.
#[derive(Clone, Debug, Default)]
struct Found(Arc<AtomicBool>);

impl PartialEq for Found {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Found {}

/// Why a row was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError {
    /// A higher token has written the row: the lock has had another holder since. Stop.
    #[error(
        "fencing token {token} is stale: {highest} has written the row; the lock has had another holder since"
    )]
    #[non_exhaustive]
    Stale {
        /// The token that was refused.
        token: FencingToken,
        /// The highest that has written the row.
        highest: FencingToken,
    },
    /// The row has another version than the one that was read: read it again.
    #[error("the row has version {found}, not {expected}: it was changed after it was read")]
    #[non_exhaustive]
    Changed {
        /// The version that was read.
        expected: u64,
        /// The version that it has.
        found: u64,
    },
    /// There is no row with this key.
    #[error("there is no row with this key")]
    Missing,
    /// The column of tokens cannot tell a higher token from a lower one.
    #[error("{column} is {found}, which cannot keep a token; make it BIGINT UNSIGNED NOT NULL DEFAULT 0")]
    #[non_exhaustive]
    Unfit {
        /// The column.
        column: String,
        /// What it has instead.
        found: String,
    },
    /// The database failed. Whether the row was written is not known if the connection broke.
    #[error("the row was not written")]
    Database(#[from] sqlx::Error),
}

impl FencedTable {
    /// A table by the names of: itself, perhaps with its database (`shop.account`); its unique key's column; the column,
    /// `BIGINT UNSIGNED NOT NULL`, that has the token of the last writer.
    pub fn new(table: &str, key: &str, token: &str) -> Self {
        Self {
            table: table.split('.').map(quoted).collect::<Vec<_>>().join("."),
            key: quoted(key),
            token: quoted(token),
            is_fit: Found::default(),
        }
    }

    /// Writes what `set` adds, one assignment per `push`, to the row of this key, unless a higher token has. Looks at the
    /// type of the token's column the first time: one that rounds or cuts off would let a lower token pass.
    ///
    /// # Errors
    /// [`FencedError`] says why the row was not written.
    ///
    /// # Cancel safety
    /// If it is dropped, the row may have been written or not, and the connection cannot be used any more.
    pub async fn update<'a, K>(
        &self,
        connection: &mut MySqlConnection,
        key: K,
        token: FencingToken,
        set: impl FnOnce(&mut Separated<'_, MySql, &'static str>),
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        self.write(connection, key, token, None, set).await
    }

    /// The same if the row still has the version that was read, in a column of that name that this increments: without
    /// any lock, or under one, against those who write without it.
    ///
    /// # Errors
    /// [`FencedError`] says why the row was not written.
    ///
    /// # Cancel safety
    /// As [`update`](Self::update).
    pub async fn update_version<'a, K>(
        &self,
        connection: &mut MySqlConnection,
        key: K,
        token: FencingToken,
        (column, expected): (&str, u64),
        set: impl FnOnce(&mut Separated<'_, MySql, &'static str>),
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        self.write(connection, key, token, Some((quoted(column), expected)), set)
            .await
    }

    async fn write<'a, K>(
        &self,
        connection: &mut MySqlConnection,
        key: K,
        token: FencingToken,
        version: Option<(String, u64)>,
        set: impl FnOnce(&mut Separated<'_, MySql, &'static str>),
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        let Self {
            table,
            key: key_column,
            token: token_column,
            is_fit: Found(is_fit),
        } = self;
        if !is_fit.load(Ordering::Relaxed) {
            self.look_at_type(connection).await?;
            is_fit.store(true, Ordering::Relaxed);
        }
        let mut update = QueryBuilder::<MySql>::new(format!("UPDATE {table} SET {token_column} = "));
        update.push_bind(token.get());
        if let Some((column, _)) = &version {
            update.push(format!(", {column} = {column} + 1"));
        }
        update.push(", ");
        set(&mut update.separated(", "));
        update.push(format!(" WHERE {key_column} = "));
        update.push_bind(key.clone());
        update.push(format!(" AND {token_column} <= "));
        update.push_bind(token.get());
        if let Some((column, expected)) = &version {
            update.push(format!(" AND {column} = "));
            update.push_bind(*expected);
        }
        // Those that were matched, changed or not.
        if update.build().execute(&mut *connection).await?.rows_affected() > 0 {
            return Ok(());
        }
        let column = version.as_ref().map_or("0", |(column, _)| column);
        let mut look = QueryBuilder::<MySql>::new(format!(
            "SELECT CAST({token_column} AS UNSIGNED), CAST({column} AS UNSIGNED) FROM {table} WHERE {key_column} = "
        ));
        look.push_bind(key);
        // What is there now, and not in a snapshot from before a newer write.
        look.push(" LOCK IN SHARE MODE");
        let found: Option<(Option<u64>, u64)> =
            look.build_query_as().fetch_optional(&mut *connection).await?;
        Err(match (found, version) {
            (Some((None, _)), _) => self.unfit("NULL"),
            (Some((Some(highest), _)), _) if highest > token.get() => FencedError::Stale {
                token,
                highest: FencingToken::new(highest),
            },
            (Some((_, found)), Some((_, expected))) => FencedError::Changed { expected, found },
            // If it is there, it was made in between.
            _ => FencedError::Missing,
        })
    }

    async fn look_at_type(&self, connection: &mut MySqlConnection) -> Result<(), FencedError> {
        let Self { table, token, .. } = self;
        // A row without a value, whose column has the type, also of an empty table.
        let look = format!("SELECT (SELECT {token} FROM {table} LIMIT 0)");
        let row = sqlx::raw_sql(AssertSqlSafe(look)).fetch_one(connection).await?;
        let found = row
            .columns()
            .first()
            .map_or("", |column| column.type_info().name());
        if found == "BIGINT UNSIGNED" {
            return Ok(());
        }
        Err(self.unfit(found))
    }

    fn unfit(&self, found: &str) -> FencedError {
        FencedError::Unfit {
            column: format!("{}.{}", self.table, self.token),
            found: found.to_owned(),
        }
    }
}

fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}
