//! The report of a run that never was: what is in the document, and what a browser makes of the page.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use lockkit_benches::{
    report,
    results::{Machine, Results, Skipped},
};
use lockkit_conformance::measure::{Figure, Outcome, Role, Row, Scenario};
use lockkit_testbed::skipped;

/// Every scenario, in which lockkit takes twice what the floor takes and half of what the peer takes.
fn results() -> Results {
    let contestants = [
        ("redis", "by hand", Role::Floor, 1.0),
        ("redis", "lockkit", Role::Ours, 2.0),
        ("redis", "<another & more>", Role::Peer, 4.0),
        ("file", "lockkit", Role::Ours, 8.0),
    ];
    let mut rows = Vec::new();
    for scenario in Scenario::ALL {
        for (backend, contestant, role, cost) in contestants {
            let value = |round: f64, more_is_better: bool| {
                let cost = cost * round;
                if more_is_better {
                    4_000.0 / cost
                } else {
                    100.0 * cost
                }
            };
            let figures = scenario.figures().iter().map(|figure| {
                let rounds = [1.0, 2.0, 3.0].map(|round| value(round, figure.more_is_better()));
                (*figure, rounds.to_vec())
            });
            let outcome = if scenario == Scenario::Permits && backend == "file" {
                Outcome::Skipped("no | semaphores".to_owned())
            } else {
                Outcome::Measured(figures.collect())
            };
            rows.push(Row {
                scenario,
                backend: backend.to_owned(),
                contestant: contestant.to_owned(),
                role,
                outcome,
            });
        }
    }
    Results {
        date: "2026-01-02T03:04:05Z".to_owned(),
        quick: true,
        seconds: 100,
        machine: Machine::here(),
        versions: [("redis".to_owned(), "7.0".to_owned())].into(),
        skipped: vec![Skipped {
            backend: "zookeeper".to_owned(),
            why: "there is no java".to_owned(),
        }],
        far: rows
            .iter()
            .filter(|row| matches!(row.scenario, Scenario::HandOff | Scenario::Clients(16)))
            .cloned()
            .collect(),
        rows,
    }
}

/// A written report.
struct Written {
    dir: tempfile::TempDir,
}

impl Written {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let written = Self { dir };
        report::write(&results(), &written.docs(), &written.page()).unwrap();
        written
    }

    fn docs(&self) -> PathBuf {
        self.dir.path().join("docs")
    }

    fn page(&self) -> PathBuf {
        self.dir.path().join("report").join("index.html")
    }
}

#[test]
fn results_survive_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new").join("results.json");
    results().write(&path).unwrap();
    assert_eq!(Results::read(&path).unwrap(), results());
    assert!(!Results::kept(&path).exists());
    let mut next = results();
    next.quick = false;
    next.write(&path).unwrap();
    assert_eq!(Results::read(&path).unwrap(), next);
    assert_eq!(Results::read(&Results::kept(&path)).unwrap(), results());
}

