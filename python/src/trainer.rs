//! The driver of training schemes as a Python class. The parameters and the gradient are memory
//! that Python reaches by its address.
//!
//! **Invariant:** that memory stays as long as the trainer or a [`TrainedVector`] over it, also
//! after an error and after the end.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pleach_collectives::{Buffer, Session as RustSession};
use pleach_training::checkpoint::{CheckpointError, RankState};
use pleach_training::interpreter::Staleness;
use pleach_training::{
    Layout, LeftTraining, Progress, Scheme as RustScheme, TrainError, Trained, Trainer as RustTrainer,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{self, argument};
use crate::group::{Group, Inner};
use crate::session;

/// A training, which owns the memory of the vectors.
enum Training {
    Live(Box<RustTrainer>),
    Ended(Box<Trained>),
    /// Of a session.
    Left {
        _memory: LeftTraining,
    },
    /// Only while a call ends it.
    Ending,
}

/// Whose ranks train.
enum Ranks {
    Group(Arc<Inner>),
    /// The members of a session, in this process.
    Session {
        process: u32,
    },
}

/// A training, and why no further call of it is made.
struct State {
    training: Training,
    failed: Option<PyErr>,
}

/// Owns the memory of the vectors.
struct Shared {
    ranks: Ranks,
    state: Mutex<State>,
    /// Of the parameters and the gradient.
    addresses: [usize; 2],
    /// Elements of a vector.
    count: usize,
}

/// Trains on the ranks of a group by a training scheme: the program computes gradients, and the
/// trainer says when the optimizer steps, and exchanges what the scheme exchanges.
///
/// group: all its ranks make a trainer. Its calls have the same order on all of them, so other
/// calls go through a group of their own (``group.split(0)``). scheme: ``NAME[:KEY=VALUE,…]``.
/// layers: the numbers of parameters of the layers, which are float32. steps: how many there will
/// be, None for as many as are made. model: a number that must be the same on all ranks, such as a
/// hash of what the parameters mean. checked: whether parameters are hashed wherever the scheme
/// says that they are the same on all ranks.
///
/// Raises ArgumentError for a scheme that there is not, or that does not train on so many ranks.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Trainer")]
pub(crate) struct Trainer {
    shared: Arc<Shared>,
    scheme: RustScheme,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Ranks::Session { process } = self.ranks else { return };
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let training = std::mem::replace(&mut state.training, Training::Ending);
        if process != std::process::id() {
            // The session is the parent's. Its threads are not here, so nobody would end them.
            std::mem::forget(training);
            return;
        }
        let mut training = Some(training);
        // The session's end waits for operations under way, which may need other threads of Python.
        let _ = Python::try_attach(|py| py.detach(|| drop(training.take())));
        drop(training);
    }
}

/// Memory of a trainer. ``numpy.asarray(vector)`` is an array of float32 over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "TrainedVector")]
pub(crate) struct TrainedVector {
    address: usize,
    count: usize,
    _keep: Keep,
}

/// Owns the memory of a vector.
enum Keep {
    Trainer {
        _shared: Arc<Shared>,
    },
    /// The lock makes the type one that threads may share.
    Alone {
        _memory: Mutex<Buffer<f32>>,
    },
}

/// The scheme of a text.
fn scheme_of(py: Python<'_>, text: &str) -> PyResult<RustScheme> {
    text.parse().map_err(|error: pleach_training::SchemeTextError| argument(py, error.to_string()))
}

/// The texts of all schemes that a trainer has, each with all keys at their usual values. That is
/// all but ``hybrid``, which divides the layers of a network.
#[pyfunction]
pub(crate) fn schemes() -> Vec<String> {
    let of_trainers = RustScheme::ALL.iter().filter(|scheme| !matches!(scheme, RustScheme::Hybrid { .. }));
    of_trainers.map(RustScheme::text_with_all_keys).collect()
}

