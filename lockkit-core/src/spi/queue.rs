//! The rule of a queue of contenders at a server, for backends that have one: whose turn it is, and whom to watch. Pure.
//!
//! Each contender has an entry at the server. The entries have an order, and each says what its contender asks for. A contender
//! holds once no entry in conflict is before its own.
//!
//! ```
//! use lockkit_core::spi::{
//!     Mode,
//!     queue::{Before, Contender, Role, Turn, turn},
//! };
//!
//! let queue = [Contender::new("a", 1, Role::Reader), Contender::new("b", 2, Role::Writer)];
//! assert_eq!(turn(&queue, &"a", Mode::Shared), Turn::Mine);
//! let before = Before { watch: vec!["a"], one_to_go: true, ahead: None };
//! assert_eq!(turn(&queue, &"b", Mode::Exclusive), Turn::After(before));
//! ```

mod abandon_watch;

use std::{cmp::Ordering, num::NonZeroU32};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

pub use self::abandon_watch::{AbandonWatch, Abandoned, NotifyingWaker};
use crate::{LockKind, LockName, spi::Mode};

/// The characters that a component of a path escapes.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');

/// Encodes a name, or a namespace, as one component of a path: each byte outside of `A-Z a-z 0-9 . _ -` as `%` and two hexadecimal
/// digits. No two names have one encoding, and none begins with a `%` that is no escape.
///
/// ```
/// use lockkit_core::spi::queue::component;
///
/// assert_eq!(component("orders/42"), "orders%2F42");
/// ```
pub fn component(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Returns the name that a component of a path may be the [encoding](component) of. Whether it is, shows when that name is encoded.
pub fn name_in(component: &str) -> Option<LockName> {
    let name = percent_decode_str(component).decode_utf8().ok()?;
    LockName::new(name).ok()
}

/// The part of a contender: what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a backend has to decide about each")]
pub enum Role {
    /// To hold alone.
    Writer,
    /// To hold together with other readers.
    Reader,
    /// To hold one of this many permits.
    Permit(NonZeroU32),
}

/// A contender in a queue, by its entry at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contender<N> {
    /// The name of its entry.
    pub name: N,
    /// Its place in the order.
    pub order: i64,
    /// Its part.
    pub role: Role,
}

impl<N: Ord + Clone> Contender<N> {
    /// A contender whose entry has this name, this place in the order and this role.
    pub const fn new(name: N, order: i64, role: Role) -> Self {
        Self { name, order, role }
    }

    /// Returns the kind of thing that it contends for.
    pub const fn kind(&self) -> LockKind {
        match self.role {
            Role::Writer | Role::Reader => LockKind::Lock,
            Role::Permit(_) => LockKind::Semaphore,
        }
    }

    /// Compares by order. Equal ones, from a counter that stands still, are compared by name.
    fn cmp(&self, other: &Self) -> Ordering {
        (self.order, &self.name).cmp(&(other.order, &other.name))
    }
}

/// The outcome of a look at the queue, for one of the contenders.
#[derive(Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a backend has to decide about each")]
pub enum Turn<N> {
    /// It may hold.
    Mine,
    /// Others are before it.
    After(Before<N>),
    /// Its entry is not there.
    Gone,
    /// A contender before it uses the semaphore with so many permits.
    OtherSize(NonZeroU32),
}

/// The contenders before a waiter.
#[derive(Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a backend makes one of a shorter look")]
pub struct Before<N> {
    /// The contenders to watch, the nearest first. It cannot be the waiter's turn before one of these is gone.
    pub watch: Vec<N>,
    /// It is the waiter's turn as soon as one of them is gone.
    pub one_to_go: bool,
    /// The contender right before the only one to watch. When it is gone, there may be one to go.
    pub ahead: Option<N>,
}

/// Decides whether the contender whose entry is `own` may hold what these contend for. They may be in any order.
pub fn turn<N: Ord + Clone>(contenders: &[Contender<N>], own: &N, mode: Mode) -> Turn<N> {
    let Some(own) = contenders.iter().find(|one| one.name == *own) else {
        return Turn::Gone;
    };
    let earlier = || of_kind(contenders, mode.kind()).filter(|other| other.cmp(own).is_lt());
    if let Some(size) = other_size(earlier(), mode) {
        return Turn::OtherSize(size);
    }
    after(
        earlier().filter(|other| conflicts(other.role, mode)),
        capacity(mode),
    )
}

