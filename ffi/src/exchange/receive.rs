//! Peers, and receives of tensors from them. A caller waits for a receive, starts it, or gives it a
//! callback.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use pleach_exchange::{Key, LinkError, Peer, PendingTensor, ReceiveTensorError, ReceivedTensor};
use pleach_transport::Nanos;
use pleach_transport::clock::now;

use super::callbacks::{Callback, Told};
use super::failure::{Call, cancelled, noted};
use super::tensor::{HeldTensor, TENSORS, pleachTensor_t};
use super::{OpenEndpoint, find, key, pleachEndpoint_t, text};
use crate::handles::{Handles, Held};
use crate::result::{Failed, guarded, out, pleachResult_t};

/// A peer. Its contents are opaque to the caller.
pub struct pleachPeer(());

/// A peer: another program, from which tensors are received. NULL is no peer.
pub type pleachPeer_t = *mut pleachPeer;

/// A receive. Its contents are opaque to the caller.
pub struct pleachReceive(());

/// A receive under way. NULL is no receive.
pub type pleachReceive_t = *mut pleachReceive;

/// A callback that is called once when a receive ends. Its arguments are the context that was
/// given, the result, and the tensor. The callback releases the tensor with pleachTensorRelease.
/// After a failure the tensor is NULL, and pleachGetLastError and pleachGetLastExchangeFailure
/// describe the failure inside the callback. A thread of the endpoint calls one callback at a time;
/// other callbacks wait while it runs. The callback may call every function of this library. NULL
/// is no callback.
pub type pleachReceived_t =
    Option<unsafe extern "C" fn(context: *mut c_void, result: pleachResult_t, tensor: pleachTensor_t)>;

/// How often a waiting thread checks whether its receive was cancelled.
const CANCEL_PAUSE: Duration = Duration::from_millis(20);

/// The peer behind a handle.
struct OpenPeer {
    endpoint: Arc<OpenEndpoint>,
    peer: Peer,
}

static PEERS: Handles<OpenPeer> = Handles::new("peer", "peer");

/// The receive behind a handle.
pub(crate) enum UnderWay {
    Waited(Waited),
    /// A callback reports its end.
    Told {
        endpoint: Arc<OpenEndpoint>,
        number: u64,
    },
}

/// A receive without a callback.
pub(crate) struct Waited {
    endpoint: Arc<OpenEndpoint>,
    /// Locked by the thread that waits; `None` after the end.
    pending: Mutex<Option<PendingTensor>>,
    /// Relaxed: the thread that waits checks again soon.
    is_cancelled: AtomicBool,
    key: Key,
    peer: String,
    begun: Nanos,
}

pub(crate) static RECEIVES: Handles<UnderWay> = Handles::new("receive", "receive");

fn find_peer(peer: pleachPeer_t) -> Result<Held<OpenPeer>, Failed> {
    let found = PEERS.find(peer)?;
    found.endpoint.expect_process()?;
    Ok(found)
}

fn find_receive(receive: pleachReceive_t) -> Result<Held<UnderWay>, Failed> {
    let found = RECEIVES.find(receive)?;
    match &*found {
        UnderWay::Waited(waited) => waited.endpoint.expect_process()?,
        UnderWay::Told { endpoint, .. } => endpoint.expect_process()?,
    }
    Ok(found)
}

/// The tensor or the failure at the end of a receive.
pub(crate) fn finished(
    endpoint: &Arc<OpenEndpoint>,
    result: Result<ReceivedTensor, ReceiveTensorError>,
    key: &Key,
    peer: &str,
    begun: Nanos,
) -> Result<HeldTensor, Failed> {
    match result {
        Ok(tensor) => Ok(HeldTensor::received(endpoint, tensor)),
        Err(error) => {
            let call = Call { key, peer, waited: now().since(begun) };
            let is_closed = matches!(
                error,
                ReceiveTensorError::Closed
                    | ReceiveTensorError::Link { source: LinkError::Closed { .. }, .. }
            );
            Err(noted(&call, error.kind(), is_closed, error.to_string()))
        }
    }
}

fn link_failure(error: &LinkError) -> Failed {
    let result = match error {
        LinkError::Address { .. } => pleachResult_t::pleachInvalidArgument,
        LinkError::Timeout { .. } => pleachResult_t::pleachTimeout,
        LinkError::NoRegions { .. } | LinkError::Closed { .. } => pleachResult_t::pleachInvalidUsage,
        _ => pleachResult_t::pleachRemoteError,
    };
    Failed { result, text: error.to_string() }
}

