//! Every interleaving of the driver's own state: `RUSTFLAGS="--cfg lockkit_loom" cargo test -p lockkit-core --lib loom`.
//!
//! Loom sees what is behind `crate::sync::Mutex`. It does not see into Tokio's primitives, which are not used here.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use loom::{future::block_on, thread};
use tokio::time::Instant;

use crate::{
    LockClient, LossReason, MemoryBackend,
    driver::{
        cell::{Event, HoldCell, Phase},
        hold::Hold,
        keep_alive::KeepAlive,
        lock_queue::{LockQueue, WaitOutcome},
        moment::{Clock, Moment},
        request::AcquireRequest,
        slot_queue::{Offer, SlotQueue, Turn},
    },
    spi::{Lease, Mode},
    sync::Mutex,
};

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn now() -> Moment {
    Moment::plain(Instant::now())
}

fn cell(phase: Phase) -> Arc<HoldCell<&'static str>> {
    Arc::new(HoldCell::new(
        phase,
        "claim",
        Some(Moment::plain(Instant::now() + Duration::from_secs(3_600))),
        None,
    ))
}

/// Looks after a hold as the worker does, without its renewals.
async fn look_after(cell: Arc<HoldCell<&'static str>>) {
    loop {
        let version = cell.version();
        let Some(loan) = cell.lend_to_worker().await else {
            return;
        };
        std::future::poll_fn(|cx| cell.poll_changed(version, cx)).await;
        drop(loan);
    }
}

#[test]
fn loom_a_hold_is_released_or_lost_and_its_watchers_know() {
    explore(|| {
        let cell = cell(Phase::Held);
        let wakes = Arc::new(Counter::default());
        let mut watcher = None;
        cell.watch(&mut watcher, &Waker::from(wakes.clone()), Event::Loss);
        let ends = Arc::new(Counter::default());
        cell.watch(&mut None, &Waker::from(ends.clone()), Event::End);
        let loser = thread::spawn({
            let cell = cell.clone();
            move || cell.lose(LossReason::Revoked)
        });
        let released = cell.begin_release(now());
        let lost = loser.join().unwrap();
        match released {
            Ok(claim) => {
                assert!(!lost, "a released hold cannot be lost any more");
                assert_eq!(claim, Some("claim"));
                assert_eq!(wakes.0.load(Ordering::SeqCst), 0, "never for a normal release");
                assert_eq!(cell.last_phase(), Phase::Releasing);
            }
            Err(reason) => {
                assert!(lost && reason == LossReason::Revoked);
                assert_eq!(wakes.0.load(Ordering::SeqCst), 1, "told once");
                assert_eq!(cell.last_phase(), Phase::Lost(LossReason::Revoked));
            }
        }
        assert_eq!(ends.0.load(Ordering::SeqCst), 1, "either is an end");
    });
}

#[test]
fn loom_a_loss_is_never_missed_by_a_new_watcher() {
    explore(|| {
        let cell = cell(Phase::Held);
        let loser = thread::spawn({
            let cell = cell.clone();
            move || cell.lose(LossReason::Expired)
        });
        let mut watcher = None;
        let reason = block_on(std::future::poll_fn(|cx| {
            cell.watch(&mut watcher, cx.waker(), Event::Loss);
            match cell.last_phase() {
                Phase::Lost(reason) => Poll::Ready(reason),
                _ => Poll::Pending,
            }
        }));
        assert_eq!(reason, LossReason::Expired);
        assert!(loser.join().unwrap());
    });
}

#[test]
fn loom_an_end_is_never_missed_by_a_new_watcher() {
    explore(|| {
        let cell = cell(Phase::Held);
        let releaser = thread::spawn({
            let cell = cell.clone();
            move || cell.begin_release(now()).is_ok()
        });
        let mut watcher = None;
        block_on(std::future::poll_fn(|cx| {
            cell.watch(&mut watcher, cx.waker(), Event::End);
            match cell.last_phase() {
                Phase::Releasing => Poll::Ready(()),
                _ => Poll::Pending,
            }
        }));
        assert!(releaser.join().unwrap());
    });
}

