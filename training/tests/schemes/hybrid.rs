//! Hybrid parallelism on ranks of groups: beside one rank that trains on the images of all.

use std::path::Path;

use pleach_collectives::{Group, Report};
use pleach_training::replay::{LogError, replay_all};
use pleach_training::{Hybrid, HybridError, Perceptron, Sgd, Trainer};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::checkpoints::Folder;
use super::model::{ROUNDING, difference};
use super::real::{RANKS, with_group};

const INPUTS: usize = 6;
/// No number of members divides all of these, so blocks are filled up.
const HIDDEN: [usize; 2] = [8, 5];
const CLASSES: usize = 3;
/// Images of a rank in a step.
const BATCH: usize = 4;
const RATE: f32 = 0.3;
const MOMENTUM: f32 = 0.5;

fn network() -> Perceptron {
    Perceptron::new(INPUTS, &HIDDEN, CLASSES)
}

/// The images of a rank in a step; some of their inputs are 0.
fn images(rank: u32, step: u64) -> Vec<(Vec<f32>, usize)> {
    let mut random = Random::new(chain(hash_of_pair(5, rank.into()), step));
    let image = |_| {
        let input: Vec<f32> = (0..INPUTS).map(|_| random.index(5) as f32 / 2.0 - 1.0).collect();
        let class = usize::from(input[0] > 0.0) + usize::from(input[1] * input[2] > 0.0);
        (input, class)
    };
    (0..BATCH).map(image).collect()
}

fn borrowed(images: &[(Vec<f32>, usize)]) -> impl Iterator<Item = (&[f32], usize)> {
    images.iter().map(|(input, class)| (&input[..], *class))
}

/// One rank that trains on the images of all.
fn trained_alone(steps: u64) -> Vec<f32> {
    let network = network();
    let (mut parameters, mut gradient) = (network.initial(7), vec![0.0; network.parameters()]);
    let mut sgd = Sgd::new(parameters.len(), RATE, MOMENTUM);
    for step in 0..steps {
        let all: Vec<_> = (0..RANKS).flat_map(|rank| images(rank, step)).collect();
        network.gradient(&parameters, &mut borrowed(&all), 1.0 / all.len() as f32, &mut gradient);
        sgd.step(&mut parameters, &gradient);
    }
    parameters
}

/// What a rank has in the end.
struct Rank {
    parameters: Vec<f32>,
    /// As the ranks counted them: of activations, and of gradients.
    sent: [f64; 2],
    /// As they were predicted, of all ranks in a step.
    predicted: [u64; 2],
    losses: Vec<f32>,
}

/// Bytes that a rank has sent in calls of these kinds, if each call sends no byte twice.
fn sent(report: &Report) -> f64 {
    let ranks = report.peers.len() as f64 + 1.0;
    let of_shape = |shape: &pleach_collectives::observe::ShapeReport| match shape.collective {
        "all-reduce" => 2.0 * shape.bytes as f64 * (ranks - 1.0) / ranks,
        "all-gather" | "reduce-scatter" => shape.bytes as f64 * (ranks - 1.0) / ranks,
        _ => 0.0,
    };
    report.shapes.iter().map(of_shape).sum()
}

