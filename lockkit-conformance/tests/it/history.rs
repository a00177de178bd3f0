//! The checker: good histories pass, each property has a bad one that it rejects, and a linearizability checker
//! agrees.

use std::num::NonZeroU32;

use lockkit_conformance::{
    history::{Acquisition, History, Limits, Property, Sight, Write},
    stall::Stopwatch,
};
use lockkit_core::{LockKind, spi::Mode};
use todc_utils::{Action, History as Actions, Specification, WGLChecker};

const MS: u64 = 1_000_000;

fn hold(who: u64, mode: Mode, token: u64, [asked, granted, released]: [u64; 3]) -> Acquisition {
    let mut hold = Acquisition::asked("a", mode, who, asked);
    hold.granted = Some((granted, token));
    hold.released = Some(released);
    hold
}

fn exclusive(who: u64, token: u64, times: [u64; 3]) -> Acquisition {
    hold(who, Mode::Exclusive, token, times)
}

fn permits(size: u32) -> Mode {
    Mode::Permits(NonZeroU32::new(size).unwrap())
}

fn violated(acquisitions: Vec<Acquisition>, limits: Limits) -> Option<Property> {
    let history = History {
        acquisitions,
        ..History::default()
    };
    history.check(&limits).err().map(|violation| violation.property)
}

fn accepts(acquisitions: Vec<Acquisition>) {
    let history = History {
        acquisitions,
        ..History::default()
    };
    history.check(&Limits::default()).unwrap();
}

fn rejects(property: Property, acquisitions: Vec<Acquisition>) {
    assert_eq!(violated(acquisitions, Limits::default()), Some(property));
}

#[test]
fn exclusion() {
    accepts(vec![exclusive(1, 1, [0, 1, 5]), exclusive(2, 2, [2, 5, 9])]);
    rejects(
        Property::Exclusion,
        vec![exclusive(1, 1, [0, 1, 6]), exclusive(2, 2, [2, 5, 9])],
    );
    accepts(vec![
        hold(1, Mode::Shared, 1, [0, 1, 9]),
        hold(2, Mode::Shared, 2, [0, 2, 7]),
    ]);
    rejects(
        Property::Exclusion,
        vec![hold(1, Mode::Shared, 1, [0, 1, 9]), exclusive(2, 2, [0, 2, 7])],
    );
    rejects(
        Property::Exclusion,
        vec![exclusive(1, 1, [0, 1, 9]), hold(2, Mode::Shared, 2, [0, 2, 7])],
    );
    let three = [[0, 1, 9], [0, 2, 9], [0, 3, 9]];
    let of = |size| {
        (1..)
            .zip(three)
            .map(|(who, times)| hold(who, permits(size), who, times))
            .collect::<Vec<_>>()
    };
    accepts(of(3));
    rejects(Property::Exclusion, of(2));
    let mut apart = of(3);
    apart.push(exclusive(9, 9, [0, 1, 9]));
    accepts(apart);
}

#[test]
fn a_hold_that_was_over_when_granted_excludes_nobody() {
    let mut zombie = exclusive(1, 1, [0, 8, 12]);
    zombie.until = Some(6);
    accepts(vec![zombie.clone(), exclusive(2, 2, [1, 7, 9])]);
    zombie.until = Some(10);
    rejects(Property::Exclusion, vec![zombie, exclusive(2, 2, [1, 7, 9])]);
}

#[test]
fn tokens() {
    accepts(vec![exclusive(1, 3, [0, 1, 2]), exclusive(2, 7, [0, 3, 4])]);
    rejects(
        Property::Tokens,
        vec![exclusive(1, 7, [0, 1, 2]), exclusive(2, 3, [0, 3, 4])],
    );
    rejects(
        Property::Tokens,
        vec![exclusive(1, 7, [0, 1, 2]), exclusive(2, 7, [0, 3, 4])],
    );
    let readers = || {
        vec![
            hold(1, Mode::Shared, 9, [0, 1, 5]),
            hold(2, Mode::Shared, 4, [0, 2, 5]),
        ]
    };
    accepts(readers());
    let mut writer_behind = readers();
    writer_behind.push(exclusive(3, 8, [0, 6, 7]));
    rejects(Property::Tokens, writer_behind);
    rejects(
        Property::Tokens,
        vec![exclusive(1, 9, [0, 1, 2]), hold(2, Mode::Shared, 8, [0, 3, 4])],
    );
    accepts(vec![
        hold(1, permits(2), 9, [0, 1, 2]),
        hold(2, permits(2), 8, [0, 3, 4]),
    ]);
    rejects(
        Property::Tokens,
        vec![
            hold(1, permits(2), 9, [0, 1, 2]),
            hold(2, permits(2), 9, [0, 3, 4]),
        ],
    );
}

