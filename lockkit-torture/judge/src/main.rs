//! `cargo run -p lockkit-history-judge -- FILE...`
//!
//! Prints a row for each epoch of the histories: what the torture's judge found, and what this one finds. Status 1 if they differ.

use std::{env, fs, process::ExitCode};

use lockkit_history_judge::{History, judge};

fn main() -> ExitCode {
    let (mut judged, mut differing) = (0, 0);
    println!("| file | seed | names | grants | largest | theirs | ours | agree |");
    println!("|---|--:|--:|--:|--:|---|---|---|");
    for path in env::args().skip(1) {
        let read = fs::read_to_string(&path).map_err(|error| error.to_string());
        let history = read.and_then(|text| text.parse::<History>().map_err(|error| error.to_string()));
        let history = match history {
            Ok(history) => history,
            Err(error) => {
                eprintln!("{path}: {error}");
                return ExitCode::from(2);
            }
        };
        let name = path.rsplit('/').next().unwrap_or(&path);
        for verdict in judge(&history) {
            println!("| {name} {verdict}");
            judged += 1;
            if !verdict.agrees() {
                differing += 1;
                for what in verdict.broken.values().chain(&verdict.undecided) {
                    eprintln!("{path}: seed {}: {what}", verdict.seed);
                }
            }
        }
    }
    println!("\n{judged} histories, {differing} on which the judges differ");
    ExitCode::from(u8::from(differing > 0 || judged == 0))
}
