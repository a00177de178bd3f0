//! What is asked for and is not there is one clear error, and not success.

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
