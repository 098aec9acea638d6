//! The header of every signal: which run, with which signature, and where the sender's slices are.
//!
//! | word | |
//! | --- | --- |
//! | 0 | run (48 bits), how many runs before it the sender has not completed yet (8 bits, saturating: no more than
//! | | [`super::at::RUNS_MAX`] are under way), and for how long it has been in this call (8 bits, [`scale`](crate::observe::scale)) |
//! | 1 | signature of the run and all before it |
//! | 2, 3 | key and offset of the sender's input, zero: in scratch. Or the first half of the data |
//! | 4, 5 | key and offset of the sender's output, zero: in scratch. Or the second half of the data |

use pleach_transport::{Inline, RegionKey, SIGNAL_SLOT_PAYLOAD_BYTES};

use super::address::DataWords;
use crate::observe::scale::{step_above, step_ns};

/// What schedules are priced by is what a signal slot carries.
const _: () = assert!(SIGNAL_SLOT_PAYLOAD_BYTES == pleach_schedule::cost::INLINE_BYTES_MAX);

/// Bytes of data that fit beside the header, where the schedule exposes no slices.
pub(super) const INLINE_DATA_BYTES: usize = SIGNAL_SLOT_PAYLOAD_BYTES - HEADER_BYTES;

const HEADER_BYTES: usize = 16;
const RUN_BITS: u32 = 48;
const INCOMPLETE_BITS: u32 = 8;
/// So many or more: then nothing is claimed.
const INCOMPLETE_MAX: u64 = (1 << INCOMPLETE_BITS) - 1;

/// Where a rank's slice is: part of a registered region, or in its scratch when the key is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Landing {
    pub(super) key: RegionKey,
    pub(super) offset: u64,
}

impl Default for Landing {
    fn default() -> Self {
        Self { key: RegionKey::NONE, offset: 0 }
    }
}

impl Landing {
    /// So many bytes further on.
    pub(super) fn at(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) run: u64,
    /// How many runs before `run` are not complete.
    incomplete: u64,
    pub(super) history: u64,
    /// On the scale of times; zero also where nobody has looked at the clock.
    elapsed: u8,
}

impl Header {
    pub(super) fn new(run: u64, history: u64, completed: u64) -> Self {
        Self { run, incomplete: (run - completed.min(run)).min(INCOMPLETE_MAX), history, elapsed: 0 }
    }

    /// How many runs the sender has completed, at least.
    pub(super) fn completed(&self) -> u64 {
        if self.incomplete == INCOMPLETE_MAX { 0 } else { self.run.saturating_sub(self.incomplete) }
    }

    /// Sent when the sender had been in the call for so many nanoseconds.
    pub(super) fn after(self, elapsed_ns: u64) -> Self {
        Self { elapsed: step_above(elapsed_ns), ..self }
    }

    /// How long the sender had been in the call, at most 12.5 % too much.
    pub(super) fn elapsed_ns(&self) -> u64 {
        step_ns(self.elapsed)
    }

    fn words(self) -> [u64; 2] {
        [
            self.run | self.incomplete << RUN_BITS | u64::from(self.elapsed) << (RUN_BITS + INCOMPLETE_BITS),
            self.history,
        ]
    }

    fn payload(self, rest: &[u8]) -> Inline {
        let mut bytes = [0; SIGNAL_SLOT_PAYLOAD_BYTES];
        let [first, second] = self.words().map(u64::to_le_bytes);
        bytes[..8].copy_from_slice(&first);
        bytes[8..HEADER_BYTES].copy_from_slice(&second);
        bytes[HEADER_BYTES..HEADER_BYTES + rest.len()].copy_from_slice(rest);
        Inline::new(&bytes[..HEADER_BYTES + rest.len()]).expect("no longer than a signal slot's payload")
    }

    pub(super) fn alone(self) -> Inline {
        self.payload(&[])
    }

    pub(super) fn with_data(self, data: &[u8]) -> Inline {
        self.payload(data)
    }

    /// As [`Header::with_data`], word by word: what is stored in other pieces than it is read again
    /// makes the processor wait.
    #[inline]
    pub(super) fn with_words(self, data: &DataWords, bytes: usize) -> Inline {
        let [first, second] = self.words().map(u64::to_le);
        Inline::of_words([first, second, data[0], data[1], data[2], data[3]], HEADER_BYTES + bytes)
    }

    /// Header and data of a payload.
    #[inline]
    pub(super) fn decode_words(payload: &[u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8]) -> (Self, DataWords) {
        let [first, history, data @ ..] = *payload;
        (Self::of_words(u64::from_le(first), u64::from_le(history)), data)
    }

    fn of_words(first: u64, history: u64) -> Self {
        Self {
            run: first & ((1 << RUN_BITS) - 1),
            incomplete: first >> RUN_BITS & INCOMPLETE_MAX,
            history,
            elapsed: (first >> (RUN_BITS + INCOMPLETE_BITS)) as u8,
        }
    }

    pub(super) fn with_landings(self, input: Landing, output: Landing) -> Inline {
        let words = [input.key.0, input.offset, output.key.0, output.offset].map(u64::to_le_bytes);
        self.payload(words.as_flattened())
    }

    pub(super) fn decode(payload: &[u8; SIGNAL_SLOT_PAYLOAD_BYTES]) -> Self {
        Self::of_words(word(payload, 0), word(payload, 1))
    }

    /// The data beside the header, as many bytes as the receiver knows there are.
    pub(super) fn data<'a>(&self, payload: &'a [u8; SIGNAL_SLOT_PAYLOAD_BYTES]) -> &'a [u8] {
        &payload[HEADER_BYTES..]
    }

    /// Where the sender's input and output are.
    pub(super) fn landings(payload: &[u8; SIGNAL_SLOT_PAYLOAD_BYTES]) -> (Landing, Landing) {
        let landing = |at| Landing { key: RegionKey(word(payload, at)), offset: word(payload, at + 1) };
        (landing(2), landing(4))
    }
}

fn word(payload: &[u8; SIGNAL_SLOT_PAYLOAD_BYTES], index: usize) -> u64 {
    let bytes = payload[index * 8..index * 8 + 8].try_into().expect("8 bytes");
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_tells_run_signature_progress_and_landings() {
        let header = Header::new(1000, 77, 998).after(5_000_000);
        let landing = Landing { key: RegionKey(5), offset: 64 };
        let payload = header.with_landings(landing, Landing::default());
        let mut bytes = [0; SIGNAL_SLOT_PAYLOAD_BYTES];
        bytes[..payload.len()].copy_from_slice(payload.as_bytes());
        assert_eq!(Header::decode(&bytes), header);
        assert_eq!(Header::decode(&bytes).completed(), 998);
        let elapsed_ns = Header::decode(&bytes).elapsed_ns();
        assert!((5_000_000..5_625_000).contains(&elapsed_ns), "{elapsed_ns}");
        assert_eq!(Header::landings(&bytes), (landing, Landing::default()));
        assert_eq!(Header::new(1 << 20, 0, 0).completed(), 0, "too far behind to say: nothing is claimed");
    }
}
