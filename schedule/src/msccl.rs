//! Schedules as MSCCL algorithms: the XML that MSCCL and RCCL run on GPUs, written and read.
//!
//! [`export()`] writes a [`Schedule`](crate::Schedule) of puts as such an algorithm, [`import()`]
//! reads one, ours or a stranger's, into a [`Schedule`](crate::Schedule) that
//! [`verify`](crate::verify::verify()) can prove. **What is written is never trusted for that:** a
//! file is right when it was read back and proved. Nothing here has been run on GPUs.
//!
//! # The format
//!
//! An `algo` has a `gpu` for each rank, which has `tb`s (thread blocks), which have `step`s. A
//! thread block carries out its steps one after the other, receives from at most one peer and sends
//! to at most one, on one channel. The data are cut into `nchunksperloop` equal chunks; a step
//! works on `cnt` of them, from `srcoff` in `srcbuf` to `dstoff` in `dstbuf` (`i` input, `o`
//! output, `s` scratch):
//!
//! | type | what it does |
//! |--|--|
//! | `s` | sends its source |
//! | `r` | receives into its destination |
//! | `rcs` | receives into its destination and sends that on |
//! | `rrc` | source + what comes, into its destination |
//! | `rrs` | source + what comes, sent on without being kept |
//! | `rrcs` | source + what comes, into its destination, and sends that on |
//! | `cpy` | source into destination |
//! | `re` | destination + source, into destination |
//! | `nop` | carries one more dependency of the next step |
//!
//! A step begins after the step `deps` of thread block `depid` of its GPU, which must have
//! `hasdep="1"`. What is sent on a channel from one GPU to another arrives in order, through a
//! buffer between them.
//!
//! # What reading proves
//!
//! Import checks the order of the steps in the file: every send has its receive, thread blocks do
//! not wait for each other in a cycle if each connection holds two steps that have not been
//! received, and of two steps of a GPU that touch the same chunk, one of them writing, one is
//! before the other. So all orders in which the GPUs may run the algorithm have the same effect.
//! One of these orders becomes a schedule, and its proof shows the result. An algorithm for calls
//! in place alone is read with input and output as one memory. An algorithm for calls out of place
//! alone is read with its input set aside first, because a proof always covers both.
//!
//! **Invariant:** reading takes time and memory in proportion to the text and the limits below, and
//! never panics.

mod assign;
mod error;
mod import;
mod xml;

pub use error::{ExportError, ImportError, ImportProblem};
pub use import::import;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use pleach_vocabulary::{Collective, Rank};

use crate::{BlockId, Op, Part, Schedule, SignalSlot};

/// Longest XML that is read, in bytes.
pub const MAX_XML_BYTES: usize = 1 << 26;
/// Most GPUs of an algorithm that is read.
pub const MAX_GPUS: u32 = 1_024;
/// Most steps of an algorithm that is read, all GPUs together, each counted as often as it has
/// chunks.
pub const MAX_CHUNK_STEPS: u64 = 1 << 21;
/// Most places of an algorithm that is read: GPUs by chunks.
pub const MAX_PLACES: u64 = 1 << 22;
/// Most channels: what the runtimes are built with.
pub const MAX_CHANNELS: u32 = 32;
/// Most thread blocks of a GPU: all of them run at once, one on each multiprocessor. This is the
/// number of multiprocessors of an A100.
pub const MAX_THREAD_BLOCKS: u32 = 108;
/// Most peers of a GPU on one channel, each way.
pub const MAX_CHANNEL_PEERS: u32 = 32;
/// Most steps of a thread block in MSCCL.
pub const MAX_STEPS: u32 = 256;
/// Most steps of a thread block in RCCL, which is less.
pub const MAX_STEPS_RCCL: u32 = 64;
/// Most chunks of one step.
pub const MAX_COUNT: u32 = 71;

