//! Policies with a mistake. Each must be caught, by the ledger, by the drivers, or by the checks of
//! what schemes guarantee.

use std::ops::Range;

use pleach_collectives::Rank;
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, OperationId, Update, Vector};
use pleach_training::simulation::{Simulated, SimulationError};
use pleach_training::{Learner, Policy, PolicyError, Refusal};
use pleach_transport::clock::Nanos;

use super::invariants::diloco_by_hand;
use super::model::{Linear, ROUNDING, difference, scheme, settings, simulate, simulate_plans};

/// A change of the actions that follow from an event.
pub(crate) type Mutation = fn(Rank, Event, Vec<Action>) -> Vec<Action>;

/// A policy of this rank with a mutation.
struct Mutant {
    inner: Box<dyn Policy>,
    rank: Rank,
    mutation: Mutation,
}

impl Policy for Mutant {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        let right: Vec<Action> = actions.drain().collect();
        (self.mutation)(self.rank, event, right).into_iter().for_each(|action| actions.push(action));
    }
}

pub(crate) fn mutant(text: &str, mutation: Mutation) -> Result<Simulated, SimulationError> {
    simulate_plans(|rank| mutated(scheme(text).plan(&Linear.layout(), rank, 4), rank, mutation))
}

/// A plan with a mutation.
pub(crate) fn mutated(plan: Result<Plan, Refusal>, rank: Rank, mutation: Mutation) -> Plan {
    let plan = plan.expect("it is not refused");
    Plan { policy: Box::new(Mutant { inner: plan.policy, rank, mutation }), ..plan }
}

fn policy_error(text: &str, mutation: Mutation) -> PolicyError {
    match mutant(text, mutation) {
        Err(SimulationError::Policy { error, .. }) => error,
        other => panic!("{text}: {other:?}"),
    }
}

fn is_average(action: &Action) -> bool {
    matches!(action, Action::Average { .. })
}

/// An average of other elements than were asked for.
fn cut(action: Action, by: fn(Range<usize>) -> Range<usize>) -> Action {
    match action {
        Action::Average { id, vector, piece } => Action::Average { id, vector, piece: by(piece) },
        other => other,
    }
}

#[test]
fn a_step_before_the_average_is_there_is_refused() {
    let error = policy_error("sync", |_, _, mut actions| {
        if actions.iter().any(is_average) {
            actions.push(Action::Update(Update::Step));
        }
        actions
    });
    assert!(matches!(error, PolicyError::InUse { .. }), "{error}");
}

#[test]
fn computing_at_parameters_that_are_being_averaged_is_refused() {
    let error = policy_error("local-sgd:every=3", |_, event, mut actions| {
        if let (Event::Computed { step }, true) = (event, actions.iter().any(is_average)) {
            actions.push(Action::Compute { step: step + 1 });
        }
        actions
    });
    let PolicyError::InUse { vector: Vector::Parameters, holder, .. } = error else { panic!("{error}") };
    assert_eq!(holder.to_string(), "operation 0");
}

#[test]
fn an_average_of_a_gradient_that_is_still_computed_is_refused() {
    let error = policy_error("sync:bucket=16", |_, event, actions| match event {
        // Of the whole gradient, when a part of it is ready.
        Event::Ready(_) => actions.into_iter().map(|action| cut(action, |_| 0..21)).collect(),
        _ => actions,
    });
    assert!(matches!(error, PolicyError::InUse { vector: Vector::Gradient, .. }), "{error}");
}

#[test]
fn an_operation_that_is_asked_for_twice_is_refused() {
    let error = policy_error("local-sgd:every=1", |_, _, actions| {
        let numbered = |action| match action {
            Action::Average { vector, piece, .. } => Action::Average { id: OperationId(0), vector, piece },
            other => other,
        };
        actions.into_iter().map(numbered).collect()
    });
    assert_eq!(error, PolicyError::Repeated(OperationId(0)));
}

#[test]
fn a_rank_that_asks_for_nothing_more_does_not_wait_for_ever() {
    let error = policy_error("sync", |_, event, actions| match event {
        Event::Done(..) => Vec::new(),
        _ => actions,
    });
    assert_eq!(error, PolicyError::Stuck { step: 1 });
}

