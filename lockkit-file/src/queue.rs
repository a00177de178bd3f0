//! Waiters in turn: each has a ticket, which is a file in the queue's directory that it has locked for as long as it waits.
//!
//! The system unlocks the ticket of a process that ends, and a waiter that is stopped shows no life any more. Neither counts, and
//! whoever comes upon such a ticket removes it. So nobody waits for one that does not come.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::spi::OwnerId;
use rustix::{
    fs::{CWD, Dir, Mode, OFlags, openat},
    io::Errno,
};
use tokio::time::Instant;

use crate::{
    fault::{Fault, Result},
    flock::Flock,
    hold::touch,
    space,
};

/// The pause after which a waiter shows again that it is alive. Each such look wakes a process that is asleep.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// The time for which a ticket counts after its waiter last showed that. A stopped one must not keep the others out.
const LASTS: Duration = Duration::from_secs(2);
/// How often a ticket is drawn again that somebody took for a dead one's before it was locked.
const MAX_DRAWN: usize = 64;

/// The queue for one name.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    dir: PathBuf,
}

/// What a ticket's file is called. Of two that are drawn at once, which may have the same number, either may be the first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ticket {
    number: u64,
    name: String,
}

impl Queue {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Says that there is no ticket, not even a dead one's.
    pub(crate) fn is_empty(&self) -> Result<bool> {
        Ok(self.tickets()?.is_empty())
    }

    /// Says that somebody may wait. Of a name that nobody ever waited for, it costs nothing else.
    pub(crate) fn was_ever_waited_in(&self) -> bool {
        self.dir.symlink_metadata().is_ok()
    }

    /// Says that somebody waits.
    pub(crate) fn is_waited_in(&self) -> Result<bool> {
        for ticket in self.tickets()? {
            if counts(&self.dir.join(ticket.name))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn tickets(&self) -> Result<Vec<Ticket>> {
        let mut tickets = Vec::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entries = match openat(CWD, &self.dir, flags, Mode::empty()) {
            Ok(dir) => Dir::new(dir),
            Err(Errno::NOENT) => return Ok(tickets),
            Err(Errno::LOOP | Errno::NOTDIR) => {
                return Err(space::not_ours(&self.dir, "something else", "a directory"));
            }
            Err(errno) => Err(errno),
        };
        let failed = |errno: Errno| Fault::io("read the directory", &self.dir)(errno.into());
        for entry in entries.map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_str().unwrap_or_default();
            let number = name.split_once('.').and_then(|(number, _)| number.parse().ok());
            if let Some(number) = number {
                let name = name.to_owned();
                tickets.push(Ticket { number, name });
            }
        }
        Ok(tickets)
    }
}

/// A waiter's place in the queue. Dropping it leaves the queue, and wakes the waiter behind.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Queue,
    ticket: Ticket,
    path: PathBuf,
    lock: Flock,
    shown: Instant,
}

/// Who is before a place.
#[derive(Debug)]
pub(crate) enum Before {
    Nobody,
    /// The waiter with this ticket.
    Waiter(PathBuf),
    /// The ticket is no longer in the queue: the waiter showed no life for a while, or the directory was replaced.
    Unlisted,
}

impl Place {
    /// Draws a ticket behind all that are there, and says who is before it.
    pub(crate) fn take(queue: &Queue, owner: OwnerId) -> Result<(Self, Before)> {
        for _ in 0..MAX_DRAWN {
            space::ensure_dir(&queue.dir)?;
            let tickets = queue.tickets()?;
            let last = tickets.iter().map(|ticket| ticket.number).max().unwrap_or(0);
            let number = last.checked_add(1).ok_or_else(|| Fault::Exhausted {
                path: queue.dir.clone(),
            })?;
            // The owner makes it a name that there never was, but for a ticket that this owner had before.
            let name = format!("{number:020}.{owner}");
            let path = queue.dir.join(&name);
            let Some((file, inode)) = space::create_writable(&path)? else {
                continue;
            };
            // Whoever finds it unlocked takes it for a dead one's, and removes it.
            let Some(lock) = Flock::exclusive(&Arc::new(file), &path)? else {
                continue;
            };
            if space::is_at(&path, inode)? {
                let place = Self {
                    queue: queue.clone(),
                    ticket: Ticket { number, name },
                    path,
                    lock,
                    shown: Instant::now(),
                };
                let before = place.last_before(tickets)?;
                return Ok((place, before));
            }
        }
        Err(Fault::Replaced {
            path: queue.dir.clone(),
        })
    }

