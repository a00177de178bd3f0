use std::{
    io::{self, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

/// A session at a server, as the superuser, on its Unix socket. It speaks the simple protocol, and blocks.
#[derive(Debug)]
pub struct PgSession {
    stream: BufReader<UnixStream>,
    pid: u32,
}

/// The version 3.0 of the protocol.
const PROTOCOL: i32 = 3 << 16;

impl PgSession {
    /// The longest time that an answer may take.
    const PATIENCE: Duration = Duration::from_secs(20);

    pub(super) fn open(socket: &Path, user: &str, database: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Self::PATIENCE))?;
        stream.set_write_timeout(Some(Self::PATIENCE))?;
        let mut session = Self {
            stream: BufReader::new(stream),
            pid: 0,
        };
        let mut startup = PROTOCOL.to_be_bytes().to_vec();
        for text in [
            "user",
            user,
            "database",
            database,
            "application_name",
            "testbed",
            "",
        ] {
            startup.extend_from_slice(text.as_bytes());
            startup.push(0);
        }
        session.send(None, &startup)?;
        session.answer()?;
        Ok(session)
    }

    /// The process id of its server process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Runs a statement, or several in one transaction, and renders the rows as `psql -At` does: a line for each, with `|`
    /// between the columns, and nothing for NULL.
    ///
    /// # Errors
    /// The server's own error, which begins with its SQLSTATE, or that it does not answer within 20 s.
    pub fn sql(&mut self, statement: &str) -> io::Result<String> {
        self.begin(statement)?;
        self.answer()
    }

    /// Sends a statement and does not wait for its answer.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn begin(&mut self, statement: &str) -> io::Result<()> {
        let mut text = statement.as_bytes().to_vec();
        text.push(0);
        self.send(Some(b'Q'), &text)
    }

    /// The answer to what was [begun](Self::begin) first; without anything begun, what the server says by itself when it ends
    /// the session.
    ///
    /// # Errors
    /// As [`sql`](Self::sql).
    pub fn answer(&mut self) -> io::Result<String> {
        let mut lines = Vec::new();
        let mut failure = None;
        loop {
            let (kind, message) = self.receive()?;
            match kind {
                b'Z' => break,
                b'D' => lines.push(row(&message).ok_or(io::ErrorKind::InvalidData)?),
                b'E' => {
                    let error = io::Error::other(error(&message));
                    // Nothing comes after that.
                    if severity(&message) != Some("ERROR") {
                        return Err(error);
                    }
                    failure = Some(error);
                }
                b'K' => {
                    let pid = message.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
                    self.pid = u32::from_be_bytes(*pid);
                }
                // It lets everybody in who is let in at this socket.
                b'R' if message != [0; 4] => {
                    return Err(io::Error::other("the server asks for a password"));
                }
                _ => {}
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(lines.join("\n")),
        }
    }

    fn send(&mut self, kind: Option<u8>, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(body.len() + 4).map_err(io::Error::other)?;
        let mut message: Vec<u8> = kind.into_iter().collect();
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(body);
        self.stream.get_mut().write_all(&message)
    }

    fn receive(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.stream.read_exact(&mut head)?;
        let [kind, length @ ..] = head;
        let length = u32::from_be_bytes(length)
            .checked_sub(4)
            .ok_or(io::ErrorKind::InvalidData)?;
        let mut body = vec![0; length as usize];
        self.stream.read_exact(&mut body)?;
        Ok((kind, body))
    }
}

fn row(message: &[u8]) -> Option<String> {
    let (count, mut rest) = message.split_first_chunk()?;
    let mut columns = Vec::new();
    for _ in 0..u16::from_be_bytes(*count) {
        let (length, after) = rest.split_first_chunk()?;
        // -1 is NULL.
        let length = usize::try_from(i32::from_be_bytes(*length)).unwrap_or(0);
        let (value, after) = after.split_at_checked(length)?;
        columns.push(String::from_utf8_lossy(value));
        rest = after;
    }
    Some(columns.join("|"))
}

/// The field `name` of an error: each is a letter and a text that ends with a zero.
fn field(message: &[u8], name: u8) -> Option<&str> {
    let mut fields = message.split(|byte| *byte == 0);
    fields.find_map(|field| match field {
        [first, text @ ..] if *first == name => str::from_utf8(text).ok(),
        _ => None,
    })
}

fn severity(message: &[u8]) -> Option<&str> {
    field(message, b'V').or_else(|| field(message, b'S'))
}

fn error(message: &[u8]) -> String {
    let code = field(message, b'C').unwrap_or("?");
    format!("{code}: {}", field(message, b'M').unwrap_or("?"))
}
