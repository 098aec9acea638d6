//! The failure of a communicator as a struct.

use std::ffi::{c_char, c_int};

use pleach_collectives::engine::FaultKind;

use crate::comm::{find, pleachComm_t};
use crate::result::{guarded, pleachResult_t, struct_size};

/// Nothing has failed.
pub const pleachFailureNone: c_int = 0;
/// The rank has called abort.
pub const pleachFailureAborted: c_int = 1;
/// The rank has made another call.
pub const pleachFailureMismatch: c_int = 2;
/// The GPU of the rank has failed.
pub const pleachFailureCompute: c_int = 3;
/// The finder has no room for a mapping of the rank's memory.
pub const pleachFailureOutOfReach: c_int = 4;
/// The rank is gone: killed, crashed, or cut off.
pub const pleachFailureLost: c_int = 5;
/// The rank has left while others still needed it.
pub const pleachFailureLeft: c_int = 6;
/// The rank has broken the protocol.
pub const pleachFailureProtocol: c_int = 7;
/// A deadline has passed while waiting for the rank.
pub const pleachFailureTimedOut: c_int = 8;
/// The members of the session have changed: the step is repeated, and nobody is at fault.
pub const pleachFailureChanged: c_int = 9;

/// Room for the name of an operation, in bytes.
pub const PLEACH_OPERATION_BYTES: usize = 128;
/// Room for the step of a failure, in bytes.
pub const PLEACH_STEP_BYTES: usize = 256;
/// Room for the text of a failure, in bytes.
pub const PLEACH_FAILURE_BYTES: usize = 512;

/// The failure of a communicator. It is the same on all ranks that survive. Begin with
/// PLEACH_FAILURE_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pleachFailure_t {
    /// sizeof(pleachFailure_t).
    pub size: usize,
    /// One of the constants pleachFailureNone to pleachFailureChanged.
    pub kind: c_int,
    /// The rank that the failure is about.
    pub rank: c_int,
    /// The rank that has found the failure.
    pub foundBy: c_int,
    /// The host of `rank` among the hosts of the communicator, from 0.
    pub host: c_int,
    /// The number of the call, from 0.
    pub call: u64,
    /// How long the finder has waited, in milliseconds.
    pub waitedMs: u64,
    /// The operation of the finder, for example "all-reduce of 4 f32 (sum)"; empty outside of
    /// calls.
    pub operation: [c_char; PLEACH_OPERATION_BYTES],
    /// The step of the operation in which the finder has waited. For a lost rank, how the loss was
    /// detected. For ranks that wait for each other, their cycle. Empty if the step is unknown.
    pub step: [c_char; PLEACH_STEP_BYTES],
    /// The whole text: what happened, to which rank, in which step.
    pub text: [c_char; PLEACH_FAILURE_BYTES],
}

/// Stores the failure of a communicator. The kind is pleachFailureNone if no call of the
/// communicator has failed.
///
/// Ownership: `failure` is NULL or points to a struct that began with
/// PLEACH_FAILURE_INITIALIZER. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator, or `failure`
/// is NULL or its size is not that of the struct; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommGetFailure(
    comm: pleachComm_t,
    failure: *mut pleachFailure_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(failure, "failure", "PLEACH_FAILURE_INITIALIZER") }?;
        let comm = find(comm)?;
        let mut found = pleachFailure_t {
            size,
            kind: pleachFailureNone,
            rank: -1,
            foundBy: -1,
            host: -1,
            call: 0,
            waitedMs: 0,
            operation: [0; PLEACH_OPERATION_BYTES],
            step: [0; PLEACH_STEP_BYTES],
            text: [0; PLEACH_FAILURE_BYTES],
        };
        if let Some(fault) = comm.failure() {
            found.kind = kind(fault.kind);
            found.rank = fault.subject as c_int;
            found.foundBy = fault.found_by as c_int;
            found.host = comm.group.info().hosts.host(fault.subject) as c_int;
            found.call = fault.run;
            found.waitedMs = u64::try_from(fault.waited.as_millis()).unwrap_or(u64::MAX);
            let operation = fault.during.map(|descriptor| descriptor.to_string());
            store(&mut found.operation, &operation.unwrap_or_default());
            store(&mut found.step, &fault.detail);
            store(&mut found.text, &fault.to_string());
        }
        // SAFETY: it is as long as its size says.
        unsafe { *failure = found };
        Ok(())
    })
}

fn kind(kind: FaultKind) -> c_int {
    match kind {
        FaultKind::Aborted => pleachFailureAborted,
        FaultKind::Mismatch => pleachFailureMismatch,
        FaultKind::Compute => pleachFailureCompute,
        FaultKind::OutOfReach => pleachFailureOutOfReach,
        FaultKind::Lost => pleachFailureLost,
        FaultKind::Left => pleachFailureLeft,
        FaultKind::TimedOut => pleachFailureTimedOut,
        FaultKind::Changed => pleachFailureChanged,
        _ => pleachFailureProtocol,
    }
}

/// Stores as much of a text as there is room for, and a zero byte.
pub(crate) fn store(room: &mut [c_char], text: &str) {
    let mut end = text.len().min(room.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (place, byte) in room.iter_mut().zip(text.as_bytes()[..end].iter().chain(&[0])) {
        *place = byte.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_are_too_long_end_between_two_characters() {
        let mut room = [1; 6];
        store(&mut room, "abcdéf");
        assert_eq!(room, [97, 98, 99, 100, 0, 1].map(|byte: i32| byte as c_char));
    }
}
