//! Servers that nobody vouches for, and that are after the password.

use std::{
    collections::VecDeque,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_conformance::Traces;
use lockkit_core::{Error, spi::chain};
use lockkit_mysql::{MySqlConfig, PublicKey};
use lockkit_testbed::{
    hangs_up,
    mysql::{Flavour, MySql},
    own_address,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::servers::{Admin, config, connect, cycle, for_each_flavour, name, private, relay, shared};

for_each_flavour! {
    a_login_by_password_is_relayed_as_it_is
    a_key_is_believed_where_the_option_says
    a_marker_that_no_server_gives_is_refused
}

const PASSWORD: &str = "canary p%ss";
pub(crate) const ENCODED: &str = "canary%20p%25ss";
const NONCE: &[u8; 20] = b"abcdefghijklmnopqrst";
/// The rogue's own. It has the private key, too.
const KEY: &[u8] = b"-----BEGIN PUBLIC KEY-----
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAxT5iWD6RznsRRvclXr4j
ROj4lAEAV0shmpAeNxF9/nyeXIe/7Ap4lKbo8D0pGNs0njGfRUu+WuR/pkBc8VKG
5AGn9cQxz4/iwWQkQS5vaPVEaUJkNGuXQYeveieOhJaSykI1SJ1YtQ63B/VLJS95
ZHZFvv75CKds2+Gwv6ZHkP50jZlMqqiiRqainksahSd4q9ugQxuR/40MfYZ2mJA/
EaG9OJ8+vu85e1IhFLMdOo2pYt03RBwVpUSeoPY2NhYDZsQ2jkZz1jHD8yMjp1LV
DOnyg+z9lDdFECRHnNFTmbQfWLvTiKrUAcrBZcK0wh3+IJv8SLhv1yCuSCJnUG0R
1wIDAQAB
-----END PUBLIC KEY-----
";
/// The length of what was encrypted with it.
const ENCRYPTED: usize = 256;

/// What a rogue server says: each packet in answer to one of the client's, or all at once.
struct Script {
    is_ahead: bool,
    packets: Vec<Vec<u8>>,
}

fn in_turns(packets: Vec<Vec<u8>>) -> Script {
    Script {
        is_ahead: false,
        packets,
    }
}

fn ahead(packets: Vec<Vec<u8>>) -> Script {
    Script {
        is_ahead: true,
        packets,
    }
}

fn greeting_of(version: u8, plugin: &str) -> Vec<u8> {
    let mut greeting = vec![version];
    greeting.extend(b"8.0.44\0");
    greeting.extend([7, 0, 0, 0]);
    greeting.extend(&NONCE[..8]);
    // All capabilities that a login needs, and not TLS.
    greeting.extend([0, 0x09, 0xa2, 45, 2, 0, 0x08, 0x00, 21]);
    greeting.extend([0; 10]);
    greeting.extend(&NONCE[8..]);
    greeting.push(0);
    greeting.extend(plugin.bytes());
    greeting.push(0);
    greeting
}

pub(crate) fn greeting(plugin: &str) -> Vec<u8> {
    greeting_of(10, plugin)
}

/// The greeting of a rogue that speaks TLS.
pub(crate) fn greeting_with_tls(plugin: &str) -> Vec<u8> {
    let mut greeting = greeting(plugin);
    // The second byte of the capabilities, after both versions, the number of the connection, and half of the nonce with its zero.
    greeting[22] |= 0x08;
    greeting
}

fn switch(plugin: &str) -> Vec<u8> {
    [&[0xfe], plugin.as_bytes(), &[0], NONCE, &[0]].concat()
}

fn key(first: u8) -> Vec<u8> {
    [&[first], KEY].concat()
}

/// A listener that plays this script to each that comes. Returns its address, and the packets that it is sent.
async fn rogue(script: Script) -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let record = seen.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(play(
                client,
                script.is_ahead,
                script.packets.clone().into(),
                record.clone(),
            ));
        }
    });
    (addr, seen)
}

