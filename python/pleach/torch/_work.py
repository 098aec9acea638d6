"""Operations under way.

**Invariant:** a :class:`Lane` carries out its jobs in the order in which they were given, and a job
holds its tensors until the job has ended.
"""

import queue
import threading

import torch
import torch.distributed as dist

from ._errors import PleachTimeout


class Work(dist.Work):
    """An operation under way or ended."""

    def __init__(self, result):
        super().__init__()
        self._result = result
        self._ended = threading.Event()
        self._error = None
        self._end_future = self._future = None
        self._lock = threading.Lock()

    def end(self, error=None):
        """Ends the operation, with an exception or without."""
        with self._lock:
            self._error = error
            self._ended.set()
            ended = self._end_future
        if ended is not None:
            ended.set_result(None)

    def _outcome(self, _future=None):
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout=None):
        """Waits for the end, at most `timeout` (a timedelta; 0 waits without limit).

        Raises the exception of the operation, or PleachTimeout; after the latter the operation goes on.
        """
        limit = timeout.total_seconds() if timeout else 0
        if not self._ended.wait(limit if limit > 0 else None):
            raise PleachTimeout(f"the operation has not ended within {limit:g} s; it goes on", waited_s=limit)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self):
        """Waits for the end."""
        self.wait()

    def is_completed(self):
        """Returns whether the operation has ended."""
        return self._ended.is_set()

    def is_success(self):
        """Returns whether the operation has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self):
        """Returns the exception of the operation, or None."""
        return self._error

    def result(self):
        """Returns the output tensors."""
        return self._result

    def get_future(self):
        """Returns a future of the output tensors."""
        with self._lock:
            if self._future is None:
                # Future.set_exception stores a value that only Python takes for an exception; an
                # exception of a callback is one for the C++ code of DDP too.
                self._end_future = torch.futures.Future()
                self._future = self._end_future.then(self._outcome)
                if self._ended.is_set():
                    self._end_future.set_result(None)
            return self._future


class Lane:
    """Carries out jobs one after the other: in the caller where nothing is under way and the caller
    waits anyway, else in a thread of the lane."""

    def __init__(self, name):
        self._name = name
        self._jobs = queue.SimpleQueue()
        self._busy = threading.Lock()
        self._waiting = 0
        self._count = threading.Lock()
        self._thread = None

    def give(self, job, result, is_async):
        """Starts `job`, a function, and returns its Work."""
        work = Work(result)
        if not is_async:
            with self._count:
                is_idle = self._waiting == 0 and self._busy.acquire(blocking=False)
            if is_idle:
                try:
                    run(job, work)
                finally:
                    self._busy.release()
                return work
        with self._count:
            self._waiting += 1
            self._jobs.put((job, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_out, name=self._name, daemon=True)
                self._thread.start()
        return work

    def drain(self):
        """Waits until every job so far has ended."""
        if self._thread is not None:
            self.give(lambda: None, [], True)._ended.wait()

    def stop(self):
        """Ends the thread after the jobs so far."""
        if self._thread is not None:
            self._jobs.put(None)

    def _carry_out(self):
        while (job := self._jobs.get()) is not None:
            with self._busy:
                run(*job)
            with self._count:
                self._waiting -= 1
            # The thread waits for the next job with no reference to this one's tensors.
            del job


def run(job, work):
    """Carries out a job and ends its work."""
    try:
        job()
    except BaseException as error:
        work.end(error)
    else:
        work.end()
