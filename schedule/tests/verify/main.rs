//! `verify` on schedules written by hand: good ones are accepted, bad ones refused with a message
//! that names the place, and damaged ones either refused or harmless.

mod family;
mod interpreter;
mod mutants;
mod refusals;
mod scale;

use pleach_schedule::verify::{Proof, Violation, verify};
use pleach_schedule::{Part, Schedule};
use pleach_vocabulary::Collective;

const GOOD: [(&str, &str); 8] = [
    ("all-reduce-ring-of-3", include_str!("schedules/all-reduce-ring-of-3.txt")),
    ("all-reduce-mapped-direct-of-2", include_str!("schedules/all-reduce-mapped-direct-of-2.txt")),
    ("broadcast-chain-of-3", include_str!("schedules/broadcast-chain-of-3.txt")),
    ("all-gather-of-2", include_str!("schedules/all-gather-of-2.txt")),
    ("reduce-scatter-of-3", include_str!("schedules/reduce-scatter-of-3.txt")),
    ("reduce-chain-of-3", include_str!("schedules/reduce-chain-of-3.txt")),
    ("barrier-of-3", include_str!("schedules/barrier-of-3.txt")),
    ("send-recv-of-2", include_str!("schedules/send-recv-of-2.txt")),
];

fn good(name: &str) -> &'static str {
    GOOD.iter().find(|(known, _)| *known == name).expect("a known schedule").1
}

fn parse(text: &str) -> Schedule {
    Schedule::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn prove(text: &str) -> Result<Proof, Violation> {
    verify(parse(text))
}

#[test]
fn good_schedules_are_accepted() {
    for (name, text) in GOOD {
        if let Err(violation) = prove(text) {
            panic!("{name}: {violation}");
        }
    }
}

#[test]
fn a_proof_knows_where_puts_land_and_where_results_are_complete() {
    let proof = prove(good("all-reduce-ring-of-3")).expect("good");
    // Block 0: rank 1 waits for scratch from 0, then for the output; rank 2 completes.
    assert_eq!(proof.put_target(1, 0, 1), Some(Part::Scratch(0)));
    assert_eq!(proof.put_target(1, 0, 4), Some(Part::SharedOutput));
    assert_eq!(proof.put_target(0, 0, 4), None, "a signal moves nothing");
    assert_eq!(proof.put_target(0, 0, 0), None, "no wait");
    assert!(proof.completes(2, 0, 1));
    assert!(!proof.completes(1, 0, 2), "two of three");
    assert!(!proof.completes(2, 0, 2), "a copy");
    // Blocks 1 and 2 are the same turned round.
    assert_eq!(proof.put_target(2, 1, 1), Some(Part::Scratch(0)));
    assert!(proof.completes(0, 1, 1));
    assert!(proof.completes(1, 2, 1));
    assert!(!proof.completes(2, 2, 1));
    assert_eq!(proof.put_target(9, 0, 0), None, "nobody");
    assert!(!proof.exposes_input(0) && proof.exposes_output(0));
    let proof = prove(good("send-recv-of-2")).expect("good");
    assert!(proof.exposes_input(1) && !proof.exposes_input(0) && !proof.exposes_output(0));
    assert_eq!(proof.schedule().collective, Collective::SendRecv { from: 1, to: 0 });
}
