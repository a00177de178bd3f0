//! Losing a hold, and being told.

use std::time::Duration;

use lockkit_core::{Error, FencingToken, LossReason};
use tokio::time::{Instant, sleep, timeout};

use crate::case_run::{
    CaseRun, Outcome, PROMPT, comes_free, ensure, eventually, failed, granted_at_once, granted_within,
    lasting, taken, within,
};

pub(crate) async fn saboteur_breaks_an_unprotected_hold(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    // A lease that is not renewed and that would last much longer than this case.
    let options = lasting().ttl(Duration::from_secs(60)).renew(false);
    let guard = granted_at_once(
        "a lock nobody has used",
        &case.lock_of(&client, "a")?.with_options(options),
    )
    .await?;
    let other = case.lock("a").await?;
    taken("by another client, before the hold is broken", &other).await?;
    case.break_hold(&client, "a").await?;
    comes_free(case.detection(client.info()), "the hold was broken", &other).await?;
    drop(guard);
    Ok(())
}

pub(crate) async fn told_when_broken(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let lock = case.short_lock_of(&client, "a")?;
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let (early, held) = (guard.lost(), guard.view());
    let early = tokio::spawn(early);
    case.break_hold(&client, "a").await?;
    let detection = case.detection(client.info());
    let told = within(detection, "whoever waited for the loss is told", early)
        .await?
        .map_err(failed)?;
    let again = within(PROMPT, "a late subscriber is told at once", guard.lost()).await?;
    ensure!(told == again, "told {told:?} first and {again:?} later");
    let viewed = within(PROMPT, "a subscriber through `held` is told", held.lost()).await?;
    ensure!(
        told == viewed,
        "told {told:?} by the guard and {viewed:?} by its view"
    );
    ensure!(
        !guard.is_held() && !held.is_held(),
        "told of the loss, yet `is_held`"
    );
    let check = guard.check();
    ensure!(
        check.as_ref().is_err_and(Error::is_lost),
        "expected Lost from `check`, got {check:?}"
    );
    // For good: a new hold of the same client revives nothing.
    let next = granted_within(detection, "the hold was broken", &lock).await?;
    ensure!(
        !guard.is_held(),
        "a lost guard is held again after the lock was granted anew"
    );
    let renewed = guard.renew().await;
    ensure!(
        renewed.as_ref().is_err_and(Error::is_lost),
        "expected Lost from renewing a lost guard, got {renewed:?}"
    );
    ensure!(
        next.is_held() && !guard.is_held(),
        "renewing a lost guard changed what is held"
    );
    let released = guard.release().await;
    ensure!(
        released.as_ref().is_err_and(Error::is_lost),
        "expected Lost from `release`, got {released:?}"
    );
    next.release().await?;
    Ok(())
}

pub(crate) async fn not_told_by_release(case: &CaseRun) -> Outcome {
    let lock = case.lock("a").await?;
    for is_dropped in [false, true] {
        let guard = granted_within(PROMPT, "a lock that is free", &lock).await?;
        let (before, held) = (guard.lost(), guard.view());
        if is_dropped {
            drop(guard);
        } else {
            guard.release().await?;
        }
        let silence = Duration::from_millis(150);
        for lost in [before, held.lost()] {
            if let Ok(reason) = timeout(silence, lost).await {
                return Err(failed(format!("a normal release was told as a loss: {reason:?}")));
            }
        }
        ensure!(
            !held.is_held(),
            "a view of a guard that was released says that it is held"
        );
    }
    Ok(())
}

pub(crate) async fn watched_guard_can_be_dropped(case: &CaseRun) -> Outcome {
    let (lock, other) = (case.lock("a").await?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let watchers: Vec<_> = (0..8).map(|_| tokio::spawn(guard.lost())).collect();
    sleep(Duration::from_millis(10)).await;
    drop(guard);
    let next = granted_within(PROMPT, "the watched guard was dropped", &other).await?;
    for watcher in watchers {
        ensure!(
            !watcher.is_finished(),
            "a watcher ended when its guard was dropped: {:?}",
            watcher.await
        );
        watcher.abort();
    }
    next.release().await?;
    Ok(())
}

pub(crate) async fn running_work_is_stopped(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&client, "a")?).await?;
    let done = guard.run(async { 7 }).await?;
    ensure!(done == 7, "`run` returned {done} for 7");
    case.break_hold(&client, "a").await?;
    let work = guard.run(std::future::pending::<()>());
    let stopped = within(case.detection(client.info()), "`run` stops", work).await?;
    ensure!(
        stopped.as_ref().is_err_and(Error::is_lost),
        "expected Lost from `run`, got {stopped:?}"
    );
    Ok(())
}

