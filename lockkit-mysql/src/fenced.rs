//! Rows of the application that refuse a superseded holder.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use lockkit_core::FencingToken;
use sqlx::{
    AssertSqlSafe, Column, Encode, MySql, QueryBuilder, Row, Type, TypeInfo, mysql::MySqlConnection,
    query_builder::Separated,
};

/// A table of the application whose rows remember the highest fencing token that wrote them, and refuse lower ones.
///
/// A lock cannot stop a holder that is paused just before a write and goes on when somebody else holds. The row can. One statement
/// compares the token and writes the values. The table may be in another database than the locks.
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
///     Err(FencedError::Stale { highest, .. }) => panic!("stop: {highest} has written since"),
///     done => done,
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FencedTable {
    table: String,
    key: String,
    token: String,
    is_fit: Checked,
}

/// True once the token's column was found to have a fitting type. Clones share it, and comparisons ignore it.
#[derive(Clone, Debug, Default)]
struct Checked(Arc<AtomicBool>);

impl PartialEq for Checked {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Checked {}

/// The reason why a row was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError {
    /// A higher token has written the row, so the lock has had another holder since. Stop.
    #[error(
        "fencing token {token} is stale: {highest} has written the row; the lock has had another holder since"
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
        expected: u64,
        /// The row's version.
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
        /// The type, or value, that it has.
        found: String,
    },
    /// The database failed. If the connection broke, the row may have been written.
    #[error("the row was not written")]
    Database(#[from] sqlx::Error),
}

impl FencedTable {
    /// Describes a table: its name, perhaps with its database (`shop.account`); the column of its unique key; and the column with the
    /// token of the last writer, which is `BIGINT UNSIGNED NOT NULL`.
    pub fn new(table: &str, key: &str, token: &str) -> Self {
        Self {
            table: table.split('.').map(quoted).collect::<Vec<_>>().join("."),
            key: quoted(key),
            token: quoted(token),
            is_fit: Checked::default(),
        }
    }

    /// Updates the row of this key, unless a higher token has written it. `set` adds one assignment per `push`. The first call checks
    /// the type of the token's column: one that rounds or truncates would let a lower token pass.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written.
    ///
    /// # Cancel safety
    /// If the future is dropped, the row may have been written, and the connection cannot be used any more.
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

    /// Updates the row as [`update`](Self::update) does, if it still has the version that the caller has read. Increments the version,
    /// which is in the column of that name. Useful without a lock, or under one against writers without it.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written.
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
            is_fit: Checked(is_fit),
        } = self;
        if !is_fit.load(Ordering::Relaxed) {
            self.check_type(connection).await?;
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
        // Rows that were matched, changed or not.
        if update.build().execute(&mut *connection).await?.rows_affected() > 0 {
            return Ok(());
        }
        let column = version.as_ref().map_or("0", |(column, _)| column);
        let mut read = QueryBuilder::<MySql>::new(format!(
            "SELECT CAST({token_column} AS UNSIGNED), CAST({column} AS UNSIGNED) FROM {table} WHERE {key_column} = "
        ));
        read.push_bind(key);
        // The row as it is now, not as in an earlier snapshot.
        read.push(" LOCK IN SHARE MODE");
        let found: Option<(Option<u64>, u64)> =
            read.build_query_as().fetch_optional(&mut *connection).await?;
        Err(match (found, version) {
            (Some((None, _)), _) => self.unfit("NULL"),
            (Some((Some(highest), _)), _) if highest > token.get() => FencedError::Stale {
                token,
                highest: FencingToken::new(highest),
            },
            (Some((_, found)), Some((_, expected))) => FencedError::Changed { expected, found },
            // If it is there now, it was inserted in between.
            _ => FencedError::Missing,
        })
    }

    async fn check_type(&self, connection: &mut MySqlConnection) -> Result<(), FencedError> {
        let Self { table, token, .. } = self;
        // The result has the column's type, also if the table is empty.
        let question = format!("SELECT (SELECT {token} FROM {table} LIMIT 0)");
        let row = sqlx::raw_sql(AssertSqlSafe(question))
            .fetch_one(connection)
            .await?;
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
