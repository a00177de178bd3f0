//! Redis: replies without end, over TCP and over TLS.

use std::{io, sync::Arc};

use lockkit_testbed::{Certificates, Plays, Rogue, Wire};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{ENCODED, TIMEOUTS, Within, fault, judged, run};

use Plays::{Endless, Once};

/// The moment from which a rogue plays.
#[derive(Clone, Copy, Debug)]
enum Instead {
    Login,
    /// Of the reply to the first request after the login.
    Reply,
}

/// Behaves up to this moment.
async fn behave(
    client: TcpStream,
    certificates: Option<Arc<Certificates>>,
    instead: Instead,
) -> io::Result<Box<dyn Wire>> {
    let mut client: Box<dyn Wire> = match certificates {
        None => Box::new(client),
        Some(certificates) => Box::new(certificates.accept(client, &[]).await?),
    };
    let mut heard = vec![0; 16 * 1024];
    loop {
        let length = client.read(&mut heard).await?;
        let said = String::from_utf8_lossy(&heard[..length]).into_owned();
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if matches!(instead, Instead::Login) || said.contains("INFO\r\n") {
            return Ok(client);
        }
        // Some come with the first one.
        let commands = said.split("\r\n").filter(|line| line.starts_with('*')).count();
        let hello = said.contains("HELLO");
        let mut replies = if hello {
            "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned()
        } else {
            String::new()
        };
        replies.push_str(&"+OK\r\n".repeat(commands - usize::from(hello)));
        client.write_all(replies.as_bytes()).await?;
        client.flush().await?;
    }
}

fn plays() -> Vec<(&'static str, Plays, &'static str)> {
    vec![
        ("silence", Once(vec![]), "within"),
        (
            "pushes",
            Endless(vec![], b">2\r\n$1\r\na\r\n$1\r\nb\r\n".repeat(500)),
            "",
        ),
        (
            "long pushes",
            Endless(
                vec![],
                [b">1\r\n$60000\r\n", &[b'a'; 60_000][..], b"\r\n"].concat(),
            ),
            "",
        ),
        ("replies", Endless(vec![], b"+OK\r\n".repeat(500)), ""),
        (
            "a string of 2 GiB",
            Endless(b"$2147483647\r\n".to_vec(), vec![b'a'; 64_000]),
            "",
        ),
        ("a line", Endless(b"+".to_vec(), vec![b'a'; 64_000]), ""),
        (
            "an array",
            Endless(b"*2147483647\r\n".to_vec(), b":1\r\n".repeat(500)),
            "",
        ),
        ("arrays in arrays", Endless(vec![], b"*1\r\n".repeat(500)), ""),
        (
            "a map",
            Endless(b"%1000000\r\n".to_vec(), b"+a\r\n+b\r\n".repeat(500)),
            "",
        ),
        ("zeros", Endless(vec![], vec![0; 64_000]), ""),
    ]
}

#[test]
fn no_rogue_of_redis_sends_without_end() {
    let certificates = Arc::new(Certificates::generate().unwrap());
    run(async {
        let mut faults = Vec::new();
        for over_tls in [true, false] {
            for instead in [Instead::Login, Instead::Reply] {
                for (what, plays, says) in plays() {
                    let own = over_tls.then(|| certificates.clone());
                    let rogue = Rogue::start(plays, move |client| behave(client, own.clone(), instead));
                    let rogue = rogue.await.unwrap();
                    let (scheme, ca) = if over_tls {
                        ("rediss", format!("&ca={}", certificates.authority().display()))
                    } else {
                        ("redis", String::new())
                    };
                    let url = format!("{scheme}://:{ENCODED}@{}?{TIMEOUTS}{ca}", rogue.addr());
                    let name = format!("{scheme}, {instead:?}: {what}");
                    faults.extend(fault(&name, &rogue, &url, Within::Connecting, says).await);
                }
            }
        }
        judged(&faults);
    });
}
