//! The rule of the queue: from the names in a directory to whose turn it is. Pure.

use std::num::NonZeroU32;

use lockkit_core::{LockKind, spi::Mode};

use crate::layout::{Contender, Role};

/// The outcome of a look at the directory, for one of the contenders.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It may hold.
    Mine,
    /// Others are before it.
    After(Before),
    /// Its node is not there.
    Gone,
    /// A contender before it uses the semaphore with so many permits.
    OtherSize(NonZeroU32),
}

/// The contenders before a waiter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Before {
    /// The contenders to watch. It cannot be the waiter's turn before one of these is gone.
    pub(crate) watch: Vec<String>,
    /// It is the waiter's turn as soon as one of them is gone.
    pub(crate) one_to_go: bool,
    /// The contender right before the only one to watch. When it is gone, there may be one to go.
    pub(crate) ahead: Option<String>,
}

/// Decides whether `own` may hold the lock that `children` contend for.
pub(crate) fn turn(children: &[String], own: &str, mode: Mode) -> Turn {
    let Some(own) = children
        .iter()
        .find(|child| *child == own)
        .and_then(|child| Contender::parse(child))
    else {
        return Turn::Gone;
    };
    let earlier = || contenders(children, mode.kind()).filter(|other| other.order(&own).is_lt());
    if let Some(size) = other_size(earlier(), mode) {
        return Turn::OtherSize(size);
    }
    after(
        earlier().filter(|other| conflicts(other.role, mode)),
        capacity(mode),
    )
}

/// A newcomer would have to wait.
pub(crate) fn is_busy(children: &[String], mode: Mode) -> bool {
    let others = contenders(children, mode.kind()).filter(|other| conflicts(other.role, mode));
    others.count() >= capacity(mode)
}

/// The waiter waits for a contender with this name, if that is right before it. For a permit the name does not tell that
/// without the others.
pub(crate) fn excludes(name: &str, mode: Mode) -> bool {
    let role = Contender::parse(name).map(|contender| contender.role);
    matches!(
        (role, mode),
        (Some(Role::Writer), Mode::Exclusive | Mode::Shared) | (Some(Role::Reader), Mode::Exclusive)
    )
}

/// Nobody else holds while a contender with this name does.
pub(crate) fn is_writer(name: &str) -> bool {
    Contender::parse(name).is_some_and(|contender| contender.role == Role::Writer)
}

/// Returns the holders, in the order of their grants, and the number of waiters.
pub(crate) fn holders(children: &[String], kind: LockKind) -> (Vec<&str>, usize) {
    let mut all: Vec<_> = contenders(children, kind).collect();
    all.sort_unstable_by(Contender::order);
    let held = match all.first().map(|first| first.role) {
        None => 0,
        Some(Role::Writer) => 1,
        Some(Role::Reader) => all.iter().take_while(|one| one.role == Role::Reader).count(),
        Some(Role::Permit(permits)) => all.len().min(permits.get() as usize),
    };
    let waiting = all.len() - held;
    (all.into_iter().take(held).map(|one| one.name).collect(), waiting)
}

fn contenders(children: &[String], kind: LockKind) -> impl Iterator<Item = Contender<'_>> {
    children
        .iter()
        .filter_map(|child| Contender::parse(child))
        .filter(move |contender| contender.kind() == kind)
}

/// Returns the number of permits that one of these asks for, if it is not `mode`'s. Any of them may hold by its own number.
fn other_size<'a>(mut earlier: impl Iterator<Item = Contender<'a>>, mode: Mode) -> Option<NonZeroU32> {
    let Mode::Permits(wanted) = mode else { return None };
    earlier.find_map(|other| match other.role {
        Role::Permit(size) => Some(size).filter(|size| *size != wanted),
        Role::Writer | Role::Reader => None,
    })
}

fn conflicts(earlier: Role, mode: Mode) -> bool {
    earlier != Role::Reader || mode != Mode::Shared
}

fn capacity(mode: Mode) -> usize {
    match mode {
        Mode::Exclusive | Mode::Shared => 1,
        Mode::Permits(permits) => permits.get() as usize,
    }
}

/// Decides for a contender with these before it. It may hold if they are fewer than `capacity`. Otherwise one of the nearest
/// `capacity` has to go first: until then all of these are still before it.
fn after<'a>(before: impl Iterator<Item = Contender<'a>>, capacity: usize) -> Turn {
    let mut before: Vec<_> = before.collect();
    if before.len() < capacity {
        return Turn::Mine;
    }
    let one_to_go = before.len() == capacity;
    let farther = before.len() - capacity;
    if farther > 0 {
        before.select_nth_unstable_by(farther, Contender::order);
    }
    let ahead = before[..farther].iter().max_by(|a, b| a.order(b));
    let ahead = ahead.filter(|_| capacity == 1).map(|one| one.name.to_owned());
    let mut watch: Vec<_> = before[farther..].to_vec();
    watch.sort_unstable_by(|a, b| b.order(a));
    Turn::After(Before {
        watch: watch.iter().map(|one| one.name.to_owned()).collect(),
        one_to_go,
        ahead,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn permits(n: u32) -> Mode {
        Mode::Permits(NonZeroU32::new(n).unwrap())
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn after(watch: &[&str], one_to_go: bool) -> Turn {
        Turn::After(Before {
            watch: names(watch),
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
                watch: names(&["b-lock-0000000009"]),
                one_to_go: false,
                ahead: Some("c-__READ__-lock-0000000008".to_owned()),
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
        let own = Contender::parse(own).unwrap();
        let earlier = all
            .iter()
            .filter_map(|name| Contender::parse(name))
            .filter(|other| other.sequence < own.sequence);
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
                        let watched: BTreeSet<_> = before.watch.iter().collect();
                        let rest: Vec<_> = all.iter().filter(|n| watched.contains(n) || **n == own).cloned().collect();
                        prop_assert!(!reference(&rest, &own, mode));
                        let alone = capacity(mode) == 1;
                        prop_assert_eq!(before.ahead.is_some(), alone && !before.one_to_go);
                        if let Some(ahead) = &before.ahead {
                            let rest: Vec<_> = all.iter().filter(|name| **name != before.watch[0]).cloned().collect();
                            let next = turn(&rest, &own, mode);
                            prop_assert!(matches!(&next, Turn::After(next) if next.watch == [ahead.clone()]), "{:?}", next);
                        }
                        for gone in &before.watch {
                            let rest: Vec<_> = all.iter().filter(|name| *name != gone).cloned().collect();
                            prop_assert_eq!(reference(&rest, &own, mode), before.one_to_go);
                        }
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
