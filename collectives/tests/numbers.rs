//! What groups make of numbers: NaN and infinities, factors, bits, and results that are the same
//! again.

mod ranks;

use pleach_collectives::{
    CollectiveError, Element, F8E4M3, F8E5M2, Group, NotExact, Operation, Options, Reproducible, bf16, f16,
};
use pleach_schedule::Algorithm;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, ReduceOp};

use ranks::with_group;

const FABRICS: [Fabric; 2] = [Fabric::Shm, Fabric::Tcp];

const ALGORITHMS: [&str; 6] =
    ["direct", "exchange", "recursive-doubling", "halving-doubling", "ring", "double-tree"];

fn usual(_: &mut Options) {}

/// A float, as the tests below look at it.
trait Float: Element {
    fn of(value: f32) -> Self;
    fn to(self) -> f32;
}

macro_rules! float {
    ($($float:ty),*) => {
        $(
            impl Float for $float {
                fn of(value: f32) -> Self {
                    <$float>::from_f32(value)
                }
                fn to(self) -> f32 {
                    self.to_f32()
                }
            }
        )*
    };
}
float!(f16, bf16, F8E4M3, F8E5M2);

impl Float for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn to(self) -> f32 {
        self
    }
}

impl Float for f64 {
    fn of(value: f32) -> Self {
        value.into()
    }
    fn to(self) -> f32 {
        self as f32
    }
}

/// Every place has NaN, an infinity, both of them or none on one or two of the ranks.
fn special(rank: u32, ranks: u32, place: usize) -> f32 {
    let (one, other) = (place as u32 % ranks, (place as u32 / 3) % ranks);
    match (place % 5, rank) {
        (0, rank) if rank == one => f32::NAN,
        (1, rank) if rank == one => f32::INFINITY,
        (2, rank) if rank == one => f32::NEG_INFINITY,
        (3, rank) if rank == one => f32::INFINITY,
        (3, rank) if rank == other => f32::NEG_INFINITY,
        _ => -0.0,
    }
}

fn specials_of<T: Float>(group: &Group, elements: usize) -> Vec<Vec<f32>> {
    let mut results = Vec::new();
    for name in ALGORITHMS {
        let algorithm: Algorithm = name.parse().unwrap();
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
            let give = |place| T::of(special(group.rank(), group.world_size(), place));
            let mut data: Vec<T> = (0..elements).map(give).collect();
            group.with_variant(algorithm.clone()).all_reduce(&mut data, op).unwrap();
            let values: Vec<f32> = data.into_iter().map(T::to).collect();
            // The types without infinities have NaN in their place.
            for (place, value) in values.iter().enumerate() {
                let inputs: Vec<f32> = (0..group.world_size())
                    .map(|rank| T::of(special(rank, group.world_size(), place)).to())
                    .collect();
                let expected = match op {
                    ReduceOp::Sum => inputs.iter().sum(),
                    _ if inputs.iter().any(|input| input.is_nan()) => f32::NAN,
                    ReduceOp::Min => inputs.iter().copied().fold(f32::INFINITY, f32::min),
                    _ => inputs.iter().copied().fold(f32::NEG_INFINITY, f32::max),
                };
                let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                assert!(same, "{name} {op} of {inputs:?} is {value}, not {expected}");
            }
            results.push(values);
        }
    }
    results
}

#[test]
fn nan_infinities_and_signed_zeros_come_out_as_ieee_says_and_alike_on_every_rank() {
    for fabric in FABRICS {
        for ranks in [2, 3] {
            let results = with_group(fabric, ranks, usual, |group| {
                let mut all = specials_of::<f32>(&group, 1000);
                all.extend(specials_of::<f64>(&group, 100));
                all.extend(specials_of::<f16>(&group, 1000));
                all.extend(specials_of::<bf16>(&group, 100));
                all.extend(specials_of::<F8E4M3>(&group, 1000));
                all.extend(specials_of::<F8E5M2>(&group, 100));
                all
            });
            let kind = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
            for other in &results[1..] {
                assert!(other.iter().flatten().map(kind).eq(results[0].iter().flatten().map(kind)));
            }
        }
    }
}

