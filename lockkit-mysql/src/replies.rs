//! The bounds on what a server may reply.
//!
//! sqlx has none. It reads a reply whatever its length, and makes room for as many columns as the server says that there are before it
//! has seen one. So what passes to it is looked at, packet by packet, and ends with an error in the place of what no honest server
//! sends.

use std::{
    io,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll, ready},
};

use tokio::{
    io::{
        AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
        BufWriter, ReadBuf,
    },
    task::coop::consume_budget,
};

use crate::error::code;

/// The longest packet. Each row and each column has one, and is some thousand bytes long at most.
const LONGEST: usize = 1024 * 1024;
/// The most bytes for one request. A semaphore with ten thousand holders is described in less than half of it.
const MOST: u64 = 8 * 1024 * 1024;
/// The bytes for which a packet counts beside its own, as it does in memory.
const PER_PACKET: u64 = 128;
/// The longest packet that ends a reply.
const LONGEST_END: usize = 8;

const ERR: u8 = 0xff;
/// The first bytes of numbers that take three and eight more. The second one also begins the packet that ends a reply.
const NUMBER_OF_3: u8 = 0xfd;
const NUMBER_OF_8: u8 = 0xfe;

/// The number of bytes that have been replied since the last request.
#[derive(Debug, Default)]
pub(crate) struct Replied(AtomicU64);

/// A stream of requests.
pub(crate) struct Requests<'a, S> {
    stream: S,
    replied: &'a Replied,
}

impl Replied {
    /// Wraps the stream of requests, each of which begins the count anew.
    pub(crate) fn since_requests_of<S>(&self, stream: S) -> Requests<'_, S> {
        Requests {
            stream,
            replied: self,
        }
    }

    /// Passes on replies until the server ends its connection, or does not keep to the bounds.
    pub(crate) async fn pass_on(
        &self,
        server: impl AsyncRead + Unpin,
        library: impl AsyncWrite + Unpin,
    ) -> io::Result<()> {
        let (mut server, mut library) = (BufReader::new(server), BufWriter::new(library));
        loop {
            // Others of the runtime have their turn.
            consume_budget().await;
            let mut header = [0; 4];
            // What is there is passed on together, and does not wait for more.
            if server.buffer().len() <= header.len() {
                library.flush().await?;
            }
            server.read_exact(&mut header).await?;
            let [one, two, three, sequence] = header;
            let length = u32::from_le_bytes([one, two, three, 0]) as usize;
            let first = match length {
                0 => None,
                _ => server.fill_buf().await?.first().copied(),
            };
            let weight = length as u64 + PER_PACKET;
            let replied = self.0.fetch_add(weight, Ordering::Relaxed).saturating_add(weight);
            if let Some(excess) = excess(length, first, replied) {
                library.write_all(&refusal(sequence, excess)).await?;
                return library.flush().await;
            }
            library.write_all(&header).await?;
            let mut rest = length;
            while rest > 0 {
                if server.buffer().is_empty() {
                    library.flush().await?;
                }
                let piece = server.fill_buf().await?;
                if piece.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                let passed = piece.len().min(rest);
                library.write_all(&piece[..passed]).await?;
                server.consume(passed);
                rest -= passed;
            }
        }
    }
}

/// Returns the bound that is not kept by a packet of this length with this first byte.
fn excess(length: usize, first: Option<u8>, replied: u64) -> Option<&'static str> {
    match first {
        _ if length > LONGEST => {
            Some("the server has sent a packet of more than 1 MiB, which no request asks for")
        }
        _ if replied > MOST => Some("the server has sent more than 8 MiB for one request"),
        // As the first bytes of a row they are those of a text that fills the packet.
        Some(NUMBER_OF_3) if length <= 0xffff => Some(COLUMNS),
        Some(NUMBER_OF_8) if length > LONGEST_END => Some(COLUMNS),
        _ => None,
    }
}

const COLUMNS: &str = "the server has promised columns without number";

/// Returns the packet with which a server says that a request has failed.
fn refusal(sequence: u8, reason: &str) -> Vec<u8> {
    let mut packet = vec![0, 0, 0, sequence, ERR];
    packet.extend(code::MALFORMED_PACKET.to_le_bytes());
    packet.extend(b"#HY000");
    packet.extend(reason.as_bytes());
    let length = u32::try_from(packet.len() - 4).unwrap_or_default().to_le_bytes();
    packet[..3].copy_from_slice(&length[..3]);
    packet
}

impl<S: AsyncRead + Unpin> AsyncRead for Requests<'_, S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        this.replied.0.store(0, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{io::duplex, time::timeout};

    use super::*;

    /// Each is its length, its number, and its bytes.
    const PACKETS: &[u8] = &[1, 0, 0, 1, b'a', 0, 0, 0, 2, 2, 0, 0, 3, b'b', b'c'];
    /// Where they begin and end.
    const ENDS: [usize; 4] = [0, 5, 9, 15];

    /// The library's socket, with a wake-up for each write.
    #[derive(Default)]
    struct Writes(Vec<Vec<u8>>);

    impl AsyncWrite for Writes {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.get_mut().0.push(bytes.to_vec());
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_comes_together_is_passed_on_together() {
        let mut writes = Writes::default();
        let ended = Replied::default().pass_on(PACKETS, &mut writes).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(writes.0, [PACKETS]);
    }

    #[tokio::test]
    async fn a_packet_does_not_wait_for_the_rest_of_the_next() {
        for come in 0..=PACKETS.len() {
            let whole = ENDS.into_iter().rfind(|end| *end <= come).unwrap();
            let (mut server, from_server) = duplex(64);
            let (to_library, mut library) = duplex(64);
            let replied = Replied::default();
            let reads = async {
                server.write_all(&PACKETS[..come]).await.unwrap();
                let mut read = vec![0; whole];
                library.read_exact(&mut read).await.unwrap();
                assert_eq!(read, PACKETS[..whole]);
            };
            tokio::select! {
                ended = replied.pass_on(from_server, to_library) => panic!("{come}: {ended:?}"),
                read = timeout(Duration::from_secs(10), reads) => {
                    read.unwrap_or_else(|_| panic!("{come}: {whole} bytes are due"));
                }
            }
        }
    }
}
