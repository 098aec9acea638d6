//! The messages of a store's connection: a handshake of fixed sizes, then frames with a length
//! prefix.
//!
//! Pure: bytes in, values out. Bytes that do not decode, or are longer than allowed, are
//! [`Malformed`].

use crate::auth::TAG_BYTES;
use crate::rendezvous::{KEY_BYTES_MAX, REASON_BYTES_MAX, VALUE_BYTES_MAX};
pub(super) use crate::wire::Malformed;
use crate::wire::{Reader, Writer};

/// The first bytes of both ends. They end like an HTTP request, so that an HTTP server answers
/// (with an error) at once.
pub(super) const MAGIC: &[u8; 16] = b"PLEACH STORE\r\n\r\n";

/// Version of this protocol.
pub(super) const VERSION: u16 = 1;

/// Length of [`Hello`] on the wire.
pub(super) const HELLO_BYTES: usize = MAGIC.len() + 2 + TAG_BYTES;

/// Length of [`Proof`] on the wire.
pub(super) const PROOF_BYTES: usize = 8 + TAG_BYTES;

/// Length of [`Verdict`] on the wire.
pub(super) const VERDICT_BYTES: usize = 1 + TAG_BYTES;

/// Most keys in one request; longer waits use several requests.
pub(super) const KEYS_MAX: usize = 256;

/// Longest request, in bytes.
pub(super) const REQUEST_BYTES_MAX: usize = 16 + KEYS_MAX * (4 + KEY_BYTES_MAX);

/// Longest answer, in bytes.
pub(super) const ANSWER_BYTES_MAX: usize = 16 + KEYS_MAX * (4 + VALUE_BYTES_MAX);

/// The first message of either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) challenge: [u8; TAG_BYTES],
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        Writer::default().raw(MAGIC).u16(self.version).raw(&self.challenge).to_array()
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != *MAGIC {
            return Err(Malformed);
        }
        Ok(Self { version: reader.u16()?, challenge: reader.array()? })
    }

    /// Whether `bytes` can be the beginning of a hello.
    pub(super) fn is_prefix(bytes: &[u8]) -> bool {
        let length = bytes.len().min(MAGIC.len());
        bytes[..length] == MAGIC[..length]
    }
}

/// The dialer's identity, and its proof of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proof {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    pub(super) answer: [u8; TAG_BYTES],
}

impl Proof {
    pub(super) fn encode(&self) -> [u8; PROOF_BYTES] {
        Writer::default().raw(&Self::claim(self.rank, self.world_size)).raw(&self.answer).to_array()
    }

    pub(super) fn decode(bytes: &[u8; PROOF_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        Ok(Self { rank: reader.u32()?, world_size: reader.u32()?, answer: reader.array()? })
    }

    /// The claim of the proof.
    pub(super) fn claim(rank: u32, world_size: u32) -> [u8; 8] {
        Writer::default().u32(rank).u32(world_size).to_array()
    }
}

/// The listener's decision on a dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Admitted; the tag proves that the listener knows the secret too.
    Welcome([u8; TAG_BYTES]),
    /// The dialer did not prove that it knows the secret.
    WrongSecret,
    /// All ranks are here.
    Complete,
}

impl Verdict {
    pub(super) fn encode(&self) -> [u8; VERDICT_BYTES] {
        let (kind, answer) = match self {
            Self::Welcome(answer) => (0, *answer),
            Self::WrongSecret => (1, [0; TAG_BYTES]),
            Self::Complete => (2, [0; TAG_BYTES]),
        };
        Writer::default().u8(kind).raw(&answer).to_array()
    }

    pub(super) fn decode(bytes: &[u8; VERDICT_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            0 => Ok(Self::Welcome(reader.array()?)),
            1 => Ok(Self::WrongSecret),
            2 => Ok(Self::Complete),
            _ => Err(Malformed),
        }
    }
}

