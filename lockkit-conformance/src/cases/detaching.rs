//! Holds that go on without a guard, and are adopted by another client.

use std::{num::NonZeroU32, time::Duration};

use futures_util::future::join_all;
use lockkit_core::{
    DetachedHold, Error, FencingToken, HoldEnd, Lock, LockClient, LockGuard, LockKind, LossReason, Result,
    Revocation, spi::Mode,
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    case_run::{
        CaseRun, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, failed, granted_at_once,
        granted_within, is_clean, lasting, look, poll_at_most, taken, within,
    },
    helper::Request,
};

/// Detaches a hold, and sends it as a message.
async fn detach(guard: LockGuard) -> Result<DetachedHold> {
    DetachedHold::decode(&guard.detach().await?.encode())
}

fn is_gone(adopted: &Result<LockGuard>) -> bool {
    matches!(
        adopted,
        Err(Error::Lost {
            reason: LossReason::Gone,
            ..
        })
    )
}

pub(crate) async fn detached_hold_is_adopted(case: &CaseRun) -> Outcome {
    let (here, there) = (case.client().await?, case.client().await?);
    let other = case.lock("a").await?;
    let ttl = case.harness.ttl();
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&here, "a")?).await?;
    let (token, view, lost) = (guard.token(), guard.view(), guard.lost());
    let detached = guard.detach().await.map_err(Error::from)?;
    let end = within(PATIENCE, "a hold that is detached has ended here", view.ended()).await?;
    ensure!(
        end == HoldEnd::Detached,
        "expected Detached as the end, got {end:?}"
    );
    ensure!(
        !view.is_held(),
        "a view of a hold that was detached says that it is held"
    );
    let check = view.check();
    ensure!(
        matches!(check, Err(Error::Released { .. })),
        "expected Released from a view, got {check:?}"
    );
    taken("of a hold that nobody has", &other).await?;
    ensure!(
        detached.token() == token && detached.ttl() == ttl && detached.name().as_str() == case.name("a"),
        "detached is {detached:?}"
    );
    let mut received = DetachedHold::decode(&detached.encode())?;
    let mut late = DetachedHold::decode(&detached.encode())?;
    drop(detached);
    taken("of a hold whose message is on its way", &other).await?;

    let adopted = there.adopt(&mut received).await?;
    ensure!(
        adopted.is_held() && adopted.token() == token,
        "adopted with token {:?}, detached with {token:?}",
        adopted.token()
    );
    let again = there.adopt(&mut received).await;
    ensure!(
        is_gone(&again),
        "adopted a second time, by the same value: {again:?}"
    );
    let again = here.adopt(&mut late).await;
    ensure!(is_gone(&again), "adopted a second time, elsewhere: {again:?}");
    let begin = Instant::now();
    while begin.elapsed() < ttl * 2 {
        sleep(ttl / 5).await;
        ensure!(
            adopted.is_held(),
            "not renewed after it was adopted: {:?}",
            adopted.check()
        );
        taken("of a hold that was adopted", &other).await?;
    }
    let shown = look(&there, &case.name("a"), LockKind::Lock).await?.holders;
    ensure!(
        matches!(&shown[..], [holder] if holder.token == token),
        "an inspection shows {shown:?} for the one holder with {token:?}"
    );
    if let Ok(reason) = timeout(Duration::from_millis(50), lost).await {
        return Err(failed(format!(
            "a hold that was detached was told as lost: {reason:?}"
        )));
    }
    adopted.release().await?;
    let again = here.adopt(&mut late).await;
    ensure!(is_gone(&again), "adopted after its release: {again:?}");
    let next = granted_within(PATIENCE, "whoever adopted has released", &other).await?;
    ensure!(next.token() > token, "{:?} came after {token:?}", next.token());
    next.release().await?;
    Ok(())
}

