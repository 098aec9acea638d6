//! Records in a store outside of the job, where the rendezvous has one.
//!
//! The state machine asks for a record to be written once, or read; a thread of its own does so, as
//! a store blocks. What was not done is asked for again: the state machine reads at each tick while
//! members change, and proposes anew. So of what waits only the newest is kept, and a store that is
//! away is noticed only then.
//!
//! **Invariant:** nothing waits for the store with the member's lock. A request ends at a deadline.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_membership::{Input, Record, Seat};
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::Registers;
use pleach_transport::{Nanos, clock};

use super::{Member, State};
use crate::session::TellsOfPanic;

/// How long the store may take to answer a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);

/// Without a failure for so long the store has been asked for nothing, or has answered. Longer
/// where members are suspected late: they ask the store no more often than that.
const FAILURES_END: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Pending {
    write: Option<Arc<Record>>,
    read: Option<u64>,
    is_over: bool,
}

/// What waits for the store.
#[derive(Default)]
pub(crate) struct RecordRequests {
    pending: Mutex<Pending>,
    changed: Condvar,
}

impl RecordRequests {
    pub(super) fn write(&self, record: Arc<Record>) {
        lock(&self.pending).write = Some(record);
        self.changed.notify_all();
    }

    pub(super) fn read(&self, number: u64) {
        lock(&self.pending).read = Some(number);
        self.changed.notify_all();
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        lock(&self.pending).is_over = true;
        self.changed.notify_all();
    }

