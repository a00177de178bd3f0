//! From a run's results to pictures and tables: a document for the repository, and a page for a browser.

mod chart;
mod document;
mod page;
mod steady;

use std::{fs, io, path::Path};

use lockkit_conformance::measure::{Figure, Outcome, Role, Row, Scenario};

pub use self::steady::compare;
use crate::results::Results;

/// Writes `benchmarks.md` into `docs`, with its pictures in `docs/benchmarks`, and the page to `page`.
///
/// # Errors
/// If something cannot be drawn or written.
pub fn write(results: &Results, docs: &Path, page: &Path) -> io::Result<()> {
    let pictures = docs.join("benchmarks");
    fs::create_dir_all(&pictures)?;
    let sections = sections(results);
    for section in &sections {
        let drawn = section.draw(results).map_err(io::Error::other)?;
        fs::write(pictures.join(format!("{}.svg", section.id)), drawn)?;
    }
    fs::write(docs.join("benchmarks.md"), document::render(results, &sections))?;
    if let Some(dir) = page.parent() {
        fs::create_dir_all(dir)?;
    }
    let rendered = page::render(results, &sections).map_err(io::Error::other)?;
    fs::write(page, rendered)
}

/// One question, the scenarios that answer it, and the one that is drawn.
struct Section {
    id: &'static str,
    title: &'static str,
    about: &'static str,
    scenarios: Vec<Scenario>,
    picture: Picture,
}

enum Picture {
    /// A bar per contestant.
    Bars(Scenario),
    /// A line per lockkit backend, over the number of tasks.
    Lines(Vec<(f64, Scenario)>),
}

impl Section {
    fn draw(&self, results: &Results) -> Result<String, chart::CannotDraw> {
        match &self.picture {
            Picture::Bars(scenario) => chart::bars(results, *scenario),
            Picture::Lines(points) => chart::lines(results, points),
        }
    }
}

