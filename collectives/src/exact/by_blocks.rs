//! The single steps of an exact sum, for elements whose type is known only at run time. A round of
//! a partial all-reduce carries out these steps one by one.
//!
//! **Invariant:** the result depends on the numbers alone. It does not depend on the distribution
//! of the numbers over inputs and ranks, on absent inputs, or on a thread's treatment of subnormal
//! numbers.

use half::{bf16, f16};
use pleach_vocabulary::DataType;

use super::elements::Elements;
use super::rounding::Float;
use super::{BLOCK_ELEMENTS, BlockWindow, DIGIT_BITS, FACTS, NO_PLACE, facts_of};
use crate::compute::{DefaultEnvironment, F8E4M3, F8E5M2};
use crate::engine::Bytes;

/// The exact sum of a number of elements; see the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSums {
    data_type: DataType,
    elements: usize,
}

/// A block of elements, and the facts of its numbers on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    /// The number of the block, from 0.
    pub(crate) number: usize,
    /// The facts of all blocks.
    pub(crate) facts: &'a [i32],
    /// The divisor of the sum, at least 1.
    pub(crate) divide_by: u32,
}

/// Calls a function for the type of the elements.
macro_rules! by_type {
    ($data_type:expr, $function:ident($($argument:expr),*)) => {
        match $data_type {
            DataType::F64 => $function::<f64>($($argument),*),
            DataType::F32 => $function::<f32>($($argument),*),
            DataType::F16 => $function::<f16>($($argument),*),
            DataType::Bf16 => $function::<bf16>($($argument),*),
            DataType::F8E4M3 => $function::<F8E4M3>($($argument),*),
            DataType::F8E5M2 => $function::<F8E5M2>($($argument),*),
            integer => unreachable!("{integer} is exact as it is"),
        }
    };
}

impl BlockSums {
    /// The sum of `elements` floats of this type.
    pub(crate) fn new(data_type: DataType, elements: usize) -> Self {
        assert!(data_type.is_float(), "integers are exact as they are");
        Self { data_type, elements }
    }

    /// The number of blocks.
    pub(crate) fn blocks(self) -> usize {
        self.elements.div_ceil(BLOCK_ELEMENTS)
    }

    fn range(self, block: usize) -> std::ops::Range<usize> {
        let start = block * BLOCK_ELEMENTS;
        start..self.elements.min(start + BLOCK_ELEMENTS)
    }

    /// The facts of an input without numbers.
    pub(crate) fn facts_of_nothing(self) -> Vec<i32> {
        [NO_PLACE, NO_PLACE, 0].repeat(self.blocks())
    }

    /// The facts of the numbers of an input. Facts of several inputs are combined by maximum.
    pub(crate) fn facts(self, input: &Bytes) -> Vec<i32> {
        fn facts<T: Float>(sums: BlockSums, input: &Bytes) -> Vec<i32> {
            let input = Elements::<T>::of(input);
            (0..sums.blocks()).flat_map(|block| facts_of(input.iter(sums.range(block)))).collect()
        }
        let _environment = DefaultEnvironment::enter();
        let facts: Vec<i32> = by_type!(self.data_type, facts(self, input));
        debug_assert_eq!(facts.len(), FACTS * self.blocks());
        facts
    }

    /// The number of words to which a block is expanded.
    pub(crate) fn words(self, block: Block<'_>) -> usize {
        self.window(block).words(self.range(block.number).len())
    }

    /// All numbers of words to which a block can be expanded.
    pub(crate) fn possible_words(self) -> Vec<usize> {
        fn places<T: Float>() -> u32 {
            // The places from the lowest bit to the highest bit of a finite number.
            let largest = (0..1100).rev().find(|&top| T::from_value(2f64.powi(top)).value().is_finite());
            (largest.unwrap_or(0) + 1 - T::LOWEST) as u32
        }
        let places = by_type!(self.data_type, places());
        // One row for each digit, and one for the counts.
        let rows = places.div_ceil(DIGIT_BITS) as usize + 1;
        let lengths = [0, self.blocks().saturating_sub(1)].map(|block| self.range(block).len());
        let mut possible: Vec<usize> =
            lengths.iter().flat_map(|length| (1..=rows).map(move |row| row * length)).collect();
        possible.sort_unstable();
        possible.dedup();
        possible.retain(|words| *words > 0);
        possible
    }

    /// Stores the digits of the sum of these inputs.
    pub(crate) fn expand(self, block: Block<'_>, inputs: &[&Bytes], words: &mut [i64]) {
        fn expand<T: Float>(sums: BlockSums, block: Block<'_>, inputs: &[&Bytes], words: &mut [i64]) {
            let (window, range) = (sums.window(block), sums.range(block.number));
            let [first, others @ ..] = inputs else { return words.fill(0) };
            window.expand(Elements::<T>::of(first).iter(range.clone()), words);
            let mut more = vec![0; if others.is_empty() { 0 } else { words.len() }];
            for input in others {
                window.expand(Elements::<T>::of(input).iter(range.clone()), &mut more);
                words.iter_mut().zip(&more).for_each(|(word, more)| *word += more);
            }
        }
        let _environment = DefaultEnvironment::enter();
        by_type!(self.data_type, expand(self, block, inputs, words))
    }

    /// Stores the sum of a block, divided and then rounded once.
    pub(crate) fn round(self, block: Block<'_>, words: &[i64], result: &Bytes) {
        fn round<T: Float>(sums: BlockSums, block: Block<'_>, words: &[i64], result: &Bytes) {
            let (result, range) = (Elements::<T>::of(result), sums.range(block.number));
            let store = |index, number| result.set(range.start + index, number);
            sums.window(block).round(words, range.len(), store);
        }
        let _environment = DefaultEnvironment::enter();
        by_type!(self.data_type, round(self, block, words, result))
    }

    fn window(self, Block { number, facts, divide_by }: Block<'_>) -> BlockWindow {
        fn window<T: Float>(facts: &[i32], divide_by: u32) -> BlockWindow {
            BlockWindow::new::<T>(facts, divide_by)
        }
        by_type!(self.data_type, window(&facts[FACTS * number..FACTS * (number + 1)], divide_by))
    }
}
