//! Ranks that wait for each other's calls in a cycle are told so, with both calls; ranks that are
//! only slow are waited for.

use std::time::Duration;

use pleach::transport::rendezvous::Fabric;

use crate::mismatched::{Case, expect_errors_that_name_both};
use crate::on_every_fabric;
use crate::ranks::{Outcome, Ranks, wait};

/// How long a slow rank is in no call: many times as long as a cycle lasts before it is an error.
const SLOW_FOR: Duration = Duration::from_millis(300);

const CASES: &[Case] = &[
    Case {
        calls: ["all-reduce", "recv peer=0", "all-reduce"],
        words: ["all-reduce of 4 f32", "send-recv from 0 to 1 of 4 f32"],
    },
    Case {
        calls: ["all-reduce count=100000", "all-reduce count=100000", "recv peer=0"],
        words: ["all-reduce of 100000 f32", "send-recv from 0 to 2"],
    },
    Case { calls: ["barrier", "barrier", "recv peer=1"], words: ["barrier", "send-recv from 1 to 2"] },
    Case {
        calls: ["send peer=1 count=100000", "barrier", "barrier"],
        words: ["send-recv from 0 to 1", "barrier"],
    },
    Case {
        calls: ["recv peer=1", "recv peer=0", "barrier"],
        words: ["send-recv from 1 to 0", "send-recv from 0 to 1"],
    },
    // Any two of the three.
    Case {
        calls: ["recv peer=1", "recv peer=2", "recv peer=0"],
        words: ["send-recv from", "which waits for rank"],
    },
    Case {
        calls: ["recv peer=1", "recv peer=2", "all-gather"],
        words: ["send-recv from", "which waits for rank"],
    },
];

fn a_cycle_of_calls_is_an_error_that_names_both(fabric: Fabric) {
    expect_errors_that_name_both(fabric, CASES);
}

fn a_rank_that_is_in_no_call_is_waited_for(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell(0, "call all-reduce");
    ranks.tell(2, "call recv peer=1");
    wait(SLOW_FOR);
    ranks.tell(1, "call send peer=2");
    ranks.tell(2, "call all-reduce");
    ranks.tell(1, "call all-reduce");
    for (rank, calls) in [(0, 1), (1, 2), (2, 2)] {
        for _ in 0..calls {
            assert!(matches!(ranks.outcome(rank), Outcome::Done { .. }));
        }
    }
    ranks.end(0..3);
}

fn a_rank_whose_receive_is_under_way_while_it_is_in_no_call_is_waited_for(fabric: Fabric) {
    let mut ranks = Ranks::join(fabric, 3);
    ranks.tell(1, "overlap x peer=0");
    ranks.expect(1, "started");
    // Rank 0 waits for rank 1 now, and sends what that has asked for only afterwards.
    ranks.tell(0, "call barrier");
    ranks.tell(2, "call barrier");
    wait(SLOW_FOR);
    ranks.tell(1, "go on");
    ranks.tell(0, "call send peer=1");
    for (rank, calls) in [(0, 2), (1, 1), (2, 1)] {
        for _ in 0..calls {
            assert!(matches!(ranks.outcome(rank), Outcome::Done { .. }));
        }
    }
    ranks.end(0..3);
}

on_every_fabric!(
    a_cycle_of_calls_is_an_error_that_names_both,
    a_rank_that_is_in_no_call_is_waited_for,
    a_rank_whose_receive_is_under_way_while_it_is_in_no_call_is_waited_for,
);
