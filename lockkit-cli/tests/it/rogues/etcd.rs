//! etcd: a rogue that speaks HTTP/2 by hand, and one that passes all but some answers on from a server.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    HeaderMap, Request, Response,
    body::{Body, Bytes, Frame, Incoming},
    client, server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lockkit::{AcquireOptions, LockConfig};
use lockkit_testbed::{
    Plays, Rogue, Wire,
    etcd::{self, EtcdServer},
    skipped,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{TIMEOUTS, Within, fault, fault_of_run, judged, run};

use Plays::{Answers, Endless, Last, Once};

/// The moment from which a rogue that speaks HTTP/2 plays.
#[derive(Clone, Copy)]
enum Instead {
    Settings,
    /// Of the answer to the first request, on the stream 1.
    Answer,
}

use Instead::{Answer, Settings};

struct Case {
    name: &'static str,
    instead: Instead,
    plays: Plays,
}

fn case(name: &'static str, instead: Instead, plays: Plays) -> Case {
    Case { name, instead, plays }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The head of a frame that promises so many bytes.
fn promises(kind: u8, length: u32) -> Vec<u8> {
    let mut head = frame(kind, 0, 1, &[]);
    head[..3].copy_from_slice(&length.to_be_bytes()[1..]);
    head
}

/// A header that no table has.
fn header(name: &str, value: &str) -> Vec<u8> {
    let mut field = vec![0, u8::try_from(name.len()).unwrap()];
    field.extend(name.bytes());
    field.push(u8::try_from(value.len()).unwrap());
    field.extend(value.bytes());
    field
}

/// `:status: 200`, from the static table.
const OK: u8 = 0x88;

fn headers() -> Vec<u8> {
    let fields = [vec![OK], header("content-type", "application/grpc")].concat();
    frame(HEADERS, END_HEADERS, 1, &fields)
}

fn trailers(status: &str, text: &str) -> Vec<u8> {
    let fields = [header("grpc-status", status), header("grpc-message", text)].concat();
    frame(HEADERS, END_HEADERS | END_STREAM, 1, &fields)
}

/// A message of gRPC.
fn message(payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&[0][..], &length, payload].concat()
}

fn data(payload: &[u8]) -> Vec<u8> {
    frame(DATA, 0, 1, payload)
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn handshakes() -> Vec<Case> {
    let answered = |frames: &[Vec<u8>]| [&[headers()][..], frames].concat().concat();
    vec![
        case("closes at once", Settings, Last(vec![])),
        case("is silent", Settings, Once(vec![])),
        case(
            "speaks HTTP/1",
            Settings,
            Last(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ),
        case("speaks TLS", Settings, Last(vec![0x15, 3, 1, 0, 2, 2, 70])),
        case("bytes without end", Settings, Endless(vec![], vec![0xff; 4_000])),
        case(
            "a frame of 16 MiB",
            Settings,
            Endless(promises(DATA, 0xff_ffff), vec![0; 64_000]),
        ),
        case(
            "settings without end",
            Settings,
            Endless(vec![], frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9]).repeat(300)),
        ),
        case(
            "pings without end",
            Answer,
            Endless(vec![], frame(PING, 0, 0, &[7; 8]).repeat(300)),
        ),
        case(
            "headers before an answer without end",
            Answer,
            // `:status: 100`.
            Endless(vec![], frame(HEADERS, END_HEADERS, 1, b"\x08\x03100").repeat(300)),
        ),
        case("goes away", Answer, Once(frame(GOAWAY, 0, 0, &[0; 8]))),
        case(
            "goes away, and says why at length",
            Answer,
            Last(frame(
                GOAWAY,
                0,
                0,
                &[&[0, 0, 0, 0, 0, 0, 0, 11][..], &[b'\n'; 16_000]].concat(),
            )),
        ),
        case(
            "resets the request",
            Answer,
            Once(frame(RESET, 0, 1, &[0, 0, 0, 8])),
        ),
        case(
            "resets without end",
            Answer,
            Endless(vec![], frame(RESET, 0, 1, &[0, 0, 0, 8]).repeat(300)),
        ),
        case("is silent after a request", Answer, Once(vec![])),
        case(
            "headers without end",
            Answer,
            Endless(
                frame(HEADERS, 0, 1, &[OK]),
                frame(CONTINUATION, 0, 1, &header("a", "b").repeat(2_000)),
            ),
        ),
        case(
            "headers that are none",
            Answer,
            Once(frame(HEADERS, END_HEADERS, 1, &[0xff; 100])),
        ),
        case(
            "an answer to nobody",
            Answer,
            Once(frame(HEADERS, END_HEADERS, 7, &[OK])),
        ),
        case("a body without headers", Answer, Once(data(&message(b"")))),
        case(
            "pushes",
            Answer,
            Once(frame(PUSH, END_HEADERS, 1, &[0, 0, 0, 2, OK])),
        ),
        case(
            "a window without end",
            Answer,
            Once(frame(WINDOW, 0, 0, &[0x7f, 0xff, 0xff, 0xff])),
        ),
        case(
            "a page",
            Answer,
            Once(
                [
                    frame(HEADERS, END_HEADERS, 1, &[0x8e]),
                    frame(DATA, END_STREAM, 1, b"<html>"),
                ]
                .concat(),
            ),
        ),
        case("trailers without a body", Answer, Once(trailers("0", ""))),
        case(
            "no trailers",
            Answer,
            Once(answered(&[frame(DATA, END_STREAM, 1, &message(b""))])),
        ),
        case("headers and no more", Answer, Once(answered(&[]))),
        case(
            "half a message",
            Answer,
            Last(answered(&[data(&message(b"abcdef")[..7])])),
        ),
        case(
            "a message that is none",
            Answer,
            Once(answered(&[data(&message(&[0xff; 50])), trailers("0", "")])),
        ),
        case(
            "a message that is compressed",
            Answer,
            Once(answered(&[data(&[1, 0, 0, 0, 1, 7]), trailers("0", "")])),
        ),
        case(
            "a message of 4 GiB",
            Answer,
            Endless(
                answered(&[data(&[0, 0xff, 0xff, 0xff, 0xff])]),
                data(&[0; 16_000]),
            ),
        ),
        case(
            "messages without end",
            Answer,
            Endless(answered(&[]), data(&message(b"").repeat(3_000))),
        ),
        case(
            "a body that heeds no window",
            Answer,
            Endless(answered(&[data(&[0, 3, 0, 0, 0])]), data(&[0; 16_000])),
        ),
        case(
            "a status in several lines",
            Answer,
            Once(trailers("13", "no%0A%1b[31m%0d%0a%00no")),
        ),
        case(
            "a status beyond all",
            Answer,
            Once(trailers("99999999999999999999", "no")),
        ),
        case(
            "answers each frame with one",
            Answer,
            Answers(vec![], frame(PING, 0, 0, &[7; 8])),
        ),
    ]
}

/// Behaves up to this moment.
async fn behave(mut client: TcpStream, instead: Instead) -> io::Result<Box<dyn Wire>> {
    let Answer = instead else {
        return Ok(Box::new(client));
    };
    client.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    // The preface, which says that it is HTTP/2.
    client.read_exact(&mut [0; 24]).await?;
    loop {
        let mut head = [0; 9];
        client.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        client.read_exact(&mut vec![0; length as usize]).await?;
        match head[3] {
            HEADERS => return Ok(Box::new(client)),
            SETTINGS if head[4] == 0 => client.write_all(&frame(SETTINGS, 1, 0, &[])).await?,
            _ => {}
        }
    }
}

#[test]
fn no_handshake_is_taken_from_a_rogue_of_etcd() {
    run(async {
        let mut faults = Vec::new();
        for Case { name, instead, plays } in handshakes() {
            let rogue = Rogue::start(plays, move |client| behave(client, instead))
                .await
                .unwrap();
            let url = format!("etcd://{}?{TIMEOUTS}", rogue.addr());
            faults.extend(fault(name, &rogue, &url, Within::Connecting, "").await);
        }
        judged(&faults);
    });
}

/// What comes after the messages of an answer.
#[derive(Clone, Copy)]
enum Then {
    End,
    Silence,
    Again,
}

use Then::{Again, End, Silence};

/// An answer of the rogue's own, to each request with this path.
struct Script {
    name: &'static str,
    path: &'static str,
    messages: Vec<Vec<u8>>,
    then: Then,
}

const STATUS: &str = "/etcdserverpb.Maintenance/Status";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const TXN: &str = "/etcdserverpb.KV/Txn";
const RANGE: &str = "/etcdserverpb.KV/Range";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

fn script(name: &'static str, path: &'static str, messages: Vec<Vec<u8>>, then: Then) -> Script {
    Script {
        name,
        path,
        messages,
        then,
    }
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
    bytes
}

/// A field that is a number.
fn number(field: u8, value: i64) -> Vec<u8> {
    [vec![field << 3], varint(u64::from_ne_bytes(value.to_ne_bytes()))].concat()
}

/// A field that is a text or a message.
fn part(field: u8, bytes: &[u8]) -> Vec<u8> {
    [vec![field << 3 | 2], varint(bytes.len() as u64), bytes.to_vec()].concat()
}

/// The header that each answer begins with.
fn answer(rest: &[Vec<u8>]) -> Vec<u8> {
    let header = [number(1, 7), number(3, 9), number(4, 2)].concat();
    [part(1, &header), rest.concat()].concat()
}

fn key(name: &str, revision: i64) -> Vec<u8> {
    let entry = [
        part(1, name.as_bytes()),
        number(2, revision),
        number(3, revision),
        number(4, 1),
        number(6, 1),
    ];
    part(2, &entry.concat())
}

fn lease(id: i64, ttl: i64) -> Vec<u8> {
    answer(&[number(2, id), number(3, ttl)])
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn scripts() -> Vec<Script> {
    let long = part(2, &vec![b'1'; 60_000]);
    let range = |keys: &[Vec<u8>]| answer(&[part(3, &part(1, &answer(keys)))]);
    let event = |id: i64| answer(&[number(2, id), part(11, &number(1, 1))]);
    vec![
        script("a version at length", STATUS, vec![answer(&[long])], End),
        script("statuses without end", STATUS, vec![answer(&[])], Again),
        script("no lease", GRANT, vec![answer(&[])], End),
        script("a lease below zero", GRANT, vec![lease(-1, 30)], End),
        script(
            "a lease that ends before it begins",
            GRANT,
            vec![lease(7, -30)],
            End,
        ),
        script("a lease for ever", GRANT, vec![lease(7, i64::MAX)], End),
        script("leases without end", GRANT, vec![lease(7, 30)], Again),
        script("a lease that nobody granted", GRANT, vec![lease(0x7777, 30)], End),
        script("silence about a lease", GRANT, vec![], Silence),
        script("no transaction", TXN, vec![answer(&[])], End),
        script(
            "a transaction of nothing",
            TXN,
            vec![answer(&[number(2, 1)])],
            End,
        ),
        script(
            "a transaction below zero",
            TXN,
            vec![answer(&[
                number(2, 1),
                part(3, &part(1, &answer(&[key("lockkit/job/x", -1)]))),
            ])],
            End,
        ),
        script(
            "keys that nobody asked for",
            TXN,
            vec![range(&[key("else", 5), key("", 0), key("lockkit/job", i64::MAX)])],
            End,
        ),
        script(
            "transactions without end",
            TXN,
            vec![answer(&[number(2, 1)])],
            Again,
        ),
        script(
            "a transaction of many empty keys",
            TXN,
            vec![range(&[part(2, &[]).repeat(1_500_000)])],
            End,
        ),
        script(
            "a transaction of 60 MiB",
            TXN,
            vec![range(&[part(2, &part(5, &vec![0; 60_000_000]))])],
            End,
        ),
        script("silence about a transaction", TXN, vec![], Silence),
        script(
            "ranges without end",
            RANGE,
            vec![answer(&[key("lockkit/job/x", 5)])],
            Again,
        ),
        script(
            "a range below zero",
            RANGE,
            vec![answer(&[key("lockkit/job/x", i64::MIN), number(4, -7)])],
            End,
        ),
        script(
            "a range of keys that nobody asked for",
            RANGE,
            vec![answer(&[key("a", 1), key("zzz", 2)])],
            End,
        ),
        script("always more", RANGE, vec![answer(&[number(3, 1)])], End),
        script("silence about a range", RANGE, vec![], Silence),
        script("no word of life", KEEP_ALIVE, vec![], End),
        script("silence about a life", KEEP_ALIVE, vec![], Silence),
        script("a life that is over", KEEP_ALIVE, vec![lease(7, 0)], End),
        script("a life of another", KEEP_ALIVE, vec![lease(8, 30)], End),
        script("lives without end", KEEP_ALIVE, vec![lease(7, 30)], Again),
        script("no watch", WATCH, vec![], End),
        script("a silent watch", WATCH, vec![], Silence),
        script(
            "a watch that ends",
            WATCH,
            vec![answer(&[number(2, 1), number(3, 1), number(4, 1)])],
            Silence,
        ),
        script(
            "events of other watches",
            WATCH,
            vec![answer(&[number(2, 1), number(3, 1)]), event(99), event(-1)],
            Silence,
        ),
        script(
            "events without end",
            WATCH,
            vec![answer(&[number(2, 1), number(3, 1)]), event(1)],
            Again,
        ),
        script(
            "watches without end",
            WATCH,
            vec![answer(&[number(2, 1), number(3, 1)])],
            Again,
        ),
        script("events before a watch", WATCH, vec![event(1)], Silence),
        script(
            "an event of many parts",
            WATCH,
            vec![answer(&[number(2, 1), part(11, &[]).repeat(1_500_000)])],
            Silence,
        ),
    ]
}

/// The body of an answer.
enum Said {
    Honestly(Incoming),
    Played {
        script: Arc<Script>,
        next: VecDeque<Bytes>,
        is_over: bool,
    },
}

impl Said {
    fn of(script: Arc<Script>) -> Self {
        Self::Played {
            next: messages(&script),
            script,
            is_over: false,
        }
    }
}

fn messages(script: &Script) -> VecDeque<Bytes> {
    script
        .messages
        .iter()
        .map(|payload| message(payload).into())
        .collect()
}

impl Body for Said {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Honestly(body) => Pin::new(body).poll_frame(cx),
            Self::Played {
                script,
                next,
                is_over,
            } => {
                if let (Again, true) = (script.then, next.is_empty()) {
                    *next = messages(script);
                }
                match (next.pop_front(), script.then) {
                    (Some(message), _) => Poll::Ready(Some(Ok(Frame::data(message)))),
                    (None, Silence) => Poll::Pending,
                    (None, _) if *is_over => Poll::Ready(None),
                    (None, _) => {
                        *is_over = true;
                        let mut trailers = HeaderMap::new();
                        trailers.insert("grpc-status", "0".parse().unwrap());
                        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
                    }
                }
            }
        }
    }
}

