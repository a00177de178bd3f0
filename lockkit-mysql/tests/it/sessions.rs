//! What becomes of sessions: how many there are, who waits in them, and what is left behind.

use std::time::Duration;

use futures_util::future::join_all;
use lockkit_core::{AcquireOptions, Error, LossReason};
use lockkit_mysql::Mode;
use lockkit_testbed::{eventually, mysql::Flavour};
use tokio::time::{Instant, timeout};

use crate::servers::{Admin, config, connect, for_each_flavour, name, private, row, shared};

for_each_flavour! {
    many_tasks_wait_in_one_connection
    a_waiter_that_gives_up_is_not_queued_and_delays_nobody
    sessions_that_were_ended_meanwhile_are_replaced
    a_kept_session_is_used_again_and_for_any_lease
    fifty_racers_for_a_new_name
    a_foreign_session_and_a_lock_exclude_each_other
    a_row_that_was_deleted_is_made_again
    a_table_that_is_locked_is_no_answer
    a_killed_holder_session_is_told_soon
    an_interrupted_wait_goes_on
    too_many_connections_is_an_error_and_never_taken
    a_kill_never_hits_a_stranger
}

async fn many_tasks_wait_in_one_connection(flavour: Flavour) {
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let server = private(flavour, &[]);
        let mut admin = Admin::of(&server).await;
        let mut config = config(server.addr());
        config.mode = mode;
        let (holder, waiting) = (
            connect(config.clone()).await.unwrap(),
            connect(config).await.unwrap(),
        );
        let guard = holder.lock("a").unwrap().acquire().await.unwrap();
        waiting
            .lock("b")
            .unwrap()
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        // Each has one for itself, one that holds or has held, which will wait, and one to hear of breaks.
        let each = if mode == Mode::ForUpdate { 3 } else { 2 };
        eventually("all are there", async || admin.sessions().await.len() == 2 * each).await;
        let waiters: Vec<_> = (0..200)
            .map(|_| {
                let lock = waiting.lock("a").unwrap();
                tokio::spawn(async move { lock.acquire().await?.release().await })
            })
            .collect();
        eventually("they wait", async || {
            holder.inspect("a").await.unwrap().waiters == Some(1)
        })
        .await;
        assert_eq!(admin.sessions().await.len(), 2 * each, "{mode:?}");
        guard.release().await.unwrap();
        for waiter in join_all(waiters).await {
            waiter.unwrap().unwrap();
        }
        assert!(admin.sessions().await.len() <= 2 * each, "{mode:?}");
    }
}

async fn a_waiter_that_gives_up_is_not_queued_and_delays_nobody(flavour: Flavour) {
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let mut config = config(shared(flavour).addr());
        config.mode = mode;
        let [holder, quitter, next] = join_all((0..3).map(|_| connect(config.clone())))
            .await
            .try_into()
            .unwrap();
        let (holder, quitter, next) = (holder.unwrap(), quitter.unwrap(), next.unwrap());
        let name = name("gives-up");
        for how in ["drop", "time-out", "abort"] {
            let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
            let lock = quitter.lock(&name).unwrap();
            match how {
                "drop" => {
                    let early = timeout(Duration::from_millis(100), lock.acquire()).await;
                    assert!(early.is_err());
                }
                "time-out" => {
                    let late = lock
                        .acquire_timeout(Duration::from_millis(100))
                        .await
                        .unwrap_err();
                    assert!(late.is_timeout(), "{late}");
                }
                _ => {
                    let waiter = tokio::spawn(async move { lock.acquire().await });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    waiter.abort();
                }
            }
            let began = Instant::now();
            eventually("nobody waits", async || {
                holder.inspect(&name).await.unwrap().waiters == Some(0)
            })
            .await;
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{how}: {:?}",
                began.elapsed()
            );
            let lock = next.lock(&name).unwrap();
            let waiter = tokio::spawn(async move { (lock.acquire().await, Instant::now()) });
            eventually("the next waits", async || {
                holder.inspect(&name).await.unwrap().waiters == Some(1)
            })
            .await;
            guard.release().await.unwrap();
            let released = Instant::now();
            let (granted, at) = waiter.await.unwrap();
            granted.unwrap().release().await.unwrap();
            let took = at.saturating_duration_since(released);
            assert!(took < Duration::from_millis(500), "{mode:?}, {how}: {took:?}");
        }
    }
}

