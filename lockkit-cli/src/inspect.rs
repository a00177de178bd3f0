//! `lockkit inspect` and `lockkit break`.

use std::{
    fmt::Write as _,
    io::{self, Write},
    time::{Duration, SystemTime},
};

use lockkit::{FencingToken, LockClient, LockKind, LockState, Revocation};
use serde_json::{Value, json};

use crate::{
    args::{Break, Inspect},
    failure::{Failure, NOT_GRANTED, is_plain, say},
};

/// The time that the server gets to take note that this client has gone.
pub(crate) const CLOSE_WITHIN: Duration = Duration::from_secs(5);

pub(crate) async fn inspect(args: Inspect) -> Result<u8, Failure> {
    let client = args.server.config_for(&args.name)?.connect().await?;
    let state = if args.permits {
        client.inspect_semaphore(&args.name).await
    } else {
        client.inspect(&args.name).await
    };
    // The answer does not wait for a server that may be away by now.
    let shown = state.map_err(Failure::from).and_then(|state| show(&args, &state));
    let status = shown.map_or_else(Failure::report, |()| 0);
    take_leave(&client).await;
    Ok(status)
}

fn show(args: &Inspect, state: &LockState) -> Result<(), Failure> {
    print(&if args.json {
        let kind = if args.permits {
            LockKind::Semaphore
        } else {
            LockKind::Lock
        };
        as_json(&args.name, kind, state)
    } else {
        as_text(&args.name.escape_debug().to_string(), state)
    })
}

pub(crate) async fn break_hold(args: Break) -> Result<u8, Failure> {
    let client = args.server.config_for(&args.name)?.connect().await?;
    let ended = if args.force {
        end_by_force(&client, &args).await
    } else {
        ask(&client, &args).await
    };
    let ended = ended.map_err(Failure::from);
    let status = ended.map_or_else(Failure::report, |ended| report(&args, &ended));
    take_leave(&client).await;
    Ok(status)
}

/// Says how a hold has ended, and answers with the exit status.
fn report(args: &Break, ended: &Revocation) -> u8 {
    let Break { name, token, .. } = args;
    match ended {
        Revocation::NotHeld => {
            say(&format!("nobody holds `{name}` with token {token}"));
            1
        }
        Revocation::Expired => {
            say(&format!(
                "the lease of `{name}` ran out, and its holder may not have confirmed"
            ));
            0
        }
        Revocation::StillHeld { left } => {
            let ends = left.map_or_else(
                || "only its holder can end that".to_owned(),
                |left| {
                    let left = Duration::from_millis(whole_millis(left));
                    format!(
                        "at most {} are left of its lease",
                        humantime::format_duration(left)
                    )
                },
            );
            say(&format!("`{name}` is asked for, and still held: {ends}"));
            NOT_GRANTED
        }
        // That it was confirmed is what was asked for.
        _ => 0,
    }
}

async fn ask(client: &LockClient, args: &Break) -> lockkit::Result<Revocation> {
    let token = FencingToken::new(args.token);
    if args.permits {
        client.revoke_permit(&args.name, token, args.wait).await
    } else {
        client.revoke(&args.name, token, args.wait).await
    }
}

async fn end_by_force(client: &LockClient, args: &Break) -> lockkit::Result<Revocation> {
    let token = FencingToken::new(args.token);
    let ended = if args.permits {
        client.revoke_permit_by_force(&args.name, token).await
    } else {
        client.revoke_by_force(&args.name, token).await
    };
    Ok(if ended? {
        Revocation::Confirmed
    } else {
        Revocation::NotHeld
    })
}

/// Ends what the server keeps for this client, such as a session. If it does not confirm that, it forgets by itself.
pub(crate) async fn take_leave(client: &LockClient) {
    let _ = client.close(CLOSE_WITHIN).await;
}

/// Returns the state as JSON, in one line.
pub(crate) fn as_json(name: &str, kind: LockKind, state: &LockState) -> String {
    let holders: Vec<Value> = state
        .holders
        .iter()
        .map(|holder| {
            json!({
                "token": holder.token.get(),
                "label": holder.label,
                "left_ms": holder.left.map(whole_millis),
                "since": holder.since.and_then(in_utc),
            })
        })
        .collect();
    let shown = json!({
        "name": name,
        "kind": match kind {
            LockKind::Lock => "lock",
            LockKind::Semaphore => "semaphore",
        },
        "holders": holders,
        "waiters": state.waiters,
    });
    printable(&shown.to_string())
}

/// Escapes in JSON what a terminal may act on, or draw otherwise than it reads: JSON allows it within strings.
pub(crate) fn printable(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if is_plain(c) {
            escaped.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string does not fail.
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    }
    escaped
}

/// `title` is the name, as a line may have it.
pub(crate) fn as_text(title: &str, state: &LockState) -> String {
    let mut lines = vec![format!(
        "{title}: {}",
        if state.is_free() { "free" } else { "held" }
    )];
    for holder in &state.holders {
        let mut facts = vec![format!("token {}", holder.token)];
        facts.extend(
            holder
                .label
                .as_ref()
                .map(|label| format!("by {}", label.escape_debug())),
        );
        facts.extend(holder.left.map(|left| {
            let left = Duration::from_millis(whole_millis(left));
            format!("{} left", humantime::format_duration(left))
        }));
        facts.extend(
            holder
                .since
                .and_then(in_utc)
                .map(|since| format!("since {since}")),
        );
        lines.push(format!("  {}", facts.join(", ")));
    }
    lines.extend(state.waiters.map(|waiters| format!("  {waiters} waiting")));
    lines.join("\n")
}

/// Returns a time as it is written, `None` if that is not possible: the holder's clock may be anywhere.
fn in_utc(time: SystemTime) -> Option<String> {
    let mut text = String::new();
    let time = humantime::format_rfc3339_millis(time.max(SystemTime::UNIX_EPOCH));
    write!(text, "{time}").is_ok().then_some(text)
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Prints one line or several on standard output. A reader who closed it has read enough.
///
/// # Errors
/// If it cannot be written for another reason.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    put(&format!("{text}\n"))
}

/// Prints what may have its end of line already, as [`print`].
pub(crate) fn put(text: &str) -> Result<(), Failure> {
    was_written(io::stdout().write_all(text.as_bytes()))
}

/// Returns whether all of the output so far could be written, after the last of it was.
///
/// # Errors
/// If it could not, unless a reader has closed it.
pub(crate) fn was_written(last: io::Result<()>) -> Result<(), Failure> {
    match last.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::because("cannot write the output", &error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_nothing_that_a_terminal_acts_on() {
        let name = "a\u{1b}[2J\u{7f}\u{9b}2J\u{202e}\u{e0001}é\n😀";
        let shown = as_json(name, LockKind::Lock, &LockState::default());
        assert!(
            !shown.contains(|c: char| c.is_control() || "\u{202e}\u{e0001}".contains(c)),
            "{shown:?}"
        );
        assert!(
            shown.contains("\\u007f\\u009b2J\\u202e\\udb40\\udc01é\\n😀"),
            "{shown}"
        );
        let read: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(read["name"], name);
    }
}
