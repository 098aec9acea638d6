//! Memory that a call works on: of an object with the buffer protocol or with DLPack, or given by
//! its address.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString};

use crate::dlpack;
use crate::error::argument;
use crate::types::ElementType;
use crate::view::View;

/// Memory of this process, which stays until this is dropped.
pub(crate) struct Memory {
    pub(crate) address: usize,
    pub(crate) element: ElementType,
    /// Elements of the array.
    pub(crate) count: usize,
    keep: Keep,
}

enum Keep {
    View(View),
    Tensor { _taken: dlpack::Taken, shape: Vec<usize> },
}

impl Memory {
    /// The lengths of the array's dimensions. Most calls do not ask for them.
    pub(crate) fn shape(&self) -> Vec<usize> {
        match &self.keep {
            Keep::View(view) => {
                view.shape().iter().map(|&length| usize::try_from(length).unwrap_or(0)).collect()
            }
            Keep::Tensor { shape, .. } => shape.clone(),
        }
    }

    /// The memory of an argument of this name.
    pub(crate) fn of(object: &Bound<'_, PyAny>, name: &str, is_written: bool) -> PyResult<Self> {
        let py = object.py();
        if object.is_none() {
            return Err(argument(py, format!("{name} is None; this rank needs it")));
        }
        match View::of(object, is_written) {
            Ok(view) => Self::of_view(py, view, None, name),
            Err(error) => Self::of_no_view(object, name, is_written, error),
        }
    }

    fn of_view(py: Python<'_>, view: View, element: Option<ElementType>, name: &str) -> PyResult<Self> {
        let found = element.or_else(|| ElementType::of_format(view.format(), view.item_bytes()));
        let Some(element) = found else {
            let format = String::from_utf8_lossy(view.format()).into_owned();
            let text =
                format!("{name} has elements of format {format:?}, which pleach does not have; {TYPES}");
            return Err(argument(py, text));
        };
        let count = view.bytes() / element.bytes();
        Ok(Self { address: view.address(), element, count, keep: Keep::View(view) })
    }

    /// Of an object whose buffer protocol refuses: arrays of ml_dtypes are taken as arrays of
    /// integers, others by DLPack.
    fn of_no_view(object: &Bound<'_, PyAny>, name: &str, is_written: bool, error: PyErr) -> PyResult<Self> {
        let py = object.py();
        if let Ok(interface) = object.getattr(intern!(py, "__array_interface__")) {
            let dtype = object.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "name"))?.to_string();
            let element = ElementType::named(&dtype).filter(|element| element.bytes() <= 2);
            if let Some(element) = element {
                let integers = if element.bytes() == 1 { "uint8" } else { "uint16" };
                let view = object.call_method1(intern!(py, "view"), (integers,));
                if let Ok(view) = view.and_then(|view| View::of(&view, is_written)) {
                    return Self::of_view(py, view, Some(element), name);
                }
            } else if ElementType::named(&dtype).is_none() {
                let text =
                    format!("{name} has elements of type {dtype}, which pleach does not have; {TYPES}");
                return Err(argument(py, text));
            }
            let data: (usize, bool) = interface.get_item("data")?.extract()?;
            let text = match data.1 && is_written {
                true => format!("{name} is read-only, and the call writes to it; pass a copy"),
                false => format!("{name} is not contiguous in C order; pass numpy.ascontiguousarray({name})"),
            };
            return Err(argument(py, text));
        }
        if object.hasattr(intern!(py, "__dlpack__"))? || object.is_instance_of::<PyCapsule>() {
            return Self::of_tensor(object, name, is_written);
        }
        let kind = object
            .get_type()
            .name()
            .map_or_else(|_| "object".to_owned(), |name: Bound<'_, PyString>| name.to_string());
        let text = format!(
            "{name} ({kind}) has no memory for this call: {error}; pass an array with the buffer protocol or DLPack"
        );
        Err(argument(py, text))
    }

    fn of_tensor(object: &Bound<'_, PyAny>, name: &str, is_written: bool) -> PyResult<Self> {
        let (taken, described) = dlpack::take(object)?;
        if described.is_read_only && is_written {
            let text = format!("{name} is read-only, and the call writes to it; pass a copy");
            return Err(argument(object.py(), text));
        }
        let dlpack::Described { address, element, shape, .. } = described;
        let count = shape.iter().product();
        Ok(Self { address, element, count, keep: Keep::Tensor { _taken: taken, shape } })
    }
}

const TYPES: &str = "there are float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, integers of 8 to 64 \
     bits in native byte order, bool, complex64 and complex128";