#[test]
fn bits_are_combined_and_bitwise_operations_on_floats_are_refused_with_what_there_is() {
    for fabric in FABRICS {
        with_group(fabric, 3, usual, |group| {
            let own = 0b0001_0010u64 << group.rank() | 1 << 63;
            for (op, expected) in [
                (ReduceOp::And, 1u64 << 63),
                (ReduceOp::Or, 0b0111_1110 | 1 << 63),
                (ReduceOp::Xor, 0b0111_1110 | 1 << 63),
            ] {
                let mut data = vec![own; 1000];
                group.all_reduce(&mut data, op).unwrap();
                assert!(data.iter().all(|&value| value == expected), "{op}: {:#x}", data[0]);
            }
            let error = group.all_reduce(&mut [1f32], ReduceOp::Or).unwrap_err();
            assert!(matches!(error, CollectiveError::Meaningless { .. }));
            assert_eq!(error.to_string(), "or has no meaning for f32; there are sum prod min max avg");
            let mut bytes = [group.rank() as i8];
            group.all_reduce(&mut bytes, ReduceOp::Xor).unwrap();
            assert_eq!(bytes, [3]);
        });
    }
}

#[test]
fn every_rank_s_input_is_multiplied_by_its_own_factor_and_inputs_stay_as_they_are() {
    for fabric in FABRICS {
        for ranks in [1, 3] {
            with_group(fabric, ranks, usual, |group| {
                let rank = group.rank();
                let factor = (rank + 1) as f32;
                let sum: f32 = (1..=ranks).map(|factor| (factor * factor) as f32).sum();
                let input = vec![factor; 3000];
                let mut output = vec![0f32; 3000];
                group
                    .run(Operation::all_reduce_into(&input, &mut output, ReduceOp::premul_sum(factor)))
                    .unwrap();
                assert!(
                    output.iter().all(|&value| value == sum) && input.iter().all(|&value| value == factor)
                );
                let mut buffer = group.buffer::<bf16>(3000).unwrap();
                buffer.fill(bf16::from_f32(factor));
                group.run(Operation::all_reduce(&mut buffer, ReduceOp::premul_sum(factor))).unwrap();
                assert!(buffer.iter().all(|value| value.to_f32() == sum));
                let mut data = vec![i64::from(rank) + 1; 10];
                group.run(Operation::reduce(&mut data, ReduceOp::premul_sum(-2), ranks - 1)).unwrap();
                let own = if rank == ranks - 1 {
                    -2 * i64::from(ranks * (ranks + 1) / 2)
                } else {
                    i64::from(rank) + 1
                };
                assert_eq!(data, [own; 10]);
                let whole: Vec<u8> = (0..ranks as u8).collect();
                let mut part = [0u8];
                group.run(Operation::reduce_scatter(&whole, &mut part, ReduceOp::premul_sum(2))).unwrap();
                assert_eq!(part, [2 * (rank * ranks) as u8]);
                let started = group
                    .start(Operation::all_reduce(vec![factor; 4], ReduceOp::premul_sum(factor)))
                    .unwrap();
                assert_eq!(started.wait().unwrap(), [sum; 4]);
            });
        }
    }
}

/// Numbers whose sum depends on the order.
fn rough(contribution: u32, place: usize) -> f32 {
    let mixed = (place as u32 ^ contribution << 20).wrapping_mul(0x9e37_79b1);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca77);
    let exponent = (mixed >> 27) as i32 - 16;
    ((mixed & 0xffff) as f32 / 32_768.0 - 1.0) * 2f32.powi(exponent)
}

fn fill<T: Float>(contribution: u32, first: usize, elements: usize) -> Vec<T> {
    (first..first + elements).map(|place| T::of(rough(contribution, place))).collect()
}