/// An algorithm as its file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Algorithm {
    name: String,
    collective: String,
    root: Option<Rank>,
    channels: u32,
    /// Of input or output, whichever is more.
    chunks: u32,
    in_place: bool,
    out_of_place: bool,
    gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Gpu {
    input_chunks: u32,
    output_chunks: u32,
    scratch_chunks: u32,
    /// By number.
    blocks: Vec<ThreadBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ThreadBlock {
    send: Option<Rank>,
    receive: Option<Rank>,
    channel: u32,
    /// The line of the file, for errors; 0 where there is no file.
    line: usize,
    steps: Vec<Instruction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Buffer {
    Input,
    Output,
    Scratch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionKind {
    Send,
    Receive,
    ReceiveCopySend,
    ReceiveReduceCopy,
    ReceiveReduceSend,
    ReceiveReduceCopySend,
    Copy,
    Reduce,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    kind: InstructionKind,
    source: (Buffer, u32),
    target: (Buffer, u32),
    count: u32,
    /// Thread block and step of the same GPU.
    after: Option<(u32, u32)>,
    is_waited_for: bool,
    line: usize,
}

impl InstructionKind {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Send, "s"),
        (Self::Receive, "r"),
        (Self::ReceiveCopySend, "rcs"),
        (Self::ReceiveReduceCopy, "rrc"),
        (Self::ReceiveReduceSend, "rrs"),
        (Self::ReceiveReduceCopySend, "rrcs"),
        (Self::Copy, "cpy"),
        (Self::Reduce, "re"),
        (Self::Nothing, "nop"),
    ];

    fn sends(self) -> bool {
        matches!(
            self,
            Self::Send | Self::ReceiveCopySend | Self::ReceiveReduceSend | Self::ReceiveReduceCopySend
        )
    }

    fn receives(self) -> bool {
        matches!(
            self,
            Self::Receive
                | Self::ReceiveCopySend
                | Self::ReceiveReduceCopy
                | Self::ReceiveReduceSend
                | Self::ReceiveReduceCopySend
        )
    }

    /// Whether it reads the chunks of its source.
    fn reads_source(self) -> bool {
        !matches!(self, Self::Receive | Self::ReceiveCopySend | Self::Nothing)
    }

    /// Whether it writes the chunks of its target.
    fn writes_target(self) -> bool {
        !matches!(self, Self::Send | Self::ReceiveReduceSend | Self::Nothing)
    }
}

// ---- Writes a schedule as an algorithm.
//
// A put and its wait are a send and a receive. Other signals are left out: in a schedule of puts
// they protect memory that a peer is about to write, and in MSCCL only a GPU writes its own
// memory. The work of a rank for a block is fused into as few steps as possible: received data are
// combined while they arrive, and are sent on at once. [`super::assign`] gives each step its
// thread block and channel.

/// An algorithm in its file's form, and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    /// The file.
    pub xml: String,
    /// How many chunks the data of a call are cut into; their length must divide by it.
    pub chunks: u32,
    /// Of all GPUs together.
    pub channels: u32,
    /// Of the GPU that has most.
    pub thread_blocks: u32,
    /// Of the thread block that has most. Above [`MAX_STEPS_RCCL`] RCCL
    /// refuses it.
    pub steps: u32,
    /// How much of the rate is lost at most because shares are rounded to equal chunks, from 0
    /// to 1.
    pub loss: f64,
}

