//! Memory of an object with DLPack, or of a DLPack capsule: the structs of `dlpack.h` 1.1.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use pleach_collectives::DataType;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::error::argument;
use crate::types::{ElementType, Kind};

const NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const USED_NAME: &CStr = c"used_dltensor";
const VERSIONED_USED_NAME: &CStr = c"used_dltensor_versioned";

/// The device codes of memory that the processor reads and writes: the host's, pinned by CUDA,
/// pinned by ROCm.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];

const FLAG_READ_ONLY: u64 = 1;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A tensor that was taken out of its capsule, and is given back when this is dropped.
pub(crate) enum Taken {
    Plain(*mut c_void),
    Versioned(*mut c_void),
}

// SAFETY: the struct is only read, and its deleter is called with the GIL held.
unsafe impl Send for Taken {}
// SAFETY: as above.
unsafe impl Sync for Taken {}

/// What a tensor says of its memory.
pub(crate) struct Described {
    pub(crate) address: usize,
    pub(crate) element: ElementType,
    pub(crate) shape: Vec<usize>,
    pub(crate) is_read_only: bool,
}

/// The tensor of an object with DLPack, or of a capsule.
pub(crate) fn take(object: &Bound<'_, PyAny>) -> PyResult<(Taken, Described)> {
    let py = object.py();
    let capsule = match object.cast::<PyCapsule>() {
        Ok(capsule) => capsule.clone(),
        Err(_) => {
            let arguments = PyDict::new(py);
            arguments.set_item("max_version", (1, 0))?;
            let given = match object.call_method("__dlpack__", (), Some(&arguments)) {
                Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
                    object.call_method0("__dlpack__")
                }
                given => given,
            };
            given?.cast_into::<PyCapsule>().map_err(|_| argument(py, "__dlpack__ gave no capsule"))?
        }
    };
    let (plain, versioned) = (pointer(&capsule, NAME), pointer(&capsule, VERSIONED_NAME));
    let taken = match (plain, versioned) {
        (Some(managed), _) => {
            rename(&capsule, USED_NAME)?;
            Taken::Plain(managed)
        }
        (None, Some(managed)) => {
            rename(&capsule, VERSIONED_USED_NAME)?;
            Taken::Versioned(managed)
        }
        (None, None) => {
            return Err(argument(
                py,
                "this DLPack capsule was consumed before, or is none; take a new one from its tensor",
            ));
        }
    };
    let described = describe(py, &taken)?;
    Ok((taken, described))
}

fn pointer(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the capsule is alive and the GIL is held.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: as above, and the capsule has this name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
    (!pointer.is_null()).then_some(pointer)
}

/// Marks the capsule as consumed: its own destructor does nothing from now on.
fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    let name: *const c_char = name.as_ptr();
    // SAFETY: the capsule is alive, the GIL is held, and the name is static.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(())
}

fn describe(py: Python<'_>, taken: &Taken) -> PyResult<Described> {
    let (tensor, is_read_only) = match *taken {
        // SAFETY: a capsule of this name points to this struct, which stays until its deleter is
        // called.
        Taken::Plain(managed) => (unsafe { &(*managed.cast::<Managed>()).tensor }, false),
        Taken::Versioned(managed) => {
            // SAFETY: as above; the version comes first in every version.
            let managed = managed.cast::<ManagedVersioned>();
            // SAFETY: as above.
            let major = unsafe { (*managed).major };
            if major != 1 {
                return Err(argument(py, format!("DLPack {major} is not known; there are 0 and 1")));
            }
            // SAFETY: as above.
            let managed = unsafe { &*managed };
            (&managed.tensor, managed.flags & FLAG_READ_ONLY != 0)
        }
    };
    if !HOST_DEVICES.contains(&tensor.device_type) {
        let device = tensor.device_type;
        let text = format!(
            "the tensor is in memory of a device (DLPack type {device}), and the group works on the host's"
        );
        return Err(argument(py, text));
    }
    let Some(element) = element(tensor) else {
        let (code, bits) = (tensor.code, tensor.bits);
        let text = format!("pleach has no element type for DLPack code {code} of {bits} bits");
        return Err(argument(py, text));
    };
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |start: *const i64| match start.is_null() || dimensions == 0 {
        true => Vec::new(),
        // SAFETY: a tensor has so many lengths and strides.
        false => unsafe { std::slice::from_raw_parts(start, dimensions) }.to_vec(),
    };
    let (shape, strides) = (list(tensor.shape), list(tensor.strides));
    if !strides.is_empty() && !is_contiguous(&shape, &strides) {
        return Err(argument(py, "the tensor is not contiguous; pass tensor.contiguous()"));
    }
    let lengths: Option<Vec<usize>> = shape.iter().map(|&length| usize::try_from(length).ok()).collect();
    let place = (tensor.data as usize).checked_add(usize::try_from(tensor.byte_offset).unwrap_or(usize::MAX));
    let fitting = lengths.zip(place).filter(|(lengths, _)| {
        let bytes = lengths.iter().try_fold(element.bytes(), |bytes, length| bytes.checked_mul(*length));
        bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
    });
    let Some((shape, address)) = fitting else {
        return Err(argument(py, format!("the tensor has shape {shape:?}, which no memory has")));
    };
    Ok(Described { address, element, shape, is_read_only })
}

fn element(tensor: &Tensor) -> Option<ElementType> {
    let number = |data_type| Some(ElementType { data_type, kind: Kind::Number });
    if tensor.lanes != 1 {
        return None;
    }
    match (tensor.code, tensor.bits) {
        (0, 8) => number(DataType::I8),
        (0, 16) => number(DataType::I16),
        (0, 32) => number(DataType::I32),
        (0, 64) => number(DataType::I64),
        (1, 8) => number(DataType::U8),
        (1, 16) => number(DataType::U16),
        (1, 32) => number(DataType::U32),
        (1, 64) => number(DataType::U64),
        (2, 16) => number(DataType::F16),
        (2, 32) => number(DataType::F32),
        (2, 64) => number(DataType::F64),
        (4, 16) => number(DataType::Bf16),
        (5, 64) => Some(ElementType { data_type: DataType::F32, kind: Kind::Complex }),
        (5, 128) => Some(ElementType { data_type: DataType::F64, kind: Kind::Complex }),
        (6, 8) => Some(ElementType { data_type: DataType::U8, kind: Kind::Bool }),
        (10, 8) => number(DataType::F8E4M3),
        (12, 8) => number(DataType::F8E5M2),
        _ => None,
    }
}

fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&length, &stride)| {
            let is_next = length == 1 || stride == expected;
            expected = length.saturating_mul(expected);
            is_next
        })
}

impl Drop for Taken {
    fn drop(&mut self) {
        let _ = Python::try_attach(|_| match *self {
            Self::Plain(managed) => {
                let managed = managed.cast::<Managed>();
                // SAFETY: the tensor was taken from its capsule and is given back once.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) };
                }
            }
            Self::Versioned(managed) => {
                let managed = managed.cast::<ManagedVersioned>();
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) };
                }
            }
        });
    }
}