    /// The next request; `None`: there are none any more.
    fn next(&self) -> Option<Request> {
        let mut pending = lock(&self.pending);
        loop {
            if pending.is_over {
                return None;
            }
            if let Some(record) = pending.write.take() {
                return Some(Request::Write(record));
            }
            if let Some(number) = pending.read.take() {
                return Some(Request::Read(number));
            }
            // Woken by whoever asks, or ends it.
            pending = self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

enum Request {
    Write(Arc<Record>),
    Read(u64),
}

/// Since when the store has failed, last, and why.
#[derive(Clone, Debug)]
pub(crate) struct StoreFault {
    reason: String,
    /// Whether a write was among what failed: reads may go on where nothing can be written.
    is_of_write: bool,
    first: Nanos,
    last: Nanos,
}

impl StoreFault {
    /// A request has failed. `end`: after how long the fault before is another one.
    fn after(before: Option<Self>, reason: String, is_write: bool, now: Nanos, end: Duration) -> Self {
        let before = before.filter(|fault| now.since(fault.last) < end);
        let first = before.as_ref().map_or(now, |fault| fault.first);
        let is_of_write = is_write || before.is_some_and(|fault| fault.is_of_write);
        Self { reason, is_of_write, first, last: now }
    }

    /// Whether a request that was answered leaves the fault. A read says nothing of writes.
    fn outlasts_answer(&self, is_write: bool) -> bool {
        self.is_of_write && !is_write
    }

    fn has_lasted(&self, limit: Duration, now: Nanos, end: Duration) -> bool {
        self.last.since(self.first) >= limit && now.since(self.last) < end
    }
}

/// The record that lies at a number. Its seats are places in tables of the device.
fn record_at(number: u64, bytes: &[u8], has_seat: impl Fn(Seat) -> bool) -> Result<Record, String> {
    let record = Record::decode(bytes).map_err(|error| format!("is no record: {error}"))?;
    if record.number() != number {
        return Err(format!("is record {} instead of {number}", record.number()));
    }
    if !has_seat(record.highest_seat()) {
        return Err(format!("names {}, which there is not", record.highest_seat()));
    }
    Ok(record)
}

impl Member {
    /// Writes and reads records for the state machine until the session is over.
    pub(crate) fn keep_records(self: &Arc<Self>, registers: Registers) -> std::io::Result<JoinHandle<()>> {
        let member = Arc::clone(self);
        let thread = std::thread::Builder::new().name("pleach-records".to_owned());
        thread.spawn(move || {
            let _told = TellsOfPanic(&member);
            member.serve_records(registers);
        })
    }

    fn serve_records(&self, mut registers: Registers) {
        while let Some(request) = self.records.next() {
            let deadline = clock::now() + REQUEST_LIMIT;
            let (number, is_write, found) = match &request {
                Request::Write(record) => {
                    let number = record.number();
                    (number, true, registers.write_once(number, &record.encode(), deadline).map(Some))
                }
                Request::Read(number) => (*number, false, registers.read(*number, deadline)),
            };
            let decoded = found.map_err(|error| error.to_string()).and_then(|found| {
                let record = found.map(|bytes| record_at(number, &bytes, |seat| self.has_seat(seat)));
                record.transpose().map_err(|error| format!("what lies at {} {error}", registers.address()))
            });
            let mut state = self.lock();
            match decoded {
                // It says why.
                _ if state.store_is_lost => {}
                Ok(found) => {
                    state.store_fault =
                        state.store_fault.take().filter(|fault| fault.outlasts_answer(is_write));
                    if let Some(record) = found {
                        self.tell(&mut state, Input::Stands(Arc::new(record)));
                    }
                }
                Err(reason) => {
                    tracing::debug!("a record is not written or read: {reason}");
                    let before = state.store_fault.take();
                    let fault =
                        StoreFault::after(before, reason, is_write, clock::now(), self.failures_end());
                    state.store_fault = Some(fault);
                }
            }
            drop(state);
            self.incoming.wake_caller();
        }
    }

    fn failures_end(&self) -> Duration {
        FAILURES_END.max(self.elastic.suspect_after.saturating_mul(3))
    }

    /// Ends what waits for a record that does not come.
    pub(super) fn give_up_without_record(&self, state: &mut State, now: Nanos) {
        self.give_up_without_quorum(state, now);
        self.give_up_without_store(state, now);
    }

    /// Ends what waits for members that are too few to go on.
    fn give_up_without_quorum(&self, state: &mut State, now: Nanos) {
        if !state.has_given_up && state.membership.has_lost_every_unit(self.elastic.quorum_wait) {
            state.has_lost_units = true;
            return self.give_up(state, "no unit of members is whole");
        }
        let Some((.., since)) = state.no_quorum else { return };
        if state.has_given_up || now.since(since) < self.elastic.quorum_wait {
            return;
        }
        self.give_up(state, "too few members answer");
    }

    /// Ends what waits for a store that has failed for too long.
    fn give_up_without_store(&self, state: &mut State, now: Nanos) {
        let (limit, end) = (self.elastic.quorum_wait, self.failures_end());
        let is_lost = state.store_fault.as_ref().is_some_and(|fault| fault.has_lasted(limit, now, end));
        if state.has_given_up || !is_lost {
            return;
        }
        state.store_is_lost = true;
        self.give_up(state, "the store of records is of no use");
    }
}

impl State {
    /// Whether too few members answer to agree on a record, or there are none to agree on.
    pub(crate) fn lacks_quorum(&self) -> bool {
        self.no_quorum.is_some() || self.membership.has_lost_every_unit(Duration::ZERO)
    }

    /// Whether this process has given up because no unit is whole.
    pub(crate) fn has_lost_units(&self) -> bool {
        self.has_lost_units
    }

    /// After this process has given up: who answered, of how many.
    pub(crate) fn without_quorum(&self) -> Option<(usize, usize)> {
        self.no_quorum.filter(|_| self.has_given_up).map(|(answered, members, _)| (answered, members))
    }

    /// After this process has given up for want of the store: why.
    pub(crate) fn without_store(&self) -> Option<String> {
        let fault = self.store_fault.as_ref().filter(|_| self.store_is_lost);
        fault.map(|fault| fault.reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use pleach_membership::Process;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn at(seconds: u64) -> Nanos {
        Nanos(0) + Duration::from_secs(seconds)
    }

    fn failed(before: Option<StoreFault>, is_write: bool, seconds: u64, end: Duration) -> StoreFault {
        StoreFault::after(before, "full".to_owned(), is_write, at(seconds), end)
    }

    #[test]
    fn a_store_that_is_read_and_not_written_is_given_up() {
        let mut fault = None;
        for second in 0..=20 {
            let write = failed(fault.take(), true, second, FAILURES_END);
            // The next record is looked for, and not there.
            fault = Some(write).filter(|fault| fault.outlasts_answer(false));
            let has_lasted =
                fault.as_ref().is_some_and(|fault| fault.has_lasted(LIMIT, at(second), FAILURES_END));
            assert_eq!(has_lasted, second == 20, "after {second} s");
        }
        assert!(fault.is_some_and(|fault| !fault.outlasts_answer(true)), "a write stands");
        assert!(!failed(None, false, 0, FAILURES_END).outlasts_answer(false), "a read's fault");
    }

    #[test]
    fn faults_that_are_far_apart_are_several() {
        let lasts = |end: Duration| {
            let fault = (0..4).fold(None, |before, turn| Some(failed(before, true, 10 * turn, end)));
            fault.expect("has failed").has_lasted(LIMIT, at(30), end)
        };
        assert!(!lasts(FAILURES_END));
        assert!(lasts(Duration::from_secs(30)), "members are suspected after 10 s");
    }

    #[test]
    fn a_record_of_another_number_or_of_seats_that_there_are_not_is_refused() {
        let bytes = Record::first(vec![Process::new(1_000_000, 1)]).expect("has a member").encode();
        let error = |number, seats| record_at(number, &bytes, |seat| seat.0 < seats).expect_err("is refused");
        assert!(error(0, 8).contains("1000000"), "{}", error(0, 8));
        assert!(error(3, u32::MAX).contains("record 0 instead of 3"), "{}", error(3, u32::MAX));
        assert!(record_at(0, &bytes[1..], |_| true).is_err());
        assert_eq!(record_at(0, &bytes, |_| true).map(|record| record.number()), Ok(0));
    }
}
