"""Messages between two ranks, with tags and from any source.

A message is a header (tag, length) and then its bytes. The messages to a peer have a lane, and the
messages from a peer have another, so no message waits for another peer's. Messages of a pair come in
the order in which they were sent, so a receive may meet a message with another tag. MPI calls it an
unexpected message; the inbox keeps it for a later call.

A receive from any source posts a receive of a header for each peer. Posted receives stay after the
call, and later calls take their headers. **Invariant:** the call that holds the lock of an
:class:`Inbox` is the only one that takes headers and bytes from that peer. At the end of the group
each rank tells the others of its posted receives, and the peers end these by a header without a
message.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ._comm import Call, Comm, translated
from ._errors import PleachError, PleachTimeout
from ._tensors import dense, flat_of, memory, store_into
from ._work import Lane, Work

import pleach

#: What goes before a message: its tag, its length in bytes.
HEADER = struct.Struct("<qQ")
#: The header that ends a posted receive: no message has this length.
NO_MESSAGE = HEADER.pack(0, 2**64 - 1)
#: Seconds between two looks for a message from any source, the first and the longest.
INTERVALS_S = (50e-6, 2e-3)
#: The deadline of the posted receive of a header, in seconds: the longest that pleach takes.
POSTED_S = 364 * 86_400.0


class Inbox:
    """The unexpected messages of a peer, and the posted receive of the next header."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.lock = threading.Lock()
        #: The bytes of unexpected messages, by tag. No call waits while the call holds their lock.
        self._unexpected: dict[int, deque[torch.Tensor]] = {}
        self._unexpected_lock = threading.Lock()
        #: The posted receive of a header, with the memory of the header.
        self._posted: tuple[Any, Any] | None = None

    def taken(self, tag: int) -> torch.Tensor | None:
        """Takes the oldest unexpected message of the tag, if any. It needs no lock of the inbox."""
        with self._unexpected_lock:
            messages = self._unexpected.get(tag)
            if messages is None:
                return None
            message = messages.popleft()
            if not messages:
                del self._unexpected[tag]
            return message

    def keep(self, tag: int, data: torch.Tensor) -> None:
        """Keeps an unexpected message for a later call."""
        with self._unexpected_lock:
            self._unexpected.setdefault(tag, deque()).append(data)

    def is_posted(self) -> bool:
        """Returns whether a receive of a header is posted."""
        return self._posted is not None

    def has_header(self, comm: Comm) -> bool:
        """Returns whether a header has come; posts a receive of one where none is posted."""
        if self._posted is None:
            header = ctypes.create_string_buffer(HEADER.size)
            call = Call("recv", target=(ctypes.addressof(header), HEADER.size), root=self.peer)
            self._posted = comm.start(POSTED_S, call, keep=header), header
        return bool(self._posted[0].done())

    def header(self, comm: Comm, limit_s: float | None) -> tuple[int, int]:
        """Waits for the next header, and returns tag and length."""
        if self._posted is None:
            header = ctypes.create_string_buffer(HEADER.size)
            comm.run(limit_s, "recv", target=(ctypes.addressof(header), HEADER.size), root=self.peer)
        else:
            pending, header = self._posted
            try:
                pending.wait(limit_s)
            except pleach.Error as error:
                raise translated(error) from error
            except TimeoutError as error:
                # As every deadline of a message with a named source, this one ends the group.
                comm.abort()
                raise PleachTimeout(
                    f"rank {self.peer} has sent nothing within {limit_s:g} s", kind="timed out", rank=self.peer,
                    operation="recv", waited_s=limit_s,
                ) from error
            self._posted = None
        tag, count = HEADER.unpack(header.raw)
        return tag, count

    def body(self, comm: Comm, limit_s: float | None, tag: int, count: int, target: torch.Tensor, wanted: int) -> torch.Tensor:
        """Receives the bytes of a message: into the target if they are those of the wanted tag."""
        is_target = tag == wanted and count == target.numel() * target.element_size()
        data = target if is_target else torch.empty(count, dtype=torch.uint8)
        if count:
            comm.run(limit_s, "recv", target=(data.data_ptr(), count), root=self.peer)
        return data

    def receive(self, comm: Comm, limit_s: float | None, target: torch.Tensor, tag: int) -> torch.Tensor:
        """Receives messages until one has the tag; the others are unexpected, and kept for later calls."""
        with self.lock:
            kept = self.taken(tag)
            while kept is None:
                found, count = self.header(comm, limit_s)
                data = self.body(comm, limit_s, found, count, target, tag)
                if found == tag:
                    return data
                self.keep(found, data)
            return kept


