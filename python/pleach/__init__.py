"""Collective communication over shared memory, TCP and RDMA.

    import numpy, pleach

    with pleach.join() as group:
        gradient = group.buffer(1000, "float32")   # registered: no copy in calls
        group.all_reduce(gradient, "avg")

``pleach.Session`` is a membership in a job whose processes come and go. ``pleach.Endpoint`` sends and
receives tensors by key between programs. ``pleach.SVC`` is a support
vector machine for scikit-learn. ``pleach run -n 4 python train.py`` starts four ranks on this host.
NumPy is imported when an array is made, not before. Every error is a ``pleach.Error``.
"""

from __future__ import annotations

import sys

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        "pleach does not support free-threaded builds of Python; use the build with the GIL"
    )

import atexit
import os
from typing import TYPE_CHECKING

from pleach import _native
from pleach._errors import (
    AbortedError,
    ArgumentError,
    ChangedError,
    ClosedError,
    DeadlineError,
    DivergedError,
    Error,
    ExchangeError,
    ExpelledError,
    ForkedError,
    GroupError,
    JoinError,
    LeftError,
    LossError,
    LostError,
    MismatchError,
    NoQuorumError,
    NothingGivenError,
    PeerUnavailableError,
    SessionError,
    StepError,
    TensorAbortedError,
    TensorNotFoundError,
    TensorTimeoutError,
    TooFewError,
)
from pleach._native import Endpoint, Group, Peer, Pending, PendingTensor, PremulSum, Registered, Trainer
from pleach._session import Attempt, Change, Session, Split, State, Verdict

if TYPE_CHECKING:
    from pleach._launch import RankError as RankError, launch as launch
    from pleach._svc import SVC as SVC

__all__ = [
    "AbortedError",
    "ArgumentError",
    "Attempt",
    "Change",
    "ChangedError",
    "ClosedError",
    "DeadlineError",
    "DivergedError",
    "Endpoint",
    "Error",
    "ExchangeError",
    "ExpelledError",
    "ForkedError",
    "Group",
    "GroupError",
    "JoinError",
    "LeftError",
    "LossError",
    "LostError",
    "MismatchError",
    "NoQuorumError",
    "NothingGivenError",
    "Peer",
    "PeerUnavailableError",
    "Pending",
    "PendingTensor",
    "PremulSum",
    "RankError",
    "Registered",
    "Session",
    "SessionError",
    "Split",
    "State",
    "StepError",
    "TensorAbortedError",
    "TensorNotFoundError",
    "TensorTimeoutError",
    "TooFewError",
    "Trainer",
    "Verdict",
    "join",
    "join_in_store",
    "launch",
]

__version__ = "0.1.0"


def join(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    join_timeout: float | None = None,
    fabric: str | None = None,
    reproducible: str | None = None,
) -> Group:
    """Meets the other ranks of this job and returns the group.

    The launcher of this process says who it is: ``pleach run``, torchrun, mpirun, mpiexec or srun;
    without one it is alone. ``rank`` and ``world_size`` together go before the launcher, and
    ``rendezvous`` (``tcp://HOST:PORT``, ``file:///DIR``, ``etcd://HOST:PORT/PREFIX``,
    ``etcds://HOST:PORT/PREFIX`` or ``c10d://HOST:PORT``) before ``PLEACH_RENDEZVOUS``.

    secret_file: the job's secret, in the place of ``PLEACH_SECRET_FILE``; several hosts need one.
    timeout: seconds that a call waits for other ranks, 60 by default. join_timeout: seconds that the
    ranks wait for each other here, 60 by default. fabric: auto, shm, tcp, shm+tcp, verbs or
    shm+verbs, the same on all ranks. reproducible: no, per-world-size or exact, the same on all
    ranks.

    Raises JoinError if the ranks do not meet, or the arguments or the environment say nothing clear.
    """
    return _native.join(
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        secret_file=secret_file,
        timeout=timeout,
        join_timeout=join_timeout,
        fabric=fabric,
        reproducible=reproducible,
    )


def join_in_store(
    store: _native.Store,
    rank: int,
    world_size: int,
    *,
    prefix: str = "pleach/",
    secret_file: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    join_timeout: float | None = None,
    fabric: str | None = None,
    reproducible: str | None = None,
) -> Group:
    """Meets the ranks that use the same keys of a store, as ``torch.distributed.TCPStore``.

    prefix: begins every key; no other group of the store has it. The store is kept and asked again
    when the group is split. The other arguments are those of ``join``.
    """
    return _native.join_in_store(
        store,
        rank,
        world_size,
        prefix=prefix,
        secret_file=secret_file,
        timeout=timeout,
        join_timeout=join_timeout,
        fabric=fabric,
        reproducible=reproducible,
    )


def __getattr__(name: str) -> object:
    # Needs multiprocessing, which takes long to import.
    if name in ("launch", "RankError"):
        from pleach import _launch

        return getattr(_launch, name)
    if name == "SVC":
        # Needs scikit-learn.
        from pleach._svc import SVC

        return SVC
    raise AttributeError(f"module 'pleach' has no attribute {name!r}")


_process = os.getpid()


def _leave_all() -> None:
    # Groups and endpoints of the parent are no matter of a forked child.
    if os.getpid() == _process:
        _native.close_all()
        _native.leave_all()


atexit.register(_leave_all)
