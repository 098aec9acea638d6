use super::automorphisms::Automorphisms;
use super::*;
use crate::topology::Builder;

/// Equal links in both directions between these ranks.
fn undirected(ranks: u32, links: &[(u32, u32)]) -> Topology {
    weighted(ranks, &links.iter().map(|&(one, other)| (one, other, 1)).collect::<Vec<_>>())
}

fn weighted(ranks: u32, links: &[(u32, u32, u64)]) -> Topology {
    let mut builder = Topology::builder();
    (0..ranks).for_each(|rank| _ = builder.rank(format!("r{rank}")));
    links
        .iter()
        .for_each(|&(one, other, bandwidth)| builder.duplex(NodeId(one), NodeId(other), bandwidth, 1));
    builder.build().unwrap()
}

fn ring(ranks: u32) -> Topology {
    undirected(ranks, &(0..ranks).map(|rank| (rank, (rank + 1) % ranks)).collect::<Vec<_>>())
}

fn torus(sides: &[u32]) -> Topology {
    let ranks = sides.iter().product();
    let mut links = Vec::new();
    for rank in 0..ranks {
        let mut stride = 1;
        for &side in sides {
            let place = rank / stride % side;
            links.push((rank, rank - place * stride + (place + 1) % side * stride));
            stride *= side;
        }
    }
    undirected(ranks, &links)
}

fn hypercube(dimensions: u32) -> Topology {
    let ranks = 1 << dimensions;
    let pairs = (0..ranks).flat_map(|rank| (0..dimensions).map(move |bit| (rank, rank ^ (1 << bit))));
    undirected(ranks, &pairs.filter(|(one, other)| one < other).collect::<Vec<_>>())
}

/// The hybrid cube mesh of the first generation with single links, or that of the second generation
/// with some double links.
fn cube_mesh(doubled: bool) -> Topology {
    let quad = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    let mut links: Vec<(u32, u32)> = quad.iter().flat_map(|&(a, b)| [(a, b), (a + 4, b + 4)]).collect();
    links.extend((0..4).map(|rank| (rank, rank + 4)));
    let doubles = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
    let bandwidth = |link: &(u32, u32)| 1 + u64::from(doubled && doubles.contains(link));
    weighted(8, &links.iter().map(|link| (link.0, link.1, bandwidth(link))).collect::<Vec<_>>())
}

/// Boxes of ranks around a switch. The ranks of one number in all boxes are joined by a rail.
fn rails(boxes: u32, ranks: u32) -> Topology {
    let mut builder = Topology::builder();
    let rails: Vec<NodeId> = (0..ranks).map(|rail| builder.switch(format!("rail{rail}"))).collect();
    for number in 0..boxes {
        let switch = builder.switch(format!("s{number}"));
        for &rail in &rails {
            let rank = builder.rank(format!("b{number}r{}", rail.0));
            builder.duplex(rank, switch, 450, 1);
            builder.duplex(rank, rail, 50, 1);
        }
    }
    builder.build().unwrap()
}

/// The same graph with its nodes in another order, and the new number of each node.
fn shuffled(topology: &Topology, seed: u64) -> (Topology, Vec<u32>) {
    let nodes = topology.nodes().len();
    let mut state = seed;
    let mut order: Vec<u32> = (0..nodes as u32).collect();
    for left in (1..nodes).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(left, (state >> 33) as usize % (left + 1));
    }
    let mut builder = Builder::default();
    let mut places = vec![0; nodes];
    for (place, &node) in order.iter().enumerate() {
        places[node as usize] = place as u32;
        let node = &topology.nodes()[node as usize];
        builder.node(format!("shuffled {}", node.name), node.kind);
    }
    for link in topology.links() {
        let (from, to) = (places[link.from.0 as usize], places[link.to.0 as usize]);
        builder.link(NodeId(from), NodeId(to), link.bytes_per_s, link.latency_ns);
    }
    (builder.build().unwrap(), places)
}

/// The number of automorphisms: the product of the orbit sizes of the nodes of the first path.
fn order(found: &Automorphisms) -> u128 {
    found.basic_orbits.iter().map(|&factor| u128::from(factor)).product()
}

