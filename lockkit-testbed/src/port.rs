use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, UdpSocket},
    os::fd::OwnedFd,
    thread,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A free port of 127.0.0.1 that nobody else is given while this value lives, also while its server is down.
///
/// It is a socket that is bound and does not listen, with `SO_REUSEADDR`. Linux then lets a server with the same
/// option (Redis, `MariaDB` and the JVM set it) listen on that port, refuses connections while there is none, and hands
/// the port to nobody who asks for any free one.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reserved: OwnedFd,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Errors
    /// If the system has none left.
    pub fn reserve() -> io::Result<Self> {
        let any = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
        let reserved = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_reuseaddr(&reserved, true)?;
        bind(&reserved, &any)?;
        let bound = SocketAddr::try_from(getsockname(&reserved)?)?;
        Ok(Self {
            number: bound.port(),
            _reserved: reserved,
        })
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The address with this port, on 127.0.0.1.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }
}

/// An address of this machine that is no loopback address, if it has one. What is sent there stays on the machine.
pub fn own_address() -> Option<IpAddr> {
    // It sends nothing. The system chooses the address from which it would.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// Starts a server at this address of the machine that closes each connection at once. It ends with the process.
///
/// # Errors
/// If the system has no port left.
pub fn hangs_up(at: IpAddr) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((at, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new()
        .name("hangs-up".to_owned())
        .spawn(move || listener.incoming().for_each(drop))?;
    Ok(address)
}
