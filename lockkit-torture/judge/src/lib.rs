//! A second judge of the torture's histories.
//!
//! It knows nothing of lockkit but the text of a history, which docs/torture.md documents, and shares no code with the judge of
//! `lockkit-conformance::torture`. That one sweeps over intervals. This one asks whether there is an order in which the operations took
//! effect, each at some moment between its call and its reply, such that a plain lock with a counter of tokens would have granted every
//! one of them. `stateright` searches for that order.
//!
//! A hold counts from its grant to the last moment at which its holder was seen to hold. A fault, or an operator by force, may have
//! ended it before, if its holder was told in the time that the history gives for that. See docs/adr/0026-a-second-judge.md for what
//! keeps the search small, and what it leaves to the other judge.

mod object;
mod plan;
mod text;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use object::{Object, Search, search};
use text::Epoch;
pub use text::{History, Unreadable};

/// A rule that a history breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Law {
    /// No order of the operations keeps those apart that exclude each other, whatever their tokens are.
    Exclusion,
    /// There is such an order, and none in which tokens rise; or two grants have one token.
    Tokens,
}

/// What one epoch came to.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// The seed of the epoch.
    pub seed: u64,
    /// How many locks and semaphores it had.
    pub names: usize,
    /// How many grants it had.
    pub grants: usize,
    /// The most operations that had to be put in order together.
    pub largest: usize,
    /// The laws that it breaks, and which operations have no order.
    pub broken: BTreeMap<Law, String>,
    /// The names of which the search found no end within its bound.
    pub undecided: Vec<String>,
    /// The laws that the other judge found broken.
    pub theirs: BTreeSet<String>,
}

impl Verdict {
    /// Says whether the other judge came to the same result: that what both judge is good, or that it is not. Two holds that would be excused
    /// if their tokens were the other way round break either law, or that of fencing, which this judge does not know.
    pub fn agrees(&self) -> bool {
        let laws = [Law::Exclusion, Law::Tokens].map(|law| format!("{law:?}"));
        let theirs = laws.iter().any(|law| self.theirs.contains(law));
        let ours = !self.broken.is_empty();
        let agrees = theirs == ours || ours && self.theirs.contains("Fencing");
        agrees && self.undecided.is_empty()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ours: Vec<_> = self.broken.keys().map(|law| format!("{law:?}")).collect();
        let theirs: Vec<_> = self.theirs.iter().map(String::as_str).collect();
        let or_good = |laws: String| if laws.is_empty() { "good".to_owned() } else { laws };
        write!(
            f,
            "| {} | {} | {} | {} | {} | {} | {} |",
            self.seed,
            self.names,
            self.grants,
            self.largest,
            or_good(theirs.join(", ")),
            or_good(ours.join(", ")),
            if self.agrees() { "yes" } else { "NO" }
        )
    }
}

/// The most steps of a search for one order. Each tries one operation as the next.
const STEPS: u64 = 300_000;

/// Judges the epochs of a history, one after the other. Names that go on from one to the next have their tokens go on.
pub fn judge(history: &History) -> Vec<Verdict> {
    let mut known = HashMap::<String, Object>::new();
    history
        .epochs
        .iter()
        .map(|epoch| judge_epoch(epoch, &mut known))
        .collect()
}

fn judge_epoch(epoch: &Epoch, known: &mut HashMap<String, Object>) -> Verdict {
    let mut names = BTreeMap::<&str, Vec<&text::Hold>>::new();
    for hold in epoch.holds.values() {
        names.entry(&hold.name).or_default().push(hold);
    }
    let mut verdict = Verdict {
        seed: epoch.seed,
        names: names.len(),
        theirs: epoch.theirs.iter().cloned().collect(),
        ..Verdict::default()
    };
    for (name, holds) in names {
        verdict.grants += holds.iter().filter(|hold| hold.granted.is_some()).count();
        if let Some(twice) = granted_twice(epoch, &holds) {
            verdict.broken.entry(Law::Tokens).or_insert(twice);
        }
        let mut object = known
            .remove(name)
            .map_or_else(|| Object::new(&holds), |object| object.of_next_epoch(&holds));
        let mut is_good = true;
        for window in plan::windows(epoch, &holds) {
            verdict.largest = verdict.largest.max(window.len());
            match search(&object, &window, STEPS) {
                Search::Order(next) => object = next,
                Search::Undecided => {
                    verdict.undecided.push(name.to_owned());
                    is_good = false;
                }
                Search::None => {
                    let law = match search(&object.without_tokens(), &window, STEPS) {
                        Search::None => Law::Exclusion,
                        Search::Order(_) | Search::Undecided => Law::Tokens,
                    };
                    let what = format!("{name}: there is no order of {}", plan::shown(&window));
                    verdict.broken.entry(law).or_insert(what);
                    is_good = false;
                }
            }
            if !is_good {
                break;
            }
        }
        if is_good {
            known.insert(name.to_owned(), object);
        }
    }
    verdict
}

/// A token belongs to one grant, unless a hold is adopted, or counters began anew.
fn granted_twice(epoch: &Epoch, holds: &[&text::Hold]) -> Option<String> {
    let mut tokens = HashMap::new();
    let mut by_grant: Vec<_> = holds
        .iter()
        .filter_map(|hold| Some((hold.granted?, *hold)))
        .collect();
    by_grant.sort_by_key(|((at, token), _)| (*at, *token));
    for ((at, token), hold) in by_grant {
        let begun_anew = epoch
            .restarts()
            .any(|(restarted, clock)| at >= restarted && token > clock);
        if let Some(other) = tokens.insert(token, hold.id)
            && !hold.adopts
            && !begun_anew
        {
            return Some(format!(
                "{}: holds {other} and {} both have token {token}",
                hold.name, hold.id
            ));
        }
    }
    None
}