/// Makes a peer for another program from the address of its endpoint, as pleachEndpointAddress
/// stores it there. The first receive makes the link, and the next receive after a loss makes it
/// again. A program that was restarted is another program: receives from the old peer fail
/// (pleachExchangeAborted), and the caller connects again.
///
/// Ownership: `address` is NULL or a text that ends with a zero byte. `peer` is NULL or points to a
/// pleachPeer_t; the caller closes the peer with pleachPeerClose. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 peers exist already, or this process was forked from the one that
/// opened the endpoint; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointConnect(
    endpoint: pleachEndpoint_t,
    address: *const c_char,
    peer: *mut pleachPeer_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(peer, "peer") }?;
        *stored = std::ptr::null_mut();
        let endpoint = find(endpoint)?;
        // SAFETY: the caller's promise.
        let address = unsafe { text(address, "address") }?;
        let peer = endpoint.endpoint.connect(address).map_err(|error| link_failure(&error))?;
        *stored = PEERS.keep(OpenPeer { endpoint, peer })?;
        Ok(())
    })
}

/// Closes a peer. Its link closes when no tensor and no receive of the peer is left.
///
/// Ownership: the handle goes back to the library and is invalid from now on; tensors and receives
/// stay. Threads: any, also while other threads are in calls on the peer. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such peer; pleachInvalidUsage if
/// this process was forked from the one that opened the endpoint; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachPeerClose(peer: pleachPeer_t) -> pleachResult_t {
    guarded(|| {
        find_peer(peer)?;
        PEERS.take(peer).map(drop)
    })
}

/// Makes the link to a peer, if there is none, and waits until memory is shared over it. Tensors
/// then come in place. Programs need not call the function. If no memory can be shared, the link
/// exists all the same, and tensors come inline.
///
/// Ownership: nothing changes hands. Threads: any. Blocks: until it is known whether memory is
/// shared, at most `timeoutMs` milliseconds; 0 stands for the time of the endpoint.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such peer; pleachInvalidUsage if no
/// memory is shared with the peer, the endpoint was closed, or this process was forked from the one
/// that opened the endpoint; pleachRemoteError if the peer cannot be reached, is lost, was
/// restarted or has another secret; pleachTimeout if the time has passed; pleachInternalError after
/// a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachPeerShareRegions(peer: pleachPeer_t, timeoutMs: u64) -> pleachResult_t {
    guarded(|| {
        let held = find_peer(peer)?;
        let limited = held.peer.within(held.endpoint.limit(timeoutMs));
        limited.share_regions().map_err(|error| link_failure(&error))
    })
}

/// Stores the incarnation of a peer's endpoint, as pleachEndpointIncarnation stores it in the peer;
/// 0 before the first link.
///
/// Ownership: `incarnation` is NULL or points to a number. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such peer or `incarnation` is NULL;
/// pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPeerIncarnation(peer: pleachPeer_t, incarnation: *mut u64) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(incarnation, "incarnation") }?;
        *stored = find_peer(peer)?.peer.incarnation().unwrap_or_default();
        Ok(())
    })
}

/// Receives the tensor of a key from a peer, and waits until the peer sends it. The tensor is read
/// in place if the peer's memory can be mapped; pleachTensorGetInfo tells whether it was.
///
/// Ownership: `name` is NULL or a text of 1 to 1024 bytes that ends with a zero byte. `tensor` is
/// NULL or points to a pleachTensor_t, which is NULL after a failure; the caller releases the
/// tensor with pleachTensorRelease. Threads: any. Blocks: until the tensor is here, at most
/// `timeoutMs` milliseconds; 0 stands for the time of the endpoint.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the peer
/// publishes the step but not this name; pleachInvalidUsage if a limit is reached, 65536 tensors
/// exist already, the endpoint was closed, or this process was forked from the one that opened it;
/// pleachRemoteError if the peer cannot be reached, is lost, was restarted or has another secret,
/// or the step was aborted or cleaned up there; pleachTimeout if the tensor did not come in time;
/// pleachInternalError after a mistake of the library. pleachGetLastExchangeFailure tells them
/// apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPeerReceive(
    peer: pleachPeer_t,
    step: u64,
    name: *const c_char,
    timeoutMs: u64,
    tensor: *mut pleachTensor_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(tensor, "tensor") }?;
        *stored = std::ptr::null_mut();
        let (held, begun) = (find_peer(peer)?, now());
        // SAFETY: the caller's promise.
        let key = unsafe { key(step, name) }?;
        let received = held.peer.within(held.endpoint.limit(timeoutMs)).receive(&key);
        *stored = TENSORS.keep(finished(&held.endpoint, received, &key, held.peer.address(), begun)?)?;
        Ok(())
    })
}

