//! Boxes that people rent. Bandwidths are those of one direction.

use super::{Asked, GB_PER_S, PresetError, build, join, product};
use crate::topology::{Builder, NodeId, Topology};

/// What a PCIe ring carries beside an NVLink: half of it, as in the model of Blink (MLSys 2020,
/// figure 13).
const PCIE_RING_SHARE: u64 = 2;

/// Pairs of GPUs of a hybrid cube mesh that are joined by one link each in both generations of
/// DGX-1: two quads in which each is joined to each, and every GPU to its counterpart in the other
/// quad.
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

/// Which GPU of DGX-1V is GPU 0, 1, … of NDv2. That turns the doubles of DGX-1V into those of NDv2
/// as published with TACCL (NSDI 2023) and TE-CCL (SIGCOMM 2024): 0-1, 0-4, 1-3, 2-3, 2-6, 4-5,
/// 5-7, 6-7.
const NDV2_ORDER: [usize; 8] = [0, 3, 1, 2, 4, 7, 5, 6];

/// DGX-1 with P100: links as described in NVIDIA's DGX-1 white paper and in Blink (MLSys 2020,
/// figure 1); an NVLink of the first generation carries 20 GB/s.
pub(super) fn dgx_1p(_: &Asked) -> Result<Topology, PresetError> {
    cube_mesh(&[0, 1, 2, 3, 4, 5, 6, 7], 20 * GB_PER_S, &[])
}

/// DGX-1 with V100, as AWS p3.16xlarge: sources as for [`dgx_1p`]; an NVLink of the second
/// generation carries 25 GB/s, and eight pairs have two.
pub(super) fn dgx_1v(_: &Asked) -> Result<Topology, PresetError> {
    cube_mesh(&[0, 1, 2, 3, 4, 5, 6, 7], 25 * GB_PER_S, &SECOND_LINKS)
}

/// The same box with the numbering that Azure's NDv2 shows.
pub(super) fn ndv2(_: &Asked) -> Result<Topology, PresetError> {
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
pub(super) fn dgx_2(_: &Asked) -> Result<Topology, PresetError> {
    let mut builder = Topology::builder();
    let gpus: Vec<NodeId> = (0..16).map(|gpu| builder.rank(format!("gpu{gpu}"))).collect();
    let switch = builder.switch("nvswitch");
    for gpu in gpus {
        join(&mut builder, gpu, switch, 150 * GB_PER_S);
    }
    build(builder)
}

/// DGX A100: 8 GPUs with 12 NVLinks of 25 GB/s each to NVSwitch, and a NIC of 200 Gb/s a GPU; NICs
/// of even GPUs share one InfiniBand plane, those of odd ones another. Constants and planes as in
/// the public topologies of ForestColl (NSDI 2026). A NIC only forwards for its GPU at what it
/// carries itself, so it is part of the link. One box has no planes.
pub(super) fn dgx_a100(asked: &Asked) -> Result<Topology, PresetError> {
    nvswitch_boxes(asked, 300 * GB_PER_S, 25 * GB_PER_S, 2, "plane")
}

/// DGX H100: 8 GPUs with 18 NVLinks of 25 GB/s each to NVSwitch, and a NIC of 400 Gb/s a GPU; GPU i
/// of every box is on rail i, as in NVIDIA's DGX SuperPOD reference design. Rails are joined by
/// NVSwitch only. One box has no rails.
pub(super) fn dgx_h100(asked: &Asked) -> Result<Topology, PresetError> {
    nvswitch_boxes(asked, 450 * GB_PER_S, 50 * GB_PER_S, 8, "rail")
}

fn nvswitch_boxes(
    asked: &Asked,
    nvlink_bytes_per_s: u64,
    nic_bytes_per_s: u64,
    planes: u64,
    plane: &str,
) -> Result<Topology, PresetError> {
    let boxes = asked.boxes()?;
    asked.check_size(product(&[boxes, 8]), boxes.checked_add(planes), product(&[boxes, 32]))?;
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

/// Joined dies of an MI250 box and by how many units: (one, other, units).
///
/// The numbers are those of the 16×16 matrix in the public repository of ForestColl (NSDI 2026);
/// the two dies of a package have four units, and each die has seven in all.
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

/// Boxes of 8 AMD MI250 packages, 16 dies, each of which is a rank: a unit of xGMI carries 50 GB/s,
/// and across boxes each die has 16 GB/s of InfiniBand to one switch. All of it as in the public
/// topologies of ForestColl (NSDI 2026). One box has no such switch.
pub(super) fn mi250(asked: &Asked) -> Result<Topology, PresetError> {
    let boxes = asked.boxes()?;
    asked.check_size(product(&[boxes, 16]), Some(1), product(&[boxes, 96]))?;
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

/// What something is called in a box; a single box needs no name.
fn in_box(boxes: u64, number: usize, name: String) -> String {
    if boxes == 1 { name } else { format!("box{number}.{name}") }
}
