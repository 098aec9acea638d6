//! Transfers, their ends, and signals.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use pleach_transport::{
    AtomicOp, Inline, Rank, SIGNAL_SLOT_PAYLOAD_BYTES, Signal, Source, SubmitError, Submitted, TransferError,
    TransferId,
};

use super::region::{pleachRegion_t, pleachRemoteSlice_t, remote_slice, slice};
use super::{OpenDevice, PLEACH_SIGNAL_SLOTS, State, Transfer, find, late, pleachDevice_t, remote};
use crate::handles::Held;
use crate::result::{Failed, guarded, input, out, pleachResult_t};

/// The number of a transfer on its device; 0 is no transfer.
pub type pleachTransfer_t = u64;

/// The signal slot of a put that raises no signal.
pub const PLEACH_NO_SIGNAL: c_int = -1;
/// The most bytes of payload beside a signal.
pub const PLEACH_PAYLOAD_BYTES: usize = 48;
const _: () = assert!(PLEACH_PAYLOAD_BYTES == SIGNAL_SLOT_PAYLOAD_BYTES);

/// Most transfers of a device whose ends pleachTransferWait has not reported yet.
const TRANSFERS_MAX: usize = 1 << 16;

/// An operation of this rank on a peer.
enum Operation {
    Transfer(pleach_transport::Transfer),
    Signal(Signal),
}

impl OpenDevice {
    /// Submits an operation; waits for room if necessary. Stores the number of the operation in
    /// `stored`, if given.
    fn submit(&self, peer: Rank, operation: &Operation, stored: Option<&mut u64>) -> Result<(), Failed> {
        let is_asked_for = stored.is_some();
        let number =
            self.wait(self.timeout, |state| self.try_submit(state, peer, operation, is_asked_for))?;
        let number = number.ok_or_else(|| {
            late(format!("rank {peer} has not taken earlier transfers within {:?}", self.timeout))
        })?;
        if let Some(stored) = stored {
            *stored = number;
        }
        Ok(())
    }

    fn try_submit(
        &self,
        state: &mut State,
        peer: Rank,
        operation: &Operation,
        is_asked_for: bool,
    ) -> Result<Option<u64>, Failed> {
        if is_asked_for && state.transfers.len() >= TRANSFERS_MAX {
            return Err(Failed::usage(format!(
                "{TRANSFERS_MAX} transfers were not waited for; call pleachTransferWait, or pass NULL"
            )));
        }
        let number = state.last_transfer + 1;
        let id = TransferId(number);
        let device = state.device()?;
        let submitted = match operation {
            Operation::Transfer(transfer) => device.submit(peer, transfer.clone(), id),
            Operation::Signal(signal) => device.signal(peer, signal, id),
        };
        let transfer = match submitted {
            Ok(Submitted::Ended(value)) => Transfer::Ended(Ok(value)),
            Ok(Submitted::UnderWay) => Transfer::UnderWay,
            Err(SubmitError::QueueFull { .. }) => return Ok(None),
            Err(error) => {
                // The event that follows has the cause.
                state.poll()?;
                state.expect(peer)?;
                return Err(refusal(&error));
            }
        };
        state.last_transfer = number;
        if is_asked_for {
            state.transfers.insert(number, transfer);
        }
        self.carry_on(state);
        Ok(Some(number))
    }
}

fn refusal(error: &SubmitError) -> Failed {
    match error {
        SubmitError::Lost { .. } | SubmitError::Departed { .. } | SubmitError::Severed { .. } => {
            remote(error.to_string())
        }
        _ => Failed::argument(error.to_string()),
    }
}

fn failure(error: &TransferError) -> Failed {
    match error {
        TransferError::Fabric { .. } => Failed::system(error.to_string()),
        _ => remote(error.to_string()),
    }
}

