//! The healing of one epoch, on the thread of the caller, or beside its step: see
//! [`heal`](super::heal) and [`hidden`](super::hidden).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_membership::{Input, Process, Record};
use pleach_transport::{Nanos, RemoteSlice, Slice, SubmitError, clock};
use pleach_vocabulary::Rank;

use super::envelope::of_said;
use super::heal::{Manifest, Said, States, hash, most};
use super::hidden::Hidden;
use super::incoming::Incoming;
use super::lent::Lent;
use super::member::Member;
use super::shared_device::SharedDevice;
use super::{Elastic, SessionError};
use crate::engine::memory_for_peers;

/// Blocks that are read at a time from one member.
const BLOCKS_AT_ONCE: usize = 2;

/// How often a block is read until it has the hash that its members say, or its sources are known
/// to refuse.
const TRIES_MAX: usize = 8;

/// How often a process says at most how much of the states it has read.
const SHARE_INTERVAL: Duration = Duration::from_millis(100);

/// How often a member looks at its device while another process reads its states: on some fabrics
/// gets need polls of both ends. Processes that read need the processors.
const LENDING_INTERVAL: Duration = Duration::from_micros(200);

/// For so long a process that waits for the words of others looks without a pause.
const LOOKING_MAX: Duration = Duration::from_millis(1);

/// What was read of the states of a step; kept where the epoch ends meanwhile.
pub(crate) struct Kept {
    step: u64,
    memory: Vec<Slice>,
    /// By block.
    has_come: Vec<bool>,
}

/// What a member has said about its states when the epoch was entered.
#[derive(Clone, Copy)]
struct Told {
    process: Process,
    has_them: bool,
    /// It can read them behind a step.
    hides: bool,
    layout: u64,
}

/// What this process has.
pub(crate) struct Own {
    states: States,
    has_them: bool,
    /// It may read them behind a step.
    may_hide: bool,
    /// What it has read.
    kept: Option<Kept>,
}

impl Own {
    /// No states are declared yet. `has_them`: they are the job's where they begin.
    pub(crate) fn new(has_them: bool, may_hide: bool) -> Self {
        Self { states: States::default(), has_them, may_hide, kept: None }
    }

    pub(crate) fn states(&self) -> &States {
        &self.states
    }

    pub(crate) fn states_mut(&mut self) -> &mut States {
        &mut self.states
    }

    /// Whether this process has the states of the job.
    pub(crate) fn has_them(&self) -> bool {
        self.has_them
    }

    /// A healing behind a step has ended, of which all was read or not.
    pub(crate) fn ended(&mut self, hidden: &Hidden, is_whole: bool) {
        if hidden.reads() {
            self.has_them = is_whole;
            self.kept = hidden.take_kept();
        }
    }
}

/// What has become of the healing, before the step begins.
pub(crate) enum Begun {
    /// The epoch is over before.
    Over,
    /// All members have the states.
    Healed,
    /// It goes on during the step, to which only so many members contribute.
    Hidden { hidden: Arc<Hidden>, thread: JoinHandle<()>, contributors: u32 },
}

/// The parts of the session that heal.
#[derive(Clone)]
pub(crate) struct Healing {
    record: Arc<Record>,
    own: Process,
    device: Arc<SharedDevice>,
    incoming: Arc<Incoming>,
    member: Arc<Member>,
    lent: Arc<Lent>,
    /// How long members stand still for one that heals.
    patience: Duration,
    /// Seats of a unit: members with the same place in their units have the same states.
    unit: u32,
    /// A step is under way: whoever waits in one of its calls is woken.
    is_beside_step: bool,
}

impl Healing {
    /// Of the epoch of this record.
    pub(crate) fn new(
        record: &Arc<Record>,
        device: &Arc<SharedDevice>,
        incoming: &Arc<Incoming>,
        member: &Arc<Member>,
        lent: &Arc<Lent>,
        elastic: &Elastic,
    ) -> Self {
        Self {
            record: Arc::clone(record),
            own: member.process(),
            device: Arc::clone(device),
            incoming: Arc::clone(incoming),
            member: Arc::clone(member),
            lent: Arc::clone(lent),
            patience: elastic.heal_wait,
            unit: elastic.unit,
            is_beside_step: false,
        }
    }

