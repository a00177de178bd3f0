//! Settings of sessions that are used again, and of a server, which may change under them.

use std::{net::SocketAddr, time::Duration};

use futures_util::future::join;
use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{AcquireOptions, Error, LockClient, LockGuard, LossReason, spi::chain};
use lockkit_mysql::{Mode, MySqlConfig};
use lockkit_testbed::{
    Proxy, eventually,
    mysql::{Flavour, MySql},
};
use tokio::time::{Instant, sleep};

use crate::{
    mixed::polled,
    servers::{
        Admin, HeldBack, MODES, Waiter, client, config, connect, cycle, for_each_flavour, hold_back, listed,
        private, waits,
    },
    tokens::seed,
};

for_each_flavour! {
    a_cancelled_ttl_stays_with_no_session
    a_primary_that_is_demoted_grants_nothing
    a_waiter_outlasts_a_demotion_and_is_not_granted_in_it
    a_demotion_that_is_taken_back_ends_no_lease
    a_lease_released_before_a_fail_over_is_free_after_it
    a_demoted_primary_breaks_no_lease
    a_demotion_while_tables_are_made_leaves_nothing_half
    a_demoted_primary_shows_nothing
    a_lease_that_the_server_shortens_is_refused
    a_longer_ttl_counts_as_the_server_keeps_it
    a_server_that_comes_back_with_short_time_outs
    a_server_that_comes_back_read_only
    a_server_that_comes_back_with_few_connections
    a_server_that_ends_statements_early_is_not_kept_busy
    a_server_that_ends_statements_early_ends_no_inspection
    a_statement_based_binary_log_is_an_error
    settings_that_sessions_begin_with_do_not_count
    a_server_whose_clock_no_user_may_set_is_as_good
}

fn lasting(ttl: Duration) -> AcquireOptions {
    AcquireOptions::new().ttl(ttl).op_timeout(Duration::from_secs(1))
}

