//! Collectives, messages and the barrier: NCCL's parameter order, and its in-place rules, checked.

use std::ffi::{c_int, c_void};

use pleach_collectives::Operation;
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use crate::batch::{carry_out, is_in_batch, refused};
use crate::comm::{Comm, find, pleachComm_t};
use crate::result::{Failed, guarded, pleachResult_t};
use crate::types::{data_type, pleachDataType_t, pleachRedOp_t, reduction};

/// Elements at an address.
type Elements = (*const c_void, usize);

/// The arguments of a call.
struct Asked {
    comm: pleachComm_t,
    stream: *mut c_void,
    datatype: pleachDataType_t,
    op: Option<pleachRedOp_t>,
}

/// The lengths of the blocks, in elements.
enum Blocks {
    Equal,
    Listed(Vec<usize>),
    SendAndReceive(Vec<usize>, Vec<usize>),
}

impl Asked {
    /// Carries out the call that `shape` describes: the collective, its input, its output, and the
    /// lengths of its blocks.
    ///
    /// # Safety
    ///
    /// Input and output are memory of `count` elements, or NULL, until the call or the group of
    /// calls has ended.
    unsafe fn call(
        self,
        shape: impl FnOnce(&Comm) -> Result<(Collective, Option<Elements>, Option<Elements>, Blocks), Failed>,
    ) -> pleachResult_t {
        guarded(|| {
            let call = || {
                let comm = find(self.comm)?;
                let data_type = data_type(self.datatype)?;
                let op = self.op.map_or(Ok(ReduceOp::Sum), |number| reduction(&comm, number))?;
                let (collective, input, output, blocks) = shape(&comm)?;
                let operands =
                    [input, output].map(|data| data.map(|(address, count)| (address.cast_mut(), count)));
                let [input, output] = comm.registrations.name(operands, data_type.bytes());
                // SAFETY: the caller's promise.
                let operation = unsafe { Operation::from_raw(collective, data_type, op, input, output) }?;
                let operation = match blocks {
                    // The operation is not moved a second time.
                    Blocks::Equal => return carry_out(comm, self.stream, operation),
                    Blocks::Listed(counts) => operation.with_counts(&counts),
                    Blocks::SendAndReceive(send, receive) => {
                        operation.with_send_and_receive_counts(&send, &receive)
                    }
                };
                carry_out(comm, self.stream, operation)
            };
            call().map_err(refused)
        })
    }
}

/// The elements of `blocks` blocks of `count` elements.
fn times(count: usize, blocks: u32) -> Result<usize, Failed> {
    count.checked_mul(blocks as usize).ok_or_else(|| {
        Failed::argument(format!("{blocks} blocks of {count} elements are more than a process can address"))
    })
}

pub(crate) fn rank_of(rank: c_int, name: &str) -> Result<Rank, Failed> {
    Rank::try_from(rank).map_err(|_| Failed::argument(format!("{name} is {rank}; ranks are counted from 0")))
}

/// A list of one count for each rank.
///
/// # Safety
///
/// `list` is NULL or has `ranks` elements.
unsafe fn counts(list: *const usize, ranks: u32, name: &str) -> Result<Vec<usize>, Failed> {
    if list.is_null() {
        return Err(Failed::argument(format!("{name} is NULL; it is a list of one count for each rank")));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(list, ranks as usize) }.to_vec())
}

/// Reduces the sendbuffs of all ranks, and stores the result in the recvbuff of every rank. In
/// place: recvbuff is sendbuff.
///
/// With a NULL stream the buffers are host memory. pleachGroupEnd carries out the calls that follow
/// pleachGroupStart.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    op: pleachRedOp_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    if sendbuff == recvbuff.cast_const() && stream.is_null() && !is_in_batch() {
        return guarded(|| {
            let held = find(comm)?;
            let (data_type, op) = (data_type(datatype)?, reduction(&held, op)?);
            let data = held.registrations.name_one(recvbuff, count, data_type.bytes());
            held.with_group(stream, |group| {
                // SAFETY: the caller's promise.
                held.note(unsafe { data.all_reduce(group, data_type, op) })
            })
        });
    }
    let shape = |_: &Comm| {
        Ok((
            Collective::AllReduce,
            Some((sendbuff, count)),
            Some((recvbuff.cast_const(), count)),
            Blocks::Equal,
        ))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: Some(op) }.call(shape) }
}