#[test]
fn zombies_have_tokens_too() {
    let mut zombie = exclusive(1, 5, [0, 3, 9]);
    zombie.until = Some(2);
    accepts(vec![zombie.clone(), exclusive(2, 6, [4, 5, 7])]);
    rejects(Property::Tokens, vec![zombie.clone(), exclusive(2, 4, [4, 5, 7])]);
    rejects(Property::Tokens, vec![zombie.clone(), exclusive(2, 5, [1, 2, 4])]);
    // Asked for before the zombie was granted: either may have been first at the server.
    accepts(vec![zombie, exclusive(2, 4, [1, 2, 4])]);
}

#[test]
fn fencing() {
    let write = |who, token, at, admitted| Write {
        lock: "a".into(),
        who,
        token,
        at,
        admitted,
    };
    let check = |writes| {
        History {
            writes,
            ..History::default()
        }
        .check(&Limits::default())
    };
    check(vec![
        write(1, 1, 1, true),
        write(2, 2, 2, true),
        write(1, 1, 3, false),
        write(2, 2, 4, true),
    ])
    .unwrap();
    let interleaved = check(vec![
        write(1, 1, 1, true),
        write(2, 2, 2, true),
        write(1, 1, 3, true),
    ])
    .unwrap_err();
    assert_eq!(interleaved.property, Property::Fencing, "{interleaved}");
    let repeated = check(vec![write(1, 1, 1, true), write(2, 1, 2, true)]).unwrap_err();
    assert_eq!(repeated.property, Property::Fencing, "{repeated}");
}

#[test]
fn liveness() {
    let idle = || {
        vec![
            exclusive(1, 1, [0, 1, 2]),
            exclusive(2, 2, [1, 1_500 * MS, 1_600 * MS]),
        ]
    };
    rejects(Property::Liveness, idle());
    let mut limits = Limits::default();
    limits.healed = 1_000 * MS;
    assert_eq!(
        violated(idle(), limits),
        None,
        "it counts from the moment the last fault had healed"
    );
    accepts(vec![
        exclusive(1, 1, [0, 1, 2]),
        exclusive(2, 2, [1_500 * MS, 1_500 * MS, 1_600 * MS]),
    ]);
    rejects(
        Property::Liveness,
        vec![
            exclusive(1, 1, [0, 1, 2]),
            Acquisition::asked("a", Mode::Exclusive, 2, 1),
        ],
    );
    let mut gave_up = Acquisition::asked("a", Mode::Exclusive, 2, 1);
    gave_up.gave_up = Some(3_000 * MS);
    accepts(vec![exclusive(1, 1, [0, 1, 2]), gave_up]);
}

#[test]
fn fifo() {
    let queued = |mut a: Acquisition, at| {
        a.queued = Some(at);
        a
    };
    let overtaken = || vec![queued(exclusive(1, 2, [0, 7, 8]), 2), exclusive(2, 1, [3, 5, 6])];
    let mut limits = Limits::default();
    assert_eq!(violated(overtaken(), limits), None, "it was not promised");
    limits.fifo = true;
    assert_eq!(violated(overtaken(), limits), Some(Property::Fifo));
    let unordered = vec![queued(exclusive(1, 2, [0, 7, 8]), 4), exclusive(2, 1, [3, 5, 6])];
    assert_eq!(
        violated(unordered, limits),
        None,
        "asked before the first was known to queue"
    );
    let ordered = vec![
        queued(exclusive(1, 1, [0, 5, 6]), 2),
        queued(exclusive(2, 2, [3, 7, 8]), 4),
    ];
    assert_eq!(violated(ordered, limits), None);
}

