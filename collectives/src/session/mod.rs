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
//! | [`Incoming`] | the device's responder: what came and waits for that thread |
//! | [`SharedDevice`] | the device of all epochs: events sorted, pairs drained, processes severed |
//! | [`EpochDevice`] | the view of it that an epoch's engine has |
//! | [`envelope`] | control messages |
//! | [`Change`], [`SessionError`] | what callers are told |
//!
//! **From one epoch to the next.** A record was learned. The engine of the epoch stops: it is told
//! as of any fault, but what it tells its caller is the record. Only then its pairs are drained,
//! and who is out is severed. The engine takes a drained pair for a severed one, so its calls
//! return and give back their buffers when no peer can touch them. Then the epoch is entered, and
//! the caller's next attempt has a new engine over the same device: with the registrations and
//! connections that there are, and signals counted from where they stand.
//!
//! **Invariant:** between the begin of a step and its verdict there is one epoch. No transfer,
//! signal or message of an engine crosses from one epoch to another.

mod change;
mod elastic;
mod envelope;
mod epoch_device;
mod incoming;
mod member;
mod shared_device;
mod state;
mod timeline;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;

use pleach_membership::{Input, Record, Verdict as Agreed};
use pleach_transport::rendezvous::join;
use pleach_transport::{Flush, Slice, clock};
use pleach_vocabulary::Rank;

pub use change::{Change, SessionError, Verdict};
pub use elastic::Elastic;
pub use pleach_membership::{Process, Reason, Seat};
pub use state::State;
pub use timeline::Timeline;

use crate::engine::{Carried, EpochEnd, FaultKind, StatusBoard};
use crate::group::{
    Buffer, CarriedGroup, CollectiveError, Element, Group, GroupError, JoinGroupError, Options, Setting,
    scratch_memory, session_buffer, session_number, session_settings,
};
use epoch_device::EpochDevice;
use incoming::Incoming;
use member::Member;
use shared_device::SharedDevice;

/// The epoch that this process has entered.
struct Epoch {
    record: Arc<Record>,
    group: Group,
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
    epoch: Option<Epoch>,
    /// The step that has begun.
    begun: Option<u64>,
    /// Every step before it is committed.
    step: u64,
    /// By which buffers know the groups of this session.
    number: u64,
    states: BTreeSet<String>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Session({}, step {})", self.process, self.step)
    }
}

impl Session {
    /// Meets the other processes of the world and connects to all of them. They are the members of
    /// the first epoch.
    ///
    /// # Errors
    ///
    /// See [`SessionError`]; at the latest when `options.join_timeout` has passed.
    pub fn join(options: &Options, elastic: &Elastic) -> Result<Self, SessionError> {
        let ranks = options.world.world_size;
        let Elastic { fewest, most, .. } = *elastic;
        if fewest == 0 || fewest > most || ranks < fewest || ranks > most {
            return Err(SessionError::Limits { fewest, most, ranks });
        }
        let incoming = Arc::new(Incoming::default());
        let joined = join(&options.world, &session_settings(options), incoming.clone())
            .map_err(JoinGroupError::from)?;
        let own = Process { seat: Seat(joined.rank), incarnation: joined.device.info().incarnation };
        let process_of = |rank: Rank| match joined.device.incarnation(rank) {
            Some(incarnation) if rank != joined.rank => Process { seat: Seat(rank), incarnation },
            _ => own,
        };
        let members = (0..joined.world_size).map(process_of).collect();
        let first = Arc::new(Record::first(members).expect("ranks are connected, and differ"));
        let setting = Setting {
            options: options.clone(),
            fabric: joined.fabric,
            hosts: joined.hosts,
            ranks_here: joined.ranks_here,
            ranks_a_processor: joined.ranks_a_processor,
        };
        let waker = Arc::clone(&incoming);
        let device = SharedDevice::new(joined.device, joined.events, joined.world_size, move || waker.wake());
        let member = Member::new(own, first, elastic.clone(), Arc::clone(&device), Arc::clone(&incoming));
        let member = member.map_err(SessionError::LastWord)?;
        let runs = Arc::clone(&member);
        let thread = std::thread::Builder::new()
            .name(format!("pleach-seat-{}", joined.rank % 1000))
            .spawn(move || {
                let _told = TellsOfPanic(&runs);
                runs.run();
            })
            .map_err(SessionError::Thread)?;
        incoming.wakes(thread.thread().clone());
        incoming.wake();
        Ok(Self {
            setting,
            elastic: elastic.clone(),
            process: own,
            device,
            incoming,
            member,
            thread: Some(thread),
            epoch: None,
            begun: None,
            step: 0,
            number: session_number(),
            states: BTreeSet::new(),
        })
    }

