//! The protocol in all its states where these are few enough, and by random walks where not. The
//! code that is walked through is the one that processes run.
//!
//! Searches go depth first: the stack of states is short, and only fingerprints are kept of the
//! rest.

mod group;
mod late_votes;
mod swarm;

use std::io::Write as _;

use group::{ALWAYS, COMMITTED, JOINED, LAST_EPOCH, ONE_IS_LEFT, ONE_RECORD, RETRIED, Scope, TOLD};
use pleach_membership::Maker;
use pleach_membership::mutant::Mutant;
use stateright::{Checker, HasDiscoveries, Model};

/// States of the random walks of one scope.
const WALKED: usize = 150_000;

fn say(what: &str, scope: &Scope, checker: &impl Checker<Scope>) {
    let (unique, generated) = (checker.unique_state_count(), checker.state_count());
    let line = format!("{what}: {scope}: {unique} states, {generated} generated\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Walks through all states: nothing that must never be is, and all that has to be possible is.
fn holds_everywhere(scope: Scope) {
    let checker = scope.clone().checker().finish_when(HasDiscoveries::AnyFailures).spawn_dfs().join();
    say("all states", &scope, &checker);
    for name in ALWAYS {
        checker.assert_no_discovery(name);
    }
    for name in [LAST_EPOCH, JOINED, ONE_IS_LEFT, RETRIED, COMMITTED] {
        let _ = checker.assert_any_discovery(name);
    }
}

/// Walks until the mutant is found.
fn is_found(scope: Scope, property: &'static str) {
    let checker = scope.clone().checker().finish_when(HasDiscoveries::AnyFailures).spawn_dfs().join();
    say("mutant", &scope, &checker);
    let path = checker.assert_any_discovery(property);
    assert!(path.into_actions().len() > 5, "the protocol was broken, and not its checker");
}

fn holds_on_walks(scope: Scope, states: usize) {
    let checker = swarm::walks(scope.clone(), states).join();
    say("walks", &scope, &checker);
    for name in ALWAYS {
        if let Some(path) = checker.discovery(name) {
            panic!("{name}: {:#?}", path.into_actions());
        }
    }
    assert!(checker.state_count() >= states, "the walks ended early");
}

#[test]
fn two_members_with_two_ballots() {
    holds_everywhere(Scope { members: 2, ballots: 2, ..Scope::default() });
}

#[test]
fn two_members_commit_two_steps() {
    holds_everywhere(Scope { members: 2, steps: 2, ..Scope::default() });
}

#[test]
fn two_members_and_a_joiner() {
    holds_everywhere(Scope { members: 2, joiners: 1, ..Scope::default() });
}

#[test]
fn two_members_and_a_joiner_commit_a_step() {
    holds_everywhere(Scope { members: 2, joiners: 1, steps: 1, ..Scope::default() });
}

#[test]
fn three_members_and_two_that_end() {
    holds_everywhere(Scope { crashes: 2, proposers: Some(&[1, 2]), ..Scope::default() });
}

#[test]
fn a_store_makes_the_records() {
    let scope = Scope { members: 2, joiners: 1, steps: 1, maker: Maker::Store, ..Scope::default() };
    holds_everywhere(scope);
}

#[test]
fn walks_of_five_members() {
    let scope = Scope { members: 5, joiners: 1, ballots: 2, epochs: 2, crashes: 3, ..Scope::default() };
    holds_on_walks(scope.clone(), WALKED);
    holds_on_walks(Scope { steps: 3, ..scope.clone() }, WALKED);
    holds_on_walks(Scope { steps: 3, maker: Maker::Store, ..scope }, WALKED);
}

#[test]
fn walks_of_eight_members() {
    let scope = Scope { members: 8, joiners: 2, ballots: 2, epochs: 3, crashes: 5, ..Scope::default() };
    holds_on_walks(Scope { steps: 2, ..scope }, WALKED);
}

#[test]
fn silence_that_counts_as_death_is_found() {
    let mutant = Some(Mutant::SilenceIsDeath);
    is_found(Scope { members: 2, mutant, ..Scope::default() }, ONE_RECORD);
}

#[test]
fn a_certificate_without_its_record_is_found() {
    let mutant = Some(Mutant::CertificateWithoutRecord);
    let scope =
        Scope { crashes: 2, proposers: Some(&[1, 2]), mortals: Some(&[0, 1]), mutant, ..Scope::default() };
    is_found(scope, ONE_RECORD);
}

#[test]
fn a_step_told_by_one_is_found() {
    is_found(Scope { members: 2, steps: 1, mutant: Some(Mutant::ToldByOne), ..Scope::default() }, TOLD);
    let mutant = Some(Mutant::ToldByOne);
    is_found(Scope { members: 2, steps: 1, maker: Maker::Store, mutant, ..Scope::default() }, TOLD);
}

#[test]
#[ignore = "more states than CI has time for: nightly"]
fn three_members_that_all_propose() {
    holds_everywhere(Scope::default());
}

#[test]
#[ignore = "more states than CI has time for: nightly"]
fn three_members_commit_a_step() {
    holds_everywhere(Scope { steps: 1, proposers: Some(&[1, 2]), ..Scope::default() });
}

#[test]
#[ignore = "more states than CI has time for: nightly"]
fn two_members_and_a_joiner_in_two_epochs() {
    holds_everywhere(Scope { members: 2, joiners: 1, epochs: 2, ..Scope::default() });
}

#[test]
#[ignore = "more states than CI has time for: nightly"]
fn long_walks() {
    let scope = Scope { members: 5, joiners: 1, ballots: 2, epochs: 3, crashes: 4, ..Scope::default() };
    holds_on_walks(Scope { steps: 3, ..scope }, 100 * WALKED);
}
