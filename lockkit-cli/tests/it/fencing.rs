//! `lockkit fence`.

use lockkit_testbed::{
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

use crate::tool::{Site, lockkit, outcome};

/// The output of `lockkit fence`.
fn fence(url: &str, arguments: &[&str]) -> (i32, String, String) {
    outcome(lockkit(&[&["fence"], arguments].concat()).env("LOCKKIT_URL", url))
}

/// The token of a hold.
fn token(url: &str) -> u64 {
    let run = ["run", "job", "--", "sh", "-c", "echo $LOCKKIT_TOKEN"];
    let (status, token, complaint) = outcome(lockkit(&run).env("LOCKKIT_URL", url));
    assert_eq!(status, 0, "{complaint}");
    token.trim().parse().unwrap()
}

/// Raises the tokens of this server, which nobody else uses.
fn raised_and_not_lowered(url: &str) {
    assert_eq!(fence(url, &["show"]).0, 0, "also before there was a hold");
    let before = token(url);
    let (status, shown, complaint) = fence(url, &["show"]);
    assert_eq!((status, &*complaint), (0, ""));
    let highest: u64 = shown.trim_end().parse().unwrap();
    assert!(highest >= before, "{highest}, and {before} was granted");

    let above = before + 1_000_000_000;
    let raised = raise(url, above);
    assert!(raised >= above, "{raised}");
    let after = token(url);
    assert!(after > raised, "{after}, and raised above {raised}");

    let raised = raise(url, 7);
    assert!(raised >= after, "{raised}, and {after} was granted");
    assert!(token(url) > raised);
}

/// Returns what tokens are above then, which may be more than was asked for. If so, it says that.
fn raise(url: &str, above: u64) -> u64 {
    let (status, shown, complaint) = fence(url, &["raise", "--above", &above.to_string()]);
    assert_eq!(status, 0, "{complaint}");
    let raised = shown.trim_end().parse().unwrap();
    let said = match raised {
        _ if raised == above => String::new(),
        _ => format!("lockkit: tokens are above {above} by more: they go on above {raised}\n"),
    };
    assert_eq!(complaint, said);
    raised
}

#[test]
fn tokens_of_redis_are_raised_and_not_lowered() {
    if !skipped("redis", redis::missing()) {
        raised_and_not_lowered(RedisServer::plain().unwrap().url());
    }
}

#[test]
fn tokens_of_zookeeper_are_raised_and_not_lowered() {
    if !skipped("zk", zookeeper::missing()) {
        let server = ZkServer::plain().unwrap();
        raised_and_not_lowered(&format!("zk://{}", server.addr()));
    }
}

#[test]
fn tokens_of_etcd_are_raised_and_not_lowered() {
    if !skipped("etcd", etcd::missing()) {
        let server = EtcdServer::plain().unwrap();
        raised_and_not_lowered(&format!("etcd://{}", server.addr()));
    }
}

#[test]
fn tokens_of_postgres_are_raised_and_not_lowered() {
    if !skipped("postgres", postgres::missing()) {
        raised_and_not_lowered(&PgServer::plain().unwrap().url());
    }
}

#[test]
fn tokens_of_mysql_are_raised_and_not_lowered() {
    for flavour in [Flavour::MariaDb, Flavour::MySql] {
        if !skipped("mysql", MySql::missing(flavour)) {
            let server = MySql::start(flavour, &[]).unwrap();
            for mode in ["for_update", "lease"] {
                raised_and_not_lowered(&format!("{}?mode={mode}", server.url()));
            }
        }
    }
}

/// Nobody keeps such a number of files, nor of Redlock's masters.
#[test]
fn where_tokens_cannot_be_raised_a_line_says_what_to_do() {
    let site = Site::new();
    for (arguments, advice) in [
        (&["show"][..], "take the highest that is remembered"),
        (&["raise", "--above", "7"], "have what checks them begin at 0"),
    ] {
        let (status, shown, complaint) = fence(&site.url, arguments);
        assert_eq!((status, &*shown), (125, ""), "{complaint}");
        assert!(
            complaint.contains("not supported") && complaint.contains(advice),
            "{complaint}"
        );
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
    }
}

#[test]
fn an_absurd_fence_gets_one_line() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    for absurd in ["18446744073709551615", "9007199254740991"] {
        let (status, shown, complaint) = fence(server.url(), &["raise", "--above", absurd]);
        assert_eq!((status, &*shown), (125, ""), "{complaint}");
        assert!(
            complaint.contains(absurd) && complaint.contains("enough are left"),
            "{complaint}"
        );
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
    }
    for bad in [
        &["raise"][..],
        &["raise", "--above", "-1"],
        &["raise", "--above", "x"],
        &["lower"],
        &[],
    ] {
        let (status, _, complaint) = fence(server.url(), bad);
        assert_eq!(status, 125, "{bad:?}: {complaint}");
    }
}
