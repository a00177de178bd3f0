//! Servers of MariaDB, and of MySQL where there is one.

use std::{io::Read, net::TcpStream, time::Duration};

use lockkit_testbed::{
    mysql::{Flavour, MySql},
    skipped,
};

fn missing(flavour: Flavour) -> bool {
    let backend = match flavour {
        Flavour::MariaDb => "mysql",
        Flavour::MySql => "mysql-server",
    };
    skipped(backend, MySql::missing(flavour))
}

/// Returns the first message of a server, which has its version in it.
fn greeting(server: &MySql) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(server.addr())?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut greeting = [0; 64];
    let length = stream.read(&mut greeting)?;
    Ok(String::from_utf8_lossy(&greeting[..length]).into_owned())
}

#[test]
fn it_comes_up_dies_and_comes_up_again_on_the_same_port() {
    for flavour in [Flavour::MariaDb, Flavour::MySql] {
        if missing(flavour) {
            continue;
        }
        let server = MySql::start(flavour, &[]).unwrap();
        let is_mariadb = greeting(&server).unwrap().contains("MariaDB");
        assert_eq!(is_mariadb, flavour == Flavour::MariaDb);
        let addr = server.addr();
        server.process().kill().unwrap();
        assert!(greeting(&server).is_err());
        server.start_again().unwrap();
        assert_eq!(server.addr(), addr);
        greeting(&server).unwrap();
    }
}

#[test]
fn several_run_beside_each_other_with_options_of_their_own() {
    if missing(Flavour::MariaDb) {
        return;
    }
    let servers = [1, 2].map(|id| MySql::start(Flavour::MariaDb, &[&format!("--server-id={id}")]).unwrap());
    assert_ne!(servers[0].addr(), servers[1].addr());
    for server in &servers {
        greeting(server).unwrap();
        assert!(server.url().contains(&server.addr().to_string()));
    }
}

#[test]
fn one_that_does_not_come_up_says_why() {
    if missing(Flavour::MariaDb) {
        return;
    }
    let error = MySql::start(Flavour::MariaDb, &["--no-such-option"])
        .unwrap_err()
        .to_string();
    assert!(error.contains("no-such-option"), "{error}");
}
