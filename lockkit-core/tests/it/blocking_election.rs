//! Candidates, leaders and observers in the blocking API.

use std::{
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, HoldView, Leader, LockKind, LockName, LockState, LossReason, MemoryBackend, Result,
    blocking::{Election, LockClient},
    spi::{Backend, BackendInfo, Claim, ClaimRequest},
};
use tokio::runtime::Builder;

use crate::probe::BreaksFirst;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The lock of the election that all of this is about.
const LOCK: &str = "lockkit#election:jobs";

/// An election by a client of its own. Its leaders have a lease that is longer than any wait here: nobody follows one because that is over.
fn election(backend: impl Backend) -> Election {
    let election = LockClient::new(backend).unwrap().election("jobs");
    election.unwrap().with_ttl(10 * MINUTE)
}

fn shown(leader: Option<&Leader>) -> Option<(&str, FencingToken)> {
    leader.map(|leader| (&*leader.id, leader.token))
}

/// Works on, as a thread does that does not ask whether it still leads, until it does not.
fn until_lost(held: &HoldView) {
    let give_up = Instant::now() + MINUTE;
    while held.check().is_ok() {
        assert!(Instant::now() < give_up, "the loss is never noticed");
        thread::sleep(MS);
    }
}

#[test]
fn one_leads_and_an_observer_sees_each_change_once() {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone()).unwrap();
    let (ours, theirs) = (client.election("jobs").unwrap(), election(backend));
    assert_eq!((ours.name().as_str(), ours.lock_name().as_str()), ("jobs", LOCK));
    let (sender, seen) = mpsc::channel();
    let observer = ours.observe();
    let watching = thread::spawn(move || {
        for change in observer {
            sender.send(change).unwrap();
        }
    });
    let next = || seen.recv_timeout(MINUTE).expect("the observer sees a change");
    assert_eq!(next().unwrap(), None);
    let mut last = None;
    for (election, id) in [(&ours, "ada"), (&theirs, "ben"), (&ours, "cleo")] {
        let leadership = election.candidate(id).unwrap().campaign().unwrap();
        assert!(leadership.is_held() && leadership.id() == id);
        assert!(Some(leadership.token()) > last);
        last = Some(leadership.token());
        assert_eq!(shown(next().unwrap().as_ref()), Some((id, leadership.token())));
        for other in [&ours, &theirs] {
            let denied = other.candidate("other").unwrap().try_campaign().unwrap();
            assert!(denied.is_none(), "two lead: {leadership:?} and {denied:?}");
            let leader = other.leader().unwrap();
            assert_eq!(shown(leader.as_ref()), Some((id, leadership.token())));
        }
        if id == "ben" {
            drop(leadership);
        } else {
            leadership.resign().unwrap();
        }
        assert_eq!(next().unwrap(), None);
    }
    assert!(seen.try_recv().is_err(), "the same leader is seen twice");
    client.close(MINUTE).unwrap();
    assert!(matches!(next(), Err(Error::Closed)));
    watching.join().unwrap();
}

#[test]
fn a_lost_leadership_is_told() {
    let backend = MemoryBackend::new();
    let (ours, theirs) = (election(backend.clone()), election(backend.clone()));
    let leadership = ours.candidate("ada").unwrap().campaign().unwrap();
    assert_eq!(leadership.wait_lost(5 * MS).unwrap(), None);
    leadership.check().unwrap();
    assert!(backend.revoke(LOCK));
    assert_eq!(leadership.wait_lost(MINUTE).unwrap(), Some(LossReason::Revoked));
    assert!(leadership.check().unwrap_err().is_lost());
    let next = theirs.candidate("ben").unwrap().campaign().unwrap();
    assert!(next.token() > leadership.token());
    assert!(leadership.resign().unwrap_err().is_lost());
    assert!(next.is_held(), "who has lost it takes it from nobody");
}

