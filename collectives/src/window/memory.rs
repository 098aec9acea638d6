//! How this process reaches the bytes of a window.
//!
//! Addresses come from slices, which keep their regions, from mappings of peers' memory, which keep
//! that mapped, and from a caller's elements, which the caller keeps for the time of a call or
//! which an operation owns. Offsets are those of a [`Layout`] that fits the memory (asserted here).
//!
//! An owner writes its published copies while peers' transfers and mappings read them, as a NIC
//! does. Whoever read a copy in the meantime finds out by the version line, and uses no byte.
//! Threads of the owner's process do not read them meanwhile: its device does only when it is
//! polled, under the lock under which the owner writes.
#![allow(unsafe_code)]

use std::ops::Range;

use pleach_transport::{Mapped, ReadOnlyMapped, Slice};

use super::layout::{LINE_BYTES, Layout, SlotHeader};
use super::version_line::VersionLine;
use super::word::Word;
use crate::engine::Address;

/// Memory that a rank has published, at an address of this process.
#[derive(Clone)]
pub(crate) enum View {
    /// This rank's.
    Own(Slice),
    /// A peer's, from [`View::of_peer`].
    Peer(ReadOnlyMapped),
}

impl View {
    /// What a peer publishes, where this rank's processor can read it. `None`: it is on a GPU, or
    /// begins at no line. A peer whose memory is a part of a file can announce any part.
    pub(crate) fn of_peer(mapped: ReadOnlyMapped) -> Option<Self> {
        let has_line = mapped.as_ptr().cast::<VersionLine>().is_aligned();
        (mapped.is_on_host() && has_line).then_some(Self::Peer(mapped))
    }

    fn bytes(&self, range: Range<usize>) -> Address {
        let (base, len) = match self {
            Self::Own(slice) => (slice.as_ptr(), slice.len()),
            Self::Peer(mapped) => (mapped.as_ptr().cast_mut(), mapped.len()),
        };
        assert!(range.start <= range.end && range.end <= len, "{range:?} of {len} bytes");
        Address(base.wrapping_add(range.start))
    }

    /// Whether the owner still shares it. Ask after reading: if not, some bytes may be zeros.
    pub(crate) fn is_shared(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Peer(mapped) => mapped.is_shared(),
        }
    }

    fn line(&self) -> &VersionLine {
        // SAFETY: the memory begins with a version line, which is only accessed by its atomics. It
        // is aligned: this rank's memory begins with a page (asserted in `Publisher::new`), a
        // peer's was looked at in `of_peer`. Pages that are read-only here are only loaded.
        unsafe { &*self.bytes(0..LINE_BYTES).0.cast::<VersionLine>() }
    }

    /// The newest version that is whole. `None`: the number changes just now.
    pub(crate) fn published(&self) -> Option<u64> {
        self.line().published()
    }

    /// Copies bytes of the elements of a version, whole or not.
    pub(crate) fn copy(&self, layout: &Layout, version: u64, range: Range<usize>, into: Address) {
        let bytes = range.len();
        copy(self.bytes(layout.data(version, range)), into, bytes);
    }

    /// The word of a version, whole or not.
    pub(crate) fn word(&self, layout: &Layout, version: u64) -> Word {
        let mut words = [0u64; 6];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let place = layout.word(version).start;
        copy(self.bytes(place..place + bytes.len()), Address::of(bytes), size_of::<Word>());
        Word::of_payload(words)
    }

    /// Whether all that this thread has copied of a version is of that version.
    pub(crate) fn is_whole(&self, version: u64) -> bool {
        self.line().is_whole(version)
    }

    /// One try to read bytes of the elements, with the version and its word. `None`: the owner has
    /// published twice meanwhile, or the numbers change just now.
    pub(crate) fn read(&self, layout: &Layout, range: Range<usize>, into: Address) -> Option<(u64, Word)> {
        let version = self.published()?;
        self.copy(layout, version, range, into);
        let word = self.word(layout, version);
        self.is_whole(version).then_some((version, word))
    }
}

