"""The entry point ``torch.backends`` of the package pleach.

torch calls :func:`register` when it is imported, so a program names the backend and imports nothing of
the package. This module stands outside the package: importing it imports nothing of the package, so
``import torch`` does not load the native module. That is done when a group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend "pleach" for CPU tensors, once."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "PLEACH"):
        return
    import torch.distributed.distributed_c10d as c10d

    dist.Backend.register_backend("pleach", _create, extended_api=True, devices=["cpu"])
    # torch's flight recorder looks into the C++ backend of a group, and a group in Python has none.
    recorders: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add("pleach")


def _create(options: Any, _backend_options: Any = None) -> Any:
    from pleach.torch import PleachProcessGroup

    is_reconfigured = getattr(options, "enable_reconfigure", False)
    return PleachProcessGroup.create(
        options.store, options.group_rank, options.group_size, options.timeout, is_reconfigured
    )
