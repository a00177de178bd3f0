//! Draws the last run of the comparison: `docs/benchmarks.md` with its pictures, and
//! `target/lockkit-report/index.html`.
//!
//! `report [RESULTS [DOCS [PAGE]]]`, all of which have a default. If there was a run before the last, it also prints which
//! ratios came out otherwise.

use std::{io, path::PathBuf};

use lockkit_benches::{
    report,
    results::{Results, target_directory},
};

fn main() -> io::Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let results = arguments.next().unwrap_or_else(Results::default_path);
    let docs = arguments
        .next()
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs"));
    let page = arguments
        .next()
        .unwrap_or_else(|| target_directory().join("lockkit-report").join("index.html"));
    let read = Results::read(&results).map_err(|error| {
        let hint = "run `cargo bench -p lockkit-benches --bench matrix` first";
        io::Error::new(error.kind(), format!("{}: {error}; {hint}", results.display()))
    })?;
    report::write(&read, &docs, &page)?;
    println!("{} and {}", docs.join("benchmarks.md").display(), page.display());
    if let Ok(before) = Results::read(&Results::kept(&results)) {
        print!("{}", report::compare(&read, &before));
    }
    Ok(())
}