/// The result of the search in [`Symmetry::fixing`].
fn searched(topology: &Topology, fixed: &[NodeId]) -> Automorphisms {
    automorphisms(&graph(topology, fixed, Vec::new()), LIMITS)
}

/// For every node in the orbit of `of`, an automorphism that maps `of` to it; `None` for other
/// nodes.
fn transversal(symmetry: &Symmetry, of: NodeId) -> Vec<Option<Permutation>> {
    let nodes = symmetry.node_orbits.len();
    let mut carried: Vec<Option<Permutation>> = vec![None; nodes];
    carried[of.0 as usize] = Some(Permutation::identity(nodes));
    let mut reached = vec![of.0];
    let mut next = 0;
    while let Some(&node) = reached.get(next) {
        next += 1;
        for generator in &symmetry.generators {
            let image = generator.of(node);
            if carried[image as usize].is_none() {
                carried[image as usize] = carried[node as usize].as_ref().map(|to| to.then(generator));
                reached.push(image);
            }
        }
    }
    carried
}

/// All automorphisms, by trying every permutation.
fn all_automorphisms(topology: &Topology) -> Vec<Permutation> {
    fn extend(topology: &Topology, images: &mut Vec<u32>, found: &mut Vec<Permutation>) {
        let next = images.len() as u32;
        if next as usize == topology.nodes().len() {
            found.push(Permutation::new(images.clone()));
            return;
        }
        let bandwidth =
            |from: u32, to: u32| topology.link(NodeId(from), NodeId(to)).map(|link| link.bytes_per_s);
        for image in 0..topology.nodes().len() as u32 {
            let kind = |node: u32| topology.nodes()[node as usize].kind;
            let fits = !images.contains(&image) && kind(image) == kind(next);
            if fits
                && (0..next).all(|node| {
                    bandwidth(node, next) == bandwidth(images[node as usize], image)
                        && bandwidth(next, node) == bandwidth(image, images[node as usize])
                })
            {
                images.push(image);
                extend(topology, images, found);
                images.pop();
            }
        }
    }
    let mut found = Vec::new();
    extend(topology, &mut Vec::new(), &mut found);
    found
}

/// Small graphs with random links, some of them in one direction only, with up to two bandwidths
/// and a switch.
fn random_graph(seed: u64) -> Option<Topology> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    let nodes = 3 + next(5) as u32;
    let mut builder = Topology::builder();
    (1..nodes).for_each(|rank| _ = builder.rank(format!("r{rank}")));
    builder.node("last".to_owned(), if next(2) == 0 { NodeKind::Rank } else { NodeKind::Switch });
    let density = 1 + next(4);
    for one in 0..nodes {
        for other in 0..one {
            let bandwidth = 1 + next(5) / 4;
            match next(5) {
                picked if picked >= density => {}
                4 => builder.link(NodeId(one), NodeId(other), bandwidth, 1),
                _ => builder.duplex(NodeId(one), NodeId(other), bandwidth, 1),
            }
        }
    }
    builder.build().ok()
}

#[test]
fn orbits_and_order_are_those_of_all_permutations_tried_one_by_one() {
    let mut compared = 0;
    let mut symmetric = 0;
    let known =
        [ring(3), ring(7), hypercube(3), torus(&[2, 3]), cube_mesh(false), cube_mesh(true), rails(2, 2)];
    for topology in known.into_iter().chain((0..400).filter_map(random_graph)) {
        let symmetry = Symmetry::of(&topology);
        let all = all_automorphisms(&topology);
        let found = searched(&topology, &[]);
        assert!(found.complete);
        assert_eq!(order(&found), all.len() as u128);
        let everything = Symmetry::from_generators(&topology, all.clone());
        assert_eq!(symmetry.node_orbits, everything.node_orbits);
        assert_eq!(link_orbits(&topology, symmetry.generators()), link_orbits(&topology, &all));
        compared += 1;
        symmetric += usize::from(all.len() > 1);
        let fixing = searched(&topology, &[NodeId(0)]);
        assert_eq!(order(&fixing), all.iter().filter(|one| one.of(0) == 0).count() as u128);
    }
    assert!(compared > 150 && symmetric > 50, "{compared} compared, {symmetric} symmetric");
}