#[test]
fn ratios_that_came_out_otherwise_are_told() {
    let before = results();
    let told = report::compare(&results(), &before);
    assert!(told.starts_with("58 of 58 ratios"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");

    let slow_down = |times: [f64; 3]| {
        let mut now = results();
        let mut rows = now.rows.iter_mut();
        let ours = rows.find(|row| row.scenario == Scenario::HandOff && row.role == Role::Ours);
        let Outcome::Measured(figures) = &mut ours.unwrap().outcome else {
            panic!("it was measured")
        };
        for (value, times) in figures.get_mut(&Figure::P50).unwrap().iter_mut().zip(times) {
            *value *= times;
        }
        now
    };
    let told = report::compare(&slow_down([1.1; 3]), &before);
    assert!(told.starts_with("58 of 58 ratios"), "a tenth is nothing: {told}");
    let told = report::compare(&slow_down([1.5; 3]), &before);
    assert!(told.starts_with("56 of 58 ratios"), "{told}");
    assert!(told.contains("of the 2 others, 0 are no further apart"), "{told}");
    assert!(
        told.contains("hand-off: redis · lockkit × by hand: 2.00, then 3.00 (50 %; up to 0 % by chance)"),
        "{told}"
    );
    // The same median, of rounds that are far apart.
    let told = report::compare(&slow_down([0.5, 1.5, 3.0]), &before);
    assert!(told.starts_with("56 of 58 ratios"), "{told}");
    assert!(told.contains("of the 2 others, 2 are no further apart"), "{told}");
}

#[test]
fn the_document_tells_figures_ratios_and_what_is_missing() {
    let written = Written::new();
    let text = fs::read_to_string(written.docs().join("benchmarks.md")).unwrap();
    // 400 µs at the median round, from 300 to 500 in the middle half; twice the floor, half the peer.
    let row = "| **redis · lockkit** | 400 µs ±25 % | 400 µs ±25 % | 400 ±25 % | 400 ±25 % | 2.00 | 0.50 |";
    assert!(text.contains(row), "{text}");
    let rates = "| **redis · lockkit** | 1,000 ±33 % |";
    assert!(text.contains(rates), "{text}");
    for told in [
        "| when | 2026-01-02T03:04:05Z, a quick run of 1 min 40 s |",
        "| versions | redis 7.0 |",
        "| without zookeeper | there is no java |",
        "Not measured: file · lockkit (no / semaphores).",
    ] {
        assert!(text.contains(told), "{told}: {text}");
    }
    let mut pictures = 0;
    for part in text.split("](benchmarks/").skip(1) {
        let name = part.split(')').next().unwrap();
        let svg = fs::read_to_string(written.docs().join("benchmarks").join(name)).unwrap();
        assert!(
            svg.starts_with("<svg") && svg.contains("redis · lockkit"),
            "{name}: {svg}"
        );
        pictures += 1;
    }
    assert_eq!(pictures, 16);
}

#[test]
fn every_ratio_is_a_line_of_its_own() {
    let written = Written::new();
    let text = fs::read_to_string(written.page().with_file_name("ratios.tsv")).unwrap();
    let lines: Vec<_> = text.lines().collect();
    for way in ["loopback", "network"] {
        let value = format!("{way}\thand-off\tmedian\tredis\tlockkit\t400.000000\t\t");
        assert!(lines.contains(&&*value), "{text}");
        let ratio = format!("{way}\thand-off\tmedian\tredis\tlockkit\t400.000000\tby hand\t2.000000");
        assert!(lines.contains(&&*ratio), "{text}");
    }
    let fields = lines.iter().map(|line| line.split('\t').count());
    assert!(fields.clone().all(|fields| fields == 8), "{text}");
    assert!(!text.contains("network\tuncontended"), "{text}");
}

#[test]
fn the_page_opens_filters_and_asks_nobody() {
    let Some(browser) = Browser::find() else { return };
    let _processors = crate::PROCESSORS.lock();
    let written = Written::new();

    let all = browser.open(&written, "");
    assert_eq!(all.rows("redis"), (all.rows("redis").0, 0), "nothing is hidden");
    assert!(
        all.rows("redis").0 > 20 && all.rows("file").0 > 10,
        "{}",
        all.document
    );
    assert!(all.pictured("redis").0 > 20, "{}", all.document);
    assert!(
        all.document.contains("&lt;another &amp; more&gt;"),
        "{}",
        all.document
    );

    let one = browser.open(&written, "#file");
    let (shown, hidden) = one.rows("redis");
    assert_eq!((shown, hidden), (0, all.rows("redis").0), "redis is hidden");
    assert_eq!(one.rows("file"), all.rows("file"));
    assert_eq!(one.pictured("redis"), (0, all.pictured("redis").0));
    assert_eq!(one.pictured("file"), all.pictured("file"));

    assert_eq!(
        browser.open(&written, "#nothing").rows("redis"),
        all.rows("redis")
    );

    // The saboteur: a page that does what ours must not is noticed.
    let page = fs::read_to_string(written.page()).unwrap();
    let broken = page.replace(
        "fromAddress();\n</script>",
        "fromAddress();\nnobody.knows();\n</script>",
    );
    assert_ne!(broken, page);
    fs::write(written.page(), broken).unwrap();
    assert!(!browser.run(&written, "").complaints.is_empty());
    let curious = page
        .replace("Content-Security-Policy", "x")
        .replace("</body>", "<img src=\"http://127.0.0.1:9/picture\"></body>");
    fs::write(written.page(), curious).unwrap();
    assert!(!browser.run(&written, "").requests.is_empty());
}

/// A headless Chromium.
struct Browser(&'static str);

/// The browser's view of the page.
struct Seen {
    /// After its scripts have run.
    document: String,
    complaints: Vec<String>,
    /// Its requests, except for the page itself.
    requests: Vec<String>,
}

impl Browser {
    fn find() -> Option<Self> {
        let runs = |program: &&str| {
            let mut version = Command::new(program);
            version
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            version.status().is_ok_and(|status| status.success())
        };
        let found = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find(runs);
        let missing = found.is_none().then(|| "there is no chromium".to_owned());
        (!skipped("chromium", missing)).then(|| Self(found.unwrap()))
    }

    /// Opens it, and is content with it.
    fn open(&self, written: &Written, part: &str) -> Seen {
        let seen = self.run(written, part);
        assert_eq!(seen.complaints, Vec::<String>::new());
        assert_eq!(seen.requests, Vec::<String>::new());
        seen
    }

    fn run(&self, written: &Written, part: &str) -> Seen {
        let profile = tempfile::tempdir().unwrap();
        let log = profile.path().join("net.json");
        let console = profile.path().join("console");
        let mut child = Command::new(self.0)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
            .args(["--enable-logging=stderr", "--dump-dom"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("--log-net-log={}", log.display()))
            .arg(format!("file://{}{part}", written.page().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&console).unwrap())
            .spawn()
            .unwrap();
        let mut document = String::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut document)
            .unwrap();
        let began = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < Duration::from_secs(30), "the browser ends");
            std::thread::sleep(Duration::from_millis(10));
        }
        let console = fs::read_to_string(console).unwrap();
        let complaints = console.lines().filter(|line| line.contains(":CONSOLE"));
        Seen {
            document,
            complaints: complaints.map(str::to_owned).collect(),
            requests: requests(&log),
        }
    }
}

/// Returns the page's requests, by the browser's own log. The browser's own requests are marked as of no
/// origin, and does not get out of this machine.
fn requests(log: &Path) -> Vec<String> {
    let log: serde_json::Value = serde_json::from_slice(&fs::read(log).unwrap()).unwrap();
    let events = log["events"].as_array().unwrap();
    assert!(!events.is_empty(), "the browser keeps a log");
    let asked = events.iter().map(|event| &event["params"]).filter(|params| {
        let initiator = params["initiator"].as_str();
        initiator.is_some_and(|initiator| initiator != "not an origin")
    });
    asked.map(|params| params["url"].to_string()).collect()
}

impl Seen {
    /// Counts a backend's rows that are shown, and those that are hidden.
    fn rows(&self, backend: &str) -> (usize, usize) {
        self.count("<tr ", backend, |tag| tag.contains("hidden"))
    }

    /// Counts its bars, lines and labels that are shown, and those that are faint.
    fn pictured(&self, backend: &str) -> (usize, usize) {
        let of = |tag| self.count(tag, backend, |tag| tag.contains("class=\"off\""));
        let (bars, labels) = (of("<rect "), of("<text "));
        (bars.0 + labels.0, bars.1 + labels.1)
    }

    fn count(&self, tag: &str, backend: &str, off: impl Fn(&str) -> bool) -> (usize, usize) {
        let whose = format!("data-backend=\"{backend}\"");
        let tags = self.document.split(tag).skip(1);
        let tags = tags.filter_map(|rest| rest.split('>').next());
        let (hidden, shown): (Vec<_>, Vec<_>) =
            tags.filter(|tag| tag.contains(&whose)).partition(|tag| off(tag));
        (shown.len(), hidden.len())
    }
}
