//! Keys of tensors.
//!
//! A [`Key`] is a step and a name. The name is any text that programs choose. TensorFlow uses its
//! rendezvous key as the name, and [`RendezvousKey`] reads the parts of such a name.
//!
//! **Invariant:** the name of a key is not empty and has at most [`NAME_BYTES_MAX`] bytes. A key is
//! printed on one line, whatever a peer put into the name.

use std::fmt;
use std::sync::Arc;

/// Longest name of a key, in bytes.
pub const NAME_BYTES_MAX: usize = 1024;

/// Names a tensor: a step of the program, and the tensor's name in it. Clones share the name.
///
/// Keys are ordered by step, then by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    step: u64,
    name: Arc<str>,
}

/// Why a text is no name of a key.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It is empty.
    #[error("a key needs a name; name the tensor")]
    Empty,
    /// It is too long.
    #[error("the name of a key has {bytes} bytes, more than {NAME_BYTES_MAX}; shorten it, or take its hash")]
    TooLong {
        /// Its length, in bytes.
        bytes: usize,
    },
}

impl Key {
    /// The key of the tensor `name` in `step`. TensorFlow's steps are signed: the same bits are
    /// taken.
    ///
    /// # Errors
    ///
    /// When the name is empty or too long.
    pub fn new(step: u64, name: &str) -> Result<Self, KeyError> {
        match name.len() {
            0 => Err(KeyError::Empty),
            bytes if bytes > NAME_BYTES_MAX => Err(KeyError::TooLong { bytes }),
            _ => Ok(Self { step, name: name.into() }),
        }
    }

    /// The step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is before each key of a step in the order of keys. It is no key itself.
    pub(crate) fn before(step: u64) -> Self {
        Self { step, name: "".into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "'{}' of step {}", self.name.escape_debug(), self.step)
    }
}

/// The name of a tensor as TensorFlow builds it: `source device;incarnation of the source;
/// destination device;edge;frame:iteration`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RendezvousKey<'a> {
    /// The device that sends.
    pub source: &'a str,
    /// The incarnation of that device: another one after each start of its process.
    pub source_incarnation: u64,
    /// The device that receives.
    pub destination: &'a str,
    /// The edge of the graph.
    pub edge: &'a str,
    /// The frame and the iteration of a loop.
    pub frame_iteration: &'a str,
}

/// Why a text is no rendezvous key.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousKeyError {
    /// It has not five parts.
    #[error("a rendezvous key has five parts joined by ';', and this text has {parts}")]
    Parts {
        /// The parts of the text.
        parts: usize,
    },
    /// A part that names something is empty.
    #[error("a rendezvous key names two devices and an edge, and here one of these names is empty")]
    EmptyPart,
    /// The second part is no incarnation.
    #[error("the second part of a rendezvous key is an incarnation of 1 to 16 hexadecimal digits")]
    Incarnation,
}

impl<'a> RendezvousKey<'a> {
    /// Reads the parts of a rendezvous key.
    ///
    /// # Errors
    ///
    /// See [`RendezvousKeyError`].
    pub fn parse(name: &'a str) -> Result<Self, RendezvousKeyError> {
        let mut parts = name.split(';');
        let five = std::array::from_fn(|_| parts.next());
        let [Some(source), Some(incarnation), Some(destination), Some(edge), Some(frame_iteration)] = five
        else {
            return Err(RendezvousKeyError::Parts { parts: five.iter().flatten().count() });
        };
        let more = parts.count();
        if more > 0 {
            return Err(RendezvousKeyError::Parts { parts: five.len() + more });
        }
        if [source, destination, edge].contains(&"") {
            return Err(RendezvousKeyError::EmptyPart);
        }
        // A sign would be taken by the parser of numbers.
        let is_hexadecimal = incarnation.bytes().all(|byte| byte.is_ascii_hexdigit());
        let source_incarnation = u64::from_str_radix(incarnation, 16)
            .ok()
            .filter(|_| is_hexadecimal && incarnation.len() <= 16)
            .ok_or(RendezvousKeyError::Incarnation)?;
        Ok(Self { source, source_incarnation, destination, edge, frame_iteration })
    }
}

impl fmt::Display for RendezvousKey<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, source_incarnation, destination, edge, frame_iteration } = self;
        write!(formatter, "{source};{source_incarnation:016x};{destination};{edge};{frame_iteration}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};

    use super::*;

    /// As a worker of TensorFlow 2.21 asked for it.
    const SEEN: &str = "/job:pleach/replica:0/task:0/device:CPU:0;0000000000000007;\
                        /job:worker/replica:0/task:0/device:CPU:0;x;0:0";

    #[test]
    fn a_name_has_one_byte_to_1024() {
        assert_eq!(Key::new(1, ""), Err(KeyError::Empty));
        assert!(Key::new(1, "w").is_ok());
        let longest = "w".repeat(NAME_BYTES_MAX);
        assert_eq!(Key::new(1, &longest).map(|key| key.name().len()), Ok(1024));
        // Bytes count, and not letters.
        let error = Key::new(1, &"ä".repeat(NAME_BYTES_MAX / 2 + 1)).expect_err("is too long");
        assert_eq!(
            error.to_string(),
            "the name of a key has 1026 bytes, more than 1024; shorten it, or take its hash"
        );
    }

    #[test]
    fn keys_of_a_step_lie_together_behind_its_beginning() {
        let key = |step, name| Key::new(step, name).expect("a good name");
        assert!(Key::before(3) < key(3, "\0") && key(3, "z") < Key::before(4));
        assert!(key(2, "z") < Key::before(3));
        assert_ne!(key(3, "w"), key(4, "w"));
    }

    #[test]
    fn a_key_is_printed_on_one_line() {
        let key = Key::new(u64::MAX, "w\n0'").expect("a good name");
        assert_eq!(key.to_string(), r"'w\n0\'' of step 18446744073709551615");
    }

    #[test]
    fn the_parts_of_a_key_of_tensorflow_are_read() {
        let key = RendezvousKey::parse(SEEN).expect("was seen");
        assert_eq!(key.source, "/job:pleach/replica:0/task:0/device:CPU:0");
        assert_eq!((key.source_incarnation, key.edge, key.frame_iteration), (7, "x", "0:0"));
        assert_eq!(key.destination, "/job:worker/replica:0/task:0/device:CPU:0");
        assert_eq!(key.to_string(), SEEN);
    }

    #[test]
    fn a_text_that_is_no_key_of_tensorflow_is_refused_with_what_is_wrong() {
        let error = |text: &str| RendezvousKey::parse(text).expect_err("is no key");
        assert_eq!(error(""), RendezvousKeyError::Parts { parts: 1 });
        assert_eq!(error("a;7;b;x"), RendezvousKeyError::Parts { parts: 4 });
        assert_eq!(error("a;7;b;x;0:0;;"), RendezvousKeyError::Parts { parts: 7 });
        for text in [";7;b;x;0:0", "a;7;;x;0:0", "a;7;b;;0:0"] {
            assert_eq!(error(text), RendezvousKeyError::EmptyPart);
        }
        for incarnation in ["", "+7", "g", "00000000000000007"] {
            assert_eq!(error(&format!("a;{incarnation};b;x;0:0")), RendezvousKeyError::Incarnation);
        }
    }

    proptest! {
        #[test]
        fn no_text_is_more_than_refused(text in "[a-f0-9;:/+ ]{0,40}") {
            if let Ok(key) = RendezvousKey::parse(&text) {
                let printed = key.to_string();
                prop_assert_eq!(RendezvousKey::parse(&printed), Ok(key));
            }
        }
    }
}
