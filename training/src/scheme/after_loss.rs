//! What becomes of a training when one of its ranks ends, by scheme; and the plans of trainings in
//! sessions.
//!
//! | scheme | ends with a rank | the others |
//! | --- | --- | --- |
//! | `sync` | nothing: all have the same parameters | compute the step again |
//! | `local-sgd`, `diloco` | its steps since the last exchange | exchange without it |
//! | `easgd`, `eamsgd`, `mode=sync` | its distance from the centre | the same, by a new rate |
//! | `bidmach` | its model, but for what others have taken in | meet in a new grid |
//! | `elastic-bsp` | its steps since the last barrier | come to the barrier without it |
//! | other modes, `downpour` | a share of the centre | are refused |
//! | `ssp`, `bsp`, `dssp`, `bap`, `asp` | a shard of the table | are refused |
//! | `gossip` | its model, and what peers have written to it | are refused |
//! | `eager` | nobody knows which gradients | are refused |
//! | `hybrid` | a shard of the network | are refused |
//!
//! What a rank has made by itself since the last exchange stays with it, whoever ends. A process
//! that joins begins with what all have in common after a step of `sync`, or after an exchange of
//! `local-sgd`, `diloco`, `easgd` and `eamsgd` ([`Scheme::shared_vectors`]). By the others it is
//! refused.
//!
//! A copy of a shard or of a share at a second rank would not help: a rank that ends in the middle
//! of an exchange has written to some owners and not to others. So a change of it would be in a
//! part of the elements alone, and owner and copy would have to agree on each write before it
//! counts, which costs a message back and forth for each. The schemes that go on exchange the whole
//! at once, and all members agree on that.
//!
//! **Invariant** ([`Scheme::after_loss`], which a test holds against all schemes): a scheme either
//! goes on or is refused when the training is made, with the reason.

use pleach_collectives::Rank;

use super::{
    Compression, Exchanges, Grid, Layout, Mode, Plan, Refusal, Scheme, Shares, Supersteps, Vector, WindowPlan,
};

/// What becomes of a training by a scheme when one of its ranks ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterLoss {
    /// The others go on without it.
    GoesOn {
        /// What ends with the rank.
        lost: &'static str,
        /// Why a process that joins while the others train is refused. `None`: it begins with what
        /// they have.
        refuses_joiners: Option<&'static str>,
    },
    /// Nobody trains by it in a session.
    Refused {
        /// Why not.
        reason: &'static str,
        /// A scheme that goes on instead.
        instead: &'static str,
    },
}

/// Members that a line of the grid is said to have: a member alone exchanges too, as all members
/// count exchanges alike.
const SOME: usize = 2;

impl AfterLoss {
    /// By this scheme.
    pub(crate) fn of(scheme: &Scheme) -> Self {
        let refused = |reason, instead| Self::Refused { reason, instead };
        let goes_on = |lost| Self::GoesOn { lost, refuses_joiners: scheme.shared_vectors().err() };
        match scheme {
            _ if compression(scheme) == Compression::F8 => refused(
                "what encoding has lost is sent the next time, and would be sent twice in an exchange that is \
                 repeated",
                "compress=bf16",
            ),
            Scheme::Sync { .. } => goes_on("nothing"),
            Scheme::LocalSgd { warmup: 1.., .. } => refused(
                "a step of its warm-up that is repeated would be made where the program's optimizer is not at hand",
                "local-sgd without a warm-up, after sync",
            ),
            Scheme::LocalSgd { .. } | Scheme::Diloco { .. } => {
                goes_on("the steps of the rank since the last exchange")
            }
            Scheme::Elastic { mode: Mode::Sync, .. } => goes_on("the distance of the rank from the centre"),
            Scheme::Bidmach { threshold, .. } if *threshold < 1.0 => refused(
                "the session's word on an exchange waits for all members, so none would go on without late ranks",
                "bidmach:threshold=1",
            ),
            Scheme::Bidmach { .. } => goes_on("the model of the rank, but for what others have taken in"),
            Scheme::ElasticBsp { .. } => goes_on("the steps of the rank since the last barrier"),
            Scheme::Hybrid { .. } => {
                refused("each rank of a group has a shard of the network that no other rank has", "sync")
            }
            Scheme::Elastic { .. } => {
                refused("each rank has a shard of the centre that no other rank has", "mode=sync")
            }
            Scheme::Downpour { .. } => {
                refused("each rank has a shard of the centre that no other rank has", "easgd:mode=sync")
            }
            Scheme::Ssp { .. } | Scheme::Bsp | Scheme::Dssp { .. } | Scheme::Bap { .. } | Scheme::Asp => {
                refused("each rank has a shard of the table that no other rank has", "local-sgd:every=1")
            }
            Scheme::Gossip { .. } => refused(
                "ranks exchange with single peers, and a session counts exchanges of all members",
                "bidmach or local-sgd",
            ),
            Scheme::Eager { .. } => refused(
                "a round ends on some ranks before others, so where a rank ends nobody knows whose gradients have \
                 counted",
                "sync or local-sgd",
            ),
        }
    }
}