#[test]
fn known_groups_have_their_orders_and_carry_every_rank_to_every_rank() {
    let cases: [(&str, Topology, u128); 6] = [
        ("ring", ring(64), 128),
        ("torus", torus(&[8, 8]), 512),
        ("uneven torus", torus(&[4, 6, 5]), 8 * 12 * 10),
        ("hypercube", hypercube(6), 64 * 720),
        ("cube mesh", cube_mesh(false), 48),
        ("rails", rails(4, 8), 24 * 40_320),
    ];
    for (name, topology, expected) in cases {
        let symmetry = Symmetry::of(&topology);
        assert_eq!((name, order(&searched(&topology, &[]))), (name, expected));
        assert_eq!((name, symmetry.rank_representatives(&topology)), (name, vec![0]));
        let carried = transversal(&symmetry, topology.node(0));
        for rank in 0..topology.ranks() {
            let carries = carried[topology.node(rank).0 as usize].as_ref().unwrap();
            assert_eq!(carries.of(topology.node(0).0), topology.node(rank).0);
            assert!(graph(&topology, &[], Vec::new()).is_carried_into_itself_by(carries.images()));
        }
    }
}

#[test]
fn double_links_make_two_kinds_of_ranks_of_the_cube_mesh() {
    let symmetry = Symmetry::of(&cube_mesh(true));
    assert_eq!(order(&searched(&cube_mesh(true), &[])), 4);
    assert_eq!(symmetry.rank_representatives(&cube_mesh(true)), [0, 2]);
    let group = Semiregular::of(&cube_mesh(true), &symmetry);
    assert_eq!((group.elements().len(), group.representatives()), (4, &[0, 2][..]));
    assert_semiregular(&cube_mesh(true), &group);
}

#[test]
fn one_changed_link_leaves_only_what_keeps_it() {
    let mut links: Vec<(u32, u32, u64)> = (0..12).map(|rank| (rank, (rank + 1) % 12, 25)).collect();
    links[3].2 = 24;
    let changed = weighted(12, &links);
    assert_eq!(order(&searched(&changed, &[])), 2);
    assert_eq!(Symmetry::of(&changed).node_orbit_count(), 6);

    let whole = rails(16, 8);
    let mut builder = Builder::default();
    whole.nodes().iter().for_each(|node| _ = builder.node(node.name.clone(), node.kind));
    for (index, link) in whole.links().iter().enumerate() {
        builder.link(link.from, link.to, link.bytes_per_s - u64::from(index == 0), link.latency_ns);
    }
    let changed = builder.build().unwrap();
    let (symmetry, found) = (Symmetry::of(&changed), searched(&changed, &[]));
    assert!(found.complete);
    // One rank is fixed, and so are its box and its rail. The other ranks form three orbits: those
    // of the box, those of the rail, and all others.
    assert_eq!(symmetry.node_orbit_count(), 4 + 2 + 2);
    assert_eq!(order(&found), (1..=15).product::<u128>() * (1..=7).product::<u128>());
}

#[test]
fn a_shuffled_copy_has_the_same_orbits_with_about_the_same_work() {
    for topology in [ring(64), torus(&[8, 8]), hypercube(6), rails(16, 8), cube_mesh(true)] {
        let (symmetry, found) = (Symmetry::of(&topology), searched(&topology, &[]));
        let link_orbit_count = link_orbits(&topology, symmetry.generators()).1;
        for seed in 0..5 {
            let (copy, places) = shuffled(&topology, seed);
            let (of_copy, found_of_copy) = (Symmetry::of(&copy), searched(&copy, &[]));
            assert_eq!(order(&found_of_copy), order(&found));
            assert_eq!(link_orbits(&copy, of_copy.generators()).1, link_orbit_count);
            let place = |node: usize| NodeId(places[node]);
            for one in 0..topology.nodes().len() {
                for other in 0..one {
                    let together = of_copy.node_orbit(place(one)) == of_copy.node_orbit(place(other));
                    assert_eq!(together, symmetry.node_orbits[one] == symmetry.node_orbits[other]);
                }
            }
            assert!(found_of_copy.work <= 2 * found.work, "{} against {}", found_of_copy.work, found.work);
        }
    }
}