fn train(group: &Group, groups: Option<u32>, steps: u64) -> Result<Rank, HybridError> {
    let (network, rank) = (network(), group.rank());
    let mut hybrid = Hybrid::new(group, &network, groups, BATCH as u32)?;
    let (across, layout) = (hybrid.across().clone(), hybrid.layout());
    let sync = "sync".parse().expect("is a scheme");
    let mut trainer = Trainer::new(&across, &sync, &layout, steps).expect("has memory").checked();
    trainer.parameters_mut().copy_from_slice(&hybrid.shard(&network.initial(7)));
    let mut sgd = Sgd::new(layout.parameters(), RATE, MOMENTUM);
    let mut losses = Vec::new();
    let count = |hybrid: &Hybrid| [sent(&hybrid.within().report()), sent(&hybrid.across().report())];
    let mut before = [0.0; 2];
    while let Some(mut step) = trainer.step().expect("goes on") {
        if step.number() == 0 {
            before = count(&hybrid);
        }
        let own = images(rank, step.number());
        let (shard, gradient) = step.vectors().expect("nothing is ready");
        let loss = hybrid.gradient(shard, &mut borrowed(&own), gradient)?;
        step.update(|shard, gradient| sgd.step(shard, gradient), loss).expect("goes on");
        losses.push(loss);
    }
    let after = count(&hybrid);
    let trained = trainer.finish().expect("ends");
    assert!(trained.guarantee_held && trained.parameters_equal && trained.progress.steps == steps);
    let (parameters, are_equal) = hybrid.whole(&trained.parameters)?;
    assert!(are_equal, "all ranks have one network");
    let sent = [after[0] - before[0], after[1] - before[1]];
    Ok(Rank { parameters, sent, predicted: hybrid.bytes_per_step(), losses })
}

/// Trains on four ranks and compares with one.
pub(crate) fn expect_trained(groups: Option<u32>, steps: u64) {
    let alone = trained_alone(steps);
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let ranks = with_group(fabric, |group| train(&group, groups, steps).expect("trains"));
        for rank in ranks {
            let apart = difference(&alone, &rank.parameters);
            assert!(apart < 10.0 * ROUNDING, "{groups:?} groups, {fabric:?}: {apart:e}");
        }
    }
}

#[test]
fn four_ranks_in_groups_have_the_parameters_of_one_rank_up_to_rounding() {
    for groups in [None, Some(1), Some(2), Some(4)] {
        expect_trained(groups, 25);
    }
    // The images that a rank leaves out must show.
    let apart = difference(&trained_alone(25), &trained_alone(24));
    assert!(apart > 100.0 * ROUNDING, "{apart:e}");
}

#[test]
fn ranks_of_a_group_have_one_loss() {
    let ranks = with_group(Fabric::Shm, |group| train(&group, Some(2), 5).expect("trains").losses);
    assert_eq!((&ranks[0], &ranks[2]), (&ranks[1], &ranks[3]));
    assert_ne!(ranks[0], ranks[2]);
}

#[test]
fn counted_bytes_are_those_of_the_formula() {
    const STEPS: u64 = 3;
    for groups in [1, 2, 4] {
        let ranks = with_group(Fabric::Tcp, |group| train(&group, Some(groups), STEPS).expect("trains"));
        let (all, groups) = (u64::from(RANKS), u64::from(groups));
        let members = all / groups;
        let block = |units: usize| (units as u64).div_ceil(members);
        // With B images of a group, a rank sends to each of the others its own part.
        let (batch, images) = (BATCH as u64, BATCH as u64 * members);
        let inputs = batch * (INPUTS as u64 + 1);
        let units = images * (2 * block(HIDDEN[0]) + 2 * block(HIDDEN[1]) + block(CLASSES));
        let activations = all * 4 * (members - 1) * (inputs + units);
        let layer = |inputs: usize, units: usize| (inputs as u64 + 1) * block(units);
        let shard = layer(INPUTS, HIDDEN[0]) + layer(HIDDEN[0], HIDDEN[1]) + layer(HIDDEN[1], CLASSES);
        let gradients = all * 2 * 4 * shard * (groups - 1) / groups;
        let sum = |kind: usize| ranks.iter().map(|rank| rank.sent[kind]).sum::<f64>();
        // A checked training averages its parameters once more than its gradients.
        let counted = [(sum(0), STEPS), (sum(1), STEPS + 1)];
        let counted = counted.map(|(bytes, times)| bytes.round() as u64 / times);
        assert_eq!(counted, [activations, gradients], "{groups} groups");
        assert_eq!(ranks[0].predicted, counted, "{groups} groups");
    }
}

