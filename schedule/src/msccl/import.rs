//! Reads an algorithm as a schedule.
//!
//! Steps are visited in one of the orders in which they may run (all have the same effect, which
//! [`StepOrder`] checks), chunk by chunk, with the contents of each place of each GPU. The work of
//! a GPU for a chunk becomes a lane. A send is a put into scratch that the receiver has signalled
//! to be free. The receive is the wait for this put, with the use of its data.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use pleach_vocabulary::{Collective, Rank};

use crate::msccl::error::{ImportError, ImportProblem};
use crate::msccl::{Algorithm, Buffer, Instruction, InstructionKind, MAX_PLACES, ThreadBlock, xml};
use crate::{Block, BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};

/// Chunks of a lane under way: one is sent while the one before is used.
const WINDOW: u32 = 2;
const COLLECTIVES: &str = "allreduce allgather reducescatter broadcast reduce alltoall";

type Result<T> = std::result::Result<T, ImportError>;

/// Reads an algorithm, ours or another's, as a schedule.
///
/// # Errors
///
/// [`ImportError`] says the line and what is wrong there: the form, the order of steps, or data in
/// the wrong place. Whether the result is right is for [`verify`](crate::verify::verify()) to say.
pub fn import(text: &str) -> Result<Schedule> {
    let algorithm = xml::parse(text)?;
    let layout = Layout::of(&algorithm)?;
    layout.check_places()?;
    let order = StepOrder::of(&algorithm)?;
    order.check_races(|gpu, place| layout.memory(gpu, place, algorithm.in_place))?;
    let mut import = Import {
        layout,
        order: &order,
        lanes: BTreeMap::new(),
        held: vec![BTreeMap::new(); algorithm.gpus.len()],
        slots: BTreeMap::new(),
        transfers: BTreeMap::new(),
        put_targets: BTreeMap::new(),
    };
    for &step in &order.sorted {
        for chunk in 0..order.instruction(step).count {
            import.step(step, chunk)?;
        }
    }
    import.finish()
}

/// Which chunk of the data each chunk of a buffer is.
struct Layout<'a> {
    algorithm: &'a Algorithm,
    collective: Collective,
    ranks: u32,
    /// Chunks of a part.
    each: u32,
}

