//! Handlers of signals that raise while a thread is in a call, as that of Ctrl-C does. The call is
//! aborted and fails; its exception is then the handler's ([`super::error`]).

use std::cell::RefCell;

use pyo3::prelude::*;

thread_local! {
    /// What a handler of a signal has raised while this thread was in a call.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Whether a handler of a signal has raised an exception.
pub(crate) fn interrupted() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_raised = raised.is_some();
    if is_raised {
        RAISED.set(raised);
    }
    is_raised
}

/// Takes what a handler of a signal has raised while this thread was in a call.
pub(crate) fn raised() -> Option<PyErr> {
    RAISED.take()
}
