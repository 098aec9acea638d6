//! Buffers that are connected by common moments, with the best plan so far.

use crate::plan::{ALIGNMENT_BYTES, Buffer};

/// One buffer of a group: its fields are its interface. Sections are numbered stretches of time.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// The first section in which it lives.
    pub(super) first: usize,
    /// The section after the last.
    pub(super) end: usize,
    /// In units of the alignment.
    pub(super) size: u64,
}

/// Connected buffers. Sizes, offsets and heights are in units of the alignment.
pub(super) struct Group {
    /// In the order of their first sections.
    items: Vec<Item>,
    /// By item: its number among the buffers of the plan.
    numbers: Vec<usize>,
    /// By section: all bytes that live in it.
    totals: Vec<u64>,
    offsets: Vec<u64>,
    height: u64,
    /// No plan is lower.
    proved: u64,
}

/// The connected groups of buffers; buffers without life or size are in none.
pub(super) fn groups(buffers: &[Buffer]) -> Vec<Group> {
    let is_there = |&number: &usize| !buffers[number].lifetime.is_empty() && buffers[number].bytes > 0;
    let mut order: Vec<usize> = (0..buffers.len()).filter(is_there).collect();
    order.sort_by_key(|&number| (buffers[number].lifetime.start, number));
    let (mut groups, mut members, mut end) = (Vec::new(), Vec::new(), 0);
    for number in order {
        let lifetime = &buffers[number].lifetime;
        if lifetime.start >= end && !members.is_empty() {
            groups.push(Group::new(buffers, &std::mem::take(&mut members)));
        }
        end = end.max(lifetime.end);
        members.push(number);
    }
    if !members.is_empty() {
        groups.push(Group::new(buffers, &members));
    }
    groups
}

impl Group {
    /// `members` are in the order of their beginnings.
    fn new(buffers: &[Buffer], members: &[usize]) -> Self {
        let starts = section_starts(buffers, members);
        let section_of = |moment: u64| starts.partition_point(|&start| start <= moment) - 1;
        let item = |&number: &usize| {
            let Buffer { lifetime, bytes } = &buffers[number];
            let size = bytes.div_ceil(ALIGNMENT_BYTES);
            Item { first: section_of(lifetime.start), end: section_of(lifetime.end - 1) + 1, size }
        };
        let items: Vec<Item> = members.iter().map(item).collect();
        let mut totals = vec![0; starts.len()];
        for item in &items {
            totals[item.first..item.end].iter_mut().for_each(|total| *total += item.size);
        }
        let proved = totals.iter().copied().max().unwrap_or(0);
        let offsets = vec![0; items.len()];
        Self { items, numbers: members.to_vec(), totals, offsets, height: u64::MAX, proved }
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    pub(super) fn totals(&self) -> &[u64] {
        &self.totals
    }

    /// The height of the best plan so far.
    pub(super) fn height(&self) -> u64 {
        self.height
    }

    /// No plan is lower: the largest sum of live bytes, or more if that was proved.
    pub(super) fn bound(&self) -> u64 {
        self.proved
    }

    /// Remembers that a height is impossible.
    pub(super) fn prove_above(&mut self, height: u64) {
        self.proved = self.proved.max(height + 1);
    }

    /// Takes over the offsets of a plan of all buffers, in bytes.
    pub(super) fn take_offsets(&mut self, offsets: &[u64]) {
        self.improve(self.numbers.iter().map(|&number| offsets[number] / ALIGNMENT_BYTES).collect());
    }

    /// Takes better offsets of its items.
    pub(super) fn improve(&mut self, offsets: Vec<u64>) {
        let ends = self.items.iter().zip(&offsets).map(|(item, offset)| offset + item.size);
        self.height = ends.max().unwrap_or(0);
        self.offsets = offsets;
    }

    /// Writes its offsets into those of a plan of all buffers.
    pub(super) fn give_offsets(&self, offsets: &mut [u64]) {
        for (&number, offset) in self.numbers.iter().zip(&self.offsets) {
            offsets[number] = offset * ALIGNMENT_BYTES;
        }
    }
}

/// The moments at which sections begin: where a buffer begins after another one has ended. At any
/// moment of a section, the live buffers are among those of its fullest moment.
fn section_starts(buffers: &[Buffer], members: &[usize]) -> Vec<u64> {
    let lifetimes = members.iter().map(|&number| &buffers[number].lifetime);
    let mut changes: Vec<(u64, bool)> =
        lifetimes.flat_map(|lifetime| [(lifetime.start, true), (lifetime.end, false)]).collect();
    // What ends at a moment ends before anything begins at this moment.
    changes.sort_unstable();
    let (mut starts, mut is_after_end) = (Vec::new(), true);
    for (moment, begins) in changes {
        if begins && is_after_end {
            starts.push(moment);
        }
        is_after_end = !begins;
    }
    starts
}
