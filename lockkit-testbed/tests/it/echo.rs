//! A server that answers each byte with the same byte, and says what reached it.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

pub(crate) struct Echo {
    addr: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) bytes: Vec<u8>,
    pub(crate) connections: usize,
    /// Connections that came to their end in order.
    pub(crate) ended: usize,
    /// Connections that were reset.
    pub(crate) reset: usize,
}

impl Echo {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let told = seen.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let told = told.clone();
                thread::spawn(move || answer(stream.unwrap(), &told));
            }
        });
        Self { addr, seen }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().unwrap().clone()
    }
}

fn answer(mut stream: TcpStream, seen: &Mutex<Seen>) {
    stream.set_nodelay(true).unwrap();
    seen.lock().unwrap().connections += 1;
    let mut buffer = [0; 4096];
    let mut answers = true;
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => {
                seen.lock().unwrap().ended += 1;
                let _ = stream.shutdown(Shutdown::Write);
                return;
            }
            Ok(length) => {
                let bytes = &buffer[..length];
                seen.lock().unwrap().bytes.extend(bytes);
                // 'W' waits for an answer, which never comes.
                if bytes == b"W" {
                    continue;
                }
                // 'Q' ends the connection from here, 'H' this direction alone.
                if bytes.contains(&b'Q') {
                    return;
                }
                if bytes.contains(&b'H') {
                    answers = false;
                    stream.shutdown(Shutdown::Write).unwrap();
                }
                if answers && stream.write_all(bytes).is_err() {
                    return;
                }
            }
            Err(_) => {
                seen.lock().unwrap().reset += 1;
                return;
            }
        }
    }
}