async fn play(
    mut client: TcpStream,
    is_ahead: bool,
    mut script: VecDeque<Vec<u8>>,
    record: Arc<Mutex<Vec<Vec<u8>>>>,
) -> std::io::Result<()> {
    let mut sequence = 0;
    loop {
        while let Some(payload) = script.pop_front() {
            let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
            client.write_all(&[&length[..3], &[sequence]].concat()).await?;
            client.write_all(&payload).await?;
            sequence = sequence.wrapping_add(1);
            if !is_ahead {
                break;
            }
        }
        let mut header = [0; 4];
        client.read_exact(&mut header).await?;
        let length = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let mut payload = vec![0; length as usize];
        client.read_exact(&mut payload).await?;
        sequence = header[3].wrapping_add(1);
        record.lock().unwrap().push(payload);
        if script.is_empty() && !is_ahead {
            let refusal = b"\xff\x15\x04#28000Access denied";
            script.push_back(refusal.to_vec());
        }
    }
}

/// Returns what in these packets has the password, or would have been of use to learn it.
pub(crate) fn leaks(packets: &[Vec<u8>]) -> Vec<&'static str> {
    let bytes = packets.concat();
    let has = |part: &[u8]| bytes.windows(part.len()).any(|found| found == part);
    let masked: Vec<_> = PASSWORD
        .bytes()
        .zip(NONCE.iter().cycle())
        .map(|(byte, mask)| byte ^ mask)
        .collect();
    let found = [
        ("the password", has(PASSWORD.as_bytes())),
        ("the password, encoded", has(ENCODED.as_bytes())),
        ("the password, masked", has(&masked)),
        (
            "the password, encrypted",
            packets.iter().any(|packet| packet.len() >= ENCRYPTED),
        ),
        (
            "a request for a key",
            packets.iter().any(|packet| packet.len() == 1),
        ),
    ];
    let leaks = found.into_iter().filter(|(_, is_there)| *is_there);
    leaks.map(|(what, _)| what).collect()
}

async fn login_at(script: Script, public_key: PublicKey) -> (Error, Vec<&'static str>) {
    let (addr, seen) = rogue(script).await;
    let mut config = MySqlConfig::new(format!("mysql://me:{ENCODED}@{addr}/app"));
    config.public_key = public_key;
    let error = timeout(Duration::from_secs(20), connect(config))
        .await
        .expect("an end of the login")
        .expect_err("it is a rogue");
    let text = format!("{} {error:?}", chain(&error));
    assert!(!text.contains("canary"), "{text}");
    let seen = seen.lock().unwrap();
    assert!(seen.len() < 8, "no attempts without end");
    (error, leaks(&seen))
}

#[tokio::test]
async fn no_clear_password_without_tls() {
    for script in [
        in_turns(vec![greeting("mysql_clear_password")]),
        in_turns(vec![
            greeting("mysql_native_password"),
            switch("mysql_clear_password"),
        ]),
        ahead(vec![
            greeting("mysql_native_password"),
            switch("mysql_clear_password"),
        ]),
    ] {
        for public_key in [PublicKey::Local, PublicKey::Always, PublicKey::Never] {
            let script = Script {
                is_ahead: script.is_ahead,
                packets: script.packets.clone(),
            };
            let (error, leaks) = login_at(script, public_key).await;
            assert_eq!(leaks, [""; 0], "{}", chain(&error));
            let text = chain(&error);
            assert!(!error.is_transient() && text.contains("tls=verify"), "{text}");
        }
    }
}