/// The worker looks at the clock, and meanwhile the reply comes that a renewal by hand waits for.
#[test]
fn loom_a_renewal_that_comes_at_last_is_not_overdue() {
    explore(|| {
        let cell = cell(Phase::Held);
        let end = cell.valid_until().unwrap();
        let renewal = thread::spawn({
            let cell = cell.clone();
            move || cell.extend(Some(end.later(Duration::from_secs(1))), now())
        });
        cell.renewal_overdue(end);
        assert!(renewal.join().unwrap());
        assert_eq!(cell.renewal_failing(now()), None);
    });
}

#[test]
fn loom_a_release_gets_the_claim_back_from_the_worker() {
    explore(|| {
        let cell = cell(Phase::Held);
        let worker = thread::spawn({
            let cell = cell.clone();
            move || block_on(look_after(cell))
        });
        let claim = match cell.begin_release(now()) {
            Ok(Some(claim)) => Some(claim),
            Ok(None) => block_on(cell.reclaim()).keep(),
            Err(reason) => panic!("lost: {reason}"),
        };
        assert_eq!(claim, Some("claim"));
        cell.dismiss_worker();
        worker.join().unwrap();
    });
}

#[test]
fn loom_a_release_stops_the_keep_alive_or_waits_for_it() {
    explore(|| {
        let cell = cell(Phase::Held);
        let keep_alive = Arc::new(KeepAlive::default());
        keep_alive.start(look_after(cell.clone()));
        let worker = thread::spawn({
            let keep_alive = keep_alive.clone();
            move || block_on(std::future::poll_fn(|cx| keep_alive.poll(cx)))
        });
        let recalled = match cell.begin_release(now()) {
            Ok(Some(claim)) => Some(claim),
            Ok(None) => {
                keep_alive.stop();
                cell.take()
            }
            Err(reason) => panic!("lost: {reason}"),
        };
        let claim = recalled.or_else(|| block_on(cell.reclaim()).keep());
        assert_eq!(claim, Some("claim"));
        cell.dismiss_worker();
        worker.join().unwrap();
    });
}

#[test]
fn loom_a_renewal_by_hand_and_the_worker_take_turns() {
    explore(|| {
        let cell = cell(Phase::Held);
        let worker = thread::spawn({
            let cell = cell.clone();
            move || {
                block_on(async {
                    let version = cell.version();
                    if let Some(loan) = cell.lend_to_worker().await {
                        std::future::poll_fn(|cx| cell.poll_changed(version, cx)).await;
                        drop(loan);
                    }
                });
            }
        });
        let loan = block_on(cell.reclaim());
        assert!(loan.is_some());
        drop(loan);
        let _ = cell.begin_release(now());
        cell.dismiss_worker();
        worker.join().unwrap();
    });
}

fn queue() -> Arc<LockQueue> {
    let client = LockClient::new(MemoryBackend::new());
    client.lock("name").unwrap().queue().clone()
}

fn request() -> Arc<AcquireRequest> {
    Arc::new(AcquireRequest {
        queue: queue(),
        ttl: Duration::from_secs(30),
        wait: None,
        renew: true,
        max_hold: None,
        hold_at_least: None,
        op_timeout: Duration::from_secs(5),
        label: None,
        local_handoffs: 0,
        adopt_after: Duration::from_millis(5),
    })
}

/// Takes the slot, waiting for it if need be.
async fn take_slot(request: &Arc<AcquireRequest>) {
    let contender = match LockQueue::enter_or_join(request) {
        Ok(contender) => contender,
        Err(waiter) => match waiter.await {
            WaitOutcome::Slot(contender) => contender,
            other => panic!("{other:?}"),
        },
    };
    drop(contender);
}

#[test]
fn loom_the_slot_is_never_forgotten() {
    explore(|| {
        let request = request();
        assert_eq!(request.queue.mode, Mode::Exclusive);
        let other = thread::spawn({
            let request = request.clone();
            move || block_on(take_slot(&request))
        });
        block_on(take_slot(&request));
        other.join().unwrap();
        assert!(LockQueue::enter(&request).is_some(), "free again");
    });
}

