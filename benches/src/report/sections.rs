//! The sections of the report, and their order.

use std::borrow::Cow;

use lockkit_conformance::measure::{Figure, Row, Scenario};

use super::{absence, chart};
use crate::{results::Results, servers::FAR};

/// One question, the scenarios that answer it, and the one that is drawn.
pub(super) struct Section {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
    pub(super) scenarios: Vec<Scenario>,
    pub(super) picture: Picture,
    /// Over the network.
    pub(super) far: bool,
}

pub(super) enum Picture {
    /// A bar per contestant and figure, the figures side by side.
    Bars(Scenario, &'static [Figure]),
    /// A line per lockkit backend, over the number of tasks.
    Lines(Vec<(f64, Scenario)>),
}

impl Section {
    /// Returns the part of the results that the section shows.
    pub(super) fn of<'a>(&self, results: &'a Results) -> Cow<'a, Results> {
        if self.far {
            Cow::Owned(results.over_the_network())
        } else {
            Cow::Borrowed(results)
        }
    }

    pub(super) fn draw(&self, results: &Results) -> Result<String, chart::CannotDraw> {
        let results = self.of(results);
        match &self.picture {
            Picture::Bars(scenario, figures) => chart::bars(&results, *scenario, figures),
            Picture::Lines(points) => chart::lines(&results, points),
        }
    }
}

/// Returns the sections in their order, without those that nobody was measured in.
pub(super) fn sections(results: &Results) -> Vec<Section> {
    let measured = |scenario: Scenario| {
        let mut rows = results.of(scenario);
        rows.any(|row| row.value(scenario.figure()).is_some())
    };
    let most_held = [10_000, 1_000, 10]
        .map(Scenario::Held)
        .into_iter()
        .find(|it| measured(*it));
    let most_held = most_held.unwrap_or(Scenario::Held(10));
    let all = alone()
        .into_iter()
        .chain(contended())
        .chain(one_after_another(most_held))
        .chain([network()]);
    all.filter(|section| {
        let results = section.of(results);
        let told = |row: &Row| section.scenarios.contains(&row.scenario) && absence(row).is_none();
        results.rows.iter().any(told)
    })
    .collect()
}

/// The figure that counts.
fn bars(scenario: Scenario) -> Picture {
    Picture::Bars(scenario, &scenario.figures()[..1])
}

/// A lock that is taken often by a few, while the others wait, looks fast: the one without the other misleads.
const CONTENTION: &[Figure] = &[Figure::Rate, Figure::Longest];

fn side_by_side(scenario: Scenario, figures: &'static [Figure]) -> Picture {
    Picture::Bars(scenario, figures)
}

/// Of locks that nobody else wants.
fn alone() -> Vec<Section> {
    let tasks = [1, 4, 16, 64];
    vec![
        Section {
            id: "uncontended",
            title: "A lock that nobody else wants",
            about: "One task acquires and releases: the cost of a lock without any conflict.",
            scenarios: vec![Scenario::Uncontended],
            picture: bars(Scenario::Uncontended),
            far: false,
        },
        Section {
            id: "own-names",
            title: "Many locks at once",
            about: "Several tasks of one client, each on a name of its own: how far one client scales.",
            scenarios: tasks.map(Scenario::OwnNames).to_vec(),
            picture: Picture::Lines(tasks.map(|n| (f64::from(n), Scenario::OwnNames(n))).to_vec()),
            far: false,
        },
    ]
}

