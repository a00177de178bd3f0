//! Secrets, which must not be shown when a server repeats them.

use std::{borrow::Cow, error, fmt, sync::Arc};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::chain;
use crate::Error;

/// All that a URL may have to encode.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// What is in place of a secret.
const BLANK: &str = "***";
/// The end of a text that was cut.
const CUT: char = '…';
/// The most characters of a server's words that are told.
const MOST_WORDS: usize = 500;

/// Returns a server's words as far as somebody is to read them: 500 characters, and a `…` if there were more.
///
/// ```
/// use lockkit_core::spi::shortened;
///
/// assert_eq!(shortened("no such table"), "no such table");
/// assert_eq!(shortened(&"o".repeat(9_000)), "o".repeat(500) + "…");
/// ```
pub fn shortened(words: &str) -> Cow<'_, str> {
    match words.char_indices().nth(MOST_WORDS) {
        Some((end, _)) => format!("{}{CUT}", &words[..end]).into(),
        None => words.into(),
    }
}

/// A client's passwords, which are blanked in whatever its servers say.
///
/// A server may repeat what it was sent, such as the request that it refuses. The driver blanks the errors of a backend that has its
/// [`secrets`](super::BackendInfo::secrets). A backend blanks the error of connecting, and what it logs by itself.
///
/// ```
/// use lockkit_core::{Error, spi::{Secrets, chain}};
///
/// let secrets = Secrets::of_passwords(["open sesame"]);
/// assert_eq!(secrets.blank("unknown command `AUTH open sesame`"), "unknown command `AUTH ***`");
/// assert_eq!(secrets.blank("no such user: ali:open%20sesame"), "no such user: ali:***");
/// let error = Error::permanent("redis", "connect", "WRONGPASS for open sesame");
/// assert_eq!(chain(&secrets.blanked(error)), "redis: connect failed: WRONGPASS for ***");
/// ```
#[derive(Clone, Default)]
pub struct Secrets(Arc<[String]>);

impl Secrets {
    /// The shortest password that is looked for, in bytes. A shorter one is in most texts, which would tell it by what they lack.
    const SHORTEST: usize = 4;

    /// Makes the secrets of a client that logs in with these passwords. One below four bytes is not looked for: it is in most texts.
    pub fn of_passwords<T: AsRef<str>>(passwords: impl IntoIterator<Item = T>) -> Self {
        let mut forms = Vec::new();
        for password in passwords {
            let password = password.as_ref();
            if password.len() >= Self::SHORTEST {
                forms.extend(Self::forms_of(password));
            }
        }
        // One form may be part of another, which would then be left in part.
        forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
        forms.dedup();
        Self(forms.into())
    }

    fn forms_of(password: &str) -> [String; 8] {
        let encoded = utf8_percent_encode(password, RESERVED).to_string();
        let all_encoded = utf8_percent_encode(password, NON_ALPHANUMERIC).to_string();
        let in_lower_case = |encoded: &str| {
            let mut parts = encoded.split('%');
            let first = parts.next().unwrap_or_default().to_owned();
            parts.fold(first, |text, part| {
                let (digits, rest) = part.split_at(2.min(part.len()));
                text + "%" + &digits.to_ascii_lowercase() + rest
            })
        };
        [
            in_lower_case(&encoded),
            in_lower_case(&all_encoded),
            encoded,
            all_encoded,
            password.escape_debug().to_string(),
            password.escape_default().to_string(),
            base64(password.as_bytes()),
            password.to_owned(),
        ]
    }

    /// Returns the text with `***` in place of each secret: as it is, percent-encoded, escaped, or in Base64. So is the beginning of one, of
    /// four bytes or more, right before a `…`: the text was cut there.
    pub fn blank<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut blanked = Cow::Borrowed(text);
        for form in &*self.0 {
            if blanked.contains(form) {
                blanked = Cow::Owned(blanked.replace(form, BLANK));
            }
        }
        // A server may send as many cuts as it likes: each byte is copied once.
        let (mut done, mut from) = (String::new(), 0);
        for (cut, _) in blanked.match_indices(CUT) {
            let begun = self.begun_at_end(&blanked[from..cut]);
            if begun > 0 {
                done.push_str(&blanked[from..cut - begun]);
                done.push_str(BLANK);
                from = cut;
            }
        }
        if from == 0 {
            return blanked;
        }
        done.push_str(&blanked[from..]);
        Cow::Owned(done)
    }

    /// Returns the length of the longest beginning of a secret that the text ends with; 0 if there is none that is long enough.
    fn begun_at_end(&self, text: &str) -> usize {
        let begun = |form: &String| {
            let ends = form.char_indices().map(|(at, _)| at).rev();
            let mut long_enough = ends.take_while(|end| *end >= Self::SHORTEST);
            long_enough.find(|end| text.ends_with(&form[..*end]))
        };
        self.0.iter().filter_map(begun).max().unwrap_or(0)
    }

    /// Returns the error without secrets in its texts, those of its causes and its `Debug` form. One that has none stays as it is.
    #[must_use]
    pub fn blanked(&self, mut error: Error) -> Error {
        if self.0.is_empty() {
            return error;
        }
        match &mut error {
            Error::Backend { source, .. } if self.is_in(&**source) => {
                *source = Box::new(Blanked(self.chain(&**source)));
            }
            Error::InvalidUrl { url: text, .. }
            | Error::InvalidOptions { reason: text, .. }
            | Error::Unsupported { what: text, .. } => {
                if let Cow::Owned(blanked) = self.blank(text) {
                    *text = blanked;
                }
            }
            _ => {}
        }
        if let Error::InvalidUrl { reason, .. } = &mut error
            && let Cow::Owned(blanked) = self.blank(reason)
        {
            *reason = blanked;
        }
        error
    }

    /// Returns an error and its causes in one line, as [`chain`] does, without secrets.
    pub fn chain(&self, error: &dyn error::Error) -> String {
        if self.0.is_empty() || !self.is_in(error) {
            return chain(error);
        }
        let mut texts = Vec::new();
        let mut next = Some(error);
        while let Some(error) = next {
            texts.push(self.blank(&error.to_string()).into_owned());
            next = error.source();
        }
        let innermost = texts.pop().map(|text| Texts(text, None));
        let texts = texts
            .into_iter()
            .rev()
            .fold(innermost, |source, text| Some(Texts(text, source.map(Box::new))));
        texts.map_or_else(String::new, |texts| chain(&texts))
    }

    fn is_in(&self, error: &dyn error::Error) -> bool {
        let has = |text: &str| matches!(self.blank(text), Cow::Owned(_));
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        causes.any(|error| has(&error.to_string()) || has(&format!("{error:?}")))
    }
}

