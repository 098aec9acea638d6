//! A test interpreter that runs a schedule on abstract values, in random order, and detects errors.
//!
//! Values are reduction expressions. Memory is laid out in all the ways that the schedule must
//! support: shared windows are the caller's memory or scratch, output is input or not. Everything
//! that takes time is two or three events (a put: issued, arrival, shown, done) with other events
//! in between. Reading a place that is being written is an error, and so is a source that changes
//! while it is read, or a caller's buffer that is touched before its rank began or after it ended.

use std::collections::{BTreeMap, BTreeSet};

use pleach_vocabulary::Collective;

use crate::{Op, Part, Place, Schedule};

/// How the memory lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct BufferLayout {
    /// Shared windows are the caller's slices.
    registered: bool,
    /// Output and input are the same slice.
    in_place: bool,
}

pub(super) const LAYOUTS: [BufferLayout; 4] = [
    BufferLayout { registered: false, in_place: false },
    BufferLayout { registered: false, in_place: true },
    BufferLayout { registered: true, in_place: false },
    BufferLayout { registered: true, in_place: true },
];

/// A contribution count for each rank, and a hash of how they were combined.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    counts: Vec<u8>,
    expression: u64,
}

#[derive(Clone, Debug, Default)]
struct PlaceState {
    value: Option<Value>,
    version: u64,
    torn: bool,
}

/// Rank, part, block, and chunk or instance.
type Address = (u32, Part, u32, u32);

/// Waiting rank, raising rank, block, signal slot, instance.
type SignalSlot = (u32, u32, u32, u16, u32);

/// Something that will happen.
enum PendingEvent {
    Land { run: usize, step: usize, version: u64 },
    Show { run: usize, step: usize, version: u64 },
    Finish { run: usize, step: usize, versions: Vec<u64> },
}

/// A chunk of a lane.
struct LaneRun {
    rank: u32,
    lane: usize,
    chunk: u32,
    issued: usize,
    complete: Vec<bool>,
    /// Steps that are not complete.
    left: usize,
}

struct Machine<'a> {
    schedule: &'a Schedule,
    layout: BufferLayout,
    chunks: u32,
    random: u64,
    memory: BTreeMap<Address, PlaceState>,
    /// Signals that were raised and not waited for.
    signals: BTreeSet<SignalSlot>,
    runs: Vec<LaneRun>,
    /// Index of the run of a rank's lane and chunk.
    first_run: Vec<Vec<usize>>,
    pending: Vec<PendingEvent>,
    begun: Vec<bool>,
    left: Vec<usize>,
}

/// Runs the schedule over some chunks a block; says what is wrong.
pub(super) fn interpret(
    schedule: &Schedule,
    layout: BufferLayout,
    chunks: u32,
    seed: u64,
) -> Result<(), String> {
    let mut machine = Machine::new(schedule, layout, chunks, seed);
    machine.run()?;
    machine.check_result()
}

impl<'a> Machine<'a> {
    fn new(schedule: &'a Schedule, layout: BufferLayout, chunks: u32, seed: u64) -> Self {
        let mut machine = Machine {
            schedule,
            layout,
            chunks,
            random: seed.wrapping_mul(2).wrapping_add(1),
            memory: BTreeMap::new(),
            signals: BTreeSet::new(),
            runs: Vec::new(),
            first_run: Vec::new(),
            pending: Vec::new(),
            begun: vec![false; schedule.programs.len()],
            left: Vec::new(),
        };
        for (rank, lanes) in schedule.programs.iter().enumerate() {
            machine.left.push(lanes.len() * chunks as usize);
            let mut first = Vec::new();
            for (lane, program) in lanes.iter().enumerate() {
                first.push(machine.runs.len());
                for chunk in 0..chunks {
                    let (rank, left) = (rank as u32, program.steps.len());
                    let complete = vec![false; left];
                    machine.runs.push(LaneRun { rank, lane, chunk, issued: 0, complete, left });
                }
            }
            machine.first_run.push(first);
        }
        let ranks = schedule.ranks();
        for rank in 0..ranks {
            for (block, cut) in schedule.blocks.iter().enumerate() {
                if schedule.collective.input_parts(rank, ranks).contains(cut.part) {
                    let mut counts = vec![0; ranks as usize];
                    counts[rank as usize] = 1;
                    let value = Value { counts, expression: hash(&[u64::from(rank), 17]) };
                    for chunk in 0..chunks {
                        let address = machine.address(Place { rank, part: Part::Input }, block as u32, chunk);
                        machine.memory.entry(address).or_default().value = Some(value.clone());
                    }
                }
            }
        }
        machine
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize % limit
    }