/// Receives a tensor that this program itself sends.
///
/// Ownership: `name` is NULL or a text of 1 to 1024 bytes that ends with a zero byte. `tensor` is
/// NULL or points to a pleachTensor_t, which is NULL after a failure; the caller releases the
/// tensor with pleachTensorRelease. Threads: any. Blocks: until the tensor is sent, at most
/// `timeoutMs` milliseconds; 0 stands for the time of the endpoint.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if a limit is reached, 65536 tensors exist already, the endpoint was closed, or this process was
/// forked from the one that opened it; pleachRemoteError if the step was aborted or cleaned up;
/// pleachTimeout if the tensor was not sent in time; pleachInternalError after a mistake of the
/// library. pleachGetLastExchangeFailure tells them apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachEndpointReceive(
    endpoint: pleachEndpoint_t,
    step: u64,
    name: *const c_char,
    timeoutMs: u64,
    tensor: *mut pleachTensor_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(tensor, "tensor") }?;
        *stored = std::ptr::null_mut();
        let (endpoint, begun) = (find(endpoint)?, now());
        // SAFETY: the caller's promise.
        let key = unsafe { key(step, name) }?;
        let received = endpoint.endpoint.receive(&key, endpoint.limit(timeoutMs));
        *stored = TENSORS.keep(finished(&endpoint, received, &key, "", begun)?)?;
        Ok(())
    })
}

/// Starts to receive the tensor of a key from a peer, and does not wait for the tensor. A callback
/// is called once at the end, whatever happens: also after pleachReceiveCancel and
/// pleachEndpointClose, and perhaps before this function returns. Without a callback
/// pleachReceiveTest and pleachReceiveWait report the end.
///
/// Ownership: `name` is NULL or a text of 1 to 1024 bytes that ends with a zero byte. `receive` is
/// NULL or points to a pleachReceive_t; NULL is allowed only with a callback. The handle is invalid
/// after the end of the receive. The end is the callback, the success or failure of
/// pleachReceiveWait, or pleachReceiveCancel. Without a callback the caller must call one of these
/// two functions. If this function fails, the callback is not called. Threads: any. Blocks: only
/// while the link to the peer is made, at most `timeoutMs` milliseconds; 0 stands for the time of
/// the endpoint. The receive ends when the same time has passed.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if a limit is reached, 65536 receives exist already, the endpoint was closed, or this process
/// was forked from the one that opened it; pleachRemoteError if the peer cannot be reached, was
/// restarted or has another secret; pleachTimeout if the peer does not answer in time;
/// pleachSystemError if the system refuses a thread; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPeerStartReceive(
    peer: pleachPeer_t,
    step: u64,
    name: *const c_char,
    timeoutMs: u64,
    callback: pleachReceived_t,
    context: *mut c_void,
    receive: *mut pleachReceive_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let mut stored = unsafe { receive.as_mut() };
        if let Some(stored) = &mut stored {
            **stored = std::ptr::null_mut();
        } else if callback.is_none() {
            return Err(Failed::argument("receive is NULL, and there is no callback"));
        }
        let (held, begun) = (find_peer(peer)?, now());
        // SAFETY: the caller's promise.
        let key = unsafe { key(step, name) }?;
        let limit = held.endpoint.limit(timeoutMs);
        let endpoint = held.endpoint.clone();
        let pending = match held.peer.within(limit).start_receive(&key) {
            Ok(pending) => pending,
            Err(error) => {
                return finished(&endpoint, Err(error), &key, held.peer.address(), begun).map(drop);
            }
        };
        let peer = held.peer.address().to_owned();
        let Some(function) = callback else {
            let (pending, is_cancelled) = (Mutex::new(Some(pending)), AtomicBool::new(false));
            let waited = Waited { endpoint, pending, is_cancelled, key, peer, begun };
            let handle = RECEIVES.keep(UnderWay::Waited(waited))?;
            if let Some(stored) = stored {
                *stored = handle;
            }
            return Ok(());
        };
        let (callback, deadline) = (Callback { function, context }, begun + limit);
        let (of_handle, handle) = (endpoint.clone(), 0);
        let told = Told { endpoint, pending, key, peer, begun, deadline, callback, handle };
        of_handle.callbacks.tell(Box::new(told), |number| {
            let endpoint = of_handle.clone();
            let handle = RECEIVES.keep(UnderWay::Told { endpoint, number })?;
            if let Some(stored) = stored {
                *stored = handle;
            }
            Ok(handle)
        })
    })
}

