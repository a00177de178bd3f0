//! The documentation's URLs and config files connect: each is taken from where it stands, validated, and tried on a server of its
//! shape, which a table chooses. So does each option by itself, in a URL and in a config file.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit::{Error, LockClient, LockConfig, Result};
use lockkit_testbed::{
    Certificates,
    etcd::{self, EtcdCluster, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisSentinels, RedisServer},
    skipped,
    zookeeper::{self, ZkEnsemble, ZkServer},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

const SCHEMES: &[&str] = &[
    "memory",
    "file",
    "redis",
    "rediss",
    "redis+unix",
    "redlock",
    "zk",
    "mysql",
    "etcd",
    "postgres",
    "postgresql",
];

/// A kind of deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Server {
    Memory,
    File,
    /// A master and a replica.
    Redis,
    RedisTls,
    /// By way of its socket.
    RedisSocket,
    Sentinels,
    Redlock,
    RedlockTls,
    Zk,
    ZkTls,
    Etcd,
    /// With users and their rights.
    EtcdUsers,
    EtcdTls,
    Mysql,
    Postgres,
    /// By way of its socket.
    PostgresSocket,
}

/// Each shape in the documentation, with the server to try it on. The options that every backend has are no part of a shape.
const SHAPES: &[(&str, Server)] = &[
    ("memory:", Server::Memory),
    ("file:///path", Server::File),
    ("file:///path?poll", Server::File),
    ("redis://host", Server::Redis),
    ("redis://host?replicas&replicas_timeout", Server::Redis),
    ("redis://user@host/path", Server::Redis),
    ("redis://user@host/path?replicas&replicas_timeout", Server::Redis),
    ("rediss://user@host?ca", Server::RedisTls),
    ("redis+unix:///path", Server::RedisSocket),
    ("redis+unix://user@/path", Server::RedisSocket),
    ("redis+unix://user@/path?db", Server::RedisSocket),
    ("redis://hosts?sentinel", Server::Sentinels),
    ("redis://hosts?replicas&sentinel", Server::Sentinels),
    ("redis://user@hosts/path?sentinel", Server::Sentinels),
    ("redlock://hosts", Server::Redlock),
    ("redlock://hosts?max_ttl", Server::Redlock),
    ("redlock://user@hosts", Server::Redlock),
    ("redlock://user@hosts/path", Server::Redlock),
    ("redlock://user@hosts/path?max_ttl", Server::Redlock),
    ("zk://host", Server::Zk),
    ("zk://hosts", Server::Zk),
    ("zk://hosts/path", Server::Zk),
    ("zk://user@hosts/path", Server::Zk),
    ("zk://user@hosts/path?ca&cert&key&tls", Server::ZkTls),
    ("etcd://hosts", Server::Etcd),
    ("etcd://user@hosts/path", Server::EtcdUsers),
    ("etcd://hosts/path?ca&cert&key&tls", Server::EtcdTls),
    ("mysql://host/path", Server::Mysql),
    ("mysql://user@host/path", Server::Mysql),
    ("mysql://user@host/path?mode", Server::Mysql),
    ("mysql://user@host/path?mode&tls", Server::Mysql),
    ("mysql://user@host/path?ca&tls", Server::Mysql),
    ("mysql://user@host/path?socket", Server::Mysql),
    ("postgres://host/path", Server::Postgres),
    ("postgres://user@host/path", Server::Postgres),
    ("postgresql://user@host/path", Server::Postgres),
    ("postgres://user@host/path?sslmode&sslrootcert", Server::Postgres),
    ("postgres://user@socket/path", Server::PostgresSocket),
];

const EVERYWHERE: &[&str] = &[
    "ttl=20s",
    "wait=1m%2030s",
    "max_hold=1h",
    "op_timeout=4s",
    "connect_timeout=10s",
    "namespace=billing",
    "label=me",
    "local_handoffs=0",
];

