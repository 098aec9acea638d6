//! Communicators: functions that make, divide, query, finalize, abort and destroy them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_collectives::engine::Fault;
use pleach_collectives::{CollectiveError, Group, Options, Reproducible, SplitError};
use pleach_transport::cuda::Stream;
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::World;
use pleach_vocabulary::{FabricChoice, ReduceOp};

use crate::batch::expect_no_batch;
use crate::handles::{Handles, Held};
use crate::memory::Registrations;
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};
use crate::types::{
    PREMUL_FIRST, data_type, pleachDataType_t, pleachRedOp_t, pleachScalarHostImmediate,
    pleachScalarResidence_t, premul_sum,
};
use crate::unique_id::{pleachUniqueId, release};

/// A communicator. Its contents are opaque to the caller.
pub struct pleachComm(());

/// A communicator: a group of ranks, which are numbered from 0. NULL is no communicator.
pub type pleachComm_t = *mut pleachComm;

/// The configuration of a communicator. Begin with PLEACH_CONFIG_INITIALIZER, which sets `size`. A
/// library of a later version reads only `size` bytes and takes defaults for the rest. 0 and NULL
/// stand for the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachConfig_t {
    /// sizeof(pleachConfig_t).
    pub size: usize,
    /// Longest time that a call waits for other ranks, in milliseconds; 60000 by default.
    pub timeoutMs: u64,
    /// Longest time that ranks wait for each other to join, in milliseconds; 60000 by default.
    pub joinTimeoutMs: u64,
    /// "auto", "shm", "tcp", "shm+tcp", "verbs" or "shm+verbs"; auto by default. The same on all
    /// ranks.
    pub fabric: *const c_char,
    /// Whether results must have the same bits for the same number of ranks (1), or the same bits
    /// for any number and order of ranks (2). The same on all ranks.
    pub reproducible: c_int,
    /// Must be 0.
    pub reserved: c_int,
}

/// The colour of a rank that joins no new communicator when a communicator is divided.
pub const PLEACH_SPLIT_NOCOLOR: c_int = -1;

/// The communicator behind a handle.
pub(crate) struct Comm {
    pub(crate) group: Group,
    /// The timeout of calls in milliseconds; 0 for that of the configuration. Relaxed: each call
    /// takes the value that it finds.
    timeout_ms: AtomicU64,
    /// Premultiplied sums, by number.
    premultiplied: Mutex<Vec<Option<ReduceOp>>>,
    failure: CommFailure,
    pub(crate) registrations: Registrations,
}

/// Why the group of a communicator has failed, once a call has told it.
pub(crate) type CommFailure = Arc<Mutex<Option<Arc<Fault>>>>;

static COMMS: Handles<Comm> = Handles::new("communicator", "comm");

impl Comm {
    fn new(group: Group) -> Self {
        Self {
            group,
            timeout_ms: AtomicU64::new(0),
            premultiplied: Mutex::default(),
            failure: CommFailure::default(),
            registrations: Registrations::default(),
        }
    }

    /// Makes a call in this stream, with the timeout of this communicator.
    #[inline]
    pub(crate) fn with_group<T>(
        &self,
        stream: *mut c_void,
        call: impl FnOnce(&Group) -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        // Most calls need no copy of the group. A copy counts references, which would cost each
        // call time.
        if stream.is_null() && self.timeout_ms.load(Ordering::Relaxed) == 0 {
            return call(&self.group);
        }
        call(&self.group_in(stream)?)
    }

    /// The group with the timeout of this communicator, for a call in this stream.
    pub(crate) fn group_in(&self, stream: *mut c_void) -> Result<Group, Failed> {
        let group = match self.timeout_ms.load(Ordering::Relaxed) {
            0 => self.group.clone(),
            limit => self.group.within(Duration::from_millis(limit)),
        };
        match (stream.is_null(), self.group.info().gpu) {
            (true, _) => Ok(group),
            // SAFETY: the caller promises a stream of the GPU's current context that lives as long
            // as the call.
            (false, Some(gpu)) => Ok(group.on(&unsafe { Stream::foreign(&gpu, stream) })),
            (false, None) => Err(Failed::usage(
                "this communicator works on host memory, which has no stream; pass NULL for the stream",
            )),
        }
    }

