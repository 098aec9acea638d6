//! Sessions as a Python class, which `pleach/_session.py` wraps.
//!
//! **Invariant:** one thread at a time is in a call of a session. Its lock is never waited for with
//! the GIL. The group of an epoch ends, for Python too, when another epoch is entered and before
//! the session ends. Memory stays as long as an array over it.

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, TryLockError, Weak};

use pleach_collectives::session::{Change, Heal, Process, Reason, Split, State as RustState};
use pleach_collectives::{
    CollectiveError, DataType, Elastic, Element, F8E4M3, F8E5M2, Session as RustSession, SessionError,
    Verdict, bf16, f16,
};
use pleach_transport::mutex::lock;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{self, argument};
use crate::group::{Group, RegisteredMemory, limit};
use crate::interrupt::{interrupted, raised};
use crate::join::Settings;
use crate::registered::Registered;
use crate::trainer::Trainer;
use crate::types::ElementType;

/// This process's membership in a job: see ``pleach.Session``.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Session")]
pub(crate) struct Session {
    /// The process that has joined. A forked child is another one.
    process: u32,
    seat: u32,
    /// The epoch in which a step was begun last, and its group. Dropped before the session.
    epoch: Mutex<Option<(u64, Py<Group>)>>,
    /// By number. Dropped before the session.
    splits: Mutex<Vec<Part>>,
    /// `None` when it is over.
    live: Mutex<Option<Box<RustSession>>>,
    /// Memory that the groups of all epochs know: its address and its length in bytes.
    buffers: Mutex<Vec<(usize, usize, Weak<RegisteredMemory>)>>,
}

/// A split of a session.
struct Part {
    split: Split,
    /// The epoch in which the group of this process's part was asked for last, and that group.
    group: Option<(u64, Py<Group>)>,
}

/// A state of a session. Its memory is elsewhere when this process has read it from the others.
#[pyclass(frozen, module = "pleach._native", name = "SessionState")]
pub(crate) struct SessionState {
    elements: Arc<Mutex<dyn Elements>>,
    nbytes: usize,
}

/// Memory of a state. ``numpy.asarray(memory)`` is an array of bytes over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "StateMemory")]
pub(crate) struct StateMemory {
    address: usize,
    nbytes: usize,
    _keep: Arc<Mutex<dyn Elements>>,
}

/// A state, whatever its elements are.
trait Elements: Send {
    /// Where the elements are now; null: they could not be read to the end.
    fn address(&mut self) -> *mut c_void;
}

impl<T: Element> Elements for RustState<T> {
    fn address(&mut self) -> *mut c_void {
        let mut address = std::ptr::null_mut();
        self.update(|elements| address = elements.as_mut_ptr().cast());
        address
    }
}

/// Declares a state of so many elements.
fn declared(
    session: &mut RustSession,
    name: &str,
    len: usize,
    data_type: DataType,
) -> Result<Arc<Mutex<dyn Elements>>, SessionError> {
    macro_rules! of {
        ($type:ty) => {{
            let state: Arc<Mutex<dyn Elements>> = Arc::new(Mutex::new(session.state::<$type>(name, len)?));
            state
        }};
    }
    Ok(match data_type {
        DataType::F64 => of!(f64),
        DataType::F32 => of!(f32),
        DataType::F16 => of!(f16),
        DataType::Bf16 => of!(bf16),
        DataType::F8E4M3 => of!(F8E4M3),
        DataType::F8E5M2 => of!(F8E5M2),
        DataType::I64 => of!(i64),
        DataType::I32 => of!(i32),
        DataType::I16 => of!(i16),
        DataType::I8 => of!(i8),
        DataType::U64 => of!(u64),
        DataType::U32 => of!(u32),
        DataType::U16 => of!(u16),
        DataType::U8 => of!(u8),
    })
}

