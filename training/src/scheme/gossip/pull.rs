//! Gossip by reads: a rank takes what a peer has published, and waits for nobody.
//!
//! The exchange is `x ← (x + x_j)/2`. A rank publishes its parameters before each gradient.
//!
//! **Invariant:** the versions that a rank reads of a peer never go back. A torn read may have
//! elements of newer versions besides (Jin et al. read so).

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use super::Peers;
use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Reads, Update, Vector};
use crate::scheme::finish::{Finish, Word};
use crate::shares::WindowPlan;
use crate::state::State;

/// The policy of [`Scheme::Gossip`](crate::Scheme::Gossip) that reads.
#[derive(Debug)]
pub(crate) struct Pull {
    parameters: usize,
    peers: Peers,
    every: u64,
    reads: Reads,
    next_step: u64,
    ids: OperationIds,
    /// The peer that is read.
    reading: Option<Rank>,
    /// By rank: the newest version read.
    versions: Vec<u64>,
    went_back: bool,
    finish: Finish,
}

impl Pull {
    pub(crate) fn new(parameters: usize, every: u64, peers: Peers, reads: Reads, plan: WindowPlan) -> Self {
        Self {
            parameters,
            peers,
            every,
            reads,
            next_step: 0,
            ids: OperationIds::default(),
            reading: None,
            versions: vec![1; peers.ranks as usize],
            went_back: false,
            finish: Finish::new(plan),
        }
    }

    fn begin_step(&mut self, actions: &mut Actions) {
        let step = self.next_step;
        if step == 0 || !step.is_multiple_of(self.every) || self.peers.ranks == 1 {
            return self.compute(actions);
        }
        let (id, from) = (self.ids.take(), self.peers.target(step / self.every - 1));
        self.reading = Some(from);
        let (into, reads) = (Vector::Fetched, self.reads);
        actions.push(Action::Read { id, from, into, reads });
    }

    fn compute(&mut self, actions: &mut Actions) {
        actions.push(Action::Publish { vector: Vector::Parameters, word: self.next_step });
        actions.compute(self.next_step);
    }

    fn mix(&mut self, version: u64, actions: &mut Actions) {
        let from = self.reading.take().expect("a read has ended");
        let newest = &mut self.versions[from as usize];
        self.went_back |= version < *newest;
        *newest = version;
        actions.update(Update::Mix {
            into: Vector::Parameters,
            alpha: 0.5,
            from: Vector::Fetched,
            beta: 0.5,
            piece: 0..self.parameters,
        });
        actions.push(Action::Exchanged);
        self.compute(actions);
    }

    fn told(&mut self, from: Rank, word: u64, actions: &mut Actions) {
        match Word::decode(word) {
            Word::Finished(sent) if self.finish.told(from, sent) => {}
            _ => return actions.push(Action::Refuse { from, word }),
        }
        if self.finish.has_begun() {
            self.try_finish(actions);
        }
    }

    fn try_finish(&mut self, actions: &mut Actions) {
        if let Some(from) = self.finish.missing() {
            return actions.push(Action::Await { from });
        }
        actions.push(Action::Conserved(!self.went_back && self.finish.has_all()));
        let (id, piece) = (self.ids.take(), 0..self.parameters);
        actions.push(Action::Average { id, vector: Vector::Parameters, piece });
    }
}

impl Policy for Pull {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => self.begin_step(actions),
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Committed
            | Event::Membership { .. }
            | Event::Pause => {}
            Event::Resume => {
                // Peers count their versions from 1 again, in another process.
                self.versions.fill(1);
                self.compute(actions);
            }
            Event::Computed { step } => {
                actions.update(Update::Step);
                self.next_step = step + 1;
                self.begin_step(actions);
            }
            Event::Done(_, Outcome::Read { version, .. }) => self.mix(version, actions),
            Event::Done(..) => actions.push(Action::Agreed(Vector::Parameters)),
            Event::Arrived { from, word } => actions.push(Action::Refuse { from, word }),
            Event::Told { from, word } => self.told(from, word, actions),
            Event::Stop => {
                self.finish.begin(actions);
                self.try_finish(actions);
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.went_back);
        state.field(&mut self.finish);
    }
}
