//! A shard of a parameter table: what ranks add to it, clock by clock.
//!
//! Each rank adds one update a clock. The *base* of a shard holds the clocks that are complete, to
//! which all ranks have added; later updates are pending. The value is the base and the pending
//! updates, added in the order of clocks, and in a clock in that of ranks.
//!
//! **Invariant:** a value depends only on which updates the shard holds, bit for bit, not on the
//! order in which they came. A table without order adds updates as they come, and has none pending:
//! ranks may be any number of clocks apart there.

use std::collections::BTreeMap;

use pleach_collectives::Rank;

use crate::state::{Remembered, State, StateError};

/// See the module.
#[derive(Clone, Debug)]
pub struct Table {
    base: Vec<f32>,
    /// Clocks below this are in the base.
    complete: u64,
    /// By rank: the clocks that it has added to.
    clocks: Vec<u64>,
    is_ordered: bool,
    pending: BTreeMap<(u64, Rank), Vec<f32>>,
    /// Memory of updates that went into the base.
    spare: Vec<Vec<f32>>,
}

impl Table {
    /// A shard with these elements, before the first clock of that many ranks.
    #[must_use]
    pub fn new(elements: &[f32], ranks: u32, is_ordered: bool) -> Self {
        Self {
            base: elements.to_vec(),
            complete: 0,
            clocks: vec![0; ranks as usize],
            is_ordered,
            pending: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// The number of clocks that are complete.
    #[must_use]
    pub fn complete(&self) -> u64 {
        self.complete
    }

    /// Adds the next clock's update of a rank. Elements behind the shard's are left out.
    ///
    /// # Panics
    ///
    /// There is no such rank.
    pub fn add(&mut self, rank: Rank, update: &[f32]) {
        let clock = &mut self.clocks[rank as usize];
        if !self.is_ordered {
            *clock += 1;
            add(&mut self.base, update);
            self.complete = self.clocks.iter().copied().min().unwrap_or(0);
            return;
        }
        let mut own = self.spare.pop().unwrap_or_default();
        own.clear();
        own.extend_from_slice(&update[..update.len().min(self.base.len())]);
        self.pending.insert((*clock, rank), own);
        *clock += 1;
        let complete = self.clocks.iter().copied().min().unwrap_or(0);
        while let Some(entry) = self.pending.first_entry()
            && entry.key().0 < complete
        {
            let update = entry.remove();
            add(&mut self.base, &update);
            self.spare.push(update);
        }
        self.complete = complete;
    }

    /// Stores the complete clocks alone, or all that the shard holds.
    ///
    /// # Panics
    ///
    /// `into` is shorter than the shard.
    pub fn read(&self, into: &mut [f32], with_pending: bool) {
        let into = &mut into[..self.base.len()];
        into.copy_from_slice(&self.base);
        if with_pending {
            self.pending.values().for_each(|update| add(into, update));
        }
    }
}

/// A table all of whose clocks are complete.
impl Remembered for Table {
    fn visit(&mut self, state: &mut State<'_>) {
        if !self.pending.is_empty() {
            state.refuse(StateError::Pending);
        }
        state.field(&mut self.base);
        state.field(&mut self.complete);
        state.field(&mut self.clocks);
    }
}

fn add(sums: &mut [f32], update: &[f32]) {
    sums.iter_mut().zip(update).for_each(|(sum, element)| *sum += element);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEN: usize = 3;

    /// The update of a rank in a clock: such that sums are rounded.
    fn update(clock: u64, rank: Rank) -> [f32; LEN] {
        std::array::from_fn(|element| 1.0 / (1 + clock * 31 + u64::from(rank) * 7 + element as u64) as f32)
    }

    /// The value by the definition: all updates in order, one after the other.
    fn by_definition(clocks: &[u64], most: u64) -> [f32; LEN] {
        let mut value = [0.5; LEN];
        for clock in 0..most {
            for (rank, added) in (0..).zip(clocks) {
                if clock < *added {
                    add(&mut value, &update(clock, rank));
                }
            }
        }
        value
    }

    proptest! {
        #[test]
        fn a_value_depends_only_on_which_updates_are_held(
            ranks in 1_u32..6,
            order in prop::collection::vec(0_u32..6, 0..60),
        ) {
            let mut table = Table::new(&[0.5; LEN], ranks, true);
            let mut clocks = vec![0_u64; ranks as usize];
            for rank in order.into_iter().map(|drawn| drawn % ranks) {
                table.add(rank, &update(clocks[rank as usize], rank));
                clocks[rank as usize] += 1;
                let complete = *clocks.iter().min().expect("there are ranks");
                prop_assert_eq!(table.complete(), complete);
                let (mut all, mut base) = ([0.0; LEN], [0.0; LEN]);
                table.read(&mut all, true);
                table.read(&mut base, false);
                prop_assert_eq!(all, by_definition(&clocks, 60));
                prop_assert_eq!(base, by_definition(&clocks, complete));
            }
        }
    }

    #[test]
    fn updates_that_are_added_as_they_come_differ() {
        // So the test above finds it out.
        let (first, second, third) = (update(0, 0), update(0, 1), update(0, 2));
        let sum = |updates: [[f32; LEN]; 3]| {
            let mut value = [0.5; LEN];
            updates.iter().for_each(|update| add(&mut value, update));
            value
        };
        assert_ne!(sum([first, second, third]), sum([third, second, first]));
    }
}
