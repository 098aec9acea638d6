//! Control messages between engines. Bytes of a peer are hostile until decoded: every read is
//! checked, every text has a limit, and what does not decode is ignored.

use pleach_transport::{RegionKey, RemoteSlice};
use pleach_vocabulary::Rank;

use super::agreement::Claim;
use super::stream::Stream;
use crate::call::DESCRIPTOR_WORDS;

/// Builds a message.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn new(kind: u8) -> Self {
        Self(vec![kind])
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.u64(bytes.len() as u64);
        self.0.extend(bytes);
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads a message.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let (value, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*value))
    }

    pub(super) fn bytes(&mut self, max: usize) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u64()?).ok().filter(|len| *len <= max && *len <= self.0.len())?;
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(bytes)
    }
}

/// A call that a rank has entered: what queries compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) run: u64,
    /// Of the call itself.
    pub(super) signature: u64,
    /// Of the call and all before it in its stream: what signals carry.
    pub(super) history: u64,
    pub(super) descriptor: [u64; DESCRIPTOR_WORDS],
}

/// What an asked rank says of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Verdict {
    /// It is or was in the same call.
    Same = 0,
    /// It is or was in another call.
    Different = 1,
    /// It is or was in the same call, but an earlier one differed.
    EarlierDiffers = 2,
    /// It has not come that far.
    NotYet = 3,
    /// It was there too long ago to know.
    Forgotten = 4,
}

// A message is decoded, answered and dropped: no list of them is kept.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Where peers put what is not for the caller's own slices.
    Scratch(RemoteSlice),
    /// I am in this run of that stream; what are you doing there?
    Query { stream: Stream, record: Record },
    /// What I am or was doing there.
    /// (`blocked_on`: for whom I wait myself, if I do.)
    Answer { stream: Stream, verdict: Verdict, record: Record, completed: u64, blocked_on: Option<Rank> },
    /// Have you entered this run, and where do you wait? `wave` comes back with the answer.
    Probe { wave: u64, stream: Stream, run: u64 },
    /// Whether I have entered it, and where I wait.
    Standing(Standing),
    /// The group has failed, and this is what I know of it. `asks`: what do you?
    Claim { claim: Claim, asks: bool },
}

/// Where a rank stands that was asked whether it has entered a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) wave: u64,
    pub(super) stream: Stream,
    pub(super) run: u64,
    pub(super) has_entered: bool,
    pub(super) blocked: Option<Blocked>,
}

/// A rank makes no other call before this run of its ends, and that needs a call of `on`, as far as
/// the rank knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocked {
    pub(super) stream: Stream,
    pub(super) run: u64,
    pub(super) descriptor: [u64; DESCRIPTOR_WORDS],
    pub(super) on: Rank,
}

/// Not a rank.
pub(super) const NO_RANK: u64 = u64::MAX;

const SCRATCH: u8 = 1;
const QUERY: u8 = 2;
const ANSWER: u8 = 3;
const CLAIM: u8 = 4;
const PROBE: u8 = 5;
const STANDING: u8 = 6;

impl Record {
    fn write(&self, writer: &mut Writer) {
        [self.run, self.signature, self.history]
            .into_iter()
            .chain(self.descriptor)
            .for_each(|word| writer.u64(word));
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let (run, signature, history) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let mut descriptor = [0; DESCRIPTOR_WORDS];
        for word in &mut descriptor {
            *word = reader.u64()?;
        }
        Some(Self { run, signature, history, descriptor })
    }
}

