//! Several locks at once, all or none.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, Error, FencingToken, Lock, LockClient, LockKind, LockSet, acquire_all, try_acquire_all,
};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    Outage,
    case_run::{
        CaseRun, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, eventually, failed, granted_at_once,
        granted_within, is_clean, lasting, poll_at_most, taken, within,
    },
};

/// The names of a set, in the order in which its locks are taken.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Whoever has to wait for longer is locked up.
const LOCKED_UP: Duration = Duration::from_secs(30);

/// So long is waited for a set that is not to be had.
const IN_VAIN: Duration = Duration::from_millis(300);

fn locks_of(case: &CaseRun, client: &LockClient, names: [&str; 3]) -> Result<[Lock; 3], Error> {
    let [one, two, three] = names.map(|name| case.lock_of(client, name));
    Ok([one?, two?, three?])
}

async fn granted<const N: usize>(what: &str, locks: [&Lock; N]) -> Result<LockSet, Stop> {
    let set = within(PATIENCE, what, acquire_all(&locks, &AcquireOptions::new())).await??;
    ensure!(
        set.guards().len() == N && set.check().is_ok(),
        "{what}: of {N} locks, the set is {set:?}, and its check {:?}",
        set.check()
    );
    Ok(set)
}

/// Tries, and waits for a moment: neither gets the set, which is told as "taken".
async fn is_taken<const N: usize>(what: &str, locks: [&Lock; N]) -> Outcome {
    let tried = try_acquire_all(&locks, &AcquireOptions::new()).await?;
    ensure!(tried.is_none(), "{what}, and a try got the set {tried:?}");
    let waited = acquire_all(&locks, &AcquireOptions::new().wait(IN_VAIN)).await;
    ensure!(
        waited.as_ref().is_err_and(Error::is_timeout),
        "{what}: expected a time-out of a wait for the set, got {waited:?}"
    );
    Ok(())
}

/// What a set has let go of is free for others. Its leases outlast the case, so that only a release frees it.
async fn are_free(case: &CaseRun, client: &LockClient, after: &str, names: &[&str]) -> Outcome {
    for name in names {
        let what = format!("{after}: `{name}` is free");
        comes_free(PATIENCE, &what, &case.lock_of(client, name)?).await?;
    }
    Ok(())
}

pub(crate) async fn set_is_all_or_nothing(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let third = case.client().await?;
    let beside = granted_at_once("a lock beside the set", &case.lock_of(&client, "beside")?).await?;
    for (in_the_way, names) in NAMES.into_iter().zip([NAMES, ["c", "a", "b"], ["c", "b", "a"]]) {
        let held = case.lock_of(&other, in_the_way)?;
        let holder = granted_within(PATIENCE, "nothing of the sets before is kept", &held).await?;
        let locks = locks_of(case, &client, names)?;
        let what = format!("`{in_the_way}` of {names:?} is held elsewhere");
        is_taken(&what, locks.each_ref()).await?;
        let rest: Vec<_> = NAMES.into_iter().filter(|name| *name != in_the_way).collect();
        are_free(case, &third, &what, &rest).await?;
        ensure!(
            holder.is_held(),
            "who was in the way of a set has lost `{in_the_way}`"
        );
        holder.release().await?;
    }
    ensure!(beside.is_held(), "sets in vain have ended another hold");
    taken(
        "what the client of sets in vain holds",
        &case.lock_of(&other, "beside")?,
    )
    .await?;

    // One of the locks is another client's, in either place.
    let [mine, theirs] = [
        locks_of(case, &client, ["c", "a", "b"])?,
        locks_of(case, &third, NAMES)?,
    ];
    for is_dropped in [false, true] {
        let set = granted("all of its locks are free", [&mine[0], &theirs[1], &mine[1]]).await?;
        for name in NAMES {
            taken("a lock of a set", &case.lock_of(&other, name)?).await?;
        }
        let (first, common) = (case.lock_of(&other, "0")?, case.lock_of(&other, "b")?);
        is_taken("two sets have a lock in common", [&common, &first]).await?;
        are_free(case, &third, "a set was taken in part", &["0"]).await?;
        if is_dropped {
            drop(set);
        } else {
            set.release().await?;
        }
        are_free(case, &other, "a set was given back", &NAMES).await?;
    }
    taken(
        "what the client of the sets holds",
        &case.lock_of(&other, "beside")?,
    )
    .await?;
    Ok(beside.release().await?)
}

