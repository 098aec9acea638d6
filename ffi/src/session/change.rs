//! What becomes of a step, and who left and came.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use pleach_collectives::Verdict;
use pleach_collectives::session::{Change, Process, Reason};

use super::{call, pleachSession_t};
use crate::failure::store;
use crate::result::{Failed, guarded, out, pleachResult_t};

/// All members have done the step: its results count.
pub const pleachVerdictCommitted: c_int = 1;
/// The step is repeated. Nobody applies its results.
pub const pleachVerdictRetry: c_int = 2;

/// Room for the text of a change, in bytes.
pub const PLEACH_CHANGE_BYTES: usize = 512;

/// The verdict of a step, which is the same on all members. Begin with PLEACH_VERDICT_INITIALIZER,
/// which sets `size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pleachVerdict_t {
    /// sizeof(pleachVerdict_t).
    pub size: usize,
    /// pleachVerdictCommitted or pleachVerdictRetry.
    pub kind: c_int,
    /// The number of members that have done the step, or that repeat it.
    pub members: c_int,
    /// The number of processes that have left; pleachSessionGetChange names them.
    pub left: c_int,
    /// The number of processes that have come; pleachSessionGetChange names them.
    pub came: c_int,
    /// The next step.
    pub step: u64,
    /// The number of the epoch in which the step was attempted.
    pub from: u64,
    /// The number of the epoch that goes on.
    pub epoch: u64,
    /// For pleachVerdictRetry who left and why, and who came, in words.
    pub text: [c_char; PLEACH_CHANGE_BYTES],
}

/// The processes that left, with the reason.
pub const pleachChangeLeft: c_int = 1;
/// The processes that came.
pub const pleachChangeCame: c_int = 2;
/// The members of the epoch that goes on, by rank.
pub const pleachChangeMembers: c_int = 3;

/// No reason: the process is a member.
pub const pleachReasonNone: c_int = 0;
/// The process has ended, as the kernel of its host says.
pub const pleachReasonDied: c_int = 1;
/// The process was not reached.
pub const pleachReasonUnreachable: c_int = 2;
/// The process has left, as it has announced.
pub const pleachReasonLeft: c_int = 3;
/// Another process has taken the seat.
pub const pleachReasonReplaced: c_int = 4;
/// Another process of its unit has left, for whichever reason.
pub const pleachReasonUnit: c_int = 5;
/// The process is a member, and the step is repeated because it failed there.
pub const pleachReasonFailed: c_int = 6;

/// A process of a session.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachMember_t {
    /// Its stable number. Processes that follow each other may have the same one.
    pub seat: c_int,
    /// Why it left, or in the list pleachChangeMembers why the step is repeated: one of the
    /// constants pleachReasonNone to pleachReasonFailed.
    pub reason: c_int,
    /// Random bits that tell the process from others on its seat.
    pub incarnation: u64,
    /// In the list pleachChangeMembers, for a member of both epochs: the messages of pleachSend
    /// from this process to it that it has not received when the epoch ended. No message crosses
    /// an epoch. Else 0.
    pub unreceivedTo: u64,
    /// As `unreceivedTo`, of the messages from it to this process. Both ends count the same.
    pub unreceivedFrom: u64,
}

/// A verdict for the caller. `attempt`: the epoch of the attempt, the number of its members, and
/// the next step.
pub(crate) fn told(
    size: usize,
    verdict: Verdict,
    (from, members, step): (u64, u32, u64),
) -> (pleachVerdict_t, Option<Arc<Change>>) {
    let mut told = pleachVerdict_t {
        size,
        kind: pleachVerdictCommitted,
        members: members as c_int,
        left: 0,
        came: 0,
        step,
        from,
        epoch: from,
        text: [0; PLEACH_CHANGE_BYTES],
    };
    let Verdict::Retry(change) = verdict else { return (told, None) };
    told.kind = pleachVerdictRetry;
    told.members = change.members.len() as c_int;
    (told.left, told.came) = (change.left.len() as c_int, change.came.len() as c_int);
    (told.step, told.from, told.epoch) = (change.step, change.from, change.epoch);
    store(&mut told.text, &change.to_string());
    (told, Some(change))
}

fn reason_of(reason: Reason) -> c_int {
    match reason {
        Reason::Died => pleachReasonDied,
        Reason::Unreachable => pleachReasonUnreachable,
        Reason::Left => pleachReasonLeft,
        Reason::Replaced => pleachReasonReplaced,
        Reason::Unit => pleachReasonUnit,
        Reason::Joined => pleachReasonNone,
        Reason::Failed => pleachReasonFailed,
    }
}

/// Stores the processes that a change names, in the order of their seats: one of the lists
/// pleachChangeLeft, pleachChangeCame and pleachChangeMembers. The change is that of the last call
/// on the session that has told one: pleachSessionCommit with pleachVerdictRetry, pleachSessionNext
/// where the members have changed since the step before, or any function that has returned
/// pleachExpelled. At most `capacity` processes are stored. `count` is set to the
/// length of the whole list.
///
/// Ownership: `members` has `capacity` elements, or is NULL for 0; `count` is NULL or points to a
/// size_t. Threads: any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if no call has told a change, another thread is in
/// a call on the session, or this process is a forked child; pleachInternalError after a mistake of
/// the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionGetChange(
    session: pleachSession_t,
    list: c_int,
    members: *mut pleachMember_t,
    capacity: usize,
    count: *mut usize,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let count = unsafe { out(count, "count") }?;
        if members.is_null() && capacity > 0 {
            return Err(Failed::argument("members is NULL, but capacity is not 0"));
        }
        call(session, |live| {
            let change = live.change.as_ref();
            let change = change.ok_or_else(|| Failed::usage("no call on this session has told a change"))?;
            let is_member = |process: &Process| (*process, pleachReasonNone);
            let found: Vec<(Process, c_int)> = match list {
                pleachChangeLeft => {
                    change.left.iter().map(|(process, reason)| (*process, reason_of(*reason))).collect()
                }
                pleachChangeCame => change.came.iter().map(is_member).collect(),
                pleachChangeMembers => {
                    let reason = |process| {
                        if change.failed.contains(process) { pleachReasonFailed } else { pleachReasonNone }
                    };
                    change.members.iter().map(|process| (*process, reason(process))).collect()
                }
                other => {
                    return Err(Failed::argument(format!(
                        "list is {other}; take a constant as pleachChangeLeft"
                    )));
                }
            };
            let unreceived = |process: Process| {
                // Of who left nothing is known, and who came has sent nothing.
                let found = change.unreceived.iter().find(|messages| messages.peer() == process);
                found.map_or((0, 0), |messages| (messages.to(), messages.from()))
            };
            for (at, (process, reason)) in found.iter().take(capacity).enumerate() {
                let (seat, incarnation) = (process.seat.0 as c_int, process.incarnation.0);
                let (unreceivedTo, unreceivedFrom) = unreceived(*process);
                let named =
                    pleachMember_t { seat, reason: *reason, incarnation, unreceivedTo, unreceivedFrom };
                // SAFETY: the list has room for `capacity` elements, and `at` is below `capacity`.
                unsafe { members.add(at).write(named) };
            }
            *count = found.len();
            Ok(())
        })
    })
}
