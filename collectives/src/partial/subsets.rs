//! Every schedule with every subset of the ranks absent: a rank that gives the neutral element
//! changes no bit of the result of the others, whether its peers read the neutral elements or leave
//! them out; what is left out is not read and not put; and all ranks know who is present.

use pleach_schedule::Algorithm;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::neutral;
use crate::engine::{RoundDivisor, Traffic};
use crate::{CollectiveError, Element, Group, bf16, f16, ranks};

/// Elements of a vector: an odd number, and more than a cache line of any type.
const LEN: usize = 37;

/// An operation, what the ranks give, and how two of these are combined.
struct Case<T> {
    op: ReduceOp,
    value: fn(Rank, usize) -> T,
    combine: fn(T, T) -> T,
}

impl<T: Element> Case<T> {
    /// Compares the result with that of the present ranks alone, bit for bit.
    fn check(&self, group: &Group, name: &str) -> Result<(), CollectiveError> {
        let found = self.find_difference(group, &neutral(T::DATA_TYPE, self.op))?;
        assert_eq!(found, None, "{name}, {}", self.op);
        Ok(())
    }

    /// Says for which ranks the result has other bits than that of these ranks alone, where the
    /// others give these elements or none. All ranks find the same.
    fn find_difference(&self, group: &Group, absent: &[u8]) -> Result<Option<String>, CollectiveError> {
        let ranks = group.world_size();
        let absent: T = bytemuck::pod_read_unaligned(absent);
        let of_present = group.of_present(LEN, self.op)?;
        for present in 1u32..1 << ranks {
            let is_present = |rank: &Rank| present >> rank & 1 == 1;
            let own = |index| {
                if is_present(&group.rank()) { (self.value)(group.rank(), index) } else { absent }
            };
            let mut data: Vec<T> = (0..LEN).map(own).collect();
            let input = is_present(&group.rank()).then_some(&data[..]);
            let left_out = of_present.all_reduce(input, RoundDivisor::Ranks)?;
            group.all_reduce(&mut data, self.op)?;
            let expected = |index| {
                let values = (0..ranks).filter(is_present).map(|rank| (self.value)(rank, index));
                values.reduce(self.combine).expect("some rank is present")
            };
            let expected: Vec<T> = (0..LEN).map(expected).collect();
            let bytes = bytemuck::cast_slice::<T, u8>;
            if bytes(&data) != bytes(&expected) {
                return Ok(Some(format!("ranks {present:b} of {ranks}")));
            }
            if bytes(&left_out.result) != bytes(&expected) || left_out.contributors != present {
                let told = left_out.contributors;
                return Ok(Some(format!("others left out: ranks {present:b} of {ranks}, {told:b} told")));
            }
        }
        Ok(None)
    }
}

/// Few bits, whose sums are not rounded in any order; zeros are negative.
fn small(rank: Rank, index: usize) -> f32 {
    if index.is_multiple_of(5) { -0.0 } else { rank as f32 - 2.5 }
}

/// All cases by this algorithm.
fn check_all(group: &Group, name: &str) -> Result<(), CollectiveError> {
    let group = group.with_variant(Algorithm::named(name, Collective::AllReduce).expect("there is one"));
    Case { op: ReduceOp::Sum, value: small, combine: |left, right| left + right }.check(&group, name)?;
    let signed = |rank: Rank, index: usize| {
        (rank as i64 + 1) * if index.is_multiple_of(2) { -3 } else { i64::MAX / 9 }
    };
    Case { op: ReduceOp::Min, value: signed, combine: i64::min }.check(&group, name)?;
    if group.world_size() > 5 {
        return Ok(());
    }
    Case { op: ReduceOp::Sum, value: signed, combine: i64::wrapping_add }.check(&group, name)?;
    Case { op: ReduceOp::Max, value: signed, combine: i64::max }.check(&group, name)?;
    let power = |rank: Rank, index: usize| [1.0, -2.0, 0.5, -1.0][(rank as usize + index) % 4];
    Case { op: ReduceOp::Prod, value: power, combine: |left: f64, right| left * right }
        .check(&group, name)?;
    Case { op: ReduceOp::Max, value: power, combine: f64::max }.check(&group, name)?;
    Case { op: ReduceOp::Min, value: power, combine: f64::min }.check(&group, name)?;
    let short = |rank: Rank, index: usize| f16::from_f32(small(rank, index));
    let add = |left: f16, right: f16| f16::from_f32(left.to_f32() + right.to_f32());
    Case { op: ReduceOp::Sum, value: short, combine: add }.check(&group, name)?;
    let short = |rank: Rank, index: usize| bf16::from_f32(small(rank, index));
    let most = |left: bf16, right: bf16| bf16::from_f32(left.to_f32().max(right.to_f32()));
    Case { op: ReduceOp::Max, value: short, combine: most }.check(&group, name)?;
    let bits = |rank: Rank, index: usize| (0x5a ^ (rank as usize * 31 + index)) as u8;
    Case { op: ReduceOp::And, value: bits, combine: |left, right| left & right }.check(&group, name)?;
    Case { op: ReduceOp::Or, value: bits, combine: |left, right| left | right }.check(&group, name)?;
    Case { op: ReduceOp::Xor, value: bits, combine: |left, right| left ^ right }.check(&group, name)
}

