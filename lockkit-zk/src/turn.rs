//! The rule of the queue, for the names in a directory. The rule itself is the core's.

use lockkit_core::{
    LockKind,
    spi::{
        Mode,
        queue::{self, Contender, Role},
    },
};

use crate::layout::contender;

/// The outcome of a look at the directory, for one of the contenders.
pub(crate) type Turn<'a> = queue::Turn<&'a str>;
/// The contenders before a waiter.
pub(crate) type Before<'a> = queue::Before<&'a str>;

/// Decides whether `own` may hold the lock that `children` contend for.
pub(crate) fn turn<'a>(children: &'a [String], own: &'a str, mode: Mode) -> Turn<'a> {
    queue::turn(&contenders(children), &own, mode)
}

/// A newcomer would have to wait.
pub(crate) fn is_busy(children: &[String], mode: Mode) -> bool {
    queue::is_busy(&contenders(children), mode)
}

/// The waiter waits for a contender with this name, if that is right before it. For a permit the name does not tell that
/// without the others.
pub(crate) fn excludes(name: &str, mode: Mode) -> bool {
    let role = contender(name).map(|contender| contender.role);
    matches!(
        (role, mode),
        (Some(Role::Writer), Mode::Exclusive | Mode::Shared) | (Some(Role::Reader), Mode::Exclusive)
    )
}

/// Nobody else holds while a contender with this name does.
pub(crate) fn is_writer(name: &str) -> bool {
    contender(name).is_some_and(|contender| contender.role == Role::Writer)
}

/// Returns the holders, in the order of their grants, and the number of waiters.
pub(crate) fn holders(children: &[String], kind: LockKind) -> (Vec<&str>, usize) {
    queue::holders(&contenders(children), kind)
}

fn contenders(children: &[String]) -> Vec<Contender<&str>> {
    children.iter().filter_map(|child| contender(child)).collect()
}
