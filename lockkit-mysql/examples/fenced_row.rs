//! A holder is paused past its lease and goes on as if nothing had happened. The row refuses it.
//!
//! ```sh
//! cargo run -p lockkit-mysql --example fenced_row                                 # a private MariaDB
//! cargo run -p lockkit-mysql --example fenced_row -- mysql://user:pw@host/database
//! ```

use std::{error::Error, time::Duration};

use lockkit_core::{AcquireOptions, LockClient};
use lockkit_mysql::{
    FencedError, FencedTable, MySqlBackend, MySqlConfig,
    sqlx::{self, ConnectOptions, mysql::MySqlConnectOptions},
};
use lockkit_testbed::mysql::{Flavour, MySql};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (_server, url) = match std::env::args().nth(1) {
        Some(url) => (None, url),
        None => {
            let server = MySql::start(Flavour::MariaDb, &[])?;
            let url = server.url();
            (Some(server), url)
        }
    };
    let mut database = url.parse::<MySqlConnectOptions>()?.connect().await?;
    sqlx::raw_sql(
        "CREATE TABLE IF NOT EXISTS example_account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, \
         version BIGINT UNSIGNED NOT NULL DEFAULT 0, last_token BIGINT UNSIGNED NOT NULL DEFAULT 0); \
         REPLACE INTO example_account (id, balance) VALUES (7, 1000)",
    )
    .execute(&mut database)
    .await?;
    let accounts = FencedTable::new("example_account", "id", "last_token");

    let connect = async || {
        let backend = MySqlBackend::connect(MySqlConfig::new(&url)).await?;
        LockClient::new(backend).lock("account/7")
    };
    let (first, second) = (connect().await?, connect().await?);

    let paused = first
        .acquire_with(&AcquireOptions::new().ttl(Duration::from_secs(1)).renew(false))
        .await?;
    println!("the first holds with token {}, and is paused", paused.token());
    let guard = second.acquire().await?;
    println!("its lease is over: the second holds with token {}", guard.token());
    accounts
        .update(&mut database, 7_i64, guard.token(), |set| {
            set.push("balance = balance - ").push_bind_unseparated(100_i64);
        })
        .await?;

    let stale = accounts.update(&mut database, 7_i64, paused.token(), |set| {
        set.push("balance = balance - ").push_bind_unseparated(100_i64);
    });
    match stale.await {
        Err(error @ FencedError::Stale { .. }) => println!("the first goes on and is refused: {error}"),
        other => return Err(format!("expected to be refused, got {other:?}").into()),
    }

    // The same against those who write without the lock: only in the version that was read.
    accounts
        .update_version(&mut database, 7_i64, guard.token(), ("version", 0), |set| {
            set.push("balance = 800");
        })
        .await?;
    let (balance,): (i64,) = sqlx::query_as("SELECT balance FROM example_account WHERE id = 7")
        .fetch_one(&mut database)
        .await?;
    println!("balance {balance}");
    assert_eq!(balance, 800);
    Ok(guard.release().await?)
}
