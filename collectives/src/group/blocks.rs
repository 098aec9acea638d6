//! Calls that move blocks between ranks: gather, scatter, all-to-all.

use pleach_vocabulary::{Collective, Rank};

use super::Group;
use super::data::{Data, DataMut, Element, OwnedData, destination, source};
use super::error::CollectiveError;
use super::operation::{Operation, moving};
use super::pending::Started;
use crate::engine::Bytes;

impl Group {
    /// Stores every rank's `input` in the root's `output`, one after the other in rank order. The
    /// other ranks' `output` is not looked at; it may be empty.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn gather<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        root: Rank,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.gather_operation(input, output, root)?)
    }

    /// Stores block `r` of the root's `input`, which has a block for each rank, in rank `r`'s
    /// `output`. The other ranks' `input` is not looked at; it may be empty.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn scatter<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        root: Rank,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.scatter_operation(input, output, root)?)
    }

    /// Stores block `r` of rank `s`'s `input` as block `s` of rank `r`'s `output`; both have a
    /// block for each rank.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_to_all<T: Element, I, O>(&self, input: &I, output: &mut O) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.blocking(self.all_to_all_operation(input, output)?)
    }

    /// Starts [`Group::gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_gather<T: Element, I, O>(&self, input: I, mut output: O, root: Rank) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.gather_operation(&input, &mut output, root);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_scatter<T: Element, I, O>(&self, input: I, mut output: O, root: Rank) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.scatter_operation(&input, &mut output, root);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::all_to_all`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_to_all<T: Element, I, O>(&self, input: I, mut output: O) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.all_to_all_operation(&input, &mut output);
        self.start(operation, (input, output))
    }

    fn gather_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        root: Rank,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let collective = Collective::Gather { root };
        let count = self.part_len(collective, input.elements().len(), output.elements().len())?;
        let output = if self.rank() == root { destination(output, self.shared.number) } else { Bytes::None };
        let input = source(input, self.shared.number);
        Ok(moving(collective, I::Element::DATA_TYPE, count, input, output))
    }

    fn scatter_operation<I, O>(
        &self,
        input: &I,
        output: &mut O,
        root: Rank,
    ) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let collective = Collective::Scatter { root };
        let count = self.part_len(collective, input.elements().len(), output.elements().len())?;
        let input = if self.rank() == root { source(input, self.shared.number) } else { Bytes::None };
        let output = destination(output, self.shared.number);
        Ok(moving(collective, I::Element::DATA_TYPE, count, input, output))
    }

    fn all_to_all_operation<I, O>(&self, input: &I, output: &mut O) -> Result<Operation, CollectiveError>
    where
        I: Data + ?Sized,
        O: DataMut + ?Sized,
    {
        let count = self.part_len(Collective::AllToAll, input.elements().len(), output.elements().len())?;
        let (input, output) = (source(input, self.shared.number), destination(output, self.shared.number));
        Ok(moving(Collective::AllToAll, I::Element::DATA_TYPE, count, input, output))
    }
}
