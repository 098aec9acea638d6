//! Errors as Python exceptions. The classes are those of `pleach/_errors.py`, which also chooses
//! the class of a kind.

use std::time::Duration;

use pleach_collectives::engine::{Fault, FaultKind};
use pleach_collectives::{CollectiveError, GroupInfo, JoinGroupError, SplitError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::interrupt::raised;

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The fields of an exception.
#[derive(Default)]
struct Fields {
    rank: Option<u32>,
    found_by: Option<u32>,
    host: Option<u32>,
    operation: Option<String>,
    waited: Option<Duration>,
}

fn make(py: Python<'_>, kind: &str, text: &str, fields: Fields) -> PyErr {
    let made = || {
        let function =
            MAKE.get_or_try_init(py, || py.import("pleach._errors")?.getattr("make").map(Bound::unbind))?;
        let Fields { rank, found_by, host, operation, waited } = fields;
        let waited_s = waited.map(|waited| waited.as_secs_f64());
        function.bind(py).call1((kind, text, rank, found_by, host, operation, waited_s))
    };
    made().map_or_else(|error| error, PyErr::from_value)
}

/// A mistake in the arguments of a call.
pub(crate) fn argument(py: Python<'_>, text: impl AsRef<str>) -> PyErr {
    make(py, "argument", text.as_ref(), Fields::default())
}

/// An error of this kind, about no rank.
pub(crate) fn named(py: Python<'_>, kind: &str, text: &str) -> PyErr {
    make(py, kind, text, Fields::default())
}

/// An error of this kind, about a rank.
pub(crate) fn about_rank(py: Python<'_>, kind: &str, text: &str, rank: u32) -> PyErr {
    make(py, kind, text, Fields { rank: Some(rank), ..Fields::default() })
}

/// Ranks that did not meet.
pub(crate) fn join(py: Python<'_>, error: &JoinGroupError) -> PyErr {
    make(py, "join", &error.to_string(), Fields::default())
}

/// A world that the environment or the arguments do not describe.
pub(crate) fn world(py: Python<'_>, text: &str) -> PyErr {
    make(py, "join", text, Fields::default())
}

/// A round to which no rank gave anything.
pub(crate) fn nothing_given(py: Python<'_>, text: &str) -> PyErr {
    make(py, "nothing-given", text, Fields::default())
}

/// A group that was not split.
pub(crate) fn split(py: Python<'_>, info: &GroupInfo, error: SplitError) -> PyErr {
    match error {
        SplitError::Collective(error) => collective(py, info, &error),
        other => raised().unwrap_or_else(|| make(py, "join", &other.to_string(), Fields::default())),
    }
}

/// A call that failed; where a handler of a signal has aborted it, what the handler has raised.
pub(crate) fn collective(py: Python<'_>, info: &GroupInfo, error: &CollectiveError) -> PyErr {
    if let Some(raised) = raised() {
        return raised;
    }
    let text = error.to_string();
    let kind = match error {
        CollectiveError::Failed(fault) => return failed(py, info, fault, &text),
        CollectiveError::Closed => "closed",
        CollectiveError::Forked { .. } => "forked",
        CollectiveError::Memory { .. } | CollectiveError::Register(_) => "memory",
        CollectiveError::TooMany | CollectiveError::Thread(_) => "limit",
        _ => "argument",
    };
    make(py, kind, &text, Fields::default())
}

fn failed(py: Python<'_>, info: &GroupInfo, fault: &Fault, text: &str) -> PyErr {
    let kind = match fault.kind {
        FaultKind::Aborted => "aborted",
        FaultKind::Mismatch => "mismatch",
        FaultKind::Compute => "compute",
        FaultKind::OutOfReach => "out-of-reach",
        FaultKind::Lost => "lost",
        FaultKind::Left => "left",
        FaultKind::TimedOut => "timed-out",
        FaultKind::Changed => "changed",
        _ => "protocol",
    };
    let operation = fault.during.or(fault.told_during).map(|descriptor| descriptor.to_string());
    let fields = Fields {
        rank: Some(fault.subject),
        found_by: Some(fault.found_by),
        host: Some(info.hosts.host(fault.subject)),
        operation,
        waited: Some(fault.waited),
    };
    make(py, kind, text, fields)
}
