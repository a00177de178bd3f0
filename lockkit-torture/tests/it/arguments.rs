//! Arguments that ask for something that is not there: one clear error, and not success.

use std::process::Command;

fn refused(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_lockkit-torture"))
        .args(arguments)
        .output()
        .expect("it runs");
    assert!(!output.status.success(), "{arguments:?} is no success");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_target_that_is_not_there() {
    let error = refused(&["memory", "oracle"]);
    assert!(
        error.contains("\"oracle\"") && error.contains("redlock3"),
        "{error}"
    );
}

#[test]
fn a_fault_that_is_not_there() {
    let error = refused(&["memory", "--faults", "earthquake"]);
    assert!(error.contains("earthquake"), "{error}");
}

#[test]
fn a_seed_that_is_no_number_and_a_file_that_is_no_schedule() {
    assert!(refused(&["memory", "--seed", "x"]).contains("--seed"));
    assert!(refused(&["memory", "--schedule", "/nowhere/at/all"]).contains("/nowhere/at/all"));
    assert!(refused(&["memory", "--schedule", "/dev/null"]).contains("no schedule"));
}

/// Its status, and what it says on standard output.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_lockkit-torture"))
        .args(arguments)
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), text)
}

#[test]
fn a_run_says_its_seed_and_ends_with_a_row() {
    let (status, text) = run(&["memory", "--for", "1ms", "--seed", "1"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.starts_with("seed 1\n"), "{text}");
    assert!(text.contains("\nmemory: 1 epochs, "), "{text}");
    assert!(text.contains(" | 0.1.0 | memory | "), "{text}");
}

#[test]
fn a_goal_is_reached_or_missed() {
    let goal = ["memory", "--seed", "1", "--grants", "100"];
    let (status, text) = run(&[&goal[..], &["--least-faults", "1", "--jobs", "2"]].concat());
    assert_eq!(status, Some(0), "{text}");
    let (status, text) = run(&["memory", "--seed", "1", "--grants", "1000000", "--for", "1ms"]);
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("ERROR: there was no time for all the grants"),
        "{text}"
    );
}
