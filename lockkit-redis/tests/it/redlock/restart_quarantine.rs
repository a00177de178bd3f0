//! The restart quarantine: a master that may have lost its grants has no vote until these are over, for any client.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkit_core::{AcquireOptions, Error, FencingDurability, LockClient, Revocation};
use lockkit_redis::RedlockConfig;
use lockkit_testbed::{
    Mode, eventually,
    redis::{Fsync, RedisBuilder, RedisServer},
};

use super::world::{World, config, connect, url, votes};
use crate::common::{LONG, MS, SECOND, lock, no_server, shown, until, within};

const MAX_TTL: Duration = Duration::from_secs(4);
/// Leaves more of the quarantine than the half second between two checks.
const ALMOST: Duration = Duration::from_millis(3_300);

fn with_max_ttl(world: &World) -> RedlockConfig {
    let mut config = world.config();
    config.max_ttl = MAX_TTL;
    config
}

/// Waits until tries return an error with `part`: it takes a few before masters are back.
async fn try_says(client: &LockClient, name: &str, part: &str) {
    eventually(&format!("a try says `{part}`"), async || {
        match lock(client, name, SECOND).try_acquire().await {
            Err(error) => shown(&error).contains(part),
            Ok(_) => false,
        }
    })
    .await;
}

#[tokio::test]
async fn a_live_hold_is_given_no_ttl_above_the_longest() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    let held = lock(&client, "a", 2 * SECOND).acquire().await.unwrap();
    let error = held.set_ttl(MAX_TTL + MS).await.unwrap_err();
    assert!(
        matches!(&error, Error::InvalidOptions { option: "ttl", reason, .. } if reason.contains("`max_ttl` of 4s")),
        "{error}"
    );
    assert!(held.is_held() && held.lease_length().unwrap() <= 2 * SECOND);
    held.set_ttl(MAX_TTL).await.unwrap();
    assert!(held.lease_length().unwrap() > 3 * SECOND);
    held.release().await.unwrap();
}

/// A release would have to leave it to a lease for which no quarantine waits.
#[tokio::test]
async fn a_hold_is_kept_for_no_time_above_the_longest() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    let options = |least| AcquireOptions::new().ttl(2 * SECOND).hold_at_least(least);
    let lock = lock(&client, "a", 2 * SECOND);
    let refused = lock.acquire_with(&options(MAX_TTL + MS)).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Error::InvalidOptions {
                option: "hold_at_least",
                ..
            }
        ),
        "{refused}"
    );
    let at_once = options(MAX_TTL).wait(Duration::ZERO);
    let guard = lock.acquire_with(&at_once).await;
    let guard = guard.expect("what was refused left nothing");
    guard.release().await.unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none(), "it is kept");
}

#[tokio::test]
async fn a_master_restarted_empty_has_no_vote_while_grants_last() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = connect(with_max_ttl(&world)).await.unwrap();
    assert_eq!(client.capabilities().fencing, FencingDurability::Process);
    let held = lock(&client, "a", MAX_TTL).acquire().await.unwrap();
    world.voting(5).await;
    // Two stay down, so that every vote counts.
    for master in &world.masters[3..] {
        master.kill().unwrap();
    }
    let began = Instant::now();
    world.masters[0].restart_empty().unwrap();
    // For clients that knew it before and for new ones.
    try_says(&client, "b", "was restarted or emptied").await;
    let late = connect(with_max_ttl(&world)).await.unwrap();
    try_says(&late, "b", "was restarted or emptied").await;
    assert!(!votes(&world.masters[0]));
    // Two more masters hold its former grant, all that is left of a majority.
    assert!(lock(&late, "a", SECOND).try_acquire().await.is_err());
    // It has forgotten that grant, which is not to say that there is none. All three would have to know that a lock is free.
    for name in ["a", "b"] {
        let error = late.inspect(name).await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        assert!(
            shown(&error).contains("was restarted or emptied"),
            "{}",
            shown(&error)
        );
    }
    let listed = late.list("none").unwrap().next().await;
    assert!(
        listed.as_ref().is_some_and(Result::is_err),
        "nobody can tell: {listed:?}"
    );
    let ended = late.revoke_by_force("b", held.token()).await;
    assert!(
        ended.as_ref().is_err_and(Error::is_transient),
        "nobody can tell: {ended:?}"
    );
    drop(held);

    within(MAX_TTL + LONG, "admitted", async {
        while !votes(&world.masters[0]) {
            tokio::time::sleep(10 * MS).await;
        }
    })
    .await;
    assert!(began.elapsed() >= MAX_TTL, "{:?}", began.elapsed());
    for client in [&client, &late] {
        let granted = within(LONG, "granted", lock(client, "b", SECOND).acquire()).await;
        granted.unwrap().release().await.unwrap();
    }
}

