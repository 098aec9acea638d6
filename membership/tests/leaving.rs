//! All members leave together, and some of them have gone before others have entered the epoch that
//! came meanwhile.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pleach_membership::{
    Cause, Input, Maker, Membership, Message, Options, Output, Process, Reason, Record, Verdict, View,
};
use pleach_transport::Nanos;

/// Members of the first epoch are on seats 0 to 3. Those on 0 and 2 leave, so the second epoch has
/// 1 and 3. 3 leaves in the first one, as by its views all do, and gives 1 no drain.
#[test]
fn who_has_not_entered_the_epoch_that_all_its_members_leave_may_go_and_is_told_its_step() {
    let process = |seat| Process::new(seat, 1);
    let first = Arc::new(Record::first((0..4).map(process).collect()).expect("has members"));
    let left = |seat| Cause { process: process(seat), reason: Reason::Left };
    let second = first.next(vec![process(1), process(3)], 1, Verdict::Committed, vec![left(0), left(2)]);
    let second = Arc::new(second.expect("has members"));
    let options = Options {
        suspect_after: Duration::from_secs(1),
        maker: Maker::Members,
        unit: NonZeroU32::MIN,
        most: 8,
    };
    let mut one = Membership::new(process(1), options, Some(Arc::clone(&first)), Nanos(0));
    assert_eq!(one.begin(), Some(0));
    let mut on = |input| one.on(input, Nanos(1));
    let leaves = |seat| {
        let (unreached, reached) = (BTreeSet::new(), BTreeSet::new());
        let view = View {
            process: process(seat),
            version: 1,
            epoch: Some(0),
            leaves: true,
            failed: false,
            unreached,
            reached,
        };
        Input::Message { from: process(seat), message: Message::View(view) }
    };
    on(Input::Ready);
    on(leaves(3));
    on(Input::Leave);
    let told = on(Input::Message { from: process(0), message: Message::Decided(second) });
    let is_told = |output: &Output| matches!(output, Output::Verdict { .. });
    assert!(!told.iter().any(is_told), "3 may still change its memory: {told:?}");
    on(Input::Lost(process(3)));
    assert!(one.entered().is_none());
    assert!(one.everyone_leaves());
    assert_eq!(one.held_verdict(), Some((0, Verdict::Committed)));
}
