//! Memory that is registered with a group's devices.

use std::sync::{Arc, Mutex, Weak};

use pleach_collectives::Buffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::group::{Inner, RegisteredMemory};

/// Registered memory. ``numpy.asarray(registered)`` is an array of bytes over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Registered")]
pub(crate) struct Registered {
    /// Python reaches the bytes by their address alone; the lock makes the type one that threads
    /// may share.
    memory: Arc<RegisteredMemory>,
    address: usize,
    bytes: usize,
    /// `None`: the groups of a session's epochs know it.
    group: Option<Arc<Inner>>,
}

impl Registered {
    pub(crate) fn new(mut memory: Buffer<u8>, group: Arc<Inner>) -> Self {
        let (address, bytes) = (memory.as_mut_ptr() as usize, memory.len());
        let memory = Arc::new(Mutex::new(memory));
        group.remember(address, bytes, &memory);
        Self { memory, address, bytes, group: Some(group) }
    }

    /// Memory of a session, and its place for the groups of all epochs.
    pub(crate) fn of_session(mut memory: Buffer<u8>) -> (Self, (usize, usize, Weak<RegisteredMemory>)) {
        let (address, bytes) = (memory.as_mut_ptr() as usize, memory.len());
        let memory = Arc::new(Mutex::new(memory));
        let place = (address, bytes, Arc::downgrade(&memory));
        (Self { memory, address, bytes, group: None }, place)
    }
}

#[pymethods]
impl Registered {
    /// Where the memory begins.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.bytes,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address, false))?;
        Ok(interface)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            group.forget(self.address);
        }
        let _ = &self.memory;
    }
}
