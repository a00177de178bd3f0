//! What the system does not let it do.

use crate::tool::{Site, outcome};

#[test]
fn a_limit_on_file_sizes_is_an_error_and_no_death() {
    let site = Site::new();
    let lockkit = env!("CARGO_BIN_EXE_lockkit");
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-c", &format!("ulimit -f 0; exec {lockkit} run job -- true")])
        .env("LOCKKIT_URL", &site.url);
    let (status, output, complaint) = outcome(&mut shell);
    assert_eq!((status, output.as_str()), (125, ""), "{complaint}");
    assert!(
        complaint.starts_with("lockkit: file: acquire failed"),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
}
