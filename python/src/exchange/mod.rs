//! Tensors by key between programs, as Python classes.
//!
//! **Invariants.** A tensor that is held in the memory of its sender is held by the object below
//! its array ([`memory::ReceivedMemory`]), so the last array that is dropped gives it back, however
//! references are lost. A forked child drops nothing of its parent's: its drops would give leases
//! back a second time, and would wait for threads that it does not have ([`OfProcess`]).

mod errors;
mod memory;
mod peer;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pleach_exchange::{EndpointOptions, Key, SharedTensor, TensorMemoryError, TensorShape};
use pleach_transport::Secret;
use pleach_transport::clock::now;
use pleach_transport::fork::Process;
use pleach_transport::mutex::lock;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub(crate) use self::memory::{LendableMemory, ReceivedMemory};
use self::memory::{Lendables, copied, shape_of};
pub(crate) use self::peer::{Peer, PendingTensor};
use crate::error::argument;
use crate::group::limit;
use crate::memory::Memory;
use crate::types::ElementType;

/// How long a wait lasts between two checks for signals of the process.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// A value of the process that made it: another process does not drop it.
struct OfProcess<T> {
    value: Option<T>,
    process: Process,
}

impl<T> OfProcess<T> {
    fn new(value: T) -> Self {
        Self { value: Some(value), process: Process::current() }
    }

    /// The value, in its process.
    fn get(&self, py: Python<'_>) -> PyResult<&T> {
        let value = self.value.as_ref().filter(|_| self.process.is_current());
        value.ok_or_else(|| errors::forked(py, self.process.id()))
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            std::mem::forget(self.value.take());
        }
    }
}

/// An endpoint, until it is closed and its object dropped.
type OpenEndpoint = OfProcess<pleach_exchange::Endpoint>;

/// The endpoints of this process.
static OPEN: Mutex<Vec<Weak<OpenEndpoint>>> = Mutex::new(Vec::new());

/// Closes all endpoints of this process; called when the interpreter ends, before threads that wait
/// would come back to an interpreter that is gone.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) {
    py.detach(|| {
        let endpoints = std::mem::take(&mut *lock(&OPEN));
        for endpoint in endpoints.iter().filter_map(Weak::upgrade) {
            if let Some(endpoint) = endpoint.value.as_ref().filter(|_| endpoint.process.is_current()) {
                endpoint.close();
            }
        }
    });
}

/// The key of a step and a name.
fn key(py: Python<'_>, step: u64, name: &str) -> PyResult<Key> {
    Key::new(step, name).map_err(|error| argument(py, error.to_string()))
}

/// This program's end of the tensor exchange: other programs receive the tensors that it sends, and
/// it receives theirs. ``with`` closes it. Threads may share it.
///
/// listen: where peers connect, as "HOST:PORT"; "127.0.0.1:0", any port of this host, by default.
/// fabric: auto, shm, tcp, verbs or none. secret_file: the secret that peers must know; without one
/// whoever reaches the port receives tensors. require_regions: a peer with which no memory is
/// shared is an error. timeout: seconds that a send waits for room and a receive for its tensor, 60
/// by default. bytes_held: most bytes of tensors that wait for a receiver; bytes_lendable: most
/// bytes of lendable memory. What is not given is what PLEACH_FABRIC, PLEACH_SECRET_FILE,
/// PLEACH_REQUIRE, PLEACH_HOST, PLEACH_INTERFACE and PLEACH_METRICS say.
///
/// Raises ArgumentError for what cannot be right, and ExchangeError if the port is taken.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Endpoint")]
pub(crate) struct Endpoint {
    open: Arc<OpenEndpoint>,
    timeout: Duration,
    lendables: Lendables,
    is_closed: Mutex<bool>,
}

impl Endpoint {
    /// The endpoint, while it is open.
    fn get(&self, py: Python<'_>) -> PyResult<&pleach_exchange::Endpoint> {
        match *lock(&self.is_closed) {
            false => self.open.get(py),
            true => Err(errors::closed(py)),
        }
    }

    /// An array as a tensor: in place in memory of [`Endpoint::tensor`], else a copy.
    fn shared(&self, py: Python<'_>, data: &Bound<'_, PyAny>, name: &str) -> PyResult<SharedTensor> {
        let endpoint = self.get(py)?;
        let memory = Memory::of(data, name, false)?;
        let shape = shape_of(py, &memory)?;
        if let Some(found) = self.lendables.part(memory.address, &shape) {
            // From now on receivers read it.
            if let Ok(set_flags) = data.getattr(intern!(py, "setflags")) {
                let arguments = PyDict::new(py);
                arguments.set_item(intern!(py, "write"), false)?;
                set_flags.call((), Some(&arguments))?;
            }
            return Ok(found);
        }
        copied(py, endpoint, &memory, &shape)
    }

