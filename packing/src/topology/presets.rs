//! Topologies known by name: servers that can be rented, and regular networks.
//!
//! A name is that of a family, followed by its numbers: `dgx-a100:2`, `torus:4x4@50`. [`PRESETS`]
//! lists the families. The documentation of each builder gives the source of its numbers. All links
//! are duplex, so every preset is symmetric.
//!
//! **Invariant:** sizes are checked against [`PRESET_RANKS_MAX`] and the limits of a topology
//! before anything is built.

use crate::topology::decimal::{NumberFault, bytes_per_s};
use crate::topology::{Builder, LINKS_MAX, NODES_MAX, NodeId, Topology, TopologyError};

#[cfg(test)]
mod tests;

/// Most ranks of a preset.
pub const PRESET_RANKS_MAX: u64 = 4_096;

/// Bytes a second of 1 GB/s.
const GB_PER_S: u64 = 1_000_000_000;

/// The default bandwidth of a link of a regular network in each direction: that of an NVLink of the
/// second generation, or of a port of 200 Gb/s.
const REGULAR_BYTES_PER_S: u64 = 25 * GB_PER_S;

/// A family of presets, for help texts.
#[derive(Clone, Copy, Debug)]
pub struct PresetForm {
    /// The form of the name, as in `torus:AxB[xC][@GB/s]`.
    pub form: &'static str,
    /// A description of the family.
    pub about: &'static str,
    family: &'static str,
    numbers: Numbers,
    build: fn(&PresetRequest) -> Result<Topology, PresetError>,
}

impl PresetForm {
    /// The name before the numbers, as `torus`.
    #[must_use]
    pub fn family(&self) -> &'static str {
        self.family
    }
}

/// The form of the numbers of a family.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    /// No numbers; bandwidths are fixed.
    None,
    /// The number of boxes, by default 1; bandwidths are fixed.
    Boxes,
    /// A list whose length is between the first and the second count, with this separator; a
    /// bandwidth may follow.
    List(usize, usize, char),
}

/// The requested preset.
#[derive(Debug)]
struct PresetRequest {
    form: &'static str,
    numbers: Vec<u64>,
    bytes_per_s: u64,
    ranks_max: u64,
}

/// All families of presets.
pub const PRESETS: &[PresetForm] = &[
    PresetForm {
        form: "dgx-1p",
        about: "8 GPUs, hybrid cube mesh of single NVLinks, 20 GB/s each",
        family: "dgx-1p",
        numbers: Numbers::None,
        build: dgx_1p,
    },
    PresetForm {
        form: "dgx-1v",
        about: "8 GPUs, hybrid cube mesh of single and double NVLinks, 25 GB/s each",
        family: "dgx-1v",
        numbers: Numbers::None,
        build: dgx_1v,
    },
    PresetForm {
        form: "ndv2",
        about: "dgx-1v with the GPUs in the order of Azure NDv2",
        family: "ndv2",
        numbers: Numbers::None,
        build: ndv2,
    },
    PresetForm {
        form: "dgx-2",
        about: "16 GPUs on NVSwitch, 150 GB/s each",
        family: "dgx-2",
        numbers: Numbers::None,
        build: dgx_2,
    },
    PresetForm {
        form: "dgx-a100:N",
        about: "N boxes of 8 GPUs on NVSwitch, 300 GB/s each; across boxes 25 GB/s each in two planes",
        family: "dgx-a100",
        numbers: Numbers::Boxes,
        build: dgx_a100,
    },
    PresetForm {
        form: "dgx-h100:N",
        about: "N boxes of 8 GPUs on NVSwitch, 450 GB/s each; across boxes 50 GB/s each in eight rails",
        family: "dgx-h100",
        numbers: Numbers::Boxes,
        build: dgx_h100,
    },
    PresetForm {
        form: "mi250:N",
        about: "N boxes of 16 dies joined by links of 50 to 200 GB/s; across boxes 16 GB/s each",
        family: "mi250",
        numbers: Numbers::Boxes,
        build: mi250,
    },
    PresetForm {
        form: "ring:N[@GB/s]",
        about: "N ranks, each joined to the next, the last to the first",
        family: "ring",
        numbers: Numbers::List(1, 1, ','),
        build: ring,
    },
    PresetForm {
        form: "mesh:N[@GB/s]",
        about: "N ranks, each joined to each",
        family: "mesh",
        numbers: Numbers::List(1, 1, ','),
        build: mesh,
    },
    PresetForm {
        form: "torus:AxB[xC][@GB/s]",
        about: "a grid of ranks whose rows, columns and piles are rings",
        family: "torus",
        numbers: Numbers::List(2, 3, 'x'),
        build: torus,
    },
    PresetForm {
        form: "fat-tree:K[@GB/s]",
        about: "K*K*K/4 ranks under three levels of switches of K ports",
        family: "fat-tree",
        numbers: Numbers::List(1, 1, ','),
        build: fat_tree,
    },
    PresetForm {
        form: "dragonfly:G,A,P[@GB/s]",
        about: "G groups of A routers of P ranks; routers of a group and groups each joined to each",
        family: "dragonfly",
        numbers: Numbers::List(3, 3, ','),
        build: dragonfly,
    },
    PresetForm {
        form: "star:N[@GB/s]",
        about: "N ranks on one switch",
        family: "star",
        numbers: Numbers::List(1, 1, ','),
        build: star,
    },
];

