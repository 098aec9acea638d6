//! Whatever text comes: no panic; what parses prints to a text that parses to the same; and
//! `verify` answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_schedule::Schedule;
use pleach_schedule::verify::verify;

fuzz_target!(|text: &str| {
    if let Ok(schedule) = Schedule::parse(text) {
        assert_eq!(Schedule::parse(&schedule.to_string()).as_ref(), Ok(&schedule));
        let _ = verify(schedule);
    }
});
