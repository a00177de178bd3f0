//! A thread that writes lines, for threads that must not be held up: a pipe may be full, and its reader may have stopped.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The lines that wait to be written, at most. A reader that is further behind misses some.
const MOST_WAITING: usize = 64;
/// The time that the last lines get to be written. Far longer than it takes, unless nobody reads.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Says lines, in order and without waiting.
pub(crate) struct Voice {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Something has been said, or written.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<String>,
    dropped: u64,
    is_writing: bool,
}

impl Voice {
    /// One whose lines go to `output`.
    ///
    /// # Errors
    /// If the system has no thread for it.
    pub(crate) fn new(mut output: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let told = Arc::clone(&shared);
        let thread = thread::Builder::new().name("stderr".to_owned());
        thread.stack_size(crate::STACK).spawn(move || {
            loop {
                let line = told.next();
                // Where nobody reads, there is nobody to tell.
                let _ = output.write_all(line.as_bytes());
            }
        })?;
        Ok(Self { shared })
    }

    /// Says a line, which ends as lines do. If too many wait to be written, the oldest is counted instead, and the count said.
    pub(crate) fn say(&self, line: String) {
        let mut state = self.shared.lock();
        if state.waiting.len() == MOST_WAITING {
            state.waiting.pop_front();
            state.dropped += 1;
        }
        state.waiting.push_back(line);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until all is written, or nobody seems to read it.
    pub(crate) fn finish(&self) {
        let deadline = Instant::now() + LAST_WORDS;
        let mut state = self.shared.lock();
        while state.is_writing || !state.waiting.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next line to write, as soon as there is one. The last one has been written.
    fn next(&self) -> String {
        let mut state = self.lock();
        state.is_writing = false;
        self.changed.notify_all();
        loop {
            let dropped = std::mem::take(&mut state.dropped);
            let line = if dropped > 0 {
                Some(format!(
                    "lockkit: {dropped} lines are missing here, since nobody read\n"
                ))
            } else {
                state.waiting.pop_front()
            };
            if let Some(line) = line {
                state.is_writing = true;
                return line;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn who_says_too_much_to_nobody_does_not_wait() {
        let (reader, writer) = io::pipe().unwrap();
        let voice = Voice::new(writer).unwrap();
        // More than a pipe takes, and a queue that is full besides.
        let long = "x".repeat(1 << 16);
        for _ in 0..3 * MOST_WAITING {
            voice.say(format!("{long}\n"));
        }
        voice.say("after\n".to_owned());
        // Those that were left out before the thread wrote anything are said before the others.
        let (mut missing, mut written, mut in_a_row) = (0, 0, 0);
        let said = BufReader::new(reader).lines().map(Result::unwrap);
        for line in said.take_while(|line| line != "after") {
            if line.starts_with('x') {
                written += 1;
                in_a_row += 1;
            } else {
                assert!(
                    line.ends_with("lines are missing here, since nobody read"),
                    "{line}"
                );
                missing += line.split(' ').nth(1).unwrap().parse::<usize>().unwrap();
                in_a_row = 0;
            }
        }
        assert_eq!(written + missing, 3 * MOST_WAITING, "{missing} were missing");
        assert!(
            (MOST_WAITING..=2 * MOST_WAITING + 1).contains(&missing),
            "{missing}"
        );
        assert!(
            in_a_row >= MOST_WAITING - 1,
            "the last ones are there: {in_a_row}"
        );
    }

    #[test]
    fn all_is_said_before_it_is_finished() {
        let (reader, writer) = io::pipe().unwrap();
        let voice = Voice::new(writer).unwrap();
        voice.say("one\n".to_owned());
        voice.say("two\n".to_owned());
        voice.finish();
        let said: Vec<_> = BufReader::new(reader)
            .lines()
            .take(2)
            .map(Result::unwrap)
            .collect();
        assert_eq!(said, ["one", "two"]);
    }
}
