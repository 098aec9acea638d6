//! Nodes put in the place of others.

/// Where every node goes. Numbers are those of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Permutation(Vec<u32>);

impl Permutation {
    /// Leaves everything where it is.
    #[must_use]
    pub(crate) fn identity(nodes: usize) -> Self {
        Self((0..nodes as u32).collect())
    }

    /// Node i goes to `images[i]`.
    ///
    /// # Panics
    ///
    /// When two go to the same, or one to where nothing is.
    #[must_use]
    pub(crate) fn new(images: Vec<u32>) -> Self {
        let mut taken = vec![false; images.len()];
        for &image in &images {
            assert!(!std::mem::replace(&mut taken[image as usize], true), "two nodes go to {image}");
        }
        Self(images)
    }

    /// Where a node goes.
    #[must_use]
    pub(crate) fn of(&self, node: u32) -> u32 {
        self.0[node as usize]
    }

    /// Where all go.
    #[must_use]
    pub(crate) fn images(&self) -> &[u32] {
        &self.0
    }

    /// This one first, the other one after it.
    #[must_use]
    pub(crate) fn then(&self, after: &Self) -> Self {
        Self(self.0.iter().map(|&image| after.of(image)).collect())
    }

    /// What takes everything back.
    #[must_use]
    pub(crate) fn inverse(&self) -> Self {
        let mut images = vec![0; self.0.len()];
        for (node, &image) in self.0.iter().enumerate() {
            images[image as usize] = node as u32;
        }
        Self(images)
    }

    /// Which nodes go round in which circles, those of one node as well; each begins with its
    /// smallest.
    #[must_use]
    pub(crate) fn cycles(&self) -> Vec<Vec<u32>> {
        let mut seen = vec![false; self.0.len()];
        let mut cycles = Vec::new();
        for start in 0..self.0.len() as u32 {
            let mut cycle = Vec::new();
            let mut node = start;
            while !std::mem::replace(&mut seen[node as usize], true) {
                cycle.push(node);
                node = self.of(node);
            }
            if !cycle.is_empty() {
                cycles.push(cycle);
            }
        }
        cycles
    }
}

/// Sets of nodes that are merged bit by bit.
#[derive(Clone, Debug)]
pub(super) struct Classes(Vec<u32>);

impl Classes {
    /// Everything by itself.
    pub(super) fn new(members: usize) -> Self {
        Self((0..members as u32).collect())
    }

    /// The smallest member of the set.
    pub(super) fn first(&mut self, member: u32) -> u32 {
        let mut member = member;
        while self.0[member as usize] != member {
            self.0[member as usize] = self.0[self.0[member as usize] as usize];
            member = self.0[member as usize];
        }
        member
    }

    /// Makes one set of two; says whether they were two.
    pub(super) fn merge(&mut self, one: u32, other: u32) -> bool {
        let (one, other) = (self.first(one), self.first(other));
        self.0[one.max(other) as usize] = one.min(other);
        one != other
    }

    /// Merges what a permutation carries into each other.
    pub(super) fn merge_along(&mut self, permutation: &Permutation) {
        for (node, &image) in permutation.images().iter().enumerate() {
            self.merge(node as u32, image);
        }
    }

    /// The number of every member's set; sets are numbered by their smallest members.
    pub(super) fn numbered(mut self) -> (Vec<u32>, usize) {
        let mut numbers = vec![0; self.0.len()];
        let mut count = 0;
        for member in 0..self.0.len() as u32 {
            let first = self.first(member);
            if first == member {
                numbers[member as usize] = count;
                count += 1;
            } else {
                numbers[member as usize] = numbers[first as usize];
            }
        }
        (numbers, count as usize)
    }
}
