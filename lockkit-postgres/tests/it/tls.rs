//! Encrypted connections, as libpq spells them.

use std::sync::Arc;

use lockkit_core::{Error, spi::chain};
use lockkit_postgres::{PostgresConfig, SslMode};
use lockkit_testbed::{Certificates, postgres::PgServer};

use crate::servers::{config, connect, cycle, session, shared, tests};

tests! {
    each_mode_checks_what_it_says
    a_server_without_encryption_is_plain_to_those_who_allow_it
    a_name_is_checked_by_verify_full_alone
    a_role_that_needs_a_certificate_gets_it
    files_that_cannot_be_used_are_named
    a_password_is_asked_for_over_both
}

fn encrypted(certificates: &Arc<Certificates>) -> PgServer {
    PgServer::builder()
        .tls(certificates)
        .access("hostnossl all all all reject")
        .start()
        .unwrap()
}

async fn is_let_in(config: PostgresConfig) -> Result<(), Error> {
    let client = connect(config).await?;
    cycle(&client, "a").await;
    Ok(())
}

async fn each_mode_checks_what_it_says() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let others = Certificates::generate().unwrap();
    let server = encrypted(&certificates);
    let (known, unknown) = (Some(certificates.authority()), Some(others.authority()));
    for (mode, authority, is_right) in [
        (SslMode::Disable, None, false),
        (SslMode::Prefer, None, true),
        (SslMode::Require, None, true),
        // As libpq has it: who names an authority wants it checked.
        (SslMode::Require, known.clone(), true),
        (SslMode::Require, unknown.clone(), false),
        (SslMode::VerifyCa, known.clone(), true),
        (SslMode::VerifyCa, unknown.clone(), false),
        (SslMode::VerifyFull, known, true),
        (SslMode::VerifyFull, unknown, false),
        // The system's authorities do not know it.
        (SslMode::VerifyFull, None, false),
    ] {
        let mut config = config(server.addr());
        (config.sslmode, config.sslrootcert) = (mode, authority.clone());
        match is_let_in(config).await {
            Ok(()) => assert!(is_right, "{mode} {authority:?}"),
            Err(error) => {
                assert!(
                    !is_right && !error.is_transient(),
                    "{mode} {authority:?}: {}",
                    chain(&error)
                );
            }
        }
    }
    let encrypted = "SELECT bool_and(s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                     WHERE a.application_name='lockkit'";
    let mut config = config(server.addr());
    config.sslmode = SslMode::Require;
    let client = connect(config).await.unwrap();
    assert_eq!(session(&server).sql(encrypted).unwrap(), "t");
    drop(client);
}

async fn a_server_without_encryption_is_plain_to_those_who_allow_it() {
    for (mode, is_right) in [
        (SslMode::Prefer, true),
        (SslMode::Disable, true),
        (SslMode::Require, false),
    ] {
        let mut config = config(shared().addr());
        config.sslmode = mode;
        match connect(config).await {
            Ok(_) => assert!(is_right, "{mode}"),
            Err(error) => {
                let text = chain(&error);
                assert!(
                    !is_right && !error.is_transient() && text.contains("sslmode=require"),
                    "{mode}: {text}"
                );
            }
        }
    }
}

/// The certificate is for 127.0.0.1 and `localhost`. Another address of this machine leads there, too.
async fn a_name_is_checked_by_verify_full_alone() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let server = encrypted(&certificates);
    for (mode, is_right) in [(SslMode::VerifyCa, true), (SslMode::VerifyFull, false)] {
        let mut config = PostgresConfig::new(server.url().replace("127.0.0.1", "[::ffff:127.0.0.1]"));
        (config.sslmode, config.sslrootcert) = (mode, Some(certificates.authority()));
        match is_let_in(config).await {
            Ok(()) => assert!(is_right, "{mode}"),
            Err(error) => {
                let text = chain(&error);
                assert!(
                    !is_right && text.contains("certificate is not accepted"),
                    "{mode}: {text}"
                );
            }
        }
    }
}

async fn a_role_that_needs_a_certificate_gets_it() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let others = Certificates::generate().unwrap();
    let server = PgServer::builder()
        .tls(&certificates)
        .access("hostssl all all all scram-sha-256 clientcert=verify-ca")
        .start()
        .unwrap();
    let with = |identity: Option<&Certificates>| {
        let mut config = config(server.addr());
        config.sslmode = SslMode::VerifyFull;
        config.sslrootcert = Some(certificates.authority());
        config.sslcert = identity.map(Certificates::client);
        config.sslkey = identity.map(Certificates::client_key);
        is_let_in(config)
    };
    with(Some(&certificates)).await.unwrap();
    for identity in [None, Some(&others)] {
        let error = with(identity).await.unwrap_err();
        eprintln!("{}", chain(&error));
        assert!(!error.is_transient(), "{}", chain(&error));
    }
}

async fn files_that_cannot_be_used_are_named() {
    let certificates = Certificates::generate().unwrap();
    let valid = || {
        let mut config = config(shared().addr());
        config.sslmode = SslMode::VerifyFull;
        config.sslrootcert = Some(certificates.authority());
        config.sslcert = Some(certificates.client());
        config.sslkey = Some(certificates.client_key());
        config
    };
    let (mut authority, mut cert, mut key) = (valid(), valid(), valid());
    authority.sslrootcert = Some("/nowhere/ca.pem".into());
    cert.sslcert = Some("/nowhere/cert.pem".into());
    key.sslkey = Some(certificates.server_key());
    for (config, named) in [(authority, "sslrootcert"), (cert, "sslcert"), (key, "sslkey")] {
        match connect(config).await {
            Err(Error::InvalidOptions { option, .. }) => assert_eq!(option, named),
            other => panic!("{named}: {other:?}"),
        }
    }
}

async fn a_password_is_asked_for_over_both() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let server = PgServer::builder().tls(&certificates).start().unwrap();
    for mode in [SslMode::Disable, SslMode::Require] {
        let mut wrong = PostgresConfig::new(server.url().replace(PgServer::PASSWORD, "wrong-canary"));
        wrong.sslmode = mode;
        let error = connect(wrong).await.unwrap_err();
        let shown = format!("{} {error:?}", chain(&error));
        assert!(
            !error.is_transient() && shown.contains("28P01") && !shown.contains("canary"),
            "{shown}"
        );
        let mut right = config(server.addr());
        right.sslmode = mode;
        is_let_in(right).await.unwrap();
    }
}