/// Writes a schedule of puts as an MSCCL algorithm for calls in place and out of place.
///
/// The format has no root: an algorithm for a broadcast or reduce serves calls with the root of the
/// schedule only, which it names in an attribute that the runtimes pass over.
pub fn export(schedule: &Schedule) -> Result<Exported, ExportError> {
    let (name, root) = match schedule.collective {
        Collective::AllReduce => ("allreduce", None),
        Collective::AllGather => ("allgather", None),
        Collective::ReduceScatter => ("reducescatter", None),
        Collective::Broadcast { root } => ("broadcast", Some(root)),
        Collective::Reduce { root } => ("reduce", Some(root)),
        collective => return Err(ExportError::Collective { collective }),
    };
    let places = Places::of(schedule)?;
    let unplaced_steps = unplaced_steps(schedule)?;
    let (gpus, channels) = assign::thread_blocks(schedule.ranks(), &unplaced_steps, &places)?;
    let algorithm = Algorithm {
        name: format!("pleach {}", schedule.collective),
        collective: name.to_owned(),
        root,
        channels,
        chunks: places.chunks,
        in_place: true,
        out_of_place: true,
        gpus,
    };
    let blocks = algorithm.gpus.iter().map(|gpu| gpu.blocks.len()).max().unwrap_or(0);
    let steps =
        algorithm.gpus.iter().flat_map(|gpu| &gpu.blocks).map(|block| block.steps.len()).max().unwrap_or(0);
    Ok(Exported {
        xml: xml::print(&algorithm),
        chunks: places.chunks,
        channels,
        thread_blocks: blocks as u32,
        steps: steps as u32,
        loss: places.loss,
    })
}

/// Where the parts of a rank lie in its buffers.
struct Places {
    collective: Collective,
    /// Chunks of all the data.
    chunks: u32,
    /// Chunks of a part.
    each: u32,
    loss: f64,
    /// Of every block: its part, its first chunk in there, and how many.
    blocks: Vec<(u32, u32, u32)>,
}

impl Places {
    fn of(schedule: &Schedule) -> Result<Self, ExportError> {
        let parts = schedule.collective.parts(schedule.ranks());
        let mut weights = vec![Vec::new(); parts as usize];
        for block in &schedule.blocks {
            weights[block.part as usize].push(block.weight);
        }
        let Rounded { each, counts, loss } = rounded(&weights)?;
        let mut next: Vec<(usize, u32)> = vec![(0, 0); parts as usize];
        let mut blocks = Vec::with_capacity(schedule.blocks.len());
        for block in &schedule.blocks {
            let (index, first) = &mut next[block.part as usize];
            let count = counts[block.part as usize][*index];
            blocks.push((block.part, *first, count));
            *index += 1;
            *first += count;
        }
        let needed = u64::from(each) * u64::from(parts);
        let most = i16::MAX as u64;
        if needed > most {
            return Err(ExportError::TooMany { what: "chunks", needed, most });
        }
        Ok(Self { collective: schedule.collective, chunks: each * parts, each, loss, blocks })
    }

    fn count(&self, block: BlockId) -> u32 {
        self.blocks[block as usize].2
    }

    /// The buffer and first chunk of input or output.
    fn of_data(&self, memory: BlockMemory, block: BlockId) -> (Buffer, u32) {
        let (part, first, _) = self.blocks[block as usize];
        let (buffer, is_own) = match memory {
            BlockMemory::Input => (Buffer::Input, self.collective == Collective::AllGather),
            _ => (Buffer::Output, self.collective == Collective::ReduceScatter),
        };
        (buffer, if is_own { first } else { part * self.each + first })
    }

    fn gpu(&self) -> Gpu {
        let (input_chunks, output_chunks) = match self.collective {
            Collective::AllGather => (self.each, self.chunks),
            Collective::ReduceScatter => (self.chunks, self.each),
            _ => (self.chunks, self.chunks),
        };
        Gpu { input_chunks, output_chunks, ..Gpu::default() }
    }
}

/// A rank's memory for a block: windows are what they show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum BlockMemory {
    Input,
    Output,
    Scratch(u16),
}

fn memory(part: Part) -> BlockMemory {
    match part {
        Part::Input | Part::SharedInput => BlockMemory::Input,
        Part::Output | Part::SharedOutput => BlockMemory::Output,
        Part::Scratch(slot) => BlockMemory::Scratch(slot),
    }
}

