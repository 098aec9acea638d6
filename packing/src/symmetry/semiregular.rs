//! Semiregular groups of automorphisms, which share the load of an orbit evenly among its links.
//!
//! A set of automorphisms maps the trees of one rank to trees of other ranks. If the set is a
//! *group*, it uses every link of an orbit equally often: the number of elements, times the uses of
//! the orbit by the first trees, divided by the number of links of the orbit. If, in addition, only
//! the identity fixes a rank, every rank gets the trees once. Such a group is called semiregular,
//! and regular if it has one orbit of ranks.
//!
//! **Invariant:** the elements are automorphisms, closed under products, and only the first
//! element, the identity, fixes a rank.
//!
//! A group grows by one generator at a time. The generators are random products of automorphisms,
//! first of those that commute with the group so far. The search is random and bounded: if it finds
//! a smaller group, there are more orbits.

use std::collections::BTreeSet;

use pleach_vocabulary::Rank;

use super::{Limits, Permutation, Symmetry, automorphisms, graph, link_orbits};
use crate::digraph::greatest_divisor;
use crate::flow::Amount;
use crate::topology::{NodeId, Topology};
use pleach_vocabulary::random::Random;

/// Number of times that a group is grown from the identity.
const ATTEMPTS_MAX: u64 = 4;

/// Number of random automorphisms that are tried for one generator in the first round. Each further
/// round tries twice as many.
const SAMPLES: usize = 32;

/// Number of rounds for one generator.
const ROUNDS_MAX: u32 = 6;

/// Number of candidates of a round that are tried, those with the longest cycles first.
const CANDIDATES_MAX: usize = 64;

/// The work limit of the search for permutations that commute with a group.
const COMMUTING_WORK_MAX: u64 = 50_000_000;

/// A group of automorphisms. See the module.
#[derive(Clone, Debug)]
pub(crate) struct Semiregular {
    elements: Vec<Permutation>,
    /// The first rank of every orbit.
    representatives: Vec<Rank>,
    /// For every rank, its orbit and the element that maps the first rank of the orbit to it.
    carriers: Vec<(usize, usize)>,
    link_orbits: Vec<u32>,
    link_orbit_sizes: Vec<u32>,
}

impl Semiregular {
    /// The largest semiregular group that was found.
    #[must_use]
    pub(crate) fn of(topology: &Topology, symmetry: &Symmetry) -> Self {
        Self::from_generators(topology, grown(topology, symmetry))
    }

    fn from_generators(topology: &Topology, group: Group) -> Self {
        let Group { generators, elements } = group;
        let mut representatives = Vec::new();
        let mut carriers = vec![None; topology.ranks() as usize];
        for rank in 0..topology.ranks() {
            if carriers[rank as usize].is_some() {
                continue;
            }
            for (index, element) in elements.iter().enumerate() {
                let image = topology.rank(NodeId(element.of(topology.node(rank).0)));
                let image = image.expect("an automorphism carries ranks to ranks");
                carriers[image as usize] = Some((representatives.len(), index));
            }
            representatives.push(rank);
        }
        let carriers =
            carriers.into_iter().map(|carrier| carrier.expect("the identity carries every rank")).collect();
        let (link_orbits, count) = link_orbits(topology, &generators);
        let mut link_orbit_sizes = vec![0; count];
        link_orbits.iter().for_each(|&orbit| link_orbit_sizes[orbit as usize] += 1);
        Self { elements, representatives, carriers, link_orbits, link_orbit_sizes }
    }

    /// All elements, the identity first.
    #[must_use]
    pub(crate) fn elements(&self) -> &[Permutation] {
        &self.elements
    }

    /// The first rank of every orbit of ranks. Every orbit has as many ranks as there are elements.
    #[must_use]
    pub(crate) fn representatives(&self) -> &[Rank] {
        &self.representatives
    }

    /// The orbit of a rank, and the index of the element that maps the first rank of the orbit to
    /// this rank.
    #[must_use]
    pub(crate) fn carrier(&self, rank: Rank) -> (usize, usize) {
        self.carriers[rank as usize]
    }

    /// The orbit of a link, by its place in [`Topology::links`].
    #[must_use]
    pub(crate) fn link_orbit(&self, link: usize) -> usize {
        self.link_orbits[link] as usize
    }

    /// The number of links of each orbit of links.
    #[must_use]
    pub(crate) fn link_orbit_sizes(&self) -> &[u32] {
        &self.link_orbit_sizes
    }
}

/// The generators and the elements of a group.
#[derive(Clone, Debug)]
struct Group {
    generators: Vec<Permutation>,
    elements: Vec<Permutation>,
}

