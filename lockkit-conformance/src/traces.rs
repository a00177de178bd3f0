//! Everything that is traced, as text, to be searched for what must be in it and what must not.

use std::{
    fmt::{self, Write as _},
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use lockkit_core::spi::chain;
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::NoSubscriber,
};

/// A subscriber that keeps the fields of every span and event, of every level, as text. Clones add to the same text.
///
/// Each record is a line. That of an event begins with its level.
#[derive(Clone, Debug)]
pub struct Traces(Arc<Mutex<String>>);

/// Another subscriber. While there is but one, `tracing` decides whether an event is wanted by the subscriber of the thread that first
/// comes by it, and remembers that for all: a test without any would switch off an event that another test waits for.
static BESIDE: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::default()));

impl Default for Traces {
    fn default() -> Self {
        LazyLock::force(&BESIDE);
        Self(Arc::default())
    }
}

impl Traces {
    /// Returns all that was traced so far.
    pub fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, record: impl FnOnce(&mut Fields)) {
        let mut fields = Fields(String::new());
        record(&mut fields);
        let mut text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        text.push_str(&fields.0);
        text.push('\n');
    }
}

impl Subscriber for Traces {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.add(|fields| span.record(fields));
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        self.add(|fields| values.record(fields));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.add(|fields| {
            fields.0 = format!("{} ", event.metadata().level());
            event.record(fields);
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = write!(self.0, "{field}={value:?} ");
    }

    /// Unescaped, and with its causes.
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let _ = write!(self.0, "{field}={} {value:?} ", chain(value));
    }
}