/// Stores whether a receive has ended, with success or failure. After the end pleachReceiveWait
/// returns at once.
///
/// Ownership: `isReady` is NULL or points to an int. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such receive or `isReady` is NULL;
/// pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachReceiveTest(receive: pleachReceive_t, isReady: *mut c_int) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(isReady, "isReady") }?;
        *stored = 0;
        if let UnderWay::Waited(waited) = &*find_receive(receive)? {
            // A waiting thread holds the lock, so the receive has not ended.
            let pending = waited.pending.try_lock().ok();
            let is_ready = pending.and_then(|pending| pending.as_ref().map(PendingTensor::is_ready));
            *stored = is_ready.unwrap_or_default().into();
        }
        Ok(())
    })
}

/// Waits for the end of a receive that has no callback.
///
/// Ownership: `tensor` is NULL or points to a pleachTensor_t, which is NULL unless the function
/// succeeds; the caller releases the tensor with pleachTensorRelease. Unless pleachInProgress is
/// returned, or the call itself is wrong, the receive has ended and its handle is invalid. Threads:
/// any, one at a time. Blocks: until the receive has ended, at most `timeoutMs` milliseconds; 0
/// checks once.
///
/// Returns: pleachSuccess; pleachInProgress if the receive is still under way;
/// pleachInvalidArgument if an argument cannot be right, or the peer publishes the step but not
/// this name; pleachInvalidUsage if the receive has a callback, another thread waits for it, it was
/// cancelled, a limit is reached, 65536 tensors exist already, or this process was forked from the
/// one that opened the endpoint; pleachRemoteError if the peer is lost, the endpoint was closed, or
/// the step was aborted or cleaned up; pleachTimeout if the tensor did not come in the time of
/// pleachPeerStartReceive; pleachInternalError after a mistake of the library.
/// pleachGetLastExchangeFailure tells them apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachReceiveWait(
    receive: pleachReceive_t,
    timeoutMs: u64,
    tensor: *mut pleachTensor_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(tensor, "tensor") }?;
        *stored = std::ptr::null_mut();
        let held = find_receive(receive)?;
        let UnderWay::Waited(waited) = &*held else {
            return Err(Failed::usage("this receive has a callback, which tells its end"));
        };
        *stored = TENSORS.keep(waited.wait(receive, Duration::from_millis(timeoutMs))?)?;
        Ok(())
    })
}

impl Waited {
    fn wait(&self, receive: pleachReceive_t, limit: Duration) -> Result<HeldTensor, Failed> {
        let call = || Call { key: &self.key, peer: &self.peer, waited: now().since(self.begun) };
        let mut pending = match self.pending.try_lock() {
            Ok(pending) => pending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(Failed::usage("another thread waits for this receive"));
            }
        };
        let until = now() + limit;
        loop {
            if self.is_cancelled.load(Ordering::Relaxed) {
                return Err(cancelled(&call()));
            }
            let left = until.since(now());
            let Some(waiting) = pending.as_mut() else { return Err(cancelled(&call())) };
            if waiting.wait_for(left.min(CANCEL_PAUSE)) {
                break;
            }
            if now() >= until {
                let text = format!("tensor {} has not come yet from {}; wait again", self.key, self.peer);
                return Err(Failed { result: pleachResult_t::pleachInProgress, text });
            }
        }
        // Another thread may cancel the receive at this moment.
        let (Ok(_), Some(ended)) = (RECEIVES.take(receive), pending.take()) else {
            return Err(cancelled(&call()));
        };
        finished(&self.endpoint, ended.wait(), &self.key, &self.peer, self.begun)
    }
}

/// Cancels a receive. If the tensor has not been received, it stays for the next receiver. A
/// callback is called all the same: with pleachInvalidUsage and the kind pleachExchangeCancelled,
/// or with the end of the receive if this came first.
///
/// Ownership: the handle goes back to the library and is invalid from now on. Threads: any; a
/// thread that waits for the receive returns pleachInvalidUsage. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such receive, or it has ended;
/// pleachInvalidUsage if this process was forked from the one that opened the endpoint;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachReceiveCancel(receive: pleachReceive_t) -> pleachResult_t {
    guarded(|| {
        find_receive(receive)?;
        match &*RECEIVES.take(receive)? {
            UnderWay::Waited(waited) => waited.is_cancelled.store(true, Ordering::Relaxed),
            UnderWay::Told { endpoint, number } => endpoint.callbacks.cancel(*number),
        }
        Ok(())
    })
}
