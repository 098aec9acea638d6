//! Arrival skew: how late ranks make their calls.

use std::ffi::c_int;

use crate::comm::{find, pleachComm_t};
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};

/// The arrival skew of a peer: how late it has made its calls, measured by this rank. Begin with
/// PLEACH_ARRIVAL_SKEW_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachArrivalSkew_t {
    /// sizeof(pleachArrivalSkew_t).
    pub size: usize,
    /// The calls in which this rank has waited and has heard from the peer directly.
    pub calls: u64,
    /// The sum of the delays of the peer in these calls, compared with this rank, in nanoseconds.
    pub sumNs: u64,
    /// The median of these delays, in nanoseconds.
    pub medianNs: u64,
    /// The 99th percentile of these delays, in nanoseconds.
    pub p99Ns: u64,
    /// The longest of these delays, in nanoseconds.
    pub longestNs: u64,
    /// The calls in which the peer was the last rank from which this rank has heard.
    pub last: u64,
}

/// Stores the arrival skew of a peer in the calls of this rank so far. It is precise to about 10
/// microseconds and 12.5 percent.
///
/// Ownership: `skew` is NULL or points to a struct that began with PLEACH_ARRIVAL_SKEW_INITIALIZER.
/// Threads: any, also while another thread is in a call. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right (`peer` must be
/// another rank); pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommGetArrivalSkew(
    comm: pleachComm_t,
    peer: c_int,
    skew: *mut pleachArrivalSkew_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(skew, "skew", "PLEACH_ARRIVAL_SKEW_INITIALIZER") }?;
        let report = find(comm)?.group.report();
        let found = report.peers.iter().find(|known| i64::from(known.rank) == i64::from(peer));
        let found = found.ok_or_else(|| Failed::argument(format!("peer is {peer}; take another rank")))?;
        let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let times = &found.arrival_skew;
        let read = pleachArrivalSkew_t {
            size,
            calls: times.count(),
            sumNs: ns(times.sum()),
            medianNs: ns(times.quantile(0.5)),
            p99Ns: ns(times.quantile(0.99)),
            longestNs: ns(times.longest()),
            last: found.last,
        };
        // SAFETY: it is as long as its size says.
        unsafe { *skew = read };
        Ok(())
    })
}

/// Stores the rank that this rank waits for, if it has waited for a millisecond; -1 otherwise. The
/// stored rank is the cause of the wait, as far as the queried ranks know.
///
/// Ownership: `rank` is NULL or points to an int. Threads: any, also while another thread is in a
/// call. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument is NULL or there is no such
/// communicator; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommGetWaitsFor(comm: pleachComm_t, rank: *mut c_int) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let rank = unsafe { out(rank, "rank") }?;
        *rank = find(comm)?.group.report().waits_for.map_or(-1, |rank| rank as c_int);
        Ok(())
    })
}
