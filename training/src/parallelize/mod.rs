//! How synchronous training of a network is split over ranks, and what that brings (Das et al.,
//! arXiv 1602.06709).
//!
//! A convolution is *data parallel*: each rank has all weights and some images of the minibatch. A
//! fully connected layer is *hybrid*: the ranks are cut in G groups of m. Ranks of a group divide
//! the outputs of the layer among them (*model parallel*), and groups divide the images. G = N is
//! data parallel, G = 1 is model parallel. For each layer of N ranks and a minibatch of MB images a
//! rank sends
//!
//! * weight gradients and weights, 2·4·ifm·ofm/m·(G−1)/G bytes in 2(G−1) messages (a convolution:
//!   2·4·weights·(N−1)/N bytes in 2(N−1) messages), while other layers compute;
//! * activations forward and their gradients backward, 2·4·ifm·(MB/G)·(m−1)/m bytes in 2(m−1)
//!   messages, while nothing computes.
//!
//! The bytes are fewest at G = √(N·MB/ofm). [`Planner`] takes the divisor of N with which a layer
//! communicates for the least time, messages included.
//!
//! The time of a step follows from one timeline: the passes of all layers, one network a rank, and
//! a next forward pass that waits at each layer for its weights. The order of weight gradients is
//! first come, first served, or planned ([`crate::order`]); the exchanges of two layers may change
//! places after any message, which costs nothing.
//!
//! **Invariants:** everything is a function of the arguments. A step is never shorter than its
//! computing. [`Plan::bound`] is never below [`Plan::speedup`].
//!
//! ```
//! use pleach_training::parallelize::{Machine, Network, Planner};
//!
//! let network = Network::named("vgg-a").expect("is built in");
//! let machine = Machine::named("haswell-aries").expect("is built in");
//! let plan = Planner::new(&network, &machine, 512).plan(128)?;
//! assert!(plan.speedup() > 90.0 && plan.speedup() < plan.bound());
//! # Ok::<(), pleach_training::parallelize::PlanError>(())
//! ```

mod error;
#[cfg(feature = "files")]
mod file;
mod machine;
mod network;
mod split;
#[cfg(test)]
mod tests;
mod timeline;

pub use error::PlanError;
#[cfg(feature = "files")]
pub use file::{FILE_BYTES_MAX, FileError, machine_from_toml, network_from_toml};
pub use machine::{MACHINES, Machine, Rates};
pub use network::{DIMENSION_MAX, LAYERS_MAX, Layer, NETWORKS, NUMBER_BYTES, Network, Shape};
pub use split::{Exchange, LayerPlan, Split, SplitTextError, ideal_groups};
pub use timeline::OrderRule;

use split::{divisors, least_communication};
use timeline::{Timeline, timeline};

/// Most images of a minibatch.
pub const BATCH_MAX: u64 = 1 << 32;

/// Most ranks of a plan.
pub const RANKS_MAX: u32 = 1 << 16;

/// The least share of the ideal speed-up at the optimal design point.
pub const DESIGN_EFFICIENCY: f64 = 0.75;

/// A speed-up that the paper reports.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The network.
    pub network: &'static str,
    /// The machine.
    pub machine: &'static str,
    /// Images of a minibatch, over all nodes.
    pub batch: u64,
    /// Nodes.
    pub ranks: u32,
    /// The speed-up over one node with the same minibatch.
    pub speedup: f64,
}

/// The speed-ups of the paper's abstract. The abstract does not say which network ran on Ethernet;
/// it is taken as VGG-A with 256 images.
pub const CLAIMS: [Claim; 5] = [
    Claim { network: "vgg-a", machine: "haswell-aries", batch: 512, ranks: 128, speedup: 90.0 },
    Claim { network: "vgg-a", machine: "haswell-aries", batch: 256, ranks: 64, speedup: 53.0 },
    Claim { network: "overfeat-fast", machine: "haswell-aries", batch: 256, ranks: 64, speedup: 42.0 },
    Claim { network: "dnn-7", machine: "haswell-fdr", batch: 1_024, ranks: 16, speedup: 6.5 },
    Claim { network: "vgg-a", machine: "aws-10g", batch: 256, ranks: 16, speedup: 14.0 },
];

/// What is planned for.
#[derive(Clone, Copy, Debug)]
pub struct Planner<'a> {
    network: &'a Network,
    machine: &'a Machine,
    batch: u64,
    split: Split,
    order: OrderRule,
}

impl<'a> Planner<'a> {
    /// Plans for a minibatch of `batch` images, which all ranks share.
    #[must_use]
    pub fn new(network: &'a Network, machine: &'a Machine, batch: u64) -> Self {
        Self { network, machine, batch, split: Split::Auto, order: OrderRule::Planned }
    }

    /// Splits fully connected layers in this way.
    #[must_use]
    pub fn with_split(self, split: Split) -> Self {
        Self { split, ..self }
    }

    /// Exchanges weight gradients in this order.
    #[must_use]
    pub fn with_order(self, order: OrderRule) -> Self {
        Self { order, ..self }
    }