/// Why there is no preset for a name.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PresetError {
    /// No family has this name.
    #[error("there is no preset '{name}'; there are {}", forms())]
    Unknown {
        /// The name.
        name: String,
    },
    /// The numbers do not have the form of the family.
    #[error("'{name}' is not of the form {form}")]
    Form {
        /// The name.
        name: String,
        /// The form.
        form: &'static str,
    },
    /// A number is too small or too large, or is odd where it must be even.
    #[error("{form} does not go with {number}; take {allowed}")]
    Number {
        /// The family.
        form: &'static str,
        /// The number that was given.
        number: u64,
        /// The values that are allowed.
        allowed: &'static str,
    },
    /// The preset would have more ranks, nodes or links than the limit.
    #[error("'{form}' would have more than {limit} {what}; take a smaller one")]
    TooLarge {
        /// The family.
        form: &'static str,
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The bandwidth is not valid.
    #[error("the bandwidth of '{name}' {fault}; write GB/s after '@', as in ring:8@12.5")]
    Bandwidth {
        /// The name.
        name: String,
        /// The reason.
        fault: NumberFault,
    },
    /// The bandwidths of all links sum to too much.
    #[error("'{name}': {error}")]
    Topology {
        /// The name.
        name: String,
        /// The reason.
        error: TopologyError,
    },
}

pub(super) fn forms() -> String {
    PRESETS.iter().map(|preset| preset.form).collect::<Vec<_>>().join(", ")
}

/// The topology of a name such as `dgx-1v`, `dgx-a100:2`, `torus:4x4@50`.
///
/// # Errors
///
/// [`PresetError`], with the forms that there are.
pub fn preset(name: &str) -> Result<Topology, PresetError> {
    preset_up_to(name, PRESET_RANKS_MAX)
}

/// As [`preset`], of at most so many ranks in place of [`PRESET_RANKS_MAX`]. Whoever asks for more
/// must not look at all pairs of them.
///
/// # Errors
///
/// Those of [`preset`].
pub fn preset_up_to(name: &str, ranks_max: u64) -> Result<Topology, PresetError> {
    let (shape, bandwidth) = match name.split_once('@') {
        Some((shape, bandwidth)) => (shape, Some(bandwidth)),
        None => (name, None),
    };
    let (family, numbers) = match shape.split_once(':') {
        Some((family, numbers)) => (family, Some(numbers)),
        None => (shape, None),
    };
    let known = PRESETS.iter().find(|preset| preset.family == family);
    let known = known.ok_or_else(|| PresetError::Unknown { name: name.to_owned() })?;
    let request = PresetRequest { ranks_max, ..parse_request(known, name, numbers, bandwidth)? };
    (known.build)(&request).map_err(|error| match error {
        PresetError::Topology { error, .. } => PresetError::Topology { name: name.to_owned(), error },
        error => error,
    })
}

