//! Holding, releasing, and holding again.

use std::{pin::pin, time::Duration};

use futures_util::future::try_join;
use lockkit_core::{AcquireOptions, Error, FencingToken, LockClient, LockKind, LossReason, spi::chain};
use tokio::runtime::{Builder, Runtime};

use crate::case_run::{
    CaseRun, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, failed, granted_at_once, granted_within,
    is_clean, lasting, poll_at_most, taken, within,
};
use crate::stall::Stopwatch;

pub(crate) async fn second_try_is_none(case: &CaseRun) -> Outcome {
    let mine = case.lock("a").await?;
    let theirs = case.lock("a").await?;
    let watch = Stopwatch::start();
    let guard = granted_at_once("a lock nobody has used", &mine).await?;
    let took = watch.elapsed();
    ensure!(guard.is_held(), "a fresh guard is not held");
    ensure!(
        guard.check().is_ok(),
        "a fresh guard fails its check: {:?}",
        guard.check()
    );
    ensure!(
        guard.name().as_str() == case.name("a"),
        "the guard is of another name: {:?}",
        guard.name()
    );
    taken("by the same handle, which holds it", &mine).await?;
    let answer = taken("by another client", &theirs);
    // It takes as long as the grant did, and no patience.
    let bound = PROMPT + 3 * took;
    within(bound, "a try is answered, for it has no patience", answer).await??;
    guard.release().await?;
    Ok(())
}

pub(crate) async fn other_names_are_independent(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let a = granted_at_once("the first name", &case.lock_of(&client, "a")?).await?;
    let b = granted_at_once(
        "the second name, by the same client",
        &case.lock_of(&client, "b")?,
    )
    .await?;
    let c = granted_at_once("the third name, by another client", &case.lock("c").await?).await?;
    a.release().await?;
    ensure!(
        b.is_held() && c.is_held(),
        "releasing one name ended the hold of another"
    );
    b.release().await?;
    c.release().await?;
    Ok(())
}

pub(crate) async fn reacquired_after_release(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.lock("a").await?, case.lock("a").await?);
    let mut last = None;
    for lock in [&mine, &mine, &theirs, &mine] {
        let guard = granted_within(PATIENCE, "the lock was released", lock).await?;
        ensure!(
            Some(guard.token()) > last,
            "token {} came after {last:?}",
            guard.token()
        );
        last = Some(guard.token());
        guard.release().await?;
    }
    Ok(())
}

pub(crate) async fn reacquired_after_drop(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.lock("a").await?, case.lock("a").await?);
    for _ in 0..3 {
        drop(granted_within(PATIENCE, "the other's guard was dropped", &mine).await?);
        drop(granted_within(PATIENCE, "the other's guard was dropped", &theirs).await?);
    }
    Ok(())
}

pub(crate) async fn release_dropped_midway(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.lock("a").await?, case.lock("a").await?);
    for polls in 1..=4 {
        let guard = granted_within(PATIENCE, "the release before was begun", &mine).await?;
        poll_at_most(polls, guard.release()).await.transpose()?;
        let other = granted_within(PATIENCE, "a release was begun and dropped", &theirs).await?;
        other.release().await?;
    }
    let guard = granted_at_once("all was released", &mine).await?;
    drop(guard.release());
    comes_free(
        PATIENCE,
        "a release that was never polled counts as a drop",
        &theirs,
    )
    .await?;
    Ok(())
}

pub(crate) async fn late_release_harms_nobody(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let lock = case.short_lock_of(&client, "a")?;
    let outsider = case.lock("a").await?;
    let detection = case.detection(client.info());
    let released = granted_at_once("a lock nobody has used", &lock).await?;
    let dropped;
    {
        case.break_hold(&client, "a").await?;
        within(detection, "the first holder is told", released.lost()).await?;
        dropped = granted_within(detection, "the first hold was broken", &lock).await?;
        case.break_hold(&client, "a").await?;
        within(detection, "the second holder is told", dropped.lost()).await?;
    }
    let current = granted_within(detection, "the second hold was broken", &lock).await?;
    match released.release().await {
        Err(error) if error.is_lost() => {}
        other => {
            return Err(failed(format!(
                "expected Lost from releasing a lost guard, got {other:?}"
            )));
        }
    }
    drop(dropped);
    // The drop's release is under way in the background; it must not do harm at any later moment.
    tokio::time::sleep(Duration::from_millis(50)).await;
    ensure!(
        current.is_held(),
        "releasing old guards ended the hold of the current one"
    );
    taken("by another client, after old guards were released", &outsider).await?;
    current.release().await?;
    comes_free(PATIENCE, "the current guard was released", &outsider).await?;
    Ok(())
}

