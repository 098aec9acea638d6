//! Calls whose blocks are of different lengths, which the caller names: the v-variants.
//!
//! In `all_gather_v` and `reduce_scatter_v` every rank passes the same list of counts. In the
//! others a rank passes what it knows, and each two ranks compare what goes between them before a
//! byte is moved (see the engine's `counts`).

use std::sync::Arc;

use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::{Data, DataMut, Element, OwnedData, destination, source};
use super::error::CollectiveError;
use super::operation::{Operation, expect_length, operation};
use super::pending::Started;
use crate::call::{Counts, Paired};
use crate::engine::Bytes;

impl Group {
    /// Stores every rank's `input` in every rank's `output`, one after the other in rank order;
    /// rank `r`'s has `counts[r]` elements. All ranks pass the same counts.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_gather_v<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.all_gather_v_operation(input, output, counts)?)
    }

    /// Reduces every rank's `input`, which consists of blocks of `counts[0]`, `counts[1]`, …
    /// elements, and stores block `r` of the result in rank `r`'s `output`. All ranks pass the same
    /// counts.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter_v<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        let operation = self.reduce_scatter_v_operation(input, output, counts, op)?;
        if let Some(exact) = self.exact_for(T::DATA_TYPE, op)? {
            let counts = &operation.counts;
            return exact.reduce_scatter(
                &self.inexact(),
                input.elements(),
                output.elements_mut(),
                counts,
                op,
            );
        }
        self.blocking(operation)
    }

    /// Stores every rank's `input` in the root's `output`, one after the other in rank order; rank
    /// `r`'s has `counts[r]` elements. Only the root's `counts` and `output` are looked at; those
    /// of the others may be empty.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn gather_v<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        root: Rank,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.gather_v_operation(input, output, counts, root)?)
    }

    /// Stores block `r` of the root's `input`, which has `counts[r]` elements, in rank `r`'s
    /// `output`. Only the root's `counts` and `input` are looked at; those of the others may be
    /// empty.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn scatter_v<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        root: Rank,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.scatter_v_operation(input, output, counts, root)?)
    }

    /// Gives rank `r` the next `send_counts[r]` elements of `input`, and stores the
    /// `receive_counts[r]` elements that come from rank `r` in `output`; in both, blocks lie in
    /// rank order without gaps. What a rank sends to another must be what that one expects of it.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_to_all_v<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.all_to_all_v_operation(input, output, send_counts, receive_counts)?)
    }

    /// Starts [`Group::all_gather_v`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_gather_v<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        counts: &[usize],
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.all_gather_v_operation(&input, &mut output, counts);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::reduce_scatter_v`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce_scatter_v<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.refuse_to_start(T::DATA_TYPE, op);
        let operation =
            operation.and_then(|()| self.reduce_scatter_v_operation(&input, &mut output, counts, op));
        self.start(operation, (input, output))
    }

    /// Starts [`Group::gather_v`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_gather_v<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        counts: &[usize],
        root: Rank,
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.gather_v_operation(&input, &mut output, counts, root);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::scatter_v`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_scatter_v<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        counts: &[usize],
        root: Rank,
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.scatter_v_operation(&input, &mut output, counts, root);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::all_to_all_v`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_to_all_v<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.all_to_all_v_operation(&input, &mut output, send_counts, receive_counts);
        self.start(operation, (input, output))
    }

    fn all_gather_v_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let (own, all) = self.own_and_all("all-gather", counts)?;
        expect_length("the input of all-gather (this rank's count)", own, input.elements().len())?;
        expect_length("the output of all-gather (all counts together)", all, output.elements().len())?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        Ok(operation::<I>(Collective::AllGather, ReduceOp::Sum, Counts::listed(counts), input, output))
    }

    fn reduce_scatter_v_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let (own, all) = self.own_and_all("reduce-scatter", counts)?;
        expect_length("the input of reduce-scatter (all counts together)", all, input.elements().len())?;
        expect_length("the output of reduce-scatter (this rank's count)", own, output.elements().len())?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        Ok(operation::<I>(Collective::ReduceScatter, op, Counts::listed(counts), input, output))
    }

    fn gather_v_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        root: Rank,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        self.expect_rank(root)?;
        let mut paired = self.nothing();
        paired.given[root as usize] = input.elements().len();
        let output = if self.rank() == root {
            let (own, all) = self.own_and_all("gather at the root", counts)?;
            expect_length("the root's input of gather (its own count)", own, input.elements().len())?;
            expect_length("the root's output of gather (all counts)", all, output.elements().len())?;
            paired.taken.copy_from_slice(counts);
            destination(output, self.shared.number)
        } else {
            Bytes::None
        };
        let input = source(input, self.shared.number);
        let counts = Counts::Paired(Arc::new(paired));
        Ok(operation::<I>(Collective::Gather { root }, ReduceOp::Sum, counts, input, output))
    }

    fn scatter_v_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        root: Rank,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        self.expect_rank(root)?;
        let mut paired = self.nothing();
        paired.taken[root as usize] = output.elements().len();
        let input = if self.rank() == root {
            let (own, all) = self.own_and_all("scatter at the root", counts)?;
            expect_length("the root's output of scatter (its own count)", own, output.elements().len())?;
            expect_length("the root's input of scatter (all counts)", all, input.elements().len())?;
            paired.given.copy_from_slice(counts);
            source(input, self.shared.number)
        } else {
            Bytes::None
        };
        let output = destination(output, self.shared.number);
        let counts = Counts::Paired(Arc::new(paired));
        Ok(operation::<I>(Collective::Scatter { root }, ReduceOp::Sum, counts, input, output))
    }

    fn all_to_all_v_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let (own_sent, sent) = self.own_and_all("what all-to-all sends", send_counts)?;
        let (own_received, received) = self.own_and_all("what all-to-all receives", receive_counts)?;
        expect_length("the input of all-to-all (all it sends)", sent, input.elements().len())?;
        expect_length("the output of all-to-all (all it receives)", received, output.elements().len())?;
        expect_length("what a rank receives from itself in all-to-all", own_sent, own_received)?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        let paired = Paired { given: send_counts.to_vec(), taken: receive_counts.to_vec() };
        let counts = Counts::Paired(Arc::new(paired));
        Ok(operation::<I>(Collective::AllToAll, ReduceOp::Sum, counts, input, output))
    }

    /// This rank's count and the sum of all, of a list with one for each rank.
    fn own_and_all(&self, what: &'static str, counts: &[usize]) -> Result<(usize, usize), CollectiveError> {
        let (expected, actual) = (self.world_size() as usize, counts.len());
        if expected != actual {
            return Err(CollectiveError::CountOfCounts { what, expected, actual });
        }
        let all = counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        Ok((counts[self.rank() as usize], all))
    }

    /// Counts by which nothing is given and nothing taken.
    fn nothing(&self) -> Paired {
        let ranks = self.world_size() as usize;
        Paired { given: vec![0; ranks], taken: vec![0; ranks] }
    }
}
