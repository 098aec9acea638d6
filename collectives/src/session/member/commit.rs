//! The two rounds of a commit, as two calls of the epoch's group.
//!
//! A member that is ready says so to all, and who has heard this of all says that it knows
//! (`pleach-membership`, `commit`). Nobody goes on before it has heard both of all. That is an
//! all-gather and a barrier: they go the way of the data, so a commit costs two short calls of the
//! group, and wakes no thread. Messages over the control streams say the same, but each takes two
//! switches of threads at its receiver. The state machine's tick still sends them. In a step behind
//! which states are read only messages are sent, as the group refuses an all-gather then, and so
//! where the group works on a GPU's memory, as the words of the rounds are in the host's.
//!
//! **Invariant:** a call of the group begins only where the state machine would send the message
//! for which it stands, and what has come with it is heard as that message, in any order with
//! others. So all that holds of messages holds of the calls. If a call fails, its messages are
//! lost.
//!
//! A call of an epoch's group ends with the epoch, also after a fault of its own. So who waits in
//! such a call is freed by whatever ends the epoch: a record, or that this process gives up.

use std::cell::RefCell;
use std::sync::Arc;

use pleach_membership::{Input, Message, Record};
use pleach_transport::clock;

use super::{Member, State};
use crate::group::{CollectiveError, Group};

/// Distinguishes these calls from the program's.
const COMMIT_MARK: u32 = 0x636f_6d6d;

/// The first round of this process, which a call of the group says in the place of messages.
#[derive(Clone, Copy)]
pub(super) struct Ready {
    step: u64,
    /// The epoch ends with it.
    halts: bool,
}

/// What the calls of a commit ask while they wait, on the thread that makes them.
#[derive(Clone)]
struct Asked {
    interrupted: fn() -> bool,
    member: Arc<Member>,
}

thread_local! {
    static ASKED: RefCell<Option<Asked>> = const { RefCell::new(None) };
}

/// Asks whether the call was interrupted. If so, this process gives up, which ends the epoch and
/// the call with it: an abort of the group would wait for the others.
fn give_up_if_interrupted() -> bool {
    let asked = ASKED.with_borrow(Clone::clone);
    if let Some(asked) = asked.filter(|asked| (asked.interrupted)()) {
        ASKED.take();
        asked.member.was_interrupted();
    }
    false
}

/// Makes calls of a group of the session itself, which ask whether they were interrupted.
pub(crate) fn while_asking<T>(member: &Arc<Member>, group: Group, calls: impl FnOnce(&Group) -> T) -> T {
    let Some(interrupted) = member.lock().interrupted else { return calls(&group) };
    ASKED.set(Some(Asked { interrupted, member: Arc::clone(member) }));
    let outcome = calls(&group.interrupted_by(give_up_if_interrupted));
    ASKED.take();
    outcome
}

/// This process is ready with the step that it has begun in the epoch of this record and group.
pub(crate) fn ready(member: &Arc<Member>, record: &Record, group: &Group) {
    let mut state = member.lock();
    // Quick steps may leave the session's thread no time to see a signal.
    member.leave_if_told(&mut state);
    if !group.commits_by_calls() {
        return member.tell(&mut state, Input::Ready);
    }
    state.quiet = Some(None);
    member.tell(&mut state, Input::Ready);
    let said = state.quiet.take().flatten();
    drop(state);
    let Some(ready) = said else { return };
    let group = group.tagged_further(COMMIT_MARK);
    match while_asking(member, group, |group| make_rounds(member, record, group, ready)) {
        // An error is that of the epoch, which has ended.
        Ok(()) | Err(CollectiveError::Failed(_)) => {}
        // The program has closed the group: messages remain.
        Err(CollectiveError::Closed) => member.repeat(),
        // The others wait in the call that this process could not make.
        Err(_) => member.tell(&mut member.lock(), Input::Failed),
    }
}

fn make_rounds(member: &Member, record: &Record, group: &Group, own: Ready) -> Result<(), CollectiveError> {
    let (epoch, Ready { step, halts }) = (record.number(), own);
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
    if state.newest() != Some(record.number()) {
        return; // The epoch is over.
    }
    state.quiet = Some(None);
    for (rank, from) in record.members().iter().enumerate().filter(|(_, from)| **from != member.process) {
        member.on(&mut state, Input::Message { from: *from, message: message(rank) }, clock::now());
    }
    state.quiet = None;
    member.send(&mut state);
    member.wake_if_due(&state);
}

/// Keeps a message back that a call of the group says. Returns whether it is one.
pub(super) fn keeps_back(state: &mut State, message: &Message) -> bool {
    let Some(kept) = &mut state.quiet else { return false };
    match *message {
        Message::Ready { step, halts, .. } => *kept = Some(Ready { step, halts }),
        Message::Knows { .. } => {}
        _ => return false,
    }
    true
}