pub(crate) async fn adopted_once(case: &CaseRun) -> Outcome {
    const ROUNDS: usize = 10;

    let here = case.client().await?;
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(case.client().await?);
    }
    let lock = case.lock_of(&here, "a")?.with_options(case.short());
    let mut adoptions = 0;
    let mut last = FencingToken::new(0);
    for round in 0..ROUNDS {
        // If none got a majority of several servers, what they got is given back, or ends with its lease.
        let limit = case.harness.ttl() + case.limits(&here).idle;
        let guard = granted_within(limit, "the hold before was adopted or given back", &lock).await?;
        ensure!(guard.token() > last, "{:?} came after {last:?}", guard.token());
        last = guard.token();
        let message = guard.detach().await.map_err(Error::from)?.encode();
        let adopting = others.iter().map(|client| {
            let (client, message) = (client.clone(), message.clone());
            tokio::spawn(async move { client.adopt(&mut DetachedHold::decode(&message)?).await })
        });
        let mut held = Vec::new();
        for adopting in adopting.collect::<Vec<_>>() {
            match adopting.await.map_err(failed)? {
                Ok(guard) => held.push(guard),
                Err(err) if err.is_lost() || err.is_transient() => {}
                Err(err) => return Err(err.into()),
            }
        }
        ensure!(
            held.len() <= 1,
            "round {round}: {} clients adopted one hold",
            held.len()
        );
        adoptions += held.len();
        for guard in held {
            taken("of a hold that one of several adopted", &lock).await?;
            guard.release().await?;
        }
    }
    ensure!(adoptions > 0, "in {ROUNDS} rounds, nobody adopted anything");
    Ok(())
}

pub(crate) async fn detached_hold_expires(case: &CaseRun) -> Outcome {
    let (here, other) = (case.client().await?, case.lock("a").await?);
    let ttl = case.harness.ttl();
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&here, "a")?).await?;
    let token = guard.token();
    let waiting = other.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await.map(|guard| (Instant::now(), guard)) });
    sleep(ttl / 2).await;
    let before = Instant::now();
    let mut detached = detach(guard).await?;
    let limit = ttl + case.limits(&here).idle;
    let (granted, next) = within(limit, "nobody adopted the hold", waiter)
        .await?
        .map_err(failed)??;
    let kept = granted - before;
    // The server's clock may be faster.
    ensure!(
        kept >= ttl.saturating_sub(ttl / 50),
        "another was granted {kept:?} after a hold with a ttl of {ttl:?} was detached"
    );
    ensure!(next.token() > token, "{:?} came after {token:?}", next.token());
    let late = here.adopt(&mut detached).await;
    ensure!(is_gone(&late), "adopted after its lease: {late:?}");
    ensure!(
        next.is_held(),
        "an adoption that came too late ended the hold after it"
    );
    taken("of the hold after it", &case.lock("a").await?).await?;
    next.release().await?;
    Ok(())
}

pub(crate) async fn detach_dropped_midway(case: &CaseRun) -> Outcome {
    const MOST_POLLS: usize = 200;

    let (client, other) = (case.client().await?, case.lock("a").await?);
    let lock = case.lock_of(&client, "a")?;
    for polls in 1..MOST_POLLS {
        // The release in the background may just be on its way.
        let guard = granted_within(PATIENCE, "the hold before was released", &lock).await?;
        let Some(done) = poll_at_most(polls, guard.detach()).await else {
            comes_free(PATIENCE, "the guard was dropped while it was detached", &other).await?;
            continue;
        };
        let mut detached = done.map_err(Error::from)?;
        client.adopt(&mut detached).await?.release().await?;
        return comes_free(PATIENCE, "the hold was released", &other).await;
    }
    Err(failed(format!("not detached after {MOST_POLLS} polls")))
}

pub(crate) async fn adoption_dropped_midway(case: &CaseRun) -> Outcome {
    const MOST_POLLS: usize = 200;

    let (here, there) = (case.client().await?, case.client().await?);
    let (lock, other) = (case.lock_of(&here, "a")?, case.lock("a").await?);
    for polls in 1..MOST_POLLS {
        let guard = granted_within(PATIENCE, "the hold before was released", &lock).await?;
        let token = guard.token();
        let mut detached = detach(guard).await?;
        let done = poll_at_most(polls, there.adopt(&mut detached)).await;
        taken("while the hold is adopted", &other).await?;
        let is_last = done.is_some();
        let adopted = match done {
            Some(adopted) => adopted?,
            // The server may have done it or not.
            None => there.adopt(&mut detached).await?,
        };
        ensure!(
            adopted.is_held() && adopted.token() == token,
            "after {polls} polls: adopted with {:?}, detached with {token:?}",
            adopted.token()
        );
        taken("once the hold is adopted", &other).await?;
        adopted.release().await?;
        comes_free(PATIENCE, "whoever adopted has released", &other).await?;
        if is_last {
            return is_clean(
                PATIENCE,
                "all is released",
                &here,
                &case.name("a"),
                LockKind::Lock,
            )
            .await;
        }
    }
    Err(failed(format!("not adopted after {MOST_POLLS} polls")))
}

