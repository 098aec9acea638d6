//! In which order the steps of an algorithm are carried out, and whether all orders do the same.
//!
//! Steps are ordered by their thread block, by dependencies, and by what is sent before it is
//! received. A circle of these would never end. Neither may there be one where a connection holds
//! [`HELD`] steps, and takes the next one only when the first of them has been received.
//!
//! Whether conflicting steps of a GPU are ordered is found by clocks: of each thread block of that
//! GPU, how many of its steps are known to be over when a step begins. They follow all edges,
//! through other GPUs as well.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use pleach_vocabulary::Rank;

use super::error::{ImportError, Problem};
use super::{Algorithm, Buffer, Instruction, ThreadBlock};

/// How many steps a connection holds that have not been received: the runtimes' buffers of eight
/// slots take two chunks by the protocol that takes most.
const HELD: usize = 2;
/// Most comparisons of clocks: all steps by all thread blocks.
const MAX_CLOCK_WORK: u64 = 1 << 31;

/// A step's number, over all GPUs.
pub(super) type StepNumber = usize;

/// Where a step stands.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) gpu: Rank,
    block: usize,
    step: usize,
}

/// The steps of an algorithm with the edges between them.
pub(super) struct Order<'a> {
    algorithm: &'a Algorithm,
    pub(super) at: Vec<At>,
    /// Of every step, those that are over before it.
    before: Vec<Vec<StepNumber>>,
    /// Of every step that receives, the one that sends.
    pub(super) senders: Vec<Option<StepNumber>>,
    /// All steps, each after those before it.
    pub(super) sorted: Vec<StepNumber>,
}

/// One end of a connection: channel, sender, receiver.
type Connection = (u32, Rank, Rank);

impl<'a> Order<'a> {
    /// Orders the steps.
    pub(super) fn of(algorithm: &'a Algorithm) -> Result<Self, ImportError> {
        let mut order =
            Self { algorithm, at: Vec::new(), before: Vec::new(), senders: Vec::new(), sorted: Vec::new() };
        for (gpu, of) in algorithm.gpus.iter().enumerate() {
            let begins = order.at.len();
            for (block, thread) in of.blocks.iter().enumerate() {
                let steps = 0..thread.steps.len();
                order.at.extend(steps.map(|step| At { gpu: gpu as Rank, block, step }));
            }
            order.local_edges(begins, &of.blocks)?;
        }
        order.senders = vec![None; order.at.len()];
        let room = order.connect()?;
        order.sort(&room)?;
        Ok(order)
    }

    /// What a step does.
    pub(super) fn instruction(&self, step: StepNumber) -> &'a Instruction {
        let At { gpu, block, step } = self.at[step];
        &self.algorithm.gpus[gpu as usize].blocks[block].steps[step]
    }

    /// The thread block of a step.
    pub(super) fn thread_block(&self, step: StepNumber) -> &'a ThreadBlock {
        let At { gpu, block, .. } = self.at[step];
        &self.algorithm.gpus[gpu as usize].blocks[block]
    }

    /// Of a GPU whose first step has this number: the order in its thread blocks, and between them.
    fn local_edges(&mut self, begins: StepNumber, blocks: &[ThreadBlock]) -> Result<(), ImportError> {
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
                        let tells =
                            |step: &Instruction| step.is_waited_for && step.kind != super::Kind::Nothing;
                        let later = other.steps.get(from as usize..)?.iter();
                        Some(from as usize + { later }.position(tells)?)
                    });
                    let problem = Problem::Dependency { block: depends_on, step: from };
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
    fn connect(&mut self) -> Result<Vec<Vec<StepNumber>>, ImportError> {
        let mut sends: BTreeMap<Connection, Vec<StepNumber>> = BTreeMap::new();
        let mut receives: BTreeMap<Connection, Vec<StepNumber>> = BTreeMap::new();
        for step in 0..self.at.len() {
            let (gpu, block) = (self.at[step].gpu, self.thread_block(step));
            let Instruction { kind, line, .. } = *self.instruction(step);
            let no_peer = |what| ImportError { line, problem: Problem::NoPeer { what } };
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
                        problem: Problem::Unmatched { from, to, channel, count },
                    });
                };
                if self.senders[receive].is_some() {
                    break; // Listed once for each end.
                }
                self.senders[receive] = Some(send);
                self.before[receive].push(send);
                if let Some(&next) = sends.get(index + HELD) {
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
    ) -> Result<(), ImportError> {
        for (connection, steps) in ends {
            let other = steps.iter().find(|&&step| self.at[step].block != self.at[steps[0]].block);
            if let Some(&step) = other {
                let (gpu, peer, channel) = end(connection);
                let problem = Problem::SharedConnection { gpu, peer, channel };
                return Err(ImportError { line: self.instruction(step).line, problem });
            }
        }
        Ok(())
    }

    /// Those with the shortest way from the beginning first.
    fn sort(&mut self, room: &[Vec<StepNumber>]) -> Result<(), ImportError> {
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
                let problem = Problem::Circle { gpu: self.at[step].gpu };
                Err(ImportError { line: self.instruction(step).line, problem })
            }
        }
    }

    /// That steps of a GPU which touch the same chunk, one of them writing, are ordered. `memory`
    /// says which place a chunk of a buffer is.
    pub(super) fn check_races(
        &self,
        memory: impl Fn(Rank, (Buffer, u32)) -> (Buffer, u32),
    ) -> Result<(), ImportError> {
        let blocks: u64 = self.algorithm.gpus.iter().map(|gpu| gpu.blocks.len() as u64).sum();
        if blocks * self.at.len() as u64 > MAX_CLOCK_WORK {
            let problem = Problem::TooMany { what: "steps by thread blocks", most: MAX_CLOCK_WORK };
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
            let At { gpu: of, block, step: number } = self.at[step];
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
    ) -> Result<(), ImportError> {
        /// The last write of a place, and the reads since.
        #[derive(Default)]
        struct Touched {
            write: Option<StepNumber>,
            reads: Vec<StepNumber>,
        }
        let mut places: BTreeMap<(Buffer, u32), Touched> = BTreeMap::new();
        let is_over = |earlier: StepNumber, step: StepNumber| {
            let At { block, step: number, .. } = self.at[earlier];
            earlier == step || clocks.of(step)[block] as usize > number
        };
        for &step in self.sorted.iter().filter(|&&step| self.at[step].gpu == gpu) {
            let Instruction { kind, source, target, count, line, .. } = *self.instruction(step);
            let race = |other: StepNumber| {
                let problem = Problem::Race { gpu, other: self.instruction(other).line };
                Err(ImportError { line, problem })
            };
            for chunk in 0..count {
                let at = |(buffer, first): (Buffer, u32)| memory((buffer, first + chunk));
                let reads = [
                    kind.reads_source().then(|| at(source)),
                    (kind == super::Kind::Reduce).then(|| at(target)),
                ];
                for place in reads.into_iter().flatten() {
                    let touched = places.entry(place).or_default();
                    if let Some(write) = touched.write.filter(|&write| !is_over(write, step)) {
                        return race(write);
                    }
                    touched.reads.push(step);
                }
                if kind.writes_target() {
                    let touched = places.entry(at(target)).or_default();
                    let mut earlier = touched.write.iter().chain(&touched.reads);
                    if let Some(&other) = earlier.find(|&&other| !is_over(other, step)) {
                        return race(other);
                    }
                    *touched = Touched { write: Some(step), reads: Vec::new() };
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
