//! Splitting a group: ranks that name the same colour become a group of their own.
//!
//! A *part* is a group that was made by a split. It has a device, an engine, memory and deadlines
//! of its own. So nothing that is done in one of the two groups delays, fails or ends the other,
//! and signal slots and scratch need no further division. Pairs of both groups on the same
//! connections would not have that: the fence of one group's call would end the other's pairs
//! (docs/decisions.md).
//!
//! What the ranks of the whole know of each other ([`KnownRanks`]) is taken over by the part: its
//! hosts, its fabric, its processors and its secret. So the ranks of a part do not meet. A split is
//! two all-gathers of the whole, the connections of the part, and a barrier of the whole:
//!
//! | call | what a rank says |
//! | --- | --- |
//! | all-gather | its colour, its key, how often it has split the group |
//! | all-gather | what it chose for the part, and the address of its device there; or why it has none |
//! | barrier | that it has its part, or has given it up |
//!
//! **Invariants:** every rank takes part in all three, whatever has failed at it, so the whole goes
//! on. A rank says in the part where its scratch is when it is connected to its first peers there,
//! and has its part when it was told that by them. So where all pairs connect, a member that does
//! not connect leaves no other one with a part. What ends the whole meanwhile is the error on all
//! ranks.
//!
//! Members whose memory is that of GPUs compare in the store where the first group's ranks met
//! whether these reach each other. In an epoch of a session the ranks of a part meet in that store.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pleach_schedule::{RankSpace, SpaceError};
use pleach_transport::rendezvous::{
    Difference, Fabric, JoinError, JoinOptions, KnownRanks, OpenedPart, PrefixStore, Store, World,
};
use pleach_transport::{Address, Space, clock};
use pleach_vocabulary::Rank;

use super::join::{board_of, expect_memory, first_peers, meet, settings};
use super::{CollectiveError, Group, JoinGroupError, Options, Origin};
use crate::engine::StatusBoard;
use crate::observe::{Observe, Part};

