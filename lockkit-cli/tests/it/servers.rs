//! The choice of the server, and the commands that look after it.

use std::fs;

use serde_json::Value;

use crate::tool::{Running, Site, eventually, lockkit, outcome};

#[test]
fn the_option_wins_over_the_environment_and_that_over_home() {
    let site = Site::new();
    let _holder = site.running(&[], "echo up; exec sleep 60");
    let elsewhere = format!("file://{}", site.path("elsewhere").display());
    assert_eq!(outcome(&mut site.run(&["--try"], "exit 0")).0, 124);
    assert_eq!(
        outcome(&mut site.run(&["--try", "--url", &elsewhere], "exit 0")).0,
        0
    );

    let state = site.path("a home");
    fs::create_dir(&state).unwrap();
    for (variable, directory) in [
        ("XDG_STATE_HOME", "a home/lockkit"),
        ("HOME", "a home/.local/state/lockkit"),
    ] {
        let mut run = site.run(&["--try"], "exit 0");
        run.env_remove("LOCKKIT_URL")
            .env_remove("XDG_STATE_HOME")
            .env_remove("HOME");
        assert_eq!(outcome(run.env(variable, &state)).0, 0);
        assert!(site.path(directory).is_dir(), "{directory}");
    }
}

#[test]
fn without_any_server_it_says_what_to_do() {
    let mut run = lockkit(&["run", "job", "--", "true"]);
    let (status, _, complaint) = outcome(run.env_remove("HOME").env_remove("XDG_STATE_HOME"));
    assert_eq!(status, 125);
    assert!(
        complaint.contains("--url") && complaint.contains("LOCKKIT_URL"),
        "{complaint}"
    );
}

#[test]
fn breaking_names_what_is_not_there() {
    let (status, _, complaint) = outcome(&mut lockkit(&[
        "break", "--url", "memory:", "job", "--token", "7",
    ]));
    assert_eq!(status, 1);
    assert_eq!(complaint, "lockkit: nobody holds `job` with token 7\n");
}

#[test]
fn the_bench_measures_each_server_or_says_why_not() {
    let site = Site::new();
    let urls = ["--url", "memory:", "--url", &site.url];
    let (status, shown, complaint) = outcome(&mut lockkit(
        &[&["bench", "--quick", "--json"], &urls[..]].concat(),
    ));
    assert_eq!(status, 0, "{shown}{complaint}");
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let rows = shown.as_array().unwrap();
    assert_eq!(rows.len() % 2, 0);
    assert!(rows.len() > 30, "{} rows", rows.len());
    for pair in rows.chunks(2) {
        let scenario = pair[0]["scenario"].as_str().unwrap();
        assert_eq!(pair[1]["scenario"], scenario);
        assert_eq!(pair[0]["backend"], "memory");
        assert_eq!(pair[1]["backend"], "file");
        for row in pair {
            let rounds_of_it = match scenario {
                _ if scenario.starts_with("held") || ["recovery", "silence"].contains(&scenario) => 1,
                _ if scenario.ends_with("-100") || scenario.starts_with("holding") => 2,
                _ => 3,
            };
            let rivals = ["clients", "processes", "holding"];
            let with_processes = rounds_of_it == 1 || rivals.iter().any(|it| scenario.starts_with(it));
            let declines = ["held-10000", "silence"].contains(&scenario);
            if declines || with_processes && row["backend"] == "memory" {
                let why = row["outcome"]["skipped"].as_str().unwrap();
                assert!(
                    why.contains("no other process")
                        || why.contains("quick run")
                        || why.contains("its process"),
                    "{row}"
                );
                continue;
            }
            let figures = row["outcome"]["measured"].as_object().unwrap();
            assert!(!figures.is_empty(), "{row}");
            for (figure, rounds) in figures {
                let rounds = rounds.as_array().unwrap();
                assert_eq!(rounds.len(), rounds_of_it, "{figure}: {row}");
                assert!(rounds.iter().all(|value| value.as_f64().unwrap() >= 0.0), "{row}");
            }
        }
    }
}

#[test]
fn the_bench_prints_a_table() {
    let site = Site::new();
    let mut bench = site.lockkit(&["bench", "--quick", "--only", "uncontended"]);
    let (status, table, complaint) = outcome(&mut bench);
    assert_eq!(status, 0, "{table}");
    // No bar where nobody looks.
    assert_eq!(complaint, "");
    let lines: Vec<_> = table.lines().collect();
    assert!(lines[0].trim_start().starts_with("file://"), "{table}");
    assert!(
        lines[1].starts_with("acquire and release, uncontended  "),
        "{table}"
    );
    assert!(lines[1].ends_with('%') && lines[1].contains('±'), "{table}");
    assert!(lines[2].starts_with("  p99  "), "{table}");
    assert_eq!(lines.len(), 3, "{table}");

    let (status, table, _) = outcome(&mut site.lockkit(&["bench", "--quick", "--only", "holding-1ms"]));
    assert_eq!(status, 0, "{table}");
    let title = "16 clients of four processes on one name, held for 1 ms: clients' processor time per lock  ";
    assert!(table.lines().nth(1).unwrap().starts_with(title), "{table}");

    let (status, table, _) = outcome(&mut lockkit(&[
        "bench", "--quick", "--only", "recovery", "--url", "memory:",
    ]));
    assert_eq!(status, 0);
    let why = "skipped: memory:, because no other process reaches it: the next grant after";
    assert!(table.contains(why), "{table}");

    let (status, _, complaint) = outcome(&mut lockkit(&["bench", "--only", "nothing"]));
    assert_eq!(status, 125);
    assert!(
        complaint.contains("`nothing`") && complaint.contains("hand-off"),
        "{complaint}"
    );
}

#[test]
fn a_bench_whose_server_goes_away_says_so_and_fails() {
    let site = Site::new();
    let mut bench = site.lockkit(&["bench", "--only", "own-names"]);
    let running = Running::spawn(&mut bench);
    eventually("it has begun", || {
        let begun = site.path("locks").is_dir() && !site.lock_files().is_empty();
        begun.then_some(())
    });
    fs::rename(site.path("locks"), site.path("away")).unwrap();
    fs::write(site.path("locks"), "no directory").unwrap();
    let (status, table) = running.end_with_output();
    assert_eq!(status.code(), Some(1), "{table}");
    assert!(table.contains("FAILED: file://"), "{table}");
}

#[test]
fn the_check_runs_cases_and_counts_them() {
    let site = Site::new();
    let (status, shown, complaint) = outcome(&mut site.lockkit(&["check", "--only", "second_"]));
    assert_eq!(status, 0, "{shown}{complaint}");
    assert!(shown.contains("ok      second_try_is_none"), "{shown}");
    assert!(
        shown.contains("ok      second_process_excludes"),
        "with helper processes: {shown}"
    );
    assert_eq!(
        shown.lines().last(),
        Some("2 passed, 0 failed, 0 skipped"),
        "{shown}"
    );
}
