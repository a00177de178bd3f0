//! Fencing tokens: after the grant, and above all that were granted before, whatever the server has forgotten.

use std::time::Duration;

use lockkit_core::{FenceGate, LossReason};
use lockkit_testbed::{Clock, Proxy, eventually, postgres::PgServer};
use tokio::time::timeout;

use crate::{
    child::Child,
    servers::{Waiter, brief, client, config, connect, cycle, name, private, session, shared, tests, waits},
};

tests! {
    a_waiters_token_is_drawn_after_its_grant
    tokens_that_rode_on_an_unwritten_record_do_not_come_again
    a_saboteur_shows_that_they_would_come_again
    tokens_rise_over_crashes_of_the_server
    tokens_rise_over_the_crash_of_one_session
    a_clean_restart_goes_on_above
    an_epoch_is_above_what_a_crash_may_have_lost
    tokens_rise_where_a_stopped_primary_comes_back
    tokens_rise_over_a_promotion_of_a_standby_that_lags
    the_fence_is_past_what_a_promoted_standby_lacks
    tokens_go_back_with_the_counter_and_the_clock
    a_holder_killed_in_mid_statement_is_followed_above
    a_restored_database_begins_above
    a_dropped_sequence_goes_on_above
    a_database_restored_in_place_goes_on_above
}

async fn token(client: &lockkit_core::LockClient, name: &str) -> u64 {
    let guard = client.lock(name).unwrap().acquire().await.unwrap();
    let token = guard.token().get();
    guard.release().await.unwrap();
    token
}

async fn a_waiters_token_is_drawn_after_its_grant() {
    let (holder, other) = (client(shared().addr()).await, client(shared().addr()).await);
    for is_shared in [false, true] {
        let name = name("waiter");
        let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
        let lock = other.lock(&name).unwrap();
        let waiter = Waiter::of(if is_shared { lock.shared() } else { lock });
        waits(&holder, &name).await;
        // Others draw meanwhile.
        let drawn = token(&holder, &format!("{name}/b")).await;
        guard.release().await.unwrap();
        let (granted, _) = waiter.granted().await;
        assert!(granted.token().get() > drawn, "it was drawn while it waited");
        granted.release().await.unwrap();
    }
}

/// A server whose log is written late: one transaction draws and stays open, and the tokens of others ride on its record.
fn late() -> PgServer {
    private(&[("wal_writer_delay", "10s")])
}

/// Draws tokens on a record that nobody has written to disk, and has the server crash.
async fn ride(server: &PgServer) -> u64 {
    let client = connect(config(server.addr())).await.unwrap();
    // The record of the last checkpoint, or jump, covers so many draws.
    for _ in 0..40 {
        cycle(&client, "a").await;
    }
    let mut open = session(server);
    open.sql("CHECKPOINT").unwrap();
    open.sql("BEGIN").unwrap();
    open.sql("SELECT nextval('lockkit.token')").unwrap();
    let mut riders = 0;
    for _ in 0..4 {
        riders = token(&client, "a").await;
    }
    server.kill_process(open.pid()).unwrap();
    server.wait_ready().unwrap();
    riders
}

async fn tokens_that_rode_on_an_unwritten_record_do_not_come_again() {
    let server = late();
    let riders = ride(&server).await;
    let after = token(&client(server.addr()).await, "a").await;
    assert!(after > riders, "{after} was granted after {riders}");
}

/// The same crash, and a server that does not notice it: the row that it would have lost is there.
async fn a_saboteur_shows_that_they_would_come_again() {
    let server = late();
    let riders = ride(&server).await;
    let next: u64 = server
        .sql("SELECT nextval('lockkit.token')")
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        next <= riders,
        "{next} is above {riders} by itself: the attack is none"
    );
    assert_eq!(
        server.sql("SELECT count(*) FROM lockkit.epoch").unwrap(),
        "0",
        "the crash leaves no sign"
    );
}

async fn tokens_rise_over_crashes_of_the_server() {
    let server = late();
    let client = client(server.addr()).await;
    let gate = FenceGate::new();
    for round in 0..4 {
        for _ in 0..20 {
            let guard = client.lock("a").unwrap().acquire().await.unwrap();
            gate.admit(guard.token())
                .unwrap_or_else(|stale| panic!("round {round}: {stale}"));
            guard.release().await.unwrap();
        }
        server.kill().unwrap();
        server.start().unwrap();
    }
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    gate.admit(guard.token()).unwrap();
}

