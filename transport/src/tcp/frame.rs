//! The frames of a data connection. A pure codec: no I/O, no allocation, no panic.
//!
//! A frame is a header of [`HEADER_BYTES`] and at most [`SIGNAL_SLOT_PAYLOAD_BYTES`] of *extra* (a
//! signal's payload, an atomic's operands). [`Frame::body_bytes`] returns how many bytes of data
//! follow the frame on the stream.
//!
//! **Invariant:** each frame has one encoding. Bytes that do not encode back to themselves are
//! refused, so unused fields are zero and may get a meaning in a later version.

use crate::device::{AtomicOp, ProtocolViolation};
use crate::region::{RegionKey, RemoteSlice};
use crate::signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal};
use crate::wire::Reader;

/// Length of every frame's header, in bytes.
pub const HEADER_BYTES: usize = 40;

/// Longest frame without the data that follows it, in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + SIGNAL_SLOT_PAYLOAD_BYTES;

/// Longest transfer, in bytes. It only bounds the length in a header: data go to their destination,
/// and no buffer of that length is allocated.
pub const TRANSFER_BYTES_MAX: u64 = 1 << 40;

/// Names an operation that awaits an answer, or a put that arrives in several pieces. Its sender
/// chooses it.
pub type Token = u64;

/// A frame of a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Only a signal.
    Signal {
        /// The signal.
        signal: Signal,
    },
    /// Data for the receiver's memory follow.
    Put {
        /// The destination.
        dst: RemoteSlice,
        /// The signal to raise when this piece and all others have arrived.
        signal: Option<Signal>,
        /// Whether the receiver answers [`Frame::Accepted`] when all data have arrived. It always
        /// answers [`Frame::Refused`].
        wants_answer: bool,
        /// Bit `n`: connection `n` carries another piece. Connection 0 carries this one.
        other_connections: u8,
        /// Names the put.
        token: Token,
    },
    /// Another piece of a put that connection 0 has announced; its data follow.
    Piece {
        /// The destination.
        dst: RemoteSlice,
        /// Names the put.
        token: Token,
    },
    /// Requests bytes of the receiver's memory.
    Get {
        /// The source.
        src: RemoteSlice,
        /// The connection that the answer uses.
        connection: u8,
        /// Names the request.
        token: Token,
    },
    /// The requested data follow.
    GetReply {
        /// Their length, in bytes.
        len: u64,
        /// Names the request.
        token: Token,
    },
    /// Requests an atomic operation on a word of the receiver's memory.
    Atomic {
        /// The region.
        key: RegionKey,
        /// The word's offset in the region, in bytes.
        offset: u64,
        /// The operation.
        op: AtomicOp,
        /// Names the request.
        token: Token,
    },
    /// The result of an atomic operation.
    AtomicReply {
        /// The word's value before the operation.
        old: u64,
        /// Names the request.
        token: Token,
    },
    /// All data of a put have arrived.
    Accepted {
        /// The key that it used.
        key: RegionKey,
        /// Length of the key's region, in bytes: puts inside it need no answer until the key is
        /// revoked.
        region_bytes: u64,
        /// Names the put.
        token: Token,
    },
    /// A put, get or atomic named memory that does not exist; no byte was read or written.
    Refused {
        /// The key that it used.
        key: RegionKey,
        /// Names the operation.
        token: Token,
    },
    /// The sender's drain is behind all that it has submitted on this connection.
    DrainMark,
    /// The receiver's next drain marks have come, and all from before them is answered on this
    /// connection.
    DrainAnswer,
    /// The last frame.
    Bye,
}

/// The bytes of a frame.
#[derive(Clone, Copy)]
pub struct Encoded {
    bytes: [u8; FRAME_BYTES_MAX],
    len: u8,
}

impl Encoded {
    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len()]
    }

    /// Their number.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Always false: a frame has a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

const SIGNAL: u8 = 1;
const PUT: u8 = 2;
const PIECE: u8 = 3;
const GET: u8 = 4;
const REPLY_TO_GET: u8 = 5;
const ATOMIC: u8 = 6;
const REPLY_TO_ATOMIC: u8 = 7;
const ACCEPTED: u8 = 8;
const REFUSED: u8 = 9;
const BYE: u8 = 10;
const DRAIN_MARK: u8 = 11;
const DRAIN_ANSWER: u8 = 12;

