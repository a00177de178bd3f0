//! Encrypted connections.

use lockkit_core::{Error, spi::chain};
use lockkit_mysql::{MySqlBackend, MySqlConfig, PublicKey, Tls};
use lockkit_testbed::{
    Certificates, ServerPair,
    mysql::{Flavour, MySql},
};

use crate::servers::{Admin, config, connect, cycle, for_each_flavour, name, private, run};

for_each_flavour! {
    a_connection_is_encrypted_and_the_server_known
    a_server_that_is_not_known_is_refused
    a_certificate_for_another_host_or_time_is_refused
    an_account_that_needs_a_certificate_gets_it
    a_server_that_proves_nothing_gets_a_digest_alone
}

fn server(flavour: Flavour, certificates: &Certificates) -> MySql {
    private(
        flavour,
        &[
            &format!("--ssl-ca={}", certificates.authority().display()),
            &format!("--ssl-cert={}", certificates.server().display()),
            &format!("--ssl-key={}", certificates.server_key().display()),
        ],
    )
}

async fn a_connection_is_encrypted_and_the_server_known(flavour: Flavour) {
    let certificates = Certificates::generate().unwrap();
    let server = server(flavour, &certificates);
    // From now on nobody connects without.
    Admin::of(&server)
        .await
        .run("ALTER USER 'lockkit'@'%' REQUIRE SSL")
        .await;
    for (tls, ca) in [
        (Tls::Verify, Some(certificates.authority())),
        (Tls::Unverified, None),
    ] {
        let mut config = config(server.addr());
        (config.tls, config.ca) = (tls, ca);
        let client = connect(config).await.unwrap();
        let lock = client.lock("a").unwrap();
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    let plain = connect(config(server.addr())).await.unwrap_err();
    assert!(!plain.is_transient(), "{plain:?}");
}

async fn a_server_that_is_not_known_is_refused(flavour: Flavour) {
    let (certificates, others) = (
        Certificates::generate().unwrap(),
        Certificates::generate().unwrap(),
    );
    let known = server(flavour, &certificates);
    let plain = private(
        flavour,
        &[match flavour {
            Flavour::MariaDb => "--skip-ssl",
            Flavour::MySql => "--tls-version=",
        }],
    );
    let with = |config: MySqlConfig, ca: &Certificates| {
        let mut config = config;
        (config.tls, config.ca) = (Tls::Verify, Some(ca.authority()));
        connect(config)
    };
    assert!(
        with(config(known.addr()), &others).await.is_err(),
        "another authority"
    );
    assert!(
        with(config(plain.addr()), &certificates).await.is_err(),
        "no encryption"
    );
    with(config(known.addr()), &certificates).await.unwrap();
}

/// The authority is the right one.
async fn a_certificate_for_another_host_or_time_is_refused(flavour: Flavour) {
    let certificates = Certificates::generate().unwrap();
    for (which, reason) in [
        (ServerPair::Elsewhere, "elsewhere.example"),
        (ServerPair::Expired, "expired"),
    ] {
        let pair = certificates.server_pair(which);
        let server = private(
            flavour,
            &[
                &format!("--ssl-cert={}", pair.display()),
                &format!("--ssl-key={}", pair.display()),
            ],
        );
        let with = |tls, ca| {
            let mut config = config(server.addr());
            (config.tls, config.ca) = (tls, ca);
            connect(config)
        };
        let refused = with(Tls::Verify, Some(certificates.authority())).await;
        let text = chain(&refused.expect_err("it is not this host's"));
        assert!(text.contains(reason), "{text}");
        with(Tls::Unverified, None).await.unwrap();
    }
}

async fn an_account_that_needs_a_certificate_gets_it(flavour: Flavour) {
    let (certificates, others) = (
        Certificates::generate().unwrap(),
        Certificates::generate().unwrap(),
    );
    let server = server(flavour, &certificates);
    Admin::of(&server)
        .await
        .run("ALTER USER 'lockkit'@'%' REQUIRE X509")
        .await;
    let with = |tls, identity| {
        let mut config = config(server.addr());
        config.tls = tls;
        config.ca = (tls == Tls::Verify).then(|| certificates.authority());
        (config.cert, config.key) = match identity {
            Some((cert, key)) => (Some(cert), Some(key)),
            None => (None, None),
        };
        config
    };
    let known = (certificates.client(), certificates.client_key());
    for tls in [Tls::Verify, Tls::Unverified] {
        let client = connect(with(tls, Some(known.clone()))).await.unwrap();
        cycle(&client, &name("identified")).await;
        let error = connect(with(tls, None)).await.unwrap_err();
        assert!(!error.is_transient(), "without one: {}", chain(&error));
    }
    for (cert, key) in [
        (others.client(), others.client_key()),
        (certificates.expired_client(), certificates.expired_client_key()),
    ] {
        let error = connect(with(Tls::Verify, Some((cert, key)))).await.unwrap_err();
        let text = chain(&error);
        assert!(
            !error.is_transient() && text.contains("does not accept the certificate of `cert`"),
            "{text}"
        );
        assert!(!text.contains(MySql::PASSWORD), "{text}");
    }
}

/// MySQL wants the password itself as long as it does not remember the account; MariaDB is content with a digest.
async fn a_server_that_proves_nothing_gets_a_digest_alone(flavour: Flavour) {
    let certificates = Certificates::generate().unwrap();
    let server = server(flavour, &certificates);
    let with = |tls, public_key| {
        let mut config = config(server.addr());
        config.ca = (tls == Tls::Verify).then(|| certificates.authority());
        (config.tls, config.public_key) = (tls, public_key);
        connect(config)
    };
    match (flavour, with(Tls::Unverified, PublicKey::Never).await) {
        (Flavour::MariaDb, connected) => drop(connected.unwrap()),
        (Flavour::MySql, connected) => {
            let error = connected.expect_err("it may be anybody");
            let text = chain(&error);
            assert!(
                !error.is_transient() && text.contains("tls=verify") && text.contains("public_key=always"),
                "{text}"
            );
        }
    }
    with(Tls::Verify, PublicKey::Never)
        .await
        .expect("it proves which it is");
    with(Tls::Unverified, PublicKey::Never)
        .await
        .expect("it remembers the account");
}

const ORDER: &str = "LOCKKIT_MYSQL_TRUST";

/// The system's authorities are those that an environment variable names: this runs again in a process with one.
#[test]
fn a_given_authority_is_trusted_instead_of_the_systems() {
    let Ok(order) = std::env::var(ORDER) else {
        return run(Flavour::MariaDb, |flavour| async move {
            let (systems, given) = (
                Certificates::generate().unwrap(),
                Certificates::generate().unwrap(),
            );
            let server = server(flavour, &systems);
            let test = "tls::a_given_authority_is_trusted_instead_of_the_systems";
            let order = format!("{} {}", server.addr(), given.authority().display());
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env("SSL_CERT_FILE", systems.authority())
                .env(ORDER, order)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            let failed = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && said.contains("1 passed"),
                "{said}{failed}"
            );
        });
    };
    let (addr, ca) = order.split_once(' ').unwrap();
    let mut config = config(addr.parse().unwrap());
    config.tls = Tls::Verify;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        connect(config.clone()).await.expect("the system trusts it");
        config.ca = Some(ca.into());
        let error = connect(config).await.expect_err("the one that is given does not");
        let text = chain(&error);
        assert!(!error.is_transient() && text.contains("`ca`"), "{text}");
    });
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let certificates = Certificates::generate().unwrap();
    let strangers = Certificates::generate().unwrap();
    let nowhere = certificates.client().with_file_name("none.pem");
    let (cert, key) = (certificates.client(), certificates.client_key());
    for (ca, identity, option, reason) in [
        (Some(&nowhere), None, "ca", "none.pem cannot be read"),
        (Some(&key), None, "ca", "client.key has no certificate"),
        (None, Some((&nowhere, &key)), "cert", "none.pem cannot be read"),
        (None, Some((&key, &key)), "cert", "client.key has no certificate"),
        (None, Some((&cert, &nowhere)), "key", "none.pem cannot be read"),
        (None, Some((&cert, &cert)), "key", "client.pem has no private key"),
        (
            None,
            Some((&cert, &strangers.client_key())),
            "key",
            "is not the private key of",
        ),
    ] {
        // Nobody listens there: the files come first.
        let mut config = MySqlConfig::new("mysql://u:hidden@127.0.0.1:1/app");
        config.tls = Tls::Verify;
        config.ca = ca.cloned();
        if let Some((cert, key)) = identity {
            (config.cert, config.key) = (Some(cert.clone()), Some(key.clone()));
        }
        match MySqlBackend::connect(config).await.map(drop).unwrap_err() {
            Error::InvalidOptions {
                option: named,
                reason: said,
                ..
            } => {
                assert_eq!(named, option, "{said}");
                assert!(said.contains(reason), "{said}");
            }
            other => panic!("{other:?} for {reason}"),
        }
    }
}
