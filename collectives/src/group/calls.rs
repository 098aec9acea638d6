//! Calls that wait for their result, as methods: sugar for [`Group::run`] of an [`Operation`] on
//! borrowed memory.

use super::bound::expect_length;
use super::data::{Data, DataMut};
use super::error::{CollectiveError, NotExact};
use super::{Group, Operation};
use pleach_vocabulary::ReduceOp;
use pleach_vocabulary::{DataType, Rank};

impl Group {
    /// Replaces every rank's `data` by the reduction of all of them
    /// ([`Operation::all_reduce`]).
    #[inline]
    pub fn all_reduce<D: DataMut + ?Sized>(&self, data: &mut D, op: ReduceOp) -> Result<(), CollectiveError> {
        self.run(Operation::all_reduce(data, op))
    }

    /// Replaces `data` of the root by the reduction of every rank's ([`Operation::reduce`]).
    pub fn reduce<D>(&self, data: &mut D, op: ReduceOp, root: Rank) -> Result<(), CollectiveError>
    where
        D: DataMut + ?Sized,
    {
        self.run(Operation::reduce(data, op, root))
    }

    /// Replaces every rank's `data` by the root's ([`Operation::broadcast`]).
    pub fn broadcast<D: DataMut + ?Sized>(&self, data: &mut D, root: Rank) -> Result<(), CollectiveError> {
        self.run(Operation::broadcast(data, root))
    }

    /// Stores every rank's `input` in every rank's `output` ([`Operation::all_gather`]).
    pub fn all_gather<I, O>(&self, input: &I, output: &mut O) -> Result<(), CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut<Element = I::Element> + ?Sized,
    {
        self.run(Operation::all_gather(input, output))
    }

    /// Stores block `r` of the reduction of every rank's `input` in rank `r`'s `output`
    /// ([`Operation::reduce_scatter`]).
    pub fn reduce_scatter<I, O>(&self, input: &I, output: &mut O, op: ReduceOp) -> Result<(), CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut<Element = I::Element> + ?Sized,
    {
        self.run(Operation::reduce_scatter(input, output, op))
    }

    /// Stores every rank's `input` in the root's `output` ([`Operation::gather`]).
    pub fn gather<I, O>(&self, input: &I, output: &mut O, root: Rank) -> Result<(), CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut<Element = I::Element> + ?Sized,
    {
        self.run(Operation::gather(input, output, root))
    }

    /// Stores block `r` of the root's `input` in rank `r`'s `output` ([`Operation::scatter`]).
    pub fn scatter<I, O>(&self, input: &I, output: &mut O, root: Rank) -> Result<(), CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut<Element = I::Element> + ?Sized,
    {
        self.run(Operation::scatter(input, output, root))
    }

    /// Stores block `r` of rank `s`'s `input` as block `s` of rank `r`'s `output`
    /// ([`Operation::all_to_all`]).
    pub fn all_to_all<I, O>(&self, input: &I, output: &mut O) -> Result<(), CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut<Element = I::Element> + ?Sized,
    {
        self.run(Operation::all_to_all(input, output))
    }

    /// Sends `data` to a rank that receives as many elements of the same type; returns when `data`
    /// may be changed again ([`Operation::send`]).
    pub fn send<D: Data + ?Sized>(&self, data: &D, to: Rank) -> Result<(), CollectiveError> {
        self.run(Operation::send(data, to))
    }

    /// Receives `data` from a rank that sends as many elements of the same type
    /// ([`Operation::recv`]).
    pub fn recv<D: DataMut + ?Sized>(&self, data: &mut D, from: Rank) -> Result<(), CollectiveError> {
        self.run(Operation::recv(data, from))
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.run(Operation::barrier())
    }

    /// Stores in every rank's `output` the sum of all contributions of all ranks, rounded once. A
    /// rank may give several, or none: the bits depend neither on who gives which, nor on the
    /// number of ranks. Each contribution is as long as `output`, and so is `output` on all ranks.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::NotExact`], unless the group's options say
    /// [`Reproducible::Exact`](crate::Reproducible::Exact).
    pub fn all_reduce_many(
        &self,
        contributions: &[&[f32]],
        output: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let (op, data_type) = (ReduceOp::Sum, DataType::F32);
        self.must_be_exact(data_type, op)?;
        let Some(exact) = &self.exact else {
            return Err(CollectiveError::NotExact { op, data_type, reason: NotExact::Group });
        };
        for contribution in contributions {
            let what = "a contribution of all-reduce (as long as the output)";
            expect_length(what, output.len(), contribution.len())?;
        }
        // The integers that it is made of are no floats.
        exact.sum_of_many(&Self { exact: None, ..self.clone() }, contributions, output)
    }
}
