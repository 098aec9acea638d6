//! A shard of a parameter table: what ranks add to it, clock by clock.
//!
//! Each rank adds one update a clock. The *base* of a shard holds the clocks that are complete, to
//! which all ranks have added; later updates are pending. The value is the base and the pending
//! updates, added in the order of clocks, and in a clock in that of ranks.
//!
//! A shard may be cut in *rows*. Then an update is kept as the rows that it changes, so its memory
//! and the work that it makes are those of these rows.
//!
//! **Invariant:** a value depends only on which updates the shard holds, bit for bit, not on the
//! order in which they came. A table without order adds updates as they come, also the sum of
//! several at once, and has none pending: ranks may be any number of clocks apart there.

use std::collections::BTreeMap;

use pleach_collectives::Rank;

use crate::rows::is_changed;
use crate::state::{Remembered, State, StateError};

/// See the module.
#[derive(Clone, Debug)]
pub struct Table {
    base: Vec<f32>,
    /// Elements of a row; `None`: an update is of all elements.
    row: Option<usize>,
    /// Clocks below this are in the base.
    complete: u64,
    /// By rank: the clocks that it has added to.
    clocks: Vec<u64>,
    is_ordered: bool,
    pending: BTreeMap<(u64, Rank), Update>,
    /// Memory of updates that went into the base.
    spare: Vec<Update>,
}

/// What a rank adds in a clock.
#[derive(Clone, Debug, Default)]
struct Update {
    /// In a shard of rows: which ones, in order.
    rows: Vec<u32>,
    /// Those of all rows one after the other, or of the whole shard.
    elements: Vec<f32>,
}

impl Update {
    /// Takes over what an update changes, of a shard with so many elements.
    fn set(&mut self, update: &[f32], row: Option<usize>) {
        let Self { rows, elements } = self;
        rows.clear();
        elements.clear();
        let Some(row) = row else { return elements.extend_from_slice(update) };
        for (number, changed) in (0..).zip(update.chunks(row)).filter(|(_, row)| is_changed(row)) {
            rows.push(number);
            elements.extend_from_slice(changed);
        }
    }

    /// Adds it to a shard.
    fn add_to(&self, sums: &mut [f32], row: Option<usize>) {
        let Some(row) = row else { return add(sums, &self.elements) };
        for (number, elements) in self.rows.iter().zip(self.elements.chunks(row)) {
            add(&mut sums[*number as usize * row..], elements);
        }
    }

    /// Its elements of a row; none if it does not change that.
    fn of_row(&self, number: u32, row: usize) -> &[f32] {
        self.rows.binary_search(&number).map_or(&[], |place| &self.elements[place * row..][..row])
    }
}