pub(crate) async fn set_tokens_rise(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let mut last = [FencingToken::new(0); 3];
    for round in 0..6 {
        let client = &clients[round % 2];
        let locks = locks_of(case, client, ["b", "c", "a"])?;
        let set = granted("the set before was given back", locks.each_ref()).await?;
        for ((guard, name), last) in set.guards().iter().zip(NAMES).zip(&mut last) {
            ensure!(
                guard.name().as_str() == case.name(name),
                "in the place of `{name}` is {:?}",
                guard.name()
            );
            ensure!(
                guard.token() > *last,
                "`{name}` has {:?} in a set, after {last:?}",
                guard.token()
            );
            *last = guard.token();
        }
        set.release().await?;
        // One of them by itself, in between.
        let at = round % 3;
        let single = case.lock_of(&clients[1 - round % 2], NAMES[at])?;
        let single = granted_within(PATIENCE, "the set was given back", &single).await?;
        ensure!(
            single.token() > last[at],
            "{:?} came after {:?} of a set",
            single.token(),
            last[at]
        );
        last[at] = single.token();
        single.release().await?;
    }
    Ok(())
}

pub(crate) async fn set_is_told_of_a_loss(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let detection = case.detection(client.info());
    let short = |name| case.short_lock_of(&client, name);
    let (a, b, c) = (short("a")?, short("b")?, short("c")?);
    let set = granted("nobody has used its locks", [&c, &a, &b]).await?;
    let lost = set.lost();
    case.break_hold(&client, "b").await?;
    within(detection, "a set is told that one of its locks is lost", lost).await?;
    let check = set.check();
    ensure!(
        check.as_ref().is_err_and(Error::is_lost),
        "expected Lost from the check of a set, got {check:?}"
    );
    let released = set.release().await;
    ensure!(
        released.as_ref().is_err_and(Error::is_lost),
        "expected Lost from the release of a set, got {released:?}"
    );
    are_free(case, &other, "a set that had lost a lock was released", &NAMES).await?;

    // Before it is whole: it waits for the second lock when it loses the first.
    let in_the_way = granted_at_once("all is free", &case.lock_of(&other, "b")?).await?;
    let waiting = {
        let (a, b) = (a.clone(), b.clone());
        tokio::spawn(async move { acquire_all(&[&a, &b], &AcquireOptions::new()).await })
    };
    eventually(PATIENCE, "a set has its first lock", async || {
        Ok(!client.inspect(case.name("a")).await?.is_free())
    })
    .await?;
    case.break_hold(&client, "a").await?;
    let ended = within(detection + PROMPT, "a set ends that loses a lock", waiting)
        .await?
        .map_err(failed)?;
    match ended {
        Err(error) if error.is_lost() => {}
        Err(error) => {
            return Err(failed(format!(
                "expected Lost of a set that waits, got {error:?}"
            )));
        }
        // Where all holds end with one, it may have been granted the second before it was told of the first.
        Ok(set) => {
            within(detection, "nobody else holds its second lock", in_the_way.lost()).await?;
            within(detection, "a set is told afterwards", set.lost()).await?;
        }
    }
    drop(in_the_way);
    are_free(case, &other, "a set that waited has lost a lock", &NAMES).await
}

