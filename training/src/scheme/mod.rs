//! Training schemes: rules by which the ranks of a group train one model.
//!
//! A [`Scheme`] is a value with a text, `NAME[:KEY=VALUE,…]`, that is the same on the command line
//! and in programs. [`Scheme::plan`] makes a rank's [`Policy`] of it.
//!
//! **Invariants** ([`Scheme::guarantee`]), which drivers check: wherever a policy says
//! [`Action::Agreed`](crate::policy::Action::Agreed), the vector has the same bits on all ranks.
//! What ranks write to each other counts once:
//! [`Action::Conserved`](crate::policy::Action::Conserved) says whether it did.
//!
//! **To add a scheme:**
//!
//! 1. Write its file beside this one. The file holds the [`Policy`] of one rank, which decides by
//!    the events and actions of [`policy`](crate::policy).
//! 2. Here, add a variant with its parameters to [`Scheme`], and the variant to [`Scheme::ALL`],
//!    [`Scheme::name`], [`Scheme::guarantee`] and [`Scheme::plan`]. Look also at
//!    [`Scheme::averages_gradients`]. In `after_loss.rs` say what becomes of a training when a rank
//!    ends.
//! 3. In `text.rs`, add its keys, and how their values are printed and read.
//! 4. In `axes.rs`, add its place in the taxonomy, and the scheme of that place.
//! 5. Add its texts to the lists in `training/tests/schemes/`: `ALL` in `invariants.rs`, one of the
//!    two lists in `real.rs`, and the list in `swarm.rs`. `taxonomy.rs` counts all places.
//! 6. Add it to the tables of `docs/training.md`, to the help of `--scheme` in `src/cli/train.rs`
//!    and, where users of torch need it, to `python/pleach/torch/_schemes.py`.

mod after_loss;
mod axes;
mod bounded;
mod eager;
mod elastic;
mod exchanges;
mod finish;
mod gossip;
mod grid;
mod periodic;
mod planning;
mod streaming;
mod superstep;
mod synchronous;
mod text;

use pleach_collectives::partial::{Activation, ActivationError, Divisor, Late};
use pleach_collectives::{Rank, RankSpace};

use crate::compression::Compression;
use crate::interpreter::Plan;
use crate::layout::Layout;
use crate::lines::Line;
use crate::parallelize::OrderRule;
use crate::policy::{Policy, Reads, Vector};
use crate::shares::{Shares, WindowPlan};
use crate::zipline::{Objective, Predictor};
use bounded::{Bound, BoundedStaleness};
use eager::Eager;
use elastic::{LocalStep, ReplicatedCentre, Rule, SharedCentre};
use exchanges::Exchanges;
use gossip::{Peers, Pull, Push};
use grid::Grid;
use periodic::{Outer, Periodic};
use streaming::{Streaming, Streams};
use superstep::Supersteps;
use synchronous::Synchronous;

pub use after_loss::AfterLoss;
pub(crate) use after_loss::SharedVector;
pub use axes::{Axes, Exchange, ExchangeRule, Parallelism, State, Timing};
pub(crate) use planning::PIECE_BYTES;
pub use streaming::Fragments;
pub use text::SchemeTextError;

/// Which way parameters go in an exchange of [`Scheme::Gossip`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A rank reads those of a peer: `x ← (x + x_j)/2`.
    Pull,
    /// A rank writes its own to a peer, which takes the mean of its own and of all that came.
    Push,
    /// A rank gives half of its sum and of its weight to a peer, and trains at the sum over the
    /// weight. No part of the sum is lost, so gossip alone leads to the mean of all ranks.
    PushSum,
}

/// With whom a rank exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// With any other rank, drawn alike.
    Uniform,
    /// With the ranks whose number differs in one bit, in turn: all have mixed with all after as
    /// many exchanges as there are bits. The number of ranks is a power of two.
    Butterfly,
    /// With the next rank.
    Ring,
}

/// When ranks exchange with the centre of [`Scheme::Elastic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Each when it has made its steps.
    Async,
    /// All together.
    Sync,
    /// One after the other, in the order of ranks.
    RoundRobin,
}

