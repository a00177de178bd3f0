//! The torture tested: its schedules, its judge, its shrinker.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::{
    Harness,
    torture::{
        Ask, Bare, Campaign, Effort, Fault, KILL, Law, STOP, Schedule, Shape, Strike, Target, TaskPlan,
        Torture,
    },
};
use lockkit_core::{Capabilities, LockClient, MemoryBackend, Result};

use crate::{breaks::Break, desk::Desk, plain::Plain};

fn shape() -> Shape {
    let mut has = Capabilities::default();
    (has.shared, has.permits, has.revoke_by_force, has.local_handoffs) = (true, true, true, true);
    (has.revoke, has.downgrade, has.detach) = (true, true, true);
    let mut shape = Shape::new(has);
    shape.processes = 3;
    shape.faults = vec![Fault::new("reset").places(2), Fault::new("flush").weight(2)];
    shape
}

#[test]
fn a_seed_gives_one_schedule_and_its_text_gives_it_back() {
    for seed in 0..200 {
        let schedule = Schedule::generate(seed, &shape());
        assert_eq!(schedule, Schedule::generate(seed, &shape()));
        let read: Schedule = schedule.to_string().parse().unwrap();
        assert_eq!(read, schedule, "seed {seed}");
    }
}

/// The faults of a deployment that had some later.
fn with_later() -> Shape {
    let mut shape = shape();
    shape.faults = vec![
        Fault::new("storm").places(4).later(),
        Fault::new("reset").places(2).of_a_way(),
        Fault::new("settings").lasting().later(),
        Fault::new("flush").weight(2),
        Fault::new("roles").lasting(),
    ];
    shape
}

#[test]
fn later_faults_leave_a_seed_as_it_was() {
    let (shape, mut turned) = (with_later(), 0);
    let mut before = shape.clone();
    before.faults.retain(|fault| !fault.later);
    assert_eq!(shape.without_later().faults, before.faults);
    let lasts = |name: &str| {
        let mut faults = shape.faults.iter();
        faults.any(|fault| fault.name == name && fault.lasting)
    };
    for seed in 0..150 {
        let once = Schedule::generate(seed, &before);
        let mut schedule = Schedule::generate(seed, &shape);
        for (strike, was) in schedule.strikes.iter_mut().zip(&once.strikes) {
            assert_eq!(lasts(&strike.fault), lasts(&was.fault), "seed {seed}");
            if ["storm", "settings"].contains(&strike.fault.as_str()) {
                turned += 1;
                strike.fault.clone_from(&was.fault);
                strike.place = was.place;
            }
        }
        assert_eq!(schedule, once, "seed {seed}");
    }
    // And they do befall the deployment.
    assert!(turned >= 25, "{turned} strikes of later faults");
}

/// They are tasks of their own, after all others.
#[test]
fn several_sizes_leave_a_seed_as_it_was() {
    let (shape, mut seeds) = (shape(), 0);
    let mut before = shape.clone();
    before.sizes = false;
    for seed in 0..300 {
        let once = Schedule::generate(seed, &before);
        let mut schedule = Schedule::generate(seed, &shape);
        let added: Vec<_> = schedule.tasks.drain(once.tasks.len()..).collect();
        assert_eq!(schedule, once, "seed {seed}");
        let is_other = |task: &TaskPlan| {
            let first = task.steps[0];
            let known = once.sizes[first.name as usize];
            first.size.is_some_and(|size| size != known)
                && task.steps.iter().all(|step| step.size == first.size)
        };
        assert!(added.iter().all(is_other), "seed {seed}: {added:?}");
        seeds += usize::from(!added.is_empty());
    }
    assert!(seeds >= 20, "{seeds} of 300 seeds");
    assert!(
        !shape.without_later().sizes,
        "nor does a recorded schedule have any"
    );
}

