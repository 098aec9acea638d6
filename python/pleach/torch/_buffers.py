"""Tensors in registered memory, and the communication hook of DDP that works on them."""

# DDP compares the annotations of a hook with types, so they are not kept as texts here.

import ctypes
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ._comm import Comm
from ._errors import PleachUnsupported

#: By group, the tensors of its DDP buckets: a bucket keeps its tensor from step to step.
_of_buckets: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, torch.dtype], torch.Tensor]] = weakref.WeakKeyDictionary()


def allocate(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros in memory that is registered with a group as long as its storage lives."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    registered = comm.register(count * dtype.itemsize)
    memory = (ctypes.c_uint8 * registered.nbytes).from_address(registered.address)
    # torch keeps the array as long as the storage lives, and the array keeps the registration.
    memory._registered = registered  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def buffer(shape: Any, dtype: torch.dtype = torch.float32, group: Any = None) -> torch.Tensor:
    """Returns a tensor of zeros in registered memory: calls of the group on it, and on its contiguous
    parts, copy nothing.

    group: one of pleach, by default the whole world. Raises PleachUnsupported for a group of another
    backend.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    return allocate(_own(group)._comm, lengths, dtype)


def all_reduce_registered(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: the mean of the gradients, made in registered memory::

        model.register_comm_hook(None, pleach.torch.all_reduce_registered)

    group: one of pleach, by default the whole world. A bucket is copied to memory that stays
    registered from step to step, in place of being staged in pieces at each step. Raises
    PleachUnsupported for a group of another backend.
    """
    own = _own(group)
    gradient = bucket.buffer()
    buffers = _of_buckets.setdefault(own, {})
    key = bucket.index(), gradient.numel(), gradient.dtype
    if key not in buffers:
        buffers[key] = allocate(own._comm, gradient.shape, gradient.dtype)
    return own.all_reduce_of_copy(gradient, buffers[key]).get_future().then(lambda future: future.value()[0])


def _own(group: Any) -> Any:
    from ._process_group import PleachProcessGroup

    found = dist.group.WORLD if group is None else group
    if not isinstance(found, PleachProcessGroup):
        raise PleachUnsupported(f"{type(found).__name__} is no group of pleach; pass one that init_process_group or new_group made")
    return found
