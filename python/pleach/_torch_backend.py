"""The backend of torch.distributed is registered; its code is imported when a group is made.

torch calls :func:`register` when it is imported, as the entry point ``torch.backends`` of the package
says, so a program names the backend and imports nothing of it.
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