#[test]
fn a_rank_that_leaves_an_exchange_out_is_named() {
    // The second exchange of all others is the first of rank 3's second period.
    let left_out = mutant("local-sgd:every=4", |rank, event, actions| match event {
        Event::Computed { step } if rank == 3 && actions.iter().any(is_average) && step < 8 => {
            vec![Action::Update(Update::Step), Action::Compute { step: step + 1 }]
        }
        _ => actions,
    });
    let Err(error) = left_out else { panic!("rank 3 never averages with the others") };
    assert!(error.to_string().contains("rank 3"), "{error}");
}

#[test]
fn ranks_that_average_different_pieces_are_named() {
    let error = mutant("local-sgd", |rank, _, actions| {
        let shorter =
            |action| if rank == 2 { cut(action, |piece| piece.start..piece.end - 1) } else { action };
        actions.into_iter().map(shorter).collect()
    });
    let Err(SimulationError::Mismatch { first, other, .. }) = error else { panic!("{error:?}") };
    assert!((first == 2) != (other == 2), "{first} {other}");
}

#[test]
fn elements_that_are_never_averaged_show_in_the_guarantee() {
    for text in ["sync", "local-sgd:every=4", "diloco:every=4"] {
        let trained = mutant(text, |_, _, actions| {
            actions.into_iter().map(|action| cut(action, |piece| piece.start..piece.end - 1)).collect()
        });
        let trained = trained.unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(!trained.guarantee_held && !trained.parameters_equal, "{text}");
    }
}

#[test]
fn a_training_that_ends_without_an_exchange_shows_at_the_end() {
    let trained = mutant("local-sgd:every=8", |_, event, actions| match event {
        Event::Stop => Vec::new(),
        _ => actions,
    })
    .expect("no exchange is needed to end");
    assert!(trained.guarantee_held && !trained.parameters_equal);
}

#[test]
fn an_anchor_that_is_not_taken_at_the_beginning_shows() {
    let wrong = mutant("diloco:every=4", |_, _, actions| {
        let is_copy = |action: &Action| matches!(action, Action::Update(Update::Copy { .. }));
        actions.into_iter().filter(|action| !is_copy(action)).collect()
    })
    .expect("trains");
    let worst = difference(&diloco_by_hand(4, 0.7, 0.9), &wrong.parameters);
    assert!(worst > 10.0 * ROUNDING, "{worst:e}");
}

#[test]
fn an_outer_step_without_momentum_shows() {
    let wrong = mutant("diloco:every=4", |_, _, actions| {
        let plain = |action| match action {
            Action::Update(Update::Outer { learning_rate, piece, .. }) => {
                Action::Update(Update::Outer { learning_rate, momentum: 0.0, piece })
            }
            other => other,
        };
        actions.into_iter().map(plain).collect()
    })
    .expect("trains");
    let worst = difference(&diloco_by_hand(4, 0.7, 0.9), &wrong.parameters);
    assert!(worst > 10.0 * ROUNDING, "{worst:e}");
}

#[test]
fn a_step_after_the_last_gradient_is_refused() {
    let error = policy_error("local-sgd:every=8", |_, event, mut actions| {
        if event == Event::Stop {
            actions.insert(0, Action::Update(Update::Step));
        }
        actions
    });
    assert_eq!(error, PolicyError::AfterStop);
}

#[test]
fn what_encoding_loses_and_nobody_sends_again_shows() {
    let exact = simulate("sync", &settings(4)).parameters;
    let kept = simulate("sync:compress=f8", &settings(4)).parameters;
    let dropped = mutant("sync:compress=f8", |_, event, mut actions| {
        if matches!(event, Event::Computed { .. }) {
            for vector in [Vector::Residual, Vector::OwnedResidual] {
                actions.push(Action::Update(Update::Scale { vector, factor: 0.0, piece: 0..21 }));
            }
        }
        actions
    });
    let dropped = dropped.expect("trains");
    assert!(dropped.guarantee_held && dropped.parameters_equal, "all ranks drop the same");
    let [kept, dropped] = [&kept, &dropped.parameters].map(|parameters| difference(&exact, parameters));
    assert!(dropped > 2.0 * kept, "kept {kept:e}, dropped {dropped:e}");
}
