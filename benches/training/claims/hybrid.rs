//! Das et al.: hybrid parallelism on real ranks, whose bytes are counted.

use std::fmt::Write as _;

use pleach::{Fabric, Group};
use pleach_training::{Hybrid, Perceptron, Sgd, Trainer};

use super::images::Data;
use super::ranks::with_group;
use super::{Claim, Material, Verdict, head};

pub(crate) const HYBRID: &str = "Das: hybrid balance";

const RANKS: u32 = 4;
const HIDDEN: [usize; 2] = [512, 512];
/// Images of a rank in a step.
const BATCH: usize = 64;
/// The last one is not counted: the training ends with it.
const STEPS: u64 = 4;
/// Bytes of an element.
const BYTES: u64 = 4;

/// What a training found.
struct Found {
    /// Bytes that this rank has sent in all: of activations, and of gradients.
    sent: [f64; 2],
    groups: u32,
}

/// Bytes that a rank has sent in calls of these kinds, if each call sends no byte twice.
fn sent(group: &Group) -> f64 {
    let report = group.report();
    let ranks = f64::from(group.world_size());
    let of_shape = |shape: &pleach_collectives::observe::ShapeReport| match shape.collective {
        "all-reduce" => 2.0 * shape.bytes as f64 * (ranks - 1.0) / ranks,
        "all-gather" | "reduce-scatter" => shape.bytes as f64 * (ranks - 1.0) / ranks,
        _ => 0.0,
    };
    report.shapes.iter().map(of_shape).sum()
}

/// Trains for some steps. `groups`: `None` chooses by the formula.
fn train(group: &Group, digits: &Data, groups: Option<u32>) -> Result<Found, Box<dyn std::error::Error>> {
    let (inputs, classes) = digits.shape();
    let network = Perceptron::new(inputs, &HIDDEN, classes);
    let mut hybrid = Hybrid::new(group, &network, groups, BATCH as u32)?;
    let (across, layout) = (hybrid.across().clone(), hybrid.layout());
    // A planned order would be agreed on among the steps.
    let mut trainer = Trainer::new(&across, &"sync:order=fifo".parse()?, &layout, STEPS)?;
    trainer.parameters_mut().copy_from_slice(&hybrid.shard(&network.initial(7)));
    let mut sgd = Sgd::new(layout.parameters(), 0.1, 0.0);
    let count = |hybrid: &Hybrid| [sent(hybrid.within()), sent(hybrid.across())];
    let [mut before, mut after] = [[0.0; 2]; 2];
    while let Some(mut step) = trainer.step()? {
        match step.number() {
            0 => before = count(&hybrid),
            number if number + 1 == STEPS => after = count(&hybrid),
            _ => {}
        }
        let first = (step.number() * u64::from(RANKS) + u64::from(group.rank())) as usize * BATCH;
        let (shard, gradient) = step.vectors()?;
        let loss =
            hybrid.gradient(shard, &mut (first..first + BATCH).map(|at| digits.learned(at)), gradient)?;
        step.update(|shard, gradient| sgd.step(shard, gradient), loss)?;
    }
    let groups = across.world_size();
    trainer.finish()?;
    Ok(Found { sent: [after[0] - before[0], after[1] - before[1]], groups })
}

/// Bytes that all ranks send in a step: of activations, and of gradients. With B images of a group
/// of m ranks, a rank sends to each of the others its own inputs and labels, twice its units of
/// each hidden layer, and once its outputs; and of each parameter of its shard 2·(G−1)/G. Blocks of
/// units are filled up.
fn formula(inputs: usize, classes: usize, groups: u64) -> [u64; 2] {
    let all = u64::from(RANKS);
    let members = all / groups;
    let block = |units: usize| (units as u64).div_ceil(members);
    let own = BATCH as u64 * (inputs as u64 + 1);
    let units = BATCH as u64 * members * (2 * block(HIDDEN[0]) + 2 * block(HIDDEN[1]) + block(classes));
    let layer = |inputs: usize, units: usize| (inputs as u64 + 1) * block(units);
    let shard = layer(inputs, HIDDEN[0]) + layer(HIDDEN[0], HIDDEN[1]) + layer(HIDDEN[1], classes);
    [all * BYTES * (members - 1) * (own + units), all * 2 * BYTES * shard * (groups - 1) / groups]
}

/// Counted bytes of hybrid trainings.
pub(crate) fn fewest_bytes(material: &Material) -> Result<Claim, String> {
    let (inputs, classes) = material.digits().shape();
    let run = |groups| -> Result<Vec<Found>, String> {
        let ranks = with_group(
            Fabric::Tcp,
            RANKS,
            |_| {},
            |group| train(&group, material.digits(), groups).map_err(|error| error.to_string()),
        );
        ranks.into_iter().collect()
    };
    let mut table =
        head(&["groups of ranks", "activations, counted", "by formula", "gradients, counted", "by formula"]);
    let (mut is_equal, mut least) = (true, (u64::MAX, 0));
    for groups in [1, 2, 4] {
        let ranks = run(Some(groups))?;
        let counted = [0, 1].map(|kind| {
            let bytes: f64 = ranks.iter().map(|rank| rank.sent[kind]).sum();
            bytes.round() as u64 / (STEPS - 1)
        });
        let expected = formula(inputs, classes, u64::from(groups));
        is_equal &= counted == expected;
        least = least.min((counted[0] + counted[1], groups));
        let [activations, gradients] = counted;
        let _ = writeln!(
            table,
            "| {groups} of {} | {activations} | {} | {gradients} | {} |",
            RANKS / groups,
            expected[0],
            expected[1]
        );
    }
    let chosen = run(None)?[0].groups;
    let (bytes, fewest) = least;
    Ok(Claim {
        name: HYBRID,
        claim: "hybrid parallelism sends the fewest bytes for fully connected layers",
        experiment: format!(
            "`hybrid` on 4 ranks over tcp, {} steps, network {inputs}-{}-{}-{classes}, {BATCH} images a rank: 1 \
             group is model parallel, 4 groups are data parallel",
            STEPS - 1,
            HIDDEN[0],
            HIDDEN[1]
        ),
        acceptance: "counted bytes = formula, to the byte; `groups=auto` takes the fewest",
        found: format!(
            "{} in each row; fewest by {fewest} groups, {bytes} B a step; `auto` takes {chosen}",
            if is_equal { "equal" } else { "not equal" }
        ),
        verdict: Verdict::of(
            is_equal && chosen == fewest,
            "the ranks send other bytes than the formula counts, or others are fewer than those of `auto`",
        ),
        table,
    })
}
