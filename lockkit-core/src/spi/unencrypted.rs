//! The warning of a connection that others can read.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Warns the owner of a client, once, that a password is used over a connection that is not encrypted, and that leads beyond this host.
///
/// Its clones are the same client's.
#[derive(Clone, Debug, Default)]
pub struct Unencrypted {
    has_warned: Arc<AtomicBool>,
}

impl Unencrypted {
    /// Notes such a connection to `host`, of this name or `name:port`. It is on this host if `peer` is, which is the address that it leads
    /// to, or by its name if that is not known. `instead` says how to connect, as in `tls=verify`.
    ///
    /// ```
    /// use lockkit_core::spi::Unencrypted;
    ///
    /// let unencrypted = Unencrypted::default();
    /// unencrypted.note("redis", "localhost:6379", None, "rediss://"); // says nothing
    /// unencrypted.note("redis", "cache:6379", None, "rediss://"); // warns
    /// unencrypted.note("redis", "cache:6379", None, "rediss://"); // has warned
    /// ```
    pub fn note(&self, backend: &'static str, host: &str, peer: Option<SocketAddr>, instead: &'static str) {
        let is_local = peer.map_or_else(|| is_local(host), |peer| is_loopback(peer.ip()));
        if is_local || self.has_warned.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::warn!(
            backend,
            host,
            "a password is used and the connection is not encrypted: anyone on its way can read along, and take it over after the \
             login; connect with {instead}"
        );
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Returns whether a host is this one, by its name or address, with a port or without.
fn is_local(host: &str) -> bool {
    if let Ok(address) = host.parse::<SocketAddr>() {
        return is_loopback(address.ip());
    }
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    if let Ok(address) = bare.unwrap_or(host).parse::<Ipv6Addr>() {
        return is_loopback(address.into());
    }
    let name = host.split(':').next().unwrap_or_default();
    if let Ok(address) = name.parse::<Ipv4Addr>() {
        return address.is_loopback();
    }
    // RFC 6761 keeps these names for loopback.
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_this_host_is_known_by_address_or_name() {
        for local in [
            "localhost",
            "LocalHost.:2181",
            "db.localhost:1",
            "127.0.0.1",
            "127.8.0.1:6379",
            "[::1]:6379",
            "[::1]",
            "::1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(is_local(local), "{local}");
        }
        for other in [
            "",
            "cache",
            "localhost.example:6379",
            "notlocalhost",
            "10.0.0.1:6379",
            "0.0.0.0",
            "[::2]:6379",
            "[fe80::1]",
            "127.0.0.1.example",
        ] {
            assert!(!is_local(other), "{other}");
        }
    }

    #[test]
    fn the_address_counts_before_the_name_and_once() {
        let unencrypted = Unencrypted::default();
        let warned = |host, peer: Option<&str>| {
            unencrypted.note("redis", host, peer.map(|peer| peer.parse().unwrap()), "rediss://");
            unencrypted.has_warned.load(Ordering::Relaxed)
        };
        assert!(!warned("cache", Some("127.0.0.1:6379")));
        assert!(!warned("localhost", None));
        assert!(warned("localhost", Some("10.0.0.1:6379")));
    }
}
