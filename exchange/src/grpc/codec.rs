//! The codec of generated code.
//!
//! The encoder has prost write a message twice. First nothing is written: [`Lending`] counts, and
//! lends the long fields, which prost hands over as they are where their type is `Bytes`. Then all
//! but these fields is written behind their references ([`Writing`]). A message of which nothing
//! is lent is written once, as tonic does it. The decoder reads a message that is in pieces
//! ([`Pieces`]): prost takes a field of type `Bytes` out of it without a copy.
//!
//! The limit: the bytes that go inline are copied once, and those that are lent never.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use tonic::Status;
use tonic::codec::{DecodeBuf, EncodeBuf};

use super::fields::{self, Lender};
use crate::endpoint::InlineReason;
use crate::gathered::{self, Beginning, FIELDS_MAX, Field};

/// Shorter fields are copied: that costs less than a lease.
pub(crate) const FIELD_BYTES_MIN: usize = 16 << 10;

/// A codec of protobuf whose long fields go by reference: for `codec_path` of `tonic-prost-build`.
pub struct Codec<E, D> {
    messages: PhantomData<fn(E) -> D>,
}

/// The encoder of a [`Codec`].
pub struct Encoder<E> {
    message: PhantomData<fn(E)>,
}

/// The decoder of a [`Codec`].
pub struct Decoder<D> {
    message: PhantomData<fn() -> D>,
}

impl<E, D> Default for Codec<E, D> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<E, D> tonic::codec::Codec for Codec<E, D>
where
    E: Message + 'static,
    D: Message + Default + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = Encoder<E>;
    type Decoder = Decoder<D>;

    fn encoder(&mut self) -> Encoder<E> {
        Encoder { message: PhantomData }
    }

    fn decoder(&mut self) -> Decoder<D> {
        Decoder { message: PhantomData }
    }
}

impl<E: Message> tonic::codec::Encoder for Encoder<E> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, message: E, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let length = message.encoded_len();
        // Shorter messages have no long field.
        let lender = if length < FIELD_BYTES_MIN { None } else { fields::lender() };
        let refusal = lender.as_deref().and_then(|lender| Some((lender, lender.refusal()?)));
        let fields = lender.clone().filter(|_| refusal.is_none()).map_or_else(Vec::new, |lender| {
            let mut lending = Lending { lender, written: 0, fields: Vec::new(), scratch: [0; SCRATCH_BYTES] };
            message.encode_raw(&mut lending);
            lending.fields
        });
        if fields.is_empty() {
            target.reserve(length);
        } else {
            target.put_slice(&gathered::encode(&fields));
        }
        if fields.is_empty() && refusal.is_none() {
            message.encode_raw(target);
        } else {
            message.encode_raw(&mut Writing { target, written: 0, fields: &fields, refusal });
        }
        Ok(())
    }
}

impl<D: Message + Default> tonic::codec::Decoder for Decoder<D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let wrong = |error: prost::DecodeError| Status::internal(error.to_string());
        if source.chunk().first() != Some(&0) {
            return D::decode(source).map(Some).map_err(wrong);
        }
        let whole = source.copy_to_bytes(source.remaining());
        let pieces = Pieces::of(&whole)?;
        D::decode(pieces).map(Some).map_err(wrong)
    }
}

/// Where numbers of a message are written that are only counted, in bytes.
const SCRATCH_BYTES: usize = 64;

/// Counts the bytes of a message, and lends its long fields.
struct Lending {
    lender: Arc<Lender>,
    /// The bytes that go inline.
    written: usize,
    fields: Vec<Field>,
    scratch: [u8; SCRATCH_BYTES],
}

// SAFETY: `chunk_mut` is memory of this value, and nothing of it counts as written: `advance_mut`
// counts alone.
unsafe impl BufMut for Lending {
    fn remaining_mut(&self) -> usize {
        usize::MAX - self.written
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        self.written += count;
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        UninitSlice::new(&mut self.scratch)
    }

