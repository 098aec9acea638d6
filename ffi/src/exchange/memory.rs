//! Lendable memory for allocators of other libraries, and tensors in it that are sent without a
//! copy.
//!
//! **Invariant:** memory of pleachLendableAlloc is used again only when it was freed and no peer
//! reads a tensor in it. The owner may write the memory again when the release callback of each
//! send was called.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, Weak};

use pleach_exchange::{SharedTensor, TensorShape};
use pleach_transport::mutex::lock;
use pleach_vocabulary::DataType;

use super::callbacks::Release;
use super::send::send;
use super::tensor::{memory_failure, shape};
use super::{OpenEndpoint, find, key, pleachEndpoint_t};
use crate::memory::pleachRelease_t;
use crate::result::{Failed, guarded, out, pleachResult_t};
use crate::types::{self, pleachDataType_t};

/// Memory of pleachLendableAlloc, by address.
static LENDABLE: Mutex<BTreeMap<usize, Lendable>> = Mutex::new(BTreeMap::new());

struct Lendable {
    memory: SharedTensor,
    endpoint: Weak<OpenEndpoint>,
}

/// The tensor of this shape at this address; `None` unless the address is in lendable memory of
/// this endpoint.
fn lendable(endpoint: &Arc<OpenEndpoint>, address: usize, shape: &TensorShape) -> Option<SharedTensor> {
    let known = lock(&LENDABLE);
    let (base, found) = known.range(..=address).next_back()?;
    let is_own = std::ptr::eq(found.endpoint.as_ptr(), Arc::as_ptr(endpoint));
    is_own.then(|| found.memory.part(address - base, shape)).flatten()
}

/// Allocates lendable memory, for an allocator of tensors. pleachEndpointSendMemory sends tensors
/// in this memory without a copy. The memory is aligned to 64 bytes. It holds zeros, or bytes of
/// earlier tensors of this program.
///
/// Ownership: `ptr` is NULL or points to a pointer, which is NULL after a failure. The caller frees
/// the memory with pleachLendableFree. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or 0, or there is no such
/// endpoint; pleachInvalidUsage if lendable memory is used up, or this process was forked from the
/// one that opened the endpoint; pleachSystemError if the system has no memory; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachLendableAlloc(
    endpoint: pleachEndpoint_t,
    bytes: usize,
    ptr: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(ptr, "ptr") }?;
        *stored = std::ptr::null_mut();
        if bytes == 0 {
            return Err(Failed::argument("bytes is 0"));
        }
        let endpoint = find(endpoint)?;
        let made = TensorShape::new(DataType::U8, &[bytes]);
        let made = made.and_then(|shape| endpoint.endpoint.untyped_tensor(&shape));
        let mut made = made.map_err(|error| memory_failure(&error))?;
        let address = made.as_bytes_mut().as_mut_ptr();
        let found = Lendable { memory: made.share(), endpoint: Arc::downgrade(&endpoint) };
        lock(&LENDABLE).insert(address.expose_provenance(), found);
        *stored = address.cast();
        Ok(())
    })
}

/// Frees memory of pleachLendableAlloc. The memory is used again when no peer reads a tensor in it.
///
/// Ownership: the memory goes back to the library. Threads: any; callbacks of this library may call
/// the function. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `ptr` is not an address that
/// pleachLendableAlloc has stored, or was freed already (for NULL the function succeeds);
/// pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachLendableFree(ptr: *mut c_void) -> pleachResult_t {
    guarded(|| {
        if ptr.is_null() {
            return Ok(());
        }
        let mut known = lock(&LENDABLE);
        let found = known.get(&ptr.addr());
        let found =
            found.ok_or_else(|| Failed::argument("ptr is no memory of pleachLendableAlloc, or was freed"))?;
        if let Some(endpoint) = found.endpoint.upgrade() {
            endpoint.expect_process()?;
        }
        let taken = known.remove(&ptr.addr());
        drop(known);
        drop(taken);
        Ok(())
    })
}

/// Sends a tensor in memory of the caller, as pleachEndpointSend does. The tensor is lent in place
/// if it lies in memory of pleachLendableAlloc of this endpoint, at a multiple of 64 bytes from the
/// beginning of this memory. Otherwise, and without `release`, it is copied once before the
/// function returns.
///
/// `release` is called once, with `data` and `context`, when neither this program nor a peer needs
/// the memory any more. Until then nobody may write the memory. The thread of the endpoint that
/// calls callbacks of receives calls `release`; after pleachEndpointClose any thread may call it.
/// `release` may call every function of this library. It is not called if this function fails.
///
/// Ownership: the memory stays the caller's. It must stay readable until `release` is called, or
/// until the function returns if `release` is NULL. The `ndim` lengths of `dims` give its number of
/// elements, the slowest dimension first. `dims` is read before the function returns. `name` is
/// NULL or a text of 1 to 1024 bytes that ends with a zero byte. Threads: any. Blocks: only while
/// more bytes wait for receivers than the endpoint may hold, at most `timeoutMs` milliseconds; 0
/// stands for the time of the endpoint.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if a limit is reached, the endpoint was closed, or this process was forked from the one that
/// opened it; pleachRemoteError if the step was aborted or cleaned up; pleachTimeout if there was
/// no room in time; pleachSystemError if the system has no memory or refuses a thread;
/// pleachInternalError after a mistake of the library. pleachGetLastExchangeFailure tells them
/// apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointSendMemory(
    endpoint: pleachEndpoint_t,
    step: u64,
    name: *const c_char,
    data: *mut c_void,
    datatype: pleachDataType_t,
    ndim: usize,
    dims: *const usize,
    release: pleachRelease_t,
    context: *mut c_void,
    timeoutMs: u64,
) -> pleachResult_t {
    guarded(|| {
        let endpoint = find(endpoint)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key(step, name) }?;
        // SAFETY: the caller's promise.
        let shape = unsafe { shape(types::data_type(datatype)?, ndim, dims) }?;
        if data.is_null() && shape.bytes() > 0 {
            return Err(Failed::argument("data is NULL"));
        }
        let called = |function| Release { function, address: data, context };
        let guard = release.map(|function| endpoint.callbacks.guard(|| called(function))).transpose()?;
        let sent = match guard.as_ref().and_then(|_| lendable(&endpoint, data.addr(), &shape)) {
            Some(part) => {
                let guard = guard.clone().expect("only memory with a release is lent");
                send(&endpoint, &key, part.with_guard(guard), timeoutMs)
            }
            // SAFETY: the caller's promise.
            None => unsafe { copied(&endpoint, data, &shape) }
                .and_then(|copy| send(&endpoint, &key, copy, timeoutMs)),
        };
        if let (Err(_), Some(guard)) = (&sent, &guard) {
            guard.disarm();
        }
        sent
    })
}

/// Copies a tensor into lendable memory.
///
/// # Safety
///
/// `data` has the bytes of the shape, or is null if the shape has no bytes.
unsafe fn copied(
    endpoint: &OpenEndpoint,
    data: *const c_void,
    shape: &TensorShape,
) -> Result<SharedTensor, Failed> {
    let mut copy = endpoint.endpoint.untyped_tensor(shape).map_err(|error| memory_failure(&error))?;
    if shape.bytes() > 0 {
        // SAFETY: the caller's promise; the copy is new.
        copy.as_bytes_mut()
            .copy_from_slice(unsafe { std::slice::from_raw_parts(data.cast(), shape.bytes()) });
    }
    Ok(copy.share())
}
