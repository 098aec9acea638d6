//! A codec of tonic for messages that no program would send: their bytes as they are.

use bytes::{Buf, BufMut};

/// Writes bytes as they are.
#[derive(Default)]
pub(crate) struct Raw;

impl tonic::codec::Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl tonic::codec::Encoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn encode(
        &mut self,
        item: Vec<u8>,
        target: &mut tonic::codec::EncodeBuf<'_>,
    ) -> Result<(), tonic::Status> {
        target.put_slice(&item);
        Ok(())
    }
}

impl tonic::codec::Decoder for Raw {
    type Item = ();
    type Error = tonic::Status;

    fn decode(&mut self, source: &mut tonic::codec::DecodeBuf<'_>) -> Result<Option<()>, tonic::Status> {
        source.advance(source.remaining());
        Ok(Some(()))
    }
}
