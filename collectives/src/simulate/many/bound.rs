//! Rates that no schedule exceeds over given links.

use pleach_packing::topology::{NodeId, Topology};
use pleach_packing::{PackOptions, pack};
use pleach_schedule::HostMap;
use pleach_vocabulary::{Collective, Rank};

use super::hosts;

/// Most ranks for which a packing is made for its bound. More take minutes where links are not
/// alike.
const PACKED_RANKS_MAX: u32 = 1_024;

/// An upper bound of the rate of a collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    bytes_per_s: f64,
    is_of_packing: bool,
}

impl Bound {
    /// In bytes of the whole a second: of one rank's vector, or of all blocks together.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes_per_s
    }

    /// Whether it is the bound of a packing, which often is reached. Else it is that of the cuts
    /// around each rank and each host, which is no lower.
    #[must_use]
    pub fn is_of_packing(&self) -> bool {
        self.is_of_packing
    }
}

/// The bound for a collective over these links; none where there is nothing to bound.
#[must_use]
pub fn bound(topology: &Topology, collective: Collective) -> Option<Bound> {
    if topology.ranks() <= PACKED_RANKS_MAX
        && let Ok(packing) = pack(topology, collective, &PackOptions::default())
    {
        let bytes_per_s = *packing.bound.numer() as f64 / *packing.bound.denom() as f64;
        return (bytes_per_s > 0.0).then_some(Bound { bytes_per_s, is_of_packing: true });
    }
    let bytes_per_s = of_cuts(topology, collective)?;
    Some(Bound { bytes_per_s, is_of_packing: false })
}

/// The bound of the cuts around each rank and around each host, and for all-reduce of the two
/// partitions into these: `Certificate` of the crate of packings says what holds for each.
fn of_cuts(topology: &Topology, collective: Collective) -> Option<f64> {
    let ranks = topology.ranks();
    let hosts = hosts(topology);
    let mut maps = vec![HostMap::apart(ranks)];
    if (2..ranks).contains(&hosts.hosts()) {
        maps.push(hosts);
    }
    let bounds = maps.iter().filter_map(|map| of_parts(topology, collective, map));
    bounds.min_by(f64::total_cmp)
}

/// The same around the parts of a map, with the switches that are joined to one part alone.
fn of_parts(topology: &Topology, collective: Collective, map: &HostMap) -> Option<f64> {
    let (ranks, count) = (topology.ranks(), map.hosts());
    if count < 2 {
        return None;
    }
    let parts = parts(topology, map);
    let (mut leaving, mut entering) = (vec![0.0; count as usize], vec![0.0; count as usize]);
    for link in topology.links() {
        let [from, to] = [link.from, link.to].map(|node| parts[node.0 as usize]);
        if from == to {
            continue;
        }
        if let Some(from) = from {
            leaving[from as usize] += link.bytes_per_s as f64;
        }
        if let Some(to) = to {
            entering[to as usize] += link.bytes_per_s as f64;
        }
    }
    let mut sizes = vec![0.0; count as usize];
    map.by_rank().iter().for_each(|&host| sizes[host as usize] += 1.0);
    let all = f64::from(ranks);
    let root = collective.root().map(|root: Rank| map.host(root));
    let of_part = |part: usize| {
        let (out, into) = (leaving[part], entering[part]);
        let (own, others) = (all / sizes[part], all / (all - sizes[part]));
        let is_root = root == Some(part as u32);
        match collective {
            Collective::AllReduce => Some(out.min(into)),
            Collective::AllGather => Some((out * own).min(into * others)),
            Collective::ReduceScatter => Some((into * own).min(out * others)),
            Collective::Broadcast { .. } => Some(if is_root { out } else { into }),
            Collective::Reduce { .. } => Some(if is_root { into } else { out }),
            Collective::Scatter { .. } => Some(if is_root { out * others } else { into * own }),
            Collective::Gather { .. } => Some(if is_root { into * others } else { out * own }),
            Collective::AllToAll | Collective::Barrier | Collective::SendRecv { .. } => None,
        }
    };
    let cut = (0..count as usize).filter_map(of_part).min_by(f64::total_cmp)?;
    if collective != Collective::AllReduce {
        return Some(cut);
    }
    let partition = leaving.iter().sum::<f64>() / (2.0 * (f64::from(count) - 1.0));
    Some(cut.min(partition))
}

/// By node: the part that it belongs to. A switch belongs to a part if all that it is joined to
/// does.
fn parts(topology: &Topology, map: &HostMap) -> Vec<Option<u32>> {
    let nodes = (0..topology.nodes().len() as u32).map(NodeId);
    nodes
        .map(|node| match topology.rank(node) {
            Some(rank) => Some(map.host(rank)),
            None => {
                let mut ends = topology.leaving(node).iter().map(|link| topology.rank(link.to));
                let first = map.host(ends.next()??);
                ends.all(|end| end.is_some_and(|rank| map.host(rank) == first)).then_some(first)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::preset;

    use super::*;

    const BOUNDED: [Collective; 5] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast { root: 3 },
        Collective::Reduce { root: 3 },
    ];

    #[test]
    fn cuts_bound_no_less_than_packings_do_and_as_much_on_regular_machines() {
        for name in ["dgx-h100:4", "dgx-a100:3", "star:12", "torus:3x4", "ring:7", "dgx-1v", "fat-tree:4"] {
            let topology = preset(name).expect("a preset");
            for collective in BOUNDED {
                let packed = bound(&topology, collective).expect("a bound");
                let cuts = of_cuts(&topology, collective).expect("a bound");
                assert!(
                    packed.is_of_packing && cuts >= packed.bytes_per_s * (1.0 - 1e-9),
                    "{name}: {collective}"
                );
                let is_equal = (cuts / packed.bytes_per_s - 1.0).abs() < 1e-9;
                assert!(
                    is_equal || !["dgx-h100:4", "star:12"].contains(&name),
                    "{name}: {collective}: {cuts}"
                );
            }
        }
    }
}
