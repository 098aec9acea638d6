//! The healing of one epoch, on the thread of the caller: see [`heal`](super::heal).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use pleach_membership::{Input, Process, Record};
use pleach_transport::{Nanos, RemoteSlice, Slice, SubmitError, clock};
use pleach_vocabulary::Rank;

use super::SessionError;
use super::envelope::of_said;
use super::heal::{Manifest, Said, States, hash, most};
use super::incoming::Incoming;
use super::member::Member;
use super::shared_device::SharedDevice;
use crate::engine::memory_for_peers;

/// Blocks that are read at a time from one member.
const BLOCKS_AT_ONCE: usize = 2;

/// How often a block is read until it has the hash that its members say.
const TRIES_MAX: usize = 8;

/// What was read of the states of a step; kept where the epoch ends meanwhile.
pub(crate) struct Kept {
    step: u64,
    memory: Vec<Slice>,
    /// By block.
    has_come: Vec<bool>,
}

/// The parts of the session that heal.
pub(crate) struct Healing<'a> {
    record: &'a Record,
    own: Process,
    device: &'a SharedDevice,
    incoming: &'a Incoming,
    member: &'a Member,
    /// How long members stand still for one that heals.
    patience: Duration,
}

impl<'a> Healing<'a> {
    pub(crate) fn new(
        record: &'a Record,
        device: &'a SharedDevice,
        incoming: &'a Incoming,
        member: &'a Member,
        patience: Duration,
    ) -> Self {
        Self { record, own: member.process(), device, incoming, member, patience }
    }

    /// Returns when all members have the states; false: the epoch is over before.
    pub(crate) fn run(
        &self,
        states: &mut States,
        has_them: &mut bool,
        kept: &mut Option<Kept>,
    ) -> Result<bool, SessionError> {
        let others = self.others();
        let layout = states.layout();
        self.say(&others, Said::States { has_them: *has_them, layout });
        let Some(told) = self.await_all(&others, |said| match said {
            Said::States { has_them, layout } => Some((has_them, layout)),
            _ => None,
        }) else {
            return Ok(false);
        };
        let told: Vec<(Process, bool, u64)> =
            others.iter().zip(told).map(|(other, (has_them, layout))| (*other, has_them, layout)).collect();
        let same = self.layout(&told, *has_them, layout, states)?;
        let (have, lack): (Vec<_>, Vec<_>) = told.into_iter().partition(|(_, has_them, _)| *has_them);
        let lack: Vec<Process> = lack.into_iter().map(|(process, ..)| process).collect();
        if *has_them {
            for process in lack.iter().filter(|process| !same.contains(process)) {
                // It has got an error, and cannot go on.
                self.member.tell(&mut self.member.lock(), Input::Late(*process));
            }
            return if lack.is_empty() { Ok(true) } else { self.wait_for(&lack, states) };
        }
        let sources: Vec<Process> = have.into_iter().map(|(process, ..)| process).collect();
        if sources.is_empty() {
            return Err(SessionError::StatesLost);
        }
        let Some(memory) = self.read_all(&sources, states, kept)? else { return Ok(false) };
        states.heal(memory);
        (*has_them, *kept) = (true, None);
        self.say(&others, Said::Healed);
        // Those that came with this process read too.
        let is_healed = |said| matches!(said, Said::Healed).then_some(());
        Ok(self.await_all(&lack, is_healed).is_some())
    }

    /// Compares how states are laid out. Returns those that have them as this process has.
    fn layout(
        &self,
        told: &[(Process, bool, u64)],
        has_them: bool,
        own: u64,
        states: &States,
    ) -> Result<BTreeSet<Process>, SessionError> {
        let mut all: Vec<(Process, bool, u64)> = told.to_vec();
        all.push((self.own, has_them, own));
        all.sort_unstable_by_key(|(process, ..)| *process);
        let holders = || all.iter().filter(|(_, has_them, _)| *has_them);
        let Some((first, _, layout)) = holders().next() else { return Ok(BTreeSet::new()) };
        let differs = |process: Process| SessionError::StatesDiffer {
            first: *first,
            other: process,
            own: states.describe(),
        };
        if own != *layout {
            return Err(differs(self.own));
        }
        match holders().find(|(.., other)| other != layout) {
            Some((process, ..)) => Err(differs(*process)),
            None => {
                Ok(all.iter().filter(|(.., other)| other == layout).map(|(process, ..)| *process).collect())
            }
        }
    }

