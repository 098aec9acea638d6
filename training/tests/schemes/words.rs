//! Words and writes of peers that no rank sends by the scheme: they are refused, and their sender
//! is named.

#[path = "../words/mod.rs"]
mod any;

use pleach_collectives::Rank;
use pleach_training::policy::{Action, Event};
use pleach_training::simulation::{Simulated, SimulationError};
use pleach_training::{Learner, PolicyError};
use pleach_vocabulary::random::Random;

use super::model::{Linear, scheme, simulate_plans};
use super::mutants::{Mutation, mutant, mutated};

/// The forms of words; see `training/src/scheme/finish.rs`.
const ROUND: u64 = 0;
const FINISHED: u64 = 1 << 62;
const RESULT: u64 = 2 << 62;
const HELD: u64 = 3 << 62;

fn refused(told: Result<Simulated, SimulationError>) -> Option<PolicyError> {
    match told {
        Err(SimulationError::Policy { error, .. }) => Some(error),
        _ => None,
    }
}

/// Rank 1 tells rank 2 one more word, behind a step.
fn with_word<const WORD: u64, const STEP: u64>(
    rank: Rank,
    event: Event,
    actions: Vec<Action>,
) -> Vec<Action> {
    let mut actions = actions;
    if rank == 1 && event == (Event::Computed { step: STEP }) {
        actions.push(Action::Tell { to: 2, word: WORD });
    }
    actions
}

#[test]
fn a_word_that_no_rank_sends_is_refused_and_its_sender_is_named() {
    const MANY: u64 = (1 << 42) - 1;
    let words: [(&str, u64, Mutation); 14] = [
        ("gossip", ROUND, with_word::<ROUND, 3>),
        ("gossip", HELD, with_word::<HELD, 3>),
        ("gossip:direction=push", ROUND, with_word::<ROUND, 3>),
        ("gossip:direction=push", RESULT, with_word::<RESULT, 3>),
        // Round 0 has begun.
        ("gossip:direction=push,peer=ring", ROUND, with_word::<ROUND, 3>),
        // A weight before the last write.
        ("gossip:direction=push-sum", { RESULT | 1 << 48 }, with_word::<{ RESULT | 1 << 48 }, 3>),
        // A last version of a share to which others still write.
        ("easgd:every=3", RESULT, with_word::<RESULT, 3>),
        ("easgd:every=3", ROUND, with_word::<ROUND, 3>),
        ("downpour:every=3", HELD, with_word::<HELD, 3>),
        // More clocks than the reader has made.
        ("ssp", { RESULT | MANY }, with_word::<{ RESULT | MANY }, 3>),
        ("bsp", HELD, with_word::<HELD, 3>),
        ("asp", HELD, with_word::<HELD, 3>),
        // Only rank 0 places barriers.
        ("elastic-bsp", { ROUND | 2 }, with_word::<{ ROUND | 2 }, 0>),
        ("elastic-bsp", FINISHED, with_word::<FINISHED, 0>),
    ];
    for (text, word, mutation) in words {
        let error = refused(mutant(text, mutation));
        assert_eq!(error, Some(PolicyError::Word { from: 1, word }), "{text}");
    }
    let error = PolicyError::Word { from: 1, word: 7 }.to_string();
    assert!(error.contains("rank 1 has sent 0x7") && error.contains("look at rank 1"), "{error}");
}

#[test]
fn a_rank_that_says_twice_that_it_has_ended_is_refused() {
    for text in ["gossip", "gossip:direction=push-sum", "easgd:every=3", "ssp", "bap:distance=9", "asp"] {
        let twice: Mutation = |rank, _, mut actions| {
            let is_end = |action: &Action| matches!(action, Action::Tell { to: 2, word } if word >> 62 == 1);
            if rank == 1
                && let Some(place) = actions.iter().position(is_end)
            {
                actions.insert(place, actions[place].clone());
            }
            actions
        };
        let Some(PolicyError::Word { from: 1, .. }) = refused(mutant(text, twice)) else {
            panic!("{text}: rank 1 is not named")
        };
    }
}

#[test]
fn a_write_of_a_rank_that_writes_no_more_is_refused() {
    for text in ["gossip:direction=push", "easgd:every=3", "ssp", "bap:distance=9"] {
        // Rank 1 says so before its last writes.
        let early: Mutation = |rank, event, mut actions| {
            if rank == 1 && event == (Event::Computed { step: 2 }) {
                actions.insert(0, Action::Tell { to: 0, word: FINISHED });
                actions.insert(0, Action::Tell { to: 2, word: FINISHED });
                actions.insert(0, Action::Tell { to: 3, word: FINISHED });
            }
            actions
        };
        let Some(PolicyError::Word { from: 1, .. }) = refused(mutant(text, early)) else {
            panic!("{text}: rank 1 is not named")
        };
    }
}

#[test]
fn more_weight_than_all_ranks_have_is_refused() {
    let heavy = simulate_plans(|rank| {
        let plan = scheme("gossip:direction=push-sum").plan(&Linear.layout(), rank, 4);
        mutated(plan, rank, |rank, _, actions| {
            let weigh = |action| match action {
                Action::Write { id, to, from, .. } if rank == 3 => {
                    Action::Write { id, to, from, word: u64::MAX, waits: true }
                }
                other => other,
            };
            actions.into_iter().map(weigh).collect()
        })
    });
    assert_eq!(refused(heavy), Some(PolicyError::Word { from: 3, word: u64::MAX }));
}

#[test]
fn a_change_out_of_turn_is_refused() {
    let out_of_turn = simulate_plans(|rank| {
        // Rank 3, whose turn is the last, does not wait for it.
        let text = if rank == 3 { "easgd:every=3" } else { "easgd:every=3,mode=round-robin" };
        scheme(text).plan(&Linear.layout(), rank, 4).expect("it is not refused")
    });
    assert_eq!(refused(out_of_turn), Some(PolicyError::Word { from: 3, word: 3 }));
}

#[test]
fn a_rank_goes_on_or_names_the_sender_whatever_words_come() {
    let (mut refused, mut told) = (0, 0);
    for seed in 0..3_000 {
        let mut random = Random::new(seed);
        let length = 1 + random.index(120);
        // Most moves let the rank go on: a word at a time when others are expected is refused soon.
        let goes_on = 1 + random.index(7) as u64;
        let mut byte = || {
            let byte = random.bits() as u8;
            if random.below(8) < goes_on { byte & 0x81 } else { byte }
        };
        let bytes: Vec<u8> = (0..length).map(|_| byte()).collect();
        refused += any::tell(&bytes);
        told += any::SCHEMES.len();
    }
    assert!(refused > told / 10 && refused < told * 9 / 10, "{refused} of {told}");
}
