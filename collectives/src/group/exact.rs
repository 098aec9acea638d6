//! Exact operations of a group: what [`crate::exact`] computes, carried out by integer collectives.

use std::iter::Copied;
use std::ops::Range;
use std::slice::Iter;
use std::sync::Mutex;

use half::{bf16, f16};
use pleach_transport::mutex::lock;
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::{Collective, DataType, ReduceOp};

use super::bound::BoundCall;
use super::{Buffer, CollectiveError, Group};
use crate::call::{Amount, Counts};
use crate::compute::{DefaultEnvironment, F8E4M3, F8E5M2};
use crate::exact::{BLOCK_ELEMENTS, BlockWindow, Elements, FACTS, Float, facts_of, facts_of_sum};

/// Carries exact operations out. Keeps the memory that they work in.
#[derive(Debug, Default)]
pub(crate) struct Exact {
    /// Given back after each call; one for each thread that was in one.
    words: Mutex<Vec<Buffer<i64>>>,
}

impl Exact {
    /// Stores the exact sum or average of all ranks' inputs, or this rank's part of it, where the
    /// call wants it.
    pub(super) fn carry_out(&self, group: &Group, call: &BoundCall) -> Result<(), CollectiveError> {
        let group = &of_call(group, call);
        match call.data_type {
            DataType::F64 => self.reduce::<f64>(group, call),
            DataType::F32 => self.reduce::<f32>(group, call),
            DataType::F16 => self.reduce::<f16>(group, call),
            DataType::Bf16 => self.reduce::<bf16>(group, call),
            DataType::F8E4M3 => self.reduce::<F8E4M3>(group, call),
            DataType::F8E5M2 => self.reduce::<F8E5M2>(group, call),
            integer => unreachable!("{integer} is exact as it is"),
        }
    }

    fn reduce<T: Float>(&self, group: &Group, call: &BoundCall) -> Result<(), CollectiveError> {
        let (input, output) = (Elements::<T>::of(&call.input), Elements::<T>::of(&call.output));
        let rank = group.rank() as usize;
        let first = match (call.collective, &call.counts) {
            (Collective::ReduceScatter, Counts::Listed(list)) => list.iter().take(rank).sum(),
            (Collective::ReduceScatter, _) => rank * output.len(),
            _ => 0,
        };
        let read = |block: Range<usize>| input.iter(block);
        // A block is read before its result is stored, so in place the input is there still.
        let store = |at: usize, number| {
            if let Some(at) = at.checked_sub(first) {
                output.set(at, number);
            }
        };
        self.run(group, input.len(), call.op, &[read], store)
    }

    /// Stores the sum of all contributions of all ranks.
    pub(crate) fn sum_of_many(
        &self,
        group: &Group,
        contributions: &[&[f32]],
        output: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let _environment = DefaultEnvironment::enter();
        let (op, data_type, elements) = (ReduceOp::Sum, DataType::F32, output.len());
        let group = &marked(group, [MANY, data_type as u64, op.code(), elements as u64]);
        let read: Vec<_> = contributions.iter().map(|contribution| reading(contribution)).collect();
        self.run(group, elements, op, &read, |at, number| output[at] = number)
    }

    /// Calls `store` with every element of the result; each of `read` gives those of one
    /// contribution of this rank, each before the result is stored there.
    fn run<T: Float, I: ExactSizeIterator<Item = T>>(
        &self,
        group: &Group,
        elements: usize,
        op: ReduceOp,
        read: &[impl Fn(Range<usize>) -> I],
        mut store: impl FnMut(usize, T),
    ) -> Result<(), CollectiveError> {
        let blocks = || (0..elements).step_by(BLOCK_ELEMENTS).map(|at| at..elements.min(at + BLOCK_ELEMENTS));
        let own = |block: Range<usize>| facts_of_sum(read.iter().map(|read| facts_of(read(block.clone()))));
        let mut facts: Vec<i32> = blocks().flat_map(own).collect();
        group.all_reduce(&mut facts, ReduceOp::Max)?;
        let divide_by = if op == ReduceOp::Avg { group.contributors() } else { 1 };
        let shapes =
            || facts.chunks_exact(FACTS).map(|facts| BlockWindow::new::<T>(facts, divide_by)).zip(blocks());
        let mut words =
            self.take(group, shapes().map(|(shape, block)| shape.words(block.len())).max().unwrap_or(0))?;
        let mut done = Ok(());
        for (shape, block) in shapes() {
            let used = shape.words(block.len());
            let contributions = read.iter().map(|read| read(block.clone()));
            shape.expand_sum(contributions, block.len(), &mut words[..used]);
            done = if used == 0 { Ok(()) } else { group.all_reduce_first(&mut words, used) };
            if done.is_err() {
                break;
            }
            shape.round(&words[..used], block.len(), |index, number| store(block.start + index, number));
        }
        self.lock().push(words);
        done
    }

    /// A buffer of at least `words`.
    fn take(&self, group: &Group, words: usize) -> Result<Buffer<i64>, CollectiveError> {
        let found = self.lock().pop().filter(|buffer| buffer.len() >= words);
        found.map_or_else(|| group.buffer(words), Ok)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Buffer<i64>>> {
        lock(&self.words)
    }
}

/// Gives the elements of a block.
fn reading<'a>(contribution: &'a [f32]) -> impl Fn(Range<usize>) -> Copied<Iter<'a, f32>> {
    move |block| contribution[block].iter().copied()
}

/// In the place of a collective: sums of several contributions.
const MANY: u64 = u64::MAX;

/// The group of a call's integer collectives.
fn of_call(group: &Group, call: &BoundCall) -> Group {
    let kind = match call.collective {
        Collective::Reduce { root } => 2 + u64::from(root),
        Collective::ReduceScatter => 1,
        _ => 0,
    };
    let amount = match call.counts.amount() {
        Amount::Listed { all, digest } => all ^ u64::from(digest) << 32,
        _ => (call.input.len() / call.data_type.bytes()) as u64,
    };
    marked(group, [kind, call.data_type as u64, call.op.code(), amount])
}

/// The group with a tag that tells this call from others: the integer collectives of different
/// calls may look the same.
fn marked(group: &Group, words: [u64; 4]) -> Group {
    group.tagged_further(words.into_iter().fold(0, chain) as u32)
}
