//! The state machine of one process: when to suspect, when to propose, how to enter an epoch.
//!
//! Everything here only proposes; [`Participant`] keeps what was agreed. Times are eighths of
//! [`Options::suspect_after`].
//!
//! 1. A process hears the next three members of the ring; a member that is silent for
//!    `suspect_after`, a lost connection and an expired deadline make it a suspect. Each process
//!    floods its [`View`] when it changes.
//! 2. A suspicion calls the roll: for two eighths every member asks every other one. Then the
//!    fewest members go so that any two of the rest reach each other. Members that are certified
//!    dead go at once, unless a pair is broken that no death explains.
//! 3. The member on the lowest seat that stays proposes, the next one two eighths later. Who is to
//!    go waits `suspect_after` longer and then proposes without those that it does not reach. Who
//!    can propose less than half of the members waits one more `suspect_after`.
//! 4. Who learns a record severs who is out, drains the pair with every other member, and has
//!    entered. Who does not drain within `suspect_after` is suspected.
//! 5. A planned join or leave waits for the end of a step (see `commit`), but not where members are
//!    too few for a step ([`Input::TooFew`]). A joiner is admitted when it and every member reach
//!    and hear each other, and there is room ([`Options::most`]).
//! 6. A unit of [`Options::unit`] seats is one in all this: it goes when one of its members does,
//!    and joins when all of its processes wait. Where no unit is whole, nobody proposes.

mod entry;
mod propose;

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;

use crate::certificate::Certificate;
use crate::detector::Detector;
use crate::message::Message;
use crate::output::Output;
use crate::participant::Participant;
use crate::plan::{self, Unit, Views};
use crate::register::Maker;
use crate::view::View;
use crate::{MEMBERS_MAX, Process, Record, Verdict};
use entry::Entry;
use propose::Attempts;

/// The next members of the ring that a member hears.
const WATCHED: usize = 3;

/// Views of processes that are no members; more are not taken in.
const JOINERS_MAX: usize = 4096;

/// What a process is told about membership.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// After what silence a member is suspected.
    pub suspect_after: Duration,
    /// Who makes records.
    pub maker: Maker,
    /// How many seats make a unit: seats 0 to `unit - 1`, and so on. Its members come and go
    /// together. The members of the first record are whole units.
    pub unit: NonZeroU32,
    /// Members at most, [`MEMBERS_MAX`] or fewer. Who waits to join beyond these is a spare: it is
    /// connected, and joins in the record with which there is room.
    pub most: usize,
}

/// What happens to a process.
#[derive(Clone, Debug)]
pub enum Input {
    /// A message came.
    Message {
        /// Its sender.
        from: Process,
        /// The message.
        message: Message,
    },
    /// A connection is open.
    Connected(Process),
    /// A connection is lost, or cannot be opened.
    Lost(Process),
    /// A call waits for a member beyond its deadline.
    Late(Process),
    /// A witness says that a process has ended. It says so again to a living member until a record
    /// stands without the dead: those that heard of it may have died since.
    Certificate(Certificate),
    /// A record stands in the store.
    Stands(Arc<Record>),
    /// A pair is drained.
    Drained {
        /// The member at the other end.
        peer: Process,
        /// The epoch of the [`Output::Drain`].
        epoch: u64,
    },
    /// The process is ready with its step.
    Ready,
    /// The process cannot be ready with its step: the epoch has to end, and the step is repeated.
    Failed,
    /// The process begins no step in this epoch, because too few are there: a planned change need
    /// not wait for the end of one.
    TooFew,
    /// The process wants to leave at the end of a step.
    Leave,
    /// Time has passed.
    Tick,
}

/// One process's state machine; see the module.
#[derive(Clone, Debug)]
pub struct Membership {
    maker: Maker,
    /// What comes and goes together, and how many members there are at most.
    room: (Unit, usize),
    participant: Participant,
    detector: Detector,
    /// By process; its own is there.
    views: Views,
    entry: Entry,
    attempts: Attempts,
    outputs: Vec<Output>,
}

impl Membership {
    /// A member of the first epoch, or a process that waits to join (`None`).
    #[must_use]
    pub fn new(process: Process, options: Options, first: Option<Arc<Record>>, now: Nanos) -> Self {
        let mut view = View::new(process);
        view.epoch = first.as_ref().map(|record| record.number());
        let mut detector = Detector::new(options.suspect_after, now);
        detector.enter(first.as_ref().map_or(&[][..], |record| record.members()));
        Self {
            maker: options.maker,
            room: (Unit::of_seats(options.unit), options.most.min(MEMBERS_MAX)),
            entry: Entry::of_first(first.clone()),
            participant: Participant::new(process, options.maker, first),
            detector,
            views: Views::from([(process, view)]),
            attempts: Attempts::default(),
            outputs: Vec::new(),
        }
    }

