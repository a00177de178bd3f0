//! MySQL and MariaDB.

use std::{fmt::Write as _, process::Command};

use lockkit_testbed::{
    Certificates, Port,
    mysql::{Flavour, MySql},
    redis::RedisServer,
    skipped,
};

use super::{Printed, Table, connecting, meanwhile, says};
use crate::tool::in_this_process;

const PASSWORD: &str = "canary-hush";
/// The tables that the first acquisition makes.
const TABLES: [&str; 5] = [
    "lockkit_gate",
    "lockkit_fence",
    "lockkit_map",
    "lockkit_permit",
    "lockkit_holder",
];

/// Runs statements as the administrator.
fn sql(server: &MySql, statements: &str) -> String {
    let output = Command::new("mariadb")
        .args([
            "--no-defaults",
            "--host=127.0.0.1",
            "--user=root",
            "--batch",
            "--skip-column-names",
        ])
        .arg(format!("--port={}", server.addr().port()))
        .args(["--execute", statements])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{statements}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A database of a situation's own with an account of the same name that has these rights, and its URL.
fn account(server: &MySql, name: &str, rights: &[&str]) -> String {
    let mut statements = format!("CREATE DATABASE {name}; CREATE USER {name} IDENTIFIED BY '{PASSWORD}';");
    for right in rights {
        let _ = write!(statements, "GRANT {right} TO {name};");
    }
    sql(server, &statements);
    url(server, name)
}

fn url(server: &MySql, name: &str) -> String {
    format!("mysql://{name}:{PASSWORD}@{}/{name}", server.addr())
}

/// Has the tables made, with an account that may.
fn make_tables(url: &str) {
    in_this_process(async {
        let client = super::connect(url).await.unwrap();
        let lock = client.lock("made").unwrap();
        lock.acquire().await.unwrap().release().await.unwrap();
    });
}

/// An account that lacks a right to the tables, which are there.
fn lacking(server: &MySql, name: &str, right: &str) -> Printed {
    let url = account(server, name, &[&format!("ALL ON {name}.*")]);
    make_tables(&url);
    let rest = ["SELECT", "INSERT", "UPDATE", "DELETE"].map(|one| if one == right { "USAGE" } else { one });
    let mut statements = format!("REVOKE ALL ON {name}.* FROM {name};");
    for table in TABLES {
        for one in rest.iter().filter(|one| **one != "USAGE") {
            let _ = write!(statements, "GRANT {one} ON {name}.{table} TO {name};");
        }
    }
    sql(server, &statements);
    super::trying(&url)
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn mysql_errors_are_those_of_the_catalogue() {
    if skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let start = |options: &[&str]| MySql::start(Flavour::MariaDb, options).unwrap();
    let server = start(&[]);
    let server = &server;
    let strangers = Certificates::generate().unwrap();
    let mut table = Table::new(
        "MySQL and MariaDB",
        "The servers' words are those of MariaDB 10.11.",
    );
    let rights = "Grant the account what [mysql.md](mysql.md) lists.";

    table.row(
        "nobody listens at the port",
        says("Connection refused", "is the server running"),
        "Start the server; check host and port.",
        || connecting(&MySql::url_at(Port::reserve().unwrap().addr())),
    );
    table.row(
        "nobody knows the host",
        says("failed to lookup address", "check the host in the URL").of("h.invalid"),
        "Correct the host in the URL, or what resolves it.",
        || connecting("mysql://u:canary@h.invalid/app"),
    );
    table.row(
        "the socket is not there",
        says("No such file", "is this its socket").of("/no/socket"),
        "Correct the option `socket`, or start the server.",
        || connecting("mysql://u:canary@h/app?socket=/no/socket"),
    );
    table.row(
        "the server accepts connections and says nothing",
        says(
            "no answer within the connect_timeout of 1s",
            "does the server run",
        ),
        "Look whether the server hangs, or another program has its port.",
        || {
            let paused = start(&[]);
            paused.process().pause().unwrap();
            connecting(&format!("{}?connect_timeout=1s", paused.url()))
        },
    );
    table.row(
        "Redis is at the port",
        says("no answer within the connect_timeout of 1s", "is this its port"),
        "Correct the port.",
        || {
            let redis = RedisServer::plain().unwrap();
            connecting(&format!("{}?connect_timeout=1s", MySql::url_at(redis.addr())))
        },
    );
    table.row(
        "TLS with a server that has none",
        says("the server does not speak TLS", "configure it there"),
        "Configure TLS at the server. If it worked before, somebody may be in the way: do not switch TLS off.",
        || {
            connecting(&format!(
                "{}?tls=verify&ca={}",
                server.url(),
                strangers.authority().display()
            ))
        },
    );
    table.row(
        "the password is wrong",
        says("Access denied for user", "check user and password in the URL"),
        "Correct it.",
        || connecting(&format!("mysql://lockkit:not-canary@{}/lockkit", server.addr())),
    );
    table.row(
        "the account is locked",
        says("account is locked", "unlock it"),
        "`ALTER USER … ACCOUNT UNLOCK`.",
        || {
            let url = account(server, "locked", &["ALL ON locked.*"]);
            sql(server, "ALTER USER locked ACCOUNT LOCK");
            connecting(&url)
        },
    );
    table.row(
        "the password has expired",
        says("password", "give the account a new password"),
        "`ALTER USER … IDENTIFIED BY …`.",
        || {
            let url = account(server, "expired", &["ALL ON expired.*"]);
            sql(server, "ALTER USER expired PASSWORD EXPIRE");
            connecting(&url)
        },
    );
    table.row(
        "there is no such database",
        says("Unknown database", "create it").of("nowhere"),
        "Create it, or correct the URL.",
        || {
            account(server, "homeless", &["ALL ON *.*"]);
            connecting(&format!("mysql://homeless:{PASSWORD}@{}/nowhere", server.addr()))
        },
    );
    table.row(
        "the account has no right to the database",
        says("Access denied for user", "grant the account").of("stranger"),
        rights,
        || connecting(&account(server, "stranger", &[])),
    );
    table.row(
        "the account may not create the tables",
        says("CREATE command denied", "grant the account").of("lockkit_holder"),
        rights,
        || {
            super::trying(&account(
                server,
                "maker",
                &["SELECT, INSERT, UPDATE, DELETE ON maker.*"],
            ))
        },
    );
    table.row(
        "the tables' columns are hidden from the account",
        says("are hidden from this account", "grant it SELECT").of("lockkit_"),
        rights,
        || {
            let url = account(server, "hidden", &["ALL ON hidden.*"]);
            make_tables(&url);
            sql(
                server,
                "REVOKE ALL ON hidden.* FROM hidden; GRANT CREATE ON hidden.* TO hidden",
            );
            connecting(&url)
        },
    );
    for (what, name, right, words) in [
        ("without the right to `SELECT`", "no_select", "SELECT", "denied"),
        (
            "without the right to `INSERT`",
            "no_insert",
            "INSERT",
            "INSERT command denied",
        ),
        ("without the right to `UPDATE`", "no_update", "UPDATE", "denied"),
    ] {
        table.row(what, says(words, "grant").of("lockkit_"), rights, move || {
            lacking(server, name, right)
        });
    }
    table.row(
        "a view has a table's name",
        says("is a view", "drop it").of("lockkit_gate"),
        "Find out whose it is, and rename it, or take another database.",
        || {
            let url = account(server, "viewed", &["ALL ON viewed.*"]);
            sql(server, "CREATE VIEW viewed.lockkit_gate AS SELECT 1 AS name");
            connecting(&url)
        },
    );
    table.row(
        "a table has another layout",
        says("is not VARBINARY(255)", "drop the table while no lock is held").of("lockkit_gate"),
        "Find out whose it is. If it is lockkit's, stop all clients and rename it; the next acquisition makes it. Then raise the tokens above the highest `last_token`.",
        || {
            let url = account(server, "other", &["ALL ON other.*"]);
            sql(
                server,
                "CREATE TABLE other.lockkit_gate (name VARCHAR(100) PRIMARY KEY)",
            );
            connecting(&url)
        },
    );
    table.row(
        "a table has another engine",
        says("which has no row locks", "make it ENGINE=InnoDB").of("lockkit_gate"),
        "`ALTER TABLE … ENGINE=InnoDB`.",
        || {
            let url = account(server, "engine", &["ALL ON engine.*"]);
            sql(
                server,
                "CREATE TABLE engine.lockkit_gate (name VARBINARY(255) PRIMARY KEY) ENGINE=MyISAM",
            );
            connecting(&url)
        },
    );
    for (what, name, mode, advice, to_do) in [
        (
            "the tables were dropped while a client was connected",
            "dropped",
            "for_update",
            "it is made anew; try again",
            "Try again: the client makes them anew. If tokens had been raised, raise them again.",
        ),
        (
            "the same, with `mode=lease`",
            "dropped_lease",
            "lease",
            "connect anew",
            "Stop all clients, since what was held is not protected any more; then connect and acquire, which makes it, and raise the tokens again if they were.",
        ),
    ] {
        table.row(what, says("doesn't exist", advice).of(name), to_do, move || {
            let url = format!(
                "{}?mode={mode}",
                account(server, name, &[&format!("ALL ON {name}.*")])
            );
            let error = in_this_process(async {
                let client = super::connect(&url).await.unwrap();
                let lock = client.lock("job").unwrap();
                lock.acquire().await.unwrap().release().await.unwrap();
                let all = TABLES.map(|table| format!("{name}.{table}")).join(", ");
                sql(
                    server,
                    &format!("DROP TABLE IF EXISTS {all}, {name}.lockkit_lease"),
                );
                let error = lock.try_acquire().await.unwrap_err();
                if mode == "lease" {
                    let client = super::connect(&url).await.unwrap();
                    let lock = client.lock("made").unwrap();
                    lock.acquire().await.unwrap().release().await.unwrap();
                }
                lock.acquire().await.unwrap().release().await.unwrap();
                error
            });
            super::alone(&error)
        });
    }
    table.row(
        "the server has as many connections as it takes",
        says("Too many connections", "raise the server's max_connections"),
        "Raise `max_connections`, or end connections.",
        || {
            let full = start(&["--max-connections=10"]);
            let url = full.url();
            in_this_process(async {
                let mut clients = Vec::new();
                loop {
                    match super::connect(&url).await {
                        Ok(client) => clients.push(client),
                        Err(error) => return super::printed(&error, &url),
                    }
                }
            })
        },
    );
    table.row(
        "the account has as many connections as it may",
        says("max_user_connections", "raise the account's limit"),
        "`ALTER USER … WITH MAX_USER_CONNECTIONS 20`.",
        || {
            let url = account(server, "narrow", &["ALL ON narrow.*"]);
            sql(server, "ALTER USER narrow WITH MAX_USER_CONNECTIONS 1");
            connecting(&url)
        },
    );
    table.row(
        "the server is read-only",
        says("read_only=ON", "connect to the primary"),
        "Give the primary's address.",
        || connecting(&start(&["--read-only"]).url()),
    );
    table.row(
        "the server became read-only while its client was connected",
        says("read", "connect to the primary"),
        "Wait until the client's host name leads to the new primary, or give its address.",
        || {
            let demoted = start(&[]);
            meanwhile(&demoted.url(), |_| _ = sql(&demoted, "SET GLOBAL read_only=1"))
        },
    );
    table.row(
        "the server has died while its client was connected",
        says("Connection refused", "connects again by itself"),
        "Start it; the client connects by itself.",
        || {
            let dead = start(&[]);
            meanwhile(&dead.url(), |_| _ = dead.process().kill().unwrap())
        },
    );
    table.check();
}
