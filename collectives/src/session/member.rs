//! One process's membership: the state machine of `pleach-membership`, and what carries it out.
//!
//! The state is behind one lock. The session's thread takes in what comes and lets time pass, also
//! while the caller computes, so a rank that computes takes part in every agreement. The caller's
//! thread says that a step has begun, is ready or has failed. While it waits, it takes in what
//! comes itself. The session's thread is woken only where it has to look sooner than it would.
//! Nobody waits with the lock. The rounds of a commit are calls of the epoch's group ([`commit`]).
//!
//! **Invariants:** a record that is learned is written where it outlives this process before
//! anything else is done with it ([`LastWord`]). Where that fails, this process says nothing more.
//! A certificate of death is given only after the kernel has said that the process has ended
//! ([`Witness`]), or its launcher or a person has (`asks`).

mod asks;
pub(super) mod commit;
mod records;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pleach_membership::{
    Cause, Certificate, Input, Membership, Message, Output, Process, Reason, Record, Seat, Verdict,
};
use pleach_transport::mutex::lock;
use pleach_transport::witness::{LastWord, Witness};
use pleach_transport::{Nanos, PostError, Slice, clock};
use pleach_vocabulary::Rank;

use super::arriving::JobIdentity;
use super::change::{self, Change};
use super::envelope::{of_word, parts};
use super::incoming::{Finding, Incoming};
use super::last_words;
use super::newcomers::Newcomers;
use super::roster::{Neighbour, Roster};
use super::shared_device::{PairEvent, SharedDevice};
use super::{Elastic, Timeline};
use crate::engine::StatusBoard;
use crate::group::{Group, Parts, Place};
use records::{RecordRequests, StoreFault};

/// How often the session's thread looks while a pair is drained, a process severed, an engine
/// stopped, or the end of a lost process awaited.
const BUSY_INTERVAL: Duration = Duration::from_micros(300);

/// How often it looks while processes wait to join.
const NEWCOMER_INTERVAL: Duration = Duration::from_millis(1);

/// How often a process that waits for room looks at its device, which no engine does.
const SPARE_INTERVAL: Duration = Duration::from_millis(20);

/// How long after a loss the end of a process of this host is awaited so often. The kernel closes
/// the files of a process a moment before it says that the process has ended.
const DYING_TIME: Duration = Duration::from_millis(200);

/// Longest sleep of the session's thread, and of the caller while it waits. What has to be looked
/// at earlier wakes them.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// How often a call that waits asks whether it was interrupted.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// Messages to one peer that wait for room. The state machine says again what is lost.
const OUTBOX_MAX: usize = 4096;

/// The group of an epoch, as far as it is made.
struct OpenEpoch {
    record: Arc<Record>,
    board: Arc<StatusBoard>,
    /// What the program has made of the group.
    parts: Arc<Parts>,
    /// `None` while it is made.
    group: Option<Group>,
    has_ended: bool,
    is_quiet: bool,
}

/// What the lock guards.
pub(crate) struct State {
    membership: Membership,
    last_word: LastWord,
    /// Why nothing more is said.
    broken: Option<Arc<io::Error>>,
    /// By rank: the process that it has, and its witness.
    witnesses: BTreeMap<Rank, (Process, Witness)>,
    /// Lost, with a witness that has not seen the end.
    dying: BTreeMap<Rank, Nanos>,
    /// Processes whose end a witness has seen.
    ended: BTreeSet<Process>,
    outboxes: BTreeMap<Rank, VecDeque<Vec<u8>>>,
    /// To this process itself.
    own: VecDeque<Message>,
    /// `Some`: messages of the rounds of a commit are not sent now. Inside: the first round of this
    /// process, if it was kept back.
    quiet: Option<Option<commit::Ready>>,
    /// The newest; `None` while this process waits to join.
    record: Option<Arc<Record>>,
    /// Of the epoch that was entered last; it may be over.
    entered: Option<Arc<Record>>,
    roster: Roster,
    /// The last processes that were taken out, one a seat: the host of each, and the first epoch
    /// without it.
    out: BTreeMap<Process, (String, u64)>,
    newcomers: Newcomers,
    /// Whether this process has said that it leaves.
    has_announced: bool,
    /// How many epochs in a row have had the same members and the same step.
    repeats: u32,
    /// A step that was repeated too often, and how often, until the caller is told.
    failed: Option<(u64, u32, Vec<Process>)>,
    verdict: Option<(u64, Verdict)>,
    is_out: bool,
    no_quorum: Option<(usize, usize, Nanos)>,
    /// Whether this process has given up because no unit is whole.
    has_lost_units: bool,
    /// A process that has named a seat that there is not, and that seat.
    stranger: Option<(Process, Seat)>,
    has_given_up: bool,
    open: Option<OpenEpoch>,
    /// Kept for the engines of all epochs; `None` after it was taken by a fence.
    pub(crate) scratch: Option<Slice>,
    /// Whether a fence has taken memory that was registered for the peers.
    pub(crate) is_memory_taken: bool,
    timeline: Timeline,
    /// When the session's thread looks again.
    looks_at: Nanos,
    /// Of the store of records.
    store_fault: Option<StoreFault>,
    /// Whether this process has given up for want of the store.
    store_is_lost: bool,
    is_over: bool,
    /// Asked now and then while a call waits; true ends it.
    interrupted: Option<fn() -> bool>,
    /// When it was asked last.
    asked_at: Nanos,
    is_interrupted: bool,
}

