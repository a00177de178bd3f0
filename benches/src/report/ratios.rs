//! Every figure, and every ratio, one to a line: to be searched, and to be laid beside those of another run.

use std::fmt::Write as _;

use crate::results::Results;

/// Tab-separated, with a head. `beside` is empty where the line is about the value alone.
pub(super) fn table(results: &Results) -> String {
    let mut text = "way\tscenario\tfigure\tbackend\tcontestant\tvalue\tbeside\tratio\n".to_owned();
    for (way, results) in [("loopback", results), ("network", &results.over_the_network())] {
        for row in &results.rows {
            for figure in row.scenario.figures() {
                let Some(value) = row.value(*figure) else {
                    continue;
                };
                let head = format!(
                    "{way}\t{}\t{}\t{}\t{}\t{value:.6}",
                    row.scenario,
                    figure.title(),
                    row.backend,
                    row.contestant
                );
                let _ = writeln!(text, "{head}\t\t");
                let others = results.of(row.scenario);
                for other in
                    others.filter(|other| other.backend == row.backend && other.contestant != row.contestant)
                {
                    if let Some(ratio) = row.ratio(other, *figure) {
                        let _ = writeln!(text, "{head}\t{}\t{ratio:.6}", other.contestant);
                    }
                }
            }
        }
    }
    text
}
