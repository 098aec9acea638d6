//! Trees under change: which rank hangs below which, over which links.

use pleach_vocabulary::Rank;

use super::ways::{Column, Ways};

/// A tree under change.
#[derive(Clone, Debug)]
pub(super) struct Hung {
    /// The orbit of its root.
    pub(super) orbit: usize,
    /// By rank; the root hangs below nothing.
    pub(super) above: Vec<Option<Above>>,
}

/// What a rank hangs below.
#[derive(Clone, Debug)]
pub(super) struct Above {
    pub(super) rank: Rank,
    /// Over these.
    pub(super) nodes: Vec<u32>,
    /// The orbits of links that this uses, once for each use.
    pub(super) uses: Vec<usize>,
}

impl Hung {
    pub(super) fn of(column: &Column, ways: &Ways<'_>) -> Self {
        let mut above = vec![None; ways.ranks()];
        for (from, to, nodes) in &column.edges {
            above[*to as usize] =
                Some(Above { rank: *from, nodes: nodes.clone(), uses: ways.uses_over(nodes) });
        }
        Self { orbit: column.orbit, above }
    }

    /// Hangs a rank below another one, over the shortest way; gives what it hung below.
    pub(super) fn hang(&mut self, ways: &Ways<'_>, rank: Rank, above: Rank) -> Option<Above> {
        let nodes = ways.shortest_nodes(above, rank).expect("there is a way to where it hangs");
        let uses = ways.uses_over(&nodes);
        self.above[rank as usize].replace(Above { rank: above, nodes, uses })
    }

    /// Whether a rank is `top` or hangs below it.
    pub(super) fn is_below(&self, rank: Rank, top: Rank) -> bool {
        let mut rank = rank;
        while let Some(above) = &self.above[rank as usize] {
            if rank == top {
                return true;
            }
            rank = above.rank;
        }
        rank == top
    }

    /// How many edges each rank is from the root.
    pub(super) fn depths(&self, ways: &Ways<'_>) -> Vec<u32> {
        let mut depths = vec![0; self.above.len()];
        let below = self.below();
        let mut reached = vec![ways.first_rank(self.orbit)];
        while let Some(rank) = reached.pop() {
            for &one in &below[rank as usize] {
                depths[one as usize] = depths[rank as usize] + 1;
                reached.push(one);
            }
        }
        depths
    }

    fn below(&self) -> Vec<Vec<Rank>> {
        let mut below = vec![Vec::new(); self.above.len()];
        for (rank, above) in self.above.iter().enumerate() {
            if let Some(above) = above {
                below[above.rank as usize].push(rank as Rank);
            }
        }
        below
    }

    /// The tree as it is now; there are so many orbits of links.
    pub(super) fn column(&self, ways: &Ways<'_>, orbits: usize) -> Column {
        let mut loads = vec![0; orbits];
        self.above.iter().flatten().flat_map(|above| &above.uses).for_each(|&orbit| loads[orbit] += 1);
        let below = self.below();
        let mut edges = Vec::with_capacity(self.above.len());
        let mut reached = vec![ways.first_rank(self.orbit)];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            for &one in &below[rank as usize] {
                let nodes = self.above[one as usize].as_ref().map(|above| above.nodes.clone());
                edges.push((rank, one, nodes.expect("what hangs below has a way there")));
                reached.push(one);
            }
        }
        Column { orbit: self.orbit, loads, edges }
    }
}