#[test]
fn waits_of_candidates_and_observers_have_an_end() {
    let backend = MemoryBackend::new();
    let (ours, theirs) = (election(backend.clone()), election(backend));
    let leadership = ours.candidate("ada").unwrap().campaign().unwrap();
    let started = Instant::now();
    let late = theirs.candidate("ben").unwrap().campaign_timeout(30 * MS);
    assert!(late.as_ref().is_err_and(Error::is_timeout), "{late:?}");
    assert!(started.elapsed() >= 30 * MS);

    // Without any time, it looks once.
    let mut observer = theirs.observe();
    let first = observer.next_timeout(Duration::ZERO).unwrap().unwrap();
    assert_eq!(shown(first.as_ref()), Some(("ada", leadership.token())));
    assert!(observer.looked_at().is_some());
    let started = Instant::now();
    assert!(observer.next_timeout(30 * MS).is_none(), "nothing has changed");
    assert!(started.elapsed() >= 30 * MS);
    leadership.resign().unwrap();
    assert_eq!(observer.next_timeout(MINUTE).unwrap().unwrap(), None);
    assert_eq!(ours.leader().unwrap(), None, "who gave up leads");
    let in_time = theirs.candidate("ben").unwrap().campaign_timeout(MINUTE);
    in_time.unwrap().resign().unwrap();
}

#[test]
fn work_that_leads_goes_on_in_the_next_term() {
    let backend = MemoryBackend::new();
    let election = election(backend.clone());
    let candidate = election.candidate("ada").unwrap();
    let (mut tokens, began) = (Vec::new(), Instant::now());
    let last = candidate.lead(|held| {
        tokens.push(held.token());
        match tokens.len() {
            // Lost, resigned, and done.
            1 => {
                assert!(backend.revoke(LOCK));
                until_lost(&held);
                ControlFlow::Continue(())
            }
            2 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(held.token()),
        }
    });
    assert_eq!((tokens.len(), last.unwrap()), (3, tokens[2]));
    assert!(tokens[0] < tokens[1] && tokens[1] < tokens[2], "{tokens:?}");
    assert!(began.elapsed() >= 200 * MS, "{:?}", began.elapsed());
    assert_eq!(election.leader().unwrap(), None, "it resigns at the end");

    let done = candidate.lead(|held| {
        assert!(backend.revoke(LOCK));
        until_lost(&held);
        ControlFlow::Break("done")
    });
    assert_eq!(done.unwrap(), "done", "no term comes after it");
}

#[test]
fn a_term_that_is_lost_before_its_work_has_none() {
    let candidate = election(BreaksFirst::default()).candidate("ada").unwrap();
    let led = candidate.lead(|held| ControlFlow::Break(held.is_held()));
    assert!(led.unwrap(), "it has worked without the leadership");
}

#[test]
fn work_that_leads_and_panics_resigns() {
    let backend = MemoryBackend::new();
    let candidate = election(backend.clone()).candidate("ada").unwrap();
    let panics = || candidate.lead(|_| -> ControlFlow<()> { resume_unwind(Box::new(())) });
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    let next = election(backend).candidate("ben").unwrap();
    next.campaign_timeout(MINUTE).unwrap().resign().unwrap();
}

/// What work starts with Tokio belongs to the runtime that the caller is in, and not to the client's.
#[test]
fn work_that_leads_is_in_the_runtime_of_its_thread() {
    let caller = Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let id = caller.handle().id();
    let work = caller.spawn_blocking(move || {
        let candidate = election(MemoryBackend::new()).candidate("ada")?;
        candidate.lead(|_| ControlFlow::Break(tokio::runtime::Handle::current().id()))
    });
    assert_eq!(caller.block_on(work).unwrap().unwrap(), id);
    let candidate = election(MemoryBackend::new()).candidate("ada").unwrap();
    let outside = candidate.lead(|_| ControlFlow::Break(tokio::runtime::Handle::try_current().is_err()));
    assert!(outside.unwrap(), "there is none on this thread");
}

