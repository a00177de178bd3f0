//! The listing of what is held, as a stream.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{Stream, future::BoxFuture};

use crate::{
    ListedLock, Result,
    driver::core::Core,
    spi::{Lister, require_runtime},
};

/// The locks and semaphores that somebody holds: a stream, made by [`LockClient::list`](crate::LockClient::list).
///
/// It asks the server for one page at a time, when the page before has been taken out of it, and holds that page alone. It rests
/// between pages for as long as they take, so that others have the server to themselves for half of the time. Take the locks out with
/// [`next`](Self::next), or with the adapters of a crate such as `futures`, and take as much time for that as you like: no time counts in which
/// nobody polls it.
///
/// Each lock is shown once, in no certain order, as it was when its page was read. The pages are read one after the other: a
/// lock that is held throughout is shown, one that is granted or released meanwhile may be shown or not.
///
/// It ends after an error. Dropping it ends it.
#[must_use = "it asks for nothing until it is polled"]
pub struct LockList {
    core: Arc<Core>,
    page: std::vec::IntoIter<ListedLock>,
    rest: Rest,
    /// The time that pages took since it last rested.
    worked: Duration,
}

/// The pages that are not there yet.
enum Rest {
    Idle(Box<dyn Lister>),
    Asked(BoxFuture<'static, Asked>),
    None,
}

/// A page that was asked for, and the time that it took.
struct Asked {
    lister: Box<dyn Lister>,
    page: Result<Option<Vec<ListedLock>>>,
    took: Duration,
}

/// The time after which a list rests. Shorter rests would be longer than asked for, as timers are.
const RESTS_AFTER: Duration = Duration::from_millis(2);

impl LockList {
    pub(crate) fn new(core: Arc<Core>, lister: Box<dyn Lister>) -> Self {
        Self {
            core,
            page: Vec::new().into_iter(),
            rest: Rest::Idle(lister),
            worked: Duration::ZERO,
        }
    }

    /// Returns the next lock, `None` after the last one and after an error.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) if the server cannot tell, or if the runtime that the client lives on has ended;
    /// [`Error::Closed`](crate::Error::Closed).
    ///
    /// # Cancel safety
    /// May be dropped at any await. The next call goes on, and leaves nothing out.
    pub async fn next(&mut self) -> Option<Result<ListedLock>> {
        poll_fn(|cx| self.poll_lock(cx)).await
    }

    fn poll_lock(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<ListedLock>>> {
        loop {
            if let Some(lock) = self.page.next() {
                return Poll::Ready(Some(Ok(lock)));
            }
            match std::mem::replace(&mut self.rest, Rest::None) {
                Rest::None => return Poll::Ready(None),
                Rest::Idle(mut lister) => {
                    let core = self.core.clone();
                    let worked = self.worked;
                    if worked >= RESTS_AFTER {
                        self.worked = Duration::ZERO;
                    }
                    self.rest = Rest::Asked(Box::pin(async move {
                        // For half of the time, others have the server to themselves.
                        if worked >= RESTS_AFTER && require_runtime(core.info.name, "list").is_ok() {
                            tokio::time::sleep(worked).await;
                        }
                        let mut took = Duration::ZERO;
                        let page = core.page(&mut *lister, &mut took).await;
                        Asked { lister, page, took }
                    }));
                }
                Rest::Asked(mut asked) => {
                    // Polled after the end of their runtime, its timers would panic.
                    self.core.is_alive("list")?;
                    let reply = asked.as_mut().poll(cx);
                    if reply.is_pending() {
                        // It goes on where it is.
                        self.rest = Rest::Asked(asked);
                    }
                    let Asked { lister, page, took } = ready!(reply);
                    self.worked += took;
                    if let Some(page) = page? {
                        self.page = page.into_iter();
                        self.rest = Rest::Idle(lister);
                    }
                }
            }
        }
    }
}

impl Stream for LockList {
    type Item = Result<ListedLock>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_lock(cx)
    }
}

impl fmt::Debug for LockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockList")
            .field("backend", &self.core.info.name)
            .field("is_over", &matches!(self.rest, Rest::None))
            .finish_non_exhaustive()
    }
}
