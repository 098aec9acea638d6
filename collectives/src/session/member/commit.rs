//! The two rounds of a commit, as two calls of the epoch's group.
//!
//! A member that is ready says so to all, and who has heard this of all says that it knows
//! (`pleach-membership`, `commit`). Nobody goes on before it has heard both of all. That is an
//! all-gather and a barrier: they go the way of the data, so a commit costs two short calls of the
//! group, and wakes no thread. Messages over the control streams say the same, but each takes two
//! switches of threads at its receiver. They are sent only by the state machine's tick, to members
//! that have waited that long.
//!
//! **Invariant:** a call of the group begins only where the state machine would send the message
//! for which it stands, and what has come with it is heard as that message, in any order with
//! others. So all that holds of messages holds of the calls. A call that fails is messages that are
//! lost: the epoch ends, and the next record has the verdict.

use std::cell::Cell;

use pleach_membership::{Input, Message, Record};
use pleach_transport::clock;

use super::{Member, State};
use crate::group::CollectiveError;
use crate::session::{Epoch, Session};

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

impl Session {
    /// This process is ready with the step that it has begun.
    pub(crate) fn ready(&self) {
        let mut state = self.member.lock();
        let interrupted = state.interrupted;
        let said = self.member.ready(&mut state);
        drop(state);
        let (Some((step, halts)), Some(epoch)) = (said, &self.epoch) else { return };
        ASKED.set(interrupted);
        // An error is that of the epoch, which ends.
        let _ = self.make_rounds(epoch, step, halts, interrupted.map(|_| is_interrupted as fn() -> bool));
        if IS_INTERRUPTED.take() {
            self.member.was_interrupted();
        }
    }

    fn make_rounds(
        &self,
        epoch: &Epoch,
        step: u64,
        halts: bool,
        interrupted: Option<fn() -> bool>,
    ) -> Result<(), CollectiveError> {
        let (record, number) = (&epoch.record, epoch.record.number());
        let group = epoch.group.tagged_further(COMMIT_MARK);
        let group = if let Some(asked) = interrupted { group.interrupted_by(asked) } else { group };
        let mut all = vec![0; record.members().len()];
        group.all_gather(&[u8::from(halts)], &mut all)?;
        self.member.heard(record, |rank| Message::Ready { epoch: number, step, halts: all[rank] != 0 });
        if !self.member.lock().membership.participant().knows(number, step) {
            return Ok(()); // It has promised to go no further.
        }
        group.barrier()?;
        self.member.heard(record, |_| Message::Knows { epoch: number, step });
        Ok(())
    }
}

impl Member {
    /// Tells the state machine that the step is ready. Returns the step, and whether the epoch ends
    /// with it, where others are to be told so.
    fn ready(&self, state: &mut State) -> Option<(u64, bool)> {
        state.quiet = Some(None);
        self.tell(state, Input::Ready);
        state.quiet.take().flatten()
    }

    /// A call of the group has brought this from each of the others.
    fn heard(&self, record: &Record, message: impl Fn(usize) -> Message) {
        let mut state = self.lock();
        state.quiet = Some(None);
        for (rank, from) in record.members().iter().enumerate().filter(|(_, from)| **from != self.process) {
            self.on(&mut state, Input::Message { from: *from, message: message(rank) }, clock::now());
        }
        state.quiet = None;
        self.wake_if_due(&state);
    }
}

impl State {
    /// Whether this is said by a call of the group instead.
    pub(super) fn keeps_quiet(&mut self, message: &Message) -> bool {
        match (message, &mut self.quiet) {
            (Message::Ready { step, halts, .. }, Some(ready)) => *ready = Some((*step, *halts)),
            (Message::Knows { .. }, Some(_)) => {}
            _ => return false,
        }
        true
    }
}