/// A session is used again by holds with other leases, and acquisitions are dropped at every poll.
async fn a_cancelled_ttl_stays_with_no_session(flavour: Flavour) {
    const SHORT: Duration = Duration::from_secs(2);
    const LONG: Duration = Duration::from_mins(1);

    let mut rng = fastrand::Rng::with_seed(seed());
    let server = private(flavour, &[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let mixed = client(proxy.addr(), Mode::ForUpdate).await;
    let other = client(server.addr(), Mode::ForUpdate).await;
    let mut holds = Vec::new();
    for index in 0..48 {
        // Each leaves its session to the next, and the last to a hold.
        for step in 0..rng.usize(2..5) {
            let ttl = if rng.bool() { SHORT } else { LONG };
            let lock = mixed.lock("churn").unwrap().with_options(lasting(ttl));
            let polls = if step == 0 { u32::MAX } else { rng.u32(1..4) };
            if let Some(granted) = polled(polls, lock.acquire()).await {
                granted.unwrap().release().await.unwrap();
            }
            sleep(Duration::from_millis(rng.u64(0..10))).await;
        }
        let ttl = if rng.bool() { SHORT } else { LONG };
        let lock = mixed.lock(format!("hold/{index}")).unwrap();
        holds.push((ttl, lock.acquire_with(&lasting(ttl)).await.unwrap()));
    }
    // From here on the client is as good as dead.
    proxy.set(lockkit_testbed::Mode::Blackhole);
    let silent = Instant::now();
    for (ttl, guard) in &holds {
        if *ttl == SHORT {
            let next = timeout(SHORT * 3, other.lock(guard.name()).unwrap().acquire()).await;
            let next = next.unwrap_or_else(|_| panic!("a hold of {ttl:?} outlasts {:?}", silent.elapsed()));
            next.unwrap().release().await.unwrap();
        }
    }
    sleep((SHORT * 2).saturating_sub(silent.elapsed())).await;
    for (ttl, guard) in &holds {
        if *ttl == LONG {
            let next = other.lock(guard.name()).unwrap().try_acquire().await.unwrap();
            assert!(
                next.is_none(),
                "a hold of {ttl:?} is another's after {:?}, and is_held() is {}",
                silent.elapsed(),
                guard.is_held()
            );
        }
    }
}

/// The account of the locks, and one that may write to a read-only server.
fn accounts(server: &MySql) -> [MySqlConfig; 2] {
    accounts_at(server.addr())
}

pub(crate) fn accounts_at(addr: SocketAddr) -> [MySqlConfig; 2] {
    let root = format!("mysql://root@{addr}/{}", MySql::DATABASE);
    [config(addr), MySqlConfig::new(root)]
}

fn read_only(flavour: Flavour) -> &'static [&'static str] {
    match flavour {
        Flavour::MariaDb => &["read_only"],
        Flavour::MySql => &["read_only", "super_read_only"],
    }
}

/// Grants nothing, and says why once the server has answered in time.
async fn refuses(client: &LockClient, name: &str) {
    let lock = client.lock(name).unwrap();
    eventually("it says why", async || {
        let tried = lock.try_acquire().await.map(|granted| granted.is_some());
        let waited = lock.acquire_timeout(Duration::from_secs(1)).await.map(|_| true);
        let says_why = [tried, waited].map(|answer| {
            let error = match answer {
                Err(error) => error,
                Ok(granted) => panic!("{name}: a read-only server said granted={granted}"),
            };
            let text = chain(&error);
            let says_why = text.contains("read_only") || text.contains("read-only");
            assert!(
                error.is_transient() && (says_why || text.contains("no answer in time")),
                "{name}: {error:?}"
            );
            says_why
        });
        says_why == [true; 2]
    })
    .await;
}

/// A planned switch-over begins with this. Connections stay.
async fn a_primary_that_is_demoted_grants_nothing(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let ttl = Duration::from_secs(3);
    for (mut config, mode) in MODES
        .iter()
        .flat_map(|mode| accounts(&server).map(|config| (config, *mode)))
    {
        config.mode = mode;
        for setting in read_only(flavour) {
            let client = connect(config.clone()).await.unwrap();
            let newcomer = connect(config.clone()).await.unwrap();
            for name in ["known", "held"] {
                cycle(&client, name).await;
            }
            let guard = client
                .lock("held")
                .unwrap()
                .acquire_with(&lasting(ttl))
                .await
                .unwrap();
            let valid = guard.valid_until().unwrap();
            admin.run(&format!("SET GLOBAL {setting}=1")).await;
            let demoted = Stopwatch::start();
            let told = async {
                let reason = timeout(ttl * 2, guard.lost()).await;
                (reason, demoted.elapsed())
            };
            // What a client has locked before makes no difference.
            let refused = async {
                for (client, name) in [(&client, "known"), (&client, "new"), (&newcomer, "known")] {
                    refuses(client, name).await;
                }
            };
            let ((reason, told), ()) = join(told, refused).await;
            let reason = reason.unwrap_or_else(|_| panic!("{mode:?} {setting}: it holds on after {told:?}"));
            if mode == Mode::ForUpdate {
                // Its next renewal asks.
                assert_eq!(reason, LossReason::Revoked);
                assert!(told < ttl / 3 + Duration::from_secs(1), "told after {told:?}");
            } else {
                // Nobody else is granted before its lease is over: the row says so, also on a replica.
                assert_eq!(reason, LossReason::Expired);
                // The last renewal may have come just before.
                let end = guard.valid_until().unwrap();
                assert!(end < valid + ttl / 2, "prolonged by {:?}", end - valid);
            }
            admin
                .run(&format!("SET GLOBAL {setting}=0; SET GLOBAL read_only=0"))
                .await;
            eventually("it is granted again", async || {
                client
                    .lock("held")
                    .unwrap()
                    .try_acquire()
                    .await
                    .is_ok_and(|granted| granted.is_some())
            })
            .await;
        }
    }
}

/// They may get the row long after they asked for it.
async fn a_waiter_outlasts_a_demotion_and_is_not_granted_in_it(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for (mut config, mode) in MODES
        .iter()
        .flat_map(|mode| accounts(&server).map(|config| (config, *mode)))
    {
        config.mode = mode;
        let [holder, waiting] = [
            connect(config.clone()).await.unwrap(),
            connect(config.clone()).await.unwrap(),
        ];
        let guard = holder
            .lock("a")
            .unwrap()
            .acquire_with(&lasting(Duration::from_secs(2)))
            .await
            .unwrap();
        let lock = waiting.lock("a").unwrap();
        let mut waiter = tokio::spawn(async move { lock.acquire().await });
        waits(&holder, "a").await;
        // The server may delay it while somebody waits for a row.
        let asked = Instant::now();
        let mut demoting = Admin::of(&server).await;
        let demoting = tokio::spawn(async move { demoting.run("SET GLOBAL read_only=1").await });
        eventually("it is asked", async || {
            demoting.is_finished() || asked.elapsed() > Duration::from_millis(300)
        })
        .await;
        let put_off = !demoting.is_finished();
        let _ = guard.release().await;
        timeout(Duration::from_secs(40), demoting).await.unwrap().unwrap();
        let early = timeout(Duration::from_secs(2), &mut waiter).await;
        eprintln!(
            "{flavour:?} {mode:?}: demoted after {:?}, put off: {put_off}, {early:?}",
            asked.elapsed()
        );
        let is_granted = match early.map(Result::unwrap) {
            // It was granted before, and is told like any holder.
            Ok(Ok(guard)) if put_off => {
                timeout(Duration::from_secs(31), guard.lost()).await.unwrap();
                true
            }
            Ok(outcome) => panic!("{mode:?}: by a read-only server: {outcome:?}"),
            Err(_) => false,
        };
        admin.run("SET GLOBAL read_only=0").await;
        if !is_granted {
            let granted = timeout(Duration::from_secs(20), waiter).await.unwrap().unwrap();
            granted.unwrap().release().await.unwrap();
        }
        eventually("it is granted again", async || {
            holder
                .lock("a")
                .unwrap()
                .try_acquire()
                .await
                .is_ok_and(|granted| granted.is_some())
        })
        .await;
    }
}

/// The read of why a lease could not be changed, by an account that may write all the same.
const READ_STATE: &str = "SELECT (SELECT CASE WHEN owner=";

/// A client, and another one whose first read of why a lease could not be changed is held back.
async fn held_back(server: &MySql) -> (LockClient, LockClient, HeldBack) {
    let (addr, read) = hold_back(server.addr(), READ_STATE).await.unwrap();
    let mut config = accounts_at(addr)[1].clone();
    config.mode = Mode::Lease;
    let other = client(server.addr(), Mode::Lease).await;
    cycle(&other, "n").await;
    (other, connect(config).await.unwrap(), read)
}

/// Between a request that has changed nothing and the read of the reason.
async fn a_demotion_that_is_taken_back_ends_no_lease(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for step in ["try", "renew", "release"] {
        let (other, client, mut why) = held_back(&server).await;
        let lock = client.lock("n").unwrap();
        let held = match step {
            "try" => None,
            _ => Some(lock.acquire().await.unwrap()),
        };
        admin.run("SET GLOBAL read_only=1").await;
        let asking = tokio::spawn(async move {
            match held {
                None => lock.try_acquire().await.map(|tried| tried.expect("it is free")),
                Some(guard) if step == "renew" => guard.renew().await.map(|()| guard),
                Some(guard) => {
                    guard.release().await?;
                    lock.acquire().await
                }
            }
        });
        why.came().await;
        admin.run("SET GLOBAL read_only=0").await;
        drop(why.deliver());
        let guard = timeout(Duration::from_secs(10), asking).await.unwrap().unwrap();
        let guard = guard.unwrap_or_else(|error| panic!("{step}: {}", chain(&error)));
        assert!(guard.is_held(), "{step}");
        guard.release().await.unwrap();
        cycle(&other, "n").await;
    }
}

/// The old primary took no more writes, and ended its connections before it had said so.
async fn a_lease_released_before_a_fail_over_is_free_after_it(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let (other, holder, mut why) = held_back(&server).await;
    let guard = holder.lock("n").unwrap().acquire().await.unwrap();
    admin.run("SET GLOBAL read_only=1").await;
    let releasing = tokio::spawn(guard.release());
    why.came().await;
    why.cut_off();
    let error = releasing.await.unwrap().expect_err("nobody knows");
    assert!(!error.is_lost(), "{error}");
    admin.run("SET GLOBAL read_only=0").await;
    eventually("it is let go of", async || {
        let tried = other.lock("n").unwrap().try_acquire().await;
        tried.unwrap().is_some()
    })
    .await;
}

/// Its row does not count any more, and a write of its own would part it from the new primary.
async fn a_demoted_primary_breaks_no_lease(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for mut config in accounts(&server) {
        config.mode = Mode::Lease;
        let client = connect(config).await.unwrap();
        let guard = client.lock("n").unwrap().acquire().await.unwrap();
        admin.run("SET GLOBAL read_only=1").await;
        let broken = client.revoke_by_force("n", guard.token()).await;
        let text = chain(&broken.expect_err("it takes no writes"));
        assert!(text.contains("read_only") || text.contains("read-only"), "{text}");
        admin.run("SET GLOBAL read_only=0").await;
        guard.renew().await.unwrap();
        assert!(client.revoke_by_force("n", guard.token()).await.unwrap());
        assert!(!client.revoke_by_force("n", guard.token()).await.unwrap());
    }
}

/// By the first acquisition of all.
async fn a_demotion_while_tables_are_made_leaves_nothing_half(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for (make, mode) in [
        ("EXISTS lockkit_map", Mode::ForUpdate),
        ("EXISTS lockkit_permit", Mode::ForUpdate),
        ("EXISTS lockkit_gate", Mode::ForUpdate),
        ("EXISTS lockkit_lease", Mode::Lease),
    ] {
        let (addr, mut making) = hold_back(server.addr(), make).await.unwrap();
        let (client, observer) = (client(addr, mode).await, client(server.addr(), mode).await);
        let lock = client.lock("a").unwrap();
        let trying = tokio::spawn(async move { lock.try_acquire().await });
        making.came().await;
        admin.run("SET GLOBAL read_only=1").await;
        drop(making.deliver());
        let error = timeout(Duration::from_secs(20), trying).await.unwrap().unwrap();
        let error = error.expect_err("it takes no writes");
        assert!(error.is_transient(), "{make}: {error:?}");
        admin.run("SET GLOBAL read_only=0").await;
        // Some tables are there.
        assert!(observer.inspect("a").await.unwrap().is_free(), "{make}");
        assert!(observer.list("").unwrap().next().await.is_none(), "{make}");
        assert!(observer.fence().await.unwrap().get() > 0, "{make}");
        cycle(&observer, "a").await;
        cycle(&client, "a").await;
        let tables =
            "SELECT GROUP_CONCAT(TABLE_NAME) FROM information_schema.TABLES WHERE TABLE_SCHEMA=DATABASE()";
        let tables = admin.value(tables).await;
        admin.run(&format!("DROP TABLE {tables}")).await;
    }
}

/// What is held by now is held at another server.
async fn a_demoted_primary_shows_nothing(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let (holder, other) = (
            client(server.addr(), mode).await,
            client(server.addr(), mode).await,
        );
        let guard = holder.lock("n").unwrap().acquire().await.unwrap();
        // Both connections are open by then.
        assert_eq!(listed(&other).await.unwrap(), ["n"], "{mode:?}");
        assert!(!other.inspect("n").await.unwrap().is_free(), "{mode:?}");
        admin.run("SET GLOBAL read_only=1").await;
        for (what, shown) in [
            ("list", listed(&other).await.err()),
            ("list over a new connection", listed(&other).await.err()),
            ("inspect", other.inspect("n").await.err()),
        ] {
            let error = shown.unwrap_or_else(|| panic!("{mode:?}: {what}"));
            assert!(error.is_transient(), "{mode:?}, {what}: {error:?}");
            let text = chain(&error);
            assert!(
                text.contains("read_only") || text.contains("read-only"),
                "{mode:?}: {text}"
            );
        }
        admin.run("SET GLOBAL read_only=0").await;
        assert_eq!(listed(&other).await.unwrap(), ["n"], "{mode:?}");
        assert!(!other.inspect("n").await.unwrap().is_free(), "{mode:?}");
        guard.release().await.unwrap();
    }
}

