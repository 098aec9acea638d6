//! Calls that wait for their result, as methods: sugar for [`Group::run`] of an [`Operation`] on
//! borrowed memory.

use super::data::{Data, DataMut};
use super::error::CollectiveError;
use super::{Group, Operation};
use pleach_vocabulary::Rank;
use pleach_vocabulary::ReduceOp;

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
}