    /// Tells those that have no states where they are, and waits for them.
    fn wait_for(&self, lack: &[Process], states: &States) -> Result<bool, SessionError> {
        let (manifest, _kept) = states.manifest(|bytes| self.memory(bytes))?;
        let manifest = manifest.encode();
        let memory = self.memory(manifest.len())?;
        memory.store(&manifest);
        let place = RemoteSlice { len: manifest.len() as u64, ..memory.remote() };
        self.say(lack, Said::Manifest(place));
        let is_healed = |said| matches!(said, Said::Healed).then_some(());
        Ok(self.await_all(lack, is_healed).is_some())
    }

    /// Reads all states; `None`: the epoch is over before.
    fn read_all(
        &self,
        sources: &[Process],
        states: &States,
        kept: &mut Option<Kept>,
    ) -> Result<Option<Vec<Slice>>, SessionError> {
        let place = |said| match said {
            Said::Manifest(place) => Some(place),
            _ => None,
        };
        let Some(places) = self.await_all(sources, place) else { return Ok(None) };
        let blocks = states.blocks();
        let mut manifests = Vec::new();
        for (source, place) in sources.iter().zip(places) {
            let bytes = Manifest::encoded_len(states.lengths().len(), blocks.len());
            if place.len != bytes as u64 {
                let (first, other, own) = (*source, self.own, states.describe());
                return Err(SessionError::StatesDiffer { first, other, own });
            }
            let memory = self.memory(bytes)?;
            if !self.read(*source, place, memory.slice(0..bytes).expect("it has so many"))? {
                return Ok(None);
            }
            let manifest = Manifest::decode(&memory.to_vec()[..bytes], states.lengths().len(), blocks.len());
            let (first, other) = (*source, self.own);
            let own = states.describe();
            manifests.push(manifest.map_err(|_| SessionError::StatesDiffer { first, other, own })?);
        }
        let step = self.record.step();
        if kept.as_ref().is_none_or(|kept| kept.step != step || kept.has_come.len() != blocks.len()) {
            let memory = states.lengths().into_iter().map(|bytes| self.memory(bytes));
            let (memory, has_come) = (memory.collect::<Result<_, _>>()?, vec![false; blocks.len()]);
            *kept = Some(Kept { step, memory, has_come });
        }
        let kept = kept.as_mut().expect("was made");
        let mut reading =
            Reading { healing: self, states, sources, manifests: &manifests, blocks: &blocks, kept };
        Ok(reading.run()?.then(|| reading.kept.memory.clone()))
    }

    /// Reads one slice; false: the epoch is over, or its source is gone.
    fn read(&self, source: Process, from: RemoteSlice, to: Slice) -> Result<bool, SessionError> {
        let Ok(id) = self.device.get(source.seat.0, from, to) else { return Ok(self.await_end()) };
        let Some(id) = id else { return Ok(true) };
        loop {
            // It ends in any case: by its source, or with its source's end.
            for (ended, is_ok) in self.device.take_gets() {
                if ended == id {
                    return Ok(is_ok || self.await_end());
                }
            }
            self.pause();
        }
    }

    /// Waits until the epoch is over, because a member is gone. Returns false.
    fn await_end(&self) -> bool {
        while !self.is_over() {
            self.pause();
        }
        false
    }

