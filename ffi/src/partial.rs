//! Partial all-reduce: it does not wait for late ranks, and names the ranks whose data are in the
//! result.
//!
//! **Invariant:** one thread at a time is in a call on a partial all-reduce. A second thread is
//! refused at once. So the memory of a contribution is the caller's between two calls, and the
//! memory of a result does not change until the next call: see
//! [`pleach_collectives::RawRound::result`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, TryLockError};

use pleach_collectives::partial::{Activation, Divisor, Late, Own, RankSet};
use pleach_collectives::{PartialError, RawPartial, RawRound, SplitError};

use crate::batch::expect_no_batch;
use crate::comm::{find, pleachComm_t};
use crate::handles::Handles;
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};
use crate::types::{data_type, pleachDataType_t, pleachRedOp_t, reduction};

/// A partial all-reduce. Its contents are opaque to the caller.
pub struct pleachPartial(());

/// A partial all-reduce: rounds of an all-reduce that do not wait for late ranks. NULL is no
/// partial all-reduce.
pub type pleachPartial_t = *mut pleachPartial;

/// The activation decides about late contributions.
pub const pleachLateDefault: c_int = 0;
/// A late contribution is added to the next contribution of the rank. If the next round opens
/// before the rank contributes again, the late contribution is given alone.
pub const pleachLateCarry: c_int = 1;
/// A late contribution is dropped and counts in no round.
pub const pleachLateDrop: c_int = 2;
/// The next round reduces late contributions separately, as a correction beside its own result.
pub const pleachLateCorrect: c_int = 3;

/// The activation decides by which number sums are divided.
pub const pleachDivisorDefault: c_int = 0;
/// Sums are not divided.
pub const pleachDivisorNone: c_int = 1;
/// Sums are divided by the number of ranks of the communicator.
pub const pleachDivisorWorld: c_int = 2;
/// Sums are divided by the number of ranks whose contributions are in them.
pub const pleachDivisorContributors: c_int = 3;

/// The contribution is in the round's result.
pub const pleachOwnCounted: c_int = 1;
/// The contribution came too late, and will be in a later round.
pub const pleachOwnCarried: c_int = 2;
/// The contribution came too late, and is in no round.
pub const pleachOwnDropped: c_int = 3;
/// The contribution came too late, and will be in the correction of a later round.
pub const pleachOwnCorrected: c_int = 4;
/// There was no contribution.
pub const pleachOwnAbstained: c_int = 5;

/// The configuration of the rounds of a partial all-reduce. Begin with
/// PLEACH_PARTIAL_CONFIG_INITIALIZER, which sets `size`. 0 and NULL stand for the defaults. The
/// same on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachPartialConfig_t {
    /// sizeof(pleachPartialConfig_t).
    pub size: usize,
    /// When a round opens: "all", "solo", "majority", "quorum:K", "quorum:K+GRACE", "deadline:D" or
    /// "deadline:pN". Times are written as "20ms" or "1.5s", and the percentile of a learned
    /// deadline as "p95". "all" by default.
    pub activation: *const c_char,
    /// The rule for late contributions: one of the constants pleachLateDefault to
    /// pleachLateCorrect.
    pub late: c_int,
    /// The divisor of sums: one of the constants pleachDivisorDefault to pleachDivisorContributors.
    pub divisor: c_int,
    /// The number of rounds in a row that a rank may miss. The next round waits for the rank. 8 by
    /// default.
    pub stalenessMax: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// A round that has ended. Begin with PLEACH_ROUND_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachRound_t {
    /// sizeof(pleachRound_t).
    pub size: usize,
    /// The round's number, from 0.
    pub number: u64,
    /// The number of results of rounds between the last round that this rank saw and this round.
    /// This rank does not get them.
    pub missed: u64,
    /// What happened to this rank's contribution: one of the constants pleachOwnCounted to
    /// pleachOwnAbstained.
    pub own: c_int,
    /// The number of ranks that have contributed to the result. It is the same on all ranks.
    pub contributors: c_int,
    /// The number of ranks that have contributed to the correction; 0 without a correction.
    pub corrected: c_int,
    /// 0.
    pub reserved: c_int,
    /// The combined contributions, divided as the configuration says: `count` elements, with the
    /// same bits on all ranks.
    pub result: *const c_void,
    /// With pleachLateCorrect, the combined contributions that came too late for the round before,
    /// divided as the result is. NULL if all ranks were in the round before, or if there was no
    /// round before.
    pub correction: *const c_void,
}

