//! The thread of an endpoint that calls functions of the caller.
//!
//! The exchange reports under its lock that a receive has ended and that memory is no longer lent.
//! No function of the caller may run under this lock. So both reports are put into a queue. This
//! thread takes them out and calls the functions of the caller.
//!
//! **Invariant:** each function is called exactly once. This thread calls it. Only for memory that
//! is given back after [`Callbacks::close`], the thread that gives the memory back calls it.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_exchange::{Key, PendingTensor};
use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::mutex::lock;

use super::OpenEndpoint;
use super::failure::{Call, cancelled};
use super::receive::{RECEIVES, finished, pleachReceive_t};
use super::tensor::{TENSORS, pleachTensor_t};
use crate::result::{Failed, keep_text, pleachResult_t};

/// How long the thread sleeps if no receive has a deadline.
const IDLE: Duration = Duration::from_secs(3600);

/// Memory of the caller that is to be given back. Dropping gives it back, once.
pub(crate) struct Release {
    pub(crate) function: unsafe extern "C" fn(address: *mut c_void, context: *mut c_void),
    pub(crate) address: *mut c_void,
    pub(crate) context: *mut c_void,
}

// SAFETY: an address and a function that any thread may call, as the caller promises.
unsafe impl Send for Release {}
// SAFETY: as above.
unsafe impl Sync for Release {}

impl Drop for Release {
    fn drop(&mut self) {
        // SAFETY: the caller's promise; this is the only call.
        unsafe { (self.function)(self.address, self.context) }
    }
}

/// The function that is called at the end of a receive.
#[derive(Clone, Copy)]
pub(crate) struct Callback {
    pub(crate) function: unsafe extern "C" fn(*mut c_void, pleachResult_t, pleachTensor_t),
    pub(crate) context: *mut c_void,
}

// SAFETY: a function that any thread may call, as the caller promises.
unsafe impl Send for Callback {}

/// A receive whose end a callback reports.
pub(crate) struct Told {
    pub(crate) endpoint: Arc<OpenEndpoint>,
    pub(crate) pending: PendingTensor,
    pub(crate) key: Key,
    pub(crate) peer: String,
    pub(crate) begun: Nanos,
    pub(crate) deadline: Nanos,
    pub(crate) callback: Callback,
    /// The number of its handle.
    pub(crate) handle: usize,
}

impl Told {
    fn call(&self) -> Call<'_> {
        Call { key: &self.key, peer: &self.peer, waited: now().since(self.begun) }
    }

    /// Calls the callback.
    fn end(self, is_cancelled: bool) {
        let Callback { function, context } = self.callback;
        let handle: pleachReceive_t = std::ptr::without_provenance_mut(self.handle);
        // The handle was taken already if the receive was cancelled.
        drop(RECEIVES.take(handle));
        let ended = if is_cancelled {
            let failed = cancelled(&self.call());
            drop(self.pending);
            Err(failed)
        } else {
            let (endpoint, key, peer) = (self.endpoint, self.key, self.peer);
            finished(&endpoint, self.pending.wait(), &key, &peer, self.begun)
        };
        let (result, tensor) = match ended.and_then(|tensor| TENSORS.keep(tensor)) {
            Ok(tensor) => (pleachResult_t::pleachSuccess, tensor),
            Err(failed) => (keep_text(failed), std::ptr::null_mut()),
        };
        // SAFETY: the caller's promise; this is the only call, and no lock is held.
        unsafe { function(context, result, tensor) }
    }
}

enum Job {
    Receive(u64, Box<Told>),
    Ended(u64),
    Cancel(u64),
    Release(Release),
    Close,
}

/// The thread of an endpoint that calls functions of the caller; see the module.
#[derive(Default)]
pub(crate) struct Callbacks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    thread: Option<CallbackThread>,
    is_closed: bool,
    last: u64,
}

struct CallbackThread {
    jobs: Sender<Job>,
    handle: JoinHandle<()>,
}

