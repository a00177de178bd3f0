//! Which server, and the commands that look after it.

use std::fs;

use serde_json::Value;

use crate::tool::{Site, lockkit, outcome};

#[test]
fn the_option_wins_over_the_environment_and_that_over_the_users_directory() {
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
fn the_bench_measures_each_server() {
    let site = Site::new();
    let urls = ["--url", "memory:", "--url", &site.url];
    let (status, shown, complaint) = outcome(&mut lockkit(
        &[&["bench", "--quick", "--json"], &urls[..]].concat(),
    ));
    assert_eq!(status, 0, "{complaint}");
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let rows = shown.as_array().unwrap();
    assert_eq!(
        rows.iter().map(|row| &row["backend"]).collect::<Vec<_>>(),
        ["memory", "file"]
    );
    for row in rows {
        for figure in [
            "uncontended_p50_us",
            "uncontended_p99_us",
            "contended_locks_per_s",
            "handoff_p50_us",
            "handoff_p99_us",
        ] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure}: {row}");
        }
    }
    let (status, table, _) = outcome(&mut lockkit(&["bench", "--quick", "--url", "memory:"]));
    assert_eq!(status, 0);
    assert_eq!(table.lines().count(), 2, "{table}");
    assert!(
        table.starts_with("server ") && table.contains("locks/s"),
        "{table}"
    );
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
        Some("2 passed, 0 failed, 0 gated"),
        "{shown}"
    );
}
