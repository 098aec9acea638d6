"""Operations under way.

**Invariant:** a :class:`Lane` carries out its jobs in the order in which they were given, and a job
holds its tensors until the job has ended.
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

    def __init__(self, result: list[torch.Tensor], is_ended: bool = False) -> None:
        super().__init__()
        self._result = result
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
    waits anyway, else in a thread of the lane."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        with self._lock:
            if self._is_stopped:
                raise PleachError("the group has ended; call init_process_group or new_group again")
            is_idle = not is_async and self._waiting == 0 and self._busy.acquire(blocking=False)
            if not is_idle:
                work = Work(result)
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
        if not is_async:
            work.wait()
        return work

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
                run(*job)
            with self._lock:
                self._waiting -= 1
            # The thread waits for the next job with no reference to this one's tensors.
            del job


def run(job: Callable[[], None], work: Work) -> None:
    """Carries out a job and ends its work."""
    try:
        job()
    except BaseException as error:
        work.end(error)
    else:
        work.end()
