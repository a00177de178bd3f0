//! Users, passwords and rights.

use std::{net::Ipv4Addr, time::Duration};

use hyper::{body::Incoming, server::conn::http2::Builder, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lockkit_conformance::Traces;
use lockkit_core::{Error, FencingToken, spi::chain};
use lockkit_etcd::Credentials;
use lockkit_testbed::{etcd::EtcdServer, hangs_up, own_address};
use tokio::net::TcpListener;
use tracing::instrument::WithSubscriber as _;

use crate::server::{
    block, client, config, connect, contend, lock, no_etcd, patiently, soon, takes_its_turn, unique, waiter,
    with_ttl,
};

fn check(error: &Error, reasons: &[&str]) {
    let text = chain(error);
    assert!(!error.is_transient(), "{text}");
    for reason in reasons {
        assert!(text.contains(reason), "{reason} in {text}");
    }
    assert!(
        !text.contains(EtcdServer::PASSWORD) && !text.contains("wrong-7"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_is_told_why_at_once() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().authorise("lockkit/").start()).unwrap();
    let good = config(&server.url());
    let mut wrong = good.clone();
    wrong.auth = Some(Credentials::new(EtcdServer::USER, "wrong-7"));
    let error = soon("an answer", client(wrong)).await.unwrap_err();
    check(&error, &["the user or the password is wrong"]);
    let mut nobody = good.clone();
    nobody.auth = None;
    // Whether a user is needed shows with the first request.
    let nobody = client(nobody).await.unwrap();
    let error = soon("an answer", lock(&nobody, "a").acquire()).await.unwrap_err();
    check(&error, &["ask for a user", "etcd://user:password@host"]);
    let mut elsewhere = good.clone();
    elsewhere.namespace = "elsewhere".into();
    let elsewhere = client(elsewhere).await.unwrap();
    for lock in [lock(&elsewhere, "a"), lock(&elsewhere, "a").shared()] {
        let error = soon("an answer", lock.acquire()).await.unwrap_err();
        check(&error, &["has no right", "readwrite", "--prefix"]);
        let error = soon("an answer", lock.try_acquire()).await.unwrap_err();
        check(&error, &["has no right"]);
    }
    let token = FencingToken::new(1);
    for error in [
        elsewhere.inspect("a").await.unwrap_err(),
        elsewhere.list("").unwrap().next().await.unwrap().unwrap_err(),
        elsewhere
            .revoke("a", token, Duration::from_secs(20))
            .await
            .unwrap_err(),
        elsewhere.revoke_by_force("a", token).await.unwrap_err(),
        elsewhere.fence().await.unwrap_err(),
    ] {
        check(&error, &["has no right", "readwrite elsewhere/ --prefix"]);
    }
    let client = patiently(good).await;
    let guard = lock(&client, "a").acquire().await.unwrap();
    guard.release().await.unwrap();
    contend(&server, "a", 0).await;
}

/// Also where it may read a part of it: what it may not read would pass for free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_what_may_not_be_read_is_an_error() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().authorise("lockkit/mine").start()).unwrap();
    for key in ["lockkit/mine/x", "lockkit/theirs/x"] {
        block(|| server.ctl(&["put", key, "x"])).unwrap();
    }
    let client = patiently(config(&server.url())).await;
    for prefix in ["", "theirs", "mine"] {
        let listed = client.list(prefix).unwrap().next().await;
        check(&listed.expect("no end").unwrap_err(), &["has no right"]);
    }
    check(&client.inspect("theirs").await.unwrap_err(), &["has no right"]);
}

/// A user whose password is set anew has none of the tokens that it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_ends_is_replaced() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().authorise("lockkit/").start()).unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let name = unique("tokens");
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&server, &name, 2).await;
    for _ in 0..3 {
        let user = format!("{}:{}", EtcdServer::USER, EtcdServer::PASSWORD);
        let (name, password) = user.split_once(':').unwrap();
        let mut command = server.ctl_command();
        command.args(["user", "passwd", name, "--interactive=false"]);
        command.stdin(std::process::Stdio::piped());
        block(|| {
            use std::io::Write as _;
            let mut child = command.spawn().unwrap();
            writeln!(child.stdin.take().unwrap(), "{password}").unwrap();
            assert!(child.wait().unwrap().success());
        });
        let until = guard.valid_until().unwrap();
        lockkit_testbed::eventually("the hold is proven anew", async || {
            guard.valid_until().unwrap() > until
        })
        .await;
        // A new watch, and a new key.
        let other = lock(&ours, &unique("other"));
        let held = soon("with a new token", other.acquire()).await.unwrap();
        let behind = waiter(&lock(&theirs, other.name().as_str()));
        contend(&server, other.name().as_str(), 2).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        held.renew().await.expect("by now it is watched");
        held.release().await.unwrap();
        takes_its_turn("it was watched", behind).await;
    }
    guard.release().await.unwrap();
    takes_its_turn("the next", waiting).await;
}

