//! Servers that repeat what they were sent, the password included.

use std::net::{Ipv4Addr, SocketAddr};

use lockkit_conformance::Traces;
use lockkit_core::{Error, LockClient, spi::chain};
use lockkit_redis::{RedisConfig, RedlockBackend, RedlockConfig};
use lockkit_testbed::{Port, hangs_up, own_address, redis::RedisServer};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::common::{LONG, connect, no_server, within};

const PASSWORD: &str = "canary p%ss";
const ENCODED: &str = "canary%20p%25ss";

/// The answer of a rogue to a command.
type Answer = fn(&str, SocketAddr) -> String;

/// A server that answers each command as it likes. It hears each as one line.
async fn rogue(answer: Answer) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut heard = vec![0; 64 * 1024];
                loop {
                    let length = client.read(&mut heard).await?;
                    if length == 0 {
                        return Ok::<_, std::io::Error>(());
                    }
                    for command in commands(&heard[..length]) {
                        let reply = answer(&command, addr);
                        client.write_all(reply.as_bytes()).await?;
                    }
                }
            });
        }
    });
    addr
}

/// Splits what a client sent at once, without the lengths.
fn commands(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let begins = |part: &str| part.starts_with('*');
    let mut commands = Vec::new();
    for part in text.split("\r\n").filter(|part| !part.starts_with('$')) {
        if begins(part) {
            commands.push(Vec::new());
        } else if let Some(command) = commands.last_mut() {
            command.push(part);
        }
    }
    let commands = commands
        .into_iter()
        .map(|words| words.join(" ").trim().to_owned());
    commands.collect()
}

/// It refuses the login, and says what it was.
fn refuses(command: &str, _: SocketAddr) -> String {
    format!("-WRONGPASS {command}, {ENCODED}, {command:?}\r\n")
}

fn check(error: &Error, traces: &Traces) {
    let text = format!("{error} {error:?} {error:#?} {}", chain(error));
    assert!(text.contains("***"), "it was not repeated: {text}");
    for text in [text, traces.text()] {
        assert!(!text.contains("canary"), "{text}");
    }
}

#[tokio::test]
async fn a_login_that_is_repeated_is_not_shown() {
    let addr = rogue(refuses).await;
    let traces = Traces::default();
    let _recording = tracing::subscriber::set_default(traces.clone());
    for user in ["", "app"] {
        let config = RedisConfig::new(format!("redis://{user}:{ENCODED}@{addr}"));
        let error = within(LONG, "an end", connect(config)).await.err();
        check(&error.expect("it is refused"), &traces);
    }
    let others = [rogue(refuses).await, rogue(refuses).await];
    let masters = [addr, others[0], others[1]].map(|addr| format!("app:{ENCODED}@{addr}"));
    let config = RedlockConfig::new(format!("redlock://{}", masters.join(",")));
    let error = within(LONG, "an end", RedlockBackend::connect(config)).await;
    check(&error.expect_err("it is refused"), &traces);
}

/// The sentinel names itself as the master.
#[tokio::test]
async fn a_login_that_a_sentinels_master_repeats_is_not_shown() {
    let addr = rogue(|command, addr| match command.split(' ').next() {
        Some("HELLO") if command.contains("AUTH") => refuses(command, addr),
        Some("HELLO") => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned(),
        Some("SENTINEL") => {
            let port = addr.port().to_string();
            format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
        }
        _ => "+OK\r\n".to_owned(),
    })
    .await;
    let traces = Traces::default();
    let _recording = tracing::subscriber::set_default(traces.clone());
    let mut config = RedisConfig::new(format!("redis://app:{ENCODED}@{addr}"));
    config.sentinel = Some("main".to_owned());
    let error = within(LONG, "an end", connect(config)).await.err();
    check(&error.expect("it is refused"), &traces);
}