    /// The split of each layer over so many ranks, and the time of a step.
    ///
    /// # Errors
    ///
    /// [`PlanError::Batch`], [`PlanError::Ranks`], [`PlanError::Groups`], [`PlanError::TooLong`].
    pub fn plan(&self, ranks: u32) -> Result<Plan, PlanError> {
        if !(1..=BATCH_MAX).contains(&self.batch) {
            return Err(PlanError::Batch { batch: self.batch });
        }
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(PlanError::Ranks { ranks });
        }
        let wires = self.machine.wires_alone();
        let groups = self.groups(self.machine, ranks)?;
        let planned = self.timeline(self.machine, ranks, &groups)?;
        let alone = self.timeline(self.machine, 1, &vec![1; groups.len()])?;
        let mut bound_s = self.timeline(&wires, ranks, &groups)?.step_s();
        bound_s = bound_s.min(self.timeline(&wires, ranks, &self.groups(&wires, ranks)?)?.step_s());
        let speedup = alone.step_s() / planned.step_s();
        Ok(Plan {
            ranks,
            batch: self.batch,
            speedup,
            bound: (alone.step_s() / bound_s).max(speedup),
            paper: self.paper(ranks),
            timeline: planned,
        })
    }

    /// The optimal design point: most ranks, counted by doubling, of which each still does at least
    /// [`DESIGN_EFFICIENCY`] of what one rank alone does.
    ///
    /// # Errors
    ///
    /// Those of [`Planner::plan`].
    pub fn design_point(&self) -> Result<u32, PlanError> {
        let mut ranks = 1;
        while ranks < RANKS_MAX && self.plan(ranks * 2)?.efficiency() >= DESIGN_EFFICIENCY {
            ranks *= 2;
        }
        Ok(ranks)
    }

    /// The groups of each layer.
    fn groups(&self, machine: &Machine, ranks: u32) -> Result<Vec<u32>, PlanError> {
        let fixed = match self.split {
            Split::Auto => None,
            Split::Data => Some(ranks),
            Split::Model => Some(1),
            Split::Groups(groups) => Some(groups),
        };
        let divisors = divisors(ranks);
        if let Some(groups) = fixed.filter(|groups| !divisors.contains(groups)) {
            let nearest = divisors.iter().copied().min_by_key(|divisor| divisor.abs_diff(groups));
            return Err(PlanError::Groups { groups, ranks, nearest: nearest.unwrap_or(1) });
        }
        let layers = self.network.layers().iter().enumerate();
        Ok(layers
            .map(|(number, layer)| match (layer.shape(), fixed) {
                (Shape::Convolution { .. }, _) => ranks,
                (Shape::FullyConnected { .. }, Some(groups)) => groups,
                (Shape::FullyConnected { .. }, None) => {
                    let plan =
                        |groups| LayerPlan::new(layer, number == 0, machine, self.batch, (ranks, groups));
                    least_communication(&divisors, plan)
                }
            })
            .collect())
    }

    fn timeline(&self, machine: &Machine, ranks: u32, groups: &[u32]) -> Result<Timeline, PlanError> {
        let layers = self.network.layers().iter().zip(groups).enumerate();
        let layers = layers.map(|(number, (layer, &groups))| {
            LayerPlan::new(layer, number == 0, machine, self.batch, (ranks, groups))
        });
        timeline(layers.collect(), self.order)
    }

    fn paper(&self, ranks: u32) -> Option<f64> {
        let is_of = |claim: &&Claim| {
            (claim.batch, claim.ranks) == (self.batch, ranks)
                && Network::named(claim.network).as_ref() == Some(self.network)
                && Machine::named(claim.machine).as_ref() == Some(self.machine)
        };
        CLAIMS.iter().find(is_of).map(|claim| claim.speedup)
    }
}

/// A network over so many ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    ranks: u32,
    batch: u64,
    speedup: f64,
    bound: f64,
    paper: Option<f64>,
    timeline: Timeline,
}

impl Plan {
    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Images of a minibatch.
    #[must_use]
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// How many times quicker a step is than on one rank with the same minibatch.
    #[must_use]
    pub fn speedup(&self) -> f64 {
        self.speedup
    }

    /// The speed-up over the number of ranks.
    #[must_use]
    pub fn efficiency(&self) -> f64 {
        self.speedup / f64::from(self.ranks)
    }

    /// The speed-up if software cost nothing ([`Machine::wires_alone`]).
    #[must_use]
    pub fn bound(&self) -> f64 {
        self.bound
    }

    /// The speed-up that the paper reports for this, if it does.
    #[must_use]
    pub fn paper(&self) -> Option<f64> {
        self.paper
    }

    /// The time of a step in seconds.
    #[must_use]
    pub fn step_s(&self) -> f64 {
        self.timeline.step_s()
    }

    /// The part of it in which the slowest rank computes.
    #[must_use]
    pub fn computing_s(&self) -> f64 {
        self.timeline.layers().iter().map(LayerPlan::computing_s).sum()
    }

    /// The part of it in which activations are exchanged.
    #[must_use]
    pub fn exposed_s(&self) -> f64 {
        self.timeline.layers().iter().map(LayerPlan::exposed_s).sum()
    }

    /// The part of it in which the next forward pass waits for weights.
    #[must_use]
    pub fn delay_s(&self) -> f64 {
        self.timeline.delay_s()
    }

    /// Its layers, in the order of the network.
    #[must_use]
    pub fn layers(&self) -> &[LayerPlan] {
        self.timeline.layers()
    }
}
