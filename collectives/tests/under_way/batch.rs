//! Many operations in one pass.

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{
    Batch, CollectiveError, DataMut, Element, Group, Operation, Progress, Reproducible, bf16,
};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use crate::ranks::with_group;

/// Lengths on both sides of what is fused, and none.
const LENGTHS: [usize; 10] = [0, 1, 3, 250, 8192, 8193, 16_384, 16_385, 100_000, 7];

/// Tensors of a rank that look alike on no two ranks or places.
/// Adds an all-reduce of each tensor.
fn all_reduced<D: DataMut>(
    op: ReduceOp,
) -> impl for<'d> FnOnce(&mut Batch<'d>, &'d mut Vec<D>) -> Result<(), CollectiveError> {
    move |batch, tensors| {
        tensors.iter_mut().try_for_each(|tensor| batch.add(Operation::all_reduce(tensor, op)).map(drop))
    }
}

fn tensors<T: Element>(rank: u32, make: impl Fn(f32) -> T) -> Vec<Vec<T>> {
    let value =
        |tensor: usize, index: usize| rank as f32 * 1.37 + tensor as f32 * 0.11 + (index % 97) as f32 * 0.013;
    let tensor = |(tensor, len)| (0..len).map(|index| make(value(tensor, index))).collect();
    LENGTHS.into_iter().enumerate().map(tensor).collect()
}

fn bits<T: Element>(tensors: &[Vec<T>]) -> Vec<u8> {
    tensors.iter().flat_map(|tensor| bytemuck::cast_slice::<T, u8>(tensor).to_vec()).collect()
}

/// The same operations one by one and in one batch; whether the bits are the same.
fn is_same(group: &Group) -> bool {
    let rank = group.rank();
    let (mut single, mut single_half) = (tensors(rank, |it| it), tensors(rank, bf16::from_f32));
    let mut integers = tensors(rank, |it| (it * 100.0) as i32);
    let (mut together, mut together_half, mut counted) =
        (single.clone(), single_half.clone(), integers.clone());
    for index in 0..LENGTHS.len() {
        group.all_reduce(&mut single[index], ReduceOp::Sum).unwrap();
        group.all_reduce(&mut single_half[index], ReduceOp::Avg).unwrap();
        match index % 3 {
            0 => group.all_reduce(&mut integers[index], ReduceOp::Max).unwrap(),
            1 => group.reduce(&mut integers[index], ReduceOp::Sum, 1).unwrap(),
            _ => group.broadcast(&mut integers[index], 1).unwrap(),
        }
    }
    let mut batch = group.batch();
    let with_integers = together.iter_mut().zip(&mut together_half).zip(&mut counted);
    for (index, ((single, half), integers)) in with_integers.enumerate() {
        batch
            .add(Operation::all_reduce(single, ReduceOp::Sum))
            .unwrap()
            .add(Operation::all_reduce(half, ReduceOp::Avg))
            .unwrap();
        match index % 3 {
            0 => batch.add(Operation::all_reduce(integers, ReduceOp::Max)).unwrap(),
            1 => batch.add(Operation::reduce(integers, ReduceOp::Sum, 1)).unwrap(),
            _ => batch.add(Operation::broadcast(integers, 1)).unwrap(),
        };
    }
    assert_eq!(batch.len(), 3 * LENGTHS.len());
    batch.run().unwrap();
    assert_eq!(bits(&integers), bits(&counted), "integers are the same in any case");
    for (single, together) in single.iter().flatten().zip(together.iter().flatten()) {
        assert!((single - together).abs() <= 1e-5 * single.abs().max(1.0), "{single} {together}");
    }
    bits(&single) == bits(&together) && bits(&single_half) == bits(&together_half)
}

fn a_batch_gives_what_its_operations_give_one_by_one(fabric: Fabric) {
    for (ranks, reproducible) in
        [(2, Reproducible::No), (3, Reproducible::PerWorldSize), (3, Reproducible::Exact)]
    {
        with_group(
            fabric,
            ranks,
            |options| options.reproducible = reproducible,
            |group| {
                for _ in 0..2 {
                    let is_same = is_same(&group);
                    assert!(is_same || reproducible == Reproducible::No, "bit by bit");
                }
            },
        );
    }
}