pub(crate) async fn bad_options_are_refused(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let lock = case.lock_of(&client, "a")?;
    let bad: [(&str, AcquireOptions); 11] = [
        ("ttl", AcquireOptions::new().ttl(Duration::ZERO)),
        ("ttl", AcquireOptions::new().ttl(Duration::from_nanos(1))),
        ("ttl", AcquireOptions::new().ttl(Duration::MAX)),
        ("wait", AcquireOptions::new().wait(Duration::MAX)),
        ("max_hold", AcquireOptions::new().max_hold(Duration::ZERO)),
        ("max_hold", AcquireOptions::new().max_hold(Duration::MAX)),
        (
            "max_hold",
            AcquireOptions::new()
                .ttl(Duration::from_secs(2))
                .max_hold(Duration::from_secs(1)),
        ),
        ("op_timeout", AcquireOptions::new().op_timeout(Duration::ZERO)),
        ("op_timeout", AcquireOptions::new().op_timeout(Duration::MAX)),
        ("label", AcquireOptions::new().label("x".repeat(257))),
        ("local_handoffs", AcquireOptions::new().local_handoffs(u32::MAX)),
    ];
    for (name, options) in bad {
        for lock_with in [lock.clone(), lock.with_options(options.clone())] {
            match lock_with.acquire_with(&options).await {
                Err(Error::InvalidOptions { option, .. }) if option == name => {}
                other => {
                    return Err(failed(format!(
                        "expected InvalidOptions of `{name}` for {options:?}, got {other:?}"
                    )));
                }
            }
        }
        // A try brings a wait of its own.
        if name == "wait" {
            continue;
        }
        match lock.with_options(options.clone()).try_acquire().await {
            Err(Error::InvalidOptions { option, .. }) if option == name => {}
            other => {
                return Err(failed(format!(
                    "expected InvalidOptions of `{name}` from a try, got {other:?}"
                )));
            }
        }
    }
    is_clean(
        Duration::ZERO,
        "only bad options were used",
        &client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await
}

pub(crate) async fn inspection_shows_the_holder(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let name = case.name("a");
    let state = other.inspect(&name).await?;
    ensure!(state.is_free(), "a lock nobody has used is shown as {state:?}");
    let lock = case
        .lock_of(&client, "a")?
        .with_options(lasting().label("billing@host-7"));
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    for asker in [&client, &other] {
        let state = asker.inspect(&name).await?;
        let [holder] = &state.holders[..] else {
            return Err(failed(format!("expected one holder, got {state:?}")));
        };
        ensure!(
            holder.token == guard.token(),
            "the holder has {:?}, but is shown as {holder:?}",
            guard.token()
        );
        ensure!(
            holder.label.as_deref() == Some("billing@host-7"),
            "the label is missing: {holder:?}"
        );
        let has_lease = client.capabilities().lease;
        ensure!(
            holder.left.is_some() == has_lease,
            "lease is {has_lease}, but shown is {holder:?}"
        );
        ensure!(
            holder.left.is_none_or(|left| Some(left) <= lasting().ttl),
            "more is left than was asked for: {holder:?}"
        );
    }
    guard.release().await?;
    is_clean(
        Duration::ZERO,
        "the lock was released",
        &other,
        &name,
        LockKind::Lock,
    )
    .await
}

pub(crate) async fn unpolled_inspection_stops_nobody(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (name, free) = (case.name("held"), case.lock_of(&client, "free")?);
    let guard = granted_at_once("a lock nobody has used", &case.lock_of(&client, "held")?).await?;
    for polls in 1..=3 {
        let mut forgotten = pin!(client.inspect(&name));
        if poll_at_most(polls, forgotten.as_mut()).await.is_some() {
            continue;
        }
        let state = client.inspect(&name).await?;
        ensure!(
            state.holders.len() == 1,
            "beside an inspection that was polled {polls} times: {state:?}"
        );
        granted_at_once("a lock beside an inspection that nobody polls", &free)
            .await?
            .release()
            .await?;
    }
    guard.release().await?;
    Ok(())
}

pub(crate) async fn dropped_outside_a_runtime(case: &CaseRun) -> Outcome {
    let lock = case.lock("a").await?;
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let dropped = std::thread::spawn(move || drop(guard)).join();
    ensure!(dropped.is_ok(), "dropping a guard outside a runtime panicked");
    comes_free(
        PATIENCE,
        "the guard was dropped on a plain thread",
        &case.lock("a").await?,
    )
    .await?;
    Ok(())
}

pub(crate) async fn dropped_during_shutdown(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    // Beside each other, since nobody may be left to release them: then both are waited for as for the dead.
    try_join(
        shut_down(case, &client, "a", false),
        shut_down(case, &client, "b", true),
    )
    .await?;
    Ok(())
}

async fn shut_down(case: &CaseRun, client: &LockClient, part: &str, keeps_guard: bool) -> Outcome {
    let (harness, name, options) = (case.harness.clone(), case.name(part), case.short());
    let thread = std::thread::spawn(move || -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let guard = runtime.block_on(async {
            let lock = harness.client().await?.lock(name)?.with_options(options);
            lock.acquire().await
        });
        let guard = guard.map_err(|error| error.to_string())?;
        if keeps_guard {
            drop(runtime);
            drop(guard);
        } else {
            runtime.spawn(async move {
                std::future::pending::<()>().await;
                drop(guard);
            });
            drop(runtime);
        }
        Ok(())
    });
    let joined = tokio::task::spawn_blocking(move || thread.join())
        .await
        .map_err(failed)?;
    joined
        .map_err(|_| failed("dropping a guard during a runtime's shutdown panicked"))?
        .map_err(failed)?;
    let bound = case.harness.ttl() + case.freed_after_death(client) + PROMPT;
    let lock = case.lock(part).await?;
    comes_free(bound, "the holder's runtime was shut down", &lock).await
}