/// The options of each backend, none of which is missing, each with what it needs besides and no more.
const OPTIONS: &[(&str, Server, &str, &[&str])] = &[
    ("memory:", Server::Memory, "", &[]),
    ("file:///path", Server::File, "file", &["poll=50ms"]),
    (
        "redis://host",
        Server::Redis,
        "redis",
        &["replicas=1", "replicas_timeout=2s"],
    ),
    (
        "rediss://host",
        Server::RedisTls,
        "redis",
        &["ca=F", "ca=F&cert=F&key=F"],
    ),
    ("redis+unix:///path", Server::RedisSocket, "redis", &["db=2"]),
    (
        "redis://host,other",
        Server::Sentinels,
        "redis",
        &["sentinel=main"],
    ),
    (
        "redlock://host,other,third",
        Server::Redlock,
        "redlock",
        &["max_ttl=2m", "master_timeout=1s", "durable=true", "tls=false"],
    ),
    (
        "redlock://host,other,third",
        Server::RedlockTls,
        "redlock",
        &["tls=true&ca=F", "tls=true&ca=F&cert=F&key=F"],
    ),
    (
        "zk://host",
        Server::Zk,
        "zk",
        &[
            "nodes=mutex",
            "nodes=readwrite",
            "nodes=simple",
            "session_timeout=12s",
            "tick_time=1s",
            "access=everyone",
            "parents=persistent",
            "tls=off",
        ],
    ),
    (
        "zk://host",
        Server::ZkTls,
        "zk",
        &["tls=unverified&cert=F&key=F", "tls=verify&ca=F&cert=F&key=F"],
    ),
    ("etcd://host", Server::Etcd, "etcd", &["tls=off"]),
    (
        "etcd://host",
        Server::EtcdTls,
        "etcd",
        &["tls=unverified&cert=F&key=F", "tls=verify&ca=F&cert=F&key=F"],
    ),
    (
        "mysql://me@host/app",
        Server::Mysql,
        "mysql",
        &[
            "mode=lease",
            "mode=for_update",
            "schema=auto",
            "max_connections=5",
            "socket=F",
            "public_key=never",
            "tls=unverified",
            "tls=verify&ca=F",
            "tls=verify&ca=F&cert=F&key=F",
        ],
    ),
    (
        "postgres://me@host/app",
        Server::Postgres,
        "postgres",
        &[
            "schema=auto",
            "max_connections=5",
            "socket=F",
            "sslmode=prefer",
            "sslmode=require",
            "sslmode=verify-ca&sslrootcert=F",
            "sslmode=verify-full&sslrootcert=F",
            "sslmode=verify-full&sslrootcert=F&sslcert=F&sslkey=F",
        ],
    ),
];

/// A URL or a config file.
struct Shown {
    place: String,
    /// With everything that the config file has as parameters.
    url: String,
    /// The config file, if it is one.
    file: Option<toml::Table>,
}

/// Every URL and config file of the user's documentation.
fn shown() -> Vec<Shown> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for place in ["README.md", "docs", "src"] {
        let path = root.join(place);
        if path.is_file() {
            find(place, &fs::read_to_string(path).unwrap(), &mut found);
            continue;
        }
        for file in fs::read_dir(path).unwrap() {
            let path = file.unwrap().path();
            let place = format!("{place}/{}", path.file_name().unwrap().display());
            // Its URLs are those of errors, and have placeholders.
            if place == "docs/errors.md" {
                continue;
            }
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("md") => find(&place, &fs::read_to_string(&path).unwrap(), &mut found),
                Some("rs") => find(&place, &rustdoc(&fs::read_to_string(&path).unwrap()), &mut found),
                _ => {}
            }
        }
    }
    found
}