#[test]
fn later_faults_meet_others_and_come_alone() {
    let shape = with_later();
    let schedules: Vec<_> = (0..200).map(|seed| Schedule::generate(seed, &shape)).collect();
    let has = |schedule: &Schedule, name: &str| schedule.strikes.iter().any(|strike| strike.fault == name);
    let meets = |schedule: &&Schedule| has(schedule, "storm") && has(schedule, "reset");
    let times = schedules.iter().filter(meets).count();
    assert!(times >= 3, "{times} of 200 schedules have both");
    let strikes = schedules.iter().flat_map(|schedule| &schedule.strikes);
    let storms = strikes.filter(|strike| strike.fault == "storm");
    let places: BTreeSet<_> = storms.map(|strike| strike.place).collect();
    assert_eq!(places, BTreeSet::from([0, 1, 2, 3]));
    // Asked for alone, they are drawn as any.
    let mut alone = shape.clone();
    alone.faults.retain(|fault| fault.later);
    let schedules = (0..50).map(|seed| Schedule::generate(seed, &alone));
    let times = schedules.filter(|schedule| has(schedule, "storm")).count();
    assert!(times >= 10, "{times} of 50 schedules");
}

#[test]
fn no_ttl_is_below_what_a_deployment_takes() {
    let mut shape = shape();
    shape.min_ttl = 2_000;
    for seed in 0..300 {
        let schedule = Schedule::generate(seed, &shape);
        let steps = || schedule.tasks.iter().flat_map(|task| &task.steps);
        let retimed = steps().filter_map(|step| step.retime).map(|(_, ttl)| ttl);
        let shortest = steps().map(|step| step.ttl).chain(retimed).min();
        assert!(shortest >= Some(2_000), "seed {seed}: {shortest:?}");
    }
}

#[test]
fn schedules_vary_everything() {
    let mut text = String::new();
    for seed in 0..300 {
        text.push_str(&Schedule::generate(seed, &shape()).to_string());
    }
    let words = [
        "exclusive",
        "shared",
        "permit",
        " wait ",
        "within:",
        " try ",
        "cancel-after:",
        "cancel-polls:",
        "unpolled:",
        "all:",
        "twice",
        "inspect",
        "revoke",
        " drop",
        " forget",
        "half-release",
        " close ",
        " runtime ",
        " anew ",
        " 1000 ",
        STOP,
        KILL,
        "reset 1",
        "flush 0",
        "size 5",
        " size=2",
        "ask-back:",
        "max-hold=",
        "retime=",
        "stays=",
        " leader ",
        " observe ",
        " list ",
        " downgrade=",
        " detach",
        " half-detach",
        " adopt:",
        " all-now ",
        " many:",
        " many-now:",
    ];
    for word in words {
        assert!(text.contains(word), "no schedule has {word:?}");
    }
}

#[test]
fn what_has_to_meet_meets() {
    let mut shape = shape();
    shape.faults.extend([
        Fault::new("settings").lasting(),
        Fault::new("cut").places(3).of_a_way(),
        Fault::new("empty").places(3),
    ]);
    let schedules: Vec<_> = (0..600).map(|seed| Schedule::generate(seed, &shape)).collect();
    let some = |what: &str, meets: &dyn Fn(&Schedule) -> bool| {
        let times = schedules.iter().filter(|schedule| meets(schedule)).count();
        assert!(times >= 5, "{what} in {times} of {} schedules", schedules.len());
    };
    some("a change that lasts, and a long cut after it", &|schedule| {
        let change = schedule.strikes.iter().find(|strike| strike.fault == "settings");
        let cut = |strike: &Strike| strike.fault == "cut" && strike.lasts >= 4_000;
        let cut = schedule.strikes.iter().rfind(|strike| cut(strike));
        matches!((change, cut), (Some(change), Some(cut)) if change.at < cut.at)
    });
    some(
        "a server that is emptied twice, while a way is cut",
        &|schedule| {
            let empty: Vec<_> = schedule
                .strikes
                .iter()
                .filter(|strike| strike.fault == "empty")
                .collect();
            let twice = empty
                .windows(2)
                .any(|pair| pair[0].place == pair[1].place && pair[1].at - pair[0].at <= 6_000);
            twice && schedule.strikes.iter().any(|strike| strike.fault == "cut")
        },
    );
    some("six resets in a row", &|schedule| {
        schedule
            .strikes
            .iter()
            .filter(|strike| strike.fault == "reset")
            .count()
            >= 6
    });
    some("a process that stands still for long, and readers", &|schedule| {
        let long = |strike: &Strike| strike.fault == STOP && strike.lasts > 13_000;
        schedule.strikes.iter().any(long) && schedule.to_string().contains(" shared ")
    });
    some(
        "several leases on one client, some of which are cancelled",
        &|schedule| {
            let text = schedule.to_string();
            schedule.strikes.is_empty() && text.contains("cancel-polls:")
        },
    );
}

