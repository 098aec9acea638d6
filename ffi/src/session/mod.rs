//! Sessions: a job whose processes come and go, as `pleach_collectives::session` has it.
//!
//! **Invariant:** one call at a time is made on a session; a second thread is refused at once. The
//! communicator of an epoch belongs to the session: it ends when the next epoch is entered, and
//! before the session does. The memory of buffers and states stays until pleachSessionDestroy, also
//! after pleachSessionLeave.

pub mod change;
pub mod elastic;
pub mod memory;
pub mod split;

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pleach_collectives::session::Change;
use pleach_collectives::{CollectiveError, Group, Options, Session, SessionError, Verdict};
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::World;

use crate::batch::expect_no_batch;
use crate::comm::{CommFailure, configured, pleachComm_t, pleachConfig_t, world_of};
use crate::handles::Handles;
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};
use crate::unique_id::{pleachUniqueId, release};
use change::{pleachVerdict_t, told};
pub use elastic::pleachElastic_t;
use memory::Kept;
use split::Part;

/// A session. Its contents are opaque to the caller.
pub struct pleachSession(());

/// A session: this process's membership in a job that makes steps. NULL is no session.
pub type pleachSession_t = *mut pleachSession;

/// What a session is at. Begin with PLEACH_SESSION_INFO_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachSessionInfo_t {
    /// sizeof(pleachSessionInfo_t).
    pub size: usize,
    /// The next step. Every step before it is committed.
    pub step: u64,
    /// The number of the newest epoch that this process knows.
    pub epoch: u64,
    /// The stable number of this process.
    pub seat: c_int,
    /// Whether what this process gives counts in the step that has begun (1). With pleachHealHidden
    /// it does not (0) while the process reads the states.
    pub contributes: c_int,
}

/// The session behind a handle.
struct Joined {
    /// The process that has joined. A forked child is another one.
    process: u32,
    live: Mutex<Live>,
}

/// A session with what the caller has of it. The fields are dropped in this order.
struct Live {
    /// The communicator of the epoch in which a step was begun last.
    epoch: Option<EpochComm>,
    /// The splits, by number.
    parts: Vec<Part>,
    /// `None` after pleachSessionLeave.
    session: Option<Box<Session>>,
    kept: Kept,
    /// What a call has told last.
    change: Option<Arc<Change>>,
}

/// A communicator of an epoch, which ends with this.
pub(crate) struct EpochComm {
    epoch: u64,
    /// Its handle.
    number: usize,
    /// Why its group has failed, which stays when the caller destroys it.
    failure: CommFailure,
}

impl EpochComm {
    fn new(epoch: u64, group: Group) -> Result<Self, Failed> {
        let made = crate::comm::keep(group)?;
        let failure = crate::comm::find(made)?.kept_failure();
        Ok(Self { epoch, number: made.addr(), failure })
    }

    /// Whether it is that of this epoch, and the caller has not destroyed it.
    fn is_of(&self, epoch: u64) -> bool {
        self.epoch == epoch && crate::comm::find(self.handle()).is_ok()
    }

    fn handle(&self) -> pleachComm_t {
        std::ptr::without_provenance_mut(self.number)
    }
}

impl Drop for EpochComm {
    fn drop(&mut self) {
        // The caller may have destroyed it.
        drop(crate::comm::take(self.handle()));
    }
}

static SESSIONS: Handles<Joined> = Handles::new("session", "session");

impl Drop for Joined {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The session is the parent's. Its threads are not here, so nobody would end them.
            let live = self.live.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            let ours = (live.epoch.take(), std::mem::take(&mut live.parts));
            std::mem::forget((ours, live.session.take(), std::mem::take(&mut live.kept)));
        }
    }
}

impl Joined {
    /// Locks the session for one call.
    fn lock(&self) -> Result<MutexGuard<'_, Live>, Failed> {
        if self.process != std::process::id() {
            return Err(Failed::usage(format!(
                "this session belongs to process {}; a forked child must join as a process of its own",
                self.process
            )));
        }
        match self.live.try_lock() {
            Ok(live) => Ok(live),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(Failed::usage("another thread is in a call on this session; make one call at a time"))
            }
        }
    }
}

