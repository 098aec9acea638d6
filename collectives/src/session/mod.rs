//! Sessions: a job whose processes come and go.
//!
//! A [`Session`] is this process's membership in a job. The job makes **steps**. A step is
//! attempted by the members of an **epoch** in an ordinary [`Group`] of theirs, and its verdict is
//! the same on all members: committed, or to be repeated. When members end, stop or are out of
//! reach, the others agree on the next epoch (`pleach-membership`) and go on with what they have
//! registered and connected.
//!
//! | part | what for |
//! | --- | --- |
//! | [`Member`] | the state machine behind a lock, and the thread that answers while the caller computes |
//! | [`Incoming`] | the device's responder: what came and waits for a thread |
//! | [`SharedDevice`] | the device of all epochs: events sorted, pairs drained, processes severed |
//! | [`EpochDevice`] | the view of it that an epoch's engine has |
//! | [`envelope`] | control messages |
//! | [`asks`] | what people ask of a running job: who is there, that a member leaves |
//! | [`arriving`] | how a process comes to a job: it begins it, or is given a seat |
//! | [`seat_thread`], [`Newcomers`](newcomers::Newcomers), [`Roster`](roster::Roster) | the processes that come later: who gives them seats, who connects to them, where all are |
//! | [`heal`], [`healing`], [`hidden`] | how a process that came reads the states of the job, and when |
//! | [`Lent`] | the memory that it reads |
//! | [`meeting`] | where members meet again, to make a part of an epoch's group |
//! | [`Change`], [`SessionError`] | what callers are told |
//!
//! **From one epoch to the next.** A record was learned. The engine of the epoch stops: it is told
//! as of any fault, but what it tells its caller is the record. Only then its pairs are drained,
//! and who is out is severed. The engine takes a drained pair for a severed one, so its calls
//! return and give back their buffers when no peer can touch them. Then the epoch is entered, and
//! the caller's next attempt has a new engine over the same device: with the registrations and
//! connections that there are, and signals counted from where they stand. With the drain each end
//! tells the other up to which signal slot it has signalled so far, so only these are looked at.
//!
//! **Invariant:** between the begin of a step and its verdict there is one epoch. No transfer,
//! signal or message of an engine crosses from one epoch to another.
//!
//! **Memory of a GPU.** With [`Options::space`] the groups of all epochs work on a GPU's memory.
//! What their kernels exchange with other ranks goes through scratch, which is page-locked memory
//! of the host, registered once as any scratch.
//!
//! **Invariant:** in the group of an epoch no peer and no NIC reads or writes a GPU's memory; only
//! this process's own kernels and copies do. So buffers on a GPU are registered with no device, and
//! neither a drain nor a fence takes anything of them: a call that ends with its epoch has waited
//! for its kernels, and its buffer is good for the next one.

mod arriving;
pub mod asks;
mod change;
mod changes;
mod elastic;
mod envelope;
mod epoch_device;
mod heal;
mod healing;
mod hidden;
mod incoming;
mod last_words;
mod lent;
mod meeting;
mod member;
mod newcomers;
mod roster;
mod seat_thread;
mod shared_device;
mod split;
mod state;
mod timeline;

use std::sync::Arc;
use std::thread::JoinHandle;

use pleach_membership::{Input, Record, Verdict as Agreed};
use pleach_transport::cuda::{CudaMemory, Gpu};
use pleach_transport::rendezvous::{Presence, Store};
use pleach_transport::{Flush, Slice, clock, listening_address_of};
use pleach_vocabulary::Rank;
use signal_hook::SigId;

pub use change::{Change, SessionError, Unreceived, Verdict};
pub use elastic::{Elastic, Heal};
pub use pleach_membership::{Process, Reason, Seat};
pub use split::Split;
pub use state::{GpuState, State};
pub use timeline::Timeline;

use crate::engine::{Carried, EngineError, EpochEnd, FaultKind, StatusBoard};
use crate::group::{
    Buffer, CarriedGroup, CollectiveError, Element, GpuBuffer, Group, GroupError, JoinGroupError, Options,
    Parts, Setting, SplitError, expect_memory, session_buffer, session_number,
};
use changes::Changes;
use epoch_device::EpochDevice;
use heal::{Entry, NAME_BYTES_MAX};
use healing::{Begun, Healing, Own};
use hidden::{Gate, Hidden};
use incoming::Incoming;
use lent::Lent;
use meeting::EpochStore;
use member::Member;
use newcomers::Heard;
use shared_device::SharedDevice;
use split::Splits;
use state::Declaration;

/// Decodes bytes with the decoders of what processes and people send to a member: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    arriving::check_decoder(bytes);
    envelope::check_decoder(bytes);
    roster::check_decoder(bytes);
    heal::check_decoder(bytes);
    asks::check_decoders(bytes);
}

