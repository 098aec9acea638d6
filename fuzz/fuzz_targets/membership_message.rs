//! Whatever a process sends about membership: no panic. A message and a record that decode have
//! exactly these bytes, and a member that hears any messages answers within the limits.
#![no_main]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use pleach_membership::message::MESSAGE_BYTES_MAX;
use pleach_membership::{Input, Maker, Membership, Message, Options, Output, Participant, Process, Record};
use pleach_transport::Nanos;

/// Two members: the one that hears and the one that speaks. Each message follows its length.
fn talk(bytes: &[u8]) {
    let (own, peer) = (Process::new(0, 1), Process::new(1, 1));
    let first = Arc::new(Record::first(vec![own, peer]).expect("two members"));
    let mut participant = Participant::new(own, Maker::Members, Some(first));
    let mut rest = bytes;
    while let Some(([length, action], messages)) = rest.split_first_chunk::<2>() {
        let (message, others) = messages.split_at(messages.len().min(usize::from(*length)));
        rest = others;
        let mut outputs = match action {
            0 => participant.propose().unwrap_or_default(),
            1 => participant.decide(vec![own], Vec::new()).unwrap_or_default(),
            2 => {
                participant.begin();
                participant.ready(false)
            }
            _ => participant.repeat(),
        };
        if let Ok(message) = Message::decode(message) {
            outputs.extend(participant.on(peer, &message));
        }
        for output in outputs {
            if let Output::Send { message, .. } = output {
                assert!(message.encode().len() <= MESSAGE_BYTES_MAX);
            }
        }
    }
}

/// As [`talk`], to the whole state machine, while time passes.
fn talk_for_long(bytes: &[u8]) {
    let members: Vec<Process> = (0..3).map(|seat| Process::new(seat, 1)).collect();
    let first = Arc::new(Record::first(members.clone()).expect("three members"));
    let options = Options {
        suspect_after: Duration::from_micros(800),
        maker: Maker::Members,
        unit: NonZeroU32::MIN,
        most: 8,
    };
    let mut membership = Membership::new(members[0], options, Some(first), Nanos(0));
    let (mut now, mut rest) = (Nanos(0), bytes);
    while let Some(([length, time], messages)) = rest.split_first_chunk::<2>() {
        let (message, others) = messages.split_at(messages.len().min(usize::from(*length)));
        rest = others;
        now.0 += u64::from(*time) * 10_000;
        membership.begin();
        let from = members[1 + usize::from(time % 2)];
        let input = match Message::decode(message) {
            Ok(message) => Input::Message { from, message },
            Err(_) => Input::Ready,
        };
        for output in membership.on(input, now) {
            if let Output::Send { message, .. } = output {
                assert!(message.encode().len() <= MESSAGE_BYTES_MAX);
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(record.encode(), bytes);
    }
    talk(bytes);
    talk_for_long(bytes);
});
