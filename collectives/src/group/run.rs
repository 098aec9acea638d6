//! How a call becomes a run of the engine: by which plan, at once or started, and how it is waited
//! for.

use std::sync::Arc;

use super::Group;
use super::bound::BoundCall;
use super::data::OwnedData;
use super::driver::Core;
use super::error::{CollectiveError, NotExact};
use super::operation::Operation;
use super::pending::{Pending, PendingError, Started};
use super::planner::Planner;
use super::premultiplied::Products;
use super::unwinding::without_unwinding;
use crate::call::Descriptor;
use crate::engine::{Bytes, Plan, RunId};

impl Group {
    /// Carries an operation out and returns when this rank's part of it is done.
    #[inline(always)] // The operation is made by the caller: nothing of it is moved.
    pub fn run<D>(&self, mut operation: Operation<D>) -> Result<(), CollectiveError> {
        self.blocking(&mut operation.bind(self)?, None)
    }

    /// Starts an operation, which owns its memory until it has ended. A borrow that is forgotten
    /// would leave peers writing into memory that is used otherwise:
    ///
    /// ```compile_fail,E0277
    /// # use pleach_collectives::{Group, Operation, ReduceOp};
    /// # fn start(group: &Group) {
    /// let mut gradient = [1.0f32, 2.0];
    /// let pending = group.start(Operation::all_reduce(&mut gradient, ReduceOp::Sum));
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`]; the memory comes back with it.
    pub fn start<D: OwnedData>(&self, mut operation: Operation<D>) -> Started<D> {
        let call = operation.bind(self);
        self.start_by(call, None, operation.into_data())
    }

    /// Starts an operation, by its plan where that is known.
    pub(super) fn begin(
        &self,
        core: &mut Core,
        call: BoundCall,
        plan: Option<&Arc<Plan>>,
    ) -> Result<RunId, CollectiveError> {
        self.expect_open()?;
        let plan = match plan {
            Some(plan) => plan,
            None => self.plan(&mut core.planner, &call)?,
        };
        let BoundCall { input, output, gate, .. } = call;
        without_unwinding(|| {
            let run = core.engine.start_behind(gate, plan, input, output, self.timeout)?;
            core.engine.prioritize(run, self.priority);
            Ok(run)
        })
    }

    pub(super) fn plan<'a>(
        &self,
        planner: &'a mut Planner,
        call: &BoundCall,
    ) -> Result<&'a Arc<Plan>, CollectiveError> {
        let BoundCall { collective, data_type, op, counts, .. } = call;
        let (collective, data_type, op) = (*collective, *data_type, *op);
        if !op.fits(data_type) {
            return Err(CollectiveError::Meaningless { op, data_type });
        }
        let descriptor = Descriptor { collective, amount: counts.amount(), data_type, op, tag: self.tag };
        planner.plan(&descriptor, counts, self.variant.as_ref())
    }

    /// As [`Self::begin`], for a call that waits; `None` when it has been carried out.
    fn carry_out(
        &self,
        core: &mut Core,
        call: &BoundCall,
        plan: Option<&Arc<Plan>>,
    ) -> Result<Option<RunId>, CollectiveError> {
        let plan = match plan {
            Some(plan) => plan,
            None => self.plan(&mut core.planner, call)?,
        };
        let BoundCall { input, output, .. } = call;
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

    /// Carries a call out on memory that its caller keeps meanwhile, by its plan where that is
    /// known.
    pub(super) fn blocking(
        &self,
        call: &mut BoundCall,
        plan: Option<&Arc<Plan>>,
    ) -> Result<(), CollectiveError> {
        self.expect_open()?;
        if self.is_ordered() {
            self.wait_for_stream(call)?;
        }
        // Kept until no device holds it.
        let _products = if call.given.is_some() { call.premultiply() } else { Products::new() };
        if call.is_exact {
            return self.exactly(call);
        }
        let driver = &self.shared.driver;
        let mut core = driver.lock();
        let registration = if call.is_private() { Some(self.lend(&mut core.engine, call)?) } else { None };
        core.begin_time();
        let outcome = match self.carry_out(&mut core, call, plan) {
            Ok(None) => {
                core.end_time();
                drop(core);
                Ok(())
            }
            Ok(Some(run)) => without_unwinding(|| driver.finish(core, run, self.interrupted))
                .map_err(CollectiveError::Failed),
            Err(error) => {
                driver.wait_fenced(core, &error, self.timeout);
                Err(error)
            }
        };
        if let Some(registration) = registration.filter(|registration| !registration.is_empty()) {
            (call.input, call.output) = (Bytes::None, Bytes::None);
            self.take_back(&registration);
        }
        outcome
    }

    /// Starts a call on memory that the data hold, by its plan where that is known.
    pub(super) fn start_by<D>(
        &self,
        call: Result<BoundCall, CollectiveError>,
        plan: Option<&Arc<Plan>>,
        data: D,
    ) -> Started<D> {
        let run = call.and_then(|mut call| {
            self.expect_open()?;
            if call.is_exact {
                let BoundCall { op, data_type, .. } = call;
                return Err(CollectiveError::NotExact { op, data_type, reason: NotExact::Started });
            }
            if self.is_ordered() {
                call.gate = self.order(&call)?.gate(call.foreign.take())?;
            }
            self.shared.begin_progress()?;
            let products = call.premultiply();
            Ok((self.launch(call, plan)?, products))
        });
        match run {
            Ok((run, products)) => {
                let pending = Pending::new(self.shared.driver.clone(), run, data, products);
                self.shared.wake_progress();
                Ok(pending)
            }
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// Starts a call whose memory somebody keeps until it has ended.
    pub(super) fn launch(&self, call: BoundCall, plan: Option<&Arc<Plan>>) -> Result<RunId, CollectiveError> {
        let driver = &self.shared.driver;
        let mut core = driver.lock();
        core.begin_time();
        let run = self.begin(&mut core, call, plan);
        without_unwinding(|| core.end_time());
        run.inspect_err(|error| driver.wait_fenced(core, error, self.timeout))
    }
}