/// Stores the sendbuff of the root in the recvbuff of every rank. The sendbuff of other ranks is
/// ignored. In place: recvbuff is sendbuff.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        let input = (held.group.rank() == root).then_some((sendbuff, count));
        Ok((Collective::Broadcast { root }, input, Some((recvbuff.cast_const(), count)), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Stores the buff of the root in the buff of every other rank, as pleachBroadcast in place does.
///
/// Ownership: the buffer stays the caller's. It has `count` elements until the call has ended; it
/// may be NULL where `count` is 0. Threads: any; calls of several threads on one communicator need
/// one order on all ranks. Blocks: until the part of this rank is done, at most the timeout of the
/// communicator; between pleachGroupStart and pleachGroupEnd the function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachBcast(
    buff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { pleachBroadcast(buff, buff, count, datatype, root, comm, stream) }
}

/// Reduces the sendbuffs of all ranks, and stores the result in the recvbuff of the root. The
/// recvbuff of other ranks is ignored. In place: recvbuff is sendbuff.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    op: pleachRedOp_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        let output = (held.group.rank() == root).then_some((recvbuff.cast_const(), count));
        Ok((Collective::Reduce { root }, Some((sendbuff, count)), output, Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: Some(op) }.call(shape) }
}

/// Reduces the sendbuffs of all ranks, and stores block r of the result in the recvbuff of rank r.
/// A block has recvcount elements. In place: recvbuff is sendbuff plus rank times recvcount
/// elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachReduceScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: pleachDataType_t,
    op: pleachRedOp_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let input = (sendbuff, times(recvcount, held.group.world_size())?);
        let output = (recvbuff.cast_const(), recvcount);
        Ok((Collective::ReduceScatter, Some(input), Some(output), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: Some(op) }.call(shape) }
}

