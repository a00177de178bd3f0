//! `lockkit inspect` and `lockkit break`.

use std::{
    io::{self, Write},
    time::Duration,
};

use lockkit::{FencingToken, LockClient, LockState};
use serde_json::{Value, json};

use crate::{
    args::{Break, Inspect},
    failure::{Failure, say},
};

/// The time that the server gets to take note that this client has gone.
pub(crate) const CLOSE_WITHIN: Duration = Duration::from_secs(5);

pub(crate) async fn inspect(args: Inspect) -> Result<u8, Failure> {
    let client = args.server.config()?.connect().await?;
    let state = if args.permits {
        client.inspect_semaphore(&args.name).await
    } else {
        client.inspect(&args.name).await
    };
    take_leave(&client).await;
    let state = state?;
    print(&if args.json {
        as_json(&args, &state).to_string()
    } else {
        as_text(&args, &state)
    });
    Ok(0)
}

pub(crate) async fn break_hold(args: Break) -> Result<u8, Failure> {
    let client = args.server.config()?.connect().await?;
    let token = FencingToken::new(args.token);
    let ended = if args.permits {
        client.revoke_permit(&args.name, token).await
    } else {
        client.revoke(&args.name, token).await
    };
    take_leave(&client).await;
    if ended? {
        return Ok(0);
    }
    say(&format!("nobody holds `{}` with token {}", args.name, args.token));
    Ok(1)
}

/// Ends what the server keeps for this client, such as a session. If it does not confirm that, it forgets by itself.
async fn take_leave(client: &LockClient) {
    let _ = client.close(CLOSE_WITHIN).await;
}

fn as_json(args: &Inspect, state: &LockState) -> Value {
    let holders: Vec<Value> = state
        .holders
        .iter()
        .map(|holder| {
            json!({
                "token": holder.token.get(),
                "label": holder.label,
                "left_ms": holder.left.map(whole_millis),
            })
        })
        .collect();
    json!({
        "name": args.name,
        "kind": if args.permits { "semaphore" } else { "lock" },
        "holders": holders,
        "waiters": state.waiters,
    })
}

fn as_text(args: &Inspect, state: &LockState) -> String {
    let name = args.name.escape_debug();
    let mut lines = vec![format!(
        "{name}: {}",
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
        lines.push(format!("  {}", facts.join(", ")));
    }
    lines.extend(state.waiters.map(|waiters| format!("  {waiters} waiting")));
    lines.join("\n")
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Prints one line or several on standard output. A reader who closed it has read enough.
pub(crate) fn print(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}