/// Another server in the old one's place, with these settings.
async fn replaced(flavour: Flavour, mode: Mode, options: &[&str]) -> (Proxy, LockClient, MySql, MySql) {
    let old = private(flavour, &[]);
    let new = private(flavour, options);
    // The tables are there, as on a server that was restarted.
    Admin::login(new.addr(), "root", "")
        .await
        .unwrap()
        .run(&lockkit_mysql::ddl(mode))
        .await;
    let proxy = Proxy::start(old.addr()).unwrap();
    let client = client(proxy.addr(), mode).await;
    (proxy, client, old, new)
}

/// The server shortens each session's `wait_timeout` to its maximum.
async fn a_lease_that_the_server_shortens_is_refused(flavour: Flavour) {
    let server = private(flavour, &["--maximum-wait-timeout=61"]);
    let mut config = config(server.addr());
    config.max_connections = 1;
    let client = connect(config).await.unwrap();
    cycle(&client, "a").await;
    let options = AcquireOptions::new().ttl(Duration::from_mins(2));
    let lock = client.lock("a").unwrap().with_options(options);
    let refused = lock.try_acquire().await.unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
    cycle(&client, "a").await;
}

/// It shortens another ttl of a live hold in the same way, and does not say so.
async fn a_longer_ttl_counts_as_the_server_keeps_it(flavour: Flavour) {
    const KEPT: Duration = Duration::from_secs(61);

    let server = private(flavour, &["--maximum-wait-timeout=61"]);
    let client = client(server.addr(), Mode::ForUpdate).await;
    let options = lasting(Duration::from_secs(30));
    let guard = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
    for ttl in [
        Duration::from_mins(10),
        Duration::from_secs(20),
        Duration::from_hours(1),
    ] {
        guard.set_ttl(ttl).await.unwrap();
        let expected = ttl.min(KEPT);
        let length = guard.lease_length().unwrap();
        assert!(
            length <= expected && length > expected.mul_f64(0.95),
            "{length:?} of {ttl:?}, of which the server keeps {expected:?}"
        );
        guard.renew().await.unwrap();
        assert!(guard.lease_length() <= Some(expected), "a renewal");
        eventually("it is shown", async || {
            let state = client.inspect("a").await.unwrap();
            let left = state.holders.first().and_then(|holder| holder.left);
            left.is_some_and(|left| left <= expected && left + Duration::from_secs(5) > expected)
        })
        .await;
    }
    guard.release().await.unwrap();
    cycle(&client, "a").await;
}

