//! The history of an epoch as lines of JSON, for judges that know nothing of this one.
//!
//! docs/torture.md documents the lines. They have no more than what was seen: moments of calls and replies, tokens, the last look at
//! which a holder held, and what befell the deployment.

use std::{fmt::Write as _, time::Duration};

use lockkit_core::spi::Mode;

use super::{
    Finding, Told,
    judge::{REVOKED, Story},
    record::{Over, Record},
};
use crate::history::Nanos;

/// Lines with the moments that they stand for.
#[derive(Default)]
struct Lines(Vec<(Nanos, String)>);

impl Lines {
    fn push(&mut self, at: Nanos, is: &str, rest: &str) {
        self.0
            .push((at, format!("{{\"at\":{at},\"is\":\"{is}\"{rest}}}\n")));
    }

    /// Adds a line about a hold at a moment that is known.
    fn of(&mut self, hold: usize, at: Option<Nanos>, is: &str, rest: &str) {
        if let Some(at) = at {
            self.push(at, is, &format!(",\"hold\":{hold}{rest}"));
        }
    }

    fn record(&mut self, hold: usize, record: &Record) {
        let a = &record.acquisition;
        let (mode, of) = match a.mode {
            Mode::Exclusive => ("exclusive", 1),
            Mode::Shared => ("shared", 0),
            Mode::Permits(size) => ("permit", size.get()),
        };
        let mut call = format!(
            ",\"name\":{},\"mode\":\"{mode}\",\"of\":{of},\"ttl\":{},\"process\":{},\"client\":{}",
            text(&a.lock),
            record.ttl,
            record.process,
            record.client
        );
        if record.adopts.is_some() {
            call.push_str(",\"adopts\":true");
        }
        self.of(hold, Some(a.asked), "call", &call);
        let (granted, token) = a.granted.unzip();
        self.of(
            hold,
            granted,
            "granted",
            &format!(",\"token\":{}", token.unwrap_or_default()),
        );
        self.of(hold, a.gave_up, "refused", "");
        self.of(hold, a.until, "held", "");
        self.of(hold, record.downgraded, "downgrade", "");
        self.of(hold, record.shared, "shared", "");
        self.of(hold, a.lost, "lost", "");
        self.of(hold, record.kept, "kept", "");
        let how = match record.over {
            Over::Not => return,
            Over::Released => "released",
            Over::Dropped => "dropped",
            Over::Detached => "detached",
            Over::Lost => "lost",
        };
        self.of(hold, a.released, "over", &format!(",\"how\":\"{how}\""));
    }
}

impl Story {
    /// Returns the lines of this epoch, in the order of their moments; the first says what it is, and the last what was found.
    pub(super) fn chronicle(&self, findings: &[Finding]) -> String {
        let mut lines = Lines::default();
        for (hold, record) in self.records.iter().enumerate() {
            lines.record(hold, record);
        }
        for struck in &self.struck {
            let Some(fault) = struck.fault else { continue };
            let mut rest = format!(",\"name\":{},\"until\":{}", text(fault.name), struck.to);
            rest.extend(fault.overlap.map(told));
            if fault.restarts {
                rest.push_str(",\"restarts\":true");
            }
            lines.push(struck.from, "fault", &rest);
        }
        for (lock, from, to) in &self.breaks {
            let rest = format!(",\"name\":{},\"until\":{to}{}", text(lock), told(REVOKED));
            lines.push(*from, "break", &rest);
        }
        for pause in &self.pauses {
            let (process, until) = (pause.process, pause.to.unwrap_or(Nanos::MAX));
            let rest = format!(",\"process\":{process},\"until\":{until}");
            lines.push(pause.from, "pause", &rest);
        }
        // By moment alone, so that a call stays before its reply.
        lines.0.sort_by_key(|(at, _)| *at);
        let first = lines.0.first().map_or(0, |(at, _)| *at);
        let last = lines.0.last().map_or(0, |(at, _)| *at);
        let mut text = format!(
            "{{\"at\":{first},\"is\":\"epoch\",\"seed\":{},\"clock\":{}}}\n",
            self.schedule.seed, self.clock
        );
        text.extend(lines.0.into_iter().map(|(_, line)| line));
        let mut laws: Vec<_> = findings
            .iter()
            .map(|finding| format!("\"{:?}\"", finding.law))
            .collect();
        laws.dedup();
        let laws = laws.join(",");
        let _ = writeln!(text, "{{\"at\":{last},\"is\":\"judged\",\"laws\":[{laws}]}}");
        text
    }
}

/// Until when a holder is told of what befell it.
fn told(told: Told) -> String {
    let (what, time) = match told {
        Told::Within(time) => ("within", time),
        Told::AtRenewal(time) => ("renewal", time),
        Told::AtLeaseEnd(time) => ("lease", time),
    };
    format!(",\"told\":\"{what}\",\"late\":{}", millis(time))
}

fn millis(time: Duration) -> u128 {
    time.as_millis()
}

/// A string of JSON.
fn text(text: &str) -> String {
    let mut json = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            control if control < ' ' => {
                let _ = write!(json, "\\u{:04x}", u32::from(control));
            }
            other => json.push(other),
        }
    }
    json.push('"');
    json
}
