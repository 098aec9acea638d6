//! What a certificate says, evaluated. The formulas are those of the table in the module of
//! packings.

use num_rational::Ratio;
use pleach_vocabulary::Collective;

use super::{CertificateFlaw, Flaw};
use crate::topology::{NodeId, Topology};
use crate::{Certificate, Packing, Rate};

/// That the certificate is one for this collective and shows the bound.
pub(super) fn check(topology: &Topology, packing: &Packing) -> Result<(), Flaw> {
    let value = evaluate(topology, packing.collective, &packing.certificate).map_err(Flaw::Certificate)?;
    if value == packing.bound {
        Ok(())
    } else {
        Err(Flaw::Certificate(CertificateFlaw::Value { value, bound: packing.bound }))
    }
}

/// The bound that a certificate shows.
fn evaluate(
    topology: &Topology,
    collective: Collective,
    certificate: &Certificate,
) -> Result<Rate, CertificateFlaw> {
    let alone = topology.ranks() == 1;
    match certificate {
        Certificate::Alone if alone => Ok(Rate::default()),
        Certificate::Cut { nodes } if !alone => cut(topology, collective, nodes),
        Certificate::Partition { parts } if !alone && collective == Collective::AllReduce => {
            partition(topology, parts)
        }
        _ => Err(CertificateFlaw::Kind),
    }
}

fn cut(topology: &Topology, collective: Collective, nodes: &[NodeId]) -> Result<Rate, CertificateFlaw> {
    let sides = Sides::of(topology, &[nodes])?;
    let inside = sides.ranks[0];
    let outside = topology.ranks() - inside;
    if inside == 0 || outside == 0 {
        return Err(CertificateFlaw::SeparatesNothing);
    }
    let root = match collective {
        Collective::Broadcast { root }
        | Collective::Reduce { root }
        | Collective::Scatter { root }
        | Collective::Gather { root } => Some(root),
        _ => None,
    };
    if let Some(root) = root.filter(|&root| sides.part_of(topology.node(root)).is_none()) {
        return Err(CertificateFlaw::RootOutside { root });
    }
    let ranks = i128::from(topology.ranks());
    let leaving = || Ok(sides.leaving(topology)[0]);
    let entering = || Ok(sides.entering(topology)[0]);
    let of_all = |bandwidth: i128, some: u32| Ratio::new(bandwidth * ranks, i128::from(some));
    match collective {
        Collective::Broadcast { .. } | Collective::AllReduce => leaving().map(Rate::from),
        Collective::Reduce { .. } => entering().map(Rate::from),
        Collective::AllGather => leaving().map(|bandwidth| of_all(bandwidth, inside)),
        Collective::ReduceScatter => entering().map(|bandwidth| of_all(bandwidth, inside)),
        Collective::Scatter { .. } => leaving().map(|bandwidth| of_all(bandwidth, outside)),
        Collective::Gather { .. } => entering().map(|bandwidth| of_all(bandwidth, outside)),
        _ => Err(CertificateFlaw::Kind),
    }
}

/// Switches may be in no part; ranks may not.
fn partition(topology: &Topology, parts: &[Vec<NodeId>]) -> Result<Rate, CertificateFlaw> {
    let parts: Vec<&[NodeId]> = parts.iter().map(Vec::as_slice).collect();
    let sides = Sides::of(topology, &parts)?;
    if parts.len() < 2 {
        return Err(CertificateFlaw::SeparatesNothing);
    }
    if let Some(part) = sides.ranks.iter().position(|&ranks| ranks == 0) {
        return Err(CertificateFlaw::PartWithoutRank { part });
    }
    if let Some(rank) = (0..topology.ranks()).find(|&rank| sides.part_of(topology.node(rank)).is_none()) {
        return Err(CertificateFlaw::RankInNoPart { rank });
    }
    let leaving: i128 = sides.leaving(topology).iter().sum();
    Ok(Ratio::new(leaving, 2 * (parts.len() as i128 - 1)))
}

/// Disjoint sets of nodes.
struct Sides {
    /// Of every node.
    parts: Vec<Option<usize>>,
    /// How many each set has.
    ranks: Vec<u32>,
}

impl Sides {
    fn of(topology: &Topology, sets: &[&[NodeId]]) -> Result<Self, CertificateFlaw> {
        let mut parts = vec![None; topology.nodes().len()];
        let mut ranks = vec![0; sets.len()];
        for (index, set) in sets.iter().enumerate() {
            for &node in *set {
                let part = parts.get_mut(node.0 as usize).ok_or(CertificateFlaw::UnknownNode { node })?;
                if part.replace(index).is_some() {
                    return Err(CertificateFlaw::NodeTwice { node });
                }
                ranks[index] += u32::from(topology.rank(node).is_some());
            }
        }
        Ok(Self { parts, ranks })
    }

    fn part_of(&self, node: NodeId) -> Option<usize> {
        self.parts[node.0 as usize]
    }

    /// The bandwidth that leaves each.
    fn leaving(&self, topology: &Topology) -> Vec<i128> {
        self.across(topology, |from, _| from)
    }

    /// The bandwidth that enters each.
    fn entering(&self, topology: &Topology) -> Vec<i128> {
        self.across(topology, |_, to| to)
    }

    fn across(
        &self,
        topology: &Topology,
        side: impl Fn(Option<usize>, Option<usize>) -> Option<usize>,
    ) -> Vec<i128> {
        let mut sums = vec![0; self.ranks.len()];
        for link in topology.links() {
            let (from, to) = (self.part_of(link.from), self.part_of(link.to));
            if let Some(part) = side(from, to).filter(|_| from != to) {
                sums[part] += i128::from(link.bytes_per_s);
            }
        }
        sums
    }
}
