//! Rings, which is what libraries use where they do not look at the links: as many as fit, and what
//! they reach.
//!
//! A ring visits every rank once and comes back. Its two directions are two rings of the same
//! links, so what is looked for are cycles in the undirected graph: the most that share no link,
//! each at the rate of one link. Parallel links count as so many, and two ranks that only switches
//! join are neighbours, over the links to and from the switches (of which a ring uses both ends of
//! each rank's, so half a link's rate is tried as well). Where links differ, each rate of one link
//! is tried, and the one by which all rings together carry the most is taken.
//!
//! With `p` ranks and rings that carry `c` each way together: broadcast and reduce go at 2c,
//! all-gather, reduce-scatter, gather and scatter at 2c·p/(p-1), all-reduce at c·p/(p-1).
//!
//! The search is exact up to [`EXACT_RANKS_MAX`] ranks without switches. Beyond, cycles are
//! searched one after the other in what is left and [`Rings::is_most`] says whether more are ruled
//! out by the links that ranks have.

use std::collections::BTreeMap;

use pleach_vocabulary::{Collective, Rank};

use super::scale::merged;
use super::shape::{Shape, Way, Weighted};
use super::{Rate, Tree};
use crate::topology::{NodeId, Topology};

mod cycles;

/// Up to how many ranks without switches the most rings are found for certain.
pub const EXACT_RANKS_MAX: u32 = 8;

/// Cycles through all ranks that fit beside each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rings {
    /// The ranks of each in their order; the last is joined to the first.
    pub cycles: Vec<Vec<Rank>>,
    /// What each carries in each direction, in bytes a second.
    pub bytes_per_s: Rate,
    /// Whether more rings of this rate are known not to fit.
    pub is_most: bool,
    ways: Vec<Vec<Way>>,
}

/// Undirected links, in units of a ring's rate.
type Units = BTreeMap<(NodeId, NodeId), u64>;

/// The rings of a topology that carry the most together; without cycles where there is none. One
/// rank has none.
#[must_use]
pub fn rings(topology: &Topology) -> Rings {
    let none = Rings { cycles: Vec::new(), bytes_per_s: Rate::default(), is_most: true, ways: Vec::new() };
    if topology.ranks() < 2 {
        return none;
    }
    let found = rates(topology).into_iter().map(|rate| {
        let (ways, is_most) = cycles::most(topology, &units(topology, rate));
        let cycles = ways.iter().map(|cycle| cycle.iter().map(|way| way.from).collect()).collect();
        Rings { cycles, bytes_per_s: rate, is_most, ways }
    });
    // Of equals the fastest, which come first.
    found.fold(none, |best, rings| {
        if rings.each_way_bytes_per_s() > best.each_way_bytes_per_s() {
            rings
        } else {
            let is_most = best.is_most && (rings.is_most || !best.cycles.is_empty());
            Rings { is_most, ..best }
        }
    })
}

impl Rings {
    /// What they carry together in each direction, in bytes a second.
    #[must_use]
    pub fn each_way_bytes_per_s(&self) -> Rate {
        self.bytes_per_s * Rate::from(self.cycles.len() as i128)
    }

    /// The trees by which a collective goes over them: around each ring both ways. None where there
    /// is no ring.
    #[must_use]
    pub fn trees(&self, ranks: u32, collective: Collective) -> Vec<Tree> {
        let every: Vec<Tree> =
            self.ways.iter().flat_map(|cycle| self.of_one(cycle, ranks, collective)).collect();
        merged(every)
    }