    /// Notes why the group has failed.
    #[inline]
    pub(crate) fn note<T>(&self, result: Result<T, CollectiveError>) -> Result<T, Failed> {
        result.map_err(|error| self.noted(error))
    }

    #[cold]
    pub(crate) fn noted(&self, error: CollectiveError) -> Failed {
        self.keep(&error);
        error.into()
    }

    /// Keeps the first failure of the group.
    fn keep(&self, error: &CollectiveError) {
        if let CollectiveError::Failed(fault) = error {
            lock(&self.failure).get_or_insert_with(|| Arc::clone(fault));
        }
    }

    pub(crate) fn failure(&self) -> Option<Arc<Fault>> {
        lock(&self.failure).clone()
    }

    /// The failure of any call, also a later one, which outlives the communicator.
    pub(crate) fn kept_failure(&self) -> CommFailure {
        Arc::clone(&self.failure)
    }

    pub(crate) fn premultiplied(&self, number: pleachRedOp_t) -> Option<ReduceOp> {
        let index = number.checked_sub(PREMUL_FIRST)? as usize;
        let known = lock(&self.premultiplied);
        known.get(index).copied().flatten()
    }
}

/// The communicator of a handle.
#[inline]
pub(crate) fn find(comm: pleachComm_t) -> Result<Held<Comm>, Failed> {
    COMMS.find(comm)
}

/// Stores a communicator of this group.
pub(crate) fn keep(group: Group) -> Result<pleachComm_t, Failed> {
    COMMS.keep(Comm::new(group))
}

/// Takes a communicator out of the table.
pub(crate) fn take(comm: pleachComm_t) -> Result<Held<Comm>, Failed> {
    COMMS.take(comm)
}

/// The world of rank `rank` of the `nranks` ranks that have a unique id.
pub(crate) fn world_of(id: &pleachUniqueId, nranks: c_int, rank: c_int) -> Result<World, Failed> {
    let (Ok(world_size @ 1..), Ok(own)) = (u32::try_from(nranks), u32::try_from(rank)) else {
        return Err(Failed::argument(format!("rank {rank} of {nranks} ranks cannot be")));
    };
    if own >= world_size {
        return Err(Failed::argument(format!("rank {rank} is not below nranks, {nranks}")));
    }
    id.world(own, world_size)
}

/// A copy of the caller's configuration; `None` if it is NULL.
///
/// # Safety
///
/// As [`configured`].
unsafe fn read(config: *const pleachConfig_t) -> Result<Option<pleachConfig_t>, Failed> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { struct_size(config, "config", "PLEACH_CONFIG_INITIALIZER") }?;
    // SAFETY: it is as long as its size says.
    Ok(Some(unsafe { *config }))
}

/// The options with the changes of a configuration.
///
/// # Safety
///
/// `config` is null, or points to a configuration whose `size` is true.
pub(crate) unsafe fn configured(
    mut options: Options,
    config: *const pleachConfig_t,
) -> Result<Options, Failed> {
    // SAFETY: the caller's promise.
    let Some(config) = unsafe { read(config) }? else { return Ok(options) };
    if config.timeoutMs != 0 {
        options.timeout = Duration::from_millis(config.timeoutMs);
    }
    if config.joinTimeoutMs != 0 {
        options.join_timeout = Duration::from_millis(config.joinTimeoutMs);
    }
    if !config.fabric.is_null() {
        // SAFETY: the caller promises a text that ends with a zero byte.
        let name = unsafe { CStr::from_ptr(config.fabric) }.to_string_lossy();
        options.fabric = name.parse::<FabricChoice>().map_err(|error| Failed::argument(error.to_string()))?;
    }
    options.reproducible = match config.reproducible {
        0 => Reproducible::No,
        1 => Reproducible::PerWorldSize,
        2 => Reproducible::Exact,
        other => {
            return Err(Failed::argument(format!("config->reproducible is {other}; take 0, 1 or 2")));
        }
    };
    Ok(options)
}

