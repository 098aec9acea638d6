//! Reductions of one thread, by element type: two sources into both, as an all-reduce of two mapped
//! ranks does.
//!
//! `cache` fits into a core's second cache; `memory` fits into no cache of a core. Throughput is
//! that of one operand.
#![allow(missing_docs)] // criterion's macros
#![allow(unsafe_code)] // kernels work on raw memory

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pleach_collectives::compute::{Compute, HostCompute, Job};
use pleach_transport::Nanos;
use pleach_vocabulary::{DataType, ReduceOp};

const SIZES: [(&str, usize); 2] = [("cache", 256 << 10), ("memory", 32 << 20)];
const TYPES: [DataType; 8] = [
    DataType::F32,
    DataType::F16,
    DataType::Bf16,
    DataType::F8E4M3,
    DataType::F8E5M2,
    DataType::F64,
    DataType::I32,
    DataType::I8,
];

/// As large as it says, and aligned for every element: zeros stay finite however often they are
/// added.
fn operand(bytes: usize) -> Vec<u64> {
    vec![0; bytes / size_of::<u64>()]
}

fn sums(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce");
    group.sample_size(20);
    for ((place, bytes), data_type) in SIZES.iter().flat_map(|size| TYPES.map(|data_type| (*size, data_type)))
    {
        let (mut left, mut right) = (operand(bytes), operand(bytes));
        let mut compute = HostCompute::new();
        let mut job = Job {
            data_type,
            op: ReduceOp::Sum,
            divide_by: 1,
            from: vec![left.as_ptr().cast(), right.as_ptr().cast()],
            into: vec![left.as_mut_ptr().cast(), right.as_mut_ptr().cast()],
            elements: bytes / data_type.bytes(),
            elements_done: 0,
            ticket: 0,
        };
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new(data_type.name(), place), |bencher| {
            bencher.iter(|| {
                job.elements_done = 0;
                // SAFETY: both operands live and are touched by nobody else until after the
                // benchmark; each holds `bytes`, and each destination is exactly one of the
                // sources.
                while !unsafe { compute.advance(&mut job, Nanos::ZERO) } {}
            });
            assert_eq!(job.elements_done, job.elements);
        });
        assert!(left.iter().chain(&right).all(|word| *word == 0), "zeros add up to zero");
    }
    group.finish();
}

criterion_group!(benches, sums);
criterion_main!(benches);
