//! Whose turn it is: runs are admitted in the order of their calls, advanced, and completed.

use pleach_transport::Nanos;

use super::bank::{self, Class};
use super::fault::Fault;
use super::ground::Ground;
use super::stream::Stream;
use super::{Engine, QUERY_AFTER, SlotOfRun, State};

impl Engine {
    pub(super) fn advance_runs(&mut self, now: Nanos) -> bool {
        if !self.is_ready() {
            return false;
        }
        self.blocked = None;
        if self.gates > 0 && !self.look_at_gates(now) {
            return true;
        }
        if self.priorities.matter() {
            return self.advance_by_priority(now);
        }
        let mut moved = false;
        let mut index = 0;
        let mut may_admit = true;
        while index < self.order.len() {
            let slot = self.order[index];
            if self.admit(index, &mut may_admit) == State::Active {
                match self.advance(slot, now) {
                    Ok(true) => moved = true,
                    Ok(false) => {}
                    Err(fault) => {
                        self.fail(*fault, now);
                        return true;
                    }
                }
                if self.slots[usize::from(slot)].state == State::Finished {
                    self.order.remove(index);
                    self.note_completed();
                    continue;
                }
            }
            index += 1;
        }
        moved
    }

    /// Admits a run, by its place in the order, if its turn has come. `may_admit`: whether that of
    /// the collectives has.
    pub(super) fn admit(&mut self, index: usize, may_admit: &mut bool) -> State {
        let slot = usize::from(self.order[index]);
        let entry = &self.slots[slot];
        if entry.state != State::Queued {
            return entry.state;
        }
        let Some(run) = &entry.run else { unreachable!("an ordered slot holds a run") };
        let stream = run.stream();
        let is_free = match stream {
            _ if entry.gate.is_some() => false,
            Stream::Collectives => *may_admit && self.completed >= run.parameters.bank.needed,
            // One message of a pair at a time; earlier ones stand earlier in the order.
            stream => !has_earlier(&self.slots, &self.order[..index], stream),
        };
        if is_free {
            self.slots[slot].state = State::Active;
        } else {
            *may_admit &= stream != Stream::Collectives;
        }
        self.slots[slot].state
    }

    pub(super) fn advance(&mut self, slot: u8, now: Nanos) -> Result<bool, Box<Fault>> {
        let elapsed_ns = self.elapsed_ns(slot, now);
        let entry = &mut self.slots[usize::from(slot)];
        let (Some(run), Some(scratch)) = (&mut entry.run, &self.scratch) else {
            unreachable!("an active slot holds a run, and a group that works has scratch")
        };
        let mut ground = Ground {
            device: &mut *self.device,
            compute: &mut *self.compute,
            signal_slots: &self.signal_slots,
            consumed: &mut self.consumed,
            credits: &mut self.credits,
            scratch,
            peer_scratch: &self.peer_scratch_known,
            completed: self.completed,
            witness: self.witness.as_deref_mut(),
            blocked: &mut self.blocked,
            hears_all: self.hears_all,
            now,
            elapsed_ns,
        };
        let moved = match run.advance(&mut ground) {
            Ok(moved) => moved,
            Err(trouble) => return Err(Box::new(self.fault_of(slot, &trouble, now))),
        };
        if elapsed_ns > 0 && !run.is_complete() {
            run.look_for_arrivals(&ground);
        }
        entry.has_moved |= moved;
        if run.is_complete() {
            entry.state = State::Finished;
            run.release();
            if entry.query_interval > QUERY_AFTER {
                self.board.block_on(None);
            }
            let (stream, number, class) = (run.stream(), run.parameters.number, run.plan().class);
            if stream == Stream::Collectives {
                self.note_completed_run(slot, number, class);
            } else {
                self.note_completed_message(stream, number);
            }
            self.note_ended(slot, now);
        }
        if moved {
            self.note_moved(slot);
        }
        Ok(moved)
    }

    /// Tells those who wrote to this rank that their bank is free again, where no signal of a run
    /// is certain to: where this rank is silent towards them, and where other runs are under way
    /// already, whose signals may all have gone out before.
    pub(super) fn note_completed_run(&mut self, slot: u8, number: u64, class: Class) {
        if !bank::credit_is_due(class, number) {
            return;
        }
        // Without a gap: earlier runs may be under way still, and then their banks are not free.
        let unfinished = self.first_unfinished(Some(slot));
        let Some(run) = &self.slots[usize::from(slot)].run else { return };
        let program = run.plan().program.clone();
        let is_alone = unfinished == self.next_run;
        let peers = if is_alone { &program.silent_to } else { &program.heard };
        self.tell_progress(Stream::Collectives, peers, unfinished);
    }

    /// Number of the first collective that is not complete.
    #[inline]
    pub(super) fn first_unfinished(&self, except: Option<u8>) -> u64 {
        let unfinished = self.order.iter().filter(|slot| Some(**slot) != except).filter_map(|slot| {
            let run = self.slots[usize::from(*slot)].run.as_ref()?;
            (run.stream() == Stream::Collectives).then_some(run.parameters.number)
        });
        unfinished.min().unwrap_or(self.next_run)
    }

    pub(super) fn note_completed(&mut self) {
        self.completed = if self.order.is_empty() { self.next_run } else { self.first_unfinished(None) };
        if let Some(witness) = &mut self.witness {
            witness.completed(Stream::Collectives.to_word(), self.completed);
        }
        self.board.collectives().complete(self.completed);
    }
}

/// Whether an earlier run of the stream is unfinished.
fn has_earlier(slots: &[SlotOfRun], earlier: &[u8], stream: Stream) -> bool {
    earlier
        .iter()
        .any(|slot| slots[usize::from(*slot)].run.as_ref().is_some_and(|run| run.stream() == stream))
}
