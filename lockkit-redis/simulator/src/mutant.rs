//! The algorithm with one mistake.

/// A mistake that the simulator has to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Takes tokens as they are often proposed: each master counts its grants, and the highest count is the token.
    NaiveTokens,
    /// Lets two masters of five decide.
    TwoOfFive,
    /// Counts the lease from the reply that made the majority.
    LeaseFromTheWin,
    /// Takes all clocks to run alike.
    NoDriftAllowance,
    /// Deletes the key on release, even if it is another owner's.
    ReleasesAnyone,
    /// Uses tokens before a majority confirmed them.
    ConfirmsAlone,
    /// Has a master confirm tokens that its counter has passed.
    ConfirmsAnything,
    /// Has a renewal set a missing key anew, and counts that master.
    RepairCounts,
    /// Repairs a master in quarantine, and counts it from then on.
    RepairsUnmarked,
    /// Has renewal and repair set the key but not the counter.
    RepairForgetsTokens,
    /// Counts a vote for an earlier round in the present one.
    OldVotesCount,
    /// Has a master grant tokens without raising its counter.
    VoteRaisesNothing,
    /// Leaves the round out of a key's value.
    RoundsLookAlike,
    /// Goes on with the quarantine of a master that was emptied meanwhile.
    QuarantineGoesOn,
    /// Repairs no earlier than the lease has to be renewed.
    RepairsLate,
}

impl Mutant {
    /// All mutants.
    pub const ALL: [Self; 15] = [
        Self::NaiveTokens,
        Self::TwoOfFive,
        Self::LeaseFromTheWin,
        Self::NoDriftAllowance,
        Self::ReleasesAnyone,
        Self::ConfirmsAlone,
        Self::ConfirmsAnything,
        Self::RepairCounts,
        Self::RepairsUnmarked,
        Self::RepairForgetsTokens,
        Self::OldVotesCount,
        Self::VoteRaisesNothing,
        Self::RoundsLookAlike,
        Self::QuarantineGoesOn,
        Self::RepairsLate,
    ];
}