pub(crate) async fn asked_while_detached(case: &CaseRun) -> Outcome {
    let (here, there) = (case.client().await?, case.client().await?);
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&here, "a")?).await?;
    let token = guard.token();
    let mut detached = detach(guard).await?;
    let asked = there.revoke(case.name("a"), token, Duration::ZERO).await?;
    ensure!(
        asked != Revocation::NotHeld,
        "a hold that is detached was not there to be asked for"
    );
    let adopted = there.adopt(&mut detached).await;
    ensure!(
        adopted.as_ref().is_err_and(Error::is_lost),
        "expected Lost for a hold that was asked back, got {adopted:?}"
    );
    let limit = case.harness.ttl() + case.limits(&here).idle;
    let next = granted_within(
        limit,
        "a hold that was asked back and not adopted",
        &case.lock("a").await?,
    )
    .await?;
    ensure!(next.token() > token, "{:?} came after {token:?}", next.token());
    next.release().await?;
    Ok(())
}

/// One of two holders of this mode, beside which one more fits or not, detaches and is adopted.
async fn beside_another(
    case: &CaseRun,
    of: impl Fn(&LockClient) -> Result<Lock>,
    shut_out: &Lock,
) -> Outcome {
    let (here, there) = (case.client().await?, case.client().await?);
    let beside = granted_at_once("nobody holds", &of(&there)?).await?;
    let guard = granted_at_once("one more fits", &of(&here)?).await?;
    let token = guard.token();
    let mut detached = detach(guard).await?;
    taken("of a hold that was detached beside another", shut_out).await?;
    ensure!(beside.is_held(), "detaching one hold ended another");
    let adopted = there.adopt(&mut detached).await?;
    ensure!(
        adopted.token() == token && beside.is_held(),
        "adopted with {:?}, detached with {token:?}",
        adopted.token()
    );
    adopted.renew().await?;
    beside.release().await?;
    let (name, kind) = (case.name("a"), of(&there)?.mode().kind());
    let shown = look(&there, &name, kind).await?.holders;
    ensure!(
        matches!(&shown[..], [holder] if holder.token == token),
        "an inspection shows {shown:?} for the one holder with {token:?}"
    );
    adopted.release().await?;
    is_clean(PATIENCE, "all is released", &there, &name, kind).await
}

pub(crate) async fn shared_hold_is_adopted(case: &CaseRun) -> Outcome {
    let writer = case.lock("a").await?;
    beside_another(case, |client| Ok(case.lock_of(client, "a")?.shared()), &writer).await?;
    comes_free(PATIENCE, "no reader is left", &writer).await
}

pub(crate) async fn permit_is_adopted(case: &CaseRun) -> Outcome {
    let of = |client: &LockClient| case.semaphore_of(client, "a", 2);
    let third = of(&case.client().await?)?;
    beside_another(case, of, &third).await?;
    comes_free(PATIENCE, "no permit is taken", &third).await
}

/// Checks that nobody else is granted the lock before this time is over since `asked`, and that somebody is after it. It was granted
/// after `asked`, and not later than now.
async fn is_kept(case: &CaseRun, other: &Lock, asked: Instant, least: Duration) -> Outcome {
    let granted = Instant::now();
    while granted.elapsed() < least {
        let attempt = other.try_acquire().await?;
        ensure!(
            attempt.is_none() || asked.elapsed() >= least,
            "granted {:?} after a grant for {least:?} at least",
            asked.elapsed()
        );
        if let Some(guard) = attempt {
            return Ok(guard.release().await?);
        }
        sleep(least / 20).await;
    }
    let limit = PROMPT + case.limits(&case.client().await?).idle;
    let guard = granted_within(limit, "the least time is over", other).await?;
    Ok(guard.release().await?)
}

pub(crate) async fn released_hold_stays(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    let ttl = case.harness.ttl();
    for (least, releases) in [(ttl * 2, true), (ttl * 2, false), (ttl / 2, true)] {
        let options = case.short().hold_at_least(least);
        let lock = case.lock_of(&client, "a")?.with_options(options);
        // From before the grant: the hold began later.
        let asked = Instant::now();
        let guard = granted_at_once("the lock is free", &lock).await?;
        if releases {
            guard.release().await?;
        } else {
            drop(guard);
        }
        is_kept(case, &other, asked, least).await?;
    }
    Ok(())
}