/// Why a scheme does not train on so many ranks.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Elastic averaging would diverge for each model.
    #[error(
        "{scheme} diverges on {ranks} ranks: the moving rate moving/ranks is {rate}; give moving at most {most}"
    )]
    Unstable {
        /// The scheme.
        scheme: String,
        /// The number of ranks.
        ranks: u32,
        /// The moving rate of a rank, as text.
        rate: String,
        /// The largest `moving` that may be given, as text.
        most: String,
    },
    /// Fragments or a delay do not fit in a period.
    #[error(
        "{scheme}: a fragment is exchanged once in {every} steps, and applied before the next time; give at most \
         {every} fragments, and a delay below {every}"
    )]
    Streaming {
        /// The scheme.
        scheme: String,
        /// The steps of a period.
        every: u64,
    },
    /// No scheme has these places on the axes.
    #[error("no scheme with {axes}: {reason}")]
    Axes {
        /// The places.
        axes: Axes,
        /// Why not, with what to take.
        reason: &'static str,
    },
    /// No rank could push an update that another rank's copy lacks.
    #[error(
        "{scheme} on {ranks} ranks: each of the {others} others could push no update; give distance at least {others}",
        others = .ranks - 1
    )]
    Distance {
        /// The scheme.
        scheme: String,
        /// The number of ranks.
        ranks: u32,
    },
    /// Rounds of so many ranks would not open.
    #[error("{scheme} on {ranks} ranks: {error}")]
    Activation {
        /// The scheme.
        scheme: String,
        /// The number of ranks.
        ranks: u32,
        /// Why not.
        error: ActivationError,
    },
    /// The layers of a network are divided, and the driver knows none.
    #[error(
        "{scheme} divides the layers of a network, and this driver knows vectors alone; train with \
         pleach train --scheme {scheme}, or with pleach_training::Hybrid"
    )]
    Shards {
        /// The scheme.
        scheme: String,
    },
    /// What ranks know would end with a member of the session, or count twice in a step that is
    /// repeated.
    #[error(
        "{scheme} does not train in a session: {reason}; train by {instead} there, or in a group of ranks that stay"
    )]
    Members {
        /// The scheme.
        scheme: String,
        /// Why not.
        reason: &'static str,
        /// A scheme that does.
        instead: &'static str,
    },
    /// A butterfly needs a power of two.
    #[error(
        "{scheme} on {ranks} ranks: a butterfly needs 2, 4, 8 or another power of two; take peer=ring or peer=uniform"
    )]
    Butterfly {
        /// The scheme.
        scheme: String,
        /// The number of ranks.
        ranks: u32,
    },
}