fn parse_request(
    preset: &PresetForm,
    name: &str,
    numbers: Option<&str>,
    bandwidth: Option<&str>,
) -> Result<PresetRequest, PresetError> {
    let form = preset.form;
    let wrong = || PresetError::Form { name: name.to_owned(), form };
    let (least, most, between) = match preset.numbers {
        Numbers::None => (0, 0, ','),
        Numbers::Boxes => (0, 1, ','),
        Numbers::List(least, most, between) => (least, most, between),
    };
    let is_digits = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = |text: &str| Some(text).filter(is_digits).and_then(|text| text.parse::<u64>().ok());
    let numbers = match numbers {
        None => Vec::new(),
        Some(text) => text.split(between).map(number).collect::<Option<Vec<_>>>().ok_or_else(wrong)?,
    };
    if !(least..=most).contains(&numbers.len()) {
        return Err(wrong());
    }
    let bytes_per_s = match (bandwidth, preset.numbers) {
        (None, _) => REGULAR_BYTES_PER_S,
        (Some(_), Numbers::None | Numbers::Boxes) => return Err(wrong()),
        (Some(text), Numbers::List(..)) => {
            bytes_per_s(text).map_err(|fault| PresetError::Bandwidth { name: name.to_owned(), fault })?
        }
    };
    Ok(PresetRequest { form, numbers, bytes_per_s, ranks_max: PRESET_RANKS_MAX })
}

impl PresetRequest {
    /// The number of boxes.
    fn boxes(&self) -> Result<u64, PresetError> {
        let boxes = self.numbers.first().copied().unwrap_or(1);
        if boxes == 0 { Err(self.refused(0, "1 or more boxes")) } else { Ok(boxes) }
    }

    fn refused(&self, number: u64, allowed: &'static str) -> PresetError {
        PresetError::Number { form: self.form, number, allowed }
    }

    /// Checks the limits before anything is built. Links are counted in each direction.
    fn check_size(
        &self,
        ranks: Option<u64>,
        switches: Option<u64>,
        links: Option<u64>,
    ) -> Result<(), PresetError> {
        let nodes = ranks.zip(switches).and_then(|(ranks, switches)| ranks.checked_add(switches));
        for (what, count, limit) in [
            ("ranks", ranks, self.ranks_max),
            ("nodes", nodes, NODES_MAX as u64),
            ("links", links, LINKS_MAX as u64),
        ] {
            if count.is_none_or(|count| count > limit) {
                return Err(PresetError::TooLarge { form: self.form, what, limit });
            }
        }
        Ok(())
    }
}

/// The product; `None` if it does not fit.
fn product(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1_u64, |product, &factor| product.checked_mul(factor))
}

fn build(builder: Builder) -> Result<Topology, PresetError> {
    // The caller fills in the name.
    builder.build().map_err(|error| PresetError::Topology { name: String::new(), error })
}

/// Joins nodes by a link in each direction with the usual latency.
fn join(builder: &mut Builder, one: NodeId, other: NodeId, bytes_per_s: u64) {
    builder.duplex(one, other, bytes_per_s, crate::topology::LATENCY_NS);
}

// Commercial machines. Bandwidths count one direction.

/// The divisor of the bandwidth of an NVLink that gives that of a PCIe ring, as in the model of
/// Blink (MLSys 2020, figure 13).
const PCIE_RING_SHARE: u64 = 2;