/// The timeout of a part of a communicator from its configuration; 0 stands for the timeout of the
/// whole communicator.
///
/// # Safety
///
/// As [`configured`].
unsafe fn timeout_of_part(config: *const pleachConfig_t) -> Result<u64, Failed> {
    // SAFETY: the caller's promise.
    let Some(pleachConfig_t { timeoutMs, joinTimeoutMs, fabric, reproducible, .. }) =
        unsafe { read(config) }?
    else {
        return Ok(0);
    };
    match joinTimeoutMs == 0 && fabric.is_null() && reproducible == 0 {
        true => Ok(timeoutMs),
        false => Err(Failed::argument(
            "config says more than timeoutMs; a part of a communicator has the other settings of the whole",
        )),
    }
}

/// Joins the communicator of a unique id as rank `rank` of `nranks` ranks. All ranks call the
/// function.
///
/// Ownership: `comm` is NULL or points to a pleachComm_t. The caller ends the communicator with
/// pleachCommDestroy or pleachCommAbort. Threads: any. Blocks: until all ranks are there, at
/// most joinTimeoutMs, which is a minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, or if 65536 communicators exist already;
/// pleachSystemError if the ranks do not meet in time; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommInitRank(
    comm: *mut pleachComm_t,
    nranks: c_int,
    commId: pleachUniqueId,
    rank: c_int,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { pleachCommInitRankConfig(comm, nranks, commId, rank, std::ptr::null()) }
}

/// As pleachCommInitRank, with a configuration; NULL takes the defaults.
///
/// Ownership: `comm` is NULL or points to a pleachComm_t. The caller ends the communicator with
/// pleachCommDestroy or pleachCommAbort. `config` is NULL or points to a configuration that
/// began with PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; it is read before the
/// function returns. Threads: any. Blocks: until all ranks are there, at most joinTimeoutMs,
/// which is a minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, or if 65536 communicators exist already;
/// pleachSystemError if the ranks do not meet in time; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommInitRankConfig(
    comm: *mut pleachComm_t,
    nranks: c_int,
    commId: pleachUniqueId,
    rank: c_int,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let comm = unsafe { out(comm, "comm") }?;
        *comm = std::ptr::null_mut();
        expect_no_batch()?;
        let world = world_of(&commId, nranks, rank)?;
        // SAFETY: the caller's promise.
        let options = unsafe { configured(Options::from_env_in(world), config) }?;
        if rank == 0 {
            release(&commId);
        }
        *comm = keep(Group::join(&options)?)?;
        Ok(())
    })
}

/// Joins the ranks that the launcher of this process describes: `pleach run`, torchrun, mpirun,
/// mpiexec or srun. Without a launcher the communicator has one rank. All ranks call the function.
///
/// Ownership: `comm` is NULL or points to a pleachComm_t. The caller ends the communicator with
/// pleachCommDestroy or pleachCommAbort. `config` is NULL or points to a configuration that
/// began with PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; it is read before the
/// function returns. Threads: any. Blocks: until all ranks are there, at most joinTimeoutMs,
/// which is a minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the environment
/// describes no ranks or contradicts itself; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, or if 65536 communicators exist already; pleachSystemError if the ranks do not
/// meet in time; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommInitFromEnv(
    comm: *mut pleachComm_t,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let comm = unsafe { out(comm, "comm") }?;
        *comm = std::ptr::null_mut();
        expect_no_batch()?;
        let world = World::from_env().map_err(|error| Failed::argument(error.to_string()))?;
        // SAFETY: the caller's promise.
        let options = unsafe { configured(Options::from_env_in(world), config) }?;
        *comm = keep(Group::join(&options)?)?;
        Ok(())
    })
}

