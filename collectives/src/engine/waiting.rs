//! Where a run is, and whom it waits for: for those who ask.

use pleach_transport::Signals;
use pleach_vocabulary::Rank;

use super::at::At;
use super::credit::Credits;
use super::header::Header;
use super::program::{OpProgram, PutProgram};
use super::run::{Run, Site};

/// What this rank has of its peers, also what no run has looked at yet.
pub(super) struct Heard<'a> {
    pub(super) credits: &'a Credits,
    /// By rank; empty for this rank.
    pub(super) signal_slots: &'a [Signals],
    /// By rank and signal slot: how many signals were consumed.
    pub(super) consumed: &'a [Vec<u64>],
}

impl Run {
    /// Chunks under way: lane, slot, chunk, next step.
    pub(super) fn under_way(&self, found: &mut dyn FnMut(u32, u32, u32, u32)) {
        let window = self.plan().program.window;
        for (lane, state) in (0..).zip(&self.lanes) {
            for chunk in state.first..state.next {
                let slot = chunk % window;
                let instance = self.instances[(lane * window + slot) as usize];
                found(lane, slot, chunk, instance.program_counter);
            }
        }
    }

    /// The peers without whose next signals this run does not go on.
    pub(super) fn needs_signal(&self, found: &mut dyn FnMut(Rank)) {
        let program = &*self.plan().program;
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            for chunk in state.first..state.next {
                let slot = chunk % program.window;
                let instance = self.instances[lane_number * program.window as usize + slot as usize];
                if instance.program_counter < lane.steps
                    && let OpProgram::Wait { from, .. } =
                        program.steps[(lane.first_step + instance.program_counter) as usize].op
                {
                    found(from);
                }
            }
        }
    }

    /// What lies in the signal slot of a wait and was not consumed: the signal that the wait is
    /// for, or one of another call.
    fn header_in(&self, heard: &Heard<'_>, site: Site<'_>, from: Rank, signal_slot: u32) -> Option<Header> {
        let signal_slot = self.signal_slot(self.parameters.bank.wait_base, signal_slot, site);
        let signal_slots = &heard.signal_slots[from as usize];
        let has_come =
            signal_slots.count(signal_slot) != heard.consumed[from as usize][usize::from(signal_slot)];
        has_come.then(|| Header::decode(&signal_slots.payload(signal_slot)))
    }

    /// Whether the signal that a wait is for is there: one of this call, which the run takes when
    /// it is looked at.
    fn is_there(&self, heard: &Heard<'_>, site: Site<'_>, from: Rank, signal_slot: u32) -> bool {
        let header = self.header_in(heard, site, from, signal_slot);
        header.is_some_and(|header| self.is_of_this_call(site.plan, from, &header))
    }

    /// Whether a signal of the peer says that its call of this run's number is another one than
    /// this run's.
    pub(super) fn differs_by_signal(&self, heard: &Heard<'_>, peer: Rank) -> bool {
        let plan = &**self.plan();
        let mut differs = false;
        self.under_way(&mut |lane_number, slot, chunk, step| {
            let lane = &plan.program.lanes[lane_number as usize];
            if step < lane.steps
                && let OpProgram::Wait { from, signal_slot, .. } =
                    plan.program.steps[(lane.first_step + step) as usize].op
                && from == peer
            {
                let site = Site { plan, lane, at: At { lane: lane_number, slot, step }, chunk };
                differs |= self.header_in(heard, site, from, signal_slot).is_some_and(|header| {
                    header.run == self.parameters.number && !self.is_of_this_call(plan, from, &header)
                });
            }
        });
        differs
    }

    /// The peers whose doing this run waits for, each with the step in words. Not those that have
    /// done it and to whom this run has not come since, as others of a higher priority went first.
    pub(super) fn waits_for(&self, heard: &Heard<'_>, found: &mut dyn FnMut(Rank, &dyn Fn() -> String)) {
        let plan = &**self.plan();
        let program = &*plan.program;
        for (lane_number, lane) in program.lanes.iter().enumerate() {
            let state = self.lanes[lane_number];
            for chunk in state.first..state.next {
                let slot = chunk % program.window;
                let instance = self.instances[lane_number * program.window as usize + slot as usize];
                let mut tell = |step: u32, peer: Rank, what: &str| {
                    found(peer, &|| {
                        let block = lane.block_id;
                        format!("{what}, block {block} chunk {chunk} lane {lane_number} step {step}")
                    });
                };
                for step in 0..instance.program_counter.min(lane.steps) {
                    let at = At { lane: lane_number as u32, slot, step };
                    if let OpProgram::Put(PutProgram { to, .. }) =
                        program.steps[(lane.first_step + step) as usize].op
                        && self.is_under_way(plan, lane, at)
                    {
                        tell(step, to, "a put to it that does not complete");
                    }
                }
                if instance.program_counter < lane.steps {
                    let step = instance.program_counter;
                    match program.steps[(lane.first_step + step) as usize].op {
                        OpProgram::Wait { from, signal_slot, .. } => {
                            let at = At { lane: lane_number as u32, slot, step };
                            if !self.is_there(heard, Site { plan, lane, at, chunk }, from, signal_slot) {
                                tell(step, from, "a wait for its signal");
                            }
                        }
                        OpProgram::Signal { to, .. } | OpProgram::Put(PutProgram { to, .. }) => {
                            if heard.credits.of(to, plan.stream) < self.parameters.bank.needed {
                                tell(step, to, "a write that it has no room for yet");
                            }
                        }
                        OpProgram::Reduce { from, into, .. } => {
                            let places = program.places[from.0 as usize..from.1 as usize].iter();
                            let places = places.chain(&program.places[into.0 as usize..into.1 as usize]);
                            for place in places.filter(|place| place.rank != program.rank) {
                                tell(step, place.rank, "its memory, which is out of reach");
                            }
                        }
                    }
                }
            }
        }
    }
}
