//! PostgreSQL.

use lockkit::LockClient;
use lockkit_testbed::{
    Certificates, Port,
    postgres::{self, PgBouncer, PgServer, PoolMode},
    redis::RedisServer,
    skipped,
};

use super::{Printed, Table, alone, connecting, meanwhile, says, trying};
use crate::tool::in_this_process;

/// A role and a database of a situation's own. A URL with its password.
fn role(server: &PgServer, name: &str, options: &str) -> String {
    server
        .sql(&format!(
            "CREATE ROLE {name} PASSWORD '{}' {options}",
            PgServer::PASSWORD
        ))
        .unwrap();
    server.sql(&format!("CREATE DATABASE {name}")).unwrap();
    format!(
        "postgres://{name}:{}@{}/{name}",
        PgServer::PASSWORD,
        server.addr()
    )
}

fn made(server: &PgServer, name: &str) -> String {
    let url = role(server, name, "LOGIN");
    let as_owner = format!("ALTER DATABASE {name} OWNER TO {name}");
    server.sql(&as_owner).unwrap();
    in_this_process(async { lock_once(&super::connect(&url).await.unwrap()).await });
    url
}

/// The error of connecting to a database whose schema was changed by this, as its superuser.
fn changed(server: &PgServer, name: &str, statement: &str) -> Printed {
    let url = made(server, name);
    server.session_in(name).unwrap().sql(statement).unwrap();
    connecting(&url)
}

/// The error of a semaphore with so many permits that is tried for while one with two is held.
fn beside_two(url: &str, permits: u32) -> Printed {
    in_this_process(async {
        let client = super::connect(url).await.unwrap();
        let held = client.semaphore("pair", 2).unwrap().acquire().await.unwrap();
        let other = client.semaphore("pair", permits).unwrap();
        let printed = alone(&other.try_acquire().await.unwrap_err());
        held.release().await.unwrap();
        printed
    })
}