/// The names of all algorithms, with the families as this grid has them.
fn names(grid: &str) -> Vec<String> {
    let grids = ["grid", "grid-staged", "hierarchical"].map(|family| format!("{family}:{grid}"));
    let plain = Algorithm::names(Collective::AllReduce).iter().filter(|name| !name.contains(':'));
    plain.map(|name| (*name).to_owned()).chain(grids).collect()
}

#[test]
fn an_absent_rank_changes_no_bit_whatever_the_schedule() {
    for (ranks, grid) in [(2, "1x2"), (3, "1x3"), (4, "2x2"), (5, "1x5"), (8, "2x4")] {
        let names = names(grid);
        let refused = ranks::with_group(
            Fabric::Shm,
            ranks,
            |_| {},
            |group| {
                let mut refused = Vec::new();
                for name in &names {
                    if let Err(error) = check_all(&group, name) {
                        // The ranks choose alike: what does not fit here fits on none of them.
                        refused.push(format!("{name}: {error}"));
                    }
                }
                refused
            },
        );
        // Packed trees need a topology, which these ranks do not have.
        let is_packed = |error: &String| error.starts_with("packed:");
        assert!(refused[0].len() == 1 && refused[0].iter().all(is_packed), "{:?}", refused[0]);
    }
}

/// −0.0 + 0.0 is 0.0.
#[test]
fn a_zero_with_the_wrong_sign_is_caught() {
    let case = Case { op: ReduceOp::Sum, value: |_, _| -0.0, combine: |left: f32, right| left + right };
    ranks::with_group(
        Fabric::Shm,
        3,
        |_| {},
        |group| {
            for name in names("1x3").iter().filter(|name| !name.starts_with("packed")) {
                let group =
                    group.with_variant(Algorithm::named(name, Collective::AllReduce).expect("there is one"));
                let found = |absent: f32| case.find_difference(&group, &absent.to_ne_bytes());
                assert_eq!(found(-0.0).expect("it fits"), None, "{name}");
                assert_eq!(found(0.0).expect("it fits").as_deref(), Some("ranks 1 of 3"), "{name}");
            }
        },
    );
}

#[test]
fn an_absent_rank_changes_no_bit_in_a_grid_with_holes() {
    for (ranks, grids) in
        [(3, &["2x2"][..]), (5, &["2x3", "3x2", "2x2x2"]), (6, &["2x4"]), (7, &["3x3", "2x4", "3d"])]
    {
        ranks::with_group(
            Fabric::Shm,
            ranks,
            |_| {},
            |group| {
                for grid in grids {
                    for family in ["grid", "grid-staged"] {
                        let name = format!("{family}:{grid}");
                        check_all(&group, &name).unwrap_or_else(|error| panic!("{name}: {error}"));
                    }
                }
            },
        );
    }
}

/// Elements of each rank's block where traffic is counted.
const BLOCK: usize = 4096;

