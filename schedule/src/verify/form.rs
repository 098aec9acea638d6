//! Checks that a schedule is well formed: everything that it names exists, and every place is used
//! as permitted.

use pleach_vocabulary::{Collective, Rank};

use super::violation::{Site, Violation};
use crate::{Block, Op, Part, Place, Schedule};

/// Most ranks of a schedule.
pub const MAX_RANKS: u32 = 16_384;
/// Most chunks of a lane under way.
pub const MAX_WINDOW: u32 = 64;
/// Most steps of a schedule.
pub const MAX_STEPS: u64 = 1 << 27;

/// Checks the form and returns how many steps there are.
pub(super) fn check(schedule: &Schedule) -> Result<u64, Violation> {
    sizes(schedule)?;
    blocks(schedule)?;
    let mut steps = 0;
    for (rank, lanes) in schedule.programs.iter().enumerate() {
        let rank = rank as Rank;
        for (lane_number, lane) in lanes.iter().enumerate() {
            let lane_number = lane_number as u32;
            let Some(&block) = schedule.blocks.get(lane.block as usize) else {
                return Err(Violation::UnknownBlock {
                    rank,
                    lane: lane_number,
                    block: lane.block,
                    blocks: schedule.blocks.len() as u32,
                });
            };
            for (number, step) in lane.steps.iter().enumerate() {
                let site = Site { rank, lane: lane_number, block: lane.block, step: number as u32 };
                for &(earlier, lag) in &step.after {
                    let known = if lag == 0 { number } else { lane.steps.len() };
                    if earlier as usize >= known {
                        return Err(Violation::UnknownStep { site, earlier, lag });
                    }
                }
                operation(schedule, site, block, &step.op)?;
            }
            steps += lane.steps.len() as u64;
            at_most("steps", steps, MAX_STEPS)?;
        }
    }
    Ok(steps)
}

fn at_most(what: &'static str, found: u64, most: u64) -> Result<(), Violation> {
    if found > most { Err(Violation::TooLarge { what, found, most }) } else { Ok(()) }
}

fn sizes(schedule: &Schedule) -> Result<(), Violation> {
    if schedule.programs.is_empty() {
        return Err(Violation::NoRanks);
    }
    at_most("ranks", schedule.programs.len() as u64, u64::from(MAX_RANKS))?;
    at_most("blocks", schedule.blocks.len() as u64, MAX_STEPS)?;
    let lanes: u64 = schedule.programs.iter().map(|lanes| lanes.len() as u64).sum();
    at_most("lanes", lanes, MAX_STEPS)?;
    if schedule.window == 0 {
        return Err(Violation::NoWindow);
    }
    at_most("chunks under way", u64::from(schedule.window), u64::from(MAX_WINDOW))?;
    let ranks = schedule.ranks();
    let named = match schedule.collective {
        Collective::SendRecv { from, to } => [from, to],
        other => [other.root().unwrap_or(0); 2],
    };
    match named.into_iter().find(|&rank| rank >= ranks) {
        Some(rank) => Err(Violation::UnknownRoot { collective: schedule.collective, rank, ranks }),
        None => Ok(()),
    }
}

fn blocks(schedule: &Schedule) -> Result<(), Violation> {
    let ranks = schedule.ranks();
    let parts = schedule.collective.parts(ranks);
    for (number, block) in schedule.blocks.iter().enumerate() {
        let number = number as u32;
        if block.part >= parts {
            return Err(Violation::UnknownPart { block: number, part: block.part, parts });
        }
        if block.weight == 0 {
            return Err(Violation::NoWeight { block: number });
        }
    }
    // In proportion to what was given, not to the number of parts, which a short text can make very
    // large.
    let mut covered: Vec<u32> = schedule.blocks.iter().map(|block| block.part).collect();
    covered.sort_unstable();
    covered.dedup();
    let has_data = |part: u32| (0..ranks).any(|rank| has_output(schedule, rank, part));
    let mut next = covered.iter().peekable();
    match (0..parts).find(|part| next.next_if_eq(&part).is_none() && has_data(*part)) {
        Some(part) => Err(Violation::Uncovered { part }),
        None => Ok(()),
    }
}

