//! The words of pleach, with the words of NCCL, NVSHMEM, MPI and verbs for the same thing.
//!
//! The last column names the counterpart elsewhere. A dash means that there is none.
//!
//! # Moving bytes
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | memory | bytes at a fixed address: on the heap, in a shared file, on a GPU | buffer |
//! | region | memory that is registered with a device | verbs: memory region; NVSHMEM: symmetric memory |
//! | region key | the number by which a peer addresses a region | verbs: rkey; MPI: window |
//! | slice | a part of a region of this process; a slice keeps its region registered | verbs: scatter/gather element |
//! | device | the endpoint of one rank on a fabric | NCCL: network plugin and transport; libfabric: endpoint |
//! | fabric | a kind of device: `sim`, `shm`, `tcp`, `verbs` and hybrids | UCX: transport |
//! | transfer | a one-sided put, get or atomic operation | verbs: work request; MPI: `MPI_Put`, `MPI_Get` |
//! | signal slot | a counter with 48 bytes of payload that a rank keeps for a peer | NVSHMEM: signal object; MSCCL++: semaphore |
//! | signal | adds one to a signal slot of the target after the bytes of a put | NVSHMEM: put-with-signal; verbs: RDMA write with immediate |
//! | wake source | a file descriptor or futex on which a rank sleeps until its device has events | verbs: completion channel; Linux: eventfd, futex |
//! | responder | answers control messages, even while no thread polls | MPI: progress thread |
//! | sever | to cut off a peer | verbs: moving a queue pair to the error state |
//! | fence | the guarantee after severing: the peer changes no byte of local memory | distributed systems: fencing |
//! | drain | to wait until all from before has landed at both ends of a pair, which goes on | NVSHMEM: quiet, at both ends; verbs: send queue drained |
//! | incarnation | one of the processes that have a rank one after the other | TensorFlow: the same; etcd: member id |
//! | generation | what a device counts up when a rank of a peer is given to another process | Raft: term |
//! | mapped | a peer's memory at an address of this process | NCCL: P2P direct; CUDA: IPC memory |
//! | lent memory | memory that its peers can only read | verbs: memory region without remote write; MPI: none |
//! | loss | the end of a peer without a shutdown; all survivors report the same kind of loss | NCCL: `ncclRemoteError` |
//! | reach | the path from a device to one peer: the fabric, and whether memory is mapped | UCX: endpoint |
//! | queue pair | one end of a reliable RDMA connection | verbs: the same |
//! | stripe | the part of a transfer that goes over one of several queue pairs | NCCL: channel over several NICs |
//! | GID | an address of an RDMA port | verbs: the same |
//! | store | a key-value table by which ranks find each other | PyTorch: `Store`; MPI: PMIx |
//!
//! # Data-flow graphs
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | graph | nodes that compute tensors from tensors, in a topological order | ONNX, TensorFlow: the same |
//! | value | a tensor that flows through a graph: an input, a weight, or a result of a node | ONNX: the same; TensorFlow: edge |
//! | placement | a rank for each node | TensorFlow: device placement; ONNX: pipeline stage |
//! | part of a graph | the nodes of one rank | TensorFlow: partition |
//! | crossing | a tensor that goes from one rank to another | TensorFlow: a pair of Send and Recv |
//! | slot | a place for a tensor that crosses, which several iterations use by turns | RPC Considered Harmful: statically placed tensor |
//! | channel | a crossing with its slots, as the two ranks at its ends see it | Ray: channel of a compiled graph |
//! | credit | the receiver's word that a slot may be used again | InfiniBand: credit of flow control |
//! | site | the allocation of a runtime that holds a certain result in each iteration | RPC Considered Harmful: dynamic analysis of allocations |
//! | memory plan | an offset in one arena for each buffer | TensorFlow Lite: arena plan; XLA: heap simulation |
//!
//! # Membership
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | seat | a stable number that one process after the other may hold | torchrun: rank of a node; Kubernetes: completion index |
//! | epoch | a time in which a group has fixed members | Raft: configuration; torchft: quorum |
//! | record | the members of an epoch, its first step, and why it came | ZooKeeper: dynamic configuration |
//! | write-once register | what holds the record of one number; it never changes | Paxos: a decree |
//! | certificate of death | the word of a witness that a process has ended, with the last record that it knew | Kubernetes: terminated state |
//! | suspicion | a reason to propose an epoch without a member | SWIM: the same |
//! | verdict of a step | committed on all members, or repeated by all | databases: commit, abort |
//!
//! # Tensors between programs
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | endpoint | a program's end of the tensor exchange: what it sends, and where peers connect | gRPC: server and channel |
//! | key | a step and a name, by which a tensor is received | TensorFlow: rendezvous key |
//! | tensor table | tensors that wait for receivers, and receives that wait for tensors | TensorFlow: rendezvous |
//! | lease | memory of one program that another one reads in place until it drops the tensor | Plasma: pinned object |
//! | reference | what a message holds in the place of a tensor | KServe: shared-memory region with offset and size |
//! | arena | lendable memory in which the tensors of a program lie | Arrow, TensorFlow: memory pool |
//! | inline | the bytes of a tensor behind their message, where no memory is shared | gRPC: message body |
//! | published step | a fixed set of tensors, each for every receiver | KServe: model repository |
//!
//! # Schedules
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | collective | an operation of all ranks, described by the parts of the data that each rank gives and gets | MPI, NCCL: the same |
//! | part | a piece of the data that one rank gives or gets | MPI: block |
//! | schedule | a collective as data: a list of lanes for every rank | MSCCL: algorithm |
//! | lane | a program that a rank runs for every chunk of a block | MSCCL: thread block; NCCL: channel |
//! | block, chunk | a share of a part; the piece of a block that one pass of a lane moves | NCCL: chunk, slice |
//! | window of a lane | the number of chunks of a lane that may be under way at the same time | NCCL: steps of a FIFO |
//! | eager | an algorithm that sends data to scratch memory of the receiver without waiting for it | MPI: eager protocol |
//! | proof | a schedule that `verify` accepted | - |
//! | variant | an algorithm with its access and its window | NCCL: algorithm and protocol |
//! | tuning | measured tables: the variant of a collective for each range of sizes | NCCL: tuner |
//! | topology | ranks, switches, and the links between them | NCCL: topology graph |
//! | packing | weighted spanning trees of a topology, with their rate and the bound | Blink: spanning-tree packing; TreeGen of ForestColl |
//! | certificate | the cut or partition that proves a bound | graph theory: minimum cut; ForestColl: bottleneck cut |
//! | strength | the smallest ratio of bandwidth to number of parts over all partitions of the ranks | graph theory: strength of a graph (Cunningham) |
//! | symmetry, orbit | an automorphism of a topology; the nodes or links that symmetries map to each other | graph theory: automorphism, orbit |
//! | skew limit | the number of chunks by which one tree of a packing may be ahead of another | - |
//!
//! # Groups and calls
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | rank | a process of a job, numbered from 0 | MPI, NCCL: the same |
//! | group | the ranks of a job, or some of them, as a user holds them | MPI, NCCL: communicator; PyTorch: process group |
//! | colour, key | the part of a split group that a rank joins; the order of the ranks in that part | MPI: `MPI_Comm_split` |
//! | operation | a call as a value: the collective, its parameters, and its memory | PyTorch: `P2POp`; cuBLASLt: matmul descriptor |
//! | pending | a call under way; it owns its memory | MPI: request; PyTorch: `Work` |
//! | persistent | a call that is planned once and run many times | MPI: persistent collective |
//! | batch, bucket | calls that run together; calls of a batch that are fused into one call | NCCL: group call; PyTorch: bucket |
//! | tag | a number that distinguishes calls with otherwise equal parameters | MPI: tag |
//! | progress | the threads that advance started calls: those of the caller, or a thread of the group | MPI: asynchronous progress |
//! | priority | the order in which calls under way take their steps | NCCL: stream priority |
//! | stream, mark | an order of work on a GPU; a place in it | CUDA: stream, event |
//! | staging | host memory through which data of a GPU pass on their way to peers | NCCL: bounce buffer |
//! | window | memory of a group that ranks read and write without each other's calls | MPI: window, passive target; NVSHMEM: symmetric heap |
//! | version | all elements that a rank published at once, with a word; a read is of one version | seqlock: sequence; parameter server: clock |
//! | slot of a window | memory at a target into which one writer writes, under credit | MPI: none |
//! | word | up to 48 bytes that go with a version or with a write | verbs: immediate |
//! | fault | the cause of the failure of a group, the same on all survivors | NCCL: asynchronous error |
//! | arrival skew | the time from the call of this rank to the same call of a peer | straggler |
//! | report | the statistics of one rank: calls, times, arrival skew | NCCL: RAS |
//! | flight recorder | the last operations of a rank, written to a file when its group fails | PyTorch: flight recorder |
//! | finding | one line of the report of `pleach doctor`: ok, unknown, warning or problem, with a remedy | - |
//! | cycle | ranks that are each blocked in a call that needs the next rank | distributed systems: deadlock |
//!
//! # Training
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | scheme | a rule by which ranks train one model | PyTorch: DDP, `LocalSGD` and others; Horovod: distributed optimizer |
//! | policy | the decisions of a scheme on one rank | - |
//! | driver | carries out what a policy decides: a trainer on ranks, or a simulation | - |
//! | ledger | the pieces of vectors that computing and operations under way use | - |
//! | exchange | an operation after which all ranks have the same parameters | torchft: synchronization |
//! | pseudo-gradient | what local steps changed, with the opposite sign | DiLoCo: outer gradient |
//! | staleness | how many steps a rank has made since the last exchange, when it computes a gradient | SSP: clocks |
