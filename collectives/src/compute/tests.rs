//! Every kernel against the oracle, bit for bit.

use pleach_transport::Nanos;
use pleach_vocabulary::random::Random;
use pleach_vocabulary::{DataType, ReduceOp};
use proptest::prelude::*;

use super::{Compute, F8E4M3, F8E5M2, HostCompute, Instructions, Job, SLICE_BYTES, oracle};
use crate::partial::neutral;

/// The places of the destinations.
#[derive(Clone, Copy, Debug)]
enum Destinations {
    /// This many destinations, all apart from the sources.
    Apart(usize),
    /// One destination that is this source, and this many destinations apart from the sources.
    Source(usize, usize),
    /// Two destinations: the first and the last source.
    FirstAndLast,
}

/// A reduction to test.
#[derive(Clone, Copy, Debug)]
struct Case {
    data_type: DataType,
    op: ReduceOp,
    divide_by: u32,
    sources: usize,
    destinations: Destinations,
    elements: usize,
    /// The offset that is added to every address, so that no address is aligned.
    misaligned_by: usize,
    seed: u64,
}

/// Bytes before and after each buffer that must stay as they are.
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xa5;

/// Random numbers. A quarter of them are special: zeros of both signs, infinities, NaN, subnormal,
/// largest and smallest numbers.
fn numbers(data_type: DataType, elements: usize, random: &mut Random) -> Vec<u8> {
    let special: [u64; 8] = match data_type {
        DataType::F64 => [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 5e-324, f64::MAX, f64::MIN]
            .map(f64::to_bits),
        DataType::F32 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45, f32::MAX, f32::MIN]
            .map(|v| v.to_bits().into()),
        DataType::F16 => [0, 0x8000, 0x7c00, 0xfc00, 0x7d01, 1, 0x7bff, 0xfbff],
        DataType::Bf16 => [0, 0x8000, 0x7f80, 0xff80, 0x7f81, 1, 0x7f7f, 0xff7f],
        DataType::F8E4M3 => [0, 0x80, 0x7f, 0xff, 0x7e, 1, 0xfe, 0x81],
        DataType::F8E5M2 => [0, 0x80, 0x7c, 0xfc, 0x7d, 1, 0x7b, 0xfb],
        _ => [0, 1, u64::MAX, i32::MAX as u64, 1 << 31, 1 << 63, i64::MAX as u64, 0x80],
    };
    let mut bytes = Vec::with_capacity(elements * data_type.bytes());
    for _ in 0..elements {
        let draw = random.bits();
        let bits = if draw.is_multiple_of(4) {
            special[(draw >> 8) as usize % 8]
        } else {
            // The exponents are near each other, so that sums are rounded.
            let small =
                1.0 + (draw >> 11) as f64 / (1u64 << 53) as f64 - f64::from((draw >> 4) as u8 & 1) * 3.0;
            match data_type {
                DataType::F64 => small.to_bits(),
                DataType::F32 => (small as f32).to_bits().into(),
                DataType::F16 => half::f16::from_f64(small).to_bits().into(),
                DataType::Bf16 => half::bf16::from_f64(small).to_bits().into(),
                DataType::F8E4M3 => F8E4M3::from_f32(small as f32).to_bits().into(),
                DataType::F8E5M2 => F8E5M2::from_f32(small as f32).to_bits().into(),
                _ => draw,
            }
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..data_type.bytes()]);
    }
    bytes
}

/// A buffer with guards, whose content begins at a chosen misalignment.
struct Guarded {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Guarded {
    fn new(content: &[u8], misaligned_by: usize) -> Self {
        let mut bytes = vec![GUARD; content.len() + 3 * GUARD_BYTES];
        let begin = GUARD_BYTES + bytes.as_ptr().align_offset(GUARD_BYTES) + misaligned_by;
        bytes[begin..begin + content.len()].copy_from_slice(content);
        Self { bytes, begin, len: content.len() }
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.begin..self.begin + self.len]
    }

    fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.begin..].as_mut_ptr()
    }

    fn guards_stand(&self) -> bool {
        let around = self.bytes[..self.begin].iter().chain(&self.bytes[self.begin + self.len..]);
        around.into_iter().all(|&byte| byte == GUARD)
    }
}

/// Checks a case on random numbers, with every set of instructions of this processor.
fn check(case: Case) {
    let mut random = Random::new(case.seed);
    let contents: Vec<Vec<u8>> =
        (0..case.sources).map(|_| numbers(case.data_type, case.elements, &mut random)).collect();
    check_contents(case, &contents);
}

/// Checks a case on these sources, with every set of instructions of this processor.
fn check_contents(case: Case, contents: &[Vec<u8>]) {
    let slices: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    let Case { data_type, op, divide_by, .. } = case;
    let question = oracle::Question { data_type, op, divide_by, sources: &slices };
    let size = data_type.bytes();
    // The oracle takes most of the time of a test, and its answer is the same for all instructions.
    let expected: Vec<u8> =
        (0..case.elements).flat_map(|index| question.element(index).into_iter().take(size)).collect();
    for instructions in Instructions::available() {
        check_instructions(case, contents, &expected, instructions);
    }
}

fn check_instructions(case: Case, contents: &[Vec<u8>], expected: &[u8], instructions: Instructions) {
    let bytes = case.elements * case.data_type.bytes();
    let mut sources: Vec<Guarded> =
        contents.iter().map(|content| Guarded::new(content, case.misaligned_by)).collect();
    let (in_place, apart) = match case.destinations {
        Destinations::Apart(count) => (vec![], count),
        Destinations::Source(source, apart) => (vec![source % case.sources], apart),
        Destinations::FirstAndLast if case.sources == 1 => (vec![0], 0),
        Destinations::FirstAndLast => (vec![0, case.sources - 1], 0),
    };
    let mut others: Vec<Guarded> =
        (0..apart).map(|k| Guarded::new(&vec![0xee; bytes], (case.misaligned_by + k) % 64)).collect();

    let from: Vec<*mut u8> = sources.iter_mut().map(Guarded::pointer).collect();
    let into = others.iter_mut().map(Guarded::pointer).chain(in_place.iter().map(|&k| from[k])).collect();
    let mut job = Job {
        data_type: case.data_type,
        op: case.op,
        divide_by: case.divide_by,
        from: from.iter().map(|pointer| pointer.cast_const()).collect(),
        into,
        elements: case.elements,
        elements_done: 0,
        ticket: 0,
    };
    let mut compute = HostCompute::with(instructions);
    loop {
        let before = job.elements_done;
        // SAFETY: the buffers are alive, long enough, distinct, and only touched by this job.
        let done = unsafe { compute.advance(&mut job, Nanos::ZERO) };
        let touched =
            (job.elements_done - before) * case.data_type.bytes() * (job.from.len() + job.into.len());
        assert!(
            touched <= SLICE_BYTES || job.elements_done - before <= 4096,
            "{touched} bytes at once: {case:?}"
        );
        assert!(done || job.elements_done > before, "no progress: {case:?}");
        if done {
            break;
        }
    }

    assert!(sources.iter().chain(&others).all(Guarded::guards_stand), "wrote outside: {case:?}");
    for (k, source) in sources.iter().enumerate().filter(|(k, _)| !in_place.contains(k)) {
        assert!(source.content() == contents[k], "source {k} was changed: {case:?}");
    }
    let destinations =
        others.iter().map(Guarded::content).chain(in_place.iter().map(|&k| sources[k].content()));
    let size = case.data_type.bytes();
    for (which, content) in destinations.enumerate() {
        // Where bits differ, as they may in NaN, elements are compared one by one.
        if content == expected {
            continue;
        }
        for (index, (got, expected)) in content.chunks(size).zip(expected.chunks(size)).enumerate() {
            assert!(
                oracle::same(case.data_type, got, expected),
                "element {index} of destination {which} is {got:02x?}, not {expected:02x?}: {case:?}, {instructions:?}"
            );
        }
    }
}