/// The facts of a scheme as a dictionary: ``text`` without usual values, ``name``, ``guarantee``,
/// ``averages_gradients`` (at least in some steps), ``has_momentum`` (so local optimizers have
/// none), ``meets`` (all ranks exchange together, each after the same steps). Raises ArgumentError
/// for a scheme that there is not, or that does not train on so many ranks.
#[pyfunction]
#[pyo3(signature = (text, ranks=1))]
pub(crate) fn scheme_facts<'py>(py: Python<'py>, text: &str, ranks: u32) -> PyResult<Bound<'py, PyDict>> {
    let scheme = scheme_of(py, text)?;
    let plan = scheme.plan(&Layout::of(&[1]), 0, ranks.max(1));
    let plan = plan.map_err(|refusal| argument(py, refusal.to_string()))?;
    let facts = PyDict::new(py);
    facts.set_item("text", scheme.to_string())?;
    facts.set_item("name", scheme.name())?;
    facts.set_item("guarantee", scheme.guarantee())?;
    facts.set_item("averages_gradients", scheme.averages_gradients())?;
    facts.set_item("has_momentum", scheme.has_momentum())?;
    facts.set_item("meets", plan.window.is_none() && plan.lines.is_empty())?;
    Ok(facts)
}

/// An error as an exception.
fn exception(py: Python<'_>, ranks: &Ranks, error: &TrainError) -> PyErr {
    let text = error.to_string();
    match error {
        TrainError::Session(error) => session::exception(py, error),
        TrainError::Collective(error) | TrainError::Line { error, .. } => match ranks {
            Ranks::Group(group) => error::collective(py, group.info(), error),
            Ranks::Session { .. } => error::named(py, "session", &text),
        },
        TrainError::Different { other, .. } => error::about_rank(py, "mismatch", &text, *other),
        TrainError::Loss { rank, .. } => error::about_rank(py, "loss", &text, *rank),
        TrainError::Window(_) | TrainError::Partial(_) => error::named(py, "join", &text),
        TrainError::Policy(_) => error::named(py, "protocol", &text),
        TrainError::Checkpoint(CheckpointError::Peer { rank, .. }) => {
            error::about_rank(py, "argument", &text, *rank)
        }
        _ => argument(py, text),
    }
}

impl Trainer {
    /// A trainer in a session, which it has from now on. Where the scheme does not train there, the
    /// caller keeps the session.
    pub(crate) fn in_session(
        py: Python<'_>,
        (scheme, layers, steps): (&str, &[usize], Option<u64>),
        facts: (u64, bool),
        seats: u32,
        session: impl FnOnce() -> PyResult<RustSession>,
    ) -> PyResult<Self> {
        let (scheme, layout) = (scheme_of(py, scheme)?, Layout::of(layers));
        let refused = scheme.plan_in_session(&layout, 0, seats).err();
        if let Some(refusal) = refused.filter(|_| layout.parameters() > 0) {
            return Err(argument(py, refusal.to_string()));
        }
        let session = session()?;
        let made =
            py.detach(|| RustTrainer::in_session(session, &scheme, &layout, steps.unwrap_or(u64::MAX)));
        Self::of(py, (scheme, layout), Ranks::Session { process: std::process::id() }, made, facts)
    }

    /// A trainer that was made. `model` is compared between all ranks.
    fn of(
        py: Python<'_>,
        (scheme, layout): (RustScheme, Layout),
        ranks: Ranks,
        made: Result<RustTrainer, TrainError>,
        (model, checked): (u64, bool),
    ) -> PyResult<Self> {
        let trainer = made.map_err(|error| exception(py, &ranks, &error))?;
        let trainer = trainer.comparing("the hash of the model", model);
        let mut trainer = if checked { trainer.checked() } else { trainer };
        let addresses = trainer.addresses().ok_or_else(|| argument(py, BUSY))?;
        let addresses = addresses.map(<*mut f32>::expose_provenance);
        let state = Mutex::new(State { training: Training::Live(Box::new(trainer)), failed: None });
        let shared = Arc::new(Shared { ranks, state, addresses, count: layout.parameters() });
        Ok(Self { shared, scheme })
    }

