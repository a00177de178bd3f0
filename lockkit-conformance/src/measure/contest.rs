//! Contestants take turns.

use std::{collections::BTreeMap, fmt, time::Duration};

use async_trait::async_trait;
use lockkit_core::{BoxError, spi::chain};

use super::{
    Figure, Outcome, Row, Scenario, Subject,
    rounds::{Stage, Unfit, fit},
};

/// The extent of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// The number of passes through all scenarios, with new clients each time: what the machine does for a minute, or a
    /// connection for as long as it lives, then is a part of a figure and not the whole of it.
    pub passes: u32,
    /// The number of passes through the scenarios in which each turn starts processes, or has all contenders come
    /// first, with one turn each.
    pub slow_passes: u32,
    /// The number of turns of each contestant in a pass, after one shorter turn that does not count. With 100
    /// contenders or with long holds it is half as often.
    pub rounds: u32,
    /// The duration of a measurement of one contestant in one round. With 100 contenders or with long holds it is four
    /// times as long, and 20 times with a line that has to come first.
    pub stretch: Duration,
    /// The number of hand-offs in a round.
    pub hand_offs: u32,
    /// The ttl of holds that are kept or left behind.
    pub ttl: Duration,
    /// The most locks that are held.
    pub most_held: u32,
}

impl Effort {
    /// Within a quarter of a minute per contestant, for a first impression.
    pub const QUICK: Self = Self {
        passes: 1,
        slow_passes: 1,
        rounds: 3,
        stretch: Duration::from_millis(40),
        hand_offs: 2,
        ttl: Duration::from_secs(4),
        most_held: 1_000,
    };
    /// Within one to two minutes per contestant, for figures that are much the same in the next run.
    pub const FULL: Self = Self {
        passes: 3,
        slow_passes: 2,
        rounds: 6,
        stretch: Duration::from_millis(50),
        hand_offs: 3,
        ttl: Duration::from_secs(4),
        most_held: 10_000,
    };
}

/// The part that a contestant plays.
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
    sits_out: fn(Scenario) -> Option<&'static str>,
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
            sits_out: |_| None,
            run: Box::new(Running { subject, stage: None }),
        }
    }

    /// Has it enter only the scenarios that `enters` picks; in the others it has no row. By default it enters all.
    pub fn only(mut self, enters: fn(Scenario) -> bool) -> Self {
        self.enters = enters;
        self
    }

    /// Has it sit out those scenarios for which there is a reason; its rows there say so. By default it sits out none.
    pub fn sitting_out(mut self, sits_out: fn(Scenario) -> Option<&'static str>) -> Self {
        self.sits_out = sits_out;
        self
    }

    /// The backend that it is, or is to be compared with.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns why it takes no part in a scenario, if it does not.
    ///
    /// # Errors
    /// If that cannot be told.
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn declines(&mut self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        if !(self.enters)(scenario) {
            return Ok(Some("it is measured elsewhere".to_owned()));
        }
        match (self.sits_out)(scenario) {
            Some(why) => Ok(Some(why.to_owned())),
            None => self.run.declines(scenario).await,
        }
    }

    /// Prepares it for a scenario, for those who measure otherwise than in a [`contest`]. `index` tells the names that
    /// it locks from those of other contestants.
    ///
    /// # Errors
    /// If it declines or fails.
    ///
    /// # Cancel safety
    /// Dropped half-way, clients are dropped.
    pub async fn trial(
        &mut self,
        scenario: Scenario,
        index: usize,
        effort: &Effort,
    ) -> Result<Trial<'_>, BoxError> {
        let prepared = self.run.prepare(scenario, index, effort).await;
        prepared.map_err(Unfit::into_error)?;
        Ok(Trial {
            run: &mut *self.run,
            effort: *effort,
        })
    }

    fn row(&self, scenario: Scenario) -> Row {
        let outcome = match (self.sits_out)(scenario) {
            Some(why) => Outcome::Skipped(why.to_owned()),
            None => Outcome::Measured(BTreeMap::new()),
        };
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

/// One contestant in one scenario, round by round.
pub struct Trial<'a> {
    run: &'a mut dyn Run,
    effort: Effort,
}

impl Trial<'_> {
    /// One round.
    ///
    /// # Errors
    /// If it fails.
    ///
    /// # Cancel safety
    /// Dropped half-way, holds are released in the background, as far as the contestant does so, and no other round can
    /// follow.
    pub async fn round(&mut self) -> Result<BTreeMap<Figure, f64>, BoxError> {
        let sample = self.run.round(&self.effort, false).await;
        let sample = sample.map_err(Unfit::into_error)?;
        Ok(sample.into_iter().collect())
    }

    /// Lets go of the clients.
    ///
    /// # Errors
    /// If something is left at the server.
    ///
    /// # Cancel safety
    /// Dropped half-way, clients are dropped.
    pub async fn end(self) -> Result<(), BoxError> {
        self.run.end().await
    }
}

