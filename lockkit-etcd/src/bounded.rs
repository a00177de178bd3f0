//! The bound on an answer, also in the form that it takes in memory.
//!
//! An empty key takes two bytes on the wire and fifty times as much in memory. So what is in an answer is counted before it is decoded.
//!
//! Whatever a member sends, a connection keeps little of it: what the windows of HTTP/2 let through ([`CONNECTION_WINDOW`]), for each
//! request one answer that is gathered and one that is decoded ([`MAX_ANSWER`] each), and a list of headers ([`MAX_HEADERS`]). While a client
//! connects, that is one connection and one request at a time for each member.
//!
//! Of lists of headers there may be any number before an answer (1xx), which HTTP/2 skips. So they are counted as they come.

use std::{
    io,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll, ready},
};

use prost::{
    Message,
    bytes::Buf,
    encoding::{WireType, decode_key, decode_varint, skip_field},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder},
};
use tonic_prost::{ProstCodec, ProstEncoder};

/// The most bytes of an answer: a queue of some ten thousand contenders has a tenth of it.
pub(crate) const MAX_ANSWER: usize = 16 << 20;
/// The most bytes of the body of one answer that are there before they are asked for, and of all those on a connection.
pub(crate) const STREAM_WINDOW: u32 = 1 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 4 << 20;
/// The most bytes of the headers of an answer, and of those after it.
pub(crate) const MAX_HEADERS: u32 = 16 << 10;
/// The bytes that a part of an answer takes beside its own, as it does in memory.
const PER_PART: usize = 128;

/// The fields of answers that have the keys within: from a transaction by its responses and their ranges.
const WITHIN: [u32; 2] = [3, 1];

/// Encodes requests, and decodes answers that keep to the bound.
pub(crate) struct BoundedCodec<M, A> {
    most: usize,
    types: PhantomData<(M, A)>,
}

pub(crate) struct BoundedDecoder<A> {
    /// The number of answers that may come yet.
    left: usize,
    answers: PhantomData<A>,
}

impl<M, A> BoundedCodec<M, A> {
    /// There is one answer. Another one is an error: whoever waited for the end of them would take as many as the member sends.
    pub(crate) fn for_one() -> Self {
        Self::of(1)
    }

    /// There are as many answers as are asked for.
    pub(crate) fn for_many() -> Self {
        Self::of(usize::MAX)
    }

    fn of(most: usize) -> Self {
        Self {
            most,
            types: PhantomData,
        }
    }
}

impl<M, A> Codec for BoundedCodec<M, A>
where
    M: Message + Default + 'static,
    A: Message + Default + 'static,
{
    type Encode = M;
    type Decode = A;
    type Encoder = ProstEncoder<M>;
    type Decoder = BoundedDecoder<A>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<M, A>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder {
            left: self.most,
            answers: PhantomData,
        }
    }
}

impl<A: Message + Default> Decoder for BoundedDecoder<A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        let Some(left) = self.left.checked_sub(1) else {
            return Err(Status::internal(
                "the member has answered one request more than once",
            ));
        };
        self.left = left;
        let parts = parts(bytes.chunk(), &WITHIN);
        let weight = bytes.remaining().saturating_add(parts.saturating_mul(PER_PART));
        if weight > MAX_ANSWER {
            return Err(Status::resource_exhausted(
                "the member has answered more than 16 MiB, or too many parts, to one request",
            ));
        }
        let answer = A::decode(bytes);
        answer
            .map(Some)
            .map_err(|error| Status::internal(format!("the member's answer is none: {error}")))
    }
}

