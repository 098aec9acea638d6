//! What lies where in a window's memory, and the headers there.
//!
//! The memory that a rank publishes: the version line, then two copies, each of a line for its word
//! and its elements. The memory into which peers write: a row for each writer, in it the slots,
//! each of a line for its header and its elements. Everything begins on a cache line.
//!
//! **Invariant:** all ranks compute the same layout from the terms that they have compared. Numbers
//! in headers are hostile until they were decoded.

use std::ops::Range;

use pleach_transport::RemoteSlice;
use pleach_vocabulary::{DataType, Rank};

/// Bytes of a line.
pub(crate) const LINE_BYTES: usize = 64;

/// The header of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct SlotHeader {
    /// How many writes of the same writer to the same target came before.
    pub(crate) number: u64,
    /// How many bytes of elements follow the header's line.
    pub(crate) bytes: u64,
}

/// What the ranks of a window compare before they make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) len: usize,
    pub(crate) data_type: DataType,
    pub(crate) slots: u16,
    /// Whether the rank has a thread that polls while its caller computes.
    pub(crate) has_thread: bool,
    /// Whether transfers from and to all peers end without a poll of their target.
    pub(crate) is_passive: bool,
    /// Longest transfer of the rank's device, in bytes.
    pub(crate) transfer_bytes_max: u64,
}

/// Words of [`Terms::to_words`].
pub(crate) const WORDS: usize = 6;

impl Terms {
    /// The words by which ranks tell each other their terms.
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let Self { len, data_type, slots, has_thread, is_passive, transfer_bytes_max } = self;
        let switches = [has_thread.into(), is_passive.into()];
        [len as u64, data_type as u64, slots.into(), switches[0], switches[1], transfer_bytes_max]
    }

    /// The first rank that asks for another window than this rank, and what for.
    pub(crate) fn find_difference(self, all: &[u64]) -> Option<(Rank, String)> {
        let own = self.to_words();
        let all = all.as_chunks::<WORDS>().0;
        let (words, rank) = all.iter().zip(0..).find(|(words, _)| words[..3] != own[..3])?;
        let data_type = DataType::ALL.into_iter().find(|it| *it as u64 == words[1]);
        let name = data_type.map_or_else(|| "elements of an unknown type".to_owned(), |it| it.to_string());
        Some((rank, described(words[0], &name, words[2])))
    }

    /// Whether a rank that needs a thread has none.
    pub(crate) fn lack_thread(all: &[u64]) -> bool {
        let all = all.as_chunks::<WORDS>().0;
        all.iter().any(|words| words[4] == 0) && all.iter().any(|words| words[3] == 0)
    }

    /// The longest transfer that all ranks can make, in bytes.
    pub(crate) fn transfer_bytes_max(all: &[u64]) -> u64 {
        all.as_chunks::<WORDS>().0.iter().map(|words| words[5]).min().unwrap_or(u64::MAX)
    }
}

impl std::fmt::Display for Terms {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.data_type.to_string();
        formatter.write_str(&described(self.len as u64, &name, self.slots.into()))
    }
}

fn described(len: u64, data_type: &str, slots: u64) -> String {
    format!("{len} {data_type} with {slots} slots")
}

/// Sizes and offsets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    data_bytes: usize,
    slots: u16,
    /// Of a copy, and of a slot.
    stride: usize,
    published_bytes: usize,
    slots_bytes: usize,
}

impl Layout {
    /// `None`: more bytes than a process can address.
    pub(crate) fn new(data_bytes: usize, slots: u16, ranks: u32) -> Option<Self> {
        let stride = data_bytes.checked_next_multiple_of(LINE_BYTES)?.checked_add(LINE_BYTES)?;
        let published_bytes = stride.checked_mul(2)?.checked_add(LINE_BYTES)?;
        let slots_bytes = stride.checked_mul(usize::from(slots))?.checked_mul(ranks as usize)?;
        (isize::try_from(published_bytes).is_ok() && isize::try_from(slots_bytes).is_ok()).then_some(Self {
            data_bytes,
            slots,
            stride,
            published_bytes,
            slots_bytes,
        })
    }

    /// The first rank that names memory which is not as long as this layout says, or which begins
    /// or ends where no memory can. `places`: by rank, what it publishes and into what its peers
    /// write.
    pub(crate) fn find_misfit(&self, places: &[[RemoteSlice; 2]]) -> Option<Rank> {
        let lengths = [self.published_bytes, self.slots_bytes];
        let fits = |(slice, length): (&RemoteSlice, usize)| {
            let is_aligned = slice.offset.is_multiple_of(LINE_BYTES as u64);
            slice.len == length as u64 && is_aligned && slice.offset.checked_add(slice.len).is_some()
        };
        let misfit = places.iter().zip(0..).find(|(places, _)| !places.iter().zip(lengths).all(fits));
        misfit.map(|(_, rank)| rank)
    }