#[test]
fn groups_that_would_differ_and_batches_that_do_are_refused_with_what_to_give() {
    let errors = with_group(Fabric::Shm, |group| {
        let groups = Hybrid::new(&group, &network(), Some(3), 1).err().expect("does not divide four");
        let mut hybrid = Hybrid::new(&group, &network(), Some(4), 2).expect("divides four");
        let shard = hybrid.shard(&network().initial(1));
        let mut gradient = vec![0.0; shard.len()];
        let mut of = |images: &[(Vec<f32>, usize)], shard: &[f32]| {
            hybrid.gradient(shard, &mut borrowed(images), &mut gradient).err().map(|error| error.to_string())
        };
        let all = images(0, 0);
        let wrong_class = [all[0].clone(), (all[1].0.clone(), CLASSES)];
        assert_eq!(of(&all[..2], &shard), None);
        [
            Some(groups.to_string()),
            of(&all[..1], &shard),
            of(&all[..3], &shard),
            of(&wrong_class, &shard),
            of(&all[..2], &shard[1..]),
        ]
    });
    for error in errors {
        let [groups, few, many, class, length] = error.map(|error| error.expect("is refused"));
        assert!(groups.contains("3 groups of 4 ranks") && groups.contains("groups=2"), "{groups}");
        assert!(few.starts_with("1 images in a batch of 2"), "{few}");
        assert!(many.starts_with("3 images in a batch of 2"), "{many}");
        assert!(class.starts_with("1 images in a batch of 2") && class.contains("3 classes"), "{class}");
        assert!(length.contains("give slices of the layout's length"), "{length}");
    }
}

#[test]
fn what_each_rank_of_a_hybrid_training_was_told_is_replayed_as_a_part_of_all() {
    const STEPS: u64 = 6;
    for groups in [1, 2, 4] {
        let logs = Folder::new("hybrid-logs");
        with_group(Fabric::Shm, |group| {
            let (network, rank) = (network(), group.rank());
            let mut hybrid = Hybrid::new(&group, &network, Some(groups), BATCH as u32).expect("divides four");
            let (across, layout) = (hybrid.across().clone(), hybrid.layout());
            let sync = "sync".parse().expect("is a scheme");
            let trainer = Trainer::new(&across, &sync, &layout, STEPS).expect("has memory");
            let mut trainer = hybrid.logged(trainer, logs.path()).expect("there is space");
            trainer.parameters_mut().copy_from_slice(&hybrid.shard(&network.initial(7)));
            let mut sgd = Sgd::new(layout.parameters(), RATE, MOMENTUM);
            while let Some(mut step) = trainer.step().expect("goes on") {
                let own = images(rank, step.number());
                let (shard, gradient) = step.vectors().expect("nothing is ready");
                let loss = hybrid.gradient(shard, &mut borrowed(&own), gradient).expect("goes on");
                step.update(|shard, gradient| sgd.step(shard, gradient), loss).expect("goes on");
            }
            trainer.finish().expect("ends");
        });
        let all = replay_all(logs.path()).expect("each rank does the same again");
        assert_eq!(all.len(), RANKS as usize);
        for (rank, replayed) in (0..).zip(&all) {
            assert_eq!((replayed.rank, replayed.ranks, replayed.is_complete), (rank, RANKS, true));
            assert_eq!(replayed.scheme, format!("hybrid:groups={groups}"));
            // A step is at least ready, computed and averaged.
            assert!(replayed.events > 3 * STEPS && replayed.actions >= replayed.events, "{replayed:?}");
        }
        // A rank that is none of its group is refused.
        let file = logs.path().join("rank-3.log");
        let log = std::fs::read_to_string(&file).expect("was written");
        let place = format!("\"rank\":3,\"ranks\":{RANKS}}}");
        let other = place.replace('3', "9");
        assert_eq!(log.matches(&place).count(), 1, "{groups} groups: {}", log.lines().next().unwrap_or(""));
        std::fs::write(&file, log.replacen(&place, &other, 1)).expect("there is space");
        let error = replay_all(logs.path()).expect_err("there is no rank 9 of 4");
        assert!(matches!(&error, LogError::Form { line: 1, .. }), "{error}");
    }
}

