//! The library's warnings while a command waits or runs, on standard error.

use std::{
    collections::VecDeque,
    fmt::{Debug, Write},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
};

use crate::failure::say;

/// The time for which a line is not said again: whatever is tried again fails several times a second, with the same words, or with two or
/// three in turns.
const ONCE_IN: Duration = Duration::from_secs(60);
/// The lines that are remembered.
const MOST_LINES: usize = 16;

/// From now on, each warning is a line. Only what lockkit says itself is shown: a client library may name what it was told.
pub(crate) fn show() {
    // It fails where somebody else shows them.
    let _ = tracing::subscriber::set_global_default(Warnings::default());
}

#[derive(Default)]
struct Warnings {
    said: Mutex<VecDeque<(Instant, String)>>,
}

impl Warnings {
    /// Returns whether the line has not just been said.
    fn is_news(&self, line: &str) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|(at, _)| at.elapsed() < ONCE_IN);
        let is_news = said.iter().all(|(_, said)| said != line);
        if is_news {
            said.truncate(MOST_LINES - 1);
            said.push_front((Instant::now(), line.to_owned()));
        }
        is_news
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_ours = metadata.target().starts_with("lockkit");
        // A loss is what the command ends with, and says.
        let is_news = metadata.name() != "lost";
        metadata.is_event() && *metadata.level() <= Level::WARN && is_ours && is_news
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let Line {
            message,
            fields,
            error,
        } = line;
        let line = message + &fields + &error;
        if self.is_news(&line) {
            say(&line);
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// `message, field value, …: error`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
    error: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" => write!(self.error, ": {value:?}"),
            // There is one.
            "lock" => Ok(()),
            other => write!(self.fields, ", {other} {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lockkit_warns_of_is_shown() {
        tracing::subscriber::with_default(Warnings::default(), || {
            let shown = tracing::event_enabled!(target: "lockkit_redis::connection", Level::WARN);
            let others = tracing::event_enabled!(target: "sqlx::query", Level::WARN);
            let less = tracing::event_enabled!(target: "lockkit_redis::connection", Level::INFO);
            assert_eq!((shown, others, less), (true, false, false));
        });
    }

    #[test]
    fn what_has_just_been_said_is_not_said_again() {
        let warnings = Warnings::default();
        let news = ["a", "a", "b", "b", "a"].map(|line| warnings.is_news(line));
        assert_eq!(news, [true, false, true, false, false]);
        let long_ago = Instant::now()
            .checked_sub(ONCE_IN)
            .expect("a minute since the start");
        warnings.said.lock().unwrap()[1] = (long_ago, "a".to_owned());
        assert_eq!(["a", "b"].map(|line| warnings.is_news(line)), [true, false]);
    }
}
