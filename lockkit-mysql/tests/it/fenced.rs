//! Rows that refuse whoever has been superseded.

use std::time::Duration;

use lockkit_core::{AcquireOptions, FencingToken};
use lockkit_mysql::{
    FencedError, FencedTable,
    sqlx::{
        ConnectOptions, Row,
        mysql::{MySqlConnectOptions, MySqlConnection},
    },
};
use lockkit_testbed::mysql::{Flavour, MySql};

use crate::servers::{Admin, config, connect, for_each_flavour, name, shared};

for_each_flavour! {
    a_row_refuses_a_superseded_holder
    a_row_refuses_an_older_version
}

async fn table(flavour: Flavour) -> (MySqlConnection, FencedTable, String) {
    let table = format!("odd `name` {:x}", fastrand::u64(..));
    let create = format!(
        "CREATE TABLE `{}` (id VARCHAR(20) PRIMARY KEY, balance BIGINT NOT NULL, `last token` BIGINT UNSIGNED NOT NULL, \
         version BIGINT UNSIGNED NOT NULL DEFAULT 0); INSERT INTO `{0}` (id, balance, `last token`) VALUES ('mine', 100, 0)",
        table.replace('`', "``")
    );
    Admin::of(shared(flavour)).await.run(&create).await;
    let addr = shared(flavour).addr();
    let options: MySqlConnectOptions = MySql::url_at(addr).parse().unwrap();
    let fenced = FencedTable::new(&table, "id", "last token");
    (options.connect().await.unwrap(), fenced, table.replace('`', "``"))
}

async fn balance(connection: &mut MySqlConnection, table: &str) -> i64 {
    let sql = lockkit_mysql::sqlx::AssertSqlSafe(format!("SELECT balance FROM `{table}`"));
    lockkit_mysql::sqlx::raw_sql(sql)
        .fetch_one(connection)
        .await
        .unwrap()
        .get(0)
}

async fn a_row_refuses_a_superseded_holder(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let client = connect(config(shared(flavour).addr())).await.unwrap();
    let lock = client.lock(name("account")).unwrap();
    // One who does not look whether it still holds.
    let brief = AcquireOptions::new().ttl(Duration::from_millis(100)).renew(false);
    let zombie = lock.acquire_with(&brief).await.unwrap();
    let write = async |rows: &mut MySqlConnection, token, by: i64| {
        accounts
            .update(rows, "mine", token, |set| {
                set.push("balance = balance + ").push_bind_unseparated(by);
            })
            .await
    };
    write(&mut rows, zombie.token(), 1).await.unwrap();
    zombie.lost().await;
    let guard = connect(config(shared(flavour).addr())).await.unwrap();
    let guard = guard.lock(lock.name()).unwrap().acquire().await.unwrap();
    write(&mut rows, guard.token(), 10).await.unwrap();
    // A holder writes more than once.
    write(&mut rows, guard.token(), 0).await.unwrap();
    match write(&mut rows, zombie.token(), 1_000).await {
        Err(FencedError::Stale { token, highest, .. }) => {
            assert_eq!((token, highest), (zombie.token(), guard.token()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(balance(&mut rows, &table).await, 111);
    let missing = accounts.update(&mut rows, "nobody's", guard.token(), |set| {
        set.push("balance = 0");
    });
    assert!(matches!(missing.await, Err(FencedError::Missing)));
}

async fn a_row_refuses_an_older_version(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let token = FencingToken::new(5);
    let write = async |rows: &mut MySqlConnection, token, version| {
        accounts
            .update_version(rows, "mine", token, ("version", version), |set| {
                set.push("balance = balance + 1");
            })
            .await
    };
    write(&mut rows, token, 0).await.unwrap();
    write(&mut rows, token, 1).await.unwrap();
    match write(&mut rows, token, 1).await {
        Err(FencedError::Changed {
            expected: 1,
            found: 2,
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
    match write(&mut rows, FencingToken::new(4), 2).await {
        Err(FencedError::Stale { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(balance(&mut rows, &table).await, 102);
}
