//! The simulator's findings as a table for the documentation.

use std::fmt::Write as _;

use crate::{campaign::Summary, config::Config, config::Promise};

const BEGIN: &str =
    "<!-- The simulator's table: `cargo run --release -p lockkit-redlock-simulator -- table` writes it. -->";
const END: &str = "<!-- The end of the simulator's table. -->";

/// Returns the table. Its rows are the configurations, its cells the numbers of schedules that showed a fault.
pub fn table(summaries: &[(&Config, Summary)]) -> String {
    let mut table = String::new();
    let schedules = summaries.first().map_or(0, |(_, summary)| summary.schedules);
    let _ = writeln!(table, "Of {} schedules each:\n", grouped(schedules));
    let columns = "overlapping holds | duplicate tokens | tokens out of order | asked for later, and lower | \
                   interleaved writes";
    let _ = writeln!(
        table,
        "| schedules with … | {columns} |\n|---|--:|--:|--:|--:|--:|"
    );
    for (config, summary) in summaries {
        let _ = write!(table, "| `{}`: {} |", config.name, config.about);
        for finding in &summary.findings[..5] {
            let number = grouped(finding.schedules);
            let _ = match (finding.promise, finding.schedules) {
                (Promise::Never, _) => write!(table, " {number} |"),
                (Promise::None, 0) => write!(table, " – |"),
                (Promise::None | Promise::Happens, _) => write!(table, " **{number}** |"),
            };
        }
        table.push('\n');
    }
    table
}

/// Returns the text with its table replaced by this one. `None` if it has no table.
pub fn replaced(text: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

/// 12,345.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_takes_the_place_of_the_one_before() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let once = replaced(&text, "new\n").expect("a place for it");
        assert_eq!(once, format!("a\n{BEGIN}\n\nnew\n\n{END}\nb\n"));
        assert_eq!(replaced(&once, "new\n"), Some(once.clone()));
        assert_eq!(replaced("a\nb\n", "new"), None);
    }

    #[test]
    fn numbers_are_grouped() {
        let grouped = [0, 999, 1000, 20_000, 1_000_000].map(grouped);
        assert_eq!(grouped, ["0", "999", "1,000", "20,000", "1,000,000"]);
    }

    #[test]
    fn a_row_says_what_was_found_and_what_is_not_promised() {
        let config = Config::named("jumps").expect("it is there");
        let table = table(&[(config, crate::campaign(config, None, 0..1))]);
        let row = table.lines().last().expect("a row");
        assert!(row.ends_with("| **0** | 0 | – | 0 | 0 |"), "{row}");
    }
}