    /// The agreement.
    #[must_use]
    pub fn participant(&self) -> &Participant {
        &self.participant
    }

    /// The newest view of a process; `None`: nothing was heard of it.
    #[must_use]
    pub fn view_of(&self, process: Process) -> Option<&View> {
        self.views.get(&process)
    }

    /// The record of the epoch that was entered, while no other one is agreed on.
    #[must_use]
    pub fn entered(&self) -> Option<&Arc<Record>> {
        self.entry.entered()
    }

    /// When [`Input::Tick`] is due.
    #[must_use]
    pub fn next_deadline(&self) -> Nanos {
        self.detector.next_tick()
    }

    /// Begins the next step; `None` while the next epoch is awaited.
    pub fn begin(&mut self) -> Option<u64> {
        self.entered()?;
        self.participant.begin()
    }

    /// Takes in what happened, and says what is to be done, in this order.
    pub fn on(&mut self, input: Input, now: Nanos) -> Vec<Output> {
        let has_ticked = self.detector.advance(now);
        match input {
            Input::Message { from, message } => self.message(from, message),
            Input::Connected(process) => {
                self.detector.connected(process);
                // Who waits to join says so at once.
                if self.participant.latest().is_none()
                    && let Some(view) = self.own_view().cloned()
                {
                    self.send(process, Message::View(view));
                }
            }
            Input::Lost(process) => {
                self.detector.lost(process);
                // What is heard of members tells a process that waits who they are.
                let waits = self.participant.latest().is_none();
                if self.views.get(&process).is_some_and(|view| waits || view.epoch.is_none()) {
                    self.views.remove(&process);
                }
            }
            Input::Late(process) => self.detector.late(process),
            Input::Certificate(certificate) => self.certificate(certificate),
            Input::Stands(record) => {
                let outputs = self.participant.stands(record);
                self.carry_out(outputs);
            }
            Input::Drained { peer, epoch } => self.entry.drained(peer, epoch, &mut self.outputs),
            Input::Ready => {
                let outputs = self.participant.ready(self.has_planned_change());
                self.carry_out(outputs);
            }
            Input::Failed => self.change_view(|view| view.failed = true),
            Input::TooFew => self.attempts.begin_no_step(),
            Input::Leave => self.change_view(|view| view.leaves = true),
            Input::Tick => {}
        }
        if has_ticked {
            self.tick();
        }
        self.look_around();
        self.propose();
        std::mem::take(&mut self.outputs)
    }

    /// Whether of each unit of the newest epoch a member wants to leave: then there is nobody to
    /// leave to, and each that wants to may go. One that knew it before has gone without a drain,
    /// so the epoch need not be entered.
    #[must_use]
    pub fn everyone_leaves(&self) -> bool {
        let leaves = |member: &&Process| self.views.get(member).is_some_and(|view| view.leaves);
        self.participant.epoch().is_some_and(|record| {
            let members = record.members();
            let (unit, _) = self.room;
            unit.all_of(members) == unit.all_of(members.iter().filter(leaves))
        })
    }

    /// Whether no unit of the newest epoch has been whole for so long: a member of each has ended
    /// or is not reached. There is nobody left to go on.
    #[must_use]
    pub fn has_lost_every_unit(&self, limit: Duration) -> bool {
        self.attempts.has_lost_every_unit(self.detector.clock(), limit)
    }

    /// What became of a step by the newest record, while its epoch is not entered. The step's
    /// buffers may still change, unless this process has severed all others.
    #[must_use]
    pub fn held_verdict(&self) -> Option<(u64, Verdict)> {
        self.entry.held()
    }

    /// Whether a process that waits to join, all members, and the others that wait reach each
    /// other, as far as this process knows. Then nobody need be told of it.
    #[must_use]
    pub fn is_reached_by_all(&self, joiner: Process) -> bool {
        let Some(record) = self.participant.epoch() else { return false };
        let waiting = plan::waiting(record, &self.views).map(|view| view.process);
        let mut others = record.members().iter().copied().chain(waiting).filter(|other| *other != joiner);
        others.all(|other| plan::reach_each_other(&self.views, joiner, other))
    }

    /// Whether a connection to another process is open.
    #[must_use]
    pub fn is_connected(&self, other: Process) -> bool {
        self.detector.is_connected(other)
    }