    /// Heals whom it can before the step, this process too.
    pub(crate) fn begin(&self, own: &mut Own) -> Result<Begun, SessionError> {
        let others = self.others();
        let (has_them, hides) = (own.has_them, !own.has_them && own.may_hide);
        let layout = own.states.layout();
        self.say(&others, Said::States { has_them, hides, layout });
        let Some(told) = self.await_all(&others, |said| match said {
            Said::States { has_them, hides, layout } => Some((has_them, hides, layout)),
            _ => None,
        }) else {
            return Ok(Begun::Over);
        };
        let told = others.iter().zip(told).map(|(process, (has_them, hides, layout))| Told {
            process: *process,
            has_them,
            hides,
            layout,
        });
        let mut all: Vec<Told> = told.chain([Told { process: self.own, has_them, hides, layout }]).collect();
        all.sort_unstable_by_key(|told| told.process);
        let same = self.layout(&all, layout, &own.states)?;
        let (have, lack): (Vec<Told>, Vec<Told>) = all.into_iter().partition(|told| told.has_them);
        if lack.is_empty() {
            return Ok(Begun::Healed);
        }
        // All know the same, so all say the same. Before the first step is committed, programs give
        // their states the values with which the job begins: no moment for others to read them.
        let has_source = |lacks: &Told| have.iter().any(|has| self.are_alike(has.process, lacks.process));
        let is_hidden = self.record.step() > 0
            && lack.iter().all(|told| told.hides && has_source(told) && same.contains(&told.process));
        let contributors = have.len() as u32;
        let processes = |told: Vec<Told>| -> Vec<Process> {
            told.into_iter().map(|told| told.process).filter(|process| *process != self.own).collect()
        };
        let (have, lack) = (processes(have), processes(lack));
        if is_hidden {
            let (hidden, thread) =
                if has_them { self.lend_beside(lack, own) } else { self.read_beside(have, own) }?;
            return Ok(Begun::Hidden { hidden, thread, contributors });
        }
        let is_healed = if has_them {
            for process in lack.iter().filter(|process| !same.contains(process)) {
                // It has got an error, and cannot go on.
                self.member.tell(&mut self.member.lock(), Input::Late(*process));
            }
            self.wait_for(&lack, &own.states)?
        } else {
            self.heal(&have, &lack, own)?
        };
        Ok(if is_healed { Begun::Healed } else { Begun::Over })
    }

    /// The place of a member in its unit.
    fn place(&self, process: Process) -> u32 {
        process.seat.0 % self.unit
    }

    /// Whether two members have the same states: those of the same place in their units.
    fn are_alike(&self, one: Process, other: Process) -> bool {
        self.place(one) == self.place(other)
    }

    /// Those of them that have the same states as this process.
    fn alike(&self, processes: &[Process]) -> Vec<Process> {
        processes.iter().copied().filter(|process| self.are_alike(*process, self.own)).collect()
    }

    /// Reads the states; false: the epoch is over before.
    fn heal(&self, have: &[Process], lack: &[Process], own: &mut Own) -> Result<bool, SessionError> {
        let sources = self.alike(have);
        if sources.is_empty() {
            return Err(SessionError::StatesLost);
        }
        let Some(memory) = self.read_all(&sources, &own.states, &mut own.kept)? else { return Ok(false) };
        own.states.heal(memory)?;
        (own.has_them, own.kept) = (true, None);
        self.say(&self.others(), Said::Healed);
        // Those that came with this process read too.
        Ok(self.await_all(lack, is_healed).is_some())
    }

