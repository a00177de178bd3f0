//! The order of waiters, and waiters that die, stop or leave.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::spi::{Claim, Mode, chain};
use lockkit_testbed::{eventually, poll_at_most};
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use crate::fixture::{
    Killed, LIMIT, PATIENCE, TRY, claim, files, granted, held, held_and_waited_for, open, other, permits,
    tickets,
};

/// Starts three other processes that wait, in this order, for the lock of `holder`.
async fn three_wait(dir: &Path, holder: &mut Box<dyn Claim>) -> Vec<Killed> {
    granted(holder).await;
    (0..3).map(|_| other("wait", dir).0).collect()
}

async fn ended(waiter: &mut Killed) {
    eventually("a waiter is granted", async || {
        waiter.0.try_wait().unwrap().is_some()
    })
    .await;
    assert!(waiter.0.wait().unwrap().success());
}

fn is_waiting(waiter: &mut Killed) -> bool {
    waiter.0.try_wait().unwrap().is_none()
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_killed_waiter_blocks_nobody() {
    for killed in 0..3 {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        waiters[killed].0.kill().unwrap();
        waiters[killed].0.wait().unwrap();
        waiters.remove(killed);
        let watch = Stopwatch::start();
        holder.release().await.unwrap();
        for mut waiter in waiters {
            ended(&mut waiter).await;
        }
        let took = watch.elapsed();
        assert!(
            took < Duration::from_millis(1_500),
            "it is not waited for: {took:?}"
        );
        granted(&mut holder).await;
        assert_eq!(tickets(dir.path()), Vec::<PathBuf>::new(), "{killed}");
    }
}

/// Such a file was put there, or is left of a clock that somebody drew numbers from.
#[tokio::test]
async fn a_dead_ticket_with_the_last_number_bars_nobody() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Exclusive).await;
    let mut first = claim(&backend, "n", Mode::Exclusive).await;
    assert!(first.attempt(PATIENCE).await.unwrap().is_none());
    let queue = tickets(dir.path())[0].parent().unwrap().to_owned();
    fs::write(queue.join(format!("{}.x", u64::MAX)), "").unwrap();
    let mut waiter = claim(&backend, "n", Mode::Exclusive).await;
    assert!(waiter.attempt(PATIENCE).await.unwrap().is_none(), "taken");
    first.release().await.unwrap();
    holder.release().await.unwrap();
    granted(&mut waiter).await;
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_is_woken_when_its_predecessor_leaves() {
    let dir = TempDir::new().unwrap();
    let (backend, _holder) = held(dir.path(), Mode::Exclusive).await;
    let mut quickest = LIMIT;
    for _ in 0..5 {
        let mut before = claim(&backend, "n", Mode::Exclusive).await;
        let mut behind = claim(&backend, "n", Mode::Exclusive).await;
        assert_eq!(before.attempt(PATIENCE).await.unwrap(), None);
        assert_eq!(behind.attempt(PATIENCE).await.unwrap(), None);
        let watch = Stopwatch::start();
        before.release().await.unwrap();
        behind.notified().await;
        quickest = quickest.min(watch.elapsed());
        behind.release().await.unwrap();
    }
    // Without an event it looks after a second.
    assert!(quickest < Duration::from_millis(500), "{quickest:?}");
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_stopped_waiter_is_passed_over_after_two_seconds() {
    for stopped in [&[0][..], &[1], &[0, 1]] {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        for stopped in stopped {
            waiters[*stopped].stop();
        }
        let watch = Stopwatch::start();
        holder.release().await.unwrap();
        let mut last = waiters.pop().unwrap();
        ended(&mut last).await;
        let took = watch.elapsed();
        assert!(took < Duration::from_secs(5), "{stopped:?}: {took:?}");
        if stopped.len() == 2 {
            assert!(took > Duration::from_millis(500), "not before: {took:?}");
        }
        // They have lost their turn, and are granted all the same.
        for (at, mut waiter) in waiters.into_iter().enumerate() {
            if stopped.contains(&at) {
                assert!(is_waiting(&mut waiter));
                waiter.signal(Signal::CONT);
            }
            ended(&mut waiter).await;
        }
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_out_of_descriptors_is_passed_over() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Exclusive).await;
    let (mut first, _) = other("wait with a client", dir.path());
    eventually("it waits", async || tickets(dir.path()).len() == 1).await;
    let mut second = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(second.attempt(PATIENCE).await.unwrap(), None);
    let limit = |current| {
        let process = Some(Pid::from_child(&first.0));
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let limit = Rlimit { current, maximum };
        prlimit(process, Resource::Nofile, limit).unwrap().current
    };
    let usual = limit(Some(3));
    let watch = Stopwatch::start();
    holder.release().await.unwrap();
    granted(&mut second).await;
    let took = watch.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    limit(usual);
    second.release().await.unwrap();
    ended(&mut first).await;
}

/// It would name a hold that is over, and nobody else looks for it.
#[tokio::test]
#[cfg(target_os = "linux")]
async fn who_gives_up_without_descriptors_leaves_no_mark() {
    use lockkit_core::{LockKind, spi::Backend as _};

    use crate::fixture::name;

    let dir = TempDir::new().unwrap();
    let (mut holder, _) = other("give up without descriptors", dir.path());
    let backend = open(dir.path()).await;
    let state = backend.inspect(&name("n"), LockKind::Lock).await.unwrap();
    let token = state.holders[0].token;
    let asked = backend.revoke(&name("n"), LockKind::Lock, token).await.unwrap();
    assert!(asked.is_some(), "it holds");
    ended(&mut holder).await;
    let left = files(&dir.path().join("lockkit"));
    let is_mark = |path: &PathBuf| path.extension().is_some_and(|it| it == "revoke");
    assert!(!left.iter().any(is_mark), "{left:?}");
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_stopped_holder_keeps_the_order_of_waiters() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let (mut stopped, _) = other("hold", dir.path());
    let mut first = claim(&backend, "n", Mode::Exclusive).await;
    assert_eq!(first.attempt(PATIENCE).await.unwrap(), None);
    let (mut second, _) = other("wait", dir.path());
    stopped.stop();
    // For longer than a ticket without heartbeats stays live.
    let waited = tokio::time::timeout(Duration::from_secs(5), async {
        loop {
            first.notified().await;
            assert_eq!(first.attempt(PATIENCE).await.unwrap(), None);
        }
    });
    waited.await.unwrap_err();
    stopped.0.kill().unwrap();
    granted(&mut first).await;
    assert!(is_waiting(&mut second));
    first.release().await.unwrap();
    ended(&mut second).await;
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn waiters_that_leave_at_any_time_leave_no_ticket_and_no_gap() {
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("LOCKKIT_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..60 {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mode = [Mode::Exclusive, permits(1), Mode::Shared][round % 3];
        let holds = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let mut holder = claim(&backend, "n", holds).await;
        granted(&mut holder).await;
        let mut waiters = Vec::new();
        for _ in 0..6 {
            let mut waiter = claim(&backend, "n", mode).await;
            poll_at_most(rng.usize(1..8), waiter.attempt(PATIENCE)).await;
            waiters.push(waiter);
        }
        let mut released = rng.bool();
        for _ in 0..rng.usize(1..6) {
            if rng.u8(..3) == 0 && !released {
                holder.release().await.unwrap();
                released = true;
            }
            let mut going = waiters.remove(rng.usize(..waiters.len()));
            match rng.u8(..4) {
                0 => drop(going),
                1 => {
                    poll_at_most(rng.usize(1..4), going.release()).await;
                    going.release().await.unwrap();
                }
                2 => {
                    poll_at_most(rng.usize(1..4), going.notified()).await;
                    drop(going);
                }
                _ => {
                    poll_at_most(rng.usize(1..8), going.attempt(PATIENCE)).await;
                    going.release().await.unwrap();
                }
            }
        }
        holder.release().await.unwrap();
        // The others wait at once.
        let left = waiters.into_iter().map(|mut waiter| async move {
            granted(&mut waiter).await;
            waiter.release().await.unwrap();
        });
        futures_util::future::join_all(left).await;
        let queue = if mode == permits(1) { "semqueue" } else { "queue" };
        let queue = dir.path().join(format!("lockkit/n.{queue}"));
        eventually(&format!("seed {seed}, round {round}: no ticket"), async || {
            files(&queue).is_empty()
        })
        .await;
    }
}

#[tokio::test]
async fn tickets_that_were_left_behind_are_removed() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let queue = dir.path().join("lockkit/n.queue");
    for mode in [Mode::Exclusive, Mode::Shared] {
        for patience in [PATIENCE, TRY] {
            fs::create_dir_all(&queue).unwrap();
            let hex = "0".repeat(32);
            for number in [1_u64, 7, u64::MAX - 1] {
                fs::write(queue.join(format!("{number:020}.{hex}")), "").unwrap();
            }
            fs::write(queue.join("notes"), "").unwrap();
            let mut claim = claim(&backend, "n", mode).await;
            let granted = claim.attempt(patience).await.unwrap();
            assert!(granted.is_some(), "{mode:?} {patience:?}");
            claim.release().await.unwrap();
            if patience == PATIENCE || mode == Mode::Shared {
                assert_eq!(tickets(dir.path()), [queue.join("notes")]);
            }
        }
    }
    fs::remove_dir_all(&queue).unwrap();
    symlink("/", &queue).unwrap();
    let mut refused = claim(&backend, "n", Mode::Exclusive).await;
    let error = refused.attempt(PATIENCE).await.unwrap_err();
    assert!(chain(&error).contains("n.queue"), "{}", chain(&error));
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_removed_queue_is_joined_again() {
    for moved in [false, true] {
        let dir = TempDir::new().unwrap();
        let backend = open(dir.path()).await;
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        let mut waiters = three_wait(dir.path(), &mut holder).await;
        let queue = dir.path().join("lockkit/n.queue");
        if moved {
            fs::rename(&queue, dir.path().join("moved")).unwrap();
        } else {
            // Whoever has lost a ticket may have made another before all are removed.
            eventually("it is removed", async || match fs::remove_dir_all(&queue) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => false,
                removed => removed.map(|()| true).unwrap(),
            })
            .await;
        }
        eventually("all have joined", async || tickets(dir.path()).len() == 3).await;
        holder.release().await.unwrap();
        for waiter in &mut waiters {
            ended(waiter).await;
        }
    }
}

#[tokio::test]
async fn a_waiting_writer_stops_new_readers_until_it_is_gone() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut inside = claim(&a, "n", Mode::Shared).await;
    granted(&mut inside).await;
    let mut beside = claim(&b, "n", Mode::Shared).await;
    granted(&mut beside).await;

    let mut writer = claim(&a, "n", Mode::Exclusive).await;
    assert_eq!(writer.attempt(TRY).await.unwrap(), None);
    let mut reader = claim(&b, "n", Mode::Shared).await;
    assert!(
        reader.attempt(TRY).await.unwrap().is_some(),
        "a mere try stops nobody"
    );
    reader.release().await.unwrap();

    assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
    assert_eq!(reader.attempt(TRY).await.unwrap(), None, "stopped");
    assert_eq!(reader.attempt(PATIENCE).await.unwrap(), None, "stopped");
    writer.release().await.unwrap();
    granted(&mut reader).await;

    assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
    let mut late = claim(&b, "n", Mode::Shared).await;
    assert_eq!(late.attempt(PATIENCE).await.unwrap(), None, "stopped again");
    for mut holder in [inside, beside, reader] {
        assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
        holder.release().await.unwrap();
    }
    granted(&mut writer).await;
    assert_eq!(late.attempt(PATIENCE).await.unwrap(), None, "the writer is in");
    writer.release().await.unwrap();
    granted(&mut late).await;
}