/// See the module.
pub(crate) struct Member {
    process: Process,
    job: JobIdentity,
    records: RecordRequests,
    elastic: Elastic,
    state: Mutex<State>,
    incoming: Arc<Incoming>,
    device: Arc<SharedDevice>,
    /// Set by handlers of signals. Relaxed: nothing else is read because of it.
    leaves: Arc<AtomicBool>,
}

fn rank_of(process: Process) -> Rank {
    process.seat.0
}

impl Member {
    /// A member of the first epoch, or a process that waits to join (`None`). `roster`: the members
    /// and their places.
    pub(crate) fn new(
        process: Process,
        job: JobIdentity,
        first: Option<Arc<Record>>,
        roster: Roster,
        elastic: Elastic,
        device: Arc<SharedDevice>,
        incoming: Arc<Incoming>,
    ) -> io::Result<Arc<Self>> {
        let last_word = LastWord::at(job.world.last_word.as_deref())?;
        last_word.write(&last_words::encode(&job.digest, process, first.as_deref()))?;
        let now = clock::now();
        let unit = NonZeroU32::new(elastic.unit).unwrap_or(NonZeroU32::MIN);
        let (suspect_after, maker, most) = (elastic.suspect_after, job.maker, elastic.most as usize);
        let options = pleach_membership::Options { suspect_after, maker, unit, most };
        let membership = Membership::new(process, options, first.clone(), now);
        let mut newcomers = Newcomers::default();
        if first.is_none() {
            for member in roster.iter().filter(|neighbour| neighbour.process() != process) {
                newcomers.take_in(member.clone(), &device);
            }
        }
        let state = State {
            membership,
            last_word,
            broken: None,
            witnesses: BTreeMap::new(),
            dying: BTreeMap::new(),
            ended: BTreeSet::new(),
            outboxes: BTreeMap::new(),
            own: VecDeque::new(),
            quiet: None,
            entered: first.clone(),
            record: first,
            roster,
            out: BTreeMap::new(),
            newcomers,
            has_announced: false,
            repeats: 0,
            failed: None,
            verdict: None,
            is_out: false,
            no_quorum: None,
            has_lost_units: false,
            stranger: None,
            has_given_up: false,
            open: None,
            scratch: None,
            is_memory_taken: false,
            timeline: Timeline::default(),
            looks_at: now,
            store_fault: None,
            store_is_lost: false,
            is_over: false,
            interrupted: None,
            asked_at: now,
            is_interrupted: false,
        };
        let (state, records, leaves) = (Mutex::new(state), RecordRequests::default(), Arc::default());
        let member = Self { process, job, records, elastic, state, incoming, device, leaves };
        member.greet();
        Ok(Arc::new(member))
    }

    /// Greets the members of the first epoch, which are connected.
    fn greet(&self) {
        let mut state = self.lock();
        for process in state.others(self.process) {
            self.connected(&mut state, process, clock::now());
        }
        self.send(&mut state);
    }

    /// Tells a process where this process's last word is, and the state machine that it is
    /// connected.
    fn connected(&self, state: &mut State, process: Process, now: Nanos) {
        let word = state
            .last_word
            .place_on(self.job.world.host.as_deref())
            .map(|place| of_word(self.process.incarnation, &place));
        // What waits there was for a process that had the rank before.
        state.outboxes.insert(rank_of(process), word.into_iter().collect());
        self.on(state, Input::Connected(process), now);
    }

