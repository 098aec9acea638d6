//! Operations that are carried out again and again: checked, chosen and planned once.
//!
//! **Invariant:** the memory of a persistent operation is its own, or borrowed by it alone, and
//! keeps its length, so what was planned fits every run.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use pleach_transport::cuda::Stream;

use super::data::{Data, Element, OwnedData};
use super::error::CollectiveError;
use super::operation::Operation;
use super::pending::{PendingError, Started};
use super::{GpuBuffer, Group};
use crate::engine::Plan;

/// An operation that is planned and can be run as often as wanted. It has its memory, which is read
/// and written between runs: of the host's, as a slice (by `Deref`), or where input and output are
/// apart, by [`Persistent::input_mut`] and [`Persistent::output`]; of a GPU's, by
/// [`Persistent::store`] and by the buffers' addresses.
///
/// A run is a call like any other: it matches the same call of the other ranks, persistent there or
/// not.
pub struct Persistent<D> {
    group: Group,
    /// What is made exact consists of calls of its own.
    plan: Option<Arc<Plan>>,
    operation: Operation<D>,
}

impl<D> fmt::Debug for Persistent<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.plan {
            Some(plan) => write!(formatter, "Persistent({})", plan.descriptor()),
            None => write!(formatter, "Persistent({:?})", self.operation),
        }
    }
}

impl Group {
    /// Prepares an operation, through this handle: with its deadline, tag, algorithm and stream.
    /// Local.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn prepare<D>(&self, mut operation: Operation<D>) -> Result<Persistent<D>, PendingError<D>> {
        let plan = operation.bind(self).and_then(|call| {
            self.expect_open()?;
            // It would outlive the step, and its plan the divisor.
            self.shared.contributors.expect_all()?;
            if call.is_exact {
                return Ok(None);
            }
            let mut core = self.shared.driver.lock();
            Ok(Some(self.plan(&mut core.planner, &call)?.clone()))
        });
        match plan {
            Ok(plan) => Ok(Persistent { group: self.clone(), plan, operation }),
            Err(error) => Err(PendingError { error, data: operation.into_data() }),
        }
    }
}

impl<D> Persistent<D> {
    /// Carries it out once, as [`Group::run`] does.
    pub fn run(&mut self) -> Result<(), CollectiveError> {
        let mut call = self.operation.bind(&self.group)?;
        self.group.blocking(&mut call, self.plan.as_ref())
    }

    /// Has the runs from now on come after the earlier work of this stream.
    pub fn on(&mut self, stream: &Stream) -> &mut Self {
        self.group = self.group.on(stream);
        self
    }

    /// The memory that it works on.
    #[must_use]
    pub fn data(&self) -> &D {
        self.operation.data()
    }

    /// Gives the memory back.
    #[must_use]
    pub fn into_data(self) -> D {
        self.operation.into_data()
    }
}

impl<D: OwnedData> Persistent<D> {
    /// Starts it, as [`Group::start`] does; it comes back with the outcome.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; this comes back with it.
    #[allow(clippy::result_large_err)] // What was to be started comes back, as with every start.
    pub fn start(mut self) -> Started<Self> {
        let call = self.operation.bind(&self.group);
        let (group, plan) = (self.group.clone(), self.plan.clone());
        group.start_by(call, plan.as_ref(), self)
    }
}

impl<D: Data + Deref<Target = [D::Element]>> Deref for Persistent<D> {
    type Target = [D::Element];

    fn deref(&self) -> &[D::Element] {
        self.operation.data()
    }
}

impl<D: Data + DerefMut<Target = [D::Element]>> DerefMut for Persistent<D> {
    fn deref_mut(&mut self) -> &mut [D::Element] {
        self.operation.data_mut()
    }
}

impl<I, O> Persistent<(I, O)> {
    /// What the next run reads.
    #[must_use]
    pub fn input(&self) -> &I {
        &self.operation.data().0
    }

    /// What the last run wrote.
    #[must_use]
    pub fn output(&self) -> &O {
        &self.operation.data().1
    }
}

impl<I: Data + DerefMut<Target = [I::Element]>, O> Persistent<(I, O)> {
    /// What the next run reads, to be written.
    pub fn input_mut(&mut self) -> &mut [I::Element] {
        &mut self.operation.data_mut().0
    }
}

impl<T: Element> Persistent<GpuBuffer<T>> {
    /// [`GpuBuffer::store`] to the memory.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.operation.data_mut().store(elements)
    }
}

impl<T: Element, O> Persistent<(GpuBuffer<T>, O)> {
    /// [`GpuBuffer::store`] to the input.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.operation.data_mut().0.store(elements)
    }
}
