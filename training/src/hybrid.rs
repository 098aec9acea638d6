//! Hybrid parallelism: the layers of a network are divided inside of groups, and the images across
//! them (Das et al., arXiv 1602.06709, section 3.3).
//!
//! N ranks are G groups of m = N/G members: rank g·m + k is member k of group g. Each layer has its
//! units cut in m blocks of equal length, the last ones filled up with zeros. Member k has block k
//! of each layer: its *shard* of the parameters ([`Shards`]). Each rank draws a batch of its own. A
//! group works on the images of its members, so
//!
//! * forward, members gather what a layer reads (all-gather), and each computes its block;
//! * backward, each member computes what its block asks of all inputs. These are added up, and each
//!   member gets the sum for its own block below (reduce-scatter);
//! * the gradient of a shard is averaged over the ranks that have the same one, one in each group.
//!
//! The last is `sync` on shards. So a [`Trainer`] on [`Hybrid::across`] does it,
//! and no policy knows of activations: to compute a gradient is an exchange inside of the group,
//! and nothing else changes.
//!
//! **Invariants:** elements that fill a block up are 0, and their gradients are 0. All ranks have
//! the parameters, up to rounding, of one rank that trains on the images of all.
//!
//! **Bytes** that a rank sends in a step, with B images of a group, by algorithms that send no byte
//! twice: 4·B·(m−1)/m for each input of the first layer, for the class of an image, and for each
//! output of the last layer, which the softmax needs; twice that for each unit of a hidden layer;
//! and 8·(G−1)/G for each parameter of the shard. The paper counts neither classes nor outputs.
//! [`Hybrid::bytes_per_step`] is this sum over all ranks.
//!
//! **Checkpoints** ([`Hybrid::save`]) are of all ranks, each with its shard. A training in other
//! groups, or on another number of ranks, takes the network of the shards alone. **Logs**
//! ([`Hybrid::logged`]) are of what `sync` was told on each rank, among those with its shard.
//!
//! ```
//! use pleach_collectives::{Group, Options};
//! use pleach_training::{Hybrid, Perceptron, Sgd, Trainer};
//! # use pleach_transport::rendezvous::World;
//! # let group = Group::join(&Options::new(World::alone()))?;
//! let network = Perceptron::new(2, &[3], 2);
//! let mut hybrid = Hybrid::new(&group, &network, None, 1)?;
//! let mut trainer = Trainer::new(hybrid.across(), &"sync".parse()?, &hybrid.layout(), 20)?;
//! trainer.parameters_mut().copy_from_slice(&hybrid.shard(&network.initial(1)));
//! let mut sgd = Sgd::new(hybrid.layout().parameters(), 0.1, 0.9);
//! while let Some(mut step) = trainer.step()? {
//!     let (shard, gradient) = step.vectors()?;
//!     let loss = hybrid.gradient(shard, &mut [(&[0.5, -1.0][..], 1)].into_iter(), gradient)?;
//!     step.update(|shard, gradient| sgd.step(shard, gradient), loss)?;
//! }
//! let (parameters, are_equal) = hybrid.whole(&trainer.finish()?.parameters)?;
//! assert!(are_equal && parameters.len() == network.parameters());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::ops::Range;
use std::path::{Path, PathBuf};

use pleach_collectives::{CollectiveError, Group, Rank, RankSpace, ReduceOp, SplitError};

use crate::checkpoint::{Checkpoint, CheckpointError, RankState, vector};
use crate::interpreter::digest;
use crate::layout::Layout;
use crate::parallelize::{Layer, Machine, Network, PlanError, Planner, Shape, Split};
use crate::perceptron::{Perceptron, Sample, add_scaled, cross_entropy, softmax};
use crate::replay::Whole;
use crate::scheme::Scheme;
use crate::trainer::{Kept, TrainError, Trainer};

/// The machine for whose rates groups are chosen. What a step takes on another machine differs, and
/// which number of groups sends the fewest bytes does not.
const MACHINE: &str = "haswell-aries";

