use std::io::Write;

/// Whether a test is to be skipped because the server it needs is missing, for the reason given: `true` after saying
/// so on standard error.
///
/// ```
/// # use lockkit_testbed::{redis, skipped};
/// if skipped("redis", redis::missing()) {
///     return;
/// }
/// ```
///
/// # Panics
/// If the server is missing and the environment variable `LOCKKIT_REQUIRE`, a list separated by commas, names
/// `backend` or `all`.
pub fn skipped(backend: &str, missing: Option<String>) -> bool {
    let Some(missing) = missing else {
        return false;
    };
    let required = std::env::var("LOCKKIT_REQUIRE").unwrap_or_default();
    let required = required
        .split(',')
        .map(str::trim)
        .any(|name| name == backend || name == "all");
    assert!(!required, "LOCKKIT_REQUIRE names {backend}: {missing}");
    // Past libtest's capture, which hides what a test that passes prints.
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {missing}");
    true
}
