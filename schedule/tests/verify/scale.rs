//! What the generators make is proved, also when it is large.

use std::fmt::Write;
use std::time::{Duration, Instant};

use pleach_schedule::generate::{Access, Algorithm, generate};
use pleach_schedule::verify::{Proof, Violation, verify};
use pleach_vocabulary::Collective;

/// The same collective with the last rank as root.
fn rooted_last(collective: Collective, ranks: u32) -> Collective {
    match collective {
        Collective::SendRecv { .. } => Collective::SendRecv { from: ranks - 1, to: 0 },
        other => other.with_root(ranks - 1),
    }
}

/// All algorithms for a collective; grids as near to a square as the number allows.
fn algorithms(collective: Collective, ranks: u32) -> Vec<Algorithm> {
    let rows =
        (1..=ranks).filter(|rows| ranks.is_multiple_of(*rows) && rows * rows <= ranks).max().unwrap_or(1);
    Algorithm::names(collective)
        .iter()
        .map(|name| name.replace("AxB", "HxR").replace("HxR", &format!("{rows}x{}", ranks / rows)))
        .map(|name| Algorithm::named(&name, collective).expect("a known name"))
        .collect()
}

struct Measured {
    what: String,
    steps: usize,
    made: Duration,
    verified: Duration,
}

#[expect(clippy::disallowed_methods, reason = "what is measured is the time that proofs take")]
fn measure(
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
    access: Access,
) -> Option<(Measured, Result<Proof, Violation>)> {
    let start = Instant::now();
    let schedule = generate(collective, algorithm, ranks, access).ok()?;
    let generated = Instant::now();
    let steps = schedule.programs.iter().flatten().map(|lane| lane.steps.len()).sum();
    let proof = verify(schedule);
    let verified = generated.elapsed();
    let what = format!("{collective} by {algorithm} of {ranks} ({access})");
    let measured = Measured { what, steps, made: generated - start, verified };
    Some((measured, proof))
}

/// Verifies all; says which were refused.
fn check_all(ranks: impl Iterator<Item = u32>) {
    let mut refused = String::new();
    for ranks in ranks {
        for collective in Collective::ALL {
            for collective in [collective, rooted_last(collective, ranks)] {
                for algorithm in algorithms(collective, ranks) {
                    for access in [Access::Put, Access::Mapped] {
                        if let Some((measured, Err(violation))) =
                            measure(collective, &algorithm, ranks, access)
                        {
                            writeln!(refused, "{}: {violation}", measured.what).expect("a string");
                        }
                    }
                }
            }
        }
    }
    assert!(refused.is_empty(), "refused:\n{refused}");
}

#[test]
fn whatever_is_generated_for_up_to_nine_ranks_is_proved() {
    check_all(1..10);
}

#[test]
fn whatever_is_generated_for_some_larger_counts_is_proved() {
    check_all([12, 16, 17, 32].into_iter());
}

/// `cargo test --release -p pleach-schedule --test verify -- --ignored --nocapture proofs_take`
#[test]
#[ignore = "times are those of a release build on an idle machine"]
fn proofs_take_as_long_as_they_may() {
    let all_reduce = Collective::AllReduce;
    let cases = [
        (Collective::AllToAll, 32, vec!["direct"], 0.05),
        (Collective::AllToAll, 256, vec!["direct"], 5.0),
        (
            all_reduce,
            32,
            vec!["direct", "recursive-doubling", "halving-doubling", "ring", "double-tree"],
            0.05,
        ),
        (all_reduce, 32, vec!["grid:4x8", "grid-staged:4x8", "hierarchical:4x8"], 0.05),
        (all_reduce, 256, vec!["direct"], 5.0),
        (
            all_reduce,
            1024,
            vec!["ring", "double-tree", "grid:32x32", "halving-doubling", "hierarchical:128x8"],
            5.0,
        ),
        (all_reduce, 1024, vec!["grid-staged:32x32"], 15.0),
        (all_reduce, 256, vec!["recursive-doubling"], 5.0),
    ];
    let mut late = String::new();
    for (collective, ranks, names, limit) in cases {
        for name in names {
            for access in [Access::Put, Access::Mapped] {
                let algorithm = Algorithm::named(name, collective).expect("a known name");
                let Some((measured, proof)) = measure(collective, &algorithm, ranks, access) else {
                    continue;
                };
                let said = proof.map_or_else(|violation| violation.to_string(), |_| "proved".to_owned());
                println!(
                    "{:55} {:9} steps, made in {:>9.3?}, {said} in {:>9.3?}",
                    measured.what, measured.steps, measured.made, measured.verified
                );
                if said != "proved" || measured.verified.as_secs_f64() > limit {
                    writeln!(late, "{}: {said}, {:?}", measured.what, measured.verified).expect("a string");
                }
            }
        }
    }
    assert!(late.is_empty(), "{late}");
}
