//! Candidates, leaders and observers, on paused time.

use std::{
    collections::VecDeque,
    ops::ControlFlow,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{FutureExt as _, StreamExt as _};
use lockkit_core::{
    AcquireOptions, Election, Error, FencingToken, Holder, Instant, Leader, LockClient, LockKind, LockName,
    LockState, LossReason, MemoryBackend, Result,
    memory::FaultPoint,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, HolderWatch, Mode, OwnerId},
};
use tokio::{sync::mpsc, time::timeout};

use crate::probe::{BreaksFirst, Probe};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn election(backend: impl Backend) -> Election {
    LockClient::new(backend).election("jobs").unwrap()
}

fn shown(leader: Option<&Leader>) -> Option<(&str, u64)> {
    leader.map(|leader| (&*leader.id, leader.token.get()))
}

#[tokio::test(start_paused = true)]
async fn observers_are_woken_at_once() {
    let backend = MemoryBackend::new();
    let candidate = election(backend.clone()).candidate("ada").unwrap();
    let mut observer = election(backend.clone()).observe();
    let began = Instant::now();
    assert_eq!(observer.next().await.unwrap(), None);
    for end in ["resign", "drop", "revoke"] {
        // Longer than any poll.
        let quiet = timeout(60 * SECOND, observer.next()).await;
        assert!(quiet.is_err(), "nothing changed: {quiet:?}");
        let asked = Instant::now();
        let leadership = candidate.campaign().await.unwrap();
        let seen = observer.next().await.unwrap();
        assert_eq!(shown(seen.as_ref()), Some(("ada", leadership.token().get())));
        let seen = seen.unwrap();
        assert!(seen.began_before - asked <= 10 * MS, "{seen:?} after {asked:?}");
        assert!(seen.began_after.unwrap() <= asked && seen.began_after.unwrap() >= began);
        let asked = Instant::now();
        match end {
            "resign" => leadership.resign().await.unwrap(),
            "drop" => drop(leadership),
            _ => {
                assert!(backend.revoke("lockkit#election:jobs"));
                assert_eq!(leadership.lost().await, LossReason::Revoked);
            }
        }
        assert_eq!(observer.next().await.unwrap(), None, "after {end}");
        assert!(asked.elapsed() <= 10 * MS, "{:?} after {end}", asked.elapsed());
    }
}

/// A third party's backend need not wake anybody.
#[tokio::test(start_paused = true)]
async fn observers_poll_where_nobody_wakes_them() {
    let probe = Probe::default();
    let candidate = election(probe.clone()).candidate("ada").unwrap();
    let mut observer = election(probe).observe();
    assert_eq!(observer.next().await.unwrap(), None);
    for _ in 0..20 {
        let asked = Instant::now();
        let leadership = candidate.campaign().await.unwrap();
        let seen = observer.next().await.unwrap();
        assert_eq!(shown(seen.as_ref()), Some(("ada", leadership.token().get())));
        let took = asked.elapsed();
        assert!(took > 100 * MS && took <= SECOND, "{took:?}");
        leadership.resign().await.unwrap();
        assert_eq!(observer.next().await.unwrap(), None);
    }
}

/// The server tells nobody of the end of a lease.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_lease_is_seen_when_it_comes() {
    let backend = MemoryBackend::new();
    let stands = election(backend.clone()).with_ttl(3 * SECOND);
    let mut observer = election(backend.clone()).observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let leadership = stands.candidate("ada").unwrap().campaign().await.unwrap();
    assert!(observer.next().await.unwrap().is_some());
    // A release would wake the observer.
    for point in [FaultPoint::Renew, FaultPoint::Release] {
        backend.fail_next(point, u32::MAX);
    }
    let began = Instant::now();
    let (reason, seen) = tokio::join!(leadership.lost(), observer.next());
    assert_eq!((reason, seen.unwrap()), (LossReason::Expired, None));
    let took = began.elapsed();
    assert!(took >= 2 * SECOND && took <= 3 * SECOND + 60 * MS, "{took:?}");
}

