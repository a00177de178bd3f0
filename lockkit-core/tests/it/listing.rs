//! Lists: what the driver does between pages.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::FutureExt;
use lockkit_core::{
    Error, FencingToken, Holder, ListedLock, LockClient, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Lister},
};
use tokio::time::Instant;

const PAGE_TAKES: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Lists so many pages, with a lock each, and then fails if that is asked for.
#[derive(Clone, Debug)]
struct Slow {
    pages: u64,
    fails: bool,
    /// The requests that a page takes, one after the other.
    requests: u32,
}

#[async_trait]
impl Backend for Slow {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new("slow", "slow:");
        info.capabilities.list = true;
        info
    }

    async fn claim(&self, _: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Err(Error::unsupported("slow", "locks"))
    }

    async fn inspect(&self, _: &LockName, _: LockKind) -> Result<LockState> {
        Ok(LockState::default())
    }

    fn list(&self, _: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(self.clone()))
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Lister for Slow {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        for _ in 0..self.requests {
            tokio::time::sleep(PAGE_TAKES).await;
        }
        if self.pages == 0 {
            return if self.fails {
                Err(Error::transient("slow", "list", "as was asked for"))
            } else {
                Ok(None)
            };
        }
        let holder = Holder::new(FencingToken::new(self.pages), None, None);
        let name = LockName::new(self.pages.to_string())?;
        self.pages -= 1;
        let state = LockState::new(vec![holder], None);
        Ok(Some(vec![ListedLock::new(name, LockKind::Lock, state)]))
    }
}

fn client(pages: u64, fails: bool) -> LockClient {
    let requests = 1;
    LockClient::new(Slow {
        pages,
        fails,
        requests,
    })
}

#[tokio::test(start_paused = true)]
async fn a_list_rests_for_as_long_as_it_works() {
    let client = client(4, false);
    let began = Instant::now();
    let mut list = client.list("").unwrap();
    for page in 1..=4 {
        list.next().await.unwrap().unwrap();
        // One page after the other, with a rest before each but the first.
        let (least, most) = (PAGE_TAKES * (2 * page - 1), PAGE_TAKES * (2 * page));
        let took = began.elapsed();
        assert!(
            least <= took && took < most,
            "page {page} is there after {took:?}"
        );
    }
    assert!(list.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_next_that_is_dropped_leaves_nothing_out() {
    let client = client(3, true);
    let mut list = client.list("").unwrap();
    let mut found = Vec::new();
    let error = loop {
        // Dropped when it was polled for the first time, and again a moment later.
        for _ in 0..2 {
            {
                let mut next = pin!(list.next());
                let polled = poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx))).await;
                assert!(polled.is_pending());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        match list.next().await {
            Some(Ok(lock)) => found.push(lock.name.as_str().to_owned()),
            Some(Err(error)) => break error,
            None => panic!("the error is missing"),
        }
    };
    assert_eq!(found, ["3", "2", "1"]);
    assert!(error.is_transient(), "{error:?}");
    assert!(list.next().await.is_none(), "it is over after an error");
}

/// Who reads it is at work on what it was shown, and comes back now and then.
#[tokio::test(start_paused = true)]
async fn a_page_whose_caller_is_away_is_not_late() {
    let (pages, fails, requests) = (3, false, 20);
    let client = LockClient::new(Slow {
        pages,
        fails,
        requests,
    });
    let mut list = client.list("").unwrap();
    for left in (0..=pages).rev() {
        for _ in 0..15 {
            assert!(list.next().now_or_never().is_none(), "it is there already");
            tokio::time::sleep(MINUTE).await;
        }
        let lock = list.next().await.transpose().unwrap();
        assert_eq!(lock.is_some(), left > 0, "{lock:?}, with {left} to come");
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_rests_for_no_time_that_its_caller_was_away() {
    let client = client(2, false);
    let mut list = client.list("").unwrap();
    assert!(list.next().now_or_never().is_none(), "it is there already");
    tokio::time::sleep(MINUTE).await;
    list.next().await.unwrap().unwrap();
    let back = Instant::now();
    list.next().await.unwrap().unwrap();
    assert!(back.elapsed() < SECOND, "it rests for {:?}", back.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_page_that_does_not_come_is_an_error() {
    let (pages, fails, requests) = (3, false, 10_000);
    let client = LockClient::new(Slow {
        pages,
        fails,
        requests,
    });
    let began = Instant::now();
    let mut list = client.list("").unwrap();
    let error = list.next().await.unwrap().unwrap_err();
    let took = began.elapsed();
    assert!(error.is_transient(), "{error}");
    assert!(took >= 5 * SECOND && took < 6 * SECOND, "{took:?}");
    assert!(list.next().await.is_none(), "it is over after an error");
}

/// Its timers are those of that runtime.
#[test]
fn a_list_that_outlives_its_runtime_says_so() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    // Dropped while it waits for its first page, and while it rests before its second.
    for taken in 0..2 {
        let own = runtime();
        let mut list = own.block_on(async {
            let mut list = client(3, false).list("").unwrap();
            for _ in 0..taken {
                list.next().await.unwrap().unwrap();
            }
            // One poll: a bound in time may pass with the page's own.
            let begun = list.next().now_or_never();
            assert!(begun.is_none(), "it is there already");
            list
        });
        drop(own);
        let other = runtime();
        let error = other.block_on(list.next()).unwrap().unwrap_err();
        let text = lockkit_core::spi::chain(&error);
        assert!(
            !error.is_transient() && text.ends_with("the runtime that this client lives on has ended"),
            "{text}"
        );
        assert!(other.block_on(list.next()).is_none(), "it is over");
    }
}
