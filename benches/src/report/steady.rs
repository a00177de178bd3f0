//! Whether ratios come out the same from one run to the next.

use std::fmt::Write as _;

use lockkit_conformance::measure::Role;

use super::{Ratios, who};
use crate::results::Results;

/// So far apart, as a fraction, ratios of two runs are the same.
const SAME: f64 = 0.15;

/// Says how many of lockkit's ratios, to the floor and to the best peer, are the same in both runs, and which are not.
pub fn compare(results: &Results, before: &Results) -> String {
    let mut apart = Vec::new();
    let mut same = 0;
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
            let (Some((_, now)), Some((_, then))) = (now, then) else {
                continue;
            };
            let drift = now.max(then) / now.min(then) - 1.0;
            if drift <= SAME {
                same += 1;
            } else {
                apart.push((drift, row.scenario, who(row), to, then, now));
            }
        }
    }
    apart.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut text = format!(
        "{same} of {} ratios are those of the run of {} within {:.0} %\n",
        same + apart.len(),
        before.date,
        SAME * 100.0
    );
    for (drift, scenario, who, to, then, now) in apart {
        let _ = writeln!(
            text,
            "  {scenario}: {who} × {to}: {then:.2}, then {now:.2} ({:.0} %)",
            drift * 100.0
        );
    }
    text
}