    /// Has the session of a training in one, if it is live. Its memory stays.
    fn part(&self, py: Python<'_>, says_so: bool) -> PyResult<()> {
        let Ranks::Session { .. } = self.shared.ranks else {
            return Err(argument(py, "this trainer is of a group, which nobody leaves; abort it"));
        };
        let is_busy = py.detach(|| {
            let mut state = match self.shared.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return true,
            };
            state.training = match std::mem::replace(&mut state.training, Training::Ending) {
                Training::Live(trainer) if says_so => Training::Left { _memory: trainer.leave() },
                Training::Live(trainer) => Training::Left { _memory: trainer.close() },
                ended => ended,
            };
            false
        });
        if is_busy { Err(argument(py, BUSY)) } else { Ok(()) }
    }

    /// Makes a call without the GIL, if no other thread makes one and none has failed.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut State) -> Result<T, TrainError> + Send,
    ) -> PyResult<T> {
        enum Refused {
            Busy,
            Failed(PyErr),
        }
        let made = py.detach(|| {
            let mut state = match self.shared.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Err(Refused::Busy),
            };
            if let Some(failed) = &state.failed {
                return Err(Refused::Failed(Python::attach(|py| failed.clone_ref(py))));
            }
            Ok(make(&mut state).inspect_err(|error| {
                let ends = !matches!(error, TrainError::UnderWay { .. } | TrainError::InSession { .. });
                if ends {
                    let failed = Python::attach(|py| exception(py, &self.shared.ranks, error));
                    state.failed = Some(failed);
                }
            }))
        });
        match made {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                let state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
                let failed = state.failed.as_ref().map(|failed| failed.clone_ref(py));
                Err(failed.unwrap_or_else(|| exception(py, &self.shared.ranks, &error)))
            }
            Err(Refused::Failed(failed)) => Err(failed),
            Err(Refused::Busy) => Err(argument(py, BUSY)),
        }
    }

    /// As `call`, before the end.
    fn train<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut RustTrainer) -> Result<T, TrainError> + Send,
    ) -> PyResult<T> {
        let made = self.call(py, |state| match &mut state.training {
            Training::Live(trainer) => make(trainer).map(Some),
            _ => Ok(None),
        })?;
        made.ok_or_else(|| argument(py, ENDED))
    }

    fn vector(&self, place: usize) -> TrainedVector {
        let (address, count) = (self.shared.addresses[place], self.shared.count);
        TrainedVector { address, count, _keep: Keep::Trainer { _shared: Arc::clone(&self.shared) } }
    }
}

/// A NumPy array over a vector.
fn array(py: Python<'_>, vector: TrainedVector) -> PyResult<Bound<'_, PyAny>> {
    py.import("pleach._arrays")?.getattr("over_vector")?.call1((vector,))
}

const BUSY: &str = "another call of this trainer is under way; make one at a time";
const NO_STEP: &str = "no step has begun, or there is no further one; call step()";
const ENDED: &str = "the training has ended; make a new trainer";

/// A report as a dictionary.
fn report_of<'py>(py: Python<'py>, scheme: &RustScheme, progress: &Progress) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("scheme", scheme.to_string())?;
    report.set_item("guarantee", scheme.guarantee())?;
    report.set_item("steps", progress.steps)?;
    report.set_item("time_s", progress.time.as_secs_f64())?;
    report.set_item("waiting_s", progress.waiting.as_secs_f64())?;
    report.set_item("communicating_s", progress.communicating.as_secs_f64())?;
    report.set_item("bytes", progress.bytes)?;
    report.set_item("staleness_mean", progress.staleness.mean())?;
    report.set_item("staleness_max", progress.staleness.most())?;
    let bounds = Staleness::BOUNDS.into_iter().map(Some).chain([None]);
    let bins: Vec<(Option<u64>, u64)> = bounds.zip(progress.staleness.histogram()).collect();
    report.set_item("staleness_histogram", bins)?;
    report.set_item("agreements", progress.agreements)?;
    report.set_item("spread", progress.spread)?;
    Ok(report)
}

#[pymethods]
impl Trainer {
    #[new]
    #[pyo3(signature = (group, scheme, layers, *, steps=None, model=0, checked=false))]
    fn new(
        py: Python<'_>,
        group: &Group,
        scheme: &str,
        layers: Vec<usize>,
        steps: Option<u64>,
        model: u64,
        checked: bool,
    ) -> PyResult<Self> {
        let scheme = scheme_of(py, scheme)?;
        let (handle, ranks) = (group.handle(py)?, Ranks::Group(group.inner()));
        let layout = Layout::of(&layers);
        let made = py.detach(|| RustTrainer::new(&handle, &scheme, &layout, steps.unwrap_or(u64::MAX)));
        Self::of(py, (scheme, layout), ranks, made, (model, checked))
    }

    /// The scheme, without usual values.
    #[getter]
    fn scheme(&self) -> String {
        self.scheme.to_string()
    }

