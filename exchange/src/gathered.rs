//! Messages of RPCs whose long fields lie in lent memory: what is sent in the place of the bytes.
//!
//! ```text
//! 0  'p' 'm' 1 | count | count times: at, reference, start, registered | the bytes without the fields
//!      4         4                      8     48       8        24
//! ```
//!
//! `at` says before which of the bytes a field lies. `start` and `registered` are the part of the
//! sender's memory in which the field can be read over a fabric; where memory is mapped they are
//! zero.
//!
//! **Invariant:** the first byte is zero, with which no protobuf message begins. The fields lie in
//! their order, inside of the bytes. What decodes encodes to the same bytes. Nothing is known of
//! what a reference names until it is accepted.

use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::{RegionKey, RemoteSlice};

use crate::reference::{REFERENCE_BYTES, Reference};

/// Most fields of a message by reference.
pub const FIELDS_MAX: usize = 1 << 10;

/// What each such message begins with: zero, the name, and the version.
const MAGIC: [u8; 4] = [0, b'p', b'm', 1];

/// The beginning and the number of fields, in bytes.
const START_BYTES: usize = 8;

/// A field, in bytes.
const FIELD_BYTES: usize = 8 + REFERENCE_BYTES + 8 + 24;

/// A part of a sender's arena, as its receiver reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredPart {
    /// The first byte of the arena that it holds.
    pub start: u64,
    /// The region of these bytes.
    pub slice: RemoteSlice,
}

impl RegisteredPart {
    /// Nothing.
    pub const NONE: Self = Self { start: 0, slice: RemoteSlice { key: RegionKey::NONE, offset: 0, len: 0 } };

    /// These bytes of the arena, if they are inside.
    #[must_use]
    pub fn of(&self, slice: RemoteSlice) -> Option<RemoteSlice> {
        let start = slice.offset.checked_sub(self.start)?;
        self.slice.slice(start..start.checked_add(slice.len)?).ok()
    }
}

/// A field by reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// How many of the message's own bytes come before it.
    pub at: u64,
    /// Its bytes.
    pub reference: Reference,
    /// Where they can be read over a fabric.
    pub registered: RegisteredPart,
}

/// Where a message by reference begins, of which not all bytes have come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// More bytes are needed: this many in all.
    Needs(usize),
    /// It is an ordinary message.
    Ordinary,
    /// Its fields, and the length of what says so.
    Fields(Vec<Field>, usize),
}

/// The beginning of a message with these fields.
#[must_use]
pub fn encode(fields: &[Field]) -> Vec<u8> {
    let start = Writer::with_capacity(START_BYTES + fields.len() * FIELD_BYTES).raw(&MAGIC);
    let writer = fields.iter().fold(start.u32(fields.len() as u32), |writer, field| {
        let RemoteSlice { key, offset, len } = field.registered.slice;
        let writer = writer.u64(field.at).raw(&field.reference.encode()).u64(field.registered.start);
        writer.u64(key.0).u64(offset).u64(len)
    });
    writer.finish()
}

