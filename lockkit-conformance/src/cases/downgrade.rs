//! From exclusive to shared mode, without a gap.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{DowngradeError, Error, HoldEnd, Lock, LockGuard, LockKind};
use tokio::{task::JoinHandle, time::sleep};

use crate::case_run::{
    CaseRun, Outcome, PATIENCE, Stop, comes_free, ensure, eventually, failed, granted_at_once,
    granted_within, is_clean, poll_at_most, taken, within,
};

/// Makes a guard shared, which has to work.
async fn downgraded(guard: LockGuard) -> Result<LockGuard, Stop> {
    Ok(within(PATIENCE, "a downgrade of a hold", guard.downgrade()).await??)
}

/// Begins to wait for the lock, and returns when the server knows of `waiters`, where it tells.
async fn waiting(case: &CaseRun, lock: &Lock, waiters: usize) -> Result<JoinHandle<Granted>, Stop> {
    let queued = lock.clone();
    let task = tokio::spawn(async move { queued.acquire().await });
    let client = case.client().await?;
    let name = case.name("a");
    eventually(PATIENCE, "the server knows of the waiters", async || {
        let state = client.inspect(&name).await?;
        Ok(state.waiters.is_none_or(|known| known >= waiters))
    })
    .await?;
    Ok(task)
}

type Granted = Result<LockGuard, Error>;

pub(crate) async fn downgraded_holder_reads_with_others(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (lock, other) = (case.lock_of(&client, "a")?, case.lock("a").await?);
    let writing = granted_at_once("a lock nobody has used", &lock).await?;
    let (token, view) = (writing.token(), writing.view());
    let reader = waiting(case, &other.shared(), 1).await?;
    let mine = waiting(case, &lock.shared(), 2).await?;
    let reading = downgraded(writing).await?;
    ensure!(reading.is_held(), "a downgraded hold is not held");
    ensure!(
        reading.token() == token,
        "the token was {token:?}, and is {:?} after the downgrade",
        reading.token()
    );
    let end = within(PATIENCE, "the exclusive hold ends", view.ended()).await?;
    ensure!(
        end == HoldEnd::Released && !view.is_held(),
        "the view of the exclusive hold says {end:?}, held: {}",
        view.is_held()
    );
    let reader = within(PATIENCE, "a reader that waited gets in", reader).await?;
    let mine = within(PATIENCE, "a reader of the same client gets in", mine).await?;
    let (reader, mine) = (reader.map_err(failed)??, mine.map_err(failed)??);
    let late = granted_at_once("only readers are in", &case.lock("a").await?.shared()).await?;
    for new in [&reader, &mine, &late] {
        ensure!(
            new.token() > token,
            "{:?} of a reader that came later is not above {token:?}",
            new.token()
        );
    }
    let shown = client.inspect(case.name("a")).await?;
    ensure!(
        shown.holders.len() == 4 && shown.holders.iter().any(|holder| holder.token == token),
        "expected 4 holders, one of them with {token:?}, got {shown:?}"
    );
    taken("exclusively, while a downgraded holder reads", &lock).await?;
    taken("exclusively, by another client", &other).await?;
    for other in [reader, mine, late] {
        other.release().await?;
    }
    taken("exclusively, while nobody else reads any more", &other).await?;
    reading.renew().await?;
    let again = reading.downgrade().await;
    let Err(DowngradeError {
        error: Error::Unsupported { .. },
        guard: Some(reading),
        ..
    }) = again
    else {
        return Err(failed(format!(
            "expected Unsupported and the guard for a hold that is shared, got {again:?}"
        )));
    };
    reading.release().await?;
    let writer = granted_within(PATIENCE, "the last reader left", &other).await?;
    ensure!(
        writer.token() > token,
        "the next writer's {:?} is not above {token:?}",
        writer.token()
    );
    writer.release().await?;
    is_clean(
        PATIENCE,
        "all have left",
        &client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await
}

pub(crate) async fn nobody_writes_in_a_downgrade(case: &CaseRun) -> Outcome {
    let lock = case.lock("a").await?;
    let crowd = Writers::start(case).await?;
    for round in 0..25_u64 {
        let writing = granted_within(PATIENCE, "writers come and go", &lock).await?;
        let token = writing.token();
        // Some have begun to wait by now, and look for the release.
        let before = crowd.turns();
        sleep(Duration::from_millis(round % 4)).await;
        let reading = downgraded(writing).await?;
        sleep(Duration::from_millis(round % 7)).await;
        ensure!(
            crowd.turns() == before && reading.is_held(),
            "round {round}: somebody wrote while a hold was made a shared one"
        );
        ensure!(
            reading.token() == token && !crowd.saw_above(token.get()),
            "round {round}: a writer had a token above {token:?} before that was released"
        );
        reading.release().await?;
        let bound = PATIENCE;
        eventually(bound, "a writer gets in after the reader", async || {
            Ok(crowd.turns() > before)
        })
        .await?;
    }
    crowd.stop().await
}

/// Writers of two clients who come again and again.
struct Writers {
    stop: Arc<AtomicBool>,
    turns: Arc<AtomicUsize>,
    highest: Arc<std::sync::atomic::AtomicU64>,
    tasks: tokio::task::JoinSet<Result<(), Error>>,
}

impl Writers {
    async fn start(case: &CaseRun) -> Result<Self, Stop> {
        let mut crowd = Self {
            stop: Arc::default(),
            turns: Arc::default(),
            highest: Arc::default(),
            tasks: tokio::task::JoinSet::new(),
        };
        for client in [case.client().await?, case.client().await?] {
            for _ in 0..2 {
                let lock = case.lock_of(&client, "a")?;
                let (stop, turns, highest) = (crowd.stop.clone(), crowd.turns.clone(), crowd.highest.clone());
                crowd.tasks.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        let guard = lock.acquire().await?;
                        highest.fetch_max(guard.token().get(), Ordering::SeqCst);
                        turns.fetch_add(1, Ordering::SeqCst);
                        guard.release().await?;
                        sleep(Duration::from_millis(2)).await;
                    }
                    Ok(())
                });
            }
        }
        let turns = crowd.turns.clone();
        eventually(PATIENCE, "the writers have come", async || {
            Ok(turns.load(Ordering::SeqCst) > 4)
        })
        .await?;
        Ok(crowd)
    }

    fn turns(&self) -> usize {
        self.turns.load(Ordering::SeqCst)
    }

    fn saw_above(&self, token: u64) -> bool {
        self.highest.load(Ordering::SeqCst) > token
    }

    async fn stop(mut self) -> Outcome {
        self.stop.store(true, Ordering::SeqCst);
        while let Some(task) = within(PATIENCE, "the writers go home", self.tasks.join_next()).await? {
            task.map_err(failed)??;
        }
        Ok(())
    }
}

