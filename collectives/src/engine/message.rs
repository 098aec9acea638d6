//! Control messages between engines. Bytes of a peer are hostile until decoded: every read is
//! checked, every text has a limit, and bytes that do not decode are ignored.
//!
//! A message is a byte that names its kind, then words of 64 bits in little endian. A text is a
//! word with its length, then its bytes.

use pleach_transport::{MESSAGE_BYTES_MAX, RegionKey, RemoteSlice};
use pleach_vocabulary::Rank;

use super::Stream;
use super::agreement::Claim;
use super::deadlock::BlockedCall;
use super::status_board::{Comparison, Record};

/// Appends words to a message.
pub(super) fn put_words(message: &mut Vec<u8>, words: impl IntoIterator<Item = u64>) {
    message.extend(words.into_iter().flat_map(u64::to_le_bytes));
}

/// Appends a text to a message.
pub(super) fn put_bytes(message: &mut Vec<u8>, bytes: &[u8]) {
    put_words(message, [bytes.len() as u64]);
    message.extend(bytes);
}

/// Takes the next words off a message; `None`: it is too short.
pub(super) fn take_words<const WORDS: usize>(message: &mut &[u8]) -> Option<[u64; WORDS]> {
    let mut words = [0; WORDS];
    for word in &mut words {
        let (value, rest) = message.split_first_chunk::<8>()?;
        *word = u64::from_le_bytes(*value);
        *message = rest;
    }
    Some(words)
}

/// Takes the next text of at most `max` bytes off a message.
pub(super) fn take_bytes<'a>(message: &mut &'a [u8], max: usize) -> Option<&'a [u8]> {
    let [len] = take_words(message)?;
    let len = usize::try_from(len).ok().filter(|len| *len <= max)?;
    let (bytes, rest) = message.split_at_checked(len)?;
    *message = rest;
    Some(bytes)
}

// A message is decoded, answered and dropped: few are kept, and not for long.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Where peers put bytes that do not go straight to the caller's buffers.
    Scratch(RemoteSlice),
    /// I am in this run of that stream; what are you doing there?
    Query { stream: Stream, record: Record },
    /// What I am or was doing there. `blocked_on`: the rank that I wait for myself.
    Answer {
        stream: Stream,
        comparison: Comparison,
        record: Record,
        completed: u64,
        blocked_on: Option<Rank>,
    },
    /// Have you entered this run, and in which call are you blocked? `probe` comes back with the
    /// answer.
    Probe { probe: u64, stream: Stream, run: u64 },
    /// Whether I have entered it, and in which call I am blocked.
    ProbeAnswer { probe: u64, stream: Stream, run: u64, has_entered: bool, blocked: Option<BlockedCall> },
    /// The group has failed, and this is what I know of it. `asks`: what do you know?
    Claim { claim: Claim, asks: bool },
    /// Pass this message on: the pair of the two is not connected.
    Routed { from: Rank, to: Rank, message: Vec<u8> },
    /// A message to this rank could not be passed on, because the rank has left.
    Away { rank: Rank },
}

const SCRATCH: u8 = 1;
const QUERY: u8 = 2;
const ANSWER: u8 = 3;
const CLAIM: u8 = 4;
const PROBE: u8 = 5;
const PROBE_ANSWER: u8 = 6;
const ROUTED: u8 = 7;
const AWAY: u8 = 8;

