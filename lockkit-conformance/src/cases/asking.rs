//! Asking a holder to give up its hold.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, Error, FenceGate, FencingToken, Lock, LockClient, LockGuard, LossReason, Revocation,
};
use tokio::{task::JoinHandle, time::sleep};

use crate::case_run::{
    CaseRun, Outcome, PATIENCE, Stop, comes_free, ensure, eventually, failed, granted_at_once,
    granted_within, taken, within,
};

/// The rounds of `asked_rounds` if nobody says otherwise.
const USUAL_ROUNDS: usize = 5;

/// Asks in the background.
fn asks(client: &LockClient, name: &str, token: FencingToken) -> JoinHandle<Result<Revocation, Error>> {
    let (client, name) = (client.clone(), name.to_owned());
    tokio::spawn(async move { client.revoke(name, token, PATIENCE).await })
}

async fn answer(asking: JoinHandle<Result<Revocation, Error>>) -> Result<Revocation, Stop> {
    let done = within(PATIENCE * 2, "whoever asks gets an answer", asking).await?;
    Ok(done.map_err(failed)??)
}

/// Waits until the guard is lost, which has to be since its holder was asked.
async fn is_asked(case: &CaseRun, client: &LockClient, guard: &LockGuard) -> Outcome {
    let detection = case.detection(client.info());
    let reason = within(detection, "the holder is told that it was asked", guard.lost()).await?;
    ensure!(reason == LossReason::Asked, "expected Asked, got {reason:?}");
    ensure!(
        !guard.is_held(),
        "a guard that was asked for says that it is held"
    );
    Ok(())
}

pub(crate) async fn asked_holder_is_waited_for(case: &CaseRun) -> Outcome {
    let (client, operator) = (case.client().await?, case.client().await?);
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&client, "a")?).await?;
    let next = case.lock("a").await?;
    let waiter = tokio::spawn({
        let next = next.clone();
        async move { next.acquire().await }
    });
    let asking = asks(&operator, &case.name("a"), guard.token());
    is_asked(case, &client, &guard).await?;
    // The user brings its work to an end.
    for _ in 0..3 {
        taken("while the holder that was asked has its guard", &next).await?;
        ensure!(
            !waiter.is_finished(),
            "a waiter was granted while the holder that was asked had its guard"
        );
        ensure!(
            !asking.is_finished(),
            "whoever asked was answered while the holder had its guard"
        );
        sleep(case.harness.ttl() / 20).await;
    }
    drop(guard);
    let said = answer(asking).await?;
    ensure!(
        said == Revocation::Confirmed,
        "the holder let go in time, and whoever asked was told {said:?}"
    );
    let granted = within(case.limits(&operator).idle, "the next is granted", waiter).await?;
    granted.map_err(failed)??.release().await?;
    Ok(())
}

pub(crate) async fn asked_holder_that_stays_expires(case: &CaseRun) -> Outcome {
    let operator = case.client().await?;
    for (part, renews) in [("a", true), ("b", false)] {
        let client = case.client().await?;
        let lock = client
            .lock(case.name(part))?
            .with_options(case.short().renew(renews));
        let guard = granted_at_once("a lock nobody has used", &lock).await?;
        let asking = asks(&operator, &case.name(part), guard.token());
        let limit = case.freed_after_death(&client) + case.limits(&client).idle;
        let other = case.lock(part).await?;
        let next = granted_within(limit, "the lease of the one who was asked ended", &other).await?;
        let until = guard.valid_until();
        ensure!(
            until.is_some_and(|until| until <= tokio::time::Instant::now()),
            "the next was granted before the lease of the one who was asked was over: {until:?}"
        );
        ensure!(
            !guard.is_held(),
            "the next was granted, and the one before says that it holds"
        );
        let said = answer(asking).await?;
        ensure!(
            matches!(said, Revocation::Expired | Revocation::Confirmed),
            "the hold is over, and whoever asked was told {said:?}"
        );
        next.release().await?;
        drop(guard);
    }
    Ok(())
}

