//! Calls whose input and output are one memory of a block for each rank: a rank's own block lies at
//! its place in it.
//!
//! All-to-all has no such form: what goes to a rank and what comes from it would lie at the same
//! place.

use std::ops::Range;

use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::Group;
use super::data::{DataMut, Element, OwnedData, destination, part};
use super::error::CollectiveError;
use super::operation::{Operation, expect_length, moving};
use super::pending::Started;
use crate::call::Counts;
use crate::engine::Bytes;

impl Group {
    /// Fills every rank's `data`, which has a block for each rank, with all ranks' blocks; block
    /// `r` of rank `r` is what that rank gives.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_gather_in_place<D: DataMut + ?Sized>(&self, data: &mut D) -> Result<(), CollectiveError> {
        self.blocking(self.all_gather_in_place_operation(data)?)
    }

    /// Replaces block `r` of rank `r`'s `data`, which has a block for each rank, by that of the
    /// reduction of all; the other blocks stay as they are.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter_in_place<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let operation = self.reduce_scatter_in_place_operation(data, op)?;
        if let Some(exact) = self.exact_for(D::Element::DATA_TYPE, op)? {
            let (count, own) = self.own_block(data.elements().len());
            let input = data.elements().to_vec();
            let output = &mut data.elements_mut()[own];
            return exact.reduce_scatter(&self.inexact(), &input, output, &Counts::Each(count), op);
        }
        self.blocking(operation)
    }

    /// Fills the root's `data`, which has a block for each rank, with all ranks' blocks; its own is
    /// at its place there. The other ranks' `data` is what they give.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn gather_in_place<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.blocking(self.gather_in_place_operation(data, root)?)
    }

    /// Stores block `r` of the root's `data`, which has a block for each rank, in rank `r`'s
    /// `data`; the root's stays as it is.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn scatter_in_place<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.blocking(self.scatter_in_place_operation(data, root)?)
    }

    /// Starts [`Group::all_gather_in_place`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_gather_in_place<D: OwnedData>(&self, mut data: D) -> Started<D> {
        let operation = self.all_gather_in_place_operation(&mut data);
        self.start(operation, data)
    }

    /// Starts [`Group::reduce_scatter_in_place`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce_scatter_in_place<D: OwnedData>(&self, mut data: D, op: ReduceOp) -> Started<D> {
        let operation = self.refuse_to_start(D::Element::DATA_TYPE, op);
        let operation = operation.and_then(|()| self.reduce_scatter_in_place_operation(&mut data, op));
        self.start(operation, data)
    }

    /// Starts [`Group::gather_in_place`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_gather_in_place<D: OwnedData>(&self, mut data: D, root: Rank) -> Started<D> {
        let operation = self.gather_in_place_operation(&mut data, root);
        self.start(operation, data)
    }

    /// Starts [`Group::scatter_in_place`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_scatter_in_place<D: OwnedData>(&self, mut data: D, root: Rank) -> Started<D> {
        let operation = self.scatter_in_place_operation(&mut data, root);
        self.start(operation, data)
    }

    fn all_gather_in_place_operation<D>(&self, data: &mut D) -> Result<Operation, CollectiveError>
    where
        D: DataMut + ?Sized,
    {
        let (count, own, whole) =
            self.whole_and_own("the data of all-gather (a block for each rank)", data)?;
        Ok(moving(Collective::AllGather, D::Element::DATA_TYPE, count, own, whole))
    }

    fn reduce_scatter_in_place_operation<D>(
        &self,
        data: &mut D,
        op: ReduceOp,
    ) -> Result<Operation, CollectiveError>
    where
        D: DataMut + ?Sized,
    {
        let what = "the data of reduce-scatter (a block for each rank)";
        let (count, own, whole) = self.whole_and_own(what, data)?;
        let moving = moving(Collective::ReduceScatter, D::Element::DATA_TYPE, count, whole, own);
        Ok(Operation { op, ..moving })
    }

    fn gather_in_place_operation<D>(&self, data: &mut D, root: Rank) -> Result<Operation, CollectiveError>
    where
        D: DataMut + ?Sized,
    {
        self.expect_rank(root)?;
        let (count, own, whole) = if self.rank() == root {
            self.whole_and_own("the root's data of gather (a block for each rank)", data)?
        } else {
            (data.elements().len(), destination(data, self.shared.number), Bytes::None)
        };
        Ok(moving(Collective::Gather { root }, D::Element::DATA_TYPE, count, own, whole))
    }

    fn scatter_in_place_operation<D>(&self, data: &mut D, root: Rank) -> Result<Operation, CollectiveError>
    where
        D: DataMut + ?Sized,
    {
        self.expect_rank(root)?;
        let (count, own, whole) = if self.rank() == root {
            self.whole_and_own("the root's data of scatter (a block for each rank)", data)?
        } else {
            (data.elements().len(), destination(data, self.shared.number), Bytes::None)
        };
        Ok(moving(Collective::Scatter { root }, D::Element::DATA_TYPE, count, whole, own))
    }

    /// Elements of a block, and the place of this rank's, of so many.
    fn own_block(&self, len: usize) -> (usize, Range<usize>) {
        let count = len / self.world_size() as usize;
        let start = self.rank() as usize * count;
        (count, start..start + count)
    }

    /// Elements of a block, this rank's block, and all blocks.
    fn whole_and_own<D: DataMut + ?Sized>(
        &self,
        what: &'static str,
        data: &mut D,
    ) -> Result<(usize, Bytes, Bytes), CollectiveError> {
        let len = data.elements().len();
        let (count, own) = self.own_block(len);
        expect_length(what, count * self.world_size() as usize, len)?;
        let whole = destination(data, self.shared.number);
        let size = size_of::<D::Element>();
        Ok((count, part(&whole, own.start * size..own.end * size), whole))
    }
}
