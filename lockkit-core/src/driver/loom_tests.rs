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
        attendance::Attendance,
        cell::{Event, HoldCell, Phase},
        hold::Hold,
        line::{Line, Served, Terms},
        moment::{Clock, Moment},
        queue::{Offer, Queue, Turn},
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

/// What the worker does with a hold, without its renewals.
async fn attend(cell: Arc<HoldCell<&'static str>>) {
    loop {
        let version = cell.version();
        let Some(loan) = cell.attend().await else { return };
        std::future::poll_fn(|cx| cell.poll_changed(version, cx)).await;
        drop(loan);
    }
}

#[test]
fn loom_a_hold_is_either_released_or_lost_and_watchers_of_a_loss_are_woken() {
    explore(|| {
        let cell = cell(Phase::Held);
        let wakes = Arc::new(Counter::default());
        let mut place = None;
        cell.watch(&mut place, &Waker::from(wakes.clone()), Event::Loss);
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
fn loom_a_loss_is_never_missed_by_a_watcher_that_registers_meanwhile() {
    explore(|| {
        let cell = cell(Phase::Held);
        let loser = thread::spawn({
            let cell = cell.clone();
            move || cell.lose(LossReason::Expired)
        });
        let mut place = None;
        let reason = block_on(std::future::poll_fn(|cx| {
            cell.watch(&mut place, cx.waker(), Event::Loss);
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
        let mut place = None;
        block_on(std::future::poll_fn(|cx| {
            cell.watch(&mut place, cx.waker(), Event::End);
            match cell.last_phase() {
                Phase::Releasing => Poll::Ready(()),
                _ => Poll::Pending,
            }
        }));
        assert!(releaser.join().unwrap());
    });
}

#[test]
fn loom_the_claim_comes_back_from_its_attendant_to_whoever_releases() {
    explore(|| {
        let cell = cell(Phase::Held);
        let attendant = thread::spawn({
            let cell = cell.clone();
            move || block_on(attend(cell))
        });
        let claim = match cell.begin_release(now()) {
            Ok(Some(claim)) => Some(claim),
            Ok(None) => block_on(cell.reclaim()).keep(),
            Err(reason) => panic!("lost: {reason}"),
        };
        assert_eq!(claim, Some("claim"));
        cell.dismiss();
        attendant.join().unwrap();
    });
}

#[test]
fn loom_whoever_releases_ends_the_attendance_or_waits_for_the_claim() {
    explore(|| {
        let cell = cell(Phase::Held);
        let attendance = Arc::new(Attendance::default());
        attendance.begin(attend(cell.clone()));
        let attendant = thread::spawn({
            let attendance = attendance.clone();
            move || block_on(std::future::poll_fn(|cx| attendance.poll(cx)))
        });
        let recalled = match cell.begin_release(now()) {
            Ok(Some(claim)) => Some(claim),
            Ok(None) => {
                attendance.end();
                cell.take()
            }
            Err(reason) => panic!("lost: {reason}"),
        };
        let claim = recalled.or_else(|| block_on(cell.reclaim()).keep());
        assert_eq!(claim, Some("claim"));
        cell.dismiss();
        attendant.join().unwrap();
    });
}

#[test]
fn loom_a_renewal_by_hand_and_the_attendant_take_turns() {
    explore(|| {
        let cell = cell(Phase::Held);
        let attendant = thread::spawn({
            let cell = cell.clone();
            move || {
                block_on(async {
                    let version = cell.version();
                    if let Some(loan) = cell.attend().await {
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
        cell.dismiss();
        attendant.join().unwrap();
    });
}

fn line() -> Arc<Line> {
    let client = LockClient::new(MemoryBackend::new());
    client.lock("name").unwrap().line().clone()
}

fn terms() -> Arc<Terms> {
    Arc::new(Terms {
        line: line(),
        ttl: Duration::from_secs(30),
        wait: None,
        renew: true,
        op_timeout: Duration::from_secs(5),
        label: None,
        local_handoffs: 0,
        adopt_after: Duration::from_millis(5),
    })
}

/// Takes the slot, waiting for it if need be.
async fn take_slot(terms: &Arc<Terms>) {
    let grip = match Line::enter_or_join(terms) {
        Ok(grip) => grip,
        Err(in_line) => match in_line.await {
            Served::Slot(grip) => grip,
            other => panic!("{other:?}"),
        },
    };
    drop(grip);
}

#[test]
fn loom_the_slot_is_never_forgotten() {
    explore(|| {
        let terms = terms();
        assert_eq!(terms.line.mode, Mode::Exclusive);
        let other = thread::spawn({
            let terms = terms.clone();
            move || block_on(take_slot(&terms))
        });
        block_on(take_slot(&terms));
        other.join().unwrap();
        assert!(Line::enter(&terms).is_some(), "free again");
    });
}

#[test]
fn loom_whoever_closes_sees_a_contender_that_goes_on() {
    explore(|| {
        let terms = terms();
        // In this order, since loom does not see the flag of the client: only a thread that is yet to run can set it late.
        let closer = thread::spawn({
            let line = terms.line.clone();
            move || {
                line.core.close();
                line.is_idle()
            }
        });
        let grip = Line::enter(&terms);
        let goes_on = grip.is_some() && !terms.line.core.is_closed();
        let is_idle = closer.join().unwrap();
        assert!(!(goes_on && is_idle), "it was not waited for");
        drop(grip);
        assert!(terms.line.is_idle(), "and is forgotten");
    });
}

#[test]
fn loom_the_worker_is_told_of_every_hold() {
    explore(|| {
        let terms = terms();
        let begun = Instant::now();
        let other = thread::spawn({
            let terms = terms.clone();
            move || hold(&terms, begun)
        });
        let mine = hold(&terms, begun);
        let adopted = terms.line.adopt(begun + terms.adopt_after);
        let others = other.join().unwrap();
        let later = terms.line.adopt(begun + terms.adopt_after);
        assert_eq!(adopted.len() + later.len(), 2, "each is adopted once");
        terms.line.unregister(&mine);
        terms.line.unregister(&others);
        terms.line.unregister(&mine);
        assert!(terms.line.is_idle() && terms.line.holds().is_empty());
    });
}

/// A hold of the line, in its register.
fn hold(terms: &Arc<Terms>, now: Instant) -> Hold {
    let mut grip = Line::bypass(terms);
    grip.becomes_hold();
    let lease = Clock::new(true).proof(&Lease {
        since: now,
        length: Some(terms.ttl),
    });
    let hold = Hold::new(Phase::Held, terms.clone(), 1, grip, &lease);
    terms.line.register(&hold, now);
    hold
}

#[test]
fn loom_a_waiter_that_gives_up_passes_on_what_it_was_offered() {
    explore(|| {
        let terms = terms();
        let first = Line::enter(&terms).unwrap();
        let fickle = thread::spawn({
            let terms = terms.clone();
            move || {
                if let Err(mut in_line) = Line::enter_or_join(&terms) {
                    let mut cx = Context::from_waker(Waker::noop());
                    drop(pin!(&mut in_line).poll(&mut cx));
                }
            }
        });
        let patient = thread::spawn({
            let terms = terms.clone();
            move || block_on(take_slot(&terms))
        });
        drop(first);
        fickle.join().unwrap();
        patient.join().unwrap();
        assert!(Line::enter(&terms).is_some(), "free again");
    });
}

#[test]
fn loom_a_hold_that_is_handed_off_ends_up_in_exactly_one_place() {
    explore(|| {
        let queue = Arc::new(Mutex::new(Queue::<(), &'static str>::default()));
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