/// This part of the time until suspicion a process that leaves waits for others that leave too.
const LEAVING_TOGETHER: u32 = 8;

/// Handles of an epoch's group that the session itself has.
const HANDLES: usize = 2;

/// The epoch that this process has entered.
struct Epoch {
    record: Arc<Record>,
    group: Group,
    /// What the program has made of the group.
    parts: Arc<Parts>,
    /// Whether all members have the states, or read them behind its first step.
    is_healed: bool,
}

/// A process's membership in a job; see the module.
///
/// One thread uses it. Dropping it without [`Session::leave`] is to the others as the end of the
/// process.
pub struct Session {
    setting: Setting,
    elastic: Elastic,
    process: Process,
    device: Arc<SharedDevice>,
    incoming: Arc<Incoming>,
    member: Arc<Member>,
    thread: Option<JoinHandle<()>>,
    /// Gives seats to newcomers.
    seats: Option<JoinHandle<()>>,
    /// Writes and reads records in a store, where the rendezvous has one.
    records: Option<JoinHandle<()>>,
    /// Says that a member lives.
    presence: Option<Presence>,
    epoch: Option<Epoch>,
    /// The step that has begun.
    begun: Option<u64>,
    /// Every step before it is committed.
    step: u64,
    /// By which buffers know the groups of this session.
    number: u64,
    /// An epoch whose group could not be made or split.
    not_entered: Option<u64>,
    /// Where a signal that was caught is written down, for [`Session::leave_on`].
    signals: Vec<SigId>,
    /// The states, and whether this process has them: it began the job, or has read them.
    own: Own,
    /// The healing behind a step, and its thread.
    hidden: Option<(Arc<Hidden>, JoinHandle<()>)>,
    /// What the states wait for.
    gate: Arc<Gate>,
    lent: Arc<Lent>,
    splits: Splits,
    changes: Changes,
    /// The epoch in which the last step was committed, the same on all that committed it; of a
    /// process that began the job, the first one before.
    committed_in: Option<Arc<Record>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Session({}, step {})", self.process, self.step)
    }
}

impl Session {
    /// Comes to a job. Where none runs at the rendezvous address, the processes of the world meet,
    /// connect to each other and are the members of its first epoch. Where one runs, this process
    /// is given a seat, the one of its rank if it is free, connects to all members, and is a member
    /// when this returns: the others make steps with it from its first [`Session::next`] on. Where
    /// they are as many as they may be, it is a spare ([`Elastic::spares`]). Its world's size does
    /// not matter then.
    ///
    /// # Errors
    ///
    /// See [`SessionError`]; at the latest when `options.join_timeout` has passed.
    pub fn join(options: &Options, elastic: &Elastic) -> Result<Self, SessionError> {
        let Elastic { fewest, most, .. } = *elastic;
        let ranks = options.world.world_size;
        if fewest == 0 || fewest > most {
            return Err(SessionError::Limits { fewest, most, ranks });
        }
        elastic.expect_supported(options)?;
        // Before the ranks meet, so that one without the GPU reports that itself.
        expect_memory(options.space).map_err(JoinGroupError::from)?;
        let since = clock::now();
        let tuning = options.tuning.read().map_err(JoinGroupError::from)?;
        let options = Options { tuning, ..options.clone() };
        let incoming = Arc::new(Incoming::default());
        let arrived = arriving::arrive(options, elastic, &incoming)?;
        let process = arrived.process();
        let mut session = arrived.enter(elastic, incoming)?;
        session.await_seat(process, since)?;
        Ok(session)
    }

    /// Whether this process waits for room ([`Elastic::spares`]): it is no member yet.
    #[must_use]
    pub fn is_spare(&self) -> bool {
        self.member.lock().waits()
    }

    /// The next step. Every step before it is committed. Of a spare it is 0: [`Session::next`] says
    /// with which step it begins.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// When a process that joins reads the states: [`Elastic::heal`].
    #[must_use]
    pub fn heals(&self) -> Heal {
        self.elastic.heal
    }