/// Divides a communicator. The ranks that pass the same colour form a new communicator. They are
/// numbered by their keys, and by their old ranks where keys are equal. A rank that passes
/// PLEACH_SPLIT_NOCOLOR gets NULL. All ranks call the function. The new communicator takes its
/// configuration from the old communicator, with the timeout of pleachCommSetTimeout. Only a
/// timeoutMs that is not 0 changes it: fabric and reproducible cannot differ.
///
/// Ownership: `newcomm` is NULL or points to a pleachComm_t. The caller ends the new communicator;
/// the old communicator stays. `config` is NULL or points to a configuration that began with
/// PLEACH_CONFIG_INITIALIZER; it is read before the function returns. Threads: any; calls of
/// several threads on one communicator need one order on all ranks. Blocks: until the new
/// communicators are there. It waits at most the timeout of the communicator for all ranks to make
/// the call, then at most joinTimeoutMs for the ranks of the new communicator to join.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if there are 65536 communicators already, the ranks
/// make different calls, the communicator was finalized, or this process is a forked child;
/// pleachTimeout if another rank is late; pleachRemoteError if a rank is lost, has left, has
/// aborted or has broken the protocol; pleachSystemError if the ranks of a colour do not meet;
/// pleachUnhandledCudaError if a GPU fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommSplit(
    comm: pleachComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut pleachComm_t,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let newcomm = unsafe { out(newcomm, "newcomm") }?;
        *newcomm = std::ptr::null_mut();
        expect_no_batch()?;
        let held = find(comm)?;
        // SAFETY: the caller's promise.
        let timeout_ms = unsafe { timeout_of_part(config) }?;
        let colour = match color {
            PLEACH_SPLIT_NOCOLOR => None,
            other => Some(u32::try_from(other).map_err(|_| {
                Failed::argument(format!("color is {other}; take 0 or more, or PLEACH_SPLIT_NOCOLOR"))
            })?),
        };
        // Negative keys come first.
        let key = (key as u32) ^ (1 << 31);
        let split = held.with_group(std::ptr::null_mut(), |group| {
            group.split(colour, key).map_err(|error| {
                if let SplitError::Collective(error) = &error {
                    held.keep(error);
                }
                Failed::from(error)
            })
        });
        if let Some(mut group) = split? {
            if timeout_ms != 0 {
                group = group.within(Duration::from_millis(timeout_ms));
            }
            *newcomm = keep(group)?;
        }
        Ok(())
    })
}

/// Ends a communicator in order. All ranks call the function, which tells the other ranks that this
/// rank leaves. Every later call returns pleachInvalidUsage, except for pleachCommDestroy,
/// pleachCommAbort and queries.
///
/// Ownership: the communicator stays the caller's. The caller ends it with pleachCommDestroy.
/// Threads: any. Blocks: until the other ranks call the function too, at most 5 s.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator;
/// pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if the ranks make different
/// calls, the communicator was finalized, or this process is a forked child; pleachTimeout if
/// another rank is late; pleachRemoteError if a rank is lost, has left, has aborted or has broken
/// the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachUnhandledCudaError if a GPU fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachCommFinalize(comm: pleachComm_t) -> pleachResult_t {
    guarded(|| {
        expect_no_batch()?;
        let held = find(comm)?;
        held.note(held.group.clone().close())
    })
}

/// Frees a communicator. If it was not finalized, this rank leaves now. This is no failure for
/// ranks that need nothing more of this rank.
///
/// Ownership: the handle goes back to the library and is invalid from now on. A call of another
/// thread that is under way keeps the communicator until the call has ended. Threads: any, also
/// while another thread is in a call on the communicator. Blocks: while peers take the data that
/// this rank has sent, at most 5 s. It does not wait for calls of other threads.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachCommDestroy(comm: pleachComm_t) -> pleachResult_t {
    guarded(|| COMMS.take(comm).map(drop))
}

/// Ends the work of a communicator on all ranks within 100 ms and frees the communicator. Calls
/// that are under way on any rank return pleachRemoteError.
///
/// Ownership: the handle goes back to the library and is invalid from now on. Threads: any, at any
/// time, also while another thread is in a call on the communicator. Blocks: until the peers have
/// been told, about 100 ms at most.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachCommAbort(comm: pleachComm_t) -> pleachResult_t {
    guarded(|| {
        let held = COMMS.take(comm)?;
        held.group.abort();
        Ok(())
    })
}