/// Of a lock that many want.
fn contended() -> Vec<Section> {
    vec![
        Section {
            id: "tasks",
            title: "One lock, many tasks of one process",
            about: "Several tasks of one client on one name. lockkit hands the lock on within the process up to 32 \
                    times in a row, each time with a fresh fencing token, and then lets other processes in. With \
                    `local_handoffs=1000` it does so up to 1,000 times. The wait of others for that is below. ZooKeeper's \
                    and etcd's strict order rules it out.",
            scenarios: [2, 16, 100].map(Scenario::Tasks).to_vec(),
            picture: side_by_side(Scenario::Tasks(16), CONTENTION),
            far: false,
        },
        Section {
            id: "clients",
            title: "One lock, many clients",
            about: "Several clients on one name, in two processes or in four. A client that polls takes the lock \
                    again and again, and looks fast: see the longest wait, and Jain's index, which is 1 if all had equal \
                    shares and 1/n if one had everything. The locks by hand, `GET_LOCK` and ZooKeeper's plain recipe have \
                    no tokens and no lease to keep. Processor time is that of all processes of each side, to the last \
                    release.",
            scenarios: [2, 16, 100].map(Scenario::Clients).to_vec(),
            picture: side_by_side(Scenario::Clients(16), CONTENTION),
            far: false,
        },
        Section {
            id: "processes",
            title: "One lock, some tasks in some processes",
            about: "Four processes of four tasks each on one name, with one client in each process: contention as \
                    in most services. Local hand-off counts, and so do those who wait meanwhile.",
            scenarios: vec![Scenario::Processes(4)],
            picture: side_by_side(Scenario::Processes(4), CONTENTION),
            far: false,
        },
        Section {
            id: "holding",
            title: "What waiting costs",
            about: "16 clients of four processes on one name. Each holds it for some milliseconds, so most of the \
                    time 15 wait. The picture shows the processor time of the server and of the clients per lock, with \
                    holds of 10 ms.",
            scenarios: [1, 10].map(Scenario::Holding).to_vec(),
            picture: side_by_side(Scenario::Holding(10), &[Figure::ServerTime, Figure::ClientTime]),
            far: false,
        },
        Section {
            id: "waiters",
            title: "A long line",
            about: "Many waiters on one name, over ten clients of ZooKeeper or of etcd, each with a place in the queue at the \
                    server. The wait of others behind one client is above.",
            scenarios: [10, 1_000].map(Scenario::Waiters).to_vec(),
            picture: bars(Scenario::Waiters(1_000)),
            far: false,
        },
        Section {
            id: "beside",
            title: "What a second process waits",
            about: "One more client on a name that 16 tasks of another client contend for: the cost of local \
                    hand-off for others.",
            scenarios: vec![Scenario::Beside(16)],
            picture: bars(Scenario::Beside(16)),
            far: false,
        },
    ]
}

/// Of a lock that goes from one to the next, or stays.
fn one_after_another(most_held: Scenario) -> Vec<Section> {
    vec![
        Section {
            id: "hand-off",
            title: "Hand-off",
            about: "From the call that releases to the grant of another client, which has slept for 35 ms. The release is the \
                    time of that call alone.",
            scenarios: vec![Scenario::HandOff],
            picture: bars(Scenario::HandOff),
            far: false,
        },
        Section {
            id: "busy-try",
            title: "A try in vain",
            about: "One client tries to take what another one holds, and is told so. By hand that is a try without a token, and on etcd a \
                    put: a try may have to write.",
            scenarios: vec![Scenario::BusyTry],
            picture: bars(Scenario::BusyTry),
            far: false,
        },
        Section {
            id: "withdrawal",
            title: "When a waiter gives up",
            about: "From the moment when a client withdraws that has waited for 35 ms, until the server has confirmed it. By hand the \
                    statement is cancelled over another connection, and its session unlocks all.",
            scenarios: vec![Scenario::Withdrawal],
            picture: bars(Scenario::Withdrawal),
            far: false,
        },
        Section {
            id: "shared",
            title: "Shared mode",
            about: "16 tasks of four clients on one name. The given per cent of them ask for it exclusively.",
            scenarios: [0, 5, 50].map(Scenario::Shared).to_vec(),
            picture: side_by_side(Scenario::Shared(5), CONTENTION),
            far: false,
        },
        Section {
            id: "permits",
            title: "Semaphores",
            about: "16 tasks of four clients on a semaphore of four permits.",
            scenarios: vec![Scenario::Permits],
            picture: side_by_side(Scenario::Permits, CONTENTION),
            far: false,
        },
        Section {
            id: "held",
            title: "Locks that are kept",
            about: "One client, in a process of its own, holds many locks and only renews them. Processor time is \
                    given for a ttl of 30 s, of which a third passes between renewals. Round trips are the pieces of \
                    traffic that left the client while it renewed every lock once. Closing is from the call that closes the client, \
                    with all that it holds, until each release is confirmed.",
            scenarios: [10, 1_000, 10_000].map(Scenario::Held).to_vec(),
            picture: bars(most_held),
            far: false,
        },
        Section {
            id: "recovery",
            title: "When the holder dies",
            about: "A process that holds the lock with a ttl of 4 s is killed (−9) right after its grant, or stopped: the time \
                    until a waiting client is granted. Where a lease has to run out, that is the lease. A connection or a \
                    file ends with its process.",
            scenarios: vec![Scenario::Recovery, Scenario::Silence],
            picture: bars(Scenario::Recovery),
            far: false,
        },
    ]
}

/// The section about figures over a network.
fn network() -> Section {
    Section {
        id: "network",
        title: "Over a network",
        about: "The same over a network with a round trip of 1 ms. A proxy delays traffic by half a \
                    millisecond each way. It counts round trips, also those that nobody waits for: how often anyone sends \
                    something after a reply. Processor time matters little there, and each round trip much.",
        scenarios: FAR.to_vec(),
        picture: Picture::Bars(Scenario::Clients(16), CONTENTION),
        far: true,
    }
}
