//! Which ranks do the same at the same time, because the links look alike from each of them.
//!
//! A family of schedules is the same at all ranks but for translations
//! ([`Family`](pleach_schedule::Family)). Some translations are also symmetries of the links: on
//! boxes of eight GPUs those by whole boxes, on a ring all. Then all that happens at a rank happens
//! at each of its images at the same time, and it is enough to carry out one rank of each class,
//! over one link of each class.
//!
//! **Invariant:** every link and every rank has as many images as there are translations, so as
//! many bytes go over the link of a class as go over each link of it. A translation that keeps a
//! link in its place would bring several transfers to it; then nothing is folded.

use std::collections::BTreeSet;

use pleach_packing::topology::{Link, NodeId, Topology};
use pleach_schedule::verify::ProvedFamily;
use pleach_vocabulary::Rank;

/// Classes of ranks and links.
#[derive(Debug)]
pub(crate) struct Folding {
    /// The rank of each class that is carried out.
    carried_out: Vec<Rank>,
    /// By rank: its class, and the translation that takes the class's rank to it.
    class_of: Vec<(u32, Rank)>,
    /// By link of the topology: its class.
    link_class: Vec<u32>,
    /// By class of links: one of them.
    links: Vec<u32>,
}

impl Folding {
    /// Every rank and every link by itself.
    pub(crate) fn none(topology: &Topology) -> Self {
        let (ranks, links) = (topology.ranks(), topology.links().len() as u32);
        Self {
            carried_out: (0..ranks).collect(),
            class_of: (0..ranks).map(|rank| (rank, 0)).collect(),
            link_class: (0..links).collect(),
            links: (0..links).collect(),
        }
    }

    /// By the translations of a family that are symmetries of the links.
    pub(crate) fn by(family: &ProvedFamily, topology: &Topology) -> Self {
        let ranks = topology.ranks();
        let mut group: Vec<Rank> = vec![0];
        let mut known: BTreeSet<Rank> = BTreeSet::from([0]);
        let mut generators: Vec<Vec<NodeId>> = Vec::new();
        for by in 1..ranks {
            if known.contains(&by) {
                continue;
            }
            let Some(nodes) = images(topology, |rank| family.translated_rank(rank, by)) else { continue };
            generators.push(nodes);
            let (before, mut multiple) = (group.clone(), by);
            while !known.contains(&multiple) {
                group.extend(before.iter().map(|&other| family.translated_rank(other, multiple)));
                multiple = family.translated_rank(multiple, by);
            }
            known.extend(&group);
        }
        Self::of(family, topology, &group, &generators).unwrap_or_else(|| Self::none(topology))
    }

    /// The classes under a group of translations; none if it keeps a link in its place.
    fn of(
        family: &ProvedFamily,
        topology: &Topology,
        group: &[Rank],
        generators: &[Vec<NodeId>],
    ) -> Option<Self> {
        let all = topology.links();
        let unset = u32::MAX;
        let mut link_class = vec![unset; all.len()];
        let mut links = Vec::new();
        for first in 0..all.len() as u32 {
            if link_class[first as usize] != unset {
                continue;
            }
            let class = links.len() as u32;
            links.push(first);
            link_class[first as usize] = class;
            let (mut open, mut members) = (vec![first], 1);
            while let Some(link) = open.pop() {
                let Link { from, to, .. } = all[link as usize];
                for nodes in generators {
                    let ends = [from, to].map(|node| nodes[node.0 as usize]);
                    let image = topology.link_place(ends[0], ends[1])?;
                    if link_class[image] == unset {
                        link_class[image] = class;
                        members += 1;
                        open.push(image as u32);
                    }
                }
            }
            if members != group.len() {
                return None;
            }
        }
        let mut carried_out = Vec::new();
        let mut class_of = vec![(unset, 0); topology.ranks() as usize];
        for rank in 0..topology.ranks() {
            if class_of[rank as usize].0 == unset {
                for &by in group {
                    class_of[family.translated_rank(rank, by) as usize] = (carried_out.len() as u32, by);
                }
                carried_out.push(rank);
            }
        }
        Some(Self { carried_out, class_of, link_class, links })
    }

    /// The rank of each class that is carried out.
    pub(crate) fn carried_out(&self) -> &[Rank] {
        &self.carried_out
    }

    /// The class of a rank, and the translation that takes the rank that is carried out to it.
    pub(crate) fn class_of(&self, rank: Rank) -> (u32, Rank) {
        self.class_of[rank as usize]
    }

    /// Whether some ranks are not carried out.
    pub(crate) fn folds(&self) -> bool {
        self.carried_out.len() < self.class_of.len()
    }

    /// The class of a link of the topology.
    pub(crate) fn link_class(&self, link: u32) -> u32 {
        self.link_class[link as usize]
    }

    /// By class of links: one of them.
    pub(crate) fn links(&self) -> &[u32] {
        &self.links
    }
}

