"""Ranks as processes of this host, for notebooks and tests."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from pleach._errors import Error, GroupError

#: Seconds that ranks have to end after the first failure.
_GRACE_S = 5.0


class RankError(Error):
    """A rank of ``launch`` has failed. ``rank`` is its number, ``__cause__`` its exception."""

    kind = "rank"


def launch(
    function: Callable[..., Any],
    n: int,
    *arguments: Any,
    start_method: str = "fork",
    timeout: float | None = None,
) -> list[Any]:
    """Calls ``function(group, *arguments)`` in n processes of this host; returns the results by rank.

    An exception in a rank ends all ranks and is raised here as the cause of a RankError with the
    rank. Results and exceptions are pickled. start_method: fork takes functions of notebooks;
    "spawn" begins with fresh interpreters and takes functions of modules. timeout: seconds for
    everything; then all ranks are killed and TimeoutError is raised.
    """
    if n < 1:
        raise ValueError(f"n is {n}; there is at least one rank")
    context: Any = multiprocessing.get_context(start_method)
    folder = tempfile.mkdtemp(prefix="pleach-")
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    try:
        for rank in range(n):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(sender, rank, n, folder, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes[receiver] = rank
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(pipes: dict[Any, int], processes: list[Any], timeout: float | None) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    failures: list[tuple[int, BaseException]] = []
    until = None if timeout is None else time.monotonic() + timeout
    while pipes:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = multiprocessing.connection.wait(list(pipes), left)
        if not ready:
            if failures:
                break
            raise TimeoutError(f"ranks {sorted(pipes.values())} have not ended in {timeout} s")
        for pipe in ready:
            receiver: Any = pipe
            rank = pipes.pop(receiver)
            is_ok: bool
            value: Any
            try:
                is_ok, value = receiver.recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                is_ok, value = False, RuntimeError(f"the process ended with exit code {code}")
            if is_ok:
                results[rank] = value
            else:
                failures.append((rank, value))
                grace = time.monotonic() + _GRACE_S
                until = grace if until is None else min(until, grace)
    if failures:
        # What other ranks say of the group is a consequence.
        rank, cause = min(failures, key=lambda failure: isinstance(failure[1], GroupError))
        error = RankError(f"rank {rank}: {type(cause).__name__}: {cause}")
        error.rank = rank
        raise error from cause
    return results


def _rank(
    pipe: Any, rank: int, n: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import pleach

    os.environ["PLEACH_RENDEZVOUS"] = "file://" + folder
    try:
        with pleach.join(rank=rank, world_size=n) as group:
            value = function(group, *arguments)
        pipe.send((True, value))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(text)
        pipe.send((False, error))
    pipe.close()