pub(crate) async fn adopted_hold_stays(case: &CaseRun) -> Outcome {
    let (here, there) = (case.client().await?, case.client().await?);
    let (other, least) = (case.lock("a").await?, case.harness.ttl() * 2);
    for releases in [true, false] {
        let options = case.short().hold_at_least(least);
        let lock = case.lock_of(&here, "a")?.with_options(options);
        let asked = Instant::now();
        let guard = granted_at_once("the lock is free", &lock).await?;
        let adopted = there.adopt(&mut detach(guard).await?).await?;
        if releases {
            adopted.release().await?;
        } else {
            drop(adopted);
        }
        is_kept(case, &other, asked, least).await?;
    }
    Ok(())
}

pub(crate) async fn least_times_beside_other_ttls(case: &CaseRun) -> Outcome {
    let (client, others) = (case.client().await?, case.client().await?);
    let ttl = case.harness.ttl();
    let (long, mut holds) = (ttl * 4, Vec::new());
    for (part, ttl, least) in [
        ("short below", ttl, ttl / 2),
        ("short between", ttl, ttl * 2),
        ("short above", ttl, ttl * 5),
        ("long below", long, ttl / 2),
        ("long between", long, ttl * 2),
        ("long above", long, ttl * 5),
    ] {
        let options = lasting().ttl(ttl).hold_at_least(least);
        let lock = case.lock_of(&client, part)?.with_options(options);
        let other = case.lock_of(&others, part)?;
        let asked = Instant::now();
        let guard = granted_at_once("a lock nobody has used", &lock).await?;
        holds.push(async move {
            guard.release().await?;
            is_kept(case, &other, asked, least).await
        });
    }
    for kept in join_all(holds).await {
        kept?;
    }
    Ok(())
}

pub(crate) async fn least_time_outlives_a_dropped_downgrade(case: &CaseRun) -> Outcome {
    let (client, others) = (case.client().await?, case.client().await?);
    let (least, mut holds) = (case.harness.ttl() * 2, Vec::new());
    for polls in 1..50 {
        let part = format!("after {polls}");
        let options = case.short().hold_at_least(least);
        let lock = case.lock_of(&client, &part)?.with_options(options);
        let other = case.lock_of(&others, &part)?;
        let asked = Instant::now();
        let guard = granted_at_once("a lock nobody has used", &lock).await?;
        let done = poll_at_most(polls, guard.downgrade()).await;
        let is_done = done.is_some();
        drop(done);
        holds.push(async move { is_kept(case, &other, asked, least).await });
        if is_done {
            break;
        }
    }
    for kept in join_all(holds).await {
        kept?;
    }
    Ok(())
}

pub(crate) async fn killed_process_keeps_least_time(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let ttl = case.harness.ttl();
    let least = case.freed_after_death(&client) + ttl * 2;
    for releases in [true, false] {
        let part = if releases { "released" } else { "held" };
        let (name, other) = (case.name(part), case.lock_of(&client, part)?);
        let mut helper = case.helper().await?;
        helper.ask(&format!("least {}", least.as_millis())).await?;
        let asked = Instant::now();
        let request = Request {
            slot: "g",
            mode: Mode::Exclusive,
            ttl,
            name: &name,
        };
        helper.hold(&request).await?;
        if releases {
            let answer = helper.ask("release g").await?;
            ensure!(answer == "released", "it could not release: `{answer}`");
        }
        tokio::task::block_in_place(|| helper.process.kill())?;
        if releases {
            is_kept(case, &other, asked, least).await?;
        } else {
            let limit = PROMPT + case.freed_after_death(&client);
            let guard = granted_within(limit, "its lease is over", &other).await?;
            guard.release().await?;
        }
    }
    Ok(())
}