/// The documentation in a source file, each line where it is.
fn rustdoc(source: &str) -> String {
    let lines = source.lines().map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///")
            .or(line.strip_prefix("//!"))
            .unwrap_or("")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn find(place: &str, text: &str, found: &mut Vec<Shown>) {
    let mut prose = text.to_owned();
    for (start, end) in [("```toml\n", "```"), ("r#\"\n", "\"#")] {
        for block in text.split(start).skip(1) {
            let block = block.split(end).next().unwrap();
            if !block.lines().any(|line| line.trim_start().starts_with("url = ")) {
                continue;
            }
            // What is wrong with it as a config is told by reading it as one.
            let file: toml::Table = toml::from_str(block).unwrap_or_else(|error| panic!("{place}: {error}"));
            found.push(Shown {
                place: place.to_owned(),
                url: as_url(&file),
                file: Some(file),
            });
            prose = prose.replace(block, &"\n".repeat(block.matches('\n').count()));
        }
    }
    for (number, line) in prose.lines().enumerate() {
        let place = format!("{place}:{}", number + 1);
        for url in urls_in(line) {
            let expanded = expanded(&url);
            found.extend(expanded.into_iter().map(|url| Shown {
                place: place.clone(),
                url,
                file: None,
            }));
        }
    }
}

/// A scheme by itself, as in `redis:` or `redis://…`, is not among them.
fn urls_in(line: &str) -> Vec<String> {
    let mut urls = Vec::new();
    for (colon, _) in line.match_indices(':') {
        let before = &line[..colon];
        let is_of_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_+".contains(byte);
        let length = before.bytes().rev().take_while(is_of_word).count();
        let scheme = &before[colon - length..];
        let rest = &line[colon + 1..];
        if !SCHEMES.contains(&scheme) || rest.starts_with(':') {
            continue;
        }
        let end = rest.find(|c: char| c.is_whitespace() || "`\"'<>|)".contains(c));
        let rest = rest[..end.unwrap_or(rest.len())].trim_end_matches([',', '.', ';', ':']);
        let address = rest.trim_start_matches('/');
        if scheme == "memory" || !(address.is_empty() || address.starts_with('…')) {
            urls.push(format!("{scheme}:{rest}"));
        }
    }
    urls
}

/// The URLs that a form such as `redis://[user@]host[:port],…` stands for: with all that may be left out, and without.
fn expanded(url: &str) -> Vec<String> {
    if !url.contains('[') || url.contains("[:") && url.contains("::") {
        return vec![url.to_owned()];
    }
    let mut depth = 0;
    let mut bare = String::new();
    for c in url.chars() {
        depth += i32::from(c == '[');
        if depth == 0 {
            bare.push(c);
        }
        depth -= i32::from(c == ']');
    }
    let full = url.replace(['[', ']'], "").replace(":port", ":7001");
    let mut forms = vec![bare, full];
    for form in &mut forms {
        *form = form.replace(",…", ",other:7002,third:7003");
        if form.starts_with("red") {
            *form = form.replace("/database", "/3");
        }
    }
    forms
}

/// The config file as a URL.
fn as_url(file: &toml::Table) -> String {
    let mut parameters = Vec::new();
    let mut url = String::new();
    let mut take = |key: &str, value: &toml::Value| match value {
        toml::Value::String(value) if key == "url" => url.clone_from(value),
        toml::Value::String(value) => {
            parameters.push(format!("{key}={}", utf8_percent_encode(value, NON_ALPHANUMERIC)));
        }
        toml::Value::Integer(number) => parameters.push(format!("{key}={number}")),
        toml::Value::Boolean(flag) => parameters.push(format!("{key}={flag}")),
        other => panic!("no option is like {other:?}"),
    };
    for (key, value) in file {
        match value {
            toml::Value::Table(section) => section.iter().for_each(|(key, value)| take(key, value)),
            value => take(key, value),
        }
    }
    if parameters.is_empty() {
        return url;
    }
    let between = if url.contains('?') { '&' } else { '?' };
    format!("{url}{between}{}", parameters.join("&"))
}

/// The parts of a URL: scheme, authority, path with its slash, and parameters. A Redlock URL has all of its masters in the authority.
fn parts(url: &str) -> (&str, &str, &str, &str) {
    let (before, query) = url.split_once('?').unwrap_or((url, ""));
    let (scheme, rest) = before.split_once(':').unwrap();
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let slash = if scheme == "redlock" { None } else { rest.find('/') };
    let (authority, path) = rest.split_at(slash.unwrap_or(rest.len()));
    (scheme, authority, path, query)
}

fn shape(url: &str) -> String {
    let (scheme, authority, path, query) = parts(url);
    let is_common = |key: &str| {
        EVERYWHERE
            .iter()
            .any(|option| option.split('=').next() == Some(key))
    };
    let keys: BTreeSet<&str> = query
        .split('&')
        .filter_map(|parameter| parameter.split_once('='))
        .map(|(key, _)| key)
        .filter(|key| !is_common(key))
        .collect();
    let user = if authority.contains('@') { "user@" } else { "" };
    let host = authority.rsplit('@').next().unwrap();
    let host = if host.is_empty() {
        ""
    } else if authority.contains(',') {
        "hosts"
    } else if host.starts_with("%2F") {
        "socket"
    } else {
        "host"
    };
    let has_path = if scheme == "redlock" {
        authority.contains('/')
    } else {
        !path.is_empty()
    };
    let slashes = if scheme == "memory" { "" } else { "//" };
    let path = if has_path { "/path" } else { "" };
    let mut shape = format!("{scheme}:{slashes}{user}{host}{path}");
    if !keys.is_empty() {
        shape += "?";
        shape += &keys.into_iter().collect::<Vec<_>>().join("&");
    }
    shape
}

fn server_for(shown: &Shown) -> Server {
    let shape = shape(&shown.url);
    let known = SHAPES.iter().find(|(known, _)| *known == shape);
    let Some((_, server)) = known else {
        panic!(
            "{}: {} has the shape {shape}, for which no server is known",
            shown.place, shown.url
        );
    };
    *server
}

/// A deployment that runs, and what to put into a URL in the place of what is there.
struct Home {
    hosts: Vec<String>,
    login: Option<String>,
    path: Option<String>,
    socket: Option<String>,
    certificates: Arc<Certificates>,
    /// To which the users of a URL are made known.
    masters: Vec<RedisServer>,
    servers: Vec<Box<dyn Any>>,
}

impl Home {
    fn of(server: Server, masters: usize) -> Self {
        let certificates = Arc::new(Certificates::generate().unwrap());
        let mut home = Self {
            hosts: Vec::new(),
            login: None,
            path: None,
            socket: None,
            certificates: certificates.clone(),
            masters: Vec::new(),
            servers: Vec::new(),
        };
        match server {
            Server::Memory => {}
            Server::File => {
                let directory = tempfile::tempdir().unwrap();
                home.path = Some(format!("{}/locks", directory.path().display()));
                home.keep(directory);
            }
            Server::Redis => {
                let master = RedisServer::plain().unwrap();
                home.keep(RedisServer::builder().replica_of(master.addr()).start().unwrap());
                home.masters.push(master);
            }
            Server::RedisSocket => return home.at_a_socket(),
            Server::Redlock => {
                let durable = || RedisServer::builder().append_only(redis::Fsync::Always).start();
                home.masters.extend((0..masters).map(|_| durable().unwrap()));
            }
            Server::RedisTls | Server::RedlockTls => {
                let secure = || RedisServer::builder().tls(&certificates).start();
                home.masters.extend((0..masters).map(|_| secure().unwrap()));
            }
            Server::Sentinels => {
                let group = RedisSentinels::start().unwrap();
                home.hosts = group.sentinels().iter().map(|s| s.addr().to_string()).collect();
                for server in group.servers() {
                    let_in(server, "locker:secret");
                    let_in(server, "user:password");
                }
                home.keep(group);
            }
            Server::Zk => {
                let ensemble = ZkEnsemble::start().unwrap();
                home.hosts = ensemble.addrs().iter().map(ToString::to_string).collect();
                home.keep(ensemble);
            }
            Server::ZkTls => {
                let server = ZkServer::builder().tls(&certificates).start().unwrap();
                home.hosts.push(server.secure_addr().unwrap().to_string());
                home.keep(server);
            }
            Server::Etcd => {
                let server = EtcdServer::plain().unwrap();
                home.hosts.push(server.addr().to_string());
                home.keep(server);
            }
            Server::EtcdUsers => {
                let cluster = EtcdCluster::start_with(EtcdServer::builder().authorise("services/")).unwrap();
                home.account_of(&cluster.url());
                home.hosts = cluster.addrs().iter().map(ToString::to_string).collect();
                home.path = Some("/services".into());
                home.keep(cluster);
            }
            Server::EtcdTls => {
                let builder = EtcdServer::builder().tls(&certificates).client_certificates();
                let server = builder.start().unwrap();
                home.hosts.push(server.addr().to_string());
                home.keep(server);
            }
            Server::Mysql => {
                let files = [
                    format!("--ssl-ca={}", certificates.authority().display()),
                    format!("--ssl-cert={}", certificates.server().display()),
                    format!("--ssl-key={}", certificates.server_key().display()),
                ];
                let server = MySql::start(Flavour::MariaDb, &files.each_ref().map(String::as_str)).unwrap();
                home.account_of(&server.url());
                let socket = server.process().directory().join("socket");
                home.socket = Some(socket.display().to_string());
                home.keep(server);
            }
            Server::Postgres | Server::PostgresSocket => {
                let pg = PgServer::builder().tls(&certificates).start().unwrap();
                home.socket = Some(pg.directory().display().to_string());
                home.account_of(&if server == Server::Postgres {
                    pg.url()
                } else {
                    pg.socket_url()
                });
                home.keep(pg);
            }
        }
        home.hosts
            .extend(home.masters.iter().map(|master| master.addr().to_string()));
        home
    }

    /// Has a Redis that is reached by its socket alone.
    fn at_a_socket(mut self) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("redis.sock").display().to_string();
        let server = RedisServer::builder().directive("unixsocket", &[&socket]);
        self.masters.push(server.start().unwrap());
        self.path = Some(socket);
        self.keep(directory);
        self
    }

    fn keep(&mut self, server: impl Any) {
        self.servers.push(Box::new(server));
    }

    /// Takes login, host and path from this URL.
    fn account_of(&mut self, url: &str) {
        let (_, authority, path, _) = parts(url);
        let (login, host) = authority.rsplit_once('@').unwrap();
        self.login = Some(login.to_owned());
        self.hosts = vec![host.to_owned()];
        self.path = (!path.is_empty()).then(|| path.to_owned());
    }

    /// The value of this option here, if it names a thing of the server's.
    fn value(&self, key: &str) -> Option<String> {
        let certificates = &self.certificates;
        let file = match key {
            "ca" | "sslrootcert" => certificates.authority(),
            "cert" | "sslcert" => certificates.client(),
            "key" | "sslkey" => certificates.client_key(),
            "socket" => return self.socket.clone(),
            "sentinel" => return Some(RedisSentinels::MASTER_NAME.to_owned()),
            // This machine may be slow.
            "replicas_timeout" => return Some("5s".to_owned()),
            _ => return None,
        };
        Some(file.display().to_string())
    }

    /// The URL with this server's hosts, and with its account and files where it has its own.
    fn url(&self, url: &str) -> String {
        let (scheme, authority, path, query) = parts(url);
        if scheme == "memory" {
            return url.to_owned();
        }
        let path = match &self.path {
            Some(path) => path.clone(),
            // The nodes of one user are nothing to another.
            None if scheme == "zk" && !path.is_empty() => format!("{path}-{}", next()),
            None => path.to_owned(),
        };
        let login = authority.rsplit_once('@').map(|(login, _)| login);
        let login = self.login.as_deref().or(login).filter(|_| scheme != "redlock");
        let hosts = if scheme == "redlock" {
            authority
        } else {
            authority.rsplit('@').next().unwrap()
        };
        let mut members = Vec::new();
        for (n, member) in hosts.split(',').enumerate() {
            // As many as there are: the rest of what is shown would be more of the same.
            let Some(host) = self.hosts.get(n) else { break };
            let login = member
                .rsplit_once('@')
                .map_or(String::new(), |(login, _)| format!("{login}@"));
            let database = member
                .split_once('/')
                .map_or(String::new(), |(_, database)| format!("/{database}"));
            if let Some(master) = self.masters.get(n) {
                let_in(master, login.trim_end_matches('@'));
            }
            members.push(format!("{login}{host}{database}"));
        }
        for (master, login) in self.masters.iter().zip(login) {
            let_in(master, login);
        }
        let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
        let mut parameters: Vec<_> = parameters
            .map(|parameter| {
                let (key, value) = parameter.split_once('=').unwrap();
                let value = self.value(key).unwrap_or_else(|| value.to_owned());
                format!("{key}={value}")
            })
            .collect();
        if query.contains("tls=verify") && !query.contains("ca=") {
            parameters.push(format!("ca={}", self.certificates.authority().display()));
        }
        let login = login.map_or(String::new(), |login| format!("{login}@"));
        let question = if parameters.is_empty() { "" } else { "?" };
        let (members, parameters) = (members.join(","), parameters.join("&"));
        format!("{scheme}://{login}{members}{path}{question}{parameters}")
    }

    /// The config file with this server's hosts, account and files.
    fn config(&self, file: &toml::Table) -> LockConfig {
        let mut file = file.clone();
        for (key, value) in &mut file {
            match value {
                toml::Value::String(url) if key == "url" => *url = self.url(url),
                toml::Value::Table(section) => {
                    if section.get("tls").and_then(toml::Value::as_str) == Some("verify") {
                        section.insert("ca".into(), String::new().into());
                    }
                    for (key, value) in section {
                        if let Some(here) = self.value(key) {
                            *value = here.into();
                        }
                    }
                }
                _ => {}
            }
        }
        file.try_into().unwrap()
    }
}