async fn sessions_that_were_ended_meanwhile_are_replaced(flavour: Flavour) {
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let server = private(flavour, &[]);
        let mut admin = Admin::of(&server).await;
        let mut config = config(server.addr());
        config.mode = mode;
        config.token_block = 1;
        let client = connect(config).await.unwrap();
        let lock = client.lock("a").unwrap();
        let mut last = None;
        for _ in 0..3 {
            for id in admin.sessions().await {
                admin.run(&format!("KILL {id}")).await;
            }
            let guard = lock.try_acquire().await.unwrap().expect("it is free");
            assert!(Some(guard.token()) > last);
            last = Some(guard.token());
            guard.release().await.unwrap();
        }
        // The server itself ends those that are silent for longer than their lease.
        let brief = lock.with_options(AcquireOptions::new().ttl(Duration::from_secs(1)));
        for _ in 0..2 {
            brief.acquire().await.unwrap().release().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1_050)).await;
        }
        let guard = brief.try_acquire().await.unwrap().expect("it is free");
        guard.release().await.unwrap();
    }
}

async fn a_kept_session_is_used_again_and_for_any_lease(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let client = connect(config(server.addr())).await.unwrap();
    client
        .lock("a")
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // One for itself, one that is kept, one to hear of breaks.
    eventually("all are there", async || admin.sessions().await.len() == 3).await;
    let before = admin.sessions().await;
    for ttl in [30, 1, 2, 30, 60, 1] {
        let lock = client.lock("a").unwrap();
        let guard = lock
            .acquire_with(&AcquireOptions::new().ttl(Duration::from_secs(ttl)))
            .await
            .unwrap();
        let left = guard.valid_until().unwrap() - Instant::now();
        assert!(
            left <= Duration::from_secs(ttl) && left > Duration::from_secs(ttl) / 2,
            "{ttl}: {left:?}"
        );
        guard.release().await.unwrap();
    }
    assert_eq!(admin.sessions().await, before);
    // The last one's lease is the session's own.
    let guard = client.lock("a").unwrap();
    let guard = guard
        .acquire_with(&AcquireOptions::new().ttl(Duration::from_secs(1)).renew(false))
        .await
        .unwrap();
    let other = connect(config(server.addr())).await.unwrap();
    let began = Instant::now();
    let next = other.lock("a").unwrap().acquire().await.unwrap();
    assert!(began.elapsed() > Duration::from_millis(900) && began.elapsed() < Duration::from_secs(2));
    assert!(!guard.is_held() && next.token() > guard.token());
}

async fn fifty_racers_for_a_new_name(flavour: Flavour) {
    let server = private(flavour, &["--innodb-print-all-deadlocks=ON"]);
    let clients = join_all((0..50).map(|_| connect(config(server.addr())))).await;
    let clients: Vec<_> = clients.into_iter().map(Result::unwrap).collect();
    for round in 0..4 {
        // Whoever tries is told the truth: one has it, and it is taken for the others.
        let name = format!("tried/{round}");
        let tries = clients.iter().map(|client| {
            let lock = client.lock(&name).unwrap();
            async move { lock.try_acquire().await }
        });
        let granted: Vec<_> = join_all(tries)
            .await
            .into_iter()
            .filter_map(Result::unwrap)
            .collect();
        assert_eq!(granted.len(), 1, "one of fifty that tried at once");
        drop(granted);

        let name = format!("acquired/{round}");
        let tasks = clients.iter().map(|client| {
            let lock = client.lock(&name).unwrap();
            tokio::spawn(async move {
                let guard = lock.acquire().await?;
                let token = guard.token();
                guard.release().await?;
                Ok::<_, Error>(token)
            })
        });
        let mut tokens: Vec<_> = join_all(tasks)
            .await
            .into_iter()
            .map(|task| task.unwrap().unwrap())
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), 50);
    }
    let log = server.process().log_tail();
    assert!(!log.to_lowercase().contains("deadlock"), "{log}");
}

