//! The bounds on what a server may send, and what is read of it on the way.
//!
//! The client library has none. It makes room for whatever length a message promises, keeps every row and notice that comes, gives the
//! password to any server that asks for it, and looks up each type that it does not know, and the types of that answer, one within the
//! other, until the stack is used up. So what it reads passes here, message by message, and ends with an error in the place of what no
//! honest server sends.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
};

use tokio_postgres::types::Type;

/// The longest message. Each row is one, and is some thousand bytes long at most.
const LONGEST: usize = 1024 * 1024;
/// The most bytes for one request. A page of a list is some ten thousand long.
const MOST: usize = 8 * 1024 * 1024;
/// The bytes for which a message counts beside its own, as it does in memory.
const PER_MESSAGE: usize = 128;
/// The most columns of a row. No statement asks for more than ten.
const MOST_COLUMNS: usize = 16;
/// The bytes of a message's head: its kind, and a length that counts itself.
const HEAD: usize = 5;

mod kind {
    pub(super) const AUTHENTICATION: u8 = b'R';
    pub(super) const KEY: u8 = b'K';
    pub(super) const READY: u8 = b'Z';
    pub(super) const COLUMNS: u8 = b'T';
    pub(super) const PARAMETERS: u8 = b't';
    pub(super) const ROW: u8 = b'D';
    /// A parameter of the session has this value now.
    pub(super) const STATUS: u8 = b'S';
}

/// The method by which a server asks for the password as it is.
const CLEAR_TEXT: u32 = 3;

/// The conduct of a server for which its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misconduct {
    LongMessage,
    NoEnd,
    ManyColumns,
    StrangeType,
    WantsPassword,
}

impl fmt::Display for Misconduct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LongMessage => "the server has sent a message of more than 1 MiB, which no request asks for",
            Self::NoEnd => "the server has sent more than 8 MiB for one request, or for none",
            Self::ManyColumns => "the server has sent columns without number",
            Self::StrangeType => "the server has named a type that no request asks for",
            Self::WantsPassword => {
                "the server asks for the password in clear text, and nothing proves which server it is; connect with \
                 sslmode=verify-full, or let pg_hba.conf ask for scram-sha-256"
            }
        })
    }
}

impl std::error::Error for Misconduct {}

impl Misconduct {
    /// Returns the misconduct that has ended a connection, if one has.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<Misconduct> for io::Error {
    fn from(misconduct: Misconduct) -> Self {
        Self::new(io::ErrorKind::InvalidData, misconduct)
    }
}

/// The messages of a server, on their way to the client library.
pub(crate) struct Replies {
    /// The id of the server's process, once it has said it: the client library keeps that to itself.
    process: Arc<AtomicI32>,
    /// True if the server may have the password itself: its certificate was verified, or its socket is in a directory of its own.
    is_trusted: bool,
    has_logged_in: bool,
    /// The message under way, as far as it is of interest.
    begun: Vec<u8>,
    /// The bytes of its body that are of interest, and those that come after these.
    wanted: usize,
    skipped: usize,
    /// The number of bytes since the last request.
    replied: usize,
    /// The number of bytes of the session's parameters since its beginning: the client library keeps one of each name.
    told: usize,
}

impl Replies {
    pub(crate) fn new(process: Arc<AtomicI32>, is_trusted: bool) -> Self {
        Self {
            process,
            is_trusted,
            has_logged_in: false,
            begun: Vec::new(),
            wanted: 0,
            skipped: 0,
            replied: 0,
            told: 0,
        }
    }

    /// Begins the count anew: a request was written.
    pub(crate) fn note_request(&mut self) {
        self.replied = 0;
    }

    /// Looks at these bytes.
    ///
    /// # Errors
    /// The server's misconduct. Nothing of these bytes is to be passed on.
    pub(crate) fn look_at(&mut self, mut bytes: &[u8]) -> Result<(), Misconduct> {
        while !bytes.is_empty() {
            let missing = match self.begun.len().checked_sub(HEAD) {
                None => HEAD - self.begun.len(),
                Some(body) if body < self.wanted => self.wanted - body,
                Some(_) => {
                    let (_, rest) = bytes.split_at(self.skipped.min(bytes.len()));
                    self.skipped -= bytes.len() - rest.len();
                    bytes = rest;
                    self.end_if_whole();
                    continue;
                }
            };
            let (part, rest) = bytes.split_at(missing.min(bytes.len()));
            self.begun.extend_from_slice(part);
            bytes = rest;
            if part.len() < missing {
                return Ok(());
            }
            if self.begun.len() == HEAD && self.wanted == 0 {
                self.begin()?;
            }
            if self.begun.len() == HEAD + self.wanted {
                self.check()?;
                self.end_if_whole();
            }
        }
        Ok(())
    }