impl View {
    /// As [`View::read`], but takes any bytes.
    pub(crate) fn read_torn(
        &self,
        layout: &Layout,
        range: Range<usize>,
        into: Address,
    ) -> Option<(u64, Word)> {
        let version = self.published()?;
        self.copy(layout, version, range, into);
        Some((version, Word::EMPTY))
    }
}

/// The memory that this rank publishes.
pub(crate) struct Publisher {
    slice: Slice,
    layout: Layout,
    version: u64,
    /// A defect that checkers must catch: a copy is overwritten before the line says so.
    #[cfg(test)]
    pub(crate) announces_late: bool,
}

impl Publisher {
    /// Over zeroed memory, which is version 0.
    pub(crate) fn new(slice: Slice, layout: Layout) -> Self {
        assert!(slice.len() >= layout.published_bytes(), "memory for the window's layout");
        assert!(slice.as_ptr().cast::<VersionLine>().is_aligned(), "memory that begins with a page");
        Self {
            slice,
            layout,
            version: 0,
            #[cfg(test)]
            announces_late: false,
        }
    }

    fn line(&self) -> &VersionLine {
        // SAFETY: as in `View::line`, in memory of this rank that is long enough and aligned
        // (asserted in `new`).
        unsafe { &*self.slice.as_ptr().cast::<VersionLine>() }
    }

    /// Begins to publish another version: a read of the version before the last one is no read any
    /// more. Returns its number.
    pub(crate) fn begin(&mut self) -> u64 {
        let version = self.version + 1;
        #[cfg(test)]
        if self.announces_late {
            return version;
        }
        self.line().begin(version);
        version
    }

    /// Writes some of the elements of the version that was begun.
    pub(crate) fn write(&mut self, from: Address, range: Range<usize>) {
        let (bytes, place) = (range.len(), self.layout.data(self.version + 1, range));
        assert!(place.end <= self.slice.len(), "inside of the copy");
        copy(from, Address(self.slice.as_ptr()).add(place.start), bytes);
    }

    /// All of it is written.
    pub(crate) fn finish(&mut self, word: Word) -> u64 {
        self.version += 1;
        #[cfg(test)]
        if self.announces_late {
            self.line().begin(self.version);
        }
        let place = self.layout.word(self.version).start;
        let mut bytes = *word.as_bytes();
        copy(Address::of(&mut bytes), Address(self.slice.as_ptr()).add(place), bytes.len());
        self.line().publish(self.version);
        self.version
    }
}

/// Where a write's header and elements are put together.
pub(crate) enum Place {
    /// In the slot itself.
    Mapped(Mapped),
    /// In registered memory of this rank, that nothing else uses.
    Staged(Slice),
}

impl Place {
    /// Stores a write.
    pub(crate) fn fill(&self, header: SlotHeader, from: Address) {
        let (base, len) = match self {
            Self::Mapped(mapped) => (mapped.as_ptr(), mapped.len()),
            Self::Staged(slice) => (slice.as_ptr(), slice.len()),
        };
        let bytes = header.bytes as usize;
        assert!(len >= LINE_BYTES + bytes, "{bytes} bytes behind a header in {len}");
        let mut line = header;
        let line: &mut [u8] = bytemuck::bytes_of_mut(&mut line);
        copy(Address::of(line), Address(base), line.len());
        copy(from, Address(base).add(LINE_BYTES), bytes);
    }
}

/// Copies bytes between two places that do not overlap.
pub(crate) fn copy(from: Address, into: Address, bytes: usize) {
    if bytes > 0 {
        // SAFETY: both places hold that many bytes (see the module): what a window allocated or
        // mapped is apart from a caller's elements.
        unsafe { std::ptr::copy_nonoverlapping(from.0.cast_const(), into.0, bytes) }
    }
}
