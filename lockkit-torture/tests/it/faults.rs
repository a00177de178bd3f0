//! Old faults of the command: docs/torture.md says how they are put back, and what finds them.

use std::{fs, path::Path, process::Command};

#[test]
fn each_old_fault_can_still_be_put_back() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.parent().expect("the workspace");
    let page = fs::read_to_string(root.join("docs/torture.md")).expect("the page");
    let (patches, mut found) = (fs::read_dir(here.join("faults")).expect("patches"), 0);
    for patch in patches {
        let patch = patch.expect("a patch").path();
        let checked = Command::new("git")
            .args(["apply", "--check"])
            .arg(&patch)
            .current_dir(root)
            .output()
            .expect("git runs");
        let why = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{}: {why}", patch.display());
        let name = patch
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        assert!(
            page.contains(&format!("| `{name}` |")),
            "{name} is not on the page"
        );
        found += 1;
    }
    assert!(found >= 4, "{found} patches");
}