    /// Says who is before it now.
    pub(crate) fn before(&self) -> Result<Before> {
        let tickets = self.queue.tickets()?;
        if !tickets.contains(&self.ticket) || !self.is_listed() {
            return Ok(Before::Unlisted);
        }
        self.last_before(tickets)
    }

    fn last_before(&self, mut tickets: Vec<Ticket>) -> Result<Before> {
        tickets.retain(|ticket| *ticket < self.ticket);
        tickets.sort_unstable();
        for ticket in tickets.iter().rev() {
            let path = self.queue.dir.join(&ticket.name);
            if counts(&path)? {
                return Ok(Before::Waiter(path));
            }
        }
        Ok(Before::Nobody)
    }

    /// Says that nobody has removed the ticket.
    pub(crate) fn is_listed(&self) -> bool {
        self.file().metadata().is_ok_and(|ticket| ticket.nlink() > 0)
    }

    /// Shows that the waiter is alive, if it is time to. It tells nobody: the waiter behind sees it when it looks.
    pub(crate) fn show(&mut self) {
        if self.shown.elapsed() < BEAT / 2 {
            return;
        }
        self.shown = Instant::now();
        let pid = format!("{}\n", std::process::id());
        if self.file().write_all_at(pid.as_bytes(), 0).is_err() {
            // A full disk has room for this.
            touch(self.file());
        }
    }

    fn file(&self) -> &File {
        self.lock.file()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before it is unlocked. Whoever finds it unlocked removes what stays behind.
        let _ = fs::remove_file(&self.path);
    }
}

/// For how long the ticket counts if its waiter shows no life; `None` if it does not count any more. When the clock is set, it
/// does not until its waiter next shows life.
pub(crate) fn lasts(ticket: &Path) -> Result<Option<Duration>> {
    match ticket.symlink_metadata().and_then(|metadata| metadata.modified()) {
        Ok(shown) => Ok(left(shown, SystemTime::now())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Fault::io("look at", ticket)(error)),
    }
}

fn left(shown: SystemTime, now: SystemTime) -> Option<Duration> {
    // Some file systems keep whole seconds, and round down.
    let is_rounded = shown
        .duration_since(UNIX_EPOCH)
        .is_ok_and(|shown| shown.subsec_nanos() == 0);
    let lasts = if is_rounded {
        LASTS + Duration::from_secs(1)
    } else {
        LASTS
    };
    match now.duration_since(shown) {
        Ok(age) => lasts.checked_sub(age),
        // The two are read from the same clock, if not with the same precision.
        Err(ahead) => (ahead.duration() < LASTS).then_some(LASTS),
    }
}

/// Says that somebody waits with that ticket. One that is nobody's any more is removed.
pub(crate) fn counts(ticket: &Path) -> Result<bool> {
    let Some(file) = space::open(ticket)?.map(Arc::new) else {
        return Ok(false);
    };
    let probe = if lasts(ticket)?.is_some() {
        let probe = Flock::shared(&file, ticket)?;
        if probe.is_none() {
            return Ok(true);
        }
        probe
    } else {
        None
    };
    // Another may have been quicker.
    let _ = fs::remove_file(ticket);
    drop(probe);
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_counts_where_times_are_whole_seconds() {
        let whole = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let after = |millis| Duration::from_millis(millis);
        // It was written to at 0.9 s, and would be again a second later.
        let looked = whole + after(2_100);
        assert_eq!(left(whole + after(900), looked), Some(after(800)));
        assert_eq!(left(whole, looked), Some(after(900)));
        assert_eq!(left(whole + after(900), whole + after(3_000)), None);
        assert_eq!(left(whole, whole + after(3_100)), None);
        assert_eq!(left(whole, whole - LASTS), None);
    }
}