    /// What waits to join, and what the others are told of it.
    fn look_after_newcomers(&self, state: &mut State, now: Nanos) {
        let record = state.record.clone();
        state.newcomers.connect(record.as_deref(), &self.device);
        let State { roster, newcomers, membership, record: Some(record), .. } = state else { return };
        let members: Vec<&Neighbour> =
            roster.iter().filter(|neighbour| record.contains(neighbour.process())).collect();
        newcomers.tell(now, &members, membership, &self.device);
    }

    /// A process waits to join.
    pub(crate) fn newcomer(&self, neighbour: Neighbour) {
        let mut state = self.lock();
        self.take_newcomer(&mut state, neighbour);
        self.wake_if_due(&state);
    }

    fn take_newcomer(&self, state: &mut State, neighbour: Neighbour) {
        let process = neighbour.process();
        let is_member = state.record.as_ref().is_some_and(|record| record.contains(process));
        let is_known = is_member || state.is_out || process == self.process || state.ended.contains(&process);
        if !self.has_seat(process.seat) {
            return; // The device has no such rank.
        }
        if is_known {
            // This process may have heard of the record first. Who is known stays where it is.
            if is_member && !state.roster.contains(process) {
                state.roster.insert(neighbour);
            }
        } else if state.newcomers.take_in(neighbour.clone(), &self.device) {
            tracing::info!("{process} waits to join");
            state.roster.insert(neighbour);
            // Of those that it has displaced nothing is kept.
            if let Some(record) = state.record.clone() {
                let newcomers = &state.newcomers;
                state.roster.keep(&record, |process| newcomers.contains(process));
            }
        }
    }

    pub(crate) fn process(&self) -> Process {
        self.process
    }

    /// The job that it is a member of.
    pub(crate) fn job(&self) -> &JobIdentity {
        &self.job
    }

    /// A seat that is free here: the wanted one if it is, or else the lowest.
    pub(crate) fn free_seat(&self, wanted: Rank, seats: u32) -> Option<Rank> {
        let state = self.lock();
        let record = state.record.clone()?;
        let is_free = |seat: &Rank| {
            *seat < seats
                && record.on_seat(Seat(*seat)).is_none()
                && state.newcomers.on(*seat).is_none()
                && self.device.is_free(*seat)
        };
        std::iter::once(wanted).chain(0..seats).find(is_free)
    }

    /// What a newcomer is told of the members, and of those that wait with it.
    pub(crate) fn roster(&self) -> Roster {
        self.lock().roster.clone()
    }

    /// The member on the lowest seat.
    pub(crate) fn lowest(&self) -> Option<Process> {
        let state = self.lock();
        state.record.as_ref().and_then(|record| record.members().first().copied())
    }

    /// The place of this process among the members, by seats; `None`: it is none.
    pub(crate) fn position(&self) -> Option<usize> {
        let state = self.lock();
        let record = state.record.as_ref().filter(|_| !state.is_out && !state.has_given_up);
        record.and_then(|record| record.rank_of(self.process))
    }

