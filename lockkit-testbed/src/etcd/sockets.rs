//! The connections on this machine, and the processes that have their ends.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
    netlink::{self, SocketAddrNetlink},
    recv, sendto, socket_with,
};

/// Returns which of `pids` has the near end of the connection from `from` to `to`, both on 127.0.0.1.
pub(super) fn owner(pids: impl IntoIterator<Item = u32>, from: SocketAddr, to: SocketAddr) -> Option<u32> {
    // The table has thousands of lines on a busy machine, and members that find no other connect many times a second.
    let inode = asked(from, to).unwrap_or_else(|_| listed(from, to))?;
    let socket = format!("socket:[{inode}]");
    pids.into_iter().find(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"));
        files.is_ok_and(|files| {
            let mut files = files.flatten();
            files.any(|file| fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == socket.as_str()))
        })
    })
}

/// The system's number of the socket at the near end, as it answers for that one alone. `None` if there is none.
///
/// # Errors
/// If this system does not answer such questions.
fn asked(from: SocketAddr, to: SocketAddr) -> io::Result<Option<u32>> {
    // As <linux/netlink.h> and <linux/inet_diag.h> have them.
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const NLMSG_ERROR: u16 = 2;
    const NLM_F_REQUEST: u16 = 1;
    /// Where an answer has the number.
    const INODE: usize = 84;

    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let mut request = Vec::with_capacity(72);
    request.extend(72_u32.to_ne_bytes());
    request.extend(
        [SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST]
            .map(u16::to_ne_bytes)
            .concat(),
    );
    // A sequence number, and who asks. Then IPv4, TCP, no extensions, and all states.
    request.extend([0; 8]);
    request.extend([2, 6, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    request.extend([from.port(), to.port()].map(u16::to_be_bytes).concat());
    for address in [from, to] {
        request.extend(address.ip().octets());
        request.extend([0; 12]);
    }
    // Any interface, and no cookie.
    request.extend([0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);

    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    sendto(
        &socket,
        &request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut answer = [0; 512];
    let (_, length) = recv(&socket, &mut answer, RecvFlags::empty())?;
    let answer = &answer[..length.min(512)];
    let word = |at: usize| {
        let word = answer.get(at..at + 4).and_then(|word| word.try_into().ok());
        word.ok_or(io::ErrorKind::InvalidData)
    };
    let kind = answer.get(4..6).and_then(|kind| kind.try_into().ok());
    match kind.map(u16::from_ne_bytes) {
        Some(SOCK_DIAG_BY_FAMILY) => Ok(Some(u32::from_ne_bytes(word(INODE)?))),
        Some(NLMSG_ERROR) => match io::Error::from_raw_os_error(-i32::from_ne_bytes(word(16)?)) {
            gone if gone.kind() == io::ErrorKind::NotFound => Ok(None),
            error => Err(error),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The same from the table of all connections.
fn listed(from: SocketAddr, to: SocketAddr) -> Option<u32> {
    let table = fs::read_to_string("/proc/self/net/tcp").ok()?;
    let (from, to) = (written(from)?, written(to)?);
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        if fields.next()? != from || fields.next()? != to {
            return None;
        }
        // The state, two lengths of queues, a timer, retransmissions, the user, a time-out.
        fields.nth(6)?.parse().ok()
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
        let own = std::process::id();
        assert_eq!(owner([0, own], from, to), Some(own));
        assert_eq!(owner([0], from, to), None);
        assert_eq!(owner([own], from, from), None);
        let inode = listed(from, to);
        assert!(inode.is_some_and(|inode| inode > 0), "{inode:?}");
        // Where the system does not tell of one socket, there is the table.
        assert!(asked(from, to).is_err() || asked(from, to).unwrap() == inode);
        assert!(asked(from, from).is_err() || asked(from, from).unwrap().is_none());
        drop(stream);
        assert_eq!(owner([own], from, to), None, "it is closed");
    }
}
