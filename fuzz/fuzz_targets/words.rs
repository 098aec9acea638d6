//! Whatever words and writes the peers of a rank send, in whatever order things end: no scheme's
//! policy panics or breaks an invariant, it asks for few things, and it comes to its end, waits for
//! a peer, or refuses a word and names who sent it.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../training/tests/words/mod.rs"]
mod words;

fuzz_target!(|bytes: &[u8]| {
    let _ = words::tell(bytes);
});
