use std::{
    ops::Deref,
    sync::{Mutex, OnceLock, PoisonError},
};

/// A server that the tests of a process share, in a static: the first test that uses it starts it.
///
/// Where the start fails, that test fails with the cause, and the next one tries again. A `LazyLock` would fail all
/// later tests, and say of each that it is poisoned.
#[derive(Debug)]
pub struct Shared<T> {
    start: fn() -> T,
    starting: Mutex<()>,
    server: OnceLock<T>,
}

impl<T> Shared<T> {
    /// A server that `start` starts. It panics if there can be none.
    pub const fn new(start: fn() -> T) -> Self {
        Self {
            start,
            starting: Mutex::new(()),
            server: OnceLock::new(),
        }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        if let Some(server) = self.server.get() {
            return server;
        }
        // One start at a time. A panic in an earlier one has left nothing half done.
        let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        self.server.get_or_init(self.start)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic,
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use super::Shared;

    #[test]
    fn a_start_that_fails_is_tried_again() {
        static STARTS: AtomicUsize = AtomicUsize::new(0);
        static SERVER: Shared<usize> = Shared::new(|| {
            let before = STARTS.fetch_add(1, Ordering::Relaxed);
            assert!(before > 0, "the first one fails");
            before
        });
        assert!(panic::catch_unwind(|| *SERVER).is_err());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(*SERVER, 1));
            }
        });
        assert_eq!(STARTS.load(Ordering::Relaxed), 2);
    }
}
