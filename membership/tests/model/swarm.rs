//! Random walks that are each biased in another way.
//!
//! A uniform choice delivers about everything before anything rare happens. Here each walk draws a
//! weight for each kind of action and for each process (swarm testing: Groce et al., ISSTA 2012),
//! so in some walks a process hears nearly nothing, in others votes come late or processes end
//! early.

use pleach_membership::Message;
use pleach_vocabulary::digest::{chain, mixed};
use pleach_vocabulary::random::Random;
use stateright::{Chooser, Model};

use crate::group::{Action, Scope, State};

/// Logarithms of weights: of kinds and of processes, each below this number, in steps of this many
/// bits.
const WEIGHTS: u64 = 4;
const BITS: u64 = 4;

#[derive(Clone)]
pub(crate) struct Swarm;

impl Chooser<Scope> for Swarm {
    type State = (u64, Random);

    fn new_state(&self, seed: u64) -> (u64, Random) {
        (mixed(seed), Random::new(seed))
    }

    fn choose_initial_state(&self, _: &mut Self::State, _: &[State]) -> usize {
        0
    }

    fn choose_action(&self, (seed, random): &mut Self::State, _: &State, actions: &[Action]) -> usize {
        let level = |of: u64| BITS * (chain(*seed, of) % WEIGHTS);
        let weight = |action| {
            let (kind, process) = kind(action);
            1 << (level(kind) + level(1 << 32 | process as u64))
        };
        let weights: Vec<u64> = actions.iter().map(weight).collect();
        let mut drawn = random.below(weights.iter().sum());
        weights
            .iter()
            .position(|weight| {
                let is_here = drawn < *weight;
                drawn = drawn.saturating_sub(*weight);
                is_here
            })
            .unwrap_or(0)
    }
}

/// A number for what is done, and to or by which process.
fn kind(action: &Action) -> (u64, usize) {
    match action {
        Action::Deliver(_, to, message) => (
            match message {
                Message::Prepare { .. } => 0,
                Message::Promise { .. } => 1,
                Message::Accept { .. } => 2,
                Message::Accepted { .. } => 3,
                Message::Decided(_) => 4,
                Message::Ready { .. } => 5,
                Message::Knows { .. } => 6,
                _ => 7,
            },
            *to,
        ),
        Action::Propose(process) => (8, *process),
        Action::Decide(process, _) => (9, *process),
        Action::Crash(process) => (10, *process),
        Action::Certify(process, _) => (11, *process),
        Action::Step(process) => (12, *process),
        Action::Write(_) => (13, 0),
        Action::ReadStore(process) => (14, *process),
    }
}

/// Walks until a property is violated or this many states were generated.
pub(crate) fn walks(scope: Scope, states: usize) -> impl stateright::Checker<Scope> {
    scope
        .checker()
        .finish_when(stateright::HasDiscoveries::AnyFailures)
        .target_state_count(states)
        .spawn_simulation(7, Swarm)
}
