//! The steps of a run: wait, signal, put, reduce; and where their bytes are.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use pleach_schedule::Part;
use pleach_transport::{
    Inline, MapError, Mapped, RemoteSlice, Signal, Slice, Source, Space, SubmitError, Submitted, Transfer,
};
use pleach_vocabulary::Rank;

use super::super::address::{Address, NO_DATA, advance};
use super::super::plan::{ChunkStep, NO_SLOT, OpProgram, PlaceSlot, Plan, PutProgram};
use super::super::signals::{BufferAddress, Header};
use super::super::{Bytes, Context, NO_TRANSFER, StepAddress, Stream};
use super::{ActiveJob, Issue, Parameters, Run, StepError, TURN_BYTES};
use crate::call::Descriptor;
use crate::compute::Job;

/// A peer's buffers and mappings, as far as a run knows them.
#[derive(Debug)]
struct PeerMemory {
    /// Whether a signal of the peer in this run has said where its buffers are.
    is_known: bool,
    input: BufferAddress,
    output: BufferAddress,
    /// In a round: its input is absent, and nobody reads it.
    is_absent: bool,
    input_mapped: Option<Mapped>,
    output_mapped: Option<Mapped>,
    scratch_mapped: Option<Mapped>,
}

impl PeerMemory {
    const UNKNOWN: Self = Self {
        is_known: false,
        input: BufferAddress::IN_SCRATCH,
        output: BufferAddress::IN_SCRATCH,
        is_absent: false,
        input_mapped: None,
        output_mapped: None,
        scratch_mapped: None,
    };

    /// The buffer that holds a place; `None`: scratch does.
    fn buffer(&self, part: Part) -> Option<BufferAddress> {
        match part {
            Part::SharedInput => Some(self.input),
            Part::SharedOutput => Some(self.output),
            _ => None,
        }
        .filter(|buffer| !buffer.is_in_scratch())
    }

    /// The mapping of the memory that holds a place.
    fn mapping(&self, part: Part) -> &Option<Mapped> {
        match part {
            Part::SharedInput if self.buffer(part).is_some() => &self.input_mapped,
            Part::SharedOutput if self.buffer(part).is_some() => &self.output_mapped,
            _ => &self.scratch_mapped,
        }
    }

    fn mapping_mut(&mut self, part: Part) -> &mut Option<Mapped> {
        match part {
            Part::SharedInput if self.buffer(part).is_some() => &mut self.input_mapped,
            Part::SharedOutput if self.buffer(part).is_some() => &mut self.output_mapped,
            _ => &mut self.scratch_mapped,
        }
    }
}

/// The peers' buffers and mappings, as far as a run knows them. **Invariant:** a peer's buffer is
/// touched only after a signal of the peer in this run has said where it is, and no mapping
/// outlives the run.
#[derive(Debug, Default)]
pub(super) struct RunMemory {
    /// By rank.
    peers: Vec<PeerMemory>,
    /// Peers of which anything is known or mapped.
    touched: Vec<Rank>,
}

impl RunMemory {
    pub(super) fn reset(&mut self, plan: &Plan) {
        let (_, ranks) = plan.place();
        if self.peers.len() != ranks as usize {
            self.peers = (0..ranks).map(|_| PeerMemory::UNKNOWN).collect();
            self.touched.clear();
        }
        self.forget_peers();
    }

    pub(super) fn forget_peers(&mut self) {
        while let Some(rank) = self.touched.pop() {
            self.peers[rank as usize] = PeerMemory::UNKNOWN;
        }
    }

    /// A signal of the peer says where its buffers are; only the first one of a run counts.
    /// `in_round`: its input may be absent.
    fn learn(&mut self, from: Rank, in_round: bool, buffers: impl FnOnce() -> [BufferAddress; 2]) {
        let peer = &mut self.peers[from as usize];
        if !peer.is_known {
            self.touched.push(from);
            // The mapping of its scratch stays: it may be in use.
            peer.is_known = true;
            [peer.input, peer.output] = buffers();
            if in_round {
                (peer.input, peer.is_absent) = peer.input.without_absence();
            }
        }
    }

    fn is_known(&self, peer: Rank) -> bool {
        self.peers[peer as usize].is_known
    }