    /// Whether the session is over.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.lock();
        state.is_over || state.is_out || state.has_given_up
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until something has changed, a moment at most, and takes in what has come. One thread
    /// waits at a time.
    pub(crate) fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.incoming.caller_waits(Some(std::thread::current()));
        drop(state);
        std::thread::park_timeout(SLEEP_MAX);
        let mut state = self.lock();
        self.incoming.caller_waits(None);
        self.look(&mut state, clock::now());
        self.wake_if_due(&state);
        self.ask(state)
    }

    /// Wakes the session's thread where it has to look sooner than it would.
    fn wake_if_due(&self, state: &State) {
        if self.next_look(state, clock::now()) < state.looks_at {
            self.incoming.wake_thread();
        }
    }

    /// Asks whether the call that waits was interrupted, where that was not asked a moment ago. If
    /// so, this process takes part in nothing any more.
    fn ask<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let now = clock::now();
        let is_due = !state.has_given_up && now.since(state.asked_at) >= INTERRUPT_INTERVAL;
        let Some(interrupted) = state.interrupted.filter(|_| is_due) else { return state };
        state.asked_at = now;
        // It may wait for other threads, which may wait for the lock.
        drop(state);
        let is_interrupted = interrupted();
        let mut state = self.lock();
        if is_interrupted {
            self.interrupt(&mut state);
        }
        state
    }

    fn interrupt(&self, state: &mut State) {
        state.is_interrupted = true;
        self.give_up(state, "a call was interrupted");
        self.wake_if_due(state);
    }

    /// A call of the group was interrupted.
    fn was_interrupted(&self) {
        self.interrupt(&mut self.lock());
    }

    /// As [`Member::wait`], for a call that waits for something else.
    pub(crate) fn ask_whether_interrupted(&self) {
        drop(self.ask(self.lock()));
    }

    /// Tells the state machine what happened, from the caller's thread.
    pub(crate) fn tell(&self, state: &mut State, input: Input) {
        self.on(state, input, clock::now());
        self.send(state);
        self.wake_if_due(state);
        // In case another thread tells it while the caller waits.
        self.incoming.wake_caller();
    }

    /// Says again what others may not have heard of this process's step.
    fn repeat(&self) {
        let mut state = self.lock();
        for output in state.membership.participant().repeat() {
            self.carry_out(&mut state, output, clock::now());
        }
        self.send(&mut state);
        self.wake_if_due(&state);
    }

    /// Sends a control message to these ranks, now or when there is room for it.
    pub(crate) fn post(&self, ranks: &[Rank], message: &[u8]) {
        let mut state = self.lock();
        for rank in ranks {
            let outbox = state.outboxes.entry(*rank).or_default();
            if outbox.len() < OUTBOX_MAX {
                outbox.push_back(message.to_vec());
            }
        }
        self.send(&mut state);
        self.wake_if_due(&state);
    }

    /// Says that this process leaves at the end of a step.
    pub(crate) fn announce_leave(&self, state: &mut State) {
        if !state.has_announced {
            state.has_announced = true;
            self.tell(state, Input::Leave);
        }
    }

    /// Says so where a signal has told this process to leave.
    fn leave_if_told(&self, state: &mut State) {
        if self.leaves.load(Ordering::Relaxed) {
            self.announce_leave(state);
        }
    }

    /// Begins the next step; `None` while the next epoch is awaited.
    pub(crate) fn begin(&self, state: &mut State) -> Option<u64> {
        let step = state.membership.begin()?;
        state.verdict = None;
        Some(step)
    }

    /// What the session's thread does, until the session is over.
    pub(crate) fn run(&self) {
        loop {
            let now = clock::now();
            let mut state = self.lock();
            if state.is_over {
                return;
            }
            self.look(&mut state, now);
            let until = self.next_look(&state, now);
            state.looks_at = until;
            drop(state);
            self.incoming.wake_caller();
            std::thread::park_timeout(until.since(clock::now()));
        }
    }

    /// The session's thread has ended by a panic: nobody would learn of the next record.
    pub(crate) fn thread_has_failed(&self) {
        self.give_up(&mut self.lock(), "the session's thread has ended");
        self.incoming.wake_caller();
    }

    /// The session is dropped: this process takes part in nothing any more.
    pub(crate) fn drop_session(&self) {
        let mut state = self.lock();
        if !state.has_given_up {
            self.give_up(&mut state, "the session was dropped");
        }
    }

    /// Ends the group of the epoch that is open, where no record has: the session does not go on,
    /// and nothing else would.
    pub(crate) fn end_open_epoch(&self) {
        let mut state = self.lock();
        if state.open.as_ref().is_some_and(|open| !open.has_ended) {
            self.give_up(&mut state, "the session has ended");
        }
    }

    /// What is set to true when this process is to leave, by the handler of a signal.
    pub(crate) fn leaves_when(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.leaves)
    }

    /// Ends the session's thread.
    pub(crate) fn end(&self) {
        self.lock().is_over = true;
        self.records.end();
        self.incoming.wake_thread();
    }

    /// Takes in what has come, and lets time pass.
    fn look(&self, state: &mut State, now: Nanos) {
        self.take_arrivals(state, now);
        self.look_for_ends(state, now);
        if state.waits() || state.awaits_connections() || self.device.is_ending() {
            self.device.poll(now);
        }
        for event in self.device.take_pair_events() {
            self.pair_event(state, event, now);
        }
        // Only now: what was lost so far was not one of those that are connected to next.
        self.look_after_newcomers(state, now);
        self.leave_if_told(state);
        if now >= state.membership.next_deadline() {
            self.on(state, Input::Tick, now);
        }
        self.send(state);
        self.stop_engine(state);
        self.give_up_without_record(state, now);
        if !state.has_given_up && state.all_leave() && state.lacks_quorum() {
            // The others have gone, and this process is about to.
            self.give_up(state, "all members leave");
        }
    }

    /// When to look again, if nothing comes.
    fn next_look(&self, state: &State, now: Nanos) -> Nanos {
        let engine_stops = state.open.as_ref().is_some_and(|open| open.has_ended && !open.is_quiet);
        let has_dying = state.dying.values().any(|since| now.since(*since) < DYING_TIME);
        let has_output = state.outboxes.values().any(|outbox| !outbox.is_empty());
        let mut until = now + SLEEP_MAX;
        if !state.has_given_up {
            until = until.min(state.membership.next_deadline());
        }
        if self.device.is_ending() || engine_stops || has_dying || has_output {
            until = until.min(now + BUSY_INTERVAL);
        }
        if state.awaits_connections() {
            until = until.min(now + NEWCOMER_INTERVAL);
        } else if state.waits() {
            until = until.min(now + SPARE_INTERVAL);
        }
        until
    }

    fn take_arrivals(&self, state: &mut State, now: Nanos) {
        let arrivals = self.incoming.take();
        for (rank, incarnation, place) in arrivals.words {
            if let Some(witness) = Witness::open_on(&place, self.job.world.host.as_deref()) {
                let process = Process { seat: Seat(rank), incarnation };
                state.witnesses.insert(rank, (process, witness));
            }
        }
        for neighbour in arrivals.newcomers {
            self.take_newcomer(state, neighbour);
        }
        if let Some(leaver) = arrivals.leaver {
            self.take_leave(state, leaver);
        }
        for (from, message) in arrivals.messages {
            let Some(from) = self.holder(state, from) else { continue };
            // Seats are places in tables of the device from here on.
            match message.highest_seat().filter(|seat| !self.has_seat(*seat)) {
                None => self.on(state, Input::Message { from, message }, now),
                Some(seat) if !state.has_given_up => {
                    state.stranger = Some((from, seat));
                    self.give_up(state, "a member names a seat that there is not");
                }
                Some(_) => {}
            }
        }
        for peer in arrivals.lost {
            self.pair_event(state, PairEvent::Lost(peer), now);
        }
        for finding in arrivals.findings {
            self.take_finding(state, finding, now);
        }
    }

    /// Whether the device has this seat.
    fn has_seat(&self, seat: Seat) -> bool {
        seat.0 < self.device.seats()
    }

    /// The certificate of a process that has ended with this word; else the text says what the word
    /// is instead.
    fn certificate(&self, word: &[u8]) -> Result<Certificate, String> {
        last_words::certificate(word, &self.job.digest, |seat| self.has_seat(seat))
    }

    /// The process that has a rank of the device.
    fn holder(&self, state: &State, rank: Rank) -> Option<Process> {
        let incarnation = self.device.lock().device.incarnation(rank);
        let on_seat = state.record.as_ref().and_then(|record| record.on_seat(Seat(rank)));
        incarnation.map(|incarnation| Process { seat: Seat(rank), incarnation }).or(on_seat)
    }

    fn take_finding(&self, state: &mut State, finding: Finding, now: Nanos) {
        let (Finding::Late { epoch, .. } | Finding::Failed { epoch }) = finding;
        let Some(record) = state.record.clone().filter(|record| record.number() == epoch) else {
            return; // The epoch is over.
        };
        match finding {
            Finding::Late { rank, .. } => {
                if let Some(process) = record.members().get(rank as usize) {
                    self.on(state, Input::Late(*process), now);
                }
            }
            Finding::Failed { .. } => self.on(state, Input::Failed, now),
        }
    }

    fn pair_event(&self, state: &mut State, event: PairEvent, now: Nanos) {
        match event {
            PairEvent::Connected(rank) => {
                if let Some(process) = self.holder(state, rank) {
                    self.connected(state, process, now);
                }
            }
            PairEvent::Lost(rank) => {
                // To a process that waits, members are newcomers.
                let waits = state.newcomers.on(rank);
                state.newcomers.lost(rank);
                let Some(process) = self.holder(state, rank).or(waits) else { return };
                if state.record.as_ref().is_some_and(|record| record.contains(process)) {
                    state.timeline.found(now);
                }
                if state.witnesses.get(&rank).is_some_and(|(of, _)| *of == process) {
                    state.dying.entry(rank).or_insert(now);
                }
                self.look_for_ends(state, now);
                self.on(state, Input::Lost(process), now);
            }
            PairEvent::Drained { peer, record } => {
                if let Some(process) = self.holder(state, peer) {
                    self.on(state, Input::Drained { peer: process, epoch: record }, now);
                }
            }
        }
    }

    /// Gives certificates for processes of this host that have ended.
    fn look_for_ends(&self, state: &mut State, now: Nanos) {
        let has_ended =
            |rank: &Rank| state.witnesses.get(rank).is_some_and(|(_, witness)| witness.has_ended());
        let ended: Vec<Rank> = state.dying.keys().copied().filter(has_ended).collect();
        for rank in ended {
            state.dying.remove(&rank);
            let Some((process, witness)) = state.witnesses.remove(&rank) else { continue };
            let word = witness.last_word().map_err(|error| format!("cannot be read: {error}"));
            let certificate = word.and_then(|word| self.certificate(&word.unwrap_or_default()));
            match certificate {
                Ok(certificate) if certificate.process == process => {
                    state.ended.insert(process);
                    self.on(state, Input::Certificate(certificate), now);
                }
                // Without its last record the end is no certificate.
                Ok(_) => tracing::warn!("the last word of {process} is of another process"),
                Err(error) => tracing::warn!("the last word of {process} {error}"),
            }
        }
    }

    /// Tells the state machine and carries out what it asks for.
    fn on(&self, state: &mut State, input: Input, now: Nanos) {
        if state.broken.is_some() || state.has_given_up {
            return;
        }
        let mut inputs = VecDeque::from([input]);
        let mut out = Vec::new();
        while let Some(input) = inputs.pop_front() {
            for output in state.membership.on(input, now) {
                match output {
                    Output::Sever(process) => out.push(process),
                    output => self.carry_out(state, output, now),
                }
            }
            let from = self.process;
            let own = std::mem::take(&mut state.own).into_iter();
            inputs.extend(own.map(|message| Input::Message { from, message }));
        }
        if !out.is_empty() {
            // Who is out hears why before the stream to it ends.
            self.send(state);
            out.into_iter().for_each(|process| self.sever(state, process));
        }
    }

    fn carry_out(&self, state: &mut State, output: Output, now: Nanos) {
        if state.broken.is_some() {
            return;
        }
        match output {
            Output::Persist(record) => {
                let word = last_words::encode(&self.job.digest, self.process, Some(&record));
                if let Err(error) = state.last_word.write(&word) {
                    state.broken = Some(Arc::new(error));
                    self.give_up(state, "what outlives this process cannot be written");
                    return;
                }
                self.learned(state, &record, now);
            }
            Output::Send { to, message } if to == self.process => state.own.push_back(message),
            Output::Send { message, .. } if commit::keeps_back(state, &message) => {}
            Output::Send { to, message } => {
                if message == (Message::Alive { asks: true }) {
                    // Somebody is suspected: the roll is called.
                    state.timeline.found(now);
                }
                let outbox = state.outboxes.entry(rank_of(to)).or_default();
                if outbox.len() < OUTBOX_MAX {
                    outbox.extend(parts(&message));
                }
            }
            Output::Verdict { step, verdict } => state.verdict = Some((step, verdict)),
            Output::Drain { peer, epoch } => {
                let Some(record) = state.record.clone() else { return };
                let since = |process| record.member_since(process).unwrap_or(0);
                let both = since(peer).max(since(self.process));
                // A member that joins is drained once with the record by which it does.
                let count = epoch - both + u64::from(both > 0);
                self.device.drain(rank_of(peer), epoch, count);
            }
            Output::Enter(record) => {
                state.no_quorum = None;
                state.timeline.drained(now);
                state.entered = Some(record);
            }
            Output::Expelled(_) => state.is_out = true,
            Output::NoQuorum { answered, members } => {
                let since = state.no_quorum.map_or(now, |(.., since)| since);
                state.no_quorum = Some((answered, members, since));
            }
            Output::WriteOnce(record) => self.records.write(record),
            Output::ReadStore(number) => self.records.read(number),
            // Who waits to join is connected to as soon as this process is told of it.
            Output::Connect(_) => {}
            // Told apart above, and told to nobody.
            Output::Sever(_) | Output::Learned(_) => {}
        }
    }

    /// A record was learned: the epoch before is over.
    fn learned(&self, state: &mut State, record: &Arc<Record>, now: Nanos) {
        let before = state.record.replace(Arc::clone(record));
        state.newcomers.admitted(record);
        // To one that waits to join, members are newcomers. It has no record with those that are
        // out.
        let left = |process: Process| {
            let stays = |reason: Reason| matches!(reason, Reason::Joined | Reason::Failed);
            let is_out = |cause: &Cause| cause.process == process && !stays(cause.reason);
            // To a spare the ones that went before are not told.
            let was_member = || state.membership.view_of(process).is_some_and(|view| view.epoch.is_some());
            let is_forgotten = before.is_none() && !record.contains(process) && was_member();
            is_forgotten || record.causes().iter().any(is_out)
        };
        let out: Vec<Process> =
            state.newcomers.iter().map(Neighbour::process).filter(|process| left(*process)).collect();
        out.into_iter().for_each(|process| self.sever(state, process));
        state.note_out(before.as_deref(), record);
        let newcomers = &state.newcomers;
        state.roster.keep(record, |process| newcomers.contains(process));
        let is_of_nobody = record.verdict() == Verdict::Retry
            && before.as_ref().is_some_and(|before| before.members() == record.members());
        let is_repeat = is_of_nobody && before.is_some_and(|before| before.step() == record.step());
        state.repeats = if is_repeat { state.repeats + 1 } else { u32::from(is_of_nobody) };
        if state.repeats > self.elastic.retries_max {
            state.failed = Some((record.step(), std::mem::take(&mut state.repeats), change::failed(record)));
        }
        state.timeline.agreed(now);
        let change = Change::between(state.entered.as_ref().unwrap_or(record), record, Vec::new());
        tracing::info!(seat = self.process.seat.0, "{change}");
        state.no_quorum = None;
        state.store_fault = None;
        self.end_epoch(state, &change.to_string());
    }

    /// Ends the group of the epoch.
    fn end_epoch(&self, state: &mut State, cause: &str) {
        let Some(open) = &mut state.open else { return };
        if !open.has_ended {
            open.has_ended = true;
            let own = open.record.rank_of(self.process).unwrap_or(0);
            open.board.end_epoch(own as Rank, cause.to_owned());
            self.device.info().waker.wake();
            self.incoming.meetings().end(open.record.number(), cause);
            open.parts.end(cause);
        }
    }

    fn sever(&self, state: &mut State, process: Process) {
        let rank = rank_of(process);
        if self.device.maps(rank) && !state.ended.contains(&process) {
            // What peers may have mapped is taken from all of them. Scratch is let go of before:
            // nobody needs its bytes.
            state.scratch = None;
            state.is_memory_taken = true;
        }
        state.outboxes.remove(&rank);
        state.dying.remove(&rank);
        state.newcomers.bury(process);
        self.device.sever(rank);
    }

    /// Goes on with the end of the epoch's engine, where no other thread does.
    fn stop_engine(&self, state: &mut State) {
        if let Some(open) = &mut state.open
            && open.has_ended
            && !open.is_quiet
            && open.group.as_ref().is_some_and(Group::has_stopped)
        {
            open.is_quiet = true;
            self.device.quiet(open.record.number());
        }
    }

    /// Severs all others and ends the group: this process takes part in nothing any more.
    pub(crate) fn give_up(&self, state: &mut State, cause: &str) {
        state.has_given_up = true;
        self.end_epoch(state, cause);
        let newcomers: Vec<Process> = state.newcomers.iter().map(Neighbour::process).collect();
        for process in state.others(self.process).into_iter().chain(newcomers) {
            self.sever(state, process);
        }
        // Nobody changes this process's memory any more, so it needs no drain to hear that. A
        // record that was not written where it outlives this process counts for nothing.
        let newest = state.membership.participant().latest().map(|record| record.number());
        if let Some((step, Verdict::Committed)) = state.membership.held_verdict()
            && state.newest() == newest
        {
            state.verdict = Some((step, Verdict::Committed));
        }
    }

    /// Sends what the streams take.
    fn send(&self, state: &mut State) {
        for (rank, outbox) in &mut state.outboxes {
            while let Some(message) = outbox.front() {
                match self.device.post(*rank, message) {
                    Ok(()) => drop(outbox.pop_front()),
                    Err(PostError::QueueFull { .. }) => break,
                    // The pair has ended, of which an event tells.
                    Err(_) => outbox.clear(),
                }
            }
        }
    }
}