#[tokio::test]
async fn a_stopped_writer_keeps_no_reader_from_a_free_lock() {
    let dir = TempDir::new().unwrap();
    let (backend, [mut inside, _stopped]) = held_and_waited_for(dir.path(), Mode::Shared).await;
    inside.release().await.unwrap();
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    eventually("the reader gets past", async || {
        reader.attempt(PATIENCE).await.unwrap().is_some()
    })
    .await;
}

#[tokio::test]
async fn a_stopped_writer_keeps_no_reader_out_of_a_shared_lock() {
    let dir = TempDir::new().unwrap();
    let (backend, mut inside) = held(dir.path(), Mode::Shared).await;
    let (writer, _) = other("wait", dir.path());
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    assert_eq!(reader.attempt(TRY).await.unwrap(), None, "it waits");
    writer.stop();
    // A waiter, with no event to wake it.
    granted(&mut reader).await;
    reader.release().await.unwrap();
    // Tries, with a reader inside and without.
    assert!(reader.attempt(TRY).await.unwrap().is_some());
    reader.release().await.unwrap();
    inside.release().await.unwrap();
    assert!(reader.attempt(TRY).await.unwrap().is_some());
    // Continued, it is in the queue again.
    writer.signal(Signal::CONT);
    let mut late = claim(&backend, "n", Mode::Shared).await;
    eventually("readers stay out", async || {
        late.release().await.unwrap();
        late.attempt(TRY).await.unwrap().is_none()
    })
    .await;
    reader.release().await.unwrap();
    let mut writer = writer;
    writer.0.wait().unwrap();
}