class Messages:
    """The messages of a rank of a group."""

    def __init__(self, comm: Comm, rank: int, size: int) -> None:
        self._comm = comm
        self._rank = rank
        self._lanes: dict[tuple[str, int | None], Lane] = {}
        self._lanes_lock = threading.Lock()
        self._is_stopped = False
        self._inboxes = {peer: Inbox(peer) for peer in range(size) if peer != rank}

    def _lane(self, way: str, peer: int | None) -> Lane:
        with self._lanes_lock:
            lane = self._lanes.get((way, peer))
            if lane is None:
                lane = self._lanes[way, peer] = Lane(f"pleach-{way}-{peer}")
                if self._is_stopped:
                    lane.stop()
            return lane

    def _expect_peer(self, peer: int) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")
        if peer not in self._inboxes:
            raise ValueError(f"rank {peer} is not in this group of {len(self._inboxes) + 1}")

    def send(self, tensor: torch.Tensor, peer: int, tag: int, limit_s: float | None) -> Work:
        """Sends a tensor to a rank that receives with the same tag."""
        self._expect_peer(peer)
        tensor = dense(tensor)

        def job() -> None:
            data = flat_of(tensor)
            count = data.numel() * data.element_size()
            header = ctypes.create_string_buffer(HEADER.pack(tag, count), HEADER.size)
            self._comm.run(limit_s, "send", source=(ctypes.addressof(header), HEADER.size), root=peer)
            if count:
                self._comm.run(limit_s, "send", source=(data.data_ptr(), count), root=peer)

        return self._lane("send", peer).give(job, [tensor], True)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, limit_s: float | None) -> Work:
        """Receives a tensor from a rank that sends with the same tag."""
        self._expect_peer(peer)
        inbox = self._inboxes[peer]

        def receive(target: torch.Tensor) -> None:
            self._deliver(inbox.receive(self._comm, limit_s, target, tag), target, peer, tag)

        work = self._lane("recv", peer).give(into(tensor, receive), [tensor], True)
        work._source_rank = lambda: peer
        return work

    def recv_any(self, tensor: torch.Tensor, tag: int, limit_s: float | None) -> Work:
        """Receives a tensor from whichever rank sends one with the tag first."""
        source: list[int] = []

        def receive(target: torch.Tensor) -> None:
            peer, data = self._receive_any(target, tag, limit_s)
            source.append(peer)
            self._deliver(data, target, peer, tag)

        work = self._lane("recv", None).give(into(tensor, receive), [tensor], True)
        work._source_rank = lambda: source[0]
        return work

    def _receive_any(self, target: torch.Tensor, tag: int, limit_s: float | None) -> tuple[int, torch.Tensor]:
        until = None if limit_s is None else time.monotonic() + limit_s
        interval_s = INTERVALS_S[0]
        while True:
            for inbox in self._inboxes.values():
                data = inbox.taken(tag)
                # A receive that names this peer has the lock until it has its message.
                if data is None and inbox.lock.acquire(blocking=False):
                    try:
                        data = self._taken_now(inbox, target, tag, limit_s)
                    finally:
                        inbox.lock.release()
                if data is not None:
                    return inbox.peer, data
            if until is not None and time.monotonic() >= until:
                raise PleachTimeout(
                    f"no rank has sent a message with tag {tag} within {limit_s:g} s", kind="timed out",
                    found_by=self._rank, operation="recv from any source", waited_s=limit_s,
                )
            time.sleep(interval_s)
            interval_s = min(2 * interval_s, INTERVALS_S[1])

    def _taken_now(self, inbox: Inbox, target: torch.Tensor, tag: int, limit_s: float | None) -> torch.Tensor | None:
        """Returns a message of the tag if one has come."""
        data = inbox.taken(tag)
        while data is None and inbox.has_header(self._comm):
            found, count = inbox.header(self._comm, limit_s)
            data = inbox.body(self._comm, limit_s, found, count, target, tag)
            if found != tag:
                inbox.keep(found, data)
                data = None
        return data

    def _deliver(self, data: torch.Tensor, target: torch.Tensor, peer: int, tag: int) -> None:
        if data is target:
            return
        wanted = target.numel() * target.element_size()
        if data.numel() != wanted:
            raise PleachError(
                f"rank {peer} has sent {data.numel()} bytes with tag {tag}, and rank {self._rank} receives {wanted}",
                kind="mismatch", rank=peer, found_by=self._rank, operation="recv",
            )
        ctypes.memmove(target.data_ptr(), data.data_ptr(), wanted)

    def stop(self) -> None:
        """Refuses later messages, and ends the threads after the messages so far."""
        with self._lanes_lock:
            self._is_stopped = True
            for lane in self._lanes.values():
                lane.stop()

    def join(self) -> None:
        """Waits until the threads have ended, after :meth:`stop`."""
        for lane in self._lanes.values():
            lane.join()

    def end_posted(self, limit_s: float) -> None:
        """Ends the posted receives, here and at peers; all ranks call it, after :meth:`stop`.

        Raises PleachError if that fails, after the end of each call.
        """
        size = len(self._inboxes) + 1
        if size == 1:
            return
        own = torch.zeros(size, dtype=torch.uint8)
        for peer, inbox in self._inboxes.items():
            own[peer] = inbox.is_posted()
        posted = torch.empty(size, size, dtype=torch.uint8)
        self._comm.run(limit_s, "all_gather", "uint8", memory(own), memory(posted))
        header = ctypes.create_string_buffer(NO_MESSAGE, HEADER.size)
        source = ctypes.addressof(header), HEADER.size
        calls = [Call("send", source=source, root=peer) for peer in self._inboxes if posted[peer, self._rank]]
        self._comm.run_all(limit_s, calls)
        for inbox in self._inboxes.values():
            if inbox.is_posted():
                inbox.header(self._comm, limit_s)


def into(tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Returns a job that receives into contiguous memory, and then stores the data in the tensor."""
    tensor = dense(tensor)

    def job() -> None:
        target = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        receive(target)
        if target is not tensor:
            store_into(tensor, target)

    return job
