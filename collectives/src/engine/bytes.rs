//! What a caller gives for the time of a run.

use pleach_transport::{LentSlice, Slice, Space};

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
    /// Held by the run, and touched by this rank alone: what peers must see is staged through
    /// scratch.
    Staged(Slice),
    /// As [`Bytes::Staged`], held by the caller until the run's outcome was taken. Addresses are
    /// made in this crate alone.
    Private {
        /// First byte.
        base: Address,
        /// How many bytes.
        len: usize,
    },
}

impl Bytes {
    pub(crate) fn base(&self) -> Address {
        match self {
            Self::None => Address::NULL,
            Self::Registered(slice) | Self::Staged(slice) => Address(slice.as_ptr()),
            Self::Lent(slice) => Address(slice.as_ptr()),
            Self::Private { base, .. } => *base,
        }
    }

    pub(super) fn landing(&self) -> Landing {
        let remote = match self {
            Self::Registered(slice) => slice.remote(),
            Self::Lent(slice) => slice.remote(),
            Self::None | Self::Staged(_) | Self::Private { .. } => return Landing::default(),
        };
        Landing { key: remote.key, offset: remote.offset }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Registered(slice) | Self::Staged(slice) => slice.len(),
            Self::Lent(slice) => slice.len(),
            Self::Private { len, .. } => *len,
        }
    }

    /// Whether the host's processors may touch them, as far as that is known.
    pub(crate) fn is_on_host(&self) -> bool {
        match self {
            Self::Registered(slice) | Self::Staged(slice) => slice.region().memory().space() == Space::Host,
            Self::None | Self::Lent(_) | Self::Private { .. } => true,
        }
    }

    /// Whether one lies in the other at a multiple of its own length, as a part does, or nothing of
    /// one in the other.
    pub(crate) fn is_apart_from_or_part_of(&self, other: &Self) -> bool {
        let (short, long) = if self.len() <= other.len() { (self, other) } else { (other, self) };
        let (start, outer) = (short.base().0 as usize, long.base().0 as usize);
        let is_apart = start + short.len() <= outer || outer + long.len() <= start;
        let is_part = start >= outer
            && start + short.len() <= outer + long.len()
            && (start - outer).is_multiple_of(short.len());
        short.len() == 0 || is_apart || is_part
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self, Self::Registered(_) | Self::Lent(_))
    }
}
