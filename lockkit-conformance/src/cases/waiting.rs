//! Waiting, giving up, and order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{AcquireOptions, Error, Lock, LockClient, LockKind, spi::Mode};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    Outage,
    case_run::{
        CaseRun, LIMIT, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, eventually, failed,
        granted_at_once, granted_within, is_clean, lasting, look, poll_at_most, taken, within,
    },
    history::{Acquisition, History, at, now},
    stall::Stopwatch,
};

pub(crate) async fn short_timeout_is_prompt(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.lock("a").await?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &mine).await?;
    let wait = Duration::from_millis(200);
    for lock in [&mine, &theirs] {
        let before = answer_takes(lock).await?;
        let (asked, watch) = (Instant::now(), Stopwatch::start());
        let answer = lock.acquire_timeout(wait).await;
        let (took, ran) = (asked.elapsed(), watch.elapsed());
        let control = before.max(answer_takes(lock).await?);
        match answer {
            Err(error) if error.is_timeout() => {}
            other => {
                return Err(failed(format!(
                    "expected a time-out on a lock that is held, got {other:?}"
                )));
            }
        }
        ensure!(took >= wait, "a time-out of {wait:?} came after {took:?} already");
        let bound = Duration::from_millis(500) + 3 * control;
        ensure!(
            ran < bound,
            "a time-out of {wait:?} took {ran:?}, expected under {bound:?}, where an answer takes {control:?}"
        );
    }
    guard.release().await?;
    Ok(())
}

pub(crate) async fn outage_is_never_taken(case: &CaseRun) -> Outcome {
    // At its end, what the server said in the beginning is old.
    const WAIT: Duration = Duration::from_secs(2);

    let Some((client, way)) = case.harness.on_a_way().await? else {
        return Err(Stop::Skipped("its harness cannot cut a client off".to_owned()));
    };
    let guard = granted_at_once("a lock nobody has used", &case.lock("a").await?).await?;
    let another = granted_at_once("another one", &case.lock("b").await?).await?;
    let lock_of = |name| {
        Ok::<_, Stop>(
            case.lock_of(&client, name)?
                .with_options(lasting().op_timeout(PROMPT)),
        )
    };
    let (lock, queued) = (lock_of("a")?, lock_of("b")?);
    let is_unknown = |error: &Error| error.is_transient() && !error.is_timeout();
    let says_taken = async || {
        let waited = lock.acquire_timeout(WAIT).await;
        ensure!(
            waited.as_ref().is_err_and(Error::is_timeout),
            "expected a time-out on a lock that is held, got {waited:?}"
        );
        Ok::<_, Stop>(())
    };
    says_taken().await?;
    for outage in [Outage::Refused, Outage::Silent] {
        let wait = |lock: &Lock, wait| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.acquire_timeout(wait).await })
        };
        let ahead = wait(&queued, WAIT * 30);
        let waiter = wait(&lock, WAIT);
        tokio::task::yield_now().await;
        // It never speaks to the server itself while that is there.
        let behind = wait(&queued, WAIT);
        // It has the server's word by then, and waits.
        sleep(WAIT / 5).await;
        way.cut(outage);
        let tried = lock.try_acquire().await;
        ensure!(
            tried.as_ref().is_err_and(is_unknown),
            "expected of a try that it cannot tell, since the server is away ({outage:?}), got {tried:?}"
        );
        for waiter in [waiter, behind] {
            let what = format!("a wait of {WAIT:?} ends, also with the server away ({outage:?})");
            let ended = within(WAIT + PROMPT, &what, waiter).await?.map_err(failed)?;
            ensure!(
                ended.as_ref().is_err_and(is_unknown),
                "expected of a wait that it cannot tell, since the server is away at its end ({outage:?}), got {ended:?}"
            );
        }
        ahead.abort();
        way.open();
        let what = format!("the server is back ({outage:?}), and says that the lock is taken");
        eventually(case.freed_after_death(&client), &what, async || {
            match lock.try_acquire().await {
                Ok(None) => Ok(true),
                Ok(Some(guard)) => Err(failed(format!("granted what another holds: {guard:?}"))),
                Err(error) if is_unknown(&error) => Ok(false),
                Err(error) => Err(error.into()),
            }
        })
        .await?;
    }
    says_taken().await?;
    guard.release().await?;
    another.release().await?;
    comes_free(PROMPT * 10, "the holder has released", &lock).await
}

