//! Random contention, recorded and checked.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lockkit_core::{Error, Lock, LockGuard, Result, spi::Mode};
use tokio::{task::JoinSet, time::timeout};

use crate::{
    case_run::{CaseRun, Outcome, PATIENCE, PROMPT, Stop, ensure, failed, is_clean, look, poll_at_most},
    helper::mode_word,
    history::{Acquisition, History, Sight, Summary, at, now},
};

pub(crate) async fn clients_contend(case: &CaseRun) -> Outcome {
    let mut plans = Vec::new();
    for who in 0..4 {
        plans.push(Plan {
            lock: case.lock("a").await?,
            mode: Mode::Exclusive,
            rounds: 40,
            workers: 4,
            seed: case.seed.wrapping_add(who),
            who: who * 100,
        });
    }
    let history = contend_all(plans).await?;
    let summary = checked(case, "a", Mode::Exclusive, history).await?;
    ensure!(summary.granted >= 100, "a vacuous pass: {summary:?}");
    Ok(())
}

pub(crate) async fn processes_contend(case: &CaseRun) -> Outcome {
    let (workers, rounds) = (3, 30);
    let lock = case.lock("a").await?;
    let mut helpers = Vec::new();
    for who in 1..4_u64 {
        let mut helper = case.helper().await?;
        let (mode, ttl) = (mode_word(Mode::Exclusive), case.harness.ttl().as_millis());
        let (seed, name) = (case.seed.wrapping_add(who), case.name("a"));
        helper.send(&format!(
            "contend {mode} {ttl} {rounds} {workers} {seed} {} {name}",
            who * 100
        ))?;
        helpers.push(helper);
    }
    let (mode, seed) = (Mode::Exclusive, case.seed);
    let mut history = contend_all(vec![Plan {
        lock,
        mode,
        rounds,
        workers,
        seed,
        who: 0,
    }])
    .await?;
    for mut helper in helpers {
        loop {
            let answer = helper.reply().await?;
            match answer.split_once(' ') {
                Some(("record", record)) => history.absorb(record).map_err(failed)?,
                _ if answer == "done" => break,
                _ => return Err(failed(format!("a contending helper said `{answer}`"))),
            }
        }
    }
    let summary = checked(case, "a", mode, history).await?;
    ensure!(summary.granted >= 80, "a vacuous pass: {summary:?}");
    Ok(())
}

/// A contest: who contends for what, and for how long.
pub(crate) struct Plan {
    pub(crate) lock: Lock,
    pub(crate) mode: Mode,
    /// The number of requests that each worker makes.
    pub(crate) rounds: u64,
    pub(crate) workers: u64,
    pub(crate) seed: u64,
    /// The first worker's number in the records.
    pub(crate) who: u64,
}

/// Runs several plans at once.
pub(crate) async fn contend_all(plans: Vec<Plan>) -> Result<History> {
    let mut history = History::default();
    for acquisitions in join_all(plans.into_iter().map(contend)).await {
        history.acquisitions.extend(acquisitions?);
    }
    Ok(history)
}

/// Runs the workers of one plan, and returns what they recorded.
pub(crate) async fn contend(plan: Plan) -> Result<Vec<Acquisition>> {
    let plan = Arc::new(plan);
    let mut workers = JoinSet::new();
    for index in 0..plan.workers {
        let plan = plan.clone();
        workers.spawn(async move {
            let mut rng = fastrand::Rng::with_seed(plan.seed.wrapping_mul(1_000).wrapping_add(index));
            let mut records = Vec::new();
            for _ in 0..plan.rounds {
                records.push(one_round(&plan, plan.who + index, &mut rng).await?);
            }
            Ok::<_, Error>(records)
        });
    }
    let mut records = Vec::new();
    while let Some(worker) = workers.join_next().await {
        match worker {
            Ok(done) => records.extend(done?),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    Ok(records)
}

/// Asks in one of the ways there are, and ends the hold in one of the ways there are.
async fn one_round(plan: &Plan, who: u64, rng: &mut fastrand::Rng) -> Result<Acquisition> {
    let mut record = Acquisition::asked(plan.lock.name().as_str(), plan.mode, who, now());
    let pause = Duration::from_micros(rng.u64(0..3_000));
    let granted = match rng.u8(0..10) {
        0..5 => Some(plan.lock.acquire().await?),
        5 => plan.lock.try_acquire().await?,
        6 => match plan.lock.acquire_timeout(pause).await {
            Ok(guard) => Some(guard),
            // So short a wait may end before the server's first answer, which is no time-out then.
            Err(error) if error.is_timeout() || error.is_transient() => None,
            Err(error) => return Err(error),
        },
        7 => timeout(pause, plan.lock.acquire()).await.ok().transpose()?,
        _ => poll_at_most(rng.usize(1..6), timeout(PROMPT, plan.lock.acquire()))
            .await
            .and_then(std::result::Result::ok)
            .transpose()?,
    };
    let Some(guard) = granted else {
        record.gave_up = Some(now());
        return Ok(record);
    };
    record.granted = Some((now(), guard.token().get()));
    hold(guard, &mut record, rng).await;
    Ok(record)
}

async fn hold(guard: LockGuard, record: &mut Acquisition, rng: &mut fastrand::Rng) {
    let work = Duration::from_micros(rng.u64(0..1_500));
    let lost = tokio::time::timeout(work, guard.lost()).await.is_ok();
    // Which may be long before this comes to hear of it.
    record.until = guard.valid_until().map(at);
    if lost {
        record.lost = Some(now());
        return;
    }
    record.released = Some(now());
    if rng.bool() {
        // The others see what became of it.
        let _ = guard.release().await;
    } else {
        drop(guard);
    }
}

/// Waits until the lock is quiet, adds a look at it, and checks the history.
pub(crate) async fn checked(
    case: &CaseRun,
    part: &str,
    mode: Mode,
    mut history: History,
) -> Result<Summary, Stop> {
    let client = case.client().await?;
    let (mut limits, name) = (case.limits(&client), case.name(part));
    // What it says of holds and tokens does not depend on what follows.
    history.check(&limits)?;
    let limit = PATIENCE;
    is_clean(
        limit,
        "all has been released or given up",
        &client,
        &name,
        mode.kind(),
    )
    .await?;
    let at = now();
    let state = look(&client, &name, mode.kind()).await?;
    history.sights.push(Sight {
        lock: name,
        kind: mode.kind(),
        at,
        holders: state.holders.iter().map(|holder| holder.token.get()).collect(),
        waiters: state.waiters,
    });
    limits.linger = Duration::ZERO;
    let summary = history.check(&limits)?;
    ensure!(
        summary.quiet_sights == 1,
        "the look at the quiet server did not count: {summary:?}"
    );
    Ok(summary)
}
