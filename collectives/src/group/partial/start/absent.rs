//! One all-reduce in which a rank may be absent, as a round has it, and what it moves: for tests.

use std::marker::PhantomData;

use pleach_transport::{Nanos, Slice};

use super::super::super::Group;
use super::super::super::error::CollectiveError;
use crate::Element;
use crate::engine::{Bytes, Contributors, RoundDivisor, RoundInput, Traffic};
use crate::partial::neutral;
use pleach_vocabulary::ReduceOp;

/// All-reduces of so many elements, in memory that is registered once: that takes longer than a
/// short call.
pub(crate) struct OfPresent<'a, T> {
    group: &'a Group,
    len: usize,
    op: ReduceOp,
    neutral: Slice,
    own: Slice,
    result: Slice,
    of_type: PhantomData<T>,
}

impl Group {
    /// All-reduces in which the inputs of the ranks that have one are combined, all of them of
    /// `len` elements.
    pub(crate) fn of_present<T: Element>(
        &self,
        len: usize,
        op: ReduceOp,
    ) -> Result<OfPresent<'_, T>, CollectiveError> {
        let bytes = len * size_of::<T>();
        let [neutral_elements, own, result] =
            [self.new_registered(bytes)?, self.new_registered(bytes)?, self.new_registered(bytes)?];
        neutral_elements.store(&neutral(T::DATA_TYPE, op).repeat(len));
        Ok(OfPresent { group: self, len, op, neutral: neutral_elements, own, result, of_type: PhantomData })
    }
}

/// What has come out of one of them.
pub(crate) struct Found<T> {
    pub(crate) result: Vec<T>,
    /// Whose inputs are in it, as the signals told this rank, by bits.
    pub(crate) contributors: u32,
    /// What this rank has read and put.
    pub(crate) traffic: Traffic,
}

impl<T: Element> OfPresent<'_, T> {
    /// One of them.
    pub(crate) fn all_reduce(
        &self,
        input: Option<&[T]>,
        divisor: RoundDivisor,
    ) -> Result<Found<T>, CollectiveError> {
        let Self { group, result, .. } = self;
        input.inspect(|input| self.own.store(bytemuck::cast_slice(input)));
        let mut core = group.shared.driver.lock();
        let plan = group.all_reduce_plan(&mut core, T::DATA_TYPE, self.op, self.len)?;
        let neutral = Bytes::Registered(self.neutral.clone());
        let given = if input.is_some() { Bytes::Registered(self.own.clone()) } else { neutral.clone() };
        let others = Contributors::among(group.world_size());
        let contributors = if input.is_some() { others.with(group.rank()) } else { others };
        let round = RoundInput { divisor, neutral, is_absent: input.is_none(), contributors };
        let before = core.engine.traffic();
        let buffers = [given, Bytes::Registered(result.clone())];
        let run = core.engine.start_round(round, &plan, buffers, group.timeout)?;
        let outcome = group.shared.driver.drive_core(core, Nanos::MAX, |core| {
            let ended = core.engine.has_ended(run);
            let contributors = core.engine.contributors(run).unwrap_or_default();
            ended.then(|| (core.engine.take_outcome(run), contributors, core.engine.traffic()))
        });
        let Some((Some(outcome), contributors, after)) = outcome else {
            unreachable!("driven until it has ended")
        };
        outcome.map_err(CollectiveError::Failed)?;
        let result = result.to_vec().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        Ok(Found { result, contributors, traffic: after.since(before) })
    }
}
