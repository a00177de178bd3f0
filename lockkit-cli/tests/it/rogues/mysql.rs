//! MySQL: logins and replies that no server sends.

use std::io;

use lockkit_testbed::{Plays, Rogue, Wire};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{ENCODED, OUT_OF_TIME, PASSWORD, TIMEOUTS, Within, fault, judged, run};

use Instead::{Greeting, Login, Reply};
use Plays::{Endless, Last, Once};

/// The moment from which a rogue plays.
#[derive(Clone, Copy, Debug)]
enum Instead {
    Greeting,
    /// Of the reply to the login.
    Login,
    /// Of the reply to the first statement.
    Reply,
}

/// Its name, its moment, its conduct, and a part of what the command says.
type Case = (&'static str, Instead, Plays, &'static str);

const NONCE: &[u8] = b"abcdefghijklmnopqrst";

fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
    [&length[..3], &[sequence], payload].concat()
}

/// The greeting of a server that asks for the password by this plug-in.
fn greeting(plugin: &str) -> Vec<u8> {
    let parts: [&[u8]; 9] = [
        b"\x0a8.0.44\0",
        &[7, 0, 0, 0],
        &NONCE[..8],
        // All capabilities that a login needs, and not TLS.
        &[0, 0x09, 0xa2, 45, 2, 0, 0x08, 0x00, 21],
        &[0; 10],
        &NONCE[8..],
        &[0],
        plugin.as_bytes(),
        &[0],
    ];
    parts.concat()
}

fn switch(plugin: &str) -> Vec<u8> {
    packet(2, &[&[0xfe][..], plugin.as_bytes(), &[0], NONCE, &[0]].concat())
}

/// Refuses with the number for a denied access.
fn refusal(sequence: u8, words: &str) -> Vec<u8> {
    packet(
        sequence,
        &[&[0xff, 0x15, 0x04][..], b"#28000", words.as_bytes()].concat(),
    )
}

fn words() -> String {
    format!("no\n\x1b[31m{PASSWORD}\r\n{ENCODED}")
}

fn logins() -> Vec<Case> {
    let http = b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec();
    let long = "no ".repeat(20_000);
    let clear = packet(0, &greeting("mysql_clear_password"));
    vec![
        ("closes at once", Greeting, Last(vec![]), ""),
        ("is silent", Greeting, Once(vec![]), OUT_OF_TIME),
        ("speaks HTTP", Greeting, Last(http), ""),
        ("greets shortly", Greeting, Last(packet(0, &[10])), ""),
        ("an old version", Greeting, Last(packet(0, b"\x093\0")), ""),
        ("refuses without a text", Greeting, Last(packet(0, &[0xff])), ""),
        (
            "greets without end",
            Greeting,
            Endless(packet(0, &[10; 4_000]), vec![10; 4_000]),
            "",
        ),
        ("asks for it in the clear at once", Greeting, Once(clear), ""),
        ("closes instead of a login", Login, Last(vec![]), ""),
        ("is silent to a login", Login, Once(vec![]), OUT_OF_TIME),
        (
            "asks for it in the clear",
            Login,
            Once(switch("mysql_clear_password")),
            "",
        ),
        ("asks for it by a key", Login, Once(switch("sha256_password")), ""),
        (
            "asks for it by a digest",
            Login,
            Once(switch("caching_sha2_password")),
            "",
        ),
        (
            "a plug-in that nobody has",
            Login,
            Last(switch("no_such_plugin")),
            "",
        ),
        ("an empty switch", Login, Last(packet(2, &[0xfe])), ""),
        ("half an OK", Login, Last(packet(2, &[0])), ""),
        (
            "refuses in several lines, and repeats the password",
            Login,
            Last(refusal(2, &words())),
            "1045",
        ),
        (
            "refuses in very many words",
            Login,
            Last(refusal(2, &long)),
            "check user and password",
        ),
        (
            "OK after OK",
            Login,
            Endless(vec![], packet(2, &[0, 0, 0, 2, 0, 0, 0]).repeat(500)),
            "",
        ),
    ]
}

fn replies() -> Vec<Case> {
    let column = b"\x03def\0\0\0\x01a\0\x0c\x3f\0\x14\0\0\0\x08\0\0\0\0\0";
    let one_column = [packet(1, &[1]), packet(2, column), packet(3, &[0xfe, 0, 0, 2, 0])].concat();
    let many = packet(1, &[&[0xfe][..], &u64::MAX.to_le_bytes()].concat());
    vec![
        ("closes instead of a reply", Reply, Last(vec![]), ""),
        ("is silent to a statement", Reply, Once(vec![]), OUT_OF_TIME),
        ("half a header", Reply, Last(vec![7, 0]), ""),
        ("half a packet", Reply, Last(vec![7, 0, 0, 1, 0]), ""),
        ("an empty packet", Reply, Last(packet(1, &[])), ""),
        ("half an error", Reply, Last(packet(1, &[0xff])), ""),
        ("asks for a file", Reply, Last(packet(1, b"\xfb/etc/passwd")), ""),
        (
            "refuses a statement, and repeats the password",
            Reply,
            Last(refusal(1, &words())),
            "1045",
        ),
        (
            "more columns than there are numbers",
            Reply,
            Once(many),
            "columns without number",
        ),
        (
            "columns without end",
            Reply,
            Endless(packet(1, &[0xfc, 255, 255]), packet(2, column).repeat(500)),
            "8 MiB",
        ),
        (
            "rows without end",
            Reply,
            Endless(one_column.clone(), packet(3, b"\x011").repeat(500)),
            "8 MiB",
        ),
        (
            "results without end",
            Reply,
            Endless(vec![], packet(1, &[0, 0, 0, 8, 0, 0, 0]).repeat(500)),
            "8 MiB",
        ),
        (
            "a packet of 16 MiB",
            Reply,
            Endless(vec![255, 255, 255, 1], vec![b'a'; 64_000]),
            "1 MiB",
        ),
        (
            "a row that is longer than its packet",
            Reply,
            Last([one_column, packet(3, &[200, b'a'])].concat()),
            "",
        ),
    ]
}

/// Reads a packet. Returns the number of the one that answers it.
async fn receive(client: &mut TcpStream) -> io::Result<u8> {
    let mut header = [0; 4];
    client.read_exact(&mut header).await?;
    let length = u32::from_le_bytes([header[0], header[1], header[2], 0]);
    client.read_exact(&mut vec![0; length as usize]).await?;
    Ok(header[3].wrapping_add(1))
}

/// Behaves up to this moment.
async fn behave(mut client: TcpStream, instead: Instead) -> io::Result<Box<dyn Wire>> {
    if !matches!(instead, Greeting) {
        let greeting = packet(0, &greeting("mysql_native_password"));
        client.write_all(&greeting).await?;
        let sequence = receive(&mut client).await?;
        if matches!(instead, Reply) {
            let ok = packet(sequence, &[0, 0, 0, 2, 0, 0, 0]);
            client.write_all(&ok).await?;
            receive(&mut client).await?;
        }
    }
    Ok(Box::new(client))
}

#[test]
fn no_rogue_of_mysql_gets_more_than_an_error() {
    run(async {
        let mut faults = Vec::new();
        for (name, instead, plays, says) in logins().into_iter().chain(replies()) {
            let rogue = Rogue::start(plays, move |client| behave(client, instead));
            let rogue = rogue.await.unwrap();
            let url = format!("mysql://me:{ENCODED}@{}/app?{TIMEOUTS}", rogue.addr());
            faults.extend(fault(name, &rogue, &url, Within::Connecting, says).await);
        }
        judged(&faults);
    });
}