/// Largest number of a class: classes travel as `f32`, which holds such numbers exactly.
const CLASSES_MAX: usize = 1 << 24;

/// Why there is no hybrid training, or no gradient.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum HybridError {
    /// The ranks cannot be cut in so many groups.
    #[error("{groups} groups of {ranks} ranks: the groups would differ; give groups={nearest}, or auto")]
    Groups {
        /// The groups.
        groups: u32,
        /// The ranks.
        ranks: u32,
        /// A number of groups that there can be.
        nearest: u32,
    },
    /// The planner does not take the network.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The ranks could not be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A collective of the groups failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A rank has another number of images than it said.
    #[error(
        "{given} images in a batch of {expected}, of {inputs} inputs and {classes} classes; give each rank as many"
    )]
    Samples {
        /// Images that fit.
        given: usize,
        /// What was said.
        expected: usize,
        /// Inputs of an image.
        inputs: usize,
        /// Classes that there are.
        classes: usize,
    },
    /// A slice is not as long as the shard.
    #[error("{given} elements for a shard of {expected}; give slices of the layout's length")]
    Length {
        /// The elements.
        given: usize,
        /// Those of the shard.
        expected: usize,
    },
}

/// One layer, as a member has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerShard {
    inputs: usize,
    /// Of the whole layer.
    units: usize,
    /// Units of a member, as many for each: the last ones may be none of the layer.
    block: usize,
    /// In the shard: a row of the block for each input.
    weights: Range<usize>,
    biases: Range<usize>,
    /// Where the layer begins in the parameters of the network.
    begin: usize,
}

impl LayerShard {
    /// The units of a member, as they are numbered in the layer.
    fn own(&self, member: usize) -> Range<usize> {
        let begin = (member * self.block).min(self.units);
        begin..(begin + self.block).min(self.units)
    }
}

/// A network that is cut in shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    layers: Vec<LayerShard>,
    members: usize,
}

impl Shards {
    /// The shards of so many members, at least 1.
    #[must_use]
    pub fn new(network: &Perceptron, members: u32) -> Self {
        let members = members.max(1) as usize;
        let (mut at, mut begin) = (0, 0);
        let lengths = network.lengths();
        let layer = |lengths: &[usize]| {
            let (all_weights, units) = (lengths[0], lengths[1]);
            let inputs = all_weights.checked_div(units).unwrap_or(0);
            let block = units.div_ceil(members);
            let weights = at..at + inputs * block;
            let biases = weights.end..weights.end + block;
            at = biases.end;
            let layer = LayerShard { inputs, units, block, weights, biases, begin };
            begin += all_weights + units;
            layer
        };
        let layers = lengths.chunks_exact(2).map(layer).collect();
        Self { layers, members }
    }

    /// The lengths of weights and biases of a shard, layer by layer: the same for each member.
    #[must_use]
    pub fn layout(&self) -> Layout {
        let lengths = self.layers.iter().flat_map(|layer| [layer.weights.len(), layer.block]);
        Layout::of(&lengths.collect::<Vec<_>>())
    }

    /// A member's shard of these parameters.
    #[must_use]
    pub fn shard(&self, member: u32, parameters: &[f32]) -> Vec<f32> {
        let mut shard = vec![0.0; self.layout().parameters()];
        self.each_run(member as usize, |whole, own| shard[own].copy_from_slice(&parameters[whole]));
        shard
    }

    /// Stores a member's shard in the parameters of the network.
    fn store(&self, member: usize, shard: &[f32], parameters: &mut [f32]) {
        self.each_run(member, |whole, own| parameters[whole].copy_from_slice(&shard[own]));
    }

