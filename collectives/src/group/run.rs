//! How a call becomes a run of the engine: by which plan, at once or started, and how it is waited
//! for.

use std::sync::Arc;

use super::Group;
use super::driver::Core;
use super::error::CollectiveError;
use super::operation::Operation;
use super::pending::Started;
use super::planner::Planner;
use super::unwinding::without_unwinding;
use crate::call::Descriptor;
use crate::engine::{Plan, RunId};

impl Group {
    /// Starts an operation, by its plan where that is known.
    pub(super) fn begin(
        &self,
        core: &mut Core,
        operation: Operation,
        plan: Option<&Arc<Plan>>,
    ) -> Result<RunId, CollectiveError> {
        self.expect_open()?;
        self.expect_space(&operation)?;
        let plan = match plan {
            Some(plan) => plan,
            None => self.plan(&mut core.planner, &operation)?,
        };
        let Operation { input, output, gate, .. } = operation;
        without_unwinding(|| {
            let run = core.engine.start_behind(gate, plan, input, output, self.timeout)?;
            core.engine.prioritize(run, self.priority);
            Ok(run)
        })
    }

    pub(super) fn plan<'a>(
        &self,
        planner: &'a mut Planner,
        operation: &Operation,
    ) -> Result<&'a Arc<Plan>, CollectiveError> {
        let Operation { collective, data_type, op, counts, .. } = operation;
        let (collective, data_type, op) = (*collective, *data_type, *op);
        if !op.fits(data_type) {
            return Err(CollectiveError::Meaningless { op, data_type });
        }
        let descriptor = Descriptor { collective, amount: counts.amount(), data_type, op, tag: self.tag };
        planner.plan(&descriptor, counts, self.way.as_ref())
    }

    /// As [`Self::begin`], for a call that waits; `None` when it has been carried out.
    fn carry_out(
        &self,
        core: &mut Core,
        operation: &Operation,
        plan: Option<&Arc<Plan>>,
    ) -> Result<Option<RunId>, CollectiveError> {
        let plan = match plan {
            Some(plan) => plan,
            None => self.plan(&mut core.planner, operation)?,
        };
        let Operation { input, output, .. } = operation;
        without_unwinding(|| {
            let run = core.engine.carry_out(plan, input, output, self.timeout)?;
            if let Some(run) = run {
                core.engine.prioritize(run, self.priority);
            } else {
                // Over shared memory all has gone out then.
                core.engine.flush();
            }
            Ok(run)
        })
    }

    pub(super) fn blocking(&self, operation: Operation) -> Result<(), CollectiveError> {
        self.blocking_by(operation, None)
    }

    pub(super) fn blocking_by(
        &self,
        mut operation: Operation,
        plan: Option<&Arc<Plan>>,
    ) -> Result<(), CollectiveError> {
        self.expect_open()?;
        self.expect_space(&operation)?;
        let driver = &self.shared.driver;
        let mut core = driver.lock();
        let lent = self.lend(&mut core.engine, &mut operation)?;
        core.begin_time();
        let outcome = match self.carry_out(&mut core, &operation, plan) {
            Ok(None) => {
                core.end_time();
                drop(core);
                Ok(())
            }
            Ok(Some(run)) => without_unwinding(|| driver.finish(core, run)).map_err(CollectiveError::Failed),
            Err(error) => {
                driver.silence(core, &error, self.timeout);
                Err(error)
            }
        };
        if !lent.is_empty() {
            drop(operation);
            self.take_back(&lent);
        }
        outcome
    }

    pub(super) fn start<D>(&self, operation: Result<Operation, CollectiveError>, data: D) -> Started<D> {
        self.start_by(operation, None, data)
    }
}
