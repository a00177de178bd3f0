//! The driver's spans: `acquire` from the call to its outcome, and `hold` from the grant to the end of the hold.
//!
//! A field has the name that OpenTelemetry has for such an attribute, and else one in its style below `lockkit.`. The fields
//! `otel.*` are for `tracing-opentelemetry`. Without a subscriber that asks for them, a span is one look at a static.
//!
//! `hold` is a sibling of `acquire` and follows from it. The guard does not enter it: what a task does while it holds a lock is
//! in the spans of that task.

use tracing::{
    Span,
    field::{Empty, display},
};

use crate::{
    Error,
    driver::{hold::Hold, lock_queue::LockQueue, observe::End},
    name::Shown,
    spi::Mode,
};

/// The span of a hold, if anybody asks for it. It is not in place, since a hold is kept for as long as a view of it.
pub(super) type HoldSpan = Option<Box<Span>>;

macro_rules! span {
    ($name:literal, $kind:literal, $queue:expr, $($more:tt)*) => {{
        let queue: &LockQueue = $queue;
        let span = tracing::debug_span!(
            // A target of its own, so that spans can be asked for without the events of that level.
            target: "lockkit_core::spans",
            $name,
            otel.kind = $kind,
            otel.status_code = Empty,
            "error.type" = Empty,
            server.address = Empty,
            server.port = Empty,
            lockkit.backend = queue.backend(),
            lockkit.lock.name = %Shown(queue.name().as_str()),
            lockkit.lock.namespace = %Shown(queue.id.namespace()),
            lockkit.lock.mode = mode(queue.mode),
            $($more)*
        );
        if !span.is_disabled() {
            Server::new(queue.id.server()).record(&span);
        }
        span
    }};
}

pub(super) fn acquire(queue: &LockQueue) -> Span {
    span!("acquire", "client", queue, lockkit.acquire.outcome = Empty)
}

pub(super) fn hold(hold: &Hold, acquire: &Span) -> HoldSpan {
    let span = span!(
        "hold",
        "internal",
        hold.queue(),
        lockkit.hold.token = hold.token.get(),
        lockkit.hold.end = Empty
    );
    if span.is_disabled() {
        return None;
    }
    span.follows_from(acquire);
    Some(Box::new(span))
}

/// Notes the failure of an acquisition. A lock that is taken is none.
pub(super) fn failed(span: &Span, err: &Error) {
    let kind = match err {
        Error::Lost { .. } => "lost",
        Error::Closed => "closed",
        Error::Unsupported { .. } => "unsupported",
        Error::InvalidOptions { .. } => "invalid_options",
        Error::Backend { transient: true, .. } => "transient",
        Error::Backend { transient: false, .. } => "permanent",
        // The value that OpenTelemetry has for all others.
        _ => "_OTHER",
    };
    record(span, "error.type", kind);
    record(span, "otel.status_code", "ERROR");
}

/// Notes the end of a hold.
pub(super) fn ended(span: &Span, end: End) {
    record(span, "lockkit.hold.end", end.label());
    if end != End::Released {
        record(span, "error.type", end.label());
        record(span, "otel.status_code", "ERROR");
    }
}

/// Records a field. A span that nobody sees is not searched for it.
pub(super) fn record(span: &Span, field: &'static str, value: &'static str) {
    if !span.is_disabled() {
        span.record(field, value);
    }
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits(_) => "permits",
    }
}

/// The parts of a backend's canonical address, `scheme://host:port,host:port/database`, that OpenTelemetry has names for. A
/// backend without a server has none.
#[derive(Debug, PartialEq, Eq)]
struct Server<'a> {
    /// The host, or all hosts with their ports.
    address: Option<&'a str>,
    /// The port of a single host.
    port: Option<u16>,
}

impl<'a> Server<'a> {
    fn new(url: &'a str) -> Self {
        let after_scheme = url.split_once("://").map_or("", |(_, rest)| rest);
        let hosts = after_scheme.split(['/', '?']).next().unwrap_or_default();
        let one = (!hosts.contains(',')).then_some(hosts);
        let with_port = one.and_then(|one| one.rsplit_once(':'));
        let with_port = with_port.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (host, port) = with_port.map_or((hosts, None), |(host, port)| (host, Some(port)));
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let address = if one.is_some() { bare.unwrap_or(host) } else { host };
        Self {
            address: Some(address).filter(|address| !address.is_empty()),
            port,
        }
    }

    fn record(&self, span: &Span) {
        if let Some(address) = self.address {
            span.record("server.address", display(Shown(address)));
        }
        if let Some(port) = self.port {
            span.record("server.port", port);
        }
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart_for_opentelemetry() {
        for (url, address, port) in [
            ("redis://redis.example:7000/3", Some("redis.example"), Some(7_000)),
            ("mysql://[::1]:3306/a", Some("::1"), Some(3_306)),
            ("mysql://[::1]/a", Some("::1"), None),
            (
                "redis://s1:26379,s2:5000/0?sentinel=main",
                Some("s1:26379,s2:5000"),
                None,
            ),
            ("redlock://[::1]:1,[::1]:2", Some("[::1]:1,[::1]:2"), None),
            ("zk://a:2181,b:2181/chroot", Some("a:2181,b:2181"), None),
            ("file:///var/lib/locks", None, None),
            ("memory:7", None, None),
        ] {
            assert_eq!(Server::new(url), Server { address, port }, "{url}");
        }
    }
}
