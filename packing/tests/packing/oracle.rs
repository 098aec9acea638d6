//! The bounds by enumeration: every set of nodes, every partition. Nothing of it is shared with
//! what packs or checks.

use pleach_packing::Rate;
use pleach_packing::topology::Topology;
use pleach_vocabulary::Collective;

/// The bound of a collective as the table in the module of packings has it; there are two ranks or
/// more.
///
/// 2ⁿ sets of all n nodes, and for an all-reduce every partition of the ranks with the switches in
/// any part or none.
pub(crate) fn bound(topology: &Topology, collective: Collective) -> Rate {
    let graph = Graph::of(topology);
    match collective {
        Collective::Broadcast { root } => {
            graph.least(|set| graph.has(set, root), |set, _| graph.leaving(set))
        }
        Collective::Reduce { root } => graph.least(|set| graph.has(set, root), |set, _| graph.entering(set)),
        Collective::AllGather => {
            graph.least(|_| true, |set, inside| graph.leaving(set) * graph.all() / inside)
        }
        Collective::ReduceScatter => {
            graph.least(|_| true, |set, inside| graph.entering(set) * graph.all() / inside)
        }
        Collective::Scatter { root } => graph.least(
            |set| graph.has(set, root),
            |set, inside| graph.leaving(set) * graph.all() / (graph.all() - inside),
        ),
        Collective::Gather { root } => graph.least(
            |set| graph.has(set, root),
            |set, inside| graph.entering(set) * graph.all() / (graph.all() - inside),
        ),
        Collective::AllReduce => graph.least(|_| true, |set, _| graph.leaving(set)).min(graph.families()),
        _ => panic!("{collective} has no packing"),
    }
}

/// Bandwidths from node to node.
struct Graph {
    bandwidths: Vec<Vec<i128>>,
    /// The nodes of the ranks.
    ranks: Vec<usize>,
    switches: Vec<usize>,
}

impl Graph {
    fn of(topology: &Topology) -> Self {
        let nodes = topology.nodes().len();
        assert!(nodes <= 16, "{nodes} nodes are too many to enumerate");
        let mut bandwidths = vec![vec![0; nodes]; nodes];
        for link in topology.links() {
            bandwidths[link.from.0 as usize][link.to.0 as usize] += i128::from(link.bytes_per_s);
        }
        let ranks: Vec<usize> = (0..topology.ranks()).map(|rank| topology.node(rank).0 as usize).collect();
        let switches = (0..nodes).filter(|node| !ranks.contains(node)).collect();
        Self { bandwidths, ranks, switches }
    }

    fn all(&self) -> Rate {
        Rate::from(self.ranks.len() as i128)
    }

    fn has(&self, set: u32, rank: u32) -> bool {
        set >> self.ranks[rank as usize] & 1 == 1
    }

    fn leaving(&self, set: u32) -> Rate {
        self.across(|from, to| set >> from & 1 == 1 && set >> to & 1 == 0)
    }

    fn entering(&self, set: u32) -> Rate {
        self.across(|from, to| set >> from & 1 == 0 && set >> to & 1 == 1)
    }

    fn across(&self, is_across: impl Fn(usize, usize) -> bool) -> Rate {
        let mut sum = 0;
        for (from, row) in self.bandwidths.iter().enumerate() {
            for (to, bandwidth) in row.iter().enumerate().filter(|&(to, _)| is_across(from, to)) {
                let _ = to;
                sum += bandwidth;
            }
        }
        Rate::from(sum)
    }

    /// The least value of a set that holds some ranks and lacks some; with how many it holds.
    fn least(&self, counts: impl Fn(u32) -> bool, value: impl Fn(u32, Rate) -> Rate) -> Rate {
        let mut least: Option<Rate> = None;
        for set in 0..1_u32 << self.bandwidths.len() {
            let inside = self.ranks.iter().filter(|&&rank| set >> rank & 1 == 1).count();
            if inside == 0 || inside == self.ranks.len() || !counts(set) {
                continue;
            }
            let value = value(set, Rate::from(inside as i128));
            least = Some(least.map_or(value, |least| least.min(value)));
        }
        least.expect("two ranks are separated by some set")
    }

    /// The least of Σ B⁺(Pᵢ)/(2(k-1)) over disjoint sets that each hold a rank and together hold
    /// all.
    fn families(&self) -> Rate {
        let mut parts = vec![None; self.bandwidths.len()];
        let mut least: Option<Rate> = None;
        self.place(0, 0, &mut parts, &mut least);
        least.expect("two ranks are two parts")
    }

    fn place(&self, index: usize, count: usize, parts: &mut Vec<Option<usize>>, least: &mut Option<Rate>) {
        let order = self.ranks.iter().chain(&self.switches);
        let Some(&node) = order.clone().nth(index) else {
            if count > 1 {
                let leaving = self.across(|from, to| parts[from].is_some() && parts[from] != parts[to]);
                let value = leaving / Rate::from(2 * (count as i128 - 1));
                *least = Some(least.map_or(value, |least| least.min(value)));
            }
            return;
        };
        let is_rank = index < self.ranks.len();
        // A rank may begin a part; a switch may be in none.
        for part in 0..count + usize::from(is_rank) {
            parts[node] = Some(part);
            self.place(index + 1, count.max(part + 1), parts, least);
        }
        parts[node] = None;
        if !is_rank {
            self.place(index + 1, count, parts, least);
        }
    }
}

#[test]
fn good_packings_are_as_good_as_enumeration_says() {
    for (topology, packing) in super::by_hand::all() {
        let bound = bound(&topology, packing.collective);
        assert_eq!((packing.rate, packing.bound), (bound, bound), "{:?}", packing.collective);
    }
}

#[test]
fn known_bounds_come_out_of_the_enumeration() {
    // Broadcast, all-reduce, and reduce-scatter then all-gather, in sixths of a link of 25 GB/s and
    // so on.
    let link = Rate::from(25);
    let known = [
        (&[0, 1, 2][..], (2, 1), (2, 1), (3, 2)),
        (&[0, 2, 3], (3, 1), (5, 2), (9, 4)),
        (&[0, 3, 4, 7], (3, 1), (7, 3), (2, 1)),
        (&[0, 1, 2, 4, 5], (3, 1), (9, 4), (15, 8)),
        (&[0, 1, 2, 3, 4, 5, 6, 7], (6, 1), (24, 7), (24, 7)),
    ];
    for (ranks, broadcast, all_reduce, phases) in known {
        let topology = super::graphs::dgx_1v().only(ranks).unwrap();
        let of = |(numerator, denominator)| Rate::new(numerator, denominator) * link;
        assert_eq!(bound(&topology, Collective::Broadcast { root: 0 }), of(broadcast), "{ranks:?}");
        assert_eq!(bound(&topology, Collective::AllReduce), of(all_reduce), "{ranks:?}");
        assert_eq!(bound(&topology, Collective::AllGather) / Rate::from(2), of(phases), "{ranks:?}");
    }
}