impl Standing {
    fn write(&self, writer: &mut Writer) {
        let Self { wave, stream, run, has_entered, blocked } = self;
        [*wave, stream.to_word(), *run, u64::from(*has_entered)]
            .into_iter()
            .for_each(|word| writer.u64(word));
        writer.u64(blocked.map_or(NO_RANK, |blocked| u64::from(blocked.on)));
        if let Some(blocked) = blocked {
            let words = [blocked.stream.to_word(), blocked.run].into_iter().chain(blocked.descriptor);
            words.for_each(|word| writer.u64(word));
        }
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let (wave, stream, run) = (reader.u64()?, Stream::from_word(reader.u64()?), reader.u64()?);
        let has_entered = reader.u64()? != 0;
        let mut blocked = None;
        if let Ok(on) = Rank::try_from(reader.u64()?) {
            let (stream, run) = (Stream::from_word(reader.u64()?), reader.u64()?);
            let mut descriptor = [0; DESCRIPTOR_WORDS];
            for word in &mut descriptor {
                *word = reader.u64()?;
            }
            blocked = Some(Blocked { stream, run, descriptor, on });
        }
        Some(Self { wave, stream, run, has_entered, blocked })
    }
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer;
        match self {
            Self::Scratch(slice) => {
                writer = Writer::new(SCRATCH);
                [slice.key.0, slice.offset, slice.len].into_iter().for_each(|word| writer.u64(word));
            }
            Self::Query { stream, record } => {
                writer = Writer::new(QUERY);
                writer.u64(stream.to_word());
                record.write(&mut writer);
            }
            Self::Answer { stream, verdict, record, completed, blocked_on } => {
                writer = Writer::new(ANSWER);
                writer.u64(stream.to_word());
                writer.u64(*verdict as u64);
                record.write(&mut writer);
                writer.u64(*completed);
                writer.u64(blocked_on.map_or(NO_RANK, u64::from));
            }
            Self::Probe { wave, stream, run } => {
                writer = Writer::new(PROBE);
                [*wave, stream.to_word(), *run].into_iter().for_each(|word| writer.u64(word));
            }
            Self::Standing(standing) => {
                writer = Writer::new(STANDING);
                standing.write(&mut writer);
            }
            Self::Claim { claim, asks } => {
                writer = Writer::new(CLAIM);
                writer.u64(u64::from(*asks));
                claim.write(&mut writer);
            }
        }
        writer.finish()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut reader = Reader::new(rest);
        Some(match *kind {
            SCRATCH => {
                let (key, offset, len) = (RegionKey(reader.u64()?), reader.u64()?, reader.u64()?);
                Self::Scratch(RemoteSlice { key, offset, len })
            }
            QUERY => {
                Self::Query { stream: Stream::from_word(reader.u64()?), record: Record::read(&mut reader)? }
            }
            ANSWER => {
                let stream = Stream::from_word(reader.u64()?);
                let verdict = match reader.u64()? {
                    0 => Verdict::Same,
                    1 => Verdict::Different,
                    2 => Verdict::EarlierDiffers,
                    3 => Verdict::NotYet,
                    4 => Verdict::Forgotten,
                    _ => return None,
                };
                let record = Record::read(&mut reader)?;
                let completed = reader.u64()?;
                let blocked_on = Rank::try_from(reader.u64()?).ok();
                Self::Answer { stream, verdict, record, completed, blocked_on }
            }
            CLAIM => {
                let asks = reader.u64()? != 0;
                Self::Claim { claim: Claim::read(&mut reader)?, asks }
            }
            PROBE => Self::Probe {
                wave: reader.u64()?,
                stream: Stream::from_word(reader.u64()?),
                run: reader.u64()?,
            },
            STANDING => Self::Standing(Standing::read(&mut reader)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_cut_or_unknown_ones_are_refused() {
        let record = Record { run: 5, signature: 6, history: 7, descriptor: [1, 2, 3, 4] };
        let messages = [
            Message::Scratch(RemoteSlice { key: RegionKey(9), offset: 1, len: 2 }),
            Message::Query { stream: Stream::Collectives, record },
            Message::Answer {
                stream: Stream::Messages { from: 1, to: 2 },
                verdict: Verdict::Different,
                record,
                completed: 3,
                blocked_on: Some(4),
            },
            Message::Probe { wave: 1, stream: Stream::Collectives, run: 2 },
            Message::Standing(Standing {
                wave: 1,
                stream: Stream::Messages { from: 1, to: 0 },
                run: 2,
                has_entered: true,
                blocked: None,
            }),
            Message::Standing(Standing {
                wave: 1,
                stream: Stream::Collectives,
                run: 2,
                has_entered: false,
                blocked: Some(Blocked {
                    stream: Stream::Messages { from: 1, to: 0 },
                    run: 3,
                    descriptor: [4, 5, 6, 7],
                    on: 8,
                }),
            }),
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