    /// The members as a process that waits to join knows them: whether it reaches and hears all of
    /// them, and to how many it is connected. Members are those whose views name the newest epoch.
    #[must_use]
    pub fn members_known(&self) -> (bool, usize) {
        let newest = self.views.values().filter_map(|view| view.epoch).max();
        let members = self.views.values().filter(|view| newest.is_some() && view.epoch == newest);
        members.fold((true, 0), |(all, connected), view| {
            let is_connected = self.detector.is_connected(view.process);
            (all && self.reaches(view.process), connected + usize::from(is_connected))
        })
    }

    fn reaches(&self, other: Process) -> bool {
        self.own_view().is_some_and(|view| view.reached.contains(&other))
    }

    fn process(&self) -> Process {
        self.participant.process()
    }

    fn message(&mut self, from: Process, message: Message) {
        self.detector.heard(from);
        match message {
            Message::View(view) => self.view(from, view),
            // Others are as a message that is lost: who holds a certificate gives it again.
            Message::Certificate(certificate) if self.concerns(certificate.process) => {
                self.certificate(certificate);
            }
            Message::Certificate(_) => {}
            Message::Alive { asks: true } => self.send(from, Message::Alive { asks: false }),
            Message::Alive { asks: false } => {}
            message => {
                let outputs = self.participant.on(from, &message);
                self.carry_out(outputs);
            }
        }
    }

    /// Whether the death of a process is of any use here: it bounds the certificates that are kept.
    fn concerns(&self, process: Process) -> bool {
        match self.participant.latest() {
            Some(latest) => latest.contains(process) || self.views.contains_key(&process),
            None => self.participant.certificates().count() < MEMBERS_MAX,
        }
    }

    fn certificate(&mut self, certificate: Certificate) {
        let dead = certificate.process;
        // A process that waits to join may be the only witness, so it passes on what it hears.
        if self.participant.is_certified(dead) || self.participant.is_out() || dead == self.process() {
            return;
        }
        for to in self.peers() {
            self.send(to, Message::Certificate(certificate.clone()));
        }
        let outputs = self.participant.certify(&certificate);
        self.carry_out(outputs);
    }

    fn view(&mut self, from: Process, view: View) {
        let process = view.process;
        let latest = self.participant.latest().cloned();
        if let Some(latest) = latest {
            // Who is behind is told, who is ahead is asked.
            let is_behind = view.epoch.is_none_or(|epoch| epoch < latest.number());
            if from == process && is_behind && latest.contains(process) {
                self.send(from, Message::Decided(Arc::clone(&latest)));
            } else if view.epoch.is_some_and(|epoch| epoch > latest.number()) {
                self.send(from, Message::Query(Some(latest.number())));
            }
            if !latest.contains(process) && view.epoch.is_some() {
                return; // It is out.
            }
        }
        let members = self.participant.latest().map_or(0, |latest| latest.members().len());
        if self.views.len() >= members + JOINERS_MAX && !self.views.contains_key(&process) {
            return;
        }
        let is_new = self.views.get(&process).is_none_or(|known| known.version < view.version);
        if process == self.process() || !is_new {
            return;
        }
        if view.epoch.is_none() && self.detector.is_lost(process) {
            return; // Others have not heard yet that it is gone.
        }
        let is_joining = view.epoch.is_none() || self.participant.latest().is_none();
        if is_joining && !self.detector.is_connected(process) {
            self.outputs.push(Output::Connect(process));
        }
        self.views.insert(process, view.clone());
        for to in self.peers() {
            if to != from && to != process {
                self.send(to, Message::View(view.clone()));
            }
        }
    }

    fn send(&mut self, to: Process, message: Message) {
        self.outputs.push(Output::Send { to, message });
    }

    /// The members, and those that wait to join; for one that waits, all that it has heard of.
    fn peers(&self) -> BTreeSet<Process> {
        let members = self.participant.epoch().map_or(&[][..], |record| record.members());
        let mut peers: BTreeSet<Process> = self.views.keys().chain(members).copied().collect();
        if self.participant.latest().is_none() {
            peers.extend(self.detector.connections());
        }
        peers.remove(&self.process());
        peers
    }

    fn own_view(&self) -> Option<&View> {
        self.views.get(&self.process())
    }

    /// Changes this process's view and tells all of it.
    fn change_view(&mut self, change: impl FnOnce(&mut View)) {
        let Some(view) = self.views.get_mut(&self.participant.process()) else { return };
        let before = view.clone();
        change(view);
        if *view == before {
            return;
        }
        view.version += 1;
        let view = view.clone();
        for to in self.peers() {
            self.send(to, Message::View(view.clone()));
        }
    }