/// The signal that these arguments describe.
///
/// # Safety
///
/// `payload` is null or has `bytes` bytes.
unsafe fn signal(slot: c_int, payload: *const c_void, bytes: usize) -> Result<Signal, Failed> {
    let signal_slot = slot_of(slot)?;
    if bytes > 0 && payload.is_null() {
        return Err(Failed::argument("payload is NULL"));
    }
    let payload = match bytes {
        0 => Some(Inline::EMPTY),
        _ if bytes > PLEACH_PAYLOAD_BYTES => None,
        // SAFETY: the caller's promise.
        _ => Inline::new(unsafe { std::slice::from_raw_parts(payload.cast::<u8>(), bytes) }),
    };
    let payload = payload.ok_or_else(|| {
        Failed::argument(format!("a payload of {bytes} bytes is longer than {PLEACH_PAYLOAD_BYTES}"))
    })?;
    Ok(Signal { signal_slot, payload })
}

fn slot_of(slot: c_int) -> Result<u16, Failed> {
    let inside = u16::try_from(slot).ok().filter(|_| slot < PLEACH_SIGNAL_SLOTS);
    inside.ok_or_else(|| {
        Failed::argument(format!("signal slot {slot} does not exist; there are {PLEACH_SIGNAL_SLOTS}"))
    })
}

/// The device, the peer, and the place for the number of the transfer.
///
/// # Safety
///
/// `transfer` is null, or valid for the time of the call.
unsafe fn begun<'a>(
    device: pleachDevice_t,
    peer: c_int,
    transfer: *mut pleachTransfer_t,
) -> Result<(Held<OpenDevice>, Rank, Option<&'a mut u64>), Failed> {
    // SAFETY: the caller's promise.
    let mut stored = unsafe { transfer.as_mut() };
    if let Some(stored) = &mut stored {
        **stored = 0;
    }
    let open = find(device)?;
    let peer = open.peer(peer)?;
    Ok((open, peer, stored))
}

/// Writes a part of a region of this rank to the part `destination` of a region of a peer, which
/// must have the same length, and then raises a signal at the peer. The signal adds one to the
/// peer's signal slot `signalSlot` for this rank. It carries `payloadBytes` bytes of payload, at
/// most PLEACH_PAYLOAD_BYTES. With PLEACH_NO_SIGNAL the put raises no signal. The bytes are visible
/// when the signal is; transfers have no other order. The next signal to the same slot replaces the
/// payload.
///
/// `transfer` gets a number for pleachTransferWait; NULL if the caller does not wait for the end.
/// Transfers proceed while any thread of this process is in a function on the device. A key that
/// the peer does not know is an error of pleachTransferWait.
///
/// Ownership: the source stays the caller's and must not change until the transfer has ended.
/// `destination` is NULL or points to a pleachRemoteSlice_t, `payload` is NULL or has
/// `payloadBytes` bytes. Both are read before the function returns. `transfer` is NULL or points to
/// a pleachTransfer_t. Threads: any. Blocks: only while too many transfers to the peer are under
/// way, at most the timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 transfers were not waited for, another thread closes the device,
/// or this process was forked from the one that opened the device; pleachRemoteError if the peer
/// is lost or has closed its device; pleachTimeout if there is no room in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPut(
    device: pleachDevice_t,
    peer: c_int,
    region: pleachRegion_t,
    offset: usize,
    length: usize,
    destination: *const pleachRemoteSlice_t,
    signalSlot: c_int,
    payload: *const c_void,
    payloadBytes: usize,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (open, peer, stored) = unsafe { begun(device, peer, transfer) }?;
        let src = Source::Slice(slice(region, offset, length)?);
        // SAFETY: the caller's promise.
        let dst = remote_slice(unsafe { input(destination, "destination") }?);
        let signal = match signalSlot {
            PLEACH_NO_SIGNAL => None,
            // SAFETY: the caller's promise.
            slot => Some(unsafe { signal(slot, payload, payloadBytes) }?),
        };
        open.submit(peer, &Operation::Transfer(pleach_transport::Transfer::Put { src, dst, signal }), stored)
    })
}

