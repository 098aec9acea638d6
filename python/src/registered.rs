//! Memory that is registered with a group's devices.

use std::sync::{Arc, Mutex};

use pleach_collectives::Buffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::group::Inner;

/// Registered memory. ``numpy.asarray(registered)`` is an array of bytes over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Registered")]
pub(crate) struct Registered {
    /// Python reaches the bytes by their address alone; the lock makes the type one that threads
    /// may share.
    memory: Arc<Mutex<Buffer<u8>>>,
    address: usize,
    bytes: usize,
    group: Arc<Inner>,
}

impl Registered {
    pub(crate) fn new(mut memory: Buffer<u8>, group: Arc<Inner>) -> Self {
        let (address, bytes) = (memory.as_mut_ptr() as usize, memory.len());
        let memory = Arc::new(Mutex::new(memory));
        group.remember(address, bytes, &memory);
        Self { memory, address, bytes, group }
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
        self.group.forget(self.address);
        let _ = &self.memory;
    }
}
