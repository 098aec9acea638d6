//! Regular networks. Every link carries the same in each direction, 25 GB/s unless asked for.

use super::{Asked, PresetError, build, join, product};
use crate::topology::{Builder, NodeId, Topology};

fn ranks_named(builder: &mut Builder, count: u64) -> Vec<NodeId> {
    (0..count).map(|rank| builder.rank(format!("rank{rank}"))).collect()
}

/// How many ranks, of a family with one number.
fn ranks_of(asked: &Asked) -> Result<u64, PresetError> {
    match asked.numbers[0] {
        few @ 0..=1 => Err(asked.refused(few, "2 or more ranks")),
        ranks => Ok(ranks),
    }
}

/// Two ranks have one link and not two.
pub(super) fn ring(asked: &Asked) -> Result<Topology, PresetError> {
    let ranks = ranks_of(asked)?;
    asked.check_size(Some(ranks), Some(0), product(&[ranks, 2]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    join_ring(&mut builder, &nodes, asked.bytes_per_s);
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

pub(super) fn mesh(asked: &Asked) -> Result<Topology, PresetError> {
    let ranks = ranks_of(asked)?;
    asked.check_size(Some(ranks), Some(0), product(&[ranks, ranks - 1]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    join_all(&mut builder, &nodes, asked.bytes_per_s);
    build(builder)
}

fn join_all(builder: &mut Builder, nodes: &[NodeId], bytes_per_s: u64) {
    for (index, &one) in nodes.iter().enumerate() {
        for &other in &nodes[index + 1..] {
            join(builder, one, other, bytes_per_s);
        }
    }
}

/// Ranks are numbered with the last coordinate fastest. A ring of two is one link, and a ring of
/// one none.
pub(super) fn torus(asked: &Asked) -> Result<Topology, PresetError> {
    let ranks = product(&asked.numbers);
    if ranks.is_some_and(|ranks| ranks < 2) {
        return Err(asked.refused(ranks.unwrap_or(0), "sides of 1 or more, 2 or more ranks in all"));
    }
    let links = ranks.and_then(|ranks| product(&[ranks, 2 * asked.numbers.len() as u64]));
    asked.check_size(ranks, Some(0), links)?;
    let sides: Vec<usize> = asked.numbers.iter().map(|&side| side as usize).collect();
    let mut builder = Topology::builder();
    let nodes: Vec<NodeId> =
        (0..sides.iter().product()).map(|rank| builder.rank(coordinates(rank, &sides))).collect();
    let mut stride = nodes.len();
    for &side in &sides {
        stride /= side;
        for first in (0..nodes.len()).filter(|rank| (rank / stride).is_multiple_of(side)) {
            let line: Vec<NodeId> = (0..side).map(|index| nodes[first + index * stride]).collect();
            join_ring(&mut builder, &line, asked.bytes_per_s);
        }
    }
    build(builder)
}

/// As in `x1y0z3`.
fn coordinates(rank: usize, sides: &[usize]) -> String {
    let mut left = sides.iter().product::<usize>();
    let axes = sides.iter().zip(['x', 'y', 'z']);
    axes.map(|(side, axis)| {
        left /= side;
        format!("{axis}{}", rank / left % side)
    })
    .collect()
}

/// The k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008, section 3): k pods of k/2
/// edge and k/2 aggregation switches, k/2 ranks an edge switch, and k²/4 core switches, of which
/// aggregation switch i of a pod has the i-th k/2. Every level can carry what the ranks can.
pub(super) fn fat_tree(asked: &Asked) -> Result<Topology, PresetError> {
    let ports = asked.numbers[0];
    if ports < 2 || ports % 2 == 1 {
        return Err(asked.refused(ports, "an even number of ports"));
    }
    let half = ports / 2;
    let ranks = product(&[ports, half, half]);
    let switches =
        product(&[ports, ports]).and_then(|switches| switches.checked_add(product(&[half, half])?));
    asked.check_size(ranks, switches, ranks.and_then(|ranks| ranks.checked_mul(6)))?;
    let mut builder = Topology::builder();
    let ranks = ranks_named(&mut builder, ranks.unwrap_or(0));
    let cores: Vec<NodeId> = (0..half * half).map(|core| builder.switch(format!("core{core}"))).collect();
    let half = half as usize;
    for (pod, ranks) in ranks.chunks(half * half).enumerate() {
        let edges: Vec<NodeId> =
            (0..half).map(|edge| builder.switch(format!("pod{pod}.edge{edge}"))).collect();
        for (&edge, ranks) in edges.iter().zip(ranks.chunks(half)) {
            for &rank in ranks {
                join(&mut builder, rank, edge, asked.bytes_per_s);
            }
        }
        for (index, cores) in cores.chunks(half).enumerate() {
            let above = builder.switch(format!("pod{pod}.aggregation{index}"));
            for &node in edges.iter().chain(cores) {
                join(&mut builder, node, above, asked.bytes_per_s);
            }
        }
    }
    build(builder)
}

/// The dragonfly of Kim, Dally, Scott and Abts (ISCA 2008): routers of a group are joined each to
/// each, and so are groups, by one link for each two. A group's links to the others, in the order
/// of the groups after it, go to its routers by turns.
pub(super) fn dragonfly(asked: &Asked) -> Result<Topology, PresetError> {
    let [groups, routers, ranks_each] = asked.numbers[..] else { unreachable!("the form has three numbers") };
    let ranks = product(&asked.numbers);
    if ranks.is_some_and(|ranks| ranks < 2) {
        return Err(asked.refused(ranks.unwrap_or(0), "1 or more of each, 2 or more ranks in all"));
    }
    let links = [
        &[2, groups, routers, ranks_each][..],
        &[groups, routers, routers.saturating_sub(1)],
        &[groups, groups.saturating_sub(1)],
    ];
    let links = links.into_iter().try_fold(0_u64, |sum, factors| sum.checked_add(product(factors)?));
    asked.check_size(ranks, product(&[groups, routers]), links)?;
    let (groups, routers, ranks_each) = (groups as usize, routers as usize, ranks_each as usize);
    let mut builder = Topology::builder();
    let ranks = ranks_named(&mut builder, ranks.unwrap_or(0));
    let mut switches = Vec::with_capacity(groups);
    for (group, ranks) in ranks.chunks(routers * ranks_each).enumerate() {
        let router = |index| format!("group{group}.router{index}");
        let nodes: Vec<NodeId> = (0..routers).map(|index| builder.switch(router(index))).collect();
        for (&router, ranks) in nodes.iter().zip(ranks.chunks(ranks_each)) {
            for &rank in ranks {
                join(&mut builder, rank, router, asked.bytes_per_s);
            }
        }
        join_all(&mut builder, &nodes, asked.bytes_per_s);
        switches.push(nodes);
    }
    let end = |from: usize, to: usize| switches[from][((to + groups - from) % groups - 1) % routers];
    for one in 0..groups {
        for other in one + 1..groups {
            join(&mut builder, end(one, other), end(other, one), asked.bytes_per_s);
        }
    }
    build(builder)
}

pub(super) fn star(asked: &Asked) -> Result<Topology, PresetError> {
    let ranks = ranks_of(asked)?;
    asked.check_size(Some(ranks), Some(1), product(&[ranks, 2]))?;
    let mut builder = Topology::builder();
    let nodes = ranks_named(&mut builder, ranks);
    let switch = builder.switch("switch");
    for node in nodes {
        join(&mut builder, node, switch, asked.bytes_per_s);
    }
    build(builder)
}
