//! The only place of the engine that touches bytes.
//!
//! Addresses come from three sources: the caller's slices (valid until the run's outcome was
//! taken), this rank's scratch region and mappings of peers' regions (both held by the run).
//! Offsets are computed from a layout that was checked against the slices' lengths when the run
//! began. That no two accesses collide is what the schedule's proof says.
#![allow(unsafe_code)]

use pleach_transport::{LentSlice, Nanos, Slice, Space};

use super::signals::{BufferAddress, INLINE_DATA_BYTES};
use crate::compute::{Compute, Job};

/// Words of data that fit a signal.
const DATA_WORDS: usize = INLINE_DATA_BYTES / 8;
pub(super) type DataWords = [u64; DATA_WORDS];
pub(super) const NO_DATA: DataWords = [0; DATA_WORDS];

/// Where some bytes are. An address keeps no memory alive, so only this crate makes addresses: a
/// run reads and writes there until its outcome was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub(crate) *mut u8);

// SAFETY: an address is a number; the code that dereferences it vouches for the memory (see the
// module).
unsafe impl Send for Address {}

impl Address {
    /// No bytes at all.
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    /// Where a slice begins.
    pub(crate) fn of(bytes: &mut [u8]) -> Self {
        Self(bytes.as_mut_ptr())
    }

    pub(crate) fn add(self, bytes: usize) -> Self {
        // Wrapping, because a run without data computes addresses of nothing from null.
        Self(self.0.wrapping_add(bytes))
    }

    /// At most a signal slot's worth of bytes as words, zeros behind them.
    #[inline]
    pub(super) fn load_words(self, bytes: usize) -> DataWords {
        let mut words = [0; DATA_WORDS];
        for (index, word) in words.iter_mut().enumerate().take(bytes.div_ceil(8)) {
            let at = self.add(index * 8).0;
            *word = if bytes >= (index + 1) * 8 {
                // SAFETY: the word lies inside the place's memory (see the module); any alignment.
                unsafe { at.cast::<u64>().read_unaligned() }
            } else {
                let mut last = [0; 8];
                // SAFETY: as above, fewer than eight bytes of it.
                unsafe { std::ptr::copy_nonoverlapping(at, last.as_mut_ptr(), bytes % 8) };
                u64::from_ne_bytes(last)
            };
        }
        words
    }

    /// Stores the first bytes of these words.
    #[inline]
    pub(super) fn store_words(self, words: &DataWords, bytes: usize) {
        for (index, word) in words.iter().enumerate().take(bytes.div_ceil(8)) {
            let at = self.add(index * 8).0;
            if bytes >= (index + 1) * 8 {
                // SAFETY: as in `load_words`.
                unsafe { at.cast::<u64>().write_unaligned(*word) };
            } else {
                // SAFETY: as in `load_words`.
                unsafe { std::ptr::copy_nonoverlapping(word.to_ne_bytes().as_ptr(), at, bytes % 8) };
            }
        }
    }

    /// Copies a chunk into scratch, which overlaps no slice of a caller.
    pub(super) fn copy_to(self, into: Self, bytes: usize) {
        if bytes > 0 {
            // SAFETY: both are places of this rank with a chunk's room; scratch is a region of its
            // own.
            unsafe { std::ptr::copy_nonoverlapping(self.0, into.0, bytes) }
        }
    }
}

/// Goes on with a job of the run; true when it is complete.
pub(super) fn advance(compute: &mut dyn Compute, job: &mut Job, now: Nanos) -> bool {
    // SAFETY: sources and destinations are chunks of places (see the module); the proof says that
    // nobody else touches them between the steps this one is after and the steps that are after it,
    // and a place aliases another one wholly or not at all. After a peer is lost or severed its
    // mappings keep their bytes (`Mapped`).
    unsafe { compute.advance(job, now) }
}

/// A caller's bytes for the time of a run.
#[derive(Clone, Debug)]
pub enum Bytes {
    /// There are none (this rank gives or gets nothing).
    None,
    /// Registered: peers may touch it in place.
    Registered(Slice),
    /// Registered, and held by the caller until the run's outcome was taken.
    Lent(LentSlice),
    /// Held by the run, and touched by this rank alone: bytes that peers must see are staged
    /// through scratch.
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

    /// Where peers find the bytes.
    pub(super) fn buffer_address(&self) -> BufferAddress {
        match self {
            Self::Registered(slice) => BufferAddress::of(slice.remote()),
            Self::Lent(slice) => BufferAddress::of(slice.remote()),
            Self::None | Self::Staged(_) | Self::Private { .. } => BufferAddress::IN_SCRATCH,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_bytes_are_copied_as_there_are_wherever_they_begin() {
        for start in 0..9 {
            for bytes in 0..=INLINE_DATA_BYTES {
                let mut from: Vec<u8> = (1..=64).collect();
                let mut into = [0xee; 64];
                let (source, target) = (Address::of(&mut from).add(start), Address::of(&mut into).add(start));
                target.store_words(&source.load_words(bytes), bytes);
                let expected: Vec<u8> = (0..64)
                    .map(|index| if (start..start + bytes).contains(&index) { index as u8 + 1 } else { 0xee })
                    .collect();
                assert_eq!(into[..], expected, "{bytes} bytes from {start} on");
                let mut again = [0xee; 64];
                source.copy_to(Address::of(&mut again).add(start), bytes);
                assert_eq!(again[..].to_vec(), expected);
            }
        }
    }
}