/// What the caller's thread asks.
impl State {
    /// The record of the epoch that was entered.
    pub(crate) fn entered(&self) -> Option<Arc<Record>> {
        self.membership.entered().cloned()
    }

    /// The number of the newest record; `None` while this process waits to join.
    pub(crate) fn newest(&self) -> Option<u64> {
        self.record.as_ref().map(|record| record.number())
    }

    /// Whether a step can begin in this epoch: it is the newest, and this process takes part. A
    /// group that was opened later would be ended by nobody.
    pub(crate) fn is_current(&self, epoch: u64) -> bool {
        self.newest() == Some(epoch) && !self.has_given_up
    }

    /// The places of the members of an epoch, by rank.
    pub(crate) fn places(&self, record: &Record) -> Option<Vec<Place>> {
        self.roster.places(record)
    }

    /// All other members of the newest epoch.
    fn others(&self, own: Process) -> Vec<Process> {
        let members = self.record.as_ref().map_or(&[][..], |record| record.members());
        members.iter().copied().filter(|member| *member != own).collect()
    }

    /// Remembers who is out by a record, as long as nobody has its seat.
    fn note_out(&mut self, before: Option<&Record>, record: &Record) {
        self.out.retain(|process, _| record.on_seat(process.seat).is_none());
        let members = before.map_or(&[][..], |before| before.members());
        for process in members.iter().filter(|member| record.on_seat(member.seat).is_none()) {
            let host = self.roster.iter().find(|neighbour| neighbour.process() == *process);
            let host = host.map(Neighbour::host_shown).unwrap_or_default();
            self.out.insert(*process, (host, record.number()));
        }
    }

