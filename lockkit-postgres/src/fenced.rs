//! Rows of the application that refuse a superseded holder.

use std::fmt::Write as _;

use lockkit_core::{FencingToken, spi::fenced::FencedColumns};
use tokio_postgres::{
    GenericClient,
    types::{ToSql, Type},
};

/// A table of the application whose rows remember the highest fencing token that wrote them, and refuse lower ones.
///
/// A lock cannot stop a holder that is paused just before a write and goes on when somebody else holds. The row can. One statement
/// compares the token and writes the values. The table may be in another database than the locks.
///
/// ```no_run
/// # use lockkit_core::LockGuard;
/// use lockkit_postgres::{FencedError, FencedTable, tokio_postgres::Client};
///
/// # async fn pay(database: &mut Client, guard: LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// // CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL, last_token bigint NOT NULL DEFAULT 0)
/// let accounts = FencedTable::new("account", "id", "last_token");
/// let transaction = database.transaction().await?; // after the grant
/// accounts.raise(&transaction, &7_i64, guard.token()).await?; // nobody from before writes the row any more
/// let row = transaction.query_one("SELECT balance FROM account WHERE id = 7", &[]).await?;
/// let rest = row.get::<_, i64>(0) - 100;
/// match accounts.update(&transaction, &7_i64, guard.token(), "balance = $1", &[&rest]).await {
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
pub type FencedError = lockkit_core::spi::fenced::FencedError<tokio_postgres::Error>;

/// A parameter of a statement.
type Value<'a> = &'a (dyn ToSql + Sync);

impl FencedTable {
    /// Describes a table: its name, perhaps with its schema (`shop.account`); the column of its unique key; and the column with the
    /// token of the last writer, which is `bigint NOT NULL`.
    pub fn new(table: &str, key: &str, token: &str) -> Self {
        let fitting = "bigint NOT NULL DEFAULT 0";
        Self(FencedColumns::new(table, key, token, quoted, fitting))
    }

