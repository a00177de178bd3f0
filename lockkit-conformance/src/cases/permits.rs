//! Semaphores.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{AcquireOptions, Error, LockClient, LockGuard, LockKind, spi::Mode};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    case_run::{
        CaseRun, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, failed, granted_at_once,
        granted_within, is_clean, taken, within,
    },
    helper::Request,
};

pub(crate) async fn never_more_than_the_size(case: &CaseRun) -> Outcome {
    let (inside, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let clients = [case.client().await?, case.client().await?];
    let mut tasks = JoinSet::new();
    for index in 0..10 {
        let semaphore = case.semaphore_of(&clients[index % 2], "a", 3)?;
        let (inside, most) = (inside.clone(), most.clone());
        tasks.spawn(async move {
            for _ in 0..25 {
                let guard = semaphore.acquire().await?;
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                // Where it takes longer to get in than that, three would meet by chance alone.
                let met = async {
                    while most.load(Ordering::SeqCst) < 3 {
                        sleep(Duration::from_millis(1)).await;
                    }
                };
                let _ = timeout(PROMPT, met).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await?;
            }
            Ok::<_, Error>(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.map_err(failed)??;
    }
    let most = most.load(Ordering::SeqCst);
    ensure!(
        most == 3,
        "expected at most, and at times exactly, 3 inside; the most were {most}"
    );
    is_clean(
        PATIENCE,
        "all permits were released",
        &clients[0],
        &case.name("a"),
        LockKind::Semaphore,
    )
    .await
}

pub(crate) async fn drained_permits_come_back(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let mut tokens = Vec::new();
    for round in 0..3 {
        let mut guards = Vec::new();
        for index in 0..4 {
            let semaphore = case.semaphore_of(&clients[index % 2], "a", 4)?;
            let what = format!("permit {index} of 4 in round {round}");
            guards.push(granted_within(PATIENCE, &what, &semaphore).await?);
        }
        for client in &clients {
            taken("a fifth permit of four", &case.semaphore_of(client, "a", 4)?).await?;
        }
        let state = clients[1].inspect_semaphore(case.name("a")).await?;
        ensure!(state.holders.len() == 4, "expected 4 holders, got {state:?}");
        for guard in guards {
            tokens.push(guard.token());
            guard.release().await?;
        }
    }
    tokens.sort_unstable();
    tokens.dedup();
    ensure!(
        tokens.len() == 12,
        "12 holds had {} different tokens",
        tokens.len()
    );
    Ok(())
}

pub(crate) async fn several_permits_or_none(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let (ours, other) = (
        case.semaphore_of(&mine, "a", 4)?,
        case.semaphore_of(&theirs, "a", 4)?,
    );
    let three = within(LOCKED_UP, "three permits of four", ours.acquire_many(3)).await??;
    let mut tokens: Vec<_> = three.guards().iter().map(LockGuard::token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    ensure!(tokens.len() == 3, "three permits have the tokens {tokens:?}");
    for semaphore in [&ours, &other] {
        // Whoever collected before may still be giving back its lock.
        let none = semaphore.try_acquire_many(2).await?;
        ensure!(
            none.is_none(),
            "two more permits of four were granted beside three"
        );
    }
    held("after a try in vain", &theirs, case, 3).await?;
    let fourth = granted_within(PATIENCE, "the fourth permit", &other).await?;
    taken("a fifth permit of four", &ours).await?;
    let short = other.with_options(AcquireOptions::new().wait(Duration::from_millis(50)));
    let late = short.acquire_many(2).await;
    ensure!(
        matches!(&late, Err(error) if error.is_timeout()),
        "expected a timeout, got {late:?}"
    );
    let waiting = tokio::spawn({
        let other = other.clone();
        async move { other.acquire_many(4).await }
    });
    sleep(Duration::from_millis(50)).await;
    ensure!(!waiting.is_finished(), "four permits were granted beside four");
    three.release().await?;
    fourth.release().await?;
    let all = within(LOCKED_UP, "all permits", waiting)
        .await?
        .map_err(failed)??;
    ensure!(
        all.guards().len() == 4 && all.check().is_ok(),
        "four permits are {all:?}"
    );
    taken("a fifth permit of four", &ours).await?;
    all.release().await?;

    let lock = case.lock_of(&mine, "a")?;
    for (refused, what) in [
        (ours.acquire_many(0).await, "no permits"),
        (ours.acquire_many(5).await, "five permits of four"),
        (lock.acquire_many(1).await, "permits of a lock"),
    ] {
        ensure!(
            matches!(
                refused,
                Err(Error::InvalidOptions {
                    option: "permits",
                    ..
                })
            ),
            "expected InvalidOptions for {what}, got {refused:?}"
        );
    }
    nothing_is_held(&mine, case).await
}

/// Without an order among those who want several, each may have two of four, and waits for the third for ever.
pub(crate) async fn who_wants_several_never_locks_up(case: &CaseRun) -> Outcome {
    let inside = Arc::<AtomicUsize>::default();
    let mut tasks = JoinSet::new();
    let mut clients = Vec::new();
    for index in 0..4_u32 {
        let client = case.client().await?;
        let semaphore = case.semaphore_of(&client, "a", 4)?;
        clients.push(client);
        let inside = inside.clone();
        tasks.spawn(async move {
            for round in 0..10 {
                let wanted = if (index + round) % 4 == 0 { 1 } else { 3 };
                let set = semaphore.acquire_many(wanted).await?;
                let with_others = inside.fetch_add(wanted as usize, Ordering::SeqCst) + wanted as usize;
                sleep(Duration::from_millis(1)).await;
                inside.fetch_sub(wanted as usize, Ordering::SeqCst);
                set.release().await?;
                if with_others > 4 {
                    return Ok(Some(with_others));
                }
            }
            Ok::<_, Error>(None)
        });
    }
    let all = async {
        while let Some(task) = tasks.join_next().await {
            let too_many = task.map_err(failed)??;
            ensure!(too_many.is_none(), "of 4 permits, {too_many:?} were held at once");
        }
        Ok::<_, Stop>(())
    };
    within(LOCKED_UP, "40 rounds of those who want several", all).await??;
    nothing_is_held(&clients[0], case).await
}

/// Whoever has to wait for longer is locked up.
const LOCKED_UP: Duration = Duration::from_secs(10);

async fn held(when: &str, client: &LockClient, case: &CaseRun, expected: usize) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = client.inspect_semaphore(case.name("a")).await?;
        if state.holders.len() == expected {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{when}, {expected} holders were expected, and there are {state:?}"
        );
        sleep(Duration::from_millis(1)).await;
    }
}

async fn nothing_is_held(client: &LockClient, case: &CaseRun) -> Outcome {
    let name = case.name("a");
    let collector = format!("lockkit#permits:{name}");
    ensure!(
        matches!(client.lock(&collector), Err(Error::InvalidName { .. })),
        "the lock of those who collect permits can be had by its name"
    );
    for (name, kind) in [(&*name, LockKind::Semaphore), (&*collector, LockKind::Lock)] {
        is_clean(PATIENCE, "all was released", client, name, kind).await?;
    }
    Ok(())
}

pub(crate) async fn two_sizes_are_an_error(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let guard = granted_at_once("a semaphore nobody has used", &case.semaphore_of(&mine, "a", 2)?).await?;
    for client in [&mine, &theirs] {
        let wrong = case.semaphore_of(client, "a", 3)?;
        match timeout(PATIENCE, wrong.acquire()).await {
            Ok(Err(Error::InvalidOptions { reason, .. })) => {
                ensure!(
                    reason.contains('2'),
                    "the error does not say what size it has: {reason}"
                );
            }
            Ok(other) => {
                return Err(failed(format!(
                    "expected InvalidOptions for a second size, got {other:?}"
                )));
            }
            Err(_) => return Err(failed("expected InvalidOptions for a second size, and it waits")),
        }
    }
    guard.release().await?;
    ensure!(
        mine.semaphore(case.name("b"), 0).is_err(),
        "a semaphore without permits was accepted"
    );
    Ok(())
}

pub(crate) async fn apart_from_the_lock(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let permit = granted_at_once(
        "a semaphore nobody has used",
        &case.semaphore_of(&client, "a", 1)?,
    )
    .await?;
    let lock = granted_at_once("the lock of a semaphore's name", &case.lock_of(&client, "a")?).await?;
    taken("the only permit", &case.semaphore_of(&client, "a", 1)?).await?;
    let (of_lock, of_permit) = (
        client.inspect(case.name("a")).await?,
        client.inspect_semaphore(case.name("a")).await?,
    );
    ensure!(
        of_lock.holders.len() == 1 && of_permit.holders.len() == 1,
        "shown are {of_lock:?} and {of_permit:?}"
    );
    permit.release().await?;
    ensure!(
        lock.is_held(),
        "releasing the semaphore's permit ended the hold of the lock"
    );
    lock.release().await?;
    Ok(())
}

pub(crate) async fn semaphores_are_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let answer = match case.semaphore_of(&client, "a", 2) {
        Ok(semaphore) => semaphore.acquire().await.map(drop),
        Err(error) => Err(error),
    };
    ensure!(
        matches!(answer, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {answer:?}"
    );
    Ok(())
}

pub(crate) async fn killed_holder_returns_its_permit(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let semaphore = case.semaphore_of(&client, "a", 2)?;
    let mine = granted_at_once("the first permit", &semaphore).await?;
    let mut helper = case.helper().await?;
    let bound = case.freed_after_death_here(&client, &mut helper).await?;
    let two = NonZeroU32::MIN.saturating_add(1);
    let (ttl, name) = (case.harness.ttl(), case.name("a"));
    helper
        .hold(&Request {
            slot: "g",
            mode: Mode::Permits(two),
            ttl,
            name: &name,
        })
        .await?;
    taken("a third permit of two", &semaphore).await?;
    helper.process.kill()?;
    comes_free(bound, "the holder of the second permit was killed", &semaphore).await?;
    ensure!(
        mine.is_held(),
        "the death of one holder ended the hold of another"
    );
    mine.release().await?;
    Ok(())
}
