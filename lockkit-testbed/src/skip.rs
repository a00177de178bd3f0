use std::io::Write;

/// Returns whether a test has to be skipped because its server is missing, and then says so on standard error, with the
/// given reason.
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
    // Not captured by libtest, which hides the output of a test that passes.
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {missing}");
    true
}