/// A request of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Set { key: String, value: Vec<u8> },
    Claim { key: String, value: Vec<u8> },
    Wait { keys: Vec<String>, limit_ms: u64 },
    Fail { reason: String },
    Seal,
}

/// An answer of the store, in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Set, failed or sealed.
    Done,
    /// A claim that succeeded.
    Taken,
    /// A claim of a key that is set, with its value.
    Present(Vec<u8>),
    /// The values of all keys.
    Values(Vec<Vec<u8>>),
    /// Time is up: the missing keys (by index in the request), and the last rank that was refused.
    Missing { places: Vec<u32>, refused: Option<String> },
    /// A rank has ended the rendezvous.
    Failed(String),
    /// The table is full, or the key is set already.
    Refused,
}

impl Request {
    /// The frame with its length prefix.
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        let writer = match self {
            Self::Set { key, value } => writer.u8(0).bytes(key.as_bytes()).bytes(value),
            Self::Claim { key, value } => writer.u8(1).bytes(key.as_bytes()).bytes(value),
            Self::Wait { keys, limit_ms } => {
                let writer = writer.u8(2).u64(*limit_ms).count(keys.len());
                keys.iter().fold(writer, |writer, key| writer.bytes(key.as_bytes()))
            }
            Self::Fail { reason } => writer.u8(3).bytes(reason.as_bytes()),
            Self::Seal => writer.u8(4),
        };
        with_length(&writer.finish())
    }

    /// Decodes a frame without its length prefix.
    pub(super) fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(frame);
        let request = match reader.u8()? {
            0 => {
                Self::Set { key: reader.text(KEY_BYTES_MAX)?, value: reader.bytes(VALUE_BYTES_MAX)?.to_vec() }
            }
            1 => Self::Claim {
                key: reader.text(KEY_BYTES_MAX)?,
                value: reader.bytes(VALUE_BYTES_MAX)?.to_vec(),
            },
            2 => {
                let limit_ms = reader.u64()?;
                let count = reader.count(KEYS_MAX)?;
                let keys = (0..count).map(|_| reader.text(KEY_BYTES_MAX)).collect::<Result<_, _>>()?;
                Self::Wait { keys, limit_ms }
            }
            3 => Self::Fail { reason: reader.text(REASON_BYTES_MAX)? },
            4 => Self::Seal,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(request)
    }
}

impl Answer {
    /// The frame with its length prefix.
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        let writer = match self {
            Self::Done => writer.u8(0),
            Self::Taken => writer.u8(1),
            Self::Present(value) => writer.u8(2).bytes(value),
            Self::Values(values) => {
                values.iter().fold(writer.u8(3).count(values.len()), |writer, value| writer.bytes(value))
            }
            Self::Missing { places, refused } => {
                let refused = refused.as_deref().unwrap_or_default();
                let writer = writer.u8(4).bytes(refused.as_bytes()).count(places.len());
                places.iter().fold(writer, |writer, place| writer.u32(*place))
            }
            Self::Failed(reason) => writer.u8(5).bytes(reason.as_bytes()),
            Self::Refused => writer.u8(6),
        };
        with_length(&writer.finish())
    }

    /// Decodes a frame without its length prefix.
    pub(super) fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(frame);
        let answer = match reader.u8()? {
            0 => Self::Done,
            1 => Self::Taken,
            2 => Self::Present(reader.bytes(VALUE_BYTES_MAX)?.to_vec()),
            3 => {
                let count = reader.count(KEYS_MAX)?;
                let values = (0..count).map(|_| reader.bytes(VALUE_BYTES_MAX).map(<[u8]>::to_vec));
                Self::Values(values.collect::<Result<_, _>>()?)
            }
            4 => {
                let refused = Some(reader.text(REASON_BYTES_MAX)?).filter(|text| !text.is_empty());
                let count = reader.count(KEYS_MAX)?;
                Self::Missing { places: (0..count).map(|_| reader.u32()).collect::<Result<_, _>>()?, refused }
            }
            5 => Self::Failed(reader.text(REASON_BYTES_MAX)?),
            6 => Self::Refused,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(answer)
    }
}