    /// Whether this place of a peer is an input that is absent.
    pub(crate) fn is_absent(&self, place: &PlaceSlot) -> bool {
        place.part == Part::SharedInput && self.peers[place.rank as usize].is_absent
    }

    /// Whether all bytes that were read at these places were still those of the ranks that keep
    /// them; see [`Mapped::is_shared`].
    pub(super) fn are_shared(&self, plan: &Plan, places: &[PlaceSlot]) -> bool {
        let read = places.iter().filter(|place| !plan.is_own(place) && !self.is_absent(place));
        read.into_iter().all(|place| {
            let mapping = self.peers[place.rank as usize].mapping(place.part);
            mapping.as_ref().is_some_and(|mapping| mapping.is_shared())
        })
    }

    /// The mapping of the peer's memory that holds a place, made where there is none; `None`: not
    /// mapped yet, try again.
    fn map(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        place: PlaceSlot,
    ) -> Result<Option<&Mapped>, StepError> {
        let peer = &mut self.peers[place.rank as usize];
        if peer.mapping(place.part).is_none() {
            // All of a buffer is mapped at once, also where its first chunk is not touched.
            let whole = match peer.buffer(place.part) {
                Some(buffer) => buffer.slice(0, step.buffer_bytes(place)),
                None => context.scratch.peers[place.rank as usize],
            };
            match context.device.map(place.rank, &whole) {
                Ok(new) => {
                    assert!(new.len() as u64 >= whole.len, "{new:?} was made of {whole:?}");
                    if !new.is_on_host() && context.compute.space() == Space::Host {
                        let error = MapError::OnGpu { peer: place.rank, key: whole.key };
                        return Err(StepError::Map { peer: place.rank, error });
                    }
                    *peer.mapping_mut(place.part) = Some(new);
                }
                // The peer is gone: its own event says how.
                Err(MapError::Unknown { .. } | MapError::Disconnected { .. }) => return Ok(None),
                Err(error) => return Err(StepError::Map { peer: place.rank, error }),
            }
            if !peer.is_known {
                self.touched.push(place.rank);
            }
        }
        // Where its owner has severed somebody, the owner's own word, or its end, says why.
        Ok(peer.mapping(place.part).as_ref().filter(|mapped| mapped.is_shared()))
    }
}

impl Run {
    /// Tries a step all of whose earlier steps are complete.
    pub(super) fn issue(&mut self, context: &mut Context, step: ChunkStep<'_>) -> Result<Issue, StepError> {
        match step.op() {
            OpProgram::Wait { from, signal_slot, into } => {
                Ok(self.wait(context, step, *from, *signal_slot, *into))
            }
            OpProgram::Signal { to, signal_slot } => {
                let payload = self.payload(context, step.plan(), *to, false);
                self.signal(context, step, *to, *signal_slot, payload)
            }
            OpProgram::Put(put) => self.put(context, step, put),
            OpProgram::Reduce { from, into, completes } => {
                let plan = step.plan();
                let divide_by = match (plan.divisor(*completes), &self.parameters.round) {
                    (1, _) | (_, None) => plan.divisor(*completes),
                    (ranks, Some(round)) => round.divisor(ranks),
                };
                self.reduce(context, step, plan.places(*from), plan.places(*into), divide_by)
            }
        }
    }

    fn wait(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        from: Rank,
        signal_slot: u32,
        into: Option<PlaceSlot>,
    ) -> Issue {
        let plan = step.plan();
        let signal_slot = self.wait_slot(step, signal_slot);
        if !context.signals.has_come(from, signal_slot) {
            return Issue::NotSignalled { from, signal_slot };
        }
        let (header, data) = context.signals.read(from, signal_slot);
        let is_expected = match self.parameters.round {
            None => self.is_of_this_call(plan, from, &header),
            Some(_) => self.told(plan, from, &header).is_some_and(|told| self.note_put(step, told, into)),
        };
        if !is_expected {
            self.mismatch = Some(from);
            return Issue::Blocked;
        }
        context.signals.consume(from, signal_slot, &header, plan.stream());
        if context.elapsed_ns > 0 {
            self.observer.arrived(from, &header, context.elapsed_ns);
        }
        if plan.is_inline() {
            if let Some(place) = into {
                self.local(context, step, place).store_words(&data, step.bytes());
            }
        } else {
            self.memory.learn(from, self.parameters.round.is_some(), || Header::buffers(&data));
        }
        Issue::Complete
    }