#[tokio::test]
async fn a_stopped_writer_leaves_its_turn_to_the_next() {
    let dir = TempDir::new().unwrap();
    let (backend, mut inside) = held(dir.path(), Mode::Shared).await;
    let (stopped, _) = other("wait", dir.path());
    stopped.stop();
    let mut next = claim(&backend, "n", Mode::Shared).await;
    granted(&mut next).await;
    let (mut writer, _) = other("wait", dir.path());
    // There is always a reader inside, as long as new ones get in.
    eventually("the writer gets in", async || {
        if next.attempt(TRY).await.unwrap().is_some() {
            std::mem::swap(&mut inside, &mut next);
            next.release().await.unwrap();
            false
        } else {
            inside.release().await.unwrap();
            writer.0.wait().unwrap().success()
        }
    })
    .await;
}

#[tokio::test]
async fn setting_the_clock_costs_a_turn_until_the_next_heartbeat() {
    let dir = TempDir::new().unwrap();
    let (backend, _inside) = held(dir.path(), Mode::Shared).await;
    let mut writer = claim(&backend, "n", Mode::Exclusive).await;
    let mut reader = claim(&backend, "n", Mode::Shared).await;
    let hour = Duration::from_secs(3_600);
    for set in [SystemTime::now() - hour, SystemTime::now() + hour] {
        assert_eq!(writer.attempt(PATIENCE).await.unwrap(), None);
        assert_eq!(reader.attempt(TRY).await.unwrap(), None);
        let ticket = fs::File::open(tickets(dir.path()).remove(0)).unwrap();
        ticket.set_modified(set).unwrap();
        assert!(reader.attempt(TRY).await.unwrap().is_some(), "{set:?}");
        reader.release().await.unwrap();
        // Its next heartbeat needs no event.
        tokio::time::timeout(LIMIT, writer.notified()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_readers_nor_writers_starve() {
    let dir = TempDir::new().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (readers_in, writer_in) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut rounds = Vec::new();
    let mut tasks = Vec::new();
    for mode in [Mode::Exclusive, Mode::Exclusive, Mode::Shared, Mode::Shared] {
        let backend = open(dir.path()).await;
        let done = Arc::new(AtomicUsize::new(0));
        rounds.push(Arc::clone(&done));
        let (stop, readers_in, writer_in) = (stop.clone(), readers_in.clone(), writer_in.clone());
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let mut claim = claim(&backend, "n", mode).await;
                granted(&mut claim).await;
                if mode == Mode::Exclusive {
                    assert!(!writer_in.swap(true, Ordering::SeqCst), "two writers");
                    assert_eq!(readers_in.load(Ordering::SeqCst), 0, "a writer among readers");
                    tokio::task::yield_now().await;
                    writer_in.store(false, Ordering::SeqCst);
                } else {
                    readers_in.fetch_add(1, Ordering::SeqCst);
                    assert!(!writer_in.load(Ordering::SeqCst), "a reader beside a writer");
                    tokio::task::yield_now().await;
                    readers_in.fetch_sub(1, Ordering::SeqCst);
                }
                claim.release().await.unwrap();
                done.fetch_add(1, Ordering::SeqCst);
            }
        }));
    }
    eventually("each got in ten times", async || {
        rounds.iter().all(|done| done.load(Ordering::SeqCst) >= 10)
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
}