/// Makes a user known, `name:password` or `:password`.
fn let_in(server: &RedisServer, login: &str) {
    let Some((name, password)) = login.split_once(':') else {
        return;
    };
    let name = if name.is_empty() { "default" } else { name };
    let password = format!(">{password}");
    let rules = ["ACL", "SETUSER", name, "on", &password, "~*", "&*", "+@all"];
    server.cli(&rules).unwrap();
}

/// The client has these options and takes a lock.
async fn works(place: &str, meant: &str, client: Result<LockClient>) {
    let meant = LockConfig::from_url(meant).unwrap_or_else(|error| panic!("{place}: {error}"));
    let client = client.unwrap_or_else(|error| panic!("{place}: {error}: {error:?}"));
    let namespace = meant.namespace.as_deref().unwrap_or("lockkit");
    assert_eq!(&*client.info().namespace, namespace, "{place}");
    let lock = client.lock(format!("orders/{}", next())).unwrap();
    assert_eq!(lock.options().ttl, meant.ttl, "{place}");
    assert_eq!(lock.options().label.as_deref(), meant.label.as_deref(), "{place}");
    let guard = lock.acquire().await;
    let guard = guard.unwrap_or_else(|error| panic!("{place}: {error}: {error:?}"));
    assert!(guard.is_held(), "{place}");
    guard.release().await.unwrap();
    client.close(Duration::from_secs(10)).await.unwrap();
}