/// The counts of the rounds of a partial all-reduce at this rank, since it was made. Begin with
/// PLEACH_PARTIAL_REPORT_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachPartialReport_t {
    /// sizeof(pleachPartialReport_t).
    pub size: usize,
    /// The number of rounds that have ended at this rank.
    pub rounds: u64,
    /// The number of contributions of this rank that came too late for their round: the sum of the
    /// three numbers below.
    pub late: u64,
    /// The number of late contributions that were carried to a later round.
    pub carried: u64,
    /// The number of late contributions that were dropped.
    pub dropped: u64,
    /// The number of late contributions that were given to the correction of a later round.
    pub corrected: u64,
    /// The number of results that this rank has never seen.
    pub missed: u64,
    /// The number of ranks.
    pub ranks: c_int,
    /// 0.
    pub reserved: c_int,
}

/// The partial all-reduce behind a handle.
struct Partial {
    rounds: Mutex<Held>,
}

/// The rounds, and the contributors of the round that the last call has returned.
struct Held {
    raw: RawPartial,
    last: Option<Sets>,
}

/// The ranks whose contributions are in a result, and the ranks whose contributions are in its
/// correction.
struct Sets {
    contributors: RankSet,
    corrected: RankSet,
}

static PARTIALS: Handles<Partial> = Handles::new("partial all-reduce", "partial");

impl Partial {
    /// Locks the rounds for this thread. Fails if another thread holds them.
    fn rounds(&self) -> Result<MutexGuard<'_, Held>, Failed> {
        match self.rounds.try_lock() {
            Ok(held) => Ok(held),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Failed::usage(
                "another thread is in a call on this partial all-reduce; make one call at a time",
            )),
        }
    }
}

impl From<PartialError> for Failed {
    fn from(error: PartialError) -> Self {
        match error {
            PartialError::Collective(error) => error.into(),
            PartialError::Split(error) => error.into(),
            PartialError::Activation(_) => Self::argument(error.to_string()),
            _ => Self::usage(error.to_string()),
        }
    }
}

/// Reads the activation from a configuration.
///
/// # Safety
///
/// `config` is null, or points to a configuration whose `size` is right and whose text ends with a
/// zero byte.
unsafe fn activation(config: *const pleachPartialConfig_t) -> Result<Activation, Failed> {
    if config.is_null() {
        return Ok(Activation::all());
    }
    // SAFETY: the caller's promise.
    unsafe { struct_size(config, "config", "PLEACH_PARTIAL_CONFIG_INITIALIZER") }?;
    // SAFETY: it is as long as its size says.
    let config = unsafe { *config };
    let mut activation = Activation::all();
    if !config.activation.is_null() {
        // SAFETY: the caller promises a text that ends with a zero byte.
        let text = unsafe { CStr::from_ptr(config.activation) }.to_string_lossy();
        activation = text.parse().map_err(PartialError::Activation)?;
    }
    activation = match config.late {
        pleachLateDefault => activation,
        pleachLateCarry => activation.late(Late::Carry),
        pleachLateDrop => activation.late(Late::Drop),
        pleachLateCorrect => activation.late(Late::Correct),
        other => return Err(no_constant("late", other, "pleachLateCarry")),
    };
    activation = match config.divisor {
        pleachDivisorDefault => activation,
        pleachDivisorNone => activation.divisor(Divisor::None),
        pleachDivisorWorld => activation.divisor(Divisor::World),
        pleachDivisorContributors => activation.divisor(Divisor::Contributors),
        other => return Err(no_constant("divisor", other, "pleachDivisorWorld")),
    };
    if config.reserved != 0 {
        return Err(Failed::argument(format!("config->reserved is {}, not 0", config.reserved)));
    }
    Ok(match config.stalenessMax {
        0 => activation,
        rounds => activation.staleness_max(rounds),
    })
}

