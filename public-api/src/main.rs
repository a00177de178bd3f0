//! Prints a library's public items, one a line, from rustdoc's description of it in JSON.
//!
//! `lockkit-public-api FILE`. The record is beside this program. `scripts/public-api` compares and renews it.

use std::error::Error;

/// Auto traits that no user relies on, and that the standard library adds to. `Send`, `Sync` and `Unpin` stay.
const NOISE: [&str; 3] = [
    "marker::Freeze for ",
    "marker::UnsafeUnpin for ",
    "UnwindSafe for ",
];

fn main() -> Result<(), Box<dyn Error>> {
    let description = std::env::args_os()
        .nth(1)
        .ok_or("usage: lockkit-public-api FILE")?;
    let api = public_api::Builder::from_rustdoc_json(description)
        .omit_blanket_impls(true)
        .build()?;
    for item in api.items() {
        let item = item.to_string();
        if !NOISE.iter().any(|noise| item.contains(noise)) {
            println!("{item}");
        }
    }
    Ok(())
}