    /// The parameters as a NumPy array, which keeps its memory. Before the first step: those of
    /// rank 0 are where all ranks begin.
    #[getter]
    fn parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, self.vector(0))
    }

    /// The gradient as a NumPy array, which keeps its memory. A bucket that is ready is not touched
    /// before the next step.
    #[getter]
    fn gradient<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, self.vector(1))
    }

    /// The memory of the parameters and of the gradient, for other libraries.
    fn memory(&self) -> (TrainedVector, TrainedVector) {
        (self.vector(0), self.vector(1))
    }

    /// Whether there is a next step, which begins. The first call compares the arguments of all
    /// ranks, raises MismatchError if they differ, and gives all ranks the parameters of rank 0.
    fn step(&self, py: Python<'_>) -> PyResult<bool> {
        self.train(py, |trainer| Ok(trainer.step()?.is_some()))
    }

    /// The number of the step that has begun, from 0.
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.train(py, |trainer| Ok(trainer.begun().map(|step| step.number())))
    }

    /// The buckets of the gradient as pairs of places, in the order in which they should become
    /// ready.
    fn buckets(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        let pairs = |trainer: &mut RustTrainer| {
            let step = trainer.begun();
            let buckets = step.as_ref().map_or(&[][..], |step| step.buckets());
            Ok(buckets.iter().map(|bucket| (bucket.start, bucket.end)).collect())
        };
        self.train(py, pairs)
    }

    /// Says that a bucket of the gradient is complete. It may travel while the others are computed.
    fn ready(&self, py: Python<'_>, bucket: usize) -> PyResult<()> {
        self.train(py, |trainer| trainer.begun().map_or(Ok(()), |mut step| step.ready(bucket)))
    }

    /// Says that the gradient is complete, and goes on until there is a next step to compute.
    /// ``optimizer()`` is called once, when the parameters are to make a step by the gradient: in
    /// ``update``, on this thread. An exception of it ends the training on all ranks and is raised
    /// here. loss: only checked. Returns ``steps_alone``.
    #[pyo3(signature = (optimizer, loss=0.0))]
    fn update(&self, py: Python<'_>, optimizer: Py<PyAny>, loss: f32) -> PyResult<u64> {
        let mut raised = None;
        let updated = self.train(py, |trainer| {
            let Some(step) = trainer.begun() else { return Ok(None) };
            let optimize = |parameters: &mut [f32], gradient: &[f32]| {
                // Python reaches the elements by the address that it has. Neither slice is used
                // until it returns.
                parameters.as_mut_ptr().expose_provenance();
                gradient.as_ptr().expose_provenance();
                let called = Python::attach(|py| optimizer.call0(py).map(drop));
                if let Err(error) = called {
                    raised.get_or_insert(error);
                }
            };
            let updated = step.update(optimize, loss);
            let updated = updated.map(|()| Some(trainer.progress().staleness.next()));
            if raised.is_some() {
                trainer.abort();
            }
            updated
        });
        if let Some(raised) = raised {
            let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.failed = Some(raised.clone_ref(py));
            return Err(raised);
        }
        updated?.ok_or_else(|| argument(py, NO_STEP))
    }

    /// How many steps this rank has made since it last took in work of others.
    #[getter]
    fn steps_alone(&self, py: Python<'_>) -> PyResult<u64> {
        self.train(py, |trainer| Ok(trainer.progress().staleness.next()))
    }

    /// The mean of all ranks' parameters at present, as a new NumPy array. All ranks call it after
    /// the same number of steps; not with ``elastic-bsp``, where these differ. The training goes on
    /// as if it was not called, but that with ``bap`` each rank takes a newer copy of the table.
    fn averaged<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, self.mean(py)?)
    }

    /// As ``averaged``, for other libraries.
    fn mean(&self, py: Python<'_>) -> PyResult<TrainedVector> {
        if let RustScheme::ElasticBsp { .. } = self.scheme {
            return Err(argument(
                py,
                "ranks make different numbers of steps with elastic-bsp, so they have no common place for a mean; \
                 where steps_alone is 0 all have the same parameters",
            ));
        }
        let mut mean = self.train(py, RustTrainer::averaged)?;
        let (address, count) = (mean.as_mut_ptr().expose_provenance(), mean.len());
        Ok(TrainedVector { address, count, _keep: Keep::Alone { _memory: Mutex::new(mean) } })
    }

    /// The state of this rank, between two steps: bytes for ``restore``. All ranks call it after
    /// the same number of steps, and wait for each other here.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.train(py, |trainer| trainer.rank_state(&[]))?;
        let bytes = state.encode().map_err(|error| argument(py, error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Goes on from the states of all ranks of a training by the same scheme; each rank gives its
    /// own, before the first step and in place of setting parameters. All ranks call it. Raises
    /// ArgumentError on all of them if one gives bytes that are no such state; then the trainer is
    /// of no use any more.
    fn restore(&self, py: Python<'_>, state: &[u8]) -> PyResult<()> {
        let state = RankState::decode(state).map_err(|error| format!("no state of a rank: {error}"));
        self.train(py, |trainer| trainer.restore_rank(state))
    }

    /// How far this rank has come: a dictionary with scheme, guarantee, steps, time_s, waiting_s,
    /// communicating_s, bytes, staleness_mean, staleness_max, staleness_histogram (of bins, the
    /// most of each, None of the last, and its steps), agreements and spread (the distance of this
    /// rank's parameters from the mean of all ranks as a share of its length, when
    /// ``averaged`` was called last, or before the last exchange of a checked training; else None);
    /// after the end also guarantee_held and parameters_equal.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let so_far = |state: &mut State| match &state.training {
            Training::Live(trainer) => Ok(Some((trainer.progress(), None))),
            Training::Ended(trained) => {
                Ok(Some((trained.progress, Some((trained.guarantee_held, trained.parameters_equal)))))
            }
            Training::Left { .. } | Training::Ending => Ok(None),
        };
        let found = self.call(py, so_far)?;
        let (progress, ended) = found.ok_or_else(|| argument(py, ENDED))?;
        let report = report_of(py, &self.scheme, &progress)?;
        if let Some((guarantee_held, parameters_equal)) = ended {
            report.set_item("guarantee_held", guarantee_held)?;
            report.set_item("parameters_equal", parameters_equal)?;
        }
        Ok(report)
    }

    /// Ends the training after the steps made so far, which are as many on all ranks, by the last
    /// exchange of the scheme. All ranks have the same parameters then. Returns the report. Does
    /// nothing after the end.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.call(py, |state| match std::mem::replace(&mut state.training, Training::Ending) {
            Training::Live(trainer) => match trainer.end() {
                Ok(trained) => {
                    state.training = Training::Ended(Box::new(trained));
                    Ok(())
                }
                Err((error, trainer)) => {
                    state.training = Training::Live(trainer);
                    Err(error)
                }
            },
            ended => {
                state.training = ended;
                Ok(())
            }
        })?;
        self.report(py)
    }

    /// Ends the training on all ranks: their calls raise AbortedError. Does nothing after the end.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let is_busy = py.detach(|| match self.shared.state.try_lock() {
            Ok(mut state) => {
                if let Training::Live(trainer) = &mut state.training {
                    trainer.abort();
                }
                false
            }
            Err(error) => matches!(error, TryLockError::WouldBlock),
        });
        if is_busy { Err(argument(py, BUSY)) } else { Ok(()) }
    }

    /// The rank of this process in the step that has begun, and the number of ranks. In a session
    /// they are those of the members that make it. None: no step has begun.
    #[getter]
    fn members(&self, py: Python<'_>) -> PyResult<Option<(u32, u32)>> {
        self.train(py, |trainer| Ok(trainer.begun().map(|step| step.members())))
    }

    /// The newest change of the members of the session; None: there was none, or no session.
    #[getter]
    fn change<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let newest =
            |trainer: &mut RustTrainer| Ok(trainer.session().and_then(|session| session.change()).cloned());
        self.train(py, newest)?.map(|change| session::change_of(py, &change)).transpose()
    }

    /// Leaves the session of a training in one. The others go on. Does nothing after the end.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.part(py, true)
    }

    /// Ends the session of a training in one: to the others it is as the end of the process.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.part(py, false)
    }

    fn __repr__(&self) -> String {
        format!("<pleach.Trainer: {}, {} parameters>", self.scheme, self.shared.count)
    }
}

#[pymethods]
impl TrainedVector {
    /// Where the memory begins.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.count * size_of::<f32>()
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.count,))?;
        interface.set_item("typestr", "<f4")?;
        interface.set_item("data", (self.address, false))?;
        Ok(interface)
    }
}
