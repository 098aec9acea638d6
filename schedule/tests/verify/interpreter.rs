//! Runs a schedule with real numbers in a random interleaving. The interleaving is as unfavourable
//! as the rules of `pleach_schedule::schedule` allow: bytes of a put become visible piece by piece,
//! sources are read late, ranks begin late, and each rank has its own placement of shared slices.
//! It shares nothing with `verify`.

use std::collections::BTreeMap;

use pleach_schedule::{Op, Part, Place, Schedule};
use pleach_vocabulary::digest::mixed;
use pleach_vocabulary::random::Random;
use pleach_vocabulary::{Collective, Rank};

/// Pieces of a chunk that move on their own.
const PIECES: usize = 2;

/// A value: the sum of contributions, and a tag that differs when they were combined in another
/// order.
type Value = [u64; 2];

/// What went wrong in a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    Stuck,
    LeftOver,
    TouchedAbsent(Rank),
    Result { rank: Rank, block: usize, chunk: usize },
    InputChanged(Rank),
    Bits { block: usize, chunk: usize },
    LeftBarrierEarly(Rank),
}

/// Which of a rank's places are the same memory, at random.
#[derive(Clone, Copy)]
struct Placed {
    input_shared: bool,
    output_shared: bool,
    in_place: bool,
}

/// The memory behind a place: its rank, a name, block, and the chunk or its instance.
type Address = (Rank, u32, usize, usize);

/// How many steps of a chunk were issued (`None`: not begun), and which are complete.
type Progress = (Option<usize>, Vec<bool>);

/// Something under way: a put or a reduce of one chunk.
struct Flight {
    lane: (usize, usize, usize),
    step: usize,
    from: Vec<Place>,
    into: Vec<Place>,
    put: Option<(Rank, u16)>,
    read: [Option<Value>; PIECES],
    written: [bool; PIECES],
    done: bool,
    landed: bool,
}

pub(crate) struct Run<'a> {
    schedule: &'a Schedule,
    random: Random,
    chunks: usize,
    placed: Vec<Placed>,
    memory: BTreeMap<(Address, usize), Value>,
    signal_slots: BTreeMap<(Rank, Rank, usize, u16, usize), u32>,
    begun: Vec<bool>,
    ended: Vec<bool>,
    /// By rank, lane, chunk.
    lanes: Vec<Vec<Vec<Progress>>>,
    flights: Vec<Flight>,
    slow: u64,
}

#[derive(Clone, Copy)]
enum Action {
    Begin(Rank),
    BeginChunk(usize, usize, usize),
    Issue(usize, usize, usize),
    Move(usize, usize),
    Finish(usize),
}

pub(crate) fn run(schedule: &Schedule, chunks: usize, seed: u64) -> Result<(), Wrong> {
    let ranks = schedule.programs.len();
    let mut random = Random::new(seed);
    let mut coin = || random.bits() & 1 == 0;
    let placed = (0..ranks)
        .map(|_| Placed { input_shared: coin(), output_shared: coin(), in_place: coin() })
        .collect();
    let lanes = schedule
        .programs
        .iter()
        .map(|program| {
            program.iter().map(|lane| vec![(None, vec![false; lane.steps.len()]); chunks]).collect()
        })
        .collect();
    let slow = random.bits();
    let mut run = Run {
        schedule,
        random,
        chunks,
        placed,
        memory: BTreeMap::new(),
        signal_slots: BTreeMap::new(),
        begun: vec![false; ranks],
        ended: vec![false; ranks],
        lanes,
        flights: Vec::new(),
        slow,
    };
    run.go()
}

/// What a rank contributes.
fn contribution(rank: Rank, block: usize, chunk: usize, piece: usize) -> Value {
    let seed = mixed(u64::from(rank) << 48 | (block as u64) << 32 | (chunk as u64) << 8 | piece as u64);
    [seed, mixed(seed ^ 1)]
}

fn combine(values: &[Value]) -> Value {
    let tag = match values {
        [one, other] => mixed(one[1].wrapping_add(other[1])),
        _ => values[2..].iter().fold(values[0][1].wrapping_add(values[1][1]), |tag, value| {
            mixed(tag ^ 7).wrapping_mul(3).wrapping_add(value[1])
        }),
    };
    [values.iter().fold(0, |sum, value| sum.wrapping_add(value[0])), tag]
}