impl<'a> Layout<'a> {
    fn of(algorithm: &'a Algorithm) -> Result<Self> {
        let ranks = algorithm.gpus.len() as u32;
        let wrong = |problem| ImportError { line: 1, problem };
        let collective = match algorithm.collective.as_str() {
            "allreduce" => Collective::AllReduce,
            "allgather" => Collective::AllGather,
            "reducescatter" => Collective::ReduceScatter,
            "alltoall" => Collective::AllToAll,
            "broadcast" => Collective::Broadcast { root: root(algorithm, |kind| kind.receives())? },
            "reduce" => Collective::Reduce { root: root(algorithm, |kind| kind.sends())? },
            name => {
                return Err(wrong(ImportProblem::Collective { name: name.to_owned(), known: COLLECTIVES }));
            }
        };
        let is_whole = matches!(
            collective,
            Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. }
        );
        let chunks = algorithm.chunks;
        let each = if is_whole { chunks } else { chunks / ranks };
        if each == 0 || (!is_whole && !chunks.is_multiple_of(ranks)) {
            return Err(wrong(ImportProblem::Chunks { chunks, ranks }));
        }
        let parts = u64::from(collective.parts(ranks));
        if parts * u64::from(each) * u64::from(ranks) > MAX_PLACES {
            return Err(wrong(ImportProblem::TooMany { what: "chunks of all GPUs", most: MAX_PLACES }));
        }
        Ok(Self { algorithm, collective, ranks, each })
    }

    fn part(&self, block: BlockId) -> u32 {
        block / self.each
    }

    /// The chunk of the data that a place of a buffer is for; none for scratch.
    fn block(&self, gpu: Rank, (buffer, chunk): (Buffer, u32)) -> Option<BlockId> {
        let own = gpu * self.each + chunk;
        let (among, within) = (chunk / self.each, chunk % self.each);
        match (self.collective, buffer) {
            (_, Buffer::Scratch) => None,
            (Collective::AllGather, Buffer::Input) | (Collective::ReduceScatter, Buffer::Output) => Some(own),
            (Collective::AllToAll, Buffer::Input) => Some((gpu * self.ranks + among) * self.each + within),
            (Collective::AllToAll, Buffer::Output) => Some((among * self.ranks + gpu) * self.each + within),
            _ => Some(chunk),
        }
    }

    /// How many chunks a buffer of a GPU has.
    fn chunks(&self, gpu: Rank, buffer: Buffer) -> u32 {
        match (self.collective, buffer) {
            (_, Buffer::Scratch) => self.algorithm.gpus[gpu as usize].scratch_chunks,
            (Collective::AllGather, Buffer::Input) | (Collective::ReduceScatter, Buffer::Output) => self.each,
            _ => self.algorithm.chunks,
        }
    }

    /// Checks that no step leaves its buffers.
    fn check_places(&self) -> Result<()> {
        for (gpu, of) in self.algorithm.gpus.iter().enumerate() {
            let chunks = |buffer| self.chunks(gpu as Rank, buffer);
            for step in of.blocks.iter().flat_map(|block| &block.steps) {
                let used = [
                    step.kind.reads_source().then_some(step.source),
                    step.kind.writes_target().then_some(step.target),
                ];
                for (buffer, first) in used.into_iter().flatten() {
                    let chunks = chunks(buffer);
                    let last = first + step.count - 1;
                    if last >= chunks {
                        let problem = ImportProblem::OutOfBuffer { chunk: last, chunks };
                        return Err(ImportError { line: step.line, problem });
                    }
                }
            }
        }
        Ok(())
    }

    /// The place that a chunk of a buffer is where input and output are one memory.
    fn memory(&self, gpu: Rank, place: (Buffer, u32), is_in_place: bool) -> (Buffer, u32) {
        match (self.collective, place) {
            _ if !is_in_place => place,
            (Collective::AllGather, (Buffer::Input, chunk)) => (Buffer::Output, gpu * self.each + chunk),
            (Collective::ReduceScatter, (Buffer::Output, chunk)) => (Buffer::Input, gpu * self.each + chunk),
            (
                Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. },
                (Buffer::Input, chunk),
            ) => (Buffer::Output, chunk),
            _ => place,
        }
    }

    fn has_input(&self, gpu: Rank, block: BlockId) -> bool {
        self.collective.input_parts(gpu, self.ranks).contains(self.part(block))
    }

    fn has_output(&self, gpu: Rank, block: BlockId) -> bool {
        self.collective.output_parts(gpu, self.ranks).contains(self.part(block))
    }
}

/// The root that the file names, or the only GPU that never does what all others do.
fn root(algorithm: &Algorithm, others_do: impl Fn(InstructionKind) -> bool) -> Result<Rank> {
    if let Some(root) = algorithm.root {
        return Ok(root);
    }
    let never =
        |gpu: &super::Gpu| !gpu.blocks.iter().flat_map(|block| &block.steps).any(|step| others_do(step.kind));
    let mut candidates = (0..algorithm.gpus.len()).filter(|&gpu| never(&algorithm.gpus[gpu]));
    match (candidates.next(), candidates.next()) {
        (Some(root), None) => Ok(root as Rank),
        _ => Err(ImportError { line: 1, problem: ImportProblem::NoRoot }),
    }
}

/// What a place holds: a chunk of the data, and which memory of the schedule that is.
#[derive(Clone, Copy)]
struct PlaceContents {
    block: BlockId,
    part: Part,
}

/// Where what is sent lands.
struct PutTarget {
    block: BlockId,
    slot: Part,
    signal_slot: SignalSlot,
}

