//! The algorithm with one thing wrong.

/// One mistake. The simulator has to find it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Tokens as they are often proposed: each master that grants counts, and the highest of their numbers is the token.
    NaiveTokens,
    /// Two masters of five decide.
    TwoOfFive,
    /// The lease counts from the answer that made the majority.
    LeaseFromTheWin,
    /// All clocks are taken to run alike.
    NoDriftAllowance,
    /// A release deletes the key, whoever's it is.
    ReleasesAnyone,
    /// Tokens are used as soon as they are to be confirmed.
    ConfirmsAlone,
    /// A master confirms tokens that its counter has passed.
    ConfirmsAnything,
    /// A master sets the lock anew when it is to be renewed, and counts.
    RepairCounts,
    /// A master that may have lost data lets itself be repaired, and counts from then on.
    RepairsUnmarked,
    /// Renewal and repair set the key and not the counter.
    RepairForgetsTokens,
    /// A vote for an earlier round counts for the present one.
    OldVotesCount,
    /// A master grants tokens and does not raise its counter.
    VoteRaisesNothing,
    /// A key says who holds it, not since which round.
    RoundsLookAlike,
    /// A master that was emptied in quarantine goes on with it.
    QuarantineGoesOn,
    /// What a majority holds is not repaired before it is renewed for its lease's sake.
    RepairsLate,
}

impl Mutant {
    /// All of them.
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