    /// Bytes of each call inside of a group in a step, of all members together: the images and
    /// their classes, then forward what each layer computes, and backward what is asked of the
    /// hidden ones. `batch`: images of a rank.
    #[must_use]
    pub fn calls(&self, batch: usize) -> Vec<u64> {
        let (members, mut calls) = (self.members as u64, Vec::new());
        let images = members * batch as u64;
        if let Some(first) = self.layers.first() {
            calls.push(BYTES * images * (first.inputs as u64 + 1));
        }
        for (number, layer) in self.layers.iter().enumerate() {
            let bytes = BYTES * members * images * layer.block as u64;
            let is_last = number + 1 == self.layers.len();
            calls.extend(std::iter::repeat_n(bytes, if is_last { 1 } else { 2 }));
        }
        calls
    }

    /// Bytes of the blocks that a rank sends in a step inside of its group.
    #[must_use]
    pub fn activation_bytes(&self, batch: usize) -> u64 {
        let members = self.members as u64;
        // A member has an m-th of each call, and sends it to each of the others.
        self.calls(batch).into_iter().map(|bytes| bytes / members * (members - 1)).sum()
    }

    /// Calls with each run of elements of a member: where it is in the network, and in the shard.
    fn each_run(&self, member: usize, mut call: impl FnMut(Range<usize>, Range<usize>)) {
        for layer in &self.layers {
            let own = layer.own(member);
            for row in 0..=layer.inputs {
                // Biases follow the weights, in the network as in the shard.
                let (of_network, of_shard) =
                    (layer.begin + row * layer.units, layer.weights.start + row * layer.block);
                call(of_network + own.start..of_network + own.end, of_shard..of_shard + own.len());
            }
        }
    }
}

/// The number of groups with which a step of a network is predicted to take the least time: near
/// √(N·MB/ofm) for each layer alone (see [`parallelize`](crate::parallelize)). It is one for all
/// layers: between layers with groups of their own a rank would change its images, and all
/// activations would travel once more, which the planner does not count.
///
/// `images` are those of a rank in a step.
///
/// # Errors
///
/// The planner does not take the network.
pub fn groups_of_least_time(network: &Perceptron, images: u32, ranks: u32) -> Result<u32, PlanError> {
    let lengths = network.lengths();
    let layer = |(number, lengths): (usize, &[usize])| {
        let inputs = lengths[0].checked_div(lengths[1]).unwrap_or(0) as u64;
        let shape = Shape::FullyConnected { inputs, outputs: lengths[1] as u64 };
        Layer::new(format!("fc{}", number + 1), shape)
    };
    let layers = lengths.chunks_exact(2).enumerate().map(layer).collect::<Result<_, _>>()?;
    let network = Network::new("perceptron", layers)?;
    let machine = Machine::named(MACHINE).expect("is built in");
    let planner = Planner::new(&network, &machine, u64::from(images) * u64::from(ranks));
    let mut best = (f64::INFINITY, 1);
    for groups in (1..=ranks).filter(|groups| ranks.is_multiple_of(*groups)) {
        let step_s = planner.with_split(Split::Groups(groups)).plan(ranks)?.step_s();
        if step_s < best.0 {
            best = (step_s, groups);
        }
    }
    Ok(best.1)
}

/// The number of groups of so many ranks, which is a divisor of theirs; `None`: that of the least
/// time, as [`groups_of_least_time`] says.
///
/// # Errors
///
/// [`HybridError::Groups`], [`HybridError::Plan`].
pub fn groups_of(
    network: &Perceptron,
    groups: Option<u32>,
    images: u32,
    ranks: u32,
) -> Result<u32, HybridError> {
    let groups = match groups {
        Some(groups) => groups,
        None => groups_of_least_time(network, images, ranks)?,
    };
    if groups == 0 || !ranks.is_multiple_of(groups) {
        let divisors = (1..=ranks).filter(|divisor| ranks.is_multiple_of(*divisor));
        let nearest = divisors.min_by_key(|divisor| divisor.abs_diff(groups)).unwrap_or(1);
        return Err(HybridError::Groups { groups, ranks, nearest });
    }
    Ok(groups)
}