/// Reads the part `source` of a region of a peer into a part of a region of this rank, which must
/// have the same length. The bytes are there when the transfer has ended. `transfer` is used as in
/// pleachPut.
///
/// Ownership: the destination stays the caller's and belongs to the transfer until it has ended.
/// `source` is NULL or points to a pleachRemoteSlice_t, which is read before the function
/// returns. `transfer` is NULL or points to a pleachTransfer_t. Threads: any. Blocks: only while
/// too many transfers to the peer are under way, at most the timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 transfers were not waited for, another thread closes the device,
/// or this process was forked from the one that opened the device; pleachRemoteError if the peer
/// is lost or has closed its device; pleachTimeout if there is no room in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGet(
    device: pleachDevice_t,
    peer: c_int,
    source: *const pleachRemoteSlice_t,
    region: pleachRegion_t,
    offset: usize,
    length: usize,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (open, peer, stored) = unsafe { begun(device, peer, transfer) }?;
        // SAFETY: the caller's promise.
        let src = remote_slice(unsafe { input(source, "source") }?);
        let dst = slice(region, offset, length)?;
        open.submit(peer, &Operation::Transfer(pleach_transport::Transfer::Get { src, dst }), stored)
    })
}

/// # Safety
///
/// The caller's promise of [`pleachAtomicAdd`].
unsafe fn atomic(
    device: pleachDevice_t,
    peer: c_int,
    word: *const pleachRemoteSlice_t,
    op: AtomicOp,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (open, peer, stored) = unsafe { begun(device, peer, transfer) }?;
        // SAFETY: the caller's promise.
        let word = remote_slice(unsafe { input(word, "word") }?);
        open.submit(peer, &Operation::Transfer(pleach_transport::Transfer::Atomic { word, op }), stored)
    })
}

/// Adds `value` to a 64-bit word of a peer. The sum wraps. `word` names 8 bytes at a multiple of 8.
/// The operation is atomic among such operations of all ranks. pleachTransferWait stores the old
/// value. `transfer` is used as in pleachPut.
///
/// Ownership: `word` is NULL or points to a pleachRemoteSlice_t, which is read before the
/// function returns. `transfer` is NULL or points to a pleachTransfer_t. Threads: any. Blocks:
/// only while too many transfers to the peer are under way, at most the timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 transfers were not waited for, another thread closes the device,
/// or this process was forked from the one that opened the device; pleachRemoteError if the peer
/// is lost or has closed its device; pleachTimeout if there is no room in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAtomicAdd(
    device: pleachDevice_t,
    peer: c_int,
    word: *const pleachRemoteSlice_t,
    value: u64,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { atomic(device, peer, word, AtomicOp::Add(value), transfer) }
}

/// Stores `desired` in a 64-bit word of a peer if the word equals `expected`. Everything else is as
/// in pleachAtomicAdd.
///
/// Ownership: `word` is NULL or points to a pleachRemoteSlice_t, which is read before the
/// function returns. `transfer` is NULL or points to a pleachTransfer_t. Threads: any. Blocks:
/// only while too many transfers to the peer are under way, at most the timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 transfers were not waited for, another thread closes the device,
/// or this process was forked from the one that opened the device; pleachRemoteError if the peer
/// is lost or has closed its device; pleachTimeout if there is no room in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAtomicCompareSwap(
    device: pleachDevice_t,
    peer: c_int,
    word: *const pleachRemoteSlice_t,
    expected: u64,
    desired: u64,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { atomic(device, peer, word, AtomicOp::CompareSwap { expected, new: desired }, transfer) }
}

/// Raises a signal at a peer without writing to a region. The signal, the payload and `transfer`
/// are as in pleachPut.
///
/// Ownership: `payload` is NULL or has `payloadBytes` bytes, which are read before the function
/// returns. `transfer` is NULL or points to a pleachTransfer_t. Threads: any. Blocks: only while
/// too many transfers to the peer are under way, at most the timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if 65536 transfers were not waited for, another thread closes the device,
/// or this process was forked from the one that opened the device; pleachRemoteError if the peer
/// is lost or has closed its device; pleachTimeout if there is no room in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSignal(
    device: pleachDevice_t,
    peer: c_int,
    signalSlot: c_int,
    payload: *const c_void,
    payloadBytes: usize,
    transfer: *mut pleachTransfer_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (open, peer, stored) = unsafe { begun(device, peer, transfer) }?;
        // SAFETY: the caller's promise.
        let signal = unsafe { signal(signalSlot, payload, payloadBytes) }?;
        open.submit(peer, &Operation::Signal(signal), stored)
    })
}