pub(crate) async fn detaching_is_unsupported(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&client, "a")?).await?;
    let refused = guard.detach().await;
    let guard = match refused {
        Err(err) if matches!(err.error, Error::Unsupported { .. }) => err.guard,
        other => return Err(failed(format!("expected Unsupported, got {other:?}"))),
    };
    // It is renewed, where it has a lease.
    sleep(case.harness.ttl() * 3 / 2).await;
    ensure!(
        guard.is_held(),
        "a hold that cannot be detached was lost: {:?}",
        guard.check()
    );
    taken("of a hold that cannot be detached", &other).await?;
    let name = case.name("a");
    let text = format!("1:x:30000:{}:{:032x}:{}:{name}", guard.token(), 7, name.len());
    let refused = client.adopt(&mut DetachedHold::decode(&text)?).await;
    ensure!(
        matches!(refused, Err(Error::Unsupported { .. })) && guard.is_held(),
        "expected Unsupported, got {refused:?}"
    );
    let least = case.short().hold_at_least(case.harness.ttl());
    let refused = case.lock_of(&client, "b")?.acquire_with(&least).await;
    ensure!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "expected Unsupported for hold_at_least, got {refused:?}"
    );
    guard.release().await?;
    comes_free(PATIENCE, "the hold was released", &other).await
}

pub(crate) async fn killed_process_has_detached(case: &CaseRun) -> Outcome {
    let (client, name) = (case.client().await?, case.name("a"));
    let ttl = case.harness.ttl() * 3;
    for mode in modes(&client) {
        let lock = match mode {
            Mode::Permits(permits) => case.semaphore_of(&client, "a", permits.get())?,
            _ => case.lock_of(&client, "a")?,
        };
        let lock = lock.with_options(lasting());
        let (mut first, mut second) = (case.helper().await?, case.helper().await?);
        let (token, _) = first
            .hold(&Request {
                slot: "g",
                mode,
                ttl,
                name: &name,
            })
            .await?;
        let waiting = lock.clone();
        let waiter = tokio::spawn(async move { waiting.acquire().await });
        let answer = first.ask("detach g").await?;
        let Some(message) = answer.strip_prefix("detached ") else {
            return Err(failed(format!("a helper could not detach: `{answer}`")));
        };
        tokio::task::block_in_place(|| first.process.kill())?;
        second.send(&format!("adopt g {message}"))?;
        let (adopted, _) = second.granted().await?;
        ensure!(
            adopted == token,
            "{mode:?}: adopted with {adopted}, detached with {token}"
        );
        // The lease that the first one renewed last is over by then.
        sleep(ttl * 3 / 2).await;
        ensure!(
            !waiter.is_finished(),
            "{mode:?}: another was granted what was adopted: {:?}",
            waiter.await
        );
        let answer = second.ask("check g").await?;
        ensure!(answer == "held", "{mode:?}: whoever adopted says `{answer}`");
        let answer = second.ask("release g").await?;
        ensure!(
            answer == "released",
            "{mode:?}: whoever adopted could not release: `{answer}`"
        );
        let next = within(PATIENCE, "whoever adopted has released", waiter)
            .await?
            .map_err(failed)??;
        ensure!(
            next.token().get() > token,
            "{:?} came after {token}",
            next.token()
        );
        next.release().await?;
    }
    Ok(())
}

/// The modes in which one holder keeps another out.
fn modes(client: &LockClient) -> Vec<Mode> {
    let has = client.capabilities();
    let permit = has.permits.then_some(Mode::Permits(NonZeroU32::MIN));
    let shared = has.shared.then_some(Mode::Shared);
    [Mode::Exclusive]
        .into_iter()
        .chain(shared)
        .chain(permit)
        .collect()
}

pub(crate) async fn detached_holds_lose_nothing(case: &CaseRun) -> Outcome {
    const HANDS: usize = 60;

    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(case.client().await?);
    }
    let mut guard = granted_at_once("a lock nobody has used", &case.short_lock_of(&clients[0], "a")?).await?;
    let (token, other) = (guard.token(), case.lock("a").await?);
    let waiter: tokio::task::JoinHandle<Result<LockGuard>> = tokio::spawn({
        let other = other.clone();
        async move { other.acquire().await }
    });
    for hand in 1..=HANDS {
        let mut detached = detach(guard).await?;
        guard = clients[hand % clients.len()].adopt(&mut detached).await?;
        ensure!(
            !waiter.is_finished() && guard.token() == token,
            "hand {hand}: another was granted a hold on its way, or the token changed to {:?}",
            guard.token()
        );
    }
    guard.release().await?;
    let next = within(PATIENCE, "the last has released", waiter)
        .await?
        .map_err(failed)??;
    ensure!(next.token() > token, "{:?} came after {token:?}", next.token());
    next.release().await.map_err(Stop::from)
}