pub(crate) async fn asked_by_token(case: &CaseRun) -> Outcome {
    let (client, operator) = (case.client().await?, case.client().await?);
    let name = case.name("a");
    let lock = case.short_lock_of(&client, "a")?;
    let none = operator.revoke(&name, FencingToken::new(1), PATIENCE).await?;
    ensure!(none == Revocation::NotHeld, "of a lock that is free: {none:?}");
    let first = granted_at_once("a lock nobody has used", &lock).await?;
    let stale = first.token();
    first.release().await?;
    let guard = granted_within(PATIENCE, "the lock was released", &lock).await?;
    let none = operator.revoke(&name, stale, PATIENCE).await?;
    ensure!(none == Revocation::NotHeld, "of a hold that is over: {none:?}");
    guard.renew().await?;
    let still = operator.revoke(&name, guard.token(), Duration::ZERO).await?;
    ensure!(
        matches!(still, Revocation::StillHeld { .. }),
        "whoever does not wait was told {still:?}"
    );
    is_asked(case, &client, &guard).await?;
    let asking: Vec<_> = (0..3).map(|_| asks(&operator, &name, guard.token())).collect();
    // Each has asked, or found the hold.
    sleep(case.harness.ttl() / 10).await;
    let released = guard.release().await;
    ensure!(
        released.as_ref().is_err_and(Error::is_lost),
        "expected Lost from releasing a hold that was asked for, got {released:?}"
    );
    for asking in asking {
        let said = answer(asking).await?;
        ensure!(
            matches!(said, Revocation::Confirmed | Revocation::NotHeld),
            "one of several was told {said:?}"
        );
    }
    let next = granted_within(PATIENCE, "the lock was let go", &lock).await?;
    next.renew().await?;
    ensure!(
        next.is_held(),
        "the next hold was hit by a request that named another"
    );
    next.release().await?;
    Ok(())
}

pub(crate) async fn asked_heir(case: &CaseRun) -> Outcome {
    let (client, operator) = (case.client().await?, case.client().await?);
    let lock = case.short_lock_of(&client, "a")?;
    let mut guard = granted_at_once("a lock nobody has used", &lock).await?;
    // The first hold may have reserved no tokens to be passed on with.
    for _ in 0..3 {
        let heir = tokio::spawn({
            let lock = lock.clone();
            async move { lock.acquire().await }
        });
        sleep(case.harness.ttl() / 20).await;
        guard.release().await?;
        let granted = within(case.limits(&client).idle, "the heir is granted", heir).await?;
        guard = granted.map_err(failed)??;
    }
    let asking = asks(&operator, &case.name("a"), guard.token());
    is_asked(case, &client, &guard).await?;
    taken(
        "while the heir that was asked has its guard",
        &case.lock("a").await?,
    )
    .await?;
    drop(guard);
    let said = answer(asking).await?;
    ensure!(
        said == Revocation::Confirmed,
        "the heir let go in time, and whoever asked was told {said:?}"
    );
    Ok(())
}

pub(crate) async fn asked_shared_holder(case: &CaseRun) -> Outcome {
    let (one, other) = (case.client().await?, case.client().await?);
    let asked = granted_at_once("a lock nobody has used", &case.short_lock_of(&one, "a")?.shared()).await?;
    let spared = granted_at_once("beside a reader", &case.short_lock_of(&other, "a")?.shared()).await?;
    one_of_two(case, &one, (asked, spared), false).await
}

pub(crate) async fn asked_permit(case: &CaseRun) -> Outcome {
    let (one, other) = (case.client().await?, case.client().await?);
    let permit = |client: &LockClient| {
        let semaphore = client.semaphore(case.name("a"), 2)?;
        Ok::<Lock, Error>(semaphore.with_options(case.short()))
    };
    let asked = granted_at_once("a semaphore nobody has used", &permit(&one)?).await?;
    let spared = granted_at_once("beside another permit", &permit(&other)?).await?;
    one_of_two(case, &one, (asked, spared), true).await
}

async fn one_of_two(
    case: &CaseRun,
    client: &LockClient,
    (asked, spared): (LockGuard, LockGuard),
    is_permit: bool,
) -> Outcome {
    let name = case.name("a");
    let token = asked.token();
    let asking = tokio::spawn({
        let client = client.clone();
        async move {
            if is_permit {
                client.revoke_permit(name, token, PATIENCE).await
            } else {
                client.revoke(name, token, PATIENCE).await
            }
        }
    });
    is_asked(case, client, &asked).await?;
    spared.renew().await?;
    ensure!(spared.is_held(), "the hold beside it was hit, too");
    drop(asked);
    let said = answer(asking).await?;
    ensure!(said == Revocation::Confirmed, "whoever asked was told {said:?}");
    spared.renew().await?;
    spared.release().await?;
    Ok(())
}