#[test]
fn a_search_without_room_finds_fewer_automorphisms_and_no_wrong_one() {
    let topology = torus(&[8, 8]);
    let graph = graph(&topology, &[], Vec::new());
    for work in [0, 100, 1_000, 2_000] {
        let found = automorphisms(&graph, Limits { work, failures: 1, depth: 2 });
        assert!(found.generators.iter().all(|one| graph.is_carried_into_itself_by(one.images())));
        assert!(!found.complete, "{work}");
    }
    assert!(searched(&topology, &[]).work > 2_000);
    let depth = automorphisms(&graph, Limits { work: 1 << 40, failures: 100, depth: 1 });
    assert!(!depth.complete);
    assert!(depth.generators.iter().all(|one| graph.is_carried_into_itself_by(one.images())));
}

/// Checks what [`Semiregular`] promises by counting: the images of any use of a link are spread
/// evenly over the orbit of the link.
fn assert_semiregular(topology: &Topology, group: &Semiregular) {
    let graph = graph(topology, &[], Vec::new());
    for (index, element) in group.elements().iter().enumerate() {
        assert!(graph.is_carried_into_itself_by(element.images()));
        let stays =
            (0..topology.ranks()).filter(|&rank| element.of(topology.node(rank).0) == topology.node(rank).0);
        assert_eq!(stays.count(), if index == 0 { topology.ranks() as usize } else { 0 });
    }
    for rank in 0..topology.ranks() {
        let (orbit, element) = group.carrier(rank);
        let first = topology.node(group.representatives()[orbit]);
        assert_eq!(group.elements()[element].of(first.0), topology.node(rank).0);
    }
    for link in 0..topology.links().len() {
        let mut uses = vec![0; topology.links().len()];
        (0..group.elements().len())
            .for_each(|element| uses[carried_link(topology, link, &group.elements()[element])] += 1);
        let orbit = group.link_orbit(link);
        let each = group.elements().len() / group.link_orbit_sizes()[orbit] as usize;
        for (other, &uses) in uses.iter().enumerate() {
            assert_eq!(uses, if group.link_orbit(other) == orbit { each } else { 0 });
        }
    }
}

#[test]
fn groups_that_carry_each_rank_to_each_other_once_are_found() {
    let cases = [
        ring(13),
        torus(&[8, 8]),
        torus(&[3, 4, 5]),
        hypercube(5),
        cube_mesh(false),
        rails(8, 8),
        rails(5, 6),
        rails(7, 1),
    ];
    for topology in cases {
        for seed in 0..3 {
            let (copy, _) = shuffled(&topology, seed);
            let group = Semiregular::of(&copy, &Symmetry::of(&copy));
            assert_eq!((group.elements().len(), group.representatives()), (copy.ranks() as usize, &[0][..]));
            assert_semiregular(&copy, &group);
        }
    }
}

#[test]
fn the_group_of_a_thousand_ranks_does_not_depend_on_how_they_are_numbered() {
    let topology = rails(128, 8);
    for seed in 0..4 {
        let (copy, _) = shuffled(&topology, seed);
        assert!(searched(&copy, &[]).complete);
        assert_eq!(Semiregular::of(&copy, &Symmetry::of(&copy)).elements().len(), 1_024, "seed {seed}");
    }
}

#[test]
fn where_ranks_differ_the_group_is_smaller_and_still_even() {
    let grid: Vec<(u32, u32)> = (0..16).flat_map(|rank| [(rank, rank + 1), (rank, rank + 4)]).collect();
    let inside = |&(one, other): &(u32, u32)| other < 16 && (other != one + 1 || one % 4 != 3);
    let grid = undirected(16, &grid.into_iter().filter(inside).collect::<Vec<_>>());
    let group = Semiregular::of(&grid, &Symmetry::of(&grid));
    assert_eq!((group.elements().len(), group.representatives().len()), (4, 4));
    assert_semiregular(&grid, &group);
    for topology in (0..200).filter_map(random_graph) {
        assert_semiregular(&topology, &Semiregular::of(&topology, &Symmetry::of(&topology)));
    }
}
