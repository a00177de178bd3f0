//! `lockkit run` excludes.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

use crate::tool::{PATIENCE, Running, Site, in_this_process, lockkit, outcome};

/// Reads the counter, takes its time, and writes it back.
const DRAW: &str =
    r#"n=$(cat counter); sleep 0.005; echo $((n + 1)) > counter; echo "$LOCKKIT_TOKEN" >> tokens"#;

/// Returns the counter after 8 processes have each drawn 25 times, and the tokens in the order of the draws.
fn draw(site: &Site, wrapper: &str) -> (u32, Vec<u64>) {
    fs::write(site.path("counter"), "0\n").unwrap();
    fs::write(site.path("tokens"), "").unwrap();
    let script =
        format!("i=0; while [ $i -lt 25 ]; do {wrapper} sh -c '{DRAW}' || exit 1; i=$((i + 1)); done");
    let processes: Vec<_> = (0..8)
        .map(|_| {
            Command::new("sh")
                .args(["-c", &script])
                .env("LOCKKIT_URL", &site.url)
                .env("LOCKKIT_TOKEN", "0")
                .current_dir(site.path(""))
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut process in processes {
        assert!(process.wait().unwrap().success());
    }
    let counter = fs::read_to_string(site.path("counter")).unwrap();
    let tokens = fs::read_to_string(site.path("tokens")).unwrap();
    (
        counter.trim().parse().unwrap_or(0),
        tokens.lines().map(|token| token.parse().unwrap()).collect(),
    )
}

#[test]
fn an_unprotected_counter_counts_right_under_the_lock() {
    let site = Site::new();
    let (counter, tokens) = draw(&site, concat!(env!("CARGO_BIN_EXE_lockkit"), " run counter --"));
    assert_eq!(counter, 200);
    assert_eq!(tokens.len(), 200);
    assert!(
        tokens.is_sorted_by(|a, b| a < b),
        "not strictly increasing: {tokens:?}"
    );
}

#[test]
fn the_counter_counts_wrong_without_the_lock() {
    let (counter, _) = draw(&Site::new(), "");
    assert!(counter < 200, "the test above cannot fail if this one does");
}

#[test]
fn try_on_a_held_lock_is_124_at_once() {
    let site = Site::new();
    let _holder = site.running(&[], "echo up; exec sleep 60");
    let (status, output, complaint) = outcome(&mut site.run(&["--try"], "echo ran"));
    assert_eq!((status, output.as_str()), (124, ""));
    assert_eq!(complaint, "lockkit: lock `job` is taken\n");
}

#[test]
fn waiting_ends_with_124_in_time() {
    let site = Site::new();
    let _holder = site.running(&[], "echo up; exec sleep 60");
    let began = Instant::now();
    let (status, output, complaint) = outcome(&mut site.run(&["--wait", "300ms"], "echo ran"));
    let took = began.elapsed();
    assert_eq!((status, output.as_str()), (124, ""));
    assert!(
        complaint.contains("`job` is taken") && complaint.lines().count() == 1,
        "{complaint}"
    );
    assert!(took >= Duration::from_millis(300), "{took:?}");
}

#[test]
fn try_on_a_free_lock_runs_the_command() {
    let site = Site::new();
    let (status, output, complaint) = outcome(&mut site.run(&["--try"], "echo ran"));
    assert_eq!((status, output.as_str(), complaint.as_str()), (0, "ran\n", ""));
}

#[test]
fn shared_holders_are_in_together_and_keep_an_exclusive_one_out() {
    let site = Site::new();
    let _one = site.running(&["--shared"], "echo up; exec sleep 60");
    let _two = site.running(&["--shared", "--try"], "echo up; exec sleep 60");
    assert_eq!(outcome(&mut site.run(&["--try"], "echo ran")).0, 124);
}

#[test]
fn a_semaphore_takes_as_many_as_it_has_permits() {
    let site = Site::new();
    let _one = site.running(&["--permits", "2"], "echo up; exec sleep 60");
    let _two = site.running(&["--permits", "2", "--try"], "echo up; exec sleep 60");
    assert_eq!(
        outcome(&mut site.run(&["--permits", "2", "--try"], "echo ran")).0,
        124
    );
    let (_, shown, _) = outcome(&mut site.lockkit(&["inspect", "job", "--permits", "--json"]));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["holders"].as_array().unwrap().len(), 2, "{shown}");
    assert_eq!(shown["kind"], "semaphore");
}

#[test]
fn the_command_is_told_name_and_token() {
    let site = Site::new();
    let tell = "echo $LOCKKIT_NAME; echo $LOCKKIT_TOKEN";
    let (_, first, _) = outcome(&mut site.run(&[], tell));
    let (_, second, _) = outcome(&mut site.run(&[], tell));
    let (name, token) = first.trim().split_once('\n').unwrap();
    let (_, next) = second.trim().split_once('\n').unwrap();
    assert_eq!(name, "job");
    assert!(token.parse::<u64>().unwrap() < next.parse::<u64>().unwrap());
}

/// It has the password.
#[test]
fn the_servers_url_can_be_kept_from_the_command() {
    let site = Site::new();
    let script = "echo ${LOCKKIT_URL-none}";
    let (status, output, _) = outcome(&mut site.run(&["--no-inherit-url"], script));
    assert_eq!((status, output.as_str()), (0, "\n"));
    let (status, output, _) = outcome(&mut site.run(&[], script));
    assert_eq!((status, output.trim()), (0, site.url.as_str()));
}

/// A command with another home would look for its locks elsewhere.
#[test]
fn the_command_gets_the_url_that_is_in_force() {
    let site = Site::new();
    let run = |options: &[&str]| {
        let script = "echo \"${LOCKKIT_URL-none}\"";
        let arguments = [&["run"], options, &["job", "--", "sh", "-c", script]].concat();
        let (status, url, complaint) = outcome(lockkit(&arguments).env("XDG_STATE_HOME", site.path("")));
        assert_eq!(status, 0, "{options:?}: {complaint}");
        url.trim_end().to_owned()
    };
    let own = format!("file://{}", site.path("lockkit").display());
    assert_eq!(run(&[]), own);
    assert_eq!(run(&["--no-inherit-url"]), "");
    let with_parameters = format!("{}?namespace=app&ttl=20s", site.url);
    assert_eq!(run(&["--url", &with_parameters]), with_parameters);
}

/// It would be granted elsewhere what is held here.
#[test]
fn a_lockkit_within_a_command_locks_at_the_same_server() {
    let (site, other) = (Site::new(), Site::new());
    let within = format!("{} run --try job -- true", env!("CARGO_BIN_EXE_lockkit"));
    let run = |options: &[&str]| {
        let arguments = [&["run"], options, &["job", "--", "sh", "-c", &within]].concat();
        outcome(&mut other.lockkit(&arguments))
    };
    let (status, _, complaint) = run(&["--url", &site.url]);
    assert_eq!(status, 124, "{complaint}");
    for options in [
        &["--no-inherit-url"][..],
        &["--no-inherit-url", "--url", &site.url],
    ] {
        let (status, _, complaint) = run(options);
        assert_eq!(status, 125, "{complaint}");
        assert!(
            complaint.contains("LOCKKIT_URL is empty") && complaint.contains("give --url"),
            "{complaint}"
        );
    }
}

#[test]
fn an_inspection_shows_the_holder_and_then_that_it_is_free() {
    let site = Site::new();
    let inspect = || {
        let (status, shown, _) = outcome(&mut site.lockkit(&["inspect", "job", "--json"]));
        assert_eq!(status, 0);
        serde_json::from_str::<Value>(&shown).unwrap()
    };
    let mut holder = site.running(
        &["--label", "the holder"],
        "echo up; echo $LOCKKIT_TOKEN; exec sleep 60",
    );
    let token: u64 = holder.line().parse().unwrap();
    let shown = inspect();
    assert_eq!(shown["name"], "job");
    assert_eq!(shown["kind"], "lock");
    assert_eq!(shown["holders"][0]["token"], token, "{shown}");
    assert_eq!(shown["holders"][0]["label"], "the holder", "{shown}");
    let (_, text, _) = outcome(&mut site.lockkit(&["inspect", "job"]));
    assert!(text.starts_with("job: held\n"), "{text}");
    assert!(
        text.contains(&format!("token {token}")) && text.contains("the holder"),
        "{text}"
    );

    holder.signal(rustix::process::Signal::TERM);
    holder.end();
    assert_eq!(inspect()["holders"], Value::Array(Vec::new()));
    let (_, text, _) = outcome(&mut site.lockkit(&["inspect", "job"]));
    assert!(text.starts_with("job: free\n"), "{text}");
}

#[test]
fn without_a_label_an_inspection_shows_user_host_and_process() {
    let site = Site::new();
    let holder = Running::spawn(site.run(&[], "echo up; exec sleep 60").env("USER", "alice"));
    let mut holder = holder;
    assert_eq!(holder.line(), "up");
    let (_, shown, _) = outcome(&mut site.lockkit(&["inspect", "job", "--json"]));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let label = shown["holders"][0]["label"].as_str().unwrap();
    assert!(label.starts_with("alice@"), "{label}");
    assert!(label.ends_with(&format!(":{}", holder.pid())), "{label}");
}

/// From a moment before the command's exit to the grant to a waiter.
#[test]
fn the_lock_is_free_within_50_ms_of_the_commands_exit() {
    let site = Site::new();
    in_this_process(async {
        let lock = lockkit::connect(&site.url).await.unwrap().lock("job").unwrap();
        let mut best = Duration::MAX;
        // A busy machine is allowed some bad moments.
        for _ in 0..20 {
            if best < Duration::from_millis(50) {
                return;
            }
            let mut holder = site.running(&[], "echo up; read line; date +%s%N; exit 3");
            let mut waiting = std::pin::pin!(lock.acquire());
            let blocked = tokio::time::timeout(Duration::from_millis(50), waiting.as_mut()).await;
            assert!(blocked.is_err(), "it is held");
            holder.close_input();
            let granted = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
            let granted_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            granted.release().await.unwrap();
            let exited_at = Duration::from_nanos(holder.line().parse().unwrap());
            assert_eq!(holder.end().0.code(), Some(3));
            best = best.min(granted_at.saturating_sub(exited_at));
        }
        panic!("{best:?} at best");
    });
}
