//! Holders in other processes, which exit, die or stop.

use std::path::PathBuf;

use lockkit_core::spi::Mode;

use crate::{
    case_run::{
        CaseRun, MOST_DEATHS, Outcome, PATIENCE, PROMPT, comes_free, ensure, failed, granted_within, taken,
        within,
    },
    helper::{Request, fenced_write},
    history::{Acquisition, History, now},
    stall::Stopwatch,
};

fn exclusive<'a>(case: &CaseRun, name: &'a str) -> Request<'a> {
    Request {
        slot: "g",
        mode: Mode::Exclusive,
        ttl: case.harness.ttl(),
        name,
    }
}

pub(crate) async fn second_process_excludes(case: &CaseRun) -> Outcome {
    let name = case.name("a");
    let lock = case.lock("a").await?;
    let mut helper = case.helper().await?;
    helper.hold(&exclusive(case, &name)).await?;
    taken("while another process holds", &lock).await?;
    let waiting = lock.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    let answer = helper.ask("release g").await?;
    ensure!(
        answer == "released",
        "the other process could not release: {answer}"
    );
    let guard = within(PATIENCE, "the other process released", waiter)
        .await?
        .map_err(failed)??;
    let answer = helper.ask(&format!("try {}", exclusive(case, &name))).await?;
    ensure!(
        answer == "taken",
        "another process tried while this one holds, and was told `{answer}`"
    );
    guard.release().await?;
    helper.hold(&exclusive(case, &name)).await?;
    Ok(())
}

pub(crate) async fn exit_without_release(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let name = case.name("a");
    let mut helper = case.helper().await?;
    let bound = case.freed_after_death_here(&client, &mut helper).await?;
    helper.hold(&exclusive(case, &name)).await?;
    helper.send("exit")?;
    let status = tokio::task::block_in_place(|| helper.process.wait(PATIENCE))?;
    ensure!(
        status.is_some_and(|status| status.success()),
        "the helper did not exit: {status:?}"
    );
    comes_free(
        bound,
        "the holder exited without release",
        &case.lock_of(&client, "a")?,
    )
    .await?;
    Ok(())
}

pub(crate) async fn killed_holder_lets_a_waiter_in(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (name, lock) = (case.name("a"), case.lock_of(&client, "a")?);
    let mut helper = case.helper().await?;
    let bound = case.freed_after_death_here(&client, &mut helper).await?;
    let (dead, _) = helper.hold(&exclusive(case, &name)).await?;
    let waiter = tokio::spawn(async move { lock.acquire().await });
    let blocked = PROMPT / 10;
    tokio::time::sleep(blocked).await;
    ensure!(
        !waiter.is_finished(),
        "a waiter was granted a lock that another process holds"
    );
    tokio::task::block_in_place(|| helper.process.kill())?;
    let killed = Stopwatch::start();
    let guard = within(bound + PATIENCE, "the holder was killed", waiter)
        .await?
        .map_err(failed)??;
    let took = killed.elapsed();
    ensure!(
        took <= bound,
        "the waiter was granted {took:?} after the holder was killed, expected within {bound:?}"
    );
    ensure!(
        guard.token().get() > dead,
        "{:?} came after {dead}",
        guard.token()
    );
    guard.release().await?;
    Ok(())
}

pub(crate) async fn paused_holder_is_told_and_fenced(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (name, lock) = (case.name("a"), case.lock_of(&client, "a")?);
    let resource = Scratch::new(case)?;
    let path = resource.0.display().to_string();
    let mut helper = case.helper().await?;
    helper.hold(&exclusive(case, &name)).await?;
    let answer = helper.ask(&format!("write g {path}")).await?;
    ensure!(answer == "written", "the first holder's write was `{answer}`");
    helper.process.stop()?;
    let bound = case.freed_after_death(&client);
    let guard = granted_within(bound, "the holder was stopped past its lease", &lock).await?;
    ensure!(
        fenced_write(&resource.0, guard.token())?,
        "the second holder's write was refused"
    );
    // Sent while it stands still: the first thing it does when it goes on is to write.
    helper.send(&format!("write g {path}"))?;
    helper.send("check g")?;
    helper.send("lost g")?;
    helper.process.resume()?;
    let (write, check, lost) = (
        helper.reply().await?,
        helper.reply().await?,
        helper.reply().await?,
    );
    ensure!(
        write == "refused",
        "the stale holder's write was `{write}`, expected `refused`"
    );
    ensure!(
        check == "lost",
        "the stale holder's check said `{check}`, expected `lost`"
    );
    ensure!(
        lost == "lost",
        "the stale holder waited for its loss and was told `{lost}`"
    );
    ensure!(
        guard.is_held(),
        "the stale holder's return ended the current hold"
    );
    let released = helper.ask("release g").await?;
    ensure!(
        released.starts_with("error") && released.contains("lost"),
        "releasing a lost guard said `{released}`"
    );
    taken("while the second holder holds", &case.lock("a").await?).await?;
    guard.release().await?;
    Ok(())
}

pub(crate) async fn tokens_survive_crashes(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let (name, lock) = (case.name("a"), case.lock_of(&client, "a")?);
    let mut bound = case.freed_after_death(&client);
    let mut history = History::default();
    for who in 1..=u64::from(MOST_DEATHS) {
        let mut helper = case.helper().await?;
        bound = bound.max(case.freed_after_death_here(&client, &mut helper).await?);
        let mut record = Acquisition::asked(&name, Mode::Exclusive, who, now());
        let (token, at) = helper.hold_after(bound, &exclusive(case, &name)).await?;
        record.granted = Some((at, token));
        record.died = Some(now());
        helper.process.kill()?;
        history.acquisitions.push(record);
    }
    let mut record = Acquisition::asked(&name, Mode::Exclusive, 0, now());
    let guard = granted_within(bound, "the holder was killed", &lock).await?;
    record.granted = Some((now(), guard.token().get()));
    record.released = Some(now());
    guard.release().await?;
    history.acquisitions.push(record);
    let mut limits = case.limits(&client);
    limits.idle = bound + PROMPT;
    let summary = history.check(&limits)?;
    let expected = MOST_DEATHS as usize + 1;
    ensure!(
        summary.granted == expected,
        "expected {expected} grants, got {summary:?}"
    );
    Ok(())
}

/// A file of this run, removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(case: &CaseRun) -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("lockkit-conformance-{:016x}", case.run));
        std::fs::File::create_new(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The one who removed it first did the same.
        let _ = std::fs::remove_file(&self.0);
    }
}