fn more_operations_than_fit_are_carried_out_in_turns(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let rank = u64::from(group.rank());
            // 500 buckets of one tensor each, by tags, and 25 MiB of short tensors.
            let mut tagged: Vec<[u64; 1]> = (0..500).map(|index| [index + rank]).collect();
            let mut short: Vec<Vec<u64>> = vec![vec![rank; 8192]; 400];
            let mut batch = group.batch();
            for (index, data) in (0..).zip(&mut tagged) {
                let mut one = group.tagged(index).batch();
                one.add(Operation::all_reduce(data, ReduceOp::Sum)).unwrap();
                batch.append(one).unwrap();
            }
            for data in &mut short {
                batch.add(Operation::all_reduce(data, ReduceOp::Sum)).unwrap();
            }
            batch.run().unwrap();
            assert!((0..).zip(&tagged).all(|(index, data)| data[0] == 2 * index + 1));
            assert!(short.iter().flatten().all(|item| *item == 1));
        },
    );
}

fn sends_and_receives_of_a_batch_do_not_wait_for_each_other(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let (rank, peer) = (group.rank(), 1 - group.rank());
            let own = vec![rank; 200_000];
            let (mut theirs, mut all) = (vec![9u32; 200_000], [9u32; 2]);
            let mut batch = group.batch();
            batch.add(Operation::send(&own, peer)).unwrap().add(Operation::recv(&mut theirs, peer)).unwrap();
            batch.add(Operation::all_gather(&own[..1], &mut all)).unwrap();
            batch.run().unwrap();
            assert_eq!((theirs, all), (vec![peer; 200_000], [0, 1]));
        },
    );
}

fn an_empty_batch_is_nothing_and_one_of_another_group_is_refused(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            if group.rank() == 0 {
                // Of one rank alone: nothing waits for the other.
                assert!(group.batch().is_empty());
                group.batch().run().unwrap();
            }
            let part = group.split(Some(0), 0).unwrap().unwrap();
            let (mut first, mut second) = ([1u8], [1u8]);
            let (mut batch, mut other) = (group.batch(), part.batch());
            batch.add(Operation::all_reduce(&mut first, ReduceOp::Sum)).unwrap();
            other.add(Operation::all_reduce(&mut second, ReduceOp::Sum)).unwrap();
            let error = batch.append(other).map(|_| ()).unwrap_err();
            assert!(
                matches!(&error, CollectiveError::MixedGroups { first, second }
                    if *first == group.info().name && *second == part.info().name),
                "{error}"
            );
            let names = [group.info().name.to_string(), part.info().name.to_string()];
            assert!(names.iter().all(|name| error.to_string().contains(name.as_str())), "{error}");
            let mut real = [1.0f32];
            let error = batch.add(Operation::all_reduce(&mut real, ReduceOp::Xor)).map(|_| ()).unwrap_err();
            assert!(matches!(error, CollectiveError::Meaningless { .. }), "{error}");
            batch.run().unwrap();
            assert_eq!((first, second), ([2], [1]), "what was refused is not in it");
        },
    );
}

fn tensors_of_other_lengths_are_a_mismatch_though_all_together_are_as_long(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let (mut a, mut b) = (vec![1i32; 10], vec![2i32; 20]);
            let mut batch = group.batch();
            if group.rank() == 0 {
                batch
                    .add(Operation::all_reduce(&mut a, ReduceOp::Sum))
                    .unwrap()
                    .add(Operation::all_reduce(&mut b, ReduceOp::Sum))
                    .unwrap();
            } else {
                batch
                    .add(Operation::all_reduce(&mut b, ReduceOp::Sum))
                    .unwrap()
                    .add(Operation::all_reduce(&mut a, ReduceOp::Sum))
                    .unwrap();
            }
            let error = batch.run().unwrap_err();
            let CollectiveError::Failed(fault) = &error else { panic!("{error}") };
            assert_eq!(fault.kind, FaultKind::Mismatch, "{error}");
            assert_eq!((a, b), (vec![1; 10], vec![2; 20]), "no byte of a different call is used");
            let mut after = [1i32];
            let mut batch = group.batch();
            batch.add(Operation::all_reduce(&mut after, ReduceOp::Sum)).unwrap();
            assert!(matches!(batch.run(), Err(CollectiveError::Failed(_))));
        },
    );
}