/// A lock's session sets its own time-outs.
async fn a_server_that_comes_back_with_short_time_outs(flavour: Flavour) {
    for mode in MODES {
        let options = ["--wait-timeout=1", "--interactive-timeout=1"];
        let (proxy, client, old, new) = replaced(flavour, mode, &options).await;
        cycle(&client, "a").await;
        proxy.set_upstream(new.addr());
        old.process().kill().unwrap();
        let options = lasting(Duration::from_secs(30)).renew(false);
        let lock = client.lock("a").unwrap().with_options(options);
        let guard = timeout(Duration::from_secs(20), lock.acquire())
            .await
            .unwrap()
            .unwrap();
        let other = connect({
            let mut config = config(new.addr());
            config.mode = mode;
            config
        })
        .await
        .unwrap();
        sleep(Duration::from_millis(2_500)).await;
        let taken = other.lock("a").unwrap().try_acquire().await.unwrap().is_none();
        assert!(taken && guard.is_held(), "{mode:?}");
        guard.release().await.unwrap();
        cycle(&other, "a").await;
    }
}

async fn a_server_that_comes_back_read_only(flavour: Flavour) {
    for mode in MODES {
        let (proxy, client, old, new) = replaced(flavour, mode, &[]).await;
        Admin::of(&new).await.run("SET GLOBAL read_only=1").await;
        let ttl = Duration::from_secs(3);
        let guard = client
            .lock("held")
            .unwrap()
            .acquire_with(&lasting(ttl))
            .await
            .unwrap();
        cycle(&client, "a").await;
        proxy.set_upstream(new.addr());
        old.process().kill().unwrap();
        let lock = client.lock("a").unwrap();
        eventually("it is refused", async || match lock.try_acquire().await {
            Ok(granted) => panic!("{mode:?}: {granted:?}"),
            Err(error) => {
                assert!(error.is_transient(), "{mode:?}: {error:?}");
                chain(&error).contains("read_only")
            }
        })
        .await;
        timeout(ttl * 2, guard.lost()).await.expect("nobody prolongs it");
    }
}