/// Counts the parts of a message, and those of its parts in these fields, each within the one before: up to what cannot be read, since what
/// stands before that is decoded all the same.
fn parts(mut message: &[u8], within: &[u32]) -> usize {
    let mut count = 0_usize;
    while !message.is_empty() {
        let Ok((field, wire_type)) = decode_key(&mut message) else {
            break;
        };
        if wire_type != WireType::LengthDelimited {
            let context = prost::encoding::DecodeContext::default();
            if skip_field(wire_type, field, &mut message, context).is_err() {
                break;
            }
            continue;
        }
        let Ok(length) = decode_varint(&mut message) else {
            break;
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (part, rest) = message.split_at(length.min(message.len()));
        count += 1;
        if let Some((first, further)) = within.split_first()
            && *first == field
        {
            // A text, perhaps.
            count += parts(part, further);
        }
        message = rest;
    }
    count
}

/// The bytes in front of each frame of HTTP/2: its length in three, its kind, its flags, and its stream.
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
/// The bytes of headers that a stream gives leave for when it ends: those of its answer, and those after it.
const PER_STREAM: usize = 2 * (MAX_HEADERS as usize + PER_PART);

/// A connection that fails once its member has sent more headers than the answers to any requests have.
#[derive(Debug)]
pub(crate) struct BoundedHeaders<S> {
    stream: S,
    frames: Frames,
}

/// The frames that have come on a connection.
#[derive(Debug, Default)]
struct Frames {
    /// The head of the next one, as far as it is there.
    head: [u8; HEAD],
    known: usize,
    /// The bytes of the last one that are still to come.
    rest: usize,
    /// The bytes of headers beyond those of streams that have ended.
    weight: usize,
}

impl<S> BoundedHeaders<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            frames: Frames::default(),
        }
    }
}

impl Frames {
    /// Takes note of what has come. Returns `false` if the headers are too many.
    fn note(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let skipped = self.rest.min(bytes.len());
            self.rest -= skipped;
            bytes = &bytes[skipped..];
            let (head, rest) = bytes.split_at(bytes.len().min(HEAD - self.known));
            self.head[self.known..self.known + head.len()].copy_from_slice(head);
            self.known += head.len();
            bytes = rest;
            if self.known == HEAD {
                self.known = 0;
                self.begin();
            }
        }
        self.weight <= MAX_ANSWER
    }

    fn begin(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.head;
        self.rest = u32::from_be_bytes([0, high, middle, low]) as usize;
        if matches!(kind, HEADERS | CONTINUATION) {
            self.weight = self.weight.saturating_add(self.rest + PER_PART);
        }
        if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
            self.weight = self.weight.saturating_sub(PER_STREAM);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedHeaders<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
        if this.frames.note(&buffer.filled()[before..]) {
            return Poll::Ready(Ok(()));
        }
        let reason = "the member has sent more than 16 MiB of headers that are no answer's";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, reason)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedHeaders<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Event, KeyValue, RangeResponse, ResponseOp, TxnResponse, WatchResponse};

    fn range_of(keys: usize) -> RangeResponse {
        RangeResponse {
            header: None,
            kvs: vec![KeyValue::default(); keys],
            more: true,
        }
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn headers_without_an_answer_have_an_end() {
        let taken = |bytes: &[u8], piece: usize| {
            let mut frames = Frames::default();
            (0..1_000)
                .take_while(|_| bytes.chunks(piece).all(|piece| frames.note(piece)))
                .count()
        };
        let headers = frame(HEADERS, 4, &[7; 60]);
        // A frame of bytes that read as the heads of frames.
        let body = frame(DATA, 0, &frame(HEADERS, 4, &[7; 60]).repeat(2));
        let trailers = frame(HEADERS, 4 | END_STREAM, &[7; 60]);
        let answers = [&headers[..], &body, &trailers].concat().repeat(100);
        for piece in [1_000_000, 4_096, 7] {
            assert_eq!(taken(&answers, piece), 1_000, "in pieces of {piece}");
            assert!(taken(&headers.repeat(100), piece) < 1_000, "in pieces of {piece}");
            let long = [headers.clone(), frame(CONTINUATION, 4, &[7; 10_000])]
                .concat()
                .repeat(10);
            assert!(taken(&long, piece) < 1_000, "in pieces of {piece}");
        }
    }

    #[test]
    fn parts_are_counted_wherever_they_are() {
        let range = range_of(5);
        assert_eq!(parts(&range.encode_to_vec(), &WITHIN), 5);
        let watch = WatchResponse {
            events: vec![Event { kind: 1 }; 7],
            ..WatchResponse::default()
        };
        assert_eq!(parts(&watch.encode_to_vec(), &WITHIN), 7);
        let transaction = TxnResponse {
            responses: vec![ResponseOp { range: Some(range) }; 2],
            ..TxnResponse::default()
        };
        assert_eq!(parts(&transaction.encode_to_vec(), &WITHIN), 2 * (1 + 1 + 5));
        assert_eq!(parts(&[0xff; 20], &WITHIN), 0);
        let torn = [&range_of(5).encode_to_vec()[..], &[0x07]].concat();
        assert_eq!(parts(&torn, &WITHIN), 5, "what is decoded before it fails counts");
    }
}
