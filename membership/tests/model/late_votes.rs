//! Votes of a lower ballot that come after the promise of a higher one.
//!
//! Three of five members vote for a ballot and end. Their proposer, which has not voted itself,
//! promises a higher ballot; the other survivor makes another record; then the votes arrive. Fewer
//! members cannot show this, and among the walks of five members it is rare, so it is played here
//! event by event.

use pleach_membership::Message;
use pleach_membership::mutant::Mutant;
use stateright::{Model, Property};

use crate::group::{Action, ONE_RECORD, Scope, State};

/// Takes every action that fits until none does.
fn all(scope: &Scope, mut state: State, fits: impl Fn(&Action) -> bool) -> State {
    loop {
        let mut actions = Vec::new();
        scope.actions(&state, &mut actions);
        let Some(action) = actions.into_iter().find(|action| fits(action)) else { return state };
        state = scope.next_state(&state, action).expect("every offered action changes something");
    }
}

fn play(mutant: Option<Mutant>) -> (bool, usize) {
    let scope = Scope { members: 5, crashes: 3, mutant, ..Scope::default() };
    let state = scope.init_states().remove(0);
    // Member 3 asks all, and three of them vote.
    let state = all(&scope, state, |action| *action == Action::Propose(3));
    let state = all(&scope, state, |action| {
        matches!(action, Action::Deliver(_, _, Message::Prepare { .. } | Message::Promise { .. }))
    });
    let state = all(&scope, state, |action| *action == Action::Decide(3, false));
    let state =
        all(&scope, state, |action| matches!(action, Action::Deliver(_, 0..=2, Message::Accept { .. })));
    let state = all(&scope, state, |action| matches!(action, Action::Crash(0..=2)));
    // Member 4 goes on with member 3.
    let state = all(&scope, state, |action| *action == Action::Propose(4));
    let state = all(&scope, state, |action| {
        matches!(
            action,
            Action::Deliver(4, _, Message::Prepare { .. })
                | Action::Deliver(_, 4, Message::Promise { .. })
                | Action::Certify(4, _)
        )
    });
    let state = all(&scope, state, |action| *action == Action::Decide(4, false));
    let state = all(&scope, state, |action| {
        matches!(
            action,
            Action::Deliver(4, _, Message::Accept { .. }) | Action::Deliver(_, 4, Message::Accepted { .. })
        )
    });
    // The votes of the dead arrive.
    let state =
        all(&scope, state, |action| matches!(action, Action::Deliver(_, 3, Message::Accepted { .. })));
    let holds =
        |property: &Property<Scope>| property.name != ONE_RECORD || (property.condition)(&scope, &state);
    (scope.properties().iter().all(holds), state.records())
}

#[test]
fn lower_ballots_that_are_counted_are_found() {
    assert_eq!(play(None), (true, 2), "the second record is made, and no other");
    assert_eq!(play(Some(Mutant::LowerBallotsCounted)), (false, 2));
}