/// The word for no rank.
const NO_RANK: u64 = u64::MAX;

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Scratch(slice) => {
                bytes.push(SCRATCH);
                put_words(&mut bytes, [slice.key.0, slice.offset, slice.len]);
            }
            Self::Query { stream, record } => {
                bytes.push(QUERY);
                put_words(&mut bytes, [stream.to_word()].into_iter().chain(record.words()));
            }
            Self::Answer { stream, comparison, record, completed, blocked_on } => {
                bytes.push(ANSWER);
                put_words(&mut bytes, [stream.to_word(), *comparison as u64]);
                put_words(&mut bytes, record.words());
                put_words(&mut bytes, [*completed, blocked_on.map_or(NO_RANK, u64::from)]);
            }
            Self::Probe { probe, stream, run } => {
                bytes.push(PROBE);
                put_words(&mut bytes, [*probe, stream.to_word(), *run]);
            }
            Self::ProbeAnswer { probe, stream, run, has_entered, blocked } => {
                bytes.push(PROBE_ANSWER);
                put_words(&mut bytes, [*probe, stream.to_word(), *run, u64::from(*has_entered)]);
                put_words(&mut bytes, [u64::from(blocked.is_some())]);
                put_words(&mut bytes, blocked.iter().flat_map(|blocked| blocked.words()));
            }
            Self::Claim { claim, asks } => {
                bytes.push(CLAIM);
                put_words(&mut bytes, [u64::from(*asks)]);
                claim.write(&mut bytes);
            }
            Self::Routed { from, to, message } => {
                bytes.push(ROUTED);
                put_words(&mut bytes, [u64::from(*from), u64::from(*to)]);
                put_bytes(&mut bytes, message);
            }
            Self::Away { rank } => {
                bytes.push(AWAY);
                put_words(&mut bytes, [u64::from(*rank)]);
            }
        }
        bytes
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (kind, rest) = message.split_first()?;
        let rest = &mut &*rest;
        Some(match *kind {
            SCRATCH => {
                let [key, offset, len] = take_words(rest)?;
                Self::Scratch(RemoteSlice { key: RegionKey(key), offset, len })
            }
            QUERY => {
                let [stream] = take_words(rest)?;
                Self::Query { stream: Stream::from_word(stream), record: Record::of_words(take_words(rest)?) }
            }
            ANSWER => {
                let [stream, comparison] = take_words(rest)?;
                let record = Record::of_words(take_words(rest)?);
                let [completed, blocked_on] = take_words(rest)?;
                let (stream, comparison) = (Stream::from_word(stream), Comparison::from_word(comparison)?);
                Self::Answer {
                    stream,
                    comparison,
                    record,
                    completed,
                    blocked_on: Rank::try_from(blocked_on).ok(),
                }
            }
            PROBE => {
                let [probe, stream, run] = take_words(rest)?;
                Self::Probe { probe, stream: Stream::from_word(stream), run }
            }
            PROBE_ANSWER => {
                let [probe, stream, run, has_entered, is_blocked] = take_words(rest)?;
                let blocked =
                    if is_blocked == 0 { None } else { Some(BlockedCall::of_words(take_words(rest)?)?) };
                let (stream, has_entered) = (Stream::from_word(stream), has_entered != 0);
                Self::ProbeAnswer { probe, stream, run, has_entered, blocked }
            }
            CLAIM => {
                let [asks] = take_words(rest)?;
                Self::Claim { claim: Claim::read(rest)?, asks: asks != 0 }
            }
            ROUTED => {
                let [from, to] = take_words(rest)?;
                let message = take_bytes(rest, MESSAGE_BYTES_MAX)?.to_vec();
                Self::Routed { from: Rank::try_from(from).ok()?, to: Rank::try_from(to).ok()?, message }
            }
            AWAY => {
                let [rank] = take_words(rest)?;
                Self::Away { rank: Rank::try_from(rank).ok()? }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_cut_or_unknown_ones_are_refused() {
        let record = Record::of_words([5, 6, 7, 1, 2, 3, 4]);
        let blocked =
            BlockedCall::of_words([Stream::Messages { from: 1, to: 0 }.to_word(), 3, 8, 4, 5, 6, 7]);
        let messages = [
            Message::Scratch(RemoteSlice { key: RegionKey(9), offset: 1, len: 2 }),
            Message::Query { stream: Stream::Collectives, record },
            Message::Answer {
                stream: Stream::Messages { from: 1, to: 2 },
                comparison: Comparison::Different,
                record,
                completed: 3,
                blocked_on: Some(4),
            },
            Message::Probe { probe: 1, stream: Stream::Collectives, run: 2 },
            Message::ProbeAnswer {
                probe: 1,
                stream: Stream::Messages { from: 1, to: 0 },
                run: 2,
                has_entered: true,
                blocked: None,
            },
            Message::ProbeAnswer {
                probe: 1,
                stream: Stream::Collectives,
                run: 2,
                has_entered: false,
                blocked: Some(blocked.expect("8 is a rank")),
            },
            Message::Routed { from: 3, to: 9, message: vec![1, 2, 3] },
            Message::Away { rank: 5 },
        ];
        for message in messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message));
            for end in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..end]), None);
            }
        }
        assert_eq!(Message::decode(&[200, 0, 0]), None);
    }
}
