//! Servers of PostgreSQL, and PgBouncer.

use std::{fs, io, net::TcpStream, process::Command, sync::Arc, time::Duration};

use lockkit_testbed::{
    Certificates, Clock,
    postgres::{self, PgBouncer, PgServer, PoolMode},
    skipped,
};

use crate::until::until;

fn no_postgres() -> bool {
    skipped("postgres", postgres::missing())
}

fn no_bouncer() -> bool {
    no_postgres() || skipped("pgbouncer", postgres::missing_bouncer())
}

/// Runs SQL by `psql`, as a client does that is not the superuser.
fn psql(url: &str, statements: &[&str]) -> io::Result<String> {
    let mut psql = Command::new(postgres::programs()?.join("psql"));
    psql.args(["-XAtq", "-v", "ON_ERROR_STOP=1"]);
    for statement in statements {
        psql.args(["-c", statement]);
    }
    let output = psql.arg(url).env("PGCONNECT_TIMEOUT", "10").output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned());
    }
    Err(io::Error::other(
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

#[test]
fn it_dies_and_comes_up_again_with_its_data() {
    if no_postgres() {
        return;
    }
    let server = PgServer::plain().unwrap();
    let addr = server.addr();
    let owner = psql(
        &server.url(),
        &["SELECT current_user || ' ' || usesuper FROM pg_user WHERE usename = current_user"],
    );
    assert_eq!(owner.unwrap(), "lockkit false");
    assert_eq!(
        psql(&server.socket_url(), &["SELECT inet_client_addr() IS NULL"]).unwrap(),
        "t"
    );
    let wrong = server.url().replace(PgServer::PASSWORD, "wrong");
    assert!(
        psql(&wrong, &["SELECT 1"])
            .unwrap_err()
            .to_string()
            .contains("password")
    );

    psql(
        &server.url(),
        &["CREATE TABLE kept (value int)", "INSERT INTO kept VALUES (7)"],
    )
    .unwrap();
    psql(
        &server.url(),
        &[
            "CREATE UNLOGGED TABLE lost (value int)",
            "INSERT INTO lost VALUES (7)",
        ],
    )
    .unwrap();
    server.restart().unwrap();
    assert_eq!(
        server
            .sql("SELECT kept.value, lost.value FROM kept, lost")
            .unwrap(),
        "7|7",
        "a restart in order keeps all"
    );

    let mut held = server.session().unwrap();
    assert_eq!(held.sql("SELECT pg_try_advisory_lock(1)").unwrap(), "t");
    server.kill().unwrap();
    assert_eq!(server.pid(), None);
    assert!(held.sql("SELECT 1").is_err());
    assert!(server.session().is_err());
    assert!(TcpStream::connect(addr).is_err());

    server.start().unwrap();
    assert_eq!(server.addr(), addr);
    assert_eq!(server.sql("SELECT value FROM kept").unwrap(), "7");
    assert_eq!(
        server.sql("SELECT count(*) FROM lost").unwrap(),
        "0",
        "a crash empties it"
    );
}

#[test]
fn a_process_that_is_killed_takes_all_sessions_with_it() {
    if no_postgres() {
        return;
    }
    let server = PgServer::plain().unwrap();
    let mut victim = server.session().unwrap();
    let mut other = server.session().unwrap();
    assert_ne!(victim.pid(), other.pid());
    assert_eq!(
        other.sql("SELECT pg_backend_pid()").unwrap(),
        other.pid().to_string()
    );
    let processes = server.processes().unwrap();
    assert_eq!(processes.first(), server.pid().as_ref());
    assert!(processes.contains(&victim.pid()) && processes.contains(&other.pid()));
    let started = server.sql("SELECT pg_postmaster_start_time()").unwrap();
    assert!(server.kill_process(std::process::id()).is_err(), "a stranger");
    server.kill_process(victim.pid()).unwrap();
    assert!(victim.sql("SELECT 1").is_err());
    until("the other session ends", || other.sql("SELECT 1").is_err());
    server.wait_ready().unwrap();
    assert_eq!(server.sql("SELECT pg_postmaster_start_time()").unwrap(), started);
}

#[test]
fn a_paused_server_answers_nobody_until_it_goes_on() {
    if no_postgres() {
        return;
    }
    let server = PgServer::builder()
        .setting("statement_timeout", "0")
        .start()
        .unwrap();
    let mut session = server.session().unwrap();
    server.pause().unwrap();
    session.begin("SELECT 7").unwrap();
    until("it stands still", || {
        let state = fs::read_to_string(format!("/proc/{}/stat", session.pid()));
        state.is_ok_and(|state| state.contains(") T "))
    });
    let state = fs::read_to_string(format!("/proc/{}/stat", session.pid())).unwrap();
    assert!(
        state.contains(") T "),
        "the session's process does not stand still: {state}"
    );
    server.resume().unwrap();
    assert_eq!(session.answer().unwrap(), "7");

    server.pause().unwrap();
    drop(server);
    let gone = || !fs::exists(format!("/proc/{}/cwd/PG_VERSION", session.pid())).unwrap_or(false);
    until("it ends although it is paused", gone);
}

#[test]
fn settings_count_from_a_reload_or_a_restart_on() {
    if no_postgres() {
        return;
    }
    let server = PgServer::builder()
        .setting("idle_session_timeout", "47s")
        .start()
        .unwrap();
    let shown = |name: &str| server.sql(&format!("SHOW {name}")).unwrap();
    assert_eq!(shown("idle_session_timeout"), "47s");
    server.configure("idle_session_timeout", "48s").unwrap();
    server.configure("max_connections", "30").unwrap();
    server.reload().unwrap();
    assert_eq!(shown("idle_session_timeout"), "48s");
    assert_eq!(shown("max_connections"), "500");
    server.restart().unwrap();
    assert_eq!(shown("max_connections"), "30");
}

#[test]
fn one_that_does_not_come_up_says_why() {
    if no_postgres() {
        return;
    }
    let started = PgServer::builder().setting("no_such_setting", "1").start();
    let error = started.unwrap_err().to_string();
    assert!(
        error.contains("has ended") && error.contains("no_such_setting"),
        "{error}"
    );
}

#[test]
fn errors_have_their_code_and_leave_the_session_usable() {
    if no_postgres() {
        return;
    }
    let server = PgServer::plain().unwrap();
    let mut session = server.session().unwrap();
    let error = session.sql("SELECT 1/0").unwrap_err().to_string();
    assert!(error.starts_with("22012: division"), "{error}");
    let rows = session.sql("SELECT 1, NULL, 'ö' UNION ALL SELECT 2, true, '' ORDER BY 1");
    assert_eq!(rows.unwrap(), "1||ö\n2|t|");
    server
        .sql(&format!("SELECT pg_terminate_backend({}, 5000)", session.pid()))
        .unwrap();
    let error = session.answer().unwrap_err().to_string();
    assert!(error.starts_with("57P01: "), "told without a question: {error}");
    server.sql("CREATE DATABASE other").unwrap();
    let current = server
        .session_in("other")
        .unwrap()
        .sql("SELECT current_database()");
    assert_eq!(current.unwrap(), "other");
}

#[test]
fn a_standby_follows_lags_and_is_promoted() {
    if no_postgres() {
        return;
    }
    let primary = PgServer::plain().unwrap();
    primary.sql("CREATE TABLE numbers AS SELECT 1 AS number").unwrap();
    let standby = PgServer::builder().standby_of(&primary).unwrap();
    assert_eq!(standby.sql("SELECT pg_is_in_recovery()").unwrap(), "t");
    let numbers = || standby.sql("SELECT count(*) FROM numbers").unwrap();
    primary.sql("INSERT INTO numbers VALUES (2)").unwrap();
    standby.wait_caught_up(&primary).unwrap();
    assert_eq!(numbers(), "2");

    standby.lag().unwrap();
    primary.sql("INSERT INTO numbers VALUES (3)").unwrap();
    standby.promote().unwrap();
    assert_eq!(numbers(), "2", "it lagged");
    standby.sql("INSERT INTO numbers VALUES (4)").unwrap();
    assert_eq!(
        primary.sql("SELECT count(*) FROM numbers").unwrap(),
        "3",
        "it goes on"
    );
    standby.restart().unwrap();
    assert_eq!(standby.sql("SELECT pg_is_in_recovery()").unwrap(), "f");
}

#[test]
fn tls_is_served_and_a_certificate_can_be_asked_for() {
    if no_postgres() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let server = PgServer::builder()
        .tls(&certificates)
        .access("hostnossl all all all reject")
        .access("hostssl all all all scram-sha-256 clientcert=verify-ca")
        .start()
        .unwrap();
    let root = format!(
        "{}?sslmode=verify-full&sslrootcert={}",
        server.url(),
        certificates.authority().display()
    );
    let with = |certificate: &std::path::Path, key: &std::path::Path| {
        // libpq reads no key that others may read.
        let own = tempfile::NamedTempFile::new().unwrap();
        fs::copy(key, own.path()).unwrap();
        fs::set_permissions(own.path(), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let url = format!(
            "{root}&sslcert={}&sslkey={}",
            certificate.display(),
            own.path().display()
        );
        psql(
            &url,
            &["SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"],
        )
    };
    assert_eq!(
        with(&certificates.client(), &certificates.client_key()).unwrap(),
        "t"
    );
    let expired = with(&certificates.expired_client(), &certificates.expired_client_key());
    assert!(expired.unwrap_err().to_string().contains("expired"));
    let none = psql(&format!("{root}&sslcert=/nonexistent"), &["SELECT 1"])
        .unwrap_err()
        .to_string();
    assert!(none.contains("client certificate"), "{none}");
    let plain = psql(&format!("{}?sslmode=disable", server.url()), &["SELECT 1"])
        .unwrap_err()
        .to_string();
    assert!(plain.contains("pg_hba.conf rejects"), "{plain}");
}

#[test]
fn its_clock_is_set() {
    if no_postgres() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let mut session = server.session().unwrap();
    let mut year = || {
        session
            .sql("SELECT extract(year FROM clock_timestamp())")
            .unwrap()
            .parse::<u32>()
            .unwrap()
    };
    let now = year();
    clock.forward(Duration::from_secs(10 * 366 * 86_400)).unwrap();
    assert_eq!(year(), now + 10);
    clock.reset().unwrap();
    assert_eq!(year(), now);
}

#[test]
fn a_pooler_shares_a_session_by_transaction_or_not_at_all() {
    if no_bouncer() {
        return;
    }
    let server = PgServer::plain().unwrap();
    let twice = [
        "SELECT pg_try_advisory_lock(7)",
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'",
    ];
    for (mode, left) in [(PoolMode::Transaction, "1"), (PoolMode::Session, "0")] {
        let bouncer = PgBouncer::start(server.addr(), mode, &["server_reset_query = DISCARD ALL"]).unwrap();
        assert_eq!(psql(&bouncer.url(), &twice).unwrap(), "t\n1");
        let locks = || {
            server
                .sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
                .unwrap()
        };
        until("what its client has left", || locks() == left);
        // A setting that it does not know, in the first message.
        let refused = psql(
            &format!("{}?options=-cidle_session_timeout%3D1000", bouncer.url()),
            &["SELECT 1"],
        );
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("unsupported startup parameter")
        );

        let drops = PgBouncer::start(server.addr(), mode, &["ignore_startup_parameters = options"]).unwrap();
        let shown = psql(
            &format!("{}?options=-cidle_session_timeout%3D1000", drops.url()),
            &["SHOW idle_session_timeout"],
        );
        assert_eq!(shown.unwrap(), "0", "it is dropped");

        bouncer.process().kill().unwrap();
        assert!(psql(&bouncer.url(), &["SELECT 1"]).is_err());
        until("the session at the server ends", || locks() == "0");
    }
}

/// Run again by the test below.
#[test]
fn helper_that_dies_beside_a_paused_server() {
    let Some(report) = std::env::var_os(HELPER) else {
        return;
    };
    let server = PgServer::plain().unwrap();
    let session = server.session().unwrap();
    server.pause().unwrap();
    fs::write(report, format!("{} {}", server.pid().unwrap(), session.pid())).unwrap();
    std::process::abort();
}

const HELPER: &str = "LOCKKIT_TESTBED_DIES_PAUSED";

#[test]
fn a_paused_server_does_not_outlive_the_test_process() {
    if no_postgres() {
        return;
    }
    let report = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres::helper_that_dies_beside_a_paused_server"])
        .env(HELPER, report.path())
        .output()
        .unwrap();
    assert!(!output.status.success());
    let pids = fs::read_to_string(report.path()).unwrap();
    let pids: Vec<_> = pids.split_whitespace().collect();
    assert_eq!(pids.len(), 2, "{output:?}");
    until("both processes end", || {
        pids.iter().all(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        })
    });
}