/// The memory backend, whose next inspection fails if that is asked for.
#[derive(Clone, Debug, Default)]
struct FailsToShow {
    memory: MemoryBackend,
    fails: Arc<AtomicBool>,
}

#[async_trait]
impl Backend for FailsToShow {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.memory.claim(request).await
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        if self.fails.swap(false, Ordering::SeqCst) {
            return Err(Error::transient("shown", "inspect", "as was asked for"));
        }
        self.memory.inspect(name, kind).await
    }

    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        self.memory.watch(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.memory.close().await
    }
}

/// It looks once in ten seconds otherwise, where the backend wakes it.
#[tokio::test(start_paused = true)]
async fn a_look_that_fails_forgets_no_end_of_a_lease() {
    let backend = FailsToShow::default();
    let stands = election(backend.memory.clone()).with_ttl(12 * SECOND);
    let mut observer = election(backend.clone()).observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let leadership = stands.candidate("ada").unwrap().campaign().await.unwrap();
    let began = Instant::now();
    assert!(observer.next().await.unwrap().is_some());
    // A release would wake the observer.
    for point in [FaultPoint::Renew, FaultPoint::Release] {
        backend.memory.fail_next(point, u32::MAX);
    }
    // Its next look is due soon after that.
    let quiet = timeout(7 * SECOND, observer.next()).await;
    assert!(quiet.is_err(), "nothing changed: {quiet:?}");
    backend.fails.store(true, Ordering::SeqCst);
    assert!(observer.next().await.unwrap_err().is_transient());
    let (reason, seen) = tokio::join!(leadership.lost(), observer.next());
    assert_eq!((reason, seen.unwrap()), (LossReason::Expired, None));
    let took = began.elapsed();
    assert!(took >= 11 * SECOND && took <= 12 * SECOND + 60 * MS, "{took:?}");
}

/// The looks fail that were due when the lease was over.
#[tokio::test(start_paused = true)]
async fn an_end_of_a_lease_is_looked_for_until_it_is_shown() {
    let backend = FailsToShow::default();
    let stands = election(backend.memory.clone()).with_ttl(3 * SECOND);
    let mut observer = election(backend.clone()).observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let leadership = stands.candidate("ada").unwrap().campaign().await.unwrap();
    let began = Instant::now();
    assert!(observer.next().await.unwrap().is_some());
    // A release would wake the observer.
    for point in [FaultPoint::Renew, FaultPoint::Release] {
        backend.memory.fail_next(point, u32::MAX);
    }
    for _ in 0..2 {
        backend.fails.store(true, Ordering::SeqCst);
        assert!(observer.next().await.unwrap_err().is_transient());
        assert!(began.elapsed() > 2 * SECOND, "the lease was not over");
    }
    assert_eq!(observer.next().await.unwrap(), None);
    let took = began.elapsed();
    assert!(took <= 5 * SECOND + 60 * MS, "{took:?}");
    drop(leadership);
}