/// Fewer than there are clients: a transient error, and no other client's hold is lost.
async fn a_server_that_comes_back_with_few_connections(flavour: Flavour) {
    for mode in MODES {
        let (proxy, client, old, new) = replaced(flavour, mode, &["--max-connections=10"]).await;
        cycle(&client, "a").await;
        let mut crowd = Vec::new();
        while let Ok(one) = Admin::login(new.addr(), "lockkit", MySql::PASSWORD).await {
            crowd.push(one);
        }
        proxy.set_upstream(new.addr());
        old.process().kill().unwrap();
        proxy.reset();
        let lock = client.lock("a").unwrap();
        eventually("there is no room", async || match lock.try_acquire().await {
            Err(error) => {
                assert!(error.is_transient(), "{mode:?}: {}", chain(&error));
                chain(&error).contains("1040")
            }
            Ok(granted) => panic!("{mode:?}: {granted:?}"),
        })
        .await;
        let waiter = Waiter::of(lock);
        for one in crowd {
            one.close().await;
        }
        waiter.granted().await.0.release().await.unwrap();
    }
}

/// The statement of the disconnect watch lasts for seconds.
async fn a_server_that_ends_statements_early_is_not_kept_busy(flavour: Flavour) {
    let limit = match flavour {
        Flavour::MariaDb => "--max-statement-time=0.1",
        Flavour::MySql => "--max-execution-time=100",
    };
    let server = private(flavour, &[limit]);
    let mut admin = Admin::of(&server).await;
    let client = client(server.addr(), Mode::ForUpdate).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    // What the grant needs comes first, however long that takes. A watch that ends again and again goes on for good.
    eventually(
        "two seconds with less than 10 requests of an idle hold",
        async || {
            let mut asked = Vec::new();
            for _ in 0..2 {
                let questions = admin.run("SHOW GLOBAL STATUS LIKE 'Questions'").await;
                asked.push(questions[0][1].parse::<u64>().unwrap());
                sleep(Duration::from_secs(2)).await;
            }
            asked[1] - asked[0] < 10
        },
    )
    .await;
    assert!(guard.is_held());
}