/// Shows nothing of them.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "None" } else { "***" })
    }
}

/// The text of an error that had a secret.
#[derive(Debug)]
struct Blanked(String);

impl fmt::Display for Blanked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for Blanked {}

/// A text, and that of its cause.
#[derive(Debug)]
struct Texts(String, Option<Box<Texts>>);

impl fmt::Display for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for Texts {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.1.as_deref().map(|cause| cause as _)
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let bits = part.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - part.len()));
        for place in 0..4 {
            let digit = DIGITS[bits >> (18 - 6 * place) & 63];
            text.push(if place > part.len() {
                '='
            } else {
                char::from(digit)
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    const PASSWORD: &str = "pä\"ss %w";

    #[test]
    fn each_way_to_write_a_password_is_blanked() {
        let secrets = Secrets::of_passwords([PASSWORD]);
        for form in [
            PASSWORD,
            "p%C3%A4%22ss%20%25w",
            "p%c3%a4%22ss%20%25w",
            "pä\\\"ss %w",
            "cMOkInNzICV3",
        ] {
            let text = format!("HELLO 3 AUTH app {form} SETNAME x");
            assert_eq!(secrets.blank(&text), "HELLO 3 AUTH app *** SETNAME x");
        }
        assert_eq!(secrets.blank("nothing of the kind"), "nothing of the kind");
        assert_eq!(Secrets::of_passwords([""]).blank("a b"), "a b");
        assert_eq!(
            Secrets::of_passwords(["1234", "12345"]).blank("123456 1234 123"),
            "***6 *** 123"
        );
        assert!(!format!("{secrets:?}").contains("ss"));
    }

    /// A backend cuts the words of its server before they come here.
    #[test]
    fn what_a_cut_leaves_of_a_secret_is_blanked() {
        let secrets = Secrets::of_passwords([PASSWORD, "open sesame"]);
        for (text, blanked) in [
            ("no open sesam… (check it)", "no ***… (check it)"),
            ("no open…", "no ***…"),
            ("no ope…", "no ope…"),
            (
                "open sesame, open s…, p%C3%A4%2… cMOkInN…",
                "***, ***…, ***… ***…",
            ),
            ("op…open …", "op…***…"),
            ("open sesam, or so…", "open sesam, or so…"),
            ("pä\"s…", "***…"),
        ] {
            assert_eq!(secrets.blank(text), blanked);
        }
        let cut = Error::permanent("mysql", "connect", "1045 no open sesam…");
        let error = secrets.blanked(cut);
        assert_eq!(chain(&error), "mysql: connect failed: 1045 no ***…");
        assert!(!format!("{error:?}").contains("sesa"), "{error:?}");
    }

    /// A server may send megabytes of them: if each moved the rest, that would take minutes.
    #[test]
    fn many_cuts_are_blanked_in_one_pass() {
        let secrets = Secrets::of_passwords(["sesame"]);
        let blanked = secrets.blank(&"sesa…".repeat(300_000)).into_owned();
        assert_eq!(blanked, "***…".repeat(300_000));
    }

    #[test]
    fn base64_is_as_others_write_it() {
        for (bytes, text) in [
            ("a", "YQ=="),
            ("ab", "YWI="),
            ("abc", "YWJj"),
            ("abcd", "YWJjZA=="),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn an_error_is_blanked_with_its_causes() {
        let secrets = Secrets::of_passwords(["sesame"]);
        let cause = io::Error::other(io::Error::other("it was open sesame"));
        let error = secrets.blanked(Error::transient("redis", "connect", cause));
        assert!(error.is_transient());
        assert_eq!(chain(&error), "redis: connect failed: it was open ***");
        assert!(!format!("{error:?} {error:#?}").contains("sesame"), "{error:?}");
        for error in [
            Error::unsupported("mysql", "sesame"),
            Error::invalid_option("ttl", "sesame"),
            Error::invalid_url("redis://sesame", "sesame"),
        ] {
            let error = secrets.blanked(error);
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains("sesame") && shown.contains("***"), "{shown}");
        }
        // What has no secret can still be told by its type.
        let other = secrets.blanked(Error::transient("redis", "connect", io::Error::other("no")));
        let source = error::Error::source(&other).and_then(|source| source.downcast_ref::<io::Error>());
        assert!(source.is_some());
    }
}