/// A step before it has a thread block.
#[derive(Clone, Debug)]
struct UnplacedStep {
    rank: Rank,
    block: BlockId,
    /// How far from the beginning: whatever it needs has less.
    level: u32,
    kind: InstructionKind,
    source: BlockMemory,
    target: BlockMemory,
    /// The number of the received chunk, and its sender.
    receive: Option<(usize, Rank)>,
    /// The number of the sent chunk, and its receiver.
    send: Option<(usize, Rank)>,
}

/// An action of a rank for a block. Signals that only protect memory are left out.
enum Action {
    Send { transfer: usize, to: Rank, from: BlockMemory },
    Receive { transfer: usize, from: Rank, into: BlockMemory },
    Combine { from: Vec<BlockMemory>, into: Vec<BlockMemory> },
}

/// The steps of all ranks for all blocks.
fn unplaced_steps(schedule: &Schedule) -> Result<Vec<UnplacedStep>, ExportError> {
    let mut of_block: Vec<Vec<(Rank, usize)>> = vec![Vec::new(); schedule.blocks.len()];
    for (rank, lanes) in schedule.programs.iter().enumerate() {
        for (index, lane) in lanes.iter().enumerate() {
            of_block[lane.block as usize].push((rank as Rank, index));
        }
    }
    let mut unplaced_steps = Vec::new();
    let mut transfers = 0;
    for (block, lanes) in of_block.iter().enumerate() {
        let actions = actions(schedule, lanes, &mut transfers)?;
        for (rank, actions) in actions {
            let mut fuse = StepFusion::new(rank, block as BlockId, &actions);
            for (index, (level, action)) in actions.iter().enumerate() {
                fuse.action(index, *level, action);
            }
            unplaced_steps.append(&mut fuse.unplaced_steps);
        }
    }
    Ok(unplaced_steps)
}