/// Whether the rank's input holds the part.
pub(super) fn has_input(schedule: &Schedule, rank: Rank, part: u32) -> bool {
    schedule.collective.input_parts(rank, schedule.ranks()).contains(part)
}

/// Whether the rank's output holds the part.
pub(super) fn has_output(schedule: &Schedule, rank: Rank, part: u32) -> bool {
    schedule.collective.output_parts(rank, schedule.ranks()).contains(part)
}

fn operation(schedule: &Schedule, site: Site, block: Block, op: &Op) -> Result<(), Violation> {
    let ranks = schedule.ranks();
    let peer = |named: Rank| {
        if named >= ranks {
            Err(Violation::UnknownRank { site, named, ranks })
        } else if named == site.rank {
            Err(Violation::ToItself { site })
        } else {
            Ok(())
        }
    };
    match op {
        Op::Signal { to, .. } => peer(*to),
        Op::Wait { from, .. } => peer(*from),
        Op::Put { to, src, dst, .. } => {
            peer(*to)?;
            let source = Place { rank: site.rank, part: *src };
            let target = Place { rank: *to, part: *dst };
            if !matches!(dst, Part::SharedOutput | Part::Scratch(_)) {
                return Err(Violation::PutInto { site, place: target });
            }
            exists(schedule, site, block, source)?;
            exists(schedule, site, block, target)
        }
        Op::Reduce { from, into } => {
            if from.is_empty() || into.is_empty() {
                return Err(Violation::NothingToDo { site });
            }
            for place in from.iter().chain(into) {
                if place.rank >= ranks {
                    return Err(Violation::UnknownRank { site, named: place.rank, ranks });
                }
                if place.rank != site.rank && matches!(place.part, Part::Input | Part::Output) {
                    return Err(Violation::Private { site, place: *place });
                }
                exists(schedule, site, block, *place)?;
            }
            distinct(site, from)?;
            distinct(site, into)?;
            if let [source] = from[..] {
                if into.contains(&source) {
                    return Err(Violation::NamedTwice { site, place: source });
                }
            } else if !schedule.collective.reduces() {
                return Err(Violation::CombinesNothing { site, collective: schedule.collective });
            }
            inputs_are_kept(site, from, into)
        }
    }
}

/// Checks that the rank of the place has such a slice for the block.
fn exists(schedule: &Schedule, site: Site, block: Block, place: Place) -> Result<(), Violation> {
    let there = match place.part {
        Part::Input | Part::SharedInput => has_input(schedule, place.rank, block.part),
        Part::Output | Part::SharedOutput => has_output(schedule, place.rank, block.part),
        Part::Scratch(_) => true,
    };
    if there { Ok(()) } else { Err(Violation::NoSlice { site, place, part: block.part }) }
}

/// Checks that no place is in the list twice.
fn distinct(site: Site, places: &[Place]) -> Result<(), Violation> {
    /// Up to this number, a comparison of all pairs is faster than sorting.
    const FEW: usize = 8;
    let twice = if places.len() <= FEW {
        places
            .iter()
            .enumerate()
            .find(|(index, place)| places[..*index].contains(place))
            .map(|(_, place)| *place)
    } else {
        let mut sorted = places.to_vec();
        sorted.sort_unstable();
        sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    };
    match twice {
        Some(place) => Err(Violation::NamedTwice { site, place }),
        None => Ok(()),
    }
}

/// Inputs are never written: they are the caller's. Only staging writes a shared input.
fn inputs_are_kept(site: Site, from: &[Place], into: &[Place]) -> Result<(), Violation> {
    let staged = from == [Place { rank: site.rank, part: Part::Input }];
    let written = into.iter().find(|place| match place.part {
        Part::Input => true,
        Part::SharedInput => !(staged && place.rank == site.rank),
        _ => false,
    });
    match written {
        Some(&place) => Err(Violation::WritesInput { site, place }),
        None => Ok(()),
    }
}
