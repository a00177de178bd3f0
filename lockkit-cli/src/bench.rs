//! `lockkit bench`: lock servers side by side.

use std::{collections::BTreeMap, num::NonZeroUsize, thread, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use lockkit_conformance::measure::{
    Contestant, Effort, Figure, Locks, Outcome, Progress, Role, Row, Scenario, contest,
};

use crate::{
    args::Bench,
    failure::{FAILED, Failure},
    helper_server::{self, Server},
    inspect::{print, printable},
    server,
};

/// Blocks. Answers with the exit status.
pub(crate) fn bench(args: &Bench) -> Result<u8, Failure> {
    let only = args.only.as_deref().unwrap_or_default();
    // A waiter behind a client is no waiter of the server.
    let all = Scenario::ALL.into_iter();
    let all = all.filter(|scenario| !matches!(scenario, Scenario::Waiters(_)));
    let scenarios: Vec<_> = all
        .clone()
        .filter(|scenario| scenario.to_string().contains(only))
        .collect();
    if scenarios.is_empty() {
        let names: Vec<_> = all.map(|scenario| scenario.to_string()).collect();
        let names = names.join(", ");
        return Err(Failure::of_arguments(
            FAILED,
            &format!("no scenario has `{only}` in its name: {names}"),
        ));
    }
    let urls = if args.urls.is_empty() {
        vec![server::url(None)?]
    } else {
        args.urls.clone()
    };
    let mut contestants = Vec::new();
    for url in urls {
        let server = Server::reach(url)?;
        let (backend, address) = (server.info.name, server.info.server.to_string());
        let locks = Locks::new(server).helpers(helper_server::launch()?);
        contestants.push(Contestant::new(backend, address, Role::Ours, locks));
    }
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let bar = bar();
    // The runtime's own choice heeds TOKIO_WORKER_THREADS, and panics if that makes no sense.
    let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let rows = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .thread_stack_size(crate::STACK)
        .enable_all()
        .build()
        .map_err(|error| Failure::because("cannot start", &error))?
        .block_on(contest(&mut contestants, &scenarios, &effort, |progress| {
            advance(&bar, &progress);
        }));
    bar.finish_and_clear();
    print(&if args.json {
        let json = serde_json::to_string(&rows);
        printable(&json.map_err(|error| Failure::because("cannot write JSON", &error))?)
    } else {
        table(&rows, &scenarios)
    })?;
    let failed = rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)));
    Ok(u8::from(failed))
}

/// On standard error, and only if that is a terminal.
fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}  ({eta} left)");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn advance(bar: &ProgressBar, progress: &Progress<'_>) {
    bar.set_length(progress.total as u64);
    bar.set_position(progress.done as u64);
    bar.set_message(format!("{}: {}", progress.scenario.title(), progress.contestant));
}

/// A column per server, a line per figure, and below it why some are missing.
fn table(rows: &[Row], scenarios: &[Scenario]) -> String {
    let of = |scenario| rows.iter().filter(move |row| row.scenario == scenario);
    let mut lines = vec![vec![String::new()]];
    lines[0].extend(of(scenarios[0]).map(server_of));
    for scenario in scenarios {
        let measured = |figure: &&Figure| of(*scenario).any(|row| row.value(**figure).is_some());
        for (index, figure) in scenario.figures().iter().filter(measured).enumerate() {
            let title = match index {
                0 if *figure == scenario.figure() => scenario.title(),
                // The figure that counts is not known here.
                0 => format!("{}: {}", scenario.title(), figure.title()),
                _ => format!("  {}", figure.title()),
            };
            let cells = of(*scenario).map(|row| cell(row, *figure).unwrap_or_else(|| "–".to_owned()));
            lines.push(std::iter::once(title).chain(cells).collect());
        }
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: Vec<_> = (0..lines[0].len())
        .map(|column| width(column).unwrap_or(0))
        .collect();
    let mut text: Vec<String> = lines
        .iter()
        .map(|line| {
            let cells = line.iter().zip(&widths);
            let padded = cells.map(|(cell, width)| format!("{cell:width$}"));
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        })
        .collect();
    let mut absent = BTreeMap::<String, Vec<String>>::new();
    for row in rows {
        let (how, why) = match &row.outcome {
            Outcome::Measured(_) => continue,
            Outcome::Skipped(why) => ("skipped", why),
            Outcome::Failed(why) => ("FAILED", why),
        };
        let who = server_of(row);
        let whose = absent.entry(format!("{how}: {who}, because {why}")).or_default();
        whose.push(row.scenario.title());
    }
    text.extend(
        absent
            .iter()
            .map(|(why, titles)| format!("{why}: {}", titles.join("; "))),
    );
    text.join("\n")
}

fn server_of(row: &Row) -> String {
    // Of most backends the address begins with the name.
    if row.contestant.starts_with(&row.backend) {
        row.contestant.clone()
    } else {
        format!("{} {}", row.backend, row.contestant)
    }
}

fn cell(row: &Row, figure: Figure) -> Option<String> {
    let value = figure.show(row.value(figure)?);
    let unit = match figure {
        Figure::Rate => " locks/s",
        Figure::Processor => " % of a core",
        Figure::Memory => " bytes each",
        _ => "",
    };
    Some(match row.spread(figure) {
        Some(spread) => format!("{value}{unit} ±{:.0} %", spread * 100.0),
        None => format!("{value}{unit}"),
    })
}
