//! Calls between pleachGroupStart and pleachGroupEnd, which are carried out together.
//!
//! **Invariant:** a thread's calls are kept by that thread until the outermost pleachGroupEnd, each
//! with its communicator, in the order in which they were made. Calls on one communicator are one
//! batch; calls on several communicators are one batch each, and all of these are under way
//! together.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use pleach_collectives::{CollectiveError, Group, Operation, Pending, RawPair};

use crate::comm::Comm;
use crate::handles::Held;
use crate::result::{Failed, guarded, pleachResult_t};

/// A call that is kept for pleachGroupEnd.
struct Call {
    comm: Held<Comm>,
    /// The group with the deadline and the stream of the call.
    group: Group,
    operation: Operation<RawPair>,
}

/// Operations of one communicator, each with the group of its call.
type Operations = Vec<(Group, Operation<RawPair>)>;

/// The calls of a thread since its outermost pleachGroupStart.
#[derive(Default)]
struct Calls {
    calls: Vec<Call>,
    /// The failure of the first call that was refused. One refused call refuses the whole group.
    refused: Option<Failed>,
}

thread_local! {
    /// The number of groups that have begun and not ended. It is separate from the calls, which
    /// have a destructor: a call outside of a group reads only this number.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static CALLS: RefCell<Calls> = RefCell::default();
}

/// Most groups of a thread that have begun and not ended.
const DEPTH_MAX: usize = 64;

/// Whether calls of this thread are kept for pleachGroupEnd.
#[inline]
pub(crate) fn is_in_batch() -> bool {
    DEPTH.get() > 0
}

/// Refuses a function that is not allowed in a batch.
pub(crate) fn expect_no_batch() -> Result<(), Failed> {
    match is_in_batch() {
        false => Ok(()),
        true => Err(Failed::usage("this cannot be done between pleachGroupStart and pleachGroupEnd")),
    }
}

/// Carries out an operation now, or keeps it for pleachGroupEnd.
pub(crate) fn carry_out(
    comm: Held<Comm>,
    stream: *mut c_void,
    operation: Operation<RawPair>,
) -> Result<(), Failed> {
    if !is_in_batch() {
        // Neither the handle nor the operation is copied: copies would cost time in each call.
        return comm.with_group(stream, |group| comm.note(group.run(operation)));
    }
    let group = comm.group_in(stream)?;
    CALLS.with_borrow_mut(|calls| calls.calls.push(Call { comm, group, operation }));
    Ok(())
}

/// Notes that a call was refused. Returns the failure.
#[cold]
pub(crate) fn refused(failed: Failed) -> Failed {
    if is_in_batch() {
        let copy = Failed { result: failed.result, text: failed.text.clone() };
        CALLS.with_borrow_mut(|calls| {
            calls.refused.get_or_insert(copy);
        });
    }
    failed
}

/// Begins a group of calls of this thread. pleachGroupEnd carries the calls out together, so sends
/// and receives of the group do not wait for each other. Groups may be nested; the outermost
/// pleachGroupEnd carries out the calls. A communicator holds at most 536870912 calls for
/// pleachGroupEnd. At this limit each function with that communicator returns pleachInvalidUsage,
/// except for pleachCommDestroy and pleachCommAbort.
///
/// Ownership: nothing changes hands. Threads: any; a group holds the calls of one thread. Blocks:
/// no.
///
/// Returns: pleachSuccess; pleachInvalidUsage if 64 groups are begun and not ended;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachGroupStart() -> pleachResult_t {
    guarded(|| {
        let depth = DEPTH.get();
        if depth == DEPTH_MAX {
            return Err(Failed::usage(format!("{DEPTH_MAX} groups are begun and not ended")));
        }
        DEPTH.set(depth + 1);
        Ok(())
    })
}

/// Ends a group of calls and carries them out together. Returns the first failure. If a call of the
/// group was refused, no call is carried out.
///
/// Ownership: the memory of the calls stays the caller's, and must stay valid until this function
/// has returned. Threads: the thread that has begun the group. Blocks: until the part of this rank
/// in each call is done, at most the timeouts of the communicators; the end of an inner group does
/// not block.
///
/// Returns: pleachSuccess; pleachInvalidArgument if a call of the group was refused for an
/// argument; pleachInvalidUsage if no group was begun, a call of the group was refused, or a call
/// of the group returns it; pleachTimeout if another rank is late; pleachRemoteError if a rank is
/// lost, has left, has aborted or has broken the protocol; pleachSystemError if the system refuses
/// memory or a thread; pleachUnhandledCudaError if a GPU fails; pleachInternalError after a mistake
/// of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachGroupEnd() -> pleachResult_t {
    guarded(|| {
        let Some(depth) = DEPTH.get().checked_sub(1) else {
            return Err(Failed::usage("no group was begun by pleachGroupStart"));
        };
        DEPTH.set(depth);
        if depth > 0 {
            return Ok(());
        }
        let Calls { calls, refused } = CALLS.take();
        refused.map_or(Ok(()), Err)?;
        run_all(calls)
    })
}

fn run_all(calls: Vec<Call>) -> Result<(), Failed> {
    let mut batches: Vec<(Held<Comm>, Operations)> = Vec::new();
    for Call { comm, group, operation } in calls {
        match batches.iter_mut().find(|(known, _)| known.is(&comm)) {
            Some((_, operations)) => operations.push((group, operation)),
            None => batches.push((comm, vec![(group, operation)])),
        }
    }
    if batches.len() == 1 {
        let (comm, operations) = batches.remove(0);
        return comm.note(run(operations));
    }
    let mut under_way: Vec<(Held<Comm>, Pending<()>)> = Vec::new();
    let mut failed = None;
    for (comm, operations) in batches {
        match comm.note(start(operations)) {
            Ok(pending) => under_way.push((comm, pending)),
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    for (comm, pending) in under_way {
        if let Err(error) = comm.note(pending.wait().map_err(|error| error.error)) {
            failed.get_or_insert(error);
        }
    }
    failed.map_or(Ok(()), Err)
}

fn run(operations: Operations) -> Result<(), CollectiveError> {
    let Some((first, _)) = operations.first() else { return Ok(()) };
    let mut batch = first.batch();
    for (group, operation) in operations {
        let mut one = group.batch();
        one.add(operation)?;
        batch.append(one)?;
    }
    batch.run()
}

fn start(operations: Operations) -> Result<Pending<()>, CollectiveError> {
    let first = operations.first().map(|(group, _)| group.clone());
    let group = first.expect("a batch is made for its first operation");
    group
        .batch()
        .start((), |batch, ()| {
            operations.into_iter().try_for_each(|(group, operation)| {
                let mut one = group.batch();
                one.add(operation)?;
                batch.append(one).map(|_| ())
            })
        })
        .map_err(|error| error.error)
}
