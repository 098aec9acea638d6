//! Encodings: what is written is read, every other byte is refused or is another value, and nothing
//! panics.

use std::collections::BTreeSet;
use std::sync::Arc;

use pleach_membership::{
    Answer, Ballot, Cause, Certificate, DecodeError, Message, Process, Reason, Record, RecordError, Seat,
    Verdict, View,
};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

fn process() -> impl Strategy<Value = Process> {
    (0_u32..20, 0_u64..3).prop_map(|(seat, incarnation)| Process::new(seat, incarnation))
}

fn processes() -> impl Strategy<Value = BTreeSet<Process>> {
    btree_set(process(), 0..6)
}

prop_compose! {
    fn members()(seats in btree_set(0_u32..20, 1..8), incarnation in any::<u64>()) -> Vec<Process> {
        seats.into_iter().map(|seat| Process::new(seat, incarnation)).collect()
    }
}

fn cause() -> impl Strategy<Value = Cause> {
    let reasons = Reason::ALL;
    (process(), 0..reasons.len()).prop_map(move |(process, at)| Cause { process, reason: reasons[at] })
}

prop_compose! {
    fn record()(
        first in members(),
        second in members(),
        step in 0_u64..1000,
        retries in any::<bool>(),
        causes in vec(cause(), 0..6),
    ) -> Arc<Record> {
        let verdict = if retries { Verdict::Retry } else { Verdict::Committed };
        let first = Record::first(first).expect("has members");
        Arc::new(first.next(second, step, verdict, causes).expect("has members"))
    }
}

prop_compose! {
    fn ballot()(round in 1_u64..1000, seat in 0_u32..20) -> Ballot {
        Ballot { round, seat: Seat(seat) }
    }
}

prop_compose! {
    fn view()(
        process in process(),
        version in any::<u64>(),
        epoch in proptest::option::of(any::<u64>()),
        (leaves, failed) in any::<(bool, bool)>(),
        unreached in processes(),
        reached in processes(),
    ) -> View {
        View { process, version, epoch, leaves, failed, unreached, reached }
    }
}

fn message() -> impl Strategy<Value = Message> {
    let answer = (proptest::option::of((ballot(), record())), 0_u64..1000, proptest::option::of(0_u64..1000))
        .prop_map(|(accepted, known, begun)| Answer { accepted, known, begun });
    prop_oneof![
        (any::<u64>(), ballot()).prop_map(|(number, ballot)| Message::Prepare { number, ballot }),
        (any::<u64>(), ballot(), answer).prop_map(|(number, ballot, answer)| Message::Promise {
            number,
            ballot,
            answer
        }),
        (any::<u64>(), ballot()).prop_map(|(number, promised)| Message::Refused { number, promised }),
        (ballot(), record()).prop_map(|(ballot, record)| Message::Accept { ballot, record }),
        (any::<u64>(), ballot()).prop_map(|(number, ballot)| Message::Accepted { number, ballot }),
        record().prop_map(Message::Decided),
        proptest::option::of(any::<u64>()).prop_map(Message::Query),
        (any::<u64>(), 0_u64..100, any::<bool>()).prop_map(|(epoch, step, halts)| Message::Ready {
            epoch,
            step,
            halts
        }),
        (any::<u64>(), 0_u64..100).prop_map(|(epoch, step)| Message::Knows { epoch, step }),
        view().prop_map(Message::View),
        (process(), proptest::option::of(record()))
            .prop_map(|(process, learned)| Message::Certificate(Certificate { process, learned })),
        any::<bool>().prop_map(|asks| Message::Alive { asks }),
    ]
}