/// Trains to the end of `steps`, from a checkpoint and to another one before step 11. Returns the
/// network.
fn train_kept(group: &Group, groups: u32, steps: u64, from: Option<&Path>, to: Option<&Path>) -> Vec<f32> {
    let (network, rank) = (network(), group.rank());
    let mut hybrid = Hybrid::new(group, &network, Some(groups), BATCH as u32).expect("divides four");
    let (across, layout) = (hybrid.across().clone(), hybrid.layout());
    let sync = "sync".parse().expect("is a scheme");
    let mut trainer = Trainer::new(&across, &sync, &layout, steps).expect("has memory");
    let mut sgd = Sgd::new(layout.parameters(), RATE, MOMENTUM);
    match from {
        None => trainer.parameters_mut().copy_from_slice(&hybrid.shard(&network.initial(7))),
        Some(folder) => {
            let saved = hybrid.restore(&mut trainer, folder).expect("is of these groups");
            sgd.velocity_mut().copy_from_slice(saved.own_vector("velocity").expect("was saved"));
        }
    }
    loop {
        if let Some(folder) = to.filter(|_| trainer.next_step() == 11) {
            hybrid.save(&mut trainer, folder, &[("velocity", sgd.velocity())]).expect("there is space");
        }
        let Some(mut step) = trainer.step().expect("goes on") else { break };
        let own = images(rank, step.number());
        let (shard, gradient) = step.vectors().expect("nothing is ready");
        let loss = hybrid.gradient(shard, &mut borrowed(&own), gradient).expect("goes on");
        step.update(|shard, gradient| sgd.step(shard, gradient), loss).expect("goes on");
    }
    let trained = trainer.finish().expect("ends");
    let (whole, are_equal) = hybrid.whole(&trained.parameters).expect("goes on");
    assert!(trained.parameters_equal && are_equal);
    whole
}

#[test]
fn a_hybrid_training_goes_on_from_a_checkpoint_bit_for_bit_and_other_groups_take_its_network() {
    for groups in [1, 2, 4] {
        let (folder, kept) = (Folder::new("hybrid-kept"), 11);
        let whole =
            with_group(Fabric::Shm, |group| train_kept(&group, groups, 25, None, Some(folder.path())));
        let names: Vec<_> = std::fs::read_dir(folder.path()).expect("was made").collect();
        assert_eq!(names.len(), 1, "one checkpoint of all groups");
        let resumed =
            with_group(Fabric::Tcp, |group| train_kept(&group, groups, 25, Some(folder.path()), None));
        assert_eq!(resumed, whole, "{groups} groups");
        let at_the_checkpoint = with_group(Fabric::Shm, |group| train_kept(&group, groups, kept, None, None));
        // Each other number of groups has the same network, and begins with it.
        for others in [1, 2, 4] {
            let folder = folder.path();
            let taken = with_group(Fabric::Shm, |group| {
                let hybrid = Hybrid::new(&group, &network(), Some(others), 1).expect("divides four");
                let (across, layout) = (hybrid.across().clone(), hybrid.layout());
                let sync = "sync".parse().expect("is a scheme");
                let mut trainer = Trainer::new(&across, &sync, &layout, 3).expect("has memory");
                if others != groups {
                    let error = hybrid.restore(&mut trainer, folder).expect_err("is of other groups");
                    assert!(error.to_string().contains(&format!("hybrid:groups={groups}")), "{error}");
                }
                hybrid.restore_parameters(&mut trainer, folder).expect("is a network");
                hybrid.whole(trainer.parameters_mut()).expect("goes on")
            });
            for (network, are_equal) in taken {
                assert!(are_equal);
                assert_eq!(network, at_the_checkpoint[0], "of {groups} groups in {others}");
            }
        }
    }
}