/// Pairs of GPUs of a hybrid cube mesh that are joined by one link each in both generations of
/// DGX-1. There are two quads. In a quad all GPUs are joined pairwise, and each GPU is joined to
/// its counterpart in the other quad.
const CUBE_MESH: [(usize, usize); 16] = [
    (0, 1),
    (0, 2),
    (0, 3),
    (1, 2),
    (1, 3),
    (2, 3),
    (4, 5),
    (4, 6),
    (4, 7),
    (5, 6),
    (5, 7),
    (6, 7),
    (0, 4),
    (1, 5),
    (2, 6),
    (3, 7),
];

/// Pairs that DGX-1V joins by a second link: the cycle 0-3-2-1-5-6-7-4.
const SECOND_LINKS: [(usize, usize); 8] = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];

/// The GPU of DGX-1V that is GPU 0, 1, … of NDv2. This order turns the double links of DGX-1V into
/// those of NDv2 as published with TACCL (NSDI 2023) and TE-CCL (SIGCOMM 2024): 0-1, 0-4, 1-3, 2-3,
/// 2-6, 4-5, 5-7, 6-7.
const NDV2_ORDER: [usize; 8] = [0, 3, 1, 2, 4, 7, 5, 6];

/// DGX-1 with P100: links as described in NVIDIA's DGX-1 white paper and in Blink (MLSys 2020,
/// figure 1); an NVLink of the first generation carries 20 GB/s.
fn dgx_1p(_: &PresetRequest) -> Result<Topology, PresetError> {
    cube_mesh(&[0, 1, 2, 3, 4, 5, 6, 7], 20 * GB_PER_S, &[])
}

/// DGX-1 with V100, as AWS p3.16xlarge: sources as for [`dgx_1p`]; an NVLink of the second
/// generation carries 25 GB/s, and eight pairs have two.
fn dgx_1v(_: &PresetRequest) -> Result<Topology, PresetError> {
    cube_mesh(&[0, 1, 2, 3, 4, 5, 6, 7], 25 * GB_PER_S, &SECOND_LINKS)
}

/// The same box with the numbering that Azure's NDv2 shows.
fn ndv2(_: &PresetRequest) -> Result<Topology, PresetError> {
    cube_mesh(&NDV2_ORDER, 25 * GB_PER_S, &SECOND_LINKS)
}

fn cube_mesh(
    order: &[usize; 8],
    bytes_per_s: u64,
    second: &[(usize, usize)],
) -> Result<Topology, PresetError> {
    let mut builder = Topology::builder();
    let mut gpus = [NodeId(0); 8];
    for (number, &gpu) in order.iter().enumerate() {
        gpus[gpu] = builder.rank(format!("gpu{number}"));
    }
    for &(one, other) in CUBE_MESH.iter().chain(second) {
        join(&mut builder, gpus[one], gpus[other], bytes_per_s);
    }
    builder.pcie_ring(bytes_per_s / PCIE_RING_SHARE);
    build(builder)
}

/// DGX-2: 16 V100, each with six NVLinks of 25 GB/s to NVSwitches, which together join all to all
/// without blocking (NVIDIA's NVSwitch white paper; Blink, section 5). The twelve chips are one
/// switch here.
fn dgx_2(_: &PresetRequest) -> Result<Topology, PresetError> {
    let mut builder = Topology::builder();
    let gpus: Vec<NodeId> = (0..16).map(|gpu| builder.rank(format!("gpu{gpu}"))).collect();
    let switch = builder.switch("nvswitch");
    for gpu in gpus {
        join(&mut builder, gpu, switch, 150 * GB_PER_S);
    }
    build(builder)
}

/// DGX A100: 8 GPUs with 12 NVLinks of 25 GB/s each to NVSwitch, and a NIC of 200 Gb/s for each
/// GPU. The NICs of even GPUs share one InfiniBand plane, and the NICs of odd GPUs share another
/// plane. Constants and planes are those of the public topologies of ForestColl (NSDI 2026). A NIC
/// forwards only for its GPU, at its own bandwidth, so it is part of the link. One box has no
/// planes.
fn dgx_a100(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    nvswitch_boxes(parse_request, 300 * GB_PER_S, 25 * GB_PER_S, 2, "plane")
}