    /// The next step. Every step before it is committed.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// This process's stable number.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.process.seat
    }

    /// The number of the newest epoch that this process knows.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.member.lock().record().number()
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
    /// No memory, or it cannot be registered.
    pub fn buffer<T: Element>(&mut self, len: usize) -> Result<Buffer<T>, SessionError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = crate::engine::memory_for_peers(bytes)
            .map_err(|source| SessionError::Memory { bytes, source })?;
        let slice = self.device.register(memory)?.whole();
        Ok(session_buffer(slice, len, self.number))
    }

    /// A state of the job: zeroed elements that are equal on all members, and change with steps
    /// that are committed.
    ///
    /// # Errors
    ///
    /// There is a state of this name, no memory, or it cannot be registered.
    pub fn state<T: Element>(&mut self, name: &str, len: usize) -> Result<State<T>, SessionError> {
        if !self.states.insert(name.to_owned()) {
            return Err(SessionError::StateTaken(name.to_owned()));
        }
        Ok(State::new(name, self.buffer(len)?))
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
            let members = record.members().len();
            let waited = clock::now().since(since);
            if members < self.elastic.fewest as usize {
                if waited >= self.elastic.fewest_wait {
                    return Err(SessionError::TooFew { members, fewest: self.elastic.fewest, waited });
                }
                drop(self.member.wait(self.member.lock()));
                continue;
            }
            if self.epoch.as_ref().is_none_or(|epoch| epoch.record.digest() != record.digest())
                && !self.enter(&record)?
            {
                continue;
            }
            let mut state = self.member.lock();
            if state.record().number() != record.number() {
                continue;
            }
            if let Some((step, times)) = state.take_failed() {
                // This member had not begun the step when another one failed it.
                return Err(SessionError::Step { step, times, own: None });
            }
            if let Some(step) = self.member.begin(&mut state) {
                state.timeline().planned(clock::now());
                self.begun = Some(step);
                return Ok(step);
            }
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

    /// Says what became of the step here, and waits for the verdict of all members.
    ///
    /// # Errors
    ///
    /// See [`SessionError`].
    pub fn commit(&mut self, outcome: Result<(), CollectiveError>) -> Result<Verdict, SessionError> {
        let step = self.begun.ok_or(SessionError::NotBegun)?;
        let own = outcome.err();
        let epoch = self.epoch.as_ref().map(|epoch| epoch.record.number());
        let mut state = self.member.lock();
        match &own {
            None => self.member.tell(&mut state, Input::Ready),
            // The epoch is over anyway.
            Some(_) if Some(state.record().number()) != epoch => {}
            Some(_) => self.member.tell(&mut state, Input::Failed),
        }
        let mut late_at = clock::now() + self.setting.options.timeout;
        let verdict = loop {
            if let Some(verdict) = state.verdict_of(step) {
                break verdict;
            }
            if let Some(error) = self.end_of(&mut state) {
                drop(state);
                self.begun = None;
                self.end_group();
                return Err(error);
            }
            if clock::now() >= late_at {
                late_at = clock::now() + self.setting.options.timeout;
                for process in state.unready() {
                    self.member.tell(&mut state, Input::Late(process));
                }
            }
            state = self.member.wait(state);
        };
        self.begun = None;
        if Some(state.record().number()) != epoch {
            // No peer reads or changes memory of the attempt when the caller has it again.
            drop(state);
            self.end_group();
            state = self.member.lock();
        }
        if verdict == Agreed::Committed {
            self.step = step + 1;
            return Ok(Verdict::Committed);
        }
        if state.is_out() {
            let error = self.end_of(&mut state);
            drop(state);
            self.end_group();
            return Err(error.expect("it is out"));
        }
        if let Some((step, times)) = state.take_failed() {
            return Err(SessionError::Step { step, times, own });
        }
        Ok(Verdict::Retry(state.change().expect("a record says that the step is repeated")))
    }

    /// Leaves the job, when its steps are done or others go on with them. Waits a moment for
    /// members that leave too.
    ///
    /// # Errors
    ///
    /// None at present: whatever the others do, this process has left.
    pub fn leave(mut self) -> Result<(), SessionError> {
        let until = clock::now() + self.elastic.suspect_after;
        let mut state = self.member.lock();
        self.member.tell(&mut state, Input::Leave);
        while clock::now() < until && !state.everyone_leaves() && !state.is_out() {
            state = self.member.wait(state);
        }
        drop(state);
        self.end();
        let until = clock::now() + self.setting.options.close_timeout;
        self.device.lock().device.leave();
        while !self.device.lock().device.flush(Flush::All) && clock::now() < until {
            self.device.poll(clock::now());
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Waits for the entry of the newest epoch.
    fn await_entry(&mut self) -> Result<Arc<Record>, SessionError> {
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
            state = self.member.wait(state);
        }
    }

    /// Why the session does not go on, if so.
    fn end_of(&self, state: &mut member::State) -> Option<SessionError> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Some(SessionError::ThreadEnded);
        }
        if let Some(error) = state.broken() {
            return Some(SessionError::LastWord(error));
        }
        if let Some((answered, members)) = state.without_quorum() {
            let waited = self.elastic.quorum_wait;
            return Some(SessionError::NoQuorum { answered, members, waited });
        }
        let change = state.change();
        state.is_out().then(|| SessionError::Expelled(change.expect("a record says that it is out")))
    }

    /// Waits until no peer reads or changes memory of the last epoch, and lets go of its group.
    fn end_group(&mut self) {
        let Some(epoch) = self.epoch.take() else { return };
        // The fence is this process's own work, and the thread of the session does its part.
        while !epoch.group.await_end(clock::now() + self.elastic.suspect_after) {
            tracing::debug!("the group of epoch {} has not ended yet", epoch.record.number());
        }
        self.device.quiet(epoch.record.number());
        drop(self.member.lock().close());
    }

    /// Makes the group of an epoch; false: the epoch is over.
    fn enter(&mut self, record: &Arc<Record>) -> Result<bool, SessionError> {
        self.end_group();
        let number = record.number();
        let scratch = self.scratch()?;
        let ranks: Vec<Rank> = record.members().iter().map(|member| member.seat.0).collect();
        let own = record.rank_of(self.process).expect("it was entered by a member") as Rank;
        let incoming = Arc::clone(&self.incoming);
        let end = EpochEnd::new(move |fault| incoming.found(number, fault));
        let board = Arc::new(StatusBoard::of_epoch(own, end));
        let mut state = self.member.lock();
        if state.record().number() != number {
            return Ok(false);
        }
        let device = EpochDevice::new(Arc::clone(&self.device), number, ranks.clone());
        state.open(Arc::clone(record), Arc::clone(&board));
        drop(state);
        for (to, answer) in self.incoming.listen(number, ranks.clone(), Arc::clone(&board)) {
            // A peer that is gone needs no answer.
            let _ = self.device.post(to, &answer);
        }
        let engine = Carried { scratch, seed: record.digest().seed(), has_former: number > 0 };
        let carried = CarriedGroup { engine: &engine, number: self.number };
        match self.setting.group(&ranks, Box::new(device), board, carried) {
            Ok(group) => {
                self.member.lock().opened(group.clone());
                self.epoch = Some(Epoch { record: Arc::clone(record), group });
                Ok(true)
            }
            Err(error) => {
                let mut state = self.member.lock();
                drop(state.close());
                match error {
                    GroupError::Failed(fault) if fault.kind == FaultKind::Changed => {}
                    // A peer that is gone, as the members will find.
                    GroupError::Failed(_) | GroupError::Engine(crate::engine::EngineError::Post(_)) => {}
                    GroupError::Silent { missing, .. } => {
                        for rank in missing {
                            let process = record.members()[rank as usize];
                            self.member.tell(&mut state, Input::Late(process));
                        }
                    }
                    error => return Err(SessionError::Group { epoch: number, source: Box::new(error) }),
                }
                drop(self.member.wait(state));
                Ok(false)
            }
        }
    }

    /// Scratch for engines, registered once, and again where a fence has taken it.
    fn scratch(&mut self) -> Result<Slice, SessionError> {
        let mut state = self.member.lock();
        if std::mem::take(&mut state.is_memory_taken) {
            // Buffers that were registered before are memory as any other from now on.
            self.number = session_number();
        }
        if let Some(scratch) = &state.scratch {
            return Ok(scratch.clone());
        }
        drop(state);
        let memory = scratch_memory(self.setting.options.world.world_size)
            .map_err(|source| SessionError::Memory { bytes: 0, source })?;
        let scratch = self.device.register(memory)?.whole();
        self.member.lock().scratch = Some(scratch.clone());
        Ok(scratch)
    }

    /// Ends the session's thread.
    fn end(&mut self) {
        self.member.end();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
        drop(self.member.lock().close());
    }
}

/// Ends the session where its thread panics.
struct TellsOfPanic<'a>(&'a Member);

impl Drop for TellsOfPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.thread_has_failed();
        }
    }
}
