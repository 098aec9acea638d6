//! What a policy remembers, as bytes.
//!
//! [`Policy::state`](crate::Policy::state) names each field once. A [`State`] either takes it or
//! gives it back, so what is saved and what is restored cannot differ.
//!
//! **Invariants:** lengths of lists are those of the policy, not of the bytes, so restoring from
//! any bytes allocates nothing. After the first byte that is wrong nothing more is read. Numbers
//! that are restored leave room to count on.

/// Why bytes are no state of a policy.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The policy does not say what it remembers.
    #[error("this scheme keeps no checkpoints: its policy does not say what it remembers; train without")]
    Unsupported,
    /// Updates of a table are not complete.
    #[error("a table holds updates of clocks that are not complete; save when all ranks are at rest")]
    Pending,
    /// There are fewer bytes than fields.
    #[error("the state is cut; take another checkpoint")]
    Short,
    /// There are more bytes than fields.
    #[error("{bytes} bytes follow the state; take a checkpoint of this version of pleach")]
    Long {
        /// The bytes that follow.
        bytes: usize,
    },
    /// A field holds what it never holds.
    #[error("the state holds a value that is none; take another checkpoint")]
    Value,
}

/// The largest number that is restored. Numbers count steps, operations, writes, nanoseconds and
/// units of weight: a policy that goes on adds to them, so this is far below the largest of the
/// type, and more than any training comes to.
const NUMBER_MAX: u64 = (1 << 62) - 1;

enum Side<'a> {
    Saving(Vec<u8>),
    Restoring(&'a [u8]),
}

/// See the module.
pub struct State<'a> {
    side: Side<'a>,
    broken: Option<StateError>,
}

impl<'a> State<'a> {
    /// A state that takes fields.
    #[must_use]
    pub fn saving() -> Self {
        Self { side: Side::Saving(Vec::new()), broken: None }
    }

    /// A state that gives fields back.
    #[must_use]
    pub fn restoring(bytes: &'a [u8]) -> Self {
        Self { side: Side::Restoring(bytes), broken: None }
    }

    /// The bytes of all fields; empty if the fields were restored.
    ///
    /// # Errors
    ///
    /// The first error.
    pub fn finish(self) -> Result<Vec<u8>, StateError> {
        match (self.broken, self.side) {
            (Some(error), _) => Err(error),
            (None, Side::Saving(bytes)) => Ok(bytes),
            (None, Side::Restoring([])) => Ok(Vec::new()),
            (None, Side::Restoring(rest)) => Err(StateError::Long { bytes: rest.len() }),
        }
    }

    /// Says that there is no state to save or to restore.
    pub fn refuse(&mut self, error: StateError) {
        self.broken.get_or_insert(error);
    }

    /// Whether fields are given back.
    #[must_use]
    pub fn is_restoring(&self) -> bool {
        matches!(self.side, Side::Restoring(_))
    }

    /// Takes a field, or gives it back.
    pub fn field(&mut self, field: &mut (impl Remembered + ?Sized)) {
        field.visit(self);
    }

    /// Takes a number that counts nothing, as a hash, or gives it back: any bits are one.
    pub fn bits(&mut self, bits: &mut u64) {
        *bits = u64::from_le_bytes(self.word(bits.to_le_bytes()));
    }

    fn word<const N: usize>(&mut self, own: [u8; N]) -> [u8; N] {
        if self.broken.is_some() {
            return own;
        }
        match &mut self.side {
            Side::Saving(bytes) => {
                bytes.extend_from_slice(&own);
                own
            }
            Side::Restoring(bytes) => match bytes.split_first_chunk() {
                Some((word, rest)) => {
                    *bytes = rest;
                    *word
                }
                None => {
                    self.broken = Some(StateError::Short);
                    own
                }
            },
        }
    }
}

/// A field of a policy.
pub trait Remembered {
    /// Gives this field to the state, or takes it from there.
    fn visit(&mut self, state: &mut State<'_>);
}

impl Remembered for u64 {
    fn visit(&mut self, state: &mut State<'_>) {
        let mut number = *self;
        state.bits(&mut number);
        if state.is_restoring() && number > NUMBER_MAX {
            return state.refuse(StateError::Value);
        }
        *self = number;
    }
}

impl Remembered for u32 {
    fn visit(&mut self, state: &mut State<'_>) {
        *self = Self::from_le_bytes(state.word(self.to_le_bytes()));
    }
}

impl Remembered for f32 {
    fn visit(&mut self, state: &mut State<'_>) {
        *self = Self::from_le_bytes(state.word(self.to_le_bytes()));
    }
}

impl Remembered for bool {
    fn visit(&mut self, state: &mut State<'_>) {
        match state.word([u8::from(*self)]) {
            [0] => *self = false,
            [1] => *self = true,
            _ => state.refuse(StateError::Value),
        }
    }
}

impl<T: Remembered + Default> Remembered for Option<T> {
    fn visit(&mut self, state: &mut State<'_>) {
        let mut is_some = self.is_some();
        is_some.visit(state);
        if is_some {
            self.get_or_insert_default().visit(state);
        } else {
            *self = None;
        }
    }
}

/// As many elements as the policy has.
impl<T: Remembered> Remembered for [T] {
    fn visit(&mut self, state: &mut State<'_>) {
        self.iter_mut().for_each(|element| element.visit(state));
    }
}

/// As many elements as the policy has.
impl<T: Remembered> Remembered for Vec<T> {
    fn visit(&mut self, state: &mut State<'_>) {
        self.as_mut_slice().visit(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq)]
    struct Fields {
        number: u64,
        flag: bool,
        weight: Option<u64>,
        clocks: Vec<u64>,
        element: f32,
    }

    impl Fields {
        fn visit(&mut self, state: &mut State<'_>) {
            state.field(&mut self.number);
            state.field(&mut self.flag);
            state.field(&mut self.weight);
            state.field(&mut self.clocks);
            state.field(&mut self.element);
        }

        fn empty() -> Self {
            Self { clocks: vec![0; 3], ..Self::default() }
        }

        fn restored(bytes: &[u8]) -> (Self, Result<Vec<u8>, StateError>) {
            let mut fields = Self::empty();
            let mut state = State::restoring(bytes);
            fields.visit(&mut state);
            (fields, state.finish())
        }
    }

    #[test]
    fn what_was_saved_is_restored_and_cut_or_longer_bytes_are_refused() {
        let mut saved =
            Fields { number: 7, flag: true, weight: Some(9), clocks: vec![1, 2, 3], element: -0.0 };
        let mut state = State::saving();
        saved.visit(&mut state);
        let bytes = state.finish().expect("all fields were taken");
        let (restored, result) = Fields::restored(&bytes);
        assert_eq!((restored, result), (saved, Ok(Vec::new())));
        for len in 0..bytes.len() {
            assert_eq!(Fields::restored(&bytes[..len]).1, Err(StateError::Short), "{len}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Fields::restored(&longer).1, Err(StateError::Long { bytes: 1 }));
        let mut wrong = bytes;
        wrong[8] = 2;
        assert_eq!(Fields::restored(&wrong).1, Err(StateError::Value));
        let too_large = [&(NUMBER_MAX + 1).to_le_bytes(), &wrong[8..]].concat();
        let (fields, refused) = Fields::restored(&too_large);
        assert_eq!((fields.number, refused), (0, Err(StateError::Value)));
    }
}