    fn put<B: Buf>(&mut self, mut source: B) {
        let length = source.remaining();
        if length >= FIELD_BYTES_MIN && source.chunk().len() == length {
            if self.fields.len() >= FIELDS_MAX {
                self.lender.field_goes_inline(length, InlineReason::Limit);
            } else if let Some((reference, registered)) = self.lender.lend(source.copy_to_bytes(length)) {
                // No copy where the source is `Bytes`, which keeps its memory; prost puts nothing
                // else.
                let at = self.written as u64;
                return self.fields.push(Field { at, reference, registered });
            }
        }
        self.written += length;
    }

    fn put_slice(&mut self, source: &[u8]) {
        self.written += source.len();
    }
}

/// Writes a message without the fields that were lent, or counts the long fields where none may be.
struct Writing<'a, 'b> {
    target: &'a mut EncodeBuf<'b>,
    written: usize,
    /// Those that have not been passed.
    fields: &'a [Field],
    /// Who lends nothing, and why.
    refusal: Option<(&'a Lender, InlineReason)>,
}

// SAFETY: all is done by the target, but for what is left out.
unsafe impl BufMut for Writing<'_, '_> {
    fn remaining_mut(&self) -> usize {
        self.target.remaining_mut()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        self.written += count;
        // SAFETY: the caller's promise: so many bytes of `chunk_mut` were written.
        unsafe { self.target.advance_mut(count) };
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.target.chunk_mut()
    }

    fn put<B: Buf>(&mut self, source: B) {
        let length = source.remaining();
        if let [field, rest @ ..] = self.fields
            && (field.at, field.reference.slice.len) == (self.written as u64, length as u64)
        {
            self.fields = rest;
            return;
        }
        if length >= FIELD_BYTES_MIN
            && let Some((lender, reason)) = self.refusal
        {
            lender.field_goes_inline(length, reason);
        }
        self.written += length;
        self.target.put(source);
    }

    fn put_slice(&mut self, source: &[u8]) {
        self.written += source.len();
        self.target.put_slice(source);
    }
}

/// A message by reference as it is decoded. Clones share the bytes.
#[derive(Clone)]
pub(crate) struct Pieces {
    pieces: VecDeque<Bytes>,
    left: usize,
}

impl Pieces {
    /// The message of these bytes, which begin with a zero, with the fields that were accepted for
    /// it.
    pub(crate) fn of(whole: &Bytes) -> Result<Self, Status> {
        let malformed = || Status::internal("a message by reference is malformed");
        let decoded = gathered::decode(whole, whole.len()).map_err(|_| malformed())?;
        let Beginning::Fields(fields, start) = decoded else { return Err(malformed()) };
        let (mut own, mut passed, mut pieces) = (whole.slice(start..), 0, VecDeque::new());
        for field in fields {
            let bytes = fields::take(&(field.reference.link, field.reference.lease)).ok_or_else(|| {
                let text = "a message by reference came to a program that has not accepted it; open the \
                            channel by pleach_exchange::grpc::connect, and add its Layer to the server";
                Status::internal(text)
            })?;
            // In their order and inside of the message: `decode` has checked both.
            let before = own.split_to((field.at - passed) as usize);
            passed = field.at;
            pieces.extend([before, bytes].into_iter().filter(|piece| !piece.is_empty()));
        }
        pieces.extend(Some(own).filter(|own| !own.is_empty()));
        let left = pieces.iter().map(Bytes::len).sum();
        Ok(Self { pieces, left })
    }
}

impl Buf for Pieces {
    fn remaining(&self) -> usize {
        self.left
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| piece)
    }

    fn advance(&mut self, count: usize) {
        assert!(count <= self.left, "{count} of {} bytes", self.left);
        self.left -= count;
        let mut count = count;
        while let Some(piece) = self.pieces.front_mut() {
            let here = count.min(piece.len());
            piece.advance(here);
            count -= here;
            if !piece.is_empty() {
                return;
            }
            self.pieces.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        assert!(length <= self.left, "{length} of {} bytes", self.left);
        if let Some(piece) = self.pieces.front().filter(|piece| piece.len() >= length) {
            let bytes = piece.slice(..length);
            self.advance(length);
            return bytes;
        }
        let mut copied = BytesMut::with_capacity(length);
        copied.put(self.take(length));
        copied.freeze()
    }
}