#[test]
fn residue() {
    let sight = |at, holders: &[u64], waiters| Sight {
        lock: "a".into(),
        kind: LockKind::Lock,
        at,
        holders: holders.to_vec(),
        waiters,
    };
    let check = |sights| {
        let acquisitions = vec![exclusive(1, 1, [0, 1, 2])];
        History {
            acquisitions,
            sights,
            ..History::default()
        }
        .check(&Limits::default())
    };
    let later = 2_000 * MS;
    assert_eq!(
        check(vec![sight(later, &[], Some(0)), sight(1, &[1], None)])
            .unwrap()
            .quiet_sights,
        1
    );
    assert_eq!(
        check(vec![sight(3, &[1], None)]).unwrap().quiet_sights,
        0,
        "within the time to linger"
    );
    assert_eq!(
        check(vec![sight(later, &[1], None)]).unwrap_err().property,
        Property::Residue
    );
    assert_eq!(
        check(vec![sight(later, &[], Some(1))]).unwrap_err().property,
        Property::Residue
    );
}

#[test]
fn notice() {
    let next = exclusive(2, 2, [1, 20, 30]);
    let lost = |until, lost| {
        let mut hold = exclusive(1, 1, [0, 1, 0]);
        (hold.released, hold.until, hold.lost) = (None, until, lost);
        hold
    };
    accepts(vec![lost(Some(10), Some(12)), next.clone()]);
    accepts(vec![lost(Some(10), Some(25)), next.clone()]);
    rejects(Property::Notice, vec![lost(Some(10), None), next.clone()]);
    let broken = |lost| {
        let mut hold = exclusive(1, 1, [0, 1, 0]);
        (hold.released, hold.lost, hold.broken) = (None, lost, Some(10));
        hold
    };
    accepts(vec![broken(Some(500 * MS)), next.clone()]);
    rejects(Property::Notice, vec![broken(Some(1_500 * MS)), next.clone()]);
    rejects(Property::Notice, vec![broken(None), next.clone()]);
    let mut anew = exclusive(1, 1, [0, 11, 2_000 * MS]);
    anew.broken = Some(10);
    accepts(vec![anew.clone()]);
    anew.broken = Some(12);
    rejects(Property::Notice, vec![anew]);
    let mut dead = broken(None);
    dead.died = Some(15);
    accepts(vec![dead, next]);
}

#[test]
fn records_survive_a_pipe() {
    let mut full = hold(7, permits(3), u64::MAX, [1, 2, 3]);
    full.lock = "é /\n\0".into();
    (full.queued, full.gave_up, full.until) = (Some(4), Some(5), Some(6));
    (full.lost, full.broken, full.died) = (Some(7), Some(8), Some(9));
    for record in [
        full,
        Acquisition::asked("a", Mode::Shared, 1, 2),
        exclusive(1, 2, [3, 4, 5]),
    ] {
        let line = record.to_string();
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(line.parse::<Acquisition>().unwrap(), record);
        assert!(
            line[..line.len() - 1].trim_end().parse::<Acquisition>().is_err(),
            "cut off: {line}"
        );
    }
    assert!(History::default().absorb("nonsense").is_err());
}

#[test]
fn a_million_operations() {
    let checked = |many: u64| {
        let acquisitions: Vec<_> = (0..many)
            .map(|n| exclusive(n % 16, n, [(n * 10).saturating_sub(100), n * 10 + 1, n * 10 + 9]))
            .collect();
        let history = History {
            acquisitions,
            ..History::default()
        };
        let began = Stopwatch::start();
        let summary = history.check(&Limits::default()).unwrap();
        let took = began.elapsed();
        println!("{many} acquisitions and as many releases checked in {took:?}");
        assert_eq!(u64::try_from(summary.granted), Ok(many));
        assert!(
            u64::try_from(summary.contended).unwrap() > many * 4 / 5,
            "{summary:?}"
        );
        took
    };
    let control = (0..3).map(|_| checked(50_000)).max().unwrap();
    let took = checked(500_000);
    // Ten times as many: a check of each against each other takes a hundred times as long.
    assert!(
        took < 30 * control,
        "{took:?}, and {control:?} for a tenth of them"
    );
}

/// A lock with fencing tokens, as an object with operations in sequence.
struct FencedLock;

