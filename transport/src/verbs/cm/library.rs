//! librdmacm, loaded at run time as libibverbs is: with the first device that connects with it; it
//! stays open.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use super::sys;
use crate::verbs::library::{Missing, functions};
use crate::verbs::sys::ibv_qp_attr;

const NAME: &CStr = c"librdmacm.so.1";

/// Why the library was not loaded.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic linker does not find it.
    #[error(
        "librdmacm is not here ({reason}); install it (Debian: apt-get install librdmacm1), or unset PLEACH_VERBS_CONNECT, which asks for it"
    )]
    Absent {
        /// The dynamic linker's message.
        reason: String,
    },
    /// It is too old.
    #[error("librdmacm has no function {symbol}; install rdma-core 28 or newer")]
    Symbol {
        /// The missing function.
        symbol: &'static str,
    },
}

functions! {
    /// The functions of librdmacm, by their names without the prefix.
    Library of NAME, "rdma_", c"RDMACM_1.0";
    needed {
    create_event_channel: fn() -> *mut sys::rdma_event_channel;
    destroy_event_channel: fn(*mut sys::rdma_event_channel);
    get_cm_event: fn(*mut sys::rdma_event_channel, *mut *mut sys::rdma_cm_event) -> c_int;
    ack_cm_event: fn(*mut sys::rdma_cm_event) -> c_int;
    create_id: fn(*mut sys::rdma_event_channel, *mut *mut sys::rdma_cm_id, *mut c_void, sys::rdma_port_space) -> c_int;
    destroy_id: fn(*mut sys::rdma_cm_id) -> c_int;
    bind_addr: fn(*mut sys::rdma_cm_id, *mut libc::sockaddr) -> c_int;
    listen: fn(*mut sys::rdma_cm_id, c_int) -> c_int;
    get_src_port: fn(*mut sys::rdma_cm_id) -> u16;
    resolve_addr: fn(*mut sys::rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    resolve_route: fn(*mut sys::rdma_cm_id, c_int) -> c_int;
    connect: fn(*mut sys::rdma_cm_id, *mut sys::rdma_conn_param) -> c_int;
    accept: fn(*mut sys::rdma_cm_id, *mut sys::rdma_conn_param) -> c_int;
    reject: fn(*mut sys::rdma_cm_id, *const c_void, u8) -> c_int;
    establish: fn(*mut sys::rdma_cm_id) -> c_int;
    init_qp_attr: fn(*mut sys::rdma_cm_id, *mut ibv_qp_attr, *mut c_int) -> c_int;
    }
    optional {
    }
}

/// The library, loaded at the first call.
pub(super) fn library() -> Result<&'static Library, LoadError> {
    static LIBRARY: OnceLock<Result<Library, Missing>> = OnceLock::new();
    LIBRARY.get_or_init(Library::load).as_ref().map_err(|missing| match missing.clone() {
        Missing::File(reason) => LoadError::Absent { reason },
        Missing::Symbol(symbol) => LoadError::Symbol { symbol },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_says_what_to_install() {
        match library() {
            Err(error @ LoadError::Absent { .. }) => {
                let text = error.to_string();
                assert!(text.contains("librdmacm") && text.contains("apt-get install"), "{text}");
            }
            Err(LoadError::Symbol { symbol }) => assert!(symbol.starts_with("rdma_")),
            Ok(_) => {}
        }
    }
}
