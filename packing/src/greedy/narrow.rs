//! Sets of nodes into which little leads, and how often trees have entered them.
//!
//! Every tree of a root enters every set without the root at least once. Where the bandwidth into a
//! set is little more than the bound, trees that enter it several times leave too little for those
//! that come later, though no link of it is full yet: a server that all other servers reach over
//! few NICs is such a set, and so is all that is outside the root's server. They are found by a
//! flow to every rank, whose minimum cuts on the side of the rank and on the side of the root are
//! two of them.

use std::collections::BTreeSet;

use pleach_vocabulary::Rank;

use crate::flow::{Amount, Network};
use crate::topology::Topology;

/// Most sets that are kept.
const SETS_MAX: usize = 4_096;

/// The sets, and which of them each link leads into.
#[derive(Debug, Default)]
pub(super) struct Narrows {
    sets: Vec<Narrow>,
    /// By place in [`Topology::links`]; empty where there are no sets.
    entered_by: Vec<Vec<u32>>,
}

#[derive(Debug)]
struct Narrow {
    /// Into it, in bytes a second.
    carries: f64,
    /// How often trees have entered it.
    entries: u32,
}

impl Narrows {
    /// Those around all ranks but the root that hold several ranks; a single one is entered once by
    /// every tree as it is.
    pub(super) fn around(topology: &Topology, root: Rank) -> Self {
        let links = topology.links();
        let mut network = Network::new(topology.nodes().len());
        for link in links {
            network.add(link.from.0 as usize, link.to.0 as usize, Amount::from(link.bytes_per_s), 0);
        }
        let root = topology.node(root).0 as usize;
        let ranks: Vec<usize> = (0..topology.ranks()).map(|rank| topology.node(rank).0 as usize).collect();
        let mut found: BTreeSet<Vec<bool>> = BTreeSet::new();
        for &rank in ranks.iter().filter(|&&rank| rank != root) {
            network.max_amount(root, rank, Amount::MAX);
            let far = (0..network.nodes()).map(|node| !network.is_source_side(node)).collect();
            for set in [network.sink_side(rank), far] {
                if ranks.iter().filter(|&&rank| set[rank]).count() > 1 && found.len() < SETS_MAX {
                    found.insert(set);
                }
            }
        }
        let mut narrows =
            Self { sets: Vec::with_capacity(found.len()), entered_by: vec![Vec::new(); links.len()] };
        for (number, set) in found.iter().enumerate() {
            let mut carries = 0.0;
            for (place, link) in links.iter().enumerate() {
                if set[link.to.0 as usize] && !set[link.from.0 as usize] {
                    narrows.entered_by[place].push(number as u32);
                    carries += link.bytes_per_s as f64;
                }
            }
            narrows.sets.push(Narrow { carries, entries: 0 });
        }
        narrows
    }

    /// Counts that a link is used once more.
    pub(super) fn enter(&mut self, link: usize) {
        for &set in self.entered_by.get(link).into_iter().flatten() {
            self.sets[set as usize].entries += 1;
        }
    }

    /// How many times more entries than its share so far some set would have that a link leads
    /// into, at least 1; `per_byte` is how many entries a byte a second of what leads into a set is
    /// worth so far.
    pub(super) fn excess(&self, link: usize, per_byte: f64) -> f64 {
        let excess = |&set: &u32| {
            let Narrow { carries, entries } = self.sets[set as usize];
            f64::from(entries + 1) / (carries * per_byte).max(1.0)
        };
        self.entered_by.get(link).into_iter().flatten().map(excess).fold(1.0, f64::max)
    }
}
