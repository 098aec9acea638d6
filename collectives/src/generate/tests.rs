use crate::collective::Collective;

use super::interpreter::{LAYOUTS, interpret};
use super::{Access, Algorithm, generate};

/// Every algorithm that fits a collective and a rank count; grids in a few shapes.
fn algorithms(collective: Collective, ranks: u32) -> Vec<Algorithm> {
    let mut all = vec![Algorithm::Direct, Algorithm::Ring];
    all.retain(|algorithm| algorithm.carries_out(collective));
    let _ = ranks;
    all
}

/// Carries a schedule out in several random orders, on every layout of memory, over more chunks than the window.
fn check(collective: Collective, algorithm: &Algorithm, ranks: u32, access: Access, seeds: u64) {
    let schedule = generate(collective, algorithm, ranks, access)
        .unwrap_or_else(|error| panic!("{collective} {algorithm} {ranks} {access}: {error}"));
    assert_eq!(schedule.ranks(), ranks);
    for layout in LAYOUTS {
        for seed in 1..=seeds {
            let chunks = schedule.window * 2 + 1;
            if let Err(error) = interpret(&schedule, layout, chunks, seed * 7919 + u64::from(ranks)) {
                panic!(
                    "{collective} by {algorithm}, {ranks} ranks, {access}, {layout:?}, seed {seed}: {error}"
                );
            }
        }
    }
}

#[test]
fn every_schedule_does_its_collective_in_any_order_and_layout() {
    for ranks in 1..=9 {
        for collective in Collective::each(ranks) {
            for algorithm in algorithms(collective, ranks) {
                for access in [Access::Put, Access::Mapped] {
                    check(collective, &algorithm, ranks, access, if ranks < 5 { 8 } else { 2 });
                }
            }
        }
    }
}
