//! `lockkit list --watch`: a table on the terminal that is drawn anew every second.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::{Duration, SystemTime},
};

use lockkit::{Error, Holder, ListedLock, LockClient, LockKind, LockState, spi::chain};
use rustix::termios::tcgetwinsize;

use crate::list::titled;

/// The pause between the end of a list and the begin of the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// The lines above and below the locks.
const FRAME: usize = 3;

/// The columns that a terminal has at most.
const WIDEST: usize = u16::MAX as usize;

const CLEAR: &str = "\x1b[2J";
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// Draws until Ctrl-C. While the server cannot tell, it says so and shows no locks, since they may be others by now.
pub(crate) async fn watch(client: &LockClient, prefix: &str) -> Result<(), Error> {
    let draw = async {
        let mut begin = CLEAR;
        loop {
            let (width, height) = size();
            let view = match look(client, prefix, height.saturating_sub(FRAME)).await {
                Err(error) if !error.is_transient() => return Err(error),
                view => view,
            };
            let drawn = lines(prefix, &view, SystemTime::now())
                .iter()
                .map(|line| format!("{}{END_OF_LINE}", cut(line, width)))
                .collect::<Vec<_>>()
                .join("\r\n");
            let mut output = io::stdout();
            // In one piece, so that the terminal shows no half of it.
            let written = output.write_all(format!("{begin}{HOME}{drawn}{END_OF_SCREEN}").as_bytes());
            if written.and_then(|()| output.flush()).is_err() {
                return Ok(());
            }
            begin = "";
            tokio::time::sleep(PAUSE).await;
        }
    };
    let done = tokio::select! {
        done = draw => done,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    let _ = writeln!(io::stdout());
    done
}

/// The terminal's columns and lines.
fn size() -> (usize, usize) {
    let size = tcgetwinsize(io::stdout()).ok();
    let known = size.filter(|size| size.ws_col > 0 && size.ws_row > 0);
    known.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
}

/// The locks that fit on the screen, the first by name, and how many there are.
struct View {
    rows: BTreeMap<(String, LockKind), LockState>,
    all: usize,
}

async fn look(client: &LockClient, prefix: &str, most: usize) -> Result<View, Error> {
    let mut view = View {
        rows: BTreeMap::new(),
        all: 0,
    };
    let mut list = client.list(prefix)?;
    while let Some(lock) = list.next().await {
        let ListedLock {
            name, kind, state, ..
        } = lock?;
        view.all += 1;
        view.rows.insert((name.as_str().to_owned(), kind), state);
        if view.rows.len() > most {
            view.rows.pop_last();
        }
    }
    Ok(view)
}

fn lines(prefix: &str, view: &Result<View, Error>, now: SystemTime) -> Vec<String> {
    let time = humantime::format_rfc3339_seconds(now);
    let of = if prefix.is_empty() {
        String::new()
    } else {
        format!(" under {}", prefix.escape_debug())
    };
    let view = match view {
        Ok(view) => view,
        Err(error) => {
            let why = chain(error);
            return vec![format!(
                "{time}  cannot tell what is held{of}: {}",
                why.escape_debug()
            )];
        }
    };
    let mut lines = vec![format!("{time}  {} held{of}  (Ctrl-C ends)", view.all)];
    let heads = ["NAME", "TOKEN", "LEFT", "FOR", "WAITING", "HOLDER"].map(str::to_owned);
    let rows = view
        .rows
        .iter()
        .filter_map(|((name, kind), state)| rows(name, *kind, state, now));
    lines.extend(table(&std::iter::once(heads).chain(rows).collect::<Vec<_>>()));
    let hidden = view.all.saturating_sub(view.rows.len());
    if hidden > 0 {
        lines.push(format!("… and {hidden} more"));
    }
    lines
}

/// Returns a row of the table: of several holders, the first and how many more there are.
fn rows(name: &str, kind: LockKind, state: &LockState, now: SystemTime) -> Option<[String; 6]> {
    let holder: &Holder = state.holders.first()?;
    let seconds =
        |time: Duration| humantime::format_duration(Duration::from_secs(time.as_secs())).to_string();
    let label = holder.label.as_deref().unwrap_or_default().escape_debug();
    let more = match state.holders.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let since = holder.since.and_then(|since| now.duration_since(since).ok());
    Some([
        titled(name, kind),
        holder.token.to_string(),
        holder.left.map(seconds).unwrap_or_default(),
        since.map(seconds).unwrap_or_default(),
        state
            .waiters
            .map(|waiters| waiters.to_string())
            .unwrap_or_default(),
        format!("{label}{more}"),
    ])
}

/// Returns the lines of a table, with columns as wide as they need to be. Of a cell, no more than a terminal shows: no text can be padded
/// to more than that.
fn table(rows: &[[String; 6]]) -> Vec<String> {
    let rows = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| cut(cell, WIDEST)));
    let rows: Vec<[&str; 6]> = rows.collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; 6] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let line = |row: &[&str; 6]| {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Returns the part of a line that fits.
fn cut(line: &str, width: usize) -> &str {
    line.char_indices()
        .nth(width)
        .map_or(line, |(end, _)| &line[..end])
}

#[cfg(test)]
mod tests {
    use lockkit::FencingToken;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_table_has_a_row_per_lock_and_drives_no_terminal() {
        let now = SystemTime::UNIX_EPOCH + 1_000 * SECOND;
        let holder = |token, label: &str| {
            Holder::new(
                FencingToken::new(token),
                Some(label.to_owned()),
                Some(90 * SECOND),
            )
            .since(Some(now - 5 * SECOND))
        };
        let mut rows = BTreeMap::new();
        let one = LockState::new(vec![holder(7, "ci\x1b[2J")], Some(2));
        rows.insert(("a\nb".to_owned(), LockKind::Lock), one);
        let two = LockState::new(vec![holder(8, "x"), holder(9, "y")], None);
        rows.insert(("gpu".to_owned(), LockKind::Semaphore), two);
        let view = View { rows, all: 5 };
        let shown = lines("g*", &Ok(view), now);
        assert_eq!(
            shown,
            [
                "1970-01-01T00:16:40Z  5 held under g*  (Ctrl-C ends)",
                "NAME             TOKEN  LEFT    FOR  WAITING  HOLDER",
                "a\\nb             7      1m 30s  5s   2        ci\\u{1b}[2J",
                "gpu (semaphore)  8      1m 30s  5s            x and 1 more",
                "… and 3 more",
            ]
        );
        assert_eq!(cut("é…x", 2), "é…");
        assert_eq!(cut("é", 2), "é");
    }

    /// As a foreign client's label may be.
    #[test]
    fn a_cell_is_cut_to_what_a_terminal_shows() {
        let row =
            |label: &str| std::array::from_fn(|column| if column == 1 { label } else { "x" }.to_owned());
        let lines = table(&[row(&"é".repeat(WIDEST + 1)), row("y")]);
        assert_eq!(lines[0].matches('é').count(), WIDEST);
        assert_eq!(lines[1].chars().count(), lines[0].chars().count());
    }

    #[test]
    fn what_cannot_be_told_is_no_empty_table() {
        let error = Error::transient("redis", "list", "no connection");
        let shown = lines("", &Err(error), SystemTime::UNIX_EPOCH);
        assert_eq!(shown.len(), 1);
        assert!(
            shown[0].contains("cannot tell what is held: redis: list failed"),
            "{shown:?}"
        );
        assert!(shown[0].ends_with("no connection"), "{shown:?}");
    }
}