pub(crate) async fn asked_releasing_holder(case: &CaseRun) -> Outcome {
    let (client, operator) = (case.client().await?, case.client().await?);
    let lock = case.short_lock_of(&client, "a")?;
    for round in 0..20 {
        let guard = granted_within(PATIENCE, "the lock was released", &lock).await?;
        let asking = asks(&operator, &case.name("a"), guard.token());
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        match guard.release().await {
            Err(err) if !err.is_lost() => return Err(err.into()),
            _ => {}
        }
        let said = answer(asking).await?;
        ensure!(
            matches!(said, Revocation::Confirmed | Revocation::NotHeld),
            "round {round}: the holder released, and whoever asked was told {said:?}"
        );
    }
    comes_free(PATIENCE, "all of them have released", &lock).await
}

/// The resource that the holds protect: it knows when two are at work at once.
#[derive(Debug, Default)]
struct Resource {
    in_use: AtomicBool,
    overlaps: AtomicBool,
    gate: FenceGate,
}

impl Resource {
    fn enter(&self, token: FencingToken) {
        if self.in_use.swap(true, Ordering::SeqCst) || self.gate.admit(token).is_err() {
            self.overlaps.store(true, Ordering::SeqCst);
        }
    }

    fn leave(&self) {
        self.in_use.store(false, Ordering::SeqCst);
    }
}

pub(crate) async fn asked_rounds(case: &CaseRun) -> Outcome {
    let rounds = rounds();
    let resource = Arc::new(Resource::default());
    let operator = case.client().await?;
    let mut rng = fastrand::Rng::with_seed(case.seed);
    let clients = [case.client().await?, case.client().await?];
    let options = AcquireOptions::new().ttl(case.harness.ttl() * 2);
    for round in 0..rounds {
        let lock = clients[round % 2]
            .lock(case.name("a"))?
            .with_options(options.clone());
        let next = clients[(round + 1) % 2]
            .lock(case.name("a"))?
            .with_options(options.clone());
        let guard = granted_within(PATIENCE, "the round before is over", &lock).await?;
        let token = guard.token();
        resource.enter(token);
        let at_work = Duration::from_micros(rng.u64(0..20_000));
        let holder = tokio::spawn({
            let resource = resource.clone();
            async move {
                let reason = guard.lost().await;
                // The user needs a moment to stop.
                sleep(at_work).await;
                resource.leave();
                drop(guard);
                reason
            }
        });
        let waiter = tokio::spawn({
            let resource = resource.clone();
            async move {
                let guard = next.acquire().await?;
                resource.enter(guard.token());
                resource.leave();
                guard.release().await
            }
        });
        sleep(Duration::from_micros(rng.u64(0..3_000))).await;
        let said = answer(asks(&operator, &case.name("a"), token)).await?;
        ensure!(
            said == Revocation::Confirmed,
            "round {round} of {rounds}: the holder lets go at once, and whoever asked was told {said:?}"
        );
        let reason = within(PATIENCE, "the holder has let go", holder).await?;
        let reason = reason.map_err(failed)?;
        ensure!(
            reason == LossReason::Asked,
            "round {round} of {rounds}: the holder lost it as {reason:?}"
        );
        let limit = case.limits(&operator).idle;
        let next = within(limit, "the waiter is granted", waiter).await?;
        next.map_err(failed)??;
        if resource.overlaps.load(Ordering::SeqCst) {
            let overlap = failed(format!(
                "round {round} of {rounds}: the next was granted while the holder that was asked was at work"
            ));
            return Err(overlap.whatever_the_machine_did());
        }
    }
    Ok(())
}

/// A few by default. The environment variable `LOCKKIT_ASKED_ROUNDS` sets another number.
fn rounds() -> usize {
    let set = std::env::var("LOCKKIT_ASKED_ROUNDS").ok();
    set.and_then(|rounds| rounds.trim().parse().ok())
        .unwrap_or(USUAL_ROUNDS)
}

/// Returns how long the rounds beyond the usual ones may take: in each, the holder may hear of the request as late as its lease ends.
pub(crate) fn time_for_more_rounds(ttl: Duration) -> Duration {
    let more = rounds().saturating_sub(USUAL_ROUNDS);
    (2 * ttl).saturating_mul(u32::try_from(more).unwrap_or(u32::MAX))
}

pub(crate) async fn asking_is_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&client, "a")?).await?;
    let said = client.revoke(case.name("a"), guard.token(), PATIENCE).await;
    ensure!(
        matches!(said, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {said:?}"
    );
    guard.renew().await?;
    eventually(PATIENCE, "the hold is as it was", async || Ok(guard.is_held())).await?;
    guard.release().await?;
    Ok(())
}
