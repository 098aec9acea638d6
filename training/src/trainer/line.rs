//! The average of a vector over some ranks of a group: a line of members of a session.
//!
//! Each rank of the line adds up its part of the vector, and sends the average to the others. So
//! any two of them send each other two messages, and other ranks none. The sum is made in the order
//! of ranks, and all have its bits.

use std::ops::Range;

use pleach_collectives::{CollectiveError, Group, Operation, Rank};

/// The part of a rank at this place in its line.
fn part(elements: usize, ranks: usize, place: usize) -> Range<usize> {
    let longest = elements.div_ceil(ranks);
    elements.min(longest * place)..elements.min(longest * (place + 1))
}

/// Replaces elements by their average over these ranks, of which this is one. `come` is memory that
/// is used again.
pub(crate) fn average(
    group: &Group,
    ranks: &[Rank],
    elements: &mut [f32],
    come: &mut Vec<f32>,
) -> Result<(), CollectiveError> {
    let (len, count) = (elements.len(), ranks.len());
    let place = ranks.iter().position(|rank| *rank == group.rank()).expect("this rank is in its line");
    let own = part(len, count, place);
    come.resize(own.len() * count, 0.0);
    let mut batch = group.batch();
    let mut blocks = come.chunks_exact_mut(own.len().max(1));
    for (other, peer) in ranks.iter().enumerate() {
        let block = blocks.next();
        let theirs = part(len, count, other);
        match block {
            Some(block) if other == place => block.copy_from_slice(&elements[own.clone()]),
            Some(block) => {
                batch.add(Operation::recv(block, *peer))?;
            }
            None => {}
        }
        if other != place && !theirs.is_empty() {
            batch.add(Operation::send(&elements[theirs], *peer))?;
        }
    }
    batch.run()?;
    let sums = &mut elements[own.clone()];
    sums.fill(0.0);
    for (other, block) in come.chunks_exact(own.len().max(1)).enumerate() {
        let pairs = sums.iter_mut().zip(block);
        // The first one is taken as it is: 0 + -0 is 0.
        pairs.for_each(|(sum, element)| *sum = if other == 0 { *element } else { *sum + element });
    }
    sums.iter_mut().for_each(|sum| *sum /= count as f32);
    let mut batch = group.batch();
    let (mut mine, mut others) = (&[][..], Vec::with_capacity(count));
    for (other, chunk) in elements.chunks_mut(len.div_ceil(count).max(1)).enumerate() {
        if other == place {
            mine = chunk;
        } else {
            others.push((ranks[other], chunk));
        }
    }
    for (peer, chunk) in others {
        batch.add(Operation::recv(chunk, peer))?;
    }
    if !mine.is_empty() {
        for peer in ranks.iter().filter(|rank| **rank != group.rank()) {
            batch.add(Operation::send(mine, *peer))?;
        }
    }
    batch.run()
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn parts_hold_each_element_once() {
        for (elements, ranks) in [(0, 3), (1, 4), (5, 4), (12, 3), (100, 7)] {
            let mut end = 0;
            for place in 0..ranks {
                let part = part(elements, ranks, place);
                assert_eq!(part.start, end);
                end = part.end;
            }
            assert_eq!(end, elements);
        }
    }
}
