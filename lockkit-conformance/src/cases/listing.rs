//! Lists of what is held.

use std::{
    collections::BTreeMap,
    pin::pin,
    time::{Duration, SystemTime},
};

use futures_util::future::{Either, select};
use lockkit_core::{Error, ListedLock, LockClient, LockGuard, LockKind, LockName, LockState};

use crate::case_run::{
    CaseRun, Outcome, PATIENCE, Stop, ensure, eventually, failed, granted_at_once, lasting,
};

/// Returns what is listed, by kind and name. Each has to be listed once and held by somebody, and its name has the prefix.
async fn listed(client: &LockClient, prefix: &str) -> Result<BTreeMap<(LockKind, String), LockState>, Stop> {
    let mut found = BTreeMap::new();
    let mut list = client.list(prefix)?;
    while let Some(lock) = list.next().await {
        let ListedLock {
            name, kind, state, ..
        } = lock?;
        ensure!(!state.is_free(), "{name:?} is listed and held by nobody");
        ensure!(
            name.as_str().starts_with(prefix),
            "{name:?} is listed under the prefix {prefix:?}"
        );
        let before = found.insert((kind, name.as_str().to_owned()), state);
        ensure!(before.is_none(), "{name:?} is listed twice: {before:?}");
    }
    ensure!(list.next().await.is_none(), "a list goes on after its end");
    Ok(found)
}

/// The names of the locks that are listed.
async fn names(client: &LockClient, prefix: &str) -> Result<Vec<String>, Stop> {
    let found = listed(client, prefix).await?;
    Ok(found.into_keys().map(|(_, name)| name).collect())
}

pub(crate) async fn held_locks_are_listed(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let capabilities = mine.capabilities();
    let prefix = case.name("");
    let began = SystemTime::now();
    ensure!(listed(&mine, &prefix).await?.is_empty(), "nothing is held yet");

    let label = "billing@host-7";
    let labelled = case.lock_of(&mine, "a")?.with_options(lasting().label(label));
    let labelled = granted_at_once("a lock nobody has used", &labelled).await?;
    let waited_for = granted_at_once("a lock nobody has used", &case.lock_of(&mine, "b")?).await?;
    let released = granted_at_once("a lock nobody has used", &case.lock_of(&mine, "c")?).await?;
    released.release().await?;
    let mut guards: BTreeMap<(LockKind, &str), Vec<LockGuard>> = BTreeMap::new();
    guards.insert((LockKind::Lock, "a"), vec![labelled]);
    guards.insert((LockKind::Lock, "b"), vec![waited_for]);
    if capabilities.shared {
        let readers = guards.entry((LockKind::Lock, "d")).or_default();
        for client in [&mine, &theirs] {
            let shared = case.lock_of(client, "d")?.shared();
            readers.push(granted_at_once("a lock that readers have", &shared).await?);
        }
    }
    if capabilities.permits {
        let holders = guards.entry((LockKind::Semaphore, "a")).or_default();
        for client in [&mine, &theirs] {
            let permit = case.semaphore_of(client, "a", 3)?;
            holders.push(granted_at_once("a semaphore with a permit left", &permit).await?);
        }
    }

    let contended = case.lock_of(&theirs, "b")?;
    let is_counted = async {
        for client in [&mine, &theirs] {
            eventually(PATIENCE, "the waiter is counted", async || {
                let found = listed(client, &prefix).await?;
                let state = found.get(&(LockKind::Lock, case.name("b")));
                Ok(state.is_some_and(|state| state.waiters.is_none_or(|waiters| waiters == 1)))
            })
            .await?;
            let found = listed(client, &prefix).await?;
            compare(case, &guards, &found, began, capabilities.lease)?;
            let state = &found[&(LockKind::Lock, case.name("a"))];
            ensure!(
                state.holders[0].label.as_deref() == Some(label),
                "the label is missing: {state:?}"
            );
            ensure!(state.waiters.unwrap_or(0) == 0, "nobody waits: {state:?}");
        }
        Ok::<(), Stop>(())
    };
    match select(pin!(contended.acquire()), pin!(is_counted)).await {
        Either::Left((granted, _)) => {
            return Err(failed(format!(
                "the waiter was granted what is held: {granted:?}"
            )));
        }
        Either::Right((counted, _)) => counted?,
    }

    for guard in guards.into_values().flatten() {
        guard.release().await?;
    }
    eventually(PATIENCE, "what was released is not listed", async || {
        Ok(listed(&theirs, &prefix).await?.is_empty())
    })
    .await?;

    let mut unfinished = mine.list(&prefix)?;
    mine.close(PATIENCE).await?;
    ensure!(
        matches!(mine.list(&prefix), Err(Error::Closed)),
        "a closed client lists"
    );
    let next = unfinished.next().await;
    ensure!(
        matches!(next, Some(Err(Error::Closed))),
        "expected Closed from a list of a closed client, got {next:?}"
    );
    ensure!(unfinished.next().await.is_none(), "a list goes on after an error");
    Ok(())
}