    /// The same during the step.
    fn read_beside(
        &self,
        have: Vec<Process>,
        own: &mut Own,
    ) -> Result<(Arc<Hidden>, JoinHandle<()>), SessionError> {
        own.may_hide = false;
        let sources = self.alike(&have);
        let (reader, states, mut kept) = (self.beside_step(), own.states.clone(), own.kept.take());
        Hidden::start(self.step(), true, move |hidden| {
            let read = reader.read_all(&sources, &states, &mut kept);
            hidden.keep(kept);
            let Some(memory) = read? else { return Ok(false) };
            states.heal(memory)?;
            reader.say(&reader.others(), Said::Healed);
            Ok(true)
        })
    }

    /// Lends the states during the step.
    fn lend_beside(
        &self,
        lack: Vec<Process>,
        own: &Own,
    ) -> Result<(Arc<Hidden>, JoinHandle<()>), SessionError> {
        let (lender, states) = (self.beside_step(), own.states.clone());
        Hidden::start(self.step(), false, move |hidden| {
            lender.offer(&lack, &states)?;
            lender.lend_until_read(&lack, hidden)
        })
    }

    /// The attempt at a step for which it is.
    fn step(&self) -> (u64, u64) {
        (self.record.number(), self.record.step())
    }

    fn beside_step(&self) -> Self {
        Self { is_beside_step: true, ..self.clone() }
    }

    /// Returns whether all of them have read the states; false: a later epoch was entered before,
    /// so none of them reads any more.
    fn lend_until_read(&self, lack: &[Process], hidden: &Hidden) -> Result<bool, SessionError> {
        let number = self.record.number();
        let mut late = 1;
        loop {
            let has_read = |process: &&Process| {
                let healed = |epoch, said| if epoch == number { is_healed(said) } else { None };
                self.incoming.said(process.seat.0, healed).is_some()
            };
            let slow: Vec<&Process> = lack.iter().filter(|process| !has_read(process)).collect();
            if slow.is_empty() {
                self.lent.take_back(number);
                return Ok(true);
            }
            let has_entered = self.member.lock().entered().is_some_and(|record| record.number() > number);
            if has_entered || self.member.is_over() {
                return Ok(false);
            }
            let since = hidden.awaited_since();
            if since.is_some_and(|since| clock::now().since(since) >= self.patience * late) {
                late += 1;
                for process in slow {
                    self.member.tell(&mut self.member.lock(), Input::Late(*process));
                }
            }
            self.pause();
            if since.is_none() {
                std::thread::park_timeout(LENDING_INTERVAL);
            }
        }
    }

    /// Compares how states are laid out: `all` by process, of which this one has `own`. Returns
    /// those that have them as the first has that is to have the same.
    fn layout(&self, all: &[Told], own: u64, states: &States) -> Result<BTreeSet<Process>, SessionError> {
        let mut first_at: BTreeMap<u32, &Told> = BTreeMap::new();
        for holder in all.iter().filter(|told| told.has_them) {
            first_at.entry(self.place(holder.process)).or_insert(holder);
        }
        let mut same = BTreeSet::new();
        for told in all {
            let Some(first) = first_at.get(&self.place(told.process)) else { continue };
            if told.layout == first.layout {
                same.insert(told.process);
            }
            let differs = |process: Process| SessionError::StatesDiffer {
                first: first.process,
                other: process,
                own: states.describe(),
            };
            if self.are_alike(told.process, self.own) {
                if own != first.layout {
                    return Err(differs(self.own));
                }
                if told.has_them && told.layout != first.layout {
                    return Err(differs(told.process));
                }
            }
        }
        Ok(same)
    }

    /// Tells those that have no states where they are, and waits for them.
    fn wait_for(&self, lack: &[Process], states: &States) -> Result<bool, SessionError> {
        self.offer(lack, states)?;
        let have_read = self.await_all(lack, is_healed).is_some();
        if have_read {
            self.lent.take_back(self.record.number());
        }
        Ok(have_read)
    }

