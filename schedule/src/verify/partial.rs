//! Whether a schedule admits partial rounds.
//!
//! In a partial round each rank decides, when it begins its run, what its input is: its
//! contribution, or neutral elements. The results are to be what the ranks combine that have given
//! a contribution. A schedule admits that if
//!
//! * the collective combines: without an operation there are no neutral elements;
//! * each contribution enters each output exactly once, and only from its rank's input. Then a
//!   neutral input is the only thing that an absent rank changes;
//! * nobody else touches an input before its rank has done a step in this run. So no byte of it is
//!   read before it is decided.
//!
//! This follows from what [`verify`](super::verify) demands of collectives that combine. Here it is
//! found again, by other means: contributions are counted along the steps, in place of expressions,
//! and each event knows the ranks that have begun, in place of a search for orders. Inputs and
//! outputs are registered and apart, as those of rounds are.

use std::collections::HashMap;

use pleach_vocabulary::{Collective, Rank};

use super::form::has_output;
use super::memory::Set;
use super::{Event, Graph, LanesByBlock, MAX_WORDS, Site, Violation, issued};
use crate::{BlockId, Op, Part, Place, Schedule};

/// Why a schedule admits no partial rounds.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotPartial {
    /// There is no operation.
    #[error("{collective} combines nothing, so a rank cannot give something neutral")]
    CombinesNothing {
        /// The collective.
        collective: Collective,
    },
    /// A contribution is in an output more than once.
    #[error(
        "the contribution of rank {contributor} enters block {block} of rank {rank}'s output more than once"
    )]
    EntersAgain {
        /// The rank that contributes.
        contributor: Rank,
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
    },
    /// A contribution is not in an output.
    #[error("the contribution of rank {contributor} does not enter block {block} of rank {rank}'s output")]
    EntersNot {
        /// The rank that contributes.
        contributor: Rank,
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
    },
    /// An input is touched before its rank has decided what it is.
    #[error("{site} touches the input of rank {owner} before that rank is known to have begun")]
    TouchedEarly {
        /// The step.
        site: Site,
        /// The rank of the input.
        owner: Rank,
    },
    /// An input does not keep what its rank has decided.
    #[error("{site} writes to the input of rank {owner}")]
    Written {
        /// The step.
        site: Site,
        /// The rank of the input.
        owner: Rank,
    },
    /// It is no schedule that could be proved.
    #[error(transparent)]
    Violation(Violation),
}

/// Whether a schedule, which [`verify`](super::verify) has accepted, admits partial rounds. Takes
/// about as long as the proof.
///
/// # Errors
///
/// The first reason that was found why it does not.
pub fn expect_partial_rounds(schedule: &Schedule) -> Result<(), NotPartial> {
    let collective = schedule.collective;
    if !collective.reduces() {
        return Err(NotPartial::CombinesNothing { collective });
    }
    let lanes = LanesByBlock::new(schedule);
    for block in 0..schedule.blocks.len() as BlockId {
        let graph = Graph::new(schedule, block, lanes.of(block)).map_err(NotPartial::Violation)?;
        check_touches(&graph)?;
        check_contributions(&graph)?;
    }
    Ok(())
}

/// The places that a step touches, with whether it writes them.
fn places(own: Rank, op: &Op) -> impl Iterator<Item = (Place, bool)> + '_ {
    let (from, into): (&[Place], &[Place]) = match op {
        Op::Reduce { from, into } => (from, into),
        Op::Put { .. } | Op::Signal { .. } | Op::Wait { .. } => (&[], &[]),
    };
    let put = match op {
        Op::Put { to, src, dst, .. } => {
            [Some((Place { rank: own, part: *src }, false)), Some((Place { rank: *to, part: *dst }, true))]
        }
        _ => [None, None],
    };
    let read = from.iter().map(|place| (*place, false));
    read.chain(into.iter().map(|place| (*place, true))).chain(put.into_iter().flatten())
}