fn compare(
    case: &CaseRun,
    guards: &BTreeMap<(LockKind, &str), Vec<LockGuard>>,
    found: &BTreeMap<(LockKind, String), LockState>,
    began: SystemTime,
    has_lease: bool,
) -> Outcome {
    // Far more than the clocks of the machines are apart.
    const CLOCKS: Duration = Duration::from_secs(3_600);

    let expected: BTreeMap<_, Vec<_>> = guards
        .iter()
        .map(|((kind, part), guards)| {
            let mut tokens: Vec<_> = guards.iter().map(LockGuard::token).collect();
            tokens.sort_unstable();
            ((*kind, case.name(part)), tokens)
        })
        .collect();
    let shown: BTreeMap<_, Vec<_>> = found
        .iter()
        .map(|(id, state)| {
            let mut tokens: Vec<_> = state.holders.iter().map(|holder| holder.token).collect();
            tokens.sort_unstable();
            (id.clone(), tokens)
        })
        .collect();
    ensure!(shown == expected, "held are {expected:?}, listed are {shown:?}");
    for holder in found.values().flat_map(|state| &state.holders) {
        ensure!(
            holder.left.is_some() == has_lease && holder.left.is_none_or(|left| Some(left) <= lasting().ttl),
            "lease is {has_lease}, but listed is {holder:?}"
        );
        let is_plausible = |since: SystemTime| since + CLOCKS > began && since < SystemTime::now() + CLOCKS;
        ensure!(
            holder.since.is_none_or(is_plausible),
            "granted after {began:?}, but listed is {holder:?}"
        );
    }
    Ok(())
}

pub(crate) async fn list_prefix_is_literal(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let odd = [
        "*", "**", "?", "[a-z]", "[", "]", "^a", "%", "%%", "%61", "_", "\\", "\\*", "a", "ab", "aB", "a*",
        "a%b", "a_b", "a\\", "a/b", ".", "..", "é", "🔒", "\n", "'", "{a}", "#a",
    ];
    let prefix = case.name("");
    let mut held: Vec<String> = odd.iter().map(|odd| format!("{prefix}{odd}")).collect();
    // Where a name is too long for the server, it may be kept as a hash.
    let long = "l".repeat(LockName::MAX_BYTES - prefix.len() - 1);
    held.extend(["1", "2"].map(|end| format!("{prefix}{long}{end}")));
    let mut guards = Vec::new();
    for name in &held {
        let lock = mine.lock(name)?.with_options(lasting());
        guards.push(granted_at_once(&format!("{name:?}, while names alike are held"), &lock).await?);
    }
    let middle = "l".repeat(400);
    let prefixes = odd
        .iter()
        .copied()
        .chain(["", "l", "z", "a?", "[a", "a%c", &long, &middle]);
    for prefix in prefixes.map(|odd| format!("{prefix}{odd}")).chain(held.clone()) {
        let mut expected: Vec<_> = held
            .iter()
            .filter(|name| name.starts_with(&prefix))
            .cloned()
            .collect();
        expected.sort();
        let shown = names(&theirs, &prefix).await?;
        ensure!(
            shown == expected,
            "{} names begin with {prefix:?}, but listed are {shown:?}",
            expected.len()
        );
    }
    for guard in guards {
        guard.release().await?;
    }
    for prefix in [
        "x".repeat(LockName::MAX_BYTES + 1),
        "é".repeat(LockName::MAX_BYTES / 2 + 1),
    ] {
        let answer = mine.list(&prefix).map(drop);
        ensure!(
            matches!(answer, Err(Error::InvalidName { .. })),
            "expected InvalidName for a prefix of {} bytes, got {answer:?}",
            prefix.len()
        );
    }
    Ok(())
}

/// More than a page of any backend.
const HELD: usize = 40;

pub(crate) async fn lists_refuse_nobody(case: &CaseRun) -> Outcome {
    const LISTS: usize = 5;
    const TRIES: usize = 100;

    let (holder, observer, passer) = (case.client().await?, case.client().await?, case.client().await?);
    let prefix = case.name("");
    let mut held = Vec::new();
    let mut guards = Vec::new();
    for index in 0..HELD {
        let part = format!("held/{index}");
        guards.push(granted_at_once("a lock nobody has used", &case.lock_of(&holder, &part)?).await?);
        held.push(case.name(&part));
    }
    let lists = async {
        for _ in 0..LISTS {
            let shown = names(&observer, &prefix).await?;
            for name in &held {
                ensure!(
                    shown.contains(name),
                    "{name} is held throughout, but listed are {shown:?}"
                );
            }
        }
        Ok::<(), Stop>(())
    };
    let free = case.lock_of(&passer, "free")?;
    let tries = async {
        for _ in 0..TRIES {
            let guard =
                granted_at_once("a lock that nobody else wants, while locks are listed", &free).await?;
            guard.release().await?;
        }
        Ok::<(), Stop>(())
    };
    futures_util::future::try_join(lists, tries).await?;
    for guard in guards {
        ensure!(guard.is_held(), "a list ended a hold: {:?}", guard.check());
        guard.release().await?;
    }
    Ok(())
}

pub(crate) async fn list_is_unsupported(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let answer = client.list(case.name(""));
    ensure!(
        matches!(answer, Err(Error::Unsupported { .. })),
        "expected Unsupported, got {answer:?}"
    );
    Ok(())
}
