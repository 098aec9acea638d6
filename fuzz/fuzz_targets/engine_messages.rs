//! Whatever messages two peers send to a rank, questions, answers and claims of why the group has
//! failed: no panic, and what the rank answers is understood by another one. Whatever processes and
//! people send to a member of a session: no panic, and what decodes survives being encoded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_collectives::engine::StatusBoard;
use pleach_collectives::session::check_decoders;
use pleach_transport::Responder;

/// Before a message: which peer sends it, and how long it is.
const HEADER_BYTES: usize = 3;

fuzz_target!(|bytes: &[u8]| {
    check_decoders(bytes);
    let (board, peer) = (StatusBoard::new(0), StatusBoard::new(1));
    let mut rest = bytes;
    while let Some(([from, low, high], messages)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let (message, others) = messages.split_at(messages.len().min(usize::from(u16::from_le_bytes([*low, *high]))));
        if let Some(answer) = board.message(1 + u32::from(from & 1), message) {
            assert!(StatusBoard::understands(&answer), "{answer:?}");
            assert_eq!(peer.message(0, &answer), None, "an answer is not answered");
        }
        rest = others;
    }
});
