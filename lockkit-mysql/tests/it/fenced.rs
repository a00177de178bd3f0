//! Rows that refuse a superseded holder.

use std::time::Duration;

use lockkit_core::{AcquireOptions, FencingToken};
use lockkit_mysql::{
    FencedError, FencedTable,
    sqlx::{
        ConnectOptions, Connection, Row,
        mysql::{MySqlConnectOptions, MySqlConnection, MySqlDatabaseError},
    },
};
use lockkit_testbed::{
    eventually,
    mysql::{Flavour, MySql},
};

use crate::servers::{Admin, config, connect, for_each_flavour, name, shared};

for_each_flavour! {
    a_row_refuses_a_superseded_holder
    a_raised_row_takes_no_write_from_before
    tokens_of_another_backend_are_told_and_reset
    a_row_refuses_an_older_version
    a_newer_row_is_not_missing_to_an_older_snapshot
    a_column_that_cannot_keep_a_token_is_refused
    a_row_is_inserted_or_updated_by_token
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

/// The lock was on PostgreSQL, then on ZooKeeper: each step of docs/choosing.md, "Changing the backend", and what happens without it.
async fn tokens_of_another_backend_are_told_and_reset(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let mut admin = Admin::of(shared(flavour)).await;
    let write = async |rows: &mut MySqlConnection, token| {
        let token = FencingToken::new(token);
        accounts
            .update(rows, "mine", token, |set| {
                set.push("balance = balance + 1");
            })
            .await
    };
    for (before, after) in [(1_795_258_041_843_810_000, 222), (222, 1_795_258_041_843_810)] {
        for n in 0..100 {
            write(&mut rows, before + n).await.unwrap();
        }
        if after < before {
            let error = write(&mut rows, after).await.unwrap_err();
            assert!(matches!(error, FencedError::Stale { .. }), "{error:?}");
            assert!(error.to_string().contains("or another backend"), "{error}");
            admin.run(&format!("UPDATE `{table}` SET `last token` = 0")).await;
        }
        for n in 0..100 {
            write(&mut rows, after + n).await.unwrap();
        }
        admin.run(&format!("UPDATE `{table}` SET `last token` = 0")).await;
    }
    assert_eq!(balance(&mut rows, &table).await, 500);
}

async fn a_row_refuses_a_superseded_holder(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let client = connect(config(shared(flavour).addr())).await.unwrap();
    let lock = client.lock(name("account")).unwrap();
    // This holder does not check that it still holds.
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

/// A holder of before has read the row, and writes between the reading and the writing of the one after it.
async fn a_raised_row_takes_no_write_from_before(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let url: MySqlConnectOptions = MySql::url_at(shared(flavour).addr()).parse().unwrap();
    let (mut others, mut admin) = (url.connect().await.unwrap(), Admin::of(shared(flavour)).await);
    let late_id: u64 = lockkit_mysql::sqlx::query("SELECT CONNECTION_ID()")
        .fetch_one(&mut others)
        .await
        .unwrap()
        .get(0);
    let (before, now) = (FencingToken::new(33), FencingToken::new(34));
    let set = |value: i64| {
        move |set: &mut lockkit_mysql::sqlx::query_builder::Separated<'_, _, _>| {
            set.push("balance = ").push_bind_unseparated(value);
        }
    };
    let mut transaction = rows.begin().await.unwrap();
    accounts.raise(&mut transaction, "mine", now).await.unwrap();
    let read = balance(&mut transaction, &table).await;
    let late = async { accounts.update(&mut others, "mine", before, set(read - 50)).await };
    let rest = async {
        let waits = format!(
            "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = {late_id}"
        );
        // The server's table is not made anew for who reads it within 100 ms of the reading before.
        eventually("the other writer waits for the row", async || {
            tokio::time::sleep(Duration::from_millis(150)).await;
            admin.value(&waits).await == "1"
        })
        .await;
        accounts
            .update(&mut transaction, "mine", now, set(read - 30))
            .await?;
        transaction.commit().await?;
        Ok::<_, FencedError>(())
    };
    let (late, rest) = tokio::join!(late, rest);
    rest.unwrap();
    assert!(
        matches!(late, Err(FencedError::Stale { highest, .. }) if highest == now),
        "{late:?}"
    );
    assert_eq!(
        balance(&mut rows, &table).await,
        70,
        "the debit of the holder after"
    );
    let lower = accounts.raise(&mut rows, "mine", before).await;
    assert!(matches!(lower, Err(FencedError::Stale { .. })), "{lower:?}");
    let missing = accounts.raise(&mut rows, "nobody's", now).await;
    assert!(matches!(missing, Err(FencedError::Missing)), "{missing:?}");
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

/// The snapshot is of a transaction that began before the newer write.
async fn a_newer_row_is_not_missing_to_an_older_snapshot(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    let mut admin = Admin::of(shared(flavour)).await;
    for version in [None, Some(7)] {
        let begin = lockkit_mysql::sqlx::AssertSqlSafe(format!(
            "START TRANSACTION WITH CONSISTENT SNAPSHOT; SELECT * FROM `{table}`"
        ));
        lockkit_mysql::sqlx::raw_sql(begin)
            .fetch_all(&mut rows)
            .await
            .unwrap();
        admin
            .run(&format!(
                "DELETE FROM `{table}`; INSERT INTO `{table}` VALUES ('mine', 1, 100, 9)"
            ))
            .await;
        let token = FencingToken::new(50);
        let set = |set: &mut lockkit_mysql::sqlx::query_builder::Separated<'_, _, _>| {
            set.push("balance = 2");
        };
        let written = match version {
            None => accounts.update(&mut rows, "mine", token, set).await,
            Some(version) => {
                accounts
                    .update_version(&mut rows, "mine", token, ("version", version), set)
                    .await
            }
        };
        match written {
            Err(FencedError::Stale { highest, .. }) => assert_eq!(highest.get(), 100),
            other => panic!("{other:?}"),
        }
        lockkit_mysql::sqlx::raw_sql("ROLLBACK")
            .fetch_all(&mut rows)
            .await
            .unwrap();
    }
}

async fn a_column_that_cannot_keep_a_token_is_refused(flavour: Flavour) {
    let mut admin = Admin::of(shared(flavour)).await;
    let options: MySqlConnectOptions = MySql::url_at(shared(flavour).addr()).parse().unwrap();
    let mut rows: MySqlConnection = options.connect().await.unwrap();
    lockkit_mysql::sqlx::raw_sql("SET SESSION sql_mode=''")
        .fetch_all(&mut rows)
        .await
        .unwrap();
    for (column, is_good) in [
        ("BIGINT UNSIGNED NOT NULL", true),
        ("INT UNSIGNED NOT NULL", false),
        ("FLOAT NOT NULL", false),
        ("DOUBLE NOT NULL", false),
        ("VARCHAR(20) NOT NULL", false),
        ("BIGINT NOT NULL", false),
        ("BIGINT UNSIGNED", true),
    ] {
        let table = format!("t{:016x}", fastrand::u64(..));
        admin
            .run(&format!("CREATE TABLE {table} (id INT PRIMARY KEY, v INT, tok {column}); INSERT INTO {table} VALUES (1, 0, 0), (2, 0, 0)"))
            .await;
        let fenced = FencedTable::new(&table, "id", "tok");
        let mut write = async |token: u64| {
            let token = FencingToken::new(token);
            fenced
                .update(&mut rows, 1, token, |set| {
                    set.push("v = v + 1");
                })
                .await
        };
        let high = 1_795_258_041_843_810;
        let outcomes = [write(high).await, write(high - 1).await];
        match &outcomes {
            [Ok(()), Err(FencedError::Stale { .. })] if is_good => {}
            [Err(FencedError::Unfit { .. }), Err(FencedError::Unfit { .. })] if !is_good => {}
            other => panic!("{column}: {other:?}"),
        }
        if column == "BIGINT UNSIGNED" {
            admin.run(&format!("UPDATE {table} SET tok=NULL")).await;
            let error = write(high).await.unwrap_err();
            assert!(matches!(error, FencedError::Unfit { .. }), "{error:?}");
        }
    }
}

/// Returns whether the server ended this statement to end a deadlock.
fn is_deadlock(error: &lockkit_mysql::sqlx::Error) -> bool {
    let error = error.as_database_error();
    error.is_some_and(|error| error.downcast_ref::<MySqlDatabaseError>().number() == 1213)
}

async fn a_row_is_inserted_or_updated_by_token(flavour: Flavour) {
    let (mut rows, accounts, table) = table(flavour).await;
    Admin::of(shared(flavour))
        .await
        .run(&format!("DELETE FROM `{table}`"))
        .await;
    let write = async |rows: &mut MySqlConnection, token, balance: i64| {
        let token = FencingToken::new(token);
        accounts
            .insert_or_update(rows, "new", token, |set| {
                set.push("balance = ").push_bind_unseparated(balance);
            })
            .await
    };
    for (token, by) in [(7, 1), (7, 2), (7, 2), (9, 3)] {
        write(&mut rows, token, by).await.unwrap();
        assert_eq!(balance(&mut rows, &table).await, by);
    }
    match write(&mut rows, 8, 4).await {
        Err(FencedError::Stale { highest, .. }) => assert_eq!(highest.get(), 9),
        other => panic!("{other:?}"),
    }
    assert_eq!(balance(&mut rows, &table).await, 3);

    // Of several who find no row, each writes or is refused, if need be after a deadlock.
    let mut admin = Admin::of(shared(flavour)).await;
    let options: MySqlConnectOptions = MySql::url_at(shared(flavour).addr()).parse().unwrap();
    for _ in 0..20 {
        admin.run(&format!("DELETE FROM `{table}`")).await;
        let mut writers = tokio::task::JoinSet::new();
        for token in 1..=4 {
            let (accounts, options) = (accounts.clone(), options.clone());
            writers.spawn(async move {
                let mut rows = options.connect().await.unwrap();
                loop {
                    let write =
                        accounts.insert_or_update(&mut rows, "new", FencingToken::new(token), |set| {
                            set.push("balance = ").push_bind_unseparated(token);
                        });
                    match write.await {
                        Err(FencedError::Database(error)) if is_deadlock(&error) => {}
                        written => return (token, written),
                    }
                }
            });
        }
        while let Some(written) = writers.join_next().await {
            match written.unwrap() {
                (_, Ok(())) | (1..=3, Err(FencedError::Stale { .. })) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(balance(&mut rows, &table).await, 4, "that of the highest token");
    }
    // Another unique key in the way is no missing row.
    admin
        .run(&format!("ALTER TABLE `{table}` ADD UNIQUE (balance)"))
        .await;
    let in_the_way = accounts.insert_or_update(&mut rows, "other", FencingToken::new(1), |set| {
        set.push("balance = 4");
    });
    let error = in_the_way.await.unwrap_err();
    assert!(matches!(error, FencedError::Database(_)), "{error:?}");
}