#[test]
fn some_are_cut_off_when_they_have_just_come() {
    let mut shape = shape();
    shape
        .faults
        .push(Fault::new("refuse").places(3).of_a_way().keeps_order());
    let arrives = |schedule: &Schedule| {
        let [strike] = &schedule.strikes[..] else {
            return false;
        };
        let away = |task: &&TaskPlan| strike.fault == "refuse" && task.client % 3 == strike.place;
        let waits = |client: u32| {
            let tasks = schedule.tasks.iter().filter(move |task| task.client == client);
            let steps = tasks.flat_map(|task| &task.steps);
            steps.filter(|step| step.ask == Ask::Wait)
        };
        let mut away = schedule.tasks.iter().filter(away);
        away.any(|task| {
            let first = waits(task.client).map(|step| step.at).min();
            first.is_some_and(|at| at < strike.at && strike.at - at < 400)
        })
    };
    let schedules = (0..600).map(|seed| Schedule::generate(seed, &shape));
    let times = schedules.filter(arrives).count();
    assert!(times >= 30, "{times} of 600");
}

#[test]
fn a_file_that_is_no_schedule_is_one_clear_error() {
    let error = |text: &str| text.parse::<Schedule>().unwrap_err();
    assert!(error("").contains("no schedule"));
    let text = Schedule::generate(1, &shape()).to_string();
    assert!(error(&format!("{text}strike now reset 0 1\n")).contains("strike now reset"));
    assert!(error(&format!("{text}task 99 4711\n")).contains("client 4711"));
    assert!(error(&text.replace("span", "spam")).contains("line 3"));
    let both = format!("{text}task 99 0\nstep 0 0 leader 1000 0 1 1 twice 5 release\n");
    assert!(
        error(&both).contains("task 99 wants what there is not"),
        "{}",
        error(&both)
    );
    for step in [
        "exclusive 1000 0 1 1 many:2 5 release",
        "leader 1000 0 1 1 wait 5 detach",
        "exclusive 1000 0 1 1 all-now 5 detach",
        "shared 1000 0 1 1 wait 5 release downgrade=1",
        "shared 1000 0 1 1 wait 5 release size=2",
    ] {
        let error = error(&format!("{text}task 99 0\nstep 0 0 {step}\n"));
        assert!(error.contains("task 99 wants what there is not"), "{error}");
    }
}

/// A schedule in which much is asked for, and long enough ago.
fn busy(seed: u64) -> Schedule {
    let text = format!(
        "lockkit torture schedule 1\nseed {seed}\nspan 1500\nclient 0 0\nclient 1 0\nclient 2 0\n\
         task 0 0\n{0}task 1 1\n{0}task 2 2\n{0}",
        "step 0 0 exclusive 1000 0 1 0 wait 3 release\n".repeat(150)
    );
    text.parse().unwrap()
}

/// In this process alone, since others would be told of few of its faults.
#[derive(Debug)]
struct Mutant(Plain);

#[async_trait]
impl Harness for Mutant {
    async fn client(&self) -> Result<LockClient> {
        self.0.client().await
    }
}

fn laws(fault: crate::plain::Fault, schedule: &Schedule) -> Vec<Law> {
    let target = Bare(Arc::new(Mutant(Plain::with(fault))));
    let mut torture = Torture::new(Arc::new(target)).unwrap();
    let verdict = torture.epoch(schedule).unwrap();
    verdict.findings.iter().map(|finding| finding.law).collect()
}

/// A machine that stands still excuses what it may have delayed. One of three epochs is convincing.
fn convicted(fault: crate::plain::Fault, schedule: &Schedule, law: Law) {
    let found = (0..3).any(|_| laws(fault, schedule).contains(&law));
    assert!(found, "{fault:?} is never found to break {law:?}");
}

