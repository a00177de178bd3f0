//! Lock URLs: taking one apart.

use lockkit_core::{Error, Result, spi::redacted_url};
use percent_encoding::percent_decode_str;

/// A lock URL in its parts: `scheme://authority/path?key=value&…`, or `scheme:path?…` without an authority.
pub(crate) struct Url<'a> {
    /// In lower case.
    pub(crate) scheme: String,
    /// The text between `//` and the path, still encoded. Empty if there is nothing.
    pub(crate) authority: &'a str,
    /// Still encoded.
    pub(crate) path: &'a str,
    query: &'a str,
    whole: &'a str,
}

impl<'a> Url<'a> {
    pub(crate) fn parse(whole: &'a str) -> Result<Self> {
        let invalid = |reason: &str| Err(Error::invalid_url(redacted_url(whole), reason));
        let Some((scheme, rest)) = split_scheme(whole) else {
            return invalid("it does not begin with a scheme, such as `file:` in file:///var/lib/app/locks");
        };
        if rest.contains('#') {
            return invalid("a lock URL has no fragment; write a `#` in it as %23");
        }
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match before.strip_prefix("//") {
            Some(after) => after.split_at(after.find('/').unwrap_or(after.len())),
            None => ("", before),
        };
        // With one slash, the host that is meant is no authority. A path alone has none in front of it.
        let has_one_slash = before.starts_with('/') && !before.starts_with("//");
        let names_a_host = !authority.is_empty() || has_one_slash && !scheme.eq_ignore_ascii_case("file");
        if names_a_host && query.contains('@') {
            // Most likely a password with a `?` in it. Reading on would quote parts of it as parameters.
            return invalid(
                "there is an `@` after the `?`; write a `?` in a password as %3F, an `@` in a parameter as %40",
            );
        }
        Ok(Self {
            scheme: scheme.to_ascii_lowercase(),
            authority,
            path,
            query,
            whole,
        })
    }

    /// The parameters after the `?`, decoded, each key once.
    pub(crate) fn parameters(&self) -> Result<Vec<(&'a str, String)>> {
        let mut parameters: Vec<(&str, String)> = Vec::new();
        for parameter in self.query.split('&').filter(|parameter| !parameter.is_empty()) {
            let Some((key, value)) = parameter.split_once('=') else {
                let key = parameter.escape_debug();
                return Err(self.invalid(format!("parameter `{key}` has no value; write `{key}=…`")));
            };
            if parameters.iter().any(|(known, _)| *known == key) {
                return Err(self.invalid(format!("parameter `{}` is there twice", key.escape_debug())));
            }
            let value = percent_decode_str(value).decode_utf8().map_err(|_| {
                self.invalid(format!(
                    "the value of parameter `{}` is not UTF-8",
                    key.escape_debug()
                ))
            })?;
            parameters.push((key, value.into_owned()));
        }
        Ok(parameters)
    }

    pub(crate) fn without_parameters(&self) -> &'a str {
        self.whole.split('?').next().unwrap_or_default()
    }

    /// This URL is wrong, for this reason.
    pub(crate) fn invalid(&self, reason: impl Into<String>) -> Error {
        Error::invalid_url(redacted_url(self.whole), reason)
    }
}

/// The scheme, as RFC 3986 spells schemes, and what comes after its colon.
fn split_scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let spelled_well = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    // `user:password@host` without a scheme in front is not to be taken for one.
    let is_userinfo = rest.contains('@') && !rest.starts_with('/');
    (spelled_well && !is_userinfo).then_some((scheme, rest))
}