/// A vector that is the same on all members of a session after each commit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedVector {
    pub(crate) vector: Vector,
    /// Vectors that begin as copies of it, on a process that joins.
    pub(crate) copies: &'static [Vector],
}

impl SharedVector {
    const fn of(vector: Vector, copies: &'static [Vector]) -> Self {
        Self { vector, copies }
    }
}

/// See [`Scheme::shared_vectors`].
pub(crate) fn shared_vectors(scheme: &Scheme) -> Result<&'static [SharedVector], &'static str> {
    use Vector::{Anchor, Centre, Parameters, Velocity};
    match scheme {
        Scheme::Diloco { .. } if scheme.is_streaming() => {
            Err("fragments are exchanged while ranks make steps, so members never have all in common")
        }
        Scheme::Sync { .. } | Scheme::LocalSgd { compression: Compression::None, .. } => {
            Ok(&const { [SharedVector::of(Parameters, &[])] })
        }
        Scheme::LocalSgd { .. } | Scheme::Diloco { .. } => {
            Ok(&const { [SharedVector::of(Parameters, &[Anchor]), SharedVector::of(Velocity, &[])] })
        }
        Scheme::Elastic { mode: Mode::Sync, .. } => Ok(&const { [SharedVector::of(Centre, &[Parameters])] }),
        Scheme::Bidmach { .. } => Err("each member has a model of its own"),
        Scheme::ElasticBsp { .. } => {
            Err("barriers are placed by the times of the ranks that have begun the training")
        }
        _ => Err("nobody trains by it in a session"),
    }
}

/// How gradients or changes travel.
fn compression(scheme: &Scheme) -> Compression {
    match scheme {
        Scheme::Sync { compression, .. }
        | Scheme::LocalSgd { compression, .. }
        | Scheme::Diloco { compression, .. } => *compression,
        _ => Compression::None,
    }
}

/// See [`Scheme::plan_in_session`].
pub(crate) fn plan(scheme: &Scheme, layout: &Layout, rank: Rank, ranks: u32) -> Result<Plan, Refusal> {
    if let AfterLoss::Refused { reason, instead } = AfterLoss::of(scheme) {
        return Err(Refusal::Members { scheme: scheme.to_string(), reason, instead });
    }
    let parameters = layout.parameters();
    let plan = match *scheme {
        Scheme::Sync { .. } => return Ok(scheme.synchronous(layout, ranks, false, true)),
        Scheme::Elastic { moving, mode, .. } => {
            // One may be left.
            scheme.moving_rate(moving, mode, 1)?;
            scheme.plan(layout, rank, ranks)?
        }
        Scheme::Bidmach { every, rate, .. } => {
            let plan = scheme.plan(layout, rank, ranks)?;
            let side = scheme.lines_of(rank, ranks).iter().map(Vec::len).max().unwrap_or(1);
            let lengths = vec![SOME; plan.lines.len()];
            Plan { policy: Box::new(Grid::new(parameters, every, rate, side as u32, lengths)), ..plan }
        }
        Scheme::ElasticBsp { lookahead, objective, prediction } => {
            let place = WindowPlan { rank, ranks, shares: Shares::Parts, slots: 1, row: None };
            let policy = Supersteps::by_sums(parameters, place, lookahead, objective, prediction);
            Plan { policy: Box::new(policy), window: None, ..scheme.plan(layout, rank, ranks)? }
        }
        _ => scheme.plan(layout, rank, ranks)?,
    };
    let Plan { policy, mut vectors, .. } = plan;
    vectors.push(Vector::Sum);
    Ok(Plan { policy: Box::new(Exchanges::of(policy, parameters)), vectors, ..plan })
}
