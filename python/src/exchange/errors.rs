//! Errors of the tensor exchange as Python exceptions, of the classes in `pleach/_errors.py`.

use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{
    Key, LinkError, OpenEndpointError, ReceiveTensorError, SendTensorError, TensorMemoryError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{argument, named};

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// What an exception is about.
#[derive(Default)]
struct Subject<'a> {
    key: Option<&'a Key>,
    peer: Option<&'a str>,
    waited: Option<Duration>,
}

fn make(py: Python<'_>, kind: &str, text: &str, subject: &Subject<'_>) -> PyErr {
    let made = || {
        let function = MAKE.get_or_try_init(py, || {
            py.import("pleach._errors")?.getattr("make_exchange").map(Bound::unbind)
        })?;
        let (step, name) = (subject.key.map(Key::step), subject.key.map(Key::name));
        let waited_s = subject.waited.map(|waited| waited.as_secs_f64());
        function.bind(py).call1((kind, text, step, name, subject.peer, waited_s))
    };
    made().map_or_else(|error| error, PyErr::from_value)
}

/// A call in a child of the process that made the object.
pub(crate) fn forked(py: Python<'_>, process: u32) -> PyErr {
    named(
        py,
        "forked",
        &format!("this object belongs to process {process}; a forked child opens an endpoint of its own"),
    )
}

/// A call on an endpoint that was closed.
pub(crate) fn closed(py: Python<'_>) -> PyErr {
    named(py, "closed", "the endpoint is closed; open another one")
}

/// An endpoint that was not opened.
pub(crate) fn open(py: Python<'_>, error: &OpenEndpointError) -> PyErr {
    match error {
        OpenEndpointError::System { .. }
        | OpenEndpointError::Listen { .. }
        | OpenEndpointError::Metrics { .. } => make(py, "system", &error.to_string(), &Subject::default()),
        _ => argument(py, error.to_string()),
    }
}

/// A tensor for which there is no memory.
pub(crate) fn memory(py: Python<'_>, error: &TensorMemoryError) -> PyErr {
    let kind = match error {
        TensorMemoryError::TooManyDimensions { .. } | TensorMemoryError::TooManyElements { .. } => {
            return argument(py, error.to_string());
        }
        TensorMemoryError::Limit(_) => "exhausted",
        _ => "system",
    };
    make(py, kind, &error.to_string(), &Subject::default())
}

fn kind_of(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Timeout => "timed-out",
        FailureKind::Aborted => "aborted",
        FailureKind::Exhausted => "exhausted",
        FailureKind::NotFound => "not-found",
        FailureKind::Unavailable => "unavailable",
    }
}

/// A tensor that was not sent.
pub(crate) fn send(py: Python<'_>, key: &Key, waited: Duration, error: &SendTensorError) -> PyErr {
    let subject = Subject { key: Some(key), peer: None, waited: Some(waited) };
    make(py, kind_of(error.kind()), &error.to_string(), &subject)
}

/// A tensor that was not received.
pub(crate) fn receive(
    py: Python<'_>,
    key: &Key,
    peer: Option<&str>,
    waited: Duration,
    error: &ReceiveTensorError,
) -> PyErr {
    let subject = Subject { key: Some(key), peer, waited: Some(waited) };
    make(py, kind_of(error.kind()), &error.to_string(), &subject)
}

/// A receive that was cancelled.
pub(crate) fn cancelled(py: Python<'_>, key: &Key, peer: &str) -> PyErr {
    let text = format!("the receive of tensor {key} from {peer} was cancelled, or its tensor was taken");
    make(py, "cancelled", &text, &Subject { key: Some(key), peer: Some(peer), waited: None })
}

/// A link that was not made.
pub(crate) fn link(py: Python<'_>, peer: &str, waited: Duration, error: &LinkError) -> PyErr {
    let kind = match error {
        LinkError::Timeout { .. } => "timed-out",
        LinkError::Restarted { .. } => "aborted",
        LinkError::NoRegions { .. } => "no-regions",
        _ => "unavailable",
    };
    make(py, kind, &error.to_string(), &Subject { key: None, peer: Some(peer), waited: Some(waited) })
}
