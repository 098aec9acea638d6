//! A job in virtual time: processes, a network that loses and reorders, a device that severs and
//! drains, a store, and steps that write into the memory of peers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pleach_membership::{
    Certificate, Input, MEMBERS_MAX, Maker, Membership, Message, Options, Output, Process, Record, Verdict,
};
use pleach_transport::Nanos;
use pleach_vocabulary::random::Random;

use crate::checkers::Checkers;

pub(crate) const SUSPECT_AFTER: Duration = Duration::from_millis(200);

pub(crate) const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// What happens at a moment.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// To a process, if it still lives.
    Input(Process, Input),
    /// The deadline of this process, where it is still this one.
    Deadline(Process, Nanos),
    /// A process is done with its step.
    Computed(Process, u64),
    /// Bytes of an epoch arrive in the memory of a peer.
    Write { from: Process, to: Process, epoch: u64 },
    /// A process writes its record to the store.
    StoreWrite(Process, Arc<Record>),
    /// A process reads the store.
    StoreRead(Process, u64),
    /// A pair is drained as soon as its link is there.
    Drain(Process, Process, u64),
    /// A death is told.
    Witness(Certificate),
    /// A fault or its end, or a planned change.
    Fault(Fault),
}

#[derive(Clone, Debug)]
pub(crate) enum Fault {
    Kill(Process),
    Freeze(Process, Duration),
    Join(Process),
    Leave(Process),
    /// The step that is under way on a member fails there.
    Fail(Process),
    /// Messages from the first seat to the second are lost, or not any more.
    Cut(u32, u32, bool),
    /// Every message is lost with this probability in percent.
    Loss(u64),
}

struct Node {
    machine: Membership,
    persisted: Option<Arc<Record>>,
    is_alive: bool,
    frozen_until: Nanos,
    deadline: Nanos,
    severed: BTreeSet<Process>,
    is_out: bool,
}

pub(crate) struct World {
    pub(crate) now: Nanos,
    pub(crate) checkers: Checkers,
    pub(crate) random: Random,
    pub(crate) certifies: bool,
    /// Whether processes carry out [`Output::Sever`], as every device must.
    pub(crate) severs: bool,
    pub(crate) last_fault: Nanos,
    /// Steps are made by so many members or more.
    pub(crate) fewest: usize,
    maker: Maker,
    unit: NonZeroU32,
    most: usize,
    events: BinaryHeap<Reverse<(Nanos, u64)>>,
    bodies: BTreeMap<u64, Event>,
    count: u64,
    nodes: BTreeMap<Process, Node>,
    cut: BTreeSet<(u32, u32)>,
    loss: u64,
    store: BTreeMap<u64, Arc<Record>>,
    /// Ends that have asked for the drain of a pair in an epoch.
    drains: BTreeSet<(Process, Process, u64)>,
    /// When the last write of one process to another lands.
    landed: BTreeMap<(Process, Process), Nanos>,
}

impl World {
    pub(crate) fn new(seed: u64, members: u32, maker: Maker) -> Self {
        Self::of_units(seed, members, maker, NonZeroU32::MIN)
    }

    /// A job without room for more members.
    pub(crate) fn full(seed: u64, members: u32, maker: Maker) -> Self {
        Self::of_most(seed, members, maker, NonZeroU32::MIN, members as usize)
    }

    /// Members that come and go in units of so many.
    pub(crate) fn of_units(seed: u64, members: u32, maker: Maker, unit: NonZeroU32) -> Self {
        Self::of_most(seed, members, maker, unit, MEMBERS_MAX)
    }

    /// The same, where there are so many members at most.
    pub(crate) fn of_most(seed: u64, members: u32, maker: Maker, unit: NonZeroU32, most: usize) -> Self {
        let processes: Vec<Process> = (0..members).map(|seat| Process::new(seat, 1)).collect();
        let first = Arc::new(Record::first(processes.clone()).expect("has members"));
        let mut world = Self {
            now: Nanos::ZERO,
            checkers: Checkers::new(&first, unit, most),
            random: Random::new(seed),
            certifies: true,
            severs: true,
            last_fault: Nanos::ZERO,
            fewest: 0,
            maker,
            unit,
            most,
            events: BinaryHeap::new(),
            bodies: BTreeMap::new(),
            count: 0,
            nodes: BTreeMap::new(),
            cut: BTreeSet::new(),
            loss: 0,
            store: BTreeMap::new(),
            drains: BTreeSet::new(),
            landed: BTreeMap::new(),
        };
        for process in processes {
            world.start(process, Some(Arc::clone(&first)));
            world.begin(process);
        }
        world
    }