fn no_constant(member: &str, number: c_int, example: &str) -> Failed {
    Failed::argument(format!("config->{member} is {number}; take a constant as {example}"))
}

/// Makes a partial all-reduce of `count` elements. All ranks make the same call. Its rounds have a
/// group of their own: other calls on the communicator may run at the same time, pleachCommAbort
/// does not end the rounds, and the communicator may be destroyed before them. All ranks must keep
/// the partial all-reduce until all ranks have finished it. A rank that destroys it earlier ends
/// the rounds for the other ranks.
///
/// Ownership: `partial` is NULL or points to a pleachPartial_t. The caller ends it with
/// pleachPartialDestroy. `config` is NULL or points to a configuration that began with
/// PLEACH_PARTIAL_CONFIG_INITIALIZER, whose text ends with a zero byte; it is read before the
/// function returns. Threads: any; calls of several threads on one communicator need one order on
/// all ranks. Blocks: until all ranks have made the call. It waits at most the timeout of the
/// communicator for the ranks to make the call, then at most joinTimeoutMs while their group is
/// made.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, a partial
/// all-reduce does not know the operation, or the communicator works on memory of GPUs;
/// pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if there are 65536 partial
/// all-reduces already, the ranks ask for different partial all-reduces or make different calls,
/// the communicator was finalized, or this process is a forked child; pleachTimeout if another rank
/// is late; pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the ranks do not meet; pleachUnhandledCudaError if a GPU fails;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialInit(
    partial: *mut pleachPartial_t,
    count: usize,
    datatype: pleachDataType_t,
    op: pleachRedOp_t,
    config: *const pleachPartialConfig_t,
    comm: pleachComm_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let partial = unsafe { out(partial, "partial") }?;
        *partial = std::ptr::null_mut();
        expect_no_batch()?;
        let held = find(comm)?;
        // SAFETY: the caller's promise.
        let activation = unsafe { activation(config) }?;
        let (data_type, op) = (data_type(datatype)?, reduction(&held, op)?);
        if count.checked_mul(data_type.bytes()).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Failed::argument(format!("{count} elements are more than a process can address")));
        }
        let made = held.with_group(std::ptr::null_mut(), |group| {
            RawPartial::new(group, count, data_type, activation.combined_by(op)).map_err(
                |error| match error {
                    PartialError::Collective(error) | PartialError::Split(SplitError::Collective(error)) => {
                        held.noted(error)
                    }
                    other => other.into(),
                },
            )
        });
        *partial = PARTIALS.keep(Partial { rounds: Mutex::new(Held { raw: made?, last: None }) })?;
        Ok(())
    })
}

/// Stores the address of this rank's next contribution. It has `count` elements of any value, which
/// the caller writes.
///
/// Ownership: `data` is NULL or points to a pointer. The memory is the library's; the caller may
/// read and write it until pleachPartialContribute, pleachPartialStartContribute or
/// pleachPartialDestroy. The next contribution may have another address. Threads: any; a call of a
/// second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or there is no such partial
/// all-reduce; pleachInvalidUsage if another thread is in a call on the partial all-reduce;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialContribution(
    partial: pleachPartial_t,
    data: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let data = unsafe { out(data, "data") }?;
        *data = std::ptr::null_mut();
        *data = PARTIALS.find(partial)?.rounds()?.raw.contribution().as_mut_ptr().cast();
        Ok(())
    })
}

