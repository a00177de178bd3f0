//! Rows that refuse a superseded holder.

use std::time::Duration;

use lockkit_core::{AcquireOptions, FencingToken};
use lockkit_postgres::{
    FencedError, FencedTable,
    tokio_postgres::{self, Client, NoTls},
};
use lockkit_testbed::eventually;

use crate::servers::{config, connect, name, shared, tests};

tests! {
    a_row_refuses_a_superseded_holder
    a_raised_row_takes_no_write_from_before
    a_row_refuses_an_older_version
    a_column_that_cannot_keep_a_token_is_refused
    a_transaction_takes_its_write_back
    a_row_is_inserted_or_updated_by_token
    an_operator_of_a_search_path_lets_no_write_through
}

async fn database() -> Client {
    let url = shared().url();
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A table with odd names, and its name as SQL.
async fn table(database: &Client) -> (FencedTable, String) {
    let name = format!("odd \"name\" {:x}", fastrand::u64(..));
    let quoted = format!("\"{}\"", name.replace('"', "\"\""));
    let create = format!(
        "CREATE TABLE {quoted} (id text PRIMARY KEY, balance bigint NOT NULL, \"last token\" bigint NOT NULL DEFAULT 0, \
         version bigint NOT NULL DEFAULT 0); INSERT INTO {quoted} (id, balance) VALUES ('mine', 100)"
    );
    database.batch_execute(&create).await.unwrap();
    (FencedTable::new(&name, "id", "last token"), quoted)
}

async fn balance(database: &Client, table: &str) -> i64 {
    let row = database
        .query_one(&format!("SELECT balance FROM {table}"), &[])
        .await
        .unwrap();
    row.get(0)
}

async fn a_row_refuses_a_superseded_holder() {
    let rows = database().await;
    let (accounts, table) = table(&rows).await;
    let client = connect(config(shared().addr())).await.unwrap();
    let lock = client.lock(name("account")).unwrap();
    // This holder does not check that it still holds.
    let brief = AcquireOptions::new().ttl(Duration::from_millis(100)).renew(false);
    let zombie = lock.acquire_with(&brief).await.unwrap();
    let set = "balance = balance + $1";
    let write = async |token, by: i64| accounts.update(&rows, &"mine", token, set, &[&by]).await;
    write(zombie.token(), 1).await.unwrap();
    zombie.lost().await;
    let guard = connect(config(shared().addr())).await.unwrap();
    let guard = guard.lock(lock.name()).unwrap().acquire().await.unwrap();
    write(guard.token(), 10).await.unwrap();
    // A holder writes more than once.
    write(guard.token(), 0).await.unwrap();
    match write(zombie.token(), 1_000).await {
        Err(FencedError::Stale { token, highest, .. }) => {
            assert_eq!((token, highest), (zombie.token(), guard.token()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(balance(&rows, &table).await, 111);
    let missing = accounts.update(&rows, &"nobody's", guard.token(), "balance = 0", &[]);
    assert!(matches!(missing.await, Err(FencedError::Missing)));
    guard.release().await.unwrap();
}

/// Those that say of any two tokens that they are in order, and of any two versions that they are the same.
async fn an_operator_of_a_search_path_lets_no_write_through() {
    let rows = database().await;
    let (accounts, table) = table(&rows).await;
    let theirs = format!("theirs_{:x}", fastrand::u64(..));
    rows.batch_execute(&format!(
        "CREATE SCHEMA {theirs}; \
         CREATE FUNCTION {theirs}.always(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'; \
         CREATE OPERATOR {theirs}.<= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {theirs}.always); \
         CREATE OPERATOR {theirs}.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {theirs}.always); \
         SET search_path = {theirs}, pg_catalog, lockkit, public"
    ))
    .await
    .unwrap();
    let (late, now) = (FencingToken::new(33), FencingToken::new(34));
    let written = accounts.update(&rows, &"mine", now, "balance = 1", &[]).await;
    written.unwrap();
    for refused in [
        accounts.update(&rows, &"mine", late, "balance = 2", &[]).await,
        accounts
            .insert_or_update(&rows, &"mine", late, &["balance"], &[&3_i64])
            .await,
    ] {
        assert!(matches!(refused, Err(FencedError::Stale { .. })), "{refused:?}");
    }
    let changed = accounts.update_version(&rows, &"mine", now, ("version", 7), "balance = 4", &[]);
    let changed = changed.await;
    assert!(matches!(changed, Err(FencedError::Changed { .. })), "{changed:?}");
    assert_eq!(balance(&rows, &table).await, 1);
}

/// A holder of before has read the row, and writes between the reading and the writing of the one after it.
async fn a_raised_row_takes_no_write_from_before() {
    let (mut rows, others, admin) = (database().await, database().await, database().await);
    let late_pid: i32 = others
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let (accounts, table) = table(&rows).await;
    let (before, now) = (FencingToken::new(33), FencingToken::new(34));
    let transaction = rows.transaction().await.unwrap();
    accounts.raise(&transaction, &"mine", now).await.unwrap();
    let read: i64 = transaction
        .query_one(&format!("SELECT balance FROM {table}"), &[])
        .await
        .unwrap()
        .get(0);
    let (late_rest, rest) = (read - 50, read - 30);
    let late = async {
        accounts
            .update(&others, &"mine", before, "balance = $1", &[&late_rest])
            .await
    };
    let written = async {
        let waits = format!("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = {late_pid}");
        eventually("the other writer waits for the row", async || {
            admin.query_one(&waits, &[]).await.unwrap().get::<_, i64>(0) > 0
        })
        .await;
        accounts
            .update(&transaction, &"mine", now, "balance = $1", &[&rest])
            .await?;
        transaction.commit().await?;
        Ok::<_, FencedError>(())
    };
    let (late, written) = tokio::join!(late, written);
    written.unwrap();
    assert!(
        matches!(late, Err(FencedError::Stale { highest, .. }) if highest == now),
        "{late:?}"
    );
    assert_eq!(balance(&rows, &table).await, 70, "the debit of the holder after");
    let lower = accounts.raise(&rows, &"mine", before).await;
    assert!(matches!(lower, Err(FencedError::Stale { .. })), "{lower:?}");
    let missing = accounts.raise(&rows, &"nobody's", now).await;
    assert!(matches!(missing, Err(FencedError::Missing)), "{missing:?}");
}

async fn a_row_refuses_an_older_version() {
    let rows = database().await;
    let (accounts, table) = table(&rows).await;
    let write = async |token, version: i64| {
        let token = FencingToken::new(token);
        let set = "balance = balance + 1";
        accounts
            .update_version(&rows, &"mine", token, ("version", version), set, &[])
            .await
    };
    write(5, 0).await.unwrap();
    write(5, 1).await.unwrap();
    match write(5, 1).await {
        Err(FencedError::Changed {
            expected: 1,
            found: 2,
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(write(4, 2).await, Err(FencedError::Stale { .. })));
    assert_eq!(balance(&rows, &table).await, 102);
}

async fn a_column_that_cannot_keep_a_token_is_refused() {
    let rows = database().await;
    let high = 1_795_258_041_843_810_017;
    for (column, is_good) in [
        ("bigint NOT NULL", true),
        ("bigint", true),
        ("int NOT NULL", false),
        ("real NOT NULL", false),
        ("double precision NOT NULL", false),
        ("text NOT NULL", false),
    ] {
        let table = format!("public.t{:016x}", fastrand::u64(..));
        let create = format!(
            "CREATE TABLE {table} (id int PRIMARY KEY, v int, tok {column}); INSERT INTO {table} VALUES (1, 0, '0'), (2, 0, '0')"
        );
        rows.batch_execute(&create).await.unwrap();
        let fenced = FencedTable::new(&table, "id", "tok");
        let write = async |token: u64| {
            fenced
                .update(&rows, &1, FencingToken::new(token), "v = v + 1", &[])
                .await
        };
        let outcomes = [write(high).await, write(high - 1).await];
        match &outcomes {
            [Ok(()), Err(FencedError::Stale { .. })] if is_good => {}
            [Err(FencedError::Unfit { .. }), Err(FencedError::Unfit { .. })] if !is_good => {}
            other => panic!("{column}: {other:?}"),
        }
        if column == "bigint" {
            rows.batch_execute(&format!("UPDATE {table} SET tok=NULL"))
                .await
                .unwrap();
            assert!(matches!(write(high).await, Err(FencedError::Unfit { .. })));
        }
        if is_good {
            // A token of another backend, which has more bits than the column.
            assert!(matches!(write(u64::MAX).await, Err(FencedError::Unfit { .. })));
        }
    }
}

async fn a_transaction_takes_its_write_back() {
    let mut rows = database().await;
    let (accounts, table) = table(&rows).await;
    let transaction = rows.transaction().await.unwrap();
    let update = accounts.update(&transaction, &"mine", FencingToken::new(9), "balance = 0", &[]);
    update.await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(balance(&rows, &table).await, 100);
    accounts
        .update(&rows, &"mine", FencingToken::new(8), "balance = 8", &[])
        .await
        .unwrap();
    assert_eq!(balance(&rows, &table).await, 8);
}

async fn a_row_is_inserted_or_updated_by_token() {
    let rows = database().await;
    let (accounts, table) = table(&rows).await;
    rows.batch_execute(&format!("DELETE FROM {table}")).await.unwrap();
    let write = async |rows: &Client, token, balance: i64| {
        let token = FencingToken::new(token);
        accounts
            .insert_or_update(rows, &"new", token, &["balance"], &[&balance])
            .await
    };
    for (token, by) in [(7, 1), (7, 2), (7, 2), (9, 3)] {
        write(&rows, token, by).await.unwrap();
        assert_eq!(balance(&rows, &table).await, by);
    }
    match write(&rows, 8, 4).await {
        Err(FencedError::Stale { highest, .. }) => assert_eq!(highest.get(), 9),
        other => panic!("{other:?}"),
    }
    assert_eq!(balance(&rows, &table).await, 3);

    // Of several who find no row, each writes or is refused.
    let others = [
        database().await,
        database().await,
        database().await,
        database().await,
    ];
    for _ in 0..20 {
        rows.batch_execute(&format!("DELETE FROM {table}")).await.unwrap();
        let [one, two, three, four] = &others;
        let (one, two, three, four) = tokio::join!(
            write(one, 1, 1),
            write(two, 2, 2),
            write(three, 3, 3),
            write(four, 4, 4)
        );
        four.unwrap();
        for lower in [one, two, three] {
            assert!(
                matches!(lower, Ok(()) | Err(FencedError::Stale { .. })),
                "{lower:?}"
            );
        }
        assert_eq!(balance(&rows, &table).await, 4, "that of the highest token");
    }
    rows.batch_execute(&format!("ALTER TABLE {table} ADD UNIQUE (balance)"))
        .await
        .unwrap();
    let in_the_way =
        accounts.insert_or_update(&rows, &"other", FencingToken::new(1), &["balance"], &[&4_i64]);
    let error = in_the_way.await.unwrap_err();
    assert!(matches!(error, FencedError::Database(_)), "{error:?}");
}
