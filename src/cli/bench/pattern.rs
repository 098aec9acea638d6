//! What ranks give, and what they must get: small whole numbers, so that every result is exact in
//! every element type.
//!
//! A rank's input repeats a table of [`PERIOD`] elements, and iterations begin at different places
//! of it; the result repeats a table too, which is computed here from those of all ranks, one
//! number at a time. The period is prime, so that a block in the wrong place, of another iteration
//! or of another rank is seen.

use std::borrow::Cow;

use pleach::collectives::{bf16, f16};
use pleach::{Collective, DataType, F8E4M3, F8E5M2, Rank, ReduceOp};

use super::{SAMPLE_ITERATIONS_MAX, Task};

/// The period of the inputs, in elements.
const PERIOD: usize = 1009;

/// How far the next iteration begins in the table.
const ITERATION_STRIDE: usize = 17;

/// How far the next rank's table is shifted.
const RANK_STRIDE: usize = 31;

/// Most ranks that give more than the neutral element at a place: of a sum (each at most 3, so at
/// most 192 together; fewer where a type cannot count so far) and of a product (each at most 2).
const SUMMANDS_MAX: usize = 64;
const FACTORS_MAX: usize = 6;

/// Most ranks whose results can be checked exactly.
pub(super) fn ranks_max(data_type: DataType, op: ReduceOp) -> u32 {
    match (op, data_type) {
        (ReduceOp::Avg, DataType::Bf16) => 256,
        (ReduceOp::Avg, DataType::F16 | DataType::I16 | DataType::U16) => 2048,
        (ReduceOp::Avg, DataType::U8 | DataType::I8 | DataType::F8E4M3 | DataType::F8E5M2) => {
            exact_max(data_type)
        }
        _ => u32::MAX,
    }
}

/// How far a type counts without leaving out a number, up to a byte.
fn exact_max(data_type: DataType) -> u32 {
    match data_type {
        DataType::F8E5M2 => 8,
        DataType::F8E4M3 => 16,
        DataType::I8 => 127,
        _ => 255,
    }
}

/// Bits of the largest sum of one iteration.
const SUM_BITS: u32 = 8;

/// The largest number of iterations of a collective on the same memory with an exact result. Each
/// iteration works on the result of the iteration before, so sums in place grow.
pub(super) fn repetitions_max(task: &Task) -> usize {
    let Task { collective, op, data_type, ranks, .. } = *task;
    match (collective, op) {
        (Collective::AllReduce | Collective::Reduce { .. }, ReduceOp::Min | ReduceOp::Max) => {
            SAMPLE_ITERATIONS_MAX
        }
        (Collective::AllReduce, ReduceOp::Sum) => {
            let growth = ranks.next_power_of_two().ilog2();
            // A sum of 2^k ranks grows by its exponent alone.
            let (digits, exponent) = match data_type {
                DataType::F32 => (24, 127),
                DataType::F64 => (53, 1023),
                DataType::F16 => (11, 15),
                DataType::Bf16 => (8, 127),
                DataType::I32 | DataType::U32 => (31, 31),
                DataType::I16 | DataType::U16 => (15, 15),
                DataType::I64 | DataType::U64 => (53, 53),
                _ => (SUM_BITS, SUM_BITS),
            };
            let bits: u32 = if ranks.is_power_of_two() { exponent } else { digits };
            let times =
                (bits - SUM_BITS).checked_div(growth).map_or(SAMPLE_ITERATIONS_MAX, |times| times as usize);
            (1 + times).min(SAMPLE_ITERATIONS_MAX)
        }
        (Collective::Reduce { .. }, ReduceOp::Sum) => match data_type {
            DataType::F32 | DataType::F64 | DataType::I32 | DataType::I64 | DataType::U32 | DataType::U64 => {
                SAMPLE_ITERATIONS_MAX
            }
            _ => 1,
        },
        (Collective::AllReduce | Collective::Reduce { .. }, _) => 1,
        _ => SAMPLE_ITERATIONS_MAX,
    }
}

/// Tables of one task, as bytes.
pub(super) struct Pattern {
    collective: Collective,
    data_type: DataType,
    op: ReduceOp,
    ranks: u32,
    element: usize,
    /// By rank.
    inputs: Vec<Vec<u8>>,
    /// The contributions of the root of a reduction, as numbers.
    root: Vec<u8>,
    /// The result, as numbers.
    numbers: Vec<u8>,
    reduced: Vec<u8>,
}