#[tokio::test]
async fn no_password_by_a_strangers_key() {
    let sha = "caching_sha2_password";
    let old = "sha256_password";
    let scripts = || {
        [
            in_turns(vec![greeting(sha), vec![1, 4], key(1)]),
            in_turns(vec![greeting(old), key(1)]),
            in_turns(vec![greeting("mysql_native_password"), switch(old), key(1)]),
            // Unasked for, in the hope that the guard takes a key for the end.
            ahead(vec![greeting(old), key(0)]),
            ahead(vec![greeting(old), key(0xff)]),
            ahead(vec![greeting(sha), vec![1, 4], key(0)]),
            ahead(vec![greeting(sha), vec![1, 3], vec![1, 4], key(0)]),
            // Nor a greeting for something else.
            ahead(vec![greeting_of(0, old), key(1)]),
            ahead(vec![greeting_of(1, old), key(1)]),
            ahead(vec![greeting_of(0xfe, old), key(1)]),
        ]
    };
    for (at, script) in scripts().into_iter().enumerate() {
        let (error, leaks) = login_at(script, PublicKey::Never).await;
        assert_eq!(leaks, [""; 0], "{at}: {}", chain(&error));
    }
    // The judge finds one that is let through.
    let (_, leaks) = login_at(scripts().into_iter().next().unwrap(), PublicKey::Always).await;
    assert_eq!(leaks, ["the password, encrypted", "a request for a key"]);
}

/// There is none to give away, so it asks for the key of whoever wants an answer by that.
#[tokio::test]
async fn who_has_no_password_needs_nobody_to_vouch_for_a_key() {
    let script = vec![
        greeting("mysql_native_password"),
        switch("sha256_password"),
        key(1),
    ];
    let (addr, seen) = rogue(in_turns(script)).await;
    let mut config = MySqlConfig::new(format!("mysql://me@{addr}/app"));
    config.public_key = PublicKey::Never;
    let error = timeout(Duration::from_secs(20), connect(config))
        .await
        .expect("an end of the login")
        .expect_err("it is a rogue");
    let text = chain(&error);
    assert!(text.contains("Access denied"), "{text}");
    assert!(leaks(&seen.lock().unwrap()).contains(&"a request for a key"));
}

#[tokio::test]
async fn a_login_that_is_none_is_an_error() {
    for script in [
        vec![vec![0; 70_000]],
        vec![vec![10]],
        vec![b"\xff\x10\x04Too many connections".to_vec()],
        vec![greeting("mysql_native_password"), vec![1]],
        vec![greeting("caching_sha2_password"), vec![1]],
        vec![greeting("caching_sha2_password"), vec![]],
    ] {
        let (_, leaks) = login_at(in_turns(script), PublicKey::Local).await;
        assert_eq!(leaks, [""; 0]);
    }
}

/// Anybody on the way may cut a packet short, with TLS to come or not.
#[tokio::test]
async fn a_packet_that_is_cut_short_is_an_error() {
    let whole = greeting("caching_sha2_password");
    let refusal = b"\xff\x15\x04#28000".to_vec();
    let cut = |packet: &[u8]| {
        (1..packet.len())
            .map(|length| packet[..length].to_vec())
            .collect::<Vec<_>>()
    };
    for first in [cut(&whole), cut(&refusal)].concat() {
        let (error, leaks) = login_at(in_turns(vec![first.clone()]), PublicKey::Local).await;
        assert_eq!(leaks, [""; 0]);
        assert!(
            !chain(&error).contains("panicked"),
            "{first:?}: {}",
            chain(&error)
        );
    }
    for next in [
        cut(&refusal),
        cut(&switch("mysql_native_password")),
        cut(&[0, 0, 0, 2, 0, 0]),
    ]
    .concat()
    {
        login_at(in_turns(vec![whole.clone(), next]), PublicKey::Local).await;
    }
}

#[tokio::test]
async fn a_password_that_a_server_repeats_is_not_shown() {
    let refusal = format!("Access denied for '{PASSWORD}', {ENCODED}, {PASSWORD:?}");
    let refusal = [&b"\xff\x15\x04#28000"[..], refusal.as_bytes()].concat();
    let (error, _) = login_at(
        in_turns(vec![greeting("mysql_native_password"), refusal]),
        PublicKey::Local,
    )
    .await;
    let text = chain(&error);
    assert!(text.contains("Access denied for '***', ***, \"***\""), "{text}");
    assert!(!error.is_transient(), "{text}");
}