/// An inspection of a free lock takes a tenth of a second.
async fn a_server_that_ends_statements_early_ends_no_inspection(flavour: Flavour) {
    let limit = match flavour {
        Flavour::MariaDb => "SET GLOBAL max_statement_time=0.001",
        Flavour::MySql => "SET GLOBAL max_execution_time=1",
    };
    let server = private(flavour, &[]);
    Admin::of(&server).await.run(limit).await;
    for mode in MODES {
        let client = client(server.addr(), mode).await;
        for _ in 0..3 {
            cycle(&client, "a").await;
            let state = client.inspect("a").await.unwrap();
            assert!(state.holders.is_empty(), "{state:?}");
        }
    }
}

/// The row that numbers the lives of the server has the empty name.
#[test]
fn an_empty_string_that_is_null_names_a_row() {
    crate::servers::run(Flavour::MariaDb, |flavour| async move {
        let server = private(flavour, &["--sql-mode=EMPTY_STRING_IS_NULL"]);
        let client = connect(config(server.addr())).await.unwrap();
        cycle(&client, "a").await;
    });
}

/// Sessions are `READ COMMITTED`, whose changes no server writes to such a log.
async fn a_statement_based_binary_log_is_an_error(flavour: Flavour) {
    for format in ["ROW", "MIXED", "STATEMENT"] {
        let server = private(
            flavour,
            &[
                "--log-bin=binlog",
                "--server-id=1",
                &format!("--binlog-format={format}"),
            ],
        );
        for mode in MODES {
            let mut config = config(server.addr());
            config.mode = mode;
            let cycle = async {
                let client = connect(config).await?;
                client.lock("a")?.acquire().await?.release().await
            };
            match cycle.await {
                Ok(()) => assert_ne!(format, "STATEMENT", "{mode:?}"),
                Err(error) => {
                    assert_eq!(format, "STATEMENT", "{mode:?}: {}", chain(&error));
                    assert!(
                        !error.is_transient() && chain(&error).contains("1665"),
                        "{}",
                        chain(&error)
                    );
                }
            }
        }
    }
}

