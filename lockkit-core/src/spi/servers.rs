//! Lists of servers, as URLs and options have them.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

/// One server of a [list](servers).
///
/// Its text is `host:port`, in one spelling, by which servers can be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct ServerAddress {
    /// A name, in lower case, or an address, an IPv6 one without brackets.
    pub host: String,
    /// The port. Never 0.
    pub port: u16,
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// Reads a list of servers: `host[:port]`, separated by commas, an IPv6 address in brackets. Blanks around a server mean nothing.
/// The order is kept.
///
/// ```
/// use lockkit_core::spi::servers;
///
/// let known = servers("Cache-1, [::1]:7000", 6379).unwrap();
/// assert_eq!(known[0].to_string(), "cache-1:6379");
/// assert_eq!(known[1].to_string(), "[::1]:7000");
/// assert_eq!(servers("a,", 6379).unwrap_err(), "server 2 of its list is missing");
/// ```
///
/// # Errors
/// With the reason, for a server that is missing, as behind a comma at the end, that is not of that form, or that is there twice. It
/// quotes nothing: what was meant as a password may stand in the place of a server.
pub fn servers(list: &str, default_port: u16) -> Result<Vec<ServerAddress>, String> {
    let mut known: Vec<ServerAddress> = Vec::new();
    for (n, text) in list.split(',').enumerate() {
        let text = text.trim();
        let n = n + 1;
        if text.is_empty() {
            return Err(format!("server {n} of its list is missing"));
        }
        let server = parse(text, default_port)
            .ok_or_else(|| format!("server {n} of its list is not of the form `host` or `host:port`"))?;
        if let Some(first) = known.iter().position(|it| *it == server) {
            return Err(format!("servers {} and {n} of its list are the same", first + 1));
        }
        known.push(server);
    }
    Ok(known)
}

/// Reads the one server that a backend needs, in the grammar of [lists](servers).
///
/// ```
/// use lockkit_core::spi::server;
///
/// assert_eq!(server("db", 3306).unwrap().to_string(), "db:3306");
/// assert!(server("db-1,db-2", 3306).unwrap_err().contains("several"));
/// ```
///
/// # Errors
/// Those of a list, and one if there are several servers.
pub fn server(text: &str, default_port: u16) -> Result<ServerAddress, String> {
    let mut known = servers(text, default_port)?.into_iter();
    match (known.next(), known.next()) {
        (Some(server), None) => Ok(server),
        _ => Err("it names several servers; name the one that has the locks".to_owned()),
    }
}

fn parse(text: &str, default_port: u16) -> Option<ServerAddress> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']')?;
            let (plain, zone) = address.split_once('%').unwrap_or((address, ""));
            let plain: Ipv6Addr = plain.parse().ok()?;
            let is_zone = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
            let host = match zone {
                "" if address.contains('%') => return None,
                "" => plain.to_string(),
                zone if zone.chars().all(is_zone) => format!("{plain}%{zone}"),
                _ => return None,
            };
            match after {
                "" => (host, None),
                after => (host, Some(after.strip_prefix(':')?)),
            }
        }
        None => {
            let (host, port) = match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            };
            let is_odd = |c: char| c.is_whitespace() || c.is_control() || "[]@/?#%\\".contains(c);
            if host.is_empty() || host.contains(is_odd) {
                return None;
            }
            let address: Option<Ipv4Addr> = host.parse().ok();
            let host = address.map_or_else(|| host.to_lowercase(), |address| address.to_string());
            (host, port)
        }
    };
    let port = match port {
        None => default_port,
        // `parse` takes a sign.
        Some(port) if port.starts_with('+') => return None,
        Some(port) => port.parse().ok().filter(|port| *port != 0)?,
    };
    Some(ServerAddress { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_one_grammar() {
        let table: [(&str, Result<&[&str], &str>); 27] = [
            ("a", Ok(&["a:99"])),
            ("a:1", Ok(&["a:1"])),
            ("A.Example:65535", Ok(&["a.example:65535"])),
            ("b:2,a:1", Ok(&["b:2", "a:1"])),
            ("a:1, b:2", Ok(&["a:1", "b:2"])),
            ("  a:1\t,\u{a0}b:2 \n", Ok(&["a:1", "b:2"])),
            ("a:1,a:2", Ok(&["a:1", "a:2"])),
            ("127.0.0.1,[::1]", Ok(&["127.0.0.1:99", "[::1]:99"])),
            ("[0:0::1]:7", Ok(&["[::1]:7"])),
            ("[fe80::1%eth0]:7", Ok(&["[fe80::1%eth0]:7"])),
            ("bücher.example", Ok(&["bücher.example:99"])),
            ("", Err("server 1 of its list is missing")),
            (" ", Err("server 1 of its list is missing")),
            (",a", Err("server 1 of its list is missing")),
            ("a,", Err("server 2 of its list is missing")),
            ("a,,b", Err("server 2 of its list is missing")),
            ("a, ,b", Err("server 2 of its list is missing")),
            ("a:1,b,a:1", Err("servers 1 and 3 of its list are the same")),
            ("a,A:99", Err("servers 1 and 2 of its list are the same")),
            ("[::1],[0::1]:99", Err("servers 1 and 2 of its list are the same")),
            ("a:", Err("server 1 of its list is not of the form")),
            ("a:0", Err("server 1 of its list is not of the form")),
            ("a,b:x", Err("server 2 of its list is not of the form")),
            ("a:+1", Err("server 1 of its list is not of the form")),
            ("a b", Err("server 1 of its list is not of the form")),
            ("::1", Err("server 1 of its list is not of the form")),
            ("user@a", Err("server 1 of its list is not of the form")),
        ];
        for (list, expected) in table {
            let read = servers(list, 99);
            let shown: Result<Vec<_>, _> = read
                .as_ref()
                .map(|servers| servers.iter().map(ToString::to_string).collect());
            match (shown, expected) {
                (Ok(shown), Ok(expected)) => assert_eq!(shown, expected, "{list:?}"),
                (Err(reason), Err(expected)) => assert!(reason.starts_with(expected), "{list:?}: {reason}"),
                (shown, _) => panic!("{list:?}: {shown:?}"),
            }
        }
        for odd in [
            "a:65536", "[a]", "[::1", "[::1]1", "[::1]:", "[::1%]", "a:1:2", ":1", "a/b", "a\0",
        ] {
            assert!(servers(odd, 99).is_err(), "{odd:?}");
        }
    }
}
