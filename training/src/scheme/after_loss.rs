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
//! that joins begins with what all have in common after a step, or after an exchange
//! ([`Scheme::shared_vectors`]). By `bidmach` members have nothing in common: the process begins
//! with the model of one of them ([`Scheme::has_own_models`]).
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
        let goes_on = |lost| Self::GoesOn { lost };
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
pub(crate) fn shared_vectors(scheme: &Scheme) -> &'static [SharedVector] {
    use Vector::{Anchor, Centre, Parameters, Velocity};
    match scheme {
        Scheme::Sync { .. }
        | Scheme::LocalSgd { compression: Compression::None, .. }
        | Scheme::ElasticBsp { .. } => &const { [SharedVector::of(Parameters, &[])] },
        Scheme::LocalSgd { .. } | Scheme::Diloco { .. } => {
            &const { [SharedVector::of(Anchor, &[Parameters]), SharedVector::of(Velocity, &[])] }
        }
        Scheme::Elastic { mode: Mode::Sync, .. } => &const { [SharedVector::of(Centre, &[Parameters])] },
        // Members of `bidmach` have nothing in common, and nobody trains by the others.
        _ => &[],
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
pub(crate) fn plan(scheme: &Scheme, layout: &Layout, seat: Rank, seats: u32) -> Result<Plan, Refusal> {
    if let AfterLoss::Refused { reason, instead } = AfterLoss::of(scheme) {
        return Err(Refusal::Members { scheme: scheme.to_string(), reason, instead });
    }
    let parameters = layout.parameters();
    let plan = match *scheme {
        Scheme::Sync { .. } => return Ok(scheme.synchronous(layout, seats, false, true)),
        Scheme::Elastic { moving, mode, .. } => {
            // One may be left.
            scheme.moving_rate(moving, mode, 1)?;
            scheme.plan(layout, seat, seats)?
        }
        Scheme::Bidmach { every, rate, .. } => {
            let plan = scheme.plan(layout, seat, seats)?;
            // It hears of the members before it begins.
            let lengths = vec![SOME; plan.lines.len()];
            Plan { policy: Box::new(Grid::new(parameters, every, rate, 1, lengths)), ..plan }
        }
        Scheme::ElasticBsp { lookahead, objective, prediction } => {
            let place = WindowPlan { rank: seat, ranks: seats, shares: Shares::Parts, slots: 1, row: None };
            let policy = Supersteps::by_sums(parameters, place, lookahead, objective, prediction);
            Plan { policy: Box::new(policy), window: None, ..scheme.plan(layout, seat, seats)? }
        }
        _ => scheme.plan(layout, seat, seats)?,
    };
    let Plan { policy, mut vectors, .. } = plan;
    vectors.push(Vector::Sum);
    Ok(Plan { policy: Box::new(Exchanges::of(policy, parameters)), vectors, ..plan })
}