    /// The header of this rank's signals to a peer. `is_neutral`: in place of a put of neutral
    /// elements, which there are in rounds alone.
    fn header(&self, context: &Context, plan: &Plan, to: Rank, is_neutral: bool) -> Header {
        let number = self.number();
        let completed = if plan.stream() == Stream::Collectives { context.completed } else { number };
        let history = plan.mark(self.parameters.number.history, to);
        let header = Header::new(number, history, completed).after(context.elapsed_ns);
        match &self.parameters.round {
            None => header,
            Some(round) => header.telling(round.contributors().told(is_neutral)),
        }
    }

    /// The payload of a signal to a peer that carries no data. `is_neutral`: in place of a put of
    /// neutral elements.
    fn payload(&self, context: &Context, plan: &Plan, to: Rank, is_neutral: bool) -> Inline {
        let header = self.header(context, plan, to, is_neutral);
        if plan.is_inline() || !plan.exposes_buffers() {
            return header.with_data(&NO_DATA, 0);
        }
        let (input_start, output_start) = plan.buffer_starts(to);
        let Parameters { input, output, .. } = &self.parameters;
        let input = input.buffer_address().further(input_start);
        let is_absent = self.parameters.round.as_ref().is_some_and(|round| round.is_absent());
        let input = if is_absent { input.absent() } else { input };
        header.with_buffers(input, output.buffer_address().further(output_start))
    }

    /// Whether the peer is known not to use this run's bank any more.
    fn may_write(&self, plan: &Plan, context: &mut Context, to: Rank) -> bool {
        context.signals.has_completed(to, plan.stream(), self.needed_runs())
    }

    fn signal(
        &self,
        context: &mut Context,
        step: ChunkStep<'_>,
        to: Rank,
        signal_slot: u32,
        payload: Inline,
    ) -> Result<Issue, StepError> {
        if !self.may_write(step.plan(), context, to) {
            return Ok(Issue::Blocked);
        }
        let signal_slot = self.bank().outgoing(step.signal_offset(signal_slot));
        match context.device.signal(to, &Signal { signal_slot, payload }, NO_TRANSFER) {
            Ok(_) => Ok(Issue::Complete),
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(StepError::Submit { peer: to, error }),
        }
    }

    fn put(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        put: &PutProgram,
    ) -> Result<Issue, StepError> {
        let plan = step.plan();
        if !self.may_write(plan, context, put.to) || !self.is_within_reach(plan, context, put.dst) {
            return Ok(Issue::Blocked);
        }
        let bytes = step.bytes();
        if plan.is_inline() {
            let data = self.local(context, step, put.src).load_words(bytes);
            let payload = self.header(context, plan, put.to, false).with_data(&data, bytes);
            return self.signal(context, step, put.to, put.signal_slot, payload);
        }
        if self.is_told_alone(step, put) {
            let payload = self.payload(context, plan, put.to, true);
            return self.signal(context, step, put.to, put.signal_slot, payload);
        }
        if !self.is_staged(context, step, put) {
            return Ok(Issue::Blocked);
        }
        if plan.is_paced() && !self.pending_puts.admits(put.to, PendingPut::new(step)) {
            return Ok(Issue::UnderWay);
        }
        self.submit(context, step, put)
    }