/// Returns `true` if a newcomer would have to wait.
pub fn is_busy<N: Ord + Clone>(contenders: &[Contender<N>], mode: Mode) -> bool {
    let others = of_kind(contenders, mode.kind()).filter(|other| conflicts(other.role, mode));
    others.count() >= capacity(mode)
}

/// Returns the names of the holders' entries, in the order of their grants, and the number of waiters.
pub fn holders<N: Ord + Clone>(contenders: &[Contender<N>], kind: LockKind) -> (Vec<N>, usize) {
    let mut all: Vec<_> = of_kind(contenders, kind).collect();
    all.sort_unstable_by(|a, b| a.cmp(b));
    let held = match all.first().map(|first| first.role) {
        None => 0,
        Some(Role::Writer) => 1,
        Some(Role::Reader) => all.iter().take_while(|one| one.role == Role::Reader).count(),
        Some(Role::Permit(permits)) => all.len().min(permits.get() as usize),
    };
    let waiting = all.len() - held;
    let held = all.into_iter().take(held);
    (held.map(|one| one.name.clone()).collect(), waiting)
}

/// Returns `true` if who asks for `mode` has to wait for an earlier contender with this role.
pub fn conflicts(earlier: Role, mode: Mode) -> bool {
    earlier != Role::Reader || mode != Mode::Shared
}

fn of_kind<N: Ord + Clone>(
    contenders: &[Contender<N>],
    kind: LockKind,
) -> impl Iterator<Item = &Contender<N>> {
    contenders.iter().filter(move |one| one.kind() == kind)
}

/// Returns the number of permits that one of these asks for, if it is not `mode`'s. Any of them may hold by its own number.
fn other_size<'a, N: 'a>(
    mut earlier: impl Iterator<Item = &'a Contender<N>>,
    mode: Mode,
) -> Option<NonZeroU32> {
    let Mode::Permits(wanted) = mode else { return None };
    earlier.find_map(|other| match other.role {
        Role::Permit(size) => Some(size).filter(|size| *size != wanted),
        Role::Writer | Role::Reader => None,
    })
}

fn capacity(mode: Mode) -> usize {
    match mode {
        Mode::Exclusive | Mode::Shared => 1,
        Mode::Permits(permits) => permits.get() as usize,
    }
}

