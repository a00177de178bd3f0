//! The bound on an answer, also in the form that it takes in memory.
//!
//! An empty key takes two bytes on the wire and fifty times as much in memory. So what is in an answer is counted before it is decoded.

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
/// The bytes that a part of an answer takes beside its own, as it does in memory.
const PER_PART: usize = 128;

/// The fields of answers that have the keys within: from a transaction by its responses and their ranges.
const WITHIN: [u32; 2] = [3, 1];

/// Encodes requests, and decodes answers that keep to the bound.
pub(crate) struct BoundedCodec<M, A>(PhantomData<(M, A)>);

pub(crate) struct BoundedDecoder<A>(PhantomData<A>);

impl<M, A> Default for BoundedCodec<M, A> {
    fn default() -> Self {
        Self(PhantomData)
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
        BoundedDecoder(PhantomData)
    }
}

impl<A: Message + Default> Decoder for BoundedDecoder<A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        // What cannot be counted cannot be decoded either.
        let parts = parts(bytes.chunk(), &WITHIN).unwrap_or(0);
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

/// Counts the parts of a message, and those of its parts in these fields, each within the one before.
fn parts(mut message: &[u8], within: &[u32]) -> Result<usize, prost::DecodeError> {
    let mut count = 0_usize;
    while !message.is_empty() {
        let (field, wire_type) = decode_key(&mut message)?;
        if wire_type != WireType::LengthDelimited {
            skip_field(
                wire_type,
                field,
                &mut message,
                prost::encoding::DecodeContext::default(),
            )?;
            continue;
        }
        let length = usize::try_from(decode_varint(&mut message)?).unwrap_or(usize::MAX);
        let (part, rest) = message.split_at(length.min(message.len()));
        count += 1;
        if let Some((first, further)) = within.split_first()
            && *first == field
        {
            // A text, perhaps.
            count += parts(part, further).unwrap_or(0);
        }
        message = rest;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Event, KeyValue, RangeResponse, ResponseOp, TxnResponse, WatchResponse};

    #[test]
    fn parts_are_counted_wherever_they_are() {
        let range = RangeResponse {
            header: None,
            kvs: vec![KeyValue::default(); 5],
            more: true,
        };
        assert_eq!(parts(&range.encode_to_vec(), &WITHIN).unwrap(), 5);
        let watch = WatchResponse {
            events: vec![Event { kind: 1 }; 7],
            ..WatchResponse::default()
        };
        assert_eq!(parts(&watch.encode_to_vec(), &WITHIN).unwrap(), 7);
        let transaction = TxnResponse {
            responses: vec![ResponseOp { range: Some(range) }; 2],
            ..TxnResponse::default()
        };
        assert_eq!(
            parts(&transaction.encode_to_vec(), &WITHIN).unwrap(),
            2 * (1 + 1 + 5)
        );
        assert!(parts(&[0xff; 20], &WITHIN).is_err());
    }
}