    fn memory(&self, bytes: usize) -> Result<Slice, SessionError> {
        let memory =
            memory_for_peers(bytes.max(1)).map_err(|source| SessionError::Memory { bytes, source })?;
        Ok(self.device.register(memory)?.whole())
    }

    fn others(&self) -> Vec<Process> {
        self.record.members().iter().copied().filter(|member| *member != self.own).collect()
    }

    fn say(&self, to: &[Process], said: Said) {
        let ranks: Vec<Rank> = to.iter().map(|process| process.seat.0).collect();
        self.member.post(&ranks, &of_said(self.record.number(), said));
    }

    /// What each of these processes has said in this epoch; `None`: the epoch is over. Who says
    /// nothing for too long is suspected.
    fn await_all<T>(&self, from: &[Process], pick: impl Fn(Said) -> Option<T>) -> Option<Vec<T>> {
        let number = self.record.number();
        self.await_said(from, |epoch, said| if epoch == number { pick(said) } else { None })
    }

    fn await_said<T>(&self, from: &[Process], pick: impl Fn(u64, Said) -> Option<T>) -> Option<Vec<T>> {
        let mut late_at = clock::now() + self.patience;
        loop {
            let said = |process: &Process| self.incoming.said(process.seat.0, &pick);
            let all: Vec<Option<T>> = from.iter().map(said).collect();
            if all.iter().all(Option::is_some) {
                return all.into_iter().collect();
            }
            if self.is_over() {
                return None;
            }
            if clock::now() >= late_at {
                late_at = clock::now() + self.patience;
                let silent = from.iter().zip(&all).filter(|(_, said)| said.is_none());
                for (process, _) in silent {
                    self.member.tell(&mut self.member.lock(), Input::Late(*process));
                }
            }
            self.pause();
        }
    }

    fn is_over(&self) -> bool {
        self.member.is_over() || self.member.lock().newest() != Some(self.record.number())
    }

    /// Makes progress: on some fabrics gets need polls of both ends.
    fn pause(&self) {
        self.device.poll_between_steps(clock::now());
        self.member.ask_whether_interrupted();
        std::thread::yield_now();
    }

    /// Compares the hash of all states with those that are still members of these, before a step.
    /// False: the epoch is over before.
    pub(crate) fn audit(&self, step: u64, states: &States, among: &Record) -> Result<bool, SessionError> {
        let own = states.hash();
        let others: Vec<Process> = self.others().into_iter().filter(|other| among.contains(*other)).collect();
        self.say(&others, Said::Audit { step, hash: own });
        // Who has said it in an epoch before may have gone on.
        let pick = |_, said| match said {
            Said::Audit { step: of, hash } if of == step => Some(hash),
            _ => None,
        };
        let Some(hashes) = self.await_said(&others, pick) else { return Ok(false) };
        let all: BTreeMap<Process, u64> = others.into_iter().zip(hashes).chain([(self.own, own)]).collect();
        let hashes: Vec<u64> = all.values().copied().collect();
        let expected = most(&hashes);
        let members: Vec<Process> =
            all.into_iter().filter(|(_, hash)| Some(*hash) != expected).map(|(process, _)| process).collect();
        if members.is_empty() {
            return Ok(true);
        }
        Err(SessionError::Diverged { state: "of the job".to_owned(), members })
    }
}

/// The read of all blocks.
struct Reading<'a> {
    healing: &'a Healing<'a>,
    states: &'a States,
    sources: &'a [Process],
    /// By source.
    manifests: &'a [Manifest],
    blocks: &'a [(usize, Range<usize>)],
    kept: &'a mut Kept,
}

