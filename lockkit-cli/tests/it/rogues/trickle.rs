//! Replies of which one byte comes now and then, each long before anybody would take the connection for dead.

use std::{sync::Arc, time::Duration};

use lockkit::{AcquireOptions, LockClient, LockConfig};
use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::{
    Certificates, Mode, Plays, Proxy,
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

use super::{SLACK, TIMEOUTS, Within, fault, judged, run, start};

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(4);

/// What each of these begins with is the beginning of something long.
#[test]
fn a_login_that_trickles_ends_in_time() {
    let rogues: [(&str, &str, &[u8]); 6] = [
        ("redis://", "", b"+aaaaaaaaaaaaaaaa"),
        ("zk://", "", &[0, 0, 0x10, 0, 0, 0, 0]),
        ("mysql://me:canary@", "/app", &[0, 0x10, 0, 0, 10, b'8', b'.']),
        (
            "postgres://me:canary@",
            "/app",
            &[b'R', 0, 0, 0x10, 0, 0, 0, 0, 5],
        ),
        ("etcd://", "", &[0, 0x10, 0, 4, 0, 0, 0, 0, 0]),
        ("redlock://", "", b"+aaaaaaaaaaaaaaaa"),
    ];
    run(async {
        let mut faults = Vec::new();
        for (scheme, path, bytes) in rogues {
            let rogue = start(Plays::Trickle(bytes.to_vec())).await;
            let others = [
                start(Plays::Trickle(bytes.to_vec())).await,
                start(Plays::Trickle(bytes.to_vec())).await,
            ];
            let others = match scheme {
                "redlock://" => format!(",{},{}", others[0].addr(), others[1].addr()),
                _ => String::new(),
            };
            let url = format!("{scheme}{}{others}{path}?{TIMEOUTS}", rogue.addr());
            faults.extend(fault(scheme, &rogue, &url, Within::Connecting, "").await);
        }
        judged(&faults);
    });
}

/// A server that is reached directly, and through a proxy.
struct Ways {
    direct: String,
    through: String,
    proxies: Vec<Proxy>,
}

impl Ways {
    fn new(addrs: &[std::net::SocketAddr], url: impl Fn(&str) -> String) -> Self {
        let proxies: Vec<_> = addrs.iter().map(|addr| Proxy::start(*addr).unwrap()).collect();
        let list = |addrs: Vec<String>| addrs.join(",");
        Self {
            direct: url(&list(addrs.iter().map(ToString::to_string).collect())),
            through: url(&list(
                proxies.iter().map(|proxy| proxy.addr().to_string()).collect(),
            )),
            proxies,
        }
    }

    fn set(&self, mode: Mode) {
        for proxy in &self.proxies {
            proxy.set(mode);
        }
    }

    async fn check(&self, what: &str) {
        let connect = async |url: &str| -> lockkit::Result<LockClient> {
            let mut config = LockConfig::new(url);
            (config.connect_timeout, config.op_timeout) = (Some(SECOND), Some(SECOND));
            config.connect().await
        };
        let lock = |client: &LockClient, name: &str| {
            let options = AcquireOptions::new()
                .ttl(TTL)
                .op_timeout(SECOND)
                .local_handoffs(0);
            client.lock(name).unwrap().with_options(options)
        };
        let mut config = LockConfig::new(&self.direct);
        config.connect_timeout = Some(20 * SECOND);
        let other = config.connect().await.unwrap();
        config.url = self.through.as_str().into();
        let client = config.connect().await.unwrap();
        let held = lock(&client, "a").acquire().await.unwrap();
        self.set(Mode::Trickle);

        let clock = Stopwatch::start();
        let connected = connect(&self.through).await;
        let took = clock.elapsed();
        println!("{what}: connecting took {took:?}: {:?}", connected.as_ref().err());
        assert!(connected.is_err(), "{what}");
        assert!(took < SECOND + SLACK, "{what}: connecting took {took:?}");
        let clock = Stopwatch::start();
        let tried = lock(&client, "b").try_acquire().await;
        let took = clock.elapsed();
        println!("{what}: a try took {took:?}: {:?}", tried.as_ref().err());
        assert!(took < SECOND + SLACK, "{what}: a try took {took:?}");

        let clock = Stopwatch::start();
        while held.is_held() && clock.elapsed() < 2 * TTL {
            let granted = lock(&other, "a").try_acquire().await.unwrap();
            // By the time of the look, the lease may be over.
            assert!(
                granted.is_none() || !held.is_held(),
                "PROMISE BROKEN: {what}: two have it"
            );
            if granted.is_some() {
                break;
            }
            tokio::time::sleep(SECOND / 50).await;
        }
        drop(tried);
        self.set(Mode::Pass);
        drop(held);
        let again = lock(&other, "a").acquire_timeout(20 * SECOND).await;
        again
            .expect("free by the end of the lease")
            .release()
            .await
            .unwrap();
        let again = lock(&client, "c").acquire_timeout(20 * SECOND).await;
        again.expect("the client goes on").release().await.unwrap();
    }
}

#[test]
fn a_reply_that_trickles_is_not_waited_for() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let mut checks: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
    let mut check = |work: Box<dyn FnOnce() + Send>| checks.push(work);
    if !skipped("redis", redis::missing()) {
        check(Box::new(|| {
            let server = RedisServer::plain().unwrap();
            let ways = Ways::new(&[server.addr()], |addr| format!("redis://{addr}"));
            run(ways.check("redis"));
        }));
        check(Box::new(move || {
            let server = RedisServer::builder().tls(&certificates).start().unwrap();
            let ca = certificates.authority().display().to_string();
            let ways = Ways::new(&[server.addr()], |addr| format!("rediss://{addr}?ca={ca}"));
            run(ways.check("redis over TLS"));
        }));
        check(Box::new(|| {
            let masters = [(); 3].map(|()| RedisServer::plain().unwrap());
            let addrs = masters.each_ref().map(RedisServer::addr);
            let ways = Ways::new(&addrs, |addrs| format!("redlock://{addrs}"));
            run(ways.check("redlock"));
        }));
    }
    if !skipped("zk", zookeeper::missing()) {
        check(Box::new(|| {
            let server = ZkServer::plain().unwrap();
            run(Ways::new(&[server.addr()], |addr| format!("zk://{addr}")).check("zookeeper"));
        }));
    }
    if !skipped("etcd", etcd::missing()) {
        check(Box::new(|| {
            let server = EtcdServer::plain().unwrap();
            run(Ways::new(&[server.addr()], |addr| format!("etcd://{addr}")).check("etcd"));
        }));
    }
    if !skipped("postgres", postgres::missing()) {
        check(Box::new(|| {
            let server = PgServer::plain().unwrap();
            let url = |addr: &str| PgServer::url_at(addr.parse().unwrap());
            run(Ways::new(&[server.addr()], url).check("postgres"));
        }));
    }
    if !skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        check(Box::new(|| {
            let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
            for mode in ["for_update", "lease"] {
                let url = |addr: &str| format!("{}?mode={mode}", MySql::url_at(addr.parse().unwrap()));
                run(Ways::new(&[server.addr()], url).check(mode));
            }
        }));
    }
    let running: Vec<_> = checks.into_iter().map(std::thread::spawn).collect();
    let failed = running.into_iter().filter_map(|check| check.join().err());
    assert_eq!(failed.count(), 0, "what they said is above");
}