    /// Gives the device the puts whose turn has come; true when there were any.
    pub(super) fn submit_pending(&mut self, plan: &Plan, context: &mut Context) -> Result<bool, StepError> {
        let mut moved = false;
        while let Some((peer, pending)) = self.pending_puts.next() {
            let step = pending.step(plan);
            let OpProgram::Put(put) = step.op() else { unreachable!("only puts are pending") };
            match self.submit(context, step, put)? {
                Issue::Complete => self.lanes.complete(plan, step.address()),
                Issue::UnderWay => {}
                Issue::Blocked | Issue::NotSignalled { .. } => {
                    self.pending_puts.put_back(peer, pending);
                    return Ok(moved);
                }
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Gives the device a put that may go.
    fn submit(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        put: &PutProgram,
    ) -> Result<Issue, StepError> {
        let (plan, bytes) = (step.plan(), step.bytes());
        let signal_slot = self.bank().outgoing(step.signal_offset(put.signal_slot));
        let signal = Signal { signal_slot, payload: self.payload(context, plan, put.to, false) };
        let src = self.source(context, step, put);
        #[cfg(test)]
        context.traffic.put(bytes);
        let dst = self.remote(context, step, put.dst, bytes as u64);
        let transfer = Transfer::Put { src: Source::Slice(src), dst, signal: Some(signal) };
        match context.device.submit(put.to, transfer, step.address().id(self.slot_in_engine)) {
            Ok(submitted) => {
                self.staged.retain(|staged| *staged != step.address());
                if plan.lanes().len() > 1 {
                    // Links serve transfers in their order: all lanes submit their first chunk
                    // before any submits its second.
                    self.turn_bytes = TURN_BYTES;
                }
                if submitted != Submitted::UnderWay {
                    return Ok(Issue::Complete);
                }
                if plan.is_paced() {
                    self.pending_puts.sent(put.to, bytes);
                }
                Ok(Issue::UnderWay)
            }
            Err(SubmitError::QueueFull { .. }) => Ok(Issue::Blocked),
            Err(error) => Err(StepError::Submit { peer: put.to, error }),
        }
    }

    /// Returns whether the source of a put is in registered memory. A source that the processor
    /// which computes must stage is copied first; this call starts that copy if it has not started.
    fn is_staged(&mut self, context: &mut Context, step: ChunkStep<'_>, put: &PutProgram) -> bool {
        let bytes = step.bytes();
        let must_be_staged = self.bounces(put) && bytes > 0 && context.compute.space() != Space::Host;
        if !must_be_staged || self.staged.contains(&step.address()) {
            return true;
        }
        if self.jobs.iter().any(|job| job.stages && job.address == step.address()) {
            return false;
        }
        let mut job = self.spare_jobs.pop().unwrap_or_else(Job::empty);
        let Descriptor { data_type, op, .. } = *step.plan().descriptor();
        job.begin(data_type, op, bytes / data_type.bytes(), 1);
        job.from.push(self.local(context, step, put.src).0.cast_const());
        job.into.push(self.bounce_slot(context, step, put.bounce).as_ptr());
        let is_complete = advance(&mut *context.compute, &mut job, context.now);
        if is_complete {
            self.spare_jobs.push(job);
            self.staged.push(step.address());
        } else {
            self.jobs.push(ActiveJob { address: step.address(), job, stages: true });
        }
        is_complete
    }

    fn reduce(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        from: &[PlaceSlot],
        into: &[PlaceSlot],
        divide_by: u32,
    ) -> Result<Issue, StepError> {
        let bytes = step.bytes();
        if bytes == 0 || self.leaves_out(step, from, into) {
            return Ok(Issue::Complete);
        }
        let mut job = self.spare_jobs.pop().unwrap_or_else(Job::empty);
        let Descriptor { data_type, op, .. } = *step.plan().descriptor();
        job.begin(data_type, op, bytes / data_type.bytes(), divide_by);
        if !self.address(context, step, from, into, &mut job)? {
            self.spare_jobs.push(job);
            return Ok(Issue::Blocked);
        }
        if job.into.is_empty() {
            self.spare_jobs.push(job);
            return Ok(Issue::Complete);
        }
        #[cfg(test)]
        for place in from.iter().filter(|place| !self.is_neutral(step, **place)) {
            context.traffic.read(bytes, step.plan().is_own(place));
        }
        self.note_stored(step, into);
        self.turn_bytes += bytes;
        if advance(&mut *context.compute, &mut job, context.now) {
            self.spare_jobs.push(job);
            // Bytes that a peer has taken away were not read whole: then this step waits for the
            // peer's word of why.
            let is_whole = self.memory.are_shared(step.plan(), from);
            return Ok(if is_whole { Issue::Complete } else { Issue::Blocked });
        }
        self.jobs.push(ActiveJob { address: step.address(), job, stages: false });
        Ok(Issue::UnderWay)
    }

    /// Gives the job its addresses; false when one of them is out of reach yet.
    fn address(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        from: &[PlaceSlot],
        into: &[PlaceSlot],
        job: &mut Job,
    ) -> Result<bool, StepError> {
        for place in from {
            // A copy of this rank's input may be one onto itself, which is nothing.
            let is_copied = from.len() == 1 && step.plan().is_own(place) && place.part.is_input();
            if self.is_neutral(step, *place) && !is_copied {
                continue;
            }
            let Some(address) = self.reach(context, step, *place)? else { return Ok(false) };
            job.from.push(address.0.cast_const());
        }
        if job.from.is_empty() {
            // There is nothing else: they are stored.
            job.from.extend(self.neutral_address().map(|elements| elements.0.cast_const()));
        }
        for place in into {
            let Some(address) = self.reach(context, step, *place)? else { return Ok(false) };
            job.add_destination(address.0);
        }
        Ok(true)
    }

    /// The registered bytes to put: in place, or in the bounce slot, to which they are copied here
    /// if the host computes.
    fn source(&self, context: &Context, step: ChunkStep<'_>, put: &PutProgram) -> Slice {
        if self.is_neutral(step, put.src)
            && let Some(elements) = self.neutral_elements()
        {
            return elements.slice(0..step.bytes()).expect("as long as the input");
        }
        let registered = match self.caller_bytes(put) {
            Some(Bytes::Registered(slice)) => Some(slice.clone()),
            Some(Bytes::Lent(slice)) => Some(slice.hold()),
            _ => None,
        };
        if let Some(slice) = registered {
            let start = step.buffer_offset(put.src);
            return slice
                .slice(start..start + step.bytes())
                .expect("lengths were checked when the run began");
        }
        let bounces = self.bounces(put);
        let slice = self.bounce_slot(context, step, if bounces { put.bounce } else { put.src.slot });
        if bounces && context.compute.space() == Space::Host {
            self.local(context, step, put.src).copy_to(Address(slice.as_ptr()), step.bytes());
        }
        slice
    }

    /// The caller's bytes that are put, where the source is some of them.
    fn caller_bytes(&self, put: &PutProgram) -> Option<&Bytes> {
        match put.src.part {
            Part::Input | Part::SharedInput => Some(&self.parameters.input),
            Part::Output | Part::SharedOutput => Some(&self.parameters.output),
            Part::Scratch(_) => None,
        }
    }

    /// Whether the source of a put has to be copied to a slot of scratch first.
    fn bounces(&self, put: &PutProgram) -> bool {
        put.bounce != NO_SLOT && !self.caller_bytes(put).is_some_and(Bytes::is_registered)
    }

    /// The chunk's instance of a slot of this rank's scratch.
    fn bounce_slot(&self, context: &Context, step: ChunkStep<'_>, slot: u32) -> Slice {
        let start = self.bank().scratch(step.scratch_offset(slot));
        let slice = context.scratch.own().slice(start..start + step.bytes());
        slice.expect("the bank has room for every slot")
    }

    /// Address of a place of this rank.
    fn local(&self, context: &Context, step: ChunkStep<'_>, place: PlaceSlot) -> Address {
        let Parameters { input, output, .. } = &self.parameters;
        let is_inline = step.plan().is_inline();
        let own = match place.part {
            Part::Input => Some(input),
            Part::Output => Some(output),
            // When data travel in signal slots nobody else touches the shared parts.
            Part::SharedInput => (is_inline || input.is_registered()).then_some(input),
            Part::SharedOutput => (is_inline || output.is_registered()).then_some(output),
            Part::Scratch(_) => None,
        };
        match own {
            Some(own) => own.base().add(step.buffer_offset(place)),
            None => {
                let offset = self.bank().scratch(step.scratch_offset(place.slot));
                Address(context.scratch.own().as_ptr()).add(offset)
            }
        }
    }

    /// Name of a place of a peer.
    fn remote(&self, context: &Context, step: ChunkStep<'_>, place: PlaceSlot, len: u64) -> RemoteSlice {
        match self.memory.peers[place.rank as usize].buffer(place.part) {
            Some(buffer) => buffer.slice(step.buffer_offset(place), len),
            None => {
                let scratch = &context.scratch.peers[place.rank as usize];
                let offset = self.bank().peer_scratch(step.scratch_offset(place.slot));
                RemoteSlice { key: scratch.key, offset: scratch.offset.saturating_add(offset), len }
            }
        }
    }

    /// Whether the place of a peer may be touched yet: its buffer once the peer said where that is,
    /// its scratch once the peer does not use that for an earlier run any more.
    fn is_within_reach(&self, plan: &Plan, context: &mut Context, place: PlaceSlot) -> bool {
        match place.part {
            Part::SharedInput | Part::SharedOutput => plan.is_inline() || self.memory.is_known(place.rank),
            _ => self.may_write(plan, context, place.rank),
        }
    }

    /// Address of any place; `None`: not within reach or not mapped yet, try again.
    fn reach(
        &mut self,
        context: &mut Context,
        step: ChunkStep<'_>,
        place: PlaceSlot,
    ) -> Result<Option<Address>, StepError> {
        if step.plan().is_own(&place) {
            return Ok(Some(self.local(context, step, place)));
        }
        if !self.is_within_reach(step.plan(), context, place) {
            return Ok(None);
        }
        let offset = match self.memory.peers[place.rank as usize].buffer(place.part) {
            Some(_) => step.buffer_offset(place),
            None => self.bank().peer_scratch(step.scratch_offset(place.slot)) as usize,
        };
        let mapped = self.memory.map(context, step, place)?;
        Ok(mapped.map(|mapped| Address(mapped.as_ptr()).add(offset)))
    }
}

// ---- Puts that wait to be submitted, where links set the pace: of the puts to one peer the oldest
// chunk goes first.
//
// A link that carries one transfer after the other keeps their order. If puts are submitted as
// soon as they can be, the first steps of all chunks in a window go before any second step. Then
// all chunks travel from link to link together, and the links before and behind them stay idle.
// (Networks of queues that serve the first arrival first can lose throughput in this way;
// networks that serve the packet that is under way longest cannot: Andrews, Awerbuch, Fernández,
// Kleinberg, Leighton and Liu, "Universal stability results for greedy contention-resolution
// protocols", FOCS 1996.) So a rank gives the device no more puts to a peer than keep the peer's
// link busy. The next put is one of the oldest chunk that any tree has for the peer.
//
// **Invariant:** a pending put is under way for its lane, with its source and its room at the
// peer, as if the device had it. Each is submitted once there is room for it, or the run ends.

/// This many puts may be under way to a peer however long they are: one more than its link carries
/// at a time.
const PUTS_LEAST: u32 = 2;

/// A put that waits for its turn. Older chunks go first, then lanes with smaller numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PendingPut {
    chunk: u32,
    lane: u32,
    step: u32,
    bytes: usize,
}

impl PendingPut {
    fn new(step: ChunkStep<'_>) -> Self {
        let StepAddress { lane, step: number, .. } = step.address();
        Self { chunk: step.chunk(), lane, step: number, bytes: step.bytes() }
    }

    /// The step that puts.
    fn step(self, plan: &Plan) -> ChunkStep<'_> {
        plan.chunk_step(self.lane, self.chunk, self.step)
    }
}

/// The puts of a run to one peer.
#[derive(Debug, Default)]
struct PeerQueue {
    /// Puts under way, and their bytes.
    puts: u32,
    bytes: u64,
    bytes_max: u64,
    pending: BinaryHeap<Reverse<PendingPut>>,
}

impl PeerQueue {
    fn has_room(&self, bytes: usize) -> bool {
        self.puts < PUTS_LEAST || self.bytes + bytes as u64 <= self.bytes_max
    }
}

/// The puts of a run. Kept from run to run for its memory.
#[derive(Debug, Default)]
pub(super) struct PendingPuts {
    /// By rank.
    queues: Vec<PeerQueue>,
    /// Peers to which puts are pending and one has ended.
    with_room: Vec<Rank>,
}

impl PendingPuts {
    /// None; by rank: how many bytes of puts may be under way to it.
    pub(super) fn reset(&mut self, bytes_max: &[u64]) {
        self.with_room.clear();
        self.queues.resize_with(bytes_max.len(), PeerQueue::default);
        for (queue, &most) in self.queues.iter_mut().zip(bytes_max) {
            (queue.puts, queue.bytes, queue.bytes_max) = (0, 0, most);
            queue.pending.clear();
        }
    }