pub(crate) async fn set_has_each_lock_once(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let (a, b) = (case.lock_of(&client, "a")?, case.lock_of(&client, "b")?);
    for twice in [a.clone(), a.shared(), case.lock_of(&other, "a")?] {
        refuses_twice([&twice, &b, &a]).await?;
    }
    comes_free(Duration::ZERO, "nothing was asked for", &a).await?;
    comes_free(Duration::ZERO, "nothing was asked for", &b).await?;

    // Alike, and not the same.
    let alike = locks_of(case, &client, ["job", "Job", "job "])?;
    granted("their names differ", alike.each_ref())
        .await?
        .release()
        .await?;
    if client.capabilities().permits {
        let permit = case.semaphore_of(&client, "a", 1)?;
        granted("a lock and a semaphore of one name", [&a, &permit])
            .await?
            .release()
            .await?;
    }

    // By an address of the server that is another one, as far as a client can see.
    if let Some((client, _way)) = case.harness.on_a_way().await? {
        let elsewhere = case.lock_of(&client, "a")?;
        if elsewhere.id() == a.id() {
            refuses_twice([&a, &elsewhere]).await?;
        } else {
            is_taken("a lock is there twice", [&a, &elsewhere]).await?;
        }
        are_free(case, &other, "a lock was there twice", &["a"]).await?;
    }
    Ok(())
}

async fn refuses_twice<const N: usize>(locks: [&Lock; N]) -> Outcome {
    for outcome in [
        acquire_all(&locks, &AcquireOptions::new()).await.map(Some),
        try_acquire_all(&locks, &AcquireOptions::new()).await,
    ] {
        ensure!(
            matches!(outcome, Err(Error::InvalidOptions { option: "locks", .. })),
            "expected InvalidOptions of a lock that is there twice, got {outcome:?}"
        );
    }
    Ok(())
}

/// Without an order that all of them keep, each has one of two locks soon, and waits for the other for ever.
pub(crate) async fn sets_in_opposite_orders_never_lock_up(case: &CaseRun) -> Outcome {
    let inside = Arc::new([const { AtomicUsize::new(0) }; 3]);
    let (mut tasks, mut clients) = (JoinSet::new(), Vec::new());
    for index in 0..4 {
        let client = case.client().await?;
        let locks = locks_of(case, &client, NAMES)?;
        clients.push(client);
        let inside = inside.clone();
        tasks.spawn(async move {
            for round in 0..6 {
                let one = (index + round) % 3;
                let other = (one + 1) % 3;
                let mut wanted = [one, other];
                if index % 2 == 1 {
                    wanted.reverse();
                }
                let set = acquire_all(&wanted.map(|name| &locks[name]), &AcquireOptions::new()).await?;
                let beside = wanted.map(|name| inside[name].fetch_add(1, Ordering::SeqCst));
                sleep(Duration::from_millis(1)).await;
                for name in wanted {
                    inside[name].fetch_sub(1, Ordering::SeqCst);
                }
                set.release().await?;
                if beside != [0, 0] {
                    return Ok(Some(wanted.map(|name| NAMES[name])));
                }
            }
            Ok::<_, Error>(None)
        });
    }
    let all = async {
        while let Some(task) = tasks.join_next().await {
            let shared = task.map_err(failed)??;
            ensure!(shared.is_none(), "two had locks of {shared:?} at once");
        }
        Ok::<_, Stop>(())
    };
    within(LOCKED_UP, "24 sets in opposite orders", all).await??;
    for name in NAMES {
        let name = case.name(name);
        is_clean(
            PATIENCE,
            "all sets were released",
            &clients[0],
            &name,
            LockKind::Lock,
        )
        .await?;
    }
    Ok(())
}

pub(crate) async fn set_dropped_midway(case: &CaseRun) -> Outcome {
    const MOST: usize = 512;
    let (client, other) = (case.client().await?, case.client().await?);
    let (ours, theirs) = (locks_of(case, &client, NAMES)?, locks_of(case, &other, NAMES)?);
    let (locks, options) = (ours.each_ref(), AcquireOptions::new());
    let (mut polls, mut completed) = (1, false);
    while !completed {
        ensure!(polls < MOST, "a set of free locks took more than {MOST} polls");
        let set = poll_at_most(polls, acquire_all(&locks, &options))
            .await
            .transpose()?;
        completed = set.is_some();
        drop(set);
        let what = format!("a set of free locks was dropped after poll {polls}");
        granted(&what, theirs.each_ref()).await?.release().await?;
        // The more there were, the less one more of them matters.
        polls += 1 + polls / 8;
    }

    // While it waits for its last lock.
    let holder = granted_within(PATIENCE, "all was given back", &theirs[2]).await?;
    let waited = tokio::time::timeout(IN_VAIN, acquire_all(&locks, &options)).await;
    ensure!(
        waited.is_err(),
        "one of its locks is held elsewhere, and a set ended with {waited:?}"
    );
    are_free(case, &other, "a set that waited was dropped", &["a", "b"]).await?;
    holder.release().await?;
    for name in NAMES {
        let name = case.name(name);
        is_clean(PATIENCE, "all sets were dropped", &client, &name, LockKind::Lock).await?;
    }
    Ok(())
}

