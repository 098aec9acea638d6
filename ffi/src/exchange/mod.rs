//! Tensors by key between programs: endpoints, tensors in lendable memory, and peers of which
//! tensors are received.
//!
//! | handle | what it is | ends by |
//! | --- | --- | --- |
//! | `pleachEndpoint_t` | where this program's tensors are received by others | `pleachEndpointClose` |
//! | `pleachTensor_t` | a tensor of this program, or one that was received | `pleachTensorRelease` |
//! | `pleachPeer_t` | another program, of which tensors are received | `pleachPeerClose` |
//! | `pleachReceive_t` | a receive under way | its end, or `pleachReceiveCancel` |
//!
//! **Invariants.** Callbacks of the caller run on one thread of their endpoint ([`callbacks`]),
//! outside of all locks, so they may call every function. Each callback is called exactly once. A
//! handle of a process is an error in a forked child, whose threads are gone.

pub mod failure;
pub mod memory;
pub mod receive;
pub mod send;
pub mod tensor;

mod callbacks;

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pleach_exchange::{Endpoint, EndpointOptions, Key, OpenEndpointError};
use pleach_transport::Secret;
use pleach_transport::fork::Process;

use self::callbacks::Callbacks;
use crate::handles::Handles;
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};

/// An endpoint, which only functions of this library look into.
pub struct pleachEndpoint(());

/// An endpoint of the tensor exchange: this program's tensors, and where other programs ask for
/// them. NULL is none.
pub type pleachEndpoint_t = *mut pleachEndpoint;

/// Room for the address of an endpoint, in bytes.
pub const PLEACH_ADDRESS_BYTES: usize = 64;

/// How an endpoint is opened. Begin with PLEACH_ENDPOINT_OPTIONS_INITIALIZER, which sets `size`; a
/// library of a later version reads as much as `size` says and takes defaults for the rest. 0 and
/// NULL are what the environment says (PLEACH_FABRIC, PLEACH_REQUIRE, PLEACH_SECRET_FILE,
/// PLEACH_HOST, PLEACH_INTERFACE, PLEACH_METRICS), and the defaults without it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachEndpointOptions_t {
    /// sizeof(pleachEndpointOptions_t).
    pub size: usize,
    /// Where peers connect, as "HOST:PORT"; port 0 is any free one. "127.0.0.1:0" by default, which
    /// programs of this host reach.
    pub listen: *const c_char,
    /// "auto", "shm", "tcp", "verbs" or "none"; auto by default.
    pub fabric: *const c_char,
    /// The file of the secret that peers must know.
    pub secretFile: *const c_char,
    /// How long a send waits for room and a receive for its tensor, in milliseconds, where the call
    /// does not say it; 60000 by default.
    pub timeoutMs: u64,
    /// Most bytes of tensors that wait for a receiver; 1 GiB by default.
    pub bytesHeldMax: u64,
    /// Most bytes that are lent to peers; 1 GiB by default.
    pub bytesLentMax: u64,
    /// Most bytes of lendable memory; 2 GiB by default.
    pub bytesLendableMax: u64,
    /// 1: a peer with which no memory is shared is an error. 0 takes tensors inline then.
    pub requireRegions: c_int,
    /// Must be 0.
    pub reserved: c_int,
}

/// What an endpoint has counted, and what it holds now. Begin with
/// PLEACH_ENDPOINT_COUNTS_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachEndpointCounts_t {
    /// sizeof(pleachEndpointCounts_t).
    pub size: usize,
    /// Tensors that were received in place.
    pub receivedInPlace: u64,
    /// Tensors that were received inline.
    pub receivedInline: u64,
    /// Tensors that were lent to peers.
    pub sentInPlace: u64,
    /// Tensors that were sent inline.
    pub sentInline: u64,
    /// Links that are open.
    pub links: u64,
    /// Leases of peers that are open.
    pub leases: u64,
    /// Bytes of tensors that wait for a receiver.
    pub bytesHeld: u64,
    /// Bytes of the buffers that are lent.
    pub bytesLent: u64,
    /// Bytes that lendable memory has touched.
    pub bytesLendable: u64,
}

/// An endpoint as functions hold it.
pub(crate) struct OpenEndpoint {
    pub(crate) endpoint: Endpoint,
    process: Process,
    /// How long calls wait that do not say it.
    timeout: Duration,
    pub(crate) callbacks: Callbacks,
}

static ENDPOINTS: Handles<Arc<OpenEndpoint>> = Handles::new("endpoint", "endpoint");