/// The first acquisition makes the schema.
async fn lock_once(client: &LockClient) {
    let guard = client.lock("job").unwrap().acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn postgres_errors_are_those_of_the_catalogue() {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::builder()
        .access("host lockkit barred all reject")
        .access("hostnossl lockkit sealed all reject")
        .access("local all all trust")
        .access("host all all all scram-sha-256")
        .start()
        .unwrap();
    let server = &server;
    let strangers = Certificates::generate().unwrap();
    let mut table = Table::new("PostgreSQL", "The servers' words are those of PostgreSQL 15.");
    let rights = "Grant the role what [postgres.md](postgres.md) lists.";

    table.row(
        "nobody listens at the port",
        says("Connection refused", "is the server running"),
        "Start the server; check host and port.",
        || connecting(&PgServer::url_at(Port::reserve().unwrap().addr())),
    );
    table.row(
        "nobody knows the host",
        says("failed to lookup address", "check the host in the URL").of("h.invalid"),
        "Correct the host in the URL, or what resolves it.",
        || connecting("postgres://u:canary@h.invalid/app"),
    );
    table.row(
        "the server accepts connections and says nothing",
        says(
            "no answer within the connect_timeout of 1s",
            "does the server run",
        ),
        "Look whether the server hangs, or another program has its port.",
        || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let url = PgServer::url_at(listener.local_addr().unwrap());
            connecting(&format!("{url}?connect_timeout=1s"))
        },
    );
    table.row(
        "Redis is at the port",
        says("no answer within the connect_timeout of 1s", "is this its port"),
        "Correct the port.",
        || {
            let redis = RedisServer::plain().unwrap();
            connecting(&format!("{}?connect_timeout=1s", PgServer::url_at(redis.addr())))
        },
    );
    table.row(
        "TLS with a server that has none",
        says("no encrypted connections", "sslmode"),
        "Configure TLS at the server. If it worked before, somebody may be in the way: do not switch TLS off.",
        || {
            let ca = strangers.authority();
            connecting(&format!(
                "{}?sslmode=verify-full&sslrootcert={}",
                server.url(),
                ca.display()
            ))
        },
    );
    table.row(
        "a certificate of an unknown authority",
        says("certificate", "`sslrootcert`"),
        "Name the authority's file in `sslrootcert`.",
        || {
            let encrypted = PgServer::builder()
                .tls(&std::sync::Arc::new(Certificates::generate().unwrap()))
                .start()
                .unwrap();
            let ca = strangers.authority();
            connecting(&format!(
                "{}?sslmode=verify-full&sslrootcert={}",
                encrypted.url(),
                ca.display()
            ))
        },
    );
    table.row(
        "the password is wrong",
        says(
            "password authentication failed",
            "check user and password in the URL",
        ),
        "Correct it.",
        || {
            connecting(&format!(
                "postgres://lockkit:not-canary@{}/lockkit",
                server.addr()
            ))
        },
    );
    table.row(
        "there is no such role",
        says(
            "password authentication failed",
            "check user and password in the URL",
        )
        .of("nobody"),
        "Create it, or correct the URL.",
        || connecting(&format!("postgres://nobody:canary@{}/lockkit", server.addr())),
    );
    table.row(
        "the role may not log in",
        says("not permitted to log in", "check the user in the URL").of("nologin"),
        "`ALTER ROLE … LOGIN`.",
        || connecting(&role(server, "nologin", "NOLOGIN")),
    );
    table.row(
        "`pg_hba.conf` keeps the role out",
        says("pg_hba.conf rejects", "check the user in the URL").of("barred"),
        "Add a line for it.",
        || {
            role(server, "barred", "LOGIN");
            connecting(&format!(
                "postgres://barred:{}@{}/lockkit",
                PgServer::PASSWORD,
                server.addr()
            ))
        },
    );
    table.row(
        "there is no such database",
        says("does not exist", "create it").of("nowhere"),
        "Create it, or correct the URL.",
        || {
            connecting(&format!(
                "postgres://lockkit:{}@{}/nowhere",
                PgServer::PASSWORD,
                server.addr()
            ))
        },
    );
    table.row(
        "the role may not connect to the database",
        says("permission denied for database", "grant the role").of("closed"),
        rights,
        || {
            let url = role(server, "closed", "LOGIN");
            server
                .sql("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
                .unwrap();
            connecting(&url)
        },
    );
    table.row(
        "the role may not create the schema",
        says("permission denied for database", "have it made with").of("maker"),
        "Have a role that may run the statements: they make the schema, and grant this role what it needs.",
        || trying(&role(server, "maker", "LOGIN")),
    );
    table.row(
        "the role lacks a right in the schema",
        says("lacks rights", "run: GRANT").of("lockkit.epoch"),
        rights,
        || {
            let url = made(server, "poor");
            let mut session = server.session_in("poor").unwrap();
            session
                .sql("ALTER SCHEMA lockkit OWNER TO postgres; REASSIGN OWNED BY poor TO postgres")
                .unwrap();
            trying(&url)
        },
    );
    table.row(
        "the schema is not complete",
        says("is not complete", "have it made with"),
        "Connect as a role that may, or have one run the statements.",
        || {
            let url = made(server, "partial");
            let mut session = server.session_in("partial").unwrap();
            session
                .sql("DROP TABLE lockkit.holder; ALTER SCHEMA lockkit OWNER TO postgres")
                .unwrap();
            trying(&url)
        },
    );
    table.row(
        "the schema was dropped while a client was connected",
        says("does not exist", "connect anew"),
        "Stop all clients, since what was held is not protected any more; then lock with a new one, which makes it, and raise the tokens again if they were.",
        || {
            let url = made(server, "dropped");
            let error = in_this_process(async {
                let client = super::connect(&url).await.unwrap();
                lock_once(&client).await;
                let mut session = server.session_in("dropped").unwrap();
                session.sql("DROP SCHEMA lockkit CASCADE").unwrap();
                client.lock("job").unwrap().try_acquire().await.unwrap_err()
            });
            super::printed(&error, &url)
        },
    );
    table.row(
        "the server has as many connections as it takes",
        says("53300", "raise max_connections"),
        "Raise `max_connections`, or end connections.",
        || {
            let full = PgServer::builder()
                .setting("max_connections", "8")
                .start()
                .unwrap();
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
        "the role has as many connections as it may",
        says("too many connections for role", "raise max_connections").of("narrow"),
        "`ALTER ROLE … CONNECTION LIMIT 20`.",
        || connecting(&role(server, "narrow", "LOGIN CONNECTION LIMIT 0")),
    );
    table.row(
        "the server is a standby",
        says("a server in recovery", "connect to the primary"),
        "Give the primary's address.",
        || {
            let primary = PgServer::plain().unwrap();
            let standby = PgServer::builder().standby_of(&primary).unwrap();
            connecting(&standby.url())
        },
    );
    table.row(
        "the sessions are read-only",
        says(
            "default_transaction_read_only=on",
            "change the setting of the role or database",
        ),
        "Give the primary's address, or `ALTER DATABASE … RESET default_transaction_read_only`.",
        || {
            let url = role(server, "reading", "LOGIN");
            server
                .sql("ALTER DATABASE reading SET default_transaction_read_only = on")
                .unwrap();
            connecting(&url)
        },
    );
    table.row_where(
        postgres::missing_bouncer().is_none(),
        "PgBouncer is at the port",
        says("startup parameter", "connect to the server directly").of("PgBouncer"),
        "Give the server's own address.",
        || {
            let bouncer = PgBouncer::start(server.addr(), PoolMode::Transaction, &[]).unwrap();
            connecting(&format!("{}?sslmode=disable", bouncer.url()))
        },
    );
    table.row(
        "the sequence of tokens was changed",
        says("may be granted twice", "run: ALTER SEQUENCE").of("lockkit.token"),
        "Run what it says.",
        || changed(server, "cached", "ALTER SEQUENCE lockkit.token CACHE 10"),
    );
    table.row(
        "a table has another layout",
        says("does not exist", "drop the schema lockkit").of("label"),
        "Stop all clients and drop the schema; the next acquisition makes it. Then raise the tokens above the highest `last_token`.",
        || {
            let url = made(server, "altered");
            let mut session = server.session_in("altered").unwrap();
            session.sql("ALTER TABLE lockkit.holder DROP COLUMN label").unwrap();
            trying(&url)
        },
    );
    table.row(
        "nobody has made the schema, and `schema=manual` leaves it to somebody",
        says("is not complete", "have it made with"),
        "Have a role that may run the statements, or leave out the option.",
        || {
            let url = role(server, "manual", "LOGIN");
            connecting(&format!("{url}?schema=manual"))
        },
    );
    table.row(
        "the database has as many connections as it may",
        says("too many connections for database", "raise max_connections").of("crowded"),
        "`ALTER DATABASE … CONNECTION LIMIT -1`, or a higher number.",
        || {
            let url = role(server, "crowded", "LOGIN");
            server.sql("ALTER DATABASE crowded CONNECTION LIMIT 0").unwrap();
            connecting(&url)
        },
    );
    table.row(
        "the database allows no connections",
        says("not currently accepting connections", "allow connections?").of("shut"),
        "`ALTER DATABASE … ALLOW_CONNECTIONS true`.",
        || {
            let url = role(server, "shut", "LOGIN");
            server.sql("ALTER DATABASE shut ALLOW_CONNECTIONS false").unwrap();
            connecting(&url)
        },
    );
    table.row(
        "the role's password has expired",
        says(
            "password authentication failed",
            "check user and password in the URL",
        )
        .of("outdated"),
        "`ALTER ROLE … VALID UNTIL …`. The server's log tells.",
        || connecting(&role(server, "outdated", "LOGIN VALID UNTIL '2001-01-01'")),
    );
    table.row(
        "`pg_hba.conf` asks for an encrypted connection",
        says("no encryption", "pg_hba.conf)").of("sealed"),
        "Write `sslmode=verify-full`.",
        || {
            role(server, "sealed", "LOGIN");
            connecting(&format!(
                "postgres://sealed:{}@{}/lockkit",
                PgServer::PASSWORD,
                server.addr()
            ))
        },
    );
    table.row(
        "the file of the authority is not there",
        says("No such file", "").of("/no/ca.pem"),
        "Correct the option `sslrootcert`.",
        || {
            connecting(&format!(
                "{}?sslmode=verify-full&sslrootcert=/no/ca.pem",
                server.url()
            ))
        },
    );
    table.row(
        "the URL names several servers",
        says("several servers", "name the one that has the locks").of("a,b"),
        "Give the primary's address.",
        || connecting("postgres://u:canary@a,b/app"),
    );
    table.row(
        "no connection is allowed to the client",
        says("not between 1 and 10,000", "").of("`max_connections`"),
        "Take at least 1.",
        || connecting(&format!("{}?max_connections=0", server.url())),
    );
    table.row(
        "a semaphore has other permits",
        says("with 2 permits, not 3", "ask for the same number everywhere").of("`pair`"),
        "Use one size.",
        || beside_two(&made(server, "sizes"), 3),
    );
    table.row(
        "a semaphore with too many permits",
        says("1001 is more than the 1000", "ask for fewer").of("`permits`"),
        "Take fewer permits, or another backend.",
        || beside_two(&made(server, "many"), 1_001),
    );
    table.row(
        "the server has died while its client was connected",
        says("refused", "connects again by itself"),
        "Start it; the client connects by itself.",
        || {
            let dead = PgServer::plain().unwrap();
            let url = format!("{}?op_timeout=1s&connect_timeout=1s", dead.url());
            meanwhile(&url, |_| dead.kill().unwrap())
        },
    );
    table.check();
}