    /// Whether a put may be submitted now; else it is pending until [`PendingPuts::next`] returns
    /// it.
    fn admits(&mut self, to: Rank, put: PendingPut) -> bool {
        let queue = &mut self.queues[to as usize];
        let is_admitted = queue.has_room(put.bytes);
        if !is_admitted {
            queue.pending.push(Reverse(put));
        }
        is_admitted
    }

    /// A put was submitted and has not ended.
    fn sent(&mut self, to: Rank, bytes: usize) {
        let queue = &mut self.queues[to as usize];
        queue.puts += 1;
        queue.bytes += bytes as u64;
    }

    /// A put has ended.
    pub(super) fn ended(&mut self, to: Rank, bytes: usize) {
        let queue = &mut self.queues[to as usize];
        queue.puts -= 1;
        queue.bytes -= bytes as u64;
        if !queue.pending.is_empty() {
            self.with_room.push(to);
        }
    }

    /// Takes the put that goes next, with its peer, if a peer has room.
    fn next(&mut self) -> Option<(Rank, PendingPut)> {
        while let Some(&peer) = self.with_room.last() {
            let queue = &mut self.queues[peer as usize];
            let first = queue.pending.peek().map(|Reverse(first)| *first);
            if let Some(first) = first.filter(|first| queue.has_room(first.bytes)) {
                queue.pending.pop();
                return Some((peer, first));
            }
            self.with_room.pop();
        }
        None
    }