/// An error as an exception; where a handler of a signal has interrupted the call, what the handler
/// has raised.
pub(crate) fn exception(py: Python<'_>, error: &SessionError) -> PyErr {
    if let Some(raised) = raised() {
        return raised;
    }
    let text = match error {
        // What the program's own step has raised is the cause of the exception.
        SessionError::Step { step, times, own: Some(own), failed }
            if matches!(**own, CollectiveError::Closed) =>
        {
            let last: Vec<String> =
                failed.iter().map(|process| format!(", at last on {}", process.seat)).collect();
            format!("step {step} failed {times} times in a row{}", last.concat())
        }
        error => error.to_string().replace("Session::", "Session."),
    };
    let kind = match error {
        SessionError::Join(error) => return error::join(py, error),
        SessionError::Expelled(_) => "expelled",
        SessionError::NoQuorum { .. } | SessionError::UnitsLost { .. } => "no-quorum",
        SessionError::TooFew { .. } => "too-few",
        SessionError::Step { .. } => "step",
        SessionError::Left => "left-session",
        SessionError::Diverged { .. } => "diverged",
        SessionError::StatesDiffer { .. } => "states-differ",
        SessionError::StatesLost => "states-lost",
        SessionError::Limits { .. }
        | SessionError::Signal { .. }
        | SessionError::StateTaken(_)
        | SessionError::StateName { .. }
        | SessionError::StateInUse(_)
        | SessionError::Unsupported { .. }
        | SessionError::NotBegun => "argument",
        SessionError::NotAdmitted { .. } | SessionError::Group { .. } => "join",
        SessionError::Memory { .. } | SessionError::Register(_) => "memory",
        _ => "session",
    };
    let made = error::named(py, kind, &text);
    let about = match error {
        SessionError::Expelled(change) => change_of(py, change).map(|change| ("change", change)).ok(),
        SessionError::Diverged { members, .. } => {
            let seats: Vec<u32> = members.iter().map(|member| member.seat.0).collect();
            seats.into_pyobject(py).map(|seats| ("seats", seats.into_any())).ok()
        }
        _ => None,
    };
    if let Some((field, value)) = about {
        let _ = made.value(py).setattr(field, value);
    }
    made
}

/// A change as Python has it.
pub(crate) fn change_of<'py>(py: Python<'py>, change: &Change) -> PyResult<Bound<'py, PyAny>> {
    let reason = |reason: Reason| match reason {
        Reason::Died => "died",
        Reason::Unreachable => "unreachable",
        Reason::Left => "left",
        Reason::Replaced => "replaced",
        Reason::Unit => "unit",
        Reason::Joined => "joined",
        Reason::Failed => "failed",
    };
    let left: Vec<(u32, &str)> =
        change.left.iter().map(|(process, why)| (process.seat.0, reason(*why))).collect();
    let seats = |of: &[Process]| -> Vec<u32> { of.iter().map(|process| process.seat.0).collect() };
    let lost = change.unreceived.iter().map(|lost| (lost.peer().seat.0, (lost.to(), lost.from())));
    let lost: Vec<(u32, (u64, u64))> = lost.collect();
    let (came, members, failed) = (seats(&change.came), seats(&change.members), seats(&change.failed));
    let fields =
        (change.from, change.epoch, change.step, left, came, members, failed, lost, change.to_string());
    py.import("pleach._session")?.getattr("change")?.call1(fields)
}

const BEGUN: &str = "a step has begun; commit it first";
const OVER: &str = "the session is over, or a trainer has it; join a new one";
const BUSY: &str = "another thread is in a call of this session; make one call at a time";

/// Refuses a forked child of the process that has joined.
pub(crate) fn expect_own(py: Python<'_>, process: u32) -> PyResult<()> {
    if process == std::process::id() {
        return Ok(());
    }
    let text = format!(
        "this session belongs to process {process}; a forked child must join as a process of its own"
    );
    Err(error::named(py, "forked", &text))
}

impl Session {
    fn expect_own(&self, py: Python<'_>) -> PyResult<()> {
        expect_own(py, self.process)
    }