/// What is told, in the order in which it is told; without what nobody was measured in.
fn sections(results: &Results) -> Vec<Section> {
    let measured = |scenario: Scenario| {
        let mut rows = results.of(scenario);
        rows.any(|row| row.value(scenario.figure()).is_some())
    };
    let most_held = [10_000, 1_000, 10]
        .map(Scenario::Held)
        .into_iter()
        .find(|it| measured(*it));
    let bars = |scenario| Picture::Bars(scenario);
    let tasks = [1, 4, 16, 64];
    let all = [
        Section {
            id: "uncontended",
            title: "A lock that nobody else wants",
            about: "One task acquires and releases. What a lock costs when there is no conflict.",
            scenarios: vec![Scenario::Uncontended],
            picture: bars(Scenario::Uncontended),
        },
        Section {
            id: "own-names",
            title: "Many locks at once",
            about: "So many tasks of one client, each on a name of its own: how far one client goes.",
            scenarios: tasks.map(Scenario::OwnNames).to_vec(),
            picture: Picture::Lines(tasks.map(|n| (f64::from(n), Scenario::OwnNames(n))).to_vec()),
        },
        Section {
            id: "tasks",
            title: "One lock, many tasks of one process",
            about: "So many tasks of one client on one name. lockkit hands the lock on within the process up to 32 times in a \
                    row, each time with a fresh fencing token, and then lets other processes in; where `local_handoffs` says so, \
                    up to 1,000 times. What others wait for that is below. ZooKeeper's strict order rules it out.",
            scenarios: [2, 16, 100].map(Scenario::Tasks).to_vec(),
            picture: bars(Scenario::Tasks(16)),
        },
        Section {
            id: "clients",
            title: "One lock, many clients",
            about: "So many clients on one name, in two processes or in four. A client that polls takes the lock again and \
                    again, and looks fast: see the longest wait, and Jain's index, which is 1 if all had equal shares and 1/n if \
                    one had everything. `GET_LOCK` and ZooKeeper's plain recipe are fair, and faster: they have no tokens and no \
                    lease to keep.",
            scenarios: [2, 16, 100].map(Scenario::Clients).to_vec(),
            picture: bars(Scenario::Clients(16)),
        },
        Section {
            id: "beside",
            title: "What a second process waits",
            about: "One more client, on the name that 16 tasks of another client contend for: what local hand-off costs others.",
            scenarios: vec![Scenario::Beside(16)],
            picture: bars(Scenario::Beside(16)),
        },
        Section {
            id: "hand-off",
            title: "Hand-off",
            about: "From the call that releases to the grant of another client, which has slept for 35 ms.",
            scenarios: vec![Scenario::HandOff],
            picture: bars(Scenario::HandOff),
        },
        Section {
            id: "shared",
            title: "Shared mode",
            about: "16 tasks of four clients on one name, of which so many per cent ask for it exclusively.",
            scenarios: [0, 5, 50].map(Scenario::Shared).to_vec(),
            picture: bars(Scenario::Shared(5)),
        },
        Section {
            id: "permits",
            title: "Semaphores",
            about: "16 tasks of four clients on a semaphore of four permits.",
            scenarios: vec![Scenario::Permits],
            picture: bars(Scenario::Permits),
        },
        Section {
            id: "held",
            title: "Locks that are kept",
            about: "One client, in a process of its own, holds so many locks and does nothing but renew them. Processor time is \
                    given for a ttl of 30 s, of which a third passes between renewals. Round trips are the pieces of \
                    traffic that left the client while every lock was renewed once.",
            scenarios: [10, 1_000, 10_000].map(Scenario::Held).to_vec(),
            picture: bars(most_held.unwrap_or(Scenario::Held(10))),
        },
        Section {
            id: "recovery",
            title: "When the holder dies",
            about: "A process that holds the lock with a ttl of 4 s is killed (−9) right after its grant: how long until \
                    a client that waits is granted. Where a lease has to run out, that is the lease; a connection or a file \
                    ends with its process.",
            scenarios: vec![Scenario::Recovery],
            picture: bars(Scenario::Recovery),
        },
    ];
    let known = |section: &Section| section.scenarios.iter().any(|it| measured(*it));
    all.into_iter().filter(known).collect()
}

/// Who a row is about.
fn who(row: &Row) -> String {
    format!("{} · {}", row.backend, row.contestant)
}

/// A figure of a row as text, with its spread; empty if it was not measured.
fn cell(row: &Row, figure: Figure) -> String {
    match (row.value(figure), row.spread(figure)) {
        (Some(value), Some(spread)) => format!("{} ±{:.0} %", figure.show(value), spread * 100.0),
        (Some(value), None) => figure.show(value),
        _ => String::new(),
    }
}

/// How often the row's figure is that of the floor, and of the best peer, of the same backend.
struct Ratios<'a> {
    floor: Option<(&'a Row, f64)>,
    peer: Option<(&'a Row, f64)>,
}

impl<'a> Ratios<'a> {
    fn of(results: &'a Results, row: &Row) -> Self {
        let figure = row.scenario.figure();
        let beside = |role: Role| {
            let others = results.of(row.scenario);
            let others = others.filter(move |other| other.backend == row.backend && other.role == role);
            let ratios = others.filter_map(|other| Some((other, row.ratio(other, figure)?)));
            // The best of them leaves this row the worst ratio.
            let better = |a: f64, b: f64| if figure.more_is_better() { a < b } else { a > b };
            ratios.reduce(|a, b| if better(b.1, a.1) { b } else { a })
        };
        Self {
            floor: beside(Role::Floor),
            peer: beside(Role::Peer),
        }
    }
}

/// Why a row has no figures, if it has none.
fn absence(row: &Row) -> Option<String> {
    match &row.outcome {
        Outcome::Measured(_) => None,
        Outcome::Skipped(why) => Some(why.clone()),
        Outcome::Failed(how) => Some(format!("failed: {how}")),
    }
}
