//! One layer over the ranks: its bytes, its messages and their time.

use std::fmt;
use std::str::FromStr;

use super::{Layer, Machine, NUMBER_BYTES, Shape};

/// How fully connected layers are split. Convolutions are data parallel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// In the groups with which the layer communicates for the least time.
    #[default]
    Auto,
    /// Each rank has all weights and some images.
    Data,
    /// Each rank has some outputs and all images.
    Model,
    /// Model parallel inside of so many groups, data parallel across them.
    Groups(u32),
}

/// A text that names no split.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("no split: '{}'; give auto, data, model or groups=G with a number from 1", .text.escape_debug())]
pub struct SplitTextError {
    text: String,
}

impl FromStr for Split {
    type Err = SplitTextError;

    fn from_str(text: &str) -> Result<Self, SplitTextError> {
        let groups = || text.strip_prefix("groups=")?.parse().ok().filter(|&groups| groups > 0);
        match text {
            "auto" => Ok(Self::Auto),
            "data" => Ok(Self::Data),
            "model" => Ok(Self::Model),
            _ => groups().map(Self::Groups).ok_or_else(|| SplitTextError { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Data => formatter.write_str("data"),
            Self::Model => formatter.write_str("model"),
            Self::Groups(groups) => write!(formatter, "groups={groups}"),
        }
    }
}

/// The number of groups for which a rank sends the fewest bytes: √(N·MB/ofm), between 1 and N.
/// Activations of the first layer travel one way, so it has √(N·MB/(2·ofm)). Convolutions have N
/// groups of one rank.
#[must_use]
pub fn ideal_groups(layer: &Layer, is_first: bool, batch: u64, ranks: u32) -> f64 {
    let ranks = f64::from(ranks);
    match layer.shape() {
        Shape::Convolution { .. } => ranks,
        Shape::FullyConnected { outputs, .. } => {
            let ways = directions(is_first) as f64 / 2.0;
            (ways * ranks * batch as f64 / outputs as f64).sqrt().clamp(1.0, ranks)
        }
    }
}

/// How often activations travel: nobody needs the gradients of what the first layer reads.
fn directions(is_first: bool) -> u64 {
    if is_first { 1 } else { 2 }
}

/// The divisors of a number, in order.
pub(crate) fn divisors(number: u32) -> Vec<u32> {
    let small = (1..=number.isqrt()).filter(|divisor| number.is_multiple_of(*divisor));
    let mut all: Vec<u32> = small.flat_map(|divisor| [divisor, number / divisor]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The groups with which a layer communicates for the least time; the fewest of equals.
pub(crate) fn least_communication(divisors: &[u32], plan: impl Fn(u32) -> LayerPlan) -> u32 {
    let time_s = |groups: u32| {
        let plan = plan(groups);
        plan.exposed_s() + plan.overlapped_s()
    };
    let least = divisors
        .iter()
        .map(|&groups| (time_s(groups), groups))
        .min_by(|one, other| one.0.total_cmp(&other.0));
    least.map_or(1, |(_, groups)| groups)
}

/// Bytes that a rank sends in a step and receives as well, their messages, and their time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Bytes.
    pub bytes: u64,
    /// Messages.
    pub messages: u64,
    /// Seconds.
    pub time_s: f64,
}

impl Exchange {
    fn new(machine: &Machine, bytes: u64, messages: u64) -> Self {
        let rates = machine.rates();
        let time_s = bytes as f64 / rates.bytes_per_s + messages as f64 * rates.message_s;
        Self { bytes, messages, time_s }
    }
}

/// A layer over the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    ranks: u32,
    groups: u32,
    pass_s: f64,
    is_first: bool,
    activations: Exchange,
    weights: Exchange,
    late_s: f64,
}

impl LayerPlan {
    /// This layer in so many groups of so many ranks. The slowest rank counts: one of a group that
    /// has an image more, with an output more.
    pub(crate) fn new(
        layer: &Layer,
        is_first: bool,
        machine: &Machine,
        batch: u64,
        (ranks, groups): (u32, u32),
    ) -> Self {
        let members = u64::from(ranks / groups);
        let images = batch.div_ceil(u64::from(groups));
        let (weights, activations, operations) = match layer.shape() {
            Shape::Convolution { .. } => (layer.weights(), 0, layer.multiply_adds()),
            Shape::FullyConnected { inputs, outputs } => {
                let weights = inputs * outputs.div_ceil(members);
                (weights, inputs, weights)
            }
        };
        let rates = machine.rates();
        let communicating = if ranks > 1 { rates.communication_share } else { 0.0 };
        let flop_per_s = rates.flop_per_s * (1.0 - communicating);
        let directions = directions(is_first);
        let activation_bytes = directions * NUMBER_BYTES * activations * images;
        let weight_bytes = 2 * NUMBER_BYTES * weights;
        Self {
            ranks,
            groups,
            pass_s: 2.0 * operations as f64 * images as f64 / flop_per_s,
            is_first,
            activations: Exchange::new(
                machine,
                all_but_own(activation_bytes, members),
                directions * (members - 1),
            ),
            weights: Exchange::new(
                machine,
                all_but_own(weight_bytes, u64::from(groups)),
                2 * u64::from(groups - 1),
            ),
            late_s: 0.0,
        }
    }

    /// The same layer, whose weights come so much later than they are needed.
    pub(crate) fn delayed(self, late_s: f64) -> Self {
        Self { late_s, ..self }
    }

    /// Whether it is the first layer, of whose input nobody needs the gradients.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// The groups across which images are divided: all ranks for a data parallel layer, 1 for a
    /// model parallel one.
    #[must_use]
    pub fn groups(&self) -> u32 {
        self.groups
    }

    /// How it is split, as [`Split`] names it.
    #[must_use]
    pub fn split(&self) -> Split {
        match self.groups {
            groups if groups == self.ranks => Split::Data,
            1 => Split::Model,
            groups => Split::Groups(groups),
        }
    }

    /// The time of the forward pass.
    #[must_use]
    pub fn pass_s(&self) -> f64 {
        self.pass_s
    }

    /// The time of the passes for gradients: of the weights, and of what the layer reads unless
    /// it is the first.
    #[must_use]
    pub fn backward_s(&self) -> f64 {
        if self.is_first { self.pass_s } else { 2.0 * self.pass_s }
    }

    /// The time of all passes.
    #[must_use]
    pub fn computing_s(&self) -> f64 {
        self.pass_s + self.backward_s()
    }

    /// Activations and their gradients, which are exchanged while nothing computes.
    #[must_use]
    pub fn activations(&self) -> Exchange {
        self.activations
    }

    /// Weight gradients and weights, which are exchanged while other layers compute.
    #[must_use]
    pub fn weights(&self) -> Exchange {
        self.weights
    }

    /// The time in which activations are exchanged.
    #[must_use]
    pub fn exposed_s(&self) -> f64 {
        self.activations.time_s
    }

    /// The part of it before the forward pass; the rest follows the backward pass.
    #[must_use]
    pub fn exposed_before_s(&self) -> f64 {
        if self.is_first { self.exposed_s() } else { self.exposed_s() / 2.0 }
    }

    /// The time in which weight gradients are exchanged.
    #[must_use]
    pub fn overlapped_s(&self) -> f64 {
        self.weights.time_s
    }

    /// The part of it that is hidden behind computing.
    #[must_use]
    pub fn hidden_s(&self) -> f64 {
        (self.overlapped_s() - self.late_s).max(0.0)
    }

    /// How much later the weights are there than the next forward pass would use them if it never
    /// waited.
    #[must_use]
    pub fn late_s(&self) -> f64 {
        self.late_s
    }
}

/// What one of `parts` sends of data of which it has one part: bytes·(parts−1)/parts.
fn all_but_own(bytes: u64, parts: u64) -> u64 {
    (u128::from(bytes) * u128::from(parts - 1)).div_ceil(u128::from(parts)) as u64
}