/// A number that nobody else has here. Clients have to agree on some options only if they share a lock.
fn next() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(42);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// As many masters as a Redlock URL names, else one.
fn masters_in(url: &str) -> usize {
    if url.starts_with("redlock") {
        parts(url).1.split(',').count()
    } else {
        1
    }
}

/// Tries what is shown with these schemes, and all of their options.
async fn connect_as_shown(schemes: &[&str]) {
    let mut homes: BTreeMap<(Server, usize), Home> = BTreeMap::new();
    let mut tried = 0;
    for shown in shown() {
        let scheme = parts(&shown.url).0;
        if !schemes.contains(&scheme) {
            continue;
        }
        let server = server_for(&shown);
        let masters = masters_in(&shown.url);
        let home = homes
            .entry((server, masters))
            .or_insert_with(|| Home::of(server, masters));
        let url = home.url(&shown.url);
        let place = format!("{}: {} as {url}", shown.place, shown.url);
        let client = match &shown.file {
            Some(file) => home.config(file).connect().await,
            None => lockkit::connect(&url).await,
        };
        works(&place, &url, client).await;
        // The masters remember their first `max_ttl`, and the password of their default user.
        if scheme == "redlock" {
            homes.remove(&(server, masters));
        }
        tried += 1;
    }
    assert!(tried > 0, "nothing is shown of {schemes:?}");

    for (url, server, section, own) in OPTIONS {
        if !schemes.contains(&parts(url).0) {
            continue;
        }
        let masters = masters_in(url);
        let is_special = matches!(
            server,
            Server::RedisTls | Server::RedlockTls | Server::ZkTls | Server::EtcdTls | Server::Sentinels
        );
        let everywhere: &[&str] = if is_special { &[] } else { EVERYWHERE };
        for parameters in own.iter().chain(everywhere) {
            let home = homes
                .entry((*server, masters))
                .or_insert_with(|| Home::of(*server, masters));
            let shown = format!("{url}?{parameters}");
            let here = home.url(&shown);
            works(&here, &here, lockkit::connect(&here).await).await;
            let file = as_file(&shown, section);
            let place = format!("{shown} as a file");
            works(&place, &here, home.config(&file).connect().await).await;
            // The masters remember it.
            if parameters.starts_with("max_ttl") {
                homes.remove(&(*server, masters));
            }
        }
    }
}

