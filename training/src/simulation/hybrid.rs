//! Hybrid parallelism in virtual time.
//!
//! All ranks of a [hybrid training](crate::hybrid) have one network after each step, and the
//! members of a group compute one gradient together. So a simulated rank has the whole network. It
//! takes the gradient of its group's images ([`OfGroups`]), and averages it by `sync`: the mean
//! over all ranks is that over groups, up to rounding. Times are those of shards ([`ShardLinks`]):
//! an average is of as many parts at a time as there are members, each among the ranks with the
//! same shard. What members exchange for a gradient is a part of its computing
//! ([`Simulation::with_exchanges`](super::Simulation::with_exchanges)), as nothing hides it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pleach_collectives::Rank;

use super::{Network, TransferTime};
use crate::interpreter::digest;
use crate::layout::Layout;
use crate::learner::Learner;

/// The gradient that a group has computed last.
struct Kept {
    step: u64,
    /// Of the parameters at which it was computed.
    digest: u64,
    gradient: Vec<f32>,
    loss: f32,
}

/// A learner each of whose ranks learns from the batches of all members of its group.
pub struct OfGroups<'a, L> {
    inner: &'a L,
    members: u32,
    /// By group.
    kept: Vec<Mutex<Option<Kept>>>,
}

impl<'a, L: Learner> OfGroups<'a, L> {
    /// For so many groups of so many members.
    #[must_use]
    pub fn new(inner: &'a L, groups: u32, members: u32) -> Self {
        Self { inner, members: members.max(1), kept: (0..groups).map(|_| Mutex::new(None)).collect() }
    }

    /// The mean gradient of the members of a group.
    fn of_group(&self, group: u32, step: u64, parameters: &[f32]) -> (Vec<f32>, f32) {
        let (mut sum, mut own, mut loss) = (vec![0.0; parameters.len()], vec![0.0; parameters.len()], 0.0);
        for member in 0..self.members {
            loss += self.inner.gradient(group * self.members + member, step, parameters, &mut own);
            sum.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
        }
        let members = self.members as f32;
        sum.iter_mut().for_each(|sum| *sum /= members);
        (sum, loss / members)
    }
}

impl<L: Learner> Learner for OfGroups<'_, L> {
    fn layout(&self) -> Layout {
        self.inner.layout()
    }

    fn initial(&self) -> Vec<f32> {
        self.inner.initial()
    }

    fn work(&self) -> Vec<u64> {
        self.inner.work()
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        if self.members == 1 {
            return self.inner.gradient(rank, step, parameters, gradient);
        }
        let (group, digest) = (rank / self.members, digest(parameters));
        // A gradient that was kept half way is computed again.
        let mut kept = self.kept[group as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let is_kept = |kept: &Kept| (kept.step, kept.digest) == (step, digest);
        if !kept.as_ref().is_some_and(is_kept) {
            let (gradient, loss) = self.of_group(group, step, parameters);
            *kept = Some(Kept { step, digest, gradient, loss });
        }
        let Kept { gradient: found, loss, .. } = kept.as_ref().expect("it was computed");
        gradient.copy_from_slice(found);
        *loss
    }
}

/// The links of a hybrid training, as `sync` on the whole network sees them.
pub struct ShardLinks<'a> {
    inner: &'a mut dyn Network,
    /// The ranks of the first group.
    within: Vec<Rank>,
    /// The first ranks of all groups.
    across: Vec<Rank>,
}

impl<'a> ShardLinks<'a> {
    /// For so many groups of so many members, over these links.
    #[must_use]
    pub fn new(inner: &'a mut dyn Network, groups: u32, members: u32) -> Self {
        let across = (0..groups).map(|group| group * members).collect();
        Self { inner, within: (0..members).collect(), across }
    }

    /// How long calls of so many bytes each, gathered from the members or added up and handed out
    /// to them, take one after the other: each half of an all-reduce.
    pub fn exchanges(&mut self, bytes: &[u64]) -> Duration {
        if self.within.len() == 1 {
            return Duration::ZERO;
        }
        bytes.iter().map(|bytes| self.inner.all_reduce_among(&self.within, *bytes) / 2).sum()
    }
}

impl Network for ShardLinks<'_> {
    fn all_reduce(&mut self, bytes: u64) -> Duration {
        match (self.within.len() as u64, self.across.len()) {
            (1, _) => self.inner.all_reduce(bytes),
            (_, 1) => Duration::ZERO,
            (members, _) => self.inner.all_reduce_among(&self.across, bytes.div_ceil(members)),
        }
    }

    fn transfer(&mut self, from: Rank, to: Rank, bytes: u64) -> TransferTime {
        self.inner.transfer(from, to, bytes)
    }
}