/// Sets the calls of a split apart from a caller's own all-gather.
const SPLIT_MARK: u32 = 0x5350_4c54;
/// What a rank says first: whether it has a colour, which, its key, how often it has split the
/// group.
const WORDS: usize = 4;
/// What a rank says of its device, in bytes: `+` and lines of what members choose for the part
/// and of the address, or `-` and why there is no device.
const LINE_BYTES: usize = 256;
const LINE_WORDS: usize = LINE_BYTES / size_of::<u64>();
/// The part of a call's time in which a rank connects: the other ranks wait in the call for it.
const CONNECT_SHARE: u32 = 2;
/// The settings that can differ between the members of a part, though the whole agreed on all.
const CHOSEN: [&str; 2] = ["memory", "topology"];

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
    /// but for metrics, which it serves only where each group takes any free port.
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
        let known = self.shared.known.as_ref().filter(|_| self.shared.in_epoch.is_none());
        if known.is_none() && self.shared.store.is_none() && self.world_size() > 1 {
            return Err(SplitError::NoStore);
        }
        let number = self.shared.splits.fetch_add(1, Ordering::Relaxed);
        let own = [u64::from(colour.is_some()), colour.unwrap_or(0).into(), key.into(), number];
        let mut all = vec![0; WORDS * self.world_size() as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(SPLIT_MARK) };
        plain.gather_words(&own, &mut all)?;
        let division = colour.map(|colour| self.division(colour, &all, options, signal_slots));
        if let Some(known) = known {
            return plain.make_known(known, division.as_ref());
        }
        let part = division.map(|division| self.meet(&division)).transpose();
        // The store is gone with rank 0, which may leave as soon as it returns: all parts must have
        // met by then. In a session, where the members have changed meanwhile, this says so.
        plain.barrier()?;
        part
    }

    /// The part of this rank's colour, by what all ranks have said.
    fn division(&self, colour: u32, all: &[u64], before: &Options, signal_slots: usize) -> Division {
        let members = members(all, colour);
        let rank = members.iter().position(|rank| *rank == self.rank()).expect("this rank named its colour");
        // Rank 0's number, so that a call that failed on some ranks alone confuses no later one.
        let number = all[WORDS - 1];
        let name = match &self.shared.in_epoch {
            Some(in_epoch) => format!("e{}-s{number}-{colour}", in_epoch.epoch()),
            None => format!("s{number}-{colour}"),
        };
        // What joins the members without the others, if that joins them at all.
        let topology = self.topology().and_then(|topology| topology.only(&members).ok()).map(Arc::new);
        let (rank, world_size) = (rank as Rank, members.len() as u32);
        let world = World { rank, world_size, local_rank: None, ..before.world.clone() };
        // This group's ports are taken, by this group.
        let metrics = before.observe.metrics.filter(|address| address.port() == 0);
        let observe = Observe { metrics, part: Some(self.part(&name)), ..before.observe.clone() };
        let options = Options { world, timeout: self.timeout, topology, observe, ..before.clone() };
        let mut settings = settings(&options);
        settings.signal_slots += signal_slots;
        Division { colour, name, members, options, settings }
    }

    /// Makes the parts of ranks that know each other; see the module.
    fn make_known(
        &self,
        known: &KnownRanks,
        division: Option<&Division>,
    ) -> Result<Option<Self>, SplitError> {
        let opened = division.map(|division| division.open(known));
        let own = division.zip(opened.as_ref());
        let own = own.map_or([0; LINE_WORDS], |(division, opened)| {
            let said = opened.as_ref().map(|opened| division.said(opened.device.address()));
            line(said.as_deref().map_err(|error| *error))
        });
        let mut lines = vec![0; LINE_WORDS * self.world_size() as usize];
        self.gather_words(&own, &mut lines)?;
        let part = division.zip(opened).map(|(division, opened)| {
            let part = opened.and_then(|opened| {
                let addresses = division.addresses(&lines, opened.device.fabric())?;
                self.connect(division, opened, addresses)
            });
            part.map_err(|source| division.error(source))
        });
        // A rank may leave its part as soon as it returns, and the store with it: all have theirs
        // by then. A whole that has failed meanwhile says why.
        self.barrier()?;
        part.transpose()
    }

    /// Connects to the members of a part.
    fn connect(
        &self,
        division: &Division,
        opened: Opened,
        addresses: Vec<Address>,
    ) -> Result<Self, JoinGroupError> {
        let options = &division.options;
        let whole = self.shared.driver.board();
        let ended = || whole.has_failed().then(|| "the group that is split has failed".to_owned());
        let deadline = clock::now() + options.join_timeout.min(self.timeout / CONNECT_SHARE);
        let mut joined = opened.device.connect(addresses, first_peers(options), deadline, ended)?;
        joined.store = self.store_of(&division.name);
        Ok(Self::joined(joined, opened.board, options, Origin::Job)?)
    }

    /// The place in this group's store where the ranks of a part meet.
    fn store_of(&self, name: &str) -> Option<Box<dyn Store>> {
        let store = self.shared.store.as_ref()?;
        Some(Box::new(PrefixStore::new(store.clone(), name)))
    }

    /// Meets the ranks of a part in this group's store.
    fn meet(&self, division: &Division) -> Result<Self, SplitError> {
        let met = || -> Result<Self, JoinGroupError> {
            let Division { name, members, options, settings, .. } = division;
            expect_memory(options.space)?;
            let store = if members.len() > 1 {
                let world_size = members.len() as u32;
                Some(self.store_of(name).ok_or(JoinError::NoRendezvous { world_size })?)
            } else {
                None
            };
            let rank = options.world.rank;
            let part = self.shared.in_epoch.as_ref().map(|in_epoch| in_epoch.part(rank, members));
            let board = part.as_ref().map(super::parts::NewPart::board);
            let (joined, board) = meet(store, options, settings, board)?;
            Ok(Self::joined(joined, board, options, part.map_or(Origin::Job, Origin::Part))?)
        };
        met().map_err(|source| division.error(source))
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

/// A part that is to be made, as one of its ranks sees it.
struct Division {
    colour: u32,
    name: String,
    /// Their ranks in the whole, by rank in the part.
    members: Vec<Rank>,
    options: Options,
    settings: JoinOptions,
}

/// The device of a part that is connected to no other rank.
struct Opened {
    device: OpenedPart,
    board: Arc<StatusBoard>,
}

impl Division {
    /// Opens the device of this rank.
    fn open(&self, known: &KnownRanks) -> Result<Opened, JoinGroupError> {
        expect_memory(self.options.space)?;
        let board = board_of(&self.options);
        let known = known.part(&self.members, &self.name);
        let device = known.open(&self.options.world, &self.settings, board.clone(), board.relays())?;
        Ok(Opened { device, board })
    }

    /// What this rank chose for the part.
    fn chosen(&self) -> [&str; CHOSEN.len()] {
        let value = |name| self.settings.knobs.iter().find(|(known, _)| known == name);
        CHOSEN.map(|name| value(name).map_or("not set", |(_, value)| value.as_str()))
    }

    /// What this rank says of its device, which has this address.
    fn said(&self, address: &Address) -> String {
        let chosen = self.chosen();
        chosen.into_iter().chain([&*address.0]).collect::<Vec<_>>().join("\n")
    }

    /// The addresses of the members, by rank in the part, from the lines of all ranks of the whole.
    fn addresses(&self, lines: &[u64], fabric: Fabric) -> Result<Vec<Address>, JoinGroupError> {
        let (own, chosen) = (self.options.world.rank, self.chosen());
        let address = |(rank, member): (Rank, &Rank)| {
            let line = &lines[LINE_WORDS * *member as usize..][..LINE_WORDS];
            let bytes: Vec<u8> = line.iter().flat_map(|word| word.to_le_bytes()).collect();
            let line = String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default());
            let Some(said) = line.strip_prefix('+') else {
                let reason = line.strip_prefix('-').unwrap_or(&line).to_owned();
                return Err(JoinError::Fabric { fabric, rank, reason });
            };
            let mut said = said.split('\n');
            for (setting, value) in CHOSEN.into_iter().zip(chosen) {
                let theirs = said.next().unwrap_or_default();
                if theirs != value {
                    let (first, second) = ((rank, theirs.to_owned()), (own, value.to_owned()));
                    return Err(JoinError::Differs(Difference {
                        setting: setting.to_owned(),
                        first,
                        second,
                    }));
                }
            }
            Ok(Address(said.next().unwrap_or_default().to_owned()))
        };
        let addresses: Result<_, JoinError> = (0..).zip(&self.members).map(address).collect();
        Ok(addresses?)
    }

    fn error(&self, source: JoinGroupError) -> SplitError {
        let size = self.members.len() as u32;
        SplitError::Join { colour: self.colour, size, source: Box::new(source) }
    }
}

