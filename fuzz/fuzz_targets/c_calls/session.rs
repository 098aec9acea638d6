//! Calls on windows and sessions.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use pleach_ffi::comm::pleachComm_t;
use pleach_ffi::pleachResult_t;
use pleach_ffi::session::change::*;
use pleach_ffi::session::memory::*;
use pleach_ffi::session::split::*;
use pleach_ffi::session::*;
use pleach_ffi::unique_id::{PLEACH_UNIQUE_ID_BYTES, pleachGetUniqueId, pleachUniqueId};
use pleach_ffi::window::*;

use super::{COUNT_MAX, HANDLES_MAX, Input, buffer};

/// Most sessions of a process: each has a thread.
const SESSIONS_MAX: usize = 16;

/// Windows, sessions and what they have stored, in the order of their making.
#[derive(Default)]
pub(crate) struct Handles {
    windows: Vec<pleachWindow_t>,
    sessions: Vec<pleachSession_t>,
    buffers: Vec<*mut c_void>,
}

unsafe extern "C" fn arrived(_arrival: *const pleachArrival_t, _context: *mut c_void) {}

/// A call on a window.
///
/// # Safety
///
/// As `call`.
pub(crate) unsafe fn window_call(
    input: &mut Input<'_>,
    handles: &mut Handles,
    comms: &[pleachComm_t],
) -> pleachResult_t {
    let which = input.byte() % 9;
    let window = input.handle(&handles.windows);
    let (peer, slot) = (input.number(), input.number());
    let (first, count) = (usize::from(input.byte()), usize::from(input.byte()));
    let (data, mut version, mut is_free, mut come) = (buffer(input), 0, 0, 0);
    let mut word = pleachWord_t { bytes: [input.byte(); PLEACH_WORD_BYTES] };
    let given = if input.byte() % 2 == 0 { null() } else { &raw const word };
    unsafe {
        match which {
            0 if handles.windows.len() < HANDLES_MAX => {
                let (mut made, kind, comm) = (null_mut(), input.byte() % 40, input.handle(comms));
                // Buffers of calls are as long as the longest window.
                let result = pleachWindowInit(&mut made, count.min(COUNT_MAX), kind.into(), slot, comm);
                handles.windows.push(made);
                result
            }
            1 => pleachWindowPublish(window, data, given, &mut version),
            2 => pleachWindowRead(window, peer, first, count, data, &mut version, &mut word),
            3 => pleachWindowReadTorn(window, peer, first, count, data, &mut version),
            4 => pleachWindowIsFree(window, peer, slot, &mut is_free),
            5 => pleachWindowWrite(window, peer, slot, data, count, given),
            6 => pleachWindowPoll(window, u64::from(input.byte() % 2), Some(arrived), data, &mut come),
            7 => pleachWindowFinalize(window),
            _ => pleachWindowDestroy(window),
        }
    }
}

/// A call on a session of one process.
///
/// # Safety
///
/// As `call`.
pub(crate) unsafe fn session_call(
    input: &mut Input<'_>,
    handles: &mut Handles,
    comms: &mut Vec<pleachComm_t>,
) -> pleachResult_t {
    let which = input.byte() % 18;
    let session = input.handle(&handles.sessions);
    let names = [c"a", c"b", c"", c"\xff"];
    let name = names.get(usize::from(input.byte() % 5)).map_or(null(), |name| name.as_ptr());
    let (count, kind) = (usize::from(input.byte()), u32::from(input.byte() % 40));
    let (mut data, mut step, mut comm) = (null_mut(), 0, null_mut());
    let is_room = handles.sessions.len() < SESSIONS_MAX;
    unsafe {
        match which {
            0 | 1 if is_room => {
                let mut elastic = std::mem::zeroed::<pleachElastic_t>();
                elastic.size = size_of::<pleachElastic_t>() - usize::from(input.byte() % 8 == 1);
                (elastic.fewest, elastic.most) = (u32::from(input.byte() % 3), u32::from(input.byte() % 3));
                let elastic = if input.byte() % 4 == 1 { null() } else { &raw const elastic };
                let mut made = null_mut();
                let result = if which == 0 {
                    pleachSessionJoinFromEnv(&mut made, elastic, null())
                } else {
                    let mut id = pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] };
                    pleachGetUniqueId(&mut id);
                    let (ranks, rank) = (i32::from(input.byte() % 2), input.number().min(1));
                    pleachSessionJoin(&mut made, ranks, id, rank, elastic, null())
                };
                handles.sessions.push(made);
                result
            }
            2 => pleachSessionState(session, name, count, kind, &mut data),
            3 => pleachSessionGetState(session, name, &mut data),
            4 if handles.buffers.len() < HANDLES_MAX => {
                let result = pleachSessionBuffer(session, count, &mut data);
                handles.buffers.push(data);
                result
            }
            5 => pleachSessionFreeBuffer(session, input.handle(&handles.buffers)),
            6..=8 => {
                let result = pleachSessionNext(session, &mut step, &mut comm);
                if comms.len() < HANDLES_MAX {
                    comms.push(comm);
                }
                result
            }
            9 | 10 => {
                let mut verdict = std::mem::zeroed::<pleachVerdict_t>();
                verdict.size = size_of::<pleachVerdict_t>() - usize::from(input.byte() % 8 == 1);
                pleachSessionCommit(session, i32::from(input.byte() % 2), &mut verdict)
            }
            11 => {
                let (list, mut found) = (input.number(), 0);
                let mut member =
                    pleachMember_t { seat: 0, reason: 0, incarnation: 0, unreceivedTo: 0, unreceivedFrom: 0 };
                pleachSessionGetChange(session, list, &mut member, count % 2, &mut found)
            }
            12 => pleachSessionAudit(session),
            13 => {
                let mut info = std::mem::zeroed::<pleachSessionInfo_t>();
                info.size = size_of::<pleachSessionInfo_t>() - usize::from(input.byte() % 2);
                pleachSessionGetInfo(session, &mut info)
            }
            // Of signals that the process does not need.
            14 => pleachSessionLeaveOn(session, 10 + i32::from(input.byte() % 2) * 2),
            15 => {
                let (colours, mut split) = ([input.number(), input.number()], 0);
                pleachSessionSplit(session, colours.as_ptr(), count % 3, &mut split)
            }
            16 => {
                let result = pleachSessionGetSplit(session, input.number(), &mut comm);
                if comms.len() < HANDLES_MAX {
                    comms.push(comm);
                }
                result
            }
            _ => match input.byte() % 3 {
                0 => pleachSessionLeaveAfterStep(session),
                1 => pleachSessionLeave(session),
                _ => pleachSessionDestroy(session),
            },
        }
    }
}