struct Import<'a> {
    layout: Layout<'a>,
    order: &'a StepOrder<'a>,
    lanes: BTreeMap<(Rank, BlockId), LaneSteps>,
    held: Vec<BTreeMap<(Buffer, u32), PlaceContents>>,
    /// The scratch of places that are neither input nor output for the chunk they hold.
    slots: BTreeMap<(Rank, (Buffer, u32), BlockId), Part>,
    /// The number of puts of a chunk from a GPU to another so far.
    transfers: BTreeMap<(Rank, Rank, BlockId), u16>,
    /// By sending step, and chunk of it.
    put_targets: BTreeMap<(StepNumber, u32), PutTarget>,
}

impl Import<'_> {
    fn step(&mut self, step: StepNumber, chunk: u32) -> Result<()> {
        let gpu = self.order.at[step].gpu;
        let Instruction { kind, source, target, line, .. } = *self.order.instruction(step);
        let (source, target) = ((source.0, source.1 + chunk), (target.0, target.1 + chunk));
        let arrival = match self.order.senders[step] {
            Some(sender) if kind.receives() => self.put_targets.remove(&(sender, chunk)),
            _ => None,
        };
        let mut from = Vec::with_capacity(2);
        let mut block = None;
        if kind == InstructionKind::Reduce {
            self.take(gpu, target, &mut from, &mut block, line)?;
        }
        if kind.reads_source() {
            self.take(gpu, source, &mut from, &mut block, line)?;
        }
        if let Some(arrival) = arrival {
            same(&mut block, arrival.block, line)?;
            let sender = self.order.thread_block(step).receive.unwrap_or_default();
            self.lane(gpu, arrival.block).wait(sender, arrival.signal_slot);
            from.push(arrival.slot);
        }
        let Some(block) = block else { return Ok(()) };
        let mut at = from[0];
        if kind.writes_target() {
            let part = self.written(gpu, target, block, line)?;
            self.lane(gpu, block).combine(gpu, &from, part);
            self.hold(gpu, target, PlaceContents { block, part });
            at = part;
        } else if from.len() > 1 {
            let kept = self.lane(gpu, block).scratch(line)?;
            self.lane(gpu, block).combine(gpu, &from, kept);
            at = kept;
        }
        if kind.sends() {
            self.send(step, chunk, PlaceContents { block, part: at })?;
        }
        Ok(())
    }

    /// Adds what a place holds to what is combined.
    fn take(
        &mut self,
        gpu: Rank,
        place: (Buffer, u32),
        from: &mut Vec<Part>,
        block: &mut Option<BlockId>,
        line: usize,
    ) -> Result<()> {
        let held = self.holds(gpu, place);
        let held = held.ok_or(ImportError { line, problem: ImportProblem::Empty { gpu } })?;
        same(block, held.block, line)?;
        from.push(held.part);
        Ok(())
    }

    fn canonical(&self, gpu: Rank, place: (Buffer, u32)) -> (Buffer, u32) {
        let algorithm = self.layout.algorithm;
        self.layout.memory(gpu, place, algorithm.in_place && !algorithm.out_of_place)
    }

    fn hold(&mut self, gpu: Rank, place: (Buffer, u32), held: PlaceContents) {
        let place = self.canonical(gpu, place);
        self.held[gpu as usize].insert(place, held);
    }

    fn holds(&mut self, gpu: Rank, place: (Buffer, u32)) -> Option<PlaceContents> {
        let place = self.canonical(gpu, place);
        if let Some(held) = self.held[gpu as usize].get(&place) {
            return Some(*held);
        }
        let algorithm = self.layout.algorithm;
        let is_one_memory = algorithm.in_place && !algorithm.out_of_place;
        let block = self.layout.block(gpu, place)?;
        let is_there = self.layout.has_input(gpu, block) && (is_one_memory || place.0 == Buffer::Input);
        is_there.then(|| PlaceContents { block, part: self.lane(gpu, block).input })
    }

    /// The memory that a write of a chunk to a place is to.
    fn written(&mut self, gpu: Rank, place: (Buffer, u32), block: BlockId, line: usize) -> Result<Part> {
        let place = self.canonical(gpu, place);
        let algorithm = self.layout.algorithm;
        if let Some(belongs) = self.layout.block(gpu, place) {
            if belongs != block {
                return Err(ImportError {
                    line,
                    problem: ImportProblem::MisplacedChunk { found: block, place: belongs },
                });
            }
            if place.0 == Buffer::Input && algorithm.out_of_place {
                return Err(ImportError { line, problem: ImportProblem::WritesInput { gpu } });
            }
            if self.layout.has_output(gpu, block) {
                return Ok(Part::Output);
            }
        }
        if let Some(&slot) = self.slots.get(&(gpu, place, block)) {
            return Ok(slot);
        }
        let slot = self.lane(gpu, block).scratch(line)?;
        self.slots.insert((gpu, place, block), slot);
        Ok(slot)
    }

    fn send(&mut self, step: StepNumber, chunk: u32, held: PlaceContents) -> Result<()> {
        let from = self.order.at[step].gpu;
        let line = self.order.instruction(step).line;
        let Some(to) = self.order.thread_block(step).send else { return Ok(()) };
        let transfers = self.transfers.entry((from, to, held.block)).or_default();
        let first = transfers.checked_mul(2).filter(|&first| first < u16::MAX);
        let problem = ImportProblem::TooMany {
            what: "sends of one chunk between two GPUs",
            most: u64::from(u16::MAX / 2),
        };
        let first = first.ok_or(ImportError { line, problem })?;
        *transfers += 1;
        // Even signal slots tell what has come, odd ones that it may come: those of the other
        // direction are another sender's.
        let (signal_slot, ready) = (SignalSlot(first), SignalSlot(first + 1));
        let receiver = self.lane(to, held.block);
        let slot = receiver.scratch(line)?;
        receiver.begin.push(Step { op: Op::Signal { to: from, signal_slot: ready }, after: Vec::new() });
        let sender = self.lane(from, held.block);
        sender.wait(to, ready);
        sender.put(to, held.part, slot, signal_slot);
        self.put_targets.insert((step, chunk), PutTarget { block: held.block, slot, signal_slot });
        Ok(())
    }

    fn lane(&mut self, gpu: Rank, block: BlockId) -> &mut LaneSteps {
        let Self { layout, lanes, .. } = self;
        lanes.entry((gpu, block)).or_insert_with(|| {
            let mut lane = LaneSteps::new();
            let sets_aside = !layout.algorithm.in_place;
            if sets_aside && layout.has_input(gpu, block) && layout.has_output(gpu, block) {
                // In place its input would be overwritten by what the file writes to the output.
                let aside = Part::Scratch(0);
                lane.slots = 1;
                lane.combine(gpu, &[Part::Input], aside);
                lane.input = aside;
            }
            lane
        })
    }

    fn finish(mut self) -> Result<Schedule> {
        let Layout { algorithm, collective, ranks, each } = self.layout;
        let blocks = collective.parts(ranks) * each;
        if algorithm.in_place && !algorithm.out_of_place {
            // What stays where it was is input and output at once.
            for gpu in 0..ranks {
                for block in 0..blocks {
                    if self.layout.has_input(gpu, block) && self.layout.has_output(gpu, block) {
                        let lane = self.lane(gpu, block);
                        if !lane.writes_output {
                            lane.combine(gpu, &[Part::Input], Part::Output);
                        }
                    }
                }
            }
        }
        let mut programs = vec![Vec::new(); ranks as usize];
        for ((gpu, block), lane) in self.lanes {
            programs[gpu as usize].push(Lane { block, steps: lane.finish() });
        }
        let blocks = (0..blocks).map(|block| Block { part: block / each, weight: 1 }).collect();
        Ok(Schedule { collective, window: WINDOW, single_chunk: false, blocks, programs })
    }
}