impl fmt::Debug for Trial<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial")
            .field("effort", &self.effort)
            .finish_non_exhaustive()
    }
}

/// The progress of a contest.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// The rounds of one contestant that are done, or need not be.
    pub done: usize,
    /// The number of rounds in all.
    pub total: usize,
    /// The scenario.
    pub scenario: Scenario,
    /// The contestant whose turn it is.
    pub contestant: &'a str,
}

/// Takes the contestants through the scenarios, in turns, and tells `watch` at each turn. There is a row for each
/// contestant in each scenario that it enters; one that fails is out for that scenario alone, and with it what was
/// measured of it there in earlier rounds. Needs a Tokio runtime of several threads.
///
/// # Cancel safety
/// Dropped half-way, holds are released in the background, as far as the contestants do so.
pub async fn contest(
    contestants: &mut [Contestant],
    scenarios: &[Scenario],
    effort: &Effort,
    mut watch: impl FnMut(Progress<'_>),
) -> Vec<Row> {
    let mut entries: Vec<Vec<(usize, Row)>> = Vec::new();
    for scenario in scenarios {
        let entrants = contestants.iter().enumerate();
        let entrants = entrants.filter(|(_, contestant)| (contestant.enters)(*scenario));
        entries.push(
            entrants
                .map(|(index, contestant)| (index, contestant.row(*scenario)))
                .collect(),
        );
    }
    let rows = || entries.iter().flatten().map(|(_, row)| row.scenario);
    let turns = |pass| rows().map(move |scenario| effort.turns(scenario, pass));
    let total = (0..effort.passes).flat_map(turns).sum::<u32>() as usize;
    let mut done = 0;
    for pass in 0..effort.passes {
        for (scenario, entrants) in scenarios.iter().zip(&mut entries) {
            let turns = effort.turns(*scenario, pass);
            if turns == 0 {
                continue;
            }
            for (index, row) in &mut *entrants {
                if let Outcome::Measured(_) = row.outcome
                    && let Err(unfit) = contestants[*index].run.prepare(*scenario, *index, effort).await
                {
                    row.outcome = unfit.into();
                }
            }
            for turn in 0..turns {
                for (index, row) in &mut *entrants {
                    let contestant = &mut contestants[*index];
                    watch(Progress {
                        done,
                        total,
                        scenario: *scenario,
                        contestant: &contestant.name,
                    });
                    done += 1;
                    let Outcome::Measured(figures) = &mut row.outcome else {
                        continue;
                    };
                    let warming_up = turns > 1 && turn == 0;
                    match contestant.run.round(effort, warming_up).await {
                        Ok(_) if warming_up => {}
                        Ok(sample) => {
                            for (figure, value) in sample {
                                figures.entry(figure).or_default().push(value);
                            }
                        }
                        Err(unfit) => row.outcome = unfit.into(),
                    }
                }
            }
            for (index, row) in entrants {
                let ended = contestants[*index].run.end().await;
                if let (Outcome::Measured(_), Err(error)) = (&row.outcome, ended) {
                    row.outcome = Outcome::Failed(chain(&*error));
                }
            }
        }
    }
    let mut rows: Vec<_> = entries.into_iter().flatten().map(|(_, row)| row).collect();
    for row in &mut rows {
        if matches!(&row.outcome, Outcome::Measured(figures) if figures.is_empty()) {
            row.outcome = Outcome::Skipped("it had no turn".to_owned());
        }
    }
    rows
}

impl Effort {
    /// Returns the number of turns that a contestant has in a pass. The first of several does not count.
    fn turns(&self, scenario: Scenario, pass: u32) -> u32 {
        match scenario {
            Scenario::Waiters(_) | Scenario::Held(_) | Scenario::Recovery | Scenario::Silence => {
                u32::from(pass < self.slow_passes)
            }
            // Each ends long after its stretch, when the last of them has been served.
            crowded if crowded.is_crowded() => self.rounds.div_ceil(2) + 1,
            _ => self.rounds + 1,
        }
    }
}

impl From<Unfit> for Outcome {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Declines(why) => Self::Skipped(why),
            Unfit::Fails(error) => Self::Failed(chain(&*error)),
        }
    }
}

/// The figures of one round.
pub(super) type Sample = Vec<(Figure, f64)>;

/// A contestant, whatever its subject is.
#[async_trait]
trait Run: Send {
    async fn declines(&mut self, scenario: Scenario) -> Result<Option<String>, BoxError>;
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
    async fn declines(&mut self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        match fit(&self.subject, scenario).await {
            Ok(_) => Ok(None),
            Err(Unfit::Declines(why)) => Ok(Some(why)),
            Err(Unfit::Fails(error)) => Err(error),
        }
    }

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
