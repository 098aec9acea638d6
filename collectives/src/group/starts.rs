//! Calls that are started and waited for later: they own what they work on.

use std::sync::Arc;

use pleach_vocabulary::{Rank, ReduceOp};

use super::Group;
use super::data::{Data, DataMut, Element, OwnedData};
use super::error::CollectiveError;
use super::operation::{Operation, barrier_operation};
use super::pending::{Pending, PendingError, Started};
use super::unwinding::without_unwinding;
use crate::engine::{Plan, RunId};

impl Group {
    /// Starts [`Group::all_reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_reduce<D: OwnedData>(&self, mut data: D, op: ReduceOp) -> Started<D> {
        let operation = self.refuse_to_start(D::Element::DATA_TYPE, op);
        let operation = operation.map(|()| self.all_reduce_operation(&mut data, op));
        self.start(operation, data)
    }

    /// Starts [`Group::reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce<D: OwnedData>(&self, mut data: D, op: ReduceOp, root: Rank) -> Started<D> {
        let operation = self.refuse_to_start(D::Element::DATA_TYPE, op);
        let operation = operation.and_then(|()| self.reduce_operation(&mut data, op, root));
        self.start(operation, data)
    }

    /// Starts [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_broadcast<D: OwnedData>(&self, mut data: D, root: Rank) -> Started<D> {
        let operation = self.broadcast_operation(&mut data, root);
        self.start(operation, data)
    }

    /// Starts [`Group::all_gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_all_gather<T: Element, I, O>(&self, input: I, mut output: O) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.all_gather_operation(&input, &mut output);
        self.start(operation, (input, output))
    }

    /// Starts [`Group::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_reduce_scatter<T: Element, I, O>(
        &self,
        input: I,
        mut output: O,
        op: ReduceOp,
    ) -> Started<(I, O)>
    where
        I: OwnedData + Data<Element = T>,
        O: OwnedData + DataMut<Element = T>,
    {
        let operation = self.refuse_to_start(T::DATA_TYPE, op);
        let operation = operation.and_then(|()| self.reduce_scatter_operation(&input, &mut output, op));
        self.start(operation, (input, output))
    }

    /// Starts [`Group::barrier`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn start_barrier(&self) -> Started<()> {
        self.start(Ok(barrier_operation()), ())
    }

    /// Starts [`Group::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_send<D: OwnedData>(&self, data: D, to: Rank) -> Started<D> {
        let operation = self.send_operation(&data, to);
        self.start(operation, data)
    }

    /// Starts [`Group::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start_recv<D: OwnedData>(&self, mut data: D, from: Rank) -> Started<D> {
        let operation = self.recv_operation(&mut data, from);
        self.start(operation, data)
    }

    pub(super) fn start_by<D>(
        &self,
        operation: Result<Operation, CollectiveError>,
        plan: Option<&Arc<Plan>>,
        data: D,
    ) -> Started<D> {
        let run = operation.and_then(|operation| {
            self.expect_own_process()?;
            self.shared.begin_progress()?;
            self.launch(operation, plan)
        });
        match run {
            Ok(run) => {
                let pending = Pending::new(self.shared.driver.clone(), run, data);
                self.shared.wake_progress();
                Ok(pending)
            }
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// Starts an operation whose memory somebody keeps until it has ended.
    pub(super) fn launch(
        &self,
        operation: Operation,
        plan: Option<&Arc<Plan>>,
    ) -> Result<RunId, CollectiveError> {
        let driver = &self.shared.driver;
        let mut core = driver.lock();
        core.begin_time();
        let run = self.begin(&mut core, operation, plan);
        without_unwinding(|| core.end_time());
        run.inspect_err(|error| driver.silence(core, error, self.timeout))
    }
}
