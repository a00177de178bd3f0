//! The cases, by theme. Each takes a [`CaseRun`](crate::case_run::CaseRun) and says what it expected if it fails.

pub(crate) mod asking;
pub(crate) mod basic;
pub(crate) mod claims;
pub(crate) mod contention;
pub(crate) mod detaching;
pub(crate) mod downgrade;
pub(crate) mod election;
pub(crate) mod fence;
pub(crate) mod listing;
pub(crate) mod loss;
pub(crate) mod names;
pub(crate) mod permits;
pub(crate) mod processes;
pub(crate) mod sets;
pub(crate) mod shared;
pub(crate) mod waiting;
