//! A topological order of numbers, or the cycle that keeps them from having one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Orders numbers so that what each needs comes before it. An order that holds already stays; where
/// several numbers may come next, the smallest does. Otherwise a cycle is returned, in which each
/// needs the one before it and the first needs the last.
pub(crate) fn topological(needs: &[Vec<u32>]) -> Result<Vec<u32>, Vec<u32>> {
    let mut missing: Vec<usize> = needs.iter().map(Vec::len).collect();
    let mut needed_by: Vec<Vec<u32>> = vec![Vec::new(); needs.len()];
    for (number, needed) in needs.iter().enumerate() {
        for &other in needed {
            needed_by[other as usize].push(number as u32);
        }
    }
    let ready = missing.iter().enumerate().filter(|(_, missing)| **missing == 0);
    let mut ready: BinaryHeap<Reverse<u32>> = ready.map(|(number, _)| Reverse(number as u32)).collect();
    let mut order = Vec::with_capacity(needs.len());
    while let Some(Reverse(number)) = ready.pop() {
        order.push(number);
        for &other in &needed_by[number as usize] {
            missing[other as usize] -= 1;
            if missing[other as usize] == 0 {
                ready.push(Reverse(other));
            }
        }
    }
    if order.len() == needs.len() { Ok(order) } else { Err(cycle(needs, &missing)) }
}

/// Walks from a number that is not in the order to one that it needs, until a number comes again.
fn cycle(needs: &[Vec<u32>], missing: &[usize]) -> Vec<u32> {
    let is_stuck = |number: &u32| missing[*number as usize] > 0;
    let mut at = (0..needs.len() as u32).find(is_stuck);
    let mut place = vec![usize::MAX; needs.len()];
    let mut walked = Vec::new();
    while let Some(number) = at {
        if place[number as usize] != usize::MAX {
            let mut cycle = walked.split_off(place[number as usize]);
            cycle.reverse();
            return cycle;
        }
        place[number as usize] = walked.len();
        walked.push(number);
        at = needs[number as usize].iter().copied().find(is_stuck);
    }
    walked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_that_holds_stays_and_another_is_repaired() {
        assert_eq!(topological(&[vec![], vec![0], vec![0, 1]]), Ok(vec![0, 1, 2]));
        assert_eq!(topological(&[vec![2], vec![], vec![1]]), Ok(vec![1, 2, 0]));
    }

    #[test]
    fn a_cycle_is_returned_in_the_direction_of_the_data() {
        // 3 needs 1, 1 needs 2, 2 needs 3: data go 2 -> 1 -> 3 -> 2.
        let cycle = topological(&[vec![], vec![2], vec![3], vec![1, 0]]).expect_err("there is a cycle");
        assert_eq!(cycle.len(), 3);
        let at = cycle.iter().position(|&number| number == 2).expect("2 is in it");
        assert_eq!(cycle[(at + 1) % 3], 1);
        assert_eq!(topological(&[vec![0]]), Err(vec![0]));
    }
}