async fn tokens_rise_over_the_crash_of_one_session() {
    let server = late();
    let (holding, waiting) = (client(server.addr()).await, client(server.addr()).await);
    for _ in 0..3 {
        let guard = brief(&holding, "a", Duration::from_secs(30))
            .acquire()
            .await
            .unwrap();
        let waiter = Waiter::of(waiting.lock("a").unwrap());
        waits(&holding, "a").await;
        let victim = session(&server);
        server.kill_process(victim.pid()).unwrap();
        let reason = timeout(Duration::from_mins(1), guard.lost()).await.unwrap();
        assert_eq!(
            reason,
            LossReason::Disconnected,
            "all sessions end with one that is killed"
        );
        server.wait_ready().unwrap();
        let (granted, _) = waiter.granted().await;
        assert!(granted.token() > guard.token());
        granted.release().await.unwrap();
    }
}

/// Once for each start, and not for each session.
async fn a_clean_restart_goes_on_above() {
    let server = private(&[]);
    let before = token(&client(server.addr()).await, "a").await;
    server.restart().unwrap();
    let after = token(&client(server.addr()).await, "a").await;
    assert!(after > before + 1_024, "{after} is the next after {before}");
    let next = token(&client(server.addr()).await, "a").await;
    assert_eq!(next, after + 1_024);
    assert_eq!(server.sql("SELECT count(*) FROM lockkit.epoch").unwrap(), "1");
}

/// The counter was ahead of the clock, which is just past the draws that are left of it, and not past those that were lost.
async fn an_epoch_is_above_what_a_crash_may_have_lost() {
    let server = private(&[]);
    token(&client(server.addr()).await, "a").await;
    let left: u64 = server
        .sql(
            "WITH lost AS (DELETE FROM lockkit.epoch) \
             SELECT setval('lockkit.token', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000)",
        )
        .unwrap()
        .parse()
        .unwrap();
    let after = token(&client(server.addr()).await, "a").await;
    assert!(after > left + 1_024 * 100_000, "{after} goes on after {left}");
}

/// It was stopped in order: it has its row of the epoch, and nothing in it says that its standby has granted meanwhile.
async fn tokens_rise_where_a_stopped_primary_comes_back() {
    let primary = private(&[]);
    token(&client(primary.addr()).await, "a").await;
    let standby = PgServer::builder().standby_of(&primary).unwrap();
    standby.wait_caught_up(&primary).unwrap();
    primary.stop().unwrap();
    standby.promote().unwrap();
    let last = token(&client(standby.addr()).await, "a").await;
    standby.stop().unwrap();
    primary.start().unwrap();
    let kept: u64 = primary
        .sql("SELECT last_value FROM lockkit.token")
        .unwrap()
        .parse()
        .unwrap();
    assert!(kept < last, "it is not behind: {kept}, {last}");
    assert_eq!(primary.sql("SELECT count(*) FROM lockkit.epoch").unwrap(), "1");
    let back = client(primary.addr()).await;
    let fence = back.fence().await.unwrap().get();
    assert!(fence >= last, "{fence}, and {last} was granted");
    let after = token(&back, "a").await;
    assert!(after > last, "{after} was granted after {last}");
}

async fn tokens_rise_over_a_promotion_of_a_standby_that_lags() {
    let primary = private(&[]);
    let client = client(primary.addr()).await;
    let mut last = token(&client, "a").await;
    let standby = PgServer::builder().standby_of(&primary).unwrap();
    standby.wait_caught_up(&primary).unwrap();
    standby.lag().unwrap();
    for _ in 0..100 {
        last = token(&client, "a").await;
    }
    primary.kill().unwrap();
    standby.promote().unwrap();
    let lagging: u64 = standby
        .sql("SELECT last_value FROM lockkit.token")
        .unwrap()
        .parse()
        .unwrap();
    assert!(lagging < last, "it did not lag: {lagging}, {last}");
    let promoted = crate::servers::client(standby.addr()).await;
    assert!(token(&promoted, "a").await > last);
}

/// A client of before asks the standby before anybody draws a token there.
async fn the_fence_is_past_what_a_promoted_standby_lacks() {
    let primary = private(&[]);
    let proxy = Proxy::start(primary.addr()).unwrap();
    let client = client(proxy.addr()).await;
    token(&client, "a").await;
    let standby = PgServer::builder().standby_of(&primary).unwrap();
    standby.wait_caught_up(&primary).unwrap();
    standby.lag().unwrap();
    let mut last = 0;
    for _ in 0..100 {
        last = token(&client, "a").await;
    }
    primary.kill().unwrap();
    standby.promote().unwrap();
    proxy.set_upstream(standby.addr());
    proxy.reset();
    let mut fence = client.fence().await;
    while fence.as_ref().is_err_and(lockkit_core::Error::is_transient) {
        fence = client.fence().await;
    }
    let fence = fence.unwrap().get();
    assert!(fence >= last, "{fence}, and {last} was granted");
    assert!(token(&client, "a").await > last);
}

