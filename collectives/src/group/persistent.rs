//! Calls that are made again and again: checked, chosen and planned once.
//!
//! **Invariant:** the memory of a persistent call is its own and keeps its length, so what was
//! planned fits every run.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use pleach_vocabulary::{Rank, ReduceOp};

use super::data::{DataMut, Element, OwnedData};
use super::error::CollectiveError;
use super::operation::Operation;
use super::pending::{PendingError, Started};
use super::{Data, Group};
use crate::engine::Plan;

/// A collective that is planned and can be run as often as wanted. It owns its memory, which is
/// read and written between runs: as a slice (by `Deref`), or where input and output are apart, by
/// [`Persistent::input_mut`] and [`Persistent::output`].
///
/// A run is a call like any other: it matches the same call of the other ranks, persistent there or
/// not.
pub struct Persistent<D> {
    group: Group,
    plan: Arc<Plan>,
    make: Make<D>,
    op: ReduceOp,
    root: Rank,
    data: D,
}

/// The operation on this memory.
type Make<D> = fn(&Group, &mut D, ReduceOp, Rank) -> Result<Operation, CollectiveError>;

impl<D> fmt::Debug for Persistent<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Persistent({})", self.plan.descriptor())
    }
}

impl Group {
    /// Prepares [`Group::all_reduce`] of this memory, through this handle: with its deadline, tag
    /// and algorithm. Local.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it. Not for what an exact group makes
    /// exact.
    pub fn prepare_all_reduce<D: OwnedData>(
        &self,
        data: D,
        op: ReduceOp,
    ) -> Result<Persistent<D>, PendingError<D>> {
        let may = self.refuse_to_start(D::Element::DATA_TYPE, op);
        self.prepare(may, data, op, 0, |group, data, op, _| Ok(group.all_reduce_operation(data, op)))
    }

    /// Prepares [`Group::reduce`].
    ///
    /// # Errors
    ///
    /// As [`Group::prepare_all_reduce`].
    pub fn prepare_reduce<D: OwnedData>(
        &self,
        data: D,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Persistent<D>, PendingError<D>> {
        let may = self.refuse_to_start(D::Element::DATA_TYPE, op);
        self.prepare(may, data, op, root, |group, data, op, root| group.reduce_operation(data, op, root))
    }

    /// Prepares [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// As [`Group::prepare_all_reduce`].
    pub fn prepare_broadcast<D: OwnedData>(
        &self,
        data: D,
        root: Rank,
    ) -> Result<Persistent<D>, PendingError<D>> {
        self.prepare(Ok(()), data, ReduceOp::Sum, root, |group, data, _, root| {
            group.broadcast_operation(data, root)
        })
    }

    /// Prepares [`Group::all_gather`].
    ///
    /// # Errors
    ///
    /// As [`Group::prepare_all_reduce`].
    #[allow(clippy::type_complexity)]
    pub fn prepare_all_gather<T: Element, I, O>(
        &self,
        input: I,
        output: O,
    ) -> Result<Persistent<(I, O)>, PendingError<(I, O)>>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        self.prepare(Ok(()), (input, output), ReduceOp::Sum, 0, |group, (input, output), _, _| {
            group.all_gather_operation(input, output)
        })
    }

    /// Prepares [`Group::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// As [`Group::prepare_all_reduce`].
    #[allow(clippy::type_complexity)]
    pub fn prepare_reduce_scatter<T: Element, I, O>(
        &self,
        input: I,
        output: O,
        op: ReduceOp,
    ) -> Result<Persistent<(I, O)>, PendingError<(I, O)>>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let may = self.refuse_to_start(T::DATA_TYPE, op);
        self.prepare(may, (input, output), op, 0, |group, (input, output), op, _| {
            group.reduce_scatter_operation(input, output, op)
        })
    }

    fn prepare<D>(
        &self,
        may: Result<(), CollectiveError>,
        mut data: D,
        op: ReduceOp,
        root: Rank,
        make: Make<D>,
    ) -> Result<Persistent<D>, PendingError<D>> {
        let operation = may.and_then(|()| make(self, &mut data, op, root));
        match operation.and_then(|operation| self.kept_plan(&operation)) {
            Ok(plan) => Ok(Persistent { group: self.clone(), plan, make, op, root, data }),
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// The plan of an operation, to be kept.
    pub(super) fn kept_plan(&self, operation: &Operation) -> Result<Arc<Plan>, CollectiveError> {
        self.expect_open()?;
        let mut core = self.shared.driver.lock();
        Ok(self.plan(&mut core.planner, operation)?.clone())
    }
}

impl<D> Persistent<D> {
    /// Carries it out once, as the blocking call does.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn run(&mut self) -> Result<(), CollectiveError> {
        let operation = (self.make)(&self.group, &mut self.data, self.op, self.root)?;
        self.group.blocking_by(operation, Some(&self.plan))
    }

    /// Starts it, as the `start_` call does; it comes back with the outcome.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; this comes back with it.
    #[allow(clippy::result_large_err)] // What was to be started comes back, as with every start.
    pub fn start(mut self) -> Started<Self> {
        let operation = (self.make)(&self.group, &mut self.data, self.op, self.root);
        let (group, plan) = (self.group.clone(), self.plan.clone());
        group.start_by(operation, Some(&plan), self)
    }

    /// Gives the memory back.
    #[must_use]
    pub fn into_data(self) -> D {
        self.data
    }
}

impl<D: OwnedData> Deref for Persistent<D> {
    type Target = [D::Element];

    fn deref(&self) -> &[D::Element] {
        self.data.elements()
    }
}

impl<D: OwnedData> DerefMut for Persistent<D> {
    fn deref_mut(&mut self) -> &mut [D::Element] {
        self.data.elements_mut()
    }
}

impl<I: OwnedData, O: OwnedData> Persistent<(I, O)> {
    /// What the next run reads.
    pub fn input_mut(&mut self) -> &mut [I::Element] {
        self.data.0.elements_mut()
    }

    /// What the last run wrote.
    #[must_use]
    pub fn output(&self) -> &[O::Element] {
        self.data.1.elements()
    }
}
