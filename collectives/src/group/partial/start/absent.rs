//! One all-reduce in which a rank may be absent, as a round has it, and what it moves: for tests.

use pleach_transport::Nanos;

use super::super::super::Group;
use super::super::super::error::CollectiveError;
use crate::Element;
use crate::engine::{Bytes, RoundInput, Traffic};
use crate::partial::neutral;
use pleach_vocabulary::ReduceOp;

impl Group {
    /// Combines the inputs of the ranks that have one, all of them of `len` elements. Gives also
    /// what this rank has read and put.
    pub(crate) fn all_reduce_of_present<T: Element>(
        &self,
        input: Option<&[T]>,
        len: usize,
        op: ReduceOp,
        divide_by: Option<u32>,
    ) -> Result<(Vec<T>, Traffic), CollectiveError> {
        let bytes = len * size_of::<T>();
        let [neutral_elements, own, result] =
            [self.new_registered(bytes)?, self.new_registered(bytes)?, self.new_registered(bytes)?];
        neutral_elements.store(&neutral(T::DATA_TYPE, op).repeat(len));
        input.inspect(|input| own.store(bytemuck::cast_slice(input)));
        let mut core = self.shared.driver.lock();
        let plan = self.all_reduce_plan(&mut core, T::DATA_TYPE, op, len)?;
        let neutral = Bytes::Registered(neutral_elements);
        let given = if input.is_some() { Bytes::Registered(own) } else { neutral.clone() };
        let round = RoundInput { divide_by, neutral, is_absent: input.is_none() };
        let before = core.engine.traffic();
        let buffers = [given, Bytes::Registered(result.clone())];
        let run = core.engine.start_round(round, &plan, buffers, self.timeout)?;
        let outcome = self.shared.driver.drive_core(core, Nanos::MAX, |core| {
            let ended = core.engine.has_ended(run);
            ended.then(|| (core.engine.take_outcome(run), core.engine.traffic()))
        });
        let Some((Some(outcome), after)) = outcome else { unreachable!("driven until it has ended") };
        outcome.map_err(CollectiveError::Failed)?;
        let result = result.to_vec().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        Ok((result, after.since(before)))
    }
}