/// Both are lost: the counter with a standby that lags, the time with its clock. Nothing at the server knows better then.
async fn tokens_go_back_with_the_counter_and_the_clock() {
    let clock = Clock::new().unwrap();
    let primary = PgServer::builder().start().unwrap();
    let client = client(primary.addr()).await;
    token(&client, "a").await;
    let standby = PgServer::builder().clock(&clock).standby_of(&primary).unwrap();
    standby.wait_caught_up(&primary).unwrap();
    standby.lag().unwrap();
    // A counter that was drawn from for years, or was ahead of the clock.
    primary
        .sql("SELECT setval('lockkit.token', last_value + 3000::bigint * 1000000000) FROM lockkit.token")
        .unwrap();
    let last = token(&client, "a").await;
    clock.back(Duration::from_secs(3_600)).unwrap();
    primary.kill().unwrap();
    standby.promote().unwrap();
    let promoted = crate::servers::client(standby.addr()).await;
    assert!(token(&promoted, "a").await < last, "it is known to fail");
}

async fn a_holder_killed_in_mid_statement_is_followed_above() {
    let server = shared();
    let client = client(server.addr()).await;
    for _ in 0..5 {
        let name = name("killed");
        let guard = client.lock(&name).unwrap().acquire().await.unwrap();
        let (mut child, _output) = Child::start(server.addr(), &name, Duration::from_secs(30));
        waits(&client, &name).await;
        let (released, killed) = tokio::join!(guard.release(), async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..500))).await;
            child.kill()
        });
        released.unwrap();
        killed.unwrap();
        let drawn: u64 = server
            .sql("SELECT last_value FROM lockkit.token")
            .unwrap()
            .parse()
            .unwrap();
        let (next, _) = Waiter::of(client.lock(&name).unwrap()).granted().await;
        assert!(next.token().get() > drawn);
    }
}

/// A copy of a database of this server has the old counter and the row of the epoch, and is another database.
async fn a_restored_database_begins_above() {
    let server = private(&[]);
    let before = token(&client(server.addr()).await, "a").await;
    let mut admin = server.session_in("postgres").unwrap();
    eventually("nobody is connected", async || {
        admin
            .sql(&format!("CREATE DATABASE copy TEMPLATE {}", PgServer::DATABASE))
            .is_ok()
    })
    .await;
    let mut copied = server.session_in("copy").unwrap();
    assert_eq!(copied.sql("SELECT count(*) FROM lockkit.epoch").unwrap(), "1");
    let url = server.url();
    let (server_url, _) = url.rsplit_once('/').unwrap();
    let url = format!("{server_url}/copy");
    let copy = connect(lockkit_postgres::PostgresConfig::new(url)).await.unwrap();
    let after = token(&copy, "a").await;
    assert!(after > before + 1_024 * 1_000, "{after} goes on after {before}");
    assert_eq!(
        copied.sql("SELECT count(*) FROM lockkit.epoch").unwrap(),
        "1",
        "what is of no use is gone"
    );
}

async fn a_dropped_sequence_goes_on_above() {
    let server = private(&[]);
    let before = token(&client(server.addr()).await, "a").await;
    server.sql("DROP SEQUENCE lockkit.token").unwrap();
    let after = token(&client(server.addr()).await, "a").await;
    assert!(after > before, "{after} after {before}");
}

/// A dump of the whole database, restored into it.
async fn a_database_restored_in_place_goes_on_above() {
    let server = private(&[]);
    let old = token(&client(server.addr()).await, "a").await;
    let programs = lockkit_testbed::postgres::programs().unwrap();
    let dump = server.directory().join("dump");
    let run = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(programs.join(program))
            .args(args)
            .args([
                "-h",
                "127.0.0.1",
                "-p",
                &server.addr().port().to_string(),
                "-U",
                "postgres",
            ])
            .env("PGPASSWORD", PgServer::PASSWORD)
            .output()
            .unwrap();
        eprintln!(
            "{program}: {} {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    };
    run(
        "pg_dump",
        &["-Fc", "-f", dump.to_str().unwrap(), PgServer::DATABASE],
    );
    let mut before = old;
    for _ in 0..20 {
        before = token(&client(server.addr()).await, "a").await;
    }
    run(
        "pg_restore",
        &["--clean", "-d", PgServer::DATABASE, dump.to_str().unwrap()],
    );
    let after = token(&client(server.addr()).await, "a").await;
    assert!(after > before, "{after} after {before} (at the dump: {old})");
}
