//! Whatever a peer or a stranger says while ranks meet, or on a control connection of any fabric:
//! no panic, and what decodes survives being encoded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_transport::{rendezvous, shm, tcp, verbs};

fuzz_target!(|bytes: &[u8]| {
    rendezvous::check_decoders(bytes);
    shm::check_decoders(bytes);
    tcp::check_decoders(bytes);
    verbs::check_decoders(bytes);
});