/// What all ranks together read and put in a sum by this algorithm, by the set of the present
/// ranks; `None` where there is no such algorithm. The results are checked, also those of averages,
/// which move as much as sums.
fn traffic(fabric: Fabric, ranks: u32, name: &str) -> Option<Vec<Traffic>> {
    let algorithm = Algorithm::named(name, Collective::AllReduce).expect("there is one");
    let len = BLOCK * ranks as usize;
    let all = ranks::with_group(
        fabric,
        ranks,
        |_| {},
        |group| {
            let group = group.with_variant(algorithm.clone());
            let input: Vec<f32> = (0..len).map(|index| (index % 50) as f32 + group.rank() as f32).collect();
            let [sums, averages] =
                [group.of_present(len, ReduceOp::Sum)?, group.of_present(len, ReduceOp::Avg)?];
            let traffic = (0u32..1 << ranks).map(|present| {
                let count = present.count_ones();
                let given = (present >> group.rank() & 1 == 1).then_some(&input[..]);
                let ranks_present = || (0..ranks).filter(|rank| present >> rank & 1 == 1);
                let sum: u32 = ranks_present().sum();
                let expected = |index: usize| (count * (index % 50) as u32 + sum) as f32;
                let summed = sums.all_reduce(given, RoundDivisor::Ranks)?;
                let is_right = |(index, it): (usize, &f32)| *it == expected(index);
                assert!(summed.result.iter().enumerate().all(is_right), "{name}, ranks {present:b}");
                for divisor in [RoundDivisor::Number(count.max(1)), RoundDivisor::Contributors] {
                    let averaged = averages.all_reduce(given, divisor)?;
                    let is_right = |(index, it): (usize, &f32)| *it == expected(index) / count.max(1) as f32;
                    let what = format!("{divisor:?}, {name}, ranks {present:b}");
                    assert!(averaged.result.iter().enumerate().all(is_right), "{what}");
                    assert_eq!(averaged.contributors, present, "{what}");
                    assert_eq!(averaged.traffic, summed.traffic, "{what}: the divisor costs no pass");
                }
                Ok(summed.traffic)
            });
            traffic.collect::<Result<Vec<Traffic>, CollectiveError>>()
        },
    );
    let all: Vec<Vec<Traffic>> = all.into_iter().collect::<Result<_, _>>().ok()?;
    let sum = |left: Traffic, right: &Traffic| Traffic {
        own: left.own + right.own,
        peers: left.peers + right.peers,
        put: left.put + right.put,
    };
    let total = |present: usize| all.iter().map(|rank| &rank[present]).fold(Traffic::default(), sum);
    Some((0..1 << ranks).map(total).collect())
}

#[test]
fn an_absent_input_is_not_read_where_peers_map() {
    for ranks in [2, 3, 4] {
        // Each rank reads its block of every input, and nothing else is read.
        let found = traffic(Fabric::Shm, ranks, "direct").expect("any number of ranks");
        let block = (BLOCK * size_of::<f32>()) as u64;
        for (moved, present) in found.iter().zip(0u32..).skip(1) {
            let given = u64::from(present.count_ones()) * block * u64::from(ranks);
            assert_eq!((moved.own + moved.peers, moved.put), (given, 0), "{present:b} of {ranks}");
        }
        assert_eq!(found[0].peers, 0, "nobody gave anything");
    }
}

#[test]
fn an_absent_input_is_not_put_where_bytes_move() {
    for ranks in [2, 3] {
        // Each rank puts its part of every block to the block's owner, who puts the result to all.
        let found = traffic(Fabric::Tcp, ranks, "direct").expect("any number of ranks");
        let block = (BLOCK * size_of::<f32>()) as u64;
        let results = block * u64::from(ranks * (ranks - 1));
        for (moved, present) in found.iter().zip(0u32..) {
            let given = u64::from(present.count_ones() * (ranks - 1)) * block;
            assert_eq!(moved.put, given + results, "{present:b} of {ranks}");
        }
    }
}

#[test]
fn no_algorithm_moves_more_for_absent_ranks_than_for_present_ones() {
    for (fabric, ranks, grid) in
        [(Fabric::Shm, 4, "2x2"), (Fabric::Tcp, 4, "2x2"), (Fabric::Hybrid, 4, "2x2")]
    {
        for name in names(grid) {
            let Some(found) = traffic(fabric, ranks, &name) else { continue };
            let bytes = |moved: &Traffic| moved.own + moved.peers + moved.put;
            let all = &found[found.len() - 1];
            for (moved, present) in found.iter().zip(0u32..) {
                let what = format!("{fabric:?}, {name}, {present:b}: {moved:?}, of all {all:?}");
                assert!(moved.put <= all.put && bytes(moved) <= bytes(all), "{what}");
                assert!(bytes(moved) < bytes(all) || present == 0b1111, "{what}");
            }
        }
    }
}