    /// Notes the head of a message.
    fn begin(&mut self) -> Result<(), Misconduct> {
        let [kind, a, b, c, d] = self.begun[..] else {
            return Ok(());
        };
        // A length that does not even count itself is an error of the client library.
        let length = u32::from_be_bytes([a, b, c, d]).saturating_sub(4);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > LONGEST {
            return Err(Misconduct::LongMessage);
        }
        self.replied = self.replied.saturating_add(length + PER_MESSAGE);
        if kind == kind::STATUS {
            self.told = self.told.saturating_add(length + PER_MESSAGE);
        }
        if self.replied > MOST || self.told > MOST {
            return Err(Misconduct::NoEnd);
        }
        let wanted = match kind {
            kind::AUTHENTICATION => 4,
            kind::KEY if !self.has_logged_in => 4,
            kind::ROW => 2,
            kind::COLUMNS | kind::PARAMETERS => length,
            _ => 0,
        };
        self.wanted = wanted.min(length);
        self.skipped = length - self.wanted;
        Ok(())
    }

    /// Looks at the part of a message that is of interest.
    fn check(&mut self) -> Result<(), Misconduct> {
        let (Some(kind), Some(body)) = (self.begun.first(), self.begun.get(HEAD..)) else {
            return Ok(());
        };
        match (*kind, body) {
            (kind::AUTHENTICATION, [a, b, c, d])
                if u32::from_be_bytes([*a, *b, *c, *d]) == CLEAR_TEXT && !self.is_trusted =>
            {
                return Err(Misconduct::WantsPassword);
            }
            (kind::KEY, [a, b, c, d]) => {
                let process = i32::from_be_bytes([*a, *b, *c, *d]);
                self.process.store(process, Ordering::Release);
            }
            (kind::READY, _) => self.has_logged_in = true,
            (kind::ROW, [a, b]) if usize::from(u16::from_be_bytes([*a, *b])) > MOST_COLUMNS => {
                return Err(Misconduct::ManyColumns);
            }
            (kind::COLUMNS, columns) => check_columns(columns)?,
            (kind::PARAMETERS, [_, _, types @ ..]) => types
                .as_chunks()
                .0
                .iter()
                .try_for_each(|number| check_type(*number))?,
            _ => {}
        }
        Ok(())
    }

    fn end_if_whole(&mut self) {
        if self.skipped == 0 {
            self.begun.clear();
            // A long one may have been the only one.
            self.begun.shrink_to(64);
            self.wanted = 0;
        }
    }
}

/// Checks a description of columns: their number, and for each a name that ends with a zero, and 18 bytes, of which the 7th to the 10th are
/// the type. What is cut short is an error of the client library.
fn check_columns(description: &[u8]) -> Result<(), Misconduct> {
    let Some((count, mut rest)) = description.split_first_chunk() else {
        return Ok(());
    };
    if usize::from(u16::from_be_bytes(*count)) > MOST_COLUMNS {
        return Err(Misconduct::ManyColumns);
    }
    while let Some(end) = rest.iter().position(|byte| *byte == 0) {
        let Some((column, after)) = rest[end + 1..].split_first_chunk::<18>() else {
            return Ok(());
        };
        let [_, _, _, _, _, _, a, b, c, d, ..] = *column;
        check_type([a, b, c, d])?;
        rest = after;
    }
    Ok(())
}