    /// Makes a call without the GIL, if no other thread makes one.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut RustSession) -> Result<T, SessionError> + Send,
    ) -> PyResult<T> {
        self.expect_own(py)?;
        let made = py.detach(|| match self.live.try_lock() {
            Ok(mut live) => Ok(live.as_deref_mut().map(make)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner().as_deref_mut().map(make)),
            Err(TryLockError::WouldBlock) => Err(()),
        });
        match made {
            Ok(Some(result)) => result.map_err(|error| exception(py, &error)),
            Ok(None) => Err(error::named(py, "closed", OVER)),
            Err(()) => Err(argument(py, BUSY)),
        }
    }

    /// As `call`, between two steps.
    fn between_steps<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut RustSession) -> Result<T, SessionError> + Send,
    ) -> PyResult<T> {
        let made = self.call(py, |session| match session.attempted_epoch() {
            None => make(session).map(Some),
            Some(_) => Ok(None),
        })?;
        made.ok_or_else(|| argument(py, BEGUN))
    }

    /// Ends the groups that Python has of the last epoch.
    fn end_epoch(&self, py: Python<'_>) {
        let parts: Vec<_> = lock(&self.splits).iter_mut().filter_map(|part| part.group.take()).collect();
        let ended = lock(&self.epoch).take();
        for (_, group) in parts.into_iter().chain(ended) {
            group.get().end_epoch(py);
        }
    }

    /// Takes the session out, if no call of it is under way and `may` does not refuse.
    fn take(
        &self,
        py: Python<'_>,
        may: impl FnOnce(&RustSession) -> PyResult<()>,
    ) -> PyResult<Option<Box<RustSession>>> {
        self.expect_own(py)?;
        let mut live = match self.live.try_lock() {
            Ok(live) => live,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(argument(py, BUSY)),
        };
        live.as_deref().map_or(Ok(()), may)?;
        let session = live.take();
        drop(live);
        self.end_epoch(py);
        Ok(session)
    }

    /// Ends the session.
    fn end(&self, py: Python<'_>, leaves: bool) -> PyResult<()> {
        // A call that is refused ends nothing.
        let session = self.take(py, |_| Ok(()))?;
        let left = py.detach(|| match session {
            Some(session) if leaves => session.leave(),
            _ => Ok(()),
        });
        left.map_err(|error| exception(py, &error))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let live = self.live.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // The session is the parent's. Its threads are not here, so nobody would end them.
            std::mem::forget(live);
            return;
        }
        let mut live = Some(live);
        // Its end waits for operations under way, which may need other threads of Python.
        let _ = Python::try_attach(|py| {
            self.end_epoch(py);
            py.detach(|| drop(live.take()));
        });
        drop(live);
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
impl Session {
    #[new]
    #[pyo3(signature = (fewest, most, *, program, rank=None, world_size=None, rendezvous=None,
                        secret_file=None, timeout=None, join_timeout=None, fabric=None,
                        reproducible=None, suspect_after=None, fewest_wait=None, quorum_wait=None,
                        heal_wait=None, begin_wait=None, retries_max=None, heal=None, unit=None))]
    fn new(
        py: Python<'_>,
        fewest: u32,
        most: u32,
        program: String,
        rank: Option<u32>,
        world_size: Option<u32>,
        rendezvous: Option<&str>,
        secret_file: Option<PathBuf>,
        timeout: Option<f64>,
        join_timeout: Option<f64>,
        fabric: Option<String>,
        reproducible: Option<String>,
        suspect_after: Option<f64>,
        fewest_wait: Option<f64>,
        quorum_wait: Option<f64>,
        heal_wait: Option<f64>,
        begin_wait: Option<f64>,
        retries_max: Option<u32>,
        heal: Option<&str>,
        unit: Option<u32>,
    ) -> PyResult<Self> {
        let world = crate::join::world(py, rank, world_size, rendezvous)?;
        let settings = Settings { secret_file, timeout, join_timeout, fabric, reproducible };
        let options = settings.options(py, world)?;
        let mut elastic = Elastic::between(fewest, most);
        elastic.program = program;
        for (name, time, seconds) in [
            ("suspect_after", &mut elastic.suspect_after, suspect_after),
            ("fewest_wait", &mut elastic.fewest_wait, fewest_wait),
            ("quorum_wait", &mut elastic.quorum_wait, quorum_wait),
            ("heal_wait", &mut elastic.heal_wait, heal_wait),
            ("begin_wait", &mut elastic.begin_wait, begin_wait),
        ] {
            if let Some(limit) = limit(py, name, seconds)? {
                *time = limit;
            }
        }
        if let Some(times) = retries_max {
            elastic.retries_max = times;
        }
        if let Some(seats) = unit {
            elastic.unit = seats;
        }
        elastic.heal = match heal {
            None | Some("boundary") => Heal::Boundary,
            Some("hidden") => Heal::Hidden,
            Some(other) => return Err(argument(py, format!("heal is {other:?}; take boundary or hidden"))),
        };
        let joined = py.detach(|| RustSession::join(&options, &elastic));
        let mut session = joined.map_err(|error| exception(py, &error))?;
        session.interrupted_by(interrupted);
        Ok(Self {
            process: std::process::id(),
            seat: session.seat().0,
            epoch: Mutex::default(),
            splits: Mutex::default(),
            live: Mutex::new(Some(Box::new(session))),
            buffers: Mutex::default(),
        })
    }

    /// The stable number of this process.
    #[getter]
    fn seat(&self) -> u32 {
        self.seat
    }

    /// The next step. Every step before it is committed.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |session| Ok(session.step()))
    }

    /// The number of the newest epoch that this process knows.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |session| Ok(session.epoch()))
    }

    /// The newest change of the members; None: there was none since this process has come.
    #[getter]
    fn change<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let change = self.call(py, |session| Ok(session.change().cloned()))?;
        change.map(|change| change_of(py, &change)).transpose()
    }

    /// Divides the members of each epoch by a colour for each seat. Returns the number of the
    /// split.
    fn split(&self, py: Python<'_>, colors: Vec<Option<u32>>) -> PyResult<usize> {
        let of = move |member: Process| colors.get(member.seat.0 as usize).copied().flatten();
        let made = self.between_steps(py, |session| Ok(session.split(of)))?;
        let mut splits = lock(&self.splits);
        splits.push(Part { split: made, group: None });
        Ok(splits.len() - 1)
    }

    /// The number of seats.
    #[getter]
    fn seats(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |session| Ok(session.seats()))
    }

    /// The group of this process's part in the step that has begun; None: it has no colour, or a
    /// process reads the states during this step.
    fn split_group(&self, py: Python<'_>, split: usize) -> PyResult<Option<Py<Group>>> {
        let epoch = self.call(py, |session| match session.attempted_epoch() {
            Some(epoch) => Ok(epoch),
            None => Err(SessionError::NotBegun),
        })?;
        let mut splits = lock(&self.splits);
        let Some(part) = splits.get_mut(split) else { return Err(argument(py, "no such split")) };
        if let Some((known, group)) = &part.group
            && *known == epoch
            && !group.get().has_ended()
        {
            return Ok(Some(group.clone_ref(py)));
        }
        let Some(group) = part.split.group() else { return Ok(None) };
        let group = Py::new(py, Group::new(group))?;
        part.group = Some((epoch, group.clone_ref(py)));
        Ok(Some(group))
    }

    /// Declares a state of ``count`` elements of a type of NumPy.
    fn state(&self, py: Python<'_>, name: String, count: usize, dtype: &str) -> PyResult<SessionState> {
        let Some(element) = ElementType::named(dtype) else {
            return Err(argument(py, format!("{dtype:?} is no element type")));
        };
        let nbytes = count.checked_mul(element.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(nbytes) = nbytes else { return Err(argument(py, "the shape is too large")) };
        let (len, data_type) = (count * element.lanes(), element.data_type);
        let elements = self.call(py, |session| declared(session, &name, len, data_type))?;
        Ok(SessionState { elements, nbytes })
    }

    /// ``nbytes`` zeroed bytes that are registered for the groups of all epochs.
    fn register(&self, py: Python<'_>, nbytes: usize) -> PyResult<Registered> {
        let buffer = self.call(py, |session| session.buffer::<u8>(nbytes.max(1)))?;
        let (registered, place) = Registered::of_session(buffer);
        let mut buffers = lock(&self.buffers);
        buffers.retain(|(.., memory)| memory.strong_count() > 0);
        buffers.push(place.clone());
        drop(buffers);
        if let Some((_, group)) = &*lock(&self.epoch) {
            group.get().inner().lend([place]);
        }
        Ok(registered)
    }

    /// Enters the newest epoch and begins the next step. Returns its number and the group.
    fn next(&self, py: Python<'_>) -> PyResult<(u64, Py<Group>)> {
        let (step, epoch, group) = self.between_steps(py, |session| {
            let step = session.next()?;
            Ok((step, session.attempted_epoch(), session.group()?.clone()))
        })?;
        let epoch = epoch.unwrap_or_default();
        if let Some((known, group)) = &*lock(&self.epoch)
            && *known == epoch
            && !group.get().has_ended()
        {
            return Ok((step, group.clone_ref(py)));
        }
        self.end_epoch(py);
        let group = Group::new(group);
        group.inner().lend(lock(&self.buffers).iter().cloned());
        let group = Py::new(py, group)?;
        *lock(&self.epoch) = Some((epoch, group.clone_ref(py)));
        Ok((step, group))
    }

    /// Says whether the step was done here, and waits for the verdict. Returns the change where the
    /// step is repeated.
    fn commit<'py>(&self, py: Python<'py>, done: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
        // Of an exception of the program the session needs no text.
        let outcome = if done { Ok(()) } else { Err(CollectiveError::Closed) };
        match self.call(py, |session| session.commit(outcome))? {
            Verdict::Committed => Ok(None),
            Verdict::Retry(change) => change_of(py, &change).map(Some),
        }
    }

    /// Makes a trainer in this session, to which the session belongs from then on.
    #[pyo3(signature = (scheme, layers, *, steps=None, model=0, checked=false))]
    fn trainer(
        &self,
        py: Python<'_>,
        scheme: &str,
        layers: Vec<usize>,
        steps: Option<u64>,
        model: u64,
        checked: bool,
    ) -> PyResult<Trainer> {
        let facts = self.call(py, |session| Ok((session.seats(), session.heals())))?;
        let is_between_steps = |session: &RustSession| match session.attempted_epoch() {
            None => Ok(()),
            Some(_) => Err(argument(py, BEGUN)),
        };
        let session = || {
            let taken = self.take(py, is_between_steps)?;
            taken.map(|session| *session).ok_or_else(|| error::named(py, "closed", OVER))
        };
        Trainer::in_session(py, (scheme, &layers, steps), (model, checked), facts, session)
    }

    /// Compares the states of all members.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.between_steps(py, RustSession::audit)
    }

    /// Leaves when this signal comes.
    fn leave_on(&self, py: Python<'_>, signal: i32) -> PyResult<()> {
        self.call(py, |session| session.leave_on(signal))
    }

    /// Leaves at the end of the step that is under way, or of the next one.
    fn leave_after_step(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |session| {
            session.leave_after_step();
            Ok(())
        })
    }

    /// Leaves the job between two steps. Does nothing when the session is over.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, true)
    }

    /// Ends the session: to the others it is as the end of the process.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, false)
    }
}

#[pymethods]
impl SessionState {
    /// Where the elements are now, when processes that read them behind a step have done so. None:
    /// this process could not read them to the end.
    fn memory(&self, py: Python<'_>) -> Option<StateMemory> {
        let address = py.detach(|| lock(&self.elements).address().expose_provenance());
        let memory = || StateMemory { address, nbytes: self.nbytes, _keep: Arc::clone(&self.elements) };
        (address != 0).then(memory)
    }
}

#[pymethods]
impl StateMemory {
    /// Where the memory begins.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.nbytes,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address, false))?;
        Ok(interface)
    }
}