async fn a_foreign_session_and_a_lock_exclude_each_other(flavour: Flavour) {
    let server = shared(flavour);
    let client = connect(config(server.addr())).await.unwrap();
    let name = name("foreign");
    let (mut foreign, row) = (Admin::of(server).await, row(&name));
    // Somebody who knows nothing of tokens or of this library, and makes the row.
    foreign
        .run(&format!(
            "INSERT INTO lockkit_gate VALUES ({row}); START TRANSACTION"
        ))
        .await;
    foreign
        .run(&format!("SELECT 1 FROM lockkit_gate WHERE name={row} FOR UPDATE"))
        .await;
    let lock = client.lock(&name).unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none());
    let waiting = lock.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    eventually("it waits", async || {
        client.inspect(&name).await.unwrap().waiters == Some(1)
    })
    .await;
    foreign.run("ROLLBACK").await;
    let guard = waiter.await.unwrap().unwrap();
    foreign.run("START TRANSACTION").await;
    let skip = format!("SELECT 1 FROM lockkit_gate WHERE name={row} FOR UPDATE SKIP LOCKED");
    assert!(foreign.run(&skip).await.is_empty());
    guard.release().await.unwrap();
    assert_eq!(foreign.run(&skip).await.len(), 1);
    foreign.close().await;
}

async fn a_row_that_was_deleted_is_made_again(flavour: Flavour) {
    let server = shared(flavour);
    let client = connect(config(server.addr())).await.unwrap();
    let name = name("deleted");
    let (mut admin, row) = (Admin::of(server).await, row(&name));
    let lock = client.lock(&name).unwrap();
    let mut last = None;
    for tables in [
        &["lockkit_gate"][..],
        &["lockkit_fence"],
        &["lockkit_gate", "lockkit_fence"],
    ] {
        for waits in [false, true] {
            for _ in 0..3 {
                let guard = lock.acquire().await.unwrap();
                assert!(Some(guard.token()) > last, "{tables:?}");
                last = Some(guard.token());
                guard.release().await.unwrap();
            }
            for table in tables {
                admin.run(&format!("DELETE FROM {table} WHERE name={row}")).await;
            }
            let guard = if waits {
                Some(lock.acquire().await.unwrap())
            } else {
                lock.try_acquire().await.unwrap()
            };
            let guard = guard.expect("it is free");
            assert!(
                Some(guard.token()) > last,
                "{tables:?}: {:?} after {last:?}",
                guard.token()
            );
            last = Some(guard.token());
            guard.release().await.unwrap();
        }
    }
}

async fn a_table_that_is_locked_is_no_answer(flavour: Flavour) {
    let server = private(flavour, &[]);
    let client = connect(config(server.addr())).await.unwrap();
    let lock = client.lock("a").unwrap();
    lock.acquire().await.unwrap().release().await.unwrap();
    let mut admin = Admin::of(&server).await;
    admin.run("LOCK TABLES lockkit_gate WRITE").await;
    // The server says 1205 after two seconds.
    let error = lock.try_acquire().await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let waiting = lock.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!waiter.is_finished());
    admin.run("UNLOCK TABLES").await;
    let guard = timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    guard.unwrap().release().await.unwrap();
}

async fn a_killed_holder_session_is_told_soon(flavour: Flavour) {
    let server = shared(flavour);
    let client = connect(config(server.addr())).await.unwrap();
    let waiting = connect(config(server.addr())).await.unwrap();
    let mut admin = Admin::of(server).await;
    for ttl in [1, 3] {
        let name = name("killed");
        let ttl = Duration::from_secs(ttl);
        let lock = client
            .lock(&name)
            .unwrap()
            .with_options(AcquireOptions::new().ttl(ttl));
        let guard = lock.acquire().await.unwrap();
        let next = waiting.lock(&name).unwrap();
        let waiter = tokio::spawn(async move { (next.acquire().await, Instant::now()) });
        eventually("the next waits", async || {
            client.inspect(&name).await.unwrap().waiters == Some(1)
        })
        .await;
        let row = row(&name);
        let shown = format!(
            "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
             SELECT connection FROM lockkit_holder WHERE name={row}"
        );
        let session = admin.value(&shown).await;
        let killed = Instant::now();
        admin.run(&format!("KILL {session}")).await;
        let reason = timeout(ttl, guard.lost()).await.unwrap();
        let (told, bound) = (killed.elapsed(), ttl / 3 + Duration::from_millis(200));
        assert_eq!(reason, LossReason::Revoked);
        assert!(told < bound, "told after {told:?}, expected within {bound:?}");
        let (granted, at) = waiter.await.unwrap();
        assert!(granted.unwrap().token() > guard.token());
        let took = at.saturating_duration_since(killed);
        assert!(
            took < Duration::from_millis(500),
            "the next was granted after {took:?}"
        );
        assert!(guard.release().await.unwrap_err().is_lost());
    }
}