/// Stores the sendbuffs of all ranks in the recvbuff of every rank, in rank order. A sendbuff has
/// sendcount elements. In place: sendbuff is recvbuff plus rank times sendcount elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: pleachDataType_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let output = (recvbuff.cast_const(), times(sendcount, held.group.world_size())?);
        Ok((Collective::AllGather, Some((sendbuff, sendcount)), Some(output), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Stores block r of the sendbuff of rank s as block s of the recvbuff of rank r, for all r and s.
/// A block has count elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAlltoAll(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let all = times(count, held.group.world_size())?;
        Ok((Collective::AllToAll, Some((sendbuff, all)), Some((recvbuff.cast_const(), all)), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Stores the sendbuffs of all ranks in the recvbuff of the root, in rank order. A sendbuff has
/// count elements. In place: the sendbuff of the root is recvbuff plus root times count elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        let all = times(count, held.group.world_size())?;
        let output = (held.group.rank() == root).then_some((recvbuff.cast_const(), all));
        Ok((Collective::Gather { root }, Some((sendbuff, count)), output, Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Stores block r of the sendbuff of the root in the recvbuff of rank r, for all r. A block has
/// count elements. In place: the recvbuff of the root is sendbuff plus root times count elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        let all = times(count, held.group.world_size())?;
        let input = (held.group.rank() == root).then_some((sendbuff, all));
        Ok((Collective::Scatter { root }, input, Some((recvbuff.cast_const(), count)), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Sends `count` elements to a rank, which must receive the same number of elements. A send of more
/// than 8 KiB does not return before the receiver has made its call.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: pleachDataType_t,
    peer: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let (from, to) = (held.group.rank(), rank_of(peer, "peer")?);
        Ok((Collective::SendRecv { from, to }, Some((sendbuff, count)), None, Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// Receives `count` elements from a rank, which must send the same number of elements.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: pleachDataType_t,
    peer: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let (from, to) = (rank_of(peer, "peer")?, held.group.rank());
        Ok((Collective::SendRecv { from, to }, None, Some((recvbuff.cast_const(), count)), Blocks::Equal))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// A barrier: no rank returns before every rank has called the function.
///
/// Ownership: nothing changes hands. Threads: any; calls of several threads on one communicator
/// need one order on all ranks. Blocks: until the part of this rank is done, at most the timeout of
/// the communicator; between pleachGroupStart and pleachGroupEnd the function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator;
/// pleachInvalidUsage if the ranks make different calls, the communicator was finalized, this
/// process is a forked child, or there is a stream for host memory; pleachTimeout if another rank
/// is late; pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachBarrier(comm: pleachComm_t, stream: *mut c_void) -> pleachResult_t {
    let shape = |_: &Comm| Ok((Collective::Barrier, None, None, Blocks::Equal));
    // SAFETY: the call has no buffers.
    unsafe { Asked { comm, stream, datatype: crate::types::pleachUint8, op: None }.call(shape) }
}

/// As pleachAllGather, with blocks of different lengths. The block of rank r has `counts[r]`
/// elements. All ranks pass the same counts, one for each rank.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. `counts` is NULL or has one
/// element for each rank, and is read before the function returns. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAllGatherV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    counts: *const usize,
    datatype: pleachDataType_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        // SAFETY: the caller's promise.
        let list = unsafe { self::counts(counts, held.group.world_size(), "counts") }?;
        let input = (sendbuff, list[held.group.rank() as usize]);
        let output = (recvbuff.cast_const(), sum(&list)?);
        Ok((Collective::AllGather, Some(input), Some(output), Blocks::Listed(list)))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// As pleachReduceScatter, with blocks of different lengths. The block of rank r has `counts[r]`
/// elements. All ranks pass the same counts, one for each rank.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. `counts` is NULL or has one
/// element for each rank, and is read before the function returns. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachReduceScatterV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    counts: *const usize,
    datatype: pleachDataType_t,
    op: pleachRedOp_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        // SAFETY: the caller's promise.
        let list = unsafe { self::counts(counts, held.group.world_size(), "counts") }?;
        let input = (sendbuff, sum(&list)?);
        let output = (recvbuff.cast_const(), list[held.group.rank() as usize]);
        Ok((Collective::ReduceScatter, Some(input), Some(output), Blocks::Listed(list)))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: Some(op) }.call(shape) }
}

/// As pleachAlltoAll, with blocks of different lengths. `sendcounts[r]` elements go to rank r, and
/// `recvcounts[r]` elements come from rank r. Both buffers hold the blocks in rank order without
/// gaps.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. Both lists are NULL or have one
/// element for each rank, and are read before the function returns. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachAlltoAllV(
    sendbuff: *const c_void,
    sendcounts: *const usize,
    recvbuff: *mut c_void,
    recvcounts: *const usize,
    datatype: pleachDataType_t,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let ranks = held.group.world_size();
        // SAFETY: the caller's promise.
        let send = unsafe { self::counts(sendcounts, ranks, "sendcounts") }?;
        // SAFETY: the caller's promise.
        let receive = unsafe { self::counts(recvcounts, ranks, "recvcounts") }?;
        let (input, output) = ((sendbuff, sum(&send)?), (recvbuff.cast_const(), sum(&receive)?));
        Ok((Collective::AllToAll, Some(input), Some(output), Blocks::SendAndReceive(send, receive)))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// As pleachGather, with blocks of different lengths. The block of rank r has `counts[r]` elements.
/// All ranks pass the same counts, one for each rank.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. `counts` is NULL or has one
/// element for each rank, and is read before the function returns. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGatherV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    counts: *const usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        // SAFETY: the caller's promise.
        let list = unsafe { self::counts(counts, held.group.world_size(), "counts") }?;
        let input = (sendbuff, list[held.group.rank() as usize]);
        let all = sum(&list)?;
        let output = (held.group.rank() == root).then_some((recvbuff.cast_const(), all));
        Ok((Collective::Gather { root }, Some(input), output, Blocks::Listed(list)))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

/// As pleachScatter, with blocks of different lengths. The block of rank r has `counts[r]`
/// elements. All ranks pass the same counts, one for each rank.
///
/// Ownership: the buffers stay the caller's. Each has as many elements as the call reads or writes,
/// until the call has ended; a buffer without elements may be NULL. `counts` is NULL or has one
/// element for each rank, and is read before the function returns. Threads: any; calls of several
/// threads on one communicator need one order on all ranks. Blocks: until the part of this rank is
/// done, at most the timeout of the communicator; between pleachGroupStart and pleachGroupEnd the
/// function returns at once.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks make different calls, the communicator was finalized, this process is a forked
/// child, or there is a stream for host memory; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachUnhandledCudaError if a GPU
/// fails; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachScatterV(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    counts: *const usize,
    datatype: pleachDataType_t,
    root: c_int,
    comm: pleachComm_t,
    stream: *mut c_void,
) -> pleachResult_t {
    let shape = |held: &Comm| {
        let root = rank_of(root, "root")?;
        // SAFETY: the caller's promise.
        let list = unsafe { self::counts(counts, held.group.world_size(), "counts") }?;
        let output = (recvbuff.cast_const(), list[held.group.rank() as usize]);
        let all = sum(&list)?;
        let input = (held.group.rank() == root).then_some((sendbuff, all));
        Ok((Collective::Scatter { root }, input, Some(output), Blocks::Listed(list)))
    };
    // SAFETY: the caller's promise.
    unsafe { Asked { comm, stream, datatype, op: None }.call(shape) }
}

fn sum(counts: &[usize]) -> Result<usize, Failed> {
    let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
    sum.ok_or_else(|| Failed::argument("the counts together are more than a process can address"))
}
