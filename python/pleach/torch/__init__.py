"""The backend "pleach" of torch.distributed.

Importing this module registers the backend for CPU tensors::

    import pleach.torch
    torch.distributed.init_process_group("pleach")

The backend is a subclass of :class:`torch.distributed.ProcessGroup` over the groups of this package.
"""

import torch.distributed as _dist
import torch.distributed.distributed_c10d as _c10d

from ._errors import PleachError, PleachTimeout, PleachUnsupported
from ._process_group import PleachProcessGroup

__all__ = ["PleachError", "PleachProcessGroup", "PleachTimeout", "PleachUnsupported"]

if not hasattr(_dist.Backend, "PLEACH"):
    _dist.Backend.register_backend("pleach", PleachProcessGroup.create, devices=["cpu"])
    # torch's flight recorder looks into the C++ backend of a group, and a group in Python has none.
    getattr(_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("pleach")