/// Contributes to the next round. Stores the round that counts the contribution. If the
/// contribution came too late, stores the newest round that was made without it. After a failure
/// the contribution is still in its memory, together with a late contribution that was carried.
///
/// Ownership: `round` is NULL or points to a struct that began with PLEACH_ROUND_INITIALIZER. Its
/// result and correction are the library's; the caller may read them until the next
/// pleachPartialContribute, pleachPartialStartContribute, pleachPartialAbstain, pleachPartialFinish
/// or pleachPartialDestroy. Threads: any; a call of a second thread at the same time is refused.
/// Blocks: until the round has ended. It waits for a rank at most the timeout that the communicator
/// had at pleachPartialInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce, or `round`
/// is NULL or its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if another thread is in a call on the partial all-reduce, this rank has finished
/// it or has started a contribution, or this process is a forked child; pleachTimeout if a rank
/// that the round waits for is late; pleachRemoteError if a rank is lost, has left, has aborted or
/// has broken the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialContribute(
    partial: pleachPartial_t,
    round: *mut pleachRound_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { next_round(partial, round, RawPartial::contribute) }
}

/// Contributes to the next round, and does not wait for it. pleachPartialWait waits. Meanwhile
/// pleachPartialContribution gives other memory, where the next contribution can be computed.
///
/// Ownership: the memory of the contribution goes back to the library. Threads: any; a call of a
/// second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce;
/// pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another thread is in a call
/// on the partial all-reduce, this rank has finished it or has started a contribution, or this
/// process is a forked child; pleachTimeout or pleachRemoteError if the rounds have failed, as
/// pleachPartialContribute says; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachPartialStartContribute(partial: pleachPartial_t) -> pleachResult_t {
    guarded(|| {
        expect_no_batch()?;
        let partial = PARTIALS.find(partial)?;
        let mut rounds = partial.rounds()?;
        let Held { raw, last } = &mut *rounds;
        *last = None;
        Ok(raw.start_contribute()?)
    })
}

/// Waits for the round of the contribution that pleachPartialStartContribute has handed over.
/// Stores a round as pleachPartialContribute does. After a failure the contribution is in the
/// memory that pleachPartialContribution gives, in place of what was written there meanwhile.
///
/// Ownership: `round` is NULL or points to a struct that began with PLEACH_ROUND_INITIALIZER. Its
/// result and correction are the library's; the caller may read them until the next
/// pleachPartialContribute, pleachPartialStartContribute, pleachPartialAbstain, pleachPartialFinish
/// or pleachPartialDestroy. Threads: any; a call of a second thread at the same time is refused.
/// Blocks: until the round has ended. It waits for a rank at most the timeout that the communicator
/// had at pleachPartialInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce, or `round`
/// is NULL or its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if no contribution was started, another thread is in a call on the partial
/// all-reduce, or this process is a forked child; pleachTimeout if a rank that the round waits for
/// is late; pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachInternalError after a mistake
/// of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialWait(
    partial: pleachPartial_t,
    round: *mut pleachRound_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { next_round(partial, round, RawPartial::wait) }
}

/// Abstains from the next round. No rank waits for this rank until it contributes again. If all
/// ranks abstain from one round, the ranks that wait for the round get pleachInvalidUsage. Stores a
/// round as pleachPartialContribute does.
///
/// Ownership: `round` is NULL or points to a struct that began with PLEACH_ROUND_INITIALIZER. Its
/// result and correction are the library's; the caller may read them until the next
/// pleachPartialContribute, pleachPartialStartContribute, pleachPartialAbstain, pleachPartialFinish
/// or pleachPartialDestroy. Threads: any; a call of a second thread at the same time is refused.
/// Blocks: until the round has ended. It waits for a rank at most the timeout that the communicator
/// had at pleachPartialInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce, or `round`
/// is NULL or its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if all ranks have abstained from the round, another thread is in a call on the
/// partial all-reduce, this rank has finished it or has started a contribution, or this process is
/// a forked child; pleachTimeout if a rank that the round waits for is late; pleachRemoteError if a
/// rank is lost, has left, has aborted or has broken the protocol; pleachSystemError if the system
/// refuses memory or a thread; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialAbstain(
    partial: pleachPartial_t,
    round: *mut pleachRound_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { next_round(partial, round, RawPartial::abstain) }
}