impl Group {
    fn trivial(topology: &Topology) -> Self {
        Self { generators: Vec::new(), elements: vec![Permutation::identity(topology.nodes().len())] }
    }

    /// The group with one more generator; `None` if an element other than the identity fixes a
    /// rank.
    fn with(&self, topology: &Topology, generator: &Permutation) -> Option<Self> {
        let start = topology.node(0).0;
        let mut generators = self.generators.clone();
        generators.push(generator.clone());
        let mut elements = vec![Permutation::identity(topology.nodes().len())];
        let mut by_image = vec![None; topology.nodes().len()];
        by_image[start as usize] = Some(0);
        let mut next = 0;
        while next < elements.len() {
            for generator in &generators {
                let image = generator.of(elements[next].of(start));
                match by_image[image as usize] {
                    // In a semiregular group, the image of one rank determines the element. If two
                    // different elements agree on it, their quotient fixes this rank.
                    Some(known) => {
                        let known: &Permutation = &elements[known];
                        let product = elements[next].images().iter().map(|&image| generator.of(image));
                        if !product.eq(known.images().iter().copied()) {
                            return None;
                        }
                    }
                    None => {
                        by_image[image as usize] = Some(elements.len());
                        elements.push(elements[next].then(generator));
                    }
                }
            }
            next += 1;
        }
        let leaves_a_rank = |element: &Permutation| {
            (0..topology.ranks()).any(|rank| element.of(topology.node(rank).0) == topology.node(rank).0)
        };
        let is_semiregular = !elements[1..].iter().any(leaves_a_rank);
        is_semiregular.then_some(Self { generators, elements })
    }
}

fn grown(topology: &Topology, symmetry: &Symmetry) -> Group {
    let largest = largest_order(topology, symmetry);
    let mut best = Group::trivial(topology);
    for attempt in 0..ATTEMPTS_MAX {
        if best.elements.len() >= largest {
            break;
        }
        let mut random = Random::new(attempt);
        let mut group = Group::trivial(topology);
        while group.elements.len() < largest {
            let commuting = commuting(topology, symmetry, &group);
            let extended_group = extended_group(topology, &group, &commuting, &mut random)
                .or_else(|| extended_group(topology, &group, symmetry.generators(), &mut random));
            let Some(extended_group) = extended_group else { break };
            group = extended_group;
        }
        if group.elements.len() > best.elements.len() {
            best = group;
        }
    }
    best
}

/// A multiple of the order of every semiregular group: the greatest common divisor of the sizes of
/// all orbits of ranks.
fn largest_order(topology: &Topology, symmetry: &Symmetry) -> usize {
    let mut sizes: Vec<Amount> = vec![0; symmetry.node_orbit_count()];
    (0..topology.ranks()).for_each(|rank| sizes[symmetry.node_orbit(topology.node(rank))] += 1);
    sizes.into_iter().fold(0, greatest_divisor) as usize
}

/// Generators of the automorphisms that commute with a group. They are the automorphisms of the
/// topology with additional arcs: for each generator of the group, an arc from every node to its
/// image.
fn commuting(topology: &Topology, symmetry: &Symmetry, group: &Group) -> Vec<Permutation> {
    if group.generators.is_empty() {
        return symmetry.generators().to_vec();
    }
    let mut arcs = Vec::new();
    for (index, generator) in group.generators.iter().enumerate() {
        // No link has this bandwidth.
        let label = u64::MAX - index as u64;
        arcs.extend(generator.images().iter().enumerate().map(|(node, &image)| (node as u32, image, label)));
    }
    let limits = Limits { work: COMMUTING_WORK_MAX, ..super::LIMITS };
    automorphisms(&graph(topology, &[], arcs), limits).generators
}

/// The group with one more generator, which is a product of these automorphisms.
fn extended_group(
    topology: &Topology,
    group: &Group,
    of: &[Permutation],
    random: &mut Random,
) -> Option<Group> {
    let with = |automorphism: &Permutation| {
        let (order, candidate) = even_power(topology, automorphism)?;
        largest_with(topology, group, order, candidate)
    };
    // If a group permutes boxes in any way, the product of all its generators is one long cycle.
    let all = of.iter().skip(1).fold(of.first()?.clone(), |product, generator| product.then(generator));
    if let found @ Some(_) = with(&all) {
        return found;
    }
    let mut products = ProductReplacement::new(of, random);
    for round in 0..ROUNDS_MAX {
        let sampled: Vec<_> =
            (0..SAMPLES << round).filter_map(|_| even_power(topology, products.next(random))).collect();
        let candidates: BTreeSet<_> = sampled.into_iter().collect();
        let longest_first = candidates.into_iter().rev().take(CANDIDATES_MAX);
        let mut extended_group =
            longest_first.filter_map(|(order, one)| largest_with(topology, group, order, one));
        if let found @ Some(_) = extended_group.next() {
            return found;
        }
    }
    None
}