/// DGX H100: 8 GPUs with 18 NVLinks of 25 GB/s each to NVSwitch, and a NIC of 400 Gb/s for each
/// GPU. GPU i of every box is on rail i, as in NVIDIA's DGX SuperPOD reference design. Only
/// NVSwitch joins rails. One box has no rails.
fn dgx_h100(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    nvswitch_boxes(parse_request, 450 * GB_PER_S, 50 * GB_PER_S, 8, "rail")
}

fn nvswitch_boxes(
    parse_request: &PresetRequest,
    nvlink_bytes_per_s: u64,
    nic_bytes_per_s: u64,
    planes: u64,
    plane: &str,
) -> Result<Topology, PresetError> {
    let boxes = parse_request.boxes()?;
    parse_request.check_size(product(&[boxes, 8]), boxes.checked_add(planes), product(&[boxes, 32]))?;
    let mut builder = Topology::builder();
    let gpus = gpus_of_boxes(&mut builder, boxes, 8);
    for (number, gpus) in gpus.iter().enumerate() {
        let switch = builder.switch(in_box(boxes, number, "nvswitch".to_owned()));
        for &gpu in gpus {
            join(&mut builder, gpu, switch, nvlink_bytes_per_s);
        }
    }
    if boxes > 1 {
        for index in 0..planes {
            let switch = builder.switch(format!("{plane}{index}"));
            for gpus in &gpus {
                for &gpu in gpus.iter().skip(index as usize).step_by(planes as usize) {
                    join(&mut builder, gpu, switch, nic_bytes_per_s);
                }
            }
        }
    }
    build(builder)
}

/// Pairs of dies of an MI250 box with the number of units that join them: (one, other, units).
///
/// The numbers are those of the 16×16 matrix in the public repository of ForestColl (NSDI 2026).
/// Four units join the two dies of a package, and each die has seven units in all.
const MI250_LINKS: [(usize, usize, u64); 28] = [
    (0, 1, 4),
    (0, 4, 2),
    (0, 8, 1),
    (1, 5, 1),
    (1, 9, 1),
    (1, 10, 1),
    (2, 3, 4),
    (2, 6, 1),
    (2, 9, 1),
    (2, 10, 1),
    (3, 7, 2),
    (3, 11, 1),
    (4, 5, 4),
    (4, 6, 1),
    (5, 6, 1),
    (5, 7, 1),
    (6, 7, 4),
    (8, 9, 4),
    (8, 12, 2),
    (9, 13, 1),
    (10, 11, 4),
    (10, 14, 1),
    (11, 15, 2),
    (12, 13, 4),
    (12, 14, 1),
    (13, 14, 1),
    (13, 15, 1),
    (14, 15, 4),
];

/// Boxes of 8 AMD MI250 packages with 16 dies, each of which is a rank. A unit of xGMI carries 50
/// GB/s. Across boxes each die has 16 GB/s of InfiniBand to one switch. All numbers are those of
/// the public topologies of ForestColl (NSDI 2026). One box has no such switch.
fn mi250(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let boxes = parse_request.boxes()?;
    parse_request.check_size(product(&[boxes, 16]), Some(1), product(&[boxes, 96]))?;
    let mut builder = Topology::builder();
    let gpus = gpus_of_boxes(&mut builder, boxes, 16);
    for gpus in &gpus {
        for (one, other, units) in MI250_LINKS {
            join(&mut builder, gpus[one], gpus[other], units * 50 * GB_PER_S);
        }
    }
    if boxes > 1 {
        let switch = builder.switch("ib");
        for &gpu in gpus.iter().flatten() {
            join(&mut builder, gpu, switch, 16 * GB_PER_S);
        }
    }
    build(builder)
}

fn gpus_of_boxes(builder: &mut Builder, boxes: u64, gpus: u64) -> Vec<Vec<NodeId>> {
    let rank = |builder: &mut Builder, number, gpu| builder.rank(in_box(boxes, number, format!("gpu{gpu}")));
    (0..boxes as usize).map(|number| (0..gpus).map(|gpu| rank(builder, number, gpu)).collect()).collect()
}

