//! The part of Redis's protocol that an operator needs: one command, one reply.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// The time within which a server answers. A paused one never does.
const PATIENCE: Duration = Duration::from_secs(5);

/// The address of a server, and the credentials of its operator.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) addr: SocketAddr,
    pub(super) password: Option<String>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

pub(super) struct Connection {
    reader: BufReader<TcpStream>,
}

/// An answer. An error of the server's is an [`io::Error`] instead, except inside of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Nil,
    Text(String),
    List(Vec<Value>),
}

impl Access {
    pub(super) fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&self.addr, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut connection = Connection {
            reader: BufReader::new(stream),
        };
        if let Some(password) = &self.password {
            connection.command(&["AUTH", password])?;
        }
        Ok(connection)
    }

    /// One command on a connection of its own.
    pub(super) fn command(&self, command: &[&str]) -> io::Result<Value> {
        self.connect()?.command(command)
    }
}

impl Connection {
    pub(super) fn command(&mut self, command: &[&str]) -> io::Result<Value> {
        let mut request = Vec::new();
        write!(request, "*{}\r\n", command.len())?;
        for part in command {
            write!(request, "${}\r\n{part}\r\n", part.len())?;
        }
        self.reader.get_mut().write_all(&request)?;
        self.value()?.map_err(io::Error::other)
    }

    /// Reads the next value, or the server's error.
    pub(super) fn value(&mut self) -> io::Result<Result<Value, String>> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(|| strange(&line))?;
        let length = || rest.parse::<i64>().map_err(|_| strange(&line));
        let value = match kind {
            "+" | ":" => Value::Text(rest.to_owned()),
            "-" => return Ok(Err(rest.to_owned())),
            "$" => match usize::try_from(length()?) {
                Ok(length) => Value::Text(self.text(length)?),
                Err(_) => Value::Nil,
            },
            "*" => match usize::try_from(length()?) {
                Ok(length) => {
                    let item = |_| Ok(self.value()?.unwrap_or_else(Value::Text));
                    Value::List((0..length).map(item).collect::<io::Result<_>>()?)
                }
                Err(_) => Value::Nil,
            },
            _ => return Err(strange(&line)),
        };
        Ok(Ok(value))
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.reader.read_until(b'\n', &mut line)?;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        Ok(String::from_utf8_lossy(line).into_owned())
    }

    fn text(&mut self, length: usize) -> io::Result<String> {
        let mut bytes = vec![0; length + 2];
        self.reader.read_exact(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }
}

fn strange(line: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("not Redis's protocol: {line}"),
    )
}

/// Prints it as `redis-cli --raw` does, but nil is `(nil)`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("(nil)"),
            Self::Text(text) => f.write_str(text),
            Self::List(items) => {
                for (n, item) in items.iter().enumerate() {
                    if n > 0 {
                        f.write_str("\n")?;
                    }
                    item.fmt(f)?;
                }
                Ok(())
            }
        }
    }
}