pub(crate) async fn downgrade_overtakes_no_writer(case: &CaseRun) -> Outcome {
    let (lock, writer, reader) = (
        case.lock("a").await?,
        case.lock("a").await?,
        case.lock("a").await?.shared(),
    );
    let writing = granted_at_once("a lock nobody has used", &lock).await?;
    let token = writing.token();
    let writer = waiting(case, &writer, 1).await?;
    let late = waiting(case, &reader, 2).await?;
    let reading = downgraded(writing).await?;
    taken("shared, behind a writer that waits", &reader).await?;
    sleep(Duration::from_millis(50)).await;
    ensure!(
        !writer.is_finished() && !late.is_finished(),
        "granted beside a downgraded holder: writer {}, the reader behind it {}",
        writer.is_finished(),
        late.is_finished()
    );
    reading.release().await?;
    let writer = within(PATIENCE, "the writer's turn", writer)
        .await?
        .map_err(failed)??;
    ensure!(
        writer.token() > token && !late.is_finished(),
        "the writer has {:?} after {token:?}; the reader behind it is in: {}",
        writer.token(),
        late.is_finished()
    );
    writer.release().await?;
    let late = within(PATIENCE, "the reader's turn", late)
        .await?
        .map_err(failed)??;
    late.release().await?;
    Ok(())
}

pub(crate) async fn downgrade_dropped_midway(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let lock = case.lock_of(&client, "a")?;
    for polls in 1..50 {
        let guard = granted_within(PATIENCE, "the downgrade before was dropped", &lock).await?;
        match poll_at_most(polls, guard.downgrade()).await {
            None => {}
            Some(reading) => {
                reading?.release().await?;
                return comes_free(PATIENCE, "the shared hold was released", &lock).await;
            }
        }
    }
    Err(failed("a downgrade took 50 polls"))
}

pub(crate) async fn downgrade_revives_no_lost_hold(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let lock = case
        .lock_of(&client, "a")?
        .with_options(lockkit_core::AcquireOptions::new().renew(false));
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let token = guard.token();
    case.break_hold(&client, "a").await?;
    match within(PATIENCE, "a downgrade of a broken hold", guard.downgrade()).await? {
        Err(DowngradeError {
            error: Error::Lost { .. },
            guard,
            ..
        }) => ensure!(
            guard.is_none_or(|guard| !guard.is_held()),
            "a hold that was lost left a guard that is held"
        ),
        other => {
            return Err(failed(format!(
                "expected Lost for a hold that the server has dropped, got {other:?}"
            )));
        }
    }
    let next = granted_within(PATIENCE, "the hold was lost", &case.lock("a").await?).await?;
    ensure!(
        next.token() > token,
        "the next has {:?} after {token:?}",
        next.token()
    );
    next.release().await?;
    Ok(())
}

pub(crate) async fn downgrade_is_unsupported(case: &CaseRun) -> Outcome {
    let (lock, other) = (case.lock("a").await?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let (token, view) = (guard.token(), guard.view());
    let refused = guard.downgrade().await;
    let Err(DowngradeError {
        error: Error::Unsupported { .. },
        guard: Some(guard),
        ..
    }) = refused
    else {
        return Err(failed(format!(
            "expected Unsupported and the guard, got {refused:?}"
        )));
    };
    ensure!(
        guard.is_held() && view.is_held() && guard.token() == token,
        "a downgrade that was refused changed {guard:?}"
    );
    taken("while the hold goes on", &other).await?;
    guard.release().await?;
    comes_free(PATIENCE, "the hold was released", &other).await
}