/// Makes no further contribution, and takes part in the rounds of other ranks until all ranks have
/// finished. Stores the last round, whose result has the late contributions that were still
/// carried. If this round has no contributors, its result has no meaning.
///
/// Ownership: `round` is NULL or points to a struct that began with PLEACH_ROUND_INITIALIZER. Its
/// result and correction are the library's; the caller may read them until pleachPartialDestroy,
/// which the caller still has to call. Threads: any; a call of a second thread at the same time is
/// refused. Blocks: until all ranks have finished. It waits for a rank at most the timeout that the
/// communicator had at pleachPartialInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce, or `round`
/// is NULL or its size is not that of the struct; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if another thread is in a call on the partial all-reduce, this rank has finished
/// it before or has started a contribution, or this process is a forked child; pleachTimeout if a
/// rank that the round waits for is late; pleachRemoteError if a rank is lost, has left, has
/// aborted or has broken the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialFinish(
    partial: pleachPartial_t,
    round: *mut pleachRound_t,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { next_round(partial, round, RawPartial::finish) }
}

/// Makes a call that waits for a round, and stores the round.
///
/// # Safety
///
/// `round` is null, or points to a struct whose `size` is right.
unsafe fn next_round(
    partial: pleachPartial_t,
    round: *mut pleachRound_t,
    wait: impl FnOnce(&mut RawPartial) -> Result<RawRound<'_>, PartialError>,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(round, "round", "PLEACH_ROUND_INITIALIZER") }?;
        expect_no_batch()?;
        let partial = PARTIALS.find(partial)?;
        let mut rounds = partial.rounds()?;
        let Held { raw, last } = &mut *rounds;
        *last = None;
        let ended = wait(raw)?;
        let contributors = ended.contributors().clone();
        let (corrected, correction) = match ended.correction() {
            Some((set, sum)) => (set.clone(), sum.as_ptr()),
            None => (RankSet::default(), std::ptr::null()),
        };
        let read = pleachRound_t {
            size,
            number: ended.number(),
            missed: ended.missed(),
            own: own(ended.own()),
            contributors: contributors.len() as c_int,
            corrected: corrected.len() as c_int,
            reserved: 0,
            result: ended.result().as_ptr().cast(),
            correction: correction.cast(),
        };
        *last = Some(Sets { contributors, corrected });
        // SAFETY: it is as long as its size says.
        unsafe { *round = read };
        Ok(())
    })
}

fn own(own: Own) -> c_int {
    match own {
        Own::Counted => pleachOwnCounted,
        Own::Carried => pleachOwnCarried,
        Own::Dropped => pleachOwnDropped,
        Own::Corrected => pleachOwnCorrected,
        _ => pleachOwnAbstained,
    }
}

/// Stores the ranks that have contributed to the result of the last round. This is the round that
/// the last call on `partial` has stored. The ranks are in ascending order; at most `capacity`
/// ranks are stored. The set is the same on all ranks. `count` is set to the size of the whole set.
///
/// Ownership: `ranks` has `capacity` elements, or is NULL for 0; `count` is NULL or points to a
/// size_t. Threads: any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if the last call has stored no round, or another thread is in a call on
/// `partial`; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialContributors(
    partial: pleachPartial_t,
    ranks: *mut c_int,
    capacity: usize,
    count: *mut usize,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { list(partial, ranks, capacity, count, |sets| &sets.contributors) }
}