impl OpenEndpoint {
    /// Refuses calls in a child of the process that opened the endpoint.
    pub(crate) fn expect_process(&self) -> Result<(), Failed> {
        match self.process.is_current() {
            true => Ok(()),
            false => Err(Failed::usage(format!(
                "this endpoint belongs to process {}; a forked child opens an endpoint of its own",
                self.process.id()
            ))),
        }
    }

    /// The limit of a call.
    pub(crate) fn limit(&self, timeout_ms: u64) -> Duration {
        if timeout_ms == 0 { self.timeout } else { Duration::from_millis(timeout_ms) }
    }
}

/// The endpoint of a handle.
pub(crate) fn find(endpoint: pleachEndpoint_t) -> Result<Arc<OpenEndpoint>, Failed> {
    let found = ENDPOINTS.find(endpoint)?;
    found.expect_process()?;
    Ok(Arc::clone(&found))
}

/// A text of the caller.
///
/// # Safety
///
/// `text` is null, or ends with a zero byte and stays until the function returns.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failed> {
    if text.is_null() {
        return Err(Failed::argument(format!("{name} is NULL")));
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map_err(|_| Failed::argument(format!("{name} is no text in UTF-8")))
}

/// The key of a call.
///
/// # Safety
///
/// As [`text`].
pub(crate) unsafe fn key(step: u64, name: *const c_char) -> Result<Key, Failed> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name, "name") }?;
    Key::new(step, name).map_err(|error| Failed::argument(error.to_string()))
}

/// The options that a caller gives.
///
/// # Safety
///
/// `options` is null, or points to options whose `size` is true and whose texts end.
unsafe fn configured(
    options: *const pleachEndpointOptions_t,
) -> Result<(EndpointOptions, Option<Duration>), Failed> {
    let mut made = EndpointOptions::from_env().map_err(|error| open_failure(&error))?;
    if options.is_null() {
        return Ok((made, None));
    }
    // SAFETY: the caller's promise.
    unsafe { struct_size(options, "options", "PLEACH_ENDPOINT_OPTIONS_INITIALIZER") }?;
    // SAFETY: they are as long as their size says.
    let given = unsafe { *options };
    // SAFETY: the caller's promise.
    let string = |place: *const c_char, name: &str| match place.is_null() {
        true => Ok(None),
        // SAFETY: the caller's promise.
        false => unsafe { text(place, name) }.map(|text| Some(text.to_owned())),
    };
    if let Some(listen) = string(given.listen, "options->listen")? {
        made.listen = listen;
    }
    if let Some(fabric) = string(given.fabric, "options->fabric")? {
        let wrong = |form: String| Failed::argument(format!("options->fabric is '{fabric}': {form}"));
        made.fabric = fabric.parse().map_err(wrong)?;
    }
    if let Some(file) = string(given.secretFile, "options->secretFile")? {
        let secret = Secret::from_file(Path::new(&file));
        made.secret = Some(secret.map_err(|error| Failed::argument(error.to_string()))?);
    }
    let set = |place: &mut u64, given: u64| *place = if given == 0 { *place } else { given };
    set(&mut made.limits.server.table.bytes_held, given.bytesHeldMax);
    set(&mut made.limits.server.leases.bytes_lent, given.bytesLentMax);
    set(&mut made.limits.arenas.bytes, given.bytesLendableMax);
    match (given.requireRegions, given.reserved) {
        (0, 0) => {}
        (1, 0) => made.requires_regions = true,
        (other, 0) => {
            return Err(Failed::argument(format!("options->requireRegions is {other}; take 0 or 1")));
        }
        (_, other) => return Err(Failed::argument(format!("options->reserved is {other}, not 0"))),
    }
    Ok((made, (given.timeoutMs > 0).then(|| Duration::from_millis(given.timeoutMs))))
}

fn open_failure(error: &OpenEndpointError) -> Failed {
    let result = match error {
        OpenEndpointError::System { .. }
        | OpenEndpointError::Listen { .. }
        | OpenEndpointError::Metrics { .. } => pleachResult_t::pleachSystemError,
        OpenEndpointError::NoRegions { .. } => pleachResult_t::pleachInvalidUsage,
        _ => pleachResult_t::pleachInvalidArgument,
    };
    Failed { result, text: error.to_string() }
}