fn check_type(number: [u8; 4]) -> Result<(), Misconduct> {
    match Type::from_oid(u32::from_be_bytes(number)) {
        Some(_) => Ok(()),
        None => Err(Misconduct::StrangeType),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        [&[kind][..], &length, body].concat()
    }

    fn columns(types: &[u32]) -> Vec<u8> {
        let mut body = u16::try_from(types.len()).unwrap().to_be_bytes().to_vec();
        for oid in types {
            body.extend(b"a\0\0\0\0\0\0\0");
            body.extend(oid.to_be_bytes());
            body.extend([0; 8]);
        }
        message(b'T', &body)
    }

    /// Returns the outcome however the bytes arrive.
    fn outcome(bytes: &[u8], is_trusted: bool) -> (Result<(), Misconduct>, i32) {
        let looked_at = |size| {
            let process = Arc::new(AtomicI32::new(0));
            let mut replies = Replies::new(process.clone(), is_trusted);
            let outcome = bytes.chunks(size).try_for_each(|chunk| replies.look_at(chunk));
            (outcome, process.load(Ordering::Acquire))
        };
        let whole = looked_at(bytes.len());
        for size in 1..bytes.len().min(64) {
            assert_eq!(looked_at(size), whole, "{size}");
        }
        whole
    }

    #[test]
    fn the_process_is_read_however_the_bytes_arrive() {
        let greeting = [
            message(b'R', &[0; 4]),
            message(b'S', b"K\0Z\0"),
            message(b'K', &[0, 0, 0x30, 0x39, 1, 2, 3, 4]),
            message(b'Z', b"I"),
            // Later it is no key any more.
            message(b'K', &[9; 8]),
        ];
        assert_eq!(outcome(&greeting.concat(), false), (Ok(()), 12_345));
        assert_eq!(
            outcome(&message(b'Z', b"I"), false),
            (Ok(()), 0),
            "it was not said"
        );
    }

    #[test]
    fn a_password_is_for_a_server_that_is_known() {
        let asks = message(b'R', &[0, 0, 0, 3]);
        assert_eq!(outcome(&asks, false).0, Err(Misconduct::WantsPassword));
        assert_eq!(outcome(&asks, true).0, Ok(()));
        for other in [5, 7, 10] {
            assert_eq!(outcome(&message(b'R', &[0, 0, 0, other, 1]), false).0, Ok(()));
        }
    }

    #[test]
    fn what_no_request_asks_for_is_told() {
        let long = [&[b'D'][..], &(1_048_577_u32 + 4).to_be_bytes()].concat();
        let negative = [b'D', 0xff, 0xff, 0xff, 0xff];
        for (bytes, misconduct) in [
            (long, Misconduct::LongMessage),
            (negative.to_vec(), Misconduct::LongMessage),
            (columns(&[20, 99_999]), Misconduct::StrangeType),
            (columns(&[20; 17]), Misconduct::ManyColumns),
            (message(b't', &[0, 1, 0, 1, 0, 0]), Misconduct::StrangeType),
            (message(b'D', &[0, 17, 0]), Misconduct::ManyColumns),
            (message(b'N', &[0; 1_000]).repeat(7_500), Misconduct::NoEnd),
            (message(b'Z', b"I").repeat(66_000), Misconduct::NoEnd),
        ] {
            let mut replies = Replies::new(Arc::default(), true);
            let outcome = bytes.chunks(8_192).try_for_each(|chunk| replies.look_at(chunk));
            assert_eq!(outcome, Err(misconduct));
        }
    }

    #[test]
    fn parameters_are_counted_over_all_requests() {
        let mut replies = Replies::new(Arc::default(), true);
        let outcome = (0..70_000).try_for_each(|number| {
            replies.note_request();
            replies.look_at(&message(b'S', format!("a{number}\0x\0").as_bytes()))
        });
        assert_eq!(outcome, Err(Misconduct::NoEnd));
    }

    #[test]
    fn what_is_honest_passes() {
        let row = message(b'D', &[&[0, 1, 0, 0, 3, 0xe8][..], &[b'a'; 1_000]].concat());
        let bytes = [
            message(b'1', &[]),
            message(b't', &[0, 1, 0, 0, 0, 20]),
            columns(&[16, 17, 20, 23, 25, 1184]),
            row.repeat(50),
            // Cut short, for the client library.
            message(b'T', &[0]),
            message(b'D', &[0]),
            vec![b'D', 0, 0, 0, 0],
            message(b'Z', b"I"),
        ];
        assert_eq!(outcome(&bytes.concat(), false).0, Ok(()));
        let mut replies = Replies::new(Arc::default(), false);
        for _ in 0..20_000 {
            replies.note_request();
            replies.look_at(&row).unwrap();
        }
    }
}