fn every_kind(mut check: impl FnMut(DataType, ReduceOp)) {
    for data_type in DataType::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.fits(data_type)) {
            check(data_type, op);
        }
    }
}

/// Values at the ends of the ranges of exponent and mantissa, in any format, of both signs: zeros,
/// ones, subnormal numbers, the smallest normal and the largest number, infinities, and NaNs of
/// several bits.
fn specials(data_type: DataType) -> Vec<u64> {
    let (bits, mantissa) = match data_type {
        DataType::F64 => (64, 52),
        DataType::F32 => (32, 23),
        DataType::F16 => (16, 10),
        DataType::Bf16 => (16, 7),
        DataType::F8E4M3 => (8, 3),
        _ => (8, 2),
    };
    let sign = 1u64 << (bits - 1);
    let infinity = sign - (1 << mantissa);
    let one = (infinity / 2) & !((1 << mantissa) - 1);
    let quiet = infinity | 1 << (mantissa - 1);
    let smallest_normal = 1 << mantissa;
    let magnitudes = [
        0,
        1,
        smallest_normal - 1,
        smallest_normal,
        one,
        infinity - 1,
        infinity,
        infinity + 1,
        quiet,
        sign - 1,
    ];
    magnitudes.iter().flat_map(|&magnitude| [magnitude, magnitude | sign]).collect()
}

#[test]
fn zeros_infinities_nan_and_subnormal_numbers_meet_each_other_as_ieee_says() {
    for data_type in DataType::ALL.into_iter().filter(|data_type| data_type.is_float()) {
        let (specials, size) = (specials(data_type), data_type.bytes());
        let count = specials.len();
        // Combines every special number with every other one and with every third one, at every
        // place of a vector.
        let source = |place: usize| -> Vec<u8> {
            let pick = |index: usize| specials[index / count.pow(place as u32) % count];
            (0..count.pow(3)).flat_map(|index| pick(index).to_le_bytes()[..size].to_vec()).collect()
        };
        let contents: Vec<Vec<u8>> = (0..3).map(source).collect();
        for op in ReduceOp::ALL.into_iter().filter(|op| op.fits(data_type)) {
            for sources in [2, 3] {
                let case = Case {
                    data_type,
                    op,
                    divide_by: divisor(op, sources),
                    sources,
                    destinations: Destinations::Apart(1),
                    elements: count.pow(3),
                    misaligned_by: 0,
                    seed: 0,
                };
                check_contents(case, &contents[..sources]);
            }
        }
    }
}

/// Elements with all patterns of bits, of at most 16 bits. Of longer ones, those that begin with
/// each pattern of 12 bits, and end with zeros, with ones, or with zeros and a one. So there are
/// the first and the last number of each exponent and sign: zeros, infinities, the largest numbers,
/// the smallest, and those that are subnormal.
fn patterns(data_type: DataType) -> Vec<u8> {
    let (size, bits) = (data_type.bytes(), 8 * data_type.bytes() as u32);
    let shift = if bits > 16 { bits - 12 } else { 0 };
    let ends = if shift == 0 { vec![0] } else { vec![0, 1, (1u64 << shift) - 1] };
    let patterns =
        (0..1u64 << (bits - shift)).flat_map(|begin| ends.iter().map(move |end| begin << shift | end));
    patterns.flat_map(|pattern| pattern.to_le_bytes().into_iter().take(size)).collect()
}

