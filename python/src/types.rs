//! Element types and reductions by the names that Python has for them.

use pleach_collectives::{DataType, Factor, ReduceOp};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};

use crate::error::argument;

/// The type of an element of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElementType {
    /// What pleach moves and reduces.
    pub(crate) data_type: DataType,
    pub(crate) kind: Kind,
}

/// What an array's element is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One element of pleach.
    Number,
    /// A byte that is 0 or 1.
    Bool,
    /// Two floats: the real part and the imaginary one.
    Complex,
}

/// The names of NumPy and of ml_dtypes.
const NAMES: [(&str, DataType, Kind); 17] = [
    ("float32", DataType::F32, Kind::Number),
    ("float64", DataType::F64, Kind::Number),
    ("float16", DataType::F16, Kind::Number),
    ("bfloat16", DataType::Bf16, Kind::Number),
    ("float8_e4m3fn", DataType::F8E4M3, Kind::Number),
    ("float8_e5m2", DataType::F8E5M2, Kind::Number),
    ("int64", DataType::I64, Kind::Number),
    ("int32", DataType::I32, Kind::Number),
    ("int16", DataType::I16, Kind::Number),
    ("int8", DataType::I8, Kind::Number),
    ("uint64", DataType::U64, Kind::Number),
    ("uint32", DataType::U32, Kind::Number),
    ("uint16", DataType::U16, Kind::Number),
    ("uint8", DataType::U8, Kind::Number),
    ("bool", DataType::U8, Kind::Bool),
    ("complex64", DataType::F32, Kind::Complex),
    ("complex128", DataType::F64, Kind::Complex),
];

impl ElementType {
    /// The type of a NumPy name, or of a name of pleach as `f32`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let found = NAMES.iter().find(|(known, ..)| *known == name);
        let of_numpy = found.map(|&(_, data_type, kind)| Self { data_type, kind });
        of_numpy.or_else(|| Some(Self { data_type: name.parse().ok()?, kind: Kind::Number }))
    }

    /// The name that NumPy or ml_dtypes has for the type.
    pub(crate) fn name(self) -> &'static str {
        let is_it = |known: &&(&str, DataType, Kind)| known.1 == self.data_type && known.2 == self.kind;
        NAMES.iter().find(is_it).map_or("uint8", |(name, ..)| *name)
    }

    /// The type that a format of the struct module names, of items of so many bytes.
    pub(crate) fn of_format(format: &[u8], item_bytes: usize) -> Option<Self> {
        let (order, code) = match format {
            [order @ (b'@' | b'=' | b'<' | b'>' | b'!'), code @ ..] => (*order, code),
            code => (b'@', code),
        };
        let foreign = if cfg!(target_endian = "little") { [b'>', b'!'] } else { [b'<', b'<'] };
        if foreign.contains(&order) && item_bytes > 1 {
            return None;
        }
        let integer = |sizes: [DataType; 4]| sizes.into_iter().find(|size| size.bytes() == item_bytes);
        let number = |data_type: Option<DataType>| {
            data_type
                .filter(|data_type| data_type.bytes() == item_bytes)
                .map(|data_type| Self { data_type, kind: Kind::Number })
        };
        let complex = |data_type: DataType| Self { data_type, kind: Kind::Complex };
        match code {
            [b'b' | b'h' | b'i' | b'l' | b'q' | b'n'] => {
                number(integer([DataType::I8, DataType::I16, DataType::I32, DataType::I64]))
            }
            [b'B' | b'H' | b'I' | b'L' | b'Q' | b'N'] => {
                number(integer([DataType::U8, DataType::U16, DataType::U32, DataType::U64]))
            }
            [b'?'] if item_bytes == 1 => Some(Self { data_type: DataType::U8, kind: Kind::Bool }),
            [b'e'] => number(Some(DataType::F16)),
            [b'f'] => number(Some(DataType::F32)),
            [b'd'] => number(Some(DataType::F64)),
            [b'Z', b'f'] => Some(complex(DataType::F32)).filter(|it| it.bytes() == item_bytes),
            [b'Z', b'd'] => Some(complex(DataType::F64)).filter(|it| it.bytes() == item_bytes),
            _ => None,
        }
    }

    /// Bytes of an element of the array.
    pub(crate) fn bytes(self) -> usize {
        self.data_type.bytes() * self.lanes()
    }

    /// Elements of pleach in an element of the array.
    pub(crate) fn lanes(self) -> usize {
        if self.kind == Kind::Complex { 2 } else { 1 }
    }

    /// Refuses reductions that have no meaning for what the elements are made of.
    pub(crate) fn expect(self, py: Python<'_>, op: ReduceOp) -> PyResult<()> {
        let (fits, remedy) = match (self.kind, op) {
            (Kind::Number, _) => return Ok(()),
            (Kind::Bool, ReduceOp::Min | ReduceOp::Max | ReduceOp::And | ReduceOp::Or | ReduceOp::Xor) => {
                return Ok(());
            }
            (Kind::Complex, ReduceOp::Sum | ReduceOp::Avg) => return Ok(()),
            (Kind::Complex, ReduceOp::PremulSum(_)) => return Ok(()),
            (Kind::Bool, _) => ("bool", "min, max, and, or, xor"),
            (Kind::Complex, _) => (self.name(), "sum, avg, premul_sum"),
        };
        Err(argument(py, format!("{op} has no meaning for {fits}; there are {remedy}")))
    }
}

/// A sum that multiplies the input of this rank by a factor first. Factors may differ from rank to
/// rank.
#[pyclass(frozen, module = "pleach._native", name = "PremulSum")]
pub(crate) struct PremulSum {
    factor: Factor,
    text: String,
}

#[pymethods]
impl PremulSum {
    #[new]
    fn new(factor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = factor.repr()?.to_string();
        let factor = if factor.is_instance_of::<PyInt>() {
            match factor.extract::<i64>() {
                Ok(number) => Factor::from(number),
                Err(_) => Factor::from(factor.extract::<u64>()?),
            }
        } else {
            Factor::from(factor.extract::<f64>()?)
        };
        Ok(Self { factor, text })
    }

    fn __repr__(&self) -> String {
        format!("PremulSum({})", self.text)
    }
}

/// The reduction that a caller names.
pub(crate) fn reduction(op: &Bound<'_, PyAny>) -> PyResult<ReduceOp> {
    let py = op.py();
    if let Ok(name) = op.cast::<PyString>() {
        let name = name.to_cow()?;
        let known = match &*name {
            "product" => "prod",
            "mean" => "avg",
            "band" => "and",
            "bor" => "or",
            "bxor" => "xor",
            other => other,
        };
        return known.parse().map_err(|_| {
            let text = format!(
                "{name:?} is no reduction; there are sum, prod, min, max, avg, and, or, xor and PremulSum(factor)"
            );
            argument(py, text)
        });
    }
    if let Ok(premul) = op.cast::<PremulSum>() {
        return Ok(ReduceOp::premul_sum(premul.get().factor));
    }
    Err(argument(py, "op is a name as \"sum\", or PremulSum(factor)"))
}
