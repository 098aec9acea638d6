//! What a device has asked of its NICs so far.

use std::fmt;
use std::ops::AddAssign;

/// The work of NIC and processor that speed is made of, counted since the device was made. Counting
/// is part of the data path and costs an addition each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Requests posted to send queues.
    pub requests: u64,
    /// Calls that posted them, each one ring of a doorbell.
    pub doorbells: u64,
    /// Requests that asked for a completion.
    pub signaled: u64,
    /// Requests that carried their bytes themselves.
    pub inlined: u64,
    /// Looks at completion queues.
    pub polls: u64,
    /// Those that found something.
    pub polls_with_completions: u64,
    /// Completions found, of requests and of receives.
    pub completions: u64,
    /// Receives used up: signals, parts of striped puts, credits.
    pub receives: u64,
    /// Calls that posted receives anew.
    pub receive_doorbells: u64,
    /// Memory regions that a NIC was given, those of this backend among them; each NIC counts.
    pub registrations: u64,
    /// Those of them that were taken back.
    pub deregistrations: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.doorbells += other.doorbells;
        self.signaled += other.signaled;
        self.inlined += other.inlined;
        self.polls += other.polls;
        self.polls_with_completions += other.polls_with_completions;
        self.completions += other.completions;
        self.receives += other.receives;
        self.receive_doorbells += other.receive_doorbells;
        self.registrations += other.registrations;
        self.deregistrations += other.deregistrations;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, doorbells, signaled, inlined, .. } = self;
        let Self { polls, polls_with_completions, completions, receives, receive_doorbells, .. } = self;
        let Self { registrations, deregistrations, .. } = self;
        write!(
            formatter,
            "{requests} requests ({signaled} signaled, {inlined} inline) by {doorbells} doorbells, {completions} completions by \
             {polls_with_completions} of {polls} polls, {receives} receives used up and posted by {receive_doorbells} doorbells, \
             {registrations} regions registered and {deregistrations} taken back"
        )
    }
}