    fn address(&self, place: Place, block: u32, chunk: u32) -> Address {
        let ranks = self.schedule.ranks();
        let part = self.schedule.blocks[block as usize].part;
        let mut physical = place.part;
        if self.layout.registered {
            physical = match physical {
                Part::SharedInput => Part::Input,
                Part::SharedOutput => Part::Output,
                other => other,
            };
        } else if physical == Part::SharedOutput {
            // One window stands in for both.
            physical = Part::SharedInput;
        }
        let has_input = self.schedule.collective.input_parts(place.rank, ranks).contains(part);
        if self.layout.in_place && physical == Part::Output && has_input {
            physical = Part::Input;
        }
        let whole = matches!(physical, Part::Input | Part::Output);
        (place.rank, physical, block, if whole { chunk } else { chunk % self.schedule.window })
    }

    fn run(&mut self) -> Result<(), String> {
        let mut left: usize = self.left.iter().sum();
        let mut order: Vec<usize> = (0..self.runs.len()).collect();
        while left > 0 || !self.pending.is_empty() {
            // Mostly one thing at a time, from a random place.
            if !self.pending.is_empty() && self.below(3) == 0 {
                left -= self.complete_pending()?;
                continue;
            }
            let mut moved = false;
            for index in (0..order.len()).rev() {
                let other = self.below(index + 1);
                order.swap(index, other);
                if let Some(ended) = self.issue(order[index])? {
                    left -= ended;
                    moved = true;
                    if self.below(2) == 0 {
                        break;
                    }
                }
            }
            order.retain(|&run| self.runs[run].left > 0);
            if !moved {
                if self.pending.is_empty() {
                    return Err(self.deadlock());
                }
                left -= self.complete_pending()?;
            }
        }
        match self.signals.first() {
            Some(signal_slot) => {
                Err(format!("signal (to, from, block, signal slot, instance) {signal_slot:?} is left over"))
            }
            None => Ok(()),
        }
    }

    fn deadlock(&self) -> String {
        let stuck = self.runs.iter().find(|run| run.issued < run.complete.len());
        stuck.map_or_else(String::new, |run| {
            format!("deadlock: rank {} lane {} chunk {} step {}", run.rank, run.lane, run.chunk, run.issued)
        })
    }

    fn op(&self, run: usize, step: usize) -> (&'a Op, u32) {
        let LaneRun { rank, lane, .. } = self.runs[run];
        let lane = &self.schedule.programs[rank as usize][lane];
        (&lane.steps[step].op, lane.block)
    }