/// One client asks once.
fn once(ask: &str) -> Schedule {
    let step = format!("step 0 0 exclusive 1000 0 1 0 {ask} 3 release");
    let text = format!("lockkit torture schedule 1\nseed 1\nspan 100\nclient 0 0\ntask 0 0\n{step}\n");
    text.parse().unwrap()
}

#[test]
fn a_good_backend_passes_and_has_been_tried() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Plain::default())))).unwrap();
    let verdict = torture.epoch(&busy(1)).unwrap();
    assert!(
        verdict.findings.is_empty(),
        "{:?}\n{}",
        verdict.findings,
        verdict.log
    );
    assert!(verdict.granted >= 20, "{} grants", verdict.granted);
}

/// What the torture's judge and the one that knows the text alone find in an epoch on a backend with this fault.
fn judged_twice(fault: crate::plain::Fault) -> (Vec<Law>, lockkit_history_judge::Verdict) {
    let target = Bare(Arc::new(Mutant(Plain::with(fault))));
    let mut torture = Torture::new(Arc::new(target)).unwrap().histories();
    let verdict = torture.epoch(&busy(1)).unwrap();
    let history = verdict.history.parse().unwrap_or_else(|error| panic!("{error}"));
    let mut second = lockkit_history_judge::judge(&history);
    assert_eq!(second.len(), 1);
    let laws = verdict.findings.iter().map(|finding| finding.law);
    (laws.collect(), second.remove(0))
}

#[test]
fn a_second_judge_convicts_the_same_mutants() {
    use crate::plain::Fault;
    let (none, second) = judged_twice(Fault::None);
    assert!(
        none.is_empty() && second.broken.is_empty(),
        "{none:?}, {second:?}"
    );
    assert!(second.agrees() && second.grants >= 20, "{second:?}");
    for (fault, law, theirs) in [
        (
            Fault::GrantsTwice,
            Law::Exclusion,
            lockkit_history_judge::Law::Exclusion,
        ),
        (
            Fault::RepeatsTokens,
            Law::Tokens,
            lockkit_history_judge::Law::Tokens,
        ),
    ] {
        let found = (0..3).any(|_| {
            let (laws, second) = judged_twice(fault);
            assert!(second.agrees(), "{fault:?}: {laws:?}, {second:?}");
            laws.contains(&law) && second.broken.contains_key(&theirs)
        });
        assert!(found, "{fault:?} is never found to break {law:?}");
    }
}

#[test]
fn mutant_backends_are_convicted() {
    let convicted = |fault, law| convicted(fault, &busy(1), law);
    convicted(crate::plain::Fault::GrantsTwice, Law::Exclusion);
    convicted(crate::plain::Fault::RepeatsTokens, Law::Tokens);
}

/// One holds, another waits from 1.2 s on, and a third asks for the hold.
fn asking(within: u32) -> Schedule {
    let text = format!(
        "lockkit torture schedule 1\nseed 1\nspan 5000\nclient 0 0\nclient 1 0\nclient 2 0\n\
         task 0 0\nstep 0 0 exclusive 3000 0 1 0 wait 4500 release stays=600\n\
         task 1 1\nstep 1200 0 exclusive 3000 0 1 0 wait 10 release\n\
         task 2 2\nstep 100 0 exclusive 3000 0 1 0 ask-back:{within} 0 release\n"
    );
    text.parse().unwrap()
}

#[test]
fn who_is_asked_lets_go_first_and_is_told() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&asking(2_000)).unwrap();
    assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
    let convicted = |fault, within, law| convicted(fault, &asking(within), law);
    convicted(crate::plain::Fault::LetsOthersIn, 0, Law::Asked);
    convicted(crate::plain::Fault::LetsOthersIn, 2_000, Law::Asked);
    convicted(crate::plain::Fault::TellsNobody, 0, Law::Asked);
}

#[test]
fn what_is_denied_is_refused() {
    let none: [Law; 0] = [];
    assert_eq!(laws(crate::plain::Fault::None, &asking(0)), none);
    let laws_of = |fault| laws(fault, &asking(0));
    assert_eq!(laws_of(crate::plain::Fault::AnswersWhatItDenies), [Law::Denial]);
}