/// The same elements, by each algorithm that is taken, whole and in pieces, in each memory: all the
/// same bits.
fn sums_again<T: Float>(group: &Group) -> Vec<u8> {
    const ELEMENTS: usize = 3001;
    const PIECES: usize = 8;
    let ranks = group.world_size();
    let whole: Vec<T> = fill(group.rank(), 0, ELEMENTS);
    let mut first = whole.clone();
    group.all_reduce(&mut first, ReduceOp::Avg).unwrap();
    let expect = |found: &[T], what: &str| {
        assert_eq!(bytemuck::cast_slice::<T, u8>(found), bytemuck::cast_slice::<T, u8>(&first), "{what}");
    };
    let mut taken = 0;
    for name in ALGORITHMS {
        let by_name = group.with_variant(name.parse::<Algorithm>().unwrap());
        let mut data = whole.clone();
        match by_name.all_reduce(&mut data, ReduceOp::Avg) {
            Ok(()) => {
                expect(&data, name);
                taken += 1;
                let mut buffer = group.buffer::<T>(ELEMENTS).unwrap();
                buffer.copy_from_slice(&whole);
                by_name.all_reduce(&mut buffer, ReduceOp::Avg).unwrap();
                expect(&buffer, name);
            }
            Err(CollectiveError::NotReproducible { known, .. }) => {
                assert!(ranks > 2 && known.iter().any(|name| name == "direct"), "{known:?}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Two ranks have one order only.
    assert!(if ranks == 2 { taken == ALGORITHMS.len() } else { taken >= 1 }, "{taken}");
    for piece in [1, 7, 1000] {
        let mut data = whole.clone();
        for part in data.chunks_mut(piece).take(PIECES) {
            group.all_reduce(part, ReduceOp::Avg).unwrap();
        }
        let done = (piece * PIECES).min(ELEMENTS);
        data[done..].copy_from_slice(&first[done..]);
        expect(&data, "in pieces");
    }
    let mut rooted = whole.clone();
    group.reduce(&mut rooted, ReduceOp::Avg, ranks - 1).unwrap();
    if group.rank() == ranks - 1 {
        expect(&rooted, "reduce");
    }
    let part = ELEMENTS / ranks as usize;
    let mut scattered = vec![T::of(0.0); part];
    group.reduce_scatter(&whole[..part * ranks as usize], &mut scattered, ReduceOp::Avg).unwrap();
    let own = group.rank() as usize * part;
    assert_eq!(
        bytemuck::cast_slice::<T, u8>(&scattered),
        bytemuck::cast_slice::<T, u8>(&first[own..own + part])
    );
    bytemuck::cast_slice(&first).to_vec()
}

#[test]
fn a_world_size_has_one_result_whatever_the_algorithm_the_size_the_memory_and_the_fabric() {
    for ranks in [2, 3, 5] {
        let of_fabric = FABRICS.map(|fabric| {
            let adjust = |options: &mut Options| options.reproducible = Reproducible::PerWorldSize;
            with_group(fabric, ranks, adjust, |group| {
                [
                    sums_again::<f32>(&group),
                    sums_again::<f64>(&group),
                    sums_again::<bf16>(&group),
                    sums_again::<f16>(&group),
                    sums_again::<F8E5M2>(&group),
                ]
            })
        });
        assert!(of_fabric.iter().flatten().all(|result| *result == of_fabric[0][0]), "{ranks} ranks");
    }
}

#[test]
fn without_it_another_algorithm_gives_other_bits() {
    let results = with_group(Fabric::Shm, 5, usual, |group| {
        ["direct", "ring"].map(|name| {
            let mut data: Vec<f32> = fill(group.rank(), 0, 3001);
            let group = group.with_variant(name.parse::<Algorithm>().unwrap());
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            data
        })
    });
    assert!(results.iter().all(|[direct, ring]| direct != ring));
}

#[test]
fn the_preferred_algorithm_gives_way_to_one_that_is_reproducible() {
    let adjust = |options: &mut Options| {
        options.reproducible = Reproducible::PerWorldSize;
        options.algorithm = Some(Algorithm::Ring);
    };
    with_group(Fabric::Shm, 3, adjust, |group| {
        assert_eq!(group.algorithm_for(Collective::AllReduce, 1 << 20).unwrap(), "direct");
        assert_eq!(group.algorithm_for(Collective::AllGather, 1 << 20).unwrap(), "ring");
    });
}

fn exact_sums<T: Float>(group: &Group, contribution: u32) -> Vec<u8> {
    const ELEMENTS: usize = 20_000;
    let mut data: Vec<T> = fill(contribution, 0, ELEMENTS);
    let mut scattered = vec![T::of(0.0); ELEMENTS / group.world_size() as usize];
    let input = data[..scattered.len() * group.world_size() as usize].to_vec();
    group.reduce_scatter(&input, &mut scattered, ReduceOp::Sum).unwrap();
    let mut rooted = data.clone();
    group.reduce(&mut rooted, ReduceOp::Sum, 0).unwrap();
    let before = data.clone();
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    let bytes = bytemuck::cast_slice::<T, u8>;
    assert_eq!(bytes(&rooted), if group.rank() == 0 { bytes(&data) } else { bytes(&before) });
    let first = group.rank() as usize * scattered.len();
    assert_eq!(bytes(&scattered), bytes(&data[first..first + scattered.len()]));
    bytes(&data).to_vec()
}

#[test]
fn exact_sums_do_not_depend_on_the_order_of_ranks_their_number_or_the_fabric() {
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    // Which contribution each rank gives; those from 3 on are zeros.
    let worlds: [&[u32]; 4] = [&[0, 1, 2], &[2, 0, 1], &[3, 1, 0, 4, 2], &[1, 2, 3, 0]];
    let mut results = Vec::new();
    for fabric in FABRICS {
        for world in worlds {
            results.extend(with_group(fabric, world.len() as u32, exact, |group| {
                let contribution = world[group.rank() as usize];
                if contribution < 3 {
                    return [
                        exact_sums::<f32>(&group, contribution),
                        exact_sums::<f64>(&group, contribution),
                        exact_sums::<bf16>(&group, contribution),
                        exact_sums::<f16>(&group, contribution),
                        exact_sums::<F8E4M3>(&group, contribution),
                    ];
                }
                [
                    zeros::<f32>(&group),
                    zeros::<f64>(&group),
                    zeros::<bf16>(&group),
                    zeros::<f16>(&group),
                    zeros::<F8E4M3>(&group),
                ]
            }));
        }
    }
    assert!(results.iter().all(|result| *result == results[0]));
    // The processor's own arithmetic, wide enough for these numbers.
    let single: &[f32] = bytemuck::cast_slice(&results[0][0]);
    for (place, sum) in single.iter().enumerate() {
        let wide: f64 = (0..3).map(|contribution| f64::from(rough(contribution, place))).sum();
        assert_eq!(*sum, wide as f32);
    }
}

#[test]
fn an_exact_sum_of_many_contributions_has_the_same_bits_whoever_gives_which() {
    const ELEMENTS: usize = 20_000;
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    let contributions: Vec<Vec<f32>> = (0..7).map(|number| fill(number, 0, ELEMENTS)).collect();
    // Which contributions each rank gives.
    let worlds: [&[&[usize]]; 4] = [
        &[&[0, 1, 2, 3, 4, 5, 6]],
        &[&[0, 2, 4, 6], &[1, 3, 5]],
        &[&[], &[6, 5], &[0, 1, 2, 3, 4]],
        &[&[3], &[1, 4], &[0, 5, 6], &[2]],
    ];
    let mut results = Vec::new();
    for fabric in FABRICS {
        for world in worlds {
            results.extend(with_group(fabric, world.len() as u32, exact, |group| {
                let own = world[group.rank() as usize].iter().map(|number| &contributions[*number][..]);
                let mut sum = vec![7.0; ELEMENTS];
                group.all_reduce_many(&own.collect::<Vec<_>>(), &mut sum).unwrap();
                sum.iter().map(|number| number.to_bits()).collect::<Vec<_>>()
            }));
        }
    }
    assert!(results.iter().all(|result| *result == results[0]));
    for (place, sum) in results[0].iter().enumerate() {
        let wide: f64 = contributions.iter().map(|contribution| f64::from(contribution[place])).sum();
        assert_eq!(f32::from_bits(*sum), wide as f32);
    }
}

#[test]
fn only_exact_groups_add_several_contributions_and_each_is_as_long_as_the_sum() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let error = group.all_reduce_many(&[&[1.0]], &mut [0.0]).unwrap_err();
            assert!(matches!(error, CollectiveError::NotExact { reason: NotExact::Group, .. }), "{error}");
            assert!(error.to_string().contains("Reproducible::Exact"), "{error}");
        },
    );
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    with_group(Fabric::Shm, 2, exact, |group| {
        let error = group.all_reduce_many(&[&[1.0], &[1.0, 2.0]], &mut [0.0]).unwrap_err();
        assert!(matches!(error, CollectiveError::Length { expected: 1, actual: 2, .. }), "{error}");
    });
}

/// What [`exact_sums`] calls, giving nothing but zeros.
fn zeros<T: Float>(group: &Group) -> Vec<u8> {
    let mut data = vec![T::of(0.0); 20_000];
    let mut scattered = vec![T::of(0.0); data.len() / group.world_size() as usize];
    let input = data[..scattered.len() * group.world_size() as usize].to_vec();
    group.reduce_scatter(&input, &mut scattered, ReduceOp::Sum).unwrap();
    group.reduce(&mut data.clone(), ReduceOp::Sum, 0).unwrap();
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    bytemuck::cast_slice(&data).to_vec()
}

#[test]
fn uneven_parts_of_an_exact_sum_are_those_of_the_whole() {
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    for fabric in FABRICS {
        with_group(fabric, 3, exact, |group| {
            let counts = [1000usize, 0, 4321];
            let first: usize = counts[..group.rank() as usize].iter().sum();
            let own = counts[group.rank() as usize];
            let mut whole: Vec<f32> = (0..5321).map(|place| rough(group.rank(), place)).collect();
            let mut part = vec![0f32; own];
            group
                .run(Operation::reduce_scatter(&whole, &mut part, ReduceOp::Sum).with_counts(&counts))
                .unwrap();
            group.all_reduce(&mut whole, ReduceOp::Sum).unwrap();
            assert!(part.iter().zip(&whole[first..]).all(|(one, other)| one.to_bits() == other.to_bits()));
        });
        // In a group of its own: the failure may reach a rank that is still in the call before.
        with_group(fabric, 3, exact, |group| {
            let other = if group.rank() == 0 { [1, 1, 2] } else { [2, 1, 1] };
            let mut part = vec![0f32; other[group.rank() as usize]];
            let error = group
                .run(Operation::reduce_scatter(&[1f32; 4], &mut part, ReduceOp::Sum).with_counts(&other))
                .unwrap_err();
            assert!(matches!(error, CollectiveError::Failed(_)), "{error}");
        });
    }
}

#[test]
fn exact_groups_refuse_what_cannot_be_exact_and_tell_calls_that_differ() {
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    with_group(Fabric::Shm, 2, exact, |group| {
        let error = group.all_reduce(&mut [2f32], ReduceOp::Prod).unwrap_err();
        assert!(error.to_string().contains("exact groups have sum, avg, min and max"), "{error}");
        let error = group.start(Operation::all_reduce(vec![2f32], ReduceOp::Sum)).unwrap_err();
        assert!(matches!(error.error, CollectiveError::NotExact { reason: NotExact::Started, .. }));
        let mut factors = [3i32];
        group.all_reduce(&mut factors, ReduceOp::Prod).unwrap();
        assert_eq!(factors, [9]);
        let mut extremes = [group.rank() as f32, f32::NAN];
        group.all_reduce(&mut extremes, ReduceOp::Max).unwrap();
        assert!(extremes[0] == 1.0 && extremes[1].is_nan());
        let mut third = [if group.rank() == 0 { 1f64 } else { f64::MIN_POSITIVE }];
        group.all_reduce(&mut third, ReduceOp::Avg).unwrap();
        assert_eq!(third, [0.5]);
        // As many blocks, but not as many elements.
        let mut data = vec![1f32; 10 + group.rank() as usize];
        assert!(matches!(group.all_reduce(&mut data, ReduceOp::Sum), Err(CollectiveError::Failed(_))));
    });
}
