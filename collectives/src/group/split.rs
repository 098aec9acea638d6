//! Splitting a group: ranks that name the same colour become a group of their own.
//!
//! A group made by a split has a device, an engine, memory and deadlines of its own: its ranks meet
//! again in the store where the first group's ranks met, and connect. So nothing that is done in
//! one of the two groups delays, fails or ends the other, signal slots and scratch need no further
//! division, and ranks that share a host use shared memory again. It costs a meeting (some
//! milliseconds a rank) and the scratch of another group, which is taken as it is touched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pleach_packing::topology::Topology;
use pleach_schedule::{RankSpace, SpaceError};
use pleach_transport::Space;
use pleach_transport::rendezvous::{JoinError, PrefixStore, Store, World};
use pleach_vocabulary::Rank;

use super::join::{expect_memory, meet, settings};
use super::{CollectiveError, Group, JoinGroupError, Options, Origin};
use crate::observe::{Observe, Part};

/// Sets the calls of a split apart from a caller's own all-gather.
const SPLIT_MARK: u32 = 0x5350_4c54;
/// What a rank says: whether it has a colour, which, its key, how often it has split the group.
const WORDS: usize = 4;

/// Why a group was not split.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// The ranks could not tell each other their colours.
    #[error("the group was not split: {0}")]
    Collective(#[from] CollectiveError),
    /// The ranks of this rank's colour did not become a group; the group that was to be split works
    /// as before.
    #[error("the {size} ranks of colour {colour} did not become a group: {source}")]
    Join {
        /// The colour.
        colour: u32,
        /// How many ranks named it.
        size: u32,
        /// The cause.
        #[source]
        source: Box<JoinGroupError>,
    },
    /// The grid is for another number of ranks, or has no such dimension.
    #[error(
        "a group of {ranks} ranks has no line along dimension {dimension} of a grid of extents {extents:?} for \
         {grid_ranks} ranks; make the grid for {ranks} ranks, and name one of its dimensions, from 0"
    )]
    Grid {
        /// The extents of the grid.
        extents: Vec<u32>,
        /// How many ranks it has.
        grid_ranks: u32,
        /// The dimension.
        dimension: usize,
        /// How many ranks the group has.
        ranks: u32,
    },
    /// Ranks are not the points of such a grid.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// A group over a device of the caller's has no place where its ranks could meet again.
    #[error(
        "the ranks of this group cannot meet again, as it was made over a device of the caller's; take one that was \
         joined"
    )]
    NoStore,
}

impl From<SplitError> for CollectiveError {
    fn from(error: SplitError) -> Self {
        match error {
            SplitError::Collective(error) => error,
            error => Self::NotMade(Arc::new(error)),
        }
    }
}

impl Group {
    /// A new group of those ranks that pass the same colour, numbered by their keys, and where
    /// those are equal as they are numbered here. `None` takes part in the call and in no new
    /// group. All ranks call it, and it returns when all new groups are there.
    ///
    /// The new group is independent of this one: it may be used at the same time by other threads,
    /// its failure ends no call here nor this group's there, and it stays when this one is closed.
    /// In a session that holds within an epoch: a failure of any of its groups ends the epoch, and
    /// the epoch's end is that of all of them. Its options are those of the group that was joined,
    /// but for metrics, which it serves only where each group takes any free port. Only for
    /// splitting it again must the process of rank 0 of that group still hold it or a group split
    /// from it.
    ///
    /// # Errors
    ///
    /// See [`SplitError`]; at the latest at this call's deadline and when `Options::join_timeout`
    /// has passed after that.
    pub fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>, SplitError> {
        self.split_in(colour, key, &self.shared.options, 0)
    }

    /// A new group of this rank's line in a grid, which may have holes: the ranks in which only the
    /// coordinate of one dimension differs, in the order of that coordinate. All ranks call it
    /// alike. In a grid of `d` [balanced](RankSpace::balanced) extents no line has more than
    /// `n^(1/d)` ranks, rounded up.
    ///
    /// # Errors
    ///
    /// See [`SplitError`].
    pub fn line(&self, grid: &RankSpace, dimension: usize) -> Result<Self, SplitError> {
        let (rank, ranks) = (self.rank(), self.world_size());
        let (extents, grid_ranks) = (grid.extents().to_vec(), grid.ranks());
        if grid_ranks != ranks || dimension >= extents.len() {
            return Err(SplitError::Grid { extents, grid_ranks, dimension, ranks });
        }
        // The line's first rank names it.
        let first = grid.line(rank, dimension).next();
        let line = self.split(first, grid.coordinate(rank, dimension))?;
        Ok(line.expect("this rank is in its line"))
    }

    /// A new group of the same ranks in the same order whose calls work on other memory:
    /// [`Group::on`] with a GPU's. All ranks call it. As independent of this one as any that is
    /// split from it.
    ///
    /// # Errors
    ///
    /// See [`SplitError`]; also what keeps the GPU from working.
    ///
    /// # Panics
    ///
    /// Never: every rank names the same colour.
    pub fn in_memory(&self, space: Space) -> Result<Self, SplitError> {
        let options = Options { space, ..self.shared.options.clone() };
        Ok(self.split_in(Some(0), self.rank(), &options, 0)?.expect("this rank named a colour"))
    }