#[test]
fn a_lease_of_another_length_is_found() {
    let schedule: Schedule = once("wait")
        .to_string()
        .replace("wait 3 release", "wait 90 release retime=10:6000")
        .parse()
        .unwrap();
    let none: [Law; 0] = [];
    assert_eq!(laws(crate::plain::Fault::None, &schedule), none);
    let kept = laws(crate::plain::Fault::KeepsItsTtl, &schedule);
    assert!(kept.contains(&Law::Length), "{kept:?}");
    let refused = laws(crate::plain::Fault::ClaimsNoLease, &schedule);
    assert_eq!(refused, none, "where a hold has no lease, another ttl is refused");
}

/// Two candidates, and one who looks on.
fn electing() -> Schedule {
    let text = "lockkit torture schedule 1\nseed 1\nspan 3000\nclient 0 0\nclient 1 0\nclient 2 0\n\
         task 0 0\nstep 0 0 leader 1000 0 1 1 wait 2500 release\nstep 0 0 leader 1000 0 1 1 wait 800 drop\n\
         task 1 1\nstep 400 0 leader 1000 0 1 1 wait 200 release\n\
         task 2 2\nstep 0 0 leader 1000 0 1 1 observe 2900 release\n\
         task 3 2\nstep 1800 0 leader 1000 0 1 1 observe 1000 release\n";
    text.parse().unwrap()
}

#[test]
fn leaders_and_what_observers_see_are_judged() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&electing()).unwrap();
    assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
    assert_eq!(verdict.granted, 3);
    let convicted = |fault, law| convicted(fault, &electing(), law);
    convicted(crate::plain::Fault::GrantsTwice, Law::Exclusion);
    convicted(crate::plain::Fault::RepeatsTokens, Law::Tokens);
    convicted(crate::plain::Fault::HidesTheLabel, Law::Election);
    convicted(crate::plain::Fault::HidesItsHolds, Law::Election);
}

/// One holds, and another lists.
fn listing() -> Schedule {
    let text = "lockkit torture schedule 1\nseed 1\nspan 1000\nclient 0 0\nclient 1 0\n\
         task 0 0\nstep 0 0 exclusive 1000 0 1 0 wait 900 release\n\
         task 1 1\nstep 300 0 exclusive 1000 0 1 0 list 0 release\nstep 400 0 leader 1000 0 1 0 list 0 release\n";
    text.parse().unwrap()
}

#[test]
fn lists_are_judged() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&listing()).unwrap();
    assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
    let laws = |fault| laws(fault, &listing());
    let none: [Law; 0] = [];
    assert_eq!(laws(crate::plain::Fault::None), none, "it is refused");
    let strangers = laws(crate::plain::Fault::ListsStrangers);
    assert_eq!(
        strangers,
        [Law::List; 3],
        "one among locks, and two among elections"
    );
    assert_eq!(laws(crate::plain::Fault::ListsNothing), [Law::List]);
    assert_eq!(laws(crate::plain::Fault::ListsForEver), [Law::Hang]);
}

/// A hold is made a shared one beside a reader, and another is detached and adopted twice on its way.
fn passing() -> Schedule {
    let text = "lockkit torture schedule 1\nseed 1\nspan 4000\nclient 0 0\nclient 1 0\nclient 2 0\n\
         task 0 0\nstep 0 0 exclusive 2000 0 1 0 wait 600 release downgrade=200\n\
         step 700 1 exclusive 2000 0 1 0 wait 100 detach\n\
         task 1 1\nstep 100 0 shared 2000 0 1 0 wait 100 release\n\
         step 700 1 exclusive 2000 0 1 0 adopt:1000 300 detach\nstep 2500 1 exclusive 2000 0 1 0 wait 0 release\n\
         task 2 2\nstep 1800 1 exclusive 2000 0 1 0 adopt:1000:1 300 release\n\
         step 2600 1 exclusive 2000 0 1 0 wait 10 half-detach\n";
    text.parse().unwrap()
}

#[test]
fn what_passes_from_one_to_another_is_judged() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&passing()).unwrap();
    assert!(
        verdict.findings.is_empty(),
        "{:?}\n{}",
        verdict.findings,
        verdict.log
    );
    assert_eq!(verdict.granted, 7, "with two adoptions");
    let adopting = passing().to_string().replace(" downgrade=200", "");
    let adopting: Schedule = adopting.replace("shared", "exclusive").parse().unwrap();
    let convicted = |fault, law| convicted(fault, &adopting, law);
    convicted(crate::plain::Fault::DetachesWhatEnds, Law::Detached);
    convicted(crate::plain::Fault::RefusesAdoption, Law::Detached);
    convicted(crate::plain::Fault::ClaimsAdoption, Law::Denial);
}