    /// This process's stable number.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.process.seat
    }

    /// The number of seats: of the most members, and of spares ([`Elastic::most`],
    /// [`Elastic::spares`]). Seats are numbers below that.
    #[must_use]
    pub fn seats(&self) -> u32 {
        self.elastic.seats()
    }

    /// The number of the newest epoch that this process knows.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.member.lock().newest().unwrap_or(0)
    }

    /// The number of the epoch in which a step has begun.
    #[must_use]
    pub fn attempted_epoch(&self) -> Option<u64> {
        let epoch = self.epoch.as_ref().filter(|_| self.begun.is_some());
        epoch.map(|epoch| epoch.record.number())
    }

    /// The newest change of the members, by which this process has gone on: who left and why, and
    /// who came. [`Session::next`] and [`Session::commit`] learn of it; `None`: there was none
    /// since this process has come. A planned join or leave is told here alone, as it costs no
    /// retry.
    #[must_use]
    pub fn change(&self) -> Option<&Arc<Change>> {
        self.changes.newest()
    }

    /// When the last change was found, agreed on, drained and planned.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        *self.member.lock().timeline()
    }

    /// How often memory of this process was registered, and how many pairs it has connected, exact.
    #[must_use]
    pub fn set_up(&self) -> (u64, u64) {
        let counts = &self.device.info().setup;
        (counts.registered(), counts.connected())
    }

    /// `len` zeroed elements on which the groups of all epochs work in place, without copies.
    /// Where a process that was stopped, and may have mapped them, had to be severed, later calls
    /// copy them; take new ones then.
    ///
    /// # Errors
    ///
    /// No memory, or it cannot be registered. The groups work on a GPU's memory.
    pub fn buffer<T: Element>(&mut self, len: usize) -> Result<Buffer<T>, SessionError> {
        if self.setting.gpu().is_some() {
            let option = "buffers in the host's memory where Options::space is a GPU's";
            return Err(SessionError::Unsupported { option, remedy: "take Session::gpu_buffer" });
        }
        Ok(session_buffer(self.memory(len.saturating_mul(size_of::<T>()))?, len, self.number))
    }

    /// `len` zeroed elements in the memory of the GPU on which the groups work
    /// ([`Options::space`]), for the groups of all epochs. Whoever is severed, nothing is taken
    /// from them. Any other [`GpuBuffer`] of that GPU does as well.
    ///
    /// # Errors
    ///
    /// The groups work on the host's memory, or the GPU has too little.
    pub fn gpu_buffer<T: Element>(&self, len: usize) -> Result<GpuBuffer<T>, SessionError> {
        Ok(GpuBuffer::in_memory(self.gpu_memory(len.saturating_mul(size_of::<T>()))?, len))
    }

    fn gpu_memory(&self, bytes: usize) -> Result<Arc<CudaMemory>, SessionError> {
        let option = "memory of a GPU where Options::space is the host's";
        let gpu = self.gpu().ok_or(SessionError::Unsupported { option, remedy: "name a GPU there" })?;
        Ok(CudaMemory::new(gpu, bytes)?)
    }

    /// The GPU on whose memory the groups work ([`Options::space`]), if they do.
    #[must_use]
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.setting.gpu()
    }

    fn memory(&self, bytes: usize) -> Result<Slice, SessionError> {
        let memory = crate::engine::memory_for_peers(bytes)
            .map_err(|source| SessionError::Memory { bytes, source })?;
        Ok(self.device.register(memory)?.whole())
    }

    /// A state of the job: zeroed elements that are equal on all members, and change with steps
    /// that are committed. All members declare the same ones, before their first step. A process
    /// that joins a running job reads them from the others in its first [`Session::next`], or
    /// during its first step ([`Heal`]). If the job ends before that, the states of this process
    /// are still zeros, and [`Session::leave`] says so.
    ///
    /// # Errors
    ///
    /// There is a state of this name, or the name is too long. There is no memory, or it cannot be
    /// registered.
    pub fn state<T: Element>(&mut self, name: &str, len: usize) -> Result<State<T>, SessionError> {
        self.expect_new_state(name)?;
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = self.memory(bytes)?;
        let elements = session_buffer(memory.clone(), len, self.number);
        let entry = Entry::new(T::DATA_TYPE.name(), bytes, memory);
        Ok(State::new(self.declare(name, entry), elements, Arc::clone(&self.gate)))
    }

    /// As [`Session::state`], in the memory of the GPU on which the groups work
    /// ([`Options::space`]). It takes as many bytes of the host's memory besides, and twice as many
    /// in a process that joined.
    ///
    /// # Errors
    ///
    /// As [`Session::state`]. The groups work on the host's memory, or the GPU has too little.
    pub fn gpu_state<T: Element>(&mut self, name: &str, len: usize) -> Result<GpuState<T>, SessionError> {
        self.expect_new_state(name)?;
        let bytes = len.saturating_mul(size_of::<T>());
        let on_gpu = self.gpu_memory(bytes)?;
        let elements = GpuBuffer::in_memory(Arc::clone(&on_gpu), len);
        let entry = Entry::new(T::DATA_TYPE.name(), bytes, self.memory(bytes)?).on_gpu(on_gpu);
        Ok(GpuState::new(self.declare(name, entry), elements))
    }

    fn expect_new_state(&self, name: &str) -> Result<(), SessionError> {
        if name.len() > NAME_BYTES_MAX {
            return Err(SessionError::StateName { bytes: name.len(), bytes_max: NAME_BYTES_MAX });
        }
        if self.own.states().contains(name) {
            return Err(SessionError::StateTaken(name.to_owned()));
        }
        Ok(())
    }

    fn declare(&mut self, name: &str, entry: Entry) -> Declaration {
        let declaration = Declaration::new(name, &entry, self.own.has_them());
        self.own.states_mut().add(name, entry);
        declaration
    }

    /// Splits the group of each epoch, as [`Group::split`] does, from the next step on. Members for
    /// which `colour` gives the same number are a group, in the order of their ranks; a member for
    /// which it gives none is in no group. All members make the same splits, between the same two
    /// steps, and a process that joins makes those that the others have made before its first
    /// step. `colour` gives the same on all members.
    ///
    /// The groups of an epoch end with it. [`Session::next`] makes those of the next one, but for a
    /// step behind which a process reads the states ([`Heal::Hidden`]): that only reduces over all.
    pub fn split(&mut self, colour: impl Fn(Process) -> Option<u32> + Send + Sync + 'static) -> Split {
        self.splits.add(Box::new(colour))
    }

    /// Makes the groups that are split from that of the epoch; false: the epoch is over.
    fn make_splits(&mut self, record: &Record) -> Result<bool, SessionError> {
        let Some(epoch) = &self.epoch else { return Ok(false) };
        let Err(error) = self.splits.make(record, &epoch.group, &self.member) else { return Ok(true) };
        if matches!(&error, SplitError::Collective(error) if error.is_change()) {
            return Ok(false);
        }
        // What this process said to the others is not said again: the next epoch begins anew.
        let epoch = record.number();
        self.not_entered = Some(epoch);
        self.member.tell(&mut self.member.lock(), Input::Failed);
        Err(SessionError::Split { epoch, source: Box::new(error) })
    }

    /// Compares the states of all members that have committed the last step, between two steps: all
    /// members call it between the same ones. Each member hashes its states and sends the hash. A
    /// process that has come since takes no part.
    ///
    /// # Errors
    ///
    /// [`SessionError::Diverged`] names the members that differ, the same on all. Else see
    /// [`SessionError`].
    pub fn audit(&mut self) -> Result<(), SessionError> {
        // Who has come since has made no step with the others: it heals before its first one, so
        // nobody waits for it here.
        let Some(among) = self.committed_in.clone() else { return Ok(()) };
        self.end_hidden()?;
        // Who could not read them to the end has none to compare.
        let own = self.own.has_them().then(|| self.own.states().hash()).transpose()?;
        let mut record = self.await_entry()?;
        while !self.healing(&record).audit(self.step, own, &among)? {
            record = self.await_entry()?;
        }
        Ok(())
    }

    fn healing(&self, record: &Arc<Record>) -> Healing {
        let Self { device, incoming, member, lent, .. } = self;
        Healing::new(record, device, incoming, member, lent, &self.elastic)
    }

    /// Heals who came, this process too; false: the epoch is over before.
    fn heal(&mut self, record: &Arc<Record>) -> Result<bool, SessionError> {
        let begun = self.healing(record).begin(&mut self.own)?;
        let Some(epoch) = self.epoch.as_mut() else { return Ok(false) };
        epoch.is_healed = !matches!(begun, Begun::Over);
        if matches!(begun, Begun::Healed) && self.own.has_them() {
            self.gate.open();
        }
        if let Begun::Hidden { hidden, thread, contributors } = begun {
            epoch.group.set_contributors(Some(contributors), self.own.has_them());
            self.gate.close(Arc::clone(&hidden));
            self.hidden = Some((hidden, thread));
        }
        Ok(epoch.is_healed)
    }

    /// Waits for the end of the healing behind a step, if there is one. All contribute from now on.
    fn end_hidden(&mut self) -> Result<(), SessionError> {
        let Some((hidden, thread)) = self.hidden.take() else { return Ok(()) };
        let is_whole = hidden.await_end();
        // A panic there is the error of the healing.
        let _ = thread.join();
        // Who could not read all may change its states when it has read them.
        if is_whole || !hidden.reads() {
            self.gate.open();
        }
        if let Some(epoch) = &self.epoch {
            epoch.group.set_contributors(None, true);
        }
        self.own.ended(&hidden, is_whole);
        hidden.take_error().map_or(Ok(()), Err)
    }

    /// Attempts the next step: [`Session::next`], the step itself, and [`Session::commit`].
    ///
    /// The step gets the group of this epoch and the number of the step. It returns an error where
    /// it cannot be done here; an error of a call of the group that says
    /// [`is_change`](CollectiveError::is_change) is no failure of the step.
    ///
    /// # Errors
    ///
    /// See [`SessionError`].
    pub fn attempt(
        &mut self,
        attempt: impl FnOnce(&Group, u64) -> Result<(), CollectiveError>,
    ) -> Result<Verdict, SessionError> {
        let step = self.next()?;
        let outcome = attempt(self.group()?, step);
        self.commit(outcome)
    }

    /// Enters the newest epoch and begins the next step there. Returns its number.
    ///
    /// # Errors
    ///
    /// See [`SessionError`].
    #[allow(clippy::should_implement_trait)] // A step is no item of a sequence.
    pub fn next(&mut self) -> Result<u64, SessionError> {
        let since = clock::now();
        loop {
            let record = self.await_entry()?;
            self.step = record.step().max(self.step);
            self.lent.entered(record.number(), || self.device.is_ending());
            let is_behind = |hidden: &Hidden| !hidden.is_of(record.number(), self.step);
            if self.hidden.as_ref().is_some_and(|(hidden, _)| is_behind(hidden)) {
                self.end_hidden()?;
            }
            let members = record.members().len();
            let waited = clock::now().since(since);
            if members < self.elastic.fewest as usize {
                if self.member.lock().has_announced() {
                    // No step is under way at whose end it would leave.
                    return Err(SessionError::Left);
                }
                if waited >= self.elastic.fewest_wait {
                    return Err(SessionError::TooFew { members, fewest: self.elastic.fewest, waited });
                }
                self.take_in_others(&record);
                continue;
            }
            if self.not_entered == Some(record.number()) {
                // What its engine said to the others is not said again: the next one begins anew on
                // all members.
                self.wait_in(&record);
                continue;
            }
            let is_entered = |epoch: &Epoch| epoch.record.digest() == record.digest();
            if !self.epoch.as_ref().is_some_and(is_entered) && !self.enter(&record)? {
                continue;
            }
            let is_healed = self.epoch.as_ref().is_some_and(|epoch| epoch.is_healed);
            if !is_healed && !self.heal(&record)? {
                self.wait_in(&record);
                continue;
            }
            // Behind a step who heals gives nothing, which parts do not know.
            if self.hidden.is_none() && !self.make_splits(&record)? {
                self.wait_in(&record);
                continue;
            }
            let mut state = self.member.lock();
            if !state.is_current(record.number()) {
                continue;
            }
            if let Some((step, times, failed)) = state.take_failed() {
                // This member had not begun the step when another one failed it.
                return Err(SessionError::Step { step, times, own: None, failed });
            }
            if state.all_leave() {
                return Err(SessionError::Left);
            }
            if let Some(step) = self.member.begin(&mut state) {
                state.timeline().planned(clock::now());
                self.begun = Some(step);
                return Ok(step);
            }
            drop(self.member.wait(state));
        }
    }

    /// Waits until something has changed, unless the epoch of this record is over already.
    fn wait_in(&self, record: &Record) {
        let state = self.member.lock();
        if state.is_current(record.number()) {
            drop(self.member.wait(state));
        }
    }

    /// Waits for processes that join. Too few members take them in at once.
    fn take_in_others(&self, record: &Record) {
        let mut state = self.member.lock();
        if state.is_current(record.number()) {
            self.member.tell(&mut state, Input::TooFew);
            drop(self.member.wait(state));
        }
    }

    /// The group of the epoch in which a step has begun.
    ///
    /// # Errors
    ///
    /// [`SessionError::NotBegun`].
    pub fn group(&self) -> Result<&Group, SessionError> {
        let epoch = self.epoch.as_ref().filter(|_| self.begun.is_some());
        epoch.map(|epoch| &epoch.group).ok_or(SessionError::NotBegun)
    }

    /// Says what became of the step here, and waits for the verdict of all members. It makes two
    /// calls of the step's group, so meanwhile no other thread makes calls of that group.
    ///
    /// # Errors
    ///
    /// See [`SessionError`].
    pub fn commit(&mut self, outcome: Result<(), CollectiveError>) -> Result<Verdict, SessionError> {
        let step = self.begun.ok_or(SessionError::NotBegun)?;
        let own = outcome.err();
        let attempted = self.epoch.as_ref().map(|epoch| Arc::clone(&epoch.record));
        let epoch = attempted.as_ref().map(|record| record.number());
        if let (None, Some(epoch)) = (&own, &self.epoch) {
            member::commit::ready(&self.member, &epoch.record, &epoch.group);
        }
        let mut state = self.member.lock();
        // Where it is another epoch by now, this one is over anyway.
        if own.is_some() && state.newest() == epoch {
            self.member.tell(&mut state, Input::Failed);
        }
        let mut late_at = clock::now() + self.setting.options().timeout;
        let verdict = loop {
            // The interrupt is told, not the verdict that the step is repeated.
            let counts = |verdict: &Agreed| *verdict == Agreed::Committed || !state.is_interrupted();
            if let Some(verdict) = state.verdict_of(step).filter(counts) {
                break verdict;
            }
            if let Some(error) = self.end_of(&mut state) {
                drop(state);
                self.begun = None;
                self.end_group();
                return Err(error);
            }
            if clock::now() >= late_at {
                late_at = clock::now() + self.setting.options().timeout;
                for process in state.unready() {
                    self.member.tell(&mut state, Input::Late(process));
                }
            }
            state = self.member.wait(state);
        };
        self.begun = None;
        if state.newest() != epoch {
            // No peer reads or changes memory of the attempt when the caller has it again.
            drop(state);
            self.end_group();
            state = self.member.lock();
        }
        if verdict == Agreed::Committed {
            self.step = step + 1;
            self.committed_in = attempted;
            return Ok(Verdict::Committed);
        }
        if state.is_out() {
            let error = self.end_of(&mut state);
            drop(state);
            self.end_group();
            return Err(error.expect("it is out"));
        }
        if let Some((step, times, failed)) = state.take_failed() {
            return Err(SessionError::Step { step, times, own: own.map(Box::new), failed });
        }
        let attempted = attempted.expect("a step has begun in an epoch");
        let entered = state.last_entered().unwrap_or_else(|| Arc::clone(&attempted));
        drop(state);
        self.changes.go_on(self.process, &entered, (&self.device, &self.incoming));
        let change = self.changes.newest().filter(|change| change.epoch == entered.number()).cloned();
        Ok(Verdict::Retry(change.unwrap_or_else(|| Change::between(&attempted, &entered, Vec::new()))))
    }

    /// Leaves the job when this signal comes: at the end of the step that is under way then, or of
    /// the next one, so that the others repeat no step for it. This process goes on with its
    /// loop until [`SessionError::Left`] ends it. If all members are told to leave, all of them
    /// get that error.
    ///
    /// The signal does not end the process any more. 15 is `SIGTERM`.
    ///
    /// # Errors
    ///
    /// [`SessionError::Signal`].
    pub fn leave_on(&mut self, signal: i32) -> Result<(), SessionError> {
        let failed = |source| SessionError::Signal { signal, source };
        if signal_hook::consts::FORBIDDEN.contains(&signal) {
            return Err(failed(std::io::ErrorKind::InvalidInput.into()));
        }
        let caught = self.member.leaves_when();
        self.signals.push(signal_hook::flag::register(signal, caught).map_err(failed)?);
        Ok(())
    }

    /// Has calls of the session that wait ask this now and then, as
    /// [`Group::interrupted_by`](crate::Group::interrupted_by) has those of a group. If the answer
    /// is true, they end with [`SessionError::Interrupted`], and the others go on without this
    /// process.
    pub fn interrupted_by(&mut self, interrupted: fn() -> bool) {
        self.member.lock().interrupt_by(interrupted);
    }

    /// As [`Session::leave_on`], at once.
    pub fn leave_after_step(&mut self) {
        self.member.announce_leave(&mut self.member.lock());
    }

    /// Leaves the job, between two steps. Where all members leave together, or this process has
    /// got [`SessionError::Left`], nobody repeats a step for it. Others that have begun their next
    /// step repeat it; [`Session::leave_on`] spares them that.
    ///
    /// # Errors
    ///
    /// [`SessionError::StatesNotRead`], where this process has declared states and the job was over
    /// before it could read them. [`SessionError::Interrupted`], if this call or one before was
    /// interrupted. This process has left then too, whatever the others do.
    pub fn leave(mut self) -> Result<(), SessionError> {
        self.begun = None;
        // An error of its own ends the healing too.
        let _ = self.end_hidden();
        let begun = clock::now();
        let mut has_insisted = false;
        let mut state = self.member.lock();
        let was_told = state.has_announced();
        self.member.announce_leave(&mut state);
        // Nobody waits for a spare.
        while !state.waits() && !state.all_leave() && !state.is_out() && !state.is_interrupted() {
            let waited = clock::now().since(begun);
            if waited >= self.elastic.suspect_after {
                break;
            }
            if !has_insisted && waited >= self.elastic.suspect_after / LEAVING_TOGETHER {
                // The others are in a step, which this process takes no part in.
                has_insisted = true;
                self.member.tell(&mut state, Input::Failed);
            }
            state = self.member.wait(state);
        }
        let (is_interrupted, is_spare) = (state.is_interrupted(), state.waits());
        drop(state);
        if is_interrupted {
            return Err(SessionError::Interrupted);
        }
        let until = clock::now() + self.setting.options().close_timeout;
        self.device.lock().device.leave();
        while !self.device.lock().device.flush(Flush::All) && clock::now() < until {
            self.device.poll(clock::now());
            std::thread::yield_now();
        }
        let states = self.own.states().names();
        if self.own.has_them() || states.is_empty() || was_told || is_spare {
            return Ok(());
        }
        Err(SessionError::StatesNotRead { step: self.step, states })
    }

    /// Waits until this process is a member, or a spare; it came then.
    fn await_seat(&mut self, process: Process, since: clock::Nanos) -> Result<(), SessionError> {
        let mut state = self.member.lock();
        loop {
            if let Some(error) = self.end_of(&mut state) {
                return Err(error);
            }
            if let Some(record) = state.entered() {
                self.step = record.step();
                return Ok(());
            }
            let (reaches_all, members) = state.members_known();
            if self.elastic.spares > 0 && reaches_all && members >= self.elastic.most as usize {
                return Ok(());
            }
            let waited = clock::now().since(since);
            if waited >= self.setting.options().join_timeout {
                return Err(SessionError::NotAdmitted { process, waited });
            }
            state = self.member.wait(state);
        }
    }

    /// Waits for the entry of the newest epoch: a spare, until there is room for it.
    fn await_entry(&mut self) -> Result<Arc<Record>, SessionError> {
        let mut heard = Heard::new(clock::now());
        let mut state = self.member.lock();
        loop {
            if let Some(error) = self.end_of(&mut state) {
                drop(state);
                self.end_group();
                return Err(error);
            }
            if let Some(record) = state.entered() {
                return Ok(record);
            }
            if state.waits() {
                if state.has_announced() {
                    return Err(SessionError::Left);
                }
                if heard.is_over(clock::now(), state.members_known(), self.elastic.suspect_after) {
                    return Err(SessionError::NotNeeded { process: self.process });
                }
            }
            state = self.member.wait(state);
        }
    }

    /// Why the session does not go on, if so.
    fn end_of(&self, state: &mut member::State) -> Option<SessionError> {
        let records = self.records.as_ref().is_some_and(JoinHandle::is_finished);
        if records || self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Some(SessionError::ThreadEnded);
        }
        if let Some(error) = state.broken() {
            return Some(SessionError::LastWord(error));
        }
        if state.is_interrupted() {
            return Some(SessionError::Interrupted);
        }
        if let Some((from, seat)) = state.stranger() {
            let seats = self.device.seats();
            return Some(SessionError::NoSuchSeat { from, seat, seats });
        }
        if let Some(reason) = state.without_store() {
            return Some(SessionError::Store { reason, waited: self.elastic.quorum_wait });
        }
        if state.all_leave() && state.lacks_quorum() {
            // The others have gone, as this process is about to. It was in a step that they had not
            // begun, and nobody is left to agree that it is not made.
            return Some(SessionError::Left);
        }
        if let Some((answered, members)) = state.without_quorum() {
            let waited = self.elastic.quorum_wait;
            return Some(SessionError::NoQuorum { answered, members, waited });
        }
        if state.has_lost_units() {
            let (unit, waited) = (self.elastic.unit, self.elastic.quorum_wait);
            return Some(SessionError::UnitsLost { unit, waited });
        }
        if state.has_left(self.process) {
            return Some(SessionError::Left);
        }
        let expelled = state.change_without_this().map(SessionError::Expelled);
        // The session's thread has panicked and has not ended yet, or an error was told before.
        expelled.or_else(|| state.has_given_up().then_some(SessionError::ThreadEnded))
    }

    /// Waits until no peer reads or changes memory of the last epoch, and lets go of its group.
    fn end_group(&mut self) {
        let Some(epoch) = self.epoch.take() else { return };
        self.member.end_open_epoch();
        // The fence is this process's own work, and the thread of the session does its part.
        let limit = self.elastic.suspect_after;
        while !epoch.group.await_end(clock::now() + limit) || !epoch.parts.await_end(clock::now() + limit) {
            tracing::debug!("the group of epoch {} has not ended yet", epoch.record.number());
        }
        self.splits.end();
        self.device.quiet(epoch.record.number());
        drop(self.member.lock().close());
    }

    /// Makes the group of an epoch; false: the epoch is over.
    fn enter(&mut self, record: &Arc<Record>) -> Result<bool, SessionError> {
        self.end_group();
        self.changes.go_on(self.process, record, (&self.device, &self.incoming));
        let number = record.number();
        let scratch = match self.scratch(number) {
            Ok(scratch) => scratch,
            Err(error) => {
                self.not_entered = Some(number);
                self.member.tell(&mut self.member.lock(), Input::Failed);
                return Err(error);
            }
        };
        let ranks: Vec<Rank> = record.members().iter().map(|member| member.seat.0).collect();
        let own = record.rank_of(self.process).expect("it was entered by a member") as Rank;
        // What comes for the epoch has the board, so the board does not keep it.
        let incoming = Arc::downgrade(&self.incoming);
        let end = EpochEnd::new(move |fault| {
            if let Some(incoming) = incoming.upgrade() {
                incoming.found(number, fault.late());
            }
        });
        let board = Arc::new(StatusBoard::of_epoch(own, end));
        let incoming = Arc::downgrade(&self.incoming);
        let parts = Parts::new(number, self.elastic.suspect_after, move |late| {
            if let Some(incoming) = incoming.upgrade() {
                incoming.found(number, late);
            }
        });
        let mut state = self.member.lock();
        if !state.is_current(number) {
            return Ok(false);
        }
        let Some(places) = state.places(record) else {
            tracing::warn!("it is not known where all members of epoch {number} are");
            self.not_entered = Some(number);
            self.member.tell(&mut state, Input::Failed);
            return Ok(false);
        };
        let device = EpochDevice::new(Arc::clone(&self.device), number, ranks.clone(), Arc::clone(&board));
        state.open(Arc::clone(record), Arc::clone(&board), Arc::clone(&parts));
        drop(state);
        for (to, answer) in self.incoming.listen(number, ranks.clone(), Arc::clone(&board)) {
            // A peer that is gone needs no answer.
            let _ = self.device.post(to, &answer);
        }
        let former = if number > 0 { self.incoming.used_slots(number, &ranks) } else { Vec::new() };
        let engine = Carried { scratch, seed: record.digest().seed(), former };
        let carried = CarriedGroup { engine: &engine, number: self.number, parts: &parts };
        let others = ranks.into_iter().filter(|rank| *rank != self.process.seat.0).collect();
        let address = listening_address_of(&self.device.info().address);
        let store = EpochStore::new(self.incoming.meetings(), &self.member, number, others, address);
        let of_session = (carried, Box::new(store) as Box<dyn Store>);
        match self.setting.group(&places, own as usize, Box::new(device), board, of_session) {
            Ok(group) => {
                self.member.lock().opened(group.clone());
                self.epoch = Some(Epoch { record: Arc::clone(record), group, parts, is_healed: false });
                Ok(true)
            }
            Err(error) => self.could_not_enter(record, error).map(|()| false),
        }
    }

    /// The group of an epoch could not be made. Another attempt in the same epoch would hear
    /// nothing of the others, so the epoch has to end.
    fn could_not_enter(&mut self, record: &Record, error: GroupError) -> Result<(), SessionError> {
        self.not_entered = Some(record.number());
        let mut state = self.member.lock();
        drop(state.close());
        match error {
            GroupError::Failed(fault) if fault.kind == FaultKind::Changed => Ok(()),
            GroupError::Silent { missing, .. } => {
                for rank in missing {
                    let process = record.members()[rank as usize];
                    self.member.tell(&mut state, Input::Late(process));
                }
                Ok(())
            }
            error => {
                self.member.tell(&mut state, Input::Failed);
                match error {
                    // A peer that is gone, as the members will find.
                    GroupError::Failed(_) | GroupError::Engine(EngineError::Post(_)) => Ok(()),
                    error => {
                        let epoch = record.number();
                        Err(SessionError::Group { epoch, source: Box::new(error) })
                    }
                }
            }
        }
    }

    /// Scratch for engines, registered once, and again where a fence has taken it.
    fn scratch(&mut self, epoch: u64) -> Result<Slice, SessionError> {
        let mut state = self.member.lock();
        if std::mem::take(&mut state.is_memory_taken) {
            // Buffers that were registered before are memory as any other from now on.
            self.number = session_number();
            self.own.states_mut().were_taken();
        }
        if let Some(scratch) = &state.scratch {
            return Ok(scratch.clone());
        }
        drop(state);
        let memory = self.setting.scratch_memory(self.elastic.most).map_err(|error| match error {
            EngineError::Scratch { bytes, source } => SessionError::Memory { bytes: bytes as usize, source },
            error => SessionError::Group { epoch, source: Box::new(GroupError::Engine(error)) },
        })?;
        let scratch = self.device.register(memory)?.whole();
        self.member.lock().scratch = Some(scratch.clone());
        Ok(scratch)
    }

    /// Ends the session's threads.
    fn end(&mut self) {
        self.member.end();
        if let Some((_, thread)) = self.hidden.take() {
            // It ends with the session. What it says about that, nobody asks for.
            let _ = thread.join();
        }
        // States that were not read are the program's now.
        self.gate.open();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
        if let Some(seats) = self.seats.take() {
            seats.thread().unpark();
            let _ = seats.join();
        }
        if let Some(records) = self.records.take() {
            let _ = records.join();
        }
        self.presence = None;
    }
}

impl Drop for Session {
    /// To the others it is as the end of the process. What the program keeps of the group of the
    /// epoch, started operations too, ends with an error.
    fn drop(&mut self) {
        for signal in self.signals.drain(..) {
            signal_hook::low_level::unregister(signal);
        }
        let is_kept = |epoch: &Epoch| epoch.group.is_kept_beside(HANDLES) || epoch.parts.are_kept();
        let is_kept = self.epoch.as_ref().is_some_and(is_kept);
        if is_kept && self.thread.is_some() {
            self.member.drop_session();
            self.end_group();
        }
        self.end();
        drop(self.member.lock().close());
    }
}

/// Ends the session where one of its threads panics.
struct TellsOfPanic<'a>(&'a Member);

impl Drop for TellsOfPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.thread_has_failed();
        }
    }
}

#[cfg(test)]
mod tests;
