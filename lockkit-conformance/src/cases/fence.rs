//! Tokens that are raised, so that this backend can take the place of another.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use futures_util::future::{join, join_all};
use lockkit_core::{Error, FencingToken, LockClient, LockKind, Revocation};
use tokio::task::yield_now;

use crate::case_run::{
    CaseRun, Outcome, PROMPT, Stop, ensure, eventually, granted_at_once, granted_within, lasting, look,
};

/// By so much tokens are raised: little, since somebody may use them.
const STEP: u64 = 1_000;

fn above(fence: FencingToken, by: u64) -> FencingToken {
    FencingToken::new(fence.get().saturating_add(by))
}

/// Grants of each kind to this client. Each has to have a token above this one.
async fn grants_are_above(case: &CaseRun, client: &LockClient, part: &str, least: FencingToken) -> Outcome {
    let capabilities = client.capabilities();
    let lock = case.lock_of(client, part)?;
    let mut locks = vec![lock.clone(), lock.clone()];
    if capabilities.shared {
        locks.push(lock.clone().shared());
    }
    if capabilities.permits {
        locks.push(case.semaphore_of(client, part, 2)?);
    }
    for lock in locks {
        let guard = granted_within(PROMPT * 10, "a lock that others use for moments", &lock).await?;
        ensure!(
            guard.token() > least,
            "{lock:?} was granted with {}, and tokens are above {least}",
            guard.token()
        );
        guard.release().await?;
    }
    Ok(())
}

/// Grants that were passed on within a client, too.
async fn use_it(case: &CaseRun, client: &LockClient, part: &str) -> Result<FencingToken, Stop> {
    let lock = case.lock_of(client, part)?;
    let users = (0..4).map(async |_| {
        let guard = lock.acquire().await?;
        let token = guard.token();
        guard.release().await.map(|()| token)
    });
    let tokens: Result<Vec<_>, Error> = join_all(users).await.into_iter().collect();
    Ok(tokens?.into_iter().max().unwrap_or(FencingToken::new(0)))
}

pub(crate) async fn raised_tokens_are_above(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let [mine, theirs] = &clients;
    for client in &clients {
        for part in ["a", "b"] {
            let highest = use_it(case, client, part).await?;
            let fence = theirs.fence().await?;
            ensure!(
                fence >= highest,
                "the fence is {fence}, and {highest} was granted"
            );
        }
    }
    let mut least = FencingToken::new(0);
    for (round, raising) in [mine, theirs, mine].into_iter().enumerate() {
        let wanted = above(mine.fence().await?, STEP);
        let raised = raising.raise_fence(wanted).await?;
        ensure!(
            raised >= wanted,
            "raised above {wanted}, and the fence is {raised}"
        );
        least = wanted;
        let newcomer = case.client().await?;
        for client in clients.iter().chain([&newcomer]) {
            let fence = client.fence().await?;
            ensure!(fence >= least, "the fence was {least}, and is {fence}");
            for part in ["a", "b", &format!("new in round {round}")] {
                grants_are_above(case, client, part, least).await?;
            }
        }
    }
    for low in [least.get(), least.get() - 1, 1, 0] {
        let fence = theirs.raise_fence(FencingToken::new(low)).await?;
        ensure!(
            fence >= least,
            "raising above {low} lowered the fence from {least} to {fence}"
        );
    }
    grants_are_above(case, theirs, "a", least).await?;
    // Here no earlier token is above it.
    grants_are_above(case, theirs, "new after low ones", least).await?;
    for absurd in [u64::MAX, i64::MAX.unsigned_abs()] {
        let refused = mine.raise_fence(FencingToken::new(absurd)).await;
        ensure!(
            matches!(refused, Err(Error::InvalidOptions { .. })),
            "expected InvalidOptions for a fence of {absurd}, got {refused:?}"
        );
        let fence = theirs.fence().await?;
        ensure!(
            fence.get() < absurd / 2,
            "what was refused raised the fence to {fence}"
        );
    }
    grants_are_above(case, mine, "b", least).await
}

