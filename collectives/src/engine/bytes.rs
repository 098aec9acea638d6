//! What a caller gives for the time of a run.

use pleach_transport::{LentSlice, Slice};

use super::address::Address;
use super::header::Landing;

/// A caller's bytes for the time of a run.
#[derive(Clone, Debug)]
pub enum Bytes {
    /// There are none (this rank gives or gets nothing).
    None,
    /// Registered: peers may touch it in place.
    Registered(Slice),
    /// Registered, and held by the caller until the run's outcome was taken.
    Lent(LentSlice),
    /// Only this rank touches it; what peers must see is staged through scratch.
    Private {
        /// First byte; valid until the run's outcome was taken.
        base: Address,
        /// How many bytes.
        len: usize,
    },
}

impl Bytes {
    pub(crate) fn base(&self) -> Address {
        match self {
            Self::None => Address::NULL,
            Self::Registered(slice) => Address(slice.as_ptr()),
            Self::Lent(slice) => Address(slice.as_ptr()),
            Self::Private { base, .. } => *base,
        }
    }

    pub(super) fn landing(&self) -> Landing {
        let remote = match self {
            Self::Registered(slice) => slice.remote(),
            Self::Lent(slice) => slice.remote(),
            Self::None | Self::Private { .. } => return Landing::default(),
        };
        Landing { key: remote.key, offset: remote.offset }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Registered(slice) => slice.len(),
            Self::Lent(slice) => slice.len(),
            Self::Private { len, .. } => *len,
        }
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self, Self::Registered(_) | Self::Lent(_))
    }
}
