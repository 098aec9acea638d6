//! Groups of participants as a model whose states can all be walked through.
//!
//! The code under test is [`Participant`], unchanged. What is around it may do anything: a message
//! that was sent may arrive at any moment, in any order, twice, or never. A process may propose at
//! any moment, and propose any members that have answered. A process may end between any two
//! events, and any other may learn of its end at any later moment.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use pleach_membership::mutant::Mutant;
use pleach_membership::{Certificate, Maker, Message, Process, Record, Verdict};
use pleach_membership::{Output, Participant};
use stateright::{Model, Property};

/// How much of the protocol is walked through.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// Members of the first epoch.
    pub(crate) members: usize,
    /// Processes that wait to join.
    pub(crate) joiners: usize,
    /// Ballots that a process opens for one record.
    pub(crate) ballots: u8,
    /// Records after the first.
    pub(crate) epochs: u64,
    /// Processes that end.
    pub(crate) crashes: usize,
    /// Steps that are run.
    pub(crate) steps: u64,
    /// Who makes the records.
    pub(crate) maker: Maker,
    /// Those that propose; `None`: all.
    pub(crate) proposers: Option<&'static [usize]>,
    /// Those that may end; `None`: all.
    pub(crate) mortals: Option<&'static [usize]>,
    /// The broken rule.
    pub(crate) mutant: Option<Mutant>,
}