/// One rank of a hybrid training; see the module.
pub struct Hybrid {
    all: Group,
    /// The ranks that divide the layers with this one.
    within: Group,
    /// The ranks with the same shard.
    across: Group,
    network: Perceptron,
    shards: Shards,
    /// Images of a rank in a step.
    batch: usize,
    passes: Passes,
}

/// What a step keeps of its forward pass, and memory that is used again.
#[derive(Default)]
struct Passes {
    /// By layer: what it reads, image by image.
    inputs: Vec<Vec<f32>>,
    /// By layer: the block of this member, image by image.
    outputs: Vec<Vec<f32>>,
    classes: Vec<usize>,
    sent: Vec<f32>,
    received: Vec<f32>,
    error: Vec<f32>,
}

impl Hybrid {
    /// Splits a group; `images` are those of each rank in a step, as many on all. All ranks call it
    /// alike. `None`: as many groups as [`groups_of_least_time`] says.
    ///
    /// # Errors
    ///
    /// See [`HybridError`].
    pub fn new(
        group: &Group,
        network: &Perceptron,
        groups: Option<u32>,
        images: u32,
    ) -> Result<Self, HybridError> {
        let ranks = group.world_size();
        let groups = groups_of(network, groups, images, ranks)?;
        let members = ranks / groups;
        let shards = Shards::new(network, members);
        let grid = RankSpace::new(&[groups, members], ranks).map_err(SplitError::from)?;
        let (within, across) = (group.line(&grid, 1)?, group.line(&grid, 0)?);
        let batch = images as usize;
        let (all, network, passes) = (group.clone(), network.clone(), Passes::default());
        Ok(Self { all, within, across, network, shards, batch, passes })
    }

    /// The ranks with this rank's shard, one of each group: those that average its gradients.
    #[must_use]
    pub fn across(&self) -> &Group {
        &self.across
    }

    /// The ranks of this rank's group.
    #[must_use]
    pub fn within(&self) -> &Group {
        &self.within
    }

    /// The layout of a shard.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.shards.layout()
    }

    /// This rank's shard of these parameters of the network.
    #[must_use]
    pub fn shard(&self, parameters: &[f32]) -> Vec<f32> {
        self.shards.shard(self.within.rank(), parameters)
    }

    /// Bytes that all ranks together send in a step: of activations and their gradients, and of
    /// gradients of parameters; see the module.
    #[must_use]
    pub fn bytes_per_step(&self) -> [u64; 2] {
        let (members, groups) = (self.shards.members as u64, u64::from(self.across.world_size()));
        let shard = self.layout().parameters() as u64;
        [members * groups * self.activation_bytes(), members * 2 * BYTES * shard * (groups - 1)]
    }

    /// Bytes of the blocks that this rank sends in a step inside of its group.
    #[must_use]
    pub fn activation_bytes(&self) -> u64 {
        self.shards.activation_bytes(self.batch)
    }

    /// Stores the gradient of the mean loss over the images of this rank's group, at its shard.
    /// Returns that loss. All ranks of the group call it with their own images.
    ///
    /// # Errors
    ///
    /// [`HybridError::Samples`], [`HybridError::Length`]; a collective failed.
    pub fn gradient(
        &mut self,
        shard: &[f32],
        samples: &mut dyn Iterator<Item = Sample<'_>>,
        gradient: &mut [f32],
    ) -> Result<f32, HybridError> {
        let expected = self.layout().parameters();
        for given in [shard.len(), gradient.len()] {
            if given != expected {
                return Err(HybridError::Length { given, expected });
            }
        }
        gradient.fill(0.0);
        self.gather_images(samples)?;
        let layers = self.shards.layers.len();
        self.passes.outputs.resize(layers, Vec::new());
        self.passes.inputs.resize(layers + 1, Vec::new());
        for number in 0..layers {
            self.forward(number, shard)?;
        }
        let loss = self.begin_backward();
        for number in (0..layers).rev() {
            self.backward(number, shard, gradient)?;
        }
        Ok(loss)
    }

    /// The parameters of the network, of the shards of this rank's group; and whether all ranks
    /// have the same, bit for bit. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`HybridError::Length`]; a collective failed.
    pub fn whole(&self, shard: &[f32]) -> Result<(Vec<f32>, bool), HybridError> {
        let expected = self.layout().parameters();
        if shard.len() != expected {
            return Err(HybridError::Length { given: shard.len(), expected });
        }
        let mut shards = vec![0.0; shard.len() * self.shards.members];
        self.within.all_gather(shard, &mut shards[..])?;
        let layers = &self.shards.layers;
        let parameters = layers.iter().map(|layer| (layer.inputs + 1) * layer.units).sum();
        let mut whole = vec![0.0; parameters];
        for (member, shard) in shards.chunks_exact(expected.max(1)).enumerate() {
            self.shards.store(member, shard, &mut whole);
        }
        let own = digest(&whole);
        let mut extremes = [own, !own];
        self.all.all_reduce(&mut extremes[..], ReduceOp::Max)?;
        Ok((whole, extremes[0] == !extremes[1]))
    }
}