pub(crate) async fn revoked_by_token(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let name = case.name("a");
    let lock = case.short_lock_of(&client, "a")?;
    ensure!(
        !other.revoke(&name, FencingToken::new(1)).await?,
        "revoking on a lock that is free ended a hold"
    );
    let first = granted_at_once("a lock nobody has used", &lock).await?;
    let stale = first.token();
    first.release().await?;
    let guard = granted_within(PROMPT, "the lock was released", &lock).await?;
    ensure!(
        !other.revoke(&name, stale).await?,
        "revoking an old token ended a hold"
    );
    ensure!(guard.is_held(), "revoking an old token ended the current hold");
    ensure!(
        other.revoke(&name, guard.token()).await?,
        "revoking the holder's token found no hold"
    );
    let reason = within(case.detection(client.info()), "the holder is told", guard.lost()).await?;
    ensure!(reason == LossReason::Revoked, "expected Revoked, got {reason:?}");
    comes_free(PROMPT, "the hold was revoked", &case.lock("a").await?).await?;
    Ok(())
}

pub(crate) async fn revoke_is_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let guard = granted_at_once("a lock nobody has used", &case.lock_of(&client, "a")?).await?;
    let answer = client.revoke(case.name("a"), guard.token()).await;
    ensure!(
        matches!(answer, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {answer:?}"
    );
    ensure!(guard.is_held(), "a revoke that is Unsupported ended the hold");
    Ok(())
}

pub(crate) async fn unrenewed_lease_lapses_first_here(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let ttl = case.harness.ttl() / 2;
    let options = case.short().ttl(ttl).renew(false);
    let before = Instant::now();
    let guard = granted_at_once(
        "a lock nobody has used",
        &case.lock_of(&client, "a")?.with_options(options),
    )
    .await?;
    let Some(until) = guard.valid_until() else {
        return Err(failed("a hold with a lease has no `valid_until`"));
    };
    ensure!(
        until <= Instant::now() + ttl,
        "the lease counts from later than the reply"
    );
    ensure!(until > before, "the lease was over when it was granted");
    let watcher = tokio::spawn({
        let lost = guard.lost();
        async move { (lost.await, Instant::now()) }
    });
    let next = granted_within(
        ttl + case.limits(&client).idle,
        "the lease lapsed",
        &case.lock("a").await?,
    )
    .await?;
    let granted = Instant::now();
    ensure!(
        !guard.is_held(),
        "another was granted while the first still believed to hold"
    );
    let (reason, told) = within(PROMPT, "the loss is told", watcher)
        .await?
        .map_err(failed)?;
    ensure!(reason == LossReason::Expired, "expected Expired, got {reason:?}");
    ensure!(
        until <= granted,
        "another was granted {:?} before the first one's deadline",
        until - granted
    );
    ensure!(
        told + Duration::from_millis(1) >= until,
        "told {:?} before the deadline",
        until - told
    );
    ensure!(
        next.token() > guard.token(),
        "{:?} came after {:?}",
        next.token(),
        guard.token()
    );
    Ok(())
}

pub(crate) async fn renewal_keeps_the_hold(case: &CaseRun) -> Outcome {
    let ttl = case.harness.ttl();
    let guard = granted_at_once(
        "a lock nobody has used",
        &case.short_lock_of(&case.client().await?, "a")?,
    )
    .await?;
    let (begin, first) = (Instant::now(), guard.valid_until());
    let other = case.lock("a").await?;
    while begin.elapsed() < ttl * 2 {
        sleep(ttl / 5).await;
        ensure!(
            guard.is_held(),
            "lost after {:?} although it is renewed: {:?}",
            begin.elapsed(),
            guard.check()
        );
        taken("by another client, while the hold is renewed", &other).await?;
    }
    let last = guard.valid_until();
    ensure!(
        last > first,
        "the deadline did not advance: {first:?}, then {last:?}"
    );
    guard.release().await?;
    Ok(())
}

pub(crate) async fn renewed_by_hand(case: &CaseRun) -> Outcome {
    let ttl = case.harness.ttl();
    let lock = case.lock("a").await?.with_options(case.short().renew(false));
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let begin = Instant::now();
    let other = case.lock("a").await?;
    while begin.elapsed() < ttl + ttl / 2 {
        sleep(ttl / 4).await;
        let before = guard.valid_until();
        guard.renew().await?;
        ensure!(
            guard.valid_until() > before,
            "renewing by hand did not move the deadline"
        );
        taken("by another client, while the hold is renewed by hand", &other).await?;
    }
    let lost = guard.lost();
    within(
        ttl + PROMPT,
        "a lease that is no longer renewed by hand lapses",
        lost,
    )
    .await?;
    comes_free(ttl + PROMPT, "the lease lapsed", &other).await?;
    Ok(())
}

pub(crate) async fn hold_without_lease_stays(case: &CaseRun) -> Outcome {
    let ttl = Duration::from_millis(100);
    let lock = case
        .lock("a")
        .await?
        .with_options(lasting().ttl(ttl).renew(false));
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    ensure!(
        guard.valid_until().is_none(),
        "a hold without a lease has a deadline: {:?}",
        guard.valid_until()
    );
    let (begin, other) = (Instant::now(), case.lock("a").await?);
    eventually(PROMPT, "three times the ttl have passed", async || {
        taken("by another client", &other).await?;
        ensure!(
            guard.is_held(),
            "a hold without a lease was lost: {:?}",
            guard.check()
        );
        Ok(begin.elapsed() > ttl * 3)
    })
    .await?;
    guard.release().await?;
    Ok(())
}
