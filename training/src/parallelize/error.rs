//! Why there is no plan.

use super::{BATCH_MAX, DIMENSION_MAX, LAYERS_MAX, RANKS_MAX};

/// Why there is no plan.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A network without layers, or with too many.
    #[error("a network of {layers} layers; give 1 to {LAYERS_MAX}")]
    Layers {
        /// How many it has.
        layers: usize,
    },
    /// A dimension outside of its range.
    #[error("layer '{}' has {dimension} = {value}; give 1 to {DIMENSION_MAX}", .layer.escape_debug())]
    Dimension {
        /// The name of the layer.
        layer: String,
        /// The dimension.
        dimension: &'static str,
        /// Its value.
        value: u64,
    },
    /// A layer of too many multiply-adds.
    #[error("layer '{}' takes more than 2^50 multiply-adds for one image; check its dimensions", .layer.escape_debug())]
    LargeLayer {
        /// The name of the layer.
        layer: String,
    },
    /// A rate of a machine outside of its range.
    #[error("a {rate} of {value:e}; give {least:e} to {most:e}")]
    Rate {
        /// The rate.
        rate: &'static str,
        /// Its value.
        value: f64,
        /// The least that it may be.
        least: f64,
        /// The most that it may be.
        most: f64,
    },
    /// A minibatch of no images, or of too many.
    #[error("a minibatch of {batch} images; give 1 to {BATCH_MAX}")]
    Batch {
        /// Its images.
        batch: u64,
    },
    /// No ranks, or too many.
    #[error("{ranks} ranks; give 1 to {RANKS_MAX}")]
    Ranks {
        /// How many there would be.
        ranks: u32,
    },
    /// Groups that would not be equal.
    #[error(
        "{groups} groups of {ranks} ranks are not equal; the nearest number that divides {ranks} is {nearest}"
    )]
    Groups {
        /// The groups.
        groups: u32,
        /// The ranks.
        ranks: u32,
        /// The divisor of `ranks` that is nearest to `groups`.
        nearest: u32,
    },
    /// A step beyond what is counted in nanoseconds.
    #[error("a step takes {step_s:e} s, at most 1e6; check the rates of the machine and the minibatch")]
    TooLong {
        /// Its time.
        step_s: f64,
    },
}
