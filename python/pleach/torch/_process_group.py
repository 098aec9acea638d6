"""The process group: from c10d's calls to those of the package.

Each method checks its arguments, takes contiguous tensors (a copy where a tensor is not contiguous) and
gives a job to a lane: collectives have one lane, so that all ranks make them in one order; the messages
to a peer and from a peer have a lane each, so that no message waits for another peer's.
"""

import ctypes
import os
import struct
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from pleach import PremulSum

from ._comm import Comm
from ._errors import PleachError, PleachTimeout, PleachUnsupported
from ._work import Lane

#: Element type of pleach, and how many of its elements a torch element has.
DATA_TYPES = {
    torch.int8: ("int8", 1),
    torch.uint8: ("uint8", 1),
    torch.bool: ("uint8", 1),
    torch.int16: ("int16", 1),
    torch.uint16: ("uint16", 1),
    torch.int32: ("int32", 1),
    torch.uint32: ("uint32", 1),
    torch.int64: ("int64", 1),
    torch.uint64: ("uint64", 1),
    torch.float16: ("float16", 1),
    torch.complex32: ("float16", 2),
    torch.float32: ("float32", 1),
    torch.complex64: ("float32", 2),
    torch.float64: ("float64", 1),
    torch.complex128: ("float64", 2),
    torch.bfloat16: ("bfloat16", 1),
    torch.float8_e4m3fn: ("float8_e4m3fn", 1),
    torch.float8_e5m2: ("float8_e5m2", 1),
}
OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
BIT_OPS = ("BAND", "BOR", "BXOR")
#: Of truth values a sum is true where any is, a product where all are.
BOOL_OPS = {"SUM": "or", "PRODUCT": "and", "MAX": "or", "MIN": "and"} | {name: OPS[name] for name in BIT_OPS}
COMPLEX_OPS = ("SUM", "AVG", "PREMUL_SUM")
#: What goes before a message: its tag, its length in bytes.
HEADER = struct.Struct("<qQ")
#: The longest time that is given to the package, in seconds.
TIMEOUT_S_MAX = 10.0**8


def seconds(timeout):
    """Returns a timedelta in seconds; None for none."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return min(timeout.total_seconds(), TIMEOUT_S_MAX)


def dense(tensor):
    """Returns the tensor if it is dense and in host memory."""
    if tensor.device.type != "cpu":
        raise PleachUnsupported(f"a tensor is on {tensor.device}, and the group works on cpu; move it there")
    if tensor.layout != torch.strided:
        raise PleachUnsupported(f"a tensor is {tensor.layout}; only all_reduce takes sparse tensors (torch.sparse_coo)")
    if tensor.dtype not in DATA_TYPES:
        raise PleachUnsupported(f"the backend does not know {tensor.dtype}")
    return tensor.detach()


def only(tensors):
    """Returns the only tensor of a list."""
    if len(tensors) != 1:
        raise PleachUnsupported(f"a call takes one tensor, not {len(tensors)}; CPU groups have one device")
    return tensors[0]


def resolved(tensor):
    """Returns the tensor with a lazy conjugation or negation carried out."""
    return tensor.resolve_conj().resolve_neg()


def type_of(tensor):
    """Returns the element type of pleach for a tensor."""
    return DATA_TYPES[tensor.dtype][0]


def memory(tensor):
    """Returns address and number of elements of pleach."""
    return tensor.data_ptr(), tensor.numel() * DATA_TYPES[tensor.dtype][1]


def same_type(tensors, what):
    """Refuses tensors of different types."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise PleachUnsupported(f"the tensors of {what} have different types: {', '.join(sorted(map(str, types)))}")


def store_into(target, flat):
    """Copies elements, in rank order, into a tensor of any strides."""
    target.copy_(flat.view(target.shape))


