//! The proof of a family on one block, and the lanes that each rank makes from it.
//!
//! **What is shown, by blocks.** The column, block 0 at all its ranks, is proved as a block of any
//! schedule is: signals, deadlock, races, presence, values, for all placements. And the family is
//! well formed ([`FamilyFlaw`]): there is one translation for each block; the collective treats
//! block `b` and its ranks as block 0 and the ranks from which `b` translates them; and where the
//! sources of a reduce are put in another order, no result depends on that.
//!
//! **Why that suffices.** Lanes of different blocks share neither signal slots nor bytes, so a
//! schedule is right if each of its blocks is. All checks of a block depend on its lanes up to a
//! renaming of the ranks, and on which ranks have the block in their input, have it in their output
//! and contribute to it ([`super::classes`] uses the same). A translation is a bijection of the
//! ranks by what it is, so block `b`, which is *defined* as the translation of block 0, passes all
//! checks that block 0 passes. For the order of sources see [`super::classes`]: two sources
//! commute; of three or more, the order decides about the bits alone, and all who hold a result of
//! a block by copies alone hold copies of one result.
//!
//! **By ranks.** The lanes of all ranks are made for the proof, from that of rank 0, and signals,
//! deadlock and values are examined on all. A translation takes the lane of every rank to the lane
//! of the rank that it translates to, by definition, and the collective treats all ranks alike; so
//! it takes each signal, each two accesses to a rank's memory and each access of a rank to those of
//! another rank, and one way of events to another. Whether two events are ordered is therefore
//! asked for the signals of rank 0, the accesses to its memory, and its own accesses alone.
//!
//! **Who shows what.** Every rank that has the same family (the signature of a run says so) makes
//! its own lanes by the definition, from a column that it has proved itself. So a rank trusts no
//! lane of a peer, and no rank makes the lanes of another.

use std::collections::HashMap;
use std::fmt;

use pleach_vocabulary::{Collective, Rank};

use super::violation::Violation;
use super::{Facts, LanesByBlock, Proof, form, prove};
use crate::family::{Family, SourceOrder, Symmetry, Translations};
use crate::{BlockId, Lane, Op, Part, Place, Schedule, Step};

/// Why a family does not say what its schedule is, or cannot be proved on one block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FamilyFlaw {
    /// The extents are those of another number of ranks.
    Extents {
        /// The extents.
        extents: Vec<u32>,
        /// The number of ranks.
        ranks: u32,
    },
    /// There is not one block for each rank, or by ranks not one block.
    Blocks {
        /// The number of blocks.
        blocks: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The collective does not treat all ranks alike.
    Collective {
        /// The collective.
        collective: Collective,
    },
    /// The collective does not treat a block as it treats block 0: the block is of another part.
    Part {
        /// The block.
        block: BlockId,
        /// Its part.
        part: u32,
        /// The part that it would have to be of.
        expected: u32,
    },
    /// A rank has other lanes than one of block 0; by ranks, rank 0 has not one or another has any.
    Lanes {
        /// The rank.
        rank: Rank,
        /// The number of its lanes.
        lanes: u32,
    },
    /// Sources are ordered by contributor, but two steps combine the same contributions (by ranks,
    /// every rank combines all), so what they make may differ in another order.
    OrderMatters,
}

impl fmt::Display for FamilyFlaw {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Extents { extents, ranks } => {
                write!(formatter, "no grid of extents {extents:?} has {ranks} ranks")
            }
            Self::Blocks { blocks, ranks } => {
                write!(formatter, "it has {blocks} blocks, not one, nor one for each of {ranks} ranks")
            }
            Self::Collective { collective } => {
                write!(formatter, "{collective} does not treat all ranks alike")
            }
            Self::Part { block, part, expected } => {
                write!(formatter, "block {block} is of part {part}, not {expected}, so it is no translation")
            }
            Self::Lanes { rank, lanes } => {
                write!(
                    formatter,
                    "the column has {lanes} lanes of rank {rank}, and not just what is translated"
                )
            }
            Self::OrderMatters => formatter.write_str(
                "two steps combine the same contributions, so their order may not depend on the block",
            ),
        }
    }
}