/// A training scheme with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scheme {
    /// Synchronous SGD: gradients are averaged over all ranks in each step, bucket by bucket while
    /// later buckets are computed.
    Sync {
        /// The most bytes of a bucket, at least 4.
        bucket_bytes: usize,
        /// In which order they are averaged.
        order: OrderRule,
        /// How gradients travel.
        compression: Compression,
    },
    /// Hybrid parallelism: the layers of a network are divided inside of groups, and the data
    /// across them (Das et al. 2016). [`Hybrid`](crate::Hybrid) trains by it.
    Hybrid {
        /// The number of groups, a divisor of the number of ranks; `None`: that with which a step
        /// is predicted to take the least time.
        groups: Option<u32>,
    },
    /// Local SGD: each rank makes steps by itself, and parameters are averaged every `every` steps.
    LocalSgd {
        /// Local steps between two averages, at least 1.
        every: u64,
        /// Synchronous steps before the first local one, in which gradients are averaged (as in
        /// post-local SGD).
        warmup: u64,
        /// How changes travel; with [`Compression::None`] parameters travel instead.
        compression: Compression,
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
        /// Parts of the parameters that are exchanged in turn, at most `every` of them (streaming
        /// DiLoCo, Douillard et al. 2025).
        fragments: Fragments,
        /// Steps from the begin of an exchange to its outer step, less than `every`.
        delay: u64,
        /// The share of a rank's own parameters after an outer step, from 0 to below 1.
        mix: f32,
        /// How changes travel.
        compression: Compression,
    },
    /// Gossip: ranks mix their parameters with those of single peers (Jin et al. 2016).
    Gossip {
        /// Which way parameters go.
        direction: Direction,
        /// Steps between two exchanges, at least 1.
        every: u64,
        /// With whom.
        peer: Peer,
        /// What a rank reads while a peer publishes; for [`Direction::Pull`].
        reads: Reads,
    },
    /// Elastic averaging: ranks are pulled towards a common centre, and the centre towards them
    /// (Zhang et al. 2015). Each rank owns a share of the centre; with [`Mode::Sync`] all have the
    /// whole.
    Elastic {
        /// Steps between two exchanges of a rank, at least 1.
        every: u64,
        /// The moving rate of all ranks together, above 0.
        moving: f32,
        /// When ranks exchange.
        mode: Mode,
        /// EAMSGD: Nesterov momentum of the local steps, from 0 to below 1. Then local optimizers
        /// have none.
        momentum: Option<f32>,
    },
    /// DOWNPOUR, with which elastic averaging is compared: a rank adds what its steps have changed
    /// to a centre, and goes on from there (Dean et al. 2012). Each rank owns a share of the
    /// centre.
    Downpour {
        /// Steps between two exchanges of a rank, at least 1.
        every: u64,
    },
    /// Bounded staleness (SSP; Ho et al. 2013): ranks add what their steps change to a table of
    /// which each owns a shard, and no rank is more than so many steps ahead of the slowest.
    Ssp {
        /// The bound, in steps.
        staleness: u64,
    },
    /// Bulk synchronous: as [`Scheme::Ssp`] with a bound of 0.
    Bsp,
    /// Bounded staleness whose bound is chosen at run time (DSSP; Zhao et al. 2019).
    Dssp {
        /// The bound in steps at which a rank waits, or goes on where it is predicted to wait less.
        low: u64,
        /// The bound in steps that always holds, at least `low`.
        high: u64,
    },
    /// Bounded versions (BAP; Li et al. 2016): ranks add what their steps change to a table, and no
    /// update is computed at a copy that lacks more than so many updates of others.
    Bap {
        /// The bound, in updates of others; at least the number of other ranks.
        distance: u64,
    },
    /// Asynchronous: ranks add what their steps change to a table, and none waits for another
    /// before the end.
    Asp,
    /// Eager-SGD (Li et al. 2020): gradients are averaged in rounds that do not wait for late
    /// ranks, and parameters now and then.
    Eager {
        /// When rounds open.
        activation: Activation,
        /// What becomes of late gradients.
        late: Late,
        /// By what sums of gradients are divided: [`Divisor::None`] by nothing.
        divisor: Divisor,
        /// Steps between two averages of the parameters, at least 1.
        every: u64,
    },
    /// Elastic averaging along the lines of a grid of ranks, the dimensions in turn (BIDMach; Peng
    /// 2018). Where the number of ranks is no power, the grid has holes.
    Bidmach {
        /// Steps between two exchanges, at least 1.
        every: u64,
        /// The share of the average, above 0 and at most 1.
        rate: f32,
        /// The dimensions of the grid, at least 1.
        dimensions: u32,
        /// The share of a line that opens a round, above 0 and at most 1.
        threshold: f32,
    },
    /// ElasticBSP: parameters are averaged at barriers that are placed where ranks are predicted to
    /// end steps at nearly the same time (Zhao et al. 2019).
    ElasticBsp {
        /// Most steps of a rank between two barriers, at least 1.
        lookahead: u32,
        /// Which barrier is best.
        objective: Objective,
        /// By which intervals of the past the next ones are predicted.
        prediction: Predictor,
    },
}

impl Scheme {
    /// Each scheme, with its usual parameters.
    pub const ALL: [Self; 16] = [
        Self::Sync { bucket_bytes: 1 << 20, order: OrderRule::Planned, compression: Compression::None },
        Self::Hybrid { groups: None },
        Self::LocalSgd { every: 8, warmup: 0, compression: Compression::None },
        Self::Diloco {
            every: 50,
            outer_learning_rate: 0.7,
            outer_momentum: 0.9,
            fragments: Fragments::Parts(1),
            delay: 0,
            mix: 0.0,
            compression: Compression::None,
        },
        Self::Gossip { direction: Direction::Pull, every: 1, peer: Peer::Uniform, reads: Reads::Consistent },
        Self::Elastic { every: 10, moving: 0.9, mode: Mode::Async, momentum: None },
        Self::Elastic { every: 10, moving: 0.9, mode: Mode::Async, momentum: Some(0.9) },
        Self::Downpour { every: 10 },
        Self::Ssp { staleness: 3 },
        Self::Bsp,
        Self::Dssp { low: 3, high: 15 },
        Self::Bap { distance: 32 },
        Self::Asp,
        Self::Eager {
            activation: Activation::MAJORITY,
            late: Late::Carry,
            divisor: Divisor::World,
            every: 100,
        },
        Self::Bidmach { every: 1, rate: 0.3, dimensions: 2, threshold: 1.0 },
        Self::ElasticBsp { lookahead: 60, objective: Objective::Share, prediction: Predictor::Mean },
    ];