    fn limit(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Duration> {
        Ok(limit(py, "timeout", timeout)?.unwrap_or(self.timeout))
    }
}

/// Tries in short turns until the deadline, with checks for signals between. `attempt` has an end,
/// or failed because its turn was over.
fn in_turns<T: Send>(
    py: Python<'_>,
    limit: Duration,
    mut attempt: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let until = now() + limit;
    loop {
        let turn = until.since(now()).min(SIGNAL_INTERVAL);
        if let Some(ended) = py.detach(|| attempt(turn)) {
            return Ok(Some(ended));
        }
        py.check_signals()?;
        if now() >= until {
            return Ok(None);
        }
    }
}

/// Calls what waits, and asks in turns whether it goes on: until a signal has come, whose exception
/// is raised.
fn until_signal<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn FnMut() -> bool) -> Option<T> + Send,
) -> PyResult<T> {
    let (ended, raised) = py.detach(|| {
        let mut raised = None;
        let ended = call(&mut || {
            raised = Python::attach(|py| py.check_signals().err());
            raised.is_none()
        });
        (ended, raised)
    });
    match (raised, ended) {
        (Some(error), _) => Err(error),
        (None, Some(ended)) => Ok(ended),
        (None, None) => Err(argument(py, "the call was given up")),
    }
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (listen=None, *, fabric=None, secret_file=None, require_regions=None, timeout=None,
                        bytes_held=None, bytes_lendable=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        listen: Option<String>,
        fabric: Option<&str>,
        secret_file: Option<PathBuf>,
        require_regions: Option<bool>,
        timeout: Option<f64>,
        bytes_held: Option<u64>,
        bytes_lendable: Option<u64>,
    ) -> PyResult<Self> {
        let mut options = EndpointOptions::from_env().map_err(|error| errors::open(py, &error))?;
        options.listen = listen.unwrap_or(options.listen);
        if let Some(name) = fabric {
            let wrong = |form: String| argument(py, format!("fabric is {name:?}; {form}"));
            options.fabric = name.parse().map_err(wrong)?;
        }
        if let Some(path) = &secret_file {
            let secret = Secret::from_file(path);
            options.secret = Some(secret.map_err(|error| argument(py, error.to_string()))?);
        }
        options.requires_regions = require_regions.unwrap_or(options.requires_regions);
        let table = &mut options.limits.server.table;
        table.bytes_held = bytes_held.unwrap_or(table.bytes_held);
        let arenas = &mut options.limits.arenas;
        arenas.bytes = bytes_lendable.unwrap_or(arenas.bytes);
        let timeout = limit(py, "timeout", timeout)?.unwrap_or(options.send_wait);
        let opened = py.detach(|| pleach_exchange::Endpoint::open(&options));
        let open = Arc::new(OfProcess::new(opened.map_err(|error| errors::open(py, &error))?));
        let mut all = lock(&OPEN);
        all.retain(|endpoint| endpoint.strong_count() > 0);
        all.push(Arc::downgrade(&open));
        drop(all);
        Ok(Self { open, timeout, lendables: Lendables::default(), is_closed: Mutex::new(false) })
    }

    /// Where other programs reach it, as "127.0.0.1:40001".
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.open.get(py)?.address().to_string())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        *lock(&self.is_closed)
    }

    /// A NumPy array over lendable memory: sent as a whole, or a part of it that begins at a
    /// multiple of 64 bytes, it is not copied. It holds zeros, or what earlier tensors of this
    /// program held.
    ///
    /// shape: an int or a sequence of at most 8. dtype: float32 by default.
    ///
    /// Raises ArgumentError, or ExchangeError with the kind "exhausted" if the memory is used up.
    #[pyo3(signature = (shape, dtype=None))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let endpoint = self.get(py)?;
        let arrays = py.import(intern!(py, "pleach._arrays"))?;
        let bytes: usize = arrays.call_method1(intern!(py, "bytes_of"), (shape, dtype))?.extract()?;
        let (_, name): (Vec<usize>, String) =
            arrays.call_method1(intern!(py, "described"), (shape, dtype))?.extract()?;
        if ElementType::named(&name).is_none() {
            return Err(argument(py, format!("pleach has no elements of type {name}")));
        }
        let made = TensorShape::new(pleach_collectives::DataType::U8, &[bytes]);
        let made = made.and_then(|shape| endpoint.untyped_tensor(&shape));
        let made = made.map_err(|error: TensorMemoryError| errors::memory(py, &error))?;
        let memory = LendableMemory::new(made, &self.lendables);
        arrays.call_method1(intern!(py, "over"), (Py::new(py, memory)?, shape, dtype))
    }

    /// Sends an array under a key, a step and a name: it is kept until one program receives it, or
    /// its step is aborted or cleaned up. Tensors of one key are received in the order in which
    /// they were sent.
    ///
    /// data: an array of ``endpoint.tensor``, or a contiguous part of one, which becomes read-only;
    /// other arrays, and objects with the buffer protocol or DLPack, are copied once. Complex
    /// numbers are sent as pairs of floats, bool as uint8.
    /// timeout: seconds to wait for room.
    ///
    /// Raises ArgumentError, TensorTimeoutError, or TensorAbortedError if the step was aborted.
    #[pyo3(signature = (step, name, data, *, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        step: u64,
        name: &str,
        data: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (endpoint, key) = (self.get(py)?, key(py, step, name)?);
        let limit = self.limit(py, timeout)?;
        let tensor = self.shared(py, data, "data")?;
        let begun = now();
        let sent =
            until_signal(py, |goes_on| endpoint.send_while(&key, tensor, limit, SIGNAL_INTERVAL, goes_on))?;
        sent.map_err(|error| errors::send(py, &key, now().since(begun), &error))
    }

    /// Offers the tensors of a step, a dict of arrays by name, to all programs, each any number of
    /// times, in place of those that were published in this step before. A receive of another name
    /// fails at once. The arrays: as in ``send``.
    fn publish(&self, py: Python<'_>, step: u64, tensors: &Bound<'_, PyDict>) -> PyResult<()> {
        let endpoint = self.get(py)?;
        let mut published = std::collections::BTreeMap::new();
        for (name, data) in tensors {
            let name: String = name.extract()?;
            key(py, step, &name)?;
            let tensor = self.shared(py, &data, &name)?;
            published.insert(name, tensor);
        }
        py.detach(|| endpoint.publish(step, published));
        Ok(())
    }

    /// Ends a step: receives that wait in it raise TensorAbortedError with this reason, and those
    /// that come later, until the step is cleaned up. Its tensors are dropped.
    #[pyo3(signature = (step, reason="the sender has aborted it"))]
    fn abort(&self, py: Python<'_>, step: u64, reason: &str) -> PyResult<()> {
        let endpoint = self.get(py)?;
        py.detach(|| endpoint.abort(step, reason));
        Ok(())
    }

    /// Forgets a step: receives that wait in it fail. Its tensors are dropped.
    fn clean_up(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let endpoint = self.get(py)?;
        py.detach(|| endpoint.clean_up(step));
        Ok(())
    }

    /// Receives a tensor that this program itself sends: a read-only NumPy array. Arguments and
    /// errors: see ``Peer.receive``.
    #[pyo3(signature = (step, name, *, timeout=None))]
    fn receive<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (endpoint, key) = (self.get(py)?, key(py, step, name)?);
        let (limit, begun) = (self.limit(py, timeout)?, now());
        let received =
            until_signal(py, |goes_on| endpoint.receive_while(&key, limit, SIGNAL_INTERVAL, goes_on))?;
        let failed = |error| errors::receive(py, &key, None, now().since(begun), &error);
        let received = received.map_err(failed)?;
        ReceivedMemory::array(py, received)
    }

    /// Another program, by the ``address`` of its endpoint. The first receive makes the link. A
    /// program that was restarted is another one: connect anew.
    fn connect(&self, py: Python<'_>, address: &str) -> PyResult<Peer> {
        let peer = self.get(py)?.connect(address).map_err(|error| argument(py, error.to_string()))?;
        Ok(Peer::new(peer, self.timeout))
    }

    /// What it has counted, and what it holds now: a dict of ints.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.open.get(py)?.counts();
        let found = PyDict::new(py);
        for (name, value) in [
            ("received_in_place", counts.in_place.tensors),
            ("received_copied", counts.copied.tensors),
            ("received_inline", counts.inline.tensors),
            ("sent_in_place", counts.sent_in_place.tensors),
            ("sent_copied", counts.sent_copied.tensors),
            ("sent_inline", counts.sent_inline.tensors),
            ("links", counts.links),
            ("leases", counts.leases),
            ("bytes_held", counts.bytes_held),
            ("bytes_lent", counts.bytes_lent),
            ("bytes_lendable", counts.arena_bytes),
        ] {
            found.set_item(name, value)?;
        }
        Ok(found)
    }

    /// Closes the endpoint: its port is free, its links end, and calls on its peers raise
    /// PeerUnavailableError. Arrays stay readable. May be called again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let endpoint = self.open.get(py)?;
        *lock(&self.is_closed) = true;
        py.detach(|| endpoint.close());
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let state = if self.closed() { ", closed" } else { "" };
        Ok(format!("<pleach.Endpoint: {}{state}>", self.address(py)?))
    }
}