impl Run<'_> {
    fn go(&mut self) -> Result<(), Wrong> {
        loop {
            let actions = self.actions();
            let Some(&first) = actions.first() else { break };
            let mut chosen = first;
            for _ in 0..20 {
                chosen = actions[self.random.index(actions.len())];
                if !self.is_slow(chosen) || self.random.below(30) == 0 {
                    break;
                }
            }
            self.act(chosen)?;
            self.end_ranks()?;
        }
        if self.ended.iter().any(|ended| !ended) {
            return Err(Wrong::Stuck);
        }
        if self.signal_slots.values().any(|&count| count != 0) || !self.flights.is_empty() {
            return Err(Wrong::LeftOver);
        }
        self.check()
    }

    /// Whether actions of this kind are slow in this run; a third of all kinds are.
    fn is_slow(&self, action: Action) -> bool {
        let kind = match action {
            Action::Begin(rank) => u64::from(rank) << 8,
            Action::BeginChunk(rank, lane, _) => (rank << 8 | lane << 4 | 1) as u64,
            Action::Issue(rank, lane, _) => (rank << 8 | lane << 4 | 2) as u64,
            Action::Move(flight, _) | Action::Finish(flight) => {
                let flight = &self.flights[flight];
                (flight.lane.0 << 16 | flight.lane.1 << 12 | flight.step << 4 | 3) as u64
            }
        };
        mixed(self.slow ^ kind).is_multiple_of(3)
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (rank, program) in self.schedule.programs.iter().enumerate() {
            if !self.begun[rank] {
                actions.push(Action::Begin(rank as Rank));
                continue;
            }
            for (number, lane) in program.iter().enumerate() {
                for chunk in 0..self.chunks {
                    match self.lanes[rank][number][chunk].0 {
                        None if self.may_begin(rank, number, chunk) => {
                            actions.push(Action::BeginChunk(rank, number, chunk));
                        }
                        Some(step)
                            if step < lane.steps.len() && self.may_issue(rank, number, chunk, step) =>
                        {
                            actions.push(Action::Issue(rank, number, chunk));
                        }
                        _ => {}
                    }
                }
            }
        }
        for (number, flight) in self.flights.iter().enumerate() {
            for piece in (0..PIECES).filter(|&piece| !flight.written[piece]) {
                actions.push(Action::Move(number, piece));
            }
            if flight.put.is_some() && !flight.done && flight.read.iter().all(Option::is_some) {
                actions.push(Action::Finish(number));
            }
        }
        actions
    }

    fn may_begin(&self, rank: usize, lane: usize, chunk: usize) -> bool {
        match chunk.checked_sub(self.schedule.window as usize) {
            Some(earlier) => self.lanes[rank][lane][earlier].1.iter().all(|&complete| complete),
            None => true,
        }
    }

    fn may_issue(&self, rank: usize, lane: usize, chunk: usize, step: usize) -> bool {
        let program = &self.schedule.programs[rank][lane];
        let ready = program.steps[step].after.iter().all(|&(earlier, lag)| {
            chunk
                .checked_sub(lag as usize)
                .is_none_or(|chunk| self.lanes[rank][lane][chunk].1[earlier as usize])
        });
        let signalled = match program.steps[step].op {
            Op::Wait { from, signal_slot } => self
                .signal_slots
                .get(&self.signal_slot(from, rank as Rank, program.block, signal_slot.0, chunk))
                .is_some_and(|&n| n > 0),
            _ => true,
        };
        ready && signalled
    }

    fn signal_slot(
        &self,
        from: Rank,
        to: Rank,
        block: u32,
        signal_slot: u16,
        chunk: usize,
    ) -> (Rank, Rank, usize, u16, usize) {
        (from, to, block as usize, signal_slot, chunk % self.schedule.window as usize)
    }

    fn act(&mut self, action: Action) -> Result<(), Wrong> {
        match action {
            Action::Begin(rank) => self.begin(rank),
            Action::BeginChunk(rank, lane, chunk) => self.lanes[rank][lane][chunk].0 = Some(0),
            Action::Issue(rank, lane, chunk) => self.issue(rank, lane, chunk),
            Action::Move(flight, piece) => self.advance(flight, piece)?,
            Action::Finish(flight) => {
                self.flights[flight].done = true;
                let (rank, lane, chunk) = self.flights[flight].lane;
                let step = self.flights[flight].step;
                self.lanes[rank][lane][chunk].1[step] = true;
            }
        }
        self.flights.retain(|flight| !(flight.done && flight.landed));
        Ok(())
    }

    /// The rank begins its call: it writes garbage into its outputs and contributions into its
    /// inputs.
    fn begin(&mut self, rank: Rank) {
        self.begun[rank as usize] = true;
        for block in 0..self.schedule.blocks.len() {
            for chunk in 0..self.chunks {
                for piece in 0..PIECES {
                    if self.has(rank, block, false) {
                        let address = self.address(Place { rank, part: Part::Output }, block, chunk);
                        let garbage = [self.random.bits(), self.random.bits()];
                        self.memory.insert((address, piece), garbage);
                    }
                    if self.has(rank, block, true) {
                        let address = self.address(Place { rank, part: Part::Input }, block, chunk);
                        self.memory.insert((address, piece), contribution(rank, block, chunk, piece));
                    }
                }
            }
        }
    }

    fn has(&self, rank: Rank, block: usize, input: bool) -> bool {
        let (collective, ranks) = (self.schedule.collective, self.schedule.ranks());
        let part = self.schedule.blocks[block].part;
        if input {
            collective.input_parts(rank, ranks).contains(part)
        } else {
            collective.output_parts(rank, ranks).contains(part)
        }
    }

    fn address(&self, place: Place, block: usize, chunk: usize) -> Address {
        let placed = self.placed[place.rank as usize];
        let in_place =
            placed.in_place && self.has(place.rank, block, true) && self.has(place.rank, block, false);
        let output = if in_place { 0 } else { 1 };
        let instance = chunk % self.schedule.window as usize;
        let (name, chunk) = match place.part {
            Part::Input => (0, chunk),
            Part::Output => (output, chunk),
            Part::SharedInput if placed.input_shared => (0, chunk),
            Part::SharedOutput if placed.output_shared => (output, chunk),
            Part::SharedInput => (2, instance),
            // One window stands in for both.
            Part::SharedOutput => (if placed.input_shared { 3 } else { 2 }, instance),
            Part::Scratch(slot) => (4 + u32::from(slot), instance),
        };
        (place.rank, name, block, chunk)
    }

    fn issue(&mut self, rank: usize, lane: usize, chunk: usize) {
        let program = &self.schedule.programs[rank][lane];
        let step = self.lanes[rank][lane][chunk].0.expect("begun");
        self.lanes[rank][lane][chunk].0 = Some(step + 1);
        let own = rank as Rank;
        let mut flight = |from, into, put| {
            let (lane, read, written) = ((rank, lane, chunk), [None; PIECES], [false; PIECES]);
            self.flights.push(Flight {
                lane,
                step,
                from,
                into,
                put,
                read,
                written,
                done: false,
                landed: false,
            });
        };
        match &program.steps[step].op {
            Op::Signal { to, signal_slot } => {
                *self
                    .signal_slots
                    .entry(self.signal_slot(own, *to, program.block, signal_slot.0, chunk))
                    .or_default() += 1;
                self.lanes[rank][lane][chunk].1[step] = true;
            }
            Op::Wait { from, signal_slot } => {
                *self
                    .signal_slots
                    .entry(self.signal_slot(*from, own, program.block, signal_slot.0, chunk))
                    .or_default() -= 1;
                self.lanes[rank][lane][chunk].1[step] = true;
            }
            Op::Put { to, src, dst, signal_slot } => {
                let (from, into) = (Place { rank: own, part: *src }, Place { rank: *to, part: *dst });
                flight(vec![from], vec![into], Some((*to, signal_slot.0)));
            }
            Op::Reduce { from, into } => flight(from.clone(), into.clone(), None),
        }
    }

    /// A piece is read, or what was read is written.
    fn advance(&mut self, number: usize, piece: usize) -> Result<(), Wrong> {
        let flight = &self.flights[number];
        let (rank, lane, chunk) = flight.lane;
        let block = self.schedule.programs[rank][lane].block as usize;
        let address = |place: &Place| self.address(*place, block, chunk);
        let from: Vec<Address> = flight.from.iter().map(address).collect();
        let mut into: Vec<Address> = flight.into.iter().map(address).collect();
        if let [source] = from[..]
            && flight.put.is_none()
        {
            into.retain(|into| *into != source);
        }
        let nothing = into.is_empty();
        let absent = |place: &&Place| {
            let owner = place.rank as usize;
            let guarded =
                flight.put.is_none() || matches!(place.part, Part::SharedOutput | Part::SharedInput);
            owner != rank && guarded && (!self.begun[owner] || self.ended[owner])
        };
        if let Some(place) = flight.from.iter().chain(&flight.into).find(absent) {
            return Err(Wrong::TouchedAbsent(place.rank));
        }
        if let Some(value) = flight.read[piece] {
            for into in into {
                self.memory.insert((into, piece), value);
            }
            let flight = &mut self.flights[number];
            flight.written[piece] = true;
            if flight.written == [true; PIECES] {
                flight.landed = true;
                if let Some((to, signal_slot)) = flight.put {
                    let block = self.schedule.programs[rank][lane].block;
                    *self
                        .signal_slots
                        .entry(self.signal_slot(rank as Rank, to, block, signal_slot, chunk))
                        .or_default() += 1;
                } else {
                    self.flights[number].done = true;
                    let step = self.flights[number].step;
                    self.lanes[rank][lane][chunk].1[step] = true;
                }
            }
            return Ok(());
        }
        let mut values = Vec::new();
        for from in from {
            let garbage = [self.random.bits(), self.random.bits()];
            values.push(*self.memory.get(&(from, piece)).unwrap_or(&garbage));
        }
        let value = if values.len() == 1 { values[0] } else { combine(&values) };
        let flight = &mut self.flights[number];
        flight.read[piece] = Some(value);
        if nothing {
            flight.written[piece] = true;
            if flight.written == [true; PIECES] {
                (flight.landed, flight.done) = (true, true);
                let step = flight.step;
                self.lanes[rank][lane][chunk].1[step] = true;
            }
        }
        Ok(())
    }

    fn end_ranks(&mut self) -> Result<(), Wrong> {
        for rank in 0..self.ended.len() {
            let complete = |lane: &Vec<Progress>| {
                lane.iter().all(|(issued, complete)| issued.is_some() && complete.iter().all(|&done| done))
            };
            if self.begun[rank] && !self.ended[rank] && self.lanes[rank].iter().all(complete) {
                self.ended[rank] = true;
                if self.schedule.collective == Collective::Barrier && self.begun.iter().any(|begun| !begun) {
                    return Err(Wrong::LeftBarrierEarly(rank as Rank));
                }
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Wrong> {
        let ranks = self.schedule.ranks();
        for block in 0..self.schedule.blocks.len() {
            let part = self.schedule.blocks[block].part;
            for chunk in 0..self.chunks {
                let mut tags = [None; PIECES];
                for rank in 0..ranks {
                    for (piece, tag) in tags.iter_mut().enumerate() {
                        let value = |part| {
                            let address = self.address(Place { rank, part }, block, chunk);
                            self.memory.get(&(address, piece)).copied()
                        };
                        let (has_input, has_output) =
                            (self.has(rank, block, true), self.has(rank, block, false));
                        let untouched = !(has_output && self.placed[rank as usize].in_place);
                        let given = contribution(rank, block, chunk, piece);
                        if has_input && untouched && value(Part::Input) != Some(given) {
                            return Err(Wrong::InputChanged(rank));
                        }
                        if !has_output {
                            continue;
                        }
                        let contributors =
                            (0..ranks).filter(|&who| self.schedule.collective.contributes(who, part, ranks));
                        let sum = contributors.fold(0u64, |sum, who| {
                            sum.wrapping_add(contribution(who, block, chunk, piece)[0])
                        });
                        let found = value(Part::Output).unwrap_or_default();
                        if found[0] != sum {
                            return Err(Wrong::Result { rank, block, chunk });
                        }
                        if *tag.get_or_insert(found[1]) != found[1] {
                            return Err(Wrong::Bits { block, chunk });
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