/// Checks that chunks which are combined are the same chunk of the data.
fn same(block: &mut Option<BlockId>, found: BlockId, line: usize) -> Result<()> {
    match *block.get_or_insert(found) {
        place if place == found => Ok(()),
        place => Err(ImportError { line, problem: ImportProblem::MisplacedChunk { found, place } }),
    }
}

/// The steps of a lane under construction, with what each must come after.
struct LaneSteps {
    /// Signals that go out when a chunk is begun.
    begin: Vec<Step>,
    steps: Vec<Step>,
    slots: u16,
    /// Where the rank's contribution is.
    input: Part,
    writes_output: bool,
    /// By memory: the step that last wrote it, and those that have read it since.
    accesses: BTreeMap<Part, (Option<StepId>, Vec<StepId>)>,
}

impl LaneSteps {
    fn new() -> Self {
        Self {
            begin: Vec::new(),
            steps: Vec::new(),
            slots: 0,
            input: Part::Input,
            writes_output: false,
            accesses: BTreeMap::new(),
        }
    }

    fn scratch(&mut self, line: usize) -> Result<Part> {
        let slot = self.slots;
        let problem =
            ImportProblem::TooMany { what: "places that hold one chunk", most: u64::from(u16::MAX) };
        self.slots = slot.checked_add(1).ok_or(ImportError { line, problem })?;
        Ok(Part::Scratch(slot))
    }

