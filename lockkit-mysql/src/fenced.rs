//! Rows of the application that refuse a superseded holder.

use lockkit_core::{FencingToken, spi::fenced::FencedColumns};
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
/// # async fn read(_: &mut sqlx::Transaction<'_, sqlx::MySql>) -> sqlx::Result<i64> { Ok(100) }
/// # use lockkit_mysql::sqlx::{self, Connection};
/// # async fn pay(database: &mut MySqlConnection, guard: LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// // CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, last_token BIGINT UNSIGNED NOT NULL DEFAULT 0)
/// let accounts = FencedTable::new("account", "id", "last_token");
/// let mut transaction = database.begin().await?; // after the grant
/// accounts.raise(&mut transaction, 7_i64, guard.token()).await?; // nobody from before writes the row any more
/// let rest = read(&mut transaction).await? - 100;
/// let update = accounts.update(&mut transaction, 7_i64, guard.token(), |set| {
///     set.push("balance = ").push_bind_unseparated(rest);
/// });
/// match update.await {
///     Err(FencedError::Stale { highest, .. }) => return Err(format!("stop: {highest} has written since").into()),
///     done => done?,
/// }
/// transaction.commit().await?;
/// guard.release().await?; // after the commit
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FencedTable(FencedColumns);

/// The reason why a row was not written.
pub type FencedError = lockkit_core::spi::fenced::FencedError<sqlx::Error>;

impl FencedTable {
    /// Describes a table: its name, perhaps with its database (`shop.account`); the column of its unique key; and the column with the
    /// token of the last writer, which is `BIGINT UNSIGNED NOT NULL`.
    pub fn new(table: &str, key: &str, token: &str) -> Self {
        let fitting = "BIGINT UNSIGNED NOT NULL DEFAULT 0";
        Self(FencedColumns::new(table, key, token, quoted, fitting))
    }

    /// Updates the row of this key, unless a higher token has written it. `set` adds one assignment per `push`. The first call checks
    /// the type of the token's column: one that rounds or truncates would let a lower token pass.
    ///
    /// Give `key` in the type of its column: MySQL compares text with a number as floating point, and then one key may be that of many rows.
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

    /// Raises the row's token to this one, and writes nothing else: from then on the row refuses whoever held the lock before. Call it before
    /// you read what you are going to write: a row knows a holder only by what that holder has written. Begin a transaction after the
    /// grant, raise, read, write, commit, and release the lock after that.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the token was not written.
    ///
    /// # Cancel safety
    /// As [`update`](Self::update).
    pub async fn raise<'a, K>(
        &self,
        connection: &mut MySqlConnection,
        key: K,
        token: FencingToken,
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        self.write(connection, key, token, None, |_| ()).await
    }

    /// Inserts the row of this key, or updates it as [`update`](Self::update) does if it is there. `set` adds one assignment per `push`, of a
    /// value and not of an expression with the row's columns. It is called once for each statement: an update, an insert, and an update
    /// again if somebody has inserted the row in between. Each is one step of the server, so a lower token never overwrites a higher one.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written: that there is none is no reason here. The server may tell one of those who
    /// insert the same key at once that there is a deadlock (1213), and has written nothing then. It has also rolled back the transaction, if
    /// there was one. Do all of it again.
    ///
    /// # Cancel safety
    /// As [`update`](Self::update).
    pub async fn insert_or_update<'a, K>(
        &self,
        connection: &mut MySqlConnection,
        key: K,
        token: FencingToken,
        set: impl Fn(&mut Separated<'_, MySql, &'static str>),
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        let updated = self.write(connection, key.clone(), token, None, &set).await;
        if !matches!(updated, Err(FencedError::Missing)) {
            return updated;
        }
        let FencedColumns {
            table,
            key: key_column,
            token: token_column,
            ..
        } = &self.0;
        let mut insert = QueryBuilder::<MySql>::new(format!("INSERT INTO {table} SET {key_column} = "));
        insert.push_bind(key.clone());
        insert.push(format!(", {token_column} = "));
        insert.push_bind(token.get());
        insert.push(", ");
        set(&mut insert.separated(", "));
        match insert.build().execute(&mut *connection).await {
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                match self.write(connection, key, token, None, &set).await {
                    // Another unique key of the table is in the way.
                    Err(FencedError::Missing) => Err(sqlx::Error::Database(error).into()),
                    updated => updated,
                }
            }
            inserted => {
                inserted?;
                Ok(())
            }
        }
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
        (column, expected): (&str, i64),
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
        version: Option<(String, i64)>,
        set: impl FnOnce(&mut Separated<'_, MySql, &'static str>),
    ) -> Result<(), FencedError>
    where
        K: Encode<'a, MySql> + Type<MySql> + Clone + Send + 'a,
    {
        let FencedColumns {
            table,
            key: key_column,
            token: token_column,
            ..
        } = &self.0;
        if !self.0.is_fit() {
            self.check_type(connection).await?;
            self.0.set_fit();
        }
        let mut update = QueryBuilder::<MySql>::new(format!("UPDATE {table} SET "));
        let mut assignments = update.separated(", ");
        assignments
            .push(format!("{token_column} = "))
            .push_bind_unseparated(token.get());
        if let Some((column, _)) = &version {
            assignments.push(format!("{column} = {column} + 1"));
        }
        set(&mut assignments);
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
            "SELECT CAST({token_column} AS UNSIGNED), CAST({column} AS SIGNED) FROM {table} WHERE {key_column} = "
        ));
        read.push_bind(key);
        // The row as it is now, not as in an earlier snapshot.
        read.push(" LOCK IN SHARE MODE");
        let found = read.build_query_as().fetch_optional(&mut *connection).await?;
        Err(self
            .0
            .refused(token, version.map(|(_, expected)| expected), found))
    }

    async fn check_type(&self, connection: &mut MySqlConnection) -> Result<(), FencedError> {
        let FencedColumns { table, token, .. } = &self.0;
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
        Err(self.0.unfit(found))
    }
}

fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}
