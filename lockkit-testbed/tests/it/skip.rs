use std::process::Command;

use lockkit_testbed::{redis, skipped};

const HELPER: &str = "LOCKKIT_TESTBED_SKIP";

/// Run again by the tests below, with another environment.
#[test]
fn helper_without_a_server() {
    if std::env::var_os(HELPER).is_none() {
        return;
    }
    assert!(skipped("redis", redis::missing()));
}

/// Runs the test above on a machine without servers. Returns whether it passed, and its output.
fn without_servers(required: &str) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "skip::helper_without_a_server"])
        .env(HELPER, "1")
        .env("PATH", "/nonexistent")
        .env("LOCKKIT_REQUIRE", required)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

#[test]
fn a_missing_server_skips_aloud_unless_it_is_required() {
    for required in ["", "file", "file, zk"] {
        let (passed, said) = without_servers(required);
        assert!(passed, "{said}");
        assert!(
            said.contains("skipped: skip::helper_without_a_server: redis-server"),
            "{said}"
        );
        assert!(said.contains("apt-get install redis-server"), "{said}");
    }
    for required in ["redis", "file, redis", "all"] {
        let (passed, said) = without_servers(required);
        assert!(!passed, "{said}");
        assert!(
            said.contains("LOCKKIT_REQUIRE names redis: redis-server"),
            "{said}"
        );
    }
}

#[test]
fn a_server_that_is_there_is_not_skipped() {
    assert!(!skipped("redis", None));
}