/// Which modes there are is for the backend to say, and a set asks no more of it than each of its locks does.
pub(crate) async fn set_members_of_every_mode(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let has = client.capabilities();
    let (ours, theirs) = (locks_of(case, &client, NAMES)?, locks_of(case, &other, NAMES)?);
    if has.shared {
        let one = granted("all is free", [&ours[0], &ours[1].shared()]).await?;
        let two = granted("both share `b`", [&theirs[2], &theirs[1].shared()]).await?;
        let first = case.lock_of(&other, "0")?;
        is_taken("`b` is shared", [&first, &theirs[1]]).await?;
        are_free(case, &client, "a set has a lock that others share", &["0"]).await?;
        two.release().await?;
        one.release().await?;
    } else {
        is_unsupported([&ours[0], &ours[1].shared()]).await?;
    }
    are_free(case, &other, "a set with a lock in shared mode", &NAMES).await?;

    let permits = [&client, &other].map(|client| case.semaphore_of(client, "b", 1));
    match permits {
        [Ok(ours_of_b), Ok(theirs_of_b)] if has.permits => {
            let one = granted("all is free", [&ours[0], &ours_of_b]).await?;
            is_taken("the only permit is held", [&theirs[2], &theirs_of_b]).await?;
            are_free(case, &other, "a set without its permit", &["b", "c"]).await?;
            one.release().await?;
            granted_within(PATIENCE, "the permit was given back", &theirs_of_b)
                .await?
                .release()
                .await?;
        }
        [Ok(permit), Ok(_)] => is_unsupported([&ours[0], &permit]).await?,
        refused => ensure!(
            !has.permits && matches!(refused, [Err(Error::Unsupported { .. }), _]),
            "expected Unsupported of a semaphore, got {refused:?}"
        ),
    }
    are_free(case, &other, "a set with a permit", &NAMES).await
}

async fn is_unsupported<const N: usize>(locks: [&Lock; N]) -> Outcome {
    for outcome in [
        acquire_all(&locks, &AcquireOptions::new()).await.map(Some),
        try_acquire_all(&locks, &AcquireOptions::new()).await,
    ] {
        ensure!(
            matches!(outcome, Err(Error::Unsupported { .. })),
            "expected Unsupported of a set with what the backend lacks, got {outcome:?}"
        );
    }
    Ok(())
}

pub(crate) async fn set_outage_is_never_taken(case: &CaseRun) -> Outcome {
    let Some((behind, way)) = case.harness.on_a_way().await? else {
        return Err(Stop::Skipped("its harness cannot cut a client off".to_owned()));
    };
    let (client, other) = (case.client().await?, case.client().await?);
    let brief = lasting().op_timeout(PROMPT);
    let (near, far) = (
        case.lock_of(&client, "a")?,
        case.lock_of(&behind, "b")?.with_options(brief),
    );
    granted("all is free", [&far, &near]).await?.release().await?;
    way.cut(Outage::Refused);
    let tried = try_acquire_all(&[&far, &near], &AcquireOptions::new()).await;
    ensure!(
        tried
            .as_ref()
            .is_err_and(|error| error.is_transient() && !error.is_timeout()),
        "expected of a try for a set that it cannot tell, since a server is away, got {tried:?}"
    );
    // It may be cut for all of them.
    way.open();
    are_free(case, &other, "a set was not to be had in an outage", &["a"]).await?;
    eventually(
        case.freed_after_death(&behind),
        "the server is back, and a set is granted",
        async || match try_acquire_all(&[&far, &near], &AcquireOptions::new()).await {
            Ok(Some(set)) => {
                set.release().await?;
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) if error.is_transient() => Ok(false),
            Err(error) => Err(error.into()),
        },
    )
    .await
}