impl Reading<'_> {
    /// Reads what has not come; false: the epoch is over before.
    fn run(&mut self) -> Result<bool, SessionError> {
        let began = clock::now();
        // Blocks, and how often each was tried.
        let mut waiting: VecDeque<(usize, usize)> = VecDeque::new();
        for block in 0..self.blocks.len() {
            self.sources_of(block)?;
            if !self.kept.has_come[block] {
                waiting.push_back((block, 0));
            }
        }
        let mut under_way: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
        let mut buffer = Vec::new();
        let mut is_over = false;
        while !(waiting.is_empty() || is_over) || !under_way.is_empty() {
            is_over = is_over || self.healing.is_over();
            while !is_over && under_way.len() < BLOCKS_AT_ONCE * self.sources.len() {
                let Some((block, tried)) = waiting.pop_front() else { break };
                match self.begin(block, tried)? {
                    Ok(Some(id)) => {
                        under_way.insert(id, (block, tried));
                    }
                    Ok(None) => self.check(block, tried, &mut waiting, &mut buffer)?,
                    Err(SubmitError::QueueFull { .. }) => {
                        waiting.push_front((block, tried));
                        break;
                    }
                    // Another source has it, as long as the epoch goes on.
                    Err(_) => waiting.push_back((block, tried + 1)),
                }
            }
            for (id, is_ok) in self.healing.device.take_gets() {
                match under_way.remove(&id) {
                    Some((block, tried)) if is_ok => self.check(block, tried, &mut waiting, &mut buffer)?,
                    Some((block, tried)) => waiting.push_back((block, tried + 1)),
                    None => {}
                }
            }
            self.healing.pause();
        }
        if !is_over {
            self.tell(began);
        }
        Ok(!is_over)
    }

    fn tell(&self, began: Nanos) {
        let bytes: usize = self.blocks.iter().map(|(_, bytes)| bytes.len()).sum();
        let took = clock::now().since(began);
        tracing::info!("{} has read {bytes} bytes of states in {} ms", self.healing.own, took.as_millis());
    }

    /// The hash of a block, and those that have it, by number.
    fn sources_of(&self, block: usize) -> Result<(u64, Vec<usize>), SessionError> {
        let hashes: Vec<u64> = self.manifests.iter().map(|manifest| manifest.hash(block)).collect();
        let Some(expected) = most(&hashes) else {
            let state = format!("'{}'", self.states.name(self.blocks[block].0));
            return Err(SessionError::Diverged { state, members: self.sources.to_vec() });
        };
        let (have, differ): (Vec<usize>, Vec<usize>) =
            (0..hashes.len()).partition(|source| hashes[*source] == expected);
        for source in differ {
            let (process, state) = (self.sources[source], self.states.name(self.blocks[block].0));
            tracing::warn!("{process} has another state '{state}' than the others (block {block})");
        }
        Ok((expected, have))
    }

    /// Begins to read a block.
    fn begin(&self, block: usize, tried: usize) -> Result<Result<Option<u64>, SubmitError>, SessionError> {
        let (_, have) = self.sources_of(block)?;
        let source = have[(block + tried) % have.len()];
        let (state, bytes) = &self.blocks[block];
        let (first, other) = (self.sources[source], self.healing.own);
        let from = self.manifests[source]
            .source(*state, bytes)
            .ok_or_else(|| SessionError::StatesDiffer { first, other, own: self.states.describe() })?;
        let to = self.kept.memory[*state].slice(bytes.clone()).expect("inside of the state");
        Ok(self.healing.device.get(first.seat.0, from, to))
    }

    /// A block was read.
    fn check(
        &mut self,
        block: usize,
        tried: usize,
        waiting: &mut VecDeque<(usize, usize)>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), SessionError> {
        let (expected, have) = self.sources_of(block)?;
        let (state, bytes) = &self.blocks[block];
        let read = self.kept.memory[*state].slice(bytes.clone()).expect("inside of the state");
        if hash(&read, buffer) == expected {
            self.kept.has_come[block] = true;
            return Ok(());
        }
        if tried >= TRIES_MAX {
            let members = have.into_iter().map(|source| self.sources[source]).collect();
            let state = format!("'{}'", self.states.name(*state));
            return Err(SessionError::Diverged { state, members });
        }
        waiting.push_back((block, tried + 1));
        Ok(())
    }
}