    /// Whether processes connect: this one, which waits to join, or others.
    fn awaits_connections(&self) -> bool {
        self.newcomers.are_awaited(&self.membership)
    }

    /// Whether this process waits to join.
    pub(crate) fn waits(&self) -> bool {
        self.record.is_none()
    }

    /// Whether this process, which waits, reaches all members, and to how many it is connected.
    pub(crate) fn members_known(&self) -> (bool, usize) {
        self.membership.members_known()
    }

    /// The record of the epoch that was entered last; it may be over.
    pub(crate) fn last_entered(&self) -> Option<Arc<Record>> {
        self.entered.clone()
    }

    /// How the others go on without this process, once it is out.
    pub(crate) fn change_without_this(&self) -> Option<Arc<Change>> {
        let record = self.record.as_ref().filter(|_| self.is_out)?;
        Some(Change::between(self.entered.as_ref().unwrap_or(record), record, Vec::new()))
    }

    /// Whether this process is out because it has said that it leaves.
    pub(crate) fn has_left(&self, process: Process) -> bool {
        let left = Cause { process, reason: Reason::Left };
        self.is_out && self.record.as_ref().is_some_and(|record| record.causes().contains(&left))
    }

    /// Whether all leave, this process too, as it has said.
    pub(crate) fn all_leave(&self) -> bool {
        self.has_announced && self.membership.everyone_leaves()
    }

