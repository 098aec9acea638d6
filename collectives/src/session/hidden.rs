//! Healing behind a step ([`Heal::Hidden`](super::Heal)): a process that came takes part in its
//! first step with the neutral element, while it reads the states.
//!
//! **Which version it reads.** States change by [`State::update`](super::State::update) alone,
//! after a step was committed. So during a step they are on all members what they were at its edge.
//! The newcomer reads these, where they lie: nobody copies them. The result of the step comes to it
//! as to all others, and it makes the same update of the same bits. A step is long enough where it
//! computes for as long as the read takes. Where not, `update` waits for the rest, on the newcomer
//! and on all members.
//!
//! **Invariants:**
//!
//! * *No state changes while somebody may read it.* [`Gate`]: `update` on a member waits until each
//!   newcomer has said that it has read all, or until a later epoch was entered, with which all
//!   pairs were drained. (A get is refused once its pair is to be drained.)
//! * *A newcomer updates what it has read to the end, or nothing.* Where the epoch ends before, and
//!   the step counts, its `update` does nothing: it reads the states of the next step, in which the
//!   members have made that update.
//! * *All know who gives nothing.* In the first step of an epoch the ranks that contribute are
//!   those that had the states when it was entered; in all later ones, all. Each has told each.
//! * *Once.* A newcomer takes part in one step so. If that is repeated, or its result came before
//!   the states, the newcomer is healed at the edge of the next.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock};

use super::SessionError;
use super::healing::Kept;

/// Longest wait until the thread is looked at again, in case its end is missed by mistake.
const WAIT_MAX: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Status {
    /// Whether all was read by those that read here: by this process, or from it.
    ended: Option<bool>,
    error: Option<SessionError>,
    /// What was read until the epoch was over.
    kept: Option<Kept>,
    /// Since when this process waits for the end.
    awaited_since: Option<Nanos>,
}

/// The healing behind one step.
pub(crate) struct Hidden {
    epoch: u64,
    step: u64,
    /// This process reads. If not, it lends.
    reads: bool,
    status: Mutex<Status>,
    changed: Condvar,
}

impl Hidden {
    /// Begins it, on a thread. `work` returns whether all was read.
    pub(crate) fn start(
        (epoch, step): (u64, u64),
        reads: bool,
        work: impl FnOnce(&Self) -> Result<bool, SessionError> + Send + 'static,
    ) -> Result<(Arc<Self>, JoinHandle<()>), SessionError> {
        let hidden = Arc::new(Self { epoch, step, reads, status: Mutex::default(), changed: Condvar::new() });
        let own = Arc::clone(&hidden);
        let thread = std::thread::Builder::new().name("pleach-heal".to_owned()).spawn(move || {
            let _told = TellsOfPanic(&own);
            own.end(work(&own));
        });
        Ok((hidden, thread.map_err(SessionError::Thread)?))
    }

    fn end(&self, outcome: Result<bool, SessionError>) {
        let mut status = lock(&self.status);
        match outcome {
            Ok(is_whole) => status.ended = Some(is_whole),
            Err(error) => (status.ended, status.error) = (Some(false), Some(error)),
        }
        drop(status);
        self.changed.notify_all();
    }

    /// Whether it is that of this step, and of this attempt at it.
    pub(crate) fn is_of(&self, epoch: u64, step: u64) -> bool {
        (self.epoch, self.step) == (epoch, step)
    }

    /// Whether this process reads.
    pub(crate) fn reads(&self) -> bool {
        self.reads
    }

    /// Since when this process waits for the end.
    pub(crate) fn awaited_since(&self) -> Option<Nanos> {
        lock(&self.status).awaited_since
    }

    /// Keeps what was read, for the next attempt at this step.
    pub(crate) fn keep(&self, kept: Option<Kept>) {
        lock(&self.status).kept = kept;
    }

    pub(crate) fn take_kept(&self) -> Option<Kept> {
        lock(&self.status).kept.take()
    }

    /// Why it could not be done, if so.
    pub(crate) fn take_error(&self) -> Option<SessionError> {
        lock(&self.status).error.take()
    }

    /// Waits for the end. Returns whether all was read. The epoch ends it at the latest.
    pub(crate) fn await_end(&self) -> bool {
        let mut status = lock(&self.status);
        status.awaited_since.get_or_insert_with(clock::now);
        loop {
            if let Some(is_whole) = status.ended {
                return is_whole;
            }
            let waited = self.changed.wait_timeout(status, WAIT_MAX);
            status = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Ends it where its thread panics.
struct TellsOfPanic<'a>(&'a Hidden);

impl Drop for TellsOfPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Err(SessionError::ThreadEnded));
        }
    }
}

/// What `update` of all states of a session waits for; see the module.
#[derive(Default)]
pub(crate) struct Gate(Mutex<Option<Arc<Hidden>>>);

impl Gate {
    /// From now on, the end of this is waited for.
    pub(crate) fn close(&self, hidden: Arc<Hidden>) {
        *lock(&self.0) = Some(hidden);
    }

    /// Nothing is waited for.
    pub(crate) fn open(&self) {
        *lock(&self.0) = None;
    }

    /// Returns when states may change. False: this process has not got those that were to change.
    pub(crate) fn pass(&self) -> bool {
        let hidden = lock(&self.0).clone();
        hidden.is_none_or(|hidden| hidden.await_end() || !hidden.reads)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// One that ends with what is sent.
    fn under_way(reads: bool) -> (Gate, std::sync::mpsc::Sender<bool>, JoinHandle<()>) {
        let (sender, end) = channel();
        let (hidden, thread) =
            Hidden::start((3, 7), reads, move |_| Ok(end.recv().unwrap_or(false))).expect("a thread");
        let gate = Gate::default();
        gate.close(hidden);
        (gate, sender, thread)
    }

    #[test]
    fn a_member_waits_until_nobody_reads_and_then_changes_its_states() {
        for is_whole in [true, false] {
            let (gate, sender, thread) = under_way(false);
            let gate = Arc::new(gate);
            let (passed, has_passed) = channel();
            let waits = {
                let gate = Arc::clone(&gate);
                std::thread::spawn(move || passed.send(gate.pass()).expect("is awaited"))
            };
            let is_awaited = || lock(&gate.0).as_ref().is_some_and(|hidden| hidden.awaited_since().is_some());
            while !is_awaited() {
                std::thread::yield_now();
            }
            assert!(has_passed.try_recv().is_err(), "nobody has read all");
            sender.send(is_whole).expect("it is under way");
            assert!(has_passed.recv().expect("passes"), "the members' states stand");
            waits.join().expect("ends");
            thread.join().expect("ends");
        }
    }

    #[test]
    fn who_has_not_read_all_changes_nothing() {
        for is_whole in [true, false] {
            let (gate, sender, thread) = under_way(true);
            sender.send(is_whole).expect("it is under way");
            assert_eq!(gate.pass(), is_whole);
            thread.join().expect("ends");
            gate.open();
            assert!(gate.pass(), "nothing is under way");
        }
    }

    #[test]
    fn a_thread_that_panics_ends_it_with_an_error() {
        let (hidden, thread) = Hidden::start((0, 0), true, |_| panic!("on purpose")).expect("a thread");
        assert!(!hidden.await_end());
        assert!(matches!(hidden.take_error(), Some(SessionError::ThreadEnded)));
        thread.join().expect_err("has panicked");
    }
}