/// The first whole frame in `bytes` (without its length) and the number of bytes it takes; `None`:
/// more are needed.
pub(super) fn frame(bytes: &[u8], bytes_max: usize) -> Result<Option<(&[u8], usize)>, Malformed> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(Malformed);
    }
    Ok(rest.get(..length).map(|frame| (frame, 4 + length)))
}

/// A frame after its length.
fn with_length(frame: &[u8]) -> Vec<u8> {
    Writer::default().bytes(frame).finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests() -> impl Strategy<Value = Request> {
        let key = "[a-z0-9/-]{1,20}";
        let value = || proptest::collection::vec(any::<u8>(), 0..100);
        prop_oneof![
            (key, value()).prop_map(|(key, value)| Request::Set { key, value }),
            (key, value()).prop_map(|(key, value)| Request::Claim { key, value }),
            (proptest::collection::vec(key, 0..9), any::<u64>())
                .prop_map(|(keys, limit_ms)| Request::Wait { keys, limit_ms }),
            ".{0,40}".prop_map(|reason| Request::Fail { reason }),
            Just(Request::Seal),
        ]
    }

    fn answers() -> impl Strategy<Value = Answer> {
        let value = || proptest::collection::vec(any::<u8>(), 0..100);
        prop_oneof![
            Just(Answer::Done),
            Just(Answer::Taken),
            value().prop_map(Answer::Present),
            proptest::collection::vec(value(), 0..9).prop_map(Answer::Values),
            (proptest::collection::vec(any::<u32>(), 0..9), proptest::option::of(".{1,40}"))
                .prop_map(|(places, refused)| Answer::Missing { places, refused }),
            ".{0,40}".prop_map(Answer::Failed),
            Just(Answer::Refused),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_to_itself_and_no_beginning_of_it_decodes(request in requests(), answer in answers()) {
            let bytes = request.encode();
            let (inside, taken) = frame(&bytes, REQUEST_BYTES_MAX).unwrap().unwrap();
            prop_assert_eq!(taken, bytes.len());
            prop_assert_eq!(Request::decode(inside), Ok(request));
            for length in 0..bytes.len() {
                prop_assert_eq!(frame(&bytes[..length], REQUEST_BYTES_MAX), Ok(None));
            }
            let bytes = answer.encode();
            let (inside, _) = frame(&bytes, ANSWER_BYTES_MAX).unwrap().unwrap();
            for length in 0..inside.len() {
                prop_assert_eq!(Answer::decode(&inside[..length]), Err(Malformed));
            }
            prop_assert_eq!(Answer::decode(inside), Ok(answer));
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_what_decodes_encodes_to_the_same(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            if let Ok(request) = Request::decode(&bytes) {
                prop_assert_eq!(&request.encode()[4..], &bytes[..]);
            }
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert_eq!(&answer.encode()[4..], &bytes[..]);
            }
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
        assert_eq!(frame(&u32::MAX.to_le_bytes(), REQUEST_BYTES_MAX), Err(Malformed));
    }

    #[test]
    fn the_handshake_decodes_to_itself_and_tells_other_protocols_by_their_first_byte() {
        let hello = Hello { version: 7, challenge: [3; TAG_BYTES] };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let proof = Proof { rank: 3, world_size: 9, answer: [4; TAG_BYTES] };
        assert_eq!(Proof::decode(&proof.encode()), Ok(proof));
        for verdict in [Verdict::Welcome([5; TAG_BYTES]), Verdict::WrongSecret, Verdict::Complete] {
            assert_eq!(Verdict::decode(&verdict.encode()), Ok(verdict));
        }
        assert!(Hello::is_prefix(b"") && Hello::is_prefix(b"PLEA"));
        assert!(!Hello::is_prefix(b"HTTP/1.1 400"));
    }
}
