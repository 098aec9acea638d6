//! The words of pleach, and what NCCL, NVSHMEM, MPI and verbs call the same thing.
//!
//! A row names the counterpart that a reader may know. A dash says that there is none.
//!
//! # Moving bytes
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | memory | bytes at a fixed address: on the heap, in a shared file, on a GPU | buffer |
//! | region | memory that is registered with a device | verbs: memory region; NVSHMEM: symmetric memory |
//! | region key | the name by which a peer reaches a region | verbs: rkey; MPI: window |
//! | slice | a part of a region of this process; a slice keeps its region registered | verbs: scatter/gather element |
//! | device | one rank's end of a fabric | NCCL: network plugin and transport; libfabric: endpoint |
//! | fabric | a kind of device: `sim`, `shm`, `tcp`, `verbs` and hybrids | UCX: transport |
//! | transfer | a one-sided put, get or atomic operation | verbs: work request; MPI: `MPI_Put`, `MPI_Get` |
//! | signal slot | a counter with 48 bytes of payload that a rank keeps for a peer | NVSHMEM: signal object; MSCCL++: semaphore |
//! | signal | adds one to a signal slot of the target after the bytes of a put | NVSHMEM: put-with-signal; verbs: RDMA write with immediate |
//! | wake source | what a rank sleeps on until a device can have news | verbs: completion channel; Linux: eventfd, futex |
//! | responder | answers control messages, also while no thread polls | MPI: progress thread |
//! | sever | to cut a peer off | verbs: moving a queue pair to the error state |
//! | fence | what holds after severing: the peer changes no byte of local memory | fencing, in distributed systems |
//! | mapped | a peer's memory at an address of this process | NCCL: P2P direct; CUDA: IPC memory |
//! | loss | a peer that is gone without bye; its kind is the same value on all survivors | NCCL: `ncclRemoteError` |
//! | reach | how a device reaches one peer: over which fabric, and whether it maps | UCX: endpoint |
//! | queue pair | one end of a reliable RDMA connection | verbs: the same |
//! | stripe | the part of a transfer that goes over one of several queue pairs | NCCL: channel over several NICs |
//! | GID | an address of an RDMA port | verbs: the same |
//! | store | a small table by which ranks find each other | PyTorch: `Store`; MPI: PMIx |
//!
//! # Schedules
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | collective | what is computed: parts and contributions | MPI, NCCL: the same |
//! | part | a piece of the whole data that one rank gives or gets | MPI: block |
//! | schedule | a collective as data: a few lanes for every rank | MSCCL: algorithm |
//! | lane | a small program over the chunks of a block | MSCCL: thread block; NCCL: channel |
//! | block, chunk | a share of a part; the piece of a block that one round of a lane moves | NCCL: chunk, slice |
//! | window | how many chunks of a lane may be under way at once | NCCL: steps of a FIFO |
//! | eager | an algorithm whose data go to scratch of the receivers without a word of theirs before | MPI: eager protocol |
//! | proof | a schedule that `verify` accepted | - |
//! | variant | an algorithm with its access and its window | NCCL: algorithm and protocol |
//! | tuning | measured tables: the variant that a collective takes from how many bytes on | NCCL: tuner |
//! | topology | ranks, switches, and the links that join them | NCCL: topology graph |
//! | packing | weighted trees over a topology, with their rate and the bound | Blink: spanning-tree packing; TreeGen of ForestColl |
//! | certificate | the cut or partition that shows a bound | max-flow min-cut |
//! | symmetry | an automorphism of a topology; what symmetries carry into each other is an orbit | graph theory: the same |
//!
//! # Groups and calls
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | rank | a process of a job, numbered from 0 | MPI, NCCL: the same |
//! | group | the ranks that take part, as a user holds them | MPI, NCCL: communicator; PyTorch: process group |
//! | colour, key | to which part of a split group a rank goes; how ranks are numbered there | MPI: `MPI_Comm_split` |
//! | operation | a call as a value: what is asked for, and the memory that it works on | PyTorch: `P2POp`; cuBLASLt: matmul descriptor |
//! | pending | a call under way, which owns its memory | MPI: request; PyTorch: `Work` |
//! | persistent | a call that is planned once and run often | MPI: persistent collective |
//! | batch, bucket | calls that are carried out together; those of them that are fused into one | NCCL: group call; PyTorch: bucket |
//! | tag | a number that tells apart calls that are alike otherwise | MPI: tag |
//! | progress | who carries on what was started: callers, or a thread besides | MPI: asynchronous progress |
//! | priority | which of several calls under way takes its steps first | NCCL: stream priority |
//! | stream, mark | an order of work on a GPU; a place in it | CUDA: stream, event |
//! | staging | host memory through which peers see what lies on a GPU | NCCL: bounce buffer |
//! | fault | why a group has failed, the same on all survivors | NCCL: asynchronous error |
//! | lateness | how much later than this rank a peer made a call | arrival skew; straggler |
//! | report | what one rank knows of its group: calls, times, lateness | NCCL: RAS |
//! | flight recorder | a rank's last operations, written down when its group fails | PyTorch: flight recorder |
//! | finding | a line of the doctor's report: ok, unknown, warning or problem, with a remedy | - |
//! | circle | ranks that are each blocked in a call that needs the next rank | deadlock |
