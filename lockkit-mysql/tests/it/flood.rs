//! Servers that answer what no server answers, or without end. Each case of a table is played to a client that has logged in.

use std::{
    env, io,
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::spi::chain;
use lockkit_mysql::MySqlConfig;
use lockkit_testbed::{Certificates, Plays, Rogue, Wire};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    rogue::{ENCODED, greeting, greeting_with_tls, leaks},
    servers::connect,
};

/// The longest time that a case may take on a busy machine.
const LONGEST: Duration = Duration::from_mins(1);

/// The order of a client that is a process of its own: how it logs in, at which address, and the authority that it trusts.
const ORDER: &str = "LOCKKIT_MYSQL_FLOOD";
/// The beginning of the line in which it tells how that ended.
const MARK: &str = "lockkit-flood: ";

/// The way in which the client logs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Neither a password nor TLS.
    Bare,
    Password,
    #[cfg(feature = "tls")]
    Tls,
    #[cfg(feature = "tls")]
    PasswordOverTls,
}

impl Way {
    const ALL: &[Self] = &[
        Self::Bare,
        Self::Password,
        #[cfg(feature = "tls")]
        Self::Tls,
        #[cfg(feature = "tls")]
        Self::PasswordOverTls,
    ];
}

/// The moment at which a rogue stops behaving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Instead {
    Greeting,
    Login,
    Reply,
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

type Packets = Mutex<Vec<Vec<u8>>>;

async fn receive(client: &mut (impl AsyncRead + Unpin), seen: &Packets) -> io::Result<u8> {
    let mut header = [0; 4];
    client.read_exact(&mut header).await?;
    let length = u32::from_le_bytes([header[0], header[1], header[2], 0]);
    let mut payload = vec![0; length as usize];
    client.read_exact(&mut payload).await?;
    seen.lock().unwrap().push(payload);
    Ok(header[3].wrapping_add(1))
}

/// Behaves up to this moment.
async fn behave(
    mut client: TcpStream,
    certificates: Option<Arc<Certificates>>,
    instead: Instead,
    seen: Arc<Packets>,
) -> io::Result<Box<dyn Wire>> {
    if instead == Greeting {
        return Ok(Box::new(client));
    }
    let plugin = "mysql_native_password";
    let mut client: Box<dyn Wire> = match certificates {
        None => {
            client.write_all(&packet(0, &greeting(plugin))).await?;
            Box::new(client)
        }
        Some(certificates) => {
            client.write_all(&packet(0, &greeting_with_tls(plugin))).await?;
            receive(&mut client, &seen).await?;
            Box::new(certificates.accept(client, &[]).await?)
        }
    };
    let sequence = receive(&mut client, &seen).await?;
    if instead == Reply {
        client
            .write_all(&packet(sequence, &[0, 0, 0, 2, 0, 0, 0]))
            .await?;
        client.flush().await?;
        receive(&mut client, &seen).await?;
    }
    Ok(client)
}

fn config_of(way: Way, addr: &str, authority: PathBuf) -> MySqlConfig {
    match way {
        Way::Bare => MySqlConfig::new(format!("mysql://me@{addr}/app")),
        Way::Password => MySqlConfig::new(format!("mysql://me:{ENCODED}@{addr}/app")),
        #[cfg(feature = "tls")]
        Way::Tls | Way::PasswordOverTls => {
            let login = match way {
                Way::Tls => "me".to_owned(),
                _ => format!("me:{ENCODED}"),
            };
            let mut config = MySqlConfig::new(format!("mysql://{login}@{addr}/app"));
            (config.tls, config.ca) = (lockkit_mysql::Tls::Verify, Some(authority));
            config
        }
    }
}

/// Does as the order says, if there is one.
#[tokio::test]
async fn client_of_a_rogue() {
    let Ok(order) = env::var(ORDER) else { return };
    let mut words = order.splitn(3, ' ');
    let way = words.next().and_then(|way| way.parse::<usize>().ok()).unwrap();
    let (addr, authority) = (words.next().unwrap(), words.next().unwrap());
    let connected = connect(config_of(Way::ALL[way], addr, authority.into())).await;
    let error = connected.map(drop).expect_err("it is a rogue");
    println!("{MARK}{}", chain(&error));
}

/// Returns the text of the error with which a client of this rogue ends.
async fn error_at(rogue: &Rogue, way: Way, certificates: &Certificates) -> Result<String, String> {
    let number = Way::ALL.iter().position(|one| *one == way).unwrap_or_default();
    let authority = certificates.authority();
    let mut client = Command::new(env::current_exe().map_err(|error| error.to_string())?);
    client
        .args([
            "--exact",
            "flood::client_of_a_rogue",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(
            ORDER,
            format!("{number} {} {}", rogue.addr(), authority.display()),
        );
    let ended = rogue.judge(LONGEST, &mut client).await?;
    let told = ended.output.split_once(MARK).map(|(_, told)| told.lines().next());
    match told.flatten() {
        Some(text) if !text.trim().is_empty() => Ok(text.to_owned()),
        _ => Err(format!("no error: {}{}", ended.output, ended.complaint)),
    }
}

/// Returns what is wrong with the end of this case.
async fn fault(case: Case, way: Way, certificates: &Arc<Certificates>) -> Option<String> {
    let (name, says) = (format!("{}, {way:?}", case.name), case.says);
    let seen = Arc::new(Packets::default());
    let (record, instead) = (seen.clone(), case.instead);
    let own = (way != Way::Bare && way != Way::Password).then(|| certificates.clone());
    let rogue = Rogue::start(case.plays, move |client| {
        behave(client, own.clone(), instead, record.clone())
    });
    let rogue = rogue.await.unwrap();
    let began = Stopwatch::start();
    let text = match error_at(&rogue, way, certificates).await {
        Ok(text) => text,
        Err(fault) => return Some(format!("{name}: {fault}")),
    };
    println!("{name}: {:?}: {text}", began.elapsed());
    let leaked = leaks(&seen.lock().unwrap());
    let faults = [
        (!text.contains(says), format!("it says {text}")),
        (text.contains("canary"), format!("it shows the password: {text}")),
        (!leaked.is_empty(), format!("it gave away {leaked:?}")),
    ];
    let faults = faults.into_iter().filter(|(is_there, _)| *is_there);
    let faults: Vec<_> = faults.map(|(_, fault)| fault).collect();
    (!faults.is_empty()).then(|| format!("{name}: {}", faults.join(", ")))
}

#[tokio::test]
async fn no_reply_is_taken_from_a_rogue() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    let mut faults = Vec::new();
    for way in Way::ALL {
        // Without a password, there is none to ask for.
        let logins = (*way != Way::Bare).then(logins);
        for case in logins.into_iter().flatten().chain(replies()) {
            faults.extend(fault(case, *way, &certificates).await);
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