impl Pattern {
    pub(super) fn new(task: &Task) -> Self {
        let Task { collective, data_type, op, ranks, .. } = *task;
        let numbers: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| {
                let give = |place| match collective.reduces() {
                    true => contribution(op, exact_max(data_type), rank, ranks, place),
                    false => mixed(place + rank as usize * RANK_STRIDE) % 251,
                };
                (0..PERIOD).map(|place| give(place) as u8).collect()
            })
            .collect();
        let result = |place: usize| {
            let all = numbers.iter().map(|table| u32::from(table[place]));
            match op {
                ReduceOp::Prod => all.product(),
                ReduceOp::Min => all.min().unwrap_or_default(),
                ReduceOp::Max => all.max().unwrap_or_default(),
                ReduceOp::Avg => all.sum::<u32>() / ranks,
                ReduceOp::And => all.fold(u32::MAX, |measure_size, other| measure_size & other),
                ReduceOp::Or => all.fold(0, |measure_size, other| measure_size | other),
                ReduceOp::Xor => all.fold(0, |measure_size, other| measure_size ^ other),
                _ => all.sum::<u32>(),
            }
        };
        let reduced: Vec<u8> = match collective.reduces() {
            true => (0..PERIOD).map(|place| result(place) as u8).collect(),
            false => Vec::new(),
        };
        let encode =
            |table: &Vec<u8>| table.iter().flat_map(|&number| encode(data_type, number.into())).collect();
        let root = match collective {
            Collective::Reduce { root } => numbers[root as usize].clone(),
            _ => Vec::new(),
        };
        Self {
            collective,
            data_type,
            op,
            ranks,
            element: data_type.bytes(),
            inputs: numbers.iter().map(encode).collect(),
            root,
            reduced: encode(&reduced),
            numbers: reduced,
        }
    }

    /// Writes what `rank` gives in an iteration.
    pub(super) fn fill(&self, rank: Rank, iteration: usize, input: &mut [u8]) {
        let table = &self.inputs[rank as usize];
        for (part, place) in pieces(input.len(), self.element, iteration * ITERATION_STRIDE) {
            let len = part.len();
            input[part].copy_from_slice(&table[place..place + len]);
        }
    }

    /// The number of wrong elements of `rank` after `times` iterations on the same memory,
    /// at most [`repetitions_max`]; `output` is the output of `rank`, or its input where
    /// it has none, which must be as it was.
    pub(super) fn count_errors(&self, rank: Rank, iteration: usize, times: usize, output: &[u8]) -> u64 {
        let begin = iteration * ITERATION_STRIDE;
        let own = &self.inputs[rank as usize];
        match self.collective {
            Collective::AllReduce => self.differing(output, &self.reduced_again(times), begin),
            Collective::Reduce { root } if rank == root => {
                self.differing(output, &self.reduced_again(times), begin)
            }
            Collective::ReduceScatter => {
                let first = rank as usize * (output.len() / self.element);
                self.differing(output, &self.reduced, begin + first)
            }
            Collective::Broadcast { root: from } => {
                self.differing(output, &self.inputs[from as usize], begin)
            }
            Collective::SendRecv { from, to } if rank == to => {
                self.differing(output, &self.inputs[from as usize], begin)
            }
            Collective::AllGather if !output.is_empty() => self.gathered(output, begin),
            Collective::Gather { root } if rank == root && !output.is_empty() => self.gathered(output, begin),
            Collective::Scatter { root } => {
                let first = rank as usize * (output.len() / self.element);
                self.differing(output, &self.inputs[root as usize], begin + first)
            }
            Collective::AllToAll if !output.is_empty() => {
                let block = output.len() / self.ranks as usize;
                self.gathered(output, begin + rank as usize * (block / self.element))
            }
            _ => self.differing(output, own, begin),
        }
    }

    /// The table of in-place results after `times` iterations.
    fn reduced_again(&self, times: usize) -> Cow<'_, [u8]> {
        if times == 1 || self.op != ReduceOp::Sum {
            return Cow::Borrowed(&self.reduced);
        }
        let growth = f64::from(self.ranks).powi(times as i32 - 1);
        let again = (times - 1) as f64;
        let numbers = self.numbers.iter().map(|sum| f64::from(*sum)).zip(0..);
        let grown = numbers.map(|(sum, place): (f64, usize)| match self.root.get(place) {
            // The others of a reduce give the same again.
            Some(own) => sum + again * (sum - f64::from(*own)),
            None => sum * growth,
        });
        grown.flat_map(|number| encode(self.data_type, number)).collect()
    }

    /// Elements of a block of each rank, in rank order, that are not as from there on in its table.
    fn gathered(&self, found: &[u8], begin: usize) -> u64 {
        let blocks = found.chunks_exact(found.len() / self.ranks as usize);
        blocks.zip(&self.inputs).map(|(block, table)| self.differing(block, table, begin)).sum()
    }

    fn differing(&self, found: &[u8], table: &[u8], begin: usize) -> u64 {
        let mut count = 0;
        for (part, place) in pieces(found.len(), self.element, begin) {
            let (found, expected) = (&found[part.clone()], &table[place..place + part.len()]);
            if found != expected {
                let pairs = found.chunks_exact(self.element).zip(expected.chunks_exact(self.element));
                count += pairs.filter(|(found, expected)| found != expected).count() as u64;
            }
        }
        count
    }
}

