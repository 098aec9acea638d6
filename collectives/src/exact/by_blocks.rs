//! The steps of an exact sum, one by one, for elements whose type is known when the program runs: a
//! round of a partial all-reduce carries them out between other things.
//!
//! **Invariant:** the result depends on the numbers alone: how they are shared between inputs and
//! ranks changes nothing, nor do inputs that are not there, nor what a thread does with subnormal
//! numbers.

use half::{bf16, f16};
use pleach_vocabulary::DataType;

use super::elements::Elements;
use super::rounding::Float;
use super::{BLOCK_ELEMENTS, BlockWindow, DIGIT_BITS, FACTS, NO_PLACE, facts_of};
use crate::compute::{DefaultEnvironment, F8E4M3, F8E5M2};
use crate::engine::Bytes;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSums {
    data_type: DataType,
    elements: usize,
}

/// A block of elements, and what its numbers are like on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    /// Its number, from 0.
    pub(crate) number: usize,
    /// The facts of all blocks.
    pub(crate) facts: &'a [i32],
    /// By what the sum is divided, at least 1.
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
    /// For so many floats of this type.
    pub(crate) fn new(data_type: DataType, elements: usize) -> Self {
        assert!(data_type.is_float(), "integers are exact as they are");
        Self { data_type, elements }
    }

    /// How many blocks there are.
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

    /// How many words a block becomes.
    pub(crate) fn words(self, block: Block<'_>) -> usize {
        self.window(block).words(self.range(block.number).len())
    }

    /// Every number of words that a block can become.
    pub(crate) fn possible_words(self) -> Vec<usize> {
        fn places<T: Float>() -> u32 {
            // From the lowest bit to the highest that a finite number has.
            let largest = (0..1100).rev().find(|&top| T::from_value(2f64.powi(top)).value().is_finite());
            (largest.unwrap_or(0) + 1 - T::LOWEST) as u32
        }
        let places = by_type!(self.data_type, places());
        // Each digit, and the counts.
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

    /// Stores the block's sum, rounded once after it was divided.
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