const FLAG_SIGNAL: u8 = 1;
const FLAG_ANSWERED: u8 = 2;

const ATOMIC_ADD: u8 = 1;
const ATOMIC_COMPARE_SWAP: u8 = 2;

/// A decoded header without its meaning. On the wire, little endian: kind (1 byte), flags (1),
/// signal slot (2), extra's length (1), auxiliary (1), zero (2), key (8), offset (8), length (8),
/// token (8), then the extra bytes.
#[derive(Clone, Copy)]
struct Fields {
    kind: u8,
    flags: u8,
    signal_slot: u16,
    auxiliary: u8,
    key: u64,
    offset: u64,
    length: u64,
    token: u64,
    extra: Inline,
}

impl Fields {
    const fn new(kind: u8) -> Self {
        Self {
            kind,
            flags: 0,
            signal_slot: 0,
            auxiliary: 0,
            key: 0,
            offset: 0,
            length: 0,
            token: 0,
            extra: Inline::EMPTY,
        }
    }

    fn slice(mut self, slice: &RemoteSlice) -> Self {
        (self.key, self.offset, self.length) = (slice.key.0, slice.offset, slice.len);
        self
    }

    fn signal(mut self, signal: &Signal) -> Self {
        self.flags |= FLAG_SIGNAL;
        (self.signal_slot, self.extra) = (signal.signal_slot, signal.payload);
        self
    }

    fn to_slice(self) -> RemoteSlice {
        RemoteSlice { key: RegionKey(self.key), offset: self.offset, len: self.length }
    }

    fn to_signal(self) -> Option<Signal> {
        (self.flags & FLAG_SIGNAL != 0)
            .then_some(Signal { signal_slot: self.signal_slot, payload: self.extra })
    }

    fn write(self) -> Encoded {
        let mut bytes = [0; FRAME_BYTES_MAX];
        bytes[0] = self.kind;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.signal_slot.to_le_bytes());
        bytes[4] = self.extra.len() as u8;
        bytes[5] = self.auxiliary;
        bytes[8..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.token.to_le_bytes());
        let len = HEADER_BYTES + self.extra.len();
        bytes[HEADER_BYTES..len].copy_from_slice(self.extra.as_bytes());
        Encoded { bytes, len: len as u8 }
    }

    /// `None`: more bytes are needed.
    fn read(bytes: &[u8]) -> Result<Option<Self>, ProtocolViolation> {
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let mut reader = Reader::new(header);
        let ([kind, flags], signal_slot) = (reader.array()?, reader.u16()?);
        let [extra_bytes, auxiliary, _, _] = reader.array()?;
        let extra_bytes = usize::from(extra_bytes);
        if extra_bytes > SIGNAL_SLOT_PAYLOAD_BYTES {
            return Err(ProtocolViolation::OversizedFrame);
        }
        let Some(extra) = bytes.get(HEADER_BYTES..HEADER_BYTES + extra_bytes) else { return Ok(None) };
        Ok(Some(Self {
            kind,
            flags,
            signal_slot,
            auxiliary,
            key: reader.u64()?,
            offset: reader.u64()?,
            length: reader.u64()?,
            token: reader.u64()?,
            extra: Inline::new(extra).unwrap_or(Inline::EMPTY),
        }))
    }

    fn operation(&self) -> Option<AtomicOp> {
        let (operands, _) = self.extra.as_bytes().as_chunks::<8>();
        match (self.auxiliary, operands) {
            (ATOMIC_ADD, [value]) => Some(AtomicOp::Add(u64::from_le_bytes(*value))),
            (ATOMIC_COMPARE_SWAP, [expected, new]) => Some(AtomicOp::CompareSwap {
                expected: u64::from_le_bytes(*expected),
                new: u64::from_le_bytes(*new),
            }),
            _ => None,
        }
    }
}