    /// The device takes no more at present: the put goes next again.
    fn put_back(&mut self, to: Rank, put: PendingPut) {
        self.queues[to as usize].pending.push(Reverse(put));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(chunk: u32, lane: u32) -> PendingPut {
        PendingPut { chunk, lane, step: 0, bytes: 10 }
    }

    fn puts(bytes_max: u64) -> PendingPuts {
        let mut puts = PendingPuts::default();
        puts.reset(&[bytes_max, bytes_max]);
        puts
    }

    fn submit(puts: &mut PendingPuts, put: PendingPut) -> bool {
        let is_admitted = puts.admits(1, put);
        if is_admitted {
            puts.sent(1, put.bytes);
        }
        is_admitted
    }

    #[test]
    fn the_oldest_chunk_goes_first_whenever_it_came() {
        let mut puts = puts(0);
        assert!(submit(&mut puts, put(5, 0)) && submit(&mut puts, put(6, 0)));
        for late in [put(7, 0), put(3, 2), put(3, 1), put(4, 0)] {
            assert!(!submit(&mut puts, late));
        }
        assert_eq!(puts.next(), None, "two are under way");
        let mut gone = Vec::new();
        for _ in 0..4 {
            puts.ended(1, 10);
            let (peer, next) = puts.next().expect("one has ended");
            assert_eq!(peer, 1);
            puts.sent(1, next.bytes);
            gone.push((next.chunk, next.lane));
            assert_eq!(puts.next(), None, "two are under way");
        }
        assert_eq!(gone, [(3, 1), (3, 2), (4, 0), (7, 0)]);
    }

    #[test]
    fn as_many_are_under_way_as_a_round_trip_carries() {
        let mut puts = puts(35);
        let admitted = (0..5).filter(|&chunk| submit(&mut puts, put(chunk, 0))).count();
        assert_eq!(admitted, 3);
        assert!(puts.admits(0, put(9, 0)), "another peer's room is another one");
    }

    #[test]
    fn a_put_that_the_device_does_not_take_is_still_next() {
        let mut puts = puts(0);
        let all: Vec<bool> = (0..4).map(|chunk| submit(&mut puts, put(chunk, 0))).collect();
        assert_eq!(all, [true, true, false, false]);
        puts.ended(1, 10);
        let (peer, next) = puts.next().expect("room");
        puts.put_back(peer, next);
        assert_eq!(puts.next(), Some((1, next)));
    }
}
