//! The spans of an acquisition and of a hold: their fields, where they hang, and that they end.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{AcquireOptions, LockClient, MemoryBackend, memory::FaultPoint};
use tracing::{
    Event, Instrument, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::DefaultGuard,
};

use crate::cancel::cancel_after;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Keeps every span. Clones share them.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    spans: Vec<Span>,
    /// Those that are entered, the innermost last.
    entered: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
struct Span {
    name: &'static str,
    fields: HashMap<&'static str, String>,
    parent: Option<u64>,
    follows: Option<u64>,
    handles: usize,
    /// The number of events within it.
    events: usize,
    taken: bool,
}

impl Spans {
    /// Returns the only span of this name since it was last asked for.
    #[track_caller]
    fn take(&self, name: &str) -> Span {
        let found = self.take_all(name);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found[0].clone()
    }

    fn take_all(&self, name: &str) -> Vec<Span> {
        let mut kept = self.0.lock().unwrap();
        let new = kept
            .spans
            .iter_mut()
            .filter(|span| span.name == name && !span.taken);
        new.map(|span| {
            span.taken = true;
            span.clone()
        })
        .collect()
    }
}

impl Span {
    fn is_over(&self) -> bool {
        self.handles == 0
    }

    #[track_caller]
    fn has(&self, field: &str, value: Option<&str>) {
        let found = self.fields.get(field).map(String::as_str);
        assert_eq!(found, value, "{field} of {self:?}");
    }
}

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut kept = self.0.lock().unwrap();
        let mut new = Span {
            name: span.metadata().name(),
            parent: kept.entered.last().copied(),
            handles: 1,
            ..Span::default()
        };
        span.record(&mut Fields(&mut new.fields));
        kept.spans.push(new);
        Id::from_u64(kept.spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        values.record(&mut Fields(&mut self.0.lock().unwrap().at(span).fields));
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.0.lock().unwrap().at(span).follows = Some(follows.into_u64());
    }

    fn event(&self, _: &Event<'_>) {
        let mut kept = self.0.lock().unwrap();
        if let Some(inner) = kept.entered.last().copied() {
            kept.at(&Id::from_u64(inner)).events += 1;
        }
    }

    fn enter(&self, span: &Id) {
        self.0.lock().unwrap().entered.push(span.into_u64());
    }

    fn exit(&self, span: &Id) {
        let left = self.0.lock().unwrap().entered.pop();
        assert_eq!(left, Some(span.into_u64()));
    }

    fn clone_span(&self, span: &Id) -> Id {
        self.0.lock().unwrap().at(span).handles += 1;
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let mut kept = self.0.lock().unwrap();
        let span = kept.at(&span);
        span.handles -= 1;
        span.handles == 0
    }
}

impl Kept {
    fn at(&mut self, span: &Id) -> &mut Span {
        &mut self.spans[usize::try_from(span.into_u64()).unwrap() - 1]
    }
}

struct Fields<'a>(&'a mut HashMap<&'static str, String>);

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

/// Records the spans of this thread.
async fn record() -> (Spans, DefaultGuard) {
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    // A span's callsite that another test's thread, without a subscriber, is the first to reach may be off for everybody until the
    // next subscriber comes.
    for _ in 0..100 {
        let spans = Spans::default();
        let recording = tracing::subscriber::set_default(spans.clone());
        lock.acquire().await.unwrap().release().await.unwrap();
        if !spans.take_all("acquire").is_empty() && !spans.take_all("hold").is_empty() {
            return (spans, recording);
        }
    }
    panic!("there are no spans");
}

#[tokio::test(start_paused = true)]
async fn a_hold_has_a_span_beside_the_one_of_its_acquisition() {
    let (spans, _recording) = record().await;
    let client = LockClient::new(MemoryBackend::new());
    let lock = client.lock("a\n").unwrap();
    let callers = tracing::info_span!("caller");
    let guard = lock.acquire().instrument(callers).await.unwrap();
    let acquired = spans.take("acquire");
    for (field, value) in [
        ("otel.kind", "client"),
        ("lockkit.backend", "memory"),
        ("lockkit.lock.name", "a\\n"),
        ("lockkit.lock.namespace", "lockkit"),
        ("lockkit.lock.mode", "exclusive"),
        ("lockkit.acquire.outcome", "granted"),
    ] {
        acquired.has(field, Some(value));
    }
    acquired.has("otel.status_code", None);
    // There is no server.
    acquired.has("server.address", None);
    assert!(acquired.is_over() && acquired.events > 0, "{acquired:?}");
    let caller = acquired.parent.expect("it is within the caller's");

    let view = guard.view();
    let token = guard.token().get().to_string();
    guard.release().await.unwrap();
    let held = spans.take("hold");
    held.has("lockkit.lock.name", Some("a\\n"));
    held.has("lockkit.hold.token", Some(&token));
    held.has("lockkit.hold.end", Some("released"));
    held.has("otel.status_code", None);
    assert!(held.is_over(), "a view keeps no span open: {held:?}");
    assert_eq!(held.parent, Some(caller));
    assert!(held.follows.is_some_and(|it| it != caller), "{held:?}");
    drop(view);
}

#[tokio::test(start_paused = true)]
async fn a_span_tells_how_its_acquisition_or_its_hold_ended() {
    let (spans, _recording) = record().await;
    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    let shown = |name, field: &str, value, error: Option<&str>| {
        let span = spans.take(name);
        span.has(field, Some(value));
        span.has("error.type", error);
        span.has("otel.status_code", error.map(|_| "ERROR"));
        assert!(span.is_over(), "{span:?}");
    };
    let outcome = |value, error| shown("acquire", "lockkit.acquire.outcome", value, error);
    let end = |value, error| shown("hold", "lockkit.hold.end", value, error);

    let guard = lock.acquire().await.unwrap();
    outcome("granted", None);
    assert!(lock.try_acquire().await.unwrap().is_none());
    outcome("timeout", None);
    assert!(cancel_after(1, lock.acquire()).await.is_none());
    outcome("cancelled", None);
    backend.fail_next(FaultPoint::Attempt, 1);
    lock.try_acquire().await.unwrap_err();
    outcome("error", Some("transient"));
    let heir = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    tokio::time::sleep(MS).await;
    guard.release().await.unwrap();
    end("released", None);
    let heir = heir.await.unwrap();
    outcome("handed_off", None);
    tokio::time::sleep(SECOND).await;
    assert!(backend.revoke("a"));
    heir.lost().await;
    end("revoked", Some("revoked"));
    drop(heir);
    tokio::time::sleep(SECOND).await;
    let short = AcquireOptions::new().ttl(SECOND).renew(false);
    let guard = lock.acquire_with(&short).await.unwrap();
    outcome("granted", None);
    tokio::time::sleep(2 * SECOND).await;
    end("expired", Some("expired"));
    drop(guard);
}
