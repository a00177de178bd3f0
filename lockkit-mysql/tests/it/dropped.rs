//! Attempts whose future was dropped. The next attempt of the claim reads what the server replied to them, long after.

use std::{num::NonZeroU32, time::Duration};

use lockkit_core::{
    FencingToken,
    spi::{self, Backend as _, Claim},
};
use lockkit_mysql::{Mode, MySqlBackend};
use lockkit_testbed::{eventually, mysql::Flavour};
use tokio::time::Instant;

use crate::servers::{
    Admin, HeldBack, client, config, for_each_flavour, hold_back, name, private, request, shared,
};

for_each_flavour! {
    a_lease_begins_with_a_proof_of_its_own_attempt
    a_size_that_was_in_use_at_the_time_refuses_nobody_later
    a_hold_that_was_passed_on_keeps_the_last_of_its_tokens
}

/// Drops an attempt whose request is held back.
async fn drop_attempt(claim: &mut dyn Claim, held_back: &mut HeldBack) {
    tokio::select! {
        attempted = claim.attempt(Duration::ZERO) => panic!("it was not held back: {attempted:?}"),
        () = held_back.came() => {}
    }
}

async fn a_lease_begins_with_a_proof_of_its_own_attempt(flavour: Flavour) {
    let (addr, mut proof) = hold_back(shared(flavour).addr(), "INTO lockkit_holder")
        .await
        .unwrap();
    let backend = MySqlBackend::connect(config(addr)).await.unwrap();
    let request = request(&name("proven"), spi::Mode::Shared);
    let mut claim = backend.claim(&request).await.unwrap();
    drop_attempt(&mut *claim, &mut proof).await;
    drop(proof.deliver());
    let asked = Instant::now();
    let grant = claim.attempt(Duration::ZERO).await.unwrap().expect("its own");
    let older = asked.saturating_duration_since(grant.lease.since);
    assert_eq!(
        older,
        Duration::ZERO,
        "the lease begins before the attempt that was granted"
    );
    claim.release().await.unwrap();
}

async fn a_size_that_was_in_use_at_the_time_refuses_nobody_later(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let holder = client(server.addr(), Mode::ForUpdate).await;
    let held = holder.semaphore("s", 2).unwrap().acquire().await.unwrap();
    let (addr, mut question) = hold_back(server.addr(), "SELECT 1 FROM lockkit_holder")
        .await
        .unwrap();
    let backend = MySqlBackend::connect(config(addr)).await.unwrap();
    let size = NonZeroU32::new(3).unwrap();
    let mut claim = backend
        .claim(&request("s", spi::Mode::Permits(size)))
        .await
        .unwrap();
    drop_attempt(&mut *claim, &mut question).await;
    let before = admin.status("Com_rollback").await;
    drop(question.deliver());
    eventually("the server says that it is in use", async || {
        admin.status("Com_rollback").await >= before + 2
    })
    .await;
    held.release().await.unwrap();
    let granted = claim.attempt(Duration::ZERO).await;
    let granted = granted.unwrap_or_else(|error| panic!("nobody uses it any more: {}", spi::chain(&error)));
    assert!(granted.is_some());
    claim.release().await.unwrap();
}

async fn a_hold_that_was_passed_on_keeps_the_last_of_its_tokens(flavour: Flavour) {
    let backend = MySqlBackend::connect(config(shared(flavour).addr()))
        .await
        .unwrap();
    let mut request = request(&name("block"), spi::Mode::Exclusive);
    request.tokens = NonZeroU32::new(8).unwrap();
    let mut claim = backend.claim(&request).await.unwrap();
    let grant = claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    let (first, last) = (*grant.tokens.start(), *grant.tokens.end());
    assert_eq!(last, first + 7);
    claim.passed_on(FencingToken::new(first + 3));
    let again = claim.attempt(Duration::ZERO).await.unwrap().expect("its own");
    assert_eq!(
        again.tokens,
        first + 3..=last,
        "tokens beyond its block are others'"
    );
    claim.release().await.unwrap();
}
