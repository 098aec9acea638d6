//! What people are told when ranks are not to be joined in the same way. That the connection
//! manager joins them is the suite's (`verbs_cm`); what changed links do to it is with those
//! (`softroce::rdma_cm`).

use pleach_transport::verbs::{Connect, PairError, Refusal, VerbsOptions};

use super::{PATIENCE, Two, wish};

/// As [`wish`], joined by the connection manager.
pub(crate) fn by_rdma_cm(rank: u32) -> VerbsOptions {
    VerbsOptions { connect: Connect::RdmaCm, ..wish(rank, false) }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn ends_that_connect_in_different_ways_both_say_so() {
    for caller in 0..2 {
        let mut two =
            Two::new(|rank| if rank == caller { by_rdma_cm(rank) } else { wish(rank, false) }, PATIENCE);
        two.connect();
        let causes = two.until_lost();
        for cause in causes {
            assert_eq!(cause, PairError::Refused(Refusal::OtherConnectMethod).into());
            let text = cause.to_string();
            assert!(text.contains("PLEACH_VERBS_CONNECT alike on all ranks"), "{text}");
        }
    }
}