/// Serves a client with what the server at this address answers, but for the script.
async fn pass_on(client: TcpStream, upstream: SocketAddr, script: Arc<Script>) -> io::Result<Box<dyn Wire>> {
    let stream = TcpStream::connect(upstream).await?;
    let shaken = client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (sender, connection) = shaken.map_err(io::Error::other)?;
    tokio::spawn(connection);
    let answers = service_fn(move |request: Request<Incoming>| {
        let (mut sender, script) = (sender.clone(), script.clone());
        async move {
            let answer = if request.uri().path() == script.path {
                Response::builder()
                    .header("content-type", "application/grpc")
                    .body(Said::of(script))
                    .unwrap()
            } else {
                sender.send_request(request).await?.map(Said::Honestly)
            };
            Ok::<_, hyper::Error>(answer)
        }
    });
    let serving = server::conn::http2::Builder::new(TokioExecutor::new());
    let served = serving.serve_connection(TokioIo::new(client), answers).await;
    Err(served
        .err()
        .map_or_else(|| io::ErrorKind::UnexpectedEof.into(), io::Error::other))
}

#[test]
fn no_answer_is_taken_from_a_rogue_of_etcd() {
    if skipped("etcd", etcd::missing()) {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    run(async {
        // All that waits in vain for this one has not been granted anything.
        let config = LockConfig::new(format!("etcd://{}", server.addr()));
        let held = config.connect().await.unwrap().lock("job").unwrap();
        let held = held.with_options(AcquireOptions::new().ttl(Duration::from_secs(30)));
        let held = held.acquire().await.unwrap();
        let mut faults = Vec::new();
        for script in scripts() {
            let (name, script, upstream) = (script.name, Arc::new(script), server.addr());
            let behaves = move |client| pass_on(client, upstream, script.clone());
            let rogue = Rogue::start(Last(vec![]), behaves).await.unwrap();
            let url = format!("etcd://{}?{TIMEOUTS}", rogue.addr());
            let waits = ["--wait", "1s"];
            faults.extend(fault_of_run(name, &rogue, &waits, &url, Within::Trying, "").await);
            assert!(held.is_held(), "{name}");
        }
        held.release().await.unwrap();
        judged(&faults);
    });
}