/// Checks that peers touch an input only after a step of its rank.
fn check_touches(graph: &Graph<'_>) -> Result<(), NotPartial> {
    let words = graph.schedule.ranks().div_ceil(u64::BITS) as usize;
    let found = graph.events() as u64 * words as u64;
    if found > MAX_WORDS {
        let what = "words about the events of a partial round";
        return Err(NotPartial::Violation(Violation::TooLarge { what, found, most: MAX_WORDS }));
    }
    let mut sorted: Vec<Event> = (0..graph.events() as u32).collect();
    sorted.sort_unstable_by_key(|event| graph.position[*event as usize]);
    // By event: the ranks that have done a step before, and the rank of the event itself.
    let mut begun = vec![0u64; found as usize];
    for event in sorted {
        let own = graph.rank(event / 2);
        let start = event as usize * words;
        graph.predecessors(event, |before, lag| {
            for word in 0..if lag == 0 { words } else { 0 } {
                begun[start + word] |= begun[before as usize * words + word];
            }
        });
        begun[start + own as usize / 64] |= 1 << (own % 64);
        if event != issued(event / 2) {
            continue;
        }
        for (place, writes) in places(own, &graph.steps[event as usize / 2].op) {
            let (owner, site) = (place.rank, graph.site(event / 2));
            if !place.part.is_input() {
                continue;
            }
            if begun[start + owner as usize / 64] >> (owner % 64) & 1 == 0 {
                return Err(NotPartial::TouchedEarly { site, owner });
            }
            // A copy of an input to where peers read it is nothing.
            let is_own_copy = owner == own && place.part == Part::SharedInput;
            if writes && !is_own_copy {
                return Err(NotPartial::Written { site, owner });
            }
        }
    }
    Ok(())
}

/// The contributions in a place: at least once, and more often.
#[derive(Clone)]
struct Content {
    once: Set,
    again: Set,
}

impl Content {
    fn empty(ranks: u32) -> Self {
        Self { once: Set::empty(ranks), again: Set::empty(ranks) }
    }

    fn add(&mut self, other: &Self) {
        self.again.join(&other.again);
        self.again.join(&self.once.intersection(&other.once));
        self.once.join(&other.once);
    }
}

/// Which memory of its rank a place is, where inputs and outputs are registered.
fn memory(part: Part) -> u32 {
    match part {
        Part::Input | Part::SharedInput => 0,
        Part::Output | Part::SharedOutput => 1,
        Part::Scratch(slot) => 2 + u32::from(slot),
    }
}