    /// Tells those that have none of the states that this process has where they are.
    fn offer(&self, lack: &[Process], states: &States) -> Result<(), SessionError> {
        let lack = self.alike(lack);
        if lack.is_empty() {
            return Ok(());
        }
        let (manifest, mut memory) = states.manifest(|bytes| self.memory(bytes))?;
        let manifest = manifest.encode();
        let page = self.memory(manifest.len())?;
        page.store(&manifest);
        let place = RemoteSlice { len: manifest.len() as u64, ..page.remote() };
        memory.push(page);
        self.lent.lend(self.record.number(), memory);
        self.say(&lack, Said::Manifest(place));
        Ok(())
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
        let get = self.device.get(self.record.number(), source.seat.0, from, to);
        let Ok(id) = get else { return Ok(self.await_end()) };
        let Some(id) = id else { return Ok(true) };
        loop {
            // It ends in any case: by its source, or with its source's end.
            for (ended, is_ok) in self.device.take_gets() {
                if ended == id {
                    return Ok(is_ok || self.await_end());
                }
            }
            if self.member.is_over() {
                return Ok(false);
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
        self.incoming.take_said(self.own.seat.0, self.record.number(), said);
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
        let began = clock::now();
        let mut late_at = began + self.patience;
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
            if clock::now().since(began) > LOOKING_MAX {
                std::thread::park_timeout(LENDING_INTERVAL);
            }
        }
    }

    fn is_over(&self) -> bool {
        self.member.is_over() || self.member.lock().newest() != Some(self.record.number())
    }

    /// Makes progress: on some fabrics gets need polls of both ends.
    fn pause(&self) {
        let now = clock::now();
        if self.is_beside_step {
            self.device.poll(now);
        } else {
            self.device.poll_between_steps(now);
        }
        // In a step the caller's calls ask: the program may want to be asked on its own thread.
        if !self.is_beside_step {
            self.member.ask_whether_interrupted();
        }
        std::thread::yield_now();
    }

    /// Compares the hash of all states, which this process may not have, with those that are still
    /// members of these and have the same states, before a step. All find the same. False: the
    /// epoch is over before.
    pub(crate) fn audit(&self, step: u64, own: Option<u64>, among: &Record) -> Result<bool, SessionError> {
        let others: Vec<Process> = self.others().into_iter().filter(|other| among.contains(*other)).collect();
        self.say(&others, Said::Audit { step, hash: own });
        // Who has said it in an epoch before may have gone on.
        let pick = |_, said| match said {
            Said::Audit { step: of, hash } if of == step => Some(hash),
            _ => None,
        };
        let Some(hashes) = self.await_said(&others, pick) else { return Ok(false) };
        let all = others.into_iter().zip(hashes).chain([(self.own, own)]);
        let all: BTreeMap<Process, u64> =
            all.filter_map(|(process, hash)| hash.map(|hash| (process, hash))).collect();
        let mut at: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for (process, hash) in &all {
            at.entry(self.place(*process)).or_default().push(*hash);
        }
        let expected: BTreeMap<u32, Option<u64>> =
            at.into_iter().map(|(place, hashes)| (place, most(&hashes))).collect();
        let differs = |(process, hash): &(Process, u64)| expected[&self.place(*process)] != Some(*hash);
        let members: Vec<Process> = all.into_iter().filter(differs).map(|(process, _)| process).collect();
        if members.is_empty() {
            return Ok(true);
        }
        Err(SessionError::Diverged { state: "of the job".to_owned(), members })
    }
}

/// Whether it says that the sender has the states now.
fn is_healed(said: Said) -> Option<()> {
    matches!(said, Said::Healed).then_some(())
}

/// How much of these blocks has come, in percent of their bytes.
fn share_read(blocks: &[(usize, Range<usize>)], has_come: &[bool]) -> u8 {
    let all: usize = blocks.iter().map(|(_, bytes)| bytes.len()).sum();
    let read = blocks.iter().zip(has_come).filter(|(_, has_come)| **has_come);
    let read: usize = read.map(|((_, bytes), _)| bytes.len()).sum();
    // Of 100 at most.
    if all == 0 { 100 } else { (read as u128 * 100 / all as u128) as u8 }
}

/// A get of a block from a source, by their numbers, and how often the block was tried before.
#[derive(Clone, Copy)]
struct Get {
    block: usize,
    tried: usize,
    source: usize,
}

/// The source from which a block is read, of those that have it. It is the one with the fewest gets
/// under way, so that a source gives as much as its link carries; equal ones take turns. A block
/// that was tried before goes to one source after the other. `None`: that source has as many gets
/// under way as it may have.
fn source_for(have: &[usize], busy: &BTreeMap<usize, usize>, block: usize, tried: usize) -> Option<usize> {
    let mut in_turn = (0..have.len()).map(|at| have[(block + tried + at) % have.len()]);
    let source = if tried == 0 { in_turn.min_by_key(|source| busy[source]) } else { in_turn.next() };
    source.filter(|source| busy[source] < BLOCKS_AT_ONCE)
}

/// The read of all blocks.
struct Reading<'a> {
    healing: &'a Healing,
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
        let mut told_at = began;
        // Blocks, and how often each was tried.
        let mut waiting: VecDeque<(usize, usize)> = VecDeque::new();
        // By source, of those that have diverged: how many blocks, and the first.
        let mut diverged: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        // By source that has a block: its gets under way.
        let mut busy: BTreeMap<usize, usize> = BTreeMap::new();
        for block in 0..self.blocks.len() {
            let (_, have) = self.sources_of(block)?;
            busy.extend(have.iter().map(|source| (*source, 0)));
            for source in (0..self.sources.len()).filter(|source| !have.contains(source)) {
                diverged.entry(source).or_insert((0, block)).0 += 1;
            }
            if !self.kept.has_come[block] {
                waiting.push_back((block, 0));
            }
        }
        for (source, (count, first)) in diverged {
            let (process, state) = (self.sources[source], self.states.name(self.blocks[first].0));
            let of = self.blocks.len();
            tracing::warn!(
                "{process} has other states than the others: {count} of {of} blocks, the first in '{state}'"
            );
        }
        let mut under_way: BTreeMap<u64, Get> = BTreeMap::new();
        let (mut is_over, mut is_refused) = (false, false);
        while !(waiting.is_empty() || is_over) || !under_way.is_empty() {
            is_over = is_over || self.healing.is_over();
            while !(is_over || is_refused) {
                let Some(get) = self.next(&mut waiting, &busy)? else { break };
                match self.begin(get)? {
                    Ok(Some(id)) => {
                        *busy.entry(get.source).or_default() += 1;
                        under_way.insert(id, get);
                    }
                    Ok(None) => self.check(get, &mut waiting)?,
                    Err(SubmitError::QueueFull { .. }) => {
                        waiting.push_front((get.block, get.tried));
                        break;
                    }
                    // Another source has it, as long as the epoch goes on.
                    Err(_) => {
                        is_refused |= self.refused(get, &mut waiting)?;
                        break;
                    }
                }
                // A get may have ended at once, and a copy takes its time.
                is_over = self.healing.is_over();
            }
            // A session that is over has gets that nobody ends.
            if self.healing.member.is_over() {
                return Ok(false);
            }
            for (id, is_ok) in self.healing.device.take_gets() {
                let Some(get) = under_way.remove(&id) else { continue };
                *busy.entry(get.source).or_default() -= 1;
                if is_ok {
                    self.check(get, &mut waiting)?;
                } else {
                    is_refused |= self.refused(get, &mut waiting)?;
                }
            }
            if clock::now().since(told_at) >= SHARE_INTERVAL {
                told_at = clock::now();
                let percent = share_read(self.blocks, &self.kept.has_come);
                self.healing.say(&self.healing.others(), Said::Read { percent });
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
        Ok((expected, (0..hashes.len()).filter(|source| hashes[*source] == expected).collect()))
    }

    /// Takes the first waiting block that a source has time for, and that source.
    fn next(
        &self,
        waiting: &mut VecDeque<(usize, usize)>,
        busy: &BTreeMap<usize, usize>,
    ) -> Result<Option<Get>, SessionError> {
        // Blocks that wait are looked through only where a source may have one of them.
        if busy.values().all(|gets| *gets >= BLOCKS_AT_ONCE) {
            return Ok(None);
        }
        for at in 0..waiting.len() {
            let (block, tried) = waiting[at];
            let (_, have) = self.sources_of(block)?;
            if let Some(source) = source_for(&have, busy, block, tried) {
                waiting.remove(at);
                return Ok(Some(Get { block, tried, source }));
            }
        }
        Ok(None)
    }

    /// Begins to read a block.
    fn begin(&self, get: Get) -> Result<Result<Option<u64>, SubmitError>, SessionError> {
        let Get { block, source, .. } = get;
        let (state, bytes) = &self.blocks[block];
        let (first, other) = (self.sources[source], self.healing.own);
        let from = self.manifests[source]
            .source(*state, bytes)
            .ok_or_else(|| SessionError::StatesDiffer { first, other, own: self.states.describe() })?;
        let to = self.kept.memory[*state].slice(bytes.clone()).expect("inside of the state");
        Ok(self.healing.device.get(self.healing.record.number(), first.seat.0, from, to))
    }

    /// A block was not read, of which another source has the same. Returns whether that was tried
    /// too often: then the source is suspected, so that the epoch ends without it.
    fn refused(&self, get: Get, waiting: &mut VecDeque<(usize, usize)>) -> Result<bool, SessionError> {
        let Get { block, tried, source } = get;
        waiting.push_back((block, tried + 1));
        // Where the epoch is over, its pairs refuse.
        if tried + 1 < TRIES_MAX || self.healing.is_over() {
            return Ok(false);
        }
        let source = self.sources[source];
        tracing::warn!("{source} refuses to be read (block {block})");
        let member = &self.healing.member;
        member.tell(&mut member.lock(), Input::Late(source));
        Ok(true)
    }

    /// A block was read.
    fn check(&mut self, get: Get, waiting: &mut VecDeque<(usize, usize)>) -> Result<(), SessionError> {
        let Get { block, tried, .. } = get;
        let (expected, have) = self.sources_of(block)?;
        let (state, bytes) = &self.blocks[block];
        let read = self.kept.memory[*state].slice(bytes.clone()).expect("inside of the state");
        if hash(read) == expected {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_gives_more_the_sooner_its_gets_end_and_a_block_that_failed_goes_round() {
        let [none, one_slow, all] =
            [[0, 0, 0], [2, 1, 0], [2, 2, 2]].map(|gets| gets.into_iter().enumerate().collect());
        assert_eq!([0, 1, 2, 3].map(|block| source_for(&[0, 1, 2], &none, block, 0)), [0, 1, 2, 0].map(Some));
        assert_eq!(source_for(&[0, 1, 2], &one_slow, 0, 0), Some(2));
        assert_eq!(source_for(&[0, 1], &one_slow, 0, 0), Some(1));
        assert_eq!(source_for(&[0], &one_slow, 0, 0), None);
        assert_eq!(source_for(&[0, 1, 2], &all, 5, 0), None);
        assert_eq!([1, 2, 3].map(|tried| source_for(&[1, 2], &none, 0, tried)), [2, 1, 2].map(Some));
    }

    #[test]
    fn the_share_that_was_read_is_that_of_the_bytes() {
        let blocks = [(0, 0..60), (0, 60..90), (1, 0..10)];
        let share = |has_come: [bool; 3]| share_read(&blocks, &has_come);
        assert_eq!([share([false; 3]), share([true; 3])], [0, 100]);
        assert_eq!([share([false, true, false]), share([false, true, true])], [30, 40]);
        assert_eq!(share_read(&[], &[]), 100, "there is nothing to read");
    }
}
