use std::{
    collections::HashSet,
    io::{self, Read as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
};

use lockkit_testbed::{Port, hangs_up, own_address};

#[test]
fn a_reserved_port_refuses_until_its_server_listens() {
    let port = Port::reserve().unwrap();
    let refused = TcpStream::connect(port.addr()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);

    // The standard library sets SO_REUSEADDR, as servers do.
    for _ in 0..3 {
        let server = TcpListener::bind(port.addr()).unwrap();
        let _client = TcpStream::connect(port.addr()).unwrap();
        server.accept().unwrap();
    }
}

#[test]
fn a_reserved_port_is_given_to_nobody_else() {
    let reserved: Vec<_> = (0..500).map(|_| Port::reserve().unwrap()).collect();
    let mut numbers: HashSet<_> = reserved.iter().map(Port::number).collect();
    assert_eq!(numbers.len(), reserved.len());

    let others: Vec<_> = (0..2000)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    for other in &others {
        assert!(numbers.insert(other.local_addr().unwrap().port()));
    }
}

#[test]
fn a_server_that_hangs_up_is_at_each_address_of_the_machine() {
    for at in own_address().into_iter().chain([Ipv4Addr::LOCALHOST.into()]) {
        let addr = hangs_up(at).unwrap();
        for _ in 0..3 {
            let mut client = TcpStream::connect(addr).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap_or_default(), 0, "{addr}");
        }
    }
}
