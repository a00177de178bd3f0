//! The bound on an answer, also in the form that it takes in memory.
//!
//! An empty key takes two bytes on the wire and fifty times as much in memory. So what is in an answer is counted before it is decoded.
//!
//! Whatever a member sends, a connection keeps little of it: what the windows of HTTP/2 let through ([`CONNECTION_WINDOW`]), for each
//! request one answer that is gathered and one that is decoded ([`MAX_ANSWER`] each), and a list of headers ([`MAX_HEADERS`]). While a client
//! connects, that is one connection and one request at a time for each member.

use std::marker::PhantomData;

use prost::{
    Message,
    bytes::Buf,
    encoding::{WireType, decode_key, decode_varint, skip_field},
};
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
