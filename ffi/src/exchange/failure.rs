//! The last failure of a send or a receive as a struct.

use std::cell::RefCell;
use std::ffi::{c_char, c_int};
use std::time::Duration;

use pleach_exchange::Key;
use pleach_exchange::key::NAME_BYTES_MAX;
use pleach_exchange::message::FailureKind;

use crate::failure::PLEACH_FAILURE_BYTES;
pub(crate) use crate::failure::store;
use crate::result::{Failed, guarded, pleachResult_t, struct_size};

/// Nothing has failed.
pub const pleachExchangeNone: c_int = 0;
/// A deadline has passed. gRPC: DEADLINE_EXCEEDED.
pub const pleachExchangeTimeout: c_int = 1;
/// The step was aborted or cleaned up, or the peer was restarted. gRPC: ABORTED.
pub const pleachExchangeAborted: c_int = 2;
/// A limit is reached. gRPC: RESOURCE_EXHAUSTED.
pub const pleachExchangeExhausted: c_int = 3;
/// The peer publishes the step, but not this name. gRPC: NOT_FOUND.
pub const pleachExchangeNotFound: c_int = 4;
/// The peer cannot be reached or is lost, or the endpoint was closed. gRPC: UNAVAILABLE.
pub const pleachExchangeUnavailable: c_int = 5;
/// The caller has cancelled the receive. gRPC: CANCELLED.
pub const pleachExchangeCancelled: c_int = 6;

/// Room for the name of a key, in bytes.
pub const PLEACH_KEY_NAME_BYTES: usize = 1025;
const _: () = assert!(PLEACH_KEY_NAME_BYTES == NAME_BYTES_MAX + 1);
/// Room for the address of a peer, in bytes.
pub const PLEACH_PEER_BYTES: usize = 256;

/// Why a tensor was not sent or received. Begin with PLEACH_EXCHANGE_FAILURE_INITIALIZER, which
/// sets `size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pleachExchangeFailure_t {
    /// sizeof(pleachExchangeFailure_t).
    pub size: usize,
    /// One of the constants pleachExchangeNone to pleachExchangeCancelled.
    pub kind: c_int,
    /// The result that the function has returned, or with which the callback was called.
    pub result: c_int,
    /// The step of the tensor's key.
    pub step: u64,
    /// How long the call has waited, in milliseconds.
    pub waitedMs: u64,
    /// The name of the tensor's key.
    pub name: [c_char; PLEACH_KEY_NAME_BYTES],
    /// The address of the peer as the caller gave it; empty if the call was about no peer.
    pub peer: [c_char; PLEACH_PEER_BYTES],
    /// The whole text: what happened, to which tensor and peer, and what to do.
    pub text: [c_char; PLEACH_FAILURE_BYTES],
}

/// A failure of this thread, until the next one.
struct Last {
    kind: c_int,
    result: pleachResult_t,
    key: Key,
    peer: String,
    waited: Duration,
    text: String,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// The key, the peer and the duration of a call.
pub(crate) struct Call<'a> {
    pub(crate) key: &'a Key,
    /// Empty if the call was about no peer.
    pub(crate) peer: &'a str,
    pub(crate) waited: Duration,
}

/// Keeps a failure for pleachGetLastExchangeFailure of this thread.
#[cold]
pub(crate) fn noted(call: &Call<'_>, kind: FailureKind, is_closed: bool, text: String) -> Failed {
    let (result, kind) = match kind {
        FailureKind::Timeout => (pleachResult_t::pleachTimeout, pleachExchangeTimeout),
        FailureKind::Aborted => (pleachResult_t::pleachRemoteError, pleachExchangeAborted),
        FailureKind::Exhausted => (pleachResult_t::pleachInvalidUsage, pleachExchangeExhausted),
        FailureKind::NotFound => (pleachResult_t::pleachInvalidArgument, pleachExchangeNotFound),
        FailureKind::Unavailable if is_closed => {
            (pleachResult_t::pleachInvalidUsage, pleachExchangeUnavailable)
        }
        FailureKind::Unavailable => (pleachResult_t::pleachRemoteError, pleachExchangeUnavailable),
    };
    keep(call, kind, Failed { result, text })
}

/// As [`noted`], for a receive that the caller has cancelled.
#[cold]
pub(crate) fn cancelled(call: &Call<'_>) -> Failed {
    let text = format!("the receive of tensor {} from {} was cancelled", call.key, call.peer);
    keep(call, pleachExchangeCancelled, Failed::usage(text))
}

fn keep(call: &Call<'_>, kind: c_int, failed: Failed) -> Failed {
    let (key, peer) = (call.key.clone(), call.peer.to_owned());
    let last =
        Last { kind, result: failed.result, key, peer, waited: call.waited, text: failed.text.clone() };
    LAST.set(Some(last));
    failed
}

/// Stores the last failure of the calling thread to send or to receive a tensor. The kind is
/// pleachExchangeNone if no such call of the thread has failed. In a callback that reports a
/// failure, it is that failure. A wrong argument is not such a failure.
///
/// Ownership: `failure` is NULL or points to a struct that began with
/// PLEACH_EXCHANGE_FAILURE_INITIALIZER. Threads: any; each thread has a failure of its own. Blocks:
/// no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `failure` is NULL or its size is not that of
/// the struct; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGetLastExchangeFailure(
    failure: *mut pleachExchangeFailure_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(failure, "failure", "PLEACH_EXCHANGE_FAILURE_INITIALIZER") }?;
        let mut found = pleachExchangeFailure_t {
            size,
            kind: pleachExchangeNone,
            result: 0,
            step: 0,
            waitedMs: 0,
            name: [0; PLEACH_KEY_NAME_BYTES],
            peer: [0; PLEACH_PEER_BYTES],
            text: [0; PLEACH_FAILURE_BYTES],
        };
        LAST.with_borrow(|last| {
            let Some(last) = last else { return };
            found.kind = last.kind;
            found.result = last.result as c_int;
            found.step = last.key.step();
            found.waitedMs = u64::try_from(last.waited.as_millis()).unwrap_or(u64::MAX);
            store(&mut found.name, last.key.name());
            store(&mut found.peer, &last.peer);
            store(&mut found.text, &last.text);
        });
        // SAFETY: it is as long as its size says.
        unsafe { *failure = found };
        Ok(())
    })
}
