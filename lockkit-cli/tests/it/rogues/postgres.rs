//! PostgreSQL.

use std::{collections::HashMap, io};

use lockkit_testbed::{Plays, Rogue, Wire};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{ENCODED, TIMEOUTS, Within, fault, judged, run};

use Plays::{Answers, Endless, Last, Once};

/// The moment from which a rogue plays.
#[derive(Clone, Copy)]
enum Instead {
    /// Of the first word of a login.
    Login,
    /// Of the answer to the first word of a login by SCRAM.
    Next,
    /// Of the answer to the client's proof, for which the server has asked for so many rounds.
    Proof(u32),
    /// Of what the server says after the login.
    Greeting,
    /// Of the reply to the first statement with this in it that is prepared, or prepared and run at once.
    Prepared(&'static str),
    /// Of the reply to the first statement with this in it that is run.
    Reply(&'static str),
}

use Instead::{Greeting, Login, Next, Prepared, Proof, Reply};

struct Case {
    name: &'static str,
    instead: Instead,
    plays: Plays,
    /// A part of what is printed, where it matters which.
    says: &'static str,
}

fn case(name: &'static str, instead: Instead, plays: Plays, says: &'static str) -> Case {
    Case {
        name,
        instead,
        plays,
        says,
    }
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
    [&[kind][..], &length, body].concat()
}

/// The head of a message that promises so many bytes.
fn promises(kind: u8, length: i32) -> Vec<u8> {
    [&[kind][..], &length.to_be_bytes()].concat()
}

fn authentication(method: i32, rest: &[u8]) -> Vec<u8> {
    message(b'R', &[&method.to_be_bytes()[..], rest].concat())
}

/// What a server says that an error or notice has, each with its letter.
fn words(kind: u8, fields: &[(u8, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (letter, text) in fields {
        body.push(*letter);
        body.extend(text.bytes());
        body.push(0);
    }
    body.push(0);
    message(kind, &body)
}

fn notice() -> Vec<u8> {
    words(b'N', &[(b'S', "NOTICE"), (b'C', "00000"), (b'M', "look here")])
}

fn error(text: &str) -> Vec<u8> {
    words(
        b'E',
        &[(b'S', "ERROR"), (b'V', "ERROR"), (b'C', "XX000"), (b'M', text)],
    )
}

fn parameter(name: &str) -> Vec<u8> {
    message(b'S', format!("{name}\0x\0").as_bytes())
}

const BOOL: u32 = 16;
const BIGINT: u32 = 20;
const INT: u32 = 23;
const TEXT: u32 = 25;

fn columns(kinds: &[u32]) -> Vec<u8> {
    let mut body = u16::try_from(kinds.len()).unwrap().to_be_bytes().to_vec();
    for kind in kinds {
        body.extend(b"a\0\0\0\0\0\0\0");
        body.extend(kind.to_be_bytes());
        body.extend([0, 8, 0xff, 0xff, 0xff, 0xff, 0, 1]);
    }
    message(b'T', &body)
}

fn row(values: &[&[u8]]) -> Vec<u8> {
    let mut body = u16::try_from(values.len()).unwrap().to_be_bytes().to_vec();
    for value in values {
        body.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
        body.extend(*value);
    }
    message(b'D', &body)
}

fn parsed() -> Vec<u8> {
    message(b'1', &[])
}

fn bound() -> Vec<u8> {
    message(b'2', &[])
}

fn complete() -> Vec<u8> {
    [message(b'C', b"SELECT 1\0"), ready()].concat()
}

fn ready() -> Vec<u8> {
    message(b'Z', b"I")
}

fn parameters(kinds: &[u32]) -> Vec<u8> {
    let mut body = u16::try_from(kinds.len()).unwrap().to_be_bytes().to_vec();
    for kind in kinds {
        body.extend(kind.to_be_bytes());
    }
    message(b't', &body)
}

/// The description of a statement that has this type and no other, to whatever is prepared.
fn described_as(kind: u32) -> Vec<u8> {
    [parsed(), parameters(&[kind]), columns(&[kind]), ready()].concat()
}

/// The answer to a statement that is described and run at once.
fn answers(kinds: &[u32], values: &[&[u8]]) -> Vec<u8> {
    [
        parsed(),
        parameters(&[]),
        bound(),
        columns(kinds),
        row(values),
        complete(),
    ]
    .concat()
}

/// The beginning of such an answer, with one column of this type.
fn one_of(kind: u32) -> Vec<u8> {
    [parsed(), parameters(&[]), bound(), columns(&[kind])].concat()
}

fn granted(values: &[&[u8]]) -> Vec<u8> {
    [bound(), row(values), complete()].concat()
}

fn scram() -> Vec<u8> {
    authentication(10, b"SCRAM-SHA-256\0\0")
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn logins() -> Vec<Case> {
    let clear = authentication(3, &[]);
    let hashed = authentication(5, b"salt");
    let secret = "asks for the password in clear text";
    vec![
        case("closes at once", Login, Last(vec![]), ""),
        case(
            "speaks HTTP",
            Login,
            Last(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
            "",
        ),
        case("speaks TLS", Login, Last(vec![0x15, 3, 1, 0, 2, 2, 70]), ""),
        case("is silent", Login, Once(vec![]), "no answer"),
        case("asks for the password", Login, Once(clear.clone()), secret),
        case(
            "asks for the password without end",
            Login,
            Endless(vec![], clear.clone()),
            secret,
        ),
        case(
            "asks for the password behind a notice",
            Login,
            Once([notice(), clear].concat()),
            "",
        ),
        case(
            "asks for a hash without end",
            Login,
            Endless(vec![], hashed.clone()),
            "",
        ),
        case("asks for half a hash", Login, Last(authentication(5, b"s")), ""),
        case("asks by Kerberos", Login, Once(authentication(2, &[])), ""),
        case("asks by GSS", Login, Once(authentication(7, &[])), ""),
        case("asks by SSPI", Login, Once(authentication(9, &[])), ""),
        case(
            "asks by a method of its own",
            Login,
            Once(authentication(77, &[])),
            "",
        ),
        case(
            "asks by a mechanism that nobody has",
            Login,
            Once(authentication(10, b"ROT13\0\0")),
            "",
        ),
        case(
            "mechanisms without end",
            Login,
            Endless(promises(b'R', i32::MAX), b"SCRAM-SHA-256\0".repeat(1_000)),
            "1 MiB",
        ),
        case(
            "a nonce of its own",
            Next,
            Once(authentication(11, b"r=mine,s=QSXCR+Q6sek8bf92,i=4096")),
            "invalid nonce",
        ),
        case(
            "a proof before it is asked for",
            Next,
            Once(authentication(12, b"v=AAAA")),
            "",
        ),
        case(
            "a proof that is none",
            Proof(4_096),
            Once(authentication(
                12,
                b"v=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
            )),
            "SCRAM verification error",
        ),
        case(
            "lets in without a proof after the client's",
            Proof(4_096),
            Once([authentication(0, &[]), ready()].concat()),
            "",
        ),
        case(
            "rounds of hashing for hours",
            Proof(u32::MAX),
            Once(vec![]),
            "iteration count",
        ),
        case(
            "lets in without a proof of its own",
            Next,
            Once(authentication(0, &[])),
            "",
        ),
        case(
            "a message of 2 GiB",
            Login,
            Endless(promises(b'R', i32::MAX), vec![0; 64_000]),
            "1 MiB",
        ),
        case(
            "a message of less than nothing",
            Login,
            Last(promises(b'R', -1)),
            "",
        ),
        case(
            "a message without its own length",
            Login,
            Last(promises(b'R', 0)),
            "",
        ),
        case(
            "refuses in several lines, and repeats the password",
            Login,
            Last(error(&format!("no\n\x1b[31m{}\r\n{ENCODED}", super::PASSWORD))),
            "***",
        ),
        case(
            "refuses at length",
            Login,
            Last(error(&"no ".repeat(100_000))),
            "",
        ),
        case("refuses without a word", Login, Last(message(b'E', &[0])), ""),
        case(
            "parameters without end",
            Greeting,
            Endless(vec![], parameter("a").repeat(500)),
            "8 MiB",
        ),
        case(
            "notices after the login",
            Greeting,
            Endless(vec![], notice().repeat(500)),
            "8 MiB",
        ),
        case(
            "keys without end",
            Greeting,
            Endless(vec![], message(b'K', &[0; 8]).repeat(500)),
            "8 MiB",
        ),
        case("closes after the login", Greeting, Last(vec![]), ""),
    ]
}

fn replies() -> Vec<Case> {
    let check = Reply("pg_is_in_recovery");
    let one = one_of(BIGINT);
    vec![
        case("is silent after a statement", check, Once(vec![]), "no answer"),
        case("closes midway", check, Last(one.clone()), ""),
        case(
            "rows without end",
            check,
            Endless(one.clone(), row(&[&[0; 8]]).repeat(500)),
            "8 MiB",
        ),
        case(
            "long rows without end",
            check,
            Endless(one.clone(), row(&[&[0; 64_000]])),
            "8 MiB",
        ),
        case(
            "a row of 2 GiB",
            check,
            Endless([one.clone(), promises(b'D', i32::MAX)].concat(), vec![0; 64_000]),
            "1 MiB",
        ),
        case(
            "a row of many columns",
            check,
            Once([one.clone(), row(&[&[][..]; 60_000])].concat()),
            "columns without number",
        ),
        case(
            "a row whose column is of less than nothing",
            check,
            Once(
                [
                    one.clone(),
                    message(b'D', &[0, 1, 0xff, 0xff, 0xff, 0xfe]),
                    complete(),
                ]
                .concat(),
            ),
            "",
        ),
        case(
            "notices without end",
            check,
            Endless(vec![], notice().repeat(500)),
            "8 MiB",
        ),
        case(
            "notifications without end",
            check,
            Endless(vec![], message(b'A', b"\0\0\0\x01a\0b\0").repeat(500)),
            "8 MiB",
        ),
        case(
            "descriptions without end",
            check,
            Endless(vec![], columns(&[BIGINT]).repeat(500)),
            "",
        ),
        case(
            "ends of replies without end",
            check,
            Endless(vec![], ready().repeat(500)),
            "",
        ),
        case(
            "columns without number",
            check,
            Once([parsed(), parameters(&[]), bound(), columns(&[BIGINT; 1_000])].concat()),
            "columns without number",
        ),
        case(
            "a reply to another statement",
            check,
            Once(answers(&[TEXT], &[b"hello"])),
            "",
        ),
        case(
            "values of other types",
            check,
            Once(answers(&[TEXT; 7], &[&b"a"[..]; 7])),
            "",
        ),
        case(
            "a null where none is",
            check,
            Once([one, message(b'D', &[0, 1, 0xff, 0xff, 0xff, 0xff]), complete()].concat()),
            "",
        ),
        case("no row", check, Once([one_of(BIGINT), complete()].concat()), ""),
        case("copies", check, Once(message(b'G', &[0, 0, 0])), ""),
        case(
            "a type that has a type, and so on",
            check,
            Answers(one_of(99_999), described_as(99_999)),
            "a type that no request asks for",
        ),
    ]
}

fn attempts() -> Vec<Case> {
    let grant = Reply("pg_try_advisory_lock");
    let number = |number: i64| granted(&[&number.to_be_bytes()]);
    vec![
        case(
            "a type that has a type, once it is prepared",
            Prepared("pg_advisory_lock"),
            Answers(described_as(99_999), described_as(99_999)),
            "a type that no request asks for",
        ),
        case(
            "parameters without number",
            Prepared("pg_advisory_lock"),
            Once(
                [
                    parsed(),
                    parameters(&[BIGINT; 60_000]),
                    columns(&[BIGINT]),
                    ready(),
                ]
                .concat(),
            ),
            "",
        ),
        case("a token below zero", grant, Once(number(-1)), ""),
        case("the least token", grant, Once(number(i64::MIN)), ""),
        case("a token at the end of all", grant, Once(number(i64::MAX)), ""),
        case(
            "neither a token nor that it is taken",
            grant,
            Once([bound(), complete()].concat()),
            "not one to this request",
        ),
        case("half a token", grant, Once(granted(&[&[0; 4]])), ""),
        case(
            "a token of two columns",
            grant,
            Once(granted(&[&[0; 8], &[0; 8]])),
            "",
        ),
        case(
            "an error, and then a token",
            grant,
            Once([error("no"), number(7)].concat()),
            "",
        ),
        case("closes instead of a grant", grant, Last(vec![]), ""),
        case("half a grant", grant, Last(bound()), ""),
        case("is silent instead of a grant", grant, Once(vec![]), "no answer"),
        case(
            "notices instead of a grant",
            grant,
            Endless(vec![], notice().repeat(500)),
            "8 MiB",
        ),
    ]
}

/// The name of the statement that was bound last, which no statement has.
const BOUND: &str = "\0bound";

/// A server of which nothing is real, up to the moment from which it plays.
struct Server {
    client: TcpStream,
    /// The lease that the client has asked for.
    lease: i64,
    statements: HashMap<String, String>,
}

impl Server {
    async fn message(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let kind = self.client.read_u8().await?;
        Ok((kind, self.body().await?))
    }

    async fn body(&mut self) -> io::Result<Vec<u8>> {
        let length = self.client.read_u32().await?.saturating_sub(4);
        let mut body = vec![0; length as usize];
        self.client.read_exact(&mut body).await?;
        Ok(body)
    }

    /// Behaves up to this moment.
    async fn behave(mut self, instead: Instead) -> io::Result<Box<dyn Wire>> {
        let startup = String::from_utf8_lossy(&self.body().await?).into_owned();
        let lease = startup.split_once("idle_session_timeout=").map(|(_, rest)| rest);
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
        self.lease = lease.and_then(|lease| digits(lease).parse().ok()).unwrap_or(0);
        match instead {
            Login => return Ok(Box::new(self.client)),
            Next | Proof(_) => {
                self.client.write_all(&scram()).await?;
                let (_, first) = self.message().await?;
                if let Proof(rounds) = instead {
                    let first = String::from_utf8_lossy(&first).into_owned();
                    let nonce = first.split_once("r=").map_or("", |(_, nonce)| nonce);
                    let salted = format!("r={nonce}more,s=QSXCR+Q6sek8bf92,i={rounds}");
                    self.client
                        .write_all(&authentication(11, salted.as_bytes()))
                        .await?;
                    self.message().await?;
                }
                return Ok(Box::new(self.client));
            }
            Greeting | Prepared(_) | Reply(_) => self.client.write_all(&authentication(0, &[])).await?,
        }
        let (Prepared(moment) | Reply(moment)) = instead else {
            return Ok(Box::new(self.client));
        };
        // The message that has to be about it.
        let letter = if matches!(instead, Prepared(_)) {
            b'P'
        } else {
            b'E'
        };
        let greeting = [
            parameter("server_version"),
            message(b'K', &[0, 0, 0x12, 0x67, 0, 0, 0, 1]),
            ready(),
        ];
        self.client.write_all(&greeting.concat()).await?;
        let (mut reply, mut has_come) = (Vec::new(), false);
        loop {
            let (kind, body) = self.message().await?;
            let sql = self.statement(kind, &body);
            has_come |= kind == letter && sql.as_ref().is_some_and(|sql| sql.contains(moment));
            let values = sql.as_deref().map(|sql| self.reply(sql));
            match (kind, values) {
                (b'P', _) => reply.extend(parsed()),
                (b'B', Some(_)) => {
                    reply.extend(bound());
                    self.statements.insert(BOUND.to_owned(), sql.unwrap_or_default());
                }
                (b'D', Some((kinds, _))) => {
                    if body.first() == Some(&b'S') {
                        let count = sql.unwrap_or_default().matches('$').count();
                        reply.extend(parameters(&vec![BIGINT; count]));
                    }
                    reply.extend(if kinds.is_empty() {
                        message(b'n', &[])
                    } else {
                        columns(&kinds)
                    });
                }
                (b'E', Some((_, values))) => {
                    if !values.is_empty() {
                        let values: Vec<_> = values.iter().map(Vec::as_slice).collect();
                        reply.extend(row(&values));
                    }
                    reply.extend(message(b'C', b"SELECT 1\0"));
                }
                (b'S', _) if has_come => return Ok(Box::new(self.client)),
                (b'S', _) => {
                    reply.extend(ready());
                    self.client.write_all(&reply).await?;
                    reply.clear();
                }
                (b'Q', _) => self.client.write_all(&complete()).await?,
                (b'X', _) => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {}
            }
        }
    }

    /// Returns the statement that a message is about.
    fn statement(&mut self, kind: u8, body: &[u8]) -> Option<String> {
        let texts = body
            .split(|byte| *byte == 0)
            .map(|text| String::from_utf8_lossy(text).into_owned());
        let mut texts = texts.take(2);
        let first = texts.next()?;
        match kind {
            b'P' => {
                let sql = texts.next()?;
                self.statements.insert(first, sql.clone());
                Some(sql)
            }
            b'B' => self.statements.get(&texts.next()?).cloned(),
            b'D' if first.starts_with('S') => self.statements.get(&first[1..]).cloned(),
            b'D' | b'E' => self.statements.get(BOUND).cloned(),
            _ => None,
        }
    }

    /// Returns the types and the values of the one row that answers a statement, if it has one.
    fn reply(&self, sql: &str) -> (Vec<u32>, Vec<Vec<u8>>) {
        let long = |number: i64| number.to_be_bytes().to_vec();
        let process = 0x1267_i32.to_be_bytes().to_vec();
        let (yes, no) = (vec![1], vec![0]);
        if sql.contains("pg_is_in_recovery") {
            let kinds = vec![INT, BIGINT, BIGINT, BOOL, BOOL, BOOL, TEXT];
            let values = vec![
                process,
                long(1),
                long(self.lease),
                no.clone(),
                no,
                yes,
                Vec::new(),
            ];
            (kinds, values)
        } else if sql.contains("relpersistence") {
            (
                vec![BOOL, BOOL, BIGINT, BIGINT, TEXT],
                vec![yes.clone(), yes, long(3), long(3), b"me".to_vec()],
            )
        } else if sql.contains("has_schema_privilege") {
            (
                vec![BOOL, BOOL, BOOL, TEXT],
                vec![yes.clone(), yes.clone(), yes, b"me".to_vec()],
            )
        } else if sql.contains("lockkit.epoch") {
            (vec![INT], vec![1_i32.to_be_bytes().to_vec()])
        } else if sql.contains("pg_backend_pid()") && !sql.contains("lockkit.holder") {
            (vec![INT], vec![process])
        } else if sql.contains("nextval") {
            (vec![BIGINT], vec![long(1_024)])
        } else if sql.contains("set_config") {
            (vec![TEXT; 3], vec![b"1".to_vec(); 3])
        } else if sql.contains("unlock") {
            (vec![BOOL], vec![yes])
        } else {
            (Vec::new(), Vec::new())
        }
    }
}

async fn fault_of(case: Case, within: Within) -> Option<String> {
    let (name, instead, says) = (case.name, case.instead, case.says);
    let behaves = move |client| {
        let server = Server {
            client,
            lease: 0,
            statements: HashMap::new(),
        };
        server.behave(instead)
    };
    let rogue = Rogue::start(case.plays, behaves).await.unwrap();
    let url = format!("postgres://me:{ENCODED}@{}/app?{TIMEOUTS}", rogue.addr());
    fault(name, &rogue, &url, within, says).await
}

#[test]
fn no_login_is_given_to_a_rogue_of_postgres() {
    run(async {
        let mut faults = Vec::new();
        for case in logins() {
            faults.extend(fault_of(case, Within::Connecting).await);
        }
        judged(&faults);
    });
}

#[test]
fn no_reply_is_taken_from_a_rogue_of_postgres() {
    run(async {
        let mut faults = Vec::new();
        for case in replies() {
            faults.extend(fault_of(case, Within::Connecting).await);
        }
        judged(&faults);
    });
}

#[test]
fn no_grant_is_taken_from_a_rogue_of_postgres() {
    run(async {
        let mut faults = Vec::new();
        for case in attempts() {
            faults.extend(fault_of(case, Within::Trying).await);
        }
        judged(&faults);
    });
}
