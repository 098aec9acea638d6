//! Who is out hears why from every member that reaches it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pleach_membership::{
    Cause, Input, Maker, Membership, Message, Options, Output, Process, Reason, Record, Verdict,
};
use pleach_transport::Nanos;

/// The pair of the members on seats 0 and 2 is cut, so 0, which makes the record without 2, cannot
/// tell 2 of it. 1 can.
#[test]
fn a_member_that_its_maker_does_not_reach_is_told_by_the_others_before_they_sever_it() {
    let process = |seat| Process::new(seat, 1);
    let first = Arc::new(Record::first((0..3).map(process).collect()).expect("has members"));
    let cause = Cause { process: process(2), reason: Reason::Unreachable };
    let second = first.next(vec![process(0), process(1)], 1, Verdict::Retry, vec![cause]);
    let second = Arc::new(second.expect("has members"));
    let options = Options {
        suspect_after: Duration::from_secs(1),
        maker: Maker::Members,
        unit: NonZeroU32::MIN,
        most: 8,
    };
    let mut one = Membership::new(process(1), options, Some(first), Nanos(0));
    let decided = Message::Decided(second);
    let outputs = one.on(Input::Message { from: process(0), message: decided.clone() }, Nanos(1));
    let told = outputs
        .iter()
        .position(|output| *output == Output::Send { to: process(2), message: decided.clone() });
    let severed = outputs.iter().position(|output| *output == Output::Sever(process(2)));
    assert!(told.is_some() && told < severed, "{outputs:?}");
}
