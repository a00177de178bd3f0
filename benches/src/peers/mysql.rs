//! Beside the MySQL backend.

use lockkit::{
    BoxError,
    mysql::sqlx::{
        self, AssertSqlSafe, ConnectOptions, Row as _,
        mysql::{MySqlConnectOptions, MySqlConnection, MySqlSslMode},
    },
    spi::Mode,
};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};

use super::exclusive_alone;

async fn connect(url: &str) -> Result<MySqlConnection, BoxError> {
    let options: MySqlConnectOptions = url.parse()?;
    let options = options
        .ssl_mode(MySqlSslMode::Disabled)
        .disable_statement_logging();
    Ok(options.connect().await?)
}

async fn say(connection: &mut MySqlConnection, sql: String) -> Result<(), BoxError> {
    sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await?;
    Ok(())
}

/// A row lock by hand, in a connection of its own: `SELECT … FOR UPDATE`, then `ROLLBACK`. No token, no lease, nobody
/// told of anything.
#[derive(Clone)]
pub struct ForUpdate {
    /// The server and the account.
    pub url: String,
}

impl ForUpdate {
    /// Returns the version that the server reports.
    ///
    /// # Errors
    /// If it cannot be reached.
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn version(&self) -> Result<String, BoxError> {
        let mut connection = connect(&self.url).await?;
        let row = sqlx::raw_sql("SELECT VERSION()")
            .fetch_one(&mut connection)
            .await?;
        Ok(row.try_get(0)?)
    }
}

impl Subject for ForUpdate {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Shared(_) => None,
            other => exclusive_alone(other),
        })
    }
}

impl Client for ForUpdate {
    type Contender = LockedRow;

    async fn contender(&self, name: &str, mode: Mode) -> Result<LockedRow, BoxError> {
        let mut connection = connect(&self.url).await?;
        let setup = format!(
            "CREATE TABLE IF NOT EXISTS floor (name VARBINARY(255) PRIMARY KEY) ENGINE=InnoDB; \
             INSERT IGNORE INTO floor VALUES ('{name}'); SET SESSION autocommit=0"
        );
        say(&mut connection, setup).await?;
        // As both flavours say it.
        let how = match mode {
            Mode::Shared => "LOCK IN SHARE MODE",
            _ => "FOR UPDATE",
        };
        Ok(LockedRow {
            connection,
            select: format!("SELECT 0 FROM floor WHERE name='{name}' {how}"),
        })
    }
}

/// A row, in a connection.
pub struct LockedRow {
    connection: MySqlConnection,
    select: String,
}

impl Contender for LockedRow {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        say(&mut self.connection, self.select.clone()).await
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        say(&mut self.connection, "ROLLBACK".to_owned()).await
    }
}

/// The server's own named lock, in a connection of its own: `GET_LOCK`. No token, no lease, nobody told of anything.
#[derive(Clone)]
pub struct GetLock {
    /// The server and the account.
    pub url: String,
}

impl Subject for GetLock {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(exclusive_alone(scenario))
    }
}

impl Client for GetLock {
    type Contender = NamedLock;

    async fn contender(&self, name: &str, _: Mode) -> Result<NamedLock, BoxError> {
        Ok(NamedLock {
            connection: connect(&self.url).await?,
            name: name.to_owned(),
        })
    }
}

/// A named lock, in a connection.
pub struct NamedLock {
    connection: MySqlConnection,
    name: String,
}

impl Contender for NamedLock {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let sql = format!("SELECT GET_LOCK('{}', 60)", self.name);
        let row = sqlx::raw_sql(AssertSqlSafe(sql))
            .fetch_one(&mut self.connection)
            .await?;
        let granted: i64 = row.try_get(0)?;
        (granted == 1).then_some(()).ok_or_else(|| "not granted".into())
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        say(&mut self.connection, format!("DO RELEASE_LOCK('{}')", self.name)).await
    }
}