/// Cuts `len` bytes into ranges that lie together in a table, each with where it begins there.
fn pieces(len: usize, element: usize, begin: usize) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> {
    let end = PERIOD * element;
    let (mut at, mut place) = (0, begin % PERIOD * element);
    std::iter::from_fn(move || {
        let bytes = (len - at).min(end - place);
        let piece = (at..at + bytes, place);
        (at, place) = (at + bytes, 0);
        (bytes > 0).then_some(piece)
    })
}

/// What a rank gives at a place of the period, in a type that counts so far.
fn contribution(op: ReduceOp, exact_max: u32, rank: Rank, ranks: u32, place: usize) -> u32 {
    let (rank, ranks) = (rank as usize, ranks as usize);
    let number = mixed(place + rank * RANK_STRIDE);
    // With many ranks every so-many-th gives something, others at another place.
    let is_turn = |most: usize| (place + rank).is_multiple_of(ranks.div_ceil(most));
    match op {
        ReduceOp::Sum if is_turn(SUMMANDS_MAX.min(exact_max as usize / 3)) => number % 4,
        ReduceOp::Sum => 0,
        ReduceOp::Prod if is_turn(FACTORS_MAX) => 1 + number % 2,
        ReduceOp::Prod => 1,
        // Divides evenly only if every rank's share is in it once.
        ReduceOp::Avg => mixed(place) % (exact_max / ranks as u32).clamp(2, 4),
        _ => number % exact_max.min(251),
    }
}

/// A number that looks random.
fn mixed(place: usize) -> u32 {
    let mut bits = (place as u32).wrapping_add(1).wrapping_mul(0x9e37_79b1);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x85eb_ca77);
    bits ^ bits >> 13
}

