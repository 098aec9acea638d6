//! Sends, and functions on a whole step.

use std::collections::BTreeMap;
use std::ffi::c_char;

use pleach_exchange::{Key, SendTensorError, SharedTensor};
use pleach_transport::clock::now;

use super::failure::{Call, noted};
use super::tensor::{find_tensor, pleachTensor_t};
use super::{OpenEndpoint, find, key, pleachEndpoint_t, text};
use crate::result::{Failed, guarded, pleachResult_t};

/// Sends a tensor, at most within the time of the call.
pub(crate) fn send(
    endpoint: &OpenEndpoint,
    key: &Key,
    tensor: SharedTensor,
    timeout_ms: u64,
) -> Result<(), Failed> {
    let begun = now();
    let sent = endpoint.endpoint.send_within(key, tensor, endpoint.limit(timeout_ms));
    sent.map_err(|error| {
        let call = Call { key, peer: "", waited: now().since(begun) };
        let is_closed = matches!(error, SendTensorError::Closed);
        noted(&call, error.kind(), is_closed, error.to_string())
    })
}

/// Sends a tensor under a key: a step and a name. The endpoint keeps it until one receiver has
/// taken it, or its step is aborted or cleaned up. Tensors of one key are received in the order in
/// which they were sent. From this call on the elements must not be written.
///
/// Ownership: the tensor stays the caller's. The caller may send it again, and may release it at
/// any time. `name` is NULL or a text of 1 to 1024 bytes that ends with a zero byte. Threads: any.
/// Blocks: only while more bytes wait for receivers than the endpoint may hold, at most `timeoutMs`
/// milliseconds; 0 stands for the time of the endpoint.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the tensor was
/// received or is another endpoint's; pleachInvalidUsage if a limit is reached, the endpoint was
/// closed, or this process was forked from the one that opened it; pleachRemoteError if the step
/// was aborted or cleaned up; pleachTimeout if there was no room in time; pleachInternalError after
/// a mistake of the library. pleachGetLastExchangeFailure tells them apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointSend(
    endpoint: pleachEndpoint_t,
    step: u64,
    name: *const c_char,
    tensor: pleachTensor_t,
    timeoutMs: u64,
) -> pleachResult_t {
    guarded(|| {
        let endpoint = find(endpoint)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key(step, name) }?;
        let shared = find_tensor(tensor)?.shared(&endpoint)?;
        send(&endpoint, &key, shared, timeoutMs)
    })
}

/// Publishes `count` tensors as a step to all programs. Each tensor can be received any number of
/// times. The tensors replace those that were published in this step before. A receive of another
/// name in this step fails at once.
///
/// Ownership: the tensors stay the caller's. The caller releases them. `names` and `tensors` have
/// `count` entries and are read before the function returns; each name has 1 to 1024 bytes and ends
/// with a zero byte. Both may be NULL where `count` is 0. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, a name comes
/// twice, or a tensor was received or is another endpoint's; pleachInvalidUsage if this process was
/// forked from the one that opened the endpoint; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointPublish(
    endpoint: pleachEndpoint_t,
    step: u64,
    count: usize,
    names: *const *const c_char,
    tensors: *const pleachTensor_t,
) -> pleachResult_t {
    guarded(|| {
        let endpoint = find(endpoint)?;
        if count > 0 && (names.is_null() || tensors.is_null()) {
            return Err(Failed::argument("names or tensors is NULL"));
        }
        let mut published = BTreeMap::new();
        for at in 0..count {
            // SAFETY: the caller promises `count` entries in both lists.
            let (name, tensor) = unsafe { (*names.add(at), *tensors.add(at)) };
            // SAFETY: the caller's promise.
            let key = unsafe { key(step, name) }?;
            let shared = find_tensor(tensor)?.shared(&endpoint)?;
            if published.insert(key.name().to_owned(), shared).is_some() {
                return Err(Failed::argument(format!("the name '{}' comes twice", key.name())));
            }
        }
        endpoint.endpoint.publish(step, published);
        Ok(())
    })
}

/// Aborts a step. Receives that wait in the step fail with this reason (pleachExchangeAborted), and
/// so do later receives until the step is cleaned up. The tensors of the step are dropped.
///
/// Ownership: `reason` is NULL for no reason, or a text that ends with a zero byte. Threads: any.
/// Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint, or `reason` is no
/// UTF-8; pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointAbort(
    endpoint: pleachEndpoint_t,
    step: u64,
    reason: *const c_char,
) -> pleachResult_t {
    guarded(|| {
        let endpoint = find(endpoint)?;
        let reason = match reason.is_null() {
            true => "the sender has aborted it",
            // SAFETY: the caller's promise.
            false => unsafe { text(reason, "reason") }?,
        };
        endpoint.endpoint.abort(step, reason);
        Ok(())
    })
}

/// Cleans up a step. Receives that wait in the step fail, and its tensors are dropped.
///
/// Ownership: nothing changes hands. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such endpoint; pleachInvalidUsage
/// if this process was forked from the one that opened the endpoint; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachEndpointCleanUp(endpoint: pleachEndpoint_t, step: u64) -> pleachResult_t {
    guarded(|| {
        find(endpoint)?.endpoint.clean_up(step);
        Ok(())
    })
}