    /// Brings this process's view up to date.
    fn look_around(&mut self) {
        let epoch = self.participant.epoch().cloned();
        let members = epoch.as_ref().map_or(&[][..], |record| record.members());
        let unreached = self.detector.suspects(members);
        let others = self.views.values().filter(|view| view.process != self.process());
        let counts = |view: &&View| epoch.is_none() || !members.contains(&view.process);
        let reached = others
            .filter(counts)
            .map(|view| view.process)
            .filter(|process| self.detector.is_connected(*process) && self.detector.hears(*process))
            .collect();
        self.change_view(|view| (view.unreached, view.reached) = (unreached, reached));
    }

    pub(crate) fn has_planned_change(&self) -> bool {
        let Some(record) = self.participant.epoch() else { return false };
        let leaves = |member: &Process| self.views.get(member).is_some_and(|view| view.leaves);
        let is_wished =
            record.members().iter().any(leaves) || plan::waiting(record, &self.views).next().is_some();
        is_wished && plan::plan(record, &self.views, &self.participant, self.room, None).is_wished()
    }

    /// Says what others may have missed, and counts silence.
    fn tick(&mut self) {
        let outputs = self.participant.repeat();
        self.carry_out(outputs);
        for peer in self.entry.undrained() {
            if let Some(latest) = self.participant.latest().cloned() {
                self.send(peer, Message::Decided(latest));
            }
        }
        let epoch = self.participant.epoch().cloned();
        if let (Maker::Store, Some(record), true) = (self.maker, &epoch, self.attempts.is_restless()) {
            self.outputs.push(Output::ReadStore(record.number() + 1));
        }
        let is_restless = self.attempts.is_restless() || self.participant.is_halted() || epoch.is_none();
        let ring = |ahead: bool| -> Vec<Process> {
            let Some(record) = &epoch else { return Vec::new() };
            let (members, rank) = (record.members(), record.rank_of(self.process()).unwrap_or(0));
            let count = WATCHED.min(members.len() - 1);
            let at = |step: usize| if ahead { rank + step } else { rank + members.len() - step };
            (1..=count).map(|step| members[at(step) % members.len()]).collect()
        };
        let (watched, watchers) = (ring(true), ring(false));
        if self.entered().is_some() {
            self.detector.watch(watched.into_iter());
        }
        if self.participant.is_out() {
            return;
        }
        let mut receivers: BTreeSet<Process> = watchers.into_iter().collect();
        if is_restless {
            receivers = self.peers();
        }
        // Joiners hear every member, and so reach it.
        receivers.extend(
            epoch.iter().flat_map(|record| plan::waiting(record, &self.views)).map(|view| view.process),
        );
        // Who waits for long adds nothing to what the members say of each other.
        let is_spare = epoch.is_none() && self.members_known().1 > 0;
        let views: Vec<View> = if is_restless && !is_spare {
            self.views.values().cloned().collect()
        } else {
            self.own_view().cloned().into_iter().collect()
        };
        // Who was not there when a death was told hears of it, so a death is known until the next
        // record stands.
        let dead: Vec<Certificate> =
            if is_restless { self.participant.certificates().collect() } else { Vec::new() };
        for to in receivers {
            for view in views.iter().filter(|view| view.process != to) {
                self.send(to, Message::View(view.clone()));
            }
            for certificate in &dead {
                self.send(to, Message::Certificate(certificate.clone()));
            }
        }
    }

    /// Passes on what the participant asks for.
    fn carry_out(&mut self, outputs: Vec<Output>) {
        let is_by_record = outputs.iter().any(|output| matches!(output, Output::Learned(_)));
        for output in outputs {
            match output {
                // The step's buffers are in use until the pairs are drained.
                Output::Verdict { step, verdict } if is_by_record => self.entry.hold(step, verdict),
                Output::Learned(record) => self.learned(&record),
                output => self.outputs.push(output),
            }
        }
    }

    fn learned(&mut self, record: &Arc<Record>) {
        let (process, is_out) = (self.process(), self.participant.is_out());
        self.entry.change(process, record, is_out, &mut self.outputs);
        self.attempts = Attempts::default();
        self.detector.enter(record.members());
        let number = record.number();
        self.views.retain(|other, view| *other == process || record.contains(*other) || view.epoch.is_none());
        // Who is admitted does not wait any more, even if nothing is heard of it.
        let admitted =
            self.views.iter_mut().filter(|(other, _)| **other != process && record.contains(**other));
        admitted.for_each(|(_, view)| view.epoch = view.epoch.or(Some(number)));
        self.change_view(|view| (view.epoch, view.failed) = (Some(number), false));
    }
}