/// The actions of each rank for a block, in a possible order.
fn actions(
    schedule: &Schedule,
    lanes: &[(Rank, usize)],
    transfers: &mut usize,
) -> Result<BTreeMap<Rank, Vec<(u32, Action)>>, ExportError> {
    let steps = |lane: usize| {
        let (rank, index) = lanes[lane];
        &schedule.programs[rank as usize][index].steps
    };
    let signals_of_waits = signals_of_waits(schedule, lanes)?;
    let mut actions: BTreeMap<Rank, Vec<(u32, Action)>> = BTreeMap::new();
    let mut levels: BTreeMap<(usize, usize), u32> = BTreeMap::new();
    let mut numbers: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut next = vec![0; lanes.len()];
    loop {
        let mut moved = false;
        for (lane, &(rank, _)) in lanes.iter().enumerate() {
            while let Some(step) = steps(lane).get(next[lane]) {
                let at = (lane, next[lane]);
                let mut level =
                    at.1.checked_sub(1)
                        .and_then(|before| levels.get(&(lane, before)))
                        .map_or(0, |level| level + 1);
                if let Some(signal) = signals_of_waits.get(&at) {
                    let Some(earlier) = levels.get(signal) else { break };
                    level = level.max(earlier + 1);
                }
                let action = match &step.op {
                    Op::Put { to, src, .. } => {
                        numbers.insert(at, *transfers);
                        *transfers += 1;
                        Some(Action::Send { transfer: *transfers - 1, to: *to, from: memory(*src) })
                    }
                    Op::Wait { from, .. } => signals_of_waits.get(&at).and_then(|&(lane, number)| {
                        let Op::Put { dst, .. } = steps(lane)[number].op else { return None };
                        let transfer = numbers[&(lane, number)];
                        Some(Action::Receive { transfer, from: *from, into: memory(dst) })
                    }),
                    Op::Reduce { from, into } => {
                        if from.iter().chain(into).any(|place| place.rank != rank) {
                            return Err(ExportError::Mapped { rank });
                        }
                        let places = |places: &[crate::Place]| -> Vec<BlockMemory> {
                            let different: BTreeSet<BlockMemory> =
                                places.iter().map(|place| memory(place.part)).collect();
                            different.into_iter().collect()
                        };
                        Some(Action::Combine { from: places(from), into: places(into) })
                    }
                    Op::Signal { .. } => None,
                };
                if let Some(action) = action {
                    actions.entry(rank).or_default().push((level, action));
                }
                levels.insert(at, level);
                next[lane] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..lanes.len()).find(|&lane| next[lane] < steps(lane).len());
    match stuck {
        Some(lane) => Err(ExportError::Unmatched { rank: lanes[lane].0 }),
        None => {
            // Several lanes of a rank are carried out side by side.
            actions.values_mut().for_each(|actions| actions.sort_by_key(|&(level, _)| level));
            Ok(actions)
        }
    }
}

/// The lane and step of a block that gives the signal which a wait consumes, by the wait's.
type SignalOfWait = BTreeMap<(usize, usize), (usize, usize)>;

/// Signals of a signal slot are consumed in the order in which they are given.
fn signals_of_waits(schedule: &Schedule, lanes: &[(Rank, usize)]) -> Result<SignalOfWait, ExportError> {
    let mut given: BTreeMap<(Rank, Rank, SignalSlot), VecDeque<(usize, usize)>> = BTreeMap::new();
    let mut awaited = given.clone();
    for (lane, &(rank, index)) in lanes.iter().enumerate() {
        for (number, step) in schedule.programs[rank as usize][index].steps.iter().enumerate() {
            match step.op {
                Op::Signal { to, signal_slot } | Op::Put { to, signal_slot, .. } => {
                    given.entry((rank, to, signal_slot)).or_default().push_back((lane, number));
                }
                Op::Wait { from, signal_slot } => {
                    awaited.entry((from, rank, signal_slot)).or_default().push_back((lane, number));
                }
                Op::Reduce { .. } => {}
            }
        }
    }
    let mut signals_of_waits = SignalOfWait::new();
    for (key, waits) in awaited {
        for wait in waits {
            let signal = given.get_mut(&key).and_then(VecDeque::pop_front);
            signals_of_waits.insert(wait, signal.ok_or(ExportError::Unmatched { rank: key.1 })?);
        }
    }
    Ok(signals_of_waits)
}

/// Puts acts together to steps.
struct StepFusion<'a> {
    rank: Rank,
    block: BlockId,
    actions: &'a [(u32, Action)],
    unplaced_steps: Vec<UnplacedStep>,
    /// Chunks that were received and are not combined yet.
    pending: BTreeMap<BlockMemory, (usize, Rank)>,
}

impl<'a> StepFusion<'a> {
    fn new(rank: Rank, block: BlockId, actions: &'a [(u32, Action)]) -> Self {
        Self { rank, block, actions, unplaced_steps: Vec::new(), pending: BTreeMap::new() }
    }

    fn action(&mut self, index: usize, level: u32, action: &Action) {
        match action {
            Action::Receive { transfer, from, into } => {
                if self.is_only_combined(index, *into) {
                    self.pending.insert(*into, (*transfer, *from));
                } else {
                    self.push(level, InstructionKind::Receive, *into, *into).receive =
                        Some((*transfer, *from));
                }
            }
            Action::Combine { from, into } => self.combine(level, from, into),
            Action::Send { transfer, to, from } => self.send(index, level, *transfer, *to, *from),
        }
    }

    /// Whether what an act writes to scratch is read once, to be combined.
    fn is_only_combined(&self, written: usize, place: BlockMemory) -> bool {
        let readers = self.readers(written, place);
        matches!((place, readers.as_slice()), (BlockMemory::Scratch(_), [only]) if matches!(self.actions[*only].1, Action::Combine { .. }))
    }

    /// The acts that read what an act has written.
    fn readers(&self, written: usize, place: BlockMemory) -> Vec<usize> {
        let mut readers = Vec::new();
        for (index, (_, action)) in self.actions.iter().enumerate().skip(written + 1) {
            let (reads, writes) = match action {
                Action::Send { from, .. } => (*from == place, false),
                Action::Receive { into, .. } => (false, *into == place),
                Action::Combine { from, into } => (from.contains(&place), into.contains(&place)),
            };
            if reads {
                readers.push(index);
            }
            if writes {
                break;
            }
        }
        readers
    }

    fn push(
        &mut self,
        level: u32,
        kind: InstructionKind,
        source: BlockMemory,
        target: BlockMemory,
    ) -> &mut UnplacedStep {
        let Self { rank, block, .. } = *self;
        self.unplaced_steps.push(UnplacedStep {
            rank,
            block,
            level,
            kind,
            source,
            target,
            receive: None,
            send: None,
        });
        let last = self.unplaced_steps.len() - 1;
        &mut self.unplaced_steps[last]
    }

    fn combine(&mut self, level: u32, from: &[BlockMemory], into: &[BlockMemory]) {
        let mut coming: VecDeque<(usize, Rank)> = VecDeque::new();
        let mut here = Vec::new();
        for place in from {
            match self.pending.remove(place) {
                Some(transfer) => coming.push_back(transfer),
                None => here.push(*place),
            }
        }
        let target = into.iter().copied().find(|place| *place == BlockMemory::Output).unwrap_or(into[0]);
        // The sum so far; it begins with what is in the target already, if that is one of the
        // sources.
        let first = here.iter().position(|place| *place == target).unwrap_or(0);
        let mut sum = (!here.is_empty()).then(|| here.remove(first));
        while let Some(transfer) = coming.pop_front() {
            let kind =
                if sum.is_some() { InstructionKind::ReceiveReduceCopy } else { InstructionKind::Receive };
            self.push(level, kind, sum.unwrap_or(target), target).receive = Some(transfer);
            sum = Some(target);
        }
        if let Some(only) = sum.filter(|sum| *sum != target) {
            self.push(level, InstructionKind::Copy, only, target);
        }
        for place in here {
            self.push(level, InstructionKind::Reduce, place, target);
        }
        for &other in into.iter().filter(|place| **place != target) {
            if from != [other] {
                self.push(level, InstructionKind::Copy, target, other);
            }
        }
    }

    /// Sends on what has just come, or by itself.
    fn send(&mut self, index: usize, level: u32, transfer: usize, to: Rank, from: BlockMemory) {
        let is_read_again = {
            let writer = (0..index).rev().find(|&action| match &self.actions[action].1 {
                Action::Send { .. } => false,
                Action::Receive { into, .. } => *into == from,
                Action::Combine { into, .. } => into.contains(&from),
            });
            writer.is_none_or(|writer| self.readers(writer, from).len() > 1)
        };
        let writer = self
            .unplaced_steps
            .iter_mut()
            .rev()
            .find(|unplaced_step| unplaced_step.kind.writes_target() && unplaced_step.target == from);
        let fused = writer.and_then(|unplaced_step| {
            let kind = match unplaced_step.kind {
                InstructionKind::Receive => InstructionKind::ReceiveCopySend,
                InstructionKind::ReceiveReduceCopy
                    if matches!(from, BlockMemory::Scratch(_)) && !is_read_again =>
                {
                    InstructionKind::ReceiveReduceSend
                }
                InstructionKind::ReceiveReduceCopy => InstructionKind::ReceiveReduceCopySend,
                _ => return None,
            };
            Some((unplaced_step, kind))
        });
        match fused {
            Some((unplaced_step, kind)) => {
                unplaced_step.kind = kind;
                unplaced_step.send = Some((transfer, to));
            }
            None => self.push(level, InstructionKind::Send, from, from).send = Some((transfer, to)),
        }
    }
}

// Shares of the data, rounded to equal chunks.

/// Most chunks that a part is cut into: calls whose length does not divide by them go another way
/// in the runtimes.
const CHUNKS_MAX: u32 = 64;

/// How many chunks each block gets, for every part, and what that loses.
#[derive(Debug)]
struct Rounded {
    /// Chunks of a part.
    each: u32,
    /// By part, of its blocks in their order.
    counts: Vec<Vec<u32>>,
    /// How much slower the block is that got too much, at most: 0 where all shares are exact.
    loss: f64,
}

/// Cuts every part into the same number of chunks. `weights` are those of its blocks.
fn rounded(weights: &[Vec<u32>]) -> Result<Rounded, ExportError> {
    let different: BTreeSet<&Vec<u32>> = weights.iter().collect();
    let blocks = weights.iter().map(Vec::len).max().unwrap_or(0) as u64;
    if blocks > u64::from(CHUNKS_MAX) {
        let what = "trees share one part of the data";
        return Err(ExportError::TooMany { what, needed: blocks, most: u64::from(CHUNKS_MAX) });
    }
    let worst = |each: u32| {
        let excess = |weights: &&Vec<u32>| excess(weights, &apportioned(weights, each));
        different.iter().map(excess).fold(1.0, f64::max)
    };
    let mut best = (f64::INFINITY, 0);
    for each in blocks.max(1) as u32..=CHUNKS_MAX {
        let excess = worst(each);
        if excess < best.0 {
            best = (excess, each);
        }
    }
    let (excess, each) = best;
    let counts = weights.iter().map(|weights| apportioned(weights, each)).collect();
    Ok(Rounded { each, counts, loss: 1.0 - 1.0 / excess })
}

/// At least one each; what is left goes where it makes the largest excess smallest.
fn apportioned(weights: &[u32], each: u32) -> Vec<u32> {
    let mut counts = vec![1; weights.len()];
    for _ in weights.len()..each as usize {
        let after = |index: usize| (u64::from(counts[index]) + 1, u64::from(weights[index]));
        let by_excess = |&one: &usize, &other: &usize| {
            let ((count, weight), (other_count, other_weight)) = (after(one), after(other));
            (count * other_weight).cmp(&(other_count * weight))
        };
        let least = (0..weights.len()).min_by(by_excess);
        let Some(least) = least else { break };
        counts[least] += 1;
    }
    counts
}

/// The largest share by chunks over the share by weight.
fn excess(weights: &[u32], counts: &[u32]) -> f64 {
    let (weight, count): (u64, u64) = (sum(weights), sum(counts));
    let ratios = weights.iter().zip(counts).map(|(&of_weight, &of_count)| {
        (f64::from(of_count) * weight as f64) / (f64::from(of_weight) * count as f64)
    });
    ratios.fold(1.0, f64::max)
}

fn sum(numbers: &[u32]) -> u64 {
    numbers.iter().map(|&number| u64::from(number)).sum()
}

#[cfg(test)]
mod rounding_tests {
    use super::*;

    #[test]
    fn shares_that_come_out_even_lose_nothing_and_take_the_fewest_chunks() {
        let Rounded { each, counts, loss } = rounded(&[vec![6, 3, 3], vec![1, 1]]).unwrap();
        assert_eq!((each, counts, loss), (4, vec![vec![2, 1, 1], vec![2, 2]], 0.0));
    }

    #[test]
    fn shares_that_do_not_are_rounded_and_the_loss_is_that_of_the_largest_excess() {
        let Rounded { each, counts, loss } = rounded(&[vec![100, 1]]).unwrap();
        assert_eq!((each, counts), (64, vec![vec![63, 1]]));
        assert!((loss - (1.0 - 64.0 / 101.0)).abs() < 1e-12, "{loss}");
    }

    #[test]
    fn more_blocks_than_chunks_are_refused() {
        assert!(rounded(&[vec![1; 65]]).is_err() && rounded(&[vec![1; 64]]).is_ok());
    }
}

#[cfg(test)]
mod tests;