/// The images of all nodes under a symmetry of the links that takes the ranks to these images; none
/// if no such symmetry is found.
fn images(topology: &Topology, of_rank: impl Fn(Rank) -> Rank) -> Option<Vec<NodeId>> {
    let count = topology.nodes().len();
    let mut images: Vec<Option<NodeId>> = vec![None; count];
    let mut is_taken = vec![false; count];
    let mut open: Vec<NodeId> = Vec::with_capacity(count);
    for rank in 0..topology.ranks() {
        let (node, image) = (topology.node(rank), topology.node(of_rank(rank)));
        images[node.0 as usize] = Some(image);
        is_taken[image.0 as usize] = true;
        open.push(node);
    }
    // A switch goes to the first one that is joined to the images of its neighbours as it is to
    // them. All links are compared afterwards, so a wrong guess finds no symmetry, never a false
    // one.
    let mut next = 0;
    while let Some(&node) = open.get(next) {
        next += 1;
        for link in topology.leaving(node) {
            if images[link.to.0 as usize].is_some() {
                continue;
            }
            let image = images[node.0 as usize]?;
            let fits = |other: &&Link| {
                topology.rank(other.to).is_none()
                    && !is_taken[other.to.0 as usize]
                    && is_alike(link, other)
                    && are_joined_alike(topology, &images, link.to, other.to)
            };
            let found = topology.leaving(image).iter().find(fits)?.to;
            images[link.to.0 as usize] = Some(found);
            is_taken[found.0 as usize] = true;
            open.push(link.to);
        }
    }
    let images: Vec<NodeId> = images.into_iter().collect::<Option<_>>()?;
    let is_kept = |link: &Link| {
        let ends = [link.from, link.to].map(|node| images[node.0 as usize]);
        topology.link(ends[0], ends[1]).is_some_and(|image| is_alike(link, image))
    };
    topology.links().iter().all(is_kept).then_some(images)
}

fn is_alike(one: &Link, other: &Link) -> bool {
    (one.bytes_per_s, one.latency_ns) == (other.bytes_per_s, other.latency_ns)
}

/// Whether what leads from a node to nodes whose images are known leads from its image to these.
fn are_joined_alike(topology: &Topology, images: &[Option<NodeId>], node: NodeId, image: NodeId) -> bool {
    let links = topology.leaving(node);
    links.len() == topology.leaving(image).len()
        && links.iter().all(|link| {
            images[link.to.0 as usize]
                .is_none_or(|end| topology.link(image, end).is_some_and(|other| is_alike(link, other)))
        })
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::preset;
    use pleach_schedule::generate::{Access, Algorithm, family};
    use pleach_schedule::verify::{Proof, verify_family};
    use pleach_vocabulary::Collective;

    use super::*;

    fn proof(name: &str, ranks: u32) -> Proof {
        let algorithm: Algorithm = name.parse().expect("a name");
        let family = family(Collective::AllReduce, &algorithm, ranks, Access::Put).expect("it fits");
        verify_family(family.expect("a family")).expect("it is right")
    }

    #[test]
    fn ranks_fold_as_far_as_links_are_alike() {
        for (links, algorithm, classes) in [
            // GPUs of a box may change places, with their rails.
            ("dgx-h100:4", "halving-doubling", 1),
            ("dgx-h100:4", "grid:4x8", 1),
            ("dgx-h100:3", "hierarchical:3x8", 1),
            // A ring goes from box to box, so only whole boxes may.
            ("dgx-a100:2", "ring", 8),
            ("ring:12", "ring", 1),
            ("star:12", "direct", 1),
            ("mesh:8", "halving-doubling", 1),
            ("torus:4x6", "grid:4x6", 1),
            ("torus:4x6", "ring", 6),
            // The two halves of a hybrid cube mesh.
            ("dgx-1v", "ring", 4),
        ] {
            let topology = preset(links).expect("a preset");
            let proof = proof(algorithm, topology.ranks());
            let folding = Folding::by(proof.family().expect("a family"), &topology);
            assert_eq!(folding.carried_out().len(), classes, "{algorithm} on {links}");
            assert_eq!(folding.folds(), classes < topology.ranks() as usize);
            let images = topology.ranks() as usize / classes;
            assert_eq!(folding.links().len() * images, topology.links().len(), "{algorithm} on {links}");
        }
    }

    #[test]
    fn a_link_that_is_slower_than_the_others_leaves_no_symmetry() {
        let mut builder = Topology::builder();
        let nodes: Vec<NodeId> = (0..6).map(|rank| builder.rank(format!("rank{rank}"))).collect();
        for rank in 0..6 {
            builder.duplex(nodes[rank], nodes[(rank + 1) % 6], if rank == 2 { 9 } else { 10 }, 1_000);
        }
        let topology = builder.build().expect("connected");
        let proof = proof("ring", 6);
        assert!(!Folding::by(proof.family().expect("a family"), &topology).folds());
    }
}