/// Stores the ranks that have contributed to the correction of the last round, as
/// pleachPartialContributors does for the result. The set is empty without a correction.
///
/// Ownership: `ranks` has `capacity` elements, or is NULL for 0; `count` is NULL or points to a
/// size_t. Threads: any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if the last call has stored no round, or another thread is in a call on
/// `partial`; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialCorrected(
    partial: pleachPartial_t,
    ranks: *mut c_int,
    capacity: usize,
    count: *mut usize,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { list(partial, ranks, capacity, count, |sets| &sets.corrected) }
}

/// Lists a set of the last round.
///
/// # Safety
///
/// `ranks` is null or has room for `capacity` numbers; `count` is null, or valid for writes.
unsafe fn list(
    partial: pleachPartial_t,
    ranks: *mut c_int,
    capacity: usize,
    count: *mut usize,
    set: impl FnOnce(&Sets) -> &RankSet,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let count = unsafe { out(count, "count") }?;
        if ranks.is_null() && capacity > 0 {
            return Err(Failed::argument("ranks is NULL, but capacity is not 0"));
        }
        let partial = PARTIALS.find(partial)?;
        let rounds = partial.rounds()?;
        let none = || Failed::usage("the last call on this partial all-reduce has stored no round");
        let set = set(rounds.last.as_ref().ok_or_else(none)?);
        for (at, rank) in set.iter().take(capacity).enumerate() {
            // SAFETY: the list has room for `capacity` numbers, and `at` is below `capacity`.
            unsafe { ranks.add(at).write(rank as c_int) };
        }
        *count = set.len() as usize;
        Ok(())
    })
}

/// Stores how the rounds of a partial all-reduce went so far at this rank, and in how many of them
/// the contribution of each rank is, by rank; at most `capacity` numbers of these are stored.
///
/// Ownership: `report` is NULL or points to a struct that began with
/// PLEACH_PARTIAL_REPORT_INITIALIZER; `counted` has `capacity` elements, or is NULL for 0. Threads:
/// any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if another thread is in a call on `partial`, or this process is a forked child;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachPartialGetReport(
    partial: pleachPartial_t,
    report: *mut pleachPartialReport_t,
    counted: *mut u64,
    capacity: usize,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(report, "report", "PLEACH_PARTIAL_REPORT_INITIALIZER") }?;
        if counted.is_null() && capacity > 0 {
            return Err(Failed::argument("counted is NULL, but capacity is not 0"));
        }
        let partial = PARTIALS.find(partial)?;
        let found = partial.rounds()?.raw.report()?;
        for (at, number) in found.counted.iter().take(capacity).enumerate() {
            // SAFETY: the list has room for `capacity` numbers, and `at` is below `capacity`.
            unsafe { counted.add(at).write(*number) };
        }
        let read = pleachPartialReport_t {
            size,
            rounds: found.rounds,
            late: found.late,
            carried: found.carried,
            dropped: found.dropped,
            corrected: found.corrected,
            missed: found.missed,
            ranks: found.counted.len() as c_int,
            reserved: 0,
        };
        // SAFETY: it is as long as its size says.
        unsafe { *report = read };
        Ok(())
    })
}

/// Frees a partial all-reduce. A rank that has not finished leaves now, which ends the rounds for
/// the other ranks.
///
/// Ownership: the handle and the memory of contributions and results go back to the library, and
/// the handle is invalid from now on. A call of another thread that is under way keeps them until
/// the call has ended. Threads: any, also while another thread is in a call. Blocks: at most 5 s
/// until the round that is under way has ended, and at most 5 s while peers take the data that this
/// rank has sent. It does not wait for calls of other threads.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such partial all-reduce;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachPartialDestroy(partial: pleachPartial_t) -> pleachResult_t {
    guarded(|| PARTIALS.take(partial).map(drop))
}