/// An element of a number that the type holds exactly.
fn encode(data_type: DataType, number: f64) -> Vec<u8> {
    match data_type {
        DataType::F32 => (number as f32).to_ne_bytes().to_vec(),
        DataType::F64 => number.to_ne_bytes().to_vec(),
        DataType::F16 => f16::from_f64(number).to_ne_bytes().to_vec(),
        DataType::Bf16 => bf16::from_f64(number).to_ne_bytes().to_vec(),
        DataType::I32 => (number as i32).to_ne_bytes().to_vec(),
        DataType::I64 => (number as i64).to_ne_bytes().to_vec(),
        DataType::U32 => (number as u32).to_ne_bytes().to_vec(),
        DataType::U64 => (number as u64).to_ne_bytes().to_vec(),
        DataType::I16 => (number as i16).to_ne_bytes().to_vec(),
        DataType::U16 => (number as u16).to_ne_bytes().to_vec(),
        DataType::F8E4M3 => vec![F8E4M3::from_f32(number as f32).to_bits()],
        DataType::F8E5M2 => vec![F8E5M2::from_f32(number as f32).to_bits()],
        _ => vec![number as u8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::MemoryKind;

    fn task(collective: Collective, op: ReduceOp, data_type: DataType, ranks: u32) -> Task {
        Task {
            collective,
            data_type,
            op,
            ranks,
            variant: None,
            warmup: None,
            iterations: None,
            time: None,
            memory: MemoryKind::Registered,
            reproducible: pleach::Reproducible::No,
            reuse: false,
        }
    }

    #[test]
    fn sums_of_any_number_of_ranks_are_exact_in_the_narrowest_types() {
        for most in DataType::ALL.map(exact_max) {
            for ranks in [1, 2, 7, 64, 65, 1000] {
                for place in 0..PERIOD {
                    let all = (0..ranks).map(|rank| contribution(ReduceOp::Sum, most, rank, ranks, place));
                    assert!(all.sum::<u32>() <= most);
                    // Powers of two, which every type holds.
                    let all = (0..ranks).map(|rank| contribution(ReduceOp::Prod, most, rank, ranks, place));
                    assert!(all.product::<u32>() <= 64);
                }
            }
            for ranks in [1, 2, 7, 64, 85, 127, 255].into_iter().filter(|&ranks| ranks <= most) {
                let highest =
                    (0..PERIOD).map(|place| contribution(ReduceOp::Avg, most, 0, ranks, place)).max();
                let sum = highest.map_or(0, |highest| highest * ranks);
                assert!(sum > 0 && sum <= most, "{ranks} {highest:?}");
            }
        }
    }

    #[test]
    fn a_missing_share_a_shifted_block_and_another_iteration_are_seen() {
        let task = task(Collective::AllReduce, ReduceOp::Sum, DataType::F32, 2);
        let pattern = Pattern::new(&task);
        let mut right = vec![0; 4000];
        for (part, place) in pieces(right.len(), 4, ITERATION_STRIDE) {
            let len = part.len();
            right[part].copy_from_slice(&pattern.reduced[place..place + len]);
        }
        assert_eq!(pattern.count_errors(0, 1, 1, &right), 0);
        assert!(pattern.count_errors(0, 2, 1, &right) > 500);
        let mut own = vec![0; 4000];
        pattern.fill(0, 1, &mut own);
        assert!(pattern.count_errors(0, 1, 1, &own) > 500);
        right.rotate_left(256);
        assert!(pattern.count_errors(0, 1, 1, &right) > 500);
        right.rotate_right(256);
        right[8] ^= 1;
        assert_eq!(pattern.count_errors(1, 1, 1, &right), 1);
    }

    /// Does it to one element of each rank, in f64 rounded to the type, as often as
    /// [`repetitions_max`] allows.
    #[test]
    fn what_is_done_again_on_the_same_memory_is_exact_and_each_time_counts() {
        let collectives = [Collective::AllReduce, Collective::Reduce { root: 1 }];
        for (collective, ranks) in
            collectives.iter().flat_map(|measure_size| [2, 3, 4, 6].map(|ranks| (*measure_size, ranks)))
        {
            for data_type in [
                DataType::F32,
                DataType::F64,
                DataType::F16,
                DataType::Bf16,
                DataType::I32,
                DataType::I64,
                DataType::U8,
            ] {
                let task = task(collective, ReduceOp::Sum, data_type, ranks);
                let (pattern, times) = (Pattern::new(&task), repetitions_max(&task));
                let decode =
                    |bytes: &[u8]| (0..PERIOD).find(|place| bytes == &encode(data_type, *place as f64)[..]);
                let mut values: Vec<f64> = (pattern.inputs.iter())
                    .map(|table| decode(&table[..data_type.bytes()]).expect("a small number") as f64)
                    .collect();
                for time in 1..=times {
                    let sum: f64 = values.iter().sum();
                    match collective {
                        Collective::Reduce { root } => values[root as usize] = sum,
                        _ => values.fill(sum),
                    }
                    let found = encode(data_type, sum);
                    let at_0 = |times| pattern.differing(&found, &pattern.reduced_again(times), 0);
                    assert_eq!(at_0(time), 0, "{collective} {ranks} {data_type} {time} of {times}");
                    assert!(
                        sum == 0.0 || time == 1 || at_0(time - 1) == 1,
                        "{collective} {ranks} {data_type}"
                    );
                }
            }
        }
    }
}