async fn an_interrupted_wait_goes_on(flavour: Flavour) {
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let server = private(flavour, &[]);
        let mut config = config(server.addr());
        config.mode = mode;
        let (holder, waiting) = (
            connect(config.clone()).await.unwrap(),
            connect(config).await.unwrap(),
        );
        let mut admin = Admin::of(&server).await;
        let guard = holder.lock("a").unwrap().acquire().await.unwrap();
        let lock = waiting.lock("a").unwrap();
        let waiter = tokio::spawn(async move { lock.acquire().await });
        for _ in 0..5 {
            eventually("it waits", async || {
                holder.inspect("a").await.unwrap().waiters == Some(1)
            })
            .await;
            let busy =
                "SELECT ID FROM information_schema.PROCESSLIST WHERE USER='lockkit' AND COMMAND='Query'";
            for row in admin.run(busy).await {
                // It may have gone on by itself.
                let _ = admin.try_run(&format!("KILL QUERY {}", row[0])).await;
            }
        }
        assert!(!waiter.is_finished() && guard.is_held(), "{mode:?}");
        guard.release().await.unwrap();
        let granted = timeout(Duration::from_secs(5), waiter)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        granted.release().await.unwrap();
    }
}

async fn too_many_connections_is_an_error_and_never_taken(flavour: Flavour) {
    let server = private(flavour, &["--max-connections=10"]);
    let client = connect(config(server.addr())).await.unwrap();
    let mut admin = Admin::of(&server).await;
    // Its kept session is ended, so that it needs a new one; then there is no room.
    let kept = *admin.sessions().await.last().unwrap();
    let mut crowd = Vec::new();
    while let Ok(one) = Admin::login(server.addr(), "lockkit", lockkit_testbed::mysql::MySql::PASSWORD).await
    {
        crowd.push(one);
    }
    admin.run(&format!("KILL {kept}")).await;
    eventually("it is gone", async || !admin.sessions().await.contains(&kept)).await;
    while let Ok(one) = Admin::login(server.addr(), "lockkit", lockkit_testbed::mysql::MySql::PASSWORD).await
    {
        crowd.push(one);
    }
    let lock = client.lock("a").unwrap();
    let error = lock.try_acquire().await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    let error = lock
        .acquire_timeout(Duration::from_millis(300))
        .await
        .unwrap_err();
    assert!(
        !error.is_timeout() && format!("{error:?}").contains("1040"),
        "{error:?}"
    );
    // It passes.
    let waiting = lock.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    for one in crowd {
        one.close().await;
    }
    let guard = timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    guard.unwrap().release().await.unwrap();
}

/// After a restart the server counts sessions from the beginning.
async fn a_kill_never_hits_a_stranger(flavour: Flavour) {
    let server = private(flavour, &[]);
    let client = connect(config(server.addr())).await.unwrap();
    let holder = connect(config(server.addr())).await.unwrap();
    let guard = holder.lock("a").unwrap().acquire().await.unwrap();
    let lock = client.lock("a").unwrap();
    let waiter = tokio::spawn(async move { lock.acquire().await });
    eventually("it waits", async || {
        holder.inspect("a").await.unwrap().waiters == Some(1)
    })
    .await;
    server.process().kill().unwrap();
    server.start_again().unwrap();
    // They have the ids that those of before had.
    let mut strangers = Vec::new();
    for _ in 0..40 {
        strangers.push(Admin::of(&server).await);
    }
    waiter.abort();
    drop(guard);
    drop(holder);
    tokio::time::sleep(Duration::from_millis(500)).await;
    for stranger in &mut strangers {
        assert_eq!(
            stranger.value("SELECT 1").await,
            "1",
            "a stranger's session was ended"
        );
    }
}