/// What a rank says of its device in a part, or why it has none.
fn line(said: Result<&str, &JoinGroupError>) -> [u64; LINE_WORDS] {
    let text = match said {
        Ok(said) if said.len() < LINE_BYTES => format!("+{said}"),
        Ok(said) => format!("-its address is too long: {said}"),
        Err(JoinGroupError::Join(JoinError::Fabric { reason, .. })) => format!("-{reason}"),
        Err(error) => format!("-{error}"),
    };
    let mut bytes = [0; LINE_BYTES];
    let len = text.len().min(LINE_BYTES);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    let words = bytes.as_chunks::<{ size_of::<u64>() }>().0;
    std::array::from_fn(|index| u64::from_le_bytes(words[index]))
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
    use pleach_transport::rendezvous::DEFAULT_JOIN_TIMEOUT;

    use super::*;

    /// A part of ranks 2 and 0, as its rank 1 sees it, whose members chose this memory.
    fn division(memory: &str) -> Division {
        let world = World { rank: 1, world_size: 2, ..World::alone() };
        let options = Options::new(world);
        let knobs = [("memory", memory), ("topology", "none"), ("algorithm", "auto")];
        let settings = JoinOptions {
            fabric: options.fabric,
            knobs: knobs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
            signal_slots: 1,
            timeout: DEFAULT_JOIN_TIMEOUT,
        };
        Division { colour: 7, name: "s0-7".to_owned(), members: vec![2, 0], options, settings }
    }

    #[test]
    fn members_have_the_addresses_of_the_part_by_rank_and_learn_what_others_say_instead() {
        let own = division("host");
        let said = |address: &str| own.said(&Address(address.to_owned()));
        let (first, last) = (said("host:0-0 unix:ab 127.0.0.1:1"), said("127.0.0.1:2"));
        // Rank 1 of the whole is in no part.
        let addresses = |last: Result<&str, &JoinGroupError>| {
            let lines = [line(Ok(&first)), [0; LINE_WORDS], line(last)].concat();
            own.addresses(&lines, Fabric::Tcp).map_err(|error| error.to_string())
        };
        let expected = ["127.0.0.1:2", "host:0-0 unix:ab 127.0.0.1:1"].map(|text| Address(text.to_owned()));
        assert_eq!(addresses(Ok(&last)).expect("all have devices"), expected);
        let other = division("cuda").said(&Address("127.0.0.1:2".to_owned()));
        let error = addresses(Ok(&other)).expect_err("memories differ");
        assert!(error.contains("memory is cuda at rank 0 and host at rank 1"), "{error}");
        let refused =
            JoinError::Fabric { fabric: Fabric::Tcp, rank: 5, reason: "no port is free".to_owned() };
        let error = addresses(Err(&refused.into())).expect_err("it has no device");
        assert!(error.contains("rank 0") && error.contains("no port is free"), "{error}");
        let error = addresses(Ok(&said(&"x".repeat(LINE_BYTES)))).expect_err("it does not fit");
        assert!(error.contains("too long"), "{error}");
    }

    #[test]
    fn members_come_by_key_then_by_rank_and_only_those_of_the_colour() {
        let words = [[1, 7, 2, 0], [1, 7, 1, 0], [0, 7, 0, 0], [1, 0, 0, 0], [1, 7, 1, 0]].concat();
        assert_eq!(members(&words, 7), [1, 4, 0]);
        assert_eq!(members(&words, 0), [3]);
        assert_eq!(members(&words, 1), [0; 0]);
    }
}
