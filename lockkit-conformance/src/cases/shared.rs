//! Shared mode.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, Lock, spi::Mode};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    case_run::{
        CaseRun, Outcome, PATIENCE, Stop, comes_free, ensure, eventually, failed, granted_at_once,
        granted_within, taken, within,
    },
    cases::contention::{Plan, checked, contend_all},
};

pub(crate) async fn many_readers_or_one_writer(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (mine, theirs) = (case.lock_of(&client, "a")?, case.lock("a").await?);
    let mut readers = Vec::new();
    for reader in [
        mine.shared(),
        mine.shared(),
        theirs.shared(),
        case.lock("a").await?.shared(),
    ] {
        readers.push(granted_at_once("only readers are in", &reader).await?);
    }
    let shown = client.inspect(case.name("a")).await?;
    ensure!(shown.holders.len() == 4, "expected 4 holders, got {shown:?}");
    taken("exclusively, by a client that reads", &mine).await?;
    taken("exclusively, while others read", &theirs).await?;
    let last = readers.pop();
    for reader in readers {
        reader.release().await?;
    }
    taken("exclusively, while one still reads", &theirs).await?;
    let Some(last) = last else {
        return Err(failed("no reader is left"));
    };
    let last_token = last.token();
    last.release().await?;
    let writer = granted_within(PATIENCE, "the last reader left", &theirs).await?;
    ensure!(
        writer.token() > last_token,
        "the writer's {:?} came after {last_token:?}",
        writer.token()
    );
    taken("shared, while another client writes", &mine.shared()).await?;
    taken("shared, while the same client writes", &theirs.shared()).await?;
    writer.release().await?;
    comes_free(PATIENCE, "the writer left", &mine.shared()).await?;
    Ok(())
}

pub(crate) async fn waiting_writer_goes_before_new_readers(case: &CaseRun) -> Outcome {
    let writer = case.lock("a").await?;
    let readers = Crowd::start(case, "a", true).await?;
    let bound = Duration::from_secs(10);
    for _ in 0..3 {
        comes_free(bound, "readers kept coming", &writer).await?;
    }
    readers.stop().await
}

pub(crate) async fn readers_do_not_starve(case: &CaseRun) -> Outcome {
    let reader = case.lock("a").await?.shared();
    let writers = Crowd::start(case, "a", false).await?;
    let bound = Duration::from_secs(10);
    for _ in 0..3 {
        comes_free(bound, "writers kept coming", &reader).await?;
    }
    writers.stop().await
}

pub(crate) async fn readers_and_writers_contend(case: &CaseRun) -> Outcome {
    let mut plans = Vec::new();
    for who in 0..4_u64 {
        let lock = case.lock("a").await?;
        let (lock, mode) = if who == 0 {
            (lock, Mode::Exclusive)
        } else {
            (lock.shared(), Mode::Shared)
        };
        let seed = case.seed.wrapping_add(who);
        plans.push(Plan {
            lock,
            mode,
            rounds: 30,
            workers: 3,
            seed,
            who: who * 100,
        });
    }
    let summary = checked(case, "a", Mode::Exclusive, contend_all(plans).await?).await?;
    ensure!(summary.granted >= 80, "a vacuous pass: {summary:?}");
    Ok(())
}

pub(crate) async fn shared_is_unsupported(case: &CaseRun) -> Outcome {
    let lock = case.lock("a").await?;
    let answer = lock.shared().acquire().await;
    ensure!(
        matches!(answer, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {answer:?}"
    );
    let answer = lock.shared().try_acquire().await;
    ensure!(
        matches!(answer, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {answer:?}"
    );
    comes_free(
        Duration::ZERO,
        "only modes it does not have were asked for",
        &lock,
    )
    .await?;
    Ok(())
}

/// Six holders from three clients who come again and again, so that one of them nearly always holds.
struct Crowd {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicUsize>,
    tasks: JoinSet<Result<(), Error>>,
}

impl Crowd {
    /// Returns once they have come often enough to be in full swing.
    async fn start(case: &CaseRun, part: &str, is_shared: bool) -> Result<Self, Stop> {
        let (stop, rounds, mut tasks) = (
            Arc::<AtomicBool>::default(),
            Arc::<AtomicUsize>::default(),
            JoinSet::new(),
        );
        for index in 0..3 {
            let lock = case.lock(part).await?;
            let lock = if is_shared { lock.shared() } else { lock };
            for step in 0..2 {
                let pause = Duration::from_millis(index * 2 + step);
                tasks.spawn(come_and_go(lock.clone(), pause, stop.clone(), rounds.clone()));
            }
        }
        let crowd = Self { stop, rounds, tasks };
        eventually(PATIENCE, "the crowd has come 12 times", async || {
            Ok(crowd.rounds() >= 12)
        })
        .await?;
        Ok(crowd)
    }

    fn rounds(&self) -> usize {
        self.rounds.load(Ordering::Relaxed)
    }

    async fn stop(mut self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(task) = within(PATIENCE, "the crowd goes home", self.tasks.join_next()).await? {
            task.map_err(failed)??;
        }
        Ok(())
    }
}

async fn come_and_go(
    lock: Lock,
    pause: Duration,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicUsize>,
) -> Result<(), Error> {
    sleep(pause).await;
    while !stop.load(Ordering::Relaxed) {
        let guard = lock.acquire().await?;
        sleep(Duration::from_millis(5)).await;
        guard.release().await?;
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