/// Reads the first bytes of a message of `length` bytes.
///
/// # Errors
///
/// When it begins as a message by reference and is none of this version.
pub fn decode(bytes: &[u8], length: usize) -> Result<Beginning, Malformed> {
    match bytes.first() {
        None if length > 0 => return Ok(Beginning::Needs(1)),
        Some(0) => {}
        _ => return Ok(Beginning::Ordinary),
    }
    if length < START_BYTES {
        return Err(Malformed);
    }
    let Some((start, rest)) = bytes.split_at_checked(START_BYTES) else {
        return Ok(Beginning::Needs(START_BYTES));
    };
    let mut reader = Reader::new(start);
    if reader.array::<4>()? != MAGIC {
        return Err(Malformed);
    }
    let count = reader.u32()? as usize;
    let all = START_BYTES + count.min(FIELDS_MAX) * FIELD_BYTES;
    if count == 0 || count > FIELDS_MAX || all > length {
        return Err(Malformed);
    }
    let Some(rest) = rest.get(..all - START_BYTES) else { return Ok(Beginning::Needs(all)) };
    let (mut reader, mut fields, mut last) = (Reader::new(rest), Vec::with_capacity(count), 0);
    for _ in 0..count {
        let at = reader.u64()?;
        let reference = Reference::decode(&reader.array::<REFERENCE_BYTES>()?).map_err(|_| Malformed)?;
        let start = reader.u64()?;
        let (key, offset, len) = (RegionKey(reader.u64()?), reader.u64()?, reader.u64()?);
        if at < last || at > (length - all) as u64 {
            return Err(Malformed);
        }
        last = at;
        let registered = RegisteredPart { start, slice: RemoteSlice { key, offset, len } };
        fields.push(Field { at, reference, registered });
    }
    Ok(Beginning::Fields(fields, all))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    use super::*;
    use crate::reference::{LeaseNumber, LinkId};

    fn field(at: u64, [link, generation, key, offset, len]: [u64; 5]) -> Field {
        let slice = RemoteSlice { key: RegionKey(key), offset, len };
        let lease = LeaseNumber { slot: 3, generation };
        let registered = RegisteredPart { start: offset, slice: RemoteSlice { offset: 5, ..slice } };
        Field { at, reference: Reference { link: LinkId(link), lease, slice }, registered }
    }

    proptest! {
        #[test]
        fn fields_survive_the_wire_in_whatever_pieces_they_come(
            numbers in prop::collection::vec((0_u64..50, any::<[u64; 5]>()), 1..5),
        ) {
            let mut fields: Vec<Field> = numbers.into_iter().map(|(at, numbers)| field(at, numbers)).collect();
            fields.sort_by_key(|field| field.at);
            let bytes = encode(&fields);
            let length = bytes.len() + 50;
            for end in 0..bytes.len() {
                match decode(&bytes[..end], length).expect("is good so far") {
                    Beginning::Needs(all) => assert!(all > end && all <= bytes.len()),
                    other => panic!("{other:?} of {end} bytes"),
                }
            }
            prop_assert_eq!(decode(&bytes, length), Ok(Beginning::Fields(fields, bytes.len())));
        }

        #[test]
        fn what_decodes_encodes_to_the_same_bytes(count in 0_u32..4, rest in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = [&MAGIC[..], &count.to_le_bytes(), &rest].concat();
            // References of this version, in their order.
            for place in bytes[START_BYTES..].chunks_exact_mut(FIELD_BYTES) {
                place[..8].fill(0);
                place[8..12].copy_from_slice(&[0, b'p', b'r', 1]);
            }
            if let Ok(Beginning::Fields(fields, all)) = decode(&bytes, bytes.len()) {
                prop_assert_eq!(encode(&fields), &bytes[..all]);
            }
        }
    }

    #[test]
    fn an_ordinary_message_is_left_alone_and_a_wrong_one_refused() {
        assert_eq!(decode(&[], 0), Ok(Beginning::Ordinary));
        assert_eq!(decode(&[10, 0], 2), Ok(Beginning::Ordinary));
        let good = encode(&[field(4, [1; 5])]);
        assert_eq!(decode(&good, good.len() + 3), Err(Malformed), "the field lies behind the message");
        let backwards = encode(&[field(2, [1; 5]), field(1, [1; 5])]);
        assert_eq!(decode(&backwards, backwards.len() + 3), Err(Malformed));
        let count = |count: u32| [&MAGIC[..], &count.to_le_bytes()].concat();
        for (bytes, length) in [
            (&[0, b'p', b'm', 2, 1, 0, 0, 0][..], 1_000),
            (&[0][..], 7),
            (&count(0), 1_000),
            (&count(1), 8 + FIELD_BYTES - 1),
            (&count(FIELDS_MAX as u32 + 1), usize::MAX),
        ] {
            assert_eq!(decode(bytes, length), Err(Malformed), "{bytes:?}");
        }
    }
}