/// The neutral elements of rounds ([`crate::partial`]).
#[test]
fn a_neutral_element_leaves_every_other_operand_as_it_is() {
    every_kind(|data_type, op| {
        let operands = patterns(data_type);
        let elements = operands.len() / data_type.bytes();
        let neutral = neutral(data_type, op).repeat(elements);
        for instructions in Instructions::available() {
            for place in 0..3 {
                let mut contents = vec![neutral.clone(); 3];
                contents[place].clone_from(&operands);
                for sources in place.max(1) + 1..=3 {
                    let case = Case {
                        data_type,
                        op,
                        // An average of one contribution.
                        divide_by: 1,
                        sources,
                        destinations: Destinations::Apart(1),
                        elements,
                        misaligned_by: 0,
                        seed: 0,
                    };
                    check_instructions(case, &contents[..sources], &operands, instructions);
                }
            }
        }
    });
    for (data_type, op) in
        [(DataType::F32, ReduceOp::premul_sum(3.0)), (DataType::I32, ReduceOp::premul_sum(3))]
    {
        // What was multiplied is added.
        assert_eq!(neutral(data_type, op), neutral(data_type, ReduceOp::Sum));
    }
}

#[test]
fn nan_wins_minimum_and_maximum_and_zeros_have_an_order() {
    let combine = |op, a: f32, b: f32| {
        let mut result = 0f32;
        let (from, into) =
            (vec![(&raw const a).cast(), (&raw const b).cast()], vec![(&raw mut result).cast()]);
        let mut job = Job {
            data_type: DataType::F32,
            op,
            divide_by: 1,
            from,
            into,
            elements: 1,
            elements_done: 0,
            ticket: 0,
        };
        // SAFETY: three live floats.
        assert!(unsafe { HostCompute::new().advance(&mut job, Nanos::ZERO) });
        result
    };
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
        for other in [0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Prod] {
                assert!(combine(op, nan, other).is_nan() && combine(op, other, nan).is_nan(), "{op} {other}");
            }
        }
    }
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(combine(ReduceOp::Min, a, b).to_bits(), (-0.0f32).to_bits());
        assert_eq!(combine(ReduceOp::Max, a, b).to_bits(), 0.0f32.to_bits());
    }
    assert!(combine(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY).is_nan());
    assert!(combine(ReduceOp::Prod, f32::INFINITY, 0.0).is_nan());
    assert_eq!(combine(ReduceOp::Sum, f32::from_bits(1), f32::from_bits(1)), f32::from_bits(2));
}

fn divisor(op: ReduceOp, sources: usize) -> u32 {
    if op == ReduceOp::Avg { sources as u32 } else { 1 }
}

#[test]
fn every_short_length_is_right_for_every_kind_and_count_of_sources_and_destinations() {
    every_kind(|data_type, op| {
        for sources in 1..=9 {
            for elements in 0..=130 {
                let destinations = Destinations::Apart(1 + elements % 3);
                let (divide_by, misaligned_by) = (divisor(op, sources), elements % 3);
                let seed = elements as u64;
                check(Case {
                    data_type,
                    op,
                    divide_by,
                    sources,
                    destinations,
                    elements,
                    misaligned_by,
                    seed,
                });
            }
        }
    });
}

#[test]
fn a_destination_may_be_any_of_the_sources() {
    every_kind(|data_type, op| {
        for sources in 1..=9 {
            for (elements, misaligned_by) in [(1, 0), (7, 1), (64, 0), (130, 3), (2500, 1)] {
                let mut all = vec![Destinations::FirstAndLast];
                all.extend(
                    (0..sources.min(4)).flat_map(|k| (0..=2).map(move |n| Destinations::Source(k, n))),
                );
                for destinations in all {
                    let (divide_by, seed) = (divisor(op, sources), 7);
                    check(Case {
                        data_type,
                        op,
                        divide_by,
                        sources,
                        destinations,
                        elements,
                        misaligned_by,
                        seed,
                    });
                }
            }
        }
    });
}