/// Stores the number of ranks of a communicator.
///
/// Ownership: `count` is NULL or points to an int. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or there is no such
/// communicator; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommCount(comm: pleachComm_t, count: *mut c_int) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        *unsafe { out(count, "count") }? = find(comm)?.group.world_size() as c_int;
        Ok(())
    })
}

/// Stores the rank of the caller in a communicator.
///
/// Ownership: `rank` is NULL or points to an int. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or there is no such
/// communicator; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommUserRank(comm: pleachComm_t, rank: *mut c_int) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        *unsafe { out(rank, "rank") }? = find(comm)?.group.rank() as c_int;
        Ok(())
    })
}

/// Stores pleachSuccess if no call has made the communicator fail for good. Otherwise stores the
/// result of the first such call. A failed communicator can only be destroyed.
///
/// Ownership: `asyncError` is NULL or points to a pleachResult_t. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or there is no such
/// communicator; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommGetAsyncError(
    comm: pleachComm_t,
    asyncError: *mut pleachResult_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(asyncError, "asyncError") }?;
        *stored = match find(comm)?.failure() {
            None => pleachResult_t::pleachSuccess,
            Some(fault) => Failed::from(CollectiveError::Failed(fault)).result,
        };
        Ok(())
    })
}

/// Sets the longest time that each later call on this communicator waits for other ranks, in
/// milliseconds. 0 restores the time of the configuration.
///
/// Ownership: nothing changes hands. Threads: any; calls that are under way keep their timeout.
/// Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachCommSetTimeout(comm: pleachComm_t, milliseconds: u64) -> pleachResult_t {
    guarded(|| {
        find(comm)?.timeout_ms.store(milliseconds, Ordering::Relaxed);
        Ok(())
    })
}

/// Stores the number of a sum that first multiplies the input of this rank by `scalar`. `scalar` is
/// one element of the type, in host memory: `residence` is pleachScalarHostImmediate. Factors may
/// differ from rank to rank. The number is valid for this communicator alone, until
/// pleachRedOpDestroy.
///
/// Ownership: `op` is NULL or points to a pleachRedOp_t; `scalar` is NULL or points to an
/// element of the type, which is read before the function returns. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachRedOpCreatePreMulSum(
    op: *mut pleachRedOp_t,
    scalar: *const c_void,
    datatype: pleachDataType_t,
    residence: pleachScalarResidence_t,
    comm: pleachComm_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let op = unsafe { out(op, "op") }?;
        if residence != pleachScalarHostImmediate {
            return Err(Failed::argument(format!(
                "residence is {residence}; the scalar is read now, from host memory: pass \
                 pleachScalarHostImmediate"
            )));
        }
        if scalar.is_null() {
            return Err(Failed::argument("scalar is NULL"));
        }
        let (held, data_type) = (find(comm)?, data_type(datatype)?);
        // SAFETY: the caller's promise.
        let made = unsafe { premul_sum(scalar, data_type) };
        let mut known = lock(&held.premultiplied);
        let index = known.iter().position(Option::is_none).unwrap_or(known.len());
        if index == known.len() {
            known.push(None);
        }
        known[index] = Some(made);
        *op = PREMUL_FIRST + index as pleachRedOp_t;
        Ok(())
    })
}

/// Destroys an operation of pleachRedOpCreatePreMulSum.
///
/// Ownership: the number goes back to the library. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator or number;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachRedOpDestroy(op: pleachRedOp_t, comm: pleachComm_t) -> pleachResult_t {
    guarded(|| {
        let held = find(comm)?;
        let mut known = lock(&held.premultiplied);
        let place = op.checked_sub(PREMUL_FIRST).and_then(|index| known.get_mut(index as usize));
        match place.and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(Failed::argument(format!("{op} is no premultiplied sum of this communicator"))),
        }
    })
}