fn is_refused<T>(outcome: Result<T>) {
    match outcome.map(drop) {
        Err(err @ Error::Backend { .. }) if !err.is_transient() => {}
        other => panic!("expected a permanent error, got {other:?}"),
    }
}

#[test]
fn elections_in_a_task_are_refused_and_end_in_the_background() {
    let backend = MemoryBackend::new();
    let (ours, theirs) = (election(backend.clone()), election(backend));
    let candidate = ours.candidate("ada").unwrap();
    let leadership = candidate.campaign().unwrap();
    let mut observers = [ours.observe(), ours.observe()];
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        is_refused(candidate.campaign());
        is_refused(candidate.try_campaign());
        is_refused(candidate.campaign_timeout(SECOND));
        is_refused(candidate.lead(|_| -> ControlFlow<()> { panic!("it leads") }));
        is_refused(ours.leader());
        is_refused(observers[0].next().unwrap());
        is_refused(observers[1].next_timeout(SECOND).unwrap());
        is_refused(leadership.resign());
    });
    for observer in &mut observers {
        assert!(observer.next().is_none() && observer.next_timeout(SECOND).is_none());
    }
    let next = theirs.candidate("ben").unwrap().campaign_timeout(MINUTE).unwrap();
    // It may be dropped there, too.
    runtime.block_on(async move { drop((next, observers, ours)) });
    let last = theirs.candidate("cleo").unwrap().campaign_timeout(MINUTE);
    last.unwrap().resign().unwrap();
}

#[test]
fn closing_ends_leaders_candidates_and_observers() {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone()).unwrap();
    let in_the_way = election(backend).candidate("ada").unwrap().campaign().unwrap();
    let jobs = client.election("jobs").unwrap();
    let leads = client.election("others").unwrap().candidate("ben").unwrap();
    let leadership = leads.campaign().unwrap();
    let waiting = jobs.candidate("ben").unwrap();
    let waiter = thread::spawn(move || waiting.campaign().map(drop));
    let give_up = Instant::now() + MINUTE;
    while client.inspect(LOCK).unwrap().waiters != Some(1) {
        assert!(Instant::now() < give_up, "the candidate does not wait");
        thread::sleep(MS);
    }
    let mut observer = jobs.observe();
    let first = observer.next().unwrap().unwrap();
    assert_eq!(shown(first.as_ref()), Some(("ada", in_the_way.token())));
    client.close(MINUTE).unwrap();
    assert_eq!(leadership.lost_reason(), Some(LossReason::Disconnected));
    assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
    assert!(matches!(observer.next(), Some(Err(Error::Closed))));
    assert!(observer.next().is_none(), "it ends after that");
    let led = leads.lead(|_| ControlFlow::Break(()));
    assert!(matches!(led, Err(Error::Closed)));
    assert!(in_the_way.is_held());
}

/// A server that does not tell who holds for as long as it is out. It wakes nobody.
#[derive(Clone, Debug, Default)]
struct Flaky(MemoryBackend, Arc<AtomicBool>);

#[async_trait]
impl Backend for Flaky {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.0.claim(request).await
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        if self.1.load(Ordering::SeqCst) {
            return Err(Error::transient(
                "flaky",
                "inspect",
                "an outage, as was asked for",
            ));
        }
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[test]
fn an_outage_is_an_error_and_no_end_of_an_observer() {
    let server = Flaky::default();
    let election = election(server.clone());
    let mut observer = election.observe();
    assert_eq!(observer.next().unwrap().unwrap(), None);
    server.1.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let outage = observer.next().expect("an outage is no end").unwrap_err();
        assert!(outage.is_transient(), "{outage}");
        assert!(election.leader().unwrap_err().is_transient());
    }
    let leadership = election.candidate("ada").unwrap().campaign().unwrap();
    server.1.store(false, Ordering::SeqCst);
    let seen = observer.next_timeout(MINUTE).unwrap().unwrap();
    assert_eq!(shown(seen.as_ref()), Some(("ada", leadership.token())));
    leadership.resign().unwrap();
}