/// Proves a family: all checks of [`verify`](super::verify) for the schedule that it describes, in
/// the time and memory of one block.
///
/// # Errors
///
/// [`Violation::NoFamily`] if the family is not well formed, else the first violation in its block
/// 0.
pub fn verify_family(family: Family) -> Result<Proof, Violation> {
    let refused = |flaw| Err(Violation::NoFamily { flaw: Box::new(flaw) });
    let column = &family.column;
    let steps = form::check(column)?;
    let ranks = column.ranks();
    let Some(translations) = Translations::new(&family.extents, ranks) else {
        return refused(FamilyFlaw::Extents { extents: family.extents, ranks });
    };
    let flaw = match family.symmetry {
        Symmetry::Blocks => check_blocks(column),
        Symmetry::Ranks => check_ranks(column, family.source_order),
    };
    if let Err(flaw) = flaw {
        return refused(flaw);
    }
    let proved = ProvedFamily { writers: writers(column), family, translations };
    let (column, source_order) = (&proved.family.column, proved.family.source_order);
    if proved.family.symmetry == Symmetry::Ranks {
        let whole = proved.unfolded();
        let steps = form::check(&whole)?;
        let lanes = LanesByBlock::new(&whole);
        let mut facts = Facts::new(&whole, steps);
        prove(&whole, 0, lanes.of(0), Some(0), &mut facts)?;
        return Ok(Proof::of_family(proved, facts));
    }
    let lanes = LanesByBlock::new(column);
    let mut facts = Facts::new(column, steps);
    let (_, by_copies_alone) = prove(column, 0, lanes.of(0), None, &mut facts)?;
    let has_many_sources = || {
        let mut steps = column.programs.iter().flatten().flat_map(|lane| &lane.steps);
        steps.any(|step| matches!(&step.op, Op::Reduce { from, .. } if from.len() > 2))
    };
    if source_order == SourceOrder::ByContributor && !by_copies_alone && has_many_sources() {
        return refused(FamilyFlaw::OrderMatters);
    }
    Ok(Proof::of_family(proved, facts))
}

/// Checks that every block has its translation, which keeps what the collective says of the block.
fn check_blocks(column: &Schedule) -> Result<(), FamilyFlaw> {
    let (ranks, blocks) = (column.ranks(), column.blocks.len() as u32);
    if blocks != ranks {
        return Err(FamilyFlaw::Blocks { blocks, ranks });
    }
    // The translation by `b` takes rank 0 to rank `b`, so it takes who gives or gets part 0 to who
    // gives or gets part `b`.
    let part_of: fn(BlockId) -> u32 = match column.collective {
        Collective::AllReduce => |_| 0,
        Collective::AllGather | Collective::ReduceScatter => |block| block,
        collective => return Err(FamilyFlaw::Collective { collective }),
    };
    for (block, &cut) in (0..).zip(&column.blocks) {
        if cut.part != part_of(block) {
            return Err(FamilyFlaw::Part { block, part: cut.part, expected: part_of(block) });
        }
    }
    for (rank, lanes) in (0..).zip(&column.programs) {
        if !matches!(lanes[..], [Lane { block: 0, .. }]) {
            return Err(FamilyFlaw::Lanes { rank, lanes: lanes.len() as u32 });
        }
    }
    Ok(())
}

/// Checks that there is one block, that the collective treats all ranks alike, and that the lane of
/// rank 0 is there alone and is translated as it is.
fn check_ranks(column: &Schedule, source_order: SourceOrder) -> Result<(), FamilyFlaw> {
    let (ranks, blocks) = (column.ranks(), column.blocks.len() as u32);
    if blocks != 1 {
        return Err(FamilyFlaw::Blocks { blocks, ranks });
    }
    if column.collective != Collective::AllReduce {
        return Err(FamilyFlaw::Collective { collective: column.collective });
    }
    if source_order != SourceOrder::AsTranslated {
        return Err(FamilyFlaw::OrderMatters);
    }
    for (rank, lanes) in (0..).zip(&column.programs) {
        if lanes.len() != usize::from(rank == 0) {
            return Err(FamilyFlaw::Lanes { rank, lanes: lanes.len() as u32 });
        }
    }
    Ok(())
}

/// By rank and scratch slot: the first other rank that writes it.
fn writers(column: &Schedule) -> HashMap<(Rank, u16), Rank> {
    let mut writers = HashMap::new();
    for (own, lanes) in (0..).zip(&column.programs) {
        for step in lanes.iter().flat_map(|lane| &lane.steps) {
            let mut add = |place: &Place| {
                if let (true, Part::Scratch(slot)) = (place.rank != own, place.part) {
                    writers.entry((place.rank, slot)).or_insert(own);
                }
            };
            match &step.op {
                Op::Put { to, dst, .. } => add(&Place { rank: *to, part: *dst }),
                Op::Reduce { into, .. } => into.iter().for_each(add),
                Op::Signal { .. } | Op::Wait { .. } => {}
            }
        }
    }
    writers
}