pub(crate) async fn client_outlives_its_runtime(case: &CaseRun) -> Outcome {
    let runtime = OtherRuntime::new()?;
    let (unused, holding, waiting) = (
        runtime.client(case).await?,
        runtime.client(case).await?,
        runtime.client(case).await?,
    );
    let held = granted_at_once("a lock nobody has used", &case.short_lock_of(&holding, "a")?).await?;
    let in_the_way = granted_at_once("another", &case.lock("b").await?.with_options(lasting())).await?;
    let waiters: Vec<_> = ["at the server", "behind it in its client"]
        .into_iter()
        .map(|place| {
            let lock = case.lock_of(&waiting, "b")?;
            Ok((place, tokio::spawn(async move { lock.acquire().await })))
        })
        .collect::<Result<_, Error>>()?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(runtime);
    for (place, waiter) in waiters {
        let answer = within(PATIENCE, "a waiter is told", waiter)
            .await?
            .map_err(failed)?;
        has_ended(place, answer)?;
    }
    let reason = within(PATIENCE, "the holder is told", held.lost()).await?;
    ensure!(
        reason == LossReason::Disconnected,
        "expected Disconnected, got {reason:?}"
    );
    for client in [&unused, &holding, &waiting] {
        let lock = case.lock_of(client, "c")?;
        let long = Duration::from_secs(30);
        let answers = async {
            has_ended("acquire", lock.acquire().await)?;
            has_ended("try_acquire", lock.try_acquire().await)?;
            has_ended("acquire_timeout", lock.acquire_timeout(long).await)?;
            has_ended("inspect", lock.inspect().await)?;
            let listed = match client.list("") {
                Ok(mut list) => list.next().await.transpose(),
                Err(error) => Err(error),
            };
            if !matches!(listed, Err(Error::Unsupported { .. })) {
                has_ended("list", listed)?;
            }
            let revoked = client.revoke_by_force(case.name("c"), FencingToken::new(1)).await;
            has_ended("revoke", revoked)?;
            has_ended("close", client.close(long).await)
        };
        within(PROMPT, "a client without a runtime answers", answers).await??;
    }
    let renewed = held.renew().await;
    let released = held.release().await;
    ensure!(
        [&renewed, &released]
            .iter()
            .all(|answer| matches!(answer, Err(error) if error.is_lost())),
        "expected Lost of a hold whose runtime has ended, got {renewed:?} and {released:?}"
    );
    in_the_way.release().await?;
    Ok(())
}

fn has_ended<T: std::fmt::Debug>(what: &str, answer: Result<T, Error>) -> Outcome {
    match answer {
        Err(error)
            if !error.is_transient()
                && chain(&error).contains("runtime that this client lives on has ended") =>
        {
            Ok(())
        }
        other => Err(failed(format!(
            "{what}: expected a permanent error that says that the runtime has ended, got {other:?}"
        ))),
    }
}

/// A runtime beside that of the case.
struct OtherRuntime(Option<Runtime>);

impl OtherRuntime {
    fn new() -> Result<Self, Stop> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Self(Some(runtime.map_err(failed)?)))
    }

    /// A client that lives on it.
    async fn client(&self, case: &CaseRun) -> Result<LockClient, Stop> {
        let harness = case.harness.clone();
        let runtime = self
            .0
            .as_ref()
            .ok_or_else(|| failed("it is there until it is dropped"))?;
        let made = runtime.spawn(async move { harness.client().await });
        Ok(made.await.map_err(failed)??)
    }
}

impl Drop for OtherRuntime {
    /// The drop of a runtime itself may block, which is not allowed within another one.
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) async fn closed_client_refuses(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let clone = client.clone();
    let (held, queued) = (case.lock_of(&client, "a")?, case.lock_of(&clone, "a")?);
    let guard = granted_at_once("a lock nobody has used", &held).await?;
    let waiter = tokio::spawn(async move { queued.acquire().await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    client.close(Duration::from_secs(5)).await?;
    match within(PATIENCE, "the waiter of a closed client is told", waiter)
        .await?
        .map_err(failed)?
    {
        Err(Error::Closed) => {}
        other => return Err(failed(format!("expected Closed for a waiter, got {other:?}"))),
    }
    let reason = within(PATIENCE, "the holder of a closed client is told", guard.lost()).await?;
    ensure!(
        reason == LossReason::Disconnected,
        "expected Disconnected, got {reason:?}"
    );
    for lock in [held, clone.lock(case.name("b"))?] {
        let answer = lock.try_acquire().await;
        ensure!(
            matches!(answer, Err(Error::Closed)),
            "expected Closed from a closed client, got {answer:?}"
        );
    }
    comes_free(PATIENCE, "the holder's client was closed", &case.lock("a").await?).await?;
    Ok(())
}
