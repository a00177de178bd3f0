//! The simulator over enough schedules to tell.

mod mutants;
mod promises;