impl Table {
    /// A shard with these elements, before the first clock of that many ranks.
    #[must_use]
    pub fn new(elements: &[f32], ranks: u32, is_ordered: bool) -> Self {
        Self {
            base: elements.to_vec(),
            row: None,
            complete: 0,
            clocks: vec![0; ranks as usize],
            is_ordered,
            pending: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// The same shard, cut in rows of this length, which divides its own.
    #[must_use]
    pub fn of_rows(self, row: Option<usize>) -> Self {
        Self { row: row.map(|row| row.max(1)), ..self }
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
        own.set(&update[..update.len().min(self.base.len())], self.row);
        self.pending.insert((*clock, rank), own);
        *clock += 1;
        let complete = self.clocks.iter().copied().min().unwrap_or(0);
        while let Some(entry) = self.pending.first_entry()
            && entry.key().0 < complete
        {
            let update = entry.remove();
            update.add_to(&mut self.base, self.row);
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
            self.pending.values().for_each(|update| update.add_to(into, self.row));
        }
    }

    /// Stores a row as [`Table::read`] does.
    ///
    /// # Panics
    ///
    /// The shard has no rows, or none of this number, or `into` has another length.
    pub fn read_row(&self, number: u32, into: &mut [f32], with_pending: bool) {
        let row = self.row.expect("the shard has rows");
        into.copy_from_slice(&self.base[number as usize * row..][..row]);
        if with_pending {
            self.pending.values().for_each(|update| add(into, update.of_row(number, row)));
        }
    }
}

/// A table all of whose clocks are complete.
impl Remembered for Table {
    fn visit(&mut self, state: &mut State<'_>) {
        if !self.pending.is_empty() {
            state.refuse(StateError::Pending);
        }
        state.field(&mut self.is_ordered);
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

    /// Elements of a row, and rows.
    const ROW: usize = 2;
    const ROWS: usize = 4;

    /// The update of a rank in a clock, which changes some rows.
    fn sparse(clock: u64, rank: Rank) -> [f32; ROW * ROWS] {
        std::array::from_fn(|at| {
            let row = at / ROW;
            let is_one = (clock + 3 * u64::from(rank) + row as u64).is_multiple_of(3);
            if is_one { 1.0 / (1 + clock * 31 + u64::from(rank) * 7 + at as u64) as f32 } else { 0.0 }
        })
    }

    proptest! {
        #[test]
        fn a_row_has_the_updates_that_change_it_in_the_order_of_clocks_and_ranks(
            ranks in 1_u32..6,
            order in prop::collection::vec(0_u32..6, 0..24),
            is_ordered in prop::bool::ANY,
        ) {
            let start = [0.5; ROW * ROWS];
            let mut table = Table::new(&start, ranks, is_ordered).of_rows(Some(ROW));
            let mut dense = Table::new(&start, ranks, is_ordered);
            let mut clocks = vec![0_u64; ranks as usize];
            for rank in order.into_iter().map(|drawn| drawn % ranks) {
                let update = sparse(clocks[rank as usize], rank);
                table.add(rank, &update);
                dense.add(rank, &update);
                clocks[rank as usize] += 1;
                // The sequential model: a row at a time, all updates that change it, in order.
                let complete = clocks.iter().copied().min().expect("there are ranks");
                for with_pending in [true, false] {
                    let most = if with_pending { u64::MAX } else { complete };
                    let (mut whole, mut of_dense) = ([0.0; ROW * ROWS], [0.0; ROW * ROWS]);
                    table.read(&mut whole, with_pending);
                    dense.read(&mut of_dense, with_pending);
                    // A dense update adds 0 to rows that it leaves as they are: none is -0.
                    prop_assert_eq!(whole, of_dense);
                    for row in 0..ROWS {
                        let mut read = [0.0; ROW];
                        table.read_row(row as u32, &mut read, with_pending);
                        prop_assert_eq!(&whole[row * ROW..][..ROW], &read);
                        if !is_ordered {
                            continue;
                        }
                        let mut value = [0.5; ROW];
                        for clock in 0..24.min(most) {
                            for (other, added) in (0..).zip(&clocks) {
                                let update = sparse(clock, other);
                                let own = &update[row * ROW..][..ROW];
                                if clock < *added && is_changed(own) {
                                    add(&mut value, own);
                                }
                            }
                        }
                        prop_assert_eq!(read, value);
                    }
                }
            }
        }
    }

    #[test]
    fn an_update_takes_the_memory_of_the_rows_that_it_changes() {
        let mut table = Table::new(&[0.0; 4_000], 2, true).of_rows(Some(4));
        let mut update = vec![0.0; 4_000];
        update[40..44].fill(1.0);
        update[3_996..].fill(2.0);
        table.add(1, &update);
        let pending = &table.pending[&(0, 1)];
        assert_eq!((&pending.rows[..], pending.elements.len()), (&[10, 999][..], 8));
        let mut row = [0.0; 4];
        table.read_row(999, &mut row, true);
        assert_eq!(row, [2.0; 4]);
        table.read_row(999, &mut row, false);
        assert_eq!(row, [0.0; 4], "rank 0 has added nothing");
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