    pub(crate) fn verdict_of(&self, step: u64) -> Option<Verdict> {
        self.verdict.filter(|(of, _)| *of == step).map(|(_, verdict)| verdict)
    }

    pub(crate) fn is_out(&self) -> bool {
        self.is_out
    }

    /// Calls that wait ask this now and then.
    pub(crate) fn interrupt_by(&mut self, interrupted: fn() -> bool) {
        self.interrupted = Some(interrupted);
    }

    /// Whether a call was interrupted.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    /// Whether this process takes part in nothing any more.
    pub(crate) fn has_given_up(&self) -> bool {
        self.has_given_up
    }

    /// Whether this process has said that it leaves.
    pub(crate) fn has_announced(&self) -> bool {
        self.has_announced
    }

    /// Who has named a seat that there is not, and which.
    pub(crate) fn stranger(&self) -> Option<(Process, Seat)> {
        self.stranger
    }

    pub(crate) fn unready(&self) -> Vec<Process> {
        self.membership.participant().unready()
    }

    pub(crate) fn broken(&self) -> Option<io::Error> {
        self.broken.as_ref().map(|error| io::Error::new(error.kind(), error.to_string()))
    }

    /// A step that was repeated too often by the same members, how often, and on whom it failed at
    /// last. Told once.
    pub(crate) fn take_failed(&mut self) -> Option<(u64, u32, Vec<Process>)> {
        self.failed.take()
    }

    pub(crate) fn timeline(&mut self) -> &mut Timeline {
        &mut self.timeline
    }

    /// The group of an epoch is being made.
    pub(crate) fn open(&mut self, record: Arc<Record>, board: Arc<StatusBoard>, parts: Arc<Parts>) {
        let (group, has_ended, is_quiet) = (None, false, false);
        self.open = Some(OpenEpoch { record, board, parts, group, has_ended, is_quiet });
    }

    /// The group is made.
    pub(crate) fn opened(&mut self, group: Group) {
        if let Some(open) = &mut self.open {
            open.group = Some(group);
        }
    }

    /// The group is gone, or is about to be. Returns a handle of it.
    pub(crate) fn close(&mut self) -> Option<Group> {
        self.open.take().and_then(|open| open.group)
    }
}
