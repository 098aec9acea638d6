//! What goes with published elements, and with a write.

use std::fmt;

use pleach_transport::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES};

/// Up to 48 bytes that go with published elements or with a write, for the caller's own use: a
/// clock, a step, a kind. Bytes that are not given are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word([u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8]);

impl Word {
    /// Zeros.
    pub const EMPTY: Self = Self([0; SIGNAL_SLOT_PAYLOAD_BYTES / 8]);

    /// These bytes. `None`: there are more than 48.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut word = Self::EMPTY;
        bytemuck::bytes_of_mut(&mut word.0).get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(word)
    }

    /// Its 48 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; SIGNAL_SLOT_PAYLOAD_BYTES] {
        bytemuck::cast_ref(&self.0)
    }

    /// The first eight bytes as a number: the opposite of `Word::from`.
    #[must_use]
    pub fn number(&self) -> u64 {
        u64::from_le(self.0[0])
    }

    /// The payload of a signal.
    pub(crate) fn payload(self) -> Inline {
        Inline::of_words(self.0, SIGNAL_SLOT_PAYLOAD_BYTES)
    }

    /// The opposite of [`Word::payload`].
    pub(crate) fn of_payload(words: [u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8]) -> Self {
        Self(words)
    }
}

impl Default for Word {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl From<u64> for Word {
    fn from(number: u64) -> Self {
        let mut word = Self::EMPTY;
        word.0[0] = number.to_le();
        word
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.as_bytes();
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write!(formatter, "Word({:?})", &bytes[..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_what_was_given_and_at_most_48_bytes() {
        assert_eq!(Word::new(&[7; 49]), None);
        let word = Word::new(&[7; 48]).expect("as many as fit");
        assert_eq!(word.as_bytes(), &[7; 48]);
        assert_eq!(Word::of_payload(*bytemuck::from_bytes(word.payload().as_bytes())), word);
        assert_eq!(Word::from(0x0102).as_bytes()[..3], [2, 1, 0]);
        assert_eq!((Word::from(u64::MAX).number(), Word::EMPTY.number()), (u64::MAX, 0));
        assert_eq!(format!("{:?}", Word::new(&[1, 0, 2]).expect("three bytes")), "Word([1, 0, 2])");
    }
}
