//! Parts of the members that come back in each epoch.

use std::ffi::c_int;

use pleach_collectives::SessionError;
use pleach_collectives::session::{Process, Split};

use super::{EpochComm, Live, call, pleachSession_t};
use crate::comm::{PLEACH_SPLIT_NOCOLOR, pleachComm_t};
use crate::result::{Failed, guarded, input, out, pleachResult_t};

/// A split, and the communicator of this process's part in the epoch in which it was asked for.
pub(crate) struct Part {
    split: Split,
    comm: Option<EpochComm>,
}

impl Part {
    /// The epoch has ended.
    pub(crate) fn end(&mut self) {
        self.comm = None;
    }

    /// The communicator, if the caller has asked for it.
    pub(crate) fn comm(&self) -> Option<&EpochComm> {
        self.comm.as_ref()
    }
}

/// The colour of a member, where each seat has one.
fn colour(colours: &[c_int], member: Process) -> Option<u32> {
    let colour = colours.get(member.seat.0 as usize).copied();
    colour.and_then(|colour| u32::try_from(colour).ok())
}

/// Divides the members of each epoch, from the next step on: those whose seats have the same colour
/// form a communicator, in the order of their seats. Stores the number of the split, for
/// pleachSessionGetSplit. All members make the same splits between the same two steps. A process
/// that joins makes the splits that the others have made, before its first step.
///
/// Ownership: `colors` has `count` elements, which are read before the function returns: a colour
/// of 0 or more for each seat, or PLEACH_SPLIT_NOCOLOR. Seats from `count` on have none. It is NULL
/// if `count` is 0. `split` is NULL or points to an int. Threads: any; a call of a second thread at
/// the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, or an argument cannot
/// be right; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if a step has begun,
/// another thread is in a call on the session, or this process has left it or is a forked child;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionSplit(
    session: pleachSession_t,
    colors: *const c_int,
    count: usize,
    split: *mut c_int,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let split = unsafe { out(split, "split") }?;
        *split = -1;
        let given: &[c_int] = match count {
            0 => &[],
            count => {
                // SAFETY: the caller's promise.
                unsafe { input(colors, "colors") }?;
                // SAFETY: it is not NULL, and the caller promises so many elements.
                unsafe { std::slice::from_raw_parts(colors, count) }
            }
        };
        if let Some(wrong) = given.iter().find(|colour| **colour < PLEACH_SPLIT_NOCOLOR) {
            return Err(Failed::argument(format!(
                "a color is {wrong}; take 0 or more, or PLEACH_SPLIT_NOCOLOR"
            )));
        }
        let colours = given.to_vec();
        call(session, |live| {
            let made = live.expect_no_step()?.split(move |member| colour(&colours, member));
            *split = live.parts.len() as c_int;
            live.parts.push(Part { split: made, comm: None });
            Ok(())
        })
    })
}

/// Stores the communicator of this process's part in the epoch of the step that has begun: NULL if
/// its seat has no colour, or a process reads the states during this step (pleachHealHidden).
///
/// Ownership: `comm` is NULL or points to a pleachComm_t. The communicator stays the session's, and
/// ends as that of pleachSessionNext. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session or split, or `comm` is
/// NULL; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if no step has begun,
/// there are 65536 communicators already, another thread is in a call on the session, or this
/// process has left it or is a forked child; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionGetSplit(
    session: pleachSession_t,
    split: c_int,
    comm: *mut pleachComm_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let comm = unsafe { out(comm, "comm") }?;
        *comm = std::ptr::null_mut();
        call(session, |live| {
            let Live { parts, session, .. } = live;
            let session = session.as_deref().ok_or_else(super::left)?;
            let number = usize::try_from(split).ok();
            let part = number.and_then(|number| parts.get_mut(number));
            let part = part.ok_or_else(|| Failed::argument(format!("this session has no split {split}")))?;
            let epoch = session.attempted_epoch().ok_or_else(|| Failed::from(SessionError::NotBegun))?;
            if let Some(known) = part.comm.as_ref().filter(|known| known.is_of(epoch)) {
                *comm = known.handle();
                return Ok(());
            }
            part.comm = None;
            if let Some(group) = part.split.group() {
                let made = EpochComm::new(epoch, group)?;
                *comm = made.handle();
                part.comm = Some(made);
            }
            Ok(())
        })
    })
}
