//! Memory of tensors as Python sees it: below arrays over lendable memory, and below arrays over
//! tensors that were received.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use pleach_exchange::{Endpoint, ReceivedTensor, SharedTensor, TensorShape, UntypedTensor};
use pleach_transport::mutex::lock;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{OfProcess, errors};
use crate::memory::Memory;
use crate::types::{ElementType, Kind};

/// The lendable memory of arrays that live, by address.
#[derive(Clone, Default)]
pub(crate) struct Lendables(Arc<Mutex<BTreeMap<usize, SharedTensor>>>);

impl Lendables {
    /// The tensor of this shape at an address, if it lies in lendable memory and can be lent there.
    pub(crate) fn part(&self, address: usize, shape: &TensorShape) -> Option<SharedTensor> {
        let known = lock(&self.0);
        let (base, memory) = known.range(..=address).next_back()?;
        memory.part(address - base, shape)
    }
}

/// Lendable memory. ``numpy.asarray(memory)`` is an array of bytes over it, which keeps it.
#[pyclass(frozen, weakref, module = "pleach._native", name = "LendableMemory")]
pub(crate) struct LendableMemory {
    lendables: OfProcess<Lendables>,
    address: usize,
    bytes: usize,
}

impl LendableMemory {
    pub(crate) fn new(mut memory: UntypedTensor, lendables: &Lendables) -> Self {
        let bytes = memory.as_bytes_mut();
        // Python writes by this address until the tensor is sent.
        let (address, bytes) = (bytes.as_mut_ptr().expose_provenance(), bytes.len());
        if bytes > 0 {
            lock(&lendables.0).insert(address, memory.share());
        }
        Self { lendables: OfProcess::new(lendables.clone()), address, bytes }
    }
}

/// How NumPy finds memory.
fn array_interface(
    py: Python<'_>,
    address: usize,
    bytes: usize,
    is_read_only: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let interface = PyDict::new(py);
    interface.set_item("version", 3)?;
    interface.set_item("shape", (bytes,))?;
    interface.set_item("typestr", "|u1")?;
    interface.set_item("data", (address, is_read_only))?;
    Ok(interface)
}

#[pymethods]
impl LendableMemory {
    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array_interface(py, self.address, self.bytes, false)
    }
}

impl Drop for LendableMemory {
    fn drop(&mut self) {
        // A forked child has a copy of the list, and its lock may be held for ever.
        if self.bytes > 0
            && self.lendables.process.is_current()
            && let Some(lendables) = &self.lendables.value
        {
            // What was sent stays for its receivers.
            let taken = lock(&lendables.0).remove(&self.address);
            drop(taken);
        }
    }
}

/// Memory of a tensor that was received, which goes back to its sender with this object.
#[pyclass(frozen, weakref, module = "pleach._native", name = "ReceivedMemory")]
pub(crate) struct ReceivedMemory {
    tensor: OfProcess<ReceivedTensor>,
}

impl ReceivedMemory {
    /// A read-only array over a tensor.
    pub(crate) fn array(py: Python<'_>, tensor: ReceivedTensor) -> PyResult<Bound<'_, PyAny>> {
        let element = ElementType { data_type: tensor.shape().data_type(), kind: Kind::Number };
        let shape = tensor.shape().dimensions().to_vec();
        let memory = Py::new(py, Self { tensor: OfProcess::new(tensor) })?;
        let over = py.import(intern!(py, "pleach._arrays"))?.getattr(intern!(py, "over"))?;
        over.call1((memory, shape, element.name()))
    }
}

#[pymethods]
impl ReceivedMemory {
    /// How the tensor came: "in place", "inline" or "local".
    #[getter]
    fn way(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.tensor.get(py)?.way().to_string())
    }

    /// Length of the memory, in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.tensor.get(py)?.as_bytes().len())
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let bytes = self.tensor.get(py)?.as_bytes();
        array_interface(py, bytes.as_ptr().expose_provenance(), bytes.len(), true)
    }
}

/// The shape of an array as a tensor: complex numbers are pairs of floats.
pub(crate) fn shape_of(py: Python<'_>, memory: &Memory) -> PyResult<TensorShape> {
    let mut dimensions = memory.shape();
    if memory.element.lanes() > 1 {
        dimensions.push(memory.element.lanes());
    }
    TensorShape::new(memory.element.data_type, &dimensions).map_err(|error| errors::memory(py, &error))
}

/// A copy of an array in lendable memory.
pub(crate) fn copied(
    py: Python<'_>,
    endpoint: &Endpoint,
    memory: &Memory,
    shape: &TensorShape,
) -> PyResult<SharedTensor> {
    assert_eq!(memory.count * memory.element.bytes(), shape.bytes(), "a shape is that of its array");
    let (address, bytes) = (memory.address, shape.bytes());
    let copy = py.detach(|| {
        let mut copy = endpoint.untyped_tensor(shape)?;
        if bytes > 0 {
            let from = std::ptr::with_exposed_provenance::<u8>(address);
            // SAFETY: `memory` keeps the array, which is contiguous and has the bytes of its shape;
            // the copy is new and as long. Another thread of Python that writes the array
            // meanwhile tears plain numbers.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_bytes_mut().as_mut_ptr(), bytes) };
        }
        Ok(copy.share())
    });
    copy.map_err(|error| errors::memory(py, &error))
}
