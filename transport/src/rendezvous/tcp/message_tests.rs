//! The messages between a store and its clients.

use proptest::prelude::*;

use super::*;

fn requests() -> impl Strategy<Value = Request> {
    let key = "[a-z0-9/-]{1,20}";
    let value = || proptest::collection::vec(any::<u8>(), 0..100);
    prop_oneof![
        (key, value()).prop_map(|(key, value)| Request::Set { key, value }),
        (key, value()).prop_map(|(key, value)| Request::Claim { key, value }),
        (proptest::collection::vec(key, 0..9), any::<u64>())
            .prop_map(|(keys, limit_ms)| Request::Wait { keys, limit_ms }),
        ".{0,40}".prop_map(|reason| Request::Fail { reason }),
        Just(Request::Seal),
    ]
}

fn answers() -> impl Strategy<Value = Answer> {
    let value = || proptest::collection::vec(any::<u8>(), 0..100);
    prop_oneof![
        Just(Answer::Done),
        Just(Answer::Taken),
        value().prop_map(Answer::Present),
        proptest::collection::vec(value(), 0..9).prop_map(Answer::Values),
        (proptest::collection::vec(any::<u32>(), 0..9), proptest::option::of(".{1,40}"))
            .prop_map(|(places, refused)| Answer::Missing { places, refused }),
        ".{0,40}".prop_map(Answer::Failed),
        Just(Answer::Refused),
    ]
}

proptest! {
    #[test]
    fn what_is_encoded_decodes_to_itself_and_no_beginning_of_it_decodes(request in requests(), answer in answers()) {
        let bytes = request.encode();
        let (inside, taken) = frame(&bytes, REQUEST_BYTES_MAX).unwrap().unwrap();
        prop_assert_eq!(taken, bytes.len());
        prop_assert_eq!(Request::decode(inside), Ok(request));
        for length in 0..bytes.len() {
            prop_assert_eq!(frame(&bytes[..length], REQUEST_BYTES_MAX), Ok(None));
        }
        let bytes = answer.encode();
        let (inside, _) = frame(&bytes, ANSWER_BYTES_MAX).unwrap().unwrap();
        for length in 0..inside.len() {
            prop_assert_eq!(Answer::decode(&inside[..length]), Err(Malformed));
        }
        prop_assert_eq!(Answer::decode(inside), Ok(answer));
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_what_decodes_encodes_to_the_same(
        bytes in proptest::collection::vec(any::<u8>(), 0..200)
    ) {
        if let Ok(request) = Request::decode(&bytes) {
            prop_assert_eq!(&request.encode()[4..], &bytes[..]);
        }
        if let Ok(answer) = Answer::decode(&bytes) {
            prop_assert_eq!(&answer.encode()[4..], &bytes[..]);
        }
    }
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
    assert_eq!(frame(&u32::MAX.to_le_bytes(), REQUEST_BYTES_MAX), Err(Malformed));
}

#[test]
fn the_handshake_decodes_to_itself_and_tells_other_protocols_by_their_first_byte() {
    let hello = StoreHello { version: 7, protection: Protection::Clear, challenge: [3; TAG_BYTES] };
    assert_eq!(StoreHello::decode(&hello.encode()), Ok(hello));
    let proof = Proof { rank: 3, world_size: 9, answer: [4; TAG_BYTES] };
    assert_eq!(Proof::decode(&proof.encode()), Ok(proof));
    for verdict in [Verdict::Welcome([5; TAG_BYTES]), Verdict::WrongSecret, Verdict::Complete] {
        assert_eq!(Verdict::decode(&verdict.encode()), Ok(verdict));
    }
    assert!(StoreHello::is_prefix(b"") && StoreHello::is_prefix(b"PLEA"));
    assert!(!StoreHello::is_prefix(b"HTTP/1.1 400"));
}