impl Live {
    fn session(&mut self) -> Result<&mut Session, Failed> {
        self.session.as_deref_mut().ok_or_else(left)
    }

    /// Refuses a call that stands between two steps.
    fn expect_no_step(&mut self) -> Result<&mut Session, Failed> {
        let session = self.session()?;
        match session.attempted_epoch() {
            None => Ok(session),
            Some(_) => Err(Failed::usage("a step has begun; call pleachSessionCommit first")),
        }
    }

    /// The failure of a call. Keeps the change that it tells.
    fn failed(&mut self, error: SessionError) -> Failed {
        if let SessionError::Expelled(change) = &error {
            self.change = Some(Arc::clone(change));
        }
        error.into()
    }

    /// The communicator of the epoch in which a step has begun.
    fn communicator(&mut self) -> Result<pleachComm_t, Failed> {
        let session = self.session.as_deref().ok_or_else(left)?;
        let epoch = session.attempted_epoch().ok_or_else(|| Failed::from(SessionError::NotBegun))?;
        if let Some(known) = self.epoch.as_ref().filter(|known| known.is_of(epoch)) {
            return Ok(known.handle());
        }
        if self.epoch.as_ref().is_none_or(|known| known.epoch != epoch) {
            self.parts.iter_mut().for_each(Part::end);
        }
        self.epoch = None;
        let made = EpochComm::new(epoch, session.group()?.clone())?;
        let handle = made.handle();
        crate::comm::find(handle)?.registrations.lend(self.kept.buffers());
        self.epoch = Some(made);
        Ok(handle)
    }

    /// Why a communicator of the epoch has failed, if one has.
    fn cause(&self) -> Option<CollectiveError> {
        let mut all = self.epoch.iter().chain(self.parts.iter().filter_map(Part::comm));
        let fault = all.find_map(|comm| lock(&comm.failure).clone())?;
        Some(CollectiveError::Failed(fault))
    }

    /// The next step has begun: keeps the change that came with it, if there was one.
    fn note_change(&mut self) {
        let newest = self.session.as_deref().and_then(Session::change);
        let told = self.change.as_ref().map_or(0, |told| told.epoch);
        if let Some(newest) = newest.filter(|newest| newest.epoch > told) {
            self.change = Some(Arc::clone(newest));
        }
    }

    /// Ends a step that the caller cannot make: the others do not wait for it.
    fn give_step_up(&mut self) {
        let Some(session) = self.session.as_deref_mut() else { return };
        match session.commit(Err(CollectiveError::Closed)) {
            Ok(Verdict::Retry(change)) => self.change = Some(change),
            Ok(Verdict::Committed) => {}
            Err(error) => drop(self.failed(error)),
        }
    }
}

fn left() -> Failed {
    Failed::usage("this process has left the session; join a new one")
}

impl From<SessionError> for Failed {
    fn from(error: SessionError) -> Self {
        use pleachResult_t::*;
        let result = match &error {
            SessionError::Expelled(_) => pleachExpelled,
            SessionError::NoQuorum { .. } | SessionError::UnitsLost { .. } => pleachNoQuorum,
            SessionError::TooFew { .. } => pleachTooFew,
            SessionError::Step { .. } => pleachStepFailed,
            SessionError::Left => pleachLeft,
            SessionError::Diverged { .. } => pleachDiverged,
            SessionError::StatesLost | SessionError::StatesNotRead { .. } => pleachRemoteError,
            SessionError::NotAdmitted { .. } => pleachTimeout,
            SessionError::Limits { .. }
            | SessionError::Signal { .. }
            | SessionError::StateTaken(_)
            | SessionError::StateName { .. }
            | SessionError::StateInUse(_)
            | SessionError::Unsupported { .. } => pleachInvalidArgument,
            SessionError::NotBegun | SessionError::StatesDiffer { .. } => pleachInvalidUsage,
            SessionError::ThreadEnded => pleachInternalError,
            _ => pleachSystemError,
        };
        let text = match &error {
            SessionError::NotBegun => {
                "no step has begun; call pleachSessionNext before pleachSessionCommit".to_owned()
            }
            SessionError::Left => {
                "this process has left the job, as it was told to; end its loop and call pleachSessionLeave"
                    .to_owned()
            }
            // What the program's own step says, the program knows.
            SessionError::Step { step, times, own: Some(own), .. }
                if matches!(**own, CollectiveError::Closed) =>
            {
                format!("step {step} failed {times} times in a row on this member")
            }
            error => error.to_string(),
        };
        Self { result, text }
    }
}

