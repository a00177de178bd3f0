//! The simulator over enough schedules to tell.

mod promises;
