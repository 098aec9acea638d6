//! The ranks that are late.

use std::ffi::c_int;

use crate::comm::{find, pleachComm_t};
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};

/// How late a peer has made its calls, seen from this rank. Begin with
/// PLEACH_ARRIVAL_SKEW_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachArrivalSkew_t {
    /// sizeof(pleachArrivalSkew_t).
    pub size: usize,
    /// The calls in which this rank has waited and has heard from the peer directly.
    pub calls: u64,
    /// How much later than this rank the peer has made them, in nanoseconds: the sum,
    pub sumNs: u64,
    /// the median,
    pub medianNs: u64,
    /// the 99th percentile,
    pub p99Ns: u64,
    /// and the longest.
    pub longestNs: u64,
    /// The calls in which the peer was the last that this rank has heard from.
    pub last: u64,
}

/// Stores how late a peer was in the calls of this rank so far, to about 10 microseconds and
/// 12.5 percent.
///
/// Ownership: `skew` is NULL or points to a struct that began with
/// PLEACH_ARRIVAL_SKEW_INITIALIZER. Threads: any, also while another one is in a call. Blocks:
/// no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; `peer` is
/// another rank; pleachInternalError after a mistake of the library.
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

/// Stores the rank that this rank waits for now, once that has taken a millisecond; -1 if none.
/// The rank is the cause as far as the ranks that were asked know.
///
/// Ownership: `rank` is NULL or points to an int. Threads: any, also while another one is in a
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