/// The name of a node in a box; a single box needs no prefix.
fn in_box(boxes: u64, number: usize, name: String) -> String {
    if boxes == 1 { name } else { format!("box{number}.{name}") }
}

// Regular networks. All links have the same bandwidth in each direction, by default 25 GB/s.

fn ranks_named(builder: &mut Builder, count: u64) -> Vec<NodeId> {
    (0..count).map(|rank| builder.rank(format!("rank{rank}"))).collect()
}

/// The number of ranks of a family with one number.
fn ranks_of(parse_request: &PresetRequest) -> Result<u64, PresetError> {
    match parse_request.numbers[0] {
        few @ 0..=1 => Err(parse_request.refused(few, "2 or more ranks")),
        ranks => Ok(ranks),
    }
}

/// A ring. Two ranks have one link and not two.
fn ring(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let ranks = ranks_of(parse_request)?;
    parse_request.check_size(Some(ranks), Some(0), product(&[ranks, 2]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    join_ring(&mut builder, &nodes, parse_request.bytes_per_s);
    build(builder)
}

fn join_ring(builder: &mut Builder, nodes: &[NodeId], bytes_per_s: u64) {
    for pair in nodes.windows(2) {
        join(builder, pair[0], pair[1], bytes_per_s);
    }
    if nodes.len() > 2 {
        join(builder, nodes[nodes.len() - 1], nodes[0], bytes_per_s);
    }
}

fn mesh(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let ranks = ranks_of(parse_request)?;
    parse_request.check_size(Some(ranks), Some(0), product(&[ranks, ranks - 1]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    join_all(&mut builder, &nodes, parse_request.bytes_per_s);
    build(builder)
}

fn join_all(builder: &mut Builder, nodes: &[NodeId], bytes_per_s: u64) {
    for (index, &one) in nodes.iter().enumerate() {
        for &other in &nodes[index + 1..] {
            join(builder, one, other, bytes_per_s);
        }
    }
}

/// A torus. The last coordinate of the ranks changes fastest. A ring of two ranks is one link, and
/// a ring of one rank has no link.
fn torus(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let ranks = product(&parse_request.numbers);
    if ranks.is_some_and(|ranks| ranks < 2) {
        return Err(parse_request.refused(ranks.unwrap_or(0), "sides of 1 or more, 2 or more ranks in all"));
    }
    let links = ranks.and_then(|ranks| product(&[ranks, 2 * parse_request.numbers.len() as u64]));
    parse_request.check_size(ranks, Some(0), links)?;
    let sides: Vec<usize> = parse_request.numbers.iter().map(|&side| side as usize).collect();
    let mut builder = Topology::builder();
    let nodes: Vec<NodeId> =
        (0..sides.iter().product()).map(|rank| builder.rank(coordinates(rank, &sides))).collect();
    let mut stride = nodes.len();
    for &side in &sides {
        stride /= side;
        for first in (0..nodes.len()).filter(|rank| (rank / stride).is_multiple_of(side)) {
            let line: Vec<NodeId> = (0..side).map(|index| nodes[first + index * stride]).collect();
            join_ring(&mut builder, &line, parse_request.bytes_per_s);
        }
    }
    build(builder)
}

/// The coordinates of a rank, as in `x1y0z3`.
fn coordinates(rank: usize, sides: &[usize]) -> String {
    let mut left = sides.iter().product::<usize>();
    let axes = sides.iter().zip(['x', 'y', 'z']);
    axes.map(|(side, axis)| {
        left /= side;
        format!("{axis}{}", rank / left % side)
    })
    .collect()
}

/// The k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008, section 3). It has k pods of
/// k/2 edge switches and k/2 aggregation switches, k/2 ranks for each edge switch, and k²/4 core
/// switches. Aggregation switch i of each pod is joined to the i-th group of k/2 core switches.
/// Every level can carry as much as the ranks.
fn fat_tree(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let ports = parse_request.numbers[0];
    if ports < 2 || ports % 2 == 1 {
        return Err(parse_request.refused(ports, "an even number of ports"));
    }
    let half = ports / 2;
    let ranks = product(&[ports, half, half]);
    let switches =
        product(&[ports, ports]).and_then(|switches| switches.checked_add(product(&[half, half])?));
    parse_request.check_size(ranks, switches, ranks.and_then(|ranks| ranks.checked_mul(6)))?;
    let mut builder = Topology::builder();
    let ranks = ranks_named(&mut builder, ranks.unwrap_or(0));
    let cores: Vec<NodeId> = (0..half * half).map(|core| builder.switch(format!("core{core}"))).collect();
    let half = half as usize;
    for (pod, ranks) in ranks.chunks(half * half).enumerate() {
        let edges: Vec<NodeId> =
            (0..half).map(|edge| builder.switch(format!("pod{pod}.edge{edge}"))).collect();
        for (&edge, ranks) in edges.iter().zip(ranks.chunks(half)) {
            for &rank in ranks {
                join(&mut builder, rank, edge, parse_request.bytes_per_s);
            }
        }
        for (index, cores) in cores.chunks(half).enumerate() {
            let above = builder.switch(format!("pod{pod}.aggregation{index}"));
            for &node in edges.iter().chain(cores) {
                join(&mut builder, node, above, parse_request.bytes_per_s);
            }
        }
    }
    build(builder)
}

/// The dragonfly of Kim, Dally, Scott and Abts (ISCA 2008). The routers of a group are joined
/// pairwise by one link each, and so are the groups. The links of a group to the other groups, in
/// the order of the groups after it, go to its routers in turn.
fn dragonfly(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let [groups, routers, ranks_each] = parse_request.numbers[..] else {
        unreachable!("the form has three numbers")
    };
    let ranks = product(&parse_request.numbers);
    if ranks.is_some_and(|ranks| ranks < 2) {
        return Err(parse_request.refused(ranks.unwrap_or(0), "1 or more of each, 2 or more ranks in all"));
    }
    let links = [
        &[2, groups, routers, ranks_each][..],
        &[groups, routers, routers.saturating_sub(1)],
        &[groups, groups.saturating_sub(1)],
    ];
    let links = links.into_iter().try_fold(0_u64, |sum, factors| sum.checked_add(product(factors)?));
    parse_request.check_size(ranks, product(&[groups, routers]), links)?;
    let (groups, routers, ranks_each) = (groups as usize, routers as usize, ranks_each as usize);
    let mut builder = Topology::builder();
    let ranks = ranks_named(&mut builder, ranks.unwrap_or(0));
    let mut switches = Vec::with_capacity(groups);
    for (group, ranks) in ranks.chunks(routers * ranks_each).enumerate() {
        let router = |index| format!("group{group}.router{index}");
        let nodes: Vec<NodeId> = (0..routers).map(|index| builder.switch(router(index))).collect();
        for (&router, ranks) in nodes.iter().zip(ranks.chunks(ranks_each)) {
            for &rank in ranks {
                join(&mut builder, rank, router, parse_request.bytes_per_s);
            }
        }
        join_all(&mut builder, &nodes, parse_request.bytes_per_s);
        switches.push(nodes);
    }
    let end = |from: usize, to: usize| switches[from][((to + groups - from) % groups - 1) % routers];
    for one in 0..groups {
        for other in one + 1..groups {
            join(&mut builder, end(one, other), end(other, one), parse_request.bytes_per_s);
        }
    }
    build(builder)
}

fn star(parse_request: &PresetRequest) -> Result<Topology, PresetError> {
    let ranks = ranks_of(parse_request)?;
    parse_request.check_size(Some(ranks), Some(1), product(&[ranks, 2]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    let switch = builder.switch("switch");
    for node in nodes {
        join(&mut builder, node, switch, parse_request.bytes_per_s);
    }
    build(builder)
}