impl Frame {
    /// The frame at the beginning of `bytes` and its length; `None` when more bytes are needed. A
    /// frame never needs more than [`FRAME_BYTES_MAX`].
    ///
    /// # Errors
    ///
    /// When the bytes are no frame, whatever follows them.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolViolation> {
        let Some(fields) = Fields::read(bytes)? else { return Ok(None) };
        let (token, key) = (fields.token, RegionKey(fields.key));
        let frame = match fields.kind {
            SIGNAL => fields.to_signal().map(|signal| Self::Signal { signal }),
            PUT => Some(Self::Put {
                dst: fields.to_slice(),
                signal: fields.to_signal(),
                wants_answer: fields.flags & FLAG_ANSWERED != 0,
                other_connections: fields.auxiliary,
                token,
            }),
            PIECE => Some(Self::Piece { dst: fields.to_slice(), token }),
            GET => Some(Self::Get { src: fields.to_slice(), connection: fields.auxiliary, token }),
            REPLY_TO_GET => Some(Self::GetReply { len: fields.length, token }),
            ATOMIC => fields.operation().map(|op| Self::Atomic { key, offset: fields.offset, op, token }),
            REPLY_TO_ATOMIC => Some(Self::AtomicReply { old: fields.length, token }),
            ACCEPTED => Some(Self::Accepted { key, region_bytes: fields.length, token }),
            REFUSED => Some(Self::Refused { key, token }),
            DRAIN_MARK => Some(Self::DrainMark),
            DRAIN_ANSWER => Some(Self::DrainAnswer),
            BYE => Some(Self::Bye),
            _ => None,
        };
        let frame = frame.ok_or(ProtocolViolation::MalformedFrame)?;
        if frame.body_bytes() > TRANSFER_BYTES_MAX {
            return Err(ProtocolViolation::OversizedFrame);
        }
        // The invariant of the module: one encoding for each frame. Comparing forty bytes costs
        // less than checking every field.
        let encoded = frame.encode();
        if !bytes.starts_with(encoded.as_bytes()) {
            return Err(ProtocolViolation::MalformedFrame);
        }
        Ok(Some((frame, encoded.len())))
    }

    /// Encodes the frame.
    #[must_use]
    pub fn encode(&self) -> Encoded {
        self.fields().write()
    }

    fn fields(&self) -> Fields {
        match *self {
            Self::Signal { signal } => Fields::new(SIGNAL).signal(&signal),
            Self::Put { dst, signal, wants_answer, other_connections, token } => {
                let mut fields = Fields::new(PUT).slice(&dst);
                if let Some(signal) = &signal {
                    fields = fields.signal(signal);
                }
                fields.flags |= if wants_answer { FLAG_ANSWERED } else { 0 };
                Fields { auxiliary: other_connections, token, ..fields }
            }
            Self::Piece { dst, token } => Fields { token, ..Fields::new(PIECE).slice(&dst) },
            Self::Get { src, connection, token } => {
                Fields { auxiliary: connection, token, ..Fields::new(GET).slice(&src) }
            }
            Self::GetReply { len, token } => Fields { length: len, token, ..Fields::new(REPLY_TO_GET) },
            Self::Atomic { key, offset, op, token } => {
                let (auxiliary, operands, len) = match op {
                    AtomicOp::Add(value) => (ATOMIC_ADD, [value, 0], 8),
                    AtomicOp::CompareSwap { expected, new } => (ATOMIC_COMPARE_SWAP, [expected, new], 16),
                };
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&operands[0].to_le_bytes());
                bytes[8..].copy_from_slice(&operands[1].to_le_bytes());
                let extra = Inline::new(&bytes[..len]).unwrap_or(Inline::EMPTY);
                Fields { auxiliary, key: key.0, offset, token, extra, ..Fields::new(ATOMIC) }
            }
            Self::AtomicReply { old, token } => Fields { length: old, token, ..Fields::new(REPLY_TO_ATOMIC) },
            Self::Accepted { key, region_bytes, token } => {
                Fields { key: key.0, length: region_bytes, token, ..Fields::new(ACCEPTED) }
            }
            Self::Refused { key, token } => Fields { key: key.0, token, ..Fields::new(REFUSED) },
            Self::DrainMark => Fields::new(DRAIN_MARK),
            Self::DrainAnswer => Fields::new(DRAIN_ANSWER),
            Self::Bye => Fields::new(BYE),
        }
    }

    /// How many bytes of data follow the frame.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        match self {
            Self::Put { dst, .. } | Self::Piece { dst, .. } => dst.len,
            Self::GetReply { len, .. } => *len,
            _ => 0,
        }
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
