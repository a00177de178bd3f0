//! A holder is paused past its lease and goes on as if nothing had happened. The row refuses it.
//!
//! ```sh
//! cargo run -p lockkit-postgres --example fenced_row_postgres                                    # a private server
//! cargo run -p lockkit-postgres --example fenced_row_postgres -- postgres://user:pw@host/database
//! ```

use std::{error::Error, time::Duration};

use lockkit_core::{AcquireOptions, LockClient};
use lockkit_postgres::{
    FencedError, FencedTable, PostgresBackend, PostgresConfig,
    tokio_postgres::{self, NoTls},
};
use lockkit_testbed::postgres::PgServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (_server, url) = match std::env::args().nth(1) {
        Some(url) => (None, url),
        None => {
            let server = PgServer::plain()?;
            let url = server.url();
            (Some(server), url)
        }
    };
    let (database, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    database
        .batch_execute(
            "DROP TABLE IF EXISTS example_account; \
             CREATE TABLE example_account (id bigint PRIMARY KEY, balance bigint NOT NULL, \
             version bigint NOT NULL DEFAULT 0, last_token bigint NOT NULL DEFAULT 0); \
             INSERT INTO example_account (id, balance) VALUES (7, 1000)",
        )
        .await?;
    let accounts = FencedTable::new("example_account", "id", "last_token");

    let connect = async || {
        let backend = PostgresBackend::connect(PostgresConfig::new(&url)).await?;
        LockClient::new(backend).lock("account/7")
    };
    let (first, second) = (connect().await?, connect().await?);

    let paused = first
        .acquire_with(&AcquireOptions::new().ttl(Duration::from_secs(1)).renew(false))
        .await?;
    println!("the first holds with token {}, and is paused", paused.token());
    let guard = second.acquire().await?;
    println!("its lease is over: the second holds with token {}", guard.token());
    let set = "balance = balance - $1";
    accounts
        .update(&database, &7_i64, guard.token(), set, &[&100_i64])
        .await?;

    match accounts
        .update(&database, &7_i64, paused.token(), set, &[&100_i64])
        .await
    {
        Err(error @ FencedError::Stale { .. }) => println!("the first goes on and is refused: {error}"),
        other => return Err(format!("expected to be refused, got {other:?}").into()),
    }

    // The same against those who write without the lock: only in the version that was read.
    accounts
        .update_version(
            &database,
            &7_i64,
            guard.token(),
            ("version", 0),
            "balance = 800",
            &[],
        )
        .await?;
    let balance: i64 = database
        .query_one("SELECT balance FROM example_account WHERE id = 7", &[])
        .await?
        .get(0);
    println!("balance {balance}");
    assert_eq!(balance, 800);
    Ok(guard.release().await?)
}