crate::on_every_fabric!(
    a_batch_gives_what_its_operations_give_one_by_one,
    more_operations_than_fit_are_carried_out_in_turns,
    sends_and_receives_of_a_batch_do_not_wait_for_each_other,
    an_empty_batch_is_nothing_and_one_of_another_group_is_refused,
    tensors_of_other_lengths_are_a_mismatch_though_all_together_are_as_long,
);

#[test]
fn a_batch_that_is_started_gives_what_one_that_is_run_gives() {
    for (fabric, ranks) in [(Fabric::Shm, 2), (Fabric::Shm, 3), (Fabric::Tcp, 2)] {
        for progress in [Progress::WhenCalled, Progress::Thread] {
            with_group(
                fabric,
                ranks,
                |options| options.progress = progress,
                |group| {
                    for round in 0..3 {
                        let mut run = tensors(group.rank(), |it| (it * 100.0) as i32);
                        let started = run.clone();
                        // Whoever starts one meets whoever runs one.
                        let begins = group.rank() == round % ranks;
                        let started =
                            begins.then(|| group.batch().start(started, all_reduced(ReduceOp::Sum)).unwrap());
                        if !begins {
                            let mut batch = group.batch();
                            for tensor in &mut run {
                                batch.add(Operation::all_reduce(tensor, ReduceOp::Sum)).unwrap();
                            }
                            batch.run().unwrap();
                        }
                        let found = started.map_or(run, |pending| pending.wait().unwrap());
                        let mut expected = vec![Vec::new(); LENGTHS.len()];
                        for rank in 0..ranks {
                            for (sum, tensor) in
                                expected.iter_mut().zip(tensors(rank, |it| (it * 100.0) as i32))
                            {
                                sum.resize(tensor.len(), 0);
                                sum.iter_mut().zip(tensor).for_each(|(sum, value)| *sum += value);
                            }
                        }
                        assert!(found == expected, "{fabric} {ranks} {progress:?} round {round}");
                    }
                },
            );
        }
    }
}

#[test]
fn several_batches_are_under_way_at_once_and_are_tested_without_waiting() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let layer = |number: usize| vec![vec![number as f32; 100], vec![1.0; 30_000], vec![2.0; 3]];
            let mut pending: Vec<_> = (0..4)
                .map(|number| group.batch().start(layer(number), all_reduced(ReduceOp::Sum)).unwrap())
                .collect();
            // In any order.
            while !pending[3].test() {}
            for (number, pending) in pending.into_iter().enumerate().rev() {
                let layer = pending.wait().unwrap();
                assert!(layer[0].iter().all(|value| *value == 2.0 * number as f32));
                assert!(layer[1].iter().all(|value| *value == 2.0) && layer[2] == [4.0; 3]);
            }
            let none: Vec<Vec<f32>> = Vec::new();
            assert!(
                group.batch().start(none, all_reduced(ReduceOp::Sum)).unwrap().wait().unwrap().is_empty()
            );
            // Nothing to be copied, and still a call.
            let empty = group.batch().start(vec![Vec::<f32>::new(); 2], all_reduced(ReduceOp::Sum)).unwrap();
            assert_eq!(empty.wait().unwrap(), [[0.0f32; 0]; 2]);
            // More than may be under way.
            let many = group.batch().start(vec![vec![1u32; 20_000]; 70], all_reduced(ReduceOp::Sum)).unwrap();
            assert!(many.wait().unwrap().iter().flatten().all(|value| *value == 2));
        },
    );
}

#[test]
fn a_batch_that_fails_gives_its_tensors_back() {
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let meaningless =
                group.batch().start(vec![vec![1.0f32]], all_reduced(ReduceOp::And)).unwrap_err();
            assert!(matches!(meaningless.error, CollectiveError::Meaningless { .. }));
            assert_eq!(meaningless.data, [[1.0]]);
            // As long together, but not one by one.
            let lengths = if group.rank() == 0 { [10, 20] } else { [20, 10] };
            let tensors = lengths.map(|len| vec![1.0f32; len]).to_vec();
            let failed =
                group.batch().start(tensors, all_reduced(ReduceOp::Sum)).and_then(|pending| pending.wait());
            let failed = failed.unwrap_err();
            let CollectiveError::Failed(fault) = &failed.error else { panic!("{failed}") };
            assert_eq!(fault.kind, FaultKind::Mismatch);
            assert_eq!(failed.data.iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        },
    );
}
