//! The page on metrics and traces names what there is: and so do the alert rules, their tests, and the dashboard.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tracing::{
    Event, Subscriber,
    span::{Attributes, Id, Record},
};

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

/// The cells of those rows of the page's tables that begin with this, in backticks.
fn rows(beginning: &str) -> Vec<Vec<String>> {
    let page = read("docs/observability.md");
    let rows: Vec<Vec<String>> = page
        .lines()
        .filter(|line| line.starts_with(&format!("| `{beginning}")))
        .map(|line| {
            let cells = line.trim_matches('|').split(" | ");
            cells.map(|cell| cell.trim().to_owned()).collect()
        })
        .collect();
    assert!(!rows.is_empty(), "no row begins with {beginning}");
    rows
}

/// All that is in backticks.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A metric as it is registered.
#[derive(Debug, Default, PartialEq, Eq)]
struct Metric {
    kind: &'static str,
    in_seconds: bool,
    labels: BTreeSet<String>,
    /// The values of the labels but `backend`.
    values: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct Registered(Mutex<BTreeMap<String, Metric>>);

impl Registered {
    fn describe(&self, name: &KeyName, kind: &'static str, unit: Option<Unit>, text: &SharedString) {
        let mut metrics = self.0.lock().unwrap();
        let metric = metrics.entry(name.as_str().to_owned()).or_default();
        metric.kind = kind;
        metric.in_seconds = unit == Some(Unit::Seconds);
        assert!(text.ends_with('.'), "{text}");
    }

    fn register(&self, key: &Key) {
        let mut metrics = self.0.lock().unwrap();
        let metric = metrics
            .get_mut(key.name())
            .expect("it is described before it is registered");
        for label in key.labels() {
            metric.labels.insert(label.key().to_owned());
            if label.key() != "backend" {
                metric.values.insert(label.value().to_owned());
            }
        }
    }
}

impl Recorder for Registered {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, "counter", unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, "gauge", unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, "histogram", unit, &text);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.register(key);
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.register(key);
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.register(key);
        Histogram::noop()
    }
}

async fn acquire_and_release() {
    let client = lockkit::connect("memory:").await.unwrap();
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    guard.release().await.unwrap();
}

fn block_on(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work);
}

/// Every metric that a client registers, by its name.
fn registered() -> BTreeMap<String, Metric> {
    let registered = Registered::default();
    metrics::with_local_recorder(&registered, || block_on(acquire_and_release()));
    registered.0.into_inner().unwrap()
}

#[test]
fn the_page_lists_every_metric_as_it_is() {
    let registered = registered();
    let mut listed = BTreeSet::new();
    for row in rows("lockkit_") {
        let [name, kind, unit, labels, meaning] = &row[..] else {
            panic!("{row:?} has other columns");
        };
        let name = name.trim_matches('`');
        let metric = registered
            .get(name)
            .unwrap_or_else(|| panic!("there is no {name}"));
        assert_eq!(*kind, metric.kind, "{name}");
        assert_eq!(unit == "seconds", metric.in_seconds, "{name} is in {unit}");
        assert_eq!(quoted(labels), metric.labels, "{name}");
        // Those of a histogram that has the outcomes of a counter are with the counter.
        let told = if name == "lockkit_wait_seconds" {
            let counter = rows("lockkit_acquisitions_total").remove(0);
            quoted(&counter[4])
        } else {
            quoted(meaning)
        };
        let untold: Vec<_> = metric.values.difference(&told).collect();
        assert!(untold.is_empty(), "{name} does not say {untold:?}");
        assert!(listed.insert(name.to_owned()), "{name} is listed twice");
    }
    let all: BTreeSet<String> = registered.into_keys().collect();
    assert_eq!(listed, all);
}

