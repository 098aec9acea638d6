//! No XML makes the importer panic. An imported schedule keeps the limits of the text form, and
//! `verify` accepts or refuses it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_schedule::msccl::import;
use pleach_schedule::verify::verify;

fuzz_target!(|text: &str| {
    if let Ok(schedule) = import(text) {
        let _ = verify(schedule);
    }
});