#[test]
fn what_cannot_pass_is_refused() {
    let schedule: Schedule = passing()
        .to_string()
        .replace("shared", "exclusive")
        .parse()
        .unwrap();
    let none: [Law; 0] = [];
    assert_eq!(laws(crate::plain::Fault::None, &schedule), none);
    let claims = laws(crate::plain::Fault::ClaimsDowngrade, &schedule);
    assert_eq!(claims, [Law::Denial]);
}

/// Sets of locks and of permits, beside others.
#[test]
fn several_at_once_are_judged() {
    let text = "lockkit torture schedule 1\nseed 1\nspan 2000\nsize 3\nclient 0 0\nclient 1 0\nclient 2 0\n\
         task 0 0\nstep 0 0 exclusive 2000 0 1 0 all-now 300 release\nstep 600 0 permit 2000 0 1 0 many:3 300 release\n\
         task 1 1\nstep 100 0 exclusive 2000 0 1 0 all-now 10 release\nstep 700 0 permit 2000 0 1 0 many-now:2 10 release\n\
         step 800 0 permit 2000 0 1 0 many:2 10 drop\n\
         task 2 2\nstep 200 2 exclusive 2000 0 1 0 wait 10 release\nstep 750 0 permit 2000 0 1 0 many:2:100 10 release\n";
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&text.parse().unwrap()).unwrap();
    assert!(
        verdict.findings.is_empty(),
        "{:?}\n{}",
        verdict.findings,
        verdict.log
    );
    assert_eq!(
        verdict.granted, 9,
        "three locks, three permits, two, and one lock\n{}",
        verdict.log
    );
    // Without its permits.
    let sets = text.replace("many:3", "all-now").replace("many-now:2", "all-now");
    let sets = sets
        .replace("many:2:100", "wait")
        .replace("many:2", "wait")
        .replace("permit", "exclusive");
    let laws = laws(crate::plain::Fault::GrantsTwice, &sets.parse().unwrap());
    assert!(laws.contains(&Law::Exclusion), "{laws:?}");
}

/// A client gives another size than the one that is in use, and once nobody uses that.
#[test]
fn two_sizes_of_a_semaphore_are_judged() {
    let text = "lockkit torture schedule 1\nseed 1\nspan 1500\nsize 3\nclient 0 0\nclient 1 0\n\
         task 0 0\nstep 0 0 permit 2000 0 1 0 wait 600 release\n\
         task 1 1\nstep 200 0 permit 2000 0 1 0 try 300 release size=2\n\
         step 300 0 permit 2000 0 1 0 wait 200 release size=5\n\
         step 1000 0 permit 2000 0 1 0 try 100 release size=2\n";
    let schedule: Schedule = text.parse().unwrap();
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let verdict = torture.epoch(&schedule).unwrap();
    assert!(
        verdict.findings.is_empty(),
        "{:?}\n{}",
        verdict.findings,
        verdict.log
    );
    assert_eq!(verdict.granted, 2, "the first and the last\n{}", verdict.log);
    let desk = Desk::with(&[Break::AnySizeWillDo]);
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(desk)))).unwrap();
    let verdict = torture.epoch(&schedule).unwrap();
    let laws: Vec<_> = verdict.findings.iter().map(|finding| finding.law).collect();
    assert!(laws.contains(&Law::Exclusion), "{laws:?}\n{}", verdict.log);
}

#[test]
fn who_waits_for_ever_hangs_and_grants_are_missed() {
    let laws = laws(crate::plain::Fault::GrantsNobody, &once("wait"));
    assert_eq!(laws, [Law::Hang, Law::Liveness, Law::Vacuity]);
}

#[test]
fn what_stays_held_at_the_end_is_found() {
    let laws = laws(crate::plain::Fault::KeepsItsHolds, &once("wait"));
    assert_eq!(laws, [Law::Residue]);
}

