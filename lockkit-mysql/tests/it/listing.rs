//! Lists while locks come and go.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use lockkit_core::Lock;
use lockkit_mysql::Mode;
use lockkit_testbed::mysql::Flavour;
use tokio::task::JoinSet;

use crate::servers::{Admin, client, cycle, for_each_flavour, name, private};

for_each_flavour! {
    what_is_held_throughout_is_listed_beside_what_goes
    a_page_is_no_longer_than_a_reply_may_be
}

/// A semaphore has a thousand holders at most, a shared lock has as many as there are connections. Each describes itself at length.
async fn a_page_is_no_longer_than_a_reply_may_be(flavour: Flavour) {
    const NAMES: usize = 12;

    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let other = client(server.addr(), Mode::ForUpdate).await;
    cycle(&other, "made").await;
    let long = "x".repeat(900);
    let mut shown = HashMap::new();
    for index in 0..=NAMES {
        let name = format!("many/{index:02}/{long}");
        let row = format!("lockkit:{name}");
        // One name has more than all holds of a page.
        let thousands = if index == NAMES { 3 } else { 1 };
        for thousand in 0..thousands {
            admin
                .run(&format!(
                    "INSERT INTO lockkit_holder (name, connection, token, seconds, label, full_name) \
                     WITH RECURSIVE s AS (SELECT 1 AS n UNION ALL SELECT n+1 FROM s WHERE n<1000) \
                     SELECT CONCAT(LEFT('{row}', 191), SHA2('{row}', 256)), 1000000+{thousand}*1000+n, {thousand}*1000+n, 30, \
                     REPEAT('l', 256), '{name}' FROM s"
                ))
                .await;
        }
        shown.insert(name, thousands * 1_000);
    }
    let mut list = other.list("many/").unwrap();
    while let Some(lock) = list.next().await {
        let lock = lock.unwrap();
        let expected = shown.remove(lock.name.as_str());
        assert_eq!(Some(lock.state.holders.len()), expected, "{:?}", lock.name);
    }
    assert!(shown.is_empty(), "{} are left out", shown.len());
}

/// A page is of so many names. Some of them are released between two reads of the server's.
async fn what_is_held_throughout_is_listed_beside_what_goes(flavour: Flavour) {
    const HELD: usize = 40;
    const LISTS: usize = 60;

    let server = private(flavour, &[]);
    let (holder, other) = (
        client(server.addr(), Mode::ForUpdate).await,
        client(server.addr(), Mode::ForUpdate).await,
    );
    let prefix = name("list");
    let semaphore = |index: usize, what: &str| {
        let name = format!("{prefix}/{index:02}/{what}");
        holder.semaphore(name, 1).unwrap()
    };
    let mut held = HashMap::new();
    for index in 0..HELD {
        let lock = semaphore(index, "held");
        held.insert(lock.name().clone(), lock.acquire().await.unwrap());
    }
    let (is_over, cycles) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let mut churn = JoinSet::new();
    for index in (0..HELD).step_by(2) {
        let (is_over, cycles) = (is_over.clone(), cycles.clone());
        let lock: Lock = semaphore(index, "come and gone");
        churn.spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                lock.acquire().await.unwrap().release().await.unwrap();
                cycles.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let (mut missing, mut shown_beside) = (Vec::new(), 0);
    for round in 0..LISTS {
        let mut seen = HashMap::new();
        let mut list = other.list(&prefix).unwrap();
        while let Some(lock) = list.next().await {
            *seen.entry(lock.unwrap().name).or_insert(0) += 1;
        }
        assert!(seen.values().all(|times| *times == 1), "twice: {seen:?}");
        shown_beside += seen.keys().filter(|name| !held.contains_key(name)).count();
        let left_out = held.keys().filter(|name| !seen.contains_key(name)).count();
        if left_out > 0 {
            missing.push((round, left_out));
        }
    }
    is_over.store(true, Ordering::Relaxed);
    while let Some(ended) = churn.join_next().await {
        ended.unwrap();
    }
    let cycles = cycles.load(Ordering::Relaxed);
    assert!(
        cycles > LISTS && shown_beside > 0,
        "{cycles} cycles, {shown_beside} shown"
    );
    assert!(
        missing.is_empty(),
        "{} of {LISTS} lists leave out what is held, with {cycles} cycles beside them: (list, locks) {missing:?}",
        missing.len()
    );
}
