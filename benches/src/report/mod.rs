//! From a run's results to pictures and tables: a document for the repository, and a page for a browser.

mod chart;
mod document;
mod page;
mod ratios;
mod sections;
mod steady;

use std::{fs, io, path::Path};

use lockkit_conformance::measure::{Figure, Outcome, Role, Row, Scenario};

use self::sections::{Section, sections};
pub use self::steady::compare;
use crate::results::Results;

/// Writes `benchmarks.md` into `docs`, with its pictures in `docs/benchmarks`, the page to `page`, and beside it
/// `ratios.tsv`: every figure of everybody, and how often it is that of each other contestant of the same backend.
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
    fs::write(page.with_file_name("ratios.tsv"), ratios::table(results))?;
    let rendered = page::render(results, &sections).map_err(io::Error::other)?;
    fs::write(page, rendered)
}

/// Names the contestant of a row.
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

/// The figures of a scenario that somebody was measured in.
fn figures(results: &Results, scenario: Scenario) -> Vec<Figure> {
    let known = |figure: &Figure| results.of(scenario).any(|row| row.value(*figure).is_some());
    scenario.figures().iter().copied().filter(known).collect()
}

/// The row's figure as a multiple of the floor's and of the best peer's, of the same backend.
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
