//! `docs/benchmarks.md`.

use std::fmt::Write as _;

use lockkit_conformance::measure::{Figure, Role, Row, Scenario};

use super::{Ratios, Section, absence, cell, figures, who};
use crate::results::Results;

pub(super) fn render(results: &Results, sections: &[Section]) -> String {
    let mut text = String::from(
        "# What it costs\n\n\
         Every backend in the same situations, beside the least that can be done on the same server (\"by hand\") and \
         beside other libraries. Commands of this repository draw these pages from a run. Run them on your own machine:\n\n\
         ```sh\n\
         cargo bench -p lockkit-benches --bench matrix     # some 20 minutes; -- --quick: four\n\
         cargo run -p lockkit-benches --bin report         # this page, and target/lockkit-report/index.html\n\
         cargo bench -p lockkit-benches --bench scenarios  # the same by criterion, see below; -- redis: Redis alone\n\
         lockkit bench --url redis://… --url zk://…        # the same situations on your own servers\n\
         ```\n\n",
    );
    provenance(&mut text, results);
    text.push_str(
        "\nThe contestants take turns in short rounds, and a full run goes through all scenarios several times, each time \
         with new clients. A figure is the median of the rounds. ± is how far the middle half of them lies to either side of \
         it. The longest wait is the longest of the whole run. A ratio is the median of the ratios within each round, so \
         that other work of the machine meets both sides. Above 1 is good for rates and bad for times. Without anything to \
         compare with there is no ratio. Clients, servers and disks share the one machine, over loopback. The servers have \
         their default durability, except ZooKeeper and etcd, which do not wait for their disks. ZooKeeper has a tick of \
         100 ms, for sessions of 4 s. `etcd3` is three members of etcd, which all ask by way of one that follows. So ratios \
         within a backend say more than those between backends.\n\n\
         [criterion](https://bheisler.github.io/criterion.rs/book/) measures one contestant after the other. Use it to \
         compare a change with the state before, by its own `--save-baseline` and `--baseline` and its report in \
         `target/criterion`. To compare backends use the matrix, in which all take turns. `--bench scenarios` takes about \
         ten minutes for everything and one for a backend. Only the matrix has `held-*`, `waiters-*`, `recovery` and `silence`. \
         `--bench driver` measures the driver above all backends, on a backend that costs nothing.\n\n",
    );
    summary(&mut text, results);
    for section in sections {
        let _ = write!(
            text,
            "## {}\n\n{}\n\n![{}](benchmarks/{}.svg)\n\n",
            section.title, section.about, section.title, section.id
        );
        table(&mut text, results, section);
    }
    // One newline at the end.
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn provenance(text: &mut String, results: &Results) {
    let machine = &results.machine;
    let _ = writeln!(
        text,
        "| | |\n|---|---|\n\
         | when | {}, a {} run of {} min {} s |\n\
         | where | {} cores of {}, {} GiB, {} |",
        results.date,
        if results.quick { "quick" } else { "full" },
        results.seconds / 60,
        results.seconds % 60,
        machine.cores,
        machine.processor,
        machine.memory_gib,
        machine.system,
    );
    let versions: Vec<_> = results
        .versions
        .iter()
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    let _ = writeln!(text, "| versions | {} |", versions.join(", "));
    for skipped in &results.skipped {
        let _ = writeln!(text, "| without {} | {} |", skipped.backend, plain(&skipped.why));
    }
}

/// A line per backend.
fn summary(text: &mut String, results: &Results) {
    text.push_str(
        "| | uncontended | × by hand | 16 tasks of one process | × best peer | 16 clients | hand-off | 10,000 held, % of a core | \
         holder killed |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    let ours = results
        .of(Scenario::Uncontended)
        .filter(|row| row.role == Role::Ours && row.value(row.scenario.figure()).is_some());
    for ours in ours {
        let find = |scenario| {
            let mut rows = results.of(scenario);
            rows.find(|row| row.backend == ours.backend && row.contestant == ours.contestant)
        };
        let value = |row: Option<&Row>| {
            row.and_then(|row| {
                let figure = row.scenario.figure();
                let unit = if figure == Figure::Rate { "/s" } else { "" };
                Some(figure.show(row.value(figure)?) + unit)
            })
            .unwrap_or_default()
        };
        let tasks = find(Scenario::Tasks(16));
        let floor = Ratios::of(results, ours).floor;
        let peer = tasks.and_then(|row| Ratios::of(results, row).peer);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            who(ours),
            value(Some(ours)),
            floor.map_or_else(String::new, |(_, ratio)| times(ratio)),
            value(tasks),
            peer.map_or_else(String::new, |(row, ratio)| format!(
                "{} ({})",
                times(ratio),
                row.contestant
            )),
            value(find(Scenario::Clients(16))),
            value(find(Scenario::HandOff)),
            value(find(Scenario::Held(10_000))),
            value(find(Scenario::Recovery)),
        );
    }
    text.push('\n');
}

fn table(text: &mut String, results: &Results, section: &Section) {
    let results = &*section.of(results);
    for scenario in &section.scenarios {
        let figures = figures(results, *scenario);
        if section.scenarios.len() > 1 {
            let _ = writeln!(text, "**{}**\n", scenario.title());
        }
        let ratios = |row: &Row| match row.role {
            Role::Ours => {
                let Ratios { floor, peer } = Ratios::of(results, row);
                [floor, peer].map(|ratio| ratio.map(|(_, ratio)| times(ratio)))
            }
            _ => [None, None],
        };
        let compared = results.of(*scenario).any(|row| ratios(row) != [None, None]);
        let mut titles: Vec<_> = figures.iter().map(|figure| figure.title()).collect();
        if compared {
            titles.extend(["× by hand", "× best peer"]);
        }
        let (mut lines, mut absent) = (Vec::new(), Vec::new());
        for row in results.of(*scenario) {
            let ours = row.role == Role::Ours;
            if let Some(why) = absence(row) {
                if ours {
                    absent.push(format!("{} ({})", who(row), plain(&why)));
                }
                continue;
            }
            let mut cells: Vec<_> = figures.iter().map(|figure| cell(row, *figure)).collect();
            if compared {
                cells.extend(ratios(row).map(Option::unwrap_or_default));
            }
            let name = if ours {
                format!("**{}**", who(row))
            } else {
                who(row)
            };
            lines.push(format!("| {name} | {} |", cells.join(" | ")));
        }
        if !lines.is_empty() {
            let _ = writeln!(text, "| | {} |", titles.join(" | "));
            let _ = writeln!(text, "|---|{}", "---|".repeat(titles.len()));
            let _ = writeln!(text, "{}\n", lines.join("\n"));
        }
        if !absent.is_empty() {
            let _ = writeln!(text, "Not measured: {}.\n", absent.join("; "));
        }
    }
}

pub(super) fn times(ratio: f64) -> String {
    if ratio < 10.0 {
        format!("{ratio:.2}")
    } else {
        format!("{ratio:.0}")
    }
}

/// On one line, and no part of the table.
fn plain(text: &str) -> String {
    text.replace('\n', " ").replace('|', "/")
}