proptest! {
    #[test]
    fn messages_come_back(message in message()) {
        prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn records_come_back(record in record()) {
        let decoded = Record::decode(&record.encode()).expect("was encoded");
        prop_assert_eq!(decoded.digest(), record.digest());
        prop_assert_eq!(decoded.members(), record.members());
        prop_assert_eq!((decoded.number(), decoded.step()), (record.number(), record.step()));
        prop_assert_eq!((decoded.verdict(), decoded.causes()), (record.verdict(), record.causes()));
        for member in record.members() {
            prop_assert_eq!(decoded.member_since(*member), record.member_since(*member));
        }
    }

    #[test]
    fn bytes_that_end_early_are_refused(message in message(), at in any::<prop::sample::Index>()) {
        let bytes = message.encode();
        let end = at.index(bytes.len());
        prop_assert!(Message::decode(&bytes[..end]).is_err());
    }

    /// One value has one encoding, so a MAC over bytes is a MAC over what they say.
    #[test]
    fn changed_bytes_are_another_message(message in message(), at in any::<prop::sample::Index>(), by in 1_u8..) {
        let mut bytes = message.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= by;
        if let Ok(other) = Message::decode(&bytes) {
            prop_assert_ne!(&other, &message);
            prop_assert_eq!(other.encode(), bytes);
        }
    }
}

/// All of the strategies above name seats below 20.
fn on_seat(seat: u32) -> [Message; 9] {
    let (low, process) = (Process::new(3, 1), Process::new(seat, 1));
    let record = |member: Process, cause: Process| {
        let first = Record::first(vec![low]).expect("has a member");
        let causes = vec![Cause { process: cause, reason: Reason::Left }];
        Arc::new(first.next(vec![member], 1, Verdict::Retry, causes).expect("has a member"))
    };
    let ballot = Ballot { round: 1, seat: Seat(2) };
    let answer = Answer { accepted: Some((ballot, record(low, process))), known: 0, begun: None };
    let view = |unreached: Option<Process>, reached: Option<Process>| {
        let (unreached, reached) = (unreached.into_iter().collect(), reached.into_iter().collect());
        Message::View(View {
            process: low,
            version: 1,
            epoch: None,
            leaves: false,
            failed: true,
            unreached,
            reached,
        })
    };
    [
        Message::Prepare { number: 1, ballot: Ballot { round: 1, seat: Seat(seat) } },
        Message::Promise { number: 1, ballot, answer },
        Message::Refused { number: 1, promised: Ballot { round: 1, seat: Seat(seat) } },
        Message::Accept { ballot, record: record(process, low) },
        Message::Decided(record(low, process)),
        view(Some(process), None),
        view(None, Some(process)),
        Message::Certificate(Certificate { process, learned: None }),
        Message::Certificate(Certificate { process: low, learned: Some(record(process, low)) }),
    ]
}

#[test]
fn the_highest_seat_of_a_message_is_found_wherever_it_stands() {
    for seat in [4, 77, u32::MAX] {
        for message in on_seat(seat) {
            assert_eq!(message.highest_seat(), Some(Seat(seat)), "{message:?}");
        }
    }
    assert_eq!(Message::Alive { asks: true }.highest_seat(), None);
}

#[test]
fn contents_that_are_no_record_have_their_own_errors() {
    let twice = vec![Process::new(3, 1), Process::new(3, 2)];
    assert_eq!(Record::first(twice), Err(RecordError::SeatTaken(Seat(3))));
    assert_eq!(Record::first(Vec::new()), Err(RecordError::NoMembers));
    let many = (0..=pleach_membership::MEMBERS_MAX as u32).map(|seat| Process::new(seat, 1)).collect();
    assert_eq!(Record::first(many), Err(RecordError::TooMany));
    let mut bytes = Record::first(vec![Process::new(0, 1), Process::new(1, 1)]).expect("is right").encode();
    bytes[0] = 9;
    assert_eq!(Record::decode(&bytes), Err(DecodeError::Version(9)));
    let long = vec![1; pleach_membership::RECORD_BYTES_MAX + 1];
    assert!(matches!(Record::decode(&long), Err(DecodeError::TooLong { .. })));
}

#[test]
fn members_out_of_order_are_refused() {
    let record = Record::first(vec![Process::new(0, 1), Process::new(1, 1)]).expect("is right");
    let mut bytes = record.encode();
    let at = bytes.len() - 4 - 2 * 20;
    bytes[at..at + 40].rotate_left(20);
    assert_eq!(Record::decode(&bytes), Err(DecodeError::NotCanonical));
}

#[test]
fn a_record_of_another_history_has_another_digest() {
    let member = |incarnation| vec![Process::new(0, incarnation)];
    let next = |first: Record| first.next(member(7), 1, Verdict::Retry, Vec::new()).expect("has a member");
    let one = next(Record::first(member(1)).expect("has a member"));
    let other = next(Record::first(member(2)).expect("has a member"));
    assert_ne!(one.digest(), other.digest());
    assert_ne!(one.digest().seed(), other.digest().seed());
}