    fn wait(&mut self, from: Rank, signal_slot: SignalSlot) {
        self.steps.push(Step { op: Op::Wait { from, signal_slot }, after: Vec::new() });
    }

    fn put(&mut self, to: Rank, src: Part, dst: Part, signal_slot: SignalSlot) {
        let mut after = Vec::new();
        self.reads(src, &mut after);
        self.push(Op::Put { to, src, dst, signal_slot }, after);
    }

    fn combine(&mut self, rank: Rank, from: &[Part], into: Part) {
        if from == [into] {
            return;
        }
        let mut after = Vec::new();
        for &part in from {
            self.reads(part, &mut after);
        }
        let step = self.steps.len() as StepId;
        let (write, reads) = self.accesses.entry(memory(into)).or_default();
        after.extend(write.replace(step));
        after.append(reads);
        // A step does not come after itself, which has just been noted as a reader.
        after.retain(|&earlier| earlier != step);
        self.writes_output |= into == Part::Output;
        let place = |part| Place { rank, part };
        let from = from.iter().map(|&part| place(part)).collect();
        self.push(Op::Reduce { from, into: vec![place(into)] }, after);
    }

    /// Notes that the next step reads a part.
    fn reads(&mut self, part: Part, after: &mut Vec<StepId>) {
        let step = self.steps.len() as StepId;
        let (write, reads) = self.accesses.entry(memory(part)).or_default();
        after.extend(*write);
        if reads.last() != Some(&step) {
            reads.push(step);
        }
    }

    fn push(&mut self, op: Op, mut after: Vec<StepId>) {
        after.sort_unstable();
        after.dedup();
        self.steps.push(Step { op, after: after.into_iter().map(|step| (step, 0)).collect() });
    }

    fn finish(self) -> Vec<Step> {
        let Self { begin, steps, .. } = self;
        let moved = begin.len() as StepId;
        let mut all = begin;
        all.extend(steps.into_iter().map(|mut step| {
            step.after.iter_mut().for_each(|(earlier, _)| *earlier += moved);
            step
        }));
        all
    }
}

/// Input and output may be one memory.
fn memory(part: Part) -> Part {
    if part == Part::Input { Part::Output } else { part }
}

// The order of the steps of an algorithm, and the proof that all orders have the same effect.
//
// Steps are ordered by their thread block, by dependencies, and by transfers (a send comes before
// its receive). A cycle of these would be a deadlock. So would be a cycle in which a connection
// holds [`CONNECTION_STEPS_MAX`] steps, and takes the next step only when the first of them has
// been received.
//
// Vector clocks show whether conflicting steps of a GPU are ordered: for each thread block of that
// GPU, a clock has the number of its steps that are over when a step begins. Clocks follow all
// edges, through other GPUs as well.

