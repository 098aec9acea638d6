//! Memory of simulated callers, with guard bytes around the buffer of a call.

use pleach_transport::sim::{AccessKind, World};
use pleach_transport::{Device, SharedMemory, Slice};
use pleach_vocabulary::Rank;

use crate::engine::{Address, Bytes};

/// Bytes before and behind a buffer that no rank may touch.
const GUARD_BYTES: usize = 192;

/// The value of a guard byte, by its place.
fn guard(index: usize) -> u8 {
    0xa5 ^ (index as u8).wrapping_mul(29)
}

/// The value of a byte, by its place, after its owner used the memory for something else.
fn refilled(index: usize) -> u8 {
    0x3c ^ (index as u8).wrapping_mul(101)
}

enum Storage {
    Registered(Slice),
    Private(Vec<u8>),
}

/// A caller's slice in the middle of memory that stays as it is.
pub(super) struct Guarded {
    storage: Storage,
    front: usize,
    len: usize,
}

impl Guarded {
    /// `content`, at `skew` bytes from where memory is aligned.
    ///
    /// # Panics
    ///
    /// When this machine has no memory left.
    pub(super) fn new(device: &mut dyn Device, content: &[u8], is_registered: bool, skew: usize) -> Self {
        let (front, len) = (GUARD_BYTES + skew, content.len());
        let mut whole: Vec<u8> = (0..front + len + GUARD_BYTES).map(guard).collect();
        whole[front..front + len].copy_from_slice(content);
        let storage = if is_registered {
            let memory = SharedMemory::new(whole.len()).expect("memory for a simulated caller");
            let region = device.register(memory).expect("shared memory can be registered");
            region.whole().store(&whole);
            Storage::Registered(region.whole())
        } else {
            Storage::Private(whole)
        };
        Self { storage, front, len }
    }

    /// The buffer that the call gets.
    pub(super) fn bytes(&mut self) -> Bytes {
        self.part(0, self.len)
    }

    /// A part of the buffer.
    pub(super) fn part(&mut self, start: usize, len: usize) -> Bytes {
        let range = self.front + start..self.front + start + len;
        match &mut self.storage {
            Storage::Registered(slice) => Bytes::Registered(slice.slice(range).expect("inside of the slice")),
            Storage::Private(whole) => Bytes::Private { base: Address::of(&mut whole[range]), len },
        }
    }

    /// Everything, guards too.
    pub(super) fn whole(&self) -> Vec<u8> {
        match &self.storage {
            Storage::Registered(slice) => slice.to_vec(),
            Storage::Private(whole) => whole.clone(),
        }
    }

    /// The content of the buffer.
    pub(super) fn content(&self) -> Vec<u8> {
        self.whole()[self.front..self.front + self.len].to_vec()
    }

    /// The first guard byte that was touched, counted from the slice's first byte.
    pub(super) fn broken_guard(&self) -> Option<isize> {
        let whole = self.whole();
        let content = self.front..self.front + self.len;
        let index = (0..whole.len()).find(|index| !content.contains(index) && whole[*index] != guard(*index));
        index.map(|index| index as isize - self.front as isize)
    }

    /// The call has ended, and the owner uses the buffer for something else.
    pub(super) fn refill(&mut self) {
        let range = self.front..self.front + self.len;
        let fresh: Vec<u8> = range.clone().map(refilled).collect();
        match &mut self.storage {
            Storage::Registered(slice) => slice.slice(range).expect("inside of the slice").store(&fresh),
            Storage::Private(whole) => whole[range].copy_from_slice(&fresh),
        }
    }

    /// The first byte, counted from the slice's first one, that is not as [`Guarded::refill`] and
    /// guards left it.
    pub(super) fn changed_since_refill(&self) -> Option<isize> {
        let whole = self.whole();
        let content = self.front..self.front + self.len;
        let expected = |index: usize| if content.contains(&index) { refilled(index) } else { guard(index) };
        let index = (0..whole.len()).find(|index| whole[*index] != expected(*index));
        index.map(|index| index as isize - self.front as isize)
    }

    /// Where it is, guards too.
    pub(super) fn addresses(&self) -> std::ops::Range<usize> {
        let (base, len) = match &self.storage {
            Storage::Registered(slice) => (slice.as_ptr() as usize, slice.len()),
            Storage::Private(whole) => (whole.as_ptr() as usize, whole.len()),
        };
        base..base + len
    }

    /// Tells checkers that its owner touches all of the content.
    pub(super) fn report(&self, world: &World, rank: Rank, kind: AccessKind) {
        let base = match &self.storage {
            Storage::Registered(slice) => slice.as_ptr().cast_const(),
            Storage::Private(whole) => whole.as_ptr(),
        };
        if self.len > 0 {
            world.accessed(rank, base.wrapping_add(self.front), self.len, kind, world.now());
        }
    }
}