    fn of_one(&self, cycle: &[Way], ranks: u32, collective: Collective) -> Vec<Tree> {
        let share = self.bytes_per_s / Rate::from(i128::from(ranks - 1));
        // The cycle cut before each of its ranks: a chain with that rank at one end.
        let cut = |gap: usize| Weighted {
            shape: Shape {
                ways: cycle
                    .iter()
                    .enumerate()
                    .filter(|&(way, _)| way != gap)
                    .map(|(_, way)| way.clone())
                    .collect(),
            },
            top: cycle[gap].to,
            weight: share,
        };
        let chains: Vec<Weighted> = if ranks == 2 {
            vec![pair(cycle, self.bytes_per_s)]
        } else {
            (0..cycle.len()).map(cut).collect()
        };
        match collective {
            Collective::AllReduce => Weighted::trees(&chains, ranks, collective),
            Collective::AllGather | Collective::ReduceScatter => {
                let roots = 0..ranks;
                let trees = roots.flat_map(|root| from_end(&chains, cycle, root, share));
                let trees = trees.map(|chain| match collective {
                    Collective::AllGather => chain.shape.out_tree(ranks, chain.top, chain.weight),
                    _ => chain.shape.in_tree(ranks, chain.top, chain.weight),
                });
                trees.collect()
            }
            Collective::Broadcast { root } | Collective::Reduce { root } => {
                Weighted::trees(&from_end(&chains, cycle, root, self.bytes_per_s), ranks, collective)
            }
            Collective::Scatter { root } | Collective::Gather { root } => {
                // Weights of blocks are so many times less.
                let whole = share * Rate::from(i128::from(ranks));
                Weighted::trees(&from_end(&chains, cycle, root, whole), ranks, collective)
            }
            _ => Vec::new(),
        }
    }
}

/// The only tree of two ranks.
fn pair(cycle: &[Way], weight: Rate) -> Weighted {
    Weighted { shape: Shape { ways: vec![cycle[0].clone()] }, top: cycle[0].to, weight }
}

/// The chains that begin at a rank: around the ring one way and the other. Of two ranks there is
/// one.
fn from_end(chains: &[Weighted], cycle: &[Way], root: Rank, weight: Rate) -> Vec<Weighted> {
    if let [pair] = chains {
        return vec![Weighted { top: root, weight, ..pair.clone() }];
    }
    let gaps = (0..cycle.len()).filter(|&gap| cycle[gap].to == root || cycle[gap].from == root);
    gaps.map(|gap| Weighted { top: root, weight, ..chains[gap].clone() }).collect()
}

/// What a collective reaches on one ring in one direction whose links carry so much: a ring over
/// PCIe, where the fast links have none. Zero where a ring says nothing of the collective.
#[must_use]
pub fn one_way_rate(collective: Collective, ranks: u32, bytes_per_s: u64) -> Rate {
    let (ranks, rate) = (i128::from(ranks), i128::from(bytes_per_s));
    if ranks < 2 {
        return Rate::default();
    }
    match collective {
        Collective::Broadcast { .. } | Collective::Reduce { .. } => Rate::from(rate),
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather { .. }
        | Collective::Scatter { .. } => Rate::new(rate * ranks, ranks - 1),
        Collective::AllReduce => Rate::new(rate * ranks, 2 * (ranks - 1)),
        _ => Rate::default(),
    }
}

/// The rates that a ring may have, the fastest first: those of single links, and where there are
/// switches half of them.
fn rates(topology: &Topology) -> Vec<Rate> {
    let of_one = |bytes_per_s: u64, count: u32| Rate::new(i128::from(bytes_per_s), i128::from(count.max(1)));
    let mut rates: Vec<Rate> =
        topology.links().iter().map(|link| of_one(link.bytes_per_s, link.count)).collect();
    if topology.has_switches() {
        let halves: Vec<Rate> = rates.iter().map(|rate| rate / Rate::from(2)).collect();
        rates.extend(halves);
    }
    rates.sort_unstable();
    rates.dedup();
    rates.reverse();
    rates
}

/// How many rings of a rate fit on the links between two nodes; both directions count as one, which
/// is as much as the lesser carries.
fn units(topology: &Topology, rate: Rate) -> Units {
    let links = topology.links().iter().filter(|link| link.from < link.to);
    let duplex = links.filter_map(|link| {
        let back = topology.link(link.to, link.from)?;
        let least = link.bytes_per_s.min(back.bytes_per_s);
        let units = (Rate::from(i128::from(least)) / rate).to_integer();
        Some(((link.from, link.to), units as u64)).filter(|(_, units)| *units > 0)
    });
    duplex.collect()
}