    /// Its name, without parameters.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sync { .. } => "sync",
            Self::Hybrid { .. } => "hybrid",
            Self::LocalSgd { .. } => "local-sgd",
            Self::Diloco { .. } => "diloco",
            Self::Gossip { .. } => "gossip",
            Self::Elastic { momentum: None, .. } => "easgd",
            Self::Elastic { momentum: Some(_), .. } => "eamsgd",
            Self::Downpour { .. } => "downpour",
            Self::Ssp { .. } => "ssp",
            Self::Bsp => "bsp",
            Self::Dssp { .. } => "dssp",
            Self::Bap { .. } => "bap",
            Self::Asp => "asp",
            Self::Eager { .. } => "eager",
            Self::Bidmach { .. } => "bidmach",
            Self::ElasticBsp { .. } => "elastic-bsp",
        }
    }

    /// What holds on all ranks, in words.
    #[must_use]
    pub fn guarantee(&self) -> &'static str {
        match self {
            Self::Sync { .. } => "all ranks have the same parameters after each step, bit for bit",
            Self::Hybrid { .. } => {
                "ranks with the same shard have the same parameters after each step, and all have the same network at the end, bit for bit"
            }
            Self::LocalSgd { .. } => "all ranks have the same parameters after each average, bit for bit",
            Self::Diloco { .. } if self.is_streaming() => {
                "all ranks have the same outer parameters after each outer step, bit for bit, and end with them"
            }
            Self::Diloco { .. } => "all ranks have the same parameters after each outer step, bit for bit",
            Self::Gossip { direction: Direction::Pull, .. } => {
                "each rank reads newer and newer versions of its peers, and all end with the same parameters, bit for bit"
            }
            Self::Gossip { direction: Direction::Push, .. } => {
                "what a rank sends is taken in once, and all end with the same parameters, bit for bit"
            }
            Self::Gossip { direction: Direction::PushSum, .. } => {
                "all weights are together the number of ranks, and all end with the same parameters, bit for bit"
            }
            Self::Elastic { mode: Mode::Sync, .. } => {
                "all ranks have the same centre after each exchange, bit for bit, and end with it"
            }
            Self::Elastic { .. } | Self::Downpour { .. } => {
                "each change is added to the centre once, and all ranks end with the centre, bit for bit"
            }
            Self::ElasticBsp { .. } => {
                "no superstep is longer than the lookahead, and all ranks have the same parameters after each, bit for bit"
            }
            Self::Bap { .. } => {
                "no update is computed at parameters that lack more updates of others than the distance, each counts once, and all end with the same parameters, bit for bit"
            }
            Self::Asp => "each change counts once, and all end with the same parameters, bit for bit",
            Self::Eager { .. } => {
                "all ranks have the same parameters after each average of them, bit for bit"
            }
            Self::Bidmach { .. } => {
                "no exchange before the end has more ranks than the side of the grid, and all end with the same parameters, bit for bit"
            }
            Self::Ssp { .. } | Self::Bsp | Self::Dssp { .. } => {
                "no rank is further ahead than it may, each change counts once, and all end with the same parameters, bit for bit"
            }
        }
    }

    /// Whether it has the momentum of local steps in it: then local optimizers have none.
    #[must_use]
    pub fn has_momentum(&self) -> bool {
        matches!(self, Self::Elastic { momentum: Some(_), .. })
    }

    /// Whether gradients are averaged, at least in some steps. Otherwise an optimizer may take the
    /// gradient from where it likes.
    #[must_use]
    pub fn averages_gradients(&self) -> bool {
        match self {
            Self::LocalSgd { warmup, .. } => *warmup > 0,
            Self::Diloco { .. }
            | Self::Gossip { .. }
            | Self::Elastic { .. }
            | Self::Downpour { .. }
            | Self::Ssp { .. }
            | Self::Bsp
            | Self::Dssp { .. }
            | Self::Bap { .. }
            | Self::Asp
            | Self::Bidmach { .. }
            | Self::ElasticBsp { .. } => false,
            // Right for each scheme.
            _ => true,
        }
    }

    /// A rank's policy for a model of this layout, trained by `ranks` ranks.
    ///
    /// # Errors
    ///
    /// The scheme does not train on so many ranks: the same on all.
    pub fn plan(&self, layout: &Layout, rank: Rank, ranks: u32) -> Result<Plan, Refusal> {
        let parameters = layout.parameters();
        let window = |shares| WindowPlan { rank, ranks, shares, slots: SLOTS, row: layout.row() };
        let mut lines = Vec::new();
        let mut vectors = vec![Vector::Parameters, Vector::Gradient];
        let (policy, more, window): (Box<dyn Policy>, &[Vector], _) = match *self {
            Self::Sync { .. } => return Ok(self.synchronous(layout, ranks, false, false)),
            Self::Hybrid { .. } => return Err(Refusal::Shards { scheme: self.to_string() }),
            Self::LocalSgd { .. } | Self::Diloco { .. } => return self.periodic(layout),
            Self::Gossip { direction, every, peer, reads } => {
                if peer == Peer::Butterfly && !ranks.is_power_of_two() {
                    return Err(Refusal::Butterfly { scheme: self.to_string(), ranks });
                }
                let (peers, plan) = (Peers { rule: peer, rank, ranks }, window(Shares::Whole));
                let push = |has_weight| Box::new(Push::new(parameters, every, peers, plan, has_weight));
                match direction {
                    Direction::Pull => {
                        (Box::new(Pull::new(parameters, every, peers, reads, plan)), FETCHING, Some(plan))
                    }
                    Direction::Push => (push(false), FETCHING, Some(plan)),
                    Direction::PushSum => (push(true), SUMMING, Some(plan)),
                }
            }
            Self::Elastic { every, moving, mode, momentum } => {
                let rate = self.moving_rate(moving, mode, ranks)?;
                let local = LocalStep { parameters, momentum };
                if momentum.is_some() {
                    vectors.extend([Vector::Anchor, Vector::Velocity]);
                }
                if mode == Mode::Sync {
                    (Box::new(ReplicatedCentre::new(local, moving, ranks, every)), REPLICATED, None)
                } else {
                    let (plan, turns) = (window(Shares::Parts), mode == Mode::RoundRobin);
                    let policy = SharedCentre::new(local, Rule::Elastic(rate), every, plan, turns);
                    (Box::new(policy), SHARED, Some(plan))
                }
            }
            Self::Downpour { every } => {
                let (local, plan) = (LocalStep { parameters, momentum: None }, window(Shares::Parts));
                let policy = SharedCentre::new(local, Rule::Downpour, every, plan, false);
                vectors.push(Vector::Anchor);
                (Box::new(policy), SHARED, Some(plan))
            }
            Self::Ssp { .. } | Self::Bsp | Self::Dssp { .. } | Self::Bap { .. } | Self::Asp => {
                let bound = self.bound(ranks)?;
                if bound == Bound::None {
                    vectors.extend(KEPT);
                }
                let plan = WindowPlan { slots: bound.slots(ranks).max(SLOTS), ..window(Shares::Parts) };
                (Box::new(BoundedStaleness::new(parameters, bound, plan)), TABLED, Some(plan))
            }
            Self::Eager { activation, late, divisor, every } => {
                let activation = activation.late(late).divisor(divisor);
                activation.expect_ranks(ranks).map_err(|error| Refusal::Activation {
                    scheme: self.to_string(),
                    ranks,
                    error,
                })?;
                lines.push(Line { ranks: (0..ranks).collect(), activation });
                let steps_aside = !activation.waits_for_all(ranks);
                let more: &[Vector] = if steps_aside { &[Vector::Delta] } else { &[] };
                let divides = divisor != Divisor::None;
                (Box::new(Eager::new(parameters, every, steps_aside, divides)), more, None)
            }
            Self::Bidmach { every, rate, dimensions, threshold } => {
                let grid = RankSpace::balanced(ranks, dimensions);
                lines.extend(self.lines_of(rank, ranks).into_iter().map(|ranks| {
                    // The number that was written: five times the next f32 to 0.6 is above 3.
                    let share = threshold.to_string().parse().unwrap_or(f64::from(threshold));
                    let activation = Activation::laggard_resistant(share, ranks.len() as u32);
                    // A rank that is far behind is left out until it has caught up.
                    let activation = activation.divisor(Divisor::Contributors).staleness_max(u32::MAX);
                    Line { ranks, activation }
                }));
                let lengths = lines.iter().map(|line| line.ranks.len()).collect();
                let side = grid.extents().iter().copied().max().unwrap_or(1);
                let policy = Grid::new(parameters, every, rate, side, lengths);
                (Box::new(policy), &[Vector::Fetched], None)
            }
            Self::ElasticBsp { lookahead, objective, prediction } => {
                let plan = window(Shares::Parts);
                let policy = Supersteps::new(parameters, plan, lookahead, objective, prediction);
                (Box::new(policy), &[], Some(plan))
            }
        };
        vectors.extend(more);
        Ok(Plan { policy, buckets: layout.buckets(usize::MAX), vectors, parameters, window, lines })
    }

    /// As [`Scheme::plan`], for a driver whose passes ask for each bucket before they use it
    /// ([`Event::Needed`](crate::policy::Event::Needed)). Only synchronous SGD makes use of that.
    ///
    /// # Errors
    ///
    /// Those of [`Scheme::plan`].
    pub fn plan_by_bucket(&self, layout: &Layout, rank: Rank, ranks: u32) -> Result<Plan, Refusal> {
        match self {
            Self::Sync { .. } => Ok(self.synchronous(layout, ranks, true, false)),
            _ => self.plan(layout, rank, ranks),
        }
    }

    /// What becomes of a training when one of its ranks ends.
    #[must_use]
    pub fn after_loss(&self) -> AfterLoss {
        AfterLoss::of(self)
    }

    /// As [`Scheme::plan`], for a training in a session ([`Trainer::in_session`]): of the member on
    /// this of so many seats. [`Scheme::after_loss`] says which schemes have such a plan.
    ///
    /// [`Trainer::in_session`]: crate::Trainer::in_session
    ///
    /// # Errors
    ///
    /// [`Refusal::Members`]: other schemes, with the reason. [`Refusal::Unstable`], if it would
    /// diverge on fewer members, down to one. Those of [`Scheme::plan`].
    pub fn plan_in_session(&self, layout: &Layout, seat: Rank, seats: u32) -> Result<Plan, Refusal> {
        after_loss::plan(self, layout, seat, seats)
    }

    /// Whether each step is one of the session. Else its steps are the exchanges.
    pub(crate) fn shares_steps(&self) -> bool {
        matches!(self, Self::Sync { .. })
    }

    /// What all members of a session have in common after a commit: a process that joins begins
    /// with that.
    pub(crate) fn shared_vectors(&self) -> &'static [SharedVector] {
        after_loss::shared_vectors(self)
    }

    /// Whether each member has a model of its own after a commit.
    pub(crate) fn has_own_models(&self) -> bool {
        matches!(self, Self::Bidmach { .. })
    }

    /// The ranks of each line of a rank, when there are so many ranks.
    pub(crate) fn lines_of(&self, rank: Rank, ranks: u32) -> Vec<Vec<Rank>> {
        let Self::Bidmach { dimensions, .. } = *self else { return Vec::new() };
        let grid = RankSpace::balanced(ranks, dimensions);
        // The lines of neighbours first.
        (0..grid.extents().len()).rev().map(|dimension| grid.line(rank, dimension).collect()).collect()
    }

    /// The plan of [`Scheme::Sync`], which is the same on all ranks.
    fn synchronous(&self, layout: &Layout, ranks: u32, is_by_bucket: bool, commits: bool) -> Plan {
        let Self::Sync { bucket_bytes, order, compression } = *self else {
            unreachable!("the others average no buckets")
        };
        let buckets = layout.buckets(bucket_bytes);
        let policy = Synchronous::new(buckets.clone(), ranks, order, compression, is_by_bucket, commits);
        let mut vectors = vec![Vector::Parameters, Vector::Gradient];
        vectors.extend(residuals(compression));
        Plan {
            policy: Box::new(policy),
            buckets,
            vectors,
            parameters: layout.parameters(),
            window: None,
            lines: Vec::new(),
        }
    }

    /// How far apart ranks may go that train at copies of a table.
    fn bound(&self, ranks: u32) -> Result<Bound, Refusal> {
        Ok(match *self {
            Self::Ssp { staleness } => Bound::Clocks { low: staleness, high: staleness },
            Self::Dssp { low, high } => Bound::Clocks { low, high },
            Self::Bap { distance } if distance < u64::from(ranks - 1) => {
                return Err(Refusal::Distance { scheme: self.to_string(), ranks });
            }
            Self::Bap { distance } => Bound::Versions { distance },
            Self::Asp => Bound::None,
            _ => Bound::Clocks { low: 0, high: 0 },
        })
    }

    /// The plan of [`Scheme::LocalSgd`] or [`Scheme::Diloco`], which is the same on all ranks.
    fn periodic(&self, layout: &Layout) -> Result<Plan, Refusal> {
        let parameters = layout.parameters();
        let mut vectors = vec![Vector::Parameters, Vector::Gradient];
        let policy: Box<dyn Policy> = match *self {
            Self::Diloco {
                every,
                outer_learning_rate,
                outer_momentum,
                fragments,
                delay,
                mix,
                compression,
            } => {
                let outer = Outer { learning_rate: outer_learning_rate, momentum: outer_momentum };
                vectors.extend(ANCHORED.iter().chain(residuals(compression)));
                if mix > 0.0 {
                    vectors.push(Vector::Fetched);
                }
                if self.is_streaming() {
                    if fragments.count(layout) > every || delay >= every {
                        return Err(Refusal::Streaming { scheme: self.to_string(), every });
                    }
                    let streams = Streams { every, fragments, delay, mix };
                    Box::new(Streaming::new(layout, streams, outer, compression))
                } else {
                    Box::new(Periodic::new(parameters, every, 0, Some(outer), compression))
                }
            }
            Self::LocalSgd { every, warmup, compression } if compression != Compression::None => {
                let outer = Outer { learning_rate: 1.0, momentum: 0.0 };
                vectors.extend(ANCHORED.iter().chain(residuals(compression)));
                Box::new(Periodic::new(parameters, every, warmup, Some(outer), compression))
            }
            Self::LocalSgd { every, warmup, compression } => {
                Box::new(Periodic::new(parameters, every, warmup, None, compression))
            }
            _ => unreachable!("the others have no periods"),
        };
        let buckets = layout.buckets(usize::MAX);
        Ok(Plan { policy, buckets, vectors, parameters, window: None, lines: Vec::new() })
    }

    /// Whether ranks make steps while fragments are exchanged.
    fn is_streaming(&self) -> bool {
        let Self::Diloco { fragments, delay, mix, .. } = self else { return false };
        *fragments != Fragments::Parts(1) || *delay > 0 || *mix > 0.0
    }

    /// The moving rate of a rank. All ranks at once are stable as learning rates go to 0 if
    /// a(p + 1) ≤ 2, and one after the other if a ≤ 1.
    fn moving_rate(&self, moving: f32, mode: Mode, ranks: u32) -> Result<f32, Refusal> {
        let of_ranks = ranks as f32;
        let most = if mode == Mode::Sync { 2.0 * of_ranks / (of_ranks + 1.0) } else { of_ranks };
        let rate = moving / of_ranks;
        if moving > most {
            let (rate, most) = (rate.to_string(), most.to_string());
            return Err(Refusal::Unstable { scheme: self.to_string(), ranks, rate, most });
        }
        Ok(rate)
    }
}

/// The vectors of error feedback.
fn residuals(compression: Compression) -> &'static [Vector] {
    if compression.keeps_residuals() { &[Vector::Residual, Vector::OwnedResidual] } else { &[] }
}

/// Writes that a rank may be ahead of a peer. Where a scheme says that nobody waits, further ones
/// are refused: a slow rank keeps no more for others.
const SLOTS: u16 = 2;

/// The vectors of schemes, besides parameters and gradient.
const ANCHORED: &[Vector] = &[Vector::Anchor, Vector::Delta, Vector::Velocity];
const FETCHING: &[Vector] = &[Vector::Fetched, Vector::Arrival];
const SUMMING: &[Vector] = &[Vector::Anchor, Vector::Fetched, Vector::Arrival, Vector::Sum];
const REPLICATED: &[Vector] = &[Vector::Delta, Vector::Centre, Vector::Fetched];
const SHARED: &[Vector] = &[Vector::Delta, Vector::Centre, Vector::Arrival];
const TABLED: &[Vector] = &[Vector::Anchor, Vector::Delta, Vector::Centre, Vector::Arrival];
/// With no bound, besides those.
const KEPT: &[Vector] = &[Vector::Residual];
