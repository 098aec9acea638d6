//! What the device and the peers tell.

use pleach_transport::{Event, Nanos};

use super::at::{NOBODY, run_of};
use super::bank;
use super::board::Answer;
use super::message::Verdict;
use super::{Engine, Phase};

impl Engine {
    /// Events of the device that somebody else polled.
    pub(crate) fn accept(&mut self, mut events: Vec<Event>, now: Nanos) {
        self.handle(&mut events, now);
    }

    pub(super) fn read_events(&mut self, now: Nanos) {
        let mut events = std::mem::take(&mut self.events);
        self.handle(&mut events, now);
        self.events = events;
    }

    pub(super) fn handle(&mut self, events: &mut Vec<Event>, now: Nanos) {
        for event in events.drain(..) {
            match event {
                Event::Done { id: NOBODY, .. } => {}
                Event::Connected { peer } => {
                    // Lost again already: that is told by its own event.
                    let _ = self.greet(peer);
                    self.connected[peer as usize] = true;
                    self.note_scratch();
                    if let Phase::Failing { talk, .. } = &mut self.phase {
                        talk.tell_again();
                    }
                }
                Event::Done { id, result: Ok(_) } => {
                    if matches!(self.phase, Phase::Active)
                        && let Some(run) = self.slots.get_mut(run_of(id)).and_then(|slot| slot.run.as_mut())
                    {
                        run.transfer_done(id);
                    }
                }
                // The loss behind it is told by its own event; a severed peer's transfers were
                // given up here.
                Event::Done { result: Err(error), id } => self.transfer_failed(id, &error, now),
                Event::PeerLost { peer, cause } => {
                    self.board.agreement().lose(peer);
                    let fault = self.fault_of_loss(peer, cause.kind(), cause.to_string(), None, now);
                    self.fail(fault, now);
                }
                Event::Departed { peer } => {
                    self.board.agreement().lose(peer);
                    self.left[peer as usize] = true;
                }
                Event::Severed { peer } => {
                    if let Phase::Failing { waiting_for, .. } = &mut self.phase {
                        waiting_for[peer as usize] = false;
                    }
                }
            }
        }
    }

    /// Has the lanes looked at whose signals have come, where the witness says in which signal
    /// slots.
    pub(super) fn hear_signals(&mut self) {
        let Some(witness) = &mut self.witness else { return };
        self.hears_all = witness.take_signalled(&mut self.noticed);
        for (from, signal_slot) in self.noticed.drain(..) {
            for slot in &self.order {
                if let Some(run) = &mut self.slots[usize::from(*slot)].run {
                    run.stir(from, signal_slot);
                }
            }
        }
    }

    pub(super) fn read_news(&mut self, now: Nanos) {
        let news = self.board.take_news();
        for (peer, slice) in news.scratch {
            if let Some(entry) = self.peer_scratch.get_mut(peer as usize)
                && slice.len == bank::scratch_bytes(self.ranks)
            {
                entry.get_or_insert(slice);
            }
        }
        self.note_scratch();
        for (peer, stream, theirs) in news.differs {
            self.compare(peer, stream, &theirs, now);
        }
        for (peer, standing) in news.standings {
            if let Some(fault) = self.read_standing(peer, &standing, now) {
                self.fail(fault, now);
            }
        }
        for answer in news.answers {
            let Answer { peer, stream, verdict, record, completed, .. } = answer;
            self.credits.hear(peer, stream, completed);
            if let Some(witness) = &mut self.witness {
                witness.heard_completed(peer, stream.to_word(), completed);
            }
            self.asked.remove(&peer);
            match verdict {
                Verdict::Different => self.compare(peer, stream, &record, now),
                Verdict::EarlierDiffers => self.ask_earlier(peer, stream, record.run),
                Verdict::Same | Verdict::NotYet | Verdict::Forgotten => {}
            }
            self.answers.insert(peer, answer);
        }
        if self.board.has_failed() {
            self.begin_failing(now);
        }
    }

    pub(super) fn note_scratch(&mut self) {
        if !self.is_ready() && self.not_ready().next().is_none() {
            self.peer_scratch_known = self.peer_scratch.iter().flatten().copied().collect();
        }
    }
}