/// How many steps a connection holds that have not been received: the runtimes' buffers of eight
/// slots take two chunks by the protocol that takes most.
const CONNECTION_STEPS_MAX: usize = 2;
/// The maximum number of clock comparisons: the number of steps times the number of thread blocks.
const MAX_CLOCK_WORK: u64 = 1 << 31;

/// A step's number, over all GPUs.
type StepNumber = usize;

/// Where a step stands.
#[derive(Clone, Copy)]
struct StepPosition {
    gpu: Rank,
    block: usize,
    step: usize,
}

/// The steps of an algorithm with the edges between them.
pub(super) struct StepOrder<'a> {
    algorithm: &'a Algorithm,
    at: Vec<StepPosition>,
    /// Of every step, those that are over before it.
    before: Vec<Vec<StepNumber>>,
    /// Of every step that receives, the one that sends.
    senders: Vec<Option<StepNumber>>,
    /// All steps, each after those before it.
    sorted: Vec<StepNumber>,
}

/// One end of a connection: channel, sender, receiver.
type Connection = (u32, Rank, Rank);

impl<'a> StepOrder<'a> {
    /// Orders the steps.
    pub(super) fn of(algorithm: &'a Algorithm) -> Result<Self> {
        let mut order =
            Self { algorithm, at: Vec::new(), before: Vec::new(), senders: Vec::new(), sorted: Vec::new() };
        for (gpu, of) in algorithm.gpus.iter().enumerate() {
            let begins = order.at.len();
            for (block, thread) in of.blocks.iter().enumerate() {
                let steps = 0..thread.steps.len();
                order.at.extend(steps.map(|step| StepPosition { gpu: gpu as Rank, block, step }));
            }
            order.local_edges(begins, &of.blocks)?;
        }
        order.senders = vec![None; order.at.len()];
        let room = order.connect()?;
        order.sort(&room)?;
        Ok(order)
    }