/// Checkpoints and logs of all ranks. Each call is made by all of them, with a trainer of
/// [`Hybrid::across`].
impl Hybrid {
    /// As [`Trainer::save`], of all ranks.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::save`].
    pub fn save(
        &self,
        trainer: &mut Trainer,
        folder: &Path,
        own: &[(&str, &[f32])],
    ) -> Result<PathBuf, TrainError> {
        trainer.save_as(&self.kept(), folder, own)
    }

    /// As [`Trainer::restore`], of all ranks: from a checkpoint of as many, in as many groups.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::restore`].
    pub fn restore(&self, trainer: &mut Trainer, folder: &Path) -> Result<RankState, TrainError> {
        trainer.restore_as(&self.kept(), folder)
    }

    /// Begins at step 0 with the network of the newest checkpoint of a folder: one of any groups,
    /// or the mean of the ranks of another scheme.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`].
    pub fn restore_parameters(&self, trainer: &mut Trainer, folder: &Path) -> Result<Checkpoint, TrainError> {
        let read = |checkpoint: &Checkpoint| {
            checkpoint.expect(None, &self.network.lengths())?;
            Ok(self.shard(&self.network_of(checkpoint)?))
        };
        trainer.restore_parameters_as(&self.kept(), folder, &read)
    }

    /// As [`Trainer::logged`], of all ranks: the log of a rank is of the average of its shard, and
    /// has the rank's number among all. Replayed is that average; activations are no events.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::logged`].
    pub fn logged(&self, trainer: Trainer, folder: &Path) -> Result<Trainer, TrainError> {
        let place = (self.all.rank(), self.all.world_size());
        trainer.logged_as(folder, Some(Whole::new(&self.scheme(), place)))
    }

    /// With the number of groups that there are.
    fn scheme(&self) -> Scheme {
        Scheme::Hybrid { groups: Some(self.across.world_size()) }
    }

    fn kept(&self) -> Kept {
        Kept::new(&self.all, self.scheme().to_string(), self.network.lengths())
    }

    /// The parameters of the network that a checkpoint is of.
    fn network_of(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>, CheckpointError> {
        let Ok(Scheme::Hybrid { groups }) = checkpoint.manifest().scheme.parse() else {
            return checkpoint.mean_parameters();
        };
        // The first group has all shards.
        let members = checkpoint.ranks() / groups.unwrap_or(1).clamp(1, checkpoint.ranks());
        let shards = Shards::new(&self.network, members);
        let (length, mut whole) = (shards.layout().parameters(), vec![0.0; self.network.parameters()]);
        for member in 0..members {
            let saved = checkpoint.rank(member)?;
            shards.store(member as usize, vector(&saved, "parameters", length)?, &mut whole);
        }
        Ok(whole)
    }
}

/// Bytes of an element.
const BYTES: u64 = size_of::<f32>() as u64;

/// The two passes of a group over its images.
impl Hybrid {
    /// Images of the group in a step.
    fn images(&self) -> usize {
        self.batch * self.shards.members
    }

