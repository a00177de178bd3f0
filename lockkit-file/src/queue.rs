//! The queue of a name: each waiter has a ticket, a file in the queue's directory that it keeps locked while it
//! waits.
//!
//! The system unlocks the ticket of a process that ends, and a stopped waiter sends no heartbeat. Neither ticket is
//! live any more, and the next process that looks removes it. So nobody waits for a waiter that cannot come.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::spi::OwnerId;
use tokio::time::Instant;

use crate::{
    error::{FileError, Result},
    flock::Flock,
    hold::wake_watchers,
    layout,
};

/// The interval of a waiter's heartbeats. Each wakes a sleeping process.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// The time for which a ticket stays live after its last heartbeat. A stopped waiter keeps others out for no longer.
const LIVE_FOR: Duration = Duration::from_secs(2);
/// Limits the draws of a waiter whose new tickets are taken for a dead waiter's before they are locked.
const MAX_DRAWS: usize = 64;
/// A number that no queue reaches by itself. A ticket with one was put there, and none could be drawn behind the last number.
const ODD: u64 = u64::MAX / 2;

/// The queue of one name.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    dir: PathBuf,
}

impl Queue {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Returns whether there is no ticket, live or not.
    pub(crate) fn is_empty(&self) -> Result<bool> {
        Ok(self.tickets()?.is_empty())
    }

    /// Returns whether anybody ever waited, by one system call.
    pub(crate) fn may_have_waiters(&self) -> bool {
        self.dir.symlink_metadata().is_ok()
    }

    /// Returns whether somebody waits.
    pub(crate) fn has_waiters(&self) -> Result<bool> {
        for ticket in self.tickets()? {
            if is_live(&self.dir.join(ticket.file_name))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the tickets with odd numbers that are not live. Returns whether there was one.
    fn drop_dead_odd(&self, tickets: &[TicketName]) -> Result<bool> {
        let mut any = false;
        for ticket in tickets.iter().filter(|ticket| ticket.number >= ODD) {
            let path = self.dir.join(&ticket.file_name);
            any |= !is_live(&path)?;
        }
        Ok(any)
    }

    fn tickets(&self) -> Result<Vec<TicketName>> {
        let mut tickets = Vec::new();
        let Some(entries) = layout::entries(&self.dir)? else {
            return Ok(tickets);
        };
        for entry in entries {
            let entry =
                entry.map_err(|errno| FileError::io("read the directory", &self.dir)(errno.into()))?;
            let file_name = entry.file_name().to_str().unwrap_or_default();
            let number = file_name
                .split_once('.')
                .filter(|(_, owner)| layout::is_owner(owner))
                .and_then(|(number, _)| number.parse().ok());
            if let Some(number) = number {
                let file_name = file_name.to_owned();
                tickets.push(TicketName { number, file_name });
            }
        }
        Ok(tickets)
    }
}

/// A ticket's rank in the queue: its number, then its file's name, as two that are drawn at once may have one number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TicketName {
    number: u64,
    file_name: String,
}

/// A waiter's ticket. Dropping it leaves the queue and wakes the waiter behind.
#[derive(Debug)]
pub(crate) struct Ticket {
    queue: Queue,
    name: TicketName,
    path: PathBuf,
    lock: Flock,
    last_heartbeat: Instant,
}

/// The waiter before a ticket.
#[derive(Debug)]
pub(crate) enum Predecessor {
    /// None: the ticket is the first.
    Nobody,
    /// The waiter with this ticket.
    Waiter(PathBuf),
    /// Unknown, as the ticket is no longer in the queue: it was not live for a while, or the directory was replaced.
    Unlisted,
}

impl Ticket {
    /// Draws a ticket behind all others, and returns it with its predecessor.
    pub(crate) fn draw(queue: &Queue, owner: OwnerId) -> Result<(Self, Predecessor)> {
        for _ in 0..MAX_DRAWS {
            layout::ensure_dir(&queue.dir)?;
            let tickets = queue.tickets()?;
            let last = tickets.iter().map(|ticket| ticket.number).max().unwrap_or(0);
            if last >= ODD && queue.drop_dead_odd(&tickets)? {
                continue;
            }
            let number = last.checked_add(1).ok_or_else(|| FileError::NoTickets {
                path: queue.dir.clone(),
            })?;
            // No other owner ever has a file of this name.
            let file_name = format!("{number:020}.{owner}");
            let path = queue.dir.join(&file_name);
            let Some((file, inode)) = layout::create_writable(&path)? else {
                continue;
            };
            // Until it is locked, others take it for a dead waiter's and remove it.
            let Some(lock) = Flock::exclusive(&Arc::new(file), &path)? else {
                continue;
            };
            if layout::is_at(&path, inode)? {
                let ticket = Self {
                    queue: queue.clone(),
                    name: TicketName { number, file_name },
                    path,
                    lock,
                    last_heartbeat: Instant::now(),
                };
                let predecessor = ticket.last_live_before(tickets)?;
                return Ok((ticket, predecessor));
            }
        }
        Err(FileError::Replaced {
            path: queue.dir.clone(),
        })
    }