    /// Seats of a unit.
    pub(crate) fn unit(&self) -> u32 {
        self.unit.get()
    }

    fn start(&mut self, process: Process, first: Option<Arc<Record>>) {
        let (maker, unit, most) = (self.maker, self.unit, self.most);
        let options = Options { suspect_after: SUSPECT_AFTER, maker, unit, most };
        let machine = Membership::new(process, options, first.clone(), self.now);
        let deadline = machine.next_deadline();
        let node = Node {
            machine,
            persisted: first,
            is_alive: true,
            frozen_until: Nanos::ZERO,
            deadline,
            severed: BTreeSet::new(),
            is_out: false,
        };
        self.nodes.insert(process, node);
        self.at(deadline, Event::Deadline(process, deadline));
    }

    pub(crate) fn at(&mut self, time: Nanos, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count)));
        self.bodies.insert(self.count, event);
    }

    fn after(&mut self, microseconds: u64, event: Event) {
        let delay = Duration::from_micros(100 + self.random.below(microseconds));
        self.at(self.now + delay, event);
    }

    /// Lets everything happen until this time.
    pub(crate) fn run_until(&mut self, end: Nanos) {
        while let Some(Reverse((time, number))) = self.events.peek().copied() {
            if time > end {
                break;
            }
            self.events.pop();
            self.now = time;
            let event = self.bodies.remove(&number).expect("each event has a body");
            self.happen(event);
        }
        self.now = end;
    }

    fn happen(&mut self, event: Event) {
        let process = match &event {
            Event::Input(process, _)
            | Event::Deadline(process, _)
            | Event::Computed(process, _)
            | Event::StoreWrite(process, _)
            | Event::StoreRead(process, _) => Some(*process),
            // A process that is stopped goes on with its copies when it is continued.
            Event::Write { from, .. } => Some(*from),
            Event::Drain(..) | Event::Witness(_) | Event::Fault(_) => None,
        };
        if let Some(node) = process.and_then(|process| self.nodes.get(&process)) {
            if !node.is_alive {
                return;
            }
            if node.frozen_until > self.now {
                return self.at(node.frozen_until, event);
            }
        }
        match event {
            Event::Input(process, input) => self.input(process, input),
            Event::Deadline(process, deadline) => {
                if self.nodes[&process].deadline == deadline {
                    self.input(process, Input::Tick);
                }
            }
            Event::Computed(process, step) => {
                if self.nodes[&process].machine.participant().step() == Some(step) {
                    self.input(process, Input::Ready);
                }
            }
            Event::Write { from, to, epoch } => self.write(from, to, epoch),
            Event::StoreWrite(process, record) => {
                let stands = self.store.entry(record.number()).or_insert(record).clone();
                self.after(900, Event::Input(process, Input::Stands(stands)));
            }
            Event::StoreRead(process, number) => {
                if let Some(stands) = self.store.get(&number).cloned() {
                    self.after(900, Event::Input(process, Input::Stands(stands)));
                }
            }
            Event::Drain(one, other, epoch) => self.drain(one, other, epoch),
            Event::Witness(certificate) => self.witness(certificate),
            Event::Fault(fault) => self.fault(fault),
        }
    }

    /// Memory of a member that has entered an epoch is changed by members of it alone.
    fn write(&mut self, from: Process, to: Process, epoch: u64) {
        let node = &self.nodes[&to];
        if node.is_alive && !node.severed.contains(&from) {
            let entered = node.machine.entered().map(|record| record.number());
            self.checkers.written(from, to, epoch, entered);
        }
    }

    fn input(&mut self, process: Process, input: Input) {
        let now = self.now;
        let node = self.nodes.get_mut(&process).expect("is a process");
        let outputs = node.machine.on(input, now);
        let deadline = node.machine.next_deadline();
        if deadline != node.deadline {
            node.deadline = deadline;
            self.at(deadline, Event::Deadline(process, deadline));
        }
        for output in outputs {
            self.carry_out(process, output);
        }
    }

    fn is_cut(&self, from: Process, to: Process) -> bool {
        self.cut.contains(&(from.seat.0, to.seat.0))
    }

    fn carry_out(&mut self, process: Process, output: Output) {
        match output {
            Output::Persist(record) => {
                self.checkers.learned(process, &record, self.now);
                self.nodes.get_mut(&process).expect("is a process").persisted = Some(record);
            }
            Output::Send { to, message } => self.send(process, to, message),
            Output::WriteOnce(record) => self.after(900, Event::StoreWrite(process, record)),
            Output::ReadStore(number) => self.after(900, Event::StoreRead(process, number)),
            Output::Verdict { step, verdict } => {
                let latest = self.nodes[&process].machine.participant().latest().cloned();
                self.checkers.verdict(process, step, verdict, latest.map(|record| record.number()));
                if verdict == Verdict::Committed {
                    self.begin(process);
                }
            }
            Output::Learned(_) => unreachable!("the machine keeps it to itself"),
            Output::Connect(peer) => self.connect(process, peer),
            Output::Sever(_) if !self.severs => {}
            Output::Sever(peer) => {
                self.nodes.get_mut(&process).expect("is a process").severed.insert(peer);
            }
            Output::Drain { peer, epoch } => self.drain(process, peer, epoch),
            Output::Enter(record) => {
                self.checkers.entered(process, &record, self.now);
                self.begin(process);
            }
            Output::Expelled(_) => {
                self.checkers.last_change = self.now;
                self.nodes.get_mut(&process).expect("is a process").is_out = true;
            }
            Output::NoQuorum { .. } => self.checkers.no_quorums += 1,
        }
    }

    fn send(&mut self, from: Process, to: Process, message: Message) {
        let is_lost = from != to && (self.is_cut(from, to) || self.random.below(100) < self.loss);
        if !self.nodes.contains_key(&to) || is_lost {
            return;
        }
        // What is sent is what decodes.
        let message = Message::decode(&message.encode()).expect("was encoded");
        if self.loss > 0 && self.random.below(10) == 0 {
            let message = message.clone();
            self.after(30_000, Event::Input(to, Input::Message { from, message }));
        }
        let latency = if self.random.below(20) == 0 { 20_000 } else { 500 };
        self.after(latency, Event::Input(to, Input::Message { from, message }));
    }

    fn connect(&mut self, process: Process, peer: Process) {
        let is_there = self.nodes.get(&peer).is_some_and(|node| node.is_alive);
        if is_there && !self.is_cut(process, peer) && !self.is_cut(peer, process) {
            self.after(1_000, Event::Input(process, Input::Connected(peer)));
            self.after(1_000, Event::Input(peer, Input::Connected(process)));
        } else {
            self.after(100_000, Event::Input(process, Input::Lost(peer)));
        }
    }

    /// Both ends have asked, and what either has written has landed.
    fn drain(&mut self, process: Process, peer: Process, epoch: u64) {
        self.drains.insert((process, peer, epoch));
        if !self.drains.contains(&(peer, process, epoch)) {
            return;
        }
        if self.is_cut(process, peer) || self.is_cut(peer, process) {
            return self.at(self.now + ms(10), Event::Drain(process, peer, epoch));
        }
        // A process that is stopped makes its copies later than it had begun to.
        let landed = |pair| self.landed.get(pair).copied().unwrap_or(Nanos::ZERO);
        let stopped = self.nodes[&process].frozen_until.max(self.nodes[&peer].frozen_until);
        let quiet = landed(&(process, peer)).max(landed(&(peer, process))).max(stopped);
        if quiet > self.now {
            return self.at(quiet, Event::Drain(process, peer, epoch));
        }
        let time = self.now + ms(1);
        self.at(time, Event::Input(process, Input::Drained { peer, epoch }));
        self.at(time, Event::Input(peer, Input::Drained { peer: process, epoch }));
    }

    /// Begins the next step, which writes to every member while it computes.
    fn begin(&mut self, process: Process) {
        let node = self.nodes.get_mut(&process).expect("is a process");
        if node.machine.entered().is_some_and(|record| record.members().len() < self.fewest) {
            return self.input(process, Input::TooFew);
        }
        let Some(step) = node.machine.begin() else { return };
        let record = node.machine.entered().cloned().expect("a step begins in an epoch");
        self.checkers.begun(process, step, record.number());
        for peer in record.members().iter().copied().filter(|peer| *peer != process) {
            let time = self.now + Duration::from_micros(100 + self.random.below(30_000));
            let last = self.landed.entry((process, peer)).or_insert(time);
            *last = time.max(*last);
            self.at(time, Event::Write { from: process, to: peer, epoch: record.number() });
        }
        self.after(40_000, Event::Computed(process, step));
    }

    fn fault(&mut self, fault: Fault) {
        self.last_fault = self.now;
        match fault {
            Fault::Kill(process) => self.kill(process),
            Fault::Freeze(process, time) => {
                let until = self.now + time;
                if let Some(node) = self.nodes.get_mut(&process) {
                    node.frozen_until = node.frozen_until.max(until);
                }
            }
            Fault::Join(process) => {
                let members: Vec<Process> = self.living().collect();
                self.start(process, None);
                for member in members {
                    self.connect(process, member);
                }
            }
            Fault::Leave(process) | Fault::Fail(process) => {
                if self.nodes.get(&process).is_some_and(|node| node.is_alive && !node.is_out) {
                    let leaves = matches!(fault, Fault::Leave(_));
                    self.input(process, if leaves { Input::Leave } else { Input::Failed });
                }
            }
            Fault::Cut(from, to, true) => drop(self.cut.insert((from, to))),
            Fault::Cut(from, to, false) => {
                self.cut.remove(&(from, to));
            }
            Fault::Loss(percent) => self.loss = percent,
        }
    }

    fn kill(&mut self, process: Process) {
        let Some(node) = self.nodes.get_mut(&process).filter(|node| node.is_alive) else { return };
        node.is_alive = false;
        let certificate = Certificate { process, learned: node.persisted.clone() };
        let others: Vec<Process> = self.living().collect();
        for other in &others {
            if !self.is_cut(process, *other) {
                self.after(5_000, Event::Input(*other, Input::Lost(process)));
            }
        }
        if self.certifies {
            self.after(20_000, Event::Witness(certificate));
        }
    }

    /// A launcher tells two processes of a death, and again until a record stands without the dead:
    /// those that it told may have died since.
    fn witness(&mut self, certificate: Certificate) {
        let newest = self.checkers.records.values().next_back();
        let others: Vec<Process> = self.living().collect();
        if others.is_empty() || !newest.is_some_and(|newest| newest.contains(certificate.process)) {
            return;
        }
        for _ in 0..2 {
            let witness = others[self.random.index(others.len())];
            self.after(1, Event::Input(witness, Input::Certificate(certificate.clone())));
        }
        self.after(SUSPECT_AFTER.as_micros() as u64 / 4, Event::Witness(certificate));
    }

    /// Processes that run and are not out.
    pub(crate) fn living(&self) -> impl Iterator<Item = Process> {
        let is_in = |(process, node): (&Process, &Node)| (node.is_alive && !node.is_out).then_some(*process);
        self.nodes.iter().filter_map(is_in)
    }

    pub(crate) fn is_living(&self, process: Process) -> bool {
        self.living().any(|other| other == process)
    }

    /// Whether a process sees that no unit is whole any more.
    pub(crate) fn has_lost_every_unit(&self, process: Process) -> bool {
        self.nodes[&process].machine.has_lost_every_unit(SUSPECT_AFTER)
    }

    /// The epoch that a process has entered.
    pub(crate) fn entered(&self, process: Process) -> Option<&Arc<Record>> {
        self.nodes[&process].machine.entered()
    }

    pub(crate) fn describe(&self) -> String {
        let line = |process: Process| {
            let participant = self.nodes[&process].machine.participant();
            let (latest, entered) = (participant.latest(), self.entered(process));
            format!(
                "{process:?}: {latest:?}, entered {:?}, frozen {}, halted {}, proposal {:?}\n",
                entered.map(|record| record.number()),
                participant.is_frozen(),
                participant.is_halted(),
                participant.proposal(),
            )
        };
        self.living().map(line).collect()
    }
}