    /// Updates the row of this key, unless a higher token has written it. `set` has the assignments, as SQL, with `$1`, `$2` and so on
    /// for `values`. The first call checks the type of the token's column: one that rounds would let a lower token pass.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written.
    ///
    /// # Cancel safety
    /// If the future is dropped, the row may have been written.
    pub async fn update(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
        set: &str,
        values: &[Value<'_>],
    ) -> Result<(), FencedError> {
        self.write(database, key, token, None, set, values).await
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
    pub async fn raise(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
    ) -> Result<(), FencedError> {
        self.write(database, key, token, None, "", &[]).await
    }

    /// Inserts the row of this key, or updates it if it is there, unless a higher token has written it: in one statement. `values` are those of
    /// `columns`, which are names and no SQL. The key needs a unique index.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written: that there is none is no reason here.
    ///
    /// # Cancel safety
    /// As [`update`](Self::update).
    pub async fn insert_or_update(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
        columns: &[&str],
        values: &[Value<'_>],
    ) -> Result<(), FencedError> {
        let FencedColumns {
            table,
            key: key_column,
            token: token_column,
            ..
        } = &self.0;
        let stored = self.stored(database, token).await?;
        let mut names = format!("{key_column}, {token_column}");
        let mut places = "$1, $2".to_owned();
        let mut set = format!("{token_column} = EXCLUDED.{token_column}");
        for (at, column) in columns.iter().enumerate() {
            let column = quoted(column);
            // Writing to a string does not fail.
            let _ = write!(names, ", {column}");
            let _ = write!(places, ", ${}", at + 3);
            let _ = write!(set, ", {column} = EXCLUDED.{column}");
        }
        let statement = format!(
            "INSERT INTO {table} AS fenced_row ({names}) VALUES ({places}) ON CONFLICT ({key_column}) DO UPDATE SET {set} \
             WHERE fenced_row.{token_column} OPERATOR(pg_catalog.<=) EXCLUDED.{token_column}"
        );
        let mut all = vec![key, &stored as Value<'_>];
        all.extend(values);
        if database.execute(&statement, &all).await? > 0 {
            return Ok(());
        }
        Err(self.refusal(database, key, token, None).await?)
    }

    /// Updates the row as [`update`](Self::update) does, if it still has the version that the caller has read. Increments the version,
    /// which is in the column of that name, a `bigint`. Useful without a lock, or under one against writers without it.
    ///
    /// # Errors
    /// [`FencedError`] has the reason why the row was not written.
    ///
    /// # Cancel safety
    /// As [`update`](Self::update).
    pub async fn update_version(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
        (column, expected): (&str, i64),
        set: &str,
        values: &[Value<'_>],
    ) -> Result<(), FencedError> {
        let version = Some((quoted(column), expected));
        self.write(database, key, token, version, set, values).await
    }

    async fn write(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
        version: Option<(String, i64)>,
        set: &str,
        values: &[Value<'_>],
    ) -> Result<(), FencedError> {
        let FencedColumns {
            table,
            key: key_column,
            token: token_column,
            ..
        } = &self.0;
        let stored = self.stored(database, token).await?;
        let (first, second, third) = (values.len() + 1, values.len() + 2, values.len() + 3);
        let mut update = format!("UPDATE {table} SET {token_column} = ${first}");
        let mut all = values.to_vec();
        all.extend([&stored as Value<'_>, key]);
        // The server's own operators, whatever the session's search_path has before them. A key is compared by that of its type, which may be
        // an extension's.
        let mut condition =
            format!(" WHERE {key_column} = ${second} AND {token_column} OPERATOR(pg_catalog.<=) ${first}");
        if let Some((column, expected)) = &version {
            // Writing to a string does not fail.
            let _ = write!(update, ", {column} = {column} OPERATOR(pg_catalog.+) 1");
            let _ = write!(condition, " AND {column} OPERATOR(pg_catalog.=) ${third}");
            all.push(expected);
        }
        if !set.is_empty() {
            let _ = write!(update, ", {set}");
        }
        if database.execute(&format!("{update}{condition}"), &all).await? > 0 {
            return Ok(());
        }
        Err(self.refusal(database, key, token, version).await?)
    }

    /// Returns the token as it is stored, once its column is known to keep it.
    async fn stored(&self, database: &impl GenericClient, token: FencingToken) -> Result<i64, FencedError> {
        if !self.0.is_fit() {
            self.check_type(database).await?;
            self.0.set_fit();
        }
        i64::try_from(token.get()).map_err(|_| self.0.unfit(format!("too small for {token}")))
    }

    /// Returns why no row was written.
    async fn refusal(
        &self,
        database: &impl GenericClient,
        key: Value<'_>,
        token: FencingToken,
        version: Option<(String, i64)>,
    ) -> Result<FencedError, FencedError> {
        let FencedColumns {
            table,
            key: key_column,
            token: token_column,
            ..
        } = &self.0;
        let column = version
            .as_ref()
            .map_or("0::bigint", |(column, _)| column.as_str());
        let read = format!("SELECT {token_column}, {column} FROM {table} WHERE {key_column} = $1");
        let found = database.query_opt(&read, &[key]).await?;
        let found = match found {
            // A negative one is lower than any token.
            Some(row) => Some((
                row.try_get::<_, Option<i64>>(0)?
                    .map(|it| it.max(0).unsigned_abs()),
                row.try_get(1)?,
            )),
            None => None,
        };
        Ok(self
            .0
            .refused(token, version.map(|(_, expected)| expected), found))
    }

    async fn check_type(&self, database: &impl GenericClient) -> Result<(), FencedError> {
        let FencedColumns { table, token, .. } = &self.0;
        let question = database.prepare(&format!("SELECT {token} FROM {table}")).await?;
        let found = question.columns().first().map(|column| column.type_().clone());
        if found == Some(Type::INT8) {
            return Ok(());
        }
        Err(self.0.unfit(found.as_ref().map_or("", Type::name)))
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
