//! Losing a hold, and being told.

use std::time::Duration;

use lockkit_core::{AcquireOptions, Error, FencingToken, HoldEnd, LockClient, LossReason};
use tokio::time::{Instant, sleep, timeout};

use crate::case_run::{
    CaseRun, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, eventually, failed, granted_at_once,
    granted_within, lasting, poll_at_most, taken, within,
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
    let viewed = within(PATIENCE, "a subscriber through `held` is told", held.lost()).await?;
    ensure!(
        told == viewed,
        "told {told:?} by the guard and {viewed:?} by its view"
    );
    let ended = within(PATIENCE, "a loss is an end", held.ended()).await?;
    ensure!(
        ended == HoldEnd::Lost(told),
        "told {told:?} as the loss and {ended:?} as the end"
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
        let guard = granted_within(PATIENCE, "a lock that is free", &lock).await?;
        let (before, held, ended) = (guard.lost(), guard.view(), guard.ended());
        if is_dropped {
            drop(guard);
        } else {
            guard.release().await?;
        }
        let ended = within(PATIENCE, "a release is an end", ended).await?;
        ensure!(
            ended == HoldEnd::Released,
            "a normal release was told as the end {ended:?}"
        );
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

pub(crate) async fn lost_hold_is_not_released(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let detection = case.detection(client.info());
    for (part, is_told) in [("told", true), ("untold", false)] {
        let lock = if is_told {
            case.short_lock_of(&client, part)?
        } else {
            // Unless the server tells it, its release is the first to find out.
            case.lock_of(&client, part)?
        };
        let (guard, other) = (
            granted_at_once("a lock nobody has used", &lock).await?,
            case.lock(part).await?,
        );
        let (lost, view) = (guard.lost(), guard.view());
        case.break_hold(&client, part).await?;
        let next = granted_within(detection, "the hold was broken", &other).await?;
        let told = if is_told {
            Some(within(detection, "the holder is told", lost).await?)
        } else {
            None
        };
        let released = guard.release().await;
        // Its connection may have gone with the hold, so that nobody can tell.
        let is_loss = |error: &Error| error.is_lost() || told.is_none() && error.is_transient();
        ensure!(
            released.as_ref().is_err_and(is_loss),
            "expected Lost from the release of a hold that the server has dropped ({part}), got {released:?}"
        );
        if let Some(reason) = told {
            let ended = within(PROMPT, "an end is told at once", view.ended()).await?;
            ensure!(
                ended == HoldEnd::Lost(reason),
                "told {reason:?} as the loss, and {ended:?} as the end after its release"
            );
        }
        ensure!(
            next.is_held() && !view.is_held(),
            "after the release of a hold that was lost, the next one is held: {}, that one: {}",
            next.is_held(),
            view.is_held()
        );
        let third = case.lock(part).await?;
        taken("after the release of a hold that was lost", &third).await?;
        next.release().await?;
    }
    Ok(())
}

pub(crate) async fn watched_guard_can_be_dropped(case: &CaseRun) -> Outcome {
    let (lock, other) = (case.lock("a").await?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let watchers: Vec<_> = (0..8).map(|_| tokio::spawn(guard.lost())).collect();
    sleep(Duration::from_millis(10)).await;
    drop(guard);
    let next = granted_within(PATIENCE, "the watched guard was dropped", &other).await?;
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
        stopped.as_ref().is_err_and(|err| err.error.is_lost()),
        "expected Lost from `run`, got {stopped:?}"
    );
    Ok(())
}

pub(crate) async fn revoked_by_token(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let name = case.name("a");
    let lock = case.short_lock_of(&client, "a")?;
    ensure!(
        !other.revoke_by_force(&name, FencingToken::new(1)).await?,
        "revoking on a lock that is free ended a hold"
    );
    let first = granted_at_once("a lock nobody has used", &lock).await?;
    let stale = first.token();
    first.release().await?;
    let guard = granted_within(PATIENCE, "the lock was released", &lock).await?;
    ensure!(
        !other.revoke_by_force(&name, stale).await?,
        "revoking an old token ended a hold"
    );
    ensure!(guard.is_held(), "revoking an old token ended the current hold");
    ensure!(
        other.revoke_by_force(&name, guard.token()).await?,
        "revoking the holder's token found no hold"
    );
    let reason = within(case.detection(client.info()), "the holder is told", guard.lost()).await?;
    ensure!(reason == LossReason::Revoked, "expected Revoked, got {reason:?}");
    comes_free(PATIENCE, "the hold was revoked", &case.lock("a").await?).await?;
    Ok(())
}

pub(crate) async fn force_is_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let guard = granted_at_once("a lock nobody has used", &case.lock_of(&client, "a")?).await?;
    let answer = client.revoke_by_force(case.name("a"), guard.token()).await;
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
    let (reason, told) = within(PATIENCE, "the loss is told", watcher)
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
    eventually(PATIENCE, "three times the ttl have passed", async || {
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

pub(crate) async fn max_hold_ends_a_hold(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    let ttl = case.harness.ttl();
    let max_hold = ttl * 2;
    let lock = case.short_lock_of(&client, "a")?;
    let before = Instant::now();
    // Kept to the end, as by a task that hangs.
    let guard = granted_at_once(
        "a lock nobody has used",
        &lock.with_options(case.short().max_hold(max_hold)),
    )
    .await?;
    let granted = Instant::now();
    let warned = tokio::spawn(guard.renewal_failing());
    let told = tokio::spawn(guard.lost());
    while granted.elapsed() + ttl / 5 < max_hold {
        ensure!(
            guard.is_held() && !warned.is_finished(),
            "not left alone for its max_hold of {max_hold:?}: after {:?}, {:?}",
            granted.elapsed(),
            guard.check()
        );
        taken("by another client, before max_hold is over", &other).await?;
        sleep(ttl / 10).await;
    }
    let left = within(max_hold + PROMPT, "the end of max_hold is told", warned)
        .await?
        .map_err(failed)?;
    ensure!(
        before.elapsed() >= max_hold && left <= ttl,
        "told after {:?} that {left:?} are left",
        before.elapsed()
    );
    let Some(until) = guard.valid_until() else {
        return Err(failed("a hold past its max_hold has no `valid_until`"));
    };
    let next = granted_within(
        max_hold + ttl + case.limits(&client).idle,
        "max_hold is over",
        &other,
    )
    .await?;
    let since = Instant::now();
    ensure!(
        !guard.is_held() && until <= since,
        "another was granted while the first still believed to hold"
    );
    let took = granted.elapsed();
    ensure!(
        took <= max_hold + ttl + PROMPT,
        "granted to another after {took:?}, with a max_hold of {max_hold:?} and a ttl of {ttl:?}"
    );
    let reason = within(PATIENCE, "the loss is told", told)
        .await?
        .map_err(failed)?;
    ensure!(reason == LossReason::MaxHold, "expected MaxHold, got {reason:?}");
    ensure!(
        next.token() > guard.token(),
        "{:?} came after {:?}",
        next.token(),
        guard.token()
    );
    let released = guard.release().await;
    ensure!(
        released.as_ref().is_err_and(Error::is_lost) && next.is_held(),
        "expected Lost from `release`, got {released:?}"
    );
    next.release().await?;
    Ok(())
}

/// Returns what the server says is left of the lease, where it counts the ttl.
async fn left_at_the_server(case: &CaseRun, client: &LockClient) -> Result<Option<Duration>, Stop> {
    let (short, long) = (case.harness.ttl(), lasting().ttl.unwrap_or_default());
    if client.dead_holder_bound(short) == client.dead_holder_bound(long) {
        return Ok(None);
    }
    let state = client.inspect(case.name("a")).await?;
    let holder = state
        .holders
        .first()
        .ok_or_else(|| failed("the server shows no holder"))?;
    Ok(holder.left)
}

pub(crate) async fn ttl_of_a_live_hold(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    let (ttl, long) = (case.harness.ttl(), lasting().ttl.unwrap_or_default());
    // Nothing but `set_ttl` renews it.
    let lock = case.lock_of(&client, "a")?.with_options(lasting().renew(false));
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    for bad in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let refused = guard.set_ttl(bad).await;
        ensure!(
            matches!(&refused, Err(Error::InvalidOptions { option: "ttl", .. })) && guard.is_held(),
            "expected InvalidOptions of `ttl` for {bad:?} and a hold that goes on, got {refused:?}"
        );
    }
    guard.set_ttl(ttl).await?;
    let short = guard.valid_until();
    ensure!(
        short.is_some_and(|end| end <= Instant::now() + ttl),
        "a shorter ttl left the lease as it was: {short:?}"
    );
    let left = left_at_the_server(case, &client).await?;
    ensure!(
        left.is_none_or(|left| left <= ttl),
        "the server still counts {left:?} with a ttl of {ttl:?}"
    );
    taken("by another client, with a shorter ttl", &other).await?;
    guard.set_ttl(long).await?;
    ensure!(
        guard.valid_until() > short && guard.is_held(),
        "a longer ttl left the lease as it was: {short:?}"
    );
    let left = left_at_the_server(case, &client).await?;
    ensure!(
        left.is_none_or(|left| left > long / 2),
        "the server counts {left:?} with a ttl of {long:?}"
    );
    let token = guard.token();
    guard.set_ttl(ttl).await?;
    ensure!(guard.token() == token, "the token is another one: {token:?}");
    let lost = within(ttl + PROMPT, "the shorter lease lapses", guard.lost()).await?;
    ensure!(lost == LossReason::Expired, "expected Expired, got {lost:?}");
    let next = granted_within(ttl + case.limits(&client).idle, "the lease lapsed", &other).await?;
    let refused = guard.set_ttl(long).await;
    ensure!(
        refused.as_ref().is_err_and(Error::is_lost) && next.is_held(),
        "expected Lost from `set_ttl`, got {refused:?}"
    );
    next.release().await?;

    // In the background, it is renewed for the new ttl.
    let guard = granted_within(PATIENCE, "the lock was released", &case.lock_of(&client, "a")?).await?;
    guard.set_ttl(ttl).await?;
    let begin = Instant::now();
    while begin.elapsed() < ttl * 2 {
        sleep(ttl / 5).await;
        ensure!(
            guard.is_held() && guard.lease_length().is_some_and(|length| length <= ttl),
            "not renewed for the new ttl: {:?}, {:?}",
            guard.check(),
            guard.lease_length()
        );
    }
    guard.release().await?;
    Ok(())
}

pub(crate) async fn ttl_below_the_least_is_refused(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let least = client.info().least_ttl;
    ensure!(
        least >= AcquireOptions::MIN_TTL && least <= case.harness.ttl(),
        "its least ttl is {least:?}, and it is tested with {:?}",
        case.harness.ttl()
    );
    let lock = case.lock_of(&client, "a")?;
    let (named, below) = (
        format!("{least:?}"),
        least.saturating_sub(Duration::from_millis(1)),
    );
    let is_refused = |refused: &Error| match refused {
        Error::InvalidOptions {
            option: "ttl",
            reason,
            ..
        } => reason.contains(&named),
        _ => false,
    };
    let options = lasting().ttl(below);
    for options in [options.clone().renew(false), options] {
        let refused = lock.acquire_with(&options).await;
        ensure!(
            refused.as_ref().is_err_and(is_refused),
            "expected InvalidOptions of `ttl` that names {least:?} for {below:?}, got {refused:?}"
        );
    }
    let guard = granted_at_once("what was refused holds nothing", &lock).await?;
    let refused = guard.set_ttl(below).await;
    ensure!(
        refused.as_ref().is_err_and(is_refused) && guard.is_held(),
        "expected InvalidOptions of `ttl` that names {least:?} for {below:?}, and a hold that goes on, got {refused:?}"
    );
    guard.release().await?;
    Ok(())
}

pub(crate) async fn ttl_change_dropped_midway(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (ttl, long) = (case.harness.ttl() * 4, case.harness.ttl() * 20);
    let guard = granted_at_once(
        "a lock nobody has used",
        &case
            .lock_of(&client, "a")?
            .with_options(lasting().ttl(long).renew(false)),
    )
    .await?;
    for polls in 1..12 {
        for ttl in [ttl, long] {
            poll_at_most(polls, guard.set_ttl(ttl)).await.transpose()?;
            let left = left_at_the_server(case, &client).await?;
            let seen = Instant::now();
            let (Some(until), true) = (guard.valid_until(), guard.is_held()) else {
                return Err(failed(format!("lost after {polls} polls: {:?}", guard.check())));
            };
            // Some servers count whole seconds.
            ensure!(
                left.is_none_or(|left| until <= seen + left + Duration::from_secs(1)),
                "after {polls} polls, the lease lasts for {:?} here and for {left:?} at the server",
                until - seen
            );
        }
    }
    guard.set_ttl(long).await?;
    guard.release().await?;
    comes_free(PATIENCE, "the hold was released", &case.lock("a").await?).await
}

pub(crate) async fn ttl_without_a_lease_is_unsupported(case: &CaseRun) -> Outcome {
    let guard = granted_at_once("a lock nobody has used", &case.lock("a").await?).await?;
    let refused = guard.set_ttl(case.harness.ttl()).await;
    ensure!(
        matches!(refused, Err(Error::Unsupported { .. })) && guard.is_held(),
        "expected Unsupported and a hold that goes on, got {refused:?}"
    );
    ensure!(
        guard.valid_until().is_none(),
        "it has an end now: {:?}",
        guard.valid_until()
    );
    guard.release().await?;
    Ok(())
}
