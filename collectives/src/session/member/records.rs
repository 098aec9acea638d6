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

use pleach_membership::{Input, Record};
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::Registers;
use pleach_transport::{Nanos, clock};

use super::{Member, State};

/// How long the store may take to answer a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);

/// Without a failure for so long the store has been asked for nothing, or has answered.
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
    first: Nanos,
    last: Nanos,
}

impl Member {
    /// Writes and reads records for the state machine until the session is over.
    pub(crate) fn keep_records(self: &Arc<Self>, registers: Registers) -> std::io::Result<JoinHandle<()>> {
        let member = Arc::clone(self);
        let thread = std::thread::Builder::new().name("pleach-records".to_owned());
        thread.spawn(move || member.serve_records(registers))
    }

    fn serve_records(&self, mut registers: Registers) {
        while let Some(request) = self.records.next() {
            let deadline = clock::now() + REQUEST_LIMIT;
            let found = match &request {
                Request::Write(record) => {
                    registers.write_once(record.number(), &record.encode(), deadline).map(Some)
                }
                Request::Read(number) => registers.read(*number, deadline),
            };
            let decoded = found.map_err(|error| error.to_string()).and_then(|found| {
                let record = found.map(|bytes| Record::decode(&bytes)).transpose();
                record.map_err(|error| format!("what lies at {} is no record: {error}", registers.address()))
            });
            let mut state = self.lock();
            match decoded {
                Ok(Some(record)) => {
                    state.store_fault = None;
                    self.tell(&mut state, Input::Stands(Arc::new(record)));
                }
                Ok(None) => state.store_fault = None,
                Err(reason) => state.store_has_failed(reason, clock::now()),
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends what waits for a store that has failed for too long.
    pub(super) fn give_up_without_store(&self, state: &mut State, now: Nanos) {
        if state.has_given_up || !state.is_without_store(now, self.elastic.quorum_wait) {
            return;
        }
        state.store_is_lost = true;
        self.give_up(state, "the store of records is of no use");
    }
}

impl State {
    fn store_has_failed(&mut self, reason: String, now: Nanos) {
        tracing::debug!("a record is not written or read: {reason}");
        let before = self.store_fault.take().filter(|fault| now.since(fault.last) < FAILURES_END);
        let first = before.map_or(now, |fault| fault.first);
        self.store_fault = Some(StoreFault { reason, first, last: now });
    }

    fn is_without_store(&self, now: Nanos, limit: Duration) -> bool {
        let fault = self.store_fault.as_ref();
        fault.is_some_and(|fault| {
            fault.last.since(fault.first) >= limit && now.since(fault.last) < FAILURES_END
        })
    }

    /// After this process has given up for want of the store: why.
    pub(crate) fn without_store(&self) -> Option<String> {
        let fault = self.store_fault.as_ref().filter(|_| self.store_is_lost);
        fault.map(|fault| fault.reason.clone())
    }
}