/// Nobody is granted what the holder has, and it may not know of anything yet: that is no "nobody holds it", and no confirmation.
#[tokio::test]
async fn masters_without_a_vote_do_not_deny_a_hold() {
    if no_server() {
        return;
    }
    for is_known in [false, true] {
        let world = World::five();
        let holder = connect(with_max_ttl(&world)).await.unwrap();
        let operator = connect(with_max_ttl(&world)).await.unwrap();
        let held = lock(&holder, "a", MAX_TTL).acquire().await.unwrap();
        let token = held.token();
        world.voting(5).await;
        if is_known {
            let asked = operator.revoke("a", token, Duration::ZERO).await.unwrap();
            assert!(matches!(asked, Revocation::StillHeld { .. }), "{asked:?}");
        }
        for master in &world.masters[2..] {
            master.cli(&["FLUSHALL"]).unwrap();
        }
        let other = lock(&operator, "a", SECOND).try_acquire().await;
        assert!(other.is_err(), "nobody is granted it: {other:?}");
        let asked = operator.revoke("a", token, Duration::ZERO).await;
        let error = asked.expect_err("two of five masters know of the hold, and three cannot tell");
        assert!(error.is_transient(), "{error}");
        assert!(
            shown(&error).contains("was restarted or emptied"),
            "{}",
            shown(&error)
        );
        drop(held);
    }
}

/// The lock was won at two of three masters, and released before the third was repaired. The winner's clock was two hours
/// ahead.
#[tokio::test]
async fn tokens_of_a_bare_majority_go_back_if_one_of_it_loses_them() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let ahead = (now + 7200 * SECOND).as_micros();
    for master in &world.masters[..2] {
        master
            .cli(&["SET", "lockkit:lockkit#fence:{lockkit:a}", &ahead.to_string()])
            .unwrap();
    }
    world.masters[2].cli(&["SET", "lockkit:a", "another"]).unwrap();
    let held = lock(&client, "a", MAX_TTL).acquire().await.unwrap();
    let first = held.token().get();
    held.release().await.unwrap();
    world.masters[2].cli(&["DEL", "lockkit:a"]).unwrap();
    world.masters[0].restart_empty().unwrap();
    within(MAX_TTL + LONG, "admitted", async {
        while !votes(&world.masters[0]) {
            tokio::time::sleep(10 * MS).await;
        }
    })
    .await;
    world.masters[1].kill().unwrap();
    let other = connect(with_max_ttl(&world)).await.unwrap();
    let held = within(LONG, "granted", lock(&other, "a", MAX_TTL).acquire()).await;
    let held = held.unwrap();
    let second = held.token().get();
    assert!(second < first, "{second} after {first}: the table says otherwise");
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_master_that_was_emptied_in_place_has_no_vote_either() {
    if no_server() {
        return;
    }
    for command in ["FLUSHALL", "FLUSHDB"] {
        let world = World::of(3);
        let client = connect(with_max_ttl(&world)).await.unwrap();
        world.masters[2].kill().unwrap();
        let began = Instant::now();
        world.masters[1].cli(&[command]).unwrap();
        try_says(&client, "a", "was restarted or emptied").await;
        let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
        assert!(began.elapsed() >= MAX_TTL, "{command}: {:?}", began.elapsed());
        granted.unwrap().release().await.unwrap();
    }
}

/// The master is emptied shortly before the end of its quarantine. Any client may notice.
#[tokio::test]
async fn emptied_in_quarantine_a_master_begins_it_anew() {
    if no_server() {
        return;
    }
    for seen_by_another in [false, true] {
        let world = World::of(3);
        let client = connect(with_max_ttl(&world)).await.unwrap();
        world.masters[2].kill().unwrap();
        let began = Instant::now();
        let master = &world.masters[1];
        master.restart().unwrap();
        try_says(&client, "a", "was restarted or emptied").await;
        tokio::time::sleep_until((began + ALMOST).into()).await;
        master.cli(&["FLUSHALL"]).unwrap();
        let emptied = Instant::now();
        if seen_by_another {
            write_marker(master, "-", MAX_TTL);
        }
        let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
        let after = emptied.elapsed();
        assert!(after >= MAX_TTL, "granted {after:?} after it was emptied");
        granted.unwrap().release().await.unwrap();
    }
}

