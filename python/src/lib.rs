//! The native module of the Python package: groups, operations under way, registered memory,
//! training schemes, and tensors by key.
//!
//! Every call becomes an untyped [`pleach_collectives::Operation`]. **Invariants:** memory that an
//! operation works on is held by [`memory::Memory`] until the operation has ended, also where
//! Python drops its last reference before ([`pending`]). The GIL is released while a call waits. No
//! peer can make this module panic.
//!
//! The module exports the C ABI too (`pleach-ffi`), on which the plug-in of TensorFlow stands.

mod calls;
mod dlpack;
mod error;
mod exchange;
mod group;
mod interrupt;
mod join;
mod memory;
mod partial;
mod pending;
mod registered;
mod session;
mod store;
mod svm;
mod trainer;
mod types;
mod view;
mod window;

use pyo3::{pyfunction, pymodule};

/// The header of the C ABI that this module exports.
#[pyfunction]
fn c_header() -> &'static str {
    pleach_ffi::HEADER
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::c_header;
    #[pymodule_export]
    use crate::exchange::{Endpoint, LendableMemory, Peer, PendingTensor, ReceivedMemory, close_all};
    #[pymodule_export]
    use crate::group::{Group, leave_all};
    #[pymodule_export]
    use crate::join::{join, join_in_store};
    #[pymodule_export]
    use crate::partial::{Partial, Round};
    #[pymodule_export]
    use crate::pending::Pending;
    #[pymodule_export]
    use crate::registered::Registered;
    #[pymodule_export]
    use crate::session::{Session, SessionState, StateMemory};
    #[pymodule_export]
    use crate::svm::{SvmModel, svm_model, svm_train};
    #[pymodule_export]
    use crate::trainer::{TrainedVector, Trainer, scheme_facts, schemes};
    #[pymodule_export]
    use crate::types::PremulSum;
    #[pymodule_export]
    use crate::window::{Arrival, Window};
}
