//! Servers that answer what no server answers, or without end. Each case of a table is played to a client that has logged in.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{Error, spi::chain};
use lockkit_mysql::MySqlConfig;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::{
    rogue::{ENCODED, greeting, leaks},
    servers::connect,
};

/// The most bytes that a client takes from a rogue, with all that the system keeps in between.
const MOST_TAKEN: usize = 32 * 1024 * 1024;
/// The longest time that a case may take on a busy machine.
const LONGEST: Duration = Duration::from_secs(15);

/// The moment at which a rogue stops behaving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Instead {
    Greeting,
    Login,
    Reply,
}

/// What it does from then on.
enum Plays {
    /// Sends this, and is silent.
    Once(Vec<u8>),
    /// Sends this, and closes the connection.
    Last(Vec<u8>),
    /// Sends the first, and then the second without end.
    Endless(Vec<u8>, Vec<u8>),
}

struct Case {
    name: &'static str,
    instead: Instead,
    plays: Plays,
    /// A part of the error's text, where it matters which one it is.
    says: &'static str,
}

use Instead::{Greeting, Login, Reply};
use Plays::{Endless, Last, Once};

fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
    [&length[..3], &[sequence], payload].concat()
}

/// Describes a column, as a server does it.
fn column() -> Vec<u8> {
    let mut payload = Vec::new();
    for text in ["def", "", "", "", "a", ""] {
        payload.push(u8::try_from(text.len()).unwrap());
        payload.extend(text.bytes());
    }
    // Charset, length, type BIGINT, flags, decimals.
    payload.extend([12, 63, 0, 20, 0, 0, 0, 8, 0, 0, 0, 0, 0]);
    packet(2, &payload)
}

fn number_of_8(count: u64) -> Vec<u8> {
    [&[0xfe][..], &count.to_le_bytes()].concat()
}

fn case(name: &'static str, instead: Instead, plays: Plays, says: &'static str) -> Case {
    Case {
        name,
        instead,
        plays,
        says,
    }
}

