//! `lockkit check`, where it takes long. Tests begin in the order of their names, so that this one does not outlast all others.

use crate::tool::{Running, lockkit};

/// With all defaults a session outlives its process by half a minute, which is for the suite to know.
#[test]
fn a_check_waits_as_long_as_the_dead_keep_their_names() {
    let Some(server) = crate::zookeeper::server(2_000) else {
        return;
    };
    let url = format!("zk://{}", server.addr());
    let checks: Vec<_> = ["killed_holder_lets", "killed_holder_returns", "during_shutdown"]
        .map(|cases| Running::spawn(&mut lockkit(&["check", "--url", &url, "--only", cases])))
        .into();
    for check in checks {
        let (status, shown) = check.end_with_output();
        assert_eq!(status.code(), Some(0), "{shown}");
        assert_eq!(
            shown.lines().last(),
            Some("1 passed, 0 failed, 0 skipped"),
            "{shown}"
        );
    }
}
