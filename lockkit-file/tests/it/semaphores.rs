//! Permits, and the size of a semaphore.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{
    Error, LockKind,
    spi::{Backend, chain},
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::fixture::{PATIENCE, TRY, claim, granted, name, open, other, permits, request};

#[tokio::test]
async fn a_process_stopped_in_its_search_for_a_permit_blocks_nobody() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut held = Vec::new();
    for _ in 0..300 {
        let mut claim = claim(&backend, "n", permits(300)).await;
        assert!(claim.attempt(TRY).await.unwrap().is_some());
        held.push(claim);
    }
    let (looking, _) = other("look for one of 300", dir.path());
    for stop in 0..30 {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..6_000))).await;
        looking.stop();
        let mut one = held.swap_remove(fastrand::usize(..held.len()));
        one.release().await.unwrap();
        let again = one.attempt(TRY).await;
        assert!(matches!(again, Ok(Some(_))), "stop {stop}: {again:?}");
        held.push(one);
        looking.signal(Signal::CONT);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_of_a_semaphore_never_mix() {
    let dir = TempDir::new().unwrap();
    let inside = Arc::new(Mutex::new(Vec::<u32>::new()));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let backend = open(dir.path()).await;
        let inside = Arc::clone(&inside);
        tasks.push(tokio::spawn(async move {
            let mut grants = 0;
            for _ in 0..150 {
                let size = [1, 2, 3, 5][fastrand::usize(..4)];
                let mut claim = claim(&backend, "n", permits(size)).await;
                match claim.attempt(TRY).await {
                    Ok(None) | Err(Error::InvalidOptions { .. }) => {}
                    Ok(Some(_)) => {
                        grants += 1;
                        {
                            let mut held = inside.lock().unwrap();
                            held.push(size);
                            let fits = held.len() <= size as usize && held.iter().all(|other| *other == size);
                            assert!(fits, "sizes of those who hold: {held:?}");
                        }
                        tokio::task::yield_now().await;
                        let mut held = inside.lock().unwrap();
                        let at = held.iter().position(|other| *other == size).unwrap();
                        held.remove(at);
                    }
                    Err(error) => panic!("{}", chain(&error)),
                }
                claim.release().await.unwrap();
            }
            grants
        }));
    }
    let mut grants = 0;
    for task in tasks {
        grants += task.await.unwrap();
    }
    assert!(grants > 50, "{grants}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_all_given_and_never_exceeded() {
    let dir = TempDir::new().unwrap();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..10 {
        let backend = open(dir.path()).await;
        let (inside, most) = (inside.clone(), most.clone());
        tasks.push(tokio::spawn(async move {
            let mut tokens = Vec::new();
            for _ in 0..25 {
                let mut claim = claim(&backend, "n", permits(3)).await;
                tokens.push(*granted(&mut claim).await.tokens.start());
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                claim.release().await.unwrap();
            }
            tokens
        }));
    }
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.extend(task.await.unwrap());
    }
    assert!(most.load(Ordering::SeqCst) <= 3);
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 250, "no token twice");

    let backend = open(dir.path()).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut claim = claim(&backend, "n", permits(3)).await;
        assert!(claim.attempt(TRY).await.unwrap().is_some());
        held.push(claim);
    }
    let mut fourth = claim(&backend, "n", permits(3)).await;
    assert_eq!(fourth.attempt(TRY).await.unwrap(), None);
    assert_eq!(
        backend
            .inspect(&name("n"), LockKind::Semaphore)
            .await
            .unwrap()
            .holders
            .len(),
        3
    );
}

#[tokio::test]
async fn two_sizes_of_a_semaphore_are_an_error_while_one_is_held() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut two = claim(&a, "n", permits(2)).await;
    granted(&mut two).await;
    let mut three = claim(&b, "n", permits(3)).await;
    for patience in [TRY, PATIENCE] {
        let error = three.attempt(patience).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidOptions {
                    option: "permits",
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("has 2 permits, not 3"), "{error}");
    }
    two.release().await.unwrap();
    granted(&mut three).await;
    assert!(two.attempt(TRY).await.is_err());
    let too_many = b.claim(&request("n", permits(10_001))).await.unwrap_err();
    assert!(
        matches!(
            too_many,
            Error::InvalidOptions {
                option: "permits",
                ..
            }
        ),
        "{too_many}"
    );
}
