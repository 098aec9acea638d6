"""The entry point ``torch.backends`` of the package pleach.

torch calls :func:`register` when it is imported, so a program names the backend and imports nothing of
the package. This module stands outside the package: importing it imports nothing of the package, so
``import torch`` does not load the native module. That is done when a group is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def register() -> None:
    """Registers the backend "pleach" for CPU tensors, once."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "PLEACH"):
        return
    import torch.distributed.distributed_c10d as c10d

    dist.Backend.register_backend("pleach", _create, devices=["cpu"])
    # torch's flight recorder looks into the C++ backend of a group, and a group in Python has none.
    recorders: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add("pleach")


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from pleach.torch import PleachProcessGroup

    return PleachProcessGroup.create(store, rank, size, timeout)