impl Callbacks {
    /// The queue. The thread that empties it is started if it does not run.
    fn jobs(state: &mut State) -> Result<Sender<Job>, Failed> {
        if state.is_closed {
            return Err(Failed::usage("the endpoint was closed"));
        }
        if state.thread.is_none() {
            let (jobs, queue) = mpsc::channel();
            let spawned = std::thread::Builder::new()
                .name("pleach-callbacks".to_owned())
                .spawn(move || run(&queue))
                .map_err(|error| Failed::system(format!("the system refuses a thread: {error}")))?;
            state.thread = Some(CallbackThread { jobs, handle: spawned });
        }
        Ok(state.thread.as_ref().map(|thread| thread.jobs.clone()).expect("it was made"))
    }

    /// Has the callback of a receive called at its end. `keep` makes a handle from the number of
    /// the receive.
    pub(crate) fn tell(
        &self,
        mut told: Box<Told>,
        keep: impl FnOnce(u64) -> Result<pleachReceive_t, Failed>,
    ) -> Result<(), Failed> {
        let mut state = lock(&self.state);
        let jobs = Self::jobs(&mut state)?;
        state.last += 1;
        let (last, ends) = (state.last, jobs.clone());
        told.handle = keep(last)?.addr();
        // The thread that finds the end puts the end into the queue.
        told.pending.on_end(move || drop(ends.send(Job::Ended(last))));
        drop(jobs.send(Job::Receive(last, told)));
        Ok(())
    }

    /// Has a receive cancelled. Its callback is called in this case too.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(thread) = &lock(&self.state).thread {
            drop(thread.jobs.send(Job::Cancel(number)));
        }
    }

    /// A guard of memory. When a thread drops it, the thread of callbacks gives the memory back.
    pub(crate) fn guard(&self, release: impl FnOnce() -> Release) -> Result<Arc<ReleaseGuard>, Failed> {
        let jobs = Self::jobs(&mut lock(&self.state))?;
        Ok(Arc::new(ReleaseGuard { release: Mutex::new(Some(release())), jobs }))
    }

    /// Ends all receives and the thread, and waits for its end unless this is the thread itself.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let thread = state.thread.take();
        drop(state);
        let Some(CallbackThread { jobs, handle }) = thread else { return };
        drop(jobs.send(Job::Close));
        if handle.thread().id() != std::thread::current().id() {
            // A panic of a callback has ended the process.
            let _ = handle.join();
        }
    }
}

/// Dropping it has memory of the caller given back.
pub(crate) struct ReleaseGuard {
    release: Mutex<Option<Release>>,
    jobs: Sender<Job>,
}

impl ReleaseGuard {
    /// Forgets the memory: it was not taken, so nothing is called.
    pub(crate) fn disarm(&self) {
        std::mem::forget(lock(&self.release).take());
    }
}

impl Drop for ReleaseGuard {
    fn drop(&mut self) {
        if let Some(release) = lock(&self.release).take() {
            // If the thread has ended, the job is dropped here, which gives the memory back.
            drop(self.jobs.send(Job::Release(release)));
        }
    }
}

/// The function of the thread.
fn run(queue: &Receiver<Job>) {
    let mut receives: BTreeMap<u64, Box<Told>> = BTreeMap::new();
    loop {
        let at = now();
        let next = receives.values().map(|told| told.deadline).min();
        let wait = next.map_or(IDLE, |deadline| deadline.since(at));
        match queue.recv_timeout(wait) {
            // The receive has ended, and its end came before the receive in the queue.
            Ok(Job::Receive(_, told)) if told.pending.is_ready() => told.end(false),
            Ok(Job::Receive(number, told)) => drop(receives.insert(number, told)),
            Ok(Job::Ended(number)) => end(&mut receives, number, false),
            Ok(Job::Cancel(number)) => end(&mut receives, number, true),
            Ok(Job::Release(release)) => drop(release),
            Ok(Job::Close) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let at = now();
                let late = receives.iter().filter(|(_, told)| told.deadline <= at);
                let late: Vec<u64> = late.map(|(number, _)| *number).collect();
                late.into_iter().for_each(|number| end(&mut receives, number, false));
            }
        }
    }
    // The links have ended, so the receives have ended too.
    receives.into_values().for_each(|told| {
        let is_ready = told.pending.is_ready();
        told.end(!is_ready);
    });
}

fn end(receives: &mut BTreeMap<u64, Box<Told>>, number: u64, is_cancelled: bool) {
    if let Some(told) = receives.remove(&number) {
        told.end(is_cancelled);
    }
}