#[test]
fn a_campaign_is_shared_and_ends_with_its_goal() {
    let mut effort = Effort::new(Duration::MAX);
    (effort.grants, effort.faults) = (20_000, 500);
    let campaign = Campaign::new(1, effort);
    let seeds = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
                torture
                    .join(&campaign, |schedule, _| {
                        seeds.lock().unwrap().push(schedule.seed);
                    })
                    .unwrap();
            });
        }
    });
    let report = campaign.report();
    assert!(
        campaign.is_reached() && report.granted >= 20_000,
        "no faults of what has none: {report}"
    );
    let mut seeds = seeds.into_inner().unwrap();
    seeds.sort_unstable();
    let all: Vec<_> = (1..).take(report.epochs).collect();
    assert_eq!(seeds, all);
}

#[test]
fn a_campaign_that_had_no_time_says_so() {
    let mut effort = Effort::new(Duration::ZERO);
    effort.grants = 1;
    let campaign = Campaign::new(1, effort);
    assert!(campaign.is_over() && !campaign.is_reached());
}

/// Empty at first.
#[derive(Debug, Default)]
struct Memory(MemoryBackend);

#[async_trait]
impl Harness for Memory {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }
}

#[test]
fn a_seed_is_run_and_its_text_again() {
    let mut torture = Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let short = |seed: &u64| Schedule::generate(*seed, &torture.shape()).span < 3_000;
    let seed = (0..1_000).find(short).unwrap();
    let schedule = Schedule::generate(seed, &torture.shape());
    let verdict = torture.epoch(&schedule).unwrap();
    assert!(verdict.granted > 0, "{:?}", verdict.findings);
    let again: Schedule = schedule.to_string().parse().unwrap();
    assert!(torture.epoch(&again).unwrap().granted > 0);
}

/// The leftovers that it keeps, after so many looks.
#[derive(Debug)]
struct Keeps(MemoryBackend, AtomicUsize, &'static [&'static str]);

#[async_trait]
impl Target for Keeps {
    fn routes(&self) -> Vec<String> {
        vec![String::new()]
    }

    async fn connect(&self, _: &str) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn left(&self) -> io::Result<Vec<String>> {
        let looks = self.1.fetch_add(1, Ordering::SeqCst);
        let left = if looks < 3 { &["what goes"] } else { self.2 };
        Ok(left.iter().map(|one| (*one).to_owned()).collect())
    }
}

#[test]
fn what_is_left_for_good_is_told_once() {
    let residue = |torture: &mut Torture| {
        let found = torture.epoch(&busy(1)).unwrap().findings;
        let residue = found.into_iter().filter(|finding| finding.law == Law::Residue);
        residue.map(|finding| finding.to_string()).collect::<Vec<_>>()
    };
    let keeps = |what| Arc::new(Keeps(MemoryBackend::new(), AtomicUsize::new(0), what));
    let mut clean = Torture::new(keeps(&[])).unwrap();
    assert_eq!(residue(&mut clean), [""; 0], "it goes by itself");
    let mut torture = Torture::new(keeps(&["a key", "a node"])).unwrap();
    let told = residue(&mut torture).concat();
    assert!(told.contains("2 things are left: a key; a node"), "{told:?}");
    assert_eq!(residue(&mut torture), [""; 0], "it was told of");
}

#[test]
fn what_cannot_be_struck_is_one_clear_error() {
    let memory = || Torture::new(Arc::new(Bare(Arc::new(Memory::default())))).unwrap();
    let unknown = memory().only(&["earthquake".to_owned()]).unwrap_err();
    assert!(
        unknown.contains("earthquake") && unknown.contains("kill"),
        "{unknown}"
    );
    let mut schedule = busy(1);
    schedule.strikes.push(Strike {
        at: 1,
        fault: "earthquake".to_owned(),
        place: 0,
        lasts: 1,
    });
    let error = memory().epoch(&schedule).unwrap_err().to_string();
    assert!(error.contains("earthquake"), "{error}");
    let elsewhere: Schedule = busy(1)
        .to_string()
        .replace("client 2 0", "client 2 1")
        .parse()
        .unwrap();
    let error = memory().epoch(&elsewhere).unwrap_err().to_string();
    assert!(error.contains("processes"), "{error}");
}
