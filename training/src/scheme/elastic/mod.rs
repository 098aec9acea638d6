//! Elastic averaging (Zhang, Choromanska and LeCun 2015), and DOWNPOUR (Dean et al. 2012).
//!
//! Ranks train by themselves, and each is now and then pulled towards a *centre*, which is pulled
//! towards the rank by as much: `d = a(x - c)`, `c ← c + d`, `x ← x - d`. The centre is the result.
//! As in the authors' program, the gradient of the step after an exchange is taken at `x` before it
//! is pulled.

mod local_step;
mod shared;
mod synchronous;
mod turns;

pub(crate) use local_step::LocalStep;
pub(crate) use shared::{Rule, SharedCentre};
pub(crate) use synchronous::ReplicatedCentre;
