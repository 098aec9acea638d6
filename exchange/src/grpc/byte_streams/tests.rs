//! The two ends of a direction, without a device and without threads.

use std::sync::Arc;

use pleach_transport::{HostMemory, Region, RegionKey, Registry, Source, Transfer};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::*;

struct Nobody;

impl Registry for Nobody {
    fn released(&self, _key: RegionKey) {}
}

/// The sender's end, the receiver's, the ring of the latter, and the signal slots of both.
struct Direction {
    outgoing: Outgoing,
    incoming: Incoming,
    ring: Slice,
    at_sender: Signals,
    at_receiver: Signals,
}

impl Direction {
    fn new() -> Self {
        let [own, ring] = [1, 2]
            .map(|key| Region::new(HostMemory::new(RING_BYTES), RegionKey(key), Arc::new(Nobody)).whole());
        let [at_sender, at_receiver] = [(); 2].map(|()| Signals::new(usize::from(SLOTS)));
        let announced = [2, 0, RING_BYTES as u64].map(u64::to_le_bytes).concat();
        at_sender.signal(&signal(ANNOUNCED, &announced));
        let mut outgoing = Outgoing::new(at_sender.clone(), 0, own, false);
        outgoing.learn(1, |_| panic!("nothing is mapped")).expect("is a ring");
        let incoming = Incoming::new(at_receiver.clone(), 0, ring.clone());
        Self { outgoing, incoming, ring, at_sender, at_receiver }
    }

    /// Sends the first of these bytes. A put arrives at once; `ends`: and has ended then.
    fn send(&mut self, bytes: &[u8], ends: bool) -> usize {
        let number = self.outgoing.number();
        let count = self.outgoing.store(0, bytes);
        if count == 0 {
            return 0;
        }
        let Ok(Submission::Put(Transfer::Put { src: Source::Slice(src), dst, signal }, _)) =
            self.outgoing.send(0, count)
        else {
            panic!("nothing is mapped")
        };
        let into = self.ring.slice(dst.offset as usize..(dst.offset + dst.len) as usize).expect("inside");
        into.store(&src.to_vec());
        self.at_receiver.signal(&signal.expect("each put has one"));
        self.outgoing.sent(count, true);
        if ends {
            self.outgoing.end_puts(1 << number);
        }
        count
    }

    /// Reads at most so many bytes, and gives the credits that are due.
    fn read(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let mut into = ReadBuf::new(&mut bytes);
        self.incoming.read(&mut into).expect("the sender counts well");
        let count = into.filled().len();
        self.incoming.credits().for_each(|slot| self.at_sender.signal(&signal(slot, &[])));
        bytes.truncate(count);
        bytes
    }
}

/// Bytes that tell where they are.
fn content(from: usize, length: usize) -> Vec<u8> {
    (from..from + length).map(|at| (at % 251) as u8).collect()
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(24))]

    #[test]
    fn bytes_come_in_their_order_and_a_sender_whose_receiver_has_read_all_has_room(
        steps in prop::collection::vec((0..RING_BYTES / 3, any::<bool>(), any::<bool>()), 1..60),
        is_small in any::<bool>(),
    ) {
        let mut direction = Direction::new();
        let (mut sent, mut read) = (0, 0);
        for (length, writes, reads_all) in steps {
            // Many short pieces use up the signal slots, and long ones the ring.
            let length = if is_small { length % 100 } else { length };
            if writes {
                let bytes = content(sent, length);
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let count = direction.send(rest, true);
                    if count == 0 {
                        prop_assert!(sent > read, "there is room where all was read");
                        break;
                    }
                    (rest, sent) = (&rest[count..], sent + count);
                    prop_assert!(sent - read <= RING_BYTES);
                }
            }
            let most = if reads_all { RING_BYTES } else { length };
            let came = direction.read(most);
            prop_assert_eq!(came.len(), most.min(sent - read));
            prop_assert!(came == content(read, came.len()));
            read += came.len();
        }
    }
}

#[test]
fn a_part_of_the_senders_ring_is_used_again_only_when_its_put_has_ended() {
    let mut direction = Direction::new();
    let first = direction.send(&[1; 100], false);
    assert_eq!(first, 100);
    let mut sent = first;
    loop {
        match direction.send(&content(sent, PIECE_BYTES), true) {
            0 => break,
            count => sent += count,
        }
        while !direction.read(RING_BYTES).is_empty() {}
    }
    assert_eq!(sent, RING_BYTES, "the place of the first put is not free");
    direction.outgoing.end_puts(1);
    assert!(direction.outgoing.has_room());
}

#[test]
fn a_peer_that_counts_wrongly_is_found_out_and_harms_nobody() {
    let mut direction = Direction::new();
    // More credits than were due.
    for slot in [CREDITS_OF_PUTS, CREDITS_OF_BYTES] {
        (0..1_000).for_each(|_| direction.at_sender.signal(&signal(slot, &[])));
    }
    let mut sent = 0;
    for _ in 0..3 * PUTS {
        sent += direction.send(&content(sent, 10), true);
    }
    assert_eq!(sent, 10 * 3 * PUTS);
    // A put beyond the end of the ring.
    let mut direction = Direction::new();
    let length = RING_BYTES as u32 + 1;
    direction.at_receiver.signal(&signal(0, &length.to_le_bytes()));
    let mut bytes = [0; 10];
    let mut into = ReadBuf::new(&mut bytes);
    let found = direction.incoming.read(&mut into).expect_err("is longer than the ring");
    assert_eq!(found.to_string(), format!("a put of {length} bytes"));
    assert!(into.filled().is_empty());
}
