//! The distance to the server.

use std::time::Duration;

use lockkit_core::spi::Mutex;
use tokio::time::Instant;

/// The length of a round trip from which on waiting for a reply costs more than one more request.
const FAR: Duration = Duration::from_millis(1);
/// The number of replies that tell: on a busy machine most are late, but hardly all of this many.
const SAMPLE: u32 = 64;

/// The fastest of the latest replies. A slow one tells more of others' work than of the distance.
#[derive(Debug, Default)]
pub(crate) struct Distance(Mutex<Replies>);

#[derive(Debug)]
struct Replies {
    /// The fastest of the current sample, which has so many replies.
    fastest: Duration,
    count: u32,
    /// The fastest of the sample before.
    before: Duration,
}

impl Default for Replies {
    fn default() -> Self {
        Self {
            fastest: Duration::MAX,
            count: 0,
            before: Duration::ZERO,
        }
    }
}

impl Distance {
    /// Times a request, which has to be one that only reads: with any other the server may wait for its disk.
    pub(crate) async fn measure<F: Future>(&self, request: F) -> F::Output {
        let sent = Instant::now();
        let reply = request.await;
        self.note(sent.elapsed());
        reply
    }

    fn note(&self, took: Duration) {
        let mut replies = self.0.lock();
        replies.fastest = replies.fastest.min(took);
        replies.count += 1;
        if replies.count == SAMPLE {
            *replies = Replies {
                before: replies.fastest,
                ..Replies::default()
            };
        }
    }

    /// The server is known to be far away.
    pub(crate) fn is_far(&self) -> bool {
        let replies = self.0.lock();
        replies.before.min(replies.fastest) >= FAR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_many_replies_tells_the_distance() {
        let distance = Distance::default();
        let is_far_after = |replies: u32, took| {
            for _ in 0..replies {
                distance.note(took);
            }
            distance.is_far()
        };
        assert!(!is_far_after(SAMPLE - 1, FAR), "it is not known yet");
        assert!(is_far_after(1, FAR));
        assert!(is_far_after(3 * SAMPLE, FAR * 5));
        assert!(!is_far_after(1, FAR / 10), "a busy server");
        assert!(!is_far_after(SAMPLE, FAR * 5));
        assert!(is_far_after(SAMPLE, FAR * 5), "a longer way");
        assert!(!is_far_after(1, Duration::ZERO));
    }
}