    /// Gathers the images of all members, and their classes.
    fn gather_images(&mut self, samples: &mut dyn Iterator<Item = Sample<'_>>) -> Result<(), HybridError> {
        let ends = |layers: &[LayerShard]| Some((layers.first()?.inputs, layers.last()?.units));
        let (inputs, classes) = ends(&self.shards.layers).unwrap_or_default();
        let passes = &mut self.passes;
        passes.sent.clear();
        let mut given = 0;
        for (image, class) in samples.take(self.batch + 1) {
            if image.len() == inputs && class < classes.min(CLASSES_MAX) {
                given += 1;
            }
            passes.sent.extend_from_slice(image);
            passes.sent.push(class as f32);
        }
        let record = inputs + 1;
        if given != self.batch || passes.sent.len() != self.batch * record {
            return Err(HybridError::Samples { given, expected: self.batch, inputs, classes });
        }
        gather(&self.within, &passes.sent, &mut passes.received)?;
        if passes.inputs.is_empty() {
            passes.inputs.push(Vec::new());
        }
        passes.inputs[0].clear();
        passes.classes.clear();
        for image in passes.received.chunks_exact(record) {
            passes.inputs[0].extend_from_slice(&image[..inputs]);
            passes.classes.push(image[inputs] as usize);
        }
        Ok(())
    }

    /// Computes this member's block of a layer for all images, and gathers the others.
    fn forward(&mut self, number: usize, shard: &[f32]) -> Result<(), HybridError> {
        let images = self.images();
        let layers = &self.shards.layers;
        let layer = &layers[number];
        let Passes { inputs, outputs, received, .. } = &mut self.passes;
        let output = &mut outputs[number];
        output.clear();
        for input in inputs[number].chunks_exact(layer.inputs.max(1)) {
            let begin = output.len();
            output.extend_from_slice(&shard[layer.biases.clone()]);
            let rows = shard[layer.weights.clone()].chunks_exact(layer.block.max(1));
            // Most pixels of a digit are 0.
            for (row, input) in rows.zip(input).filter(|(_, input)| **input != 0.0) {
                add_scaled(&mut output[begin..], *input, row);
            }
        }
        if number + 1 < layers.len() {
            output.iter_mut().for_each(|unit| *unit = libm::tanhf(*unit));
        }
        gather(&self.within, output, received)?;
        // Blocks of members become rows of images, without what fills them up.
        let above = &mut inputs[number + 1];
        above.clear();
        above.resize(images * layer.units, 0.0);
        for (member, blocks) in received.chunks_exact((images * layer.block).max(1)).enumerate() {
            let own = layer.own(member);
            let rows = above.chunks_exact_mut(layer.units.max(1));
            for (row, block) in rows.zip(blocks.chunks_exact(layer.block.max(1))) {
                row[own.clone()].copy_from_slice(&block[..own.len()]);
            }
        }
        Ok(())
    }

    /// The loss, and its slopes by the outputs of this member's block of the last layer.
    fn begin_backward(&mut self) -> f32 {
        let (images, member) = (self.images(), self.within.rank() as usize);
        let Some(layer) = self.shards.layers.last() else { return 0.0 };
        let Passes { inputs, classes, error, .. } = &mut self.passes;
        let (own, scale) = (layer.own(member), 1.0 / images as f32);
        let Some(said) = inputs.last_mut() else { return 0.0 };
        error.clear();
        error.resize(images * layer.block, 0.0);
        let mut loss = 0.0;
        let rows = said.chunks_exact_mut(layer.units.max(1)).zip(error.chunks_exact_mut(layer.block.max(1)));
        for ((said, error), class) in rows.zip(classes) {
            softmax(said);
            loss += scale * cross_entropy(said[*class]);
            // The gradient of cross-entropy after softmax: what was said minus what is true.
            said[*class] -= 1.0;
            for (error, said) in error.iter_mut().zip(&said[own.clone()]) {
                *error = scale * said;
            }
        }
        loss
    }