impl Default for Scope {
    fn default() -> Self {
        Self {
            members: 3,
            joiners: 0,
            ballots: 1,
            epochs: 1,
            crashes: 1,
            steps: 0,
            maker: Maker::Members,
            proposers: None,
            mortals: None,
            mutant: None,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { members, joiners, ballots, epochs, crashes, steps, maker, .. } = self;
        write!(formatter, "{members} members, {joiners} joiners, {ballots} ballots, {epochs} epochs, ")?;
        write!(formatter, "{crashes} crashes, {steps} steps, made by {maker:?}")?;
        if let Some(list) = self.proposers {
            write!(formatter, ", proposers {list:?}")?;
        }
        self.mutant.map_or(Ok(()), |mutant| write!(formatter, ", {mutant:?}"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    participant: Participant,
    /// What outlives the process.
    persisted: Option<Arc<Record>>,
    is_alive: bool,
    /// Ballots opened for the next record.
    ballots: u8,
    /// The first step whose result the process has not applied.
    applied: u64,
}

/// A message on its way, or a write to the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Sent {
    Message { from: usize, to: usize, message: Message },
    Write(Arc<Record>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    nodes: Vec<Arc<Hashed<Node>>>,
    /// All that was ever sent, without repetitions, in an order that events do not change.
    sent: Vec<Arc<Hashed<Sent>>>,
    store: Vec<Arc<Record>>,
    crashes: usize,
    /// The first record of each number that anybody learned.
    learned: BTreeMap<u64, Arc<Record>>,
    /// By epoch: the last step of which a member was told by the two rounds.
    told: BTreeMap<u64, u64>,
    /// What a checker found.
    violations: BTreeSet<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Deliver(usize, usize, Message),
    Propose(usize),
    Decide(usize, bool),
    Crash(usize),
    Certify(usize, usize),
    Step(usize),
    Write(Arc<Record>),
    ReadStore(usize),
}

pub(crate) const ONE_RECORD: &str = "one record a number, the dead included";
pub(crate) const TOLD: &str = "told means committed in every later record";
pub(crate) const PERSISTED: &str = "a record is persisted before anything is said of it";
pub(crate) const APPLIED: &str = "no step is lost or applied twice";

impl Scope {
    fn processes(&self) -> usize {
        self.members + self.joiners
    }

    fn process(&self, index: usize) -> Process {
        Process::new(index as u32, 1)
    }

    fn may(list: Option<&'static [usize]>, index: usize) -> bool {
        list.is_none_or(|list| list.contains(&index))
    }

    /// Gives an event to a process and carries out what it asks for; `None` where nothing changes.
    fn act(
        &self,
        state: &State,
        index: usize,
        event: impl FnOnce(&mut Participant) -> Vec<Output>,
    ) -> Option<State> {
        let mut node = state.nodes[index].value.clone();
        let before = node.participant.clone();
        let outputs = event(&mut node.participant);
        if outputs.is_empty() && node.participant == before {
            return None;
        }
        let mut next = state.clone();
        let epoch = before.latest().map_or(0, |record| record.number());
        let mut persisted = node.persisted.as_ref().map(|record| record.number());
        for output in outputs {
            match output {
                Output::Persist(record) => {
                    persisted = Some(record.number());
                    node.persisted = Some(record);
                }
                Output::Send { to, message } => {
                    if matches!(&message, Message::Decided(record) if Some(record.number()) > persisted) {
                        next.violations.insert(PERSISTED);
                    }
                    self.send(&mut next, index, to.seat.0 as usize, message);
                }
                Output::WriteOnce(record) => insert(&mut next.sent, Sent::Write(record)),
                Output::Verdict { step, verdict: Verdict::Committed } => {
                    if step != node.applied {
                        next.violations.insert(APPLIED);
                    }
                    node.applied = step + 1;
                    if node.participant.latest().map_or(0, |record| record.number()) == epoch {
                        let told = next.told.entry(epoch).or_insert(step);
                        *told = (*told).max(step);
                    }
                }
                Output::Verdict { .. } => {}
                Output::ReadStore(_)
                | Output::Connect(_)
                | Output::Sever(_)
                | Output::Drain { .. }
                | Output::Enter(_)
                | Output::Expelled(_)
                | Output::NoQuorum { .. } => unreachable!("a participant knows no links and no time"),
                Output::Learned(record) => {
                    node.ballots = 0;
                    if before.latest().is_none() {
                        node.applied = record.step();
                    }
                    if node.participant.epoch().is_some() && node.applied != record.step() {
                        next.violations.insert(APPLIED);
                    }
                    let first = next.learned.entry(record.number()).or_insert_with(|| Arc::clone(&record));
                    if *first != record {
                        next.violations.insert(ONE_RECORD);
                    }
                }
            }
        }
        let broken = |(epoch, step): (&u64, &u64)| {
            next.learned.iter().any(|(number, record)| number > epoch && record.step() <= *step)
        };
        if next.told.iter().any(broken) {
            next.violations.insert(TOLD);
        }
        next.nodes[index] = Hashed::new(node);
        next.drop_spent();
        (next != *state).then_some(next)
    }

    fn send(&self, state: &mut State, from: usize, to: usize, message: Message) {
        // A refusal only moves the number of the next ballot, and what a query asks for has been
        // sent. The sender of a record that stands makes no difference to its receiver.
        let from = match &message {
            Message::Refused { .. } | Message::Query(_) => return,
            Message::Decided(_) => to,
            _ => from,
        };
        insert(&mut state.sent, Sent::Message { from, to, message });
    }
}

impl State {
    /// How many numbers have a record that somebody learned.
    pub(crate) fn records(&self) -> usize {
        self.learned.len()
    }

    /// Forgets messages that can change nothing any more, so that states that differ by them alone
    /// are one. Participants only move on: what is spent stays spent.
    fn drop_spent(&mut self) {
        let nodes = &self.nodes;
        self.sent.retain(|sent| match &sent.value {
            Sent::Message { from, to, message } => !is_spent(&nodes[*to].value, *from, message),
            Sent::Write(record) => self.store.iter().all(|stands| stands.number() != record.number()),
        });
    }
}

fn is_spent(node: &Node, from: usize, message: &Message) -> bool {
    if !node.is_alive {
        return true;
    }
    let participant = &node.participant;
    let latest = participant.latest().map(|record| record.number());
    let is_old = |number: u64| latest.is_some_and(|latest| number <= latest);
    let heard = |ballot| {
        let (heard, is_voted_on) = participant.proposal()?;
        let is_heard = heard.iter().any(|seat| seat.0 as usize == from);
        (participant.open_ballot() == Some(ballot)).then_some((is_heard, is_voted_on))
    };
    match message {
        Message::Prepare { number, ballot } => is_old(*number) || participant.promised() >= Some(*ballot),
        Message::Accept { ballot, record } => {
            is_old(record.number())
                || participant.promised() > Some(*ballot)
                || participant.accepted() >= Some(*ballot)
        }
        Message::Promise { number, ballot, .. } => is_old(*number) || heard(*ballot) != Some((false, false)),
        Message::Accepted { number, ballot } => is_old(*number) || heard(*ballot) != Some((false, true)),
        Message::Decided(record) => is_old(record.number()),
        Message::Ready { epoch, .. } | Message::Knows { epoch, .. } => {
            latest > Some(*epoch) || (latest == Some(*epoch) && participant.is_frozen())
        }
        _ => false,
    }
}

fn insert(sent: &mut Vec<Arc<Hashed<Sent>>>, new: Sent) {
    let new = Hashed::new(new);
    if let Err(at) = sent.binary_search_by_key(&new.hash, |entry| entry.hash) {
        sent.insert(at, new);
    }
}

/// A value that is hashed once, as most of a state is the same in the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hashed<T> {
    hash: u64,
    value: T,
}

impl<T: Hash> Hashed<T> {
    fn new(value: T) -> Arc<Self> {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Arc::new(Self { hash: hasher.finish(), value })
    }
}

impl<T> Hash for Hashed<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Model for Scope {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let members: Vec<_> = (0..self.members).map(|index| self.process(index)).collect();
        let first = Arc::new(Record::first(members).expect("has members"));
        let node = |index| {
            let record = (index < self.members).then(|| Arc::clone(&first));
            let participant = Participant::new(self.process(index), self.maker, record.clone());
            let participant = participant.with_mutant(self.mutant);
            Hashed::new(Node { participant, persisted: record, is_alive: true, ballots: 0, applied: 0 })
        };
        vec![State {
            nodes: (0..self.processes()).map(node).collect(),
            sent: Vec::new(),
            store: Vec::new(),
            crashes: 0,
            learned: BTreeMap::from([(0, Arc::clone(&first))]),
            told: BTreeMap::new(),
            violations: BTreeSet::new(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let first = actions.len();
        for entry in &state.sent {
            match &entry.value {
                Sent::Message { from, to, message } if state.nodes[*to].value.is_alive => {
                    actions.push(Action::Deliver(*from, *to, message.clone()));
                }
                Sent::Message { .. } => {}
                Sent::Write(record) => {
                    if state.store.iter().all(|stands| stands.number() != record.number()) {
                        actions.push(Action::Write(Arc::clone(record)));
                    }
                }
            }
        }
        let nodes = || state.nodes.iter().map(|node| &node.value).enumerate();
        for (index, node) in nodes().filter(|(_, node)| node.is_alive) {
            if state.crashes < self.crashes && Self::may(self.mortals, index) {
                actions.push(Action::Crash(index));
            }
            // Certificates count for who proposes; for others their records come as messages too.
            let proposes = node.participant.open_ballot().is_some();
            for (other, dead) in nodes().filter(|_| proposes) {
                let process = dead.participant.process();
                if !dead.is_alive && !node.participant.is_certified(process) {
                    actions.push(Action::Certify(index, other));
                }
            }
            let latest = node.participant.latest().map(|record| record.number());
            if state.store.iter().any(|record| latest.is_none_or(|latest| latest < record.number())) {
                actions.push(Action::ReadStore(index));
            }
            let Some(record) = node.participant.epoch() else { continue };
            let ends = record.number() >= self.epochs;
            if !ends && node.ballots < self.ballots && Self::may(self.proposers, index) {
                actions.push(Action::Propose(index));
            }
            if node.participant.proposal().is_some_and(|(_, is_voted_on)| !is_voted_on) {
                actions.push(Action::Decide(index, false));
                if self.joiners > 0 {
                    actions.push(Action::Decide(index, true));
                }
            }
            if node.participant.step().is_some_and(|step| step < self.steps) {
                actions.push(Action::Step(index));
            }
        }
        // Walks are kept as numbers of actions, so each action that is offered changes something.
        let offered = actions.split_off(first);
        actions.extend(offered.into_iter().filter(|action| {
            let is_sure = matches!(
                action,
                Action::Propose(_) | Action::Crash(_) | Action::Certify(..) | Action::Write(_)
            );
            is_sure || self.next_state(state, action.clone()).is_some()
        }));
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        match action {
            Action::Deliver(from, to, message) => {
                self.act(state, to, |participant| participant.on(self.process(from), &message))
            }
            Action::Propose(index) => {
                let mut next =
                    self.act(state, index, |participant| participant.propose().expect("is a member"))?;
                let mut node = next.nodes[index].value.clone();
                node.ballots += 1;
                next.nodes[index] = Hashed::new(node);
                Some(next)
            }
            Action::Decide(index, joins) => self.act(state, index, |participant| {
                let (answered, _) = participant.proposal().expect("is open");
                let mut members: Vec<_> = answered.iter().map(|seat| self.process(seat.0 as usize)).collect();
                if joins {
                    members.extend((self.members..self.processes()).map(|joiner| self.process(joiner)));
                }
                participant.decide(members, Vec::new()).unwrap_or_default()
            }),
            Action::Crash(index) => {
                let mut next = state.clone();
                let mut node = next.nodes[index].value.clone();
                node.is_alive = false;
                next.nodes[index] = Hashed::new(node);
                next.crashes += 1;
                next.drop_spent();
                Some(next)
            }
            Action::Certify(index, other) => self.act(state, index, |participant| {
                let dead = &state.nodes[other].value;
                let (process, learned) = (dead.participant.process(), dead.persisted.clone());
                participant.certify(&Certificate { process, learned })
            }),
            Action::Step(index) => self.act(state, index, |participant| {
                participant.begin();
                participant.ready(false)
            }),
            Action::Write(record) => {
                let mut next = state.clone();
                next.store.push(record);
                next.drop_spent();
                Some(next)
            }
            Action::ReadStore(index) => self.act(state, index, |participant| {
                state.store.iter().flat_map(|record| participant.stands(Arc::clone(record))).collect()
            }),
        }
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_RECORD, |_, state: &State| !state.violations.contains(ONE_RECORD)),
            Property::always(TOLD, |_, state: &State| !state.violations.contains(TOLD)),
            Property::always(PERSISTED, |_, state: &State| !state.violations.contains(PERSISTED)),
            Property::always(APPLIED, |_, state: &State| !state.violations.contains(APPLIED)),
            Property::sometimes(LAST_EPOCH, |scope: &Self, state: &State| {
                state.learned.keys().any(|number| *number == scope.epochs)
            }),
            Property::sometimes(JOINED, |scope: &Self, state: &State| {
                let joiners = &state.nodes[scope.members..];
                joiners.is_empty() || joiners.iter().any(|node| node.value.participant.epoch().is_some())
            }),
            Property::sometimes(ONE_IS_LEFT, |scope: &Self, state: &State| {
                scope.crashes + 1 < scope.members
                    || state.learned.values().any(|record| record.members().len() == 1)
            }),
            Property::sometimes(RETRIED, |scope: &Self, state: &State| {
                let is_retry = |record: &Arc<Record>| record.verdict() == Verdict::Retry;
                scope.steps == 0 || state.learned.values().any(is_retry)
            }),
            Property::sometimes(COMMITTED, |scope: &Self, state: &State| {
                scope.steps == 0 || !state.told.is_empty()
            }),
        ]
    }
}

pub(crate) const LAST_EPOCH: &str = "the last epoch is reached";
pub(crate) const JOINED: &str = "a joiner is in";
pub(crate) const ONE_IS_LEFT: &str = "one member goes on alone";
pub(crate) const RETRIED: &str = "a step is retried";
pub(crate) const COMMITTED: &str = "a member is told";
pub(crate) const ALWAYS: [&str; 4] = [ONE_RECORD, TOLD, PERSISTED, APPLIED];
