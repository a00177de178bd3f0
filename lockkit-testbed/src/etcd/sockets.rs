//! The connections on this machine, and the processes that have their ends.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
};

/// Returns whether `pid` has the socket of the connection from `from` to `to`, both on 127.0.0.1.
pub(super) fn is_from(pid: u32, from: SocketAddr, to: SocketAddr) -> bool {
    let Some(socket) = socket_of(from, to) else {
        return false;
    };
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    files
        .flatten()
        .any(|file| fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == socket.as_str()))
}

/// The system's name of the socket at the near end, `socket:[12345]`.
fn socket_of(from: SocketAddr, to: SocketAddr) -> Option<String> {
    let table = fs::read_to_string("/proc/self/net/tcp").ok()?;
    let (from, to) = (written(from)?, written(to)?);
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        if fields.next()? != from || fields.next()? != to {
            return None;
        }
        // The state, two lengths of queues, a timer, retransmissions, the user, a time-out.
        Some(format!("socket:[{}]", fields.nth(6)?))
    })
}

/// The other ends of all connections to `server`, which is on 127.0.0.1.
pub(super) fn clients_of(server: SocketAddr) -> io::Result<Vec<SocketAddr>> {
    const ESTABLISHED: &str = "01";

    let table = fs::read_to_string("/proc/self/net/tcp")?;
    let server = written(server);
    let clients = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let here = fields.next()? == server.as_deref()?;
        let (client, state) = (fields.next()?, fields.next()?);
        (here && state == ESTABLISHED).then(|| read(client)).flatten()
    });
    Ok(clients.collect())
}

fn read(written: &str) -> Option<SocketAddr> {
    let (ip, port) = written.split_once(':')?;
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    Some((ip, u16::from_str_radix(port, 16).ok()?).into())
}

/// An address as the system writes it there: the bytes of the IP address as a number of this machine.
fn written(addr: SocketAddr) -> Option<String> {
    match addr {
        SocketAddr::V4(addr) => Some(format!(
            "{:08X}:{:04X}",
            u32::from_ne_bytes(addr.ip().octets()),
            addr.port()
        )),
        SocketAddr::V6(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_from_the_process_that_has_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = TcpStream::connect(to).unwrap();
        let from = stream.local_addr().unwrap();
        assert_eq!(clients_of(to).unwrap(), [from]);
        assert!(is_from(std::process::id(), from, to));
        assert!(!is_from(1, from, to) || std::process::id() == 1);
        assert!(!is_from(std::process::id(), from, from));
        drop(stream);
        assert!(!is_from(std::process::id(), from, to), "it is closed");
    }
}