    /// Issues the run's next step if it may be; returns how many runs that ended.
    fn issue(&mut self, index: usize) -> Result<Option<usize>, String> {
        let LaneRun { rank, lane: lane_index, chunk, issued, .. } = self.runs[index];
        let lane = &self.schedule.programs[rank as usize][lane_index];
        let Some(step) = lane.steps.get(issued) else { return Ok(None) };
        let first = self.first_run[rank as usize][lane_index];
        let window = self.schedule.window;
        if chunk >= window && self.runs[first + (chunk - window) as usize].left > 0 {
            return Ok(None);
        }
        for &(earlier, chunks) in &step.after {
            if chunks == 0 && earlier as usize >= issued {
                return Err(format!("rank {rank} lane {lane_index} step {issued} depends on a later step"));
            }
            if chunks <= chunk && !self.runs[first + (chunk - chunks) as usize].complete[earlier as usize] {
                return Ok(None);
            }
        }
        let instance = chunk % window;
        if let Op::Wait { from, signal_slot } = step.op {
            let signal_slot = (rank, from, lane.block, signal_slot.0, instance);
            if !self.signals.remove(&signal_slot) {
                return Ok(None);
            }
        }
        self.begun[rank as usize] = true;
        self.runs[index].issued += 1;
        match &step.op {
            Op::Wait { .. } => return self.complete(index, issued).map(Some),
            Op::Signal { to, signal_slot } => {
                self.show((*to, rank, lane.block, signal_slot.0, instance))?;
                return self.complete(index, issued).map(Some);
            }
            Op::Put { src, .. } => {
                let version = self.read(rank, Place { rank, part: *src }, lane.block, chunk)?;
                self.pending.push(PendingEvent::Land { run: index, step: issued, version });
            }
            Op::Reduce { from, into } => {
                let mut versions = Vec::new();
                for &place in from {
                    versions.push(self.read(rank, place, lane.block, chunk)?);
                }
                for &place in into {
                    if !self.is_source(place, from, lane.block, chunk) {
                        self.begin_write(rank, place, lane.block, chunk)?;
                    }
                }
                self.pending.push(PendingEvent::Finish { run: index, step: issued, versions });
            }
        }
        Ok(Some(0))
    }

    fn is_source(&self, place: Place, from: &[Place], block: u32, chunk: u32) -> bool {
        let address = self.address(place, block, chunk);
        from.iter().any(|&source| self.address(source, block, chunk) == address)
    }

    /// Lets something pending happen.
    fn complete_pending(&mut self) -> Result<usize, String> {
        let chosen = self.below(self.pending.len());
        match self.pending.swap_remove(chosen) {
            PendingEvent::Land { run, step, version } => {
                let (op, block) = self.op(run, step);
                let Op::Put { to, dst, .. } = op else { unreachable!() };
                let LaneRun { rank, chunk, .. } = self.runs[run];
                self.begin_write(rank, Place { rank: *to, part: *dst }, block, chunk)?;
                self.pending.push(PendingEvent::Show { run, step, version });
                Ok(0)
            }
            PendingEvent::Show { run, step, version } => {
                let (op, block) = self.op(run, step);
                let Op::Put { to, src, dst, signal_slot } = op else { unreachable!() };
                let LaneRun { rank, chunk, .. } = self.runs[run];
                let source = self.address(Place { rank, part: *src }, block, chunk);
                self.unchanged(source, version)?;
                let value = self.memory[&source].value.clone();
                self.write(self.address(Place { rank: *to, part: *dst }, block, chunk), value);
                self.show((*to, rank, block, signal_slot.0, chunk % self.schedule.window))?;
                self.pending.push(PendingEvent::Finish { run, step, versions: Vec::new() });
                Ok(0)
            }
            PendingEvent::Finish { run, step, versions } => {
                let (op, block) = self.op(run, step);
                let chunk = self.runs[run].chunk;
                if let Op::Reduce { from, into } = op {
                    let mut sources = Vec::new();
                    for (&place, version) in from.iter().zip(versions) {
                        let address = self.address(place, block, chunk);
                        self.unchanged(address, version)?;
                        sources.push(self.memory[&address].value.clone());
                    }
                    let value = combine(sources)?;
                    for &place in into {
                        self.write(self.address(place, block, chunk), Some(value.clone()));
                    }
                }
                self.complete(run, step)
            }
        }
    }

    fn complete(&mut self, index: usize, step: usize) -> Result<usize, String> {
        let run = &mut self.runs[index];
        assert!(!run.complete[step], "a step completes once");
        run.complete[step] = true;
        run.left -= 1;
        let ended = run.left == 0;
        self.left[run.rank as usize] -= usize::from(ended);
        Ok(usize::from(ended))
    }

    fn show(&mut self, signal_slot: SignalSlot) -> Result<(), String> {
        if !self.signals.insert(signal_slot) {
            return Err(format!(
                "signal slot (to, from, block, signal slot, instance) {signal_slot:?} signalled twice"
            ));
        }
        Ok(())
    }

