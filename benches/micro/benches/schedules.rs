//! What happens before a run: the proof of a schedule (at the first call of its kind) and the
//! look-up of a plan (at each).
#![allow(missing_docs)] // criterion's macros

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use pleach_collectives::group::Planner;
use pleach_schedule::cost::Platform;
use pleach_schedule::verify::verify;
use pleach_schedule::{Access, Algorithm, HostMap, generate, select};
use pleach_vocabulary::Collective;

const BYTES: usize = 1 << 20;

fn proofs(criterion: &mut Criterion) {
    let schedules = [
        (Algorithm::Direct, 2, Access::Mapped),
        (Algorithm::Direct, 8, Access::Mapped),
        (Algorithm::Ring, 8, Access::Put),
        (Algorithm::HalvingDoubling, 16, Access::Put),
        (Algorithm::Direct, 64, Access::Mapped),
        (Algorithm::Ring, 64, Access::Put),
        (Algorithm::HalvingDoubling, 64, Access::Put),
        (Algorithm::DoubleTree, 64, Access::Put),
    ];
    let mut group = criterion.benchmark_group("verify all-reduce");
    group.sample_size(20);
    for (algorithm, ranks, access) in schedules {
        let schedule = generate(Collective::AllReduce, &algorithm, ranks, access).expect("fits the ranks");
        group.bench_function(BenchmarkId::new(algorithm.to_string(), ranks), |bencher| {
            bencher.iter_batched(
                || schedule.clone(),
                |schedule| verify(schedule).expect("is right"),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn plans(criterion: &mut Criterion) {
    let platform = Platform::new(HostMap::one(8), Access::Mapped);
    let mut planner = Planner::new(0, platform.clone(), None);
    criterion.bench_function("plan, known", |bencher| {
        bencher.iter(|| planner.program(Collective::AllReduce, BYTES, None).expect("there is one"));
    });
    let mut group = criterion.benchmark_group("select all-reduce");
    group.sample_size(10);
    for ranks in [8, 64] {
        let platform = || Platform::new(HostMap::one(ranks), Access::Mapped);
        let choose = |platform: &Platform| {
            select(Collective::AllReduce, BYTES as u64, platform).expect("there is one")
        };
        group.bench_function(BenchmarkId::new("first", ranks), |bencher| {
            bencher.iter_batched(platform, |platform| choose(&platform), BatchSize::SmallInput);
        });
        let known = platform();
        group.bench_function(BenchmarkId::new("next size", ranks), |bencher| bencher.iter(|| choose(&known)));
    }
    group.finish();
}

criterion_group!(benches, proofs, plans);
criterion_main!(benches);
