//! How far the server is.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// With so long a way there and back, to wait for a reply costs more than to ask for one more.
const FAR: Duration = Duration::from_millis(1);
/// So many answers tell: on a busy machine most are late, and hardly all.
const MANY: u32 = 64;

/// The fastest of the latest answers. A slow one tells more of the work of others than of the way.
#[derive(Debug, Default)]
pub(crate) struct Distance(Mutex<Answers>);

#[derive(Debug)]
struct Answers {
    /// Of so many, the fastest.
    fastest: Duration,
    many: u32,
    /// That of the many before these.
    before: Duration,
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            fastest: Duration::MAX,
            many: 0,
            before: Duration::ZERO,
        }
    }
}

impl Distance {
    /// What comes of a request that only reads: the server may wait for its disk with any other.
    pub(crate) async fn of<F: Future>(&self, request: F) -> F::Output {
        let asked = Instant::now();
        let answer = request.await;
        self.answered(asked.elapsed());
        answer
    }

    /// An answer has come after so long.
    fn answered(&self, after: Duration) {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answers.fastest = answers.fastest.min(after);
        answers.many += 1;
        if answers.many == MANY {
            *answers = Answers {
                before: answers.fastest,
                ..Answers::default()
            };
        }
    }

    /// The way is known to be long.
    pub(crate) fn is_far(&self) -> bool {
        let answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answers.before.min(answers.fastest) >= FAR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_many_answers_says_how_far_it_is() {
        let distance = Distance::default();
        let answered = |many: u32, after| {
            for _ in 0..many {
                distance.answered(after);
            }
            distance.is_far()
        };
        assert!(!answered(MANY - 1, FAR), "it is not known yet");
        assert!(answered(1, FAR));
        assert!(answered(3 * MANY, FAR * 5));
        assert!(!answered(1, FAR / 10), "a busy server");
        assert!(!answered(MANY, FAR * 5));
        assert!(answered(MANY, FAR * 5), "a longer way");
        assert!(!answered(1, Duration::ZERO));
    }
}