#[test]
fn loom_a_close_sees_a_contender_that_goes_on() {
    explore(|| {
        let request = request();
        // In this order, since loom does not see the flag of the client: only a thread that is yet to run can set it late.
        let closer = thread::spawn({
            let queue = request.queue.clone();
            move || {
                queue.core.begin_close();
                queue.is_idle()
            }
        });
        let contender = LockQueue::enter(&request);
        let goes_on = contender.is_some() && !request.queue.core.is_closed();
        let is_idle = closer.join().unwrap();
        assert!(!(goes_on && is_idle), "it was not waited for");
        drop(contender);
        assert!(request.queue.is_idle(), "and is forgotten");
    });
}

#[test]
fn loom_the_worker_is_told_of_every_hold() {
    explore(|| {
        let request = request();
        let begun = Instant::now();
        let other = thread::spawn({
            let request = request.clone();
            move || hold(&request, begun)
        });
        let mine = hold(&request, begun);
        let adopted = request.queue.adopt(begun + request.adopt_after);
        let others = other.join().unwrap();
        let later = request.queue.adopt(begun + request.adopt_after);
        assert_eq!(adopted.len() + later.len(), 2, "each is adopted once");
        request.queue.unregister(&mine);
        request.queue.unregister(&others);
        request.queue.unregister(&mine);
        assert!(request.queue.is_idle() && request.queue.holds().is_empty());
    });
}

/// Makes a hold of the queue, in its register.
fn hold(request: &Arc<AcquireRequest>, now: Instant) -> Hold {
    let mut contender = LockQueue::bypass(request);
    contender.becomes_hold();
    let lease = Clock::new(true).proof(&Lease {
        since: now,
        length: Some(request.ttl),
    });
    let hold = Hold::new(Phase::Held, request.clone(), 1, contender, &lease);
    request.queue.register(&hold, now);
    hold
}

#[test]
fn loom_a_waiter_that_gives_up_passes_on_what_it_was_offered() {
    explore(|| {
        let request = request();
        let first = LockQueue::enter(&request).unwrap();
        let fickle = thread::spawn({
            let request = request.clone();
            move || {
                if let Err(mut waiter) = LockQueue::enter_or_join(&request) {
                    let mut cx = Context::from_waker(Waker::noop());
                    drop(pin!(&mut waiter).poll(&mut cx));
                }
            }
        });
        let patient = thread::spawn({
            let request = request.clone();
            move || block_on(take_slot(&request))
        });
        drop(first);
        fickle.join().unwrap();
        patient.join().unwrap();
        assert!(LockQueue::enter(&request).is_some(), "free again");
    });
}

#[test]
fn loom_a_hold_that_is_handed_off_ends_up_in_exactly_one_place() {
    explore(|| {
        let queue = Arc::new(Mutex::new(SlotQueue::<(), &'static str>::default()));
        assert!(queue.lock().enter());
        let ticket = queue.lock().join(());
        let waiter = thread::spawn({
            let queue = queue.clone();
            move || {
                let turn = queue.lock().poll(ticket, Waker::noop());
                match turn {
                    Turn::Offered(Offer::Hold(hold)) => Some(hold),
                    Turn::Wait => match queue.lock().leave(ticket) {
                        Some(Offer::Hold(hold)) => Some(hold),
                        _ => None,
                    },
                    other => panic!("{other:?}"),
                }
            }
        });
        let kept = {
            let mut queue = queue.lock();
            if queue.first().is_some() {
                let _ = queue.hand_off("hold");
                None
            } else {
                let _ = queue.pass();
                Some("hold")
            }
        };
        let received = waiter.join().unwrap();
        assert!(
            kept.is_some() != received.is_some(),
            "kept {kept:?}, received {received:?}"
        );
    });
}

#[test]
fn loom_an_offer_is_either_accepted_or_lapses() {
    explore(|| {
        let cell = cell(Phase::Offered);
        let worker = thread::spawn({
            let cell = cell.clone();
            move || cell.lapse()
        });
        let accepted = cell.accept(now());
        worker.join().unwrap();
        let expected = if accepted {
            Phase::Held
        } else {
            Phase::Lost(LossReason::Expired)
        };
        assert_eq!(cell.last_phase(), expected);
    });
}