/// Makes a call on a session that goes on.
fn call<T>(session: pleachSession_t, make: impl FnOnce(&mut Live) -> Result<T, Failed>) -> Result<T, Failed> {
    expect_no_batch()?;
    let joined = SESSIONS.find(session)?;
    let mut live = joined.lock()?;
    make(&mut live)
}

/// Joins, and stores the handle. `id`: that by which rank 0 listens.
///
/// # Safety
///
/// `elastic` and `config` are null or as their types say.
unsafe fn join(
    session: &mut pleachSession_t,
    elastic: *const pleachElastic_t,
    config: *const pleachConfig_t,
    world: World,
    id: Option<&pleachUniqueId>,
) -> Result<(), Failed> {
    let options = Options::from_env_in(world);
    // SAFETY: the caller's promise.
    let (elastic, options) = unsafe { (elastic::read(elastic)?, configured(options, config)?) };
    if let Some(id) = id.filter(|_| options.world.rank == 0) {
        release(id);
    }
    let joined = Session::join(&options, &elastic)?;
    let session_of = Some(Box::new(joined));
    let (parts, kept) = (Vec::new(), Kept::default());
    let live = Live { epoch: None, parts, session: session_of, kept, change: None };
    *session = SESSIONS.keep(Joined { process: std::process::id(), live: Mutex::new(live) })?;
    Ok(())
}

/// Joins the job that the launcher of this process describes: `pleach run`, torchrun, mpirun,
/// mpiexec or srun. Where no job runs at the rendezvous address, the processes of the world meet
/// and begin it. Where one runs, its members take this process in at the end of a step.
///
/// Ownership: `session` is NULL or points to a pleachSession_t. The caller ends it with
/// pleachSessionDestroy. `elastic` and `config` are NULL or point to structs that began with
/// PLEACH_ELASTIC_INITIALIZER and PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; they
/// are read before the function returns. Threads: any. Blocks: until all processes are there, or
/// the members have taken this process in, at most joinTimeoutMs, which is a minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the environment
/// describes no ranks or contradicts itself; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, or if there are 65536 sessions already; pleachTimeout if the members have not
/// taken this process in; pleachExpelled if they go on without it; pleachSystemError if the
/// processes do not meet in time, or this one is refused: it has another program, other limits or
/// another secret; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionJoinFromEnv(
    session: *mut pleachSession_t,
    elastic: *const pleachElastic_t,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { out(session, "session") }?;
        *session = std::ptr::null_mut();
        expect_no_batch()?;
        let world = World::from_env().map_err(|error| Failed::argument(error.to_string()))?;
        // SAFETY: the caller's promise.
        unsafe { join(session, elastic, config, world, None) }
    })
}

/// As pleachSessionJoinFromEnv, as rank `rank` of the `nranks` ranks that have this unique id. A
/// process that joins a running job gives the id of that job.
///
/// Ownership: `session` is NULL or points to a pleachSession_t. The caller ends it with
/// pleachSessionDestroy. `elastic` and `config` are NULL or point to structs that began with
/// PLEACH_ELASTIC_INITIALIZER and PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; they
/// are read before the function returns. Threads: any. Blocks: until all processes are there, or
/// the members have taken this process in, at most joinTimeoutMs, which is a minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, or if there are 65536 sessions already;
/// pleachTimeout if the members have not taken this process in; pleachExpelled if they go on
/// without it; pleachSystemError if the processes do not meet in time, or this one is refused: it
/// has another program, other limits or another secret; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionJoin(
    session: *mut pleachSession_t,
    nranks: c_int,
    commId: pleachUniqueId,
    rank: c_int,
    elastic: *const pleachElastic_t,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { out(session, "session") }?;
        *session = std::ptr::null_mut();
        expect_no_batch()?;
        let world = world_of(&commId, nranks, rank)?;
        // SAFETY: the caller's promise.
        unsafe { join(session, elastic, config, world, Some(&commId)) }
    })
}

