"""The process group: from c10d's calls to those of the package.

Each method checks its arguments, takes contiguous tensors (a copy where a tensor is not contiguous) and
gives a job to a lane: collectives have one lane, so that all ranks make them in one order; messages have
lanes of their own (:mod:`._messages`). The job is told how long it may wait: the time that the call
names, else the group's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._buffers import allocate
from ._comm import Call, Comm
from ._errors import PleachError, PleachTimeout, PleachUnsupported
from ._meeting import Meeting
from ._messages import Messages
from ._tensors import (
    DATA_TYPES,
    as_list,
    dense,
    flat_of,
    memory,
    only,
    overlap,
    reduce_op,
    reduction_of,
    same_lengths,
    same_type,
    seconds,
    store_into,
    type_of,
)
from ._work import Lane, Work

#: How long the end of a group waits for the other ranks, in seconds: as the package does.
CLOSE_S = 5.0
#: Tensors of at most so many bytes are reduced side by side, those of a coalesced call.
FUSED_BYTES_MAX = 64 << 10

#: What carries a call out on a group, and is told how long it may wait, in seconds.
Job = Callable[[Comm, float | None], None]


class PleachProcessGroup(dist.ProcessGroup):
    """A group of ranks; ``init_process_group("pleach")`` and ``new_group`` make it.

    A call raises ValueError or PleachUnsupported for arguments that cannot be right, before anything
    is sent, and PleachError after ``abort`` and ``shutdown``. Its Work raises PleachError if the call
    failed, PleachTimeout if a deadline passed. The first failure ends the group on all ranks.

    With ``init_process_group("pleach", enable_reconfigure=True)`` the group has no members until
    ``torch.distributed._reconfigure`` gives it some, and is given others by further calls of it, also after
    a failure.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, is_reconfigured: bool = False) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._closed: str | None = None
        self._name = ""
        self._description = "undefined"
        self._process = os.getpid()
        self._meeting = Meeting() if is_reconfigured else None
        if is_reconfigured:
            self._closed = "without members"
        else:
            self._open(seconds(timeout))

    def _open(self, limit_s: float | None) -> None:
        """Meets the ranks in the store."""
        self._comm = Comm(self._store, self._rank, self._size, limit_s)
        self._lane = Lane("pleach-torch", nests=True)
        self._messages = Messages(self._comm, self._rank, self._size)
        self._barriers = 0
        self._barrier_keys: list[str] = []
        self._closed = None

    @classmethod
    def create(
        cls, store: Any, rank: int, size: int, timeout: timedelta, is_reconfigured: bool = False
    ) -> PleachProcessGroup:
        """Makes a group of the ranks that meet in the store. Raises PleachError if they do not meet."""
        return cls(store, rank, size, timeout, is_reconfigured)

    # ---- What the group is

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return "pleach"

    def name(self) -> str:
        """Returns the name of the backend."""
        return "pleach"

    # c10d keeps these names in the C++ backend of a group, and a group in Python has none.

    def getGroupName(self) -> str:
        """Returns the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Sets the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Returns the description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Sets the description of the group."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def rank(self) -> int:
        """Returns the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    # C++ code asks these, and has the numbers of the beginning itself.
    getRank = rank
    getSize = size

    def get_group_store(self) -> Any:
        """Returns the store in which the ranks met."""
        return self._store

    @property
    def supports_splitting(self) -> bool:
        """Whether torch may make groups by :meth:`split_group`."""
        return True

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> PleachProcessGroup:
        if torch.device(device).type != "cpu":
            raise PleachUnsupported(f"the group works on cpu, not on {device}")
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long each later call waits for other ranks."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    # ---- Ends

    def abort(self) -> None:
        """Ends the work on all ranks; calls under way raise."""
        if self._closed is None and self._process == os.getpid():
            self._stop("aborted")
            self._comm.abort()

    def shutdown(self) -> None:
        """Leaves the group; later calls raise."""
        if self._closed is None and self._process == os.getpid():
            self._stop("destroyed")
            try:
                self._lane.join()
                self._messages.join()
                self._messages.end_posted(CLOSE_S)
            except PleachError:
                # The group has failed, and so have its posted receives.
                pass
            finally:
                self._comm.close()

    def _stop(self, how: str) -> None:
        """Refuses later calls; the threads end after the calls so far."""
        self._closed = how
        self._lane.stop()
        self._messages.stop()

    def __del__(self) -> None:
        if hasattr(self, "_messages"):
            self.shutdown()

    # ---- Other members

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group was made for :meth:`reconfigure`."""
        return self._meeting is not None

    def get_reconfigure_handle(self) -> str:
        """Returns what the other members need to meet this process."""
        return self._reconfigured().handle

    def reconfigure(self, opts: Any) -> Work:
        """Ends the group with the members that it has, and makes it of the processes of these handles.

        All of them call it. It returns when they have met. Raises ValueError for members that cannot be,
        PleachError if they do not meet; then the group has no members.
        """
        meeting = self._reconfigured()
        members, rank = meeting.ranked(opts.uuid, opts.handles)
        limit = opts.timeout or self._timeout
        if hasattr(self, "_lane"):
            if self._closed is None:
                # Calls under way end here, and on members that have not come so far.
                self._stop("without members")
                self._comm.abort()
            # Also after an abort, whose calls may not have ended.
            self._lane.join()
            self._messages.join()
            self._comm.close()
        self._store = meeting.store(opts.uuid, members, rank, limit)
        self._rank, self._size = rank, len(members)
        self._open(seconds(limit))
        return Work([], is_ended=True)

    def _reconfigured(self) -> Meeting:
        if self._process != os.getpid():
            self._expect_open()
        if self._meeting is None:
            raise PleachUnsupported("the group was made with its members; call init_process_group(enable_reconfigure=True)")
        return self._meeting

    # ---- From a call to a job

    def _expect_open(self) -> None:
        if self._process != os.getpid():
            raise PleachError(
                f"the group belongs to process {self._process}; a forked child must call init_process_group itself"
            )
        if self._closed is not None:
            remedy = "init_process_group or new_group again" if self._meeting is None else "torch.distributed._reconfigure"
            raise PleachError(f"the group is {self._closed}; call {remedy}")

    def _give(self, job: Job, result: list[torch.Tensor], opts: Any = None, timeout: timedelta | None = None) -> Work:
        self._expect_open()
        limit_s = seconds(timeout) or seconds(getattr(opts, "timeout", None)) or seconds(self._timeout)
        # Of the members of now: a call of another thread may begin behind a change of them.
        comm = self._comm
        # A call that waits anyway raises here, so that C++ callers see the exception too.
        return self._lane.give(lambda: job(comm, limit_s), result, getattr(opts, "asyncOp", True))

    def _root(self, root: int) -> int:
        if not 0 <= root < self._size:
            raise ValueError(f"rank {root} is not in this group of {self._size}")
        return root

    def _one_for_each_rank(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        if len(tensors) != self._size:
            raise ValueError(f"there are {len(tensors)} {what}, not {self._size}, one for each rank")
        return [dense(tensor) for tensor in tensors]

    # ---- Collectives

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replaces the tensor of every rank by that of ``opts.rootRank``."""
        tensor = dense(only(as_list(tensors)))
        root = self._root(opts if isinstance(opts, int) else getattr(opts, "rootRank", 0))

        def job(comm: Comm, limit_s: float | None) -> None:
            data = flat_of(tensor)
            comm.run(limit_s, "broadcast", type_of(data), memory(data), memory(data), root=root)
            if data is not tensor:
                store_into(tensor, data)

        return self._give(job, [tensor], opts, timeout)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Replaces the tensor of every rank by the reduction of all; of a sparse tensor by the sum."""
        tensor = only(as_list(tensors))
        if tensor.layout != torch.strided:
            return self._allreduce_sparse(tensor, opts, timeout)
        tensor = dense(tensor)
        op = reduction_of(reduce_op(opts), tensor.dtype)

        def job(comm: Comm, limit_s: float | None) -> None:
            data = flat_of(tensor)
            place = memory(data)
            comm.run(limit_s, "all_reduce", type_of(data), place, place, op)
            if data is not tensor:
                store_into(tensor, data)

        return self._give(job, [tensor], opts, timeout)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Replaces each tensor of every rank by the reduction of all."""
        targets = [dense(tensor) for tensor in tensors]
        for dtype in {tensor.dtype for tensor in targets}:
            reduction_of(reduce_op(opts), dtype)

        def job(comm: Comm, limit_s: float | None) -> None:
            calls, copies = [], []
            for parts in fused(targets):
                data = flat_of(parts[0]) if len(parts) == 1 else torch.cat([flat_of(part).view(-1) for part in parts])
                if data is not parts[0]:
                    copies.append((parts, data))
                op = reduction_of(reduce_op(opts), data.dtype)
                calls.append(Call("all_reduce", type_of(data), memory(data), memory(data), op))
            comm.run_all(limit_s, calls)
            for parts, data in copies:
                for part, block in zip(parts, data.view(-1).split([part.numel() for part in parts])):
                    store_into(part, block)

        return self._give(job, targets, opts)

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any, timeout: timedelta | None) -> Work:
        """Gathers indices and values of all ranks, and adds them."""
        name = getattr(reduce_op(opts), "op", reduce_op(opts)).name
        if name != "SUM" or tensor.layout != torch.sparse_coo:
            raise PleachUnsupported(f"of sparse tensors there is the sum of torch.sparse_coo, not {name} of {tensor.layout}")
        dense(tensor.detach()._values())

        def job(comm: Comm, limit_s: float | None) -> None:
            own = tensor.detach().coalesce()
            indices, values = own.indices().t().contiguous(), own.values().contiguous()
            lengths = torch.empty(self._size, dtype=torch.int64)
            length = torch.tensor([values.shape[0]])
            comm.run(limit_s, "all_gather", "int64", memory(length), memory(lengths))
            all_indices = self._gather_rows(comm, limit_s, indices, lengths.tolist())
            all_values = self._gather_rows(comm, limit_s, values, lengths.tolist())
            total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)

        return self._give(job, [tensor], opts, timeout)

    def _gather_rows(self, comm: Comm, limit_s: float | None, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        row = rows.shape[1:].numel()
        width = DATA_TYPES[rows.dtype][1]
        gathered = rows.new_empty((sum(lengths), *rows.shape[1:]))
        counts = [length * row * width for length in lengths]
        comm.run(limit_s, "all_gather", type_of(rows), memory(rows), memory(gathered), counts=counts)
        return gathered

    def reduce(self, tensors: Any, opts: Any = None, *further: Any) -> Work:
        """Replaces the tensor of the root by the reduction of all."""
        tensor = dense(only(as_list(tensors)))
        root = self._root(opts.rootRank)
        op = reduction_of(opts.reduceOp, tensor.dtype)

        def job(comm: Comm, limit_s: float | None) -> None:
            data = flat_of(tensor)
            comm.run(limit_s, "reduce", type_of(data), memory(data), memory(data), op, root=root)
            if root == self._rank and data is not tensor:
                store_into(tensor, data)

        return self._give(job, [tensor], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Stores the tensor of every rank in the list of every rank."""
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs]
        return self.allgather_coalesced(outputs, as_list(inputs), opts, timeout)

    def allgather_coalesced(
        self, output_lists: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Stores each tensor of every rank in the list of that number."""
        if len(output_lists) != len(inputs):
            raise ValueError(f"{len(output_lists)} output lists for {len(inputs)} inputs")
        pairs = []
        for outputs, source in zip(output_lists, inputs):
            outputs, source = self._one_for_each_rank(outputs, "output tensors"), dense(source)
            same_type([*outputs, source], "all_gather")
            same_lengths(outputs, source)
            pairs.append((outputs, source))

        def job(comm: Comm, limit_s: float | None) -> None:
            gathered = [source.new_empty(self._size * source.numel()) for _, source in pairs]
            self._gather_all(comm, limit_s, [source for _, source in pairs], gathered)
            for (outputs, _), flat in zip(pairs, gathered):
                for output, part in zip(outputs, flat.view(self._size, -1)):
                    store_into(output, part)

        return self._give(job, [tensor for outputs, _ in pairs for tensor in outputs], opts, timeout)

    def _gather_all(self, comm: Comm, limit_s: float | None, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        calls = []
        flats = [flat_of(source) for source in sources]
        for number, flat in enumerate(flats):
            # A source that is a part of its output is copied, as pleach takes no memory twice.
            if overlap(flat, targets[number]):
                flats[number] = flat = flat.clone()
            calls.append(Call("all_gather", type_of(flat), memory(flat), memory(targets[number])))
        comm.run_all(limit_s, calls)

    def allgather_into_tensor_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Stores each tensor of every rank, in rank order, in the output of that number."""
        pairs = [(dense(output), dense(source)) for output, source in zip(outputs, inputs, strict=True)]
        for output, source in pairs:
            same_type([output, source], "all_gather_into_tensor")
            if output.numel() != source.numel() * self._size:
                raise ValueError(f"the output has {output.numel()} elements, not {source.numel() * self._size}")

        def job(comm: Comm, limit_s: float | None) -> None:
            flats = [contiguous_place(output) for output, _ in pairs]
            self._gather_all(comm, limit_s, [source for _, source in pairs], flats)
            for (output, _), flat in zip(pairs, flats):
                if flat is not output:
                    store_into(output, flat)

        return self._give(job, [output for output, _ in pairs], opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Stores the tensor of every rank in the output, in rank order."""
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *further: Any) -> Work:
        """Stores the tensor of every rank in the list of the root."""
        source = dense(only(as_list(inputs)))
        root = self._root(opts.rootRank)
        targets = self._one_for_each_rank(outputs[0], "output tensors") if root == self._rank else []
        same_type([*targets, source], "gather")
        same_lengths(targets, source)

        def job(comm: Comm, limit_s: float | None) -> None:
            data = flat_of(source)
            flat = data.new_empty(self._size * data.numel() if targets else 0)
            comm.run(limit_s, "gather", type_of(data), memory(data), memory(flat), root=root)
            for target, part in zip(targets, flat.view(self._size, -1) if targets else ()):
                store_into(target, part)

        return self._give(job, targets, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *further: Any) -> Work:
        """Stores tensor ``r`` of the root's list in the output of rank ``r``."""
        output = dense(only(as_list(outputs)))
        root = self._root(opts.rootRank)
        sources = self._one_for_each_rank(inputs[0], "input tensors") if root == self._rank else []
        same_type([*sources, output], "scatter")
        same_lengths(sources, output)

        def job(comm: Comm, limit_s: float | None) -> None:
            flat = torch.cat([flat_of(source).view(-1) for source in sources]) if sources else None
            part = torch.empty(output.numel(), dtype=output.dtype)
            place = (0, 0) if flat is None else memory(flat)
            comm.run(limit_s, "scatter", type_of(part), place, memory(part), root=root)
            store_into(output, part)

        return self._give(job, [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *further: Any) -> Work:
        """Stores the reduction of tensor ``r`` of every rank's list in the output of rank ``r``."""
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs]
        output = dense(only(as_list(outputs)))
        parts = self._one_for_each_rank(only(inputs), "input tensors")
        same_type([*parts, output], "reduce_scatter")
        same_lengths(parts, output)
        op = reduction_of(reduce_op(opts), output.dtype)

        def job(comm: Comm, limit_s: float | None) -> None:
            flat = torch.cat([flat_of(part).view(-1) for part in parts])
            self._scatter_reduced(comm, limit_s, [(output, flat, op)])

        return self._give(job, [output], opts)

    def _scatter_reduced(self, comm: Comm, limit_s: float | None, jobs: list[tuple[torch.Tensor, torch.Tensor, Any]]) -> None:
        calls, parts = [], []
        for output, flat, op in jobs:
            part = contiguous_place(output)
            # The input of a caller is never changed, also where the output is a part of it.
            if overlap(part, flat):
                part = torch.empty(output.shape, dtype=output.dtype)
            parts.append(part)
            calls.append(Call("reduce_scatter", type_of(part), memory(flat), memory(part), op))
        comm.run_all(limit_s, calls)
        for (output, _, _), part in zip(jobs, parts):
            if part is not output:
                store_into(output, part)

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Stores block ``r`` of the reduction of each input in the output of that number of rank ``r``."""
        pairs = [(dense(output), dense(source)) for output, source in zip(outputs, inputs, strict=True)]
        for output, source in pairs:
            same_type([output, source], "reduce_scatter_tensor")
            if source.numel() != output.numel() * self._size:
                raise ValueError(f"the input has {source.numel()} elements, not {output.numel() * self._size}")
        ops = [reduction_of(reduce_op(opts), output.dtype) for output, _ in pairs]

        def job(comm: Comm, limit_s: float | None) -> None:
            jobs = [(output, flat_of(source), op) for (output, source), op in zip(pairs, ops)]
            self._scatter_reduced(comm, limit_s, jobs)

        return self._give(job, [output for output, _ in pairs], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Stores block ``r`` of the reduction of the inputs in the output of rank ``r``."""
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Sends tensor ``r`` of the list to rank ``r``."""
        targets = self._one_for_each_rank(outputs, "output tensors")
        sources = self._one_for_each_rank(inputs, "input tensors")
        same_type([*targets, *sources], "all_to_all")
        lengths = [tensor.numel() for tensor in targets], [tensor.numel() for tensor in sources]

        def job(comm: Comm, limit_s: float | None) -> None:
            flat = torch.cat([flat_of(tensor).view(-1) for tensor in sources])
            received = torch.empty(sum(lengths[0]), dtype=flat.dtype)
            self._exchange(comm, limit_s, received, flat, *lengths)
            for target, part in zip(targets, received.split(lengths[0])):
                store_into(target, part)

        return self._give(job, targets, opts, timeout)

    def _exchange(
        self, comm: Comm, limit_s: float | None, received: torch.Tensor, sent: torch.Tensor, received_lengths: list[int], sent_lengths: list[int]
    ) -> None:
        width = DATA_TYPES[sent.dtype][1]
        send = [length * width for length in sent_lengths]
        receive = [length * width for length in received_lengths]
        if overlap(received, sent):
            sent = sent.clone()
        comm.run(
            limit_s, "all_to_all", type_of(sent), memory(sent), memory(received), counts=send, receive_counts=receive
        )

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Any = (), input_splits: Any = (), opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Sends rows of the input to each rank; without splits the rows are divided evenly."""
        output, source = dense(output), dense(source)
        same_type([output, source], "all_to_all_single")
        lengths = self._row_lengths(output, output_splits), self._row_lengths(source, input_splits)

        def job(comm: Comm, limit_s: float | None) -> None:
            received = contiguous_place(output)
            self._exchange(comm, limit_s, received, flat_of(source), *lengths)
            if received is not output:
                store_into(output, received)

        return self._give(job, [output], opts, timeout)

    all_to_all_single = alltoall_base

    def _row_lengths(self, tensor: torch.Tensor, splits: Any) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self._size:
                raise ValueError(f"{rows} rows cannot be divided among {self._size} ranks; give split sizes")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(f"the splits {list(splits)} are not {self._size} numbers whose sum is {rows}")
        return [split * row for split in splits]

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Waits until every rank has called it."""
        return self._give(lambda comm, limit_s: comm.run(limit_s, "barrier"), [], opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until every rank has called it; rank 0 raises a PleachTimeout that names all missing ranks.

        All ranks have one deadline, so ``wait_all_ranks`` changes nothing. The group works on afterwards.
        """
        self._expect_open()
        limit = timeout or self._timeout
        self._barriers += 1
        prefix = f"monitored-barrier-{self._barriers}"
        if self._rank != 0:
            self._store.set(f"{prefix}/{self._rank}", "")
            if self._absent([f"{prefix}/done"], limit):
                raise PleachTimeout(
                    f"rank 0 has not ended the monitored barrier within {limit}", kind="timed out", rank=0,
                    operation="monitored barrier", waited_s=limit.total_seconds(),
                )
            return
        keys = [f"{prefix}/{rank}" for rank in range(1, self._size)]
        missing = [rank + 1 for rank in self._absent(keys, limit)]
        if missing:
            self._barrier_keys += keys
            names = ", ".join(map(str, missing))
            raise PleachTimeout(
                f"rank 0: ranks {names} have not reached the monitored barrier within {limit}", kind="timed out",
                rank=missing[0], found_by=0, operation="monitored barrier", waited_s=limit.total_seconds(),
            )
        self._store.set(f"{prefix}/done", "")
        # Every rank has reached this barrier, so no rank looks for a key of an earlier one.
        for key in self._barrier_keys:
            self._store.delete_key(key)
        self._barrier_keys = [*keys, f"{prefix}/done"]

    def _absent(self, keys: list[str], limit: timedelta) -> list[int]:
        """Waits for keys of the store, and returns the places of those that have not come within the limit."""
        if not keys:
            return []
        try:
            self._store.wait(keys, limit)
        except dist.DistStoreError:
            return [place for place, key in enumerate(keys) if not self._store.check([key])]
        return []

    # ---- Registered memory

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Returns whether :meth:`allocate_tensor` takes the device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
        """Returns a tensor in registered memory; FSDP2 asks for it where it is told to."""
        self._expect_open()
        if not self.supports_tensor_alloc(device):
            raise PleachUnsupported(f"registered memory is on cpu, not on {device}")
        return allocate(self._comm, (size,), dtype)

    def all_reduce_of_copy(self, source: torch.Tensor, target: torch.Tensor) -> Work:
        """Starts to copy a tensor, if it is another one, and to replace the copy by the mean of all ranks'."""
        op = reduction_of(dist.ReduceOp.AVG, target.dtype)

        def job(comm: Comm, limit_s: float | None) -> None:
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            comm.run(limit_s, "all_reduce", type_of(target), memory(target), memory(target), op)

        return self._give(job, [target])

    # ---- Messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank that receives with the same tag."""
        self._expect_open()
        return self._messages.send(only(as_list(tensors)), peer, tag, seconds(self._timeout))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Receives a tensor from a rank that sends with the same tag."""
        self._expect_open()
        return self._messages.recv(only(as_list(tensors)), peer, tag, seconds(self._timeout))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives a tensor from whichever rank sends one with the tag first.

        Its PleachTimeout leaves the group as it is.
        """
        self._expect_open()
        return self._messages.recv_any(only(as_list(tensors)), tag, seconds(self._timeout))

    # ---- Parts

    def split_group(
        self, new_ranks: list[int], timeout: timedelta | None = None, opts: Any = None, group_name: str | None = None,
        group_desc: str | None = None, device_types: Any = None,
    ) -> PleachProcessGroup | None:
        """Makes a group of some ranks of this group; None on the others. Raises PleachError if they do not meet."""
        self._expect_open()
        if self._rank not in new_ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self._store)
        part = type(self)(store, new_ranks.index(self._rank), len(new_ranks), timeout or self._timeout)
        part.setGroupName(group_name or "")
        part.setGroupDesc(group_desc or "undefined")
        return part


def contiguous_place(output: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if its elements lie in order, else memory for as many."""
    return output if output.is_contiguous() and not (output.is_conj() or output.is_neg()) else torch.empty(output.shape, dtype=output.dtype)


def fused(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors as lists: short ones of a type together, long ones alone."""
    lists: list[list[torch.Tensor]] = []
    short: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() > FUSED_BYTES_MAX:
            lists.append([tensor])
        elif tensor.dtype in short:
            short[tensor.dtype].append(tensor)
        else:
            short[tensor.dtype] = [tensor]
            lists.append(short[tensor.dtype])
    return lists
