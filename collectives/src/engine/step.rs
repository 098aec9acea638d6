//! What the steps of a run do: wait, signal, put, reduce.

use pleach_transport::{Inline, Signal, Source, Space, SubmitError, Submitted, Transfer};
use pleach_vocabulary::{DataType, Rank, ReduceOp};

use super::address::{Address, advance};
use super::at::NOBODY;
use super::ground::Ground;
use super::header::{Header, INLINE_DATA_BYTES};
use super::plan::Plan;
use super::program::{PlaceAt, Program, PutProgram};
use super::run::{Issue, Parameters, Run, Site, Trouble};
use super::stream::Stream;
use crate::call::Descriptor;
use crate::compute::Job;

impl Run {
    pub(super) fn signal_slot(&self, base: u32, signal_slot: u32, site: Site<'_>) -> u16 {
        // The engine chose a bank with room for all signal slots, and banks end below 65,536.
        (base + signal_slot * site.plan.program.window + site.at.slot) as u16
    }

    pub(super) fn wait(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        (from, signal_slot, landing): (Rank, u32, Option<PlaceAt>),
    ) -> Issue {
        let signal_slot = self.signal_slot(self.parameters.bank.wait_base, signal_slot, site);
        if !ground.has_come(from, signal_slot) {
            return Issue::Unnoticed { from, signal_slot };
        }
        let payload = ground.signal_slots[from as usize].payload(signal_slot);
        let header = Header::decode(&payload);
        if !self.is_of_this_call(site.plan, from, &header) {
            self.suspect = Some(from);
            return Issue::Blocked;
        }
        ground.consume(from, signal_slot, &header, site.plan.stream);
        if ground.elapsed_ns > 0 {
            self.noted.arrived(from, &header, ground.elapsed_ns);
        }
        if site.plan.inline {
            if let Some(place) = landing {
                let into = self.local(ground.scratch, site, place);
                into.store(&header.data(&payload)[..site.bytes()]);
            }
        } else if !self.peers[from as usize].heard {
            self.touched.push(from);
            let (input, output) = Header::landings(&payload);
            // What is mapped of its scratch may be being written to.
            let peer = &mut self.peers[from as usize];
            (peer.heard, peer.input, peer.output) = (true, input, output);
        }
        Issue::Complete
    }

    /// Whether a peer's signal is of the call that this run carries out.
    pub(super) fn is_of_this_call(&self, plan: &Plan, from: Rank, header: &Header) -> bool {
        header.history == plan.mark(self.parameters.history, from) && header.run == self.parameters.number
    }

    fn payload(&self, plan: &Plan, ground: &Ground<'_>, to: Rank, data: &[u8]) -> Inline {
        let completed =
            if plan.stream == Stream::Collectives { ground.completed } else { self.parameters.number };
        let history = plan.mark(self.parameters.history, to);
        let header = Header::new(self.parameters.number, history, completed).after(ground.elapsed_ns);
        if plan.inline {
            header.with_data(data)
        } else if plan.program.exposes_input || plan.program.exposes_output {
            let (input_start, output_start) = plan.layout.landing_starts(to);
            let Parameters { input, output, .. } = &self.parameters;
            header.with_landings(input.landing().at(input_start), output.landing().at(output_start))
        } else {
            header.alone()
        }
    }

    /// Whether the peer is known not to use this run's bank any more.
    pub(super) fn may_write(&self, plan: &Plan, ground: &mut Ground<'_>, to: Rank) -> bool {
        ground.has_completed(to, plan.stream, self.parameters.bank.needed)
    }

    pub(super) fn signal(
        &self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        (to, signal_slot): (Rank, u32),
        data: &[u8],
    ) -> Result<Issue, Trouble> {
        if !self.may_write(site.plan, ground, to) {
            return Ok(Issue::Blocked);
        }
        let signal_slot = self.signal_slot(self.parameters.bank.signal_base, signal_slot, site);
        let signal = Signal { signal_slot, payload: self.payload(site.plan, ground, to, data) };
        match ground.device.signal(to, &signal, NOBODY) {
            Ok(_) => Ok(Issue::Complete),
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(Trouble::Submit { peer: to, error }),
        }
    }

    pub(super) fn put(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        put: &PutProgram,
    ) -> Result<Issue, Trouble> {
        if !self.may_write(site.plan, ground, put.to) || !self.is_within_reach(site.plan, ground, put.dst) {
            return Ok(Issue::Blocked);
        }
        let bytes = site.bytes();
        if site.plan.inline {
            let mut data = [0; INLINE_DATA_BYTES];
            self.local(ground.scratch, site, put.src).load(&mut data[..bytes]);
            return self.signal(ground, site, (put.to, put.signal_slot), &data[..bytes]);
        }
        if !self.is_staged(ground, site, put) {
            return Ok(Issue::Blocked);
        }
        if !self.has_turn(site, put) {
            return Ok(Issue::UnderWay);
        }
        self.submit(ground, site, put)
    }

