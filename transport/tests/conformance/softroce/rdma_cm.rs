//! The connection manager over links that are changed.

use std::time::Duration;

use pleach_transport::verbs::{ConnectFailure, PairError, Refusal};
use pleach_transport::{LossCause, clock};

use super::changed::Changed;
use crate::verbs::Two;
use crate::verbs::rdma_cm::by_rdma_cm;
use crate::world::PATIENCE;

/// Time to connect where that never comes.
const SHORT: Duration = Duration::from_secs(3);

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn ends_with_different_packet_sizes_are_told_both_by_rdma_cm_too() {
    let mut changed = Changed::default();
    changed.mtu(2, 1500);
    let mut two = Two::new(by_rdma_cm, PATIENCE);
    two.connect();
    let of = |own, peer| LossCause::from(PairError::MtuMismatch { own, peer });
    assert_eq!(two.until_lost(), [of(4096, 1024), of(1024, 4096)]);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_port_that_is_not_reached_is_an_error_within_the_time_to_connect() {
    let mut changed = Changed::default();
    let mut two = Two::new(by_rdma_cm, SHORT);
    changed.deaf(1);
    let began = clock::now();
    two.connect();
    let causes = two.until_lost();
    let took = clock::now().since(began);
    println!("{causes:?} after {took:?}");
    let is_meant = |cause: &LossCause| {
        matches!(cause, LossCause::NotReached(_))
            || matches!(
                cause.fabric_error(),
                Some(PairError::Connect(
                    ConnectFailure::NoAddress | ConnectFailure::NoRoute | ConnectFailure::NoAnswer
                ))
            )
    };
    assert!(causes.iter().any(is_meant), "{causes:?}");
    // Who hears that the other one gave up may see it hang up first.
    let refused = LossCause::from(PairError::Refused(Refusal::NoPath));
    let follows = |cause: &LossCause| *cause == refused || *cause == LossCause::ConnectionClosed;
    assert!(causes.iter().all(|cause| is_meant(cause) || follows(cause)), "{causes:?}");
    assert!(took < SHORT * 5, "{took:?}");
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn an_address_that_is_gone_is_an_error_that_says_so_at_both_ends() {
    let mut changed = Changed::default();
    let mut two = Two::new(by_rdma_cm, PATIENCE);
    // Of the rank that calls.
    changed.without_address(2);
    two.connect();
    let causes = two.until_lost();
    println!("{causes:?}");
    assert!(matches!(causes[1].fabric_error(), Some(PairError::Connect(_))), "{causes:?}");
    assert_eq!(causes[0], PairError::Refused(Refusal::NoPath).into());
    assert!(causes[1].to_string().contains("rdma_cm"), "{}", causes[1]);
}
