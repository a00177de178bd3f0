//! `lockkit fence`.

use lockkit_testbed::{
    redis::{self, RedisServer},
    skipped,
};

use crate::tool::{lockkit, outcome};

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

#[test]
fn tokens_are_raised_and_not_lowered() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let url = server.url();
    let before = token(url);
    let (status, shown, complaint) = fence(url, &["show"]);
    assert_eq!((status, &*complaint), (0, ""));
    let highest: u64 = shown.trim_end().parse().unwrap();
    assert!(highest >= before, "{highest}, and {before} was granted");

    let above = (before + 1_000_000_000).to_string();
    let (status, shown, complaint) = fence(url, &["raise", "--above", &above]);
    assert_eq!((status, &*shown, &*complaint), (0, &*format!("{above}\n"), ""));
    let after = token(url);
    assert!(after > before + 1_000_000_000, "{after}");

    let (status, shown, complaint) = fence(url, &["raise", "--above", "7"]);
    assert_eq!((status, &*shown), (0, &*format!("{after}\n")));
    let said = format!("lockkit: tokens are above 7 by more: they go on above {after}\n");
    assert_eq!(complaint, said);
    assert!(token(url) > after);
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