/// A sentinel that names a Unix socket.
async fn socket_teller() -> SocketAddr {
    rogue(|command, _| match command.split(' ').next() {
        Some("HELLO") => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned(),
        Some("SENTINEL") => "*2\r\n$15\r\n/run/redis.sock\r\n$4\r\n6379\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    })
    .await
}

/// The login would go to whoever listens at that socket, and without TLS, also where the URL wants it.
#[tokio::test]
async fn a_sentinel_that_names_a_unix_socket_is_refused() {
    let addr = socket_teller().await;
    let mut config = RedisConfig::new(format!("redis://app:{ENCODED}@{addr}"));
    config.sentinel = Some("main".to_owned());
    let error = within(LONG, "an end", connect(config)).await.err();
    let error = error.expect("it is refused");
    let text = chain(&error);
    assert!(!error.is_transient(), "{text}");
    assert!(
        text.contains("names a path in place of the master's host"),
        "{text}"
    );
}

/// They may come back, and name the master.
#[tokio::test]
async fn a_rogue_sentinel_does_not_speak_for_those_that_are_down() {
    let rogue = socket_teller().await.to_string();
    let down = [Port::reserve().unwrap(), Port::reserve().unwrap()];
    let [one, two] = down.each_ref().map(|port| port.addr().to_string());
    for sentinels in [[&one, &two, &rogue], [&rogue, &one, &two]] {
        let sentinels = sentinels.map(String::as_str).join(",");
        let mut config = RedisConfig::new(format!("redis://{sentinels}"));
        config.sentinel = Some("main".to_owned());
        let error = within(LONG, "an end", connect(config)).await.err();
        let error = error.expect("nobody names the master");
        assert!(error.is_transient(), "{}", chain(&error));
    }
}

/// Passes on all but the calls of scripts that begin with a hash.
async fn repeats_later(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = TcpStream::connect(server).await?.into_split();
                let (say, mut said) = tokio::sync::mpsc::unbounded_channel::<String>();
                tokio::spawn(async move {
                    let mut buffer = vec![0; 64 * 1024];
                    loop {
                        tokio::select! {
                            length = from_server.read(&mut buffer) => match length? {
                                0 => return Ok::<_, std::io::Error>(()),
                                length => to_client.write_all(&buffer[..length]).await?,
                            },
                            Some(text) = said.recv() => to_client.write_all(text.as_bytes()).await?,
                        }
                    }
                });
                let mut buffer = vec![0; 64 * 1024];
                loop {
                    let length = from_client.read(&mut buffer).await?;
                    if length == 0 {
                        return Ok::<_, std::io::Error>(());
                    }
                    let commands = commands(&buffer[..length]);
                    if commands.iter().any(|command| command.starts_with("EVALSHA")) {
                        let repeats = format!("-ERR you are the one with {PASSWORD}, {ENCODED}\r\n");
                        let _ = say.send(repeats);
                    } else {
                        to_server.write_all(&buffer[..length]).await?;
                    }
                }
            });
        }
    });
    addr
}

#[tokio::test]
async fn what_is_repeated_later_is_not_shown_either() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    server.cli(&["CONFIG", "SET", "requirepass", PASSWORD]).unwrap();
    let traces = Traces::default();
    let _recording = tracing::subscriber::set_default(traces.clone());
    let addr = repeats_later(server.addr()).await;
    let client: LockClient = connect(RedisConfig::new(format!("redis://:{ENCODED}@{addr}")))
        .await
        .unwrap();
    let lock = client.lock("a").unwrap();
    let error = within(LONG, "an end", lock.try_acquire()).await.err();
    check(&error.expect("it is refused"), &traces);
    let error = within(LONG, "an end", client.inspect("a")).await.err();
    check(&error.expect("it is refused"), &traces);
}

/// What goes to an address of this machine's own stays on it, too, but that is not known.
#[tokio::test]
async fn a_password_beyond_this_host_is_warned_about_once() {
    for (at, of_password) in [(Some(Ipv4Addr::LOCALHOST.into()), 0), (own_address(), 1)] {
        let Some(at) = at else { continue };
        for (login, expected) in [("app:pw@", of_password), ("", 0)] {
            let masters: Vec<_> = (0..3).map(|_| hangs_up(at).unwrap()).collect();
            let warned_by = async |url: String| {
                let traces = Traces::default();
                let _recording = tracing::subscriber::set_default(traces.clone());
                if url.starts_with("redlock") {
                    let connecting = RedlockBackend::connect(RedlockConfig::new(url));
                    connecting.await.expect_err("it hangs up");
                } else {
                    connect(RedisConfig::new(url)).await.map(drop).unwrap_err();
                }
                traces.text().matches("is not encrypted").count()
            };
            let one = format!("redis://{login}{}", masters[0]);
            assert_eq!(warned_by(one).await, expected, "{login}{at}");
            let masters: Vec<_> = masters.iter().map(|addr| format!("{login}{addr}")).collect();
            let several = format!("redlock://{}", masters.join(","));
            assert_eq!(warned_by(several).await, expected, "{login}{at}");
        }
    }
}
