//! The blocking API of the facade.

use std::{
    ops::ControlFlow,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lockkit::{AcquireOptions, Error, FencingToken, LockConfig, blocking};

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn a_url_leads_to_the_same_server_as_the_async_one() {
    let client = blocking::connect("memory:?namespace=blocking-same&label=me").unwrap();
    let guard = client.lock("a").unwrap().acquire().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let other = lockkit::connect("memory:?namespace=blocking-same").await.unwrap();
        assert!(other.lock("a").unwrap().try_acquire().await.unwrap().is_none());
        let state = other.inspect("a").await.unwrap();
        assert_eq!(state.holders[0].label.as_deref(), Some("me"));
    });
    guard.release().unwrap();
}

#[test]
fn a_bad_url_is_the_same_error_as_the_async_one() {
    for url in ["memory:?ttl=never", "nosuch://host", "memory:?colour=red", ""] {
        let blocking = blocking::connect(url).unwrap_err().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let other = runtime.block_on(lockkit::connect(url)).unwrap_err().to_string();
        assert_eq!(blocking, other);
    }
}

#[tokio::test]
async fn it_connects_where_a_thread_may_be_held_up_alone() {
    let refused = blocking::connect("memory:").unwrap_err();
    assert!(
        matches!(refused, Error::Backend { .. }) && !refused.is_transient(),
        "{refused}"
    );
    let work = tokio::task::spawn_blocking(|| {
        let config = LockConfig::from_url("memory:?namespace=blocking-places")?;
        let client = blocking::LockClient::connect_with(|| config.connect())?;
        client.lock("a")?.acquire()?.release()
    });
    work.await.unwrap().unwrap();
}

#[cfg(all(feature = "file", unix))]
#[test]
fn a_set_spans_backends() {
    let dir = tempfile::tempdir().unwrap();
    let memory = blocking::connect("memory:?namespace=blocking-set").unwrap();
    let files = blocking::connect(&format!("file://{}", dir.path().display())).unwrap();
    let (a, b) = (memory.lock("a").unwrap(), files.lock("b").unwrap());
    let set = blocking::acquire_all(&[&a, &b], &AcquireOptions::new()).unwrap();
    assert!(
        blocking::try_acquire_all(&[&b], &AcquireOptions::new())
            .unwrap()
            .is_none()
    );
    #[cfg(unix)]
    assert!(
        set.guards()
            .iter()
            .any(|guard| guard.descriptor().unwrap().is_some())
    );
    set.release().unwrap();
    assert!(a.inspect().unwrap().is_free() && b.inspect().unwrap().is_free());
}

/// Two threads share a client, and one has its own.
#[test]
fn threads_lead_in_turn_and_each_leader_is_seen_once() {
    type Terms = Vec<(String, FencingToken)>;
    const TERMS: usize = 3;

    let connect = || blocking::connect("memory:?namespace=blocking-election").unwrap();
    let (ours, theirs) = (connect(), connect());
    let candidates = [(&ours, "ada"), (&ours, "ben"), (&theirs, "cleo")];
    let leaders = AtomicUsize::new(0);
    let (led, seen) = (Mutex::new(Terms::new()), Mutex::new(Terms::new()));
    let run = |candidate: blocking::Candidate| {
        let mut terms = 0;
        let done = candidate.lead(|held| {
            assert_eq!(leaders.fetch_add(1, Ordering::SeqCst), 0, "two lead at once");
            let this = (candidate.id().to_owned(), held.token());
            led.lock().unwrap().push(this.clone());
            let give_up = Instant::now() + MINUTE;
            while seen.lock().unwrap().last() != Some(&this) {
                assert!(Instant::now() < give_up, "nobody sees {this:?}");
                thread::sleep(Duration::from_millis(1));
            }
            leaders.fetch_sub(1, Ordering::SeqCst);
            terms += 1;
            if terms == TERMS {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        done.unwrap();
    };
    let watch = |mut observer: blocking::Observer| {
        while seen.lock().unwrap().len() < TERMS * candidates.len() {
            let change = observer.next_timeout(MINUTE).expect("another leads");
            if let Some(leader) = change.unwrap() {
                seen.lock().unwrap().push((leader.id, leader.token));
            }
        }
    };
    thread::scope(|scope| {
        let observer = theirs.election("jobs").unwrap().observe();
        scope.spawn(|| watch(observer));
        for (client, id) in candidates {
            let candidate = client.election("jobs").unwrap().candidate(id).unwrap();
            scope.spawn(|| run(candidate));
        }
    });
    let (led, seen) = (led.into_inner().unwrap(), seen.into_inner().unwrap());
    assert_eq!(led, seen);
    assert!(
        led.is_sorted_by(|(_, before), (_, after)| before < after),
        "{led:?}"
    );
    assert_eq!(ours.election("jobs").unwrap().leader().unwrap(), None);
}
