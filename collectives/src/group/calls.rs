//! Calls that wait for their result: reductions, broadcast, all-gather, barrier, messages.

use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::{Data, DataMut, Element, destination, source};
use super::error::CollectiveError;
use super::operation::{barrier_operation, operation};
use crate::call::Counts;

impl Group {
    /// Replaces every rank's `data` by the reduction of all of them.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce<D: DataMut + ?Sized>(&self, data: &mut D, op: ReduceOp) -> Result<(), CollectiveError> {
        if let Some(exact) = self.exact_for(D::Element::DATA_TYPE, op)? {
            return exact.all_reduce(&self.inexact(), data.elements_mut(), op);
        }
        self.blocking(self.all_reduce_operation(data, op))
    }

    /// Stores the reduction of every rank's `input` in every rank's `output`.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce_into<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        op: ReduceOp,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        let count = self.part_len(Collective::AllReduce, input.elements().len(), output.elements().len())?;
        if let Some(exact) = self.exact_for(T::DATA_TYPE, op)? {
            output.elements_mut().copy_from_slice(input.elements());
            return exact.all_reduce(&self.inexact(), output.elements_mut(), op);
        }
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        self.blocking(operation::<I>(Collective::AllReduce, op, Counts::Each(count), input, output))
    }

    /// Replaces `data` of the root by the reduction of every rank's; the other ranks' stay as they
    /// are.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.expect_rank(root)?;
        if let Some(exact) = self.exact_for(D::Element::DATA_TYPE, op)? {
            return exact.reduce(&self.inexact(), data.elements_mut(), op, root);
        }
        self.blocking(self.reduce_operation(data, op, root)?)
    }

    /// Replaces every rank's `data` by the root's.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn broadcast<D: DataMut + ?Sized>(&self, data: &mut D, root: Rank) -> Result<(), CollectiveError> {
        self.blocking(self.broadcast_operation(data, root)?)
    }

    /// Stores every rank's `input` in every rank's `output`, one after the other in rank order.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_gather<T: Element, I, O>(&self, input: &I, output: &mut O) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.all_gather_operation(input, output)?)
    }

    /// Stores part `r` of the reduction of every rank's `input` in rank `r`'s `output`.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        op: ReduceOp,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        if let Some(exact) = self.exact_for(T::DATA_TYPE, op)? {
            let (found, count) = (input.elements().len(), output.elements().len());
            let counts = Counts::Each(self.part_len(Collective::ReduceScatter, found, count)?);
            return exact.reduce_scatter(
                &self.inexact(),
                input.elements(),
                output.elements_mut(),
                &counts,
                op,
            );
        }
        self.blocking(self.reduce_scatter_operation(input, output, op)?)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.blocking(barrier_operation())
    }

    /// Sends `data` to a rank that receives as many elements of the same type; returns when `data`
    /// may be changed again.
    ///
    /// Of more than 8 KiB that is when the receiver has made its call. Fewer bytes may be on their
    /// way before it has, so that a receiver that asks for something else is told of it, and this
    /// rank by a later call. Do not count on it: a few messages ahead of the receiver, a send waits
    /// for it.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn send<D: Data + ?Sized>(&self, data: &D, to: Rank) -> Result<(), CollectiveError> {
        self.blocking(self.send_operation(data, to)?)
    }

    /// Receives `data` from a rank that sends as many elements of the same type.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn recv<D: DataMut + ?Sized>(&self, data: &mut D, from: Rank) -> Result<(), CollectiveError> {
        self.blocking(self.recv_operation(data, from)?)
    }
}