#[derive(Clone, Debug)]
enum Operation {
    Acquire { is_shared: bool, token: u64 },
    Release { is_shared: bool },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Held {
    readers: u32,
    writer: bool,
    highest: u64,
    highest_exclusive: u64,
}

impl Specification for FencedLock {
    type State = Held;
    type Operation = Operation;

    fn init() -> Held {
        Held::default()
    }

    fn apply(operation: &Operation, state: &Held) -> (bool, Held) {
        let mut next = state.clone();
        let is_valid = match *operation {
            Operation::Acquire {
                is_shared: true,
                token,
            } => {
                next.readers += 1;
                !state.writer && token > state.highest_exclusive
            }
            Operation::Acquire {
                is_shared: false,
                token,
            } => {
                next.writer = true;
                next.highest_exclusive = token;
                !state.writer && state.readers == 0 && token > state.highest
            }
            Operation::Release { is_shared: true } => {
                next.readers = state.readers.saturating_sub(1);
                state.readers > 0
            }
            Operation::Release { is_shared: false } => {
                next.writer = false;
                state.writer
            }
        };
        if let Operation::Acquire { token, .. } = *operation {
            next.highest = state.highest.max(token);
        }
        if is_valid {
            (true, next)
        } else {
            (false, state.clone())
        }
    }
}

/// At most seven holds, mostly in good order, with distinct moments and tokens.
fn random_history(rng: &mut fastrand::Rng) -> Vec<Acquisition> {
    let count = rng.u64(2..8);
    let mut tokens: Vec<u64> = (1..=count).collect();
    if rng.u8(..4) == 0 {
        let (a, b) = (rng.usize(..tokens.len()), rng.usize(..tokens.len()));
        tokens.swap(a, b);
    }
    let mut end = 0;
    tokens
        .into_iter()
        .zip(1..)
        .map(|(token, who)| {
            let jitter = |rng: &mut fastrand::Rng| rng.u64(0..8) * 100;
            let overlap = if rng.u8(..8) == 0 { jitter(rng) } else { 0 };
            let granted = (end + jitter(rng) + 100).saturating_sub(overlap) + who;
            let asked = granted.saturating_sub(jitter(rng) + 50);
            let released = granted + jitter(rng) + 50;
            end = released;
            let mode = if rng.u8(..3) == 0 {
                Mode::Shared
            } else {
                Mode::Exclusive
            };
            hold(who, mode, token, [asked, granted, released])
        })
        .collect()
}

fn is_linearizable(holds: &[Acquisition]) -> bool {
    let mut moments = Vec::new();
    for a in holds {
        let who = usize::try_from(a.who).unwrap();
        let is_shared = a.mode == Mode::Shared;
        let (granted, token) = a.granted.unwrap();
        let acquire = Operation::Acquire { is_shared, token };
        let release = Operation::Release { is_shared };
        let released = a.released.unwrap();
        // The release takes effect between its call and its return, as far as anyone can tell at any time after.
        moments.push((a.asked, 1, who, Action::Call(acquire.clone())));
        moments.push((granted, 2, who, Action::Response(acquire)));
        moments.push((released, 0, who, Action::Call(release.clone())));
        moments.push((u64::MAX, 3, who, Action::Response(release)));
    }
    moments.sort_by_key(|(moment, order, who, _)| (*moment, *order, *who));
    let actions = moments
        .into_iter()
        .map(|(_, _, who, action)| (who, action))
        .collect();
    WGLChecker::<FencedLock>::is_linearizable(Actions::from_actions(actions))
}

#[test]
fn a_linearizability_checker_agrees() {
    let seed = std::env::var("LOCKKIT_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut good, mut bad) = (0, 0);
    for round in 0..1_000 {
        let holds = random_history(&mut rng);
        let found = violated(holds.clone(), Limits::default());
        assert_eq!(
            found.is_none(),
            is_linearizable(&holds),
            "round {round}, LOCKKIT_SEED={seed}: {found:?}: {holds:#?}"
        );
        match found {
            None => good += 1,
            Some(_) => bad += 1,
        }
    }
    assert!(
        good >= 100 && bad >= 100,
        "a vacuous pass: {good} good and {bad} bad histories, LOCKKIT_SEED={seed}"
    );
}