pub(crate) async fn raised_by_several_at_once(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?, case.client().await?];
    for round in 0..10 {
        let fence = clients[0].fence().await?;
        let raising = clients.iter().enumerate().map(async |(index, client)| {
            let by = [3 * STEP, STEP, 2 * STEP][(index + round) % 3];
            let wanted = above(fence, by);
            client.raise_fence(wanted).await.map(|fence| (wanted, fence))
        });
        let raised: Result<Vec<_>, Error> = join_all(raising).await.into_iter().collect();
        for (wanted, fence) in raised? {
            ensure!(fence >= wanted, "raised above {wanted}, and the fence is {fence}");
        }
        for client in &clients {
            grants_are_above(case, client, "a", above(fence, 3 * STEP)).await?;
        }
    }
    Ok(())
}

pub(crate) async fn raises_race_acquisitions(case: &CaseRun) -> Outcome {
    const RAISES: usize = 50;

    /// A grant between two raises should take milliseconds.
    const STANDSTILL: Duration = Duration::from_secs(10);

    let raising = case.client().await?;
    let users = [case.client().await?, case.client().await?, case.client().await?];
    let (raised, highest, is_over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let grants = AtomicUsize::new(0);
    let use_it = users.iter().map(async |client| {
        let lock = case
            .lock_of(client, "a")?
            .with_options(lasting().local_handoffs(0));
        while !is_over.load(Ordering::Relaxed) {
            let least = raised.load(Ordering::Relaxed);
            let guard = lock.acquire().await?;
            let token = guard.token().get();
            let before = highest.fetch_max(token, Ordering::Relaxed);
            ensure!(token > before, "{token} was granted after {before}");
            ensure!(
                token > least,
                "{token} was granted to one who asked once tokens were raised above {least}"
            );
            grants.fetch_add(1, Ordering::Relaxed);
            guard.release().await?;
            // Where nothing is ever awaited, as in memory, nobody would raise.
            yield_now().await;
        }
        Ok::<_, Stop>(())
    });
    let raise = async {
        for _ in 0..RAISES {
            let wanted = above(raising.fence().await?, STEP);
            raising.raise_fence(wanted).await?;
            raised.store(wanted.get(), Ordering::Relaxed);
            // Where a raise awaits nothing, all would be over before the first grant.
            let before = grants.load(Ordering::Relaxed);
            let what = format!("somebody is granted the lock after {before} grants");
            eventually(STANDSTILL, &what, async || {
                Ok(grants.load(Ordering::Relaxed) > before)
            })
            .await?;
        }
        Ok::<_, Stop>(())
    };
    let raise = async {
        let outcome = raise.await;
        is_over.store(true, Ordering::Relaxed);
        outcome
    };
    let (raised, used) = join(raise, join_all(use_it)).await;
    raised?;
    used.into_iter().collect::<Outcome>()?;
    let grants = grants.into_inner();
    ensure!(
        grants >= RAISES,
        "{grants} grants beside {RAISES} raises: they did not race"
    );
    Ok(())
}

pub(crate) async fn raising_spares_what_is_held(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let held = case
        .lock_of(&mine, "a")?
        .with_options(lasting().local_handoffs(0));
    let guard = granted_at_once("a lock nobody has used", &held).await?;
    let token = guard.token();
    let least = above(theirs.fence().await?, STEP);
    theirs.raise_fence(least).await?;
    for client in [&mine, &theirs] {
        let shown = look(client, &case.name("a"), LockKind::Lock).await?.holders;
        ensure!(
            matches!(&shown[..], [holder] if holder.token == token),
            "held with {token} since before tokens were raised, and shown as {shown:?}"
        );
    }
    ensure!(guard.is_held(), "lost: {:?}", guard.check());
    if mine.capabilities().revoke {
        let asked = theirs.revoke(case.name("a"), token, Duration::ZERO).await?;
        ensure!(
            asked != Revocation::NotHeld,
            "asked by its token, and it was not found"
        );
    }
    match guard.release().await {
        // It was told before.
        Ok(()) | Err(Error::Lost { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    grants_are_above(case, &theirs, "a", least).await?;
    grants_are_above(case, &mine, "a", least).await
}

pub(crate) async fn raising_is_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let before = use_it(case, &client, "a").await?;
    for refused in [
        client.fence().await,
        client.raise_fence(above(before, STEP)).await,
    ] {
        ensure!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "expected Unsupported, got {refused:?}"
        );
    }
    use_it(case, &client, "a").await.map(drop)
}