    /// A peer may touch a caller's memory between its rank's first and last step; only its own rank
    /// the private one.
    fn allowed(&self, by: u32, place: Place) -> Result<(), String> {
        if by == place.rank || matches!(place.part, Part::Scratch(_)) {
            return Ok(());
        }
        if matches!(place.part, Part::Input | Part::Output) {
            return Err(format!("rank {by} touches {place}"));
        }
        let rank = place.rank as usize;
        if !self.begun[rank] || self.left[rank] == 0 {
            return Err(format!("rank {by} touches {place} before its beginning or after its end"));
        }
        Ok(())
    }

    fn read(&mut self, by: u32, place: Place, block: u32, chunk: u32) -> Result<u64, String> {
        self.allowed(by, place)?;
        let address = self.address(place, block, chunk);
        match self.memory.get(&address) {
            Some(PlaceState { value: Some(_), torn: false, version }) => Ok(*version),
            _ => {
                Err(format!("rank {by} reads {place} of block {block} chunk {chunk}, which is torn or empty"))
            }
        }
    }

    fn begin_write(&mut self, by: u32, place: Place, block: u32, chunk: u32) -> Result<(), String> {
        self.allowed(by, place)?;
        let entry = self.memory.entry(self.address(place, block, chunk)).or_default();
        entry.torn = true;
        entry.version += 1;
        Ok(())
    }

    fn unchanged(&self, address: Address, version: u64) -> Result<(), String> {
        if self.memory[&address].version == version {
            Ok(())
        } else {
            Err(format!("{address:?} changed while it was read"))
        }
    }

    fn write(&mut self, address: Address, value: Option<Value>) {
        let entry = self.memory.entry(address).or_default();
        // What was there already does not change by being written again.
        entry.version += u64::from(entry.value != value);
        entry.torn = false;
        entry.value = value;
    }

    fn check_result(&self) -> Result<(), String> {
        let schedule = self.schedule;
        let ranks = schedule.ranks();
        let mut seen: BTreeMap<(u32, u32), Value> = BTreeMap::new();
        for rank in 0..ranks {
            for (block, cut) in schedule.blocks.iter().enumerate() {
                if !schedule.collective.output_parts(rank, ranks).contains(cut.part) {
                    continue;
                }
                for chunk in 0..self.chunks {
                    let at = self.address(Place { rank, part: Part::Output }, block as u32, chunk);
                    let value = self.memory.get(&at).and_then(|cellful| cellful.value.clone());
                    let value =
                        value.ok_or_else(|| format!("rank {rank} has no output for block {block}"))?;
                    for contributor in 0..ranks {
                        let due = u8::from(schedule.collective.contributes(contributor, cut.part, ranks));
                        if value.counts[contributor as usize] != due {
                            return Err(format!(
                                "rank {rank} block {block}: contributions {:?}",
                                value.counts
                            ));
                        }
                    }
                    let first = seen.entry((block as u32, 0)).or_insert_with(|| value.clone());
                    if *first != value {
                        return Err(format!("rank {rank} block {block}: other bits than elsewhere"));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Two sources commute, more fold from left to right.
fn combine(sources: Vec<Option<Value>>) -> Result<Value, String> {
    let mut sources = sources.into_iter().map(|source| source.ok_or("an empty source".to_owned()));
    let mut value = sources.next().ok_or("no sources")??;
    for source in sources {
        let source = source?;
        for (count, more) in value.counts.iter_mut().zip(&source.counts) {
            *count = count.saturating_add(*more);
        }
        let (low, high) = (value.expression.min(source.expression), value.expression.max(source.expression));
        value.expression = hash(&[low, high]);
    }
    Ok(value)
}

fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |state, &word| {
        (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ (state >> 7)
    })
}

/// One of each, with a root that is not rank 0.
pub(super) fn collectives(ranks: u32) -> [Collective; 10] {
    let root = ranks / 2;
    [
        Collective::AllReduce,
        Collective::Reduce { root },
        Collective::Broadcast { root },
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Gather { root },
        Collective::Scatter { root },
        Collective::AllToAll,
        Collective::Barrier,
        Collective::SendRecv { from: root, to: 0 },
    ]
}
