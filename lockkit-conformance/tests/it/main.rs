//! The suite tested: it passes a good backend, and names what is wrong with a bad one.

mod breaks;
mod desk;
mod history;
mod measure;
mod modes;
mod mutants;
mod plain;
mod shelf;
mod stall;
mod torture;