#[tokio::test(start_paused = true)]
async fn work_stops_with_a_loss_and_begins_again() {
    struct Stopped(mpsc::UnboundedSender<Instant>);
    impl Drop for Stopped {
        fn drop(&mut self) {
            let _ = self.0.send(Instant::now());
        }
    }

    let backend = MemoryBackend::new();
    let candidate = election(backend.clone()).candidate("ada").unwrap();
    let (begins, mut begun) = mpsc::unbounded_channel();
    let (stops, mut stopped) = mpsc::unbounded_channel();
    let leading = tokio::spawn(async move {
        candidate
            .lead(|held| {
                begins.send((held.token(), Instant::now())).unwrap();
                let stopped = Stopped(stops.clone());
                async move {
                    let _stopped = stopped;
                    std::future::pending::<ControlFlow<()>>().await
                }
            })
            .await
    });
    let mut last = FencingToken::new(0);
    for _ in 0..5 {
        let (token, _) = begun.recv().await.unwrap();
        assert!(token > last);
        last = token;
        tokio::time::sleep(SECOND).await;
        let broken = Instant::now();
        assert!(backend.revoke("lockkit#election:jobs"));
        let stopped = timeout(SECOND, stopped.recv()).await;
        let stopped = stopped.expect("a loss stops the work").unwrap();
        assert!(stopped - broken <= 10 * MS, "{:?}", stopped - broken);
    }
    let _ = begun.recv().await.unwrap();
    leading.abort();
    assert!(leading.await.unwrap_err().is_cancelled());
    stopped.recv().await.unwrap();
    let next = election(backend).candidate("ben").unwrap();
    let next = timeout(10 * MS, next.campaign()).await;
    next.expect("a future of `lead` that is dropped resigns")
        .unwrap()
        .resign()
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_term_that_is_lost_before_its_work_has_none() {
    let candidate = election(BreaksFirst::default()).candidate("ada").unwrap();
    let mut terms = 0;
    let led = candidate.lead(|held| {
        terms += 1;
        async move { ControlFlow::Break(held.is_held()) }
    });
    assert!(led.await.unwrap());
    assert_eq!(terms, 1, "work is made for a leader alone");
}

#[tokio::test(start_paused = true)]
async fn terms_do_not_follow_each_other_in_a_busy_loop() {
    let candidate = election(MemoryBackend::new()).candidate("ada").unwrap();
    let (began, mut terms) = (Instant::now(), 0);
    let led = candidate.lead(|_| {
        terms += 1;
        let flow = if terms == 11 {
            ControlFlow::Break(terms)
        } else {
            ControlFlow::Continue(())
        };
        async move { flow }
    });
    assert_eq!(led.await.unwrap(), 11);
    assert!(began.elapsed() >= SECOND, "{:?}", began.elapsed());
}

/// Those who work in turns take turns.
#[tokio::test(start_paused = true)]
async fn a_term_that_ends_lets_the_next_candidate_lead() {
    let backend = MemoryBackend::new();
    let log = Arc::new(Mutex::new(Vec::new()));
    let stand = |id: &'static str| {
        let (candidate, log) = (election(backend.clone()).candidate(id).unwrap(), log.clone());
        tokio::spawn(async move {
            let mut terms = 0;
            let led = candidate.lead(|held| {
                terms += 1;
                let (log, is_last) = (log.clone(), terms == 3);
                async move {
                    log.lock().unwrap().push((held.token(), id));
                    tokio::time::sleep(SECOND).await;
                    if is_last {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                }
            });
            led.await.unwrap();
        })
    };
    let all = [stand("ada"), stand("ben"), stand("cleo")];
    for one in all {
        one.await.unwrap();
    }
    let log = log.lock().unwrap();
    assert!(log.is_sorted(), "{log:?}");
    let who: Vec<_> = log.iter().map(|(_, id)| *id).collect();
    assert_eq!(who.len(), 9);
    for round in who.chunks(3) {
        assert!(
            ["ada", "ben", "cleo"].iter().all(|id| round.contains(id)),
            "{who:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_campaign_that_is_dropped_leaves_no_candidate() {
    let backend = MemoryBackend::new();
    let (ada, ben) = (election(backend.clone()), election(backend.clone()));
    let leadership = ada.candidate("ada").unwrap().campaign().await.unwrap();
    let candidate = ben.candidate("ben").unwrap();
    let campaign = timeout(SECOND, candidate.campaign()).await;
    assert!(campaign.is_err(), "two lead: {campaign:?}");
    leadership.resign().await.unwrap();
    tokio::time::sleep(SECOND).await;
    assert_eq!(ada.leader().await.unwrap(), None);
    assert_eq!(backend.names(), 0, "names that somebody holds or waits for");
}

/// The client lives on a runtime that nobody polls at the moment.
#[test]
fn resigning_waits_for_no_runtime_that_stands_still() {
    let make = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let (home, elsewhere) = (make(), make());
    let leadership = home.block_on(async {
        let candidate = election(MemoryBackend::new()).candidate("ada").unwrap();
        candidate.campaign().await.unwrap()
    });
    let resigned = elsewhere.block_on(async { timeout(60 * SECOND, leadership.resign()).await });
    resigned.expect("it waits for observers to be told").unwrap();
}

/// The wait of the client's locks is not a campaign's.
#[tokio::test(start_paused = true)]
async fn a_campaign_waits_whatever_the_clients_defaults() {
    let backend = MemoryBackend::new();
    let leadership = election(backend.clone())
        .candidate("ada")
        .unwrap()
        .campaign()
        .await
        .unwrap();
    let defaults = AcquireOptions::new()
        .wait(SECOND)
        .renew(false)
        .label("x")
        .local_handoffs(7);
    let client = LockClient::new(backend).with_defaults(defaults).unwrap();
    let campaign = client
        .election("jobs")
        .unwrap()
        .with_ttl(SECOND)
        .candidate("ben")
        .unwrap();
    let campaign = tokio::spawn(async move { campaign.campaign().await });
    tokio::time::sleep(60 * SECOND).await;
    assert!(!campaign.is_finished());
    leadership.resign().await.unwrap();
    let next = campaign.await.unwrap().unwrap();
    assert_eq!(next.id(), "ben");
    tokio::time::sleep(60 * SECOND).await;
    assert!(next.is_held(), "a leadership is renewed: {:?}", next.check());
}

/// Nor is the time after which the holds of tasks that hang are given up.
#[tokio::test(start_paused = true)]
async fn a_leadership_lasts_whatever_the_clients_defaults() {
    let defaults = AcquireOptions::new().ttl(9 * SECOND).max_hold(30 * SECOND);
    let client = LockClient::new(MemoryBackend::new())
        .with_defaults(defaults)
        .unwrap();
    let election = client.election("jobs").unwrap();
    for election in [election.clone(), election.with_ttl(60 * SECOND)] {
        let leadership = election.candidate("ada").unwrap().campaign().await.unwrap();
        tokio::time::sleep(200 * SECOND).await;
        leadership.check().unwrap();
        leadership.resign().await.unwrap();
    }
}

#[tokio::test]
async fn bad_elections_and_candidates_are_refused() {
    let client = LockClient::new(MemoryBackend::new());
    let longest = "x".repeat(1_007);
    assert_eq!(
        client.election(&longest).unwrap().lock_name().as_str().len(),
        LockName::MAX_BYTES
    );
    for (name, why) in [
        (String::new(), "empty"),
        (longest + "x", "1,007 bytes"),
        ("lockkit#election:jobs".to_owned(), "the election's own name"),
    ] {
        match client.election(&name).map(drop) {
            Err(Error::InvalidName { reason, .. }) => assert!(reason.contains(why), "{reason}"),
            other => panic!("expected InvalidName for {name:?}, got {other:?}"),
        }
    }
    let election = client.election("jobs").unwrap();
    assert_eq!(
        (election.name().as_str(), election.lock_name().as_str()),
        ("jobs", "lockkit#election:jobs")
    );
    for (election, id, option) in [
        (election.clone(), String::new(), "candidate"),
        (election.clone(), "x".repeat(257), "candidate"),
        (election.with_ttl(MS), "ada".to_owned(), "ttl"),
    ] {
        match election.candidate(&*id).map(drop) {
            Err(Error::InvalidOptions { option: named, .. }) => assert_eq!(named, option),
            other => panic!("expected InvalidOptions for {option}, got {other:?}"),
        }
    }
    let refused = client.lock("lockkit#election:jobs").unwrap_err().to_string();
    assert!(
        refused.contains("use `election` with the rest of the name"),
        "{refused}"
    );
    let _ = client.lock("lockkit#elections").unwrap();
}

/// Another program may take whatever key it likes.
#[tokio::test]
async fn an_election_that_is_held_as_a_lock_is_one_error() {
    let backend = MemoryBackend::new();
    let election = election(backend.clone());
    let request = ClaimRequest::new(
        election.lock_name().clone(),
        Mode::Exclusive,
        60 * SECOND,
        OwnerId::new(7),
    );
    let mut foreign = backend.claim(&request).await.unwrap();
    foreign.attempt(Duration::ZERO).await.unwrap().unwrap();
    for error in [
        election.leader().await.unwrap_err(),
        election.observe().next().await.unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(
            matches!(
                error,
                Error::InvalidOptions {
                    option: "election",
                    ..
                }
            ),
            "{text}"
        );
        assert!(text.contains("`jobs`") && text.contains("no candidate"), "{text}");
    }
    let denied = election.candidate("ada").unwrap().try_campaign().await.unwrap();
    assert!(denied.is_none(), "{denied:?}");
    foreign.release().await.unwrap();
    assert_eq!(election.leader().await.unwrap(), None);
}

/// A server that shows what it is told to.
#[derive(Clone, Debug, Default)]
struct Shown {
    memory: MemoryBackend,
    /// The token of a leader, 0 for none, or `None` for an outage. The last one stays.
    states: Arc<Mutex<VecDeque<Option<u64>>>>,
    hides_the_label: Arc<AtomicBool>,
    looks: Arc<AtomicUsize>,
    /// The time for which an answer is on its way.
    reply_takes: Duration,
}

#[async_trait]
impl Backend for Shown {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.memory.claim(request).await
    }

    async fn inspect(&self, _: &LockName, _: LockKind) -> Result<LockState> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        let state = {
            let mut states = self.states.lock().unwrap();
            if states.len() > 1 {
                states.pop_front()
            } else {
                states.front().copied()
            }
        };
        if !self.reply_takes.is_zero() {
            tokio::time::sleep(self.reply_takes).await;
        }
        match state.flatten() {
            None => Err(Error::transient(
                "shown",
                "inspect",
                "an outage, as was asked for",
            )),
            Some(0) => Ok(LockState::new(Vec::new(), Some(0))),
            Some(token) => {
                let is_shown = !self.hides_the_label.load(Ordering::SeqCst);
                let label = is_shown.then(|| "ada".to_owned());
                let holder = Holder::new(FencingToken::new(token), label, None);
                Ok(LockState::new(vec![holder], None))
            }
        }
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

impl Shown {
    fn observed(states: impl IntoIterator<Item = Option<u64>>) -> (Self, Election) {
        let server = Self::default();
        server.states.lock().unwrap().extend(states);
        (server.clone(), election(server))
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_an_error_and_no_change() {
    let (server, election) = Shown::observed([Some(5), Some(5), None, None, Some(5), Some(6)]);
    let mut observer = election.observe();
    assert!(observer.looked_at().is_none());
    assert_eq!(shown(observer.next().await.unwrap().as_ref()), Some(("ada", 5)));
    for _ in 0..2 {
        let looks = server.looks.load(Ordering::SeqCst);
        let error = observer.next().await.unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert!(server.looks.load(Ordering::SeqCst) <= looks + 2, "a busy loop");
        assert!(
            observer.looked_at().unwrap().elapsed() >= 700 * MS,
            "what it says is old"
        );
    }
    let seen = observer.next().await.unwrap().unwrap();
    assert_eq!(seen.token.get(), 6, "5 was there before");
    assert!(seen.began_after.unwrap().elapsed() <= SECOND);
}

/// Where the request for a hold replaces its label, the token tells who it is.
#[tokio::test(start_paused = true)]
async fn a_known_leader_without_its_label_is_no_change() {
    let (server, election) = Shown::observed([Some(5)]);
    let mut observer = election.observe();
    assert_eq!(shown(observer.next().await.unwrap().as_ref()), Some(("ada", 5)));
    server.hides_the_label.store(true, Ordering::SeqCst);
    let change = timeout(5 * SECOND, observer.next()).await;
    assert!(change.is_err(), "nothing changed: {change:?}");
    assert!(observer.looked_at().unwrap().elapsed() <= SECOND);
    server.states.lock().unwrap()[0] = Some(6);
    let stranger = observer.next().await.unwrap_err();
    assert!(matches!(stranger, Error::InvalidOptions { .. }), "{stranger}");
    server.states.lock().unwrap()[0] = Some(0);
    assert_eq!(observer.next().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_goes_back_is_no_leader() {
    let (_, election) = Shown::observed([Some(5), Some(3), Some(0), Some(5), Some(4), Some(5), Some(9)]);
    let mut observer = election.observe();
    assert_eq!(shown(observer.next().await.unwrap().as_ref()), Some(("ada", 5)));
    let looked_at = observer.looked_at();
    let error = observer.next().await.unwrap_err();
    assert_eq!(observer.looked_at(), looked_at, "what it says is old");
    let cause = lockkit_core::spi::chain(&error);
    assert!(
        error.is_transient() && cause.contains("token 3 after one with token 5"),
        "{cause}"
    );
    assert_eq!(observer.next().await.unwrap(), None);
    assert_eq!(
        shown(observer.next().await.unwrap().as_ref()),
        Some(("ada", 5)),
        "it leads after all"
    );
    assert!(observer.next().await.is_err());
    assert_eq!(
        shown(observer.next().await.unwrap().as_ref()),
        Some(("ada", 9)),
        "5 was there before"
    );
}

/// What was answered while nobody was there is old by then.
#[tokio::test(start_paused = true)]
async fn who_was_away_during_a_look_sees_who_leads_now() {
    for answered in [Some(5), Some(0), None] {
        let server = Shown {
            reply_takes: MS,
            ..Shown::default()
        };
        server.states.lock().unwrap().push_back(answered);
        let election = election(server.clone());
        let mut observer = election.observe();
        let back = {
            let mut next = pin!(observer.next());
            let mut leader = pin!(election.leader());
            assert!(next.as_mut().now_or_never().is_none() && leader.as_mut().now_or_never().is_none());
            assert_eq!(server.looks.load(Ordering::SeqCst), 2, "both are asked");
            server.states.lock().unwrap()[0] = Some(6);
            tokio::time::sleep(60 * SECOND).await;
            let back = Instant::now();
            for seen in [next.await, leader.await] {
                assert_eq!(shown(seen.unwrap().as_ref()), Some(("ada", 6)), "{answered:?}");
            }
            back
        };
        assert!(observer.looked_at().unwrap() >= back);
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_that_is_dropped_at_any_poll_loses_no_change() {
    for polls in 1..8 {
        let (server, election) = Shown::observed([Some(1)]);
        let mut observer = election.observe();
        for token in 1..20 {
            server.states.lock().unwrap().front_mut().unwrap().replace(token);
            let seen = loop {
                let mut next = Box::pin(observer.next());
                let mut left = polls;
                let seen = std::future::poll_fn(|cx| match next.as_mut().poll(cx) {
                    std::task::Poll::Ready(seen) => std::task::Poll::Ready(Some(seen)),
                    std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
                    std::task::Poll::Pending => {
                        left -= 1;
                        std::task::Poll::Pending
                    }
                });
                if let Some(seen) = seen.await {
                    break seen.unwrap();
                }
            };
            assert_eq!(shown(seen.as_ref()), Some(("ada", token)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn closing_the_client_ends_observers_and_leaders() {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone());
    let election = client.election("jobs").unwrap();
    let leading = election.candidate("ada").unwrap();
    let leading = tokio::spawn(async move {
        leading
            .lead(async |_| std::future::pending::<ControlFlow<()>>().await)
            .await
    });
    let waiting = election.candidate("ben").unwrap();
    let waiting = tokio::spawn(async move { waiting.campaign().await.map(drop) });
    let seen = tokio::spawn(election.observe().into_stream().collect::<Vec<_>>());
    tokio::time::sleep(SECOND).await;
    let closed = Instant::now();
    client.close(SECOND).await.unwrap();
    assert!(matches!(leading.await.unwrap(), Err(Error::Closed)));
    assert!(matches!(waiting.await.unwrap(), Err(Error::Closed)));
    let seen = seen.await.unwrap();
    assert!(matches!(seen[..], [Ok(Some(_)), Err(Error::Closed)]), "{seen:?}");
    assert!(
        closed.elapsed() < 100 * MS,
        "told {:?} after the closing",
        closed.elapsed()
    );
    assert_eq!(backend.names(), 0);
}