    /// Gives the device a put that may go.
    pub(super) fn submit(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        put: &PutProgram,
    ) -> Result<Issue, Trouble> {
        let bytes = site.bytes();
        let signal_slot = self.signal_slot(self.parameters.bank.signal_base, put.signal_slot, site);
        let signal = Signal { signal_slot, payload: self.payload(site.plan, ground, put.to, &[]) };
        let src = self.source(ground, site, put);
        let dst = self.remote(ground, site, put.dst, bytes as u64);
        let transfer = Transfer::Put { src: Source::Slice(src), dst, signal: Some(signal) };
        match ground.device.submit(put.to, transfer, site.at.id(self.slot_in_engine)) {
            Ok(submitted) => {
                self.staged.retain(|at| *at != site.at);
                if site.plan.lanes.len() > 1 {
                    // Links serve first what comes first: all lanes have their first chunk before
                    // any has its second.
                    self.end_turn();
                }
                if submitted != Submitted::UnderWay {
                    return Ok(Issue::Complete);
                }
                if site.plan.is_paced() {
                    self.outboxes.sent(put.to, bytes);
                }
                Ok(Issue::UnderWay)
            }
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(Trouble::Submit { peer: put.to, error }),
        }
    }

    /// Whether what is put lies where it can be put from, if it is brought there by who computes:
    /// begins with that where it has not begun.
    fn is_staged(&mut self, ground: &mut Ground<'_>, site: Site<'_>, put: &PutProgram) -> bool {
        let bytes = site.bytes();
        let is_brought = self.bounces(put) && bytes > 0 && ground.compute.space() != Space::Host;
        if !is_brought || self.staged.contains(&site.at) {
            return true;
        }
        if self.is_staging(site.at) {
            return false;
        }
        let mut job = self.spare_jobs.pop().unwrap_or_else(empty_job);
        let descriptor = &site.plan.descriptor;
        prepare(&mut job, descriptor, bytes / descriptor.data_type.bytes(), 1);
        job.from.push(self.local(ground.scratch, site, put.src).0.cast_const());
        job.into.push(self.bounce_slot(ground, site, put.bounce).as_ptr());
        let is_complete = advance(ground.compute, &mut job, ground.now);
        if is_complete {
            self.spare_jobs.push(job);
            self.staged.push(site.at);
        } else {
            self.stage(site.at, job);
        }
        is_complete
    }

    pub(super) fn reduce(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        from: &[PlaceAt],
        into: &[PlaceAt],
        completes: bool,
    ) -> Result<Issue, Trouble> {
        let bytes = site.bytes();
        if bytes == 0 {
            return Ok(Issue::Complete);
        }
        let mut job = self.spare_jobs.pop().unwrap_or_else(empty_job);
        let descriptor = &site.plan.descriptor;
        let divide_by = divisor(&site.plan.program, descriptor, completes);
        prepare(&mut job, descriptor, bytes / descriptor.data_type.bytes(), divide_by);
        match self.address(ground, site, from, into, &mut job) {
            Ok(true) => {}
            Ok(false) => {
                self.spare_jobs.push(job);
                return Ok(Issue::Blocked);
            }
            Err(trouble) => return Err(trouble),
        }
        if job.into.is_empty() {
            self.spare_jobs.push(job);
            return Ok(Issue::Complete);
        }
        self.turn_bytes += bytes;
        if advance(ground.compute, &mut job, ground.now) {
            self.spare_jobs.push(job);
            // What a peer has taken away was not read whole: then this waits for the word of why.
            let is_whole = self.are_shared(site.plan.program.rank, from);
            return Ok(if is_whole { Issue::Complete } else { Issue::Blocked });
        }
        self.compute(site.at, job);
        Ok(Issue::UnderWay)
    }

    /// Gives the job its addresses; false when one of them is out of reach yet.
    fn address(
        &mut self,
        ground: &mut Ground<'_>,
        site: Site<'_>,
        from: &[PlaceAt],
        into: &[PlaceAt],
        job: &mut Job,
    ) -> Result<bool, Trouble> {
        for place in from {
            let Some(address) = self.reach(ground, site, *place)? else { return Ok(false) };
            job.from.push(address.0.cast_const());
        }
        for place in into {
            let Some(address) = self.reach(ground, site, *place)? else { return Ok(false) };
            add_destination(job, address);
        }
        Ok(true)
    }
}

/// What a reduction divides by that completes a result or does not.
pub(super) fn divisor(program: &Program, descriptor: &Descriptor, completes: bool) -> u32 {
    if completes && descriptor.op == ReduceOp::Avg { program.ranks } else { 1 }
}

/// Makes a job, which may have been another one, one of this call, without addresses yet.
pub(super) fn prepare(job: &mut Job, descriptor: &Descriptor, elements: usize, divide_by: u32) {
    job.data_type = descriptor.data_type;
    job.op = descriptor.op;
    job.divide_by = divide_by;
    job.elements = elements;
    job.elements_done = 0;
    job.ticket = 0;
    job.from.clear();
    job.into.clear();
}

/// One more destination of a job that has its sources. A copy onto itself is nothing, and two
/// places that are one memory are written once.
pub(super) fn add_destination(job: &mut Job, address: Address) {
    let is_copy_onto_itself = job.from.len() == 1 && job.from[0] == address.0.cast_const();
    if !is_copy_onto_itself && !job.into.contains(&address.0) {
        job.into.push(address.0);
    }
}

pub(super) fn empty_job() -> Job {
    Job {
        data_type: DataType::U8,
        op: ReduceOp::Sum,
        divide_by: 1,
        from: Vec::new(),
        into: Vec::new(),
        elements: 0,
        elements_done: 0,
        ticket: 0,
    }
}
