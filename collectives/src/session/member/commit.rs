//! The two rounds of a commit, as two calls of the epoch's group.
//!
//! A member that is ready says so to all, and who has heard this of all says that it knows
//! (`pleach-membership`, `commit`). Nobody goes on before it has heard both of all. That is an
//! all-gather and a barrier: they go the way of the data, so a commit costs two short calls of the
//! group, and wakes no thread. Messages over the control streams say the same, but each takes two
//! switches of threads at its receiver. They are sent only by the state machine's tick, to members
//! that have waited that long, and in a step behind which states are read: groups gather nothing
//! then.
//!
//! **Invariant:** a call of the group begins only where the state machine would send the message
//! for which it stands, and what has come with it is heard as that message, in any order with
//! others. So all that holds of messages holds of the calls. A call that fails is messages that are
//! lost: the epoch ends, and the next record has the verdict.

use std::cell::Cell;

use pleach_membership::{Input, Message, Record};
use pleach_transport::clock;

use super::{Member, State};
use crate::group::{CollectiveError, Group};

/// Distinguishes these calls from the program's.
const COMMIT_MARK: u32 = 0x636f_6d6d;

thread_local! {
    /// What the calls of a commit ask, on the thread that makes them.
    static ASKED: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
    /// Whether the answer was true. The calls end with this error, or that of another fault.
    static IS_INTERRUPTED: Cell<bool> = const { Cell::new(false) };
}

fn is_interrupted() -> bool {
    if ASKED.get().is_some_and(|asked| asked()) {
        IS_INTERRUPTED.set(true);
    }
    IS_INTERRUPTED.get()
}

/// This process is ready with the step that it has begun in the epoch of this record and group.
pub(crate) fn ready(member: &Member, record: &Record, group: &Group) {
    let mut state = member.lock();
    if group.contributors() < group.world_size() {
        return member.tell(&mut state, Input::Ready);
    }
    state.quiet = Some(None);
    member.tell(&mut state, Input::Ready);
    let said = state.quiet.take().flatten();
    let interrupted = state.interrupted;
    drop(state);
    let Some((step, halts)) = said else { return };
    let mut group = group.tagged_further(COMMIT_MARK);
    if interrupted.is_some() {
        ASKED.set(interrupted);
        group = group.interrupted_by(is_interrupted);
    }
    // An error is that of the epoch, which ends.
    let _ = make_rounds(member, record, &group, step, halts);
    if IS_INTERRUPTED.take() {
        member.was_interrupted();
    }
}

fn make_rounds(
    member: &Member,
    record: &Record,
    group: &Group,
    step: u64,
    halts: bool,
) -> Result<(), CollectiveError> {
    let epoch = record.number();
    let mut all = vec![0; record.members().len()];
    group.all_gather(&[u8::from(halts)], &mut all)?;
    hear(member, record, |rank| Message::Ready { epoch, step, halts: all[rank] != 0 });
    if !member.lock().membership.participant().knows(epoch, step) {
        return Ok(()); // It has promised to go no further.
    }
    group.barrier()?;
    hear(member, record, |_| Message::Knows { epoch, step });
    Ok(())
}

/// A call of the group has brought this from each of the others.
fn hear(member: &Member, record: &Record, message: impl Fn(usize) -> Message) {
    let mut state = member.lock();
    state.quiet = Some(None);
    for (rank, from) in record.members().iter().enumerate().filter(|(_, from)| **from != member.process) {
        member.on(&mut state, Input::Message { from: *from, message: message(rank) }, clock::now());
    }
    state.quiet = None;
    member.wake_if_due(&state);
}

/// Whether a call of the group says this instead.
pub(super) fn keeps_quiet(state: &mut State, message: &Message) -> bool {
    match (message, &mut state.quiet) {
        (Message::Ready { step, halts, .. }, Some(ready)) => *ready = Some((*step, *halts)),
        (Message::Knows { .. }, Some(_)) => {}
        _ => return false,
    }
    true
}
