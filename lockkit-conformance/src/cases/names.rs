//! Names, and what must not be named.

use std::time::Duration;

use lockkit_core::{Error, LockName, spi::chain};

use crate::{
    Harness,
    case_run::{CaseRun, Outcome, Stop, ensure, failed, granted_at_once, lasting, taken},
    traces::Traces,
};

pub(crate) async fn byte_exact_and_injective(case: &CaseRun) -> Outcome {
    let (mine, theirs) = (case.client().await?, case.client().await?);
    let odd = [
        "/",
        "\0",
        "{}",
        "{a}",
        "\n",
        "*",
        "%",
        "%2F",
        "%00",
        ".",
        "..",
        "../x",
        "a/b",
        "a/",
        "/a",
        "a",
        "A",
        " ",
        "a ",
        "\\",
        ":",
        "::",
        "#",
        "lockkit#a",
        "zookeeper",
        "é",
        "e\u{301}",
        "É",
        "🔒",
        "'",
        "\"",
        "; --",
        "?x=1",
        "CON",
        "-rf",
        "~",
    ];
    let prefix = case.name("");
    let mut names: Vec<String> = odd.iter().map(|odd| format!("{prefix}{odd}")).collect();
    let longest = "x".repeat(LockName::MAX_BYTES - prefix.len() - 1);
    names.extend(["1", "2"].map(|end| format!("{prefix}{longest}{end}")));
    names.push(format!("{prefix}{longest}"));
    // Bare ones too, which are not this run's own: held for an instant, and not if another run has them just now.
    let bare = [".", "..", "/", "\0", "*", "🔒"];
    let mut guards = Vec::new();
    for name in &names {
        let lock = mine.lock(name)?.with_options(lasting());
        guards.push(granted_at_once(&format!("{name:?}, while names alike are held"), &lock).await?);
    }
    for (name, guard) in names.iter().zip(&guards) {
        let lock = theirs.lock(name)?.with_options(lasting());
        taken(&format!("{name:?}, held by another client"), &lock).await?;
        let state = theirs.inspect(name).await?;
        let tokens: Vec<_> = state.holders.iter().map(|holder| holder.token).collect();
        ensure!(
            tokens == [guard.token()],
            "{name:?} is held with {:?}, but shown is {state:?}",
            guard.token()
        );
    }
    for guard in guards {
        guard.release().await?;
    }
    for name in bare {
        if let Some(guard) = mine.lock(name)?.with_options(lasting()).try_acquire().await? {
            taken(&format!("{name:?}, held by another client"), &theirs.lock(name)?).await?;
            guard.release().await?;
        }
    }
    Ok(())
}

pub(crate) async fn bad_names_are_refused(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    for name in [
        String::new(),
        "x".repeat(LockName::MAX_BYTES + 1),
        "é".repeat(LockName::MAX_BYTES / 2 + 1),
    ] {
        let answers = [
            client.lock(&name).map(drop),
            client.semaphore(&name, 2).map(drop),
            client.inspect(&name).await.map(drop),
        ];
        for answer in answers {
            let bytes = name.len();
            ensure!(
                matches!(answer, Err(Error::InvalidName { .. })),
                "expected InvalidName for a name of {bytes} bytes, got {answer:?}"
            );
        }
    }
    Ok(())
}

pub(crate) async fn secrets_stay_secret(case: &CaseRun) -> Outcome {
    let Some(secret) = case.harness.secret() else {
        return Ok(());
    };
    ensure!(
        !secret.is_empty(),
        "the harness's secret is empty, which is found anywhere"
    );
    let shown = all_that_is_shown(case, case.name("a")).await?;
    let leak = shown.iter().find(|text| text.contains(&secret));
    match leak.map(|text| text.replace(&secret, "<secret>")) {
        Some(leak) => Err(failed(format!("the secret shows in: {leak}")).whatever_the_machine_did()),
        None => Ok(()),
    }
}

pub(crate) async fn names_forge_no_line(case: &CaseRun) -> Outcome {
    let name = case.name("a\n\r\u{1b}[31m\u{2028}forged");
    let shown = all_that_is_shown(case, name).await?;
    let traced = shown.last().is_some_and(|traces| traces.contains("forged"));
    ensure!(traced, "a vacuous pass: no trace names the lock");
    // Without a line end itself: what is shown may have several lines of its own.
    let raw = ['\r', '\u{1b}', '\u{2028}'];
    let forged = shown
        .iter()
        .flat_map(|text| text.lines())
        .find(|line| line.contains(raw));
    match forged {
        Some(line) => {
            Err(failed(format!("the lock's name shows unescaped in {line:?}")).whatever_the_machine_did())
        }
        None => Ok(()),
    }
}

/// Collects everything that a program that uses the backend may print or trace.
async fn all_that_is_shown(case: &CaseRun, name: String) -> Result<Vec<String>, Stop> {
    const MARK: &str = "whatever is traced is seen";
    let traces = Traces::default();
    let (harness, capture) = (case.harness.clone(), traces.clone());
    // A runtime of one thread, since traces are captured thread by thread.
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        // With one subscriber alone, `tracing` has whichever thread comes to a trace first decide whether it is captured.
        let _second = tracing::Dispatch::new(Traces::default());
        tracing::subscriber::with_default(capture, || {
            tracing::trace!("{MARK}");
            runtime.block_on(whatever_is_shown(&*harness, &name))
        })
    });
    let joined = tokio::task::spawn_blocking(move || thread.join())
        .await
        .map_err(failed)?;
    let mut shown = joined.map_err(|_| failed("showing everything panicked"))??;
    ensure!(
        traces.text().contains(MARK),
        "a vacuous pass: traces are not captured"
    );
    shown.push(traces.text());
    Ok(shown)
}

/// Collects everything that a program that uses the backend may print.
async fn whatever_is_shown(harness: &dyn Harness, name: &str) -> Result<Vec<String>, Stop> {
    let client = harness.client().await?;
    let lock = client.lock(name)?.with_options(lasting());
    let guard = granted_at_once("a lock nobody has used", &lock).await?;
    let Err(timeout) = lock.acquire_timeout(Duration::from_millis(5)).await else {
        return Err(failed("expected a time-out on a lock that is held"));
    };
    let mut shown = vec![
        format!("{client:?} {client:#?} {:?}", client.info()),
        format!("{lock:?} {lock:#?} {} {:?}", lock.id(), lock.id()),
        format!("{guard:?} {guard:#?} {:?}", guard.view()),
        format!("{timeout:?} {}", chain(&timeout)),
        format!("{:?}", client.inspect(name).await?),
    ];
    guard.release().await?;
    client.close(Duration::from_secs(5)).await?;
    if let Err(closed) = lock.acquire().await {
        shown.push(format!("{closed:?} {}", chain(&closed)));
    }
    Ok(shown)
}
