//! Whatever bytes come on a data lane: no panic, and what decodes encodes to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_transport::tcp::frame::{FRAME_BYTES_MAX, Frame, TRANSFER_BYTES_MAX};

fuzz_target!(|bytes: &[u8]| {
    match Frame::decode(bytes) {
        Ok(Some((frame, used))) => {
            assert_eq!(frame.encode().as_bytes(), &bytes[..used]);
            assert!(frame.body_bytes() <= TRANSFER_BYTES_MAX);
        }
        Ok(None) => assert!(bytes.len() < FRAME_BYTES_MAX),
        Err(_) => {}
    }
});
