//! What policies allocate: nothing, once they have seen what comes again and again.

#[path = "../../collectives/tests/counting/mod.rs"]
mod counting;
mod told;

use std::time::Duration;

use pleach_training::policy::Actions;

use counting::allocations;
use told::{STEPS, halves, plan, schemes, tell};

#[test]
fn no_policy_allocates_in_the_second_half_of_a_training() {
    for scheme in schemes() {
        for rank in [0, 5] {
            let [first, second] = halves(&scheme, rank, &mut |_: u64| Duration::ZERO);
            let events = first.len() + second.len();
            assert!(events as u64 > STEPS, "{scheme}: {events} events");
            let (mut plan, mut actions) = (plan(&scheme, rank), Actions::default());
            tell(plan.policy.as_mut(), &first, &mut actions);
            let before = allocations();
            tell(plan.policy.as_mut(), &second, &mut actions);
            let allocations = allocations() - before;
            assert_eq!(allocations, 0, "{scheme}, rank {rank}: in {} events", second.len());
        }
    }
}
