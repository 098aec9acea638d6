//! How a test says that it cannot run here. A test that returns early passes for the test harness;
//! `.ci/run` counts the lines of this form, subtracts them from the tests that passed, and lists
//! the reasons.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write as _;
use std::sync::Mutex;

/// Says why the test of this thread does not apply here; once for each reason, however often a test
/// repeats. The line goes to the terminal: the harness keeps the `println!` and the `eprintln!` of
/// a test that passes to itself. A test that does the rest of its work calls [`skip_part`].
#[allow(dead_code)] // Not every test skips all.
pub(crate) fn skip(why: impl Display) {
    say("skipped", why);
}

/// Says which part of the test of this thread does not apply here. The test counts as one that ran.
#[allow(dead_code)] // Not every test skips a part.
pub(crate) fn skip_part(why: impl Display) {
    say("skipped in part", why);
}

fn say(how: &str, why: impl Display) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let line = format!("{how} {}: {why}", thread.name().unwrap_or("a test"));
    if SAID.lock().expect("nobody panics with it").insert(line.clone()) {
        // In a line of its own and in one piece: the harness writes names without ending the line.
        let _ = std::io::stderr().write_all(format!("\n{line}\n").as_bytes());
    }
}
