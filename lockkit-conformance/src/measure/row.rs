//! The results of a contest.

use std::collections::BTreeMap;

use super::{Figure, Role, Scenario};

/// One contestant in one scenario.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Row {
    /// The scenario.
    pub scenario: Scenario,
    /// The backend that the contestant is, or is to be compared with.
    pub backend: String,
    /// The contestant.
    pub contestant: String,
    /// The part that it plays.
    pub role: Role,
    /// The result.
    pub outcome: Outcome,
}

/// The result of one contestant in one scenario.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Outcome {
    /// Figures, each with a value per round, in the order of the rounds.
    Measured(BTreeMap<Figure, Vec<f64>>),
    /// It takes no part, and why.
    Skipped(String),
    /// It took part and failed, and how.
    Failed(String),
}

impl Row {
    /// The values of a figure, one per round; none if it was not measured.
    pub fn rounds(&self, figure: Figure) -> &[f64] {
        match &self.outcome {
            Outcome::Measured(figures) => figures.get(&figure).map_or(&[], Vec::as_slice),
            Outcome::Skipped(_) | Outcome::Failed(_) => &[],
        }
    }

    /// The median over the rounds; of waits that are said to be the longest, the longest of all.
    pub fn value(&self, figure: Figure) -> Option<f64> {
        let rounds = self.rounds(figure);
        match figure {
            Figure::Longest => rounds.iter().copied().reduce(f64::max),
            _ => median(rounds.to_vec()),
        }
    }

    /// Returns how far apart the rounds are: the middle half of them is within so much of the median on either side, as
    /// a fraction of it. 0.1 reads as ±10 %. None of a single round, nor of what is no median.
    pub fn spread(&self, figure: Figure) -> Option<f64> {
        if figure == Figure::Longest {
            return None;
        }
        let mut sorted = self.rounds(figure).to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = median(sorted.clone())?;
        let half = sorted.len() / 2;
        let low = median(sorted[..sorted.len() - half].to_vec())?;
        let high = median(sorted[half..].to_vec())?;
        (sorted.len() > 1 && middle != 0.0).then(|| (high - low) / 2.0 / middle.abs())
    }

    /// The median of [`ratios`](Self::ratios).
    pub fn ratio(&self, to: &Self, figure: Figure) -> Option<f64> {
        median(self.ratios(to, figure).collect())
    }

    /// This row's values over the other's, round by round. Whatever the machine did in a round, it did to both.
    pub fn ratios(&self, to: &Self, figure: Figure) -> impl Iterator<Item = f64> {
        let rounds = self.rounds(figure).iter().zip(to.rounds(figure));
        let ratios = rounds.map(|(own, other)| own / other);
        ratios.filter(|ratio| ratio.is_finite())
    }
}

/// `None` of nothing.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = values.get(middle)?;
    Some(if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], *upper)
    } else {
        *upper
    })
}
