"""Operations under way.

**Invariant:** a :class:`Lane` carries out its jobs in the order in which they were given, and a job
holds its tensors until the job has ended.

Callbacks of a future run in the thread of the lane, before its next job, or in that of the program if
it attaches them when the operation has ended. The collectives that a callback starts stand right
behind its own operation on all ranks, if it is attached before the program starts the next one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._errors import PleachError, PleachTimeout

#: Guards the futures of all works; nothing is waited for under it.
_futures = threading.Lock()


class Work(dist.Work):
    """An operation under way or ended."""

    def __init__(self, result: list[torch.Tensor], lane: Lane | None = None, is_ended: bool = False) -> None:
        super().__init__()
        self._result = result
        self._lane = lane
        self._is_ended = is_ended
        self._error: BaseException | None = None
        self._end_future: Any = None
        self._future: Any = None
        # Held until the end; a wait takes it and gives it back.
        self._under_way: threading.Lock | None = None
        if not is_ended:
            self._under_way = threading.Lock()
            self._under_way.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the operation, with an exception or without."""
        with _futures:
            self._error = error
            self._is_ended = True
            ended = self._end_future
        assert self._under_way is not None
        self._under_way.release()
        if ended is not None:
            ended.set_result(None)

    def _outcome(self, _future: Any = None) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end, at most `timeout` (a timedelta; 0 waits without limit).

        Raises the exception of the operation, or PleachTimeout; after the latter the operation goes on.
        """
        if not self._is_ended and self._lane is not None and self._lane.is_this_thread():
            # A callback waits for an operation of its own lane, whose jobs nobody else carries out.
            self._lane.carry_out_to(self)
        if not self._is_ended:
            limit = timeout.total_seconds() if timeout else 0
            assert self._under_way is not None
            if not self._under_way.acquire(timeout=min(limit, threading.TIMEOUT_MAX) if limit > 0 else -1):
                raise PleachTimeout(f"the operation has not ended within {limit:g} s; it goes on", waited_s=limit)
            self._under_way.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Waits for the end. Raises the exception of the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the operation has ended."""
        return self._is_ended

    def is_success(self) -> bool:
        """Returns whether the operation has ended without an error."""
        return self._is_ended and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the exception of the operation, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        return self._result

    def get_future(self) -> Any:
        """Returns a future of the output tensors; its ``wait`` raises the exception of the operation."""
        with _futures:
            if self._future is None:
                # Future.set_exception stores a value that only Python takes for an exception; an
                # exception of a callback is one for the C++ code of DDP too.
                self._end_future = torch.futures.Future()
                self._future = self._end_future.then(self._outcome)
                if self._is_ended:
                    self._end_future.set_result(None)
            return self._future


class Lane:
    """Carries out jobs one after the other: in the caller where nothing is under way and the caller
    waits anyway, else in a thread of the lane.

    nests: what a callback of this lane gives is carried out at once, before the jobs that wait. Else it
    waits behind them, and the callback may wait for it by :meth:`Work.wait` alone, not by its future.
    """

    def __init__(self, name: str, nests: bool = False) -> None:
        self._name = name
        self._nests = nests
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._busy = threading.Lock()
        # Guards the fields below; nothing is waited for under it.
        self._lock = threading.Lock()
        self._waiting = 0
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def give(self, job: Callable[[], None], result: list[torch.Tensor], is_async: bool) -> Work:
        """Starts `job`, a function, and returns its Work; a job that is not async has ended then.

        Raises the exception of a job that is not async, and PleachError after :meth:`stop`.
        """
        is_nested = self._nests and self.is_this_thread()
        with self._lock:
            if self._is_stopped:
                raise PleachError("the group has ended; call init_process_group or new_group again")
            is_idle = not is_async and self._waiting == 0 and self._busy.acquire(blocking=False)
            if not is_idle:
                work = Work(result, self)
            if not is_idle and not is_nested:
                self._waiting += 1
                self._jobs.put((job, work))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._carry_out, name=self._name, daemon=True)
                    self._thread.start()
        if is_idle:
            try:
                job()
            finally:
                self._busy.release()
            return Work(result, is_ended=True)
        if is_nested:
            run(job, work)
        if not is_async:
            work.wait()
        return work

    def is_this_thread(self) -> bool:
        """Whether the caller is a callback in the thread of this lane."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def carry_out_to(self, work: Work) -> None:
        """Carries out jobs until one of this lane has ended; called in the thread of the lane alone."""
        while not work.is_completed():
            job = self._jobs.get()
            assert job is not None, "the work of a lane is before its end"
            self._carry_out_one(*job)

    def stop(self) -> None:
        """Refuses later jobs, and ends the thread after the jobs so far."""
        with self._lock:
            self._is_stopped = True
            self._jobs.put(None)

    def join(self) -> None:
        """Waits until the thread has ended, after :meth:`stop`."""
        # The thread itself may let go of the last reference to a group.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _carry_out(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._busy:
                self._carry_out_one(*job)
            # The thread waits for the next job with no reference to this one's tensors.
            del job

    def _carry_out_one(self, job: Callable[[], None], work: Work) -> None:
        run(job, work)
        with self._lock:
            self._waiting -= 1


def run(job: Callable[[], None], work: Work) -> None:
    """Carries out a job and ends its work."""
    try:
        job()
    except BaseException as error:
        work.end(error)
    else:
        work.end()