fn logins() -> Vec<Case> {
    vec![
        case("closes at once", Greeting, Last(vec![]), ""),
        case(
            "speaks HTTP",
            Greeting,
            Last(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
            "",
        ),
        case("speaks TLS", Greeting, Last(vec![0x15, 3, 1, 0, 2, 2, 70]), ""),
        case(
            "greets without end",
            Greeting,
            Endless(packet(0, &[10; 4_000]), vec![10; 4_000]),
            "",
        ),
        case("greets shortly", Greeting, Last(packet(0, &[10])), ""),
        case("an old version", Greeting, Last(packet(0, &[9, b'3', 0])), ""),
        case("refuses without a text", Greeting, Last(packet(0, &[0xff])), ""),
        case(
            "refuses in bytes that are no text",
            Greeting,
            Last(packet(0, &[0xff, 0x10, 4, 0xff, 0xfe, 0xff])),
            "",
        ),
        case("closes instead of a login", Login, Last(vec![]), ""),
        case("an empty switch of plug-ins", Login, Last(packet(2, &[0xfe])), ""),
        case(
            "a plug-in that nobody has",
            Login,
            Last(packet(2, b"\xfeno_such_plugin\0abc\0")),
            "",
        ),
        case("half an OK", Login, Last(packet(2, &[0])), ""),
        case(
            "OK after OK",
            Login,
            Endless(vec![], packet(2, &[0, 0, 0, 2, 0, 0, 0])),
            "",
        ),
    ]
}

fn replies() -> Vec<Case> {
    let one_column = [packet(1, &[1]), column(), packet(3, &[0xfe, 0, 0, 2, 0])].concat();
    let columns = "columns without number";
    vec![
        case("closes instead of a reply", Reply, Last(vec![]), ""),
        case("half a header", Reply, Last(vec![7, 0]), ""),
        case("half a packet", Reply, Last(vec![7, 0, 0, 1, 0]), ""),
        case("an empty packet", Reply, Last(packet(1, &[])), ""),
        case("half an OK as a reply", Reply, Last(packet(1, &[0])), ""),
        case("half an error", Reply, Last(packet(1, &[0xff])), ""),
        case("asks for a file", Reply, Last(packet(1, b"\xfb/etc/passwd")), ""),
        case(
            "promises 200 million columns",
            Reply,
            Once(packet(1, &number_of_8(200_000_000))),
            columns,
        ),
        case(
            "promises more than there are numbers",
            Reply,
            Once(packet(1, &number_of_8(u64::MAX))),
            columns,
        ),
        case(
            "hides them before other bytes",
            Reply,
            Once(packet(1, &[number_of_8(1 << 40), vec![0; 9]].concat())),
            columns,
        ),
        case(
            "promises 16 million columns",
            Reply,
            Once(packet(1, &[0xfd, 255, 255, 255])),
            columns,
        ),
        case(
            "columns without end",
            Reply,
            Endless(packet(1, &[0xfc, 255, 255]), column()),
            "8 MiB",
        ),
        case(
            "rows without end",
            Reply,
            Endless(one_column.clone(), packet(3, b"\x011")),
            "8 MiB",
        ),
        case(
            "long rows without end",
            Reply,
            Endless(
                one_column.clone(),
                packet(3, &[&[0xfc, 0, 250][..], &vec![b'a'; 64_000]].concat()),
            ),
            "8 MiB",
        ),
        case(
            "results without end",
            Reply,
            Endless(vec![], packet(1, &[0, 0, 0, 8, 0, 0, 0])),
            "8 MiB",
        ),
        case(
            "a packet of 16 MiB",
            Reply,
            Endless(vec![255, 255, 255, 1], vec![b'a'; 64_000]),
            "1 MiB",
        ),
        case(
            "a row that is longer than its packet",
            Reply,
            Last([one_column, packet(3, &[200, b'a'])].concat()),
            "",
        ),
    ]
}

#[derive(Default)]
struct Seen {
    packets: Mutex<Vec<Vec<u8>>>,
    sent: AtomicUsize,
    connections: AtomicUsize,
}

async fn receive(client: &mut TcpStream, seen: &Seen) -> io::Result<u8> {
    let mut header = [0; 4];
    client.read_exact(&mut header).await?;
    let length = u32::from_le_bytes([header[0], header[1], header[2], 0]);
    let mut payload = vec![0; length as usize];
    client.read_exact(&mut payload).await?;
    seen.packets.lock().unwrap().push(payload);
    Ok(header[3].wrapping_add(1))
}

async fn play(mut client: TcpStream, case: &Case, seen: &Seen) -> io::Result<()> {
    seen.connections.fetch_add(1, Ordering::Relaxed);
    if case.instead != Greeting {
        client
            .write_all(&packet(0, &greeting("mysql_native_password")))
            .await?;
        let sequence = receive(&mut client, seen).await?;
        if case.instead == Reply {
            client
                .write_all(&packet(sequence, &[0, 0, 0, 2, 0, 0, 0]))
                .await?;
            receive(&mut client, seen).await?;
        }
    }
    match &case.plays {
        Once(bytes) => {
            client.write_all(bytes).await?;
            while receive(&mut client, seen).await.is_ok() {}
        }
        Last(bytes) => client.write_all(bytes).await?,
        Endless(first, again) => {
            client.write_all(first).await?;
            loop {
                client.write_all(again).await?;
                seen.sent.fetch_add(again.len(), Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

/// Returns what is wrong with the end of this case.
async fn fault(case: Case) -> Option<String> {
    let (name, says) = (case.name, case.says);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (seen, case) = (Arc::new(Seen::default()), Arc::new(case));
    let (record, script) = (seen.clone(), case.clone());
    let rogue = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (record, script) = (record.clone(), script.clone());
            tokio::spawn(async move { play(client, &script, &record).await });
        }
    });
    let began = Stopwatch::start();
    let config = MySqlConfig::new(format!("mysql://me:{ENCODED}@{addr}/app"));
    let connecting = tokio::spawn(timeout(LONGEST, connect(config)));
    let outcome = connecting.await;
    rogue.abort();
    let text = match outcome {
        Err(panic) => return Some(format!("{name}: {panic}")),
        Ok(Err(_)) => return Some(format!("{name}: no end within {LONGEST:?}")),
        Ok(Ok(Ok(_))) => return Some(format!("{name}: connected")),
        Ok(Ok(Err(error))) => shown(&error),
    };
    println!("{name}: {:?}: {text}", began.elapsed());
    let (sent, leaked) = (
        seen.sent.load(Ordering::Relaxed),
        leaks(&seen.packets.lock().unwrap()),
    );
    let faults = [
        (!text.contains(says), format!("it says {text}")),
        (text.contains("canary"), format!("it shows the password: {text}")),
        (sent > MOST_TAKEN, format!("it took {sent} bytes")),
        (!leaked.is_empty(), format!("it gave away {leaked:?}")),
    ];
    let faults = faults.into_iter().filter(|(is_there, _)| *is_there);
    let faults: Vec<_> = faults.map(|(_, fault)| fault).collect();
    (!faults.is_empty()).then(|| format!("{name}: {}", faults.join(", ")))
}

fn shown(error: &Error) -> String {
    let text = chain(error);
    assert!(!text.is_empty(), "{error:?}");
    text
}

#[tokio::test]
async fn no_reply_is_taken_from_a_rogue() {
    let mut faults = Vec::new();
    for case in logins().into_iter().chain(replies()) {
        faults.extend(fault(case).await);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
