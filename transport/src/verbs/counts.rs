//! Counters of a device's requests to its NICs.

use std::fmt;
use std::ops::AddAssign;

/// The work of NIC and processor, counted since the device was made. Counting is part of the data
/// path and costs an addition each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Requests posted to send queues.
    pub requests: u64,
    /// Calls that posted them, each with one doorbell.
    pub doorbells: u64,
    /// Requests that asked for a completion.
    pub signaled: u64,
    /// Requests with inline data.
    pub inlined: u64,
    /// Polls of completion queues.
    pub polls: u64,
    /// Polls that found completions.
    pub polls_with_completions: u64,
    /// Completions of requests and of receives.
    pub completions: u64,
    /// Receives consumed: signals, parts of striped puts, credits.
    pub receives: u64,
    /// Calls that posted receives again.
    pub receive_doorbells: u64,
    /// Memory regions registered, with those of this backend itself; each NIC counts.
    pub registrations: u64,
    /// Memory regions deregistered.
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
