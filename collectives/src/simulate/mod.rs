//! Whole groups in one process and in virtual time: the real engine over the simulated device.

mod cluster;

pub use cluster::{Cluster, Member, Stuck};
