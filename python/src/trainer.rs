//! The driver of training schemes as a Python class. The parameters and the gradient are memory
//! that Python reaches by its address.
//!
//! **Invariants:** that memory stays as long as the trainer or a [`TrainedVector`] over it, also
//! after an error, after the end, and after a panic of the library. The lock of a trainer is never
//! waited for, as the thread that has it may wait for the GIL.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use pleach_collectives::Session as RustSession;
use pleach_collectives::session::{Change, Heal};
use pleach_training::checkpoint::{CheckpointError, RankState};
use pleach_training::interpreter::Staleness;
use pleach_training::{
    Layout, Progress, Scheme as RustScheme, TrainError, Trained, Trainer as RustTrainer, VectorMemory,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{self, argument};
use crate::group::{Group, Inner};
use crate::interrupt::raised;
use crate::session;

/// A training.
enum Training {
    Live(Box<RustTrainer>),
    Ended(Box<Trained>),
    /// The session was left or closed; or a call ends the training.
    Over,
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
    /// The newest change of the members when a call has ended the training.
    change: Option<Arc<Change>>,
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
    scheme: RustScheme,
    /// Of the parameters and the gradient.
    memory: [VectorMemory; 2],
    /// Dropped before the group.
    state: Mutex<State>,
    ranks: Ranks,
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let training = std::mem::replace(&mut state.training, Training::Over);
        if matches!(self.ranks, Ranks::Session { process } if process != std::process::id()) {
            // The session is the parent's. Its threads are not here, so nobody would end them.
            std::mem::forget(training);
            return;
        }
        let mut training = Some(training);
        // The end waits for operations under way, which may need other threads of Python.
        let _ = Python::try_attach(|py| py.detach(|| drop(training.take())));
        drop(training);
    }
}

/// Memory of a trainer. ``numpy.asarray(vector)`` is an array of float32 over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "TrainedVector")]
pub(crate) struct TrainedVector {
    memory: VectorMemory,
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

/// Why a call did not do what it should.
enum Failed {
    /// Another call is under way.
    Busy,
    Train(TrainError),
    /// The program's optimizer has raised an exception, or an earlier call has.
    Raised(PyErr),
}

impl From<TrainError> for Failed {
    fn from(error: TrainError) -> Self {
        Self::Train(error)
    }
}

impl State {
    fn newest_change(&self) -> Option<Arc<Change>> {
        match &self.training {
            Training::Live(trainer) => trainer.session().and_then(RustSession::change).cloned(),
            _ => self.change.clone(),
        }
    }

    /// The trainer, where the training is live, which is over now.
    fn take(&mut self) -> Option<Box<RustTrainer>> {
        self.change = self.newest_change();
        match std::mem::replace(&mut self.training, Training::Over) {
            Training::Live(trainer) => Some(trainer),
            other => {
                self.training = other;
                None
            }
        }
    }
}

impl Trainer {
    /// Makes a trainer in a session, to which the session belongs from then on. Where arguments are
    /// refused, the caller keeps the session. `seats` and `heal` are those of the session.
    pub(crate) fn in_session(
        py: Python<'_>,
        (scheme, layers, steps): (&str, &[usize], Option<u64>),
        facts: (u64, bool),
        (seats, heal): (u32, Heal),
        session: impl FnOnce() -> PyResult<RustSession>,
    ) -> PyResult<Self> {
        let (scheme, layout) = (scheme_of(py, scheme)?, Layout::of(layers));
        let ranks = Ranks::Session { process: std::process::id() };
        let refused = if layout.parameters() == 0 {
            Some(TrainError::NoParameters)
        } else if heal == Heal::Hidden {
            Some(TrainError::HealsInStep)
        } else {
            scheme.plan_in_session(&layout, 0, seats).err().map(TrainError::from)
        };
        if let Some(refused) = refused {
            return Err(exception(py, &ranks, &refused));
        }
        let (session, steps) = (session()?, steps.unwrap_or(u64::MAX));
        let made = py.detach(|| RustTrainer::in_session(session, &scheme, &layout, steps));
        Self::of(py, scheme, ranks, made, facts)
    }

    /// A trainer that was made. `model` is compared between all ranks.
    fn of(
        py: Python<'_>,
        scheme: RustScheme,
        ranks: Ranks,
        made: Result<RustTrainer, TrainError>,
        (model, checked): (u64, bool),
    ) -> PyResult<Self> {
        let trainer = made.map_err(|error| exception(py, &ranks, &error))?;
        let trainer = trainer.comparing("the hash of the model", model);
        let mut trainer = if checked { trainer.checked() } else { trainer };
        let memory = trainer.memory().ok_or_else(|| argument(py, BUSY))?;
        let training = Training::Live(Box::new(trainer));
        Ok(Self { scheme, memory, state: Mutex::new(State { training, failed: None, change: None }), ranks })
    }

