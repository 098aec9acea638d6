//! Gossip: ranks mix their parameters with those of single peers (Jin et al. 2016).
//!
//! An exchange comes between a step of the optimizer and the next gradient. At the end of a
//! training the parameters of all ranks are averaged.

mod peers;
mod pull;
mod push;

pub(crate) use peers::Peers;
pub(crate) use pull::Pull;
pub(crate) use push::Push;
