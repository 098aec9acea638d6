//! The commit of a step, in two rounds.
//!
//! A member that is done with a step says [`Message::Ready`] to all. A member that has heard this
//! of all members *knows* the step, and says [`Message::Knows`]. A member that has heard this of
//! all is *told* that the step is committed, and may begin the next one.
//!
//! **Invariant:** when a member is told of a step, every member knows the step. So whichever
//! members are asked for the next record, each of them knows, and the record says that the step is
//! committed. Members that know different numbers of steps differ by one.
//!
//! A planned change waits for the edge of a step: who has heard of one says so in its `Ready`. A
//! member knows a step only when it has heard all of these messages, so all members that know the
//! step know that the epoch ends with it. None begins another step, and none has to repeat one.

use crate::message::Message;
use crate::mutant::Mutant;

/// The steps of one member in one epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepCommit {
    /// The epoch's number.
    epoch: u64,
    /// The rank of this member.
    rank: usize,
    /// The step that is next or under way; this member was told of all before.
    step: u64,
    is_begun: bool,
    /// By rank: the first step for which that member has not been heard to be ready.
    ready: Vec<u64>,
    /// By rank: the first step that that member has not been heard to know.
    known: Vec<u64>,
    /// The step after which the epoch ends, where one has been announced.
    halt: Option<u64>,
    /// Whether this member announced that in its last `Ready`.
    announces_halt: bool,
}

impl StepCommit {
    pub(crate) fn new(epoch: u64, rank: usize, members: usize, step: u64) -> Self {
        let (ready, known) = (vec![step; members], vec![step; members]);
        Self { epoch, rank, step, is_begun: false, ready, known, halt: None, announces_halt: false }
    }

    /// The step that is next or under way.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// The first step that this member does not know to be ready everywhere.
    pub(crate) fn known(&self) -> u64 {
        self.known[self.rank]
    }

    /// The step that was begun and whose verdict is not known.
    pub(crate) fn begun(&self) -> Option<u64> {
        self.is_begun.then_some(self.step)
    }

    /// Whether the epoch's last step is over.
    pub(crate) fn is_halted(&self) -> bool {
        self.halt.is_some_and(|last| self.step > last)
    }

    /// Begins the next step; `None` when one is under way or the epoch's last one is over.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        if self.is_begun || self.is_halted() {
            return None;
        }
        self.is_begun = true;
        Some(self.step)
    }

    /// Whether this member has said that it is ready with the step under way.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready[self.rank] > self.step
    }

    /// Whether a member has said that it is ready with the step under way.
    pub(crate) fn is_ready_at(&self, rank: usize) -> bool {
        self.ready[rank] > self.step
    }

    /// This member is ready with the step that it has begun. `halts`: a planned change waits.
    pub(crate) fn ready(&mut self, halts: bool) -> Option<Message> {
        if !self.is_begun || self.is_ready() {
            return None;
        }
        self.announces_halt = halts;
        self.heard_ready(self.rank, self.step, halts);
        Some(self.ready_message())
    }

    fn ready_message(&self) -> Message {
        Message::Ready { epoch: self.epoch, step: self.ready[self.rank] - 1, halts: self.announces_halt }
    }

    pub(crate) fn heard_ready(&mut self, rank: usize, step: u64, halts: bool) {
        if step > self.step + 1 {
            return; // No member is ahead by more.
        }
        self.ready[rank] = self.ready[rank].max(step + 1);
        if halts {
            self.halt = Some(step);
        }
    }

    pub(crate) fn heard_knows(&mut self, rank: usize, step: u64) {
        if step <= self.step + 1 {
            self.known[rank] = self.known[rank].max(step + 1);
        }
    }

    /// Takes the next round where all have been heard: a message for all members.
    pub(crate) fn learn_ready(&mut self) -> Option<Message> {
        let all_are_ready = self.ready.iter().all(|ready| *ready > self.step);
        if !all_are_ready || self.known() > self.step {
            return None;
        }
        self.known[self.rank] = self.step + 1;
        Some(Message::Knows { epoch: self.epoch, step: self.step })
    }

    /// The step of which this member is now told that it is committed.
    pub(crate) fn tell(&mut self, mutant: Option<Mutant>) -> Option<u64> {
        let knows = |known: &u64| *known > self.step;
        let is_told = if mutant == Some(Mutant::ToldByOne) {
            self.known.iter().any(knows)
        } else {
            self.known.iter().all(knows)
        };
        if !is_told || !self.is_begun {
            return None;
        }
        self.is_begun = false;
        self.step += 1;
        Some(self.step - 1)
    }

    /// What this member has said last, for those who have not heard it.
    pub(crate) fn repeat(&self, first: u64) -> Vec<Message> {
        let mut messages = Vec::new();
        if self.ready[self.rank] > first {
            messages.push(self.ready_message());
        }
        if self.known() > first {
            messages.push(Message::Knows { epoch: self.epoch, step: self.known() - 1 });
        }
        messages
    }
}