/// The words of a server are told in 500 characters.
#[tokio::test]
async fn no_part_of_a_password_is_left_where_words_end() {
    for before in 489..=496 {
        let words = "n".repeat(before) + PASSWORD + ", or so";
        let refusal = [&b"\xff\x15\x04#28000"[..], words.as_bytes()].concat();
        let script = in_turns(vec![greeting("mysql_native_password"), refusal]);
        let (error, _) = login_at(script, PublicKey::Local).await;
        let text = format!("{} {error:?}", chain(&error));
        assert!(text.contains("n***") && !text.contains("cana"), "{text}");
    }
}

async fn a_login_by_password_is_relayed_as_it_is(flavour: Flavour) {
    let server = private(flavour, &[]);
    let client = connect(config(server.addr())).await.unwrap();
    cycle(&client, "a").await;
    // The server's end of a connection is noticed as ever, and the next one is a new one.
    let mut admin = Admin::of(&server).await;
    for session in admin.sessions().await {
        let _ = admin.try_run(&format!("KILL {session}")).await;
    }
    cycle(&client, "a").await;
    drop(client);
    lockkit_testbed::eventually("no connection is left", async || {
        admin.sessions().await.is_empty()
    })
    .await;
    let socket = server.process().directory().join("socket");
    let mut by_socket = config(server.addr());
    by_socket.socket = Some(socket);
    cycle(&connect(by_socket).await.unwrap(), "a").await;
}

/// A server that remembers no login needs its key, which is the default of MySQL 8.
async fn a_key_is_believed_where_the_option_says(flavour: Flavour) {
    if flavour == Flavour::MariaDb {
        // This version has no caching_sha2_password.
        return;
    }
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    admin
        .run(&format!(
            "CREATE USER 'sha'@'%' IDENTIFIED WITH caching_sha2_password BY '{PASSWORD}'; \
             GRANT ALL ON {}.* TO 'sha'@'%'",
            MySql::DATABASE
        ))
        .await;
    let url = format!("mysql://sha:{ENCODED}@{}/{}", server.addr(), MySql::DATABASE);
    let login = async |public_key| {
        let mut config = MySqlConfig::new(url.as_str());
        config.public_key = public_key;
        connect(config).await
    };
    let error = login(PublicKey::Never).await.unwrap_err();
    let text = chain(&error);
    assert!(
        !error.is_transient() && text.contains("public_key=always"),
        "{text}"
    );
    login(PublicKey::Local).await.unwrap();
    login(PublicKey::Never)
        .await
        .expect("the server remembers the login before");
    admin.run("FLUSH PRIVILEGES").await;
    login(PublicKey::Always).await.unwrap();
}

/// It would be a part of the statement that kills the session, at whichever server is the primary by then.
async fn a_marker_that_no_server_gives_is_refused(flavour: Flavour) {
    let marker = "CONCAT('lockkit-session:', UUID())";
    let addr = relay(shared(flavour).addr(), marker, "'lockkit-session:'' OR SLEEP(1'")
        .await
        .unwrap();
    let cycle = async {
        let client = connect(config(addr)).await?;
        client.lock(name("marker"))?.acquire().await
    };
    let error = cycle.await.unwrap_err();
    let text = chain(&error);
    assert!(!error.is_transient() && text.contains("marker"), "{text}");
}

/// What goes to an address of this machine's own stays on it, too, but that is not known.
#[tokio::test]
async fn a_password_beyond_this_host_is_warned_about_once() {
    for (login, at, expected) in [
        ("me:canary", Some(Ipv4Addr::LOCALHOST.into()), 0),
        ("me:canary", own_address(), 1),
        ("me", own_address(), 0),
    ] {
        let Some(at) = at else { continue };
        let addr = hangs_up(at).unwrap();
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        let config = MySqlConfig::new(format!("mysql://{login}@{addr}/app"));
        connect(config).await.unwrap_err();
        let text = traces.text();
        assert_eq!(
            text.matches("is not encrypted").count(),
            expected,
            "{login} at {addr}: {text}"
        );
        assert!(!text.contains("canary"), "{text}");
    }
}
