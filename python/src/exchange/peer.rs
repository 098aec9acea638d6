//! Peers, and receives under way.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pleach_exchange::{Key, LinkError, ReceiveTensorError};
use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::mutex::lock;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use super::memory::ReceivedMemory;
use super::{OfProcess, SIGNAL_INTERVAL, errors, in_turns, key};
use crate::group::limit;

/// Another program, of which tensors are received: see ``Endpoint.connect``. Threads may share it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Peer")]
pub(crate) struct Peer {
    peer: OfProcess<pleach_exchange::Peer>,
    timeout: Duration,
}

impl Peer {
    pub(crate) fn new(peer: pleach_exchange::Peer, timeout: Duration) -> Self {
        Self { peer: OfProcess::new(peer), timeout }
    }

    /// The peer with the limit of a call.
    fn within(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(pleach_exchange::Peer, Duration)> {
        let limit = limit(py, "timeout", timeout)?.unwrap_or(self.timeout);
        Ok((self.peer.get(py)?.within(limit), limit))
    }

    /// Makes a link, or does what takes as long, in another thread, so that signals of the process
    /// are seen meanwhile.
    fn linked(
        py: Python<'_>,
        peer: &pleach_exchange::Peer,
        limit: Duration,
        link: fn(&pleach_exchange::Peer) -> Result<(), LinkError>,
    ) -> PyResult<Result<(), LinkError>> {
        let ((told, heard), peer) = (mpsc::channel(), peer.clone());
        let linking = std::thread::Builder::new().name("pleach-link".to_owned());
        linking.spawn(move || {
            // Nobody hears it after Ctrl-C.
            let _ = told.send(link(&peer));
        })?;
        // The thread itself ends at the limit.
        let heard = Mutex::new(heard);
        let linked = in_turns(py, limit + SIGNAL_INTERVAL, |turn| lock(&heard).recv_timeout(turn).ok())?;
        linked.ok_or_else(|| PyTimeoutError::new_err("the link took too long"))
    }

    /// Makes a call about a tensor of the peer once there is a link.
    fn asked<T: Send>(
        &self,
        py: Python<'_>,
        key: &Key,
        (begun, timeout): (Nanos, Option<f64>),
        ask: impl FnOnce(&pleach_exchange::Peer) -> Result<T, ReceiveTensorError> + Send,
    ) -> PyResult<T> {
        let (mut peer, limit) = self.within(py, timeout)?;
        let address = self.peer.get(py)?.address();
        let failed =
            |error: &ReceiveTensorError| errors::receive(py, key, Some(address), now().since(begun), error);
        if !peer.is_linked() {
            let linked = Self::linked(py, &peer, limit, pleach_exchange::Peer::open)?;
            let key = key.clone();
            linked.map_err(|source| failed(&ReceiveTensorError::Link { key, source }))?;
            peer = peer.within(limit.saturating_sub(now().since(begun)));
        }
        py.detach(|| ask(&peer)).map_err(|error| failed(&error))
    }
}

#[pymethods]
impl Peer {
    /// Its address.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.peer.get(py)?.address().to_owned())
    }

    /// Makes the link and waits until memory is shared over it, so that the next tensors come in
    /// place. Programs need not call it. Raises ExchangeError, with the kind "no-regions" if no
    /// memory can be shared; tensors come inline then.
    #[pyo3(signature = (timeout=None))]
    fn share_regions(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let begun = now();
        let (peer, limit) = self.within(py, timeout)?;
        let shared = Self::linked(py, &peer, limit, pleach_exchange::Peer::share_regions)?;
        shared.map_err(|error| errors::link(py, peer.address(), now().since(begun), &error))
    }