class PleachProcessGroup(dist.ProcessGroup):
    """A group of ranks; ``init_process_group("pleach")`` and ``new_group`` make it."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._closed = None
        self._name = ""
        self._description = "undefined"
        self._lane = Lane("pleach-torch")
        self._messages = {}
        self._stashes = {}
        self._messages_lock = threading.Lock()
        self._barriers = 0
        self._process = os.getpid()
        self._comm = Comm(store, rank, size, seconds(timeout))

    @classmethod
    def create(cls, store, rank, size, timeout):
        """Makes a group of the ranks that meet in the store."""
        return cls(store, rank, size, timeout)

    # ---- What the group is

    def getBackendName(self):
        """Returns the name of the backend."""
        return "pleach"

    def name(self):
        """Returns the name of the backend."""
        return "pleach"

    # c10d keeps these names in the C++ backend of a group, and a group in Python has none.

    def getGroupName(self):
        """Returns the name that torch gave the group."""
        return self._name

    def setGroupName(self, name):
        """Sets the name of the group."""
        self._name = name

    def getGroupDesc(self):
        """Returns the description of the group."""
        return self._description

    def setGroupDesc(self, description):
        """Sets the description of the group."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def rank(self):
        """Returns the rank of this process in the group."""
        return self._rank

    def size(self):
        """Returns the number of ranks."""
        return self._size

    def get_group_store(self):
        """Returns the store in which the ranks met."""
        return self._store

    @property
    def _device_types(self):
        return [torch.device("cpu")]

    def _get_backend(self, device):
        if torch.device(device).type != "cpu":
            raise PleachUnsupported(f"the group works on cpu, not on {device}")
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout):
        """Sets how long each later call waits for other ranks."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    # ---- Ends

    def abort(self):
        """Ends the work on all ranks; calls under way raise."""
        if self._closed is None and self._process == os.getpid():
            self._closed = "aborted"
            self._comm.abort()

    def shutdown(self):
        """Leaves the group; later calls raise."""
        if self._closed is None and self._process == os.getpid():
            lanes = [self._lane, *self._messages.values()]
            for lane in lanes:
                lane.drain()
            self._closed = "destroyed"
            for lane in lanes:
                lane.stop()
            self._comm.close()

    def __del__(self):
        if hasattr(self, "_comm"):
            self.shutdown()

    # ---- From a call to a job

    def _expect_open(self):
        if self._process != os.getpid():
            raise PleachError(
                f"the group belongs to process {self._process}; a forked child must call init_process_group itself"
            )
        if self._closed is not None:
            raise PleachError(f"the group is {self._closed}; call init_process_group or new_group again")

    def _give(self, job, result, opts=None, is_async=None):
        self._expect_open()
        limit = seconds(getattr(opts, "timeout", None)) or seconds(self._timeout)

        def timed():
            self._comm.timeout_s = limit
            job()

        if is_async is None:
            is_async = getattr(opts, "asyncOp", True)
        work = self._lane.give(timed, result, is_async)
        # A call that waits anyway raises here, so that C++ callers see the exception too.
        if not is_async:
            work.wait()
        return work

    def _op(self, op, dtype):
        """Returns a function that makes pleach's number of an operation, and its name."""
        kind = getattr(op, "op", op)
        name = kind.name
        if dtype == torch.bool:
            number = BOOL_OPS.get(name)
        elif dtype.is_complex and name not in COMPLEX_OPS:
            number = None
        elif name == "PREMUL_SUM":
            return self._premultiplied(op, dtype)
        elif dtype.is_floating_point and name in BIT_OPS:
            number = None
        else:
            number = OPS.get(name)
        if number is None:
            raise PleachUnsupported(f"{name} has no meaning for {dtype}")
        return number

    def _premultiplied(self, op, dtype):
        factor = op.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                raise PleachUnsupported("the factor of PREMUL_SUM must have one element")
            factor = factor.item()
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        return PremulSum(int(factor) if is_whole else float(factor))

    def _root(self, root):
        if not 0 <= root < self._size:
            raise ValueError(f"rank {root} is not in this group of {self._size}")
        return root

    # ---- Collectives

    def broadcast(self, tensors, opts=None, timeout=None):
        """Replaces the tensor of every rank by that of ``opts.rootRank``."""
        tensor = dense(only(as_list(tensors)))
        root = self._root(opts if isinstance(opts, int) else getattr(opts, "rootRank", 0))

        def job():
            data = resolved(tensor).contiguous()
            self._comm.call("broadcast", type_of(data), memory(data), memory(data), root=root)
            if data.data_ptr() != tensor.data_ptr():
                store_into(tensor, data)

        return self._give(job, [tensor], opts)

    def allreduce(self, tensors, opts=None, timeout=None):
        """Replaces the tensor of every rank by the reduction of all."""
        tensor = only(as_list(tensors))
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, opts)
        return self._allreduce([dense(tensor)], opts)

    def allreduce_coalesced(self, tensors, opts=None):
        """Replaces each tensor of every rank by the reduction of all."""
        return self._allreduce([dense(tensor) for tensor in tensors], opts)

    def _allreduce(self, tensors, opts):
        self._expect_open()
        op = reduce_op(opts)
        numbers = [self._op(op, tensor.dtype) for tensor in tensors]

        def job():
            for tensor, number in zip(tensors, numbers):
                self._reduce_all(tensor, number)

        return self._give(job, tensors, opts)

    def _reduce_all(self, tensor, number):
        data = resolved(tensor).contiguous()
        self._comm.call("all_reduce", type_of(data), memory(data), memory(data), number)
        if data.data_ptr() != tensor.data_ptr():
            store_into(tensor, data)

    def _allreduce_sparse(self, tensor, opts):
        """Gathers indices and values of all ranks, and adds them."""
        name = getattr(reduce_op(opts), "op", reduce_op(opts)).name
        if name != "SUM" or tensor.layout != torch.sparse_coo:
            raise PleachUnsupported(f"of sparse tensors there is the sum of torch.sparse_coo, not {name} of {tensor.layout}")

        def job():
            own = tensor.detach().coalesce()
            indices, values = own.indices().t().contiguous(), own.values().contiguous()
            lengths = torch.empty(self._size, dtype=torch.int64)
            length = torch.tensor([values.shape[0]])
            self._comm.call("all_gather", "int64", memory(length), memory(lengths))
            all_indices = self._gather_rows(indices, lengths.tolist())
            all_values = self._gather_rows(values, lengths.tolist())
            total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)

        return self._give(job, [tensor], opts)

    def _gather_rows(self, rows, lengths):
        row = rows.shape[1:].numel()
        width = DATA_TYPES[rows.dtype][1]
        gathered = rows.new_empty((sum(lengths), *rows.shape[1:]))
        counts = [length * row * width for length in lengths]
        self._comm.call("all_gather", type_of(rows), memory(rows), memory(gathered), counts=counts)
        return gathered

    def reduce(self, tensors, opts=None, *further):
        """Replaces the tensor of the root by the reduction of all."""
        self._expect_open()
        tensor = dense(only(as_list(tensors)))
        root = self._root(opts.rootRank)
        number = self._op(opts.reduceOp, tensor.dtype)

        def job():
            data = resolved(tensor).contiguous()
            self._comm.call("reduce", type_of(data), memory(data), memory(data), number, root=root)
            if root == self._rank and data.data_ptr() != tensor.data_ptr():
                store_into(tensor, data)

        return self._give(job, [tensor], opts)

    def _gather_all(self, source, flat):
        source = resolved(source).contiguous()
        self._comm.call("all_gather", type_of(source), memory(source), memory(flat))

    def allgather(self, outputs, inputs, opts=None, timeout=None):
        """Stores the tensor of every rank in the list of every rank."""
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs]
        return self.allgather_coalesced([outputs[0]] if len(outputs) == 1 else outputs, as_list(inputs), opts)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """Stores each tensor of every rank in the list of that number."""
        if len(output_lists) != len(inputs):
            raise ValueError(f"{len(output_lists)} output lists for {len(inputs)} inputs")
        pairs = []
        for outputs, source in zip(output_lists, inputs):
            outputs = [dense(tensor) for tensor in outputs]
            if len(outputs) != self._size:
                raise ValueError(f"there are {len(outputs)} output tensors, not {self._size}, one for each rank")
            pairs.append((outputs, dense(source)))
        for outputs, source in pairs:
            same_type([*outputs, source], "all_gather")
            self._same_lengths(outputs, source)

        def job():
            for outputs, source in pairs:
                flat = source.new_empty(self._size * source.numel())
                self._gather_all(source, flat)
                for output, part in zip(outputs, flat.view(self._size, -1)):
                    store_into(output, part)

        return self._give(job, [tensor for outputs, _ in pairs for tensor in outputs], opts)

    @staticmethod
    def _same_lengths(tensors, source):
        for tensor in tensors:
            if tensor.numel() != source.numel():
                raise ValueError(f"a tensor has {tensor.numel()} elements, not {source.numel()}")

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        """Stores each tensor of every rank, in rank order, in the output of that number."""
        pairs = [(dense(output), dense(source)) for output, source in zip(outputs, inputs, strict=True)]
        for output, source in pairs:
            same_type([output, source], "all_gather_into_tensor")
            if output.numel() != source.numel() * self._size:
                raise ValueError(f"the output has {output.numel()} elements, not {source.numel() * self._size}")

        def job():
            for output, source in pairs:
                flat = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
                self._gather_all(source, flat)
                if flat is not output:
                    store_into(output, flat)

        return self._give(job, [output for output, _ in pairs], opts)

    def _allgather_base(self, output, source, opts=None):
        """Stores the tensor of every rank in the output, in rank order."""
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs, inputs, opts=None, *further):
        """Stores the tensor of every rank in the list of the root."""
        source = dense(only(as_list(inputs)))
        root = self._root(opts.rootRank)
        outputs = [dense(tensor) for tensor in outputs[0]] if root == self._rank else []
        if root == self._rank and len(outputs) != self._size:
            raise ValueError(f"there are {len(outputs)} output tensors, not {self._size}, one for each rank")
        same_type([*outputs, source], "gather")
        self._same_lengths(outputs, source)

        def job():
            data = resolved(source).contiguous()
            flat = data.new_empty(self._size * data.numel() if outputs else 0)
            self._comm.call("gather", type_of(data), memory(data), memory(flat), root=root)
            for output, part in zip(outputs, flat.view(self._size, -1) if outputs else ()):
                store_into(output, part)

        return self._give(job, outputs, opts)

    def scatter(self, outputs, inputs, opts=None, *further):
        """Stores tensor ``r`` of the root's list in the output of rank ``r``."""
        output = dense(only(as_list(outputs)))
        root = self._root(opts.rootRank)
        inputs = [dense(tensor) for tensor in inputs[0]] if root == self._rank else []
        if root == self._rank and len(inputs) != self._size:
            raise ValueError(f"there are {len(inputs)} input tensors, not {self._size}, one for each rank")
        same_type([*inputs, output], "scatter")
        self._same_lengths(inputs, output)

        def job():
            flat = torch.cat([resolved(tensor).reshape(-1) for tensor in inputs]) if inputs else None
            part = torch.empty(output.numel(), dtype=output.dtype)
            source = memory(flat) if inputs else (0, 0)
            self._comm.call("scatter", type_of(part), source, memory(part), root=root)
            store_into(output, part)

        return self._give(job, [output], opts)

    def reduce_scatter(self, outputs, inputs, opts=None, *further):
        """Stores the reduction of tensor ``r`` of every rank's list in the output of rank ``r``."""
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs]
        self._expect_open()
        output = dense(only(as_list(outputs)))
        parts = [dense(tensor) for tensor in only(inputs)]
        if len(parts) != self._size:
            raise ValueError(f"there are {len(parts)} input tensors, not {self._size}, one for each rank")
        same_type([*parts, output], "reduce_scatter")
        self._same_lengths(parts, output)
        number = self._op(reduce_op(opts), output.dtype)

        def job():
            flat = torch.cat([resolved(part).reshape(-1) for part in parts])
            self._scatter_reduced(output, flat, number)

        return self._give(job, [output], opts)

    def _scatter_reduced(self, output, flat, number):
        part = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        address = part.data_ptr()
        # The input of a caller is never changed, and input and output may be the same memory.
        begins, bytes_each = flat.data_ptr(), part.numel() * part.element_size()
        if address < begins + bytes_each * self._size and begins < address + bytes_each:
            flat = flat.clone()
        self._comm.call("reduce_scatter", type_of(part), memory(flat), memory(part), number)
        if part is not output:
            store_into(output, part)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        """Stores block ``r`` of the reduction of each input in the output of that number of rank ``r``."""
        self._expect_open()
        jobs = []
        for output, source in zip(outputs, inputs, strict=True):
            output, source = dense(output), dense(source)
            same_type([output, source], "reduce_scatter_tensor")
            if source.numel() != output.numel() * self._size:
                raise ValueError(f"the input has {source.numel()} elements, not {output.numel() * self._size}")
            jobs.append((output, source, self._op(reduce_op(opts), output.dtype)))

        def job():
            for output, source, number in jobs:
                self._scatter_reduced(output, resolved(source).contiguous(), number)

        return self._give(job, [output for output, _, _ in jobs], opts)

    def _reduce_scatter_base(self, output, source, opts=None):
        """Stores block ``r`` of the reduction of the inputs in the output of rank ``r``."""
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        """Sends tensor ``r`` of the list to rank ``r``."""
        outputs, inputs = [dense(tensor) for tensor in outputs], [dense(tensor) for tensor in inputs]
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(f"there are {len(tensors)} tensors, not {self._size}, one for each rank")
        same_type([*outputs, *inputs], "all_to_all")
        lengths = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]

        def job():
            flat = torch.cat([resolved(tensor).reshape(-1) for tensor in inputs])
            received = torch.empty(sum(lengths[0]), dtype=flat.dtype)
            self._exchange(received, flat, *lengths)
            for output, part in zip(outputs, received.split(lengths[0])):
                store_into(output, part)

        return self._give(job, outputs, opts)

    def _exchange(self, received, sent, received_lengths, sent_lengths):
        width = DATA_TYPES[sent.dtype][1]
        send = [length * width for length in sent_lengths]
        receive = [length * width for length in received_lengths]
        self._comm.call(
            "all_to_all", type_of(sent), memory(sent), memory(received), counts=send, receive_counts=receive
        )

    def alltoall_base(self, output, source, output_splits=(), input_splits=(), opts=None, timeout=None):
        """Sends rows of the input to each rank; without splits the rows are divided evenly."""
        output, source = dense(output), dense(source)
        same_type([output, source], "all_to_all_single")
        lengths = self._row_lengths(output, output_splits), self._row_lengths(source, input_splits)

        def job():
            received = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
            self._exchange(received, resolved(source).contiguous(), *lengths)
            if received is not output:
                store_into(output, received)

        return self._give(job, [output], opts)

    all_to_all_single = alltoall_base

    def _row_lengths(self, tensor, splits):
        rows = tensor.shape[0] if tensor.dim() else 0
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self._size:
                raise ValueError(f"{rows} rows cannot be divided among {self._size} ranks; give split sizes")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(f"the splits {list(splits)} are not {self._size} numbers whose sum is {rows}")
        return [split * row for split in splits]

    def barrier(self, opts=None, timeout=None):
        """Waits until every rank has called it."""
        return self._give(lambda: self._comm.call("barrier"), [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Waits until every rank has called it; rank 0 raises an error that names the missing ranks."""
        self._expect_open()
        limit = timeout or self._timeout
        self._barriers += 1
        prefix = f"monitored-barrier-{self._barriers}"
        if self._rank != 0:
            self._store.set(f"{prefix}/{self._rank}", "")
            try:
                self._store.wait([f"{prefix}/done"], limit)
            except dist.DistStoreError as error:
                raise PleachTimeout(
                    f"rank 0 has not ended the monitored barrier within {limit}", kind="timed out", rank=0,
                    operation="monitored barrier", waited_s=limit.total_seconds(),
                ) from error
            return
        missing = [rank for rank in range(1, self._size) if not self._has_come(f"{prefix}/{rank}", limit)]
        if missing:
            names = ", ".join(map(str, missing))
            raise PleachTimeout(
                f"rank 0: ranks {names} have not reached the monitored barrier within {limit}", kind="timed out",
                rank=missing[0], found_by=0, operation="monitored barrier", waited_s=limit.total_seconds(),
            )
        self._store.set(f"{prefix}/done", "")

    def _has_come(self, key, limit):
        try:
            self._store.wait([key], limit)
        except dist.DistStoreError:
            return False
        return True

    # ---- Messages

    def _message_lane(self, way, peer):
        if self._root(peer) == self._rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")
        with self._messages_lock:
            return self._messages.setdefault((way, peer), Lane(f"pleach-{way}-{peer}"))

    def send(self, tensors, peer, tag=0):
        """Sends a tensor to a rank that receives with the same tag."""
        self._expect_open()
        tensor = dense(only(as_list(tensors)))

        def job():
            data = resolved(tensor).contiguous()
            count = data.numel() * data.element_size()
            header = ctypes.create_string_buffer(HEADER.pack(tag, count), HEADER.size)
            self._comm.call("send", source=(ctypes.addressof(header), HEADER.size), root=peer)
            if count:
                self._comm.call("send", source=(data.data_ptr(), count), root=peer)

        return self._message_lane("send", peer).give(job, [tensor], True)

    def recv(self, tensors, peer, tag=0):
        """Receives a tensor from a rank that sends with the same tag."""
        self._expect_open()
        tensor = dense(only(as_list(tensors)))
        lane = self._message_lane("recv", peer)
        stash = self._stashes.setdefault(peer, {})

        def job():
            target = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
            self._receive(target, peer, tag, stash)
            if target is not tensor:
                store_into(tensor, target)

        work = lane.give(job, [tensor], True)
        work._source_rank = lambda: peer
        return work

    def _receive(self, target, peer, tag, stash):
        """Receives messages until one has the tag; the others are kept for later calls."""
        wanted = target.numel() * target.element_size()
        if stash.get(tag):
            data = stash[tag].pop(0)
        else:
            while True:
                header = ctypes.create_string_buffer(HEADER.size)
                self._comm.call("recv", target=(ctypes.addressof(header), HEADER.size), root=peer)
                found, count = HEADER.unpack(header.raw)
                is_wanted = found == tag and count == wanted
                data = target if is_wanted else torch.empty(count, dtype=torch.uint8)
                if count:
                    self._comm.call("recv", target=(data.data_ptr(), count), root=peer)
                if found == tag:
                    break
                stash.setdefault(found, []).append(data)
        if data is target:
            return
        if data.numel() != wanted:
            raise PleachError(
                f"rank {peer} has sent {data.numel()} bytes with tag {tag}, and rank {self._rank} receives {wanted}",
                kind="mismatch", rank=peer, found_by=self._rank, operation="recv",
            )
        ctypes.memmove(target.data_ptr(), data.data_ptr(), wanted)

    def recv_anysource(self, tensors, tag=0):
        """Receives a tensor from any rank; a group of two has one other rank."""
        if self._size != 2:
            raise PleachUnsupported("recv from any source is there in groups of 2 alone; name the source")
        return self.recv(tensors, 1 - self._rank, tag)

    # ---- Parts

    def split_group(self, new_ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """Makes a group of some ranks of this group; None on the others."""
        if self._rank not in new_ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self._store)
        part = type(self)(store, new_ranks.index(self._rank), len(new_ranks), timeout or self._timeout)
        part._set_group_name(group_name)
        part._set_group_desc(group_desc or "undefined")
        return part


def as_list(tensors):
    """Returns the list, or the tensor in a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def reduce_op(opts):
    """Returns the operation of options; a sum without any."""
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)