/// Opens an endpoint: other programs may connect to it from now on. Off loopback peers need a
/// secret (`secretFile`, PLEACH_SECRET_FILE); without one an endpoint gives its tensors to whoever
/// reaches its port.
///
/// Ownership: `endpoint` is NULL or points to a pleachEndpoint_t. The caller closes the endpoint
/// with pleachEndpointClose. `options` is NULL, for what the environment says, or points to options
/// that began with PLEACH_ENDPOINT_OPTIONS_INITIALIZER, whose texts end with a zero byte; they are
/// read before the function returns. Threads: any. Blocks: no, apart from the lookup of a host's
/// name.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, a variable of the
/// environment has a wrong value, or the secret cannot be read; pleachInvalidUsage if 65536
/// endpoints exist already, or regions are required of a fabric that has none; pleachSystemError if
/// the port is taken or the system refuses a socket or a thread; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointOpen(
    endpoint: *mut pleachEndpoint_t,
    options: *const pleachEndpointOptions_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(endpoint, "endpoint") }?;
        *stored = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        let (options, timeout) = unsafe { configured(options) }?;
        let timeout = timeout.unwrap_or(options.send_wait);
        let endpoint = Endpoint::open(&options).map_err(|error| open_failure(&error))?;
        let (process, callbacks) = (Process::current(), Callbacks::default());
        *stored = ENDPOINTS.keep(Arc::new(OpenEndpoint { endpoint, process, timeout, callbacks }))?;
        Ok(())
    })
}

/// Closes an endpoint: its port is free, its links end, and calls that wait on it or on its peers
/// fail.
/// Callbacks of receives have been called when it returns, unless a callback calls it. Tensors that
/// were received stay readable until they are released, and calls on peers of the endpoint fail.
/// Memory that was sent is given back at the latest when the last peer, receive and received tensor
/// of the endpoint is released. Memory is lent no longer: let receivers end before, or they see in
/// place what this program writes next.
///
/// Ownership: the handle is the library's again and names nothing from now on. Threads: any, also
/// while other threads are in calls on the endpoint and its peers. Blocks: until callbacks that run
/// have returned.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint; pleachInvalidUsage
/// if this process was forked from the one that opened the endpoint; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachEndpointClose(endpoint: pleachEndpoint_t) -> pleachResult_t {
    guarded(|| {
        find(endpoint)?;
        let taken = ENDPOINTS.take(endpoint)?;
        taken.endpoint.close();
        taken.callbacks.close();
        Ok(())
    })
}

/// Stores the address at which other programs reach an endpoint, as "127.0.0.1:40001".
///
/// Ownership: `address` is NULL or has `bytes` bytes, of which PLEACH_ADDRESS_BYTES are enough; a
/// zero byte ends the text. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint, `address` is NULL or
/// the text does not fit; pleachInvalidUsage if this process was forked from the one that opened
/// the endpoint; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointAddress(
    endpoint: pleachEndpoint_t,
    address: *mut c_char,
    bytes: usize,
) -> pleachResult_t {
    guarded(|| {
        let found = find(endpoint)?.endpoint.address().to_string();
        if address.is_null() {
            return Err(Failed::argument("address is NULL"));
        }
        if found.len() >= bytes {
            let needed = found.len() + 1;
            return Err(Failed::argument(format!("address has {bytes} bytes; {needed} are needed")));
        }
        // SAFETY: the caller's promise, and the text is shorter.
        let room = unsafe { std::slice::from_raw_parts_mut(address, found.len() + 1) };
        failure::store(room, &found);
        Ok(())
    })
}

/// Stores the incarnation of an endpoint: a number that it has drawn when it was opened, so that an
/// endpoint that comes later at the same address is known as another one. 0 is none.
///
/// Ownership: `incarnation` is NULL or points to a number. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint or `incarnation` is
/// NULL; pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointIncarnation(
    endpoint: pleachEndpoint_t,
    incarnation: *mut u64,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(incarnation, "incarnation") }?;
        *stored = find(endpoint)?.endpoint.incarnation();
        Ok(())
    })
}

/// Stores what an endpoint has counted, and what it holds now.
///
/// Ownership: `counts` is NULL or points to a struct that began with
/// PLEACH_ENDPOINT_COUNTS_INITIALIZER. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint, or `counts` is NULL
/// or its size is not that of the struct; pleachInvalidUsage if this process was forked from the
/// one that opened the endpoint; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointGetCounts(
    endpoint: pleachEndpoint_t,
    counts: *mut pleachEndpointCounts_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(counts, "counts", "PLEACH_ENDPOINT_COUNTS_INITIALIZER") }?;
        let found = find(endpoint)?.endpoint.counts();
        let found = pleachEndpointCounts_t {
            size,
            receivedInPlace: found.in_place.tensors,
            receivedInline: found.inline.tensors,
            sentInPlace: found.sent_in_place.tensors,
            sentInline: found.sent_inline.tensors,
            links: found.links,
            leases: found.leases,
            bytesHeld: found.bytes_held,
            bytesLent: found.bytes_lent,
            bytesLendable: found.arena_bytes,
        };
        // SAFETY: it is as long as its size says.
        unsafe { *counts = found };
        Ok(())
    })
}
