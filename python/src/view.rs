//! Memory of an object with Python's buffer protocol.
//!
//! PyO3 has the protocol in its limited API from Python 3.11 on. The struct and the two functions
//! are part of the stable ABI since 3.11 (PEP 688's predecessor, "What's New in Python 3.11"), and
//! have the same layout and names in 3.10.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;

use pyo3::ffi::PyObject;
use pyo3::prelude::*;

/// `Py_buffer` of `Include/pybuffer.h`.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
}

const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const SHAPE: c_int = 0x8;
const STRIDES: c_int = 0x10 | SHAPE;
const C_CONTIGUOUS: c_int = 0x20 | STRIDES;

/// Memory of an object, which stays where it is until this is dropped.
pub(crate) struct View {
    /// On the heap: the exporter may point into the struct. Empty after the drop.
    raw: ManuallyDrop<Box<RawView>>,
}

thread_local! {
    /// The struct of a view that was released, for the next one: small calls feel an allocation.
    static SPARE: Cell<Option<Box<RawView>>> = const { Cell::new(None) };
}

const EMPTY: RawView = RawView {
    buf: std::ptr::null_mut(),
    obj: std::ptr::null_mut(),
    len: 0,
    itemsize: 0,
    readonly: 0,
    ndim: 0,
    format: std::ptr::null_mut(),
    shape: std::ptr::null_mut(),
    strides: std::ptr::null_mut(),
    suboffsets: std::ptr::null_mut(),
    internal: std::ptr::null_mut(),
};

// SAFETY: the struct is only read, and its release takes the GIL.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// The memory of an object, in C order.
    ///
    /// # Errors
    ///
    /// What the object says: it has no such memory, or the memory is read-only or not contiguous.
    pub(crate) fn of(object: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Self> {
        let mut raw = SPARE.take().unwrap_or_else(|| Box::new(EMPTY));
        *raw = EMPTY;
        let flags = C_CONTIGUOUS | FORMAT | if is_written { WRITABLE } else { 0 };
        // SAFETY: the object is alive, the GIL is held, and the struct is one that the call fills.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *raw, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { raw: ManuallyDrop::new(raw) })
    }

    pub(crate) fn address(&self) -> usize {
        self.raw.buf as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        usize::try_from(self.raw.len).unwrap_or(0)
    }

    pub(crate) fn item_bytes(&self) -> usize {
        usize::try_from(self.raw.itemsize).unwrap_or(0)
    }

    /// The format of the struct module; bytes where the object names none.
    pub(crate) fn format(&self) -> &[u8] {
        if self.raw.format.is_null() {
            return b"B";
        }
        // SAFETY: the exporter gives a text that ends, for as long as the view.
        unsafe { CStr::from_ptr(self.raw.format) }.to_bytes()
    }

    /// The lengths of the dimensions.
    pub(crate) fn shape(&self) -> &[isize] {
        if self.raw.shape.is_null() || self.raw.ndim <= 0 {
            return &[];
        }
        // SAFETY: the exporter gives so many lengths, for as long as the view.
        unsafe { std::slice::from_raw_parts(self.raw.shape, self.raw.ndim as usize) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: taken once, in the drop.
        let mut raw = unsafe { ManuallyDrop::take(&mut self.raw) };
        // Without an interpreter nothing is to be released.
        let _ = Python::try_attach(|_| {
            // SAFETY: the struct was filled, is released once, and the GIL is held.
            unsafe { PyBuffer_Release(&raw mut *raw) }
        });
        // At the end of a thread there may be no place for it.
        let _ = SPARE.try_with(|spare| spare.set(Some(raw)));
    }
}
