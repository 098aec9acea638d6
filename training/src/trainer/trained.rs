//! How far a training has come, and what it has made.

use std::time::Duration;

use pleach_collectives::{Buffer, Rank};

use crate::interpreter::Staleness;

/// How far a training has come on this rank.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The steps that this rank has made.
    pub steps: u64,
    /// Since the first step; of a finished training to the end of the last exchange.
    pub time: Duration,
    /// The part of that time in which this rank had nothing to compute.
    pub waiting: Duration,
    /// The part of that time in which an operation was under way, at most: an operation counts
    /// until this rank has waited for it.
    pub communicating: Duration,
    /// Bytes of the vectors that this rank gave to be averaged, read and wrote.
    pub bytes: u64,
    /// The most ranks of an exchange of the scheme so far, but for the one after the last step,
    /// which is among all ranks: those of an average or of a round, and two of a read or a write. 0
    /// before the first. What ranks compare, and a session's verdicts, are no exchanges.
    pub exchange_ranks_max: u32,
    /// How old parameters were when gradients were computed at them.
    pub staleness: Staleness,
    /// The places so far at which all ranks had to have the same parameters, or the same centre.
    pub agreements: u64,
    /// How far this replica was from the others when that was measured last: the distance of this
    /// rank's parameters from the mean of all ranks, as a share of the length of the mean. Measured
    /// by [`Trainer::averaged`], and of a [checked] training before its last exchange, but with
    /// [`Scheme::ElasticBsp`].
    ///
    /// [`Trainer::averaged`]: crate::Trainer::averaged
    /// [checked]: crate::Trainer::checked
    /// [`Scheme::ElasticBsp`]: crate::Scheme::ElasticBsp
    pub spread: Option<f64>,
}

/// A finished training.
#[derive(Debug)]
pub struct Trained {
    /// The number of this rank at the end.
    pub rank: Rank,
    /// The number of ranks at the end.
    pub ranks: u32,
    /// The parameters at the end.
    pub parameters: Buffer<f32>,
    /// The gradient of the last step: the program's, or the average.
    pub gradient: Buffer<f32>,
    /// How this rank came to its end.
    pub progress: Progress,
    /// Whether all ranks had the same parameters, or the same centre, where they had to, at each
    /// place where these were hashed ([`Trainer::checked`]), and what the scheme conserves was
    /// conserved on all ranks.
    ///
    /// [`Trainer::checked`]: crate::Trainer::checked
    pub guarantee_held: bool,
    /// Whether all ranks have the same parameters at the end, bit for bit.
    pub parameters_equal: bool,
    /// What people are to be told of the scheme's values, if this rank knows of something; rank 0
    /// does.
    pub remark: Option<String>,
}
