//! Tensors by key between programs: endpoints, tensors in lendable memory, and peers from which
//! tensors are received.
//!
//! | handle | what it is | ends by |
//! | --- | --- | --- |
//! | `pleachEndpoint_t` | the end of this program, from which others receive its tensors | `pleachEndpointClose` |
//! | `pleachTensor_t` | a tensor of this program, or a received tensor | `pleachTensorRelease` |
//! | `pleachPeer_t` | another program, from which tensors are received | `pleachPeerClose` |
//! | `pleachReceive_t` | a receive under way | its end, or `pleachReceiveCancel` |
//!
//! **Invariants.** Callbacks of the caller run on one thread of their endpoint ([`callbacks`]),
//! outside of all locks, so they may call every function. Each callback is called exactly once. A
//! forked child has no threads, so a handle of the parent is an error in the child.

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

/// An endpoint. Its contents are opaque to the caller.
pub struct pleachEndpoint(());

/// An endpoint of the tensor exchange. It holds this program's tensors, and other programs request
/// them there. NULL is no endpoint.
pub type pleachEndpoint_t = *mut pleachEndpoint;

/// Room for the address of an endpoint, in bytes.
pub const PLEACH_ADDRESS_BYTES: usize = 64;

/// The options of an endpoint. Begin with PLEACH_ENDPOINT_OPTIONS_INITIALIZER, which sets `size`. A
/// library of a later version reads only `size` bytes and takes defaults for the rest. 0 and NULL
/// stand for the values of the environment (PLEACH_FABRIC, PLEACH_REQUIRE, PLEACH_SECRET_FILE,
/// PLEACH_HOST, PLEACH_INTERFACE, PLEACH_METRICS), and for the defaults where the environment has
/// no value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachEndpointOptions_t {
    /// sizeof(pleachEndpointOptions_t).
    pub size: usize,
    /// The address where peers connect, as "HOST:PORT". Port 0 stands for any free port.
    /// "127.0.0.1:0" by default, which only programs of this host can reach.
    pub listen: *const c_char,
    /// "auto", "shm", "tcp", "verbs" or "none"; auto by default.
    pub fabric: *const c_char,
    /// The file of the secret that peers must know.
    pub secretFile: *const c_char,
    /// The time of the endpoint in milliseconds: how long a send waits for room and a receive waits
    /// for its tensor if the call gives no time; 60000 by default.
    pub timeoutMs: u64,
    /// Most bytes of tensors that wait for a receiver; 1 GiB by default.
    pub bytesHeldMax: u64,
    /// Most bytes that are lent to peers; 1 GiB by default.
    pub bytesLentMax: u64,
    /// Most bytes of lendable memory; 2 GiB by default.
    pub bytesLendableMax: u64,
    /// 1: it is an error if no memory is shared with a peer. 0: tensors come inline in this case.
    pub requireRegions: c_int,
    /// Must be 0.
    pub reserved: c_int,
}

/// The counters of an endpoint, and the amounts that it holds now. Begin with
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
    /// Bytes of lendable memory that were used so far.
    pub bytesLendable: u64,
}

/// The endpoint behind a handle.
pub(crate) struct OpenEndpoint {
    pub(crate) endpoint: Endpoint,
    process: Process,
    /// The time of the endpoint: how long a call waits if it gives no time.
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

/// Reads a text of the caller.
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

/// Reads the options of a caller, and the time of the endpoint.
///
/// # Safety
///
/// `options` is null, or points to options whose `size` is right and whose texts end with a zero
/// byte.
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

/// Opens an endpoint. Other programs may connect to it from now on. An endpoint that listens on an
/// address other than loopback should have a secret (`secretFile`, PLEACH_SECRET_FILE). Without a
/// secret an endpoint gives its tensors to every program that reaches its port.
///
/// Ownership: `endpoint` is NULL or points to a pleachEndpoint_t. The caller closes the endpoint
/// with pleachEndpointClose. `options` is NULL, which stands for the values of the environment, or
/// points to options that began with PLEACH_ENDPOINT_OPTIONS_INITIALIZER, whose texts end with a
/// zero byte; they are read before the function returns. Threads: any. Blocks: no, apart from the
/// lookup of a host's name.
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

/// Closes an endpoint. Its port becomes free, its links end, and calls on the endpoint or on its
/// peers fail, also calls that wait already. When the function returns, the callbacks of all
/// receives have been called, unless a callback calls the function. Received tensors stay readable
/// until they are released. Memory that was sent is given back at the latest when the last peer,
/// receive and received tensor of the endpoint is released. Memory is no longer lent. So receivers
/// should end before: otherwise they may see in place the bytes that this program writes next.
///
/// Ownership: the handle goes back to the library and is invalid from now on. Threads: any, also
/// while other threads are in calls on the endpoint and its peers. Blocks: until all running
/// callbacks have returned.
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

/// Stores the address at which other programs reach an endpoint, for example "127.0.0.1:40001".
///
/// Ownership: `address` is NULL or has `bytes` bytes; PLEACH_ADDRESS_BYTES bytes are enough. A zero
/// byte ends the text. Threads: any. Blocks: no.
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
        // SAFETY: the caller's promise. The text is shorter than the memory.
        let room = unsafe { std::slice::from_raw_parts_mut(address, found.len() + 1) };
        failure::store(room, &found);
        Ok(())
    })
}

/// Stores the incarnation of an endpoint: a random number that is drawn when the endpoint is
/// opened. It distinguishes the endpoint from a later endpoint at the same address. 0 is no
/// incarnation.
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

/// Stores the counters of an endpoint, and the amounts that it holds now.
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