/// Decides for a contender with these before it. It may hold if they are fewer than `capacity`. Otherwise one of the nearest
/// `capacity` has to go first: until then all of these are still before it.
fn after<'a, N: Ord + Clone + 'a>(
    before: impl Iterator<Item = &'a Contender<N>>,
    capacity: usize,
) -> Turn<N> {
    let mut before: Vec<_> = before.collect();
    if before.len() < capacity {
        return Turn::Mine;
    }
    let one_to_go = before.len() == capacity;
    let farther = before.len() - capacity;
    if farther > 0 {
        before.select_nth_unstable_by(farther, |a, b| a.cmp(b));
    }
    let ahead = before[..farther].iter().max_by(|a, b| a.cmp(b));
    let ahead = ahead.filter(|_| capacity == 1).map(|one| one.name.clone());
    let mut watch = before.split_off(farther);
    watch.sort_unstable_by(|a, b| b.cmp(a));
    Turn::After(Before {
        watch: watch.iter().map(|one| one.name.clone()).collect(),
        one_to_go,
        ahead,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Parses `<anything><role>-<ten digits>`.
    fn contender(name: &str) -> Option<Contender<&str>> {
        let (stem, number) = name.split_at(name.len().checked_sub(10)?);
        let permits = stem
            .rsplit_once("-permit-")
            .map(|(_, size)| size.trim_end_matches('-'));
        let role = match permits {
            Some(size) => Role::Permit(size.parse().ok()?),
            None if stem.contains("__READ__") => Role::Reader,
            None => Role::Writer,
        };
        Some(Contender::new(name, number.parse().ok()?, role))
    }

    fn contenders(all: &[String]) -> Vec<Contender<&str>> {
        all.iter().filter_map(|name| contender(name)).collect()
    }

    fn turn<'a>(all: &'a [String], own: &'a str, mode: Mode) -> Turn<&'a str> {
        super::turn(&contenders(all), &own, mode)
    }

    fn is_busy(all: &[String], mode: Mode) -> bool {
        super::is_busy(&contenders(all), mode)
    }

    fn holders(all: &[String], kind: LockKind) -> (Vec<&str>, usize) {
        super::holders(&contenders(all), kind)
    }

    fn permits(n: u32) -> Mode {
        Mode::Permits(NonZeroU32::new(n).unwrap())
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn after<'a>(watch: &[&'a str], one_to_go: bool) -> Turn<&'a str> {
        Turn::After(Before {
            watch: watch.to_vec(),
            one_to_go,
            ahead: None,
        })
    }

    #[test]
    fn a_writer_waits_for_the_nearest_before_it() {
        let all = names(&[
            "b-lock-0000000009",
            "a-lock-0000000010",
            "c-__READ__-lock-0000000008",
            "junk",
        ]);
        assert_eq!(turn(&all, "c-__READ__-lock-0000000008", Mode::Shared), Turn::Mine);
        assert_eq!(
            turn(&all, "b-lock-0000000009", Mode::Exclusive),
            after(&["c-__READ__-lock-0000000008"], true)
        );
        assert_eq!(
            turn(&all, "a-lock-0000000010", Mode::Exclusive),
            Turn::After(Before {
                watch: vec!["b-lock-0000000009"],
                one_to_go: false,
                ahead: Some("c-__READ__-lock-0000000008"),
            })
        );
        assert_eq!(turn(&all, "d-lock-0000000011", Mode::Exclusive), Turn::Gone);
        assert_eq!(
            holders(&all, LockKind::Lock),
            (vec!["c-__READ__-lock-0000000008"], 2)
        );
    }

    #[test]
    fn a_reader_waits_for_earlier_writers_alone() {
        let all = names(&[
            "a-__READ__0000000001",
            "b-__WRIT__0000000002",
            "c-__READ__0000000003",
            "d-__WRIT__0000000004",
        ]);
        assert_eq!(turn(&all, "a-__READ__0000000001", Mode::Shared), Turn::Mine);
        assert_eq!(
            turn(&all, "c-__READ__0000000003", Mode::Shared),
            after(&["b-__WRIT__0000000002"], true)
        );
        assert!(is_busy(&all, Mode::Shared));
        assert!(!is_busy(&all[..1], Mode::Shared));
        assert!(is_busy(&all[..1], Mode::Exclusive));
        assert_eq!(
            holders(&all[..1], LockKind::Lock),
            (vec!["a-__READ__0000000001"], 0)
        );
    }

    #[test]
    fn a_permit_waits_for_one_of_as_many_as_there_are() {
        let all: Vec<_> = (0..5).map(|i| format!("p-permit-2-{i:010}")).collect();
        assert_eq!(turn(&all, &all[1], permits(2)), Turn::Mine);
        assert_eq!(turn(&all, &all[2], permits(2)), after(&[&all[1], &all[0]], true));
        assert_eq!(turn(&all, &all[4], permits(2)), after(&[&all[3], &all[2]], false));
        assert_eq!(
            holders(&all, LockKind::Semaphore),
            (vec![all[0].as_str(), all[1].as_str()], 3)
        );
        let mut mixed = all.clone();
        mixed.push("q-permit-3-0000000009".to_owned());
        assert_eq!(
            turn(&mixed, "q-permit-3-0000000009", permits(3)),
            Turn::OtherSize(NonZeroU32::new(2).unwrap())
        );
        assert_eq!(
            turn(&mixed, &all[0], permits(2)),
            Turn::Mine,
            "those who came before say how many"
        );
        // Not only the first of them: the second may be in once that has gone.
        let all = names(&[
            "a-permit-3-0000000000",
            "b-permit-1-0000000001",
            "c-permit-3-0000000002",
        ]);
        let one = Turn::OtherSize(NonZeroU32::MIN);
        assert_eq!(turn(&all, &all[2], permits(3)), one);
        assert!(!is_busy(&all[..1], permits(2)));
    }

    /// The rule as it is told, to compare with `turn`.
    fn reference(all: &[String], own: &str, mode: Mode) -> bool {
        let own = contender(own).unwrap();
        let earlier = all
            .iter()
            .filter_map(|name| contender(name))
            .filter(|other| other.order < own.order);
        match mode {
            Mode::Exclusive => earlier.count() == 0,
            Mode::Shared => !earlier.into_iter().any(|other| other.role == Role::Writer),
            Mode::Permits(n) => earlier.count() < n.get() as usize,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        /// Contenders that disagree about a semaphore's size come, look now and then, and go.
        #[test]
        fn no_more_hold_than_any_of_them_allows(
            steps in proptest::collection::vec((0..3_u8, 1..4_u32, any::<proptest::sample::Index>()), 1..60),
        ) {
            let mut all: Vec<(String, u32, bool)> = Vec::new();
            for (i, (step, size, which)) in steps.into_iter().enumerate() {
                if step == 0 || all.is_empty() {
                    all.push((format!("x-permit-{size}-{i:010}"), size, false));
                    continue;
                }
                let which = which.index(all.len());
                let names: Vec<_> = all.iter().map(|(name, ..)| name.clone()).collect();
                let (name, size, inside) = &mut all[which];
                match turn(&names, name, permits(*size)) {
                    _ if *inside && step == 1 => {}
                    Turn::Mine if !*inside => *inside = true,
                    Turn::After(_) => {}
                    _ => { all.remove(which); }
                }
                let inside = || all.iter().filter(|(.., inside)| *inside);
                let least = inside().map(|(_, size, _)| *size).min().unwrap_or(1);
                prop_assert!(inside().count() <= least as usize, "{:?}", all);
            }
        }
    }

    proptest! {
        #[test]
        fn turns_follow_the_rule_and_watches_suffice(
            roles in proptest::collection::vec(0..2_u8, 1..12),
            size in 1..4_u32,
            semaphore in any::<bool>(),
            order in any::<u64>(),
        ) {
            let named = |i: usize, role: u8| match (semaphore, role) {
                (true, _) => format!("x-permit-{size}-{i:010}"),
                (false, 0) => format!("x-lock-{i:010}"),
                (false, _) => format!("x-__READ__-lock-{i:010}"),
            };
            let mode_of = |role: u8| match (semaphore, role) {
                (true, _) => permits(size),
                (false, 0) => Mode::Exclusive,
                (false, _) => Mode::Shared,
            };
            let mut all: Vec<_> = roles.iter().enumerate().map(|(i, role)| named(i, *role)).collect();
            fastrand::Rng::with_seed(order).shuffle(&mut all);
            for (i, role) in roles.iter().enumerate() {
                let (own, mode) = (named(i, *role), mode_of(*role));
                match turn(&all, &own, mode) {
                    Turn::Mine => prop_assert!(reference(&all, &own, mode)),
                    Turn::After(before) => {
                        prop_assert!(!reference(&all, &own, mode));
                        // With none of the watched gone it is still not its turn, whoever else goes.
                        let watched: BTreeSet<_> = before.watch.iter().copied().collect();
                        let rest: Vec<_> = all.iter().filter(|n| watched.contains(n.as_str()) || **n == own).cloned().collect();
                        prop_assert!(!reference(&rest, &own, mode));
                        let alone = capacity(mode) == 1;
                        prop_assert_eq!(before.ahead.is_some(), alone && !before.one_to_go);
                        if let Some(ahead) = &before.ahead {
                            let rest: Vec<_> = all.iter().filter(|name| **name != before.watch[0]).cloned().collect();
                            let next = turn(&rest, &own, mode);
                            prop_assert!(matches!(&next, Turn::After(next) if next.watch == [*ahead]), "{:?}", next);
                        }
                        for gone in &before.watch {
                            let rest: Vec<_> = all.iter().filter(|name| name.as_str() != *gone).cloned().collect();
                            prop_assert_eq!(reference(&rest, &own, mode), before.one_to_go);
                        }
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
