//! What a plan has come to, for whoever shows it.

use std::time::Duration;

use pleach::packing::check::Checked;
use pleach::packing::topology::{Link, NodeId, Topology};
use pleach::packing::{Certificate, Packing, Rate, Strategy};

/// A packing of a topology, checked, and how it was made.
pub(super) struct Plan {
    /// What was asked for with `--topology`, and `--only`.
    pub(super) source: String,
    pub(super) topology: Topology,
    pub(super) packing: Packing,
    /// Loads and depths, as the independent checker found them.
    pub(super) checked: Checked,
    /// What made the trees.
    pub(super) strategy: Strategy,
    /// From the topology to the packing with its certificate.
    pub(super) generation: Duration,
    /// What one call carries, where that was said.
    pub(super) bytes: Option<u64>,
    /// What the use of PCIe beside the links costs at first, where that was said.
    pub(super) pcie_setup_ns: Option<u64>,
}

impl Plan {
    /// How much of what it can carry a link does carry, from 0 to 1.
    pub(super) fn utilisation(&self, link: usize) -> f64 {
        number(self.checked.loads[link].utilisation())
    }

    /// Whether a link leads from one set of the certificate to elsewhere, in the direction that
    /// counts.
    pub(super) fn is_narrow(&self, link: &Link) -> bool {
        let part_of = |node: NodeId| match &self.packing.certificate {
            Certificate::Cut { nodes } => nodes.contains(&node).then_some(0),
            Certificate::Partition { parts } => parts.iter().position(|part| part.contains(&node)),
            Certificate::Alone => None,
        };
        let (from, to) = if enters(&self.packing) { (link.to, link.from) } else { (link.from, link.to) };
        let from = part_of(from);
        from.is_some() && from != part_of(to)
    }
}

/// Whether a cut of this collective is about what enters its nodes.
pub(super) fn enters(packing: &Packing) -> bool {
    use pleach::Collective::{Gather, Reduce, ReduceScatter};
    matches!(packing.collective, Gather { .. } | Reduce { .. } | ReduceScatter)
}

/// A rate as a number, for showing.
pub(super) fn number(rate: Rate) -> f64 {
    *rate.numer() as f64 / *rate.denom() as f64
}

/// In 10⁹ bytes a second.
pub(super) fn gb_s(rate: Rate) -> f64 {
    number(rate) / 1e9
}