#[test]
fn long_jobs_take_several_slices_and_are_right() {
    every_kind(|data_type, op| {
        for (sources, destinations) in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (5, 2)] {
            let (divide_by, elements) = (divisor(op, sources), 300_001 / sources);
            let destinations = Destinations::Apart(destinations);
            check(Case {
                data_type,
                op,
                divide_by,
                sources,
                destinations,
                elements,
                misaligned_by: 0,
                seed: 3,
            });
        }
    });
}

#[test]
fn two_sources_give_the_same_bits_in_either_order() {
    every_kind(|data_type, op| {
        let mut random = Random::new(11);
        let size = data_type.bytes();
        let (a, b) = (numbers(data_type, 5000, &mut random), numbers(data_type, 5000, &mut random));
        let run = |from: [&[u8]; 2], instructions| {
            let mut result = vec![0u8; a.len()];
            let from = from.map(<[u8]>::as_ptr).to_vec();
            let into = vec![result.as_mut_ptr()];
            let mut job =
                Job { data_type, op, divide_by: 1, from, into, elements: 5000, elements_done: 0, ticket: 0 };
            let mut compute = HostCompute::with(instructions);
            // SAFETY: the buffers are live, distinct and have that many elements.
            while !unsafe { compute.advance(&mut job, Nanos::ZERO) } {}
            result
        };
        for instructions in Instructions::available() {
            let (forth, back) = (run([&a, &b], instructions), run([&b, &a], instructions));
            for (left, right) in forth.chunks(size).zip(back.chunks(size)) {
                assert!(oracle::same(data_type, left, right), "{data_type} {op}: {left:02x?} {right:02x?}");
            }
        }
    });
}

#[test]
fn a_value_may_be_added_to_itself_in_place() {
    let mut values: Vec<u8> = [1.5f32, -2.0, 0.25].iter().flat_map(|v| v.to_le_bytes()).collect();
    let pointer = values.as_mut_ptr();
    let (from, into) = (vec![pointer.cast_const(); 2], vec![pointer]);
    let (data_type, op) = (DataType::F32, ReduceOp::Sum);
    let mut job = Job { data_type, op, divide_by: 1, from, into, elements: 3, elements_done: 0, ticket: 0 };
    // SAFETY: one live buffer; the destination is exactly the source.
    assert!(unsafe { HostCompute::new().advance(&mut job, Nanos::ZERO) });
    let expected: Vec<u8> = [3.0f32, -4.0, 0.5].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(values, expected);
}

#[test]
fn averages_round_once_after_the_division() {
    // In binary16 the sum of these, 65,504 + 65,504, is infinite; their average is not.
    let largest = 0x7bffu16.to_le_bytes();
    let mut average = [0u8; 2];
    let mut job = Job {
        data_type: DataType::F16,
        op: ReduceOp::Avg,
        divide_by: 2,
        from: vec![largest.as_ptr(), largest.as_ptr()],
        into: vec![average.as_mut_ptr()],
        elements: 1,
        elements_done: 0,
        ticket: 0,
    };
    // SAFETY: live buffers of one element; the destination is apart from the source.
    assert!(unsafe { HostCompute::new().advance(&mut job, Nanos::ZERO) });
    assert_eq!(average, largest);
}

proptest! {
    #[test]
    fn any_job_agrees_with_the_oracle(
        data_type in prop::sample::select(DataType::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        divide_by in prop_oneof![Just(0u32), Just(1), 2u32..100, 2u32..],
        sources in 1usize..12,
        destinations in prop_oneof![
            (1usize..4).prop_map(Destinations::Apart),
            (0usize..12, 0usize..3).prop_map(|(k, n)| Destinations::Source(k, n)),
            Just(Destinations::FirstAndLast),
        ],
        elements in 0usize..6000,
        misaligned_by in 0usize..64,
        seed: u64,
    ) {
        prop_assume!(op.fits(data_type));
        let divide_by = if op.is_bitwise() { 1 } else { divide_by };
        check(Case { data_type, op, divide_by, sources, destinations, elements, misaligned_by, seed });
    }
}