/// Checks that each contribution enters each output once.
fn check_contributions(graph: &Graph<'_>) -> Result<(), NotPartial> {
    let (schedule, block) = (graph.schedule, graph.block);
    let (ranks, part) = (schedule.ranks(), schedule.blocks[block as usize].part);
    let mut required = Set::empty(ranks);
    let mut contents: HashMap<(Rank, u32), Content> = HashMap::new();
    for rank in (0..ranks).filter(|rank| schedule.collective.contributes(*rank, part, ranks)) {
        required.insert(rank);
        let mut own = Content::empty(ranks);
        own.once.insert(rank);
        contents.insert((rank, memory(Part::Input)), own);
    }
    for &step in &graph.order {
        let mut sum = Content::empty(ranks);
        let mut into = Vec::new();
        for (place, writes) in places(graph.rank(step), &graph.steps[step as usize].op) {
            let key = (place.rank, memory(place.part));
            match contents.get(&key) {
                _ if writes => into.push(key),
                Some(content) => sum.add(content),
                None => {}
            }
        }
        into.into_iter().for_each(|key| drop(contents.insert(key, sum.clone())));
    }
    for rank in (0..ranks).filter(|rank| has_output(schedule, *rank, part)) {
        let nothing = Content::empty(ranks);
        let content = contents.get(&(rank, memory(Part::Output))).unwrap_or(&nothing);
        if let Some(contributor) = required.first_not_in(&content.once) {
            return Err(NotPartial::EntersNot { contributor, rank, block });
        }
        if let Some(contributor) = content.again.first_not_in(&Set::empty(ranks)) {
            return Err(NotPartial::EntersAgain { contributor, rank, block });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Access, Algorithm, generate};
    use crate::verify::verify;

    const MAPPED: &str = include_str!("../../tests/verify/schedules/all-reduce-mapped-direct-of-2.txt");
    const RING: &str = include_str!("../../tests/verify/schedules/all-reduce-ring-of-3.txt");

    /// A schedule with one thing changed, and what is said of it.
    fn refused(text: &str, from: &str, to: &str) -> String {
        assert!(text.contains(from), "nothing to change: {from}");
        let schedule = Schedule::parse(&text.replacen(from, to, 1)).expect("a schedule");
        expect_partial_rounds(&schedule).expect_err(to).to_string()
    }

    #[test]
    fn every_generator_is_admitted_where_it_combines_and_refused_where_it_does_not() {
        let mut admitted = 0;
        for ranks in 1..=8 {
            let all = [
                Collective::AllReduce,
                Collective::Reduce { root: ranks - 1 },
                Collective::ReduceScatter,
                Collective::AllGather,
                Collective::Broadcast { root: 0 },
                Collective::Barrier,
            ];
            for collective in all {
                let grids = [format!("1x{ranks}"), format!("2x{}", ranks / 2), "2d".into(), "3d".into()];
                let plain = Algorithm::names(collective).iter().filter(|name| !name.contains(':'));
                let families = ["grid", "grid-staged", "hierarchical"];
                let of_grids = families
                    .iter()
                    .flat_map(|family| grids.iter().map(move |grid| format!("{family}:{grid}")));
                let names = plain.map(|name| (*name).to_owned()).chain(of_grids);
                for name in names {
                    let Ok(algorithm) = Algorithm::named(&name, collective) else { continue };
                    for access in [Access::Put, Access::Mapped] {
                        let Ok(schedule) = generate(collective, &algorithm, ranks, access) else { continue };
                        let schedule = verify(schedule).expect("generated").schedule().clone();
                        let found = expect_partial_rounds(&schedule);
                        let what = format!("{collective} by {name} ({access}), {ranks} ranks");
                        if collective.reduces() {
                            assert_eq!(found, Ok(()), "{what}");
                            admitted += 1;
                        } else {
                            assert_eq!(found, Err(NotPartial::CombinesNothing { collective }), "{what}");
                        }
                    }
                }
            }
        }
        assert!(admitted > 100, "{admitted} schedules");
    }

    #[test]
    fn a_contribution_that_enters_twice_or_never_is_named() {
        assert_eq!(
            refused(MAPPED, "reduce shared-input + 1.shared-input", "reduce 1.shared-input + 1.shared-input"),
            "the contribution of rank 0 does not enter block 0 of rank 0's output"
        );
        assert_eq!(
            refused(MAPPED, "6: copy scratch-0 -> output", "6: reduce scratch-0 + input -> output"),
            "the contribution of rank 0 enters block 0 of rank 0's output more than once"
        );
        assert_eq!(
            refused(MAPPED, "6: copy scratch-0 -> output", "6: copy scratch-0 -> scratch-1"),
            "the contribution of rank 0 does not enter block 0 of rank 0's output"
        );
    }

    #[test]
    fn an_input_that_is_touched_before_its_rank_has_begun_is_named() {
        let early = "    2: reduce shared-input + 1.shared-input -> scratch-0\n    3: wait 1 slot 0\n";
        let good = "    2: wait 1 slot 0\n    3: reduce shared-input + 1.shared-input -> scratch-0\n";
        assert_eq!(
            refused(MAPPED, good, early),
            "rank 0 lane 0 (block 0) step 2 touches the input of rank 1 before that rank is known to have begun"
        );
        assert_eq!(
            refused(MAPPED, "6: copy scratch-0 -> output", "6: copy scratch-0 -> input"),
            "rank 0 lane 0 (block 0) step 6 writes to the input of rank 0"
        );
    }

    #[test]
    fn schedules_that_cannot_be_ordered_and_good_ones_are_told_apart() {
        let ring = Schedule::parse(RING).expect("a schedule");
        assert_eq!(expect_partial_rounds(&ring), Ok(()));
        let said = refused(RING, "wait 0 slot 0", "wait 0 slot 9");
        assert!(said.contains("slot"), "{said}");
    }
}