/// The URL as a config file, with its parameters in the tables.
fn as_file(url: &str, section: &str) -> toml::Table {
    let (address, query) = url.split_once('?').unwrap();
    let mut file = toml::Table::new();
    file.insert("url".to_owned(), address.into());
    let mut own = toml::Table::new();
    for parameter in query.split('&') {
        let (key, value) = parameter.split_once('=').unwrap();
        let value = value.replace("%20", " ");
        let value: toml::Value = match (value.parse::<i64>(), value.parse::<bool>()) {
            (Ok(number), _) => number.into(),
            (_, Ok(flag)) => flag.into(),
            _ => value.into(),
        };
        let table = if EVERYWHERE
            .iter()
            .any(|option| option.starts_with(&format!("{key}=")))
        {
            &mut file
        } else {
            &mut own
        };
        table.insert(key.to_owned(), value);
    }
    if !own.is_empty() {
        file.insert(section.to_owned(), own.into());
    }
    file
}

#[test]
fn everything_shown_is_valid_and_its_shape_is_known() {
    let shown = shown();
    assert!(shown.iter().any(|shown| shown.file.is_some()));
    let mut shapes = BTreeSet::new();
    for shown in &shown {
        if let Err(error) = LockConfig::from_url(&shown.url) {
            panic!("{}: {}: {error}", shown.place, shown.url);
        }
        if let Some(file) = &shown.file {
            let read: std::result::Result<LockConfig, _> = file.clone().try_into();
            assert!(read.is_ok(), "{}: {read:?}", shown.place);
        }
        server_for(shown);
        shapes.insert(shape(&shown.url));
    }
    let unseen: Vec<_> = SHAPES
        .iter()
        .filter(|(known, _)| !shapes.contains(*known))
        .collect();
    assert!(unseen.is_empty(), "no page shows {unseen:?}");
}

