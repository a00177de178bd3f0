//! The little of the protocol that an operator's hand needs.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

pub(super) const PATIENCE: Duration = Duration::from_secs(20);
const CLOSE_SESSION: i32 = -11;
const GET_CHILDREN: i32 = 8;
const NO_NODE: i32 = -101;

/// The answer to a four-letter word, if it comes within `limit`.
pub(super) fn word(addr: SocketAddr, word: &str, limit: Duration) -> io::Result<String> {
    let mut stream = connect(addr)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(word.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Joins the session of this id and closes it. `false` if there is no such session.
pub(super) fn end_session(addr: SocketAddr, id: i64) -> io::Result<bool> {
    let mut found = false;
    // Its client is thrown out by that and comes back at once, which may be before the session is closed.
    while close_session(addr, id)? {
        found = true;
    }
    Ok(found)
}

/// The paths of all nodes, but the root and the server's own.
pub(super) fn nodes(addr: SocketAddr) -> io::Result<Vec<String>> {
    let mut stream = connect(addr)?;
    stream.write_all(&packet(&hello(0))?)?;
    receive(&mut stream)?;
    let mut nodes = Vec::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        let path = if directory.is_empty() { "/" } else { &directory };
        let mut request = [1, GET_CHILDREN].map(i32::to_be_bytes).concat();
        request.extend(packet(path.as_bytes())?);
        request.push(0); // without a watch
        stream.write_all(&packet(&request)?)?;
        let answer = receive(&mut stream)?;
        for child in children(&answer).ok_or_else(|| io::Error::other(format!("an answer {answer:?}")))? {
            let path = format!("{directory}/{child}");
            if path != "/zookeeper" {
                directories.push(path.clone());
                nodes.push(path);
            }
        }
    }
    stream.write_all(&packet(&close())?)?;
    // Its answer, and the end of the connection.
    while receive(&mut stream).is_ok() {}
    nodes.sort();
    Ok(nodes)
}

/// The names in an answer; none if the node has gone.
fn children(answer: &[u8]) -> Option<Vec<String>> {
    let number = |at: usize| Some(i32::from_be_bytes(*answer.get(at..)?.first_chunk()?));
    // The number of the request and that of the transaction come first.
    match number(12)? {
        0 => {}
        NO_NODE => return Some(Vec::new()),
        _ => return None,
    }
    let mut at = 20;
    (0..number(16)?)
        .map(|_| {
            let from = at + 4;
            at = from + usize::try_from(number(at)?).ok()?;
            Some(String::from_utf8_lossy(answer.get(from..at)?).into_owned())
        })
        .collect()
}

fn hello(id: i64) -> Vec<u8> {
    let mut hello = Vec::new();
    hello.extend(0_i32.to_be_bytes()); // protocol version
    hello.extend(0_i64.to_be_bytes()); // last transaction seen
    hello.extend(10_000_i32.to_be_bytes()); // session timeout
    hello.extend(id.to_be_bytes());
    hello.extend(16_i32.to_be_bytes());
    hello.extend(password(id));
    hello.push(0); // not for reading alone
    hello
}

fn close() -> Vec<u8> {
    // After the number of the request.
    [1, CLOSE_SESSION].map(i32::to_be_bytes).concat()
}

fn close_session(addr: SocketAddr, id: i64) -> io::Result<bool> {
    let mut stream = connect(addr)?;
    stream.write_all(&[packet(&hello(id))?, packet(&close())?].concat())?;
    let joined = match receive(&mut stream) {
        Ok(answer) => answer
            .get(8..16)
            .and_then(|id| id.try_into().ok())
            .map(i64::from_be_bytes),
        // Thrown out in turn.
        Err(error) if is_end(&error) => return Ok(true),
        Err(error) => return Err(error),
    };
    if joined != Some(id) {
        return Ok(false);
    }
    match receive(&mut stream) {
        Err(error) if !is_end(&error) => Err(error),
        _ => Ok(true),
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// The password of a session, which every server makes from its id: the first two draws of `java.util.Random`, seeded
/// with it and a constant.
fn password(id: i64) -> [u8; 16] {
    const SECRET: u64 = 0xB341_5C00;
    const MULTIPLIER: u64 = 0x5_DEEC_E66D;
    const MASK: u64 = (1 << 48) - 1;

    let mut state = ((id.cast_unsigned() ^ SECRET) ^ MULTIPLIER) & MASK;
    let mut password = [0; 16];
    for four in password.chunks_mut(4) {
        state = (state.wrapping_mul(MULTIPLIER) + 0xB) & MASK;
        // The upper 32 of the 48 bits, the lowest byte first.
        four.copy_from_slice(&(state >> 16).to_le_bytes()[..4]);
    }
    password
}

fn connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn packet(body: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    Ok([&length.to_be_bytes()[..], body].concat())
}

fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > 1 << 20 {
        return Err(io::Error::other(format!("an answer of {length} bytes")));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body)?;
    Ok(body)
}
