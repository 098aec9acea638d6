//! Operations under way.
//!
//! **Invariant:** the group's list ([`crate::group::Inner`]) holds every started operation until
//! the operation has ended, and so keeps its memory. This holds also if Python drops the
//! [`Pending`]. No thread waits for the lock of an operation while it holds the GIL.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::{CollectiveError, RawPair};
use pleach_transport::clock::now;
use pleach_transport::mutex::lock;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::error;
use crate::group::Inner;
use crate::memory::Memory;

/// How long a wait lasts between two checks for signals of the process.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// An operation and the memory that it works on.
pub(crate) struct Started {
    state: Mutex<State>,
}

enum State {
    UnderWay(Box<UnderWay>),
    Ended(Result<(), CollectiveError>),
}

/// The fields are dropped in this order: the memory is released after the operation.
pub(crate) struct UnderWay {
    pub(crate) operation: pleach_collectives::Pending<RawPair>,
    pub(crate) memory: [Option<Memory>; 2],
    pub(crate) keep: Option<Py<PyAny>>,
}

impl Started {
    pub(crate) fn new(under_way: UnderWay) -> Self {
        Self { state: Mutex::new(State::UnderWay(Box::new(under_way))) }
    }

    /// The outcome, if it is known within the limit. Called without the GIL.
    pub(crate) fn poll(&self, limit: Duration) -> Option<Result<(), CollectiveError>> {
        let mut state = lock(&self.state);
        match &mut *state {
            State::Ended(outcome) => return Some(outcome.clone()),
            State::UnderWay(under_way) => {
                if !under_way.operation.wait_for(limit) {
                    return None;
                }
            }
        }
        let State::UnderWay(under_way) = std::mem::replace(&mut *state, State::Ended(Ok(()))) else {
            return Some(Ok(()));
        };
        let UnderWay { operation, memory, keep } = *under_way;
        let outcome = operation.wait().map(drop).map_err(|error| error.error);
        *state = State::Ended(outcome.clone());
        drop(state);
        // The memory goes back to Python without a lock.
        drop((memory, keep));
        Some(outcome)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.state.try_lock().is_ok_and(|state| matches!(*state, State::Ended(_)))
    }
}

/// An operation under way. It keeps the memory until it has ended; a Pending that is dropped lets
/// the operation go on. Threads may share it. ``await pending`` gives the same as ``wait()``.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Pending")]
pub(crate) struct Pending {
    started: Arc<Started>,
    group: Arc<Inner>,
    result: Py<PyAny>,
}

impl Pending {
    pub(crate) fn new(started: Arc<Started>, group: Arc<Inner>, result: Py<PyAny>) -> Self {
        Self { started, group, result }
    }
}

#[pymethods]
impl Pending {
    /// Waits until the operation has ended, and returns its output.
    ///
    /// timeout: longest wait in seconds; None waits until the deadline of the call. After it
    /// TimeoutError is raised, and the operation goes on. Ctrl-C raises KeyboardInterrupt, and the
    /// operation goes on. Raises pleach.GroupError if the operation failed. May be called again.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let until = crate::group::limit(py, "timeout", timeout)?.map(|limit| now() + limit);
        loop {
            let left = until.map_or(SIGNAL_INTERVAL, |until| until.since(now()));
            let outcome = py.detach(|| self.started.poll(left.min(SIGNAL_INTERVAL)));
            match outcome {
                Some(Ok(())) => return Ok(self.result.clone_ref(py)),
                Some(Err(error)) => return Err(error::collective(py, self.group.info(), &error)),
                None => py.check_signals()?,
            }
            if until.is_some_and(|until| now() >= until) {
                return Err(PyTimeoutError::new_err("the operation is still under way; wait again"));
            }
        }
    }

    /// Whether the operation has ended, well or not. Does not block.
    fn done(&self, py: Python<'_>) -> bool {
        self.started.has_ended() || py.detach(|| self.started.poll(Duration::ZERO).is_some())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        py.import("pleach._await")?.getattr("until_done")?.call1((slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> &'static str {
        if self.started.has_ended() { "<pleach.Pending: ended>" } else { "<pleach.Pending: under way>" }
    }
}
