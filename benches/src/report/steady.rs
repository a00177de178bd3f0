//! Compares the ratios of one run with those of the run before.

use std::fmt::Write as _;

use lockkit_conformance::measure::{Figure, Role, Row};

use super::{Ratios, who};
use crate::results::Results;

/// The difference, as a fraction, up to which ratios of two runs count as equal.
const SAME: f64 = 0.15;

/// Says how many of lockkit's ratios, to the floor and to the best peer, are the same in both runs, which are not, and
/// how far apart they may well be if nothing but chance differs, as the rounds of each run differ.
pub fn compare(results: &Results, before: &Results) -> String {
    let mut apart = Vec::new();
    let (mut same, mut by_chance) = (0, 0);
    for row in results.rows.iter().filter(|row| row.role == Role::Ours) {
        let mut earlier = before.of(row.scenario);
        let Some(earlier) = earlier.find(|it| who(it) == who(row)) else {
            continue;
        };
        let (now, then) = (Ratios::of(results, row), Ratios::of(before, earlier));
        for (to, now, then) in [
            ("by hand", now.floor, then.floor),
            ("best peer", now.peer, then.peer),
        ] {
            let (Some((beside, now)), Some((beside_then, then))) = (now, then) else {
                continue;
            };
            let drift = now.max(then) / now.min(then) - 1.0;
            if drift <= SAME {
                same += 1;
                continue;
            }
            let figure = row.scenario.figure();
            let doubts = doubt(row, beside, figure).hypot(doubt(earlier, beside_then, figure));
            // Twice: one in twenty is further apart.
            let chance = (2.0 * doubts).exp() - 1.0;
            by_chance += u32::from(drift <= chance);
            apart.push((drift, chance, row.scenario, who(row), to, then, now));
        }
    }
    apart.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut text = format!(
        "{same} of {} ratios are those of the run of {} within {:.0} %; of the {} others, {by_chance} are no further apart \
         than chance has them\n",
        same + apart.len(),
        before.date,
        SAME * 100.0,
        apart.len(),
    );
    for (drift, chance, scenario, who, to, then, now) in apart {
        let _ = writeln!(
            text,
            "  {scenario}: {who} × {to}: {then:.2}, then {now:.2} ({:.0} %; up to {:.0} % by chance)",
            drift * 100.0,
            chance * 100.0
        );
    }
    text
}

/// The standard error of a ratio's logarithm, from how far its rounds are apart: that of a median, of which the middle
/// half of a normal distribution tells the width.
fn doubt(row: &Row, beside: &Row, figure: Figure) -> f64 {
    let mut rounds: Vec<_> = row.ratios(beside, figure).map(f64::ln).collect();
    rounds.sort_by(f64::total_cmp);
    let many = rounds.len();
    let quartile = |quarter: usize| rounds.get((many * quarter / 4).min(many.saturating_sub(1)));
    let (Some(low), Some(high)) = (quartile(1), quartile(3)) else {
        return 0.0;
    };
    let deviation = (high - low) / 1.349;
    #[expect(clippy::cast_precision_loss, reason = "a few dozen rounds")]
    let rounds = many as f64;
    // The root of half of pi.
    1.2533 * deviation / rounds.sqrt()
}
