//! Encrypted connections.

use lockkit_mysql::{MySqlConfig, Tls};
use lockkit_testbed::{
    Certificates,
    mysql::{Flavour, MySql},
};

use crate::servers::{Admin, config, connect, for_each_flavour, private};

for_each_flavour! {
    a_connection_is_encrypted_and_the_server_known
    a_server_that_is_not_known_is_refused
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
