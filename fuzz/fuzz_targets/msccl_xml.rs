//! Whatever XML comes: no panic; what is read as a schedule has the text form's limits; and
//! `verify` answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_schedule::msccl::import;
use pleach_schedule::verify::verify;

fuzz_target!(|text: &str| {
    if let Ok(schedule) = import(text) {
        let _ = verify(schedule);
    }
});
