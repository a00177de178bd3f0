//! `lockkit list`.

use std::io::{self, IsTerminal, Write};

use lockkit::{ListedLock, LockClient, LockKind};

use crate::{
    args::List,
    failure::{FAILED, Failure},
    inspect::{as_json, as_text, take_leave, was_written},
    watch,
};

pub(crate) async fn list(args: List) -> Result<u8, Failure> {
    if args.watch && !io::stdout().is_terminal() {
        return Err(Failure::new(
            FAILED,
            "--watch draws on a terminal, and standard output is none; without it, the list is printed once",
        ));
    }
    let client = args.server.config_for(&args.prefix)?.connect().await?;
    let done = if args.watch {
        watch::watch(&client, &args.prefix).await.map_err(Failure::from)
    } else {
        print_all(&client, &args).await
    };
    // The last word does not wait for a server that may be away by now.
    let status = done.map_or_else(Failure::report, |()| 0);
    take_leave(&client).await;
    Ok(status)
}

/// Prints each lock as soon as its page is there, and keeps none.
async fn print_all(client: &LockClient, args: &List) -> Result<(), Failure> {
    let mut list = client.list(&args.prefix)?;
    let mut output = io::stdout();
    while let Some(lock) = list.next().await {
        let ListedLock {
            name, kind, state, ..
        } = lock?;
        let shown = if args.json {
            as_json(name.as_str(), kind, &state)
        } else {
            as_text(&titled(name.as_str(), kind), &state)
        };
        let written = writeln!(output, "{shown}");
        // A reader who closed it has read enough.
        let has_ended = written.is_err();
        was_written(written)?;
        if has_ended {
            break;
        }
    }
    Ok(())
}

/// Returns the name for a line of text, and its kind if that is not a lock.
pub(crate) fn titled(name: &str, kind: LockKind) -> String {
    let name = name.escape_debug();
    match kind {
        LockKind::Lock => name.to_string(),
        LockKind::Semaphore => format!("{name} (semaphore)"),
    }
}