    /// A new group of the same ranks in the same order, whose device has so many signal slots for
    /// each peer behind those of the group's calls: the same number on all ranks.
    pub(crate) fn with_signal_slots(&self, further: usize) -> Result<Self, SplitError> {
        let own = self.split_in(Some(0), self.rank(), &self.shared.options, further)?;
        Ok(own.expect("this rank named a colour"))
    }

    fn split_in(
        &self,
        colour: Option<u32>,
        key: u32,
        options: &Options,
        signal_slots: usize,
    ) -> Result<Option<Self>, SplitError> {
        if self.shared.store.is_none() && self.world_size() > 1 {
            return Err(SplitError::NoStore);
        }
        let number = self.shared.splits.fetch_add(1, Ordering::Relaxed);
        let own = [u64::from(colour.is_some()), colour.unwrap_or(0).into(), key.into(), number];
        let mut all = vec![0; WORDS * self.world_size() as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(SPLIT_MARK) };
        plain.gather_words(&own, &mut all)?;
        let part = colour.map(|colour| self.meet(colour, &all, options, signal_slots)).transpose();
        // The store is gone with rank 0, which may leave as soon as it returns: all parts must have
        // met by then. In a session, where the members have changed meanwhile, this says so.
        plain.barrier()?;
        part
    }

    /// The group of the ranks of this one's colour, by what all ranks have said.
    fn meet(
        &self,
        colour: u32,
        all: &[u64],
        options: &Options,
        signal_slots: usize,
    ) -> Result<Self, SplitError> {
        let members = members(all, colour);
        let size = members.len() as u32;
        let rank = members.iter().position(|rank| *rank == self.rank()).expect("this rank named its colour");
        // Rank 0's number, so that a call that failed on some ranks alone confuses no later one.
        let number = all[WORDS - 1];
        let name = match &self.shared.in_epoch {
            Some(in_epoch) => format!("e{}-s{number}-{colour}", in_epoch.epoch()),
            None => format!("s{number}-{colour}"),
        };
        // What joins the members without the others, if that joins them at all.
        let topology = self.topology().and_then(|topology| topology.only(&members).ok()).map(Arc::new);
        let group = self.join_part(&name, (rank as Rank, &members), topology, options, signal_slots);
        group.map_err(|source| SplitError::Join { colour, size, source: Box::new(source) })
    }

    /// Meets the ranks of a part of this group's store.
    fn join_part(
        &self,
        name: &str,
        (rank, members): (Rank, &[Rank]),
        topology: Option<Arc<Topology>>,
        before: &Options,
        signal_slots: usize,
    ) -> Result<Self, JoinGroupError> {
        expect_memory(before.space)?;
        let size = members.len() as u32;
        let world = World { rank, world_size: size, local_rank: None, ..before.world.clone() };
        // This group's ports are taken, by this group.
        let metrics = before.observe.metrics.filter(|address| address.port() == 0);
        let part = Some(self.part(name));
        let observe = Observe { metrics, part, ..before.observe.clone() };
        let options = Options { world, timeout: self.timeout, topology, observe, ..before.clone() };
        let mut settings = settings(&options);
        settings.signal_slots += signal_slots;
        let store: Option<Box<dyn Store>> = match &self.shared.store {
            Some(store) if size > 1 => Some(Box::new(PrefixStore::new(store.clone(), name))),
            None if size > 1 => return Err(JoinError::NoRendezvous { world_size: size }.into()),
            _ => None,
        };
        let part = self.shared.in_epoch.as_ref().map(|in_epoch| in_epoch.part(rank, members));
        let board = part.as_ref().map(super::parts::NewPart::board);
        let (joined, board) = meet(store, &options, &settings, board)?;
        Ok(Self::joined(joined, board, &options, part.map_or(Origin::Job, Origin::Part))?)
    }

    /// A part of this group, as traces call it.
    fn part(&self, name: &str) -> Part {
        match &self.shared.options.observe.part {
            Some(Part { name: before, joined_rank }) => {
                Part { name: format!("{before}.{name}"), joined_rank: *joined_rank }
            }
            None => Part { name: name.to_owned(), joined_rank: self.rank() },
        }
    }
}

/// The ranks that named a colour, in the order of their keys.
fn members(all: &[u64], colour: u32) -> Vec<Rank> {
    let named = all.chunks_exact(WORDS).zip(0..);
    let mut members: Vec<(u64, Rank)> = named
        .filter(|(words, _)| words[0] == 1 && words[1] == u64::from(colour))
        .map(|(words, rank)| (words[2], rank))
        .collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_by_key_then_by_rank_and_only_those_of_the_colour() {
        let words = [[1, 7, 2, 0], [1, 7, 1, 0], [0, 7, 0, 0], [1, 0, 0, 0], [1, 7, 1, 0]].concat();
        assert_eq!(members(&words, 7), [1, 4, 0]);
        assert_eq!(members(&words, 0), [3]);
        assert_eq!(members(&words, 1), [0; 0]);
    }
}
