//! PostgreSQL.

use lockkit::LockClient;
use lockkit_testbed::{
    Certificates, Port,
    postgres::{self, PgServer},
    redis::RedisServer,
    skipped,
};

use super::{Table, connecting, says, trying};
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
        rights,
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
        "Connect as a role that may, or run the statements.",
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
    table.check();
}