/// A family that was proved. **Invariant:** only [`verify_family`] makes it.
#[derive(Debug)]
pub struct ProvedFamily {
    family: Family,
    translations: Translations,
    writers: HashMap<(Rank, u16), Rank>,
}

impl ProvedFamily {
    /// The lanes of block 0, one for each rank, and all blocks; or the lane of rank 0.
    #[must_use]
    pub fn column(&self) -> &Schedule {
        &self.family.column
    }

    /// What was proved.
    #[must_use]
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// The rank of the column whose lane is translated to the lane of `block` at `rank`.
    #[must_use]
    pub fn position(&self, rank: Rank, block: BlockId) -> Rank {
        match self.family.symmetry {
            Symmetry::Blocks => self.translations.subtract(rank, block),
            Symmetry::Ranks => 0,
        }
    }

    /// The rank that is displaced from rank 0 as `rank` is from `origin`.
    #[must_use]
    pub fn displacement(&self, origin: Rank, rank: Rank) -> Rank {
        self.translations.subtract(rank, origin)
    }

    /// A rank of the column as it is in the block that translates by `by`: the sum of both.
    #[must_use]
    pub fn translated_rank(&self, rank: Rank, by: Rank) -> Rank {
        self.translations.add(rank, by)
    }

    /// The lanes of a rank, and no others: as many as blocks.
    #[must_use]
    pub fn lanes(&self, rank: Rank) -> Vec<Lane> {
        match self.family.symmetry {
            Symmetry::Blocks => {
                let ranks = self.family.column.ranks();
                (0..ranks).map(|turn| self.lane(self.block(rank, turn), rank)).collect()
            }
            Symmetry::Ranks => vec![self.translated_lane(0, 0, rank)],
        }
    }

    /// The block of a rank's lane of this number, of those that it has.
    #[must_use]
    pub fn block(&self, rank: Rank, lane: u32) -> BlockId {
        match self.family.symmetry {
            Symmetry::Blocks => self.family.lane_order.block(rank, lane, self.family.column.ranks()),
            Symmetry::Ranks => 0,
        }
    }

    fn lane(&self, block: BlockId, rank: Rank) -> Lane {
        self.translated_lane(self.position(rank, block), block, block)
    }

    /// The column's lane at `position`, translated by `by`, as a lane of `block`.
    fn translated_lane(&self, position: Rank, block: BlockId, by: Rank) -> Lane {
        let steps = self.family.column.programs[position as usize][0].steps.iter();
        let step =
            |step: &Step| Step { op: self.translated(position, &step.op, by), after: step.after.clone() };
        Lane { block, steps: steps.map(step).collect() }
    }

    fn translated(&self, position: Rank, op: &Op, by: Rank) -> Op {
        let renamed = |rank: Rank| self.translations.add(rank, by);
        let renamed_place = |place: &Place| Place { rank: renamed(place.rank), part: place.part };
        match op {
            Op::Signal { to, signal_slot } => Op::Signal { to: renamed(*to), signal_slot: *signal_slot },
            Op::Wait { from, signal_slot } => Op::Wait { from: renamed(*from), signal_slot: *signal_slot },
            Op::Put { to, src, dst, signal_slot } => {
                Op::Put { to: renamed(*to), src: *src, dst: *dst, signal_slot: *signal_slot }
            }
            Op::Reduce { from, into } => {
                let into = into.iter().map(renamed_place).collect();
                let from = if from.len() > 1 && self.family.source_order == SourceOrder::ByContributor {
                    let mut ordered: Vec<(Rank, Place)> = from
                        .iter()
                        .map(|place| (renamed(self.contributor(position, place)), renamed_place(place)))
                        .collect();
                    ordered.sort_by_key(|&(contributor, _)| contributor);
                    ordered.into_iter().map(|(_, place)| place).collect()
                } else {
                    from.iter().map(renamed_place).collect()
                };
                Op::Reduce { from, into }
            }
        }
    }

    /// Who contributes a source, in the column.
    fn contributor(&self, own: Rank, place: &Place) -> Rank {
        match place.part {
            Part::Scratch(slot) if place.rank == own => {
                self.writers.get(&(own, slot)).copied().unwrap_or(own)
            }
            _ => place.rank,
        }
    }

    /// The schedule with the lanes of all ranks.
    #[must_use]
    pub fn unfolded(&self) -> Schedule {
        let Schedule { collective, window, single_chunk, .. } = self.family.column;
        let programs = (0..self.family.column.ranks()).map(|rank| self.lanes(rank)).collect();
        Schedule { collective, window, single_chunk, blocks: self.family.column.blocks.clone(), programs }
    }
}
