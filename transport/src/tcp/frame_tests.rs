use proptest::prelude::*;

use super::*;

fn inline(bytes: &[u8]) -> Inline {
    Inline::new(bytes).unwrap()
}

fn remote() -> impl Strategy<Value = RemoteSlice> {
    (any::<u64>(), any::<u64>(), 0..=TRANSFER_BYTES_MAX).prop_map(|(key, offset, len)| RemoteSlice {
        key: RegionKey(key),
        offset,
        len,
    })
}

fn signal() -> impl Strategy<Value = Signal> {
    (any::<u16>(), proptest::collection::vec(any::<u8>(), 0..=SIGNAL_SLOT_PAYLOAD_BYTES))
        .prop_map(|(signal_slot, payload)| Signal { signal_slot, payload: inline(&payload) })
}

fn operation() -> impl Strategy<Value = AtomicOp> {
    prop_oneof![
        any::<u64>().prop_map(AtomicOp::Add),
        any::<(u64, u64)>().prop_map(|(expected, new)| AtomicOp::CompareSwap { expected, new }),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let key = || any::<u64>().prop_map(RegionKey);
    prop_oneof![
        signal().prop_map(|signal| Frame::Signal { signal }),
        (remote(), proptest::option::of(signal()), any::<bool>(), any::<u8>(), any::<u64>()).prop_map(
            |(dst, signal, wants_answer, other_connections, token)| Frame::Put {
                dst,
                signal,
                wants_answer,
                other_connections,
                token
            }
        ),
        (remote(), any::<u64>()).prop_map(|(dst, token)| Frame::Piece { dst, token }),
        (remote(), any::<u8>(), any::<u64>()).prop_map(|(src, connection, token)| Frame::Get {
            src,
            connection,
            token
        }),
        (0..=TRANSFER_BYTES_MAX, any::<u64>()).prop_map(|(len, token)| Frame::GetReply { len, token }),
        (key(), any::<u64>(), operation(), any::<u64>()).prop_map(|(key, offset, op, token)| Frame::Atomic {
            key,
            offset,
            op,
            token
        }),
        any::<(u64, u64)>().prop_map(|(old, token)| Frame::AtomicReply { old, token }),
        (key(), any::<u64>(), any::<u64>()).prop_map(|(key, region_bytes, token)| Frame::Accepted {
            key,
            region_bytes,
            token
        }),
        (key(), any::<u64>()).prop_map(|(key, token)| Frame::Refused { key, token }),
        Just(Frame::DrainMark),
        Just(Frame::DrainAnswer),
        Just(Frame::Bye),
    ]
}

proptest! {
    #[test]
    fn a_frame_comes_back_as_it_was_whatever_follows_it(frame in frame(), rest in any::<[u8; 7]>()) {
        let encoded = frame.encode();
        let mut bytes = encoded.as_bytes().to_vec();
        bytes.extend(rest);
        prop_assert_eq!(Frame::decode(&bytes), Ok(Some((frame, encoded.len()))));
    }

    #[test]
    fn a_part_of_a_frame_asks_for_more_and_nothing_else(frame in frame(), part in 0.0..1.0f64) {
        let encoded = frame.encode();
        let part = (encoded.len() as f64 * part) as usize;
        prop_assert_eq!(Frame::decode(&encoded.as_bytes()[..part]), Ok(None));
    }

    #[test]
    fn a_flipped_bit_is_refused_or_means_something_else(frame in frame(), bit in 0..HEADER_BYTES * 8) {
        let mut bytes = [0; 2 * FRAME_BYTES_MAX];
        bytes[..frame.encode().len()].copy_from_slice(frame.encode().as_bytes());
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(Some((other, _))) = Frame::decode(&bytes) {
            prop_assert_ne!(other, frame);
        }
    }

    #[test]
    fn whatever_decodes_encodes_to_the_same_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..2 * FRAME_BYTES_MAX),
        kind in 0..16u8,
    ) {
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        check(&bytes);
    }
}

/// The assertions of the fuzz target.
fn check(bytes: &[u8]) {
    match Frame::decode(bytes) {
        Ok(Some((frame, used))) => {
            assert_eq!(frame.encode().as_bytes(), &bytes[..used]);
            assert!(frame.body_bytes() <= TRANSFER_BYTES_MAX);
        }
        Ok(None) => assert!(bytes.len() < FRAME_BYTES_MAX, "a whole frame's bytes are enough"),
        Err(_) => {}
    }
}

#[test]
fn the_corpus_of_the_fuzz_target_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/tcp_frame");
    let mut seen = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        check(&std::fs::read(entry.unwrap().path()).unwrap());
        seen += 1;
    }
    assert!(seen >= 12, "only {seen} entries in {corpus}");
}

#[test]
fn lengths_beyond_the_limits_are_refused_before_anything_is_made_of_them() {
    let dst = RemoteSlice { key: RegionKey(1), offset: 0, len: TRANSFER_BYTES_MAX + 1 };
    let frame = Frame::Piece { dst, token: 1 };
    assert_eq!(Frame::decode(frame.encode().as_bytes()), Err(ProtocolViolation::OversizedFrame));
    let mut bytes = *Frame::Bye.encode().as_bytes().first_chunk::<HEADER_BYTES>().unwrap();
    bytes[4] = SIGNAL_SLOT_PAYLOAD_BYTES as u8 + 1;
    assert_eq!(Frame::decode(&bytes), Err(ProtocolViolation::OversizedFrame));
}

#[test]
fn fields_that_a_frame_does_not_use_are_zero() {
    for at in [1, 2, 4, 5, 6, 7, 8, 16, 24, 32] {
        let mut bytes = [0; FRAME_BYTES_MAX];
        bytes[..HEADER_BYTES].copy_from_slice(Frame::Bye.encode().as_bytes());
        bytes[at] = 1;
        assert_eq!(Frame::decode(&bytes), Err(ProtocolViolation::MalformedFrame), "byte {at}");
    }
}