    /// Returns the waiter before it now.
    pub(crate) fn predecessor(&self) -> Result<Predecessor> {
        let tickets = self.queue.tickets()?;
        if !tickets.contains(&self.name) || !self.is_listed() {
            return Ok(Predecessor::Unlisted);
        }
        self.last_live_before(tickets)
    }

    fn last_live_before(&self, mut tickets: Vec<TicketName>) -> Result<Predecessor> {
        tickets.retain(|ticket| *ticket < self.name);
        tickets.sort_unstable();
        for ticket in tickets.iter().rev() {
            let path = self.queue.dir.join(&ticket.file_name);
            if is_live(&path)? {
                return Ok(Predecessor::Waiter(path));
            }
        }
        Ok(Predecessor::Nobody)
    }

    /// Returns whether its file is still there.
    pub(crate) fn is_listed(&self) -> bool {
        self.file().metadata().is_ok_and(|ticket| ticket.nlink() > 0)
    }

    /// Writes a heartbeat if one is due. It wakes nobody: the waiter behind sees it when it next looks.
    pub(crate) fn heartbeat(&mut self) {
        if self.last_heartbeat.elapsed() < HEARTBEAT / 2 {
            return;
        }
        self.last_heartbeat = Instant::now();
        let pid = format!("{}\n", std::process::id());
        if self.file().write_all_at(pid.as_bytes(), 0).is_err() {
            // Setting the file's times works on a full disk, too.
            wake_watchers(self.file());
        }
    }

    fn file(&self) -> &File {
        self.lock.file()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Before it is unlocked. If this fails, the next process that finds it unlocked removes it.
        let _ = layout::remove(&self.path);
    }
}

/// Returns for how long the ticket stays live without another heartbeat; `None` if it is not live. After the wall
/// clock is set, it may not be until the next heartbeat.
pub(crate) fn time_left(ticket: &Path) -> Result<Option<Duration>> {
    match ticket.symlink_metadata().and_then(|metadata| metadata.modified()) {
        Ok(last_heartbeat) => Ok(time_left_at(last_heartbeat, SystemTime::now())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::io("look at", ticket)(error)),
    }
}

fn time_left_at(last_heartbeat: SystemTime, now: SystemTime) -> Option<Duration> {
    // Some file systems keep whole seconds, and round down.
    let is_rounded = last_heartbeat
        .duration_since(UNIX_EPOCH)
        .is_ok_and(|since_epoch| since_epoch.subsec_nanos() == 0);
    let live_for = if is_rounded {
        LIVE_FOR + Duration::from_secs(1)
    } else {
        LIVE_FOR
    };
    match now.duration_since(last_heartbeat) {
        Ok(age) => live_for.checked_sub(age),
        // Both come from one clock, but not with the same precision.
        Err(ahead) => (ahead.duration() < LIVE_FOR).then_some(LIVE_FOR),
    }
}

/// Returns whether the ticket's waiter lives, and removes the ticket if not.
pub(crate) fn is_live(ticket: &Path) -> Result<bool> {
    let Some(file) = layout::open(ticket)?.map(Arc::new) else {
        return Ok(false);
    };
    let probe = if time_left(ticket)?.is_some() {
        let probe = Flock::shared(&file, ticket)?;
        if probe.is_none() {
            return Ok(true);
        }
        probe
    } else {
        None
    };
    // Another process may have removed it first.
    let _ = layout::remove(ticket);
    drop(probe);
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_live_where_times_are_whole_seconds() {
        let whole = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let after = |millis| Duration::from_millis(millis);
        // Its heartbeats were at 0.9 s and are at 1.9 s.
        let looked = whole + after(2_100);
        assert_eq!(time_left_at(whole + after(900), looked), Some(after(800)));
        assert_eq!(time_left_at(whole, looked), Some(after(900)));
        assert_eq!(time_left_at(whole + after(900), whole + after(3_000)), None);
        assert_eq!(time_left_at(whole, whole + after(3_100)), None);
        assert_eq!(time_left_at(whole, whole - LIVE_FOR), None);
    }
}