/// Enters the newest epoch and begins the next step there. Stores the number of the step and the
/// communicator of the epoch, whose ranks are its members. Calls on it that end because the members
/// have changed return pleachRemoteError, and pleachCommGetFailure says pleachFailureChanged.
/// pleachCommSplit, pleachPartialInit and pleachWindowInit do not work on it: pleachSessionSplit
/// divides the members of each epoch.
///
/// Ownership: `step` is NULL or points to a uint64_t; `comm` is NULL or points to a pleachComm_t.
/// The communicator stays the session's. Steps of one epoch have one communicator. It ends when
/// another epoch is entered, and by pleachSessionLeave and pleachSessionDestroy. Threads: any; a
/// call of a second thread at the same time is refused. Blocks: until the epoch is entered, and
/// while processes that have joined read the states.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session or an argument is
/// NULL; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if a step has begun
/// already, another thread is in a call on the session, this process has left it or is a forked
/// child, or members declare different states; pleachExpelled if the others go on without this
/// process; pleachNoQuorum if too few members answer; pleachTooFew if there are fewer members than
/// `fewest` for too long; pleachStepFailed if the step failed on another member again and again;
/// pleachLeft if this process has left, as it was told to; pleachRemoteError if all members that
/// had the states are gone; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionNext(
    session: pleachSession_t,
    step: *mut u64,
    comm: *mut pleachComm_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (step, comm) = unsafe { (out(step, "step")?, out(comm, "comm")?) };
        *comm = std::ptr::null_mut();
        call(session, |live| {
            let begun = live.expect_no_step()?.next();
            *step = begun.map_err(|error| live.failed(error))?;
            live.note_change();
            *comm = live.communicator().inspect_err(|_| live.give_step_up())?;
            Ok(())
        })
    })
}

/// Says what became of the step on this process, and waits for the verdict of all members, which is
/// the same on all of them. If the verdict is pleachVerdictRetry, nobody applies the results of the
/// step, and the next pleachSessionNext begins it again.
///
/// When the function has returned, no peer reads or changes memory of the step any more.
///
/// Ownership: `outcome` is pleachSuccess if the step was done, and any other number if it was not.
/// A step in which the communicator has failed was not done, whatever `outcome` says, also if the
/// caller has destroyed it since.
/// `verdict` is NULL or points to a struct that began with PLEACH_VERDICT_INITIALIZER. Threads:
/// any; a call of a second thread at the same time is refused. Blocks: until all members have said
/// so, or one of them that is late for the timeout of the session has been left behind. It makes
/// two calls of the step's group, so meanwhile no other thread makes calls of that group.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, or `verdict` is NULL
/// or its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if no step has begun, another thread is in a call on the session, or this
/// process has left it or is a forked child; pleachExpelled if the others go on without this
/// process; pleachNoQuorum if too few members answer; pleachStepFailed if the step failed again and
/// again, here or on another member; pleachLeft if this process has left, as it was told to;
/// pleachSystemError if the system refuses what outlives this process; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionCommit(
    session: pleachSession_t,
    outcome: c_int,
    verdict: *mut pleachVerdict_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(verdict, "verdict", "PLEACH_VERDICT_INITIALIZER") }?;
        call(session, |live| {
            let cause = live.cause();
            let is_done = cause.is_none() && outcome == pleachResult_t::pleachSuccess as c_int;
            let attempted = live.session()?;
            let epoch = attempted.attempted_epoch().unwrap_or(0);
            let members = attempted.group().map_or(0, |group| group.world_size());
            // Of a failure that only the program knows, the session needs no text.
            let outcome = if is_done { Ok(()) } else { Err(cause.unwrap_or(CollectiveError::Closed)) };
            let verdict_of_all = attempted.commit(outcome).map_err(|error| live.failed(error))?;
            let next = live.session()?.step();
            let (told, change) = told(size, verdict_of_all, (epoch, members, next));
            if let Some(change) = change {
                live.change = Some(change);
            }
            // SAFETY: it is as long as its size says.
            unsafe { *verdict = told };
            Ok(())
        })
    })
}