/// The tables above leave out no option.
#[test]
fn every_option_is_tried() {
    for scheme in SCHEMES {
        let backend = |scheme: &'static str| match scheme {
            "rediss" | "redis+unix" => "redis",
            "postgresql" => "postgres",
            other => other,
        };
        let entries = OPTIONS
            .iter()
            .filter(|(url, ..)| backend(parts(url).0) == backend(scheme));
        let options: Vec<_> = entries.flat_map(|(.., own)| own.iter()).collect();
        let tried: BTreeSet<&str> = options
            .into_iter()
            .chain(EVERYWHERE)
            .flat_map(|option| option.split('&'))
            .filter_map(|option| option.split('=').next())
            .collect();
        let address = match *scheme {
            "memory" => "",
            "redlock" => "//x,y,z",
            "file" | "redis+unix" => "///x",
            _ => "//x/1",
        };
        let known = match LockConfig::from_url(&format!("{scheme}:{address}?unknown=1")) {
            Err(Error::InvalidUrl { reason, .. }) => reason,
            other => panic!("{scheme}: {other:?}"),
        };
        let (_, known) = known.split_once("known are ").unwrap();
        let known: BTreeSet<&str> = known.split(", ").collect();
        assert_eq!(tried, known, "{scheme}");
    }
}

#[test]
fn the_tables_of_mysql_are_shown_as_they_are_made() {
    let page = fs::read_to_string("docs/mysql.md").unwrap();
    for mode in [lockkit::mysql::Mode::ForUpdate, lockkit::mysql::Mode::Lease] {
        let ddl = lockkit::mysql::ddl(mode);
        assert!(
            page.contains(&format!("```sql\n{}\n```", ddl.trim_end())),
            "{ddl}"
        );
    }
}

#[tokio::test]
async fn memory_and_files_connect_as_shown() {
    connect_as_shown(&["memory", "file"]).await;
}

#[tokio::test]
async fn redis_connects_as_shown() {
    if !skipped("redis", redis::missing()) {
        connect_as_shown(&["redis", "rediss", "redis+unix"]).await;
    }
}

#[tokio::test]
async fn redlock_connects_as_shown() {
    if !skipped("redis", redis::missing()) {
        connect_as_shown(&["redlock"]).await;
    }
}

#[tokio::test]
async fn zookeeper_connects_as_shown() {
    if !skipped("zk", zookeeper::missing()) {
        connect_as_shown(&["zk"]).await;
    }
}

#[tokio::test]
async fn etcd_connects_as_shown() {
    if !skipped("etcd", etcd::missing()) {
        connect_as_shown(&["etcd"]).await;
    }
}

#[tokio::test]
async fn mysql_connects_as_shown() {
    if !skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        connect_as_shown(&["mysql"]).await;
    }
}

#[tokio::test]
async fn postgres_connects_as_shown() {
    if !skipped("postgres", postgres::missing()) {
        connect_as_shown(&["postgres", "postgresql"]).await;
    }
}
