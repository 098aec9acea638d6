//! Training schemes: rules by which the ranks of a group train one model.
//!
//! A [`Scheme`] is a value with a text, `NAME[:KEY=VALUE,…]`, that is the same on the command line
//! and in programs. [`Scheme::plan`] makes a rank's [`Policy`](crate::Policy) of it.
//!
//! **Invariant:** wherever a policy says [`Action::Agreed`](crate::policy::Action::Agreed), all
//! ranks have the same parameters, bit for bit ([`Scheme::guarantee`]). Drivers check that.

mod periodic;
mod synchronous;
mod text;

use crate::interpreter::Plan;
use crate::layout::Layout;
use crate::policy::Vector;
use periodic::{Outer, Periodic};
use synchronous::Synchronous;

pub use text::SchemeTextError;

/// A training scheme with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scheme {
    /// Synchronous SGD: gradients are averaged over all ranks in each step, bucket by bucket while
    /// later buckets are computed.
    Sync {
        /// The most bytes of a bucket, at least 4.
        bucket_bytes: usize,
    },
    /// Local SGD: each rank makes steps by itself, and parameters are averaged every `every` steps.
    LocalSgd {
        /// Local steps between two averages, at least 1.
        every: u64,
        /// Synchronous steps before the first local one, in which gradients are averaged (as in
        /// post-local SGD).
        warmup: u64,
    },
    /// DiLoCo: what `every` local steps changed is averaged, and an outer optimizer (SGD with
    /// Nesterov momentum) takes its step by that.
    Diloco {
        /// Local steps between two outer ones, at least 1.
        every: u64,
        /// The learning rate of the outer optimizer.
        outer_learning_rate: f32,
        /// The momentum of the outer optimizer, from 0 to below 1.
        outer_momentum: f32,
    },
}

impl Scheme {
    /// Each scheme, with its usual parameters.
    pub const ALL: [Self; 3] = [
        Self::Sync { bucket_bytes: 1 << 20 },
        Self::LocalSgd { every: 8, warmup: 0 },
        Self::Diloco { every: 50, outer_learning_rate: 0.7, outer_momentum: 0.9 },
    ];

    /// Its name, without parameters.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sync { .. } => "sync",
            Self::LocalSgd { .. } => "local-sgd",
            Self::Diloco { .. } => "diloco",
        }
    }

    /// What holds on all ranks, in words.
    #[must_use]
    pub fn guarantee(&self) -> &'static str {
        match self {
            Self::Sync { .. } => "all ranks have the same parameters after each step, bit for bit",
            Self::LocalSgd { .. } => "all ranks have the same parameters after each average, bit for bit",
            Self::Diloco { .. } => "all ranks have the same parameters after each outer step, bit for bit",
        }
    }

    /// A rank's policy for a model of this layout.
    #[must_use]
    pub fn plan(&self, layout: &Layout) -> Plan {
        let parameters = layout.parameters();
        match *self {
            Self::Sync { bucket_bytes } => {
                let buckets = layout.buckets(bucket_bytes);
                let policy = Box::new(Synchronous::new(buckets.clone()));
                Plan { policy, buckets, vectors: &[Vector::Parameters, Vector::Gradient], parameters }
            }
            Self::LocalSgd { every, warmup } => {
                let policy = Box::new(Periodic::new(parameters, every, warmup, None));
                let vectors = &[Vector::Parameters, Vector::Gradient];
                Plan { policy, buckets: layout.buckets(usize::MAX), vectors, parameters }
            }
            Self::Diloco { every, outer_learning_rate: learning_rate, outer_momentum: momentum } => {
                let outer = Outer { learning_rate, momentum };
                let policy = Box::new(Periodic::new(parameters, every, 0, Some(outer)));
                let vectors =
                    &[Vector::Parameters, Vector::Gradient, Vector::Anchor, Vector::Delta, Vector::Velocity];
                Plan { policy, buckets: layout.buckets(usize::MAX), vectors, parameters }
            }
        }
    }
}