    /// Refuses a forked child of the process whose session it is.
    fn expect_own(&self, py: Python<'_>) -> PyResult<()> {
        match self.ranks {
            Ranks::Session { process } => session::expect_own(py, process),
            Ranks::Group(_) => Ok(()),
        }
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>, Failed> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Failed::Busy),
        }
    }

    /// Leaves or closes the session of a live training.
    fn end_session(&self, py: Python<'_>, says_so: bool) -> PyResult<()> {
        self.expect_own(py)?;
        if let Ranks::Group(_) = self.ranks {
            return Err(argument(py, "this trainer is of a group, which nobody leaves; abort it"));
        }
        let ended = py.detach(|| {
            let trainer = self.lock()?.take();
            match trainer {
                Some(trainer) if says_so => trainer.leave().map_err(|error| Failed::Train(error.into())),
                trainer => {
                    drop(trainer);
                    Ok(())
                }
            }
        });
        ended.map_err(|failed| self.exception_of(py, failed))
    }

    /// The exception of a call that has failed.
    fn exception_of(&self, py: Python<'_>, failed: Failed) -> PyErr {
        match failed {
            Failed::Busy => argument(py, BUSY),
            Failed::Train(error) => exception(py, &self.ranks, &error),
            Failed::Raised(error) => error,
        }
    }

    /// Makes a call without the GIL, if no other thread makes one and none has failed.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut State) -> Result<T, Failed> + Send,
    ) -> PyResult<T> {
        self.expect_own(py)?;
        py.detach(|| {
            let mut state =
                self.lock().map_err(|failed| Python::attach(|py| self.exception_of(py, failed)))?;
            if let Some(failed) = &state.failed {
                return Err(Python::attach(|py| failed.clone_ref(py)));
            }
            make(&mut state).map_err(|failed| {
                use TrainError::{InSession, UnderWay};
                let goes_on = matches!(failed, Failed::Train(UnderWay { .. } | InSession { .. }));
                let (raised, kept) = Python::attach(|py| {
                    let raised = self.exception_of(py, failed);
                    let kept = raised.clone_ref(py);
                    (raised, kept)
                });
                if !goes_on {
                    state.failed = Some(kept);
                }
                raised
            })
        })
    }

    /// As `call`, before the end.
    fn train<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut RustTrainer) -> Result<T, TrainError> + Send,
    ) -> PyResult<T> {
        let made = self.call(py, |state| match &mut state.training {
            Training::Live(trainer) => Ok(make(trainer).map(Some)?),
            _ => Ok(None),
        })?;
        made.ok_or_else(|| argument(py, ENDED))
    }

    /// Ends the training: on all ranks of a group, in a session for this process.
    fn give_up(state: &mut State) {
        match &mut state.training {
            Training::Live(trainer) if trainer.session().is_none() => trainer.abort(),
            _ => drop(state.take()),
        }
    }

    fn vector(&self, place: usize) -> TrainedVector {
        TrainedVector { memory: self.memory[place].clone() }
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
        Self::of(py, scheme, ranks, made, (model, checked))
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
    /// ``update``, on this thread. An exception of it is raised here. It ends the training on all
    /// ranks; in a session it ends for this process, and the others go on. loss: only checked.
    /// Returns ``steps_alone``.
    #[pyo3(signature = (optimizer, loss=0.0))]
    fn update(&self, py: Python<'_>, optimizer: Py<PyAny>, loss: f32) -> PyResult<u64> {
        let updated = self.call(py, |state| {
            let Training::Live(trainer) = &mut state.training else { return Ok(None) };
            let Some(step) = trainer.begun() else { return Ok(None) };
            let mut raised = None;
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
            let updated = updated.map(|()| trainer.progress().staleness.next());
            if let Some(raised) = raised {
                Self::give_up(state);
                return Err(Failed::Raised(raised));
            }
            Ok(Some(updated?))
        })?;
        updated.ok_or_else(|| argument(py, NO_STEP))
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
        Ok(TrainedVector { memory: VectorMemory::of(&mut self.train(py, RustTrainer::averaged)?) })
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
            Training::Over => Ok(None),
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
        self.call(py, |state| {
            let Some(trainer) = state.take() else { return Ok(()) };
            match trainer.end() {
                Ok(trained) => state.training = Training::Ended(Box::new(trained)),
                Err((error, trainer)) => {
                    state.training = Training::Live(trainer);
                    return Err(error.into());
                }
            }
            Ok(())
        })?;
        // Ctrl-C while it has left the session.
        if let Some(raised) = raised() {
            return Err(raised);
        }
        self.report(py)
    }

    /// Ends the training on all ranks: their calls raise AbortedError. In a session it ends for
    /// this process alone, as by ``close``. Does nothing after the end.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.expect_own(py)?;
        let aborted = py.detach(|| {
            Self::give_up(&mut *self.lock()?);
            Ok(())
        });
        aborted.map_err(|failed| self.exception_of(py, failed))
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
        let newest = py.detach(|| Ok(self.lock()?.newest_change()));
        let newest = newest.map_err(|failed| self.exception_of(py, failed))?;
        newest.map(|change| session::change_of(py, &change)).transpose()
    }

    /// Leaves the session of a training in one. The others go on. Does nothing after the end.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.end_session(py, true)
    }

    /// Ends the session of a training in one: to the others it is as the end of the process.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end_session(py, false)
    }

    fn __repr__(&self) -> String {
        format!("<pleach.Trainer: {}, {} parameters>", self.scheme, self.memory[0].count())
    }
}

#[pymethods]
impl TrainedVector {
    /// Where the memory begins.
    #[getter]
    fn address(&self) -> usize {
        self.memory.address()
    }

    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.count() * size_of::<f32>()
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.memory.count(),))?;
        interface.set_item("typestr", "<f4")?;
        interface.set_item("data", (self.address(), false))?;
        Ok(interface)
    }
}