/// Returns how long it takes to be told that a lock is taken, on a machine as busy as this one.
async fn answer_takes(lock: &Lock) -> Result<Duration, Stop> {
    let watch = Stopwatch::start();
    taken("of a lock that is held", lock).await?;
    Ok(watch.elapsed())
}

pub(crate) async fn cancelled_wait_is_prompt(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (mine, theirs) = (case.lock_of(&client, "a")?, case.lock("a").await?);
    let guard = granted_at_once("a lock nobody has used", &mine).await?;
    for lock in [&mine, &theirs] {
        let waiting = lock.clone();
        let waiter = tokio::spawn(async move { waiting.acquire().await.map(drop) });
        sleep(Duration::from_millis(30)).await;
        ensure!(
            !waiter.is_finished(),
            "a wait for a lock that is held ended: {:?}",
            waiter.await
        );
        waiter.abort();
        let cancelled = within(PROMPT, "a wait that was cancelled ends", waiter).await?;
        ensure!(
            cancelled.is_err_and(|error| error.is_cancelled()),
            "the cancelled wait was granted"
        );
    }
    guard.release().await?;
    is_clean(
        PATIENCE,
        "waits were cancelled, the lock released",
        &client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await?;
    comes_free(PATIENCE, "those before have given up", &theirs).await?;
    Ok(())
}

pub(crate) async fn counter_is_never_two(case: &CaseRun) -> Outcome {
    let inside = Arc::new(AtomicUsize::new(0));
    let mut handles = JoinSet::new();
    for _ in 0..10 {
        let lock = case.lock("a").await?;
        for _ in 0..10 {
            let (lock, inside) = (lock.clone(), inside.clone());
            handles.spawn(async move {
                let guard = lock.acquire().await?;
                let others = inside.fetch_add(1, Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await?;
                Ok::<_, Error>(others)
            });
        }
    }
    let mut granted = 0;
    while let Some(handle) = handles.join_next().await {
        let others = handle.map_err(failed)??;
        ensure!(others == 0, "{others} others were inside with a holder");
        granted += 1;
    }
    ensure!(granted == 100, "expected 100 grants, got {granted}");
    Ok(())
}

pub(crate) async fn nothing_is_left_behind(case: &CaseRun) -> Outcome {
    let holder_client = case.client().await?;
    let holder = granted_at_once("a lock nobody has used", &case.lock_of(&holder_client, "a")?).await?;
    let mut workers = JoinSet::new();
    for index in 0..8 {
        let lock = case.lock("a").await?;
        let mut rng = fastrand::Rng::with_seed(case.seed.wrapping_add(index));
        workers.spawn(async move {
            for _ in 0..125 {
                give_up(&lock, &mut rng).await?;
            }
            Ok::<_, Stop>(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.map_err(failed)??;
    }
    ensure!(
        holder.is_held(),
        "the holder lost its hold to those who gave up: {:?}",
        holder.check()
    );
    holder.release().await?;
    let limit = PATIENCE;
    is_clean(
        limit,
        "1,000 requests were given up",
        &holder_client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await?;
    comes_free(PATIENCE, "1,000 requests were given up", &case.lock("a").await?).await?;
    Ok(())
}

async fn give_up(lock: &Lock, rng: &mut fastrand::Rng) -> Outcome {
    let pause = Duration::from_micros(rng.u64(0..3_000));
    let granted = match rng.u8(0..4) {
        0 => lock.try_acquire().await?,
        1 => match lock.acquire_timeout(pause).await {
            Ok(guard) => Some(guard),
            // So short a wait may end before the server's first answer, which is no time-out then.
            Err(error) if error.is_timeout() || error.is_transient() => None,
            Err(error) => return Err(error.into()),
        },
        2 => timeout(pause, lock.acquire()).await.ok().transpose()?,
        _ => poll_at_most(1, lock.acquire()).await.transpose()?,
    };
    ensure!(
        granted.is_none(),
        "a lock was granted that another held all the time"
    );
    Ok(())
}

pub(crate) async fn dropped_after_each_poll(case: &CaseRun) -> Outcome {
    const MOST: usize = 64;
    let client = case.client().await?;
    let bound = PATIENCE;
    let (mine, theirs) = (case.lock_of(&client, "a")?, case.lock("a").await?);
    let mut completed = false;
    for polls in 1..=MOST {
        let done = poll_at_most(polls, mine.acquire()).await.transpose()?;
        completed = done.is_some();
        drop(done);
        let what = format!("an acquire of a free lock was dropped after poll {polls}");
        comes_free(bound, &what, &theirs).await?;
        if completed {
            break;
        }
    }
    ensure!(completed, "acquiring a free lock took more than {MOST} polls");
    for polls in 1..=12 {
        let holder = granted_within(bound, "the round before is over", &theirs).await?;
        let release = async {
            sleep(Duration::from_millis(3)).await;
            holder.release().await
        };
        let wait = timeout(Duration::from_millis(50), poll_at_most(polls, mine.acquire()));
        let (waited, released) = tokio::join!(wait, release);
        released?;
        drop(waited.ok().flatten().transpose()?);
        let what = format!("a wait was dropped after poll {polls} at the latest");
        comes_free(bound, &what, &theirs).await?;
    }
    is_clean(
        bound,
        "all waits were dropped",
        &client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await
}

pub(crate) async fn untaken_grant_lapses(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let bound = case.harness.ttl() + case.limits(&client).idle;
    for part in ["local", "remote"] {
        let holder_lock = match part {
            "local" => case.short_lock_of(&client, part)?,
            _ => case.short_lock_of(&case.client().await?, part)?,
        };
        let waiting = case.short_lock_of(&client, part)?;
        let holder = granted_at_once("a lock nobody has used", &holder_lock).await?;
        let mut untaken = Box::pin(waiting.acquire());
        let early = timeout(Duration::from_millis(50), untaken.as_mut()).await;
        ensure!(early.is_err(), "a lock was granted that another holds: {early:?}");
        holder.release().await?;
        // Not dropped and not polled, as a future that its task forgot in an array.
        comes_free(
            bound,
            &format!("the {part} waiter before never took its grant"),
            &case.lock(part).await?,
        )
        .await?;
        let guard = within(PATIENCE + bound, "the forgotten wait goes on", untaken).await??;
        ensure!(
            guard.is_held(),
            "a guard came out that is not held: {:?}",
            guard.check()
        );
        guard.release().await?;
    }
    Ok(())
}

pub(crate) async fn flood_is_bounded(case: &CaseRun) -> Outcome {
    let (client, holder_client) = (case.client().await?, case.client().await?);
    let holder = granted_at_once("a lock nobody has used", &case.lock_of(&holder_client, "a")?).await?;
    let mut waiters = JoinSet::new();
    for index in 0..1_000_u64 {
        let lock = case.lock_of(&client, "a")?;
        // Half give up while the lock is held, the others get it in turn.
        let wait = if index % 2 == 0 {
            Duration::from_secs(1)
        } else {
            LIMIT
        };
        waiters.spawn(async move {
            match lock.acquire_timeout(wait).await {
                Ok(guard) => Ok(Some(guard.token())),
                Err(error) if error.is_timeout() => Ok(None),
                Err(error) => Err(error),
            }
        });
    }
    stands_in_queue(&holder_client, &case.name("a"), 1).await?;
    one_is_queued(&holder_client, &case.name("a")).await?;
    let (mut tokens, mut given_up) = (Vec::new(), 0);
    while given_up < 500 {
        let what = format!("500 give up, and {given_up} have");
        let ended = within(PATIENCE, &what, waiters.join_next()).await?;
        let ended = ended.ok_or_else(|| failed(format!("all have ended, and {given_up} have given up")))?;
        let granted = ended.map_err(failed)??;
        ensure!(granted.is_none(), "granted with {granted:?} while it is held");
        given_up += 1;
    }
    one_is_queued(&holder_client, &case.name("a")).await?;
    holder.release().await?;
    while let Some(waiter) = waiters.join_next().await {
        match waiter.map_err(failed)?? {
            Some(token) => tokens.push(token),
            None => given_up += 1,
        }
    }
    ensure!(
        given_up == 500 && tokens.len() == 500,
        "expected 500 time-outs and 500 grants, got {given_up} and {}",
        tokens.len()
    );
    tokens.sort_unstable();
    tokens.dedup();
    ensure!(tokens.len() == 500, "a token was granted twice");
    is_clean(
        PATIENCE,
        "the flood is over",
        &client,
        &case.name("a"),
        LockKind::Lock,
    )
    .await
}

/// Waits until the server shows no more than one waiter, of however many of one client. Those who give up may be followed before they
/// have left.
async fn one_is_queued(observer: &LockClient, name: &str) -> Outcome {
    eventually(
        PATIENCE,
        "waiters of one client are one at the server",
        async || {
            let shown = observer.inspect(name).await?.waiters;
            Ok(shown.is_none_or(|waiters| waiters <= 1))
        },
    )
    .await
}

pub(crate) async fn grants_follow_the_queue(case: &CaseRun) -> Outcome {
    let observer = case.client().await?;
    let (mut history, mut waiters) = (History::default(), JoinSet::new());
    let lock = case.lock_of(&observer, "a")?.with_options(strict());
    let mut first = Acquisition::asked(case.name("a"), Mode::Exclusive, 0, now());
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    first.granted = Some((now(), guard.token().get()));
    let mut queued = Vec::new();
    for who in 1..=8_u64 {
        let lock = case.lock("a").await?.with_options(strict());
        let mut record = Acquisition::asked(case.name("a"), Mode::Exclusive, who, now());
        waiters.spawn(async move {
            let guard = lock.acquire().await?;
            record.granted = Some((now(), guard.token().get()));
            record.until = guard.valid_until().map(at);
            record.released = Some(now());
            guard.release().await?;
            Ok::<_, Error>(record)
        });
        stands_in_queue(&observer, &case.name("a"), who).await?;
        // A request from now on is behind.
        queued.push((who, now()));
    }
    first.until = guard.valid_until().map(at);
    first.released = Some(now());
    guard.release().await?;
    history.acquisitions.push(first);
    while let Some(waiter) = waiters.join_next().await {
        let mut record = waiter.map_err(failed)??;
        record.queued = queued
            .iter()
            .find(|(who, _)| *who == record.who)
            .map(|(_, moment)| *moment);
        history.acquisitions.push(record);
    }
    let mut limits = case.limits(&observer);
    limits.fifo = true;
    let summary = history.check(&limits)?;
    ensure!(summary.granted == 9, "expected 9 grants, got {summary:?}");
    Ok(())
}

fn strict() -> AcquireOptions {
    lasting().local_handoffs(0)
}

/// Waits until the server shows that many waiters, or for as long as joining a queue takes where it does not say.
async fn stands_in_queue(observer: &LockClient, name: &str, waiters: u64) -> Outcome {
    if observer.inspect(name).await?.waiters.is_none() {
        sleep(Duration::from_millis(50)).await;
        return Ok(());
    }
    let what = format!("{waiters} wait, and the server shows as many");
    eventually(PATIENCE, &what, async || {
        Ok(observer
            .inspect(name)
            .await?
            .waiters
            .is_some_and(|shown| shown as u64 >= waiters))
    })
    .await
}

pub(crate) async fn waiter_is_notified(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let poll = mine.info().fallback_poll;
    let (held, queued) = (case.lock_of(&mine, "a")?, case.lock_of(&theirs, "a")?);
    let mut took = Vec::new();
    for _ in 0..5 {
        let guard = granted_within(PATIENCE, "the round before is over", &held).await?;
        let waiting = queued.clone();
        let waiter =
            tokio::spawn(async move { waiting.acquire().await.map(|guard| (Instant::now(), guard)) });
        sleep(Duration::from_millis(20)).await;
        guard.release().await?;
        // Stalls count: without them, a fallback poll might look like a notification.
        let released = Instant::now();
        let (granted, guard) = within(poll + PATIENCE, "the holder released", waiter)
            .await?
            .map_err(failed)??;
        took.push(granted.saturating_duration_since(released));
        guard.release().await?;
    }
    took.sort_unstable();
    ensure!(
        took[2] < poll / 2,
        "woken after {took:?}; that is its fallback poll of {poll:?}, not a notification"
    );
    Ok(())
}

pub(crate) async fn hinted_when_one_ahead_gives_up(case: &CaseRun) -> Outcome {
    const ROUNDS: usize = 5;

    let (first, second, third) = (case.client().await?, case.client().await?, case.client().await?);
    let lock = |client: &LockClient, part| case.lock_of(client, part);
    let permit = |client: &LockClient| case.semaphore_of(client, "permits", 1);
    let [held, ahead, behind] = [&first, &second, &third].map(|client| lock(client, "writers"));
    let mut lines = vec![("a writer waits behind a writer", [held?, ahead?, behind?])];
    if first.capabilities().shared {
        let [held, ahead, behind] = [&first, &second, &third].map(|client| lock(client, "readers"));
        let line = [held?.shared(), ahead?, behind?.shared()];
        lines.push(("a reader waits behind a writer, beside a reader", line));
    }
    if first.capabilities().permits {
        let [held, ahead, behind] = [&first, &second, &third].map(permit);
        lines.push(("one waits for a permit behind another", [held?, ahead?, behind?]));
    }
    let poll = first.info().fallback_poll;
    for (what, line) in &lines {
        let mut took = Vec::new();
        for _ in 0..ROUNDS {
            took.push(granted_after_one_gave_up(&first, line, poll).await?);
        }
        took.sort_unstable();
        ensure!(
            took[ROUNDS / 2] < poll / 2,
            "{what}, who gives up, and is granted after {took:?}; that is its fallback poll of {poll:?}, not a notification"
        );
    }
    Ok(())
}

/// Has one wait behind another who gives up. Returns the time from when nothing is in its way any more until it is granted.
async fn granted_after_one_gave_up(
    observer: &LockClient,
    [held, ahead, behind]: &[Lock; 3],
    poll: Duration,
) -> Result<Duration, Stop> {
    let guard = granted_within(PATIENCE, "the round before is over", held).await?;
    let (ahead, behind) = (ahead.clone(), behind.clone());
    let ahead = tokio::spawn(async move { ahead.acquire().await.map(drop) });
    shows(observer, held, |waiters| waiters >= 1).await?;
    let behind = tokio::spawn(async move { behind.acquire().await.map(|guard| (Instant::now(), guard)) });
    shows(observer, held, |waiters| waiters >= 2).await?;
    let gave_up = Instant::now();
    ahead.abort();
    // A reader stays in. What is exclusive, or a permit, is given back once the first has left.
    let (since, stays) = if held.mode() == Mode::Shared {
        (gave_up, Some(guard))
    } else {
        shows(observer, held, |waiters| waiters <= 1).await?;
        guard.release().await?;
        (Instant::now(), None)
    };
    let (granted, guard) = within(poll + PATIENCE, "the one ahead has given up", behind)
        .await?
        .map_err(failed)??;
    guard.release().await?;
    if let Some(guard) = stays {
        guard.release().await?;
    }
    Ok(granted.saturating_duration_since(since))
}

/// Waits until the server shows so many waiters, for a moment at most: not every one shows them, or has readers wait.
async fn shows(observer: &LockClient, lock: &Lock, is_enough: impl Fn(usize) -> bool) -> Outcome {
    let watch = Stopwatch::start();
    while watch.elapsed() < PROMPT {
        let state = look(observer, lock.name().as_str(), lock.mode().kind()).await?;
        let Some(waiters) = state.waiters else {
            sleep(Duration::from_millis(50)).await;
            break;
        };
        if is_enough(waiters) {
            break;
        }
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

pub(crate) async fn strict_order_refuses_handoffs(case: &CaseRun) -> Outcome {
    let lock = case.lock("a").await?;
    let answer = lock.acquire_with(&lasting().local_handoffs(5)).await;
    ensure!(
        matches!(
            answer,
            Err(Error::InvalidOptions {
                option: "local_handoffs",
                ..
            })
        ),
        "expected InvalidOptions of `local_handoffs`, got {answer:?}"
    );
    comes_free(Duration::ZERO, "none are asked for", &lock.with_options(strict())).await?;
    Ok(())
}