    /// Of the elements.
    pub(crate) fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// The slots that each writer has at each target.
    pub(crate) fn slots(&self) -> u16 {
        self.slots
    }

    /// Of the memory that a rank publishes.
    pub(crate) fn published_bytes(&self) -> usize {
        self.published_bytes
    }

    /// Of the memory into which peers write.
    pub(crate) fn slots_bytes(&self) -> usize {
        self.slots_bytes
    }

    /// Where the word of a version lies.
    pub(crate) fn word(&self, version: u64) -> Range<usize> {
        let from = LINE_BYTES + (version % 2) as usize * self.stride;
        from..from + LINE_BYTES
    }

    /// Where these bytes of the elements of a version lie.
    pub(crate) fn data(&self, version: u64, range: Range<usize>) -> Range<usize> {
        let from = self.word(version).end;
        from + range.start..from + range.end
    }

    /// Where a write of so many bytes lies, its header included.
    pub(crate) fn slot(&self, writer: Rank, slot: u16, bytes: usize) -> Range<usize> {
        let from = (writer as usize * usize::from(self.slots) + usize::from(slot)) * self.stride;
        from..from + LINE_BYTES + bytes
    }
}

#[cfg(test)]
mod tests {
    use pleach_transport::RegionKey;

    use super::*;

    #[test]
    fn no_two_things_lie_at_the_same_place() {
        for (data_bytes, slots, ranks) in [(0, 0, 1), (1, 1, 1), (64, 3, 4), (100, 2, 5), (4096, 1, 2)] {
            let layout = Layout::new(data_bytes, slots, ranks).expect("a few bytes");
            let line = 0..LINE_BYTES;
            let copies = [0, 1].map(|version| [layout.word(version), layout.data(version, 0..data_bytes)]);
            let places: Vec<_> = [line].into_iter().chain(copies.into_iter().flatten()).collect();
            assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "{places:?}");
            assert!(places[4].end <= layout.published_bytes());
            assert_eq!(layout.word(7), layout.word(1));
            let writes = (0..ranks).flat_map(|rank| (0..slots).map(move |slot| (rank, slot)));
            let places: Vec<_> = writes.map(|(rank, slot)| layout.slot(rank, slot, data_bytes)).collect();
            assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "{places:?}");
            assert!(places.last().is_none_or(|last| last.end <= layout.slots_bytes()));
            assert!(places.iter().all(|place| place.start.is_multiple_of(LINE_BYTES)));
        }
        assert_eq!(Layout::new(usize::MAX, 1, 1), None);
        assert_eq!(Layout::new(1 << 40, u16::MAX, u32::MAX), None);
    }

    #[test]
    fn memory_of_another_length_or_at_a_place_that_cannot_be_is_found() {
        let layout = Layout::new(100, 2, 2).expect("a few bytes");
        let places = |published: u64, written: u64| {
            let slice = |offset, len: usize| RemoteSlice { key: RegionKey(1), offset, len: len as u64 };
            [slice(published, layout.published_bytes()), slice(written, layout.slots_bytes())]
        };
        let own = places(0, 640);
        assert_eq!(layout.find_misfit(&[own, places(64, 1 << 40)]), None);
        for offset in [1, 8, 63, 65, u64::MAX - 63, u64::MAX - 8, u64::MAX] {
            assert_eq!(layout.find_misfit(&[own, places(offset, 0)]), Some(1), "{offset}");
            assert_eq!(layout.find_misfit(&[own, places(0, offset)]), Some(1), "{offset}");
        }
        for index in 0..2 {
            let mut other = own;
            other[index].len += 64;
            assert_eq!(layout.find_misfit(&[own, other]), Some(1));
        }
    }

    #[test]
    fn ranks_that_ask_for_different_windows_are_found_and_what_they_lack() {
        let terms = |len, slots, has_thread, is_passive| Terms {
            len,
            data_type: DataType::F32,
            slots,
            has_thread,
            is_passive,
            transfer_bytes_max: 1 << (20 + len),
        };
        let all = |all: &[Terms]| all.iter().flat_map(|terms| terms.to_words()).collect::<Vec<_>>();
        let own = terms(5, 2, true, true);
        assert_eq!(own.to_string(), "5 f32 with 2 slots");
        assert_eq!(own.find_difference(&all(&[own, terms(5, 2, false, false)])), None);
        let other = terms(5, 3, true, true);
        assert_eq!(own.find_difference(&all(&[own, other])), Some((1, "5 f32 with 3 slots".to_owned())));
        for (has_thread, is_passive, lacks) in
            [(true, false, false), (false, true, false), (false, false, true), (true, true, false)]
        {
            assert_eq!(Terms::lack_thread(&all(&[own, terms(5, 2, has_thread, is_passive)])), lacks);
        }
        assert!(Terms::lack_thread(&all(&[terms(5, 2, false, true), terms(5, 2, true, false)])));
        assert_eq!(Terms::transfer_bytes_max(&all(&[terms(3, 0, true, true), own])), 1 << 23);
    }
}
