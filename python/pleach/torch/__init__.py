"""The backend "pleach" of torch.distributed.

Where the package is installed, torch knows the backend; importing this module makes it known
elsewhere, and gives its exceptions::

    import pleach.torch
    torch.distributed.init_process_group("pleach")

The backend is a subclass of :class:`torch.distributed.ProcessGroup` over the groups of this package,
and works on CPU tensors. :func:`attach` trains a model by a training scheme, and :class:`ElasticTraining` in
a session, while processes come and go.
"""

from __future__ import annotations

from pleach_torch_backend import register as _register

from ._buffers import all_reduce_registered, buffer
from ._elastic import ElasticTraining
from ._errors import PleachError, PleachSchemeError, PleachTimeout, PleachUnsupported
from ._partial import PartialAllReduce, partial_all_reduce
from ._process_group import PleachProcessGroup
from ._scheme import Scheme, attach
from ._schemes import (
    Asynchronous,
    BoundedStaleness,
    BoundedVersions,
    DiLoCo,
    Downpour,
    DynamicStaleness,
    EagerSGD,
    ElasticAveraging,
    ElasticBSP,
    Gossip,
    GridAveraging,
    LocalSGD,
    Synchronous,
)

__all__ = [
    "Asynchronous",
    "BoundedStaleness",
    "BoundedVersions",
    "DiLoCo",
    "Downpour",
    "DynamicStaleness",
    "EagerSGD",
    "ElasticAveraging",
    "ElasticBSP",
    "ElasticTraining",
    "Gossip",
    "GridAveraging",
    "LocalSGD",
    "PartialAllReduce",
    "PleachError",
    "PleachProcessGroup",
    "PleachSchemeError",
    "PleachTimeout",
    "PleachUnsupported",
    "Scheme",
    "Synchronous",
    "all_reduce_registered",
    "attach",
    "buffer",
    "partial_all_reduce",
]

_register()