/// An operator may set them for all sessions, each at its worst: a clock that stands still, results without rows, …
/// MariaDB can keep its users from setting the clock of a session, but not from going back to the server's.
async fn a_server_whose_clock_no_user_may_set_is_as_good(flavour: Flavour) {
    for barred in ["YES", "REPLICATION", "SUPER"] {
        let server = match flavour {
            Flavour::MariaDb => private(flavour, &[&format!("--secure-timestamp={barred}")]),
            Flavour::MySql => private(flavour, &[]),
        };
        for mode in MODES {
            cycle(&client(server.addr(), mode).await, "a").await;
        }
        if flavour == Flavour::MySql {
            return;
        }
    }
}

async fn settings_that_sessions_begin_with_do_not_count(flavour: Flavour) {
    let by_flavour: &[&str] = match flavour {
        Flavour::MariaDb => &[
            "max_statement_time=0.5",
            "idle_transaction_timeout=1",
            "tx_isolation='SERIALIZABLE'",
            "sql_mode='ORACLE'",
            "tx_read_only=1",
        ],
        Flavour::MySql => &[
            "max_execution_time=500",
            "transaction_isolation='SERIALIZABLE'",
            "transaction_read_only=1",
        ],
    };
    let by_both = [
        "timestamp=1000000000",
        "sql_select_limit=0",
        "sql_safe_updates=1",
        "sql_big_selects=0, max_join_size=1",
        "sql_mode='ANSI,PAD_CHAR_TO_FULL_LENGTH,NO_BACKSLASH_ESCAPES,NO_UNSIGNED_SUBTRACTION'",
        "autocommit=0",
        "completion_type='RELEASE'",
        "innodb_lock_wait_timeout=1",
        "lock_wait_timeout=1",
        "wait_timeout=1",
        "time_zone='+05:45'",
        "div_precision_increment=0",
        "character_set_client='latin1', character_set_connection='latin1', character_set_results='latin1'",
    ];
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for setting in by_both.iter().chain(by_flavour) {
        let setting = setting.replace('\'', "''");
        admin
            .run(&format!("SET GLOBAL init_connect='SET {setting}'"))
            .await;
        let mut begun = Vec::new();
        for mode in MODES {
            let (holder, waiter) = (
                client(server.addr(), mode).await,
                client(server.addr(), mode).await,
            );
            // Its session is used again.
            cycle(&waiter, &format!("{setting} before")).await;
            let held = holder.lock(format!("{setting} ü")).unwrap().acquire().await;
            let held = held.unwrap_or_else(|error| panic!("{mode:?} {setting}: {}", chain(&error)));
            begun.push((mode, held, holder, waiter));
        }
        admin.run("SET GLOBAL init_connect=''").await;
        let at_once = begun.into_iter().map(|(mode, held, holder, waiter)| {
            let what = format!("{mode:?} {setting}");
            let addr = server.addr();
            async move { is_as_ever(&client(addr, mode).await, held, (holder, waiter), &what).await }
        });
        futures_util::future::join_all(at_once).await;
    }
}

/// A holder keeps its lock, also from a client without the setting, and a waiter waits for longer than a second.
async fn is_as_ever(
    other: &LockClient,
    held: LockGuard,
    (holder, waiter): (LockClient, LockClient),
    what: &str,
) {
    let name = held.name().as_str().to_owned();
    let tried = other.lock(&name).unwrap().try_acquire().await;
    let tried = tried.unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
    assert!(tried.is_none(), "PROMISE BROKEN: {what}: two hold it");
    let waiting = Waiter::of(waiter.lock(&name).unwrap());
    waits(&holder, &name).await;
    sleep(Duration::from_millis(1_200)).await;
    assert!(!waiting.is_finished() && held.is_held(), "{what}");
    let token = held.token();
    held.release().await.unwrap();
    let next = waiting.granted().await.0;
    assert!(next.token() > token, "{what}");
    next.release().await.unwrap();
}
