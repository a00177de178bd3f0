//! Credentials, rights and certificates, and masters with odd answers.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{TcpListener, TcpStream},
};

use super::world::{World, config, connect, url};
use crate::common::{LONG, SECOND, granted, lock, no_server, shown, until, waiter, within};

const PASSWORD: &str = "open-sesame";

/// The rights named in `docs/redlock.md`, for the default namespace.
const MINIMAL_RIGHTS: &str = "~lockkit:* resetchannels &lockkit:* \
     +ping +info +select +subscribe +client|id +client|kill +eval +evalsha +script|load \
     +time +get +mget +set +del +exists +pexpire +pttl +publish \
     +zadd +zcard +zrange +zrangebyscore +zrevrange +zrem +zscore +hget +hset +hdel +scan";

#[tokio::test]
async fn the_documented_rights_are_enough() {
    if no_server() {
        return;
    }
    let world = World::built(3, |builder| builder.user("locker", PASSWORD, MINIMAL_RIGHTS));
    let (one, two) = (world.client().await, world.client().await);
    // The mark of a forced end outlives the lease: it has to be gone in the time that the last line waits.
    let (ours, theirs) = (lock(&one, "a", 6 * SECOND), lock(&two, "a", 6 * SECOND));
    for (first, second) in [
        (ours.clone(), theirs.clone()),
        (ours.shared(), theirs.clone()),
        (ours.clone(), theirs.shared()),
    ] {
        let held = first.acquire().await.unwrap();
        held.renew().await.unwrap();
        let waiting = waiter(&second);
        world.waiters("a", 1).await;
        assert_eq!(one.inspect("a").await.unwrap().waiters, Some(1));
        let listed = one.list("").unwrap().next().await.unwrap().unwrap();
        assert_eq!(listed.state.waiters, Some(1));
        held.release().await.unwrap();
        let next = granted(LONG, "told", waiting).await;
        assert!(one.revoke_by_force("a", next.token()).await.unwrap());
        assert!(next.release().await.unwrap_err().is_lost());
    }
    for master in &world.masters {
        // Except for the greeting of the client library, which Redis 7.0 does not know.
        let denied = master.cli(&["ACL", "LOG"]).unwrap();
        assert_eq!(denied, "", "something was asked for and denied");
    }
    world.nothing_is_left("with few rights").await;
}

#[tokio::test]
async fn credentials_are_each_masters_own() {
    if no_server() {
        return;
    }
    let open = World::of(1);
    let guarded = World::built(2, |builder| builder.password(PASSWORD));
    let [first, second] = [0, 1].map(|n| guarded.masters[n].url());
    let connected = connect(config(&url([first, second, open.masters[0].url()].into_iter())));
    connected.await.unwrap();

    // A master's password is not sent to another one.
    let bare = format!("redis://{}", guarded.masters[1].addr());
    let connected = connect(config(&url([first, &bare, open.masters[0].url()].into_iter())));
    let error = connected.await.unwrap_err();
    let text = shown(&error);
    assert!(!error.is_transient() && !text.contains("sesame"), "{text}");
    assert!(text.contains(&guarded.masters[1].addr().to_string()), "{text}");
}

/// Connections with requests under way end as well.
#[tokio::test]
async fn closed_a_client_has_no_connections() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let lock = lock(&client, "a", LONG);
    world.masters[4].pause().unwrap();
    for _ in 0..3 {
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    within(LONG, "closed", client.close(LONG)).await.unwrap();
    world.masters[4].resume().unwrap();
    for (n, master) in world.masters.iter().enumerate() {
        until(LONG, &format!("no connection to master {n}"), async || {
            // All but the connection of this query.
            master.cli(&["CLIENT", "LIST"]).unwrap().lines().count() == 1
        })
        .await;
    }
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_is_for_all_masters() {
    use std::sync::Arc;

    use lockkit_testbed::Certificates;

    if no_server() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let world = World::built(3, |builder| builder.tls(&certificates).password(PASSWORD));
    let mut config = world.config();
    config.tls = true;
    config.ca = Some(certificates.authority().clone());
    let client = connect(config.clone()).await.unwrap();
    let held = lock(&client, "a", SECOND).acquire().await.unwrap();
    held.renew().await.unwrap();
    held.release().await.unwrap();

    config.ca = Some(Certificates::generate().unwrap().authority().clone());
    let error = connect(config).await.unwrap_err();
    let text = shown(&error);
    assert!(text.contains("ertificate") && !text.contains("sesame"), "{text}");
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn masters_that_ask_for_a_certificate_get_it() {
    use std::sync::Arc;

    use lockkit_testbed::Certificates;

    if no_server() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let world = World::built(3, |builder| {
        builder
            .tls(&certificates)
            .directive("tls-auth-clients", &["yes"])
            .password(PASSWORD)
    });
    let mut config = world.config();
    config.tls = true;
    config.ca = Some(certificates.authority());
    let error = connect(config.clone()).await.unwrap_err();
    let text = shown(&error);
    assert!(
        text.contains("asks for a client certificate") && !text.contains("sesame"),
        "{text}"
    );
    (config.cert, config.key) = (Some(certificates.client()), Some(certificates.client_key()));
    let client = connect(config).await.unwrap();
    let held = lock(&client, "a", SECOND).acquire().await.unwrap();
    held.renew().await.unwrap();
    held.release().await.unwrap();
}

/// Passes everything on, but has each script named like the first. Returns its URL.
async fn misnaming(server: SocketAddr) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let Ok(mut server) = TcpStream::connect(server).await else {
                continue;
            };
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.split();
                let (mut from_server, mut to_server) = server.split();
                let back = async {
                    let (mut replies, mut first) = (vec![0; 1 << 16], None);
                    while let Ok(read @ 1..) = from_server.read(&mut replies).await {
                        misname(&mut replies[..read], &mut first);
                        if to_client.write_all(&replies[..read]).await.is_err() {
                            break;
                        }
                    }
                };
                tokio::select! {
                    _ = copy(&mut from_client, &mut to_server) => {}
                    () = back => {}
                }
            });
        }
    });
    format!("redis://{address}")
}

fn misname(replies: &mut [u8], first: &mut Option<Vec<u8>>) {
    const HEAD: &[u8] = b"$40\r\n";

    for at in 0..replies.len() {
        let Some(digest) = replies[at..].strip_prefix(HEAD).and_then(|rest| rest.get(..40)) else {
            continue;
        };
        let first = first.get_or_insert_with(|| digest.to_vec());
        replies[at + HEAD.len()..][..40].copy_from_slice(first);
    }
}

/// All clients of a process share the scripts. What some master calls them is nothing to the others.
#[tokio::test]
async fn a_master_that_misnames_scripts_spoils_no_other() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let mut odd = Vec::new();
    for master in &world.masters {
        odd.push(misnaming(master.addr()).await);
    }
    let odd = config(&url(odd.iter().map(String::as_str)));
    let odd = within(LONG, "connected", connect(odd)).await;
    let honest = world.client().await;
    for client in [honest, odd.unwrap()] {
        let lock = lock(&client, "a", LONG);
        let held = within(LONG, "granted", lock.acquire()).await.unwrap();
        held.renew().await.unwrap();
        held.release().await.unwrap();
    }
}
