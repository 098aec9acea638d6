//! Every schedule with every subset of the ranks absent: a rank that gives the neutral element
//! changes no bit of the result of the others.

use pleach_schedule::Algorithm;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::neutral;
use crate::{CollectiveError, Element, Group, ranks};

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
        let ranks = group.world_size();
        let absent: T = bytemuck::pod_read_unaligned(&neutral(T::DATA_TYPE, self.op));
        for present in 1u32..1 << ranks {
            let is_present = |rank: &Rank| present >> rank & 1 == 1;
            let own = |index| {
                if is_present(&group.rank()) { (self.value)(group.rank(), index) } else { absent }
            };
            let mut data: Vec<T> = (0..LEN).map(own).collect();
            group.all_reduce(&mut data, self.op)?;
            let expected = |index| {
                let values = (0..ranks).filter(is_present).map(|rank| (self.value)(rank, index));
                values.reduce(self.combine).expect("some rank is present")
            };
            let expected: Vec<T> = (0..LEN).map(expected).collect();
            let bytes = bytemuck::cast_slice::<T, u8>;
            assert!(bytes(&data) == bytes(&expected), "{name}, {}, ranks {present:b} of {ranks}", self.op);
        }
        Ok(())
    }
}

/// All cases by this algorithm.
fn check_all(group: &Group, name: &str) -> Result<(), CollectiveError> {
    let group = group.with_variant(Algorithm::named(name, Collective::AllReduce).expect("there is one"));
    // Sums and products of a few bits, which are not rounded in any order; zeros are negative.
    let small = |rank: Rank, index: usize| if index.is_multiple_of(5) { -0.0 } else { rank as f32 - 2.5 };
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
    let bits = |rank: Rank, index: usize| (0x5a ^ (rank as usize * 31 + index)) as u8;
    Case { op: ReduceOp::And, value: bits, combine: |left, right| left & right }.check(&group, name)?;
    Case { op: ReduceOp::Or, value: bits, combine: |left, right| left | right }.check(&group, name)?;
    Case { op: ReduceOp::Xor, value: bits, combine: |left, right| left ^ right }.check(&group, name)
}

#[test]
fn an_absent_rank_changes_no_bit_whatever_the_schedule() {
    for (ranks, grid) in [(2, "1x2"), (3, "1x3"), (4, "2x2"), (5, "1x5"), (8, "2x4")] {
        let grids = ["grid", "grid-staged", "hierarchical"].map(|family| format!("{family}:{grid}"));
        let plain = Algorithm::names(Collective::AllReduce).iter().filter(|name| !name.contains(':'));
        let names: Vec<String> = plain.map(|name| (*name).to_owned()).chain(grids).collect();
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
