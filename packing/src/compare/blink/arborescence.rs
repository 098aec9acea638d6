//! The minimum arborescence of a root, by contraction of cycles (Chu and Liu 1965, Edmonds 1967).

/// An arc of a network. The lengths of the arcs are in a list of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arc {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// The arcs of the shortest arborescence from `root` to all nodes; `None` if there is none. The
/// first of several equally long arcs is taken.
///
/// O(nodes · arcs).
pub(super) fn shortest(nodes: usize, root: usize, arcs: &[Arc], lengths: &[f64]) -> Option<Vec<usize>> {
    let mut incoming: Vec<Option<usize>> = vec![None; nodes];
    for (index, arc) in arcs.iter().enumerate().filter(|(_, arc)| arc.to != root && arc.from != arc.to) {
        let best = &mut incoming[arc.to];
        if best.is_none_or(|best| lengths[index] < lengths[best]) {
            *best = Some(index);
        }
    }
    if (0..nodes).any(|node| node != root && incoming[node].is_none()) {
        return None;
    }
    let (cycle_of, cycles) = cycles(nodes, root, arcs, &incoming);
    if cycles == 0 {
        return Some(incoming.into_iter().flatten().collect());
    }
    // Each cycle becomes a node. An arc into a cycle replaces an arc of the cycle, so the length of
    // the replaced arc is subtracted from its length.
    let mut place = vec![0; nodes];
    let mut count = cycles;
    for node in 0..nodes {
        place[node] = cycle_of[node].unwrap_or_else(|| {
            count += 1;
            count - 1
        });
    }
    let mut kept = Vec::new();
    let (mut contracted, mut longer) = (Vec::new(), Vec::new());
    for (index, arc) in arcs.iter().enumerate() {
        if place[arc.from] == place[arc.to] {
            continue;
        }
        let saved = cycle_of[arc.to].and(incoming[arc.to]).map_or(0.0, |replaced| lengths[replaced]);
        kept.push(index);
        contracted.push(Arc { from: place[arc.from], to: place[arc.to] });
        longer.push(lengths[index] - saved);
    }
    let chosen = shortest(count, place[root], &contracted, &longer)?;
    let chosen: Vec<usize> = chosen.into_iter().map(|index| kept[index]).collect();
    let mut tree = incoming;
    for (node, arc) in tree.iter_mut().enumerate() {
        if cycle_of[node].is_none() {
            *arc = None;
        }
    }
    for &index in &chosen {
        tree[arcs[index].to] = Some(index);
    }
    Some(tree.into_iter().flatten().collect())
}

/// For each node, the cycle of chosen arcs that holds it; and the number of cycles.
fn cycles(
    nodes: usize,
    root: usize,
    arcs: &[Arc],
    incoming: &[Option<usize>],
) -> (Vec<Option<usize>>, usize) {
    let mut cycle_of = vec![None; nodes];
    let mut visited_from = vec![None; nodes];
    let mut cycles = 0;
    for start in 0..nodes {
        let mut node = start;
        while node != root && visited_from[node].is_none() {
            visited_from[node] = Some(start);
            let Some(arc) = incoming[node] else { break };
            node = arcs[arc].from;
        }
        if node == root || visited_from[node] != Some(start) || cycle_of[node].is_some() {
            continue;
        }
        while cycle_of[node].is_none() {
            cycle_of[node] = Some(cycles);
            let Some(arc) = incoming[node] else { break };
            node = arcs[arc].from;
        }
        cycles += 1;
    }
    (cycle_of, cycles)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn length(chosen: &[usize], lengths: &[f64]) -> f64 {
        chosen.iter().map(|&index| lengths[index]).sum()
    }

    /// The least length, by trying every choice of one incoming arc for each node.
    fn by_trying(nodes: usize, arcs: &[Arc], lengths: &[f64]) -> f64 {
        fn reaches_root(nodes: usize, arcs: &[Arc], chosen: &[usize]) -> bool {
            (1..nodes).all(|start| {
                let mut node = start;
                for _ in 0..nodes {
                    node = if node == 0 { 0 } else { arcs[chosen[node - 1]].from };
                }
                node == 0
            })
        }
        let mut least = f64::INFINITY;
        let mut chosen = vec![0; nodes - 1];
        'all: loop {
            let fits = (1..nodes).all(|node| arcs[chosen[node - 1]].to == node);
            if fits && reaches_root(nodes, arcs, &chosen) {
                least = least.min(length(&chosen, lengths));
            }
            for place in &mut chosen {
                *place += 1;
                if *place < arcs.len() {
                    continue 'all;
                }
                *place = 0;
            }
            return least;
        }
    }

    proptest::proptest! {
        #[test]
        fn no_tree_is_shorter(
            arcs in proptest::collection::vec((0..4_usize, 1..4_usize, 1..20_u32), 3..12),
        ) {
            let lengths: Vec<f64> = arcs.iter().map(|arc| f64::from(arc.2)).collect();
            let arcs: Vec<Arc> = arcs.iter().map(|&(from, to, _)| Arc { from, to }).collect();
            let least = by_trying(4, &arcs, &lengths);
            match shortest(4, 0, &arcs, &lengths) {
                Some(chosen) => {
                    let mut targets: Vec<usize> = chosen.iter().map(|&index| arcs[index].to).collect();
                    targets.sort_unstable();
                    proptest::prop_assert_eq!(targets, vec![1, 2, 3]);
                    proptest::prop_assert_eq!(length(&chosen, &lengths), least);
                }
                None => proptest::prop_assert!(least.is_infinite()),
            }
        }
    }
}