    /// Adds the gradient of this member's block of a layer, and goes on to its block below.
    fn backward(&mut self, number: usize, shard: &[f32], gradient: &mut [f32]) -> Result<(), HybridError> {
        let images = self.images();
        let layers = &self.shards.layers;
        let layer = &layers[number];
        let Passes { inputs, outputs, sent, error, .. } = &mut self.passes;
        let errors = error.chunks_exact(layer.block.max(1));
        for (input, error) in inputs[number].chunks_exact(layer.inputs.max(1)).zip(errors) {
            add_scaled(&mut gradient[layer.biases.clone()], 1.0, error);
            let rows = gradient[layer.weights.clone()].chunks_exact_mut(layer.block.max(1));
            for (row, input) in rows.zip(input).filter(|(_, input)| **input != 0.0) {
                add_scaled(row, *input, error);
            }
        }
        let Some(below) = number.checked_sub(1) else { return Ok(()) };
        let block = layers[below].block;
        sent.clear();
        sent.resize(self.shards.members * images * block, 0.0);
        for (image, error) in error.chunks_exact(layer.block.max(1)).enumerate() {
            let rows = shard[layer.weights.clone()].chunks_exact(layer.block.max(1));
            for (input, row) in rows.enumerate() {
                let blame: f32 = row.iter().zip(error).map(|(weight, error)| weight * error).sum();
                sent[(input / block * images + image) * block + input % block] = blame;
            }
        }
        error.clear();
        error.resize(images * block, 0.0);
        if self.shards.members == 1 {
            error.copy_from_slice(sent);
        } else {
            self.within.reduce_scatter(&sent[..], &mut error[..], ReduceOp::Sum)?;
        }
        for (error, active) in error.iter_mut().zip(&outputs[below]) {
            *error *= 1.0 - active * active;
        }
        Ok(())
    }
}

/// Gathers as many elements of each rank; a rank alone has its own.
fn gather(group: &Group, own: &[f32], all: &mut Vec<f32>) -> Result<(), CollectiveError> {
    let ranks: Rank = group.world_size();
    if ranks == 1 {
        own.clone_into(all);
        return Ok(());
    }
    all.resize(own.len() * ranks as usize, 0.0);
    group.all_gather(own, &mut all[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_as_long_for_each_member_and_are_the_network_again() {
        for members in 1..=7 {
            let network = Perceptron::new(5, &[7, 4], 3);
            let shards = Shards::new(&network, members);
            let parameters: Vec<f32> = (1_u16..).map(f32::from).take(network.parameters()).collect();
            let mut again = vec![0.0; parameters.len()];
            let mut sum = 0.0;
            for member in 0..members {
                let shard = shards.shard(member, &parameters);
                assert_eq!(shard.len(), shards.layout().parameters());
                sum += shard.iter().sum::<f32>();
                shards.store(member as usize, &shard, &mut again);
            }
            // Each element is in one shard, and the others are 0.
            assert_eq!((again, sum), (parameters.clone(), parameters.iter().sum::<f32>()), "{members}");
        }
    }

    #[test]
    fn groups_are_a_divisor_near_the_root_that_the_paper_gives() {
        // One layer of 4096 inputs and outputs, 64 ranks, 512 images: √(64·512/4096) = 2.8, and one
        // way of the first layer's activations makes it 2.
        let wide = Perceptron::new(4096, &[], 4096);
        assert!([2, 4].contains(&groups_of_least_time(&wide, 8, 64).expect("is planned")));
        // Few outputs and many images: data parallel.
        let narrow = Perceptron::new(64, &[], 2);
        assert_eq!(groups_of_least_time(&narrow, 4096, 4).expect("is planned"), 4);
        assert_eq!(groups_of_least_time(&narrow, 1, 1).expect("is planned"), 1);
    }
}
