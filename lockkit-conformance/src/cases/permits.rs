//! Semaphores.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, LockKind, spi::Mode};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    case_run::{
        CaseRun, Outcome, PROMPT, comes_free, ensure, failed, granted_at_once, granted_within, is_clean,
        taken,
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
        PROMPT,
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
            guards.push(granted_within(PROMPT, &what, &semaphore).await?);
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

pub(crate) async fn two_sizes_are_an_error(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let guard = granted_at_once("a semaphore nobody has used", &case.semaphore_of(&mine, "a", 2)?).await?;
    for client in [&mine, &theirs] {
        let wrong = case.semaphore_of(client, "a", 3)?;
        match timeout(PROMPT * 5, wrong.acquire()).await {
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
    let bound = case.freed_after_death(&client);
    comes_free(bound, "the holder of the second permit was killed", &semaphore).await?;
    ensure!(
        mine.is_held(),
        "the death of one holder ended the hold of another"
    );
    mine.release().await?;
    Ok(())
}
