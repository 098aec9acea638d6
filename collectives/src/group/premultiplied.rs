//! Premultiplied sums: every rank gives a factor that its own input is multiplied by before it is
//! summed.
//!
//! Factors may differ from rank to rank and are no part of what must match: a rank multiplies its
//! own input, each product rounded once to its type, before any peer can see it. So the schedules
//! and their proofs stay what they are, whoever reads whose memory. It costs one more pass over the
//! rank's own data.

use pleach_vocabulary::{Rank, ReduceOp};

use super::{CollectiveError, Data, DataMut, Element, Group, OwnedData, Started};

impl Group {
    /// Replaces every rank's `data` by the sum of all of them, each multiplied by its rank's factor
    /// first, in place. After an error that was found before the call began the data are as they
    /// were or multiplied.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce_premultiplied<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        factor: <D::Element as Element>::Factor,
    ) -> Result<(), CollectiveError> {
        scale(data.elements_mut(), factor);
        self.all_reduce(data, ReduceOp::Sum)
    }

    /// Stores the sum of every rank's `input`, each multiplied by its rank's factor first, in every
    /// rank's `output`. The products are made in `output`; the input stays as it is.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce_premultiplied_into<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        factor: T::Factor,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        let (from, into) = (input.elements(), output.elements_mut());
        super::operation::expect_length("the output of all-reduce", from.len(), into.len())?;
        for (into, &from) in into.iter_mut().zip(from) {
            *into = from.scaled(factor);
        }
        self.all_reduce(output, ReduceOp::Sum)
    }

    /// Replaces `data` of the root by the sum of every rank's, each multiplied by its rank's factor
    /// first; the other ranks' stay as they are, since their products are made in memory of the
    /// call's own.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_premultiplied<D: DataMut + ?Sized>(
        &self,
        data: &mut D,
        factor: <D::Element as Element>::Factor,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        if self.rank() == root {
            scale(data.elements_mut(), factor);
            return self.reduce(data, ReduceOp::Sum, root);
        }
        self.reduce(&mut products(data.elements(), factor), ReduceOp::Sum, root)
    }

    /// Stores part `r` of the sum of all ranks' inputs, each multiplied by its rank's factor first,
    /// in rank `r`'s `output`. The products are made in memory of the call's own; the input stays
    /// as it is.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter_premultiplied<T: Element, I, O>(
        &self,
        input: &I,
        output: &mut O,
        factor: T::Factor,
    ) -> Result<(), CollectiveError>
    where
        I: Data<Element = T> + ?Sized,
        O: DataMut<Element = T> + ?Sized,
    {
        self.reduce_scatter(&products(input.elements(), factor), output, ReduceOp::Sum)
    }

    /// Starts [`Group::all_reduce_premultiplied`]; the products are made before it returns.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce_premultiplied<D: OwnedData>(
        &self,
        mut data: D,
        factor: <D::Element as Element>::Factor,
    ) -> Started<D> {
        scale(data.elements_mut(), factor);
        self.start_all_reduce(data, ReduceOp::Sum)
    }
}

fn scale<T: Element>(elements: &mut [T], factor: T::Factor) {
    elements.iter_mut().for_each(|element| *element = element.scaled(factor));
}

fn products<T: Element>(elements: &[T], factor: T::Factor) -> Vec<T> {
    elements.iter().map(|element| element.scaled(factor)).collect()
}