/// Waits until a transfer has ended. After the end of a put its source may be used again. After the
/// end of a get its bytes are here. `value`, if not NULL, gets the old value of an atomic
/// operation.
///
/// Ownership: `value` is NULL or points to a number. The number of the transfer is invalid after
/// its end. Threads: any. Blocks: until the transfer has ended, at most `timeoutMs` milliseconds; 0
/// checks once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such device or transfer;
/// pleachInvalidUsage if another thread closes the device, or this process was forked from the
/// one that opened the device; pleachRemoteError if the peer is lost, has closed its device or
/// does not know the key; pleachSystemError if the hardware has failed; pleachTimeout if the
/// transfer is still under way; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachTransferWait(
    device: pleachDevice_t,
    transfer: pleachTransfer_t,
    timeoutMs: u64,
    value: *mut u64,
) -> pleachResult_t {
    guarded(|| {
        let open = find(device)?;
        let ended =
            open.wait(Duration::from_millis(timeoutMs), |state| match state.transfers.get(&transfer) {
                None => {
                    Err(Failed::argument(format!("there is no transfer {transfer}, or it was waited for")))
                }
                Some(Transfer::UnderWay) => Ok(None),
                Some(Transfer::Ended(_)) => Ok(state.transfers.remove(&transfer)),
            })?;
        let Some(Transfer::Ended(result)) = ended else {
            return Err(late(format!("transfer {transfer} has not ended within {timeoutMs} ms")));
        };
        let old = result.map_err(|error| failure(&error))?;
        // SAFETY: the caller's promise.
        if let Some(value) = unsafe { value.as_mut() } {
            *value = old;
        }
        Ok(())
    })
}

/// Waits until a signal slot of this rank has received at least `count` signals of a peer since the
/// device was opened. All bytes whose puts have raised these signals are visible then. `payload`,
/// if not NULL, gets the PLEACH_PAYLOAD_BYTES bytes of payload of the last signal. Bytes that the
/// peer did not give have no meaning.
///
/// Ownership: `payload` is NULL or has PLEACH_PAYLOAD_BYTES bytes. Threads: any. Blocks: until the
/// signals have come, at most `timeoutMs` milliseconds; 0 checks once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if another thread closes the device, or this process was forked from the one that opened the
/// device; pleachRemoteError if the peer is lost or has closed its device before it raised them;
/// pleachTimeout if the signals have not come; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSignalWait(
    device: pleachDevice_t,
    peer: c_int,
    signalSlot: c_int,
    count: u64,
    timeoutMs: u64,
    payload: *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        let open = find(device)?;
        let (rank, slot) = (open.peer(peer)?, slot_of(signalSlot)?);
        let signals = open.signals[rank as usize].as_ref().expect("every peer has signal slots");
        let limit = Duration::from_millis(timeoutMs);
        let come = open.wait(limit, |state| match signals.count(slot) >= count {
            true => Ok(Some(())),
            // A signal may have come before the loss.
            false => state.expect(rank).map_or_else(
                |lost| if signals.count(slot) >= count { Ok(Some(())) } else { Err(lost) },
                |()| Ok(None),
            ),
        })?;
        if come.is_none() {
            let have = signals.count(slot);
            return Err(late(format!(
                "rank {peer} has sent {have} of {count} signals to slot {slot} within {timeoutMs} ms"
            )));
        }
        if !payload.is_null() {
            let bytes = signals.payload(slot);
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), payload.cast::<u8>(), bytes.len()) };
        }
        Ok(())
    })
}

/// Stores the number of signals of a peer that a signal slot of this rank has received since the
/// device was opened. The function makes no progress, so it may miss the newest signals.
///
/// Ownership: `count` is NULL or points to a number. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if this process was forked from the one that opened the device;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSignalCount(
    device: pleachDevice_t,
    peer: c_int,
    signalSlot: c_int,
    count: *mut u64,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let count = unsafe { out(count, "count") }?;
        let open = find(device)?;
        let (peer, slot) = (open.peer(peer)?, slot_of(signalSlot)?);
        let signals = open.signals[peer as usize].as_ref().expect("every peer has signal slots");
        *count = signals.count(slot);
        Ok(())
    })
}