/// The group with a permutation of this order, or with a power of the permutation.
fn largest_with(topology: &Topology, group: &Group, order: usize, candidate: Permutation) -> Option<Group> {
    let mut left = vec![(order, candidate)];
    while let Some((order, candidate)) = left.pop() {
        if let Some(extended_group) = group.with(topology, &candidate)
            && extended_group.elements.len() > group.elements.len()
        {
            return Some(extended_group);
        }
        let parts = primes(order).into_iter().filter(|&prime| prime < order);
        left.extend(parts.map(|prime| (order / prime, power(&candidate, &[(prime, 1)]))));
    }
    None
}

/// The power of an automorphism that moves all ranks in cycles of one length, and this length. Of
/// several such powers, the one of highest order is taken. `None` if there is no such power.
fn even_power(topology: &Topology, automorphism: &Permutation) -> Option<(usize, Permutation)> {
    let (mut lengths, mut of_ranks) = (BTreeSet::new(), BTreeSet::new());
    for cycle in automorphism.cycles() {
        lengths.insert(cycle.len());
        if topology.rank(NodeId(cycle[0])).is_some() {
            of_ranks.insert(cycle.len());
        }
    }
    let (mut order, mut uneven) = (1, Vec::new());
    let all_primes: BTreeSet<usize> = lengths.iter().flat_map(|&length| primes(length)).collect();
    for prime in all_primes {
        let most = lengths.iter().map(|&length| valuation(length, prime)).max().unwrap_or(0);
        let is_even = of_ranks.iter().all(|&length| valuation(length, prime) == most);
        if is_even {
            order *= prime.pow(most);
        } else {
            uneven.push((prime, most));
        }
    }
    (order > 1).then(|| (order, power(automorphism, &uneven)))
}

/// A permutation to the power of `exponent`, a product of prime powers.
fn power(permutation: &Permutation, exponent: &[(usize, u32)]) -> Permutation {
    let mut images = vec![0; permutation.images().len()];
    for cycle in permutation.cycles() {
        let mut steps = 1 % cycle.len();
        for &(prime, times) in exponent {
            (0..times).for_each(|_| steps = steps * prime % cycle.len());
        }
        for (index, &node) in cycle.iter().enumerate() {
            images[node as usize] = cycle[(index + steps) % cycle.len()];
        }
    }
    Permutation::new(images)
}

/// The exponent of a prime in a number.
fn valuation(number: usize, prime: usize) -> u32 {
    let (mut number, mut times) = (number, 0);
    while number.is_multiple_of(prime) {
        number /= prime;
        times += 1;
    }
    times
}

/// The primes that divide a number.
fn primes(number: usize) -> Vec<usize> {
    let (mut left, mut primes, mut prime) = (number, Vec::new(), 2);
    while prime * prime <= left {
        if left.is_multiple_of(prime) {
            primes.push(prime);
            left /= prime.pow(valuation(left, prime));
        }
        prime += 1;
    }
    if left > 1 {
        primes.push(left);
    }
    primes
}

/// Random products of generators (product replacement, F. Celler and others, 1995).
struct ProductReplacement {
    slots: Vec<Permutation>,
    product: Permutation,
}

impl ProductReplacement {
    /// Fewest slots. With fewer slots the products would not be random enough.
    const SLOTS_MIN: usize = 10;

    fn new(of: &[Permutation], random: &mut Random) -> Self {
        let slots: Vec<Permutation> =
            of.iter().cycle().take(of.len().max(Self::SLOTS_MIN)).cloned().collect();
        let rounds = slots.len() * (slots.len().ilog2() as usize + 2);
        let mut products = Self { product: slots[0].clone(), slots };
        (0..rounds).for_each(|_| _ = products.next(random));
        products
    }

    fn next(&mut self, random: &mut Random) -> &Permutation {
        let slot = random.below(self.slots.len() as u64) as usize;
        let other = (slot + 1 + random.below(self.slots.len() as u64 - 1) as usize) % self.slots.len();
        let changed = match random.below(4) {
            0 => self.slots[slot].then(&self.slots[other]),
            1 => self.slots[slot].then(&self.slots[other].inverse()),
            2 => self.slots[other].then(&self.slots[slot]),
            _ => self.slots[other].inverse().then(&self.slots[slot]),
        };
        self.slots[slot] = changed;
        self.product = self.product.then(&self.slots[slot]);
        &self.product
    }
}
