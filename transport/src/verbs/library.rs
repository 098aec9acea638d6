//! libibverbs, loaded at run time.
//!
//! The library is loaded with the first device and stays open. **Invariant:** a [`Library`] holds
//! every function that is not optional; if one is missing, loading fails with its name. Functions
//! that are inline in the headers (posting and polling) go through the tables of the context, in
//! [`super::objects`].

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::sys;

const NAME: &CStr = c"libibverbs.so.1";

/// Why the library was not loaded.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic linker does not find it.
    #[error(
        "libibverbs is not here ({reason}); install it (Debian: apt-get install libibverbs1 ibverbs-providers) or take another fabric"
    )]
    Absent {
        /// The dynamic linker's message.
        reason: String,
    },
    /// It is too old.
    #[error("libibverbs has no function {symbol}; install rdma-core 28 or newer")]
    Symbol {
        /// The missing function.
        symbol: &'static str,
    },
}

/// The missing part of a library.
#[derive(Clone)]
pub(super) enum Missing {
    /// The library, with the dynamic linker's message.
    File(String),
    Symbol(&'static str),
}

/// Declares the functions of a library that is loaded at run time.
macro_rules! functions {
    (
        $(#[$comment:meta])*
        $library:ident of $file:expr, $prefix:literal, $version:expr;
        needed { $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* }
        optional { $($optional:ident: fn($($optional_argument:ty),*) $(-> $optional_result:ty)?;)* }
    ) => {
        $(#[$comment])*
        pub(super) struct $library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(super) $optional: Option<unsafe extern "C" fn($($optional_argument),*) $(-> $optional_result)?>,)*
        }

        impl $library {
            fn load() -> Result<Self, $crate::verbs::library::Missing> {
                use std::ffi::c_void;
                use $crate::verbs::library::{Missing, look_up, open};

                let handle = open($file).map_err(Missing::File)?;
                Ok(Self {
                    $($name: {
                        let symbol = concat!($prefix, stringify!($name));
                        let address = look_up(handle, concat!($prefix, stringify!($name), "\0"), $version);
                        if address.is_null() {
                            return Err(Missing::Symbol(symbol));
                        }
                        // SAFETY: the library's function of this name has this type (its header),
                        // and it stays open.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    },)*
                    $($optional: {
                        let address = look_up(handle, concat!($prefix, stringify!($optional), "\0"), $version);
                        // SAFETY: as above; a null address becomes `None`.
                        unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($optional_argument),*) $(-> $optional_result)?>>(address) }
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;

functions! {
    /// The functions of libibverbs, by their names without the prefix.
    Library of NAME, "ibv_", c"IBVERBS_1.1";
    needed {
    get_device_list: fn(*mut c_int) -> *mut *mut sys::ibv_device;
    free_device_list: fn(*mut *mut sys::ibv_device);
    get_device_name: fn(*mut sys::ibv_device) -> *const c_char;
    open_device: fn(*mut sys::ibv_device) -> *mut sys::ibv_context;
    close_device: fn(*mut sys::ibv_context) -> c_int;
    query_device: fn(*mut sys::ibv_context, *mut sys::ibv_device_attr) -> c_int;
    query_port: fn(*mut sys::ibv_context, u8, *mut sys::ibv_port_attr) -> c_int;
    alloc_pd: fn(*mut sys::ibv_context) -> *mut sys::ibv_pd;
    dealloc_pd: fn(*mut sys::ibv_pd) -> c_int;
    reg_mr_iova: fn(*mut sys::ibv_pd, *mut c_void, usize, u64, c_int) -> *mut sys::ibv_mr;
    dereg_mr: fn(*mut sys::ibv_mr) -> c_int;
    create_comp_channel: fn(*mut sys::ibv_context) -> *mut sys::ibv_comp_channel;
    destroy_comp_channel: fn(*mut sys::ibv_comp_channel) -> c_int;
    create_cq: fn(*mut sys::ibv_context, c_int, *mut c_void, *mut sys::ibv_comp_channel, c_int) -> *mut sys::ibv_cq;
    destroy_cq: fn(*mut sys::ibv_cq) -> c_int;
    get_cq_event: fn(*mut sys::ibv_comp_channel, *mut *mut sys::ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events: fn(*mut sys::ibv_cq, c_uint);
    create_srq: fn(*mut sys::ibv_pd, *mut sys::ibv_srq_init_attr) -> *mut sys::ibv_srq;
    destroy_srq: fn(*mut sys::ibv_srq) -> c_int;
    create_qp: fn(*mut sys::ibv_pd, *mut sys::ibv_qp_init_attr) -> *mut sys::ibv_qp;
    modify_qp: fn(*mut sys::ibv_qp, *mut sys::ibv_qp_attr, c_int) -> c_int;
    destroy_qp: fn(*mut sys::ibv_qp) -> c_int;
    }
    optional {
    reg_mr_iova2: fn(*mut sys::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut sys::ibv_mr;
    reg_dmabuf_mr: fn(*mut sys::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut sys::ibv_mr;
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

/// Loads a library for the life of the process; returns the dynamic linker's message on failure.
pub(super) fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a text that ends with zero; the library's own initialisers are trusted.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: after a failure it returns a text, which stays until the next call of this thread.
    Err(unsafe {
        let text = libc::dlerror();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    })
}

/// A symbol of this version, else of any version; null if there is none.
pub(super) fn look_up(handle: *mut c_void, symbol: &str, version: &CStr) -> *mut c_void {
    debug_assert!(symbol.ends_with('\0'));
    // Of versioned symbols `dlsym` may find the oldest, which the library keeps for programs of
    // long ago. SAFETY: an open library, and texts that end with zero.
    unsafe {
        let newest = libc::dlvsym(handle, symbol.as_ptr().cast(), version.as_ptr());
        if newest.is_null() { libc::dlsym(handle, symbol.as_ptr().cast()) } else { newest }
    }
}