    /// What a step does.
    fn instruction(&self, step: StepNumber) -> &'a Instruction {
        let StepPosition { gpu, block, step } = self.at[step];
        &self.algorithm.gpus[gpu as usize].blocks[block].steps[step]
    }

    /// The thread block of a step.
    fn thread_block(&self, step: StepNumber) -> &'a ThreadBlock {
        let StepPosition { gpu, block, .. } = self.at[step];
        &self.algorithm.gpus[gpu as usize].blocks[block]
    }

    /// Of a GPU whose first step has this number: the order in its thread blocks, and between them.
    fn local_edges(&mut self, begins: StepNumber, blocks: &[ThreadBlock]) -> Result<()> {
        let mut first = Vec::with_capacity(blocks.len());
        let mut next = begins;
        for block in blocks {
            first.push(next);
            next += block.steps.len();
        }
        for (index, block) in blocks.iter().enumerate() {
            for (number, step) in block.steps.iter().enumerate() {
                let mut before = Vec::new();
                if number > 0 {
                    before.push(first[index] + number - 1);
                }
                if let Some((depends_on, from)) = step.after {
                    // A step is known to be over when it, or a later one, tells so.
                    let told = blocks.get(depends_on as usize).and_then(|other| {
                        let tells = |step: &Instruction| {
                            step.is_waited_for && step.kind != super::InstructionKind::Nothing
                        };
                        let later = other.steps.get(from as usize..)?.iter();
                        Some(from as usize + { later }.position(tells)?)
                    });
                    let problem = ImportProblem::Dependency { block: depends_on, step: from };
                    let told = told.ok_or(ImportError { line: step.line, problem })?;
                    before.push(first[depends_on as usize] + told);
                }
                self.before.push(before);
            }
        }
        Ok(())
    }

    /// Joins sends and receives, and gives for each step those that must have made room for what it
    /// sends.
    fn connect(&mut self) -> Result<Vec<Vec<StepNumber>>> {
        let mut sends: BTreeMap<Connection, Vec<StepNumber>> = BTreeMap::new();
        let mut receives: BTreeMap<Connection, Vec<StepNumber>> = BTreeMap::new();
        for step in 0..self.at.len() {
            let (gpu, block) = (self.at[step].gpu, self.thread_block(step));
            let Instruction { kind, line, .. } = *self.instruction(step);
            let no_peer = |what| ImportError { line, problem: ImportProblem::NoPeer { what } };
            if kind.sends() {
                let to = block.send.ok_or_else(|| no_peer("send to"))?;
                sends.entry((block.channel, gpu, to)).or_default().push(step);
            }
            if kind.receives() {
                let from = block.receive.ok_or_else(|| no_peer("receive from"))?;
                receives.entry((block.channel, from, gpu)).or_default().push(step);
            }
        }
        self.are_used_by_one(&sends, |&(channel, gpu, peer)| (gpu, peer, channel))?;
        self.are_used_by_one(&receives, |&(channel, peer, gpu)| (gpu, peer, channel))?;
        let mut room = vec![Vec::new(); self.at.len()];
        let ends: Vec<Connection> = sends.keys().chain(receives.keys()).copied().collect();
        for connection in ends {
            let (channel, from, to) = connection;
            let of = |side: &BTreeMap<_, Vec<StepNumber>>| side.get(&connection).cloned().unwrap_or_default();
            let (sends, receives) = (of(&sends), of(&receives));
            for index in 0..sends.len().max(receives.len()) {
                let pair = (sends.get(index).copied(), receives.get(index).copied());
                let counts = (
                    pair.0.map(|step| self.instruction(step).count),
                    pair.1.map(|step| self.instruction(step).count),
                );
                let (Some(send), Some(receive), true) = (pair.0, pair.1, counts.0 == counts.1) else {
                    let alone = pair.0.or(pair.1).map_or(0, |step| step);
                    let Instruction { line, count, .. } = *self.instruction(alone);
                    return Err(ImportError {
                        line,
                        problem: ImportProblem::Unmatched { from, to, channel, count },
                    });
                };
                if self.senders[receive].is_some() {
                    break; // Listed once for each end.
                }
                self.senders[receive] = Some(send);
                self.before[receive].push(send);
                if let Some(&next) = sends.get(index + CONNECTION_STEPS_MAX) {
                    room[next].push(receive);
                }
            }
        }
        Ok(room)
    }

    fn are_used_by_one(
        &self,
        ends: &BTreeMap<Connection, Vec<StepNumber>>,
        end: impl Fn(&Connection) -> (Rank, Rank, u32),
    ) -> Result<()> {
        for (connection, steps) in ends {
            let other = steps.iter().find(|&&step| self.at[step].block != self.at[steps[0]].block);
            if let Some(&step) = other {
                let (gpu, peer, channel) = end(connection);
                let problem = ImportProblem::SharedConnection { gpu, peer, channel };
                return Err(ImportError { line: self.instruction(step).line, problem });
            }
        }
        Ok(())
    }

    /// Those with the shortest way from the beginning first.
    fn sort(&mut self, room: &[Vec<StepNumber>]) -> Result<()> {
        let steps = self.at.len();
        let mut waits = vec![0u32; steps];
        let mut after: Vec<Vec<StepNumber>> = vec![Vec::new(); steps];
        for step in 0..steps {
            for &earlier in self.before[step].iter().chain(&room[step]) {
                after[earlier].push(step);
                waits[step] += 1;
            }
        }
        let mut level = vec![0u32; steps];
        let mut ready: BinaryHeap<Reverse<(u32, StepNumber)>> =
            (0..steps).filter(|&step| waits[step] == 0).map(|step| Reverse((0, step))).collect();
        while let Some(Reverse((_, step))) = ready.pop() {
            self.sorted.push(step);
            for &later in &after[step] {
                level[later] = level[later].max(level[step] + 1);
                waits[later] -= 1;
                if waits[later] == 0 {
                    ready.push(Reverse((level[later], later)));
                }
            }
        }
        match (0..steps).find(|&step| waits[step] > 0) {
            None => Ok(()),
            Some(step) => {
                let problem = ImportProblem::Cycle { gpu: self.at[step].gpu };
                Err(ImportError { line: self.instruction(step).line, problem })
            }
        }
    }

    /// Checks that steps of a GPU which touch the same chunk, one of them writing, are ordered.
    /// `memory` says which place a chunk of a buffer is.
    fn check_races(&self, memory: impl Fn(Rank, (Buffer, u32)) -> (Buffer, u32)) -> Result<()> {
        let blocks: u64 = self.algorithm.gpus.iter().map(|gpu| gpu.blocks.len() as u64).sum();
        if blocks * self.at.len() as u64 > MAX_CLOCK_WORK {
            let problem = ImportProblem::TooMany { what: "steps by thread blocks", most: MAX_CLOCK_WORK };
            return Err(ImportError { line: 1, problem });
        }
        for gpu in 0..self.algorithm.gpus.len() as Rank {
            let clocks = self.clocks(gpu);
            self.check_races_of(gpu, &clocks, |place| memory(gpu, place))?;
        }
        Ok(())
    }

    /// Of every step, how many steps of each thread block of a GPU are over when it is.
    fn clocks(&self, gpu: Rank) -> Clocks {
        let width = self.algorithm.gpus[gpu as usize].blocks.len();
        let mut clocks = Clocks { width, over: vec![0; width * self.at.len()] };
        let mut own = vec![0; width];
        for &step in &self.sorted {
            own.fill(0);
            for &earlier in &self.before[step] {
                for (own, &known) in own.iter_mut().zip(clocks.of(earlier)) {
                    *own = known.max(*own);
                }
            }
            let StepPosition { gpu: of, block, step: number } = self.at[step];
            if of == gpu {
                own[block] = number as u16 + 1;
            }
            clocks.over[step * width..(step + 1) * width].copy_from_slice(&own);
        }
        clocks
    }

    fn check_races_of(
        &self,
        gpu: Rank,
        clocks: &Clocks,
        memory: impl Fn((Buffer, u32)) -> (Buffer, u32),
    ) -> Result<()> {
        /// The last write of a place, and the reads since.
        #[derive(Default)]
        struct PlaceAccesses {
            write: Option<StepNumber>,
            reads: Vec<StepNumber>,
        }
        let mut places: BTreeMap<(Buffer, u32), PlaceAccesses> = BTreeMap::new();
        let is_over = |earlier: StepNumber, step: StepNumber| {
            let StepPosition { block, step: number, .. } = self.at[earlier];
            earlier == step || clocks.of(step)[block] as usize > number
        };
        for &step in self.sorted.iter().filter(|&&step| self.at[step].gpu == gpu) {
            let Instruction { kind, source, target, count, line, .. } = *self.instruction(step);
            let race = |other: StepNumber| {
                let problem = ImportProblem::Race { gpu, other: self.instruction(other).line };
                Err(ImportError { line, problem })
            };
            for chunk in 0..count {
                let at = |(buffer, first): (Buffer, u32)| memory((buffer, first + chunk));
                let reads = [
                    kind.reads_source().then(|| at(source)),
                    (kind == super::InstructionKind::Reduce).then(|| at(target)),
                ];
                for place in reads.into_iter().flatten() {
                    let accesses = places.entry(place).or_default();
                    if let Some(write) = accesses.write.filter(|&write| !is_over(write, step)) {
                        return race(write);
                    }
                    accesses.reads.push(step);
                }
                if kind.writes_target() {
                    let accesses = places.entry(at(target)).or_default();
                    let mut earlier = accesses.write.iter().chain(&accesses.reads);
                    if let Some(&other) = earlier.find(|&&other| !is_over(other, step)) {
                        return race(other);
                    }
                    *accesses = PlaceAccesses { write: Some(step), reads: Vec::new() };
                }
            }
        }
        Ok(())
    }
}

struct Clocks {
    width: usize,
    over: Vec<u16>,
}

impl Clocks {
    fn of(&self, step: StepNumber) -> &[u16] {
        &self.over[step * self.width..(step + 1) * self.width]
    }
}
