use std::{
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    os::fd::OwnedFd,
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
