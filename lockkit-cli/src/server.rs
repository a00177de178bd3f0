//! Chooses the lock server.

use std::{
    env,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use lockkit::{Error, LockConfig, spi::redacted_url};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

use crate::{
    args::Server,
    failure::{FAILED, Failure, url_in},
};

/// The characters of a path that a URL has to encode.
const IN_A_PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'-')
    .remove(b'_');

impl Server {
    /// The server's config: from `--url`, else `LOCKKIT_URL`, else the user's own directory. It is read with what else is given, and
    /// validated as a whole.
    pub(crate) fn config(&self) -> Result<LockConfig, Failure> {
        Ok(LockConfig::new(url(self.url.as_deref())?))
    }

    /// The server's [config](Self::config), for a lock of that name, or for names with that beginning. A server's URL in its place
    /// is refused if it may have a password: names are shown to everybody, and kept by the server.
    pub(crate) fn config_for(&self, name: &str) -> Result<LockConfig, Failure> {
        if is_url_with_secret(name) {
            return Err(Failure::new(
                FAILED,
                "in the place of the lock's name is the URL of a server, perhaps with a password, and names are shown to everybody; \
                 give it as --url, or in LOCKKIT_URL",
            ));
        }
        self.config()
    }
}

/// True if `name` has the URL of a lock server with what is hidden of it, perhaps in quotes, or behind the variable that it was meant for.
fn is_url_with_secret(name: &str) -> bool {
    let Some(url) = url_in(name) else {
        return false;
    };
    let scheme = url.split("://").next().unwrap_or_default();
    let server = LockConfig::new(format!("{scheme}:")).resolved();
    redacted_url(url).starts_with(&format!("{scheme}://***"))
        && !matches!(server, Err(Error::UnknownScheme { .. }))
}

pub(crate) fn url(from_option: Option<&str>) -> Result<String, Failure> {
    if let Some(url) = from_option {
        return Ok(url.to_owned());
    }
    match env::var("LOCKKIT_URL") {
        Ok(url) if url.is_empty() => Err(Failure::new(
            FAILED,
            "LOCKKIT_URL is empty: it was withheld from this command, or never filled in; give --url, or unset it for your own directory",
        )),
        Ok(url) => Ok(url),
        Err(env::VarError::NotUnicode(_)) => Err(Failure::new(FAILED, "LOCKKIT_URL is not UTF-8")),
        _ => own_directory(),
    }
}

/// The runtime directory would be tidier, but a user's cron job has none, so it would not exclude the same user's
/// shell; and it is emptied at every boot, with the token counters in it.
fn own_directory() -> Result<String, Failure> {
    let absolute = |variable| {
        env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .ok_or_else(|| {
            Failure::new(
                FAILED,
                "which lock server? Give --url, or set LOCKKIT_URL or HOME in the environment",
            )
        })?;
    Ok(file_url(&state.join("lockkit")))
}

fn file_url(dir: &Path) -> String {
    format!("file://{}", percent_encode(dir.as_os_str().as_bytes(), IN_A_PATH))
}
