//! Contestants take turns.

use std::{collections::BTreeMap, fmt, time::Duration};

use async_trait::async_trait;
use lockkit_core::{BoxError, spi::chain};

use super::{
    Figure, Outcome, Row, Scenario, Subject,
    rounds::{Stage, Unfit},
};

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// How often the contestants take turns, after one shorter turn that does not count.
    pub rounds: u32,
    /// The same for scenarios in which processes are started, without the one that does not count.
    pub slow_rounds: u32,
    /// How long a measurement of one contestant in one round takes. With 100 contenders it is three times as long.
    pub stretch: Duration,
    /// How many hand-offs there are in a round.
    pub hand_offs: u32,
    /// The ttl of holds that are kept or left behind.
    pub ttl: Duration,
    /// How many locks are held at most.
    pub most_held: u32,
}

impl Effort {
    /// Within a few seconds per contestant, for a first impression.
    pub const QUICK: Self = Self {
        rounds: 3,
        slow_rounds: 1,
        stretch: Duration::from_millis(40),
        hand_offs: 2,
        ttl: Duration::from_secs(4),
        most_held: 1_000,
    };
    /// Within half a minute to a minute per contestant, for figures that are the same in the next run.
    pub const FULL: Self = Self {
        rounds: 7,
        slow_rounds: 2,
        stretch: Duration::from_millis(140),
        hand_offs: 5,
        ttl: Duration::from_secs(4),
        most_held: 10_000,
    };
}

/// What a contestant takes part as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Role {
    /// A lockkit backend.
    Ours,
    /// The least that can be done on the same server: what a lock cannot do without.
    Floor,
    /// Another library.
    Peer,
}

/// Something that takes part in a [`contest`].
pub struct Contestant {
    backend: String,
    name: String,
    role: Role,
    enters: fn(Scenario) -> bool,
    run: Box<dyn Run>,
}

impl Contestant {
    /// `subject` under this name, which is, or is to be compared with, the backend of that name.
    pub fn new(
        backend: impl Into<String>,
        name: impl Into<String>,
        role: Role,
        subject: impl Subject,
    ) -> Self {
        Self {
            backend: backend.into(),
            name: name.into(),
            role,
            enters: |_| true,
            run: Box::new(Running { subject, stage: None }),
        }
    }

    /// Has it enter only the scenarios that `enters` picks; in the others it has no row. By default it enters all.
    pub fn only(mut self, enters: fn(Scenario) -> bool) -> Self {
        self.enters = enters;
        self
    }

    fn row(&self, scenario: Scenario, outcome: Outcome) -> Row {
        Row {
            scenario,
            backend: self.backend.clone(),
            contestant: self.name.clone(),
            role: self.role,
            outcome,
        }
    }
}

impl fmt::Debug for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Contestant({}, {})", self.backend, self.name)
    }
}

/// How far a contest has come.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// How many rounds of one contestant are done, or need not be.
    pub done: usize,
    /// How many there are in all.
    pub total: usize,
    /// The scenario.
    pub scenario: Scenario,
    /// The contestant whose turn it is.
    pub contestant: &'a str,
}

/// Takes the contestants through the scenarios, in turns, and tells `watch` at each turn. There is a row for each
/// contestant in each scenario that it enters; one that fails is out for that scenario alone. Needs a Tokio runtime of several threads.
///
/// # Cancel safety
/// Dropped half-way, holds are released in the background, as far as the contestants do so.
pub async fn contest(
    contestants: &mut [Contestant],
    scenarios: &[Scenario],
    effort: &Effort,
    mut watch: impl FnMut(Progress<'_>),
) -> Vec<Row> {
    let turns = |scenario: Scenario| {
        let entrants = contestants.iter().filter(|it| (it.enters)(scenario));
        effort.turns(scenario) as usize * entrants.count()
    };
    let turns: Vec<_> = scenarios.iter().map(|scenario| turns(*scenario)).collect();
    let total = turns.iter().sum();
    let mut rows = Vec::new();
    let mut before = 0;
    for (scenario, turns) in scenarios.iter().zip(turns) {
        let end = before + turns;
        let mut done = before;
        let mut entrants = Vec::new();
        let mut outcomes: Vec<Result<BTreeMap<Figure, Vec<f64>>, Outcome>> = Vec::new();
        for (index, contestant) in contestants.iter_mut().enumerate() {
            if (contestant.enters)(*scenario) {
                let ready = contestant.run.prepare(*scenario, index, effort).await;
                outcomes.push(ready.map(|()| BTreeMap::new()).map_err(Outcome::from));
                entrants.push(contestant);
            }
        }
        for round in 0..effort.turns(*scenario) {
            for (contestant, outcome) in entrants.iter_mut().zip(&mut outcomes) {
                watch(Progress {
                    done,
                    total,
                    scenario: *scenario,
                    contestant: &contestant.name,
                });
                done += 1;
                let Ok(figures) = outcome else { continue };
                let warming_up = !is_slow(*scenario) && round == 0;
                match contestant.run.round(effort, warming_up).await {
                    Ok(_) if warming_up => {}
                    Ok(sample) => {
                        for (figure, value) in sample {
                            figures.entry(figure).or_default().push(value);
                        }
                    }
                    Err(unfit) => *outcome = Err(unfit.into()),
                }
            }
        }
        before = end;
        for (contestant, outcome) in entrants.into_iter().zip(outcomes) {
            let ended = contestant.run.end().await;
            let outcome = outcome.map_or_else(|early| early, Outcome::Measured);
            let outcome = match (outcome, ended) {
                (Outcome::Measured(_), Err(error)) => Outcome::Failed(chain(&*error)),
                (outcome, _) => outcome,
            };
            rows.push(contestant.row(*scenario, outcome));
        }
    }
    rows
}

impl Effort {
    fn turns(&self, scenario: Scenario) -> u32 {
        if is_slow(scenario) {
            self.slow_rounds
        } else {
            self.rounds + 1
        }
    }
}

/// Each of its rounds starts a process.
fn is_slow(scenario: Scenario) -> bool {
    matches!(scenario, Scenario::Held(_) | Scenario::Recovery)
}

impl From<Unfit> for Outcome {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Declines(why) => Self::Skipped(why),
            Unfit::Fails(error) => Self::Failed(chain(&*error)),
        }
    }
}

/// What a round ends with.
pub(super) type Sample = Vec<(Figure, f64)>;

/// A contestant, whatever its subject is.
#[async_trait]
trait Run: Send {
    async fn prepare(&mut self, scenario: Scenario, index: usize, effort: &Effort) -> Result<(), Unfit>;
    async fn round(&mut self, effort: &Effort, warming_up: bool) -> Result<Sample, Unfit>;
    async fn end(&mut self) -> Result<(), BoxError>;
}

struct Running<S: Subject> {
    subject: S,
    stage: Option<Stage<S>>,
}

#[async_trait]
impl<S: Subject> Run for Running<S> {
    async fn prepare(&mut self, scenario: Scenario, index: usize, effort: &Effort) -> Result<(), Unfit> {
        self.stage = Some(Stage::set(&self.subject, scenario, index, effort).await?);
        Ok(())
    }

    async fn round(&mut self, effort: &Effort, warming_up: bool) -> Result<Sample, Unfit> {
        let stage = self.stage.as_mut().ok_or("it was not prepared")?;
        stage.round(effort, warming_up).await
    }

    async fn end(&mut self) -> Result<(), BoxError> {
        match self.stage.take() {
            Some(stage) => stage.clear().await,
            None => Ok(()),
        }
    }
}