/// Compares the states of all members that have committed the last step. All members call it
/// between the same two steps.
///
/// Ownership: nothing changes hands. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: until all members have called it, or the members have changed.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if a step has begun, another thread is in a call on
/// the session, or this process has left it or is a forked child; pleachDiverged if a state is not
/// the same on all members, whose seats the text of the error names; pleachExpelled if the others
/// go on without this process; pleachNoQuorum if too few members answer; pleachLeft if this process
/// has left, as it was told to; pleachSystemError if the system refuses memory; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionAudit(session: pleachSession_t) -> pleachResult_t {
    guarded(|| {
        call(session, |live| {
            let audited = live.expect_no_step()?.audit();
            audited.map_err(|error| live.failed(error))
        })
    })
}

/// Stores what a session is at.
///
/// Ownership: `info` is NULL or points to a struct that began with PLEACH_SESSION_INFO_INITIALIZER.
/// Threads: any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, or `info` is NULL or
/// its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if another thread is in a call on the session, or this process has left it or is
/// a forked child; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionGetInfo(
    session: pleachSession_t,
    info: *mut pleachSessionInfo_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(info, "info", "PLEACH_SESSION_INFO_INITIALIZER") }?;
        call(session, |live| {
            let session = live.session()?;
            let (step, epoch, seat) = (session.step(), session.epoch(), session.seat().0 as c_int);
            let contributes = c_int::from(session.group().is_ok_and(|group| group.contributes()));
            // SAFETY: it is as long as its size says.
            unsafe { *info = pleachSessionInfo_t { size, step, epoch, seat, contributes } };
            Ok(())
        })
    })
}

/// Leaves the job when this signal comes, at the end of the step that is under way then, or of the
/// next one: the others repeat no step for it. The program goes on with its loop until a function
/// returns pleachLeft. The signal does not end the process any more.
///
/// Ownership: nothing changes hands. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, or the signal cannot
/// be caught; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another thread is
/// in a call on the session, or this process has left it or is a forked child; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionLeaveOn(session: pleachSession_t, signal: c_int) -> pleachResult_t {
    guarded(|| call(session, |live| Ok(live.session()?.leave_on(signal)?)))
}

/// Leaves the job as pleachSessionLeaveOn does, without a signal.
///
/// Ownership: nothing changes hands. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if another thread is in a call on the session, or
/// this process has left it or is a forked child; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionLeaveAfterStep(session: pleachSession_t) -> pleachResult_t {
    guarded(|| {
        call(session, |live| {
            live.session()?.leave_after_step();
            Ok(())
        })
    })
}

/// Leaves the job, between two steps. If all members leave together, or a function has returned
/// pleachLeft, nobody repeats a step for it. Every later call on the session returns
/// pleachInvalidUsage, except for pleachSessionDestroy and pleachSessionGetState.
///
/// Ownership: the session stays the caller's, with the memory of its buffers and states. The caller
/// ends it with pleachSessionDestroy. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: until the others know, at most suspectAfterMs and 5 s.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if another thread is in a call on the session, or
/// this process has left it or is a forked child; pleachRemoteError if the job was over before this
/// process could read the states that it has declared: it has left then too; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionLeave(session: pleachSession_t) -> pleachResult_t {
    guarded(|| {
        call(session, |live| {
            live.session()?;
            live.epoch = None;
            live.parts.clear();
            let session = live.session.take().ok_or_else(left)?;
            Ok(session.leave()?)
        })
    })
}

/// Frees a session. Without pleachSessionLeave this is to the other members as the end of the
/// process.
///
/// Ownership: the handle, the communicators of the epoch, and the memory of buffers and states go
/// back to the library, and the handle is invalid from now on. A call of another thread that is
/// under way keeps them until the call has ended. Threads: any, also while another thread is in a
/// call. Blocks: while the call of the epoch's communicator that is under way ends. It does not
/// wait for calls of other threads on the session.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionDestroy(session: pleachSession_t) -> pleachResult_t {
    guarded(|| SESSIONS.take(session).map(drop))
}