/// Writes the marker of a client with this `max_ttl`, beginning now: of a vote, or with `-` of a quarantine.
fn write_marker(master: &RedisServer, sign: &str, max_ttl: Duration) {
    let info = master.cli(&["INFO", "server"]).unwrap();
    let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    let since = if sign.is_empty() {
        String::new()
    } else {
        format!(" {now}")
    };
    let marker = format!("{sign}{} {}{since}", run_id.unwrap(), max_ttl.as_millis());
    master.cli(&["SET", "lockkit:lockkit#redlock", &marker]).unwrap();
}

/// Each client knows only what earlier ones left at the master.
#[tokio::test]
async fn clients_that_come_and_go_admit_a_master_in_the_end() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    client.close(SECOND).await.unwrap();
    world.masters[2].kill().unwrap();
    world.masters[1].restart_empty().unwrap();
    let began = Instant::now();
    eventually("admitted", async || {
        let client = connect(with_max_ttl(&world)).await.unwrap();
        let granted = lock(&client, "a", SECOND).try_acquire().await;
        client.close(SECOND).await.unwrap();
        matches!(granted, Ok(Some(_)))
    })
    .await;
    assert!(began.elapsed() + 500 * MS >= MAX_TTL, "{:?}", began.elapsed());
}

#[tokio::test]
async fn restored_data_are_older_than_they_say() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    world.masters[2].kill().unwrap();
    // All its data are there, marker included, but nobody can tell how old they are.
    world.masters[1].restart().unwrap();
    assert!(
        !world.masters[1]
            .cli(&["GET", "lockkit:lockkit#redlock"])
            .unwrap()
            .is_empty()
    );
    try_says(&client, "a", "was restarted or emptied").await;
    let late = connect(with_max_ttl(&world)).await.unwrap();
    try_says(&late, "a", "was restarted or emptied").await;
    let granted = within(MAX_TTL + LONG, "granted", lock(&late, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_durable_master_votes_as_soon_as_it_is_back() {
    if no_server() {
        return;
    }
    let world = World::built(3, |builder| builder.append_only(Fsync::Always));
    let mut config = with_max_ttl(&world);
    config.durable = true;
    config.max_ttl = Duration::from_secs(3_600);
    let client = connect(config.clone()).await.unwrap();
    assert_eq!(client.capabilities().fencing, FencingDurability::Durable);
    let lock = lock(&client, "a", LONG);
    let mut last = 0;
    for round in 0..3 {
        let held = within(LONG, "granted", lock.acquire()).await.unwrap();
        assert!(held.token().get() > last, "tokens went back");
        last = held.token().get();
        held.release().await.unwrap();
        // All masters, one or two. The counters come back as well.
        for master in &world.masters[round..] {
            master.kill().unwrap();
        }
        for master in &world.masters[round..] {
            master.start().unwrap();
        }
    }
    // Without its data it is like any other master.
    world.masters[0].restart_empty().unwrap();
    world.masters[1].kill().unwrap();
    try_says(&client, "a", "was restarted or emptied").await;
}

#[tokio::test]
async fn durable_masters_have_to_be() {
    if no_server() {
        return;
    }
    let synced = |builder: RedisBuilder| builder.append_only(Fsync::Always);
    let cases: [(&str, &dyn Fn(RedisBuilder) -> RedisBuilder); 3] = [
        ("appendonly", &|builder| builder),
        ("appendfsync", &|builder| builder.append_only(Fsync::EverySec)),
        ("no-appendfsync-on-rewrite", &|builder| {
            synced(builder).directive("no-appendfsync-on-rewrite", &["yes"])
        }),
    ];
    for (setting, build) in cases {
        let world = World::built(3, build);
        let mut config = world.config();
        config.durable = true;
        let error = connect(config).await.expect_err(setting);
        assert!(!error.is_transient(), "{error:?}");
        let text = shown(&error);
        assert!(
            text.contains(&format!("`{setting} ")) && text.contains(&world.masters[0].addr().to_string()),
            "{text}"
        );
    }
}

/// A server that comes back with other settings is refused.
#[tokio::test]
async fn a_durable_master_that_comes_back_without_syncs_is_left_out() {
    if no_server() {
        return;
    }
    let world = World::built(3, |builder| builder.append_only(Fsync::Always));
    let mut config = with_max_ttl(&world);
    config.durable = true;
    let client = connect(config).await.unwrap();
    world.masters[2].kill().unwrap();
    let set = ["CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"];
    world.masters[1].cli(&set).unwrap();
    // Settings are checked on each new connection.
    world.masters[1]
        .cli(&["CLIENT", "KILL", "TYPE", "pubsub"])
        .unwrap();
    try_says(&client, "a", "`no-appendfsync-on-rewrite yes`").await;
    let set = ["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"];
    world.masters[1].cli(&set).unwrap();
    let granted = within(LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}

/// It was made durable while it ran. After a crash it has its last snapshot, and is made durable again.
#[tokio::test]
async fn a_master_back_with_an_old_snapshot_is_not_durable() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let sync = |master: &RedisServer| {
        for (setting, value) in [("appendfsync", "always"), ("appendonly", "yes")] {
            master.cli(&["CONFIG", "SET", setting, value]).unwrap();
        }
    };
    world.masters.iter().for_each(sync);
    let mut config = with_max_ttl(&world);
    config.durable = true;
    let client = connect(config).await.unwrap();
    world.voting(3).await;
    let master = &world.masters[1];
    master.cli(&["SAVE"]).unwrap();
    world.masters[2].kill().unwrap();
    master.kill().unwrap();
    let began = Instant::now();
    master.start().unwrap();
    try_says(&client, "a", "`appendonly no`").await;
    sync(master);
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    let after = began.elapsed();
    assert!(
        after >= MAX_TTL,
        "a vote {after:?} after it came back with old data"
    );
    granted.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_deployment_has_one_max_ttl() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    let error = connect(world.config()).await.unwrap_err().to_string();
    assert!(
        error.contains("`max_ttl`") && error.contains("60s") && error.contains("4s"),
        "{error}"
    );
    let error = lock(&client, "a", MAX_TTL + MS).try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("`ttl`"), "{error}");
    assert!(error.to_string().contains("4s"), "{error}");
    assert!(lock(&client, "a", MAX_TTL).try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn a_replica_and_a_master_that_is_there_twice_are_refused() {
    if no_server() {
        return;
    }
    let world = World::of(2);
    let replica = RedisServer::builder()
        .replica_of(world.masters[0].addr())
        .start()
        .unwrap();
    let masters = || world.masters.iter().map(RedisServer::url);
    let error = connect(config(&url(masters().chain([replica.url()]))))
        .await
        .unwrap_err();
    let text = shown(&error);
    assert!(
        !error.is_transient() && text.contains("is a replica: make it a master"),
        "{text}"
    );

    // The same server by another name.
    let again = world.masters[0].url().replace("127.0.0.1", "localhost");
    let error = connect(config(&url(masters().chain([again.as_str()]))))
        .await
        .unwrap_err();
    let text = shown(&error);
    let port = world.masters[0].addr().port();
    let names_twin = ["127.0.0.1", "localhost"]
        .iter()
        .any(|host| text.contains(&format!("the same server as {host}:{port};")));
    assert!(!error.is_transient() && names_twin, "{text}");
}

#[tokio::test]
async fn new_masters_vote_at_once_and_only_if_all_of_them_are_here() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    world.masters[2].kill().unwrap();
    // Nobody can tell whether the third has grants.
    let client = connect(with_max_ttl(&world)).await.unwrap();
    let error = lock(&client, "a", SECOND).try_acquire().await.unwrap_err();
    assert!(shown(&error).contains("was restarted or emptied"), "{error:?}");
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn first_clients_that_come_at_once_vote_at_once() {
    if no_server() {
        return;
    }
    for _ in 0..5 {
        let world = World::of(3);
        let connecting = (0..6).map(|_| tokio::spawn(connect(world.config())));
        for connecting in connecting.collect::<Vec<_>>() {
            let client = within(LONG, "connected", connecting).await.unwrap().unwrap();
            // Its quarantine would last a minute.
            let granted = within(LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
            granted.unwrap().release().await.unwrap();
        }
    }
}

/// A client that found none of the masters in use may be late: others have used them since, and one was emptied.
#[tokio::test]
async fn a_master_emptied_before_a_first_client_is_done_is_not_new() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (mut late, proxies) = world.behind_proxies();
    late.max_ttl = MAX_TTL;
    // It has checked the others when it comes to this one.
    proxies[2].set(Mode::Blackhole);
    let late = tokio::spawn(connect(late));
    eventually("the late one sees the others", async || {
        proxies[..2]
            .iter()
            .all(|proxy| proxy.counts().replies.bytes > 5_000)
    })
    .await;
    let first = connect(with_max_ttl(&world)).await.unwrap();
    let held = lock(&first, "a", MAX_TTL).acquire().await.unwrap();
    world.voting(3).await;
    world.masters[2].cli(&["FLUSHALL"]).unwrap();
    let emptied = Instant::now();
    proxies[2].set(Mode::Pass);
    let late = within(LONG, "connected", late).await.unwrap().unwrap();
    drop(held);
    while !votes(&world.masters[2]) {
        let _ = lock(&late, "b", SECOND).try_acquire().await;
        tokio::time::sleep(10 * MS).await;
        assert!(emptied.elapsed() < MAX_TTL + LONG, "it is never admitted");
    }
    assert!(
        emptied.elapsed() >= MAX_TTL,
        "a vote {:?} after it was emptied",
        emptied.elapsed()
    );
}

/// Clients with the longest `max_ttl` get in, in any order of writes. The others are told what to do.
#[tokio::test]
async fn first_clients_that_differ_in_max_ttl_agree_on_the_longest() {
    if no_server() {
        return;
    }
    for round in 0..10 {
        let world = World::five();
        let mut shorter = with_max_ttl(&world);
        shorter.max_ttl = MAX_TTL / 2;
        let (one, other) = tokio::join!(connect(shorter.clone()), connect(with_max_ttl(&world)));
        // The first client may refuse the other. If none is in, the one with the longer `max_ttl` gets in.
        let kept_out = matches!((&one, &other), (Ok(_), Err(_)));
        if kept_out {
            continue;
        }
        drop((one, other));
        let longer = within(LONG, "connected", connect(with_max_ttl(&world))).await;
        let longer = longer.unwrap_or_else(|error| panic!("round {round}: {}", shown(&error)));
        let granted = within(MAX_TTL + LONG, "granted", lock(&longer, "a", SECOND).acquire()).await;
        granted.unwrap().release().await.unwrap();
        let text = shown(&connect(shorter).await.unwrap_err());
        assert!(
            text.contains("`max_ttl`") && text.contains("`lockkit:lockkit#redlock`"),
            "{text}"
        );
    }
}

/// A client with a longer `max_ttl` began to use the masters, or put them in quarantine, and went away.
#[tokio::test]
async fn markers_of_a_client_that_is_gone_are_overcome() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    for master in &world.masters[1..] {
        write_marker(master, "-", MAX_TTL);
    }
    let mut config = with_max_ttl(&world);
    config.max_ttl = MAX_TTL / 2;
    let began = Instant::now();
    let text = shown(&connect(config.clone()).await.unwrap_err());
    assert!(
        text.contains("4s") && text.contains("`lockkit:lockkit#redlock`"),
        "{text}"
    );
    until(MAX_TTL + LONG, "let in", async || {
        connect(config.clone()).await.is_ok()
    })
    .await;
    assert!(began.elapsed() + 500 * MS >= MAX_TTL, "{:?}", began.elapsed());
    let client = connect(config).await.unwrap();
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}

/// A master that votes for clients with a shorter `max_ttl` may have granted for longer before.
#[tokio::test]
async fn a_marker_of_another_max_ttl_is_no_vote() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(with_max_ttl(&world)).await.unwrap();
    world.masters[2].kill().unwrap();
    write_marker(&world.masters[1], "", MAX_TTL / 4);
    try_says(&client, "a", "`max_ttl`").await;
    // A marker of a quarantine begins anew, with the longest `max_ttl` of all clients.
    write_marker(&world.masters[1], "-", MAX_TTL / 4);
    let began = Instant::now();
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    assert!(began.elapsed() >= MAX_TTL, "{:?}", began.elapsed());
    granted.unwrap().release().await.unwrap();
}