/// The names of metrics in a text, without what a histogram's series have at their end.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let registered = registered();
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("lockkit_") {
        let name: String = text[at..]
            .chars()
            .take_while(|c| c.is_ascii_lowercase() || *c == '_')
            .collect();
        let of_histogram = ["_bucket", "_count", "_sum"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .filter(|base| {
                registered
                    .get(*base)
                    .is_some_and(|metric| metric.kind == "histogram")
            });
        let metric = of_histogram.unwrap_or(&name);
        let known = registered
            .get(metric)
            .unwrap_or_else(|| panic!("there is no {metric}"));
        let is_whole = known.kind != "histogram" || of_histogram.is_some();
        assert!(
            is_whole,
            "{metric} is a histogram, and has no series of that name"
        );
        found.insert(metric.to_owned());
    }
    found
}

#[test]
fn the_dashboard_shows_every_metric_and_no_other() {
    let dashboard: serde_json::Value = serde_json::from_str(&read("docs/monitoring/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let queries: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(queries.len() >= panels.len(), "{queries:?}");
    for query in &queries {
        assert!(!metrics_in(query).is_empty(), "{query}");
        for variable in [r#"job=~"$job""#, r#"backend=~"$backend""#] {
            assert!(query.contains(variable), "{query}");
        }
    }
    let shown = metrics_in(&queries.join("\n"));
    let all: BTreeSet<String> = registered().into_keys().collect();
    assert_eq!(shown, all);
    metrics_in(&dashboard["templating"].to_string());
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}

#[test]
fn every_alert_is_explained_and_is_seen_to_fire() {
    let rules = read("docs/monitoring/alerts.yml");
    let tests = read("docs/monitoring/alerts_test.yml");
    metrics_in(&rules);
    metrics_in(&tests);
    let mut alerts = BTreeMap::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap();
        let (_, severity) = rule.split_once("severity: ").unwrap();
        alerts.insert(name.to_owned(), severity.lines().next().unwrap().to_owned());
        // Each test of an alert that does not fire ends with `[]`.
        let of_it = tests.split("- eval_time: ").filter(|test| {
            let mut lines = test.lines().skip(1).map(str::trim);
            lines.next() == Some(&format!("alertname: {name}"))
        });
        let (quiet, fires): (Vec<&str>, Vec<&str>) = of_it.partition(|test| test.contains("exp_alerts: []"));
        assert!(!fires.is_empty(), "no test has {name} fire");
        assert!(!quiet.is_empty(), "no test has {name} not fire");
    }
    let explained = rows("Lockkit").into_iter().map(|row| {
        let name = row[0].trim_matches('`').to_owned();
        (name, row[1].clone())
    });
    assert_eq!(explained.collect::<BTreeMap<_, _>>(), alerts);
}

/// Keeps the fields of the driver's spans.
#[derive(Clone, Default)]
struct Fields(Arc<Mutex<BTreeSet<(String, String)>>>);

impl Subscriber for Fields {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "lockkit_core::spans"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let span = span.metadata();
        let fields = span.fields().iter();
        let fields = fields.map(|field| (field.name().to_owned(), span.name().to_owned()));
        self.0.lock().unwrap().extend(fields);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn the_page_lists_every_field_of_the_spans() {
    // A span's callsite that another test's thread, without a subscriber, is the first to reach may be off for everybody until the
    // next subscriber comes.
    let mut attempts = (0..100).map(|_| {
        let fields = Fields::default();
        tracing::subscriber::with_default(fields.clone(), || block_on(acquire_and_release()));
        fields.0.lock().unwrap().clone()
    });
    let is_whole = |fields: &BTreeSet<(String, String)>| {
        let has = |name: &str| fields.iter().any(|(_, span)| span == name);
        has("acquire") && has("hold")
    };
    let fields = attempts.find(is_whole).expect("both spans");
    let mut listed = BTreeSet::new();
    for beginning in ["lockkit.", "server.", "error.", "otel."] {
        for row in rows(beginning) {
            let spans = if row[1] == "both" {
                ["acquire", "hold"].map(str::to_owned).into()
            } else {
                quoted(&row[1])
            };
            let field = row[0].trim_matches('`');
            listed.extend(spans.into_iter().map(|span| (field.to_owned(), span)));
        }
    }
    assert_eq!(listed, fields);
}