    /// Receives the tensor of a key: a read-only NumPy array, in the memory of its sender where
    /// that can be mapped. The memory goes back to the sender when the last array over it is
    /// dropped; ``array.copy()`` keeps what it holds.
    ///
    /// step: an int from 0 on. name: a text of 1 to 1024 bytes. timeout: seconds to wait for the
    /// tensor. The GIL is released meanwhile. Ctrl-C raises KeyboardInterrupt, and the tensor is
    /// for the next receive.
    ///
    /// Raises TensorTimeoutError, TensorAbortedError (the step was aborted, or the peer restarted),
    /// TensorNotFoundError (the step is published without this name), PeerUnavailableError (the
    /// peer is not reached, or was lost), or ExchangeError.
    #[pyo3(signature = (step, name, *, timeout=None))]
    fn receive<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (key, begun) = (key(py, step, name)?, now());
        let first = |peer: &pleach_exchange::Peer| peer.receive_or_pending(&key, SIGNAL_INTERVAL);
        let mut pending = match self.asked(py, &key, (begun, timeout), first)? {
            Ok(received) => return ReceivedMemory::array(py, received),
            Err(pending) => pending,
        };
        py.check_signals()?;
        // Its own deadline ends it.
        in_turns(py, Duration::MAX, |turn| pending.wait_for(turn).then_some(()))?;
        let received = py.detach(|| pending.wait());
        let address = self.peer.get(py)?.address();
        let failed = |error| errors::receive(py, &key, Some(address), now().since(begun), &error);
        ReceivedMemory::array(py, received.map_err(failed)?)
    }

    /// Asks for the tensor of a key and does not wait for it: a PendingTensor. It waits for no more
    /// than the link. Arguments and errors: see ``receive``.
    #[pyo3(signature = (step, name, *, timeout=None))]
    fn start_receive(
        &self,
        py: Python<'_>,
        step: u64,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<PendingTensor> {
        let (key, begun) = (key(py, step, name)?, now());
        let pending = self.asked(py, &key, (begun, timeout), |peer| peer.start_receive(&key))?;
        let (peer, state) = (self.address(py)?, Mutex::new(Some(pending)));
        Ok(PendingTensor { pending: OfProcess::new(Arc::new(state)), key, peer, begun })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<pleach.Peer: {}>", self.address(py)?))
    }
}

/// A tensor that was asked for. One that is dropped or cancelled leaves the tensor for the next
/// receive. ``await pending`` gives the same as ``wait()``, and cancels when its task is cancelled.
#[pyclass(frozen, weakref, module = "pleach._native", name = "PendingTensor")]
pub(crate) struct PendingTensor {
    /// None after the end. No thread waits for the lock while it holds the GIL.
    pending: OfProcess<Arc<Mutex<Option<pleach_exchange::PendingTensor>>>>,
    key: Key,
    peer: String,
    begun: Nanos,
}

/// How a look at a pending tensor ends.
enum Look {
    UnderWay,
    Ended(Box<Result<pleach_exchange::ReceivedTensor, ReceiveTensorError>>),
    Taken,
}

#[pymethods]
impl PendingTensor {
    /// Waits for the tensor and returns it, once: see ``Peer.receive``.
    ///
    /// timeout: longest wait in seconds; None waits until the deadline of the receive. After it
    /// TimeoutError is raised, and the receive goes on. Ctrl-C raises KeyboardInterrupt, and the
    /// receive goes on. Raises what ``Peer.receive`` raises.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let pending = self.pending.get(py)?;
        let limit = limit(py, "timeout", timeout)?.unwrap_or(Duration::MAX);
        let look = |turn| {
            let mut state = lock(pending);
            match state.as_mut().map(|pending| pending.wait_for(turn)) {
                None => Look::Taken,
                Some(false) => Look::UnderWay,
                Some(true) => {
                    state.take().map_or(Look::Taken, |pending| Look::Ended(Box::new(pending.wait())))
                }
            }
        };
        let ended = in_turns(py, limit, |turn| match look(turn) {
            Look::UnderWay => None,
            ended => Some(ended),
        })?;
        match ended {
            Some(Look::Ended(received)) => {
                let failed =
                    |error| errors::receive(py, &self.key, Some(&self.peer), now().since(self.begun), &error);
                ReceivedMemory::array(py, received.map_err(failed)?)
            }
            Some(_) => Err(errors::cancelled(py, &self.key, &self.peer)),
            None => {
                Err(PyTimeoutError::new_err("the tensor has not come yet; wait again, or cancel the receive"))
            }
        }
    }

    /// Whether ``wait`` returns or raises at once. Does not block.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let pending = self.pending.get(py)?;
        // A thread that waits has the lock, and so the tensor has not come.
        let state = pending.try_lock();
        Ok(state.is_ok_and(|state| state.as_ref().is_none_or(pleach_exchange::PendingTensor::is_ready)))
    }

    /// Cancels the receive: its tensor is for the next one. Nothing happens after its end.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let pending = self.pending.get(py)?;
        py.detach(|| drop(lock(pending).take()));
        Ok(())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        py.import("pleach._await")?.getattr("until_received")?.call1((slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        format!("<pleach.PendingTensor: {} from {}>", self.key, self.peer)
    }
}