/// The client has a user and no token, since nobody asked for one when it connected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_that_are_asked_for_later_lose_nothing() {
    if no_etcd() {
        return;
    }
    let server = block(EtcdServer::plain).unwrap();
    let (user, password) = (EtcdServer::USER, EtcdServer::PASSWORD);
    let ctl = |arguments: &[&str]| block(|| server.ctl(arguments)).unwrap();
    for user in ["root", user] {
        ctl(&["user", "add", &format!("{user}:{password}")]);
        ctl(&["user", "grant-role", user, "root"]);
    }
    let mut config = config(&server.url());
    config.auth = Some(Credentials::new(user, password));
    let (ours, theirs) = (patiently(config.clone()).await, patiently(config).await);
    let name = unique("later");
    let ttl = Duration::from_secs(4);
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&server, &name, 2).await;
    ctl(&["auth", "enable"]);
    tokio::time::sleep(2 * ttl).await;
    assert!(guard.is_held(), "{:?}", guard.check());
    let other = lock(&ours, &unique("other"));
    let held = soon("another", other.acquire()).await.unwrap();
    held.release().await.unwrap();
    guard.release().await.unwrap();
    takes_its_turn("the next", waiting).await;
}

#[tokio::test]
async fn a_password_that_is_of_no_use_is_warned_about() {
    if no_etcd() {
        return;
    }
    // The second one is a word of the refusal, in which it is blanked.
    for password in ["wrong-7", "enabled"] {
        let mut config = config(&crate::server::shared().url());
        config.auth = Some(Credentials::new("tester", password));
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        let client = patiently(config).await;
        let guard = lock(&client, &unique("clear")).acquire().await.unwrap();
        guard.release().await.unwrap();
        let text = traces.text();
        assert!(text.contains("the user and password are of no use"), "{text}");
        assert!(!text.contains(password), "{text}");
        client.close(Duration::from_secs(20)).await.unwrap();
    }
}

/// A server that answers each request with the password, in a status as gRPC has it.
#[tokio::test]
async fn a_password_that_a_server_repeats_is_not_shown() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let refuse = service_fn(async |_: hyper::Request<Incoming>| {
                let answer = hyper::Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", "3")
                    .header("grpc-message", "etcdserver: no such thing as canary%20p%25ss")
                    .body(tonic::body::Body::empty());
                Ok::<_, std::convert::Infallible>(answer.expect("an answer"))
            });
            tokio::spawn(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(client), refuse));
        }
    });
    let traces = Traces::default();
    let mut config = config(&addr.to_string());
    config.auth = Some(Credentials::new("tester", "canary p%ss"));
    let connecting = client(config).with_subscriber(traces.clone());
    let error = soon("an answer", connecting).await.unwrap_err();
    let text = format!("{} {error:?} {error:#?}", chain(&error));
    assert!(text.contains("no such thing as ***"), "{text}");
    for text in [text, traces.text()] {
        assert!(!text.contains("canary"), "{text}");
    }
}

/// What goes to an address of this machine's own stays on it, too, but that is not known.
#[tokio::test]
async fn a_password_beyond_this_host_is_warned_about_once() {
    for (at, expected) in [(Some(Ipv4Addr::LOCALHOST.into()), 0), (own_address(), 1)] {
        let Some(at) = at else { continue };
        let addr = hangs_up(at).unwrap();
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        let mut config = config(&addr.to_string());
        config.auth = Some(Credentials::new("tester", "canary"));
        soon("an end", client(config)).await.unwrap_err();
        let text = traces.text();
        assert_eq!(
            text.matches("is not encrypted").count(),
            expected,
            "{addr}: {text}"
        );
        assert!(!text.contains("canary"), "{text}");
    }
}
